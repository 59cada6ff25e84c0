"""Interception: capture for agents that take no base URL.

An agent gets a proxy address (`HTTPS_PROXY`) whose password is its session token, and a CA certificate. Calls to the
providers' hosts end at the capture gateway, an allow-list of hosts is let through untouched, everything else is refused
and recorded. `launch` starts and ends the proxy, `environment` says what an agent is given, `providers` which hosts are
whose; `addon` is the proxy itself and runs in an environment of its own. Imports of this package stay light.
"""

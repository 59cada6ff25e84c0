"""What an agent is given so that its calls can be intercepted: variables and certificate files.

Owns which variable each kind of client reads. Does not start anything (`launch`) nor put files into a sandbox: whoever
runs the agent does, and says under which paths they are there. Called by `launch` and by whoever runs an agent.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

# Added to the client's own roots by whoever reads these: our certificate alone is enough.
EXTENDING_VARIABLES = ("NODE_EXTRA_CA_CERTS", "DENO_CERT")
# These replace the client's roots; without the public ones an allowed host could not be verified any more.
REPLACING_VARIABLES = (
    "SSL_CERT_FILE",  # OpenSSL, Python's ssl, httpx, Go, rustls-native-certs
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "CODEX_CA_CERTIFICATE",
    "GIT_SSL_CAINFO",
    "PIP_CERT",
    "AWS_CA_BUNDLE",
    "CARGO_HTTP_CAINFO",
    "NIX_SSL_CERT_FILE",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
)
_PROXY_VARIABLES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY")
_SYSTEM_ROOTS = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Alpine
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora
    "/etc/ssl/ca-bundle.pem",  # openSUSE
    "/etc/ssl/cert.pem",
)


def agent_env(proxy_url: str, token: str, ca_certificate: str, ca_bundle: str) -> dict[str, str]:
    """The variables that send an agent's traffic through the proxy at `proxy_url` as the session of `token`.

    `ca_certificate` (the proxy's own, one PEM certificate) and `ca_bundle` (that and the public roots) are paths *as
    the agent sees them*. The agent also wants some key of its provider in its usual variable; any text will do, it is
    replaced on the way.
    """
    parts = urlsplit(proxy_url)
    with_token = urlunsplit(parts._replace(netloc=f"x:{quote(token, safe='')}@{parts.netloc}"))
    env = dict.fromkeys(EXTENDING_VARIABLES, ca_certificate) | dict.fromkeys(REPLACING_VARIABLES, ca_bundle)
    for name in _PROXY_VARIABLES:
        env[name] = env[name.lower()] = with_token
    # An agent's own servers (a language server, an app under test) are on its side of the proxy.
    env["NO_PROXY"] = env["no_proxy"] = "localhost,127.0.0.1,::1"
    env["NODE_USE_ENV_PROXY"] = "1"  # Node's own fetch and http ignore the proxy variables without it
    return env


def public_roots() -> str:
    """The certificates this machine trusts, as PEM; "" when it has none."""
    for name in (ssl.get_default_verify_paths().cafile, *_SYSTEM_ROOTS):
        if name is not None and Path(name).is_file():
            return Path(name).read_text(encoding="utf-8", errors="replace")
    try:
        import certifi
    except ImportError:
        return ""
    return Path(certifi.where()).read_text(encoding="utf-8")

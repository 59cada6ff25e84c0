"""Environments that speak the Open Reward Standard (ORS), as `loops.base.Environment` and as TRL's three arguments.

Owns all that is known of the protocol. `environment` and `episode` are the contract; `session` is one session of a
server over `wire`; `listing` asks for tasks; `blocks` are what tools and prompts say; `credentials` are keys and
secrets; `spec` is the synchronous way.

The official SDK (`openreward`) lists tasks and knows the platform's addresses and secrets. Its session is not used: it
runs a call again whose stream was cut before the server named the run, it takes away spaces at the borders of the
pieces that a long result comes in, it takes a lost session's 404 for an old server without task tools, and after a
tool that raised it gives up a session which is still good.
"""

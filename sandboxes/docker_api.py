"""Reaching a Docker engine: one way to connect, and one way to say in a line why a call failed.

Owns addresses that need more than a URL (TLS settings from Docker's environment variables, ssh through the system's
own client). What is asked of the engine is the callers' business: `docker`, `docker_images`, `docker_network` and
`docker_reaping`.
"""

from __future__ import annotations

import docker
import requests
from docker.errors import APIError, DockerException
from docker.utils import kwargs_from_env

# Whatever the SDK raises when a call fails: its own errors, and those of the HTTP library below it.
ENGINE_ERRORS = (DockerException, requests.RequestException, OSError)


def connect(address: str, *, timeout_s: float = 60.0, connections: int = 16) -> docker.APIClient:
    """A client of the engine at `address` that has answered once. Raises one of `ENGINE_ERRORS`.

    `timeout_s` bounds each wait for an answer, `connections` how many calls run at the same time.
    """
    tls = kwargs_from_env().get("tls", False) if address.startswith(("tcp://", "https://")) else False
    return docker.APIClient(
        base_url=address,
        timeout=timeout_s,
        tls=tls,
        max_pool_size=connections,
        use_ssh_client=address.startswith("ssh://"),
    )


def reason(error: Exception) -> str:
    """Why a call failed, in one line: the engine's own words when it answered."""
    if isinstance(error, APIError):
        text = error.explanation or str(error)
        text = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    else:
        text = str(error) or type(error).__name__
        if "No such file or directory" in text or "Connection refused" in text:
            text = "nobody listens there"
        elif "Permission denied" in text:
            text = "permission denied; your user may not use it"
    return " ".join(text.split())[:300]


def is_absent(error: Exception) -> bool:
    """Whether the engine says that the thing does not exist (any more)."""
    return isinstance(error, APIError) and error.status_code == 404

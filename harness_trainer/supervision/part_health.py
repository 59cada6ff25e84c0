"""The health check of a container with a part host: `python -m harness_trainer.supervision.part_health --socket FILE`.

Owns the host's state files, which lie in the container's own temp folder: a volume would show another container's. Run
by Docker every few seconds, so it imports next to nothing.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

_ANSWER_S = 5.0


def state_file(socket_path: Path) -> Path:
    """There while a part runs."""
    return Path(tempfile.gettempdir()) / f"{socket_path.stem}.part.json"


def host_file(state: Path) -> Path:
    """There while the host listens. (A connection would have to wait as long as a part runs.)"""
    return state.with_suffix(".host")


def check(socket_path: Path, url: str | None, *, state: Path | None = None) -> str | None:
    """What is wrong with this container, None = nothing. Once `url` has answered it must go on, while the part runs."""
    state = state or state_file(socket_path)
    if not host_file(state).exists():
        return f"nobody listens at {socket_path} yet"
    try:
        pid = json.loads(state.read_text())["pid"]
    except (OSError, ValueError, KeyError):
        return None  # no part was ordered yet
    answered = state.with_suffix(".answered")
    if url is None or _answers(url):
        answered.write_text(str(pid))
        return None
    before = answered.exists() and answered.read_text() == str(pid)
    return f"{url} does not answer any more" if before else None  # else it still loads


def _answers(url: str) -> bool:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_ANSWER_S)
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().status < 400
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="part_health", description="Whether the part host, and its part, are well.")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--url", help="what the part answers at")
    args = parser.parse_args(argv)
    problem = check(args.socket, args.url)
    print(problem or "ok")
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main())

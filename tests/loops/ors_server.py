"""Starts ORS servers for the tests, each as a process on a free port of loopback (`ors_environments`, or examples)."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

SERVER = Path(__file__).with_name("ors_environments.py")


class Ors:
    """A server that runs."""

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self.url, self.process = url, process

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.url}{path}", trust_env=False).json()

    def counts(self) -> dict[str, int]:
        return dict(self.get("/health/counts"))

    def settled(self, **wanted: int) -> dict[str, int]:
        """The counts, once they are so; a session's end may still be on its way."""
        for _ in range(100):
            counts = self.counts()
            if all(counts[name] == value for name, value in wanted.items()):
                return counts
            time.sleep(0.05)
        raise AssertionError(f"{counts} is not {wanted}")


@contextlib.contextmanager
def running(*names: str, script: Path = SERVER, args: tuple[str, ...] = ()) -> Iterator[Ors]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "OPENREWARD_DISABLE_UPDATE_CHECK": "1"}
    process = subprocess.Popen(
        [sys.executable, str(script), *(each.format(port=port) for each in args or ("{port}", *names))],
        env=env,
        stdout=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        give_up_at = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", trust_env=False, timeout=5).is_success:
                    break
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < give_up_at, "the server did not start"
            time.sleep(0.2)
        yield Ors(url, process)
    finally:
        process.terminate()
        process.wait(20)

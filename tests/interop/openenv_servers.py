"""Servers for the tests of `--env openenv-harbor`: the stand-in and the real one, each a process of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

STANDIN = Path(__file__).with_name("harbor_standin.py")


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def logged(self) -> str:
        return self.log.read_text(errors="replace")


def dataset(folder: Path, *names: str) -> Path:
    """A dataset of task folders; an empty one has none."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).mkdir()
        (folder / name / "task.toml").write_text("")
        (folder / name / "instruction.md").write_text(f"Do {name}.")
    return folder


@contextlib.contextmanager
def a_server(
    folder: Path, *datasets: Path, max_sessions: int = 4, argv: tuple[str, ...] = (), **env: str
) -> Iterator[Server]:
    """The stand-in (or what `argv` says) with these datasets, once it answers."""
    port = _two_free_ports()
    log = folder / f"server-{port}.log"
    command = [*(argv or (sys.executable, str(STANDIN))), str(port), *map(str, datasets)]
    ours = {
        "OPENENV_HARBOR_TRIALS_DIR": str(folder / "trials"),
        "MAX_CONCURRENT_ENVS": str(max_sessions),
        "GRADIO_ANALYTICS_ENABLED": "False",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=folder, env=os.environ | ours | env)
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        _until_up(server)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:  # it waits for its connections
            process.kill()
            process.wait()


def _until_up(server: Server, timeout_s: float = 120.0) -> None:
    give_up_at = time.monotonic() + timeout_s
    while time.monotonic() < give_up_at:
        if server.process.poll() is not None:
            raise AssertionError(f"the server ended: {server.logged[-2000:]}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/health", trust_env=False).is_success:
                return
        time.sleep(0.1)
    raise AssertionError(f"the server is not up after {timeout_s} s: {server.logged[-2000:]}")


def _two_free_ports() -> int:
    """The first of two neighbours: the server's own, and its capture proxy's."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                two.bind(("127.0.0.1", port + 1))
                return port

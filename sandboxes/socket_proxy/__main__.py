"""`python -m sandboxes.socket_proxy --engine SOCKET --listen SOCKET --volume NAME`: the proxy as a program.

Owns arguments, the listening socket and signals. The only service of compose.yaml that has the engine's socket; it
needs no network, no capability and no file beside the two sockets.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from sandboxes.socket_proxy.door import Door

_LOOK_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="socket_proxy", description="Pass on what sandboxes need of a Docker engine.")
    parser.add_argument("--engine", default="/var/run/docker.sock", help="the real engine's socket")
    parser.add_argument("--listen", type=Path, required=True, help="socket for the trainer")
    parser.add_argument("--volume", action="append", default=[], help="a volume that relays may mount, read-only")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s socket_proxy %(message)s")
    if not os.access(args.engine, os.R_OK | os.W_OK):
        missing = "is not there" if not os.path.exists(args.engine) else "may not be used by this user"
        hint = "is Docker running, and is DOCKER_SOCKET its socket (DOCKER_SOCKET_USER: who may use it)?"
        print(f"socket_proxy: {args.engine} {missing}: {hint}", file=sys.stderr)
        return 3
    with _listening(args.listen) as sock:
        asyncio.run(_serve(Door(args.engine, args.volume), sock, args.listen))
    return 0


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # of an earlier container: the volume outlives it
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(path))
        path.chmod(0o660)  # for the group that this process runs in, which is the trainer's
        sock.listen(1024)
        print(f"socket_proxy: listening at {path}", flush=True)
        yield sock
        path.unlink(missing_ok=True)


async def _serve(door: Door, sock: socket.socket, path: Path) -> None:
    """Until a signal, or until whoever it is for has removed the socket: then the run is over."""
    server = await asyncio.start_unix_server(door.serve, sock=sock)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    while await asyncio.to_thread(path.exists):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _LOOK_S)
            break
    server.close()


if __name__ == "__main__":
    sys.exit(main())

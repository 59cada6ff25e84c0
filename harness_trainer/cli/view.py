"""`harness-trainer view`: the trace viewer and live dashboard of one run, in a browser."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import secrets
import socket
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from harness_trainer.errors import ConfigError, RunDirError, SetupError
from harness_trainer.rundir import RunDir

LATEST = "latest"
_RUNS = Path("runs")
_PORT = 8765


def run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="harness-trainer view",
        description="Show a run in a browser, also while it goes on. It only reads; Ctrl-C ends it, and never the run.",
        epilog=f"From elsewhere: ssh -L {_PORT}:127.0.0.1:{_PORT} THIS_MACHINE, then open the printed address there.",
    )
    parser.add_argument(
        "run_dir", nargs="?", default=LATEST, help=f"folder of the run; {LATEST} = the newest below {_RUNS}/"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; beyond loopback a token is asked for"
    )
    parser.add_argument("--port", type=int, default=_PORT, help=f"{_PORT} if left out; 0 = any free one")
    parser.add_argument("--open", action="store_true", help="open it in this machine's browser")
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="another host name that browsers may use"
    )
    parser.add_argument("--wait", action="store_true", help="take a folder in which no run has begun yet")
    options = parser.parse_args(argv)
    folder = find_run(options.run_dir, wait=options.wait)
    with _listen(options.host, options.port) as sock:
        _serve(RunDir(folder), sock, options)
    return 0


def find_run(name: str, *, wait: bool = False) -> Path:
    """The folder that is meant. Raises RunDirError where it holds no run."""
    if name == LATEST:
        runs = [path for path in _RUNS.glob("*") if _holds_run(path)]
        if not runs:
            raise RunDirError(f"no run below {_RUNS.absolute()}: give the folder of a run")
        return max(runs, key=_last_written)
    path = Path(name)
    if not wait and not _holds_run(path):
        raise RunDirError(f"{path} holds no run (no store.sqlite or config.yaml): give the folder of a run, or --wait")
    return path


def _holds_run(path: Path) -> bool:
    run = RunDir(path)
    return run.store.exists() or run.config.exists()


def _last_written(path: Path) -> float:
    store = RunDir(path).store
    files = (store, store.with_name(store.name + "-wal"), RunDir(path).config)
    times = [0.0]
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # a run that ends removes its log
            times.append(file.stat().st_mtime)
    return max(times)


def _listen(host: str, port: int) -> socket.socket:
    """Raises ConfigError or SetupError."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port} is not between 0 and 65535")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}") from error
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(128)  # so that the printed address is one that answers
    except OSError as error:
        sock.close()
        advice = "give another --port (0 = any free one), or end what listens there"
        raise SetupError(f"cannot listen at {host} port {port}: {error.strerror or error}; {advice}") from error
    return sock


def _serve(run: RunDir, sock: socket.socket, options: argparse.Namespace) -> None:
    import uvicorn

    from harness_trainer.view.app import make_app
    from harness_trainer.view.guard import Guard, is_address

    bound, port = sock.getsockname()[:2]
    is_loopback = ipaddress.ip_address(bound).is_loopback
    token = None if is_loopback else secrets.token_urlsafe(24)
    names = [*options.allow_host, *([] if is_loopback else [socket.gethostname()])]
    names += [] if is_address(options.host) else [options.host]
    config = uvicorn.Config(
        Guard(make_app(run), names=names, token=token),
        log_level="critical",  # the app tells of its own faults; uvicorn would of every request that Ctrl-C cuts
        access_log=False,  # it would hold the token
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=2,
    )
    address = address_of(bound, port, token)
    print(f"{run.path} at {address}", flush=True)
    if not is_loopback:
        print("harness-trainer: whoever has this address may read the run; no TLS", file=sys.stderr)
    if options.open and not webbrowser.open(address):
        print("harness-trainer: no browser found here: open the address above", file=sys.stderr)
    uvicorn.Server(config).run(sockets=[sock])


def address_of(bound: str, port: int, token: str | None) -> str:
    """What a person opens. Example: address_of("0.0.0.0", 8765, "t") == "http://127.0.0.1:8765/?token=t"."""
    ip = ipaddress.ip_address(bound)
    if ip.is_unspecified:
        ip = ipaddress.ip_address("127.0.0.1" if ip.version == 4 else "::1")
    host = f"[{ip}]" if ip.version == 6 else str(ip)
    return f"http://{host}:{port}/" + ("" if token is None else f"?token={token}")

"""The proxy's life: its orders, its CA, its port, and mitmproxy with no more than it needs. Called by `__main__`."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mitmproxy import certs, master, options
from mitmproxy.addons import block, core, errorcheck, proxyserver, tlsconfig

from .hooks import Intercept

_log = logging.getLogger(__name__)
_BASENAME = "mitmproxy"  # of the CA's files; mitmproxy's own choice


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_ca(folder: Path) -> None:
    """The CA's files, unless they are there. The one with the key comes last, whole, and only its owner can read it."""
    key_file = f"{_BASENAME}-ca.pem"
    with alone(folder):
        if not (folder / key_file).exists():
            with tempfile.TemporaryDirectory(dir=folder) as made:
                certs.CertStore.create_store(Path(made), _BASENAME, 2048, "harness-trainer", "harness-trainer proxy")
                for name in sorted(os.listdir(made), key=lambda name: name == key_file):
                    os.replace(Path(made) / name, folder / name)
        certs.CertStore.from_store(folder, _BASENAME, 2048)  # raises when the files are damaged


def check_address(host: str, port: int) -> None:
    """Raises OSError with the reason that mitmproxy would bury in its log."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, proto) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)


async def serve(orders: dict[str, Any]) -> None:
    host, port = orders["listen"]
    chosen = options.Options(listen_host=host, listen_port=port, confdir=orders["confdir"], upstream_cert=False)
    proxy = master.Master(chosen, with_termlog=True)
    chosen.update(termlog_verbosity="warn")
    # Only what is needed: mitmproxy's other addons serve pages, save flows and run commands.
    addons = [Intercept(orders), core.Core(), block.Block(), proxyserver.Proxyserver(), tlsconfig.TlsConfig()]
    proxy.addons.add(*addons, errorcheck.ErrorCheck())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, proxy.shutdown)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    await proxy.run()
    # Connections that are cut off by the end are no errors; Python 3.11 would log each as one.
    loop.set_exception_handler(lambda _, context: _log.debug("while ending: %s", context.get("message")))


def main() -> None:
    line = b""
    while not line.endswith(b"\n"):  # nothing follows on stdin until it ends with the owner
        part = os.read(0, 65536)
        if not part:
            sys.exit("no orders came on stdin; start this program through `python -m capture_proxy.intercept`")
        line += part
    orders = json.loads(line)
    logging.getLogger().setLevel(logging.WARNING)
    host, port = orders["listen"]
    try:
        check_address(host, port)
    except OSError as error:
        sys.exit(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another port, or 0")
    try:
        make_ca(Path(orders["confdir"]))
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        sys.exit(f"the CA in {orders['confdir']} is unusable; remove {_BASENAME}-ca.pem to get a new one ({reason})")
    asyncio.run(serve(orders))

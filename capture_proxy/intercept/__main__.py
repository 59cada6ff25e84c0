"""`python -m capture_proxy.intercept`: the intercepting proxy as a program.

Owns arguments, signals and the ready file; everything else is `launch`'s. Started by whoever runs agents that take no
base URL, and by people.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from capture_proxy.intercept.launch import InterceptConfig, InterceptError, Interceptor
from capture_proxy.intercept.providers import DEFAULT_PROVIDERS, parse_allowed, parse_provider

_KEY_VARIABLE = "CAPTURE_PROXY_ADMIN_KEY"
_T = TypeVar("_T")


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT. The exit code: 0 after a clean stop, 1 when the proxy died, 2 for bad arguments."""
    args = _parser().parse_args(argv)
    try:
        config = InterceptConfig(
            gateway_url=args.gateway_url,
            admin_url=args.admin_url,
            admin_key=_admin_key(args.admin_key_file) if args.admin_url else "",
            confdir=args.confdir,
            bind=args.bind,
            allow=args.allow,
            providers=(*args.provider, *DEFAULT_PROVIDERS),
            events_path=args.events,
            log_path=args.log,
        )
        reason = asyncio.run(serve(config, args.ready_file))
    except InterceptError as error:
        print(f"capture_proxy.intercept: {error}", file=sys.stderr)
        return 2
    if reason is not None:
        print(f"capture_proxy.intercept: {reason}", file=sys.stderr)
    return 0 if reason is None else 1


async def serve(config: InterceptConfig, ready_file: Path | None) -> str | None:
    """Serve until a signal (None) or until the proxy dies (why). Raises InterceptError when it cannot be started."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with Interceptor(config) as proxy:
        _announce(proxy, ready_file)
        dying = asyncio.create_task(proxy.wait())
        stopping = asyncio.create_task(stopped.wait())
        await asyncio.wait([dying, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if dying.done() and not stopped.is_set():
            return dying.result()
    await dying
    return None


def _announce(proxy: Interceptor, ready_file: Path | None) -> None:
    if ready_file is not None:
        data = {
            "url": proxy.url,
            "ca_certificate": str(proxy.ca_certificate.resolve()),
            "ca_bundle": str(proxy.ca_bundle.resolve()),
            "events": str(proxy.events_path.resolve()),
            "pid": os.getpid(),
        }
        # Whoever waits for the file must never read half of it.
        with tempfile.NamedTemporaryFile("w", dir=ready_file.parent, delete=False) as part:
            json.dump(data, part)
        os.replace(part.name, ready_file)
    print(f"capture_proxy.intercept: proxy at {proxy.url}, CA at {proxy.ca_certificate}", flush=True)


def _admin_key(path: Path | None) -> str:
    try:
        key = path.read_text().strip() if path is not None else os.environ.get(_KEY_VARIABLE, "").strip()
    except OSError as error:
        raise InterceptError(f"cannot read the admin key file {path}: {error.strerror}") from error
    if not key:
        raise InterceptError(f"reporting to the admin port needs its key: set {_KEY_VARIABLE} or give --admin-key-file")
    return key


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="capture_proxy.intercept",
        description="Send an agent's calls to model providers to the capture gateway; it needs no base URL.",
    )
    parser.add_argument("--gateway-url", required=True, help="the gateway's agent port, e.g. http://127.0.0.1:8101")
    parser.add_argument("--admin-url", help="the gateway's admin port: refusals are reported there")
    parser.add_argument("--admin-key-file", type=Path, help=f"file with the admin key (else ${_KEY_VARIABLE})")
    parser.add_argument("--confdir", type=Path, required=True, help="folder that keeps the CA; its owner's alone")
    parser.add_argument("--bind", default="127.0.0.1:0", metavar="HOST:PORT", help="address that agents reach")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        type=_argument(parse_allowed),
        metavar="HOST",
        help="let HOST, HOST:PORT, HOST:* or *.SUFFIX through untouched; may be repeated",
    )
    parser.add_argument(
        "--provider",
        action="append",
        default=[],
        type=_argument(parse_provider),
        metavar="HOST[/PATH=/NEW]",
        help="one more provider's host that leads to the gateway; may be repeated",
    )
    parser.add_argument("--events", type=Path, metavar="FILE", help="JSON lines of what was refused")
    parser.add_argument("--log", type=Path, metavar="FILE", help="the proxy's own log")
    parser.add_argument("--ready-file", type=Path, help="written as JSON once the proxy listens")
    return parser


def _argument(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """A ValueError's message reaches the person only as this type of error."""

    def convert(text: str) -> _T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


if __name__ == "__main__":
    sys.exit(main())

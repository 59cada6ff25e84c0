"""The gateway on an address of this machine: `python -m harness_trainer.expose.open_port HOST:PORT GATEWAY`.

Owns nothing but the listening: bytes go by `sandboxes.relay`. A process of its own, so that the gateway itself stays on
loopback and can be started again at the same port without this one noticing.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence

from sandboxes.relay import Relay, raise_file_limit


async def serve(host: str, port: int, gateway: tuple[str, int]) -> None:
    """Until SIGTERM or SIGINT. Raises OSError when the address cannot be had."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    relay = Relay(gateway)
    server = await loop.create_server(relay.accept, host, port, backlog=1024)
    await stopped.wait()
    server.close()
    await relay.close()


def main(argv: Sequence[str]) -> int:
    (host, _, port), (to, _, to_port) = (text.rpartition(":") for text in argv[:2])
    raise_file_limit()
    try:
        asyncio.run(serve(host.strip("[]"), int(port), (to.strip("[]"), int(to_port))))
    except OSError as error:
        print(f"cannot listen on {argv[0]}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

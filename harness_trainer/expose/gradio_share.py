"""A share link of Gradio's for as long as this runs: `python -m harness_trainer.expose.gradio_share HOST:PORT`.

Owns the use of Gradio, which is imported in this process alone (it takes seconds, and hundreds of MB). Prints the link
on stdout, and what the tunnel says on stderr. With `--share-server HOST:PORT` the link is of a server of one's own.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="harness_trainer.expose.gradio_share")
    parser.add_argument("gateway", help="HOST:PORT")
    parser.add_argument("--share-server")
    options = parser.parse_args(argv)
    try:
        return _share(options.gateway, options.share_server)
    except Exception as error:  # whatever Gradio raises: its text is all that a person can use
        print(f"Gradio opens no share link: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def _share(gateway: str, share_server: str | None) -> int:
    from gradio import networking, tunneling

    host, _, port = gateway.rpartition(":")
    url = networking.setup_tunnel(host, int(port), secrets.token_urlsafe(32), share_server, None)
    process: Any = tunneling.CURRENT_TUNNELS[-1].proc
    for stream in (process.stdout, process.stderr):  # nobody else reads them, and a full pipe stops the tunnel
        threading.Thread(target=_pass_on, args=(stream,), daemon=True).start()
    print(url, flush=True)
    code: int = process.wait()
    return code


def _pass_on(stream: IO[bytes]) -> None:
    for line in stream:
        os.write(2, line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""OpenEnv's capture server as a program: `python -m benchmarks.capture_openenv ENGINE_URL`. Prints its URL."""

from __future__ import annotations

import logging
import socket
import sys
import threading

from openenv.core.harness.capture import CaptureServer


def main() -> None:
    logging.disable(logging.INFO)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    server = CaptureServer(llm_url=sys.argv[1], model="bench", port=port)
    server.start()
    print(f"http://127.0.0.1:{port}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()

"""Stands in for the engine's python: answers our probe, then plays a vLLM that does what $FAKE_VLLM says.

`serve` answers like an engine and starts a child of its own, `hang` loads for ever, `taken` fails once like a port that
was taken and then serves (it counts in $FAKE_COUNT), anything else is a log to print before dying with code 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

PHASES = ["non-default args: {}", "Initializing a V1 LLM engine", "Starting to load model x...", "Loading weights took"]


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        data = json.dumps({"data": [{"id": option("--served-model-name")}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> int:
    if "-c" in sys.argv:
        print(os.environ.get("FAKE_PROBE", "cpu plugin"))
        return 0
    play = os.environ["FAKE_VLLM"]
    if play == "taken":
        count = Path(os.environ["FAKE_COUNT"])
        count.write_text(count.read_text() + "x" if count.exists() else "x")
        if len(count.read_text()) == 1:
            print("OSError: [Errno 98] Address already in use")
            return 1
        play = "serve"
    if play not in ("serve", "hang"):
        print(play)
        return 1
    for phase in PHASES:
        print(f"(EngineCore pid=1) INFO 11-29 19:20:18 [core.py:1] {phase}", flush=True)
    if play == "hang":
        time.sleep(600)
    Path(
        os.environ.get("VLLM_RPC_BASE_PATH", tempfile.gettempdir()), "a-socket"
    ).touch()  # as vLLM does, which leaves it there
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    server = HTTPServer((option("--host"), int(option("--port"))), Handler)
    print("Starting vLLM server on", option("--port"), flush=True)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())

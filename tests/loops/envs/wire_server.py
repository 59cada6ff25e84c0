"""OpenEnv's wire in the standard library alone, for an image of the tests: one environment that adds."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import socketserver
from http.server import BaseHTTPRequestHandler
from typing import Any

ACTION = {"title": "AddAction", "properties": {"number": {"type": "integer"}}, "required": ["number"], "type": "object"}
PAGES = {
    "/health": {"status": "healthy"},
    "/schema": {"action": ACTION, "observation": {}, "state": {}},
    "/metadata": {"name": "wired", "description": ""},
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/ws":
            return self._session()
        body = json.dumps(PAGES.get(self.path, {})).encode()
        self.send_response(200 if self.path in PAGES else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        print(*words, flush=True)

    def _session(self) -> None:
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.end_headers()
        self.close_connection = True
        total = 0
        while (message := self._received()) is not None and message["type"] != "close":
            if message["type"] == "step":
                total += message["data"]["number"]
            observation = {
                "total": total,
                "limit": os.environ.get("MAX_CONCURRENT_ENVS"),
                "word": os.environ.get("WORD"),
            }
            data = {"observation": observation, "reward": float(total), "done": total >= 10}
            self._send(1, json.dumps({"type": "observation", "data": data}).encode())
        self._send(8, b"")

    def _received(self) -> Any:
        while True:
            head = self.rfile.read(2)
            if len(head) < 2:
                return None
            length = head[1] & 127
            if length == 126:
                length = int.from_bytes(self.rfile.read(2), "big")
            mask = self.rfile.read(4)
            data = bytes(byte ^ mask[at % 4] for at, byte in enumerate(self.rfile.read(length)))
            if head[0] & 15 == 8:
                return None
            if head[0] & 15 == 9:
                self._send(10, data)
            elif head[0] & 15 == 1:
                return json.loads(data)

    def _send(self, kind: int, data: bytes) -> None:
        size = bytes([len(data)]) if len(data) < 126 else b"\x7e" + len(data).to_bytes(2, "big")
        self.wfile.write(bytes([128 | kind]) + size + data)
        self.wfile.flush()


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True


if __name__ == "__main__":
    Server(("0.0.0.0", 8000), Handler).serve_forever()

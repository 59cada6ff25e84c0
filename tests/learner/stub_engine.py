"""An engine's control endpoints with vLLM's state behind them, and faults to order."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import torch
from safetensors.torch import load_file

from harness_trainer.engine.digests import digest, take_sample
from tests.http_serving import in_thread


@dataclass
class StubEngine:
    """Keeps vLLM's update state; `faults[path]` is a list of answers to give instead, `hang` = never answer."""

    faults: dict[str, list[Any]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    paused: bool = False
    active: bool = False
    version: str = "default"
    loaded: dict[str, torch.Tensor] = field(default_factory=dict)
    released: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    num_workers: int = 1

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.calls.append(path)
        if self.faults.get(path):
            fault = self.faults[path].pop(0)
            if fault == "hang":
                self.released.wait()
                return 200, {}
            if fault == "garble":
                for tensor in self.loaded.values():
                    tensor += 0.5
                return self._behave(path, body)
            return fault  # type: ignore[no-any-return]
        return self._behave(path, body)

    def _behave(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "pause":
            self.paused = True
        elif path == "resume":
            self.paused = False
        elif path == "is_paused":
            return 200, {"is_paused": self.paused}
        elif path == "start_weight_update":
            if self.active:
                return 409, {"error": {"message": "a weight update is already active"}}
            self.active = True
        elif path == "update_weights":
            assert self.active
            assert self.paused
            self.loaded = load_file(body["update_info"]["path"])
            assert sorted(self.loaded) == sorted(body["update_info"]["names"])
        elif path == "finish_weight_update":
            if not self.active:
                return 500, {"error": {"message": "finish_weight_update called without a matching start"}}
            self.active = False
            self.version = body.get("weight_version") or self.version
        elif path == "collective_rpc":
            assert body["method"] == "harness_digests"
            return 200, {"results": [self._digests(json.loads(body["args"][0]))] * self.num_workers}
        elif path == "update_weight_version":
            self.version = body["new_version"]
        return 200, {"weight_version": self.version}

    def _digests(self, shapes: dict[str, list[int]]) -> dict[str, dict[str, str]]:
        parts = {name: take_sample(self.loaded[name]) for name in shapes if name in self.loaded}
        assert all(part.shape == tuple(shapes[name]) for name, part in parts.items())
        return {
            name: {"digest": digest(sample.part, torch.bfloat16), "of": "loaded", "dtype": "bfloat16"}
            for name, sample in parts.items()
        }


@contextmanager
def serving(stub: StubEngine) -> Iterator[StubEngine]:
    """Answer at `stub.url` until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"null") or {}
            status, answer = stub.answer(self.path.strip("/").partition("?")[0], body)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            if answer == "trickle":
                while not stub.released.wait(0.1):
                    self.wfile.write(b"X-More: yes\r\n" if self.headers_sent() else b"HTTP/1.1 200 OK\r\n")
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def headers_sent(self) -> bool:
            sent, self.begun = getattr(self, "begun", False), True
            return sent

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            pass

    with in_thread(Handler) as port:
        stub.url = f"http://127.0.0.1:{port}"
        try:
            yield stub
        finally:
            stub.released.set()

"""An engine on other hardware, as this machine sees it: it answers in vLLM's words, takes its time, and costs nothing.

    python -m benchmarks.waiting_engine --turns 3 --seconds 4

A program of its own. Prints its URL. One byte is one token. It answers `--turns` calls of a rollout, all but the last
with a call of the tool `bash`; each takes a part of `--seconds` and waits without computing. The last reply holds a
number that no other has, for a verifier to make a reward of. `PUT /seconds` changes what a rollout takes.

Weight updates are obeyed as vLLM obeys them: a paused engine samples nothing, calls in flight go on afterwards, each
token carries the version it was sampled under, and the file's bytes are read. Used by `asynchrony`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import socket
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from capture_proxy.engines import scripted
from capture_proxy.engines.base import ChatRequest

MODEL, WINDOW = "waiting", 100_000
_SLICES = 8  # of a reply; between two of them an update may come
_READ_BYTES = 2**24


class WaitingEngine:
    """State and routes. `seconds` is what all calls of a rollout take together."""

    def __init__(self, turns: int, seconds: float, num_tokens: int, vocabulary: int) -> None:
        self.turns, self.seconds = turns, seconds
        self._num_tokens = num_tokens
        self._logprob = -math.log(vocabulary)  # about what a random model says of any token
        self._version = "default"
        self._updating = False
        self._running = asyncio.Event()
        self._running.set()
        self._numbers = itertools.count(1)

    def app(self) -> Starlette:
        control = {
            "/pause": self._pause,
            "/resume": self._resume,
            "/init_weight_transfer_engine": self._fine,
            "/start_weight_update": self._start_update,
            "/update_weights": self._update,
            "/finish_weight_update": self._finish_update,
            "/update_weight_version": self._rename,
            "/v1/chat/completions/render": self._render,
            "/v1/chat/completions/derender": self._derender,
            "/inference/v1/generate": self._generate,
        }
        return Starlette(
            routes=[
                *(Route(path, answer, methods=["POST"]) for path, answer in control.items()),
                Route("/seconds", self._take_seconds, methods=["PUT"]),
                Route("/health", self._fine),
                Route("/version", self._fine),
                Route("/weight_info", self._fine),
                Route("/v1/models", self._models),
            ]
        )

    # -- weights ---------------------------------------------------------------------------------------------------

    async def _fine(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self._version, "version": "waiting"})

    async def _take_seconds(self, request: Request) -> Response:
        self.seconds = float((await request.json())["seconds"])
        return await self._fine(request)

    async def _pause(self, request: Request) -> Response:
        self._running.clear()
        return await self._fine(request)

    async def _resume(self, request: Request) -> Response:
        self._running.set()
        return await self._fine(request)

    async def _start_update(self, request: Request) -> Response:
        if self._updating:
            return JSONResponse({"error": {"message": "a weight update is already active"}}, 409)
        self._updating = True
        return await self._fine(request)

    async def _update(self, request: Request) -> Response:
        await asyncio.to_thread(_read, Path((await request.json())["update_info"]["path"]))
        return await self._fine(request)

    async def _finish_update(self, request: Request) -> Response:
        if not self._updating:
            return JSONResponse({"error": {"message": "finish_weight_update called without a matching start"}}, 500)
        self._updating = False
        body = json.loads(await request.body() or b"null") or {}
        self._version = body.get("weight_version") or self._version
        return await self._fine(request)

    async def _rename(self, request: Request) -> Response:
        self._version = (await request.json())["new_version"]
        return await self._fine(request)

    # -- calls -----------------------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "max_model_len": WINDOW}]})

    async def _render(self, request: Request) -> Response:
        body = await request.json()
        if not body:
            return JSONResponse({"error": {"message": "messages: missing", "code": 400}}, 400)
        chat = ChatRequest(MODEL, body["messages"], body.get("tools") or [], None, {}, None)
        params = {"temperature": 1.0, "top_p": 1.0, "max_tokens": WINDOW // 2, "logprobs": 0}
        return JSONResponse({"token_ids": scripted.render(chat), "sampling_params": params, "model": MODEL})

    async def _generate(self, request: Request) -> Response:
        prompt = (await request.json())["token_ids"]
        # The prompt ends with the header of the reply; each header before it was that of an earlier one.
        turn = prompt.count(scripted.ROLE_IDS["assistant"])
        text = self._text(last=turn >= self.turns)
        ids = [*text.encode(), scripted.END]
        versions = []
        for part in range(_SLICES):
            await asyncio.sleep(self.seconds / self.turns / _SLICES)
            await self._running.wait()
            start, end = (len(ids) * place // _SLICES for place in (part, part + 1))
            versions.append({"version": self._version, "start": start, "end": end})
        entries = [{"token": f"token_id:{token}", "logprob": self._logprob} for token in ids]
        choice = {
            "index": 0,
            "text": text,
            "token_ids": ids,
            "logprobs": {"content": entries},
            "finish_reason": "stop",
            "weight_versions": versions,
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        return JSONResponse({"request_id": "r", "choices": [choice], "usage": usage})

    async def _derender(self, request: Request) -> Response:
        ids = (await request.json())["generate_response"]["choices"][0]["token_ids"]
        text = bytes(token for token in ids if token < 256).decode()
        message: dict[str, Any] = {"role": "assistant", "content": text}
        head, mark, call = text.partition("<tool_call>")
        if mark:
            parsed = json.loads(call.removesuffix("</tool_call>"))
            function = {"name": parsed["name"], "arguments": json.dumps(parsed["arguments"])}
            calls = [{"id": f"call-{next(self._numbers)}", "type": "function", "function": function}]
            message = {"role": "assistant", "content": head or None, "tool_calls": calls}
        return JSONResponse({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    def _text(self, *, last: bool) -> str:
        number = next(self._numbers)
        if last:
            return f"{number} ".ljust(self._num_tokens - 1, ".")
        command = f"echo {number} ".ljust(self._num_tokens - 80, "#")  # a comment: nothing is computed
        call = {"arguments": {"command": command}, "name": "bash"}
        return f"<tool_call>{json.dumps(call, sort_keys=True, separators=(',', ':'))}</tool_call>"


def _read(path: Path) -> None:
    """Every byte, as an engine that gets them over a wire would."""
    with path.open("rb", buffering=0) as file:
        while file.read(_READ_BYTES):
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--tokens", type=int, default=160, help="of each reply, about")
    parser.add_argument("--vocabulary", type=int, default=512, help="of the model that is trained")
    options = parser.parse_args()
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{sock.getsockname()[1]}", flush=True)
    engine = WaitingEngine(options.turns, options.seconds, options.tokens, options.vocabulary)
    config = uvicorn.Config(engine.app(), log_level="critical", lifespan="off")
    uvicorn.Server(config).run(sockets=[sock])


if __name__ == "__main__":
    main()

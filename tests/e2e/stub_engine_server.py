"""An engine that starts in a second: vLLM's routes as a run uses them, without a model. One byte of text is one token.

Run as vLLM is (`-m vllm.entrypoints.openai.api_server --port ...`, by `write_python`'s interpreter). It says what it is
made to say, slowly enough that something is always in flight, keeps vLLM's update and pause state, and writes down
which version it had when each call of the gateway was sampled. What it says is random letters, so that rewards differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
END = 260
LOG = "STUB_ENGINE_LOG"  # variable: a file that gets one line of JSON for each call of the gateway
DELAY_S = 0.04  # per token
NUM_TOKENS = 12


def write_python(folder: Path) -> Path:
    """An interpreter for `engine.python` that claims to have vLLM, and runs this file in its place."""
    path = folder / "python-with-stub"
    script = f'#!/bin/sh\nif [ "$1" = -I ]; then echo cpu plugin; exit 0; fi\nexec {sys.executable} {__file__} "$@"\n'
    path.write_text(script)
    path.chmod(0o755)
    return path


class Engine:
    def __init__(self, name: str) -> None:
        self.name = name
        self.version = "default"
        self.active = False
        self.running = asyncio.Event()
        self.running.set()

    async def tokens(self, max_tokens: int) -> AsyncIterator[tuple[int, str]]:
        """(id, version) of each token; frozen while the engine is paused."""
        for i in range(min(NUM_TOKENS, max_tokens)):
            await asyncio.sleep(DELAY_S)
            await self.running.wait()
            yield (END if i == NUM_TOKENS - 1 else random.choice(b"abcdefg 1234")), self.version

    def note_call(self) -> None:
        if log := os.environ.get(LOG):
            with Path(log).open("a") as file:
                file.write(json.dumps({"pid": os.getpid(), "version": self.version}) + "\n")

    # --- the learner's routes; each gets the body and gives (status, answer)

    def pause(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.running.clear()
        return 200, {}

    def resume(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.running.set()
        return 200, {}

    def start_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.active:
            return 409, {"error": {"message": "a weight update is already active"}}
        self.active = True
        return 200, {}

    def update_weights(self, body: dict[str, Any]) -> tuple[int, Any]:
        if not self.active or self.running.is_set() or not Path(body["update_info"]["path"]).exists():
            return 500, {"error": {"message": "no update is active, the engine is not paused, or there is no file"}}
        return 200, {}

    def finish_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        if not self.active:
            return 500, {"error": {"message": "finish_weight_update called without a matching start"}}
        self.active = False
        self.version = body.get("weight_version") or self.version
        return 200, {}

    def update_weight_version(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.version = body["new_version"]
        return 200, {}

    def init_weight_transfer_engine(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {}

    # --- what is asked once

    def weight_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"weight_version": self.version}

    def models(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"object": "list", "data": [{"id": self.name, "max_model_len": 512}]}

    def server_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"vllm_config": {"weight_transfer_config": {"backend": "stub"}}}

    def health(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {}

    def version_of_vllm(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"version": "stub"}

    def render(self, body: dict[str, Any]) -> tuple[int, Any]:
        if not body:
            return 400, {"error": {"message": "messages: missing"}}
        ids = [i for message in body["messages"] for i in str(message.get("content") or "").encode()]
        sampling = {"temperature": body.get("temperature", 1.0), "max_tokens": 512 - len(ids), "logprobs": 0}
        return 200, {"token_ids": ids, "sampling_params": sampling, "reasoning_parser_kwargs": None}

    def chat(self, body: dict[str, Any]) -> tuple[int, Any]:
        """For the probe alone: two candidates whose gap shrinks by the temperature, and one that is sure."""
        scale = 1.0 / body.get("temperature", 1.0)
        total = math.log(1 + math.exp(-scale))
        names = [{"token": f"token_id:{i}", "logprob": -i * scale - total} for i in range(2)]
        entry = {**names[0], "top_logprobs": names}
        if body.get("allowed_token_ids"):
            entry = {"token": f"token_id:{body['allowed_token_ids'][0]}", "logprob": 0.0, "top_logprobs": []}
        choice = {"message": {"content": "x"}, "token_ids": [0], "logprobs": {"content": [entry]}}
        return 200, {"prompt_token_ids": [1], "choices": [choice]}


def main() -> None:
    sys.path.insert(0, str(ROOT))
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    parser = argparse.ArgumentParser()
    for flag in ("--served-model-name", "--host", "--port"):
        parser.add_argument(flag)
    options, _ = parser.parse_known_args()
    engine = Engine(options.served_model_name)

    def route(path: str, answer: Any) -> Route:
        async def endpoint(request: Request) -> Response:
            status, data = answer(json.loads(await request.body() or b"{}"))
            return JSONResponse(data, status)

        return Route(path, endpoint, methods=["GET", "POST"])

    async def generate(request: Request) -> Response:
        body = await request.json()
        if body.get("request_id"):
            engine.note_call()
        tokens = engine.tokens(body["sampling_params"]["max_tokens"])
        if body.get("stream"):
            return StreamingResponse(_stream(tokens), media_type="text/event-stream")
        choice = _choice([token async for token in tokens])
        return JSONResponse({"request_id": "r", "choices": [{**choice, "finish_reason": "stop"}]})

    paths = ("pause", "resume", "start_weight_update", "update_weights", "finish_weight_update")
    paths += ("update_weight_version", "init_weight_transfer_engine", "weight_info", "health", "server_info")
    routes = [route(f"/{path}", getattr(engine, path)) for path in paths]
    routes += [route("/v1/models", engine.models), route("/version", engine.version_of_vllm)]
    routes += [route("/v1/chat/completions/render", engine.render), route("/v1/chat/completions", engine.chat)]
    routes += [Route("/inference/v1/generate", generate, methods=["POST"])]
    print("Starting vLLM server", flush=True)  # what the supervisor waits for in vLLM's log
    uvicorn.run(Starlette(routes=routes), host=options.host, port=int(options.port), log_level="warning")


def _choice(tokens: list[tuple[int, str]], start: int = 0) -> dict[str, Any]:
    spans: list[dict[str, Any]] = []
    for i, (_, version) in enumerate(tokens):
        if not spans or spans[-1]["version"] != version:
            spans.append({"version": version, "start": i, "end": i})
        spans[-1]["end"] = i + 1
    ids = [token for token, _ in tokens]
    content = [{"token": f"token_id:{token}", "token_id": token, "logprob": -2.5} for token in ids]
    text = bytes(i for i in ids if i < 256).decode()
    return {"index": 0, "text": text, "token_ids": ids, "logprobs": {"content": content}, "weight_versions": spans}


async def _stream(tokens: AsyncIterator[tuple[int, str]]) -> AsyncIterator[str]:
    seen: list[tuple[int, str]] = []
    async for token in tokens:
        seen.append(token)
        choice = _choice([token])
        del choice["weight_versions"]
        yield f"data: {json.dumps({'request_id': 'r', 'choices': [choice]})}\n\n"
    last = {**_choice([]), "finish_reason": "stop", "weight_versions": _choice(seen)["weight_versions"]}
    yield f"data: {json.dumps({'request_id': 'r', 'choices': [last]})}\n\ndata: [DONE]\n\n"


if __name__ == "__main__":
    main()

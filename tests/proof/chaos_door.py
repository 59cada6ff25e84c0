"""Stands in front of a real vLLM and spoils some of its answers: the engine of a chaos run, started in its place.

Owns those faults. It is called with the interpreter of the engine's environment and vLLM's own arguments, starts vLLM
on another port and passes everything through; of the calls that sample, a share is answered with a 500 and a share
breaks off after its first bytes. It ends as vLLM ends, with the same signal. Run as a script by the wrapper that
`chaos` writes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

_SAMPLES = "/inference/v1/generate"
_NOT_PASSED = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


class Door:
    """`log` gets a line for each fault."""

    def __init__(self, upstream: str, rate: float, chance: random.Random, log: Path) -> None:
        # No time limit of ours: a paused engine answers when it is resumed.
        self._client = httpx.AsyncClient(base_url=upstream, timeout=None, trust_env=False)
        self._rate, self._chance, self._log = rate, chance, log

    async def answer(self, request: Request) -> Response:
        fault = self._fault(request.url.path)
        if fault == "500":
            return JSONResponse({"error": {"message": "chaos: the engine fails", "code": 500}}, 500)
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = [(name, value) for name, value in request.headers.items() if name not in _NOT_PASSED]
        asked = self._client.build_request(request.method, target, headers=headers, content=await request.body())
        try:
            reply = await self._client.send(asked, stream=True)
        except httpx.HTTPError as error:
            return JSONResponse({"error": {"message": f"chaos: the engine is not there ({error})", "code": 503}}, 503)
        passed = {name: value for name, value in reply.headers.items() if name not in _NOT_PASSED}
        return StreamingResponse(self._body(reply, cut=fault == "cut"), reply.status_code, passed)

    def _fault(self, path: str) -> str:
        if path != _SAMPLES or self._chance.random() >= self._rate:
            return ""
        fault = self._chance.choice(("500", "cut"))
        with self._log.open("a", encoding="utf-8") as file:
            file.write(fault + "\n")
        return fault

    async def _body(self, reply: httpx.Response, *, cut: bool) -> AsyncIterator[bytes]:
        try:
            async for chunk in reply.aiter_raw():
                yield chunk
                if cut:
                    raise ConnectionError("chaos: the engine's answer breaks off")
        finally:
            await reply.aclose()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def _serve(options: argparse.Namespace, argv: list[str]) -> int:
    place = argv.index("--port") + 1
    port, behind = int(argv[place]), _free_port()
    argv[place] = str(behind)
    vllm = await asyncio.create_subprocess_exec(options.python, *argv)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, vllm.terminate)
    loop.add_signal_handler(signal.SIGINT, vllm.terminate)
    door = Door(f"http://127.0.0.1:{behind}", options.faults, random.Random(options.seed), options.log)
    methods = ["GET", "POST", "PUT", "DELETE"]
    app = Starlette(routes=[Route("/{path:path}", door.answer, methods=methods)])
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    serving = asyncio.create_task(server.serve())
    code = await vllm.wait()
    server.should_exit = server.force_exit = True
    await asyncio.gather(serving, return_exceptions=True)
    return code


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", required=True, help="the engine environment's interpreter")
    parser.add_argument("--faults", type=float, default=0.0, help="share of sampling calls that fail")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, required=True, help="file that gets a line for each fault")
    parser.add_argument("argv", nargs="*", help="after --: what the interpreter is called with")
    options = parser.parse_args()
    code = asyncio.run(_serve(options, list(options.argv)))
    if code < 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())

"""The capability probe against servers that can more or less."""

import math
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from capture_proxy.engines.probe import MISSING, probe
from capture_proxy.errors import EngineError, EngineUnreachable

LOGITS = {1: 2.0, 2: 1.5, 3: 0.3, 4: -1.0, 5: -2.0, 6: -3.0}


@dataclass
class Server:
    """Samples token 1 from six candidates, with vLLM's routes and its logprobs modes."""

    mode: str = "processed_logprobs"
    scale_out: bool = True
    dev: bool = True
    transfer: bool = True
    token_ids: bool = True
    versions: bool = True
    names: tuple[str, ...] = ("m",)
    status: int = 200
    listing: int = 200  # the status of /server_info

    def app(self) -> Starlette:
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/chat/completions/render", self.render, methods=["POST"]),
            Route("/inference/v1/generate", self.generate, methods=["POST"]),
        ]
        if self.dev:
            routes += [Route("/weight_info", self.weight_info), Route("/server_info", self.server_info)]
        return Starlette(routes=routes)

    def values(self, body: dict[str, Any]) -> dict[int, float]:
        scaled = {t: x / body.get("temperature", 1.0) for t, x in LOGITS.items()}
        if allowed := body.get("allowed_token_ids"):
            scaled = {t: x if t in allowed else -math.inf for t, x in scaled.items()}
        if self.mode == "processed_logits":
            return scaled
        logits = scaled if self.mode == "processed_logprobs" else LOGITS
        total = math.log(sum(math.exp(x) for x in logits.values()))
        return {t: x - total for t, x in logits.items()}

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": n, "max_model_len": 64} for n in self.names]}, self.status)

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        values = self.values(body)
        ranked = sorted(values, key=lambda t: -values[t])[: body.get("top_logprobs", 0)]
        tops = [{"token": f"token_id:{t}", "logprob": max(values[t], -9999.0)} for t in ranked]
        entry = {"token": "token_id:1", "logprob": values[1], "top_logprobs": tops}
        num = min(body["max_tokens"], 2)
        choice = {"logprobs": {"content": [entry] * num}, "finish_reason": "length"}
        if self.token_ids:
            choice["token_ids"] = [1] * num
        return JSONResponse({"prompt_token_ids": [7], "choices": [choice]})

    async def render(self, request: Request) -> Response:
        return JSONResponse({"token_ids": [7]}) if self.scale_out else JSONResponse({"error": {}}, 403)

    async def generate(self, request: Request) -> Response:
        if not self.scale_out:
            return JSONResponse({"error": {}}, 403)
        choice: dict[str, Any] = {
            "token_ids": [1, 1],
            "logprobs": {"content": [{"token_id": 1, "logprob": -0.5}] * 2},
            "weight_versions": [{"version": "default", "start": 0, "end": 2}] if self.versions else None,
        }
        return JSONResponse({"choices": [choice]})

    async def weight_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": "default"})

    async def server_info(self, request: Request) -> Response:
        config = {"weight_transfer_config": {"backend": "shm"} if self.transfer else None}
        return JSONResponse({"vllm_config": config}, self.listing)


def client(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(server.app()), base_url="http://engine")


async def test_a_server_that_fails_to_say_is_quoted() -> None:
    """vLLM answers 500 here where no pip lists its packages: the flag that is then named may well be set."""
    async with client(Server(listing=500)) as http:
        found = await probe(http)
    assert not found.trainable and len(found.missing) == 1
    assert MISSING["weight_update"] in found.missing[0] and "(or it is set: /server_info failed, " in found.missing[0]


async def test_a_full_server_is_trainable() -> None:
    async with client(Server()) as http:
        found = await probe(http)
    assert found.trainable and found.missing == []
    assert (found.model, found.max_model_len) == ("m", 64)


@pytest.mark.parametrize(
    ("server", "missing"),
    [
        (Server(mode="raw_logprobs"), ["processed_logprobs"]),
        (Server(mode="processed_logits"), ["processed_logprobs"]),
        (Server(scale_out=False), ["token_in", "weight_versions"]),
        (Server(versions=False), ["weight_versions"]),
        (Server(dev=False), ["dev_routes"]),
        (Server(transfer=False), ["weight_update"]),
        (Server(token_ids=False), ["token_ids", "logprobs", "processed_logprobs"]),
    ],
)
async def test_each_thing_that_is_missing_is_named_by_its_flag(server: Server, missing: list[str]) -> None:
    async with client(server) as http:
        found = await probe(http)
    assert found.missing == [MISSING[name] for name in missing]
    assert not found.trainable


async def test_which_model_must_be_told_when_there_are_two() -> None:
    async with client(Server(names=("a", "b"))) as http:
        with pytest.raises(EngineError, match="name one"):
            await probe(http)
        assert (await probe(http, model="b")).model == "b"


async def test_a_server_that_refuses_us_or_is_not_there_is_an_error() -> None:
    async with client(Server(status=401)) as http:
        with pytest.raises(EngineError, match="401"):
            await probe(http)
    async with httpx.AsyncClient(base_url="http://127.0.0.1:9") as http:
        with pytest.raises(EngineUnreachable):
            await probe(http)

"""Policies as LoRA adapters: each call asks for the newest, and its tokens are of the version that answered."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from capture_proxy.engines.base import ChatRequest, FinishEvent
from capture_proxy.engines.vllm import VllmEngine
from capture_proxy.errors import EngineError
from capture_proxy.types import VersionSpan
from tests.capture.serving import listening
from tests.capture.stub_vllm import StubVllm, reply

GENERATE = "/inference/v1/generate"


@dataclass
class AdapterVllm(StubVllm):
    adapters: list[str] = field(default_factory=list)
    answers_as: str | None = None  # None = as the model that was asked

    async def _models(self, request: Request) -> Response:
        base = {"id": "stub", "max_model_len": 4096, "parent": None}
        others = [{"id": name, "max_model_len": None, "parent": "stub"} for name in self.adapters]
        return JSONResponse({"object": "list", "data": [base, *others]})

    async def _generate(self, request: Request) -> Response:
        name = self.answers_as or (await request.json())["model"]
        self.chunks = [_named(item, name) for item in reply("hello")]
        return await super()._generate(request)

    async def _whole(self) -> dict:
        name = json.loads(str(self.chunks[0]).removeprefix("data: "))["model"]
        return {**await super()._whole(), "model": name}


def _named(event: str, name: str) -> str:
    text = event.removeprefix("data: ").strip()
    return event if text == "[DONE]" else f"data: {json.dumps({**json.loads(text), 'model': name})}\n\n"


async def finish(engine: VllmEngine, *, stream: bool = True) -> FinishEvent:
    asked = ChatRequest("m", [{"role": "user", "content": "hi"}], [], None, {}, None, stream=stream)
    last = [event async for event in engine.sample(asked)][-1]
    assert isinstance(last, FinishEvent)
    return last


@pytest.mark.parametrize("stream", [True, False])
async def test_each_call_asks_for_the_newest_adapter_and_its_tokens_are_of_that_version(stream: bool) -> None:
    stub = AdapterVllm(adapters=["v2", "v10", "v9", "v11-partial", "mine"])
    async with listening(stub.app()) as url:
        engine = VllmEngine(url, adapters=True)
        async with engine.running():
            first = await finish(engine, stream=stream)
            stub.adapters.append("v11")
            second = await finish(engine, stream=stream)
    assert [body["model"] for body in stub.bodies(GENERATE)] == ["v10", "v11"]
    assert first.version_spans == [VersionSpan("v10", 0, 6)]  # five letters and the end token
    assert second.version_spans == [VersionSpan("v11", 0, 6)]


async def test_before_the_first_adapter_the_base_model_answers_with_the_engines_own_version() -> None:
    stub = AdapterVllm()
    async with listening(stub.app()) as url:
        engine = VllmEngine(url, adapters=True)
        async with engine.running():
            assert (await finish(engine)).version_spans == [VersionSpan("v1", 0, 6)]
    assert stub.bodies(GENERATE)[0]["model"] == "stub"


async def test_an_answer_of_another_model_is_an_engine_error() -> None:
    stub = AdapterVllm(adapters=["v2"], answers_as="stub")
    async with listening(stub.app()) as url:
        engine = VllmEngine(url, adapters=True)
        async with engine.running():
            with pytest.raises(EngineError, match="answered as 'stub' where adapter 'v2'"):
                await finish(engine)


async def test_adapters_need_the_token_routes() -> None:
    stub = AdapterVllm(adapters=["v2"], scale_out=False)
    async with listening(stub.app()) as url:
        engine = VllmEngine(url, adapters=True)
        async with engine.running():
            with pytest.raises(EngineError, match="--enable-scale-out"):
                await finish(engine)


async def test_without_the_option_adapters_are_left_alone() -> None:
    stub = AdapterVllm(adapters=["v2"])
    async with listening(stub.app()) as url:
        engine = VllmEngine(url)
        async with engine.running():
            assert (await finish(engine)).version_spans == [VersionSpan("v1", 0, 6)]
    assert stub.bodies(GENERATE)[0]["model"] == "stub"

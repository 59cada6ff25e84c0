"""One conversation by HTTP through the gateway, and the same in process: for tests that compare what is recorded."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from capture_proxy.engines.base import Engine
from capture_proxy.rendering import Bridging
from capture_proxy.trace import to_row_trace
from capture_proxy.types import Capture, SessionPolicy
from harness_trainer.loops.base import Message, Model, Reply
from tests.capture.serving import served
from tests.loops.playing import model_side

Play = Callable[[Model], Awaitable[object]]


class HttpModel:
    """`loops.base.Model` as an agent has it."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        max_tokens: int | None = None,
        **sampling: Any,
    ) -> Reply:
        body = {"model": "m", "messages": list(messages), "tools": list(tools), **sampling}
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        # As JavaScript writes it: half a surrogate pair is escaped, and gets through.
        answer = await self._http.post("/v1/chat/completions", content=json.dumps(body).encode(), timeout=400)
        answer.raise_for_status()
        data = answer.json()
        choice, usage = data["choices"][0], data["usage"]
        return Reply(
            choice["message"], choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"], data["id"]
        )

    async def count(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> int:
        raise NotImplementedError("these conversations have no budget of their own")


async def by_http(engine: Engine, folder: Path, play: Play, bridging: Bridging, policy: SessionPolicy) -> Capture:
    async with served(engine, folder / "http.sqlite", bridging=bridging) as gateway:
        await gateway.gateway.bridger.ready()
        session = await gateway.admin.mint("same", policy, {})
        async with gateway.http(session) as http:
            await play(HttpModel(http))
        await gateway.admin.seal("same")
        return await gateway.admin.capture("same")


async def in_process(engine: Engine, folder: Path, play: Play, bridging: Bridging, policy: SessionPolicy) -> Capture:
    async with model_side(engine, folder / "own.sqlite", bridging=bridging) as side:
        async with side.session("same", policy, {}) as session:
            await play(session.endpoint)
            return await session.capture()


def rows(capture: Capture) -> list[dict[str, Any]]:
    """What is trained of a capture, token for token; and what of the conversation is kept with it.

    Ids of tool calls are numbered: engines and readers of replies make them up.
    """
    found = [
        {
            "prompt": row.prompt_token_ids,
            "completion": row.completion_token_ids,
            "mask": row.loss_mask,
            "logps": row.per_token_logps,
            "turns": row.metadata["turns"],
            "messages": row.request["messages"],
            "tools": row.request["tools"],
            "response": row.response,
        }
        for row in to_row_trace(capture).turns
    ]
    text = json.dumps(found)
    for row in found:
        said = [*row["messages"], row["response"]["choices"][0]["message"]]
        for number, call in enumerate(call for message in said for call in message.get("tool_calls") or []):
            text = text.replace(json.dumps(call["id"]), f'"call {number}"')
    numbered: list[dict[str, Any]] = json.loads(text)
    return numbered

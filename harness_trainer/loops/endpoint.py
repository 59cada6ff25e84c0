"""The model of one rollout, called in process: the same pipeline, and the same record, as an agent's call by HTTP.

Owns the way from a conversation to a call of `capture_proxy` and back to a reply. What is sampled, recorded and refused
is the pipeline's. Made by `rollouts.white_box` for the session of one rollout.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from capture_proxy.dialects.base import Call
from capture_proxy.dialects.body import parse_json
from capture_proxy.dialects.openai_chat import call_of
from capture_proxy.errors import BadRequest, CaptureError, EngineError, EngineUnreachable
from capture_proxy.session import Live
from capture_proxy.turn import Turns
from capture_proxy.types import IN_PROCESS, Turn
from harness_trainer.loops.base import Message, Reply

_RETRIES_S = (0.5, 2.0)  # an engine's error in between, which an agent's SDK would repeat too


class Endpoint:
    """`loops.base.Model` for the session `live`; `model` is the name that its calls give."""

    def __init__(self, turns: Turns, live: Live, model: str) -> None:
        self._turns = turns
        self._live = live
        self._model = model

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        max_tokens: int | None = None,
        **sampling: Any,
    ) -> Reply:
        call = self._call(messages, tools, max_tokens, sampling)
        for pause_s in (*_RETRIES_S, None):
            try:
                turn = await self._turn(call)
                break
            except EngineError as error:
                if pause_s is None or isinstance(error, EngineUnreachable):  # the gate has waited for that one
                    raise
                await asyncio.sleep(pause_s)
        return Reply(
            # A copy: the recorded message is what later prompts are told apart by.
            message=copy.deepcopy({"content": None, **turn.message, "role": "assistant"}),
            finish_reason=turn.finish_reason,
            num_prompt_tokens=len(turn.prompt_ids_P),
            num_completion_tokens=len(turn.completion_ids_T),
            turn_id=turn.turn_id,
            prompt_ids=turn.prompt_ids_P,
            completion_ids=turn.completion_ids_T,
        )

    async def _turn(self, call: Call) -> Turn:
        listener = await self._turns.start(self._live, call, IN_PROCESS)
        try:
            turn = await listener.last()
        finally:
            listener.leave()
        if isinstance(turn, CaptureError):
            raise turn
        if turn is None:
            raise EngineError("the call ended without a reply")
        return turn

    async def count(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> int:
        return await self._turns.count(self._live, self._call(messages, tools, None, {}))

    def _call(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int | None,
        sampling: Mapping[str, Any],
    ) -> Call:
        body = {**sampling, "model": self._model, "messages": list(messages), "tools": list(tools)}
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        return call_of(_as_sent(body))


def _as_sent(body: dict[str, Any]) -> dict[str, Any]:
    """The request as JSON would carry it: nothing in it is shared with the caller, who may go on changing his lists."""
    try:
        sent: dict[str, Any] = orjson.loads(orjson.dumps(body))
    except (TypeError, orjson.JSONEncodeError):  # half a surrogate pair, a number beyond 64 bits, no JSON at all
        try:
            sent = parse_json(json.dumps(body).encode())
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequest(f"a message, a tool or a sampling field is no JSON: {error}") from None
    return sent

"""Groups of rollouts whose every token came through the real gateway, from a scripted engine: food for the learner.

Owns a tool conversation of a given number of turns and sizes, and the capture of it. One byte is one token (see
`capture_proxy.engines.scripted`), so sizes are exact and every id is below 262. Used by `packing` and `step_overhead`.
"""

from __future__ import annotations

import json
import random
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from capture_proxy.engines.base import ChatRequest
from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.gateway import Gateway, agent_app
from capture_proxy.store import Store
from capture_proxy.trace import to_row_trace
from capture_proxy.types import SessionPolicy, Turn
from harness_trainer.rollouts.types import Outcome, RolloutResult

_TOOLS = [{"type": "function", "function": {"name": "sh", "description": "Run a command.", "parameters": {}}}]
_CALL_TOKENS = 60  # of a tool call without its argument, markers included


@dataclass(frozen=True, slots=True)
class Shape:
    """How the rollouts of a run look; sizes are tokens, about."""

    group_size: int = 8
    num_turns: int = 20
    num_prompt: int = 600  # the system's and the task's messages
    num_sampled: int = 100  # of each reply
    num_answered: int = 300  # the tool's answer after it
    keeps_reasoning: bool = True  # False: the agent drops each reply's reasoning from its history


@dataclass(frozen=True, slots=True)
class Recorded:
    """A rollout as the learner gets it, and the calls that it was made of, in order."""

    result: RolloutResult
    turns: list[Turn]


async def record(folder: Path, num_groups: int, shape: Shape, *, seed: int = 0) -> list[list[Recorded]]:
    """That many groups; the rollouts of a group share their task, the groups their system message."""
    words = random.Random(seed)

    def reply(request: ChatRequest) -> Reply:
        text = _text(words, shape.num_sampled - _CALL_TOKENS)
        half = len(text) // 2
        return Reply(reasoning=text[:half], tool_calls=[("sh", {"command": text[half:]})])

    gateway = Gateway(ScriptedEngine(reply, version="v1"), Store.open(folder / "captures.sqlite"))
    transport = httpx.ASGITransport(app=agent_app(gateway))
    async with gateway.running(), httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        return [
            [await _rollout(gateway, http, shape, words, group_id, slot) for slot in range(shape.group_size)]
            for group_id in range(num_groups)
        ]


async def _rollout(
    gateway: Gateway, http: httpx.AsyncClient, shape: Shape, words: random.Random, group_id: int, slot: int
) -> Recorded:
    rollout_id = f"g{group_id}-{slot}"
    session = await gateway.sessions.mint(rollout_id, SessionPolicy(), {})
    await _converse(http, session.token, shape, words, group_id)
    capture = await gateway.sessions.capture(rollout_id)
    result = RolloutResult(
        rollout_id,
        group_id,
        f"task-{group_id}",
        "scripted",
        0,
        Outcome.OK,
        reward=float(slot),
        trace=to_row_trace(capture).model_dump(),
        num_turns=shape.num_turns,
        num_trainable_turns=shape.num_turns,
        num_completion_tokens=sum(len(turn.completion_ids_T) for turn in capture.turns),
        stages_s={"agent": 1.0},
        tool_calls={"sh": shape.num_turns},
    )
    return Recorded(result, sorted(capture.turns, key=lambda turn: turn.index))


async def _converse(http: httpx.AsyncClient, token: str, shape: Shape, words: random.Random, group_id: int) -> None:
    system, task = shape.num_prompt // 2, random.Random(group_id)
    history: list[dict[str, Any]] = [
        {"role": "system", "content": _text(random.Random(-1), system)},
        {"role": "user", "content": _text(task, shape.num_prompt - system)},
    ]
    for _ in range(shape.num_turns):
        body = {"model": "scripted", "messages": history, "tools": _TOOLS}
        answer = await http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {token}"})
        message = answer.raise_for_status().json()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        echoed = {"role": "assistant", "content": message["content"], "tool_calls": [call]}
        if shape.keeps_reasoning:
            echoed["reasoning_content"] = message["reasoning_content"]
        output = json.dumps({"stdout": _text(words, shape.num_answered)})
        history = [*history, echoed, {"role": "tool", "tool_call_id": call["id"], "content": output}]


def _text(words: random.Random, num_tokens: int) -> str:
    return "".join(words.choices(string.ascii_lowercase + " ", k=max(1, num_tokens)))

"""Recorded sessions for tests, without a gateway: requests as agents send them, ids as the toy tokenizer gives them."""

from __future__ import annotations

import json
from typing import Any

from capture_proxy.engines.base import ChatRequest
from capture_proxy.engines.scripted import END, render
from capture_proxy.graph import assign_roles
from capture_proxy.types import Capture, Session, SessionPolicy, Turn, TurnRole, TurnStatus, VersionSpan

Message = dict[str, Any]


def tools(*names: str) -> list[Message]:
    return [{"type": "function", "function": {"name": name, "parameters": {}}} for name in names]


BASH = tools("bash")


def said(role: str, content: Any, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def system(text: str = "You are an agent.") -> Message:
    return said("system", text)


def user(text: str) -> Message:
    return said("user", text)


def answer(text: str = "(no output)", call_id: str = "c0") -> Message:
    return said("tool", text, tool_call_id=call_id)


def reply(text: str | None = None, *calls: tuple[str, dict[str, Any]], reasoning: str = "") -> Message:
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for i, (name, arguments) in enumerate(calls)
        ]
    return message


class Recording:
    """Calls in order; `ask` returns the reply as the agent received it."""

    def __init__(self, session_id: str = "s") -> None:
        self.session = Session(session_id, "token", SessionPolicy(), {"task": "t"})
        self.turns: list[Turn] = []

    def ask(
        self,
        messages: list[Message],
        got: Message,
        *,
        offered: list[Message] | None = BASH,
        model: str = "m",
        status: TurnStatus = TurnStatus.OK,
        ids: bool = True,
        at: float | None = None,
        **fields: Any,
    ) -> Message:
        index = len(self.turns)
        prompt = render(ChatRequest(model, messages, offered or [], None, {}, None)) if ids else []
        sampled = [*render(ChatRequest(model, [got], [], None, {}, None))[1:-2], END] if ids else []
        if status is TurnStatus.ABORTED:
            sampled.pop()
        request = {"model": model, "messages": list(messages), "tools": offered or [], **fields.pop("request", {})}
        sampling = fields.pop("requested_sampling", {})
        started = float(index) if at is None else at
        turn = Turn(
            turn_id=f"{self.session.session_id}-{index:04d}",
            session_id=self.session.session_id,
            index=index,
            dialect="openai_chat",
            request=request,
            requested_sampling=sampling,
            sampling={"temperature": 1.0},
            prompt_ids_P=prompt,
            completion_ids_T=[] if status is TurnStatus.FAILED else sampled,
            logprobs_T=[] if status is TurnStatus.FAILED else [-0.25 - i / 1000 for i in range(len(sampled))],
            version_spans=[] if status is TurnStatus.FAILED else [VersionSpan("v3", 0, len(sampled))],
            message={} if status is TurnStatus.FAILED else got,
            finish_reason=None if status is not TurnStatus.OK else "tool_calls" if got.get("tool_calls") else "stop",
            status=status,
            role=TurnRole.AGENT,
            started_at=started,
            finished_at=started + 0.5,
            **fields,
        )
        self.turns.append(turn)
        return got

    @property
    def capture(self) -> Capture:
        return Capture(self.session, self.turns)

    def sides(self) -> dict[int, str]:
        """Side reasons by place in the session."""
        assign_roles(self.turns)
        return {turn.index: turn.side_reason for turn in self.turns if turn.side_reason}

    def work(self, first: list[Message], num_turns: int = 2, **how: Any) -> list[Message]:
        """A tool loop from `first` on; returns the history after its last reply."""
        history = list(first)
        for i in range(num_turns - 1):
            history.append(self.ask(history, reply(f"step {i}", ("bash", {"command": f"ls {i}"})), **how))
            history.append(answer(f"file{i}"))
        history.append(self.ask(history, reply("done"), **how))
        return history


TOOLS_MANY = [{**tool, "description": "what it does " * 40} for tool in tools(*(f"tool{i}" for i in range(20)))]

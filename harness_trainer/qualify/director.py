"""The scripted model: plays a scenario to whatever agent asks, in that agent's own tools.

Owns which conversation a request is of and how far the scenario is, told by the request alone, so that retries and
calls beside the agent's work change nothing. Its replies go through the product's `ScriptedEngine`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from capture_proxy.engines.base import ChatRequest
from capture_proxy.engines.scripted import Reply
from capture_proxy.errors import EngineError
from harness_trainer.qualify import vocabulary
from harness_trainer.qualify.scenarios import (
    ANSWER,
    ANSWER_FILE,
    LAST_WORDS,
    SUBTASK_MARK,
    TASK_MARK,
    Fault,
    Scenario,
)

_STEP = re.compile(r"Now step (\d+)\.")
_FAULTY_STEP = 2  # a tool call, so that what leaks of the broken attempt would be one


class Director:
    """A script for `ScriptedEngine`. `drop` is called when the reply that is about to be sent shall be cut off."""

    def __init__(self, scenario: Scenario, drop: Callable[[], None]) -> None:
        self._scenario, self._drop = scenario, drop
        self._fault = scenario.fault
        self.num_main = 0  # replies that belong to the agent's work, sub-agents included
        self.num_side = 0  # replies to calls that offer no tools
        self.num_subs = 0  # sub-agents that were heard of
        self.lacks = ""  # what the scenario needs and the agent does not offer; "" = nothing
        self.faulted = False

    def __call__(self, request: ChatRequest) -> Reply:
        if vocabulary.wants_edit_blocks(request):
            self.num_main += 1
            return self._in_blocks()
        if not request.tools and not vocabulary.wants_keystrokes(request):
            self.num_side += 1
            return Reply(LAST_WORDS)
        reply = self._sub(request) if _is_sub(request) else self._main(request)
        self.num_main += 1
        return reply

    @property
    def num_asked(self) -> int:
        """Replies to the agent's own calls. One that never offers a tool does its work in words."""
        return self.num_main or self.num_side

    @property
    def num_conversations(self) -> int:
        return 1 + self.num_subs

    def _main(self, request: ChatRequest) -> Reply:
        step = _steps_done(request) + 1
        steps = self._scenario.steps
        if step > len(steps) and not self._scenario.endless:
            return self._end(request)
        calls = steps[min(step, len(steps)) - 1](request)
        if None in calls:
            self.lacks = self._scenario.needs
            return self._end(request)
        if step == _FAULTY_STEP:
            self._go_wrong()
        # In pieces, so that a connection can break between two of them.
        words = [f"Now step {step}.", " It is ", "a tool ", "call.\n"]
        known = [call for call in calls if call is not None]
        if vocabulary.wants_keystrokes(request):
            return Reply(vocabulary.keystrokes("".join(words), known, done=False))
        return Reply(words, tool_calls=known)

    def _end(self, request: ChatRequest) -> Reply:
        if vocabulary.wants_keystrokes(request):
            return Reply(vocabulary.keystrokes(LAST_WORDS, [], done=True))
        call = vocabulary.finish(request, LAST_WORDS)
        return Reply(LAST_WORDS, tool_calls=[call] if call else [])

    def _sub(self, request: ChatRequest) -> Reply:
        if not any(message.get("role") == "assistant" for message in request.messages):
            self.num_subs += 1
        call = vocabulary.finish(request, "I am there.")
        return Reply("I am there.", tool_calls=[call] if call else [])

    def _in_blocks(self) -> Reply:
        if self._scenario.name not in ("write", "hosts"):
            self.lacks = self._scenario.needs
        return Reply(vocabulary.edit_block(ANSWER_FILE, ANSWER) + LAST_WORDS)

    def _go_wrong(self) -> None:
        fault, self._fault = self._fault, None
        if fault is None:
            return
        self.faulted = True
        if fault is Fault.ENGINE_ERROR:
            raise EngineError("the engine answered 500: scripted fault")
        self._drop()


def _is_sub(request: ChatRequest) -> bool:
    heard = [vocabulary.words_of(m) for m in request.messages if m.get("role") in ("system", "user")]
    return any(SUBTASK_MARK in text for text in heard) and not any(TASK_MARK in text for text in heard)


def _steps_done(request: ChatRequest) -> int:
    """The highest step that the history holds a reply of."""
    said = [_STEP.findall(_all_of(m)) for m in request.messages if m.get("role") == "assistant"]
    return max((int(number) for found in said for number in found), default=0)


def _all_of(message: dict[str, Any]) -> str:
    return json.dumps(message, ensure_ascii=False, default=str)

"""One episode on an ORS session: its prompt, the tools of this very session, and what it earned.

Owns what a tool's answer comes to. The outcome reward is the last one of the episode that is not None; None where
nothing scored. A call that failed, or was refused, is the tool's reply to the model and takes no earlier reward away.
`finished` ends the loop. An environment with a terminal tool takes the model's last plain message as its answer: that
tool is called with it when the loop is over. Called by `environment`, which makes the session.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from harness_trainer.loops.base import EpisodeLost, Message, Scores, SetupFailure, Tool, ToolReply, Transcript
from harness_trainer.loops.contents import error_content
from harness_trainer.loops.ors.blocks import NOTHING_SAID, as_content, as_messages, text_of
from harness_trainer.loops.ors.credentials import Credentials
from harness_trainer.loops.ors.session import CallRefused, Session, ToolRaised
from harness_trainer.loops.reward_functions import RewardFailed, RewardFunction, Sample
from harness_trainer.own_thread import OwnThread

OUTCOME = "outcome"  # name of the reward that the environment itself gives
_FINISHED = "episode_finished"  # why a server refuses calls after the end
_NO_ARGUMENTS = {"type": "object", "properties": {}}


@dataclass(slots=True)
class OrsState:
    """An episode so far, as reward functions see it in `environments`; TRL's adapter has the same names.

    Example: OrsState(1, "train", reward=1.0, rewards=[None, 1.0], metadata=[None, None], finished=True).
    """

    task_index: int
    split: str
    reward: float | None = None  # the last that is not None
    rewards: list[float | None] = field(default_factory=list)  # of each call, in order
    metadata: list[dict[str, Any] | None] = field(default_factory=list)
    finished: bool = False
    last_output: str = ""


class OrsEpisode:
    """`loops.base.Episode` of a session."""

    def __init__(
        self,
        session: Session,
        state: OrsState,
        row: Mapping[str, Any],
        credentials: Credentials,
        functions: Sequence[RewardFunction] = (),
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.state = state
        self._tools: list[Tool] = []
        self._session = session
        self._row = row
        self._mask = credentials.mask
        self._functions = functions
        self._weights = weights or {}
        self._logged: dict[str, float] = {}
        self._terminal: Mapping[str, Any] | None = None

    @property
    def tools(self) -> Sequence[Tool]:
        return self._tools

    @property
    def done(self) -> bool:
        return self.state.finished

    @property
    def facts(self) -> Mapping[str, float]:
        return {"finished": float(self.state.finished), **self._logged}

    async def start(self) -> list[Message]:
        listed = await self._session.tools()
        terminal = listed.get("terminal_tool")
        self._terminal = terminal if isinstance(terminal, Mapping) and terminal.get("name") else None
        self._tools = [self._tool(spec) for spec in listed["tools"]]
        names = [tool.name for tool in self._tools]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise SetupFailure(f"task {self.state.task_index} has two tools that are called {twice!r}")
        return as_messages(await self._session.messages(), self._mask)

    async def rewards(self, transcript: Transcript) -> Scores:
        """Raises RewardFailed, EpisodeLost, EnvironmentFault."""
        await self._take_last_message(transcript)
        if not self._functions:
            if self.state.reward is not None and math.isinf(self.state.reward):
                raise RewardFailed(f"the environment gave {self.state.reward} as its reward")
            return Scores({OUTCOME: self.state.reward})
        sample = Sample(self.state, self._row, transcript, self._logged)
        thread = OwnThread(f"rewards of task {self.state.task_index}")
        try:
            by_name = {}
            for function in self._functions:
                (by_name[function.name],) = await function.score([sample], thread.call)
        finally:
            thread.close()
        return Scores(by_name, self._weights)

    async def _take_last_message(self, transcript: Transcript) -> None:
        """The model's answer for the terminal tool; a reply that was cut is none."""
        if self._terminal is None or self.state.finished or not transcript.completion:
            return
        last = transcript.completion[-1]
        whole = bool(transcript.replies) and transcript.replies[-1].finish_reason != "length"
        if not whole or last.get("role") != "assistant" or last.get("tool_calls"):
            return
        argument, content = self._terminal.get("arg"), last.get("content") or ""
        text = content if isinstance(content, str) else text_of(content)
        await self._call(str(self._terminal["name"]), {} if argument is None else {str(argument): text})

    def _tool(self, spec: Any) -> Tool:
        """A tool as the server describes it: its JSON schema is handed on unread."""
        if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str):
            raise EpisodeLost(f"the server lists a tool that makes no sense: {str(spec)[:80]}")
        name, schema = spec["name"], spec.get("input_schema") or _NO_ARGUMENTS
        return Tool(name, str(spec.get("description") or ""), schema, partial(self._call, name))

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolReply:
        """Raises EpisodeLost, EnvironmentFault."""
        try:
            answer = await self._session.call(name, arguments)
        except (ToolRaised, CallRefused) as error:
            return self._failed(str(error))
        output = answer.get("output")
        if not answer.get("ok", True) or not isinstance(output, Mapping):
            over = answer.get("reason") == _FINISHED
            self.state.finished = self.state.finished or over
            return self._failed(self._mask(str(answer.get("error") or "the call was refused")), done=over)
        content = as_content(output.get("blocks"), self._mask) or NOTHING_SAID
        metadata = output.get("metadata")
        self._note(_reward(output.get("reward")), metadata if isinstance(metadata, dict) else None, text_of(content))
        self.state.finished = bool(output.get("finished"))
        return ToolReply(content, done=self.state.finished)

    def _failed(self, why: str, *, done: bool = False) -> ToolReply:
        self._note(None, None, f"Error: {why}")
        return ToolReply(error_content(why), failed=True, done=done)

    def _note(self, reward: float | None, metadata: dict[str, Any] | None, text: str) -> None:
        state = self.state
        state.rewards.append(reward)
        state.metadata.append(metadata)
        state.last_output = text
        if reward is not None:
            state.reward = reward


def _reward(value: Any) -> float | None:
    """None and what is no number say nothing; 0 and less do."""
    if isinstance(value, str) or value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(number) else number

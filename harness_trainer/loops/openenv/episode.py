"""One episode of an OpenEnv environment: a session from `reset` to its reward.

Owns which columns `reset` gets (all but the prompt), what is shown of its answers, and what the steps earned: the
reward is the envelope's, null says nothing, and where nothing was said the episode is unscored. What the server refuses
(an invalid action, a `step` that raised) is the tool's reply to the model; a session that ends is `EpisodeLost`. Called
by `tool_loop`; made by `environment`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from harness_trainer.environments.openenv_config import OpenEnvConfig
from harness_trainer.loops.base import Message, Scores, SetupFailure, Tool, ToolReply, Transcript
from harness_trainer.loops.class_episode import opening
from harness_trainer.loops.contents import error_content
from harness_trainer.loops.openenv.clients import made_action
from harness_trainer.loops.openenv.session import Refused, Said, Session, SessionSpent
from harness_trainer.loops.openenv.tools import LIST_TOOLS, ActionTool, listed_tools, observed, tool_result
from harness_trainer.loops.reward_functions import RewardFunction, Sample
from harness_trainer.loops.rows import prompt_of
from harness_trainer.own_thread import OwnThread


@dataclass(frozen=True, slots=True)
class Offer:
    """What a server offers every episode. `tools` is empty where each session lists its own (MCP)."""

    name: str
    tools: Sequence[ActionTool]
    model: type | None = None  # of the actions, where a typed client sends them
    functions: Sequence[RewardFunction] = ()  # a person's, instead of the environment's reward


@dataclass(slots=True)
class OpenEnvState:
    """An episode so far, as reward functions see it in `environments`.

    Example: OpenEnvState(reward=1.0, rewards=[None, 1.0], done=True, observation={"text": "Right."}, num_steps=2).
    """

    reward: float | None = None  # the last that is not None
    rewards: list[float | None] = field(default_factory=list)  # of each step, in order
    done: bool = False
    observation: dict[str, Any] = field(default_factory=dict)  # the last one
    num_steps: int = 0


class OpenEnvEpisode:
    """`loops.base.Episode` of a session."""

    def __init__(self, config: OpenEnvConfig, offer: Offer, session: Session, row: Mapping[str, Any]) -> None:
        self.tools: list[Tool] = []
        self.state = OpenEnvState()
        self._config = config
        self._offer = offer
        self._session = session
        self._row = dict(row)
        self._logged: dict[str, float] = {}  # by reward functions

    @property
    def done(self) -> bool:
        return self.state.done

    @property
    def facts(self) -> dict[str, float]:
        return {"steps": float(self.state.num_steps), **self._logged}

    async def start(self) -> list[Message]:
        """Raises SetupFailure, EpisodeLost, EnvironmentFault."""
        columns = {name: value for name, value in self._row.items() if name != "prompt"}
        try:
            said = await self._session.reset(columns)
            offered = self._offer.tools or listed_tools(await self._session.step(LIST_TOOLS))
        except Refused as error:
            raise SetupFailure(f"the environment could not be reset: {error}") from error
        if said.done:
            raise SetupFailure("the environment says after its reset that the episode is over")
        self.state.observation = said.fields
        if not offered:
            raise SetupFailure("the environment lists no tools after its reset")
        self.tools = [Tool(each.name, each.description, each.parameters, partial(self._call, each)) for each in offered]
        prompt, seen = prompt_of(self._row), observed(said, self._config.observation)
        if seen and isinstance(seen, str) and prompt[-1].get("content"):
            seen = f"\n\n{seen}"  # a person who writes only a prompt cannot know what comes behind it
        return opening(prompt, seen, f"reset of {self._offer.name}")

    async def rewards(self, transcript: Transcript) -> Scores:
        """Raises RewardFailed, EnvironmentFault."""
        config = self._config
        if not self._offer.functions:
            said = [reward for reward in self.state.rewards if reward is not None]
            earned = (sum(said) if config.reward == "sum" else said[-1]) if said else config.unrewarded
            return Scores({config.reward_name: earned})
        sample = Sample(self.state, self._row, transcript, self._logged)
        thread, by_name = OwnThread(f"rewards of {self._offer.name}"), {}
        try:
            for function in self._offer.functions:
                (by_name[function.name],) = await function.score([sample], thread.call)
        finally:
            thread.close()
        return Scores(by_name, config.reward_weights)

    async def _call(self, tool: ActionTool, arguments: dict[str, Any]) -> ToolReply:
        """Raises EpisodeLost, and what the model of a typed client's actions does."""
        if self.done:
            return ToolReply(error_content("the episode is over"), failed=True, done=True)
        action = made_action(self._offer.model, tool.action(arguments))
        try:
            said = await self._session.step(action)
        except Refused as error:
            self.state.done = isinstance(error, SessionSpent)
            return ToolReply(error_content(str(error)), failed=True, done=self.done)
        self._take(said)
        if tool.mcp:
            return tool_result(said, self._config.observation)
        return ToolReply(observed(said, self._config.observation), done=said.done)

    def _take(self, said: Said) -> None:
        state = self.state
        state.num_steps += 1
        state.done, state.observation = said.done, said.fields
        state.rewards.append(said.reward)
        state.reward = state.reward if said.reward is None else said.reward

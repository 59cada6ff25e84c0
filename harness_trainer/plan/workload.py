"""What a run does to a rollout and how fast its parts are: numbers that no config holds, each with its source.

Owns the list of these numbers and the assumptions in their place. They come, in this order, from a person (flags), from
a run that was measured (`measured`), from the GPU's data sheet (`speeds`), or are assumed, and the plan says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from harness_trainer.config import RunConfig
from harness_trainer.environments import WHITE_BOX
from harness_trainer.plan.amounts import Number

# What is assumed of a coding agent's rollout where nothing is known; docs/plan.md says where from.
FIRST_PROMPT, NEW_TOKENS, AGENT_S = 8000, 500, 60.0
# Of a rollout whose turns are ours: rules and tools in the prompt, a step's observation, no sandbox and no agent.
OWN_FIRST_PROMPT, OWN_NEW_TOKENS, OWN_AGENT_S = 1000, 200, 5.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Means over rollouts. Tokens are those of the agent's own turns."""

    turns: Number  # model calls of a rollout
    first_prompt: Number  # tokens of its first call's prompt: system prompt, tools, instruction
    new_tokens: Number  # tokens that each later call adds: tool results
    reply_tokens: Number  # tokens sampled in one call
    agent_s: Number  # seconds of a rollout outside the engine: sandbox, tools, agent, verifier
    engine_s: Number  # seconds of a rollout inside model calls
    forwarded: Number  # distinct tokens of a rollout that go through the learner
    kept: Number  # share of the groups that are trained, and not dropped for lack of a preference
    call_tokens_s: Number  # tokens/s that one call is sampled at
    engine_tokens_s: Number  # tokens/s that the engine samples at most, over all calls
    prefill_tokens_s: Number  # tokens/s of prompts that it reads at most
    learner_tokens_s: Number  # distinct tokens/s, forward and backward, of all processes together
    step_s: Number  # seconds of a step beside those: optimizer, weight update, checkpoint

    def items(self) -> list[tuple[str, Number]]:
        return [(item.name, getattr(self, item.name)) for item in fields(self)]

    @property
    def sampled(self) -> float | None:
        """Tokens of a rollout that the engine samples."""
        if self.turns.value is None or self.reply_tokens.value is None:
            return None
        return self.turns.value * self.reply_tokens.value

    @property
    def prefilled(self) -> float | None:
        """Tokens of a rollout's prompts that the engine computes: earlier turns are in its prefix cache."""
        if self.turns.value is None or self.first_prompt.value is None or self.new_tokens.value is None:
            return None
        return self.first_prompt.value + max(0.0, self.turns.value - 1) * self.new_tokens.value

    @property
    def context(self) -> float | None:
        """Tokens of its last call, prompt and reply."""
        return None if self.sampled is None or self.prefilled is None else self.sampled + self.prefilled


NAMES = tuple(item.name for item in fields(Workload))
UNKNOWN = Number(None, "unknown")


def workload(config: RunConfig, *sources: Mapping[str, Number]) -> Workload:
    """The first source that knows a number gives it; what none knows is assumed, computed from others, or unknown."""
    found: dict[str, Number] = {}
    for name in NAMES:
        known = (source[name] for source in sources if name in source and source[name].value is not None)
        found[name] = next(known, UNKNOWN)
    rollouts = config.rollouts
    assumed = {
        "turns": Number(float(rollouts.max_turns), "assumed", "as many as rollouts.max_turns allows"),
        "reply_tokens": Number(float(rollouts.max_tokens), "assumed", "as many as rollouts.max_tokens allows"),
        **_assumed_of_a_rollout(isinstance(config.env, WHITE_BOX)),
        "kept": Number(1.0, "assumed", "every group shows a preference; what is dropped costs as much"),
    }
    for name, number in assumed.items():
        if found[name].value is None:
            found[name] = number
    made = Workload(**found)
    if made.forwarded.value is None:
        found["forwarded"] = _forwarded(made, rollouts.group_size)
        made = Workload(**found)
    if made.engine_s.value is None:
        found["engine_s"] = _engine_s(made)
        made = Workload(**found)
    return made


def _assumed_of_a_rollout(turns_are_ours: bool) -> dict[str, Number]:
    if turns_are_ours:
        return {
            "first_prompt": Number(float(OWN_FIRST_PROMPT), "assumed", "an environment's rules and tools"),
            "new_tokens": Number(float(OWN_NEW_TOKENS), "assumed", "an observation between two calls"),
            "agent_s": Number(OWN_AGENT_S, "assumed", "an environment's steps; no sandbox, no agent"),
        }
    return {
        "first_prompt": Number(float(FIRST_PROMPT), "assumed", "a coding agent's system prompt and tools"),
        "new_tokens": Number(float(NEW_TOKENS), "assumed", "tool results between two calls"),
        "agent_s": Number(AGENT_S, "assumed", "sandbox, tools and verifier together"),
    }


def _forwarded(made: Workload, group_size: int) -> Number:
    """The rollouts of a group share their first prompt, which goes through the model once."""
    if made.context is None or made.first_prompt.value is None:
        return UNKNOWN
    own = made.context - made.first_prompt.value
    return Number(own + made.first_prompt.value / group_size, "computed", "one row; the group shares its first prompt")


def _engine_s(made: Workload) -> Number:
    if made.sampled is None or made.call_tokens_s.value is None:
        return UNKNOWN
    reading = 0.0
    if made.prefilled is not None and made.prefill_tokens_s.value is not None:
        reading = made.prefilled / made.prefill_tokens_s.value
    return Number(made.sampled / made.call_tokens_s.value + reading, "computed", "sampled / call_tokens_s, and prompts")

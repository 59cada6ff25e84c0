"""A run's sources: what is known of a rollout of each, and of one of the run, which is their mean by weight. Pure.

Owns the mixing. Numbers come as for a run of one source (`workload`): what a person gives or a run has shown is of all
sources together; what is assumed is assumed of each with its own settings. Called by `plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from harness_trainer.config import RunConfig, own_rollouts
from harness_trainer.environments import SourceConfig
from harness_trainer.plan.amounts import Number
from harness_trainer.plan.amounts import Source as Origin
from harness_trainer.plan.workload import NAMES, UNKNOWN, Workload, workload


@dataclass(frozen=True, slots=True)
class Source:
    """Example: Source("wordle", 0.25, "class", at_once=16, sandboxes=0, load=...) of a run with weights 3 and 1."""

    name: str  # "" = the run has one
    share: float  # of the groups
    kind: str  # as `--env` names it; own = agents in our sandboxes
    at_once: int | None  # of its rollouts, as its environment is set; None = as many as there are places
    sandboxes: int  # of ours that a rollout takes
    load: Workload

    @property
    def rollout_s(self) -> float | None:
        """Seconds of a rollout in its place."""
        agent_s, engine_s = self.load.agent_s.value, self.load.engine_s.value
        return None if agent_s is None or engine_s is None else agent_s + engine_s


def sources_of(config: RunConfig, *known: Mapping[str, Number]) -> list[Source]:
    """In the order of the config. `known` as `workload` takes them. Raises ValueError for settings that do not fit."""
    whole = sum(source.weight for source in config.each_source)
    return [_source(config, source, source.weight / whole, known) for source in config.each_source]


def _source(config: RunConfig, source: SourceConfig, share: float, known: Sequence[Mapping[str, Number]]) -> Source:
    alone = config.model_copy(
        update={"rollouts": own_rollouts(config.rollouts, source), "env": source.env, "sources": None}
    )
    limit = next((n for name in ("max_sessions", "max_episodes") if (n := getattr(source.env, name, None))), None)
    fresh = 2 if config.rollouts.verify == "fresh" else 1
    own = source.env.type == "own"
    return Source(source.name, share, source.env.type, limit, fresh if own else 0, workload(alone, *known))


def mixed(sources: Sequence[Source]) -> Workload:
    """Of a rollout of the run. Products of means are those of the run: its tokens are right, not only its turns."""
    if len(sources) == 1:
        return sources[0].load
    made = Workload(**{name: _mean(sources, attrgetter(name)) for name in NAMES})
    turns = made.turns.value
    found: dict[str, Number] = {}
    if turns and (sampled := _weighed(sources, lambda load: load.sampled)) is not None:
        found["reply_tokens"] = _like(made.reply_tokens, sampled / turns)
    later = _weighed(sources, lambda load: None if load.turns.value is None else max(0.0, load.turns.value - 1))
    added = _weighed(sources, _added)
    if turns is not None and later and added is not None and turns > 1:
        found["new_tokens"] = _like(made.new_tokens, added / (turns - 1))
    return replace(made, **found)


def _added(load: Workload) -> float | None:
    if load.turns.value is None or load.new_tokens.value is None:
        return None
    return max(0.0, load.turns.value - 1) * load.new_tokens.value


def _mean(sources: Sequence[Source], of: Callable[[Workload], Number]) -> Number:
    numbers = [of(source.load) for source in sources]
    if all(number == numbers[0] for number in numbers):
        return numbers[0]
    value = _weighed(sources, lambda load: of(load).value)
    if value is None:
        return UNKNOWN
    origins = {number.source for number in numbers}
    origin: Origin = "assumed" if "assumed" in origins else "computed"
    return Number(value, origin, "mean of the sources by weight")


def _like(number: Number, value: float) -> Number:
    return number if number.value is None or abs(value - number.value) < 1e-9 else replace(number, value=value)


def _weighed(sources: Sequence[Source], of: Callable[[Workload], float | None]) -> float | None:
    """None when it is not known of one of them."""
    total = 0.0
    for source in sources:
        value = of(source.load)
        if value is None:
            return None
        total += source.share * value
    return total

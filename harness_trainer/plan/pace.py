"""Steps per hour, and what holds them: the bounds of docs/plan.md, "Pace". Pure.

Each part of a run has a time that a step cannot beat; the longest is the bottleneck. This is the operational bound of a
closed queueing network (Denning and Buzen 1978): a run is near it when one part is clearly the slowest, and below it
where two are alike. A step that waits for its slowest rollout is not foreseen; a measured run shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness_trainer.config import RunConfig
from harness_trainer.plan.mixture import Source
from harness_trainer.plan.workload import Workload

# What a person can do about each bound.
ADVICE = {
    "learner": "more or faster GPUs for the learner (learner.num_processes), shorter rollouts, learner.dtype bfloat16",
    "engine": "further engine GPUs (engine.replicas, engine.tensor_parallel_size), shorter replies",
    "places": "more rollouts at a time (rollouts.max_concurrent), and machines for their sandboxes",
    "sandboxes": "more sandboxes started at a time (rollouts.max_creating), or warm ones",
    "source": "more of its rollouts at a time (the environment's max_sessions or max_episodes), or a lower weight",
    "staleness": "a higher learner.max_staleness: groups may then be sampled while the learner computes",
}


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds; None = not known. `bounds`: seconds that a step takes at least, by the part that it is due to."""

    rollouts_per_step: float
    rollout_s: float | None  # of one rollout in its place
    learner_s: float | None  # of a step's computation, optimizer and update
    bounds: dict[str, float | None]
    step_s: float | None
    bottleneck: str | None
    in_flight: int  # rollouts at a time in a steady run

    @property
    def per_hour(self) -> float | None:
        return None if not self.step_s else 3600 / self.step_s


def pace(config: RunConfig, load: Workload, sources: Sequence[Source] = (), on_nodes: int | None = None) -> Pace:
    """What the numbers of `load` come to with the settings of `config`.

    Of `sources`, those whose environments take fewer rollouts at a time than there are places are bounds of their own.
    `on_nodes`: how many rollouts the nodes of a Ray cluster take at a time; None = there are none, or it is not known.
    """
    learner, rollouts = config.learner, config.rollouts
    wanted = learner.groups_per_step * rollouts.group_size / (load.kept.value or 1.0)
    # On nodes `max_running` is each node's own.
    most = on_nodes if rollouts.executor == "ray" else rollouts.max_running
    places = min(rollouts.max_concurrent, most or rollouts.max_concurrent)
    open_rollouts = learner.groups_per_step * (learner.max_staleness or 1) * rollouts.group_size
    in_flight = min(places, open_rollouts)
    rollout_s = _added(load.agent_s.value, load.engine_s.value)
    learner_s = _learner_s(load, learner.groups_per_step * rollouts.group_size)
    engine_s = _engine_s(load, wanted)
    bounds: dict[str, float | None] = {
        "learner": learner_s,
        "engine": engine_s,
        "places": None if rollout_s is None else wanted * rollout_s / places,
    }
    if in_flight < places:
        bounds["staleness"] = None if rollout_s is None else wanted * rollout_s / in_flight
    bounds |= {f"source {one.name}".strip(): s for one in sources if (s := _source_s(one, wanted, places)) is not None}
    needed = [bounds["learner"], bounds["places"]]
    known = {name: seconds for name, seconds in bounds.items() if seconds is not None}
    if any(seconds is None for seconds in needed):
        return Pace(wanted, rollout_s, learner_s, bounds, None, None, in_flight)
    if learner.max_staleness == 0:
        # A step's rollouts and its computation take turns.
        sampling = max(seconds for name, seconds in known.items() if name != "learner")
        sampling = max(sampling, rollout_s or 0.0)  # none is over before its own time
        both = sampling + known["learner"]
        bounds["staleness"] = both
        longer = max(known, key=lambda name: known[name])
        bottleneck = "staleness" if both > 1.25 * known[longer] else longer
        return Pace(wanted, rollout_s, learner_s, bounds, both, bottleneck, in_flight)
    slowest = max(known, key=lambda name: known[name])
    return Pace(wanted, rollout_s, learner_s, bounds, known[slowest], slowest, in_flight)


def _source_s(source: Source, wanted: float, places: int) -> float | None:
    """Seconds of a step that the places of one source's environment take; None = they are no fewer, or not known."""
    if source.at_once is None or source.at_once >= places:
        return None
    return None if source.rollout_s is None else wanted * source.share * source.rollout_s / source.at_once


def _learner_s(load: Workload, rollouts: int) -> float | None:
    if load.forwarded.value is None or not load.learner_tokens_s.value or load.step_s.value is None:
        return None
    return rollouts * load.forwarded.value / load.learner_tokens_s.value + load.step_s.value


def _engine_s(load: Workload, rollouts: float) -> float | None:
    """Seconds of the engine's whole capacity that a step's rollouts take."""
    if load.sampled is None or not load.engine_tokens_s.value:
        return None
    reading = 0.0
    if load.prefilled is not None and load.prefill_tokens_s.value:
        reading = load.prefilled / load.prefill_tokens_s.value
    return rollouts * (load.sampled / load.engine_tokens_s.value + reading)


def _added(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first + second

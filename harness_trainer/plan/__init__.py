"""What a run will need and come to, before a machine is paid for: memory, pace, hours, cost, bottleneck.

Owns putting the parts together: `shape` (the model), `learner_memory` and `engine_memory` (bytes), `fitting`,
`workload` with `measured` and `speeds` (numbers and their origins), `mixture` (several sources), `on_nodes` (a Ray
cluster's places), `pace` (bounds), `prices`. Starts nothing and reads no weights. The formulas and their sources are
docs/plan.md's. Called by `cli.plan` alone, which shows it by `report`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from harness_trainer.config import RunConfig
from harness_trainer.learner.launch import is_sharded
from harness_trainer.plan.amounts import Number
from harness_trainer.plan.engine_memory import EngineMemory, engine_memory
from harness_trainer.plan.fitting import Fit, fit
from harness_trainer.plan.learner_memory import LearnerMemory, learner_memory
from harness_trainer.plan.mixture import Source, mixed, sources_of
from harness_trainer.plan.on_nodes import OnNodes
from harness_trainer.plan.pace import Pace, pace
from harness_trainer.plan.prices import Flavor, Prices
from harness_trainer.plan.shape import ModelShape
from harness_trainer.plan.sizes import Gpu
from harness_trainer.plan.speeds import speeds
from harness_trainer.plan.workload import Workload

# What depends on the machine of a measured run: not taken over where another GPU is named.
_OF_THE_MACHINE = ("engine_s", "call_tokens_s", "engine_tokens_s", "prefill_tokens_s", "learner_tokens_s", "step_s")


@dataclass(frozen=True, slots=True)
class Machine:
    """What a run gets. `gpu` None = not in the table, so no speed is known; `memory` None = not said."""

    gpu: Gpu | None = None
    memory: int | None = None  # bytes of each GPU, or of the machine where it has none
    gpus: int | None = None  # None = as many as the config asks for


@dataclass(frozen=True, slots=True)
class Cost:
    """One machine of the price list. `hours` and `total` None = not known."""

    flavor: str
    fits: bool | None
    hours: float | None
    total: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that was found out. `report` tells it to people, `as_json` to programs."""

    config: RunConfig
    device: Literal["cuda", "cpu"]
    shape: ModelShape
    engine: EngineMemory
    learner: LearnerMemory
    fit: Fit
    load: Workload
    pace: Pace
    sources: list[Source]
    costs: list[Cost] = field(default_factory=list)
    prices: Prices | None = None
    nodes: OnNodes | None = None

    @property
    def hours(self) -> float | None:
        """Of all steps; starting up and evaluations come on top."""
        return None if self.pace.step_s is None else self.config.learner.max_steps * self.pace.step_s / 3600

    @property
    def rollouts_per_hour(self) -> float | None:
        return None if self.pace.per_hour is None else self.pace.rollouts_per_step * self.pace.per_hour

    @property
    def sandboxes_per_hour(self) -> float | None:
        """One for the agent, and one more where tests run in a fresh one; none where an environment has the turns."""
        each = sum(source.share * source.sandboxes for source in self.sources)
        if each == 0:
            return 0.0
        return None if self.rollouts_per_hour is None else self.rollouts_per_hour * each


def make_plan(
    config: RunConfig,
    shape: ModelShape,
    machine: Machine,
    *,
    given: Mapping[str, Number],
    measured: Mapping[str, Number],
    prices: Prices | None = None,
    nodes: OnNodes | None = None,
) -> Plan:
    """`given` and `measured`: numbers of a `Workload` by name, from a person and from a run."""
    plan = _for_machine(config, shape, machine, given, measured, nodes)
    if prices is None:
        return plan
    costs = [_cost(config, shape, name, each, prices, given, measured, nodes) for name, each in prices.flavors.items()]
    return replace(plan, costs=costs, prices=prices)


def _for_machine(
    config: RunConfig,
    shape: ModelShape,
    machine: Machine,
    given: Mapping[str, Number],
    measured: Mapping[str, Number],
    nodes: OnNodes | None,
) -> Plan:
    device: Literal["cuda", "cpu"] = "cpu" if config.learner.device == "cpu" else "cuda"
    kept = measured
    if machine.gpu is not None:
        kept = {name: number for name, number in measured.items() if name not in _OF_THE_MACHINE}
    sources = sources_of(config, given, kept)
    load = mixed(sources)
    if machine.gpu is not None and device == "cuda":
        sources = sources_of(config, given, kept, speeds(config, shape, machine.gpu, context=load.context))
        load = mixed(sources)
    # What is only assumed of a rollout's length is no reason to plan for less than the whole window.
    is_assumed = "assumed" in (load.turns.source, load.first_prompt.source)
    context = None if load.context is None or is_assumed else round(max(s.load.context or 0 for s in sources))
    engine = engine_memory(config, shape, device=device, context=context)
    learner = learner_memory(config.learner, shape, device=device, sharded=is_sharded(config.learner))
    memory = _machine_memory() if device == "cpu" and machine.memory is None else machine.memory
    verdict = fit(config, engine, learner, device=device, memory=memory, gpus=machine.gpus)
    found = pace(config, load, sources, None if nodes is None else nodes.places)
    return Plan(config, device, shape, engine, learner, verdict, load, found, sources, nodes=nodes)


def _cost(
    config: RunConfig,
    shape: ModelShape,
    name: str,
    flavor: Flavor,
    prices: Prices,
    given: Mapping[str, Number],
    measured: Mapping[str, Number],
    nodes: OnNodes | None,
) -> Cost:
    plan = _for_machine(config, shape, Machine(flavor.known, flavor.memory, flavor.gpus), given, measured, nodes)
    if plan.hours is None:
        return Cost(name, plan.fit.fits, None, None)
    total = plan.hours * flavor.per_hour
    if prices.per_sandbox_hour is not None and plan.rollouts_per_hour is not None and plan.pace.rollout_s is not None:
        in_sandboxes = sum(one.share * (one.rollout_s or 0.0) for one in plan.sources if one.sandboxes)
        total += plan.rollouts_per_hour * plan.hours * in_sandboxes / 3600 * prices.per_sandbox_hour
    return Cost(name, plan.fit.fits, plan.hours, total)


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

"""Bounds, bottlenecks, and where numbers come from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness_trainer.config import RunConfig
from harness_trainer.errors import SetupError
from harness_trainer.plan import Machine, make_plan
from harness_trainer.plan.engine_memory import calls_of
from harness_trainer.plan.on_nodes import on_nodes
from harness_trainer.plan.pace import Pace, pace
from harness_trainer.plan.prices import Prices
from harness_trainer.plan.report import as_json, lines
from harness_trainer.plan.shape import ModelShape
from harness_trainer.plan.sizes import find_gpu
from harness_trainer.plan.speeds import speeds
from harness_trainer.plan.workload import workload
from harness_trainer.rollouts.on_ray.nodes import NodeInfo
from tests.plan.conftest import numbers

KNOWN = {"agent_s": 6.0, "engine_s": 4.0, "forwarded": 100.0, "learner_tokens_s": 100.0, "step_s": 2.0, "kept": 1.0}


def config(**settings: Any) -> RunConfig:
    learner = {"groups_per_step": 2, "max_staleness": 2, "max_steps": 10, **settings.pop("learner", {})}
    rollouts = {"group_size": 4, "max_concurrent": 8, **settings.pop("rollouts", {})}
    return RunConfig.model_validate({"learner": learner, "rollouts": rollouts, **settings})


def pace_of(run: RunConfig, **changed: float) -> Pace:
    return pace(run, workload(run, numbers(**{**KNOWN, **changed})))


def test_the_slowest_part_sets_the_pace() -> None:
    # 8 rollouts a step: 10 s each in 8 places = 10 s; 800 tokens at 100/s and 2 s = 10 s.
    found = pace_of(config(), learner_tokens_s=50.0)
    assert found.bounds == {"learner": 18.0, "engine": None, "places": 10.0}
    assert (found.bottleneck, found.step_s, found.per_hour) == ("learner", 18.0, 200.0)
    assert pace_of(config(), agent_s=96.0).bottleneck == "places"


def test_the_engines_whole_capacity_is_a_bound_of_its_own() -> None:
    engine = {"turns": 2.0, "reply_tokens": 50.0, "first_prompt": 100.0, "new_tokens": 20.0}
    found = pace_of(config(), **engine, engine_tokens_s=10.0, prefill_tokens_s=120.0)
    assert found.bounds["engine"] == 8 * (100 / 10 + 120 / 120)
    assert found.bottleneck == "engine"


def test_admission_holds_back_places() -> None:
    run = config(learner={"max_staleness": 1}, rollouts={"max_concurrent": 64})
    found = pace_of(run, agent_s=96.0)
    assert found.in_flight == 8 and found.bounds["staleness"] == 100.0 and found.bottleneck == "staleness"
    assert pace_of(config(learner={"max_staleness": 4}, rollouts={"max_concurrent": 64}), agent_s=96.0).in_flight == 32


def test_without_staleness_sampling_and_learning_take_turns() -> None:
    found = pace_of(config(learner={"max_staleness": 0}))
    assert found.step_s == 20.0 and found.bottleneck == "staleness"
    assert pace_of(config(learner={"max_staleness": 0}), step_s=200.0).bottleneck == "learner"
    # More places than a step needs do not make a rollout shorter than it is.
    many = pace_of(config(learner={"max_staleness": 0}, rollouts={"max_concurrent": 800}))
    assert many.step_s == 20.0


def test_dropped_groups_cost_as_much() -> None:
    assert pace_of(config(), kept=0.5).bounds["places"] == 20.0
    assert pace_of(config(), kept=0.5).bounds["learner"] == 10.0


@pytest.mark.parametrize("missing", ["learner_tokens_s", "step_s", "engine_s"])
def test_what_is_not_known_makes_the_pace_unknown(missing: str) -> None:
    run = config()
    known = {name: value for name, value in KNOWN.items() if name != missing}
    found = pace(run, workload(run, numbers(**known)))
    assert found.per_hour is None and found.bottleneck is None


def test_sources_in_their_order_and_what_is_assumed(shape: ModelShape) -> None:
    run = config(rollouts={"max_turns": 5, "max_tokens": 40})
    load = workload(run, numbers(agent_s=1.0), numbers(agent_s=2.0, kept=0.5))
    assert (load.agent_s.value, load.kept.value) == (1.0, 0.5)
    assert (load.turns.value, load.turns.source) == (5.0, "assumed")
    assert load.sampled == 200.0 and load.learner_tokens_s.source == "unknown"
    own = load.sampled + 4 * load.new_tokens.value  # type: ignore[operator]
    assert load.forwarded.value == own + load.first_prompt.value / 4  # type: ignore[operator]
    given = workload(run, numbers(call_tokens_s=20.0, prefill_tokens_s=1000.0))
    assert given.engine_s.value == pytest.approx(200 / 20 + given.prefilled / 1000)  # type: ignore[operator]


def test_a_data_sheet_gives_speeds(shape: ModelShape) -> None:
    gpu = find_gpu("H200")
    found = speeds(config(), shape, gpu, context=100.0)
    calls = config().rollouts.max_concurrent
    assert found["engine_tokens_s"].value == pytest.approx(calls * found["call_tokens_s"].value)  # type: ignore[operator]
    two = speeds(config(engine={"replicas": 2}), shape, gpu, context=100.0)
    assert two["engine_tokens_s"].value == pytest.approx(calls * two["call_tokens_s"].value)  # type: ignore[operator]
    assert two["call_tokens_s"].value > found["call_tokens_s"].value, "each has half of the calls"  # type: ignore[operator]
    assert two["prefill_tokens_s"].value == pytest.approx(2 * found["prefill_tokens_s"].value)  # type: ignore[operator]
    slower = speeds(config(learner={"gradient_checkpointing": True}), shape, gpu, context=100.0)
    assert slower["learner_tokens_s"].value == pytest.approx(found["learner_tokens_s"].value * 3 / 4)  # type: ignore[operator]
    assert "learner_tokens_s" not in speeds(config(), replace(shape, active=None), gpu, context=100.0)


def test_a_measured_machine_is_not_another_gpu(shape: ModelShape) -> None:
    measured = numbers(**KNOWN)
    here = make_plan(config(), shape, Machine(), given={}, measured=measured)
    assert here.hours == pytest.approx(10 * 10 / 3600)
    there = make_plan(config(), shape, Machine(find_gpu("h200"), 2**37, 2), given={}, measured=measured)
    assert there.load.agent_s.value == 6.0 and there.load.learner_tokens_s.source == "computed"


def test_cost_and_the_report(shape: ModelShape) -> None:
    prices = Prices.model_validate(
        {"currency": "EUR", "flavors": {"box": {"gpu_memory": "80GiB", "gpus": 2, "per_hour": 36.0}}}
    )
    plan = make_plan(config(), shape, Machine(), given=numbers(**KNOWN), measured={}, prices=prices)
    assert plan.costs[0].total == pytest.approx(1.0) and plan.costs[0].fits
    text = "\n".join(lines(plan))
    assert "Cost in EUR" in text and "Assumed, so check them" in text and "What helps" in text
    assert as_json(plan)["bounds_s"]["engine"] is None
    unknown = make_plan(config(), shape, Machine(), given={}, measured={}, prices=prices)
    text = "\n".join(lines(unknown))
    assert "Fits: unknown" in text and "bottleneck: unknown" in text and "--learner-tokens-s" in text
    assert unknown.costs[0].total is None


def test_a_fresh_box_for_the_tests_is_a_second_sandbox(shape: ModelShape) -> None:
    one = make_plan(config(), shape, Machine(), given=numbers(**KNOWN), measured={})
    two = make_plan(config(rollouts={"verify": "fresh"}), shape, Machine(), given=numbers(**KNOWN), measured={})
    assert one.sandboxes_per_hour is not None and two.sandboxes_per_hour == 2 * one.sandboxes_per_hour


# -- nodes of a Ray cluster ---------------------------------------------------------------------------------------

NODES = [NodeInfo("a", "10.0.0.1", {}), NodeInfo("b", "10.0.0.2", {"rollouts": 6.0}), NodeInfo("c", "c", {"CPU": 4.0})]
ON_RAY = {"executor": "ray", "max_concurrent": 32, "ray": {"per_node": 3}}


def test_places_are_those_of_the_clusters_nodes() -> None:
    run = config(rollouts=ON_RAY)
    found = on_nodes(run, lambda _: NODES)
    assert found is not None
    assert (found.places, found.line) == (9, "2 of the Ray cluster's 3 nodes take rollouts, 9 at a time in all")
    load = workload(run, numbers(**KNOWN))
    assert pace(run, load, (), found.places).bounds["places"] == pytest.approx(8 * 10 / 9)
    assert pace(run, load, (), 100).in_flight == 16, "no more than the run itself wants"
    assert on_nodes(config(), lambda _: NODES) is None


def test_what_may_run_at_a_time_on_nodes_is_each_nodes_own() -> None:
    run = config(rollouts={**ON_RAY, "max_running": 4})
    found = on_nodes(run, lambda _: NODES)
    assert found is not None and found.places == 4 + 3
    load = workload(run, numbers(**KNOWN))
    assert pace(run, load, (), None).bounds["places"] == 8 * 10 / 32, "how many nodes there are is not known"
    assert calls_of(run) == 32 and calls_of(config(rollouts={"max_concurrent": 32, "max_running": 4})) == 4


def test_a_cluster_that_is_not_there_yet_is_said_and_is_no_end_of_the_plan(shape: ModelShape) -> None:
    def ask(_: object) -> list[NodeInfo]:
        raise SetupError("no Ray cluster at 10.0.0.1:6379")

    run = config(rollouts=ON_RAY)
    found = on_nodes(run, ask)
    assert found is not None and found.places is None
    plan = make_plan(run, shape, Machine(), given=numbers(**KNOWN), measured={}, nodes=found)
    assert any("not counted" in line and "no Ray cluster at" in line for line in lines(plan))
    assert as_json(plan)["nodes"]["places"] is None and as_json(plan)["at_once"] == 16


def test_places_of_nodes_bound_no_source_that_is_not_on_them() -> None:
    run = config(
        rollouts=ON_RAY,
        sources=[
            {"name": "code", "tasks": "/t", "harness": "pyagent"},
            {"name": "game", "env": "class:game.py:Game", "tasks": "/r.jsonl"},
        ],
    )
    found = on_nodes(run, lambda _: NODES)
    assert found is not None and found.places is None and "9 at a time" in found.line

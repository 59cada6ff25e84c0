"""Several sources in one plan: each with its own settings, the run as their mean by weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness_trainer.cli import main
from harness_trainer.config import RunConfig
from harness_trainer.plan import Machine, make_plan
from harness_trainer.plan.mixture import mixed, sources_of
from harness_trainer.plan.prices import Prices
from harness_trainer.plan.report import as_json, lines
from harness_trainer.plan.shape import ModelShape
from harness_trainer.plan.workload import AGENT_S, FIRST_PROMPT, OWN_AGENT_S, OWN_FIRST_PROMPT
from tests.plan.conftest import LLAMA, folder_of, numbers

CODE = {"name": "code", "weight": 3, "tasks": "examples", "max_turns": 20, "max_tokens": 100}
GAME = {
    "name": "game",
    "weight": 1,
    "env": "class:game.py:Game",
    "tasks": "rows.jsonl",
    "max_turns": 4,
    "max_tokens": 10,
}
KNOWN = {"engine_s": 4.0, "forwarded": 100.0, "learner_tokens_s": 1e6, "step_s": 2.0, "kept": 1.0}


def config(*sources: dict[str, Any], **settings: Any) -> RunConfig:
    rollouts = {"group_size": 4, "max_concurrent": 8, **settings.pop("rollouts", {})}
    learner = {"groups_per_step": 2, "max_steps": 10, "device": "cpu"}
    return RunConfig.model_validate({"sources": list(sources), "rollouts": rollouts, "learner": learner, **settings})


def test_each_source_has_its_own_limits_and_the_run_has_their_mean() -> None:
    code, game = found = sources_of(config(CODE, GAME))
    assert (code.share, game.share, code.kind, game.kind) == (0.75, 0.25, "own", "class")
    assert (code.load.turns.value, game.load.turns.value) == (20, 4)
    assert (code.load.first_prompt.value, game.load.first_prompt.value) == (FIRST_PROMPT, OWN_FIRST_PROMPT)
    load = mixed(found)
    assert load.turns.value == 0.75 * 20 + 0.25 * 4 and load.turns.source == "assumed"
    assert load.agent_s.value == 0.75 * AGENT_S + 0.25 * OWN_AGENT_S
    # What a rollout samples and reads is the mean of products, not the product of means.
    assert load.sampled == pytest.approx(0.75 * 20 * 100 + 0.25 * 4 * 10)
    both = [source.load.prefilled or 0.0 for source in found]
    assert load.prefilled == pytest.approx(0.75 * both[0] + 0.25 * both[1])


def test_what_a_person_gives_or_a_run_has_shown_is_of_all_sources() -> None:
    load = mixed(sources_of(config(CODE, GAME), numbers(turns=7.0), numbers(turns=9.0, agent_s=12.0)))
    assert (load.turns.value, load.turns.source, load.agent_s.value) == (7.0, "given", 12.0)
    assert mixed(sources_of(config(CODE, GAME))).call_tokens_s.value is None, "not known of one, not known of all"


def test_one_source_is_planned_as_the_same_run_without_sources() -> None:
    alone = {name: value for name, value in CODE.items() if name not in ("name", "weight")}
    rollouts = {"max_turns": alone.pop("max_turns"), "max_tokens": alone.pop("max_tokens")}
    plain = RunConfig.model_validate({**alone, "rollouts": {"group_size": 4, "max_concurrent": 8, **rollouts}})
    assert mixed(sources_of(config(CODE))) == mixed(sources_of(plain))


def test_sandboxes_and_their_price_are_of_the_sources_that_have_some(shape: ModelShape) -> None:
    prices = Prices.model_validate({"flavors": {"a": {"gpu_memory": "1GiB", "per_hour": 1}}, "per_sandbox_hour": 1.0})
    given = numbers(**{**KNOWN, "agent_s": 6.0})

    def plan(*sources: dict[str, Any]) -> Any:
        return make_plan(config(*sources), shape, Machine(memory=2**30), given=given, measured={}, prices=prices)

    both, games = plan(CODE, GAME), plan(GAME)
    assert both.sandboxes_per_hour == pytest.approx(0.75 * both.rollouts_per_hour)
    assert games.sandboxes_per_hour == 0 and games.costs[0].total == pytest.approx(games.hours * 1.0)
    in_boxes = 0.75 * both.rollouts_per_hour * both.hours * 10 / 3600
    assert both.costs[0].total == pytest.approx(both.hours + in_boxes)


def test_an_environment_with_few_places_may_hold_the_whole_run(shape: ModelShape) -> None:
    narrow = {
        "name": "game",
        "env": {"type": "class", "target": "game.py:Game", "max_episodes": 1},
        "tasks": "rows.jsonl",
    }
    run = config({**CODE, "weight": 1}, narrow)
    plan = make_plan(run, shape, Machine(memory=2**40), given=numbers(**{**KNOWN, "agent_s": 6.0}), measured={})
    # 8 rollouts of 10 s a step: all 8 places take 10 s, the 4 of the game one after the other 40 s.
    assert plan.pace.bounds["source game"] == 40.0 and plan.pace.bottleneck == "source game"
    text = "\n".join(lines(plan))
    assert "What helps: more of its rollouts at a time" in text and "at most 1 at a time" in text
    assert "means over all sources" in text
    told = as_json(plan)
    assert [one["share"] for one in told["sources"]] == [0.5, 0.5] and told["bottleneck"] == "source game"


def test_the_engine_has_room_for_the_longest_sources_calls(shape: ModelShape) -> None:
    given = {**KNOWN, "turns": 2.0, "first_prompt": 20.0, "new_tokens": 2.0}
    plan = make_plan(config(CODE, GAME), shape, Machine(memory=2**30), given=numbers(**given), measured={})
    assert plan.engine.context == min(128, 20 + 2 + 2 * 100), "the window, as replies of `code` may be that long"


def test_the_command_takes_the_file_that_train_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    model = folder_of(tmp_path / "model", LLAMA)
    file.write_text(json.dumps({"model": str(model), "sources": [CODE, GAME]}))
    assert main(["plan", "--config", str(file), "--gpu", "h200"]) == 0
    said = capsys.readouterr().out
    assert "code" in said and "75% of the groups" in said and "25% of the groups" in said and "(class)" in said

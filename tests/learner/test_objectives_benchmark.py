"""The learning benchmark of every objective: what is run, what is kept of it, how a cut series goes on, the page."""

import json
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from benchmarks import objectives, objectives_page
from benchmarks.objectives import CHOICES, KEPT, main, read_results
from harness_trainer.errors import TrainingFailed
from harness_trainer.learner.advantages import Estimator
from harness_trainer.learner.objective_config import Aggregation, Correction, Loss, ObjectiveConfig
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Outcome, RolloutResult

ROOT = Path(__file__).parents[2]


class Trainer:
    """In place of a training run: a store and reports whose rewards rise by a tenth with each step."""

    def __init__(self, *fails: str) -> None:
        self.configs: list = []
        self.fails = fails  # losses that cannot be trained

    def __call__(self, config, folder, display):
        self.configs.append(config)
        if config.learner.objective.loss in self.fails:
            raise TrainingFailed("the engine died")
        assert not folder.exists(), "a run begins in a folder of its own"
        (folder / "checkpoints").mkdir(parents=True)
        store = RolloutStore(folder / "store.sqlite")
        reports = []
        for step in range(1, config.learner.max_steps + 1):
            for group_id in (2 * step - 2, 2 * step - 1):
                self._train(store, group_id, step, config.rollouts.group_size)
            reports.append(
                {**dict.fromkeys(KEPT, 0.123456789), "step": step, "kl_reference": None, "staleness_mean": 0}
            )
        store.close()
        return reports

    def _train(self, store, group_id, step, group_size):
        store.open_group(group_id, "task", "h")
        for slot in range(group_size):
            store.start_rollout(f"g{group_id}-{slot}", group_id, slot, 0)
            reward = None if slot == 0 else step / 10 + slot / 100
            result = RolloutResult(f"g{group_id}-{slot}", group_id, "task", "h", 0, Outcome.OK, reward)
            store.finish_rollout(result, final=True)
        store.group_ready(group_id)
        store.mark_trained([group_id], step)


@pytest.fixture
def series(tmp_path):
    """Runs a series of the two objectives named, or others, in a folder of the test's own."""

    def run(trainer, *arguments, names=("default", "loss cispo"), steps=1):
        where = ["--json", str(tmp_path / "docs" / "curves.json"), "--out", str(tmp_path / "runs")]
        what = ["--steps", str(steps), "--group-size", "3", "--names", *names]
        return main([*where, *what, *arguments], trainer), read_results(tmp_path / "docs" / "curves.json")

    return run


def test_each_run_changes_the_objective_and_nothing_else(series):
    trainer = Trainer()
    code, _ = series(trainer)
    assert code == 0
    default, cispo = (config.model_dump() for config in trainer.configs)
    assert default["learner"]["objective"] == ObjectiveConfig().model_dump()
    assert cispo["learner"].pop("objective") == ObjectiveConfig(loss="cispo", epsilon_high=1.0).model_dump()
    del default["learner"]["objective"]
    assert default == cispo


def test_the_file_holds_every_reward_that_is_known_and_what_a_step_came_to(series, tmp_path):
    _, (run, _) = series(Trainer(), steps=2)
    assert (run["name"], run["seed"], run["settings"]) == ("default", 0, {})
    assert [step["rewards"] for step in run["steps"]] == [[0.11, 0.12] * 2, [0.21, 0.22] * 2]
    assert run["steps"][0]["grad_norm"] == 0.12346
    assert run["steps"][0]["kl_reference"] is None
    assert not (tmp_path / "runs" / "default-seed0" / "checkpoints").exists(), "two gigabytes for each run"


def test_a_series_that_was_cut_goes_on_with_what_is_missing(series, tmp_path):
    series(Trainer(), names=["default"])
    half = tmp_path / "runs" / "loss-cispo-seed0"  # killed in the middle of it
    half.mkdir()
    trainer = Trainer()
    _, runs = series(trainer)
    assert [config.learner.objective.loss for config in trainer.configs] == ["cispo"]
    assert [run["name"] for run in runs] == ["default", "loss cispo"]
    _, runs = series(trainer, "--seeds", "0", "1")
    assert [(run["name"], run["seed"]) for run in runs[2:]] == [("default", 1), ("loss cispo", 1)]
    assert len(trainer.configs) == 3


def test_a_run_of_other_settings_or_length_is_not_taken_for_done(series, monkeypatch):
    series(Trainer(), names=["loss cispo"])
    trainer = Trainer()
    series(trainer, names=["loss cispo"], steps=2)
    monkeypatch.setitem(CHOICES, "loss cispo", {"loss": "cispo"})
    series(trainer, names=["loss cispo"])
    assert len(trainer.configs) == 2


def test_an_objective_that_fails_is_named_and_tried_again(series, capsys):
    code, runs = series(Trainer("clip"))
    assert code == 1
    assert [run["name"] for run in runs] == ["loss cispo"]
    assert "1 of 2 runs failed: default" in capsys.readouterr().out
    code, runs = series(Trainer())
    assert code == 0
    assert [run["name"] for run in runs] == ["loss cispo", "default"]


def test_a_second_series_in_the_same_folder_is_refused(series, capsys):
    class Second(Trainer):
        def __call__(self, config, folder, display):
            with pytest.raises(SystemExit):
                series(Trainer())
            return super().__call__(config, folder, display)

    series(Second())
    assert "another series is running" in capsys.readouterr().err


def test_every_choice_of_the_objective_is_measured():
    measured = {name: ObjectiveConfig(**settings) for name, settings in CHOICES.items()}
    for field, choices in {
        "advantage": Estimator,
        "loss": Loss,
        "aggregation": Aggregation,
        "importance_correction": Correction,
        "truncated": ObjectiveConfig.model_fields["truncated"].annotation,
    }.items():
        assert {getattr(config, field) for config in measured.values()} == set(get_args(choices))
    default = ObjectiveConfig()
    changed = {
        field
        for config in measured.values()
        for field in ObjectiveConfig.model_fields
        if getattr(config, field) != getattr(default, field)
    }
    assert set(ObjectiveConfig.model_fields) - changed == {"turn_reward_weight"}


def test_what_is_kept_of_a_step_is_what_the_learner_reports():
    from harness_trainer.learner.train import StepReport

    assert set(KEPT) <= {field.name for field in fields(StepReport)}


# -- the page -----------------------------------------------------------------------------------------------------


def step(number, *rewards):
    return {**dict.fromkeys(KEPT), "step": number, "rewards": list(rewards)}


def test_a_rise_is_in_standard_errors_of_the_difference():
    # Means 1 and 4, each with the standard error sqrt(2 / 2) = 1.
    assert objectives_page.errors_apart([0, 2], [3, 5]) == pytest.approx(3 / 2**0.5)
    assert objectives_page.errors_apart([1, 1], [2, 2]) is None


def test_start_and_end_are_the_first_and_the_last_steps():
    run = {"num_steps": 10, "steps": [step(number, number, number + 0.5) for number in range(1, 11)]}
    assert objectives_page.start_of(run) == [1, 1.5, 2, 2.5]
    assert objectives_page.end_of(run) == [8, 8.5, 9, 9.5, 10, 10.5]


def test_what_was_not_measured_is_a_dash():
    what = {"num_steps": 3, "tasks": "a,b", "group_size": 1, "seed": 0, "minutes": 1.0}
    run = {"name": "default", "settings": {}, **what, "steps": [step(n, 0.0, n / 10) for n in (1, 2, 3)]}
    (row,) = (line for line in objectives_page.page([run]).splitlines() if line.startswith("| default | - | 3 | 1 | "))
    assert row.endswith("| - | - | - | - | - | 1.0 |")


def run_of(name, *rewards_of_steps, minutes=1.0):
    what = {"num_steps": len(rewards_of_steps), "tasks": "a,b", "group_size": 2, "seed": 0, "minutes": minutes}
    steps = [step(number, *rewards) for number, rewards in enumerate(rewards_of_steps, 1)]
    return {**what, "name": name, "settings": CHOICES[name], "steps": steps}


def cells(page, name):
    return [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith(f"| {name} | ")]


def test_a_run_is_compared_with_the_defaults_runs_of_as_many_steps():
    flat = [(0.0, 1.0)] * 3
    runs = [run_of("default", *flat), run_of("default", *flat, (9.0, 9.5)), run_of("kl_coef", *flat)]
    assert cells(objectives_page.page(runs), "kl_coef")[0][8] == "+0.0"


def test_runs_of_one_objective_and_length_are_a_row_together():
    low, high = [(0.0, 2.0)] * 2 + [(0.0, 2.0)] * 3, [(0.0, 2.0)] * 2 + [(4.0, 6.0)] * 3
    page = objectives_page.page(
        [run_of("default", *low), run_of("kl_coef", *low), run_of("default", *high, minutes=2.0)]
    )
    result, curve = cells(page, "default")
    assert result[2:6] == ["5", "2", "1.000 ± 0.378", "3.000 ± 0.674"]
    alone = objectives_page.errors_apart([0.0, 2.0] * 2, [4.0, 6.0] * 3)
    assert result[7] == f"+0.0 {alone:+.1f}" and result[-1] == "1.5"
    assert curve == ["default", "2", "1.000", "3.000", "3.000"]
    assert len(cells(page, "kl_coef")) == 2


def test_the_page_has_the_tables_of_the_file_and_the_file_the_settings_of_today():
    runs = read_results(ROOT / objectives.RESULTS)
    text = (ROOT / objectives_page.PAGE).read_text(encoding="utf-8")
    assert text.endswith(objectives_page.MARK + objectives_page.page(runs)), (
        "run `python -m benchmarks.objectives_page`"
    )
    assert [run["name"] for run in runs if run["settings"] != CHOICES[run["name"]]] == []
    assert len({json.dumps(run) for run in runs}) == len(runs), "a run stands there twice"
    for run in runs:  # what the page says of the start; a replaced group is half of a step
        assert run["steps"][0]["staleness_mean"] == 0
        assert run["steps"][1]["staleness_mean"] >= 0.5

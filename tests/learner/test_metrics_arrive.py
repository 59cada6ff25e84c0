"""Where a step's metrics arrive: the run's file, each step once, and the trackers; and trackers that are not there."""

import json
import time

import pytest
from finished_groups import finish_group
from stub_engine import StubEngine, serving
from test_train import Run
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import TrainerCallback

from harness_trainer.config import RunConfig
from harness_trainer.display import Display
from harness_trainer.errors import ConfigError, SetupError
from harness_trainer.learner import __main__ as learner
from harness_trainer.learner import metric_names
from harness_trainer.learner.config import LearnerConfig
from harness_trainer.learner.engine_presence import EnginePresence
from harness_trainer.learner.trackers import TRACKERS, require_trackers
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.run import train

GSPO = {"loss": "gspo", "aggregation": "rollout_mean"}


class Recorder(TrainerCallback):
    """A tracker that keeps what it is sent."""

    sent: list = []  # noqa: RUF012

    def on_log(self, args, state, control, logs=None, **kwargs):
        Recorder.sent.append(dict(logs))


@pytest.fixture
def recorder():
    Recorder.sent = []
    INTEGRATION_TO_CALLBACK["recorder"] = Recorder
    yield Recorder
    del INTEGRATION_TO_CALLBACK["recorder"]


class RunFolder:
    """A run whose groups were made beforehand, and a stub engine; `learn` is one start of its learner."""

    def __init__(self, folder, model, engine, **config):
        self.store = RolloutStore(folder / "store.sqlite")
        (folder / "transfer").mkdir()
        (folder / "engine_url").write_text(engine.url)
        self.config = LearnerConfig(
            max_steps=3, groups_per_step=1, token_budget=64, max_staleness=100, save_steps=1, save_total_limit=None,
            learning_rate=0.01, device="cpu", **config,
        )  # fmt: skip
        self.spec = learner.LearnerSpec(
            config=self.config, model_path=model, store=folder / "store.sqlite", checkpoints=folder / "checkpoints",
            metrics=folder / "metrics.jsonl", engine_url_file=folder / "engine_url", keep_weights=None,
            transfer_dir=folder / "transfer", temperature=1.0, starved_after_s=30,
        )  # fmt: skip
        for group_id in range(5):
            finish_group(self.store, group_id)

    def learn(self):
        learner._run(self.spec, self.store, EnginePresence(self.store, self.spec.engine_url_file, away_s=10))
        return [json.loads(line) for line in self.spec.metrics.read_text().splitlines()]


@pytest.fixture
def make_run(tmp_path, tiny_model, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tensorboard"))
    made = []
    with serving(StubEngine()) as engine:

        def make(**config):
            made.append(RunFolder(tmp_path, tiny_model, engine, **config))
            return made[-1]

        yield make
    for run in made:
        run.store.close()


def test_the_file_has_each_step_once_also_when_the_run_is_continued(make_run):
    run = make_run()
    first = run.learn()
    assert [line["step"] for line in first] == [1, 2, 3]
    for folder in run.spec.checkpoints.glob("checkpoint-[23]"):
        (folder / "trainer_state.json").unlink()  # as if killed while step 2's was written
    second = run.learn()
    assert [line["step"] for line in second] == [1, 2, 3]
    assert second[0] == first[0]
    for line in second:
        found = line["metrics"]
        assert found["reward"] == 0.5 and found["tools/call_frequency"] == 0.5
        assert found["outcome/ok_total"] == 2 and found["stage/agent/p95_s"] == 2.0
        assert found["batch/trained_per_forwarded"] == line["trained_tokens"] / line["forwarded_tokens"]
        assert found["sync/load_s"] > 0 and 0 <= found["perf/learner_idle_frac"] <= 1
        assert found["queue/ready_groups"] == 5 - line["step"]
        assert found["sample/time_in_queue_s"] >= 0
        assert "epoch" not in found and "perf/engine_idle_frac" not in found, "there is no gateway here"


def test_every_number_that_is_sent_is_in_the_table(make_run):
    run = make_run(objective={"kl_coef": 0.1, "importance_correction": "token_truncate"})
    for line in run.learn():
        unknown = [name for name in line["metrics"] if metric_names.find(name) is None]
        assert not unknown


def test_the_table_has_what_each_objective_measures(tiny_model, tmp_path):
    for objective in ({"loss": "clip", "dual_clip": 3.0}, {"loss": "cispo"}, GSPO):
        run = Run(tiny_model, tmp_path / objective["loss"]).go(max_steps=1, objective=objective)
        assert run.reports[0].metrics["loss"] == run.reports[0].loss
        assert not [name for name in run.reports[0].metrics if metric_names.find(name) is None]


def test_trackers_get_what_the_file_has(make_run, recorder):
    lines = make_run(report_to=["recorder"]).learn()
    steps = [logs for logs in recorder.sent if "loss" in logs]
    assert steps == [line["metrics"] for line in lines] and len(steps) == 3


# -- trackers that are not there -----------------------------------------------------------------------------------


def test_a_tracker_that_is_not_installed_is_answered_with_the_command_that_installs_it():
    with pytest.raises(SetupError, match=r"-m pip install trackio==\S+ wandb==\S+`, or leave it out"):
        require_trackers(["trackio", "tensorboard", "wandb"], installed=lambda module: module == "tensorboardX")
    require_trackers(["tensorboard"], installed=lambda module: module == "tensorboardX")
    require_trackers([])


def test_the_run_does_not_begin_with_a_tracker_that_is_none(tmp_path):
    started = time.monotonic()
    with pytest.raises(ConfigError, match="tensorbored is no tracker.*tensorboard, trackio, wandb"):
        train(RunConfig(learner={"report_to": ["tensorbored"]}), tmp_path / "run", Display())
    assert not (tmp_path / "run").exists() and time.monotonic() - started < 5


def test_every_name_is_one_that_transformers_knows():
    assert set(TRACKERS) <= set(INTEGRATION_TO_CALLBACK)

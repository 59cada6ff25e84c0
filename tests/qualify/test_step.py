"""The optimizer step of a qualification: what counts as one, and the real learner beside a stub of an engine."""

import asyncio
import contextlib
import json
import math
from dataclasses import replace

import pytest

from capture_proxy.engines.scripted import ScriptedEngine
from capture_proxy.rendering import Bridging
from harness_trainer.cli import main
from harness_trainer.engine.config import EngineConfig, find_environment
from harness_trainer.engine.prepare import describe_model
from harness_trainer.errors import SetupError, TrainingFailed
from harness_trainer.qualify.bench import Setting, with_model
from harness_trainer.qualify.check import qualify
from harness_trainer.qualify.page import summary
from harness_trainer.qualify.step import Step, learner_for, step_of
from harness_trainer.qualify.verdict import Verdict
from harness_trainer.rollouts.types import Outcome, RolloutResult
from sandboxes.local import LocalConfig
from tests.engine.tiny_model import make_tiny_model
from tests.learner.conftest import build_model, few_threads  # noqa: F401
from tests.learner.stub_engine import StubEngine, serving

GOOD = {"loss": -0.7, "ratio_mean": 1.00001, "grad_norm": 3.0, "trained_tokens": 12}


def test_a_finite_step_whose_ratio_is_one_counts():
    assert step_of(GOOD) == Step("", -0.7, 1.00001, 3.0, 12)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"loss": math.nan}, "loss is nan"),
        ({"loss": None}, "loss is None"),
        ({"grad_norm": math.inf}, "gradient is inf"),
        ({"ratio_mean": None}, "ratio is None"),
        ({"ratio_mean": 1.2}, "1.2000 times as likely"),
        ({"ratio_mean": 0.98}, "0.9800 times as likely"),
    ],
)
def test_a_step_that_is_not_finite_or_not_exact_says_so(change, said):
    assert said in step_of(GOOD | change).problem


@contextlib.asynccontextmanager
async def learning(tmp_path, model, url):
    """A learner for the engine at `url`, which has its first weights."""
    url_file = tmp_path / "engine_url"
    url_file.write_text(url)
    async with learner_for(
        describe_model(model, "tiny"), 4096, tmp_path / "learner", url_file, tmp_path / "owned", "test"
    ) as learner:
        await learner.ready()
        yield learner


async def test_a_real_learner_takes_a_step_on_what_an_agent_did(tmp_path, build_model):  # noqa: F811
    """The scripted engine's log-probabilities are a formula and no model's, which the step must show."""
    model = build_model(tmp_path / "model", vocab_size=300, max_position_embeddings=4096)
    setting = Setting(LocalConfig(root=tmp_path / "boxes"), 60.0, tmp_path / "logs", tmp_path / "owned", "test")
    async with contextlib.AsyncExitStack() as stack:
        engine = stack.enter_context(serving(StubEngine()))
        learner = await stack.enter_async_context(learning(tmp_path, model, engine.url))
        assert engine.version == "v1", "it publishes what it starts from"
        setting = with_model(
            setting, lambda: ScriptedEngine(["Done."], version="v1"), "m", 4096, Bridging("never"), learner.step
        )
        said = []
        report = await qualify("pyagent-chat", [], setting, tmp_path / "cache", said.append)
        assert engine.version == "v2", "and what it has learned"
        unscored = RolloutResult("r", 0, "t", "h", 0, Outcome.INFRA_FAILED, None)
        assert "no reward" in (await learner.step(unscored)).problem
        nothing = replace(unscored, outcome=Outcome.OK, reward=0.0, trace={"turns": []})
        assert (await learner.step(nothing)).problem == "no step: no_trainable_rows"
    (line,) = report.lines
    assert line.verdict is Verdict.FAILED and "times as likely" in line.why
    assert line.step.num_tokens == line.num_mask == len("Done.") + 1
    assert math.isfinite(line.step.loss) and line.step.grad_norm > 0
    assert f"ratio {line.step.ratio:.5f}" in summary(report)["step"]
    json.dumps(report.as_json())
    assert not list((tmp_path / "owned").glob("*.json")), "nothing is left on record"


async def test_a_learner_that_dies_says_why(tmp_path, build_model):  # noqa: F811
    model = build_model(tmp_path / "model")
    refused = (500, {"error": {"message": "no such thing"}})
    with serving(StubEngine(faults={"update_weights": [refused]})) as engine:
        with pytest.raises(TrainingFailed, match="learner died.*no such thing.*learner.log"):
            async with asyncio.timeout(240), learning(tmp_path, model, engine.url):
                pytest.fail("it has published nothing")


@pytest.mark.engine
def test_a_real_model_plays_and_every_agent_gets_its_step(tmp_path, capsys, monkeypatch):
    try:
        find_environment(EngineConfig())
    except SetupError as error:
        pytest.skip(f"no engine environment: {error}")
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "tiny", family="qwen3", tied=True)
    argv = ["qualify", "--engine", "vllm", "--model", "./tiny", "--harness", "pyagent,pyagent-chat", "--logs", "logs"]
    assert main([*argv, "--json"]) == 0, capsys.readouterr().err
    for report in json.loads(capsys.readouterr().out):
        (line,) = report["scenarios"]
        assert line["scenario"] == "model" and line["num_turns"] >= 1
        assert line["step"]["ratio"] == pytest.approx(1.0, abs=1e-4) and line["step"]["grad_norm"] > 0
        assert line["step"]["num_tokens"] == line["num_mask"]

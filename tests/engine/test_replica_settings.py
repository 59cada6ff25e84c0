"""What each replica of the engine is asked to be, and what does not go together with replicas. Nothing is started."""

import os

import pytest
from pydantic import ValidationError

from harness_trainer.config import CollectConfig, RunConfig, may_change
from harness_trainer.engine.config import EngineConfig, EngineEnvironment, build_env
from harness_trainer.engine.replicas import name_of, settings_of, visible_gpus
from harness_trainer.errors import SetupError


def test_each_replica_has_ports_cores_and_names_of_its_own():
    first, second = settings_of(EngineConfig(replicas=2, port=8000, max_model_len=64), "cpu", num_learner_gpus=0)
    assert (first.port, second.port, first.replicas, second.replicas) == (8000, 8001, 1, 1)
    assert first.cpu_threads == second.cpu_threads == max(1, len(os.sched_getaffinity(0)) // 2)
    assert first.max_model_len == second.max_model_len == 64
    free = settings_of(EngineConfig(replicas=3, cpu_threads=5), "cpu", num_learner_gpus=0)
    assert [(one.port, one.cpu_threads) for one in free] == [(0, 5)] * 3
    assert [name_of("engine", n) for n in range(3)] == ["engine", "engine-1", "engine-2"]


def test_one_replica_is_the_engine_as_it_was():
    engine = EngineConfig(port=8000)
    assert settings_of(engine, "cuda", num_learner_gpus=1) == [engine]


def test_gpus_are_dealt_behind_the_learners(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,6,GPU-7,8")
    engine = EngineConfig(replicas=2, tensor_parallel_size=2)
    assert [one.gpus for one in settings_of(engine, "cuda", num_learner_gpus=1)] == [["5", "6"], ["GPU-7", "8"]]
    with pytest.raises(SetupError, match=r"want 4 GPUs and the learner 2, and 5 are visible: lower engine.replicas"):
        settings_of(engine, "cuda", num_learner_gpus=2)
    named = engine.model_copy(update={"gpus": ["0", "1", "0", "1"]})
    assert [one.gpus for one in settings_of(named, "cuda", num_learner_gpus=9)] == [["0", "1"], ["0", "1"]]


def test_gpus_are_those_that_cuda_may_see_else_all():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, lambda: "0\n1\n") == []
    assert visible_gpus({}, lambda: "0\n1\n") == ["0", "1"]
    assert visible_gpus({}, lambda: "") == []


def test_an_engine_sees_its_own_gpus_only(tmp_path):
    cuda = EngineEnvironment(tmp_path, "cuda")
    assert (
        build_env(EngineConfig(gpus=["2", "3"]), cuda, {"CUDA_VISIBLE_DEVICES": "1"})["CUDA_VISIBLE_DEVICES"] == "2,3"
    )
    assert build_env(EngineConfig(), cuda, {"CUDA_VISIBLE_DEVICES": "1"})["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"gateway": {"public_url": "https://x.example"}}, "the gateway of one replica only can be opened"),
        ({"gateway": {"expose": "cloudflared"}}, "leave gateway.expose out"),
        ({"sandbox": "e2b"}, "sandboxes of type e2b reach one gateway only"),
        ({"sandbox": "harbor:daytona"}, "sandboxes of type harbor reach one gateway only"),
        ({"env": "class:env.py:Env", "tasks": "rows.jsonl"}, "sources of type class reach one engine only"),
        ({"rollouts": {"executor": "ray"}}, "leads its nodes to one gateway only"),
        ({"learner": {"weight_sync": {"type": "nccl"}}}, "use shm"),
        ({"engine": {"port": 65535}}, "the last would be 65536"),
        ({"engine": {"port": 8000}, "gateway": {"port": 8001}}, "these overlap"),
        ({"engine": {"gpus": ["0"]}}, "engine.gpus must name 2"),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_to_do(settings, says):
    engine = {"replicas": 2, **settings.get("engine", {})}
    with pytest.raises(ValidationError, match=r"engine\.replicas is 2") as caught:
        RunConfig.model_validate({**settings, "engine": engine})
    assert says in str(caught.value)
    if "gpus" not in engine:
        RunConfig.model_validate({**settings, "engine": {**engine, "replicas": 1}})


def test_a_run_may_go_on_with_another_number_of_them():
    assert {"engine.replicas", "engine.gpus"} <= may_change(RunConfig())


def test_an_engine_that_serves_already_is_one():
    with pytest.raises(ValidationError, match="leave engine.replicas out"):
        CollectConfig.model_validate({"engine_url": "http://127.0.0.1:1", "engine": {"replicas": 2}})
    assert CollectConfig.model_validate({"engine": {"replicas": 2}}).as_run().engine.replicas == 2

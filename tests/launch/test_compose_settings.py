"""Settings of compose: who wins among .env, TRAIN_FLAGS, a file and the stack's defaults, by what `train` resolves."""

import re
from pathlib import Path

import pytest
import yaml

from harness_trainer.cli import in_compose, main
from harness_trainer.config import RunConfig

SERVICES = yaml.safe_load((Path(__file__).parents[2] / "compose.yaml").read_text())["services"]
RUN = ["train", "--plain", "--run-dir", "/runs/first"]
ECHO = {"name": "echo", "env": "openenv:http://127.0.0.1:8000", "tasks": "rows.jsonl"}
CODE = {"name": "code", "tasks": "./tasks", "harness": "opencode"}


@pytest.fixture
def resolved(capsys, tmp_path):
    def resolve(*flags, file=None, command=RUN, **env):
        if file is not None:
            (tmp_path / "run.yaml").write_text(yaml.safe_dump(file))
            flags = ("--config", str(tmp_path / "run.yaml"), *flags)
        environ = {f"HARNESS_TRAINER_RUN_{name}": value for name, value in env.items() if name != "profile"}
        environ["HARNESS_TRAINER_PROFILE"] = env.get("profile", "cpu")
        capsys.readouterr()
        code = main([*in_compose.with_settings([*command, *flags], environ), "--dry-run"])
        out, err = capsys.readouterr()
        return yaml.safe_load(out) if code == 0 else err

    return resolve


def what(config):
    return config["model"], config["tasks"], config["harness"], config["sandbox"]["type"]


def test_the_command_has_nothing_that_would_win_over_a_file_and_trainers_are_told_the_rest():
    for name in ("trainer-cpu", "trainer-gpu", "trainer-shared"):
        command, told = SERVICES[name]["command"], SERVICES[name]["environment"]
        assert re.findall(r"--[a-z.-]+", command) == ["--plain", "--run-dir"], "and what TRAIN_FLAGS has"
        mine = {variable: value for variable, value in told.items() if variable.startswith("HARNESS_TRAINER_RUN_")}
        wanted = set(in_compose.SETTINGS) - ({"HARNESS_TRAINER_RUN_GPU_SHARE"} if name != "trainer-shared" else set())
        assert set(mine) == wanted
        assert all(re.fullmatch(r"\$\{[A-Z_]+:-\}", value) for value in mine.values()), "empty where it is not set"


def test_with_nothing_said_the_stack_has_defaults_of_its_own(resolved):
    assert what(resolved()) == ("smollm2", "examples", "pyagent", "docker")
    assert what(resolved(MODEL="", TASKS="", HARNESS="", SANDBOX="")) == ("smollm2", "examples", "pyagent", "docker")
    assert what(resolved("--sandbox.image", "x"))[3] == "docker"


def test_what_is_set_wins_over_the_file_and_the_file_over_defaults_and_a_flag_over_all(resolved):
    file = {"model": "m", "tasks": "t", "harness": "pi", "sandbox": "e2b", "learner": {"max_steps": 7}}
    config = resolved(file=file)
    assert (*what(config), config["learner"]["max_steps"]) == ("m", "t", "pi", "e2b", 7)
    assert what(resolved(file=file, MODEL="mine", HARNESS="cmd:python a.py")) == ("mine", "t", "cmd:python a.py", "e2b")
    assert what(resolved("--model", "flag", file=file, MODEL="mine", SANDBOX="docker"))[::3] == ("flag", "docker")


def test_a_run_with_agents_whose_sandbox_nobody_chose_is_not_beside_the_trainers_secrets(resolved):
    assert what(resolved(file={"learner": {"max_steps": 7}})) == ("smollm2", "examples", "pyagent", "docker")
    box = resolved(file={"sandbox": {"image": "x"}})["sandbox"]
    assert (box["type"], box["image"]) == ("docker", "x")
    assert resolved(file={"sources": [CODE, ECHO]})["sandbox"]["type"] == "docker"
    assert resolved(file={"sandbox": "local"})["sandbox"]["type"] == "local"


def test_a_file_that_dry_run_wrote_is_obeyed_and_what_is_set_wins(resolved):
    file = RunConfig(harness="pi").model_dump(mode="json")
    assert what(resolved(file=file)) == ("smollm2", "examples", "pi", "local")
    assert what(resolved(file=file, SANDBOX="docker")) == ("smollm2", "examples", "pi", "docker")


@pytest.mark.parametrize("command", [RUN, ["rollout"]])
def test_what_says_itself_what_runs_meets_no_default(resolved, tmp_path, command):
    (tmp_path / "sources.yaml").write_text(yaml.safe_dump([ECHO, CODE]))
    for config in (
        resolved(file={"sources": [ECHO, CODE]}, command=command),
        resolved("--sources", str(tmp_path / "sources.yaml"), command=command),
    ):
        assert [source["name"] for source in config["sources"]] == ["echo", "code"]
    for config in (
        resolved(file={"env": {"type": "class", "target": "e.py:Env"}, "tasks": "rows.jsonl"}, command=command),
        resolved("--env", "class:e.py:Env", command=command, TASKS="rows.jsonl"),
        resolved(file={"env": "class:e.py:Env"}, command=command, TASKS="rows.jsonl"),
    ):
        assert (config["env"]["type"], config["tasks"]) == ("class", "rows.jsonl")
    for config in (
        resolved("--tasks", "ors:http://h:1", command=command),
        resolved(command=command, TASKS="ors:http://h:1"),
        resolved(file={"tasks": "ors:http://h:1"}, command=command),
    ):
        assert config["env"]["type"] == "ors"


def test_what_is_set_against_the_file_is_refused_and_not_passed_over(resolved):
    assert "harness does too" in resolved(file={"sources": [CODE]}, HARNESS="pi")


def test_one_gpu_for_both_leaves_the_learner_its_part(resolved):
    def share(*flags, **given):
        return resolved(*flags, **given)["engine"]["gpu_memory_utilization"]

    assert (share(), share(profile="gpu"), share(profile="gpu-shared")) == (None, None, 0.4)
    assert share(profile="gpu-shared", GPU_SHARE="0.6") == 0.6
    file = {"engine": {"gpu_memory_utilization": 0.5}}
    assert (share(profile="gpu-shared", file=file), share(profile="gpu-shared", file={"engine": {"port": 1}})) == (
        0.5,
        0.4,
    )
    assert share(profile="gpu-shared", file=file, GPU_SHARE="0.6") == 0.6


def test_other_commands_are_passed_on_as_they_are(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(in_compose, "harness_trainer", lambda argv: seen.append(list(argv)) or 0)
    monkeypatch.setattr(in_compose, "SECRETS", tmp_path)
    monkeypatch.setattr(in_compose.RemoteHost, "find", lambda name: None)
    monkeypatch.setattr(in_compose, "hold", lambda: None)
    monkeypatch.setenv("HARNESS_TRAINER_RUN_MODEL", "mine")
    for argv in (["view", "/runs/first", "--wait"], ["traces", "ls", "--run-dir", "/runs/first"], ["doctor"], []):
        assert in_compose.main(argv) == 0
        assert seen.pop() == argv
    assert in_compose.main(["train", "--run-dir", "/runs/first"]) == 0
    check, run = seen
    assert check == ["doctor", "--before-run", *run], "the check is of the very run"
    assert "--model=mine" in run and "--sandbox=docker" in run

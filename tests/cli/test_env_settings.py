"""`--env`: a server that runs tasks, agents and sandboxes itself, as flags and in YAML."""

import pytest
import yaml

from harness_trainer.cli import main
from harness_trainer.config import RunConfig
from harness_trainer.environments import OpenEnvHarborConfig, OwnConfig

URL = "openenv-harbor:http://127.0.0.1:8200/"


def shown(capsys, *args):
    assert main(["train", "--dry-run", *args]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_without_it_everything_is_ours():
    assert RunConfig().env == OwnConfig() == RunConfig(env="own").env


def test_a_kind_and_an_address_are_enough_and_the_rest_are_flags(capsys):
    got = shown(capsys, "--env", URL, "--env.harness", "my:Agent", "--env.sandbox", "docker", "--env.tasks", "0-3, 7")
    env = RunConfig.model_validate(got).env
    assert env == OpenEnvHarborConfig(url="http://127.0.0.1:8200", harness="my:Agent", sandbox="docker", tasks="0-3, 7")
    assert [n for n in range(10) if env.wants(n)] == [0, 1, 2, 3, 7]


def test_what_was_shown_can_be_given_as_a_file(capsys, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(shown(capsys, "--env", URL, "--env.split", "a/b")))
    assert shown(capsys, "--config", str(file))["env"]["split"] == "a/b"
    file.write_text(f"env: {URL}\n")
    assert shown(capsys, "--config", str(file), "--env.max-sessions", "9")["env"]["max_sessions"] == 9


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--env", "openenv-harbor"], "must begin with http://"),
        (["--env", "openenv-harbor:host:8200"], "must begin with http://"),
        (["--env", "gym:x"], "openenv-harbor"),
        (["--env.split", "x"], "choose --env openenv-harbor"),
        (["--env", URL, "--env.tasks", "5-2"], "--env.tasks"),
        (["--env", URL, "--env.tasks", ""], "--env.tasks"),
        (["--env", URL, "--env.max-sessions", "0"], "--env.max-sessions"),
        (["--env", URL, "--harness", "pi"], "choose with --env.harness, and leave --harness out"),
        (["--env", URL, "--tasks", "x.jsonl"], "choose with --env.tasks"),
        (["--env", URL, "--sandbox", "docker"], "choose with --env.sandbox"),
        (
            ["--env", "openenv:python:mine.py:Client", "--tasks", "rows.jsonl"],
            "python: needs --env.url, the address of the server its client talks to",
        ),
        (["--env", "openenv:docker:me/game", "--env.url", "http://h"], "give it for that only"),
    ],
)
def test_what_is_wrong_is_one_line_with_the_way_out(capsys, args, says):
    assert main(["train", "--dry-run", *args]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1

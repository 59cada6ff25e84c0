"""What a person can say about sandboxes, as flags and in YAML, and what it means."""

import pytest
import yaml

from harness_trainer.cli import main
from harness_trainer.config import RunConfig
from sandboxes.base import NetworkMode
from sandboxes.docker import DockerConfig
from sandboxes.local import LocalConfig


def shown(capsys, *args):
    assert main(["train", "--dry-run", *args]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_a_name_is_enough():
    assert isinstance(RunConfig(sandbox="docker").sandbox, DockerConfig)
    assert isinstance(RunConfig().sandbox, LocalConfig)


def test_flags_reach_the_chosen_kind(capsys):
    got = shown(capsys, "--sandbox", "docker", "--sandbox.image", "me/base:1", "--sandbox.network", "public")
    assert (got["sandbox"]["type"], got["sandbox"]["image"], got["sandbox"]["network"]) == (
        "docker",
        "me/base:1",
        "public",
    )
    assert RunConfig.model_validate(got).sandbox.network is NetworkMode.PUBLIC


def test_a_limit_that_is_given_changes_no_other(capsys):
    usual = DockerConfig().limits
    got = shown(capsys, "--sandbox", "docker", "--sandbox.limits", '{"memory_mb": 99}')
    limits = RunConfig.model_validate(got).sandbox.limits
    assert (limits.memory_mb, limits.processes) == (99, usual.processes)
    unlimited = RunConfig(sandbox={"type": "local", "limits": {"cpu_s": None}}).sandbox.limits
    assert (unlimited.cpu_s, unlimited.memory_mb) == (None, LocalConfig().limits.memory_mb)


def test_a_limit_that_does_not_exist_is_refused(capsys):
    assert main(["train", "--dry-run", "--sandbox", "docker", "--sandbox.limits", '{"ram": 1}']) == 2
    assert "ram" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--sandbox", "podman"], "docker"),
        (["--sandbox.image", "x"], "choose --sandbox docker"),
        (["--sandbox", "docker", "--sandbox.network", "open"], "--sandbox.network"),
        (["--rollouts.max-creating", "0"], "--rollouts.max-creating"),
        (["--rollouts.verify", "never"], "--rollouts.verify"),
    ],
)
def test_what_is_wrong_is_one_line_with_the_way_out(capsys, args, says):
    assert main(["train", "--dry-run", *args]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1

"""Settings of `rollouts.executor: ray`: their flags, what does not go with them, what is sent along."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from harness_trainer import workload
from harness_trainer.cli.flags import add_flags, resolve
from harness_trainer.config import RunConfig, may_change
from harness_trainer.errors import ConfigError
from harness_trainer.harnesses import load_harness
from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.on_ray.cluster import advice, reason
from harness_trainer.rollouts.on_ray.config import RayConfig
from harness_trainer.rollouts.on_ray.precheck import require_possible
from harness_trainer.tasks import Task
from harness_trainer.workload import Inspector
from sandboxes.base import BoxSpec, Network, NetworkMode
from sandboxes.local import LocalConfig


def settings(*flags):
    parser = argparse.ArgumentParser()
    add_flags(parser, RunConfig, {})
    return resolve(RunConfig, parser.parse_args(list(flags)), {}, None)


def test_the_flags_have_short_names_beside_those_of_the_fields():
    short = settings("--executor", "ray", "--ray-address", "10.0.0.1:6379").rollouts
    assert (short.executor, short.ray.address) == ("ray", "10.0.0.1:6379")
    assert short == settings("--rollouts.executor", "ray", "--rollouts.ray.address", "10.0.0.1:6379").rollouts
    assert RolloutConfig().executor == "local" and RolloutConfig().ray.address == "auto"
    with pytest.raises(ConfigError, match=r"rollouts.ray.address.*neither auto nor HOST:PORT"):
        settings("--ray-address", "somewhere")


@pytest.mark.parametrize("flags", [(), ("--executor", "local")])
def test_a_cluster_that_nobody_would_use_is_refused(flags):
    with pytest.raises(ConfigError, match=r"ray.address names .* at head:6379, and executor local uses none"):
        settings("--ray-address", "head:6379", *flags)
    with pytest.raises(ConfigError, match=r"add --executor ray .* or leave the address out, .* --ray-address auto$"):
        settings("--rollouts.ray.address", "head:6379", *flags)
    assert settings("--ray-address", "auto", "--rollouts.ray.per-node", "3", *flags).rollouts.ray.per_node == 3
    whole = settings("--executor", "ray", "--ray-address", "head:6379").rollouts
    assert RolloutConfig.model_validate_json(whole.model_dump_json()) == whole, "as each process of the run reads it"


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "http://head:6379", ""])
def test_an_address_that_ray_would_take_for_something_else_is_refused(address):
    with pytest.raises(ValueError, match="Ray Client's address|neither auto nor HOST:PORT"):
        RayConfig(address=address)


def test_what_ray_says_of_hosts_that_do_not_fit_is_told_with_what_to_do():
    mismatch = "Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.11.7\nThis process ..."
    assert "install the cluster's here, or ours there" in advice(mismatch)
    assert "ray start --address=HEAD:6379" in advice("no raylet with this host's address")
    died = "The actor died because of an error raised in its creation task ... No module named 'harness_trainer'"
    assert "pip install 'harness-trainer[ray]' there" in reason(died)
    assert reason("The actor died unexpectedly") == ""


def test_a_run_may_go_on_on_other_machines():
    changeable = may_change(RunConfig())
    assert {"rollouts.executor", "rollouts.ray.address", "rollouts.ray.per_node"} <= changeable


def test_a_run_without_agents_in_sandboxes_has_nothing_for_nodes_to_do(tmp_path):
    config = settings("--executor", "ray", "--env", "class:game.py:Game", "--tasks", "rows.jsonl")
    with pytest.raises(ConfigError, match=r"and this run has none: leave rollouts\.executor out"):
        Inspector(config, "r", tmp_path, print).inspect()


def test_a_cluster_is_asked_for_once_whatever_the_number_of_sources(tmp_path, monkeypatch):
    asked, said = [], []
    monkeypatch.setattr(workload, "require_cluster", lambda ray, at_once: asked.append(ray) or "two nodes")
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"name": "moon", "instruction": "Say moon.", "verify": "true"}\n')
    sources = [{"name": name, "tasks": str(tasks), "harness": "pyagent"} for name in ("one", "two")]
    config = RunConfig.model_validate({"rollouts": {"executor": "ray"}, "sources": sources})
    found = Inspector(config, "r", tmp_path, said.append).inspect()
    assert len(found.sources) == 2 and len(asked) == 1 and "two nodes" in said


def test_what_nodes_cannot_have_is_refused_before_anything_is_started():
    harness = load_harness("pyagent")
    plain = Task("moon", Path("/none"), "Say moon.", verify_script="true")
    network = Network(NetworkMode.ALLOWLIST, ("pypi.example",))
    listed = Task("star", Path("/none"), "Say star.", verify_script="true", box=BoxSpec("star", network=network))
    require_possible([plain], [harness], LocalConfig(), 1)
    require_possible([listed], [harness], LocalConfig(network=NetworkMode.PUBLIC), 1)
    with pytest.raises(ConfigError, match="pyagent cannot work on task 'star': it needs an interception proxy"):
        require_possible([plain, listed], [harness], LocalConfig(), 1)
    intercepted = harness.model_copy(update={"name": "fixed", "needs_intercept": True})
    with pytest.raises(ConfigError, match="fixed cannot work on task 'moon'"):
        require_possible([plain], [intercepted], LocalConfig(), 1)
    with pytest.raises(ConfigError, match=r"leave engine\.replicas out"):
        require_possible([plain], [harness], LocalConfig(), 2)

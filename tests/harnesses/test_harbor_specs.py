"""What a spec of one of Harbor's agents means, and what the real Harbor says of it before a run begins."""

import json
import re
import subprocess
import sys

import pytest

from harness_trainer.errors import ConfigError, SetupError
from harness_trainer.harnesses import load_harness
from harness_trainer.harnesses.base import PLACEHOLDERS
from harness_trainer.harnesses.harbor_agent import WORKER, order_for, worker_env
from harness_trainer.harnesses.install import ensure_installed
from harness_trainer.qualify.check import harness_names
from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.mix import load_mix
from sandboxes.harbor import PYTHON_VARIABLE
from tests.harnesses.conftest import own

pytestmark = pytest.mark.harbor


def test_a_name_a_class_and_a_file_are_harnesses_of_harbors(tmp_path):
    named = load_harness("harbor:terminus-2")
    assert (named.name, named.harbor.agent, named.argv, named.closed_status) == (
        "harbor:terminus-2",
        "terminus-2",
        [],
        401,
    )
    assert load_harness("harbor:claude-code").dialect == "anthropic", "as our own adapter of it says"
    assert load_harness("harbor:my.module:Agent").harbor.agent == "my.module:Agent"
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nharbor: {agent: terminus-2, options: {max_turns: 3}}\nenv: {A: '${model}'}\n")
    assert (load_harness(str(file)).harbor.options, load_harness(str(file)).closed_status) == ({"max_turns": 3}, 401)
    mix = load_mix("harbor:terminus-2:3,pyagent,harbor:m:Class:2", [], RolloutConfig())
    assert mix.shares == {"harbor:terminus-2": 3, "pyagent": 1, "harbor:m:Class": 2}
    assert harness_names("harbor:terminus-2,pi") == ["harbor:terminus-2", "pi"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: x\nharbor: {agent: a}\nargv: [sh]", "one of the two"),
        ("name: x\ndialect: openai_chat\noutput: {type: text}", "one of the two"),
        ("name: x\nharbor: {agent: a}\nstdin: hello", "no stdin"),
        ("name: x\nharbor: {agent: a}\nintercept: {host: api.example}", "by a base URL only"),
        ("name: x\nharbor: {agent: a, model: m}", "extra"),
        ("name: x\nharbor: {agent: ''}", "at least 1"),
    ],
)
def test_an_adapter_that_means_nothing_is_refused(tmp_path, text, said):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_harness(str(tmp_path / "mine.yaml"))


def test_a_spec_without_an_agent_is_refused():
    with pytest.raises(ConfigError, match="names no agent"):
        load_harness("harbor:")


# Agents that cannot be had, and why; asked of one process of Harbor's Python, whose start takes seconds.
UNUSABLE = {
    "unknown": (own("no-such-agent"), r"Harbor has no agent 'no-such-agent': it knows .*mini-swe-agent.*terminus-2"),
    "module": (own("no_such_module:Agent"), "Failed to import module 'no_such_module'"),
    "class": (own("harbor_own_agents:NoSuch"), "has no class 'NoSuch'"),
    "no agent": (own("harbor_own_agents:NoAgent"), "is no agent"),
    "endpoint": (own("cursor-cli"), "another model endpoint"),
    "no model": (own("oracle"), "another model endpoint"),
    "option": (own("terminus-2", max_turn=3), "Unknown option 'max_turn'"),
    "install": (own("terminus-2", skip_install=True), "skip_install is for agents that Harbor installs"),
}
USABLE = {"own": own("harbor_own_agents:Installed"), "harbor's": own("terminus-2", max_turns="${max_turns}")}


def test_an_agent_that_harbor_does_not_have_is_an_error_at_start(harbor, tmp_path):
    harness, said = UNUSABLE["option"]
    with pytest.raises(ConfigError, match=f"harness own: .*{said}"):
        ensure_installed(harness, tmp_path, print)
    ensure_installed(USABLE["own"], tmp_path, print)


def test_without_harbor_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(SetupError, match=f"make setup-harbor.*{PYTHON_VARIABLE}"):
        ensure_installed(load_harness("harbor:terminus-2"), tmp_path, print)
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)  # a Python without it
    with pytest.raises(SetupError, match="cannot run Harbor.*No module named 'harbor'.*make setup-harbor"):
        ensure_installed(load_harness("harbor:terminus-2"), tmp_path, print)


# What Harbor's own classes make of our connection: agent -> model, address, variables of the agent's programs.
CONNECTIONS = {
    "terminus-2": ("openai/org/m", "http://host:1/v1", {"OPENAI_API_KEY": "TOKEN"}),
    "mini-swe-agent": (
        "openai/org/m",
        "http://box:2/v1",
        {
            "OPENAI_API_KEY": "TOKEN",
            "OPENAI_API_BASE": "http://box:2/v1",
            "OPENAI_BASE_URL": "http://box:2/v1",
        },
    ),
    "claude-code": (
        "anthropic/org/m",
        "http://box:2",
        {"ANTHROPIC_API_KEY": "TOKEN", "ANTHROPIC_AUTH_TOKEN": "", "ANTHROPIC_BASE_URL": "http://box:2"},
    ),
    "codex": ("openai/org/m", "http://box:2/v1", {"OPENAI_API_KEY": "TOKEN", "OPENAI_BASE_URL": "http://box:2/v1"}),
    "gemini-cli": (
        "gemini/org/m",
        "http://box:2",
        {"GEMINI_API_KEY": "TOKEN", "GOOGLE_GEMINI_BASE_URL": "http://box:2"},
    ),
    "pi": ("openai/org/m", "http://box:2/v1", {"OPENAI_API_KEY": "TOKEN"}),
}
IN_HARBORS_PYTHON = """
import json, pathlib, sys
sys.path.append(str(pathlib.Path(sys.argv[1]).parent))
from harbor_worker.agent import agent_class, check, make_agent
made = {}
for name, order in json.loads(sys.argv[2]).items():
    agent = make_agent(agent_class(order), order, pathlib.Path(sys.argv[4]))
    connection = agent.model_connection
    assert connection.api_key == "TOKEN", name
    made[name] = [agent.model_name, connection.execution_base_url, dict(connection.env)]
problems = {name: check(order) for name, order in json.loads(sys.argv[3]).items()}
print(json.dumps([made, problems]))
"""


def test_what_the_real_harbor_makes_of_agents_that_can_be_had_and_cannot(harbor, harbor_python, tmp_path):
    """Each agent's own idea of a connection leads to the gateway with the token."""
    values = {name: 1000 if name in ("context", "max_tokens", "max_turns") else name for name in PLACEHOLDERS}
    about = {"rollout": "r", "token": "TOKEN", "urls": {"host": "http://host:1", "sandbox": "http://box:2"}}
    orders = {name: order_for(own(name), values | {"model": "org/m"}) | about for name in CONNECTIONS}
    asked_of = USABLE | {name: harness for name, (harness, _) in UNUSABLE.items()}
    checked = {name: order_for(harness, values) for name, harness in asked_of.items()}
    argv = [harbor_python, "-P", "-c", IN_HARBORS_PYTHON, str(WORKER), json.dumps(orders), json.dumps(checked)]
    asked_it = subprocess.run(
        [*argv, str(tmp_path)], env=worker_env(tmp_path), capture_output=True, text=True, timeout=120, check=False
    )
    assert asked_it.returncode == 0, asked_it.stderr
    made, problems = json.loads(asked_it.stdout.splitlines()[-1])
    assert {name: tuple(connection) for name, connection in made.items()} == CONNECTIONS
    assert {name: problems[name] for name in USABLE} == dict.fromkeys(USABLE, "")
    for name, (_, said) in UNUSABLE.items():
        assert re.search(said, problems[name]), (name, problems[name])

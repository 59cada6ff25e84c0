"""Any command as a harness: what it is given, in a real sandbox on a real gateway, and what is refused."""

import json
import re

import pytest

from capture_proxy.engines.scripted import ScriptedEngine
from harness_trainer.errors import ConfigError
from harness_trainer.harnesses import load_harness
from harness_trainer.harnesses.base import PLACEHOLDERS, render, render_env, render_files
from harness_trainer.harnesses.command import pin_command
from harness_trainer.learner.rollout_metrics import plain
from harness_trainer.rollouts.types import Outcome
from tests.rollouts.rolling import roll

# Asks as three providers' clients do, each by its own variables.
AGENT = """
import json, os, sys, urllib.request

def ask(url, headers, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json", **headers})
    return json.load(urllib.request.urlopen(request))

said = [{"role": "user", "content": sys.stdin.read()}]
assert said[0]["content"] == os.environ["HARNESS_TRAINER_INSTRUCTION"]
e = os.environ
ask(e["OPENAI_BASE_URL"] + "/chat/completions", {"authorization": "Bearer " + e["OPENAI_API_KEY"]},
    {"model": e["OPENAI_MODEL"], "messages": said})
ask(e["ANTHROPIC_BASE_URL"] + "/v1/messages", {"x-api-key": e["ANTHROPIC_API_KEY"]},
    {"model": e["ANTHROPIC_MODEL"], "max_tokens": 9, "messages": said})
ask(e["GOOGLE_GEMINI_BASE_URL"] + "/v1beta/models/" + e["GEMINI_MODEL"] + ":generateContent",
    {"x-goog-api-key": e["GEMINI_API_KEY"]}, {"contents": [{"role": "user", "parts": [{"text": said[0]["content"]}]}]})
print("the moon, ${token} and", *sys.argv[1:])
"""


async def test_a_file_of_the_users_reaches_the_gateway_by_the_variables_of_every_provider(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_agent.py").write_text(AGENT)
    engine = ScriptedEngine("hm")
    result = await roll(tmp_path, engine, load_harness("cmd:python3 my_agent.py 'two words' ${home}"))
    assert (result.outcome, result.reward, result.harness) == (Outcome.OK, 1.0, "cmd:my_agent.py-cbb6"), result.detail
    assert [request.messages[-1]["content"] for request in engine.requests] == ["Say moon."] * 3
    said = (tmp_path / "artifacts" / "g0-0-a" / "agent.stdout.log").read_text()
    assert said == "the moon, ${token} and two words ${home}\n", "what is the user's is not filled in"


def test_a_pinned_command_takes_the_same_files_along_from_any_folder(tmp_path, monkeypatch):
    (tmp_path / "my agent.py").write_text("print('hm')\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    spec = "cmd:python3 'my agent.py' 'two words' /opt/x.py"
    pinned, usual = pin_command(spec), load_harness(spec)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_harness(pinned) == usual
    assert pin_command(pinned) == pinned
    assert load_harness(spec).files == {}, "the test would pass without a pin"
    unreadable = "cmd:python3 'my agent.py"
    assert pin_command(unreadable) == unreadable


def test_a_pinned_command_takes_no_file_of_the_folder_that_the_runner_works_in(tmp_path, monkeypatch):
    (tmp_path / "agent.py").write_text("print('hm')\n")
    monkeypatch.chdir(tmp_path)
    pinned, usual = (read("cmd:python3 agent.py config.yaml run.sh") for read in (pin_command, load_harness))
    (tmp_path / "run").mkdir()
    for file in ("config.yaml", "run.sh", "python3"):
        (tmp_path / "run" / file).write_text("the run's\n")
    monkeypatch.chdir(tmp_path / "run")
    assert load_harness(pinned) == usual and pin_command(pinned) == pinned
    assert usual.argv[2:] == ["config.yaml", "run.sh"], "the task's"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python3 a.py", "cmd:a.py"),
        ("python3 -u sub/b.py --data a.py", "cmd:b.py-XXXX"),
        ("/opt/venv/bin/python -m my.agent --key sk-1", "cmd:python-XXXX"),
        ("my-agent", "cmd:my-agent"),
        ("'my agent'", "cmd:my_agent-XXXX"),
        (f"sh -c 'echo  1\n{'x' * 300}'", "cmd:sh-XXXX"),
        (f"./{'x' * 300}", f"cmd:{'x' * 48}-XXXX"),
    ],
)
def test_a_command_is_called_after_the_file_that_it_runs_else_after_its_first_word(
    tmp_path, monkeypatch, command, name
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for file in ("a.py", "sub/b.py"):
        (tmp_path / file).write_text("")
    got = load_harness(f"cmd:{command}").name
    assert got == load_harness(pin_command(f"cmd:{command}")).name == load_harness(f"cmd:{command}").name
    assert re.fullmatch(name.replace("XXXX", "[0-9a-f]{4}"), got)


def test_commands_that_differ_have_names_that_differ_in_metrics_too():
    alike = ["agent.py a/b", "agent.py a b", "agent.py 'a b'", f"agent.py {'x' * 60}1", f"agent.py {'x' * 60}2"]
    names = [load_harness(f"cmd:{command}").name for command in alike]
    assert len({plain(name) for name in names}) == len(alike) and not any("/" in name for name in names)


def test_all_keys_are_the_token_and_all_addresses_the_gateways():
    values = {name: f"<{name}>" for name in PLACEHOLDERS}
    harness = load_harness("cmd:/opt/agents/run --fast")
    env = render_env(harness, values)
    assert {value for name, value in env.items() if name.endswith(("_KEY", "_TOKEN"))} == {"<token>"}
    assert {value for name, value in env.items() if name.endswith("_MODEL")} == {"<model>"}
    urls = {value for name, value in env.items() if "_BASE" in name}
    assert urls == {"<base_url>", "<base_url>/v1"}
    assert render(harness.argv, values) == ["/opt/agents/run", "--fast"]
    assert render_files(harness, values) == {}
    assert json.dumps(env).count("<instruction>") == 1


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("cmd:", "has no command"),
        ("cmd:  ", "has no command"),
        ("cmd:python 'my agent.py", "cannot be split into words.*no closing quotation"),
        ("cmd:./agent.sh", 'name the interpreter of ./agent.sh too, as in "cmd:sh ./agent.sh"'),
        ("cmd:python picture.png", "picture.png cannot be taken along"),
        ("cmd:python agent.sh sub/agent.sh", "same name"),
    ],
)
def test_a_command_that_cannot_be_run_is_refused_with_the_reason(tmp_path, monkeypatch, spec, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "agent.sh").write_text("exit 0\n")
    (tmp_path / "sub" / "agent.sh").write_text("exit 0\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(ConfigError, match=said):
        load_harness(spec)


def test_an_unknown_harness_is_told_of_files_and_commands():
    with pytest.raises(ConfigError, match=r"my_agent\.yaml.*cmd:python my_agent\.py"):
        load_harness("no-such-agent")

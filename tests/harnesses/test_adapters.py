"""Harness adapters are data: every shipped one renders, a user's own file works, and mistakes are named."""

import json
from pathlib import Path

import pytest

from harness_trainer import harnesses
from harness_trainer.errors import ConfigError
from harness_trainer.harnesses import load_harness, shipped
from harness_trainer.harnesses.base import PLACEHOLDERS, render, render_env, render_files
from harness_trainer.harnesses.reading import read_report

VALUES = {name: f"<{name}>" for name in PLACEHOLDERS} | {"context": 4096, "max_tokens": 64, "max_turns": 3}


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_adapter_renders_completely(name):
    harness = load_harness(name)
    rendered = [render(part, VALUES) for part in harness.argv]
    text = json.dumps([rendered, render_env(harness, VALUES), render_files(harness, VALUES)])
    assert harness.name == name
    assert "${" not in text
    assert "<token>" in text, "the agent must get the session's token"
    assert "<base_url>" in text, "the agent must be pointed at the gateway"


@pytest.mark.parametrize("name", shipped())
def test_an_agent_is_a_short_file(name):
    file = Path(harnesses.__file__).parent / f"{name}.yaml"
    assert len(file.read_text(encoding="utf-8").splitlines()) < 60


def test_opencode_config_is_json_with_numbers_where_opencode_wants_numbers():
    env = render_env(load_harness("opencode"), VALUES)
    config = json.loads(env["OPENCODE_CONFIG_CONTENT"])
    model = config["provider"]["capture"]["models"]["<model>"]
    assert model["limit"] == {"context": 4096, "output": 64}
    assert config["agent"]["title"] == {"disable": True}
    assert env["CAPTURE_KEY"] == "<token>"
    assert "<token>" not in env["OPENCODE_CONFIG_CONTENT"], "the token stands in one place only"


def test_small_variant_changes_only_what_it_says():
    small = json.loads(render_env(load_harness("opencode-small"), VALUES)["OPENCODE_CONFIG_CONTENT"])
    full = json.loads(render_env(load_harness("opencode"), VALUES)["OPENCODE_CONFIG_CONTENT"])
    assert small["agent"]["build"]["tools"]["*"] is False
    assert small["agent"]["title"] == full["agent"]["title"]
    assert small["provider"] == full["provider"]


def test_the_small_gemini_cli_has_another_system_prompt_and_two_tools_and_is_else_the_same():
    small, full = (load_harness(name) for name in ("gemini-cli-small", "gemini-cli"))
    path = "/home/.gemini/settings.json"
    ours, plain = (json.loads(render_files(harness, VALUES)[path]) for harness in (small, full))
    assert ours["tools"].pop("core") == ["run_shell_command", "write_file"]
    del plain["tools"]["core"]
    assert ours == plain
    assert render_env(small, VALUES) == {**render_env(full, VALUES), "GEMINI_SYSTEM_MD": "<home>/.gemini/system.md"}
    assert set(render_files(small, VALUES)) == {path, "/home/.gemini/system.md"}
    assert small.argv == full.argv and small.install == full.install


def test_unknown_harness_names_the_known_ones():
    with pytest.raises(ConfigError, match="opencode.*pyagent"):
        load_harness("opencoed")


def test_a_users_file_with_a_wrong_field_is_refused_with_its_name(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\ndialect: openai_chat\nargv: [x]\noutput: {type: text}\nenviron: {}\n")
    with pytest.raises(ConfigError, match="environ"):
        load_harness(str(file))


@pytest.mark.parametrize("text", ["[1, 2]", "", "a: [", "\x00"])
def test_a_users_file_that_is_no_mapping_is_refused(tmp_path, text):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="is not valid"):
        load_harness(str(file))


def test_a_users_file_may_extend_a_shipped_adapter(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text('extends: pyagent\nname: mine\nenv: {EXTRA: "1"}\n')
    harness = load_harness(str(file))
    assert harness.env["EXTRA"] == "1"
    assert harness.env["OPENAI_API_KEY"] == "${token}"


def test_unknown_placeholder_is_named():
    with pytest.raises(ConfigError, match=r"\$\{tokn\}"):
        render("Bearer ${tokn}", VALUES)


def test_final_message_is_the_last_matching_line_and_survives_noise():
    harness = load_harness("opencode")
    lines = [
        "plain log line",
        json.dumps({"type": "text", "part": {"text": "first"}}),
        "[1, 2]",
        json.dumps({"type": "text", "part": {"text": "last"}}),
        json.dumps({"type": "step_finish", "part": {"text": "not me"}}),
        '{"type": "text", "part": ',
    ]
    assert read_report(harness, "\n".join(lines), 0).final_message == "last"
    assert read_report(harness, "no json at all", 0).final_message is None

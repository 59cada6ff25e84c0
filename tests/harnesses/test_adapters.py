"""Harness adapters are data: every shipped one renders, a user's own file works, and mistakes are named."""

import json
from pathlib import Path

import pytest
import yaml

from harness_trainer import harnesses
from harness_trainer.errors import ConfigError
from harness_trainer.harnesses import load_harness, pinned, shipped
from harness_trainer.harnesses.base import PLACEHOLDERS, Harness, render, render_env, render_files
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


def test_what_a_file_extends_lies_beside_it_wherever_one_works(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "base.yaml").write_text("extends: pyagent\nenv: {EXTRA: '1'}\n")
    (tmp_path / "sub" / "mine.yaml").write_text("extends: ./base.yaml\nname: mine\n")
    monkeypatch.chdir(tmp_path)
    absolute = pinned("sub/mine.yaml")
    assert load_harness("sub/mine.yaml") == load_harness("mine.yaml", tmp_path / "sub")
    monkeypatch.chdir("/")
    harness = load_harness(absolute)
    assert (harness.name, harness.env["EXTRA"]) == ("mine", "1")


@pytest.mark.parametrize(
    ("extends", "reason"),
    [
        ("./mine.yaml", "mine.yaml extends itself"),
        ("./other.yaml", "mine.yaml extends itself, by way of .*other.yaml"),
        ("3", "must be one adapter's name or file, not 3"),
        ("[pi]", "not .'pi'."),
        ("./nosuch.yaml", "there is no .*/nosuch.yaml"),
    ],
)
def test_what_cannot_be_extended_is_refused_in_one_line(tmp_path, extends, reason):
    (tmp_path / "mine.yaml").write_text(f"extends: {extends}\nname: mine\n")
    (tmp_path / "other.yaml").write_text("extends: mine.yaml\n")
    with pytest.raises(ConfigError, match=reason) as caught:
        load_harness(str(tmp_path / "mine.yaml"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "part",
    [
        'argv: [sh, -c, "cd ${HOME}"]',
        'stdin: "${HOME}"',
        'env: {A: "${HOME}"}',
        'env_json: {A: {b: ["${HOME}"]}}',
        'files: {/home/x: "${HOME}"}',
        'intercept: {host: api.openai.com, argv: ["${HOME}/x"]}',
        'intercept: {host: api.openai.com, env: {A: "${HOME}"}}',
        'install: {type: npm, packages: [x@1], check: [x], env: {A: "${HOME}"}}',
        '{argv: [], stdin: null, harbor: {agent: pi, options: {a: "${HOME}"}}}',
    ],
)
def test_a_placeholder_that_does_not_exist_is_found_when_the_file_is_read_wherever_it_stands(tmp_path, part):
    more = {"argv": ["x"], **yaml.safe_load(part)}
    data = {"name": "mine", "dialect": "openai_chat", "output": {"type": "text"}, **more}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(ConfigError, match=r"mine\.yaml is not valid.*\$\{HOME\}.*write \$\$\{HOME\}"):
        load_harness(str(tmp_path / "mine.yaml"))
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(data).replace("${HOME}", "$${HOME}"))
    load_harness(str(tmp_path / "mine.yaml"))


def test_data_that_json_has_not_is_found_when_the_file_is_read(tmp_path):
    (tmp_path / "mine.yaml").write_text("extends: pyagent\nfiles: {/home/x: {since: 2026-01-01}}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml is not valid.*date is not JSON"):
        load_harness(str(tmp_path / "mine.yaml"))


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


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_a_line_of_more_brackets_than_can_be_read_is_no_json(kind):
    deep = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    data = load_harness("pyagent").model_dump() | {"output": {"type": kind, "final": [{"field": "said"}]}}
    report = read_report(Harness.model_validate(data), f'{deep}\n{{"said": "last"}}\n', 0)
    assert report.final_message == "last"

"""Claude Code, Codex, Gemini CLI, Qwen Code, opencode's other dialects: their adapters, and a real rollout of each."""

import json
import os
import tomllib
import uuid

import pytest
from real_agents import COMMAND, LAST_WORDS, installed, needs_npm, writes_a_file

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from harness_trainer.harnesses import load_harness
from harness_trainer.harnesses.base import PLACEHOLDERS, render, render_env, render_files
from harness_trainer.harnesses.reading import AgentReport, read_report
from harness_trainer.rollouts.types import Outcome
from sandboxes import bubblewrap
from sandboxes.docker import DockerConfig
from tests.intercept.intercepting import needs_mitmproxy
from tests.rollouts.rolling import roll

VALUES = {name: f"<{name}>" for name in PLACEHOLDERS} | {"context": 4096, "max_tokens": 64, "max_turns": 3}


def lines(*events):
    return "\n".join(["a log line", *map(json.dumps, events), '{"type": "cut'])


def said(*content):
    return {"type": "assistant", "message": {"role": "assistant", "content": list(content)}}


def text(words):
    return {"type": "text", "text": words}


def used(name):
    return {"type": "tool_use", "id": "t", "name": name, "input": {}}


# --- what is rendered ---------------------------------------------------------------------------------------------


def test_codex_config_is_toml_that_names_the_gateway_once_and_holds_no_secret():
    harness = load_harness("codex")
    written = render_files(harness, VALUES)["/home/.codex/config.toml"]
    config = tomllib.loads(written)
    provider = config["model_providers"][config["model_provider"]]
    assert (config["model"], provider["base_url"], provider["wire_api"]) == ("<model>", "<base_url>/v1", "responses")
    assert render_env(harness, VALUES)[provider["env_key"]] == "<token>"
    assert "<token>" not in written
    assert config["web_search"] == "disabled" and not config["agents"]["enabled"]
    assert isinstance(config["model_context_window"], int)


@pytest.mark.parametrize(
    ("name", "path"), [("gemini-cli", "/home/.gemini/settings.json"), ("qwen-code", "/home/.qwen/settings.json")]
)
def test_settings_are_json_with_numbers_and_without_a_secret(name, path):
    written = render_files(load_harness(name), VALUES)[path]
    settings = json.loads(written)
    assert (settings["model"]["name"], settings["model"]["maxSessionTurns"]) == ("<model>", 3)
    assert settings["privacy"]["usageStatisticsEnabled"] is False
    assert "<token>" not in written


def test_the_reply_cap_reaches_the_agents_that_take_one():
    settings = json.loads(render_files(load_harness("qwen-code"), VALUES)["/home/.qwen/settings.json"])
    assert settings["model"]["generationConfig"]["samplingParams"] == {"max_tokens": 64}
    assert render_env(load_harness("claude-code"), VALUES)["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "64"
    assert "--max-turns=3" in [render(part, VALUES) for part in load_harness("claude-code").argv]


def test_qwen_code_is_told_its_tools_in_one_word():
    (word,) = [part for part in load_harness("qwen-code").argv if part.startswith("--exclude-tools")]
    names = word.split("=")[1].split(",")
    assert {"agent", "skill", "web_fetch", "notebook_edit"} <= set(names)
    assert all(name.replace("_", "").isalpha() for name in names)


@pytest.mark.parametrize(
    ("name", "sdk", "path"),
    [
        ("opencode-responses", "@ai-sdk/openai", "/v1"),
        ("opencode-anthropic", "@ai-sdk/anthropic", "/v1"),
        ("opencode-gemini", "@ai-sdk/google", "/v1beta"),
    ],
)
def test_opencode_speaks_another_dialect_by_its_sdk_alone(name, sdk, path):
    ours, plain = (
        json.loads(render_env(load_harness(which), VALUES)["OPENCODE_CONFIG_CONTENT"]) for which in (name, "opencode")
    )
    provider = ours["provider"]["capture"]
    assert (provider["npm"], provider["options"]["baseURL"]) == (sdk, f"<base_url>{path}")
    provider["npm"], provider["options"]["baseURL"] = "@ai-sdk/openai-compatible", "<base_url>/v1"
    assert ours == plain


# --- what is read -------------------------------------------------------------------------------------------------

REPORTS = {
    "claude-code, done": (
        "claude-code",
        lines(
            said(text("I look.")),
            said(used("Bash")),
            said(used("Bash"), text("and"), used("Read")),
            said(text("Done.")),
            {"type": "result", "subtype": "success", "is_error": False, "result": "Done."},
        ),
        0,
        AgentReport("Done.", {"Bash": 2, "Read": 1}),
    ),
    "claude-code, killed": (
        "claude-code",
        lines(said(text("I look.")), said(used("Bash"))),
        None,
        AgentReport("I look.", {"Bash": 1}),
    ),
    "claude-code, its own limit": (
        "claude-code",
        lines(said(used("Bash")), {"type": "result", "subtype": "error_max_turns", "is_error": True}),
        1,
        AgentReport(None, {"Bash": 1}, "error_max_turns", "error_max_turns"),
    ),
    "claude-code, refused": (
        "claude-code",
        lines({"type": "result", "subtype": "success", "is_error": True, "result": "API Error: 403 spent"}),
        1,
        AgentReport(None, {}, "API Error: 403 spent"),
    ),
    "codex, done": (
        "codex",
        lines(
            {"type": "item.completed", "item": {"type": "error", "message": "no metadata"}},
            {"type": "error", "message": "Reconnecting... 1/2"},
            {"type": "item.started", "item": {"type": "command_execution", "command": "ls"}},
            {"type": "item.completed", "item": {"type": "command_execution", "command": "ls"}},
            {"type": "item.completed", "item": {"type": "agent_message", "text": "Done."}},
            {"type": "turn.completed", "usage": {}},
        ),
        0,
        AgentReport("Done.", {"command_execution": 1}),
    ),
    "codex, refused": (
        "codex",
        lines({"type": "turn.failed", "error": {"message": "unexpected status 403"}}),
        1,
        AgentReport(None, {}, "unexpected status 403"),
    ),
    "gemini-cli, done": (
        "gemini-cli",
        lines(
            {"type": "message", "role": "user", "content": "Do it."},
            {"type": "message", "role": "assistant", "content": "I ", "delta": True},
            {"type": "message", "role": "assistant", "content": "look.", "delta": True},
            {"type": "tool_use", "tool_name": "read_file", "parameters": {}},
            {"type": "tool_result", "status": "success", "output": ""},
            {"type": "message", "role": "assistant", "content": "Do", "delta": True},
            {"type": "message", "role": "assistant", "content": "ne.", "delta": True},
            {"type": "result", "status": "success", "stats": {}},
        ),
        0,
        AgentReport("Done.", {"read_file": 1}),
    ),
    "gemini-cli, its own limit": (
        "gemini-cli",
        lines({"type": "result", "status": "error", "error": {"type": "Limit", "message": "Reached max turns"}}),
        53,
        AgentReport(None, {}, "Reached max turns", "turns"),
    ),
    "qwen-code, done": (
        "qwen-code",
        lines(
            {"type": "stream_event", "event": {"type": "goal_state"}},
            said(text("I look.")),
            said(used("edit"), used("read_file")),
            {"type": "result", "subtype": "success", "is_error": False, "result": "Done."},
        ),
        0,
        AgentReport("Done.", {"edit": 1, "read_file": 1}),
    ),
    "qwen-code, its own limit": (
        "qwen-code",
        lines(
            said(used("edit")),
            {
                "type": "result",
                "subtype": "error_during_execution",
                "is_error": True,
                "error": {"message": "max turns"},
            },
        ),
        53,
        AgentReport(None, {"edit": 1}, "max turns", "turns"),
    ),
}


@pytest.mark.parametrize("case", REPORTS)
def test_an_agents_own_words_are_read(case):
    name, stdout, exit_code, report = REPORTS[case]
    assert read_report(load_harness(name), stdout, exit_code) == report


@pytest.mark.parametrize("name", ["claude-code", "codex", "gemini-cli", "qwen-code"])
def test_an_agent_that_says_nothing_is_unknown_and_not_without_tool_calls(name):
    assert read_report(load_harness(name), "", 1) == AgentReport()


# --- real rollouts ------------------------------------------------------------------------------------------------

OPENCODE = ("bash", {"command": COMMAND, "description": "Writes"})
CALLS = {
    "claude-code": ("Bash", {"command": COMMAND, "description": "Writes"}),
    "codex": ("exec_command", {"cmd": COMMAND}),
    "gemini-cli": ("run_shell_command", {"command": COMMAND}),
    "qwen-code": ("run_shell_command", {"command": COMMAND, "is_background": False}),
    "opencode-responses": OPENCODE,
    "opencode-anthropic": OPENCODE,
    "opencode-gemini": OPENCODE,
}
IN_CI = ("claude-code", "codex", "gemini-cli")
all_agents = pytest.mark.skipif(
    not os.environ.get("HARNESS_TRAINER_ALL_AGENTS"),
    reason="a minute more: set HARNESS_TRAINER_ALL_AGENTS=1 to run every agent everywhere",
)


@needs_npm
@pytest.mark.real_agent
@pytest.mark.parametrize("name", [name if name in IN_CI else pytest.param(name, marks=all_agents) for name in CALLS])
async def test_a_real_agent_writes_a_file_and_tells_what_it_did(name, tmp_path):
    report, engine = await writes_a_file(load_harness(name), CALLS[name], tmp_path)
    assert report.final_message == LAST_WORDS
    assert sum(report.tool_calls.values()) == 1
    assert (report.failure, report.limit) == (None, None)
    offered = {tool["function"]["name"] for tool in engine.requests[0].tools}
    unwanted = {
        "Task",
        "Agent",
        "WebFetch",
        "WebSearch",
        "web_fetch",
        "google_web_search",
        "agent",
        "invoke_agent",
        "task",
    }
    assert not offered & (unwanted | {"skill", "activate_skill", "multi_agent_v1"})


@needs_npm
@all_agents
@pytest.mark.real_agent
@pytest.mark.parametrize("name", CALLS)
async def test_a_real_agent_works_in_a_container_that_has_no_node(name, tmp_path, docker_engine, docker_base_image):
    config = DockerConfig(host=docker_engine, image=docker_base_image, relay_base=docker_base_image)
    run_id = f"test-{uuid.uuid4().hex[:12]}"
    await writes_a_file(load_harness(name), CALLS[name], tmp_path, sandbox=config, run_id=run_id)


@needs_npm
@needs_mitmproxy
@all_agents
@pytest.mark.real_agent
@pytest.mark.skipif(bubblewrap.find().problem is not None, reason="bubblewrap keeps the agent to the proxy")
@pytest.mark.parametrize("name", ["codex", "gemini-cli", "qwen-code", "claude-code"])
async def test_a_real_agent_that_knows_only_its_provider_is_led_to_the_gateway(name, tmp_path):
    report, _ = await writes_a_file(load_harness(name), CALLS[name], tmp_path, entry="intercept")
    assert report.final_message == LAST_WORDS


@needs_npm
@all_agents
@pytest.mark.real_agent
@pytest.mark.parametrize("name", ["claude-code", "codex", "gemini-cli", "qwen-code"])
async def test_a_real_agent_that_goes_on_for_ever_is_truncated(name, tmp_path):
    harness = load_harness(name)
    engine = ScriptedEngine([Reply("More.", tool_calls=[(CALLS[name][0], CALLS[name][1])])])
    result = await roll(tmp_path, engine, harness, harness_bin=installed(harness), timeout_s=120, max_turns=2)
    assert (result.outcome, result.num_turns) == (Outcome.TRUNCATED, 2), result.detail

"""pi, Kimi Code, Copilot CLI, Cline, Continue, nanocoder, grok-cli: their adapters, and a real rollout of each."""

import json
import os
import uuid

import pytest
import yaml
from real_agents import COMMAND, FIRST_WORDS, LAST_WORDS, installed, needs_npm, writes_a_file

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from harness_trainer.harnesses import load_harness
from harness_trainer.harnesses.base import PLACEHOLDERS, NpmInstall, render, render_env, render_files
from harness_trainer.harnesses.entry import entered
from harness_trainer.harnesses.install import ensure_installed
from harness_trainer.harnesses.reading import AgentReport, read_report
from harness_trainer.rollouts.types import Outcome
from sandboxes.docker import DockerConfig
from tests.intercept.intercepting import needs_mitmproxy
from tests.rollouts.rolling import roll

VALUES = {name: f"<{name}>" for name in PLACEHOLDERS} | {"context": 4096, "max_tokens": 64, "max_turns": 3}
CALLS = {
    "pi": ("bash", {"command": COMMAND}),
    "kimi-code": ("Bash", {"command": COMMAND}),
    "copilot-cli": ("bash", {"command": COMMAND, "description": "Writes"}),
    "cline": ("run_commands", {"commands": [COMMAND]}),
    "continue": ("Bash", {"command": COMMAND}),
    "nanocoder": ("execute_bash", {"command": COMMAND}),
    "grok-cli": ("bash", {"command": COMMAND}),
}
NODE = [name for name in CALLS if name != "cline"]


def lines(*events):
    return "\n".join(["a log line", *map(json.dumps, events), '{"type": "cut'])


# --- what is rendered ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NODE)
def test_an_agent_on_node_brings_its_own(name):
    assert load_harness(name).install.node == "24.22.3"


@pytest.mark.parametrize("name", CALLS)
def test_the_token_stands_in_one_place_and_never_in_the_command(name):
    harness = load_harness(name)
    assert "<token>" not in json.dumps([render(part, VALUES) for part in harness.argv])
    written = json.dumps([render_env(harness, VALUES), render_files(harness, VALUES)])
    assert written.count("<token>") == 1


@pytest.mark.parametrize("name", CALLS)
def test_behind_interception_no_base_url_is_left(name):
    harness = entered(load_harness(name), "intercept")
    rendered = [render(part, VALUES) for part in harness.argv]
    text = json.dumps([rendered, render_env(harness, VALUES), render_files(harness, VALUES)])
    assert "<base_url>" not in text and "${" not in text


def test_the_reply_cap_reaches_the_agents_that_take_one():
    pi = json.loads(render_files(load_harness("pi"), VALUES)["/home/.pi/agent/models.json"])
    (model,) = pi["providers"]["capture"]["models"]
    assert (model["maxTokens"], model["id"]) == (64, "<model>")
    cn = yaml.safe_load(render_files(load_harness("continue"), VALUES)["/home/continue.yaml"])
    assert cn["models"][0]["defaultCompletionOptions"]["maxTokens"] == 64
    assert render_env(load_harness("kimi-code"), VALUES)["KIMI_MODEL_MAX_OUTPUT_SIZE"] == "64"
    assert render_env(load_harness("copilot-cli"), VALUES)["COPILOT_PROVIDER_MAX_OUTPUT_TOKENS"] == "64"
    assert render_env(load_harness("grok-cli"), VALUES)["GROK_MAX_TOKENS"] == "64"


def test_the_turn_limit_reaches_the_agent_that_keeps_one():
    grok = [render(part, VALUES) for part in load_harness("grok-cli").argv]
    assert grok[grok.index("--max-tool-rounds") + 1] == 3


# --- what is read -------------------------------------------------------------------------------------------------


def pi_said(words, **more):
    return {
        "type": "message_end",
        "message": {"role": "assistant", "content": [{"type": "text", "text": words}], **more},
    }


def pi_failed(will_retry):
    messages = [{"role": "user"}, {"role": "assistant", "stopReason": "error", "errorMessage": "403: spent"}]
    return {"type": "agent_end", "messages": messages, "willRetry": will_retry}


def cline_event(**event):
    return {"type": "agent_event", "event": event}


CALLED = {"role": "assistant", "content": "I look.", "tool_calls": [{"id": "c", "function": {"name": "bash"}}]}
GROK_FAILED = {"role": "assistant", "content": "Sorry, I encountered an error: Grok API error: 403 spent"}
GROK_LIMIT = "Maximum tool execution rounds reached. Stopping to prevent infinite loops."
REPORTS = {
    "pi, done": (
        "pi",
        lines(
            pi_said("I look.", stopReason="toolUse"),
            {"type": "tool_execution_start", "toolName": "bash"},
            {"type": "tool_execution_end", "toolName": "bash", "isError": True},
            pi_said("Done.", stopReason="stop"),
            {"type": "agent_end", "messages": [{"role": "assistant", "stopReason": "stop"}], "willRetry": False},
        ),
        0,
        AgentReport("Done.", {"bash": 1}),
    ),
    "pi, refused, with exit code 0": (
        "pi",
        lines({"type": "tool_execution_start", "toolName": "bash"}, pi_failed(False)),
        0,
        AgentReport(None, {"bash": 1}, "403: spent"),
    ),
    "pi, recovered": (
        "pi",
        lines(pi_failed(True), pi_said("Done.", stopReason="stop"), {"type": "agent_end", "willRetry": False}),
        0,
        AgentReport("Done.", {}),
    ),
    "kimi-code, done": (
        "kimi-code",
        lines({"role": "meta", "version": "2"}, CALLED, {"role": "tool"}, {"role": "assistant", "content": "Done."}),
        0,
        AgentReport("Done.", {"bash": 1}),
    ),
    "copilot-cli, done": (
        "copilot-cli",
        lines(
            {"type": "assistant.message_delta", "data": {"deltaContent": "Do"}},
            {"type": "tool.execution_start", "data": {"toolName": "bash", "arguments": {}}},
            {"type": "assistant.message", "data": {"content": "Done.", "toolRequests": []}},
            {"type": "result", "exitCode": 0},
        ),
        0,
        AgentReport("Done.", {"bash": 1}),
    ),
    "copilot-cli, refused": (
        "copilot-cli",
        lines({"type": "session.error", "data": {"message": "HTTP 403"}}, {"type": "result", "exitCode": 1}),
        1,
        AgentReport(None, {}, "HTTP 403"),
    ),
    "cline, done": (
        "cline",
        lines(
            cline_event(type="content_start", contentType="text", text="I look."),
            cline_event(type="content_start", contentType="tool", toolName="editor"),
            cline_event(type="content_end", contentType="tool", toolName="editor"),
            {"type": "run_result", "finishReason": "completed", "text": "Done."},
        ),
        0,
        AgentReport("Done.", {"editor": 1}),
    ),
    "cline, refused": (
        "cline",
        lines({"type": "run_result", "finishReason": "error", "text": "spent"}),
        1,
        AgentReport(None, {}, "spent"),
    ),
    "continue, done": ("continue", "Done.\n", 0, AgentReport("Done.")),
    "nanocoder, done": (
        "nanocoder",
        json.dumps({"kind": "success", "finalText": "I look.Done.", "toolCalls": [{"name": "read_file"}]}, indent=2),
        0,
        AgentReport(None, {"read_file": 1}),
    ),
    "nanocoder, refused": (
        "nanocoder",
        json.dumps({"kind": "error", "finalText": "", "toolCalls": [], "message": "spent"}, indent=2),
        1,
        AgentReport(None, {}, "spent"),
    ),
    "grok-cli, done": (
        "grok-cli",
        lines({"role": "user", "content": "Sorry, I encountered an error: fix it"}, CALLED, {"role": "tool"}),
        0,
        AgentReport("I look.", {"bash": 1}),
    ),
    "grok-cli, refused, with exit code 0": (
        "grok-cli",
        lines(GROK_FAILED),
        0,
        AgentReport(failure=GROK_FAILED["content"]),
    ),
    "grok-cli, its own limit": (
        "grok-cli",
        lines(CALLED, {"role": "assistant", "content": GROK_LIMIT}),
        0,
        AgentReport(None, {"bash": 1}, None, GROK_LIMIT),
    ),
}


@pytest.mark.parametrize("case", REPORTS)
def test_an_agents_own_words_are_read(case):
    name, stdout, exit_code, report = REPORTS[case]
    assert read_report(load_harness(name), stdout, exit_code) == report


def test_a_line_separator_in_what_the_model_says_ends_no_line_of_the_agents_output():
    event = {"role": "assistant", "content": "a\u2028b", "tool_calls": [{"function": {"name": "Bash"}}]}
    report = read_report(load_harness("kimi-code"), json.dumps(event, ensure_ascii=False) + "\n", 0)
    assert (report.final_message, report.tool_calls) == ("a\u2028b", {"Bash": 1})


def test_agents_that_exit_with_0_after_failures_are_known():
    assert [name for name in CALLS if not load_harness(name).exit_0_is_success] == ["pi", "grok-cli"]


@needs_npm
def test_what_an_agent_unpacks_at_its_first_start_is_kept_with_its_install(tmp_path):
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "package.json").write_text('{"name": "pkg", "version": "1.0.0", "bin": {"pkg": "run.sh"}}')
    (package / "run.sh").write_text('#!/bin/sh\nmkdir "$UNPACKED" && pwd -P > "$UNPACKED/made"\n')
    (package / "run.sh").chmod(0o755)
    env = {"UNPACKED": "${bin}/../.unpacked"}
    install = {"type": "npm", "packages": [f"file:{package}"], "check": ["pkg"], "env": env}
    harness = load_harness("pyagent").model_copy(update={"install": NpmInstall.model_validate(install)})
    programs = ensure_installed(harness, tmp_path / "cache", print)
    assert (programs.parent / ".unpacked" / "made").is_file()


# --- real rollouts ------------------------------------------------------------------------------------------------

FINAL_UNKNOWN = ("nanocoder",)  # its own account joins the words of all its turns
TOOLS_UNKNOWN = ("continue",)
UNWANTED = {"Agent", "AgentSwarm", "AskQuestion", "AskUserQuestion", "Fetch", "FetchURL", "agent", "ask_question"}
UNWANTED |= {"ask_user", "fetch_url", "fetch_web_content", "spawn_agent", "task", "team_status", "web_fetch"}
all_agents = pytest.mark.skipif(
    not os.environ.get("HARNESS_TRAINER_ALL_AGENTS"),
    reason="two minutes more: set HARNESS_TRAINER_ALL_AGENTS=1 to run every agent everywhere",
)
AGENTS = [name if name == "pi" else pytest.param(name, marks=all_agents) for name in CALLS]


async def works(name, tmp_path, *, harness=None, **settings):
    """It writes the file, and is shown its own first words to the letter in its second turn."""
    report, engine = await writes_a_file(harness or load_harness(name), CALLS[name], tmp_path, **settings)
    assert FIRST_WORDS in [message.get("content") for message in engine.requests[1].messages]
    return report, engine


@needs_npm
@pytest.mark.real_agent
@pytest.mark.parametrize("name", AGENTS)
async def test_a_real_agent_writes_a_file_and_tells_what_it_did(name, tmp_path):
    report, engine = await works(name, tmp_path)
    assert report.final_message == (None if name in FINAL_UNKNOWN else LAST_WORDS)
    assert report.tool_calls == (None if name in TOOLS_UNKNOWN else {CALLS[name][0]: 1})
    assert (report.failure, report.limit) == (None, None)
    assert not UNWANTED & {tool["function"]["name"] for tool in engine.requests[0].tools}


@needs_npm
@pytest.mark.real_agent
@pytest.mark.parametrize("name", AGENTS)
async def test_a_real_agent_works_in_a_container_that_has_no_node(name, tmp_path, docker_engine, docker_base_image):
    config = DockerConfig(host=docker_engine, image=docker_base_image, relay_base=docker_base_image)
    await works(name, tmp_path, sandbox=config, run_id=f"test-{uuid.uuid4().hex[:12]}")


@needs_npm
@all_agents
@needs_mitmproxy
@pytest.mark.real_agent
@pytest.mark.parametrize("name", CALLS)
async def test_a_real_agent_works_without_a_base_url(name, tmp_path):
    await works(name, tmp_path, harness=entered(load_harness(name), "intercept"))


@needs_npm
@all_agents
@pytest.mark.real_agent
@pytest.mark.parametrize("name", CALLS)
async def test_a_real_agent_that_goes_on_for_ever_is_truncated(name, tmp_path):
    harness = load_harness(name)
    engine = ScriptedEngine([Reply("More.", tool_calls=[CALLS[name]])])
    result = await roll(tmp_path, engine, harness, harness_bin=installed(harness), timeout_s=120, max_turns=2)
    assert (result.outcome, result.num_turns) == (Outcome.TRUNCATED, 2), result.detail
    assert result.num_side_turns == 0, result.findings

"""Odd instructions on their way into an agent, and outputs of an agent that were cut on their way out."""

import json
import subprocess
import sys

import pytest
import yaml

from harness_trainer.harnesses import load_harness
from harness_trainer.harnesses.base import PLACEHOLDERS, render, render_files
from harness_trainer.harnesses.reading import AgentReport, read_report

VALUES = {name: f"<{name}>" for name in PLACEHOLDERS} | {"context": 4096, "max_tokens": 64, "max_turns": 3}
MINI = "/home/.config/mini-swe-agent/run.yaml"
ODD = 'Fix the \U0001f680 \U0001d465; caf\u00e9\x85\u2028\u2029\ufeff\uffff\x7f\x9f \\ "q"\ttab\nline'


def test_a_file_of_data_is_read_alike_as_json_and_as_yaml_whatever_the_instruction_holds():
    text = render_files(load_harness("mini-swe-agent"), VALUES | {"instruction": ODD})[MINI]
    assert yaml.safe_load(text)["run"]["task"] == json.loads(text)["run"]["task"] == ODD
    text.encode()


@pytest.mark.parametrize("name", ["claude-code", "claude-code-subagents", "qwen-code", "aider"])
@pytest.mark.parametrize("text", ["/clear the table", "!ls"])
def test_an_instruction_does_not_begin_what_an_agent_with_commands_of_its_own_is_given(name, text):
    harness, values = load_harness(name), VALUES | {"instruction": text}
    given = render_files(harness, values)["/home/instruction.md"] if harness.stdin is None else None
    assert (given or render(harness.stdin, values)) == "\n" + text


def test_aider_is_ended_by_the_status_that_it_does_not_ask_again_after():
    assert load_harness("aider").closed_status == 401


WHOLE = {"status": "LimitsExceeded", "submission": "", "tools": ["bash", "bash"], "raised": None}
UNTOLD = "it printed no whole JSON document, which alone would tell how it ended"


def test_a_document_that_was_cut_tells_nothing_and_what_was_inside_it_is_no_document():
    harness = load_harness("mini-swe-agent")
    report = read_report(harness, json.dumps(WHOLE), 0)
    assert (report.limit, report.tool_calls, report.failure) == ("LimitsExceeded", {"bash": 2}, None)
    for indent in (None, 2):
        inner = [{"status": "Submitted", "submission": "x", "tools": ["bash"]}] * 3
        told = json.dumps({**WHOLE, "messages": inner, "more": inner}, indent=indent)
        cuts = range(1, len(told) // 2)
        cut = [f"{told[:at]}\n[... 9 bytes cut ...]\n{told[at + 9 :]}" for at in cuts]
        for text in cut + [told[:-at] for at in cuts]:
            assert read_report(harness, text, 0) == AgentReport(failure=UNTOLD), text
    assert read_report(harness, "", 1) == AgentReport(), "then its exit code says it, and its own words why"
    assert read_report(load_harness("nanocoder"), '{"kind": "error", "toolCalls": [', 0) == AgentReport()


END = {"role": "exit", "content": "", "extra": {"exit_status": "LimitsExceeded", "submission": ""}}
RAISED = {"role": "exit", "content": "", "extra": {"exit_status": "OSError", "exception_str": "", "traceback": "why"}}


@pytest.mark.parametrize(
    ("end", "report"),
    [
        (END, AgentReport(None, {"bash": 500}, None, "LimitsExceeded")),
        (RAISED, AgentReport(None, {"bash": 500}, "why", None)),
    ],
)
def test_of_mini_swe_agents_trajectory_no_more_is_printed_than_is_read(tmp_path, end, report):
    harness = load_harness("mini-swe-agent")
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "bash", "arguments": "{}"}}]}
    messages = [call, {"role": "tool", "content": "y" * 10_000, "tool_calls": None}] * 500
    told = {"info": {"submission": "", **end["extra"]}, "messages": [*messages, end]}
    (tmp_path / "kept.json").write_text(json.dumps(told, indent=2))
    (tmp_path / "python").symlink_to(sys.executable)
    mini = tmp_path / "mini"
    mini.write_text('#!/bin/sh\necho console\ncp "$HOME/kept.json" "$HOME/trajectory.json"; exit 5\n')
    mini.chmod(0o755)
    argv = [str(render(part, VALUES | {"bin": str(tmp_path)})) for part in harness.argv]
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (5, "console\n")
    assert len(done.stdout) < 10_000 and read_report(harness, done.stdout, 0) == report

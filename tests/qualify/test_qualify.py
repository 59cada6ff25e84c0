"""Qualification end to end with agents that need nothing installed: a sound one, and all kinds of bad ones."""

import json
import shutil
from dataclasses import replace

import pytest

from harness_trainer.cache import cache_dir
from harness_trainer.cli import main
from harness_trainer.qualify.bench import Setting
from harness_trainer.qualify.check import Report, harness_names, qualify, scenarios_of
from harness_trainer.qualify.page import page, summary
from harness_trainer.qualify.verdict import Verdict
from sandboxes.local import LocalConfig
from tests.intercept.intercepting import needs_mitmproxy

CALL = (
    """curl -s -m 20 -H "Authorization: Bearer $TOKEN" -H "Content-Type: application/json" -d '{"model": "m", """
    """"messages": [{"role": "user", "content": "go"}]}' "$URL" > /dev/null"""
)


# An agent with a tool of the given name, a limit of 3 turns that it does not tell, and a way to repeat what was said.
PYTHON_AGENT = """
import json, os, subprocess, sys, urllib.request
tool, behind = sys.argv[1:]
parameters = {"type": "object", "properties": {"command": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": tool, "parameters": parameters}}]
messages = [{"role": "user", "content": sys.stdin.read()}]
for _ in range(3):
    body = json.dumps({"model": "m", "messages": messages, "tools": tools}).encode()
    headers = {"authorization": "Bearer " + os.environ["TOKEN"], "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(os.environ["URL"], body, headers)) as reply:
        said = json.load(reply)["choices"][0]["message"]
    messages.append({**said, "content": (said["content"] or "") + behind})
    for call in said.get("tool_calls") or []:
        subprocess.run(json.loads(call["function"]["arguments"])["command"], shell=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "done"})
    if not said.get("tool_calls"):
        break
"""


@pytest.fixture
def setting(tmp_path):
    return Setting(LocalConfig(root=tmp_path / "boxes"), 30.0, tmp_path / "logs", tmp_path / "owned", "test")


@pytest.fixture
def agent(tmp_path):
    """Writes an adapter whose agent is a shell script; gives its path."""

    def written(script, **fields):
        data = {
            "name": "fake",
            "dialect": "openai_chat",
            "argv": ["sh", "-c", script],
            "env": {"URL": "${base_url}/v1/chat/completions", "TOKEN": "${token}"},
            "output": {"type": "text"},
            **fields,
        }
        path = tmp_path / "fake.yaml"
        path.write_text(json.dumps(data))
        return str(path)

    return written


@pytest.fixture
def python_agent(agent):
    def written(tool="bash", behind="", **fields):
        argv = ["python3", "-c", PYTHON_AGENT, tool, behind]
        return agent("", argv=argv, stdin="${instruction}", **fields)

    return written


async def judged(harness, setting, tmp_path, *names, seconds=30.0):
    setting = Setting(setting.sandbox, seconds, setting.logs, setting.registry, setting.run_id)
    report = await qualify(harness, scenarios_of(names), setting, tmp_path / "cache", lambda text: None)
    assert not list((tmp_path / "boxes").glob("*")), "no sandbox may be left"
    return report


async def test_the_shipped_agent_passes_every_scenario_that_it_has_the_tools_for(setting, tmp_path):
    names = [scenario.name for scenario in scenarios_of([]) if not scenario.sealed]
    report = await judged("pyagent", setting, tmp_path, *names)
    lines = {line.scenario: line for line in report.lines}
    offered = {name: line for name, line in lines.items() if line.verdict is not Verdict.NOT_OFFERED}
    assert set(lines) - set(offered) == {"sub-agent"}
    assert {line.verdict for line in offered.values()} == {Verdict.PASSED}, [line.why for line in report.lines]
    assert all(line.num_rows == line.num_conversations == 1 for line in offered.values())
    assert all(line.drift_tokens == 0 and line.num_mask == line.num_sampled for line in offered.values())
    assert lines["parallel"].num_turns == 2 and lines["budget"].num_turns == 3
    assert lines["engine-500"].num_side == 1, "the attempt that failed is kept and never trained"
    assert lines["drop"].num_coalesced == 1, "the retry gets the reply that was cut off"
    row = summary(report)
    assert (row["rows/lineage"], row["mask"], row["refused hosts"], row["bridged"]) == ("1.00", "1.00", "?", "-")
    assert report.good


@pytest.mark.real_agent
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not on PATH, no agent can be installed")
async def test_the_sub_agent_of_a_real_agent_is_a_row_of_its_own(setting, tmp_path):
    setting = replace(setting, timeout_s=120.0)
    report = await qualify("claude-code-subagents", scenarios_of(["sub-agent"]), setting, cache_dir(), print)
    if report.problem:
        pytest.skip(report.problem)
    (line,) = report.lines
    assert line.verdict is Verdict.PASSED, line.why
    assert (line.num_rows, line.num_conversations, line.drift_tokens) == (2, 2, 0)
    assert line.num_mask == line.num_sampled


@needs_mitmproxy
async def test_hosts_that_an_agent_tries_to_reach_are_refused_and_named(setting, tmp_path, agent):
    spec = agent(f"curl -s -m 10 https://telemetry.example/v1; {CALL}")
    report = await judged(spec, setting, tmp_path, "hosts")
    (line,) = report.lines
    if line.verdict is Verdict.NOT_OFFERED:
        pytest.skip(line.why)
    assert line.refused is not None and any("telemetry.example" in host for host in line.refused)


async def test_an_agent_that_lies_about_its_work_fails(setting, tmp_path, agent):
    report = await judged(agent(f"{CALL}; echo All done"), setting, tmp_path, "write")
    (line,) = report.lines
    assert line.verdict is Verdict.FAILED and not report.good
    assert "what it was told to do is not" in line.why


async def test_an_agent_that_does_the_work_without_its_model_fails(setting, tmp_path, agent):
    report = await judged(agent("echo moon > answer.txt"), setting, tmp_path, "write")
    assert report.lines[0].verdict is Verdict.FAILED
    assert "made no model call" in report.lines[0].why and report.lines[0].first_call_s is None


async def test_an_agent_that_never_ends_fails_and_is_ended(setting, tmp_path, agent):
    report = await judged(agent(f"{CALL}; sleep 600"), setting, tmp_path, "write", seconds=3.0)
    assert report.lines[0].verdict is Verdict.FAILED
    assert "did not end by itself" in report.lines[0].why


async def test_an_agent_that_floods_its_log_is_judged_by_its_work(setting, tmp_path, agent):
    flood = "yes flood | head -c 30000000"
    report = await judged(agent(f"{CALL}; echo moon > answer.txt; {flood}"), setting, tmp_path, "write")
    kept = tmp_path / "logs" / "fake" / "write"
    assert sum(file.stat().st_size for file in kept.rglob("*.log")) < 30_000_000
    assert report.lines[0].verdict is Verdict.PASSED, report.lines[0].why


async def test_an_agent_that_takes_a_fault_for_success_is_not_called_qualified_by_it(setting, tmp_path, agent):
    report = await judged(agent(f"{CALL}; exit 0"), setting, tmp_path, "engine-500")
    assert report.lines[0].verdict is Verdict.FAILED and "before the fault" in report.lines[0].why


async def test_an_agent_whose_tools_nobody_knows_shows_nothing_and_does_not_qualify(setting, tmp_path, python_agent):
    report = await judged(python_agent("my_terminal"), setting, tmp_path, "write", "failing-tool")
    assert [line.verdict for line in report.lines] == [Verdict.FAILED, Verdict.NOT_OFFERED] and not report.good
    assert "by a name that qualify knows" in summary(report)["why not"]
    assert not Report("mine", "", "", report.lines[1:]).good, "it failed nothing, and passed nothing"


async def test_a_conversation_that_becomes_two_rows_fails_unless_the_adapter_says_why(setting, tmp_path, python_agent):
    report = await judged(python_agent(), setting, tmp_path, "write")
    assert report.good and (report.lines[0].num_rows, report.lines[0].drift_tokens) == (1, 0), report.lines[0].why
    report = await judged(python_agent(behind="!"), setting, tmp_path, "write")
    assert report.lines[0].verdict is Verdict.FAILED and not report.good
    assert report.lines[0].why.startswith("2 rows and ") and "splits_rows" in report.lines[0].why
    report = await judged(python_agent(behind="!", splits_rows="it shouts"), setting, tmp_path, "write")
    assert report.good and summary(report)["rows/lineage"] == "2.00: it shouts"
    assert "2.00: it shouts" in page([report], {}) and report.as_json()["splits_rows"] == "it shouts"


async def test_an_agent_that_takes_its_own_turn_limit_for_success_fails(setting, tmp_path, python_agent):
    report = await judged(python_agent(), setting, tmp_path, "budget")
    assert report.lines[0].num_turns == 3 and report.lines[0].verdict is Verdict.FAILED
    assert "otherwise than as truncated: outcome ok" in report.lines[0].why


async def test_an_agent_that_cannot_be_installed_is_a_report_and_no_exception(setting, tmp_path, agent, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    spec = agent("true", install={"type": "npm", "packages": ["x@1"], "check": ["x"]})
    report = await judged(spec, setting, tmp_path, "write")
    assert "npm" in report.problem and not report.good and not report.lines
    shown = page([report], {"engine": "scripted"})
    assert "not run" in shown and "npm" in shown


async def test_an_adapter_that_became_unreadable_ends_no_other_agents_run(setting, tmp_path, agent):
    report = await judged(agent("true", dialect="morse"), setting, tmp_path, "write")
    assert "is not valid" in report.problem and not report.good


def test_the_command_prints_figures_writes_the_page_and_says_by_its_exit_code_who_failed(
    tmp_path, agent, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    argv = ["qualify", "--scenario", "write", "--json", "--out", "docs/qualify.md", "--logs", "logs"]
    assert main([*argv, "--harness", f"pyagent,{agent('exit 3')}"]) == 1
    good, bad = json.loads(capsys.readouterr().out)
    assert (good["harness"], good["good"], bad["harness"], bad["good"]) == ("pyagent", True, "fake", False)
    assert good["scenarios"][0]["routes"] == {"POST /v1/chat/completions": 2}
    written = (tmp_path / "docs" / "qualify.md").read_text()
    assert "| pyagent | - | yes |" in written and "fake, write: failed" in written
    assert json.loads((tmp_path / "docs" / "qualify.json").read_text()) == [good, bad]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--harness", "nosuch"], "unknown harness 'nosuch'"),
        (["--scenario", "nosuch"], "--scenario nosuch: known are write,"),
        (["--timeout", "0"], "--timeout must be above 0"),
        (["--engine", "vllm", "--scenario", "write"], "--scenario is for the scripted engine"),
    ],
)
def test_a_wrong_argument_is_one_line_that_says_what_to_do(argv, said, capsys):
    assert main(["qualify", *argv]) == 2
    assert said in capsys.readouterr().err


def test_all_means_each_agent_once_and_not_its_other_forms():
    names = harness_names("all")
    assert {"opencode", "pyagent"} <= set(names)
    assert not {"opencode-small", "pyagent-chat"} & set(names)

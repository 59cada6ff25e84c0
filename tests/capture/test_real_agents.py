"""Coding agents as people install them, against the real gateway; only the engine is scripted.

Each agent runs one shell command and then says its last word. Installing is done once per cache (tens of seconds when
it is empty), a run takes a few seconds.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from capture_proxy import graph
from capture_proxy.engines.base import ChatRequest
from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.types import Capture, TurnRole, TurnStatus
from harness_trainer.cache import cache_dir
from harness_trainer.errors import SetupError
from harness_trainer.harnesses.base import Harness
from harness_trainer.harnesses.install import ensure_installed
from tests.capture.serving import served

pytestmark = [
    pytest.mark.real_agent,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not on PATH, no agent can be installed"),
]

PROMPT = "Write hello into hello.txt"
# What re-serialising and trimming would change, and what ends a line to JavaScript.
FIRST_WORDS = "\nI will write\u2028 it.\n\n"
LAST_WORDS = "The file is written."
COMMAND = "printf 'caf\u00e9\\n' > hello.txt"
RUN_TIMEOUT_S = 120


@dataclass(frozen=True)
class Agent:
    """One agent: its package, how it is started, and the shell tool it offers.

    @URL@ and @TOKEN@ in `env` and `files` stand for the gateway's address and the session's token.
    """

    package: str
    program: str
    argv: list[str]
    dialect: str
    tool: Callable[[str], tuple[str, dict[str, object]]]  # a command -> (tool name, arguments)
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # below HOME
    echoes_thoughts: bool = True  # whether the reasoning it was shown comes back in its next request


GEMINI_CLI = Agent(
    package="@google/gemini-cli@0.61.0",
    program="gemini",
    argv=["-p", PROMPT, "--yolo", "--output-format", "json", "-m", "smol"],
    dialect="gemini",
    tool=lambda command: ("run_shell_command", {"command": command}),
    env={"GEMINI_API_KEY": "@TOKEN@", "GOOGLE_GEMINI_BASE_URL": "@URL@", "GEMINI_CLI_TRUST_WORKSPACE": "true"},
    files={
        ".gemini/settings.json": json.dumps(
            {
                "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
                "general": {"enableAutoUpdate": False, "checkpointing": {"enabled": False}},
                "privacy": {"usageStatisticsEnabled": False},
                "model": {"name": "smol", "compressionThreshold": 1.0, "skipNextSpeakerCheck": True},
                "tools": {"sandbox": False, "core": ["run_shell_command", "read_file"]},
            }
        )
    },
    echoes_thoughts=False,
)
CLAUDE_CODE = Agent(
    package="@anthropic-ai/claude-code@2.1.197",
    program="claude",
    argv=[
        *("-p", PROMPT, "--output-format", "stream-json", "--verbose", "--model", "smol"),
        *("--dangerously-skip-permissions", "--tools", "Bash,Read", "--strict-mcp-config", "--setting-sources", ""),
    ],
    dialect="anthropic",
    tool=lambda command: ("Bash", {"command": command, "description": "Writes the file"}),
    env={
        "ANTHROPIC_BASE_URL": "@URL@",
        "ANTHROPIC_API_KEY": "@TOKEN@",
        "ANTHROPIC_SMALL_FAST_MODEL": "smol",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_RETRIES": "2",
        "DISABLE_AUTO_COMPACT": "1",
        "MAX_THINKING_TOKENS": "0",
        "IS_SANDBOX": "1",
    },
)
CODEX = Agent(
    package="@openai/codex@0.171.0",
    program="codex",
    argv=["exec", "--json", "--skip-git-repo-check", PROMPT],
    dialect="openai_responses",
    tool=lambda command: ("exec_command", {"cmd": command}),
    env={"CAPTURE_KEY": "@TOKEN@"},
    files={
        ".codex/config.toml": """\
model = "smol"
model_provider = "capture"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
model_context_window = 1000000
model_auto_compact_token_limit = 1000000
web_search = "disabled"
[features]
multi_agent = false
plugins = false
remote_plugin = false
apps = false
[analytics]
enabled = false
[model_providers.capture]
name = "capture"
base_url = "@URL@/v1"
env_key = "CAPTURE_KEY"
wire_api = "responses"
request_max_retries = 2
stream_max_retries = 2
"""
    },
)


def opencode(dialect: str, sdk: str, path: str) -> Agent:
    """opencode brings the SDKs of all providers, so it plays each dialect as that SDK does."""
    config = {
        "model": "capture/smol",
        "small_model": "capture/smol",
        "enabled_providers": ["capture"],
        "permission": "allow",
        "share": "disabled",
        "autoupdate": False,
        "snapshot": False,
        "lsp": False,
        "compaction": {"auto": False, "prune": False},
        "agent": {"title": {"disable": True}},
        "provider": {
            "capture": {
                "npm": sdk,
                "options": {"baseURL": f"@URL@{path}", "apiKey": "@TOKEN@"},
                "models": {"smol": {"limit": {"context": 1000000, "output": 4096}, "tool_call": True}},
            }
        },
    }
    switches = "MODELS_FETCH AUTOUPDATE AUTOCOMPACT LSP_DOWNLOAD DEFAULT_PLUGINS PROJECT_CONFIG"
    return Agent(
        package="opencode-ai@1.18.33",
        program="opencode",
        argv=["run", "--format", "json", PROMPT],
        dialect=dialect,
        tool=lambda command: ("bash", {"command": command, "description": "Writes the file"}),
        env={f"OPENCODE_DISABLE_{name}": "1" for name in switches.split()}
        | {"OPENCODE_CONFIG_CONTENT": json.dumps(config)},
    )


all_agents = pytest.mark.skipif(
    not os.environ.get("HARNESS_TRAINER_ALL_AGENTS"),
    reason="a minute more: set HARNESS_TRAINER_ALL_AGENTS=1 to run opencode in every dialect",
)
RETRYING = [
    GEMINI_CLI,
    CLAUDE_CODE,
    CODEX,
    pytest.param(opencode("gemini", "@ai-sdk/google", "/v1beta"), marks=all_agents),
]
# With these, opencode gives up on an error event (Anthropic), or puts the broken reply into its history afterwards.
AGENTS = [
    *RETRYING,
    pytest.param(opencode("anthropic", "@ai-sdk/anthropic", "/v1"), marks=all_agents),
    pytest.param(opencode("openai_responses", "@ai-sdk/openai", "/v1"), marks=all_agents),
]


def name_of(agent: Agent) -> str:
    return f"{agent.program}-{agent.dialect}"


each_agent = pytest.mark.parametrize("agent", AGENTS, ids=name_of)


@each_agent
async def test_a_tool_turn_and_a_last_word_are_one_row(agent: Agent, tmp_path: Path) -> None:
    capture = await write_a_file(agent, tmp_path, reasoning="Let me think." if agent.echoes_thoughts else "")
    one, two = capture.turns
    assert (one.role, two.role) == (TurnRole.AGENT, TurnRole.AGENT)
    whole = one.prompt_ids_P + one.completion_ids_T
    assert two.prompt_ids_P[: len(whole)] == whole
    assert len(graph.build([one, two]).lineages) == 1


async def test_thoughts_that_the_agent_drops_make_a_row_of_their_own(tmp_path: Path) -> None:
    assert not GEMINI_CLI.echoes_thoughts
    capture = await write_a_file(GEMINI_CLI, tmp_path, reasoning="Let me think.")
    one, two = capture.turns
    assert "reasoning_content" not in two.request["messages"][-2]
    links = graph.build([one, two])
    assert len(links.lineages) == 2
    fork = links.nodes[two.turn_id].fork
    assert fork is not None
    assert (fork.position, fork.turn_id, fork.reason) == (len(one.prompt_ids_P), one.turn_id, "reply rewritten")


@pytest.mark.parametrize("agent", RETRYING, ids=name_of)
async def test_a_reply_that_breaks_off_is_asked_for_again(agent: Agent, tmp_path: Path) -> None:
    broken = Reply(["Part of ", "it"], [agent.tool("true")], die_after=1)
    capture = await write_a_file(agent, tmp_path, reasoning="", first=broken)
    lost, one, two = capture.turns
    assert (lost.status, lost.trainable, lost.message["content"]) == (TurnStatus.FAILED, False, "Part of ")
    assert capture.session.last_fault is None
    whole = one.prompt_ids_P + one.completion_ids_T
    assert two.prompt_ids_P[: len(whole)] == whole


@each_agent
async def test_a_spent_budget_ends_the_agent(agent: Agent, tmp_path: Path) -> None:
    engine = ScriptedEngine([Reply("", tool_calls=[agent.tool("true")])], model="smol")
    capture, said, _ = await run(agent, engine, tmp_path, max_turns=2)
    assert capture.session.limit_hit == "max_turns", said
    assert len(engine.requests) == 2


async def write_a_file(agent: Agent, tmp_path: Path, reasoning: str, first: Reply | None = None) -> Capture:
    """The agent runs one command and says its last word; everything that it must have done is checked.

    `first` is a reply that it gets before, and does not survive.
    """

    def script(request: ChatRequest) -> Reply | str:
        if first is not None and len(engine.requests) == 1:
            return first
        if any(message["role"] == "tool" for message in request.messages):
            return LAST_WORDS
        return Reply([FIRST_WORDS], tool_calls=[agent.tool(COMMAND)], reasoning=reasoning)

    # Slower than the keep-alive, so that the agent meets its frames too.
    engine = ScriptedEngine(script, model="smol", version="v3", first_delay_s=0.2, piece_delay_s=0.2)
    capture, said, status = await run(agent, engine, tmp_path)
    assert status == 0, said
    assert (tmp_path / "work" / "hello.txt").read_text() == "caf\u00e9\n"
    assert LAST_WORDS in said
    assert {turn.dialect for turn in capture.turns} == {agent.dialect}
    one, two = [turn for turn in capture.turns if turn.status is TurnStatus.OK]
    assert (one.message["content"], two.message["content"]) == (FIRST_WORDS, LAST_WORDS)
    assert one.trainable and two.trainable
    assert two.request["messages"][-1]["role"] == "tool"
    return capture


async def run(agent: Agent, engine: ScriptedEngine, tmp_path: Path, **policy: int) -> tuple[Capture, str, int]:
    """Run the agent to its end against a gateway of its own: (what was recorded, its output, its exit status)."""
    bin_dir = await asyncio.to_thread(installed, agent)
    home, work = tmp_path / "home", tmp_path / "work"
    for folder in (home, work):
        folder.mkdir()
    async with served(engine, tmp_path / "s.sqlite", keepalive_s=0.05) as gw:
        if agent.dialect not in {dialect.name for dialect in gw.gateway.dialects}:
            pytest.skip(f"the gateway does not speak {agent.dialect}")
        fill = {"@URL@": gw.agent_url, "@TOKEN@": (await gw.mint(**policy)).token}
        for name, text in agent.files.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(_filled(text, fill))
        env = {
            "HOME": str(home),
            "PATH": f"{bin_dir}:{os.environ['PATH']}",
            "LANG": "C.UTF-8",
            # Nothing but the gateway answers: whatever else an agent calls is refused at once.
            "HTTPS_PROXY": "http://127.0.0.1:9",
            "NO_PROXY": "127.0.0.1,localhost",
        }
        env |= {name: _filled(value, fill) for name, value in agent.env.items()}
        out, status = await _finished([str(bin_dir / agent.program), *agent.argv], work, env)
        return await gw.admin.capture("s1"), out, status


def installed(agent: Agent) -> Path:
    """The folder with the agent's programs; skips the test where its package cannot be had."""
    spec = {
        "name": agent.program,
        "dialect": "openai_chat",  # says nothing to the installer
        "install": {"type": "npm", "packages": [agent.package], "check": [agent.program, "--version"]},
        "argv": [agent.program],
        "output": {"type": "text"},
    }
    try:
        return ensure_installed(Harness.model_validate(spec), cache_dir(), print)
    except SetupError as error:
        pytest.skip(f"{agent.package} cannot be installed: {error}")


async def _finished(argv: list[str], cwd: Path, env: dict[str, str]) -> tuple[str, int]:
    pipe, together = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
    process = await asyncio.create_subprocess_exec(
        *argv, cwd=cwd, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=together, start_new_session=True
    )
    try:
        async with asyncio.timeout(RUN_TIMEOUT_S):
            out, _ = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what it left in the background
    assert process.returncode is not None
    return out.decode("utf-8", "replace"), process.returncode


def _filled(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text

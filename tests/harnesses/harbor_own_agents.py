"""Agents of a user's own for the tests of the bridge to Harbor: they run in Harbor's Python, in no test process.

The instruction says what an agent is to do: `words` of it are the names of functions below.
"""

import asyncio
import json
import os
import tempfile
import time
import urllib.request
from pathlib import Path

from harbor.agents.base import BaseAgent
from harbor.agents.installed.base import BaseInstalledAgent

CALL = (
    'curl -s -m 20 -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" '
    """-d '{"model": "m", "messages": [{"role": "user", "content": "go"}]}' "$OPENAI_BASE_URL/chat/completions" """
)


def ask(agent, text):
    """One model call, from this machine, with the provider's usual variables."""
    env = agent.extra_env
    request = urllib.request.Request(
        env["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode(),
        {"authorization": "Bearer " + env["OPENAI_API_KEY"], "content-type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]


async def call(agent, environment):
    await asyncio.to_thread(ask, agent, "hello")


async def commands(agent, environment):
    ran = await environment.exec('echo "$A|$(pwd)|$OPENAI_API_KEY"; echo bad >&2; exit 3', cwd="/tmp", env={"A": "x y"})
    assert (ran.stdout, ran.stderr, ran.return_code) == (f"x y|/tmp|{agent.extra_env['OPENAI_API_KEY']}\n", "bad\n", 3)
    ran = await environment.exec("pwd; set -o pipefail; false | cat")  # bash, in the sandbox's working directory
    assert (ran.stdout, ran.return_code) == ("/app\n", 1)
    began = time.monotonic()
    try:
        await environment.exec("echo begun; sleep 60", timeout_sec=1)
    except RuntimeError as error:
        assert "timed out after 1 seconds" in str(error)
    else:
        raise AssertionError("the command must not outlive its time limit")
    assert time.monotonic() - began < 30
    assert (await environment.exec("id -un", user="root")).stdout.strip() == agent.options_seen["root"]
    sleeper = asyncio.create_task(environment.exec("sleep 7654321"))
    await asyncio.sleep(0.5)
    sleeper.cancel()
    await asyncio.wait([sleeper])
    ran = await environment.exec("sleep 1; cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '", user="root")
    assert "7654321" not in ran.stdout, "a command whose caller was cancelled is ended"


async def typed(agent, environment):
    """What a model may type, which no system could give a shell."""
    for command, why in {
        "echo a\0b": "NUL",
        "echo \ud83d": "half a character",
        "echo " + "x" * 2**17: "argument list too long",
    }.items():
        ran = await environment.exec(command)
        assert (ran.stdout, ran.return_code) == ("", 126) and why in ran.stderr, ran
    assert (await environment.exec("echo \U0001f680" + "x" * 100_000)).return_code == 0
    try:
        await environment.download_file("/app/a\0b", "/tmp/nowhere")
    except RuntimeError:
        return
    raise AssertionError("there is no file of that name")


async def files(agent, environment):
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "up" / "sub").mkdir(parents=True)
        (here / "up" / "a.txt").write_text("a")
        (here / "up" / "sub" / "b.sh").write_text("echo b")
        (here / "up" / "sub" / "b.sh").chmod(0o755)
        await environment.upload_file(here / "up" / "a.txt", "/app/new/folder/a.txt")
        await environment.upload_dir(here / "up", "/app/tree")
        ran = await environment.exec("cat new/folder/a.txt; tree/sub/b.sh; touch tree/new")
        assert (ran.stdout, ran.return_code) == ("ab\n", 0), ran
        await environment.download_file("/app/tree/a.txt", here / "down.txt")
        assert (here / "down.txt").read_text() == "a"
        await environment.download_dir("/app/tree", here / "down")
        assert sorted(p.name for p in (here / "down").rglob("*")) == ["a.txt", "b.sh", "new", "sub"]
        assert await environment.is_dir("/app/tree") and await environment.is_file("/app/tree/a.txt")
        await environment.download_dir_with_exclusions(
            source_dir="/app/tree", target_dir=here / "some", exclude=["sub"]
        )
        assert sorted(p.name for p in (here / "some").rglob("*")) == ["a.txt", "new"]
        try:
            await environment.download_file("/app/absent", here / "x")
        except FileNotFoundError:
            return
        raise AssertionError("a file that is not there cannot be had")


async def surroundings(agent, environment):
    assert not any(name.endswith(("_KEY", "_TOKEN", "_PROXY")) for name in os.environ), sorted(os.environ)
    assert os.listdir(os.environ["HOME"]) == []
    assert agent.options_seen["context"] == 8192, agent.options_seen
    assert agent.extra_env["OF_THE_FILE"] == "scripted"
    assert agent.model_name == "openai/scripted"


async def logs(agent, environment):
    await environment.exec("echo from inside > /logs/agent/inside.txt; ln -s /etc/passwd /logs/agent/link")
    (agent.logs_dir / "outside.txt").write_text("from outside")
    print("a word of the agent's")


async def moon(agent, environment):
    await environment.exec("echo moon > answer.txt")


async def fail(agent, environment):
    raise ValueError("the agent's own fault")


async def exit_7(agent, environment):
    os._exit(7)


async def leave(agent, environment):
    raise SystemExit("left")


async def hang(agent, environment):
    await environment.exec("sleep 1234567")


async def stay(agent, environment):
    """Does not end when it is told to."""
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            await environment.exec("echo still here > /logs/agent/stayed.txt")


async def block(agent, environment):
    time.sleep(1000)  # noqa: ASYNC251 - that is the point


async def environs(agent, environment):
    """What it does to its process is nobody else's business."""
    mine = agent.extra_env["OPENAI_API_KEY"]
    assert "MINE" not in os.environ
    os.environ["MINE"] = mine
    for number in range(5):
        await asyncio.to_thread(ask, agent, f"{agent.options_seen['name']} {number}")
        await asyncio.sleep(0.1)
    assert os.environ["MINE"] == mine
    assert (await environment.exec('printf %s "$OPENAI_API_KEY"')).stdout == mine


class Own(BaseAgent):
    """Does what the words of the instruction say."""

    def __init__(self, logs_dir, *args, **kwargs):
        self.options_seen = {key: kwargs.pop(key) for key in ("root", "context", "name", "setup") if key in kwargs}
        super().__init__(logs_dir, *args, **kwargs)

    @staticmethod
    def name():
        return "own"

    def version(self):
        return "1"

    async def setup(self, environment):
        for word in self.options_seen.get("setup", "").split():
            await globals()[word](self, environment)

    async def run(self, instruction, environment, context):
        for word in instruction.split():
            await globals()[word](self, environment)
        context.n_output_tokens = 5


class Installed(BaseInstalledAgent):
    """Installs itself by a file; runs in the sandbox. As a class of a user's, it takes no model connection."""

    @staticmethod
    def name():
        return "installed"

    def get_version_command(self):
        return "cat /app/installed-before"

    async def install(self, environment):
        await self.exec_as_root(environment, "echo 2.0 > /tmp/installed")

    async def run(self, instruction, environment, context):
        await environment.exec("cat /tmp/installed > how.txt 2>/dev/null || echo absent > how.txt")
        await self.exec_as_agent(environment, f"{CALL} > answer.txt; grep -q moon answer.txt; exit $((3 * $?))")


class NoAgent:
    pass

"""A rollout runner that is killed, and agents that wait for a word: for tests of what goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from harness_trainer.rollouts.at_work import Unfinished
from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.store import RolloutStore
from sandboxes import SandboxConfig
from sandboxes.docker import DockerConfig
from sandboxes.lifecycle import OwnedProcess, start_process
from sandboxes.local import LocalConfig
from sandboxes.processes import Proc, find_below, read_proc
from tests.capture.serving import KEY, Served, until
from tests.rollouts.rolling import runner_spec

ROOT = Path(__file__).parents[2]

# Two calls, the second when it is told to go on (the word may be "quiet": without a second one; or an exit code); a
# broken connection is tried again, as real agents do.
AGENT = """
import json, os, sys, time, urllib.error, urllib.request
tag = "TAG"
def say(messages):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["TOKEN"], "Content-Type": "application/json"}
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(os.environ["URL"], body, headers), timeout=60) as reply:
                return json.load(reply)["choices"][0]["message"]["content"]
        except urllib.error.HTTPError:
            raise
        except OSError:
            time.sleep(0.1)
history = [{"role": "user", "content": "go"}]
history += [{"role": "assistant", "content": say(history)}, {"role": "user", "content": "on"}]
open("begun", "w").close()
while not os.path.exists("go"):
    time.sleep(0.02)
word = open("go").read()
print(history[1]["content"] if word == "quiet" else say(history))
sys.exit(int(word) if word.isdigit() else 0)
"""
# Tests that say in which sandbox they run, and wait for a word there, if the task is of that kind.
TESTS = """
touch "${SANDBOX_ROOT:-}/tmp/testing"
WAIT
grep -q moon "${SANDBOX_ROOT:-}/logs/agent/final_message.txt" && R=1
echo ${R:-0} > "${SANDBOX_ROOT:-}/logs/verifier/reward.txt"
"""
WAIT = 'until [ -e "${SANDBOX_ROOT:-}/tmp/tested" ]; do sleep 0.05; done'
HEALTH = (
    '[environment.healthcheck]\ncommand = "test -e ${SANDBOX_ROOT:-}/app/healthy"\ninterval_sec = 0.2\nretries = 200\n'
)


def _write_task(folder: Path, *, health: bool = False, waits: bool = False) -> None:
    (folder / "tests").mkdir(parents=True)
    (folder / "environment").mkdir()
    (folder / "task.toml").write_text(f'schema_version = "1.4"\n{HEALTH if health else ""}')
    (folder / "instruction.md").write_text("Say moon.")
    (folder / "tests" / "test.sh").write_text(TESTS.replace("WAIT", WAIT if waits else ""))


class Boxes:
    """The sandboxes of a test, seen from outside."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self._root = kind, folder / "boxes"

    @property
    def config(self) -> SandboxConfig:
        return LocalConfig.model_validate({"root": self._root, "isolation": self.kind})

    def ids(self) -> set[str]:
        return {path.name for path in self._root.glob("*")}

    def has(self, box: str, path: str) -> bool:
        return (self._root / box / "root" / path.lstrip("/")).exists()

    def put(self, box: str, path: str, text: str = "") -> None:
        (self._root / box / "root" / path.lstrip("/")).write_text(text)

    def end(self, box: str) -> None:
        """As a machine does that loses it."""
        if self.kind == "bubblewrap":
            pid, _ = json.loads((self._root / box / "control" / "monitor.json").read_text())
            os.kill(pid, signal.SIGKILL)
        (self._root / box).rename(self._root.parent / f"lost-{box}")


class DockerBoxes(Boxes):
    """Containers with the labels of one registry."""

    def __init__(self, folder: Path, engine: str, image: str) -> None:
        super().__init__("docker", folder)
        import docker

        self._client = docker.DockerClient(base_url=engine)
        self._engine, self._image, self._registry = engine, image, folder / "owned"

    @property
    def config(self) -> SandboxConfig:
        return DockerConfig(host=self._engine, image=self._image, relay_base=self._image)

    def _labelled(self) -> set[str]:
        label = f"harness-trainer.registry={self._registry.absolute()}"
        return {one.name for one in self._client.containers.list(all=True, filters={"label": label})}

    def ids(self) -> set[str]:
        return {name for name in self._labelled() if not name.endswith("-net")} or self._labelled()

    def has(self, box: str, path: str) -> bool:
        import docker

        try:
            return self._client.containers.get(box).exec_run(["test", "-e", path], user="0").exit_code == 0
        except docker.errors.NotFound:
            return False

    def put(self, box: str, path: str, text: str = "") -> None:
        script = ["sh", "-c", 'printf %s "$1" > "$2"', "sh", text, path]
        assert self._client.containers.get(box).exec_run(script, user="0").exit_code == 0

    def end(self, box: str) -> None:
        self._client.containers.get(box).remove(force=True)


class Bench:
    """A run without learner and engine: a store, a gateway, a runner under a supervisor whose owner is this process."""

    def __init__(self, folder: Path, gateway: Served, store: RolloutStore, boxes: Boxes, **settings: object) -> None:
        self.boxes, self.registry, self._folder, self.store = boxes, folder / "owned", folder, store
        self.gateway, self.tag = gateway, f"agent-{folder.name}-{os.getpid()}"
        for name, options in {"plain": {}, "unwell": {"health": True}, "tested": {"waits": True}}.items():
            _write_task(folder / name / name, **options)
        schedule = {"max_open_groups": 1, "num_groups": 1, "max_staleness": None}
        schedule |= {key: settings.pop(key) for key in list(settings) if key in schedule}
        task, intercepted = str(settings.pop("task", "plain")), settings.pop("intercepted", False)
        defaults = {"group_size": 2, "max_concurrent": 2, "timeout_s": 90, "warm_total": 0, "retry_backoff_s": 0.0}
        agent = {
            "name": "waiting",
            "dialect": "openai_chat",
            "argv": ["python3", "-c", AGENT.replace("TAG", self.tag)],
            "env": {"URL": "${base_url}/v1/chat/completions", "TOKEN": "${token}"},
            "output": {"type": "text"},
        }
        if intercepted:  # it knows its provider's host and nothing else
            env = {"URL": "https://api.openai.com/v1/chat/completions", "TOKEN": "any"}
            agent |= {"env": env, "needs_intercept": True}
        (folder / "agent.yaml").write_text(json.dumps(agent))
        spec = runner_spec(
            folder,
            gateway,
            config=RolloutConfig.model_validate({**defaults, **settings}),
            sandbox=boxes.config,
            tasks=str(folder / task),
            harness=str(folder / "agent.yaml"),
            registry=self.registry,
            **schedule,
        )
        (folder / "runner.json").write_text(spec.model_dump_json())
        self.process: OwnedProcess | None = None

    # --- the runner ---

    async def start(self) -> None:
        argv = [sys.executable, "-m", "harness_trainer.rollouts", "--spec", str(self._folder / "runner.json")]
        env = {**os.environ, "CAPTURE_PROXY_ADMIN_KEY": KEY, "PYTHONPATH": str(ROOT)}
        self.process = await asyncio.to_thread(
            start_process,
            argv,
            env=env,
            cwd=self._folder,
            log_path=self._folder / "runner.log",
            registry=self.registry,
            kind="runner",
        )

    def runner_pid(self) -> int:
        assert self.process is not None
        found = [pid for pid in find_below(self.process.pid) if "harness_trainer.rollouts" in " ".join(_argv_of(pid))]
        return found[0]

    async def kill(self, *, supervisor: bool = False) -> None:
        """As the kernel does it; then what a supervisor does that will start another."""
        assert self.process is not None
        os.kill(self.process.pid if supervisor else self.runner_pid(), signal.SIGKILL)
        assert await asyncio.to_thread(self.process.wait, 30) == -signal.SIGKILL
        await asyncio.to_thread(self.process.stop, successor=True)

    async def end(self) -> int | None:
        assert self.process is not None
        return await asyncio.to_thread(self.process.stop, 30.0)

    def log(self) -> str:
        return (self._folder / "runner.log").read_text()

    async def until(self, condition: Callable[[], object]) -> None:
        process = self.process
        assert process is not None

        def is_so() -> object:
            assert process.alive(), self.log()[-3000:]
            return condition()

        try:
            await until(is_so, timeout_s=90)
        except TimeoutError:
            raise AssertionError(f"it did not come true:\n{self.log()[-3000:]}") from None

    # --- what it runs ---

    def at_work(self) -> list[Unfinished]:
        """Attempts whose agent waits for the word."""
        return [
            one
            for one in self.store.unfinished_rollouts()
            if one.at_work is not None
            and one.at_work.job_id is not None
            and self.boxes.has(one.at_work.sandbox_id, "/app/begun")
        ]

    def agents(self) -> set[Proc]:
        found = {read_proc(int(name)) for name in os.listdir("/proc") if name.isdigit() and self._is_agent(int(name))}
        return {Proc(p.pid, "", 0, 0, False, p.start_ticks) for p in found if p is not None}

    def _is_agent(self, pid: int) -> bool:
        argv = _argv_of(pid)
        return len(argv) > 2 and argv[1] == "-c" and "python" in argv[0] and self.tag in argv[2]

    def tell_to_go_on(self, attempts: list[Unfinished], text: str = "") -> None:
        for one in attempts:
            assert one.at_work is not None
            self.boxes.put(one.at_work.sandbox_id, "/app/go", text)

    async def check_results(self, group_id: int, ids: set[str], *, num_turns: int = 2) -> None:
        """The group's results are these rollouts', whole, each call recorded once."""
        results = self.store.results(group_id)
        assert {result.rollout_id for result in results} == ids, self.log()[-3000:]
        for result in results:
            assert (result.outcome, result.reward, result.num_turns) == ("ok", 1.0, num_turns), result.detail
            capture = await self.gateway.admin.capture(result.rollout_id)
            assert capture.session.sealed and [turn.status for turn in capture.turns] == ["ok"] * num_turns
            assert set(result.stages_s) >= {"queue", "create", "setup", "agent", "capture", "verify", "stop"}

    def check_nothing_left(self) -> None:
        assert self.agents() == set()
        assert self.boxes.ids() == set()
        assert sorted(path.name for path in self.registry.iterdir()) == []


def _argv_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []

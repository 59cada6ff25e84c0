"""Many agents for a long time through a gateway that is killed in between, and an audit of what it kept.

Owns the run: an engine process, a gateway process on one store and one port, agents of every dialect that hang up at
random and retry as their SDKs do, one kill -9, and the account of what each agent was told. Each session's prompts and
replies carry its own marker, and each reply says which sampling of its prompt it is, so that a lost, doubled or mixed
turn cannot hide. Called by `test_soak` (small) and `benchmarks.soak` (whole).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from capture_proxy.admin_client import AdminClient
from capture_proxy.dialects import all_dialects
from capture_proxy.graph import assign_roles
from capture_proxy.types import Capture, SessionPolicy, TurnStatus
from tests.proof.audit import audit
from tests.proof.clients import BROKEN_CONNECTION, Agent, BrokenReply, Said, agent
from tests.proof.upstream import Plan, Upstream

KEY = "soak-key"
BASH = ("bash", {"type": "object", "properties": {"command": {"type": "string"}}})
_MARKER = re.compile(r"marker-\d{4}")
_SAID = re.compile(r"(marker-\d{4}) turn (\d+) try (\d+)")


@dataclass(frozen=True, slots=True)
class Soak:
    """How large, and how rough. Rates are per call."""

    num_sessions: int = 200
    num_turns: int = 50
    num_parallel: int = 64
    hang_up_rate: float = 0.04
    engine_fault_rate: float = 0.03
    kill_after: float = 0.4  # of all turns; the gateway is then killed with signal 9 and started again
    seed: int = 1


@dataclass
class Report:
    """What happened. `problems` is empty when nothing was lost, doubled or mixed."""

    acknowledged: int = 0
    hang_ups: int = 0
    failures: int = 0  # calls that failed after the SDK's own retries, and were made again
    restarts: int = 0
    seconds: float = 0.0
    recorded: Counter[str] = field(default_factory=Counter)  # turns by status
    resampled: int = 0  # finished turns that no agent was told of
    problems: list[str] = field(default_factory=list)


async def soak(config: Soak, folder: Path, report: Report | None = None) -> Report:
    """Run it in `folder` (store, logs); a report that is given can be watched meanwhile.

    Raises RuntimeError when a process does not start or the gateway stays away.
    """
    report = report or Report()
    told: dict[str, list[str]] = {}
    async with _process(folder, "engine", [f"{__name__}", str(config.engine_fault_rate), str(config.seed)]) as engine:
        gateway = _Gateway(folder, engine["url"])
        try:
            await gateway.start()
            killer = asyncio.create_task(_kill(config, gateway, report))
            start = time.monotonic()
            try:
                await _all_agents(config, gateway, report, told)
            finally:
                killer.cancel()
                await asyncio.gather(killer, return_exceptions=True)
            report.seconds = time.monotonic() - start
            async with AdminClient(gateway.admin_url, KEY) as admin:
                for session_id, replies in told.items():
                    _audit(session_id, replies, await admin.capture(session_id), report)
                if (await admin.stats())["in_flight"]:
                    report.problems.append("calls are still in flight after the last agent left")
        finally:
            gateway.stop()
    return report


async def _all_agents(config: Soak, gateway: _Gateway, report: Report, told: dict[str, list[str]]) -> None:
    slots = asyncio.Semaphore(config.num_parallel)
    dialects = [dialect.name for dialect in all_dialects()]

    async def one(number: int) -> None:
        async with slots:
            marker = f"marker-{number:04d}"
            told[marker] = []
            rng = random.Random(f"{config.seed} {number}")
            session = await _patiently(gateway, marker)
            options = {"tools": [BASH], "retries": 2}
            async with agent(dialects[number % len(dialects)], gateway.agent_url, session, **options) as who:
                who.system = f"You are {marker}."
                who.say(f"{marker} begins")
                for turn in range(config.num_turns):
                    said = await _ask(config, who, rng, report)
                    told[marker].append(said.text)
                    report.acknowledged += 1
                    if said.calls != [("bash", {"command": f"{marker} {turn}"})]:
                        report.problems.append(f"{marker} was given the calls {said.calls} in turn {turn}")
                    who.echo(said, [f"{marker} result {turn}"])

    async with asyncio.TaskGroup() as group:
        for number in range(config.num_sessions):
            group.create_task(one(number))


async def _patiently(gateway: _Gateway, marker: str) -> str:
    """Mint a session, also while the gateway is down."""
    for _ in range(100):
        try:
            async with AdminClient(gateway.admin_url, KEY) as admin:
                return (await admin.mint(marker, SessionPolicy(), {"task": marker})).token
        except Exception as error:
            last = error
            await asyncio.sleep(0.2)
    raise RuntimeError(f"no session could be minted: {last}")


async def _ask(config: Soak, who: Agent, rng: random.Random, report: Report) -> Said:
    """One acknowledged reply, whatever it takes."""
    stream = rng.random() < 0.7
    for _ in range(60):
        patience = rng.uniform(0.001, 0.05) if rng.random() < config.hang_up_rate else 120
        try:
            async with asyncio.timeout(patience):
                return await who.ask(stream)
        except TimeoutError:
            report.hang_ups += 1
            stream = stream if rng.random() < 0.8 else not stream  # another body: to be sampled anew, never joined
        except (*who.error_types, *BROKEN_CONNECTION, BrokenReply):
            report.failures += 1
            await asyncio.sleep(rng.uniform(0.05, 0.3))
    raise RuntimeError("the gateway did not answer sixty times in a row")


async def _kill(config: Soak, gateway: _Gateway, report: Report) -> None:
    while report.acknowledged < config.kill_after * config.num_sessions * config.num_turns:
        await asyncio.sleep(0.02)
    await gateway.kill_and_restart()
    report.restarts += 1


def _audit(session_id: str, told: list[str], capture: Capture, report: Report) -> None:
    problems = report.problems
    report.recorded.update(turn.status.value for turn in capture.turns)
    try:
        audit(capture)
    except AssertionError as error:
        problems.append(f"{session_id}: {error}")
    finished = [turn for turn in capture.turns if turn.status is TurnStatus.OK]
    said = Counter(turn.message.get("content") or "" for turn in finished)
    for text in told:
        if said[text] != 1:
            problems.append(f"{session_id}: {text!r} was acknowledged once and is recorded {said[text]} times")
    for text, times in (said - Counter(told)).items():
        report.resampled += times
        if times > 1:
            problems.append(f"{session_id}: {text!r} is recorded {times} times")
    for turn in capture.turns:
        ids = [i for i in [*turn.prompt_ids_P, *turn.completion_ids_T] if i < 256]
        if foreign := set(_MARKER.findall(bytes(ids).decode())) - {session_id}:
            problems.append(f"{turn.turn_id}: holds {foreign}")
    _audit_chain(session_id, told, capture, problems)


def _audit_chain(session_id: str, told: list[str], capture: Capture, problems: list[str]) -> None:
    """What the agent was told is one lineage, every turn of it trained, in the order in which it was told."""
    graph = assign_roles(capture.turns)
    by_text = {t.message.get("content"): t for t in capture.turns if t.status is TurnStatus.OK}
    chain = [by_text[text].turn_id for text in told if text in by_text]
    if chain and graph.ancestry(chain[-1]) != chain:
        problems.append(f"{session_id}: the acknowledged turns are not one lineage")
    trained = {t.turn_id for t in capture.turns if t.trainable}
    if missing := set(chain) - trained:
        problems.append(f"{session_id}: acknowledged but not trained: {sorted(missing)}")
    if extra := trained - set(chain):
        problems.append(f"{session_id}: trained but never acknowledged: {sorted(extra)}")


# --- the processes


class _Gateway:
    """`python -m capture_proxy` on one store; a restart keeps its ports."""

    def __init__(self, folder: Path, engine_url: str) -> None:
        self._folder, self._engine_url = folder, engine_url
        self._process: subprocess.Popen[bytes] | None = None
        self.agent_url = self.admin_url = "http://127.0.0.1:0"

    async def start(self) -> None:
        ready = self._folder / "gateway.json"
        ready.unlink(missing_ok=True)
        argv = [sys.executable, "-m", "capture_proxy", "--engine-url", self._engine_url, "--ready-file", str(ready)]
        argv += ["--store", str(self._folder / "store.sqlite"), "--transport", "generate"]
        argv += ["--agent-bind", self.agent_url.removeprefix("http://")]
        argv += ["--admin-bind", self.admin_url.removeprefix("http://")]
        self._process = await asyncio.to_thread(_spawn, argv, self._folder / "gateway.log")
        data = await _ready(ready, self._process)
        self.agent_url, self.admin_url = data["agent_url"], data["admin_url"]

    async def kill_and_restart(self) -> None:
        self.stop()
        await self.start()

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextlib.asynccontextmanager
async def _process(folder: Path, name: str, arguments: list[str]) -> AsyncIterator[dict[str, str]]:
    """One of our own modules as a process; gives what it wrote into its ready file."""
    ready = folder / f"{name}.json"
    argv = [sys.executable, "-m", arguments[0], str(ready), *arguments[1:]]
    process = await asyncio.to_thread(_spawn, argv, folder / f"{name}.log")
    try:
        yield await _ready(ready, process)
    finally:
        process.kill()
        process.wait()


def _spawn(argv: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        env = {**os.environ, "CAPTURE_PROXY_ADMIN_KEY": KEY}
        return subprocess.Popen(argv, env=env, stdout=out, stderr=out, cwd=Path(__file__).parents[2])


async def _ready(path: Path, process: subprocess.Popen[bytes]) -> dict[str, str]:
    async with asyncio.timeout(60):
        while (data := _read(path)) is None:
            if process.poll() is not None:
                raise RuntimeError(f"a process ended with code {process.returncode}: see the logs in {path.parent}")
            await asyncio.sleep(0.02)
    return data


def _read(path: Path) -> dict[str, str] | None:
    return json.loads(path.read_text()) if path.exists() else None


def engine_script(fault_rate: float, seed: int) -> Upstream:
    """Replies that name the session, the turn and the sampling; some are errors, some break off."""

    def script(prompt: str, asked: int) -> Plan:
        marker = _MARKER.findall(prompt)[0]
        turn = len(_SAID.findall(prompt))
        rng = random.Random(f"{seed} {marker} {turn} {asked}")
        fate = rng.random() / fault_rate if fault_rate else 1.0
        plan = Plan(f"{marker} turn {turn} try {asked}", [("bash", {"command": f"{marker} {turn}"})])
        if fate < 0.5:
            return Plan(status=500)
        if fate < 1:
            return Plan(plan.text, plan.calls, cut=rng.randrange(1, 2000), torn=rng.random() < 0.5)
        return Plan(plan.text, plan.calls, num_pieces=3, delay_s=rng.choice([0, 0, 0.002, 0.01]))

    return Upstream(script)


def main() -> None:
    """The engine process: READY_FILE, then the arguments of `engine_script`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ready", type=Path)
    parser.add_argument("fault_rate", type=float)
    parser.add_argument("seed", type=int)
    args = parser.parse_args()
    config = uvicorn.Config(
        engine_script(args.fault_rate, args.seed).app(), port=0, log_level="critical", lifespan="off"
    )
    sock = config.bind_socket()
    part = args.ready.with_suffix(".part")
    part.write_text(json.dumps({"url": f"http://127.0.0.1:{sock.getsockname()[1]}"}))
    part.rename(args.ready)
    uvicorn.Server(config).run(sockets=[sock])


if __name__ == "__main__":
    main()

"""How long an agent takes from a ready sandbox to its first model call, beside the same agent started by hand: one run.

    python -m benchmarks.agent_start [--harness opencode,claude-code,...] [--runs 7]

Three ways, in turn, against one gateway with a scripted model in this process:

- ours: `run_rollout` in a local sandbox sealed by bubblewrap, from the moment its sandbox is there. What the clock then
  sees is minting the session, writing the agent's files, starting it inside, and the agent itself;
- by hand: the same command, environment and files in a fresh home; the clock starts when the files are there and the
  token is minted, right before the process;
- bwrap: the same by hand under a plain `bwrap` that shows this machine's root, to tell what isolation itself costs.

Every way ends the clock at the first POST that reaches the gateway. What an agent keeps in its temp folder from one
start to the next (Node's compile cache, a tenth of a second of CPU for some) is there for the two by hand, which share
one for the whole run; a sandbox has a temp folder of its own, and pays. Where others use the machine, give it a core of
its own for a minute: `taskset -c 0 chrt -r 1 python -m benchmarks.agent_start`. The difference is the median over the
rounds of ours less by hand in the same round, so that a busy moment hits both. It has a standard error, because the
same start of the same agent does not always need the same CPU: opencode's 4 s vary by a tenth, so that seven rounds
tell its difference to no better than 0.15 s. Take more rounds (`--runs 25`) where the two are close.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from capture_proxy.admin import admin_app
from capture_proxy.admin_client import AdminClient
from capture_proxy.engines.scripted import ScriptedEngine
from capture_proxy.gateway import Gateway, agent_app
from capture_proxy.http_server import Server, listening
from capture_proxy.store import Store
from capture_proxy.types import SessionPolicy
from harness_trainer.cache import cache_dir
from harness_trainer.harnesses import base, load_harness
from harness_trainer.harnesses.base import Harness
from harness_trainer.harnesses.install import ensure_installed
from harness_trainer.qualify.director import Director
from harness_trainer.qualify.scenarios import Scenario, task_of
from harness_trainer.qualify.wire import Wire
from harness_trainer.rollouts.boxes import Boxes
from harness_trainer.rollouts.budget import Caps
from harness_trainer.rollouts.config import RolloutConfig, RunnerSpec
from harness_trainer.rollouts.rollout import Means, run_rollout
from harness_trainer.rollouts.types import Job
from sandboxes import open_backend
from sandboxes.base import Access, Endpoint
from sandboxes.local import LocalConfig
from sandboxes.pool import Bounds, Pool

GOAL_S = 0.3
AGENTS = ("opencode", "claude-code", "codex", "gemini-cli", "pi", "mini-swe-agent")
OURS, BY_HAND, BWRAP = "ours", "by hand", "bwrap"
WAYS = (OURS, BY_HAND, BWRAP)
_KEY = "benchmark"
_MODEL, _CONTEXT = "scripted", 1_000_000
_LIMIT_S = 120.0  # for an agent to make its first call
_AT_ONCE = Scenario("start", "the model has its last word at once", ())
_PLAIN_BWRAP = ("bwrap", "--dev-bind", "/", "/", "--unshare-pid", "--proc", "/proc", "--die-with-parent", "--")


@dataclass(frozen=True, slots=True)
class Place:
    """The gateway that all are started against. `wire` knows when the first call came."""

    wire: Wire
    agent_url: str
    admin_url: str
    admin: AdminClient
    folder: Path  # of this run
    run_id: str = field(default_factory=lambda: f"bench-{secrets.token_hex(4)}")

    def forget(self) -> None:
        self.wire.first_call_at = None

    def seconds_since(self, began: float | None, who: str, said: str) -> float:
        """Raises SystemExit when there was no call."""
        if began is None or self.wire.first_call_at is None:
            raise SystemExit(f"{who} made no model call: {said}")
        return self.wire.first_call_at - began


@contextlib.asynccontextmanager
async def place(folder: Path) -> AsyncIterator[Place]:
    director = Director(_AT_ONCE, lambda: None)
    gateway = Gateway(ScriptedEngine(director), Store.open(folder / "store.sqlite"))
    wire = Wire(agent_app(gateway))
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(gateway.running())
        agent_url = await stack.enter_async_context(listening(Server(wire)))
        admin_url = await stack.enter_async_context(listening(Server(admin_app(gateway, _KEY))))
        admin = await stack.enter_async_context(AdminClient(admin_url, _KEY))
        yield Place(wire, agent_url, admin_url, admin, folder)


# --- ours ---------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def means(at: Place, harness: Harness, programs: Path) -> AsyncIterator[Means]:
    """What a runner has."""
    config = LocalConfig(isolation="bubblewrap")
    access = Access(gateway=Endpoint(url=at.agent_url))
    spec = RunnerSpec(
        config=RolloutConfig(timeout_s=_LIMIT_S, max_turns=3, max_tokens=4096, verify="same", warm_total=0),
        sandbox=config,
        tasks="-",
        harness="-",
        harness_bin=programs,
        store=at.folder / "store.sqlite",
        artifacts=at.folder / "artifacts",
        registry=at.folder / "owned",
        run_id=at.run_id,
        model=_MODEL,
        context=_CONTEXT,
        access=access,
        admin_url=at.admin_url,
        max_open_groups=1,
        num_groups=1,
    )
    backend = open_backend(config, run_id=spec.run_id, registry=spec.registry, access=access)
    async with backend, Pool(backend, Bounds(0, 0, 1)) as pool:
        boxes = Boxes(spec, harness, access)
        yield Means(boxes=boxes, backend=backend, pool=pool, caps=Caps(spec.config), admin=at.admin)


async def ours(at: Place, harness: Harness, means: Means, set_up: list[float]) -> float:
    """`set_up` gets what of it passed before the agent's command was started."""
    boxed: list[float] = []
    task = task_of(_AT_ONCE, at.folder, _LIMIT_S)
    job = Job(f"{harness.name}-{secrets.token_hex(4)}", 0, 0, task, lambda: boxed.append(time.monotonic()))
    result = await run_rollout(job, means)
    set_up.append(result.stages_s.get("setup", 0.0))
    return at.seconds_since(boxed[0] if boxed else None, harness.name, result.detail)


# --- by hand ------------------------------------------------------------------------------------------------------


async def by_hand(at: Place, harness: Harness, programs: Path, prefix: Sequence[str] = ()) -> float:
    """A process of this machine, ended once its call is there."""
    session = await at.admin.mint(f"{harness.name}-{secrets.token_hex(4)}", SessionPolicy(max_tokens=4096), {})
    with tempfile.TemporaryDirectory(prefix="bench-home-", ignore_cleanup_errors=True) as text:
        root = Path(text)
        values: dict[str, str | int] = {
            "instruction": task_of(_AT_ONCE, at.folder, _LIMIT_S).instruction,
            "base_url": at.agent_url,
            "token": session.token,
            "model": _MODEL,
            "context": _CONTEXT,
            "max_tokens": 4096,
            "max_turns": 3,
            "app": str(root / "app"),
            "home": str(root / "home"),
            "bin": str(programs),
            "python": "python3",
            "agents": str(Path(base.__file__).parent / "agents"),
        }
        for name in ("app", "home"):
            (root / name).mkdir()
        for path, content in base.render_files(harness, values).items():
            target = root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content, encoding="utf-8")
        return await _started(at, harness, values, programs, prefix)


async def _started(
    at: Place, harness: Harness, values: dict[str, str | int], programs: Path, prefix: Sequence[str]
) -> float:
    argv = [*prefix, *(str(base.render(part, values)) for part in harness.argv)]
    env = {
        "HOME": str(values["home"]),
        "PATH": f"{programs}:{os.defpath}",
        "TMPDIR": str(at.folder),  # gone with the run: opencode leaves a library of 5 MB in it at each start
        **base.render_env(harness, values),
    }
    stdin = b"" if harness.stdin is None else str(base.render(harness.stdin, values)).encode()
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
        given.write(stdin)
        given.seek(0)
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *argv, cwd=str(values["app"]), env=env, stdin=given, stdout=said, stderr=said, start_new_session=True
        )
        try:
            while at.wire.first_call_at is None and process.returncode is None:
                if time.monotonic() - began > _LIMIT_S:
                    break
                await asyncio.sleep(0.02)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        said.seek(0)
        return at.seconds_since(began, f"{harness.name} by hand", said.read().decode(errors="replace")[-400:])


# --- the report ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Measured:
    """Seconds of one agent, one entry per round, by way."""

    taken: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    set_up: list[float] = field(default_factory=list)

    def median(self, way: str) -> float:
        return statistics.median(self.taken[way])

    @property
    def differences(self) -> list[float]:
        return [a - b for a, b in zip(self.taken[OURS], self.taken[BY_HAND], strict=True)]

    @property
    def error(self) -> float:
        """Standard error of the median difference, as of normal noise: 1.25 times the mean's; NaN for one round."""
        found = self.differences
        return 1.2533 * statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else float("nan")


async def measure(at: Place, name: str, runs: int) -> Measured:
    harness = load_harness(name)
    programs = await asyncio.to_thread(ensure_installed, harness, cache_dir(), print)
    measured = Measured()
    async with means(at, harness, programs) as ours_needs:
        for round_ in range(runs + 1):
            set_up: list[float] = []
            for way in (*WAYS[round_ % 3 :], *WAYS[: round_ % 3]):
                at.forget()
                if way == OURS:
                    seconds = await ours(at, harness, ours_needs, set_up)
                else:
                    seconds = await by_hand(at, harness, programs, _PLAIN_BWRAP if way == BWRAP else ())
                if round_:  # the first is for warming up
                    measured.taken[way].append(seconds)
            measured.set_up += set_up if round_ else []
    return measured


def show(name: str, measured: Measured) -> bool:
    difference = statistics.median(measured.differences)
    met = difference <= GOAL_S
    columns = (
        *(measured.median(way) for way in WAYS),
        statistics.median(measured.set_up),
        difference,
        measured.error,
        GOAL_S,
    )
    print(f"{name:<16} {' '.join(f'{seconds:>10.3f}' for seconds in columns)}   {'yes' if met else 'NO'}", flush=True)
    return met


async def run(names: Sequence[str], runs: int) -> bool:
    print(f"seconds to the first model call, medians of {runs}; `set-up` is the part of ours before the agent starts\n")
    print(f"{'agent':<16} {' '.join(f'{title:>10}' for title in (*WAYS, 'set-up', 'difference', '+-', 'goal'))}   met")
    met = True
    for name in names:
        with tempfile.TemporaryDirectory(prefix="bench-agent-start-") as text:
            async with place(Path(text)) as at:
                met &= show(name, await measure(at, name, runs))
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harness", default=",".join(AGENTS), help=f"default: {','.join(AGENTS)}")
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    names = [name.strip() for name in options.harness.split(",") if name.strip()]
    return 0 if asyncio.run(run(names, options.runs)) else 1


if __name__ == "__main__":
    sys.exit(main())

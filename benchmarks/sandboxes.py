"""What a Docker sandbox costs beside the `docker` command line, and what 64 rollouts leave behind: one run, one engine.

    python -m benchmarks.sandboxes [--image python:3.12-slim] [--runs 15] [--rollouts 64] [--slots 16] [--wait 20]

Times are medians; the ways of a comparison alternate, so that a busy moment hits all of them. "docker run" is
`docker run -d` of the same image with the same limits: a container that has started, nothing removed. The rollouts run
a trivial agent (one model call, then it sleeps) through the real gateway, pool and verifier; what the engine and the
temp folder hold is counted before and after. The controller's processor time is that of this process (sandboxes, pool
and rollouts; the gateway is another one) over the seconds in which agents only wait.

A cold start finds a spare relay (see `sandboxes.docker_spares`), as it does in a run whose sandboxes do not all start
at once: before each round, outside all times, the benchmark waits until the one that was taken is replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.capture import program
from capture_proxy.admin_client import AdminClient
from harness_trainer.harnesses.base import Harness
from harness_trainer.rollouts.boxes import Boxes
from harness_trainer.rollouts.budget import Caps
from harness_trainer.rollouts.config import RolloutConfig, RunnerSpec
from harness_trainer.rollouts.rollout import Means, run_rollout
from harness_trainer.rollouts.types import Job, Outcome, RolloutResult
from harness_trainer.tasks import Task
from sandboxes import open_backend
from sandboxes.base import Access, Backend, BoxSpec, Command, Endpoint
from sandboxes.docker import DockerBackend, DockerConfig
from sandboxes.pool import Bounds, Pool

GOALS = {"warm": 0.1, "start": 1.3, "exec": 1.3, "cpu": 0.15}
_KEY = "benchmark"
_SETTLED_S = 4.0  # from a sandbox at hand to an agent that has made its call and sleeps
_RUN_ID = f"bench-{secrets.token_hex(4)}"
IMAGES = ("python:3.12-slim", "ht-base:bookworm")


# --- the docker command line --------------------------------------------------------------------------------------


def docker(*arguments: str) -> str:
    """Its output. Raises SystemExit with what it said."""
    done = subprocess.run(["docker", *arguments], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"docker {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


@contextlib.contextmanager
def cli_container(image: str) -> Iterator[tuple[str, float]]:
    """A container that the command line started, and the seconds that took."""
    limits = ["--memory", "4096m", "--pids-limit", "512"]
    began = time.perf_counter()
    name = docker("run", "-d", "--init", *limits, image, "sleep", "infinity")
    taken = time.perf_counter() - began
    try:
        yield name, taken
    finally:
        docker("rm", "-f", "-v", name)


# --- what is there ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the engine and the temp folder hold. `ours` = of this run, by label; `all_*` = whoever's."""

    ours: int  # containers, networks and volumes
    containers: int
    networks: int
    volumes: int
    images: int
    temp: int  # entries of this process's temp folder

    @classmethod
    def now(cls) -> Holdings:
        label = f"label=harness-trainer.run={_RUN_ID}"
        ours = [docker("ps", "-aq", "--filter", label)]
        ours += [docker(kind, "ls", "-q", "--filter", label) for kind in ("network", "volume")]
        lists = [docker("ps", "-aq"), docker("network", "ls", "-q"), docker("volume", "ls", "-q")]
        counts = [len(text.split()) for text in (*lists, docker("images", "-aq"))]
        return cls(sum(len(text.split()) for text in ours), *counts, len(list(Path(tempfile.gettempdir()).iterdir())))


# --- comparisons --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Measured:
    """Seconds of each way, one entry per round."""

    taken: dict[str, list[float]] = field(default_factory=dict)

    def add(self, way: str, seconds: float) -> None:
        self.taken.setdefault(way, []).append(seconds)

    def median(self, way: str) -> float:
        return statistics.median(self.taken[way])


async def timed(work: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def compare_starts(backend: Backend, spec: BoxSpec, image: str, runs: int) -> Measured:
    """Cold `docker run`, cold start of ours, and a hand-out from a warm pool, in turn."""
    assert isinstance(backend, DockerBackend)
    measured = Measured()
    async with Pool(backend, Bounds(per_spec=1, total=1, starting=1)) as pool:
        await pool.prepare(spec)
        for round_ in range(runs + 1):
            await backend.network.spares.settled()
            seconds = await asyncio.to_thread(_one_cli_start, image)
            sandbox = backend.sandbox(spec)
            cold = await timed(sandbox.__aenter__)
            await sandbox.stop()
            pool.plan([(spec, 1)])
            while pool.num_ready < 1:
                await asyncio.sleep(0.05)
            async with pool.acquire(spec) as lease:
                assert lease.warm
            if round_:  # the first is for warming up
                measured.add("docker run", seconds)
                measured.add("cold start", cold)
                measured.add("from a warm pool", lease.waited_s)
    return measured


def _one_cli_start(image: str) -> float:
    with cli_container(image) as (_, taken):
        return taken


async def compare_runs(backend: Backend, spec: BoxSpec, image: str, runs: int) -> Measured:
    """`docker exec C true` and `run(["true"])`, in turn."""
    measured = Measured()
    async with backend.sandbox(spec) as sandbox:
        with cli_container(image) as (name, _):
            for round_ in range(runs + 1):
                cli = await timed(lambda: asyncio.to_thread(docker, "exec", name, "true"))
                ours = await timed(lambda: sandbox.run(Command(["true"])))
                if round_:
                    measured.add("docker exec", cli)
                    measured.add("run", ours)
    return measured


# --- rollouts -----------------------------------------------------------------------------------------------------

_AGENT = {
    "name": "trivial",
    "dialect": "openai_chat",
    "stdin": "${instruction}",
    "env": {"OPENAI_API_KEY": "${token}", "OPENAI_BASE_URL": "${base_url}/v1", "OPENAI_MODEL": "${model}"},
    "output": {"type": "text"},
}
_LOGS = "${SANDBOX_ROOT:-}/logs"
_VERIFY = f'grep -q . "{_LOGS}/agent/final_message.txt" && echo 1 > "{_LOGS}/verifier/reward.txt"'


@dataclass(slots=True)
class Waiting:
    """The controller's processor time in seconds in which it had nothing to do: every agent slept from end to end."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    async def watch(self, idle: Callable[[float], bool]) -> None:
        """Until cancelled: adds each second that all agents sleep through; `idle` says so of the seconds to come."""
        while True:
            quiet, cpu, wall = idle(1.0), time.process_time(), time.monotonic()
            await asyncio.sleep(1.0)
            if quiet and idle(0.0):
                self.cpu_s += time.process_time() - cpu
                self.wall_s += time.monotonic() - wall


async def run_rollouts(
    config: DockerConfig, folder: Path, *, rollouts: int, slots: int, wait_s: float
) -> tuple[list[RolloutResult], Waiting, float]:
    """The rollouts' results, the waiting, and the wall seconds of all."""
    agent = f"${{python}} -I ${{agents}}/pyagent.py --max-turns 1 --no-tools; sleep {wait_s:g}"
    harness = Harness.model_validate(_AGENT | {"argv": ["sh", "-c", agent]})
    task = Task("trivial", folder, "Say something.", verify_script=_VERIFY)
    settings = RolloutConfig(max_concurrent=slots, max_creating=4, max_turns=2, max_tokens=64, warm_per_task=4)
    waiting, places, running = Waiting(), asyncio.Semaphore(slots), 0
    async with _means(config, folder, harness, settings) as means:
        results: list[RolloutResult] = []
        boxed: dict[int, float] = {}  # when each running rollout got its sandbox

        def idle(seconds: float) -> bool:
            """Whether all that run have been asleep for a while and will be for so many seconds more."""
            now = time.monotonic()
            asleep = all(now - at > _SETTLED_S and now + seconds - at < wait_s for at in boxed.values())
            return asleep and 0 < running == len(boxed) and means.pool.num_starting == 0

        async def one(number: int) -> None:
            nonlocal running
            async with places:
                job = Job(f"r{number:03d}", 0, 0, task, lambda: boxed.update({number: time.monotonic()}))
                running += 1
                results.append(await run_rollout(job, means))
                running -= 1
                boxed.pop(number, None)
            means.pool.plan([(spec, max(0, rollouts - len(results) - running))])

        spec = means.boxes.spec_of(task)
        began = time.monotonic()
        watch = asyncio.create_task(waiting.watch(idle))
        await asyncio.gather(*(one(number) for number in range(rollouts)))
        watch.cancel()
        return results, waiting, time.monotonic() - began


@contextlib.asynccontextmanager
async def _means(config: DockerConfig, folder: Path, harness: Harness, settings: RolloutConfig) -> AsyncIterator[Means]:
    """A gateway over a scripted engine, each a process of its own; a backend, a pool and what else a runner has."""
    ready, store = folder / "gateway.json", folder / "store.sqlite"
    async with contextlib.AsyncExitStack() as stack:
        engine = stack.enter_context(program("benchmarks.capture_upstream"))
        argv = ["capture_proxy", "--engine-url", engine, "--transport", "chat", "--store", str(store)]
        stack.enter_context(program(*argv, "--ready-file", str(ready)))
        urls = json.loads(ready.read_text())
        admin = await stack.enter_async_context(AdminClient(urls["admin_url"], _KEY))
        access = Access(gateway=Endpoint(url=urls["agent_url"]))
        spec = RunnerSpec(
            config=settings,
            sandbox=config,
            tasks="-",
            harness="-",
            harness_bin=Path("/usr/bin"),
            store=store,
            artifacts=folder / "artifacts",
            registry=folder / "owned",
            run_id=_RUN_ID,
            model="bench",
            context=8192,
            access=access,
            admin_url=urls["admin_url"],
            max_open_groups=1,
            num_groups=1,
        )
        backend = open_backend(config, run_id=_RUN_ID, registry=spec.registry, access=access)
        await stack.enter_async_context(backend)
        bounds = Bounds(settings.warm_per_task, settings.warm_total, settings.max_creating or 4)
        pool = await stack.enter_async_context(Pool(backend, bounds))
        boxes = Boxes(spec, harness, access)
        yield Means(boxes=boxes, backend=backend, pool=pool, caps=Caps(settings), admin=admin)


# --- the report ---------------------------------------------------------------------------------------------------


def row(what: str, value: str, ratio: float, goal: float) -> bool:
    met = ratio <= goal
    print(f"{what:<46} {value:>22}   {ratio:6.3f}   {goal:5.2f}   {'yes' if met else 'NO'}")
    return met


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


async def measure(options: argparse.Namespace, folder: Path) -> bool:
    config = DockerConfig(image=options.image, relay_base=options.image)
    spec = BoxSpec("bench")
    registry = folder / "owned"
    async with open_backend(config, run_id=_RUN_ID, registry=registry, access=Access()) as backend:
        starts = await compare_starts(backend, spec, options.image, options.runs)
        runs = await compare_runs(backend, spec, options.image, options.runs)
    async with _means(config, folder, Harness.model_validate(_AGENT | {"argv": ["true"]}), RolloutConfig()) as means:
        sealed = await compare_starts(means.backend, spec, options.image, options.runs)
    before = Holdings.now()
    results, waiting, wall_s = await run_rollouts(
        config, folder, rollouts=options.rollouts, slots=options.slots, wait_s=options.wait
    )
    after = Holdings.now()

    print(f"\nimage {options.image}, medians of {options.runs}; ratio and goal: ours over the command line's\n")
    print(f"{'what':<46} {'ours / docker':>22}   {'ratio':>6}   {'goal':>5}   met")
    met = True
    for name, measured in (("no network", starts), ("proxy-only", sealed)):
        cli = measured.median("docker run")
        for way, goal in (("cold start", GOALS["start"]), ("from a warm pool", GOALS["warm"])):
            ours = measured.median(way)
            met &= row(f"{way}, {name} / docker run", f"{ms(ours)} / {ms(cli)}", ours / cli, goal)
    ours, cli = runs.median("run"), runs.median("docker exec")
    met &= row("run of `true` / docker exec", f"{ms(ours)} / {ms(cli)}", ours / cli, GOALS["exec"])
    busy = waiting.cpu_s / waiting.wall_s if waiting.wall_s else float("nan")
    share = f"{waiting.cpu_s:.2f} s / {waiting.wall_s:.0f} s"
    met &= row("controller's CPU while agents wait / one core", share, busy, GOALS["cpu"])

    print(f"\n{options.rollouts} rollouts through {options.slots} slots in {wall_s:.0f} s")
    for stage in dict.fromkeys(name for result in results for name in result.stages_s):
        spent = statistics.median(r.stages_s[stage] for r in results if stage in r.stages_s)
        print(f"  {stage:<16} {spent:7.2f} s (median)")
    bad = [result for result in results if result.outcome is not Outcome.OK]
    for result in bad[:3]:
        print(f"  {result.rollout_id}: {result.outcome} {result.detail}")
    print(f"\n{'held':<12} {'before':>8} {'after':>8}")
    for name in Holdings.__slots__:
        print(f"{name:<12} {getattr(before, name):>8} {getattr(after, name):>8}")
    if before != after and not after.ours and before.temp == after.temp:
        print("nothing of this run is left; the other counts moved, so others use this engine: run it alone")
    return met and not bad and before == after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", help=f"default: the first of {', '.join(IMAGES)} that is there")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--wait", type=float, default=20.0, help="seconds an agent sleeps")
    options = parser.parse_args()
    here = docker("images", "--format", "{{.Repository}}:{{.Tag}}").split()
    options.image = options.image or next((name for name in IMAGES if name in here), IMAGES[0])
    with tempfile.TemporaryDirectory(prefix="bench-sandboxes-") as text:
        folder = Path(text)
        (folder / "tmp").mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")  # so that what is left in it is ours
        return 0 if asyncio.run(measure(options, folder)) else 1


if __name__ == "__main__":
    sys.exit(main())

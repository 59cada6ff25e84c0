"""What one runner process takes that holds many remote sandboxes whose agents wait.

The real runner (`python -m harness_trainer.rollouts`), the real gateway for its sessions, E2B's own SDK; the sandboxes
are `waiting_boxes`. Nothing is sampled: an agent's calls go to the gateway and never through the runner. Owns the run's
settings and the looks at the process. Called by `scale`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.process_use import Use, table
from benchmarks.scale_gateway import KEY, Running, gateway, settled, with_tokenizer
from benchmarks.template_engine import NoTokenizer, npm_tokenizer
from harness_trainer.rollouts.config import RolloutConfig, RunnerSpec
from harness_trainer.rollouts.store import RolloutStore
from sandboxes import SandboxConfig
from sandboxes.base import Access, Endpoint
from sandboxes.docker import DockerConfig
from sandboxes.e2b import E2BConfig
from sandboxes.local import LocalConfig
from tests.sandboxes.e2b_standin import KEY as E2B_KEY

GOAL_CPU = 0.5  # of one core, with 500 sandboxes
GOAL_GATEWAY_MB, GOAL_RUNNER_MB = 150.0, 250.0
_GROUP = 10
_AGENT = {
    "name": "waiting",
    "dialect": "openai_chat",
    "env": {"OPENAI_API_KEY": "${token}", "OPENAI_BASE_URL": "${base_url}/v1"},
    "output": {"type": "text"},
}
# Sandboxes elsewhere need an address that is not this machine's loopback; nothing calls it.
_PUBLIC = "http://203.0.113.7:8080"


@dataclass(frozen=True, slots=True)
class Carried:
    """`start_s`: from the first sandbox to the last; `start_cpu_s`: the runner's processor time for one of them."""

    num_sandboxes: int
    use: Use
    cpu: float  # share of a core while all agents waited
    seconds: float  # so long
    requests_s: float  # to E2B's API and into the sandboxes
    start_s: float
    start_cpu_s: float


@contextlib.contextmanager
def runner(spec: RunnerSpec, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process; its log is in the folder. Ended in order at the end."""
    path = folder / "runner.json"
    path.write_text(spec.model_dump_json())
    environment = {**os.environ, "CAPTURE_PROXY_ADMIN_KEY": KEY, "E2B_API_KEY": E2B_KEY}
    argv = [sys.executable, "-m", "harness_trainer.rollouts", "--spec", str(path)]
    with (folder / "runner.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(120)


def spec_of(
    folder: Path,
    admin_url: str,
    sandbox: SandboxConfig,
    num: int = _GROUP,
    *,
    timeout_s: float,
    argv: Sequence[str] = ("sleep", "infinity"),
) -> RunnerSpec:
    """`num` rollouts at once of one trivial task, in groups of ten. `timeout_s`, `argv`: of their agents."""
    (folder / "agent.yaml").write_text(json.dumps(_AGENT | {"argv": argv}))
    (folder / "tasks.jsonl").write_text(json.dumps({"name": "wait", "instruction": "Wait.", "verify": "true"}) + "\n")
    settings: dict[str, Any] = {"group_size": _GROUP, "max_concurrent": num, "max_creating": 16, "warm_total": 0}
    return RunnerSpec(
        config=RolloutConfig(**settings, timeout_s=timeout_s, start_timeout_s=600),
        sandbox=sandbox,
        tasks=str(folder / "tasks.jsonl"),
        harness=str(folder / "agent.yaml"),
        harness_bin=Path("/usr/bin"),
        store=folder / "store.sqlite",
        artifacts=folder / "artifacts",
        registry=folder / "owned",
        run_id="scale",
        model="bench",
        context=8192,
        access=Access(gateway=Endpoint(url="http://127.0.0.1:9", public_url=_PUBLIC)),
        admin_url=admin_url,
        max_open_groups=max(1, num // _GROUP),
        num_groups=1_000_000,
    )


def carried(folder: Path, num: int, *, seconds: float = 60.0, settle_s: float = 10.0) -> Carried:
    """Measured with a gateway, a runner and boxes of its own. `settle_s`: after the last agent was started."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        boxes = stack.enter_context(_boxes())
        running = stack.enter_context(gateway(folder, "http://127.0.0.1:9", "--hold"))
        store = RolloutStore(folder / "store.sqlite")
        stack.callback(store.close)
        store.publish(1)
        sandbox = E2BConfig(api_url=boxes.url, sandbox_url=boxes.url, max_creating=16)
        spec = spec_of(folder, running.admin_url, sandbox, num, timeout_s=4 * seconds + 5 * num + 600)
        process = stack.enter_context(runner(spec, folder))
        began = _until(lambda: boxes.held()["running"] > 0, process, folder, 120)
        before = Use.of(process.pid)
        ended = _until(lambda: _at_work(store) == num, process, folder, 60 + 2.0 * num)
        after = Use.of(process.pid)
        time.sleep(settle_s)
        first, asked = Use.of(process.pid), boxes.held()["requests"]
        time.sleep(seconds)
        last, held = Use.of(process.pid), boxes.held()
        if held["running"] != num or _at_work(store) != num:
            raise RuntimeError(f"{held['running']} of {num} sandboxes are left: see {_tail(folder)}")
        return Carried(
            num_sandboxes=num,
            use=last,
            cpu=last.share_since(first),
            seconds=last.at - first.at,
            requests_s=(held["requests"] - asked) / (last.at - first.at),
            start_s=ended - began,
            start_cpu_s=(after.cpu_s - before.cpu_s) / num,
        )


def _at_work(store: RolloutStore) -> int:
    """Agents that were started."""
    return sum(one.at_work is not None and one.at_work.job_id is not None for one in store.unfinished_rollouts())


@dataclass(frozen=True, slots=True)
class Turnover:
    """Rollouts that begin and end all the time. `cpu_s`: of the runner for a whole one, start to result."""

    num_rollouts: int
    rollouts_s: float  # in a second
    cpu_s: float
    cpu: float  # share of a core


def turnover(folder: Path, num: int, *, agent_s: float, seconds: float) -> Turnover:
    """`num` at a time, of agents that make no call and end after `agent_s`; their boxes do all else at once."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        boxes = stack.enter_context(_boxes(agent_s))
        running = stack.enter_context(gateway(folder, "http://127.0.0.1:9", "--hold"))
        store = stack.enter_context(contextlib.closing(RolloutStore(folder / "store.sqlite")))
        store.publish(1)
        sandbox = E2BConfig(api_url=boxes.url, sandbox_url=boxes.url, max_creating=16)
        spec = spec_of(folder, running.admin_url, sandbox, num, timeout_s=60)
        spec.max_dropped_in_a_row = 1_000_000  # nothing was sampled, so nothing can be trained
        spec.config.infra_window, spec.config.infra_retries, spec.config.max_refills = 1_000_000, 0, 0
        process = stack.enter_context(runner(spec, folder))
        _until(lambda: len(store.rollouts()) >= num, process, folder, 120 + num)
        first, before = Use.of(process.pid), len(store.rollouts())
        time.sleep(seconds)
        last, ended = Use.of(process.pid), len(store.rollouts()) - before
        if process.poll() is not None or not ended:
            raise RuntimeError(f"no rollout ended in {seconds:g} s: {_tail(folder)}")
        cpu = last.share_since(first)
        return Turnover(ended, ended / (last.at - first.at), (last.cpu_s - first.cpu_s) / ended, cpu)


class _Boxes:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.url = self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def held(self) -> dict[str, int]:
        """How many sandboxes run, and requests so far."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        found: dict[str, int] = json.loads(self._line())
        return found


@contextlib.contextmanager
def _boxes(agent_s: float = math.inf) -> Iterator[_Boxes]:
    argv = [sys.executable, "-m", "benchmarks.waiting_boxes", str(agent_s)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield _Boxes(process)
        assert process.stdin is not None
        process.stdin.close()  # it ends in order, and leaves no folder
        process.wait(60)
    finally:
        process.kill()
        process.wait(10)


def _until(condition: Any, process: subprocess.Popen[bytes], folder: Path, limit_s: float) -> float:
    """When it became true, monotonic seconds. Raises RuntimeError when the runner ends or the time is over."""
    end = time.monotonic() + limit_s
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the runner did not get there (exit code {process.poll()}): {_tail(folder)}")
        time.sleep(0.25)
    return time.monotonic()


def _tail(folder: Path) -> str:
    return (folder / "runner.log").read_text()[-2000:]


def report(levels: Sequence[Carried], turning: Turnover) -> str:
    head = ["sandboxes whose agents wait", "runner's CPU, of a core", "RSS MB", "open sockets", "requests/s"]
    head += ["all started in s", "CPU ms to start one"]
    rows = [
        [
            f"{one.num_sandboxes}",
            f"{100 * one.cpu:.1f} %",
            f"{one.use.rss:.0f}",
            f"{one.use.num_sockets}",
            f"{one.requests_s:.1f}",
            f"{one.start_s:.0f}",
            f"{1000 * one.start_cpu_s:.0f}",
        ]
        for one in levels
    ]
    met = [f"{'met' if one.cpu < GOAL_CPU else 'NOT met'}" for one in levels if one.num_sandboxes == 500]
    goal = f"\n\n500 sandboxes under {100 * GOAL_CPU:.0f} % of a core: {met[0]}" if met else ""
    whole = (
        f"\n\nrollouts that begin and end: {turning.rollouts_s:.1f} a second at {100 * turning.cpu:.0f} % of a core, "
        f"{1000 * turning.cpu_s:.0f} ms of CPU each, all stages ({turning.num_rollouts} seen, of agents without a call)"
    )
    return table(head, rows) + goal + whole


def idle(folder: Path, *, quiet_s: float = 2.0, docker: bool = True) -> list[tuple[str, Use, float]]:
    """Name, figures and goal of a gateway and of runners that have nothing to do yet, as `train` starts them.

    Looked at when they have done next to nothing for `quiet_s`.
    """
    (folder / "tokenizer").mkdir(parents=True)
    found = []
    with gateway(folder, "http://127.0.0.1:9", "--hold") as running:
        found.append(("gateway", settled(running.pid, quiet_s), GOAL_GATEWAY_MB))
        with contextlib.suppress(NoTokenizer):
            with_it = with_tokenizer(folder / "tokenizer", npm_tokenizer("qwen3"))
            found.append(("gateway that has read Qwen3's tokenizer", with_it, GOAL_GATEWAY_MB))
        found.append(("runner after its first rollouts", _after_rollouts(folder / "worked", running), GOAL_RUNNER_MB))
        with _boxes() as boxes:
            kinds: list[SandboxConfig] = [LocalConfig(), E2BConfig(api_url=boxes.url, sandbox_url=boxes.url)]
            for sandbox in [*kinds, *([DockerConfig()] if docker else [])]:
                own = folder / sandbox.type
                own.mkdir()
                spec = spec_of(own, running.admin_url, sandbox, timeout_s=600)
                with runner(spec, own) as process:  # no policy is published: it waits for the learner
                    _until((own / "store.sqlite").exists, process, own, 60)  # its imports are behind it
                    found.append((f"runner, {sandbox.type} sandboxes", settled(process.pid, quiet_s), GOAL_RUNNER_MB))
                    if process.poll() is not None:
                        raise RuntimeError(f"the runner ended: {_tail(own)}")
    return found


def _after_rollouts(folder: Path, running: Running) -> Use:
    """Of agents that make no call: their rollouts fail, and pass through all that a rollout passes through before."""
    folder.mkdir()
    store = RolloutStore(folder / "store.sqlite")
    spec = spec_of(folder, running.admin_url, LocalConfig(root=folder / "boxes"), timeout_s=60, argv=["true"])
    spec.config.infra_window, spec.config.retry_backoff_s = 1_000_000, 60.0
    with contextlib.closing(store), runner(spec, folder) as process:
        store.publish(1)
        _until(lambda: any(result.stages_s.get("verify") for result in store.rollouts()), process, folder, 120)
        return Use.of(process.pid)


def report_idle(found: Sequence[tuple[str, Use, float]]) -> str:
    head = ["idle process", "RSS MB", "PSS MB", "USS MB", "open files", "goal"]
    rows = []
    for name, use, goal in found:
        met = "met" if use.rss < goal else "NOT met"
        sizes = [f"{value:.0f}" for value in (use.rss, use.pss, use.uss)]
        rows.append([name, *sizes, f"{use.num_files}", f"{goal:.0f} MB: {met}"])
    return table(head, rows)

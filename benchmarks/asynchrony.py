"""Optimizer steps per hour of an asynchronous run, beside the same run with `max_staleness=0`.

    python -m benchmarks.asynchrony [--steps 5] [--rounds 2] [--max-staleness 2] [--hidden 384] [--layers 8]

Everything but the engine is what a run has: the learner, the rollout runner and the gateway are processes of their own,
agents (the shipped `pyagent`, three turns with a tool) run in local sandboxes and are scored by a verifier. The engine
(`benchmarks.waiting_engine`) waits and computes nothing, as one on other hardware does for this machine; it obeys
weight updates. A random Llama is trained.

The two runs differ in `max_staleness` and in nothing else; so many rollouts run at a time as one step trains on. What a
rollout's calls take is found while the first run warms up, so that a step's rollouts and its computation take about
equal time, which is where running them at once gains most: at best twice the steps. The runs alternate. A step counts
from one line of metrics.jsonl to the next; the first ones of each run do not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks import random_model
from benchmarks.capture import program
from benchmarks.waiting_engine import MODEL, WINDOW
from harness_trainer.cache import cache_dir
from harness_trainer.harnesses import load_harness
from harness_trainer.harnesses.install import ensure_installed
from harness_trainer.learner.__main__ import LEARNER_ERROR, LearnerSpec
from harness_trainer.learner.config import LearnerConfig
from harness_trainer.rollouts.__main__ import RUNNER_ERROR
from harness_trainer.rollouts.config import RolloutConfig, RunnerSpec
from harness_trainer.rollouts.store import RolloutStore
from sandboxes.base import Access, Endpoint
from sandboxes.local import LocalConfig

GOAL = 1.6  # times the steps per hour
_KEY = "benchmark"
_HARNESS = "pyagent"
_TURNS, _TASKS = 3, 4
_WARM = 3  # steps of a run that do not count; the pipeline is full after them
_LIMIT_S = 900.0  # for one run, also where others use the machine
_LOGS = "${SANDBOX_ROOT:-}/logs"
_NUMBER = f'$(tr -dc 0-9 < "{_LOGS}/agent/final_message.txt")'
_VERIFY = f'printf "0.%06d" "{_NUMBER}" > "{_LOGS}/verifier/reward.txt"'


@dataclass(frozen=True, slots=True)
class Setting:
    """What the runs of a benchmark have in common."""

    folder: Path
    model: Path
    warm: int  # steps of a run before the first that counts
    steps: int  # that count
    groups_per_step: int
    group_size: int
    max_concurrent: int | None = None  # rollouts at a time; None = as many as a step trains on

    @property
    def places(self) -> int:
        return self.max_concurrent or self.num_rollouts

    @property
    def all_steps(self) -> int:
        return self.warm + self.steps

    @property
    def num_rollouts(self) -> int:
        return self.groups_per_step * self.group_size


@dataclass(slots=True)
class Steps:
    """The steps of one run that count: their reports, and the wall seconds that they took."""

    reports: list[dict[str, Any]] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)

    def add(self, other: Steps) -> None:
        self.reports += other.reports
        self.wall_s += other.wall_s

    @property
    def per_hour(self) -> float:
        return 3600 * len(self.wall_s) / sum(self.wall_s)

    def mean(self, name: str) -> float:
        """Of a field of the report or of a metric."""
        values = [report.get(name, report["metrics"].get(name)) for report in self.reports]
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known else float("nan")


# --- the parts ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def part(folder: Path, name: str, module: str, spec: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A part of a run as the supervisor starts it."""
    spec_file = folder / f"{name}.json"
    spec_file.write_text(spec.model_dump_json())
    ours = {"OMP_WAIT_POLICY": "PASSIVE", "TQDM_DISABLE": "1", "CAPTURE_PROXY_ADMIN_KEY": _KEY}
    with (folder / f"{name}.log").open("wb") as log:
        argv = [sys.executable, "-m", module, "--spec", str(spec_file)]
        process = subprocess.Popen(argv, env={**os.environ, **ours}, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def learner_spec(setting: Setting, run: Path, engine: str, max_staleness: int) -> LearnerSpec:
    (run / "transfer").mkdir()
    (run / "engine_url").write_text(engine)
    return LearnerSpec(
        config=LearnerConfig(
            max_steps=setting.all_steps,
            groups_per_step=setting.groups_per_step,
            token_budget=16384,
            max_staleness=max_staleness,
            learning_rate=1e-6,
            device="cpu",
            verify_sync="never",  # the engine has no weights to be asked about
            save_steps=1000,
        ),
        model_path=setting.model,
        store=run / "store.sqlite",
        checkpoints=run / "checkpoints",
        metrics=run / "metrics.jsonl",
        engine_url_file=run / "engine_url",
        transfer_dir=run / "transfer",
        keep_weights=None,
        temperature=1.0,
        starved_after_s=_LIMIT_S,
    )


def runner_spec(setting: Setting, run: Path, urls: dict[str, str], max_staleness: int) -> RunnerSpec:
    tasks = run / "tasks.jsonl"
    lines = [{"name": f"task{i}", "instruction": f"Say {i}. " * 20, "verify": _VERIFY} for i in range(_TASKS)]
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    programs = ensure_installed(load_harness(_HARNESS), cache_dir(), print)
    return RunnerSpec(
        config=RolloutConfig(
            group_size=setting.group_size,
            max_concurrent=setting.places,
            max_turns=_TURNS + 1,
            max_tokens=4096,
            timeout_s=_LIMIT_S,
        ),
        sandbox=LocalConfig(),
        tasks=str(tasks),
        harness=_HARNESS,
        harness_bin=programs,
        harness_bins={_HARNESS: programs},
        store=run / "store.sqlite",
        artifacts=run / "artifacts",
        registry=run / "owned",
        run_id=run.name,
        model=MODEL,
        context=WINDOW,
        access=Access(gateway=Endpoint(url=urls["agent_url"])),
        admin_url=urls["admin_url"],
        max_open_groups=setting.groups_per_step * (max_staleness + 1),
        num_groups=setting.groups_per_step * setting.all_steps,
        groups_per_step=setting.groups_per_step,
        max_staleness=max_staleness,
    )


# --- a run ----------------------------------------------------------------------------------------------------------


class Run:
    """One training run. `seconds`: what a rollout's calls take; None = to be found, and `seconds` afterwards."""

    def __init__(self, setting: Setting, name: str, max_staleness: int, seconds: float | None) -> None:
        self._setting, self._max_staleness = setting, max_staleness
        self._folder = setting.folder / name
        self._folder.mkdir()
        self._searches = seconds is None
        self.seconds = 3.0 if seconds is None else seconds

    def steps(self) -> Steps:
        """Run it to its end; the steps that count."""
        folder = self._folder
        with contextlib.ExitStack() as stack:
            waits = ["--turns", str(_TURNS), "--seconds", str(self.seconds)]
            engine = stack.enter_context(program("benchmarks.waiting_engine", *waits))
            store, ready = folder / "store.sqlite", folder / "gateway.json"
            argv = ["capture_proxy", "--engine-url", engine, "--transport", "generate", "--store", str(store)]
            argv += ["--model", MODEL, "--renderer", "none", "--ready-file", str(ready)]
            stack.enter_context(program(*argv))
            rollouts = RolloutStore(store)
            stack.callback(rollouts.close)
            urls = json.loads(ready.read_text())
            spec = learner_spec(self._setting, folder, engine, self._max_staleness)
            learner = stack.enter_context(part(folder, "learner", "harness_trainer.learner", spec))
            runner_of_run = runner_spec(self._setting, folder, urls, self._max_staleness)
            runner = stack.enter_context(part(folder, "runner", "harness_trainer.rollouts", runner_of_run))
            return self._watch(engine, rollouts, learner, runner)

    def _watch(
        self, engine: str, store: RolloutStore, learner: subprocess.Popen[bytes], runner: subprocess.Popen[bytes]
    ) -> Steps:
        found, known, last = Steps(), 0, time.monotonic()
        give_up = time.monotonic() + _LIMIT_S
        while known < self._setting.all_steps:
            reports = self._reports()
            if len(reports) > known:
                now = time.monotonic()
                if known >= self._setting.warm:
                    found.add(Steps([reports[known]], [now - last]))
                known, last = known + 1, now
                if self._searches and known <= self._setting.warm:
                    self._fit(engine, reports[known - 1])
                continue
            for process, name, key in ((learner, "learner", LEARNER_ERROR), (runner, "runner", RUNNER_ERROR)):
                if process.poll() is not None and len(self._reports()) == known:
                    raise SystemExit(f"the {name} ended: {store.state(key) or self._tail(name)}")
            if time.monotonic() > give_up:
                raise SystemExit(f"no {known + 1} steps within {_LIMIT_S:.0f} s: {self._tail('runner')}")
            time.sleep(0.02)
        return found

    def _reports(self) -> list[dict[str, Any]]:
        path = self._folder / "metrics.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]

    def _fit(self, engine: str, report: dict[str, Any]) -> None:
        """Have a step's rollouts take what the step just taken did, beside what they take without the engine."""
        computed = report["step_s"] - report["wait_s"]
        if report["step"] > 1:  # the first step's wait is for the runner to start
            self.seconds = max(0.5, self.seconds + computed - report["wait_s"])
        else:
            self.seconds = max(0.5, computed)
        httpx.put(f"{engine}/seconds", json={"seconds": self.seconds}, trust_env=False).raise_for_status()

    def _tail(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace").strip()[-600:]


# --- the report -----------------------------------------------------------------------------------------------------


def show(name: str, steps: Steps) -> None:
    learner, engine = steps.mean("perf/learner_idle_frac"), steps.mean("perf/engine_idle_frac")
    numbers = (
        f"{len(steps.wall_s):>6}{steps.per_hour:>12.0f}{statistics.median(steps.wall_s):>10.2f}"
        f"{steps.mean('wait_s'):>10.2f}{steps.mean('step_s') - steps.mean('wait_s'):>10.2f}"
        f"{learner:>14.2f}{engine:>13.2f}{learner + engine:>8.2f}{steps.mean('staleness_mean'):>11.2f}"
    )
    print(f"{name:<18}{numbers}", flush=True)


def compare(setting: Setting, rounds: int, max_staleness: int) -> float:
    """Run both, in turn, and print what each came to; the ratio of their steps per hour."""
    titles = (
        "steps",
        "steps/hour",
        "a step s",
        "waited s",
        "worked s",
        "learner idle",
        "engine idle",
        "sum",
        "staleness",
    )
    widths = (6, 12, 10, 10, 10, 14, 13, 8, 11)
    print(f"{'':<18}" + "".join(f"{title:>{width}}" for title, width in zip(titles, widths, strict=True)), flush=True)
    totals: dict[int, Steps] = {0: Steps(), max_staleness: Steps()}
    seconds: float | None = None
    for round_ in range(rounds):
        for staleness in totals:
            run = Run(setting, f"run-{round_}-{staleness}", staleness, seconds)
            steps = run.steps()
            seconds = run.seconds
            show(f"max_staleness={staleness}", steps)
            totals[staleness].add(steps)
    if rounds > 1:
        for staleness, steps in totals.items():
            show(f"  {staleness}, all rounds", steps)
    print(f"\nthe engine takes {seconds:.2f} s for the {_TURNS} calls of a rollout")
    return totals[max_staleness].per_hour / totals[0].per_hour


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="of each run, after those that warm it up")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-staleness", type=int, default=2, help="of the asynchronous run")
    parser.add_argument("--groups", type=int, default=2, help="per step")
    parser.add_argument("--group-size", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=384, help="width of the model that is trained")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="the smallest run that goes through everything")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.rounds, options.hidden, options.layers = 1, 1, 64, 1
    with tempfile.TemporaryDirectory(prefix="bench-asynchrony-") as text:
        folder = Path(text)
        parameters = random_model.build(folder / "model", hidden=options.hidden, layers=options.layers)
        warm = 1 if options.quick else _WARM
        setting = Setting(folder, folder / "model", warm, options.steps, options.groups, options.group_size)
        print(
            f"a model of {parameters / 1e6:.1f} M parameters; {setting.num_rollouts} rollouts in {options.groups}"
            f" groups a step; {os.cpu_count()} cores\n"
        )
        ratio = compare(setting, options.rounds, options.max_staleness)
    met = ratio >= GOAL
    print(f"steps per hour, asynchronous / max_staleness=0: {ratio:.2f}, goal {GOAL}, met: {'yes' if met else 'NO'}")
    return 0 if met or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())

"""Does every objective learn? The learning benchmark, once for each choice of `learner.objective`.

    python -m benchmarks.objectives [--names default "loss gspo" ...] [--seeds 0] [--steps 10]

Each run changes the default in one place (`CHOICES`) and starts engine, agents and learner anew from the same model.
Its curve goes into the JSON file when it ends; a killed series goes on with the same command at the run that was cut,
from its beginning. The tables of docs/objectives.md are made of that file by `python -m benchmarks.objectives_page`.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import learning
from harness_trainer.config import RunConfig
from harness_trainer.display import Display
from harness_trainer.errors import HarnessTrainerError
from harness_trainer.learner.objective_config import ObjectiveConfig
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.run import train
from harness_trainer.rundir import RunDir, write_atomically

RESULTS = Path("docs/learning-curves.json")

# What each run changes. Two settings together where one alone is refused or means nothing. `turn_reward_weight` is
# absent: the agent of this benchmark makes one call, whose reward is the outcome's.
CHOICES: dict[str, dict[str, Any]] = {
    "default": {},
    "advantage group_mean": {"advantage": "group_mean"},
    "advantage leave_one_out": {"advantage": "leave_one_out"},
    "advantage global_std": {"advantage": "global_std"},
    "advantage global": {"advantage": "global"},
    "loss cispo": {"loss": "cispo", "epsilon_high": 1.0},
    # The paper's bounds are for batches that several updates share; those of "wide" let a policy one step old through.
    "loss gspo": {"loss": "gspo", "aggregation": "rollout_mean", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "loss gspo, wide": {"loss": "gspo", "aggregation": "rollout_mean", "epsilon": 0.03, "epsilon_high": 0.04},
    "epsilon_high": {"epsilon_high": 0.28},
    "dual_clip": {"dual_clip": 3.0},
    "aggregation rollout_mean": {"aggregation": "rollout_mean"},
    "aggregation constant": {"aggregation": "constant", "constant_tokens": 48},
    "correction token_truncate": {"importance_correction": "token_truncate", "importance_max": 2.0},
    "correction token_mask": {"importance_correction": "token_mask", "importance_min": 0.5, "importance_max": 5.0},
    "correction sequence_truncate": {"importance_correction": "sequence_truncate"},
    "correction sequence_mask": {"importance_correction": "sequence_mask", "importance_min": 0.33},
    "correction geometric_mask": {
        "importance_correction": "geometric_mask", "importance_min": 0.95, "importance_max": 1.05,
    },
    "kl_coef": {"kl_coef": 0.04},
    "entropy_coef": {"entropy_coef": 0.01},
    "truncated mask": {"truncated": "mask"},
    "truncated penalize": {"truncated": "penalize", "truncation_penalty": 0.2},
}  # fmt: skip

# Of a step's line in metrics.jsonl; None stays null.
KEPT = (
    "grad_norm",
    "ratio_mean",
    "ratio_max",
    "kl",
    "kl_reference",
    "entropy",
    "clip_fraction",
    "importance_bounded_fraction",
    "num_masked",
    "staleness_mean",
    "trained_tokens",
    "step_s",
)
Train = Callable[[RunConfig, Path, Display], list[dict[str, Any]]]
Run = dict[str, Any]  # one run as the JSON file holds it: what it was (`IDENTITY`), minutes, steps

IDENTITY = ("name", "seed", "num_steps", "settings", "tasks", "group_size")


def config_of(run: Run) -> RunConfig:
    base = learning.config(run["seed"], run["num_steps"], run["tasks"], run["group_size"])
    learner = base.learner.model_copy(update={"objective": ObjectiveConfig(**run["settings"])})
    return base.model_copy(update={"learner": learner})


def read_results(path: Path) -> list[Run]:
    return json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []


def add_result(path: Path, run: Run) -> None:
    """One line per run, so that a file that grew shows only what is new."""
    lines = ",\n".join(json.dumps(known) for known in [*read_results(path), run])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f'{{"runs": [\n{lines}\n]}}\n')


def measured(run: Run, out: Path, trainer: Train) -> Run:
    """`run` with its curve. What an earlier try left is removed first: half a curve has other policies in it."""
    folder = out / f"{run['name'].replace(', ', '-').replace(' ', '-')}-seed{run['seed']}"
    shutil.rmtree(folder, ignore_errors=True)
    started = time.monotonic()
    with Display() as display:
        reports = trainer(config_of(run), folder, display)
    minutes = round((time.monotonic() - started) / 60, 2)
    store = RolloutStore(RunDir(folder).store)
    try:
        steps = [_step(report, store) for report in reports]
    finally:
        store.close()
    for heavy in ("checkpoints", "model"):  # 2 GB, of no use to the curve
        shutil.rmtree(folder / heavy, ignore_errors=True)
    return {**run, "minutes": minutes, "steps": steps}


def _step(report: dict[str, Any], store: RolloutStore) -> dict[str, Any]:
    results = store.trained_results(report["step"])
    rewards = [round(result.reward, 4) for result in results if result.reward is not None]
    return {"step": report["step"], "rewards": rewards, **{name: _short(report[name]) for name in KEPT}}


def _short(value: float | int | None) -> float | int | None:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def missing(wanted: Sequence[Run], known: Sequence[Run]) -> list[Run]:
    """Those that no run in the file has measured, whatever it was called when its settings were others."""
    done = [{key: run[key] for key in IDENTITY} for run in known]
    return [run for run in wanted if run not in done]


def measure_all(wanted: Sequence[Run], out: Path, results: Path, trainer: Train) -> list[str]:
    """Measures what is not in `results` yet; the names of the runs that failed. The next call tries those again."""
    failed = []
    for run in missing(wanted, read_results(results)):
        print(f"{run['name']}, seed {run['seed']}: {run['settings']}", flush=True)
        try:
            add_result(results, measured(run, out, trainer))
        except HarnessTrainerError as error:
            print(f"{run['name']}, seed {run['seed']} failed: {error}", flush=True)
            failed.append(run["name"])
    return failed


def main(arguments: Sequence[str] | None = None, trainer: Train = train) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", default=list(CHOICES), choices=list(CHOICES), metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tasks", default=",".join(learning.TASKS))
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=Path("runs/bench-objectives"))
    options = parser.parse_args(arguments)
    what = {"num_steps": options.steps, "tasks": options.tasks, "group_size": options.group_size}
    wanted = [
        {"name": name, "seed": seed, "settings": CHOICES[name], **what}
        for seed in options.seeds
        for name in options.names
    ]
    # A series that is ended politely ends engine and agents on its way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            parser.error(f"another series is running in {options.out}: wait for it, or give another --out")
        try:
            failed = measure_all(wanted, options.out, options.json, trainer)
        except KeyboardInterrupt:
            print(f"stopped; what is done is in {options.json}, the same command goes on from there")
            return 130
    if failed:
        print(f"{len(failed)} of {len(wanted)} runs failed: {', '.join(failed)}; their logs are in {options.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

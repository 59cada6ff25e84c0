"""What `harness-trainer plan` says beforehand, beside what a run on this machine then comes to.

    python -m benchmarks.plan_check [--steps 5] [--hidden 768] [--layers 8] [--out FILE.json]
    python -m benchmarks.plan_check --run RUN_DIR     a run that exists: its first half foretells its second

The runs are those of `benchmarks.asynchrony`: a real learner, runner and gateway, real agents in local sandboxes, and
an engine that waits as one on other hardware does. One run (`max_staleness` 1) is measured. From its folder alone, as
`plan --from-run` reads it, three things are foretold: its own pace, the pace of the same with `max_staleness` 0, and
of the same with half as many rollouts at a time; both are then run. The learner's memory is foretold from the model's
config and the tokens of the largest micro-batch, and measured as the process's high-water mark (VmHWM); what Python,
torch and TRL take is measured in a process of its own. Errors are printed as they are; there is no goal but honesty.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks import random_model
from benchmarks.asynchrony import Run, Setting, Steps
from harness_trainer.config import RunConfig
from harness_trainer.plan.amounts import Number
from harness_trainer.plan.learner_memory import PROCESS, learner_memory
from harness_trainer.plan.measured import numbers_of, read_run, read_steps
from harness_trainer.plan.pace import pace
from harness_trainer.plan.shape import ModelShape, read_shape
from harness_trainer.plan.sizes import GIB, gib
from harness_trainer.plan.workload import workload
from harness_trainer.rundir import RunDir

_IMPORT = "import harness_trainer.learner.train; print(open('/proc/self/status').read())"
_WARM = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One comparison. Example: Line("steps per hour, max_staleness=0", 412.0, 398.0)."""

    what: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


class WatchedRun(Run):
    """A run whose learner's memory is watched."""

    peak = 0  # bytes

    def _watch(self, engine: str, store: Any, learner: subprocess.Popen[bytes], runner: Any) -> Steps:
        done = threading.Event()

        def look() -> None:
            while not done.wait(0.2):
                self.peak = max(self.peak, _status(Path(f"/proc/{learner.pid}/status"), "VmHWM") or 0)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            return super()._watch(engine, store, learner, runner)
        finally:
            done.set()
            thread.join()


def _status(path: Path, name: str) -> int | None:
    """Bytes of a line of /proc's status; None = the process is gone."""
    try:
        return _line_of(path.read_text(), name)
    except OSError:
        return None


def _line_of(status: str, name: str) -> int | None:
    found = next((line for line in status.splitlines() if line.startswith(f"{name}:")), None)
    return None if found is None else int(found.split()[1]) * 1024


def baseline() -> int:
    """Bytes of a learner's process before it has a model."""
    done = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True)
    return _line_of(done.stdout, "VmHWM") or 0


def config_of(setting: Setting, max_staleness: int) -> RunConfig:
    """The settings that `benchmarks.asynchrony` gives its parts, as one config."""
    learner = {"groups_per_step": setting.groups_per_step, "max_staleness": max_staleness, "device": "cpu"}
    rollouts = {"group_size": setting.group_size, "max_concurrent": setting.places}
    return RunConfig.model_validate({"model": str(setting.model), "learner": learner, "rollouts": rollouts})


def foretold(config: RunConfig, numbers: dict[str, Number]) -> float:
    """Steps per hour."""
    found = pace(config, workload(config, numbers)).per_hour
    assert found is not None, "the run did not tell enough"
    return found


def compare_runs(folder: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Each as soon as it is known."""
    parameters = random_model.build(folder / "model", hidden=options.hidden, layers=options.layers)
    setting = Setting(folder, folder / "model", options.warm, options.steps, options.groups, options.group_size)
    fewer = dataclasses.replace(setting, max_concurrent=max(1, setting.num_rollouts // 2))
    print(f"a model of {parameters / 1e6:.1f} M parameters; {setting.num_rollouts} rollouts a step\n")
    first = WatchedRun(setting, "first", 1, None)
    steps = first.steps()
    numbers = read_run(folder / "first")
    yield memory_line(read_shape(str(setting.model)), config_of(setting, 1), folder / "first", first.peak)
    yield Line("steps per hour, the run itself", foretold(config_of(setting, 1), numbers), steps.per_hour)
    others = [("max_staleness=0", setting, 0), ("half the places", fewer, 1)]
    for name, other, staleness in others[: 1 if options.quick else 2]:
        said = foretold(config_of(other, staleness), numbers)
        ran = Run(other, name.replace(" ", "-"), staleness, first.seconds).steps()
        yield Line(f"steps per hour, {name}", said, ran.per_hour)


def memory_line(shape: ModelShape, config: RunConfig, run: Path, peak: int) -> Line:
    largest = max(int(line["metrics"]["batch/row_tokens_max"]) for line in read_steps(run / "metrics.jsonl"))
    memory = learner_memory(config.learner, shape, device="cpu", sharded=False, tokens=largest)
    process = baseline()
    assert memory.peak is not None
    print(f"the learner: {process / GIB:.2f} GiB before a model, micro-batches of up to {largest} tokens")
    for part in (*memory.resident, *memory.backward):
        if part.name != "process":
            print(f"  {part.name:<22}{gib(part.bytes):>12}")
    return Line("learner's memory, GiB", (memory.peak - PROCESS + process) / GIB, peak / GIB)


def compare_halves(folder: Path) -> Iterator[Line]:
    """Of a run that was made by `train`."""
    config = RunConfig.model_validate(yaml.safe_load(RunDir(folder).config.read_text()))
    steps = read_steps(RunDir(folder).metrics)
    if len(steps) < 4:
        raise SystemExit(f"{folder} has {len(steps)} steps after its first; four are needed to compare halves")
    first, second = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    numbers = {**read_run(folder), **numbers_of(first, "first half")}
    measured = 3600 / statistics.fmean(line["step_s"] for line in second)
    yield Line("steps per hour, second half from the first", foretold(config, numbers), measured)


def main() -> int:
    options = _options()
    lines: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="bench-plan-") as text:
        found = compare_runs(Path(text), options) if options.run is None else compare_halves(options.run)
        for line in found:
            if not lines:
                print(f"\n{'':<46}{'predicted':>10}{'measured':>10}{'error':>8}")
            print(f"{line.what:<46}{line.predicted:>10.2f}{line.measured:>10.2f}{line.error:>+8.0%}", flush=True)
            lines.append(line)
    if options.out is not None:
        figures = [{"what": line.what, "predicted": line.predicted, "measured": line.measured} for line in lines]
        options.out.write_text(json.dumps({"lines": figures}, indent=1) + "\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="of each run, after those that warm it up")
    parser.add_argument("--groups", type=int, default=2, help="per step")
    parser.add_argument("--group-size", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512, help="width of the model that is trained")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--run", type=Path, help="a run that exists, instead of making three")
    parser.add_argument("--out", type=Path, help="a file for the figures")
    parser.add_argument("--quick", action="store_true", help="the smallest runs that go through everything")
    options = parser.parse_args()
    options.warm = _WARM
    if options.quick:
        options.steps, options.warm, options.hidden, options.layers = 1, 1, 64, 1
    return options


if __name__ == "__main__":
    sys.exit(main())

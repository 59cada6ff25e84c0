"""A whole training run that is treated badly: each of its parts killed with signal 9, its engine, agents, verifiers and
tasks failing now and then. Afterwards its own record must account for everything, and nothing may be left on the
machine.

Owns the run's folder (tasks, agent, engine's door), the driver that kills, and the account of what it did. A part that
dies is started again by the run itself, or ends it; in that case the driver gives the same command again, as a person
would. Real vLLM on a tiny random model, real agents, sandboxes and TRL. Called by `tests/e2e/test_chaos.py` (short) and
`benchmarks.chaos` (whole).
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from harness_trainer.audit import Audit, audit
from harness_trainer.engine.config import EngineConfig, find_environment
from tests.engine.tiny_model import make_tiny_model

PARTS = ("engine", "gateway", "runner", "learner")
_HERE = Path(__file__).parent
_POLL_S = 0.2
_SHM = Path("/dev/shm")
# What an agent left is no model's text, so that rewards differ from rollout to rollout; now and then it hangs.
_VERIFY = """\
if [ $((RANDOM % 1000)) -lt {hangs} ]; then sleep 600; fi
exec python3 -I -c "
import os
root = os.environ.get('SANDBOX_ROOT', '')
text = open(root + '/logs/agent/final_message.txt').read()
share = sum(c.isalpha() for c in text) / max(1, len(text))
open(root + '/logs/verifier/reward.txt', 'w').write(str(share))
"
"""
_TASK = """\
schema_version = "1.4"
[agent]
timeout_sec = 400.0
[verifier]
timeout_sec = {verifier_s}
[environment]
cpus = 1
"""
_POISON = '[environment.healthcheck]\ncommand = "echo this task is poisoned >&2; exit 1"\nretries = 1\n'


@dataclass(frozen=True, slots=True)
class Chaos:
    """How long, and how rough. Rates are shares: of sampling calls, of agents, of verifications."""

    num_steps: int = 40
    engine_fault_rate: float = 0.03
    infra_rate: float = 0.10  # agents that spoil their own rollout: half cannot start, half remove their sandbox
    hang_rate: float = 0.04  # verifiers that hang
    verifier_s: float = 4.0  # their time limit
    kills: tuple[str, ...] = PARTS  # in an order of the seed's
    max_starts: int = 12  # of the command
    stuck_after_s: float = 600.0  # no new step for so long: the run is given up
    isolation: str = "none"  # of the local sandbox; agents cannot remove a sealed one
    settings: tuple[tuple[str, str], ...] = ()  # further flags of `train`
    seed: int = 1


@dataclass
class Report:
    """What happened. `problems` is empty when the run went through and left nothing."""

    kills: list[str] = field(default_factory=list)  # "engine at step 7, 4 agents at work"
    commands: int = 0  # how often the command was given
    endings: list[str] = field(default_factory=list)  # the last line of each that ended before its time
    engine_faults: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    audit: Audit | None = None
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Place:
    """The folder of a chaos run and what lies in it."""

    folder: Path
    temp: Path  # of everything that the run starts; short, as the path of a socket must be

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def faults(self) -> Path:
        return self.folder / "engine_faults"

    @property
    def owned(self) -> Path:
        return self.folder / "state" / "harness-trainer" / "owned"


def chaos(config: Chaos, folder: Path, tell: Callable[[str], None] = lambda line: None) -> Report:
    """Run it to its end in `folder`, which is empty; what it came to. Raises SetupError without an engine environment.

    Nothing that it started is left running, whatever happens.
    """
    report, began = Report(), time.monotonic()
    place = Place(folder.resolve(), Path(tempfile.mkdtemp(prefix="chaos-temp-")).resolve())
    try:
        argv = _prepare(config, place)
        weights = set(_SHM.glob("weights-*"))
        _Driver(config, place, argv, report, tell).run()
        report.seconds = time.monotonic() - began
        report.problems += _left(place, weights)
    finally:
        shutil.rmtree(place.temp, ignore_errors=True)
    report.engine_faults.update(place.faults.read_text().split() if place.faults.exists() else [])
    report.audit = audit(place.run)
    report.problems += [f"{v.rule}: {v.what}: {v.detail}" for v in report.audit.violations]
    report.problems += report.audit.observations  # here nobody sets the clock, and the disk is not full
    if report.audit.state != "finished":
        report.problems.append(f"the run is {report.audit.state}")
    if len(report.kills) < len(config.kills):
        report.problems.append(f"only {len(report.kills)} of {len(config.kills)} parts were killed")
    return report


# -- the folder ------------------------------------------------------------------------------------------------------


def _prepare(config: Chaos, place: Place) -> list[str]:
    """Write tasks, agent and the engine's door; the command to run in the folder."""
    folder = place.folder
    model = make_tiny_model(folder / "model", family="llama", tied=True)
    for name in ("sun", "moon", "star", "sea", "poisoned"):
        _write_task(folder / "tasks" / name, config, poisoned=name == "poisoned")
    for name in ("hill", "lake"):
        _write_task(folder / "held-out" / name, config, poisoned=False)
    shutil.copy(_HERE / "chaos_agent.py", folder / "chaos_agent.py")
    spoilt = config.infra_rate / 2
    agent = f"cmd:python3 chaos_agent.py --no-start {spoilt} --break-box {spoilt}"
    settings = {
        "--run-dir": place.run,
        "--model": model.path,
        "--tasks": folder / "tasks",
        "--harness": agent,
        "--sandbox": "local",
        "--sandbox.isolation": config.isolation,
        "--rollouts.group-size": 3,
        "--rollouts.max-concurrent": 6,
        "--rollouts.max-tokens": 12,
        "--rollouts.infra-window": 40,
        "--rollouts.evaluation.tasks": folder / "held-out",
        "--rollouts.evaluation.every": 10,
        "--learner.max-steps": config.num_steps,
        "--learner.groups-per-step": 1,
        "--learner.learning-rate": 0.001,
        "--learner.token-budget": 2048,
        "--learner.save-steps": 3,  # so that a killed learner takes steps again
        "--engine.max-model-len": 512,
        "--engine.kv-cache-gib": 0.25,
        "--engine.python": _door(config, place),
        **dict(config.settings),
    }
    arguments = [str(part) for pair in settings.items() for part in pair]
    return [sys.executable, "-m", "harness_trainer.cli", "train", "--plain", *arguments]


def _write_task(folder: Path, config: Chaos, *, poisoned: bool) -> None:
    (folder / "tests").mkdir(parents=True)
    (folder / "environment").mkdir()
    (folder / "environment" / "Dockerfile").write_text("FROM scratch\n")  # what a task folder has; never read here
    (folder / "instruction.md").write_text(f"Say {folder.name}.\n")
    (folder / "tests" / "test.sh").write_text(_VERIFY.format(hangs=round(1000 * config.hang_rate)))
    (folder / "task.toml").write_text(_TASK.format(verifier_s=config.verifier_s) + (_POISON if poisoned else ""))


def _door(config: Chaos, place: Place) -> Path:
    """A program that is called as the engine's Python and starts vLLM behind `chaos_door`."""
    real = str(find_environment(EngineConfig()).python)
    door = [sys.executable, "-I", str(_HERE / "chaos_door.py"), "--python", real]
    door += ["--faults", str(config.engine_fault_rate), "--seed", str(config.seed), "--log", str(place.faults)]
    path = place.folder / "engine-python"
    path.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        f'  *vllm.entrypoints*) exec {shlex.join(door)} -- "$@" ;;\n'
        f'  *) exec {shlex.quote(real)} "$@" ;;\n'
        "esac\n"
    )
    path.chmod(0o755)
    return path


# -- killing ---------------------------------------------------------------------------------------------------------


class _Driver:
    """Starts the command, kills what is due, and starts the command again when it ends before its time."""

    def __init__(
        self, config: Chaos, place: Place, argv: list[str], report: Report, tell: Callable[[str], None]
    ) -> None:
        self._config, self._place, self._argv = config, place, argv
        self._report, self._tell = report, tell
        self._chance = random.Random(config.seed)
        self._due = self._schedule()
        self._progress = (0, time.monotonic())

    def _schedule(self) -> list[tuple[int, str]]:
        """(Step after which, part), spread over the run."""
        parts = list(self._config.kills)
        self._chance.shuffle(parts)
        gap = self._config.num_steps / (len(parts) + 1) if parts else 0
        return [(max(1, round(gap * (n + 1))), part) for n, part in enumerate(parts)]

    def run(self) -> None:
        while self._report.commands < self._config.max_starts:
            self._report.commands += 1
            log = self._place.folder / f"command-{self._report.commands}.log"
            with log.open("wb") as output:
                process = subprocess.Popen(
                    self._argv,
                    cwd=self._place.folder,
                    env={**os.environ, "XDG_STATE_HOME": str(self._place.folder / "state"), **_env(self._place)},
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
                try:
                    self._drive(process)
                finally:
                    _end(process)
            if process.returncode == 0:
                return
            self._report.endings.append(_last_line(log))
            self._tell(f"the command ended with {process.returncode}: {self._report.endings[-1]}")
            if self._is_stuck():
                break
        self._report.problems.append(f"the command did not finish: {self._report.endings[-1:]}")

    def _drive(self, process: subprocess.Popen[bytes]) -> None:
        self._progress = (self._progress[0], time.monotonic())
        while process.poll() is None and not self._is_stuck():
            steps = self._num_steps()
            if steps != self._progress[0]:
                self._progress = (steps, time.monotonic())
                self._tell(f"step {steps}")
            if self._due and steps >= self._due[0][0]:
                self._kill(self._due[0][1], steps)
            time.sleep(_POLL_S)
        if process.poll() is None:
            self._report.endings.append(f"no step for {self._config.stuck_after_s:.0f} s")

    def _is_stuck(self) -> bool:
        return time.monotonic() - self._progress[1] > self._config.stuck_after_s

    def _kill(self, part: str, steps: int) -> None:
        """Once agents are at work and the part is there; some moment of a step later."""
        pid, agents = self._pid(part), self._agents_at_work()
        if pid is None or agents < 2:
            return
        time.sleep(self._chance.uniform(0, 1.5))
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._due.pop(0)
        self._report.kills.append(f"{part} at step {steps}, {agents} agents at work")
        self._tell(f"killed the {part} (pid {pid}), {agents} agents at work")

    def _pid(self, part: str) -> int | None:
        """The part's own process, not the one that watches over it; of the engine vLLM's, behind its door."""
        started = [
            event["pid"]
            for event in _lines(self._place.run / "events.jsonl")
            if event.get("kind") == "started" and event.get("part") == part
        ]
        pid = started[-1] if started else None
        for _ in range(2 if part == "engine" else 1):
            pid = _child(pid)
        return pid

    def _num_steps(self) -> int:
        return len(_lines(self._place.run / "metrics.jsonl"))

    def _agents_at_work(self) -> int:
        """Attempts of the run's that have been answered at least once and are not over."""
        store = self._place.run / "store.sqlite"
        sql = (
            "SELECT COUNT(*) FROM rollouts WHERE finished_at IS NULL"
            " AND EXISTS (SELECT 1 FROM capture_turns WHERE session_id = rollout_id)"
        )
        try:
            with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True, timeout=5)) as db:
                return int(db.execute(sql).fetchone()[0])
        except sqlite3.Error:  # it is not there yet
            return 0


def _env(place: Place) -> dict[str, str]:
    root = str(_HERE.parents[1])  # the command runs in the folder of its agent
    return {"TMPDIR": str(place.temp), "PYTHONPATH": root}


def _child(pid: int | None) -> int | None:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _lines(path: Path) -> list[dict]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()]


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


# -- what is left ----------------------------------------------------------------------------------------------------


def _left(place: Place, weights_before: set[Path]) -> list[str]:
    """Processes, folders and records that the run should have taken with it."""
    deadline = time.monotonic() + 15  # what was killed is reaped a moment later
    while (left := _leaks(place, weights_before)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


def _leaks(place: Place, weights_before: set[Path]) -> list[str]:
    running = {**processes_of(place.folder), **processes_of(place.temp)}
    left = [f"process {pid} is left: {line}" for pid, line in running.items()]
    left += [f"the record {path.name} is left" for path in place.owned.glob("*.json")]
    left += [f"{path} is left" for path in place.temp.glob("*")]
    # Somebody else's run on this machine has a folder of its own there; ours are told by their owner, who is dead.
    left += [f"{path} is left" for path in set(_SHM.glob("weights-*")) - weights_before if not _is_alive(path)]
    return left


def _is_alive(path: Path) -> bool:
    """Whether the owner that the name of a folder tells (`<kind>-<pid>-<ticks>-<random>`) runs."""
    return Path(f"/proc/{path.name.split('-')[1]}").exists()


def processes_of(folder: Path) -> dict[int, str]:
    """Live processes that name the folder or work in it: pid -> command line."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        if int(path.name) == os.getpid():
            continue
        try:
            line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            cwd = os.readlink(path / "cwd")
        except OSError:
            continue
        if f"{folder}/" in line or cwd.startswith(str(folder)):
            found[int(path.name)] = line
    return found

"""What a run folder says, read once: the store's rows, metrics, checkpoints, sessions, kept files.

Owns reading, and the judgement whether the run is over; the rules get it as `Records`. Captures and traces are large
and are read one at a time, by `tokens`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml
from pydantic import ValidationError

from capture_proxy.errors import StoreError
from capture_proxy.store import load_sessions
from capture_proxy.types import Session
from harness_trainer.errors import RunDirError, TrainingFailed
from harness_trainer.learner.checkpoints import HarnessState, read_state
from harness_trainer.learner.config import LearnerConfig
from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.sources import source_in
from harness_trainer.rollouts.stored import Stored, StoredAttempt, StoredGroup, read_stored
from harness_trainer.rundir import RunDir

State: TypeAlias = Literal["live", "finished", "interrupted"]
Found: TypeAlias = tuple[str, str]  # what breaks the rule, with its id, and how


@dataclass(frozen=True, slots=True)
class Records:
    """Example: records.slots(17) == {0: [first try, second try], 1: [the only try]}."""

    run: RunDir
    state: State  # live = a process holds the folder; finished = every step was taken; interrupted = neither
    rollouts: RolloutConfig
    learner: LearnerConfig | None  # None = a run of `rollout`, which trains nothing
    sources: list[str]  # names of the run's sources; [] = it has one, which needs none
    stored: Stored
    steps: list[dict[str, Any]]  # the lines of metrics.jsonl
    checkpoints: dict[int, HarnessState]  # the complete ones, by step
    sessions: dict[str, Session]  # by id
    restarts: dict[str, int]  # of each part, by name: starts beyond the first
    num_bad_events: int  # lines of events.jsonl that cannot be read
    kept: frozenset[str]  # names of the folders below artifacts/
    tries: dict[int, dict[int, list[StoredAttempt]]]  # of each group and slot, in order of start
    trained: dict[int, list[int]]  # ids of the groups of each step that the store knows

    @property
    def max_steps(self) -> int:
        return 0 if self.learner is None else self.learner.max_steps

    @property
    def training_groups(self) -> list[StoredGroup]:
        return [group for group in self.stored.groups.values() if group.evaluation is None]

    def slots(self, group_id: int) -> dict[int, list[StoredAttempt]]:
        """The tries of each slot, in order of start."""
        return self.tries.get(group_id, {})

    def source_of(self, group: StoredGroup) -> str:
        """By its task's name; "" = it is of none of the run's sources."""
        return source_in(group.task, self.sources)

    def groups_of_step(self, step: int) -> list[int]:
        return self.trained.get(step, [])

    def version_before(self, line: dict[str, Any]) -> int:
        """The policy that the engine sampled with when the step of this line of metrics was taken."""
        published = int(line["policy_version"])
        known = self.stored.versions.get(published)
        return published - 1 if known is None or known.parent is None else known.parent


def read_records(run_dir: Path) -> Records:
    """Raises RunDirError where the folder holds no run, or one that cannot be read."""
    run = RunDir(run_dir)
    if not run.store.exists() or not run.config.exists():
        raise RunDirError(f"{run_dir} holds no run (no store.sqlite or config.yaml): give the folder of a run")
    is_live = run.is_held()
    rollouts, learner, sources = _configs(run.config)
    max_steps = 0 if learner is None else learner.max_steps
    # The store last: whatever a live run has written elsewhere by now is known to it, and not the reverse.
    kept = frozenset(path.name for path in run.artifacts.glob("*"))
    checkpoints = _checkpoints(run.checkpoints)
    steps = _lines(run.metrics)
    last_step = steps[-1].get("step", 0) if steps else 0
    try:
        sessions = load_sessions(run.store)
    except StoreError as error:
        raise RunDirError(f"{error}; give the folder of a whole run") from error
    stored = read_stored(run.store)
    events, num_bad_events = _events(run.events)
    is_over = last_step >= max_steps and all(evaluation.report is not None for evaluation in stored.evaluations)
    return Records(
        run=run,
        state="live" if is_live else "finished" if is_over else "interrupted",
        rollouts=rollouts,
        learner=learner,
        sources=sources,
        stored=stored,
        steps=steps,
        checkpoints=checkpoints,
        sessions={session.session_id: session for session in sessions},
        restarts=_restarts(events),
        num_bad_events=num_bad_events,
        kept=kept,
        tries=_tries(stored),
        trained=_trained(stored),
    )


def _tries(stored: Stored) -> dict[int, dict[int, list[StoredAttempt]]]:
    tries: dict[int, dict[int, list[StoredAttempt]]] = defaultdict(lambda: defaultdict(list))
    for attempt in stored.attempts:
        tries[attempt.group_id][attempt.slot].append(attempt)
    return {group_id: dict(slots) for group_id, slots in tries.items()}


def _trained(stored: Stored) -> dict[int, list[int]]:
    trained: dict[int, list[int]] = defaultdict(list)
    for group_id, group in sorted(stored.groups.items()):
        if group.trained_step is not None:
            trained[group.trained_step].append(group_id)
    return dict(trained)


def _configs(path: Path) -> tuple[RolloutConfig, LearnerConfig | None, list[str]]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        rollouts = RolloutConfig.model_validate(data["rollouts"])
        sources = [str(source["name"]) for source in data.get("sources") or ()]
        if "learner" in data:
            return rollouts, LearnerConfig.model_validate(data["learner"]), sources
        # What `rollout` runs is one evaluation, of so many samples.
        evaluation = rollouts.evaluation.model_copy(update={"samples": data["samples"]})
        return rollouts.model_copy(update={"evaluation": evaluation}), None, sources
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise RunDirError(f"{path} cannot be read ({reason}): use the harness-trainer that wrote it") from error


def _checkpoints(folder: Path) -> dict[int, HarnessState]:
    found = {}
    for path in folder.glob("checkpoint-*"):
        with suppress(TrainingFailed):  # one that was cut off while it was saved, which no run continues from
            state = read_state(path)
            found[state.step] = state
    return dict(sorted(found.items()))


def _lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: the last one may still be written."""
    if not path.exists():
        return []
    try:
        whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
        return [json.loads(line) for line in whole.split("\n") if line]
    except (OSError, ValueError) as error:
        raise RunDirError(f"{path} cannot be read ({error}): put the run's own file back") from error


def _events(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The whole lines, and how many of them cannot be read: no rule depends on one, and the run goes on without it."""
    events: list[dict[str, Any]] = []
    num_bad = 0
    try:
        whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    except OSError as error:
        raise RunDirError(f"{path} cannot be read ({error}): put the run's own file back") from error
    for line in filter(None, whole.split(b"\n")):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict):
            events.append(event)
        else:
            num_bad += 1
    return events, num_bad


def _restarts(events: list[dict[str, Any]]) -> dict[str, int]:
    starts: dict[str, int] = defaultdict(int)
    for event in events:
        if event.get("kind") == "started":
            starts[str(event.get("part"))] += 1
    return {part: count - 1 for part, count in sorted(starts.items())}

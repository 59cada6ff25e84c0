"""metrics.jsonl and events.jsonl of a run as they stand, half-written lines included, and the curves made of them.

Owns reading files that somebody appends to, and which curves there are; `charts` draws them. A line that is no JSON
object is counted and left out: a power cut leaves one, and the step's next line is as good as any.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness_trainer.view.visible import number

Line = dict[str, Any]
_LARGEST = 1e300  # beyond it a chart's arithmetic overflows
_MOST_BYTES = 256 * 2**20  # of one file: more is not read


@dataclass(slots=True)
class Lines:
    """Example: Lines([{"step": 1, ...}], num_bad=0). `num_bad` counts whole lines that could not be read."""

    lines: list[Line] = field(default_factory=list)
    num_bad: int = 0


class GrowingFile:
    """JSON lines of a file, read on from where the last look ended. May be asked from several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known = Lines()
        self._identity: tuple[int, int] = (0, 0)
        self._read = 0  # bytes, up to the end of the last whole line

    def look(self) -> Lines:
        """An absent or unreadable file has no lines."""
        with self._lock:
            try:
                self._read_on()
            except OSError:
                self._start_over((0, 0))
            return Lines(list(self._known.lines), self._known.num_bad)

    def _read_on(self) -> None:
        with self._path.open("rb") as file:
            status = self._path.stat()
            identity = (status.st_dev, status.st_ino)
            if (
                identity != self._identity or status.st_size < self._read
            ):  # replaced or cut: a run that goes back does both
                self._start_over(identity)
            file.seek(self._read)
            whole, newline, _ = file.read(max(0, _MOST_BYTES - self._read)).rpartition(b"\n")
        for line in whole.split(b"\n") if newline else ():
            self._add(line)
        self._read += len(whole) + len(newline)

    def _add(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            self._known.lines.append(value)
        else:
            self._known.num_bad += 1

    def _start_over(self, identity: tuple[int, int]) -> None:
        self._known, self._identity, self._read = Lines(), identity, 0


def steps_of(lines: Sequence[Line]) -> list[Line]:
    """The steps in order, each as it was taken last: after a restart some are taken again."""
    by_step: dict[int, Line] = {}
    for line in lines:
        step = line.get("step")
        if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53:
            by_step[step] = line
    return [by_step[step] for step in sorted(by_step)]


@dataclass(frozen=True, slots=True)
class Point:
    """`value` None = unknown: the curve has a gap there. `error` = one standard error, None = unknown."""

    step: int
    value: float | None
    error: float | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """Example: Curve("reward", "Reward", "mean ± s.e.", [Point(1, 0.5, 0.1)], "s.e. over the step's rollouts")."""

    name: str
    title: str
    unit: str
    points: list[Point]
    about: str = ""

    @property
    def is_known(self) -> bool:
        return any(point.value is not None for point in self.points)


def reward_error(line: Mapping[str, Any]) -> float | None:
    """Standard error of a step's mean reward, over its scored rollouts; None = unknown, or fewer than two of them."""
    spread, count = number(line.get("reward_std")), number(line.get("num_rollouts"))
    # The line has the population's deviation: n - 1 under the root makes the error of the mean of a sample.
    return None if spread is None or count is None or count < 2 else spread / math.sqrt(count - 1)


def curves(steps: Sequence[Line]) -> list[Curve]:
    """In the order in which they are shown; one of which no step knows anything is left out."""
    found = [
        Curve(name, title, unit, [_point(line, read, error) for line in steps], about)
        for name, title, unit, read, error, about in _CURVES
    ]
    return [curve for curve in found if curve.is_known]


_Read = Callable[[Mapping[str, Any]], float | None]


def _field(name: str) -> _Read:
    return lambda line: number(line.get(name))


def _metric(name: str) -> _Read:
    def read(line: Mapping[str, Any]) -> float | None:
        metrics = line.get("metrics")
        return number(metrics.get(name)) if isinstance(metrics, Mapping) else None

    return read


def _trained_per_second(line: Mapping[str, Any]) -> float | None:
    tokens, seconds = number(line.get("trained_tokens")), number(line.get("step_s"))
    return None if tokens is None or not seconds else tokens / seconds


def _unknown(line: Mapping[str, Any]) -> float | None:
    return None


_CURVES: tuple[tuple[str, str, str, _Read, _Read, str], ...] = (
    ("reward", "Reward", "mean ± s.e.", _field("reward_mean"), reward_error, "bars: one s.e. over the step's rollouts"),
    ("loss", "Loss", "", _field("loss"), _unknown, ""),
    ("ratio", "Ratio new : old", "mean", _field("ratio_mean"), _unknown, "1 = on policy"),
    ("kl", "KL(old, new)", "nats", _field("kl"), _unknown, ""),
    ("entropy", "Entropy", "nats", _field("entropy"), _unknown, ""),
    ("grad_norm", "Gradient norm", "", _field("grad_norm"), _unknown, "before clipping"),
    ("staleness", "Staleness", "steps", _field("staleness_mean"), _unknown, "mean over rows"),
    ("throughput", "Trained tokens", "per second", _trained_per_second, _unknown, "by the whole step's time"),
    ("length", "Sampled per rollout", "tokens", _metric("completions/mean_length"), _unknown, "mean"),
    ("step_s", "Step", "s", _field("step_s"), _unknown, ""),
    ("wait_s", "Waiting for groups", "s", _field("wait_s"), _unknown, ""),
    ("sync_s", "Weight update", "s", _field("sync_s"), _unknown, ""),
)


def _point(line: Mapping[str, Any], read: _Read, error: _Read) -> Point:
    value = read(line)
    drawn = None if value is None or abs(value) > _LARGEST else value
    return Point(int(line["step"]), drawn, None if drawn is None else error(line))

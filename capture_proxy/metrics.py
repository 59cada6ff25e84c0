"""Counts and times since the gateway started, and their Prometheus text.

Owns the names of the metrics and the text exposition format 0.0.4
(https://prometheus.io/docs/instrumenting/exposition_formats/). Written to by `turn` and `gateway`, read by `admin`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Counter:
    """A sum per combination of label values, e.g. Counter("x_total", "Things.", "status").add("ok")."""

    def __init__(self, name: str, help_text: str, *labels: str) -> None:
        self.name, self.help_text, self.labels = name, help_text, labels
        self.values: dict[tuple[str, ...], float] = defaultdict(float)

    def add(self, *values: str, amount: float = 1) -> None:
        self.values[values] += amount

    def total(self, **where: str) -> int:
        """The sum over all combinations that have these label values."""
        wanted = [(self.labels.index(label), value) for label, value in where.items()]
        return int(sum(n for values, n in self.values.items() if all(values[i] == v for i, v in wanted)))

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self.help_text, "counter")
        if not self.labels and not self.values:
            yield f"{self.name} 0"
        for values, number in sorted(self.values.items()):
            yield f"{self.name}{_labels(self.labels, values)} {_number(number)}"


class Histogram:
    """Seconds, in cumulative buckets."""

    def __init__(self, name: str, help_text: str) -> None:
        self.name, self.help_text = name, help_text
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BUCKETS_S, seconds)] += 1
        self._sum += seconds

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self.help_text, "histogram")
        below = 0
        for bound, count in zip((*BUCKETS_S, None), self._counts, strict=True):
            below += count
            edge = "+Inf" if bound is None else _number(bound)
            yield f'{self.name}_bucket{{le="{edge}"}} {below}'
        yield f"{self.name}_sum {_number(self._sum)}"
        yield f"{self.name}_count {below}"


@dataclass
class Metrics:
    """Everything that is counted."""

    turns: Counter = field(
        default_factory=lambda: Counter("capture_turns_total", "Engine calls by how they ended.", "status", "dialect")
    )
    prompt_tokens: Counter = field(
        default_factory=lambda: Counter("capture_prompt_tokens_total", "Tokens of prompts, as the engine counts.")
    )
    completion_tokens: Counter = field(
        default_factory=lambda: Counter("capture_completion_tokens_total", "Tokens that the engine sampled.")
    )
    retries: Counter = field(
        default_factory=lambda: Counter(
            "capture_retries_total", "Repeated requests that got an earlier attempt's reply.", "how"
        )
    )
    refused: Counter = field(
        default_factory=lambda: Counter(
            "capture_refused_total", "Requests answered with an error, by its code.", "code"
        )
    )
    first_token: Histogram = field(
        default_factory=lambda: Histogram("capture_first_token_seconds", "From a call's arrival to its first token.")
    )
    duration: Histogram = field(
        default_factory=lambda: Histogram("capture_call_seconds", "From a call's arrival to its end, commit excluded.")
    )
    commit: Histogram = field(
        default_factory=lambda: Histogram("capture_commit_seconds", "Time to make a turn durable.")
    )

    def text(self, gauges: dict[str, tuple[str, float]]) -> str:
        """The exposition. `gauges` maps a name to (help, value) for what is read off at this moment."""
        known = (self.turns, self.prompt_tokens, self.completion_tokens, self.retries, self.refused)
        lines = [line for metric in (*known, self.first_token, self.duration, self.commit) for line in metric.lines()]
        for name, (help_text, value) in gauges.items():
            lines += [*_head(name, help_text, "gauge"), f"{name} {_number(value)}"]
        return "\n".join(lines) + "\n"


def _head(name: str, help_text: str, kind: str) -> Iterator[str]:
    escaped = help_text.replace("\\", "\\\\").replace("\n", "\\n")
    yield f"# HELP {name} {escaped}"
    yield f"# TYPE {name} {kind}"


def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    if not names:
        return ""
    pairs = [f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True)]
    return "{" + ",".join(pairs) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))

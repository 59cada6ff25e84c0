"""Curves as SVG, made here so that a page needs no script and no library from elsewhere to show them.

Owns geometry and labels. No text of a model or an agent comes in: numbers, and titles of ours. Called by `pages`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from harness_trainer.view.series import Curve, Point

_WIDTH, _HEIGHT = 360, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 8, 8, 20
_MOST_POINTS = 400  # drawn; more are thinned out, the last one stays


@dataclass(frozen=True, slots=True)
class _Scale:
    low_x: float
    high_x: float
    low_y: float
    high_y: float

    def x(self, step: float) -> float:
        return _LEFT + (step - self.low_x) / (self.high_x - self.low_x) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - self.low_y) / (self.high_y - self.low_y) * (_HEIGHT - _TOP - _BOTTOM)


def svg(curve: Curve) -> str:
    """The chart as markup; a point that is unknown is a gap in the line."""
    points = _thinned(curve.points)
    known = [(point, point.value) for point in points if point.value is not None]
    scale = _scale(curve.points, known)
    parts = [
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(curve.title)} by step">',
        *_axes(scale),
        *(f'<polyline points="{" ".join(run)}"/>' for run in _runs(points, scale) if len(run) > 1),
    ]
    for point, value in known:
        x, y = scale.x(point.step), scale.y(value)
        if point.error is not None:
            low, high = scale.y(value - point.error), scale.y(value + point.error)
            parts.append(f'<line class="error" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2"><title>{escape(_label(point, value))}</title></circle>')
    return "".join([*parts, "</svg>"])


def labels(values: Sequence[float]) -> list[str]:
    """As few digits as tell them apart. Example: labels([0.9984, 1.0, 1.0016]) == ["0.9984", "1", "1.002"]."""
    told: list[str] = []
    for digits in range(3, 8):
        told = [f"{value:.{digits}g}" for value in values]
        if len(set(told)) == len(values):
            break
    return told


def _label(point: Point, value: float) -> str:
    error = "" if point.error is None else f" ± {point.error:.3g}"
    return f"step {point.step}: {value:.6g}{error}"


def _thinned(points: Sequence[Point]) -> list[Point]:
    stride = math.ceil(len(points) / _MOST_POINTS) or 1
    kept = list(points[::stride])
    return kept if not points or kept[-1] is points[-1] else [*kept, points[-1]]


def _scale(points: Sequence[Point], known: Sequence[tuple[Point, float]]) -> _Scale:
    ends = [value + sign * (point.error or 0.0) for point, value in known for sign in (-1, 1)] or [0.0]
    low, high = min(ends), max(ends)
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    steps = [point.step for point in points] or [0]
    first, last = min(steps), max(steps)
    return _Scale(first, last if last > first else first + 1, low - room, high + room)


def _axes(scale: _Scale) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    values = [scale.low_y + share * (scale.high_y - scale.low_y) for share in (1 / 22, 0.5, 21 / 22)]  # 5 % of room
    for value, label in zip(values, labels(values), strict=True):
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 4}" y="{y + 3:.1f}" text-anchor="end">{label}</text>')
    parts.append(f'<text x="{_LEFT}" y="{bottom + 14}">{scale.low_x:g}</text>')
    parts.append(f'<text x="{right}" y="{bottom + 14}" text-anchor="end">step {scale.high_x:g}</text>')
    return parts


def _runs(points: Sequence[Point], scale: _Scale) -> list[list[str]]:
    runs: list[list[str]] = [[]]
    for point in points:
        if point.value is None:
            runs.append([])
        else:
            runs[-1].append(f"{scale.x(point.step):.1f},{scale.y(point.value):.1f}")
    return runs

"""How data becomes a page: the template environment, and how numbers, times and unknowns are written.

Owns looks in general; each page is a file in `templates/`. Every value is escaped by Jinja2 and made `visible`, and
None is the word "unknown", so that no template can forget it. Called by `app`.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

import jinja2
from markupsafe import Markup

from harness_trainer.view import charts
from harness_trainer.view.visible import visible

UNKNOWN = Markup('<span class="unknown">unknown</span>')
_LOGPROB_CLASSES = ((-0.05, 0), (-0.3, 1), (-0.7, 2), (-1.4, 3), (-2.5, 4), (-4.0, 5), (-6.0, 6))


class Pages:
    """The templates, compiled when they are first used."""

    def __init__(self) -> None:
        self._environment = jinja2.Environment(
            loader=jinja2.PackageLoader("harness_trainer.view"),
            autoescape=True,
            finalize=_finalized,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters.update(
            num=num,
            at=at,
            seconds=seconds,
            size=size,
            q=quoted,
            chart=_chart,
            lp=logprob_class,
            query=_query,
            flat=_flat,
            urlpath=_path,
        )

        self._environment.globals["unknown"] = UNKNOWN

    def render(self, name: str, *, fragment: bool = False, **values: Any) -> str:
        """`fragment`: the content alone, to be put into a page that is open."""
        template = self._environment.get_template(name)
        if not fragment:
            return template.render(values)
        return "".join(template.blocks["content"](template.new_context(values)))


def num(value: Any) -> Any:
    """Example: num(0.123456) == "0.1235", num(1234567) == "1,234,567", num(None) is UNKNOWN."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return UNKNOWN
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if value else "0"


def at(value: Any) -> Any:
    """Unix seconds as a time in UTC. Example: at(1796021400.7) == "2026-11-30 06:50:00"."""
    try:
        moment = datetime.datetime.fromtimestamp(float(value), datetime.UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return UNKNOWN
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def seconds(value: Any) -> Any:
    """Example: seconds(0.25) == "0.25 s", seconds(3725) == "1 h 02 min"."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return UNKNOWN
    if value < 60:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    minutes, rest = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def size(value: int) -> str:
    """Example: size(1536) == "1.5 kB"."""
    if value < 1000:
        return f"{value} B"
    return f"{value / 1000:.1f} kB" if value < 1_000_000 else f"{value / 1e6:.1f} MB"


def quoted(value: Any) -> str:
    """One part of an address."""
    return quote(str(value), safe="", errors="replace")


def _path(value: Any) -> str:
    return quote(str(value), errors="replace")


def logprob_class(value: float | None) -> str:
    """The class that colours a token: lp0 = near certain to lp7 = hardly expected; lpu = not known."""
    if value is None or not math.isfinite(value):
        return "lpu"
    return next((f"lp{number}" for low, number in _LOGPROB_CLASSES if value >= low), "lp7")


def _chart(curve: Any) -> Markup:
    return Markup(charts.svg(curve))  # numbers, and titles of ours that are escaped there


def _query(values: Mapping[str, Any], **changes: Any) -> str:
    """An address's query with some values changed; None = left out."""
    merged = {name: value for name, value in {**values, **changes}.items() if value not in (None, "")}
    return urlencode(merged, errors="replace")


def _flat(counts: Mapping[str, Any]) -> str:
    """Example: _flat({"ok": 3, "truncated": 1}) == "3 ok, 1 truncated"."""
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def _finalized(value: Any) -> Any:
    if value is None:
        return UNKNOWN
    if isinstance(value, str) and not isinstance(value, Markup):
        return visible(value)
    return value

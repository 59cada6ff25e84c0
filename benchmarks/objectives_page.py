"""The tables of docs/objectives.md, made of what `benchmarks.objectives` has measured.

    python -m benchmarks.objectives_page [--json docs/learning-curves.json] [--page docs/objectives.md]

Owns the statistics and their looks; rewrites the page from `MARK` to its end and nothing before it.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.learning import mean_and_error
from benchmarks.objectives import CHOICES, RESULTS, Run, read_results
from harness_trainer.rundir import write_atomically

PAGE = Path("docs/objectives.md")
MARK = "<!-- from here on made by `python -m benchmarks.objectives_page` -->\n"

# The rollouts of the first two steps are of the model that the run started from: with max_staleness 1 they are begun
# before the first update, but for a group that replaces a dropped one.
FIRST, LAST = 2, 3
CURVE = 2  # steps that share a column of the curves


def grouped(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs of the same objective and length together: the default's first, then as `CHOICES` has them."""
    names = list(CHOICES)

    def key(run: Run) -> tuple[int, int]:
        return names.index(run["name"]), run["num_steps"]

    return [list(group) for _, group in itertools.groupby(sorted(runs, key=key), key)]


def rewards(run: Run, first: int, last: int) -> list[float]:
    """Of all rollouts of the steps from `first` to `last`, counted from 1."""
    return [reward for step in run["steps"] if first <= step["step"] <= last for reward in step["rewards"]]


def start_of(run: Run) -> list[float]:
    return rewards(run, 1, FIRST)


def end_of(run: Run) -> list[float]:
    return rewards(run, run["num_steps"] - LAST + 1, run["num_steps"])


def errors_apart(before: Sequence[float], after: Sequence[float]) -> float | None:
    """How much higher the second mean is, in standard errors of the difference; None = nothing varies."""
    (first, first_error), (last, last_error) = mean_and_error(list(before)), mean_and_error(list(after))
    error = math.hypot(first_error, last_error)
    return (last - first) / error if error else None


def page(runs: Sequence[Run]) -> str:
    """All that stands below the mark."""
    groups = grouped(runs)
    return "\n".join(["", "## Measured", "", *_intro(runs), "", *_results(groups), "", *_curves(groups), ""])


def _intro(runs: Sequence[Run]) -> list[str]:
    pooled, error = mean_and_error([reward for run in runs for reward in start_of(run)])
    steps = " or ".join(str(number) for number in sorted({run["num_steps"] for run in runs}))
    text = (
        f"`python -m benchmarks.objectives`, {len(runs)} runs of {steps} steps of 16 rollouts, each from the same "
        "SmolLM2-135M (float32, two shared CPU cores, learning rate 2e-5, `max_staleness` 1, replies of at most 48 "
        f"tokens). Start: the first {FIRST} steps, sampled before the first update but for groups that replaced "
        "dropped ones, and so by the model that all runs share (over all runs "
        f"{pooled:.3f} ± {error:.3f}); end: the last {LAST}. Runs of one objective and length are a row together, also "
        "of one seed: which rollouts a step trains on depends on the moment, so none repeats another. ± is one "
        "standard error over rollouts, which knows nothing of how far apart whole runs are. Rise: end less start, in "
        "standard errors of that difference, of all together and of each run; beside default: the end less that of "
        "the default's runs of as many steps, likewise. The gradient's norm before clipping, the KL to the policy that "
        "sampled and the share of tokens that a clip, a cut or a mask has bounded are means over steps; the ratio is "
        "the largest of any token. Settings that a row does not name are the default's."
    )
    return textwrap.wrap(text, 120, break_on_hyphens=False)


def _results(groups: Sequence[Sequence[Run]]) -> list[str]:
    header = (
        "run", "settings", "steps", "runs", "start", "end", "rise", "each run's", "beside default", "gradient",
        "largest ratio", "KL", "bounded", "min each",
    )  # fmt: skip
    defaults = {runs[0]["num_steps"]: runs for runs in groups if runs[0]["name"] == "default"}
    return _table(header, [_result(runs, defaults.get(runs[0]["num_steps"], ())) for runs in groups])


def _result(runs: Sequence[Run], defaults: Sequence[Run]) -> list[str]:
    """`defaults`: the default's runs of as many steps."""
    one = runs[0]
    start, end, usual = _of_all(start_of, runs), _of_all(end_of, runs), _of_all(end_of, defaults)
    bounded = "importance_bounded_fraction" if "importance_correction" in one["settings"] else "clip_fraction"
    settings = ", ".join(f"`{name}: {value}`" for name, value in one["settings"].items())
    beside = errors_apart(usual, end) if usual and one["name"] != "default" else None
    return [
        one["name"],
        settings or "-",
        str(one["num_steps"]),
        str(len(runs)),
        "{:.3f} ± {:.3f}".format(*mean_and_error(start)),
        "{:.3f} ± {:.3f}".format(*mean_and_error(end)),
        _number(errors_apart(start, end), "+.1f"),
        " ".join(_number(errors_apart(start_of(run), end_of(run)), "+.1f") for run in runs),
        _number(beside, "+.1f"),
        _number(_mean(runs, "grad_norm"), ".2f"),
        _number(max(_known(runs, "ratio_max"), default=None), ".2f"),
        _number(_mean(runs, "kl"), ".4f"),
        _number(_mean(runs, bounded), ".1%"),
        f"{statistics.fmean(run['minutes'] for run in runs):.1f}",
    ]


def _curves(groups: Sequence[Sequence[Run]]) -> list[str]:
    longest = max(runs[0]["num_steps"] for runs in groups)
    windows = [(first, min(first + CURVE - 1, longest)) for first in range(1, longest + 1, CURVE)]
    header = ["mean reward of steps", "runs", *(f"{first} to {last}" for first, last in windows)]
    return _table(header, [[runs[0]["name"], str(len(runs)), *_curve(runs, windows)] for runs in groups])


def _curve(runs: Sequence[Run], windows: Iterable[tuple[int, int]]) -> list[str]:
    parts = ([reward for run in runs for reward in rewards(run, *window)] for window in windows)
    return [_number(statistics.fmean(part) if part else None, ".3f") for part in parts]


def _of_all(which: Callable[[Run], list[float]], runs: Iterable[Run]) -> list[float]:
    return [reward for run in runs for reward in which(run)]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _known(runs: Iterable[Run], name: str) -> list[float]:
    return [step[name] for run in runs for step in run["steps"] if step[name] is not None]


def _mean(runs: Iterable[Run], name: str) -> float | None:
    known = _known(runs, name)
    return statistics.fmean(known) if known else None


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    runs = read_results(options.json)
    if not runs:
        parser.error(f"{options.json} holds no run: `python -m benchmarks.objectives` makes some")
    before, mark, _ = options.page.read_text(encoding="utf-8").partition(MARK)
    if not mark:
        parser.error(f"{options.page} lacks the line {MARK.strip()!r}: put it where the tables shall begin")
    write_atomically(options.page, before + mark + page(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())

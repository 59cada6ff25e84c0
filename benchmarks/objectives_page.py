"""The tables of docs/objectives.md, made of what `benchmarks.objectives` has measured.

    python -m benchmarks.objectives_page [--json docs/learning-curves.json] [--page docs/objectives.md]

Owns the statistics and their looks; rewrites the page from `MARK` to its end and nothing before it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import textwrap
from collections.abc import Iterable, Sequence
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


def in_order(runs: Iterable[Run]) -> list[Run]:
    """The default's runs first, then as `CHOICES` has them; by steps and seed within a name."""
    names = list(CHOICES)
    return sorted(runs, key=lambda run: (names.index(run["name"]), run["num_steps"], run["seed"]))


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
    runs = in_order(runs)
    return "\n".join(["", "## Measured", "", *_intro(runs), "", *_results(runs), "", *_curves(runs), ""])


def _intro(runs: Sequence[Run]) -> list[str]:
    pooled, error = mean_and_error([reward for run in runs for reward in start_of(run)])
    steps = " or ".join(str(number) for number in sorted({run["num_steps"] for run in runs}))
    text = (
        f"`python -m benchmarks.objectives`, {len(runs)} runs of {steps} steps of 16 rollouts, each from the same "
        "SmolLM2-135M (float32, two shared CPU cores, learning rate 2e-5, `max_staleness` 1, replies of at most 48 "
        f"tokens). Start: the first {FIRST} steps, sampled before the first update but for groups that replaced "
        "dropped ones, and so by the model that all runs share (over all runs "
        f"{pooled:.3f} ± {error:.3f}); end: the last {LAST}. ± is one standard error over rollouts. Rise: end less the "
        "run's own start, in standard errors of that difference; beside default: its end less that of all the "
        "default's runs of as many steps together, likewise. The gradient's norm before clipping, the KL to the "
        "policy that sampled and the share of tokens that a clip, a cut or a mask has bounded are means over steps; "
        "the ratio is the largest of any token. Settings that a row does not name are the default's."
    )
    return textwrap.wrap(text, 120, break_on_hyphens=False)


def _results(runs: Sequence[Run]) -> list[str]:
    header = (
        "run", "seed", "settings", "start", "end", "rise", "beside default", "gradient", "largest ratio", "KL",
        "bounded", "steps", "min",
    )  # fmt: skip
    return _table(header, [_result(run, _default_beside(run, runs)) for run in runs])


def _default_beside(run: Run, runs: Sequence[Run]) -> list[float]:
    """The end's rewards of the default's runs of as many steps."""
    default = [known for known in runs if known["name"] == "default" and known["num_steps"] == run["num_steps"]]
    return [reward for known in default for reward in end_of(known)]


def _result(run: Run, default: Sequence[float]) -> list[str]:
    bounded = "importance_bounded_fraction" if "importance_correction" in run["settings"] else "clip_fraction"
    settings = ", ".join(f"`{name}: {value}`" for name, value in run["settings"].items())
    beside = errors_apart(default, end_of(run)) if default and run["name"] != "default" else None
    return [
        run["name"],
        str(run["seed"]),
        settings or "-",
        "{:.3f} ± {:.3f}".format(*mean_and_error(start_of(run))),
        "{:.3f} ± {:.3f}".format(*mean_and_error(end_of(run))),
        _number(errors_apart(start_of(run), end_of(run)), "+.1f"),
        _number(beside, "+.1f"),
        _number(_mean(run, "grad_norm"), ".2f"),
        _number(max(_known(run, "ratio_max"), default=None), ".2f"),
        _number(_mean(run, "kl"), ".4f"),
        _number(_mean(run, bounded), ".1%"),
        str(len(run["steps"])),
        f"{run['minutes']:.1f}",
    ]


def _curves(runs: Sequence[Run]) -> list[str]:
    longest = max(run["num_steps"] for run in runs)
    windows = [(first, min(first + CURVE - 1, longest)) for first in range(1, longest + 1, CURVE)]
    header = ["mean reward of steps", "seed", *(f"{first} to {last}" for first, last in windows)]
    return _table(
        header,
        [
            [run["name"], str(run["seed"])]
            + [
                _number(statistics.fmean(values) if (values := rewards(run, *window)) else None, ".3f")
                for window in windows
            ]
            for run in runs
        ],
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _known(run: Run, name: str) -> list[float]:
    return [step[name] for step in run["steps"] if step[name] is not None]


def _mean(run: Run, name: str) -> float | None:
    known = _known(run, name)
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

"""What a task says about its own grading, in [metadata]: reward ranges, weights of named rewards, where tests run.

    [metadata]
    reward_range = [0.0, 1.0]                      # of the reward that is trained on
    reward_weights = { tests = 0.8, style = 0.2 }  # how reward.json's names become that reward
    reward_ranges = { style = [0.0, 10.0] }        # of single names
    verify = "same"                                # or "fresh": wins over the run's `auto`

These keys are ours; Harbor ignores them. Read by `rewards`, and once when tasks are loaded, so that a slip in them
stops a run before it starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness_trainer.tasks.base import Task
from harness_trainer.tasks.fields import Fields, is_number

Range = tuple[float, float]  # lowest and highest, both allowed


@dataclass(frozen=True, slots=True)
class GradingRules:
    """Example: GradingRules((0.0, 1.0), weights={"tests": 0.8, "style": 0.2}, ranges={"style": (0.0, 1.0)})."""

    reward_range: Range = (0.0, 1.0)
    weights: Mapping[str, float] = field(default_factory=dict)  # empty = `reward`, or the only name there is
    ranges: Mapping[str, Range] = field(default_factory=dict)  # of single names; a name that is absent may be anything
    verify: str | None = None  # "same" or "fresh"; None = the run decides


def grading_rules(task: Task) -> GradingRules:
    """Raises TaskError that names the field and what it should hold."""
    fields = Fields(task.path, {"metadata": task.metadata})
    weights = fields.table("metadata", "reward_weights")
    for name, weight in weights.items():
        if not is_number(weight):
            raise fields.wrong(("metadata", "reward_weights", name), weight, "a number")
    if weights and not any(weights.values()):
        raise fields.wrong(("metadata", "reward_weights"), weights, "weights of which one at least is not 0")
    ranges = {name: _range(fields, name, value) for name, value in fields.table("metadata", "reward_ranges").items()}
    return GradingRules(
        reward_range=task.reward_range,
        weights={name: float(weight) for name, weight in weights.items()},
        ranges=ranges,
        verify=fields.choice("metadata", "verify", among=("same", "fresh")),
    )


def _range(fields: Fields, name: str, value: Any) -> Range:
    if not isinstance(value, list) or len(value) != 2 or not all(map(is_number, value)) or value[0] >= value[1]:
        raise fields.wrong(("metadata", "reward_ranges", name), value, "two rising numbers like [0.0, 1.0]")
    return float(value[0]), float(value[1])

"""Rules on optimizer steps: store, metrics.jsonl and checkpoints tell the same.

Owns those rules and no reading, as `attempts` does. What a step's tokens are is `tokens`' business.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from harness_trainer.audit.records import Found, Records


def steps_without_gap(records: Records) -> Iterator[Found]:
    """The lines of metrics.jsonl are the steps 1, 2, ... in order, each once, up to the last when it is finished."""
    steps = [line.get("step") for line in records.steps]
    for place, step in enumerate(steps, 1):
        if step != place:
            yield "metrics.jsonl", f"line {place} is of step {step}"
            return
    if records.state == "finished" and len(steps) != records.max_steps:
        yield "metrics.jsonl", f"{len(steps)} steps where {records.max_steps} were to be taken"


def steps_of_store(records: Records) -> Iterator[Found]:
    """The store has groups for every step of metrics.jsonl, as many as it says; at most one step is ahead of it."""
    sizes = Counter(group.trained_step for group in records.training_groups if group.trained_step is not None)
    for line in records.steps:
        step = line.get("step", 0)
        if sizes[step] != line.get("num_groups"):
            yield f"step {step}", f"metrics.jsonl says {line.get('num_groups')} groups, the store has {sizes[step]}"
    known = {line.get("step", 0) for line in records.steps}
    # A step's groups are marked before its line is written. A run may have been cut off between the two, and a live one
    # goes on while it is read.
    ahead = {"finished": 0, "interrupted": 1}.get(records.state, math.inf)
    for step in sorted(set(sizes) - known):
        if step > len(records.steps) + ahead or step <= len(records.steps):
            yield f"step {step}", f"the store has {sizes[step]} groups for it, metrics.jsonl has no line"


def checkpoints_of_store(records: Records) -> Iterator[Found]:
    """A checkpoint's groups are those of the store, step by step, and none of them is in two steps."""
    for step, state in records.checkpoints.items():
        what = f"checkpoint-{step}"
        counts = Counter(group for ids in state.trained_groups.values() for group in ids)
        for group, count in counts.items():
            if count > 1:
                yield what, f"it says that group {group} was trained {count} times"
        for trained in range(1, step + 1):
            ours, stores = sorted(state.trained_groups.get(trained, [])), records.groups_of_step(trained)
            if ours != stores:
                yield what, f"of step {trained} it has the groups {ours}, the store {stores}"


def finished_has_checkpoint(records: Records) -> Iterator[Found]:
    """A finished run has a whole checkpoint of its last step."""
    last = records.max_steps
    if records.state == "finished" and last > 0 and last not in records.checkpoints:
        yield (
            f"checkpoint-{last}",
            f"it is missing or cut off; whole are those of the steps {list(records.checkpoints)}",
        )


def versions_rise(records: Records) -> Iterator[Found]:
    """Each step published a policy of its own, newer than all before, known to the store as the step's."""
    before = 0
    for line in records.steps:
        step, version = line.get("step", 0), line.get("policy_version", 0)
        known = records.stored.versions.get(version)
        if version <= before:
            yield f"step {step}", f"it published v{version} after v{before}"
        elif version > records.stored.used_up:
            yield f"step {step}", f"it published v{version}, and the store knows none above v{records.stored.used_up}"
        elif known is not None and known.step != step:
            yield f"step {step}", f"it published v{version}, which the store has as that of step {known.step}"
        before = max(before, version)
    for step, state in records.checkpoints.items():
        told = next((line.get("policy_version") for line in records.steps if line.get("step") == step), None)
        if told is not None and told != state.policy_version:
            yield f"checkpoint-{step}", f"it has v{state.policy_version}, metrics.jsonl says v{told}"


RULES = (steps_without_gap, steps_of_store, checkpoints_of_store, finished_has_checkpoint, versions_rise)

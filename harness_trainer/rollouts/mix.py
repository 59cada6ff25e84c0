"""Which agent a group of rollouts gets, where a run has several.

Owns what `--harness opencode:3,pi` means and that a group never mixes agents: rollouts of one group are compared with
each other, and another agent is another task. A task may name its own: `[metadata] harness = "pi"`, or a file in its
folder. Used by the supervisor (all are installed before anything starts) and by the runner.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from harness_trainer.errors import ConfigError, TaskError
from harness_trainer.harnesses import load_harness, pinned
from harness_trainer.harnesses.base import Harness
from harness_trainer.harnesses.command import PREFIX
from harness_trainer.harnesses.entry import entered
from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.tasks import Task

_SHARE = re.compile(r"(.+):(\d+)")
_WHOLE = (PREFIX,)  # forms of a single agent in which a comma or a number means nothing to us
_RENAME = "give one a `name` of its own in its file (a command is named after the file that it runs)"


@dataclass(frozen=True, slots=True)
class Mix:
    """Example: with the shares {"opencode": 3, "pi": 1}, three groups of four are opencode's."""

    harnesses: dict[str, Harness]  # by name: those with a share, then those that only tasks name
    shares: dict[str, int]  # groups of each pass over the shares
    of_tasks: dict[str, str]  # task name -> harness name, of the tasks that name their own
    seed: int

    def of_group(self, group_id: int, task: Task) -> str:
        """The name of the group's agent; the same id and task always mean the same one."""
        if task.name in self.of_tasks:
            return self.of_tasks[task.name]
        each = [name for name, share in self.shares.items() for _ in range(share)]
        pass_, position = divmod(group_id, len(each))
        # In an order of its own per pass, so that shares and tasks, which come in passes too, never run in step.
        random.Random(f"harness:{self.seed}:{pass_}").shuffle(each)
        return each[position]

    def evaluated(self, tasks: Sequence[Task], *, every_agent: bool, num: int | None) -> list[tuple[str, str]]:
        """Name of the task and of the agent of each group of an evaluation; `num` as in `RunnerSpec.num_evaluated`."""
        pairs = []
        for n, task in enumerate(tasks):
            whole = every_agent and task.name not in self.of_tasks
            pairs += [(task.name, name) for name in (self.shares if whole else [self.of_group(n, task)])]
        return [pairs[n % len(pairs)] for n in range(len(pairs) if num is None else num)]


def load_mix(spec: str, tasks: Sequence[Task], config: RolloutConfig) -> Mix:
    """All agents of a run, as they are led to the gateway in it.

    Raises ConfigError, and TaskError naming the task whose own agent cannot be used.
    """
    harnesses: dict[str, Harness] = {}
    shares: dict[str, int] = {}
    for one, share in shares_of(spec):
        harness = entered(load_harness(one), config.entry)
        if harness.name in harnesses:
            same = harnesses[harness.name] == harness
            advice = "give each agent once, with its share behind it" if same else f"they differ: {_RENAME}"
            raise ConfigError(f"--harness names {harness.name!r} twice: {advice}")
        harnesses[harness.name], shares[harness.name] = harness, share
    of_tasks = {}
    for task in tasks:
        if (own := _own(task, config)) is not None:
            of_tasks[task.name] = own.name
            if harnesses.setdefault(own.name, own) != own:
                raise TaskError(
                    f"task {task.name!r}, [metadata] harness: another agent of the run is called {own.name!r} too, and "
                    f"the two differ: {_RENAME}"
                )
    return Mix(harnesses, shares, of_tasks, config.seed)


def pin_harness(spec: str) -> str:
    """The spec with the paths of files made absolute: the runner works in another folder."""
    shares = shares_of(spec)
    if len(shares) == 1 and shares[0][1] == 1:
        return pinned(shares[0][0])
    return ",".join(f"{pinned(one)}:{share}" for one, share in shares)


def shares_of(spec: str) -> list[tuple[str, int]]:
    """Example: "opencode:3, pi" is [("opencode", 3), ("pi", 1)]."""
    if spec.startswith(_WHOLE):
        return [(spec, 1)]
    shares = []
    for word in (word.strip() for word in spec.split(",")):
        found = _SHARE.fullmatch(word)
        one, share = (found[1].strip(), int(found[2])) if found else (word, 1)
        if not one or share < 1:
            raise ConfigError(
                f"--harness {spec!r}: {word!r} is no agent with a share of at least 1; write opencode:3,pi:1"
            )
        shares.append((one, share))
    return shares


def _own(task: Task, config: RolloutConfig) -> Harness | None:
    name = task.metadata.get("harness")
    if name is None:
        return None
    if not isinstance(name, str):
        raise TaskError(f"task {task.name!r}: [metadata] harness must be the name of an agent, not {name!r}")
    folder = task.path if task.path.is_dir() else task.path.parent  # the same for every process, wherever it works
    try:
        return entered(load_harness(name, folder), config.entry)
    except ConfigError as error:
        raise TaskError(f"task {task.name!r}, [metadata] harness: {error}") from error

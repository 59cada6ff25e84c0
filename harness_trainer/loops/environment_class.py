"""Environment classes, exactly as TRL's `environment_factory` takes them, as `loops.base.Environment`.

    class Wordle:
        def __init__(self): ...                                  # optional; no arguments
        def reset(self, **kwargs) -> str | None: ...             # every column of the row; what the model sees first
        def guess(self, guess: str) -> str: ...                  # each public method is a tool (`class_kinds`)
        def get_reward(self) -> float | None: ...                # optional, beside reward functions

Owns the classes, their instances and whose row is whose; one episode is `class_episode`'s.

**Instances.** Each episode has a fresh one, made before it and closed after it: no state and no reward can be left for
the next, a lost session never poisons a later game, and each connection lasts one episode, which is what the guide asks
of `reset`. A class that opens its client in `__init__` works as it is: OpenEnv clients in its attributes are closed for
it (`held_clients`). With `instances="reused"` they are pooled as in TRL, constructed once and reset often, and `reset`
must make one ready; one whose episode was lost or given up is not used again.

**Several classes.** A dict of them, by the row's column `environment`, which is then not passed to `reset`: an episode
is shown the tools of its own class only. Wrong names are found before the run begins.

**Rewards.** The sum of the reward functions and of `get_reward` (named after the class), weighted, over those that say
something. With `reward_scope="group"` the functions see a whole group at once (`group_rewards`).

**Places.** A server that refuses a session of a class's clients tells how many it allows: from then on no more episodes
are open than that, for a class that keeps one client. Where there are several classes nobody knows whose server it is.
A refusal that is not our own doing is waited out with back-off, for `capacity_patience_s`.

Called by `open_source` through `tool_loop`; settings are `environments.EnvironmentClassConfig`.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness_trainer.environments.class_config import EnvironmentClassConfig
from harness_trainer.loops.base import ROW, EnvironmentFault, EpisodeLost
from harness_trainer.loops.class_episode import ClassEpisode, Rules
from harness_trainer.loops.class_kinds import Kind, check_factory, read_kind
from harness_trainer.loops.group_rewards import KeptEpisodes
from harness_trainer.loops.held_instance import Held
from harness_trainer.loops.loading import load_target
from harness_trainer.loops.places import Places
from harness_trainer.loops.reward_functions import RewardFunction, Rewards, free_name, load_rewards
from harness_trainer.loops.rows import load_rows
from harness_trainer.own_thread import OwnThread
from harness_trainer.tasks import Task

COLUMN = "environment"  # of a row: which of several classes


class ClassEnvironment:
    """`loops.base.Environment` of one class, or of several by name. Open it once; whatever is wrong is told then."""

    def __init__(self, config: EnvironmentClassConfig, rows: Path) -> None:
        self.name = config.name or config.target.rpartition(":")[2]
        self.group_rewards = KeptEpisodes() if config.reward_scope == "group" else None
        self._places = Places(config.max_episodes)
        self._config = config
        self._rows = rows
        self._kinds: dict[str | None, Kind] = {}  # None = the only one, which rows need not name
        self._rewards = Rewards([], {}, {})
        self._pool: dict[str | None, list[Held]] = {}

    @property
    def max_episodes(self) -> int | None:
        return self._places.limit

    async def __aenter__(self) -> Self:
        """Raises EnvironmentFault."""
        target = await asyncio.to_thread(load_target, self._config.target)
        factories = target if isinstance(target, dict) else {None: target}
        if not factories:
            raise EnvironmentFault(f"{self._config.target} is an empty dict: name at least one environment class in it")
        try:
            for name, factory in factories.items():
                await self._probe(name, factory)
            functions = await asyncio.to_thread(load_rewards, self._config.rewards)
            self._rewards = _named(functions, list(self._kinds.values()), self._config.reward_weights)
            if self.group_rewards is not None and not functions:
                raise EnvironmentFault("reward_scope is group, and no function judges one: give --env.rewards")
        except BaseException:
            await self._close_pool()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.group_rewards is not None:
            await self.group_rewards.close()
        await self._close_pool()

    async def _probe(self, name: str | None, factory: Any) -> None:
        """Make one, as TRL does, so that a constructor that fails is known before a model is loaded for it."""
        label = name or str(getattr(factory, "__name__", self._config.target.rpartition(":")[2]))
        check_factory(factory, label)
        thread = OwnThread(f"environment {label}")
        try:
            instance = await thread.call(factory)
        except Exception as error:  # whatever a person's class raises
            thread.close()
            raise EnvironmentFault(f"{label} could not be made: {type(error).__name__}: {error}") from error
        try:
            kind = self._kinds[name] = read_kind(factory, instance)
        except BaseException:
            thread.close()
            raise
        await self._give_back(name, Held(kind, instance, thread))

    async def tasks(self) -> list[Task]:
        """Raises EnvironmentFault for a row that names no class of ours, or that `reset` does not take."""
        tasks = await asyncio.to_thread(load_rows, self._rows)
        seen: set[tuple[str | None, ...]] = set()
        for task in tasks:
            row = task.metadata[ROW]
            name = self._name_of(task)
            if (columns := (name, *row)) in seen:
                continue
            seen.add(columns)
            self._kinds[name].check_columns(self._for_reset(row), f"the row {task.name} of {self._rows}")
            for function in self._rewards.functions:
                function.check(row)
        return tasks

    @asynccontextmanager
    async def episode(self, task: Task, rollout_id: str) -> AsyncIterator[ClassEpisode]:
        name, kept = self._name_of(task), self.group_rewards
        rules = Rules(
            self._rewards,
            self._config.stop_when_done,
            self._config.capacity_patience_s,
            self._places if None in self._kinds else None,
            kept,
        )
        async with self._places.held():
            held = await self._take(name, rollout_id)
            row = copy.deepcopy(task.metadata[ROW])  # its siblings' and the next epoch's, whatever `reset` does
            try:
                yield ClassEpisode(rollout_id, held, row, self._for_reset(row), rules)
            finally:
                if kept is not None and kept.has(rollout_id):
                    await held.end_sessions()
                else:
                    await self._give_back(name, held)

    def _name_of(self, task: Task) -> str | None:
        if None in self._kinds:
            return None
        name = task.metadata[ROW].get(COLUMN)
        if not isinstance(name, str) or name not in self._kinds:
            known = ", ".join(str(each) for each in self._kinds)
            what = f"has {COLUMN} {name!r}" if name is not None else f"has no column {COLUMN!r}"
            raise EnvironmentFault(f"the row {task.name} of {self._rows} {what}: it must be one of {known}")
        return name

    def _for_reset(self, row: dict[str, Any]) -> dict[str, Any]:
        """With several classes the column that chooses is not for `reset`, as in TRL."""
        return row if None in self._kinds else {key: value for key, value in row.items() if key != COLUMN}

    async def _take(self, name: str | None, rollout_id: str) -> Held:
        if pool := self._pool.get(name):
            return pool.pop()
        kind = self._kinds[name]
        thread = OwnThread(f"episode {rollout_id}")
        try:
            return Held(kind, await thread.call(kind.make), thread)
        except BaseException as error:
            thread.close()
            if not isinstance(error, Exception):
                raise
            # One was made at the start, so this is no fault of the class.
            raise EpisodeLost(f"{kind.name} could not be made: {type(error).__name__}: {error}") from error

    async def _give_back(self, name: str | None, held: Held) -> None:
        if self._config.instances == "reused" and not held.spoiled:
            self._pool.setdefault(name, []).append(held)
        else:
            await held.close()

    async def _close_pool(self) -> None:
        while self._pool:
            _, pool = self._pool.popitem()
            for held in pool:
                await held.close()


def _named(functions: list[RewardFunction], kinds: list[Kind], weights: Mapping[str, float]) -> Rewards:
    """Names for all rewards. Raises EnvironmentFault where nothing scores an episode, or a weight is of nothing."""
    own: dict[str, str] = {}
    for kind in kinds:
        if kind.rewards and kind.name not in own:
            own[kind.name] = free_name(kind.name, [*(each.name for each in functions), *own.values()])
    names = [*(function.name for function in functions), *own.values()]
    if not names:
        raise EnvironmentFault(
            "nothing rewards an episode: give --env.rewards file.py:function, or the class a method get_reward"
        )
    if unknown := [name for name in weights if name not in names]:
        raise EnvironmentFault(f"reward_weights names {unknown[0]!r}, which is none of the rewards {', '.join(names)}")
    return Rewards(functions, weights, own)

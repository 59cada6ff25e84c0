"""The synchronous way: an ORS environment as the three arguments of TRL's `GRPOTrainer`, as TRL's `OpenRewardSpec`.

    spec = OrsSpec("http://127.0.0.1:8000")
    GRPOTrainer(..., train_dataset=spec.train_dataset, environment_factory=spec.environment_factory,
                reward_funcs=spec.reward_funcs)

Owns the bridge from a trainer's threads to sessions on an event loop of its own; the rules of episodes are those of our
own loop. It goes beyond TRL's class: an address needs no environment variable; no call runs twice; and where tasks have
tools of their own, each different list is an environment of its own (`environment_factory` is then a dict, and the rows
have a column `environment`), so that no task is shown another's tools. A task that cannot be looked at is a set-up
error. `OrsSpecs` is several environments in one trainer.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from harness_trainer.environments.ors_config import OrsConfig
from harness_trainer.loops.base import ROW, EnvironmentFault, EpisodeLost, Message
from harness_trainer.loops.ors.blocks import text_of
from harness_trainer.loops.ors.credentials import Credentials, read_credentials
from harness_trainer.loops.ors.environment import OrsEnvironment
from harness_trainer.loops.ors.episode import OrsEpisode, OrsState
from harness_trainer.loops.ors.signatures import as_function, python_names
from harness_trainer.tasks import Task

T = TypeVar("T")
Factory = Callable[[], Any]
Tools = list[dict[str, Any]]

_AT_ONCE = 8  # tasks looked at together
_CLOSE_WAIT_S = 10.0
COLUMN = "environment"
_NOWHERE = Path()  # a task of a server has no file


def outcome_reward(environments: Sequence[Any], **_: Any) -> list[float | None]:
    """The last reward of each episode that is not None; None where nothing scored it."""
    return [environment.reward for environment in environments]


class OrsSpec:
    """One ORS environment. Arguments as TRL's `OpenRewardSpec` has them, and `token`, `secret_domains`.

    `discover_task_tools`: look at each task's own tools before training, in a session that is closed again;
    `task_tools_discovery_index`: look at this task only, because all others have the same (one that has not is an error
    when it is reset); False: bind shared tools only.
    """

    def __init__(
        self,
        target: str,
        *,
        num_tasks: int | None = None,
        split: str = "train",
        indices: Sequence[int] | None = None,
        api_key: str | None = None,
        secrets: Mapping[str, str] | None = None,
        env_name: str | None = None,
        include_metadata: bool = True,
        discover_task_tools: bool = True,
        task_tools_discovery_index: int | None = None,
        token: str | None = None,
        secret_domains: Mapping[str, list[str]] | None = None,
    ) -> None:
        self._config = OrsConfig(
            target=target,
            num_tasks=num_tasks,
            split=split,
            indices=None if indices is None else ",".join(str(index) for index in indices),
            env_name=env_name,
            include_metadata=include_metadata,
        )
        if not self._config.is_url and api_key is None:
            api_key = read_credentials(self._config).api_key
        key = None if self._config.is_url else api_key
        self._credentials = Credentials(key, token, dict(secrets or {}), dict(secret_domains or {}))
        self._discover = discover_task_tools
        self._discovery_index = task_tools_discovery_index
        self._loop = _Loop()

    @property
    def reward_funcs(self) -> Callable[..., list[float | None]]:
        return outcome_reward

    @cached_property
    def train_dataset(self) -> Any:
        """A `datasets.Dataset`: prompt (empty: `reset` says it), task_index, split, and the fields of each task."""
        return _dataset(self.rows)

    @cached_property
    def environment_factory(self) -> Factory | dict[str, Factory]:
        """What makes environments; by the column `environment` where tasks have different tools."""
        factories = self.factories
        return next(iter(factories.values())) if len(factories) == 1 else factories

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of `train_dataset`; with the column `environment` where there are several kinds."""
        several = len(self._kinds) > 1
        kind_of = {index: name for name, (_, indices) in self._kinds.items() for index in indices}
        rows = [task.metadata[ROW] for task in self._tasks]
        return [{**row, COLUMN: kind_of[row["task_index"]]} if several else row for row in rows]

    @cached_property
    def factories(self) -> dict[str, Factory]:
        """One per different list of tools."""
        check = self._discover
        return {
            name: _adapter(name, tools, self._environment, self._loop, check=check)
            for name, (tools, _) in self._kinds.items()
        }

    def close(self) -> None:
        """Ends the sessions that are open. Idempotent; also done when the program ends."""
        self._loop.close()

    @cached_property
    def _environment(self) -> OrsEnvironment:
        environment = OrsEnvironment(self._config, credentials=self._credentials)
        return self._loop.enter(environment)

    @cached_property
    def _tasks(self) -> list[Task]:
        return self._loop.run(self._environment.tasks())

    @cached_property
    def _kinds(self) -> dict[str, tuple[Tools, list[int]]]:
        """Each different list of tools, by name, with the indices of its tasks."""
        every = [int(task.metadata[ROW]["task_index"]) for task in self._tasks]
        if not self._discover:
            return {self._environment.name: (self._loop.run(self._environment.shared_tools()), every)}
        looked_at = self._tasks
        if self._discovery_index is not None:
            looked_at = [task for task in self._tasks if task.metadata[ROW]["task_index"] == self._discovery_index]
            if not looked_at:
                raise EnvironmentFault(f"task_tools_discovery_index={self._discovery_index} is none of the tasks")
        lists = self._loop.run(self._look_at(looked_at))
        kinds: dict[str, tuple[Tools, list[int]]] = {}
        for task, tools in zip(looked_at, lists, strict=True):
            form = json.dumps(tools, sort_keys=True)
            kinds.setdefault(form, (tools, []))[1].append(int(task.metadata[ROW]["task_index"]))
        if self._discovery_index is not None:
            kinds = {form: (tools, every) for form, (tools, _) in kinds.items()}
        base = self._environment.name
        return {base if not n else f"{base}-{n + 1}": kind for n, kind in enumerate(kinds.values())}

    async def _look_at(self, tasks: Sequence[Task]) -> list[Tools]:
        places = asyncio.Semaphore(_AT_ONCE)

        async def look(task: Task) -> Tools:
            async with places:
                try:
                    async with self._environment.episode(task, "discovery") as episode:
                        await episode.start()
                        return tools_of(episode)
                except EnvironmentFault:
                    raise
                except Exception as error:
                    advice = "leave it out with indices=, or name a task to look at in its place"
                    what = f"the tools of task {task.metadata[ROW]['task_index']} cannot be listed"
                    raise EnvironmentFault(f"{what} ({error}): {advice} with task_tools_discovery_index=") from error

        try:
            async with asyncio.TaskGroup() as group:
                looks = [group.create_task(look(task)) for task in tasks]
        except* EnvironmentFault as faults:
            raise faults.exceptions[0] from None
        return [each.result() for each in looks]


class OrsSpecs:
    """Several ORS environments in one trainer. Example: `OrsSpecs({"echo": OrsSpec(url), "b": OrsSpec("owner/b")})`.

    The three properties are those of `OrsSpec`, with a column `environment`; fields that a task lacks are None.
    """

    reward_funcs = staticmethod(outcome_reward)

    def __init__(self, specs: Mapping[str, OrsSpec]) -> None:
        self._specs = dict(specs)

    @cached_property
    def train_dataset(self) -> Any:
        return _dataset([row for name, spec in self._specs.items() for row in self._rows(name, spec)])

    @cached_property
    def environment_factory(self) -> dict[str, Factory]:
        return {
            self._kind(name, spec, kind): factory
            for name, spec in self._specs.items()
            for kind, factory in spec.factories.items()
        }

    def close(self) -> None:
        for spec in self._specs.values():
            spec.close()

    def _rows(self, name: str, spec: OrsSpec) -> list[dict[str, Any]]:
        return [{**row, COLUMN: self._kind(name, spec, row.get(COLUMN))} for row in spec.rows]

    @staticmethod
    def _kind(name: str, spec: OrsSpec, kind: str | None) -> str:
        return name if len(spec.factories) == 1 else f"{name}/{kind}"


def tools_of(episode: OrsEpisode) -> Tools:
    """The session's own list, in the wire's form."""
    return [
        {"name": tool.name, "description": tool.description, "input_schema": dict(tool.parameters)}
        for tool in episode.tools
    ]


class _Adapter:
    """One environment of the trainer: reset often, one session at a time. Its methods are added by `_adapter`."""

    _environment: OrsEnvironment
    _loop: _Loop
    _bound: str | None  # the tools that it has, to compare a session's with; None = not compared

    def __init__(self) -> None:
        self._state = OrsState(0, "")
        self._context: AbstractAsyncContextManager[OrsEpisode] | None = None
        self._episode: OrsEpisode | None = None
        self._lost = False

    def reset(self, *, task_index: int = 0, split: str = "train", **_: Any) -> str:
        """A fresh session on the row's task; what it says first."""
        self._close()
        self._state, self._lost = OrsState(int(task_index), split), False
        row = {"task_index": int(task_index), "split": split}
        context = self._environment.episode(Task(f"{split}-{task_index}", _NOWHERE, "", metadata={ROW: row}), "sync")
        episode = self._loop.enter(context)
        self._context, self._episode, self._state = context, episode, episode.state
        opening = self._loop.run(episode.start())
        if self._bound is not None and json.dumps(tools_of(episode), sort_keys=True) != self._bound:
            raise EnvironmentFault(
                f"task {task_index} has other tools than those that were bound: leave task_tools_discovery_index out,"
                " so that each task is looked at"
            )
        return _told(opening)

    @property
    def reward(self) -> float | None:
        return None if self._lost else self._state.reward

    @property
    def rewards(self) -> list[float | None]:
        return self._state.rewards

    @property
    def metadata(self) -> list[dict[str, Any] | None]:
        return self._state.metadata

    @property
    def finished(self) -> bool:
        return self._state.finished

    @property
    def last_output(self) -> str:
        return self._state.last_output

    def _close(self) -> None:
        context, self._context, self._episode = self._context, None, None
        if context is not None:
            self._loop.leave(context)

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        if self._episode is None or self._lost:
            raise RuntimeError("there is no session: reset opens one")
        found = next((tool for tool in self._episode.tools if tool.name == name), None)
        if found is None:
            raise RuntimeError(f"this task has no tool {name}")
        try:
            reply = self._loop.run(found.call(arguments))
        except EpisodeLost:
            self._lost = True  # its reward is unknown from here on
            raise
        return text_of(reply.content)


def _adapter(name: str, tools: Tools, environment: OrsEnvironment, loop: _Loop, *, check: bool) -> Factory:
    """A class of its own with a method per tool, so that no other environment's tools are ever seen in it."""
    body: dict[str, Any] = {
        "_environment": environment,
        "_loop": loop,
        "_bound": json.dumps(tools, sort_keys=True) if check else None,
    }
    for spec, attribute in zip(tools, python_names(tool["name"] for tool in tools).values(), strict=True):
        hidden = attribute.startswith("_") or hasattr(_Adapter, attribute)  # the trainer shows no such method
        body[f"tool_{attribute}" if hidden else attribute] = as_function(spec, _Adapter._call)
    return type(f"Ors_{python_names([name])[name]}", (_Adapter,), body)


def _told(opening: Sequence[Message]) -> str:
    """TRL puts one text behind the row's user message: a conversation of several messages is told in order."""
    return "\n\n".join(text_of(message.get("content") or "") for message in opening)


def _dataset(rows: Sequence[Mapping[str, Any]]) -> Any:
    from datasets import Dataset

    columns = list(dict.fromkeys(name for row in rows for name in row))
    return Dataset.from_dict({name: [row.get(name) for row in rows] for name in columns})


class _Loop:
    """An event loop in a thread of its own, and the contexts that were entered there."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._entered: list[AbstractAsyncContextManager[Any]] = []

    def run(self, work: Awaitable[T]) -> T:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="ors", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        return asyncio.run_coroutine_threadsafe(_awaited(work), self._loop).result()

    def enter(self, context: AbstractAsyncContextManager[T]) -> T:
        entered: T = self.run(context.__aenter__())
        self._entered.append(context)
        return entered

    def leave(self, context: AbstractAsyncContextManager[Any]) -> None:
        if context in self._entered:
            self._entered.remove(context)
            self.run(context.__aexit__(None, None, None))

    def close(self) -> None:
        if self._loop is None or self._thread is None:
            return
        for context in reversed(list(self._entered)):
            self.leave(context)
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CLOSE_WAIT_S)
        if not thread.is_alive():
            loop.close()
        atexit.unregister(self.close)


async def _awaited(work: Awaitable[T]) -> T:
    return await work

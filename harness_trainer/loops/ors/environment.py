"""ORS environments as `loops.base.Environment`: a catalog name or an address, one session per episode.

Owns what is opened for a run: the HTTP client, the choice of environment, its tasks as rows. No variable of this
process is set for it, so that several ORS environments of several servers stand side by side in one run. Called by
`open_source` through `tool_loop`, and by `spec`; settings are `environments.OrsConfig`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from harness_trainer.environments.ors_config import OrsConfig, parse_indices
from harness_trainer.loops.base import ROW, EnvironmentFault
from harness_trainer.loops.ors.credentials import Credentials, read_credentials
from harness_trainer.loops.ors.episode import OUTCOME, OrsEpisode, OrsState
from harness_trainer.loops.ors.listing import Listing, find_variant
from harness_trainer.loops.ors.session import Place, opened
from harness_trainer.loops.ors.wire import Wire
from harness_trainer.loops.reward_functions import RewardFunction, load_rewards
from harness_trainer.tasks import Task

SHORT = "ors:"  # begins `--tasks` where it names the environment
_PLATFORM = "https://openreward.ai"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# An idle connection is closed before servers do it (uvicorn: 5 s): one that they close while a call is on its way
# would lose the episode.
_IDLE_S = 3.0
_RESERVED = ("prompt", "task_index", "split")  # columns that no field of a task replaces


class OrsEnvironment:
    """Open it once. `chosen`: another split of the same environment, as `SPLIT` or `SPLIT:0-9`, for evaluations."""

    def __init__(self, config: OrsConfig, chosen: str = "", credentials: Credentials | None = None) -> None:
        self.name = config.name or config.env_name or _host_or_name(config)
        self.max_episodes = config.max_sessions
        self._config = config
        self._split, self._num_tasks, self._indices = _choice(config, chosen)
        self._credentials = credentials
        self._functions: list[RewardFunction] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Raises EnvironmentFault for a server, key, name or split that cannot be used."""
        config = self._config
        credentials = self._credentials or read_credentials(config)
        self._functions = _functions(config)
        url = config.target if config.is_url else _sessions_url()
        headers = {"Authorization": f"Bearer {credentials.token}"} if credentials.token else {}
        try:
            self._http = await self._stack.enter_async_context(
                aiohttp.ClientSession(
                    base_url=url,
                    headers=headers,
                    connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
                    trust_env=urlsplit(url).hostname not in _LOOPBACK,  # a proxy variable must not catch loopback calls
                )
            )
            self._place = await self._find(url, credentials)
            self.name = config.name or config.env_name or (self._place.variant if config.is_url else None) or self.name
            self._listing = Listing(self._http, self._place)
            await self._listing.check_split(self._split)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _find(self, url: str, credentials: Credentials) -> Place:
        config = self._config
        if config.is_url:
            wire = Wire(self._http, {}, credentials.mask)
            owner, variant = None, await find_variant(wire, url, config.env_name)
            deployment = config.env_name or variant or "env"
        else:  # its variants are known to the platform alone
            owner, variant = config.target.partition("/")[0], config.env_name
            deployment = config.target
        return Place(url, deployment, owner, variant, credentials, config.ping_interval_s, config.silence_s)

    async def tasks(self) -> list[Task]:
        """One per index, named after split and index. Raises EnvironmentFault."""
        found = await self._listing.tasks(self._split, num_tasks=self._num_tasks, indices=self._indices)
        tasks = [self._task(index, spec) for index, spec in found.items()]
        for columns in {tuple(task.metadata[ROW]) for task in tasks}:
            for function in self._functions:
                function.check(columns)
        return tasks

    def _task(self, index: int, spec: Any) -> Task:
        row: dict[str, Any] = {"prompt": [{"role": "user", "content": ""}], "task_index": index, "split": self._split}
        if self._config.include_metadata and isinstance(spec, Mapping):
            row |= {key: value for key, value in spec.items() if key not in _RESERVED}
        # What the model is asked is known to a session only.
        return Task(f"{self._split}-{index:05d}", Path(self._split), "", metadata={ROW: row})

    async def shared_tools(self) -> list[dict[str, Any]]:
        """Those that every task has; an episode's own list is `OrsEpisode.tools`. Raises EnvironmentFault."""
        return await self._listing.shared_tools()

    @asynccontextmanager
    async def episode(self, task: Task, rollout_id: str) -> AsyncIterator[OrsEpisode]:
        row = task.metadata[ROW]
        split, index = str(row["split"]), int(row["task_index"])
        patience_s = self._config.capacity_patience_s
        async with opened(self._http, self._place, split=split, index=index, patience_s=patience_s) as session:
            weights = self._config.reward_weights
            state = OrsState(index, split)
            yield OrsEpisode(session, state, row, self._place.credentials, self._functions, weights)


def _functions(config: OrsConfig) -> list[RewardFunction]:
    functions = load_rewards(config.rewards)
    names = [function.name for function in functions] or [OUTCOME]
    if unknown := [name for name in config.reward_weights if name not in names]:
        raise EnvironmentFault(f"reward_weights names {unknown[0]!r}, which is none of the rewards {', '.join(names)}")
    return functions


def _choice(config: OrsConfig, chosen: str) -> tuple[str, int | None, list[int] | None]:
    """Split, how many tasks, which. What begins with `ors:` names the environment itself, and chooses nothing."""
    if not chosen or chosen.startswith(SHORT):
        return config.split, config.num_tasks, None if config.indices is None else parse_indices(config.indices)
    split, colon, indices = chosen.partition(":")
    try:
        return split, None, parse_indices(indices) if colon else None
    except ValueError as error:
        raise EnvironmentFault(f"{chosen!r} is no choice of tasks: write SPLIT or SPLIT:0-9,12 ({error})") from error


def _host_or_name(config: OrsConfig) -> str:
    return str(urlsplit(config.target).hostname) if config.is_url else config.target.rpartition("/")[2]


def _sessions_url() -> str:
    """Where the platform's sessions are; the SDK's own variables say so too, and are only read."""
    if own := os.environ.get("OPENREWARD_SESSION_URL"):
        return own.rstrip("/")
    parts = urlsplit(os.environ.get("OPENREWARD_URL") or _PLATFORM)
    return f"{parts.scheme}://sessions.{parts.netloc}"

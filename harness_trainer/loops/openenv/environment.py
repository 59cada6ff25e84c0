"""An OpenEnv server as `loops.base.Environment`: each episode is a session of its own.

Owns the server for as long as a run, what it offers, and how many sessions it is asked for. OpenEnv says nowhere how
many it allows: a server that is started here is asked in its own process, any other is tried with two, because the
usual limit is one; a higher limit is learned from the first refusal, which names it. A server of ours that died is
started again for the next episode. Called by `open_source` through `tool_loop`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from harness_trainer.environments.openenv_config import OpenEnvConfig
from harness_trainer.loops.base import ROW, EnvironmentFault, EpisodeLost, NoPlace
from harness_trainer.loops.openenv.clients import action_model, load_client
from harness_trainer.loops.openenv.episode import Offer, OpenEnvEpisode
from harness_trainer.loops.openenv.servers import Server, serving
from harness_trainer.loops.openenv.session import Refused, ServerFull, Session
from harness_trainer.loops.openenv.tools import LIST_TOOLS, action_tools, is_mcp, listed_tools
from harness_trainer.loops.places import Places, pauses
from harness_trainer.loops.reward_functions import RewardFunction, load_rewards
from harness_trainer.loops.rows import load_rows
from harness_trainer.tasks import Task

log = logging.getLogger("harness_trainer.loops")

_DYING_S = 1.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class OpenEnvEnvironment:
    """Open it once; whatever is wrong with the server or its settings is told then."""

    def __init__(self, config: OpenEnvConfig, rows: Path, registry: Path | None = None) -> None:
        self._config = config
        self._rows = rows
        self._registry = registry
        self._headers: dict[str, str] = {}
        self._client: type | None = None
        self._functions: list[RewardFunction] = []
        self._offer = Offer("", ())
        self._places = Places(config.max_episodes)
        self._server: Server | None = None  # None = not open, or one per episode
        self._stack = AsyncExitStack()
        self._starting = asyncio.Lock()

    @property
    def name(self) -> str:
        return self._offer.name

    @property
    def max_episodes(self) -> int | None:
        return self._places.limit

    async def __aenter__(self) -> Self:
        """Raises EnvironmentFault."""
        config = self._config
        self._headers = _headers(config)
        self._functions = await asyncio.to_thread(_loaded, config)
        if config.kind == "python":
            self._client = await asyncio.to_thread(load_client, config.named)
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(serving(config, self._registry))
            self._offer = await self._look(server)
            if config.per_episode:
                return self
            self._server, self._stack = server, stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server = None
        await self._stack.aclose()

    async def tasks(self) -> list[Task]:
        """Raises EnvironmentFault, also for a reward function that asks for a column that a row has not."""
        tasks = await asyncio.to_thread(load_rows, self._rows)
        for columns in {tuple(task.metadata[ROW]) for task in tasks}:
            for function in self._functions:
                function.check(columns)
        return tasks

    @asynccontextmanager
    async def episode(self, task: Task, rollout_id: str) -> AsyncIterator[OpenEnvEpisode]:
        """Raises EpisodeLost, NoPlace."""
        async with AsyncExitStack() as stack:
            session = await self._place(stack)
            yield OpenEnvEpisode(self._config, self._offer, session, task.metadata[ROW])

    async def _place(self, stack: AsyncExitStack, given: Server | None = None) -> Session:
        """A session, on the `given` server or the run's, with its place; `stack` gives both back.

        A refusal is waited out, with back-off, unless it tells that we ask for too many. Raises ServerFull, NoPlace,
        EpisodeLost.
        """
        waits, was_lost = pauses(self._config.capacity_patience_s), False
        while True:
            async with AsyncExitStack() as trying:
                await trying.enter_async_context(self._places.held())
                server = given or await self._living(trying)
                try:
                    session = await self._opened(server, trying)
                except ServerFull as error:
                    self._learn(error)
                    if (pause_s := next(waits, None)) is None:
                        raise
                except EpisodeLost:
                    if server.alive is None or was_lost:
                        raise
                    was_lost = True
                    await asyncio.sleep(_DYING_S)  # it may be dying just now: look again, once
                    continue
                else:
                    stack.push_async_exit(trying.pop_all())
                    return session
                await asyncio.sleep(pause_s)  # in our place: whoever holds the server's own is not of this run

    def _learn(self, error: ServerFull) -> None:
        """Raises NoPlace where the refusal is our own doing: more episodes are open than the server has places."""
        if self._config.per_episode:
            return
        if self._places.learn(error.max_sessions):
            log.info("%s allows %s sessions: the others wait for a place", self.name, error.max_sessions)
        if self._places.too_many:
            raise NoPlace(f"{self.name} allows {self._places.limit} sessions") from error

    async def _opened(self, server: Server, stack: AsyncExitStack) -> Session:
        """A session that is closed by `stack`. Raises ServerFull, EpisodeLost."""
        session = Session(self._config, server.url, self._headers, self._client, server.idle_timeout_s)
        try:
            await session.open()
        except BaseException:
            await session.close()
            raise
        stack.push_async_callback(session.close)
        return session

    async def _living(self, stack: AsyncExitStack) -> Server:
        """The run's server, started again if it was ours and died; or one of the episode's own, which `stack` ends.

        Raises EpisodeLost: one was started when the run began, so that it fails now is no fault of settings or task.
        """
        try:
            return await self._started(stack)
        except EnvironmentFault as error:
            raise EpisodeLost(str(error)) from error

    async def _started(self, stack: AsyncExitStack) -> Server:
        if self._config.per_episode:
            return await stack.enter_async_context(serving(self._config, self._registry))
        async with self._starting:
            server = self._server
            assert server is not None  # open
            if server.alive is not None and not await server.alive():
                log.warning("the server of %s is started again", self.name)
                await self._stack.aclose()
                async with AsyncExitStack() as started:
                    self._server = server = await started.enter_async_context(serving(self._config, self._registry))
                    self._stack = started.pop_all()
            return server

    # -- what a server offers ------------------------------------------------------------------------------------------

    async def _look(self, server: Server) -> Offer:
        """What the server offers every episode, and how many. Raises EnvironmentFault."""
        config = self._config
        about, schema = await self._described(server.url)
        name = config.name or str(about.get("name") or "") or urlsplit(server.url).hostname or "openenv"
        self._offer = Offer(name, ())  # for what is said meanwhile
        shared = not config.per_episode  # else what one server allows is no limit for all
        if shared:
            self._places.learn(server.max_sessions)
        model = None if self._client is None else action_model(self._client)
        action = schema.get("action") or {} if model is None else model.model_json_schema()  # type: ignore[attr-defined]
        try:
            async with AsyncExitStack() as stack:
                session = await self._place(stack, server)
                mcp = is_mcp(action)
                if mcp is None:
                    mcp = await _lists_tools(session)
                tools = [] if mcp else action_tools(action, config.tool_name)
                if shared and server.max_sessions is None and self._places.limit != 1:
                    await self._try_second(server)
        except EpisodeLost as error:
            raise EnvironmentFault(
                f"the server at {server.url} gives no session: {error}; is it an OpenEnv server, with a place free?"
            ) from error
        except ValueError as error:
            raise EnvironmentFault(
                f"no tool can be made of the actions of {name}: {error}; write an environment class for it"
            ) from error
        if config.max_episodes is not None and self._places.limit != config.max_episodes:
            log.warning("%s allows %s sessions only, not %d", name, self._places.limit, config.max_episodes)
        return Offer(name, tools, model, self._functions)

    async def _try_second(self, server: Server) -> None:
        try:
            async with AsyncExitStack() as stack:
                await self._opened(server, stack)
        except ServerFull as error:
            self._places.learn(error.max_sessions)
        except EpisodeLost as error:
            log.warning("%s gave a first session, but no second one: %s", self.name, error)
            self._places.learn(1)

    async def _described(self, url: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """What `/metadata` and `/schema` say. Raises EnvironmentFault."""
        trust_env = urlsplit(url).hostname not in _LOOPBACK  # a proxy variable must not catch loopback calls
        async with httpx.AsyncClient(
            base_url=url, headers=self._headers, timeout=self._config.connect_timeout_s, trust_env=trust_env
        ) as http:
            schema = await _asked(http, "/schema")
            try:
                about = await _asked(http, "/metadata")
            except EnvironmentFault:
                about = {}  # only a name is read from it, and an environment may fail to be made for it
        return about, schema


def _loaded(config: OpenEnvConfig) -> list[RewardFunction]:
    functions = load_rewards(config.rewards)
    names = [function.name for function in functions]
    if unknown := [name for name in config.reward_weights if name not in names]:
        raise EnvironmentFault(f"reward_weights names {unknown[0]!r}, which is none of the rewards {names}")
    return functions


async def _lists_tools(session: Session) -> bool:
    try:
        return bool(listed_tools(await session.step(LIST_TOOLS)))
    except Refused:
        return False


async def _asked(http: httpx.AsyncClient, path: str) -> dict[str, Any]:
    url = http.base_url
    try:
        response = await http.get(path)
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise EnvironmentFault(f"no server answers at {url} ({reason}): start it, or correct --env") from error
    if response.status_code in (401, 403):
        raise EnvironmentFault(
            f"the server at {url} refuses us ({response.status_code}): put its token into a variable and name that with"
            " --env.token-env"
        )
    if response.status_code >= 500:
        raise EnvironmentFault(
            f"the server at {url} answered {path} with {response.status_code}: it may still be starting (a Space that"
            " slept, say); try again, or see its own log"
        )
    try:
        said = response.json() if response.is_success else None
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise EnvironmentFault(
            f"the server at {url} is no OpenEnv server: {path} answered {response.status_code}; correct --env"
        )
    return said


def _headers(config: OpenEnvConfig) -> dict[str, str]:
    if config.token_env is None:
        return {}
    token = os.environ.get(config.token_env)
    if not token:
        raise EnvironmentFault(
            f"--env.token-env names {config.token_env}, which is not set: export {config.token_env}=..."
        )
    return {"Authorization": f"Bearer {token}"}

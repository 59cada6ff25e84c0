"""The client of an `openenv harbor serve` server: which tasks it has, what it can run, one rollout.

Owns the wire and the mapping of its failures: what goes wrong before a run is a SetupError or ConfigError, during a
rollout a ServerFailed. What a rollout came to is decided in `rollouts.harbor_server`. Called by the supervisor
(`inspect_server`) and the runner.

A session is OpenEnv's WebSocket: the server frees its place when the connection ends, also after a `kill -9` of ours.
(Sessions that its MCP client opens over HTTP stay for ever then.) The library is imported late: it takes seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from harness_trainer.environments.config import OpenEnvHarborConfig
from harness_trainer.errors import ConfigError, SetupError, TaskError
from harness_trainer.tasks import Task

_ENV = "harbor_env"  # what the server calls itself in its routes
_HTTP_TIMEOUT_S = 120.0  # a dataset may be downloaded when it is first listed
_CONNECT_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 2.0
_CHECK_WAIT_S = 60.0  # for a place on a server that is busy when a run starts
_TOOL_TIMEOUT_S = 60.0  # of a call that runs no agent
_PAGE = 200  # tasks listed at once
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_BUSY = "CAPACITY_REACHED"
_START = "start one with: openenv harbor serve --dataset NAME"


class ServerFailed(Exception):
    """A call of the server failed: unreachable, refused, cut, an answer that makes no sense. The message says which."""


class ServerBusy(ServerFailed):
    """The server has as many sessions as it allows."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a server offers a run. `notes` are lines for a person, e.g. that it calls the agent unstable."""

    tasks: list[Task]
    notes: list[str]


def require_reachable(config: OpenEnvHarborConfig, public_url: str | None, *, is_exposed: bool = False) -> None:
    """The server asks our gateway for the model. Raises ConfigError when it plainly cannot reach it."""
    if public_url is None and not is_exposed and urlsplit(config.url).hostname not in _LOOPBACK:
        raise ConfigError(
            f"the server at {config.url} calls the model at our gateway, which listens on this machine's loopback only:"
            " set --gateway.port and --gateway.public-url, the address (a tunnel's, say) at which the server reaches it"
        )


async def inspect_server(config: OpenEnvHarborConfig) -> Found:
    """Before anything slow is started: the run's tasks, and whether the server can run the agent there.

    Raises SetupError (no such server), ConfigError (a name it does not know), TaskError (no tasks).
    """
    server = HarborServer(config)
    tasks = await server.tasks()
    try:
        async with server.session(_CHECK_WAIT_S) as session:
            can = json.loads(await session.call("capabilities", {}, _TOOL_TIMEOUT_S))
            return Found(tasks, _check_names(config, can))
    except (ServerFailed, ValueError, AttributeError, TypeError, KeyError) as error:
        raise SetupError(f"the server at {config.url} does not say what it can run: {error}; {_START}") from error


def _check_names(config: OpenEnvHarborConfig, can: Any) -> list[str]:
    agents = {one["name"]: str(one.get("status") or "") for one in can["harnesses"]}
    # A class (module:Class) is the server's to find; of names it has a list.
    if config.harness not in agents and ":" not in config.harness:
        raise ConfigError(
            f"the server at {config.url} knows no agent {config.harness!r}: set --env.harness to one of"
            f" {', '.join(sorted(agents))}"
        )
    boxes = {one["name"]: one for one in can["sandboxes"]}
    if config.sandbox in boxes and not boxes[config.sandbox].get("available"):  # it also runs some it does not list
        usable = [name for name, one in boxes.items() if one.get("available")]
        raise SetupError(
            f"the server at {config.url} cannot use sandbox {config.sandbox!r}"
            f" ({boxes[config.sandbox].get('detail') or 'it does not say why'}): set --env.sandbox to one of"
            f" {', '.join(usable) or '(none is usable: see its own start-up report)'}"
        )
    status = agents.get(config.harness, "")
    return [] if status in ("", "validated") else [f"the server says of its agent {config.harness}: {status}"]


class Session:
    """A place on the server, for one rollout."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def ready(self) -> None:
        """Raises ServerBusy, ServerFailed."""
        with _failures():
            async with asyncio.timeout(_TOOL_TIMEOUT_S):
                await self._client.state()

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """The text that the tool answers. Raises ServerFailed."""
        with _failures():
            async with asyncio.timeout(timeout_s):
                said = await self._client.step({"type": "call_tool", "tool_name": tool, "arguments": arguments})
        observation = said.observation
        if not isinstance(observation, dict):
            raise ServerFailed(f"it answered {tool} with {str(observation)[:200]!r}")
        error = observation.get("error")
        if error:
            kind, reason = (error.get("error_type"), error.get("message")) if isinstance(error, dict) else ("", error)
            raise ServerFailed(f"its tool {tool} failed: {reason}" + (f" ({kind})" if kind else ""))
        return _text(observation.get("result"), tool)


class HarborServer:
    """One server and what it was asked for. `places` is held by whoever has a session."""

    def __init__(self, config: OpenEnvHarborConfig) -> None:
        self.config = config
        self.places = asyncio.Semaphore(config.max_sessions)
        self._headers = _headers(config)
        self._trust_env = (
            urlsplit(config.url).hostname not in _LOOPBACK
        )  # a proxy variable must not catch loopback calls

    async def tasks(self) -> list[Task]:
        """The run's tasks, by index. Raises SetupError, ConfigError, TaskError."""
        async with httpx.AsyncClient(
            base_url=self.config.url, headers=self._headers, timeout=_HTTP_TIMEOUT_S, trust_env=self._trust_env
        ) as http:
            try:
                split = await self._split(http)
                listed = [one for one in await self._listed(http, split) if self.config.wants(int(one["index"]))]
                names = Counter(str(one["task_name"]) for one in listed)
                tasks = [_task(one, split, unique=names[str(one["task_name"])] == 1) for one in listed]
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                what = f"what the server at {self.config.url} lists makes no sense"
                raise SetupError(f"{what} ({type(error).__name__}: {error}); {_START}") from error
        if not tasks:
            chosen = "" if self.config.tasks is None else f" with --env.tasks {self.config.tasks}"
            raise TaskError(f"split {split!r} of the server at {self.config.url} has no task{chosen}")
        return tasks

    async def _listed(self, http: httpx.AsyncClient, split: str) -> list[dict[str, Any]]:
        number = (await self._ask(http, "num_tasks", {"split": split}))["num_tasks"]
        if not isinstance(number, int):
            raise SetupError(f"the server at {self.config.url} does not say how many tasks {split!r} has")
        listed: list[dict[str, Any]] = []
        for start in range(0, number, _PAGE):
            page = {"split": split, "start": start, "stop": min(number, start + _PAGE)}
            listed += (await self._ask(http, "task_range", page))["tasks"]
        return listed

    @asynccontextmanager
    async def session(self, wait_s: float) -> AsyncIterator[Session]:
        """A place on the server; where it has none, one that gets free within `wait_s`.

        Raises ServerFailed, of it ServerBusy.
        """
        from openenv.core import GenericEnvClient

        give_up_at = time.monotonic() + wait_s
        pause_s = 0.5
        while True:
            client = GenericEnvClient(
                base_url=self.config.url,
                mode="simulation",
                connect_timeout_s=_CONNECT_TIMEOUT_S,
                message_timeout_s=86400.0,  # every call has a limit of its own
                headers=self._headers,
            )
            try:
                session = Session(client)
                try:
                    await session.ready()
                except ServerBusy:
                    if time.monotonic() + pause_s > give_up_at:
                        raise
                else:
                    yield session
                    return
            finally:
                with suppress(Exception):  # the rollout's result is known; a connection that ends badly adds nothing
                    async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                        await client.close()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 10.0)

    async def _split(self, http: httpx.AsyncClient) -> str:
        splits = {str(one["name"]): one for one in await self._ask(http, "splits")}
        wanted = self.config.split
        if wanted is None and len(splits) == 1:
            wanted = next(iter(splits))
        if wanted not in splits:
            served = ", ".join(sorted(splits)) or "none"
            what = "several datasets" if wanted is None else f"no dataset {wanted!r}"
            raise ConfigError(f"the server at {self.config.url} has {what}: set --env.split to one of {served}")
        if problem := splits[wanted].get("error"):
            raise TaskError(f"the server at {self.config.url} cannot read its dataset {wanted!r}: {problem}")
        return wanted

    async def _ask(self, http: httpx.AsyncClient, route: str, body: dict[str, Any] | None = None) -> Any:
        path = f"/{_ENV}/{route}"
        try:
            response = await (http.get(path) if body is None else http.post(path, json=body))
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise SetupError(f"no server answers at {self.config.url} ({reason}); {_START}") from error
        if response.status_code in (401, 403):
            raise SetupError(
                f"the server at {self.config.url} refuses us ({response.status_code}): put its token into a variable"
                " and name that with --env.token-env"
            )
        try:
            data = response.json()
        except ValueError:
            data = None
        if response.status_code == 404 or not isinstance(data, dict | list):
            raise SetupError(
                f"{self.config.url} is no `openenv harbor serve` server: {path} answered {response.status_code};"
                f" {_START}"
            )
        if not response.is_success:
            said = data.get("detail") if isinstance(data, dict) else data
            raise SetupError(f"the server at {self.config.url} answered {path} with {response.status_code}: {said}")
        return data


def _headers(config: OpenEnvHarborConfig) -> dict[str, str]:
    if config.token_env is None:
        return {}
    token = os.environ.get(config.token_env)
    if not token:
        raise SetupError(f"--env.token-env names {config.token_env}, which is not set: export {config.token_env}=...")
    return {"Authorization": f"Bearer {token}"}


def _task(listed: dict[str, Any], split: str, *, unique: bool) -> Task:
    name, index = str(listed["task_name"]), int(listed["index"])
    return Task(
        name=name if unique else f"{name}#{index}",
        path=Path(split),
        instruction=str(listed.get("instruction") or ""),  # for people; the server gives the agent its own
        metadata={"split": split, "index": index, "task_name": name},
    )


@contextmanager
def _failures() -> Iterator[None]:
    from websockets.exceptions import WebSocketException

    try:
        yield
    except TimeoutError as error:
        raise ServerFailed("it did not answer in time") from error
    except (OSError, RuntimeError, ValueError, WebSocketException) as error:
        reason = str(error) or type(error).__name__
        raise (ServerBusy if _BUSY in reason else ServerFailed)(reason) from error


def _text(result: Any, tool: str) -> str:
    """The text of a tool's result, in each of the forms that FastMCP gives it on the wire."""
    if isinstance(result, str):
        return result
    if isinstance(result, dict):
        if isinstance(result.get("data"), str):
            return str(result["data"])
        content = result.get("content")
        if isinstance(content, list) and content and isinstance(content[0], dict) and "text" in content[0]:
            return str(content[0]["text"])
    raise ServerFailed(f"its tool {tool} answered {str(result)[:200]!r}, which holds no text")

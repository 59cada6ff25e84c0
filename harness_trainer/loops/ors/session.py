"""One session of an ORS server: created for one episode, kept alive by pings, deleted on every path.

Owns the session's requests and what their failures mean: EpisodeLost is the machinery's (a lost session, a dead
server), SetupFailure the task's, EnvironmentFault a person's (a key that is refused).

**A tool call never runs twice.** The server names each run (`task_id`) in the stream's first event. A stream that
breaks after that is asked for again by the name, which makes the server tell the same run's result; one that breaks
before may or may not have run, so the episode is lost. Asked again without a name are only calls that cannot have run:
the connection was never made, or the answer says that the server is starting or has too many requests.

A call that the loop gives up goes on at the server, which has no way to end one; nobody waits for what it comes to.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from harness_trainer.loops.base import EnvironmentFault, EpisodeLost, SetupFailure
from harness_trainer.loops.ors.credentials import Credentials
from harness_trainer.loops.ors.wire import Broken, Refused, Wire

log = logging.getLogger("harness_trainer.loops")
T = TypeVar("T")

_MOST_FAILURES = 6  # in a row, of one request that may be sent again
_LIVED_S = 5.0  # a stream that lasted so long was no failure in a row
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_CREATE_TIMEOUT_S = 300.0  # an environment's constructor may load a dataset
_CLOSE_TIMEOUT_S = 4.0
_GONE = (404, 410)
_NOT_RUN = (400, 413, 422)  # the server looked at the call and did not take it
_PASSING = (429, 502, 503, 504)  # of what stands between us and the server
_MOST_UNKNOWN_PINGS = 3  # in a row that say 404, before the session counts as gone


class CallRefused(Exception):
    """The server did not run the call; the model is told why."""


class ToolRaised(Exception):
    """The environment's tool raised; the message is what the server says of it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where sessions are made. Example: Place("http://h:8080", "echo", None, "echo", Credentials(), 10.0, 60.0)."""

    url: str
    deployment: str  # what the platform calls it, owner/name; a server of one's own does not look at it
    owner: str | None  # None = not of the catalog
    variant: str | None  # which environment of the server, as its routes have it; None = its default
    credentials: Credentials
    ping_interval_s: float
    silence_s: float

    def path(self, suffix: str) -> str:
        return suffix if self.variant is None else f"/{self.variant}{suffix}"


class Session:
    """Open on the server from `opened` to `close`. One call at a time."""

    def __init__(self, http: aiohttp.ClientSession, place: Place, sid: str) -> None:
        key = place.credentials.api_key
        headers = {"X-Session-ID": sid, "X-Deployment": place.deployment, **({"X-API-Key": key} if key else {})}
        self.sid = sid
        self._place = place
        self._wire = Wire(http, headers, place.credentials.mask)
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._pings: asyncio.Task[None] | None = None

    def keep_alive(self) -> None:
        """Begin to ping. Before its environment is made the server knows no such session."""
        self._pings = asyncio.create_task(self._ping())

    # What an episode asks for.

    async def messages(self) -> list[Mapping[str, Any]]:
        """The task's conversation; of a server without that route its prompt, as one user message."""
        try:
            return list(await self._ask("GET", "/messages"))
        except _NoSuchRoute:
            return [{"role": "user", "blocks": await self._ask("GET", "/prompt")}]

    async def tools(self) -> Mapping[str, Any]:
        """What this very session offers: the shared tools and its task's own, and the terminal tool if there is one."""
        try:
            listed = await self._ask("GET", "/task_tools")
        except _NoSuchRoute:
            log.warning("the ORS server at %s has no task tools: only shared tools are offered", self._place.url)
            listed = await self._ask("GET", "/tools")
        if not isinstance(listed, Mapping) or not isinstance(listed.get("tools"), list):
            raise EpisodeLost(f"{self._place.url} lists tools in a form that makes no sense")
        return listed

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the tool gave: {"ok": true, "output": ...} or {"ok": false, "error": ..., "reason": ...}.

        Raises ToolRaised, CallRefused, EpisodeLost, EnvironmentFault.
        """
        return await self._while_alive(self._call(name, arguments))

    async def close(self) -> None:
        """Both halves of it, whatever becomes of the other; the server ends by itself what it is not told to."""
        if self._pings is not None:
            self._pings.cancel()
            await asyncio.wait([self._pings])
        for path in ("/delete", "/delete_session"):
            try:
                await self._wire.ask("POST", path, timeout_s=_CLOSE_TIMEOUT_S)
            except (Refused, Broken) as error:
                log.debug("session %s: %s: %s", self.sid, path, error)

    # One request.

    async def _ask(self, method: str, suffix: str) -> Any:
        return await self._while_alive(self._asked_again(method, self._place.path(suffix)))

    async def _asked_again(self, method: str, path: str) -> Any:
        """For requests that change nothing. Raises _NoSuchRoute, EpisodeLost, SetupFailure, EnvironmentFault."""
        patience = _Patience()
        while True:
            try:
                return await self._wire.ask(method, path)
            except Refused as refused:
                if refused.status == 404 and "environment" not in refused.detail.lower():
                    raise _NoSuchRoute from refused
                if refused.status not in _PASSING:
                    raise self._meaning(refused, f"{method} {path}") from refused
                await patience.again(self._lost(f"{method} {path}", refused), refused)
            except Broken as broken:
                await patience.again(self._lost(f"{method} {path}", broken))

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        body: dict[str, Any] = {"name": name, "input": arguments}
        patience = _Patience()
        while True:
            began = time.monotonic()
            try:
                return await self._stream(name, body)
            except Refused as refused:
                if refused.status in _NOT_RUN:
                    raise CallRefused(refused.detail) from refused
                passing = refused.starting or refused.status == 429 or ("task_id" in body and refused.status >= 500)
                if not passing:
                    raise self._meaning(refused, f"the call of {name}", lost=True) from refused
                await patience.again(self._lost(f"the call of {name}", refused), refused)
            except Broken as broken:
                lost = self._lost(f"the call of {name}", broken)
                if "task_id" not in body and broken.reached:
                    raise EpisodeLost(f"{lost}; it may have run, and is not run again") from broken
                if time.monotonic() - began >= _LIVED_S:
                    patience = _Patience()
                await patience.again(lost)

    async def _stream(self, name: str, body: dict[str, Any]) -> Mapping[str, Any]:
        """One stream to its end. Puts the run's name into `body` as soon as it is known. Raises Refused, Broken."""
        pieces: list[str] = []
        stream = self._wire.events(self._place.path("/call"), body, silence_s=self._place.silence_s)
        async with aclosing(stream) as events:
            async for event, data in events:
                if event == "task_id":
                    run = data.strip()
                    if body.setdefault("task_id", run) != run:
                        raise EpisodeLost(f"the server ran {name} a second time when it was asked for the first run")
                elif event == "error":
                    if "unknown task_id" in data:
                        raise EpisodeLost(f"the server no longer knows the run of {name} that was cut")
                    raise ToolRaised(self._place.credentials.mask(data) or "the tool failed")
                elif event in ("chunk", "end"):
                    pieces.append(data)
                    if event == "end":
                        return _result(name, "".join(pieces))
        raise Broken("the stream ended before its end event")

    # Whether it is still there.

    async def _ping(self) -> None:
        """Pings until the server says that the session is gone. A ping that fails otherwise says nothing of it."""
        unknown = 0
        while True:
            await asyncio.sleep(self._place.ping_interval_s)
            try:
                await self._wire.ask("POST", "/ping", timeout_s=30.0)
                unknown = 0
            except Refused as refused:
                unknown = unknown + 1 if refused.status == 404 else 0
                if refused.status == 410 or unknown >= _MOST_UNKNOWN_PINGS:
                    self._gone.set_result(str(refused))
                    return
                log.debug("ping of session %s: %s", self.sid, refused)
            except Broken as broken:
                log.debug("ping of session %s: %s", self.sid, broken)

    async def _while_alive(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, unless the session is gone before. Raises EpisodeLost and what `work` does."""
        task = asyncio.ensure_future(work)
        either: list[asyncio.Future[Any]] = [task, self._gone]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise EpisodeLost(f"the session is gone from {self._place.url}: a ping was told {self._gone.result()}")
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    def _meaning(self, refused: Refused, what: str, *, lost: bool = False) -> Exception:
        if refused.status in (401, 403):
            return key_refused(self._place.url, refused)
        if lost or refused.status in (402, *_GONE, *_PASSING):
            return EpisodeLost(self._lost(what, refused))
        return SetupFailure(self._lost(what, refused))

    def _lost(self, what: str, error: Exception) -> str:
        return f"{what} failed at {self._place.url}: {error}"


class _NoSuchRoute(Exception):
    """The server is older than the route."""


class _Patience:
    """Pauses between tries, longer each time."""

    def __init__(self) -> None:
        self._num_failures = self._num_pauses = 0

    async def again(self, why: str, refused: Refused | None = None) -> None:
        """Wait before the next try. Raises EpisodeLost(why) after enough; a server that starts is waited for."""
        self._num_failures += refused is None or not refused.starting
        if self._num_failures >= _MOST_FAILURES:
            raise EpisodeLost(why)
        pause_s = _FIRST_PAUSE_S * 2 ** min(self._num_pauses, 10)
        self._num_pauses += 1
        if refused is not None and refused.retry_after_s is not None:
            pause_s = refused.retry_after_s
        await asyncio.sleep(min(pause_s, _LONGEST_PAUSE_S))


def key_refused(url: str, error: Exception) -> EnvironmentFault:
    return EnvironmentFault(
        f"{url} refuses us ({error}): put the right key into the variable that --env.api-key-env names"
        " (a private Space: its token, --env.token-env)"
    )


@asynccontextmanager
async def opened(
    http: aiohttp.ClientSession, place: Place, *, split: str, index: int, patience_s: float
) -> AsyncIterator[Session]:
    """A session on this task. Where the server has no place for one, one is asked for until `patience_s` is over.

    Raises EpisodeLost, SetupFailure, EnvironmentFault.
    """
    give_up_at, pause_s = time.monotonic() + patience_s, _FIRST_PAUSE_S
    while True:
        try:
            session = await _created(http, place, split, index)
            break
        except (Refused, Broken) as error:
            status = error.status if isinstance(error, Refused) else None
            if status in (401, 403):
                raise key_refused(place.url, error) from error
            what = f"no session for task {index} of {split} at {place.url}: {error}"
            if status is not None and status < 500 and status not in (402, 404, 408, 409, 410, 429):
                raise SetupFailure(what) from error
            if time.monotonic() + pause_s > give_up_at:
                # Its constructor raised, most likely: another try will find the same.
                raise (SetupFailure if status == 500 else EpisodeLost)(what) from error
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    try:
        yield session
    finally:
        await session.close()


async def _created(http: aiohttp.ClientSession, place: Place, split: str, index: int) -> Session:
    """A session with its environment; what of it was made is deleted if the rest fails. Raises Refused, Broken."""
    credentials = place.credentials
    secret = credentials.session_headers(place.url)
    key = {"X-API-Key": credentials.api_key} if credentials.api_key else {}
    wire = Wire(http, {"X-Deployment": place.deployment, **key}, credentials.mask)
    session = Session(http, place, await _session_id(wire, secret))
    body: dict[str, Any] = {"split": split, "index": index}
    if place.variant is not None:
        body["env_name"] = place.variant
    try:
        # Not through `Session`, whose requests may be sent again: this one may not.
        headers = {**secret, "X-Session-ID": session.sid}
        await wire.ask("POST", "/create", body=body, headers=headers, timeout_s=_CREATE_TIMEOUT_S)
    except BaseException:
        await asyncio.shield(session.close())
        raise
    session.keep_alive()
    return session


async def _session_id(wire: Wire, secret: Mapping[str, str]) -> str:
    """The name of a new session; the platform may take minutes to start its machine, and sends signs meanwhile."""
    sid = ""
    stream = wire.events("/create_session", {}, headers=secret, silence_s=_CREATE_TIMEOUT_S)
    async with aclosing(stream) as events:
        async for event, data in events:
            if event == "task_id":
                sid = sid or data.strip()
            elif event == "error":
                raise Broken(f"no session was made: {data[:200]}")
            elif event == "end":
                said = _parsed(data)
                sid = str(said["sid"]) if isinstance(said, Mapping) and said.get("sid") else sid
                if sid:
                    return sid
    raise Broken("the stream that makes a session ended before it was made")


def _result(name: str, text: str) -> Mapping[str, Any]:
    result = _parsed(text)
    if not isinstance(result, Mapping) or not (isinstance(result.get("output"), Mapping) or "error" in result):
        raise EpisodeLost(f"the server's answer to {name} makes no sense: {text[:80]!r}")
    return result


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None

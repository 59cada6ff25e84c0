"""One session of an OpenEnv server: a client that is connected once, and what the server's answers mean.

Owns whose fault a failure is, and the envelope of reward and end. OpenEnv's clients (0.10) connect again by themselves
when their socket has died: the next step then reaches a game that nobody reset. One made here never does; a session
that ended is `EpisodeLost`. After an answer that came too late, or a step that was given up, nobody knows what the
environment did: that session is lost too. Called by `episode` and `environment`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from harness_trainer.environments.openenv_config import OpenEnvConfig
from harness_trainer.loops.base import EpisodeLost

_LOST = ("SESSION_ERROR", "FACTORY_ERROR")  # of OpenEnv's error codes, those that mean that there is no session
# How a SESSION_ERROR begins that an action led to: openenv 0.10 ends the session when it cannot write down why it
# refused one, be it what pydantic says of an environment's own validator, or a text with half a surrogate pair. That is
# the policy's doing: taken for a fault of the machinery, such actions were never punished.
UNWRITABLE = ("Unable to serialize unknown type", "Error serializing to JSON")
ENDED_OVER_IT = "the action is invalid, and the environment ended over it"
_FULL = "CAPACITY_REACHED"
_BESIDE = ("metadata", "reward", "done")  # of an observation: what is not for the model


class Refused(Exception):
    """The server answered a request with an error, and the session goes on: an invalid action, `step` raised."""


class SessionSpent(Refused):
    """The server refused an action, and ended the session with it: what was earned so far counts."""


class ServerFull(EpisodeLost):
    """The server has no place for a session."""

    def __init__(self, said: str, max_sessions: int | None) -> None:
        super().__init__(said)
        self.max_sessions = max_sessions  # None = it does not say


@dataclass(frozen=True, slots=True)
class Said:
    """What the environment answered to a reset or a step.

    Example: Said({"echoed_message": "hi"}, reward=0.2, done=False). Reward and end are the envelope's; where an old
    server's has none, those in the observation. A reward that is null or missing is None, which is not 0.
    """

    observation: Any  # a dict on the wire; a typed client may make anything of it
    reward: float | None = None
    done: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, Any]:
        """The observation's, without reward, end and metadata, which are not for the model."""
        seen = self.observation
        if hasattr(seen, "model_dump"):
            seen = seen.model_dump(mode="json")
        elif not isinstance(seen, Mapping):
            seen = vars(seen) if hasattr(seen, "__dict__") else {"observation": seen}
        return {key: value for key, value in seen.items() if key not in _BESIDE}


def read_envelope(data: Any) -> Said:
    """Raises EpisodeLost for an answer that makes no sense."""
    if not isinstance(data, Mapping) or not isinstance(data.get("observation", {}), Mapping):
        raise EpisodeLost(f"the server's answer holds no observation: {str(data)[:200]!r}")
    seen = data.get("observation", {})
    reward, done = (data.get(key) if key in data else seen.get(key) for key in ("reward", "done"))
    if reward is not None and not isinstance(reward, bool | int | float):
        raise EpisodeLost(f"the server's reward is no number: {str(reward)[:100]!r}")
    number = None if reward is None else float(reward)
    metadata = data.get("metadata") or seen.get("metadata") or {}
    return Said(
        dict(seen),
        None if number is None or math.isnan(number) else number,
        bool(done),
        metadata if isinstance(metadata, Mapping) else {},
    )


class Session:
    """A place on a server, from `open` to `close`. Not for two tasks at once."""

    def __init__(
        self,
        config: OpenEnvConfig,
        url: str,
        headers: Mapping[str, str],
        client_class: type | None,
        idle_timeout_s: float | None = None,
    ) -> None:
        self._client = _once_connected(client_class)(**_options(config, url, dict(headers), client_class))
        self._typed = client_class is not None
        self._idle_timeout_s = idle_timeout_s  # the server's; None = it is not known
        self._heard_at = time.monotonic()

    async def open(self) -> None:
        """Raises ServerFull, EpisodeLost. The server says only in its first answer that it has no place."""
        try:
            await self._client.connect()
        except (OSError, TimeoutError) as error:  # OpenEnv's ConnectionError, whatever the cause
            raise EpisodeLost(str(error)) from error
        with suppress(Refused):  # an environment without a state: it is there nonetheless
            await self._ask({"type": "state"})

    async def reset(self, columns: Mapping[str, Any]) -> Said:
        """Raises Refused, EpisodeLost."""
        return self._read(await self._ask({"type": "reset", "data": dict(columns)}))

    async def step(self, action: Any) -> Said:
        """`action`: its fields, or the model that a typed client takes. Raises Refused, EpisodeLost."""
        payload = action if isinstance(action, dict) else self._client._step_payload(action)
        return self._read(await self._ask({"type": "step", "data": payload}))

    async def close(self) -> None:
        """Frees the place on the server. Goes on to its end also when the caller is cancelled."""
        with suppress(OSError, RuntimeError):  # the socket is gone already
            await self._client.close()

    def _read(self, data: Any) -> Said:
        said = read_envelope(data)
        if not self._typed:
            return said
        try:
            seen = self._client._parse_result(dict(data)).observation
        except Exception as error:  # whatever a person's client raises
            raise EpisodeLost(f"the client cannot read the server's answer: {type(error).__name__}: {error}") from error
        return Said(seen, said.reward, said.done, said.metadata)

    async def _ask(self, message: dict[str, Any]) -> Any:
        from websockets.exceptions import WebSocketException

        silent_s = time.monotonic() - self._heard_at
        if self._idle_timeout_s is not None and silent_s > self._idle_timeout_s:
            # Its socket is still open, but the server has closed the environment behind it.
            raise EpisodeLost(
                f"the session was silent for {silent_s:.0f} s, and the server ends one after"
                f" {self._idle_timeout_s:g} s: raise --env.idle-timeout-s"
            )
        try:
            answer = await self._client._send_and_receive(message)
        except TimeoutError as error:
            raise EpisodeLost(
                f"the server did not answer a {message['type']} in time (--env.step-timeout-s)"
            ) from error
        except (WebSocketException, OSError) as error:
            raise EpisodeLost(f"the session ended: {str(error) or type(error).__name__}") from error
        except ValueError as error:
            raise EpisodeLost(f"the server's answer is no JSON: {error}") from error
        self._heard_at = time.monotonic()
        return answer.get("data", {})


@cache
def _once_connected(client_class: type | None) -> Any:
    """The client class, with the two steps changed in which OpenEnv's hide that a session ended."""
    from openenv.core import GenericEnvClient
    from websockets.exceptions import ConnectionClosed

    base: Any = client_class or GenericEnvClient

    class OnceConnected(base):  # type: ignore[misc]
        _was_connected = False

        async def _connect_async(self) -> Any:
            if not self._was_connected:
                self._was_connected = True
                return await super()._connect_async()
            if self._ws is None:  # dropped, because an answer was not waited for
                raise EpisodeLost("the session was ended: an earlier call was given up before its answer")
            return self  # if it is closed `_send` says so

        async def _send_and_receive(self, message: dict[str, Any]) -> dict[str, Any]:
            with suppress(ConnectionClosed):  # a refused session's error may wait to be read
                await self._send(message)
            answer = await self._receive()
            if answer.get("type") == "error":
                raise _refusal(answer.get("data") or {})
            return dict(answer)

    return OnceConnected


def _refusal(data: Mapping[str, Any]) -> Exception:
    code, said = str(data.get("code", "")), str(data.get("message") or "it does not say why")
    if code == _FULL:
        most = data.get("max_sessions")
        return ServerFull(f"the server has no place left: {said}", most if isinstance(most, int) else None)
    if code == "SESSION_ERROR" and said.startswith(UNWRITABLE):
        return SessionSpent(ENDED_OVER_IT)
    if code in _LOST:
        return EpisodeLost(f"the server ended the session: {said} ({code})")
    errors = data.get("errors")
    if isinstance(errors, list):  # pydantic's
        said += ": " + "; ".join(_error(each) for each in errors)
    return Refused(said)


def _error(error: Any) -> str:
    if not isinstance(error, Mapping):
        return str(error)
    where = ".".join(str(part) for part in error.get("loc") or ())
    return f"{where}: {error.get('msg', '')}".removeprefix(": ")


def _options(config: OpenEnvConfig, url: str, headers: dict[str, str], client_class: type | None) -> dict[str, Any]:
    """Those that the client takes: a typed one may have a constructor of its own."""
    import inspect

    options: dict[str, Any] = {
        "base_url": url,
        "connect_timeout_s": config.connect_timeout_s,
        "message_timeout_s": config.step_timeout_s,
        "max_message_size_mb": config.max_message_mb,
        "websocket_ping_interval_s": config.ping_interval_s,
        "websocket_ping_timeout_s": config.ping_timeout_s,
        "mode": "simulation",
        "headers": headers or None,
    }
    taken = inspect.signature(client_class).parameters if client_class is not None else None
    if taken is None or any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        return options
    return {name: value for name, value in options.items() if name in taken}

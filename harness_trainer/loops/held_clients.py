"""OpenEnv clients that a person's environment class keeps in its attributes.

Owns finding them, ending their sessions, and noticing that one was lost. A class in the guides' style opens a client
and never closes it: in TRL both live as long as the process. Here an episode ends long before, and an open client holds
a place of the server's, a thread and a loop.

OpenEnv's clients (0.10) connect again by themselves when their socket has died: the next step then reaches a game that
nobody reset, without an error. So sockets are compared before and after a call. Nothing is imported for it: a process
that never imported OpenEnv holds no client. Called by `environment_class`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from harness_trainer.loops.base import EpisodeLost
from harness_trainer.loops.openenv.session import UNWRITABLE
from harness_trainer.own_thread import OwnThread

# The server's answers that mean no session, in OpenEnv's `WSErrorCode`; the rest is about the action.
_SESSION_CODES = ("CAPACITY_REACHED", "SESSION_ERROR", "FACTORY_ERROR")
_SERVER_SAID = re.compile(r"Server error: (?P<said>.*) \(code: (?P<code>\w+)\)", re.DOTALL)  # as its client words it
_AT_CAPACITY = re.compile(r"\d+/(\d+) sessions active")
_CHAIN = 16  # causes of an error that are looked at


def clients_of(instance: Any) -> list[Any]:
    """The clients among its attributes, or in a list or dict there; one that its class or module has too is shared."""
    kinds = _client_classes()
    if not kinds:
        return []
    found = {id(value): value for value in _values(instance) if isinstance(value, kinds)}
    module = sys.modules.get(type(instance).__module__)
    shared = [vars(module) if module is not None else {}, *(vars(kind) for kind in type(instance).__mro__)]
    ours = {id(value) for names in shared for value in names.values()}
    return [client for key, client in found.items() if key not in ours]


async def close_client(client: Any, thread: OwnThread) -> None:
    """End its session, and the loop that OpenEnv runs for one that is used without await."""
    plain = vars(client).get("_async", client)
    wrapper = client if plain is not client else vars(plain).get("_sync_client")
    if wrapper is not None:
        await thread.run(wrapper.close)
    else:
        await client.close()


def sockets_of(instance: Any) -> list[tuple[Any, Any]]:
    """Each client with its connection; None = it has none."""
    plain = [vars(client).get("_async", client) for client in clients_of(instance)]
    return [(client, vars(client).get("_ws")) for client in plain]


def replaced(before: list[tuple[Any, Any]]) -> bool:
    """Whether one of the clients has another connection than it had `before`: OpenEnv connected it again."""
    now = [(socket, vars(client).get("_ws")) for client, socket in before]
    return any(was is not None and socket is not None and socket is not was for was, socket in now)


def session_lost(error: BaseException) -> bool:
    """Whether what an environment raised says that its session or its server is gone, or has no place."""
    return any(_says_lost(each) for each in _chain(error))


def ended_by_action(error: BaseException) -> bool:
    """Whether the server ended the session over an invalid action: the policy's fault, and the end of its episode."""
    said = [_said(each) for each in _chain(error)]
    return any(code == "SESSION_ERROR" and message.startswith(UNWRITABLE) for code, message in said)


def max_sessions(error: BaseException) -> int | None:
    """How many sessions the server allows, where it refused one because they are all taken; None = no such refusal."""
    for each in _chain(error):
        code, message = _said(each)
        if code == "CAPACITY_REACHED" and (most := _AT_CAPACITY.search(message)):
            return int(most[1])
    return None


def _says_lost(error: BaseException) -> bool:
    if isinstance(error, EpisodeLost) or type(error).__name__ in ("SessionLostError", "SessionCapacityError"):
        return True
    if type(error).__module__.partition(".")[0] == "websockets":
        return True
    if not _from_openenv(error):
        return False
    return isinstance(error, ConnectionError | TimeoutError) or _said(error)[0] in _SESSION_CODES


def _said(error: BaseException) -> tuple[str, str]:
    """Code and message of an answer of the server's that OpenEnv's client raised; ("", "") = it is no such error."""
    found = _SERVER_SAID.fullmatch(str(error)) if _from_openenv(error) else None
    return ("", "") if found is None else (found["code"], found["said"])


def _from_openenv(error: BaseException) -> bool:
    """Raised inside its client: a tool of a person's own may well fail to connect to something else."""
    at = error.__traceback__
    while at is not None:
        if str(at.tb_frame.f_globals.get("__name__", "")).startswith("openenv."):
            return True
        at = at.tb_next
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    each: BaseException | None = error
    for _ in range(_CHAIN):
        if each is None:
            return
        yield each
        each = each.__cause__ or each.__context__


def _client_classes() -> tuple[type, ...]:
    names = {"openenv.core.env_client": "EnvClient", "openenv.core.sync_client": "SyncEnvClient"}
    return tuple(getattr(sys.modules[module], name) for module, name in names.items() if module in sys.modules)


def _values(instance: Any) -> Iterator[Any]:
    for value in list(getattr(instance, "__dict__", {}).values()):
        yield value
        if isinstance(value, list | tuple | dict):
            yield from value.values() if isinstance(value, dict) else value

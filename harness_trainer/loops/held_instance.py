"""An instance of a person's environment class, with the thread that it lives in, and how it ends.

Owns closing it: its own method for that (`class_kinds`), then the OpenEnv clients that it left open. Made by
`environment_class`, played by `class_episode`, kept for its group's end by `group_rewards`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from harness_trainer.loops.class_kinds import Kind
from harness_trainer.loops.held_clients import clients_of, close_client
from harness_trainer.own_thread import OwnThread

log = logging.getLogger("harness_trainer.loops")


@dataclass(slots=True)
class Held:
    """An instance and the thread that it lives in."""

    kind: Kind
    instance: Any
    thread: OwnThread
    spoiled: bool = False  # its episode was lost, or left a call running: it must not be used again

    async def close(self) -> None:
        """Every part of it, whatever the others do. What goes wrong is logged: the episode has its result."""
        try:
            await self._attempt(self._close_instance)
            await self.end_sessions()
        finally:
            self.thread.close()

    async def end_sessions(self) -> None:
        """Of the OpenEnv clients in its attributes; the rest of it stays as it is."""
        for client in clients_of(self.instance):
            await self._attempt(partial(close_client, client, self.thread))

    async def end_replaced(self, clients: Sequence[Any]) -> None:
        """End the sessions of those that are among its attributes no more: nobody else would."""
        present = {id(client) for client in clients_of(self.instance)}
        for client in clients:
            if id(client) not in present:
                await self._attempt(partial(close_client, client, self.thread))

    async def _close_instance(self) -> None:
        if self.kind.closer is not None:
            nothing = (None, None, None) if self.kind.closer.startswith("__") else ()
            await self.thread.call(getattr(self.instance, self.kind.closer), *nothing)

    async def _attempt(self, end: Callable[[], Awaitable[object]]) -> None:
        try:
            await end()
        except Exception as error:  # whatever a person's code raises
            log.warning("an instance of %s was not closed well: %s: %s", self.kind.name, type(error).__name__, error)

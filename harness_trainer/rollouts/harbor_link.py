"""Our end of the talk with one rollout's process in Harbor's Python (`harnesses.harbor_worker` says what is said).

Owns calls, answers and their cancellation, in both directions. What is asked is `harbor_run`'s and `harbor_box`'s.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Self, TypeAlias

from sandboxes.base import NoSuchPath, SandboxError

log = logging.getLogger("harness_trainer.rollouts")

_MAX_LINE = 256_000_000  # bytes; the largest are chunks of output

Message: TypeAlias = dict[str, Any]
Serve: TypeAlias = Callable[[Message], Awaitable[Message]]  # raises SandboxError


class LinkBroken(Exception):
    """The process has ended, or closed its socket."""


class Refused(Exception):
    """What the other side answered in place of a value; the message is one line of its."""


class Link:
    """Made by `open`; `close` ends it. `serve` answers what the other side asks."""

    def __init__(self, writer: asyncio.StreamWriter, serve: Serve) -> None:
        self._writer = writer
        self._serve = serve
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._at_work: dict[int, asyncio.Task[None]] = {}
        self._num_calls = 0
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, sock: socket.socket, order: Message, serve: Serve) -> Self:
        reader, writer = await asyncio.open_connection(sock=sock, limit=_MAX_LINE)
        link = cls(writer, serve)
        link._send(order)
        link._reading = asyncio.create_task(link._read(reader), name="harbor link")
        return link

    def begin(self, op: str, **arguments: Any) -> tuple[int, asyncio.Future[Message]]:
        """The call's number, and what will be its answer. The future raises LinkBroken and Refused."""
        self._num_calls += 1
        number = self._num_calls
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        if self._reading is None or self._reading.done():
            _fail(answer, LinkBroken())
            return number, answer
        self._asked[number] = answer
        self._send({"call": number, "op": op, **arguments})
        return number, answer

    async def call(self, op: str, **arguments: Any) -> Message:
        return await self.begin(op, **arguments)[1]

    def cancel(self, number: int) -> None:
        """Ask the other side to end a call; it answers it then."""
        self._send({"cancel": number})

    async def close(self) -> None:
        """End what is at work for the other side, and the talk."""
        self._writer.close()
        tasks = [*self._at_work.values(), *([self._reading] if self._reading is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _send(self, message: Message) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._take(json.loads(line))
        except OSError:
            pass  # the connection broke: the same as its end
        finally:
            for answer in self._asked.values():
                if not answer.done():
                    _fail(answer, LinkBroken())

    def _take(self, message: Message) -> None:
        if "call" in message:
            self._at_work[message["call"]] = asyncio.create_task(self._answer(message))
        elif "cancel" in message:
            if (task := self._at_work.get(message["cancel"])) is not None:
                task.cancel()
        elif (answer := self._asked.pop(message["answer"], None)) is not None and not answer.done():
            if "value" in message:
                answer.set_result(message["value"])
            else:
                _fail(answer, Refused(message["error"]))

    async def _answer(self, request: Message) -> None:
        number = request["call"]
        try:
            self._send({"answer": number, "value": await self._serve(request)})
        except Exception as error:  # whatever it is, who waits for the answer would wait for ever
            if not isinstance(error, SandboxError | OSError):
                log.exception("a call %s of the process in Harbor's Python failed", request.get("op"))
            kind = "absent" if isinstance(error, NoSuchPath) else "failed"
            self._send({"answer": number, "error": str(error) or type(error).__name__, "kind": kind})
        finally:
            del self._at_work[number]


def _fail(answer: asyncio.Future[Message], error: Exception) -> None:
    """Whoever waits is told; nobody has to wait."""
    answer.set_exception(error)
    answer.exception()

"""The talk with the other side about one rollout: calls and answers, as JSON lines, in both directions.

Owns who waits for which answer. What is asked is `rollout`'s and `sandbox`'s.
"""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

Message = dict[str, Any]


class Peer:
    """The talk with the other side."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._ops: dict[str, Callable[[Message], Awaitable[Message]]] = {}
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._at_work: dict[int, asyncio.Task[None]] = {}
        self._num_calls = 0

    def serve(self, ops: dict[str, Callable[[Message], Awaitable[Message]]]) -> None:
        self._ops = ops

    def send(self, message: Message) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def call(self, op: str, **arguments: Any) -> Message:
        self._num_calls += 1
        number = self._num_calls
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self.send({"call": number, "op": op, **arguments})
        try:
            return await answer
        except asyncio.CancelledError:
            self.send({"cancel": number})
            raise
        finally:
            del self._asked[number]

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Until the other side is gone."""
        while line := await reader.readline():
            message = json.loads(line)
            if "call" in message:
                self._at_work[message["call"]] = asyncio.create_task(self._answer(message))
            elif "cancel" in message:
                if (task := self._at_work.get(message["cancel"])) is not None:
                    task.cancel()
            elif (answer := self._asked.get(message["answer"])) is not None and not answer.done():
                if "value" in message:
                    answer.set_result(message["value"])
                else:
                    kind = FileNotFoundError if message["kind"] == "absent" else RuntimeError
                    answer.set_exception(kind(message["error"]))

    async def _answer(self, request: Message) -> None:
        number = request["call"]
        try:
            self.send({"answer": number, "value": await self._ops[request["op"]](request)})
        except asyncio.CancelledError:
            self.send({"answer": number, "error": "cancelled", "kind": "cancelled"})
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            said = " ".join(str(error).split())[-2000:]
            self.send({"answer": number, "error": f"{type(error).__name__}: {said}", "kind": "failed"})
        finally:
            del self._at_work[number]

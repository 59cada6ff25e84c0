"""A thread of an episode's or a reward's own, for people's code that is not async.

Owns the thread: which one runs what, and what becomes of it when nobody waits any more. All calls of one episode come
from one thread, as clients and databases of that kind expect. A thread cannot be killed: a call that is given up is
waited for a moment, then left behind. Its late result is ignored, its thread ends when it does, and further calls get
another thread; there is no pool that it would fill up, and none that the runner's end would wait for. Called by
`loops` and by `rewards.custom`.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

END_WAIT_S = 2.0  # for a call that is given up; after that its object may be closed while the call still uses it

_Item: TypeAlias = tuple[Callable[[], Any], asyncio.Future[Any], asyncio.AbstractEventLoop]


class OwnThread:
    """Started at the first call. `close` it: the thread then ends, at once or when its call does."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[_Item | None] | None = None  # None = there is no thread

    async def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The function's result: awaited here if it is async, else made in the thread. Raises what it raises."""
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        result = await self.run(functools.partial(function, *args, **kwargs))
        return await result if inspect.isawaitable(result) else result

    async def run(self, work: Callable[[], Any]) -> Any:
        """In the thread. Raises what it raises; what would end a program (SystemExit) comes as RuntimeError."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        calls = self._calls = self._calls or self._started()
        calls.put((functools.partial(contextvars.copy_context().run, work), done, loop))
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            await asyncio.wait([done], timeout=END_WAIT_S)
            if not done.done() and self._calls is calls:
                self.close()
            raise
        finally:
            done.add_done_callback(_look_away)

    def close(self) -> None:
        """Idempotent; waits for nothing."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None

    def _started(self) -> queue.SimpleQueue[_Item | None]:
        calls: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        # A daemon: one that is stuck in somebody's code must not keep the runner from ending.
        threading.Thread(target=_serve, args=(calls,), name=self._name, daemon=True).start()
        return calls


def _serve(calls: queue.SimpleQueue[_Item | None]) -> None:
    while (item := calls.get()) is not None:
        work, done, loop = item
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = RuntimeError(f"StopIteration: {raised}") if isinstance(raised, StopIteration) else raised
        except BaseException as raised:  # SystemExit, KeyboardInterrupt: a library's exit() must not end the runner
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(_settle, done, result, error)
        del item, work, done, result, error  # not kept alive until the next call


def _settle(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)


def _look_away(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()  # whoever waited may be gone

"""The thread of an episode's own: one at a time, given up after a moment, never filling anything up."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from harness_trainer import own_thread
from harness_trainer.own_thread import OwnThread


@pytest.fixture
def thread():
    thread = OwnThread("episode of the test")
    yield thread
    thread.close()


def mine():
    return [one for one in threading.enumerate() if one.name == "episode of the test"]


async def until_gone(num=0):
    async with asyncio.timeout(5):
        while len(mine()) > num:
            await asyncio.sleep(0.01)


async def test_all_calls_come_from_one_thread_that_is_not_the_loops(thread):
    used = {await thread.call(threading.get_ident) for _ in range(5)}
    assert len(used) == 1 and threading.get_ident() not in used
    thread.close()
    await until_gone()


async def test_functions_of_every_kind(thread):
    async def is_async(x):
        return x + 1

    def gives_awaitable(x):
        return is_async(x)

    assert [await thread.call(f, 1) for f in (is_async, gives_awaitable, lambda x: x + 1)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("error", "expected"),
    [(ValueError("v"), ValueError), (StopIteration(1), RuntimeError), (SystemExit(1), RuntimeError)],
)
async def test_what_it_raises_reaches_the_caller_and_the_thread_lives_on(thread, error, expected):
    def fails():
        raise error

    with pytest.raises(expected):
        await thread.call(fails)
    assert await thread.call(lambda: 3) == 3


async def test_a_call_that_is_given_up_is_waited_for_first(thread):
    ended = []

    def short():
        time.sleep(0.2)
        ended.append(True)

    running = asyncio.create_task(thread.call(short))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended == [True]


async def test_one_that_does_not_end_is_left_behind_and_another_thread_goes_on(thread, monkeypatch):
    monkeypatch.setattr(own_thread, "END_WAIT_S", 0.05)
    free = threading.Event()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await thread.call(free.wait, 30)
        assert await thread.call(lambda: "here") == "here"
    assert len(mine()) == 4
    free.set()
    await until_gone(1)
    assert await thread.call(lambda: "still here") == "still here"

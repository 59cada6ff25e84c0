"""One clock per rollout: stages have limits, scoring keeps its share, queueing costs nothing, caps hold."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from harness_trainer.rollouts.budget import OVERHEAD_S, Budget, Caps, Limits, StageTimeout
from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.tasks import Task
from sandboxes.base import BoxSpec, Healthcheck


def limits_of(agent_s=100.0, tests_s=50.0, **settings):
    task = Task("t", Path(), "go", verify_script="exit 0", agent_timeout_s=agent_s, verifier_timeout_s=tests_s)
    return Limits.of(RolloutConfig(**settings), task)


def budget(total_s, agent_s=100.0, tests_s=50.0, **settings):
    return Budget(limits_of(agent_s, tests_s, deadline_s=total_s, **settings), {})


def test_without_a_deadline_of_its_own_a_rollout_may_take_what_its_stages_may_take_together():
    limits = limits_of(agent_s=100, tests_s=50, start_timeout_s=30)
    assert limits.total_s == 30 + 100 + 50 + OVERHEAD_S
    assert limits_of(agent_s=10_000, timeout_s=200).agent_s == 200, "the tighter of the run's and the task's"
    assert limits_of(agent_s=20, timeout_s=200).agent_s == 20


def test_the_time_that_a_health_check_may_take_is_nobody_elses():
    plain = Task("t", Path(), "go", verify_script="exit 0")
    checked = replace(plain, box=BoxSpec("t", healthcheck=Healthcheck("true", 5, 30, start_period_s=400, retries=2)))
    without, within = Limits.of(RolloutConfig(), plain), Limits.of(RolloutConfig(), checked)
    assert within == replace(without, start_s=without.start_s + 470, total_s=without.total_s + 470)


def test_a_longer_deadline_than_the_stages_need_changes_nothing():
    assert limits_of(deadline_s=100_000) == limits_of()


def test_however_short_the_deadline_the_agent_leaves_time_for_scoring():
    clock = budget(40.0)
    assert clock.agent_s == pytest.approx(30.0, abs=0.1)
    assert 20 < clock.tests_s <= 40


def test_an_agent_that_has_the_time_it_was_promised_loses_none_of_it_to_the_reserve():
    clock = budget(None)
    assert clock.agent_s == 100 and clock.tests_s == 50


async def test_time_that_a_slow_start_took_is_taken_from_the_agent_and_not_from_the_tests():
    clock = budget(0.8, start_timeout_s=10)
    async with clock.timed("create", 10):
        await asyncio.sleep(0.5)
    assert clock.agent_s < 0.15
    assert clock.left_s >= clock.limits.reserved_s > 0.1


async def test_a_stage_past_its_limit_is_named_with_its_limit_and_its_time_is_kept():
    clock = budget(100)
    with pytest.raises(StageTimeout, match="create took more than 0 s"):
        async with clock.timed("create", 0.05):
            await asyncio.sleep(5)
    assert clock.stage == "create"
    assert 0.04 < clock.spent_s("create") < 1


async def test_a_time_out_of_somebody_elses_is_not_taken_for_the_stages_own():
    with pytest.raises(TimeoutError, match="theirs"):
        async with budget(100).timed("agent", 50):
            raise TimeoutError("theirs")


async def test_stages_add_up_when_they_come_again():
    clock = budget(100)
    for _ in range(2):
        async with clock.timed("wait"):
            await asyncio.sleep(0.02)
    assert clock.spent_s("wait") >= 0.04


async def test_queueing_moves_the_deadline_and_work_does_not():
    caps = Caps(RolloutConfig(max_concurrent=4, max_verifying=1))
    holder = asyncio.Event()

    async def hold():
        async with budget(100).turn(caps.verifying):
            await holder.wait()

    held = asyncio.ensure_future(hold())
    await asyncio.sleep(0)
    clock = budget(100)
    asyncio.get_running_loop().call_later(0.2, holder.set)
    began = time.monotonic()
    async with clock.turn(caps.verifying):
        waited = time.monotonic() - began
        assert waited >= 0.19
        assert clock.left_s == pytest.approx(100, abs=0.1)
        async with clock.timed("verify"):
            await asyncio.sleep(0.2)
    assert clock.left_s == pytest.approx(99.8, abs=0.1)
    await held


async def test_caps_hold_and_are_given_back_whatever_happens():
    caps = Caps(RolloutConfig(max_concurrent=8, max_running=2))
    running = most = 0

    async def run(number):
        nonlocal running, most
        async with budget(100).turn(caps.running):
            running += 1
            most = max(most, running)
            try:
                await asyncio.sleep(0.01)
                if number % 3 == 0:
                    raise ValueError
            finally:
                running -= 1

    tasks = [asyncio.ensure_future(run(n)) for n in range(12)]
    await asyncio.sleep(0.005)
    tasks[1].cancel()  # at work
    tasks[11].cancel()  # in the queue
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most == 2
    await asyncio.wait_for(asyncio.gather(caps.running.acquire(), caps.running.acquire()), 1)


def test_caps_default_to_the_number_of_rollouts():
    caps = Caps(RolloutConfig(max_concurrent=3))
    assert (caps.running._value, caps.verifying._value) == (3, 3)

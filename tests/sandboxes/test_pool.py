"""The pool: ahead of need and within bounds, each sandbox for one caller only, none lost whatever is cancelled when."""

import asyncio
from pathlib import Path

import pytest

from sandboxes.base import BoxSpec, Limits, SandboxError, SetupFailed
from sandboxes.pool import Bounds, Pool, Times
from tests.sandboxes.pool_backend import ScriptedBackend, broken

A, B, C = BoxSpec("a"), BoxSpec("b"), BoxSpec("c")


async def settle():
    """Let everything that can go on without time passing go on."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_boxes_are_started_ahead_of_need_and_handed_out_warm_and_renewed():
    backend = ScriptedBackend()
    async with Pool(backend, Bounds(per_spec=2, total=8)) as pool:
        pool.plan([(A, 5)])
        await backend.until(lambda: pool.num_ready == 2)
        async with pool.acquire(A) as lease:
            assert lease.warm and lease.sandbox.renewed == 1
            assert (pool.counts.hits, pool.counts.misses) == (1, 0)
            await backend.until(lambda: pool.num_ready == 2)
        assert lease.sandbox.stopped
    assert backend.alive == []


async def test_a_box_is_never_handed_out_twice():
    backend = ScriptedBackend()
    seen = []
    async with Pool(backend, Bounds(per_spec=3, total=3, starting=2)) as pool:
        pool.plan([(A, 40)])

        async def use():
            async with pool.acquire(A) as lease:
                seen.append(lease.sandbox.number)
                await asyncio.sleep(0)

        await asyncio.gather(*(use() for _ in range(40)))
    assert len(seen) == len(set(seen)) == 40
    assert backend.alive == []
    assert pool.counts.hits + pool.counts.misses == 40


async def test_without_a_plan_nothing_is_started_before_it_is_asked_for():
    backend = ScriptedBackend()
    async with Pool(backend, Bounds()) as pool:
        async with pool.acquire(A) as lease:
            assert not lease.warm
        await settle()
        assert len(backend.begun) == 1


async def test_no_more_are_started_than_the_plan_says():
    backend = ScriptedBackend()
    async with Pool(backend, Bounds(per_spec=5, total=9)) as pool:
        pool.plan([(A, 3)])
        for _ in range(3):
            async with pool.acquire(A):
                await settle()
        await settle()
        assert len(backend.begun) == 3


async def test_a_plan_that_counts_those_who_already_wait_starts_no_box_too_many():
    backend = ScriptedBackend()
    backend.start_gate.clear()
    async with Pool(backend, Bounds(per_spec=4, total=8, starting=8)) as pool:
        asked = [asyncio.ensure_future(pool.take(A)) for _ in range(2)]
        await backend.until(lambda: len(backend.begun) == 2)
        pool.plan([(A, 2)])  # the two that wait
        await settle()
        assert len(backend.begun) == 2
        backend.start_gate.set()
        for lease in await asyncio.gather(*asked):
            await pool.give_up(lease)
        await settle()
        assert (len(backend.begun), pool.num_ready) == (2, 0)


async def test_bounds_hold_for_each_spec_and_for_all_together():
    backend = ScriptedBackend()
    async with Pool(backend, Bounds(per_spec=2, total=3, starting=2)) as pool:
        pool.plan([(A, 9), (B, 9), (C, 9)])
        await backend.until(lambda: pool.num_ready == 3)
        await settle()
        assert sorted(box.spec.name for box in backend.alive) == ["a", "a", "b"], "the most urgent first"
        assert backend.most_starting <= 2
        assert backend.most_alive == 3


async def test_two_specs_that_compete_for_the_bound_change_places_when_the_plan_does():
    backend = ScriptedBackend()
    async with Pool(backend, Bounds(per_spec=2, total=2)) as pool:
        pool.plan([(A, 2), (B, 2)])
        await backend.until(lambda: pool.num_ready == 2)
        pool.plan([(B, 2)])
        await backend.until(lambda: pool.num_ready == 2 and {box.spec.name for box in backend.alive} == {"b"})
        assert pool.counts.unused == 2


async def test_those_who_wait_come_before_what_is_planned():
    backend = ScriptedBackend()
    backend.start_gate.clear()
    async with Pool(backend, Bounds(per_spec=2, total=4, starting=1)) as pool:
        pool.plan([(A, 4)])
        await backend.until(lambda: len(backend.begun) == 1)
        asked = asyncio.ensure_future(pool.take(B))
        await settle()
        assert [box.spec.name for box in backend.begun] == ["a"], "the cap is shared"
        backend.start_gate.set()
        await pool.give_up(await asked)
        assert backend.begun[1].spec.name == "b"


async def test_the_cap_on_starts_is_shared_by_warm_and_cold():
    backend = ScriptedBackend()
    backend.start_gate.clear()
    async with Pool(backend, Bounds(per_spec=4, total=8, starting=3)) as pool:
        pool.plan([(A, 4), (B, 4)])
        asked = [asyncio.ensure_future(pool.take(C)) for _ in range(6)]
        await settle()
        assert backend.starting == 3
        backend.start_gate.set()
        leases = await asyncio.gather(*asked)
        assert backend.most_starting == 3
        for lease in leases:
            await pool.give_up(lease)


async def test_one_who_waits_gets_the_box_that_is_already_starting():
    backend = ScriptedBackend()
    backend.start_gate.clear()
    async with Pool(backend, Bounds(per_spec=1, total=1, starting=4)) as pool:
        pool.plan([(A, 1)])
        await backend.until(lambda: len(backend.begun) == 1)
        asked = asyncio.ensure_future(pool.take(A))
        await settle()
        backend.start_gate.set()
        lease = await asked
        assert lease.sandbox.number == 0 and len(backend.begun) == 1
        await pool.give_up(lease)


async def test_a_box_that_died_while_it_waited_is_replaced_and_ended():
    backend = ScriptedBackend()
    async with Pool(backend, Bounds(per_spec=2, total=2)) as pool:
        pool.plan([(A, 3)])
        await backend.until(lambda: pool.num_ready == 2)
        for box in backend.begun:
            box.dead = True
        async with pool.acquire(A) as lease:
            assert not lease.warm and not lease.sandbox.dead
        assert pool.counts.dead == 2
        await backend.until(lambda: backend.begun[0].stopped and backend.begun[1].stopped)


async def test_a_box_that_does_not_answer_at_hand_out_counts_as_dead():
    backend = ScriptedBackend()
    async with Pool(backend, Bounds(per_spec=1, total=1), Times(check=0.01)) as pool:
        pool.plan([(A, 1)])
        await backend.until(lambda: pool.num_ready == 1)
        backend.renew_gate.clear()
        async with pool.acquire(A) as lease:
            assert lease.sandbox.number == 1


async def test_a_failed_start_ahead_of_need_is_tried_again_later_and_not_in_a_loop(caplog):
    backend = ScriptedBackend(start_error=lambda box: broken() if box.number < 2 else None)
    async with Pool(backend, Bounds(per_spec=1, total=1), Times(backoff=(0.05, 0.2))) as pool:
        pool.plan([(A, 1)])
        await backend.until(lambda: len(backend.begun) == 1)
        await settle()
        assert len(backend.begun) == 1, "no second try at once"
        await backend.until(lambda: pool.num_ready == 1)
        assert len(backend.begun) == 3 and pool.counts.failed == 2
    assert "no space left" in caplog.text
    assert all(box.stopped for box in backend.begun), "a failed start may have left something"


async def test_a_failed_start_is_told_to_the_one_who_waits_and_to_nobody_else():
    backend = ScriptedBackend(start_error=lambda box: broken() if box.number == 0 else None)
    async with Pool(backend, Bounds(starting=1)) as pool:
        results = await asyncio.gather(pool.take(A), pool.take(A), return_exceptions=True)
        assert isinstance(results[0], SandboxError) and "no space left" in str(results[0])
        await pool.give_up(results[1])


async def test_any_exception_of_a_backend_is_a_sandbox_error_and_leaks_no_place():
    backend = ScriptedBackend(start_error=lambda box: KeyError("Id") if box.number < 3 else None)
    async with Pool(backend, Bounds(starting=1)) as pool:
        for _ in range(3):
            with pytest.raises(SandboxError, match="KeyError"):
                await pool.take(A)
        async with pool.acquire(A):
            pass


async def test_an_image_that_cannot_be_had_stops_filling_and_fails_everyone_who_waits_at_once():
    backend = ScriptedBackend(prepare_error=lambda spec: SetupFailed("does not build") if spec == A else None)
    backend.prepare_gate.clear()
    async with Pool(backend, Bounds(per_spec=2, total=4)) as pool:
        pool.plan([(A, 4), (B, 1)])
        asked = [asyncio.ensure_future(pool.take(A)) for _ in range(3)]
        await settle()
        backend.prepare_gate.set()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(result, SetupFailed) for result in results)
        assert backend.prepared.count("a") == 1, "all who wait share one try"
        await backend.until(lambda: pool.num_ready == 1)
        pool.plan([(A, 4), (B, 1)])
        await settle()
        assert backend.prepared.count("a") == 1, "nothing more ahead of need"
        with pytest.raises(SetupFailed, match="does not build"):
            await pool.prepare(A)
        assert backend.prepared.count("a") == 2, "one who asks gets a try"


async def test_a_health_check_that_fails_stops_filling_too():
    backend = ScriptedBackend(start_error=lambda box: SetupFailed("unhealthy"))
    async with Pool(backend, Bounds(per_spec=3, total=3, starting=1), Times(backoff=(0.01, 0.01))) as pool:
        pool.plan([(A, 3)])
        await backend.until(lambda: pool.counts.failed == 1)
        await asyncio.sleep(0.05)
        pool.plan([(A, 3)])
        await settle()
        assert len(backend.begun) == 1


async def test_a_slow_image_holds_up_nobody_else():
    backend = ScriptedBackend()
    backend.prepare_gate.clear()
    async with Pool(backend, Bounds(starting=1, preparing=1)) as pool:
        slow = asyncio.ensure_future(pool.take(A))
        await backend.until(lambda: backend.prepared == ["a"])
        backend.prepare_gate.set()
        await settle()
        backend.prepare_gate.clear()
        await pool.give_up(await slow)
        blocked = asyncio.ensure_future(pool.take(B))
        await backend.until(lambda: backend.prepared[-1] == "b")
        async with pool.acquire(A):  # its image is there already
            assert not blocked.done()
        backend.prepare_gate.set()
        await pool.give_up(await blocked)


async def test_equal_specs_share_boxes_and_different_ones_never_do():
    backend = ScriptedBackend()
    one = BoxSpec("t", build_dir=Path("x"), env={"K": "1"}, limits=Limits(memory_mb=1))
    same = BoxSpec("t", build_dir=Path("x"), env={"K": "1"}, limits=Limits(memory_mb=1))
    other = BoxSpec("t", build_dir=Path("x"), env={"K": "2"}, limits=Limits(memory_mb=1))
    async with Pool(backend, Bounds(per_spec=1, total=1)) as pool:
        pool.plan([(one, 1)])
        await backend.until(lambda: pool.num_ready == 1)
        async with pool.acquire(other) as lease:
            assert not lease.warm and lease.sandbox.spec == other
        async with pool.acquire(same) as lease:
            assert lease.warm


@pytest.mark.parametrize("gate", ["prepare_gate", "start_gate", "renew_gate"])
async def test_cancelling_one_who_asks_loses_no_box(gate):
    backend = ScriptedBackend()
    async with Pool(backend, Bounds(per_spec=1, total=1)) as pool:
        if gate == "renew_gate":
            pool.plan([(A, 1)])
            await backend.until(lambda: pool.num_ready == 1)
        getattr(backend, gate).clear()
        asked = asyncio.ensure_future(pool.take(A))
        await settle()
        asked.cancel()
        assert isinstance((await asyncio.gather(asked, return_exceptions=True))[0], asyncio.CancelledError)
        getattr(backend, gate).set()
        await settle()
        async with asyncio.timeout(2), pool.acquire(A):
            pass
    assert backend.alive == []


async def test_a_box_that_comes_in_the_moment_its_asker_is_cancelled_goes_to_the_next():
    backend = ScriptedBackend()
    async with Pool(backend, Bounds(starting=1)) as pool:
        for steps in range(12):  # cancelled at every point of the hand-over
            asked = asyncio.ensure_future(pool.take(A))
            for _ in range(steps):
                await asyncio.sleep(0)
            asked.cancel()
            got = (await asyncio.gather(asked, return_exceptions=True))[0]
            if not isinstance(got, BaseException):
                await pool.give_up(got)
        async with pool.acquire(A):
            pass
    assert backend.alive == []


async def test_closing_while_boxes_start_ends_them_and_tells_those_who_wait():
    backend = ScriptedBackend()
    backend.start_gate.clear()
    pool = Pool(backend, Bounds(per_spec=2, total=4))
    pool.plan([(A, 2)])
    asked = asyncio.ensure_future(pool.take(B))
    await backend.until(lambda: len(backend.begun) == 3)
    await pool.close()
    with pytest.raises(SandboxError, match="closed"):
        await asked
    assert all(box.stopped for box in backend.begun)
    with pytest.raises(SandboxError, match="closed"):
        await pool.take(A)
    pool.plan([(A, 2)])
    await settle()
    assert len(backend.begun) == 3
    await pool.close()


async def test_closing_during_a_build_tells_those_who_wait_for_it():
    backend = ScriptedBackend()
    backend.prepare_gate.clear()
    pool = Pool(backend, Bounds())
    asked = asyncio.ensure_future(pool.prepare(A))
    await backend.until(lambda: backend.prepared == ["a"])
    await pool.close()
    with pytest.raises(SandboxError, match="closed"):
        await asked


async def test_cancelling_the_close_still_ends_everything():
    backend = ScriptedBackend()
    pool = Pool(backend, Bounds(per_spec=3, total=3))
    pool.plan([(A, 3)])
    await backend.until(lambda: pool.num_ready == 3)
    backend.stop_gate.clear()
    closing = asyncio.ensure_future(pool.close())
    await settle()
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    backend.stop_gate.set()
    await backend.until(lambda: backend.alive == [])


async def test_a_stop_that_fails_is_reported_and_spoils_nothing(caplog):
    backend = ScriptedBackend(stop_error=broken("engine away"))
    async with Pool(backend, Bounds()) as pool:
        async with pool.acquire(A):
            pass
    assert "engine away" in caplog.text


async def test_a_stop_that_hangs_does_not_hold_its_caller_for_long():
    backend = ScriptedBackend()
    async with Pool(backend, Bounds(), Times(stop=0.02)) as pool:
        backend.stop_gate.clear()
        async with asyncio.timeout(2):
            async with pool.acquire(A) as lease:
                pass
        assert not lease.sandbox.stopped
        backend.stop_gate.set()
    assert lease.sandbox.stopped, "it went on ending"


async def test_a_start_hangs_that_has_been_under_way_for_so_long_and_none_that_is_queued_for():
    backend = ScriptedBackend()
    backend.start_gate.clear()
    async with Pool(backend, Bounds(starting=1)) as pool:
        first, queued = asyncio.create_task(pool.take(A)), asyncio.create_task(pool.take(B))
        await backend.until(lambda: len(backend.begun) == 1)
        await asyncio.sleep(0.02)
        assert [pool.hangs(A, 0.01), pool.hangs(A, 60), pool.hangs(B, 0.0)] == [True, False, False]
        backend.start_gate.set()
        for lease in [await first, await queued]:
            await pool.give_up(lease)
        assert not pool.hangs(A, 0.0)


async def test_a_start_that_hangs_gives_its_place_back():
    backend = ScriptedBackend()
    backend.start_gate.clear()
    async with Pool(backend, Bounds(starting=1), Times(start=0.02)) as pool:
        with pytest.raises(SandboxError, match="took more than"):
            await pool.take(A)
        backend.start_gate.set()
        async with pool.acquire(A):
            pass
    assert backend.begun[0].stopped

"""What is left open at gateways that a run has no more, as it is continued with fewer replicas of the engine."""

from __future__ import annotations

import logging
import signal
from dataclasses import replace

import pytest

from capture_proxy.engines.scripted import ScriptedEngine
from capture_proxy.store import load_sessions
from harness_trainer.rollouts.sealing import seal_removed
from harness_trainer.rollouts.store import RolloutStore
from tests.capture.serving import served
from tests.capture.stub_vllm import StubVllm, reply
from tests.loops.test_white_box_process import num_open_sessions, running
from tests.rollouts.test_takeover import FACTS

GATEWAYS = ("", "gateway-1", "gateway-2")


async def leave_sessions(folder):
    """One at each of three gateways, which are gone by now."""
    for name in GATEWAYS:
        async with served(ScriptedEngine("the moon", version="v1"), folder / "store.sqlite", name=name) as gateway:
            await gateway.mint(f"of {name}")


@pytest.mark.parametrize("num_gateways", [1, 2, 3])
async def test_sessions_of_gateways_that_are_gone_for_good_are_sealed_and_no_others(tmp_path, num_gateways, caplog):
    await leave_sessions(tmp_path)
    before = load_sessions(tmp_path / "store.sqlite")
    assert [session.gateway for session in before if not session.sealed] == list(GATEWAYS)
    with caplog.at_level(logging.INFO, "harness_trainer.rollouts"):
        for _ in range(2):
            await seal_removed(tmp_path / "store.sqlite", num_gateways)
    after = load_sessions(tmp_path / "store.sqlite")
    assert [session.gateway for session in after if not session.sealed] == list(GATEWAYS[:num_gateways])
    assert [replace(session, sealed=False) for session in after] == before
    gone = ", ".join(GATEWAYS[num_gateways:])
    said = [f"sealed {3 - num_gateways} sessions of gateways that the run has no more: {gone}"] if gone else []
    assert [record.getMessage() for record in caplog.records] == said


async def test_a_store_that_cannot_be_used_is_told_and_ends_nothing(tmp_path, caplog):
    (tmp_path / "store.sqlite").write_text("no database")
    await seal_removed(tmp_path / "store.sqlite", 1)
    assert "may be open still: cannot open the store" in caplog.text


async def test_a_runner_with_fewer_replicas_closes_what_was_pinned_to_the_others_and_runs_it_again(tmp_path):
    store = RolloutStore(tmp_path / "store.sqlite")
    store.publish(1)
    store.open_group(0, "n1", "Moon")
    store.start_rollout("of gateway-2", 0, 0, 0)
    store.note_agent("of gateway-2", "local", "box", replace(FACTS, replica=2))
    await leave_sessions(tmp_path)
    assert num_open_sessions(tmp_path) == 3
    async with running(tmp_path, StubVllm(chunks=reply("the ", "moon"))) as runner:
        await runner.until(lambda: store.group_counts() == {"ready": 1})
        assert await runner.end(signal.SIGTERM) == 0
    assert store.outcome_counts() == {"cancelled": 1, "ok": 4}
    left = [session for session in load_sessions(tmp_path / "store.sqlite") if not session.sealed]
    assert [session.gateway for session in left] == [""], "that of no attempt: its own gateway is there"
    store.close()

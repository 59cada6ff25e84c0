"""Sandboxes that are kept for a dead owner's successor: who lets them be, and for how long."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from local_boxes import backend, running
from test_reaping import owner

from sandboxes.base import BoxSpec, Command
from sandboxes.docker_labels import dead_owner, labels_of
from sandboxes.lifecycle import Reaped, kept, reap
from sandboxes.ownership import (
    Claim,
    Keeper,
    Owner,
    claim,
    keeper_of_this_process,
    read_record,
)
from sandboxes.processes import MARKER, Traces, find_all, kill_owned
from tests.sandboxes.e2b_opening import open_e2b, records
from tests.sandboxes.e2b_standin import KEY, Standin
from tests.sandboxes.test_e2b_leaks import kill
from tests.sandboxes.test_e2b_leaks import owner as e2b_owner

ME = Keeper(Owner.current(), "runner")
WAITS = "setsid sleep 600 & sleep 600"


def keep(registry: Path, claim_id: str, keeper: Keeper = ME, for_s: float = 600.0) -> None:
    """As its owner would have done."""
    record = read_record(registry / f"{claim_id}.json", Owner.current())
    assert record is not None
    record.keep(keeper, time.time() + for_s)


@contextlib.contextmanager
def orphan(isolation: str, registry: Path, root: Path) -> Iterator[str]:
    """A sandbox with a job, kept by this process, whose owner was killed."""
    with owner(isolation, registry, root, 1, WAITS) as (dead, pairs):
        (box_id, _) = pairs[0]
        while running(root, box_id).count("sleep 600") < 2:
            time.sleep(0.02)
        keep(registry, box_id)
        dead.kill()
        dead.wait()
        yield box_id
    reap(registry, given_up=ME)


def ids(reaped: list[Reaped]) -> list[str]:
    assert not any(one.problem for one in reaped)
    return [one.id for one in reaped]


async def test_it_lives_while_its_keeper_does_and_is_ended_when_that_gives_up(
    registry: Path, root: Path, isolation: str
) -> None:
    with orphan(isolation, registry, root) as box_id:
        assert reap(registry) == [] and reap(registry, dry_run=True) == []
        assert reap(registry, given_up=Keeper(ME.owner, "gateway")) == []
        assert running(root, box_id).count("sleep 600") == 2
        assert ids(reap(registry, given_up=ME)) == [box_id]
        assert running(root, box_id) == [] and os.listdir(root) == os.listdir(registry) == []


async def test_one_that_was_taken_over_is_kept_again_should_its_new_owner_die(
    registry: Path, root: Path, isolation: str
) -> None:
    with orphan(isolation, registry, root) as box_id:
        async with backend(isolation, root, registry) as heir:
            box = await heir.attach(box_id)
            record = read_record(registry / f"{box_id}.json", Owner.current())
            assert record is not None and record.keeper == ME and record.owner == Owner.current()
            assert reap(registry, given_up=ME) == [], "it has an owner"
            assert (await box.run(Command(["echo", "mine"]))).stdout == "mine\n"
    assert os.listdir(root) == os.listdir(registry) == []


@pytest.mark.parametrize("why", ["its keeper is dead", "its time is over"])
async def test_nobody_waits_for_ever(registry: Path, root: Path, why: str) -> None:
    with orphan("none", registry, root) as box_id:
        dead = Keeper(replace(ME.owner, start_ticks=1), "runner")
        keep(registry, box_id, dead if why == "its keeper is dead" else ME, 600 if why == "its keeper is dead" else -1)
        assert kept(registry) == []
        assert ids(reap(registry)) == [box_id]


def test_a_keeper_elsewhere_is_believed_until_the_time_is_over(registry: Path) -> None:
    record = claim(registry, "sandbox")
    record.owner = replace(record.owner, start_ticks=1)
    elsewhere = Keeper(replace(ME.owner, host="elsewhere"), "runner")
    record.keep(elsewhere, time.time() + 60)
    assert reap(registry) == []
    record.keep(elsewhere, time.time() - 1)
    assert ids(reap(registry)) == [record.id]


def test_labels_in_an_engine_do_not_overrule_a_record_that_is_kept(registry: Path) -> None:
    record = claim(registry, "sandbox")
    labels = labels_of(record, "container")
    record.owner = replace(record.owner, start_ticks=1)
    record.save()
    assert dead_owner(labels, Owner.current())
    record.keep(ME, time.time() + 60)
    assert not dead_owner(labels, Owner.current())
    record.release()


def test_a_record_of_an_older_schema_is_nobodys_to_keep(registry: Path) -> None:
    record = claim(registry, "sandbox")
    record.keep(ME, time.time() + 60)
    path = registry / f"{record.id}.json"
    data = json.loads(path.read_text())
    assert read_record(path, Owner.current()) == record
    del data["keeper"], data["kept_until"]
    data["schema"] = 2
    path.write_text(json.dumps(data))
    older = read_record(path, Owner.current())
    assert older is not None and older.keeper is None and not older.is_kept(Owner.current())
    path.write_text("{")
    damaged = read_record(path, Owner.current())
    assert damaged is not None and not damaged.is_kept(Owner.current())
    record.release()


def test_killing_an_owned_thing_spares_what_is_kept_in_it_and_all_below(registry: Path, tmp_path: Path) -> None:
    outer, inner = claim(registry, "runner"), claim(registry, "sandbox")
    env = {"PATH": os.environ["PATH"], MARKER: f"{outer.id}/{inner.id}"}
    script = "sleep 600 & env -i setsid sleep 600 & wait"
    with (
        subprocess.Popen(["sh", "-c", script], env=env, start_new_session=True) as boxed,
        subprocess.Popen(["sh", "-c", script], env={**env, MARKER: outer.id}, start_new_session=True) as other,
    ):
        while len(find_all(outer.id, Traces())) < 6:
            time.sleep(0.01)
        inner.keep(ME, time.time() + 60)
        assert kill_owned(outer.id, Traces(parent=os.getpid()), spared=kept(registry)) >= 3
        assert other.wait(5) == -9 and boxed.poll() is None
        assert len(find_all(inner.id, Traces())) == 3
        kill_owned(outer.id)
    for record in (outer, inner):
        record.release()


def test_a_process_knows_who_starts_it_again_by_its_record(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keeper_of_this_process(registry) is None
    record: Claim = claim(registry, "runner")
    monkeypatch.setenv(MARKER, f"outer-1-1-00000000/{record.id}")
    assert keeper_of_this_process(registry) == ME
    record.release()
    assert keeper_of_this_process(registry) is None


async def test_in_e2b_the_next_backends_sweep_lets_it_be_and_it_is_taken_over(
    standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("E2B_API_KEY", KEY)
    with e2b_owner(standin, tmp_path, 2) as dead:
        first, second = records(tmp_path)
        keep(tmp_path / "owned", Path(first).stem)
        kill(dead)
    by_claim = {life.metadata["harness-trainer.claim"]: life.sandbox_id for life in standin.running}
    async with open_e2b(standin, tmp_path, run_id="next") as successor:
        assert [life.sandbox_id for life in standin.running] == [by_claim[Path(first).stem]]
        box = await successor.attach(by_claim[Path(first).stem])
        assert (await box.run(Command(["echo", "mine"]))).stdout == "mine\n"
    assert standin.running == []
    reap(tmp_path / "owned")
    assert records(tmp_path) == [] and Path(second).stem in by_claim


async def test_a_sandbox_is_kept_by_its_owners_word_and_that_ends_with_it(
    registry: Path, root: Path, isolation: str
) -> None:
    async with backend(isolation, root, registry) as opened, opened.sandbox(BoxSpec("kept")) as box:
        await box.keep(ME, time.time() + 60)
        assert [thing.id for thing in kept(registry)] == [box.sandbox_id]
    assert kept(registry) == []

"""Which attempts of a killed runner go on, and what becomes of the others: real store, sandboxes that do as told."""

import asyncio
import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from capture_proxy.errors import NotFound
from harness_trainer.rollouts import agent_stage
from harness_trainer.rollouts.at_work import Facts
from harness_trainer.rollouts.budget import Budget, Limits
from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.journal import Entry, Journal
from harness_trainer.rollouts.needs import Needs
from harness_trainer.rollouts.slots import Slots
from harness_trainer.rollouts.sources import OpenSource, Sources
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.takeover import Takeover
from harness_trainer.rollouts.types import Job, Outcome, RolloutResult, Taken
from sandboxes.base import JobStatus, RunResult, SandboxError, SandboxGone
from sandboxes.ownership import Keeper, Owner
from sandboxes.pool import Bounds, Pool
from tests.sandboxes.pool_backend import ScriptedBackend

FACTS = Facts(1.76e9, 600.0, 1290.5, 3, True, {"queue": 0.5, "create": 1.2})
TASKS = {"moon": SimpleNamespace(name="moon")}
KEEPER = Keeper(Owner.current(), "runner")


@dataclass
class Box:
    sandbox_id: str
    jobs: dict = field(default_factory=lambda: {"job-1": JobStatus(True, None, "", "", False)})
    stopped: bool = False
    kept: list = field(default_factory=list)
    events: list = field(default_factory=list)

    async def job(self, job_id):
        return self.jobs[job_id]

    async def wait_job(self, job_id):
        return self.jobs[job_id]

    async def renew(self):
        pass

    async def keep(self, keeper, until):
        self.kept.append((keeper, until))

    async def stop(self):
        self.stopped = True


@dataclass
class Backend:
    boxes: dict

    async def attach(self, sandbox_id):
        found = self.boxes.get(sandbox_id, SandboxGone("there is none"))
        if isinstance(found, Exception):
            raise found
        if found is None:
            await asyncio.sleep(600)
        return found


class Admin:
    def __init__(self):
        self.sealed = []

    async def seal(self, session_id):
        self.sealed.append(session_id)
        raise NotFound("it had none yet")


@pytest.fixture
def store(tmp_path):
    store = RolloutStore(tmp_path / "store.sqlite")
    store.open_group(0, "moon", "h")
    yield store
    store.close()


def attempt(store, name="r0", *, group=0, slot=0, number=0, sandbox_type="local", box="box", job="job-1", tested=False):
    store.start_rollout(name, group, slot, number)
    store.note_agent(name, sandbox_type, box, FACTS)
    if job is not None:
        store.note_job(name, job)
    if tested:
        store.note_tests(name)


async def taken_over(store, tmp_path, boxes, *, admin=None, **options):
    given = {"tasks": TASKS, "evaluation_tasks": {}, "harnesses": [("", "h")], "attach_s": 0.2, **options}
    journal = Journal(store, "local", KEEPER)
    return await Takeover(journal, Backend(boxes), tmp_path / "owned", admin or Admin(), **given)()


async def test_an_attempt_goes_on_as_it_was(store, tmp_path):
    attempt(store, slot=2, number=1)
    box, admin = Box("box"), Admin()
    (job,) = await taken_over(store, tmp_path, {"box": box}, admin=admin)
    assert (job.rollout_id, job.group_id, job.attempt, job.harness, job.task) == ("r0", 0, 1, "h", TASKS["moon"])
    assert job.taken == Taken(2, box, "job-1", True, FACTS) and job.has_box() == 3
    assert store.outcome_counts() == {"running": 1} and admin.sealed == [] and not box.stopped


async def test_evaluations_have_tasks_of_their_own(store, tmp_path):
    store.publish(1)
    store.start_evaluation(0, [("star", "h")])
    attempt(store, group=-1)
    star = SimpleNamespace(name="star")
    (job,) = await taken_over(store, tmp_path, {"box": Box("box")}, evaluation_tasks={"star": star})
    assert job.task is star


@pytest.mark.parametrize(
    ("how", "boxes"),
    [
        ({"job": None}, {"box": Box("box")}),
        ({"sandbox_type": "docker"}, {"box": Box("box")}),
        ({}, {}),
        ({}, {"box": SandboxError("it belongs to process 7")}),
        ({}, {"box": OSError("no route")}),
        ({}, {"box": None}),
    ],
    ids=["not started", "another kind", "gone", "another's", "unreachable", "hangs"],
)
async def test_what_cannot_go_on_is_cancelled_and_its_session_sealed(store, tmp_path, how, boxes):
    attempt(store, **how)
    admin = Admin()
    assert await taken_over(store, tmp_path, boxes, admin=admin) == []
    assert store.outcome_counts() == {"cancelled": 1} and store.unfinished_rollouts() == []
    assert admin.sealed == ["r0"]


async def test_one_without_an_agent_is_cancelled(store, tmp_path):
    store.start_rollout("r0", 0, 0, 0)
    assert await taken_over(store, tmp_path, {}) == []
    assert store.outcome_counts() == {"cancelled": 1}


@pytest.mark.parametrize("why", ["its group is over", "its task is gone", "its agent is gone"])
async def test_what_is_of_no_use_is_not_attached(store, tmp_path, why):
    attempt(store)
    if why == "its group is over":
        store.mark_dropped(0, "stale")
    gone = {"its task is gone": {"tasks": {}}, "its agent is gone": {"harnesses": [("other", "h")]}}.get(why, {})
    assert await taken_over(store, tmp_path, {"box": Box("box")}, **gone) == []
    assert store.outcome_counts() == {"cancelled": 1}


async def test_a_sandbox_that_does_not_know_the_job_is_ended(store, tmp_path):
    attempt(store, job="job-2")
    box = Box("box")
    assert await taken_over(store, tmp_path, {"box": box}) == [] and box.stopped
    assert store.outcome_counts() == {"cancelled": 1}


async def test_where_tests_were_at_work_nothing_is_repeated(store, tmp_path):
    attempt(store, tested=True)
    attempt(store, "r1", slot=1, box="other")
    store.open_group(1, "code/moon", "h")
    attempt(store, "r2", group=1, box="third", tested=True)
    boxes = {name: Box(name) for name in ("box", "other", "third")}
    jobs = await taken_over(store, tmp_path, boxes, sources=["code", "shop"])
    assert [job.rollout_id for job in jobs] == ["r1"], "one's fate is not another's"
    spoiled, of_source = store.rollouts()
    assert (spoiled.source, of_source.source) == ("", "code"), "the audit holds it against the task's name"
    assert (spoiled.outcome, spoiled.failed_stage, spoiled.reward) == ("infra_failed", "verify", None)
    assert spoiled.stages_s == FACTS.stages_s and "tests ran in the agent's own sandbox" in spoiled.detail
    assert store.results(0) == [], "it stands for no slot"


async def test_a_stop_in_the_middle_of_it_closes_them_all(store, tmp_path):
    attempt(store)
    attempt(store, "r1", slot=1, box="slow")
    admin = Admin()
    boxes = {"box": Box("box"), "slow": None}
    taking = asyncio.ensure_future(taken_over(store, tmp_path, boxes, admin=admin, attach_s=60))
    await asyncio.sleep(0.1)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert store.outcome_counts() == {"cancelled": 2} and sorted(admin.sealed) == ["r0", "r1"]


# --- attempts that no group asks for --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_over", [True, False], ids=["over", "under way"])
@pytest.mark.parametrize("why", ["its group is of no use any more", "the run was stopped"])
async def test_what_goes_on_for_a_group_that_never_asks_for_it_gets_its_end(store, is_over, why):
    """Runner and learner were killed in an evaluation: the new runner takes its agents over, then it is dropped."""
    store.start_evaluation(2, [("moon", "h")])
    attempt(store, group=-1)
    begun = asyncio.Event()

    async def go_on(job):
        begun.set()
        await asyncio.sleep(0 if is_over else 600)
        return RolloutResult(job.rollout_id, job.group_id, "moon", "h", 0, Outcome.OK, 1.0)

    config = RolloutConfig()
    sources = Sources([OpenSource(config, list(TASKS.values()), go_on, lambda *_: "h")])
    slots = Slots(config, store, sources, Needs(sources.plan), engine_version=lambda: 3)
    job = Job("r0", -1, 0, TASKS["moon"], harness="h", taken=Taken(0, Box("box"), "job-1", True, FACTS))
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(10), asyncio.TaskGroup() as jobs:
            slots.resume(jobs, [job])
            await begun.wait()
            await asyncio.sleep(0.05)
            assert store.outcome_counts() == {"running": 1}, "it may still be asked for"
            if why != "the run was stopped":
                store.rewind(1)
                while store.outcome_counts() != {"cancelled": 1}:
                    await asyncio.sleep(0.02)
            raise asyncio.CancelledError  # as SIGTERM does
    (ended,) = store.rollouts()
    assert (ended.outcome, ended.reward, ended.detail) == ("cancelled", None, f"cancelled: {why}")
    assert store.results(-1) == [] and store.unfinished_rollouts() == []


# --- what is written, and the clock ---------------------------------------------------------------------------------


async def test_the_journal_has_it_all_before_the_agent_starts(store):
    store.start_rollout("r0", 0, 0, 0)
    budget = Budget(Limits(300, 600, 60, 1000, 100), {"create": 2.0})
    box = Box("box")
    job = Job("r0", 0, 0, TASKS["moon"], queued_s=1.5)
    entry = Entry(Journal(store, "local", KEEPER), job, box, budget, 4, None)
    await entry.starting(600.0)
    (one,) = store.unfinished_rollouts()
    facts = one.at_work.facts
    assert (one.at_work.sandbox_id, one.at_work.job_id) == ("box", None)
    assert (facts.limit_s, facts.version, facts.warm) == (600.0, 4, None)
    assert facts.stages_s == {"queue": 1.5, "create": 2.0} and 990 < facts.left_s <= 1000
    ((keeper, until),) = box.kept
    assert keeper == KEEPER and facts.started_at + facts.left_s < until < facts.started_at + facts.left_s + 1000
    await entry.started("job-9")
    assert store.unfinished_rollouts()[0].at_work.job_id == "job-9"
    unkept = Box("box")
    await replace(entry, journal=Journal(store, "local", None), sandbox=unkept).starting(600.0)
    assert unkept.kept == [], "nobody would take it over"


@pytest.mark.parametrize("running", [True, False])
async def test_the_time_of_an_agent_is_its_own_and_nobodys_time_is_not_the_rollouts(running):
    facts = replace(FACTS, started_at=time.time() - 100.0)
    ended = JobStatus(False, 0, "said", "", False, duration_s=40.0)
    box = Box("box", {"job-1": ended})
    taken = Taken(0, box, "job-1", running, facts)
    budget = Budget(Limits(300, 600, 60, 1000, 100), {})
    agent_stage.budget_of(taken, budget)
    assert budget.left_s == pytest.approx(facts.left_s - 100, abs=1)
    async with Pool(ScriptedBackend(), Bounds()) as pool:
        job = Job("r0", 0, 0, TASKS["moon"], taken=taken)
        ran = await agent_stage.run_agent(job, None, pool.adopt(box), budget, None)
        assert pool.counts.adopted == 1
    assert isinstance(ran, RunResult) and (ran.exit_code, ran.stdout) == (0, "said")
    away_s = 0.0 if running else 60.0
    assert budget.stages_s["away"] == pytest.approx(away_s, abs=1)
    assert budget.stages_s["agent"] == pytest.approx(100 - away_s, abs=1)
    assert budget.left_s == pytest.approx(facts.left_s - 100 + away_s, abs=1)
    assert budget.stages_s["create"] == 1.2


async def test_an_attempt_goes_on_with_the_replica_that_it_is_pinned_to(store, tmp_path):
    for slot, replica in enumerate((1, 0, 2)):
        store.start_rollout(f"r{slot}", 0, slot, 0)
        store.note_agent(f"r{slot}", "local", "box", replace(FACTS, replica=replica))
        store.note_job(f"r{slot}", "job-1")
    first, second, admin, other = Box("box"), Box("box"), Admin(), Admin()
    jobs = await taken_over(store, tmp_path, {"box": first}, admin=admin, others=[(Backend({"box": second}), other)])
    assert {job.rollout_id: job.taken.sandbox for job in jobs} == {"r0": second, "r1": first}
    assert [job.taken.facts.replica for job in jobs] == [1, 0]
    assert admin.sealed == other.sealed == ["r2"], "of a replica that the run has no more; its gateway alone knows it"

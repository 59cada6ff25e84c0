"""Reward functions that judge a whole group at once, in the real runner: who is in the list, and what is closed."""

from __future__ import annotations

import contextlib
import importlib
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from harness_trainer.environments import EnvironmentClassConfig
from harness_trainer.loops.base import EnvironmentFault
from harness_trainer.rollouts.group_scores import WhiteBoxGroupScores, group_scores_of
from harness_trainer.rollouts.sources import OpenSource
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.white_box import run_rollout
from tests.loops.class_playing import written
from tests.loops.playing import playing
from tests.rollouts.policy import ready, run_sources

ENV = """
import asyncio, time
from harness_trainer.loops.base import EpisodeLost
LOST, HANGS, CALLS, CLOSED, MADE = set(), set(), [], [], []
class Env:
    def __init__(self):
        MADE.append(self)
        self.number = len(MADE)
    def reset(self, n, **kwargs):
        if self.number in LOST:
            raise EpisodeLost("the server is gone")
        self.words = []
    async def say(self, word: str) -> str:
        '''Say it.

        Args:
            word: What to say
        '''
        while self.number in HANGS:
            await asyncio.sleep(0.01)
        self.words.append(word)
        return "ok"
    def close(self):
        CLOSED.append(self)
def place(environments, prompts, completions, completion_ids, n, log_metric, **kwargs):
    lengths = {len(each) for each in (environments, prompts, completions, completion_ids, n)}
    assert lengths == {len(environments)} and not any(env in CLOSED for env in environments)
    assert all(env.words == ["moon"] for env in environments)
    CALLS.append([env.number for env in environments])
    log_metric("num", len(environments))
    return [float(at) for at in range(len(environments))]
def leaves_out_the_first(environments, **kwargs):
    return [None, *(1.0 for _ in environments[1:])]
def fails(environments, **kwargs):
    raise ValueError("my bug")
def wrong(environments, **kwargs):
    return [1.0]
"""
OWN = ENV.replace("    def close", "    def get_reward(self):\n        return 0.25\n    def close")


@pytest.fixture(scope="module", autouse=True)
def openenv_imported():
    """The first trace imports it: many seconds on a busy machine, which no test's time limit should pay."""
    importlib.import_module("openenv.core.harness")


@pytest.fixture
def store(tmp_path):
    store = RolloutStore(tmp_path / "runner.sqlite")
    store.publish(1)
    yield store
    store.close()


def _says_moon(request) -> Reply:
    over = any(message["role"] == "tool" for message in request.messages)
    return Reply("Done.") if over else Reply("", [("say", {"word": "moon"})])


@contextlib.asynccontextmanager
async def grouped(folder: Path, *rewards: str, source: str = ENV, **settings):
    """A source of this class, open; and the globals of its module."""
    rows = [{"name": name, "prompt": "Go.", "n": n} for n, name in enumerate("ab")]
    environment = written(folder, source, *rewards, rows=rows, reward_scope="group")
    settings = {"group_size": 3, "max_concurrent": 3, "infra_retries": 1, **settings}
    engine = ScriptedEngine(_says_moon, version="v1")
    async with playing(engine, environment, folder, **settings) as means:
        tasks = await environment.tasks()
        (played,) = means.sources.values()
        one = OpenSource(
            means.config,
            tasks,
            lambda job: run_rollout(job, means),
            lambda number, task: environment.name,
            group_scores=group_scores_of(played),
        )
        yield one, environment._kinds[None].make.reset.__globals__


async def test_a_group_is_scored_in_one_call_in_slot_order_when_all_have_ended(tmp_path, store):
    async with grouped(tmp_path, "place", source=OWN) as (source, seen):
        seen["LOST"].add(2)  # its slot is tried again
        await run_sources(store, [source], ready(store, 1), config=source.config, schedule={"max_open_groups": 1})
        (numbers,) = seen["CALLS"]
        assert sorted(numbers) == [3, 4, 5]
        assert {env.number for env in seen["CLOSED"]} >= {1, 2, 3, 4, 5}, "the probe is 1, the lost one 2"
    results = store.results_by_slot(0)
    assert {slot: result.reward for slot, result in results.items()} == {0: 0.25, 1: 1.25, 2: 2.25}
    assert {slot: result.rewards for slot, result in results.items()} == {
        slot: {"place": float(slot), "Env": 0.25} for slot in range(3)
    }
    assert all(result.facts == {"num": 3.0} and result.trace is not None for result in results.values())
    assert not any(result.awaits_group for result in results.values())
    assert store.outcome_counts() == {"ok": 3, "infra_failed": 1}


async def test_a_failed_rollout_is_not_in_the_list_and_a_refill_is(tmp_path, store):
    async with grouped(tmp_path, "place", infra_retries=0, max_refills=1) as (source, seen):
        seen["LOST"].add(2)
        await run_sources(store, [source], ready(store, 1), config=source.config, schedule={"max_open_groups": 1})
        (numbers,) = seen["CALLS"]
    assert sorted(numbers) == [3, 4, 5], "the fresh sample that stands for it is there, and nobody twice"
    rewards = {slot: result.reward for slot, result in store.results_by_slot(0).items()}
    assert sorted(rewards) == [0, 1, 2, 3]
    assert [rewards[slot] for slot in sorted(rewards) if rewards[slot] is not None] == [0.0, 1.0, 2.0]
    assert rewards[3] == 2.0


async def test_what_a_function_leaves_out_is_unscored_and_not_replaced(tmp_path, store):
    async with grouped(tmp_path, "leaves_out_the_first") as (source, seen):
        await run_sources(store, [source], ready(store, 1), config=source.config, schedule={"max_open_groups": 1})
        assert len(seen["MADE"]) == 3 + 1, "the probe at the opening"
    assert {slot: result.reward for slot, result in store.results_by_slot(0).items()} == {0: None, 1: 1.0, 2: 1.0}


@pytest.mark.parametrize(("function", "why"), [("fails", "ValueError: my bug"), ("wrong", "1 rewards for 3 episodes")])
async def test_a_function_that_fails_leaves_the_whole_group_unscored(tmp_path, store, function, why):
    async with grouped(tmp_path, function) as (source, seen):
        dropped = lambda: store.group_counts().get("dropped", 0) >= 1  # noqa: E731
        await run_sources(store, [source], dropped, config=source.config, schedule={"max_open_groups": 1})
        assert {env.number for env in seen["CLOSED"]} >= {2, 3, 4}
    results = store.results_by_slot(0).values()
    assert [(result.outcome, result.reward) for result in results] == [("ok", None)] * 3
    assert all(why in "".join(result.findings) for result in results)
    assert store.fate(0)[1] == "too_few_scored"


async def test_a_runner_that_ends_before_a_group_did_runs_all_of_it_again(tmp_path, store):
    """Its instances were in that process: nothing of them stands for a slot."""
    async with grouped(tmp_path, "place") as (source, seen):
        seen["HANGS"].add(4)
        others = lambda: len([env for env in seen["MADE"] if getattr(env, "words", None)]) == 2  # noqa: E731
        settings = {"config": source.config, "schedule": {"max_open_groups": 1}}
        await run_sources(store, [source], others, **settings)
        assert store.results_by_slot(0) == {} and seen["CALLS"] == []
        assert store.outcome_counts() == {"cancelled": 3}
        assert {env.number for env in seen["CLOSED"]} == {1, 2, 3, 4}
        seen["HANGS"].clear()
        await run_sources(store, [source], ready(store, 1), **settings)
        assert seen["CALLS"] and sorted(seen["CALLS"][0]) == [5, 6, 7]
    assert store.outcome_counts() == {"cancelled": 3, "ok": 3}


async def test_rewards_that_the_store_was_told_stand_when_the_run_ends_meanwhile(tmp_path):
    """Not of some of the siblings only, either: the next run would compare the rest of them."""

    class Slow(RolloutStore):
        told = False

        def finish_together(self, results):
            super().finish_together(results)
            self.told = True
            time.sleep(0.2)

    store = Slow(tmp_path / "runner.sqlite")
    store.publish(1)
    async with grouped(tmp_path, "place") as (source, seen):
        schedule = {"max_open_groups": 1}
        await run_sources(store, [source], lambda: store.told, config=source.config, schedule=schedule)
        assert {env.number for env in seen["CLOSED"]} == {1, 2, 3, 4}
    assert store.outcome_counts() == {"ok": 3} and len(store.results_by_slot(0)) == 3
    store.close()


async def test_a_group_that_became_too_old_gives_back_what_it_kept(tmp_path, store):
    async with grouped(tmp_path, "place") as (source, seen):
        seen["HANGS"].add(4)
        schedule = {"max_open_groups": 1, "max_staleness": 0, "num_groups": 1}

        def stale() -> bool:
            if store.versions().engine == 1 and len([e for e in seen["MADE"] if getattr(e, "words", None)]) == 2:
                store.publish(2)
            return store.group_counts().get("dropped", 0) == 1

        await run_sources(store, [source], stale, config=source.config, schedule=schedule)
        assert {env.number for env in seen["CLOSED"]} >= {2, 3, 4}
        assert seen["CALLS"] == []
    assert store.fate(0)[1] == "stale"


async def test_scoring_that_hangs_is_given_up(tmp_path, store):
    source = ENV + "async def hangs(environments, **kwargs):\n    await asyncio.sleep(60)\n"
    async with grouped(tmp_path, "hangs", source=source) as (one, _):
        assert isinstance(one.group_scores, WhiteBoxGroupScores)
        one.group_scores._limit_s = 0.05
        dropped = lambda: store.group_counts().get("dropped", 0) >= 1  # noqa: E731
        await run_sources(store, [one], dropped, config=one.config, schedule={"max_open_groups": 1})
    assert all("reward_timeout" in "".join(result.findings) for result in store.results_by_slot(0).values())


async def test_group_scope_wants_functions_and_fresh_instances(tmp_path):
    with pytest.raises(EnvironmentFault, match="no function judges one"):
        async with written(tmp_path, OWN, reward_scope="group"):
            pass
    with pytest.raises(ValidationError, match="instances fresh"):
        EnvironmentClassConfig(target="a.py:Env", reward_scope="group", instances="reused")

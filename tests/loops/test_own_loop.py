"""A person's own loop: one class that is given a task and the model."""

from __future__ import annotations

import asyncio
import threading

import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.errors import SessionClosed
from harness_trainer.loops.base import EnvironmentFault, EpisodeLost
from harness_trainer.loops.own_loop import OwnLoop
from harness_trainer.rollouts.types import Outcome
from tests.loops.playing import TASK, play


async def run(loop, tmp_path, engine=None, **settings):
    return await play(
        engine or ScriptedEngine("the moon"), OwnLoop(loop, tmp_path / "rows.jsonl"), tmp_path, **settings
    )


def ask(task):
    return [{"role": "user", "content": task.metadata["row"]["prompt"]}]


class Async:
    async def run(self, task, model):
        reply = await model.chat(ask(task))
        return float("moon" in reply.message["content"])


class Sync:
    def run(self, task, model):
        assert threading.current_thread() is not threading.main_thread()
        assert model.count(ask(task)) > 0
        return float("moon" in model.chat(ask(task), temperature=0.1).message["content"])


@pytest.mark.parametrize("loop", [Async, Sync])
async def test_a_loop_gives_the_reward_whether_async_or_not(tmp_path, loop):
    result = await run(loop, tmp_path)
    assert (result.outcome, result.reward, result.harness) == (Outcome.OK, 1.0, loop.__name__)
    assert (result.num_trainable_turns, result.tool_calls) == (1, {})


def giving(value):
    class Gives:
        async def run(self, task, model):
            await model.chat(ask(task))
            if isinstance(value, BaseException):
                raise value
            return value

    return Gives


@pytest.mark.parametrize(
    ("value", "reward", "named"),
    [
        (0.5, 0.5, {"reward": 0.5}),
        (1, 1.0, {"reward": 1.0}),
        ({"a": 0.5, "b": None, "c": 2}, 2.5, {"a": 0.5, "c": 2.0}),
        (None, None, {}),
        ({}, None, {}),
    ],
)
async def test_a_reward_is_a_number_a_dict_or_nothing(tmp_path, value, reward, named):
    result = await run(giving(value), tmp_path)
    assert (result.outcome, result.reward, result.rewards) == (Outcome.OK, reward, named)


@pytest.mark.parametrize("value", ["0.5", True, float("nan"), {"a": "x"}, ValueError("oops"), SystemExit(1)])
async def test_a_loop_that_raises_or_gives_nonsense_has_failed_and_is_unscored(tmp_path, value):
    result = await run(giving(value), tmp_path)
    assert (result.outcome, result.reward) == (Outcome.AGENT_FAILED, None)
    assert result.detail.startswith("the loop raised ")


async def test_a_loop_may_say_that_the_machinery_failed(tmp_path):
    assert (await run(giving(EpisodeLost("my server died")), tmp_path)).outcome is Outcome.INFRA_FAILED


async def test_a_limit_that_is_let_through_is_truncation(tmp_path):
    class Chatty:
        async def run(self, task, model):
            while True:
                await model.chat(ask(task))

    result = await run(Chatty, tmp_path, max_turns=3)
    assert (result.outcome, result.detail, result.num_trainable_turns) == (Outcome.TRUNCATED, "limit: max_turns", 3)
    assert result.reward is None


async def test_a_limit_that_is_caught_can_still_be_scored(tmp_path):
    class Chatty:
        def run(self, task, model):
            num = 0
            try:
                while True:
                    num += bool(model.chat(ask(task)))
            except SessionClosed:
                return num

    result = await run(Chatty, tmp_path, max_turns=3)
    assert (result.outcome, result.detail, result.reward) == (Outcome.TRUNCATED, "limit: max_turns", 3.0)


@pytest.mark.parametrize("sync", [True, False])
async def test_a_loop_that_does_not_end_is_ended(tmp_path, sync, monkeypatch):
    monkeypatch.setattr("harness_trainer.loops.own_loop._GRACE_S", 0.0)
    monkeypatch.setattr("harness_trainer.own_thread.END_WAIT_S", 0.05)
    free = threading.Event()

    class Hangs:
        async def arun(self, task, model):
            await asyncio.sleep(60)

        def run(self, task, model):
            free.wait(30)

    if not sync:
        Hangs.run = Hangs.arun
    result = await run(Hangs, tmp_path, timeout_s=0.2)
    free.set()
    # No call was made, so there is nothing to train on either; what it came to says the first of the two.
    assert result.outcome is Outcome.CAPTURE_INVALID
    assert result.stages_s["agent"] < 5


async def test_every_call_is_the_loops_own_work_with_tools_or_without(tmp_path):
    spec = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

    class Plans:
        async def run(self, task, model):
            plan = await model.chat([{"role": "system", "content": "Plan."}, *ask(task)])
            await model.chat([{"role": "system", "content": "Act."}, *ask(task), plan.message], [spec])
            await model.chat([{"role": "system", "content": "Plan."}, *ask(task)])
            return 1

    result = await run(Plans, tmp_path)
    assert (result.num_turns, result.num_trainable_turns, result.num_side_turns) == (3, 3, 0)
    assert sum(sum(row["loss_mask"]) for row in result.trace["turns"]) == result.num_completion_tokens


async def test_what_a_loop_does_with_its_messages_afterwards_changes_no_record(tmp_path):
    class Vandal:
        async def run(self, task, model):
            messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
            reply = await model.chat(messages)
            messages[0]["content"][0]["text"] = "changed"
            reply.message["content"] = "changed"
            await model.chat([{"role": "user", "content": "c"}])
            return 1

    result = await run(Vandal, tmp_path)
    first = result.trace["turns"][0]
    assert first["request"]["messages"][0]["content"][0]["text"] == "a"
    assert first["response"]["choices"][0]["message"]["content"] == "the moon"


@pytest.mark.parametrize("value", [{"content": {1, 2}}, {"content": 2**80}, {"role": "wizard", "content": ""}])
async def test_messages_that_are_none_are_the_loops_own_failure(tmp_path, value):
    class Bad:
        async def run(self, task, model):
            await model.chat([{"role": "user", **value}])

    result = await run(Bad, tmp_path)
    assert result.outcome is Outcome.AGENT_FAILED


async def test_an_error_of_the_engine_is_not_the_loops_failure(tmp_path):
    result = await run(Async, tmp_path, ScriptedEngine([Reply("a", die_after=0)]))
    assert (result.outcome, result.failed_stage) == (Outcome.INFRA_FAILED, "agent")


class NeedsArguments:
    def __init__(self, url):
        pass

    async def run(self, task, model):
        pass


class NoRun:
    pass


class TakesOne:
    def run(self, task):
        pass


@pytest.mark.parametrize("loop", [NeedsArguments, NoRun, TakesOne])
def test_a_class_that_is_no_loop_is_told_at_once(tmp_path, loop):
    with pytest.raises(EnvironmentFault, match=loop.__name__):
        OwnLoop(loop, tmp_path / "rows.jsonl")


def test_the_task_of_these_tests_is_a_row():
    assert TASK.metadata["row"]["prompt"] == "Play."

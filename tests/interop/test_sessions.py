"""Our rollouts behind OpenEnv's session contract: what a trainer of other people may rely on."""

import asyncio
import contextlib
import json
import pickle
from functools import partial

import pytest
from datasets import Dataset
from openenv.core.harness import ResourceSession, ResourceSessionFactory, TrainableSession
from openenv.core.harness.capture.upstream import training_sampling
from openenv.core.harness.training import TrainingTrace

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.errors import EngineUnreachable
from harness_trainer.errors import SetupError, TaskError
from harness_trainer.interop import HarnessSessionFactory, SessionFailed, prompt_rows
from tests.capture.serving import served, until
from tests.rollouts.rolling import VERIFY


@contextlib.asynccontextmanager
async def a_factory(tmp_path, settings, engine, **changes):
    """A factory on a real gateway; its own calls block, so tests make them in threads."""
    async with served(engine, tmp_path / "store.sqlite") as gateway:
        addresses = {"agent_url": gateway.agent_url, "admin_url": gateway.admin_url}
        factory = await asyncio.to_thread(partial(HarnessSessionFactory, **settings | addresses | changes))
        try:
            yield factory
        finally:
            await asyncio.to_thread(factory.close)


def prompt(text):
    return [{"role": "system", "content": "x"}, {"role": "user", "content": text}]


async def test_a_session_is_all_that_openenv_asks_of_one_and_its_trace_passes_openenvs_own_validators(
    tmp_path, settings
):
    engine = ScriptedEngine("the moon")
    sampling = training_sampling({"temperature": 0.7, "top_p": 1.0})
    async with a_factory(tmp_path, settings, engine, sampling=sampling) as factory:
        session = await asyncio.to_thread(factory.create, prompt("Say moon."), 3, "e" * 32)
        assert isinstance(factory, ResourceSessionFactory)
        assert isinstance(session, ResourceSession) and isinstance(session, TrainableSession)
        assert session.initial_messages() == [{"role": "user", "content": "Say moon."}]
        assert session.list_tools() == [] and session.call_tool("bash", {}).error
        assert await asyncio.to_thread(session.wait_for_completion) == 0
        trace = await asyncio.to_thread(session.fetch_training_trace)
        verdict = session.verify([])
        await asyncio.to_thread(session.close)
    (turn,) = TrainingTrace.model_validate_json(trace.model_dump_json()).turns
    assert turn.loss_mask == [0] * len(turn.prompt_token_ids) + [1] * len(turn.completion_token_ids)
    assert len(turn.completion_token_ids) > 5
    assert (verdict.env_reward, verdict.done, verdict.metrics["outcome"]) == (1.0, True, "ok")
    assert engine.requests[0].sampling["temperature"] == 0.7, "the trainer's policy, whatever the agent asked"
    assert list((tmp_path / "boxes").glob("*")) == []


async def test_turns_of_one_lineage_are_neighbours_whatever_came_between_them(tmp_path, settings):
    """An agent that has two conversations and takes turns in them."""
    say = """
import json, os, urllib.request
def ask(messages):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    headers = {"authorization": "Bearer " + os.environ["TOKEN"], "content-type": "application/json"}
    reply = json.load(urllib.request.urlopen(urllib.request.Request(os.environ["URL"], body, headers)))
    messages += [reply["choices"][0]["message"], {"role": "user", "content": "more"}]
one, two = ([{"role": "user", "content": name}] for name in ("one", "two"))
for messages in (one, two, one, two): ask(messages)
"""
    agent = tmp_path / "two.yaml"
    env = {"URL": "${base_url}/v1/chat/completions", "TOKEN": "${token}"}
    adapter = {"name": "two", "dialect": "openai_chat", "argv": ["python3", "-c", say], "env": env}
    agent.write_text(json.dumps(adapter | {"output": {"type": "text"}}))
    async with a_factory(tmp_path, settings | {"harness": str(agent)}, ScriptedEngine("ok")) as factory:
        session = await asyncio.to_thread(factory.create, "moon", 0)
        assert await asyncio.to_thread(session.wait_for_completion) == 0
        trace = await asyncio.to_thread(session.fetch_training_trace)
    asked = [next(m["content"] for m in turn.request["messages"] if m["role"] == "user") for turn in trace.turns]
    assert asked in (["one", "one", "two", "two"], ["two", "two", "one", "one"])


async def test_a_prompt_means_a_task_by_name_or_text_or_by_seed_and_nothing_else(tmp_path, settings):
    async with a_factory(tmp_path, settings, ScriptedEngine("x")) as factory:
        sessions = [
            await asyncio.to_thread(factory.create, *wanted)
            for wanted in [("sun", 1), (prompt("Say sun."), 2), ("", 5), ([{"role": "user", "content": ""}], 5)]
        ]
        assert [s.job.task.name for s in sessions[:2]] == ["sun", "sun"]
        assert sessions[2].job.task.name == sessions[3].job.task.name, "one seed, one task"
        with pytest.raises(TaskError, match="no task is meant by the prompt 'Say mars.'.*moon"):
            factory.create("Say mars.", 1)
        with pytest.raises(TaskError, match="seed"):
            factory.create("")
        await asyncio.gather(*(asyncio.to_thread(session.close) for session in sessions))
    assert [row["prompt"][0]["content"] for row in prompt_rows(settings["tasks"])] == ["Say moon.", "Say sun."]


async def test_tasks_of_one_instruction_are_told_apart_by_the_name_in_their_row_or_else_by_seed(tmp_path, settings):
    lines = [{"name": name, "instruction": "Fix the tests.", "verify": VERIFY} for name in ("a", "b", "c")]
    (tmp_path / "alike.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings["tasks"] = str(tmp_path / "alike.jsonl")
    rows = [row["prompt"] for row in Dataset.from_list(prompt_rows(settings["tasks"]))]
    assert [row[0]["content"] for row in rows] == ["Fix the tests."] * 3
    async with a_factory(tmp_path, settings, ScriptedEngine("x")) as factory:
        asked = [(rows[2], 7), (rows[0], 8), *((prompt("Fix the tests."), seed) for seed in (3, 4, 5, 3))]
        sessions = [await asyncio.to_thread(factory.create, *wanted) for wanted in asked]
        assert [session.job.task.name for session in sessions] == ["c", "a", "a", "b", "c", "a"]
        with pytest.raises(TaskError, match="several tasks have the instruction 'Fix the tests.'.*a, b, c"):
            factory.create(prompt("Fix the tests."))
        someone = [{"role": "user", "name": "alice", "content": "b"}]
        sessions.append(await asyncio.to_thread(factory.create, someone, 1))
        assert sessions[-1].job.task.name == "b", "a name that is no task's is no task"
        await asyncio.gather(*(asyncio.to_thread(session.close) for session in sessions))


async def test_an_agent_that_is_still_at_work_is_ended_and_what_it_did_can_be_trained_but_is_not_scored(
    tmp_path, settings
):
    engine = ScriptedEngine([Reply(["a", "b"], stall=True)])
    async with a_factory(tmp_path, settings, engine) as factory:
        session = await asyncio.to_thread(factory.create, "moon", 0)
        await until(lambda: engine.requests, timeout_s=20)
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(session.wait_for_completion, 0.05)
        trace = await asyncio.to_thread(session.fetch_training_trace)
        assert session.verify([]).env_reward is None
        assert sum(sum(turn.loss_mask) for turn in trace.turns) == 0, "its only reply was never finished"
        assert list((tmp_path / "boxes").glob("*")) == []
        with pytest.raises(SessionFailed, match="closed before it ended"):
            await asyncio.to_thread(session.wait_for_completion)


async def test_machinery_that_fails_is_no_result_at_all(tmp_path, settings):
    engine = ScriptedEngine("x", faults={n: EngineUnreachable("engine away") for n in range(50)})
    async with a_factory(tmp_path, settings, engine) as factory:
        session = await asyncio.to_thread(factory.create, "moon", 0)
        with pytest.raises(SessionFailed, match="engine away"):
            await asyncio.to_thread(session.wait_for_completion)
        assert session.verify([]).env_reward is None


async def test_closing_a_factory_ends_its_sessions_and_leaves_nothing(tmp_path, settings):
    engine = ScriptedEngine([Reply(["a"], stall=True)])
    async with a_factory(tmp_path, settings, engine) as factory:
        await asyncio.to_thread(factory.create, "moon", 0)
        await until(lambda: engine.requests, timeout_s=20)
        await asyncio.to_thread(factory.close)
        assert list((tmp_path / "boxes").glob("*")) == []
        with pytest.raises(SetupError, match="closed"):
            factory.create("moon", 0)


async def test_a_factory_that_lost_what_all_its_sessions_need_is_closed_and_leaves_nothing(tmp_path, settings):
    """As when a proxy dies for good: its owner's task is cancelled."""

    def lose():
        (owner,) = (task for task in asyncio.all_tasks() if task.get_coro().__name__ == "_serve")
        owner.cancel()

    engine = ScriptedEngine([Reply(["a"], stall=True)])
    async with a_factory(tmp_path, settings, engine) as factory:
        session = await asyncio.to_thread(factory.create, "moon", 0)
        await until(lambda: engine.requests, timeout_s=20)
        workshop = factory._workshop
        workshop._loop.call_soon_threadsafe(lose)
        await asyncio.to_thread(workshop._thread.join, 10)
        assert not workshop._thread.is_alive(), "its agents are ended, and not waited for"
        with pytest.raises(SetupError, match="closed"):
            factory.create("moon", 0)
        await asyncio.to_thread(session.close)
        with pytest.raises(SessionFailed, match="closed before it ended"):
            session.wait_for_completion()
        assert list((tmp_path / "boxes").glob("*")) == []


def test_what_a_factory_is_made_of_can_go_to_another_process(settings):
    made = partial(HarnessSessionFactory, **settings, agent_url="http://127.0.0.1:1", admin_url="http://127.0.0.1:2")
    assert pickle.loads(pickle.dumps(made)).keywords == made.keywords


def test_a_missing_admin_key_is_said_in_one_line(settings, monkeypatch):
    monkeypatch.delenv("CAPTURE_PROXY_ADMIN_KEY")
    with pytest.raises(SetupError, match="CAPTURE_PROXY_ADMIN_KEY"):
        HarnessSessionFactory(**settings, agent_url="http://127.0.0.1:1", admin_url="http://127.0.0.1:2")

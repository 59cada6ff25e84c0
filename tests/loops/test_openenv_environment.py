"""OpenEnv servers as environments: what they offer, one session per episode, rewards from the envelope."""

from __future__ import annotations

import asyncio
import json

import pytest
from pydantic import TypeAdapter

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from harness_trainer.environments import EnvConfig, as_env
from harness_trainer.loops import open_source, pin_env
from harness_trainer.loops.base import EnvironmentFault, EpisodeLost, SetupFailure
from harness_trainer.loops.openenv.session import read_envelope
from harness_trainer.loops.openenv.tools import action_tools, is_mcp, observed, tool_name_of, tool_result
from tests.loops.openenv_serving import (
    ADDING,
    ENVS,
    SINGLE,
    called,
    environment,
    none_left,
    num_sessions,
    scores,
    task,
)
from tests.loops.playing import play


async def test_an_action_is_one_tool_and_its_reward_the_envelopes(tmp_path, adding_url):
    async with environment(tmp_path, adding_url) as adding:
        assert (adding.name, adding.max_episodes) == ("Adder", None)
        assert [each.metadata["row"] for each in await adding.tasks()] == [{"prompt": "Add."}]
        row = task(start=1, goal=6, earn=[0, 0.5])
        async with adding.episode(row, "r") as one:
            assert await one.start() == [{"role": "user", "content": 'Add.\n\n{"total": 1, "padding": null}'}]
            (tool,) = one.tools
            assert (tool.name, tool.description) == ("add", "Add a number to the total.")
            assert tool.parameters == {
                "type": "object",
                "properties": {"number": {"title": "Number", "type": "integer"}},
                "required": ["number"],
            }
            first = await tool.call({"number": 2})
            assert (first.content, first.done, one.done) == ('{"total": 3, "padding": null}', False, False)
            assert (await scores(one)).by_name == {"env_reward": 0.0}, "0 is a reward"
            assert (await tool.call({"number": 3})).done and one.done
            assert (await scores(one)).total == 0.5
            assert one.facts == {"steps": 2.0}
            assert (await tool.call({"number": 1})).failed, "nothing is played after the end"


@pytest.mark.parametrize(
    ("settings", "earn", "total"),
    [
        ({}, [1, None, 2, None], 2.0),
        ({"reward": "sum"}, [1, None, 2, None], 3.0),
        ({}, [None, None, None, None], None),
        ({"unrewarded": 0.0}, [None, None, None, None], 0.0),
        ({"reward_name": "sum_right"}, [True, None, None, None], 1.0),
    ],
)
async def test_what_steps_earn_an_episode(tmp_path, adding_url, settings, earn, total):
    async with environment(tmp_path, adding_url, **settings) as adding, adding.episode(task(earn=earn), "r") as one:
        await one.start()
        for _ in earn:
            await called(one, "add", number=1)
        found = await scores(one)
        assert found.total == total
        assert list(found.by_name) == [settings.get("reward_name", "env_reward")]


async def test_reward_functions_instead_of_the_environments_reward(tmp_path, adding_url):
    (tmp_path / "rewards.py").write_text(
        "def last(environments, goal, **kwargs):\n"
        "    return [env.reward if env.observation['total'] < g else None for env, g in zip(environments, goal)]\n"
        "def steps(environments, log_metric):\n"
        "    log_metric('total', environments[0].observation['total'])\n"
        "    return [env.num_steps for env in environments]\n"
    )
    named = {
        "rewards": f"{tmp_path / 'rewards.py'}:last,{tmp_path / 'rewards.py'}:steps",
        "reward_weights": {"steps": 2},
    }
    async with environment(tmp_path, adding_url, **named) as adding, adding.episode(task(goal=9, earn=[3]), "r") as one:
        await one.start()
        await called(one, "add", number=1)
        await called(one, "add", number=1)
        found = await scores(one)
        assert (found.by_name, found.total) == ({"last": 3.0, "steps": 2.0}, 7.0)
        assert one.facts == {"steps": 2.0, "total": 2.0}
        with pytest.raises(EnvironmentFault, match="asks for 'goal'"):
            await adding.tasks()
    with pytest.raises(EnvironmentFault, match="reward_weights names 'no'"):
        async with environment(tmp_path, adding_url, reward_weights={"no": 1}):
            pass


async def test_an_invalid_action_is_the_tools_reply(tmp_path, adding_url):
    async with environment(tmp_path, adding_url) as adding, adding.episode(task(), "r") as one:
        await one.start()
        for arguments, said in [
            ({"number": 13}, "no such number"),
            ({}, "number: Field required"),
            ({"number": "x"}, "number: Input should be a valid integer"),
            ({"number": 1, "more": 2}, "more: Extra inputs are not permitted"),
        ]:
            reply = await called(one, "add", **arguments)
            assert reply.failed and said in reply.content
        assert '"total": 2' in (await called(one, "add", number=2)).content


async def test_an_action_that_openenv_cannot_report_ends_the_episode_but_is_no_infra_failure(tmp_path, adding_url):
    """A validator that raises: OpenEnv's server cannot write the error down, and ends the session with its answer."""
    async with environment(tmp_path, adding_url) as adding, adding.episode(task(earn=[0.25]), "r") as one:
        await one.start()
        await called(one, "add", number=1)
        reply = await called(one, "add", number=7)
        assert reply.failed and reply.done and "invalid" in str(reply.content)
        assert (await scores(one)).total == 0.25


async def test_an_mcp_environments_tools_are_its_own(tmp_path, speaking_url):
    async with environment(tmp_path, speaking_url) as speaking, speaking.episode(task(), "r") as one:
        assert await one.start() == [{"role": "user", "content": "Add."}]
        say, look = one.tools
        assert (say.name, say.description) == ("say", "Say something, perhaps loudly.")
        assert say.parameters["required"] == ["words"]
        assert say.parameters["properties"]["loud"] == {"default": False, "type": "boolean"}
        assert (await say.call({"words": "hi", "loud": True})).content == "HI"
        seen = (await look.call({})).content
        assert seen[0]["image_url"]["url"].startswith("data:image/png;base64,")
        for arguments, said in [({"words": "nothing"}, "say something"), ({}, "words"), ({"words": [1]}, "words")]:
            reply = await say.call(arguments)
            assert reply.failed and said in str(reply.content)
        assert not one.done
        assert (await say.call({"words": "a"})).content == "a"
        assert (await say.call({"words": "b"})).done
        assert (await scores(one)).total == 3.0


async def test_the_usual_limit_of_one_session_is_found(tmp_path, single_url):
    for settings in ({}, {"max_episodes": 8}):
        async with environment(tmp_path, single_url, **settings) as single:
            assert single.max_episodes == 1


async def test_a_server_of_ours_is_told_how_many(tmp_path):
    async with environment(tmp_path, ADDING, max_episodes=3) as adding:
        assert adding.max_episodes == 3
    assert not list((tmp_path / "registry").glob("*.json")), "nothing is left on record"


async def test_a_server_per_episode(tmp_path):
    """What each allows, one session, is no limit for all."""
    async with environment(tmp_path, SINGLE, per_episode=True, max_episodes=2) as single:
        assert single.max_episodes == 2
        async with single.episode(task(), "a") as one, single.episode(task(), "b") as two:
            for each in (one, two):
                await each.start()
                assert '"total": 1' in (await called(each, "add", number=1)).content
    assert not list((tmp_path / "registry").glob("*.json")), "nothing is left on record"


async def test_a_typed_client(tmp_path, adding_url):
    (tmp_path / "typed.py").write_text(CLIENT)
    target = f"python:{tmp_path / 'typed.py'}:AddEnv"
    async with environment(tmp_path, target, url=adding_url) as typed, typed.episode(task(earn=[0.5]), "r") as one:
        await one.start()
        (tool,) = one.tools
        assert tool.parameters["required"] == ["number"]
        assert (await tool.call({"number": 2})).content == "the total is 2"
        with pytest.raises(ValueError, match="number"):
            await tool.call({"number": "x"})
        assert (await scores(one)).total == 0.5, "the envelope's, whatever the client reads"
    await none_left(adding_url)


CLIENT = """
from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.types import Action, Observation, State

class AddAction(Action):
    number: int

class Seen(Observation):
    text: str = ""

class AddEnv(EnvClient[AddAction, Seen, State]):
    def _step_payload(self, action):
        return {"number": action.number}
    def _parse_result(self, payload):
        seen = Seen(text=f"the total is {payload['observation']['total']}")
        return StepResult(observation=seen, reward=seen.reward, done=seen.done)
    def _parse_state(self, payload):
        return State()
"""


async def test_sessions_end_with_their_episodes(tmp_path, adding_url):
    async with environment(tmp_path, adding_url) as adding:
        await none_left(adding_url)
        async with adding.episode(task(), "a") as one, adding.episode(task(), "b") as two:
            await one.start()
            await two.start()
            await called(one, "add", number=1)
            assert '"total": 2' in (await called(two, "add", number=2)).content
            assert await num_sessions(adding_url) == 2
        await none_left(adding_url)


async def test_rows_that_cannot_be_reset(tmp_path, adding_url):
    async with environment(tmp_path, adding_url) as adding:
        for row, said in [(task(broken=True), "this row is broken"), (task(over=True), "the episode is over")]:
            async with adding.episode(row, "r") as one:
                with pytest.raises(SetupFailure, match=said):
                    await one.start()


@pytest.mark.parametrize(
    ("target", "settings", "said"),
    [
        ("http://127.0.0.1:9", {}, "no server answers"),
        (f"local:{ENVS / 'adding.py'}:nothing", {}, "there is no 'nothing' in it"),
        (f"local:{ENVS / 'absent.py'}:app", {}, "there is no file"),
        ("http://127.0.0.1:9", {"token_env": "NO_SUCH_TOKEN"}, "export NO_SUCH_TOKEN"),
        ("python:json:JSONDecoder", {"url": "http://127.0.0.1:9"}, "no OpenEnv client"),
    ],
)
async def test_what_is_wrong_is_told_at_the_start(tmp_path, target, settings, said):
    with pytest.raises(EnvironmentFault, match=said):
        async with environment(tmp_path, target, **settings):
            pass
    assert not list((tmp_path / "registry").glob("*.json")), "nothing is left on record"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (404, "no OpenEnv server: /schema answered 404"),
        (200, "no OpenEnv server"),
        (403, r"--env\.token-env"),
        (503, "may still be starting"),
    ],
)
async def test_a_server_of_another_kind_is_told(tmp_path, status, said):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %d x\r\nContent-Length: 2\r\nConnection: close\r\n\r\n[]" % status)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(EnvironmentFault, match=said):
            async with environment(tmp_path, f"http://127.0.0.1:{port}"):
                pass


async def test_a_token_is_sent_and_never_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("SPACE_TOKEN", "hf_secret")
    heard = []

    async def answer(reader, writer):
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 401 x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(EnvironmentFault) as told:
            async with environment(tmp_path, f"http://127.0.0.1:{port}", token_env="SPACE_TOKEN"):
                pass
    assert b"authorization: bearer hf_secret" in heard[0].lower() and "hf_secret" not in str(told.value)


async def test_a_rollout_from_the_command_lines_form(tmp_path, adding_url):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "Add.", "goal": 3, "earn": [0.1, 0.7]}))
    env = TypeAdapter(EnvConfig).validate_python(as_env("openenv:" + adding_url))
    source = open_source(pin_env(env), str(rows))
    engine = ScriptedEngine([Reply("", [("add", {"number": 1})]), Reply("", [("add", {"number": 2})])])
    result = await play(engine, source, tmp_path, task=task(goal=3, earn=[0.1, 0.7]))
    assert (result.outcome, result.reward, result.rewards) == ("ok", 0.7, {"env_reward": 0.7})
    assert result.tool_calls == {"add": 2} and result.facts == {"steps": 2.0}


async def test_an_episode_that_never_reports_its_end_is_bounded(tmp_path, adding_url):
    engine = ScriptedEngine([Reply("", [("add", {"number": 1})])])
    source = environment(tmp_path, adding_url)
    result = await play(engine, source, tmp_path, task=task(earn=[1] * 9), max_turns=4)
    assert result.outcome == "truncated" and result.reward == 1.0


@pytest.mark.parametrize(
    ("payload", "reward", "done"),
    [
        ({"observation": {"x": 1}, "reward": 0.7, "done": True}, 0.7, True),
        ({"observation": {"x": 1}, "reward": None, "done": False}, None, False),
        ({"observation": {"x": 1}, "done": True}, None, True),
        ({"observation": {"x": 1}, "reward": 0.7}, 0.7, False),
        ({"observation": {"x": 1, "reward": 0.4, "done": True}}, 0.4, True),
        ({"observation": {"x": 1, "reward": 0.4}, "reward": None, "done": None}, None, False),
        ({"observation": {"x": 1}, "reward": 0, "done": False}, 0.0, False),
        ({"observation": {"x": 1}, "reward": float("nan"), "done": False}, None, False),
    ],
)
def test_reward_and_end_are_the_envelopes(payload, reward, done):
    said = read_envelope(payload)
    assert (said.reward, said.done, said.fields) == (reward, done, {"x": 1})
    assert type(said.reward) is type(reward)


@pytest.mark.parametrize("payload", [None, [], {"observation": [1]}, {"observation": {}, "reward": "much"}])
def test_an_answer_that_makes_no_sense_is_a_lost_episode(payload):
    with pytest.raises(EpisodeLost):
        read_envelope(payload)


def test_a_choice_of_actions_is_a_tool_each():
    from typing import Annotated, Literal

    from pydantic import BaseModel, Field, RootModel

    class MoveLeft(BaseModel):
        """Go left."""

        kind: Literal["left"]
        far: int = 1

    class Stay(BaseModel):
        kind: Literal["stay"]

    class AnyAction(RootModel[Annotated[MoveLeft | Stay, Field(discriminator="kind")]]):
        pass

    left, stay = action_tools(AnyAction.model_json_schema(), None)
    assert (left.name, left.description, list(left.parameters["properties"])) == ("move_left", "Go left.", ["far"])
    assert (left.action({"far": 3}), stay.action({})) == ({"far": 3, "kind": "left"}, {"kind": "stay"})


@pytest.mark.parametrize(
    ("model", "name"),
    [("EchoAction", "echo"), ("TextArenaAction", "text_arena"), ("Action", "step"), ("HTTPGetAction", "http_get")],
)
def test_a_tool_is_named_after_the_model(model, name):
    assert tool_name_of(model) == name


def test_what_the_model_is_shown():
    messages = read_envelope({"observation": {"messages": [{"content": "Guess."}], "metadata": {"a": 1}}})
    assert observed(messages, "messages.0.content") == "Guess."
    assert observed(messages, "messages.1.content") == '[{"content": "Guess."}]', "all, where there is no such field"
    assert observed(read_envelope({"observation": {"echoed": "hi"}}), None) == "hi"
    assert observed(read_envelope({"observation": {"metadata": {"status": "ready"}}}), None) == ""
    with pytest.raises(EpisodeLost, match="its own tools"):
        error = {"error_type": "transport_error", "message": "gone"}
        tool_result(read_envelope({"observation": {"tool_name": "x", "error": error}}), None)
    assert is_mcp({"properties": {"type": {"const": "call_tool"}}}) is True
    assert is_mcp({"properties": {"message": {"type": "string"}}}) is False
    assert is_mcp({"properties": {"metadata": {}}}) is None

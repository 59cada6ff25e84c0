"""Episodes on real ORS servers, made with the SDK's own `Server`, each a process of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import os

import pytest
import yaml

from harness_trainer.config import RunConfig
from harness_trainer.environments import OrsConfig
from harness_trainer.errors import ConfigError
from harness_trainer.loops import inspect_source, open_source, pin_env, pin_rows
from harness_trainer.loops.base import ROW, EnvironmentFault, EpisodeLost, SetupFailure, Transcript
from harness_trainer.loops.ors.environment import OrsEnvironment
from tests.loops.ors_playing import called, episode, ors, played
from tests.loops.ors_server import running
from tests.loops.playing import calls, says

SECRET = "s3cret-value-of-a-person"


@pytest.fixture(scope="module")
def server():
    with running("echoenvironment", "tasks", "schemas", "answers") as one:
        yield one


async def test_an_episode_is_one_session_with_its_prompt_tools_and_outcome(server):
    before = server.counts()
    environment = ors(server.url)
    ended, scores = await played(environment, calls(("echo", {"text": "no"})), calls(("echo", {"text": "hello"})))
    assert environment.name == "echoenvironment"
    assert ended.transcript.prompt == [{"role": "user", "content": "Echo 'hello' to win."}]
    assert [message["content"] for message in ended.transcript.completion if message["role"] == "tool"] == [
        "no match",
        "match",
    ]
    assert (ended.how, scores.by_name) == ("done", {"outcome": 1.0}), "`finished` ends the loop"
    assert server.settled(open=0)["created"] == before["created"] + 1


async def test_every_path_closes_the_session(server):
    async with ors(server.url) as environment:
        with pytest.raises(ZeroDivisionError):
            async with episode(environment) as one:
                await one.start()
                assert server.counts()["open"] == 1
                raise ZeroDivisionError
        server.settled(open=0)
        holding = asyncio.create_task(_hold(environment))
        await asyncio.sleep(0.5)
        assert server.counts()["open"] == 1
        holding.cancel()
        await asyncio.wait([holding])
        server.settled(open=0)


async def _hold(environment):
    async with episode(environment) as one:
        await one.start()
        await asyncio.sleep(60)


async def test_tools_are_those_of_the_very_session_with_each_tasks_own_schema(server):
    """B44."""
    async with ors(server.url, "tasks", capacity_patience_s=0.2) as environment:
        found = []
        for number in (0, 1):
            async with episode(environment, number) as one:
                await one.start()
                found.append({tool.name: tool.parameters for tool in one.tools})
                if number == 0:
                    reply = await called(one, "submit", x=3)
                    assert (reply.content, reply.done) == ("submitted {'x': 3}", True)
                else:
                    assert (await called(one, "probe", text="a")).content == "probed a"
                    assert "force" in (await called(one, "submit", path="p", force=True)).content
        with pytest.raises(SetupFailure, match="task 2 .*no machine for this one"):
            async with episode(environment, 2):
                pass
    assert [sorted(tools) for tools in found] == [["read", "submit"], ["probe", "read", "submit"]]
    assert list(found[0]["submit"]["properties"]) == ["x"]
    assert list(found[1]["submit"]["properties"]) == ["path", "force"]
    server.settled(open=0)


async def test_a_schema_reaches_the_model_as_the_server_wrote_it(server):
    listed = server.get("/schemas/tools")["tools"][0]["input_schema"]
    async with ors(server.url, "Schemas") as environment, episode(environment) as one:
        await one.start()
        (tool,) = one.tools
        assert tool.spec()["function"]["parameters"] == listed
        assert {"$defs", "properties", "required"} <= set(listed) and "from" in listed["properties"]
        sent = {"inner": {"names": ["a"], "mode": None}, "from": "x"}
        assert json.loads((await tool.call(sent)).content)["from"] == "x"


async def test_a_failed_call_is_told_to_the_model_and_takes_no_reward_away(server):
    async with ors(server.url) as environment, episode(environment) as one:
        await one.start()
        await called(one, "echo", text="no")
        failed = await called(one, "fail")
        wrong = await called(one, "echo", txt="x")
        seen = await called(one, "look")
        assert failed.failed and "broken with no secret" in failed.content
        assert wrong.failed and "validation" in wrong.content
        assert seen.content == "nothing here" and not seen.failed
        state = one.state
        assert (state.reward, state.rewards) == (0.0, [0.0, None, None, None])
        assert state.metadata[-1] == {"seen": 1} and state.last_output == "nothing here"


async def test_a_call_after_the_end_ends_the_loop(server):
    async with ors(server.url) as environment, episode(environment) as one:
        await one.start()
        await called(one, "echo", text="hello")
        late = await called(one, "look")
        assert late.failed and late.done and "has finished" in late.content and one.state.reward == 1.0


async def test_a_long_result_arrives_with_every_space(server):
    async with ors(server.url) as environment, episode(environment) as one:
        await one.start()
        assert (await called(one, "long")).content == "a  b " * 20_000


async def test_images_are_passed_on_or_become_a_note(server):
    async with ors(server.url) as environment, episode(environment) as one:
        await one.start()
        parts = (await called(one, "picture")).content
    url = {"url": "data:image/png;base64,aGk="}
    assert parts == [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": url}]
    told = []
    for images in (True, False):
        ended, _ = await played(ors(server.url), calls(("picture", {})), says("Nice."), images=images)
        told.append(ended.transcript.completion[1]["content"])
    assert told == [parts, "see\n[an image is left out: the model reads text only]"]


async def test_a_terminal_tool_takes_the_last_message_as_the_answer(server):
    environment = ors(server.url, "answers")
    ended, scores = await played(environment, calls(("think", {})), says("It is 4."))
    assert [message["role"] for message in ended.transcript.prompt] == ["system", "user"]
    assert scores.by_name == {"outcome": 1.0}
    _, wrong = await played(environment, says("5"))
    _, cut = await played(environment, says("4", finish="length"))
    assert (wrong.total, cut.total) == (0.0, None)


async def test_tasks_are_chosen_by_number_index_and_split(server):
    async def names(chosen="", **settings):
        async with OrsEnvironment(OrsConfig(target=server.url, **settings), chosen) as environment:
            return [task.name for task in await environment.tasks()]

    assert await names() == ["train-00000", "train-00001"] == await names(num_tasks=9) == await names("ors:any")
    assert await names(num_tasks=1) == ["train-00000"]
    assert await names(indices="1,0") == ["train-00001", "train-00000"] == await names(indices=[1, 0])
    assert await names(split="test") == ["test-00000"] == await names("test") == await names("test:0")
    with pytest.raises(EnvironmentFault, match="no task 7 in the split 'train'.*which has 2"):
        await names(indices="7")
    with pytest.raises(EnvironmentFault, match="no split 'dev'.*train, test"):
        await names(split="dev")
    with pytest.raises(EnvironmentFault, match="no choice of tasks"):
        await names("test:x")


async def test_rows_have_the_tasks_fields_and_keep_their_own(server):
    async with ors(server.url) as environment:
        row = (await environment.tasks())[1].metadata[ROW]
        assert row == {
            "prompt": [{"role": "user", "content": ""}],
            "task_index": 1,
            "split": "train",
            "target": "world",
            "difficulty": 1,
        }
    async with ors(server.url, include_metadata=False) as environment:
        assert set((await environment.tasks())[1].metadata[ROW]) == {"prompt", "task_index", "split"}


async def test_an_environment_is_chosen_by_name_and_a_wrong_one_is_refused(server):
    async with ors(server.url, "EchoEnvironment") as environment:
        assert len(await environment.tasks()) == 2
    with pytest.raises(EnvironmentFault, match="no environment 'other'.*echoenvironment, tasks"):
        async with ors(server.url, "other"):
            pass


async def test_pings_keep_a_session_alive(server):
    before = server.counts()["pings"]
    async with ors(server.url, ping_interval_s=0.1) as environment, episode(environment) as one:
        await one.start()
        await asyncio.sleep(1.0)
        assert server.counts()["pings"] >= before + 3
    after = server.settled(open=0)["pings"]
    await asyncio.sleep(0.5)
    assert server.counts()["pings"] <= after + 1, "they end with the session"


async def test_a_slow_call_runs_once(server):
    before = server.counts()["slow_runs"]
    async with ors(server.url, silence_s=0.4) as environment, episode(environment) as one:
        await one.start()
        reply = await called(one, "slow")
    assert (reply.content, one.state.reward) == ("done", 0.5)
    assert server.counts()["slow_runs"] == before + 1, "its silent streams were cut and resumed"


async def test_secrets_come_from_the_environment_or_a_file_and_are_seen_nowhere(server, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("OURS", SECRET)
    (tmp_path / "secret").write_text(SECRET + "\n")
    for source in ("env:OURS", f"file:{tmp_path / 'secret'}"):
        config = OrsConfig(target=server.url, secrets={"MY_SECRET": source})
        async with OrsEnvironment(config) as environment, episode(environment) as one:
            await one.start()
            failed, revealed = await called(one, "fail"), await called(one, "reveal")
        assert "broken with [secret]" in failed.content and revealed.content == "the secret is [secret]"
        for text in (repr(config), config.model_dump_json(), repr(environment._credentials), repr(environment._place)):
            assert SECRET not in text
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("secrets", "told"),
    [({"K": "env:NOT_SET_HERE"}, "export NOT_SET_HERE"), ({"K": "file:/nowhere/at/all"}, "cannot be read")],
)
async def test_a_secret_that_is_not_there_is_named_by_its_place(server, secrets, told):
    with pytest.raises(EnvironmentFault, match=told):
        async with ors(server.url, secrets=secrets):
            pass


def test_a_secret_is_never_a_setting():
    for secrets in ({"K": SECRET}, SECRET, [SECRET], {"K": 5}):
        with pytest.raises(ValueError) as raised:
            RunConfig.model_validate({"tasks": "ors:http://h", "env": {"secrets": secrets}})
        assert SECRET not in str(raised.value)
        (error,) = raised.value.errors()
        assert SECRET not in str(error["ctx"]["error"]), "the command line shows this, because its input is a mapping"
        assert isinstance(error["input"], dict)


async def test_no_key_is_sent_to_an_address_and_a_catalog_name_needs_one(server, monkeypatch):
    monkeypatch.setenv("OPENREWARD_API_KEY", SECRET)
    async with ors(server.url) as environment:
        assert environment._place.credentials.api_key is None
    monkeypatch.delenv("OPENREWARD_API_KEY")
    with pytest.raises(EnvironmentFault, match="OPENREWARD_API_KEY.*openreward.ai/keys"):
        async with ors("Eigent/SETA"):
            pass


async def test_a_catalog_name_asks_the_platforms_session_host(server, monkeypatch):
    monkeypatch.setenv("OPENREWARD_API_KEY", "key-of-the-platform")
    monkeypatch.setenv("OPENREWARD_SESSION_URL", server.url)
    environment = ors("Eigent/SETA", num_tasks=1)
    _, scores = await played(environment, calls(("echo", {"text": "hello"})))
    assert (environment.name, scores.total) == ("SETA", 1.0)
    assert environment._place.deployment == "Eigent/SETA"


async def test_several_environments_stand_side_by_side_and_no_variable_of_the_process_is_set(server):
    before = dict(os.environ)
    with running("echoenvironment") as other:
        async with ors(server.url, "tasks") as one, ors(other.url, name="echo", split="test") as two:
            async with episode(one) as first, episode(two) as second:
                await first.start()
                opening = await second.start()
                assert (first.tools[0].name, opening[0]["content"]) == ("read", "Echo 'held out' to win.")
                assert server.counts()["open"] == other.counts()["open"] == 1
    assert dict(os.environ) == before


async def test_a_server_that_dies_loses_the_episode_and_a_session_that_is_gone_does(server):
    with running("echoenvironment") as dying:
        async with ors(dying.url) as environment, episode(environment) as one:
            await one.start()
            dying.process.kill()
            dying.process.wait()
            with pytest.raises(EpisodeLost):
                await called(one, "look")
    async with ors(server.url) as environment, episode(environment) as one:
        await one.start()
        await one._session._wire.ask("POST", "/delete")
        with pytest.raises(EpisodeLost, match="404 Active environment not found"):
            await called(one, "look")


async def test_reward_functions_take_the_place_of_the_outcome(server, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def doubled(environments, target, **kwargs):\n"
        "    return [None if e.reward is None else 2 * e.reward + len(t) for e, t in zip(environments, target)]\n"
        "def calls(environments, log_metric, **kwargs):\n"
        "    log_metric('steps', len(environments[0].rewards))\n"
        "    return [float(e.finished) for e in environments]\n"
    )
    rewards = [f"{tmp_path}/mine.py:doubled", f"{tmp_path}/mine.py:calls"]
    environment = ors(server.url, rewards=rewards, reward_weights={"calls": 10.0})
    async with environment, episode(environment) as one:
        await one.start()
        await called(one, "echo", text="hello")
        scores = await one.rewards(Transcript([{"role": "user", "content": "x"}]))
        assert scores.by_name == {"doubled": 7.0, "calls": 1.0} and scores.total == 17.0
        assert one.facts == {"finished": 1.0, "steps": 1.0}
    with pytest.raises(EnvironmentFault, match="reward_weights names 'other'"):
        async with ors(server.url, reward_weights={"other": 1.0}):
            pass


async def test_the_command_lines_short_form_is_a_source(server):
    config = RunConfig.model_validate({"tasks": f"ors:{server.url}/", "env": {"split": "test"}})
    assert isinstance(config.env, OrsConfig)
    assert (config.env.target, config.env.split) == (server.url, "test")
    again = RunConfig.model_validate(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json"))))
    assert again == config, "a run folder's config is read back"
    assert RunConfig.model_validate({"env": f"ors:{server.url}"}).env == OrsConfig(target=server.url)
    name, tasks = await inspect_source(config.env, pin_rows(config.env, config.tasks))
    assert (name, [task.name for task in tasks]) == ("echoenvironment", ["test-00000"])
    _, held_out = await inspect_source(config.env, pin_rows(config.env, "train:1", held_out=True))
    assert [task.name for task in held_out] == ["train-00001"]
    async with open_source(config.env, "") as source:
        assert source.max_episodes is None


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"tasks": "ors:nothing"}, "owner/name"),
        ({"tasks": "ors:http://a", "env": "ors:http://b"}, "another environment"),
        ({"tasks": "ors:http://a", "env": "loop:f.py:L"}, "another environment"),
        ({"tasks": "rows.jsonl", "env": "ors:http://a"}, "leave --tasks out"),
        ({"tasks": "ors:http://a", "harness": "pi"}, "leave --harness out"),
        ({"tasks": "ors:http://a", "env": {"num_tasks": 1, "indices": "0"}}, "give one of them"),
        ({"tasks": "ors:http://a/path"}, "root of a host"),
        ({"tasks": "ors:http://u:p@a"}, "no login"),
        ({"tasks": "ors:http://a", "env": {"indices": "9-1"}}, "0-9,12"),
        ({"tasks": "ors:http://a", "env": {"secret_domains": {"K": []}}}, "none of the secrets"),
    ],
)
def test_settings_that_make_no_sense_are_refused(data, told):
    with pytest.raises((ValueError, ConfigError), match=told):
        RunConfig.model_validate(data)


def test_paths_of_secrets_and_rewards_are_made_absolute_for_the_runner(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = OrsConfig(target="http://h", secrets="A=file:key,B=env:B", rewards="mine.py:f")
    pinned = pin_env(config)
    assert pinned.secrets == {"A": f"file:{tmp_path}/key", "B": "env:B"}
    assert pinned.rewards == [f"{tmp_path}/mine.py:f"]


def test_a_missing_extra_is_named_with_its_command(monkeypatch):
    import sys

    for name in [name for name in sys.modules if name.startswith(("harness_trainer.loops.ors.", "openreward"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "openreward", None)
    with pytest.raises(EnvironmentFault, match=r"pip install 'harness-trainer\[ors\]'"):
        open_source(OrsConfig(target="http://h"), "")

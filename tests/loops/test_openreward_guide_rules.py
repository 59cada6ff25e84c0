"""Each rule of OpenReward's guide for TRL (the Spanish one), a test named after it: for our own loop and `OrsSpec`.

Where the guide names a limit the test shows that it is gone.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys

import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from harness_trainer.loops.base import EnvironmentFault, EpisodeLost
from harness_trainer.loops.ors.environment import _sessions_url
from harness_trainer.loops.ors.spec import OrsSpec, OrsSpecs
from harness_trainer.rollouts.types import Outcome
from tests.loops.ors_fake import faking
from tests.loops.ors_playing import called, episode, ors, played
from tests.loops.ors_server import running
from tests.loops.playing import calls, play, says

OVERRIDES = ("OPENREWARD_API_URL", "OPENREWARD_SESSION_URL", "OPENREWARD_API_KEY")


@pytest.fixture(scope="module")
def server():
    with running("echoenvironment", "tasks", "schemas") as one:
        yield one


@pytest.fixture
def specs():
    """Makes specs and closes them."""
    made = []

    def make(*args, **settings):
        made.append(OrsSpec(*args, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def methods(environment):
    """As TRL collects the tools."""
    found = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    return {function.__name__: function for name, function in found if not name.startswith("_") and name != "reset"}


def test_the_sdk_is_imported_lazily_so_that_a_run_without_it_pays_nothing():
    code = "import sys, harness_trainer.config, harness_trainer.loops; print('openreward' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "False"


def test_a_spec_has_the_trainers_three_arguments_under_their_names(server, specs):
    spec = specs(server.url, env_name="echoenvironment")
    assert callable(spec.environment_factory) and callable(spec.reward_funcs) and len(spec.train_dataset) == 2


def test_nothing_is_asked_before_a_property_is_read(specs):
    specs("http://127.0.0.1:9")


def test_the_dataset_has_prompt_task_index_and_the_metadata_of_each_task(server, specs):
    dataset = specs(server.url).train_dataset
    assert {"prompt", "task_index", "target", "difficulty"} <= set(dataset.column_names)
    assert dataset["target"][:] == ["hello", "world"] and dataset["task_index"][:] == [0, 1]
    assert dataset["prompt"][0] == [{"role": "user", "content": ""}], "no field of a task takes the prompt's place"


def test_include_metadata_false_leaves_the_fields_of_tasks_out(server, specs):
    assert "target" not in specs(server.url, include_metadata=False).train_dataset.column_names


def test_the_factory_takes_no_arguments_and_gives_a_fresh_adapter_each_time(server, specs):
    make = specs(server.url).environment_factory
    one, two = make(), make()
    assert not inspect.signature(make).parameters and one is not two
    one.reset(task_index=0)
    two.reset(task_index=1)
    assert (one.echo(text="hello"), two.echo(text="hello")) == ("match", "no match"), "each has a session of its own"
    assert server.counts()["open"] == 2


def test_reset_gives_the_prompt_as_text_and_begins_anew(server, specs):
    environment = specs(server.url).environment_factory()
    assert environment.reset(task_index=0, split="train", target="ignored") == "Echo 'hello' to win."
    environment.echo(text="hello")
    assert environment.reset(task_index=1) == "Echo 'world' to win."
    assert (environment.reward, environment.rewards, environment.finished) == (None, [], False)
    server.settled(open=1)
    environment._close()
    server.settled(open=0)


def test_each_tool_is_a_typed_method_with_a_docstring_that_trls_collector_finds(server, specs):
    from transformers.utils import get_json_schema

    found = methods(specs(server.url).environment_factory())
    assert {"echo", "look", "fail"} <= set(found)
    assert "text" in inspect.signature(found["echo"]).parameters and "Submit a string." in found["echo"].__doc__
    schema = get_json_schema(found["echo"])["function"]
    assert schema["description"] == "Submit a string."
    assert schema["parameters"]["properties"]["text"]["type"] == "string"
    assert schema["parameters"]["required"] == ["text"]


def test_nested_schemas_references_choices_and_reserved_names_are_bound_and_mapped_back(server, specs):
    from transformers.utils import get_json_schema

    environment = specs(server.url, env_name="schemas").environment_factory()
    schema = get_json_schema(methods(environment)["send"])["function"]["parameters"]
    assert schema["required"] == ["inner", "from_"] and schema["properties"]["limit"]["nullable"] is True
    assert schema["properties"]["many"]["items"]["type"] == "object"
    assert '"enum": ["a", "b", null]' in schema["properties"]["inner"]["description"], "what a hint cannot say"
    environment.reset(task_index=0)
    told = environment.send(inner={"names": ["a"], "mode": "b"}, from_="there")
    assert '"from":"there"' in told and '"mode":"b"' in told


def test_unsafe_characters_of_a_tool_never_make_binding_fail():
    from transformers.utils import get_json_schema

    from harness_trainer.loops.ors.signatures import as_function, python_names

    sent = {}
    arguments = {"class": {"type": "string"}, "max-len": {"type": "integer"}, "self": {"enum": [1, 2]}, "1st": {}}
    spec = {
        "name": "run-it",
        "description": 'Three """ quotes \\ and {braces}\n\nArgs:\n    other: not ours',
        "input_schema": {"type": "object", "properties": arguments, "required": ["class"]},
    }
    function = as_function(spec, lambda self, name, given: sent.update({name: given}) or "ok")
    schema = get_json_schema(function)["function"]
    assert schema["name"] == "run-it" and '"""' in schema["description"]
    assert list(schema["parameters"]["properties"]) == ["class_", "max_len", "self_", "_1st"]
    assert function(None, class_="x", max_len=3, self_=1, _1st=2) == "ok"
    assert sent == {"run-it": {"class": "x", "max-len": 3, "self": 1, "1st": 2}}
    assert python_names(["a-b", "a_b"]) == {"a-b": "a_b", "a_b": "a_b_"}


def test_a_hub_environment_is_named_and_reads_openreward_api_key(server, specs, monkeypatch):
    monkeypatch.delenv("OPENREWARD_API_KEY", raising=False)
    with pytest.raises(EnvironmentFault, match="OPENREWARD_API_KEY"):
        specs("Eigent/SETA", num_tasks=64)
    monkeypatch.setenv("OPENREWARD_API_KEY", "of-the-variable")
    assert specs("Eigent/SETA")._credentials.api_key == "of-the-variable"
    assert specs("Eigent/SETA", api_key="given")._credentials.api_key == "given"


def test_on_the_platform_sessions_are_at_a_subdomain_of_their_own(monkeypatch):
    for name in (*OVERRIDES, "OPENREWARD_URL"):
        monkeypatch.delenv(name, raising=False)
    assert _sessions_url() == "https://sessions.openreward.ai"


def test_on_the_platform_each_session_is_given_the_key_as_the_secret_api_key():
    import base64
    import json

    from harness_trainer.loops.ors.credentials import Credentials

    header = Credentials("key-of-mine").session_headers("https://sessions.openreward.ai")["X-Secrets"]
    assert json.loads(base64.b64decode(header))["api_key"]["value"] == "key-of-mine"
    assert Credentials().session_headers("http://127.0.0.1:8000") == {}


def test_a_self_hosted_environment_is_given_by_its_url_without_a_key_or_a_variable(server, specs, monkeypatch):
    for name in OVERRIDES:
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    environment = specs(server.url, env_name="echoenvironment").environment_factory()
    environment.reset(task_index=1)
    assert environment.echo(text="world") == "match" and dict(os.environ) == before


def test_a_server_of_one_environment_takes_any_name_for_it(specs):
    with running("echoenvironment") as single:
        assert len(specs(single.url, env_name="my_env").train_dataset) == 2


def test_the_variables_that_the_guide_sets_do_no_harm(server, specs, monkeypatch):
    monkeypatch.setenv("OPENREWARD_API_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("OPENREWARD_SESSION_URL", "http://127.0.0.1:9")
    assert len(specs(server.url, env_name="echoenvironment").train_dataset) == 2


def test_num_tasks_takes_the_first_and_indices_those_named(server, specs):
    def indices(**settings):
        return specs(server.url, **settings).train_dataset["task_index"][:]

    assert indices(num_tasks=1) == [0] and indices(num_tasks=10) == [0, 1]
    assert indices(indices=[1]) == [1] and indices(indices=[1, 0]) == [1, 0] and indices(indices=range(2)) == [0, 1]


def test_num_tasks_and_indices_exclude_each_other(specs):
    with pytest.raises(ValueError, match="give one of them"):
        specs("http://h", num_tasks=1, indices=[0])


async def test_only_the_tasks_that_are_wanted_are_fetched():
    async with faking() as fake:
        async with ors(fake.url, indices="0") as environment:
            await environment.tasks()
        assert fake.asked["/task_range"] == 1 and not fake.asked["/tasks"]


def test_the_split_is_chosen(server, specs):
    assert specs(server.url, split="test").train_dataset["target"][:] == ["held out"]


def test_secrets_go_to_each_session(server, specs):
    environment = specs(server.url, secrets={"MY_SECRET": "short"}).environment_factory()
    environment.reset(task_index=0)
    assert environment.reveal() == "the secret is short"


async def test_the_outcome_is_the_last_reward_that_is_not_none(server):
    _, scores = await played(ors(server.url), calls(("echo", {"text": "hello"}), ("look", {})), says("Done."))
    assert scores.total == 1.0
    _, scores = await played(ors(server.url), calls(("slow", {})), calls(("echo", {"text": "x"})), says("Done."))
    assert scores.total == 0.0


@pytest.mark.parametrize("turns", [[], [calls(("look", {}))], [calls(("fail", {}), ("echo", {"wrong": 1}))]])
async def test_the_outcome_is_none_without_calls_with_unscored_ones_or_failed_ones_alone(server, turns):
    _, scores = await played(ors(server.url), *turns, says("I give up."))
    assert scores.by_name == {"outcome": None} and scores.total is None


@pytest.mark.parametrize("reward", [0.0, -1.5])
async def test_zero_and_less_are_scores(reward):
    async with faking() as fake:
        fake.result = {"ok": True, "output": {"blocks": [], "reward": reward}}
        _, scores = await played(ors(fake.url), calls(("act", {})), says("Done."))
        assert scores.total == reward


async def test_a_later_call_that_is_unscored_or_fails_takes_no_score_away(server):
    _, scores = await played(ors(server.url), calls(("echo", {"text": "x"}), ("look", {}), ("fail", {})), says("Done."))
    assert scores.total == 0.0


async def test_a_missing_score_does_not_hide_why_the_episode_ended(server, tmp_path):
    """The guide: a missing score does not say why. Here the rollout's outcome does."""
    async with ors(server.url) as environment:
        (task, _) = await environment.tasks()
    look = Reply("", [("look", {})])
    results = []
    for n, (replies, settings) in enumerate([([look], {"max_tool_calling_iterations": 1}), (["I give up."], {})]):
        engine = ScriptedEngine(replies, version="v1")
        result = await play(engine, ors(server.url), _folder(tmp_path, n), task=task, loop=settings)
        results.append((result.outcome, result.reward))
    assert results == [(Outcome.TRUNCATED, None), (Outcome.OK, None)]


def _folder(parent, n):
    folder = parent / str(n)
    folder.mkdir()
    return folder


def test_a_reward_function_of_ones_own_builds_on_the_specs(server, specs):
    spec = specs(server.url)
    one, two = (spec.environment_factory() for _ in range(2))
    one.reset(task_index=0)
    two.reset(task_index=0)
    one.echo(text="hello")

    def my_reward(environments, **kwargs):
        return [None if reward is None else 2.0 * reward for reward in spec.reward_funcs(environments=environments)]

    assert my_reward([one, two], prompts=[]) == [2.0, None]
    assert spec.reward_funcs is spec.reward_funcs and spec.reward_funcs.__module__.startswith("harness_trainer")


def test_the_adapter_shows_reward_rewards_metadata_finished_and_last_output(server, specs):
    environment = specs(server.url).environment_factory()
    environment.reset(task_index=0)
    environment.look()
    assert (environment.reward, environment.rewards, environment.metadata) == (None, [None], [{"seen": 1}])
    assert "broken" in environment.fail() and environment.last_output.startswith("Error: ")
    environment.echo(text="hello")
    assert (environment.reward, environment.rewards[-1], environment.finished) == (1.0, 1.0, True)
    assert environment.last_output == "match"


def test_each_tasks_own_tools_are_found_and_kept_apart_and_the_sessions_closed(server, specs):
    """The guide binds the tools of task 0, or merges those of several by name: B44."""
    before = server.counts()
    spec = specs(server.url, env_name="tasks", indices=[0, 1])
    factories = spec.environment_factory
    assert set(factories) == {"tasks", "tasks-2"} and spec.train_dataset["environment"][:] == ["tasks", "tasks-2"]
    one, two = (make() for make in factories.values())
    assert (set(methods(one)), set(methods(two))) == ({"read", "submit"}, {"read", "submit", "probe"})
    assert list(inspect.signature(one.submit).parameters) == ["x"]
    assert list(inspect.signature(two.submit).parameters) == ["path", "force"]
    assert server.settled(open=0)["created"] == before["created"] + 2
    two.reset(task_index=1)
    assert two.submit(path="p", force=False) == "submitted {'path': 'p', 'force': False}"


def test_a_task_that_cannot_be_looked_at_is_a_set_up_error(server, specs, monkeypatch):
    monkeypatch.setattr("harness_trainer.loops.ors.session._FIRST_PAUSE_S", 100.0)
    with pytest.raises(EnvironmentFault, match="the tools of task 2 cannot be listed.*no machine for this one"):
        _ = specs(server.url, env_name="tasks").environment_factory
    server.settled(open=0)


def test_discovery_may_be_left_out_or_look_at_one_task(server, specs):
    shared = specs(server.url, env_name="tasks", discover_task_tools=False).environment_factory
    assert set(methods(shared())) == {"read"}
    spec = specs(server.url, env_name="tasks", indices=[0, 1], task_tools_discovery_index=0)
    environment = spec.environment_factory()
    environment.reset(task_index=0)
    with pytest.raises(EnvironmentFault, match="task 1 has other tools"):
        environment.reset(task_index=1)


def test_several_environments_train_together(server, specs):
    """The guide: one spec, one environment."""
    both = OrsSpecs({"echo": specs(server.url), "own": specs(server.url, env_name="tasks", indices=[0, 1])})
    assert set(both.environment_factory) == {"echo", "own/tasks", "own/tasks-2"}
    dataset = both.train_dataset
    assert dataset["environment"][:] == ["echo", "echo", "own/tasks", "own/tasks-2"]
    assert dataset["target"][:] == ["hello", "world", None, None]
    for row in dataset:
        environment = both.environment_factory[row["environment"]]()
        assert environment.reset(**row)


def test_a_long_episode_is_kept_alive_between_calls_also_in_the_synchronous_way(server, specs):
    """The guide: more than 15 minutes need a ping, which is not set up."""
    import time

    spec = specs(server.url)
    spec._config = spec._config.model_copy(update={"ping_interval_s": 0.1})
    environment = spec.environment_factory()
    before = server.counts()["pings"]
    environment.reset(task_index=0)
    time.sleep(1.0)
    assert server.counts()["pings"] >= before + 3 and environment.echo(text="hello") == "match"


async def test_a_lost_session_scores_nothing_and_is_not_replaced_in_silence(server, specs):
    def lose():
        environment = specs(server.url).environment_factory()
        environment.reset(task_index=0)
        environment.echo(text="x")
        environment._loop.run(environment._episode._session._wire.ask("POST", "/delete"))
        with pytest.raises(EpisodeLost):
            environment.look()
        with pytest.raises(RuntimeError, match="no session"):
            environment.look()
        return environment.reward

    assert await asyncio.to_thread(lose) is None


async def test_tools_in_our_own_loop_are_those_of_the_rollouts_session(server):
    async with ors(server.url, "tasks") as environment, episode(environment, 1) as one:
        await one.start()
        assert [tool.name for tool in one.tools] == ["read", "submit", "probe"]
        assert (await called(one, "read")).content == "read"

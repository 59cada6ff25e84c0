"""Environment classes: what is a tool, what is refused before a run, whose state is whose, and how an episode ends."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading

import pytest

from harness_trainer.environments import EnvironmentClassConfig
from harness_trainer.loops.base import EnvironmentFault, EpisodeLost, SetupFailure
from harness_trainer.loops.environment_class import ClassEnvironment
from tests.loops.class_playing import PROMPT, called, episode, guide, over, played, write_rows, written

HEAD = "from typing import *\nEVENTS = []\ndef score(environments, **kwargs):\n    return [1.0] * len(environments)\n"
DOC = '"""Do it."""'


def env(body: str, base: str = "") -> str:
    lines = "".join(f"    {line}\n" for line in body.strip("\n").split("\n"))
    reset = "" if "def reset" in body else "    def reset(self, **kwargs): return None\n"
    return f"{HEAD}\nclass Env{base}:\n{reset}{lines}"


def events(environment) -> list:
    return sys.modules[environment._kinds[None].make.__module__].EVENTS


async def tools_of(environment) -> list[str]:
    async with environment, episode(environment) as one:
        return [tool.name for tool in one.tools]


MEMBERS = f"""
limit = 3
@property
def size(self): raise AssertionError("a property is not read")
@classmethod
def make(cls): {DOC}
@staticmethod
def shout(): {DOC}
def guess(self): {DOC}
async def stay(self): {DOC}
def _private(self): {DOC}
def __call__(self): {DOC}
def get_reward(self): return 1.0
"""


async def test_public_methods_are_tools_and_nothing_else_is(tmp_path):
    assert await tools_of(written(tmp_path, env(MEMBERS))) == ["guess", "shout", "stay"]


async def test_inherited_and_decorated_methods_are_tools(tmp_path):
    source = f"""{HEAD}
import functools
def logged(method):
    @functools.wraps(method)
    def wrapper(self, *args, **kwargs):
        EVENTS.append(method.__name__)
        return method(self, *args, **kwargs)
    return wrapper
class Base:
    def look(self): {DOC}
    def reset(self, **kwargs): return None
class Env(Base):
    @logged
    def go(self, steps: int = 1) -> str:
        '''Go.

        Args:
            steps: How far
        '''
        return f"went {{steps}}"
"""
    environment = written(tmp_path, source, "score")
    assert await tools_of(environment) == ["go", "look"]
    async with environment, episode(environment) as one:
        assert await called(one, "go", steps=2) == "went 2"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def __init__(self, url, key=1): pass", r"Env.__init__ must not need arguments, and needs url"),
        ("def __init__(self): raise OSError('no server')", r"Env could not be made: OSError: no server"),
        ("def go(self, x: int): pass", r"Env.go is a tool.*no docstring.*call it _go"),
        (f"def go(self, x: int): {DOC}", r"Env.go .*nothing of the argument 'x'"),
        (f"def go(self, x): {DOC}", r"Env.go .*'x' has no type hint"),
        (f"def go(self): {DOC}\nrun = go", r"Env.go and .run are both called 'go'"),
        (f"f = lambda self: 1\nf.__doc__ = {DOC}", r"Env.f: '<lambda>' is no name for a tool"),
        ("def get_reward(self, x): return 1.0", r"Env.get_reward is called without arguments"),
    ],
)
async def test_faults_of_a_class_are_told_at_construction(tmp_path, body, said):
    with pytest.raises(EnvironmentFault, match=said):
        async with written(tmp_path, env(body), "score"):
            pass


async def test_a_class_without_reset_is_refused(tmp_path):
    with pytest.raises(EnvironmentFault, match="Env has no method reset"):
        async with written(tmp_path, f"{HEAD}\nclass Env:\n    reset = 3\n", "score"):
            pass


async def test_a_class_that_nothing_rewards_is_refused(tmp_path):
    with pytest.raises(EnvironmentFault, match="nothing rewards an episode"):
        async with written(tmp_path, env("x = 1")):
            pass


@pytest.mark.parametrize(
    ("name", "said"),
    [("Nothing", "there is no 'Nothing' in it"), ("EVENTS", "EVENTS is list, no class"), ("NONE", "is an empty dict")],
)
async def test_targets_that_are_no_class(tmp_path, name, said):
    with pytest.raises(EnvironmentFault, match=said):
        async with written(tmp_path, env("x = 1") + "\nNONE = {}\n", "score", name=name):
            pass


async def test_a_function_that_makes_instances_is_a_factory_too(tmp_path):
    source = env("def __init__(self, word): self.word = word\ndef get_reward(self): return float(len(self.word))")
    environment = written(tmp_path, source + "\nasync def make():\n    return Env('four')\n", name="make")
    assert (await played(environment)).by_name == {"Env": 4.0}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": PROMPT, "level": 2}, r"row-00000.*Env.reset does not take its columns \(prompt, level\).*'level'"),
        ({"level": 2}, r"missing a required argument: 'prompt'"),
    ],
)
async def test_a_reset_that_does_not_take_the_columns_is_refused(tmp_path, row, said):
    async with written(tmp_path, env("def reset(self, prompt): return None"), "score", rows=[row]) as environment:
        with pytest.raises(EnvironmentFault, match=said):
            await environment.tasks()


@pytest.mark.parametrize("row", [{"environment": "chess"}, {"environment": 3}, {"prompt": PROMPT}])
async def test_an_unknown_environment_name_is_told_before_the_run(tmp_path, row):
    rows = [{"environment": "catch"}, {"name": "odd", **row}]
    async with guide(tmp_path, "ENVIRONMENTS", "says_nothing", rows=rows) as environment:
        with pytest.raises(EnvironmentFault, match=r"row odd.*environment.*one of wordle, catch"):
            await environment.tasks()


LEAKY = """
found = 0
def reset(self, **kwargs):
    return f"found {self.found}, {getattr(self, 'more', None)}"
def find(self) -> str:
    '''Find it.'''
    self.found += 1
    self.more = [self.found]
    return str(self.found)
def get_reward(self): return self.found
"""


async def test_no_state_and_no_reward_leak_into_the_next_episode(tmp_path):
    environment = written(tmp_path, env(LEAKY))
    async with environment:
        for _ in range(2):
            async with episode(environment) as one:
                assert (await one.start())[-1]["content"] == "Play. found 0, None"
                assert await called(one, "find") == "1"
                assert (await one.rewards(over([]))).total == 1.0


async def test_reused_instances_are_made_once_and_reset_often(tmp_path):
    body = "def __init__(self): EVENTS.append('made')\ndef reset(self, **kwargs): EVENTS.append('reset')\n"
    environment = written(tmp_path, env(body + "def close(self): EVENTS.append('closed')"), "score", instances="reused")
    async with environment:
        for _ in range(3):
            async with episode(environment) as one:
                await one.start()
        async with episode(environment) as one, episode(environment) as other:  # one more, and no third
            await one.start()
            await other.start()
        said = list(events(environment))
    assert said == ["made"] + ["reset"] * 3 + ["made"] + ["reset"] * 2
    assert events(environment)[len(said) :] == ["closed"] * 2


async def test_an_instance_of_a_lost_episode_is_not_reused(tmp_path):
    source = "from harness_trainer.loops.base import EpisodeLost\n" + env(
        "def __init__(self): EVENTS.append('made')\ndef go(self):\n    '''Go.'''\n    raise EpisodeLost('gone')"
    )
    async with written(tmp_path, source, "score", instances="reused") as environment:
        for _ in range(2):
            async with episode(environment) as one:
                await one.start()
                with pytest.raises(EpisodeLost, match="gone"):
                    await called(one, "go")
        assert events(environment) == ["made", "made"]


async def test_a_row_is_the_same_in_every_episode_whatever_reset_does_to_it(tmp_path):
    body = "def reset(self, board, **kwargs):\n    board.append(1)\n    return str(board)"
    async with written(tmp_path, env(body), "score", rows=[{"prompt": "", "board": [0]}]) as environment:
        for _ in range(2):
            async with episode(environment) as one:
                assert (await one.start())[-1]["content"] == "[0, 1]"


@pytest.mark.parametrize(
    ("body", "end"),
    [
        ("def close(self): EVENTS.append('closed')", ["closed"]),
        ("async def aclose(self): EVENTS.append('closed')", ["closed"]),
        ("def __exit__(self, *error): EVENTS.append(error)", [(None, None, None)]),
        ("async def __aexit__(self, *error): EVENTS.append(error)", [(None, None, None)]),
        ("def close(self):\n    '''Close the door.'''\n    EVENTS.append('door')", []),
        ("def close(self): raise OSError('already')", []),
    ],
)
async def test_how_an_instance_ends(tmp_path, body, end):
    environment = written(tmp_path, env(body), "score")
    async with environment:
        before = list(events(environment))
        async with episode(environment) as one:
            await one.start()
            assert events(environment) == before
        assert events(environment) == before + end


async def test_a_documented_close_is_a_tool_as_in_trl(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert await tools_of(written(tmp_path, env(f"def close(self): {DOC}"), "score")) == ["close"]
    assert "Env.close is offered to the model as a tool" in caplog.text


async def test_sync_methods_of_an_episode_share_a_thread_and_async_ones_run_in_the_loop(tmp_path):
    body = """
def __init__(self): self.threads = [threading.get_ident()]
def reset(self, **kwargs): self.threads.append(threading.get_ident())
def go(self) -> str:
    '''Go.'''
    self.threads.append(threading.get_ident())
async def wait(self) -> str:
    '''Wait.'''
    return str(threading.get_ident())
def get_reward(self):
    assert len({*self.threads, threading.get_ident()}) == 1
    return 1.0
"""
    environment = written(tmp_path, "import threading\n" + env(body))
    async with environment, episode(environment) as one:
        await one.start()
        await called(one, "go")
        assert await called(one, "wait") == str(threading.get_ident())
        assert (await one.rewards(over([]))).total == 1.0
    async with asyncio.timeout(10):
        while any(thread.name.startswith("episode g0-0-a") for thread in threading.enumerate()):
            await asyncio.sleep(0.01)


async def test_a_tool_that_hangs_is_left_behind_and_its_instance_too(tmp_path):
    body = "gate = threading.Event()\ndef go(self) -> str:\n    '''Go.'''\n    Env.gate.wait(30)\n    return 'late'"
    source = "import threading\n" + env(body)
    async with written(tmp_path, source, "score", instances="reused") as environment:
        async with episode(environment) as one:
            await one.start()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await called(one, "go")
        assert environment._pool == {None: []}
        environment._kinds[None].make.gate.set()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, r"go: missing a required argument: 'x'"),
        ({"x": 1, "y": 2}, r"go: got an unexpected keyword argument 'y'"),
        ({"x": "no"}, "no number"),
    ],
)
async def test_what_a_call_does_wrong_is_said_to_the_model(tmp_path, arguments, said):
    body = (
        "def go(self, x: int):\n    '''Go.\n\n    Args:\n        x: How far\n    '''\n    raise ValueError('no number')"
    )
    environment = written(tmp_path, env(body), "score")
    async with environment, episode(environment) as one:
        await one.start()
        with pytest.raises((TypeError, ValueError), match=said):
            await called(one, "go", **arguments)


async def test_what_tools_return_is_told_as_trl_tells_it(tmp_path):
    body = "def give(self, what: str):\n    '''Give.\n\n    Args:\n        what: Python\n    '''\n    return eval(what)"
    given = {"None": "None", "{'a': 1}": "{'a': 1}", "b'raw'": "raw", "[1]": "[1]", "3": "3"}
    environment = written(tmp_path, env(body), "score")
    async with environment, episode(environment) as one:
        await one.start()
        for what, told in given.items():
            assert await called(one, "give", what=what) == told
        parts = "[{'type': 'text', 'text': 'seen'}, {'type': 'image', 'image': 'https://h/i.png'}]"
        assert (await called(one, "give", what=parts))[1] == {
            "type": "image_url",
            "image_url": {"url": "https://h/i.png"},
        }


async def test_a_reset_that_raises_fails_the_setup_and_names_itself(tmp_path):
    environment = written(tmp_path, env("def reset(self, **kwargs): raise KeyError('board')"), "score")
    async with environment, episode(environment) as one:
        with pytest.raises(SetupFailure, match=r"Env.reset raised KeyError: 'board'"):
            await one.start()


async def test_a_constructor_that_fails_later_loses_the_episode(tmp_path):
    body = "def __init__(self):\n    EVENTS.append(1)\n    if len(EVENTS) > 1: raise OSError('refused')"
    async with written(tmp_path, env(body), "score") as environment:
        with pytest.raises(EpisodeLost, match="Env could not be made: OSError: refused"):
            async with episode(environment):
                pass


async def test_every_method_may_be_async(tmp_path):
    body = """
async def reset(self, **kwargs): return "later"
async def go(self) -> str:
    '''Go.'''
    return "gone"
async def get_reward(self): return 0.25
"""
    environment = written(tmp_path, env(body))
    async with environment, episode(environment) as one:
        assert (await one.start())[-1]["content"] == "Play. later"
        assert await called(one, "go") == "gone"
        assert (await one.rewards(over([]))).by_name == {"Env": 0.25}


@pytest.mark.parametrize("said", ["''", "[]", "None"])
async def test_an_empty_observation_is_none(tmp_path, said):
    environment = written(tmp_path, env(f"def reset(self, **kwargs): return {said}"), "score")
    async with environment, episode(environment) as one:
        assert await one.start() == PROMPT


@pytest.mark.parametrize("said", ["3", "['text']", "{'a': 1}"])
async def test_an_observation_of_another_kind_is_a_fault(tmp_path, said):
    environment = written(tmp_path, env(f"def reset(self, **kwargs): return {said}"), "score")
    async with environment, episode(environment) as one:
        with pytest.raises(EnvironmentFault, match=r"Env.reset gave"):
            await one.start()


async def test_a_reward_function_whose_environment_is_gone_loses_the_episode(tmp_path):
    lost = (
        "class SessionLostError(Exception): ...\ndef ask(environments, **kwargs):\n    raise SessionLostError('gone')\n"
    )
    environment = written(tmp_path, lost + env("x = 1"), "ask")
    async with environment, episode(environment) as one:
        await one.start()
        with pytest.raises(EpisodeLost, match="the reward function ask raised SessionLostError: gone"):
            await one.rewards(over([]))


@pytest.mark.parametrize("stop", [False, True])
async def test_done_ends_an_episode_only_where_it_is_asked_to(tmp_path, stop):
    environment = written(tmp_path, env("done = True"), "score", stop_when_done=stop)
    async with environment, episode(environment) as one:
        await one.start()
        assert one.done is stop


@pytest.mark.parametrize("settings", [{"target": "Env"}, {"target": ""}, {"reward_weights": {"a": float("inf")}}])
def test_settings_that_are_nonsense(settings):
    with pytest.raises(ValueError):
        EnvironmentClassConfig(**{"target": "env.py:Env", **settings})


async def test_places_and_name_are_told(tmp_path):
    config = EnvironmentClassConfig(target="a.py:Env", rewards="a.py:f, b:g", name="mine", max_episodes=3)
    environment = ClassEnvironment(config, write_rows(tmp_path))
    assert (environment.name, environment.max_episodes, config.rewards) == ("mine", 3, ["a.py:f", "b:g"])

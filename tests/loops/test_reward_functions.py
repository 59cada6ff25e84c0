"""Reward functions: what they are given, how their answers are read, and what of it is a fault."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

from harness_trainer.loops.base import EnvironmentFault
from harness_trainer.loops.reward_functions import (
    RewardFailed,
    RewardFunction,
    Sample,
    free_name,
    load_rewards,
    read_rewards,
)
from tests.loops.class_playing import PROMPT, over


async def here(function, /, **arguments):
    value = function(**arguments)
    return await value if hasattr(value, "__await__") else value


async def scored(call, *samples):
    samples = samples or (Sample("env", {"prompt": PROMPT, "answer": 4, "completion_ids": 0}, over(PROMPT)),)
    return await RewardFunction("mine", call).score(samples, here)


async def test_a_function_is_given_what_trl_gives():
    given = {}

    def keep(**kwargs):
        given.update(kwargs)
        return [1.0]

    await scored(keep)
    log_metric, log_extra = given.pop("log_metric"), given.pop("log_extra")
    log_metric("fine", 1)
    log_extra("column", ["text"])
    ((call,),) = [message["tool_calls"] for message in given["completions"][0] if "tool_calls" in message]
    assert call["function"] == {"name": "echo", "arguments": {"message": "hi"}}
    assert [message["role"] for message in given["completions"][0]] == ["assistant", "tool"]
    assert given.keys() == {"environments", "prompts", "completions", "completion_ids", "answer"}
    assert (given["environments"], given["prompts"], given["answer"]) == (["env"], [PROMPT], [4])
    assert given["completion_ids"] == [[4, 5]]


async def test_a_function_without_kwargs_is_given_what_it_asks_for():
    assert await scored(lambda completions: [len(completions[0])]) == [2.0]
    assert await scored(lambda answer, environments: [answer[0]]) == [4.0]


async def test_what_is_logged_is_kept_with_the_sample():
    sample = Sample("env", {}, over(PROMPT))
    await scored(lambda log_metric: [log_metric("speed", 2)], sample)
    assert sample.metrics == {"speed": 2.0}


async def test_several_episodes_are_scored_in_one_call():
    samples = [Sample(reward, {"answer": i}, over(PROMPT)) for i, reward in enumerate([0.5, None, 2])]
    assert await scored(lambda environments, answer: environments, *samples) == [0.5, None, 2.0]


async def test_async_functions_partials_and_callable_objects():
    async def later(environments, bonus=0.0, **kwargs):
        return [1.0 + bonus]

    class Judge:
        async def __call__(self, **kwargs):
            return [3.0]

    assert await scored(later) == [1.0]
    assert await scored(functools.partial(later, bonus=1.0)) == [2.0]
    assert await scored(Judge()) == [3.0]


@pytest.mark.parametrize(
    ("values", "read"),
    [
        ([None], [None]),
        ([math.nan], [None]),
        ([np.float32("nan")], [None]),
        ([0], [0.0]),
        ([True], [1.0]),
        (np.array([0.5]), [0.5]),
        (torch.tensor([0.5]), [0.5]),
        ((2,), [2.0]),
    ],
)
def test_what_is_a_reward(values, read):
    assert read_rewards("f", values, 1) == read


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1.0, 2.0], "f gave 2 rewards for 1 episodes"),
        ([], "f gave 0 rewards for 1 episodes"),
        (1.0, "f gave 1.0: it must give a list"),
        (None, "f gave None: it must give a list"),
        ({"a": 1.0}, "it must give a list"),
        ("1", "it must give a list"),
        (["1.0"], "f gave '1.0' as a reward"),
        ([[1.0]], "as a reward: it must be a number"),
    ],
)
def test_what_is_no_reward_ends_the_run(values, said):
    with pytest.raises(EnvironmentFault, match=said):
        read_rewards("f", values, 1)


async def test_infinity_and_what_it_raises_leave_one_reward_unknown():
    with pytest.raises(RewardFailed, match="mine gave inf"):
        await scored(lambda **kwargs: [math.inf])
    with pytest.raises(RewardFailed, match="mine raised ZeroDivisionError"):
        await scored(lambda **kwargs: [1 / 0])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda environments, answr: [1.0], "asks for 'answr', which is no column"),
        (lambda trainer_state: [1.0], "asks for 'trainer_state'"),
        (lambda environments, /: [1.0], "must take 'environments' by name"),
    ],
)
def test_what_a_function_cannot_be_given_is_told_before_the_run(call, said):
    with pytest.raises(EnvironmentFault, match=said):
        RewardFunction("mine", call).check(["prompt", "answer"])
    RewardFunction("mine", lambda environments, answer, other=1, **kwargs: [1.0]).check(["prompt", "answer"])


def test_functions_of_one_name_are_told_apart(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(
        "import functools\ndef f(**kwargs): return [1.0]\ng = functools.partial(f, a=1)\nclass C: pass\nx = 1\n"
    )
    functions = load_rewards([f"{path}:f", f"{path}:g", f"{path}:f"])
    assert [function.name for function in functions] == ["f", "f_2", "f_3"]
    assert free_name("f_2", ["f", "f_2"]) == "f_2_2"
    for name in ("C", "x"):
        with pytest.raises(EnvironmentFault, match="is no function"):
            load_rewards([f"{path}:{name}"])

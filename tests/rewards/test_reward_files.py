"""Strict reading of reward files: finite numbers in range, or a reason with a code."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_trainer.errors import TaskError
from harness_trainer.rewards.base import Code, RewardUnreadable, parse_json, parse_text, trained_reward
from harness_trainer.tasks import Task
from harness_trainer.tasks.grading import GradingRules, grading_rules

UNIT = GradingRules()


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1.0), ("0", 0.0), ("0.5\n", 0.5), (" .25 \r\n", 0.25), ("1.", 1.0), ("5e-1", 0.5), ("+1", 1.0), ("-0", 0.0)],
)
def test_plain_numbers_are_read(text: str, value: float) -> None:
    assert parse_text(text, UNIT) == {"reward": value}


REFUSED_TEXTS = {
    Code.REWARD_MISSING: ["", " \n"],
    Code.REWARD_NOT_FINITE: ["nan", "inf", "-inf", "NaN", "Infinity", "1e999"],
    Code.REWARD_OUT_OF_RANGE: ["1e9", "1.0000001", "-0.1", "1" * 300],
    Code.REWARD_UNREADABLE: [
        *["1.0 extra", "1 1", "1\n0", "True", "None", "0x1", "1_0", "0,5", "١", "½", "\x001", "1\x00", "0.5;"],
        *["--1", "e5", ".", "nano", "1\u00a0", "\ufeff1"],
    ],
}


@pytest.mark.parametrize(("code", "text"), [(code, text) for code, texts in REFUSED_TEXTS.items() for text in texts])
def test_everything_else_is_no_reward(code: Code, text: str) -> None:
    with pytest.raises(RewardUnreadable, match=r"reward\.txt") as caught:
        parse_text(text, UNIT)
    assert caught.value.code is code


@pytest.mark.parametrize(
    ("text", "rewards", "value"),
    [
        ('{"reward": 0.5}', {"reward": 0.5}, 0.5),
        ('{"reward": 1, "speed": 70}', {"reward": 1.0, "speed": 70.0}, 1.0),
        ('{"accuracy": 0.25}', {"accuracy": 0.25}, 0.25),
        (' {"reward": 0}\n', {"reward": 0.0}, 0.0),
    ],
)
def test_named_rewards_are_read_and_one_is_trained_on(text: str, rewards: dict[str, float], value: float) -> None:
    assert parse_json(text, UNIT) == rewards
    assert trained_reward(rewards, UNIT, "it") == value


REFUSED_JSON = {
    Code.REWARD_MISSING: ["", "  ", "{}"],
    Code.REWARD_AMBIGUOUS: ['{"a": 1, "b": 0}'],
    Code.REWARD_NOT_FINITE: [
        *['{"reward": NaN}', '{"reward": Infinity}', '{"reward": 1e999}', '{"reward": ' + "9" * 400 + "}"],
        '{"reward": 1, "speed": NaN}',
    ],
    Code.REWARD_OUT_OF_RANGE: ['{"reward": 2}', '{"reward": -1e300}'],
    Code.REWARD_UNREADABLE: [
        *["1", "[1]", "null", '"1"', "[" * 100_000, '{"reward": 0, "reward": 1}', '{"reward": true}'],
        *['{"reward": "1"}', '{"reward": null}', '{"reward": {"x": 1}}', '{"reward": ' + "9" * 5000 + "}"],
        *['{"reward": 1, "note": "fine"}', '{"reward": 1} {"reward": 1}', "{'reward': 1}"],
    ],
}


@pytest.mark.parametrize(("code", "text"), [(code, text) for code, texts in REFUSED_JSON.items() for text in texts])
def test_every_other_json_is_no_reward(code: Code, text: str) -> None:
    with pytest.raises(RewardUnreadable, match=r"reward\.json") as caught:
        parse_json(text, UNIT)
    assert caught.value.code is code


def rules(**metadata: Any) -> GradingRules:
    low, high = metadata.get("reward_range", (0.0, 1.0))
    return grading_rules(Task("t", Path("t"), "do", metadata=metadata, reward_range=(low, high)))


def test_the_tasks_own_range_counts() -> None:
    wide = rules(reward_range=[-5.0, 5.0])
    assert parse_text("-3", wide) == {"reward": -3.0}
    assert parse_json('{"reward": 5}', wide) == {"reward": 5.0}


@pytest.mark.parametrize(
    ("rewards", "value"),
    [
        ({"tests": 1, "style": 0.5, "reward": 0}, 0.9),  # the weights win over the name
        ({"tests": 1, "style": 1}, 1.0),
        ({"tests": 0, "style": 0, "seconds": 70}, 0.0),
    ],
)
def test_a_declared_weighting_makes_the_reward(rewards: dict[str, float], value: float) -> None:
    weighted = rules(reward_weights={"tests": 0.8, "style": 0.2})
    assert trained_reward(parse_json(json.dumps(rewards), weighted), weighted, "it") == pytest.approx(value)


def test_weights_that_are_not_quite_one_by_rounding_still_reach_the_top() -> None:
    weighted = rules(reward_weights={"a": 0.7, "b": 0.2, "c": 0.1})
    assert trained_reward({"a": 1.0, "b": 1.0, "c": 1.0}, weighted, "it") == 1.0
    lowest = rules(reward_weights={"a": 0.1, "b": 0.2, "c": -0.3}, reward_range=[0, 1])
    assert trained_reward({"a": 1.0, "b": 1.0, "c": 1.0}, lowest, "it") == 0.0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('{"tests": 1}', Code.REWARD_MISSING),
        ('{"reward": 1}', Code.REWARD_MISSING),
        ('{"tests": 1, "style": 2}', Code.REWARD_OUT_OF_RANGE),  # the sum
        ('{"tests": 1e308, "style": -1e308}', Code.REWARD_OUT_OF_RANGE),
        ('{"tests": 1, "style": true}', Code.REWARD_UNREADABLE),
    ],
)
def test_what_the_weights_need_must_be_there_and_fit(text: str, code: Code) -> None:
    with pytest.raises(RewardUnreadable) as caught:
        parse_json(text, rules(reward_weights={"tests": 0.8, "style": 0.2}))
    assert caught.value.code is code


def test_single_names_have_ranges_of_their_own_when_the_task_declares_them() -> None:
    ranged = rules(reward_ranges={"style": [0, 10]})
    assert parse_json('{"reward": 1, "style": 10, "seconds": -4}', ranged)["style"] == 10.0
    with pytest.raises(RewardUnreadable, match="style") as caught:
        parse_json('{"reward": 1, "style": 10.5}', ranged)
    assert caught.value.code is Code.REWARD_OUT_OF_RANGE


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        ({"reward_weights": [1, 2]}, "reward_weights"),
        ({"reward_weights": {"a": "1"}}, "reward_weights.a"),
        ({"reward_weights": {"a": math.nan}}, "reward_weights.a"),
        ({"reward_weights": {"a": True}}, "reward_weights.a"),
        ({"reward_weights": {"a": 0}}, "reward_weights"),
        ({"reward_ranges": {"a": [1, 0]}}, "reward_ranges.a"),
        ({"reward_ranges": {"a": 1}}, "reward_ranges.a"),
        ({"reward_ranges": {"a": [0, math.inf]}}, "reward_ranges.a"),
        ({"verify": "shared"}, "verify"),
    ],
)
def test_a_slip_in_the_tasks_grading_names_its_field(metadata: dict[str, Any], field: str) -> None:
    with pytest.raises(TaskError, match=field.replace(".", r"\.")):
        rules(**metadata)


@given(st.text())
def test_no_text_ever_gives_anything_but_a_number_in_range_or_a_reason(text: str) -> None:
    for parse in (parse_text, parse_json):
        try:
            (value,) = parse(text, UNIT).values()
        except RewardUnreadable as e:
            assert "\n" not in str(e)
        else:
            assert math.isfinite(value) and 0 <= value <= 1


NUMBERS = st.floats() | st.integers() | st.booleans() | st.none() | st.text(max_size=3)


@given(
    st.dictionaries(st.text(max_size=4), NUMBERS, max_size=4), st.dictionaries(st.text(max_size=4), st.floats(-2, 2))
)
def test_no_object_and_no_weighting_ever_gives_anything_else(data: dict[str, Any], weights: dict[str, float]) -> None:
    weighted = GradingRules(weights=weights)
    try:
        rewards = parse_json(json.dumps(data), weighted)
    except RewardUnreadable as e:
        assert "\n" not in str(e)
    else:
        assert 0 <= trained_reward(rewards, weighted, "it") <= 1 and all(map(math.isfinite, rewards.values()))

"""A person's reward function: found and checked early, shown the whole rollout, and never able to end a run."""

import asyncio
import importlib
import threading
import time

import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from harness_trainer.errors import ConfigError
from harness_trainer.harnesses import load_harness
from harness_trainer.learner.feeder import FeederOptions, GroupFeeder
from harness_trainer.learner.group_source import TrainGroup
from harness_trainer.learner.rows import rows_from_trace
from harness_trainer.rewards.custom import RewardFunction, load_reward, pin_reward
from harness_trainer.rollouts.rollout import run_rollout
from harness_trainer.rollouts.types import Job, Outcome
from tests.rollouts.rolling import rolling, task


def written(tmp_path, text, name="mine.py"):
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


async def rolled(tmp_path, function, replies, harness="pyagent", **settings):
    engine = ScriptedEngine(replies)
    async with rolling(tmp_path, engine, load_harness(harness), reward=f"{function}:reward", **settings) as means:
        return await run_rollout(Job("g0-0-a", 0, 0, task(tmp_path)), means)


SHOW = """
import json, dataclasses, pathlib
def reward(outcome):
    shown = dataclasses.asdict(outcome)
    pathlib.Path(__file__).with_name("shown.json").write_text(json.dumps(shown))
    return 0.25
"""


async def test_the_function_sees_what_the_model_asked_for_and_what_became_of_it_and_has_the_last_word(tmp_path):
    import json

    good = ("bash", {"command": "true"})
    bad = ("bash", {"command": "exit 3"})
    write = ("write_file", {"path": "a", "content": "b"})
    replies = [Reply("", tool_calls=[good, bad]), Reply("", tool_calls=[write]), "the moon"]
    result = await rolled(tmp_path, written(tmp_path, SHOW), replies)
    shown = json.loads((tmp_path / "shown.json").read_text())
    assert (result.outcome, result.reward) == (Outcome.OK, 0.25), result.detail
    assert shown["env_reward"] == 1.0, "what the tests said"
    assert shown["tool_calls_by_name"] == {"bash": 2, "write_file": 1} == result.tool_calls
    assert (shown["tool_call_count"], shown["tool_failure_count"]) == (3, 1)
    assert shown["tool_outcome_unknown_count"] == 1, "write_file's result says neither"
    assert (shown["harness"], shown["task"], shown["outcome"], shown["exit_code"]) == ("pyagent", "moon", "ok", 0)
    assert shown["timed_out"] is False
    assert shown["completion"][-1]["content"] == "the moon"
    assert len(shown["trace"]) == 3 and all(sum(entry["loss_mask"]) for entry in shown["trace"])
    assert shown["stages_s"]["agent"] > 0 and "reward" in result.stages_s


async def test_a_guides_function_scores_a_rollout_that_called_no_tool(tmp_path):
    guides = "def reward(outcome):\n    return outcome.env_reward - 0.05 * outcome.tool_failure_count\n"
    result = await rolled(tmp_path, written(tmp_path, guides), ["the moon"])
    assert (result.reward, result.scoring_failure) == (1.0, ""), result.findings


@pytest.mark.parametrize(
    ("body", "finding"),
    [
        ("return 1 / 0", "reward_failed"),
        ("return float('nan')", "reward_unusable"),
        ("return True", "reward_unusable"),
        ("return 'good'", "reward_unusable"),
        ("return None", None),
    ],
)
async def test_no_number_is_an_unknown_reward_with_a_finding_and_the_rollout_stays_what_it_was(tmp_path, body, finding):
    function = load_reward(written(tmp_path, f"def reward(outcome):\n    {body}\n") + ":reward")
    scored = await function.score(None)
    assert scored.reward is None
    assert (finding in scored.finding) if finding else scored.finding == ""


async def test_a_function_may_be_async_and_one_that_hangs_is_waited_for_no_longer(tmp_path):
    quick = load_reward(written(tmp_path, "async def reward(outcome):\n    return 2\n") + ":reward")
    assert (await quick.score(None)).reward == 2.0

    async def endless(outcome):
        await asyncio.sleep(600)

    for call in (endless, lambda outcome: time.sleep(1)):
        scored = await RewardFunction("slow", call).score(None, timeout_s=0.05)
        assert scored.reward is None and "reward_timeout" in scored.finding


def test_functions_that_hang_stop_no_work_of_the_store_and_do_not_keep_the_runner_from_ending(monkeypatch):
    monkeypatch.setattr("harness_trainer.own_thread.END_WAIT_S", 0.05)
    free = threading.Event()
    hangs = RewardFunction("hangs", lambda outcome: free.wait(30))

    async def runner():
        scored = await asyncio.gather(*(hangs.score(None, timeout_s=0.05) for _ in range(33)))  # 32: the pool's most
        assert all("reward_timeout" in each.finding for each in scored)
        async with asyncio.timeout(5):
            return await asyncio.to_thread(lambda: "stored")

    began = time.monotonic()
    try:
        assert asyncio.run(runner()) == "stored"
        assert time.monotonic() - began < 10, "its end waits for threads of the pool"
    finally:
        free.set()


async def test_none_leaves_the_rollout_out_of_its_groups_baseline_and_out_of_training(tmp_path):
    function = (
        "def reward(outcome):\n    return None if 'sun' in outcome.completion[-1]['content'] else outcome.env_reward\n"
    )
    engine = ScriptedEngine(["the moon", "nothing", "the sun"])
    settings = {"reward": written(tmp_path, function) + ":reward", "max_concurrent": 1}
    async with rolling(tmp_path, engine, load_harness("pyagent-chat"), **settings) as means:
        results = [await run_rollout(Job(f"g0-{n}-a", 0, 0, task(tmp_path)), means) for n in range(3)]
    assert [r.reward for r in results] == [1.0, 0.0, None]
    assert all(r.outcome is Outcome.OK for r in results)
    group = TrainGroup(0, "moon", results, [rows_from_trace(r.trace).rows for r in results])
    feeder = GroupFeeder(_One(group), FeederOptions(1, 10_000, 10))
    batch = feeder.next_step()
    assert sorted(round(sample["advantage"]) for sample in batch.samples) == [-1, 1]
    assert batch.rewards == [1.0, 0.0]


class _One:
    """A source with one group."""

    def __init__(self, group):
        self.group = group

    def check_health(self):
        pass

    def next_group(self, timeout_s):
        return self.group


def test_a_name_of_an_installed_package_is_known(tmp_path, monkeypatch):
    info = tmp_path / "rewards_of_mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rewards-of-mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[harness_trainer.rewards]\nshort = rewards_of_mine:short\n")
    written(tmp_path, "def short(outcome):\n    return 3\n", "rewards_of_mine.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert load_reward("short").call(None) == 3
    assert load_reward("rewards_of_mine:short").call(None) == 3
    with pytest.raises(ConfigError, match="known are short, verifier"):
        load_reward("long")


def test_the_verifiers_reward_needs_no_function():
    assert load_reward("verifier") is None


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        ("def other(outcome):\n    return 1\n", "reward", "it has other"),
        ("reward = 3\n", "reward", "no function"),
        ("def reward():\n    return 1\n", "reward", "one argument"),
        ("def reward(a, b):\n    return 1\n", "reward", "one argument"),
        ("import nosuchmodule\n", "reward", "nosuchmodule"),
        ("def reward(:\n", "reward", "SyntaxError"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_in_one_line_before_anything_starts(tmp_path, text, name, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        load_reward(f"{written(tmp_path, text)}:{name}")
    assert "\n" not in str(caught.value)


def test_what_is_not_there_is_said_with_what_to_write_instead(tmp_path):
    with pytest.raises(ConfigError, match=r"no file .*gone\.py"):
        load_reward(f"{tmp_path}/gone.py:reward")
    with pytest.raises(ConfigError, match="PYTHONPATH"):
        load_reward("nosuchpackage.rewards:mine")


def test_a_file_is_pinned_because_the_runner_works_in_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert pin_reward("mine.py:reward") == f"{tmp_path}/mine.py:reward"
    assert pin_reward("package.module:reward") == "package.module:reward"
    assert pin_reward("verifier") == "verifier"

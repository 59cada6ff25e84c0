"""What a white-box rollout comes to: its outcome, reward, trace and counts; and that everything it opened is closed."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
from dataclasses import replace

import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.errors import EngineError
from harness_trainer.environments import OwnLoopConfig
from harness_trainer.errors import SetupError
from harness_trainer.loops.base import EnvironmentFault, EpisodeLost, NoPlace, Scores, ToolReply
from harness_trainer.rollouts.config import RolloutConfig, SourceSpec
from harness_trainer.rollouts.sources import OpenSource
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Outcome
from harness_trainer.rollouts.white_box import run_rollout
from harness_trainer.rollouts.white_box_run import open_white_box
from tests.loops.playing import TASK, Arcade, Game, job, model_side, play, playing, tool
from tests.rollouts.policy import run_sources

GUESSES = [Reply("I try.", [("guess", {"word": "a"})]), Reply("", [("guess", {"word": "b"})]), Reply("I give up.")]


def engine(*replies, **more):
    return ScriptedEngine(list(replies or GUESSES), version="v7", **more)


async def test_an_episode_becomes_one_row_of_all_its_turns(tmp_path):
    arcade = Arcade()
    result = await play(engine(), arcade, tmp_path)
    assert (result.outcome, result.reward, result.rewards) == (Outcome.OK, 1.0, {"game": 1.0})
    assert (result.num_turns, result.num_trainable_turns, result.num_side_turns) == (3, 3, 0)
    assert (result.tool_calls, result.tool_failures) == ({"guess": 2}, {"guess": 0})
    assert (result.harness, result.task, result.facts) == ("arcade", "game", {"guesses": 2.0})
    (row,) = result.trace["turns"]
    assert [stretch["policy_versions"][0]["version"] for stretch in row["metadata"]["turns"]] == ["v7"] * 3
    assert sum(row["loss_mask"]) == result.num_completion_tokens
    assert [*result.stages_s] == ["create", "setup", "agent", "verify", "stop", "capture"]
    assert arcade.games[0].events == ["start", "rewards", "closed"]


async def test_reward_functions_see_the_whole_conversation_before_the_episode_is_closed(tmp_path):
    arcade = Arcade()
    await play(engine(), arcade, tmp_path)
    transcript = arcade.games[0].transcript
    assert [message["role"] for message in transcript.completion] == ["assistant", "tool"] * 2 + ["assistant"]
    first, last = transcript.replies[0], transcript.replies[-1]
    assert [*last.prompt_ids][: len(first.prompt_ids)] == [*first.prompt_ids]
    assert len(last.completion_ids) == last.num_completion_tokens > 0


@pytest.mark.parametrize(
    ("scores", "reward", "named"),
    [
        (Scores({"a": 0.5, "b": None, "c": 0.25}), 0.75, {"a": 0.5, "c": 0.25}),
        (Scores({"a": 0.5, "b": 2.0}, {"b": -1.0}), -1.5, {"a": 0.5, "b": 2.0}),
        (Scores({"a": 0.0}), 0.0, {"a": 0.0}),
        (Scores({"a": None}), None, {}),
        (Scores({}), None, {}),
        (Scores({"a": math.nan}), None, {}),
    ],
)
async def test_rewards_are_summed_over_those_that_say_something(tmp_path, scores, reward, named):
    result = await play(engine(), Arcade(lambda: Game(earned=scores)), tmp_path)
    assert (result.outcome, result.reward, result.rewards) == (Outcome.OK, reward, named)


async def test_a_reward_that_fails_is_unknown_and_not_zero(tmp_path):
    result = await play(engine(), Arcade(lambda: Game(earned=ZeroDivisionError("by zero"))), tmp_path)
    assert (result.outcome, result.reward) == (Outcome.OK, None)
    assert "reward: warning reward_failed: ZeroDivisionError: by zero" in result.findings


@pytest.mark.parametrize(
    ("settings", "how"),
    [
        ({"max_turns": 2}, "max_turns"),
        ({"loop": {"max_tool_calling_iterations": 1}}, "max_tool_calling_iterations"),
        ({"loop": {"max_completion_tokens": 60}}, "max_completion_tokens"),
    ],
)
async def test_a_limit_is_truncation_and_is_scored(tmp_path, settings, how):
    arcade = Arcade()
    result = await play(engine(), arcade, tmp_path, **settings)
    assert (result.outcome, result.detail, result.reward) == (Outcome.TRUNCATED, f"limit: {how}", 1.0)
    assert arcade.games[0].events == ["start", "rewards", "closed"]
    (row,) = result.trace["turns"]
    if how == "max_completion_tokens":
        assert len(row["completion_token_ids"]) <= 60


async def test_a_reply_at_its_cap_is_truncation(tmp_path):
    result = await play(engine(Reply("a long story")), Arcade(), tmp_path, max_tokens=4)
    assert (result.outcome, result.detail) == (Outcome.TRUNCATED, "limit: length")


async def test_a_full_window_is_truncation(tmp_path):
    result = await play(engine(max_model_len=260), Arcade(), tmp_path)
    assert (result.outcome, result.detail, result.reward) == (Outcome.TRUNCATED, "limit: context_length", 1.0)


async def test_time_that_is_over_in_a_reply_is_truncation_and_is_scored(tmp_path):
    arcade = Arcade()
    result = await play(engine(GUESSES[0], Reply("hm", stall=True)), arcade, tmp_path, timeout_s=0.5)
    assert (result.outcome, result.detail, result.reward) == (Outcome.TRUNCATED, "limit: deadline", 1.0)
    assert arcade.games[0].events == ["start", "rewards", "closed"]


async def test_time_that_is_over_in_a_tool_is_truncation_and_is_scored(tmp_path):
    async def hangs(arguments):
        await asyncio.sleep(60)

    arcade = Arcade(lambda: Game([tool("guess", hangs, word="string")]))
    result = await play(engine(), arcade, tmp_path, timeout_s=0.3)
    assert (result.outcome, result.detail, result.reward) == (Outcome.TRUNCATED, "limit: deadline", 1.0)


# --- the machinery's failures


async def test_a_lost_episode_is_an_infra_failure_of_its_stage(tmp_path):
    async def loses(arguments):
        raise EpisodeLost("the session is gone")

    arcade = Arcade(lambda: Game([tool("guess", loses, word="string")]))
    result = await play(engine(), arcade, tmp_path)
    assert (result.outcome, result.failed_stage, result.setup_failed) == (Outcome.INFRA_FAILED, "agent", False)
    assert result.detail == "EpisodeLost: the session is gone"
    assert (result.reward, result.trace) == (None, None)
    assert arcade.games[0].events == ["start", "closed"]


@pytest.mark.parametrize(
    ("make", "stage", "setup_failed"),
    [
        (lambda: EpisodeLost("no capacity"), "create", False),
        (lambda: SetupError("no such image"), "create", True),
        (lambda: Game(opening=EpisodeLost("gone")), "setup", False),
        (lambda: Game(opening=TypeError("reset() got an unexpected keyword")), "setup", True),
    ],
)
async def test_an_episode_that_does_not_begin(tmp_path, make, stage, setup_failed):
    scripted = engine()
    result = await play(scripted, Arcade(make), tmp_path)
    assert (result.outcome, result.failed_stage) == (Outcome.INFRA_FAILED, stage)
    assert result.setup_failed is setup_failed
    assert scripted.requests == []


async def _faulty(arguments):
    raise EnvironmentFault("the row has no level: add a column `level`")


@pytest.mark.parametrize(
    ("make", "stage"),
    [
        (lambda: EnvironmentFault("the row names no class"), "create"),
        (lambda: Game(opening=EnvironmentFault("the row has no prompt")), "setup"),
        (lambda: Game([tool("guess", _faulty, word="string")]), "agent"),
        (lambda: Game(earned=EnvironmentFault("it gave 'many' as a reward")), "verify"),
    ],
)
async def test_a_fault_of_the_task_counts_as_set_up_wherever_it_shows(tmp_path, make, stage):
    result = await play(engine(), Arcade(make), tmp_path)
    assert (result.outcome, result.reward, result.failed_stage) == (Outcome.INFRA_FAILED, None, stage)
    assert result.setup_failed


async def test_a_row_that_cannot_be_used_goes_into_quarantine_and_the_run_goes_on(tmp_path):
    class Rows(Arcade):
        def episode(self, task, rollout_id):
            self._make = lambda: Game(opening=EnvironmentFault("no level")) if task.name == "bad" else Game()
            return super().episode(task, rollout_id)

    store = RolloutStore(tmp_path / "runner.sqlite")
    store.publish(1)
    tasks = [replace(TASK, name=name) for name in ("good", "bad")]
    async with playing(engine(Reply("ok")), Rows(), tmp_path, group_size=2, infra_retries=0) as means:
        source = OpenSource(means.config, tasks, lambda job: run_rollout(job, means), lambda n, task: "arcade")

        def done() -> bool:
            return store.group_counts().get("ready", 0) >= 4 and bool(store.quarantined())

        await run_sources(store, [source], done, config=means.config, schedule={"max_open_groups": 6})
    assert [*store.quarantined()] == ["bad"] and "no level" in store.quarantined()["bad"]
    store.close()


async def test_rollouts_that_are_too_many_wait_for_a_place_on_nobodys_time(tmp_path):
    """The source learns that it bears two when four are open: the others play from their start, each once."""

    class Learning(Arcade):
        @contextlib.asynccontextmanager
        async def episode(self, task, rollout_id):
            if self.num_open == 2:
                self.max_episodes = 2
                raise NoPlace("two are allowed")
            async with super().episode(task, rollout_id) as game:
                yield game

    async def slow(arguments):
        await asyncio.sleep(0.2)
        return ToolReply("ok")

    def guesses(request):
        over = any(message["role"] == "tool" for message in request.messages)
        return Reply("ok") if over else Reply("", [("guess", {"word": "a"})])

    arcade = Learning(lambda: Game([tool("guess", slow, word="string")]))
    scripted = ScriptedEngine(guesses)
    async with playing(scripted, arcade, tmp_path, start_timeout_s=0.1) as means:
        results = await asyncio.gather(*(run_rollout(job("arcade", f"g0-0-{n}"), means) for n in range(8)))
    assert [(result.outcome, result.detail) for result in results] == [(Outcome.OK, "")] * 8
    assert (arcade.most_open, len(arcade.games), len(scripted.requests)) == (2, 8, 16)
    assert sum(result.stages_s.get("wait", 0.0) > 0.15 for result in results) >= 6


async def test_an_episode_that_takes_too_long_to_begin_is_an_infra_failure(tmp_path):
    class Slow(Game):
        async def start(self):
            await asyncio.sleep(60)

    result = await play(engine(), Arcade(Slow), tmp_path, start_timeout_s=0.1)
    assert (result.outcome, result.failed_stage) == (Outcome.INFRA_FAILED, "setup")


async def test_a_group_goes_on_when_its_server_calls_itself_something_else_now(tmp_path):
    """The store has the source's name of when the group was drawn; a server of OpenEnv's may have been renamed."""
    (tmp_path / "loop.py").write_text("class Loop:\n    def run(self, task, model):\n        return 1.0\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Play."}')
    loop = OwnLoopConfig(target=f"{tmp_path / 'loop.py'}:Loop", name="new")
    spec = SourceSpec(config=RolloutConfig(), env=loop, tasks=str(tmp_path / "rows.jsonl"), harness="old")
    async with contextlib.AsyncExitStack() as stack:
        side = await stack.enter_async_context(model_side(engine(), tmp_path / "store.sqlite"))
        source = await open_white_box(stack, spec, side, {})
        result = await source.attempt(job("old", task=source.tasks[0]))
    assert (result.reward, result.harness) == (1.0, "new")


async def test_an_error_of_the_engine_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr("harness_trainer.loops.endpoint._RETRIES_S", (0.0, 0.0))
    result = await play(engine(faults={1: EngineError("500"), 2: EngineError("500")}), Arcade(), tmp_path)
    assert (result.outcome, result.num_trainable_turns) == (Outcome.OK, 3 - 1 + 0)  # two of its script went to faults


async def test_an_engine_that_goes_on_failing_is_an_infra_failure(tmp_path, monkeypatch):
    monkeypatch.setattr("harness_trainer.loops.endpoint._RETRIES_S", (0.0, 0.0))
    arcade = Arcade()
    broken = engine(faults={n: EngineError("500") for n in range(1, 9)})
    result = await play(broken, arcade, tmp_path)
    assert (result.outcome, result.failed_stage, result.reward) == (Outcome.INFRA_FAILED, "agent", None)
    assert len(broken.requests) == 4
    assert arcade.games[0].events == ["start", "closed"]


async def test_nothing_sampled_is_nothing_to_train_on(tmp_path):
    def over():
        game = Game()
        game.done = True
        return game

    result = await play(engine(), Arcade(over), tmp_path)
    assert (result.outcome, result.reward) == (Outcome.CAPTURE_INVALID, 1.0)


# --- ends and bounds


async def test_cancelling_ends_the_tool_the_episode_the_session_and_the_engines_work(tmp_path):
    ended = []

    async def hangs(arguments):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("tool")

    arcade = Arcade(lambda: Game([tool("guess", hangs, word="string")]))
    stalled = ScriptedEngine([Reply("hm", stall=True)])
    for scripted, source in ((engine(), arcade), (stalled, Arcade())):
        async with playing(scripted, source, tmp_path) as means:
            rollout_id = f"g0-0-{len(ended)}"
            running = asyncio.create_task(run_rollout(job("arcade", rollout_id), means))
            while not (scripted.in_flight if scripted is stalled else source.games and scripted.requests):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert (source.num_open, scripted.in_flight) == (0, 0)
    assert ended == ["tool"]
    with sqlite3.connect(tmp_path / "store.sqlite") as db:
        (num_open,) = db.execute(
            "SELECT COUNT(*) FROM capture_sessions WHERE json_extract(CAST(body AS TEXT), '$.sealed') = 0"
        ).fetchone()
    assert num_open == 0


async def test_no_more_episodes_are_open_than_the_environment_bears(tmp_path):
    async def slow(arguments):
        await asyncio.sleep(0.02)
        return ToolReply("ok")

    arcade = Arcade(lambda: Game([tool("guess", slow, word="string")]), max_episodes=3)
    async with playing(engine(Reply("", [("guess", {"word": "a"})]), Reply("ok")), arcade, tmp_path) as means:
        results = await asyncio.gather(*(run_rollout(job("arcade", f"g0-0-{n}"), means) for n in range(12)))
    assert {result.outcome for result in results} == {Outcome.OK}
    assert arcade.most_open == 3


async def test_closing_that_hangs_or_fails_spoils_no_result(tmp_path, monkeypatch):
    monkeypatch.setattr("harness_trainer.loops.tool_loop.CLOSE_S", 0.1)

    class Bad(Arcade):
        def episode(self, task, rollout_id):
            context = super().episode(task, rollout_id)
            hangs = len(self.games) == 0

            class Closing:
                async def __aenter__(self):
                    return await context.__aenter__()

                async def __aexit__(self, *error):
                    await context.__aexit__(None, None, None)
                    if hangs:
                        await asyncio.sleep(60)
                    raise OSError("the connection broke")

            return Closing()

    async with playing(engine(Reply("ok")), Bad(), tmp_path) as means:
        for n in range(2):
            assert (await run_rollout(job("arcade", f"g0-0-{n}"), means)).outcome is Outcome.OK

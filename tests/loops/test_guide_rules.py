"""The rules of the OpenEnv guide (TRL's documentation), one test for each, named after it.

White-box rollouts of the guide's own classes (`guide_classes`), with everything real but the engine. The guide's rules
for black-box agents and servers are tested beside what obeys them.
"""

from __future__ import annotations

import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from harness_trainer.environments import as_env
from harness_trainer.learner.rollout_metrics import of_rollouts
from harness_trainer.loops import open_source
from harness_trainer.loops.base import ROW, EnvironmentFault
from harness_trainer.loops.loading import load_target
from harness_trainer.rollouts.types import Outcome
from harness_trainer.rollouts.white_box import run_rollout
from tests.loops import class_playing
from tests.loops.class_playing import GUIDE, PROMPT, called, episode, guide, over, write_rows, written
from tests.loops.playing import job, playing

DONE = Reply("Done.")


def guesses(*words: str) -> list[Reply]:
    return [Reply("", [("guess", {"guess": word})]) for word in words]


class Run:
    """One rollout of a class for each row, with these replies: what they came to, and what the model was shown."""

    def __init__(self, tmp_path, name, *rewards, rows=(), **settings):
        self.environment = guide(tmp_path, name, *rewards, rows=rows, **settings)
        self._folder = tmp_path

    async def rollouts(self, *replies, **settings):
        engine = self.engine = ScriptedEngine([*replies, DONE])
        async with playing(engine, self.environment, self._folder, **settings) as means:
            tasks = await self.environment.tasks()
            (name,) = means.sources
            return [await run_rollout(job(name, f"g0-{i}-a", task), means) for i, task in enumerate(tasks)]

    @property
    def opening(self):
        return self.engine.requests[0].messages

    @property
    def tools(self):
        return sorted(tool["function"]["name"] for tool in self.engine.requests[0].tools)


# --- the environment class


async def test_init_is_optional(tmp_path):
    source = "class Env:\n    def reset(self, **kwargs): return 'Hi.'\n    def get_reward(self): return 1.0\n"
    assert (await class_playing.played(written(tmp_path, source))).total == 1.0


async def test_init_takes_no_arguments(tmp_path):
    source = "class Env:\n    def __init__(self, url): ...\n    def reset(self, **kwargs): ...\n"
    with pytest.raises(EnvironmentFault, match=r"Env.__init__ must not need arguments, and needs url"):
        async with written(tmp_path, source):
            pass


async def test_configuration_is_captured_from_the_module(tmp_path):
    source = "URL = 'http://here'\nclass Env:\n    def __init__(self): self.url = URL\n"
    source += "    def reset(self, **kwargs): return self.url\n    def get_reward(self): return 1.0\n"
    environment = written(tmp_path, source)
    async with environment, episode(environment) as one:
        assert (await one.start())[-1]["content"] == "Play. http://here"


async def test_reset_gets_every_column_of_the_dataset_as_keywords(tmp_path):
    source = "class Env:\n    def reset(self, **kwargs): return repr(kwargs)\n    def get_reward(self): return 1.0\n"
    row = {"prompt": [{"role": "user", "content": ""}], "env": "wordle", "level": 3, "hints": ["a", None]}
    environment = written(tmp_path, source, rows=[row])
    async with environment, episode(environment) as one:
        assert (await one.start())[-1]["content"] == repr(row)


async def test_what_reset_returns_is_the_first_observation_that_the_model_sees(tmp_path):
    run = Run(tmp_path, "WordleEnv", "reward_win")
    await run.rollouts(*guesses("crane"))
    assert run.opening == [{"role": "user", "content": "Play. Guess the word.\n"}]


async def test_reset_may_return_none_for_no_observation(tmp_path):
    run = Run(tmp_path, "EchoToolEnv", "reward_func")
    await run.rollouts()
    assert run.opening == PROMPT


async def test_an_observation_of_parts_follows_the_text_of_the_prompt(tmp_path):
    source = "class Env:\n    def reset(self, **kwargs):\n        return [{'type': 'text', 'text': 'See.'}]\n"
    environment = written(tmp_path, source + "    def get_reward(self): return 1.0\n")
    async with environment, episode(environment) as one:
        parts = [{"type": "text", "text": "Play. "}, {"type": "text", "text": "See."}]
        assert (await one.start())[-1]["content"] == parts


async def test_a_row_needs_no_prompt_where_reset_supplies_it(tmp_path):
    run = Run(tmp_path, "WordleEnv", "reward_win", rows=[{"secret": "slate"}])
    await run.rollouts(*guesses("slate"))
    assert run.opening == [{"role": "user", "content": "Guess the word.\n"}]


async def test_a_row_without_a_prompt_and_a_reset_without_an_observation_is_a_fault(tmp_path):
    environment = guide(tmp_path, "EchoToolEnv", "reward_func", rows=[{"level": 1}])
    async with environment, episode(environment) as one:
        with pytest.raises(EnvironmentFault, match="add a column `prompt`, or return an observation"):
            await one.start()


async def test_every_public_method_but_reset_is_a_tool(tmp_path):
    run = Run(tmp_path, "MultiEnv", "wordle_reward")
    await run.rollouts()
    assert run.tools == ["guess", "move"]


async def test_the_schema_comes_of_type_hints_and_the_args_section(tmp_path):
    run = Run(tmp_path, "CatchEnv")
    await run.rollouts()
    ((tool,),) = [[tool["function"] for tool in run.engine.requests[0].tools]]
    assert tool["description"] == "Move the paddle."
    assert tool["parameters"] == {
        "type": "object",
        "properties": {
            "direction": {"type": "string", "enum": ["left", "right"], "description": "Where to"},
            "steps": {"type": "integer", "description": "How far"},
        },
        "required": ["direction"],
    }


async def test_a_tool_without_args_in_its_docstring_is_told_at_construction(tmp_path):
    source = "class Env:\n    def reset(self, **kwargs): ...\n    def guess(self, word: str):\n        '''Guess.'''\n"
    with pytest.raises(EnvironmentFault, match=r"Env.guess is a tool.*'word': add `word: ...` under `Args:`"):
        async with written(tmp_path, source):
            pass


async def test_each_generation_has_an_instance_of_its_own(tmp_path):
    environment = guide(tmp_path, "CatchEnv")
    async with environment, episode(environment) as one, episode(environment) as two:
        await one.start()
        await two.start()
        await called(one, "move", direction="right", steps=2)
        assert [(await each.rewards(over([]))).total for each in (one, two)] == [1.0, 0.0]


# --- the loop


async def test_the_loop_goes_on_until_the_model_calls_no_more_tools(tmp_path):
    run = Run(tmp_path, "WordleEnv", "reward_win")
    (result,) = await run.rollouts(*guesses("slate", "crane"))
    assert (result.outcome, result.num_turns, result.tool_calls) == (Outcome.OK, 3, {"guess": 2})


async def test_max_completion_length_counts_the_models_and_the_tools_tokens_of_all_turns(tmp_path):
    run = Run(tmp_path, "WordleEnv", "reward_win")
    (result,) = await run.rollouts(*guesses(*["slate"] * 5), loop={"max_completion_tokens": 120})
    assert (result.outcome, result.detail) == (Outcome.TRUNCATED, "limit: max_completion_tokens")
    (row,) = result.trace["turns"]
    assert 0 < result.num_completion_tokens < len(row["completion_token_ids"]) <= 120


async def test_an_exception_is_the_tools_reply_and_the_rollout_goes_on(tmp_path):
    run = Run(tmp_path, "WordleEnv", "reward_win")
    (result,) = await run.rollouts(*guesses("crane", "again"))
    assert run.engine.requests[-1].messages[-1]["content"] == "{'error': 'Game over.'}"
    assert (result.outcome, result.reward) == (Outcome.OK, pytest.approx(1.0 + 0.5 * 5 / 6))


async def test_a_call_that_raised_counts_in_failure_frequency(tmp_path):
    run = Run(tmp_path, "WordleEnv", "reward_win")
    (result,) = await run.rollouts(*guesses("crane", "again"))
    metrics = of_rollouts([(result, [])])
    assert (metrics["tools/call_frequency"], metrics["tools/failure_frequency"]) == (2.0, 0.5)


@pytest.mark.parametrize("name", ["reset", "get_reward", "__init__", "_close", "dance"])
async def test_reset_and_private_methods_cannot_be_called(tmp_path, name):
    run = Run(tmp_path, "MultiEnv", "wordle_reward")
    (result,) = await run.rollouts(Reply("", [(name, {})]))
    assert f"unknown tool {name}; the tools are: guess, move" in run.engine.requests[-1].messages[-1]["content"]
    assert (result.outcome, result.tool_failures[name]) == (Outcome.OK, 1)


# --- rewards


async def test_a_reward_function_reads_the_state_of_each_environment_after_its_episode(tmp_path):
    run = Run(tmp_path, "EchoToolEnv", "reward_func")
    (result,) = await run.rollouts(Reply("", [("echo", {"message": "Hello World!"})]))
    assert (result.reward, result.rewards) == (1.2, {"reward_func": 1.2})


async def test_several_reward_functions_are_summed_and_each_is_logged_by_name(tmp_path):
    run = Run(tmp_path, "WordleEnv", "reward_win", "reward_partial")
    (result,) = await run.rollouts(*guesses("slate"))
    assert result.rewards == {"reward_win": 0.0, "reward_partial": pytest.approx(0.2)}
    assert result.reward == pytest.approx(0.2)


async def test_a_lost_or_unfinished_game_still_gets_partial_credit(tmp_path):
    run = Run(tmp_path, "WordleEnv", "reward_win", "reward_partial")
    (result,) = await run.rollouts(*guesses(*["slate"] * 5), max_turns=3)
    assert (result.outcome, result.reward) == (Outcome.TRUNCATED, pytest.approx(0.2))


async def test_none_is_left_out_of_the_sum(tmp_path):
    run = Run(tmp_path, "EchoToolEnv", "reward_func", "says_nothing")
    (result,) = await run.rollouts(Reply("", [("echo", {"message": "12345"})]))
    assert (result.reward, result.rewards) == (0.5, {"reward_func": 0.5})


async def test_a_rollout_that_nothing_scores_is_unscored_and_not_zero(tmp_path):
    run = Run(tmp_path, "EchoToolEnv", "says_nothing")
    (result,) = await run.rollouts()
    assert (result.outcome, result.reward, result.rewards) == (Outcome.OK, None, {})


async def test_get_reward_is_a_source_named_after_the_class(tmp_path):
    run = Run(tmp_path, "CatchEnv", "says_nothing")
    (result,) = await run.rollouts(Reply("", [("move", {"direction": "right", "steps": 2})]))
    assert (result.reward, result.rewards) == (1.0, {"CatchEnv": 1.0})


async def test_weights_count_by_name(tmp_path):
    weights = {"reward_win": 0.0, "reward_partial": -2.0}
    run = Run(tmp_path, "WordleEnv", "reward_win", "reward_partial", reward_weights=weights)
    (result,) = await run.rollouts(*guesses("slate"))
    assert (result.reward, result.rewards["reward_partial"]) == (pytest.approx(-0.4), pytest.approx(0.2))
    with pytest.raises(EnvironmentFault, match="'reward_lose', which is none of the rewards reward_win"):
        async with guide(tmp_path, "WordleEnv", "reward_win", reward_weights={"reward_lose": 1.0}):
            pass


async def test_a_reward_can_be_tried_without_a_model(tmp_path):
    environment = guide(tmp_path, "WordleEnv", "reward_win", "reward_partial")
    scores = await class_playing.played(environment, ("guess", {"guess": "[slate]"}), ("guess", {"guess": "[crane]"}))
    assert scores.by_name == {"reward_win": pytest.approx(1.0 + 0.5 * 4 / 6), "reward_partial": 0.0}


# --- connections


async def test_a_client_that_reset_opens_anew_lives_for_one_episode(tmp_path):
    environment = guide(tmp_path, "WordleEnv", "reward_win")
    async with environment:
        opened = load_target(f"{GUIDE}:OPEN")
        before = len(opened)
        for _ in range(3):
            async with episode(environment) as one:
                await one.start()
                assert len(opened) == before + 1
        assert len(opened) == before


# --- several environments


ROUTED = [{"prompt": PROMPT, "env": "wordle"}, {"prompt": PROMPT, "env": "catch"}]


async def test_a_router_class_plays_what_the_column_env_says(tmp_path):
    run = Run(tmp_path, "MultiEnv", "wordle_reward", "catch_reward", rows=ROUTED)
    replies = [*guesses("crane"), DONE, Reply("", [("move", {"direction": "right"})]), DONE]
    wordle, catch = await run.rollouts(*replies)
    assert (wordle.reward, wordle.rewards) == (1.0, {"wordle_reward": 1.0})
    assert (catch.reward, catch.rewards) == (1.0, {"catch_reward": 1.0})


async def test_the_tools_of_all_environments_of_a_router_are_offered_and_the_wrong_one_says_so(tmp_path):
    run = Run(tmp_path, "MultiEnv", "wordle_reward", "catch_reward", rows=ROUTED[1:])
    (result,) = await run.rollouts(*guesses("crane"))
    assert run.tools == ["guess", "move"]
    assert run.engine.requests[-1].messages[-1]["content"] == "{'error': 'There is no word to guess.'}"
    assert (result.outcome, result.reward, result.tool_failures) == (Outcome.OK, 0.0, {"guess": 1})


async def test_a_dict_of_environments_is_chosen_from_by_the_column_environment(tmp_path):
    rows = [{"environment": "wordle", "secret": "slate"}, {"environment": "catch", "start": 1}]
    run = Run(tmp_path, "ENVIRONMENTS", "says_nothing", rows=rows)
    wordle, catch = await run.rollouts(DONE, Reply("", [("move", {"direction": "right"})]), DONE)
    offered = [[tool["function"]["name"] for tool in request.tools] for request in run.engine.requests]
    assert offered == [["guess"], ["move"], ["move"]], "its own tools only"
    assert (wordle.reward, catch.reward) == (None, 1.0)
    assert run.engine.requests[1].messages[0]["content"] == "The ball falls at 2, you are at 1."


async def test_an_unknown_name_in_the_column_environment_is_told_before_the_run(tmp_path):
    async with guide(tmp_path, "ENVIRONMENTS", "says_nothing", rows=[{"environment": "chess"}]) as environment:
        with pytest.raises(EnvironmentFault, match=r"row-00000 .* 'chess': it must be one of wordle, catch"):
            await environment.tasks()


# --- as a person names it


async def test_a_class_is_named_on_the_command_line(tmp_path):
    from pydantic import TypeAdapter

    from harness_trainer.environments import EnvConfig

    rewards = f"{GUIDE}:reward_win, {GUIDE}:reward_partial"
    config = TypeAdapter(EnvConfig).validate_python(as_env({"type": f"class:{GUIDE}:WordleEnv", "rewards": rewards}))
    async with open_source(config, str(write_rows(tmp_path))) as source:
        (task,) = await source.tasks()
        assert (source.name, task.metadata[ROW]) == ("WordleEnv", {"prompt": PROMPT})

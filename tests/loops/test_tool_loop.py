"""The turns of an episode: what the model is told of its calls, malformed ones above all, and what ends an episode."""

from __future__ import annotations

import asyncio
import json

import pytest

from capture_proxy.errors import EngineError, PromptTooLong, SessionClosed
from harness_trainer.loops.base import EnvironmentFault, EpisodeLost, LoopLimits, ToolReply
from harness_trainer.loops.tool_loop import run_episode
from tests.loops.playing import GUESS, OPENING, Game, SayingModel, calls, says, tool


async def run(model, game=None, *, time_s=None, **limits):
    game = game or Game()
    return await run_episode(game, OPENING, model, LoopLimits(**limits), time_s=time_s)


def results(model):
    """What the tools said, as the model was shown it in its last call."""
    return [message["content"] for message in model.asked[-1] if message["role"] == "tool"]


async def test_a_tool_is_run_and_its_reply_shown_until_the_model_calls_none():
    model = SayingModel(calls(("guess", {"word": "moon"})), says("I give up."))
    ended = await run(model)
    assert ended.how == "stop"
    assert model.asked[1] == [
        *OPENING,
        calls(("guess", {"word": "moon"})),
        {"role": "tool", "name": "guess", "tool_call_id": "call_0", "content": "no, not moon"},
    ]
    assert model.tools[0] == [GUESS.spec()]
    assert [message["role"] for message in ended.transcript.messages] == ["user", "assistant", "tool", "assistant"]
    assert (ended.num_calls, ended.num_failures["guess"]) == ({"guess": 1}, 0)


async def test_parallel_calls_are_run_in_order_one_after_the_other_each_with_a_result():
    at_work = []

    async def slow(arguments):
        assert not at_work, "an environment has one state"
        at_work.append(arguments)
        await asyncio.sleep(0.01)
        at_work.clear()
        return ToolReply(arguments["word"])

    model = SayingModel(calls(("guess", {"word": "a"}), ("nope", {}), ("guess", {"word": "b"})), says("ok"))
    ended = await run(model, Game([tool("guess", slow, word="string")]))
    shown = model.asked[1][-3:]
    assert [message["tool_call_id"] for message in shown] == ["call_0", "call_1", "call_2"]
    assert (shown[0]["content"], shown[2]["content"]) == ("a", "b")
    assert ended.num_failures == {"guess": 0, "nope": 1}
    assert (ended.use.num_rounds, ended.use.num_unknown, ended.use.exhausted) == (1, 1, False)
    assert ended.use.num_ran == {"guess": 2} and ended.use.seconds["guess"] >= 0.02


# --- malformed calls: the model gets an error message, the rollout goes on


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("[1]", "must be a JSON object, not list"),
        ('"moon"', "must be a JSON object, not str"),
        ("3", "must be a JSON object, not int"),
        ("{not json", "not valid JSON"),
        ('{"word": ', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("{}", "word"),
        ("", "word"),
        ("null", "word"),
    ],
)
async def test_arguments_that_cannot_be_used_are_an_error_for_the_model(arguments, said):
    model = SayingModel(calls(("guess", arguments)), says("sorry"))
    ended = await run(model)
    assert said in results(model)[0] and "error" in results(model)[0]
    assert (ended.how, ended.num_failures["guess"]) == ("stop", 1)


@pytest.mark.parametrize("call", [{}, {"id": "call_0"}, {"function": None}, {"function": {"arguments": "{}"}}])
async def test_a_call_that_is_hardly_one_is_an_error_for_the_model(call):
    model = SayingModel({"role": "assistant", "content": None, "tool_calls": [call]}, says("sorry"))
    assert (await run(model)).how == "stop"
    assert "unknown tool" in results(model)[0]


async def test_a_call_without_arguments_is_one_with_none():
    async def look(arguments):
        return ToolReply(f"you see {len(arguments)} arguments")

    call = {"id": "c", "type": "function", "function": {"name": "look"}}
    model = SayingModel({"role": "assistant", "content": None, "tool_calls": [call]}, says("ok"))
    await run(model, Game([tool("look", look)]))
    assert results(model) == ["you see 0 arguments"]


@pytest.mark.parametrize("name", ["reset", "get_reward", "__init__", "_private", "Guess", ""])
async def test_only_the_episodes_tools_can_be_called(name):
    model = SayingModel(calls((name, {})), says("sorry"))
    ended = await run(model)
    assert results(model) == [str({"error": f"unknown tool {name}; the tools are: guess"})]
    assert ended.num_failures[name] == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("Game over."), "{'error': 'Game over.'}"),
        (KeyError(), "{'error': 'KeyError'}"),
        (TimeoutError("slow server"), "{'error': 'slow server'}"),
        (SystemExit(3), "{'error': '3'}"),
        (RecursionError("deep"), "{'error': 'deep'}"),
    ],
)
async def test_what_a_tool_raises_is_its_reply_in_trls_words(error, said):
    async def fails(arguments):
        raise error

    model = SayingModel(calls(("guess", {"word": "a"})), says("oh"))
    ended = await run(model, Game([tool("guess", fails, word="string")]))
    assert results(model) == [said]
    assert (ended.how, ended.num_failures["guess"]) == ("stop", 1)


@pytest.mark.parametrize("error", [EpisodeLost("gone"), EnvironmentFault("wrong address"), asyncio.CancelledError()])
async def test_what_is_not_the_tools_fault_ends_the_rollout(error):
    async def fails(arguments):
        raise error

    with pytest.raises(type(error)):
        await run(SayingModel(calls(("guess", {}))), Game([tool("guess", fails)]))


async def test_a_megabyte_is_cut_and_the_model_told():
    async def floods(arguments):
        return ToolReply("x" * 2**20)

    model = SayingModel(calls(("guess", {})), says("ok"))
    await run(model, Game([tool("guess", floods)]), max_tool_chars=1000)
    assert results(model)[0] == f"{'x' * 1000}\n[{2**20 - 1000} more characters are left out]"


@pytest.mark.parametrize(("images", "num_parts"), [(True, 2), (False, None)])
async def test_images_go_on_where_the_model_takes_them_else_a_note(images, num_parts):
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:,"}}]

    async def draws(arguments):
        return ToolReply(parts)

    model = SayingModel(calls(("guess", {})), says("ok"))
    await run(model, Game([tool("guess", draws)]), images=images)
    shown = results(model)[0]
    assert shown == (parts if images else "see\n[an image is left out: the model reads text only]")


# --- ends


async def test_a_tool_that_says_done_ends_the_episode_without_another_call():
    async def wins(arguments):
        return ToolReply("you win", done=True)

    model = SayingModel(calls(("guess", {}), ("guess", {})))
    ended = await run(model, Game([tool("guess", wins)]))
    assert (ended.how, len(model.asked), ended.num_calls["guess"]) == ("done", 1, 1)
    assert ended.transcript.completion[-1]["content"] == "you win"


async def test_an_environment_that_says_done_ends_the_episode():
    game = Game()

    async def wins(arguments):
        game.done = True
        return ToolReply("you win")

    game.tools = [tool("guess", wins)]
    model = SayingModel(calls(("guess", {})))
    assert (await run(model, game)).how == "done"
    assert len(model.asked) == 1


async def test_an_episode_that_is_over_at_its_start_asks_the_model_nothing():
    game = Game()
    game.done = True
    model = SayingModel(says("hm"))
    assert (await run(model, game)).how == "done"
    assert model.asked == []


async def test_after_the_allowed_rounds_the_model_is_asked_once_more_and_calls_no_tool():
    model = SayingModel(calls(("guess", {"word": "a"})))
    ended = await run(model, max_tool_calling_iterations=3)
    assert (ended.how, len(model.asked), ended.num_calls["guess"]) == ("max_tool_calling_iterations", 4, 3)
    assert ended.use.exhausted and ended.use.num_rounds == 3


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (SessionClosed("spent", "max_turns"), "max_turns"),
        (SessionClosed("late", "deadline"), "deadline"),
        (PromptTooLong("too long", 9, 8), "context_length"),
    ],
)
async def test_a_limit_of_the_session_ends_the_episode(error, how):
    assert (await run(SayingModel(calls(("guess", {"word": "a"})), error))).how == how


async def test_a_fault_of_the_model_side_goes_up():
    with pytest.raises(EngineError):
        await run(SayingModel(EngineError("broken")))


async def test_a_reply_that_was_cut_without_a_call_is_the_end():
    assert (await run(SayingModel(says("and then", finish="length")))).how == "length"


async def test_calls_of_a_reply_that_was_cut_after_them_are_run():
    cut = {**calls(("guess", {"word": "a"})), "finish": "length"}
    assert (await run(SayingModel(cut, says("ok")))).how == "stop"


async def test_a_tool_that_hangs_is_given_up_and_the_model_told():
    async def hangs(arguments):
        await asyncio.sleep(60)

    model = SayingModel(calls(("guess", {})), says("ok"))
    ended = await run(model, Game([tool("guess", hangs)]), tool_timeout_s=0.05)
    assert "took more than 0.05 s" in results(model)[0]
    assert (ended.how, ended.num_failures["guess"]) == ("stop", 1)


async def test_a_tool_at_work_when_the_time_is_over_ends_the_episode():
    async def hangs(arguments):
        await asyncio.sleep(60)

    ended = await run(SayingModel(calls(("guess", {}))), Game([tool("guess", hangs)]), time_s=0.05, tool_timeout_s=30)
    assert ended.how == "deadline"


# --- the budget: all tokens after the first prompt


async def test_the_budget_counts_the_models_and_the_tools_tokens():
    # Prompts of 5 a message, replies of 10: the first turn leaves 5, 20 (5 + 15), ... The third prompt has 5 messages.
    model = SayingModel(calls(("guess", {"word": "a"})))
    ended = await run(model, max_completion_tokens=27)
    # After the first reply the prompt has 15 tokens, so 10 are used and 17 left; after the second, 25, so 20 and 7.
    assert model.caps == [27, 17, 7]
    assert ended.how == "max_completion_tokens"


async def test_results_that_do_not_fit_are_never_shown():
    model = SayingModel(calls(("guess", {"word": "a"})))
    ended = await run(model, max_completion_tokens=10)
    assert (ended.how, model.caps) == ("max_completion_tokens", [10])


async def test_prompts_are_counted_only_when_the_end_is_near():
    model = SayingModel(*[calls(("guess", {"word": "a"}))] * 3, says("ok"))
    counted = []
    count = model.count

    async def counting(messages, tools=()):
        counted.append(len(messages))
        return await count(messages, tools)

    model.count = counting
    await run(model, max_completion_tokens=10_000, max_tokens=100)
    assert counted == [] and model.caps == [10_000, None, None, None]


async def test_the_cap_of_the_budget_is_the_reason_when_it_cuts_the_reply():
    model = SayingModel(calls(("guess", {"word": "a"})), says("so", finish="length"))
    assert (await run(model, max_completion_tokens=14)).how == "max_completion_tokens"


async def test_where_lengths_are_unknown_what_was_sampled_counts():
    class Silent(SayingModel):
        async def chat(self, messages, tools=(), *, max_tokens=None, **sampling):
            reply = await super().chat(messages, tools, max_tokens=max_tokens)
            return type(reply)(reply.message, reply.finish_reason, 0, reply.num_completion_tokens, reply.turn_id)

    model = Silent(calls(("guess", {"word": "a"})))
    assert (await run(model, max_completion_tokens=25)).how == "max_completion_tokens"
    assert model.caps == [25, 15, 5]


async def test_the_callers_messages_are_not_touched():
    opening = json.dumps(OPENING)
    await run(SayingModel(calls(("guess", {"word": "a"})), says("ok")))
    assert json.dumps(OPENING) == opening

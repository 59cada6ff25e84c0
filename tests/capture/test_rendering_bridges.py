"""When a prompt is bridged, and what is on record when it is not; the tokens between two replies, case by case."""

from __future__ import annotations

import asyncio
import json
from functools import cache

import pytest

from benchmarks.template_engine import Sampled, TemplateEngine
from capture_proxy import graph, trace
from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.errors import FamilyError
from capture_proxy.families import load
from capture_proxy.rendering import Bridging
from capture_proxy.types import Severity
from tests.capture.rendering_cases import FAMILIES, TOOL, respelled, tokenizer_folder
from tests.capture.serving import served, until

SYSTEM = {"role": "system", "content": "You are an agent."}
TASK = {"role": "user", "content": "Look around."}
QWEN = FAMILIES["qwen3"]


@pytest.fixture
def folder(tmp_path):
    return tokenizer_folder(QWEN, tmp_path)


shared_load = cache(load)  # a tokenizer takes a second to load; these tests use one after the other


def bridging(folder, mode="auto", **more):
    return Bridging(mode, "qwen3", folder, load=shared_load, **more)


def qwen(folder, *replies, **more):
    """An engine that gives these replies in order, the last for ever."""
    return TemplateEngine(folder, lambda k, _: replies[min(k, len(replies) - 1)], "qwen3", **more)


async def ask(client, messages, **more):
    reply = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL], **more)
    return reply.choices[0].message.model_dump()


def answered(said):
    return [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in said["tool_calls"] or []]


async def turns_of(gateway, session):
    return sorted((await gateway.gateway.sessions.capture(session.session_id)).turns, key=lambda t: t.index)


async def two_turns(gateway, spell=respelled, new=None):
    """The turns of: a request, and a second one that goes on from its reply."""
    await gateway.gateway.bridger.ready()
    session = await gateway.mint()
    client = gateway.openai(session)
    said = await ask(client, [SYSTEM, TASK])
    await ask(client, [SYSTEM, TASK, spell(said), *(new or answered(said) or [{"role": "user", "content": "On."}])])
    return await turns_of(gateway, session)


# --- the tokens at the boundary


async def test_a_sampled_end_token_stays_and_the_newline_after_it_is_the_prompts(folder, tmp_path):
    engine = qwen(folder, QWEN.sampled_call(0))
    async with served(engine, tmp_path / "s", bridging=bridging(folder)) as gateway:
        first, second = await two_turns(gateway)
    end, newline = engine.encode("<|im_end|>")[0], engine.encode("\n")[0]
    known = first.prompt_ids_P + first.completion_ids_T
    assert first.completion_ids_T[-1] == end
    assert second.prompt_ids_P[: len(known)] == known
    assert second.prompt_ids_P[len(known)] == newline
    assert trace.loss_mask(first)[-1] == 1
    assert trace.loss_mask(second)[: len(second.prompt_ids_P)] == [0] * len(second.prompt_ids_P)


async def test_another_end_token_that_was_sampled_is_kept_and_not_closed_twice(folder, tmp_path):
    engine = qwen(folder, Sampled(["Done."], end="<|endoftext|>"))
    async with served(engine, tmp_path / "s", bridging=bridging(folder)) as gateway:
        first, second = await two_turns(gateway)
    new = second.prompt_ids_P[len(first.prompt_ids_P + first.completion_ids_T) :]
    assert second.bridged_from == first.turn_id
    assert first.completion_ids_T[-1] == engine.encode("<|endoftext|>")[0]
    assert new[0] == engine.encode("\n")[0]


@pytest.mark.parametrize(
    "cut",
    [
        Sampled(["Half a sent"], end=False),
        Sampled(["It says STOP"], end=False, stop="STOP"),
        Sampled(["<think>\n", "hm\n", "</think>\n\n", "Half"], end=False),
    ],
)
async def test_a_reply_without_its_end_token_is_closed_in_the_prompt_with_mask_0(folder, tmp_path, cut):
    engine = qwen(folder, cut)
    async with served(engine, tmp_path / "s", bridging=bridging(folder)) as gateway:
        first, second = await two_turns(gateway)
    known = first.prompt_ids_P + first.completion_ids_T
    assert second.bridged_from == first.turn_id
    assert second.prompt_ids_P[: len(known)] == known
    assert engine.tokenizer.decode(second.prompt_ids_P[len(known) :]).startswith("<|im_end|>\n<|im_start|>user")
    assert len(first.logprobs_T) == len(first.completion_ids_T)  # nothing was invented for the end token
    assert trace.loss_mask(second)[len(known)] == 0


async def test_a_reply_cut_off_in_its_reasoning_is_closed_in_full(folder, tmp_path):
    """No template renders half a thought, so only `always` continues it."""
    engine = qwen(folder, Sampled(["<think>\n", "I wonder"], end=False))
    async with served(engine, tmp_path / "s", bridging=bridging(folder, "always")) as gateway:
        first, second = await two_turns(gateway)
    new = second.prompt_ids_P[len(first.prompt_ids_P + first.completion_ids_T) :]
    assert engine.tokenizer.decode(new).startswith("</think><|im_end|>\n<|im_start|>user")


async def test_what_cannot_be_proven_for_a_cut_reply_is_no_verdict_on_whole_ones(folder, tmp_path):
    engine = qwen(folder, Sampled(["<think>\n", "I wonder"], end=False), Sampled(["Yes."]))
    async with served(engine, tmp_path / "s", bridging=bridging(folder)) as gateway:
        await gateway.gateway.bridger.ready()
        session = await gateway.mint()
        client, messages = gateway.openai(session), [SYSTEM, TASK]
        for k in range(3):
            messages += [respelled(await ask(client, messages)), {"role": "user", "content": f"On. {k}"}]
        first, second, third = await turns_of(gateway, session)
    assert second.bridge_refusal.startswith("unproven: at position")
    assert third.bridged_from == second.turn_id
    assert first.bridge_refusal is None


async def test_a_role_marker_that_was_sampled_as_stop_stands_once(folder, tmp_path):
    """GLM ends a reply by sampling the marker of the next message."""
    glm = tmp_path / "glm"
    glm.mkdir()
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    names = [
        "[gMASK]",
        "<sop>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|observation|>",
        "<arg_key>",
        "</arg_key>",
    ]
    names += ["<arg_value>", "</arg_value>", "/nothink"]
    taken = {token["content"] for token in tokenizer["added_tokens"]}
    start = max(token["id"] for token in tokenizer["added_tokens"]) + 1
    like = {**tokenizer["added_tokens"][0]}
    tokenizer["added_tokens"] += [
        {**like, "id": start + i, "content": name} for i, name in enumerate(n for n in names if n not in taken)
    ]
    (glm / "tokenizer.json").write_text(json.dumps(tokenizer))
    (glm / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    call = "\n<tool_call>sh\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n</tool_call>"
    engine = TemplateEngine(glm, lambda *_: Sampled(["Look.", call], end="<|observation|>"), "glm-4.5")
    async with served(engine, tmp_path / "s", bridging=Bridging("auto", "glm-4.5", glm)) as gateway:
        first, second = await two_turns(gateway)
    observation = engine.encode("<|observation|>")[0]
    assert second.bridged_from == first.turn_id
    assert first.completion_ids_T[-1] == observation
    assert second.prompt_ids_P.count(observation) == 1
    assert trace.loss_mask(first)[-1] == 1


# --- reasoning


@pytest.mark.parametrize(
    "spell",
    [
        lambda said: respelled(said, keep_reasoning=True),
        lambda said: {**respelled(said), "reasoning": said["reasoning_content"]},
        lambda said: {
            **respelled(said),
            "content": f"<think>\n{said['reasoning_content']}\n</think>\n{said['content']}",
        },
        respelled,
    ],
    ids=["reasoning_content", "reasoning", "inline", "dropped"],
)
async def test_reasoning_that_was_sampled_stays_whatever_the_agent_does_with_it(folder, tmp_path, spell):
    engine = qwen(folder, QWEN.sampled_call(0))
    async with served(engine, tmp_path / "s", bridging=bridging(folder)) as gateway:
        first, second = await two_turns(gateway, spell)
    assert first.message["reasoning_content"] == "Step 0,\nthen on."
    assert second.bridged_from == first.turn_id
    assert "Step 0,\nthen on." in engine.tokenizer.decode(second.prompt_ids_P)


@pytest.mark.parametrize("spelled", ["reasoning_content", "reasoning"])
async def test_without_bridging_the_template_gets_reasoning_under_either_name(folder, tmp_path, spelled):
    engine = qwen(folder, QWEN.sampled_call(0))
    spell = lambda said: {**respelled(said), spelled: said["reasoning_content"]}  # noqa: E731
    async with served(engine, tmp_path / "s", bridging=Bridging("never")) as gateway:
        _, second = await two_turns(gateway, spell)
    assert "Step 0,\nthen on." in engine.tokenizer.decode(second.prompt_ids_P)


async def test_a_tool_turn_that_keeps_and_a_user_turn_that_drops_reasoning_are_rows_of_real_requests(folder, tmp_path):
    engine = qwen(folder, QWEN.sampled_call(0), QWEN.sampled_text(1), QWEN.sampled_text(2))
    async with served(engine, tmp_path / "s", bridging=bridging(folder, thinking_retention="tool_cycle")) as gateway:
        await gateway.gateway.bridger.ready()
        session = await gateway.mint()
        client = gateway.openai(session)
        first = await ask(client, [SYSTEM, TASK])
        messages = [SYSTEM, TASK, respelled(first, keep_reasoning=True), *answered(first)]
        second = await ask(client, messages)
        messages += [respelled(second, keep_reasoning=True), {"role": "user", "content": "And?"}]
        await ask(client, messages)
        turns = await turns_of(gateway, session)
    built = graph.build(turns)
    assert built.lineages == [[turns[0].turn_id, turns[1].turn_id], [turns[2].turn_id]]
    fork = built.nodes[turns[2].turn_id].fork
    assert fork.position == len(turns[0].prompt_ids_P)  # where the first reply's reasoning had been
    assert turns[2].bridge_refusal == "qwen3 does not continue this reply with a user message"
    assert [sum(trace.loss_mask(t)) for t in turns] == [len(t.completion_ids_T) for t in turns]


# --- when it is not bridged


async def test_a_rewritten_history_forks_with_the_reason_and_the_first_position_on_the_trace(folder, tmp_path):
    engine = qwen(folder, QWEN.sampled_call(0))
    async with served(engine, tmp_path / "s", bridging=bridging(folder)) as gateway:
        spell = lambda said: {**respelled(said), "content": "I never said that."}  # noqa: E731
        first, second = await two_turns(gateway, spell)
        session = await gateway.gateway.sessions.get("s1")
        capture = await gateway.gateway.sessions.capture(session.session_id)
    assert second.bridge_refusal == f"the reply of {first.turn_id} was rewritten at message 2"
    metadata = trace.to_training_trace(capture).turns[1].metadata
    assert metadata["bridge_refusal"] == second.bridge_refusal
    assert metadata["bridged_from"] is None
    assert metadata["fork"]["position"] == len(first.prompt_ids_P)
    assert metadata["fork"]["turn_id"] == first.turn_id


async def test_a_renderer_that_differs_from_the_engines_template_is_found_out_before_it_is_used(folder, tmp_path):
    template = tokenizer_template(folder).replace("<tool_response>", "<result>")
    engine = qwen(folder, QWEN.sampled_call(0), template=template)
    async with served(engine, tmp_path / "s", bridging=bridging(folder)) as gateway:
        await gateway.gateway.bridger.ready()
        session = await gateway.mint()
        client, messages = gateway.openai(session), [SYSTEM, TASK]
        for _ in range(3):
            said = await ask(client, messages)
            messages += [respelled(said), *answered(said)]
        turns = await turns_of(gateway, session)
    rendered = engine.num_rendered
    for turn in turns[1:]:
        assert turn.bridged_from is None
        assert turn.bridge_refusal.startswith("unproven: at position ")
        (finding,) = [f for f in turn.findings if f.code == "bridging_unproven"]
        assert finding.severity is Severity.WARN
    position = int(turns[1].bridge_refusal.split("position ")[1].split()[0])
    known = len(turns[0].prompt_ids_P + turns[0].completion_ids_T)
    assert position >= known
    assert rendered == 3 + 1  # each prompt, and one proof that failed


async def test_forced_it_is_used_without_proof(folder, tmp_path):
    template = tokenizer_template(folder).replace("<tool_response>", "<result>")
    engine = qwen(folder, QWEN.sampled_call(0), template=template)
    async with served(engine, tmp_path / "s", bridging=bridging(folder, "always")) as gateway:
        first, second = await two_turns(gateway)
    assert second.bridged_from == first.turn_id
    assert engine.num_rendered == 1


async def test_other_tools_and_other_template_arguments_fork(folder, tmp_path):
    engine = qwen(folder, QWEN.sampled_text(0))
    async with served(engine, tmp_path / "s", bridging=bridging(folder)) as gateway:
        await gateway.gateway.bridger.ready()
        session = await gateway.mint()
        client = gateway.openai(session)
        said = await ask(client, [SYSTEM, TASK])
        messages = [SYSTEM, TASK, respelled(said), {"role": "user", "content": "On."}]
        await client.chat.completions.create(model="m", messages=messages, tools=[TOOL, {**TOOL}])
        await ask(client, messages, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        await ask(client, messages)
        turns = await turns_of(gateway, session)
    changed = "the tools or the template's arguments changed"
    assert [t.bridge_refusal for t in turns] == [None, changed, changed, None]
    assert turns[3].bridged_from == turns[0].turn_id


async def test_template_arguments_that_the_family_knows_are_bridged_under(folder, tmp_path):
    engine = qwen(folder, Sampled(["Done."]))
    async with served(engine, tmp_path / "s", bridging=bridging(folder)) as gateway:
        await gateway.gateway.bridger.ready()
        session = await gateway.mint(chat_template_kwargs={"enable_thinking": False})
        client = gateway.openai(session)
        said = await ask(client, [SYSTEM, TASK])
        await ask(client, [SYSTEM, TASK, respelled(said), {"role": "user", "content": "On."}])
        turns = await turns_of(gateway, session)
    assert turns[1].bridged_from == turns[0].turn_id
    assert engine.tokenizer.decode(turns[1].prompt_ids_P).endswith("<think>\n\n</think>\n\n")


async def test_template_arguments_that_the_family_does_not_know_are_left_to_the_engine(folder, tmp_path):
    engine = qwen(folder, Sampled(["Done."]))
    async with served(engine, tmp_path / "s", bridging=bridging(folder)) as gateway:
        await gateway.gateway.bridger.ready()
        session = await gateway.mint(chat_template_kwargs={"custom": 1})
        client = gateway.openai(session)
        said = await ask(client, [SYSTEM, TASK])
        await ask(client, [SYSTEM, TASK, respelled(said), {"role": "user", "content": "On."}])
        turns = await turns_of(gateway, session)
    assert "custom" in turns[1].bridge_refusal


async def test_pictures_are_left_to_the_engine(folder, tmp_path):
    picture = {
        "role": "user",
        "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}],
    }
    engine = qwen(folder, Sampled(["Done."]))
    async with served(engine, tmp_path / "s", bridging=bridging(folder)) as gateway:
        _, second = await two_turns(gateway, new=[picture])
    assert second.bridge_refusal == "the prompt holds more than text"


async def test_an_engine_that_takes_no_ids_renders(folder, tmp_path):
    engine = qwen(folder, Sampled(["Done."]), ids_in=False)
    async with served(engine, tmp_path / "s", bridging=bridging(folder)) as gateway:
        _, second = await two_turns(gateway)
    assert second.bridge_refusal.startswith("the engine takes no token ids")


async def test_calls_before_the_renderer_is_there_are_rendered_by_the_engine(folder, tmp_path):
    engine = qwen(folder, Sampled(["Done."]))
    async with served(engine, tmp_path / "s", bridging=bridging(folder)) as gateway:
        session = await gateway.mint()
        client = gateway.openai(session)
        said = await ask(client, [SYSTEM, TASK])
        messages = [SYSTEM, TASK, respelled(said), {"role": "user", "content": "On."}]
        await ask(client, messages)
        await gateway.gateway.bridger.ready()
        await ask(client, messages)
        turns = await turns_of(gateway, session)
    assert turns[1].bridge_refusal in ("the renderer is still loading", None)
    assert turns[2].bridged_from == turns[0].turn_id


async def test_an_engine_without_a_tokenizer_folder_says_so_on_the_turn(tmp_path):
    engine = ScriptedEngine([Reply("one"), Reply("two")])
    async with served(engine, tmp_path / "s") as gateway:
        _, second = await two_turns(gateway)
    assert second.bridge_refusal.startswith("no renderer: the engine's model is no folder that the gateway can read")


async def test_with_bridging_off_nothing_is_looked_up(tmp_path):
    async with served(ScriptedEngine([Reply("one")]), tmp_path / "s", bridging=Bridging("never")) as gateway:
        _, second = await two_turns(gateway)
    assert (second.bridged_from, second.bridge_refusal) == (None, None)


# --- sessions


async def test_a_restarted_gateway_continues_a_live_session_token_by_token(folder, tmp_path):
    engine = qwen(folder, QWEN.sampled_call(0))
    async with served(engine, tmp_path / "s", bridging=bridging(folder)) as gateway:
        await gateway.gateway.bridger.ready()
        session = await gateway.mint(chat_template_kwargs={"enable_thinking": True})
        said = await ask(gateway.openai(session), [SYSTEM, TASK])
    async with served(engine, tmp_path / "s", bridging=bridging(folder)) as gateway:
        await gateway.gateway.bridger.ready()
        await ask(gateway.openai(session), [SYSTEM, TASK, respelled(said), *answered(said)])
        turns = await turns_of(gateway, session)
    assert turns[1].bridged_from == turns[0].turn_id
    assert len(graph.build(turns).lineages) == 1


async def test_parallel_continuations_of_one_turn_share_its_ids(folder, tmp_path):
    engine = qwen(folder, QWEN.sampled_call(0))
    async with served(engine, tmp_path / "s", bridging=bridging(folder)) as gateway:
        await gateway.gateway.bridger.ready()
        session = await gateway.mint()
        client = gateway.openai(session)
        said = await ask(client, [SYSTEM, TASK])
        branches = [[*answered(said), {"role": "user", "content": f"branch {k}"}] for k in range(4)]
        await asyncio.gather(*(ask(client, [SYSTEM, TASK, respelled(said), *new]) for new in branches))
        turns = await turns_of(gateway, session)
    assert {t.bridged_from for t in turns[1:]} == {turns[0].turn_id}
    assert len(graph.build(turns).lineages) == 4


async def test_sessions_do_not_share_what_was_said(folder, tmp_path):
    engine = qwen(folder, QWEN.sampled_call(0))
    async with served(engine, tmp_path / "s", bridging=bridging(folder)) as gateway:
        await gateway.gateway.bridger.ready()
        one, two = await gateway.mint("one"), await gateway.mint("two")
        said = await ask(gateway.openai(one), [SYSTEM, TASK])
        await ask(gateway.openai(two), [SYSTEM, TASK, respelled(said), *answered(said)])
        (turn,) = await turns_of(gateway, two)
    assert (turn.bridged_from, turn.bridge_refusal) == (None, None)


async def test_a_hung_up_call_leaves_nothing_to_continue(folder, tmp_path):
    engine = qwen(folder, QWEN.sampled_call(0))
    async with served(engine, tmp_path / "s", bridging=bridging(folder), hang_up_grace_s=0.0) as gateway:
        await gateway.gateway.bridger.ready()
        session = await gateway.mint()
        stream = await gateway.openai(session).chat.completions.create(
            model="m", messages=[SYSTEM, TASK], tools=[TOOL], stream=True
        )
        await stream.close()
        live = await gateway.gateway.sessions.resolve(session.token)
        await until(lambda: not live.in_flight and not live.history._asked)


# --- families


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_family_is_told_by_the_engines_ids_not_by_name(name, tmp_path):
    case = FAMILIES[name]
    folder = tokenizer_folder(case, tmp_path)
    engine = TemplateEngine(folder, lambda *_: Sampled(["Done."]), case.renderer)
    async with served(engine, tmp_path / "s", bridging=Bridging("auto", "auto")) as gateway:
        assert await gateway.gateway.bridger.ready() == name.replace("_", "-")


async def test_an_engine_that_no_family_renders_like_is_left_alone_with_a_reason(tmp_path):
    folder = tokenizer_folder_as_published()  # of Llama 3, with a template of four lines
    engine = TemplateEngine(folder, lambda *_: Sampled(["Done."]), "llama_3")
    async with served(engine, tmp_path / "s") as gateway:
        assert await gateway.gateway.bridger.ready() is None
        _, second = await two_turns(gateway)
    assert second.bridge_refusal.startswith("no renderer: no known family renders as the engine does")


@pytest.mark.parametrize("name", ["qwen33", "default", "no-such"])
def test_an_unknown_name_lists_the_known_ones(folder, name):
    with pytest.raises(FamilyError, match=r"choose auto, none or one of .*qwen3"):
        load(name, folder, "all")


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(FamilyError, match="there is no tokenizer in"):
        load("qwen3", tmp_path, "all")


def test_a_family_that_the_tokenizer_does_not_fit_is_refused(folder):
    with pytest.raises(FamilyError, match="gpt-oss"):
        load("gpt_oss", folder, "all")


def tokenizer_template(folder):
    return json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]


def tokenizer_folder_as_published():
    from benchmarks.template_engine import NoTokenizer, npm_tokenizer

    try:
        return npm_tokenizer("llama3_1")
    except NoTokenizer as error:
        pytest.skip(str(error))

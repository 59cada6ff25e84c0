"""Google's own SDK as the agent: what it is shown, and what is recorded."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from google import genai
from google.genai import errors, types

from capture_proxy.engines.base import ChatRequest
from capture_proxy.engines.scripted import END, Reply, ScriptedEngine, render
from capture_proxy.types import Session, TurnStatus
from tests.capture.serving import Served, served

BASH = {"name": "bash", "parameters_json_schema": {"type": "object", "properties": {"cmd": {"type": "string"}}}}
TOOLS = [{"function_declarations": [BASH]}]
LOOK = Reply(["I ", "look."], [("bash", {"cmd": "ls"}), ("bash", {})], reasoning="hm")

pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession")


@asynccontextmanager
async def client(gw: Served, session: Session) -> AsyncIterator[Any]:
    options = types.HttpOptions(base_url=gw.agent_url, retry_options=types.HttpRetryOptions(attempts=1))
    async with genai.Client(api_key=session.token, http_options=options).aio as sdk:
        yield sdk


async def test_a_reply_has_thought_text_calls_and_usage(tmp_path: Path) -> None:
    async with served(ScriptedEngine([LOOK]), tmp_path / "s.sqlite") as gw:
        async with client(gw, await gw.mint()) as sdk:
            reply = await sdk.models.generate_content(model="org/smol", contents="hi", config={"tools": TOOLS})
        (turn,) = (await gw.admin.capture("s1")).turns
    (candidate,) = reply.candidates
    assert candidate.content.role == "model" and candidate.finish_reason is types.FinishReason.STOP
    thought, text, one, two = candidate.content.parts
    assert (thought.text, thought.thought) == ("hm", True)
    assert (text.text, text.thought) == ("I look.", None)
    assert [(c.function_call.name, c.function_call.args) for c in (one, two)] == [("bash", {"cmd": "ls"}), ("bash", {})]
    assert [c.function_call.id for c in (one, two)] == [call["id"] for call in turn.message["tool_calls"]]
    assert reply.usage_metadata.prompt_token_count == len(turn.prompt_ids_P)
    assert reply.usage_metadata.candidates_token_count == len(turn.completion_ids_T)
    assert reply.usage_metadata.total_token_count == len(turn.prompt_ids_P) + len(turn.completion_ids_T)
    assert (reply.model_version, reply.response_id) == ("org/smol", turn.turn_id)
    assert (turn.dialect, turn.request["model"], turn.trainable) == ("gemini", "org/smol", True)


async def test_a_stream_is_whole_responses_with_the_calls_and_the_finish_in_the_last(tmp_path: Path) -> None:
    async with served(ScriptedEngine([LOOK]), tmp_path / "s.sqlite") as gw:
        async with client(gw, await gw.mint()) as sdk:
            whole = await sdk.models.generate_content(model="m", contents="hi", config={"tools": TOOLS})
            stream = await sdk.models.generate_content_stream(model="m", contents="hi", config={"tools": TOOLS})
            chunks = [chunk async for chunk in stream]
        one, two = (await gw.admin.capture("s1")).turns
    assert all(chunk.candidates and chunk.response_id for chunk in chunks)
    assert [chunk.candidates[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts]
    assert "".join(part.text for part in parts if part.thought) == "hm"
    assert "".join(part.text for part in parts if part.text and not part.thought) == "I look."
    assert [part.function_call.args for part in chunks[-1].candidates[0].content.parts] == [{"cmd": "ls"}, {}]
    assert chunks[-1].candidates[0].finish_reason is types.FinishReason.STOP
    assert chunks[-1].usage_metadata == whole.usage_metadata
    assert one.completion_ids_T == two.completion_ids_T
    assert _without_ids(one.message) == _without_ids(two.message)


async def test_text_arrives_while_the_engine_samples_and_calls_only_when_the_turn_is_kept(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def hold(piece: int) -> None:
        if piece == 2:
            await gate.wait()

    async with served(ScriptedEngine([LOOK], hold=hold), tmp_path / "s.sqlite") as gw:
        async with client(gw, await gw.mint()) as sdk:
            stream = await sdk.models.generate_content_stream(model="m", contents="hi", config={"tools": TOOLS})
            async for chunk in stream:
                if any(part.text == "I " for part in chunk.candidates[0].content.parts):
                    assert (await gw.admin.capture("s1")).turns == []
                    gate.set()
                if any(part.function_call for part in chunk.candidates[0].content.parts):
                    assert len((await gw.admin.capture("s1")).turns) == 1
                    break
            else:
                pytest.fail("no call arrived")
    assert gate.is_set()


async def test_thoughts_are_hidden_only_from_a_client_that_says_so(tmp_path: Path) -> None:
    quiet = {"thinking_config": {"include_thoughts": False}}
    async with served(ScriptedEngine([LOOK]), tmp_path / "s.sqlite") as gw:
        async with client(gw, await gw.mint()) as sdk:
            whole = await sdk.models.generate_content(model="m", contents="hi", config=quiet)
            stream = await sdk.models.generate_content_stream(model="m", contents="hi", config=quiet)
            chunks = [whole, *[chunk async for chunk in stream]]
        turns = (await gw.admin.capture("s1")).turns
    assert not any(part.thought for chunk in chunks for part in chunk.candidates[0].content.parts)
    assert [turn.message["reasoning_content"] for turn in turns] == ["hm", "hm"]


async def test_the_sdks_own_chat_continues_the_recorded_tokens(tmp_path: Path) -> None:
    """It keeps each streamed chunk as a content of its own, the last one without text included."""
    engine = ScriptedEngine([Reply(["a", "b"]), Reply(["c", "d"]), "e"])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        async with client(gw, await gw.mint()) as sdk:
            chat = sdk.chats.create(model="m")
            for text in ("one", "two"):
                async for _ in await chat.send_message_stream(text):
                    pass
            await chat.send_message("three")
        capture = await gw.admin.capture("s1")
    assert _extends(capture.turns[0], capture.turns[1]) and _extends(capture.turns[1], capture.turns[2])


@pytest.mark.parametrize("keeps_thoughts", [True, False])
@pytest.mark.parametrize("keeps_ids", [True, False])
async def test_a_tool_loop_extends_its_tokens_unless_thoughts_are_dropped(
    tmp_path: Path, keeps_ids: bool, keeps_thoughts: bool
) -> None:
    """As gemini-cli plays it: parallel calls, ids of its own making, thoughts dropped; others keep the thoughts."""
    engine = ScriptedEngine([LOOK, Reply("again", [("bash", {"cmd": "pwd"})]), "done"])
    contents: list[Any] = [{"role": "user", "parts": [{"text": "hi"}]}]
    async with served(engine, tmp_path / "s.sqlite") as gw:
        async with client(gw, await gw.mint()) as sdk:
            for turn in range(3):
                stream = await sdk.models.generate_content_stream(model="m", contents=contents, config={"tools": TOOLS})
                parts = [part async for chunk in stream for part in chunk.candidates[0].content.parts]
                kept = [part.model_dump(exclude_none=True) for part in parts if keeps_thoughts or not part.thought]
                calls = [part["function_call"] for part in kept if "function_call" in part]
                for k, call in enumerate(calls):
                    call["id"] = call["id"] if keeps_ids else f"bash_{turn}_{k}"
                contents.append({"role": "model", "parts": kept})
                answers = [{"name": "bash", "response": {"output": "x"}, "id": c["id"]} for c in reversed(calls)]
                contents.append({"role": "user", "parts": [{"function_response": a} for a in answers]})
        one, two, three = (await gw.admin.capture("s1")).turns
    assert _extends(two, three)
    assert _extends(one, two) is keeps_thoughts  # a reply whose thoughts are gone is another reply
    assert [m["role"] for m in two.request["messages"]] == ["user", "assistant", "tool", "tool"]


async def test_a_count_is_the_length_of_the_prompt_that_the_same_request_has(tmp_path: Path) -> None:
    body = {
        "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
        "systemInstruction": "x" * 500,
        "tools": [{"functionDeclarations": [{"name": f"tool{i}"} for i in range(5)]}],
    }
    async with served(ScriptedEngine(["ok"]), tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        async with client(gw, session) as sdk, gw.http(session) as http:
            plain = await sdk.models.count_tokens(model="m", contents="hi")
            full = await http.post("/v1beta/models/m:countTokens", json={"generateContentRequest": body})
            await http.post("/v1beta/models/m:generateContent", json=body)
        (turn,) = (await gw.admin.capture("s1")).turns
    user = [{"role": "user", "content": "hi"}]
    assert plain.total_tokens == len(render(ChatRequest("m", user, [], None, {}, None)))
    assert full.json() == {"totalTokens": len(turn.prompt_ids_P)}


async def test_models_are_the_engines(tmp_path: Path) -> None:
    async with served(ScriptedEngine(model="org/smol", max_model_len=512), tmp_path / "s.sqlite") as gw:
        async with client(gw, await gw.mint()) as sdk:
            listed = [model async for model in await sdk.models.list()]
            one = await sdk.models.get(model="org/smol")
            with pytest.raises(errors.ClientError) as caught:
                await sdk.models.get(model="other")
    assert [model.name for model in listed] == ["models/org/smol"]
    assert (one.name, one.input_token_limit) == ("models/org/smol", 512)
    assert "generateContent" in one.supported_actions
    assert (caught.value.code, caught.value.status) == (404, "NOT_FOUND")


@pytest.mark.parametrize("version", ["v1", "v1beta"])
async def test_the_token_may_come_three_ways_and_both_versions_are_served(tmp_path: Path, version: str) -> None:
    body = {"contents": [{"parts": [{"text": "hi"}]}]}
    async with served(ScriptedEngine(["ok"], model="m"), tmp_path / "s.sqlite") as gw:
        token = (await gw.mint()).token
        async with gw.http() as http:
            for send in (
                {"headers": {"x-goog-api-key": token}},
                {"headers": {"authorization": f"Bearer {token}"}},
                {"params": {"key": token}},
            ):
                reply = await http.post(f"/{version}/models/m:generateContent", json=body, **send)
                assert reply.json()["candidates"][0]["content"]["parts"] == [{"text": "ok"}]
            listed = await http.get(f"/{version}/models", headers={"x-goog-api-key": token})
            refused = await http.post(f"/{version}/models/m:generateContent", json=body)
    assert [model["name"] for model in listed.json()["models"]] == ["models/m"]
    assert refused.status_code == 401 and refused.json()["error"]["status"] == "UNAUTHENTICATED"


async def test_openai_clients_still_get_their_own_model_list(tmp_path: Path) -> None:
    async with served(ScriptedEngine(model="smol"), tmp_path / "s.sqlite") as gw:
        assert [m.id async for m in gw.openai(await gw.mint()).models.list()] == ["smol"]


async def test_errors_have_googles_status_names(tmp_path: Path) -> None:
    engine = ScriptedEngine(["x"], max_model_len=3)
    async with served(engine, tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        async with client(gw, session) as sdk, gw.http(session) as http:
            with pytest.raises(errors.ClientError, match=r"token count \(5\).*tokens allowed \(3\)") as long:
                await sdk.models.generate_content(model="m", contents="hi")
            with pytest.raises(errors.ClientError, match="token count") as streamed:
                await anext(await sdk.models.generate_content_stream(model="m", contents="hi"))
            with pytest.raises(errors.ClientError) as missing:
                await sdk.models.embed_content(model="m", contents="hi")
            broken = await http.post("/v1beta/models/m:generateContent", content=b"{")
            await gw.admin.seal("s1")
            with pytest.raises(errors.ClientError) as sealed:
                await sdk.models.generate_content(model="m", contents="hi")
        capture = await gw.admin.capture("s1")
    assert (long.value.code, long.value.status) == (streamed.value.code, streamed.value.status)
    assert (long.value.code, long.value.status) == (400, "INVALID_ARGUMENT")
    assert (missing.value.code, missing.value.status) == (404, "NOT_FOUND")
    assert (sealed.value.code, sealed.value.status) == (403, "PERMISSION_DENIED")
    assert broken.status_code == 400 and broken.json()["error"]["status"] == "INVALID_ARGUMENT"
    assert capture.session.limit_hit == "context_length" and capture.session.last_fault is None


async def test_a_reply_cut_by_the_window_says_so(tmp_path: Path) -> None:
    engine = ScriptedEngine(["a long answer"], max_model_len=8)
    async with served(engine, tmp_path / "s.sqlite") as gw:
        async with client(gw, await gw.mint()) as sdk:
            reply = await sdk.models.generate_content(model="m", contents="hi", config={"max_output_tokens": 900})
        (turn,) = (await gw.admin.capture("s1")).turns
    assert reply.candidates[0].finish_reason is types.FinishReason.MAX_TOKENS
    assert [f.code for f in turn.findings] == ["clamped"]


async def test_log_probabilities_are_of_the_ids_that_were_sampled(tmp_path: Path) -> None:
    async with served(ScriptedEngine(["ok"]), tmp_path / "s.sqlite") as gw:
        async with client(gw, await gw.mint()) as sdk:
            reply = await sdk.models.generate_content(
                model="m", contents="hi", config={"response_logprobs": True, "temperature": 1}
            )
        (turn,) = (await gw.admin.capture("s1")).turns
    chosen = reply.candidates[0].logprobs_result.chosen_candidates
    assert [(c.token_id, c.log_probability) for c in chosen] == list(
        zip(turn.completion_ids_T, turn.logprobs_T, strict=True)
    )
    assert turn.completion_ids_T[-1] == END


async def test_a_hang_up_stops_the_engine_and_is_no_training_data(tmp_path: Path) -> None:
    async with served(ScriptedEngine([Reply("first", stall=True)]), tmp_path / "s.sqlite") as gw:
        session = await gw.mint()
        body = {"contents": [{"parts": [{"text": "hi"}]}]}
        url = "/v1beta/models/m:streamGenerateContent"
        async with gw.http(session) as http, http.stream("POST", url, params={"alt": "sse"}, json=body) as response:
            async for line in response.aiter_lines():
                assert json.loads(line.removeprefix("data: "))["candidates"]
                break
        async with asyncio.timeout(2):
            while not (turns := (await gw.admin.capture("s1")).turns):
                await asyncio.sleep(0.01)
        assert gw.gateway.engine.in_flight == 0
    assert (turns[0].status, turns[0].trainable) == (TurnStatus.ABORTED, False)


def _extends(one: Any, two: Any) -> bool:
    whole = one.prompt_ids_P + one.completion_ids_T
    return bool(two.prompt_ids_P[: len(whole)] == whole)


def _without_ids(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"tool_calls": [call["function"] for call in message["tool_calls"]]}

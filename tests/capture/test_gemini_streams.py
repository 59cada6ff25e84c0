"""The bytes of a Gemini stream: both forms, silence, faults, and what breaks real readers."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from google import genai
from google.genai import errors, types

from capture_proxy.dialects.base import Call
from capture_proxy.dialects.gemini import Gemini
from capture_proxy.dialects.gemini_request import Notes
from capture_proxy.engines.scripted import Reply, ScriptedEngine
from capture_proxy.errors import EngineUnreachable
from capture_proxy.types import Turn, TurnRole, TurnStatus
from tests.capture.serving import served

pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession")

BODY = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
STREAM = "/v1beta/models/m:streamGenerateContent"
# How Google's JavaScript SDK finds the next event in what it has read so far, and how it tells a clean end.
JS_EVENT = re.compile(r"\s*data: ([^\n\r\u2028\u2029]*)(?:\n\n|\r\r|\r\n\r\n)")


def javascript_events(text: str) -> tuple[list[Any], str]:
    """(the events that SDK sees, what is left over: it throws unless that is blank)."""
    found = []
    while match := JS_EVENT.match(text):
        found.append(json.loads(match[1]))
        text = text[match.end() :]
    return found, text.strip()


def a_turn(**message: Any) -> Turn:
    return Turn(
        turn_id="t1",
        session_id="s1",
        index=0,
        dialect="gemini",
        request={},
        requested_sampling={},
        sampling={},
        prompt_ids_P=[1, 2],
        completion_ids_T=[3],
        logprobs_T=[-0.1],
        version_spans=[],
        message={"role": "assistant", "content": None} | message,
        finish_reason="tool_calls" if message.get("tool_calls") else "stop",
        status=TurnStatus.OK,
        role=TurnRole.AGENT,
    )


def a_call(arguments: str, name: str = "bash", call_id: str = "c") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def reply_to(turn: Turn, **notes: Any) -> dict[str, Any]:
    call = Call("m", [], [], None, {}, None, stream=False, include_usage=True, context=Notes(**notes))
    return json.loads(Gemini().reply(call, turn))  # type: ignore[no-any-return]


def writer(**notes: Any) -> Any:
    return Gemini().stream("t1", Call("m", [], [], None, {}, None, True, True, context=Notes(**notes)))


async def test_without_alt_sse_a_stream_is_one_json_array(tmp_path: Path) -> None:
    engine = ScriptedEngine([Reply(["a", "b"], [("bash", {})]), Reply("", finish_reason="stop")])
    async with served(engine, tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint()) as http:
            reply = await http.post(STREAM, json=BODY)
            empty = await http.post(STREAM, json=BODY)
    assert reply.headers["content-type"] == "application/json"
    chunks = reply.json()
    parts = [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
    assert "".join(part.get("text", "") for part in parts) == "ab" and "functionCall" in parts[-1]
    assert chunks[-1]["candidates"][0]["finishReason"] == "STOP" and chunks[-1]["usageMetadata"]["totalTokenCount"] > 0
    assert [chunk["candidates"][0]["content"]["parts"] for chunk in empty.json()] == [[{"text": ""}]]


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("alt", ["sse", "json"])
async def test_an_error_after_the_head_ends_the_stream_as_an_error(tmp_path: Path, alt: str, after: int) -> None:
    async with served(ScriptedEngine([Reply(["a", "b"], die_after=after)]), tmp_path / "s.sqlite") as gw:
        async with gw.http(await gw.mint()) as http:
            reply = await http.post(STREAM, params={"alt": alt}, json=BODY)
        (turn,) = (await gw.admin.capture("s1")).turns
    if alt == "json":
        items = reply.json()
    else:
        items = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
        assert javascript_events(reply.text)[1], "what that SDK cannot read makes it throw"
    assert len(items) == after + 1
    assert (items[-1]["error"]["code"], items[-1]["error"]["status"]) == (503, "UNAVAILABLE")
    assert turn.status is TurnStatus.FAILED and not turn.trainable


async def test_the_sdk_raises_an_error_that_comes_after_the_head(tmp_path: Path) -> None:
    async with served(ScriptedEngine([Reply(["a", "b"], die_after=1)]), tmp_path / "s.sqlite") as gw:
        options = types.HttpOptions(base_url=gw.agent_url)
        async with genai.Client(api_key=(await gw.mint()).token, http_options=options).aio as sdk:
            stream = await sdk.models.generate_content_stream(model="m", contents="hi")
            seen = [(await anext(stream)).text]
            with pytest.raises(errors.ServerError, match="UNAVAILABLE"):
                seen += [chunk.text async for chunk in stream]
    assert seen == ["a"]


@pytest.mark.parametrize("transport", ["aiohttp", "httpx"])
async def test_silence_is_filled_with_what_the_sdk_takes_for_nothing(tmp_path: Path, transport: str) -> None:
    engine = ScriptedEngine([Reply(["a", "b"])], first_delay_s=0.1, piece_delay_s=0.1)
    async with served(engine, tmp_path / "s.sqlite", keepalive_s=0.02) as gw:
        async with httpx.AsyncClient(trust_env=False) as http:
            options = types.HttpOptions(
                base_url=gw.agent_url, httpx_async_client=http if transport == "httpx" else None
            )
            async with genai.Client(api_key=(await gw.mint()).token, http_options=options).aio as sdk:
                stream = await sdk.models.generate_content_stream(model="m", contents="hi")
                texts = [chunk.text async for chunk in stream]
    assert "".join(text or "" for text in texts) == "ab"


@pytest.mark.parametrize("alt", ["sse", "json"])
async def test_silence_is_filled_before_the_head_and_after_it(tmp_path: Path, alt: str) -> None:
    engine = ScriptedEngine([Reply(["a", "b"])], first_delay_s=0.1, piece_delay_s=0.1)
    async with served(engine, tmp_path / "s.sqlite", keepalive_s=0.02) as gw:
        async with gw.http(await gw.mint()) as http, http.stream("POST", STREAM, params={"alt": alt}, json=BODY) as got:
            pieces = [piece async for piece in got.aiter_text()]
        (turn,) = (await gw.admin.capture("s1")).turns
    text = "".join(pieces)
    assert not pieces[0].strip() and sum(not piece.strip() for piece in pieces) >= 4
    chunks, rest = javascript_events(text) if alt == "sse" else (json.loads(text), "")
    assert rest == ""
    assert "".join(c["candidates"][0]["content"]["parts"][0]["text"] for c in chunks) == turn.message["content"] == "ab"


@pytest.mark.parametrize("sse", [True, False])
def test_an_array_is_valid_json_however_early_it_fails(sse: bool) -> None:
    fault = EngineUnreachable("gone")
    for before in (lambda w: b"", lambda w: w.start(3), lambda w: w.keepalive() + w.start(None) + w.delta("a", "b")):
        stream = writer(sse=sse)
        text = (before(stream) + stream.keepalive() + stream.error(fault)).decode()
        if not sse:
            assert json.loads(text)[-1]["error"]["message"] == "gone"
        else:
            assert text.rstrip().splitlines()[-1].startswith("data: ")


def test_line_separators_inside_text_do_not_end_an_event() -> None:
    odd = "a\u2028b\u2029c\u0085d\r\n\n"
    stream = writer()
    chunks, rest = javascript_events((stream.delta(odd, "") + stream.finish(a_turn(content=odd))).decode())
    assert rest == "" and chunks[0]["candidates"][0]["content"]["parts"] == [{"text": odd}]
    assert reply_to(a_turn(content=odd))["candidates"][0]["content"]["parts"] == [{"text": odd}]


def test_text_that_was_not_streamed_yet_comes_before_the_calls() -> None:
    stream = writer()
    out = stream.start(2) + stream.delta("I ", "h") + stream.delta("lo", "m")
    out += stream.finish(a_turn(content="I look.", reasoning_content="hmm", tool_calls=[a_call("{}")]))
    chunks = [c["candidates"][0]["content"]["parts"] for c in javascript_events(out.decode())[0]]
    assert [len(chunk) for chunk in chunks] == [1] * len(chunks), "no chunk mixes kinds of parts"
    parts = [part for chunk in chunks for part in chunk]
    texts = [part["text"] for part in parts if not part.get("thought") and "text" in part]
    assert "".join(texts) == "I look." and "".join(p["text"] for p in parts if p.get("thought")) == "hmm"
    assert parts[-1]["functionCall"] == {"id": "c", "name": "bash", "args": {}}


@pytest.mark.parametrize(
    ("arguments", "args"),
    [
        ("", {}),
        ("{}", {}),
        ('{ "a" :\n\n 1 }', {"a": 1}),
        ('{"a":"\\u00e9\\ud83d\\ude00"}', {"a": "é😀"}),
        ('{"a":"half \\ud83d"}', {"a": "half \ud83d"}),
        ('{"n":123456789012345678901234567890}', {"n": 123456789012345678901234567890}),
    ],
)
def test_arguments_arrive_as_the_object_they_are(arguments: str, args: dict[str, Any]) -> None:
    turn = a_turn(tool_calls=[a_call(arguments), a_call(arguments, call_id="d")])
    parts = reply_to(turn)["candidates"][0]["content"]["parts"]
    assert [part["functionCall"] for part in parts] == [{"id": i, "name": "bash", "args": args} for i in ("c", "d")]
    events, rest = javascript_events(writer().finish(turn).decode())
    assert events[0]["candidates"][0]["content"]["parts"] == parts and rest == ""


@pytest.mark.parametrize(
    "broken",
    [
        a_call('{"a":'),
        a_call('{"a":"\\u00'),
        a_call("{}{}"),
        a_call("[1]"),
        a_call("null"),
        a_call('{"a":NaN}'),
        a_call('{"a":1e999}'),
        a_call('{"a":' * 100_000),
        a_call("{}", name=""),
    ],
)
def test_a_call_that_cannot_be_read_is_reported_and_no_call_of_that_reply_is_run(broken: dict[str, Any]) -> None:
    turn = a_turn(content="x", tool_calls=[a_call("{}"), broken])
    chunks = javascript_events(writer().finish(turn).decode())[0]
    for last in (reply_to(turn), chunks[-1]):
        candidate = last["candidates"][0]
        assert candidate["finishReason"] == "MALFORMED_FUNCTION_CALL" and candidate["finishMessage"]
    for reply in ([reply_to(turn)], chunks):
        parts = [part for chunk in reply for part in chunk["candidates"][0]["content"]["parts"]]
        assert [part for part in parts if part != {"text": ""}] == [{"text": "x"}]


def test_what_the_engine_did_not_count_is_left_out() -> None:
    turn = a_turn(content="x")
    turn.prompt_ids_P, turn.completion_ids_T, turn.logprobs_T = [], [], []
    got = reply_to(turn, logprobs=True)
    assert got["usageMetadata"] == {} and "logprobsResult" not in got["candidates"][0]

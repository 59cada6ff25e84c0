"""A Gemini reply on the wire: whole, or as chunks that are each a whole GenerateContentResponse.

Owns the shape of candidates, usage and errors, and both forms of a stream: server-sent events (`alt=sse`) and one JSON
array. Called by `gemini`.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

from capture_proxy.dialects.gemini_request import Notes
from capture_proxy.errors import CaptureError, PromptTooLong
from capture_proxy.types import Turn

_FINISH = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}
# google.rpc.Code by HTTP status: https://cloud.google.com/apis/design/errors#error_model
_STATUS = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    504: "DEADLINE_EXCEEDED",
}


class GeminiStream:
    """Writes one reply. Text leaves as it comes; function calls, the finish reason and usage are the last chunk.

    A chunk holds parts of one kind: that is how `gemini_contents` tells chunks, which SDKs send back one by one, from a
    whole reply.
    """

    def __init__(self, turn_id: str, model: str, notes: Notes) -> None:
        self.media_type = "text/event-stream" if notes.sse else "application/json"
        self._notes = notes
        self._head = {"modelVersion": model, "responseId": turn_id}
        self._sent_content = 0  # characters of the message that are out already
        self._sent_reasoning = 0
        self._open = False  # the array has been opened
        self._num_chunks = 0

    def start(self, num_prompt_tokens: int | None) -> bytes:
        if self._notes.sse:
            return b""  # each chunk is whole, so there is no head
        self._open = True
        return b"["

    def keepalive(self) -> bytes:
        # Not an SSE comment: Google's Python SDK takes one for JSON and its JavaScript SDK for the start of an event
        # that never ends. An empty event is nothing to both, and to a JSON array it is white space.
        return b"\n\n" if self._notes.sse else b"\n"

    def delta(self, content: str, reasoning: str) -> bytes:
        self._sent_content += len(content)
        self._sent_reasoning += len(reasoning)
        return b"".join(self._chunk(_response([part], self._head)) for part in self._texts(content, reasoning))

    def finish(self, turn: Turn) -> bytes:
        content = (turn.message.get("content") or "")[self._sent_content :]
        reasoning = (turn.message.get("reasoning_content") or "")[self._sent_reasoning :]
        texts = self._texts(content, reasoning)
        num_before = len(texts) if turn.message.get("tool_calls") else len(texts) - 1
        out = [self._chunk(_response([part], self._head)) for part in texts[: max(num_before, 0)]]
        out.append(self._chunk(whole(turn, self._notes, texts[max(num_before, 0) :], self._head)))
        return b"".join(out) + (b"" if self._notes.sse else b"]")

    def error(self, error: CaptureError) -> bytes:
        data = orjson.dumps(error_object(error))
        if self._notes.sse:
            # Google sends an error as a bare line of JSON, and its SDKs only find it there; readers of standard events
            # skip that line (a field they do not know) and find the event.
            return data + b"\ndata: " + data + b"\n\n"
        return (b"," if self._num_chunks else b"" if self._open else b"[") + data + b"]"

    def _texts(self, content: str, reasoning: str) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        if reasoning and self._notes.thoughts:
            parts.append({"text": reasoning, "thought": True})
        if content:
            parts.append({"text": content})
        return parts

    def _chunk(self, response: dict[str, Any]) -> bytes:
        data = encode(response)
        self._num_chunks += 1
        if self._notes.sse:
            return b"data: " + data + b"\n\n"
        return (b",\n" if self._num_chunks > 1 else b"") + data


def whole(turn: Turn, notes: Notes, texts: list[dict[str, Any]] | None, head: dict[str, Any]) -> dict[str, Any]:
    """The response that ends a reply. `texts` are the parts that are not out yet; None = all of the message."""
    if texts is None:
        texts = []
        if notes.thoughts and turn.message.get("reasoning_content"):
            texts.append({"text": turn.message["reasoning_content"], "thought": True})
        if turn.message.get("content"):
            texts.append({"text": turn.message["content"]})
    calls, fault = _calls(turn)
    # A content without parts counts as a broken reply in Google's SDKs, which then drop the turn from their history.
    response = _response([*texts, *calls] or [{"text": ""}], head)
    candidate = response["candidates"][0]
    candidate["finishReason"] = _FINISH.get(turn.finish_reason or "", "OTHER")
    if fault is not None:
        candidate["finishReason"], candidate["finishMessage"] = "MALFORMED_FUNCTION_CALL", fault
    if notes.logprobs and turn.logprobs_T and None not in turn.logprobs_T:
        candidate.update(_logprobs(turn))
    response["usageMetadata"] = _usage(turn)
    return response


def error_object(error: CaptureError) -> dict[str, Any]:
    message = str(error)
    if isinstance(error, PromptTooLong):
        # Agents know this sentence of the API's and make their history shorter when they see it.
        asked, limit = (f" ({n})" if n is not None else "" for n in (error.num_tokens, error.max_tokens))
        known = f"The input token count{asked} exceeds the maximum number of tokens allowed{limit}."
        message = known if asked and limit else f"{known} {message}"
    kind = _STATUS.get(error.status, "INVALID_ARGUMENT" if error.status < 500 else "UNAVAILABLE")
    return {"error": {"code": error.status, "message": message, "status": kind}}


def encode(response: dict[str, Any]) -> bytes:
    """JSON in one line. U+2028 and U+2029 end a line to the JavaScript SDK's pattern, so they are escaped."""
    data = orjson.dumps(response)
    return data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")


def _response(parts: list[dict[str, Any]], head: dict[str, Any]) -> dict[str, Any]:
    return {"candidates": [{"content": {"parts": parts, "role": "model"}, "index": 0}], **head}


def _calls(turn: Turn) -> tuple[list[dict[str, Any]], str | None]:
    """(functionCall parts, None), or ([], what is wrong): a client runs all calls of a reply or none."""
    parts = []
    for i, call in enumerate(turn.message.get("tool_calls") or []):
        name, text = call["function"]["name"], call["function"].get("arguments") or "{}"
        try:
            args = json.loads(text)
            if not isinstance(args, dict) or not name:
                return [], f"the call of {name!r} has {text!r} as arguments"
            # Python's own writer, for numbers of any size and halves of surrogate pairs.
            arguments = orjson.Fragment(json.dumps(args, separators=(",", ":"), allow_nan=False))
        except (ValueError, RecursionError) as error:
            return [], f"the arguments of {name!r} are not JSON ({error}): {text}"
        parts.append({"functionCall": {"id": call.get("id") or f"{turn.turn_id}-{i}", "name": name, "args": arguments}})
    return parts, None


def _usage(turn: Turn) -> dict[str, int]:
    """Counts of the engine's own ids; what the engine did not say is left out."""
    usage = {}
    if turn.prompt_ids_P:
        usage["promptTokenCount"] = len(turn.prompt_ids_P)
        usage["candidatesTokenCount"] = len(turn.completion_ids_T)
        usage["totalTokenCount"] = len(turn.prompt_ids_P) + len(turn.completion_ids_T)
    return usage


def _logprobs(turn: Turn) -> dict[str, Any]:
    """Of the sampled tokens only, by id: their texts are not known here."""
    values = [x for x in turn.logprobs_T if x is not None]
    chosen = [{"tokenId": i, "logProbability": x} for i, x in zip(turn.completion_ids_T, values, strict=False)]
    return {"avgLogprobs": sum(values) / len(values), "logprobsResult": {"chosenCandidates": chosen}}

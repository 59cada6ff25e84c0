"""An Anthropic reply as a stream of events, and the pieces that a whole reply shares with it.

Owns the order of events (`message_start`, blocks with rising index, `message_delta`, `message_stop`), stop reasons,
usage and error objects. Formats: `anthropic.types.RawMessageStreamEvent` and `ErrorResponse` of the official SDK.
Called by `anthropic`.
"""

from __future__ import annotations

from typing import Any

import orjson

from capture_proxy.dialects.anthropic_content import signature
from capture_proxy.dialects.body import parse_json
from capture_proxy.errors import BadRequest, CaptureError, PromptTooLong
from capture_proxy.types import Turn

_ERROR_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class MessageStream:
    """Writes one reply: thinking and text as they come, each in a block of its own, whole tool calls at the end."""

    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, turn_id: str, model: str) -> None:
        self._turn_id, self._model = turn_id, model
        self._started = False
        self._index = -1  # of the block that was opened last
        self._kind = ""  # "thinking" or "text" while such a block is open
        self._thinking = ""  # of the open thinking block
        self._sent_content = 0  # characters of the message that are out already
        self._sent_reasoning = 0

    def start(self, num_prompt_tokens: int | None) -> bytes:
        self._started = True
        # The SDKs need a number here; where the length is not known yet, `message_delta` brings the true one.
        counts = _usage(num_prompt_tokens or 0, 0)
        message = {
            **message_head(self._turn_id, self._model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": counts,
        }
        return _event("message_start", message=message)

    def keepalive(self) -> bytes:
        # Also before `message_start`: every official SDK skips a ping wherever it comes.
        return _event("ping")

    def delta(self, content: str, reasoning: str) -> bytes:
        self._sent_content += len(content)
        self._sent_reasoning += len(reasoning)
        out = b""
        if reasoning:
            out += self._open("thinking")
            self._thinking += reasoning
            out += self._delta("thinking_delta", thinking=reasoning)
        if content:
            out += self._open("text") + self._delta("text_delta", text=content)
        return out

    def finish(self, turn: Turn) -> bytes:
        out = [] if self._started else [self.start(len(turn.prompt_ids_P) or None)]
        content = (turn.message.get("content") or "")[self._sent_content :]
        reasoning = (turn.message.get("reasoning_content") or "")[self._sent_reasoning :]
        out += [self.delta(content, reasoning), self._close()]
        for call in turn.message.get("tool_calls") or []:
            text, _ = tool_input(call["function"]["arguments"])
            block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
            out += [self._block(block), self._delta("input_json_delta", partial_json=text), self._stop_block()]
        out += [_event("message_delta", delta=stop(turn), usage=usage(turn)), _event("message_stop")]
        return b"".join(out)

    def error(self, error: CaptureError) -> bytes:
        return b"event: error\ndata: " + orjson.dumps(error_body(error)) + b"\n\n"

    def _open(self, kind: str) -> bytes:
        if self._kind == kind:
            return b""
        closed, self._kind = self._close(), kind
        empty = {"type": "text", "text": ""}
        if kind == "thinking":
            self._thinking = ""
            empty = {"type": "thinking", "thinking": "", "signature": ""}
        return closed + self._block(empty)

    def _close(self) -> bytes:
        kind, self._kind = self._kind, ""
        if not kind:
            return b""
        signed = self._delta("signature_delta", signature=signature(self._thinking)) if kind == "thinking" else b""
        return signed + self._stop_block()

    def _block(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, **value: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **value})

    def _stop_block(self) -> bytes:
        return _event("content_block_stop", index=self._index)


def message_head(turn_id: str, model: str) -> dict[str, Any]:
    """What every message object begins with."""
    return {"id": f"msg_{turn_id}", "type": "message", "role": "assistant", "model": model}


def stop(turn: Turn) -> dict[str, Any]:
    """`stop_reason` and `stop_sequence` of a finished turn."""
    if turn.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if turn.message.get("tool_calls"):  # also where an engine calls it "stop": agents run tools only on this reason
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if turn.stop_sequence is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": turn.stop_sequence}
    reason = "refusal" if turn.finish_reason == "content_filter" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def usage(turn: Turn) -> dict[str, int]:
    return _usage(len(turn.prompt_ids_P), len(turn.completion_ids_T))


def tool_input(arguments: str) -> tuple[str, Any]:
    """(valid JSON text, its value) of a call's arguments.

    Arguments that no parser reads become {"invalid_json": text}: the agent's own schema check then tells the model.
    """
    text = arguments if arguments.strip() else "{}"
    try:
        return text, orjson.loads(text)
    except ValueError:
        try:
            value = parse_json(text.encode("utf-8", "replace"))
        except BadRequest:
            value = {"invalid_json": text.encode("utf-8", "replace").decode()}
        return orjson.dumps(value).decode(), value


def error_body(error: CaptureError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = _too_long(error) if isinstance(error, PromptTooLong) else str(error)
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}


def _too_long(error: PromptTooLong) -> str:
    """Anthropic's own sentence: agents look for it, and for its two numbers, to compact their history."""
    if error.num_tokens is None or error.max_tokens is None:
        return f"prompt is too long: {error}"
    most = min(error.max_tokens, error.num_tokens - 1)  # a prompt that just fits leaves no room for a reply
    return f"prompt is too long: {error.num_tokens} tokens > {most} maximum"


def _usage(num_prompt: int, num_completion: int) -> dict[str, int]:
    return {
        "input_tokens": num_prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": num_completion,
    }


def _event(kind: str, **data: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **data}) + b"\n\n"

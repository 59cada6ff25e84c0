"""Token in for vLLM: what a generate request holds beside the prompt's ids, and who reads the reply.

Owns the frames (sampling parameters as the server resolves them, its parsers' state), asked for once for each kind of
request on a one-word conversation, since none of it depends on the messages; and the choice between the server's own
parser and a model family's reader, made once by an example. Called by `engines.vllm`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from capture_proxy.engines.base import Example, ReplyReader
from capture_proxy.errors import CaptureError, EngineUnreachable, PromptTooLong

_log = logging.getLogger(__name__)
_MAX_FRAMES = 256
_STAND_IN = [{"role": "user", "content": "-"}]

Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]  # a body -> the server's answer


class Frames:
    """Rendered stand-ins by kind of request. `render` asks the server to render a chat request."""

    def __init__(self, render: Ask) -> None:
        self._render = render
        self._known: dict[bytes, dict[str, Any]] = {}

    async def of(self, chat: dict[str, Any]) -> dict[str, Any]:
        """The server's rendering of a stand-in for `chat`; its `token_ids` hold no history, but the reply's header."""
        kind = {key: value for key, value in chat.items() if key not in ("messages", "seed")}
        key = orjson.dumps(kind, option=orjson.OPT_SORT_KEYS)
        frame = self._known.get(key)
        if frame is None:
            frame = await self._render({**kind, "messages": _STAND_IN})
            if len(self._known) >= _MAX_FRAMES:  # kinds come from agents
                self._known.clear()
            self._known[key] = frame
        return frame

    async def around(self, chat: dict[str, Any], prompt_ids: list[int], max_model_len: int | None) -> dict[str, Any]:
        """A generate request for exactly these ids; `max_tokens` is what the window leaves. Raises PromptTooLong."""
        frame = await self.of(chat)
        params = dict(frame["sampling_params"])
        if (seed := chat.get("seed")) is not None:
            params["seed"] = seed
        params["max_tokens"] = _room(params.get("max_tokens"), frame["token_ids"], prompt_ids, max_model_len)
        return {**frame, "token_ids": prompt_ids, "sampling_params": params, "token_offsets": None}


def _room(stand_in_room: Any, stand_in: list[int], prompt_ids: list[int], max_model_len: int | None) -> int | None:
    """Tokens that the window leaves after the prompt; None = the server names no window."""
    if not isinstance(stand_in_room, int):
        return None
    window = max_model_len if max_model_len is not None else stand_in_room + len(stand_in)
    room = window - len(prompt_ids)
    if room < 1:
        raise PromptTooLong(
            f"the prompt has {len(prompt_ids)} tokens and leaves no room in the model's context length of {window}",
            len(prompt_ids),
            window,
        )
    # A server whose own default is below the window caps every reply there.
    own_default = stand_in_room if stand_in_room + len(stand_in) < window else room
    return min(room, own_default)


class Reading:
    """Who reads replies: the server's parsers (`reader` is None), or a family's reader where they do not fit."""

    def __init__(self, derender: Ask) -> None:
        self._derender = derender
        self._offered: ReplyReader | None = None
        self._settled = False
        self.reader: ReplyReader | None = None

    def offer(self, reader: ReplyReader) -> None:
        self._offered, self._settled = reader, False

    async def settle(self, model: str) -> None:
        """Show the server a reply with a tool call, once; whatever it does not read as that is the reader's to read."""
        if self._settled or self._offered is None:
            return
        example = await self._offered.example()
        try:
            fits = example.plain and _reads(await self._derender(_derender_body(example, model)), example)
        except EngineUnreachable:
            return
        except CaptureError as error:
            _log.info("the engine does not parse a reply of its model's family: %s", error)
            fits = False
        self.reader, self._settled = (None if fits else self._offered), True


def _derender_body(example: Example, model: str) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "stop", "token_ids": example.completion_ids_T}
    chat = {"model": model, "messages": example.messages, "tools": example.tools, "tool_choice": "auto"}
    generated = {"request_id": "example", "choices": [choice], "prompt_token_ids": example.prompt_ids_P}
    return {"generate_response": generated, "prompt_token_ids": example.prompt_ids_P[-32:], "chat_request": chat}


def _reads(answer: dict[str, Any], example: Example) -> bool:
    try:
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        function = call["function"]
        return (function["name"], orjson.loads(function["arguments"])) == example.call
    except (KeyError, IndexError, TypeError, ValueError):
        return False

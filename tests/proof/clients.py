"""Each dialect's official SDK as an agent that holds one conversation.

Owns how a reply of each vendor is read into one normal form, and how an agent of that vendor echoes it. It asserts
nothing about a gateway; the tests of this folder do.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import anthropic
import httpx
import httpx2
import openai
from anthropic import AsyncAnthropic
from google import genai
from google.genai import errors as genai_errors
from google.genai import types as genai_types
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

Tool = tuple[str, dict[str, Any]]  # name, JSON schema of its parameters
OnText = Callable[[str], None]


# What an SDK lets through when a connection breaks. (Each also has errors of its own for it.)
BROKEN_CONNECTION = (httpx2.HTTPError, httpx.HTTPError, aiohttp.ClientError, ConnectionError, TimeoutError)


class BrokenReply(Exception):
    """A stream ended without the frame that says it is whole."""


@dataclass(frozen=True, slots=True)
class Said:
    """A reply in normal form. `native` is what the agent puts into its history."""

    text: str
    reasoning: str
    calls: list[tuple[str, Any]]  # name, parsed arguments
    finish: str  # "stop", "length" or "tool_calls"
    usage: tuple[int, int]  # tokens of prompt and reply
    native: Any

    @property
    def form(self) -> tuple[Any, ...]:
        """What two spellings of one reply have in common."""
        return self.text, self.reasoning, self.calls, self.finish, self.usage


@dataclass(frozen=True, slots=True)
class Wire:
    """The request an SDK would send, for tests that speak HTTP themselves."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    def raw(self, **changes: Any) -> bytes:
        return json.dumps(self.body | changes).encode()


class Agent:
    """One conversation. `say`, `ask`, `echo` as often as wished; an async context manager."""

    dialect: str
    error_types: tuple[type[Exception], ...]  # what the SDK raises for an error reply or frame

    def __init__(
        self, url: str, token: str, tools: Sequence[Tool] = (), max_tokens: int | None = None, retries: int = 0
    ) -> None:
        self.url, self.token, self.retries = url, token, retries
        self.tools, self.max_tokens = tools, max_tokens
        self.system = ""
        self.history: list[Any] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None: ...

    def fresh(self) -> Self:
        """Another conversation on the same session and connections."""
        other = copy.copy(self)
        other.history = []
        return other

    def say(self, text: str) -> Self:
        raise NotImplementedError

    def echo(self, said: Said, results: Sequence[str] = ()) -> Self:
        """Put a reply into the history, and one result for each of its tool calls."""
        raise NotImplementedError

    async def ask(self, stream: bool, on_text: OnText = lambda text: None) -> Said:
        raise NotImplementedError

    async def count(self) -> int:
        """Tokens of the prompt that `ask` would send, by the dialect's own route."""
        raise NotImplementedError

    async def models(self) -> list[str]:
        raise NotImplementedError

    def wire(self, stream: bool) -> Wire:
        raise NotImplementedError


class _OpenAI(Agent):
    error_types = (openai.APIError,)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        http = DefaultAsyncHttpxClient(verify=False)  # certificates take longer to load than a test takes
        self.sdk = AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=self.token, max_retries=self.retries, http_client=http
        )

    async def close(self) -> None:
        await self.sdk.close()

    async def models(self) -> list[str]:
        return [model.id async for model in self.sdk.models.list()]

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}", "content-type": "application/json"}


class ChatAgent(_OpenAI):
    dialect = "openai_chat"

    def say(self, text: str) -> Self:
        self.history.append({"role": "user", "content": text})
        return self

    def echo(self, said: Said, results: Sequence[str] = ()) -> Self:
        self.history.append(said.native)
        for call, result in zip(said.native.get("tool_calls") or [], results, strict=True):
            self.history.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return self

    def _body(self) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {"model": "m", "messages": system + self.history}
        if self.tools:
            body["tools"] = [
                {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in self.tools
            ]
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        return body

    def wire(self, stream: bool) -> Wire:
        more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return Wire("/v1/chat/completions", self._headers(), self._body() | more)

    async def ask(self, stream: bool, on_text: OnText = lambda text: None) -> Said:
        if not stream:
            reply = await self.sdk.chat.completions.create(**self._body())
            (choice,) = reply.choices
            message = choice.message.model_dump(exclude_none=True)
            return _chat_said(message, choice.finish_reason, reply.usage)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        message, finish, usage = {"role": "assistant", "content": ""}, None, None
        calls: dict[int, dict[str, Any]] = {}
        async for chunk in await self.sdk.chat.completions.create(**self._body(), **options):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
                delta = choice.delta.model_dump(exclude_none=True)
                for key in ("content", "reasoning_content"):
                    if delta.get(key):
                        message[key] = message.get(key, "") + delta[key]
                        on_text(delta[key])
                for part in delta.get("tool_calls", []):
                    _join_call(calls, part)
        if finish is None or usage is None:
            raise BrokenReply("no finish reason or no usage")
        if calls:
            message["tool_calls"] = [calls[i] for i in range(len(calls))]  # KeyError: the indices have a gap
        return _chat_said(message, finish, usage)


def _join_call(calls: dict[int, dict[str, Any]], part: dict[str, Any]) -> None:
    index = part.pop("index")
    if index not in calls:
        assert part["id"] and part["function"]["name"], "a call must open with its id and its whole name"
        calls[index] = part
    else:
        calls[index]["function"]["arguments"] += part["function"].get("arguments", "")


def _chat_said(message: dict[str, Any], finish: str, usage: Any) -> Said:
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls") or []]
    tokens = (usage.prompt_tokens, usage.completion_tokens)
    return Said(message.get("content") or "", message.get("reasoning_content") or "", calls, finish, tokens, message)


class ResponsesAgent(_OpenAI):
    dialect = "openai_responses"

    def say(self, text: str) -> Self:
        self.history.append({"role": "user", "content": text})
        return self

    def echo(self, said: Said, results: Sequence[str] = ()) -> Self:
        self.history += said.native
        calls = [item for item in said.native if item["type"] == "function_call"]
        for call, result in zip(calls, results, strict=True):
            self.history.append({"type": "function_call_output", "call_id": call["call_id"], "output": result})
        return self

    def _body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "m", "input": self.history}
        if self.system:
            body["instructions"] = self.system
        if self.tools:
            body["tools"] = [{"type": "function", "name": name, "parameters": schema} for name, schema in self.tools]
        if self.max_tokens is not None:
            body["max_output_tokens"] = self.max_tokens
        return body

    def wire(self, stream: bool) -> Wire:
        return Wire("/v1/responses", self._headers(), self._body() | ({"stream": True} if stream else {}))

    async def count(self) -> int:
        prompt = {key: value for key, value in self._body().items() if key != "max_output_tokens"}
        return (await self.sdk.responses.input_tokens.count(**prompt)).input_tokens

    async def ask(self, stream: bool, on_text: OnText = lambda text: None) -> Said:
        if not stream:
            return _response_said(await self.sdk.responses.create(**self._body()))
        text, numbers, last = "", [], None
        async for event in await self.sdk.responses.create(**self._body(), stream=True):
            numbers.append(event.sequence_number)
            if event.type == "response.output_text.delta":
                text += event.delta
                on_text(event.delta)
            elif event.type in ("response.completed", "response.incomplete"):
                last = event.response
            elif event.type == "response.failed":
                raise openai.APIError(event.response.error.message, _NO_REQUEST, body=event.response.error.model_dump())
        assert numbers == sorted(set(numbers)), "sequence numbers must rise"
        if last is None:
            raise BrokenReply("no response.completed")
        said = _response_said(last)
        assert text == said.text, "the deltas are not the text"
        return said


_NO_REQUEST: Any = None  # the SDK wants the request of an error; nobody reads it here


def _response_said(response: Any) -> Said:
    items = [item.model_dump(exclude_none=True) for item in response.output]
    text = "".join(part["text"] for i in items if i["type"] == "message" for part in i["content"])
    thoughts = [i for i in items if i["type"] == "reasoning"]
    reasoning = "".join(part["text"] for i in thoughts for part in (i.get("content") or i.get("summary") or []))
    calls = [(i["name"], json.loads(i["arguments"])) for i in items if i["type"] == "function_call"]
    finish = "tool_calls" if calls else "stop"
    if response.status == "incomplete":
        assert response.incomplete_details.reason == "max_output_tokens"
        finish = "length"
    else:
        assert response.status == "completed"
    usage = (response.usage.input_tokens, response.usage.output_tokens)
    return Said(text, reasoning, calls, finish, usage, items)


class AnthropicAgent(Agent):
    dialect = "anthropic"
    error_types = (anthropic.APIError,)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        http = anthropic.DefaultAsyncHttpxClient(verify=False)
        self.sdk = AsyncAnthropic(base_url=self.url, api_key=self.token, max_retries=self.retries, http_client=http)

    async def close(self) -> None:
        await self.sdk.close()

    def say(self, text: str) -> Self:
        self.history.append({"role": "user", "content": text})
        return self

    def echo(self, said: Said, results: Sequence[str] = ()) -> Self:
        self.history.append({"role": "assistant", "content": said.native})
        calls = [block for block in said.native if block["type"] == "tool_use"]
        if calls:
            blocks = [
                {"type": "tool_result", "tool_use_id": call["id"], "content": result}
                for call, result in zip(calls, results, strict=True)
            ]
            self.history.append({"role": "user", "content": blocks})
        return self

    def _prompt(self) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "m", "messages": self.history}
        if self.system:
            body["system"] = self.system
        if self.tools:
            body["tools"] = [{"name": name, "input_schema": schema} for name, schema in self.tools]
        return body

    def _body(self) -> dict[str, Any]:
        return self._prompt() | {"max_tokens": self.max_tokens or 10_000_000}

    def wire(self, stream: bool) -> Wire:
        headers = {"x-api-key": self.token, "anthropic-version": "2023-06-01", "content-type": "application/json"}
        return Wire("/v1/messages", headers, self._body() | ({"stream": True} if stream else {}))

    async def count(self) -> int:
        return (await self.sdk.messages.count_tokens(**self._prompt())).input_tokens

    async def models(self) -> list[str]:
        return [model.id async for model in self.sdk.models.list()]

    async def ask(self, stream: bool, on_text: OnText = lambda text: None) -> Said:
        if not stream:  # with a timeout of one's own the SDK allows a long reply that does not stream
            return _message_said(await self.sdk.messages.create(**self._body(), timeout=600))
        whole = False
        async with self.sdk.messages.stream(**self._body()) as events:
            async for event in events:
                if event.type == "text":
                    on_text(event.text)
                whole = event.type == "message_stop"
            if not whole:
                raise BrokenReply("no message_stop")
            return _message_said(await events.get_final_message())


def _message_said(message: Any) -> Said:
    blocks = [block.model_dump(exclude_none=True) for block in message.content]
    for block in blocks:
        block.pop("parsed_output", None)
    text = "".join(b["text"] for b in blocks if b["type"] == "text")
    reasoning = "".join(b["thinking"] for b in blocks if b["type"] == "thinking")
    calls = [(b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
    finish = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
    usage = (message.usage.input_tokens, message.usage.output_tokens)
    return Said(text, reasoning, calls, finish[message.stop_reason], usage, blocks)


class GeminiAgent(Agent):
    dialect = "gemini"
    error_types = (genai_errors.APIError,)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        retries = genai_types.HttpRetryOptions(attempts=1 + self.retries, initial_delay=0.5)
        http = genai_types.HttpOptions(
            base_url=self.url,
            retry_options=retries,
            client_args={"verify": False},
            async_client_args={"ssl": False},
        )
        self.sdk = genai.Client(api_key=self.token, http_options=http, vertexai=False)

    async def close(self) -> None:
        await self.sdk.aio.aclose()

    def say(self, text: str) -> Self:
        self.history.append({"role": "user", "parts": [{"text": text}]})
        return self

    def echo(self, said: Said, results: Sequence[str] = ()) -> Self:
        if said.native:
            self.history.append({"role": "model", "parts": said.native})
        calls = [part["functionCall"] for part in said.native if "functionCall" in part]
        if calls:
            parts = [
                {"functionResponse": {"id": c.get("id"), "name": c["name"], "response": {"output": result}}}
                for c, result in zip(calls, results, strict=True)
            ]
            self.history.append({"role": "user", "parts": parts})
        return self

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {}
        if self.system:
            config["systemInstruction"] = {"parts": [{"text": self.system}]}
        if self.tools:
            declared = [{"name": name, "parametersJsonSchema": schema} for name, schema in self.tools]
            config["tools"] = [{"functionDeclarations": declared}]
        return config

    def wire(self, stream: bool) -> Wire:
        path = "/v1beta/models/m:" + ("streamGenerateContent?alt=sse" if stream else "generateContent")
        cap = {"generationConfig": {"maxOutputTokens": self.max_tokens}} if self.max_tokens is not None else {}
        headers = {"x-goog-api-key": self.token, "content-type": "application/json"}
        return Wire(path, headers, {"contents": self.history} | self._config() | cap)

    def _arguments(self) -> dict[str, Any]:
        config = self._config() | {"maxOutputTokens": self.max_tokens}
        config["automaticFunctionCalling"] = {"disable": True}
        return {"model": "m", "contents": self.history, "config": config}

    async def count(self) -> int:
        return (await self.sdk.aio.models.count_tokens(model="m", contents=self.history)).total_tokens

    async def models(self) -> list[str]:
        pages = await self.sdk.aio.models.list(config={"query_base": True})
        return [model.name.removeprefix("models/") async for model in pages]

    async def ask(self, stream: bool, on_text: OnText = lambda text: None) -> Said:
        if not stream:
            return _candidate_said([await self.sdk.aio.models.generate_content(**self._arguments())])
        chunks = []
        async for chunk in await self.sdk.aio.models.generate_content_stream(**self._arguments()):
            chunks.append(chunk)
            for part in _parts(chunk):
                if part.get("text") and not part.get("thought"):
                    on_text(part["text"])
        return _candidate_said(chunks)


def _parts(chunk: Any) -> list[dict[str, Any]]:
    (candidate,) = chunk.candidates or [None]
    dumped = candidate.model_dump(exclude_none=True, by_alias=True, mode="json") if candidate else {}
    return (dumped.get("content") or {}).get("parts") or []


def _candidate_said(chunks: list[Any]) -> Said:
    parts: list[dict[str, Any]] = []
    for part in (part for chunk in chunks for part in _parts(chunk)):
        previous = parts[-1] if parts else {}
        if "text" in part and "text" in previous and part.get("thought") == previous.get("thought"):
            parts[-1] = {**previous, **part, "text": previous["text"] + part["text"]}
        else:
            parts.append(part)
    reasons = [c.finish_reason for chunk in chunks for c in chunk.candidates or [] if c.finish_reason]
    if len(reasons) != 1:
        raise BrokenReply(f"{len(reasons)} finish reasons")
    text = "".join(p.get("text", "") for p in parts if not p.get("thought"))
    reasoning = "".join(p.get("text", "") for p in parts if p.get("thought"))
    calls = [(p["functionCall"]["name"], p["functionCall"].get("args") or {}) for p in parts if "functionCall" in p]
    finish = {"STOP": "tool_calls" if calls else "stop", "MAX_TOKENS": "length"}[reasons[0].value]
    usage = chunks[-1].usage_metadata
    tokens = (usage.prompt_token_count or 0, (usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0))
    native = [p for p in parts if p.get("text") or "functionCall" in p]
    return Said(text, reasoning, calls, finish, tokens, native)


AGENTS: dict[str, type[Agent]] = {
    agent.dialect: agent for agent in (ChatAgent, ResponsesAgent, AnthropicAgent, GeminiAgent)
}


def agent(dialect: str, url: str, token: str, **options: Any) -> Agent:
    """`options` are those of Agent."""
    return AGENTS[dialect](url, token, **options)

"""Reading what an engine sends: JSON that may not be strict, event streams, log-probabilities, errors.

Owns the mapping of HTTP and JSON trouble to this package's errors, and the one rule for numbers: a log-probability that
is not a finite number is None, never a substitute. Used by the engines that speak HTTP.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any

import orjson

from capture_proxy.engines.http import Client, HttpFault, Response
from capture_proxy.errors import BadRequest, CaptureError, EngineError, EngineUnreachable, PromptTooLong
from capture_proxy.types import Finding, Severity, VersionSpan

_IDLE_S = 2.0  # vLLM closes a connection that was idle for 5 s; ours must be dropped before that
SENTINEL = -9000.0  # vLLM writes -9999.0 for "no such number"
ROUNDING = 1e-3  # nats; log-softmax in low precision can land this far above zero
_TOO_LONG = (
    "context length",
    "max_tokens must be at least 1",
    "max_tokens must be greater than 0",
    "longer than the maximum model length",
)
_PROMPT_LENGTH = re.compile(r"(?:contains |contains at least |prompt \(length )(\d+)(?: input tokens|\))")
_WINDOW = re.compile(r"maximum (?:context|model) +length (?:is|of) (\d+)")


def loads(data: bytes) -> Any:
    """JSON, also with the bare NaN and Infinity that Python servers emit. Raises EngineError."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise EngineError(f"the engine sent what is not JSON: {data[:80]!r}") from None


def logprob(value: Any) -> float | None:
    """A log-probability in nats, or None for NaN, infinities, sentinels and non-numbers. Positives are kept."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not math.isfinite(value) or value <= SENTINEL:
        return None
    return 0.0 if 0 < value <= ROUNDING else float(value)


class Meter:
    """Pairs ids with their log-probabilities chunk by chunk and remembers whatever did not match."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.findings: list[Finding] = []

    def take(self, ids: Any, content: Any) -> tuple[list[int], list[float | None]]:
        """One chunk's `token_ids` and `logprobs.content` as aligned lists; a mismatch makes all of them None."""
        entries = content if isinstance(content, list) else []
        if (value := _single(ids, entries)) is not None:  # what nearly every chunk of a stream is
            self.ids.append(ids[0])
            return ids, [value]
        ids = token_ids(ids, "token ids") if isinstance(ids, list) else []
        self.ids += ids
        if len(entries) != len(ids):
            detail = f"a chunk has {len(ids)} ids, {len(entries)} logprobs"
            self.findings.append(Finding(Severity.FATAL, "misaligned", detail))
            return ids, [None] * len(ids)
        if (plain := _plain_logprobs(ids, entries)) is not None:
            return ids, plain
        for token, entry in zip(ids, entries, strict=True):
            name = _entry_name(entry)
            if name is not None and name != token:
                detail = f"id {token} came with the log-probability of id {name}"
                self.findings.append(Finding(Severity.FATAL, "misaligned", detail))
        return ids, [logprob(e.get("logprob")) if isinstance(e, dict) else None for e in entries]

    def check_usage(self, usage: Any) -> None:
        """Compare the ids with the engine's own count."""
        counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if isinstance(counted, int) and counted != len(self.ids):
            detail = f"the engine counts {counted} completion tokens, its chunks hold {len(self.ids)} ids"
            self.findings.append(Finding(Severity.FATAL, "missing_ids", detail))


def _entry_name(entry: Any) -> int | str | None:
    """The id that an entry says it belongs to; None = it says text, or nothing."""
    if not isinstance(entry, dict):
        return None
    if isinstance(named := entry.get("token_id"), int):
        return named
    name = entry.get("token")
    if not isinstance(name, str) or not name.startswith("token_id:"):
        return None
    number = name.removeprefix("token_id:")
    return int(number) if number.isdecimal() else number


def _single(ids: Any, entries: list[Any]) -> float | None:
    """The log-probability of a chunk of one id if all is as it should be; None = look closer."""
    if not isinstance(ids, list) or len(ids) != 1 or len(entries) != 1 or type(entries[0]) is not dict:
        return None
    token, value, name = ids[0], entries[0].get("logprob"), entries[0].get("token")
    if type(token) is not int or token < 0 or type(value) is not float or not SENTINEL < value <= 0.0:
        return None
    named = isinstance(name, str) and (name == f"token_id:{token}" or not name.startswith("token_id:"))
    return value if named and "token_id" not in entries[0] else None


def _plain_logprobs(ids: list[int], entries: list[Any]) -> list[float | None] | None:
    """The log-probabilities if all entries are as they should be, judged in C; None = look at each one.

    A reply has thousands of tokens, and a loop over them in Python is time that every other agent waits.
    """
    try:
        values = [entry["logprob"] for entry in entries]
        names = [entry["token"] for entry in entries]
        if set(map(type, values)) != {float} or "token_id" in entries[0]:
            return None
        if names != [f"token_id:{token}" for token in ids] and "token_id:" in "".join(names):
            return None
        total = math.fsum(values)  # NaN if one of them is
    except (KeyError, TypeError, OverflowError, ValueError):
        return None
    return values if total <= 0.0 and min(values) > SENTINEL and max(values) <= 0.0 else None


def token_ids(raw: Any, what: str) -> list[int]:
    """A list of token ids. Raises EngineError for anything else (a `true` among them is left to the store to find)."""
    try:
        if isinstance(raw, list):
            array("I", raw)  # looks at all of them in C, and takes no negative one
            return raw
    except (TypeError, OverflowError):
        pass
    raise EngineError(f"the engine sent {what} that are no token ids: {str(raw)[:80]}")


def version_spans(raw: Any) -> list[VersionSpan]:
    """`weight_versions` of a choice; [] when the engine does not say. Raises EngineError for a malformed one."""
    if not raw:
        return []
    try:
        return [VersionSpan(str(s["version"]), int(s["start"]), int(s["end"])) for s in raw]
    except (KeyError, TypeError, ValueError):
        raise EngineError(f"the engine sent malformed weight_versions: {str(raw)[:80]}") from None


def finish_reason(reason: Any) -> str:
    """How a reply ended. Raises EngineError for one that the engine itself cut off."""
    if reason in ("stop", "length", "tool_calls"):
        return str(reason)
    if reason in ("abort", "error", None):
        raise EngineError(f"the engine ended the reply early ({reason})")
    return "stop"


def check_status(status: int, body: bytes) -> None:
    """Raises the error that an engine's non-200 answer means: the agent's fault, the window's, or the engine's."""
    if status == 200:
        return
    try:
        data = loads(body)
    except EngineError:
        raise EngineError(f"the engine answered {status} with what is not JSON: {body[:120]!r}") from None
    raise_fault(data, status)


def prompt_too_long(text: str) -> PromptTooLong:
    """The error with the two lengths that vLLM's sentence names, as far as it names them."""
    prompt = _PROMPT_LENGTH.search(text)
    window = _WINDOW.search(text)
    return PromptTooLong(text, prompt and int(prompt[1]), window and int(window[1]))


def raise_fault(data: Any, status: int) -> None:
    """Raises the error in an error object of the engine's."""
    fault = data.get("error", data) if isinstance(data, dict) else data
    message = fault.get("message") if isinstance(fault, dict) else None
    text = str(message or fault)[:1000]
    if status in (400, 413, 422):
        if any(mark in text for mark in _TOO_LONG):
            raise prompt_too_long(text)
        raise BadRequest(text)
    raise EngineError(f"the engine answered {status}: {text}")


class Upstream:
    """The HTTP connections to one engine. `open` holds them; requests outside of it raise EngineUnreachable.

    Raises ValueError for a URL or a key that cannot be one.
    """

    def __init__(self, url: str, *, api_key: str | None = None, read_timeout_s: float = 900.0) -> None:
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self._connect = partial(Client, url, headers, connect_timeout_s=10.0, idle_s=_IDLE_S)
        self._connect()  # looks at the address and the headers now
        self._silence_s = read_timeout_s
        self.whole_timeout_s = 4 * read_timeout_s  # for a whole reply as one, which is silent until it is complete
        self._client: Client | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        self._client = client = self._connect()
        try:
            yield
        finally:
            self._client = None
            client.close()

    async def send(
        self, method: str, path: str, body: bytes | None = None, timeout_s: float | None = None
    ) -> tuple[int, bytes]:
        """(status, body) of one request. `timeout_s` None = only silence is bounded. Raises EngineUnreachable."""
        with _mapped():
            response = await self._begin(method, path, body, timeout_s)
            try:
                return response.status, await response.read()
            finally:
                response.close()

    async def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """One request with a JSON object for an answer. Raises what `check_status` raises, and EngineUnreachable."""
        status, content = await self.send(method, path, None if body is None else orjson.dumps(body), timeout_s)
        return answer(status, content, path)

    @asynccontextmanager
    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[AsyncIterator[list[dict[str, Any]]]]:
        """The JSON events of a streamed POST, those that came together as one list; entered once the engine has
        accepted it. Leaving closes the connection if the stream is not at its end.

        Raises what `check_status` and `read_events` raise.
        """
        with _mapped():
            response = await self._begin("POST", path, orjson.dumps(body), None)
            try:
                if response.status != 200:
                    check_status(response.status, await response.read())
                async with aclosing(read_events(response)) as events:
                    yield events
            finally:
                response.close()

    async def _begin(self, method: str, path: str, body: bytes | None, timeout_s: float | None) -> Response:
        if self._client is None:
            raise EngineUnreachable("the engine's connections are not open")
        silence_s = self._silence_s if timeout_s is None else None
        return await self._client.request(method, path, body, silence_s=silence_s, total_s=timeout_s)


def answer(status: int, content: bytes, path: str) -> dict[str, Any]:
    """The JSON object of a reply. Raises what `check_status` raises, and EngineError for what is no object."""
    check_status(status, content)
    data = loads(content)
    if not isinstance(data, dict):
        raise EngineError(f"the engine answered {path} with what is no object")
    return data


@contextmanager
def _mapped() -> Iterator[None]:
    """Turns trouble of the connection into EngineUnreachable."""
    try:
        yield
    except (HttpFault, OSError) as error:
        raise EngineUnreachable(f"the engine does not answer: {error}") from error


_EOF_WAIT_S = 0.25  # from [DONE] to the end of the body; a server that holds on longer loses the connection


async def read_events(content: Response) -> AsyncGenerator[list[dict[str, Any]], None]:
    """The JSON events of a stream until [DONE], those of one read as one list.

    Raises EngineUnreachable when the stream ends without [DONE], and what an error event says.
    """
    parser = EventParser()
    done = False
    while not done:
        chunk = await content.readany()
        found = parser.feed(chunk) if chunk else parser.end()
        events: list[dict[str, Any]] = []
        fault: CaptureError | None = None
        for data in found:
            if data == b"[DONE]":
                done = True
                break
            try:
                events += _events(data)
            except CaptureError as error:
                fault = error
                break
        if events:
            yield events
        if fault is not None:
            raise fault
        if not chunk and not done:
            raise EngineUnreachable("the engine's reply broke off")
    with suppress(TimeoutError):
        async with asyncio.timeout(_EOF_WAIT_S):  # so that the connection can serve the next call
            while await content.readany():
                pass


def _events(data: bytes) -> list[dict[str, Any]]:
    """The JSON objects of one event's data: one, or one a line where a server forgot the blank lines between."""
    try:
        values = [loads(data)]
    except EngineError:
        if b"\n" not in data:
            raise
        values = [loads(line) for line in data.split(b"\n") if line.strip() not in (b"", b"[DONE]")]
    for event in values:
        if not isinstance(event, dict):
            raise EngineError(f"the engine sent an event that is no object: {data[:80]!r}")
        if event.get("error"):
            fault = event["error"]
            code = fault.get("code") if isinstance(fault, dict) else None
            raise_fault(event, code if isinstance(code, int) else 500)
    return values


class EventParser:
    """Server-sent events from bytes cut anywhere (https://html.spec.whatwg.org/multipage/server-sent-events.html).

    Only `data` is kept: each event is the bytes of its data lines, joined. Time is linear in the bytes. Example:
    feed(b"data: a\r\ndata: b\r\n\r\nda") gives [b"a\nb"].
    """

    def __init__(self) -> None:
        self._line: list[bytes] = []  # parts of the line that has not ended
        self._data: list[bytes] = []  # data lines of the event that has not ended
        self._after_cr = False
        self._first = True

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that this chunk completes."""
        if self._after_cr and chunk[:1] == b"\n":  # the other half of a line end
            chunk = chunk[1:]
            self._after_cr = False
        if b"\r" in chunk:
            self._after_cr = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        elif chunk:
            self._after_cr = False
        *lines, rest = chunk.split(b"\n")
        if lines and self._line:
            lines[0] = b"".join((*self._line, lines[0]))
            self._line.clear()
        found: list[bytes] = []
        for line in lines:
            self._take(line, found)
        if rest:
            self._line.append(rest)
        return found

    def end(self) -> list[bytes]:
        """The event that the stream ended in, if it had no blank line after it."""
        found: list[bytes] = []
        self._take(b"".join(self._line), found)
        self._take(b"", found)
        self._line.clear()
        return found

    def _take(self, line: bytes, found: list[bytes]) -> None:
        if self._first:
            line = line.removeprefix(b"\xef\xbb\xbf")
            self._first = False
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        elif not line and self._data:
            found.append(b"\n".join(self._data).strip())
            self._data.clear()

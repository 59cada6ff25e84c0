"""HTTP and server-sent events with an ORS server: one request at a time, nothing tried again.

Owns what a failure is called, and how a stream is cut into events. Whether a request may be sent again is the caller's
to say (`session`), so a failure tells whether it can have had an effect.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import aiohttp

_LINE_END = re.compile(rb"\r\n|\n|\r")
_MOST_DETAIL = 300  # characters of an error that are passed on


class Refused(Exception):
    """The server answered with an error status."""

    def __init__(self, status: int, detail: str, *, starting: bool = False, retry_after_s: float | None = None) -> None:
        super().__init__(f"{status} {detail}".strip())
        self.status = status
        self.detail = detail
        self.starting = starting  # a proxy says that the server is still coming up: nothing was run
        self.retry_after_s = retry_after_s


class Broken(Exception):
    """No answer, or half of one."""

    def __init__(self, detail: str, *, reached: bool = True) -> None:
        super().__init__(detail)
        self.reached = reached  # False = the request never left, so it cannot have had an effect


class Wire:
    """The requests of one session, or of none. Example: `await Wire(http, {}, str).ask("GET", "/env/tools")`."""

    def __init__(self, http: aiohttp.ClientSession, headers: Mapping[str, str], mask: Callable[[str], str]) -> None:
        self._http = http
        self._headers = dict(headers)
        self._mask = mask

    async def ask(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> Any:
        """The answer's JSON. Raises Refused, Broken."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        sent = {**self._headers, **(headers or {})}
        try:
            async with self._http.request(method, path, json=body, headers=sent, timeout=timeout) as response:
                text = (await response.read()).decode("utf-8", "replace")
                self._check(response, text)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._broken(error) from error
        try:
            return json.loads(text) if text else None
        except ValueError as error:
            raise Broken(f"it answered {path} with no JSON: {self._mask(text[:80])!r}") from error

    async def events(
        self, path: str, body: Mapping[str, Any], *, headers: Mapping[str, str] | None = None, silence_s: float
    ) -> AsyncGenerator[tuple[str, str], None]:
        """The stream's events, name and data, until it ends or is closed. Raises Refused, Broken."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=silence_s)
        sent = {**self._headers, **(headers or {}), "Accept": "text/event-stream"}
        try:
            async with self._http.post(path, json=body, headers=sent, timeout=timeout) as response:
                if not response.ok:
                    self._check(response, (await response.read()).decode("utf-8", "replace"))
                reader = EventReader()
                async for piece in response.content.iter_any():
                    for event in reader.feed(piece):
                        yield event
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._broken(error) from error

    def _check(self, response: aiohttp.ClientResponse, text: str) -> None:
        if response.ok:
            return
        try:
            said = json.loads(text)
            detail = said.get("detail", text) if isinstance(said, dict) else text
        except ValueError:
            detail = text
        after = response.headers.get("Retry-After", "").strip()
        raise Refused(
            response.status,
            " ".join(self._mask(str(detail)).split())[:_MOST_DETAIL],
            starting=response.headers.get("X-Backend-State") == "starting",
            retry_after_s=float(after) if after.isdecimal() else None,
        )

    def _broken(self, error: BaseException) -> Broken:
        reason = self._mask(" ".join(str(error).split())[:_MOST_DETAIL]) or "no answer in time"
        reached = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
        return Broken(f"{type(error).__name__}: {reason}", reached=reached)


class EventReader:
    """Bytes to events, as the HTML standard reads them: one space after a colon goes, no other; a cut event is none."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # of a line whose end has not come
        self._event, self._data = "", list[str]()

    def feed(self, piece: bytes) -> list[tuple[str, str]]:
        """The events that end in this piece."""
        self._rest.append(piece)
        if b"\n" not in piece and b"\r" not in piece:  # a long line is not looked through again with each piece
            return []
        whole = b"".join(self._rest)
        *lines, rest = _LINE_END.split(whole)
        if whole.endswith(b"\r"):  # its line feed may come with the next piece
            rest = lines.pop() + b"\r"
        self._rest = [rest]
        events = []
        for line in lines:
            if line:
                self._field(line.decode("utf-8", "replace"))
            else:
                if self._event or self._data:
                    events.append((self._event or "message", "\n".join(self._data)))
                self._event, self._data = "", []
        return events

    def _field(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            self._event = value
        elif name == "data":
            self._data.append(value)

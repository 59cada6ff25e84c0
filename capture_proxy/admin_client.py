"""The trainer's side of the admin port.

Owns the HTTP of minting, sealing and fetching captures, and the mapping of its failures to this package's errors. Used
by `harness_trainer`; the agents' side needs no client of ours.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx
import orjson

from capture_proxy import codec, errors, trace
from capture_proxy.errors import CaptureError
from capture_proxy.types import Capture, Session, SessionPolicy

_BY_CODE: dict[str, type[CaptureError]] = {
    cls.code: cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, CaptureError) and cls is not CaptureError
}


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
# Calls under way. httpx's pool looks at every call that waits for a connection whenever one begins or ends: a thousand
# sessions sealed at once, at the end of a run, took it minutes.
_AT_ONCE = 32
# The gateway is away, or went away before it answered. What it does at a slow answer is not known, so that is none.
_AWAY = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)


class GatewayUnreachable(CaptureError):
    """The gateway does not answer on its admin port."""

    status = 503
    code = "gateway_unreachable"


class AdminClient:
    """Talks to one gateway. An async context manager; one pooled connection set.

    `url` is http://HOST:PORT, or unix:/PATH for an admin port on a Unix socket. A gateway that is away is asked again
    for `patience_s` seconds: it may be started again, with all that it knew.

    Every method raises GatewayUnreachable when there is no answer, else the error that the gateway named.
    """

    def __init__(self, url: str, key: str, *, timeout_s: float = 60.0, patience_s: float = 0.0) -> None:
        self._url = url
        self._patience_s = patience_s
        self._places = asyncio.Semaphore(_AT_ONCE)
        socket = url.removeprefix("unix:") if url.startswith("unix:") else None
        self._http = httpx.AsyncClient(
            base_url="http://gateway" if socket else url,
            transport=httpx.AsyncHTTPTransport(uds=socket) if socket else None,
            headers={"Authorization": f"Bearer {key}"},
            timeout=timeout_s,
            verify=url.startswith("https:"),  # loading the certificates takes 60 ms, and plain HTTP needs none
            trust_env=False,  # a proxy variable in the trainer's environment must not catch loopback calls
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def mint(self, session_id: str, policy: SessionPolicy, labels: dict[str, str]) -> Session:
        """A new session with its token. Safe to repeat with equal arguments. Raises BadRequest for a taken id."""
        body = {"session_id": session_id, "policy": codec.policy_to_dict(policy), "labels": labels}
        return codec.session_from_dict(await self._ask("POST", "/sessions", body))

    async def seal(self, session_id: str) -> Session:
        """End the session; its calls in flight are aborted. The session comes back without its token."""
        return codec.session_from_dict({"token": "", **await self._ask("POST", f"/sessions/{quote(session_id)}/seal")})

    async def session(self, session_id: str) -> Session:
        data = await self._ask("GET", f"/sessions/{quote(session_id)}")
        del data["events"]
        return codec.session_from_dict({"token": "", **data})

    async def events(self, session_id: str) -> list[dict[str, Any]]:
        """What happened beside the session's calls, oldest first, e.g. hosts that were refused to its agent."""
        events: list[dict[str, Any]] = (await self._ask("GET", f"/sessions/{quote(session_id)}"))["events"]
        return events

    async def put_event(self, kind: str, detail: str, *, session_id: str | None = None) -> None:
        """Record an event of a session; `session_id` None = of no session. Raises NotFound for an unknown one."""
        # With its time it can be told from another one of the same words when it is sent again.
        event = {"session_id": session_id, "kind": kind, "detail": detail, "at": time.time()}
        await self._ask("POST", "/events", event)

    async def engine_ready(self, ready: bool) -> None:
        """Let agents' calls reach the engine, or hold them; with False, none is under way when this returns."""
        await self._ask("POST", "/engine", {"ready": ready})

    async def sessions(self) -> list[Session]:
        """Every session of the gateway's store, oldest first, without tokens."""
        data = await self._ask("GET", "/sessions")
        return [codec.session_from_dict({"token": "", **item}) for item in data["sessions"]]

    async def capture(self, session_id: str) -> Capture:
        """Everything recorded of the session, roles decided. Raises NotFound."""
        return trace.capture_from_json(await self._ask("GET", f"/sessions/{quote(session_id)}/capture"))

    async def trace(self, session_id: str) -> dict[str, Any]:
        """OpenEnv's `TrainingTrace` of the session as JSON values. Raises NotFound."""
        return await self._ask("GET", f"/sessions/{quote(session_id)}/trace")

    async def health(self) -> bool:
        """Whether gateway and engine both answer; never raises."""
        try:
            return bool((await self._http.get("/healthz")).is_success)
        except httpx.HTTPError:
            return False

    async def stats(self) -> dict[str, Any]:
        """Counters since the gateway started: turns by status, tokens, calls in flight, live sessions."""
        return await self._ask("GET", "/stats")

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        response = await self._answer(method, path, None if body is None else orjson.dumps(body))
        try:
            data = orjson.loads(response.content)
        except orjson.JSONDecodeError:
            raise GatewayUnreachable(f"{self._url} answered {response.status_code} and is no gateway") from None
        if response.is_success and isinstance(data, dict):
            return data
        fault = data.get("error") if isinstance(data, dict) else None
        if not isinstance(fault, dict):
            raise GatewayUnreachable(f"{self._url} answered {response.status_code} and is no gateway")
        raise _BY_CODE.get(str(fault.get("code")), CaptureError)(str(fault.get("message")))

    async def _answer(self, method: str, path: str, content: bytes | None) -> httpx.Response:
        """Every request may be sent again: the gateway takes an equal one for the same."""
        until = time.monotonic() + self._patience_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                async with self._places:
                    return await self._http.request(method, path, content=content)
            except httpx.HTTPError as error:
                left_s = until - time.monotonic()
                if left_s <= 0 or not isinstance(error, _AWAY):
                    away = f" for {self._patience_s:g} s" if self._patience_s and isinstance(error, _AWAY) else ""
                    reason = str(error) or type(error).__name__
                    raise GatewayUnreachable(f"the gateway at {self._url} does not answer{away}: {reason}") from error
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

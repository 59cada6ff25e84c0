"""HTTP for the trainer: sessions, captures, traces, events, metrics and health as one ASGI app.

Owns the admin routes and their bearer check. It decides nothing about sessions (`session`) or traces (`trace`). Called
by `__main__` and tests; `admin_client` is its other end. Every route may be asked again when its answer was lost.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from capture_proxy import codec, trace
from capture_proxy.bodies import read_body
from capture_proxy.dialects.body import parse_object
from capture_proxy.errors import BadRequest, CaptureError, UnknownSession
from capture_proxy.gateway import Gateway
from capture_proxy.metrics import MEDIA_TYPE
from capture_proxy.types import Capture

_MAX_EVENT = 10_000  # characters of an event's detail that are kept
_Endpoint = Callable[[Request], Awaitable[Response]]


def admin_app(gateway: Gateway, key: str) -> Starlette:
    """The port that only the trainer reaches; every route but /healthz wants `Authorization: Bearer <key>`."""
    admin = _Admin(gateway)
    guarded: list[tuple[str, str, _Endpoint]] = [
        ("POST", "/sessions", admin.mint),
        ("GET", "/sessions", admin.list),
        ("GET", "/sessions/{session_id}", admin.get),
        ("POST", "/sessions/{session_id}/seal", admin.seal),
        ("GET", "/sessions/{session_id}/capture", admin.capture),
        ("GET", "/sessions/{session_id}/trace", admin.trace),
        ("POST", "/events", admin.put_event),
        ("POST", "/engine", admin.engine),
        ("GET", "/stats", admin.stats),
        ("GET", "/metrics", admin.metrics),
    ]
    routes = [Route(path, _guard(endpoint, key), methods=[method]) for method, path, endpoint in guarded]
    return Starlette(routes=[*routes, Route("/healthz", _mapped(admin.health))])


class _Admin:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def mint(self, request: Request) -> Response:
        data = parse_object(await read_body(request.headers, request.receive, self._gateway.max_body))
        labels = data.get("labels") or {}
        if not isinstance(labels, dict) or not all(isinstance(v, str) for v in labels.values()):
            raise BadRequest("labels must map names to strings")
        try:
            policy = codec.policy_from_dict(data.get("policy") or {})
        except (TypeError, ValueError) as error:
            raise BadRequest(f"policy: {error}") from None
        session = await self._gateway.sessions.mint(str(data.get("session_id") or ""), policy, labels)
        return _json(codec.session_to_dict(session))

    async def list(self, request: Request) -> Response:
        sessions = await self._gateway.sessions.all()
        return _json({"sessions": [_without_token(codec.session_to_dict(s)) for s in sessions]})

    async def get(self, request: Request) -> Response:
        session = await self._gateway.sessions.get(request.path_params["session_id"])
        events = await self._gateway.store.events(session.session_id)
        told = [{"at": at, "kind": kind, "detail": detail} for at, kind, detail in events]
        return _json({**_without_token(codec.session_to_dict(session)), "events": told})

    async def seal(self, request: Request) -> Response:
        session = await self._gateway.sessions.seal(request.path_params["session_id"])
        return _json(_without_token(codec.session_to_dict(session)))

    async def capture(self, request: Request) -> Response:
        return await self._export(request, lambda capture: orjson.dumps(trace.capture_to_json(capture)))

    async def trace(self, request: Request) -> Response:
        """OpenEnv's TrainingTrace as JSON."""
        return await self._export(request, _trace_json)

    async def _export(self, request: Request, dump: Callable[[Capture], bytes]) -> Response:
        capture = await self._gateway.sessions.capture(request.path_params["session_id"])
        # Linking thousands of tokens takes milliseconds that other agents' streams should not wait for.
        return Response(await asyncio.to_thread(dump, capture), media_type="application/json")

    async def put_event(self, request: Request) -> Response:
        """Something that happened beside the calls of a session, e.g. a host that was refused to its agent."""
        data = parse_object(await read_body(request.headers, request.receive, self._gateway.max_body))
        kind, detail = data.get("kind"), data.get("detail", "")
        if not isinstance(kind, str) or not kind or not isinstance(detail, str):
            raise BadRequest(
                'an event is {"session_id" or "session_token", "kind": text, "detail": text, "at": seconds}'
            )
        if not isinstance(at := data.get("at"), int | float | None):
            raise BadRequest('"at" is when it happened, in Unix seconds')
        sessions, session_id = self._gateway.sessions, data.get("session_id")
        if session_id is not None:
            session_id = (await sessions.get(str(session_id))).session_id
        elif (token := data.get("session_token")) is not None:
            session_id = await sessions.id_of(str(token))
        await self._gateway.store.put_event(session_id, kind, detail[:_MAX_EVENT], at)
        return _json({"session_id": session_id, "kind": kind}, 201)

    async def engine(self, request: Request) -> Response:
        """Whether agents' calls may reach the engine; once "ready" is false and answered, none is under way."""
        data = parse_object(await read_body(request.headers, request.receive, self._gateway.max_body))
        ready = data.get("ready")
        if not isinstance(ready, bool):
            raise BadRequest('say {"ready": true} once the engine has a policy, {"ready": false} before it loses it')
        if ready:
            self._gateway.gate.release()
        else:
            await self._gateway.gate.hold()
        return _json({"ready": not self._gateway.gate.held})

    async def health(self, request: Request) -> Response:
        healthy = await self._gateway.engine.healthy()
        return _json({"ok": healthy, "engine": healthy}, 200 if healthy else 503)

    async def stats(self, request: Request) -> Response:
        metrics, sessions = self._gateway.metrics, self._gateway.sessions
        return _json(
            {
                "turns": {status: metrics.turns.total(status=status) for status in ("ok", "aborted", "failed")},
                "prompt_tokens": metrics.prompt_tokens.total(),
                "completion_tokens": metrics.completion_tokens.total(),
                "retries": {how: metrics.retries.total(how=how) for how in ("joined", "replayed")},
                "in_flight": sessions.num_in_flight,
                "live_sessions": sessions.num_live,
            }
        )

    async def metrics(self, request: Request) -> Response:
        sessions = self._gateway.sessions
        gauges = {
            "capture_in_flight": ("Engine calls that run now.", float(sessions.num_in_flight)),
            "capture_live_sessions": ("Sessions that may still call.", float(sessions.num_live)),
        }
        return Response(self._gateway.metrics.text(gauges), headers={"content-type": MEDIA_TYPE})


def _trace_json(capture: Capture) -> bytes:
    body: str = trace.to_training_trace(capture).model_dump_json()
    return body.encode()


def _without_token(session: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in session.items() if k != "token"}


def _json(data: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(data), status, media_type="application/json")


def _guard(endpoint: _Endpoint, key: str) -> _Endpoint:
    mapped = _mapped(endpoint)

    async def handle(request: Request) -> Response:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode("utf-8", "replace"), key.encode()):
            return _admin_error(UnknownSession("the admin key is missing or wrong"))
        return await mapped(request)

    return handle


def _mapped(endpoint: _Endpoint) -> _Endpoint:
    async def handle(request: Request) -> Response:
        try:
            return await endpoint(request)
        except CaptureError as error:
            return _admin_error(error)

    return handle


def _admin_error(error: CaptureError) -> Response:
    return _json({"error": {"message": str(error), "code": error.code}}, error.status)

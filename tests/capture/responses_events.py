"""Reading Responses streams in tests, byte for byte and with every event checked against the SDK's types."""

from __future__ import annotations

import json
from typing import Any, get_args

import httpx
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

_TYPES: dict[str, type[BaseModel]] = {
    get_args(cls.model_fields["type"].annotation)[0]: cls for cls in get_args(get_args(ResponseStreamEvent)[0])
}


def read_events(body: str) -> list[dict[str, Any]]:
    """The events of a whole stream; fails on anything that is not one of the API's own events."""
    events = []
    for frame in body.split("\n\n"):
        if not frame or frame.startswith(":"):
            continue
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        check = _TYPES[event["type"]].model_validate
        if event["type"] == "response.failed":  # the types know fewer error codes than the API sends
            code = event["response"]["error"]["code"]
            check({**event, "response": {**event["response"], "error": {"message": "", "code": "server_error"}}})
            assert code in ("server_error", "invalid_prompt", "context_length_exceeded")
        else:
            check(event)
        events.append(event)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    return events


async def stream(http: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    response = await http.post("/v1/responses", json={"model": "m", "stream": True, **body})
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    return read_events(response.text)


async def create(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await http.post("/v1/responses", json={"model": "m", **body})
    assert response.status_code == 200, response.text
    Response.model_validate(response.json())
    reply: dict[str, Any] = response.json()
    return reply


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]

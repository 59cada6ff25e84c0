"""What agents and gateway say to each other over HTTP, watched and, once if asked, broken.

Owns the watching and the broken connection; it is an ASGI app around the gateway's. Called by `bench`.
"""

from __future__ import annotations

import re
import time
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_MODEL_IN_PATH = re.compile(r"(/models/)[^/:]+")


class Wire:
    """Example: Wire(agent_app(gateway)).routes == {"POST /v1/messages": 3}."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.routes: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.first_call_at: float | None = None  # time.monotonic(); None = none came
        self._cut_next = False

    def cut_next(self) -> None:
        """Break the connection of the answer that is sent next: after its first piece, or in the middle of its only."""
        self._cut_next = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = _MODEL_IN_PATH.sub(r"\1MODEL", scope["path"])
        self.routes[f"{scope['method']} {path}"] += 1
        if self.first_call_at is None and scope["method"] == "POST":
            self.first_call_at = time.monotonic()
        num_pieces = 0

        async def watched(message: Message) -> None:
            nonlocal num_pieces
            if message["type"] == "http.response.start":
                self.statuses[message["status"]] += 1
            elif self._cut_next:
                num_pieces += 1
                body, more = message.get("body", b""), message.get("more_body", False)
                if num_pieces > 1 or not more:
                    self._cut_next = False
                    await send({**message, "body": body[: len(body) // 2], "more_body": True})
                    raise ConnectionResetError("broken on purpose")
            await send(message)

        # An app that leaves with its answer unfinished has its connection closed by the server.
        await self._app(scope, receive, watched)

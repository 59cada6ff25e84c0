"""A person's OpenEnv app, served on a free port of the loopback: `python -m harness_trainer.loops.openenv.serve ORDER`.

Owns the process that `servers` starts for `openenv:local:MODULE:APP`. ORDER is JSON: the app's name, the file to write
the port into once it is listened at, and the limits of silence. OpenEnv ends silent sessions only where an app asks for
it, and most do not; here they are ended, unless the app has a limit of its own. Peers that vanish are found by pings.

It adds one route, `/harness-trainer/sessions`: how many sessions are open, and how many may be.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from harness_trainer.loops.loading import load_target

SESSIONS = "/harness-trainer/sessions"


def main(order: str) -> None:
    wanted = json.loads(order)
    app = load_app(wanted["app"])
    server = env_server_of(app)
    if server is not None:
        # Set before the app starts, when it reads it.
        server._session_idle_timeout_s = server._session_idle_timeout_s or wanted["idle_timeout_s"]
        _add_count(app, server)
    asyncio.run(_serve(app, server, wanted))


def load_app(target: str) -> Any:
    """The ASGI app that `target` names, or that the function it names makes."""
    from starlette.applications import Starlette

    found = load_target(target)
    return found if isinstance(found, Starlette) or not callable(found) else found()


def env_server_of(app: Any) -> Any:
    """OpenEnv's server behind the app's `/ws`; None = the app is made otherwise. OpenEnv keeps no other way to it."""
    from openenv.core.env_server.http_server import HTTPEnvServer

    for route in _routes(app):
        cells = getattr(getattr(route, "endpoint", None), "__closure__", None) or ()
        for cell in cells if getattr(route, "path", "").endswith("/ws") else ():
            if isinstance(cell.cell_contents, HTTPEnvServer):
                return cell.cell_contents
    return None


def _routes(app: Any) -> list[Any]:
    routes: list[Any] = []
    for route in getattr(app, "routes", ()):
        routes += [route, *_routes(route)]
    return routes


def _add_count(app: Any, server: Any) -> None:
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def sessions(_: Request) -> JSONResponse:
        return JSONResponse({"active": server.active_sessions, "max": server.max_concurrent_envs})

    app.router.routes.insert(0, Route(SESSIONS, sessions))


async def _serve(app: Any, server: Any, wanted: dict[str, Any]) -> None:
    import uvicorn

    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    runner = uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            ws_max_size=int(wanted["max_message_mb"] * 2**20),
            ws_ping_interval=wanted["ping_interval_s"],
            ws_ping_timeout=wanted["ping_timeout_s"],
            timeout_graceful_shutdown=2,
        )
    )
    serving = asyncio.ensure_future(runner.serve(sockets=[listener]))
    while not runner.started and not serving.done():
        await asyncio.sleep(0.02)
    if runner.started:
        found = {
            "port": listener.getsockname()[1],
            "max_sessions": None if server is None else server.max_concurrent_envs,
            "idle_timeout_s": None if server is None else server._session_idle_timeout_s,
        }
        ready = Path(wanted["ready"])
        ready.with_suffix(".tmp").write_text(json.dumps(found))
        os.replace(ready.with_suffix(".tmp"), ready)
    await serving


if __name__ == "__main__":
    main(sys.argv[1])

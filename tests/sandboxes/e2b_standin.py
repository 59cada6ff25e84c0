"""A stand-in for E2B's cloud on this machine: its REST API and its sandboxes, with every fault on demand.

Speaks what the official SDK (2.63) speaks; the SDK is the client, unchanged, pointed here by `api_url` and
`sandbox_url`. Commands and files are real (`e2b_standin_box`), the network rules are only recorded. Owns sandboxes'
lives (metadata, lifetimes, the plan's cap, listing in pages) and the faults; the daemon in a box is
`e2b_standin_envd`, template builds are `e2b_standin_templates`. Used by the fixtures of the sandbox tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import shutil
import threading
import time
import urllib.parse
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from tests.sandboxes.e2b_standin_box import Box, make_root
from tests.sandboxes.e2b_standin_envd import Envd
from tests.sandboxes.e2b_standin_templates import Template, Templates

KEY = "e2b_0123456789abcdef0123456789abcdef01234567"
T = TypeVar("T")


@dataclass
class Fault:
    """What happens to the next `times` requests of one kind.

    `how`: an HTTP status; "reset" = the connection is dropped, nothing is done; "lost" = all is done, then the
    connection is dropped; "hang" = nothing is ever answered; "late" = all is done, but `delay_s` later and unanswered;
    "not-found" and "port" = the 502 of the proxy in front of a sandbox.
    """

    how: int | str
    times: int
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0


@dataclass
class Life:
    """One sandbox, also after its end. `end_at` in Unix seconds."""

    sandbox_id: str
    body: dict[str, Any]  # as it was asked for
    box: Box
    envd: Envd
    token: str
    started_at: float
    end_at: float
    timer: asyncio.TimerHandle | None = None
    state: str = "running"  # "killed", "expired"
    timeouts: list[int] = field(default_factory=list)  # lifetimes asked for, in order

    @property
    def metadata(self) -> dict[str, str]:
        metadata: dict[str, str] = self.body.get("metadata", {})
        return metadata


class Standin:
    """The service. `start` and `stop` it; everything else may be called from any thread.

    Kinds of requests, for `fail`: create, connect, list, info, kill, timeout, health, files, rpc, Start, SendInput, ...
    """

    def __init__(self, folder: Path, *, max_lifetime_s: int = 24 * 3600, page: int = 100) -> None:
        self._folder = folder
        self.max_lifetime_s = max_lifetime_s
        self.total_cap_s: int | None = None  # of a whole life, extensions included; None = max_lifetime_s
        self.cap_message = ""  # "" = E2B's own words
        self.page = page  # sandboxes listed at once
        self.envd_version = "0.6.7"
        self.lives: dict[str, Life] = {}
        self.requests: list[tuple[str, float]] = []  # (kind, monotonic seconds)
        self.in_flight = self.max_in_flight = 0  # creations
        self.create_delay_s = 0.0
        self.ignore_filters = False  # of listings
        self.cut_after: int | None = None  # events until a stream is cut, once
        self.templates = Templates(folder / "templates")
        self._faults: dict[str, list[Fault]] = {}
        self._replays: dict[str, str] = {}  # idempotency key -> sandbox
        self._late: set[asyncio.Task[Any]] = set()
        self._ends: set[asyncio.Task[None]] = set()  # sandboxes that are being stopped
        self._thread = threading.Thread(target=self._serve, name="e2b stand-in", daemon=True)
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self.url = ""

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        self._ready.wait(10)

    def stop(self) -> None:
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(20)

    # --- for tests ---

    def fail(
        self,
        kind: str,
        how: int | str,
        times: int = 1,
        message: str = "",
        headers: dict[str, str] | None = None,
        delay_s: float = 0.0,
    ) -> None:
        self._faults.setdefault(kind, []).append(Fault(how, times, message, headers or {}, delay_s))

    def forgive(self) -> None:
        self._faults.clear()

    def end(self, sandbox_id: str, *, orderly: bool = False) -> None:
        """The sandbox reaches the end of its life now. `orderly`: its commands are seen to die before it."""
        self._call(self._end(self.lives[sandbox_id], "expired", orderly=orderly))

    @property
    def running(self) -> list[Life]:
        return [life for life in self.lives.values() if life.state == "running"]

    def count(self, kind: str) -> int:
        return sum(1 for seen, _ in self.requests if seen == kind)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    # --- serving ---

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._run())
        self._loop.close()

    async def _run(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._over.wait()
        for life in self.running:
            await self._end(life, "killed")
        await runner.cleanup()
        for life in self.running:  # made meanwhile
            await self._end(life, "killed")
        await asyncio.gather(*self._ends)
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        kind, handler, args = self._route(request)
        self.requests.append((kind, time.monotonic()))
        fault = self._fault(kind) or ("E2b-Sandbox-Id" in request.headers and self._fault("rpc")) or None
        assert request.transport is not None
        if fault is None:
            return await handler(request, *args)
        if fault.how == "hang":
            await self._over.wait()
        if fault.how in ("lost", "late"):
            work = asyncio.create_task(self._later(fault.delay_s, handler(request, *args)))
            self._late.add(work)
            work.add_done_callback(self._late.discard)
            if fault.how == "lost":
                await work
        if isinstance(fault.how, str) and fault.how in ("reset", "lost", "late"):
            request.transport.abort()
            return web.Response()
        if fault.how in ("not-found", "port"):
            return self._proxy_error(request, str(fault.how))
        status = int(fault.how)
        body = {"code": status, "message": fault.message or f"fault {status}"}
        return web.json_response(body, status=status, headers=fault.headers)

    async def _later(self, delay_s: float, work: Coroutine[Any, Any, T]) -> T:
        await asyncio.sleep(delay_s)
        return await work

    def _fault(self, kind: str) -> Fault | None:
        waiting = self._faults.get(kind)
        if not waiting:
            return None
        fault = waiting[0]
        fault.times -= 1
        if fault.times <= 0:
            waiting.pop(0)
        return fault

    def _route(self, request: web.Request) -> tuple[str, Any, tuple[str, ...]]:
        if sandbox_id := request.headers.get("E2b-Sandbox-Id"):
            kind = request.path.strip("/").rpartition("/")[2]
            return kind, self._inside, (sandbox_id,)
        if request.headers.get("X-API-KEY") != KEY and not request.path.startswith("/upload/"):
            return "unauthorized", self._unauthorized, ()
        routes = [
            ("POST", r"/v2/sandboxes|/sandboxes", "create", self._create),
            ("GET", r"/v2/sandboxes|/sandboxes", "list", self._list),
            ("POST", r"(?:/v2)?/sandboxes/([^/]+)/connect", "connect", self._connect),
            ("POST", r"/sandboxes/([^/]+)/timeout", "timeout", self._timeout),
            ("POST", r"/sandboxes/([^/]+)/refreshes", "refresh", self._timeout),
            ("GET", r"/sandboxes/([^/]+)", "info", self._info),
            ("DELETE", r"/sandboxes/([^/]+)", "kill", self._kill),
        ]
        for method, pattern, kind, handler in routes:
            if request.method == method and (found := re.fullmatch(pattern, request.path)):
                return kind, handler, tuple(g for g in found.groups() if g)
        return "template", self.templates.answer, ()

    async def _unauthorized(self, request: web.Request) -> web.Response:
        return web.json_response({"code": 401, "message": "Invalid API key format or unknown key"}, status=401)

    # --- the API ---

    async def _create(self, request: web.Request) -> web.Response:
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            body = await request.json()
            await asyncio.sleep(self.create_delay_s)
            return await self._create_one(body, request.headers.get("Idempotency-Key"))
        finally:
            self.in_flight -= 1

    async def _create_one(self, body: dict[str, Any], key: str | None) -> web.Response:
        if key is not None and key in self._replays:
            return self._created(self.lives[self._replays[key]])
        template = self.templates.find(body["templateID"])
        if isinstance(template, web.Response):
            return template
        timeout = body.get("timeout", 300)
        if refused := self._over_cap(timeout):
            return refused
        life = await self._bear(body, template, timeout)
        if key is not None:
            self._replays[key] = life.sandbox_id
        return self._created(life)

    async def _bear(self, body: dict[str, Any], template: Template, timeout: int) -> Life:
        sandbox_id = "i" + secrets.token_hex(10)
        root = self._folder / sandbox_id
        if template.root is None:
            make_root(root)
        else:
            await asyncio.to_thread(shutil.copytree, template.root, root, symlinks=True)
            await asyncio.to_thread(_copy_owners, template.root, root)
        box = Box(root)
        try:
            await box.start()
        except BaseException:
            await box.stop()
            raise
        env = {**template.env, **body.get("envVars", {})}
        envd = Envd(box, env, template.user, template.workdir, self._cuts)
        now = time.time()
        life = Life(sandbox_id, body, box, envd, secrets.token_hex(16), now, now + timeout, timeouts=[timeout])
        self.lives[sandbox_id] = life
        self._arm(life)
        return life

    def _created(self, life: Life) -> web.Response:
        body = {
            "sandboxID": life.sandbox_id,
            "templateID": life.body["templateID"],
            "clientID": "standin",
            "envdVersion": self.envd_version,
            "envdAccessToken": life.token,
        }
        return web.json_response(body, status=201)

    def _over_cap(self, timeout: int) -> web.Response | None:
        if timeout <= self.max_lifetime_s:
            return None
        hours, minutes = divmod(self.max_lifetime_s, 3600)
        cap = f"{hours} hours" if minutes == 0 else f"{self.max_lifetime_s} seconds"
        message = self.cap_message or f"Timeout cannot be greater than {cap}"
        return web.json_response({"code": 400, "message": message}, status=400)

    def _arm(self, life: Life) -> None:
        if life.timer is not None:
            life.timer.cancel()
        life.timer = self._loop.call_later(max(0.0, life.end_at - time.time()), self._expire, life)

    def _expire(self, life: Life) -> None:
        task = asyncio.create_task(self._end(life, "expired"))
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _end(self, life: Life, state: str, *, orderly: bool = False) -> None:
        if life.state != "running":
            return
        life.state = state
        life.envd.over = not orderly
        if life.timer is not None:
            life.timer.cancel()
        stopping = asyncio.create_task(self._stop(life.box))  # whole, also when whoever asked for it goes away
        self._ends.add(stopping)
        stopping.add_done_callback(self._ends.discard)
        await asyncio.shield(stopping)

    async def _stop(self, box: Box) -> None:
        await box.stop()
        await asyncio.to_thread(shutil.rmtree, box.root, ignore_errors=True)

    def _life(self, sandbox_id: str) -> Life | None:
        life = self.lives.get(sandbox_id)
        return life if life is not None and life.state == "running" else None

    def _missing(self, sandbox_id: str) -> web.Response:
        return web.json_response({"code": 404, "message": f"Sandbox {sandbox_id} not found"}, status=404)

    async def _connect(self, request: web.Request, sandbox_id: str) -> web.Response:
        life = self._life(sandbox_id)
        if life is None:
            return self._missing(sandbox_id)
        timeout = (await request.json()).get("timeout", 300)
        if refused := self._over_cap(timeout):
            return refused
        life.timeouts.append(timeout)
        life.end_at = max(life.end_at, time.time() + timeout)
        self._arm(life)
        return self._created(life)

    async def _timeout(self, request: web.Request, sandbox_id: str) -> web.Response:
        life = self._life(sandbox_id)
        if life is None:
            return self._missing(sandbox_id)
        timeout = (await request.json())["timeout"]
        if refused := self._over_cap(timeout):
            return refused
        life.timeouts.append(timeout)
        total = self.total_cap_s or self.max_lifetime_s
        life.end_at = min(time.time() + timeout, life.started_at + total)
        self._arm(life)
        return web.Response(status=204)

    async def _kill(self, request: web.Request, sandbox_id: str) -> web.Response:
        life = self._life(sandbox_id)
        if life is None:
            return self._missing(sandbox_id)
        await self._end(life, "killed")
        return web.Response(status=204)

    async def _info(self, request: web.Request, sandbox_id: str) -> web.Response:
        life = self._life(sandbox_id)
        return self._missing(sandbox_id) if life is None else web.json_response(self._listed(life))

    def _listed(self, life: Life) -> dict[str, Any]:
        return {
            "sandboxID": life.sandbox_id,
            "templateID": life.body["templateID"],
            "clientID": "standin",
            "envdVersion": self.envd_version,
            "startedAt": datetime.fromtimestamp(life.started_at, UTC).isoformat(),
            "endAt": datetime.fromtimestamp(life.end_at, UTC).isoformat(),
            "cpuCount": 2,
            "memoryMB": 512,
            "diskSizeMB": 1024,
            "state": "running",
            "metadata": life.metadata,
        }

    async def _list(self, request: web.Request) -> web.Response:
        # The metadata filter is a query string inside a query parameter, each part quoted once more.
        pairs = urllib.parse.parse_qsl(request.query.get("metadata", ""))
        wanted = {urllib.parse.unquote(k): urllib.parse.unquote(v) for k, v in pairs}
        found = [life for life in self.running if self.ignore_filters or wanted.items() <= life.metadata.items()]
        start = int(request.query.get("nextToken", 0))
        end = start + min(self.page, int(request.query.get("limit", 100)))
        headers = {"x-next-token": str(end)} if end < len(found) else {}
        return web.json_response([self._listed(life) for life in found[start:end]], headers=headers)

    # --- the way into a sandbox ---

    async def _inside(self, request: web.Request, sandbox_id: str) -> web.StreamResponse:
        life = self._life(sandbox_id)
        if life is None:
            return self._proxy_error(request, "not-found")
        if not life.box.alive:
            return self._proxy_error(request, "port")
        if request.headers.get("X-Access-Token") != life.token and request.path != "/health":
            return web.json_response({"code": 401, "message": "unauthorized access"}, status=401)
        return await life.envd.handle(request)

    def _proxy_error(self, request: web.Request, what: str) -> web.Response:
        message = {
            "not-found": "The sandbox was not found",
            "port": "The sandbox is running but port is not open",
        }[what]
        body = {"sandboxId": request.headers["E2b-Sandbox-Id"], "message": message, "code": 502}
        return web.json_response(body, status=502)

    def _cuts(self) -> bool:
        if self.cut_after is None:
            return False
        self.cut_after -= 1
        if self.cut_after >= 0:
            return False
        self.cut_after = None
        return True


def _copy_owners(source: Path, target: Path) -> None:
    import os

    for path in source.rglob("*"):
        stat = path.lstat()
        os.chown(target / path.relative_to(source), stat.st_uid, stat.st_gid, follow_symlinks=False)
    os.chmod(target, 0o755)


@contextlib.contextmanager
def standing_in(folder: Path, **options: Any) -> Iterator[Standin]:
    standin = Standin(folder, **options)
    standin.start()
    try:
        yield standin
    finally:
        standin.stop()

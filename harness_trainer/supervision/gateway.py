"""The capture gateway as a part of a run: always at the same addresses, and told when the engine has a policy.

Owns its command line and what it is told. A gateway starts *holding*: it lets no call reach the engine until it is told
that the engine has a policy of this run. An engine that is started again holds base weights, so `hold` must have
returned before that engine is started; then no call can meet it too early, whatever the timing.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from capture_proxy.admin_client import AdminClient
from capture_proxy.errors import CaptureError
from harness_trainer.errors import GatewayFailed
from harness_trainer.supervision.parts import last_line
from harness_trainer.supervision.process import PartProcess

READY_TIMEOUT_S = 30.0
_TELL_TIMEOUT_S = 5.0
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A gateway in another container. Example: Elsewhere(("gateway", 8080), Path("/run/x/admin.sock"))."""

    agents: tuple[str, int]  # host and port, as this container names them
    admin_socket: Path  # in a folder that both containers have at this path


class Gateway:
    """`argv` is its command but for addresses; `spawn` starts a process that logs to `log`.

    `addresses` is there after the first launch; later ones listen at the same.
    """

    def __init__(
        self,
        argv: Sequence[str],
        spawn: Callable[[list[str]], PartProcess],
        *,
        key: str,
        port: int,
        ready_file: Path,
        log: Path,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self.addresses: dict[str, str] = {}  # agent_url, admin_url
        self._argv = list(argv)
        self._spawn = spawn
        self._key = key
        self._port = port
        self._ready_file = ready_file
        self._log = log
        self._elsewhere = elsewhere
        # None while it is launched, perhaps in another thread: one that could not be told to hold is not released.
        self._process: PartProcess | None = None
        self._released = False  # what the living gateway was told last
        self._closing = threading.Event()

    def launch(self) -> PartProcess:
        """Blocking, until it serves; it holds then. Raises GatewayFailed, LifecycleError."""
        self._process = None
        self._ready_file.unlink(missing_ok=True)
        argv = [*self._argv, "--hold", *self._binds(), "--ready-file", str(self._ready_file)]
        process = self._spawn(argv)
        try:
            self._wait(process)
        except BaseException:
            process.stop(0.0)
            raise
        found = json.loads(self._ready_file.read_text(encoding="utf-8"))
        self.addresses = {name: found[name] for name in ("agent_url", "admin_url")}
        if self._elsewhere is not None:  # it says what it is bound to, which is every address of its container
            self.addresses["agent_url"] = "http://{}:{}".format(*self._elsewhere.agents)
        self._released = False
        self._process = process
        return process

    def give_up(self) -> None:
        """End a launch that is under way in another thread."""
        self._closing.set()

    def release(self) -> None:
        """The engine has a policy. Where the gateway does not answer it is told at the next call."""
        if self._process is not None and not self._released:
            self._released = self._tell(ready=True)

    def hold(self) -> None:
        """Let no call reach the engine from here on. A gateway that cannot be told is ended: the next one holds."""
        if self._process is not None and self._process.alive() and not self._tell(ready=False):
            self._process.stop(0.0)
        self._released = False

    def _tell(self, *, ready: bool) -> bool:
        async def tell() -> None:
            async with AdminClient(self.addresses["admin_url"], self._key, timeout_s=_TELL_TIMEOUT_S) as admin:
                await admin.engine_ready(ready)

        try:
            asyncio.run(tell())
        except CaptureError:
            return False
        return True

    def _binds(self) -> list[str]:
        if self._elsewhere is not None:
            port = self._elsewhere.agents[1]
            return ["--agent-bind", f"0.0.0.0:{port}", "--admin-bind", f"unix:{self._elsewhere.admin_socket}"]
        agents = self._bind("agent_url") or f"{_LOOPBACK}:{self._port}"
        admin = self._bind("admin_url")
        return ["--agent-bind", agents, *(["--admin-bind", admin] if admin is not None else [])]

    def _bind(self, name: str) -> str | None:
        url = self.addresses.get(name)
        return None if url is None else url.removeprefix("http://")

    def _wait(self, process: PartProcess) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self._ready_file.exists():
            if not process.alive():
                raise GatewayFailed(f"the gateway died: {last_line(self._log)} (log: {self._log})")
            if self._closing.is_set():
                raise GatewayFailed("the gateway was stopped while it started")
            if time.monotonic() > deadline:
                raise GatewayFailed(f"the gateway was not ready within {READY_TIMEOUT_S:.0f} s: see {self._log}")
            time.sleep(0.05)

"""The way from the public internet to the gateway, as a part of a run: opened, proved, watched, opened again.

Owns the file in which the gateway's public address stands while it is proved to lead to this run's gateway, and only
then: backends read it whenever they make a sandbox. That the process behind it is started again when it dies is
`supervision.parts`'; what is started, `tunnels`'; what proves it, `probe`'s. Called by the supervisor.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from harness_trainer.errors import ConfigError, GatewayFailed
from harness_trainer.expose import CommandExpose, DirectExpose, ExposeConfig, NoExpose
from harness_trainer.expose.probe import Probe, probe
from harness_trainer.expose.tunnels import addresses_in, argv_of
from harness_trainer.rundir import write_atomically

_CANDIDATES = 5  # a program may print other addresses too: its documentation's, say


class WayProcess(Protocol):
    """What of an owned process is used here; `sandboxes.lifecycle.OwnedProcess` is one."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def alive(self) -> bool: ...

    def stop(self, grace_s: float = 5.0, *, successor: bool = False) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Pace:
    """In seconds. `failures`: so many looks in a row must fail before the way counts as closed."""

    opening: float = 90.0  # until the address is known and proved
    poll: float = 0.5
    look: float = 15.0
    failures: int = 2


PACE = Pace()


class PublicWay:
    """`spawn` starts a process that appends to `log`; `say` and `event` tell people and events.jsonl.

    With a process (`argv` is not None) the owner starts `launch` as a part and calls `lost` when it has died; without
    one it calls `open`. Both return when `address_file` has been written.
    """

    def __init__(
        self,
        config: ExposeConfig,
        *,
        agent_url: str,
        public_url: str | None,
        address_file: Path,
        log: Path,
        spawn: Callable[[list[str]], WayProcess],
        say: Callable[[str], None],
        event: Callable[..., None],
        pace: Pace = PACE,
    ) -> None:
        """Raises SetupError when the way's program is missing, ConfigError when an address is."""
        if isinstance(config, DirectExpose) and public_url is None:
            raise ConfigError("--gateway.expose direct needs --gateway.public-url: where this machine is reached")
        self.argv = argv_of(config, urlsplit(agent_url).netloc)
        self.url: str | None = None  # proved; None = the way is closed
        self._config = config
        self._agent_url = agent_url
        self._fixed = public_url if isinstance(config, DirectExpose | CommandExpose) else None
        self._file = address_file
        self._log = log
        self._spawn = spawn
        self._say = say
        self._event = event
        self._pace = pace
        self._process: WayProcess | None = None
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self._lock = threading.Lock()  # of the file and `url`: the watcher and the owner both write them
        self._file.unlink(missing_ok=True)

    def launch(self) -> WayProcess:
        """Start the process; returns when the way is proved. Raises GatewayFailed, LifecycleError."""
        assert self.argv is not None
        begin = self._log.stat().st_size if self._log.exists() else 0
        process = self._spawn(self.argv)
        try:
            self._prove(process, begin)
        except BaseException:
            process.stop(0.0)
            raise
        self._process = process
        self._watch()
        return process

    def open(self) -> None:
        """For a way without a process. Raises GatewayFailed."""
        self._prove(None, 0)
        self._watch()

    def lost(self) -> None:
        """The process has died: no sandbox is led here from now on."""
        self._process = None
        self._forget("its process has died")

    def close(self) -> None:
        """End watching, and a `launch` under way in another thread. The process is the owner's to end. Idempotent."""
        self._closing.set()
        if self._watcher is not None:
            self._watcher.join(timeout=1.0)  # it may be in a look that takes its time, and does no harm
        self._forget("")

    # -- opening -------------------------------------------------------------------------------------------------

    def _prove(self, process: WayProcess | None, log_begin: int) -> None:
        """Until one of the addresses that it may have leads here."""
        deadline = time.monotonic() + self._pace.opening
        what, seen = f"by {self._config.type}", Probe("not_ours", "it has not said its address")
        while not self._closing.is_set():
            if process is not None and not process.alive():
                raise GatewayFailed(f"the way to the gateway ({self._config.type}) died: {self._last_line(log_begin)}")
            printed = self._printed(log_begin)
            for url in [self._fixed] if self._fixed else addresses_in(self._config, printed)[:_CANDIDATES]:
                what, seen = f"at {url}", probe(url, self._agent_url)
                if seen.verdict == "ours":
                    self._remember(url)
                    return
            if time.monotonic() > deadline:
                raise GatewayFailed(
                    f"the gateway cannot be reached {what} from outside: {seen.reason}"
                    + (f" (log: {self._log})" if process is not None else "; check the address, ports and firewalls")
                )
            self._closing.wait(self._pace.poll)
        raise GatewayFailed("the way to the gateway was closed while it was opened")

    def _printed(self, begin: int) -> str:
        if not self._log.exists():
            return ""
        with self._log.open("rb") as file:
            file.seek(begin)
            return file.read().decode("utf-8", errors="replace")

    def _last_line(self, begin: int) -> str:
        lines = [line.strip() for line in self._printed(begin).splitlines() if line.strip()]
        return f"{lines[-1]} (log: {self._log})" if lines else f"it said nothing (log: {self._log})"

    # -- the address ---------------------------------------------------------------------------------------------

    def _remember(self, url: str) -> None:
        with self._lock:
            is_new, self.url = url != self.url, url
            write_atomically(self._file, url.rstrip("/"))
        if is_new:
            self._say(f"sandboxes elsewhere reach the gateway at {url}")
            self._event("gateway_exposed", url=url, way=self._config.type)

    def _forget(self, reason: str) -> None:
        with self._lock:
            was, self.url = self.url, None
            self._file.unlink(missing_ok=True)
        if was is not None and reason:
            self._say(f"the gateway is not reached at {was} any more: {reason}")
            self._event("gateway_unreachable", url=was, way=self._config.type, reason=reason)

    # -- watching ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._watcher is None and not isinstance(self._config, NoExpose):
            self._watcher = threading.Thread(target=self._look_on, name="public way", daemon=True)
            self._watcher.start()

    def _look_on(self) -> None:
        num_failed, url = 0, self.url
        while not self._closing.wait(self._pace.look):
            process = self._process
            if process is None and self.argv is not None:
                num_failed = 0  # it is being opened again
                continue
            url = self.url or self._fixed or url
            if url is None:
                continue
            seen = probe(url, self._agent_url)
            if seen.verdict == "gateway_away" or self._closing.is_set() or process is not self._process:
                continue
            num_failed = 0 if seen.verdict == "ours" else num_failed + 1
            if seen.verdict == "ours":
                if self.url is None:
                    self._remember(url)
            elif num_failed >= self._pace.failures:
                self._forget(seen.reason)
                if process is not None:
                    num_failed = 0
                    process.stop(0.0)  # its owner sees it dead and opens another

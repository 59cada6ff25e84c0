"""Starts vLLM, waits until it answers, and ends it.

Owns the life of one engine process: a free port, readiness with its phases, and the reason when it dies while loading.
Which flags it gets is `config`'s; what happens to orphans is `sandboxes.lifecycle`'s. Called by the command line and by
the tests that need a real engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self

from harness_trainer.engine.config import (
    EngineConfig,
    EngineEnvironment,
    build_argv,
    build_env,
    find_environment,
)
from harness_trainer.engine.prepare import ModelInfo
from harness_trainer.errors import EngineFailed, HarnessTrainerError, SetupError
from sandboxes.lifecycle import (
    Claim,
    LifecycleError,
    OwnedProcess,
    claim,
    default_registry,
    remove_tree,
    start_process,
)

if TYPE_CHECKING:
    import httpx

Progress = Callable[[str], None]

# What vLLM logs when a phase begins, and what a person reads; in the order in which they come.
_PHASES = (
    ("non-default args", "reading the model's configuration"),
    ("Initializing a V1 LLM engine", "starting the engine core"),
    ("Starting to load model", "loading weights"),
    ("Loading weights took", "preparing weights"),
    ("KV cache size", "warming up"),
    ("Starting vLLM server", "opening the port"),
)
_LOG_PREFIX = re.compile(r"^(\([^)]*\)\s*)?((INFO|WARNING|ERROR|CRITICAL)\s+\S+\s+\S+\s+\[[^\]]*\]\s?)?")
_EXCEPTION = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt|NotFound))\b:?\s*(.*)")
_ADDRESS_IN_USE = "address already in use"
_POLL_S = 0.1
_STOP_GRACE_S = 5.0
_LONGEST_FOR_SOCKETS = 107 - 37  # bytes: a socket's path has at most 107, and vLLM names its sockets by a UUID


class Engine:
    """One vLLM server, owned by this process. A context manager, sync and async; `start` and `stop` do the same.

    `base_url` is valid after start, e.g. "http://127.0.0.1:40123". Methods may be called from any thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: ModelInfo,
        log_path: Path,
        registry: Path | None = None,
        run_id: str = "",
    ) -> None:
        self.config = config
        self.model = model
        self.log_path = log_path
        self.start_seconds: float | None = None  # until it answered; None = it has not
        self._registry = registry or default_registry()
        self._run_id = run_id
        self._process: OwnedProcess | None = None
        self._temp: Claim | None = None  # of the folder for vLLM's sockets and files, which it leaves behind
        self._port = 0
        self._cancelled = threading.Event()

    @property
    def base_url(self) -> str:
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{self._port}"

    @property
    def process(self) -> OwnedProcess:
        """The engine's process. Raises EngineFailed before `start` got that far."""
        if self._process is None:
            raise EngineFailed("the engine was not started")
        return self._process

    def alive(self) -> bool:
        return self._process is not None and self._process.alive()

    def start(self, progress: Progress = lambda phase: None) -> str:
        """Start, wait until the engine answers and return its base URL; blocking. On failure nothing is left running.

        `progress` gets a few words whenever a new phase of loading begins. Raises SetupError (no engine environment,
        port taken, nothing can be started) and EngineFailed (it died while loading or did not answer in time; the
        message carries its own reason and the log's path).
        """
        began = time.monotonic()
        environment = find_environment(self.config)
        attempts = 1 if self.config.port else 3  # a free port may be taken between choosing and binding it
        for attempt in range(attempts):
            try:
                self._start_once(environment, progress)
                break
            except EngineFailed as error:
                if _ADDRESS_IN_USE not in str(error).lower() or attempt == attempts - 1:
                    raise
        self.start_seconds = time.monotonic() - began
        return self.base_url

    def stop(self) -> None:
        """End the engine and everything it started; blocking, idempotent."""
        self._cancelled.set()
        if self._process is not None:
            self._process.stop(_STOP_GRACE_S)
        self._drop_temp()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        starting = asyncio.ensure_future(asyncio.to_thread(self.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._cancelled.set()  # the thread sees it within a poll and ends what it started
            with contextlib.suppress(HarnessTrainerError):
                await starting
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.shield(asyncio.to_thread(self.stop))

    def _start_once(self, environment: EngineEnvironment, progress: Progress) -> None:
        self._port = _choose_port(self.config.host, self.config.port)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        log = _Log(self.log_path, self.log_path.stat().st_size if self.log_path.exists() else 0)
        try:
            self._process = start_process(
                build_argv(self.config, self.model, environment, self._port),
                env={**build_env(self.config, environment, os.environ), **self._temp_env()},
                cwd=self.log_path.parent,
                log_path=self.log_path,
                registry=self._registry,
                kind="engine",
                run_id=self._run_id,
            )
        except LifecycleError as error:
            self._drop_temp()
            raise SetupError(str(error)) from None
        except OSError as error:
            self._drop_temp()
            raise SetupError(
                f"the engine's temp folder cannot be made ({error}): free space, or set TMPDIR to a folder of yours"
            ) from error
        try:
            self._wait_until_ready(self._process, log, progress)
        except BaseException:
            self._process.stop(_STOP_GRACE_S)
            self._drop_temp()
            raise

    def _temp_env(self) -> dict[str, str]:
        """A temp folder of the engine's own, gone with it. Raises OSError, LifecycleError."""
        self._temp = claim(self._registry, "enginetemp", run_id=self._run_id)
        temp = tempfile.gettempdir()
        folder = str(self._temp.make_folder(Path(temp)))
        env = {"TMPDIR": folder}
        if len(os.fsencode(folder)) > _LONGEST_FOR_SOCKETS:
            env["VLLM_RPC_BASE_PATH"] = os.environ.get("VLLM_RPC_BASE_PATH", temp)  # and vLLM leaves them there
        # torch would put it into that folder; as a cache it is for the next engine too.
        shared = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{temp}/torchinductor_{os.getuid()}")
        return env | {"TORCHINDUCTOR_CACHE_DIR": shared}

    def _drop_temp(self) -> None:
        """Idempotent. What cannot be removed stays on record, for the next start to try."""
        temp, self._temp = self._temp, None
        if temp is not None:
            with contextlib.suppress(OSError):
                for folder in temp.folders:
                    remove_tree(Path(folder))
                temp.release()

    def _wait_until_ready(self, process: OwnedProcess, log: _Log, progress: Progress) -> None:
        import httpx

        deadline = time.monotonic() + self.config.start_timeout_s
        phase = "starting vLLM"
        progress(phase)
        with httpx.Client(base_url=self.base_url, timeout=5.0, trust_env=False) as client:
            while True:
                latest = log.phase() or phase
                if latest != phase:
                    phase = latest
                    progress(phase)
                if not process.alive():
                    reason = _reason(log.read_all(), process.returncode)
                    raise EngineFailed(f"the engine died while {phase}: {reason} (log: {self.log_path})")
                if phase == _PHASES[-1][1] and self._answers(client):
                    return
                if self._cancelled.is_set():
                    raise EngineFailed("the engine was stopped while it started")
                if time.monotonic() > deadline:
                    raise EngineFailed(
                        f"the engine was still {phase} after {self.config.start_timeout_s:.0f} s; raise the start "
                        f"time-out or look into {self.log_path}"
                    )
                time.sleep(_POLL_S)

    def _answers(self, client: httpx.Client) -> bool:
        """Whether it is *our* engine that answers on the port."""
        import httpx

        try:
            models = client.get("/v1/models").json()["data"]
            return any(model["id"] == (self.config.served_name or self.model.model_id) for model in models)
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return False


def _choose_port(host: str, port: int) -> int:
    """`port`, or a free one for 0. Raises SetupError when it cannot be bound."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            return int(sock.getsockname()[1])
    except OSError as error:
        reason = error.strerror or str(error)
        raise SetupError(
            f"the engine cannot listen on {host}:{port} ({reason}); choose another port (0 = a free one)"
        ) from None


class _Log:
    """The engine's log from `offset` on: earlier runs may have written to the same file."""

    def __init__(self, path: Path, offset: int) -> None:
        self._path = path
        self._offset = offset
        self._phase_index = -1

    def read_all(self) -> str:
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                return stream.read().decode("utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def phase(self) -> str | None:
        text = self.read_all()  # some 20 kB while loading
        while self._phase_index + 1 < len(_PHASES) and any(
            mark in text for mark, _ in _PHASES[self._phase_index + 1 :]
        ):
            self._phase_index += 1
        return _PHASES[self._phase_index][1] if self._phase_index >= 0 else None


def _reason(log: str, returncode: int | None) -> str:
    """The line of a vLLM log that says why it ended: the first exception's message, else the last line."""
    lines = [_LOG_PREFIX.sub("", line, count=1).strip() for line in log.splitlines()]
    lines = [line for line in lines if line]
    if any(_ADDRESS_IN_USE in line.lower() for line in lines):
        return f"{_ADDRESS_IN_USE}; choose another port"
    for index, line in enumerate(lines):
        found = _EXCEPTION.match(line)
        if not found or "See root cause above" in line or found[1].endswith("Warning"):
            continue
        message = found[2]
        # pydantic puts the message on a line of its own: "1 validation error for X" / "Value error, ..."
        if "validation error" in message and index + 1 < len(lines):
            message = lines[index + 1].removeprefix("Value error, ")
        return f"{found[1]}: {message}"[:240] if message else found[1]
    if returncode == -9:
        return "it was killed (out of memory?); free memory or lower kv_cache_gib"
    usage = next((line for line in lines if ": error: " in line), None)
    return (usage or (lines[-1] if lines else f"no output, exit code {returncode}"))[:240]

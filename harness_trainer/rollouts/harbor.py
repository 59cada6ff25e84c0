"""The worker in Harbor's own Python that drives the agents of a run (`harnesses.harbor_worker`): its life, from here.

Owns starting it, anew if it died, and a process for each rollout with its end. What goes on in a rollout is
`harbor_run`'s. Opened only by runs with an agent of Harbor's.
"""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

from harness_trainer.errors import DriverFailed, SetupError
from harness_trainer.harnesses.base import Harness
from harness_trainer.harnesses.harbor_agent import WORKER, find_harbor, worker_env
from harness_trainer.rollouts.config import RunnerSpec
from sandboxes.base import Backend
from sandboxes.lifecycle import Claim, LifecycleError, OwnedProcess, claim, remove_tree, start_process

_HELLO_S = 180.0  # Harbor is a large program to import, on a busy machine
_STOP_GRACE_S = 5.0
_END_S = 10.0  # for a process that was killed to be gone
_MAX_PACKET = 65_536


async def open_harbor(
    stack: AsyncExitStack, spec: RunnerSpec, backend: Backend, *harnesses: Harness
) -> HarborAgents | None:
    """The worker, started, if one of the harnesses is Harbor's; it ends with `stack`. Raises SetupError."""
    if not any(harness.harbor for harness in harnesses):
        return None
    return await stack.enter_async_context(HarborAgents(spec, users=backend.traits.users))


class HarborAgents:
    """An async context manager. `users` = commands may run as another user than the sandbox's own."""

    def __init__(self, spec: RunnerSpec, *, users: bool) -> None:
        self.users = users
        self._spec = spec
        self._log = spec.artifacts / "harbor-worker.log"
        self._claim: Claim | None = None
        self._home = Path()
        self._worker: _Worker | None = None
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        python = find_harbor()
        try:
            self._claim = await asyncio.to_thread(claim, self._spec.registry, "harbor", run_id=self._spec.run_id)
            self._home = await asyncio.to_thread(self._claim.make_folder, Path(tempfile.gettempdir()))
            self._worker = await self._start(python)
        except (LifecycleError, OSError) as error:
            await self._close()
            raise SetupError(f"cannot start Harbor's worker: {error}") from error
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(self._close()))
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.shield(asyncio.ensure_future(self._close()))

    async def _close(self) -> None:
        if self._worker is not None:
            await self._worker.stop()
        if self._claim is not None:
            await asyncio.to_thread(remove_tree, self._home)
            await asyncio.to_thread(self._claim.release)

    async def _start(self, python: Path) -> _Worker:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                process = await asyncio.to_thread(
                    lambda: start_process(
                        [str(python), "-P", str(WORKER), "serve", str(theirs.fileno())],
                        env=worker_env(self._home),
                        cwd=self._home,
                        log_path=self._log,
                        registry=self._spec.registry,
                        kind="harbor_agents",
                        pass_fds=[theirs.fileno()],
                        run_id=self._spec.run_id,
                        grace_s=_STOP_GRACE_S,
                    )
                )
            except BaseException:
                ours.close()
                raise
        worker = _Worker(process, ours)
        try:
            async with asyncio.timeout(_HELLO_S):
                if await worker.hello() is None:
                    raise SetupError(f"Harbor's worker ended at its start: {await asyncio.to_thread(_tail, self._log)}")
        except TimeoutError as error:
            await worker.stop()
            raise SetupError(f"Harbor's worker did not answer in {_HELLO_S:.0f} s; see {self._log}") from error
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(worker.stop()))
            raise
        return worker

    @asynccontextmanager
    async def process(self, rollout_id: str, log: Path) -> AsyncIterator[socket.socket]:
        """A process for the rollout, by its socket; it has ended when this is left. Raises DriverFailed."""
        worker = await self._running()
        sock = worker.fork(rollout_id, log)
        try:
            yield sock
        finally:
            sock.close()
            await asyncio.shield(asyncio.ensure_future(worker.end(rollout_id)))

    async def _running(self) -> _Worker:
        """The worker, or a new one in place of one that died."""
        async with self._starting:
            worker = self._worker
            if worker is None or not worker.alive:
                if worker is not None:
                    await worker.stop()
                try:
                    self._worker = worker = await self._start(find_harbor())
                except (LifecycleError, OSError, SetupError) as error:
                    raise DriverFailed(f"Harbor's worker died and cannot be started again: {error}") from error
        return worker

    async def last_words(self, rollout_id: str, log: Path) -> tuple[str, str]:
        """How the rollout's process ended, and the last of what it logged."""
        how = "ended" if self._worker is None else await self._worker.fate(rollout_id)
        return how, await asyncio.to_thread(_tail, log)


class _Worker:
    """One run of the worker."""

    def __init__(self, process: OwnedProcess, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._control.setblocking(False)
        self._ended: dict[str, asyncio.Future[int | None]] = {}  # exit code, -N = signal N, None = the worker died
        self._reading: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self._reading is not None and not self._reading.done()

    async def hello(self) -> dict[str, Any] | None:
        """Its first word, once it has imported Harbor; None = it ended."""
        packet = await self._receive()
        if not packet:
            return None
        self._reading = asyncio.create_task(self._read(), name="harbor worker")
        said: dict[str, Any] = json.loads(packet)
        return said

    async def _receive(self) -> bytes:
        try:
            return await asyncio.get_running_loop().sock_recv(self._control, _MAX_PACKET)
        except OSError:
            return b""  # the connection broke: the same as its end

    async def _read(self) -> None:
        while packet := await self._receive():
            message = json.loads(packet)
            if (ended := self._ended.get(message["ended"])) is not None and not ended.done():
                ended.set_result(message["status"])
        for ended in self._ended.values():
            if not ended.done():
                ended.set_result(None)

    def fork(self, rollout_id: str, log: Path) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                packet = json.dumps({"fork": rollout_id, "log": str(log.absolute())}).encode()
                socket.send_fds(self._control, [packet], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise DriverFailed(f"Harbor's worker does not answer: {error}") from error
        self._ended[rollout_id] = asyncio.get_running_loop().create_future()
        return ours

    async def end(self, rollout_id: str) -> None:
        ended = self._ended[rollout_id]
        if not ended.done():
            with suppress(OSError):  # it is gone, and so is all that it started
                self._control.send(json.dumps({"kill": rollout_id}).encode())
            await asyncio.wait([ended], timeout=_END_S)
        del self._ended[rollout_id]

    async def fate(self, rollout_id: str) -> str:
        ended = self._ended.get(rollout_id)
        if ended is not None:
            await asyncio.wait([ended], timeout=_END_S)
        if ended is None or not ended.done():
            return "closed its connection"
        status = ended.result()
        if status is None:
            return "ended with Harbor's worker"
        return f"was ended by signal {-status}" if status < 0 else f"ended with exit code {status}"

    async def stop(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        self._control.close()  # it reads the end, and ends what it has forked
        await asyncio.to_thread(self._process.wait, _STOP_GRACE_S)
        await self._process.stop_async(_STOP_GRACE_S)


def _tail(log: Path) -> str:
    """The last words in a log, as one line."""
    try:
        lines = log.read_text(encoding="utf-8", errors="backslashreplace").strip().splitlines()
    except OSError:
        return "no message"
    return " / ".join(line.strip() for line in lines[-3:])[-500:] or "no message"

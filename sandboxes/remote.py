"""A sandbox behind five primitives: everything that is the same for every backend that can run a command in a box.

Owns the life of a box (start, health check, deadline, stop), how commands run in it, time limits, and killing, inside a
POSIX box that has `sh` and /proc. Does not know which service the box comes from: a backend subclasses `RemoteSandbox`
and fills in the five abstract methods of `box_calls.BoxCalls` (`docker`, `e2b` and `harbor` do). Jobs are `box_jobs`,
files `box_files`, the scripts that run in the box `inside`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal, Self

from sandboxes import inside
from sandboxes.base import (
    FOLDERS,
    BoxSpec,
    Command,
    RunResult,
    SandboxError,
    SandboxGone,
    SetupFailed,
)
from sandboxes.box_calls import Account, Exec, OnOutput, Reader
from sandboxes.box_files import FileCalls
from sandboxes.box_jobs import JobCalls
from sandboxes.health import wait_healthy
from sandboxes.ownership import Keeper

__all__ = ["Exec", "OnOutput", "RemoteSandbox"]

log = logging.getLogger(__name__)

_GRACE_CS = 50  # between SIGTERM and SIGKILL at a time limit, in hundredths of a second
_DRAIN_S = 0.5  # for output that is on its way when a command was killed


class RemoteSandbox(FileCalls, JobCalls):
    """See `sandboxes.base.Sandbox` and, for backends, `box_calls.BoxCalls`.

    Example of a backend: see `sandboxes.docker`. Between `_create` and `_destroy` all state is here.
    """

    kind: ClassVar[str] = "remote"
    kill_limit_s: ClassVar[float] = 15.0  # for a script that kills; then all is ended from outside, where that can be
    mounts: bool = False  # False = `spec.mounts` are copied in at start

    def __init__(
        self,
        spec: BoxSpec,
        *,
        user: str | None = None,
        workdir: str | None = None,
        gateway_url: str | None = None,
        proxy_url: str | None = None,
        log_dir: Path | None = None,
    ) -> None:
        """`user` (None = root) and `workdir` (None = /app) when the spec leaves them open; `log_dir` for the health
        check's log. A backend that learns them later sets `_user_wanted`, `_workdir` and so on in `_create`."""
        super().__init__(spec)
        self._id: str | None = None
        self._user_wanted = spec.user or user
        self._workdir = spec.workdir or workdir or "/app"
        self._gateway_url, self._proxy_url = gateway_url, proxy_url
        self._log_dir = log_dir
        self._stopped = False
        self._stopping: asyncio.Task[None] | None = None
        self._killing = asyncio.Lock()  # killing everything ends another killer too, e.g. one at the same deadline
        self._expired = False
        self._ends_at: float | None = None  # monotonic seconds
        self._watch: asyncio.Task[None] | None = None
        self._running: dict[str, bool] = {}  # commands, and whether each has been the only one so far
        self._home_is_set = False  # by the box's own environment
        self._adopted = False  # jobs of another process may run in it

    # --- what it is ---

    @property
    def sandbox_id(self) -> str:
        if self._id is None:
            raise SandboxError("the sandbox is not started; use it in `async with`")
        return self._id

    @property
    def description(self) -> str:
        return f"{self.kind} sandbox {self._id or '(not started)'}"

    @property
    def user(self) -> str | None:
        return None if self._account is None else self._account.shown

    @property
    def workdir(self) -> str:
        return self._workdir

    @property
    def gateway_url(self) -> str | None:
        return self._gateway_url

    @property
    def proxy_url(self) -> str | None:
        return self._proxy_url

    # --- start and end ---

    async def __aenter__(self) -> Self:
        if self._id is not None or self._stopped:
            raise SandboxError("a sandbox can be started once")
        try:
            self._id = await self._create()
            self._start_clock()
            await self._set_up()
            if not self.mounts:
                for mount in self.spec.mounts:
                    await self._put_tree(mount.source, mount.target, uid=0, gid=0)
            await self._open_ways()
            beside = self.spec.build_dir if self.spec.image is not None else None
            if beside is not None and not await asyncio.to_thread((beside / "Dockerfile").exists):
                # As Harbor does with a finished image: files that no Dockerfile puts there go to the working directory.
                await self.put_dir(beside, self._workdir)
            if self.spec.healthcheck is not None:
                log_path = None if self._log_dir is None else self._log_dir / f"health-{self._id}.log"
                await wait_healthy(self.run, self.spec.healthcheck, self.spec.name, log_path)
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def keep(self, keeper: Keeper, until: float) -> None:
        """As for a service in which a box cannot be found again: nothing."""
        self._ready()

    async def adopt(self, sandbox_id: str) -> None:
        """Take over a box that runs already: the backend's `attach` calls it. Raises SandboxGone or SandboxError."""
        self._id = sandbox_id
        self._adopted = True
        await self._set_up("adopt")
        self._start_clock()

    async def renew(self) -> None:
        self._ready()
        with self._latched():
            await self._look()
        self._start_clock()

    async def _look(self) -> None:
        """Raises SandboxGone unless the box runs. A backend that can ask its service does so instead."""
        await self._script(inside.LOOK, "/", ".", "folder", limit_s=30.0)

    async def _set_up(self, how: Literal["new", "again", "adopt"] = "new") -> None:
        """Make the folders, learn who commands run as and when the box began."""
        root, user = "" if self.admin is None else "1", self._user_wanted or ""
        code, reader = await self._script(inside.SETUP, user, root, self.state_dir, how, self._workdir, *FOLDERS)
        problem = reader.err.text().strip()[-300:]
        if code == inside.BAD_USER:
            raise SetupFailed(f"the sandbox of {self.spec.name} cannot run as {user!r}: {problem}")
        if code != 0:
            raise SandboxError(f"the sandbox of {self.spec.name} could not be set up: {problem}")
        numbers, name, home, *_ = [*reader.out.text().split("\n"), "", ""]
        uid, gid, since = map(int, numbers.split())
        self._since = since
        # Engines give an unknown uid the group 0, so the group is always said; a name brings its further groups.
        named = name and ":" not in user
        login = name if named else f"{uid}:{gid}"
        self._account = Account("root" if uid == 0 else name or str(uid), login, uid, gid, "" if name else home)

    async def _open_ways(self) -> None:
        """Mounts below a home folder (a Python environment keeps its path) must be reachable for any user."""
        targets = [PurePosixPath(mount.target) for mount in self.spec.mounts]
        ways = {way for target in targets for way in target.parents if way.parts[1:2] in (("root",), ("home",))}
        ways = {way for way in ways if not any(way.is_relative_to(target) for target in targets)}
        if self.admin is None or not ways or self._ready().uid == 0:
            return
        code, reader = await self._script(inside.OPEN, *sorted(map(str, ways)))
        if code != 0:
            problem = reader.err.text().strip()[-300:]
            raise SandboxError(f"the sandbox of {self.spec.name} cannot open the way to its mounts: {problem}")

    def _start_clock(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        deadline_s = self.spec.limits.deadline_s
        if deadline_s is not None:
            self._ends_at = time.monotonic() + deadline_s
            self._watch = asyncio.create_task(self._expire(deadline_s), name=f"deadline of {self._id}")

    async def _expire(self, deadline_s: float) -> None:
        await asyncio.sleep(deadline_s)
        self._expired = True
        try:
            await self._kill_everything()
        except SandboxError as e:
            log.warning("%s: at its deadline: %s", self._id, e)

    def _left_s(self) -> float | None:
        return None if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())

    def _ready(self) -> Account:
        if self._stopped:
            raise SandboxGone("the sandbox is gone: it was stopped")
        account = super()._ready()
        if self._expired or self._left_s() == 0.0:
            raise SandboxGone(f"the sandbox is gone: its deadline of {self.spec.limits.deadline_s:g} s has passed")
        return account

    async def stop(self) -> None:
        self._stopped = True
        if self._watch is not None:
            self._watch.cancel()
        if self._stopping is None or self._stopping.done():
            self._stopping = asyncio.create_task(self._end(), name=f"stop {self._id}")
        await asyncio.shield(self._stopping)

    async def _end(self) -> None:
        try:
            await self._destroy()
        except SandboxError as e:
            log.warning("%s is left behind and stays on record for the next start: %s", self._id, e)

    # --- commands ---

    async def run(self, command: Command) -> RunResult:
        self._ready()
        began = time.monotonic()
        command_id, nonce = secrets.token_hex(8), secrets.token_hex(16)
        has_stdin = "0" if command.stdin is None else "1"
        stdin = (command.stdin or "").encode(errors="backslashreplace")
        execution = self._execution(command, command_id, nonce, inside.RUN, has_stdin)
        execution = replace(execution, stdin=stdin)
        reader = Reader(nonce, command.output_cap)
        limits = [s for s in (command.timeout_s, self._left_s()) if s is not None]
        self._running = {**dict.fromkeys(self._running, False), command_id: not self._running}
        stream = asyncio.create_task(self._exec(execution, reader.feed), name=f"run in {self._id}")
        try:
            done, _ = await asyncio.wait({stream}, timeout=min(limits, default=None))
            if not done:
                await self._end_command(command_id, stream)
        except asyncio.CancelledError:
            await _to_end(self._end_command(command_id, stream))
            raise
        except BaseException:
            await _to_end(_abandon(stream))
            raise
        finally:
            del self._running[command_id]
        code = await self._exit_code(stream, reader)
        timed_out = not done or (self._expired and reader.ended is None)
        reader.finish()
        return RunResult(
            exit_code=None if timed_out else code,
            stdout=reader.out.text(),
            stderr=reader.err.text(),
            timed_out=timed_out,
            truncated=reader.out.truncated or reader.err.truncated,
            duration_s=time.monotonic() - began,
            oom=reader.ended is not None and reader.ended.num_ooms > 0,
        )

    def _execution(self, command: Command, command_id: str, nonce: str, script: str, *arguments: str) -> Exec:
        account = self._ready()
        argv = list(command.argv)
        if not argv:
            raise ValueError("a command needs at least the program's name")
        env = {"SANDBOX_ROOT": "", **self.spec.env, **command.env}
        argv = inside.with_odd_names(argv, env)
        if any("\0" in text for text in (*argv, *env, *env.values())):
            raise SandboxError(f"cannot start {argv[0]!r} in the sandbox: a zero byte in its arguments or environment")
        login = account.login
        if command.user is None:
            if account.home and not self._home_is_set:
                env.setdefault("HOME", account.home)
        elif command.user != account.shown:
            # An unknown uid would get the group 0, so the group is always said.
            login = f"{command.user}:{command.user}" if command.user.isdigit() else command.user
        env |= {inside.MARKER: command_id, inside.WRAPPER: "1"}
        cwd = command.cwd or self._workdir
        return Exec([inside.SHELL, "-c", script, "sh", nonce, *arguments, cwd, *argv], user=login, cwd="/", env=env)

    async def _exit_code(self, stream: asyncio.Task[int | None], reader: Reader) -> int | None:
        try:
            with self._latched():
                code = await stream
        except asyncio.CancelledError:
            if not stream.cancelled():
                raise
            code = None  # we left it after a time limit
        except SandboxError:
            if not self._stopped:
                raise
        if self._stopped:
            raise SandboxGone("the sandbox is gone: it was stopped while a command ran")
        return code if reader.ended is None else reader.ended.code

    # --- killing ---

    async def kill_all(self) -> None:
        self._ready()
        await self._kill_everything()

    async def _kill_everything(self) -> None:
        await self._kill("all", alone=False)

    async def _end_marked(self, command_id: str, *, alone: bool) -> None:
        await self._kill(command_id, alone=alone)

    async def _kill(self, which: str, *, alone: bool) -> None:
        arguments = (which, str(self._since), self._secret, "1" if alone else "0", str(_GRACE_CS))
        try:
            async with self._killing:
                code, _ = await self._script(inside.KILL, *arguments, limit_s=self.kill_limit_s)
            problem = "" if code == 0 else "processes in the sandbox survived SIGKILL"
        except SandboxGone:
            raise
        except SandboxError as e:
            problem = str(e)
        if problem:
            log.warning("%s: %s; ending all of its processes from outside", self._id, problem)
            if not await self._kill_hard():
                raise SandboxError(problem)

    async def _kill_hard(self) -> bool:
        """End every process from outside, and have the box run again with its files; False = this service cannot.

        Asked when the box is in no state to run a script. It ends with `_set_up("again")`.
        """
        return False

    async def _end_command(self, command_id: str, stream: asyncio.Task[int | None]) -> None:
        """End everything of a command at its time limit; its output is taken as far as it comes at once."""
        alone = self._running[command_id] and not self.num_jobs and not self._adopted
        try:
            await self._kill(command_id, alone=alone)
            await asyncio.wait({stream}, timeout=_DRAIN_S)
        finally:
            await _abandon(stream)


async def _abandon(stream: asyncio.Task[Any]) -> None:
    """Stop listening; what it raised is for whoever awaits it, or for nobody."""
    stream.cancel()
    await asyncio.wait({stream})
    if not stream.cancelled():
        stream.exception()


async def _to_end(work: Coroutine[Any, Any, None]) -> None:
    """Do it to its end although the caller is being cancelled; a failure is logged."""
    task = asyncio.create_task(work)
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            continue
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("a cancelled command could not be ended: %s", error)

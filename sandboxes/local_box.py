"""One local sandbox: a temp folder, its life, and what may happen in it.

Owns the folder from creation to removal, the deadline, whether a command may start, and the order of its parts at a
limit and at the end. Commands that are waited for are `local_commands`', how one is started `local_launch`'s, detached
ones `local_jobs`', files `local_files`', the sealed kind's box `bubblewrap_box`'s; finding and killing processes is
`processes`, records `ownership`. Made by `local`.

On disk a sandbox is `<its id>/root`, the files that commands see, and `<its id>/control`, ours: what another process
needs to take the sandbox over, the jobs, and in a sealed one the socket of its process 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self

from sandboxes import bubblewrap
from sandboxes.base import FOLDERS, Command, JobStatus, RunResult, SandboxError, SandboxGone, SetupFailed
from sandboxes.bubblewrap import Shape
from sandboxes.bubblewrap_box import SealedBox
from sandboxes.files import Tree
from sandboxes.health import wait_healthy
from sandboxes.lifecycle import Claim, LifecycleError, claim, remove_tree
from sandboxes.local_commands import Commands
from sandboxes.local_files import LocalFiles, in_thread
from sandboxes.local_jobs import Jobs, Order
from sandboxes.local_launch import Launcher, place, stdin_of
from sandboxes.local_plan import Kept, Plan, Services
from sandboxes.local_process import own_user
from sandboxes.local_watch import watch
from sandboxes.ownership import Keeper
from sandboxes.processes import MARKER, Traces, find_near, kill_owned
from sandboxes.relay import Relay

log = logging.getLogger(__name__)

_NOT_WORKSPACE = frozenset({"Dockerfile", ".dockerignore", "docker-compose.yaml", "docker-compose.yml"})
_PORTS = {"gateway": bubblewrap.GATEWAY_PORT, "proxy": bubblewrap.PROXY_PORT}


class LocalSandbox(LocalFiles):
    """See `sandboxes.base.Sandbox`. Memory and process count are polled, so a short burst can pass a limit."""

    def __init__(self, plan: Plan, services: Services, *, under: Path | None, run_id: str, registry: Path) -> None:
        super().__init__(plan)
        self._services = services
        self._under = under or Path(tempfile.gettempdir())
        self._run_id = run_id
        self._registry = registry
        self._claim: Claim | None = None
        self._folder: Path | None = None  # holds root and control
        self._uid: int | None = None  # of a sealed sandbox's processes, None = ours
        self._sealed: SealedBox | None = None
        self._launcher: Launcher | None = None
        self._lock = threading.Lock()  # creation and removal, which run in threads
        self._gone = ""  # why
        self._stopped = False
        self._commands = Commands(self._check_alive)
        self._ending_all = asyncio.Lock()  # at a limit: what is started meanwhile would be killed with the rest
        self._known_jobs: Jobs | None = None
        self._ends_at: float | None = None  # monotonic seconds, the same for every process of this machine
        self._watch_task: asyncio.Task[None] | None = None
        self._relays = contextlib.AsyncExitStack()

    # --- what it is ---

    @property
    def sandbox_id(self) -> str:
        if self._claim is None:
            raise SandboxError("the sandbox is not started; use it in `async with`")
        return self._claim.id

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def description(self) -> str:
        if not self._plan.sealed:
            return "local sandbox: no security boundary, the agent runs as you"
        return (
            "local sandbox, sealed by bubblewrap: sees this machine's programs and nothing else of it, "
            f"{bubblewrap.REACH[self._plan.network]}"
        )

    @property
    def user(self) -> str | None:
        return bubblewrap.USER if self._plan.sealed else own_user()

    @property
    def workdir(self) -> str:
        return self._plan.workdir

    @property
    def gateway_url(self) -> str | None:
        return self._url("gateway")

    @property
    def proxy_url(self) -> str | None:
        return self._url("proxy")

    def _url(self, name: str) -> str | None:
        if name in self._services.relayed(self._plan):
            return f"http://127.0.0.1:{_PORTS[name]}"
        service = getattr(self._services, name) if self._plan.shares_network else None
        return None if service is None else service.url

    def resolve(self, path: str) -> str:
        return place(path, None if self._plan.sealed else self._root)

    @property
    def _root(self) -> Path:
        return self._started() / "root"

    @property
    def _control(self) -> Path:
        return self._started() / "control"

    def _started(self) -> Path:
        if self._gone:
            raise SandboxGone(f"the sandbox is gone: {self._gone}")
        if self._folder is None:
            raise SandboxError("the sandbox is not started; use it in `async with`")
        return self._folder

    # --- start and end ---

    async def __aenter__(self) -> Self:
        if self._folder is None:
            await self._begin(self._create)
            if self._plan.healthcheck is not None:
                await self._or_stop(wait_healthy(self.run, self._plan.healthcheck, self._plan.name))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def take_over(self, adopted: Claim, kept: Kept) -> None:
        """Go on with the sandbox of a dead owner, whose record is ours by now. Raises SandboxError."""
        self._claim, self._folder = adopted, Path(adopted.folders[0])
        self._uid, self._ends_at = kept.uid, kept.ends_at
        await self._begin(self._open_box)

    async def _begin(self, make: Callable[[], None]) -> None:
        await self._or_stop(self._begin_or_fail(make))
        self._watch_task = asyncio.create_task(watch(self._plan.limits, self), name=f"watch {self.sandbox_id}")

    async def _begin_or_fail(self, make: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(make)
            await self._relay()
        except (OSError, LifecycleError) as e:
            raise SandboxError(f"cannot create a local sandbox: {e}") from e

    async def _or_stop(self, step: Awaitable[None]) -> None:
        try:
            await step
        except BaseException:
            await asyncio.shield(self.stop())
            raise

    def _create(self) -> None:
        with self._lock:
            if self._stopped:
                return
            self._claim = claim(self._registry, "sandbox", run_id=self._run_id)
            # resolved, because processes are also recognised by their (real) working directory
            folder = self._claim.make_folder(self._under.resolve())
            for part in ("root", "control"):
                (folder / part).mkdir(mode=0o755)
            self._uid = bubblewrap.free_uid() if self._plan.sealed and os.geteuid() == 0 else None
            self._folder = folder
            self._fill(Tree(folder / "root", self._uid))
            self._set_deadline()
            self._open_box()

    def _fill(self, tree: Tree) -> None:
        plan = self._plan
        for path in (*FOLDERS, plan.workdir):
            tree.make_dir(path)
        if not plan.sealed:
            for mount in plan.mounts:
                if str(mount.source) != mount.target:  # else the host's own path is what commands are given
                    tree.make_link(str(mount.source), mount.target)
        if plan.workspace is not None:
            try:
                tree.copy_in(plan.workspace, plan.workdir, without=_NOT_WORKSPACE)
            except SandboxError as e:
                raise SetupFailed(f"task {plan.name!r}: {e}") from e

    def _open_box(self) -> None:
        if self._plan.sealed:
            ports = tuple(_PORTS[name] for name in self._services.relayed(self._plan))
            shape = Shape(self._root, self._control, self._uid, self._plan.mounts, self._plan.shares_network, ports)
            self._sealed = SealedBox(shape)
        self._launcher = Launcher(self._plan, self._claimed, self._root, self._sealed)
        if self._sealed is not None:
            self._sealed.start({"PATH": os.defpath, MARKER: self._claimed.marker})

    @property
    def _claimed(self) -> Claim:
        self._started()
        assert self._claim is not None
        return self._claim

    def _set_deadline(self) -> None:
        """Count the deadline from now, and keep what another process would need to go on."""
        deadline_s = self._plan.limits.deadline_s
        self._ends_at = None if deadline_s is None else time.monotonic() + deadline_s
        Kept(self._plan, self._uid, self._ends_at).write(self._control)

    async def _relay(self) -> None:
        """Lead what connects to the box's ports to the services. The ports are process 1's, so they outlive us."""
        if self._sealed is None:
            return
        loop = asyncio.get_running_loop()
        for name, service in self._services.relayed(self._plan).items():
            listener = self._sealed.services.get(_PORTS[name])
            if listener is None:
                raise SandboxError(f"the sandbox {self.sandbox_id} was started without a way to the {name}")
            relay = Relay(service.target)
            server = await loop.create_server(relay.accept, sock=listener)
            self._relays.push_async_callback(relay.close)
            self._relays.callback(server.close)

    async def keep(self, keeper: Keeper, until: float) -> None:
        claimed = self._claimed
        try:
            await in_thread(lambda: claimed.keep(keeper, until))
        except OSError as e:
            raise SandboxError(f"cannot write to {self._registry}: {e}; free space") from e

    async def renew(self) -> None:
        self._check_alive()
        self._check_deadline()
        await in_thread(self._set_deadline)

    def _check_alive(self) -> None:
        folder = self._started()
        if not folder.is_dir():
            self._gone = "its folder was removed"
        elif self._sealed is not None and not self._sealed.alive():
            self._gone = "process 1 of its box has ended"
        self._started()

    def _check_deadline(self) -> None:
        if self._ends_at is not None and time.monotonic() >= self._ends_at:
            raise SandboxGone("the sandbox is gone: its deadline has passed")

    async def stop(self) -> None:
        self._stopped = True
        self._gone = self._gone or "it was stopped"
        if self._watch_task is not None:
            self._watch_task.cancel()
        self._commands.stop()
        await asyncio.shield(self._end())

    async def _end(self) -> None:
        await self._relays.aclose()
        await asyncio.to_thread(self._destroy)

    def _destroy(self) -> None:
        with self._lock:  # waits for a creation that was cancelled half-way
            if self._claim is None:
                return
            try:
                monitor_pid = None
                if self._sealed is not None:
                    monitor_pid = self._sealed.monitor_pid
                    self._sealed.let_go()
                kill_owned(self._claim.id, Traces(folder=self._folder, parent=monitor_pid))
                if self._sealed is not None:
                    self._sealed.wait()
                if self._known_jobs is not None:
                    self._known_jobs.bury()
                remove_folders(self._claim)
            except (LifecycleError, OSError) as e:
                log.warning("%s is left behind and stays on record for the next start: %s", self._claim.id, e)

    async def kill_all(self) -> None:
        self._started()
        await in_thread(self._kill)

    def _kill(self) -> None:
        claimed = self._claimed
        if self._sealed is None:
            kill_owned(claimed.id, Traces(folder=self._started()))
        else:
            self._jobs.kill_all()
            self._sealed.kill_all()

    # --- what `local_watch` asks ---

    @property
    def ends_at(self) -> float | None:
        return self._ends_at

    def busy(self) -> bool:
        return self._commands.num_running() > 0 or (not self._gone and self._jobs.any())

    def pids(self) -> tuple[list[int], int]:
        if self._gone or self._folder is None or self._claim is None:
            return [], 0
        ours = self._jobs.num_running()
        if self._sealed is None:
            return find_near(self._claim.id, self._folder), ours
        return self._sealed.pids(), 1 + ours + self._commands.num_running()

    async def end_all(self, reason: str) -> None:
        async with self._ending_all:
            self._commands.break_all(reason)
            try:
                await in_thread(lambda: self._jobs.break_all(reason))
                await self.kill_all()
            except SandboxError as e:
                log.warning("%s: at its %s: %s", self.sandbox_id, reason, e)

    # --- commands ---

    async def run(self, command: Command) -> RunResult:
        launcher = await self._may_start(command)
        return await self._commands.run(launcher, command, self._ends_at)

    async def _may_start(self, command: Command) -> Launcher:
        async with self._ending_all:
            self._started()
            self._check(command)
            if self._launcher is None:
                raise SandboxError("the sandbox is still being started; use it in `async with`")
            return self._launcher

    def _check(self, command: Command) -> None:
        if not command.argv:
            raise ValueError("a command needs at least the program's name")
        self._check_deadline()
        own = {None, self.user, str(os.getuid() if self._uid is None else self._uid)}
        if command.user not in own:
            raise SandboxError(
                f"a local sandbox runs everything as {self.user}; it cannot run a command as {command.user}"
            )

    # --- detached jobs ---

    async def start_job(self, command: Command) -> str:
        call = (await self._may_start(command)).call(command)
        order = Order(
            job_id=secrets.token_hex(6),
            command_id=call.command_id,
            argv=call.argv,
            cwd=call.cwd,
            env=call.env,
            output_cap=command.output_cap,
            timeout_s=command.timeout_s,
            ends_at=self._ends_at,
            control=None if self._sealed is None else str(self._control),
            uid=self._uid,
        )
        await in_thread(self._jobs.start, order, stdin_of(command), self._claimed.marker)
        return order.job_id

    @property
    def _jobs(self) -> Jobs:
        claimed = self._claimed  # or it has none
        if self._known_jobs is None:
            self._known_jobs = Jobs(self._control / "jobs", f"{claimed.id}.jobs")
        return self._known_jobs

    async def job(self, job_id: str) -> JobStatus:
        return await in_thread(lambda: self._jobs.get(job_id).status())

    async def wait_job(self, job_id: str, timeout_s: float | None = None) -> JobStatus:
        end = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        pause = 0.01
        # Its output is read once, at the end: it may be long, and a run has many jobs.
        while not await in_thread(lambda: self._jobs.get(job_id).has_ended()) and (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, 0.1)
        return await self.job(job_id)

    async def kill_job(self, job_id: str) -> None:
        await in_thread(lambda: self._jobs.kill(job_id))

    # --- files ---

    def _tree(self) -> Tree:
        return Tree(self._root, self._uid)


def remove_folders(ended: Claim) -> None:
    """Of a sandbox without processes: its folders, and then its record. Raises OSError."""
    for folder in ended.folders:
        remove_tree(Path(folder))
    ended.release()

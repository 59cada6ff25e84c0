"""The contract of sandboxes: places where a stranger's code runs, one per rollout.

Owns the protocols and their data types. A backend (`local`, `docker`, `e2b`, `harbor`) opens once per run and makes one
sandbox per rollout; `harness_trainer` is the only caller. A backend that can run a command in a box and move a tar
archive in and out is one file: it subclasses `remote.RemoteSandbox`, which owns everything else.

Paths are *inside* the sandbox: absolute, POSIX, e.g. "/app/main.py". A backend without a root of its own (local) maps
them below its folder and exports that folder as `$SANDBOX_ROOT` ("" elsewhere), so that a script written as
`${SANDBOX_ROOT:-}/logs/verifier/reward.txt` works everywhere.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from sandboxes.ownership import Keeper

FOLDERS = ("/app", "/logs/agent", "/logs/verifier", "/logs/artifacts", "/home", "/tmp")


class SandboxError(Exception):
    """The sandbox itself failed (could not start, disk full, service down): an infra failure, never the agent's."""


class SandboxGone(SandboxError):
    """The sandbox does not exist any more. Latched: every later call on it raises this at once."""


class SetupFailed(SandboxError):
    """What the task asks for cannot be had (image does not build, unhealthy): the same for every rollout of it.

    `log_path` is the build's or the health check's log, None when there is none.
    """

    def __init__(self, message: str, log_path: Path | None = None) -> None:
        super().__init__(message)
        self.log_path = log_path


class TooLarge(SandboxError):
    """A folder in the sandbox holds more than the caller wants to take. The sandbox is fine."""


class NoSuchPath(SandboxError):
    """There is no folder (`get_dir`) or regular file (`get_file`) at that path. The sandbox is fine."""


# --- what is asked for -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one sandbox; None = not limited. A backend says in `Traits.limits` which ones it holds.

    `deadline_s` is wall time from start until everything in the sandbox is killed.
    """

    cpus: float | None = None  # cores
    cpu_s: int | None = None  # CPU seconds per process
    memory_mb: int | None = None  # resident memory of the whole sandbox
    disk_mb: int | None = None  # written by the whole sandbox
    file_mb: int | None = None  # size of one file written
    processes: int | None = None  # of the whole sandbox
    deadline_s: float | None = None


class NetworkMode(enum.StrEnum):
    """What a sandbox can reach beyond its own loopback. Enforced by the network, not by settings of the agent."""

    NONE = "none"  # nothing at all
    PROXY_ONLY = "proxy-only"  # the capture gateway's agent port
    ALLOWLIST = "allowlist"  # that, and the named hosts through the interception proxy
    PUBLIC = "public"  # that, and the internet


@dataclass(frozen=True, slots=True)
class Network:
    """Example: Network(NetworkMode.ALLOWLIST, ("pypi.example", "*.files.example:443"))."""

    mode: NetworkMode = NetworkMode.PROXY_ONLY
    allow: tuple[str, ...] = ()  # HOST, HOST:PORT, HOST:* or *.SUFFIX; only with ALLOWLIST


@dataclass(frozen=True, slots=True)
class Mount:
    """A host folder that processes inside can read and never write, e.g. an installed agent.

    Backends that cannot mount (`Traits.mounts`) upload a copy instead.
    """

    source: Path
    target: str


@dataclass(frozen=True, slots=True)
class Healthcheck:
    """A shell command that must exit 0 before the agent starts; fields and defaults are Harbor's."""

    command: str
    interval_s: float = 5.0
    timeout_s: float = 30.0
    start_period_s: float = 0.0  # failures within it do not count
    start_interval_s: float = 5.0  # between tries within the start period
    retries: int = 3


@dataclass(frozen=True, slots=True)
class BoxSpec:
    """What one task's sandbox is made of. Two rollouts with equal specs can share an image and a pool.

    Example: BoxSpec("fix-bug", build_dir=Path("tasks/fix-bug/environment"), limits=Limits(memory_mb=2048)).
    Backends without images (local) take the files of `build_dir` other than its Dockerfile as the workspace. With an
    image and no Dockerfile beside it, every backend copies the files of `build_dir` into the working directory.
    """

    name: str  # of the task; for labels, logs and messages
    build_dir: Path | None = None  # holds a Dockerfile and the files it uses
    image: str | None = None  # a finished image (Docker) or template (E2B); wins over `build_dir`
    env: Mapping[str, str] = field(default_factory=dict)  # of every process
    workdir: str | None = None  # None = the image's own if it sets one, else /app
    user: str | None = None  # name or uid; None = the image's own if it is not root, else see the backend
    limits: Limits = Limits()
    network: Network = Network()
    mounts: tuple[Mount, ...] = ()
    healthcheck: Healthcheck | None = None
    build_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A service that sandboxes reach. At least `url` or `socket` is set.

    Example: Endpoint(url="http://127.0.0.1:8101", socket=None, public_url="https://x.tunnel.example").
    """

    url: str | None = None  # as this host reaches it
    socket: Path | None = None  # its Unix socket on this host; spares a hop
    public_url: str | None = None  # as a sandbox on somebody else's machine reaches it
    public_url_file: Path | None = None  # holds that address while it can be reached: a tunnel's may change

    def public_now(self) -> str | None:
        """The public address at this moment; None = there is none, or not now. Blocking, but short."""
        if self.public_url_file is None:
            return self.public_url
        try:
            return self.public_url_file.read_text(encoding="utf-8").strip() or None
        except FileNotFoundError:
            return None


@dataclass(frozen=True, slots=True)
class Proxy:
    """An interception proxy and the hosts that it lets through. Tasks with different lists need one each.

    Whoever runs an agent behind it gives the agent the proxy's variables (with `Sandbox.proxy_url`) and `ca_dir` as a
    `Mount`: backends only make the proxy reachable.

    Example: Proxy(Endpoint(url="http://127.0.0.1:8103"), ("mirror.example",)).
    """

    endpoint: Endpoint
    allow: tuple[str, ...]  # entries as in `Network.allow`
    ca_dir: Path | None = None  # host folder with the certificate files that agents may read

    def serves(self, network: Network) -> bool:
        return {entry.lower() for entry in self.allow} == {entry.lower() for entry in network.allow}


@dataclass(frozen=True, slots=True)
class Access:
    """What sandboxes of this run are led to. None or () = there is no such service."""

    gateway: Endpoint | None = None  # the capture gateway's agent port
    proxies: tuple[Proxy, ...] = ()  # one per allow-list of the run's tasks

    def proxy_for(self, network: Network) -> Proxy | None:
        """The proxy with exactly the network's allow-list: another one would let through more, or less."""
        return next((proxy for proxy in self.proxies if proxy.serves(network)), None)

    def now(self) -> Access:
        """With the public address of this moment. Raises SandboxError while there is none that should be there."""
        gateway = self.gateway
        if gateway is None or gateway.public_url_file is None:
            return self
        url = gateway.public_now()
        if url is None:
            raise SandboxError("the gateway cannot be reached from outside now: its tunnel is being opened again")
        return replace(self, gateway=replace(gateway, public_url=url))

    async def soon(self, within_s: float = 120.0) -> Access:
        """`now`, waiting for a tunnel that is being opened again."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                return self.now()
            except SandboxError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.5)

    def require_same(self, url: str | None) -> None:
        """For a sandbox that was led to the gateway at `url`. Raises SandboxGone when that is not its address any more.

        What an agent did meanwhile says nothing of it: its calls went nowhere.
        """
        if url is not None and self.gateway is not None and self.gateway.public_url_file is not None:
            now = self.gateway.public_now()
            if now != url:
                what = "cannot be reached from outside now" if now is None else f"has moved to {now}"
                raise SandboxGone(f"the gateway {what}: this sandbox was made for {url}")


# --- commands ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Command:
    """A command to run. `argv` is executed as is, without a shell; for a script use `Command.shell`."""

    argv: Sequence[str]
    cwd: str | None = None  # None = the sandbox's working directory
    env: Mapping[str, str] = field(default_factory=dict)  # added to the sandbox's own environment
    stdin: str | None = None  # None = /dev/null
    timeout_s: float | None = None  # None = the sandbox's deadline
    output_cap: int = 4_000_000  # bytes kept of each stream, half from its start and half from its end
    user: str | None = None  # name or uid; None = the sandbox's user. Only where `Traits.users`

    @classmethod
    def shell(cls, script: str, **options: object) -> Self:
        """The script run by `sh -c`."""
        return cls(["sh", "-c", script], **options)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a command did. Example: RunResult(exit_code=0, stdout="hi\\n", stderr="", timed_out=False, truncated=False).

    Undecodable bytes are escaped (`\\xff`). `truncated` says that a stream was longer than the cap and was cut with a
    marker line. `exit_code` follows the shell's convention (128 + N = ended by signal N; 126 and 127 = could not be
    run), None when it was still running at the time limit and was killed.
    """

    exit_code: int | None
    stdout: str
    stderr: str
    timed_out: bool
    truncated: bool
    duration_s: float = 0.0
    oom: bool = False  # evidence that the memory limit ended a process during the command


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A detached command at one moment. `exit_code` None = it runs, or was killed before it left one (`lost`)."""

    running: bool
    exit_code: int | None
    stdout: str  # so far, cut like RunResult's
    stderr: str
    truncated: bool
    lost: bool = False  # it is gone without an exit code (kill_all, an out-of-memory kill of everything)
    timed_out: bool = False  # it was killed at its own time limit; exit_code is None then
    oom: bool = False  # evidence that the memory limit ended a process while it ran
    duration_s: float | None = None  # from its start to its end, as the sandbox says; None = it runs, or nobody noted


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An entry that `get_dir` did not copy. Example: LeftOut(".venv/bin/python", link="/usr/bin/python3")."""

    name: str  # relative to the folder
    link: str | None = None  # where it points, as written; None = no link: a special file, or an unsafe name


# --- the boxes ---------------------------------------------------------------------------------------------------


class Sandbox(Protocol):
    """One sandbox. An async context manager: entering starts it, leaving stops it on every path.

    The folders of `FOLDERS` exist after start and the sandbox's user may write in them.
    """

    @property
    def sandbox_id(self) -> str: ...

    @property
    def description(self) -> str:
        """One line for people; says plainly when the backend is no security boundary."""
        ...

    @property
    def user(self) -> str | None:
        """Who commands run as: a name or uid, "root" for uid 0; None = cannot be told."""
        ...

    @property
    def workdir(self) -> str: ...

    @property
    def gateway_url(self) -> str | None:
        """The capture gateway as processes inside reach it, http://HOST:PORT; None = they cannot."""
        ...

    @property
    def proxy_url(self) -> str | None:
        """The interception proxy as processes inside reach it; None = they cannot."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def renew(self) -> None:
        """For a box that was started ahead of need, when it is handed out: `Limits.deadline_s` counts from now.

        Raises SandboxGone unless the box exists and runs. Cheap: a question to the service, no command inside.
        """
        ...

    async def run(self, command: Command) -> RunResult:
        """Run to completion, time limit or deadline.

        At a time limit nothing of the command stays alive, whatever it did (ignored signals, new sessions). A command
        that starts something in the background and ends returns at once; what it started lives on. Raises SandboxError
        when the sandbox fails or is gone; a failing command is a result, not an error.
        """
        ...

    async def start_job(self, command: Command) -> str:
        """Start a command that outlives the caller, and return its id. `timeout_s` is held inside the sandbox."""
        ...

    async def job(self, job_id: str) -> JobStatus:
        """Raises KeyError for an id that this sandbox never had."""
        ...

    async def wait_job(self, job_id: str, timeout_s: float | None = None) -> JobStatus:
        """The status when the job has ended or `timeout_s` has passed (then `running`)."""
        ...

    async def kill_job(self, job_id: str) -> None:
        """End everything of the job. Idempotent."""
        ...

    async def keep(self, keeper: Keeper, until: float) -> None:
        """Should this process be killed, no reaper takes the sandbox: a successor may `Backend.attach` it.

        While `keeper` lives, and not after `until` (Unix seconds). Where a sandbox cannot be attached nothing changes.
        Raises SandboxError.
        """
        ...

    async def put_dir(self, source: Path, target: str) -> None:
        """Copy a host folder's *contents* into `target` (created), permissions kept, owned by the sandbox's user.

        Raises SandboxError for symlinks that leave `source` and for special files.
        """
        ...

    async def put_file(self, source: Path, target: str) -> None: ...

    async def put_text(self, text: str, target: str, mode: int = 0o644) -> None: ...

    async def get_dir(self, path: str, target: Path, *, cap: int | None = None) -> tuple[LeftOut, ...]:
        """Copy a folder's contents into the host folder `target` (created), permissions kept.

        Never writes outside `target`: entries that would, links that leave it (absolute ones all) and special files
        are left out, and named in the answer. `cap` = most bytes to take, None = no limit. Raises TooLarge above it
        (what was copied so far may stay in `target`), NoSuchPath when `path` is no folder (a link to one is none).
        """
        ...

    async def get_file(self, path: str, target: Path, *, cap: int | None = None) -> None:
        """Copy a regular file (a link to one is none). Raises NoSuchPath, and TooLarge like `get_dir`."""
        ...

    async def get_text(self, path: str, cap: int = 1_000_000) -> str | None:
        """The file's text (undecodable bytes escaped, at most `cap` bytes), or None if it is no regular file."""
        ...

    async def reset_dir(self, path: str, *, private: bool = False) -> None:
        """Make `path` an empty folder of our own: whatever was there (file, symlink, folder) is removed first.

        `private` = where `Traits.users`, it and its new parents belong to root and nobody else may enter or write.
        """
        ...

    async def kill_all(self) -> None:
        """Kill every process of the sandbox (the agent's left-overs, before verifying)."""
        ...

    def resolve(self, path: str) -> str:
        """The path as a process inside the sandbox sees it (local: the host path; containers: unchanged)."""
        ...

    async def stop(self) -> None:
        """Kill everything and remove what was created. Idempotent, never raises for what is already gone."""
        ...


@dataclass(frozen=True, slots=True)
class Traits:
    """What a backend can do.

    Example: Traits(boundary=True, users=True, mounts=True, networks=frozenset(NetworkMode), limits=frozenset()).
    """

    boundary: bool  # a stranger's code cannot read or write this machine
    users: bool  # commands may run as another user, root among them
    mounts: bool  # False = mounts are uploaded
    networks: frozenset[NetworkMode]
    limits: frozenset[str]  # names of the fields of `Limits` that it enforces
    escalation: bool = False  # an ordinary user may become root (sudo and the like): users are no boundary inside


class Backend(Protocol):
    """One kind of sandbox, open for one run. An async context manager; leaving it stops every sandbox it made."""

    @property
    def traits(self) -> Traits: ...

    async def __aenter__(self) -> Self:
        """Raises SandboxError, with what to do, when the backend cannot be used here (no engine, no key)."""
        ...

    async def __aexit__(self, *exc: object) -> None: ...

    def check(self, spec: BoxSpec) -> None:
        """Raises SandboxError when a sandbox of `spec` cannot be had here (a network mode, a limit, a user)."""
        ...

    async def prepare(self, spec: BoxSpec) -> None:
        """Whatever is slow and the same for all sandboxes of `spec`: building its image, once. Raises SetupFailed."""
        ...

    def sandbox(self, spec: BoxSpec) -> Sandbox:
        """A sandbox that is not started yet: enter it as an async context manager. Starting prepares it if need be."""
        ...

    async def attach(self, sandbox_id: str) -> Sandbox:
        """A started sandbox whose maker died, now owned by this process. Raises SandboxGone when it does not exist."""
        ...

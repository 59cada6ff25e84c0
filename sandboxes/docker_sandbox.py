"""One sandbox in a Docker engine: its container, its place in the network, and the five primitives on them.

Owns what a container of ours is made of and how it ends. Everything that happens inside is `remote`'s; images, networks
and labels have modules of their own. Made by `docker`. Each call to the engine runs in a thread to its end, and removal
waits for those that were begun, so that cancelling a caller leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import io
import json
import logging
import secrets
import tarfile
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, Protocol, TypeVar, cast

import docker
from docker.errors import APIError
from docker.types import LogConfig, Mount, Ulimit

from sandboxes import inside
from sandboxes.base import BoxSpec, Command, NoSuchPath, RunResult, SandboxError, SandboxGone, SetupFailed
from sandboxes.box_calls import Exec, OnOutput
from sandboxes.docker_api import ENGINE_ERRORS, is_absent, reason
from sandboxes.docker_images import Images
from sandboxes.docker_labels import PROJECT, labels_of
from sandboxes.docker_network import DockerNetwork
from sandboxes.docker_reaping import Thing, remove_thing
from sandboxes.docker_sidecar import NetworkLink
from sandboxes.docker_spares import sandbox_claim
from sandboxes.docker_stream import Stream, can_end_input
from sandboxes.docker_volumes import socket_volume
from sandboxes.ownership import Claim, Keeper
from sandboxes.remote import RemoteSandbox

log = logging.getLogger(__name__)

BOX = f"{PROJECT}.box"  # label: what another process must know to take the container over, as JSON
UNPRIVILEGED = "1000"  # where neither task nor image say who commands run as
_CHUNK = 1 << 20
_NUM_LOOKS, _LOOK_S = 4, 0.1
_NOT_STARTED = (b"OCI runtime exec failed", b"unable to find user", b"unable to find group")  # in place of its output
_T = TypeVar("_T")

# All that root in a box may do beyond a user. CHOWN, DAC_OVERRIDE, FOWNER, FSETID: files of anybody's, as package
# managers and our own file transfer need them. SETUID, SETGID: become another user. KILL and SYS_PTRACE: find and end
# every process in the box, whoever it runs as. NET_BIND_SERVICE: servers of tasks on their usual ports.
CAPABILITIES = (
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "NET_BIND_SERVICE",
    "SETGID",
    "SETUID",
    "SYS_PTRACE",
)

# The first process. As such nothing in the box can kill it, not even a root that kills everything; `wait` buries the
# orphans that it inherits. A shell that cannot fork, in a box full of processes, ends: it starts anew in its place.
_INIT = 'trap "exec /bin/sh -c \\"\\$0\\" \\"\\$0\\"" EXIT; while :; do sleep 2147483647 & wait $!; done'


def is_local(address: str) -> bool:
    """Whether the engine sees this machine's folders; one elsewhere is given copies."""
    return address.startswith("unix://") and socket_volume() is None


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What an image says about itself; "" and () = nothing."""

    user: str
    workdir: str
    entrypoint: tuple[str, ...]
    has_home: bool  # sets the variable HOME


class Engine(Protocol):
    """What a sandbox needs of its backend."""

    api: docker.APIClient
    address: str
    run_id: str
    registry: Path
    default_image: str
    images: Images
    network: DockerNetwork
    calls: ThreadPoolExecutor  # short
    streams: ThreadPoolExecutor  # one thread per command that runs
    creating: asyncio.Semaphore

    async def facts(self, image: str) -> ImageFacts: ...

    def forget(self, sandbox: DockerSandbox) -> None: ...


class DockerSandbox(RemoteSandbox):
    """See `sandboxes.base.Sandbox`. `sandbox_id` is the container's name, and its claim's id."""

    admin: ClassVar[str | None] = "0"
    kind: ClassVar[str] = "docker"
    kill_limit_s: ClassVar[float] = 5.0

    def __init__(self, engine: Engine, spec: BoxSpec, *, log_dir: Path | None = None) -> None:
        super().__init__(spec, log_dir=log_dir)
        self.mounts = is_local(engine.address)
        self._engine = engine
        self._api = engine.api
        self._claim: Claim | None = None
        self._link: NetworkLink | None = None
        self._restarting = False
        self._begun: set[asyncio.Future[Any]] = set()  # calls in threads that may still make something

    @property
    def description(self) -> str:
        return f"docker sandbox {self._id or '(not started)'} at {self._engine.address}"

    # --- creation ---

    async def _create(self) -> str:
        engine, spec = self._engine, self.spec
        image = await engine.images.ensure(spec, engine.default_image)
        facts = await engine.facts(image)
        self._settle(facts)
        await engine.network.prepare(spec.network)
        with engine.network.spares.held_back():
            owned, link = await self._take_place()
            self._gateway_url, self._proxy_url = link.gateway_url, link.proxy_url
            async with engine.creating:
                try:
                    # The container can be created, but not started, before the sidecar whose network it joins.
                    await asyncio.gather(link.start(), self._thread(lambda: self._create_container(image, facts)))
                    await self._thread(lambda: self._api.start(owned.id))
                except ENGINE_ERRORS as e:
                    raise self._create_error(e, image) from e
        return owned.id

    async def _take_place(self) -> tuple[Claim, NetworkLink]:
        """On record and in the network: a spare's, where one is there."""
        network, wanted = self._engine.network, self.spec.network
        spare = network.take_spare(wanted)
        if spare is not None:
            self._claim, self._link = spare.claim, spare.link  # ours to remove before anything can be cancelled
            try:
                await self._thread(spare.claim.renew)
            except OSError as e:
                raise SandboxError(f"cannot write to {spare.claim.registry}: {e}; free space") from e
            return spare.claim, spare.link
        owned = await self._thread(self._make_claim)
        self._link = network.link(owned.id, wanted, owned)
        return owned, self._link

    def _make_claim(self) -> Claim:
        """Removal waits for the thread, and must find it then, whoever was cancelled."""
        engine = self._engine
        self._claim = sandbox_claim(engine.registry, run_id=engine.run_id, address=engine.address)
        return self._claim

    def _settle(self, facts: ImageFacts) -> None:
        """Who commands run as and where: the spec's word, else the image's."""
        spec = self.spec
        has_own_image = spec.image is not None or spec.build_dir is not None
        image_user = None if facts.user in ("", "0", "root") else facts.user
        self._user_wanted = spec.user or image_user or ("0" if has_own_image else UNPRIVILEGED)
        self._workdir = spec.workdir or facts.workdir.rstrip("/") or "/app"
        self._home_is_set = facts.has_home

    def _create_container(self, image: str, facts: ImageFacts) -> None:
        assert self._claim is not None and self._link is not None
        spec, init = self.spec, ["-c", _INIT, _INIT]
        # A task's own image may start its services by its entrypoint, which runs what it is given in the end.
        keep = bool(facts.entrypoint) and (spec.image is not None or spec.build_dir is not None)
        box = {
            "name": spec.name,
            "user": self._user_wanted,
            "workdir": self._workdir,
            "network": spec.network.mode,
            "allow": spec.network.allow,
            "deadline_s": spec.limits.deadline_s,
        }
        options: dict[str, Any] = {"hostname": "sandbox"} if self._link.options["network_mode"] == "none" else {}
        self._api.create_container(
            image,
            [inside.SHELL, *init] if keep else init,
            name=self._claim.id,
            entrypoint=None if keep else [inside.SHELL],
            user=facts.user if keep else "0:0",
            working_dir="/",
            environment=dict(spec.env),
            use_config_proxy=False,  # this user's own proxy, perhaps with its password, is nothing for a stranger
            labels={**labels_of(self._claim, "container"), BOX: json.dumps(box)},
            healthcheck={"test": ["NONE"]},  # the image's own would run beside ours
            host_config=self._api.create_host_config(**self._host_options()),
            **options,
        )

    def _host_options(self) -> dict[str, Any]:
        assert self._link is not None
        limits = self.spec.limits
        ulimits = [Ulimit(name="core", soft=0, hard=0)]
        if limits.file_mb is not None:
            ulimits.append(Ulimit(name="fsize", soft=limits.file_mb * 2**20, hard=limits.file_mb * 2**20))
        if limits.cpu_s is not None:
            ulimits.append(Ulimit(name="cpu", soft=limits.cpu_s, hard=limits.cpu_s))
        options: dict[str, Any] = {
            **self._link.options,
            "cap_drop": ["ALL"],
            "cap_add": list(CAPABILITIES),
            "security_opt": ["no-new-privileges"],
            "ulimits": ulimits,
            "mounts": [
                Mount(m.target, str(m.source.resolve()), "bind", read_only=True)
                for m in (self.spec.mounts if self.mounts else ())
            ],
            "log_config": LogConfig(type="json-file", config={"max-size": "1m", "max-file": "1"}),
        }
        if limits.processes is not None:
            options["pids_limit"] = limits.processes
        if limits.memory_mb is not None:  # the same for both: no swap
            options["mem_limit"] = options["memswap_limit"] = limits.memory_mb * 2**20
        if limits.cpus is not None:
            options["nano_cpus"] = round(limits.cpus * 1e9)
        if limits.disk_mb is not None:
            options["storage_opt"] = {"size": f"{limits.disk_mb}M"}
        return options

    def _create_error(self, error: Exception, image: str) -> SandboxError:
        said = reason(error)
        if isinstance(error, APIError) and error.status_code == 404 and "image" in said.lower():
            self._engine.images.forget(image)
        where = f"the sandbox of {self.spec.name}"
        if f"{inside.SHELL}: no such file" in said or "executable file not found" in said:
            return SetupFailed(f"{where} cannot start: its image has no {inside.SHELL}; use an image with a shell")
        if "storage-opt" in said or "storage_opt" in said:
            return SetupFailed(f"{where} cannot have a disk limit here ({said}); leave the limit out")
        return SandboxError(f"{where} could not be created: {said}")

    async def _set_up(self, how: Literal["new", "again", "adopt"] = "new") -> None:
        try:
            if how == "new" and self._link is not None:
                # A relay that does not listen yet is missed by nobody before the sandbox is handed out.
                with self._engine.network.spares.held_back():
                    await asyncio.gather(super()._set_up(how), self._link.ready())
                self._engine.network.order_spare(self.spec.network)
            else:
                await super()._set_up(how)
        except SandboxGone as e:
            if how != "new":
                raise
            last = await self._thread(lambda: self._last_words(self.sandbox_id))
            raise SetupFailed(f"the sandbox of {self.spec.name} ended as soon as it was started: {last or e}") from e

    def _last_words(self, name: str) -> str:
        with contextlib.suppress(*ENGINE_ERRORS):
            lines = self._api.logs(name, tail=5).decode(errors="replace").strip().splitlines()
            return lines[-1][:300] if lines else ""
        return ""

    async def run(self, command: Command) -> RunResult:
        result = await super().run(command)
        if self._link is not None:
            await self._link.check()  # what it failed at may be the way to the gateway
        return result

    async def keep(self, keeper: Keeper, until: float) -> None:
        self._ready()
        owned = self._claim
        assert owned is not None
        try:
            await self._engine.network.keep(keeper, until)
            await self._thread(lambda: owned.keep(keeper, until))
        except OSError as e:
            raise SandboxError(f"cannot write to {owned.registry}: {e}; free space") from e

    async def take_over(self, owned: Claim) -> None:
        """Continue a container that another process made. Raises SandboxGone or SandboxError; stop it then."""
        self._claim = owned
        self._link = link = await self._engine.network.adopt(owned.id, self.spec.network)
        self._gateway_url, self._proxy_url = link.gateway_url, link.proxy_url
        await self.adopt(owned.id)

    # --- the primitives ---

    async def _exec(self, command: Exec, on_output: OnOutput) -> int | None:
        if command.stdin and not can_end_input(self._api):
            command = await self._with_stdin_file(command)
        stream = Stream(self._api, self._name(), command, on_output)
        future = asyncio.get_running_loop().run_in_executor(self._engine.streams, stream.run)
        try:
            code = await asyncio.shield(future)
        except asyncio.CancelledError:
            stream.leave()
            future.add_done_callback(lambda f: f.cancelled() or f.exception())
            raise
        except ENGINE_ERRORS as e:
            raise await self._explained(e) from e
        not_started = code == 126 and stream.first.startswith(_NOT_STARTED)
        for _ in range(_NUM_LOOKS if code == 137 or not_started else 0):
            # Perhaps the container ended, which the engine may notice a little later.
            if not self._restarting:
                await self._look()
            await asyncio.sleep(_LOOK_S)
        if not_started:
            raise SandboxError(f"the Docker engine could not run a command: {_one_line(stream.first)}")
        return code

    async def _with_stdin_file(self, command: Exec) -> Exec:
        """The command with its input in a file of the box; only its random name keeps others from reading it."""
        name = f"stdin-{secrets.token_hex(16)}"
        info = tarfile.TarInfo(f"tmp/.{name}")
        info.size, info.mode = len(command.stdin), 0o444
        with tempfile.TemporaryFile() as file:
            with tarfile.open(fileobj=file, mode="w") as tar:
                tar.addfile(info, io.BytesIO(command.stdin))
            file.seek(0)
            await self._upload(cast(BinaryIO, file), "/")
        script = 'exec 9<"$1"; rm -f "$1" 2>/dev/null; shift; exec "$@" <&9 9<&-'
        argv = [inside.SHELL, "-c", script, "sh", f"/{info.name}", *command.argv]
        return dataclasses.replace(command, argv=argv, stdin=b"")

    async def _upload(self, archive: BinaryIO, target: str) -> None:
        await self._asked(lambda: self._api.put_archive(self._name(), target, archive))

    async def _download(self, path: str, archive: BinaryIO) -> None:
        cancelled = threading.Event()

        def copy() -> None:
            chunks, _ = self._api.get_archive(self._name(), path, chunk_size=_CHUNK)
            for chunk in chunks:
                if cancelled.is_set():
                    return
                archive.write(chunk)

        try:
            await self._asked(copy)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        except SandboxGone:
            raise
        except SandboxError as e:
            if isinstance(e.__cause__, APIError) and is_absent(e.__cause__):
                raise NoSuchPath(f"there is nothing at {path} in the sandbox") from e
            raise

    async def _look(self) -> None:
        seen = await self._asked(lambda: self._api.inspect_container(self._name()))
        if not seen["State"]["Running"]:
            raise _ended(seen["State"])
        if self._link is not None:
            await self._link.check()

    async def _kill_hard(self) -> bool:
        self._restarting = True
        try:
            await self._asked(lambda: self._api.restart(self._name(), timeout=0))
        finally:
            self._restarting = False
        await self._set_up("again")
        return True

    async def _destroy(self) -> None:
        while self._begun:
            await asyncio.wait(set(self._begun))
        if self._claim is None:
            return
        owned, problem = self._claim, ""
        thing = Thing("container", owned.id, owned.id, {})
        problem = await self._thread(lambda: remove_thing(self._api, thing))
        if self._link is not None:
            try:
                await self._link.remove()
            except SandboxError as e:
                problem = problem or str(e)
        if problem:
            raise SandboxError(problem)
        await self._thread(owned.release)
        self._claim = None
        self._engine.forget(self)

    # --- calls ---

    def _name(self) -> str:
        if self._claim is None:
            raise SandboxGone("the sandbox is gone: its container was removed")
        return self._claim.id

    async def _thread(self, work: Callable[[], _T]) -> _T:
        """In a thread, where it goes on when the caller is cancelled."""
        future = asyncio.get_running_loop().run_in_executor(self._engine.calls, work)
        self._begun.add(future)
        future.add_done_callback(self._begun.discard)
        future.add_done_callback(lambda f: f.cancelled() or f.exception())
        return await asyncio.shield(future)

    async def _asked(self, work: Callable[[], _T]) -> _T:
        try:
            return await self._thread(work)
        except ENGINE_ERRORS as e:
            raise await self._explained(e) from e

    async def _explained(self, error: Exception) -> SandboxError:
        """What a failed call means: the container is gone only if the engine says so."""
        said = reason(error)
        if not isinstance(error, APIError):
            return SandboxError(f"the Docker engine at {self._engine.address} failed ({said}); look at its log")
        if error.status_code not in (404, 409, 500):
            return SandboxError(f"the Docker engine refused: {said}")
        try:
            seen = await self._thread(functools.partial(self._api.inspect_container, self._name()))
        except ENGINE_ERRORS as e:
            if is_absent(e):
                return SandboxGone("the sandbox is gone: its container was removed")
            return SandboxError(f"the Docker engine at {self._engine.address} failed ({reason(e)}); look at its log")
        if not seen["State"]["Running"] and not self._restarting:
            return _ended(seen["State"])
        return SandboxError(f"the Docker engine refused: {said}")


def _one_line(text: bytes) -> str:
    return " ".join(text.decode(errors="replace").split())[:300]


def _ended(state: dict[str, Any]) -> SandboxGone:
    why = "out of memory" if state.get("OOMKilled") else f"exit code {state.get('ExitCode')}"
    said = f": {state['Error']}" if state.get("Error") else ""
    return SandboxGone(f"the sandbox is gone: its container ended ({why}{said})")

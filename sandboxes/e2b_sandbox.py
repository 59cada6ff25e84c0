"""One sandbox in E2B's cloud: the five primitives below `RemoteSandbox`, its start and its end.

Owns the claim on it, and what its being gone means: from then on every call fails at once, whatever it was doing. That
it is kept alive while it is used is `e2b_lifetime`, what is done in it first `e2b_setup`, how E2B is asked
`e2b_service`, what happens inside `e2b_envd`. Made by `e2b`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import posixpath
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, ClassVar

from e2b import AsyncSandbox

from sandboxes import inside
from sandboxes.archive import names_in
from sandboxes.base import (
    Access,
    BoxSpec,
    NoSuchPath,
    SandboxError,
    SandboxGone,
    SetupFailed,
)
from sandboxes.docker_labels import labels_of
from sandboxes.e2b import E2BConfig
from sandboxes.e2b_envd import NO_LIMITS, Envd
from sandboxes.e2b_lifetime import Lifetime, wanted_s
from sandboxes.e2b_network import Reach
from sandboxes.e2b_service import (
    E2B_ERRORS,
    Connection,
    Order,
    Service,
    as_sandbox_error,
    heeding_cancellation,
    may_be_gone,
)
from sandboxes.e2b_setup import defaults_of, prepare
from sandboxes.e2b_templates import Templates
from sandboxes.ownership import Claim, Keeper, LifecycleError, claim
from sandboxes.remote import Exec, OnOutput, RemoteSandbox

log = logging.getLogger(__name__)

GATEWAY = "harness-trainer.gateway"  # in a sandbox's metadata: where it was told to find the gateway


@dataclass(slots=True)
class Shared:
    """What the sandboxes of one backend have in common. `look_s`: how often one looks whether it still exists."""

    service: Service
    templates: Templates
    registry: Path
    run_id: str
    default_template: str
    create_timeout_s: float
    look_s: float
    claim_ids: set[str] = field(default_factory=set)  # of every sandbox made
    defaults: dict[str, tuple[str, str | None]] = field(default_factory=dict)  # template -> its user and workdir


def share(
    config: E2BConfig,
    *,
    run_id: str,
    registry: Path,
    cache: Path | None,
    api_key: str | None,
    look_s: float,
    first_wait_s: float,
) -> Shared:
    """For `e2b.E2BBackend`. Raises SandboxError, with what to do, when there is no key."""
    connection = Connection(api_key, config.domain, config.api_url, config.sandbox_url)
    if not connection.has_key:
        raise SandboxError("E2B needs an API key: set E2B_API_KEY (https://e2b.dev/dashboard?tab=keys)")
    return Shared(
        service=Service(connection, max_creating=config.max_creating, first_wait_s=first_wait_s),
        templates=Templates(connection, cache=cache),
        registry=registry,
        run_id=run_id,
        default_template=config.template,
        create_timeout_s=config.create_timeout_s,
        look_s=look_s,
    )


class E2BSandbox(RemoteSandbox):
    """See `sandboxes.base.Sandbox`. `sandbox_id` is E2B's."""

    kind: ClassVar[str] = "E2B"

    def __init__(
        self,
        spec: BoxSpec,
        reach: Reach,
        shared: Shared,
        *,
        access: Access,
        reach_by: Callable[[Access], Reach],
        log_dir: Path | None = None,
    ) -> None:
        """`reach_by`: the same for the addresses of the moment at which it is made."""
        super().__init__(spec, gateway_url=reach.gateway_url, proxy_url=reach.proxy_url, log_dir=log_dir)
        self._reach = reach
        self._access = access
        self._reach_by = reach_by
        self._shared = shared
        self._service = shared.service
        self._claiming: asyncio.Future[Claim] | None = None  # a cancelled start must not forget what it put on record
        self._box_id: str | None = None
        self._doubt = False  # others of our claim may exist
        self._envd: Envd | None = None
        self._lifetime: Lifetime | None = None
        self._calls: set[asyncio.Timeout] = set()  # under way inside the sandbox

    # --- start ---

    async def _create(self) -> str:
        template = await self._shared.templates.ensure(self.spec, self._shared.default_template)
        self._reach = self._reach_by(await self._access.soon())
        self._gateway_url, self._proxy_url = self._reach.gateway_url, self._reach.proxy_url
        addresses = await self._resolve()
        self._claiming = asyncio.ensure_future(self._make_claim())
        owned = await asyncio.shield(self._claiming)
        deadline_s = self.spec.limits.deadline_s
        order = Order(
            template=template,
            metadata={
                **labels_of(owned, "sandbox"),
                "harness-trainer.task": self.spec.name,
                GATEWAY: self._gateway_url or "",
            },
            network=self._reach.options(addresses),
            lifetime_s=self._service.cut(self._wanted_s()),
        )
        within_s = (
            self._shared.create_timeout_s if deadline_s is None else min(self._shared.create_timeout_s, deadline_s)
        )
        self._doubt = True  # until we know better: we may be cancelled at any moment
        try:
            with heeding_cancellation():
                sandbox, self._doubt = await self._service.create(order, within_s=within_s)
                self._box_id = sandbox.sandbox_id
        except SetupFailed:
            await asyncio.to_thread(self._shared.templates.forget, template)
            raise
        self._take(sandbox)
        await self._prepare(template, addresses)
        return sandbox.sandbox_id

    async def _make_claim(self) -> Claim:
        engine = f"e2b:{self._service.connection.address}"
        try:
            made = await asyncio.to_thread(
                lambda: claim(self._shared.registry, "e2b", run_id=self._shared.run_id, engine=engine)
            )
        except LifecycleError as e:
            raise SandboxError(str(e)) from e
        self._shared.claim_ids.add(made.id)
        return made

    def _take(self, sandbox: AsyncSandbox) -> None:
        self._box_id = sandbox.sandbox_id
        self._lifetime = Lifetime(
            self._service, self._box_id, wanted=self._wanted_s, gone=self._latch, look_s=self._shared.look_s
        )
        self._envd = Envd(sandbox)
        self._lifetime.start()

    def _wanted_s(self) -> float:
        return wanted_s(self.spec.limits.deadline_s, self._ends_at)

    async def keep(self, keeper: Keeper, until: float) -> None:
        self._ready()
        assert self._claiming is not None
        owned = await self._claiming
        try:
            await asyncio.to_thread(owned.keep, keeper, until)
        except OSError as e:
            raise SandboxError(f"cannot write to {owned.registry}: {e}; free space") from e

    async def take_over(self, sandbox: AsyncSandbox, owned: Claim, gateway_url: str | None) -> None:
        """The sandbox of a process that died, which led it to `gateway_url`; `owned` is ours now."""
        self._gateway_url = gateway_url
        self._claiming = asyncio.get_running_loop().create_future()
        self._claiming.set_result(owned)
        self._shared.claim_ids.add(owned.id)
        self._take(sandbox)
        await self.adopt(sandbox.sandbox_id)

    async def _resolve(self) -> dict[str, str]:
        """IPv4 addresses of the names that the network options or /etc/hosts need."""
        addresses: dict[str, str] = {}
        for name in self._reach.to_resolve:
            try:
                found = await asyncio.get_running_loop().getaddrinfo(name, None, family=socket.AF_INET)
            except OSError as e:
                raise SandboxError(f"{name}, which the sandbox is to reach, cannot be looked up: {e.strerror}") from e
            addresses[name] = str(found[0][4][0])
        return addresses

    async def _prepare(self, template: str, addresses: dict[str, str]) -> None:
        """Before the usual set-up. A template is asked once who its user is."""
        defaults = self._shared.defaults
        if template not in defaults:
            defaults[template] = await defaults_of(template, self._collect)
        user, workdir = defaults[template]
        self._user_wanted = self._user_wanted or user
        self._workdir = self.spec.workdir or workdir or self._workdir
        lines = [] if self._reach.wildcards else [f"{address} {name}" for name, address in addresses.items()]
        await prepare(self.spec, self._user_wanted, self._workdir, "\n".join(lines), self._collect)

    # --- being gone ---

    async def _look_if_possible(self) -> None:
        assert self._lifetime is not None
        await self._lifetime.look_if_possible()

    async def renew(self) -> None:
        await super().renew()
        with self._latched():
            await asyncio.to_thread(self._access.require_same, self._gateway_url)
            assert self._lifetime is not None
            await self._lifetime.extend()

    def _latch(self, error: SandboxGone) -> None:
        """Every later call fails at once, and those under way now."""
        if self._gone is None:
            self._gone = error
        for call in self._calls:
            if not call.expired():
                call.reschedule(asyncio.get_running_loop().time())

    # --- inside ---

    @contextlib.asynccontextmanager
    async def _inside(self, what: str) -> AsyncIterator[Envd]:
        """The daemon, for one call. Whatever it raises comes out as SandboxGone or SandboxError."""
        if self._gone is not None:
            raise SandboxGone(str(self._gone))
        if self._envd is None:
            raise SandboxError("the sandbox is not started; use it in `async with`")
        try:
            with heeding_cancellation():
                async with asyncio.timeout(None) as call:
                    self._calls.add(call)
                    try:
                        yield self._envd
                    finally:
                        self._calls.discard(call)
        except SandboxError as e:
            if isinstance(e, SandboxGone):
                self._latch(e)
            raise
        except E2B_ERRORS as e:
            if self._gone is not None:
                raise SandboxGone(str(self._gone)) from e
            raise await self._meaning(e, what) from e

    async def _meaning(self, error: Exception, what: str) -> SandboxError:
        """A failure while the sandbox ends looks like many others, a time-out among them: E2B's API knows."""
        meant = as_sandbox_error(error, f"{what} in E2B sandbox {self._box_id} failed")
        if may_be_gone(error) and not isinstance(meant, SandboxGone):
            try:
                await self._look_if_possible()
            except SandboxGone as e:
                meant = e
        if isinstance(meant, SandboxGone):
            self._latch(meant)
        return meant

    async def _exec(self, command: Exec, on_output: OnOutput) -> int | None:
        limits = NO_LIMITS if command.env.get(inside.OURS) == self._secret else self.spec.limits
        async with self._inside("a command") as envd:
            code = await envd.run(_as_named_user(command), on_output, limits=limits)
        if code == 128 + signal.SIGKILL:  # by somebody inside, or with the whole sandbox?
            await self._look_if_possible()
        return code

    async def _collect(self, command: Exec, *, limit_s: float = 120.0) -> tuple[int | None, str, str]:
        """The exit code, the output and the end of the errors of a command of ours."""
        streams = {1: bytearray(), 2: bytearray()}

        def keep(stream: int, data: bytes) -> bool:
            streams[stream] += data
            return False

        own = replace(command, env={inside.OURS: self._secret})
        try:
            code = await asyncio.wait_for(self._exec(own, keep), limit_s)
        except TimeoutError as e:
            raise SandboxError(f"E2B sandbox {self._box_id} did not answer within {limit_s:.0f} s") from e
        out, err = (bytes(streams[n]).decode(errors="backslashreplace") for n in (1, 2))
        return code, out, " ".join(err.split())[-300:]

    async def _upload(self, archive: BinaryIO, target: str) -> None:
        names = await asyncio.to_thread(names_in, archive)
        path = f"/root/.upload-{secrets.token_hex(8)}.tar"  # nobody but root looks into /root
        async with self._inside("an upload") as envd:
            await envd.write(path, archive)
        argv = [inside.SHELL, "-c", inside.UNPACK, "sh", path, target]
        code, _, err = await self._collect(Exec(argv, user="root", cwd="/", stdin=names), limit_s=1800)
        if code != 0:
            raise SandboxError(f"unpacking into {target} failed in the sandbox: {err}")

    async def _download(self, path: str, archive: BinaryIO) -> None:
        """Through a command's output and not a file: an archive of what the agent made may not fit on the disk."""
        parent, name = posixpath.split(path)
        err = bytearray()

        def keep(stream: int, data: bytes) -> bool:
            if stream == 1:
                archive.write(data)
            else:
                err[:] = (err + data)[-2000:]
            return False

        script = f'cd "$1" && [ -e "$2" -o -L "$2" ] || exit {inside.NOT_THERE}; exec tar -cf - -- "$2"'
        argv = [inside.SHELL, "-c", script, "sh", parent or "/", name or "."]
        code = await self._exec(Exec(argv, user="root", cwd="/", env={inside.OURS: self._secret}), keep)
        if code == inside.NOT_THERE:
            raise NoSuchPath(f"there is nothing at {path} in the sandbox")
        if code not in (0, 1):  # 1 = a file changed while it was read
            raise SandboxError(f"packing {path} failed in the sandbox: {bytes(err).decode(errors='replace').strip()}")

    # --- end ---

    async def _destroy(self) -> None:
        if self._lifetime is not None:
            await self._lifetime.end()
        if self._claiming is None:
            return
        await asyncio.wait({self._claiming})
        if self._claiming.exception() is not None:
            return
        owned = self._claiming.result()
        problems = []
        if self._box_id is not None:
            problems.append(await self._service.kill(self._box_id))
        if self._box_id is None or self._doubt:
            problems.append(await self._service.kill_claim(owned.id))
        self._latch(SandboxGone("the sandbox is gone: it was stopped"))
        if self._envd is not None:
            await self._envd.close()
        if any(problems):
            raise SandboxError("; ".join(filter(None, problems)))
        await asyncio.to_thread(owned.release)
        self._claiming = None


def _as_named_user(command: Exec) -> Exec:
    """envd knows users by name only; a number takes the way over root."""
    user = command.user
    if user is None or not user.replace(":", "").isdecimal():
        return command
    uid, _, gid = user.partition(":")
    if uid == "0" and gid in ("", "0"):
        return Exec(command.argv, "root", command.cwd, command.env, command.stdin)
    ids = ["--reuid", uid, "--regid", gid or uid, "--clear-groups"]
    return Exec(["setpriv", *ids, "--", *command.argv], "root", command.cwd, command.env, command.stdin)

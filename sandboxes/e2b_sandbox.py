"""One sandbox in E2B's cloud: the five primitives below `RemoteSandbox`, its lifetime and its end.

Owns the claim on it, keeping it alive while it is used, and noticing that it is gone: from then on every call fails at
once, whatever it was doing. How E2B is asked is `e2b_service`, what happens inside is `e2b_envd`. Made by `e2b`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import posixpath
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, ClassVar

from e2b import AsyncSandbox

from sandboxes import inside
from sandboxes.archive import names_in
from sandboxes.base import (
    Access,
    BoxSpec,
    Limits,
    Network,
    NetworkMode,
    NoSuchPath,
    SandboxError,
    SandboxGone,
    SetupFailed,
)
from sandboxes.docker_labels import labels_of
from sandboxes.e2b import E2BConfig
from sandboxes.e2b_envd import NO_LIMITS, Envd
from sandboxes.e2b_network import Reach
from sandboxes.e2b_service import (
    E2B_ERRORS,
    Connection,
    Order,
    Service,
    as_sandbox_error,
    end_task,
    heeding_cancellation,
    may_be_gone,
)
from sandboxes.e2b_templates import Templates
from sandboxes.ownership import Claim, Keeper, LifecycleError, claim
from sandboxes.remote import Exec, OnOutput, RemoteSandbox

log = logging.getLogger(__name__)

GATEWAY = "harness-trainer.gateway"  # in a sandbox's metadata: where it was told to find the gateway
_MARGIN_S = 120.0  # of a lifetime over the deadline: time to read what happened
_NO_DEADLINE_S = 3600.0  # lifetime at a time of a sandbox without a deadline
_SPEC_PATH = "/root/.harness-trainer.json"  # for whoever takes over when this process dies
_DEFAULT_USER, _DEFAULT_FOLDER = "user", "/home/user"  # of a template that sets none; every one has both

# Arguments: names to pin, as lines of /etc/hosts ("" = none), and "1" when commands do not run as root. Its standard
# input is kept for a successor. E2B gives its default user sudo without a password, accounts without passwords and a
# world-writable /usr/local, which comes first in root's PATH: the agent would be root, and could write its own reward.
_PREPARE = f"""
umask 077; cat > {_SPEC_PATH} || exit 1
[ -z "$1" ] || printf '%s\\n' "$1" >> /etc/hosts || exit 1
[ "$2" = 1 ] || exit 0
for f in /usr/bin/sudo /usr/bin/su /bin/su /usr/bin/doas; do [ ! -e $f ] || chmod u-s $f || exit 1; done
chmod -R go-w /usr/local 2>/dev/null
exit 0
"""
_WHO = "id -un && pwd && cd && pwd"


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
        self._lives_until = 0.0  # monotonic seconds
        self._keeper: asyncio.Task[None] | None = None
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
            lifetime_s=self._service.cut(self._wanted_lifetime_s()),
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
        self._lives_until = time.monotonic() + self._service.cut(self._wanted_lifetime_s())
        self._envd = Envd(sandbox)
        self._keeper = asyncio.create_task(self._keep(), name=f"lifetime of {self._box_id}")

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
        """Names, rights, and who commands run as: what only E2B needs before the usual set-up."""
        user, workdir = await self._defaults(template)
        self._user_wanted = self._user_wanted or user
        self._workdir = self.spec.workdir or workdir or self._workdir
        hosts = "\n".join(f"{address} {name}" for name, address in addresses.items())
        common = "" if self._user_wanted in ("root", "0") else "1"
        kept = json.dumps(_spec_as_json(self.spec, self._user_wanted, self._workdir)).encode()
        argv = [inside.SHELL, "-c", _PREPARE, "sh", hosts if not self._reach.wildcards else "", common]
        code, _, err = await self._collect(Exec(argv, user="root", cwd="/", stdin=kept))
        if code != 0:
            raise SandboxError(f"the E2B sandbox of {self.spec.name} could not be prepared: {err}")

    async def _defaults(self, template: str) -> tuple[str, str | None]:
        """The template's own user and working folder (None = it sets none), asked once per template."""
        if template not in self._shared.defaults:
            code, out, err = await self._collect(Exec([inside.SHELL, "-c", _WHO]))
            lines = out.splitlines()
            if code != 0 or len(lines) != 3:
                raise SandboxError(f"the E2B template {template!r} does not say who its user is: {err}")
            user, folder, home = lines
            user = _DEFAULT_USER if user == "root" else user
            self._shared.defaults[template] = user, None if folder in (home, "/", _DEFAULT_FOLDER) else folder
        return self._shared.defaults[template]

    # --- lifetime ---

    def _wanted_lifetime_s(self) -> float:
        deadline_s = self.spec.limits.deadline_s
        if deadline_s is None:
            return _NO_DEADLINE_S
        left = deadline_s if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())
        return left + _MARGIN_S

    async def _keep(self) -> None:
        """Extend the lifetime while the sandbox is used, and notice when it is gone."""
        pause = self._pause()
        while True:
            await asyncio.sleep(pause)
            try:
                await self._keep_once()
                pause = self._pause()
            except SandboxGone as e:
                self._latch(e)
                return
            except SandboxError as e:
                log.warning("E2B sandbox %s: %s; trying again", self._box_id, e)
                pause = min(5.0, self._pause())

    def _pause(self) -> float:
        return max(0.1, min(self._shared.look_s, (self._lives_until - time.monotonic()) / 2))

    async def _keep_once(self) -> None:
        assert self._box_id is not None
        wanted = self._service.cut(self._wanted_lifetime_s())
        if time.monotonic() + wanted > self._lives_until + 1.0:
            await self._extend()
        else:
            await self._service.info(self._box_id)

    async def _extend(self) -> None:
        assert self._box_id is not None
        lifetime_s = await self._service.extend(self._box_id, self._wanted_lifetime_s())
        self._lives_until = time.monotonic() + lifetime_s

    async def _look(self) -> None:
        assert self._box_id is not None
        try:
            await self._service.info(self._box_id)
        except SandboxGone as e:
            self._latch(e)
            raise

    async def _look_if_possible(self) -> None:
        """As `_look`, and silent when E2B does not answer."""
        try:
            await self._look()
        except SandboxGone:
            raise
        except SandboxError as e:
            log.debug("whether %s is gone could not be asked: %s", self._box_id, e)

    async def renew(self) -> None:
        await super().renew()
        with self._latched():
            await asyncio.to_thread(self._access.require_same, self._gateway_url)
            await self._extend()

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
        if self._keeper is not None:
            await end_task(self._keeper)
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


def _spec_as_json(spec: BoxSpec, user: str, workdir: str) -> dict[str, object]:
    return {
        "name": spec.name,
        "env": dict(spec.env),
        "user": user,
        "workdir": workdir,
        "limits": asdict(spec.limits),
        "network": {"mode": str(spec.network.mode), "allow": list(spec.network.allow)},
    }


def spec_from_json(text: str) -> BoxSpec:
    """What `_prepare` left. Raises ValueError, KeyError or TypeError when somebody else wrote it."""
    data = json.loads(text)
    network = Network(NetworkMode(data["network"]["mode"]), tuple(data["network"]["allow"]))
    return BoxSpec(
        name=data["name"],
        env=data["env"],
        user=data["user"],
        workdir=data["workdir"],
        limits=Limits(**data["limits"]),
        network=network,
    )


async def read_spec(sandbox: AsyncSandbox) -> BoxSpec:
    """The spec of a sandbox that another process made. Raises SandboxError."""
    try:
        return spec_from_json(await sandbox.files.read(_SPEC_PATH, user="root"))
    except (ValueError, KeyError, TypeError) as e:
        raise SandboxError(f"E2B sandbox {sandbox.sandbox_id} was not made by this version: {e}") from e
    except E2B_ERRORS as e:
        raise as_sandbox_error(e, f"E2B sandbox {sandbox.sandbox_id} cannot be taken over") from e

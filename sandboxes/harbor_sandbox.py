"""One sandbox in a Harbor environment: the five primitives on Harbor's `exec`, `upload_file` and `download_file`.

Owns what is asked of the worker for one box. How output streams come out of an `exec` that answers once, at the end, is
`harbor_exec`'s. Needs `tar`, `base64`, `xargs` and (for users
without a name) `setpriv` in the box, beside what every remote box needs. Made by `harbor`.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import secrets
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, ClassVar

from sandboxes import harbor_exec, inside
from sandboxes.archive import names_in
from sandboxes.base import BoxSpec, NoSuchPath, SandboxError, SandboxGone
from sandboxes.box_calls import Exec, OnOutput
from sandboxes.lifecycle import remove_tree
from sandboxes.remote import RemoteSandbox

if TYPE_CHECKING:
    from sandboxes.harbor import HarborBackend

_CALL_S = 120  # of one `exec`, upload or download
_KILL_S = 15.0
_GRACE_CS = 50  # between SIGTERM and SIGKILL, in hundredths of a second
_CUT_SHORT = 20  # answers in a row that may be lost while everything in a box is killed


class HarborSandbox(RemoteSandbox):
    """One of Harbor's environments. `folder` on this machine is its own: what passes through, Harbor's notes."""

    kind: ClassVar[str] = "harbor"

    def __init__(self, backend: HarborBackend, spec: BoxSpec, folder: Path) -> None:
        super().__init__(spec, log_dir=folder.parent)  # outlives the box: a failed start names the log
        self._backend = backend
        self._folder = folder
        self._box = f"{backend.run_id}-{secrets.token_hex(6)}"
        self._begun = False
        self._users: dict[str, str] = {}  # of commands that run as somebody else than root, by their mark

    async def renew(self) -> None:
        await super().renew()
        with self._latched():
            await asyncio.to_thread(self._backend.access.require_same, self._gateway_url)

    async def _create(self) -> str:
        spec, config = self.spec, self._backend.config
        policy, self._gateway_url = self._backend.policy(spec, await self._backend.access.soon())
        await asyncio.to_thread(lambda: (self._folder / "empty").mkdir(parents=True))
        has_dockerfile = spec.build_dir is not None and (spec.build_dir / "Dockerfile").is_file()
        environment_dir = spec.build_dir if spec.build_dir is not None else self._folder / "empty"
        limits = spec.limits
        self._begun = True
        await self._backend.worker.call(
            "start",
            box=self._box,
            kind=config.name,
            name=_as_name(spec.name),
            session_id=f"{_as_name(self._box)}__env",
            folder=str(self._folder / "trial"),
            environment_dir=str(environment_dir),
            config={
                "docker_image": spec.image or (None if has_dockerfile else config.image),
                "build_timeout_sec": spec.build_timeout_s,
                "cpus": limits.cpus,
                "memory_mb": limits.memory_mb,
                "storage_mb": limits.disk_mb,
                "workdir": spec.workdir,
            },
            network=policy,
            options=config.options,
            timeout_s=spec.build_timeout_s + config.start_timeout_s,
        )
        if spec.workdir is None:
            # The image's own: where its main process runs.
            _, out, _ = await self._simple("readlink /proc/1/cwd", "root")
            found = out.strip()
            self._workdir = found if found.startswith("/") and found != "/" else "/app"
        return self._box

    # --- the other primitives ---

    async def _exec(self, command: Exec, on_output: OnOutput) -> int | None:
        folder = f"/tmp/.sandbox-{secrets.token_hex(12)}"
        if (mark := command.env.get(inside.MARKER)) is not None and command.user not in (None, "root", "0:0"):
            self._users[mark] = command.user
        command, user = _with_user(command)
        # Our own scripts and what is around them must be known as ours; what is around an agent's command must not.
        ours = {inside.OURS: command.env[inside.OURS]} if inside.OURS in command.env else {}
        stdin_file = None
        if len(command.stdin) > harbor_exec.MAX_STDIN:
            stdin_file = f"{folder}-in"
            await self._send_file(command.stdin, stdin_file)
            await self._simple(f"chown {shlex.quote(user)} {stdin_file}", "root")
        script = harbor_exec.start_script(command, folder, stdin_file)
        num_out = num_err = num_cut = 0
        while True:
            script += harbor_exec.poll_script(folder, num_out, num_err)
            _, out, err = await self._simple(script, user, ours)
            script = ""
            news = harbor_exec.parse_news(out, num_out, num_err)
            if news is None:
                num_cut += 1
                if num_cut > _CUT_SHORT:
                    raise SandboxError(f"the sandbox does not run commands any more: {(err or out).strip()[-300:]}")
                await asyncio.sleep(0.1)
                continue
            num_cut = 0
            num_out, num_err = num_out + len(news.out), num_err + len(news.err)
            seen_all = [on_output(number, data) for number, data in ((1, news.out), (2, news.err)) if data]
            if any(seen_all) and not news.is_all:
                return None
            if news.is_all:
                return 137 if news.code is None else news.code

    async def _kill(self, which: str, *, alone: bool) -> None:
        user = self._users.pop(which, None)
        if user is not None:
            # In most containers root may not read the marks of others' processes, but they themselves may. The secret
            # is another, since they can read that too.
            secret = secrets.token_hex(16)
            arguments = (which, str(self._since), secret, "0", str(_GRACE_CS))
            with contextlib.suppress(SandboxError):  # root comes next, and says what is left
                await self._script(inside.KILL, *arguments, user=user, env={inside.OURS: secret}, limit_s=_KILL_S)
        await super()._kill(which, alone=alone)

    async def _simple(self, script: str, user: str, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
        said = await self._backend.worker.call(
            "exec", box=self._box, command=script, user=user, env=dict(env or {}), timeout_s=_CALL_S
        )
        return said["code"], said["out"], said["err"]

    async def _send_file(self, data: bytes, target: str) -> None:
        source = self._folder / secrets.token_hex(8)
        try:
            await asyncio.to_thread(source.write_bytes, data)
            await self._backend.worker.call("upload", box=self._box, source=str(source), target=target)
        finally:
            await asyncio.to_thread(source.unlink, missing_ok=True)

    async def _upload(self, archive: BinaryIO, target: str) -> None:
        there = f"/tmp/.sandbox-{secrets.token_hex(12)}.tar"
        source = self._folder / secrets.token_hex(8)
        names = await asyncio.to_thread(names_in, archive)
        try:
            await asyncio.to_thread(_copy_out, archive, source)
            await self._backend.worker.call("upload", box=self._box, source=str(source), target=there)
        finally:
            await asyncio.to_thread(source.unlink, missing_ok=True)
        said = bytearray()

        def keep(_: int, data: bytes) -> bool:
            said[:] = (said + data)[-300:]
            return False

        argv = [inside.SHELL, "-c", inside.UNPACK, "sh", there, target]
        if await self._exec(Exec(argv, "root", stdin=names), keep) != 0:
            problem = said.decode(errors="replace").strip()
            raise SandboxError(f"unpacking into {target} failed in the sandbox: {problem}")

    async def _download(self, path: str, archive: BinaryIO) -> None:
        parent, name = posixpath.split(path)
        there, target = f"/tmp/.sandbox-{secrets.token_hex(12)}.tar", self._folder / secrets.token_hex(8)
        quoted = shlex.quote(name or ".")
        code, out, err = await self._simple(
            f"cd {shlex.quote(parent)} && [ -e {quoted} -o -L {quoted} ] || exit {inside.NOT_THERE};"
            f" umask 077; tar -cf {there} -- {quoted}",
            "root",
        )
        if code == inside.NOT_THERE:
            raise NoSuchPath(f"there is nothing at {path} in the sandbox")
        if code not in (0, 1):  # 1 = a file changed while it was read
            raise SandboxError(f"packing {path} failed in the sandbox: {(err or out).strip()[-300:]}")
        try:
            await self._backend.worker.call("download", box=self._box, source=there, target=str(target))
            await asyncio.to_thread(_copy_in, target, archive)
        finally:
            await asyncio.to_thread(target.unlink, missing_ok=True)
            await self._simple(f"rm -f {there}", "root")

    async def _destroy(self) -> None:
        if self._begun:
            with contextlib.suppress(SandboxGone):  # the worker stopped everything when it ended
                await self._backend.worker.call("stop", box=self._box)
            self._begun = False
        self._backend.forget(self)
        await asyncio.to_thread(remove_tree, self._folder)


def _with_user(command: Exec) -> tuple[Exec, str]:
    """The command, and who runs it. Harbor's environments agree on names only; numbers take the way over root."""
    uid, _, gid = (command.user or "root").partition(":")
    if not uid.isdigit():
        return command, uid
    if uid == "0":
        return command, "root"
    ids = ["--reuid", uid, "--regid", gid or uid, "--clear-groups"]
    return replace(command, argv=["setpriv", *ids, "--", *command.argv]), "root"


def _as_name(text: str) -> str:
    """What every provider takes as a name."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in text).strip("-_") or "task"


def _copy_out(archive: BinaryIO, target: Path) -> None:
    with target.open("wb") as file:
        shutil.copyfileobj(archive, file)


def _copy_in(source: Path, archive: BinaryIO) -> None:
    with source.open("rb") as file:
        while chunk := file.read(1 << 20):
            archive.write(chunk)

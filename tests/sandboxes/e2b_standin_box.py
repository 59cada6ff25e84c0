"""One sandbox of the E2B stand-in: a private root folder and private namespaces on this machine, as root.

Commands really run: as root or "user", in a process tree, mounts, network and /etc of their own; /usr is this
machine's, read-only. Needs bubblewrap and root; `usable()` says so. Made by `e2b_standin`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.subprocesses import ended

USERS = {"root": (0, 0, "/root"), "user": (1000, 1000, "/home/user"), "nobody": (65534, 65534, "/")}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SHARED = [path for path in ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl") if os.path.exists(path)]
_TOOLS = ("bwrap", "nsenter", "setpriv")
_CAPABILITIES = "-all,+chown,+dac_override,+fowner,+fsetid,+kill,+setgid,+setuid,+setpcap,+net_bind_service,+sys_ptrace"
# The command's parent, outside of the box. `nsenter` would be one too, but stops for good when the command is stopped.
_PARENT = '"$@"; c=$?; [ $c -le 128 ] || kill -$((c - 128)) $$; exit $c'


@functools.cache
def unusable() -> str:
    """Why boxes cannot be had on this machine; "" = they can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"the E2B stand-in needs {', '.join(missing)}"
    if os.geteuid() != 0:
        return "the E2B stand-in needs root, for boxes with two users"
    argv = ["bwrap", "--ro-bind", "/usr", "/usr", "--unshare-pid", "--unshare-net", "--proc", "/proc"]
    for name in ("bin", "lib", "lib64"):
        argv += ["--symlink", f"usr/{name}", f"/{name}"]
    argv.append("true")
    tried = subprocess.run(argv, capture_output=True, check=False)
    return f"bubblewrap does not work here: {tried.stderr.decode().strip()}" if tried.returncode else ""


def make_root(root: Path) -> None:
    """A bare system: two users, empty homes, this machine's /usr mounted later."""
    for name in ("app", "dev", "etc", "home/user", "opt", "proc", "root", "run", "tmp", "usr", "var/tmp"):
        (root / name).mkdir(parents=True)
    (root / "app").rmdir()
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / name).symlink_to(f"usr/{name}")
    os.chmod(root, 0o755)
    os.chmod(root / "root", 0o700)
    os.chmod(root / "tmp", 0o1777)
    os.chmod(root / "var/tmp", 0o1777)
    os.chown(root / "home/user", 1000, 1000)
    lines = [f"{name}:x:{uid}:{gid}::{home}:/bin/bash\n" for name, (uid, gid, home) in USERS.items()]
    (root / "etc/passwd").write_text("".join(lines))
    (root / "etc/group").write_text("".join(f"{name}:x:{gid}:\n" for name, (_, gid, _) in USERS.items()))
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    # As E2B leaves them: a way to root for everybody, and programs in root's path that anybody may write.
    shutil.copy("/usr/bin/su", root / "etc/su")
    os.chmod(root / "etc/su", 0o4755)
    (root / "etc/local/bin").mkdir(parents=True)
    os.chmod(root / "etc/local", 0o777)
    os.chmod(root / "etc/local/bin", 0o777)


class Box:
    """A started system below `root`. Dies with the thread that started it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._init: asyncio.subprocess.Process | None = None
        self._pid = 0  # of the namespaces' first process, as this machine sees it
        self._commands: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        status_r, status_w = os.pipe()
        argv = ["bwrap", "--bind", str(self.root), "/", "--ro-bind", "/usr", "/usr"]
        argv += [
            "--bind",
            str(self.root / "etc/su"),
            "/usr/bin/su",
            "--bind",
            str(self.root / "etc/local"),
            "/usr/local",
        ]
        for path in _SHARED:
            argv += ["--ro-bind", path, path]
        argv += ["--proc", "/proc", "--dev", "/dev", "--hostname", "e2b", "--die-with-parent", "--new-session"]
        argv += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
        argv += ["--json-status-fd", str(status_w), "bash", "-c", "echo up; exec -a envd sleep infinity"]
        self._init = await asyncio.create_subprocess_exec(
            *argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(status_w,)
        )
        os.close(status_w)
        assert self._init.stdout is not None and self._init.stderr is not None
        up = await self._init.stdout.readline()
        line = os.read(status_r, 10_000)
        os.close(status_r)
        if up != b"up\n":
            raise RuntimeError(f"box did not start: {(await self._init.stderr.read()).decode()}")
        self._pid = json.loads(line.splitlines()[0])["child-pid"]

    @property
    def alive(self) -> bool:
        """Whether the box's own daemon lives; somebody inside may have killed it."""
        return self._init is not None and self._init.returncode is None

    async def run(
        self, argv: Sequence[str], *, user: str, cwd: str, env: Mapping[str, str], stdin: bool
    ) -> asyncio.subprocess.Process:
        uid, gid, home = USERS[user]
        settings = {"PATH": PATH, "HOME": home, "USER": user, "LOGNAME": user, **env}
        process = await asyncio.create_subprocess_exec(
            *["nsenter", "--no-fork", "-t", str(self._pid), "-m", "-p", "-n", "-i", "-u", "--"],
            *["/bin/sh", "-c", _PARENT, "sh"],
            *["setpriv", "--reuid", str(uid), "--regid", str(gid), "--clear-groups"],
            *["--bounding-set", _CAPABILITIES, "--inh-caps", "-all", "--"],
            *["env", "-i", "-C", cwd, *(f"{key}={value}" for key, value in settings.items())],
            *argv,
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            limit=1 << 20,
        )
        self._commands.append(process)
        return process

    def signal(self, pid: int, number: int) -> bool:
        """Signal a command by the pid of its `nsenter`; whether it was there."""
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return False
        for child in children or [str(pid)]:
            try:
                os.kill(int(child), number)
            except ProcessLookupError:
                return False
        return True

    def where(self, path: str) -> Path:
        """A path of the box on this machine; symlinks resolved inside the box."""
        parts, depth = path.split("/"), 0
        here = self.root
        while parts:
            part = parts.pop(0)
            if part in ("", "."):
                continue
            if part == "..":
                here = here if here == self.root else here.parent
                continue
            step = here / part
            if step.is_symlink() and depth < 40:
                depth += 1
                link = os.readlink(step)
                here = self.root if link.startswith("/") else here
                parts = link.split("/") + parts
                continue
            here = step
        return here

    async def stop(self) -> None:
        if self._init is None:
            return
        if self._init.returncode is None:
            if self._pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)  # the first process: the kernel takes all others along
            else:
                self._init.kill()
        while self._commands:  # one may still be starting, which ends at once
            await ended(self._commands.pop())
        await ended(self._init)

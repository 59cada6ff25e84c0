"""Isolation of the local sandbox with bubblewrap: a root, processes and a network of its own, without any privilege.

Owns whether that works here, and what such a box sees of this machine. `bubblewrap_box` starts and uses one.

One set of namespaces per box, and one process 1 that starts every command: so a server that one command started is
there for the next, and everything ends when that process does. Commands come from inside and inherit all restrictions;
entering from outside (nsenter) would bring each one in with privileges that it must then give up.

As an ordinary user the box has a user namespace. As root it has none: its processes become an unprivileged uid that no
other box and nobody on this machine uses, because in a user namespace they would go on being the real root towards
files of root such as /proc/sys/kernel/core_pattern.
"""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sandboxes.base import FOLDERS, Mount, NetworkMode
from sandboxes.files import Tree, parts_of

GATEWAY_PORT, PROXY_PORT = 18101, 18102  # on the box's loopback; Docker's sandboxes have them there too
USER = "agent"  # the name of the box's only user inside
REACH = {
    NetworkMode.NONE: "has no network",
    NetworkMode.PROXY_ONLY: "reaches the capture gateway alone",
    NetworkMode.ALLOWLIST: "reaches the capture gateway and the interception proxy alone",
    NetworkMode.PUBLIC: "shares this machine's network, the services on its loopback among it",
}

_PROBE = "import os; os.geteuid() or os.setresuid(65534, 65534, 65534)"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_WRITABLE_TOPS = frozenset(parts_of(folder)[0] for folder in FOLDERS)
_ZONE = "localtime"
# What programs read in /etc, without what could tell of this machine's users, services and secrets.
_ETC = (
    "alternatives",
    "bash.bashrc",
    "ca-certificates",
    "ca-certificates.conf",
    "crypto-policies",
    "debian_version",
    "fonts",
    "gai.conf",
    "host.conf",
    "inputrc",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "locale.conf",
    _ZONE,
    "login.defs",
    "magic",
    "magic.mime",
    "mime.types",
    "networks",
    "os-release",
    "perl",
    "pki/ca-trust",
    "pki/tls/certs",
    "profile",
    "protocols",
    "python3",
    "rpc",
    "services",
    "shells",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
)


# --- whether it works here -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """A bubblewrap that was tried. Example: Found("/usr/bin/bwrap", frozenset({"--disable-userns"}), None)."""

    program: str
    options: frozenset[str]  # those that not every version has
    problem: str | None  # one line; None = it works


@functools.cache
def find() -> Found:
    """Try bubblewrap, once per process (some 20 ms)."""
    program = shutil.which("bwrap")
    if program is None:
        return Found("", frozenset(), "bwrap is not installed")
    with tempfile.TemporaryDirectory(prefix="harness-trainer-probe-") as folder:
        try:
            helped = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=20, check=False)
            options = frozenset(o for o in ("--disable-userns",) if o in helped.stdout + helped.stderr)
            found = Found(program, options, None)
            argv = [program, *_namespaces(found), "--unshare-net", *_machine(Path(folder))]
            for mount in own_mounts():
                argv += ["--ro-bind", str(mount.source), mount.target]
            argv += ["--", str(interpreter()), "-I", "-S", "-c", _PROBE]
            tried = subprocess.run(
                argv, capture_output=True, text=True, errors="backslashreplace", timeout=20, check=False
            )
        except (OSError, subprocess.SubprocessError) as e:
            return Found(program, frozenset(), f"bwrap does not run: {e}")
    if tried.returncode != 0:
        said = tried.stderr.strip().splitlines()[-1:] or [f"exit code {tried.returncode}"]
        return Found(program, options, f"bwrap cannot make a box: {said[0]}")
    return found


def _namespaces(found: Found) -> list[str]:
    argv = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
    if os.geteuid() == 0:
        return [*argv, "--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [*argv, "--unshare-user", *sorted(found.options & {"--disable-userns"})]


def _machine(root: Path) -> list[str]:
    """The box's root, and this machine's programs and devices in it."""
    argv = ["--new-session", "--bind", str(root), "/"]
    for folder in _SYSTEM:
        if os.path.isdir(folder):  # a mount and not a link, which the agent could replace in a root of its own
            argv += ["--ro-bind", os.path.realpath(folder), folder]
    return [*argv, "--proc", "/proc", "--dev", "/dev"]


# --- what a box is -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """What one box is made of. Written to `control` by `local_box` when it must outlive its owner."""

    root: Path  # becomes /
    control: Path  # ours: the socket, the log, the files of /etc; never visible inside
    uid: int | None  # that processes become, when this process is root; None = ours
    mounts: tuple[Mount, ...] = ()
    host_network: bool = False
    ports: tuple[int, ...] = ()  # of the box's loopback, where something is relayed

    @property
    def etc(self) -> Path:
        return self.control / "etc"


def interpreter() -> Path:
    """The Python that process 1 runs on, without its virtual environment."""
    return Path(sys.executable).resolve()


def own_mounts() -> tuple[Mount, ...]:
    """Programs outside the system's folders that every box needs: our Python's, and Node's where there is one."""
    folders = {interpreter().parent.parent}
    node = shutil.which("node")
    if node is not None:
        folders.add(Path(node).resolve().parent.parent)
    home = Path.home()
    return tuple(
        Mount(folder, str(folder))
        for folder in sorted(folders)
        if not is_system(str(folder)) and not home.is_relative_to(folder) and folder != home / ".local"
    )


def search_path(mounts: Sequence[Mount]) -> list[str]:
    """This machine's PATH as far as it exists in a box, with a python3 and, where there is one, a node."""

    def shown(folder: str) -> bool:
        return is_system(folder) or any(Path(folder).is_relative_to(mount.target) for mount in mounts)

    path = [entry for entry in os.environ.get("PATH", os.defpath).split(os.pathsep) if os.path.isabs(entry)]
    path = [entry for entry in path if shown(entry)]
    for name, program in {"python3": str(interpreter()), "node": shutil.which("node")}.items():
        if program is not None and shutil.which(name, path=os.pathsep.join(path)) is None:
            folder = os.path.dirname(os.path.realpath(program))
            path += [folder] if shown(folder) else []
    return path


def free_uid() -> int:
    """A uid that nobody has: above those of people and of containers, below the limit of old archive formats."""
    return 1_000_000 + secrets.randbelow(1_000_000)


def is_system(path: str) -> bool:
    """Whether the box shows this machine's own file at that path."""
    return any(path == folder or path.startswith(f"{folder}/") for folder in (*_SYSTEM, "/etc", "/dev", "/proc"))


def arguments(found: Found, shape: Shape) -> list[str]:
    """The command line up to the program. Creates the mount points first, so that no link can lead one astray."""
    _make_etc(shape)
    shm = shape.control / "shm"  # a folder, since a tmpfs would be memory that no limit counts
    if not shm.is_dir():
        shm.mkdir()
        if shape.uid is not None:
            os.chown(shm, shape.uid, shape.uid)
    argv = [found.program, *_namespaces(found), "--as-pid-1", *([] if shape.host_network else ["--unshare-net"])]
    argv += [*_machine(shape.root), "--bind", str(shm), "/dev/shm", "--remount-ro", "/dev"]
    argv += ["--ro-bind", str(shape.etc), "/etc"]
    for name in _etc_names(shape):
        argv += ["--ro-bind", os.path.realpath(f"/etc/{name}"), f"/etc/{name}"]
    return [*argv, *_mount_arguments(shape), "--chdir", "/", "--"]


def _etc_names(shape: Shape) -> list[str]:
    names = (*_ETC, "resolv.conf") if shape.host_network else _ETC
    return [name for name in names if os.path.exists(f"/etc/{name}") and not (name == _ZONE and _time_zone())]


def _time_zone() -> str | None:
    """The file that this machine's time zone is a link to, where boxes have that file too.

    It is a link in a box as well: where it is a plain file, ICU (in Node and Bun) reads the whole time zone database to
    find out its name, which cost agents a quarter of a second at each start.
    """
    target = os.path.realpath(f"/etc/{_ZONE}")
    return target if os.path.islink(f"/etc/{_ZONE}") and target.startswith("/usr/") and os.path.isfile(target) else None


def _make_etc(shape: Shape) -> None:
    ids = f"{os.getuid() if shape.uid is None else shape.uid}:{os.getgid() if shape.uid is None else shape.uid}"
    shape.etc.mkdir(exist_ok=True)
    for name, text in {
        "passwd": f"{USER}:x:{ids}::/home:/bin/sh\n",
        "group": f"{USER}:x:{ids.partition(':')[2]}:\n",
        "hosts": "127.0.0.1 localhost\n::1 localhost\n",
        "hostname": "sandbox\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    }.items():
        (shape.etc / name).write_text(text)
    if (zone := _time_zone()) and not (shape.etc / _ZONE).is_symlink():
        (shape.etc / _ZONE).symlink_to(zone)
    for name in _etc_names(shape):
        point = shape.etc / name
        point.parent.mkdir(parents=True, exist_ok=True)
        if os.path.isdir(f"/etc/{name}"):
            point.mkdir(exist_ok=True)
        else:
            point.touch()


def _mount_arguments(shape: Shape) -> list[str]:
    """Read-only mounts, each below an anchor that is a mount itself.

    A mount point cannot be renamed from inside, but a folder above it can: the agent could then put its own files at
    the path where, say, an interpreter is looked for.
    """
    argv: list[str] = []
    shown = {mount.target: mount for mount in shape.mounts if not is_system(mount.target)}
    anchors: dict[str, None] = {}
    tops: dict[str, None] = {}
    for target in shown:
        parts = parts_of(target)
        if parts[0] in _WRITABLE_TOPS:
            tops["/" + parts[0]] = None
        anchor = "/" + "/".join(parts[: 2 if parts[0] in _WRITABLE_TOPS else 1])
        if anchor not in shown:
            anchors[anchor] = None
    tree = Tree(shape.root, shape.uid)
    for top in tops:
        tree.make_dir(top)
        argv += ["--bind", str(shape.root) + top, top]
    for anchor in anchors:
        tree.make_dir(anchor)
        argv += ["--tmpfs", anchor]
    for target in sorted(shown, key=lambda t: t.count("/")):
        if not any(target.startswith(f"{anchor}/") for anchor in anchors):
            tree.make_dir(target)
        else:  # bubblewrap would make the folders above for their owner alone
            for folder in reversed(Path(target).parents):
                if any(str(folder).startswith(f"{anchor}/") for anchor in anchors):
                    argv += ["--perms", "0755", "--dir", str(folder)]
        argv += ["--ro-bind", str(shown[target].source), target]
    for anchor in anchors:
        argv += ["--remount-ro", anchor]
    return argv

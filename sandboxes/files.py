"""File access below a root that a stranger's code could have filled with symlinks, FIFOs and surprises.

Owns the walk that never follows a symlink, and copying in and out. Every step is relative to an open folder, so that a
process inside that swaps a folder for a link at the wrong moment leads nowhere. Blocking; the local sandbox calls it
off the event loop. Paths are sandbox paths ("/app/x"); `..` cannot climb above the root.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import secrets
import shutil
import stat
import subprocess
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandboxes.base import LeftOut, NoSuchPath, SandboxError, TooLarge

_DEEPEST = 100  # levels of folders that are copied out; more than any workspace has, far below the open-file limit
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not hold us
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def parts_of(path: str) -> list[str]:
    """Components below the root. Raises ValueError for a path that is not absolute."""
    if not path.startswith("/") or "\0" in path:
        raise ValueError(f"a path in a sandbox is absolute, like /app/main.py, not {path!r}")
    return [part for part in posixpath.normpath(path).split("/") if part]


@dataclass(frozen=True, slots=True)
class Tree:
    """The files below `root`. Methods raise OSError for what the machine refuses.

    `owner` is the uid and gid that new entries get; None = this process's own.
    """

    root: Path
    owner: int | None = None

    # --- folders ---

    def make_dir(self, path: str) -> Path:
        """The folder as a real folder: a symlink or file in the way, also as a parent, is removed first."""
        with self._folder(parts_of(path), make=True):
            return self.root.joinpath(*parts_of(path))

    def reset_dir(self, path: str) -> None:
        """An empty folder of our own in place of whatever was there."""
        *parents, name = parts_of(path) or [""]
        if not name:
            raise ValueError("the root of a sandbox cannot be reset")
        with self._folder(parents, make=True) as fd:
            _remove(fd, name)
            os.close(self._new_folder(fd, name))

    @contextlib.contextmanager
    def _folder(self, parts: Sequence[str], *, make: bool = False) -> Iterator[int]:
        """An open folder. Without `make`, OSError unless every part is a real folder."""
        with contextlib.ExitStack() as stack:
            fd = os.open(self.root, _FOLDER)
            stack.callback(os.close, fd)
            for part in parts:
                fd = self._enter_or_make(fd, part) if make else os.open(part, _FOLDER, dir_fd=fd)
                stack.callback(os.close, fd)
            yield fd

    def _enter_or_make(self, parent: int, name: str) -> int:
        for _ in range(10):  # the agent may be putting things in the way all the time
            try:
                fd = _open_folder(parent, name)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    return self._new_folder(parent, name)
            except NotADirectoryError:
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(name, dir_fd=parent)
            else:
                if (mode := os.fstat(fd).st_mode) & stat.S_IRWXU != stat.S_IRWXU:
                    os.fchmod(fd, stat.S_IMODE(mode) | stat.S_IRWXU)
                return fd
        raise OSError(errno.EBUSY, "something keeps replacing it", name)

    def _new_folder(self, parent: int, name: str) -> int:
        os.mkdir(name, 0o755, dir_fd=parent)
        fd = os.open(name, _FOLDER, dir_fd=parent)
        if self.owner is not None:
            os.fchown(fd, self.owner, self.owner)
        return fd

    # --- files ---

    def write(self, path: str, data: bytes, mode: int) -> None:
        """Write under a new name, then rename: a symlink or folder at the target is replaced, not followed."""
        with self._replacing(path, mode) as fd:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]

    def put_file(self, source: Path, path: str) -> None:
        """Copy a host file with its permissions. Raises SandboxError unless it is a regular file."""
        with _regular_file(source) as (fd, mode), self._replacing(path, mode) as target:
            _copy(fd, target)

    @contextlib.contextmanager
    def _replacing(self, path: str, mode: int) -> Iterator[int]:
        *parents, name = parts_of(path) or [""]
        if not name:
            raise ValueError(f"{path!r} is the root of the sandbox, not a file in it")
        temp = f".{secrets.token_hex(8)}.tmp"
        with self._folder(parents, make=True) as parent:
            fd = os.open(temp, _NEW_FILE, 0o600, dir_fd=parent)
            try:
                yield fd
                if self.owner is not None:
                    os.fchown(fd, self.owner, self.owner)
                os.fchmod(fd, mode & 0o777)
                if _is_folder(parent, name):
                    _remove(parent, name)
                os.rename(temp, name, src_dir_fd=parent, dst_dir_fd=parent)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temp, dir_fd=parent)
                raise
            finally:
                os.close(fd)

    def read(self, path: str, cap: int) -> bytes | None:
        """At most `cap` bytes; None unless every parent is a real folder and the last part a regular file."""
        try:
            with self._file(path) as fd:
                chunks, left = [], cap
                while left > 0 and (chunk := os.read(fd, left)):
                    chunks.append(chunk)
                    left -= len(chunk)
                return b"".join(chunks)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return None

    @contextlib.contextmanager
    def _file(self, path: str) -> Iterator[int]:
        """An open regular file. Raises OSError (FileNotFoundError for anything else that is there)."""
        *parents, name = parts_of(path) or [""]
        with self._folder(parents) as parent:
            try:
                fd = os.open(name or ".", _FILE, dir_fd=parent)
            except OSError as e:
                if e.errno in (errno.ELOOP, errno.ENXIO):  # a symlink; a socket
                    raise FileNotFoundError(errno.ENOENT, "no regular file", path) from e
                raise
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise FileNotFoundError(errno.ENOENT, "no regular file", path)
                yield fd
            finally:
                os.close(fd)

    # --- folders in and out ---

    def copy_in(self, source: Path, path: str, *, without: Container[str] = ()) -> None:
        """Copy the contents of a host folder, but for the names in `without` at its top.

        Raises SandboxError for links that leave it and for special files.
        """
        real_source = source.resolve()
        if not real_source.is_dir():
            raise SandboxError(f"cannot copy {source} into the sandbox: no such folder")
        self.make_dir(path)
        modes: list[tuple[str, int]] = []  # given at the end: a folder without write permission must be filled first
        for entry, relative in _walk(real_source):
            if relative.partition("/")[0] in without:
                continue
            target = posixpath.join(path, relative)
            if entry.is_symlink():
                self._copy_link(entry, real_source, target)
            elif entry.is_dir():
                self.make_dir(target)
                modes.append((target, entry.stat().st_mode))
            elif entry.is_file():
                self.put_file(entry, target)
            else:
                raise SandboxError(f"cannot copy {entry} into the sandbox: not a file, folder or link")
        self._set_modes(modes)

    def _copy_link(self, entry: Path, source: Path, target: str) -> None:
        link = os.readlink(entry)
        if os.path.isabs(link) or not entry.resolve().is_relative_to(source):
            raise SandboxError(f"cannot copy {entry} into the sandbox: the link leaves the folder; make it a file")
        self.make_link(link, target)

    def make_link(self, link: str, target: str) -> None:
        """A symlink at `target`, in place of whatever was there."""
        *parents, name = parts_of(target)
        with self._folder(parents, make=True) as parent:
            _remove(parent, name)
            os.symlink(link, name, dir_fd=parent)
            if self.owner is not None:
                os.chown(name, self.owner, self.owner, dir_fd=parent, follow_symlinks=False)

    def _set_modes(self, modes: Sequence[tuple[str, int]]) -> None:
        for path, mode in reversed(modes):
            with self._folder(parts_of(path)) as fd:
                os.fchmod(fd, mode & 0o777)

    def copy_file_out(self, path: str, target: Path, cap: int | None) -> None:
        """Copy a regular file to the host. Raises NoSuchPath, and TooLarge when it has more than `cap` bytes."""
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._file(path) as fd:
                with Tree(target.parent)._replacing("/" + target.name, os.fstat(fd).st_mode) as copy:
                    _copy(fd, copy, cap)
        except (FileNotFoundError, NotADirectoryError) as e:
            raise NoSuchPath(f"there is no regular file {path} in the sandbox") from e

    def copy_out(self, path: str, target: Path, cap: int | None) -> tuple[LeftOut, ...]:
        """Copy a folder's contents to the host folder `target`, writing nowhere else.

        Left out, and returned: links that leave the folder, special files, what may not be read, and what is deeper
        than 100 levels. Raises NoSuchPath, and TooLarge when the files have more than `cap` bytes together.
        """
        top = parts_of(path)
        try:
            with self._folder(top):
                pass
        except (FileNotFoundError, NotADirectoryError) as e:
            raise NoSuchPath(f"there is no folder {path} in the sandbox") from e
        target.mkdir(parents=True, exist_ok=True)
        copy = _CopyOut(Tree(target.resolve()), cap)
        to_do: list[list[str]] = [[]]
        while to_do:
            below = to_do.pop()
            with contextlib.ExitStack() as stack:
                try:
                    fd = stack.enter_context(self._folder([*top, *below]))
                except OSError:  # may not be entered, or is no folder any more
                    copy.left_out.append(LeftOut("/".join(below) or "."))
                    continue
                to_do += copy.level(fd, below)
        copy.make_links()
        copy.out._set_modes(copy.modes)
        return tuple(copy.left_out)


class _CopyOut:
    """What is known of one copy while it goes on."""

    def __init__(self, out: Tree, cap: int | None) -> None:
        self.out = out
        self.left = cap  # bytes that may still come; None = any number
        self.left_out: list[LeftOut] = []
        self.modes: list[tuple[str, int]] = []
        self._links: list[tuple[str, str]] = []  # relative name, where it points

    def level(self, fd: int, below: list[str]) -> list[list[str]]:
        """Copy the files of one open folder and note the rest; the folders in it."""
        folders = []
        for name in sorted(os.listdir(fd)):
            relative = "/".join([*below, name])
            try:
                mode = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
                if stat.S_ISLNK(mode):
                    self._links.append((relative, os.readlink(name, dir_fd=fd)))
                elif stat.S_ISDIR(mode) and len(below) < _DEEPEST:
                    self.out.make_dir("/" + relative)
                    self.modes.append(("/" + relative, mode))
                    folders.append([*below, name])
                elif stat.S_ISREG(mode):
                    self._file(os.open(name, _FILE, dir_fd=fd), relative)
                else:
                    self.left_out.append(LeftOut(relative))
            except (FileNotFoundError, PermissionError) as e:  # gone meanwhile, or unreadable
                if e.filename != name:
                    raise
                self.left_out.append(LeftOut(relative))
        return folders

    def _file(self, source: int, relative: str) -> None:
        try:
            state = os.fstat(source)
            if not stat.S_ISREG(state.st_mode):
                self.left_out.append(LeftOut(relative))
                return
            with self.out._replacing("/" + relative, state.st_mode) as copy:
                taken = _copy(source, copy, self.left)
            if self.left is not None:
                self.left -= taken
        finally:
            os.close(source)

    def make_links(self) -> None:
        """Make those links that stay inside, when all else is there.

        Where a link leads depends on the others, so all are made and judged until no more is taken away.
        """
        made = [(name, link) for name, link in self._links if not os.path.isabs(link)]
        for name, link in made:
            self.out.make_link(link, "/" + name)
        while wrong := [entry for entry in made if not _stays(self.out.root / entry[0], self.out.root)]:
            for entry in wrong:
                (self.out.root / entry[0]).unlink()
                made.remove(entry)
        self.left_out += [LeftOut(name, link) for name, link in self._links if (name, link) not in made]


def _stays(link: Path, root: Path) -> bool:
    try:
        return link.resolve().is_relative_to(root)
    except (RuntimeError, OSError):  # a loop
        return False


def _walk(source: Path) -> Iterator[tuple[Path, str]]:
    for folder, folders, names in os.walk(source):
        for name in [*sorted(folders), *sorted(names)]:
            entry = Path(folder, name)
            yield entry, entry.relative_to(source).as_posix()


@contextlib.contextmanager
def _regular_file(source: Path) -> Iterator[tuple[int, int]]:
    """An open host file and its mode."""
    try:
        fd = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        raise SandboxError(f"cannot copy {source} into the sandbox: {e.strerror}") from e
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise SandboxError(f"cannot copy {source} into the sandbox: not a regular file")
        yield fd, mode
    finally:
        os.close(fd)


def _copy(source: int, target: int, cap: int | None = None) -> int:
    """Copy between open files; how many bytes. Raises TooLarge when there are more than `cap`."""
    copied = 0
    while chunk := os.read(source, 1 << 20):
        copied += len(chunk)
        if cap is not None and copied > cap:
            raise TooLarge(f"there is more than the {cap} bytes that may be copied from the sandbox")
        view = memoryview(chunk)
        while view:
            view = view[os.write(target, view) :]
    return copied


def _is_folder(parent: int, name: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _open_folder(parent: int, name: str) -> int:
    """Open a folder also when its permissions were taken away. NotADirectoryError for a symlink or anything else."""
    try:
        return os.open(name, _FOLDER, dir_fd=parent)
    except PermissionError:
        handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            os.chmod(f"/proc/self/fd/{handle}", stat.S_IRWXU)
        finally:
            os.close(handle)
        return os.open(name, _FOLDER, dir_fd=parent)


def _remove(parent: int, name: str) -> None:
    """Remove whatever is at `name`, if anything. Raises OSError if something is left."""
    try:
        os.unlink(name, dir_fd=parent)
        return
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        pass
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(name, dir_fd=parent)
        return
    # Too deep for Python, or without permissions. Neither program follows links on its way down.
    place = f"/proc/{os.getpid()}/fd/{parent}"
    for argv in (["chmod", "-R", "u+rwX", "--", f"./{name}"], ["rm", "-rf", "--", f"./{name}"]):
        subprocess.run(argv, cwd=place, check=False, stderr=subprocess.DEVNULL)
    if name in os.listdir(parent):
        raise OSError(errno.ENOTEMPTY, "could not be removed", name)

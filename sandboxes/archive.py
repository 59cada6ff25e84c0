"""Tar archives of folders that go into a sandbox and of what comes out of it.

Owns what may be packed (`pack`) and the safe unpacking of an archive that a stranger's code could have written
(`unpack`): nothing lands outside the target, no link is followed, special files are left out. Blocking; callers run it
off the event loop and hold archives in temp files. Uncompressed GNU tar, whose names are plain bytes.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from sandboxes.base import LeftOut, NoSuchPath, SandboxError, TooLarge

_CHUNK = 1 << 20
_MAX_DEPTH = 200  # folders; each costs an open file while an entry is written
_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BAD_NAMES = (errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ)
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


# --- in ----------------------------------------------------------------------------------------------------------


def check_entry(entry: Path, source: Path) -> None:
    """Raises SandboxError for what must not go in: a link that leaves `source` (resolved), a special file."""
    mode = entry.lstat().st_mode
    if stat.S_ISLNK(mode):
        if os.path.isabs(os.readlink(entry)) or not entry.resolve().is_relative_to(source):
            raise SandboxError(f"cannot copy {entry} into the sandbox: the link leaves the folder; make it a file")
    elif not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        raise SandboxError(f"cannot copy {entry} into the sandbox: not a file, folder or link")


def walk(source: Path) -> Iterator[tuple[Path, str]]:
    """Every entry below a folder with its relative POSIX name, folders before what is in them."""

    def fail(error: OSError) -> None:
        raise SandboxError(f"cannot copy {source} into the sandbox: {error}")

    for folder, folders, names in os.walk(source, onerror=fail):
        folders.sort()
        for name in [*folders, *sorted(names)]:
            entry = Path(folder, name)
            yield entry, entry.relative_to(source).as_posix()


def pack(source: Path, archive: BinaryIO, *, uid: int, gid: int) -> None:
    """Write the folder's contents, permissions kept, owned by `uid`. Raises SandboxError as `check_entry` does."""
    real_source = source.resolve()
    if not real_source.is_dir():
        raise SandboxError(f"cannot copy {source} into the sandbox: no such folder")
    with _writing(archive) as tar:
        for entry, name in walk(real_source):
            check_entry(entry, real_source)
            _pack_entry(tar, entry, name, uid, gid)


def pack_file(source: Path, name: str, archive: BinaryIO, *, uid: int, gid: int) -> None:
    """Write one file, as `name`; a link is followed, since it is the caller's own. Raises SandboxError."""
    real_source = source.resolve()
    if not real_source.is_file():
        raise SandboxError(f"cannot copy {source} into the sandbox: no such file")
    with _writing(archive) as tar:
        _pack_entry(tar, real_source, name, uid, gid)


def names_in(archive: BinaryIO) -> bytes:
    """The entries' names for `inside.UNPACK`, each below "./" and ended by NUL, folders with a slash at the end."""
    start = archive.tell()
    names = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="r:") as tar:
        for member in tar:
            name = "./" + member.name.rstrip("/") + ("/" if member.isdir() else "")
            if member.name not in (".", ""):
                names.write(name.encode(errors="surrogateescape") + b"\0")
    archive.seek(start)
    return names.getvalue()


@contextlib.contextmanager
def _writing(archive: BinaryIO) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT) as tar:
            yield tar
    except (OSError, tarfile.TarError) as e:
        raise SandboxError(f"cannot pack for the sandbox: {e}") from e


def _pack_entry(tar: tarfile.TarFile, entry: Path, name: str, uid: int, gid: int) -> None:
    status = entry.lstat()
    info = tarfile.TarInfo(name)
    info.mode, info.uid, info.gid, info.mtime = status.st_mode & 0o777, uid, gid, int(status.st_mtime)
    if stat.S_ISLNK(status.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(entry)
        tar.addfile(info)
    elif stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
        tar.addfile(info)
    else:
        with entry.open("rb") as file:
            info.size = os.fstat(file.fileno()).st_size
            tar.addfile(info, file)


# --- out ---------------------------------------------------------------------------------------------------------


class Capped:
    """A file that refuses to grow beyond `cap` bytes; `write` raises TooLarge then."""

    def __init__(self, file: BinaryIO, cap: int | None) -> None:
        self._file, self._cap, self.size = file, cap, 0

    def write(self, data: bytes) -> int:
        self.size += len(data)
        if self._cap is not None and self.size > self._cap:
            raise TooLarge(f"more than {self._cap} bytes would come out of the sandbox")
        return self._file.write(data)


def unpack(archive: BinaryIO, target: Path, *, cap: int | None = None) -> tuple[LeftOut, ...]:
    """Unpack a folder's archive into `target` (created) without the folder's own name; what was left out.

    Permissions are kept, except that we can always enter and remove a folder. Sparse files count in full towards
    `cap`. Raises TooLarge, NoSuchPath when the archive is not of a folder, SandboxError when it is damaged.
    """
    target.mkdir(parents=True, exist_ok=True)
    root = os.open(target.resolve(), _DIR_FLAGS)
    job = _Unpacking(root, target.resolve(), cap)
    try:
        with tarfile.open(fileobj=archive, mode="r:") as tar:
            for number, member in enumerate(tar):
                if number == 0 and not (member.isdir() and len(_parts(member.name) or ()) <= 1):
                    raise NoSuchPath("there is no folder at that path in the sandbox")
                job.take(tar, member)
            _check_end(tar, archive)
        return job.finish()
    except (tarfile.TarError, EOFError) as e:
        raise SandboxError(f"the sandbox sent a damaged archive: {e}") from e
    except (OSError, ValueError, OverflowError) as e:
        raise SandboxError(f"cannot write below {target}: {e}") from e
    finally:
        os.close(root)


def unpack_file(archive: BinaryIO, target: Path, *, cap: int | None = None) -> None:
    """Write the one file of an archive to `target`. Raises NoSuchPath, TooLarge, SandboxError."""
    try:
        with tarfile.open(fileobj=archive, mode="r:") as tar:
            member = tar.next()
            content = tar.extractfile(member) if member is not None and member.isreg() else None
            if member is None or content is None:
                raise NoSuchPath("there is no regular file at that path in the sandbox")
            if cap is not None and member.size > cap:
                raise TooLarge(f"the file in the sandbox has {member.size} bytes, more than {cap}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            with open(os.open(target, _NEW_FILE, 0o600), "wb") as file:
                shutil.copyfileobj(content, file, _CHUNK)
                os.fchmod(file.fileno(), member.mode & 0o777)
            tar.next()
            _check_end(tar, archive)
    except (tarfile.TarError, EOFError) as e:
        raise SandboxError(f"the sandbox sent a damaged archive: {e}") from e
    except (OSError, ValueError) as e:
        raise SandboxError(f"cannot write {target}: {e}") from e


class _Unpacking:
    """One archive on its way into the folder open as `root`. Follows no link: each folder is opened on its own."""

    def __init__(self, root: int, path: Path, cap: int | None) -> None:
        self._root, self._path, self._cap = root, path, cap
        self._size = 0
        self._left_out: list[LeftOut] = []
        self._modes: dict[tuple[str, ...], int] = {}  # of folders, set at the end: one may forbid writing
        self._links: dict[tuple[str, ...], str] = {}

    def take(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = _parts(member.name)
        if parts is None or len(parts) > _MAX_DEPTH:
            self._left_out.append(LeftOut(member.name))
        elif len(parts) > 1:
            if not self._write(tar, member, parts[1:]):
                self._left_out.append(LeftOut("/".join(parts[1:]), member.linkname if member.issym() else None))
        elif not member.isdir():
            self._left_out.append(LeftOut(member.name))

    def _write(self, tar: tarfile.TarFile, member: tarfile.TarInfo, parts: tuple[str, ...]) -> bool:
        """Whether the entry was taken."""
        with contextlib.ExitStack() as stack:
            try:
                folder = self._enter(stack, parts[:-1])
                if member.isdir():
                    self._enter(stack, parts)
                    self._modes[parts] = member.mode & 0o777 | stat.S_IRWXU
                elif member.issym() and member.linkname:
                    self._clear(folder, parts)
                    os.symlink(member.linkname, parts[-1], dir_fd=folder)
                    self._links[parts] = member.linkname
                elif member.islnk():
                    return self._link(stack, folder, parts, member.linkname)
                elif member.isreg():
                    self._write_file(tar, member, folder, parts)
                else:
                    return False
            except OSError as e:
                if e.errno not in _BAD_NAMES:
                    raise
                return False
            except ValueError:  # a zero byte in a name
                return False
        return True

    def _enter(self, stack: contextlib.ExitStack, parts: tuple[str, ...]) -> int:
        """The folder, opened; made where it is missing, and in place of what is no folder."""
        here = self._root
        for number, part in enumerate(parts, 1):
            try:
                opened = os.open(part, _DIR_FLAGS, dir_fd=here)
            except OSError as e:
                if e.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    raise
                self._clear(here, parts[:number])
                os.mkdir(part, 0o755, dir_fd=here)
                opened = os.open(part, _DIR_FLAGS, dir_fd=here)
            stack.callback(os.close, opened)
            here = opened
        return here

    def _clear(self, folder: int, parts: tuple[str, ...]) -> None:
        """Remove what has the name of a new entry: the last one of a name wins, as with tar."""
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.lstat(parts[-1], dir_fd=folder).st_mode):
                shutil.rmtree(parts[-1], dir_fd=folder)
            else:
                os.unlink(parts[-1], dir_fd=folder)

    def _write_file(self, tar: tarfile.TarFile, member: tarfile.TarInfo, folder: int, parts: tuple[str, ...]) -> None:
        self._size += member.size
        if self._cap is not None and self._size > self._cap:
            raise TooLarge(f"the folder in the sandbox has more than {self._cap} bytes")
        self._clear(folder, parts)
        content = tar.extractfile(member)
        with open(os.open(parts[-1], _NEW_FILE, 0o600, dir_fd=folder), "wb") as file:
            if content is not None:
                shutil.copyfileobj(content, file, _CHUNK)
            os.fchmod(file.fileno(), member.mode & 0o777)

    def _link(self, stack: contextlib.ExitStack, folder: int, parts: tuple[str, ...], to: str) -> bool:
        """A second name of a file that came before, with the folder's own name in front."""
        source = _parts(to)
        if source is None or not 1 < len(source) <= _MAX_DEPTH or source[1:] == parts:
            return False
        try:
            here = self._root
            for part in source[1:-1]:
                here = os.open(part, _DIR_FLAGS, dir_fd=here)
                stack.callback(os.close, here)
            if not stat.S_ISREG(os.lstat(source[-1], dir_fd=here).st_mode):
                return False
        except OSError:  # what it names was left out
            return False
        self._clear(folder, parts)
        os.link(source[-1], parts[-1], src_dir_fd=here, dst_dir_fd=folder, follow_symlinks=False)
        return True

    def finish(self) -> tuple[LeftOut, ...]:
        """Set the folders' permissions, and take the links away that lead out, also by way of other links."""
        for parts, mode in self._modes.items():
            with contextlib.ExitStack() as stack, contextlib.suppress(OSError):  # replaced since
                os.fchmod(self._enter_existing(stack, parts), mode)
        for parts, link in self._links.items():
            # Without following: what was a folder once may be a link now.
            with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
                folder = self._enter_existing(stack, parts[:-1])
                if os.readlink(parts[-1], dir_fd=folder) == link and self._leaves(parts, link):
                    os.unlink(parts[-1], dir_fd=folder)
                    self._left_out.append(LeftOut("/".join(parts), link))
        return tuple(self._left_out)

    def _enter_existing(self, stack: contextlib.ExitStack, parts: tuple[str, ...]) -> int:
        here = self._root
        for part in parts:
            here = os.open(part, _DIR_FLAGS, dir_fd=here)
            stack.callback(os.close, here)
        return here

    def _leaves(self, parts: tuple[str, ...], link: str) -> bool:
        real = os.path.realpath(self._path.joinpath(*parts))
        return os.path.isabs(link) or not Path(real).is_relative_to(self._path)


def _check_end(tar: tarfile.TarFile, archive: BinaryIO) -> None:
    """`tarfile` takes one that was cut short for a whole one; a block of zeros must follow the last entry."""
    archive.seek(tar.offset)
    if archive.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError("it ends in the middle")


def _parts(name: str) -> tuple[str, ...] | None:
    """The components of an entry's name; None when it is absolute, climbs, or cannot be a file's name."""
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    return None if name.startswith("/") or ".." in parts or "\0" in name else parts

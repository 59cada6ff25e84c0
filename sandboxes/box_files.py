"""Files in and out of a remote sandbox: small ones by a script, folders as tar archives through temp files.

Owns which script or archive does what; the scripts are `inside`'s, archives `archive`'s. In the box a link is never
followed: parents are entered one by one, and what is in the way of a new file is replaced.
"""

from __future__ import annotations

import asyncio
import posixpath
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, BinaryIO, TypeVar, cast

from sandboxes import archive, inside
from sandboxes.base import LeftOut, NoSuchPath, SandboxError
from sandboxes.box_calls import BoxCalls

_T = TypeVar("_T")
_SMALL = 1_000_000  # bytes that go in by a script
_OVERHEAD = 16_000_000  # of an archive over its content, at the least


def clean(path: str) -> str:
    """The path without `..`, `.` and double slashes. Raises ValueError for one that is not absolute."""
    if not path.startswith("/") or "\0" in path:
        raise ValueError(f"a path in a sandbox is absolute, like /app/main.py, not {path!r}")
    return "/" + posixpath.normpath(path).strip("/")


class FileCalls(BoxCalls):
    """See `sandboxes.base.Sandbox`."""

    def resolve(self, path: str) -> str:
        return clean(path)

    async def put_text(self, text: str, target: str, mode: int = 0o644) -> None:
        await self._put_data(text.encode(errors="backslashreplace"), target, mode)

    async def put_file(self, source: Path, target: str) -> None:
        account = self._ready()
        data = await asyncio.to_thread(_read_small, source)
        if data is not None:
            await self._put_data(data[0], target, data[1])
            return
        parent, name = posixpath.split(clean(target))
        with tempfile.TemporaryFile() as file:
            await asyncio.to_thread(
                archive.pack_file, source, name, cast(BinaryIO, file), uid=account.uid, gid=account.gid
            )
            await self._ensure(parent, private=False)
            await self._send(file, parent)

    async def put_dir(self, source: Path, target: str) -> None:
        account = self._ready()
        await self._put_tree(source, target, uid=account.uid, gid=account.gid)

    async def _put_tree(self, source: Path, target: str, *, uid: int, gid: int) -> None:
        """As `put_dir`, for an owner. Backends without mounts put theirs with it, as root."""
        path = clean(target)
        with tempfile.TemporaryFile() as file:
            await asyncio.to_thread(archive.pack, source, cast(BinaryIO, file), uid=uid, gid=gid)
            await self._ensure(path, private=False)
            await self._send(file, path)

    async def _send(self, file: IO[bytes], target: str) -> None:
        file.seek(0)
        with self._latched():
            await self._upload(cast(BinaryIO, file), target)

    async def get_text(self, path: str, cap: int = 1_000_000) -> str | None:
        self._ready()
        parent, name = posixpath.split(clean(path))
        if not name:
            return None
        code, reader = await self._script(inside.READ, parent, name, "file", str(cap), cap=2 * cap + 2)
        if code == inside.NOT_THERE:
            return None
        if code != 0:
            raise SandboxError(f"cannot read {path} in the sandbox: {reader.err.text().strip()[-300:]}")
        return reader.out.text()

    async def get_dir(self, path: str, target: Path, *, cap: int | None = None) -> tuple[LeftOut, ...]:
        return await self._get(path, "folder", cap, lambda file: archive.unpack(file, target, cap=cap))

    async def get_file(self, path: str, target: Path, *, cap: int | None = None) -> None:
        await self._get(path, "file", cap, lambda file: archive.unpack_file(file, target, cap=cap))

    async def _get(self, path: str, kind: str, cap: int | None, unpack: Callable[[BinaryIO], _T]) -> _T:
        self._ready()
        wanted = clean(path)
        parent, name = posixpath.split(wanted)
        code, _ = await self._script(inside.LOOK, parent, name or ".", kind)
        if code != 0:
            raise NoSuchPath(f"there is no {kind} {path} in the sandbox")
        with tempfile.TemporaryFile() as file:
            limited = archive.Capped(cast(BinaryIO, file), None if cap is None else 2 * cap + _OVERHEAD)
            with self._latched():
                await self._download(wanted, cast(BinaryIO, limited))
            file.seek(0)
            return await asyncio.to_thread(unpack, cast(BinaryIO, file))

    async def reset_dir(self, path: str, *, private: bool = False) -> None:
        parent, name = posixpath.split(clean(path))
        if not name:
            raise ValueError("the root of a sandbox cannot be reset")
        await self._checked(f"resetting {path}", inside.RESET, *self._file_arguments(parent, name, private))

    async def _ensure(self, folder: str, *, private: bool) -> None:
        parent, name = posixpath.split(folder)
        await self._checked(f"making {folder}", inside.ENSURE, *self._file_arguments(parent, name, private))

    async def _put_data(self, data: bytes, target: str, mode: int) -> None:
        parent, name = posixpath.split(clean(target))
        if not name:
            raise ValueError("a file needs a name, not /")
        arguments = (*self._file_arguments(parent, name, False), f"{mode & 0o777:o}", str(len(data)))
        await self._checked(f"writing {target}", inside.WRITE, *arguments, stdin=data)

    def _file_arguments(self, parent: str, name: str, private: bool) -> tuple[str, str, str, str]:
        account = self._ready()
        owner = "" if self.admin is None else f"{account.uid}:{account.gid}"
        return parent, name, owner, "1" if private and self.admin is not None else ""


def _read_small(source: Path) -> tuple[bytes, int] | None:
    """Content and permissions of a small file; None = too large to go in by a script. Raises SandboxError."""
    try:
        with source.open("rb") as file:
            data = file.read(_SMALL + 1)
        return None if len(data) > _SMALL else (data, source.stat().st_mode)
    except OSError as e:
        raise SandboxError(f"cannot copy {source} into the sandbox: {e.strerror}") from e

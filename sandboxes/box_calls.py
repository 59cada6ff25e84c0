"""What every part of a remote sandbox stands on: five primitives of the backend, and scripts run through them.

Owns the primitives' contract, the reading of a command's two streams up to the line that ends them, the running of our
own scripts, and the latch: once a box is gone it stays gone. Subclassed by `box_files`, `box_jobs` and `remote`.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, ClassVar, TypeAlias

from sandboxes import inside
from sandboxes.base import BoxSpec, SandboxError, SandboxGone
from sandboxes.output import Kept

# (1 = stdout | 2 = stderr, bytes); answers True when it has seen all it waits for: the stream may be left then. One
# call at a time, from any thread.
OnOutput: TypeAlias = Callable[[int, bytes], bool]

_SCRIPT_CAP = 64_000_000
_MAX_TRAILER = 80  # bytes


@dataclass(frozen=True, slots=True)
class Exec:
    """One raw command for a backend: no shell, no clean-up, no time limit of its own."""

    argv: Sequence[str]
    user: str | None = None  # None = the box's own default
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""  # then end of file


@dataclass(frozen=True, slots=True)
class Account:
    """Who commands run as. Example: Account("node", "node", 1000, 1000, "/home/node")."""

    shown: str  # what `Sandbox.user` says
    login: str  # what `_exec` is given: a name, or "uid:gid" when nobody has that uid
    uid: int
    gid: int
    home: str  # "" = nothing to add: the service sets HOME for accounts of the box


@dataclass(frozen=True, slots=True)
class Ended:
    """The line that ends a command's streams (see `inside.RUN`)."""

    code: int
    num_ooms: int


class Reader:
    """Both streams of one command, read up to the line with `nonce`. `feed` is an `OnOutput`."""

    def __init__(self, nonce: str, cap: int) -> None:
        self.out, self.err = Kept(cap), Kept(cap)
        self.ended: Ended | None = None
        self._nonce = nonce.encode()
        self._held = {1: b"", 2: b""}  # the start of the line may be at the end of a chunk
        self._done: set[int] = set()

    def feed(self, stream: int, data: bytes) -> bool:
        if stream in self._done:
            return len(self._done) == 2
        kept = self.out if stream == 1 else self.err
        data = self._held[stream] + data
        at = data.find(self._nonce)
        if at < 0:
            keep = max(0, len(data) - len(self._nonce) + 1)
            kept.add(data[:keep])
            self._held[stream] = data[keep:]
        elif (end := data.find(b"\n", at)) < 0 and len(data) - at < _MAX_TRAILER:
            self._held[stream] = data  # the line is not whole yet
        else:
            kept.add(data[:at])
            self._held[stream] = b""
            self._done.add(stream)
            with contextlib.suppress(ValueError):  # a command that wrote our line itself
                _, code, num_ooms = data[at:end].split()
                self.ended = Ended(int(code), int(num_ooms))
        return len(self._done) == 2

    def finish(self) -> None:
        """No more comes."""
        for stream, kept in ((1, self.out), (2, self.err)):
            if stream not in self._done:
                kept.add(self._held[stream])
                self._held[stream] = b""


class BoxCalls(abc.ABC):
    """See `remote.RemoteSandbox`."""

    admin: ClassVar[str | None] = "root"  # who runs our scripts and owns private folders; None = the box's own user
    state_dir: ClassVar[str] = "/.sandbox"  # ours, in the box

    def __init__(self, spec: BoxSpec) -> None:
        self.spec = spec
        self._account: Account | None = None
        self._since = 0  # clock ticks: what started before is the box's own, not a command's
        self._secret = secrets.token_hex(16)
        self._gone: SandboxGone | None = None

    # --- filled in by a backend ---

    @abc.abstractmethod
    async def _create(self) -> str:
        """Create and start the box; its id. Raises SandboxError or SetupFailed, and leaves nothing behind then.

        May set `_user_wanted` and `_workdir`, `_gateway_url` and `_proxy_url`, which are known only now. When it is
        cancelled it may leave a box behind only if `_destroy` will find it.
        """

    @abc.abstractmethod
    async def _exec(self, command: Exec, on_output: OnOutput) -> int | None:
        """Run the command, handing over its output as it comes.

        The exit code (the shell's convention), or None when `on_output` answered True before the command ended; it is
        then left alone, not killed, and what it still writes is read away. Raises SandboxGone or SandboxError.
        Cancelling it only stops listening.
        """

    @abc.abstractmethod
    async def _upload(self, archive: BinaryIO, target: str) -> None:
        """Unpack an uncompressed tar archive, as root where there is one, into the existing folder `target`.

        What is in the way of an entry is replaced, never followed; owners and permissions are the archive's.
        """

    @abc.abstractmethod
    async def _download(self, path: str, archive: BinaryIO) -> None:
        """Write the file or folder at `path` into `archive` as an uncompressed tar.

        A folder's entries are below its own name, as Docker and `tar -C PARENT NAME` give them. Raises SandboxError
        when there is nothing at `path`, and lets through what `archive.write` raises.
        """

    @abc.abstractmethod
    async def _destroy(self) -> None:
        """End and remove the box and all that came with it, also when creation was cut short. Idempotent."""

    # --- for the parts ---

    def _ready(self) -> Account:
        """Raises SandboxError unless the box can be used."""
        if self._gone is not None:
            raise SandboxGone(str(self._gone))
        if self._account is None:
            raise SandboxError("the sandbox is not started; use it in `async with`")
        return self._account

    @contextlib.contextmanager
    def _latched(self) -> Iterator[None]:
        try:
            yield
        except SandboxGone as e:
            self._gone = self._gone or e
            raise

    async def _script(
        self,
        script: str,
        *arguments: str,
        stdin: bytes = b"",
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        cap: int = _SCRIPT_CAP,
        limit_s: float = 60.0,
    ) -> tuple[int, Reader]:
        """Run one of `inside`'s scripts, as `admin`; its exit code and output. Raises SandboxError when cut off."""
        nonce = secrets.token_hex(16)
        reader = Reader(nonce, cap)
        command = Exec(
            [inside.SHELL, "-c", script, "sh", nonce, *arguments],
            user=user or self.admin,
            cwd="/",
            env={inside.OURS: self._secret} if env is None else env,
            stdin=stdin,
        )
        try:
            with self._latched():
                code = await asyncio.wait_for(self._exec(command, reader.feed), limit_s)
        except TimeoutError as e:
            raise SandboxError(f"the sandbox did not answer within {limit_s:.0f} s") from e
        reader.finish()
        if reader.ended is not None:
            return reader.ended.code, reader
        raise SandboxError(f"a script in the sandbox was cut short (exit code {code}){_last_line(reader)}")

    async def _checked(self, what: str, script: str, *arguments: str, stdin: bytes = b"") -> Reader:
        """As `_script`, and raises SandboxError when the exit code is not 0."""
        code, reader = await self._script(script, *arguments, stdin=stdin)
        if code != 0:
            raise SandboxError(f"{what} failed in the sandbox{_last_line(reader)}")
        return reader


def _last_line(reader: Reader) -> str:
    lines = reader.err.text().strip().splitlines()
    return f": {lines[-1][:300]}" if lines else ""

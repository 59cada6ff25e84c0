"""Commands and files inside one E2B sandbox, through its daemon (envd).

Owns running a command with raw output, and moving bytes in and out. Files go through the SDK's public `files`. Commands
use the generated client below its `commands`: that one decodes output as UTF-8 with replacement characters, which
loses bytes, and starts every command in a login shell, whose profile belongs to whoever wrote it last: the agent.
Called by `e2b_sandbox`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Iterator
from typing import BinaryIO, Literal

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b import AsyncSandbox
from e2b.api.client_async import get_envd_api
from e2b.connection_config import KEEPALIVE_PING_HEADER, KEEPALIVE_PING_INTERVAL_SEC
from e2b.envd.api import acheck_sandbox_health
from e2b.envd.client_async import as_stream, create_rpc_client
from e2b.envd.process import process_connect, process_pb
from e2b.envd.rpc import ahandle_rpc_exception_with_health
from e2b.envd.utils import authentication_header
from e2b.envd.versions import ENVD_OCTET_STREAM_UPLOAD
from protobuf import Oneof

from sandboxes.base import Limits, SandboxError, SetupFailed
from sandboxes.e2b_service import end_task
from sandboxes.remote import Exec, OnOutput

log = logging.getLogger(__name__)

_OPEN_S = 60.0  # for a command to start
_STDIN_CHUNK = 256 * 1024
# Arguments: working directory, limits as "<letter of ulimit><number> ..", then the command. The directory is entered by
# a shell, so that one that does not exist is the command's failure and not ours. bash has its own letter for processes.
_EXEC = """
for l in $2; do
  case $l in p*) [ -z "${BASH_VERSION-}" ] || l=u${l#p} ;; esac
  ulimit -${l%%[0-9]*} ${l#?}
done 2>/dev/null
[ -z "$1" ] || { cd -- "$1" && unset OLDPWD; } || exit 126
shift 2
exec "$@"
"""
# The signal that ended a process, as Go names it, in which envd is written.
_SIGNALS = {(signal.strsignal(number) or "").lower(): int(number) for number in signal.valid_signals()}


NO_LIMITS = Limits()


class Envd:
    """The daemon of one sandbox. Methods raise the SDK's errors as they are; `e2b_sandbox` says what they mean."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self._version = sandbox._envd_version  # the SDK keeps it to itself, and needs it in its own headers
        if self._version < ENVD_OCTET_STREAM_UPLOAD:
            raise SetupFailed(f"the E2B template has envd {self._version}, this needs 0.5.7 or later: build it again")
        config = sandbox.connection_config
        self._files = sandbox.files
        self._rpc = create_rpc_client(process_connect.ProcessClient, sandbox.envd_api_url, config)
        self._health = get_envd_api(config, sandbox.envd_api_url, retry_connect=False)

    async def close(self) -> None:
        await self._health.aclose()

    async def run(self, command: Exec, on_output: OnOutput, *, limits: Limits = NO_LIMITS) -> int | None:
        """See `RemoteSandbox._exec`. Of the limits it holds `cpu_s`, `file_mb` and, unless for root, `processes`."""
        request = process_pb.StartRequest(
            process=process_pb.ProcessConfig(
                cmd="/bin/sh",
                args=["-c", _EXEC, "sh", command.cwd or "", _ulimits(limits), *command.argv],
                envs=dict(command.env),
            ),
            stdin=bool(command.stdin),
        )
        headers = {
            **authentication_header(self._version, command.user),
            KEEPALIVE_PING_HEADER: str(KEEPALIVE_PING_INTERVAL_SEC),
        }
        events = as_stream(self._rpc.start(request, headers=headers))
        feeder: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(_OPEN_S):
                with _cancellation_as_such():
                    first = _event_of(await anext(events, None))
            if not isinstance(first, process_pb.ProcessEvent.StartEvent):
                raise SandboxError(f"the E2B sandbox answered a command's start with {first}")
            if command.stdin:
                feeder = asyncio.create_task(self._feed(first.pid, command.stdin), name=f"stdin of {first.pid}")
            with _cancellation_as_such():
                async for response in events:
                    event = _event_of(response)
                    if isinstance(event, process_pb.ProcessEvent.EndEvent):
                        return _exit_code(event)
                    if isinstance(event, process_pb.ProcessEvent.DataEvent) and event.output is not None:
                        stream = {"stdout": 1, "stderr": 2}[event.output.field]
                        if on_output(stream, event.output.value):
                            return None
            raise SandboxError("the E2B sandbox ended the stream of a command before the command's end")
        except ConnectError as e:
            raise await ahandle_rpc_exception_with_health(e, self._alive) from e
        except TimeoutError as e:
            raise SandboxError(f"the E2B sandbox started no command in {_OPEN_S:.0f} s") from e
        finally:
            if feeder is not None:
                await end_task(feeder)
            with contextlib.suppress(Exception), _cancellation_as_such():  # the stream may be broken already
                await events.aclose()

    async def _alive(self) -> bool | None:
        return await acheck_sandbox_health(self._health)

    async def _feed(self, pid: int, data: bytes) -> None:
        """Write the command's stdin, then end it. A command that ends or closes it before has read what it wanted."""
        selector: Oneof[Literal["pid"], int] = Oneof("pid", pid)
        process = process_pb.ProcessSelector(selector=selector)
        try:
            for start in range(0, len(data), _STDIN_CHUNK):
                chunk: Oneof[Literal["stdin"], bytes] = Oneof("stdin", data[start : start + _STDIN_CHUNK])
                piece = process_pb.ProcessInput(input=chunk)
                await self._rpc.send_input(process_pb.SendInputRequest(process=process, input=piece))
            await self._rpc.close_stdin(process_pb.CloseStdinRequest(process=process))
        except ConnectError as e:
            if e.code is not Code.CANCELED:
                log.debug("stdin of process %d was not read to its end: %s", pid, e.message)

    # --- files ---

    async def write(self, path: str, data: BinaryIO) -> None:
        """Write a file as root, in chunks; missing folders are made."""
        await self._files.write(path, data, user="root")

    @contextlib.asynccontextmanager
    async def read(self, path: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """Read a file as root, in chunks."""
        reader = await self._files.read(path, format="stream", user="root")
        try:
            yield reader
        finally:
            await reader.aclose()


@contextlib.contextmanager
def _cancellation_as_such() -> Iterator[None]:
    """connectrpc turns a cancellation that arrives in a call into an error of its own; asyncio needs it back."""
    try:
        yield
    except ConnectError as e:
        if isinstance(e.__cause__, asyncio.CancelledError):
            raise e.__cause__ from None
        raise


def _ulimits(limits: Limits) -> str:
    blocks = None if limits.file_mb is None else limits.file_mb * 2048  # of 512 bytes
    given = {"t": limits.cpu_s, "f": blocks, "p": limits.processes}
    return " ".join(f"{letter}{number}" for letter, number in given.items() if number is not None)


def _event_of(response: process_pb.StartResponse | None) -> object:
    """The event's own message; None when there is none."""
    wrapped = response.event if response is not None else None
    return wrapped.event.value if wrapped is not None and wrapped.event is not None else None


def _exit_code(end: process_pb.ProcessEvent.EndEvent) -> int:
    """By the shell's convention. envd answers -1 and Go's words for a signal."""
    if end.exited or end.exit_code >= 0:
        return int(end.exit_code)
    name = end.status.removeprefix("signal: ").removesuffix(" (core dumped)")
    number = name.removeprefix("signal ")
    return 128 + (_SIGNALS.get(name) or (int(number) if number.isdecimal() else 0))

"""Detached commands of a remote sandbox, whose output and exit code are files in the box.

Owns ids, what is asked of the scripts, and reading their answer. Nothing about a job is kept here: another process that
attached to the box knows as much.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time

from sandboxes import inside
from sandboxes.base import Command, JobStatus, SandboxError, SandboxGone
from sandboxes.box_calls import BoxCalls, Exec, Reader

_ID = re.compile(r"job-[0-9a-f]{16}")
_WAIT_S = 60.0  # one script waits at most this long, so that a lost stream is noticed
_RETRY_S = 0.2
_MARGIN_S = 30.0
_CAP = 4_000_000
_STATES = {b"running", b"ended", b"timeout", b"lost"}


class JobCalls(BoxCalls):
    """See `sandboxes.base.Sandbox`."""

    num_jobs = 0  # started by this process

    def _execution(self, command: Command, command_id: str, nonce: str, script: str, *arguments: str) -> Exec:
        """The command as the last arguments of a script. Filled in by `remote`. Raises SandboxError."""
        raise NotImplementedError

    async def start_job(self, command: Command) -> str:
        account = self._ready()
        job_id, nonce = f"job-{secrets.token_hex(8)}", secrets.token_hex(16)
        folder = f"{self.state_dir}/jobs/{job_id}"
        execution = self._execution(command, job_id, nonce, inside.JOB_START, inside.JOB_BODY, folder)
        owner = f"{account.uid}:{account.gid}" if command.user is None else command.user
        self.num_jobs += 1
        await self._checked(
            "preparing a job",
            inside.JOB_NEW,
            self.state_dir,
            job_id,
            "" if self.admin is None else owner,
            "" if command.timeout_s is None else f"{command.timeout_s:.3f}",
            str(self._since),
            self._secret,
            inside.JOB_KILL,
            stdin=(command.stdin or "").encode(errors="backslashreplace"),
        )
        reader = Reader(nonce, _CAP)
        try:
            with self._latched():
                code = await asyncio.wait_for(self._exec(execution, reader.feed), _MARGIN_S)
        except TimeoutError as e:
            raise SandboxError(f"the sandbox did not start a job within {_MARGIN_S:.0f} s") from e
        reader.finish()
        if reader.ended is None or reader.ended.code != 0:
            problem = reader.err.text().strip()[-300:]
            raise SandboxError(f"the sandbox could not start a job (exit code {code}): {problem}")
        return job_id

    async def job(self, job_id: str) -> JobStatus:
        return await self._status(job_id, 0.0)

    async def wait_job(self, job_id: str, timeout_s: float | None = None) -> JobStatus:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = _WAIT_S if end is None else min(_WAIT_S, max(0.0, end - time.monotonic()))
            try:
                status = await self._status(job_id, left)
            except SandboxGone:
                raise
            except SandboxError:
                # Something in the box ended the script that waits (kill_all, an out-of-memory kill): look again.
                self._ready()
                await asyncio.sleep(_RETRY_S)
                status = await self._status(job_id, 0.0)
            if not status.running or (end is not None and time.monotonic() >= end):
                return status

    async def kill_job(self, job_id: str) -> None:
        self._ready()
        if not _ID.fullmatch(job_id):
            raise KeyError(job_id)
        await self._end_marked(job_id, alone=False)

    async def _end_marked(self, command_id: str, *, alone: bool) -> None:
        """End everything of a command. Filled in by `remote`."""
        raise NotImplementedError

    async def _status(self, job_id: str, wait_s: float) -> JobStatus:
        self._ready()
        if not _ID.fullmatch(job_id):
            raise KeyError(job_id)
        folder = f"{self.state_dir}/jobs/{job_id}"
        arguments = (folder, str(int(wait_s * 100)), str(_CAP))
        code, reader = await self._script(
            inside.JOB_STATUS, *arguments, cap=2 * _CAP + 4096, limit_s=wait_s + _MARGIN_S
        )
        if code == inside.NOT_THERE:
            raise KeyError(job_id)
        head, _, out = reader.out.data().partition(b"\n")
        words = head.split()
        if len(words) != 6 or words[0] not in _STATES:
            raise SandboxError(f"the state of {job_id} cannot be read: {head[:100]!r} {reader.err.text()[-300:]}")
        num_out, num_err = int(words[2]), int(words[3])
        ended = words[0] == b"ended"
        return JobStatus(
            running=words[0] == b"running",
            exit_code=int(words[1]) if ended and words[1].isdigit() else None,
            stdout=_cut(out, num_out),
            stderr=_cut(reader.err.data(), num_err),
            truncated=num_out > _CAP or num_err > _CAP,
            lost=words[0] == b"lost",
            timed_out=words[0] == b"timeout",
            oom=words[4].isdigit() and int(words[4]) > 0,
            duration_s=int(words[5]) / 100 if ended and words[5].isdigit() else None,
        )


def _cut(data: bytes, size: int) -> str:
    """Text of a stream of `size` bytes of which its two halves came, with the marker line of `output.Kept`."""
    if size > _CAP:
        head = _CAP - _CAP // 2
        data = data[:head] + f"\n[... {size - _CAP} bytes cut ...]\n".encode() + data[head:]
    return data.decode(errors="backslashreplace")

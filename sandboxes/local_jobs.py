"""Detached commands of a local sandbox, as folders: what the caller writes, the supervisor fills and anybody reads.

`Jobs` starts and ends the supervisors of one sandbox (`job_supervisor`), for `local_box`. Owns the layout of
`<control>/jobs/<id>/`: `order.json` and `stdin` (from the caller), `supervisor.json` (who runs it), `end.json` (how it
ended), `broken.json` (the sandbox's limit that ended it), and each stream as `<name>.head` and numbered segments behind
it, of which the last two are kept. Blocking.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sandboxes.base import JobStatus, SandboxError
from sandboxes.processes import MARKER, is_running, kill_owned, read_proc

_SUPERVISOR = Path(__file__).with_name("job_supervisor.py")
_KILL_S = 5.0  # for a supervisor to end its job
_SEGMENT_BYTES = 1 << 16  # at least, so that a small cap does not mean a new file for every few bytes


@dataclass(frozen=True, slots=True)
class Order:
    """What a supervisor is to do."""

    job_id: str
    command_id: str  # the last id in the marker variable of its processes
    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    output_cap: int
    timeout_s: float | None  # from the command's start
    ends_at: float | None  # the sandbox's deadline, in seconds of CLOCK_MONOTONIC
    control: str | None  # of the sealed box that it runs in; None = directly on this machine
    uid: int | None  # of the sealed box's processes; None = ours


class JobFolder:
    """One job, from outside or from its supervisor."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, jobs: Path, order: Order, stdin: bytes | None) -> JobFolder:
        folder = cls(jobs / order.job_id)
        folder.path.mkdir(parents=True)
        if stdin is not None:
            (folder.path / "stdin").write_bytes(stdin)
        folder._write("order.json", asdict(order))
        return folder

    def order(self) -> Order:
        return Order(**self._read("order.json"))

    def open_stdin(self) -> int:
        """A descriptor for its standard input, /dev/null when none was given."""
        path = self.path / "stdin"
        return os.open(path if path.exists() else os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def sign(self) -> None:
        """Note this process as the supervisor."""
        me = read_proc(os.getpid())
        self._write("supervisor.json", [os.getpid(), me.start_ticks if me else 0])

    def supervisor(self) -> int | None:
        """The pid of the living supervisor, None when there is none."""
        signed = self._read_if_there("supervisor.json")
        if signed is None:
            return None
        pid, ticks = signed
        return pid if is_running(pid, ticks) else None

    def end(self, exit_code: int | None, *, timed_out: bool, duration_s: float) -> None:
        self._write("end.json", {"exit_code": exit_code, "timed_out": timed_out, "duration_s": duration_s})

    def break_at(self, limit: str) -> None:
        """Note that the sandbox is about to end the job, because it has passed this limit of the whole."""
        if not self.has_ended():
            self._write("broken.json", limit)

    def has_ended(self) -> bool:
        return (self.path / "end.json").exists() or self.supervisor() is None

    def status(self) -> JobStatus:
        alive = self.supervisor() is not None  # asked first: it writes the end before it goes
        end, broken = self._read_if_there("end.json"), self._read_if_there("broken.json") or ""
        cap = self.order().output_cap
        out, err = (StreamFile(self.path, name, cap) for name in ("stdout", "stderr"))
        (stdout, cut_out), (stderr, cut_err) = out.text(), err.text()
        if broken and not alive:
            stderr += f"sandbox: killed at its {broken}\n"
        return JobStatus(
            running=end is None and alive,
            exit_code=None if end is None else end["exit_code"],
            stdout=stdout,
            stderr=stderr,
            truncated=cut_out or cut_err,
            lost=end is None and not alive,
            timed_out=end is not None and end["timed_out"],
            oom=broken.startswith("memory"),
            duration_s=None if end is None else end["duration_s"],
        )

    def _write(self, name: str, data: Any) -> None:
        temp = self.path / f".{name}.tmp"
        temp.write_text(json.dumps(data))
        temp.replace(self.path / name)

    def _read(self, name: str) -> Any:
        return json.loads((self.path / name).read_text())

    def _read_if_there(self, name: str) -> Any:
        try:
            return self._read(name)
        except FileNotFoundError:
            return None


class Jobs:
    """The jobs of one sandbox, those of an owner before us among them. `jobs_id` is what their supervisors carry."""

    def __init__(self, path: Path, jobs_id: str) -> None:
        self._path = path
        self._id = jobs_id
        self._supervisors: list[subprocess.Popen[bytes]] = []  # our own children

    def start(self, order: Order, stdin: bytes | None, marker: str) -> None:
        """Raises SandboxError when the supervisor cannot start the command. `marker` is the sandbox's."""
        folder = JobFolder.create(self._path, order, stdin)
        with (folder.path / "log").open("wb") as errors:
            supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SUPERVISOR), str(folder.path)],
                env={"PATH": os.defpath, MARKER: f"{marker}/{self._id}"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._supervisors.append(supervisor)
        assert supervisor.stdout is not None
        with supervisor.stdout as told:
            said = told.readline().decode(errors="backslashreplace").strip()
        if said != "started":
            raise SandboxError(f"cannot start a job in the sandbox: {said or 'its supervisor ended at once'}")

    def get(self, job_id: str) -> JobFolder:
        """Raises KeyError."""
        folder = JobFolder(self._path / job_id)
        if "/" in job_id or not job_id.strip(".") or not (folder.path / "order.json").is_file():
            raise KeyError(job_id)
        self._poll()
        return folder

    def kill(self, job_id: str) -> None:
        """End everything of the job. Raises SandboxError when it cannot be ended."""
        folder = self.get(job_id)
        pid = folder.supervisor()
        proc = None if pid is None else read_proc(pid)
        if proc is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(proc.pid, signal.SIGTERM)
        end = time.monotonic() + _KILL_S
        while is_running(proc.pid, proc.start_ticks):
            if time.monotonic() > end:
                raise SandboxError(f"the job {job_id} cannot be ended")
            time.sleep(0.005)

    def break_all(self, limit: str) -> None:
        """Before `kill_all`, when the sandbox has passed a limit of the whole."""
        for order in self._path.glob("*/order.json"):
            JobFolder(order.parent).break_at(limit)

    def kill_all(self) -> None:
        """End the supervisors. Raises LifecycleError."""
        if self.any():
            kill_owned(self._id)
        self._poll()

    def any(self) -> bool:
        """Whether there has ever been one."""
        return bool(self._supervisors) or self._path.exists()

    def num_running(self) -> int:
        """Whose supervisors live, also those that an owner before us started."""
        self._poll()
        signed = self._path.glob("*/supervisor.json")
        return sum(JobFolder(path.parent).supervisor() is not None for path in signed)

    def bury(self) -> None:
        """Wait for supervisors that were killed."""
        for supervisor in self._supervisors:
            supervisor.wait()

    def _poll(self) -> None:
        for supervisor in self._supervisors:
            supervisor.poll()


class StreamFile:
    """A stream on disk, bounded: its first and its last bytes, `cap` together, and how many there were in between."""

    def __init__(self, folder: Path, name: str, cap: int) -> None:
        self._folder = folder
        self._name = name
        self._head_cap, self._tail_cap = cap - cap // 2, cap // 2
        self._segment_bytes = max(self._tail_cap, _SEGMENT_BYTES)
        self._head_bytes = 0
        self._number = 0
        self._bytes = 0  # of the current segment

    def append(self, data: bytes) -> None:
        """Only the supervisor writes, from one object."""
        if room := self._head_cap - self._head_bytes:
            self._add(self._folder / f"{self._name}.head", data[:room])
            self._head_bytes += len(data[:room])
            data = data[room:]
        while data:
            room = self._segment_bytes - self._bytes
            self._add(self._segment(self._number), data[:room])
            self._bytes += len(data[:room])
            data = data[room:]
            if self._bytes == self._segment_bytes:
                self._number, self._bytes = self._number + 1, 0
                if self._number >= 2:
                    self._segment(self._number - 2).unlink()

    def _segment(self, number: int) -> Path:
        return self._folder / f"{self._name}.{number}"

    @staticmethod
    def _add(path: Path, data: bytes) -> None:
        if data:
            with path.open("ab") as file:
                file.write(data)

    def text(self) -> tuple[str, bool]:
        """What is kept, undecodable bytes escaped and a marker line where bytes were cut; whether some were."""
        while True:
            try:
                head, tail, cut = self._parts()
                break
            except FileNotFoundError:  # a segment was dropped between listing and reading
                continue
        marker = f"\n[... {cut} bytes cut ...]\n".encode() if cut else b""
        return b"".join((head, marker, tail)).decode(errors="backslashreplace"), cut > 0

    def _parts(self) -> tuple[bytes, bytes, int]:
        names = {entry for entry in os.listdir(self._folder) if entry.startswith(f"{self._name}.")}
        head_name = f"{self._name}.head"
        numbers = sorted(int(entry.rpartition(".")[2]) for entry in names - {head_name})
        # The segments first: what the supervisor adds meanwhile is then only missing at the end.
        segments = [self._segment(number).read_bytes() for number in numbers[-2:]]
        head = (self._folder / head_name).read_bytes() if head_name in names else b""
        total = numbers[-1] * self._segment_bytes + len(segments[-1]) if numbers else 0
        kept = b"".join(segments)
        tail = kept[len(kept) - min(self._tail_cap, len(kept)) :]
        return head, tail, total - len(tail)

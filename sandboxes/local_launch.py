"""How a command of a local sandbox is started: the id, the environment, the limits and the folder that it gets.

Owns what is the same for a command that is waited for and for a detached one, and the start of the former, directly on
this machine (`local_process`) or sealed in (`bubblewrap_box`). Knows nothing of what becomes of it: that is
`local_commands`', the caller of `start`; `local_box` makes the launcher and asks it for a job's `call`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandboxes import bubblewrap
from sandboxes.base import Command
from sandboxes.bubblewrap_box import SealedBox
from sandboxes.files import parts_of
from sandboxes.inside import with_odd_names
from sandboxes.local_plan import Plan
from sandboxes.local_process import HostProcess, Running, in_memory, search_path
from sandboxes.local_watch import ulimits
from sandboxes.output import Capture
from sandboxes.ownership import Claim
from sandboxes.processes import MARKER


@dataclass(frozen=True, slots=True)
class Call:
    """A command as it is started. Example: Call("sandbox-7-3-0a.7-1", ["/bin/sh", ..], "/app", {..}, "/app")."""

    command_id: str  # the last id in the marker variable of its processes
    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    folder: str  # `cwd` as it is called in the sandbox


class Launcher:
    """Of one sandbox. Made when its folder is there; a sealed one's box need not run yet."""

    def __init__(self, plan: Plan, claim: Claim, root: Path, sealed: SealedBox | None) -> None:
        self._plan = plan
        self._claim = claim
        self._root = None if plan.sealed else root
        self._sealed = sealed
        self._env = self._environment()
        self._num_calls = 0

    def call(self, command: Command) -> Call:
        """Each time another id."""
        self._num_calls += 1
        command_id = f"{self._claim.id}.{os.getpid()}-{self._num_calls}"
        folder = self._plan.workdir if command.cwd is None else command.cwd
        env = {**self._env, **command.env}
        argv = with_odd_names(command.argv, env)
        return Call(
            command_id=command_id,
            argv=["/bin/sh", "-c", ulimits(self._plan.limits) + 'exec "$@"', "sh", *argv],
            cwd=place(folder, self._root),
            env={**env, MARKER: f"{self._claim.marker}/{command_id}"},
            folder=folder,
        )

    def start(self, call: Call, stdin: bytes | None, out: Capture, err: Capture) -> Running:
        """On the event loop, as asyncio's own subprocesses do: a start that is cancelled half-way is worse."""
        try:
            with in_memory(stdin) as fd:
                stdio = (fd, out.write_fd, err.write_fd)
                if self._sealed is not None:
                    running: Running = self._sealed.run(call.argv, call.cwd, call.env, stdio)
                else:
                    running = HostProcess(
                        call.argv, cwd=call.cwd, env=call.env, command_id=call.command_id, stdio=stdio
                    )
        except BaseException:
            out.close()
            err.close()
            raise
        for capture in (out, err):
            capture.close_write_end()
            capture.start()
        return running

    def _environment(self) -> dict[str, str]:
        plan = self._plan
        path = bubblewrap.search_path(plan.mounts) if plan.sealed else search_path()
        return {
            "PATH": os.pathsep.join(path),
            "HOME": place("/home", self._root),
            "TMPDIR": place("/tmp", self._root),
            "LANG": "C.UTF-8",
            "SANDBOX_ROOT": "" if self._root is None else str(self._root),
            **plan.env,
        }


def place(path: str, root: Path | None) -> str:
    """The path of the sandbox as its commands name it. `root`: where its files are here; None = they see them at /."""
    inside = "/" + "/".join(parts_of(path))
    return inside if root is None else str(root / inside[1:])


def stdin_of(command: Command) -> bytes | None:
    return None if command.stdin is None else command.stdin.encode(errors="backslashreplace")

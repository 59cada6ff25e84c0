"""Waits for a node's worker to die, however it does, and then ends what it left: sandboxes above all.

Run as a script by `worker`, never imported by it. Ray kills a worker whose runner is gone, and its child processes, by
SIGKILL: nothing that they would do at their end is done. So this one leaves its parent at once, watches the worker's
pidfd, and reaps the node's registry. Where it was killed as well (a host that lost its power), the next worker that
starts on the node does it. Only the standard library and `sandboxes.lifecycle`, so that it costs little to have.
"""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[3])
_AGAIN_S = (0.0, 1.0, 5.0)  # something may be in uninterruptible sleep, or an engine busy


def watch(pid: int, start_ticks: int, registry: Path) -> None:
    """Blocking, until the process has ended and what it left is reaped."""
    from sandboxes.lifecycle import LifecycleError, reap
    from sandboxes.processes import is_running

    try:
        poll = select.poll()
        poll.register(os.pidfd_open(pid), select.POLLIN)
        if is_running(pid, start_ticks):  # else the pidfd may be of a process that reused the pid
            poll.poll()
    except OSError:  # no pidfd on this kernel, or it died this instant
        while is_running(pid, start_ticks):
            time.sleep(0.5)
    for wait_s in _AGAIN_S:
        time.sleep(wait_s)
        try:
            if not any(left.problem for left in reap(registry)):
                return
        except (OSError, LifecycleError):  # nobody reads what would be said here; the last resort is the next worker
            continue


def main(argv: list[str]) -> int:
    if os.fork():
        return 0
    sys.path.insert(0, _ROOT)  # started with -I -S: no site, no working directory
    watch(int(argv[0]), int(argv[1]), Path(argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The process between an owner and its long-lived child: ends the child, and all it started, when the owner dies.

Run as a script by `lifecycle.start_process`, never imported. It watches the owner's pidfd, because PR_SET_PDEATHSIG
fires when the *thread* that started the child ends. Only the standard library, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started with -I -S: no site, no working directory

from sandboxes.lifecycle import kept, reap
from sandboxes.processes import Traces, is_running, kill_owned

_PR_SET_CHILD_SUBREAPER = 36


def supervise(order: dict[str, Any]) -> int:
    """Run the child, end it when the owner dies, leave nothing behind; the child's exit code."""
    # Daemonised grandchildren become ours instead of init's, so the search by parent finds them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    passed: set[int] = set()

    def pass_on(signum: int, _: object) -> None:
        if signum not in passed:  # the group includes us
            passed.add(signum)
            os.killpg(0, signum)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, pass_on)
    owner: tuple[int, int] = tuple(order["owner"])
    if not is_running(*owner):
        return 1
    try:
        child = subprocess.Popen(order["argv"], stdin=subprocess.DEVNULL, pass_fds=tuple(order["pass_fds"]))
    except OSError as e:
        print(f"cannot start {order['argv'][0]}: {e}", file=sys.stderr)
        return 127
    for fd in order["pass_fds"]:
        os.close(fd)
    signal.signal(signal.SIGCHLD, lambda *_: _bury_others(child.pid))
    _wait_for_either(owner, child)
    owner_died = not is_running(*owner)
    if owner_died and child.poll() is None:
        pass_on(signal.SIGTERM, None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(order["grace_s"])
    registry = Path(order["registry"])
    traces = Traces(session=os.getsid(0), parent=os.getpid())
    kill_owned(order["id"], traces, spared=kept(registry))  # while the owner lives, it may start the child again
    code = child.wait()
    _bury_others(0)
    if owner_died:
        (registry / f"{order['id']}.json").unlink(missing_ok=True)
    reap(registry)  # what the child owned itself
    return code


def _wait_for_either(owner: tuple[int, int], child: subprocess.Popen[bytes]) -> None:
    try:
        fds = [os.pidfd_open(owner[0]), os.pidfd_open(child.pid)]
    except OSError:  # no pidfd on this kernel, or the owner died this instant
        while is_running(*owner) and child.poll() is None:
            time.sleep(0.5)
        return
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    if is_running(*owner):  # else the pidfd may be of a process that reused the pid
        poll.poll()


def _bury_others(child_pid: int) -> None:
    """Collect adopted processes that ended; the child itself is left for its Popen."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == child_pid:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def main(args: list[str]) -> int:
    code = supervise(json.loads(args[0]))
    if code < 0:  # end as the child ended, so that the owner sees the same signal
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""SIGTERM ends a command in order, as Ctrl-C does: what it has started is closed, and a run's learner may save first.

Owns the handler. Before it is set a command has started nothing, so that the signal may end it as it likes. Called by
the command line around every command; one that has a handler of its own (a job's process) sets that over this one.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from harness_trainer.errors import Terminated

EXIT_CODE = 128 + signal.SIGTERM


@contextmanager
def heeded() -> Iterator[None]:
    """Inside, SIGTERM raises Terminated. Signals are the main thread's: in another one nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        # One that was heard is ignored until the process has ended.
        if signal.getsignal(signal.SIGTERM) == _terminate:
            signal.signal(signal.SIGTERM, before)


def _terminate(*_: object) -> None:
    # Services repeat it, to every process of a group; the order that the first one began must not be cut short.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated

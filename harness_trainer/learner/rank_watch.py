"""No process of the learner outlives another: each is told within seconds that one has failed, died or fallen silent.

A process that waits in a collective call hears of nothing until that call's own limit, which must be long. So a thread
of each looks, once a second, at a small store that the main process holds: the others count up there, and whoever fails
leaves its error. The launcher sees only the processes of its own machine. The learner process calls `among_peers`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from harness_trainer.errors import HarnessTrainerError, TrainingFailed
from harness_trainer.learner.config import LearnerConfig
from harness_trainer.learner.ranks import Ranks, join

LOST_AFTER_S = 60.0  # without a sign of life; a paused process and a cut network look alike
_LOOK_S = 1.0
_STORE_TIMEOUT_S = 20.0
_GRACE_S = 10.0  # for the main process to leave the engine running
_ERROR = "error"
_HEARD = "heard"


class PeerLost(Exception):
    """Another process of the learner failed, died or fell silent: no fault of this one's, and a restart may do."""


@contextmanager
def among_peers(config: LearnerConfig) -> Iterator[Ranks]:
    """Meet the other processes of the learner; whichever way the block ends, all of them end with it.

    Raises what the block raises; where another process has ended this one TrainingFailed, if that one's error is for a
    person, else PeerLost. SetupError when this one was not launched as one of `num_processes`.
    """
    cpu = config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())
    ranks = join(config.num_processes, cpu=cpu, timeout_s=config.process_timeout_s)
    watch = RankWatch(ranks)
    try:
        yield ranks
        watch.leave()
    except BaseException as error:
        if ranks.size > 1:
            # The launcher ends us as soon as another has ended: not before all is said.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        found = watch.judge(error)
        watch.tell(found)
        if found is error:
            raise
        raise found from error


class RankWatch:
    """One process's look at the others, and its word to them."""

    def __init__(self, ranks: Ranks) -> None:
        """A collective call: every process makes its own."""
        self._ranks = ranks
        self._over = threading.Event()
        self._peer_error: Exception | None = None  # why another process has ended this one
        if ranks.size == 1:
            return
        host = os.environ["MASTER_ADDR"]
        timeout = timedelta(seconds=_STORE_TIMEOUT_S)
        if ranks.is_main:
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        port: int = ranks.gather(self._store.port if ranks.is_main else 0)[0]
        if not ranks.is_main:
            self._store = TCPStore(host, port, is_master=False, timeout=timeout)
        look = self._look_after_others() if ranks.is_main else self._look_after_main()
        self._thread = threading.Thread(target=self._watch, args=(look,), name="rank-watch", daemon=True)
        self._thread.start()

    def judge(self, error: BaseException) -> BaseException:
        """What really ended this process, given what it ended with."""
        if self._ranks.size == 1:
            return error
        broken = _broken_connection(error)
        if broken is not None and self._peer_error is None:
            time.sleep(2 * _LOOK_S)  # a connection breaks sooner than its reason is known
            if self._peer_error is None:
                self._peer_error = self._word() or PeerLost(f"another process of the learner is gone ({_line(broken)})")
        if isinstance(error, HarnessTrainerError) and broken is None:
            return error
        return self._peer_error or error

    def tell(self, error: BaseException) -> None:
        """Say why this process ends, to all others; they end within seconds. Not when it is stopped: so are they."""
        if self._ranks.size == 1 or not isinstance(error, Exception) or error is self._peer_error:
            return
        self._over.set()
        known = isinstance(error, HarnessTrainerError)
        text = str(error) if known else f"process {self._ranks.rank} of the learner failed: {_line(error)}"
        try:
            self._store.set(_ERROR, json.dumps({"known": known, "text": text}))
            give_up = time.monotonic() + 3 * _LOOK_S
            # The store goes with the main process, and the text with it.
            while self._ranks.is_main and time.monotonic() < give_up:
                if self._store.add(_HEARD, 0) >= self._ranks.size - 1:
                    return
                time.sleep(0.1)
        except RuntimeError as lost:
            print(f"the others could not be told: {_line(lost)}", file=sys.stderr, flush=True)

    def leave(self) -> None:
        """Every process, when all is done: from here on it is no failure that one ends. A collective call."""
        if self._ranks.size > 1:
            self._ranks.gather(None)
            self._over.set()
            self._thread.join()
            self._ranks.gather(None)  # the store stays until nobody looks at it any more
            dist.destroy_process_group()

    def _watch(self, look: Callable[[], Exception | None]) -> None:
        while not self._over.wait(_LOOK_S):
            try:
                error = look()
            except RuntimeError as lost:  # what the store's client raises when its server is gone, or silent
                error = PeerLost(f"the main process of the learner is gone ({_line(lost)})")
            if error is not None and not self._over.is_set():
                self._end(error)

    def _end(self, error: Exception) -> None:
        self._peer_error = error
        print(f"process {self._ranks.rank} of the learner ends: {error}", file=sys.stderr, flush=True)
        if self._ranks.is_main:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_GRACE_S)  # then it waits in a call that no signal interrupts
        os._exit(1)

    def _word(self) -> Exception | None:
        """What another process has left as its reason."""
        try:
            if not self._store.check([_ERROR]):
                return None
            word = json.loads(self._store.get(_ERROR))
        except RuntimeError:  # the store went with the main process
            return None
        return TrainingFailed(word["text"]) if word["known"] else PeerLost(word["text"])

    def _look_after_others(self) -> Callable[[], Exception | None]:
        seen: dict[int, tuple[int, float]] = {}  # by rank: its count, and when that changed

        def look() -> Exception | None:
            now = time.monotonic()
            for rank in range(1, self._ranks.size):
                count = self._store.add(_alive(rank), 0)
                if rank not in seen or seen[rank][0] != count:
                    seen[rank] = (count, now)
                elif now - seen[rank][1] > LOST_AFTER_S:
                    return PeerLost(f"process {rank} of the learner gave no sign of life for {LOST_AFTER_S:.0f} s")
            return self._word()

        return look

    def _look_after_main(self) -> Callable[[], Exception | None]:
        launcher = os.getppid()

        def look() -> Exception | None:
            if os.getppid() != launcher:
                return PeerLost("its launcher is gone")
            self._store.add(_alive(self._ranks.rank), 1)
            word = self._word()
            if word is not None:
                self._store.add(_HEARD, 1)
            return word

        return look


def _broken_connection(error: BaseException | None) -> RuntimeError | None:
    """What a call on the other processes raised, however the error that it led to is worded."""
    while error is not None:
        if isinstance(error, RuntimeError) and ("gloo" in str(error) or isinstance(error, dist.DistError)):
            return error
        error = error.__cause__
    return None


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _alive(rank: int) -> str:
    return f"alive/{rank}"

"""The processes of a run: started, watched, started again when they die, ended together.

Owns the life of each part and nothing of what it does: a `Part` says how it is started, what must be done at once when
it has died, and in which state of the run its death has a reason that a restart would only repeat. The rule for how
often is `restarts`'. `run` makes the parts and calls `look` several times a second; a part that takes long to start
again (an engine loads for a minute) does so in a thread, while the others are watched on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from harness_trainer.errors import HarnessTrainerError, TrainingFailed
from harness_trainer.supervision.process import PartProcess
from harness_trainer.supervision.restarts import Restarts
from sandboxes.lifecycle import LifecycleError

STOP_GRACE_S = 6.0  # Ctrl-C is to end everything within ten


def _nothing() -> None:
    return None


@dataclass(slots=True, eq=False)
class Part:
    """One process of the run, in all its lives.

    `launch` starts it and returns when it serves, or raises; it is blocking and may be called from a thread. `on_death`
    is called in the supervisor's thread as soon as a death is seen, before anything is started again. `reason` is what
    the part wrote down when it ended by its own judgement: such an end is final. `give_up` makes a `launch` under way
    in a thread return soon. `ends` = exit code 0 is its purpose.
    """

    name: str
    log: Path
    error: type[HarnessTrainerError]  # what its death means when it is not started again
    launch: Callable[[], PartProcess]
    on_death: Callable[[], None] = _nothing
    reason: Callable[[], str | None] = _nothing
    give_up: Callable[[], None] = _nothing
    ends: bool = False
    process: PartProcess | None = None
    starting: Future[PartProcess] | None = None  # set while it is being started again
    again_at: float | None = None  # monotonic seconds; set while it waits to be started again

    @property
    def running(self) -> bool:
        """It was started, serves, and has not been seen to die."""
        return self.process is not None and self.starting is None and self.again_at is None

    @property
    def finished(self) -> bool:
        """It has done what it was for."""
        return self.ends and self.running and self.process is not None and self.process.returncode == 0


class Parts:
    """All parts of a run. `event` appends to events.jsonl; `say` tells a person a line.

    Not thread-safe: one thread calls it.
    """

    def __init__(
        self,
        restarts: Restarts,
        *,
        event: Callable[..., None],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._restarts = restarts
        self._event = event
        self._say = say
        self._clock = clock
        self._parts: list[Part] = []
        # Threads are made when they are needed: in most runs nothing dies.
        self._pool = ThreadPoolExecutor(max_workers=16, thread_name_prefix="start")

    def start(self, part: Part) -> None:
        """Start it for the first time and wait until it serves. Raises what its `launch` raises: no second try."""
        self._parts.append(part)
        part.process = part.launch()
        self._event("started", part=part.name, pid=part.process.pid)

    def start_together(self, parts: Sequence[Part]) -> None:
        """The same for several at a time. Raises what the first to fail raises; `stop` ends the others."""
        if len(parts) == 1:
            self.start(parts[0])
            return
        self._parts += parts
        for part in parts:
            part.starting = self._pool.submit(part.launch)
        wait([part.starting for part in parts if part.starting is not None], return_when=FIRST_EXCEPTION)
        done = [part for part in parts if part.starting is not None and part.starting.done()]
        for part in sorted(done, key=lambda one: one.starting is None or one.starting.exception() is None):
            assert part.starting is not None
            part.process, part.starting = part.starting.result(), None
            self._event("started", part=part.name, pid=part.process.pid)

    def look(self) -> None:
        """See who has died, and start again what may be.

        Raises the part's error when it ended by its own judgement, or died too often.
        """
        for part in self._parts:
            if part.starting is not None:
                self._look_at_start(part)
            elif part.again_at is not None:
                if self._clock() >= part.again_at:
                    part.again_at = None
                    part.starting = self._pool.submit(_start_again, part)
            elif part.process is not None and not part.process.alive() and not part.finished:
                self._died(part, part.process.returncode, last_line(part.log))

    def stop(self) -> None:
        """End every part at the same time, so that the waits overlap. Idempotent."""
        processes: list[tuple[str, PartProcess]] = []
        for part in self._parts:
            if part.starting is not None:
                part.give_up()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for part in self._parts:
            if part.starting is not None and not part.starting.cancelled() and part.starting.exception() is None:
                processes.append((part.name, part.starting.result()))
            elif part.process is not None:
                processes.append((part.name, part.process))
        with ThreadPoolExecutor(max_workers=max(1, len(processes))) as pool:
            codes = pool.map(lambda item: item[1].stop(STOP_GRACE_S), processes)
            for (name, _), code in zip(processes, codes, strict=True):
                self._event("stopped", part=name, exit_code=code)

    def _look_at_start(self, part: Part) -> None:
        assert part.starting is not None
        if not part.starting.done():
            return
        starting, part.starting = part.starting, None
        try:
            part.process = starting.result()
        except (HarnessTrainerError, LifecycleError, OSError) as error:
            self._died(part, None, str(error))
            return
        self._event("started", part=part.name, pid=part.process.pid, deaths=self._restarts.num_deaths(part.name))
        self._say(f"the {part.name} runs again")

    def _died(self, part: Part, code: int | None, line: str) -> None:
        """`code` None = it died, or never served, while it was started again."""
        part.on_death()
        if code is not None and (reason := part.reason()) is not None:
            raise TrainingFailed(reason)
        wait_s = self._restarts.died(part.name)
        number = self._restarts.num_deaths(part.name)
        config = self._restarts.config
        how = "did not start again" if code is None else f"died ({_ending(code)})"
        if wait_s is None:
            often = "" if number == 1 else f" {number} times within {config.window_s:g} s"
            raise part.error(f"the {part.name} died{often}: {line} (log: {part.log})")
        self._event(
            "restart",
            part=part.name,
            pid=None if part.process is None else part.process.pid,
            exit_code=code,
            last_line=line,
            deaths=number,
            in_s=wait_s,
        )
        self._say(
            f"the {part.name} {how}: {line}; it is started again"
            f"{f' in {wait_s:g} s' if wait_s else ''} (death {number} of at most {config.max_deaths})"
        )
        part.again_at = self._clock() + wait_s


def _start_again(part: Part) -> PartProcess:
    """Whatever is left of the earlier life ends first: it may hold a port, a GPU, or the run's store.

    What it has put by for its successor lives on: the sandboxes of agents at work.
    """
    if part.process is not None:
        part.process.stop(0.0, successor=True)
    return part.launch()


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def last_line(log: Path) -> str:
    """The last line of a log that says anything."""
    try:
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError as error:
        return f"no log ({error})"
    return next((line for line in reversed(lines) if line), "its log is empty")

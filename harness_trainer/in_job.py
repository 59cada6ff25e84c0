"""The process that a job is: `harness-trainer launch inside`. Brings a run back, checks the machine, trains, keeps
copies, ends in time.

Owns signals, the deadline and when copies are made. Checking and training are the ordinary commands, as children, so
that a long upload never waits for them nor they for one. What a copy is `run_copy` knows, where it goes `jobs.copies`.

**A disk's error never ends a run from here.** A run folder that cannot be looked at, and a log that takes no more
(`job_log`), are told and tried again, without an end, while signals and the deadline are heeded as ever: whether the
run can go on without its folder is its own to judge, and it ends by itself where it cannot. (A file system that hangs
instead of failing, such as a hard-mounted NFS, holds this process like any other.)
Fatal are such errors only before it was
started (`go`), and after it is over, when its last copy cannot be made (`NOT_KEPT`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from harness_trainer.errors import HarnessTrainerError, SetupError
from harness_trainer.job_log import JobLog
from harness_trainer.job_order import JobOrder
from harness_trainer.learner import checkpoints
from harness_trainer.run_copy import newest_step, snapshot
from harness_trainer.rundir import RunDir, filesystem_errors, write_atomically
from jobs.copies import Copies
from jobs.errors import CopyTaken, JobsError
from jobs.masking import Mask

STOPPED = 75  # exit code: the run is not over, and whoever starts it again goes on with it
NOT_KEPT = 5  # what it came to could not be put where it outlives the job
TAKEN = 6  # another job has the run's copy


@dataclass(frozen=True, slots=True)
class Pace:
    """In seconds. When the machine is told to go, `save` is for a checkpoint on request, `end` for the run to end."""

    poll: float = 1.0
    check: float = 300.0  # longest time for the checks of this machine, which take seconds
    save: float = 15.0
    end: float = 25.0
    push_again: float = 60.0  # after one that failed
    push_apart: float = 60.0  # after one that was made: a repository takes some hundred commits an hour
    last_pushes: tuple[float, ...] = (5.0, 30.0, 0.0)  # after each of the last tries


class JobRun:
    """One job's life. `train` is the command that trains, without what is added here: config and folder. `check` is
    the one that is run before it with the same, and must end well; None = this machine is not checked.

    `copies` None = the run folder itself outlives the job. `publish` takes the trained model's folder somewhere and
    says where; None = it stays in the run folder. `warning` is a signal that says that the job's time is up in
    `margin_s`. `spent_s` is what of its time is over already. `again` is the command with which a person goes on.
    """

    def __init__(
        self,
        order: JobOrder,
        copies: Copies | None,
        run: RunDir,
        *,
        train: Sequence[str],
        check: Sequence[str] | None = None,
        mask: Mask,
        publish: Callable[[Path], str] | None = None,
        warning: signal.Signals | None = None,
        spent_s: float = 0.0,
        again: str | None = None,
        out: IO[str] = sys.stdout,
        pace: Pace = Pace(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._order = order
        self._copies = copies
        self._run = run
        self._train = list(train)
        self._check = None if check is None else list(check)
        self._mask = mask
        self._publish = publish
        self._warning = warning
        self._again = again
        self._log = JobLog(out)
        self._pace = pace
        self._clock = clock
        self._began = clock() - spent_s
        # Set by signals, so without a lock: an Event's may be held by the very thread that the handler interrupts.
        self._told_to_go = False
        self._warned = False
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="copy")
        self._pushing: Future[int | None] | None = None
        self._pushed_step: int | None = None
        self._push_at = 0.0  # not before, by the clock
        self._push_failed = False  # the last one
        self._is_blind = False  # the run folder could not be looked at, the last time
        self._taken: CopyTaken | None = None

    def go(self) -> int:
        """The exit code. Raises JobsError for a copy that cannot be brought back, RunDirError where nothing can be
        written."""
        try:
            return self._go()
        finally:
            self._log.close()

    def _go(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hear)
        if self._warning is not None:
            signal.signal(self._warning, self._hear)
        import yaml

        config = self._run.path.parent / f"{self._order.run}.yaml"
        with filesystem_errors(self._run.path):
            self._bring_back()
            write_atomically(config, yaml.safe_dump(self._order.config, sort_keys=False))
        if self._check is not None and (code := self._checked([*self._check, *self._arguments(config)])):
            return code
        if (reason := self._reason()) is not None:  # there is nothing yet that could be lost
            self._say(f"the run was not started: {reason}")
            self._say_how_to_go_on()
            return STOPPED
        with self._started([*self._train, *self._arguments(config)]) as child:
            reason = self._watch(child)
            if reason is not None:
                self._end(child, reason)
        return self._close(child.wait() if reason is None else STOPPED)

    # -- the run -------------------------------------------------------------------------------------------------

    def _bring_back(self) -> None:
        self._run.path.parent.mkdir(parents=True, exist_ok=True)
        here = newest_step(self._run)
        # Also where the disk has kept the run: another machine may have gone on with it meanwhile, and a copy that was
        # not looked at first would count as somebody else's.
        if self._copies is not None and self._pulled(self._copies, here):
            self._pushed_step = newest_step(self._run)
            self._say(f"going on after step {self._pushed_step}, from the copy at {self._copies.where}")
        elif here is not None:
            self._say(f"going on with the run that is in {self._run.path}")
        elif self._copies is None:
            self._say(f"no checkpoint yet in {self._run.path}: the run begins")
        else:
            self._say(f"a new run; copies go to {self._copies.where}")
        self._run.path.mkdir(exist_ok=True)

    def _pulled(self, copies: Copies, here: int | None) -> bool:
        """The copy in the place of what is here, if that is of an earlier step (`here` None = of none). As a whole: a
        run that was cut off while it came back would look like one without its store, and the log of another store
        beside a copy's store would spoil it. Raises JobsError."""
        stage = self._run.path.with_name(f".{self._run.path.name}.back")
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir()
        try:
            if not copies.pull(stage) or (here is not None and (newest_step(RunDir(stage)) or 0) <= here):
                return False
            with filesystem_errors(self._run.path):
                if self._run.path.exists():
                    shutil.rmtree(self._run.path)
                stage.rename(self._run.path)
            return True
        finally:
            shutil.rmtree(stage, ignore_errors=True)

    def _arguments(self, config: Path) -> list[str]:
        return ["--config", str(config), "--run-dir", str(self._run.path), "--plain"]

    def _checked(self, argv: Sequence[str]) -> int:
        """0 = this machine will do, as far as can be seen; else the exit code. What is wrong is in the log."""
        deadline = time.monotonic() + self._pace.check
        with self._started(argv) as child:
            while child.poll() is None:
                if self._told_within(min(0.1, self._pace.poll)):
                    return 0  # whoever asks next sees it
                if time.monotonic() > deadline:
                    self._say(f"WARNING: the checks of this machine took over {self._pace.check:.0f} s: left out")
                    return 0
        if child.returncode:
            self._say("nothing was started: mend the above, and launch again")
        return child.returncode

    @contextlib.contextmanager
    def _started(self, argv: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
        """Its output is the job's; at the end of the block it has ended."""
        child = self._start(argv)
        reading = threading.Thread(target=self._pass_on, args=(child.stdout,), name="log", daemon=True)
        reading.start()
        try:
            yield child
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            child.wait()
            reading.join(timeout=5.0)

    def _start(self, argv: Sequence[str]) -> subprocess.Popen[str]:
        # Some services signal every process of a job; the run, which inherits this mask, must not die of the warning.
        deaf_to = () if self._warning is None else (self._warning,)
        signal.pthread_sigmask(signal.SIG_BLOCK, deaf_to)
        try:
            # A session of its own: it is told to end by us, once there is a checkpoint.
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, deaf_to)

    def _watch(self, child: subprocess.Popen[str]) -> str | None:
        """Until it ends by itself (None), or there is a reason to end it."""
        has_warned = False
        while child.poll() is None:
            self._told_within(self._pace.poll)
            if (reason := self._reason()) is not None:
                return reason
            left_s = self._left_s()
            if not has_warned and left_s <= 2 * self._order.margin_s:
                has_warned = True
                minutes = (left_s - self._order.margin_s) / 60
                self._say(
                    f"WARNING: the job's timeout is near; the run is ended in {minutes:.0f} minutes, with a checkpoint"
                )
            if self._copies is not None:
                self._push_if_new()
        return None

    def _reason(self) -> str | None:
        """To end the run now."""
        if self._told_to_go:
            return "this machine was told to go"
        if self._warned:
            return f"the job's time limit is {self._order.margin_s / 60:.0f} minutes away"
        if self._taken is not None:
            return str(self._taken)
        if (left_s := self._left_s()) <= self._order.margin_s:
            return f"the job's timeout is {left_s / 60:.0f} minutes away"
        return None

    def _hear(self, number: int, _: object) -> None:
        if number == self._warning:
            self._warned = True
        else:
            self._told_to_go = True

    def _told_within(self, seconds: float) -> bool:
        """Whether this machine is told to go; False after so many seconds without."""
        end = time.monotonic() + seconds
        while not self._told_to_go and (left_s := end - time.monotonic()) > 0:
            time.sleep(min(0.1, left_s))
        return self._told_to_go

    def _left_s(self) -> float:
        return self._order.timeout_s - (self._clock() - self._began)

    def _end(self, child: subprocess.Popen[str], reason: str) -> None:
        """A checkpoint of what is learnt, then Ctrl-C, which closes sandboxes too."""
        self._say(f"ending the run: {reason}")
        if self._taken is None and child.poll() is None and self._asked_to_save():
            wait_s = self._pace.save if self._told_to_go else max(self._pace.save, self._order.margin_s / 2)
            deadline = time.monotonic() + wait_s
            while self._is_save_due() and time.monotonic() < deadline:
                if child.poll() is not None or (self._told_to_go and wait_s > self._pace.save):
                    break
                time.sleep(0.1)
            if self._is_save_due():
                self._say("no checkpoint could be made in the middle of a step: the last one counts")
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(self._pace.end)

    def _asked_to_save(self) -> bool:
        why = checkpoints.request(self._run.checkpoints)
        if why is not None:
            self._say(f"no checkpoint can be asked for ({why}): the last one counts")
        return why is None

    def _is_save_due(self) -> bool:
        """Whether the checkpoint that was asked for is still to come; where nobody can look it may be."""
        try:
            return checkpoints.is_requested(self._run.checkpoints)
        except OSError as error:
            self._cannot_look(error)
            return True

    # -- copies --------------------------------------------------------------------------------------------------

    def _push_if_new(self) -> None:
        if self._pushing is not None:
            if not self._pushing.done():
                return
            self._heed(self._pushing)
            self._pushing = None
        try:
            step = newest_step(self._run)
        except OSError as error:
            self._cannot_look(error)
            return
        if self._is_blind:
            self._is_blind = False
            self._say(f"the run folder {self._run.path} can be read again")
        if step is not None and step != self._pushed_step and self._clock() >= self._push_at:
            self._pushing = self._pool.submit(self._push)

    def _cannot_look(self, error: OSError) -> None:
        """Once, however often it is tried."""
        if not self._is_blind:
            self._is_blind = True
            self._say(
                f"WARNING: the run folder {self._run.path} cannot be read: {error.strerror or error}. The run goes on, "
                "and no copy of it is made until the folder can be read again: look at the disk"
            )

    def _push(self) -> int | None:
        """The step that the copy is of; None = there was nothing to copy, or nowhere to copy it to."""
        if self._copies is None:
            return newest_step(self._run)
        with snapshot(self._run) as found:
            if found is None:
                return None
            size = found.num_bytes / 1e6
            started = time.monotonic()
            where = self._copies.push(found.files, f"{self._order.run}: step {found.step}")
            self._say(f"copied step {found.step} ({size:.0f} MB, {time.monotonic() - started:.0f} s) to {where}")
            return found.step

    def _heed(self, push: Future[int | None]) -> None:
        try:
            self._pushed_step, self._push_failed = push.result(), False
            self._push_at = self._clock() + self._pace.push_apart
        except CopyTaken as error:
            self._taken = error
        except Exception as error:  # whatever a library makes of it: it must not end the training
            is_known = isinstance(error, JobsError | HarnessTrainerError)
            said = str(error) if is_known else f"{type(error).__name__}: {error}"
            self._push_at, self._push_failed = self._clock() + self._pace.push_again, True
            self._say(f"WARNING: the copy could not be made, and is tried again: {said}")

    def _close(self, code: int) -> int:
        """The last copy: of a run that was ended, or that ended by itself, well or not."""
        if self._pushing is not None:
            self._heed(self._pushing)
        for wait_s in self._pace.last_pushes:
            if self._taken is not None:
                break
            self._heed(self._pool.submit(self._push))
            if not self._push_failed:
                break
            time.sleep(wait_s)
        self._pool.shutdown()
        if self._taken is not None:
            self._say(f"no further copy is made: {self._taken}")
            return TAKEN
        if code == 0:
            return self._finish()
        self._say_how_to_go_on()
        return code

    def _say_how_to_go_on(self) -> None:
        if self._pushed_step is not None:
            again = self._again or f"harness-trainer launch hf-jobs resume {os.environ.get('JOB_ID', 'JOB')}"
            self._say(f"to go on after step {self._pushed_step}: {again}")

    def _finish(self) -> int:
        """The run is over. A result that cannot be kept ends with this machine, and so it is a failure."""
        if self._push_failed:
            return NOT_KEPT
        model = next((folder for name in ("model", "adapter") if (folder := self._run.path / name).is_dir()), None)
        if self._publish is not None and model is not None:
            try:
                self._say(f"the trained model is at {self._publish(model)}")
            except JobsError as error:
                self._say(f"the trained model could not be published, and is made again from the copy: {error}")
                return NOT_KEPT
        self._say("the run is over")
        return 0

    # -- telling -------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        self._print(f"[job] {text}")

    def _pass_on(self, stream: IO[str] | None) -> None:
        assert stream is not None
        for line in stream:
            self._print(line.rstrip("\n"))

    def _print(self, line: str) -> None:
        self._log.say(self._mask(line))


def prepare(order: JobOrder) -> None:
    """The environments that this machine lacks. Raises SetupError."""
    if order.setup:
        argv = [sys.executable, "-m", "harness_trainer.cli", "setup", *order.setup]
        if subprocess.run(argv, stdin=subprocess.DEVNULL, check=False).returncode != 0:
            raise SetupError(
                f"{' and '.join(order.setup)} could not be set up: see above, or use an --image that has it"
            )

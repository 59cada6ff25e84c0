"""One optimizer step per agent, from what was captured of it, by the product's own learner beside the engine.

Owns the learner process of a qualification: it publishes its weights to the engine before the first agent plays, as in
a run, and after every step. How a step is taken is `learner`'s; the two meet in a store, as in a run. Called by
`real_engine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from harness_trainer.engine.prepare import ModelInfo
from harness_trainer.errors import TrainingFailed
from harness_trainer.learner.__main__ import LEARNER_ERROR, LearnerSpec
from harness_trainer.learner.config import LearnerConfig
from harness_trainer.rollouts.config import RolloutConfig
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Outcome, RolloutResult
from harness_trainer.rundir import write_atomically
from sandboxes.lifecycle import OwnedProcess, claim, start_process

MAX_RATIO_ERROR = 0.01  # of the mean ratio from 1; a float32 engine and learner agree to 1e-5
_STEP_TIMEOUT_S = 900.0  # thousands of prompt tokens, forward and backward, on a CPU
_FIRST_WEIGHTS_S = 300.0  # from an engine that serves to its first update
_LAST_STEP = 1_000_000  # the learner goes on until it is told to end
_POLL_S = 0.1
_STOP_GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class Step:
    """What one step on one agent's rollout came to. None = there was no step, or it does not say.

    Example: Step("", loss=-0.71, ratio=1.0000021, grad_norm=3.2, num_tokens=48).
    """

    problem: str  # why it does not count; "" = it does
    loss: float | None = None
    ratio: float | None = None  # mean of recomputed over sampled probability, over trained tokens
    grad_norm: float | None = None
    num_tokens: int | None = None  # trained


@dataclass(frozen=True, slots=True)
class Learner:
    """A learner that waits for rollouts."""

    process: OwnedProcess
    store: RolloutStore
    metrics: Path
    log: Path

    async def ready(self) -> None:
        """Until the engine has its first weights from it. Raises TrainingFailed."""
        await self._until(lambda: self.store.policy_version() > 0, _FIRST_WEIGHTS_S, "published no weights")

    async def step(self, result: RolloutResult) -> Step:
        """Take one step on this rollout. What goes wrong is the step's `problem`."""
        if result.reward is None or result.trace is None:
            return Step("no step: the rollout has no reward, or nothing was captured")
        group_id = await asyncio.to_thread(self._hand_over, result)
        try:
            await self._until(lambda: self._told(group_id) is not None, _STEP_TIMEOUT_S, "took no step")
        except TrainingFailed as error:
            return Step(f"no step: {error}")
        told = await asyncio.to_thread(self._told, group_id)
        assert told is not None
        return told

    def _told(self, group_id: int) -> Step | None:
        """What became of the group; None = nothing yet."""
        state, reason = self.store.fate(group_id)
        if state == "dropped":
            return Step(f"no step: {reason}")
        number = self.store.trained_step(group_id)
        return next((step_of(report) for report in self._reports() if report["step"] == number), None)

    def _hand_over(self, result: RolloutResult) -> int:
        """A group of this rollout and one that said nothing and was worth one less: so there is something to prefer."""
        group_id = self.store.next_group_id()
        nothing = RolloutResult(
            f"{result.rollout_id}-nothing", group_id, result.task, result.harness, 0, Outcome.CAPTURE_INVALID, None
        )
        assert result.reward is not None
        nothing.reward = result.reward - 1.0
        self.store.open_group(group_id, result.task, result.harness)
        for slot, one in enumerate((replace(result, group_id=group_id), nothing)):
            self.store.start_rollout(one.rollout_id, group_id, slot, 0)
            self.store.finish_rollout(one, final=True)
        self.store.group_ready(group_id)
        return group_id

    def _reports(self) -> list[dict[str, object]]:
        if not self.metrics.exists():
            return []
        complete = self.metrics.read_text(encoding="utf-8").rpartition("\n")[0]  # not a line that is being written
        return [json.loads(line) for line in complete.splitlines()]

    async def _until(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        end = time.monotonic() + limit_s
        while not await asyncio.to_thread(condition):
            if not self.process.alive():
                why = self.store.state(LEARNER_ERROR) or f"it ended with code {self.process.returncode}"
                raise TrainingFailed(f"the learner died: {why} (log: {self.log})")
            if time.monotonic() > end:
                raise TrainingFailed(f"the learner {what} within {limit_s:.0f} s (log: {self.log})")
            await asyncio.sleep(_POLL_S)


def step_of(report: dict[str, object]) -> Step:
    """The learner's report of a step, judged: finite, and exact as far as the ratio tells."""
    numbers = {name: _number(report.get(name)) for name in ("loss", "ratio_mean", "grad_norm", "trained_tokens")}
    loss, ratio, norm, tokens = numbers.values()
    step = Step("", loss, ratio, norm, None if tokens is None else int(tokens))
    for name, value in (("loss", loss), ("gradient", norm), ("ratio", ratio)):
        if value is None or not math.isfinite(value):
            return replace(step, problem=f"the step's {name} is {value}")
    assert ratio is not None
    if abs(ratio - 1.0) > MAX_RATIO_ERROR:
        return replace(
            step,
            problem=f"the learner finds its tokens {ratio:.4f} times as likely as the engine said: the capture or the "
            "weights are not what was sampled from",
        )
    return step


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


@contextlib.asynccontextmanager
async def learner_for(
    model: ModelInfo, window: int, folder: Path, engine_url_file: Path, registry: Path, run_id: str
) -> AsyncIterator[Learner]:
    """A learner that starts at once and works when `engine_url_file` is there; ended with the context.

    `window` bounds a row, in tokens. Raises LifecycleError when it cannot be started.
    """
    with contextlib.ExitStack() as stack:
        learner = await asyncio.to_thread(_started, stack, model, window, folder, engine_url_file, registry, run_id)
        try:
            yield learner
        finally:
            await asyncio.shield(asyncio.to_thread(stack.close))


def _started(
    stack: contextlib.ExitStack,
    model: ModelInfo,
    window: int,
    folder: Path,
    engine_url_file: Path,
    registry: Path,
    run_id: str,
) -> Learner:
    """What it takes to end it is put on `stack`. Blocking."""
    folder = folder.absolute()  # the learner has a working directory of its own
    folder.mkdir(parents=True, exist_ok=True)
    owned = claim(registry, "weights", run_id=run_id)
    stack.callback(owned.release)
    shm = Path("/dev/shm")
    transfer = owned.make_folder(shm if os.access(shm, os.W_OK) else folder)
    stack.callback(shutil.rmtree, transfer, ignore_errors=True)
    store = RolloutStore(folder / "store.sqlite")
    stack.callback(store.close)
    spec = LearnerSpec(
        # Prompts of real agents are long: activations are recomputed, not kept.
        config=LearnerConfig(
            max_steps=_LAST_STEP,
            groups_per_step=1,
            token_budget=window,
            learning_rate=1e-6,
            gradient_checkpointing=True,
            save_steps=_LAST_STEP,
        ),
        model_path=model.path,
        store=folder / "store.sqlite",
        checkpoints=folder / "checkpoints",
        metrics=folder / "metrics.jsonl",
        engine_url_file=engine_url_file,
        transfer_dir=transfer,
        keep_weights=None,
        temperature=RolloutConfig().temperature,
        starved_after_s=24 * 3600.0,  # whoever waits for it has limits of their own
    )
    write_atomically(folder / "learner.json", spec.model_dump_json(indent=1))
    log = folder / "learner.log"
    process = start_process(
        [sys.executable, "-m", "harness_trainer.learner", "--spec", str(folder / "learner.json")],
        env={"OMP_WAIT_POLICY": "PASSIVE", "TQDM_DISABLE": "1", **os.environ},
        cwd=folder,
        log_path=log,
        registry=registry,
        kind="learner",
        run_id=run_id,
    )
    stack.callback(process.stop, _STOP_GRACE_S)
    return Learner(process, store, spec.metrics, log)

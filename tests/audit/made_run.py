"""A small run folder that is whole in every respect, made by the rooms that write a real one, and ways to spoil it."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import orjson
import yaml
import zstandard

from capture_proxy.graph import assign_roles
from capture_proxy.store import Store, load_capture
from capture_proxy.trace import to_row_trace
from capture_proxy.types import Capture, Session, SessionPolicy, Turn, TurnRole, TurnStatus, VersionSpan
from harness_trainer.config import RunConfig
from harness_trainer.learner.checkpoints import HarnessState, write_state
from harness_trainer.rollouts.counts import count
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Outcome, RolloutResult
from harness_trainer.rundir import RunDir

NUM_STEPS = 2
TOKENS_PER_ROLLOUT = 4


class MadeRun:
    """A run folder and what a test does to it."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDir(folder)

    # -- making --

    def make(self) -> MadeRun:
        """Two steps of one group each; every kind of attempt and of group is there once."""
        config = RunConfig.model_validate(
            {
                "rollouts": {"group_size": 2, "max_refills": 1, "evaluation": {"tasks": "held-out"}},
                "learner": {"max_steps": NUM_STEPS, "groups_per_step": 1, "max_staleness": 1},
            }
        )
        self.run.artifacts.mkdir(parents=True)
        self.run.internal.mkdir()
        self.run.config.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        (self.run.internal / "lock").touch()
        with closing(RolloutStore(self.run.store)) as store:
            self._fill(store)
        lines = [self._line(1, 2, 0), self._line(2, 3, 1)]
        self.run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for part in ("engine", "learner", "learner"):
            self.run.event("started", part=part, pid=1)
        self.checkpoint(HarnessState(NUM_STEPS, 3, {1: [0], 2: [2]}, 6))
        return self

    def _fill(self, store: RolloutStore) -> None:
        store.continue_from(0, 0)
        store.announce(1)
        store.publish(1)
        self._evaluate(store)
        store.open_group(0, "sun", "h")
        self._attempt(store, "g0-0-a", 0, 0, Outcome.INFRA_FAILED, final=False)
        self._attempt(store, "g0-0-b", 0, 0, Outcome.OK, 0.5)
        self._attempt(store, "g0-1-a", 0, 1, Outcome.TRUNCATED, 0.25)
        store.group_ready(0)
        store.open_group(1, "sun", "h")
        for slot in range(2):
            self._attempt(store, f"g1-{slot}-a", 1, slot, Outcome.OK, 0.5)
        store.group_ready(1)
        store.mark_dropped(1, "no_spread")
        store.open_group(2, "moon", "h")
        self._session("g2-0-a", sealed=False)
        store.start_rollout("g2-0-a", 2, 0, 0)
        store.close_lost()
        self._attempt(store, "g2-0-b", 2, 0, Outcome.OK, 1.0)
        self._attempt(store, "g2-1-a", 2, 1, Outcome.INFRA_FAILED, final=True)
        self._attempt(store, "g2-2-a", 2, 2, Outcome.AGENT_FAILED, 0.0)
        store.group_ready(2)
        store.open_group(3, "moon", "h")
        for slot in range(2):
            self._attempt(store, f"g3-{slot}-a", 3, slot, Outcome.OK, float(slot))
        store.group_ready(3)
        store.open_group(4, "poisoned", "h")
        for slot in range(2):
            self._attempt(store, f"g4-{slot}-a", 4, slot, Outcome.INFRA_FAILED, final=True, captured=False)
        store.mark_dropped(4, "setup_failed")
        store.setup_failed("poisoned", "not healthy", quarantine_after=1)
        store.open_group(5, "sun", "h")
        self._attempt(store, "g5-0-a", 5, 0, Outcome.CANCELLED, final=False)
        store.mark_trained([0], 1)
        store.announce(2)
        store.publish(2)
        store.mark_trained([2], 2)
        store.announce(3)
        store.publish(3)

    def _evaluate(self, store: RolloutStore) -> None:
        store.start_evaluation(0, [("star", "h"), ("sea", "h")])
        for group_id in (-1, -2):
            self._attempt(store, f"e{-group_id}-0-a", group_id, 0, Outcome.OK, 0.5)
            store.group_evaluated(group_id)
        store.finish_evaluation(0, {"num_scored": 2, "num_unscored": 0}, "evaluation after step 0")

    def _attempt(
        self,
        store: RolloutStore,
        rollout_id: str,
        group_id: int,
        slot: int,
        outcome: Outcome,
        reward: float | None = None,
        *,
        final: bool = True,
        captured: bool = True,
    ) -> None:
        store.start_rollout(rollout_id, group_id, slot, 0)
        result = RolloutResult(rollout_id, group_id, self._task(group_id), "h", 0, outcome, reward)
        if captured:
            self._session(rollout_id, sealed=True)
        if reward is not None:
            capture = self.capture(rollout_id)
            assign_roles(capture.turns)
            count(result, capture)
            result.trace = to_row_trace(capture).model_dump()
            (self.run.artifacts / rollout_id).mkdir()
        store.finish_rollout(result, final=final)

    def _task(self, group_id: int) -> str:
        with closing(sqlite3.connect(self.run.store)) as db:
            (task,) = db.execute("SELECT task FROM rollout_groups WHERE group_id = ?", (group_id,)).fetchone()
        return str(task)

    def _session(self, rollout_id: str, *, sealed: bool) -> None:
        session = Session(rollout_id, f"token-{rollout_id}", SessionPolicy(), {}, sealed=sealed, created_at=1.0)
        self.put(Capture(session, [_turn(rollout_id, n) for n in range(3)]))

    def _line(self, step: int, version: int, staleness: int) -> dict:
        return {
            "step": step,
            "policy_version": version,
            "num_groups": 1,
            "num_rollouts": 2,
            "num_rows": 2,
            "trained_tokens": 2 * TOKENS_PER_ROLLOUT,
            "staleness_max": staleness,
        }

    # -- reading and spoiling --

    def copy(self, folder: Path) -> MadeRun:
        shutil.copytree(self.run.path, folder)
        return MadeRun(folder)

    def capture(self, session_id: str) -> Capture:
        capture = load_capture(self.run.store, session_id)
        assert capture is not None
        return capture

    def put(self, capture: Capture) -> None:
        async def write() -> None:
            store = Store.open(self.run.store)
            try:
                await store.put_session(capture.session)
                for turn in capture.turns:
                    await store.put_turn(turn, capture.session)
            finally:
                await store.close()

        asyncio.run(write())

    def recapture(self, session_id: str, spoil: Callable[[Capture], None]) -> None:
        """As if the gateway had recorded something else."""
        capture = self.capture(session_id)
        spoil(capture)
        self.sql("DELETE FROM capture_turns WHERE session_id = ?", session_id)
        self.put(capture)

    def sql(self, statement: str, *values: object) -> None:
        with closing(sqlite3.connect(self.run.store)) as db, db:
            changed = db.execute(statement, values).rowcount
        assert changed > 0, statement

    def result(self, rollout_id: str, **changes: object) -> None:
        """Change a result in the table and in the row's own columns."""
        with closing(sqlite3.connect(self.run.store)) as db, db:
            (blob,) = db.execute("SELECT result FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
            data = {**orjson.loads(zstandard.decompress(blob)), **changes}
            db.execute(
                "UPDATE rollouts SET result = ?, outcome = ?, reward = ? WHERE rollout_id = ?",
                (zstandard.compress(orjson.dumps(data)), data["outcome"], data["reward"], rollout_id),
            )

    def tasks(self) -> dict[int, str]:
        with closing(sqlite3.connect(self.run.store)) as db:
            return dict(db.execute("SELECT group_id, task FROM rollout_groups"))

    def tasks_of_results(self) -> dict[str, str]:
        """Of every attempt that came to a result."""
        sql = "SELECT rollout_id, task FROM rollouts JOIN rollout_groups USING (group_id) WHERE result IS NOT NULL"
        with closing(sqlite3.connect(self.run.store)) as db:
            return dict(db.execute(sql))

    def lines(self, change: Callable[[list[dict]], list[dict]]) -> None:
        lines = [json.loads(line) for line in self.run.metrics.read_text().splitlines()]
        self.run.metrics.write_text("".join(json.dumps(line) + "\n" for line in change(lines)))

    def line(self, step: int, **changes: object) -> None:
        self.lines(lambda lines: [{**line, **changes} if line["step"] == step else line for line in lines])

    def settings(self, part: str, **changes: object) -> None:
        config = yaml.safe_load(self.run.config.read_text())
        config[part].update(changes)
        self.run.config.write_text(yaml.safe_dump(config))

    def checkpoint(self, state: HarnessState) -> None:
        folder = self.run.checkpoints / f"checkpoint-{state.step}"
        write_state(folder, state)
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors", "config.json"):
            (folder / name).touch()
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": state.step}))


def _turn(session_id: str, index: int) -> Turn:
    """A probe, then two turns of one conversation, the second of which goes on from the first."""
    prompts, replies = ([1, 2], [1, 2, 3], [1, 2, 3, 4, 5, 6]), ([9], [4, 5], [7, 8])
    question = {"role": "user", "content": f"part {index}"}
    return Turn(
        turn_id=f"{session_id}-{index:04d}",
        session_id=session_id,
        index=index,
        dialect="openai_chat",
        request={"model": "m", "messages": [question]},
        requested_sampling={"max_tokens": 1} if index == 0 else {},
        sampling={},
        prompt_ids_P=prompts[index],
        completion_ids_T=list(replies[index]),
        logprobs_T=[-0.5 * (n + 1) for n in range(len(replies[index]))],
        version_spans=[VersionSpan("v1", 0, len(replies[index]))],
        message={"role": "assistant", "content": f"said {index}"},
        finish_reason="stop",
        status=TurnStatus.OK,
        role=TurnRole.AGENT,
    )

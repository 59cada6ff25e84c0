"""What must hold of every capture, whatever happened to the session.

Owns the invariants, and an engine that remembers what it really sampled to check them against. Called at the end of
every scenario of this folder.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from capture_proxy.engines.base import ChatRequest, DeltaEvent, PromptEvent, SampleEvent
from capture_proxy.engines.scripted import ScriptedEngine
from capture_proxy.types import Capture, TurnStatus
from harness_trainer.learner.rows import Row, build_rows


@dataclass
class Sampled:
    """What the engine sampled for one call."""

    request: ChatRequest
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)


class LedgerEngine(ScriptedEngine):
    """A scripted engine that keeps its own account of what it sampled, in order of the calls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ledger: list[Sampled] = []

    async def sample(self, request: ChatRequest) -> AsyncGenerator[SampleEvent, None]:
        entry = Sampled(request)
        self.ledger.append(entry)
        async with contextlib.aclosing(super().sample(request)) as events:
            async for event in events:
                if isinstance(event, PromptEvent):
                    entry.prompt_ids = list(event.prompt_ids_P)
                elif isinstance(event, DeltaEvent):
                    entry.ids += event.ids
                yield event


def audit(capture: Capture, ledger: list[Sampled] | None = None) -> list[Row]:
    """Fails when an invariant is broken; returns the training rows. `ledger` None = nobody kept one."""
    turns = capture.turns
    assert len({t.turn_id for t in turns}) == len(turns), "a turn is recorded twice"
    assert [t.index for t in turns] == sorted({t.index for t in turns}), "indices must rise"
    left = Counter((tuple(s.prompt_ids), tuple(s.ids)) for s in ledger or [])
    for turn in turns:
        where = turn.turn_id
        assert turn.session_id == capture.session.session_id, where
        prompt, ids, logprobs = list(turn.prompt_ids_P), list(turn.completion_ids_T), turn.logprobs_T
        assert len(ids) == len(logprobs), f"{where}: {len(ids)} ids, {len(logprobs)} logprobs"
        assert (turn.error is not None) == (turn.status is TurnStatus.FAILED), where
        assert turn.finished_at >= turn.started_at > 0, where
        if turn.status is TurnStatus.OK:
            assert turn.finish_reason is not None and turn.message["role"] == "assistant", where
        if turn.trainable:
            assert prompt and ids, where
            assert all(x is not None and math.isfinite(x) and x <= 0 for x in logprobs), where
        if ledger is not None and ids and turn.status is TurnStatus.OK:
            assert left[tuple(prompt), tuple(ids)] > 0, f"{where}: nobody sampled these ids for this prompt"
            left[tuple(prompt), tuple(ids)] -= 1
        elif ledger is not None and ids:
            begun = [s for s in ledger if s.prompt_ids == prompt and s.ids[: len(ids)] == ids]
            assert begun, f"{where}: nobody sampled these ids for this prompt"
    return _audit_rows(capture)


def _audit_rows(capture: Capture) -> list[Row]:
    by_id = {turn.turn_id: turn for turn in capture.turns}
    rows = build_rows(capture).rows
    trained: list[str] = []
    for row in rows:
        assert len(row.ids_N) == len(row.mask_N) == len(row.logprobs_N) == len(row.versions_N)
        assert all(
            x == 0 or (math.isfinite(x) and x < 0 and m) for x, m in zip(row.logprobs_N, row.mask_N, strict=True)
        )
        trained += row.turn_ids
        expected = [0] * len(row.ids_N)
        for turn in (by_id[turn_id] for turn_id in row.turn_ids):
            assert turn.trainable
            start, end = len(turn.prompt_ids_P), len(turn.prompt_ids_P) + len(turn.completion_ids_T)
            assert row.ids_N[:end] == [*turn.prompt_ids_P, *turn.completion_ids_T], "a row is not what a call was"
            expected[start:end] = [1] * (end - start)
        assert row.mask_N == expected, "the mask is not exactly the sampled ids"
    assert len(trained) == len(set(trained)), "a sampled id is trained twice"
    return rows

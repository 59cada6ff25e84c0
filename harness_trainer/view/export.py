"""A rollout's trace as the JSON document that other tools read: OpenEnv's `TrainingTrace`.

Owns which form there is and how large an answer may be; `capture_proxy.trace` makes it. For whole runs there is
`harness-trainer traces export`. Called by `app`.
"""

from __future__ import annotations

from harness_trainer.errors import ConfigError, HarnessTrainerError
from harness_trainer.view.traces import Traces, UnknownRollout
from harness_trainer.view.visible import to_json

FORMS = ("rows", "calls")
_MOST_IDS = 2_000_000  # of an answer with a turn per call, which repeats every prompt


class TooLarge(HarnessTrainerError):
    """The document would be too large to be made for a browser."""


def trace_json(traces: Traces, rollout_id: str, form: str) -> bytes:
    """`rows`: as the learner is handed it, a turn per row; `calls`: a turn per model call, without what has no ids.

    Raises UnknownRollout, ConfigError for another form, TooLarge.
    """
    if form not in FORMS:
        raise ConfigError(f"form={form[:40]!r} is none of {', '.join(FORMS)}")
    calls = traces.calls(rollout_id)
    stored = traces.stored_trace(rollout_id) if form == "rows" else None
    if stored is None:
        if calls is None:
            raise UnknownRollout(f"nothing was captured of {rollout_id}")
        from capture_proxy.trace import to_row_trace, to_training_trace

        num_ids = sum(len(turn.prompt_ids_P) for turn in calls.turns)
        if form == "calls" and num_ids > _MOST_IDS:
            raise TooLarge(
                f"{num_ids:,} token ids with every prompt repeated: take ?form=rows, or `harness-trainer traces export`"
            )
        stored = (to_row_trace if form == "rows" else to_training_trace)(calls.capture).model_dump()
    body = to_json(stored)
    return body if calls is None else calls.mask(body.decode("ascii")).encode("ascii")

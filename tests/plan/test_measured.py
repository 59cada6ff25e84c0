"""A run folder, read back as the numbers of the next one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from capture_proxy.store import Store
from capture_proxy.types import Session, SessionPolicy
from harness_trainer.errors import RunDirError
from harness_trainer.plan.measured import read_run, read_steps
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.rollouts.types import Outcome, RolloutResult
from tests.capture.test_graph import turn


def line(step: int, **changed: Any) -> dict[str, Any]:
    metrics = {
        "rollout/turns_mean": 2.0,
        "completions/mean_length": 60.0,
        "rollout/duration_s": 9.0,
        "stage/queue/mean_s": 1.0,
    }
    return {
        "step": step,
        "num_rollouts": 8,
        "num_groups": 2,
        "forwarded_tokens": 800,
        "fwd_bwd_s": 4.0,
        "wait_s": 1.0,
        "step_s": 8.0,
        "dropped": {"no_spread": 2},
        "metrics": metrics,
        **changed,
    }


def run_of(folder: Path, lines: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return folder


def test_steps_tell_the_load_and_the_speeds(tmp_path: Path) -> None:
    found = read_run(run_of(tmp_path / "run", [line(1, step_s=500.0), line(2), line(3)]))
    values = {name: number.value for name, number in found.items()}
    assert values == {
        "turns": 2.0,
        "reply_tokens": 30.0,
        "forwarded": 100.0,
        "learner_tokens_s": 200.0,
        "step_s": 3.0,
        "kept": 0.5,
    }
    assert all(number.source == "measured" and "2 steps" in number.why for number in found.values())


def test_what_a_step_does_not_tell_is_left_out(tmp_path: Path) -> None:
    found = read_run(run_of(tmp_path / "run", [line(1), line(2, forwarded_tokens=None, wait_s=None, metrics={})]))
    assert set(found) == {"kept"}


def test_a_line_that_is_still_written_is_none(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", [line(1), line(2)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "num_')
    assert [each["step"] for each in read_steps(folder / "metrics.jsonl")] == [2]


@pytest.mark.parametrize("text", [None, "", "no json\n"])
def test_what_is_no_run_is_said(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(RunDirError, match="--from-run takes the folder of a run"):
        read_run(tmp_path)


async def test_captures_tell_prompts_and_the_time_in_calls(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", [line(1), line(2)])
    store = Store.open(folder / "store.sqlite")
    session = Session("s", "token", SessionPolicy(), {})
    first, second = turn(0, [1] * 50, [2] * 10), turn(1, [1] * 50 + [2] * 10 + [3] * 7, [4] * 10)
    for each, started_at in ((first, 100.0), (second, 110.0)):
        each.started_at, each.finished_at = started_at, started_at + 1.5
        await store.put_turn(each, session)
    await store.close()
    rollouts = RolloutStore(folder / "store.sqlite")
    rollouts.open_group(0, "task", "pi")
    rollouts.start_rollout("r", 0, 0, 0)
    rollouts.finish_rollout(RolloutResult("r", 0, "task", "pi", 0, Outcome.OK, 1.0), final=True)
    rollouts.close()
    found = {name: number.value for name, number in read_run(folder).items()}
    assert (found["first_prompt"], found["new_tokens"]) == (50.0, 7.0)
    assert (found["engine_s"], found["agent_s"]) == (3.0, 5.0)  # 9 s, of them 1 queued and 3 in calls

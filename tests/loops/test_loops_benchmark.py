"""The benchmark of the loops runs, and its two sides play the same game."""

from __future__ import annotations

from benchmarks.loops import Cost, measured, report
from tests.capture.rendering_cases import FAMILIES, tokenizer_folder


async def test_both_loops_play_and_ours_gives_one_row_however_a_call_is_spelled(tmp_path):
    own, theirs = await measured(tokenizer_folder(FAMILIES["qwen3"], tmp_path), num_episodes=2)
    assert own.rows == (1, 1)
    assert theirs.rows[0] == 1 < theirs.rows[1]
    assert own.median_ms > 0 and theirs.median_ms > 0


def test_it_says_whether_its_goals_are_reached():
    theirs = Cost(4.0, 3.9, 4.1, (1, 19))
    said = report(Cost(1.0, 0.9, 1.1, (1, 1)), theirs).splitlines()
    assert said[-2].endswith("AsyncRolloutWorker: 0.25; goal <= 0.5: yes") and said[-1].endswith("goal ours 1: yes")
    said = report(Cost(2.5, 2.4, 2.6, (1, 2)), theirs).splitlines()
    assert said[-2].endswith("goal <= 0.5: no") and said[-1].endswith("goal ours 1: no")

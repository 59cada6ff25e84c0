"""The benchmark of the loops runs, and its two sides play the same game."""

from __future__ import annotations

from benchmarks.loops import measured
from tests.capture.rendering_cases import FAMILIES, tokenizer_folder


async def test_both_loops_play_and_ours_gives_one_row_however_a_call_is_spelled(tmp_path):
    own, theirs = await measured(tokenizer_folder(FAMILIES["qwen3"], tmp_path), num_episodes=2)
    assert own.rows == (1, 1)
    assert theirs.rows[0] == 1 < theirs.rows[1]
    assert own.median_ms > 0 and theirs.median_ms > 0

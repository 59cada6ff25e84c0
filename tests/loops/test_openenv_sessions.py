"""Many sessions at once, and many in turn: the small form of `benchmarks.openenv_sessions`."""

from __future__ import annotations

from benchmarks.openenv_sessions import measure


async def test_no_step_is_lost_and_no_session_left():
    at_once, in_turn = await measure(sessions=32, steps=4, episodes=120)
    assert (at_once.num_steps, at_once.num_lost, at_once.num_left) == (128, 0, 0)
    assert at_once.most_open == 32, "all were open at the same time"
    assert (in_turn.num_steps, in_turn.num_lost, in_turn.num_left) == (120, 0, 0)

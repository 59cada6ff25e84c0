"""Many sessions at once, and many in turn: the small form of `benchmarks.openenv_sessions`."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.openenv_sessions import measure, report


async def test_no_step_is_lost_and_no_session_left():
    at_once, in_turn = await measure(sessions=32, steps=4, episodes=120)
    assert (at_once.num_steps, at_once.num_lost, at_once.num_left) == (128, 0, 0)
    assert at_once.most_open == 32, "all were open at the same time"
    assert (in_turn.num_steps, in_turn.num_lost, in_turn.num_left) == (120, 0, 0)
    lines, reached = report(at_once, in_turn, sessions=32)
    assert reached and "32 of 32 sessions open at once: 0 of 128 steps lost, 0 sessions left" in lines
    lines, reached = report(at_once, replace(in_turn, num_left=1), sessions=32)
    assert not reached and lines.endswith("goal 0 lost, 0 left: no")

"""The soak, small: agents of every dialect, hang-ups, engine faults and a kill -9 lose, double and mix no turn."""

from pathlib import Path

from tests.proof.soak import Soak, soak


async def test_hang_ups_faults_and_a_kill_lose_double_and_mix_no_turn(tmp_path: Path) -> None:
    config = Soak(num_sessions=16, num_turns=12, num_parallel=16, hang_up_rate=0.1, engine_fault_rate=0.08)
    report = await soak(config, tmp_path)
    assert report.problems == []
    assert report.acknowledged == config.num_sessions * config.num_turns
    assert report.restarts == 1 and report.hang_ups and report.recorded["failed"]  # it was rough indeed

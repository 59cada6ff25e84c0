"""The chaos run in its short form: every part is killed once, all else fails now and then, nothing is unaccounted."""

import pytest

from harness_trainer.engine.config import EngineConfig, find_environment
from harness_trainer.errors import SetupError
from tests.proof.chaos import PARTS, Chaos, chaos

pytestmark = pytest.mark.engine


def test_a_run_that_is_killed_and_spoilt_accounts_for_every_rollout_and_leaves_nothing(tmp_path):
    try:
        find_environment(EngineConfig())
    except SetupError as error:
        pytest.skip(f"no engine environment: {error}")
    # Rates are above those of the whole run, so that a run of few steps meets every kind of failure.
    config = Chaos(num_steps=10, engine_fault_rate=0.06, infra_rate=0.15, hang_rate=0.1)
    report = chaos(config, tmp_path)
    assert report.problems == [], report.endings
    assert {kill.split()[0] for kill in report.kills} == set(PARTS)
    found = report.audit
    assert found is not None and len(found.steps) == config.num_steps
    assert found.quarantined == ["poisoned"]
    assert found.attempts["infra_failed"] > 0
    assert sum(report.engine_faults.values()) > 0

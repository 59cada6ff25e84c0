"""ORS environments under TRL's own synchronous `GRPOTrainer`: TRL's `OpenRewardSpec` and ours, the same results."""

from __future__ import annotations

import pytest

from harness_trainer.loops.ors.spec import OrsSpec, OrsSpecs
from tests.loops.ors_server import running
from tests.loops.test_trl_sync import KNOWS, model, trained  # noqa: F401  # `model` is a fixture

HELLO, WRONG = ("echo", {"text": "hello"}), ("echo", {"text": "nothing"})
PLAYERS = [[[KNOWS, HELLO], ["Done."]], [["", WRONG], ["Done."]]]


@pytest.fixture(scope="module")
def server():
    with running("echoenvironment", "tasks") as one:
        yield one


def train(model, spec, players, out):  # noqa: F811
    return trained(model, spec.environment_factory, spec.reward_funcs, list(spec.train_dataset), players, out)


def test_trls_own_spec_trains_a_step_on_a_local_server(server, model, tmp_path, monkeypatch):  # noqa: F811
    """As the guide sets it up, variables and all."""
    from trl.experimental.openreward import OpenRewardSpec

    monkeypatch.setenv("OPENREWARD_API_URL", server.url)
    monkeypatch.setenv("OPENREWARD_SESSION_URL", server.url)
    monkeypatch.setenv("OPENREWARD_DISABLE_UPDATE_CHECK", "1")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    spec = OpenRewardSpec(server.url, env_name="echoenvironment", num_tasks=1)
    log, changed = train(model, spec, PLAYERS, tmp_path / "out")
    assert changed and log["reward"] == pytest.approx(0.5)
    assert log["tools/call_frequency"] == pytest.approx(1.0) and log["tools/failure_frequency"] == 0.0


def test_ours_trains_the_same_step_without_a_variable(server, model, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    still_open = server.counts()["open"]  # TRL's own spec never ends its sessions
    spec = OrsSpec(server.url, env_name="echoenvironment", num_tasks=1)
    try:
        log, changed = train(model, spec, PLAYERS, tmp_path / "out")
        assert changed and log["reward"] == pytest.approx(0.5)
        assert log["tools/call_frequency"] == pytest.approx(1.0) and log["tools/failure_frequency"] == 0.0
    finally:
        spec.close()
    server.settled(open=still_open)


def test_several_environments_with_tools_of_their_own_train_a_step_together(server, model, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    specs = OrsSpecs(
        {"echo": OrsSpec(server.url, num_tasks=1), "own": OrsSpec(server.url, env_name="tasks", indices=[0, 1])}
    )
    submit = ("submit", {"path": "p", "force": True})
    players = [[[KNOWS, HELLO, submit], ["Done."]], [["", WRONG, submit], ["Done."]]]
    try:
        log, changed = train(model, specs, players, tmp_path / "out")
    finally:
        specs.close()
    assert changed
    # `echo` is a tool of the first environment alone, `submit` of the two others: each rollout has one of the two.
    assert log["reward"] == pytest.approx(5 / 6) and log["tools/failure_frequency"] == pytest.approx(0.5)

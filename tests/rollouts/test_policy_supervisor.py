"""What the runner says reaches a person and events.jsonl once; the last policy is evaluated before the end."""

import json

import pytest

from harness_trainer.config import RunConfig
from harness_trainer.progress import Progress
from harness_trainer.rollouts.store import RolloutStore
from harness_trainer.run import Supervisor
from harness_trainer.rundir import RunDir


class Display:
    def __init__(self):
        self.lines = []

    def phase(self, text):
        self.lines.append(text)


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path)
    run.store_file = RolloutStore(run.store)
    yield run
    run.store_file.close()


def test_notes_are_shown_once_also_over_restarts(run):
    store = run.store_file
    store.setup_failed("a", "no image", 1)
    displays = [Display(), Display()]
    for display in displays:
        progress = Progress(run, display)
        progress.show_notes(store)
        progress.show_notes(store)
    assert [display.lines for display in displays] == [
        ["task a is quarantined: its last 1 groups failed at set-up (no image)"],
        [],
    ]
    (event,) = [json.loads(line) for line in run.events.read_text().splitlines()]
    assert (event["kind"], event["task"], event["reason"]) == ("quarantined", "a", "no image")
    assert "line" not in event


def test_the_run_is_over_when_its_last_policy_is_evaluated(run):
    store = run.store_file
    config = RunConfig(rollouts={"evaluation": {"tasks": "examples", "every": 10}}, learner={"max_steps": 1})
    supervisor = Supervisor(config, run, Display())
    store.publish(1)
    store.open_group(0, "a", "h")
    store.mark_trained([0], 1)
    assert not supervisor._is_evaluating(store), "a learner that died here has no policy to evaluate"
    store.publish(2)
    assert supervisor._is_evaluating(store)
    store.start_evaluation(1, [("x", "h")])
    assert supervisor._is_evaluating(store)
    store.forget_engine()
    assert not supervisor._is_evaluating(store), "nobody is left who would send a new engine the policy"
    store.publish(2)
    store.finish_evaluation(1, {}, "")
    assert not supervisor._is_evaluating(store)
    assert not Supervisor(RunConfig(), run, Display())._is_evaluating(store), "no evaluation, no waiting"

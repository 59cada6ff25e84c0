"""`harness-trainer rollout --env`: a model is evaluated on an environment of our own turns, without a learner."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from harness_trainer.rollouts.store import RolloutStore
from tests.e2e.test_rollout_command import TextEngine, serving

ENV = """
class Say:
    def reset(self, word, **kwargs):
        return None


def said(completions, word, **kwargs):
    return [float(word in completion[-1]["content"]) for completion, word in zip(completions, word)]


def place(completions, word, **kwargs):
    assert len(completions) == 4, "the whole group"
    return [float(at) for at in range(4)]
"""


def rollout(folder, engine, *more):
    (folder / "say.py").write_text(ENV)
    rows = [{"name": word, "word": word, "prompt": f"Say {word}."} for word in ("moon", "star")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = [sys.executable, "-m", "harness_trainer.cli", "rollout", "--plain", "--run-dir", str(folder / "run")]
    argv += ["--env", "class:say.py:Say", "--tasks", "rows.jsonl", "--engine-url", engine.url, "--samples", "4", *more]
    env = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    done = subprocess.run(argv, env=env, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "run" / "scores.json").read_text())
    return done.stdout, {(score["harness"], score["task"]): score for score in found}


@pytest.mark.parametrize("scope", ["rollout", "group"])
def test_every_row_is_played_and_scored(tmp_path, scope):
    rewards = {"rollout": ["--env.rewards", "say.py:said"], "group": ["--env.rewards", "say.py:place"]}[scope]
    with serving(TextEngine()) as engine:
        out, scores = rollout(tmp_path, engine, *rewards, "--env.reward-scope", scope)
    assert {key: score["num_scored"] for key, score in scores.items()} == {
        ("Say", "moon"): 4,
        ("Say", "star"): 4,
        ("Say", None): 8,
    }
    mean = {"rollout": 0.5, "group": 1.5}[scope]  # every second call of a task says its word
    assert all(
        score["reward_mean"] == pytest.approx(mean, abs=0.26 if scope == "rollout" else 0) for score in scores.values()
    )
    assert "Say" in out and "all tasks" in out
    store = RolloutStore(tmp_path / "run" / "store.sqlite")
    assert store.group_counts() == {}, "nothing of it is a group to train on"
    assert not any(result.awaits_group for result in store.rollouts())
    store.close()

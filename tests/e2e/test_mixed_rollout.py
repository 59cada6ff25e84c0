"""`harness-trainer rollout --sources`: a model evaluated on an agent's tasks and on a loop of one's own, in one go."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import yaml

from tests.e2e.test_rollout_command import TextEngine, serving
from tests.rollouts.rolling import CALL, VERIFY

LOOP = """
class Star:
    async def run(self, task, model):
        reply = await model.chat([{"role": "user", "content": task.metadata["row"]["prompt"]}])
        return 0.25 if reply.message["content"] == "star" else 0.0
"""


def test_every_task_of_every_source_is_scored_by_what_passes_there(tmp_path):
    (tmp_path / "star.py").write_text(LOOP)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"name": "moon", "prompt": "Say star."}) + "\n")
    line = {"name": "moon", "instruction": "Say moon.", "verify": VERIFY}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(line) + "\n")
    agent = {
        "name": "one", "dialect": "openai_chat", "output": {"type": "text"},
        "argv": ["sh", "-c", CALL.replace('"content": "go"', '"content": "\'"$1"\'"'), "sh", "${instruction}"],
        "env": {"URL": "${base_url}/v1/chat/completions", "TOKEN": "${token}"},
    }  # fmt: skip
    (tmp_path / "one.yaml").write_text(json.dumps(agent))
    sources = [
        {"name": "code", "tasks": "tasks.jsonl", "harness": "one.yaml"},
        {"name": "own", "env": "loop:star.py:Star", "tasks": "rows.jsonl", "pass_reward": 0.25},
    ]
    (tmp_path / "sources.yaml").write_text(yaml.safe_dump(sources))
    command = [sys.executable, "-m", "harness_trainer.cli", "rollout", "--plain", "--sources", "sources.yaml"]
    with serving(TextEngine()) as engine:
        command += ["--engine-url", engine.url, "--samples", "2", "--run-dir", "run"]
        env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    scores = json.loads((tmp_path / "run" / "scores.json").read_text())
    assert {(one["source"], one["harness"], one["task"]): (one["num_scored"], one["pass_at_1"]) for one in scores} == {
        ("code", "one", "code/moon"): (2, 0.5),
        ("own", "own", "own/moon"): (2, 0.5),
    }
    audit = [*command[:3], "audit", "run"]
    assert subprocess.run(audit, cwd=tmp_path, env=env, timeout=60, check=False).returncode == 0

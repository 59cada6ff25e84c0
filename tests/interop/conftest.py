"""The tiny model of the learner's tests, and what a factory is given."""

import json

import pytest

from tests.capture.serving import KEY
from tests.learner.conftest import build_model, few_threads  # noqa: F401
from tests.rollouts.rolling import VERIFY


@pytest.fixture
def admin_key(monkeypatch):
    monkeypatch.setenv("CAPTURE_PROXY_ADMIN_KEY", KEY)


@pytest.fixture
def settings(tmp_path, admin_key):
    """What a `HarnessSessionFactory` is made of, but for the gateway's addresses."""
    lines = [{"name": name, "instruction": f"Say {name}.", "verify": VERIFY} for name in ("moon", "sun")]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {
        "tasks": str(tasks),
        "harness": "pyagent-chat",
        "model": "scripted",
        "context": 4096,
        "sandbox": {"type": "local", "root": str(tmp_path / "boxes")},
        "rollouts": {"warm_per_task": 0, "timeout_s": 60},
        "artifacts": str(tmp_path / "artifacts"),
    }

"""Harbor for the tests of its agents, and harnesses that name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness_trainer.harnesses.base import Harness
from sandboxes import bubblewrap
from sandboxes.harbor import PYTHON_VARIABLE

OWN = "harbor_own_agents:Own"


@pytest.fixture
def harbor(harbor_python, monkeypatch):
    """Harbor is there, and the agents of the tests; keys in this environment are not for them."""
    if (problem := bubblewrap.find().problem) is not None:
        pytest.skip(f"{problem}: without it the local sandbox has no root of its own")
    monkeypatch.setenv(PYTHON_VARIABLE, harbor_python)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-this-machine")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")


def own(agent=OWN, *, env=None, **options) -> Harness:
    skip = options.pop("skip_install", None)
    data = {"agent": agent, "options": options, "skip_install": skip}
    return Harness.model_validate({"name": "own", "harbor": data, "env": env or {}})

"""Real agents in real rollouts, for the tests of their adapters: installing one, and the small task that all can do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from harness_trainer.cache import cache_dir
from harness_trainer.errors import SetupError
from harness_trainer.harnesses.base import Harness
from harness_trainer.harnesses.install import ensure_installed
from harness_trainer.harnesses.reading import AgentReport, read_report
from harness_trainer.rollouts.types import Outcome
from tests.rollouts.rolling import roll, task

COMMAND = "printf moon > answer.txt"
FIRST_WORDS, LAST_WORDS = "\nI will write\u2028 it.\n\n", "The moon\nis written."
needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not on PATH, no agent can be installed")


def installed(harness: Harness) -> Path:
    """Its programs, in the cache that real runs use; skips the test where they cannot be had."""
    try:
        return ensure_installed(harness, cache_dir(), print)
    except SetupError as error:
        pytest.skip(str(error))


async def writes_a_file(
    harness: Harness, call: tuple[str, dict[str, Any]], tmp_path: Path, **settings: Any
) -> tuple[AgentReport, ScriptedEngine]:
    """The agent runs one command by this tool call and says its last word; gives what it said on its output."""

    def script(request):
        if any(message["role"] == "tool" for message in request.messages):
            return Reply(["The moon\n", "is written."])
        return Reply(FIRST_WORDS, tool_calls=[call])

    engine = ScriptedEngine(script, version="v2")
    job_task = task(tmp_path, agent_timeout_s=120.0)
    options = {"harness_bin": installed(harness), "timeout_s": 120, **settings}
    result = await roll(tmp_path, engine, harness, job_task=job_task, **options)
    out = (tmp_path / "artifacts" / "g0-0-a" / "agent.stdout.log").read_text()
    assert (result.outcome, result.reward) == (Outcome.OK, 1.0), (result.detail, result.findings, out[-2000:])
    assert (result.num_turns, result.num_trainable_turns, result.num_side_turns) == (2, 2, 0), result.findings
    assert len(result.trace["turns"]) == 1, "both turns are one row"
    return read_report(harness, out, 0), engine

"""The real opencode from npm, through the real gateway and sandbox; the engine is scripted."""

import json
import shutil

import pytest

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from harness_trainer.cache import cache_dir
from harness_trainer.harnesses import load_harness
from harness_trainer.harnesses.install import ensure_installed
from harness_trainer.rollouts.types import Outcome
from tests.rollouts.rolling import roll

pytestmark = [
    pytest.mark.opencode,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not on PATH, opencode cannot be installed"),
]


@pytest.fixture(scope="module")
def opencode_bin():
    return ensure_installed(load_harness("opencode"), cache_dir(), print)


async def test_a_tool_turn_and_a_last_word_are_one_lineage_that_is_trained_whole(tmp_path, opencode_bin):
    def script(request):
        if request.messages[-1]["role"] == "tool":
            return "The moon is written."
        # An absolute path is what the tool wants; opencode tells the model its working directory.
        system = request.messages[0]["content"]
        app = next(line.split(":", 1)[1].strip() for line in system.splitlines() if "Working directory" in line)
        arguments = {"filePath": f"{app}/answer.txt", "content": "caf\u00e9 moon"}
        return Reply("I will write it.", tool_calls=[("write", arguments)])

    engine = ScriptedEngine(script, version="v2")
    result = await roll(tmp_path, engine, load_harness("opencode-small"), harness_bin=opencode_bin, timeout_s=120)
    assert (result.outcome, result.reward, result.num_turns) == (Outcome.OK, 1.0, 2), (result.detail, result.findings)
    assert result.num_side_turns == 0, "no title call, no other calls beside the agent's work"
    (row,) = result.trace["turns"]
    first, second = row["metadata"]["turns"]
    assert first["start"] == len(row["prompt_token_ids"]) and first["end"] < second["start"], "one extends the other"
    assert sum(row["loss_mask"]) == sum(t["end"] - t["start"] for t in (first, second))
    assert [t["function"]["name"] for t in engine.requests[0].tools] == ["edit", "write"]
    assert engine.requests[0].sampling["temperature"] == 1.0


async def test_the_full_agent_offers_its_own_tools_and_prompt(tmp_path, opencode_bin):
    engine = ScriptedEngine("the moon")
    result = await roll(tmp_path, engine, load_harness("opencode"), harness_bin=opencode_bin, timeout_s=120)
    assert (result.outcome, result.reward) == (Outcome.OK, 1.0), result.detail
    names = {tool["function"]["name"] for tool in engine.requests[0].tools}
    assert {"bash", "edit", "read", "write"} <= names
    assert names.isdisjoint({"webfetch", "task", "skill", "todowrite"})


async def test_the_turn_budget_ends_opencode_at_once(tmp_path, opencode_bin):
    again = Reply("", tool_calls=[("write", {"filePath": "answer.txt", "content": "x"})])
    harness = load_harness("opencode-small")
    engine = ScriptedEngine([again])
    result = await roll(tmp_path, engine, harness, harness_bin=opencode_bin, timeout_s=120, max_turns=3)
    assert result.outcome is Outcome.TRUNCATED, result.detail
    assert result.num_turns == 3
    log = (tmp_path / "artifacts" / "g0-0-a" / "agent.stdout.log").read_text()
    assert any(json.loads(line).get("type") == "error" for line in log.splitlines() if line.startswith("{"))

"""The Python agents as people install them, each in a real rollout: only the engine is scripted."""

import os
import uuid
from dataclasses import dataclass, replace

import pytest
from real_agents import installed

from capture_proxy.engines.scripted import Reply, ScriptedEngine
from harness_trainer.harnesses import load_harness
from harness_trainer.harnesses.base import Harness
from harness_trainer.harnesses.reading import read_report
from harness_trainer.rollouts.types import Outcome
from sandboxes.docker import DockerConfig
from tests.rollouts.rolling import roll, task

pytestmark = pytest.mark.real_agent

INSTRUCTION = "Write moon into answer.txt"
WRITE = "printf 'moon\\n' > answer.txt; command -v python3; id -u"
# Scores 1 when the file is there.
VERIFY = """
R=0
grep -q moon answer.txt && R=1
echo $R > "${SANDBOX_ROOT:-}/logs/verifier/reward.txt"
"""
TIMEOUT_S = 300.0  # a cap: importing some of them takes a minute on a busy machine
LAST_WORDS = "The file is written."
EDIT = f"""{LAST_WORDS}

answer.txt
```
<<<<<<< SEARCH
=======
moon
>>>>>>> REPLACE
```
"""
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo " + LAST_WORDS


@dataclass(frozen=True)
class Script:
    """What the model says to an agent, and what the agent is then expected to have reported."""

    replies: list[Reply | str]
    tools: dict[str, int] | None = None  # None = it does not tell
    final: str | None = LAST_WORDS
    num_rows: int = 1
    num_side_turns: int = 0


def calls(tool: str, **arguments: str) -> Reply:
    return Reply("I will write it.", tool_calls=[(tool, arguments)])


SCRIPTS = {
    "mini-swe-agent": Script(
        [calls("bash", command=WRITE), calls("bash", command=DONE)], {"bash": 2}, LAST_WORDS + "\n"
    ),
    "mistral-vibe": Script([calls("bash", command=WRITE), LAST_WORDS], {"file_system.bash": 1}),
    "aider": Script([EDIT], final=None),
    "openhands": Script(
        [
            calls("terminal", command=WRITE, security_risk="LOW", summary="write"),
            calls("finish", message=LAST_WORDS, summary="done"),
        ],
        {"terminal": 1, "finish": 1},
    ),
    "gptme": Script(
        [calls("shell", command=WRITE), Reply(LAST_WORDS, tool_calls=[("complete", {})])],
        final=LAST_WORDS + "\n@complete(call_3_0): {}",
        num_rows=2,  # it puts a line break behind what the model says before a tool call
        num_side_turns=1,  # it asks for a title
    ),
}
all_agents = pytest.mark.skipif(
    not os.environ.get("HARNESS_TRAINER_ALL_AGENTS"),
    reason="half a minute and a large install more: set HARNESS_TRAINER_ALL_AGENTS=1 to run it",
)
AGENTS = [name if name == "mini-swe-agent" else pytest.param(name, marks=all_agents) for name in SCRIPTS]


async def rolled(name: str | Harness, tmp_path, replies, **settings):
    harness = load_harness(name) if isinstance(name, str) else name
    engine = ScriptedEngine(replies, model="scripted", version="v3")
    job_task = replace(task(tmp_path, verify=VERIFY, agent_timeout_s=TIMEOUT_S), instruction=INSTRUCTION)
    options = {"harness_bin": installed(harness), "timeout_s": TIMEOUT_S, **settings}
    result = await roll(tmp_path, engine, harness, job_task=job_task, **options)
    said = (tmp_path / "artifacts" / "g0-0-a" / "agent.stdout.log").read_text()
    return result, engine, said


async def works(name, tmp_path, **settings):
    script = SCRIPTS[name]
    result, engine, said = await rolled(name, tmp_path, script.replies, **settings)
    assert (result.outcome, result.reward) == (Outcome.OK, 1.0), (result.detail, result.findings, said)
    assert result.num_turns == result.num_trainable_turns == len(script.replies)
    assert (len(result.trace["turns"]), result.num_side_turns) == (script.num_rows, script.num_side_turns)
    assert all(request.max_tokens == 2048 for request in engine.requests)
    report = read_report(load_harness(name), said, 0)
    assert (report.final_message, report.tool_calls) == (script.final, script.tools), said
    assert (report.failure, report.limit) == (None, None)


@pytest.mark.parametrize("name", AGENTS)
async def test_a_python_agent_writes_the_file_in_a_local_sandbox(name, tmp_path):
    await works(name, tmp_path)


@pytest.mark.parametrize("name", AGENTS)
async def test_a_python_agent_brings_its_interpreter_into_a_container(name, tmp_path, docker_engine, docker_base_image):
    config = DockerConfig(host=docker_engine, image=docker_base_image, relay_base=docker_base_image)
    await works(name, tmp_path, sandbox=config, run_id=f"test-{uuid.uuid4().hex[:12]}")


async def test_mini_swe_agent_keeps_its_own_turn_limit_and_says_so(tmp_path):
    again = calls("bash", command="echo again")
    result, engine, _ = await rolled("mini-swe-agent", tmp_path, [again], max_turns=2)
    assert (result.outcome, result.detail) == (Outcome.TRUNCATED, "limit of the agent's own: LimitsExceeded")
    assert len(engine.requests) == 2


async def test_mini_swe_agent_ends_at_once_when_its_session_is_spent(tmp_path):
    harness = load_harness("mini-swe-agent")
    ((path, own),) = harness.files.items()
    unlimited = harness.model_copy(update={"files": {path: own | {"agent": own["agent"] | {"step_limit": 0}}}})
    again = calls("bash", command="echo again")
    result, engine, _ = await rolled(unlimited, tmp_path, [again], max_turns=2)
    assert (result.outcome, result.detail) == (Outcome.TRUNCATED, "limit: max_turns")
    assert len(engine.requests) == 2
    assert result.stages_s["agent"] < 60, "not asked for again"

"""The scenarios: what the scripted model has an agent do, what goes wrong meanwhile, and what must come of it.

Owns data and the task that all of them share. `director` plays them, `verdict` judges.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from capture_proxy.engines.base import ChatRequest
from harness_trainer.qualify import vocabulary
from harness_trainer.qualify.vocabulary import ToolCall
from harness_trainer.tasks import Task
from sandboxes.base import BoxSpec, Network, NetworkMode

TASK_MARK, SUBTASK_MARK = "QZ-MAIN", "QZ-SUB"  # tell the scripted model whose conversation a request is of
INSTRUCTION = f"{TASK_MARK}: create the file answer.txt in the current folder, with the line `moon` in it."
ANSWER_FILE, ANSWER = "answer.txt", "moon"
LAST_WORDS = "The file is written: moon."
LONG_OUTPUT = "seq 1 40000"  # 229 kB

# The calls of one reply; None in it = the agent offers no tool for that.
Step: TypeAlias = Callable[[ChatRequest], list[ToolCall | None]]


class Expect(enum.StrEnum):
    """What a scenario asks of an agent."""

    DONE = "done"  # it does the task and ends
    STANDS = "stands"  # it survives the fault; giving up is its own way, and must not look like success
    STOPPED = "stopped"  # the budget ends it, and it goes


class Fault(enum.StrEnum):
    """What goes wrong, once, at the second reply."""

    ENGINE_ERROR = "engine error"
    DROP = "dropped connection"


@dataclass(frozen=True, slots=True)
class Scenario:
    """Example: Scenario("failing-tool", "a command exits 3", (fail, write)). After the steps come the last words."""

    name: str
    about: str
    steps: Sequence[Step]
    expect: Expect = Expect.DONE
    fault: Fault | None = None
    endless: bool = False  # the model never comes to its last words
    max_turns: int = 12
    max_tokens: int = 4096  # of one reply
    needs: str = "a tool that writes files or runs commands"  # what the agent must offer for it
    sealed: bool = False  # only where the agent's ways out can be watched, see `task`
    free: bool = False  # a real model plays it: nothing is known of what it will do


def _write(request: ChatRequest) -> list[ToolCall | None]:
    return [vocabulary.write(request, ANSWER_FILE, ANSWER)]


def _run(command: str) -> Step:
    return lambda request: [vocabulary.run(request, command)]


def _parallel(request: ChatRequest) -> list[ToolCall | None]:
    return [*_write(request), vocabulary.write(request, "second.txt", "second")]


def _delegate(request: ChatRequest) -> list[ToolCall | None]:
    return [vocabulary.delegate(request, f"{SUBTASK_MARK}: say that you are there.")]


BASE = "write"  # an agent that has no tool for this one is none that can be qualified
_SHELL_NEEDED = "a tool that runs commands"
_LOOK = _run("echo looking around")
SCENARIOS: Sequence[Scenario] = (
    Scenario(BASE, "a tool call that writes a file", (_write,)),
    Scenario("failing-tool", "a command that exits 3", (_run("echo broken >&2; exit 3"), _write), needs=_SHELL_NEEDED),
    Scenario("parallel", "two tool calls in one reply", (_parallel,)),
    Scenario("long-output", "a command that prints 229 kB", (_run(LONG_OUTPUT), _write), needs=_SHELL_NEEDED),
    Scenario("sub-agent", "work handed to a sub-agent", (_delegate, _write), needs="a tool that starts a sub-agent"),
    Scenario(
        "engine-500",
        "the engine answers one call with an error",
        (_LOOK, _write),
        expect=Expect.STANDS,
        fault=Fault.ENGINE_ERROR,
        needs=_SHELL_NEEDED,
    ),
    Scenario(
        "drop",
        "the connection breaks in the middle of a reply",
        (_LOOK, _write),
        expect=Expect.STANDS,
        fault=Fault.DROP,
        needs=_SHELL_NEEDED,
    ),
    Scenario(
        "budget",
        "a model that never ends, stopped after 3 turns",
        (lambda request: [vocabulary.run(request, f"echo turn {len(request.messages)}")],),
        expect=Expect.STOPPED,
        endless=True,
        max_turns=3,
        needs=_SHELL_NEEDED,
    ),
    Scenario("hosts", "the task with every other host refused and noted", (_write,), sealed=True),
)
FREE = Scenario("model", "the task, played by a real model", (), free=True, max_turns=4, max_tokens=96)

# Scores 1 when the file holds the line, else 0.
_VERIFY = f"""
R=0
grep -qs {ANSWER} {ANSWER_FILE} && R=1
echo $R > "${{SANDBOX_ROOT:-}}/logs/verifier/reward.txt"
"""


def task_of(scenario: Scenario, folder: Path, agent_timeout_s: float) -> Task:
    network = Network(NetworkMode.ALLOWLIST) if scenario.sealed else Network()
    name = f"qualify-{scenario.name}"
    return Task(
        name,
        folder,
        INSTRUCTION,
        verify_script=_VERIFY,
        agent_timeout_s=agent_timeout_s,
        verifier_timeout_s=60,
        box=BoxSpec(name, network=network),
    )

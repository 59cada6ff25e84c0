"""The scripted model: it plays in any agent's own tools, and repeated requests change nothing of what it says."""

import pytest

from capture_proxy.engines.base import ChatRequest
from capture_proxy.errors import EngineError
from harness_trainer.qualify import vocabulary
from harness_trainer.qualify.director import Director
from harness_trainer.qualify.scenarios import INSTRUCTION, LAST_WORDS, SCENARIOS, SUBTASK_MARK

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


def tool(name, *required, **properties):
    schema = {"type": "object", "properties": {k: {"type": v} for k, v in properties.items()}, "required": required}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


BASH = tool("bash", "command", command="string")


def asked(*tools, said=(), instruction=INSTRUCTION, system="You are an agent."):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": instruction}, *said]
    return ChatRequest("m", messages, list(tools), None, {}, None)


def spoken(reply):
    return {"role": "assistant", "content": "".join(reply.content), "tool_calls": []}


@pytest.mark.parametrize(
    ("offered", "name", "arguments"),
    [
        (tool("exec_command", "cmd", cmd="string", login="boolean"), "exec_command", {"cmd": "ls"}),
        (tool("run_commands", "commands", commands="array"), "run_commands", {"commands": ["ls"]}),
        (
            tool("terminal", "security_risk", "command", security_risk="string", command="string"),
            "terminal",
            {"security_risk": "LOW", "command": "ls"},
        ),
        (tool("bash", "command", "description", command="string", description="string"), "bash", None),
    ],
)
def test_a_command_is_run_in_the_tool_that_the_agent_offers_with_all_that_it_requires(offered, name, arguments):
    called, given = vocabulary.run(asked(offered), "ls")
    assert called == name
    assert given == arguments if arguments else set(given) == {"command", "description"}


def test_a_file_is_written_without_a_shell_where_there_is_none():
    offered = tool("file_editor", "command", "path", command="string", path="string", file_text="string")
    name, arguments = vocabulary.write(asked(offered), "a.txt", "moon")
    assert (name, arguments["command"], arguments["path"]) == ("file_editor", "create", "a.txt")
    assert arguments["file_text"] == "moon\n"
    assert vocabulary.write(asked(tool("web_search", "query", query="string")), "a.txt", "moon") is None


def test_the_end_is_said_as_the_agent_wants_it():
    submits = asked(BASH, instruction=f"{INSTRUCTION} Finish with COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT.")
    assert vocabulary.finish(submits, "done") == ("bash", {"command": vocabulary.SUBMIT})
    finishes = asked(BASH, tool("finish", "message", message="string"))
    assert vocabulary.finish(finishes, "done") == ("finish", {"message": "done"})
    assert vocabulary.finish(asked(BASH), "done") is None


def test_a_repeated_request_gets_the_same_step_and_the_history_the_next_one():
    director = Director(BY_NAME["failing-tool"], drop=lambda: None)
    first, again = director(asked(BASH)), director(asked(BASH))
    assert first == again and first.tool_calls
    second = director(asked(BASH, said=[spoken(first)]))
    assert second.tool_calls != first.tool_calls
    assert director(asked(BASH, said=[spoken(first), spoken(second)])).content == LAST_WORDS


def test_a_call_without_tools_beside_the_work_is_no_step_of_it():
    director = Director(BY_NAME["write"], drop=lambda: None)
    director(asked())
    director(asked(BASH))
    assert (director.num_side, director.num_main) == (1, 1)


def test_the_faults_come_once_and_at_the_second_step():
    director = Director(BY_NAME["engine-500"], drop=lambda: None)
    first = director(asked(BASH))
    with pytest.raises(EngineError):
        director(asked(BASH, said=[spoken(first)]))
    assert director(asked(BASH, said=[spoken(first)])).tool_calls
    cuts = []
    director = Director(BY_NAME["drop"], drop=lambda: cuts.append(1))
    for _ in range(2):
        director(asked(BASH, said=[spoken(first)]))
    assert cuts == [1]


def test_a_sub_agent_is_told_from_the_agent_and_what_is_not_offered_is_named():
    agent = tool("task", "prompt", "subagent_type", prompt="string", subagent_type="string")
    director = Director(BY_NAME["sub-agent"], drop=lambda: None)
    ((name, arguments),) = director(asked(BASH, agent)).tool_calls
    assert name == "task" and SUBTASK_MARK in arguments["prompt"]
    director(asked(BASH, instruction=arguments["prompt"]))
    assert director.num_conversations == 2 and not director.lacks
    without = Director(BY_NAME["sub-agent"], drop=lambda: None)
    assert not without(asked(BASH)).tool_calls and "sub-agent" in without.lacks

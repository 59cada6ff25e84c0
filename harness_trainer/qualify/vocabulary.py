"""How to say "write a file", "run a command", "hand over to a sub-agent" and "done" in the tools that a request offers.

Owns the names that agents give such tools; what a call must hold is read from the tool's own schema. Called by
`director`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from capture_proxy.engines.base import ChatRequest

ToolCall: TypeAlias = tuple[str, dict[str, Any]]

# Tool name -> the argument that carries the words, in order of preference.
_SHELL = {
    "bash": "command",
    "Bash": "command",
    "exec_command": "cmd",
    "run_shell_command": "command",
    "run_commands": "commands",
    "execute_bash": "command",
    "terminal": "command",
    "shell": "command",
}
_WRITE = ("write", "Write", "write_file", "create_file", "create", "editor", "file_editor")
_PATH_ARGUMENTS = ("filePath", "file_path", "filepath", "path")
_TEXT_ARGUMENTS = ("content", "file_text", "new_text")
_DELEGATE = {
    "task": "prompt",
    "Task": "prompt",
    "Agent": "prompt",
    "agent": "prompt",
    "invoke_agent": "prompt",
    "spawn_agent": "task",
}
_FINISH = {"finish": "message", "complete_task": "result"}
# What else agents insist on, where the schema lists no values to choose from.
_REQUIRED: Mapping[str, Any] = {
    "description": "a step of the task",
    "summary": "a step of the task",
    "security_risk": "LOW",
    "is_background": False,
    "subagent_type": "general",
    "agent_name": "generalist",
    "name": "second",
    "systemPrompt": "You do what you are asked.",
}
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # how one agent wants to be told that the work is done
_EDIT_BLOCKS = "SEARCH/REPLACE"  # agents without tools that read changes out of the text name them so
_KEYSTROKES = '"keystrokes"'  # one without tools reads what to type into its terminal out of JSON


def run(request: ChatRequest, command: str) -> ToolCall | None:
    """A call that runs a shell command; None = the request offers no tool for it."""
    if wants_keystrokes(request):
        return "keystrokes", {"command": command}
    return _call(_tools(request), _SHELL, command)


def write(request: ChatRequest, path: str, text: str) -> ToolCall | None:
    """A call that writes a file of one line: with the shell where there is one, for every agent's is alike."""
    shell = run(request, f"printf '%s\\n' '{text}' > {path}")
    if shell is not None:
        return shell
    tools = _tools(request)
    for name in _WRITE:
        properties = _properties(tools.get(name, {}))
        where = next((key for key in _PATH_ARGUMENTS if key in properties), None)
        what = next((key for key in _TEXT_ARGUMENTS if key in properties), None)
        if where and what:
            create = {"command": "create"} if "command" in properties else {}
            return name, {**_required(tools[name]), **create, where: path, what: text + "\n"}
    return None


def delegate(request: ChatRequest, prompt: str) -> ToolCall | None:
    return _call(_tools(request), _DELEGATE, prompt)


def finish(request: ChatRequest, words: str) -> ToolCall | None:
    """The call that ends the work, for agents that do not take plain words for the end."""
    if _says(request, SUBMIT.split()[1]):
        return run(request, SUBMIT)
    return _call(_tools(request), _FINISH, words)


def edit_block(path: str, text: str) -> str:
    return f"{path}\n```\n<<<<<<< SEARCH\n=======\n{text}\n>>>>>>> REPLACE\n```\n"


def wants_edit_blocks(request: ChatRequest) -> bool:
    return not request.tools and _says(request, _EDIT_BLOCKS)


def wants_keystrokes(request: ChatRequest) -> bool:
    return not request.tools and _says(request, _KEYSTROKES)


def keystrokes(words: str, calls: Iterable[ToolCall], *, done: bool) -> str:
    """The words and calls for an agent that wants its commands typed. One that is done is asked whether it is sure."""
    typed = [{"keystrokes": f"{arguments['command']}\n", "duration": 1.0} for _, arguments in calls]
    return json.dumps({"analysis": words, "plan": "", "commands": typed, "task_complete": done})


def words_of(message: Mapping[str, Any]) -> str:
    """A message's text, whichever of the two shapes it has."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))


def _says(request: ChatRequest, phrase: str) -> bool:
    return any(phrase in words_of(m) for m in request.messages if m.get("role") in ("system", "user"))


def _tools(request: ChatRequest) -> dict[str, dict[str, Any]]:
    """Parameter schema by tool name."""
    functions: Iterable[dict[str, Any]] = (tool.get("function") or {} for tool in request.tools)
    return {str(f.get("name")): f.get("parameters") or {} for f in functions}


def _call(tools: Mapping[str, dict[str, Any]], known: Mapping[str, str], words: str) -> ToolCall | None:
    for name, argument in known.items():
        if name not in tools:
            continue
        properties = _properties(tools[name])
        if argument not in properties:  # an agent may call it otherwise
            argument = next((key for key, about in properties.items() if about.get("type") == "string"), argument)
        value = [words] if properties.get(argument, {}).get("type") == "array" else words
        return name, {**_required(tools[name]), argument: value}
    return None


def _required(schema: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for key in schema.get("required") or []:
        choices = _properties(schema).get(key, {}).get("enum")
        values[key] = choices[0] if choices else _REQUIRED.get(key, "")
    return values


def _properties(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found = schema.get("properties")
    return {k: v for k, v in found.items() if isinstance(v, dict)} if isinstance(found, dict) else {}

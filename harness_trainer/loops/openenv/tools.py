"""What of an OpenEnv environment the model is shown: its tools and its observations.

Owns the forms. An MCP environment lists its tools, which are passed on as they are. Any other takes actions of one
model, which `/schema` describes: that is one tool, named after the model (`EchoAction` is `echo`), or one per model
where the action is a choice of several. Called by `episode` and `environment`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness_trainer.loops.base import Content, EpisodeLost, ToolReply
from harness_trainer.loops.contents import error_content
from harness_trainer.loops.openenv.session import Said

LIST_TOOLS = {"type": "list_tools"}
_MISSING = object()
_MCP = ("list_tools", "call_tool")
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_NO_TOOL = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class ActionTool:
    """A tool that takes an action, or one of an MCP environment.

    Example: ActionTool("echo", "Echo it.", {"type": "object", "properties": {"message": {"type": "string"}}}).
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields of the action that are not for the model to say
    mcp: bool = False

    def action(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if self.mcp:
            return {"type": "call_tool", "tool_name": self.name, "arguments": dict(arguments)}
        return {**arguments, **self.fixed}


def is_mcp(schema: Mapping[str, Any]) -> bool | None:
    """Whether actions of this model are MCP's; None = it is OpenEnv's bare `Action`, which both kinds may take."""
    properties = schema.get("properties") or {}
    if (properties.get("type") or {}).get("const") in _MCP:
        return True
    return None if not set(properties) - {"metadata"} and not (schema.get("oneOf") or schema.get("anyOf")) else False


def action_tools(schema: Mapping[str, Any], tool_name: str | None) -> list[ActionTool]:
    """The tools of an environment that takes actions of this model. Raises ValueError for what is no object."""
    choice = schema.get("oneOf") or schema.get("anyOf")
    if not choice:
        return [_action_tool(schema, schema, tool_name)]
    models = [_resolved(each, schema) for each in choice]
    named = tool_name if len(models) == 1 else None
    return [_action_tool(model, schema, named) for model in models]


def _action_tool(model: Mapping[str, Any], root: Mapping[str, Any], tool_name: str | None) -> ActionTool:
    properties = model.get("properties")
    if not isinstance(properties, Mapping):
        raise ValueError(f"its action {model.get('title')!r} is no object")
    needed = set(model.get("required") or ())
    # A field with one value is the model's tag among several.
    fixed = {name: each["const"] for name, each in properties.items() if "const" in each}
    hidden = {*fixed, *({"metadata"} - needed)}
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {name: each for name, each in properties.items() if name not in hidden},
        "required": [name for name in model.get("required") or () if name not in hidden],
    }
    if definitions := root.get("$defs"):
        parameters["$defs"] = definitions
    description = " ".join(str(model.get("description") or "").split())
    return ActionTool(
        tool_name or tool_name_of(str(model.get("title") or "")),
        description or "Take an action in the environment.",
        parameters,
        fixed,
    )


def _resolved(each: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = str(each.get("$ref") or "")
    name = reference.removeprefix("#/$defs/")
    found = (root.get("$defs") or {}).get(name) if reference else each
    if not isinstance(found, Mapping):
        raise ValueError(f"its schema refers to {reference!r}, which is not in it")
    return found


def tool_name_of(model: str) -> str:
    """`TextArenaAction` is `text_arena`."""
    words = _WORDS.sub("_", model.removesuffix("Action")).lower()
    return _NO_TOOL.sub("_", words).strip("_") or "step"


def listed_tools(said: Said) -> list[ActionTool]:
    """The tools that an MCP environment lists; none where the answer is no list."""
    listed = said.fields.get("tools")
    return [
        ActionTool(
            str(each["name"]),
            str(each.get("description") or ""),
            each.get("input_schema") or each.get("inputSchema") or {"type": "object", "properties": {}},
            mcp=True,
        )
        for each in (listed if isinstance(listed, list) else [])
        if isinstance(each, Mapping) and each.get("name")
    ]


def observed(said: Said, path: str | None) -> Content:
    """The observation as the model reads it: the field at `path`, or all where it has no such field."""
    fields = said.fields
    if path is not None and (found := _inward(fields, path)) is not _MISSING:
        return _as_text(found)
    if all(value is None for value in fields.values()):
        return ""
    return _as_text(next(iter(fields.values())) if len(fields) == 1 else fields)


def tool_result(said: Said, path: str | None) -> ToolReply:
    """What a call of an MCP tool came to. Raises EpisodeLost where the server could not reach its own tools."""
    fields = said.fields
    if "tool_name" not in fields and "result" not in fields:
        return ToolReply(observed(said, path), done=said.done)
    error = fields.get("error")
    if error:
        kind, why = (error.get("error_type"), error.get("message")) if isinstance(error, Mapping) else ("", error)
        if kind == "transport_error":
            raise EpisodeLost(f"the environment lost its own tools: {why}")
        return ToolReply(error_content(str(why)), failed=True, done=said.done)
    result = fields.get("result")
    if not isinstance(result, Mapping):
        return ToolReply(_as_text(result), done=said.done)
    failed = bool(result.get("is_error") or result.get("isError"))
    parts = result.get("content")
    if isinstance(parts, list) and parts:
        return ToolReply(_parts(parts), failed=failed, done=said.done)
    return ToolReply(_as_text(result.get("data", result)), failed=failed, done=said.done)


def _parts(parts: list[Any]) -> Content:
    """MCP's content as OpenAI's."""
    made = [_part(part) for part in parts]
    if all(part["type"] == "text" for part in made):
        return "\n".join(part["text"] for part in made)
    return made


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, Mapping) and part.get("type") == "image" and part.get("data"):
        kind = part.get("mimeType") or part.get("mime_type") or "image/png"
        return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{part['data']}"}}
    if isinstance(part, Mapping) and part.get("type") == "text":
        return {"type": "text", "text": str(part.get("text", ""))}
    return {"type": "text", "text": _as_text(part)}


def _inward(value: Any, path: str) -> Any:
    for key in path.split("."):
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (LookupError, TypeError, ValueError):
            return _MISSING
    return value


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

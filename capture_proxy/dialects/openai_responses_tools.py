"""Responses tools as chat-completions functions.

Owns what the model is shown of a tool, which tools nobody here can run, and what the agent calls the one that the model
picked. `openai_responses` calls it for each request; `openai_responses_stream` reads `Toolbox.names`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from capture_proxy.errors import BadRequest
from capture_proxy.types import Finding, Severity


@dataclass(frozen=True, slots=True)
class ToolName:
    """What the agent calls a tool, e.g. ToolName("spawn_agent", "multi_agent_v1", custom=False)."""

    name: str
    namespace: str | None
    custom: bool  # takes raw text, not JSON


@dataclass(slots=True)
class Toolbox:
    """The tools of a request.

    Example: a custom tool "apply_patch" and a hosted "web_search" give tools=[{"type": "function", "function": {"name":
    "apply_patch", ...}}], names={"apply_patch": ToolName("apply_patch", None, True)} and one finding.
    """

    tools: list[dict[str, Any]] = field(default_factory=list)  # as the model sees them
    names: dict[str, ToolName] = field(default_factory=dict)  # by the model's name for them
    echo: list[dict[str, Any]] = field(default_factory=list)  # as the reply repeats them to the agent
    dropped: list[str] = field(default_factory=list)  # types of hosted tools that nobody here can run
    findings: list[Finding] = field(default_factory=list)


def read_tools(raw: Any) -> Toolbox:
    """Raises BadRequest."""
    box = Toolbox()
    if raw is None:
        return box
    if not isinstance(raw, list):
        raise BadRequest("tools must be a list")
    for i, tool in enumerate(raw):
        _read_tool(box, tool, f"tools[{i}]")
    if box.dropped:
        detail = f"hosted tools are not served and were not offered to the model: {', '.join(box.dropped)}"
        box.findings.append(Finding(Severity.WARN, "tool_dropped", detail))
    return box


def _read_tool(box: Toolbox, tool: Any, where: str) -> None:
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
        raise BadRequest(f"{where} must be an object with a type")
    kind = tool["type"]
    if kind in ("function", "custom"):
        _offer(box, tool, None, where)
        box.echo.append(
            {"description": None, "parameters": None, "strict": None, **tool} if kind == "function" else tool
        )
    elif kind == "namespace" and isinstance(tool.get("tools"), list):
        namespace = read_name(tool, where)
        for i, inner in enumerate(tool["tools"]):
            if not isinstance(inner, dict) or inner.get("type") not in ("function", "custom"):
                raise BadRequest(f"{where}.tools[{i}] must be a function or a custom tool")
            _offer(box, inner, namespace, f"{where}.tools[{i}]")
        detail = f"the tools of namespace {namespace} are functions called {namespace}__NAME to the model"
        box.findings.append(Finding(Severity.INFO, "tool_namespace_flattened", detail))
        box.echo.append(tool)
    else:
        box.dropped.append(kind)


def _offer(box: Toolbox, tool: dict[str, Any], namespace: str | None, where: str) -> None:
    # A few clients nest a function as chat completions does.
    spec = tool["function"] if isinstance(tool.get("function"), dict) else tool
    name = read_name(spec, where)
    custom = tool["type"] == "custom"
    function: dict[str, Any] = {"name": flat_name(name, namespace)}
    description = spec.get("description")
    if custom:
        function |= {
            "description": _custom_description(description, tool.get("format"), where),
            "parameters": _RAW_TEXT,
        }
    else:
        if isinstance(description, str):
            function["description"] = description
        if spec.get("parameters") is not None:
            function["parameters"] = spec["parameters"]
            if not isinstance(spec["parameters"], dict):
                raise BadRequest(f"{where}.parameters must be a JSON schema")
    box.tools.append({"type": "function", "function": function})
    box.names[function["name"]] = ToolName(name, namespace, custom)


_RAW_TEXT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The whole input of the tool, as raw text."}},
    "required": ["input"],
    "additionalProperties": False,
}


def _custom_description(description: Any, form: Any, where: str) -> str:
    said = f"{description}\n\n" if isinstance(description, str) and description else ""
    if form is None or (isinstance(form, dict) and form.get("type") == "text"):
        return said + "The input is free text."
    if not isinstance(form, dict) or form.get("type") != "grammar" or not isinstance(form.get("definition"), str):
        raise BadRequest(f"{where}.format must be text, or a grammar with a definition")
    return f"{said}The input must follow this {form.get('syntax', 'lark')} grammar:\n{form['definition']}"


def read_name(spec: dict[str, Any], where: str) -> str:
    """Raises BadRequest when there is none."""
    name = spec.get("name")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where} must have a name")
    return name


def flat_name(name: str, namespace: Any) -> str:
    """The one name by which the model knows a tool: a chat template has no namespaces."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def read_choice(raw: Any, box: Toolbox) -> Any:
    """`tool_choice` in chat-completions terms; an allowed set narrows `box`. Raises BadRequest."""
    if raw is None or raw in ("auto", "none"):
        return raw if box.tools else None
    if raw == "required":
        if box.dropped and not box.tools:
            raise BadRequest(f"tool_choice requires a call, but {', '.join(box.dropped)} cannot be served here")
        return raw if box.tools else None
    kind = raw.get("type") if isinstance(raw, dict) else None
    if kind in ("function", "custom"):
        return {"type": "function", "function": {"name": _chosen(raw, box)}}
    if kind == "allowed_tools":
        return _allow(raw, box)
    if isinstance(kind, str):
        raise BadRequest(f"tool_choice forces {kind}, a hosted tool that cannot be served here")
    raise BadRequest("tool_choice must be auto, none, required, or an object with a type")


def _chosen(raw: dict[str, Any], box: Toolbox) -> str:
    spec = raw["function"] if isinstance(raw.get("function"), dict) else raw
    name = flat_name(read_name(spec, "tool_choice"), raw.get("namespace"))
    if name not in box.names:
        raise BadRequest(f"tool_choice names {name!r}, which is not among the tools")
    return name


def _allow(raw: dict[str, Any], box: Toolbox) -> Any:
    allowed, mode = raw.get("tools"), raw.get("mode", "auto")
    if (
        not isinstance(allowed, list)
        or not all(isinstance(t, dict) for t in allowed)
        or mode not in ("auto", "required")
    ):
        raise BadRequest("tool_choice allowed_tools needs a mode (auto or required) and a list of tools")
    names = {_chosen(tool, box) for tool in allowed if tool.get("type") in ("function", "custom")}
    if not names and mode == "required":
        raise BadRequest("tool_choice requires one of several hosted tools, which cannot be served here")
    # Nothing keeps a model from calling a tool that it has been shown, so the others are not shown.
    hidden = [tool["function"]["name"] for tool in box.tools if tool["function"]["name"] not in names]
    if hidden:
        box.tools = [tool for tool in box.tools if tool["function"]["name"] in names]
        detail = f"tools outside the allowed set were not offered to the model: {', '.join(hidden)}"
        box.findings.append(Finding(Severity.INFO, "tools_restricted", detail))
    return mode if box.tools else None

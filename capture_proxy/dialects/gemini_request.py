"""A Gemini request as a dialect-free call.

Owns what is said beside the contents: system instruction, tools and the choice among them, generation config. Lenient
where clients differ (both spellings of names, lists of one), strict where a guess would change what is sampled. Called
by `gemini`. The format is that of https://ai.google.dev/api/generate-content.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from capture_proxy.dialects.base import Call, Head
from capture_proxy.dialects.body import parse_object, settle_system
from capture_proxy.dialects.gemini_contents import Conversation, read_parts
from capture_proxy.dialects.gemini_schema import field, json_schema
from capture_proxy.errors import BadRequest
from capture_proxy.types import Finding, Severity

_INT64 = 2**63
_CHOICES = {"": None, "MODE_UNSPECIFIED": None, "AUTO": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}
_NUMBERS = {
    "temperature": "temperature",
    "topP": "top_p",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}
_INTEGERS = {"topK": "top_k", "seed": "seed"}


@dataclass(frozen=True, slots=True)
class Notes:
    """What `reply` and `stream` must know of the request beside the call."""

    sse: bool = True  # False = a stream is one JSON array
    thoughts: bool = True  # False = the client asked not to be shown any
    logprobs: bool = False  # wants the log-probabilities of the reply


def parse(head: Head, body: bytes, *, stream: bool) -> Call:
    """Raises BadRequest."""
    data = parse_object(body)
    inner = field(data, "generateContentRequest")  # countTokens may hold a whole request
    if inner is not None:
        data = _object(inner, "generateContentRequest")
    if field(data, "cachedContent"):
        raise BadRequest("cachedContent is not supported: send the whole contents with each request")
    findings: list[Finding] = []
    messages = _messages(data, findings)
    tools, tool_choice = _tools(data, findings)
    config = _object(field(data, "generationConfig") or {}, "generationConfig")
    sampling, max_tokens = _sampling(config)
    thinking = _object(field(config, "thinkingConfig") or {}, "generationConfig.thinkingConfig")
    findings += _not_obeyed(config, thinking)
    return Call(
        model=head.path.get("model", "").removeprefix("models/"),
        messages=messages,
        tools=tools,
        tool_choice=tool_choice,
        sampling=sampling,
        max_tokens=max_tokens,
        stream=stream,
        include_usage=True,
        findings=tuple(findings),
        context=Notes(
            sse="sse" in (head.query.get("alt"), head.query.get("$alt")),
            # The API's default is to hide thoughts. Hidden ones would be lost from the history that comes back, and
            # every client knows a part with `thought` from an answer, so only a client that says so gets none.
            thoughts=field(thinking, "includeThoughts") is not False,
            logprobs=field(config, "responseLogprobs") is True,
        ),
    )


def _messages(data: dict[str, Any], findings: list[Finding]) -> list[dict[str, Any]]:
    messages = []
    if (system := field(data, "systemInstruction")) is not None:
        wrapped = {"parts": system} if isinstance(system, list) else system
        texts = [part.get("text") for _, part, _ in read_parts(wrapped, "systemInstruction")]
        if not all(isinstance(text, str) for text in texts):
            raise BadRequest("systemInstruction must consist of text parts")
        if texts:
            messages.append({"role": "system", "content": "\n".join(str(text) for text in texts)})
    contents = data.get("contents")
    contents = [contents] if isinstance(contents, str | dict) else contents
    if not isinstance(contents, list) or not contents:
        raise BadRequest("contents must be a non-empty list")
    conversation = Conversation()
    for i, content in enumerate(contents):
        conversation.add(content, f"contents[{i}]")
    said = conversation.close()
    if not said:
        raise BadRequest("contents must hold at least one part with text, data, a call or a response")
    messages, settled = settle_system(messages + said)
    findings += [*conversation.findings, *settled]
    return messages


def _tools(data: dict[str, Any], findings: list[Finding]) -> tuple[list[dict[str, Any]], Any]:
    raw = data.get("tools") or []
    functions: list[dict[str, Any]] = []
    hosted: list[str] = []
    for i, tool in enumerate([raw] if isinstance(raw, dict) else _list(raw, "tools")):
        tool = _object(tool, f"tools[{i}]")
        declared = field(tool, "functionDeclarations") or []
        where = f"tools[{i}].functionDeclarations"
        for k, item in enumerate([declared] if isinstance(declared, dict) else _list(declared, where)):
            functions.append(_function(item, f"{where}[{k}]"))
        known = ("functionDeclarations", "function_declarations")
        hosted += [name for name, value in tool.items() if name not in known and value is not None]
    if hosted:
        findings.append(Finding(Severity.WARN, "tool_dropped", f"{', '.join(hosted)} cannot be served here"))
    config = _object(field(data, "toolConfig") or {}, "toolConfig")
    calling = _object(field(config, "functionCallingConfig") or {}, "toolConfig.functionCallingConfig")
    mode = str(calling.get("mode") or "").upper()
    if mode not in _CHOICES:
        raise BadRequest(f"functionCallingConfig.mode must be AUTO, ANY, NONE or VALIDATED, not {calling['mode']!r}")
    if mode == "ANY" and hosted and not functions:
        raise BadRequest(f"mode ANY asks for a call, and {', '.join(hosted)} cannot be served here")
    if mode in ("ANY", "VALIDATED"):
        functions = _allowed(field(calling, "allowedFunctionNames"), functions, findings)
    choice: Any = _CHOICES[mode]
    if choice == "required" and len(functions) == 1:
        choice = {"type": "function", "function": {"name": functions[0]["function"]["name"]}}
    # Several engines refuse a choice among no tools.
    return functions, choice if functions else None


def _function(raw: Any, where: str) -> dict[str, Any]:
    raw = _object(raw, where)
    name, description = raw.get("name"), raw.get("description")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where} must have a name")
    function: dict[str, Any] = {"name": name}
    if isinstance(description, str):
        function["description"] = description
    parameters = field(raw, "parametersJsonSchema")
    if parameters is not None:
        function["parameters"] = _object(parameters, f"{where}.parametersJsonSchema")
    elif (parameters := raw.get("parameters")) is not None:
        function["parameters"] = json_schema(parameters, f"{where}.parameters")
    else:
        function["parameters"] = {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _allowed(names: Any, functions: list[dict[str, Any]], findings: list[Finding]) -> list[dict[str, Any]]:
    """The functions that may be called: an engine takes no choice among some, so it is offered only these."""
    if not names:
        return functions
    names = _list(names, "allowedFunctionNames")
    declared = [function["function"]["name"] for function in functions]
    unknown = [name for name in names if name not in declared]
    if unknown:
        raise BadRequest(f"allowedFunctionNames has {unknown[0]!r}, which is not declared")
    left_out = [name for name in declared if name not in names]
    if left_out:
        detail = f"not offered, because not allowed: {', '.join(left_out)}"
        findings.append(Finding(Severity.INFO, "tools_restricted", detail))
    return [function for function in functions if function["function"]["name"] in names]


def _sampling(config: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
    candidates = field(config, "candidateCount")
    if candidates is not None and (isinstance(candidates, bool) or candidates != 1):
        raise BadRequest(f"candidateCount={candidates!r} is not supported: ask for one candidate a request")
    modalities = field(config, "responseModalities") or []
    for modality in _list(modalities, "generationConfig.responseModalities"):
        if str(modality).upper() not in ("TEXT", "MODALITY_UNSPECIFIED"):
            raise BadRequest(f"responseModalities has {modality!r}: only TEXT can be answered")
    sampling: dict[str, Any] = {}
    for name, ours in _NUMBERS.items():
        if (value := field(config, name)) is not None:
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise BadRequest(f"generationConfig.{name} must be a finite number, not {value!r}")
            sampling[ours] = value
    for name, ours in _INTEGERS.items():
        if (value := field(config, name)) is not None:
            sampling[ours] = _integer(value, name)
    if stop := field(config, "stopSequences"):
        stop = [stop] if isinstance(stop, str) else _list(stop, "generationConfig.stopSequences")
        if not all(isinstance(item, str) for item in stop):
            raise BadRequest("generationConfig.stopSequences must be strings")
        if stop := [item for item in stop if item]:
            sampling["stop"] = stop
    if (form := _response_format(config)) is not None:
        sampling["response_format"] = form
    max_tokens = None
    if (value := field(config, "maxOutputTokens")) is not None:
        max_tokens = sampling["max_tokens"] = _integer(value, "maxOutputTokens")
        if max_tokens < 1:
            raise BadRequest(f"generationConfig.maxOutputTokens must be positive, not {max_tokens}")
    return sampling, max_tokens


def _not_obeyed(config: dict[str, Any], thinking: dict[str, Any]) -> list[Finding]:
    """How a model reasons is the trainer's decision (`SessionPolicy.chat_template_kwargs`); the wish is recorded."""
    asked = {name: field(thinking, name) for name in ("thinkingBudget", "thinkingLevel")}
    findings = [
        Finding(Severity.INFO, "thinking_asked", f"{name}={value!r}: recorded, the session's policy decides")
        for name, value in asked.items()
        if value is not None
    ]
    if config.get("logprobs"):
        detail = "generationConfig.logprobs: only the sampled token's can be returned"
        findings.append(Finding(Severity.INFO, "not_applied", detail))
    return findings


def _response_format(config: dict[str, Any]) -> dict[str, Any] | None:
    mime = field(config, "responseMimeType")
    schema = field(config, "responseJsonSchema")
    if schema is not None:
        schema = _object(schema, "generationConfig.responseJsonSchema")
    elif (ours := field(config, "responseSchema")) is not None:
        schema = json_schema(ours, "generationConfig.responseSchema")
    if mime in (None, "", "text/plain") and schema is None:
        return None
    if mime not in (None, "", "application/json"):
        raise BadRequest(f"responseMimeType {mime!r} is not supported: use application/json or text/plain")
    if schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "response", "schema": schema, "strict": True}}


def _integer(value: Any, name: str) -> int:
    """SDKs declare some of these as floats and send 64.0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or abs(value) >= _INT64:
        raise BadRequest(f"generationConfig.{name} must be an integer of at most 64 bits, not {value!r}")
    return int(value)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{where} must be an object")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadRequest(f"{where} must be a list")
    return value

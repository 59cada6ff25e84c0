"""JSON schemas of tools as Python functions, for trainers that read signatures: TRL's `environment_factory`.

Owns the way there and back: types as near to the schema as Python's hints come, names that Python reserves, and the
rest of the schema in words. Our own loop needs none of it: there the schema goes to the model as it is. Called by
`spec`.
"""

from __future__ import annotations

import inspect
import json
import keyword
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Optional, Union

_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}
_DEEPEST = 6  # of nested schemas; one that holds itself ends there


def as_function(spec: Mapping[str, Any], call: Callable[[Any, str, dict[str, Any]], str]) -> Callable[..., str]:
    """A method whose schema says what `spec` does; it calls `call(self, name, arguments)` with the server's own names.

    Arguments that the model leaves out are left out, so that the server's defaults hold.
    """
    name, schema = str(spec["name"]), spec.get("input_schema") or {}
    properties = _properties(schema)
    required = set(schema.get("required") or ())
    names = python_names(properties)
    back = {python: own for own, python in names.items()}

    def method(self: Any, **arguments: Any) -> str:
        return call(self, name, {back.get(given, given): value for given, value in arguments.items()})

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ordered = sorted(properties, key=lambda each: each not in required)
    parameters = [
        inspect.Parameter(
            names[each],
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if each in required else properties[each].get("default"),
            annotation=hint_of(properties[each], schema, optional=each not in required),
        )
        for each in ordered
    ]
    method.__signature__ = inspect.Signature([own, *parameters], return_annotation=str)  # type: ignore[attr-defined]
    method.__annotations__ = {**{each.name: each.annotation for each in parameters}, "return": str}
    method.__name__ = method.__qualname__ = name
    method.__doc__ = _docstring(spec, names, ordered)
    return method


def _properties(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The arguments' schemas; `true`, which takes anything, is an empty one."""
    listed = (schema.get("properties") or {}).items()
    return {str(name): about if isinstance(about, Mapping) else {} for name, about in listed}


def python_names(names: Iterable[str]) -> dict[str, str]:
    """A Python name for each, all different: `from` is `from_`, `max-len` is `max_len`."""
    found: dict[str, str] = {}
    for name in names:
        python = re.sub(r"\W", "_", name) or "_"
        python = f"_{python}" if python[0].isdigit() else python
        while keyword.iskeyword(python) or python == "self" or python in found.values():
            python += "_"
        found[name] = python
    return found


def hint_of(schema: Any, root: Mapping[str, Any], *, optional: bool = False, depth: int = 0) -> Any:
    """The nearest type hint; Any where there is none. `optional` adds None."""
    hint = _plain_hint(schema, root, depth) if isinstance(schema, Mapping) and depth < _DEEPEST else Any
    nullable = isinstance(schema, Mapping) and schema.get("nullable") is True
    return hint if hint is Any or not (optional or nullable) else Optional[hint]  # noqa: UP045  # `|` needs types


def _plain_hint(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Any:
    if "$ref" in schema:
        return hint_of(_referred(str(schema["$ref"]), root), root, depth=depth + 1)
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices and all(isinstance(choice, str | int | bool | None) for choice in choices):
        some = tuple(choice for choice in choices if choice is not None)
        hint = Literal[some] if some else type(None)
        return hint if len(some) == len(choices) else Optional[hint]  # noqa: UP045
    kinds = schema.get("anyOf") or schema.get("oneOf")
    if kinds is None and isinstance(schema.get("type"), list):
        kinds = [{**schema, "type": kind} for kind in schema["type"]]
    if kinds:
        hints = [hint_of(kind, root, depth=depth + 1) for kind in kinds]
        return Any if Any in hints else Union[tuple(hints)]  # noqa: UP007
    if len(schema.get("allOf") or ()) == 1:
        return hint_of(schema["allOf"][0], root, depth=depth + 1)
    hint = _TYPES.get(str(schema.get("type")), Any)
    if hint is list and isinstance(schema.get("items"), Mapping):
        item = hint_of(schema["items"], root, depth=depth + 1)
        return list if item is Any else list[item]  # type: ignore[valid-type]
    return hint


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _docstring(spec: Mapping[str, Any], names: Mapping[str, str], ordered: Iterable[str]) -> str:
    """Google's form. The section on arguments in the server's own text would be read in place of ours."""
    schema = spec.get("input_schema") or {}
    properties = _properties(schema)
    text = re.split(r"\n\s*(?:Args|Returns|Raises):\s*\n", str(spec.get("description") or ""))[0].strip()
    lines = []
    for name in ordered:
        about = properties[name]
        words = " ".join(str(about.get("description") or about.get("title") or name).split())
        nested = _nested(about, schema)
        lines.append(f"    {names[name]}: {words}" + (f" JSON schema: {nested}" if nested else ""))
    head = text or f"Call the {spec['name']} tool."
    return head + ("\n\nArgs:\n" + "\n".join(lines) if lines else "")


def _nested(about: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """What a hint cannot say: the form of objects."""
    text = json.dumps(about)
    if '"$ref"' not in text and '"properties"' not in text:
        return ""
    return json.dumps({**about, **({"$defs": root["$defs"]} if '"$ref"' in text and "$defs" in root else {})})

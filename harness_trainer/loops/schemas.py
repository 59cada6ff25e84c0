"""A Python function as a tool's JSON schema: from its type hints and its Google-style docstring.

Owns the reading. Where `transformers.utils.get_json_schema`, which TRL uses, makes a schema, this makes the same one,
so that a policy is told of a tool in the same words in both (a test compares them); transformers itself would bring
torch into every process that shows a tool. Beyond it: TypedDict, tuple[X, ...], and the abstract Sequence and Mapping.
Called by `class_kinds`.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

# What transformers takes a docstring's sections and arguments for (its `chat_template_utils`, Apache-2.0).
_DESCRIPTION = re.compile(r"^(.*?)[\n\s]*(Args:|Returns:|Raises:|\Z)", re.DOTALL)
_ARGS = re.compile(r"\n\s*Args:\n(.*?)[\n\s]*(Returns:|Raises:|\Z)", re.DOTALL)
_RETURNS = re.compile(r"\n\s*Returns:\n\s*(.*?)[\n\s]*(Raises:|\Z)", re.DOTALL)
_NAME = r"(\w+)(?:[ \t]*\([^()\n]*\))?:"  # "word:", or "word (str):"
_ARG = re.compile(
    rf"(?:^|\n)([ \t]*){_NAME}\s*(.*?)\s*(?=\n(?!\1[ \t])[ \t]*\w+(?:[ \t]*\([^()\n]*\))?:|\Z)", re.DOTALL
)
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)

_SCALARS: dict[type, str] = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_BARE: dict[Any, str] = {**_SCALARS, list: "array", tuple: "array", dict: "object"}
_SEQUENCES = (list, Sequence, MutableSequence, Iterable, Collection)
_MAPPINGS = (dict, Mapping, MutableMapping)


class SchemaError(ValueError):
    """What a function lacks to be a tool, and what to write."""


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """{"type": "function", "function": {"name", "description", "parameters"}}, and "return" where it is documented.

    Raises SchemaError.
    """
    doc = inspect.getdoc(function)
    if not doc or not doc.strip():
        raise SchemaError("it has no docstring: say in one what the tool does, and each argument under `Args:`")
    description, arguments, returns = _sections(doc.strip())
    parameters, returned = _parameters(function)
    for name, schema in parameters["properties"].items():
        if name not in arguments:
            raise SchemaError(f"its docstring says nothing of the argument {name!r}: add `{name}: ...` under `Args:`")
        told = arguments[name]
        if found := _CHOICES.search(told):
            schema["enum"] = _choices(name, found[1])
            told = told[: found.start()].strip()
        schema["description"] = told
    named = {"name": getattr(function, "__name__", "operation"), "description": description, "parameters": parameters}
    if returned is not None:
        named["return"] = returned | ({} if returns is None else {"description": returns})
    return {"type": "function", "function": named}


def type_schema(hint: Any) -> dict[str, Any]:
    """The JSON schema of a type hint. Raises SchemaError for one that says nothing of its JSON."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is None:
        return _plain(hint)
    if origin is Union or origin is types.UnionType:
        return _union(args)
    if origin is Literal:
        if not args or any(type(value) not in _SCALARS for value in args):
            raise SchemaError(f"{hint} has values that JSON has no scalar for")
        return _enum(list(args))
    if origin is tuple:
        return _tuple(hint, args)
    if origin in _SEQUENCES:
        return {"type": "array", **({"items": type_schema(args[0])} if args else {})}
    if origin in _MAPPINGS:
        return {"type": "object", **({"additionalProperties": type_schema(args[1])} if len(args) == 2 else {})}
    raise SchemaError(_unknown(hint))


def _plain(hint: Any) -> dict[str, Any]:
    if hint is Any:
        return {}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        values = [member.value for member in hint]
        if not values or any(type(value) not in _SCALARS for value in values):
            raise SchemaError(f"the values of {hint.__name__} must be str, int, float, bool or None, and at least one")
        return _enum(values)
    if typing.is_typeddict(hint):
        fields = {name: type_schema(kind) for name, kind in get_type_hints(hint).items()}
        required = _required(hint)
        return {"type": "object", "properties": fields, **({"required": required} if required else {})}
    try:
        return {"type": _BARE[hint]}
    except (KeyError, TypeError):
        raise SchemaError(_unknown(hint)) from None


def _required(typed: Any) -> list[str]:
    """Keys of a TypedDict; its own `__required_keys__` misses NotRequired where annotations are strings."""
    told = {name: get_origin(kind) for name, kind in get_type_hints(typed, include_extras=True).items()}
    return [
        name
        for name, kind in told.items()
        if kind is typing.Required or (kind is not typing.NotRequired and name in typed.__required_keys__)
    ]


def _unknown(hint: Any) -> str:
    return (
        f"the type hint {hint!r} has no JSON schema: use str, int, float, bool, list, tuple, dict, Literal, an Enum of "
        "such values, a TypedDict, or unions of these"
    )


def _enum(values: list[Any]) -> dict[str, Any]:
    kinds = list(dict.fromkeys(_SCALARS[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _union(args: tuple[Any, ...]) -> dict[str, Any]:
    parts = [type_schema(arg) for arg in args if arg is not type(None)]
    if len(parts) == 1:
        schema = parts[0]
    elif all(part.keys() == {"type"} and isinstance(part["type"], str) for part in parts):
        kinds = sorted({part["type"] for part in parts})
        schema = {"type": kinds[0] if len(kinds) == 1 else kinds}
    else:
        schema = {"anyOf": parts}
    return {**schema, "nullable": True} if type(None) in args else schema


def _tuple(hint: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    if not args:
        return {"type": "array"}
    if len(args) == 2 and args[1] is ...:
        return {"type": "array", "items": type_schema(args[0])}
    if len(args) == 1:
        raise SchemaError(f"{hint} is a tuple of one: write list[...] for several, or the element alone")
    return {"type": "array", "prefixItems": [type_schema(arg) for arg in args]}


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The arguments' object, and the schema of what is returned; None = it is not told, or has none."""
    try:
        hints = get_type_hints(function)
    except Exception as error:  # a hint may be any expression
        raise SchemaError(f"its type hints cannot be read: {type(error).__name__}: {error}") from error
    taken = dict(inspect.signature(function).parameters)
    first = next(iter(taken), None)
    if first in ("self", "cls") and taken[first].annotation is inspect.Parameter.empty:
        del taken[first]
    for name, parameter in taken.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise SchemaError(f"its argument {name!r} cannot be given by name, as a model gives arguments")
        if parameter.annotation is inspect.Parameter.empty:
            raise SchemaError(f"its argument {name!r} has no type hint: write `{name}: str`, say")
    properties = {name: _of(name, hint) for name, hint in hints.items() if name in taken}
    required = [name for name, parameter in taken.items() if parameter.default is inspect.Parameter.empty]
    returned = None
    if "return" in hints:
        try:
            returned = type_schema(hints["return"])
        except SchemaError:
            returned = None  # the model never writes one
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    return {**schema, "required": required} if required else schema, returned


def _of(name: str, hint: Any) -> dict[str, Any]:
    try:
        return type_schema(hint)
    except SchemaError as error:
        raise SchemaError(f"its argument {name!r}: {error}") from error


def _sections(doc: str) -> tuple[str, dict[str, str], str | None]:
    """Description, arguments, what is returned."""
    described, listed, returned = _DESCRIPTION.search(doc), _ARGS.search(doc), _RETURNS.search(doc)
    lines = [] if listed is None else [line for line in listed[1].split("\n") if line.strip()]
    arguments = {name: re.sub(r"\s*\n+\s*", " ", told.strip()) for _, name, told in _ARG.findall("\n".join(lines))}
    description = "" if described is None else described[1].strip()
    return description, arguments, None if returned is None else returned[1].strip()


def _choices(name: str, listed: str) -> list[Any]:
    try:
        return [choice.strip() if isinstance(choice, str) else choice for choice in json.loads(listed)]
    except (ValueError, TypeError) as error:
        raise SchemaError(f"the choices of its argument {name!r} are no JSON list: {listed}") from error

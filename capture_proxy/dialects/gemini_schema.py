"""Gemini's two spellings of things, made one: field names, and the schema language of function parameters.

Owns reading a field under its camelCase or its snake_case name (the API takes both), and turning Gemini's OpenAPI-like
`Schema` (https://ai.google.dev/api/caching#Schema) into JSON schema. Pure. Called by `gemini_request`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from capture_proxy.errors import BadRequest

MAX_DEPTH = 64  # of nested schemas; deeper ones come from fuzzers, and would overflow the stack
_CAMEL = re.compile(r"_([a-z])")
# 64-bit integers, which protobuf's JSON form writes as strings.
_COUNTS = {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
_RENAMED = {"defs": "$defs", "ref": "$ref"}


def field(raw: Mapping[str, Any], name: str) -> Any:
    """The field under its camelCase name or its snake_case one; None = absent or null."""
    value = raw.get(name)
    return raw.get(snake(name)) if value is None else value


def camel(name: str) -> str:
    return _CAMEL.sub(lambda match: match[1].upper(), name)


def snake(name: str) -> str:
    return re.sub(r"[A-Z]", lambda match: "_" + match[0].lower(), name)


def json_schema(raw: Any, where: str, depth: int = 0) -> dict[str, Any]:
    """Gemini's schema as JSON schema. What is JSON schema already stays as it is.

    Example: {"type": "OBJECT", "properties": {"n": {"type": "INTEGER", "nullable": true}}} becomes
    {"type": "object", "properties": {"n": {"type": ["integer", "null"]}}}. Raises BadRequest.
    """
    if not isinstance(raw, dict):
        raise BadRequest(f"{where} must be a schema object")
    if depth > MAX_DEPTH:
        raise BadRequest(f"{where} is nested deeper than {MAX_DEPTH} levels")

    def inner(value: Any, name: str) -> Any:
        # JSON schema also has `true` and `false` as schemas.
        return value if isinstance(value, bool) else json_schema(value, f"{where}.{name}", depth + 1)

    schema: dict[str, Any] = {}
    for key, value in raw.items():
        name = key if key.startswith("$") else camel(key)
        if value is not None:
            schema[_RENAMED.get(name, name)] = _keyword(name, value, where, inner)
    _settle_properties(schema)
    _settle_type(schema)
    return schema


def _keyword(name: str, value: Any, where: str, inner: Callable[[Any, str], Any]) -> Any:
    if name in ("properties", "defs", "$defs"):
        if not isinstance(value, dict):
            raise BadRequest(f"{where}.{name} must be an object")
        return {key: inner(item, key) for key, item in value.items()}
    if name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if not isinstance(value, list):
            raise BadRequest(f"{where}.{name} must be a list")
        return [inner(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if name in ("items", "additionalProperties", "not"):
        return inner(value, name)
    if name == "type":
        return [_type(item, where) for item in value] if isinstance(value, list) else _type(value, where)
    if name in ("ref", "$ref") and isinstance(value, str):
        return value.replace("#/defs/", "#/$defs/", 1)
    if name in _COUNTS and isinstance(value, str) and value.isdecimal() and len(value) < 19:
        return int(value)
    return value


def _type(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{where}.type must be a string")
    return value.lower()


def _settle_properties(schema: dict[str, Any]) -> None:
    order, properties = schema.pop("propertyOrdering", None), schema.get("properties")
    if isinstance(order, list) and isinstance(properties, dict):
        first = {name: properties[name] for name in order if isinstance(name, str) and name in properties}
        schema["properties"] = {**first, **properties}


def _settle_type(schema: dict[str, Any]) -> None:
    """`nullable`, `format: enum` and `example` are OpenAPI's; JSON schema says them otherwise."""
    if schema.get("type") == "type_unspecified":
        del schema["type"]
    if schema.get("format") == "enum":
        del schema["format"]
    if "example" in schema:
        schema["examples"] = [schema.pop("example")]
    if schema.pop("nullable", False) is not True:
        return
    if isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
    if isinstance(schema.get("anyOf"), list) and "type" not in schema:
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]

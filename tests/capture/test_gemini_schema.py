"""Gemini's schema language, as agents write it, becomes JSON schema."""

import pytest

from capture_proxy.dialects.gemini_schema import MAX_DEPTH, json_schema
from capture_proxy.errors import BadRequest


def test_types_are_lower_case_at_every_depth() -> None:
    schema = {
        "type": "OBJECT",
        "properties": {
            "names": {"type": "ARRAY", "items": {"type": "STRING"}, "minItems": "1"},
            "either": {"anyOf": [{"type": "NUMBER"}, {"type": "BOOLEAN"}]},
        },
        "required": ["names"],
    }
    assert json_schema(schema, "p") == {
        "type": "object",
        "properties": {
            "names": {"type": "array", "items": {"type": "string"}, "minItems": 1},
            "either": {"anyOf": [{"type": "number"}, {"type": "boolean"}]},
        },
        "required": ["names"],
    }


def test_parameters_named_like_keywords_are_left_alone() -> None:
    properties = {"type": {"type": "STRING"}, "max_items": {"type": "INTEGER"}, "nullable": {"type": "STRING"}}
    got = json_schema({"type": "OBJECT", "properties": properties}, "p")
    assert list(got["properties"]) == ["type", "max_items", "nullable"]
    assert got["properties"]["type"] == {"type": "string"}


def test_values_are_never_rewritten() -> None:
    values = {"default": {"type": "OBJECT", "max_items": "5"}, "enum": ["STRING", "max_items"]}
    assert json_schema(values, "p") == values


def test_nullable_is_a_type_and_an_allowed_value() -> None:
    assert json_schema({"type": "INTEGER", "nullable": True}, "p") == {"type": ["integer", "null"]}
    assert json_schema({"type": "INTEGER", "nullable": False}, "p") == {"type": "integer"}
    enum = {"type": "STRING", "format": "enum", "enum": ["a"], "nullable": True}
    assert json_schema(enum, "p") == {"type": ["string", "null"], "enum": ["a", None]}
    either = json_schema({"anyOf": [{"type": "STRING"}], "nullable": True}, "p")
    assert either == {"anyOf": [{"type": "string"}, {"type": "null"}]}


def test_snake_case_keywords_references_and_order_are_settled() -> None:
    schema = {
        "type": "OBJECT",
        "property_ordering": ["b", "gone", "a"],
        "properties": {"a": {"ref": "#/defs/Pet"}, "b": {"type": "STRING", "max_length": "3"}, "c": {}},
        "defs": {"Pet": {"type": "STRING", "example": "cat"}},
        "additional_properties": False,
        "title": None,
    }
    got = json_schema(schema, "p")
    assert list(got["properties"]) == ["b", "a", "c"]
    assert got == {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/Pet"}, "b": {"type": "string", "maxLength": 3}, "c": {}},
        "$defs": {"Pet": {"type": "string", "examples": ["cat"]}},
        "additionalProperties": False,
    }


def test_json_schema_stays_as_it_is() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": ["object", "null"],
        "properties": {"n": {"type": "integer", "exclusiveMinimum": 0, "const": 5}},
        "additionalProperties": {"type": "string"},
        "allOf": [{"$ref": "#/$defs/x"}],
    }
    assert json_schema(schema, "p") == schema


@pytest.mark.parametrize("schema", [[], {"type": 5}, {"properties": []}, {"anyOf": {}}, {"items": 5}, {"type": [1]}])
def test_what_is_no_schema_is_refused(schema: object) -> None:
    with pytest.raises(BadRequest, match="p"):
        json_schema(schema, "p")


def test_nesting_has_an_end() -> None:
    schema: dict[str, object] = {}
    for _ in range(MAX_DEPTH + 1):
        schema = {"items": schema}
    with pytest.raises(BadRequest, match="deeper"):
        json_schema(schema, "p")

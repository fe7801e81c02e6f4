"""Strict functions in forms of a call whose grammars are written by hand: a keyword is kept, or refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from homeprefixd.chat.forcing import calls_grammar, text
from homeprefixd.chat.layout import Calls, Layout
from homeprefixd.chat.unkept import are_apart, is_of, typed
from homeprefixd.errors import RequestError

INTEGER = {"type": "integer"}
TWO = {"properties": {"a": INTEGER, "b": INTEGER}}
REQUIRES_A = {"required": ["a"]}
BRACES: tuple[Calls, ...] = ("gemma_call", "gemma_pipe")
TAGS: tuple[Calls, ...] = ("dsml_functions", "dsml_tools")


def grammar(kind: Calls, parameters: Any, *, strict: bool = True) -> str:
    function = {"name": "f", "parameters": parameters, "strict": strict}
    return calls_grammar(Layout(kind), {"f": function}, True, False, text)


WHOLE = [
    ({**TWO, "anyOf": [REQUIRES_A, {"required": ["b"]}]}, "anyOf"),
    ({**TWO, "oneOf": [REQUIRES_A, {"required": ["b"]}]}, "oneOf"),
    ({**TWO, "allOf": [REQUIRES_A]}, "allOf"),
    ({**TWO, "if": REQUIRES_A, "then": {"required": ["b"]}}, "if"),
    ({**TWO, "not": REQUIRES_A}, "not"),
    ({**TWO, "minProperties": 1}, "minProperties"),
    ({**TWO, "maxProperties": 1}, "maxProperties"),
    ({**TWO, "patternProperties": {"^x": INTEGER}}, "patternProperties"),
    ({"properties": {"a": False}, **REQUIRES_A}, "required"),
    ({"required": ["a"], "additionalProperties": False}, "required"),
    ({"required": "a"}, "required"),
    ({"$ref": "#/$defs/p", "required": ["b"], "$defs": {"p": TWO}}, "required"),
    ({"$ref": "#/$defs/q", "$defs": {"p": TWO}}, "$ref"),
    ({"$ref": "#/$defs/p", "$defs": {"p": INTEGER}}, "$ref"),
]


@pytest.mark.parametrize("kind", [*BRACES, *TAGS])
@pytest.mark.parametrize(("schema", "word"), WHOLE, ids=lambda value: str(value)[:50])
def test_what_the_arguments_as_a_whole_cannot_keep_is_named(kind: Calls, schema: Any, word: str) -> None:
    with pytest.raises(RequestError) as caught:
        grammar(kind, {"type": "object", **schema})
    assert f"`{word}`" in caught.value.message
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_schema")
    grammar(kind, {"type": "object", **schema}, strict=False)


@pytest.mark.parametrize("kind", BRACES)
@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"anyOf": [{"type": "string"}, INTEGER], "minimum": 5}, "minimum"),
        ({"type": "string", "pattern": "x", "anyOf": [{"minLength": 1}]}, "anyOf"),
        ({"$ref": "#/$defs/p", "minimum": 5}, "minimum"),
        ({"$ref": "#/$defs/p", "type": "string"}, "$ref"),
        ({"$ref": "#/$defs/zz"}, "$ref"),
        ({"enum": [1, 7], "minimum": 5}, "minimum"),
        ({"const": 1, "enum": [2]}, "enum"),
        ({"type": "string", "enum": [1]}, "enum"),
        ({"enum": []}, "enum"),
        ({"anyOf": []}, "anyOf"),
        ({"oneOf": [{**INTEGER, "minimum": 3}, {**INTEGER, "maximum": 5}]}, "oneOf"),
        ({"oneOf": [{"enum": [1, 2]}, {"enum": [2.0]}]}, "oneOf"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "oneOf"),
        ({"oneOf": [{"$ref": "#/$defs/p"}, INTEGER]}, "oneOf"),
        ({"minimum": 3}, "minimum"),
        ({"type": "strin"}, "type"),
        ({"type": "string", "format": "date"}, "format"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "maxLength"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": [INTEGER]}, "items"),
        ({"type": ["string", "integer"], "pattern": "x"}, "pattern"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_a_value_in_braces_cannot_keep_is_named(kind: Calls, schema: Any, word: str) -> None:
    whole = {"properties": {"v": schema}, "$defs": {"p": INTEGER}}
    with pytest.raises(RequestError) as caught:
        grammar(kind, whole)
    assert f"`{word}`" in caught.value.message
    grammar(kind, whole, strict=False)


@pytest.mark.parametrize("kind", [*BRACES, *TAGS])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "nullable": True, "x-note": 1, "format": "password"},
        {"type": "array", "uniqueItems": False, "items": INTEGER},
        {**INTEGER, "maxLength": 3, "required": []},
        {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "discriminator": {"propertyName": "kind"}},
        {"oneOf": [INTEGER, {"type": "null"}], "title": "x", "default": None},
        {"$ref": "#/$defs/cat", "description": "x"},
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_says_nothing_here_is_no_reason_to_refuse(kind: Calls, schema: Any) -> None:
    kinds = {
        name: {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}
        for name in ("cat", "dog")
    }
    grammar(kind, {"properties": {"v": schema}, "$defs": kinds})


@pytest.mark.parametrize("kind", [*BRACES, *TAGS])
def test_a_long_way_from_reference_to_reference_is_walked(kind: Calls) -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2000)}
    grammar(kind, {"properties": {"v": {"$ref": "#/$defs/d0"}}, "$defs": {**chain, "d2000": INTEGER}})


def test_kinds_of_values() -> None:
    assert typed({"type": ["string", "number"]}, ["integer", "null"]) == {"type": "integer"}
    assert typed({"type": "integer", "minimum": 1}, "number") == {"type": "integer", "minimum": 1}
    assert typed({"type": "string"}, "object") is None
    assert typed(True, "object") == {"type": "object"}
    assert is_of(1.0, "integer")
    assert is_of(1, ["string", "number"])
    assert not is_of(True, "integer")
    assert not is_of(1.5, "integer")


def test_schemas_that_no_value_fits_both() -> None:
    assert are_apart({}, {"const": True}, {"const": 1})
    assert are_apart({}, {"type": ["null", "string"]}, {"type": "number"})
    assert are_apart({}, False, {})
    assert not are_apart({}, {"const": 1}, {"const": 1.0})
    assert not are_apart({}, {}, {"type": "null"})
    assert not are_apart({"a": {"$ref": "#/a"}}, {"$ref": "#/a"}, INTEGER)
    assert not are_apart({}, {"required": ["k"], "properties": {"k": {"const": 1}}}, {"type": "object"})

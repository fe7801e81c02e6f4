"""JSON schemas as they are handed to llguidance: what says nothing is left out, numbers stay what they are."""

from __future__ import annotations

from typing import Any

import pytest

from homeprefixd.chat.moments import MOMENTS
from homeprefixd.chat.schema import prepared
from homeprefixd.errors import RequestError

UNIQUE = {"uniqueItems": False}
MORE_DIGITS = {"maximum": 0.999999999999999, "minimum": 0.123456789012346}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "array", **UNIQUE}, {"type": "array"}),
        ({"properties": {"uniqueItems": UNIQUE}}, {"properties": {"uniqueItems": {}}}),  # a property's name
        ({"const": UNIQUE, "enum": [UNIQUE]}, {"const": UNIQUE, "enum": [UNIQUE]}),  # values, not schemas
        (
            {"$defs": {"a": UNIQUE}, "allOf": [UNIQUE], "items": UNIQUE},
            {"$defs": {"a": {}}, "allOf": [{}], "items": {}},
        ),
        (
            {"components": {"a": [UNIQUE]}, "default": UNIQUE},
            {"components": {"a": [{}]}, "default": UNIQUE},
        ),  # for `$ref`
        ({"propertyNames": {"type": ["string", "null"], "title": "x"}}, {}),
        ({"propertyNames": {"type": "integer"}}, {"propertyNames": {"type": "integer"}}),
        ({"not": {}}, {"not": {}}),
        ({"if": {}, "then": {}, "else": True}, {}),
        ({"if": {}, "else": {"type": "null"}}, {"if": {}, "else": {"type": "null"}}),
        ({"contains": {}, "minContains": 0, "maxContains": 1}, {"contains": {}, "minContains": 0, "maxContains": 1}),
        ({"minContains": 2}, {}),
        ({"format": "email"}, {"format": "email"}),
        ({"format": "time"}, {"pattern": MOMENTS["time"]}),
        ({"format": "time", "pattern": "1"}, {"pattern": "1", "allOf": [{"pattern": MOMENTS["time"]}]}),
        (
            {"minimum": 2**53 + 1, "maximum": -(2**53) - 1 + 2**60},
            {"minimum": 2**53 + 2, "maximum": 2**60 - 2**53 - 128},
        ),
        ({"minimum": -(2**70), "maximum": 1e30}, {"minimum": -(2**63) + 1024, "maximum": 2**63 - 1024}),
        ({"minimum": 0.1, "maximum": 7}, {"minimum": 0.1, "maximum": 7}),
        ({"const": 2**60}, {"const": 2**60}),
        # exclusive bounds, and those of more digits than are told apart
        ({"exclusiveMaximum": 1, "exclusiveMinimum": 0}, {"maximum": 0.999999999999999, "minimum": 1e-20}),
        ({"exclusiveMinimum": -5, "minimum": -9}, {"minimum": -4.99999999999999}),
        ({"exclusiveMinimum": True, "minimum": 3}, {"minimum": 3.00000000000001}),
        ({"exclusiveMaximum": False, "maximum": 3}, {"maximum": 3}),
        ({"maximum": 0.9999999999999999, "minimum": 0.1234567890123456}, MORE_DIGITS),
        ({"exclusiveMaximum": 2**53 + 1}, {"maximum": 2**53}),
        ({"exclusiveMinimum": 10**14}, {"minimum": 10**14 + 1}),
        ({"enum": ["\b\t\n\f\r\x80"]}, {"enum": ["\b\t\n\f\r\x80"]}),
        ({"maximum": 1e400}, {"maximum": 2**63 - 1024}),
        (True, True),
    ],
)
def test_what_is_left(schema: Any, expected: Any) -> None:
    assert prepared(schema, lenient=False) == expected


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"items": {"const": 2**53 + 1}}, "const"),
        ({"const": 10**400}, "const"),
        ({"enum": [1, -(10**400)]}, "enum"),
        ({"multipleOf": 10**400}, "multipleOf"),
        ({"minimum": 10**400}, "minimum"),
        ({"maximum": -(10**400)}, "maximum"),
        ({"enum": [{"a": [12345678901234567890]}]}, "enum"),
        ({"multipleOf": 0}, "multipleOf"),
        ({"minimum": 2**53 + 1, "exclusiveMaximum": 2**53 + 1}, "minimum"),
        ({"enum": [0.25, [0.9999999999999999]]}, "enum"),
        ({"multipleOf": 0.1234567890123456}, "multipleOf"),
        ({"properties": {"a": {"const": ["\x01"]}}}, "const"),
        ({"enum": ["a", "\x7f"]}, "enum"),
        ({"maximum": -1e19}, "maximum"),
        ({"minimum": 1e400}, "minimum"),
        ({"exclusiveMinimum": 3, "maximum": 3}, "exclusiveMinimum"),
    ],
)
def test_values_that_cannot_be_kept(schema: Any, word: str) -> None:
    with pytest.raises(RequestError, match=f"`{word}`"):
        prepared(schema, lenient=False)
    assert word not in str(prepared(schema, lenient=True))

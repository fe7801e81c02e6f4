"""Keywords of JSON Schema by what their values are: a schema, several, or something that only looks like one."""

from __future__ import annotations

ONE = frozenset(
    {
        "items", "additionalItems", "additionalProperties", "contains", "contentSchema", "propertyNames", "not", "if",
        "then", "else", "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip
"""A schema."""

LISTED = frozenset({"items", "prefixItems", "allOf", "anyOf", "oneOf"})
"""A list of schemas."""

NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
"""Schemas by name."""

VALUES = frozenset({"const", "enum", "default", "examples", "dependentRequired"})
"""No schema, whatever it looks like."""

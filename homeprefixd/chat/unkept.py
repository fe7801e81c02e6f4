"""Which keywords of a JSON schema a grammar written by hand leaves out: all that say something about a value, but those
that it names. What is no keyword of JSON Schema's is a note.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

from ..errors import RequestError
from .member_names import target
from .schema import without_idle

_OF_KIND = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "array": frozenset(
        {
            "items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems",
            "contains", "minContains", "maxContains",
        }
    ),
    "object": frozenset(
        {
            "properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames",
            "required", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
        }
    ),
}  # fmt: skip
"""Keywords that say something only of values of one kind."""

_OF_ALL = frozenset(
    {
        "type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef",
        "$recursiveRef",
    }
)  # fmt: skip

KINDS = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})

_DEPTH = 4  # members within members by which two schemas are told apart


def unkept(schema: dict[str, Any], kind: str | None, kept: Set[str]) -> Iterator[str]:
    """Keywords of one schema object that a grammar which keeps `kept` leaves out, of values of a kind (None: any)."""
    kinds = _OF_KIND if kind is None else {"number" if kind == "integer" else kind}
    binding = _OF_ALL.union(*(_OF_KIND.get(one, frozenset()) for one in kinds))
    return (key for key in without_idle(schema) if key in binding and key not in kept)


def refusal(keyword: str) -> RequestError:
    """For a strict function."""
    return RequestError(
        f"A strict function's parameters use `{keyword}` where it cannot be enforced in this model's form of a call:"
        " leave it out.",
        param="tools",
        code="unsupported_schema",
    )


def typed(schema: Any, kind: Any) -> dict[str, Any] | None:
    """What of `schema` is of a kind, or of one in a list; None if nothing is."""
    if schema is True:
        return {"type": kind}
    if not isinstance(schema, dict):
        return None
    if "type" not in schema:
        return {**schema, "type": kind}
    own, other = _listed(schema["type"]), _listed(kind)
    common = [one for one in own if one in other or (one == "integer" and "number" in other)]
    common += [one for one in other if one == "integer" and "number" in own and one not in common]
    if common == own:
        return schema
    return {**schema, "type": common[0] if len(common) == 1 else common} if common else None


def is_of(value: Any, kind: Any) -> bool:
    """Is it a value of a kind, or of one in a list?"""
    own = _kind_of(value)
    return any(one == own or (one == "number" and own == "integer") for one in _listed(kind))


def are_apart(root: dict[str, Any], one: Any, other: Any, depth: int = _DEPTH) -> bool:
    """Is it certain that no value fits both schemas? They may refer to parts of `root`."""
    one, other = _referred(root, one), _referred(root, other)
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    shared = _kinds(one) & _kinds(other)
    if not shared:
        return True
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return not any(a == b and _broad(_kind_of(a)) == _broad(_kind_of(b)) for a in values for b in others)
    if shared != {"object"} or not depth:
        return False
    names = _required(one) & _required(other)
    return any(are_apart(root, one["properties"][name], other["properties"][name], depth - 1) for name in names)


def _referred(root: dict[str, Any], schema: Any) -> Any:
    for _ in range(8):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = target(root, schema["$ref"])
    return schema


def _listed(kind: Any) -> list[Any]:
    return kind if isinstance(kind, list) else [kind]


def _broad(kind: str) -> str:
    return "number" if kind == "integer" else kind


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    return {float: "number", str: "string", list: "array"}.get(type(value), "object")


def _kinds(schema: dict[str, Any]) -> frozenset[str]:
    """Of values that may fit, whole numbers among all numbers."""
    values = _values(schema)
    if values is not None:
        return frozenset(_broad(_kind_of(value)) for value in values)
    return frozenset(_broad(str(one)) for one in _listed(schema["type"])) if "type" in schema else KINDS - {"integer"}


def _values(schema: dict[str, Any]) -> list[Any] | None:
    """Those that alone may fit, where the schema lists them."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _required(schema: dict[str, Any]) -> frozenset[str]:
    """Names of members that it requires and describes."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return frozenset()
    return frozenset(name for name in required if isinstance(name, str) and name in properties)

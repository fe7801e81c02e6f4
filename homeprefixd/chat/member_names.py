"""Names of an object's members, by its JSON schema: which it names, and how many it counts where names may repeat.

While a reply is written nobody knows which names an object has already, unless its schema lists them: a name that is
only one of a kind may come twice, and counts twice. Whoever reads the reply counts it once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_ALTERNATIVES = ("anyOf", "oneOf")
_NAMED = ("properties", "patternProperties")
_ONE = ("additionalProperties", "items", "additionalItems")
_LISTED = ("items", "prefixItems")

Parts = list[dict[str, Any]]
"""Schemas that all hold for the same value."""


def may_repeat_to_count(schema: dict[str, Any]) -> bool:
    """Is there a `minProperties` in it that names which repeat could meet?"""
    return _Search(schema).found()


def members(schema: dict[str, Any]) -> dict[str, Any]:
    """Those that an object's schema names, as properties or only as required -> what they are."""
    properties, required = schema.get("properties"), schema.get("required")
    found = dict(properties) if isinstance(properties, dict) else {}
    other = schema.get("additionalProperties", True)
    for name in required if isinstance(required, list) and other is not False else ():
        found.setdefault(str(name), other)
    return found


def target(root: dict[str, Any], reference: Any) -> Any:
    """What a local reference refers to; None if there is nothing."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for part in filter(None, reference[1:].split("/")):
        part = part.replace("~1", "/").replace("~0", "~")
        found = found.get(part) if isinstance(found, dict) else None
    return found


class _Search:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._seen: set[int] = set()  # schemas that were looked at, by identity

    def found(self) -> bool:
        level: list[Any] = [self._root]
        while level:
            schema = level.pop()
            if not isinstance(schema, dict) or id(schema) in self._seen:
                continue
            self._seen.add(id(schema))
            parts = list(self._parts(schema, set()))
            branches = [list(self._parts(branch, set())) for part in parts for branch in _alternatives(part)]
            if any(_may_repeat(parts + branch) for branch in branches or [[]]):
                return True
            for part in (*parts, *(part for branch in branches for part in branch)):
                level.extend(_below(part))
        return False

    def _parts(self, schema: Any, met: set[int]) -> Iterator[dict[str, Any]]:
        """What holds wherever `schema` does, itself first."""
        if not isinstance(schema, dict) or id(schema) in met:
            return
        met.add(id(schema))
        yield schema
        every = schema.get("allOf")
        for one in every if isinstance(every, list) else ():
            yield from self._parts(one, met)
        yield from self._parts(target(self._root, schema.get("$ref")), met)


def _alternatives(schema: dict[str, Any]) -> Iterator[Any]:
    for key in _ALTERNATIVES:
        if isinstance(listed := schema.get(key), list):
            yield from listed


def _below(schema: dict[str, Any]) -> Iterator[Any]:
    """Schemas of what is within a value."""
    for key in _NAMED:
        if isinstance(named := schema.get(key), dict):
            yield from named.values()
    for key in _ONE:
        yield schema.get(key)
    for key in _LISTED:
        if isinstance(listed := schema.get(key), list):
            yield from listed


def _may_repeat(parts: Parts) -> bool:
    """Could members whose names repeat meet what `parts` count?"""
    counts = [part["minProperties"] for part in parts if isinstance(part.get("minProperties"), int | float)]
    if not counts or any("const" in part or "enum" in part or not _may_be_object(part) for part in parts):
        return False
    if any(part.get("additionalProperties") is False and not part.get("patternProperties") for part in parts):
        return False
    required = {str(name) for part in parts if isinstance(part.get("required"), list) for name in part["required"]}
    return bool(max(counts) > len(required) + 1)


def _may_be_object(schema: dict[str, Any]) -> bool:
    kinds = schema.get("type", "object")
    return kinds == "object" or (isinstance(kinds, list) and "object" in kinds)

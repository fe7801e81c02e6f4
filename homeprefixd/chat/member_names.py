"""Names of an object's members, by its JSON schema: which it names, and how many it counts where names may repeat.

While a reply is written nobody knows which names an object has already, unless its schema lists them: a name that is
only one of a kind may come twice, and counts twice. Whoever reads the reply counts it once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

_ALTERNATIVES = ("anyOf", "oneOf")
_NAMED = ("properties", "patternProperties")
_ONE = ("additionalProperties", "items", "additionalItems")
_LISTED = ("items", "prefixItems")
_DYNAMIC = ("$dynamicRef", "$recursiveRef")
_INDEX = re.compile("0|[1-9][0-9]*", re.ASCII)

Parts = list[dict[str, Any]]
"""Schemas that all hold for the same value."""


def may_repeat_to_count(schema: dict[str, Any]) -> bool:
    """Is there a `minProperties` in it that names which repeat could meet, or that cannot be followed?"""
    return _Search(schema).found()


def members(schema: dict[str, Any]) -> dict[str, Any]:
    """Those that an object's schema names, as properties or only as required -> what they are."""
    properties, required = schema.get("properties"), schema.get("required")
    found = dict(properties) if isinstance(properties, dict) else {}
    other = schema.get("additionalProperties", True)
    for name in required if isinstance(required, list) and other is not False else ():
        found.setdefault(str(name), other)
    return found


def path_to(root: dict[str, Any], reference: Any) -> tuple[str | int, ...] | None:
    """Where in `root` it is that a reference leads by a JSON pointer; None if there is nothing, or it is no pointer.

    A reference below an `$id` of its own may mean another place.
    """
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    pointer = unquote(reference[1:])
    if pointer and not pointer.startswith("/"):
        return None
    found: Any = root
    path: list[str | int] = []
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and part in found:
            path.append(part)
        elif isinstance(found, list) and _INDEX.fullmatch(part) and int(part) < len(found):
            path.append(int(part))
        else:
            return None
        found = found[path[-1]]
    return tuple(path)


def target(root: dict[str, Any], reference: Any) -> Any:
    """What stands at that place; None if there is none."""
    path = path_to(root, reference)
    if path is None:
        return None
    found: Any = root
    for part in path:
        found = found[part]
    return found


class _Search:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._seen: set[int] = set()  # schemas that were looked at, by identity

    def found(self) -> bool:
        if not _counts_somewhere(self._root):
            return False
        if is_divided(self._root):
            return True
        level: list[Any] = [self._root]
        while level:
            schema = level.pop()
            if not isinstance(schema, dict) or id(schema) in self._seen:
                continue
            self._seen.add(id(schema))
            parts = list(self._parts(schema))
            branches = [list(self._parts(branch)) for part in parts for branch in _alternatives(part)]
            if any(self._leads_away(part) for part in (*parts, *(part for branch in branches for part in branch))):
                return True
            if any(_may_repeat(parts + branch) for branch in branches or [[]]):
                return True
            for part in (*parts, *(part for branch in branches for part in branch)):
                level.extend(_below(part))
        return False

    def _leads_away(self, schema: dict[str, Any]) -> bool:
        """Does it refer to what cannot be looked at here?"""
        return any(key in schema for key in _DYNAMIC) or (
            "$ref" in schema and not isinstance(target(self._root, schema["$ref"]), dict | bool)
        )

    def _parts(self, schema: Any) -> Iterator[dict[str, Any]]:
        """What holds wherever `schema` does, itself first."""
        level = [schema]
        met: set[int] = set()
        while level:
            part = level.pop()
            if not isinstance(part, dict) or id(part) in met:
                continue
            met.add(id(part))
            yield part
            if isinstance(every := part.get("allOf"), list):
                level.extend(every)
            level.append(target(self._root, part.get("$ref")))


def _within(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a JSON value, itself first."""
    level = [value]
    while level:
        item = level.pop()
        if isinstance(item, dict):
            yield item
            level.extend(item.values())
        elif isinstance(item, list):
            level.extend(item)


def _counts_somewhere(root: dict[str, Any]) -> bool:
    """A count of 1 is met by any name."""
    return any(isinstance(count := one.get("minProperties"), int | float) and count > 1 for one in _within(root))


def is_divided(root: dict[str, Any]) -> bool:
    """Has a part of a schema an address of its own, from which references in it are read?"""
    drafts = (one.get("$schema") for one in _within(root))
    keys = ("$id", "id") if any(isinstance(draft, str) and "draft-04" in draft for draft in drafts) else ("$id",)
    return any(isinstance(one.get(key), str) for one in _within(root) if one is not root for key in keys)


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

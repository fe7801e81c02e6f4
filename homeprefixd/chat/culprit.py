"""Which keyword of a JSON schema is why it cannot be used, found by trying parts of it; and a schema without such.

Knows no keyword's meaning, only where schemas stand within schemas, and nothing of compilers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .member_names import path_to, target

Path = tuple[str | int, ...]
"""From the whole schema to a keyword, or to a schema where no single keyword is to blame."""

Wrong = Callable[[Any], str]
"""What is wrong with a schema, "" if nothing is. Raises TimeoutError: it has been asked for too long."""

MOST_LEFT_OUT = 32
"""Keywords; who needs more gets an object of any kind."""

_SHARED = ("$defs", "definitions")
_LAST = ("type", "properties", *_SHARED)
"""What is blamed only where nothing else is: without it most schemas can be used."""

_ONE = frozenset({"items", "additionalProperties", "additionalItems", "not", "contains", "propertyNames"})
_LISTED = frozenset({"items", "prefixItems", "allOf", "anyOf", "oneOf"})
_NAMED = frozenset({"properties", "patternProperties"})


def culprit(schema: dict[str, Any], wrong: Wrong) -> Path | None:
    """None if nothing is wrong. Raises TimeoutError."""
    if not wrong(schema):
        return None
    path, node = _deepest(schema, wrong)
    if not isinstance(node, dict):
        return path
    for key in sorted(node, key=lambda key: key in _LAST):
        if not wrong(_whole(schema, {name: value for name, value in node.items() if name != key}, path)):
            return (*path, key)
    return path


def shown(path: Path) -> str:
    """The keyword, and where it stands as a JSON pointer."""
    pointer = "#" + "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in path)
    keyword = path[-2] if isinstance(path[-1], int) or path[-2:-1] in [(key,) for key in _NAMED] else path[-1]
    return f"`{keyword}`, at {pointer[:200]}"


def loosened(schema: dict[str, Any], wrong: Wrong) -> dict[str, Any]:
    """Without the keywords because of which it cannot be used; an object of any kind where they are too many.

    Raises TimeoutError.
    """
    found: Any = schema
    for _ in range(MOST_LEFT_OUT):
        path = culprit(found, wrong)
        if path is None:
            return dict(found)
        found = _without(found, path)
        if not isinstance(found, dict):
            break
    return {"type": "object"}


def _whole(root: dict[str, Any], node: Any, path: Path) -> Any:
    """A part of `root` as a schema by itself: it may refer to what the whole has for all."""
    if not isinstance(node, dict) or not path:
        return node
    return {**{key: root[key] for key in _SHARED if key in root}, **node}


def _deepest(root: dict[str, Any], wrong: Wrong) -> tuple[Path, Any]:
    """The smallest part that cannot be used by itself."""
    path: Path = ()
    node: Any = root
    met = {id(root)}
    while isinstance(node, dict):
        for place, child in _children(root, node, path):
            if isinstance(child, bool) or id(child) in met:
                continue
            if not isinstance(child, dict) or wrong(_whole(root, child, place)):
                path, node = place, child
                met.add(id(child))
                break
        else:
            break
    return path, node


def _children(root: dict[str, Any], node: dict[str, Any], path: Path) -> Iterator[tuple[Path, Any]]:
    for key, value in node.items():
        if key in _NAMED and isinstance(value, dict):
            yield from (((*path, key, name), one) for name, one in value.items())
        elif key in _LISTED and isinstance(value, list):
            yield from (((*path, key, index), one) for index, one in enumerate(value))
        elif key in _ONE and isinstance(value, dict):
            yield (*path, key), value
        elif key == "$ref" and (there := path_to(root, value)) is not None:
            yield there, target(root, value)


def _without(value: Any, path: Path) -> Any:
    """A copy without what stands at `path`; in a list, anything stands there instead."""
    if not path:
        return True
    first, *rest = path
    if isinstance(value, list):
        return [_without(one, tuple(rest)) if index == first else one for index, one in enumerate(value)]
    if not rest:
        return {key: one for key, one in value.items() if key != first}
    return {key: _without(one, tuple(rest)) if key == first else one for key, one in value.items()}

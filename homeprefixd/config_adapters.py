"""The LoRA adapters of a model, as a table or a variable gives them: checked, as `config.AdapterConfig` has them."""

from __future__ import annotations

import math
from typing import Any

from .config_tables import TablesError, tables_of

_FORM = '[{ id = "french", path = "french.gguf" }]'
_KINDS: dict[str, tuple[type, ...]] = {
    "id": (str, int),
    "path": (str,),
    "scale": (int, float),
    "default": (bool,),
    "alias": (str,),
}
_MAX_ID = 64  # characters
MAX_SCALE = 100.0
"""Of an adapter, in either direction."""

MAX_ADAPTERS = 64


def parse_adapters(value: Any) -> list[dict[str, Any]]:
    """Tables in the order given, each with an `id` of its own. Raises TablesError."""
    found = [_adapter(one) for one in tables_of(value, _FORM, MAX_ADAPTERS, "adapters")]
    for name in ("id", "alias"):
        names = [one[name] for one in found if one.get(name)]
        for one in names:
            if names.count(one) > 1:
                raise TablesError(f"two adapters have the {name} {one!r}")
    return found


def _adapter(given: dict[str, Any]) -> dict[str, Any]:
    for name, value in given.items():
        if name not in _KINDS:
            raise TablesError(f"an adapter has no {name}; it has {', '.join(_KINDS)}")
        if not isinstance(value, _KINDS[name]) or (isinstance(value, bool) and name != "default"):
            raise TablesError(f"{name} of an adapter cannot be {value!r}")
    for name in ("id", "path"):
        if given.get(name, "") == "":
            raise TablesError(f"an adapter needs {name}, as in {_FORM}")
    one = {**given, "id": str(given["id"])}
    if len(one["id"]) > _MAX_ID or any(char.isspace() or not char.isprintable() for char in one["id"]):
        raise TablesError(f"id {one['id'][:100]!r}: allowed are up to {_MAX_ID} characters without spaces")
    if not one.get("alias", "").isprintable():
        raise TablesError(f"alias {one['alias'][:100]!r} of {one['id']}: control characters are not allowed")
    if "\0" in one["path"]:
        raise TablesError("a path cannot have NUL in it")
    scale = float(one.get("scale", 1.0))
    if not math.isfinite(scale) or abs(scale) > MAX_SCALE:
        raise TablesError(f"scale of {one['id']} cannot be {scale:g}; allowed: {-MAX_SCALE:g} to {MAX_SCALE:g}")
    return {**one, "scale": scale}

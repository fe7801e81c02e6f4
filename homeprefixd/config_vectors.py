"""The control vectors of a model, as a table or a variable gives them: checked, as `config` has them."""

from __future__ import annotations

import math
from typing import Any

from .config_tables import TablesError, tables_of

_FORM = '[{ path = "calm.gguf", scale = 0.8 }]'
_KINDS: dict[str, tuple[type, ...]] = {
    "path": (str,),
    "scale": (int, float),
    "first_layer": (int,),
    "last_layer": (int,),
}
_MAX_VECTORS = 64
_MAX_SCALE = 1000.0  # in either direction
_MAX_LAYER = 10_000


def parse_vectors(value: Any) -> list[dict[str, Any]]:
    """Tables in the order given. Raises TablesError."""
    return [_vector(one) for one in tables_of(value, _FORM, _MAX_VECTORS, "control vectors")]


def _vector(given: dict[str, Any]) -> dict[str, Any]:
    for name, value in given.items():
        if name not in _KINDS:
            raise TablesError(f"a control vector has no {name}; it has {', '.join(_KINDS)}")
        if not isinstance(value, _KINDS[name]) or isinstance(value, bool):
            raise TablesError(f"{name} of a control vector cannot be {value!r}")
    path = given.get("path", "")
    if not path:
        raise TablesError(f"a control vector needs path, as in {_FORM}")
    if "\0" in path:
        raise TablesError("a path cannot have NUL in it")
    scale = float(given.get("scale", 1.0))
    if not math.isfinite(scale) or abs(scale) > _MAX_SCALE:
        raise TablesError(f"scale of {path} cannot be {scale:g}; allowed: {-_MAX_SCALE:g} to {_MAX_SCALE:g}")
    first, last = given.get("first_layer", 0), given.get("last_layer", 0)
    for name, layer in (("first_layer", first), ("last_layer", last)):
        if not 0 <= layer <= _MAX_LAYER:
            raise TablesError(f"{name} of {path} cannot be {layer}; allowed: 1 to {_MAX_LAYER}, or 0 for all")
    if last and first > last:
        raise TablesError(f"{path}: first_layer {first} comes after last_layer {last}")
    return {**given, "scale": scale}

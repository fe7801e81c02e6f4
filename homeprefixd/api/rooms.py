"""The rooms of the API: every module of this package that has routes. A new dialect is a new module, and nothing else.

A room has `routes()`, `OPERATIONS` that describe them, and where its errors look different `ERROR_FORMS`: from the
beginning of a path, or a header that only its clients send, to their form.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from aiohttp import web

from .errors import ErrorForm
from .operation import Operation


@dataclass(frozen=True)
class Room:
    """A module with routes, as `app.py` and `openapi.py` see it."""

    name: str
    routes: Callable[[], list[web.RouteDef]]
    operations: Sequence[Operation]
    error_forms: Mapping[str, ErrorForm]


def rooms() -> list[Room]:
    """All of them, by name."""
    package = __name__.rpartition(".")[0]
    found = []
    for info in sorted(pkgutil.iter_modules(import_module(package).__path__), key=lambda info: info.name):
        module = import_module(f"{package}.{info.name}")
        if callable(routes := getattr(module, "routes", None)):
            forms = getattr(module, "ERROR_FORMS", {})
            found.append(Room(info.name, routes, module.OPERATIONS, forms if isinstance(forms, Mapping) else {}))
    return found

"""Which namespaces can still be used: those of the models that the daemon is configured for, as they run now.

What is stored of a model that is not configured any more, or of one under settings that it no longer has (another KV
type, another llama.cpp), can help nobody: it goes first when room is needed, leaves before what they hang on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .blocks import ADAPTER_NAMES, ADAPTERS, MODEL_NAME
from .disk_file import PAGE
from .tree import Placed
from .warm_table import WarmTable

_SALT = "salt"
_OF_A_REQUEST = frozenset({_SALT, MODEL_NAME, ADAPTERS, ADAPTER_NAMES})


class Usage:
    """Knows what was opened since the start. With nothing known of models, no namespace is taken for stale."""

    def __init__(self) -> None:
        self._opened: dict[bytes, dict[str, Any]] = {}
        self._models: frozenset[str] | None = None

    def opened(self, namespace: bytes, description: Mapping[str, Any]) -> None:
        """A worker uses it."""
        self._opened[namespace] = dict(description)

    def configured(self, models: list[str]) -> None:
        """Aliases of the models that may still be loaded."""
        self._models = frozenset(models)

    @property
    def is_configured(self) -> bool:
        """Whether a daemon has told its models."""
        return self._models is not None

    def is_open(self, namespace: bytes) -> bool:
        return namespace in self._opened

    def descriptions(self) -> list[dict[str, Any]]:
        """Of all that is open."""
        return list(self._opened.values())

    def stale(self, namespaces: Mapping[bytes, Mapping[str, Any]]) -> list[bytes]:
        """Those that no model can use any more. `namespaces`: descriptions by key."""
        current: dict[object, list[dict[str, Any]]] = {}
        for opened in self._opened.values():
            current.setdefault(opened.get(MODEL_NAME), []).append(_kind(opened))
        found = []
        for key, description in list(namespaces.items()):
            if key in self._opened:
                continue
            alias = description.get(MODEL_NAME)
            if alias in current:
                other = _kind(description) not in current[alias]
            else:  # not loaded by now, perhaps later
                other = self._models is not None and alias not in self._models
            if other:
                found.append(key)
        return found


def _kind(description: Mapping[str, Any]) -> dict[str, Any]:
    """A description without what differs between requests to one model."""
    return {name: value for name, value in description.items() if name not in _OF_A_REQUEST}


def choose_stale(
    table: WarmTable, stale: Sequence[bytes], need: int, most: int, may_evict: Callable[[bytes], bool]
) -> tuple[dict[bytes, Placed], int]:
    """Nodes of `stale` namespaces to go, children before parents, until `need` bytes or `most` nodes; and their size.

    `may_evict` is asked for each.
    """
    chosen: dict[bytes, Placed] = {}
    size = 0
    for namespace in stale:
        for node in _upwards(table, namespace):
            if size >= need or len(chosen) >= most:
                return chosen, size
            key = node.record.key
            if any(child.record.key not in chosen for child in table.children(key)) or not may_evict(key):
                continue
            chosen[key] = node
            size += -(-node.record.stored // PAGE) * PAGE
    return chosen, size


def _upwards(table: WarmTable, root: bytes) -> Iterator[Placed]:
    """All below `root`, children before their parents, one by one."""
    path: list[Placed] = []
    waiting = [table.children(root)]
    while waiting:
        child = next(waiting[-1], None)
        if child is not None:
            path.append(child)
            waiting.append(table.children(child.record.key))
            continue
        waiting.pop()
        if path:
            yield path.pop()

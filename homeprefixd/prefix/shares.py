"""Shares of the disk's budget: what one model, or one API key, may take of it at most.

A share bounds whoever has one and reserves nothing: who has none may take all. A block belongs to the model that
computes it and to the key that asked for it first, also where others use it since. What is over its share loses its own
blocks, by the same worth as everywhere; what is new and does not fit even so is not written, and stays in RAM as long
as there is room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .blocks import MODEL_NAME
from .disk_file import Sums
from .tree import Record


@dataclass(frozen=True)
class Account:
    """One that has a share. `limit` and `used` in bytes, as stored."""

    kind: Literal["model", "key"]
    name: str
    limit: int
    used: int
    namespaces: frozenset[bytes]  # of a model

    def holds(self, record: Record) -> bool:
        """Whether a node is counted here."""
        return record.owner == self.name if self.kind == "key" else record.namespace in self.namespaces


class Shares:
    """Percentages of the budget, by name. Changed by the writer's thread only."""

    def __init__(self) -> None:
        self._models: dict[str, int] = {}
        self._keys: dict[str, int] = {}

    def set(self, models: Mapping[str, int], keys: Mapping[str, int]) -> bool:
        """From now on these; 0 and 100 or more bound nothing. Returns whether that is news."""
        before = (self._models, self._keys)
        self._models = {name: percent for name, percent in models.items() if 0 < percent < 100}
        self._keys = {name: percent for name, percent in keys.items() if 0 < percent < 100}
        return before != (self._models, self._keys)

    def accounts(self, budget: int, sums: Sums, namespaces: Mapping[bytes, Mapping[str, Any]]) -> list[Account]:
        """All that have one, as they stand now. `budget` in bytes; `namespaces`: descriptions by key."""
        found = [
            Account("key", name, budget * percent // 100, sums.owners.get(name, 0), frozenset())
            for name, percent in self._keys.items()
        ]
        for name, percent in self._models.items():
            own = frozenset(key for key, about in list(namespaces.items()) if about.get(MODEL_NAME) == name)
            used = sum(sums.sizes.get(key.hex(), 0) for key in own)
            found.append(Account("model", name, budget * percent // 100, used, own))
        return found

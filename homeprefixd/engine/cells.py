"""Which cells the running sequences use, and which of them they share: counted once, however many use them.

llama.cpp does not tell; this follows what the scheduler does. A cell belongs to the sequence that filled it (import or
decode), and stays while anyone uses it. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping


class CellLedger:
    """`lengths`, where it is asked for, are the tokens of each entered sequence that are in the context."""

    def __init__(self) -> None:
        self._owners = itertools.count()
        self._spans: dict[int, list[tuple[int, int]]] = {}  # by sequence id: owner, from which position on

    def enter(self, seq: int) -> None:
        self._spans[seq] = [(next(self._owners), 0)]

    def share(self, source: int, target: int, count: int) -> None:
        """`target`, which was empty, uses the first `count` cells of `source` too."""
        spans = [(owner, start) for owner, start in self._spans[source] if start < count]
        self._spans[target] = [*spans, (next(self._owners), count)]

    def leave(self, seq: int) -> None:
        self._spans.pop(seq, None)

    def used(self, lengths: Mapping[int, int]) -> int:
        """Cells in use."""
        extents: dict[int, int] = {}
        for seq, spans in list(self._spans.items()):
            end = lengths.get(seq, 0)
            for owner, start in reversed(spans):
                if end > start:
                    extents[owner] = max(extents.get(owner, 0), end - start)
                    end = start
        return sum(extents.values())

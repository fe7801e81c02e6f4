"""What one client of the store holds: reserved slots and leases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..frames.store import NewNode
from .hot import Extent

if TYPE_CHECKING:
    from .cache import Cache, Lease


_SETTLED = 60.0
"""Seconds without use after which a block that is not on disk yet makes way for a new one: not to that which continues
it, which would be of no use without it."""


class Committed(NamedTuple):
    """What became of the nodes of one commit, beside those that were published."""

    known: int = 0  # there already, or covered by a longer one
    refused: int = 0  # their parent is not there, or they are not as they should be


class Session:
    """What one client holds: reserved slots and leases. Closing it gives everything back."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.reserved: dict[int, Extent] = {}  # by offset
        self.leases: set[Lease] = set()

    def lookup(self, namespace: bytes, tokens: bytes, *, limit: int, exact: bool = False) -> Lease:
        """`Cache.lookup`, leased to this session."""
        return self._cache.lookup(namespace, tokens, limit=limit, exact=exact, load=True, session=self)

    def release(self, lease: Lease) -> None:
        with self._cache.lock:
            self.leases.discard(lease)
            self._cache.release(lease)

    def reserve(self, sizes: Sequence[int], *, runs: bool = False, after: bytes = b"") -> list[int]:
        """Slots for blocks about to be exported: their offsets, fewer where there is no more room.

        `runs`: of several blocks, for which no more is evicted than they take. `after`: key of the node that they
        continue, which is not evicted for them.
        """
        cache = self._cache
        offsets: list[int] = []
        for size in sizes:
            with cache.lock:
                extent = cache.hot.allocate(size, settled=_SETTLED, most=size if runs else None, keep=after)
                if extent is None:
                    cache.counters.no_room += 1
                    break
                self.reserved[extent.offset] = extent
            if not cache.arena.populate(extent.offset, size):
                self.abandon([extent.offset])
                break
            offsets.append(extent.offset)
        return offsets

    def abandon(self, offsets: Sequence[int]) -> None:
        """Give reserved slots back, as far as no node is in them; unknown ones are ignored."""
        cache = self._cache
        with cache.lock:
            for offset in offsets:
                extent = self.reserved.pop(offset, None)
                if extent is not None:
                    cache.hot.leave(extent)

    def commit(self, namespace: bytes, nodes: Sequence[NewNode], owner: str = "") -> Committed:
        """Publish filled slots as nodes, parents before children; those that are known or cannot be are dropped.

        `owner`: name of the API key that they were computed for.
        """
        return self._cache.commit(self, namespace, nodes, owner)

    def close(self) -> None:
        """The client is gone."""
        cache = self._cache
        with cache.lock:
            for lease in list(self.leases):
                self.release(lease)
            self.abandon(list(self.reserved))
            cache.sessions.discard(self)

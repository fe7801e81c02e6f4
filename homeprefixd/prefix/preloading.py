"""After a start: what was used last comes back into RAM, while nobody asks for anything.

A model takes a second or more to load; the blocks that its first request will want are read in that time. Nothing is
evicted for it, and as soon as somebody asks, it pauses: a request's own blocks come first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

from .blocks import BLOCK_TOKENS
from .cache import Cache
from .codec import Decoder
from .policy import ORDER_BYTES
from .runs import RUN
from .tree import Placed

PAUSE = 2.0  # seconds without look-ups before it goes on
MAX_NODES = 1000
"""That are loaded: 64,000 tokens. Small models have small blocks, and each costs memory of its own in the index."""

log = logging.getLogger(__name__)


class Preloader:
    """A thread that loads at most `budget` bytes of state, and ends."""

    def __init__(self, cache: Cache, budget: int) -> None:
        self._cache = cache
        self._budget = min(budget, cache.arena.limit // 2)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="preloader", daemon=True)

    def start(self) -> None:
        if self._cache.disk is not None and not self._cache.disk.read_only and self._budget > 0:
            self._thread.start()

    def stop(self) -> None:
        """Ends it after the block that is being loaded."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        cache, decoder, loaded, left = self._cache, Decoder(), 0, self._budget
        lookups = cache.counters.lookups
        try:
            waiting = list(self._wanted())
            while waiting:
                while cache.counters.lookups != lookups and not self._stop.is_set():
                    lookups = cache.counters.lookups
                    self._stop.wait(PAUSE)
                nodes = _adjacent(waiting)
                size = sum(node.record.size for node in nodes)
                count = cache.preload(nodes, decoder) if not self._stop.is_set() and size <= left else 0
                if not count:
                    break
                loaded += count
                left -= sum(node.record.size for node in nodes[:count])
                del waiting[:count]
        except Exception as error:
            cache.trouble("loading what was used last", error)
        if loaded:
            log.info("%d blocks that were used last are in memory again", loaded)

    def _wanted(self) -> Iterator[Placed]:
        """Nodes to load, those of the paths that were used last first, parents before children."""
        size, seen = 0, set[bytes]()
        with self._cache.view() as (_tables, warm):
            for row in warm.newest() if warm is not None else ():
                path: list[Placed] = []
                at = warm.place(row[ORDER_BYTES:]) if warm is not None else None
                while at is not None and warm is not None and at.record.key not in seen:
                    path.append(at)
                    at = warm.place(at.parent)
                for node in reversed(path):
                    seen.add(node.record.key)
                    size += node.record.size
                    yield node
                if size >= self._budget or len(seen) >= MAX_NODES or self._stop.is_set():
                    return


def _adjacent(nodes: Sequence[Placed]) -> list[Placed]:
    """The first, and the whole blocks that follow it, as far as they can lie in memory as one run."""
    found = [nodes[0]]
    for node in nodes[1:RUN]:
        if node.parent != found[-1].record.key or node.is_edge or node.length != BLOCK_TOKENS:
            break
        found.append(node)
    return found if found[0].length == BLOCK_TOKENS else found[:1]

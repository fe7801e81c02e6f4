"""Removing nodes by hand, from every tier.

Runs in the writer's thread, in steps: a few nodes, children before parents, leave RAM and are hidden under the cache's
lock, then they leave the disk without it. So a look-up waits for one step at most, however many nodes go. Slots that
are leased are freed when their leases end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import NotFoundError, RequestError, StoreError
from ..program import typed
from .blocks import KEY_BYTES, MODEL_NAME, TokensBE
from .disk import DiskFullError, DiskTroubleError
from .tree import NodeTable, Placed, shorter
from .warm_table import WarmTable

if TYPE_CHECKING:
    from .cache import Cache

ID_CHARACTERS = 16
"""Of a node's key in hex, in listings."""

_STEP_NODES = 128
_STEP_SECONDS = 0.01  # that the lock is held for one step
_PAUSE = 0.002  # between steps that remove nothing: who waits for the lock gets it

log = logging.getLogger(__name__)


class Removed(NamedTuple):
    nodes: int
    bytes: int  # of state: as stored, or as in RAM for nodes that were only there


def model_label(description: Mapping[str, Any]) -> str:
    """What a namespace's model is called: its name, or the beginning of its content's hash."""
    return str(description.get(MODEL_NAME) or description.get("model_sha256", "")[:12])


def is_model(description: Mapping[str, Any], model: str) -> bool:
    """Whether `model` (a name, or at least 4 characters of the hash) means this namespace's model."""
    sha256 = str(description.get("model_sha256", ""))
    return model == model_label(description) or (len(model) >= 4 and sha256.startswith(model.lower()))


def tokens_of(cache: Cache, warm: WarmTable | None, node: Placed) -> TokensBE:
    """All tokens from the start of a prompt to a node's end. With the cache's lock."""
    parts: list[bytes] = []
    at: Placed | None = node
    while at is not None:
        if not at.is_edge:
            parts.append(at.tree_key[KEY_BYTES:])
        hot = cache.hot.by_key.get(at.parent)
        at = hot.node if hot is not None else warm.place(at.parent) if warm is not None else None
    return TokensBE(b"".join(reversed(parts)))


def purge(
    cache: Cache, *, everything: bool = False, prefix: str = "", older_than: float = 0.0, model: str = "", now: float
) -> Removed:
    """Remove nodes; exactly one filter is set. `older_than` in seconds since the last use, `now` in Unix time.

    `prefix` is an id of a listing or a beginning of it: the node, all below it, and all above it that leads nowhere
    else and that no pin holds. A pin goes with the last node that it holds. Raises RequestError for other than one
    filter, NotFoundError for an unknown prefix or model, StoreError if the disk cannot be changed or the process ends
    (the message says how far it came).
    """
    if (everything, bool(prefix), older_than > 0, bool(model)).count(True) != 1:
        raise RequestError("say what to purge: one of all, prefix, older_than (more than 0 seconds) or model")
    if cache.disk is not None and cache.disk.read_only:
        raise StoreError("the store is open for reading only")
    removal = Removal(cache)
    roots: list[bytes] = []
    if everything or model:
        with cache.lock:
            roots += list(cache.namespaces) if everything else _namespaces_of(cache, model)
        if everything:
            cache.recent.clear()
        cache.replies.forget(None if everything else roots)
        for root in roots:
            removal.below(root)
    elif prefix:
        with cache.view() as (_tables, warm):
            node = find(cache, warm, prefix)
        cache.replies.forget([node.record.namespace])  # whose text is whose is not known
        removal.below(node.record.key)
        removal.step(lambda warm, _ends: (_upwards(cache, warm, node, removal.pinned), True))
    else:
        cache.replies.forget(before=now - older_than)
        removal.unused(now - older_than)
    try:
        _finish_on_disk(cache)
    finally:
        cache.pins.purged(removal.unpinned, roots)
        cache.removed_by_hand()
    return removal.done()


def _finish_on_disk(cache: Cache) -> None:
    """What was forgotten of replies goes now, too, and what is hidden as damaged: no step could see it."""
    if cache.disk is None:
        return
    try:
        cache.repair()
        cache.replies.put(cache.disk)
    except (DiskFullError, DiskTroubleError) as error:
        raise StoreError(f"purged, but not all of it from the disk: {error}") from error


Victims = dict[bytes, Placed]  # by key, children before parents
Choose = Callable[[WarmTable | None, float], tuple[Victims, bool]]
"""Called with the lock held: the next nodes to go, and whether they are the last. To return at `time.perf_counter()`
values beyond the second argument."""


class Removal:
    """Nodes that leave all tiers, step by step. Belongs to the writer's thread."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._nodes = 0
        self._bytes = 0
        self.pinned = cache.pins.ends()
        self.unpinned: set[bytes] = set()
        """Places of pins whose last node went."""

    def done(self) -> Removed:
        """What went until now."""
        return Removed(self._nodes, self._bytes)

    def below(self, root: bytes) -> None:
        """All below a node or a namespace."""
        self.step(lambda warm, ends: _next_below(self._cache, warm, root, ends))

    def unused(self, moment: float) -> None:
        """What was last used before `moment` (Unix time), as far as nothing below it was used later."""
        scan = _Unused(self._cache, moment)
        self.step(scan.hot)
        self.step(scan.warm)

    def step(self, choose: Choose) -> None:
        """Remove what `choose` says, until that is all. Raises StoreError."""
        cache = self._cache
        seconds = _STEP_SECONDS
        last = False
        while not last:
            if cache.out_of_time():
                raise StoreError(f"the store ends; {self._nodes} nodes were purged before")
            with cache.view() as (_tables, warm):
                victims, last = choose(warm, time.perf_counter() + seconds)
                for key in victims:
                    hot = cache.hot.by_key.get(key)
                    if hot is not None:
                        cache.forget_hot(hot)
                    cache.touched.pop(key, None)
                    self.unpinned.update(self.pinned.get(key, ()))
                cache.hide(victims)
            if not victims:
                seconds *= 2  # a slow disk: what was read is in memory next time, but some of it may have left it
                time.sleep(_PAUSE)
                continue
            seconds = _STEP_SECONDS
            gone = False
            try:
                if cache.disk is not None:
                    cache.disk.remove(list(victims.values()))
                gone = True
            except (DiskFullError, DiskTroubleError) as error:
                raise StoreError(f"purged from memory, but the disk cannot be changed: {error}") from error
            finally:
                with cache.lock:
                    cache.show(victims)
                    if gone:
                        cache.left_disk(list(victims), drop=True)
                        cache.counters.purged += len(victims)
                        cache.removals_seen.add(victims, "purged")
            self._nodes += len(victims)
            self._bytes += sum(node.record.stored or node.record.size for node in victims.values())


def children(cache: Cache, warm: WarmTable | None, key: bytes) -> Victims:
    """Those of a node or a namespace in both tiers."""
    return {child.record.key: child for child in _children(cache, warm, key)}


def _children(cache: Cache, warm: WarmTable | None, key: bytes) -> Iterator[Placed]:
    """The same, one by one: a namespace may have very many."""
    yield from cache.hot.table.children(key)
    if warm is not None:
        for child in warm.children(key):
            if child.record.key not in cache.hot.by_key:
                yield child


def _next_below(cache: Cache, warm: WarmTable | None, root: bytes, ends: float) -> tuple[Victims, bool]:
    """The first nodes below `root` in the order of going, and whether these are all."""
    found: Victims = {}
    path: list[Placed] = []
    waiting = [_children(cache, warm, root)]
    while waiting:
        child = next(waiting[-1], None)
        if child is not None:
            path.append(child)
            waiting.append(_children(cache, warm, child.record.key))
        else:
            waiting.pop()
            if path:
                node = path.pop()
                found[node.record.key] = node
        if len(found) >= _STEP_NODES or time.perf_counter() > ends:
            return found, not waiting
    return found, True


def _upwards(cache: Cache, warm: WarmTable | None, node: Placed, pinned: Container[bytes]) -> Victims:
    """The node, shorter ones that it covers, and all above it that leads nowhere else and is not `pinned` (keys)."""
    victims: Victims = {}
    if any(True for _child in _children(cache, warm, node.record.key)):
        return victims  # one was added meanwhile
    victims[node.record.key] = node
    tables: list[NodeTable] = [cache.hot.table, *([warm] if warm is not None else [])]
    for table in tables:
        for short in list(shorter(table, node.tree_key)):  # covered by it, though still on disk
            if not short.record.holds_edge and not children(cache, warm, short.record.key):
                victims[short.record.key] = short
    while node.parent not in cache.namespaces:
        above = _place(cache, warm, node.parent)
        below = children(cache, warm, above.record.key) if above is not None else {}
        if (
            above is None
            or above.record.key in pinned
            or any(key not in victims and not child.is_edge for key, child in below.items())
        ):
            break
        victims |= below
        node = above
        victims[node.record.key] = node
    return victims


def _place(cache: Cache, warm: WarmTable | None, key: bytes) -> Placed | None:
    hot = cache.hot.by_key.get(key)
    return hot.node if hot is not None else warm.place(key) if warm is not None else None


def find(cache: Cache, warm: WarmTable | None, prefix: str) -> Placed:
    """The node that an id means. Raises NotFoundError."""
    wanted = prefix.lower()
    try:
        beginning = bytes.fromhex(wanted[: len(wanted) // 2 * 2])
        int(wanted, 16)
    except ValueError:
        raise NotFoundError(f"no prefix {prefix!r}: ids are hexadecimal, see {typed('ls')}") from None
    found: Victims = {key: hot.node for key, hot in cache.hot.by_key.items() if key.hex().startswith(wanted)}
    if warm is not None:
        found |= {n.record.key: n for n in warm.find(beginning, 32) if n.record.key.hex().startswith(wanted)}
    if not found:
        raise NotFoundError(f"no prefix {prefix!r}; see {typed('ls')} for those that there are")
    if len(found) > 1:
        raise NotFoundError(
            f"prefix {prefix!r} means {len(found)} or more; give more of its {ID_CHARACTERS} characters"
        )
    [node] = found.values()
    return node


def _namespaces_of(cache: Cache, model: str) -> list[bytes]:
    found = [key for key, description in cache.namespaces.items() if is_model(description, model)]
    if not found:
        known = sorted({model_label(description) for description in cache.namespaces.values()})
        raise NotFoundError(f"nothing is stored of a model {model!r}; known: {', '.join(known) or 'none'}")
    return found


class _Unused:
    """Finds old nodes, from leaves upwards, a few at a time: first those in RAM, then all on disk in one pass."""

    def __init__(self, cache: Cache, moment: float) -> None:
        self._cache = cache
        self._moment = moment
        self._in_ram: Iterator[bytes] | None = None
        self._from = b""  # where the pass over the disk goes on
        self._climbing = b""  # the key at which a step left a way up unfinished

    def hot(self, warm: WarmTable | None, ends: float) -> tuple[Victims, bool]:
        """Those that are in RAM, the deepest first."""
        by_key = self._cache.hot.by_key
        if self._in_ram is None:
            self._in_ram = iter(sorted(by_key, key=lambda key: -by_key[key].node.end))
        found: Victims = {}
        for key in self._in_ram:
            hot = by_key.get(key)
            if hot is not None and key not in found:
                self._climb(warm, hot.node, found)
            if len(found) >= _STEP_NODES or time.perf_counter() > ends:
                return found, False
        return found, True

    def warm(self, warm: WarmTable | None, ends: float) -> tuple[Victims, bool]:
        """Those on disk."""
        found: Victims = {}
        if self._climbing:
            key, self._climbing = self._climbing, b""
            self._climb(warm, _place(self._cache, warm, key), found)
        if warm is None:
            return found, not self._climbing
        for key in warm.keys_from(self._from):
            self._from = key
            node_here = warm.place(key) if key not in found else None
            if node_here is not None:
                self._climb(warm, node_here, found)
            if len(found) >= _STEP_NODES or self._climbing or time.perf_counter() > ends:
                self._from = key + b"\0"
                return found, False
        return found, True

    def _climb(self, warm: WarmTable | None, node: Placed | None, found: Victims) -> None:
        """Add the node and those above it, as far as they are old and nothing else is below them."""
        cache = self._cache
        while node is not None and self._is_old(node):
            key = node.record.key
            if any(child.record.key not in found for child in _children(cache, warm, key)):
                return
            found[key] = node
            node = None if node.parent in cache.namespaces else _place(cache, warm, node.parent)
            if len(found) >= _STEP_NODES:
                self._climbing = node.record.key if node is not None else b""
                return

    def _is_old(self, node: Placed) -> bool:
        key = node.record.key
        hot = self._cache.hot.by_key.get(key)
        touch = self._cache.touched.get(key)
        last_use = max(
            node.record.last_use,
            hot.node.record.last_use if hot is not None else 0.0,
            touch.last_use if touch is not None else 0.0,
        )
        return last_use < self._moment

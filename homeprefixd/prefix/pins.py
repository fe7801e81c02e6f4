"""Pins: prefixes that somebody wants kept on disk, whatever they are worth.

A pin is a place in the tree, a parent's key and the tokens after it, not a node: where a longer node has taken the
place of the one that was pinned, it holds that one. What is above a pinned node stays because it has a child. Of a path
that is on disk in part, its last node there is held, or the last one from which can be gone on: a pin knows the keys of
its path, which never change. Pins are rows of a table of their own, so they survive a restart; they do not keep
anything in RAM.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..errors import HomeprefixdError, NotFoundError, RequestError, UnavailableError
from ..frames.store import Pin, PinInfo, Unpin
from ..program import typed
from . import resuming
from .blocks import BLOCK_TOKENS, KEY_BYTES, TokensBE, block_key, edges_of, swap, text_digest
from .disk import Disk, DiskFullError, DiskTroubleError
from .pin_reach import PinRow, PlaceOf, Point, end_of, held, holder, kept, keys_of, last, points, tails
from .purge import ID_CHARACTERS, find, model_label, tokens_of
from .tree import BLOCK_BYTES, NodeTable, Placed, Step

if TYPE_CHECKING:
    from .cache import Cache
    from .hot import HotNode
    from .warm_table import WarmTable

MAX_PINS = 1_000
"""More are refused: each costs a look into the tree whenever something is evicted."""

MAX_LABEL = 200
"""Characters."""

log = logging.getLogger(__name__)


Rows = dict[bytes, PinRow]
"""By tree key."""

_decode = msgspec.msgpack.Decoder(PinRow).decode


class _Wanted(NamedTuple):
    """What is to be pinned."""

    place: bytes
    start: int  # position of the first token of its place
    namespace: bytes
    asked: bytes  # as of PinRow
    own: int  # as of PinRow


class _Way(NamedTuple):
    """Nodes with which can be gone on from `end` tokens."""

    end: int
    missing: list[HotNode]  # those that are in RAM only, parents first
    keys: frozenset[bytes]  # of those that must stay meanwhile, but for what is above them


class Pins:
    """Those of a cache. Changed by the writer's thread only; `rows` may be read with the cache's lock."""

    def __init__(self, cache: Cache, disk: Disk | None, wall: Callable[[], float]) -> None:
        """`wall`: Unix time, s."""
        self._cache = cache
        self._disk = disk
        self._wall = wall
        self.rows: Rows = {}
        for place, value in disk.pin_rows() if disk is not None else ():
            try:
                self.rows[place] = _decode(value)
            except msgspec.DecodeError:
                log.warning("a pin cannot be read; it is left out")
        self.given_up = 0
        """Pinned nodes that went, since the start: from disk, as the budget could not be kept otherwise, or from RAM,
        without ever being on disk."""
        self._said = False  # that one went from RAM

    def live(self) -> Rows:
        """Those that have not expired."""
        now = self._wall()
        return {place: row for place, row in self.rows.items() if not row.expires or row.expires > now}

    def edges(self, tables: Sequence[NodeTable], place_of: PlaceOf) -> frozenset[bytes]:
        """Keys of the edges that are needed to go on from where pins hold. `place_of`: a node by its key."""
        return frozenset(
            edge.record.key
            for place, row in self.live().items()
            for point in held(tables, place_of, place, row, self._window(row.namespace))
            for edge in point.edges
        )

    def _window(self, namespace: bytes) -> int | None:
        """As of `resuming.find`."""
        edges = edges_of(self._cache.namespaces.get(namespace, {}))
        return edges.window if edges is not None else None

    def kept(self, tables: Sequence[NodeTable]) -> dict[bytes, list[tuple[int, PinRow]]]:
        """Keys of the nodes that pins hold: the tokens from the prompt's start that are pinned, and the pin."""
        found: dict[bytes, list[tuple[int, PinRow]]] = {}
        for place, row in self.live().items():
            node = holder(tables, place)
            if node is not None and node.record.start == row.start:
                found.setdefault(node.record.key, []).append((end_of(place, row), row))
        return found

    def left_memory(self, node: Placed) -> None:
        """A node went from RAM that is not on disk. With the cache's lock held."""
        now, place = self._wall(), node.tree_key
        if not any(place.startswith(one) and not 0 < row.expires <= now for one, row in self.rows.items()):
            return
        self.given_up += 1
        if not self._said:
            self._said = True
            log.warning(
                "a pinned prefix went from memory, and is not on disk: %s. %s says what of each pin is kept",
                self._reason(),
                typed("pin"),
            )

    def _reason(self) -> str:
        """Why what is pinned is not on disk."""
        if self._cache.warm_state != "ok":
            return f"the disk cannot be written: {self._cache.warm_reason}"
        if self._cache.spares_disk:
            return "as much was written today as `cache.daily_writes` allows"
        room = self._cache.room_for_blocks()
        return f"it does not fit into {room} beside what is pinned: make that larger, or unpin others"

    # -------------------------------------------------------------------------------------------------- writer

    def protected(self) -> frozenset[bytes]:
        """*Writer.* Keys of nodes on disk that must not be evicted: of each pin the last one of its path that is there,
        or from which can be gone on, and the edges for that.
        """
        if self._disk is None or not self.rows:
            return frozenset()
        stale = set(self._cache.usage.stale(self._cache.namespaces))
        found: set[bytes] = set()
        with self._disk.table() as warm:
            for place, row in self.live().items():
                if row.namespace not in stale:
                    for point in held([warm], warm.place, place, row, self._window(row.namespace)):
                        found.update((point.node.record.key, *(edge.record.key for edge in point.edges)))
        return frozenset(found)

    def expire(self) -> None:
        """*Writer.* Forget what has expired: then is as after an `unpin`."""
        expired = self.rows.keys() - self.live().keys()
        if expired:
            self._forget(expired)
            self._cache.unpinned()

    def ends(self) -> dict[bytes, list[bytes]]:
        """Keys of the nodes with which what is stored of pins ends, in any tier, and the places of those pins."""
        found: dict[bytes, list[bytes]] = {}
        with self._cache.view() as (tables, warm):
            for place, row in self.rows.items():
                node = last(tables, lambda key: _node(self._cache, warm, key), place, row)
                if node is not None:
                    found.setdefault(node.record.key, []).append(place)
        return found

    def purged(self, places: Container[bytes], namespaces: Container[bytes]) -> None:
        """*Writer.* Pins go of which the last node was purged, and all of `namespaces`."""
        self._forget(place for place, row in self.rows.items() if place in places or row.namespace in namespaces)

    def pin(self, wanted: Pin) -> list[PinInfo]:
        """*Writer.* Add a pin, or list all where none is named. Raises HomeprefixdError."""
        if not (wanted.tokens or wanted.prefix or wanted.request):
            return self.describe(self.live())
        if self._disk is None or self._disk.read_only:
            reason = self._cache.warm_reason or "it is open for reading only"
            raise UnavailableError(f"nothing can be pinned, as nothing is kept on disk: {reason}")
        if len(wanted.label) > MAX_LABEL or wanted.ttl < 0:
            raise RequestError(f"a pin's label has at most {MAX_LABEL} characters, its time to live is no less than 0")
        place, start, namespace, asked, own = self._find(wanted)
        if place not in self.rows and len(self.rows) >= MAX_PINS:
            raise RequestError(f"{MAX_PINS} prefixes are pinned already: unpin others first")
        if wanted.prefix and place in self.rows and self.rows[place].asked:
            asked, own = self.rows[place].asked, self.rows[place].own  # an id names that pin, not another prompt
        now = self._wall()
        with self._cache.view() as (tables, warm):
            above = _above(self._cache, warm, place)
            path = b"".join(node.record.key for node in above)
            has_edges = self._window(namespace) is not None
            points = tails(tables, [*(node.tree_key for node in above), place]) if has_edges else b""
        expires = now + wanted.ttl if wanted.ttl else 0.0
        row = PinRow(namespace, start, wanted.label, now, expires, path, asked, own if has_edges else 0, points)
        self._put(place, row)
        self.write({place: row})  # at once, so that the answer can say whether it fits
        made = self.describe({place: row})
        self._cache.wake()
        return made

    def write(self, rows: Rows) -> None:
        """*Writer.* Write what is in RAM only of what pins hold, and of what is needed to go on from it.

        Where states have edges and it does not fit, then of what comes before, until there is some to go on from.
        """
        for place, row in rows.items():
            with self._cache.view() as (tables, warm):
                ways = self._ways(place, row, tables, warm)
            for number, way in enumerate(ways):
                if number and self._reached(place, row) >= way.end:
                    break
                self._cache.write_path(way.missing, way.keys)

    def _reached(self, place: bytes, row: PinRow) -> int:
        """Tokens from which can be gone on with what is on disk."""
        with self._cache.view() as (_tables, warm):
            return max((point.end for point in self._points_on_disk(place, row, warm)), default=0)

    def _ways(self, place: bytes, row: PinRow, tables: Sequence[NodeTable], warm: WarmTable | None) -> list[_Way]:
        """Of what is stored in any tier: to the end and its own prompt's, then to each point before, the last first.

        None where all is on disk, if in another node than in RAM. With the lock held.
        """

        def place_of(key: bytes) -> Placed | None:
            return _node(self._cache, warm, key)

        window = self._window(row.namespace)
        if window is None and self._reached(place, row) == end_of(place, row):
            return []
        whole = held(tables, place_of, place, row, window)
        if not whole:
            return []
        ways = [self._way(whole)]
        if ways[0].missing and window is not None:
            reached = self._reached(place, row)
            for point in points(tables, place_of, place, row, window):
                if point.end <= reached:
                    break
                if point.end < whole[0].end:
                    ways.append(self._way([point]))
        return ways

    def _way(self, points: Sequence[Point]) -> _Way:
        by_key = self._cache.hot.by_key
        found: dict[HotNode, None] = {}
        keys = [key for point in points for key in (point.node.record.key, *(e.record.key for e in point.edges))]
        for key in keys:
            up: list[HotNode] = []
            at = by_key.get(key)
            while at is not None and not at.warm and at not in found:
                up.append(at)
                at = by_key.get(at.node.parent)
            found.update(dict.fromkeys(reversed(up)))
        return _Way(points[-1].end, list(found), frozenset(keys))

    def _points_on_disk(self, place: bytes, row: PinRow, warm: WarmTable | None) -> list[Point]:
        """As `held`."""
        return held([warm], warm.place, place, row, self._window(row.namespace)) if warm is not None else []

    def unpin(self, wanted: Unpin) -> list[PinInfo]:
        """*Writer.* Remove pins; returns them. Raises HomeprefixdError."""
        live = self.live()
        if wanted.all:
            chosen = set(live)
        elif wanted.label:
            chosen = {place for place, row in live.items() if row.label == wanted.label}
        else:
            chosen = self._named(wanted, live)
        if not chosen and not wanted.all:
            raise NotFoundError(f"nothing is pinned by that name; {typed('pin')} lists what is pinned")
        found = self.describe({place: row for place, row in live.items() if place in chosen})
        gone = [self._last_on_disk(place, live[place]) for place in chosen]
        for place in chosen:
            self._put(place, None)
        self._cache.unpinned(sum(map(self._bytes, gone)))
        self._cache.wake()
        return found

    def _last_on_disk(self, place: bytes, row: PinRow) -> Placed | None:
        with self._cache.view() as (_tables, warm):
            return last([warm], warm.place, place, row) if warm is not None else None

    def _bytes(self, node: Placed | None) -> int:
        """Of state, of a node on disk and all above it."""
        with self._cache.view() as (_tables, warm):
            found = 0
            while node is not None and warm is not None:
                found += node.record.size
                node = warm.place(node.parent)
            return found

    def describe(self, rows: Rows) -> list[PinInfo]:
        """For people, in the order in which they were made."""
        with self._cache.view() as (tables, warm):
            return [
                self._describe(place, row, tables, warm)
                for place, row in sorted(rows.items(), key=lambda item: item[1].created)
            ]

    def _describe(self, place: bytes, row: PinRow, tables: Sequence[NodeTable], warm: WarmTable | None) -> PinInfo:
        by_key, end = self._cache.hot.by_key, end_of(place, row)
        node = last(tables, lambda key: _node(self._cache, warm, key), place, row)
        there = kept(self._points_on_disk(place, row, warm), row)
        keys = [*keys_of(row.path), *([node.record.key] if node is not None else [])]
        in_ram = any(key in by_key for key in keys)
        on_disk = node is not None and warm is not None and warm.place(keys[0]) is not None  # the rest comes after it
        return PinInfo(
            node.record.key.hex()[:ID_CHARACTERS] if node is not None else "",
            model_label(self._cache.namespaces.get(row.namespace, {})),
            row.label,
            end,
            row.created,
            row.expires,
            node.record.preview if node is not None else "",
            [name for name, so in (("hot", in_ram), ("warm", on_disk)) if so],
            there,
            self._why_not(place, row, tables, warm) if there < end else "",
        )

    def _why_not(self, place: bytes, row: PinRow, tables: Sequence[NodeTable], warm: WarmTable | None) -> str:
        """Why not all of a pin is kept."""
        if last(tables, lambda key: _node(self._cache, warm, key), place, row) is None:
            return "nothing of it is stored any more"
        again = f"once there is room, send it again or {typed('warm')} it"
        ways = self._ways(place, row, tables, warm)
        if not ways or not ways[0].missing:
            return f"the rest is in memory no longer: {again}"
        waits = self._cache.warm_state == "ok" and any(hot.queued for hot in ways[0].missing)
        reason = "it waits to be written" if waits else self._reason()
        if ways[0].end < end_of(place, row):
            reason += f"; its end is in memory no longer: {again}"
        return reason

    def _find(self, wanted: Pin) -> _Wanted:
        """Raises NotFoundError."""
        if wanted.prefix:
            with self._cache.view() as (_tables, warm):
                node = find(self._cache, warm, wanted.prefix)
                namespace, tokens = node.record.namespace, swap(tokens_of(self._cache, warm, node))
            if self._window(namespace) is None:
                return _Wanted(node.tree_key, node.record.start, namespace, text_digest(namespace, tokens), 0)
        else:
            namespace, tokens = self._tokens(wanted)
        steps = self._stored(namespace, tokens, len(tokens) // 4)
        if not steps:
            raise NotFoundError(f"nothing of this prompt is stored: send it first, or {typed('warm')} it")
        own = self._stored(namespace, tokens, len(tokens) // 4 - 1)
        return _Wanted(
            _place(steps[-1]),
            steps[-1].node.record.start,
            namespace,
            text_digest(namespace, tokens),
            own[-1].node.record.start + own[-1].use if own else 0,
        )

    def _stored(self, namespace: bytes, tokens: bytes, limit: int) -> list[Step]:
        """Of the first `limit` tokens (u32 LE), up to the last point to go on from where states have edges."""
        with self._cache.view() as (tables, _warm):
            found = resuming.find(
                tables, namespace, TokensBE(swap(tokens)), limit=limit, exact=False, window=self._window(namespace)
            )
        return [step for step in found.steps if not step.node.is_edge]

    def _tokens(self, wanted: Pin | Unpin) -> tuple[bytes, bytes]:
        """Namespace and tokens (u32 LE) of a prompt. Raises NotFoundError."""
        return self.prompt_of(wanted.request) if wanted.request else (wanted.namespace, wanted.tokens)

    def prompt_of(self, request: str) -> tuple[bytes, bytes]:
        """Namespace and tokens (u32 LE) of a request that was looked up. Raises NotFoundError."""
        found = self._cache.recent.get(request)
        if found is None:
            raise NotFoundError(
                f"no request {request!r} is remembered (the last ones are, until the store starts again):"
                f" name the prefix by its id from {typed('ls')}, or by its prompt"
            )
        return found

    def _named(self, wanted: Unpin, live: Rows) -> set[bytes]:
        """Pins that were made for just what is named, not for what comes before or after it."""
        shown: Iterable[bytes] = ()
        if wanted.prefix:
            with self._cache.view() as (_tables, warm):
                node = find(self._cache, warm, wanted.prefix)
                namespace, tokens = node.record.namespace, swap(tokens_of(self._cache, warm, node))
            shown = self.ends().get(node.record.key, ())
        else:
            namespace, tokens = self._tokens(wanted)
        end, name = _end_place(namespace, tokens), text_digest(namespace, tokens)
        found = {place for place, row in live.items() if place == end or row.asked == name} or live.keys() & shown
        return found if found or wanted.prefix else _last_of_before(live, namespace, tokens)

    def _put(self, place: bytes, row: PinRow | None) -> None:
        """Raises UnavailableError."""
        if self._disk is None:
            return
        try:
            self._disk.put_pin(place, msgspec.msgpack.encode(row) if row is not None else None)
        except (DiskFullError, DiskTroubleError) as error:
            raise UnavailableError(f"the pins cannot be changed, as the disk cannot be written: {error}") from error
        with self._cache.lock:
            if row is None:
                self.rows.pop(place, None)
            else:
                self.rows[place] = row

    def _forget(self, places: Iterable[bytes]) -> None:
        for place in list(places):
            try:
                self._put(place, None)
            except HomeprefixdError as error:
                log.warning("%s", error.message)
                with self._cache.lock:
                    self.rows.pop(place, None)


def _place(step: Step) -> bytes:
    """Where the matching tokens of a step end."""
    return step.node.tree_key[: KEY_BYTES + 4 * step.use]


def _places(namespace: bytes, tokens: bytes) -> Iterator[bytes]:
    """Of the blocks of a prompt (u32 LE), whether they are stored or not."""
    parent = namespace
    for start in range(0, len(tokens), BLOCK_BYTES):
        part = tokens[start : start + BLOCK_BYTES]
        yield parent + swap(part)
        parent = block_key(parent, part)


def _end_place(namespace: bytes, tokens: bytes) -> bytes:
    """Where a prompt (u32 LE) ends: the place of its last block."""
    return deque(_places(namespace, tokens), 1)[0]


def _last_of_before(live: Rows, namespace: bytes, tokens: bytes) -> set[bytes]:
    """Of pins that do not say which prompt they were made for, as those of before, the one that can be this one's."""
    least = len(tokens) // 4 - BLOCK_TOKENS
    places = list(_places(namespace, tokens))
    found = {
        end_of(place, row): place
        for place, row in live.items()
        if not row.asked and end_of(place, row) >= least and any(whole.startswith(place) for whole in places)
    }
    return {found[max(found)]} if found else set()


def _node(cache: Cache, warm: WarmTable | None, key: bytes) -> Placed | None:
    hot = cache.hot.by_key.get(key)
    return hot.node if hot is not None else warm.place(key) if warm is not None else None


def _above(cache: Cache, warm: WarmTable | None, place: bytes) -> list[Placed]:
    """The nodes above a place, from the prompt's start."""
    found: list[Placed] = []
    at = _node(cache, warm, place[:KEY_BYTES])
    while at is not None:
        found.append(at)
        at = _node(cache, warm, at.parent)
    return found[::-1]

"""Pins: prefixes that somebody wants kept on disk, whatever they are worth.

A pin is a place in the tree, a parent's key and the tokens after it, not a node: where a longer node has taken the
place of the one that was pinned, it holds that one. What is above a pinned node stays because it has a child. Of a path
that is on disk in part, its last node there is held: a pin knows the keys of its path, which never change. Pins are
rows of a table of their own, so they survive a restart; they do not keep anything in RAM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from ..errors import HomeprefixdError, NotFoundError, RequestError, UnavailableError
from ..frames.store import Pin, PinInfo, Unpin
from ..program import typed
from . import resuming
from .blocks import KEY_BYTES, TokensBE, block_key, edges_of, swap
from .disk import Disk, DiskFullError, DiskTroubleError
from .purge import ID_CHARACTERS, find, model_label, tokens_of
from .resuming import edge_of
from .tree import BLOCK_BYTES, NodeTable, Placed, Step, match

if TYPE_CHECKING:
    from .cache import Cache
    from .hot import HotNode
    from .warm_table import WarmTable

MAX_PINS = 1_000
"""More are refused: each costs a look into the tree whenever something is evicted."""

MAX_LABEL = 200
"""Characters."""

log = logging.getLogger(__name__)


class PinRow(msgspec.Struct, array_like=True, frozen=True):
    """What is stored of a pin, under its place. A field may be added at the end."""

    namespace: bytes
    start: int  # position of the first token of its place
    label: str
    created: float  # Unix time, s
    expires: float  # Unix time, s; 0: never
    path: bytes = (
        b""  # keys of the nodes above its place, from the prompt's start; rows of before have none, or the last
    )


Rows = dict[bytes, PinRow]
"""By tree key."""

_decode = msgspec.msgpack.Decoder(PinRow).decode


def holder(tables: Sequence[NodeTable], place: bytes) -> Placed | None:
    """The node that holds a place's tokens: the one that stands there, or the first longer one."""
    for table in tables:
        record = table.get(place)
        if record is not None:
            return Placed(place, record)
    for table in tables:
        after = table.at_or_after(place)
        if after is not None and after.tree_key.startswith(place):
            return after
    return None


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

    def edges(
        self,
        tables: Sequence[NodeTable],
        place_of: Callable[[bytes], Placed | None],
        without: Container[bytes] = (),
    ) -> frozenset[bytes]:
        """Keys of the edges that are needed to go on from the ends of pins, but for those in namespaces `without`.

        `place_of`: a node by its key.
        """
        found: set[bytes] = set()
        for place, row in self.live().items():
            if row.namespace not in without:
                found.update(self._edges_of(place, row, tables, place_of))
        return frozenset(found)

    def _edges_of(
        self, place: bytes, row: PinRow, tables: Sequence[NodeTable], place_of: Callable[[bytes], Placed | None]
    ) -> list[bytes]:
        """Those of one pin, the last first."""
        found: list[bytes] = []
        needed = edges_of(self._cache.namespaces.get(row.namespace, {}))
        node = holder(tables, place) if needed is not None else None
        while needed is not None and node is not None:
            edge = edge_of(tables, node.record.key)
            if edge is not None:
                found.append(edge.record.key)
            if node.record.start <= _end(place, row) - max(1, needed.window):
                break
            node = place_of(node.parent)
        return found

    def kept(self, tables: Sequence[NodeTable]) -> dict[bytes, list[tuple[int, PinRow]]]:
        """Keys of the nodes that pins hold: the tokens from the prompt's start that are pinned, and the pin."""
        found: dict[bytes, list[tuple[int, PinRow]]] = {}
        for place, row in self.live().items():
            node = holder(tables, place)
            if node is not None and node.record.start == row.start:
                found.setdefault(node.record.key, []).append((_end(place, row), row))
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
        """*Writer.* Keys of nodes on disk that must not be evicted: of each pin the last one of its path that is there.

        Forgets what has expired.
        """
        if self._disk is None or not self.rows:
            return frozenset()
        self._forget(self.rows.keys() - self.live().keys())
        stale = set(self._cache.usage.stale(self._cache.namespaces))
        with self._disk.table() as warm:
            edges = self.edges([warm], warm.place, stale)
            rows = [(place, row) for place, row in self.rows.items() if row.namespace not in stale]
            last = [_last([warm], warm.place, place, row) for place, row in rows]
        return edges.union(node.record.key for node in last if node is not None)

    def ends(self) -> dict[bytes, list[bytes]]:
        """Keys of the nodes with which what is stored of pins ends, in any tier, and the places of those pins."""
        found: dict[bytes, list[bytes]] = {}
        with self._cache.view() as (tables, warm):
            for place, row in self.rows.items():
                node = _last(tables, lambda key: _node(self._cache, warm, key), place, row)
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
        place, start, namespace = self._find(wanted)
        if place not in self.rows and len(self.rows) >= MAX_PINS:
            raise RequestError(f"{MAX_PINS} prefixes are pinned already: unpin others first")
        now = self._wall()
        with self._cache.view() as (_tables, warm):
            path = b"".join(_above(self._cache, warm, place))
        row = PinRow(namespace, start, wanted.label, now, now + wanted.ttl if wanted.ttl else 0.0, path)
        self._put(place, row)
        self._cache.write_path(self.unwritten({place: row}))  # at once, so that the answer can say whether it fits
        made = self.describe({place: row})
        self._cache.wake()
        return made

    def unwritten(self, rows: Rows) -> list[HotNode]:
        """What is in RAM only of what pins hold, and of what is needed to go on from it, parents first."""
        found: dict[HotNode, None] = {}
        with self._cache.view() as (tables, warm):
            by_key = self._cache.hot.by_key
            for place, row in rows.items():
                node = holder(tables, place)
                ends: list[bytes] = [node.record.key] if node is not None and node.record.start == row.start else []
                ends += self._edges_of(place, row, tables, lambda key: _node(self._cache, warm, key))
                for key in ends:
                    way: list[HotNode] = []
                    at = by_key.get(key)
                    while at is not None and not at.warm and at not in found:
                        way.append(at)
                        at = by_key.get(at.node.parent)
                    found.update(dict.fromkeys(reversed(way)))
        return list(found)

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
        self._cache.requeue(sum(map(self._bytes, gone)))  # another may fit now
        self._cache.wake()
        return found

    def _last_on_disk(self, place: bytes, row: PinRow) -> Placed | None:
        with self._cache.view() as (_tables, warm):
            return _last([warm], warm.place, place, row) if warm is not None else None

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
        found = []
        with self._cache.view() as (tables, warm):
            for place, row in sorted(rows.items(), key=lambda item: item[1].created):
                node = shown = holder(tables, place)
                tiers: list[str] = []
                kept, reason = 0, "nothing of it is stored any more"
                if node is not None:
                    hot = self._cache.hot.by_key.get(node.record.key)
                    stored = warm is not None and warm.get(node.tree_key) is not None
                    tiers = [name for name, there in (("hot", hot is not None), ("warm", stored)) if there]
                    waits = hot is not None and hot.queued and self._cache.warm_state == "ok"
                    reason = "it waits to be written" if waits else self._reason()
                last = _last([warm], warm.place, place, row) if warm is not None else None
                if last is not None:
                    kept = min(_end(place, row), last.end)
                    if node is None:
                        shown, tiers = last, ["warm"]
                        reason = (
                            f"the rest is in memory no longer: once there is room, send it again or {typed('warm')} it"
                        )
                if kept == _end(place, row):
                    reason = ""
                found.append(
                    PinInfo(
                        shown.record.key.hex()[:ID_CHARACTERS] if shown is not None else "",
                        model_label(self._cache.namespaces.get(row.namespace, {})),
                        row.label,
                        _end(place, row),
                        row.created,
                        row.expires,
                        shown.record.preview if shown is not None else "",
                        tiers,
                        kept,
                        reason,
                    )
                )
        return found

    def _find(self, wanted: Pin | Unpin) -> tuple[bytes, int, bytes]:
        """Place, position of its first token, namespace. Raises NotFoundError."""
        if wanted.prefix:
            with self._cache.view() as (_tables, warm):
                node = find(self._cache, warm, wanted.prefix)
                namespace, tokens = node.record.namespace, swap(tokens_of(self._cache, warm, node))
            if edges_of(self._cache.namespaces.get(namespace, {})) is None:
                return node.tree_key, node.record.start, namespace
        else:
            namespace, tokens = self._tokens(wanted)
        edges = edges_of(self._cache.namespaces.get(namespace, {}))
        window = edges.window if edges is not None else None  # where states have edges: the last point to go on from
        with self._cache.view() as (tables, _warm):
            found = resuming.find(
                tables, namespace, TokensBE(swap(tokens)), limit=len(tokens) // 4, exact=False, window=window
            )
        steps = [step for step in found.steps if not step.node.is_edge]
        if not steps:
            raise NotFoundError(f"nothing of this prompt is stored: send it first, or {typed('warm')} it")
        return _place(steps[-1]), steps[-1].node.record.start, namespace

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
        """Pins that lie on the path to what is named, or at it, or of which no more is stored than that."""
        if wanted.prefix:
            with self._cache.view() as (tables, warm):
                node = find(self._cache, warm, wanted.prefix)
                held = live.keys() & self.ends().get(node.record.key, ())
                if held:
                    return held
                return live.keys() & _path(self._cache, node)
        namespace, tokens = self._tokens(wanted)
        chosen = set()
        with self._cache.view() as (tables, _warm):
            steps = match(tables, namespace, TokensBE(swap(tokens)), limit=len(tokens) // 4)
        ways = [_place(step) for step in steps], _places(namespace, tokens)  # what is stored of it, and all of it
        for place in live:
            # where states have edges, a point to go on from may lie within a block of the path
            within = edges_of(self._cache.namespaces.get(live[place].namespace, {})) is not None
            if any(
                whole == place or (whole.startswith(place) and (within or number == len(places) - 1))
                for places in ways
                for number, whole in enumerate(places)
            ):
                chosen.add(place)
        return chosen

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


def _end(place: bytes, row: PinRow) -> int:
    """Tokens from the prompt's start to a pin's end."""
    return row.start + (len(place) - KEY_BYTES) // 4


def _place(step: Step) -> bytes:
    """Where the matching tokens of a step end."""
    return step.node.tree_key[: KEY_BYTES + 4 * step.use]


def _places(namespace: bytes, tokens: bytes) -> list[bytes]:
    """Of the blocks of a prompt (u32 LE), whether they are stored or not."""
    found, parent = [], namespace
    for start in range(0, len(tokens), BLOCK_BYTES):
        part = tokens[start : start + BLOCK_BYTES]
        found.append(parent + swap(part))
        parent = block_key(parent, part)
    return found


def _last(
    tables: Sequence[NodeTable], place_of: Callable[[bytes], Placed | None], place: bytes, row: PinRow
) -> Placed | None:
    """The last node of a pin's path that is there; None if there is none. `place_of`: a node by its key."""
    node = holder(tables, place)
    if node is not None and node.record.start == row.start:
        return node
    path = row.path or place[:KEY_BYTES]
    found, low, high = None, 0, len(path) // KEY_BYTES
    while low < high:  # a node is there only where its parent is
        middle = (low + high) // 2
        node = place_of(path[middle * KEY_BYTES : (middle + 1) * KEY_BYTES])
        if node is not None:
            found, low = node, middle + 1
        else:
            high = middle
    return found


def _node(cache: Cache, warm: WarmTable | None, key: bytes) -> Placed | None:
    hot = cache.hot.by_key.get(key)
    return hot.node if hot is not None else warm.place(key) if warm is not None else None


def _above(cache: Cache, warm: WarmTable | None, place: bytes) -> list[bytes]:
    """Keys of the nodes above a place, from the prompt's start."""
    found: list[bytes] = []
    at = _node(cache, warm, place[:KEY_BYTES])
    while at is not None:
        found.append(at.record.key)
        at = _node(cache, warm, at.parent)
    return found[::-1]


def _path(cache: Cache, node: Placed) -> set[bytes]:
    """Tree keys of a node and of all above it."""
    found = set[bytes]()
    at: Placed | None = node
    with cache.view() as (_tables, warm):
        while at is not None:
            found.add(at.tree_key)
            at = _node(cache, warm, at.parent)
    return found

"""Pins: prefixes that somebody wants kept on disk, whatever they are worth.

A pin is a place in the tree, a parent's key and the tokens after it, not a node: where a longer node has taken the
place of the one that was pinned, it holds that one. What is above a pinned node stays because it has a child. Pins are
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
from .blocks import KEY_BYTES, TokensBE, edges_of, swap
from .disk import Disk, DiskFullError, DiskTroubleError
from .purge import ID_CHARACTERS, find, model_label, tokens_of
from .resuming import edge_of
from .tree import NodeTable, Placed, Step, match

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
    part: bytes = b""  # key of the last node of its path that was on disk, where that was not its own


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
            needed = None
            if row.namespace not in without:
                needed = edges_of(self._cache.namespaces.get(row.namespace, {}))
            end = _end(place, row)
            node = holder(tables, place) if needed is not None else None
            while needed is not None and node is not None:
                edge = edge_of(tables, node.record.key)
                if edge is not None:
                    found.add(edge.record.key)
                if node.record.start <= end - max(1, needed.window):
                    break
                node = place_of(node.parent)
        return frozenset(found)

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
        return "it does not fit into `cache.warm` (or a share of it) beside what is pinned: raise that, or unpin others"

    # -------------------------------------------------------------------------------------------------- writer

    def protected(self) -> frozenset[bytes]:
        """*Writer.* Keys of nodes on disk that must not be evicted. Forgets what has expired."""
        if self._disk is None or not self.rows:
            return frozenset()
        self._forget(self.rows.keys() - self.live().keys())
        stale = set(self._cache.usage.stale(self._cache.namespaces))
        with self._disk.table() as warm:
            kept = self.kept([warm])
            edges = self.edges([warm], warm.place, stale)
            whole = {row for pins in kept.values() for _end, row in pins}
            parts = {
                place: self._part(place, row, warm)
                for place, row in self.rows.items()
                if row not in whole and row.namespace not in stale
            }
        nodes = {key for key, pins in kept.items() if any(row.namespace not in stale for _end, row in pins)}
        for place, part in parts.items():
            if part != self.rows[place].part:
                self._note_part(place, part)
        return edges.union(nodes, filter(None, parts.values()))

    def _part(self, place: bytes, row: PinRow, warm: WarmTable) -> bytes:
        """Key of the last node on disk of a pin's path, as far as it is known; b"" if there is none.

        What is above is found by way of what is in RAM, or was noted then.
        """
        with self._cache.lock:
            node = holder([self._cache.hot.table], place)
        key = node.record.key if node is not None else place[:KEY_BYTES]
        while (found := warm.place(key)) is None:
            with self._cache.lock:
                hot = self._cache.hot.by_key.get(key)
            if hot is None:
                return row.part if row.part and warm.place(row.part) is not None else b""
            key = hot.node.parent
        return found.record.key

    def _note_part(self, place: bytes, part: bytes) -> None:
        try:
            self._put(place, msgspec.structs.replace(self.rows[place], part=part))
        except HomeprefixdError as error:
            log.debug("%s", error.message)

    def forget_missing(self) -> None:
        """*Writer.* Pins of what is in no tier go: it was purged."""
        if not self.rows:
            return
        with self._cache.view() as (tables, _warm):
            gone = [place for place in self.rows if holder(tables, place) is None]
        self._forget(gone)

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
        row = PinRow(namespace, start, wanted.label, now, now + wanted.ttl if wanted.ttl else 0.0)
        self._put(place, row)
        self._cache.write_path(self._unwritten(place))  # at once, so that the answer can say whether it fits
        made = self.describe({place: row})
        self._cache.requeue()  # what else is in RAM only
        self._cache.wake()
        return made

    def _unwritten(self, place: bytes) -> list[HotNode]:
        """What is in RAM only of the path to a place's node, parents first."""
        found: list[HotNode] = []
        with self._cache.view() as (tables, _warm):
            node = holder(tables, place)
            at = self._cache.hot.by_key.get(node.record.key) if node is not None else None
            while at is not None and not at.warm:
                found.append(at)
                at = self._cache.hot.by_key.get(at.node.parent)
        return found[::-1]

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
        for place in chosen:
            self._put(place, None)
        self._cache.requeue()  # another pin may fit now
        self._cache.wake()
        return found

    def describe(self, rows: Rows) -> list[PinInfo]:
        """For people, in the order in which they were made."""
        found = []
        with self._cache.view() as (tables, warm):
            for place, row in sorted(rows.items(), key=lambda item: item[1].created):
                node = holder(tables, place)
                tiers: list[str] = []
                kept, reason = 0, "nothing of it is stored any more"
                if node is not None:
                    hot = self._cache.hot.by_key.get(node.record.key)
                    stored = warm is not None and warm.get(node.tree_key) is not None
                    tiers = [name for name, there in (("hot", hot is not None), ("warm", stored)) if there]
                    kept = min(_end(place, row), self._on_disk(node, warm))
                    waits = hot is not None and hot.queued and self._cache.warm_state == "ok"
                    reason = "it waits to be written" if waits else self._reason()
                part = warm.place(row.part) if node is None and row.part and warm is not None else None
                if part is not None:
                    kept, reason = min(_end(place, row), part.end), self._reason()
                if kept == _end(place, row):
                    reason = ""
                found.append(
                    PinInfo(
                        node.record.key.hex()[:ID_CHARACTERS] if node is not None else "",
                        model_label(self._cache.namespaces.get(row.namespace, {})),
                        row.label,
                        _end(place, row),
                        row.created,
                        row.expires,
                        node.record.preview if node is not None else "",
                        tiers,
                        kept,
                        reason,
                    )
                )
        return found

    def _on_disk(self, node: Placed, warm: WarmTable | None) -> int:
        """Tokens from the prompt's start to where of a node's path nothing more is on disk."""
        at: Placed | None = node if warm is not None else None
        while at is not None and warm is not None and warm.get(at.tree_key) is None:
            above = self._cache.hot.by_key.get(at.parent)
            at = above.node if above is not None else warm.place(at.parent)
        return at.end if at is not None else 0

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
        """Pins that lie on the path to what is named, or at it."""
        if wanted.prefix:
            with self._cache.view() as (tables, warm):
                node = find(self._cache, warm, wanted.prefix)
                held = {place for place in live if (at := holder(tables, place)) and at.record.key == node.record.key}
                if held:
                    return held
                return live.keys() & _path(self._cache, node)
        namespace, tokens = self._tokens(wanted)
        chosen = set()
        with self._cache.view() as (tables, _warm):
            steps = match(tables, namespace, TokensBE(swap(tokens)), limit=len(tokens) // 4)
        places = [_place(step) for step in steps]
        for place in live:
            # where states have edges, a point to go on from may lie within a block of the path
            within = edges_of(self._cache.namespaces.get(live[place].namespace, {})) is not None
            if any(
                whole == place or (whole.startswith(place) and (within or number == len(places) - 1))
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


def _path(cache: Cache, node: Placed) -> set[bytes]:
    """Tree keys of a node and of all above it."""
    found = set[bytes]()
    at: Placed | None = node
    with cache.view() as (_tables, warm):
        while at is not None:
            found.add(at.tree_key)
            hot = cache.hot.by_key.get(at.parent)
            at = hot.node if hot is not None else warm.place(at.parent) if warm is not None else None
    return found

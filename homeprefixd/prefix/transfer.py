"""A prefix as a file: from one store to another one that computes the same.

The file: a magic word, then records, each with its length and checksum: the header (the namespace's description), for
each node its place and what is known of it, followed by its payload in the pieces of `codec.py` (with checksums of
their own, over the node's key), and an end. A file that was cut, or changed in any bit, is refused where that shows;
what came before is whole and stays. Importing goes the way of a worker: slots are reserved, filled and committed.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import msgspec
import xxhash

from ..errors import HomeprefixdError, NotFoundError, RequestError, UnavailableError
from ..frames.store import NewNode
from ..program import typed
from . import resuming
from .arena import pages
from .blocks import (
    BLOCK_TOKENS,
    EDGE,
    FORMAT_VERSION,
    MODEL_NAME,
    Namespace,
    TokensBE,
    block_key,
    edges_of,
    namespace_of,
    swap,
)
from .cache import BlockLostError, Cache
from .codec import PIECE, DamagedError, Decoder, Encoder, piece_count
from .hot import HotNode
from .purge import find, tokens_of
from .registry import differences
from .session import Session

MAGIC = b"homeprefixd prefix 1\n"
_RECORD = struct.Struct("<IQ")  # length, xxh3_64
_LONGEST = 1 << 20  # bytes of a record
_LARGEST = 1 << 40  # bytes of a node's state
_DEAREST = 1e6  # seconds of prefill of a node
_LONGEST_KIND = 32  # characters
_FLUSH = 16 << 20  # bytes that are imported before they are written

log = logging.getLogger(__name__)


class Header(msgspec.Struct):
    """First record."""

    format: int
    description: dict[str, Any]
    nodes: int


class NodeRecord(msgspec.Struct):
    """Before the pieces of each node, parents before children."""

    tokens: bytes  # u32 LE
    start: int
    size: int
    grid: bool
    kind: str
    cost: float
    preview: str
    holds_edge: bool = False  # the next one is its edge


class Transferred(NamedTuple):
    """What went: nodes, tokens, bytes of state. Of an import: how many nodes were there already, how many of its tokens
    are on disk, and why not all."""

    nodes: int
    tokens: int
    bytes: int
    known: int = 0
    kept: int = 0
    not_kept: str = ""


class TransferError(RequestError):
    """The file is not one, or is damaged, or of another namespace. The message says so."""


# ------------------------------------------------------------------------------------------------------- export


def export(
    cache: Cache, session: Session, file: BinaryIO, *, namespace: bytes, tokens: bytes, prefix: str
) -> Transferred:
    """Write the path to a prefix. It is named by its id, or by its tokens (u32 LE).

    Raises NotFoundError where nothing is stored of it, UnavailableError where a block cannot be read, OSError.
    """
    if prefix:
        with cache.view() as (_tables, warm):
            node = find(cache, warm, prefix)
            namespace, tokens = node.record.namespace, swap(tokens_of(cache, warm, node))
    edges = edges_of(cache.namespaces.get(namespace, {}))
    lease = session.lookup(namespace, tokens, limit=len(tokens) // 4)
    try:
        if not lease.plan:
            raise NotFoundError(f"nothing of this prompt is stored: send it first, or {typed('warm')} it")
        with cache.view() as (tables, _warm):
            window = edges.window if edges is not None else None
            wanted = TokensBE(swap(tokens))
            steps = resuming.find(tables, namespace, wanted, limit=len(tokens) // 4, exact=False, window=window).steps
        if [step.node.record.key for step in steps] != [node.key for node in lease.plan]:
            raise UnavailableError("the prefix has changed meanwhile: try again")
        file.write(MAGIC)
        _put(file, Header(FORMAT_VERSION, dict(cache.namespaces[namespace]), len(steps)))
        decoder, encoder, total = Decoder(), Encoder(1), 0
        for index, (planned, step) in enumerate(zip(lease.plan, steps, strict=True)):
            record = step.node.record
            if planned.offset < 0:  # past RAM, where it would take the place of what is in use
                state = decoder.scratch(record.size)
                cache.read(step.node.tree_key, state, decoder)
            else:
                state = cache.state(lease.held[index], decoder.scratch)
            _put(
                file,
                NodeRecord(
                    swap(step.node.tree_key[32:]),
                    record.start,
                    record.size,
                    record.grid,
                    record.kind,
                    record.cost,
                    record.preview,
                    record.holds_edge,
                ),
            )
            for number in range(piece_count(record.size)):
                piece = encoder.encode(record.key, number, state[number * PIECE : (number + 1) * PIECE])
                file.write(struct.pack("<I", len(piece)))
                file.write(piece)
            total += record.size
        _put(file, Header(FORMAT_VERSION, {}, len(steps)))
        file.flush()
        end = max(step.node.end for step in steps if not step.node.is_edge)
        return Transferred(len(steps), end, total)
    except BlockLostError as error:
        raise UnavailableError(f"a block cannot be read ({error}): try again") from error
    finally:
        session.release(lease)


def _put(file: BinaryIO, record: msgspec.Struct) -> None:
    body = msgspec.msgpack.encode(record)
    file.write(_RECORD.pack(len(body), xxhash.xxh3_64_intdigest(body)))
    file.write(body)


# ------------------------------------------------------------------------------------------------------- import


def import_(
    cache: Cache, session: Session, file: BinaryIO, write_path: Callable[[Sequence[HotNode]], None]
) -> Transferred:
    """Take in what `export` wrote. `write_path` writes nodes, parents first, and returns once those are that fit.

    What there is no room for is read and checked, too. Raises TransferError, UnavailableError where there is no room in
    memory for any of it, OSError.
    """
    begin = file.read(len(MAGIC))
    if not begin:
        raise TransferError("it is empty")
    if begin != MAGIC:
        cut = MAGIC.startswith(begin)
        raise TransferError("it is cut short" if cut else f"this is no prefix that {typed('export')} has written")
    header = _get(file, Header)
    if header.format != FORMAT_VERSION:
        raise TransferError(f"its format is {header.format}, this version has {FORMAT_VERSION}")
    if header.nodes < 1:
        raise TransferError(f"it says that it has {header.nodes} blocks")
    namespace = _check_namespace(cache, header.description)
    has_edges = edges_of(header.description) is not None
    decoder, taking = Decoder(), _Taking(cache, session, namespace, write_path)
    parent, at, total = bytes(namespace), 0, 0
    path: list[bytes] = []  # tokens
    for number in range(header.nodes):
        record = _next_node(file, number, header.nodes)
        is_edge = record.tokens == EDGE
        count = 0 if is_edge else len(record.tokens) // 4
        _check_place(record, at, count, is_edge=is_edge, has_edges=has_edges)
        if not is_edge and (size := _size_of(cache, namespace, count)) not in (None, record.size):
            raise TransferError(f"one of its blocks has {record.size} bytes, where {count} tokens have {size} here")
        key = block_key(parent, record.tokens)
        offset = taking.reserve(record.size, parent)
        try:
            state = cache.arena.view(offset, record.size) if offset is not None else None
            _read_state(file, decoder, key, record.size, state)
        except BaseException:
            if offset is not None:
                session.abandon([offset])
            raise
        if offset is not None:
            taking.commit(key, record, parent, offset)
        parent, at, total = parent if is_edge else key, at + count, total + record.size
        if not is_edge:
            path.append(record.tokens)
    if _get(file, Header).nodes != header.nodes:
        raise TransferError("it has no end")
    taking.flush()  # at once, so that the answer can say whether it fits
    if file.read(1):
        raise TransferError("something follows its end: each prefix is a file of its own; this one was imported")
    kept = _on_disk(cache, namespace, b"".join(path))
    return Transferred(header.nodes, at, total, taking.known, kept, taking.not_kept() if kept < at else "")


class _Taking:
    """The blocks of one import on their way into a cache, in their order: as many as there is room for.

    Once there is none for one of them, none that follow are taken in: they would be of no use without it.
    """

    def __init__(
        self, cache: Cache, session: Session, namespace: bytes, write_path: Callable[[Sequence[HotNode]], None]
    ) -> None:
        self._cache = cache
        self._session = session
        self._namespace = namespace
        self._write_path = write_path
        self._taken: list[bytes] = []  # keys
        self._unflushed = 0  # bytes
        self._refused = ""  # why what is in RAM could not be written
        self._ended = ""  # why no more is taken in
        self.known = 0
        """Blocks that were there already."""

    def reserve(self, size: int, parent: bytes) -> int | None:
        """A slot for the next block; None if no more is taken in. Raises UnavailableError if there is none at all."""
        cache = self._cache
        if self._ended:
            return None
        full = cache.arena.used + pages(size) > cache.arena.allowance
        if self._unflushed and (full or self._unflushed + size > min(_FLUSH, cache.queue.limit // 2)):
            self.flush()  # what goes for want of room is the end of the path, to which this one is to be added
        offsets = self._session.reserve([size], after=parent)
        if offsets:
            return offsets[0]
        if not self._taken:
            raise UnavailableError("there is no room in memory for it now")
        self._ended = "there was no room in memory for the rest of it"
        return None

    def commit(self, key: bytes, record: NodeRecord, parent: bytes, offset: int) -> None:
        """Its slot is filled."""
        new = NewNode(
            parent,
            record.tokens,
            record.start,
            offset,
            record.size,
            record.grid,
            record.cost,
            record.kind,
            record.preview,
            record.holds_edge,
        )
        done = self._session.commit(self._namespace, [new])
        if done.refused:
            room = self._cache.room_for_blocks()
            self._ended = f"what was imported of it had to make room in {room} for something else, or was purged"
            return
        self.known += done.known
        self._unflushed += record.size
        self._taken.append(key)

    def flush(self) -> None:
        """Write what is in RAM only."""
        self._unflushed = 0
        self._write_path(self._unwritten())
        self._refused = _why_not_kept(self._cache) if self._unwritten() else ""

    def not_kept(self) -> str:
        """Why not all of it is on disk."""
        return self._refused or self._ended or _why_not_kept(self._cache)

    def _unwritten(self) -> list[HotNode]:
        """Those that are in RAM only, in their order."""
        with self._cache.lock:
            found = (self._cache.hot.by_key.get(key) for key in self._taken)
            return [hot for hot in found if hot is not None and not hot.warm]


def _read_state(file: BinaryIO, decoder: Decoder, key: bytes, size: int, out: memoryview | None) -> None:
    """The pieces of a node of `size` bytes, checked, into `out`, or nowhere. Raises TransferError."""
    for number in range(piece_count(size)):
        (length,) = struct.unpack("<I", _read(file, 4))
        if length > 2 * PIECE:
            raise TransferError("it is damaged: a piece is too long")
        piece, begin = memoryview(_read(file, length)), number * PIECE
        end = min(size, begin + PIECE)
        try:
            decoder.decode(key, number, piece, decoder.scratch(end - begin) if out is None else out[begin:end])
        except DamagedError as error:
            raise TransferError(f"it is damaged: {error}") from error


def _next_node(file: BinaryIO, number: int, nodes: int) -> NodeRecord:
    """Raises TransferError; also where the end comes before all of them were there."""
    body = _body(file)
    try:
        return msgspec.msgpack.decode(body, type=NodeRecord)
    except msgspec.MsgspecError as error:
        try:
            msgspec.msgpack.decode(body, type=Header)
        except msgspec.MsgspecError:
            raise TransferError(f"it is damaged: {error}") from error
        raise TransferError(f"it ends after {number} blocks, and says that it has {nodes}") from error


def _check_place(record: NodeRecord, at: int, count: int, *, is_edge: bool, has_edges: bool) -> None:
    """Whether a node of `count` tokens can be what comes after `at` tokens. Raises TransferError."""
    if is_edge and not has_edges:
        raise TransferError("it has an edge, which states of this model have not")
    if is_edge and (at == 0 or record.start != at):
        raise TransferError("an edge does not belong to the block before it")
    if not is_edge and (len(record.tokens) % 4 or not 0 < count <= BLOCK_TOKENS or record.start != at):
        raise TransferError("its blocks do not follow each other")
    if not is_edge and at % BLOCK_TOKENS:
        raise TransferError(f"one of its blocks has fewer than {BLOCK_TOKENS} tokens and is not the last")
    if not 0 < record.size <= _LARGEST:
        raise TransferError(f"one of its blocks has {record.size} bytes")
    if not 0 <= record.cost <= _DEAREST:
        raise TransferError(f"one of its blocks took {record.cost} seconds to compute")
    if len(record.kind) > _LONGEST_KIND:  # it is stored with each node, whose row must stay small
        raise TransferError(f"one of its blocks has a kind of {len(record.kind)} characters")


def _size_of(cache: Cache, namespace: bytes, count: int) -> int | None:
    """Bytes of the state of `count` tokens; None where it is not known how states of this model are laid out."""
    layout = cache.layouts.get(namespace)
    return layout.of(count).size(1) if layout is not None else None


def _on_disk(cache: Cache, namespace: bytes, tokens: bytes) -> int:
    """How many of `tokens` (u32 LE) could be gone on from if there were nothing in RAM."""
    edges = edges_of(cache.namespaces.get(namespace, {}))
    with cache.view() as (_tables, warm):
        if warm is None:
            return 0
        steps = resuming.find(
            [warm],
            namespace,
            TokensBE(swap(tokens)),
            limit=len(tokens) // 4,
            exact=False,
            window=edges.window if edges is not None else None,
        ).steps
    return max((step.node.record.start + step.use for step in steps if not step.node.is_edge), default=0)


def _why_not_kept(cache: Cache) -> str:
    if cache.disk is None or cache.disk.read_only:
        return f"nothing is kept on disk: {cache.warm_reason or 'it is open for reading only'}"
    if cache.warm_state != "ok":
        return f"the disk cannot be written: {cache.warm_reason}"
    if cache.spares_disk:
        return "as much was written today as `cache.daily_writes` allows"
    return f"it does not fit into {cache.room_for_blocks()} beside what must stay there"


def _check_namespace(cache: Cache, description: Mapping[str, Any]) -> Namespace:
    """The namespace, if a model that runs here uses it. Raises TransferError, naming what differs."""
    try:
        namespace = namespace_of(description)
    except (TypeError, ValueError) as error:
        raise TransferError("what it says of its model cannot be read") from error
    was_used = namespace in cache.namespaces and namespace not in cache.usage.stale(cache.namespaces)
    if cache.usage.is_open(namespace) or (cache.usage.is_configured and was_used):  # such as an API key's own
        return namespace
    here = cache.usage.descriptions()
    if not here and not cache.usage.is_configured:  # no daemon runs: what it stored before is what it can use
        if namespace in cache.namespaces:
            return namespace
        here = list(cache.namespaces.values())
    if not here:
        raise UnavailableError("no model is loaded whose prefixes could be imported: try again soon")
    nearest = min((differences(description, other) for other in here), key=len)
    name = description.get(MODEL_NAME, "another model")
    raise TransferError(f"it is a prefix of {name} that no model here can use: {'; '.join(nearest)}")


def _get(file: BinaryIO, kind: type[Any]) -> Any:
    """The next record. Raises TransferError."""
    try:
        return msgspec.msgpack.decode(_body(file), type=kind)
    except msgspec.MsgspecError as error:
        raise TransferError(f"it is damaged: {error}") from error


def _body(file: BinaryIO) -> bytes:
    """Of the next record. Raises TransferError."""
    length, checksum = _RECORD.unpack(_read(file, _RECORD.size))
    if length > _LONGEST:
        raise TransferError("it is damaged: a record is too long")
    body = _read(file, length)
    if xxhash.xxh3_64_intdigest(body) != checksum:
        raise TransferError("it is damaged: a record has a wrong checksum")
    return body


def _read(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise TransferError("it is cut short")
    return data


def reason(error: BaseException) -> tuple[str, str]:
    """Class name and message of what a transfer failed with."""
    if isinstance(error, TransferError):
        return "RequestError", error.message
    if isinstance(error, HomeprefixdError):
        return type(error).__name__, error.message
    return "UnavailableError", f"it could not be carried over: {error}"

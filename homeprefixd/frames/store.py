"""Frames between the store and its clients, which are workers, the daemon and commands: `ToStore`, `FromStore`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from . import Frame, Stop

# ---------------------------------------------------------------------------------------------- client -> store


class Adopt(Frame):
    """From the daemon only: a new client's socket travels with this frame, as one descriptor."""

    role: Literal["worker", "admin"]
    name: str


class Hello(Frame):
    """First frame of a client. `arena`: True asks for the arena's descriptor."""

    arena: bool


class OpenNamespace(Frame):
    """Register a description; the reply carries its key and, for the same model content, what differs elsewhere."""

    ticket: int
    description: dict[str, Any]


class Match(Frame):
    """How far are `tokens` known? With `load`: make the nodes ready in the arena and lease them until `Release`."""

    ticket: int
    namespace: bytes
    tokens: bytes  # u32 LE
    limit: int  # match at most so many tokens
    exact: bool  # only `grid` nodes, only whole ones
    load: bool
    request: str = ""  # id of the request that asks, so that its prompt can be named by it later


class Release(Frame):
    """End the leases of a `Match`. Needs no reply."""

    ticket: int


class Taken(Frame):
    """Of a streamed match (`Plan.streamed`) the first `count` nodes were imported, and need not be kept any more."""

    ticket: int
    count: int


class Reserve(Frame):
    """Room in the arena for blocks about to be exported, in bytes; evicts if need be.

    `runs`: they can come one by one instead, so no more is evicted for each than it takes itself. `after`: key of the
    node that they continue, which stays; b"": of none.
    """

    ticket: int
    sizes: list[int]
    runs: bool = False
    after: bytes = b""


class NewNode(msgspec.Struct, array_like=True, frozen=True):
    """A block whose state lies in a reserved slot, ready to be published.

    An edge is one, too: its parent is the node that it belongs to, its one token `blocks.EDGE`, it starts at its node's
    end, and `kind` says what ends there (system, turn, prompt, reply, branch), or `window` where nothing does.
    """

    parent: bytes  # key of the node before it; the namespace for the first
    tokens: bytes  # u32 LE, 1 to 64 of them
    start: int  # position of its first token
    offset: int  # of the slot; from Reserved
    size: int  # bytes used, at most what was reserved
    grid: bool
    cost: float  # seconds of prefill
    kind: str  # prompt, reply
    preview: str  # text of the block, cut to about 160 bytes
    holds_edge: bool = False  # an edge follows: it is kept though a longer node covers it
    part: int = 0  # its slot holds a run (`prefix/runs.py`) of `parts` blocks; this is number `part`
    parts: int = 1


class Commit(Frame):
    """Publish nodes, parents before children. Known ones are dropped and their slots freed. Needs no reply."""

    namespace: bytes
    nodes: list[NewNode]
    owner: str = ""  # name of the API key that they were computed for


class Abandon(Frame):
    """Give reserved slots back unused, by offset."""

    offsets: list[int]


class Refuse(Frame):
    """A worker could not import the state of a node, for a reason of its own, not for want of cells. Needs no reply."""

    namespace: bytes
    key: bytes
    reason: str


class Neighbour(Frame):
    """Which stored prompt begins as `tokens` do, and how does it go on? Nothing is loaded or counted."""

    ticket: int
    namespace: bytes
    tokens: bytes  # u32 LE
    beyond: int  # tokens that are wanted behind the first that differs


class Trace(Frame):
    """What keeps `tokens` from being found: were they stored once, or are they under another namespace? Reads only."""

    ticket: int
    namespace: bytes
    tokens: bytes  # u32 LE


class Stretch(msgspec.Struct, array_like=True, frozen=True):
    """Bytes [start, end) of a text that were generated, and the tokens that they were generated as."""

    start: int
    end: int
    tokens: bytes  # u32 LE


class Remember(Frame):
    """A reply has ended: of a prompt, its stretches that were generated before, and what was generated now.

    Needs no reply. Without `reply` what is remembered of this prompt is forgotten: it was wrong.
    """

    namespace: bytes
    digest: bytes  # of the prompt's text: `blocks.text_digest`
    length: int  # of the prompt's text, in bytes
    tail: bytes  # its last few bytes: `blocks.text_tail`
    stretches: list[Stretch]
    reply: bytes  # u32 LE


class Recall(Frame):
    """What is remembered of the longest prompt that `text` begins with?"""

    ticket: int
    namespace: bytes
    text: bytes


class FileHash(Frame):
    """Ask for the remembered SHA-256 of a file, or (with `sha256`) remember it."""

    ticket: int
    device: int
    inode: int
    size: int
    mtime_ns: int
    sha256: str = ""


class Stats(Frame):
    """Ask for the store's figures."""

    ticket: int


class ListPrefixes(Frame):
    """Ask for leaves of the tree, last used first."""

    ticket: int
    limit: int
    model: str = ""  # alias or SHA-256 prefix; "" for all


class Purge(Frame):
    """Remove from every tier. Exactly one of the filters is set; `all` removes everything, hash memo excepted."""

    ticket: int
    all: bool = False
    prefix: str = ""  # id from ListPrefixes, or a beginning of it that is unique
    older_than: float = 0.0  # seconds since last use
    model: str = ""


class Flush(Frame):
    """Write everything that waits, tails too; the reply comes when it is on disk."""

    ticket: int


LEAST_RATE = 4096
"""Bytes a second that a Verify may be bound to: with less it would take years."""


class Verify(Frame):
    """Read everything that is stored and check it; the reply comes at the end. One at a time."""

    ticket: int
    repair: bool = False  # remove what is damaged, with all below it
    rate: float = 0.0  # bytes a second at most; 0: as fast as it goes


class EndVerify(Frame):
    """Nobody waits for a Verify any more: it ends, and is answered with what it found."""

    ticket: int  # the Verify's


class Resize(Frame):
    """Another budget of disk from now on, in bytes; the store shrinks to it in steps. From the daemon."""

    ticket: int
    warm: int  # 0: as it is
    hot: int = 0  # bytes of RAM, at most what the arena was made for; 0: as it is
    daily_writes: int = -1  # bytes; 0: no bound; < 0: as it is
    scrub_rate: float = -1.0  # bytes a second; 0: none; < 0: as it is
    log_level: str = ""  # "": as it is


class Pin(Frame):
    """Keep a prefix on disk. Named by one of: `tokens` of a `namespace`, `prefix`, `request`, or none to list pins."""

    ticket: int
    namespace: bytes = b""
    tokens: bytes = b""  # u32 LE
    prefix: str = ""  # id from ListPrefixes, or a beginning of it that is unique
    request: str = ""  # id of a request that was looked up since the store's start
    label: str = ""
    ttl: float = 0.0  # seconds; 0: until it is unpinned


class Unpin(Frame):
    """Keep it no longer. Named as in Pin, or by `label`, or `all`."""

    ticket: int
    namespace: bytes = b""
    tokens: bytes = b""
    prefix: str = ""
    request: str = ""
    label: str = ""
    all: bool = False


class Export(Frame):
    """Write a prefix into a pipe, whose end travels with this frame as one descriptor. Named as in Pin."""

    ticket: int
    namespace: bytes = b""
    tokens: bytes = b""
    prefix: str = ""
    request: str = ""


class Import(Frame):
    """Read a prefix from a pipe, whose end travels with this frame as one descriptor."""

    ticket: int


class Compact(Frame):
    """Give the disk back what the file does not need. From the daemon."""

    ticket: int


class UseModels(Frame):
    """From the daemon: the models that it is configured for, by alias. What is stored of others goes first.

    Shares are percent of the budget of disk, by alias of a model and by name of an API key.
    """

    models: list[str]
    shares: dict[str, int] = {}
    key_shares: dict[str, int] = {}


ToStore = (
    Adopt
    | Hello
    | OpenNamespace
    | Match
    | Release
    | Taken
    | Reserve
    | Commit
    | Abandon
    | Refuse
    | FileHash
    | Stats
    | ListPrefixes
    | Purge
    | Flush
    | Stop
    | Verify
    | EndVerify
    | Resize
    | Pin
    | Unpin
    | Export
    | Import
    | Compact
    | UseModels
    | Neighbour
    | Trace
    | Remember
    | Recall
)


# ---------------------------------------------------------------------------------------------- store -> client


class Welcome(Frame):
    """Answer to Hello. With `arena_bytes` > 0 the arena's descriptor travels with it."""

    arena_bytes: int
    store_id: str  # new at each start of the store


class NamespaceOpened(Frame):
    ticket: int
    namespace: bytes
    mismatch: list[str]  # e.g. "kv_type: stored prefixes have q8_0, this run f16"


class PlanNode(msgspec.Struct, array_like=True, frozen=True):
    """One node of a match, in order: positions [start, start + count), of which the first `use` tokens match."""

    key: bytes
    start: int
    count: int
    use: int
    tier: Literal["hot", "warm"]
    size: int  # bytes of state
    grid: bool
    offset: int  # of the slot where it is ready already; -1 while it is being loaded
    edge: bool = False  # the edge of the node before it; `start` is that one's end, `count` and `use` are 0
    part: int = 0  # what is at `offset` is a run (`prefix/runs.py`) of `parts` blocks; this is number `part`
    parts: int = 1
    run_size: int = 0  # bytes of the run


class Plan(Frame):
    """Answer to Match. Only the last node can have use < count. Offset -1: BlockReady or BlockLost follows.

    Where states have edges, the nodes are those up to the deepest that can be resumed; `known` tokens are known.
    """

    ticket: int
    nodes: list[PlanNode]
    known: int = 0
    warm_rate: float = 0.0  # bytes of state a second that one reader brings from disk, as measured; 0: not known
    streamed: bool = False  # it is too large to be ready as a whole: more comes as `Taken` tells what was imported


class BlockReady(Frame):
    """Node `index` of the plan lies at `offset`, verified; as part of a run, see `PlanNode`."""

    ticket: int
    index: int
    offset: int
    part: int = 0
    parts: int = 1
    run_size: int = 0


class BlockLost(Frame):
    """Node `index` and all after it cannot be had (damaged, evicted, no room)."""

    ticket: int
    index: int
    reason: str


class Reserved(Frame):
    """Offsets in order; shorter than asked where there is no room for more."""

    ticket: int
    offsets: list[int]


class Neighboured(Frame):
    """Answer to Neighbour: tokens from the start of the prompt; none if no stored prompt begins so."""

    ticket: int
    tokens: bytes  # u32 LE


class Gone(msgspec.Struct, array_like=True, frozen=True):
    """A block of a prompt that the store has removed."""

    start: int  # position of its first token
    when: float  # Unix time, s
    why: str  # a key of `explain.causes.REMOVALS`
    count: int = 0  # tokens from there on that were removed, as far as is remembered


class Traced(Frame):
    """Answer to Trace."""

    ticket: int
    gone: Gone | None  # the first block that was removed; None: none was, as far as is remembered
    known: int = 0  # leading tokens that are stored under the namespace itself
    elsewhere: int = 0  # leading tokens that are stored under another one
    differences: list[str] = []  # how that one differs, in words


class Recalled(Frame):
    """Answer to Recall: the prompt's length in bytes (0: none is remembered), its stretches, replies last first."""

    ticket: int
    length: int = 0
    stretches: list[Stretch] = []
    replies: list[bytes] = []  # u32 LE each


class FileHashKnown(Frame):
    ticket: int
    sha256: str  # "" if unknown


class StatsReply(Frame):
    ticket: int
    stats: dict[str, Any]


class PrefixInfo(msgspec.Struct, frozen=True):
    """A leaf of the tree and the path to it."""

    id: str  # hex of the node's key, first 16 characters
    model: str
    tokens: int  # from the start of the prompt to the leaf's end
    own_tokens: int  # not shared with any other prefix
    bytes: int  # of state, whole path, as stored (hot-only nodes: as in RAM)
    own_bytes: int
    tiers: list[str]
    created: float  # Unix time, s
    last_use: float
    hits: int
    preview: str
    pinned: int = 0  # tokens of it, from the start, that are pinned
    labels: list[str] = []  # of these pins
    request: str = ""  # the last one that asked for it, or for most of it; "": that is not known any more


class Prefixes(Frame):
    ticket: int
    prefixes: list[PrefixInfo]
    total: int  # nodes in the tree


class Purged(Frame):
    ticket: int
    nodes: int
    bytes: int
    error: str = ""
    kind: str = ""  # of `error`: class name


class Flushed(Frame):
    ticket: int
    pending: int  # nodes that could not be written


class Verified(Frame):
    """`nodes` were read, `bytes` of payload; `damaged` of them are not what was written, `removed` with those below."""

    ticket: int
    nodes: int
    bytes: int
    damaged: int
    removed: int
    problems: list[str]  # "id: reason", the first hundred
    seconds: float
    complete: bool
    error: str = ""


class Resized(Frame):
    """The budget that is kept now: at most what the file was opened for."""

    ticket: int
    warm: int
    hot: int = 0  # likewise


class PinInfo(msgspec.Struct, frozen=True):
    """A pinned prefix."""

    id: str  # as a PrefixInfo's, of the node that holds its end, or else of the last one stored; "" if there is none
    model: str
    label: str
    tokens: int  # from the start of the prompt
    created: float  # Unix time, s
    expires: float  # Unix time, s; 0: never
    preview: str
    tiers: list[str]  # where what is stored of it is, in part or whole
    kept: int = 0  # of `tokens`, from the start on, could be gone on from if there were nothing in RAM
    not_kept: str = ""  # why not all of them


class Pinned(Frame):
    """Answer to Pin and Unpin: the pins that were made or removed, or all."""

    ticket: int
    pins: list[PinInfo]
    error: str = ""
    kind: str = ""  # of the error: a class of `errors.py`


class Compacted(Frame):
    """Bytes of the file on disk."""

    ticket: int
    before: int
    after: int
    error: str = ""


class Transferred(Frame):
    """Answer to Export and Import: `bytes` of state; `known` nodes were there already."""

    ticket: int
    nodes: int
    tokens: int
    bytes: int
    known: int = 0
    error: str = ""
    kind: str = ""  # of the error: a class of `errors.py`
    kept: int = 0  # of an import's `tokens`, from the start on, are on disk
    not_kept: str = ""  # why not all of them


FromStore = (
    Welcome
    | NamespaceOpened
    | Plan
    | BlockReady
    | BlockLost
    | Reserved
    | FileHashKnown
    | StatsReply
    | Prefixes
    | Purged
    | Flushed
    | Verified
    | Resized
    | Pinned
    | Transferred
    | Compacted
    | Neighboured
    | Traced
    | Recalled
)

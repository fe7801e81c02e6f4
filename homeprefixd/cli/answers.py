"""What the commands need of a daemon's replies: where it is missing, something else answers at that address.

Only what is read without asking whether it is there. More may come, and is passed on as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

import msgspec


class _Tier(TypedDict):
    bytes: float
    limit: float
    nodes: float


class _DiskTier(_Tier):
    state: str


class _Queue(TypedDict):
    nodes: float
    bytes: float


class _Counters(TypedDict):
    lookups: float
    hits: float
    tokens_matched_hot: float
    tokens_matched_warm: float
    written_bytes: float
    evicted_hot: float
    evicted_warm: float
    damaged: float
    lost: float
    errors: float


class _Worker(TypedDict):
    alias: str
    state: str


class _Status(TypedDict):
    workers: NotRequired[list[_Worker]]


class Stats(TypedDict):
    """`GET /cache/stats`."""

    uptime_s: float
    hot: _Tier
    warm: _DiskTier
    queue: _Queue
    counters: _Counters
    daemon: _Status
    pins: NotRequired[dict[str, Any]]
    shares: NotRequired[list[dict[str, Any]]]
    writes: NotRequired[dict[str, Any]]
    scrub: NotRequired[dict[str, Any]]
    namespaces: NotRequired[list[dict[str, Any]]]


class _Today(TypedDict):
    requests: float
    failed: float
    prompt: float
    reused: float
    saved_s: float
    lost_s: float


class _First(TypedDict):
    cold: float | None
    warm: float | None


class _App(TypedDict):
    app: str
    lost_s: float
    text: str


class _Serving(TypedDict):
    state: str


class _Record(TypedDict):
    app: str
    began: float


class _Ended(_Record):
    state: str


class Overview(TypedDict):
    """`GET /cache/overview`."""

    now: float
    version: str
    daemon: _Serving
    store: dict[str, Any] | None
    today: _Today
    first_ms: _First
    apps: list[_App]
    running: list[_Record]
    recent: list[_Ended]


class _Prefix(TypedDict):
    id: str
    model: str
    tokens: float
    own_tokens: float
    bytes: float
    tiers: list[str]
    last_use: float
    hits: float
    preview: str


class Prefixes(TypedDict):
    """`GET /cache/prefixes`."""

    prefixes: list[_Prefix]
    total: float


class _Pin(TypedDict):
    id: str
    label: str
    model: str
    tokens: float
    tiers: list[str]
    created: float
    expires: float
    preview: str


class Pins(TypedDict):
    """`POST /cache/pin` and `/cache/unpin`."""

    pins: list[_Pin]


class Removed(TypedDict):
    """`POST /cache/purge`."""

    nodes: float
    bytes: float


class Verified(TypedDict):
    """`POST /cache/verify`."""

    nodes: float
    bytes: float
    damaged: float
    removed: float
    problems: list[str]
    seconds: float
    complete: bool


class Compacted(TypedDict):
    """`POST /cache/compact`."""

    before: float
    after: float


class Imported(TypedDict):
    """`POST /cache/import`."""

    tokens: float
    bytes: float
    known_nodes: float
    kept: NotRequired[float]
    not_kept: NotRequired[str]


class Warmed(TypedDict):
    """`POST /cache/warm`."""

    prompt_tokens: float
    cached_tokens: float
    computed_tokens: float
    seconds: float
    least_tokens: NotRequired[float]
    known_tokens: NotRequired[float | None]


class Matched(TypedDict):
    """`POST /cache/match`."""

    prompt_tokens: float
    cached_tokens: float
    computed_tokens: float
    cache_tiers: dict[str, float]
    bytes: float
    predicted_ttft_ms: float | None
    predicted_cold_ttft_ms: float | None


class _Explained(TypedDict):
    id: str
    app: str
    model: str


class _Explanation(TypedDict):
    text: str
    lead: str
    before: str
    after: str
    advice: str
    rule: str
    setting: NotRequired[str]
    app: NotRequired[str]


class Applied(TypedDict):
    """`POST /cache/explain/ID/apply`."""

    rule: str
    setting: str
    app: NotRequired[str]
    file: str
    reason: str


class Explained(TypedDict):
    """`GET /cache/explain/ID`."""

    record: _Explained
    explanation: _Explanation | None


class _State(TypedDict):
    value: str


class _Model(TypedDict):
    id: str
    status: _State
    path: str
    bytes: float
    progress: float
    reason: str
    pinned: bool
    memory: float
    requests: float
    expires: float | None


class Models(TypedDict):
    """`GET /models/details`."""

    models: list[_Model]


class Loaded(TypedDict):
    """`POST /models/load`."""

    success: bool


class Unloaded(TypedDict):
    """`POST /models/unload`."""

    unloaded: bool


_EXPLAIN, _APPLY = "/cache/explain/", "/apply"

_SHAPES: Mapping[str, Any] = {
    "/cache/stats": Stats,
    "/cache/overview": Overview,
    "/cache/prefixes": Prefixes,
    "/cache/pin": Pins,
    "/cache/unpin": Pins,
    "/cache/purge": Removed,
    "/cache/verify": Verified,
    "/cache/compact": Compacted,
    "/cache/import": Imported,
    "/cache/warm": Warmed,
    "/cache/match": Matched,
    _EXPLAIN: Explained,
    _EXPLAIN + _APPLY: Applied,
    "/models/details": Models,
    "/models/load": Loaded,
    "/models/unload": Unloaded,
}

_ALWAYS_THERE = frozenset(("/cache/stats", "/cache/overview", "/cache/prefixes", "/models/details"))


def lack(path: str, found: Any) -> str:
    """Why `found`, as it came from JSON, cannot be a daemon's reply to `path`; "" if it can."""
    route = path.partition("?")[0]
    if path.startswith(_EXPLAIN):
        route = _EXPLAIN + _APPLY if path.endswith(_APPLY) else _EXPLAIN
    shape = _SHAPES.get(route)
    if shape is None:
        return ""
    try:
        msgspec.convert(found, type=shape)
    except msgspec.ValidationError as error:
        return str(error)
    return ""


def is_always_there(path: str) -> bool:
    """Does no daemon ever answer that it has no such thing as `path`?"""
    return path.partition("?")[0] in _ALWAYS_THERE

"""Removing nodes by hand, from every tier.

Runs in the writer's thread. RAM goes first, then the disk, then what appeared in RAM meanwhile; slots that are leased
are freed when their leases end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..errors import NotFoundError, RequestError, StoreError
from .blocks import MODEL_NAME
from .cache import Cache
from .disk import DiskFullError, DiskTroubleError, WarmTable
from .tree import NodeTable, Placed, shorter

ID_CHARACTERS = 16
"""Of a node's key in hex, in listings."""


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


def purge(
    cache: Cache, *, everything: bool = False, prefix: str = "", older_than: float = 0.0, model: str = "", now: float
) -> Removed:
    """Remove nodes; exactly one filter is set. `older_than` in seconds since the last use, `now` in Unix time.

    `prefix` is an id of a listing or a beginning of it: the node, all below it, and all above it that leads nowhere
    else. Raises RequestError for other than one filter, NotFoundError for an unknown prefix or model, StoreError if the
    disk cannot be changed (RAM is purged then).
    """
    if (everything, bool(prefix), older_than > 0, bool(model)).count(True) != 1:
        raise RequestError("say what to purge: one of all, prefix, older_than (more than 0 seconds) or model")
    with cache.view() as (_tables, warm):
        if everything:
            victims = _below(cache, warm, list(cache.namespaces))
        elif prefix:
            victims = _prefix(cache, warm, prefix)
        elif model:
            victims = _below(cache, warm, _namespaces_of(cache, model))
        else:
            victims = _unused(cache, now - older_than)
        for key in victims:
            hot = cache.hot.by_key.get(key)
            if hot is not None:
                cache.forget_hot(hot)
            cache.touched.pop(key, None)
    if cache.disk is not None:
        try:
            if everything:
                cache.disk.clear()
            else:
                cache.disk.remove(list(victims.values()))
        except (DiskFullError, DiskTroubleError) as error:
            raise StoreError(f"purged from memory, but the disk cannot be changed: {error}") from error
        finally:
            cache.removed_by_hand(list(victims))
    cache.counters.purged += len(victims)
    return Removed(len(victims), sum(node.record.stored or node.record.size for node in victims.values()))


Victims = dict[bytes, Placed]  # by key, children before parents


def _below(cache: Cache, warm: WarmTable | None, roots: Iterable[bytes]) -> Victims:
    found: Victims = {}
    waiting = list(roots)
    while waiting:
        for child in children(cache, warm, waiting.pop()).values():
            found[child.record.key] = child
            waiting.append(child.record.key)
    return dict(reversed(found.items()))


def children(cache: Cache, warm: WarmTable | None, key: bytes) -> Victims:
    """Those of a node or a namespace in both tiers."""
    found: Victims = {}
    if warm is not None:
        found.update((child.record.key, child) for child in warm.children(key))
    found.update((child.record.key, child) for child in cache.hot.table.children(key))
    return found


def _prefix(cache: Cache, warm: WarmTable | None, prefix: str) -> Victims:
    wanted = prefix.lower()
    try:
        beginning = bytes.fromhex(wanted[: len(wanted) // 2 * 2])
        int(wanted, 16)
    except ValueError:
        raise NotFoundError(f"no prefix {prefix!r}: ids are hexadecimal, see `homeprefixd ls`") from None
    found: Victims = {key: hot.node for key, hot in cache.hot.by_key.items() if key.hex().startswith(wanted)}
    if warm is not None:
        found |= {n.record.key: n for n in warm.find(beginning, 32) if n.record.key.hex().startswith(wanted)}
    if not found:
        raise NotFoundError(f"no prefix {prefix!r}; see `homeprefixd ls` for those that there are")
    if len(found) > 1:
        raise NotFoundError(
            f"prefix {prefix!r} means {len(found)} or more; give more of its {ID_CHARACTERS} characters"
        )
    [node] = found.values()
    victims = _below(cache, warm, [node.record.key])
    victims[node.record.key] = node
    tables: list[NodeTable] = [cache.hot.table, *([warm] if warm is not None else [])]
    for table in tables:
        for short in list(shorter(table, node.tree_key)):  # covered by it, though still on disk
            if not children(cache, warm, short.record.key):
                victims[short.record.key] = short
    while node.parent not in cache.namespaces:
        hot = cache.hot.by_key.get(node.parent)
        above = hot.node if hot is not None else warm.place(node.parent) if warm is not None else None
        if above is None or any(key not in victims for key in children(cache, warm, above.record.key)):
            break
        node = above
        victims[node.record.key] = node
    return victims


def _namespaces_of(cache: Cache, model: str) -> list[bytes]:
    found = [key for key, description in cache.namespaces.items() if is_model(description, model)]
    if not found:
        known = sorted({model_label(description) for description in cache.namespaces.values()})
        raise NotFoundError(f"nothing is stored of a model {model!r}; known: {', '.join(known) or 'none'}")
    return found


def _unused(cache: Cache, moment: float) -> Victims:
    old = cache.disk.unused_since(moment, cache.touched) if cache.disk is not None else []
    victims: Victims = {}
    for node in old:
        hot = cache.hot.by_key.get(node.record.key)
        if hot is None or hot.node.record.last_use < moment:
            victims[node.record.key] = node
    by_depth = sorted(cache.hot.by_key.values(), key=lambda hot: -hot.node.end)
    for hot in by_depth:
        if hot.node.record.last_use < moment and hot.key not in victims:
            below = cache.hot.table.children(hot.key)
            if not hot.warm and all(child.record.key in victims for child in below):
                victims[hot.key] = hot.node
    return victims

"""Why a prompt is not found, as far as the store knows: something of it was removed, or it is under another namespace.

Reads only: nothing is loaded, leased or counted as a use.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ..frames.store import Gone, Traced
from .blocks import ADAPTER_NAMES, ADAPTERS, BLOCK_TOKENS, MODEL_NAME, TokensBE, block_key, swap
from .cache import Cache
from .registry import differences
from .tree import NodeTable, match

_STEP = BLOCK_TOKENS * 4
_NAMESPACES = 64  # that are looked into, at most


def trace(cache: Cache, ticket: int, namespace: bytes, tokens: bytes) -> Traced:
    """`tokens`: u32 LE."""
    wanted = TokensBE(swap(tokens))
    with cache.view() as (tables, _warm):
        steps = match(tables, namespace, wanted, limit=len(tokens) // 4)
        known = sum(step.use for step in steps)
        whole = [step for step in steps if step.use == BLOCK_TOKENS]
        parent = whole[-1].node.record.key if whole else namespace
        gone = _gone(cache, parent, tokens, len(whole) * BLOCK_TOKENS)
        if gone is not None and gone.start + gone.count <= known:
            gone = None  # it has come back as a part of another one
        other, elsewhere = _elsewhere(cache, tables, namespace, wanted, known)
    return Traced(ticket, gone, known, elsewhere, _named(other, cache.namespaces.get(namespace, {})) if other else [])


def _gone(cache: Cache, parent: bytes, tokens: bytes, start: int) -> Gone | None:
    """The first block behind `start` that was removed, with those behind it; `parent`: the node that ends there."""
    if not len(cache.removals_seen):
        return None
    found = None
    count = 0
    at = start * 4
    while at < len(tokens):
        block = tokens[at : at + _STEP]
        lengths = (len(block),) if count else range(len(block), 0, -4)  # the first may have been a prompt's end
        removal = None
        for length in lengths:
            key = block_key(parent, block[:length])
            removal = cache.removals_seen.get(key)
            if removal is not None:
                count += length // 4
                break
        if removal is None:
            break
        found = found or removal
        if length < _STEP:
            break
        parent, at = key, at + _STEP
    return Gone(start, found.when, found.why, count) if found is not None else None


def _elsewhere(
    cache: Cache, tables: Sequence[NodeTable], namespace: bytes, wanted: TokensBE, known: int
) -> tuple[Mapping[str, Any] | None, int]:
    """The description of the namespace that knows more than `known` tokens of them, and how many."""
    best: tuple[Mapping[str, Any] | None, int] = (None, known)
    others = ((key, value) for key, value in reversed(cache.namespaces.items()) if key != namespace)
    for key, description in itertools.islice(others, _NAMESPACES):
        if any(table.get(key + wanted[:_STEP]) is not None for table in tables):
            count = sum(step.use for step in match(tables, key, wanted, limit=len(wanted) // 4))
            if count > best[1]:
                best = description, count
    return best if best[0] is not None else (None, 0)


def _named(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What differs, in words; of another model only that it is another one."""
    if there.get("model_sha256") != here.get("model_sha256"):
        return [f"model: {there.get(MODEL_NAME, 'another')} there, {here.get(MODEL_NAME, 'this one')} here"]
    if there.get(ADAPTERS) != here.get(ADAPTERS):
        names = [", ".join(one.get(ADAPTER_NAMES, ())) or "none" for one in (there, here)]
        scale = " with another scale" if names[0] == names[1] else ""
        return [f"adapters: {names[0]}{scale} there, {names[1]} here"]
    return differences(there, here)

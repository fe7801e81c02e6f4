"""Namespace, BlockKey, the chain of hashes: how a prefix is named.

Pure functions over bytes. Knows nothing of storage, processes or llama.cpp.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, NewType

BLOCK_TOKENS = 64
"""Tokens of a whole block. Every chunk of prefill starts on a multiple of it."""

FORMAT_VERSION = 1
"""Version of what is stored: part of every namespace and of the file's own header."""

KEY_BYTES = 32

BlockKey = NewType("BlockKey", bytes)
"""32 bytes that name a node: all tokens from the start of the prompt to its end, in one namespace."""

Namespace = NewType("Namespace", bytes)
"""32 bytes, the key of the root: everything that changes KV bytes, and nothing else."""

TokensLE = NewType("TokensLE", bytes)
"""Tokens as little-endian u32: what is hashed, and what frames carry."""

TokensBE = NewType("TokensBE", bytes)
"""Tokens as big-endian u32: their byte order is their order, which the tree's table needs."""

EDGE = TokensLE(b"\xff\xff\xff\xff")
"""What stands for the tokens of an edge, a child of the node that it belongs to. No token has this id."""


EDGES = "edges"
"""Key of a description: there if states have edges, a mapping with `window` in positions."""


class Edges(NamedTuple):
    """What a namespace's states need to be resumed, beside the spans of all nodes."""

    window: int
    """The nodes that cover the last so many positions need their edges; 0: only the last node does."""


def edges_of(description: Mapping[str, object]) -> Edges | None:
    """None where every node can be resumed from without one."""
    found = description.get(EDGES)
    if not isinstance(found, Mapping):
        return None
    window = found.get("window")
    return Edges(window if isinstance(window, int) and window > 0 else 0)


MODEL_NAME = "model"
"""Key of a description that is not hashed: what people call the model, for lists and purges."""


ADAPTERS = "adapters"
"""Key of a description: LoRA adapters, each a mapping with `sha256` and `scale`."""

ADAPTER_NAMES = "adapter_names"
"""Key of a description that is not hashed: what people call its adapters; absent without any."""

CONTROL_VECTORS = "control_vectors"
"""Key of a description: control vectors, each a mapping with `sha256`, `scale`, `first_layer` and `last_layer`; absent
without any."""

_NOT_HASHED = frozenset({MODEL_NAME, ADAPTER_NAMES})


def namespace_of(description: Mapping[str, object]) -> Namespace:
    """The root key of a description: BLAKE2b-256 of its canonical JSON (sorted keys, no spaces, UTF-8).

    MODEL_NAME and ADAPTER_NAMES are left out: the same file under another name has the same state.
    """
    hashed = {key: value for key, value in description.items() if key not in _NOT_HASHED}
    text = json.dumps(hashed, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return Namespace(hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest())


def block_key(parent: bytes, tokens: bytes) -> BlockKey:
    """`BLAKE2b-256(parent || tokens)`; `tokens` little-endian u32 (TokensLE), 1 to BLOCK_TOKENS of them."""
    return BlockKey(hashlib.blake2b(parent + tokens, digest_size=KEY_BYTES).digest())


def chain(root: Namespace, tokens: TokensLE) -> list[BlockKey]:
    """Keys of all whole blocks of `tokens`, in order; a tail shorter than a block has none here."""
    keys: list[BlockKey] = []
    parent: bytes = root
    step = BLOCK_TOKENS * 4
    for at in range(0, len(tokens) - step + 1, step):
        parent = block_key(parent, tokens[at : at + step])
        keys.append(BlockKey(parent))
    return keys


_TAIL = 12
"""Bytes of a text's end by which it is told from most others of the same length."""


def text_digest(namespace: bytes, text: bytes) -> bytes:
    """32 bytes that name a text within a namespace."""
    return hashlib.blake2b(text, digest_size=KEY_BYTES, key=namespace).digest()


def text_tail(text: bytes) -> bytes:
    return text[-_TAIL:]


def to_le(tokens: Sequence[int] | Iterable[int]) -> TokensLE:
    """Token ids (0 <= id < 2**32) as little-endian u32."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return TokensLE(packed.tobytes())


def from_le(data: bytes) -> list[int]:
    """The inverse of `to_le`."""
    unpacked = array("I")
    unpacked.frombytes(data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked.tolist()


def swap(data: bytes) -> bytes:
    """Little-endian u32 to big-endian u32, and back."""
    swapped = array("I")
    swapped.frombytes(data)
    swapped.byteswap()
    return swapped.tobytes()


def common_tokens(a: bytes, b: bytes) -> int:
    """How many leading u32 of two token strings (both LE or both BE) are equal."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n // 4
    low, high = 0, n // 4  # invariant: the first `low` are equal, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if a[low * 4 : middle * 4] == b[low * 4 : middle * 4]:
            low = middle
        else:
            high = middle
    return low

"""What stands where a prompt leaves the known path: the stored prompt that it resembles most, as far as it is wanted.

Reads only: nothing is loaded, leased or counted as a use.
"""

from __future__ import annotations

import itertools

from .blocks import KEY_BYTES, TokensBE, TokensLE, swap
from .cache import Cache
from .tree import Placed, match

_CHILDREN = 32  # of a node that are looked at for the one used last


def neighbour(cache: Cache, namespace: bytes, tokens: bytes, beyond: int) -> TokensLE:
    """Tokens (u32 LE) of a stored path that begins as `tokens` (u32 LE) do, to about `beyond` tokens behind the first
    that differs; empty if none begins so. Of several that go on there, the one used last."""
    wanted = TokensBE(swap(tokens))
    path = b""
    with cache.view() as (tables, _warm):
        steps = match(tables, namespace, wanted, limit=len(tokens) // 4)
        if not steps:
            return TokensLE(b"")
        same = sum(step.use for step in steps)
        last: Placed | None = steps[-1].node
        path = b"".join(step.node.tree_key[KEY_BYTES:] for step in steps)
        while last is not None and len(path) // 4 < same + beyond:
            key = last.record.key
            children = [child for table in tables for child in itertools.islice(table.children(key), _CHILDREN)]
            last = max(
                (child for child in children if not child.is_edge),
                key=lambda child: child.record.last_use,
                default=None,
            )
            path += last.tree_key[KEY_BYTES:] if last is not None else b""
    return TokensLE(swap(path))

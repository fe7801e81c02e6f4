"""A store of many nodes with tiny payloads, made quickly: `python -m homeprefixd.bench.many_nodes DIRECTORY [N]`."""

from __future__ import annotations

import sys
from pathlib import Path

from ..prefix.blocks import BLOCK_TOKENS, BlockKey, block_key, namespace_of, swap, to_le
from ..prefix.disk import Disk, Pending
from ..prefix.policy import Worth
from ..prefix.tree import Placed, Record

DESCRIPTION = {"model_sha256": "ab" * 32, "kv_type": "f16"}
PATH_NODES = 50
"""Nodes of each prompt; the first half is shared by ten."""


def fill(directory: Path, nodes: int) -> None:
    """Prompts of PATH_NODES blocks, as conversations over shared prefixes."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    disk = Disk(directory, limit=4 << 30, level=0, policy=Worth())
    namespace = namespace_of(DESCRIPTION)
    disk.put_namespace(namespace, DESCRIPTION)
    pending: list[Pending] = []
    payload = memoryview(b"tiny")
    known: set[bytes] = set()
    prompt = 0
    while len(known) < nodes:
        parent: bytes = namespace
        for depth in range(PATH_NODES):
            first = (prompt // 10 if depth < PATH_NODES // 2 else prompt) * 1000 + depth
            tokens = to_le(range(first, first + BLOCK_TOKENS))
            key = block_key(parent, tokens)
            if key not in known:
                known.add(key)
                when = 1e9 + prompt
                text = f"block {depth} of prompt {prompt}, " * 6
                record = Record(
                    BlockKey(key), namespace, depth * 64, 4, 0, True, "prompt", 0.1, when, when, 0, text[:160]
                )
                record.path_cost = 0.1 * (depth + 1)
                pending.append(Pending(Placed(parent + swap(tokens), record), lambda: payload))
            parent = key
        prompt += 1
        if len(pending) > 10_000:
            disk.store(pending, {})
            pending.clear()
    disk.store(pending, {})
    disk.close()


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(mode=0o700, parents=True, exist_ok=True)
    fill(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100_000)

"""tree.py: one contract for every table, and matching against a search of everything."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from homeprefixd.prefix.blocks import BLOCK_TOKENS, TokensBE, block_key, swap, to_le
from homeprefixd.prefix.disk import Disk, Pending
from homeprefixd.prefix.policy import Worth
from homeprefixd.prefix.tree import LockedTable, MemoryTable, NodeTable, Placed, Record, is_covered, match, shorter

ROOT = b"r" * 32
Prompt = tuple[int, ...]


def be(tokens: Prompt) -> TokensBE:
    return TokensBE(swap(to_le(tokens)))


def record(key: bytes, start: int, grid: bool = True) -> Record:
    return Record(key, ROOT, start, 10, 0, grid, "prompt", 0.1, 1.0, 1.0, 0, "")  # type: ignore[arg-type]


def place(blocks: list[Prompt]) -> tuple[bytes, bytes]:
    """Tree key and key of the last of some blocks that follow each other."""
    parent: bytes = ROOT
    for block in blocks[:-1]:
        parent = block_key(parent, to_le(block))
    return parent + be(blocks[-1]), block_key(parent, to_le(blocks[-1]))


@contextmanager
def memory_table(nodes: Mapping[bytes, Record], _directory: Path) -> Iterator[NodeTable]:
    table = MemoryTable()
    for tree_key, node in nodes.items():
        table.put(tree_key, node)
    yield table


@contextmanager
def warm_table(nodes: Mapping[bytes, Record], directory: Path) -> Iterator[NodeTable]:
    with tempfile.TemporaryDirectory(dir=directory) as own:
        disk = Disk(Path(own), limit=64 << 20, level=0, policy=Worth())
        disk.put_namespace(ROOT, {})
        by_depth = sorted(nodes.items(), key=lambda item: item[1].start)
        disk.store([Pending(Placed(key, node), lambda: memoryview(b"0123456789")) for key, node in by_depth], {})
        with disk.table() as table:
            yield table
        disk.close()


@contextmanager
def locked_table(nodes: Mapping[bytes, Record], directory: Path) -> Iterator[NodeTable]:
    with memory_table(nodes, directory) as table:
        assert isinstance(table, MemoryTable)
        yield LockedTable(table, threading.Lock())  # not reentrant: a step that took it twice would hang


TABLES = {"memory": memory_table, "warm": warm_table, "locked": locked_table}


@pytest.fixture(params=sorted(TABLES))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


A, B, C = (tuple(range(n, n + BLOCK_TOKENS)) for n in (100, 200, 300))
TAIL = (5, 6, 7)


def some_nodes() -> dict[bytes, Record]:
    paths: list[list[Prompt]] = [[A], [B], [A, B], [A, C], [A, B, TAIL]]
    return {place(path)[0]: record(place(path)[1], BLOCK_TOKENS * (len(path) - 1)) for path in paths}


class TestContract:
    """What every table must do."""

    def test_get(self, kind: str, tmp_path: Path) -> None:
        with TABLES[kind](some_nodes(), tmp_path) as table:
            found = table.get(place([A, B])[0])
            assert found is not None
            assert found.key == place([A, B])[1]
            assert table.get(place([B, A])[0]) is None
            assert table.get(place([A, B])[0][:-4]) is None
            assert table.get(ROOT) is None

    def test_order_and_neighbours(self, kind: str, tmp_path: Path) -> None:
        keys = sorted(some_nodes())
        with TABLES[kind](some_nodes(), tmp_path) as table:
            for at, key in enumerate(keys):
                before, here, after = table.before(key), table.at_or_after(key), table.at_or_after(key + b"\0")
                assert here is not None
                assert here.tree_key == key
                assert (before.tree_key if before else None) == (keys[at - 1] if at else None)
                assert (after.tree_key if after else None) == (keys[at + 1] if at + 1 < len(keys) else None)
            last = table.before(b"\xff" * 288)
            assert last is not None
            assert last.tree_key == keys[-1]

    def test_children(self, kind: str, tmp_path: Path) -> None:
        with TABLES[kind](some_nodes(), tmp_path) as table:
            children = [child.record.key for child in table.children(place([A])[1])]
            assert children == [place([A, B])[1], place([A, C])[1]]
            assert table.has_children(ROOT)
            assert table.has_children(place([A, B])[1])
            assert not table.has_children(place([B])[1])

    def test_an_empty_one(self, kind: str, tmp_path: Path) -> None:
        with TABLES[kind]({}, tmp_path) as table:
            assert table.get(ROOT) is None
            assert table.before(ROOT) is None
            assert table.at_or_after(ROOT) is None
            assert not table.has_children(ROOT)


# few token values, and blocks that begin alike, so that everything that can nearly match does
_token = st.sampled_from([0, 1, 256, 65536, 1 << 31])
_block = st.builds(
    lambda head, fill: (*head, *[fill] * (BLOCK_TOKENS - len(head))), st.lists(_token, max_size=4), _token
)
_tail = st.lists(_token, min_size=1, max_size=6).map(tuple)
_path = st.tuples(st.lists(_block, max_size=2), st.one_of(st.none(), _tail))


def _as_blocks(path: tuple[list[Prompt], Prompt | None]) -> list[Prompt]:
    return [*path[0], *([path[1]] if path[1] else [])]


def best_by_search(nodes: Mapping[bytes, Record], wanted: Prompt, exact: bool) -> int:
    """How many tokens match, found by looking at every node."""
    parent: bytes = ROOT
    at = 0
    while at + BLOCK_TOKENS <= len(wanted):
        node = nodes.get(parent + be(wanted[at : at + BLOCK_TOKENS]))
        if node is None or (exact and not node.grid):
            break
        parent = node.key
        at += BLOCK_TOKENS
    rest = be(wanted[at : at + BLOCK_TOKENS])
    best = 0
    for tree_key, node in nodes.items():
        if tree_key[:32] != parent:
            continue
        tokens = tree_key[32:]
        common = 0
        while tokens[: common * 4 + 4] == rest[: common * 4 + 4] and len(tokens) > common * 4 < len(rest):
            common += 1
        if not exact or (node.grid and common * 4 == len(tokens)):
            best = max(best, common)
    return at + best


@given(st.lists(st.tuples(_path, st.booleans(), st.booleans()), max_size=12), _path, st.integers(0, 150), st.booleans())
@settings(max_examples=300)
def test_match_finds_what_a_search_of_everything_finds(
    paths: list[tuple[tuple[list[Prompt], Prompt | None], bool, bool]],
    wanted_path: tuple[list[Prompt], Prompt | None],
    cut: int,
    exact: bool,
) -> None:
    first, second = MemoryTable(), MemoryTable()
    nodes: dict[bytes, Record] = {}
    for path, in_first, grid in paths:
        blocks = _as_blocks(path)
        for depth in range(1, len(blocks) + 1):
            tree_key, key = place(blocks[:depth])
            node = nodes.setdefault(tree_key, record(key, BLOCK_TOKENS * (depth - 1), grid))
            (first if in_first else second).put(tree_key, node)
    wanted = tuple(token for block in _as_blocks(wanted_path) for token in block)
    limit = max(0, len(wanted) - cut) if cut % 2 else len(wanted)
    steps = match([first, second], ROOT, be(wanted), limit=limit, exact=exact)
    assert sum(step.use for step in steps) == best_by_search(nodes, wanted[:limit], exact)
    end = 0
    for number, step in enumerate(steps):
        assert step.node.record.start == end
        assert step.use == step.node.length or (number == len(steps) - 1 and not exact)
        assert step.node.tree_key[32:][: step.use * 4] == be(wanted[end : end + step.use])
        end += step.use


@given(st.sets(_tail, max_size=12), _tail)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@pytest.mark.parametrize("name", sorted(TABLES))
def test_shorter_and_covered(name: str, tmp_path: Path, tails: set[Prompt], wanted: Prompt) -> None:
    if name == "warm":  # that table keeps no node that another covers
        tails = {tail for tail in tails if not any(t != tail and t[: len(tail)] == tail for t in tails)}
    nodes = {place([tail])[0]: record(place([tail])[1], 0) for tail in tails}
    with TABLES[name](nodes, tmp_path) as table:
        found = [node.tree_key for node in shorter(table, ROOT + be(wanted))]
        covered = is_covered(table, ROOT + be(wanted))
    expected = [tail for tail in tails if len(tail) < len(wanted) and wanted[: len(tail)] == tail]
    assert found == [ROOT + be(tail) for tail in sorted(expected, key=len, reverse=True)]
    assert covered == any(len(tail) > len(wanted) and tail[: len(wanted)] == wanted for tail in tails)

"""Edges in the store: where a path can be resumed, what is kept of them, what happens to their nodes."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from homeprefixd.errors import NotFoundError, RequestError
from homeprefixd.frames.store import NewNode, Pin, PinInfo, PlanNode, Unpin
from homeprefixd.prefix.blocks import BLOCK_TOKENS, EDGE, block_key, to_le
from homeprefixd.prefix.committing import Committing
from homeprefixd.prefix.listing import prefixes
from homeprefixd.prefix.purge import purge
from homeprefixd.prefix.thinning import KEPT
from homeprefixd.prefix.transfer import export, import_
from homeprefixd.prefix.tree import MemoryTable, Placed
from tests.unit.prefix.prefix_testing import DESCRIPTION, House, payload_of

Make = Callable[..., "EdgeHouse"]


class EdgeHouse(House):
    """A house whose model's states have edges."""

    window = 0

    def open(self) -> None:
        super().open()
        description = {**DESCRIPTION, "edges": {"window": self.window}}
        self.namespace = self.cache.open_namespace(description)[0]

    def put(
        self, tokens: Sequence[int], points: dict[int, str], *, size: int = 500, edge: int = 700, prompt: int = 1 << 30
    ) -> None:
        """Save what a prompt's prefill does: spans of all blocks, and at each point a tail and edges.

        Behind `prompt` tokens it is a reply.
        """
        for end in sorted({*points, len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS}):
            self._put(list(tokens[:end]), points.get(end, ""), size, edge, points, prompt)

    def _put(self, tokens: list[int], kind: str, size: int, edge: int, points: dict[int, str], prompt: int) -> None:
        nodes: list[NewNode] = []
        parent: bytes = self.namespace
        for start in range(0, len(tokens), BLOCK_TOKENS):
            part = to_le(tokens[start : start + BLOCK_TOKENS])
            end = start + len(part) // 4
            key = block_key(parent, part)
            last = kind if end == len(tokens) else ""
            inside = any(start < point and end > point - self.window for point in points)
            purpose = last or ("window" if self.window and inside else "")
            slots = self.session.reserve([size, edge] if purpose else [size])
            if len(slots) < 1 + bool(purpose):
                return
            self.cache.arena.view(slots[0], size)[:] = payload_of(key, size)[:size]
            of = "prompt" if end <= prompt else "reply"
            nodes.append(NewNode(parent, part, start, slots[0], size, True, 0.2, of, "", bool(purpose)))
            if purpose:
                own = block_key(key, EDGE)
                self.cache.arena.view(slots[1], edge)[:] = payload_of(own, edge)[:edge]
                nodes.append(NewNode(key, EDGE, end, slots[1], edge, True, 0.0, purpose, ""))
            parent = key
        self.session.commit(self.namespace, nodes)

    def plan(self, tokens: Sequence[int], limit: int = 1 << 30) -> tuple[int, int, list[PlanNode]]:
        """Tokens that can be resumed, tokens known, the plan."""
        lease = self.cache.lookup(self.namespace, to_le(tokens), limit=limit, exact=False, load=False)
        return sum(node.use for node in lease.plan), lease.known, lease.plan


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., EdgeHouse]:
    def build(window: int = 0, **sizes: int) -> EdgeHouse:
        kind = type("Windowed", (EdgeHouse,), {"window": window})
        house: EdgeHouse = kind(tmp_path, **sizes)
        return house

    return build


def test_the_deepest_node_with_an_edge_is_where_to_go_on(make: Make) -> None:
    house = make()
    tokens = list(range(400))
    house.put(tokens, {100: "system", 256: "turn", 300: "prompt"})
    for _ in ("hot", "warm"):
        assert house.plan(tokens)[:2] == (300, 384)
        used, known, plan = house.plan([*tokens[:299], 9999])
        assert (used, known) == (256, 299)
        assert [node.edge for node in plan] == [False] * 4 + [True]
        assert (plan[-1].start, plan[-1].count, plan[-1].use) == (256, 0, 0)
        assert house.plan([*tokens[:130], 9999])[:2] == (100, 130)
        assert house.plan([*tokens[:99], 9999])[:2] == (0, 99)
        assert house.plan(tokens, limit=299)[0] == 256
        house.reopen()
    house.close()


@pytest.mark.parametrize("window", [64, 100, 128])
def test_a_window_needs_the_edges_of_all_nodes_in_it(make: Make, window: int) -> None:
    house = make(window)
    tokens = list(range(400))
    house.put(tokens, {200: "system", 384: "prompt"})
    used, _known, plan = house.plan([*tokens[:210], 9999])
    assert used == 200
    edged = [index for index, node in enumerate(plan) if node.edge]
    first = min(plan[index].start for index in edged)
    assert first - BLOCK_TOKENS <= 200 - window
    assert house.plan(tokens)[0] == 384
    lost = next(node for node in plan if node.edge)
    house.cache.forget_hot(house.cache.hot.by_key[lost.key])
    assert house.plan([*tokens[:210], 9999])[0] < 200
    house.close()


def test_a_tail_with_an_edge_stays_when_it_is_covered(make: Make) -> None:
    house = make()
    tokens = list(range(256))
    house.put(tokens[:100], {100: "system"})
    house.put(tokens, {256: "prompt"})
    house.cache.write(everything=True)
    for _ in ("hot", "warm"):
        assert house.plan([*tokens[:120], 9999])[:2] == (100, 120)
        house.reopen()
    house.put(tokens[:110], {110: "turn"})  # it is covered already
    assert house.plan([*tokens[:120], 9999])[0] == 110
    house.close()


def test_state_comes_back_as_it_was(make: Make) -> None:
    house = make()
    tokens = list(range(300))
    house.put(tokens, {300: "prompt"})
    house.reopen()
    states = house.restore([*tokens, 1])
    assert [tier for tier, _ in states] == ["warm"] * 6
    assert states[-1][1] != states[-2][1]
    lease = house.cache.lookup(house.namespace, to_le(tokens), limit=300, exact=False, load=False)
    assert states[-1][1] == payload_of(lease.plan[-1].key, 700)[:700]
    house.close()


@pytest.mark.parametrize("window", [0, 64])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_growing_chat_keeps_the_edges_of_its_last_turns(make: Make, window: int, restarts: bool) -> None:
    house = make(window)
    tokens = list(range(130))
    house.put(tokens, {130: "system"})
    for turn in range(1, 16):
        tokens = list(range(130 + turn * 70))
        house.put(tokens, {len(tokens): "prompt"})
        if restarts:
            house.cache.write(everything=True)
            house.reopen()
    house.cache.write(everything=True)
    ends = set()
    for end in range(131, len(tokens) + 2):
        ends.add(house.plan([*tokens[: end - 1], 99999])[0])
    ends.discard(0)
    assert {130, *(130 + 70 * turn for turn in range(16 - KEPT, 16))} <= ends
    assert len(ends) <= 3 * (KEPT + 1) if window else len(ends) == KEPT + 1
    with house.cache.view() as (_tables, warm):
        assert warm is not None
        edges = [node for node in warm.subtree(house.namespace) if node.is_edge]
    assert len(edges) <= 1.5 * (KEPT + 1) * (1 + bool(window))
    house.close()


class Chat:
    """One that grows turn by turn. `strips`: its template renders replies without the thoughts they begin with."""

    def __init__(self, house: EdgeHouse, seed: int, *, strips: bool) -> None:
        self.house, self.strips = house, strips
        self.random = random.Random(seed)
        self.prompt: list[int] = []
        self.replies: list[list[int]] = []

    def some(self, count: int) -> list[int]:
        return [self.random.randrange(1000, 30_000) for _ in range(count)]

    def begin(self, tokens: list[int]) -> list[int]:
        """A prompt whose first 130 tokens are the system message."""
        self.prompt = tokens
        self.house.put(tokens, {130: "system", len(tokens): "prompt"})
        return self.reply()

    def reply(self, visible: int = 50) -> list[int]:
        """The path to the end of another reply to the prompt."""
        reply = [*self.prompt, *self.some(60), *self.some(visible)]
        self.house.put(reply, {len(reply): "reply"}, prompt=len(self.prompt))
        self.replies.append(reply)
        return reply

    def turn(self, reply: list[int] | None = None, visible: int = 50) -> list[int]:
        """Go on from this reply, else from the last one."""
        reply = self.replies[-1] if reply is None else reply
        rendered = [*self.prompt, *reply[-visible:]] if self.strips else reply
        self.prompt = [*rendered, *self.some(70)]
        self.house.put(self.prompt, {len(rendered): "turn", len(self.prompt): "prompt"})
        return self.reply(visible)

    def finds(self, reply: list[int]) -> bool:
        """Whether what comes behind this reply can be gone on from it."""
        return self.house.plan([*reply, *range(9)])[0] == len(reply)


@pytest.mark.parametrize("window", [0, 64])
@pytest.mark.parametrize("restarts", [False, True])
def test_replies_that_a_chat_has_left_keep_no_edges(make: Make, window: int, restarts: bool) -> None:
    """Each turn's prompt has the last reply without its thoughts, so that its state is gone on from by nobody."""
    house = make(window)
    chat = Chat(house, 1, strips=True)
    chat.begin(list(range(200)))
    for turn in range(14):
        chat.turn(visible=20 + 3 * turn)
        if restarts:
            house.cache.write(everything=True)
            house.reopen()
    house.cache.write(everything=True)
    ends = [chat.finds(reply) for reply in chat.replies]
    assert ends[-2:] == [True, True]
    assert sum(ends) <= 3  # its first reply is found by what its next prompts share
    with house.cache.view() as (_tables, warm):
        assert warm is not None
        edges = [node for node in warm.subtree(house.namespace) if node.is_edge]
    # of the beginning, and of the last two turns two of the prompt and a reply; those of a window in two or three nodes
    assert len(edges) <= 1.5 * (1 + 2 * 3) * (1 + bool(window))
    house.close()


@pytest.mark.parametrize("window", [0, 64])
@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("newer", [False, True])
def test_another_chats_reply_stays(make: Make, window: int, strips: bool, newer: bool) -> None:
    """Two chats with the same first message: one waits while the other one goes on."""
    house = make(window)
    first, second = Chat(house, 1, strips=strips), Chat(house, 2, strips=strips)
    if newer:
        first.begin(list(range(200)))
        waits = second.begin(list(range(200)))
    else:
        waits = second.begin(list(range(200)))
        first.begin(list(range(200)))
    left = first.replies[0]
    for _ in range(6):
        first.turn()
        assert second.finds(waits)
    assert not first.finds(left)
    house.cache.write(everything=True)
    house.reopen()
    assert second.finds(waits)
    second.turn(waits)
    second.turn()
    house.close()


@pytest.mark.parametrize("window", [0, 64])
@pytest.mark.parametrize("strips", [False, True])
def test_of_replies_to_one_prompt_the_one_that_went_on_is_left(make: Make, window: int, strips: bool) -> None:
    """With `n`, or when one is made anew: another one stays, also where it says nearly the same."""
    house = make(window)
    chat = Chat(house, 3, strips=strips)
    chosen = chat.begin(list(range(200)))
    other = chat.reply()
    alike = [*chosen[:200], *chat.some(40), *chosen[-40:-5], *chat.some(5)]
    house.put(alike, {len(alike): "reply"}, prompt=200)
    shared = [*chosen[:270], *chat.some(60)]  # their first block is the same
    house.put(shared, {len(shared): "reply"}, prompt=200)
    chat.turn(chosen)
    for _ in range(4):
        chat.turn()
    assert [chat.finds(reply) for reply in (chosen, other, alike, shared)] == [False, True, True, True]
    house.close()


@pytest.mark.parametrize("strips", [False, True])
def test_all_of_n_replies_are_gone_on_from(make: Make, strips: bool) -> None:
    house = make()
    chats = [Chat(house, seed, strips=strips) for seed in range(3)]
    begun = [chat.begin(list(range(200))) for chat in chats]
    for number, chat in enumerate(chats):
        assert [other.finds(reply) for other, reply in zip(chats, begun, strict=True)][number:] == [True] * (3 - number)
        for _ in range(4):
            chat.turn()
    house.close()


def test_a_left_reply_stays_for_two_turns_and_while_somebody_may_need_it(make: Make) -> None:
    def gone_on(chat: Chat, then: Callable[[list[int]], object] = lambda reply: None) -> list[bool]:
        reply = chat.begin(list(range(200)))
        then(reply)
        found = [chat.finds(reply)]
        for _ in range(3):
            chat.turn()
            found.append(chat.finds(reply))
        return found

    house = make()
    assert gone_on(Chat(house, 1, strips=True)) == [True, True, False, False]
    assert gone_on(Chat(house, 2, strips=True), lambda reply: pin(house, [*reply, 1])) == [True] * 4
    twice = Chat(house, 3, strips=True)
    assert gone_on(twice, lambda reply: [house.restore([*reply, 1]) for _ in range(2)]) == [True] * 4
    held = house.cache.session()

    def lease(reply: list[int]) -> object:
        return house.cache.lookup(
            house.namespace, to_le([*reply, 1]), limit=1 << 30, exact=False, load=True, session=held
        )

    assert gone_on(Chat(house, 4, strips=True), lease) == [True] * 4
    held.close()
    empty = Chat(house, 5, strips=True)  # nothing but thoughts: nothing tells whose it was
    reply = empty.begin(list(range(200)))
    empty.turn(visible=2)
    empty.turn()
    empty.turn()
    assert empty.finds(reply)
    house.close()


@pytest.mark.parametrize("used", [False, True])
def test_what_becomes_superfluous_while_it_is_written_goes_then(
    make: Make, monkeypatch: pytest.MonkeyPatch, used: bool
) -> None:
    house = make()
    chat = Chat(house, 1, strips=True)
    reply = chat.begin(list(range(200)))
    chat.turn()
    disk = house.cache.disk
    assert disk is not None
    store, thinned = disk.store, house.cache.counters.thinned

    def slow(*args: Any) -> Any:
        monkeypatch.setattr(disk, "store", store)
        chat.turn()
        assert chat.finds(reply)
        if used:
            house.restore([*reply, 1])
        return store(*args)

    monkeypatch.setattr(disk, "store", slow)
    house.cache.write(everything=True)
    assert chat.finds(reply) is used
    assert house.cache.counters.thinned > thinned
    house.cache.check_integrity()
    house.reopen()
    assert chat.finds(reply) is used
    house.close()


def test_a_reply_that_is_made_again_while_its_chat_goes_on_stays(make: Make) -> None:
    house = make()
    chat = Chat(house, 1, strips=True)
    chosen = chat.begin(list(range(200)))
    chat.turn()
    house.put(chosen, {len(chosen): "reply"}, prompt=200)
    chat.turn()
    chat.turn()
    assert chat.finds(chosen)
    house.close()


@pytest.mark.parametrize("window", [0, 512])
def test_little_is_looked_at_for_an_edge(make: Make, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much stands beside its path: it is done with the cache's lock held."""
    house = make(window, hot=64 << 20, warm=0)
    chat = Chat(house, 1, strips=True)
    chat.begin(list(range(200)))
    for _ in range(3):
        for _ in range(40):
            way = [*chat.prompt, *chat.some(500)]
            house.put(way, {}, size=200, prompt=len(chat.prompt))
        chat.turn()
    looked = [0]
    original = MemoryTable.children

    def children(table: MemoryTable, key: bytes) -> Iterator[Placed]:
        for child in original(table, key):
            looked[0] += 1
            yield child

    monkeypatch.setattr(MemoryTable, "children", children)
    most = 0
    thin = Committing._thin

    def counted(*args: Any) -> None:
        nonlocal most
        looked[0] = 0
        thin(*args)
        most = max(most, looked[0])

    monkeypatch.setattr(Committing, "_thin", counted)
    for _ in range(3):
        chat.turn()
    assert 0 < most < 300
    house.close()


def test_a_reply_that_is_gone_on_from_stays(make: Make) -> None:
    house = make()
    prompt = list(range(200))
    house.put(prompt, {200: "prompt"})
    other = [*prompt, *range(4000, 4050)]
    house.put(other, {250: "reply"}, prompt=200)
    onwards = [*other, *range(6000, 6040)]
    house.put(onwards, {290: "prompt"})
    path = [*prompt, *range(4010, 4050), *range(7000, 7060)]  # it looks as if that reply was left
    for end in range(300, 1000, 70):
        path = [*path, *range(10 * end, 10 * end + 70)]
        house.put(path, {len(path): "prompt"})
    assert house.plan([*onwards, 1])[0] == len(onwards)
    assert house.plan([*other, 1])[0] == len(other)
    house.close()


def test_an_edge_used_twice_stays(make: Make) -> None:
    house = make()
    tokens = list(range(1200))
    house.put(tokens[:200], {200: "prompt"})
    for _ in range(2):
        house.restore([*tokens[:200], 99999])
    for end in range(270, 1200, 70):
        house.put(tokens[:end], {end: "prompt"})
    assert house.plan([*tokens[:201], 99999])[0] == 200
    assert house.plan([*tokens[:271], 99999])[0] == 200
    house.close()


def test_what_a_branch_needs_of_a_window_stays(make: Make) -> None:
    house = make(64)
    tokens = list(range(1200))
    other = [*tokens[:200], *range(5000, 5040)]
    house.put(other, {len(other): "prompt"})
    for end in range(270, 1200, 70):
        house.put(tokens[:end], {end: "prompt"})
    assert house.plan([*other, 1])[0] == len(other)
    house.close()


def test_edges_go_before_their_nodes_and_nothing_wrong_is_left(make: Make) -> None:
    house = make(hot=1 << 19, warm=1 << 20)
    for number in range(60):
        tokens = [number * 1000 + i for i in range(300)]
        house.put(tokens, {100: "system", 300: "prompt"}, size=6000, edge=9000)
        house.cache.write(everything=True)
        house.cache.check_integrity()
        used, known, _plan = house.plan([*tokens, 1])
        assert used in (0, 100, 256, 300)
        assert used <= known
    assert house.cache.counters.evicted_warm > 0
    assert house.plan([*tokens, 1])[0] == 300
    house.reopen()
    assert house.plan([*tokens, 1])[0] == 300
    house.close()


def test_a_prefix_is_listed_once_and_purged_with_its_edges(make: Make) -> None:
    house = make()
    tokens = list(range(300))
    house.put(tokens, {100: "system", 256: "turn", 300: "prompt"})
    for _ in ("hot", "warm"):
        found, _total = prefixes(house.cache, limit=10)
        assert sorted(prefix.tokens for prefix in found) == [300]
        house.reopen()
    [whole] = [prefix for prefix in found if prefix.tokens == 300]
    purge(house.cache, everything=False, prefix=whole.id, older_than=0.0, model="", now=house.now)
    assert house.plan([*tokens, 1])[0] <= 100
    house.cache.check_integrity()
    house.close()


def pin(house: EdgeHouse, tokens: Sequence[int]) -> int:
    """Pin a prompt; the tokens that are pinned."""
    [made] = house.cache.pins.pin(Pin(0, house.namespace, to_le(tokens)))
    return made.tokens


@pytest.mark.parametrize("window", [0, 100])
def test_a_pinned_prefix_can_be_gone_on_from(make: Make, window: int) -> None:
    """Whatever is stored besides, and after a restart; without the pin it cannot."""
    for pinned in (False, True):
        house = make(window, hot=1 << 19, warm=1 << 20)
        prompt = [900_000 + pinned * 1000 + i for i in range(300)]
        house.put(prompt, {200: "prompt", 290: "turn"}, size=6000, edge=9000)
        if pinned:
            assert pin(house, [*prompt[:280], 5, 6]) == (256 if window else 200)
        for number in range(60):
            tokens = [number * 1000 + i for i in range(300)]
            house.put(tokens, {100: "system", 300: "prompt"}, size=6000, edge=9000)
            house.cache.write(everything=True)
            house.cache.check_integrity()
        assert house.cache.counters.evicted_warm > 100
        for _ in range(2):
            assert house.plan([*prompt[:280], 1])[0] == (0 if not pinned else 256 if window else 200)
            house.reopen()
        house.close()


def test_a_pinned_edge_is_not_superfluous(make: Make) -> None:
    house = make()
    tokens = list(range(1200))
    house.put(tokens[:200], {200: "prompt"})
    pin(house, tokens[:201])
    for end in range(270, 1200, 70):
        house.put(tokens[:end], {end: "prompt"})
    assert house.plan([*tokens[:201], 99999])[0] == 200
    assert house.plan([*tokens[:271], 99999])[0] == 200
    assert len(house.cache.pins.unpin(Unpin(0, house.namespace, to_le(tokens[:201])))) == 1
    house.close()


@pytest.mark.parametrize("window", [0, 100])
class TestPinsInPart:
    """What is said to be kept can be gone on from, and nothing else is kept."""

    def house(self, make: Make, window: int) -> EdgeHouse:
        return make(window, hot=8 << 20, warm=1 << 20)

    def prompt(self, house: EdgeHouse, number: int, length: int = 900) -> list[int]:
        """Answered with one token: gone on from before its last token, and behind it."""
        tokens = [number * 1000 + i for i in range(length)]
        house.put(tokens, {length // 3: "system", length - 1: "prompt", length: "reply"}, size=9000, edge=30_000)
        return tokens

    def reusable(self, house: EdgeHouse, tokens: list[int]) -> tuple[int, int]:
        """From where the same prompt, and a longer one, are gone on from."""
        return house.plan(tokens, limit=len(tokens) - 1)[0], house.plan([*tokens, 1])[0]

    def check(self, house: EdgeHouse, made: Sequence[PinInfo], prompts: list[list[int]]) -> None:
        for one, tokens in zip(made, prompts, strict=True):
            own, longer = self.reusable(house, tokens)
            assert own >= min(one.kept, len(tokens) - 1)
            assert longer >= one.kept
            assert bool(one.not_kept) == (one.kept < one.tokens)

    @pytest.mark.parametrize("length", [900, 896, 897])
    def test_what_is_answered_is_reusable(self, make: Make, window: int, length: int) -> None:
        """After a restart, whatever came since; for the same prompt and a longer one."""
        house = self.house(make, window)
        prompts, made = [], []
        for number in range(8):
            prompts.append(self.prompt(house, number, length))
            [one] = house.cache.pins.pin(Pin(0, house.namespace, to_le(prompts[-1]), label=str(number)))
            made.append(one)
            house.cache.write(everything=True)
        assert [made[0].kept, made[1].kept] == [length, length]
        assert min(one.kept for one in made) < length
        for _ in range(2):
            house.reopen()
            self.check(house, made, prompts)
            listed = house.cache.pins.pin(Pin(0))
            assert [one.kept for one in listed] == [one.kept for one in made]
            self.check(house, listed, prompts)
            for number in range(100, 115):
                self.prompt(house, number)
                house.cache.write(everything=True)
            assert house.cache.counters.evicted_warm + house.cache.counters.dropped_nodes > 20
            house.cache.check_integrity()
        house.close()

    def test_the_last_point_that_fits_is_kept(self, make: Make, window: int) -> None:
        house = self.house(make, window)
        tokens = [7 * i for i in range(9000)]
        house.put(tokens, {2000: "system", 9000: "prompt"}, size=14_000, edge=30_000)
        [made] = house.cache.pins.pin(Pin(0, house.namespace, to_le(tokens)))
        assert made.kept == (2048 if window else 2000)  # the block behind it has all that is needed, too
        assert "does not fit" in made.not_kept
        house.reopen()
        assert house.plan([*tokens, 1])[0] == made.kept
        for number in range(20):
            self.prompt(house, number)
            house.cache.write(everything=True)
        used, known, _plan = house.plan([*tokens, 1])
        assert used == made.kept
        assert known < 2100  # nothing of what is of no use takes room
        house.close()

    def test_what_is_of_no_use_is_not_kept(self, make: Make, window: int) -> None:
        """It holds none of the room of what comes."""
        house = self.house(make, window)
        tokens = [7 * i for i in range(9000)]
        house.put(tokens, {9000: "prompt"}, size=14_000, edge=30_000)
        [made] = house.cache.pins.pin(Pin(0, house.namespace, to_le(tokens)))
        assert made.kept == 0
        assert made.not_kept
        second = self.prompt(house, 900_000)
        [made] = house.cache.pins.pin(Pin(0, house.namespace, to_le(second)))
        assert made.kept == 900
        house.reopen()
        assert self.reusable(house, second) == (899, 900)
        assert [one.kept for one in house.cache.pins.pin(Pin(0))] == [0, 900]
        house.close()

    def test_what_is_in_memory_of_it_is_written_when_there_is_room(self, make: Make, window: int) -> None:
        house = make(window, hot=8 << 20, warm=4 << 20)
        house.cache.resize(1 << 20)
        tokens = [7 * i for i in range(9000)]
        house.put(tokens, {2000: "system", 7000: "turn", 9000: "prompt"}, size=14_000, edge=30_000)
        house.cache.pins.pin(Pin(0, house.namespace, to_le(tokens)))
        for hot in sorted(house.cache.hot.by_key.values(), key=lambda hot: -hot.node.end):  # its end leaves RAM
            if hot.node.record.start >= 7000 + hot.node.is_edge:
                house.cache.forget_hot(hot)
        assert house.plan([*tokens, 1])[0] == 7000
        house.cache.resize(4 << 20)
        house.cache.write(everything=True)
        assert house.cache.pins.pin(Pin(0))[0].kept == 7000
        house.reopen()
        assert house.plan([*tokens, 1])[0] == 7000
        house.close()

    def test_the_one_that_is_named_is_unpinned(self, make: Make, window: int) -> None:
        house = make(window)
        document = list(range(900))
        for end in (300, 900):
            house.put(document[:end], {end - 1: "prompt", end: "reply"})
            house.cache.pins.pin(Pin(0, house.namespace, to_le(document[:end]), label=str(end)))
        for end in (200, 299, 400, 899):
            with pytest.raises(NotFoundError):
                house.cache.pins.unpin(Unpin(0, house.namespace, to_le(document[:end])))
        [gone] = house.cache.pins.unpin(Unpin(0, house.namespace, to_le(document)))
        assert gone.label == "900"
        house.cache.recent.note("r", house.namespace, to_le(document[:300]))
        assert [one.label for one in house.cache.pins.unpin(Unpin(0, request="r"))] == ["300"]
        house.close()

    def test_named_by_its_id_it_is_still_that_prompts(self, make: Make, window: int) -> None:
        house = make(window)
        tokens = list(range(900))
        house.put(tokens[:899], {100: "system", 899: "prompt"})
        [made] = house.cache.pins.pin(Pin(0, house.namespace, to_le(tokens), label="first"))
        [again] = house.cache.pins.pin(Pin(0, prefix=made.id, label="second"))
        assert (again.id, again.tokens, again.kept) == (made.id, made.tokens, made.kept)
        [gone] = house.cache.pins.unpin(Unpin(0, house.namespace, to_le(tokens)))
        assert gone.label == "second"
        house.close()

    def test_those_of_a_version_before_are_unpinned_by_their_prompt(self, make: Make, window: int) -> None:
        """Their rows say neither which prompt it was, nor which one they are for where several end alike."""
        house = make(window)
        tokens = list(range(900))
        house.put(tokens, {100: "system", 899: "prompt"})
        pins = house.cache.pins
        for end in (100, 899):
            pins.pin(Pin(0, house.namespace, to_le(tokens[:end]), label=str(end)))
        for place, row in list(pins.rows.items()):
            pins._put(place, msgspec.structs.replace(row, asked=b"", own=0, tails=b""))
        house.reopen()
        pins = house.cache.pins
        with pytest.raises(NotFoundError):
            pins.unpin(Unpin(0, house.namespace, to_le(tokens[:500])))
        [gone] = pins.unpin(Unpin(0, house.namespace, to_le(tokens)))
        assert gone.label == "899"
        [left] = pins.unpin(Unpin(0, house.namespace, to_le(tokens[:101])))
        assert left.label == "100"
        house.close()


@pytest.mark.parametrize("window", [0, 100])
def test_a_prefix_with_edges_is_carried_to_another_store(make: Make, tmp_path: Path, window: int) -> None:
    house = make(window)
    prompt = list(range(300))
    house.put(prompt, {130: "system", 290: "prompt"})
    carried = io.BytesIO()
    done = export(house.cache, house.session, carried, namespace=house.namespace, tokens=to_le(prompt), prefix="")
    assert done.tokens == 290
    [listed] = prefixes(house.cache, limit=10)[0]
    again = io.BytesIO()
    export(house.cache, house.session, again, namespace=b"", tokens=b"", prefix=listed.id)
    assert again.getvalue() == carried.getvalue()
    states = house.restore([*prompt[:290], 7])
    house.close()
    (tmp_path / "other").mkdir()
    other: EdgeHouse = type(house)(tmp_path / "other")
    carried.seek(0)
    taken = import_(other.cache, other.session, carried, other.cache.write_path)
    assert (taken.nodes, taken.tokens) == (done.nodes, 290)
    assert (taken.kept, taken.not_kept) == (290, "")
    assert other.plan([*prompt, 1])[0] == 290
    assert [state for _, state in other.restore([*prompt[:290], 7])] == [state for _, state in states]
    other.cache.check_integrity()
    other.reopen()
    assert other.plan([*prompt, 1])[0] == 290
    other.close()
    carried.seek(0)
    plain = House(tmp_path / "plain")
    with pytest.raises(RequestError, match="no model here can use"):
        import_(plain.cache, plain.session, carried, plain.cache.write_path)
    plain.close()

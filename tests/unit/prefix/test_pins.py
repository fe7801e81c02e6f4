"""Pins: what is pinned stays on disk, through evictions, restarts and longer prompts, until it is unpinned."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from prefix_testing import DESCRIPTION, MIB, House, Store, Worker

from homeprefixd.errors import NotFoundError, RequestError, UnavailableError
from homeprefixd.frames import store as frames
from homeprefixd.frames.store import Pin, PinInfo, Unpin
from homeprefixd.prefix import listing
from homeprefixd.prefix.arena import pages
from homeprefixd.prefix.blocks import to_le
from homeprefixd.prefix.client import AdminClient
from homeprefixd.prefix.purge import purge

SIZE = 400_000  # of a block; half of it as stored
PINNED = [*range(64), *range(64), 7, 8, 9]  # two blocks and a tail


def pin(house: House, tokens: list[int], label: str = "", ttl: float = 0.0) -> PinInfo:
    [made] = house.cache.pins.pin(Pin(0, house.namespace, to_le(tokens), label=label, ttl=ttl))
    return made


def unpin(house: House, tokens: list[int]) -> list[str]:
    """By its prompt; the labels of what was removed."""
    return [one.label for one in house.cache.pins.unpin(Unpin(0, house.namespace, to_le(tokens)))]


def fill(house: House, prompts: range) -> None:
    """More than fits, each used thrice."""
    for number in prompts:
        tokens = [1000 + number] * 64
        house.save(tokens, SIZE)
        house.cache.write(everything=True)
        house.restore(tokens)
        house.restore(tokens)
        house.cache.write(everything=True)


def pinned_house(make: Callable[..., House], **sizes: int) -> House:
    house = make(**{"hot": 4 * MIB, "warm": 8 * MIB, **sizes})
    house.save(PINNED, SIZE)
    house.cache.write(everything=True)
    return house


def test_without_a_pin_it_would_go(make: Callable[..., House]) -> None:
    house = pinned_house(make)
    fill(house, range(60))
    assert house.known(PINNED) == 0


def test_it_stays_whatever_comes_and_after_restarts(make: Callable[..., House]) -> None:
    house = pinned_house(make)
    made = pin(house, PINNED, "house")
    assert (made.tokens, made.label, made.tiers, made.expires) == (131, "house", ["hot", "warm"], 0.0)
    for begin in (0, 100, 200):
        fill(house, range(begin, begin + 60))
        assert house.known(PINNED) == len(PINNED)
        assert house.cache.counters.evicted_warm > 20
        house.reopen()
        assert house.known(PINNED) == len(PINNED)
    assert [p.label for p in house.cache.pins.pin(Pin(0))] == ["house"]
    assert house.cache.disk is not None
    assert house.cache.disk.used() <= 8 * MIB


def test_unpinned_it_goes(make: Callable[..., House]) -> None:
    house = pinned_house(make)
    pin(house, PINNED, "house")
    house.reopen()
    assert len(house.cache.pins.unpin(Unpin(0, label="house"))) == 1
    house.reopen()
    assert house.cache.pins.pin(Pin(0)) == []
    fill(house, range(60))
    assert house.known(PINNED) == 0


def test_it_is_kept_for_as_long_as_was_said(make: Callable[..., House]) -> None:
    house = pinned_house(make)
    pin(house, PINNED, ttl=10_000.0)
    fill(house, range(60))
    assert house.known(PINNED) == len(PINNED)
    house.now += 10_000.0
    fill(house, range(100, 160))
    assert house.known(PINNED) == 0
    assert not house.cache.pins.rows


def test_the_node_that_takes_its_place_is_held(make: Callable[..., House]) -> None:
    """The tail of a pinned prompt is covered by a longer one when the prompt is answered."""
    house = pinned_house(make)
    pin(house, PINNED)
    house.save([*PINNED, 100, 101], SIZE)
    house.cache.write(everything=True)
    assert house.cache.disk is not None
    assert house.cache.disk.nodes() == 3
    fill(house, range(60))
    assert house.known([*PINNED, 100, 101]) == len(PINNED) + 2


def test_a_part_of_a_node_is_pinned(make: Callable[..., House]) -> None:
    house = pinned_house(make)
    made = pin(house, [*PINNED[:100], 5, 5, 5])
    assert made.tokens == 100
    fill(house, range(60))
    assert house.known(PINNED) >= 128
    assert len(house.cache.pins.unpin(Unpin(0, house.namespace, to_le(PINNED[:100])))) == 1


def test_by_id_and_by_request(make: Callable[..., House]) -> None:
    house = pinned_house(make)
    key = house.save(PINNED, SIZE)[-1]
    house.cache.recent.note("chatcmpl-1", house.namespace, to_le(PINNED))
    [one] = house.cache.pins.pin(Pin(0, prefix=key.hex()[:16]))
    [two] = house.cache.pins.pin(Pin(0, request="chatcmpl-1", label="again"))
    assert one.id == two.id == key.hex()[:16]
    assert len(house.cache.pins.rows) == 1  # the same place, called otherwise now
    with pytest.raises(NotFoundError, match="no request"):
        house.cache.pins.pin(Pin(0, request="chatcmpl-2"))
    with pytest.raises(NotFoundError, match="no prefix"):
        house.cache.pins.pin(Pin(0, prefix="ffffffff"))
    assert len(house.cache.pins.unpin(Unpin(0, request="chatcmpl-1"))) == 1


@pytest.mark.parametrize("how", ["prompt", "request", "prefix"])
@pytest.mark.parametrize("end", [100, 128])
@pytest.mark.parametrize("restarts", [False, True])
def test_of_pins_on_one_path_the_one_that_is_named_goes(
    make: Callable[..., House], how: str, end: int, restarts: bool
) -> None:
    """Not those of what comes before it, nor of what comes after."""
    house = pinned_house(make)
    policy, document, longer = LONG[:end], LONG[:300], LONG[:500]
    for tokens, label in ((policy, "policy"), (document, "document"), (longer, "longer")):
        house.save(tokens, SIZE)
        house.cache.write(everything=True)
        pin(house, tokens, label)
    if restarts:
        house.reopen()
    house.cache.recent.note("chatcmpl-1", house.namespace, to_le(document))
    ids = {one.label: one.id for one in house.cache.pins.pin(Pin(0))}
    named = {
        "prompt": Unpin(0, house.namespace, to_le(document)),
        "request": Unpin(0, request="chatcmpl-1"),
        "prefix": Unpin(0, prefix=ids["document"]),
    }[how]
    assert [one.label for one in house.cache.pins.unpin(named)] == ["document"]
    assert [one.label for one in house.cache.pins.pin(Pin(0))] == ["policy", "longer"]
    for stored in (LONG[:200], LONG[:400], [*longer, 7], [*policy, 7]):
        with pytest.raises(NotFoundError):
            unpin(house, stored)
    assert unpin(house, policy) == ["policy"]


def test_a_prompt_of_which_a_part_was_stored_is_unpinned_by_itself(make: Callable[..., House]) -> None:
    house = pinned_house(make)
    asked = [*PINNED[:100], 5, 5, 5]
    pin(house, asked, "asked")
    house.reopen()
    with pytest.raises(NotFoundError):
        unpin(house, asked[:-1])
    assert unpin(house, asked) == ["asked"]


def test_what_was_given_up_whole_is_unpinned_by_its_prompt(make: Callable[..., House]) -> None:
    house = make(hot=24 * MIB, warm=8 * MIB, daily_writes=1)
    house.save([9] * 64, SIZE)
    house.cache.write(everything=True)
    house.save(LONG, SIZE)
    assert pin(house, LONG, "long").kept == 0
    house.reopen()
    with pytest.raises(NotFoundError):
        unpin(house, [*LONG, 1])
    assert unpin(house, LONG) == ["long"]


def test_what_cannot_be_pinned(make: Callable[..., House]) -> None:
    house = pinned_house(make)
    with pytest.raises(NotFoundError, match="nothing of this prompt is stored"):
        pin(house, [5000] * 64)
    with pytest.raises(RequestError):
        pin(house, PINNED, "x" * 201)
    with pytest.raises(NotFoundError):
        house.cache.pins.unpin(Unpin(0, label="nobody"))
    without = make(warm=0)
    without.save(PINNED, 1000)
    with pytest.raises(UnavailableError, match="kept on disk"):
        pin(without, PINNED)


def test_a_purge_takes_pins_too(make: Callable[..., House]) -> None:
    """A pin's row holds tokens of its prompt: they must go with it."""
    house = pinned_house(make)
    pin(house, PINNED)
    purge(house.cache, everything=True, now=house.now)
    assert house.known(PINNED) == 0
    house.reopen()
    assert not house.cache.pins.rows
    assert house.cache.disk is not None
    assert house.cache.disk.pin_rows() == []


def test_new_blocks_do_not_displace_it_but_a_smaller_budget_does(
    make: Callable[..., House], caplog: pytest.LogCaptureFixture
) -> None:
    house = make(hot=32 * MIB, warm=8 * MIB)
    prompts = [[2000 + number] * 64 for number in range(60)]
    for tokens in prompts:
        house.save(tokens, SIZE)
        house.cache.write(everything=True)
        pin(house, tokens)
    there = sum(house.cache.is_stored(house.namespace + to_be(tokens)) for tokens in prompts)
    assert 25 < there < 60  # those for which there was no more room are in RAM only
    assert house.cache.counters.evicted_warm == 0
    assert house.cache.disk is not None
    house.cache.resize(2 * MIB)
    house.cache.write(everything=True)
    assert house.cache.disk.used() <= 2 * MIB
    assert house.cache.pins.given_up > 0
    assert sum("pinned prefixes are evicted" in record.message for record in caplog.records) == 1


def test_a_pin_that_does_not_fit(make: Callable[..., House], caplog: pytest.LogCaptureFixture) -> None:
    """The answer says how much of it is kept, and the figures that the rest went."""
    house = make(hot=24 * MIB, warm=8 * MIB)
    for number in range(20):
        house.save([2000 + number] * 64, SIZE)
        made = pin(house, [2000 + number] * 64)
        assert (made.kept, made.not_kept, made.tiers) == (64, "", ["hot", "warm"])
    long = [number for number in range(3000, 3020) for _ in range(64)]
    house.save(long, SIZE)
    made = pin(house, long)
    assert (made.tokens, made.tiers) == (len(long), ["hot", "warm"])
    assert 0 < made.kept < len(long)
    assert "does not fit into `cache.warm`" in made.not_kept
    assert house.cache.is_stored(house.namespace + to_be(long[:64]))
    house.cache.write(everything=True)
    [again] = [one for one in house.cache.pins.pin(Pin(0)) if one.tokens == len(long)]
    assert (again.kept, again.not_kept) == (made.kept, made.not_kept)
    assert house.cache.pins.given_up == 0
    for number in range(80):
        house.save([9000 + number] * 64, SIZE)
    assert house.known(long) == made.kept
    assert house.cache.pins.given_up == 1  # its end: the blocks before it are nobody's by then
    assert sum("a pinned prefix went from memory" in record.message for record in caplog.records) == 1
    assert listing.stats(house.cache, store_id="", uptime=0)["pins"]["given_up"] == 1
    for _time in range(2):  # what is kept of it is kept, whatever comes, after a restart too
        fill(house, range(60))
        [left] = [one for one in house.cache.pins.pin(Pin(0)) if one.tokens == len(long)]
        assert left.kept == made.kept
        assert "the rest is in memory no longer" in left.not_kept
        house.reopen()
    assert house.known(long) == made.kept


def test_it_fits_later(make: Callable[..., House]) -> None:
    """As soon as there is room, by a larger budget or as another pin goes, what is pinned and in RAM is written."""
    house = make(hot=24 * MIB, warm=8 * MIB)
    disk = house.cache.disk
    assert disk is not None
    prompts = [[2000 + number] * 64 for number in range(10)]
    house.cache.resize(2 * MIB)
    for tokens in prompts:
        house.save(tokens, SIZE)
        pin(house, tokens, label=f"number {tokens[0]}")
    house.cache.write(everything=True)

    def missing() -> list[str]:
        return [one.label for one in house.cache.pins.pin(Pin(0)) if one.not_kept]

    before = missing()
    assert 2 < len(before) < 9
    house.cache.pins.unpin(Unpin(0, label=next(f"number {t[0]}" for t in prompts if f"number {t[0]}" not in before)))
    house.cache.write(everything=True)
    assert len(missing()) == len(before) - 1
    house.cache.resize(8 * MIB)
    house.cache.write(everything=True)
    assert missing() == []
    house.cache.check_integrity()


def test_it_fits_later_though_little_may_wait(make: Callable[..., House]) -> None:
    """What is in RAM only and does not fit into the queue waits for room in it."""
    house = make(hot=24 * MIB, warm=8 * MIB, write_queue=2 * MIB)
    long = [number for number in range(3000, 3020) for _ in range(64)]
    house.cache.resize(2 * MIB)
    for end in range(64, len(long) + 1, 64):
        house.save(long[:end], SIZE, skip=end // 64 - 1)
        house.cache.write(everything=True)
    assert pin(house, long).not_kept
    house.cache.resize(8 * MIB)
    house.cache.write(everything=True)
    [made] = house.cache.pins.pin(Pin(0))
    assert (made.kept, made.not_kept) == (len(long), "")


def to_be(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "big") for token in tokens)


def test_lists_say_what_is_pinned(make: Callable[..., House]) -> None:
    house = pinned_house(make)
    pin(house, PINNED[:128], "rules")
    house.save([9] * 64, SIZE)
    found = {p.tokens: (p.pinned, p.labels) for p in listing.prefixes(house.cache, limit=10)[0]}
    assert found == {131: (128, ["rules"]), 64: (0, [])}
    assert listing.stats(house.cache, store_id="", uptime=0)["pins"] == {"count": 1, "given_up": 0}


def test_a_store_of_before_there_were_pins(make: Callable[..., House]) -> None:
    """It opens, also for reading only."""
    house = pinned_house(make)
    assert house.cache.disk is not None
    env = house.cache.disk._env
    with env.begin(write=True) as txn:
        txn.drop(env.open_db(b"pins", txn=txn), delete=True)
    house.close()
    with AdminClient.start(house.directory) as client:
        assert client.stats()["pins"]["count"] == 0
    house.open()
    assert pin(house, PINNED).tokens == 131


def test_a_real_store(
    start_store: Callable[..., Store], start_worker: Callable[[Store], Worker], tmp_path: object
) -> None:
    store = start_store(tmp_path)
    store.greet()
    worker = start_worker(store)
    worker.save(PINNED)
    lookup = worker.client.lookup(worker.namespace, to_le(PINNED), len(PINNED) - 1, exact=False, request="r1")
    assert lookup.wait_plan(10)
    lookup.release()
    reply = store.ask(Pin(5, request="r1", label="a"))
    assert (reply.ticket, reply.error, [p.tokens for p in reply.pins]) == (5, "", [131])
    reply = store.ask(Pin(6, prefix="zz"))
    assert (reply.kind, reply.pins) == ("NotFoundError", [])
    assert store.stats()["pins"]["count"] == 1
    plan = store.ask(frames.Match(7, worker.namespace, to_le(PINNED), 200, False, load=False))
    assert sum(node.use for node in plan.nodes) == 131
    store.stop()
    again = start_store(tmp_path)
    again.greet()
    [found] = again.ask(Pin(1)).pins
    assert (found.label, found.tokens, found.model) == ("a", 131, DESCRIPTION["model_sha256"][:12])


LONG = [number for number in range(3000, 3020) for _ in range(64)]  # 4 MB as stored


def written(house: House) -> int:
    """Nodes since the start."""
    return house.cache.counters.written_nodes


def crash(house: House) -> None:
    """The store process is gone at once, and starts again."""
    disk = house.cache.disk
    assert disk is not None
    house.session.close()
    disk.close()
    house.cache.arena.close()
    house.open()


class TestInPart:
    """Of a pin only the first blocks are on disk."""

    @pytest.mark.parametrize("why", ["daily_writes", "share", "budget"])
    @pytest.mark.parametrize("end", [House.reopen, crash])
    def test_what_was_answered_is_kept(
        self, make: Callable[..., House], why: str, end: Callable[[House], None]
    ) -> None:
        house = make(hot=24 * MIB, warm=8 * MIB, daily_writes=2 * MIB if why == "daily_writes" else 0)
        if why == "share":
            house.cache.set_shares({}, {"guest": 25})
        if why == "budget":
            house.cache.resize(3 * MIB)
        house.save(LONG, SIZE, owner="guest")
        made = pin(house, LONG)
        assert 0 < made.kept < len(LONG)
        house.daily_writes = 0
        for _time in range(2):
            end(house)
            if why == "share":
                house.cache.set_shares({}, {"guest": 25})
            [left] = house.cache.pins.pin(Pin(0))
            assert (left.kept, left.tokens) == (made.kept, len(LONG))
            assert "the rest is in memory no longer" in left.not_kept
            for number in range(60):
                house.save([5000 + number] * 64, SIZE, owner="guest")
                house.cache.write(everything=True)
            assert max(house.cache.counters.evicted_warm, house.cache.counters.over_share) > 20
            assert house.known(LONG) == made.kept

    def test_it_is_unpinned_by_its_prompt_though_its_end_is_not_there(self, make: Callable[..., House]) -> None:
        """Not by a shorter or a longer one."""
        house = make(hot=24 * MIB, warm=8 * MIB)
        house.cache.resize(3 * MIB)
        house.save(LONG, SIZE)
        pin(house, LONG)
        house.reopen()
        assert 0 < house.known(LONG) < len(LONG)
        for other in (LONG[:-1], [*LONG, *range(100)], LONG[:64]):
            with pytest.raises(NotFoundError):
                unpin(house, other)
        assert len(unpin(house, LONG)) == 1

    def test_the_rest_is_written_when_it_is_asked_again(self, make: Callable[..., House]) -> None:
        house = make(hot=24 * MIB, warm=8 * MIB)
        house.cache.resize(3 * MIB)
        house.save(LONG, SIZE)
        pin(house, LONG)
        house.reopen()
        house.save(LONG, SIZE)
        house.cache.write(everything=True)
        [made] = house.cache.pins.pin(Pin(0))
        assert (made.kept, made.not_kept) == (len(LONG), "")

    def test_a_smaller_budget_takes_it_from_its_end(self, make: Callable[..., House]) -> None:
        house = make(hot=24 * MIB, warm=8 * MIB)
        house.save(LONG, SIZE)
        assert pin(house, LONG).not_kept == ""
        house.reopen()
        house.cache.resize(2 * MIB)
        house.cache.write(everything=True)
        [left] = house.cache.pins.pin(Pin(0))
        assert left.kept == house.known(LONG) > 64

    def test_a_purge_of_something_else_leaves_it(self, make: Callable[..., House]) -> None:
        house = make(hot=24 * MIB, warm=8 * MIB, daily_writes=2 * MIB)
        house.save(LONG, SIZE)
        made = pin(house, LONG, "long")
        house.save([*LONG[:128], 1, 2, 3], SIZE)
        key = house.save([9] * 64, 1000)[-1]
        house.daily_writes = 0
        house.reopen()
        house.save([9] * 64, 1000)
        house.cache.write(everything=True)
        purge(house.cache, prefix=key.hex()[:16], now=house.now)
        [left] = house.cache.pins.pin(Pin(0))
        assert (left.label, left.kept) == ("long", made.kept)
        branch = house.save([*LONG[:128], 1, 2, 3], SIZE)[-1]
        house.cache.write(everything=True)
        purge(house.cache, prefix=branch.hex()[:16], now=house.now)
        assert house.cache.pins.pin(Pin(0))[0].kept == made.kept

    def test_a_purge_of_it_takes_it(self, make: Callable[..., House]) -> None:
        house = make(hot=24 * MIB, warm=8 * MIB, daily_writes=2 * MIB)
        keys = house.save(LONG, SIZE)
        made = pin(house, LONG)
        house.reopen()
        purge(house.cache, prefix=keys[made.kept // 64 - 1].hex()[:16], now=house.now)
        assert house.known(LONG) == 0
        assert house.cache.pins.pin(Pin(0)) == []

    def test_it_has_the_name_of_what_is_left(self, make: Callable[..., House]) -> None:
        house = make(hot=24 * MIB, warm=8 * MIB, daily_writes=2 * MIB)
        keys = house.save(LONG, SIZE)
        made = pin(house, LONG)
        house.reopen()
        [left] = house.cache.pins.pin(Pin(0))
        assert (left.id, left.tiers) == (keys[made.kept // 64 - 1].hex()[:16], ["warm"])
        assert len(house.cache.pins.unpin(Unpin(0, prefix=left.id))) == 1

    def test_what_was_given_up_whole_goes_with_everything(self, make: Callable[..., House]) -> None:
        """Its row holds tokens of its prompt."""
        house = make(hot=24 * MIB, warm=8 * MIB, daily_writes=1)
        house.save([9] * 64, SIZE)
        house.cache.write(everything=True)
        house.save(LONG, SIZE)
        assert pin(house, LONG).kept == 0
        house.reopen()
        purge(house.cache, everything=True, now=house.now)
        assert not house.cache.pins.rows

    def test_a_row_of_before(self, make: Callable[..., House]) -> None:
        """It names the last node that was on disk, or none."""
        house = make(hot=24 * MIB, warm=8 * MIB, daily_writes=2 * MIB)
        keys = house.save(LONG, SIZE)
        made = pin(house, LONG)
        [(place, row)] = house.cache.pins.rows.items()
        old = msgspec.structs.replace(row, path=keys[made.kept // 64 - 1])
        assert house.cache.disk is not None
        house.cache.disk.put_pin(place, msgspec.msgpack.encode(old))
        house.reopen()
        assert house.cache.pins.pin(Pin(0))[0].kept == made.kept


def test_a_purge_of_what_goes_on_leaves_what_is_pinned(make: Callable[..., House]) -> None:
    house = pinned_house(make)
    made = pin(house, PINNED[:128])
    key = house.save([*PINNED[:128], *range(64)], SIZE)[-1]
    house.cache.write(everything=True)
    for name in [key.hex()[:16], house.save(PINNED, SIZE)[-1].hex()[:16]]:
        purge(house.cache, prefix=name, now=house.now)
    [left] = house.cache.pins.pin(Pin(0))
    assert left.kept == made.kept == house.known(PINNED)


class TestWithoutItsEnd:
    """The end of a path leaves RAM first: what is there still is written once there is room."""

    def partly(self, make: Callable[..., House]) -> tuple[House, int]:
        """One pin that fills the store, and one of which all but the end is in RAM, as many tokens as returned."""
        house = make(hot=16 * MIB, warm=8 * MIB)
        house.cache.resize(3 * MIB)
        other = [token + 1000 for token in LONG[:640]]
        house.save(other, SIZE)
        pin(house, other, "other")
        house.save(LONG, SIZE)
        assert pin(house, LONG, "long").kept < 256
        number = 0
        while house.known(LONG) == len(LONG):
            house.save([9000 + number] * 64, SIZE)
            number += 1
        return house, house.known(LONG)

    def listed(self, house: House) -> PinInfo:
        return next(one for one in house.cache.pins.pin(Pin(0)) if one.label == "long")

    @pytest.mark.parametrize("room", ["unpin", "resize", "purge"])
    def test_what_is_in_memory_is_written(self, make: Callable[..., House], room: str) -> None:
        house, there = self.partly(make)
        one = self.listed(house)
        assert (one.kept < there, one.tiers) == (True, ["hot", "warm"])
        assert "does not fit" in one.not_kept
        assert "its end is in memory no longer" in one.not_kept
        if room == "unpin":
            house.cache.pins.unpin(Unpin(0, label="other"))
            house.cache.resize(6 * MIB)
        elif room == "resize":
            house.cache.resize(8 * MIB)
        else:
            house.cache.resize(6 * MIB)
            purge(house.cache, prefix=house.cache.pins.pin(Pin(0))[0].id, now=house.now)
        house.cache.write(everything=True)
        one = self.listed(house)
        assert one.kept == there
        assert "the rest is in memory no longer" in one.not_kept
        house.reopen()
        assert house.known(LONG) == there

    def test_nothing_of_it_on_disk(self, make: Callable[..., House]) -> None:
        house = make(hot=16 * MIB, warm=8 * MIB, daily_writes=1)
        house.save([9] * 64, SIZE)
        house.cache.write(everything=True)
        house.save(LONG, SIZE)
        pin(house, LONG, "long")
        for number in range(35):
            house.save([9000 + number] * 64, SIZE)
        there = house.known(LONG)
        assert 0 < there < len(LONG)
        one = self.listed(house)
        assert (one.kept, one.tiers) == (0, ["hot"])
        assert "`cache.daily_writes`" in one.not_kept
        house.cache.bound_writes(0)
        house.cache.write(everything=True)
        assert self.listed(house).kept == there


class TestWear:
    """Pins write themselves, and nothing else but what had no room before and has it now."""

    def small(self, house: House) -> list[int]:
        """A prompt on disk, in a store that is full, and smaller than what is in RAM."""
        fill(house, range(60))
        assert house.cache.counters.evicted_warm > 20
        return [1059] * 64

    def test_a_pin_of_what_is_on_disk_writes_nothing(self, make: Callable[..., House]) -> None:
        house = make(hot=24 * MIB, warm=4 * MIB)
        tokens = self.small(house)
        before, evicted = written(house), house.cache.counters.evicted_warm
        for _time in range(3):
            assert pin(house, tokens, "a").kept == 64
            house.cache.write(everything=True)
            house.cache.pins.unpin(Unpin(0, label="a"))
            house.cache.write(everything=True)
        assert (written(house), house.cache.counters.evicted_warm) == (before, evicted)

    def test_nor_where_another_node_has_it_in_memory(self, make: Callable[..., House]) -> None:
        house = make(hot=24 * MIB, warm=8 * MIB)
        house.save([5] * 64, SIZE)
        house.cache.write(everything=True)
        house.save([*[5] * 40, 1], SIZE)  # stands before it
        before = written(house)
        assert pin(house, [5] * 40).kept == 40
        assert written(house) == before

    def test_a_pin_in_full_writes_its_own(self, make: Callable[..., House]) -> None:
        house = make(hot=24 * MIB, warm=4 * MIB)
        self.small(house)
        gone = [1000] * 64  # evicted from disk, and in RAM still
        assert not house.cache.is_stored(house.namespace + to_be(gone))
        before = written(house)
        for _time in range(3):
            pin(house, gone)
            house.cache.write(everything=True)
        assert written(house) == before + 1

    def test_with_a_share_that_is_full(self, make: Callable[..., House]) -> None:
        house = make(hot=24 * MIB, warm=16 * MIB)
        house.cache.set_shares({}, {"guest": 25})
        house.save([1] * 64, SIZE)
        for number in range(60):
            house.save([1000 + number] * 64, SIZE, owner="guest")
            house.cache.write(everything=True)
        before = written(house)
        for _time in range(3):
            pin(house, [1] * 64, "a")
            house.cache.write(everything=True)
            house.cache.pins.unpin(Unpin(0, label="a"))
            house.cache.write(everything=True)
        assert written(house) == before

    def test_a_bound_that_goes_brings_back_nothing_that_was_evicted(self, make: Callable[..., House]) -> None:
        house = make(hot=24 * MIB, warm=8 * MIB, daily_writes=6 * MIB)
        for number in range(60):
            house.save([1000 + number] * 64, SIZE)
            house.cache.write(everything=True)
            house.now += 10
        assert house.cache.spares_disk
        there = written(house)
        house.cache.resize(3 * MIB)
        house.cache.write(everything=True)
        assert house.cache.counters.evicted_warm > 10
        house.cache.bound_writes(0)
        house.cache.write(everything=True)
        # those that were refused come, as far as they are worth it; those that went for the budget do not
        assert there < written(house) <= 60
        for _time in range(12):  # each comes once at most, and none for one that is worth more
            settled = written(house)
            house.cache.requeue()
            house.cache.write(everything=True)
        assert written(house) == settled < 55

    def test_it_does_not_wait_for_what_does_not_fit(self, make: Callable[..., House]) -> None:
        house = make(hot=24 * MIB, warm=8 * MIB)
        house.cache.resize(2 * MIB)
        house.save(LONG, SIZE)
        made = pin(house, LONG)
        [listed] = house.cache.pins.pin(Pin(0))
        assert listed.not_kept == made.not_kept
        assert "does not fit" in listed.not_kept
        assert len(house.cache.queue) == 0
        dropped = house.cache.counters.dropped_nodes
        house.now += 10
        house.cache.write()
        assert house.cache.counters.dropped_nodes == dropped

    def test_what_was_refused_comes_when_there_is_room(self, make: Callable[..., House]) -> None:
        house = make(hot=24 * MIB, warm=8 * MIB)
        house.cache.resize(2 * MIB)
        house.save(LONG[:640], SIZE)
        pin(house, LONG)
        other = [7] * 64
        house.save(other, SIZE)
        house.cache.write(everything=True)
        assert not house.cache.is_stored(house.namespace + to_be(other))
        house.cache.resize(8 * MIB)
        house.cache.write(everything=True)
        assert house.cache.is_stored(house.namespace + to_be(other))


class TestRoom:
    """What is not pinned goes for what is."""

    def test_of_a_share_that_others_of_the_key_fill(self, make: Callable[..., House]) -> None:
        """Though they were used just now, and their tails wait to be written."""
        house = make(hot=24 * MIB, warm=16 * MIB)
        house.cache.set_shares({}, {"guest": 25})
        prompts = [[2000 + 100 * number + block for block in range(9) for _ in range(64)] for number in range(4)]
        for tokens in prompts:  # 1.8 MB of 4.2 each
            house.save(tokens, SIZE, owner="guest")
            house.cache.write(everything=True)
            house.restore(tokens)
            house.save([*tokens, 1, 2], SIZE, owner="guest")
        for tokens in prompts[:2]:
            made = pin(house, tokens)
            assert (made.kept, made.not_kept) == (len(tokens), "")
        house.cache.write(everything=True)
        assert [one.kept for one in house.cache.pins.pin(Pin(0))] == [len(prompts[0])] * 2
        assert house.cache.disk is not None
        assert house.cache.disk.sums.owners["guest"] <= 4 * MIB
        house.cache.check_integrity()

    @pytest.mark.parametrize("budget", range(20, 26))
    def test_up_to_the_last_block(self, make: Callable[..., House], budget: int) -> None:
        """Where two of a batch do not fit, one may."""
        house = make(hot=24 * MIB, warm=8 * MIB)
        house.cache.resize(budget * MIB // 10)
        house.save(LONG, SIZE)
        made = pin(house, LONG)
        assert 0 < made.kept < len(LONG)
        assert house.cache.disk is not None
        assert house.cache.disk.lacks(pages(SIZE)) > 0

    def test_of_one_that_is_unpinned(self, make: Callable[..., House]) -> None:
        house = make(hot=24 * MIB, warm=8 * MIB)
        house.cache.resize(6 * MIB)
        other = [token + 1000 for token in LONG]
        for tokens, label in ((LONG, "a"), (other, "b")):
            house.save(tokens, SIZE)
            pin(house, tokens, label)
        house.cache.pins.unpin(Unpin(0, label="a"))
        house.cache.write(everything=True)
        [left] = house.cache.pins.pin(Pin(0))
        assert (left.kept, left.not_kept) == (len(other), "")

    def test_before_what_was_refused_with_it(self, make: Callable[..., House]) -> None:
        """What comes of an unpinned path does not hold up a pin by keeping its beginning on disk."""
        house = make(hot=24 * MIB, warm=8 * MIB, daily_writes=5 * MIB // 2)
        other = [token + 1000 for token in LONG]
        house.save(other, SIZE)
        house.cache.write(everything=True)
        house.save(LONG[:640], SIZE)
        assert pin(house, LONG).kept == 0
        house.cache.resize(3 * MIB)
        house.cache.bound_writes(20 * MIB)
        house.cache.write(everything=True)
        house.now += 10
        house.cache.write(everything=True)
        assert house.cache.pins.pin(Pin(0))[0].not_kept == ""

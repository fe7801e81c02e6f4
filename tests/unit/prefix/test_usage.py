"""What is stored of models that nobody can use any more goes first."""

from __future__ import annotations

from collections.abc import Callable

from prefix_testing import MIB, House

from homeprefixd.frames.store import Pin
from homeprefixd.prefix.blocks import namespace_of
from homeprefixd.prefix.usage import Usage

SIZE = 400_000
OLD = {"model": "small", "model_sha256": "ab" * 32, "kv_type": "f16", "salt": ""}


def test_which_are_stale() -> None:
    salted, other_type = {**OLD, "salt": "me"}, {**OLD, "kv_type": "q8_0"}
    elsewhere = {**OLD, "model": "large", "model_sha256": "cd" * 32}
    known = {namespace_of(d): d for d in (OLD, salted, other_type, elsewhere)}
    usage = Usage()
    assert usage.stale(known) == []  # nothing is known of models
    usage.opened(namespace_of(OLD), OLD)
    assert usage.stale(known) == [namespace_of(other_type)]  # the large one may be loaded later
    usage.configured(["small"])
    assert usage.stale(known) == [namespace_of(other_type), namespace_of(elsewhere)]
    usage.configured(["small", "large"])
    assert usage.stale(known) == [namespace_of(other_type)]
    usage.opened(namespace_of(other_type), other_type)
    assert usage.stale(known) == []


def test_they_go_first_however_much_they_were_used(make: Callable[..., House]) -> None:
    house = make(hot=4 * MIB, warm=8 * MIB)
    now_used = house.namespace
    house.namespace = house.cache.open_namespace(OLD)[0]
    old = [[n] * 64 + [n + 100] * 64 for n in range(6)]
    for tokens in old:
        house.save(tokens, SIZE)
    house.cache.write(everything=True)
    for tokens in old * 5:
        house.restore(tokens)
    stale = house.namespace
    house.namespace = now_used
    house.save([500] * 64, SIZE)  # used once, long ago
    house.now += 1_000_000
    for tokens in old:
        house.namespace = stale
        house.restore(tokens)
    house.reopen()  # nobody opens the old namespace now
    house.cache.usage.configured(["another"])
    for number in range(600, 680):
        house.save([number] * 64, SIZE)
        house.cache.write(everything=True)
        counts = house.cache.disk.sums.nodes if house.cache.disk is not None else {}
        if house.known([500] * 64) < 64:
            assert stale.hex() not in counts  # the old ones went before it
            break
    else:
        raise AssertionError("nothing of the model in use was ever evicted: the test says nothing")
    house.cache.check_integrity()


def test_a_pin_does_not_keep_what_nobody_can_use(make: Callable[..., House]) -> None:
    house = make(hot=4 * MIB, warm=8 * MIB)
    now_used = house.namespace
    house.namespace = house.cache.open_namespace(OLD)[0]
    key = house.save([1] * 64, SIZE)[0]
    house.cache.write(everything=True)
    house.cache.pins.pin(Pin(0, prefix=key.hex()))
    assert house.cache.pins.protected() == {key}
    house.namespace = now_used
    house.reopen()
    assert house.cache.pins.protected() == {key}
    house.cache.usage.configured(["another"])
    assert house.cache.pins.protected() == frozenset()

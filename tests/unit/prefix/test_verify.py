"""Finding and removing what the disk has lost: every payload, and the tree.

The short form of the flipped bits runs in CI; `scripts/test -m long -s tests/unit/prefix/test_verify.py` runs 1,300.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import lmdb
import msgspec
import pytest
from prefix_testing import MIB, House, Store, Worker, WrongStateError

from homeprefixd.errors import StoreError
from homeprefixd.frames import store as frames
from homeprefixd.prefix.blocks import BLOCK_TOKENS
from homeprefixd.prefix.cache import BlockLostError
from homeprefixd.prefix.client import AdminClient
from homeprefixd.prefix.tree import Record
from homeprefixd.prefix.verifying import Findings, Scrubber, Verifier

PROMPT = list(range(1000, 1000 + 5 * BLOCK_TOKENS + 10))
OTHER = [7, *PROMPT]


class Writing:
    """A writer's thread."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.ending = False
        self.thread.start()

    def run(self) -> None:
        while not self.ending:
            while self.jobs:
                self.jobs.pop(0)()
            time.sleep(0.002)

    def end(self) -> None:
        self.ending = True
        self.thread.join()


@pytest.fixture
def writing() -> Iterator[Writing]:
    writing = Writing()
    yield writing
    writing.end()


def verify(house: House, writing: Writing, *, repair: bool = False) -> Findings:
    verifier = Verifier(house.cache, writing.jobs.append)
    found = verifier.run(repair=repair, rate=0)
    assert found is not None
    assert found.complete
    return found


def change(house: House, table: bytes, edit: Callable[[lmdb.Transaction, object], None]) -> None:
    """Change a table of a closed store, and open it again."""
    house.session.close()
    house.cache.close()
    env = lmdb.open(str(house.directory), max_dbs=8)
    handle = env.open_db(table)
    with env.begin(write=True) as txn:
        edit(txn, handle)
    env.close()
    house.open()


def damage(house: House, table: bytes, key: bytes, new: Callable[[bytes], bytes | None]) -> None:
    """Change one row: `new` of its value, None to remove it."""

    def edit(txn: lmdb.Transaction, handle: object) -> None:
        value = new(bytes(txn.get(key, db=handle)))
        if value is None:
            txn.delete(key, db=handle)
        else:
            txn.put(key, value, db=handle)

    change(house, table, edit)


def place_of(house: House, key: bytes) -> bytes:
    assert house.cache.disk is not None
    with house.cache.disk.table() as table:
        node = table.place(key)
        assert node is not None
        return node.tree_key


def flipped(value: bytes) -> bytes:
    return bytes((*value[:100], value[100] ^ 16, *value[101:]))


def record_with(**fields: object) -> Callable[[bytes], bytes]:
    def new(value: bytes) -> bytes:
        record = msgspec.msgpack.decode(value, type=Record)
        return msgspec.msgpack.encode(msgspec.structs.replace(record, **fields))

    return new


def test_nothing_is_wrong(house: House, writing: Writing) -> None:
    house.save(PROMPT, size=600_000)
    house.save(OTHER)
    house.reopen()
    found = verify(house, writing)
    assert (found.nodes, found.damaged, found.problems) == (12, 0, [])
    assert house.cache.disk is not None
    assert found.bytes == house.cache.disk.sums.stored


DAMAGES: dict[str, Callable[[House, list[bytes]], None]] = {
    "a bit of a payload": lambda house, keys: damage(house, b"payloads", keys[2] + b"\0\0", flipped),
    "a piece is missing": lambda house, keys: damage(house, b"payloads", keys[2] + b"\0\0", lambda _value: None),
    "a bit of a record": lambda house, keys: damage(
        house, b"nodes", place_of(house, keys[2]), lambda value: b"\xc1" + value[1:]
    ),
    "another key": lambda house, keys: damage(house, b"nodes", place_of(house, keys[2]), record_with(key=b"x" * 32)),
    "another position": lambda house, keys: damage(house, b"nodes", place_of(house, keys[2]), record_with(start=64)),
    "another size": lambda house, keys: damage(house, b"nodes", place_of(house, keys[2]), record_with(size=2998)),
    "not to be found": lambda house, keys: damage(house, b"keys", keys[2], lambda _value: None),
}


@pytest.mark.parametrize("kind", sorted(DAMAGES))
def test_damage_is_found_and_removed_with_what_is_below(house: House, writing: Writing, kind: str) -> None:
    keys = house.save(PROMPT)
    house.save(OTHER)
    house.reopen()
    DAMAGES[kind](house, keys)
    found = verify(house, writing)
    assert found.damaged >= 1
    assert any(problem.startswith(keys[2].hex()[:16]) for problem in found.problems)
    assert house.cache.disk is not None
    verify(house, writing, repair=True)
    house.cache.write()
    assert verify(house, writing).damaged == 0
    assert house.cache.disk.nodes() == 2 + 6
    house.cache.check_integrity()
    assert house.known(PROMPT) == 2 * BLOCK_TOKENS
    assert len(house.restore(OTHER)) == 6
    house.save(PROMPT)  # computed again
    house.reopen()
    assert len(house.restore(PROMPT)) == 6
    sums = house.cache.disk
    assert sums is not None
    assert sums.sums.nodes == {house.namespace.hex(): 12}
    assert verify(house, writing).bytes == sums.sums.stored


@pytest.mark.parametrize("kind", sorted(set(DAMAGES) - {"not to be found"}))
def test_damage_never_becomes_an_answer(house: House, kind: str) -> None:
    keys = house.save(PROMPT)
    house.reopen()
    right = house.restore(PROMPT)
    house.reopen()
    DAMAGES[kind](house, keys)
    for _again in range(2):
        found: list[tuple[str, bytes]] = []
        with contextlib.suppress(BlockLostError):
            found = house.restore(PROMPT)
        assert [state for _tier, state in found] in ([], [state for _tier, state in right[:2]])


def test_tokens_that_became_others_are_not_served(house: House) -> None:
    """A flip in the table's own key: the record and the payload are whole, and belong to other tokens."""
    [key] = house.save(PROMPT[:64])
    house.reopen()
    place = place_of(house, key)
    other = place[:-1] + bytes([place[-1] ^ 1])

    def edit(txn: lmdb.Transaction, handle: object) -> None:
        txn.put(other, txn.pop(place, db=handle), db=handle)

    change(house, b"nodes", edit)
    wrong = [*PROMPT[:63], PROMPT[63] ^ 1]
    with pytest.raises(Exception, match="tokens are not those"):
        house.restore(wrong)


def test_a_second_pass_waits_for_nobody(house: House, writing: Writing) -> None:
    house.save(PROMPT)
    house.reopen()
    verifier = Verifier(house.cache, writing.jobs.append)
    stop, paused = threading.Event(), threading.Event()

    def pause() -> bool:
        paused.set()
        return True

    first = threading.Thread(target=lambda: verifier.run(repair=False, rate=0, stop=stop.is_set, pause=pause))
    first.start()
    assert paused.wait(10)
    assert verifier.run(repair=False, rate=0, stop=stop.is_set) is None
    stop.set()
    first.join()


def test_the_rate_is_kept(house: House, writing: Writing) -> None:
    house.save(PROMPT, size=600_000)  # 1.8 MB as stored
    house.reopen()
    verifier = Verifier(house.cache, writing.jobs.append)
    begin = time.monotonic()
    found = verifier.run(repair=False, rate=4e6)
    assert found is not None
    assert found.bytes / (time.monotonic() - begin) <= 4e6


def test_it_scrubs_when_nothing_else_happens(house: House, writing: Writing) -> None:
    keys = house.save(PROMPT)
    house.reopen()
    DAMAGES["a bit of a payload"](house, keys)
    scrubber = Scrubber(house.cache, Verifier(house.cache, writing.jobs.append), writing.jobs.append, every=100.0)
    assert not scrubber.figures()["last"]
    house.now += 1000.0
    scrubber.start()
    deadline = time.monotonic() + 20
    disk = house.cache.disk
    assert disk is not None
    while not disk.sums.scrubbed and time.monotonic() < deadline:
        house.now += 20.0
        time.sleep(0.1)
    scrubber.stop()
    assert disk.sums.scrubbed > 0
    assert disk.nodes() == 2
    assert house.cache.counters.damaged == 1
    figures = scrubber.figures()
    assert figures["last"] == disk.sums.scrubbed
    assert (figures["nodes"], figures["damaged"], figures["running"]) == (6, 1, False)


def test_the_scrubber_keeps_its_rate_and_gives_way(house: House, writing: Writing) -> None:
    """As it runs in the store: at a bounded rate, and not while somebody asks for something."""
    house.save(PROMPT, size=600_000)  # 1.8 MB as stored
    house.reopen()
    scrubber = Scrubber(
        house.cache, Verifier(house.cache, writing.jobs.append), writing.jobs.append, every=100.0, rate=4e6
    )
    house.now += 1000.0
    house.known(PROMPT)
    house.restore(PROMPT[:64])  # somebody asks: nothing for half a minute
    scrubber.start()
    time.sleep(0.2)
    assert scrubber.figures()["nodes"] == 0
    house.now += 31.0
    until = time.monotonic() + 20
    while not scrubber.figures()["running"] and time.monotonic() < until:
        time.sleep(0.01)
    begin = time.monotonic()
    disk = house.cache.disk
    assert disk is not None
    while not disk.sums.scrubbed and time.monotonic() < until:
        time.sleep(0.01)
    took = time.monotonic() - begin
    scrubber.stop()
    assert disk.sums.scrubbed
    assert scrubber.figures()["bytes"] / (took + 0.05) <= 4e6


def test_who_asks_does_not_wait_for_the_scrubber(house: House, writing: Writing) -> None:
    """It takes hours for a large store; it pauses for them, as it does where its rate is set to nothing."""
    house.save(PROMPT, size=600_000)  # 1.8 MB as stored
    house.reopen()
    asked = Verifier(house.cache, writing.jobs.append)
    scrubber = Scrubber(house.cache, asked, writing.jobs.append, every=100.0, rate=1e3)
    house.now += 1000.0
    scrubber.start()
    until = time.monotonic() + 20
    while not scrubber.figures()["bytes"] and time.monotonic() < until:
        house.now += 31.0
        time.sleep(0.01)
    found = asked.run(repair=False, rate=0)
    assert found is not None
    assert (found.nodes, found.complete) == (6, True)
    assert scrubber.figures()["running"]
    scrubber.set_rate(0)
    time.sleep(0.1)
    before = scrubber.figures()["bytes"]
    time.sleep(1.5)
    assert scrubber.figures()["bytes"] == before
    scrubber.set_rate(1e9)  # at once, however long the next step was to wait
    while scrubber.figures()["running"] and time.monotonic() < until:
        house.now += 31.0
        time.sleep(0.01)
    assert (scrubber.figures()["nodes"], scrubber.figures()["running"]) == (6, False)
    scrubber.stop()


class TestProcess:
    def test_verify_and_repair(
        self, tmp_path: Path, start_store: Callable[..., Store], start_worker: Callable[[Store], Worker]
    ) -> None:
        store = start_store(tmp_path)
        keys = start_worker(store).save(PROMPT, size=300_000)
        assert store.stop()[0] == 0
        env = lmdb.open(str(tmp_path), max_dbs=8)
        payloads = env.open_db(b"payloads")
        with env.begin(write=True) as txn:
            txn.put(keys[3] + b"\0\0", flipped(bytes(txn.get(keys[3] + b"\0\0", db=payloads))), db=payloads)
        env.close()
        with AdminClient.start(tmp_path) as admin:
            found = admin.verify()
            assert (found.nodes, found.damaged, found.removed, found.complete) == (6, 1, 0, True)
            assert found.problems == [f"{keys[3].hex()[:16]}: piece 0 has a wrong checksum"]
            assert admin.verify(repair=True).removed == 3
            assert admin.verify().nodes == 3
        store = start_store(tmp_path)
        worker = start_worker(store)
        assert len(worker.restore(PROMPT)[0]) == 3
        assert store.ask(frames.Verify(3, True, 1e9)).damaged == 0
        assert store.ask(frames.Resize(4, 2 * MIB)).warm == 2 * MIB
        assert store.stop() == (0, "")

    def test_it_ends_with_the_store(
        self, tmp_path: Path, start_store: Callable[..., Store], start_worker: Callable[[Store], Worker]
    ) -> None:
        store = start_store(tmp_path)
        start_worker(store).save(PROMPT, size=2_000_000)
        store.flush()
        store.channel.send(frames.Verify(1, False, 1000.0))
        time.sleep(0.3)
        begin = time.monotonic()
        assert store.stop()[0] == 0
        assert time.monotonic() - begin < 5

    def test_it_ends_when_nobody_waits_for_it(
        self, tmp_path: Path, start_store: Callable[..., Store], start_worker: Callable[[Store], Worker]
    ) -> None:
        """Else nobody else could ask for one, for years at such a rate."""
        store = start_store(tmp_path)
        worker = start_worker(store)
        for number in range(12):
            worker.save([number] * 64, size=2_000_000)
        store.flush()
        store.channel.send(frames.Verify(1, False, 1000.0))
        store.channel.send(frames.Verify(2, False, 0.0))
        busy = store.channel.receive()
        assert isinstance(busy, frames.Verified)
        assert (busy.ticket, busy.error) == (2, "a verification is running already")
        store.channel.send(frames.EndVerify(1))
        left = store.channel.receive()
        assert isinstance(left, frames.Verified)
        assert (left.ticket, left.complete) == (1, False)
        assert store.ask(frames.Verify(3, False, 0.0)).complete


def test_admin_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store here"):
        AdminClient.start(tmp_path)


@dataclass(frozen=True)
class Sound:
    """A store's file, and where in it payloads lie: first bit, bit after the last, key of the node."""

    data: bytes
    payloads: list[tuple[int, int, bytes]]

    def struck(self, bit: int) -> bytes | None:
        """Key of the node whose payload a bit belongs to."""
        return next((key for begin, end, key in self.payloads if begin <= bit < end), None)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    """A store of some prompts."""
    directory = tmp_path_factory.mktemp("sound")
    store = Store(directory)
    worker = Worker(store)
    for prompt in prompts():
        worker.save(prompt, size=100_000)
    worker.client.close()
    assert store.stop()[0] == 0
    data = (directory / "data.mdb").read_bytes()
    env = lmdb.open(str(directory), max_dbs=8, readonly=True, lock=False)
    payloads = env.open_db(b"payloads", create=False)
    places: list[tuple[int, int, bytes]] = []
    with env.begin() as txn:
        for key, value in txn.cursor(payloads):
            assert data.count(value) == 1
            at = data.index(value)
            places.append((8 * at, 8 * (at + len(value)), bytes(key[:32])))
    env.close()
    assert len(places) == NODES
    return Sound(data, places)


NODES = 2 + 8 * 2


def prompts() -> list[list[int]]:
    return [[*PROMPT[:128], *range(n * 1000, n * 1000 + 100)] for n in range(8)]


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def pages_of_the_tree(data: bytes) -> list[int]:
    """Numbers of pages that are no payload: meta, branch and leaf pages."""
    flags = (int.from_bytes(data[at + 10 : at + 12], "little") for at in range(0, len(data), 4096))
    return [number for number, flag in enumerate(flags) if number < 2 or flag & 3]


def survive(sound: Sound, directory: Path, seed: int, aimed: bool, start_store: Callable[..., Store]) -> str:
    """Flip a bit, read everything; save everything again, read it: no wrong byte, and it goes on.

    A damaged payload is found by reading, and by that alone: the store neither dies of it nor tries it again. Returns
    what became of it: `payload`, `nothing`, `removed` (by verifying), `died` (and came back).
    """
    choose = random.Random(seed)
    data = sound.data
    directory.mkdir()
    (directory / "data.mdb").write_bytes(data)
    if aimed:
        bit = choose.choice(pages_of_the_tree(data)) * 4096 * 8 + choose.randrange(4096 * 8)
    else:
        bit = choose.randrange(len(data) * 8)
    flip(directory / "data.mdb", bit)
    struck = sound.struck(bit)
    store = start_store(directory)
    for attempt in range(4):
        try:
            worker = Worker(store)
            for prompt in prompts():
                worker.restore(prompt)  # raises WrongStateError if a byte is wrong
                assert store.process.poll() is None
            found = store.stats()["counters"]["damaged"]
            for prompt in prompts():
                worker.save(prompt, size=100_000)
                assert store.process.poll() is None
            worker.restore(prompts()[-1])  # what was sent before it has arrived
            assert store.flush() == 0
            verified = store.ask(frames.Verify(1, True, 0.0))
            assert not verified.error
            again = store.ask(frames.Verify(2, False, 0.0))
            counted = {name: count for name, count in store.stats()["counters"].items() if count}
            for prompt in prompts():  # what was removed is computed again, and all is well
                worker.save(prompt, size=100_000)
                assert len(worker.restore(prompt)[1]) == 4
            worker.client.close()
            code, said = store.stop()
        except WrongStateError:
            raise
        except (ConnectionError, AssertionError):
            if store.process.poll() is None and not ended(store):
                raise
            assert struck is None, "it died of a damaged payload"
            assert attempt < 3, "it does not come to rest"
            store = start_store(directory)
            continue
        assert code == 0
        assert again.damaged == 0, (seed, said, counted)
        if struck is not None:
            assert (found, verified.damaged, again.nodes, attempt) == (1, 0, NODES, 0), (seed, said, counted)
            assert "a stored block is damaged" in said
            return "payload"
        return "died" if attempt else "removed" if verified.damaged or found else "nothing"
    raise AssertionError("it does not come to rest")


def ended(store: Store) -> bool:
    """Whether the process has ended, or does so now."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        if store.process.poll() is not None:
            return True
        time.sleep(0.02)
    return False


def survive_all(sound: Sound, directory: Path, seeds: range, aimed: bool, start_store: Callable[..., Store]) -> None:
    outcomes = Counter[str]()
    for seed in seeds:
        place = directory / str(seed)
        outcomes[survive(sound, place, seed, aimed, start_store)] += 1
        shutil.rmtree(place)
    print(f"{'at the tree' if aimed else 'anywhere'}: {dict(outcomes)}")
    assert outcomes["payload"] == 0 if aimed else outcomes["payload"] >= len(seeds) // 2


@pytest.mark.parametrize("aimed", [False, True], ids=["anywhere", "at the tree"])
def test_flipped_bits(sound: Sound, tmp_path: Path, start_store: Callable[..., Store], aimed: bool) -> None:
    survive_all(sound, tmp_path, range(6), aimed, start_store)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("aimed", "flips"), [(True, 300), (False, 1000)], ids=["at the tree", "anywhere"])
def test_many_flipped_bits(
    sound: Sound, tmp_path: Path, start_store: Callable[..., Store], aimed: bool, flips: int
) -> None:
    survive_all(sound, tmp_path, range(1000, 1000 + flips), aimed, start_store)

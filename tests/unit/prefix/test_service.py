"""The store as a process: real sockets, real files, real deaths."""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import lmdb
import msgspec
import pytest
from prefix_testing import DESCRIPTION, MIB, House, Store, Worker, payload_of

from homeprefixd.channel import Channel, ChannelClosedError, encode
from homeprefixd.errors import StoreError
from homeprefixd.frames import Stop
from homeprefixd.frames import store as frames
from homeprefixd.frames.store import NewNode
from homeprefixd.prefix import link
from homeprefixd.prefix.blocks import block_key, from_le, to_le
from homeprefixd.prefix.client import AdminClient, StoreClient
from homeprefixd.prefix.connection import Connection
from homeprefixd.prefix.service import Service
from homeprefixd.prefix.threads import Writer
from homeprefixd.prefix.tree import Record

PROMPT = list(range(1000, 1000 + 5 * 64 + 10))
StartStore = Callable[..., Store]
StartWorker = Callable[[Store], Worker]


def wait_until(done: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def stop(store: Store) -> None:
    """Have the process stand still, until SIGCONT."""
    store.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: Path(f"/proc/{store.process.pid}/stat").read_text().split()[2] == "T")


def test_nobody_waits_for_a_store_that_stands_still(
    tmp_path: Path, start_store: StartStore, start_worker: StartWorker
) -> None:
    store = start_store(tmp_path)
    worker = start_worker(store)
    client = worker.client
    keys = worker.save(PROMPT)
    held = client.lookup(worker.namespace, to_le(PROMPT), 1 << 30, exact=False)
    assert held.wait_plan(10)
    stop(store)
    long = to_le(range(100_000))  # a few of these fill the socket
    began = time.monotonic()
    first = [client.lookup(worker.namespace, long, 1 << 30, exact=False) for _ in range(20)]
    assert time.monotonic() - began < 4, "a look-up waited for the store to read it"
    assert not any(lookup.answered for lookup in first)
    wait_until(lambda: not client.connected)
    began = time.monotonic()
    for _ in range(20):
        lookup = client.lookup(worker.namespace, long, 1 << 30, exact=False)
        assert (lookup.wait_plan(5), lookup.state(0)) == (None, "lost")
        assert client.reserve([3000], timeout=5) == []
        assert client.recall(worker.namespace, b"text", 5) is None
        assert client.open_namespace(DESCRIPTION, 5) is None
        client.remember(frames.Remember(worker.namespace, b"d" * 32, 1, b"", [], long))
        lookup.release()
    for lookup in (held, *first):
        lookup.release()
    assert time.monotonic() - began < 4
    store.process.send_signal(signal.SIGCONT)
    wait_until(lambda: client.connected)
    assert worker.restore(PROMPT)[1] == keys
    assert worker.save([1, *PROMPT])


def test_a_store_that_left_one_question_unanswered_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_SILENCE", 0.1)
    monkeypatch.setattr(link, "_ASK_AGAIN", 0.2)
    ours, theirs = socket.socketpair()
    client = StoreClient()
    client.attach(ours)
    store: Channel[frames.ToStore] = Channel(theirs, frames.ToStore)
    assert isinstance(store.receive(), frames.Hello)
    store.send(frames.Welcome(0, "id"))
    wait_until(lambda: client.connected)
    assert client.recall(b"n" * 32, b"text", 0.05) is None
    assert isinstance(store.receive(), frames.Recall)
    wait_until(lambda: not client.connected)
    wait_until(lambda: not client.connected and bool(select.select([theirs], [], [], 0)[0]))
    asked = store.receive()
    assert isinstance(asked, frames.FileHash)
    store.send(frames.FileHashKnown(asked.ticket, ""))
    wait_until(lambda: client.connected)
    client.close()
    store.close()


def test_blocks_are_hot_then_warm(tmp_path: Path, start_store: StartStore, start_worker: StartWorker) -> None:
    store = start_store(tmp_path)
    welcome = store.greet()
    worker = start_worker(store)
    keys = worker.save(PROMPT, size=300_000)
    assert worker.restore(PROMPT) == (["hot"] * 6, keys)
    code, said = store.stop()
    assert (code, said) == (0, "")
    store = start_store(tmp_path)
    assert store.greet().store_id != welcome.store_id
    assert not worker.client.connected
    worker.attach(store)
    assert worker.restore(PROMPT) == (["warm"] * 6, keys)
    assert worker.restore(PROMPT) == (["hot"] * 6, keys)
    assert not list(tmp_path.glob("*damaged*"))
    stats = store.stats()
    assert stats["hot"]["nodes"] == stats["warm"]["nodes"] == 6
    assert stats["counters"]["tokens_matched_warm"] == stats["counters"]["tokens_matched_hot"] == len(PROMPT)
    [namespace] = stats["namespaces"]
    assert namespace["nodes"] == 6
    assert namespace["description"] == DESCRIPTION


def test_what_was_sent_before_the_end_is_kept(house: House) -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(Service(house.cache, Writer()), theirs, owner=False, name="test")
    channel: Channel[frames.FromStore] = Channel(ours, frames.FromStore)
    channel.send(frames.Reserve(1, [3000]))
    channel.send(frames.Commit(house.namespace, [NewNode(house.namespace, b"1234", 0, 0, 9, True, 0.1, "prompt", "")]))
    connection.end()
    connection.serve()
    assert house.known(from_le(b"1234")) == 1
    assert channel.receive() == frames.Reserved(1, [0])
    with pytest.raises(ChannelClosedError):
        channel.receive()
    channel.close()


def test_files_are_for_their_owner_only(tmp_path: Path, start_store: StartStore) -> None:
    start_store(tmp_path / "cache").greet()
    assert all(path.stat().st_mode & 0o077 == 0 for path in [tmp_path / "cache", *(tmp_path / "cache").iterdir()])


def test_what_a_dead_worker_held_is_free(tmp_path: Path, start_store: StartStore, start_worker: StartWorker) -> None:
    store = start_store(tmp_path)
    worker = start_worker(store)
    worker.save(PROMPT)
    lookup = worker.client.lookup(worker.namespace, to_le(PROMPT), 1000, exact=False)
    assert lookup.wait_plan(5)
    worker.client.reserve([100_000])
    stats = store.stats()
    assert stats["hot"]["leased"] == 6
    assert stats["hot"]["bytes"] > 100_000
    worker.client.close()
    wait_until(lambda: store.stats()["hot"]["leased"] == 0)
    wait_until(lambda: store.stats()["hot"]["bytes"] == 6 * 4096)


def test_a_worker_goes_on_when_the_store_dies(
    tmp_path: Path, start_store: StartStore, start_worker: StartWorker
) -> None:
    store = start_store(tmp_path)
    worker = start_worker(store)
    keys = worker.save(PROMPT)
    store.flush()
    updates = threading.Event()
    lookup = worker.client.lookup(worker.namespace, to_le(PROMPT), 1000, exact=False, on_update=updates.set)
    assert lookup.wait_plan(5)
    block = lookup.wait_block(0, 5)
    [slot] = worker.client.reserve([4096])
    updates.clear()
    store.kill()
    assert updates.wait(5)
    assert lookup.state(0) == "lost"
    assert lookup.wait_block(0, 5) is None
    assert block is not None
    assert bytes(block) == payload_of(keys[0], 3000)[:3000]  # the memory outlives the store
    slot.view[:] = b"x" * 4096
    node = NewNode(keys[-2], to_le([1]), 5 * 64, slot.offset, 4096, True, 0.1, "prompt", "")
    begin = time.monotonic()
    assert not worker.client.connected
    worker.client.commit(worker.namespace, [node])
    worker.client.abandon([slot])
    assert worker.client.reserve([1]) == []
    assert worker.client.lookup(worker.namespace, to_le(PROMPT), 1000, exact=False).wait_plan(5) is None
    assert worker.client.file_hash(1, 2, 3, 4) == ""
    worker.client.remember_file_hash(1, 2, 3, 4, "ab")
    lookup.release()
    assert time.monotonic() - begin < 4

    store = start_store(tmp_path)
    worker.client.attach(store.adopt())
    wait_until(lambda: worker.client.connected)
    same = (1 << 44) - 1
    others = worker.client.reserve([4096] * 8)
    [other] = [candidate for candidate in others if candidate.offset & same == slot.offset & same]
    worker.client.commit(worker.namespace, [node])  # its slot was the dead store's, at the same place
    worker.client.abandon([slot])
    assert worker.restore(PROMPT) == (["warm"] * 6, keys)
    assert len(worker.restore([*PROMPT[:320], 1])[0]) == 5
    other.view[:] = payload_of(block_key(keys[-2], to_le([1])), 4096)[:4096]
    again = msgspec.structs.replace(node, offset=other.offset)
    worker.client.commit(worker.namespace, [again])
    assert len(worker.restore([*PROMPT[:320], 1])[0]) == 6


def test_a_late_answer_gives_its_slots_back(tmp_path: Path, start_store: StartStore, start_worker: StartWorker) -> None:
    store = start_store(tmp_path)
    worker = start_worker(store)
    stop(store)
    begin = time.monotonic()
    assert worker.client.reserve([4096], timeout=0.1) == []
    assert time.monotonic() - begin < 4
    store.process.send_signal(signal.SIGCONT)
    assert worker.client.open_namespace(DESCRIPTION, 5)
    wait_until(lambda: store.stats()["hot"]["bytes"] == 0)


def test_a_stuck_client_stops_nobody_else(tmp_path: Path, start_store: StartStore, start_worker: StartWorker) -> None:
    store = start_store(tmp_path)
    worker = start_worker(store)
    worker.save(PROMPT)
    with store.adopt() as silent:
        flood(silent, worker.namespace)
        for _ in range(20):
            assert len(worker.restore(PROMPT)[0]) == 6


def test_a_stuck_client_is_given_up(house: House) -> None:
    ours, theirs = socket.socketpair()
    house.save(PROMPT)
    connection = Connection(Service(house.cache, Writer()), theirs, owner=False, name="stuck", patience=1)
    thread = threading.Thread(target=connection.serve, daemon=True)
    thread.start()
    flood(ours, house.namespace)
    thread.join(10)
    assert not thread.is_alive()
    assert all(hot.leases == 0 for hot in house.cache.hot.by_key.values())
    ours.close()


def flood(sock: socket.socket, namespace: bytes) -> None:
    """Ask as much as a connection takes, and read no answer."""
    sock.settimeout(0.5)
    request = encode(frames.Match(1, namespace, to_le(PROMPT), 1000, False, True)) * 100
    with contextlib.suppress(OSError):
        while True:
            sock.sendall(request)


def test_flush_writes_tails_too(tmp_path: Path, start_store: StartStore, start_worker: StartWorker) -> None:
    store = start_store(tmp_path, "--tail-delay", "60")
    worker = start_worker(store)
    worker.save(PROMPT)
    worker.client.lookup(worker.namespace, to_le(PROMPT), 1000, exact=False).wait_plan(5)
    wait_until(lambda: store.stats()["queue"]["nodes"] == 1)
    assert store.flush() == 0
    store.kill()
    store = start_store(tmp_path)
    assert store.stats()["warm"]["nodes"] == 6
    worker.attach(store)
    assert worker.restore(PROMPT)[0] == ["warm"] * 6


def test_what_cannot_be_flushed_in_time_is_said(
    tmp_path: Path, start_store: StartStore, start_worker: StartWorker
) -> None:
    store = start_store(tmp_path, "--tail-delay", "60")
    worker = start_worker(store)
    worker.save([5] * 10)
    worker.client.lookup(worker.namespace, to_le([5] * 10), 1000, exact=False).wait_plan(5)
    store.channel.send(Stop(0.0))
    begin = time.monotonic()
    _out, said = store.process.communicate(timeout=30)
    assert store.process.returncode == 0
    assert time.monotonic() - begin < 5
    assert "1 blocks, 0 MiB, could not be written before the end: the 0 s for it were over" in said
    store = start_store(tmp_path)
    assert store.stats()["warm"]["nodes"] == 0
    assert store.stop() == (0, "")


def test_purge_and_listing(tmp_path: Path, start_store: StartStore, start_worker: StartWorker) -> None:
    store = start_store(tmp_path)
    worker = start_worker(store)
    worker.save(PROMPT)
    worker.save([1, *PROMPT])
    store.flush()
    listed = store.ask(frames.ListPrefixes(1, 10))
    assert listed.total == 12
    assert [info.tokens for info in listed.prefixes] == [len(PROMPT) + 1, len(PROMPT)]
    purged = store.ask(frames.Purge(2, prefix=listed.prefixes[0].id))
    assert (purged.nodes, purged.error) == (6, "")
    assert "no prefix" in store.ask(frames.Purge(2, prefix=listed.prefixes[0].id)).error
    assert worker.restore([1, *PROMPT]) == ([], [])
    assert len(worker.restore(PROMPT)[0]) == 6
    assert store.ask(frames.Purge(2, all=True)).nodes == 6
    stats = store.stats()
    assert stats["hot"]["nodes"] == stats["warm"]["nodes"] == 0


class TestRefusals:
    def test_in_use(self, tmp_path: Path, start_store: StartStore) -> None:
        first = start_store(tmp_path)
        first.greet()
        code, said = start_store(tmp_path).stop()
        assert code == 6
        assert f"in use by another homeprefixd (process {os.getpid()})" in said
        assert "Traceback" not in said
        assert first.stats()["warm"]["state"] == "ok"

    def test_no_directory(self, tmp_path: Path, start_store: StartStore) -> None:
        (tmp_path / "file").touch()
        code, said = start_store(tmp_path / "file" / "cache").stop()
        assert code == 6
        assert str(tmp_path / "file") in said
        assert "Traceback" not in said


class TestAdminClient:
    def test_a_closed_store(self, tmp_path: Path, start_store: StartStore, start_worker: StartWorker) -> None:
        store = start_store(tmp_path)
        start_worker(store).save(PROMPT)
        assert store.stop()[0] == 0
        with AdminClient.start(tmp_path) as admin:
            assert admin.stats()["warm"]["nodes"] == 6
            [info] = admin.prefixes().prefixes
            assert admin.purge(prefix=info.id).nodes == 6
            assert admin.flush() == 0
        with AdminClient.start(tmp_path) as admin:
            assert admin.prefixes().prefixes == []

    def test_looking_changes_nothing(self, tmp_path: Path, start_store: StartStore, start_worker: StartWorker) -> None:
        store = start_store(tmp_path)
        start_worker(store).save(PROMPT, size=300_000)
        assert store.stop()[0] == 0
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "lock"}
        times = (tmp_path / "data.mdb").stat().st_mtime_ns
        with AdminClient.start(tmp_path) as admin:
            assert admin.stats()["warm"]["nodes"] == 6
            assert len(admin.prefixes().prefixes) == 1
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "lock"} == before
        assert (tmp_path / "data.mdb").stat().st_mtime_ns == times

    def test_looking_does_not_repair(self, tmp_path: Path, start_store: StartStore, start_worker: StartWorker) -> None:
        store = start_store(tmp_path)
        start_worker(store).save(PROMPT, size=300_000)
        store.flush()
        store.kill()
        (tmp_path / "data.mdb").write_bytes(b"this is not a database" * 1000)
        before = sorted(path.name for path in tmp_path.iterdir())
        with pytest.raises(StoreError, match=r"data\.mdb cannot be read"):
            AdminClient.start(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == before

    def test_after_a_crash_it_can_be_looked_at(
        self, tmp_path: Path, start_store: StartStore, start_worker: StartWorker
    ) -> None:
        store = start_store(tmp_path)
        start_worker(store).save(PROMPT)
        store.flush()
        store.kill()
        with AdminClient.start(tmp_path) as admin:
            assert admin.stats()["warm"]["nodes"] == 6
        assert (tmp_path / "opened").exists()  # the next to open it for writing still knows

    def test_refusals(self, tmp_path: Path, start_store: StartStore) -> None:
        with pytest.raises(StoreError, match="no store here"):
            AdminClient.start(tmp_path / "cache")
        assert not (tmp_path / "cache").exists()
        AdminClient.start(tmp_path / "cache", create=True).close()
        assert (tmp_path / "cache" / "data.mdb").exists()
        start_store(tmp_path / "cache").greet()
        with pytest.raises(StoreError, match="in use"):
            AdminClient.start(tmp_path / "cache")


class TestDamage:
    @pytest.fixture
    def stored(self, tmp_path: Path, start_store: StartStore, start_worker: StartWorker) -> Path:
        store = start_store(tmp_path)
        start_worker(store).save(PROMPT, size=400_000)
        assert store.stop()[0] == 0
        return tmp_path

    def test_a_flipped_byte(self, stored: Path, start_store: StartStore, start_worker: StartWorker) -> None:
        env = lmdb.open(str(stored), max_dbs=8)
        payloads = env.open_db(b"payloads")
        keys = [block_key(b"", b"")]
        with env.begin(write=True) as txn:
            keys = [bytes(key) for key, _value in txn.cursor(payloads) if key.endswith(b"\0\1")]
            piece = bytearray(txn.get(keys[0], db=payloads))
            piece[50_000] ^= 1
            txn.put(keys[0], bytes(piece), db=payloads)
        env.close()
        store = start_store(stored)
        worker = start_worker(store)
        _tiers, found = worker.restore(PROMPT)
        assert len(found) < 6
        wait_until(lambda: store.stats()["warm"]["nodes"] == len(found))
        assert store.stats()["counters"]["damaged"] == 1
        worker.save(PROMPT, size=400_000)
        assert len(worker.restore(PROMPT)[0]) == 6
        code, said = store.stop()
        assert code == 0
        assert said.count("damaged") == 1

    @pytest.mark.parametrize("left_open", [True, False], ids=["crashed", "clean"])
    def test_a_truncated_file(
        self, stored: Path, start_store: StartStore, start_worker: StartWorker, left_open: bool
    ) -> None:
        size = (stored / "data.mdb").stat().st_size
        os.truncate(stored / "data.mdb", size // 2 // 4096 * 4096)
        if left_open:
            (stored / "opened").touch()
        store = start_store(stored)
        if not left_open:  # it may die of SIGBUS once, while it reads
            try:
                worker = start_worker(store)
                worker.restore(PROMPT)
                store.stats()
            except (ConnectionError, AssertionError):
                pass
            store.kill()
            store = start_store(stored)
        worker = start_worker(store)
        assert worker.restore(PROMPT) == ([], [])
        keys = worker.save(PROMPT)
        assert worker.restore(PROMPT)[1] == keys
        assert len(list(stored.glob("data.mdb.damaged-*"))) == 1
        code, said = store.stop()
        assert code == 0
        assert "set aside" in said

    @pytest.mark.parametrize("content", [b"this is not a database" * 1000, b"\0" * 8192], ids=["text", "zeros"])
    def test_something_else(
        self, stored: Path, start_store: StartStore, start_worker: StartWorker, content: bytes
    ) -> None:
        (stored / "data.mdb").write_bytes(content)
        store = start_store(stored)
        worker = start_worker(store)
        keys = worker.save(PROMPT)
        assert worker.restore(PROMPT)[1] == keys
        assert store.stop()[0] == 0
        assert [path.read_bytes() for path in stored.glob("data.mdb.damaged-*")] == [content]

    def test_another_format(self, stored: Path, start_store: StartStore) -> None:
        env = lmdb.open(str(stored), max_dbs=8)
        with env.begin(write=True) as txn:
            txn.put(b"format", b"999", db=env.open_db(b"meta", txn=txn))
        env.close()
        store = start_store(stored)
        assert store.stats()["warm"]["nodes"] == 0
        said = store.stop()[1]
        assert "of another version (its format is 999, not" in said
        assert "damaged (" not in said
        assert len(list(stored.glob("data.mdb.other-version-*"))) == 1
        (stored / "data.mdb").write_bytes(b"rubbish" * 1000)
        start_store(stored).stop()
        assert len(list(stored.glob("data.mdb.damaged-*"))) == len(list(stored.glob("data.mdb.other-version-*"))) == 1

    def test_a_copy_whose_making_was_killed_is_removed(self, stored: Path, start_store: StartStore) -> None:
        part = stored / "data.mdb.part"
        part.write_bytes(b"half")
        assert start_store(stored).stop()[0] == 0
        assert not part.exists()

    def test_what_lmdb_finds_corrupt_while_it_runs(
        self, stored: Path, start_store: StartStore, start_worker: StartWorker
    ) -> None:
        """The store ends at once, its file is checked by another process and set aside, and the log says where."""
        data = bytearray((stored / "data.mdb").read_bytes())
        beginning = b"".join(token.to_bytes(4, "big") for token in PROMPT[:64])
        for at in range(0, len(data), 4096):
            if data[at + 10] & 2 and beginning in data[at : at + 4096]:  # a leaf page
                data[at + 10 : at + 12] = b"\0\0"
        (stored / "data.mdb").write_bytes(data)
        store = start_store(stored)
        worker = start_worker(store)
        assert worker.restore(PROMPT) == ([], [])
        store.process.wait(10)
        code, said = store.stop()
        assert code == 1
        assert "checked when the store starts again" in said
        store = start_store(stored)
        worker = start_worker(store)
        assert worker.restore(PROMPT) == ([], [])
        keys = worker.save(PROMPT)
        assert worker.restore(PROMPT)[1] == keys
        code, said = store.stop()
        [aside] = stored.glob("data.mdb.damaged-*")
        assert code == 0
        assert f"set aside as {aside.name}" in said
        assert beginning in aside.read_bytes()

    def test_a_file_overwritten_while_it_is_open(
        self, stored: Path, start_store: StartStore, start_worker: StartWorker
    ) -> None:
        """Whatever LMDB says of pages that were pages a moment ago, the store ends at once, and not by an accident."""
        store = start_store(stored)
        worker = start_worker(store)
        assert len(worker.restore(PROMPT)[1]) == -(-len(PROMPT) // 64)
        with (stored / "data.mdb").open("r+b") as file:
            file.seek(4 * 4096)
            file.write(bytes((stored / "data.mdb").stat().st_size - 4 * 4096))
        with contextlib.suppress(ConnectionError, AssertionError):
            worker.restore([7] * 128)
            store.stats()
        store.process.wait(10)
        code, said = store.stop()
        assert code == 1
        assert "Traceback" not in said
        assert said.count("the store's file is damaged") == 1
        store = start_store(stored)
        worker = start_worker(store)
        keys = worker.save(PROMPT)
        assert worker.restore(PROMPT)[1] == keys
        assert store.stop()[0] == 0
        assert len(list(stored.glob("data.mdb.damaged-*"))) == 1

    def test_a_directory_removed_while_it_is_open(
        self, stored: Path, start_store: StartStore, start_worker: StartWorker
    ) -> None:
        store = start_store(stored)
        assert store.stats()["warm"]["state"] == "ok"  # it is open
        shutil.rmtree(stored)
        store.process.wait(20)  # it looks every ten seconds
        code, said = store.stop()
        assert code == 1
        assert f"{stored / 'data.mdb'} was removed while it was open; what was stored in it is lost" in said
        store = start_store(stored)
        worker = start_worker(store)
        keys = worker.save(PROMPT)
        assert worker.restore(PROMPT)[1] == keys
        assert store.stop()[0] == 0
        assert (stored / "data.mdb").exists()

    def test_what_only_a_writer_finds_corrupt(
        self, stored: Path, start_store: StartStore, start_worker: StartWorker
    ) -> None:
        """LMDB's list of free pages: no check reads it, and the store must not die of it again and again."""
        store = start_store(stored)
        worker = start_worker(store)
        worker.save([9] * 64, size=400_000)
        store.flush()
        assert store.ask(frames.Purge(2, all=True)).nodes == 7  # so that there are free pages
        assert store.stop()[0] == 0
        data = bytearray((stored / "data.mdb").read_bytes())
        meta = max((0, 4096), key=lambda at: int.from_bytes(data[at + 144 : at + 152], "little"))  # by transaction
        root = int.from_bytes(data[meta + 80 : meta + 88], "little")  # of the free pages' table
        data[root * 4096 + 10] = 0  # neither a leaf nor a branch
        (stored / "data.mdb").write_bytes(data)
        store = start_store(stored)
        with contextlib.suppress(ConnectionError, AssertionError):  # it may end before it answers
            start_worker(store).save(PROMPT)
            store.flush()
        store.process.wait(10)
        assert store.stop()[0] == 1
        store = start_store(stored)
        worker = start_worker(store)
        keys = worker.save(PROMPT)
        assert worker.restore(PROMPT)[1] == keys
        assert store.flush() == 0
        code, said = store.stop()
        assert code == 0
        assert "MDB_CORRUPTED" in said
        assert len(list(stored.glob("data.mdb.damaged-*"))) == 1

    def test_two_crashes_in_a_row_set_the_file_aside_and_kills_do_not(
        self, stored: Path, start_store: StartStore, start_worker: StartWorker
    ) -> None:
        for number in (signal.SIGSEGV, signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGBUS, signal.SIGSEGV):
            store = start_store(stored)
            assert len(start_worker(store).restore(PROMPT)[1]) == 6
            store.process.send_signal(number)
            store.process.wait(10)
        store = start_store(stored)
        assert start_worker(store).restore(PROMPT) == ([], [])
        code, said = store.stop()
        assert code == 0
        assert "crashed twice in a row" in said
        assert len(list(stored.glob("data.mdb.damaged-*"))) == 1

    @pytest.mark.parametrize("byte", [1, 6], ids=["some", "absurdly many"])
    @pytest.mark.parametrize("table", [b"payloads", b"nodes"])
    def test_page_counts_that_cannot_be(
        self, stored: Path, start_store: StartStore, start_worker: StartWorker, table: bytes, byte: int
    ) -> None:
        """LMDB keeps them beside each table's root and never checks them, but the budget is kept by them."""
        data = bytearray((stored / "data.mdb").read_bytes())
        for at in range(0, len(data), 4096):
            name = data.find(table, at, at + 4096)
            if data[at + 10] & 2 and name > 0 and data.find(b"order", at, at + 4096) > 0:  # the table of tables
                leaf_pages = name + len(table) + 16
                data[leaf_pages + byte] |= 0x40
        (stored / "data.mdb").write_bytes(data)
        store = start_store(stored)
        store.process.wait(10)
        code, said = store.stop()
        assert code == 1
        assert "its tables say that they have" in said
        store = start_store(stored)
        worker = start_worker(store)
        keys = worker.save(PROMPT)
        assert worker.restore(PROMPT)[1] == keys
        assert store.stats()["warm"]["bytes"] < 10 * MIB
        assert store.stop()[0] == 0
        assert len(list(stored.glob("data.mdb.damaged-*"))) == 1

    @pytest.mark.parametrize("kind", ["cut", "wrong"])
    def test_sums_that_are_damaged_are_counted_anew(self, stored: Path, start_store: StartStore, kind: str) -> None:
        store = start_store(stored)
        before = store.stats()
        assert store.stop()[0] == 0
        env = lmdb.open(str(stored), max_dbs=8)
        with env.begin(write=True) as txn:
            meta = env.open_db(b"meta", txn=txn)
            sums = msgspec.msgpack.decode(txn.get(b"sums", db=meta))
            sums |= {"stored": 1 << 62, "raw": 5, "sizes": {}}
            data = msgspec.msgpack.encode(sums)
            txn.put(b"sums", data[:-5] if kind == "cut" else data, db=meta)
        env.close()
        if kind == "wrong":  # nothing shows it, but after a crash nobody's sums are believed
            (stored / "opened").touch()
        store = start_store(stored)
        after = store.stats()
        for name in ("warm", "namespaces"):
            assert after[name] == before[name]
        assert after["counters"]["raw_bytes"] == before["counters"]["raw_bytes"]
        assert store.stop()[0] == 0
        assert list(stored.glob("data.mdb.damaged-*")) == []

    def test_a_record_that_says_absurd_sizes_holds_nothing_up(
        self, stored: Path, start_store: StartStore, start_worker: StartWorker
    ) -> None:
        env = lmdb.open(str(stored), max_dbs=8)
        nodes = env.open_db(b"nodes")
        with env.begin(write=True) as txn:
            place, value = next((bytes(k), bytes(v)) for k, v in txn.cursor(nodes) if len(k) < 32 + 256)  # the tail
            record = msgspec.msgpack.decode(value, type=Record)
            txn.put(place, msgspec.msgpack.encode(msgspec.structs.replace(record, size=1 << 62)), db=nodes)
        env.close()
        store = start_store(stored)
        worker = start_worker(store)
        assert len(worker.restore(PROMPT)[1]) == 5
        found = store.ask(frames.Verify(1, repair=True))
        assert (found.damaged, found.removed) == (1, 1)
        assert "bytes" in found.problems[0]
        worker.save(PROMPT, size=400_000)
        assert store.flush() == 0
        assert store.ask(frames.Purge(2, all=True)).nodes == 6  # it is not looked for in quadrillions of pieces
        assert store.stop()[0] == 0

    def test_a_healthy_file_of_a_crashed_store_is_kept(
        self, stored: Path, start_store: StartStore, start_worker: StartWorker
    ) -> None:
        store = start_store(stored)
        store.greet()
        store.kill()
        assert (stored / "opened").exists()
        store = start_store(stored)
        assert len(start_worker(store).restore(PROMPT)[0]) == 6
        assert store.stop() == (0, "")
        assert not (stored / "opened").exists()


@pytest.mark.parametrize("warm", [8 * MIB, 1024 * MIB], ids=["evicting", "ample"])
def test_sigkill_while_it_writes(tmp_path: Path, start_store: StartStore, warm: int) -> None:
    """At random moments of saving, evicting and loading: nothing wrong is served, and what was flushed is there."""
    choose = random.Random(5)
    flushed: list[list[int]] = []
    flags = ("--write-queue", str(64 * MIB))
    for moment in range(8):
        store = start_store(tmp_path, *flags, hot=6 * MIB, warm=warm)
        worker = Worker(store)
        for tokens in flushed[-2:]:
            tiers, _keys = worker.restore(tokens)
            assert tiers == ["warm"] * 4 or warm == 8 * MIB, f"moment {moment}: what was flushed is gone"
        killer = threading.Timer(choose.uniform(0.01, 0.4), store.kill)
        killer.start()
        number = moment * 1000
        while worker.client.connected:
            number += 1
            tokens = [number, *PROMPT[:200]]
            saved = worker.save(tokens, size=choose.randrange(1000, 300_000))
            worker.restore([choose.randrange(moment * 1000, number + 1), *PROMPT[:200]])
            if choose.random() < 0.3:
                with contextlib.suppress(ConnectionError):
                    sure = store.flush() == 0 and store.stats()["counters"]["dropped_nodes"] == 0
                    if sure and len(saved) == 4:
                        flushed.append(tokens)
        killer.join()
        worker.client.close()
        store.channel.close()
    assert flushed
    assert not list(tmp_path.glob("*damaged*"))
    store = start_store(tmp_path, *flags, hot=6 * MIB, warm=warm)
    assert store.stats()["warm"]["bytes"] <= warm
    assert store.stop() == (0, "")


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="needs root, to mount a small tmpfs")
def test_a_full_disk(tmp_path: Path, start_store: StartStore, start_worker: StartWorker) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("mount is not permitted here")
    try:
        store = start_store(disk / "cache", hot=32 * MIB, warm=256 * MIB)
        worker = start_worker(store)
        long = list(range(30 * 64))
        worker.save(PROMPT, size=200_000)
        assert store.flush() == 0
        keys = worker.save(long, size=400_000)
        assert store.flush() > 0
        stats = store.stats()
        assert stats["warm"]["state"] == "full"
        assert stats["warm"]["reason"]
        assert stats["counters"]["errors"] > 0
        assert worker.restore(long) == (["hot"] * 30, keys)
        purged = store.ask(frames.Purge(1, all=True))
        assert (purged.nodes, purged.error) == (36, "")
        worker.save(PROMPT, size=200_000)
        assert store.flush() == 0
        assert store.stats()["warm"]["state"] == "ok"
        assert store.stop()[0] == 0
        store = start_store(disk / "cache")
        worker.attach(store)
        assert worker.restore(PROMPT)[0] == ["warm"] * 6
        worker.save(long, size=400_000)
        code, said = store.stop()
        assert code == 0
        assert "could not be written" in said
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_client_without_a_store() -> None:
    client = StoreClient()
    assert client.open_namespace(DESCRIPTION, 0.01) is None
    lookup = client.lookup(b"n" * 32, to_le(PROMPT), 10, exact=False)
    assert lookup.wait_plan(0.01) is None
    assert lookup.state(0) == "lost"
    lookup.release()
    assert client.reserve([1]) == []
    client.close()

"""The memo of what was generated: found by text, bounded, checked, kept, and never another namespace's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from prefix_testing import Store, Worker

from homeprefixd.frames.store import Purge, Remember, Stretch
from homeprefixd.prefix.blocks import from_le, text_digest, text_tail, to_le
from homeprefixd.prefix.disk import Disk
from homeprefixd.prefix.policy import Worth
from homeprefixd.prefix.replies import MOST_BYTES, Replies, pack, unpack
from homeprefixd.prefix.warm_table import REPLIES

HOUSE, GUEST = b"h" * 32, b"g" * 32


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def memo(disk: Disk | None = None, **more: int) -> Replies:
    return Replies(disk, wall=Clock(), **more)


def remember(replies: Replies, text: bytes, *tokens: int, namespace: bytes = HOUSE) -> None:
    replies.remember(namespace, text_digest(namespace, text), len(text), text_tail(text), [], to_le(tokens))


def recalled(replies: Replies, text: bytes, namespace: bytes = HOUSE) -> tuple[int, list[list[int]]] | None:
    row = replies.recall(namespace, text)
    return None if row is None else (row.length, [from_le(reply) for reply in row.replies])


def open_disk(folder: Path, *, read_only: bool = False) -> Disk:
    return Disk(folder, limit=64 << 20, level=1, policy=Worth(), read_only=read_only)


def test_the_longest_prompt_that_a_text_begins_with() -> None:
    replies = memo()
    remember(replies, b"user: hi\nassistant: ", 1, 2)
    remember(replies, b"user: hi\nassistant: Hello.\nuser: why?\nassistant: ", 3)
    remember(replies, b"user: ho\nassistant: ", 4)
    assert recalled(replies, b"user: hi\nassistant: Hello.") == (20, [[1, 2]])
    assert recalled(replies, b"user: hi\nassistant: Hello.\nuser: why?\nassistant: So.") == (49, [[3]])
    assert recalled(replies, b"user: hi\nassistant:") is None
    assert recalled(replies, b"user: ha\nassistant: Hello.") is None
    assert recalled(memo(), b"user: hi\nassistant: Hello.") is None


def test_nothing_of_another_namespace_is_found() -> None:
    replies = memo()
    remember(replies, b"my secret: ", 1)
    assert recalled(replies, b"my secret: x", GUEST) is None
    replies.remember(GUEST, text_digest(HOUSE, b"my secret: "), 11, text_tail(b"my secret: "), [], to_le([9]))
    assert recalled(replies, b"my secret: x", GUEST) is None  # a digest is of its own namespace
    remember(replies, b"my secret: ", 2, namespace=GUEST)
    assert recalled(replies, b"my secret: x", GUEST) == (11, [[2]])
    assert recalled(replies, b"my secret: x") == (11, [[1]])


def test_several_replies_to_one_prompt() -> None:
    replies = memo()
    for token in (1, 2, 3, 4, 5, 2):
        remember(replies, b"prompt", token)
    assert recalled(replies, b"prompt") == (6, [[2], [5], [4], [3]])


def test_what_is_wrong_is_forgotten() -> None:
    replies = memo()
    remember(replies, b"prompt", 1)
    remember(replies, b"prompt")
    assert recalled(replies, b"prompt") is None
    assert len(replies) == replies.bytes == 0


def test_it_is_bounded_and_keeps_what_was_used_last() -> None:
    replies = memo(most_rows=3)
    for name in (b"one", b"two", b"three"):
        remember(replies, name, 1)
    assert recalled(replies, b"one") is not None
    remember(replies, b"four", 1)
    assert len(replies) == 3
    assert recalled(replies, b"two") is None
    assert recalled(replies, b"one") is not None

    small = memo(limit=1)  # the least that it takes
    assert small.limit < MOST_BYTES
    for number in range(400):
        remember(small, b"%d" % number, *range(1000))
        assert small.bytes <= small.limit
    assert 10 < len(small) < 400
    assert recalled(small, b"399") is not None
    remember(small, b"long", *range(100_000))
    assert recalled(small, b"long") is None


def test_it_survives_a_restart(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    replies = memo(disk)
    stretches = [Stretch(3, 5, to_le([7]))]
    replies.remember(HOUSE, text_digest(HOUSE, b"prompt"), 6, text_tail(b"prompt"), stretches, to_le([1, 2]))
    remember(replies, b"forgotten", 3)
    assert replies.due_in(0.0) is not None
    replies.put(disk)
    assert replies.due_in(0.0) is None
    replies.forget()
    remember(replies, b"prompt", 1, 2)  # the removals wait, and this after them
    disk.close()

    disk = open_disk(tmp_path)
    replies = memo(disk)
    row = replies.recall(HOUSE, b"prompt and more")
    assert row is not None
    assert (row.length, row.stretches, row.replies) == (6, stretches, [to_le([1, 2])])
    replies.forget()
    replies.put(disk)
    disk.close()
    disk = open_disk(tmp_path)
    assert len(memo(disk)) == 0
    disk.close()


@pytest.mark.parametrize("at", [0, 9, -1])
def test_damaged_rows_are_dropped(tmp_path: Path, at: int, caplog: pytest.LogCaptureFixture) -> None:
    disk = open_disk(tmp_path)
    replies = memo(disk)
    remember(replies, b"prompt", 1, 2)
    remember(replies, b"another", 3)
    replies.put(disk)
    [key] = [HOUSE + text_digest(HOUSE, b"prompt")]
    data = bytearray(disk.reply_row(key) or b"")
    data[at] ^= 1
    disk.put_replies({key: bytes(data)})
    with caplog.at_level(logging.WARNING):
        assert recalled(replies, b"prompt") is None
    assert (replies.damaged, len(replies)) == (1, 1)
    assert "damaged" in caplog.text
    disk.put_replies({key: bytes(data)})
    again = memo(disk)
    assert (again.damaged, len(again)) == (1, 1)
    assert recalled(again, b"another") == (7, [[3]])
    again.put(disk)
    assert disk.reply_row(key) is None
    disk.close()


def test_a_row_is_of_its_key() -> None:
    replies = memo()
    remember(replies, b"prompt", 1)
    row = replies.recall(HOUSE, b"prompt")
    assert row is not None
    key = HOUSE + text_digest(HOUSE, b"prompt")
    assert unpack(key, pack(key, row)) == row
    assert unpack(GUEST + key[32:], pack(key, row)) is None
    assert unpack(key[:-1], pack(key[:-1], row)) is None
    assert unpack(key, b"") is None


def test_forgetting() -> None:
    replies = memo()
    remember(replies, b"old", 1)
    moment = replies.recall(HOUSE, b"old")
    assert moment is not None
    remember(replies, b"new", 1)
    remember(replies, b"guest", 1, namespace=GUEST)
    assert replies.forget(before=1002.5) == 1
    assert recalled(replies, b"old") is None
    assert replies.forget([GUEST]) == 1
    assert recalled(replies, b"new") is not None
    assert replies.forget() == 1
    assert replies.stats()["rows"] == replies.stats()["bytes"] == 0


def test_a_file_of_an_earlier_version_has_no_such_table(tmp_path: Path) -> None:
    import lmdb

    disk = open_disk(tmp_path)
    disk.close()
    with lmdb.open(str(tmp_path), max_dbs=16) as env:
        table = env.open_db(REPLIES, create=False)
        with env.begin(write=True) as txn:
            txn.drop(table, delete=True)
    disk = open_disk(tmp_path, read_only=True)
    assert disk.reply_rows() == []
    assert disk.reply_row(b"x" * 64) is None
    disk.close()


def test_over_the_socket_and_purged(
    tmp_path: Path, start_store: Callable[..., Store], start_worker: Callable[[Store], Worker]
) -> None:
    """It is found by the same client, by another one and after a restart, until it is purged."""
    store = start_store(tmp_path)
    store.greet()
    worker = start_worker(store)

    def say(text: bytes, *tokens: int) -> Remember:
        digest = text_digest(worker.namespace, text)
        return Remember(worker.namespace, digest, len(text), text_tail(text), [], to_le(tokens))

    worker.client.remember(say(b"prompt", 1, 2))
    found = worker.client.recall(worker.namespace, b"prompt and more", 5.0)
    assert found is not None
    assert (found.length, found.replies) == (6, [to_le([1, 2])])
    assert worker.client.recall(worker.namespace, b"other", 5.0) is None
    assert worker.client.recall(GUEST, b"prompt and more", 5.0) is None
    assert store.stats()["replies"]["rows"] == 1
    store.stop()

    store = start_store(tmp_path)
    store.greet()
    worker = start_worker(store)
    assert worker.client.recall(worker.namespace, b"prompt", 5.0) is not None
    store.ask(Purge(3, all=True))
    assert worker.client.recall(worker.namespace, b"prompt", 5.0) is None
    worker.client.close()
    assert worker.client.recall(worker.namespace, b"prompt", 5.0) is None
    worker.client.remember(say(b"prompt", 1))

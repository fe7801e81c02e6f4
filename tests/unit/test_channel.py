"""Frames over a socket pair: whole, in order, and as few writes as asked for."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator

import pytest

from homeprefixd.channel import MAX_FRAME, Channel, ChannelClosedError, encode
from homeprefixd.frames.worker import Delta, FromWorker

Pair = tuple[Channel[FromWorker], socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A channel, and the bare socket of the other side."""
    ours, theirs = socket.socketpair()
    channel: Channel[FromWorker] = Channel(ours, FromWorker)
    theirs.settimeout(10)
    try:
        yield channel, theirs
    finally:
        channel.close()
        theirs.close()


def delta(number: int) -> Delta:
    return Delta(rid=f"r{number}", text="x" * number, tokens=number)


def is_silent(sock: socket.socket) -> bool:
    return not select.select([sock], [], [], 0)[0]


def test_what_is_sent_together_leaves_in_one_write(pair: Pair) -> None:
    channel, theirs = pair
    with channel.together():
        channel.send(delta(1))
        other = threading.Thread(target=channel.send, args=(delta(2),))
        other.start()
        other.join(10)
        assert is_silent(theirs)
    assert theirs.recv(1 << 16) == encode(delta(1)) + encode(delta(2))
    channel.send(delta(3))
    assert theirs.recv(1 << 16) == encode(delta(3))


def test_nothing_together_is_no_write(pair: Pair) -> None:
    channel, theirs = pair
    with channel.together():
        pass
    assert is_silent(theirs)


def test_what_fails_meanwhile_keeps_nothing_back(pair: Pair) -> None:
    channel, theirs = pair

    def fail() -> None:
        with channel.together():
            channel.send(delta(1))
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert theirs.recv(1 << 16) == encode(delta(1))


def test_a_frame_with_a_descriptor_does_not_wait(pair: Pair) -> None:
    channel, theirs = pair
    reading, writing = os.pipe()
    try:
        with channel.together():
            channel.send(delta(1))
            channel.send(delta(2), writing)
            data, descriptors, _flags, _address = socket.recv_fds(theirs, 1 << 16, 1)
            assert data == encode(delta(2))
            os.write(descriptors[0], b"!")
            assert os.read(reading, 1) == b"!"
            os.close(descriptors[0])
        assert theirs.recv(1 << 16) == encode(delta(1))
    finally:
        os.close(reading)
        os.close(writing)


def test_the_other_end_is_gone(pair: Pair) -> None:
    channel, theirs = pair
    theirs.close()
    with pytest.raises(ChannelClosedError), channel.together():
        channel.send(delta(1))
    with pytest.raises(ChannelClosedError):
        channel.send(delta(2))
    with pytest.raises(ChannelClosedError):
        channel.receive()


def test_frames_come_whole_however_they_are_cut(pair: Pair) -> None:
    channel, theirs = pair
    data = b"".join(encode(delta(number)) for number in range(1, 40))
    for at in range(0, len(data), 31):
        theirs.sendall(data[at : at + 31])
    assert [channel.receive() for _ in range(1, 40)] == [delta(number) for number in range(1, 40)]


def test_a_length_that_cannot_be_ends_the_connection(pair: Pair) -> None:
    channel, theirs = pair
    theirs.sendall((MAX_FRAME + 1).to_bytes(4, "little"))
    with pytest.raises(ChannelClosedError, match="was announced"):
        channel.receive()

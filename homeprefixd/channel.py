"""Frames over a Unix stream socket: a four-byte little-endian length, then msgpack; descriptors beside them.

`Channel` blocks and is for threads (worker, store, CLI); `AsyncChannel` is for the daemon's event loop. Both ends
trust each other (socket pairs made by the daemon), so a frame that cannot be decoded ends the connection.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from .frames import Frame

MAX_FRAME = 256 << 20
"""Bytes. A prompt of a million tokens as text fits many times; a length beyond it means that the stream is broken."""

_LENGTH = 4
_READ = 256 << 10

In = TypeVar("In")


class ChannelClosedError(ConnectionError):
    """The other end is gone."""


class _Parser(Generic[In]):
    """Bytes in, frames out, each with the descriptors that came with it or before it."""

    def __init__(self, incoming: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self._buffer = bytearray()
        self.descriptors: deque[int] = deque()

    def feed(self, data: bytes) -> list[In]:
        """Append `data`; return the frames that became whole."""
        self._buffer += data
        frames: list[In] = []
        at = 0
        while len(self._buffer) - at >= _LENGTH:
            size = int.from_bytes(self._buffer[at : at + _LENGTH], "little")
            if size > MAX_FRAME:
                raise ChannelClosedError(f"a frame of {size} bytes was announced")
            if len(self._buffer) - at - _LENGTH < size:
                break
            body = bytes(self._buffer[at + _LENGTH : at + _LENGTH + size])
            at += _LENGTH + size
            try:
                frames.append(self._decoder.decode(body))
            except msgspec.MsgspecError as error:
                raise ChannelClosedError(f"a frame could not be decoded: {error}") from error
        del self._buffer[:at]
        return frames


def encode(frame: Frame) -> bytes:
    """The bytes of one frame on the wire."""
    body = msgspec.msgpack.encode(frame)
    return len(body).to_bytes(_LENGTH, "little") + body


def _receive(sock: socket.socket, descriptors: deque[int]) -> bytes:
    data, ancillary, _flags, _address = sock.recvmsg(_READ, socket.CMSG_SPACE(16 * 4), socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array.array("i")
            received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
            descriptors.extend(received)
    return data


def _rights(descriptor: int) -> list[tuple[int, int, array.array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]


class Channel(Generic[In]):
    """Blocking end of a link. One thread receives; any thread may send.

    `incoming` is the union of frames that the other side may send, e.g. `frames.store.ToStore`.
    """

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._parser: _Parser[In] = _Parser(incoming)
        self._pending: deque[In] = deque()
        self._send_lock = threading.Lock()
        self._held: bytearray | None = None  # of `together`, while it is open
        self._outbox: deque[memoryview] = deque()  # of `post`; while there is something in it, `_drain` sends

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, frame: Frame, descriptor: int | None = None) -> None:
        """Send one frame, whole. Raises ChannelClosedError when the other end is gone."""
        data = encode(frame)
        try:
            with self._send_lock:
                if self._held is not None and descriptor is None:
                    self._held += data
                    return
                if descriptor is not None:
                    sent = self._sock.sendmsg([data], _rights(descriptor))
                    data = data[sent:]
                self._sock.sendall(data)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What any thread sends meanwhile leaves in one write at the end. Frames with a descriptor do not wait for it.

        For moments, and by one thread at a time. Raises ChannelClosedError as `send` does.
        """
        with self._send_lock:
            self._held = bytearray()
        try:
            yield
        finally:
            try:
                with self._send_lock:
                    data, self._held = self._held, None
                    if data:
                        self._sock.sendall(data)
            except OSError as error:
                raise ChannelClosedError(str(error)) from error

    def post(self, frame: Frame) -> None:
        """Send one frame, never waiting: what the socket does not take now is sent by a thread of its own, in order.

        Raises ChannelClosedError when the other end is known to be gone. Not beside `send` on the same channel.
        """
        data = memoryview(encode(frame))
        with self._send_lock:
            if self._outbox:
                self._outbox.append(data)
                return
            try:
                data = data[self._sock.send(data, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                pass
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            if data:
                self._outbox.append(data)
                threading.Thread(target=self._drain, name="outbox", daemon=True).start()

    def _drain(self) -> None:
        """Send what waits; ends when nothing does any more, or the other end is gone."""
        while True:
            data = self._outbox[0]
            try:
                self._sock.sendall(data)
            except OSError:
                data = memoryview(b"")
            with self._send_lock:
                if not data:
                    self._outbox.clear()
                else:
                    self._outbox.popleft()
                if not self._outbox:
                    return

    def receive(self) -> In:
        """The next frame; blocks. Raises ChannelClosedError at the end of the stream."""
        while not self._pending:
            try:
                data = _receive(self._sock, self._parser.descriptors)
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            if not data:
                raise ChannelClosedError("the other end closed the connection")
            self._pending.extend(self._parser.feed(data))
        return self._pending.popleft()

    def take_descriptor(self) -> int:
        """The descriptor that came with the frame just received. The caller owns it."""
        if not self._parser.descriptors:
            raise ChannelClosedError("a descriptor was announced and did not come")
        return self._parser.descriptors.popleft()

    def close(self) -> None:
        """End the connection; a thread blocked in `receive` gets ChannelClosedError."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        while self._parser.descriptors:
            os.close(self._parser.descriptors.popleft())


class AsyncChannel(Generic[In]):
    """The daemon's end of a link, on its event loop.

    Frames are handed to `on_frame` as they come and `on_close` is called once at the end, both from the loop.
    `send` never blocks: what the socket does not take at once waits in memory, in order. Create it inside the loop.
    """

    def __init__(self, sock: socket.socket, incoming: Any, on_frame: Any, on_close: Any) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._parser: _Parser[In] = _Parser(incoming)
        self._on_frame = on_frame
        self._on_close = on_close
        self._outbox: deque[tuple[memoryview, int | None]] = deque()
        self._closed = False
        self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def closed(self) -> bool:
        return self._closed

    def send(self, frame: Frame, descriptor: int | None = None) -> None:
        """Queue one frame. `descriptor` is duplicated: the caller may close its own. Raises ChannelClosedError."""
        if self._closed:
            raise ChannelClosedError("the connection is closed")
        own = None if descriptor is None else os.dup(descriptor)
        self._outbox.append((memoryview(encode(frame)), own))
        if len(self._outbox) == 1:
            self._writable()

    def _writable(self) -> None:
        try:
            while self._outbox:
                data, descriptor = self._outbox[0]
                if descriptor is not None:
                    sent = self._sock.sendmsg([data], _rights(descriptor))
                    os.close(descriptor)
                else:
                    sent = self._sock.send(data)
                if sent < len(data):
                    self._outbox[0] = (data[sent:], None)
                else:
                    self._outbox.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._sock.fileno(), self._writable)
            return
        except OSError:
            self.close()
            return
        self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        try:
            data = _receive(self._sock, self._parser.descriptors)
            frames = self._parser.feed(data) if data else None
        except BlockingIOError:
            return
        except OSError:  # ChannelClosedError is one
            frames = None
        if frames is None:
            self.close()
            return
        for frame in frames:
            self._on_frame(frame)

    def close(self) -> None:
        """End the connection; `on_close` is called once, soon."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for _data, descriptor in self._outbox:
            if descriptor is not None:
                os.close(descriptor)
        self._outbox.clear()
        while self._parser.descriptors:
            os.close(self._parser.descriptors.popleft())
        self._loop.call_soon(self._on_close)

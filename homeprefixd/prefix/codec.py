"""Payload <-> pieces: how the state of a block lies on disk, and the checksum that guards it.

A payload (raw bytes of llama.cpp's state) is cut into pieces of `PIECE` bytes, each encoded on its own, so that a piece
is read straight from LMDB's map and decoded straight into its place in a slot of the arena. Knows nothing of either.

A piece record is a header (`_HEADER`, 32 bytes), then one of

* `RAW`: the bytes as they are;
* `PLANES`: the low bytes of all 16-bit numbers as they are (they do not compress), then the high bytes, a zstd frame.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from .scratch import Scratch

RAW = 0
PLANES = 1

_HEADER = struct.Struct("<4sBBHIIIIQ")
"""Magic, codec, zero, piece number, raw bytes, bytes of the first part, bytes of the second, zero, checksum."""

_MAGIC = b"hpb1"
_CHECKSUM_BYTES = 8
_PAGE_HEADER = 16  # of an LMDB overflow page

PIECE = (256 << 10) - _PAGE_HEADER - _HEADER.size
"""Raw bytes of a piece: with its header and LMDB's own it fills whole pages. A multiple of 16."""

MIN_GAIN = 0.05
"""A piece that planes make less than this much smaller is stored raw."""

_Bytes = npt.NDArray[np.uint8]


class DamagedError(Exception):
    """A stored piece is not what was written. The message says in what way."""


def piece_count(size: int) -> int:
    """Pieces of a payload of `size` bytes."""
    return -(-size // PIECE)


def _checksum(key: bytes, header: bytes, payload: memoryview) -> int:
    """xxh3_64 over the node's key, the header without its checksum (it holds the piece number), and the payload.

    The first two go in as the seed, because one call over the payload is faster than a streaming digest.
    """
    seed = xxhash.xxh3_64_intdigest(key + header[: _HEADER.size - _CHECKSUM_BYTES])
    return xxhash.xxh3_64_intdigest(payload, seed)


class Encoder:
    """Raw bytes -> piece records. One per thread: it owns a compressor and its buffers.

    `level`: zstd's; 0 stores everything raw.
    """

    def __init__(self, level: int) -> None:
        self._compressor = zstandard.ZstdCompressor(level=level, write_checksum=False) if level else None
        self._record = bytearray(_HEADER.size + PIECE)
        self._view = memoryview(self._record)
        self._body: _Bytes = np.frombuffer(self._record, np.uint8)[_HEADER.size :]
        self._words = np.empty(PIECE // 2, np.uint16)
        self._high: _Bytes = np.empty(PIECE // 2, np.uint8)

    def encode(self, key: bytes, number: int, raw: memoryview) -> memoryview:
        """The record of piece `number` of node `key`. `raw`: at most PIECE bytes. Valid until the next call."""
        size = len(raw)
        codec, first, second = RAW, size, 0
        high = self._compress_high(raw)
        if high is not None and size // 2 + len(high) <= size * (1 - MIN_GAIN):
            codec, first, second = PLANES, size // 2, len(high)
            words = np.frombuffer(raw, np.uint16)
            np.copyto(self._body[:first], words, casting="unsafe")
            self._body[first : first + second] = np.frombuffer(high, np.uint8)
        else:
            self._body[:size] = np.frombuffer(raw, np.uint8)
        end = _HEADER.size + first + second
        _HEADER.pack_into(self._record, 0, _MAGIC, codec, 0, number, size, first, second, 0, 0)
        checksum = _checksum(key, bytes(self._record[: _HEADER.size]), self._view[_HEADER.size : end])
        struct.pack_into("<Q", self._record, _HEADER.size - _CHECKSUM_BYTES, checksum)
        return self._view[:end]

    def _compress_high(self, raw: memoryview) -> bytes | None:
        if self._compressor is None or len(raw) % 2 or not raw:
            return None
        words = self._words[: len(raw) // 2]
        np.right_shift(np.frombuffer(raw, np.uint16), 8, out=words)
        high = self._high[: len(words)]
        np.copyto(high, words, casting="unsafe")
        return self._compressor.compress(high.data)


def check(key: bytes, number: int, record: memoryview, size: int) -> tuple[int, int, int]:
    """Check the record of piece `number` of node `key`, of `size` raw bytes, by its header and checksum.

    Returns its codec and the bytes of its two parts. Raises DamagedError.
    """
    if len(record) < _HEADER.size:
        raise DamagedError(f"piece {number} has {len(record)} bytes, less than its header")
    magic, codec, zero, stored_number, stored_size, first, second, zero2, checksum = _HEADER.unpack_from(record)
    if magic != _MAGIC or zero or zero2 or codec not in (RAW, PLANES):
        raise DamagedError(f"piece {number} does not begin like one")
    if stored_number != number or stored_size != size:
        raise DamagedError(f"piece {number} is number {stored_number} of {stored_size} bytes; {size} were expected")
    if _HEADER.size + first + second != len(record):
        raise DamagedError(f"piece {number} has {len(record)} bytes, its header says {first} and {second}")
    if _checksum(key, bytes(record[: _HEADER.size]), record[_HEADER.size :]) != checksum:
        raise DamagedError(f"piece {number} has a wrong checksum")
    return codec, first, second


class Decoder:
    """Piece records -> raw bytes, checked. One per thread: it owns a decompressor."""

    def __init__(self) -> None:
        self._decompressor = zstandard.ZstdDecompressor()
        self.scratch = Scratch()

    def decode(self, key: bytes, number: int, record: memoryview, out: memoryview) -> None:
        """Check the record of piece `number` of node `key` and write its raw bytes to `out`, exactly.

        `out` is 2-byte aligned. Raises DamagedError, for anything that is not what `encode` made; `out` may then hold
        anything.
        """
        codec, first, second = check(key, number, record, len(out))
        size = len(out)
        body: _Bytes = np.frombuffer(record, np.uint8, offset=_HEADER.size)
        if codec == RAW:
            if first != size or second:
                raise DamagedError(f"piece {number} has {first} raw bytes instead of {size}")
            np.frombuffer(out, np.uint8)[:] = body
            return
        if first * 2 != size:
            raise DamagedError(f"piece {number} has a low plane of {first} bytes for {size}")
        try:
            plane = self._decompressor.decompress(body[first:].data, max_output_size=first)
        except zstandard.ZstdError as error:
            raise DamagedError(f"piece {number} cannot be decompressed: {error}") from error
        if len(plane) != first:
            raise DamagedError(f"piece {number} has a high plane of {len(plane)} bytes instead of {first}")
        words: npt.NDArray[Any] = np.frombuffer(out, np.uint16)
        # of the ways to interleave in numpy, the fastest measured: 9 GB/s, strided assignment 3 GB/s
        np.multiply(np.frombuffer(plane, np.uint8), 256, out=words, dtype=np.uint16, casting="unsafe")
        np.bitwise_or(words, body[:first], out=words)

"""codec.py: what comes back is what went in, and any changed byte is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeprefixd.prefix.codec import PIECE, PLANES, RAW, DamagedError, Decoder, Encoder, piece_count

KEY = bytes(range(32))
CODEC_AT = 4  # byte of the header


def halves(count: int, seed: int = 0) -> bytes:
    """f16 numbers as they are in KV state: normal, so that the high bytes compress."""
    return np.random.default_rng(seed).normal(size=count).astype(np.float16).tobytes()


def round_trip(raw: bytes, level: int = 1, key: bytes = KEY, number: int = 3) -> tuple[bytes, bytes]:
    record = bytes(Encoder(level).encode(key, number, memoryview(raw)))
    out = bytearray(len(raw))
    Decoder().decode(key, number, memoryview(record), memoryview(out))
    return record, bytes(out)


def test_f16_goes_by_planes_and_gains() -> None:
    raw = halves(PIECE // 2)
    record, out = round_trip(raw)
    assert out == raw
    assert record[CODEC_AT] == PLANES
    assert len(raw) / len(record) > 1.15


@pytest.mark.parametrize("level", [0, 1])
def test_noise_is_stored_raw(level: int) -> None:
    raw = np.random.default_rng(1).bytes(PIECE)
    record, out = round_trip(raw, level)
    assert out == raw
    assert record[CODEC_AT] == RAW
    assert (len(record) + 16) % 4096 == 0  # with LMDB's page header it fills whole pages


def test_level_0_compresses_nothing() -> None:
    raw = halves(1000)
    record, out = round_trip(raw, level=0)
    assert out == raw
    assert record[CODEC_AT] == RAW


@given(st.binary(min_size=1, max_size=500), st.integers(0, 65535))
def test_any_bytes_come_back(raw: bytes, number: int) -> None:
    assert round_trip(raw, number=number)[1] == raw


@given(st.integers(1, PIECE // 2), st.integers(0, 9))
@settings(max_examples=20)
def test_any_length_of_f16_comes_back(count: int, seed: int) -> None:
    raw = halves(count, seed)
    assert round_trip(raw)[1] == raw


@pytest.mark.parametrize("raw", [halves(600), np.random.default_rng(2).bytes(301)], ids=["planes", "raw"])
def test_every_flipped_byte_is_found(raw: bytes) -> None:
    good = Encoder(1).encode(KEY, 3, memoryview(raw))
    out = bytearray(len(raw))
    decoder = Decoder()
    decoder.decode(KEY, 3, good, memoryview(out))
    for at in range(len(good)):
        for flip in (0x01, 0x80, 0xFF):
            bad = bytearray(good)
            bad[at] ^= flip
            with pytest.raises(DamagedError):
                decoder.decode(KEY, 3, memoryview(bad), memoryview(out))


def test_a_piece_serves_only_where_it_belongs() -> None:
    raw = halves(600)
    record = Encoder(1).encode(KEY, 3, memoryview(raw))
    decoder = Decoder()
    for key, number, cut, room in [
        (bytes(32), 3, len(record), len(raw)),
        (KEY, 4, len(record), len(raw)),
        (KEY, 3, len(record) - 1, len(raw)),
        (KEY, 3, 20, len(raw)),
        (KEY, 3, 0, len(raw)),
        (KEY, 3, len(record), len(raw) - 2),
        (KEY, 3, len(record), len(raw) + 2),
    ]:
        with pytest.raises(DamagedError):
            decoder.decode(key, number, record[:cut], memoryview(bytearray(room)))


def test_piece_count() -> None:
    assert [piece_count(n) for n in (1, PIECE, PIECE + 1, 2 * PIECE)] == [1, 1, 2, 2]

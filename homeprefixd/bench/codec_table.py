"""What the store's codec gains and costs: `homeprefixd bench codec`.

The state of a real prompt, as llama.cpp writes it, cut into the pieces that the store stores: K and V apart, for f16
and for q8_0, at several levels of zstd. One thread; reading includes the checksum.
"""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..engine.bindings import Model
from ..engine.context import Batch, Context, ContextSettings
from ..engine.llama_log import LlamaLog
from ..prefix.codec import PIECE, Decoder, Encoder
from .texts import document

LEVELS = (0, 1, 3, 9)
TOKENS = 512
TYPES = ("f16", "q8_0")

_BATCH = 256
_LEAST = 1.0  # s that each rate is measured
_HEADER = struct.Struct("<IiII")  # magic, sequence id, streams, cells
_CELL = 12  # bytes: position, number of ids, id
_ROW = struct.Struct("<iQ")  # type, bytes of one cell's row
_TRANSPOSED = struct.Struct("<iII")  # type, bytes of an element, rows


@dataclass(frozen=True)
class Row:
    """`ratio`: raw bytes to stored ones; rates in bytes of state a second."""

    kv_type: str
    part: str  # K or V
    level: int  # 0: raw
    ratio: float
    write: float
    read: float


def measure(
    path: Path, threads: int, levels: Sequence[int] = LEVELS, tokens: int = TOKENS, least: float = _LEAST
) -> list[Row]:
    """Each rate is measured for `least` seconds.

    Raises ModelError, ValueError where the model's state has a layout that is not known here.
    """
    model = Model.load(path, LlamaLog())
    text = document(random.Random(1), 2.0 * tokens)
    ids = np.array(model.tokenize(text)[:tokens], np.int32)
    rows: list[Row] = []
    try:
        for kv_type in TYPES:
            for part, state in zip("KV", _parts(_state(model, kv_type, threads, ids)), strict=True):
                rows += [_measure(kv_type, part, level, state, least) for level in levels]
    finally:
        model.close()
    return rows


def _state(model: Model, kv_type: str, threads: int, ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> bytes:
    """Of the whole prompt."""
    context = Context(model, ContextSettings(len(ids) + 64, _BATCH, 2, threads, kv_type, kv_type != "f16"))
    try:
        batch = Batch(_BATCH)
        for at in range(0, len(ids), _BATCH):
            batch.set_prompt(ids[at : at + _BATCH], at, 0)
            context.decode(batch)
        context.synchronize()
        buffer = np.empty(context.state_size(0), np.uint8)
        return buffer[: context.export_state(0, buffer.ctypes.data, len(buffer))].tobytes()
    finally:
        context.close()


def _parts(state: bytes) -> tuple[bytes, bytes]:
    """K and V of all layers. Raises ValueError."""
    _magic, _seq, streams, cells = _HEADER.unpack_from(state, 0)
    at = _HEADER.size + _CELL * cells
    transposed, layers = struct.unpack_from("<II", state, at)
    at += 8
    if streams != 1 or not 0 < layers < 4096:
        raise ValueError("the model's state has a layout that is not known here")
    found: list[list[bytes]] = [[], []]
    for part in range(2):
        for _layer in range(layers):
            if part and transposed:
                _type, element, rows = _TRANSPOSED.unpack_from(state, at)
                at, size = at + _TRANSPOSED.size, element * rows * cells
            else:
                _type, width = _ROW.unpack_from(state, at)
                at, size = at + _ROW.size, width * cells
            found[part].append(state[at : at + size])
            at += size
    if at != len(state):
        raise ValueError("the model's state has a layout that is not known here")
    return b"".join(found[0]), b"".join(found[1])


def _measure(kv_type: str, part: str, level: int, state: bytes, least: float) -> Row:
    encoder, decoder, key = Encoder(level), Decoder(), bytes(32)
    raw = memoryview(state)
    pieces = [raw[at : at + PIECE] for at in range(0, len(raw) - PIECE + 1, PIECE)] or [raw]
    records = [bytes(encoder.encode(key, number, piece)) for number, piece in enumerate(pieces)]
    size, stored = sum(map(len, pieces)), sum(map(len, records))

    def write() -> None:
        for number, piece in enumerate(pieces):
            encoder.encode(key, number, piece)

    out = memoryview(bytearray(PIECE))

    def read() -> None:
        for number, (record, piece) in enumerate(zip(records, pieces, strict=True)):
            decoder.decode(key, number, memoryview(record), out[: len(piece)])

    return Row(kv_type, part, level, size / stored, size / _seconds(write, least), size / _seconds(read, least))


def _seconds(run: Callable[[], None], least: float) -> float:
    """Of one call: the fastest of those that fit the time."""
    best, end = float("inf"), time.perf_counter() + least
    while time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best

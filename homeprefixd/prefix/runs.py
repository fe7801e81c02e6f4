"""Runs: states of adjacent blocks that lie in memory as one, as llama.cpp would write it for all of them.

Without flash attention V has a row for each dimension with all cells in it, so that a block of 64 tokens is thousands
of pieces of 128 bytes. Sixteen blocks in one are imported twice as fast as one by one (measured: 4.5 and 2.3 GB/s where
a plain copy does 8.5). On disk each block stays alone.

A state is a header, then tables: the cells, K of each layer, V of each layer. The layout is llama.cpp's own
(`llama_kv_cache::state_write`), not promised by its API: it is read off a state. To take a run apart gives each block's
own bytes whatever they mean; that a run is what llama.cpp writes is believed by a worker only after it has compared the
two (`engine/proving.py`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .blocks import BLOCK_TOKENS, edges_of

RUN = 16
"""Blocks of a run, at most."""

_LARGE = 48 << 20  # bytes; of a run, at most
_SHARE = 16  # of the memory for all: a run takes no more than this part of it

_U32 = struct.Struct("<I")
_HEADER = struct.Struct("<IiII")  # magic, sequence id, streams, cells
_CELLS_AT = 12
_CELL_SIZES = (12, 20, 24)  # position, number of ids, id; with further numbers (M-RoPE)
_K_ROW = struct.Struct("<iQ")  # type, bytes of one cell's row
_V_TRANSPOSED = struct.Struct("<iII")  # type, bytes of an element, rows
_MAX_LAYERS = 4096
_FEW_ITEMS = 500

_Bytes = npt.NDArray[np.uint8]


def longest_run(block_bytes: int, room: int) -> int:
    """Blocks that may lie in a run where all of RAM's are to fit into `room` bytes; at least 1."""
    return max(1, min(RUN, min(_LARGE, room // _SHARE) // max(1, block_bytes)))


@dataclass(frozen=True)
class _Tables:
    """`repeat` times: `fixed` bytes that are the same for every block, then `rows` rows of `width` bytes per cell."""

    fixed: int
    rows: int
    width: int
    repeat: int = 1

    @property
    def together(self) -> int:
        """How many of them are copied in one go: few, but enough for numpy to give the interpreter free."""
        return _FEW_ITEMS // self.rows + 1 if self.rows > 1 else self.repeat

    def size(self, tokens: int) -> int:
        return (self.fixed + self.rows * self.width * tokens) * self.repeat


class Layout:
    """Where in a state lies what. `unit`: tokens of a part, a whole block's but in tests. Thread-safe."""

    def __init__(self, tables: tuple[_Tables, ...], unit: int = BLOCK_TOKENS) -> None:
        self._tables = tables
        self._unit = unit

    def of(self, unit: int) -> Layout:
        """The same of parts of another length."""
        return Layout(self._tables, unit)

    def size(self, parts: int) -> int:
        """Bytes of a state of so many parts."""
        return sum(table.size(parts * self._unit) for table in self._tables)

    def put(self, state: memoryview, run: memoryview, part: int, parts: int) -> None:
        """Write the state of one part to its places in a run of `parts`. Raises ValueError if sizes do not fit."""
        self._copy(state, 0, 1, run, part, parts, 1)

    def take(self, run: memoryview, first: int, count: int, parts: int, out: memoryview) -> None:
        """Write the state of parts [first, first + count) of a run of `parts` to `out`. Raises ValueError likewise."""
        self._copy(run, first, parts, out, 0, count, count)

    def is_in_order(self, run: memoryview, parts: int, start: int) -> bool:
        """Whether each part holds the positions of its place, the first of them `start`.

        Within a part in any order; but where cells became free, a later part may have some before an earlier one's.
        """
        cells, unit = self._tables[0], self._unit
        positions = np.ndarray((parts, unit), np.int32, run, cells.fixed, (unit * cells.width, cells.width))
        wanted = np.arange(start, start + parts * unit, dtype=np.int32).reshape(parts, unit)
        return bool(np.array_equal(np.sort(positions, axis=1), wanted))

    def _copy(
        self, source: memoryview, from_part: int, of: int, out: memoryview, to_part: int, to_of: int, count: int
    ) -> None:
        """`count` parts of a state of `of` parts, to their places in one of `to_of`."""
        if len(source) != self.size(of) or len(out) != self.size(to_of):
            raise ValueError(f"states of {len(source)} and {len(out)} bytes for {of} and {to_of} parts")
        if not (0 <= from_part <= of - count and 0 <= to_part <= to_of - count):
            raise ValueError(f"part {from_part} of {of} to {to_part} of {to_of}")
        side, other = _Side(np.frombuffer(source, np.uint8)), _Side(np.frombuffer(out, np.uint8))
        for table in self._tables:
            unit = table.width * self._unit
            side.row, side.skip = unit * of, unit * from_part
            other.row, other.skip = unit * to_of, unit * to_part
            _copy_tables(table, side, other, unit * count)
            side.at += table.size(of * self._unit)
            other.at += table.size(to_of * self._unit)
        _U32.pack_into(out, _CELLS_AT, to_of * self._unit)


@dataclass
class _Side:
    """Of a copy: where the tables begin, bytes of a row, and of those before what is copied."""

    array: _Bytes
    at: int = 0
    row: int = 0
    skip: int = 0

    def fixed(self, table: _Tables) -> npt.NDArray[Any]:
        """What stands before the rows."""
        return _items(self.array, self.at, table.fixed, (table.repeat, self._step(table)))

    def rows(self, table: _Tables, first: int, repeat: int, width: int) -> npt.NDArray[Any]:
        step = self._step(table)
        at = self.at + first * step + table.fixed + self.skip
        return _items(self.array, at, width, (repeat, step), (table.rows, self.row))

    def _step(self, table: _Tables) -> int:
        return table.fixed + table.rows * self.row


def _copy_tables(table: _Tables, source: _Side, out: _Side, width: int) -> None:
    """What stands before the rows, and `width` bytes of each."""
    if table.fixed:
        out.fixed(table)[...] = source.fixed(table)
    for first in range(0, table.repeat, table.together):  # so that what is written stays in the CPU's cache
        repeat = min(table.together, table.repeat - first)
        out.rows(table, first, repeat, width)[...] = source.rows(table, first, repeat, width)


def _items(array: _Bytes, offset: int, size: int, *axes: tuple[int, int]) -> npt.NDArray[Any]:
    """A view of items of `size` bytes; `axes`: length and stride of each.

    Few items are shown byte by byte: numpy gives the interpreter free only while it copies more than 500.
    """
    shape, strides = tuple(length for length, _ in axes), tuple(stride for _, stride in axes)
    if math.prod(shape) > _FEW_ITEMS:
        return np.ndarray(shape, f"V{size}", array, offset, strides)
    return np.ndarray((*shape, size), np.uint8, array, offset, (*strides, 1))


def layout_of(state: memoryview, tokens: int, parts: int = 1) -> Layout | None:
    """How `state`, of `parts` parts of `tokens` tokens, is laid out; None if that is not known, or gains nothing."""
    for cell_size in _CELL_SIZES:
        try:
            tables = _read_layout(state, tokens * parts, cell_size)
        except (struct.error, ValueError):
            continue
        return Layout(tuple(tables), tokens)
    return None


class Layouts:
    """Those of namespaces, read off the first state that is seen of each. To `learn`, hold the cache's lock."""

    def __init__(self, descriptions: Mapping[bytes, Mapping[str, Any]]) -> None:
        self._descriptions = descriptions
        self._known: dict[bytes, Layout] = {}

    def get(self, namespace: bytes) -> Layout | None:
        """None: not known yet, or there is none."""
        return self._known.get(namespace)

    def learn(self, namespace: bytes, state: memoryview, parts: int = 1) -> Layout | None:
        """Of a state of whole blocks."""
        known = self._known.get(namespace)
        if known is None and edges_of(self._descriptions.get(namespace, {})) is None:
            known = layout_of(state, BLOCK_TOKENS, parts)
            if known is not None:  # else it may be that of this state only
                self._known[namespace] = known
        return known


def _read_layout(state: memoryview, tokens: int, cell_size: int) -> list[_Tables]:
    """Raises ValueError or struct.error if it is not of this layout."""
    _magic, _seq, streams, cells = _HEADER.unpack_from(state, 0)
    if streams != 1 or cells != tokens:
        raise ValueError
    found = [_Tables(_HEADER.size, 1, cell_size)]
    at = found[0].size(tokens)
    transposed, layers = struct.unpack_from("<II", state, at)
    if transposed != 1 or not 0 < layers <= _MAX_LAYERS:
        raise ValueError
    lead = 8  # what stands before the first table of K
    at += lead
    for _ in range(layers):
        _type, row = _K_ROW.unpack_from(state, at)
        table = _Tables(lead + _K_ROW.size, 1, row)
        at += table.size(tokens) - lead
        lead = 0
        _append(found, table, len(state))
    while at < len(state):
        _type, element, rows = _V_TRANSPOSED.unpack_from(state, at)
        table = _Tables(_V_TRANSPOSED.size, rows, element)
        at += table.size(tokens)
        _append(found, table, len(state))
    if at != len(state):
        raise ValueError
    return found


def _append(found: list[_Tables], table: _Tables, most: int) -> None:
    """Add a table; equal ones that follow each other are one, repeated."""
    if not 0 < table.width <= most or not 0 < table.rows <= most:
        raise ValueError
    last = found[-1]
    if (last.fixed, last.rows, last.width) == (table.fixed, table.rows, table.width):
        found[-1] = _Tables(last.fixed, last.rows, last.width, last.repeat + 1)
    else:
        found.append(table)

"""States of adjacent blocks joined into one, which llama.cpp then restores with fewer and longer copies.

Without flash attention V has a row for each dimension with all cells in it, so that a block of 64 tokens is thousands
of pieces of 128 bytes. Four blocks in one are restored twice as fast as one by one (measured: 4.8 and 2.4 GB/s where
nothing else runs); joining them runs in another thread meanwhile.

A state is a header, then tables: the cells, K of each layer, V of each layer. The layout is llama.cpp's own
(`llama_kv_cache::state_write`), not promised by its API: it is read off a sample, and `slices.make_slicer` believes it
only if joining two blocks gives, byte for byte, what llama.cpp writes for both together.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_U32 = struct.Struct("<I")
_HEADER = struct.Struct("<IiII")  # magic, sequence id, streams, cells
_CELLS_AT = 12
_CELL_SIZES = (12, 20)  # position, number of ids, id; with two further coordinates (M-RoPE)
_K_ROW = struct.Struct("<iQ")  # type, bytes of one cell's row
_V_TRANSPOSED = struct.Struct("<iII")  # type, bytes of an element, rows
_MAX_LAYERS = 4096
_FEW_ITEMS = 500
_FEW_ROWS = 16  # that are not worth it
_SHORT_ROW = 1024  # bytes

_Bytes = npt.NDArray[np.uint8]


class JoinError(Exception):
    """Blocks that do not fit each other or the layout."""


@dataclass(frozen=True)
class _Tables:
    """`repeat` times: `fixed` bytes that are the same for every block, then `rows` rows of `width` bytes per cell."""

    fixed: int
    rows: int
    width: int
    repeat: int = 1

    @property
    def together(self) -> int:
        """How many of them are joined in one go: few, but enough for numpy to give the interpreter free."""
        return _FEW_ITEMS // self.rows + 1 if self.rows > 1 else self.repeat

    def size(self, tokens: int) -> int:
        return (self.fixed + self.rows * self.width * tokens) * self.repeat


class Joiner:
    """Joins states of one layout. Thread-safe."""

    def __init__(self, tables: Sequence[_Tables]) -> None:
        self._tables = tuple(tables)

    def size(self, tokens: int) -> int:
        """Bytes of a state of so many tokens."""
        return sum(table.size(tokens) for table in self._tables)

    def join(self, blocks: Sequence[memoryview], counts: Sequence[int], start: int, out: _Bytes) -> int:
        """Write the state of all blocks to `out`; returns its bytes. `counts`: tokens of each; `start`: first position.

        Raises JoinError unless each holds exactly the positions that follow those of the one before it.
        """
        sources = [np.frombuffer(block, np.uint8) for block in blocks]
        total = sum(counts)
        size = self.size(total)
        if size > len(out) or any(
            len(source) != self.size(count) for source, count in zip(sources, counts, strict=True)
        ):
            raise JoinError(f"blocks of {[len(s) for s in sources]} bytes for {list(counts)} tokens")
        to, begins = 0, [0] * len(sources)
        together = _Together.of(sources) if len(set(counts)) == 1 else None
        for table in self._tables:
            if together is None or not together.gather(table, begins[0], counts[0], out, to):
                _join_tables(table, sources, begins, counts, out, to)
            to += table.size(total)
            begins = [begin + table.size(count) for begin, count in zip(begins, counts, strict=True)]
        _U32.pack_into(out.data, _CELLS_AT, total)
        cells = self._tables[0]
        positions = np.ndarray(total, np.int32, out, cells.fixed, (cells.width,))
        before = 0
        for count in counts:
            # In any order: when others leave, what comes next may lie in cells before those of the block's beginning.
            own = np.sort(positions[before : before + count])
            if not np.array_equal(own, np.arange(start + before, start + before + count, dtype=np.int32)):
                raise JoinError(f"a block whose positions are not {start + before} to {start + before + count - 1}")
            before += count
        return size


@dataclass(frozen=True)
class _Together:
    """Sources of one length in one array, so that numpy picks their short rows in the order in which they are written.

    A quarter faster than one source after the other, where no cache of the CPU holds them (measured).
    """

    memory: _Bytes
    """From the lowest address of any source to the highest. Only what belongs to one of them may be read."""
    at: npt.NDArray[np.intp]
    """Where each begins in it."""

    @classmethod
    def of(cls, sources: Sequence[_Bytes]) -> _Together:
        addresses = [source.ctypes.data for source in sources]
        low, high = min(addresses), max(addresses) + len(sources[0])
        memory: _Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))
        return cls(memory, np.array(addresses, np.intp) - low)

    def gather(self, table: _Tables, begin: int, count: int, out: _Bytes, to: int) -> bool:
        """Join a table that stands at `begin` of each source; False if its rows are long, or do not lie on one grid."""
        width = table.width * count
        if table.rows < _FEW_ROWS or width > _SHORT_ROW or np.any(self.at % width):
            return False
        sources = len(self.at)
        own_step, step = table.fixed + table.rows * width, table.fixed + table.rows * width * sources
        picked = np.arange(table.rows)[:, None] + self.at // width
        for number in range(table.repeat):
            lead, target = begin + number * own_step, to + number * step
            out[target : target + table.fixed] = self.memory[self.at[0] + lead :][: table.fixed]
            lead, target = lead + table.fixed, target + table.fixed
            rows = np.ndarray((len(self.memory) - lead) // width, f"V{width}", self.memory, lead)
            np.take(rows, picked, out=np.ndarray(picked.shape, rows.dtype, out, target), mode="clip")
        return True


def _join_tables(
    table: _Tables, sources: list[_Bytes], begins: list[int], counts: Sequence[int], out: _Bytes, to: int
) -> None:
    """Write to `out` from `to` on what stands at `begins` of `sources`."""
    row = table.width * sum(counts)
    step = table.fixed + table.rows * row
    if table.fixed:
        own_step = table.size(counts[0]) // table.repeat
        _items(out, to, table.fixed, (table.repeat, step))[...] = _items(
            sources[0], begins[0], table.fixed, (table.repeat, own_step)
        )
    for first in range(0, table.repeat, table.together):  # so that what is written stays in the CPU's cache
        repeat = min(table.together, table.repeat - first)
        at = to + first * step + table.fixed
        for source, begin, count in zip(sources, begins, counts, strict=True):
            own = table.width * count
            own_step = table.fixed + table.rows * own
            _items(out, at, own, (repeat, step), (table.rows, row))[...] = _items(
                source, begin + first * own_step + table.fixed, own, (repeat, own_step), (table.rows, own)
            )
            at += own


def _items(array: _Bytes, offset: int, size: int, *axes: tuple[int, int]) -> npt.NDArray[Any]:
    """A view of items of `size` bytes; `axes`: length and stride of each.

    Few items are shown byte by byte: numpy gives the interpreter free only while it copies more than 500.
    """
    shape, strides = tuple(length for length, _ in axes), tuple(stride for _, stride in axes)
    if math.prod(shape) > _FEW_ITEMS:
        return np.ndarray(shape, f"V{size}", array, offset, strides)
    return np.ndarray((*shape, size), np.uint8, array, offset, (*strides, 1))


def joiner_of(state: memoryview, tokens: int) -> Joiner | None:
    """A joiner for states like `state`, one of `tokens` tokens; None if its layout is another, or gains nothing."""
    for cell_size in _CELL_SIZES:
        try:
            tables = _read_layout(state, tokens, cell_size)
        except (struct.error, ValueError):
            continue
        return Joiner(tables)
    return None


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

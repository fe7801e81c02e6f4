"""The head of a GGUF file: a few of its metadata, to judge a model's size before it is loaded, and where tensors lie.

Reads no model's weights, and trusts nothing: a wrong count or length is a ModelError, never more work than the file is
long, nor more than seconds: holes cost a disk nothing, so a file may be as long as it likes. Any process may ask.
"""

from __future__ import annotations

import io
import math
import os
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from .errors import ModelError

MAGIC = b"GGUF"

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's number of a scalar type -> how it is unpacked."""

_MAX_KEYS = 10_000
_MAX_TENSORS = 10_000
_MAX_DIMENSIONS = 4
_ALIGNMENT = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20

F32 = 0
"""ggml's number of the type of a tensor of 32-bit floats."""

_MOST_IN_A_BYTE = 8  # numbers: no type has less than a bit for each

_MAX_KEY = 1 << 16  # bytes of a name
_MAX_TEXTS = 1 << 22  # in all arrays together: vocabularies have up to 262,144, and merges twice that; seconds to walk
_MAX_NUMBER = 1 << 64  # of what is kept
_KEPT_TEXT = 1024  # bytes of a text that is kept; others are skipped
_KEPT_TEMPLATE = 1 << 20  # bytes, of a chat template
_KEPT_NUMBERS = 1024  # of an array that is kept, one for each layer

Value = int | float | bool | str | list[int]

_Found = TypeVar("_Found")

CHAT_TEMPLATE = "tokenizer.chat_template"
"""Name of the metadata that is the template."""


def read_metadata(path: Path, wanted: Callable[[str], bool]) -> dict[str, Value]:
    """Those metadata whose name is `wanted`, numbers, short texts, a chat template and short arrays of whole numbers
    only; of an array of texts, how many there are.

    Raises ModelError that names the file if it is no GGUF, is cut off or makes no sense.
    """
    return _read(path, lambda reader: reader.metadata(wanted))


def _read(path: Path, what: Callable[[_Reader], _Found]) -> _Found:
    """Raises ModelError that names the file."""
    try:
        with path.open("rb") as file:
            return what(_Reader(file, os.fstat(file.fileno()).st_size))
    except _FAULTS as error:
        raise ModelError(f"{path} is damaged ({error}): download it again.", code="model_load_failed") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.", code="model_load_failed") from error


@dataclass(frozen=True)
class TensorPlace:
    """A tensor as the head describes it. `kind`: ggml's number of its type."""

    name: str
    shape: tuple[int, ...]  # the innermost dimension first
    kind: int
    offset: int  # of its data from the file's beginning, bytes

    @property
    def count(self) -> int:
        """Of its numbers."""
        return math.prod(self.shape)


def tensor_places(data: bytes, name: str) -> list[TensorPlace]:
    """The tensors of a file with the content `data`; those of F32 lie within it.

    Raises ModelError that calls the file `name` if it is damaged.
    """
    try:
        return _Reader(io.BytesIO(data), len(data)).tensors()
    except _FAULTS as error:
        raise ModelError(f"{name} is damaged ({error}): download it again.", code="model_load_failed") from error


class _DamagedError(Exception):
    """What is read makes no sense."""


_FAULTS = (_DamagedError, struct.error, ValueError, OverflowError)  # a text may be none, and a number none or infinite


class _Reader:
    """Walks over the pairs of names and values at a file's beginning."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self._tensors = 0
        self._texts = 0  # walked over so far, in arrays

    def head(self, wanted: Callable[[str], bool]) -> tuple[dict[str, Value], int]:
        metadata = self.metadata(lambda name: name == _ALIGNMENT or wanted(name))
        count = sum(place.count for place in self._places(metadata))
        if count > _MOST_IN_A_BYTE * self._size:
            raise _DamagedError("it announces more parameters than it can hold")
        return metadata, count

    def tensors(self) -> list[TensorPlace]:
        return self._places(self.metadata(lambda name: name == _ALIGNMENT))

    def _places(self, metadata: Mapping[str, Value]) -> list[TensorPlace]:
        """Of the tensors, whose descriptions follow the metadata."""
        alignment = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT:
            raise _DamagedError(f"its alignment is {str(alignment)[:100]}")
        if self._tensors > _MAX_TENSORS:
            raise _DamagedError(f"it announces {self._tensors} tensors")
        found = [self._tensor() for _ in range(self._tensors)]
        begin = -(-self._file.tell() // alignment) * alignment
        places = [TensorPlace(name, shape, kind, begin + offset) for name, shape, kind, offset in found]
        for place in places:
            if place.kind == F32 and place.offset + 4 * place.count > self._size:
                raise _DamagedError(f"it ends before {place.name[:100]} does")
        return places

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._take(self._length(_MAX_KEY)).decode()
        dimensions = int(self._number("I"))
        if dimensions > _MAX_DIMENSIONS:
            raise _DamagedError(f"a tensor of {dimensions} dimensions")
        shape = tuple(int(self._number("Q")) for _ in range(dimensions))
        return name, shape, int(self._number("I")), int(self._number("Q"))

    def metadata(self, wanted: Callable[[str], bool]) -> dict[str, Value]:
        if self._take(4) != MAGIC:
            raise _DamagedError("it does not begin with GGUF")
        version = self._number("I")
        if version not in _VERSIONS:
            raise _DamagedError(f"its version is {version}, not {' or '.join(map(str, _VERSIONS))}")
        self._tensors = int(self._number("Q"))
        count = self._number("Q")
        if count > _MAX_KEYS:
            raise _DamagedError(f"it announces {count} metadata")
        found: dict[str, Value] = {}
        for _ in range(int(count)):
            name = self._take(self._length(_MAX_KEY)).decode()
            longest = _KEPT_TEMPLATE if name == CHAT_TEMPLATE else _KEPT_TEXT
            value = self._value(int(self._number("I")), longest if wanted(name) else 0)
            if value is not None:
                found[name] = value
        return found

    def _value(self, kind: int, longest: int) -> Value | None:
        """The next value; None where it is not kept. `longest`: bytes of a text that is; 0: nothing is."""
        keep = longest > 0
        if kind == _ARRAY:
            return self._array(keep)
        if kind == _STRING:
            length = self._length()
            if length <= longest and keep:
                return self._take(length).decode("utf-8", "replace")
            self._skip(length)
            return None
        number = self._number(self._format(kind))
        return number if keep else None

    def _array(self, keep: bool) -> list[int] | int | None:
        kind = int(self._number("I"))
        count = self._length()
        if kind == _STRING:
            self._skip_texts(count)
            return count if keep else None
        if kind == _ARRAY:
            raise _DamagedError("an array of arrays")
        form = self._format(kind)
        if keep and count <= _KEPT_NUMBERS:
            numbers = [int(number) for number in self._numbers(f"{count}{form}")]
            if any(abs(number) > _MAX_NUMBER for number in numbers):  # of floats, which can be what no float is again
                raise _DamagedError("a number that is too large")
            return numbers
        self._skip(count * struct.calcsize(f"<{form}"))
        return None

    def _skip_texts(self, count: int) -> None:
        """A vocabulary has hundreds of thousands: most are read, which takes a quarter of the time of jumping."""
        self._texts += count
        if self._texts > _MAX_TEXTS:
            raise _DamagedError(f"it announces {self._texts} texts in arrays")
        for _ in range(count):
            length = int.from_bytes(self._take(8), "little")
            if length > _KEPT_TEXT:
                self._skip(length)
            else:
                self._take(length)

    @staticmethod
    def _format(kind: int) -> str:
        if kind not in _FORMATS:
            raise _DamagedError(f"a value of the unknown type {kind}")
        return _FORMATS[kind]

    def _length(self, most: int | None = None) -> int:
        """Of what follows, in items of at least a byte: it cannot be more than is left."""
        length = int(self._number("Q"))
        left = self._size - self._file.tell()
        if length > (left if most is None else min(left, most)):
            raise _DamagedError(f"a length of {length} where {left} bytes are left")
        return length

    def _number(self, form: str) -> int | float | bool:
        return self._numbers(form)[0]

    def _numbers(self, form: str) -> tuple[int | float | bool, ...]:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))

    def _take(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise _DamagedError("it ends in the middle of its metadata")
        return data

    def _skip(self, count: int) -> None:
        if self._file.tell() + count > self._size:
            raise _DamagedError("it ends in the middle of its metadata")
        self._file.seek(count, os.SEEK_CUR)


_DETAILS = (
    "general.architecture",
    "split.count",
    "block_count",
    "embedding_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "context_length",
    "pooling_type",
)

_BITS = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "q5_1": 6.0, "q5_0": 5.5, "q4_1": 5.0, "q4_0": 4.5,
         "iq4_nl": 4.5}  # fmt: skip


def read_details(path: Path) -> dict[str, Value]:
    """What decides the size of a model's KV state, by name without the architecture. Raises ModelError."""
    return _without_arch(read_metadata(path, lambda name: _is_detail(name, ())))


def read_more_details(path: Path, more: Collection[str]) -> tuple[dict[str, Value], int]:
    """As `read_details`, with `more` names, and how many numbers all tensors of this file have. Raises ModelError, also
    where they cannot lie in it.
    """
    found, count = _read(path, lambda reader: reader.head(lambda name: _is_detail(name, more)))
    return _without_arch(found), count


def _is_detail(name: str, more: Collection[str]) -> bool:
    return any(one in _DETAILS or one in more for one in (name, name.partition(".")[2]))


def _without_arch(found: Mapping[str, Value]) -> dict[str, Value]:
    arch = f"{found.get('general.architecture', '')}."
    return {name.removeprefix(arch): value for name, value in found.items()}


def kv_bytes_per_token(details: Mapping[str, Value], type_k: str, type_v: str) -> float:
    """Bytes of K and V of one token; an upper bound where layers have a window. 0 if the metadata do not say."""
    layers = max(_numbers(details, "block_count"), default=0)
    heads = _numbers(details, "attention.head_count")
    kv_heads = _numbers(details, "attention.head_count_kv") or heads
    if not heads or not kv_heads or max(heads) <= 0:
        return 0.0
    default = max(_numbers(details, "embedding_length"), default=0) // max(heads)
    key = max(_numbers(details, "attention.key_length"), default=default)
    value = max(_numbers(details, "attention.value_length"), default=default)
    if len(kv_heads) == 1:
        kv_heads = kv_heads * min(layers, _KEPT_NUMBERS)
    bits = key * _BITS.get(type_k, 32.0) + value * _BITS.get(type_v, 32.0)
    return float(sum(kv_heads) * bits / 8)


def score_bytes_per_cell(details: Mapping[str, Value], batch: int) -> float:
    """Bytes of the matrix of attention scores (f32) that each cell costs where flash attention is off."""
    return max(_numbers(details, "attention.head_count"), default=0) * 4.0 * batch


def _numbers(details: Mapping[str, Value], name: str) -> list[int]:
    value = details.get(name)
    if isinstance(value, list):
        return value
    return [int(value)] if isinstance(value, int) else []

"""The control vectors of a loaded model: read from their files, added up, applied to each of its contexts.

They are added to what layers put out, in every request, and so change the K and V of the layers behind. No code of
llama.cpp sees the files. Layer 0 has none.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as C  # noqa: N812

from ..errors import ModelError
from ..frames.worker import ControlVector
from ..gguf_header import F32, TensorPlace, tensor_places
from ..lora import as_float32
from .bindings import Model
from .context import Batch, Context

SETTING = "`model.control_vectors`"

_LARGEST = 256 << 20  # bytes of a file; that of a model of 128 layers that are 18,432 wide has 10 MB
_DIRECTION = re.compile(r"direction\.(\d{1,9})")
_TRIED = 3  # tokens

logger = logging.getLogger(__name__)


class ControlVectors:
    """Of one model. `applied`: those that change anything, as they stand in its namespace, in a settled order."""

    def __init__(self, model: Model, configured: Sequence[ControlVector]) -> None:
        """Reads the files. Raises ModelError that names the file and the setting."""
        self._width, self._layers = model.n_embd, model.n_layer
        read = [self._read(one) for one in configured if as_float32(one.scale)]
        # Sums of floats depend on the order, and the namespace says nothing of that in the settings.
        read.sort(key=lambda found: (found[0].sha256, found[0].scale, found[0].first, found[0].last))
        self.applied = [one for one, _ in read]
        self._sum: npt.NDArray[np.float32] = np.zeros((max(0, self._layers - 1), self._width), np.float32)
        for _, data in read:
            self._sum += data

    def apply(self, context: Context) -> None:
        """Have `context` compute with them from now on. Raises ModelError."""
        if not self.applied:
            return
        pointer = self._sum.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        result = C.llama_set_adapter_cvec(context.pointer, pointer, self._sum.size, self._width, 1, self._layers - 1)
        if result != 0:
            raise ModelError(f"llama.cpp does not take the control vectors of {SETTING}.", code="model_load_failed")

    def try_out(self, context: Context) -> None:
        """Say so where llama.cpp does not apply them to models of this architecture. Clears the context."""
        if not self.applied or not self._sum.any():
            return
        with_them = _logits(context)
        C.llama_set_adapter_cvec(context.pointer, None, 0, self._width, 0, 0)
        without = _logits(context)
        self.apply(context)
        if np.array_equal(with_them, without):
            logger.warning(
                "%s changes nothing: llama.cpp applies no control vectors to %s models", SETTING, context.model.arch
            )

    def _read(self, one: ControlVector) -> tuple[ControlVector, npt.NDArray[np.float32]]:
        """As it is applied, and what is added to layers 1, 2, ...: float32[n_layer - 1, n_embd]."""
        data = _content(Path(one.path))
        highest = self._layers - 1
        first, last = max(1, one.first), min(one.last or highest, highest)
        if first > highest:
            raise _error(one, f"its first_layer is {first}, and the model's layers are 1 to {highest}")
        if first > last:
            raise _error(one, f"its first_layer {first} comes after its last_layer {last}")
        scale = as_float32(one.scale)
        found = np.zeros((max(0, self._layers - 1), self._width), np.float32)
        there = []
        for place in tensor_places(data, f"the control vector {one.path} ({SETTING})"):
            layer = self._layer(one, place)
            there.append(layer)
            if first <= layer <= last:
                found[layer - 1] += np.frombuffer(data, "<f4", place.count, place.offset) * np.float32(scale)
        if not there:
            raise _error(one, "it has no direction tensors, so it is no control vector")
        if not any(first <= layer <= last for layer in there):
            held = f"{min(there)} to {max(there)}"
            raise _error(one, f"it has directions for layers {held}, none of them from {first} to {last}")
        if not np.isfinite(found).all():
            raise _error(one, "its numbers are not all finite")
        if max(there) >= self._layers:
            logger.warning("%s: directions for layers beyond the model's %d are left out", one.path, self._layers)
        return ControlVector(one.path, scale, first, last, hashlib.sha256(data).hexdigest()), found

    def _layer(self, one: ControlVector, place: TensorPlace) -> int:
        """Which layer's direction this tensor is. Raises ModelError if it is none of this model."""
        match = _DIRECTION.fullmatch(place.name)
        if match is None:
            raise _error(one, f"it has a tensor {place.name[:100]!r}, so it is no control vector")
        layer = int(match[1])
        if layer == 0:
            raise _error(one, "it has a direction for layer 0, which can have none")
        if place.kind != F32 or len(place.shape) != 1:
            raise _error(one, f"{place.name} is not a row of 32-bit floats")
        if place.count != self._width:
            raise _error(
                one, f"{place.name} has {place.count} numbers, the model's layers {self._width}: it is another's"
            )
        return layer


def _content(path: Path) -> bytes:
    where = f"the control vector {path} ({SETTING})"
    try:
        if path.is_dir():
            raise ModelError(f"{where} is a directory: a control vector is a GGUF file.", code="model_load_failed")
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise ModelError(f"{where} cannot be read: {error.strerror}.", code="model_load_failed") from error
    if len(data) > _LARGEST:
        raise ModelError(
            f"{where} has more than {_LARGEST >> 20} MiB, so it is no control vector.", code="model_load_failed"
        )
    if not data.startswith(b"GGUF"):
        what = "is empty" if not data else "is not a GGUF file (it does not begin with GGUF)"
        raise ModelError(f"{where} {what}.", code="model_load_failed")
    return data


def _error(one: ControlVector, what: str) -> ModelError:
    return ModelError(f"the control vector {one.path} ({SETTING}) cannot be used: {what}.", code="model_load_failed")


def _logits(context: Context) -> npt.NDArray[np.float32]:
    context.clear()
    batch = Batch(_TRIED)
    batch.set_prompt(np.arange(1, _TRIED + 1, dtype=np.int32) * 7919 % context.model.n_vocab, 0, 0)
    context.decode(batch)
    found = context.logits(-1)
    context.clear()
    return found

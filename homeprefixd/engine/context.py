"""llama.cpp's context, checked: the pool of cells, what is computed in it, and the state of its sequences.

Every pointer and return code is checked where it is made. Nothing here knows of requests, the store or frames. A
Context belongs to one thread.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as C  # noqa: N812

from ..config import KV_TYPES_WITHOUT_FLASH
from ..errors import ModelError
from ..lora import Chosen
from .bindings import Model
from .failures import DecodeError

KV_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30,
}  # fmt: skip
"""Names of ggml's types that a K or V cache may have."""

MOST_OUTPUTS = 64
"""Tokens of a call whose logits may be wanted, as of a prompt's: a block, so that such calls keep to the grid."""

_WINDOW_CELLS = 256  # what their number is a multiple of
PARTIAL_ONLY = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
TokenArray = npt.NDArray[np.int32]


def kv_types(type_k: str, type_v: str) -> str:
    """In words."""
    return f"type {type_k}" if type_k == type_v else f"types {type_k} and {type_v}"


class Batch:
    """Input of llama_decode over arrays of our own, filled by numpy: no loop per token, no malloc per call."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._token = np.zeros(capacity, np.int32)
        self._pos = np.zeros(capacity, np.int32)
        self._n_seq_id = np.ones(capacity, np.int32)
        self._seq_id = np.zeros(capacity, np.int32)
        self._seq_ptr = (self._seq_id.ctypes.data + 4 * np.arange(capacity)).astype(np.uintp)
        self._output = np.zeros(capacity, np.int8)
        raw = C.llama_batch()
        for name, array in (
            ("token", self._token), ("pos", self._pos), ("n_seq_id", self._n_seq_id), ("seq_id", self._seq_ptr),
            ("logits", self._output),
        ):  # fmt: skip
            kind = dict(C.llama_batch._fields_)[name]
            setattr(raw, name, ctypes.cast(array.ctypes.data, kind))
        self.raw = raw

    def set_prompt(self, tokens: TokenArray, start: int, seq: int, *, all_logits: bool = False) -> None:
        """One stretch of one sequence; logits only for its last token, or for all. At most `capacity` tokens."""
        n = len(tokens)
        if not 0 < n <= self.capacity:
            raise ValueError(f"a batch of {n} tokens where 1 to {self.capacity} fit")
        self._token[:n] = tokens
        self._pos[:n] = np.arange(start, start + n, dtype=np.int32)
        self._seq_id[:n] = seq
        self._output[:n] = all_logits
        self._output[n - 1] = 1
        self.raw.n_tokens = n

    def set_steps(self, tokens: Sequence[int], positions: Sequence[int], seqs: Sequence[int]) -> None:
        """One token of each of several sequences, all with logits."""
        n = len(tokens)
        if not 0 < n <= self.capacity:
            raise ValueError(f"a batch of {n} tokens where 1 to {self.capacity} fit")
        if n == 1:  # one stream: an item is set ten times faster than a slice
            self._token[0], self._pos[0], self._seq_id[0], self._output[0] = tokens[0], positions[0], seqs[0], 1
        else:
            self._token[:n] = tokens
            self._pos[:n] = positions
            self._seq_id[:n] = seqs
            self._output[:n] = 1
        self.raw.n_tokens = n


@dataclass(frozen=True)
class ContextSettings:
    """What a Context is made with. Counts in tokens; `n_seq_max` includes the scratch sequence."""

    n_ctx: int
    n_batch: int
    n_seq_max: int
    threads: int
    kv_type: str
    flash_attention: bool
    kv_type_v: str = ""  # "": as `kv_type`

    @property
    def type_v(self) -> str:
        return self.kv_type_v or self.kv_type


class Context:
    """llama.cpp's context: the pool of cells and the compute buffers. Not thread-safe."""

    def __init__(self, model: Model, settings: ContextSettings, setting_name: str = "`model.ctx`") -> None:
        """Raises ModelError that names the setting and the size if it cannot be made."""
        of_v = "kv_type_v" if settings.kv_type_v else "kv_type"
        for name, value in (("kv_type", settings.kv_type), (of_v, settings.type_v)):
            if value not in KV_TYPES:
                raise ModelError(f"`model.{name}` is {value}: it must be one of {', '.join(KV_TYPES)}.")
        if settings.type_v not in KV_TYPES_WITHOUT_FLASH and not settings.flash_attention:
            raise ModelError(
                f"`model.{of_v}` is {settings.type_v}: a quantized V cache needs flash attention, which is off. Set"
                f" `model.flash_attention` to on, or `model.kv_type_v` to one of {', '.join(KV_TYPES_WITHOUT_FLASH)}.",
                code="context_failed",
            )
        self.model = model
        self.settings = settings
        self._log = model.log
        self._log.clear()
        self.flash_attention = settings.flash_attention
        self.pointer = self._create(settings.flash_attention)
        reason = self._log.reason()
        if not self.pointer and settings.flash_attention and settings.type_v in KV_TYPES_WITHOUT_FLASH:
            self.flash_attention = False
            self.pointer = self._create(False)
            reason = self._log.reason() or reason
        if not self.pointer:
            change = f"Lower {setting_name}, or free memory."
            if "cache type" in reason:  # it does not suit the model
                change = "Choose another `model.kv_type` or `model.kv_type_v`; f16 suits every model."
            raise ModelError(
                f"No context of {settings.n_ctx} tokens (KV {kv_types(settings.kv_type, settings.type_v)}) can be made"
                f" for {model.path}: {reason or 'llama.cpp gave no reason'}. {change}",
                code="context_failed",
            )
        self.lora: Chosen = ()
        """What it computes with, see `adapters.py`."""
        self.memory = C.llama_get_memory(self.pointer)
        if not self.memory:
            self.close()
            raise ModelError(f"{model.path}: llama.cpp gives its context no memory, so it cannot generate text.")
        self.n_ctx = int(C.llama_n_ctx(self.pointer))
        self.native_seconds = 0.0
        """Time that was spent in llama.cpp: computing and sampling."""

    def _create(self, flash_attention: bool) -> Any:
        wanted = self.settings
        params = C.llama_context_default_params()
        params.n_ctx = wanted.n_ctx
        params.n_batch = params.n_ubatch = wanted.n_batch
        params.n_seq_max = wanted.n_seq_max
        params.n_outputs_max = max(wanted.n_seq_max, min(MOST_OUTPUTS, wanted.n_batch))
        params.n_threads = params.n_threads_batch = wanted.threads
        params.kv_unified = True
        params.swa_full = False
        params.no_perf = True
        params.flash_attn_type = 1 if flash_attention else 0
        params.type_k, params.type_v = KV_TYPES[wanted.kv_type], KV_TYPES[wanted.type_v]
        return C.llama_init_from_model(self.model.pointer, params)

    def close(self) -> None:
        if self.pointer:
            C.llama_free(self.pointer)
            self.pointer = None

    # ---- computing

    def decode(self, batch: Batch) -> bool:
        """Compute a batch. False: there is no room for it, nothing was changed. Raises DecodeError on failure."""
        began = time.perf_counter()
        result = C.llama_decode(self.pointer, batch.raw)
        self.native_seconds += time.perf_counter() - began
        if result == 0:
            return True
        if result == 1:
            return False
        raise DecodeError(result, self._log.reason())

    def synchronize(self) -> None:
        """Wait until what was decoded is computed (it may still run on a GPU)."""
        C.llama_synchronize(self.pointer)

    def logits(self, index: int) -> npt.NDArray[np.float32]:
        """A copy of the logits of output `index` (-1: the last). float32[n_vocab]."""
        return self.logits_view(index).copy()

    def logits_view(self, index: int) -> npt.NDArray[np.float32]:
        """The logits that samplers look at, until the next decode: what is written there changes what is sampled."""
        pointer = C.llama_get_logits_ith(self.pointer, index)
        if not pointer:
            raise DecodeError(-1, f"no logits for output {index}")
        return np.ctypeslib.as_array(pointer, shape=(self.model.n_vocab,))

    def all_logits(self, count: int) -> npt.NDArray[np.float32]:
        """The logits of all `count` outputs of the last call, until the next one. float32[count, n_vocab]."""
        pointer = C.llama_get_logits(self.pointer)
        if not pointer:
            raise DecodeError(-1, "no logits")
        return np.ctypeslib.as_array(pointer, shape=(count, self.model.n_vocab))

    # ---- memory of sequences

    @property
    def window_cells(self) -> int:
        """Cells that layers with a sliding window have, as llama.cpp reckons them; 0 without one."""
        window = self.model.n_swa
        if not window:
            return 0
        needed = window * int(C.llama_n_seq_max(self.pointer)) + int(C.llama_n_ubatch(self.pointer))
        return -(-min(self.n_ctx, needed) // _WINDOW_CELLS) * _WINDOW_CELLS

    def pos_min(self, seq: int) -> int:
        """Lowest position in memory; -1 if the sequence is empty."""
        return int(C.llama_memory_seq_pos_min(self.memory, seq))

    def pos_max(self, seq: int) -> int:
        """Highest position in memory; -1 if the sequence is empty."""
        return int(C.llama_memory_seq_pos_max(self.memory, seq))

    def remove(self, seq: int, start: int = -1, end: int = -1) -> bool:
        """Forget positions [start, end) of a sequence; -1, -1 is all. False: a part cannot be removed."""
        return bool(C.llama_memory_seq_rm(self.memory, seq, start, end))

    def copy(self, source: int, target: int, start: int = -1, end: int = -1) -> None:
        """Add `target` to the cells [start, end) of `source`; no data moves."""
        C.llama_memory_seq_cp(self.memory, source, target, start, end)

    def clear(self) -> None:
        """Forget every sequence. Cells are then taken from the first one on, so that they lie on the 64-grid."""
        C.llama_memory_clear(self.memory, False)

    def state_size(self, seq: int, flags: int = 0) -> int:
        """Bytes that `export_state` would write; 0 on failure."""
        return int(C.llama_state_seq_get_size_ext(self.pointer, seq, flags))

    def export_state(self, seq: int, address: int, room: int, flags: int = 0) -> int:
        """Write the sequence's state to `address`; returns bytes written, 0 if `room` is too small."""
        pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8))
        return int(C.llama_state_seq_get_data_ext(self.pointer, pointer, room, seq, flags))

    def import_state(self, seq: int, address: int, size: int, flags: int = 0) -> int:
        """Replace the sequence by the state at `address`; returns bytes read, 0 on failure."""
        pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8))
        return int(C.llama_state_seq_set_data_ext(self.pointer, pointer, size, seq, flags))

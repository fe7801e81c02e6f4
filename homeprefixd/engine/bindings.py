"""Typed, checked wrappers over `llama_cpp.llama_cpp`: Model, Context, Batch.

Every pointer and return code is checked where it is made. Nothing here knows of requests, the store or frames. A
Context belongs to one thread; a Model's tokenising may be used from any.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as C  # noqa: N812

from ..errors import ModelError, RequestError
from ..lora import Chosen
from .devices import Device, device_list
from .failures import DecodeError
from .kernels import Kernels, choose_kernels
from .llama_log import LlamaLog

KV_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30,
}  # fmt: skip
"""Names of ggml's types that a K or V cache may have."""

PARTIAL_ONLY = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
TokenArray = npt.NDArray[np.int32]


def check_gguf(path: Path) -> None:
    """Refuse what cannot be a GGUF before llama.cpp sees it. Raises ModelError that names the file."""
    try:
        if path.is_dir():
            raise ModelError(f"{path} is a directory: `model.path` must name a GGUF file.")
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist: set `model.path` to a GGUF file.") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    if magic != b"GGUF":
        what = "is empty" if not magic else "is not a GGUF file (it does not begin with GGUF)"
        raise ModelError(f"{path} {what}: download it again, or set `model.path` to another file.")


_STRIPPING = C.LLAMA_TOKEN_ATTR_LSTRIP | C.LLAMA_TOKEN_ATTR_RSTRIP
_SPACE = b" \t\n\v\f\r"


@dataclass(frozen=True)
class TextBound:
    """How much text a token can stand for."""

    longest: int  # bytes
    ignored: bytes  # bytes of text that may vanish: without a token of their own, or swallowed by one beside them

    def least_tokens(self, text: str) -> int:
        """`text` has at least so many tokens. Takes a hundredth of the time of counting them."""
        return -(-len(text.encode("utf-8", "surrogatepass").translate(None, self.ignored)) // self.longest)


@dataclass(frozen=True)
class FillTokens:
    """Control tokens before the text before a gap, before the text after it, and before what fills it; those before a
    project's name and before a file's, -1 where there are none."""

    before: int
    after: int
    middle: int
    project: int
    file: int


class Model:
    """A loaded model and its vocabulary."""

    def __init__(self, pointer: Any, path: Path, kernels: Kernels, log: LlamaLog) -> None:
        self.pointer, self.path, self.kernels, self.log = pointer, path, kernels, log
        self._vocab = C.llama_model_get_vocab(pointer)
        if not self._vocab:
            raise ModelError(f"{path}: llama.cpp gives no vocabulary for it.")
        self.n_vocab: int = C.llama_vocab_n_tokens(self._vocab)
        self.bos: int = C.llama_vocab_bos(self._vocab)
        self.eos: int = C.llama_vocab_eos(self._vocab)
        self.add_bos: bool = C.llama_vocab_get_add_bos(self._vocab) and self.bos >= 0
        self.eog = frozenset(t for t in range(self.n_vocab) if C.llama_vocab_is_eog(self._vocab, t))
        self._pieces: dict[int, bytes] = {}
        self._pieces_special: dict[int, bytes] = {}

    @classmethod
    def load(
        cls,
        path: Path,
        log: LlamaLog,
        *,
        gpu_layers: int = 0,
        devices: Sequence[Device] = (),
        progress: Callable[[float], None] | None = None,
    ) -> Model:
        """Load a GGUF. `progress` is called with 0 to 1 on this thread. Raises ModelError with llama.cpp's reason.

        `devices`: those that get `gpu_layers`; all that there are if none is given.
        """
        check_gguf(path)
        C.llama_backend_init()
        kernels = choose_kernels()
        params = C.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        pointers = device_list(devices)  # must live until the model is loaded
        if devices:
            params.devices = ctypes.cast(pointers, ctypes.c_void_p)
        params.use_extra_bufts = kernels.allowed
        failures: list[BaseException] = []

        def report(value: float, _user_data: int) -> bool:
            try:
                if progress is not None:
                    progress(value)
            except BaseException as error:  # nothing may be raised into llama.cpp: stop loading, raise below
                failures.append(error)
                return False
            return True

        callback = C.llama_progress_callback(report)  # must live until the model is loaded
        params.progress_callback = callback
        log.clear()
        pointer = C.llama_model_load_from_file(str(path).encode(), params)
        if failures:
            if pointer:
                C.llama_model_free(pointer)
            raise failures[0]
        if not pointer:
            reason = log.reason() or "llama.cpp gave no reason"
            raise ModelError(f"{path} cannot be loaded: {reason}.", code="model_load_failed")
        try:
            model = cls(pointer, path, kernels, log)
            model._refuse_what_cannot_be_served()
        except BaseException:
            C.llama_model_free(pointer)
            raise
        return model

    def _refuse_what_cannot_be_served(self) -> None:
        kind = (
            "an encoder-decoder or encoder model"
            if C.llama_model_has_encoder(self.pointer) or not C.llama_model_has_decoder(self.pointer)
            else "a diffusion model"
            if C.llama_model_is_diffusion(self.pointer)
            else ""
        )
        if kind:
            raise ModelError(f"{self.path} is {kind}: only models that generate text token by token can be served.")

    def close(self) -> None:
        """Free it. Contexts of it must be closed before."""
        if self.pointer:
            C.llama_model_free(self.pointer)
            self.pointer = None

    # ---- what is known of it

    def meta(self, key: str) -> str | None:
        """A metadata value as text, e.g. `general.architecture`; `{arch}` in the key is filled in. None if absent."""
        name = key.replace("{arch}", self.arch if "{arch}" in key else "").encode()
        size = C.llama_model_meta_val_str(self.pointer, name, None, 0)
        if size < 0:
            return None
        buffer = ctypes.create_string_buffer(size + 1)
        C.llama_model_meta_val_str(self.pointer, name, buffer, size + 1)  # type: ignore[arg-type, unused-ignore]
        return buffer.value.decode("utf-8", "replace")

    @property
    def arch(self) -> str:
        return self.meta("general.architecture") or "unknown"

    @property
    def description(self) -> str:
        buffer = ctypes.create_string_buffer(256)
        C.llama_model_desc(self.pointer, buffer, 256)  # type: ignore[arg-type, unused-ignore]
        return buffer.value.decode("utf-8", "replace")

    @property
    def n_params(self) -> int:
        return int(C.llama_model_n_params(self.pointer))

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return int(C.llama_model_size(self.pointer))

    @property
    def n_embd(self) -> int:
        return int(C.llama_model_n_embd(self.pointer))

    @property
    def n_embd_out(self) -> int:
        """Numbers of an embedding: not always those of a hidden state."""
        return int(C.llama_model_n_embd_out(self.pointer))

    @property
    def n_ctx_train(self) -> int:
        return int(C.llama_model_n_ctx_train(self.pointer))

    @property
    def n_swa(self) -> int:
        """Positions of the sliding window; 0 without one."""
        return int(C.llama_model_n_swa(self.pointer))

    @property
    def is_recurrent(self) -> bool:
        return bool(C.llama_model_is_recurrent(self.pointer))

    @property
    def is_hybrid(self) -> bool:
        return bool(C.llama_model_is_hybrid(self.pointer))

    @property
    def chat_template(self) -> str:
        """The template of its metadata; "" without one."""
        text = C.llama_model_chat_template(self.pointer, None)
        return text.decode("utf-8", "replace") if text else ""

    def suppressed_tokens(self) -> list[int]:
        """Tokens that the model must never generate, by its metadata."""
        count = ctypes.c_int32(0)
        tokens = C.llama_vocab_get_suppress_tokens(self._vocab, ctypes.byref(count))
        return [int(tokens[i]) for i in range(count.value)] if tokens else []

    def fill_tokens(self) -> FillTokens | None:
        """The tokens that a model made to fill gaps has; None for others."""
        kinds = (C.llama_vocab_fim_pre, C.llama_vocab_fim_suf, C.llama_vocab_fim_mid)
        before, after, middle = (int(kind(self._vocab)) for kind in kinds)
        if min(before, after, middle) < 0:
            return None
        return FillTokens(
            before, after, middle, int(C.llama_vocab_fim_rep(self._vocab)), int(C.llama_vocab_fim_sep(self._vocab))
        )

    # ---- text and tokens

    def is_control(self, token: int) -> bool:
        """Has it no text, only a meaning? Ends of generation and unused tokens too."""
        kinds = C.LLAMA_TOKEN_ATTR_CONTROL | C.LLAMA_TOKEN_ATTR_UNKNOWN | C.LLAMA_TOKEN_ATTR_UNUSED
        return token in self.eog or bool(C.llama_vocab_get_attr(self._vocab, token) & kinds)

    def token_text(self, token: int) -> str:
        """Text of a token as the vocabulary has it (`<s>`); "" for none (-1)."""
        if not 0 <= token < self.n_vocab:
            return ""
        text = C.llama_vocab_get_text(self._vocab, token)
        return text.decode("utf-8", "replace") if text else ""

    @property
    def bos_text(self) -> str:
        return self.token_text(self.bos)

    @property
    def eos_text(self) -> str:
        return self.token_text(self.eos)

    def tokenize(self, text: str, *, add_bos: bool = True, parse_special: bool = True) -> list[int]:
        """Tokens of `text`, with the model's beginning-of-sequence token unless the text begins with it already."""
        data = text.encode("utf-8", "surrogatepass")
        room = len(data) + 8
        buffer = (C.llama_token * room)()
        count = C.llama_tokenize(self._vocab, data, len(data), buffer, room, False, parse_special)
        if count < 0 and count != -(2**31):
            room = -count
            buffer = (C.llama_token * room)()
            count = C.llama_tokenize(self._vocab, data, len(data), buffer, room, False, parse_special)
        if count < 0:
            raise RequestError(f"The prompt cannot be tokenised (llama.cpp: {count}): make it shorter.")
        tokens: list[int] = buffer[:count]
        if add_bos and self.add_bos and (not tokens or tokens[0] != self.bos):
            tokens.insert(0, self.bos)
        return tokens

    def tokenize_for_embedding(self, text: str) -> list[int]:
        """Tokens of `text` with all that the model was trained to find around it; nothing in it is a control token."""
        data = text.encode("utf-8", "surrogatepass")
        room = len(data) + 8
        for _ in range(2):
            buffer = (C.llama_token * room)()
            count = C.llama_tokenize(self._vocab, data, len(data), buffer, room, True, False)
            if count >= 0:
                tokens: list[int] = buffer[:count]
                return tokens
            room = -count
        raise RequestError("The input cannot be tokenised: make it shorter.", param="input")

    @cached_property
    def text_bound(self) -> TextBound | None:
        """How much text a token can stand for; None where llama.cpp's tokenizer may merge any amount of it.

        Takes some tenths of a second the first time: it looks at the whole vocabulary.
        """
        if C.llama_vocab_type(self._vocab) not in (C.LLAMA_VOCAB_TYPE_SPM, C.LLAMA_VOCAB_TYPE_BPE):
            return None
        buffer = ctypes.create_string_buffer(256)
        longest, ignored = 1, set(range(256))
        stripping = False
        for token in range(self.n_vocab):
            count = C.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
            if count == 1:
                ignored.discard(buffer[0][0])
            longest = max(longest, abs(count))  # negative: the room it needs
            stripping |= bool(C.llama_vocab_get_attr(self._vocab, token) & _STRIPPING)
        return TextBound(longest, bytes(ignored.union(_SPACE) if stripping else ignored))

    def piece(self, token: int, special: bool = False) -> bytes:
        """Bytes of one token, not always whole characters. `special`: show control tokens, which else are b""."""
        cache = self._pieces_special if special else self._pieces
        known = cache.get(token)
        if known is None:
            known = cache[token] = self._piece(token, special)
        return known

    def _piece(self, token: int, special: bool) -> bytes:
        room = 64
        for _ in range(2):
            buffer = ctypes.create_string_buffer(room)
            count = C.llama_token_to_piece(self._vocab, token, buffer, room, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            room = -count
        return b""

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raise RequestError if one of `tokens` is no id of this vocabulary."""
        if tokens and (min(tokens) < 0 or max(tokens) >= self.n_vocab):
            raise RequestError(f"`prompt` has token ids outside 0 to {self.n_vocab - 1}.", param="prompt")


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

    def set_prompt(self, tokens: TokenArray, start: int, seq: int) -> None:
        """One stretch of one sequence; logits only for its last token. At most `capacity` tokens."""
        n = len(tokens)
        if not 0 < n <= self.capacity:
            raise ValueError(f"a batch of {n} tokens where 1 to {self.capacity} fit")
        self._token[:n] = tokens
        self._pos[:n] = np.arange(start, start + n, dtype=np.int32)
        self._seq_id[:n] = seq
        self._output[:n] = 0
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


class Context:
    """llama.cpp's context: the pool of cells and the compute buffers. Not thread-safe."""

    def __init__(self, model: Model, settings: ContextSettings, setting_name: str = "`model.ctx`") -> None:
        """Raises ModelError that names the setting and the size if it cannot be made."""
        if settings.kv_type not in KV_TYPES:
            raise ModelError(f"`model.kv_type` is {settings.kv_type}: it must be one of {', '.join(KV_TYPES)}.")
        self.model = model
        self.settings = settings
        self._log = model.log
        self._log.clear()
        self.flash_attention = settings.flash_attention
        self.pointer = self._create(settings.flash_attention)
        if not self.pointer and settings.flash_attention:
            self.flash_attention = False
            self.pointer = self._create(False)
        if not self.pointer:
            reason = self._log.reason() or "llama.cpp gave no reason"
            raise ModelError(
                f"No context of {settings.n_ctx} tokens (KV type {settings.kv_type}) can be made for {model.path}:"
                f" {reason}. Lower {setting_name}, or free memory.",
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
        params.n_seq_max = params.n_outputs_max = wanted.n_seq_max
        params.n_threads = params.n_threads_batch = wanted.threads
        params.kv_unified = True
        params.swa_full = False
        params.no_perf = True
        params.flash_attn_type = 1 if flash_attention else 0
        params.type_k = params.type_v = KV_TYPES[wanted.kv_type]
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

    # ---- memory of sequences

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

    def import_state(self, seq: int, address: int, size: int) -> int:
        """Replace the sequence by the state at `address`; returns bytes read, 0 on failure."""
        pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8))
        return int(C.llama_state_seq_set_data_ext(self.pointer, pointer, size, seq, 0))

"""llama.cpp's model, checked: what a file holds, its vocabulary, text and tokens. Its context is in `context.py`.

Every pointer and return code is checked where it is made. Nothing here knows of requests, the store or frames. A
Model's tokenising may be used from any thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as C  # noqa: N812

from ..errors import ModelError, RequestError
from .devices import Device, device_list
from .kernels import Kernels, choose_kernels
from .llama_log import LlamaLog


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
        raise ModelError(f"{path} {what}: download it again, or name another file.")


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


class _Pieces(dict[int, bytes]):
    """Bytes of tokens, each asked for once. A plain look-up where it is known: prompts have thousands."""

    def __init__(self, ask: Callable[[int], bytes]) -> None:
        super().__init__()
        self._ask = ask

    def __missing__(self, token: int) -> bytes:
        piece = self[token] = self._ask(token)
        return piece


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
        self._plain = _Pieces(partial(self._piece, special=False))
        self._shown = _Pieces(partial(self._piece, special=True))

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
    def n_layer(self) -> int:
        return int(C.llama_model_n_layer(self.pointer))

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

    @property
    def tool_template(self) -> str:
        """A template of its own for chats with tools, which few models have; "" without one."""
        text = C.llama_model_chat_template(self.pointer, b"tool_use")
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

    @property
    def vocab(self) -> Any:
        """llama.cpp's pointer to its vocabulary, which lives as long as the model."""
        return self._vocab

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
        return (self._shown if special else self._plain)[token]

    def pieces(self, tokens: Iterable[int]) -> list[bytes]:
        """Bytes of each token, control tokens shown."""
        return list(map(self._shown.__getitem__, tokens))

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

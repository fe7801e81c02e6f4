"""Embeddings of texts and tokens, in a context of their own beside that of the chat.

One thread computes one input after another. Its context is made with the first request, and made anew for a longer
input than it can take: pooling needs a whole input in one call of llama.cpp.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as C  # noqa: N812

from ..channel import ChannelClosedError
from ..errors import ContextOverflowError, HomeprefixdError, ModelError, RequestError
from ..frames import Frame
from ..frames.worker import Converted, Embed
from .bindings import Model
from .failures import DecodeError, failure_of

LONGEST = 8192
"""Tokens of an input at most: the compute buffers grow with it."""

_SHORTEST = 512
_NONE, _MEAN, _RANK = 0, 1, 4  # LLAMA_POOLING_TYPE_*

logger = logging.getLogger(__name__)

Vector = npt.NDArray[np.float32]


def only_embeds(model: Model) -> bool:
    """Is it a model whose tokens see what follows them? Such a one cannot generate text."""
    return model.meta("{arch}.attention.causal") == "false" or "bert" in model.arch


class Embedder:
    """Answers `Embed` frames by `emit`, on a thread of its own."""

    def __init__(self, model: Model, threads: int, emit: Callable[[Frame], None]) -> None:
        self._model, self._threads, self._emit = model, threads, emit
        self.longest = min(model.n_ctx_train or LONGEST, LONGEST)
        self._queue: queue.SimpleQueue[Embed] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: dict[str, bool] = {}  # rid of what is not answered: was it cancelled?
        self._current = ""  # rid of what is computed
        self._abort = Abort()
        self._thread: threading.Thread | None = None
        self._context: _EmbeddingContext | None = None

    def put(self, wanted: Embed) -> None:
        """Take a request; it is answered by `Converted` or `Failure`, unless it is cancelled."""
        with self._lock:
            self._open[wanted.rid] = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="embedder", daemon=True)
                self._thread.start()
        self._queue.put(wanted)

    def cancel(self, rid: str) -> None:
        """Nobody waits for it any more; unknown ones are ignored."""
        with self._lock:
            if rid in self._open:
                self._open[rid] = True
                if rid == self._current:
                    self._abort.set()

    def _run(self) -> None:
        while True:
            wanted = self._queue.get()
            try:
                try:
                    answer: Frame | None = self._answer(wanted)
                except Exception as error:
                    if not isinstance(error, HomeprefixdError | DecodeError):
                        logger.exception("the embeddings %s could not be computed", wanted.rid)
                    answer = failure_of(wanted.rid, error)
                finally:
                    with self._lock:
                        self._current = ""
                        cancelled = self._open.pop(wanted.rid)
                if cancelled:
                    continue  # an error may be what became of it
                if answer is not None:
                    self._emit(answer)
            except ChannelClosedError:
                return  # the reader sees it too, and ends the process

    def _answer(self, wanted: Embed) -> Converted | None:
        """None if it was cancelled."""
        inputs = [self._tokens(index, given, wanted.truncate) for index, given in enumerate(wanted.inputs)]
        vectors: list[bytes] = []
        with self._lock:
            self._current = wanted.rid
            self._abort.clear()
        for tokens in inputs:
            if self._open[wanted.rid]:
                return None
            vectors.append(self._shortened(self._embed(tokens), wanted.dimensions).astype("<f4").tobytes())
        return Converted(wanted.rid, tokens=[len(tokens) for tokens in inputs], vectors=vectors)

    def _tokens(self, index: int, given: str | list[int | str], truncate: bool) -> list[int]:
        """Texts between token ids get no tokens of the model's own around them."""
        if isinstance(given, str):
            tokens = self._model.tokenize_for_embedding(given)
        else:
            self._model.check_tokens([part for part in given if isinstance(part, int)])
            tokens = []
            for part in given:
                tokens += (
                    [part] if isinstance(part, int) else self._model.tokenize(part, add_bos=False, parse_special=False)
                )
        if not tokens:
            raise RequestError(f"`input[{index}]` is empty: it must have at least one token.", param="input")
        if truncate:
            return tokens[: self.longest]
        if len(tokens) > self.longest:
            raise ContextOverflowError(
                f"`input[{index}]` has {len(tokens)} tokens and this model embeds at most {self.longest}: send it in"
                " pieces.",
                param="input",
                n_prompt_tokens=len(tokens),
                n_ctx=self.longest,
            )
        return tokens

    def _embed(self, tokens: list[int]) -> Vector:
        if self._context is None or self._context.longest < len(tokens):
            longest = _SHORTEST
            while longest < len(tokens):
                longest *= 2
            if self._context is not None:
                self._context.close()
                self._context = None
            self._context = _EmbeddingContext(self._model, self._threads, longest, self._abort)
        return self._context.embed(tokens)

    @staticmethod
    def _shortened(vector: Vector, dimensions: int) -> Vector:
        """Its first numbers, of length 1. Raises RequestError if there are fewer."""
        if dimensions > len(vector):
            raise RequestError(
                f"`dimensions` is {dimensions}, and this model's embeddings have {len(vector)}.",
                param="dimensions",
                code="out_of_range",
            )
        cut = vector[:dimensions] if dimensions else vector
        length = float(np.linalg.norm(cut))
        if not np.isfinite(length):
            raise HomeprefixdError("llama.cpp computed an embedding that is no number", code="decode_failed")
        return cut / np.float32(length) if length > 0 else cut


class Abort:
    """Ends what llama.cpp computes on a CPU. It asks before each step of a graph, so the function that it calls is one
    of C's, without Python's lock: the length of a text that is empty, or of one character once it is `set`.
    """

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)
        self.address = ctypes.addressof(self._text)
        strlen = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p)
        self.callback = C.ggml_abort_callback(strlen.value)

    def set(self) -> None:
        self._text[0] = b"\x01"

    def clear(self) -> None:
        self._text[0] = b"\x00"


class _EmbeddingContext:
    """A llama.cpp context that gives one vector for each input. Belongs to one thread."""

    def __init__(self, model: Model, threads: int, longest: int, abort: Abort) -> None:
        """`longest`: tokens of an input at most. Raises ModelError."""
        self._model, self._abort = model, abort
        self.longest = longest
        self._pointer = self._create(threads, -1)
        pooling = C.llama_pooling_type(self._pointer) if self._pointer else _NONE
        if self._pointer and pooling == _NONE:  # a chat model: the mean over its tokens
            C.llama_free(self._pointer)
            self._pointer = self._create(threads, _MEAN)
        if not self._pointer:
            reason = model.log.reason() or "llama.cpp gave no reason"
            raise ModelError(f"{model.path} cannot make embeddings of {longest} tokens: {reason}.")
        if pooling == _RANK:
            self.close()
            raise RequestError(f"{model.path.name} is a model that ranks documents: it makes no embeddings.")

    def _create(self, threads: int, pooling: int) -> Any:
        params = C.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = self.longest
        params.n_seq_max = 1
        params.n_threads = params.n_threads_batch = threads
        params.embeddings = True
        params.pooling_type = pooling
        params.no_perf = True
        params.abort_callback, params.abort_callback_data = self._abort.callback, self._abort.address
        self._model.log.clear()
        return C.llama_init_from_model(self._model.pointer, params)

    def embed(self, tokens: list[int]) -> Vector:
        """float32[n_embd]. Raises DecodeError."""
        memory = C.llama_get_memory(self._pointer)
        if memory:
            C.llama_memory_clear(memory, True)
        array = (C.llama_token * len(tokens))(*tokens)
        batch = C.llama_batch_get_one(array, len(tokens))
        outputs = (ctypes.c_int8 * len(tokens))(*[1] * len(tokens))
        batch.logits = ctypes.cast(outputs, ctypes.POINTER(ctypes.c_int8))
        result = C.llama_decode(self._pointer, batch)
        if result != 0:
            raise DecodeError(result, self._model.log.reason())
        pointer = C.llama_get_embeddings_seq(self._pointer, 0)
        if not pointer:
            raise DecodeError(-1, "no embedding")
        data = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(data, shape=(self._model.n_embd_out,)).copy()

    def close(self) -> None:
        if self._pointer:
            C.llama_free(self._pointer)
            self._pointer = None

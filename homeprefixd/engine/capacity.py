"""How many tokens one request may use, and how many cells the context has. Pure, but for reading metadata."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..config import AT_ONCE, FULL
from ..errors import ModelError
from ..machine import available_memory
from .bindings import Model
from .context import kv_types
from .model_files import model_files
from .places import MOST

DEFAULT_CTX = 32768
_ROUND = 256  # what llama.cpp pads a context to
_ALIAS = 4096
"""Cells. Without flash attention V has a row of all cells for each dimension. A pool that is a multiple of this puts
one cell's values of all rows into the same few cache sets, and restoring is a quarter slower (measured)."""
_BITS = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "q5_1": 6.0, "q5_0": 5.5, "q4_1": 5.0, "q4_0": 4.5,
         "iq4_nl": 4.5}  # fmt: skip
_LONG_FACTORS = b"rope_factors_long.weight"
_PIECE = 1 << 20
_HEADER_BYTES = 64 << 20  # tensor names are in the first megabytes, after the vocabulary


@dataclass(frozen=True)
class Capacity:
    """Both in tokens; `pool` is at least `ctx` and a multiple of 256."""

    ctx: int
    pool: int


def kv_bytes_per_token(model: Model, type_k: str, type_v: str) -> float:
    """Bytes of K and V of one token by the model's metadata; an upper bound where layers have a window."""
    layers = _numbers(model.meta("{arch}.block_count")) or [0]
    heads = _numbers(model.meta("{arch}.attention.head_count"))
    kv_heads = _numbers(model.meta("{arch}.attention.head_count_kv")) or heads
    if not heads or not kv_heads or not max(heads):
        return 0.0
    default = model.n_embd // max(heads)
    key = (_numbers(model.meta("{arch}.attention.key_length")) or [default])[0]
    value = (_numbers(model.meta("{arch}.attention.value_length")) or [default])[0]
    if len(kv_heads) == 1:
        kv_heads = kv_heads * layers[0]
    return sum(kv_heads) * (key * _BITS.get(type_k, 32.0) + value * _BITS.get(type_v, 32.0)) / 8


def score_bytes_per_cell(model: Model, batch: int) -> float:
    """Bytes of the matrix of attention scores (f32) that each cell costs where flash attention is off."""
    return max(_numbers(model.meta("{arch}.attention.head_count")) or [0]) * 4.0 * batch


def original_context(model: Model) -> int:
    """Tokens up to which a long-rope model uses its short factors; 0 for models that do not choose by pool size."""
    if not any(_has_long_factors(path) for path in model_files(model.path)):
        return 0
    original = _numbers(model.meta("{arch}.rope.scaling.original_context_length"))
    return original[0] if original else model.n_ctx_train  # as llama.cpp does where it is not said


def _has_long_factors(path: Path) -> bool:
    """Whether a file has a second set of factors. Metadata does not tell: some architectures need no `rope.scaling`."""
    before = b""
    with path.open("rb") as file:
        while file.tell() < _HEADER_BYTES and (piece := file.read(_PIECE)):
            if _LONG_FACTORS in before + piece:
                return True
            before = piece[-len(_LONG_FACTORS) :]
    return False


def choose(
    model: Model,
    *,
    ctx: int,
    pool: int,
    memory: int,
    parallel: int,
    kv_type: str,
    kv_type_v: str = "",
    score_bytes: float = 0.0,
) -> Capacity:
    """Resolve what is 0. `memory`: bytes for cells, 0 for a quarter of what is free now. Raises ModelError.

    `kv_type_v`: of V, if it is another. `score_bytes`: what a cell costs beside its K and V (`score_bytes_per_cell`).
    """
    if pool and ctx and pool < ctx:
        raise ModelError(f"`model.pool` is {pool} and `model.ctx` {ctx}: the pool of cells must hold one request.")
    type_v = kv_type_v or kv_type
    per_token = kv_bytes_per_token(model, kv_type, type_v) + score_bytes
    free = available_memory()
    budget = memory or free // 4
    affordable = int(budget / per_token) if per_token else 2**31
    needed = max(pool, ctx) * per_token
    if needed > free and not model.n_swa:  # llama.cpp fills it at once: the kernel would kill us, not refuse
        name = f"`model.pool` {pool}" if pool else f"`model.ctx` {ctx}"
        raise ModelError(
            f"{name} needs {needed / 2**30:.1f} GiB for K and V ({kv_types(kv_type, type_v)}), and"
            f" {free / 2**30:.1f} GiB are free: lower it, or choose a smaller `model.kv_type`.",
            code="context_failed",
        )
    original = original_context(model)
    own = ctx or min(model.n_ctx_train or DEFAULT_CTX, DEFAULT_CTX, max(affordable, _ROUND), pool or 2**31)
    if not ctx and original:
        own = min(own, original)
    if pool:
        return Capacity(own, _up(pool))
    most = max(own, min(parallel * own, affordable))
    if original and own <= original:  # beyond it, every stored prefix would be computed with other factors
        most = min(most, original)
    chosen = max(_up(own), most // _ROUND * _ROUND)
    if score_bytes and chosen % _ALIAS == 0:
        chosen += -_ROUND if chosen - _ROUND >= own else 0 if chosen == original else _ROUND
    return Capacity(own, chosen)


def at_once(model: Model, *, on_gpu: bool) -> int:
    """Sequences that may run at once where nobody says: those that find no cells wait all the same.

    `FULL` where llama.cpp sets memory aside for each: a state or a window, or on a GPU, room for outputs.
    """
    return FULL if _has_own_memory(model) or on_gpu else AT_ONCE


def _has_own_memory(model: Model) -> bool:
    return model.is_recurrent or model.is_hybrid or model.n_swa > 0


def split(model: Model, size: Capacity, parallel: int, *, on_gpu: bool, has_scores: bool) -> list[int]:
    """The pool as cells of one or more contexts, each of which holds one request; see `places.py` for why.

    One where the state is not of full attention alone, and on a GPU, where memory is dear.
    """
    plain = not (_has_own_memory(model) or original_context(model))
    # `choose` may have taken `_ROUND` off, which must not cost a whole context
    count = max(1, min(parallel, (size.pool + _ROUND) // size.ctx, MOST)) if plain and not on_gpu else 1
    if count == 1:
        return [size.pool]
    own = max(size.pool // count // _ROUND * _ROUND, _up(size.ctx))
    if has_scores and own % _ALIAS == 0:
        own += -_ROUND if own - _ROUND >= size.ctx else _ROUND
    return [own] * count


def _up(tokens: int) -> int:
    return -(-tokens // _ROUND) * _ROUND


def _numbers(text: str | None) -> list[int]:
    """Of metadata: `8` or `[8, 0, 8]`."""
    return [int(float(part)) for part in text.strip("[]").split(",") if part.strip()] if text else []

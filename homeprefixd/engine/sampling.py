"""Samplers: llama.cpp's chain, in llama-server's order.

Logit bias, those of `Sampling.samplers` in that order, then a draw by `seed`. With Mirostat: logit bias, penalties,
temperature and its own draw. At temperature 0: logit bias, penalties, DRY and the likeliest token.
"""

from __future__ import annotations

import ctypes
import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llama_cpp import llama_cpp as C  # noqa: N812

from ..errors import ModelError, RequestError
from ..frames.worker import SAMPLERS, Sampling
from .bindings import Model
from .context import Context

_RANDOM_SEED = 0xFFFFFFFF  # means "random" to llama.cpp, so it is never passed on for a given seed

_NUMBERS = (
    "temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "top_n_sigma",
    "xtc_probability", "xtc_threshold", "dynatemp_range", "dynatemp_exponent", "mirostat_tau", "mirostat_eta",
    "dry_multiplier", "dry_base",
)  # fmt: skip

_OF_REPETITION = ("penalties", "dry")
"""What also counts where the likeliest token is taken."""

_MIROSTAT_M = 100  # as llama-server has it


def check_sampling(sampling: Sampling, n_vocab: int) -> None:
    """Raise RequestError that names the field for a value that llama.cpp cannot take."""
    for name in _NUMBERS:
        if not math.isfinite(getattr(sampling, name)):
            raise RequestError(f"`{name}` must be a finite number.", param=name)
    if not math.isfinite(sampling.repeat_penalty) or sampling.repeat_penalty <= 1e-6:
        raise RequestError("`repeat_penalty` must be greater than 0 (1 turns it off).", param="repeat_penalty")
    if not -1 <= sampling.repeat_last_n < 2**31:
        raise RequestError("`repeat_last_n` must be -1 (the whole context), 0 (off) or more.", param="repeat_last_n")
    unknown = [name for name in sampling.samplers if name not in (*SAMPLERS, "infill")]
    if unknown:
        raise RequestError(
            f"`samplers` has {unknown[0][:40]!r}, which is none of {', '.join(SAMPLERS)}.", param="samplers"
        )
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token < n_vocab or math.isnan(bias):
            raise RequestError(
                f"`logit_bias` has {token}: {bias}; keys must be token ids from 0 to {n_vocab - 1}, values numbers.",
                param="logit_bias",
            )


def takes_long(sampling: Sampling) -> bool:
    """May it take seconds to make its chain? For each text that ends a repetition llama.cpp looks at all tokens."""
    return sampling.dry_multiplier != 0 and "dry" in sampling.samplers


class Sampler:
    """One request's chain. Keeps state (random numbers, penalties) from token to token. Close it."""

    def __init__(self, model: Model, sampling: Sampling, n_ctx: int) -> None:
        """`n_ctx`: what `repeat_last_n` -1 means. Raises RequestError, see `check_sampling`."""
        check_sampling(sampling, model.n_vocab)
        params = C.llama_sampler_chain_default_params()
        params.no_perf = True
        self._chain: Any = C.llama_sampler_chain_init(params)
        if not self._chain:
            raise ModelError("llama.cpp could not make a sampler.")
        self._holds_eog = False
        self._min_tokens = sampling.min_tokens
        try:
            self._build(model, sampling, n_ctx)
        except BaseException:
            self.close()
            raise

    def _build(self, model: Model, sampling: Sampling, n_ctx: int) -> None:
        n_vocab = model.n_vocab
        if sampling.min_tokens > 0 and not sampling.ignore_eos:
            self._add(_bias_sampler(n_vocab, ((t, -math.inf) for t in model.eog)))
            self._holds_eog = True  # the first of the chain, so that it can be taken out again
        bias = dict(sampling.logit_bias)
        bias.update((t, -math.inf) for t in model.suppressed_tokens())
        if sampling.ignore_eos:
            bias.update((t, -math.inf) for t in model.eog)
        if bias:
            self._add(_bias_sampler(n_vocab, bias.items()))
        seed = (secrets.randbits(32) if sampling.seed < 0 else sampling.seed) % _RANDOM_SEED
        makers = self._makers(model, sampling, n_ctx, seed)
        if sampling.temperature <= 0:
            wanted = [name for name in sampling.samplers if name in _OF_REPETITION]
        elif sampling.mirostat:
            wanted = ["penalties"]
        else:
            wanted = list(sampling.samplers)
        for name in wanted:
            if (make := makers[name]) is not None:
                self._add(make())
        if sampling.temperature <= 0:
            self._add(C.llama_sampler_init_greedy())
        elif sampling.mirostat:
            self._add(C.llama_sampler_init_temp(sampling.temperature))
            tau, eta = sampling.mirostat_tau, sampling.mirostat_eta
            if sampling.mirostat == 1:
                self._add(C.llama_sampler_init_mirostat(n_vocab, seed, tau, eta, _MIROSTAT_M))
            else:
                self._add(C.llama_sampler_init_mirostat_v2(seed, tau, eta))
        else:
            self._add(C.llama_sampler_init_dist(seed))

    def _makers(self, model: Model, sampling: Sampling, n_ctx: int, seed: int) -> dict[str, Callable[[], Any] | None]:
        """Name of a sampler -> what makes it; None: it is off. Sets `last_n`."""
        last_n = n_ctx if sampling.repeat_last_n < 0 else sampling.repeat_last_n
        has_penalty = last_n > 0 and _has_penalty(sampling) and "penalties" in sampling.samplers
        dry_n = n_ctx if sampling.dry_penalty_last_n < 0 else min(n_ctx, sampling.dry_penalty_last_n)
        has_dry = dry_n > 0 and takes_long(sampling)
        self.last_n = max(last_n if has_penalty else 0, dry_n if has_dry else 0)
        spread, exponent = sampling.dynatemp_range, sampling.dynatemp_exponent
        top_k = min(sampling.top_k, model.n_vocab)
        xtc = sampling.xtc_probability, sampling.xtc_threshold

        def penalties() -> Any:
            how = sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty
            return C.llama_sampler_init_penalties(model.n_vocab, last_n, *how)

        return {
            "penalties": penalties if has_penalty else None,
            "dry": (lambda: _dry_sampler(model, sampling, dry_n)) if has_dry else None,
            "top_n_sigma": (lambda: C.llama_sampler_init_top_n_sigma(sampling.top_n_sigma))
            if sampling.top_n_sigma > 0
            else None,
            "top_k": (lambda: C.llama_sampler_init_top_k(top_k)) if top_k > 0 else None,
            "typ_p": (lambda: C.llama_sampler_init_typical(sampling.typical_p, 1)) if sampling.typical_p < 1 else None,
            "top_p": (lambda: C.llama_sampler_init_top_p(sampling.top_p, 1)) if sampling.top_p < 1 else None,
            "min_p": (lambda: C.llama_sampler_init_min_p(sampling.min_p, 1)) if sampling.min_p > 0 else None,
            "xtc": (lambda: C.llama_sampler_init_xtc(*xtc, 1, seed)) if sampling.xtc_probability > 0 else None,
            "temperature": (lambda: C.llama_sampler_init_temp_ext(sampling.temperature, spread, exponent))
            if spread > 0
            else (lambda: C.llama_sampler_init_temp(sampling.temperature)),
            "infill": lambda: C.llama_sampler_init_infill(model.vocab),
        }

    def _add(self, sampler: Any) -> None:
        if not sampler:
            raise ModelError("llama.cpp could not make a sampler.")
        C.llama_sampler_chain_add(self._chain, sampler)

    def accept_prompt(self, tokens: Sequence[int]) -> None:
        """Let the penalties see the end of the prompt, as llama-server does."""
        if self.last_n:
            for token in tokens[-self.last_n :]:
                C.llama_sampler_accept(self._chain, token)

    def sample(self, context: Context, index: int, generated: int) -> int:
        """The next token, from the logits of output `index`; `generated`: how many the request has so far."""
        if self._holds_eog and generated >= self._min_tokens:
            C.llama_sampler_free(C.llama_sampler_chain_remove(self._chain, 0))
            self._holds_eog = False
        began = time.perf_counter()
        token: int = C.llama_sampler_sample(self._chain, context.pointer, index)
        context.native_seconds += time.perf_counter() - began
        return token

    def close(self) -> None:
        if self._chain:
            C.llama_sampler_free(self._chain)
            self._chain = None


def _has_penalty(sampling: Sampling) -> bool:
    return bool(sampling.repeat_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty)


def _bias_sampler(n_vocab: int, bias: Iterable[tuple[int, float]]) -> Any:
    items = list(bias)
    array = (C.llama_logit_bias * len(items))(*items)
    return C.llama_sampler_init_logit_bias(n_vocab, len(items), array)


def _dry_sampler(model: Model, sampling: Sampling, last_n: int) -> Any:
    texts = [text.encode(errors="surrogatepass") for text in sampling.dry_sequence_breakers]
    breakers = (ctypes.c_char_p * len(texts))(*texts)
    length = sampling.dry_allowed_length
    return C.llama_sampler_init_dry(
        model.vocab, sampling.dry_multiplier, sampling.dry_base, length, last_n, breakers, len(texts)
    )

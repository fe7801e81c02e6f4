"""Log-probabilities: of one row of logits, and of a prompt's own tokens while they are computed."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..frames.worker import TokenLogprob

_ROWS = 8  # that are reduced at once: a row is up to a megabyte, and there are two copies of each


def token_logprob(row: npt.NDArray[np.float32], token: int, top: int, piece: Callable[[int], bytes]) -> TokenLogprob:
    """Of `token`, and of the `top` likeliest. `row`: logits, float32[n_vocab]; `piece`: bytes of a token."""
    values = row.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    return _told(values, token, top, piece)


def _told(values: npt.NDArray[np.float64], token: int, top: int, piece: Callable[[int], bytes]) -> TokenLogprob:
    """`values`: log-probabilities, float64[n_vocab]."""
    likeliest: list[TokenLogprob] = []
    if top:
        count = min(top, len(values))
        found = np.argpartition(values, -count)[-count:]
        order = found[np.argsort(-values[found], kind="stable")].tolist()
        likeliest = [TokenLogprob(other, piece(other), float(values[other])) for other in order]
    return TokenLogprob(token, piece(token), float(values[token]), likeliest)


class PromptLogprobs:
    """The log-probability of each of a prompt's tokens after those before it; of the first there is none (NaN).

    Logits are not stored, so a prompt whose tokens are wanted is computed whole.
    """

    def __init__(self, tokens: list[int], top: int, piece: Callable[[int], bytes]) -> None:
        """`top`: how many of the likeliest are wanted at each place."""
        self._tokens, self._top, self._piece = tokens, top, piece
        self.told = [TokenLogprob(tokens[0], piece(tokens[0]), math.nan)]

    @property
    def complete(self) -> bool:
        return len(self.told) == len(self._tokens)

    def take(self, start: int, rows: npt.NDArray[np.float32]) -> None:
        """Logits of the tokens from position `start` on, float32[count, n_vocab]. What is known already is passed over.

        Row i tells of the token at `start` + i + 1.
        """
        for first in range(max(0, len(self.told) - 1 - start), len(rows), _ROWS):
            part = rows[first : first + _ROWS].astype(np.float64)
            part -= part.max(axis=1, keepdims=True)
            part -= np.log(np.exp(part).sum(axis=1, keepdims=True))
            for values in part:
                if self.complete:
                    return
                self.told.append(_told(values, self._tokens[len(self.told)], self._top, self._piece))

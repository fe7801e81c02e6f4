"""What goes out of a request: its text as frames and, where more is wanted, its thoughts, its tool calls and its
tokens' log-probabilities; and where its form is constrained, how a token is chosen.
"""

from __future__ import annotations

import functools

import msgspec
import numpy as np
import numpy.typing as npt

from ..chat.reply import ReplyParser, Split
from ..chat.stream import TextStream
from ..chat.values import is_object
from ..frames import Frame
from ..frames.worker import CallPiece, Delta, Finished, TokenLogprob
from .bindings import Model
from .constraint import Mask
from .context import Context
from .likelihood import token_logprob
from .sampling import Sampler
from .sequence import Sequence


class Reply:
    """A reply that is more than sampled text. Requests for text alone have none, and pay nothing.

    `mask` None: its form is free. `parser` None: all of it is text. `shown`: control tokens that the parser must see.
    `logprobs` >= 0: tell each token's, and those of so many of the likeliest.
    """

    def __init__(
        self, model: Model, mask: Mask | None, parser: ReplyParser | None, shown: frozenset[int], logprobs: int
    ) -> None:
        self._model, self._mask, self._parser, self._shown, self._logprobs = model, mask, parser, shown, logprobs
        self._whole = Split()  # of a reply that is not streamed; its calls, of any
        self._raw: npt.NDArray[np.float32] | None = None
        self._waiting: list[tuple[int, TokenLogprob]] = []  # where the token begins, in bytes, and its logprob
        self._told: list[TokenLogprob] = []  # of a reply that is not streamed
        self._read = self._visible = 0  # bytes that were generated, and that became text
        self._held = self._thought = 0  # tokens that came to nothing so far, and that came to thoughts

    @property
    def ended(self) -> bool:
        """Nothing more may or need follow."""
        return (self._mask is not None and self._mask.ended) or (self._parser is not None and self._parser.ended)

    def sample(self, sampler: Sampler, context: Context, index: int, generated: int) -> int:
        """As `Sampler.sample`. Raises RequestError where the grammar turned out too complex to go on."""
        if self._logprobs >= 0:
            self._raw = context.logits(index)
        if self._mask is None:
            return sampler.sample(context, index, generated)
        return self._mask.sample(sampler, context, index, generated)

    def take(self, sequence: Sequence, token: int) -> Delta | None:
        """Add a token to the text; what can be sent now, if the reply is streamed."""
        piece = self._model.piece(token, token in self._shown)
        if self._logprobs >= 0:
            self._waiting.append((self._read, self._logprob(token)))
            self._read += len(piece)
        self._held += 1
        new = sequence.text.feed(piece)
        return self._send(sequence, self._split(new), last=False)

    def finish(self, sequence: Sequence, rest: str) -> Delta | None:
        """The end; `rest` is the text that was held back."""
        split = self._split(rest)
        if self._parser is not None:
            end = self._parser.finish()
            split = Split(split.text + end.text, split.reasoning + end.reasoning, split.calls + end.calls)
        return self._send(sequence, split, last=True)

    def finished(self, frame: Finished, stream: bool) -> Finished:
        """The last frame, with all of a reply that was not streamed. Calls are the reason only if one is complete."""
        frame.text, frame.reasoning, frame.logprobs = self._whole.text, self._whole.reasoning, self._told
        calls = self._whole.calls
        if not stream:
            frame.calls = calls
            if self._parser is not None and calls and not is_object(calls[-1].arguments):
                calls[-1].written = self._parser.unfinished
        frame.broken = sum(not is_object(call.arguments) for call in calls)
        if self._thought:
            frame.timings = msgspec.structs.replace(frame.timings, thought_n=self._thought)
        if frame.reason == "stop" and len(calls) > frame.broken:
            frame.reason = "tool_calls"
        return frame

    def _split(self, text: str) -> Split:
        if self._logprobs >= 0:
            self._visible += len(text.encode())
        if self._parser is None:
            return Split(text)
        return self._parser.feed(text) if text else Split()

    def _send(self, sequence: Sequence, split: Split, last: bool) -> Delta | None:
        logprobs = self._ripe(sequence.text, last) if self._waiting else []
        if not (split.text or split.reasoning or split.calls or logprobs):
            return None
        self._thought += self._held if split.reasoning else 0
        self._held = 0
        self._gather(split.calls)
        if sequence.request.stream:
            return Delta(
                rid=sequence.request.rid,
                text=split.text,
                tokens=sequence.generated,
                reasoning=split.reasoning,
                calls=split.calls,
                logprobs=logprobs,
            )
        self._whole.text += split.text
        self._whole.reasoning += split.reasoning
        self._told += logprobs
        return None

    def _gather(self, pieces: list[CallPiece]) -> None:
        """Of a stream too: only at the end is it known which calls broke off."""
        for piece in pieces:
            if piece.index < len(self._whole.calls):
                self._whole.calls[piece.index].arguments += piece.arguments
            else:
                self._whole.calls.append(CallPiece(piece.index, piece.arguments, piece.id, piece.name))

    # ------------------------------------------------------------------------------------------ log-probabilities

    def _ripe(self, text: TextStream, last: bool) -> list[TokenLogprob]:
        """Those of tokens that the client can see. A stop string's are never told."""
        if last and text.stopped is None:
            ripe, self._waiting = self._waiting, []
        else:
            count = sum(start < self._visible for start, _ in self._waiting)
            ripe, self._waiting = self._waiting[:count], self._waiting[count:]
        return [logprob for _, logprob in ripe]

    def _logprob(self, token: int) -> TokenLogprob:
        raw = self._raw
        if raw is None:
            raise RuntimeError("log-probabilities of a token that was not sampled")
        return token_logprob(raw, token, self._logprobs, functools.partial(self._model.piece, special=True))


def last_frames(sequence: Sequence, reason: str, now: float, stored: int) -> list[Frame]:
    """What a request that went well sends last. `now`: seconds of `time.perf_counter`; `stored`: tokens of it."""
    request, reply = sequence.request, sequence.reply
    rest = "" if reason == "cancelled" else sequence.text.flush()
    finished = Finished(
        rid=request.rid,
        reason=reason,  # type: ignore[arg-type]
        text="",
        stop=sequence.text.stopped,
        timings=sequence.timings(now),
        stored=stored,
        gate=sequence.gate,
    )
    if sequence.prompt_logprobs is not None and not request.stream:
        finished.prompt_logprobs = sequence.prompt_logprobs.told
    if reply is not None:
        delta = reply.finish(sequence, rest)
        return [*([delta] if delta is not None else []), reply.finished(finished, request.stream)]
    if not request.stream:
        finished.text = "".join([*sequence.parts, rest])
    elif rest:
        return [Delta(rid=request.rid, text=rest, tokens=sequence.generated), finished]
    return [finished]

"""OpenAI's dialect, replies: from a generation's events to one JSON document or a stream of chunks."""

from __future__ import annotations

import codecs
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from .. import __version__
from ..errors import HomeprefixdError
from ..frames.worker import Accepted, CallPiece, Delta, Finished, Progress, Timings, TokenLogprob
from ..models.backend import Event, Generation
from .errors import INTERNAL, encode, error_object, is_gone, json_response
from .replies import settled
from .sse import DONE, EventStream

logger = logging.getLogger(__name__)

_text = msgspec.json.Encoder()  # stateless

FINGERPRINT = f"b{__version__}-homeprefixd"
"""`system_fingerprint`: the build, in the form of llama-server's."""


def usage_object(timings: Timings) -> dict[str, Any]:
    """`usage`, in tokens."""
    return {
        "prompt_tokens": timings.total_prompt_n,
        "completion_tokens": timings.predicted_n,
        "total_tokens": timings.total_prompt_n + timings.predicted_n,
        "prompt_tokens_details": {"cached_tokens": timings.cache_n},
        "completion_tokens_details": {"reasoning_tokens": timings.thought_n},
    }


def timings_object(timings: Timings) -> dict[str, Any]:
    """`timings`, as llama-server has them, with what is ours."""

    def rate(count: int, ms: float) -> float:
        return count / ms * 1000 if ms > 0 else 0.0

    shown = {
        "cache_n": timings.cache_n,
        "prompt_n": timings.prompt_n,
        "prompt_ms": timings.prompt_ms,
        "prompt_per_second": rate(timings.prompt_n, timings.prompt_ms),
        "restore_ms": timings.restore_ms,
        "queue_ms": timings.queue_ms,
        "predicted_n": timings.predicted_n,
        "predicted_ms": timings.predicted_ms,
        "predicted_per_second": rate(timings.predicted_n, timings.predicted_ms),
        "cache_tiers": timings.cache_tiers,
    }
    return {**shown, "logits_sha256": timings.logits_sha256} if timings.logits_sha256 else shown


def finish_reason(finished: Finished) -> str:
    """A reply that was cut short by a stop of the server is one that was cut short."""
    return finished.reason if finished.reason in ("stop", "tool_calls") else "length"


def told_reason(finished: Finished) -> str:
    """At the end of a stream, as whose last word a client takes it: were all its calls complete?"""
    return "stop" if finished.broken and finished.reason == "tool_calls" else finish_reason(finished)


def call_object(piece: CallPiece) -> dict[str, Any]:
    """A tool call, or what a chunk adds to one. Its index is added where it is a part."""
    if not piece.id:
        return {"function": {"arguments": piece.arguments}}
    return {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": piece.arguments}}


class ReplyWriter:
    """Bytes of one choice of a reply in one dialect. What is the same in all its chunks is encoded once."""

    object: str
    chunk_object: str
    before_text: bytes
    after_text: bytes

    def __init__(self, rid: str, model: str, created: int, index: int = 0) -> None:
        """`index`: of the choice."""
        self.rid = rid
        self.model = model
        self.created = created
        self.index = index
        head = encode(self._head(self.chunk_object))[:-1]
        number = str(index).encode()
        self._prefix = b"data: " + head + b',"choices":' + self.before_text.replace(b"@", number)
        self._suffix = self.after_text.replace(b"@", number) + b"}\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.rid,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """Any chunk, as an event."""
        return b"data: " + encode({**self._head(self.chunk_object), "choices": choices, **more}) + b"\n\n"

    def text(self, text: str) -> bytes:
        """The chunk of some text: the hot path, a few microseconds."""
        return self._prefix + _text.encode(text) + self._suffix

    def first(self) -> bytes:
        """What comes before any text; b"" for nothing."""
        raise NotImplementedError

    def accepted(self, event: Accepted) -> bytes:
        """The request was taken: what comes before any text."""
        return self.first()

    def delta(self, event: Delta) -> bytes:
        """The chunks of what was generated; b"" for nothing."""
        if not event.logprobs:
            return self.text(event.text) if event.text else b""
        choice = {**self.choice(event.text, None, part=True), "logprobs": self.logprobs(event.logprobs)}
        return self.chunk([choice])

    def progress(self, event: Progress) -> bytes:
        """The chunk that tells how far the prompt is, in tokens."""
        shown = {"total": event.total, "cache": event.reused, "processed": event.done}
        return self.chunk([self.empty_choice(None)], prompt_progress=shown)

    def content(self, text: str | None, *, part: bool) -> dict[str, Any]:
        """What a choice holds: the text of a reply, or with `part` what a chunk adds, None for nothing."""
        raise NotImplementedError

    def logprobs(self, tokens: list[TokenLogprob]) -> dict[str, Any]:
        """`logprobs` of a choice."""
        raise NotImplementedError

    def choice(self, text: str | None, reason: str | None, *, part: bool) -> dict[str, Any]:
        """The one choice of a reply or, with `part`, of a chunk; `text` as in `content`."""
        return {**self.content(text, part=part), "index": self.index, "logprobs": None, "finish_reason": reason}

    def empty_choice(self, reason: str | None) -> dict[str, Any]:
        """A choice without text, for a stream."""
        return self.choice(None, reason, part=True)

    def final(self, finished: Finished) -> bytes:
        """The chunk with the reason, which is the last of this choice."""
        return self.chunk([self.empty_choice(told_reason(finished))], timings=timings_object(finished.timings))

    def end(self, usage: dict[str, Any] | None, timings: Timings) -> bytes:
        """What ends the stream: the chunk with the usage where it was asked for, and the mark of the end."""
        if usage is None:
            return DONE
        return self.chunk([], usage=usage, timings=timings_object(timings)) + DONE

    def last(self, finished: Finished, usage: bool) -> bytes:
        """All that comes after the text of a reply with one choice."""
        told = usage_object(finished.timings) if usage else None
        return self.final(finished) + self.end(told, finished.timings)

    def whole_choice(self, finished: Finished) -> dict[str, Any]:
        """The choice of a reply that is not streamed."""
        choice = self.choice(finished.text, finish_reason(finished), part=False)
        if finished.logprobs:
            choice["logprobs"] = self.logprobs(finished.logprobs)
        return choice

    def whole_reply(self, choices: list[dict[str, Any]], usage: dict[str, Any], timings: Timings) -> Any:
        """A reply that is not streamed, of all its choices."""
        return {
            **self._head(self.object),
            "choices": choices,
            "usage": usage,
            "timings": timings_object(timings),
        }

    def whole(self, finished: Finished) -> Any:
        """A reply that is not streamed and has one choice."""
        return self.whole_reply([self.whole_choice(finished)], usage_object(finished.timings), finished.timings)


class ChatWriter(ReplyWriter):
    """Chat completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    before_text = b'[{"index":@,"delta":{"content":'
    after_text = b'},"logprobs":null,"finish_reason":null}]'

    def first(self) -> bytes:
        return self._part({"role": "assistant", "content": None})

    def _part(self, delta: dict[str, Any]) -> bytes:
        return self.chunk([{**self.empty_choice(None), "delta": delta}])

    def delta(self, event: Delta) -> bytes:
        """Thoughts, text and calls in chunks of their own, one call in each."""
        if not (event.reasoning or event.calls or event.logprobs):
            return self.text(event.text) if event.text else b""
        deltas: list[dict[str, Any]] = []
        if event.reasoning:
            deltas.append({"reasoning_content": event.reasoning})
        if event.text:
            deltas.append({"content": event.text})
        deltas += [{"tool_calls": [{"index": piece.index, **call_object(piece)}]} for piece in event.calls]
        choices = [{**self.empty_choice(None), "delta": delta} for delta in deltas or [{}]]
        if event.logprobs:
            choices[0]["logprobs"] = self.logprobs(event.logprobs)
        return b"".join(self.chunk([choice]) for choice in choices)

    def content(self, text: str | None, *, part: bool) -> dict[str, Any]:
        if part:
            return {"delta": {} if text is None else {"content": text}}
        return {"message": {"role": "assistant", "content": text}}

    def whole_choice(self, finished: Finished) -> dict[str, Any]:
        """A call that broke off is text: nobody shall carry it out."""
        choice = super().whole_choice(finished)
        message = choice["message"]
        if finished.reasoning:
            message["reasoning_content"] = finished.reasoning
        if finished.calls:
            calls, text = settled(finished)
            message["content"] = text or None
            if calls:
                message["tool_calls"] = [call_object(CallPiece(0, call.text, call.id, call.name)) for call in calls]
        return choice

    def logprobs(self, tokens: list[TokenLogprob]) -> dict[str, Any]:
        return {
            "content": token_objects(tokens),
            "refusal": None,
        }


def token_objects(tokens: list[TokenLogprob]) -> list[dict[str, Any]]:
    """Tokens as chat completions show them, each with the likeliest others."""
    return [{**token_object(token), "top_logprobs": [token_object(other) for other in token.top]} for token in tokens]


def token_object(token: TokenLogprob) -> dict[str, Any]:
    """A token as chat completions show it."""
    return {
        "token": token.piece.decode(errors="replace"),
        "logprob": finite(token.logprob),
        "bytes": list(token.piece),
    }


def finite(logprob: float) -> float:
    """JSON has no infinity; this is what OpenAI says for it."""
    return max(logprob, -9999.0)


class Echo:
    """What all choices that are made of a prompt repeat of it: its text and, where wanted, its log-probabilities.

    These come with the first of the choices. What a stream has of the others until then is held back.
    """

    def __init__(self, text: str = "", *, logprobs: bool = False) -> None:
        self.text = text
        self.pending = logprobs
        self.logprobs: dict[str, Any] | None = None
        self.writers: list[CompletionWriter] = []

    def take(self, tokens: list[TokenLogprob]) -> None:
        """The log-probabilities have come."""
        data = b"".join(token.piece for token in tokens)
        lead = len(tokens[0].piece)
        # not in a text: the token that begins each sequence, and the space that some vocabularies put before a word
        counts = (0, lead, lead + 1, 1)
        begin = len(tokens[0].piece) + len(tokens[1].piece) if len(tokens) > 1 else lead
        unseen = next((count for count in counts if data[count:].decode(errors="replace") == self.text), None)
        if unseen is None:  # its tokens say it in other words: what begins alike is the same
            text = self.text.encode(errors="surrogatepass")
            unseen = next((c for c in counts if data[c:begin] and text.startswith(data[c:begin])), 0)
        self.logprobs = completion_logprobs(tokens, Offsets(0, unseen))
        self.pending = False


class Offsets:
    """Where tokens begin in the text that their bytes become; as there, bytes that are no UTF-8 are a U+FFFD.

    A token that begins within a character is where that one ends. `start`: characters of text before the first token,
    of which the first `unseen` bytes are in no text.
    """

    def __init__(self, start: int = 0, unseen: int = 0) -> None:
        self._written, self._unseen = start, unseen
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, piece: bytes) -> int:
        """Of the next token, with these bytes."""
        begins = self._written + bool(self._decoder.getstate()[0])
        seen = piece[self._unseen :]
        self._unseen -= len(piece) - len(seen)
        self._written += len(self._decoder.decode(seen))
        return begins


def completion_logprobs(tokens: list[TokenLogprob], offsets: Offsets) -> dict[str, Any]:
    """`logprobs` of a text completion; `offsets` has counted the tokens before."""
    return {
        "tokens": [token.piece.decode(errors="replace") for token in tokens],
        "token_logprobs": [_or_null(token.logprob) for token in tokens],
        "top_logprobs": [None if math.isnan(token.logprob) else _by_text(token.top) for token in tokens],
        "text_offset": [offsets.next(token.piece) for token in tokens],
    }


def _or_null(logprob: float) -> float | None:
    """What comes first has no probability."""
    return None if math.isnan(logprob) else finite(logprob)


def _by_text(tokens: list[TokenLogprob]) -> dict[str, float]:
    """Of several tokens with one text, the likeliest."""
    return {token.piece.decode(errors="replace"): finite(token.logprob) for token in reversed(tokens)}


class CompletionWriter(ReplyWriter):
    """Text completions. `echo`: what comes before what is generated."""

    object = "text_completion"
    chunk_object = "text_completion"
    before_text = b'[{"text":'
    after_text = b',"index":@,"logprobs":null,"finish_reason":null}]'

    def __init__(
        self, rid: str, model: str, created: int, index: int = 0, echo: Echo | None = None, *, told: bool = True
    ) -> None:
        """`told`: log-probabilities are for the client, not only for who chooses the best reply."""
        super().__init__(rid, model, created, index)
        self._told = told
        self._echo = Echo() if echo is None else echo
        self._echo.writers.append(self)
        self._offsets = Offsets(len(self._echo.text))
        self._held = b""

    def first(self) -> bytes:
        return self.text(self._echo.text) if self._echo.text and not self._echo.pending else b""

    def delta(self, event: Delta) -> bytes:
        data = b""
        if event.prompt_logprobs:
            self._echo.take(event.prompt_logprobs)
            data = b"".join(writer.released() for writer in self._echo.writers)
        return data + self._in_order(super().delta(event))

    def final(self, finished: Finished) -> bytes:
        data = b""
        if self._echo.pending and self._echo.writers[0] is self:  # it was cancelled before they were known
            self._echo.pending = False
            data = b"".join(writer.released() for writer in self._echo.writers)
        return data + self._in_order(super().final(finished))

    def _in_order(self, data: bytes) -> bytes:
        """Nothing now, if the prompt is not told yet."""
        if not self._echo.pending:
            return data
        self._held += data
        return b""

    def released(self) -> bytes:
        """The prompt, and what had to wait for it."""
        data, self._held = self._held, b""
        choice = {**self.choice(self._echo.text, None, part=True), "logprobs": self._echo.logprobs}
        return self.chunk([choice]) + data

    def content(self, text: str | None, *, part: bool) -> dict[str, Any]:
        return {"text": text or "" if part else self._echo.text + (text or "")}

    def whole_choice(self, finished: Finished) -> dict[str, Any]:
        """Of all choices of a prompt that one first which `finished.prompt_logprobs` has."""
        if finished.prompt_logprobs:
            self._echo.take(finished.prompt_logprobs)
        choice = super().whole_choice(finished)
        if not self._told:
            choice["logprobs"] = None
        told, prompt = choice["logprobs"], self._echo.logprobs
        if prompt is not None:
            choice["logprobs"] = {name: values + (told or {}).get(name, []) for name, values in prompt.items()}
        return choice

    def logprobs(self, tokens: list[TokenLogprob]) -> dict[str, Any]:
        return completion_logprobs(tokens, self._offsets)


async def respond(
    request: web.Request,
    generation: Generation,
    writer: ReplyWriter,
    *,
    stream: bool,
    usage: bool,
    progress: bool,
    keep_alive: float,
) -> web.StreamResponse:
    """Run the generation and answer. Whatever happens, the generation is left, which cancels it if it still runs.

    `usage`, `progress`: send these chunks in a stream. `keep_alive`: seconds between comments. Raises
    HomeprefixdError before the first byte; after it, errors are events.
    """
    if not stream:
        async with generation:
            async for event in generation:
                if isinstance(event, Finished):
                    return json_response(writer.whole(event))
        raise RuntimeError(f"the generation {writer.rid} ended without a last event")

    async def run(events: EventStream) -> None:
        async with generation:
            await _stream(generation, writer, events, usage, progress)

    return await stream_events(request, writer.rid, run, keep_alive)


async def stream_events(
    request: web.Request, rid: str, run: Callable[[EventStream], Awaitable[None]], keep_alive: float
) -> web.StreamResponse:
    """Answer with the events that `run` sends. Raises HomeprefixdError before the first byte; later it is an event."""
    with EventStream(request, keep_alive) as events:
        try:
            await run(events)
        except HomeprefixdError as error:
            if not events.started:
                raise
            logger.warning("%s failed in its stream: %s", rid, error.message)
            await _end_with(events, error)
        except Exception as problem:
            if isinstance(problem, ConnectionError) and is_gone(request):
                logger.debug("%s: the client left", rid)
                return events.response
            if not events.started:
                raise
            logger.exception("%s failed in its stream", rid)
            await _end_with(events, HomeprefixdError(INTERNAL, code="internal_error"))
        return events.response


async def _stream(
    generation: Generation, writer: ReplyWriter, events: EventStream, usage: bool, progress: bool
) -> None:
    async for event in generation:
        if isinstance(event, Finished):
            await events.send(writer.last(event, usage))
            await events.end()
            return
        if isinstance(event, Accepted):
            await events.start()
        await write_event(event, writer, events, progress)
    raise RuntimeError(f"the generation {writer.rid} ended without a last event")


async def write_event(event: Event, writer: ReplyWriter, events: EventStream, progress: bool) -> None:
    """Anything but the last event of a generation."""
    data = b""
    if isinstance(event, Delta):
        events.note = "generating"
        data = writer.delta(event)
    elif isinstance(event, Progress):
        events.note = f"prefill: {event.done} of {event.total} tokens, {event.reused} of them reused"
        data = writer.progress(event) if progress else b""
    elif isinstance(event, Accepted):
        events.note = f"waiting: {event.prompt_n} tokens"
        data = writer.accepted(event)
    if data:
        await events.send(data)


async def _end_with(events: EventStream, error: HomeprefixdError) -> None:
    try:
        await events.send(b"data: " + encode({"error": error_object(error)}) + b"\n\n")
        await events.end()
    except ConnectionError:
        logger.debug("the client left before it was told: %s", error.message)

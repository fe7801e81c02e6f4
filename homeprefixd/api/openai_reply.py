"""OpenAI's dialect, replies: from a generation's events to one JSON document or a stream of chunks."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from aiohttp import web

from ..errors import HomeprefixdError
from ..frames import Accepted, Delta, Finished, Progress, Timings
from ..models.backend import Generation
from .errors import INTERNAL, encode, error_object, is_gone, json_response
from .sse import DONE, EventStream

logger = logging.getLogger(__name__)

_text = msgspec.json.Encoder()  # stateless


def usage_object(timings: Timings) -> dict[str, Any]:
    """`usage`, in tokens."""
    return {
        "prompt_tokens": timings.total_prompt_n,
        "completion_tokens": timings.predicted_n,
        "total_tokens": timings.total_prompt_n + timings.predicted_n,
        "prompt_tokens_details": {"cached_tokens": timings.cache_n},
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
    return "stop" if finished.reason == "stop" else "length"


class ReplyWriter:
    """Bytes of one reply in one dialect. What is the same in all its chunks is encoded once."""

    object: str
    chunk_object: str
    before_text: bytes
    after_text: bytes

    def __init__(self, rid: str, model: str, created: int) -> None:
        self.rid = rid
        self.model = model
        self.created = created
        head = encode(self._head(self.chunk_object))[:-1]
        self._prefix = b"data: " + head + b',"choices":' + self.before_text
        self._suffix = self.after_text + b"}\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.rid, "object": kind, "created": self.created, "model": self.model}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """Any chunk, as an event."""
        return b"data: " + encode({**self._head(self.chunk_object), "choices": choices, **more}) + b"\n\n"

    def text(self, text: str) -> bytes:
        """The chunk of some text: the hot path, a few microseconds."""
        return self._prefix + _text.encode(text) + self._suffix

    def first(self) -> bytes:
        """What comes before any text; b"" for nothing."""
        raise NotImplementedError

    def content(self, text: str | None, *, part: bool) -> dict[str, Any]:
        """What a choice holds: the text of a reply, or with `part` what a chunk adds, None for nothing."""
        raise NotImplementedError

    def choice(self, text: str | None, reason: str | None, *, part: bool) -> dict[str, Any]:
        """The one choice of a reply or, with `part`, of a chunk; `text` as in `content`."""
        return {**self.content(text, part=part), "index": 0, "logprobs": None, "finish_reason": reason}

    def empty_choice(self, reason: str | None) -> dict[str, Any]:
        """A choice without text, for a stream."""
        return self.choice(None, reason, part=True)

    def last(self, finished: Finished, usage: bool) -> bytes:
        """The chunk with the reason, that with the usage where it was asked for, and the mark of the end."""
        events = self.chunk([self.empty_choice(finish_reason(finished))], timings=timings_object(finished.timings))
        if usage:
            events += self.chunk([], usage=usage_object(finished.timings))
        return events + DONE

    def whole(self, finished: Finished) -> dict[str, Any]:
        """A reply that is not streamed."""
        return {
            **self._head(self.object),
            "choices": [self.choice(finished.text, finish_reason(finished), part=False)],
            "usage": usage_object(finished.timings),
            "timings": timings_object(finished.timings),
        }


class ChatWriter(ReplyWriter):
    """Chat completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    before_text = b'[{"index":0,"delta":{"content":'
    after_text = b'},"logprobs":null,"finish_reason":null}]'

    def first(self) -> bytes:
        delta = {"role": "assistant", "content": None}
        return self.chunk([{**self.empty_choice(None), "delta": delta}])

    def content(self, text: str | None, *, part: bool) -> dict[str, Any]:
        if part:
            return {"delta": {} if text is None else {"content": text}}
        return {"message": {"role": "assistant", "content": text}}


class CompletionWriter(ReplyWriter):
    """Text completions."""

    object = "text_completion"
    chunk_object = "text_completion"
    before_text = b'[{"text":'
    after_text = b',"index":0,"logprobs":null,"finish_reason":null}]'

    def first(self) -> bytes:
        return b""

    def content(self, text: str | None, *, part: bool) -> dict[str, Any]:
        return {"text": text or ""}


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
    with EventStream(request, keep_alive) as events:
        try:
            async with generation:
                await _stream(generation, writer, events, usage, progress)
        except HomeprefixdError as error:
            if not events.started:
                raise
            logger.warning("%s failed in its stream: %s", writer.rid, error.message)
            await _end_with(events, error)
        except Exception as problem:
            if isinstance(problem, ConnectionError) and is_gone(request):
                logger.debug("%s: the client left", writer.rid)
                return events.response
            if not events.started:
                raise
            logger.exception("%s failed in its stream", writer.rid)
            await _end_with(events, HomeprefixdError(INTERNAL, code="internal_error"))
        return events.response


async def _stream(
    generation: Generation, writer: ReplyWriter, events: EventStream, usage: bool, progress: bool
) -> None:
    async for event in generation:
        if isinstance(event, Delta):
            if event.text:
                events.note = "generating"
                await events.send(writer.text(event.text))
        elif isinstance(event, Progress):
            events.note = f"prefill: {event.done} of {event.total} tokens, {event.reused} of them reused"
            if progress:
                shown = {"total": event.total, "cache": event.reused, "processed": event.done}
                await events.send(writer.chunk([writer.empty_choice(None)], prompt_progress=shown))
        elif isinstance(event, Accepted):
            await events.start()
            events.note = f"waiting: {event.prompt_n} tokens"
            if first := writer.first():
                await events.send(first)
        else:
            await events.send(writer.last(event, usage))
            await events.end()
            return
    raise RuntimeError(f"the generation {writer.rid} ended without a last event")


async def _end_with(events: EventStream, error: HomeprefixdError) -> None:
    try:
        await events.send(b"data: " + encode({"error": error_object(error)}) + b"\n\n")
        await events.end()
    except ConnectionError:
        logger.debug("the client left before it was told: %s", error.message)

"""How a generation becomes a reply in a dialect that is not OpenAI's: one loop for all of them.

A dialect brings a `Writer`, which knows its words; this knows when they are sent, and what happens when that fails.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from aiohttp import web

from ..errors import HomeprefixdError
from ..frames.worker import Accepted, CallPiece, Delta, Finished, Progress
from ..models.backend import Event, Generation
from .errors import INTERNAL, is_gone, json_response
from .sse import EventStream

logger = logging.getLogger(__name__)


class Writer(Protocol):
    """A reply in one dialect. `event` is called with each event in order, or `whole` once."""

    rid: str

    def event(self, event: Event) -> bytes:
        """What is sent for it, as whole events; b"" for nothing."""
        ...

    def whole(self, finished: Finished) -> Any:
        """A reply that is not streamed, for JSON."""
        ...

    def failure(self, error: HomeprefixdError) -> bytes:
        """The last event of a stream that fails after its first byte."""
        ...


async def respond(
    request: web.Request, generation: Generation, writer: Writer, events: EventStream | None
) -> web.StreamResponse:
    """Run the generation and answer, as `events` or, without it, by one JSON document.

    Whatever happens, the generation is left, which cancels it if it still runs. Raises HomeprefixdError before the
    first byte; after it, errors are events.
    """
    if events is None:
        async with generation:
            async for event in generation:
                if isinstance(event, Finished):
                    return json_response(writer.whole(event))
        raise RuntimeError(f"the generation {writer.rid} ended without a last event")
    with events:
        try:
            async with generation:
                await _stream(generation, writer, events)
        except HomeprefixdError as error:
            if not events.started:
                raise
            logger.warning("%s failed in its stream: %s", writer.rid, error.message)
            await _end_with(events, writer, error)
        except Exception as problem:
            if isinstance(problem, ConnectionError) and is_gone(request):
                logger.debug("%s: the client left", writer.rid)
                return events.response
            if not events.started:
                raise
            logger.exception("%s failed in its stream", writer.rid)
            await _end_with(events, writer, HomeprefixdError(INTERNAL, code="internal_error"))
        return events.response


async def _stream(generation: Generation, writer: Writer, events: EventStream) -> None:
    async for event in generation:
        if isinstance(event, Accepted):
            await events.start()
            events.note = f"waiting: {event.prompt_n} tokens"
        elif isinstance(event, Progress):
            events.note = f"prefill: {event.done} of {event.total} tokens, {event.reused} of them reused"
        elif isinstance(event, Delta):
            events.note = "generating"
        if data := writer.event(event):
            await events.send(data)
        if isinstance(event, Finished):
            await events.end()
            return
    raise RuntimeError(f"the generation {writer.rid} ended without a last event")


async def _end_with(events: EventStream, writer: Writer, error: HomeprefixdError) -> None:
    try:
        await events.send(writer.failure(error))
        await events.end()
    except ConnectionError:
        logger.debug("the client left before it was told: %s", error.message)


# ---------------------------------------------------------------------------------------------------- tool calls


class Call:
    """A tool call, put together from its pieces."""

    def __init__(self, piece: CallPiece) -> None:
        self.index = piece.index
        self.id = piece.id
        self.name = piece.name
        self.text = piece.arguments
        self._written = piece.written

    def add(self, piece: CallPiece) -> None:
        """The next piece of the same call."""
        self.id = self.id or piece.id
        self.name = self.name or piece.name
        self.text += piece.arguments

    def arguments(self) -> dict[str, Any] | None:
        """As an object; None where they are none, as in a call that was cut short."""
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    @property
    def written(self) -> str:
        """As text: what is left to tell of one whose arguments are no object."""
        return self._written or self.name + self.text


def settled(finished: Finished) -> tuple[list[Call], str]:
    """Of a whole reply: the calls that can be carried out, and its text, to which the others belong."""
    calls = whole_calls(finished.calls)
    good = [call for call in calls if call.arguments() is not None]
    texts = [finished.text, *(call.written for call in calls if call not in good)]
    return good, "\n".join(filter(None, texts))


def whole_calls(pieces: Sequence[CallPiece]) -> list[Call]:
    """The calls that pieces are of, in order."""
    calls: dict[int, Call] = {}
    for piece in pieces:
        if piece.index in calls:
            calls[piece.index].add(piece)
        else:
            calls[piece.index] = Call(piece)
    return list(calls.values())

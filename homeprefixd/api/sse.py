"""Streams of events: headers, one write per event, signs of life while there is nothing to say.

Server-sent events, and lines of JSON (NDJSON), which Ollama has instead.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import ClassVar

from aiohttp import web

from .connection import connection_of

DONE = b"data: [DONE]\n\n"

_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back
}


class EventStream:
    """One reply as a stream. Use as a context manager.

    `keep_alive`: seconds of silence after which a comment with `note` is sent, so that neither the client nor a proxy
    gives up during a long prefill; 0 sends none. Status 200 is sent by `start`, or by the first comment before it (a
    model is being loaded); what goes wrong from then on is told in the stream.
    """

    content_type: ClassVar[str] = "text/event-stream"

    def __init__(self, request: web.Request, keep_alive: float) -> None:
        self._request = request
        self._keep_alive = keep_alive
        self._loop = asyncio.get_running_loop()
        self._last = 0.0  # when something was written, loop time
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None
        self._ended = False
        self.note = "waiting"
        self._connection = connection_of(request)
        self.response = web.StreamResponse(headers={"Content-Type": self.content_type, **_HEADERS})

    def __enter__(self) -> EventStream:
        if self._connection is not None:
            self._connection.probe = self._probe
        if self._keep_alive > 0:
            self._last = self._loop.time()
            self._timer = self._loop.call_later(self._keep_alive, self._tick)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._connection is not None:
            self._connection.probe = None
        if self._timer is not None:
            self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()

    @property
    def started(self) -> bool:
        return self.response.prepared

    async def start(self) -> None:
        """Send status 200 and the headers, with the first event or comment."""
        await self.response.prepare(self._request)  # does nothing the second time
        self._last = self._loop.time()

    async def send(self, event: bytes) -> None:
        """Write whole events; waits where the client reads slowly. Raises ConnectionResetError when it left."""
        self._last = self._loop.time()
        await self.response.write(event)

    async def end(self) -> None:
        """The regular end of the stream."""
        self._ended = True
        await self.response.write_eof()

    def _tick(self) -> None:
        silent = self._loop.time() - self._last
        if silent >= self._keep_alive:
            silent = 0.0
            self._write_comment()
        self._timer = self._loop.call_later(self._keep_alive - silent, self._tick)

    def _probe(self) -> bool:
        """See `Connection.probe`."""
        if self.started:
            self._write_comment()
        return self.started

    def _write_comment(self) -> None:
        transport = self._request.transport
        # A client that has not even read what is there needs no more of it.
        if transport is not None and transport.get_write_buffer_size() == 0:
            self._comment = self._loop.create_task(self._send_comment())

    async def _send_comment(self) -> None:
        if self._ended:
            return
        with contextlib.suppress(ConnectionError):  # who writes the next event sees it too
            if not self.started:
                await self.start()
            await self.send(self.comment())

    def comment(self) -> bytes:
        """What says nothing to a client but that we live."""
        return f": {self.note}\n\n".encode()


class LineStream(EventStream):
    """Lines of JSON. Before the next one there may be white space, which every parser skips."""

    content_type: ClassVar[str] = "application/x-ndjson"

    def comment(self) -> bytes:
        return b" "

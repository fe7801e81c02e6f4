"""One request on its way through a worker: its events, as the API reads them.

Knows the frames; what a worker is and how it is reached is in `worker_link.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from typing import Protocol

from ..errors import HomeprefixdError
from ..frames.worker import Account, Delta, Finished, Generate, Progress
from .backend import Event

WAIT_TOLD = 0.1
"""Seconds of waiting from which the log names what for."""

logger = logging.getLogger(__name__)


class Carrier(Protocol):
    """What computes requests: a `WorkerLink`."""

    async def begin(self, request: Request) -> None:
        """Hand it to the worker, waiting for a model that loads. Raises UnavailableError, BusyError."""
        ...

    def leave(self, request: Request) -> None:
        """Nobody waits for it any more."""
        ...


class Request:
    """One running request: implements `backend.Generation`."""

    OVERHEAD = 200  # bytes of a waiting frame beside its text, roughly

    def __init__(self, link: Carrier, generate: Generate, unread: int) -> None:
        self.rid = generate.rid
        self.generate = generate
        self.sent = False  # the worker knows of it
        self.waited = 0.0  # s until the worker had it: the model was loaded first
        self.account: Account | None = None  # what the worker told of the prompt: for who watches, not for the client
        self._link = link
        self._unread_limit = unread
        self._unread = 0
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._error: HomeprefixdError | None = None
        self._over = False

    async def __aenter__(self) -> Request:
        """Hand it to the worker, waiting for a model that loads. Raises UnavailableError, BusyError."""
        await self._link.begin(self)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._link.leave(self)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._error is not None:
                error, self._error = self._error, None
                self._over = True
                raise error
            if self._over:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        self._unread -= self._size(event)
        if isinstance(event, Finished):
            self._over = True
        return event

    @staticmethod
    def _size(event: Event) -> int:
        if not isinstance(event, Delta):
            return Request.OVERHEAD
        parts = len(event.calls) + sum(1 + len(token.top) for token in event.logprobs)
        return Request.OVERHEAD * (1 + parts) + len(event.text) + len(event.reasoning)

    def put(self, event: Event) -> bool:
        """From the worker. False: its reader is too slow, the request has failed."""
        if isinstance(event, Progress) and self._events and isinstance(self._events[-1], Progress):
            self._events[-1] = event  # only the latest counts
            return True
        self._events.append(event)
        self._unread += self._size(event)
        self._arrived.set()
        if self._unread > self._unread_limit and not isinstance(event, Finished):
            self._events.clear()
            self.fail(
                HomeprefixdError("the client read its stream too slowly, so it was cancelled", code="slow_reader")
            )
            return False
        return True

    def fail(self, error: HomeprefixdError) -> None:
        """It ends with `error`, after what has arrived already."""
        if not any(isinstance(event, Finished) for event in self._events):
            self._error = error
            self._arrived.set()


def log_request(end: Finished, waited: float = 0.0) -> None:
    """One line, without a word of the prompt. `waited`: see Request."""
    t = end.timings
    reused = ", ".join(f"{count} {tier}" for tier, count in t.cache_tiers.items()) or "none"
    queued = t.queue_ms / 1e3
    waits = [(waited, "the model was loaded first"), (queued, "it waited for its turn")]
    told = "; ".join(f"{seconds:.2f} s of it: {why}" for seconds, why in waits if seconds >= WAIT_TOLD)
    logger.info(
        "%s: %d tokens (reused: %s), first token after %.2f s%s, %d generated in %.2f s, %s",
        end.rid, t.total_prompt_n, reused, waited + queued + (t.restore_ms + t.prompt_ms) / 1e3,
        f" ({told})" if told else "", t.predicted_n, t.predicted_ms / 1e3, end.reason,
    )  # fmt: skip

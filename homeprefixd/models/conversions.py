"""Questions to a worker that have one answer each: text to tokens and the like.

They are no requests of the engine: nothing is computed, nothing waits in its queue.
"""

from __future__ import annotations

import asyncio

from ..errors import BusyError, HomeprefixdError, RequestError
from ..frames.worker import Converted

MAX_WAITING = 64
"""Questions that may wait for their answers; more are refused."""


class Conversions:
    """Those that wait, by their id. Everything runs on the event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Converted]] = {}

    def expect(self, rid: str) -> asyncio.Future[Converted]:
        """The answer to come. Raises BusyError. Call `forget` whatever happens."""
        if len(self._waiting) >= MAX_WAITING:
            raise BusyError(f"{len(self._waiting)} questions wait for this model's answer already", retry_after=1)
        if rid in self._waiting:
            raise RequestError(f"a question with the id {rid} waits already")
        answer = self._waiting[rid] = asyncio.get_running_loop().create_future()
        return answer

    def forget(self, rid: str) -> None:
        """Nobody waits for it any more."""
        self._waiting.pop(rid, None)

    def answer(self, converted: Converted) -> None:
        """It came; unknown ones are ignored."""
        future = self._waiting.get(converted.rid)
        if future is not None and not future.done():
            future.set_result(converted)

    def fail(self, rid: str, error: HomeprefixdError) -> None:
        """It was refused; unknown ones are ignored."""
        future = self._waiting.get(rid)
        if future is not None and not future.done():
            future.set_exception(error)

    def fail_all(self, error: HomeprefixdError) -> None:
        """No answer will come."""
        for rid in list(self._waiting):
            self.fail(rid, error)

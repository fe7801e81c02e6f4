"""A match on its way from the store to a worker: what is known, which of its blocks are there, and where they lie."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..frames import store as frames
from ..frames.store import PlanNode
from .blocks import BLOCK_TOKENS
from .runs import layout_of

if TYPE_CHECKING:
    from .link import Link

BlockState = Literal["loading", "ready", "lost"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Run:
    """Where a block lies that is number `part` of a run of `parts`; `view` is the run. See `runs.py`."""

    offset: int
    part: int
    parts: int
    view: memoryview


@dataclass(frozen=True, slots=True)
class _At:
    """Where a block lies in the arena, see PlanNode."""

    offset: int
    part: int
    parts: int
    run_size: int

    @classmethod
    def of(cls, frame: PlanNode | frames.BlockReady) -> _At:
        return cls(frame.offset, frame.part, frame.parts, frame.run_size)


class Lookup:
    """A match on its way: the plan, then its blocks. Release it when its blocks have been imported.

    Thread-safe. `on_update` is called from the client's reader thread whenever something new is known.
    """

    def __init__(self, link: Link | None, ticket: int, on_update: Callable[[], None] | None) -> None:
        self._link = link
        self._ticket = ticket
        self._on_update = on_update
        self._changed = threading.Condition()
        self._plan: tuple[PlanNode, ...] | None = None
        self._known = 0
        self._at: dict[int, _At] = {}
        self._lost_from: int | None = None if link is not None else 0
        self._answered = link is None
        self._released = link is None
        self.reason = "" if link is not None else "no store"
        """Why blocks were lost."""
        self.warm_rate = 0.0
        """Bytes a second that the store reads from disk; 0: not known."""
        self._streamed = False
        self._taken = -1  # so that 0 is said, too

    @property
    def plan(self) -> tuple[PlanNode, ...] | None:
        """The plan, if it is known by now; None also if it will never be."""
        return self._plan

    @property
    def known(self) -> int:
        """Leading tokens that are known to the store, whether they can be resumed or not; 0 while there is no plan."""
        return self._known

    @property
    def answered(self) -> bool:
        """Whether the plan is known, or known never to come."""
        return self._answered

    def wait_plan(self, timeout: float) -> tuple[PlanNode, ...] | None:
        """The nodes that match, in order; None if the store is gone or did not answer within `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._answered, timeout)
            return self._plan

    def state(self, index: int) -> BlockState:
        """Of node `index`. `loading` includes: the plan is not known yet."""
        with self._changed:
            return self._state(index)

    def wait_block(self, index: int, timeout: float) -> memoryview | None:
        """The state of node `index`, verified; None if it is lost, or not ready within `timeout` seconds.

        Valid until `release`, or until it was `taken`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._state(index) != "loading", timeout)
            if self._state(index) != "ready" or self._link is None or self._plan is None:
                return None
            at, size = self._at[index], self._plan[index].size
        if at.parts == 1:
            return self._link.view(at.offset, size)
        run = self._link.view(at.offset, at.run_size)
        layout = layout_of(run, BLOCK_TOKENS, at.parts) if run is not None else None
        if run is None or layout is None:
            return None
        state = memoryview(bytearray(size))
        layout.take(run, at.part, 1, at.parts, state)
        return state

    def run(self, index: int) -> Run | None:
        """Where node `index` lies, if it is there and a part of a run; `wait_block` would take it out of it."""
        with self._changed:
            at = self._at.get(index) if self._state(index) == "ready" else None
        if at is None or at.parts == 1 or self._link is None:
            return None
        view = self._link.view(at.offset, at.run_size)
        return Run(at.offset, at.part, at.parts, view) if view is not None else None

    def taken(self, count: int) -> None:
        """The first `count` nodes were imported: they are not looked at again. Others may only come then.

        0: they are wanted now. Some may not come before that, so that they hold nobody up.
        """
        with self._changed:
            if not self._streamed or self._released or count <= self._taken:
                return
            self._taken = count
        if self._link is not None:
            self._link.send(frames.Taken(self._ticket, count))

    def release(self) -> None:
        """End the leases; again does nothing."""
        with self._changed:
            if self._released:
                return
            self._released = True
        if self._link is not None:
            self._link.forget(self._ticket)
            self._link.send(frames.Release(self._ticket))

    def _state(self, index: int) -> BlockState:
        if self._lost_from is not None and index >= self._lost_from:
            return "lost"
        if self._plan is not None and index >= len(self._plan):
            return "lost"
        return "ready" if index in self._at else "loading"

    def on_frame(self, frame: Any) -> None:
        with self._changed:
            if isinstance(frame, frames.Plan):
                self._known = frame.known
                self._plan = tuple(frame.nodes)
                self.warm_rate = frame.warm_rate
                self._streamed = frame.streamed
                self._answered = True
                self._at = {i: _At.of(node) for i, node in enumerate(frame.nodes) if node.offset >= 0}
            elif isinstance(frame, frames.BlockReady):
                self._at[frame.index] = _At.of(frame)
            elif isinstance(frame, frames.BlockLost):
                self._lose(frame.index, frame.reason)
            self._changed.notify_all()
        self._updated()

    def on_closed(self) -> None:
        with self._changed:
            self._answered = True
            self._lose(0, "the store is gone")
            self._changed.notify_all()
        self._updated()

    def _lose(self, index: int, reason: str) -> None:
        self._lost_from = index if self._lost_from is None else min(self._lost_from, index)
        self.reason = self.reason or reason

    def _updated(self) -> None:
        if self._on_update is not None:
            try:
                self._on_update()
            except Exception:
                log.exception("a callback of a lookup failed")

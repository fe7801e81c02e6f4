"""Memory for one more model: what it will take, and which others are unloaded for it.

The least recently used goes first, never one that is pinned; one that is in use is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import ModelError, UnavailableError
from .device_room import Bytes, ask_devices, left_by, most_there, usable, weights_there
from .loading import Budget, guess_memory
from .resident import Resident

PATIENCE = 60.0
"""Seconds that a model waits for others that are in use, where it needs their memory."""


class Space:
    """Everything runs on the event loop; `make` for one model at a time."""

    def __init__(
        self,
        budget: Budget,
        environ: Mapping[str, str],
        residents: Callable[[], list[Resident]],
        unload: Callable[[Resident, str], Awaitable[None]],
        patience: float = PATIENCE,
    ) -> None:
        """`residents`: all that there are now. `unload` ends a model's worker, and is told why."""
        self._budget = budget
        self._environ = environ
        self._residents = residents
        self._unload = unload
        self._patience = patience
        self._devices: Bytes | None = None  # memory of each; None: not asked yet

    async def make(self, resident: Resident) -> None:
        """Unload others until there is memory for one more. Raises ModelError if it never fits, UnavailableError."""
        budget = self._budget
        if len(self._residents()) == 1 and not budget.strict:
            return
        devices = await self._usable_devices(resident)
        if not resident.memory:
            resident.on_devices = weights_there(
                resident.spec.size, left_by(devices, self._there(resident, pinned=True))
            )
            guess = await asyncio.to_thread(guess_memory, resident.spec, self.cells(resident))
            resident.memory = guess - sum(resident.on_devices.values())
        pinned = self._pinned(resident)
        self._check_size(resident, pinned)
        deadline = asyncio.get_running_loop().time() + self._patience
        try:
            while (short := self._used(resident) + resident.memory > budget.total) or self._crowded(resident, devices):
                movable = (r for r in self._loaded() if r is not resident and r not in pinned and not r.starting)
                others = sorted((r for r in movable if short or r.on_devices.keys() & devices), key=lambda r: r.used)
                idle = next((r for r in others if not r.holds), None)
                if idle is not None:
                    await self._unload(idle, f"{resident.alias} needs its memory")
                else:
                    await self._wait_for_one(resident, others, deadline)
        finally:
            for other in self._loaded():
                other.closing = False

    def _check_size(self, resident: Resident, pinned: list[Resident]) -> None:
        budget = self._budget
        left = budget.total - sum(r.memory for r in pinned)
        if resident.memory <= left:
            return
        held = f", of which {', '.join(r.alias for r in pinned)} keep {_size(budget.total - left)}" if pinned else ""
        raise ModelError(
            f"the model {resident.alias} needs about {_size(resident.memory)} of memory ({_size(resident.spec.size)} of"
            f" weights), and models may take {_size(budget.total)}{held}: lower model.ctx or model.pool, choose a"
            " smaller model, or raise models.memory",
            code="does_not_fit",
        )

    async def _wait_for_one(self, resident: Resident, others: list[Resident], deadline: float) -> None:
        """Until one of `others` is idle. New requests to the least recently used wait meanwhile. UnavailableError."""
        loading = [r.link.first for r in self._loaded() if r.link is not None and r is not resident and r.starting]
        left = deadline - asyncio.get_running_loop().time()
        waits: set[asyncio.Future[Any]] = {asyncio.ensure_future(asyncio.wait(loading))} if loading else set()
        waits |= {asyncio.ensure_future(r.idle()) for r in others}
        if others and not any(r.closing for r in others):
            others[0].closing = True
        try:
            if waits and left > 0:
                done, _ = await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    return
        finally:
            for wait in waits:
                wait.cancel()
        raise UnavailableError(
            f"the model {resident.alias} needs {_size(resident.memory)} of memory, which"
            f" {', '.join(r.alias for r in self._loaded() if r is not resident)} use for running requests: try again",
            code="no_room",
            retry_after=10,
        )

    def _pinned(self, but: Resident) -> list[Resident]:
        return [r for r in self._loaded() if r is not but and r.spec.pinned]

    def cells(self, resident: Resident) -> int:
        """Bytes that its pool of cells may take, beside the models that stay and what of its weights lies in RAM."""
        left = replace(self._budget, total=max(0, self._budget.total - sum(r.memory for r in self._pinned(resident))))
        spec = resident.spec
        return left.pool(replace(spec, size=max(0, spec.size - sum(resident.on_devices.values()))))

    async def _usable_devices(self, resident: Resident) -> Bytes:
        """What is free, while no model is loaded, of the devices that it computes on."""
        if resident.spec.settings.gpu_layers == 0:
            return {}
        if self._devices is None:
            free = await ask_devices(self._environ)
            self._devices = {
                name: one + sum(r.on_devices.get(name, 0) for r in self._loaded()) for name, one in free.items()
            }
        return usable(self._devices, resident.spec.settings)

    def _there(self, but: Resident, *, pinned: bool) -> list[Bytes]:
        """What others take on devices: all, or those that stay."""
        return [r.on_devices for r in (self._pinned(but) if pinned else self._loaded()) if r is not but]

    def _crowded(self, resident: Resident, devices: Bytes) -> bool:
        """Would more of its weights lie on its devices, if models that may go did?"""
        now, then = (left_by(devices, self._there(resident, pinned=one)) for one in (False, True))
        return most_there(resident.spec.size, now) < most_there(resident.spec.size, then)

    def _loaded(self) -> list[Resident]:
        return [r for r in self._residents() if r.link is not None]

    def _used(self, but: Resident) -> int:
        return sum(r.memory for r in self._loaded() if r is not but)


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"

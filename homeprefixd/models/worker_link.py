"""The daemon's side of one worker process: keeps it running, sends it requests, carries its frames to who asked.

Knows the frames and one model's name; nothing of HTTP, and nothing of what the worker does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ..channel import AsyncChannel, ChannelClosedError
from ..config import AT_ONCE
from ..errors import (
    BusyError,
    HomeprefixdError,
    ModelError,
    RequestError,
    UnavailableError,
    WorkerDiedError,
    from_frame,
)
from ..frames import Frame, Stop
from ..frames.worker import (
    Accepted,
    Account,
    Cancel,
    Conversion,
    Converted,
    Delta,
    Failure,
    Finished,
    FromWorker,
    Generate,
    Heartbeat,
    Loading,
    LoadModel,
    ModelInfo,
    NamespaceKnown,
    Progress,
    Ready,
    SetLogLevel,
    SetRules,
    StableRules,
    UseStore,
)
from ..supervise import Backoff, Child, Exit, Supervisor
from .conversions import Conversions
from .request import Request, log_request
from .store_link import StoreLink

logger = logging.getLogger(__name__)

RETRY_FULL = 5
"""Seconds, where it is not known yet how long requests take."""

CANNOT_LOAD = 3
"""Exit status of a worker whose model cannot be loaded, whatever is tried."""

_ACCOUNT_PATIENCE = 0.1
"""Seconds that the end of a reply waits for what is told of its prompt, where that is to be told."""

_CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Signals by which a process ends itself: loading the same file again would end alike."""

State = Literal["loading", "ok", "error"]


@dataclass(frozen=True)
class Limits:
    """How long things may take, in seconds, and what may wait, in bytes."""

    patience: float = 10.0  # a request waits so long for a model that loads
    silence: float = 120.0  # a worker that said nothing for so long is dead, though its process lives
    stalled: float = 120.0  # nothing moves though requests are there and no llama_decode runs
    longest_step: float = 1800.0  # one llama_decode: 512 tokens of a large model on a slow CPU take minutes
    loading: float = 1800.0  # nothing heard while a model loads: hundreds of GB from a slow disk
    check_every: float = 5.0
    unread: int = 8 << 20  # bytes that wait for a client that reads too slowly
    last_step: float = 10.0  # beyond the grace at a stop, until SIGTERM
    last_frames: float = 1.0  # after the process's end, for the end of its connection
    first_tries: int = 3  # a worker killed so often during its first load will not load


class WorkerLink:
    """Owns one worker process and the requests it computes. Everything runs on the event loop."""

    def __init__(
        self,
        load: LoadModel,
        command: Callable[[int], list[str]],
        environ: Mapping[str, str],
        store: StoreLink | None,
        *,
        limits: Limits | None = None,
        backoff: Backoff | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`changed` is called when state, progress or reason are new."""
        self.alias = load.alias
        self.state: State = "loading"
        self.progress = 0.0
        self.reason = ""
        self.info: ModelInfo | None = None  # of the last successful load; kept while the worker starts again
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the model was loaded for the first time; ModelError if that cannot be."""
        self._load = load
        self._store = store
        self._limits = limits or Limits()
        self._changed_callback = changed
        self._supervisor = Supervisor(
            "worker", command, started=self._started, ended=self._ended, environ=environ, backoff=backoff
        )
        self._channel: AsyncChannel[Any] | None = None
        self._channel_closed = asyncio.Event()
        self._news = asyncio.Event()  # pulsed when `state` changes
        self._failure: Failure | None = None
        self._failed_tries = 0
        self._requests: dict[str, Request] = {}
        self._held: dict[str, tuple[Finished, asyncio.TimerHandle]] = {}  # by id, until the request's Account is there
        self._conversions = Conversions()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._heartbeat: Heartbeat | None = None
        self._heard = 0.0  # loop time of the last frame
        self._moved = 0.0  # loop time when the engine's steps last grew, or nothing was to be done
        self._suspect: int | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._loading_since = time.monotonic()
        self._log_level = ""

    # ------------------------------------------------------------------------------------------------- life

    def start(self) -> None:
        """Begin to load. `first` tells how it went."""
        self._supervisor.start()
        self._watcher = asyncio.create_task(self._watch(), name=f"watch {self.alias}")

    def drain(self) -> None:
        """No new requests from now on."""
        self._draining = True
        self._changed()

    async def idle(self) -> None:
        """Returns when no request runs or waits."""
        await self._idle.wait()

    async def stop(self, grace: float) -> None:
        """End the worker; running requests get `grace` seconds. Those left then get UnavailableError."""
        self.drain()
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        ready = self.state == "ok"
        patience = grace + self._limits.last_step if ready else 0.5  # one that loads has nothing to save
        await self._supervisor.stop(lambda: self._tell(Stop(grace if ready else 0.0)), patience)
        self.fail_all(stopping())
        if self.first.done() and not self.first.cancelled():
            self.first.exception()
        self.first.cancel()

    def kill(self) -> None:
        """SIGKILL, at once."""
        self._supervisor.kill()

    def set_log_level(self, level: str) -> None:
        """debug, info, warning or error: from now on, also where the process starts again."""
        self._log_level = level
        self._tell(SetLogLevel(level))

    def set_rules(self, rules: StableRules) -> None:
        """For prompts from now on, also where the process starts again."""
        self._load = msgspec.structs.replace(self._load, stable=rules)
        self._tell(SetRules(rules))

    @property
    def pid(self) -> int | None:
        return self._supervisor.pid

    def fresh(self, within: float) -> bool:
        """Did the worker say anything in the last `within` seconds? While a model loads: yes."""
        return self.state != "ok" or asyncio.get_running_loop().time() - self._heard < within

    def status(self) -> dict[str, Any]:
        """For health and stats."""
        beat = self._heartbeat
        return {
            "alias": self.alias,
            "state": self.state,
            "progress": round(self.progress, 3),
            "reason": self.reason,
            "pid": self.pid,
            "restarts": self._supervisor.restarts,
            "requests": len(self._requests),
            "running": beat.running if beat else 0,
            "waiting": beat.waiting if beat else 0,
            "cells": beat.cells if beat else 0,
            "cells_used": beat.cells_used if beat else 0,
            "cells_shared": beat.cells_shared if beat else 0,
            "steps": beat.steps if beat else 0,
            "step_age": round(beat.step_age, 3) if beat else 0.0,
            "counters": dict(beat.counters) if beat else {},
            "rates": dict(beat.rates) if beat else {},
            "kv_bytes_per_token": self.info.kv_bytes_per_token if self.info else 0.0,
            "cache_mode": self.info.cache_mode if self.info else "",
            "cache_reason": self.info.cache_reason if self.info else "",
        }

    # ------------------------------------------------------------------------------------------------- requests

    def request(self, generate: Generate) -> Request:
        """A request that has not begun. Raises UnavailableError, BusyError."""
        self.check_open()
        if len(self._requests) >= self._load.max_queue + (self._load.parallel or AT_ONCE):
            raise full(len(self._requests), self)
        return Request(self, generate, self._limits.unread)

    @property
    def retry_after(self) -> int:
        """Seconds after which a request may be sent again that found the queue full."""
        return (self._heartbeat.retry_after if self._heartbeat is not None else 0) or RETRY_FULL

    async def convert(self, conversion: Conversion) -> Converted:
        """Ask the worker, waiting for a model that loads. Raises UnavailableError, BusyError, and what it answers."""
        await self._wait_until_ready()
        answer = self._conversions.expect(conversion.rid)
        try:
            if self._channel is None:
                raise self._starting_again()
            self._channel.send(conversion)
            return await answer
        except ChannelClosedError as error:
            raise self._starting_again() from error
        except asyncio.CancelledError:
            self._tell(Cancel(conversion.rid))
            raise
        finally:
            self._conversions.forget(conversion.rid)

    def _starting_again(self) -> UnavailableError:
        return UnavailableError(f"the model {self.alias} is starting again", retry_after=2)

    def check_open(self) -> None:
        """Raises UnavailableError if no request can be taken, now or soon."""
        if self._draining:
            raise stopping()
        if self.state == "error":
            message = f"the model {self.alias} cannot be used now: {self.reason}"
            raise UnavailableError(message, code="model_failed", retry_after=10)

    async def begin(self, request: Request) -> None:
        """Send it to the worker. While the model loads, wait for it as long as `Limits.patience`."""
        if request.rid in self._requests:
            raise RequestError(f"a request with the id {request.rid} is running already")
        self._requests[request.rid] = request  # so that it is counted while it waits
        self._idle.clear()
        try:
            await self._wait_until_ready()
            if self._channel is None:
                raise self._starting_again()
            self._channel.send(request.generate)
            request.sent = True
        except ChannelClosedError as error:
            self._forget(request)
            raise self._starting_again() from error
        except BaseException:
            self._forget(request)
            raise

    async def _wait_until_ready(self) -> None:
        try:
            async with asyncio.timeout(self._limits.patience):
                while True:
                    self.check_open()
                    if self.state == "ok":
                        return
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            done = f", {min(99, int(self.progress * 100))}% done" if self.progress else ""
            raise UnavailableError(
                f"the model {self.alias} is loading{done}: try again soon",
                code="model_loading",
                retry_after=self._seconds_left(),
            ) from None

    def _seconds_left(self) -> int:
        """A guess, from how far it is."""
        elapsed = time.monotonic() - self._loading_since
        left = elapsed / self.progress * (1 - self.progress) if self.progress > 0.05 else 5.0
        return int(min(60.0, max(2.0, left)))

    def leave(self, request: Request) -> None:
        """Nobody waits for it any more; unknown or ended ones are ignored."""
        if self._requests.get(request.rid) is request:
            self._forget(request)
            if request.sent:
                self._tell(Cancel(request.rid))

    def _forget(self, request: Request) -> None:
        if self._requests.get(request.rid) is request:
            del self._requests[request.rid]
            if not self._requests:
                self._idle.set()

    def fail_all(self, error: HomeprefixdError, *, only_sent: bool = False) -> None:
        """End requests with `error`; with `only_sent` those that the worker knew of."""
        self._conversions.fail_all(error)
        for request in [r for r in self._requests.values() if r.sent or not only_sent]:
            request.fail(error)
            self._forget(request)

    # ------------------------------------------------------------------------------------------------- the process

    def _started(self, child: Child) -> None:
        self._channel_closed.clear()
        self._failure = None
        self._heartbeat = None
        self._loading_since = time.monotonic()
        self._heard = self._moved = asyncio.get_running_loop().time()
        channel: AsyncChannel[Any] = AsyncChannel(
            child.socket, FromWorker, self._on_frame, lambda: self._disconnected(child)
        )
        self._channel = channel
        self._tell(self._load)
        if self._log_level:
            self._tell(SetLogLevel(self._log_level))
        if self._store is not None:
            self._store.attach(f"worker {self.alias}", lambda sock: channel.send(UseStore(), descriptor=sock.fileno()))

    def _disconnected(self, child: Child) -> None:
        """The connection ended, so the process ends too, or is made to."""
        self._channel_closed.set()
        asyncio.get_running_loop().call_later(5.0, child.kill, "it closed its connection")

    async def _ended(self, end: Exit, wait: float) -> None:
        if self._store is not None:
            self._store.detach(f"worker {self.alias}")
        if self._channel is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._channel_closed.wait(), self._limits.last_frames)
            self._channel.close()
            self._channel = None
        self._heartbeat = None
        for rid in list(self._held):
            self._release(rid)
        was_loading = self.state != "ok"
        line = end.telling_line
        said = f"{end}: {line}" if line and line not in str(end) and end.code > 0 else str(end)
        if self._failure is not None:
            said = self._failure.message
            self._set("error", 0.0, said)
        elif end.code == CANNOT_LOAD and was_loading:
            self._set("error", 0.0, line or said)
        else:
            self._set("loading", 0.0, f"its process ended ({said})")
        message = f"the process of the model {self.alias} ended ({said}); it starts again, so send the request again"
        died = WorkerDiedError(message, retry_after=max(1, int(wait + 1)))
        self.fail_all(stopping() if self._supervisor.stopping else died, only_sent=True)
        if not self.first.done() and not self._draining:
            self._count_failed_try(said, final=-end.code in _CRASHES)
        if not self._supervisor.stopping and not (self.first.done() and self.first.exception()):
            logger.error("worker of %s: %s; it starts again in %.1f s", self.alias, self.reason, wait)

    def _count_failed_try(self, said: str, *, final: bool) -> None:
        """The first load failed. Some reasons stay what they are (`final`); a kill may have been somebody's whim."""
        self._failed_tries += 1
        if self.state == "error":
            self.first.set_exception(ModelError(self.reason, code="model_load_failed"))
        elif final:
            message = f"the model {self._load.path} cannot be loaded: its process ended with {said}"
            self.first.set_exception(ModelError(message, code="model_load_failed"))
        elif self._failed_tries >= self._limits.first_tries:
            hint = (
                " (is there enough memory? a smaller model.ctx or model.pool needs less)" if "SIGKILL" in said else ""
            )
            self.first.set_exception(
                ModelError(f"the model {self._load.path} cannot be loaded: its process ended with {said}{hint}")
            )

    def _tell(self, frame: Frame) -> None:
        if self._channel is not None:
            with contextlib.suppress(ChannelClosedError):
                self._channel.send(frame)

    def _set(self, state: State, progress: float, reason: str) -> None:
        self.state, self.progress, self.reason = state, progress, reason
        self._changed()

    def _changed(self) -> None:
        self._news.set()
        self._changed_callback()

    def _on_frame(self, frame: Any) -> None:
        self._heard = asyncio.get_running_loop().time()
        match frame:
            case Account():
                if frame.rid in self._requests:
                    self._requests[frame.rid].account = frame
                self._release(frame.rid)
            case Accepted() | Progress() | Delta() | Finished():
                request = self._requests.get(frame.rid)
                if request is None:
                    return
                if isinstance(frame, Finished) and request.account is None and self._load.explain:
                    # it is told by another thread of the worker, and comes behind the end of a very short reply
                    timer = asyncio.get_running_loop().call_later(_ACCOUNT_PATIENCE, self._release, frame.rid)
                    self._held[frame.rid] = frame, timer
                elif not request.put(frame):
                    self.leave(request)
                elif isinstance(frame, Finished):
                    self._finish(request, frame)
            case Failure(rid=None):
                self._failure = frame
            case Failure(rid=str(rid)):
                request = self._requests.get(rid)
                failure = from_frame(frame.error, frame.message, frame.code, frame.param, frame.details)
                self._conversions.fail(rid, failure)
                if request is not None:
                    request.fail(failure)
                    self._forget(request)
            case Converted():
                self._conversions.answer(frame)
            case Heartbeat():
                self._note_heartbeat(frame)
            case Loading():
                self._set("loading", max(self.progress, min(1.0, frame.progress)), self.reason)
            case Ready():
                self.info = frame.model
                self._moved = self._heard
                self._set("ok", 1.0, "")
                if not self.first.done():
                    self.first.set_result(None)
            case NamespaceKnown():
                if self.info is not None:
                    self.info = msgspec.structs.replace(
                        self.info, namespace=frame.namespace, mismatch=frame.mismatch, adapters=frame.adapters
                    )

    def _finish(self, request: Request, frame: Finished) -> None:
        log_request(frame, request.waited)
        self._forget(request)

    def _release(self, rid: str) -> None:
        """Send on the end of a reply that was held back, if it was."""
        frame, timer = self._held.pop(rid, (None, None))
        if frame is None or timer is None:
            return
        timer.cancel()
        request = self._requests.get(rid)
        if request is not None:
            request.put(frame)
            self._finish(request, frame)

    # ------------------------------------------------------------------------------------------------- watching

    def _note_heartbeat(self, beat: Heartbeat) -> None:
        last = self._heartbeat
        idle = beat.running == 0 and beat.waiting == 0
        if idle or last is None or beat.steps != last.steps or beat.step_age > 0:
            self._moved = self._heard
        self._heartbeat = beat

    async def _watch(self) -> None:
        """Kill a worker that is stuck. Only on a second look: this process may have been stopped itself."""
        while True:
            await asyncio.sleep(self._limits.check_every)
            why = self._stuck()
            if why and self._suspect == self.pid:
                logger.error("worker of %s: %s; it is killed", self.alias, why)
                self._supervisor.kill(why)
            self._suspect = self.pid if why else None

    def _stuck(self) -> str:
        """Why the worker is taken for dead, or ""."""
        if self.pid is None:
            return ""
        now, limits = asyncio.get_running_loop().time(), self._limits
        if self.state != "ok":
            return f"nothing heard for {limits.loading:.0f} s of loading" if now - self._heard > limits.loading else ""
        if now - self._heard > limits.silence:
            return f"no heartbeat for {limits.silence:.0f} s"
        if now - self._moved > limits.stalled:
            return f"its engine stood still for {limits.stalled:.0f} s"
        if self._heartbeat is not None and self._heartbeat.step_age > limits.longest_step:
            return f"one step took more than {limits.longest_step:.0f} s"
        return ""


def full(count: int, link: WorkerLink | None) -> BusyError:
    """`count` requests run or wait, and no more may."""
    return BusyError(
        f"{count} requests are running or waiting already. Send it again later, or raise `model.max_queue`.",
        retry_after=link.retry_after if link is not None else RETRY_FULL,
    )


def stopping() -> UnavailableError:
    """No new requests are taken."""
    return UnavailableError("the daemon is stopping", code="stopping", retry_after=5)

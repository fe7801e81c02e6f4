"""The daemon's side of the store process: keeps it running, hands out connections to it, asks it for figures.

Cache trouble is nobody's error: while the store is away, workers compute, and only the admin routes say so. Knows the
frames, nothing of what the store does with them.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..channel import AsyncChannel, ChannelClosedError
from ..errors import NotFoundError, StoreError, UnavailableError, from_frame
from ..frames import Frame, Stop
from ..frames.store import (
    Adopt,
    Compact,
    Compacted,
    EndVerify,
    Export,
    FromStore,
    Hello,
    Import,
    ListPrefixes,
    Match,
    NamespaceOpened,
    OpenNamespace,
    Pin,
    Pinned,
    Plan,
    Prefixes,
    Purge,
    Purged,
    Resize,
    Resized,
    Stats,
    StatsReply,
    Transferred,
    Unpin,
    UseModels,
    Verified,
    Verify,
    Welcome,
)
from ..supervise import Backoff, Child, Exit, Supervisor, module_command

UNUSABLE = 6
"""Exit status of a store whose directory cannot be used, whatever is tried."""

STATS_TIMEOUT = 10.0
LIST_TIMEOUT = 30.0
PURGE_TIMEOUT = 120.0
VERIFY_TIMEOUT = 7 * 86400.0
"""Seconds that a reply may take."""

PING_EVERY = 20.0
PING_TIMEOUT = 120.0
"""Seconds: a store that answers nothing for so long is killed and started again."""

LAST_FRAMES = 1.0
"""Seconds after the process's end within which the end of its connection must come."""

FLUSH_UNASKED = 30.0
"""Seconds that a store may go on after its connection to the daemon ended: it flushes."""

_WRITTEN_BY_PYTHON = re.compile(r"^(\w+(Error|Exception)): ")

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply", bound=Frame)


@dataclass(frozen=True)
class StoreSettings:
    """What the store process is told at its start. Sizes in bytes, all resolved.

    `hot_most`, `warm_most`: what `hot` and `warm` may become while it runs, where that is more.
    """

    directory: Path
    hot: int
    warm: int
    compression: int
    tail_delay: float
    write_queue: int
    log_level: str
    daily_writes: int = 0
    min_free: int = 0
    preload: int = 0
    scrub_rate: int = 8 << 20
    hot_most: int = 0
    warm_most: int = 0

    def command(self, descriptor: int) -> list[str]:
        """Its command line; `descriptor` is its end of the daemon's connection."""
        return module_command(
            "homeprefixd.prefix.service",
            *("--fd", str(descriptor)),
            *("--cache-dir", str(self.directory)),
            *("--hot", str(self.hot)),
            *("--warm", str(self.warm)),
            *("--hot-most", str(self.hot_most)),
            *("--warm-most", str(self.warm_most)),
            *("--compression", str(self.compression)),
            *("--tail-delay", str(self.tail_delay)),
            *("--write-queue", str(self.write_queue)),
            *("--daily-writes", str(self.daily_writes)),
            *("--min-free", str(self.min_free)),
            *("--preload", str(self.preload)),
            *("--scrub-rate", str(self.scrub_rate)),
            *("--log-level", self.log_level),
        )


class StoreLink:
    """Owns the store process; implements `backend.CacheAdmin`. Everything runs on the event loop."""

    def __init__(
        self,
        command: Callable[[int], list[str]],
        environ: Mapping[str, str],
        *,
        backoff: Backoff | None = None,
        ping_every: float = PING_EVERY,
        ping_timeout: float = PING_TIMEOUT,
        models: Sequence[str] | None = None,
        shares: Mapping[str, int] | None = None,
        key_shares: Mapping[str, int] | None = None,
    ) -> None:
        """`command`: e.g. `StoreSettings.command`. `models`: aliases of those that may be loaded; None: not known.

        `shares`, `key_shares`: percent of the budget of disk, by alias and by name of an API key.
        """
        self._use = None if models is None else UseModels(list(models), dict(shares or {}), dict(key_shares or {}))
        self._supervisor = Supervisor(
            "store", command, started=self._started, ended=self._ended, environ=environ, backoff=backoff
        )
        self._ping_every = ping_every
        self._ping_timeout = ping_timeout
        self._channel: AsyncChannel[Any] | None = None
        self._channel_closed = asyncio.Event()
        self._answered = asyncio.Event()  # set while a store that said Welcome is connected
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reason = "it starts"
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._clients: dict[str, Callable[[socket.socket], None]] = {}
        self._pinger: asyncio.Task[None] | None = None
        self._child: Child | None = None

    # ------------------------------------------------------------------------------------------------- life

    async def launch(self) -> None:
        """Start the store; returns when its process runs."""
        self._supervisor.start()
        self._pinger = asyncio.create_task(self._ping(), name="ping store")
        await self._supervisor.launched()

    async def answers(self, patience: float) -> bool:
        """After `launch`: True once it answers, False if it does not within `patience` seconds (it goes on trying).

        Raises StoreError with the store's own words if its directory cannot be used.
        """
        try:
            await asyncio.wait_for(asyncio.shield(self._first), patience)
        except TimeoutError:
            self._release_errors()  # nobody waits for them any more
            return False
        return True

    async def stop(self, grace: float) -> None:
        """Flush and end the store; after `grace` seconds by force."""
        if self._pinger is not None:
            self._pinger.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pinger
        self._reason = "the daemon stops"
        await self._supervisor.stop(lambda: self._tell(Stop(grace)), grace)
        if self._first.done() and not self._first.cancelled():
            self._first.exception()  # seen, also where nobody waited for it
        self._first.cancel()

    def set_key_shares(self, key_shares: Mapping[str, int]) -> None:
        """From now on these; a store that is away gets them when it is back."""
        if self._use is not None and self._use.key_shares != key_shares:
            self._use = msgspec.structs.replace(self._use, key_shares=dict(key_shares))
            if self._answered.is_set():
                self._tell(self._use)

    def kill(self) -> None:
        """SIGKILL, at once: what waits to be written is lost."""
        self._supervisor.kill()

    @property
    def pid(self) -> int | None:
        return self._supervisor.pid

    def status(self) -> dict[str, Any]:
        """For health and stats: state (`ok`, `away`), reason, pid, restarts."""
        ok = self._answered.is_set()
        return {
            "state": "ok" if ok else "away",
            "reason": "" if ok else self._reason,
            "pid": self.pid,
            "restarts": self._supervisor.restarts,
        }

    def attach(self, name: str, use: Callable[[socket.socket], None]) -> None:
        """Give `use` a connection to the store now, and a new one after each restart of it.

        `use` passes the socket on (its descriptor is duplicated on the way) and does not keep it; it may raise
        ChannelClosedError. `name` is the client's, unique; attaching again replaces.
        """
        self._clients[name] = use
        if self._answered.is_set():
            self._connect(name)

    def detach(self, name: str) -> None:
        """No further connections for `name`. The one it has ends with its process."""
        self._clients.pop(name, None)

    # ------------------------------------------------------------------------------------------------- admin

    async def stats(self) -> dict[str, Any]:
        """The store's figures. Raises UnavailableError."""
        reply = await self._ask(Stats(next(self._tickets)), StatsReply, STATS_TIMEOUT)
        return {**reply.stats, "restarts": self._supervisor.restarts}

    async def prefixes(self, limit: int, model: str) -> Prefixes:
        """Leaves of the tree, last used first. Raises UnavailableError."""
        return await self._ask(ListPrefixes(next(self._tickets), limit, model), Prefixes, LIST_TIMEOUT)

    async def purge(self, request: Purge) -> Purged:
        """Remove from every tier. Raises NotFoundError for an unknown prefix, UnavailableError also on a full disk."""
        frame = Purge(next(self._tickets), request.all, request.prefix, request.older_than, request.model)
        reply = await self._ask(frame, Purged, PURGE_TIMEOUT)
        if reply.error:
            param = "prefix" if request.prefix else None
            raise from_frame(reply.kind or NotFoundError.__name__, reply.error, None, param, {})
        return reply

    async def verify(self, repair: bool, rate: float) -> Verified:
        """Read and check all that is stored. Raises UnavailableError, also while another verification runs.

        It ends where nobody waits for it any more.
        """
        frame = Verify(next(self._tickets), repair, rate)
        try:
            reply = await self._ask(frame, Verified, VERIFY_TIMEOUT)
        except BaseException:
            if self._channel is not None:
                with contextlib.suppress(ChannelClosedError):
                    self._channel.send(EndVerify(frame.ticket))
            raise
        if reply.error:
            raise UnavailableError(reply.error, retry_after=60)
        return reply

    async def match(self, description: Mapping[str, Any], tokens: Sequence[int], limit: int, exact: bool) -> Plan:
        """How far is a prompt known? A dry run. Raises UnavailableError."""
        namespace = await self._open(description)
        frame = Match(next(self._tickets), namespace, _le(tokens), limit, exact, load=False)
        return await self._ask(frame, Plan, LIST_TIMEOUT)

    async def pin(self, request: Pin, description: Mapping[str, Any] | None, tokens: Sequence[int]) -> Pinned:
        """Keep a prefix, or list what is kept. Raises UnavailableError, NotFoundError."""
        return await self._pin(request, description, tokens)

    async def unpin(self, request: Unpin, description: Mapping[str, Any] | None, tokens: Sequence[int]) -> Pinned:
        """Keep it no longer. Raises UnavailableError, NotFoundError."""
        return await self._pin(request, description, tokens)

    async def export(
        self, request: Export, description: Mapping[str, Any] | None, tokens: Sequence[int], descriptor: int
    ) -> Transferred:
        """Write a prefix into a pipe. Raises UnavailableError, NotFoundError."""
        try:
            namespace = await self._open(description) if description is not None else b""
        except BaseException:
            os.close(descriptor)
            raise
        frame = msgspec.structs.replace(request, ticket=next(self._tickets), namespace=namespace, tokens=_le(tokens))
        return await self._transfer(frame, descriptor)

    async def import_(self, descriptor: int) -> Transferred:
        """Read a prefix from a pipe. Raises UnavailableError, RequestError."""
        return await self._transfer(Import(next(self._tickets)), descriptor)

    async def _transfer(self, frame: Export | Import, descriptor: int) -> Transferred:
        reply = await self._ask(frame, Transferred, VERIFY_TIMEOUT, descriptor)
        if reply.error:
            raise from_frame(reply.kind, reply.error, None, None, {})
        return reply

    async def compact(self) -> Compacted:
        """Make the store's file small. Raises UnavailableError."""
        reply = await self._ask(Compact(next(self._tickets)), Compacted, VERIFY_TIMEOUT)
        if reply.error:
            raise UnavailableError(reply.error, retry_after=60)
        return reply

    async def resize(self, request: Resize) -> Resized:
        """Other bounds from now on. Raises UnavailableError."""
        frame = msgspec.structs.replace(request, ticket=next(self._tickets))
        return await self._ask(frame, Resized, PURGE_TIMEOUT)

    async def _pin(self, request: Pin | Unpin, description: Mapping[str, Any] | None, tokens: Sequence[int]) -> Pinned:
        namespace = await self._open(description) if description is not None else b""
        frame = msgspec.structs.replace(request, ticket=next(self._tickets), namespace=namespace, tokens=_le(tokens))
        reply = await self._ask(frame, Pinned, PURGE_TIMEOUT)
        if reply.error:
            raise from_frame(reply.kind, reply.error, None, None, {})
        return reply

    async def _open(self, description: Mapping[str, Any]) -> bytes:
        """The key of a namespace."""
        frame = OpenNamespace(next(self._tickets), dict(description))
        return (await self._ask(frame, NamespaceOpened, STATS_TIMEOUT)).namespace

    async def _ask(self, frame: Any, kind: type[Reply], patience: float, descriptor: int | None = None) -> Reply:
        """Send a frame with a ticket and wait for its reply, at most `patience` seconds.

        `descriptor` travels with it, and is closed here.
        """
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            if self._channel is None or not self._answered.is_set():
                raise UnavailableError(f"the cache's store is away: {self._reason}", retry_after=1)
            self._waiting[frame.ticket] = reply
            try:
                self._channel.send(frame, descriptor)
            finally:
                if descriptor is not None:
                    os.close(descriptor)
                    descriptor = None
            found = await asyncio.wait_for(reply, patience)
        except ChannelClosedError as error:
            raise UnavailableError(f"the cache's store is away: {error}", retry_after=1) from error
        except TimeoutError as error:
            raise UnavailableError(
                f"the cache's store did not answer within {patience:.0f} s", retry_after=5
            ) from error
        finally:
            self._waiting.pop(frame.ticket, None)
            if descriptor is not None:
                os.close(descriptor)
        if not isinstance(found, kind):
            raise UnavailableError(f"the cache's store answered with {type(found).__name__}, not {kind.__name__}")
        return found

    async def _ping(self) -> None:
        """Kill a store that is connected and answers nothing: its clients would wait in vain."""
        while True:
            await asyncio.sleep(self._ping_every)
            pid = self.pid
            if not self._answered.is_set():
                continue
            try:
                await self._ask(Stats(next(self._tickets)), StatsReply, self._ping_timeout)
            except UnavailableError as error:
                if self._answered.is_set() and self.pid == pid:
                    logger.error("%s; it is killed", error)
                    self._supervisor.kill(f"it did not answer for {self._ping_timeout:.0f} s")

    # ------------------------------------------------------------------------------------------------- the process

    def _started(self, child: Child) -> None:
        self._child = child
        if not self._first.done():
            child.hold_errors()
        self._channel_closed.clear()
        self._channel = AsyncChannel(child.socket, FromStore, self._on_frame, lambda: self._disconnected(child))
        self._tell(Hello(arena=False))

    async def _ended(self, end: Exit, wait: float) -> None:
        if self._channel is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._channel_closed.wait(), LAST_FRAMES)
            self._channel.close()
            self._channel = None
        self._answered.clear()
        line = end.telling_line
        self._reason = f"{end}: {line}" if line and line not in str(end) and end.code >= 0 else str(end)
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(UnavailableError(f"the cache's store ended ({end})", retry_after=max(1, int(wait))))
        refused = end.code == UNUSABLE and not self._first.done() and not self._supervisor.stopping
        if refused:  # told by who waits for it
            self._first.set_exception(StoreError(_WRITTEN_BY_PYTHON.sub("", line) or "the store cannot be opened"))
        else:
            self._release_errors()
        if refused or self._supervisor.stopping:
            return
        logger.error("the store ended (%s); it starts again in %.1f s", self._reason, wait)

    def _disconnected(self, child: Child) -> None:
        """The connection ended, so the process ends too, or is made to."""
        self._channel_closed.set()
        self._answered.clear()
        asyncio.get_running_loop().call_later(FLUSH_UNASKED, child.kill, "it closed its connection")

    def _release_errors(self) -> None:
        if self._child is not None:
            self._child.release_errors()

    def _tell(self, frame: Frame) -> None:
        if self._channel is not None:
            with contextlib.suppress(ChannelClosedError):
                self._channel.send(frame)

    def _on_frame(self, frame: Any) -> None:
        if isinstance(frame, Welcome):
            self._answered.set()
            self._release_errors()
            if self._use is not None:
                self._tell(self._use)
            if not self._first.done():
                self._first.set_result(None)
            for name in list(self._clients):
                self._connect(name)
            return
        reply = self._waiting.get(getattr(frame, "ticket", 0))
        if reply is not None and not reply.done():
            reply.set_result(frame)

    def _connect(self, name: str) -> None:
        """A new socket pair: one end to the store, the other to the client."""
        if self._channel is None:
            return
        theirs, ours = socket.socketpair()
        with theirs, ours:
            try:
                self._channel.send(Adopt("worker", name), theirs.fileno())
                self._clients[name](ours)
            except (ChannelClosedError, OSError) as error:
                logger.warning("no connection from %s to the store: %s", name, error)


def _le(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian u32."""
    packed = array.array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()

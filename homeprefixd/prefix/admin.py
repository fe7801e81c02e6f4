"""A store of one's own, for commands on a directory that no daemon uses.

`AdminClient.start` runs the store's process and speaks to it, so that the file is only ever opened there. Blocking; the
process ends with `close`, or with the thread that started it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..channel import Channel, ChannelClosedError
from ..child import PARENT_PID
from ..errors import StoreError, from_frame
from ..frames import Frame
from ..frames import store as frames
from ..frames.store import FromStore, Prefixes, Purged
from .directory import DATA

if TYPE_CHECKING:
    from ..budgets import DiskBudget

_LAST_WORDS = 20
_STOP_SECONDS = 60.0
_WARM = 1 << 30  # bytes; a budget that nothing is stored under

F = TypeVar("F", bound=Frame)


class AdminClient:
    """A connection to a store. Every method raises StoreError with the store's last words if it has ended."""

    def __init__(
        self,
        sock: socket.socket,
        process: subprocess.Popen[str] | None = None,
        *,
        to_write: Callable[[bool], tuple[socket.socket, subprocess.Popen[str]]] | None = None,
    ) -> None:
        """`sock`: to a running store; `process`: that store, if it ends with this client.

        `to_write`: starts another one, where this one was opened for reading only; told whether it will take in more.
        """
        self._to_write = to_write
        self._tickets = itertools.count(1)
        self._connect(sock, process)

    def _connect(self, sock: socket.socket, process: subprocess.Popen[str] | None) -> None:
        self._channel: Channel[FromStore] = Channel(sock, FromStore)
        self._process = process
        self._words: deque[str] = deque(maxlen=_LAST_WORDS)
        self._listener: threading.Thread | None = None
        if process is not None:
            self._listener = threading.Thread(target=self._listen, name="store-stderr", daemon=True)
            self._listener.start()
        try:
            self._channel.send(frames.Hello(arena=False))
            self._receive(frames.Welcome)
        except BaseException:
            self.close()
            raise

    @classmethod
    def start(
        cls,
        cache_dir: Path,
        *,
        create: bool = False,
        hot: int = 16 << 20,
        warm: int = 0,
        compression: int = 1,
        log_level: str = "warning",
        budget: Callable[[], DiskBudget] | None = None,
    ) -> AdminClient:
        """Run a store on `cache_dir` and connect to it. Raises StoreError if it refuses, e.g. because it is in use.

        A directory without a store is refused, and the store is opened for reading only until something is asked that
        changes it: looking at a store neither evicts from it nor repairs it. `create`, or `warm` > 0 (its budget in
        bytes): it is opened for writing at once, and made if it is missing. `budget`: the daemon's, kept to by what
        takes in more; what only removes or marks evicts nothing for it. Without one there is no bound.
        """

        def run(*flags: str) -> tuple[socket.socket, subprocess.Popen[str]]:
            return _run_store(cache_dir, hot, *flags, "--compression", str(compression), "--log-level", log_level)

        if create:
            return cls(*run("--warm", str(warm or _WARM)))
        if warm > 0:
            return cls(*run("--warm", str(warm), "--existing"))

        def to_write(takes_in: bool) -> tuple[socket.socket, subprocess.Popen[str]]:
            if takes_in and budget is not None:
                return run(*_flags(budget()), "--existing")
            most = _WARM
            with contextlib.suppress(OSError):
                most = max(most, 2 * (cache_dir / DATA).stat().st_size)
            return run("--warm", str(most), "--existing")

        return cls(*run("--warm", "0", "--read-only"), to_write=to_write)

    def stats(self) -> dict[str, Any]:
        """The figures of `GET /cache/stats`."""
        return self._ask(frames.Stats(next(self._tickets)), frames.StatsReply).stats

    def prefixes(self, limit: int = 100, model: str = "") -> Prefixes:
        """Leaves of the tree, last used first. `model`: a name or the beginning of a hash; "" for all."""
        return self._ask(frames.ListPrefixes(next(self._tickets), limit, model), Prefixes)

    def purge(self, *, all: bool = False, prefix: str = "", older_than: float = 0.0, model: str = "") -> Purged:
        """Remove from every tier; exactly one filter is given. `error` of the answer says why nothing was done."""
        self._may_write()
        frame = frames.Purge(next(self._tickets), all, prefix, older_than, model)
        return self._ask(frame, Purged)

    def flush(self) -> int:
        """Write everything that waits; returns the nodes that could not be written."""
        self._may_write()
        return self._ask(frames.Flush(next(self._tickets)), frames.Flushed).pending

    def verify(self, *, repair: bool = False, rate: float = 0.0) -> frames.Verified:
        """Read and check everything; `repair` removes what is damaged. `rate` in bytes a second, 0: no bound."""
        if repair:
            self._may_write()
        return self._ask(frames.Verify(next(self._tickets), repair, rate), frames.Verified)

    def pin(self, *, prefix: str = "", label: str = "", ttl: float = 0.0) -> list[frames.PinInfo]:
        """Keep a prefix; without one, list the pins. Raises as the store does."""
        if prefix:
            self._may_write()
        return self._pinned(frames.Pin(next(self._tickets), prefix=prefix, label=label, ttl=ttl))

    def unpin(self, *, prefix: str = "", label: str = "", all: bool = False) -> list[frames.PinInfo]:
        """Keep no longer what is named by one of these; the pins that were. Raises as the store does."""
        self._may_write()
        return self._pinned(frames.Unpin(next(self._tickets), prefix=prefix, label=label, all=all))

    def export(self, prefix: str, descriptor: int) -> frames.Transferred:
        """Write a prefix into a file. Raises as the store does."""
        return self._transferred(frames.Export(next(self._tickets), prefix=prefix), descriptor)

    def import_(self, descriptor: int) -> frames.Transferred:
        """Read a prefix from a file. Raises as the store does."""
        self._may_write(takes_in=True)
        return self._transferred(frames.Import(next(self._tickets)), descriptor)

    def _pinned(self, frame: frames.Pin | frames.Unpin) -> list[frames.PinInfo]:
        reply = self._ask(frame, frames.Pinned)
        if reply.error:
            raise from_frame(reply.kind, reply.error, None, None, {})
        return reply.pins

    def _transferred(self, frame: frames.Export | frames.Import, descriptor: int) -> frames.Transferred:
        reply = self._ask(frame, frames.Transferred, descriptor)
        if reply.error:
            raise from_frame(reply.kind, reply.error, None, None, {})
        return reply

    def close(self) -> None:
        """End the connection, and the store if it was started here: it writes what waits first."""
        self._channel.close()
        if self._process is not None:
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if self._listener is not None:
                self._listener.join()
            if self._process.stderr is not None:
                self._process.stderr.close()

    def _may_write(self, *, takes_in: bool = False) -> None:
        """Have a store that is open for writing."""
        if self._to_write is not None:
            to_write, self._to_write = self._to_write, None
            self.close()
            self._connect(*to_write(takes_in))

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ask(self, frame: Frame, kind: type[F], descriptor: int | None = None) -> F:
        """`descriptor` travels with the frame; it stays the caller's."""
        try:
            self._channel.send(frame, descriptor)
        except ChannelClosedError as error:
            raise self._ended() from error
        return self._receive(kind)

    def _receive(self, kind: type[F]) -> F:
        try:
            while True:
                frame = self._channel.receive()
                if isinstance(frame, kind):
                    return frame
        except ChannelClosedError as error:
            raise self._ended() from error

    def _ended(self) -> StoreError:
        if self._process is not None and self._listener is not None:
            self._listener.join(_STOP_SECONDS)
        words = self._words[-1] if self._words else "the store has ended"
        for level in ("CRITICAL ", "ERROR ", "WARNING ", "INFO ", "DEBUG "):
            words = words.removeprefix(level)
        return StoreError(words)

    def _listen(self) -> None:
        if self._process is not None and self._process.stderr is not None:
            for line in self._process.stderr:
                if line.strip():
                    self._words.append(line.strip())


def _flags(budget: DiskBudget) -> list[str]:
    return [
        *("--warm", str(budget.warm)),
        *("--min-free", str(budget.min_free)),
        *("--daily-writes", str(budget.daily_writes)),
    ]


def _run_store(cache_dir: Path, hot: int, *flags: str) -> tuple[socket.socket, subprocess.Popen[str]]:
    """Our end of the connection to a new store process, and the process."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "homeprefixd.prefix.service", "--fd", str(theirs.fileno())]
        command += ["--cache-dir", str(cache_dir), "--hot", str(hot), "--tail-delay", "2", "--write-queue", str(hot)]
        process = subprocess.Popen(
            [*command, *flags],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "MALLOC_ARENA_MAX": "2", PARENT_PID: str(os.getpid())},
        )
    return ours, process

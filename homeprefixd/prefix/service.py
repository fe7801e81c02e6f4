"""Main of the store process: sockets and threads around `cache.py`.

    python -m homeprefixd.prefix.service --fd N --cache-dir DIR --hot BYTES --warm BYTES ...

Threads: the main one serves the daemon's connection N; one for each further client that the daemon hands over; two
readers that load warm blocks; one writer, the only one that changes the disk. When connection N ends, what waits is
written and the process ends with status 0. Status 6: the directory cannot be used, the last line of stderr says why.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..child import become_child
from ..errors import StoreError
from .arena import Arena
from .cache import Cache
from .connection import Connection
from .directory import Directory
from .disk import Disk, DiskFullError, DiskTroubleError, OtherFormatError, UnreadableError
from .disk_file import GoneError, is_certain
from .hot import HotNode
from .memory_pressure import Relief
from .policy import Worth
from .preloading import Preloader
from .threads import Readers, Writer
from .verifying import SCRUB_RATE, Scrubber, Verifier

_ASIDE_SECONDS = 10.0
"""That the end waits for a verification or a transfer: the other end of its pipe may be stuck."""

_READERS = 2

log = logging.getLogger(__name__)


class Service:
    """The parts of a running store."""

    def __init__(self, cache: Cache, writer: Writer, *, scrub_rate: float = 0.0, preload: int = 0) -> None:
        """`scrub_rate`: bytes a second that are verified when nothing else happens; 0: none. `preload`: bytes that are
        loaded at the start."""
        self.cache = cache
        self.writer = writer
        self.readers = Readers(cache, _READERS)
        cache.freed = self.readers.resume
        self.verifier = Verifier(cache, writer.submit)
        self.scrubber = Scrubber(cache, self.verifier, writer.submit, rate=scrub_rate)
        self.preloader = Preloader(cache, preload)
        self.relief = Relief(cache)
        self.ending = threading.Event()
        self._aside: list[threading.Thread] = []
        self.store_id = secrets.token_hex(8)
        self._begin = time.monotonic()

        self._clients: dict[Connection, threading.Thread] = {}

    def uptime(self) -> float:
        """Seconds."""
        return time.monotonic() - self._begin

    def serve(self, sock: socket.socket, name: str) -> None:
        """Serve a further client, in a thread of its own."""
        self._clients = {client: thread for client, thread in self._clients.items() if thread.is_alive()}
        client = Connection(self, sock, owner=False, name=name)
        thread = threading.Thread(target=client.serve, name=name, daemon=True)
        self._clients[client] = thread
        thread.start()

    def aside(self, run: Callable[[], None], name: str) -> None:
        """Have something long done in a thread of its own; it ends with the service."""
        self._aside = [thread for thread in self._aside if thread.is_alive()]
        self._aside.append(threading.Thread(target=run, name=name, daemon=True))
        self._aside[-1].start()

    def write_path(self, path: Sequence[HotNode]) -> None:
        """Have the writer write nodes, parents first, as many as fit; wait for it. Not from the writer's thread."""
        done = threading.Event()

        def write() -> None:
            try:
                self.cache.write_path(path)
            finally:
                done.set()

        self.writer.submit(write)
        while not done.wait(0.5) and not self.ending.is_set():
            pass

    def stop(self, seconds: float) -> int:
        """End all clients, write what waits for about `seconds`, close the disk; returns the nodes not written."""
        begin = time.monotonic()
        self.ending.set()
        self.preloader.stop()
        self.scrubber.stop()
        self.relief.stop()
        for thread in self._aside:
            thread.join(_ASIDE_SECONDS)
        for client in self._clients:
            client.end()
        for thread in self._clients.values():
            thread.join()
        self.readers.stop()
        return self.writer.stop(max(0.0, seconds - (time.monotonic() - begin)))


def open_disk(directory: Directory, *, limit: int, level: int, min_free: int = 0) -> Disk:
    """Open the file of a directory; one that is damaged is set aside and a new one begun. Raises StoreError."""
    directory.remove_leftovers()
    left_open = directory.was_left_open()
    if left_open and (problem := directory.problem() or directory.reproach()):
        directory.set_aside(problem)
    for _attempt in range(2):
        try:
            return Disk(directory.path, limit=limit, level=level, policy=Worth(), min_free=min_free, recount=left_open)
        except UnreadableError as error:
            directory.set_aside(str(error), damaged=not isinstance(error, OtherFormatError))
        except (DiskFullError, DiskTroubleError) as error:
            raise StoreError(f"{directory.path}: the store cannot be opened: {error}") from error
    raise StoreError(f"{directory.path}: a new store cannot be begun")


def open_to_read(directory: Directory) -> Disk:
    """Open the file of a directory without changing anything. Raises StoreError if it cannot be read."""
    problem = directory.problem() if directory.was_left_open(mark=False) else ""
    if not problem:
        try:
            size = directory.data.stat().st_size
            return Disk(directory.path, limit=size, level=0, policy=Worth(), read_only=True)
        except (UnreadableError, DiskFullError, DiskTroubleError, OSError) as error:
            problem = str(error)
    raise StoreError(f"{directory.data} cannot be read: {problem}; `serve` would set it aside and begin a new one")


def run(arguments: argparse.Namespace) -> bool:
    """Open, serve until the owner's connection ends, close. Raises StoreError if the directory cannot be used.

    False if the owner could not be answered: the next store checks the file first.
    """
    directory: Directory | None = None
    disk: Disk | None = None
    if arguments.warm > 0 or arguments.read_only:
        existing = arguments.existing or arguments.read_only
        # Who kills a store gets another one: what can be stopped is the daemon, or the command, that has started it.
        directory = Directory(
            Path(arguments.cache_dir), create=not existing, owner=os.getppid(), read_only=arguments.read_only
        )
        if arguments.read_only:
            disk = open_to_read(directory)
        else:
            most = max(arguments.warm, arguments.warm_most)
            disk = open_disk(directory, limit=most, level=arguments.compression, min_free=arguments.min_free)
    elif arguments.existing:
        raise StoreError(f"{arguments.cache_dir}: the warm tier is off (warm = 0), there is no store to open")
    if directory is not None and not arguments.read_only and (crash_file := directory.crash_file()) is not None:
        faulthandler.enable(crash_file)
    writer = Writer()
    cache = Cache(
        Arena(max(arguments.hot, arguments.hot_most)),
        disk,
        policy=Worth(),
        write_queue=arguments.write_queue,
        tail_delay=arguments.tail_delay,
        daily_writes=arguments.daily_writes,
        warm_reason="" if disk is not None else "turned off in the configuration (warm = 0)",
        wake=writer.wake,
        corrupted=lambda error: _end_at_once(directory, error),
    )
    service = Service(cache, writer, scrub_rate=arguments.scrub_rate, preload=arguments.preload)
    service.relief.bound(arguments.hot)
    if disk is not None and not disk.read_only:
        cache.resize(arguments.warm)
    service.readers.start()
    writer.start(cache)
    service.scrubber.start()
    service.preloader.start()
    service.relief.start()
    owner = Connection(service, socket.socket(fileno=arguments.fd), owner=True, name="daemon")
    gc.freeze()  # what is there now stays: no collection walks it, which would take 5 ms and hold everything up
    owner.serve()
    pending = service.stop(owner.grace)
    if pending:
        why = cache.warm_reason or f"the {owner.grace:.0f} s for it were over"
        log.warning("%d blocks, %d MiB, could not be written before the end: %s", pending, cache.queue.bytes >> 20, why)
    if directory is not None:
        directory.release(clean=not (arguments.read_only or owner.failed))
    return not owner.failed


def _end_at_once(directory: Directory | None, error: Exception) -> None:
    """The file is damaged: the next store checks it first, as this one leaves the mark that it was open."""
    if isinstance(error, GoneError):
        log.error("%s; what was stored in it is lost, and a new store is begun", error)
    else:
        log.error("the store's file is damaged (%s); it is checked when the store starts again", error)
        if directory is not None and is_certain(error):
            directory.note_corruption(str(error))
    os._exit(1)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="homeprefixd.prefix.service")
    parser.add_argument("--fd", type=int, required=True, help="socket of the owner's connection")
    parser.add_argument("--cache-dir", required=True)
    parser.add_argument("--hot", type=int, required=True, help="bytes of RAM")
    parser.add_argument("--warm", type=int, required=True, help="bytes of disk; 0: none")
    parser.add_argument("--hot-most", type=int, default=0, help="bytes that --hot may become; 0: no more than it is")
    parser.add_argument("--warm-most", type=int, default=0, help="bytes that --warm may become; 0: no more than it is")
    parser.add_argument("--compression", type=int, default=1, help="zstd level; 0: none")
    parser.add_argument("--tail-delay", type=float, default=2.0, help="seconds")
    parser.add_argument("--write-queue", type=int, default=0, help="bytes; 0: half of --hot")
    parser.add_argument("--daily-writes", type=int, default=0, help="bytes to disk in a day; 0: no bound")
    parser.add_argument("--scrub-rate", type=float, default=SCRUB_RATE, help="bytes/s to verify when idle; 0: none")
    parser.add_argument("--preload", type=int, default=0, help="bytes to load at the start of what was used last")
    parser.add_argument("--min-free", type=int, default=0, help="bytes of the disk to leave free")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--existing", action="store_true", help="refuse a directory without a store in it")
    parser.add_argument("--read-only", action="store_true", help="change nothing; refuses to purge; implies --existing")
    arguments = parser.parse_args(argv)
    arguments.write_queue = arguments.write_queue or arguments.hot // 2
    return arguments


def main() -> int:
    arguments = parse(sys.argv[1:])
    become_child("store", arguments.log_level)
    # the daemon's connection says when to end; a signal to the whole group must not lose what still comes
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        return 0 if run(arguments) else 1
    except StoreError as error:
        log.error("%s", error.message)
        return StoreError.exit_code


if __name__ == "__main__":
    sys.exit(main())

"""Main of the store process: sockets and threads around `cache.py`.

    python -m homeprefixd.prefix.service --fd N --cache-dir DIR --hot BYTES --warm BYTES ...

Threads: the main one serves the daemon's connection N; one for each further client that the daemon hands over; two
readers that load warm blocks; one writer, the only one that changes the disk. When connection N ends, what waits is
written and the process ends with status 0. Status 6: the directory cannot be used, the last line of stderr says why.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..channel import Channel, ChannelClosedError
from ..child import become_child
from ..errors import HomeprefixdError, StoreError
from ..frames import (
    Abandon,
    Adopt,
    BlockLost,
    BlockReady,
    Commit,
    Compact,
    Compacted,
    Export,
    FileHash,
    FileHashKnown,
    Flush,
    Flushed,
    Frame,
    Hello,
    Import,
    ListPrefixes,
    Match,
    NamespaceOpened,
    Neighbour,
    Neighboured,
    OpenNamespace,
    Pin,
    Pinned,
    Plan,
    Prefixes,
    Purge,
    Purged,
    Release,
    Reserve,
    Reserved,
    Resize,
    Resized,
    Stats,
    StatsReply,
    Stop,
    Taken,
    ToStore,
    Transferred,
    Unpin,
    UseModels,
    Verified,
    Verify,
    Welcome,
)
from . import listing, purge, transfer
from .arena import Arena
from .cache import Cache, Lease
from .directory import Directory
from .disk import Disk, DiskFullError, DiskTroubleError, OtherFormatError, UnreadableError
from .memory_pressure import Relief
from .neighbours import neighbour
from .policy import Worth
from .preloading import Preloader
from .session import Session
from .threads import Readers, Writer
from .verifying import SCRUB_RATE, Findings, Scrubber, Verifier

_SEND_SECONDS = 10
"""A client that does not read its answers for so long is given up."""

_FLUSH_UNASKED = 25.0
"""Seconds that what waits may be written after the owner left without a word: less than it waits before it kills."""

_FLUSH_SHARE = 0.8
"""Of the time that the owner gives: the rest is for the transaction that is running when it ends."""

_ASIDE_SECONDS = 10.0
"""That the end waits for a verification or a transfer: the other end of its pipe may be stuck."""

_BUFFER = 1 << 20  # bytes; of a transfer's pipe
_READERS = 2
_IDENTITY = struct.Struct("<QQQq")  # device, inode, size, mtime in ns

log = logging.getLogger(__name__)


class Service:
    """The parts of a running store."""

    def __init__(self, cache: Cache, writer: Writer, *, scrub_rate: float = 0.0, preload: int = 0) -> None:
        """`scrub_rate`: bytes a second that are verified when nothing else happens; 0: none. `preload`: bytes that are
        loaded at the start."""
        self.cache = cache
        self.writer = writer
        self.readers = Readers(cache, _READERS)
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

    def flush(self) -> None:
        """Have the writer write what waits, and wait for it. Not from the writer's thread."""
        done = threading.Event()

        def write() -> None:
            try:
                self.cache.write(everything=True)
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


class Connection:
    """One client. `serve` is the body of its thread."""

    def __init__(
        self, service: Service, sock: socket.socket, *, owner: bool, name: str, patience: int = _SEND_SECONDS
    ) -> None:
        """`owner`: it is the daemon's own, and may hand over others. `patience`: seconds for it to read an answer."""
        # a client that is stuck must not stop the threads that serve others
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", patience, 0))
        self._sock = sock
        self._channel: Channel[ToStore] = Channel(sock, ToStore)
        self._service = service
        self._cache = service.cache
        self._owner = owner
        self._name = name
        self._session: Session = self._cache.session()
        self._leases: dict[int, Lease] = {}
        self.grace = _FLUSH_UNASKED
        """Seconds that the client gave with Stop."""

    def serve(self) -> None:
        """Answer frames until the client is gone; then give back all that it held."""
        try:
            while True:
                frame = self._channel.receive()
                if isinstance(frame, Stop):
                    self.grace = frame.grace * _FLUSH_SHARE
                    break
                self._answer(frame)
        except ChannelClosedError as error:
            log.debug("%s: %s", self._name, error)
        except Exception:
            log.exception("%s: a frame could not be answered", self._name)
        finally:
            self._channel.close()
            for lease in self._leases.values():
                self._service.readers.cancel(lease)
            self._session.close()

    def end(self) -> None:
        """Have `serve` return once it has answered what was sent until now. From any thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def _answer(self, frame: ToStore) -> None:
        match frame:
            case Match():
                self._match(frame)
            case Release():
                lease = self._leases.pop(frame.ticket, None)
                if lease is not None:
                    self._service.readers.cancel(lease)
                    self._session.release(lease)
            case Taken():
                lease = self._leases.get(frame.ticket)
                if lease is not None:
                    self._cache.taken(lease, frame.count)
                    self._service.readers.resume(lease)
            case Reserve():
                self._send(Reserved(frame.ticket, self._session.reserve(frame.sizes)))
            case Commit():
                self._session.commit(frame.namespace, frame.nodes)
            case Abandon():
                self._session.abandon(frame.offsets)
            case OpenNamespace():
                namespace, mismatch = self._cache.open_namespace(frame.description)
                self._send(NamespaceOpened(frame.ticket, namespace, mismatch))
            case FileHash():
                self._file_hash(frame)
            case Neighbour():
                path = neighbour(self._cache, frame.namespace, frame.tokens, frame.beyond)
                self._send(Neighboured(frame.ticket, path))
            case Hello():
                arena = self._cache.arena
                welcome = Welcome(arena.limit if frame.arena else 0, self._service.store_id)
                self._channel.send(welcome, arena.descriptor if frame.arena else None)
            case Adopt():
                self._adopt(frame)
            case Stats():
                service = self._service
                figures = listing.stats(self._cache, store_id=service.store_id, uptime=service.uptime())
                self._send(StatsReply(frame.ticket, figures))
            case ListPrefixes():
                found, total = listing.prefixes(self._cache, limit=frame.limit, model=frame.model)
                self._send(Prefixes(frame.ticket, found, total))
            case Purge():
                self._service.writer.submit(lambda: self._purge(frame))
            case Flush():
                self._service.writer.submit(lambda: self._flush(frame))
            case Verify():
                self._service.aside(lambda: self._verify(frame), "verify")
            case Resize():
                self._service.writer.submit(lambda: self._resize(frame))
            case Compact():
                self._service.writer.submit(lambda: self._compact(frame))
            case Pin() | Unpin():
                self._service.writer.submit(lambda: self._pin(frame))
            case Export() | Import():
                descriptor = self._channel.take_descriptor()
                self._service.aside(lambda: self._transfer(frame, descriptor), "transfer")
            case UseModels():
                if self._owner:
                    self._cache.usage.configured(frame.models)
                    self._cache.wake()

    def _send(self, frame: Frame) -> None:
        """From any thread; a client that is gone is noticed by `serve`."""
        try:
            self._channel.send(frame)
        except ChannelClosedError as error:
            log.debug("%s: %s", self._name, error)
            self._channel.close()

    def _match(self, frame: Match) -> None:
        if not frame.load:
            lease = self._cache.lookup(frame.namespace, frame.tokens, limit=frame.limit, exact=frame.exact, load=False)
            self._send(Plan(frame.ticket, lease.plan, lease.known, self._cache.read_rate.value))
            return
        self._cache.recent.note(frame.request, frame.namespace, frame.tokens)
        lease = self._session.lookup(frame.namespace, frame.tokens, limit=frame.limit, exact=frame.exact)
        self._leases[frame.ticket] = lease
        self._send(Plan(frame.ticket, lease.plan, lease.known, self._cache.read_rate.value, lease.streamed))
        self._service.readers.load(
            lease,
            lambda index, offset: self._send(BlockReady(frame.ticket, index, offset)),
            lambda index, reason: self._send(BlockLost(frame.ticket, index, reason)),
        )

    def _file_hash(self, frame: FileHash) -> None:
        identity = _IDENTITY.pack(frame.device, frame.inode, frame.size, frame.mtime_ns)
        if frame.sha256:
            self._cache.remember_file_hash(identity, frame.sha256)
        else:
            self._send(FileHashKnown(frame.ticket, self._cache.file_hash(identity)))

    def _adopt(self, frame: Adopt) -> None:
        sock = socket.socket(fileno=self._channel.take_descriptor())
        if not self._owner:
            sock.close()
            return
        self._service.serve(sock, f"{frame.role} {frame.name}")

    def _purge(self, frame: Purge) -> None:
        try:
            removed = purge.purge(
                self._cache,
                everything=frame.all,
                prefix=frame.prefix,
                older_than=frame.older_than,
                model=frame.model,
                now=time.time(),
            )
            self._send(Purged(frame.ticket, removed.nodes, removed.bytes))
        except HomeprefixdError as error:
            self._send(Purged(frame.ticket, 0, 0, error.message))

    def _verify(self, frame: Verify) -> None:
        disk = self._cache.disk
        error = ""
        found: Findings | None = Findings()
        if disk is None:
            error = f"there is nothing on disk: {self._cache.warm_reason}"
        elif frame.repair and disk.read_only:
            error = "the store is open for reading only"
        else:
            try:
                found = self._service.verifier.run(repair=frame.repair, rate=frame.rate, stop=self._service.ending)
                error = "" if found is not None else "a verification is running already"
            except DiskTroubleError as trouble:
                self._cache.trouble("verifying", trouble)
                error = f"the store's tables cannot be read: {trouble}"
        done = found or Findings()
        self._send(
            Verified(
                frame.ticket,
                done.nodes,
                done.bytes,
                done.damaged,
                done.removed,
                done.problems,
                done.seconds,
                done.complete,
                error,
            )
        )

    def _transfer(self, frame: Export | Import, descriptor: int) -> None:
        """In a thread of its own."""
        session = self._cache.session()
        try:
            if isinstance(frame, Export):
                namespace, tokens = frame.namespace, frame.tokens
                if frame.request:
                    namespace, tokens = self._cache.pins.prompt_of(frame.request)
                with os.fdopen(descriptor, "wb", _BUFFER) as file:
                    done = transfer.export(
                        self._cache, session, file, namespace=namespace, tokens=tokens, prefix=frame.prefix
                    )
            else:
                with os.fdopen(descriptor, "rb", _BUFFER) as file:
                    done = transfer.import_(self._cache, session, file, self._service.flush)
            self._send(Transferred(frame.ticket, done.nodes, done.tokens, done.bytes, done.known))
        except Exception as error:
            if not isinstance(error, HomeprefixdError | OSError):
                log.exception("a transfer failed")
            kind, message = transfer.reason(error)
            self._send(Transferred(frame.ticket, 0, 0, 0, 0, message, kind))
        finally:
            session.close()

    def _resize(self, frame: Resize) -> None:
        """In the writer's thread."""
        if not self._owner:
            self._send(Resized(frame.ticket, 0))
            return
        service, cache = self._service, self._cache
        warm = cache.resize(frame.warm) if frame.warm else cache.disk.limit if cache.disk is not None else 0
        hot = service.relief.bound(frame.hot) if frame.hot else cache.arena.limit
        if frame.daily_writes >= 0:
            cache.bound_writes(frame.daily_writes)
        if frame.scrub_rate >= 0:
            service.scrubber.set_rate(frame.scrub_rate)
        if frame.log_level:
            logging.getLogger().setLevel(frame.log_level.upper())
        self._send(Resized(frame.ticket, warm, hot))

    def _compact(self, frame: Compact) -> None:
        """In the writer's thread."""
        disk = self._cache.disk
        if disk is None or disk.read_only:
            error = f"nothing is kept on disk: {self._cache.warm_reason or 'it is open for reading only'}"
            self._send(Compacted(frame.ticket, 0, 0, error))
            return
        try:
            before, after = disk.compact()
            log.info("the store's file was compacted: %d MiB, now %d MiB", before >> 20, after >> 20)
            self._cache.removed_by_hand()  # there may be room again
            self._send(Compacted(frame.ticket, before, after))
        except (DiskFullError, DiskTroubleError) as error:
            self._cache.trouble("compacting the store's file", error)
            self._send(Compacted(frame.ticket, 0, 0, f"the file cannot be compacted: {error}"))

    def _pin(self, frame: Pin | Unpin) -> None:
        """In the writer's thread."""
        pins = self._cache.pins
        try:
            found = pins.pin(frame) if isinstance(frame, Pin) else pins.unpin(frame)
            self._send(Pinned(frame.ticket, found))
        except HomeprefixdError as error:
            self._send(Pinned(frame.ticket, [], error.message, type(error).__name__))

    def _flush(self, frame: Flush) -> None:
        self._cache.write(everything=True)
        self._send(Flushed(frame.ticket, len(self._cache.queue)))


def open_disk(directory: Directory, *, limit: int, level: int, min_free: int = 0) -> Disk:
    """Open the file of a directory; one that is damaged is set aside and a new one begun. Raises StoreError."""
    if directory.was_left_open() and (problem := directory.problem()):
        directory.set_aside(problem)
    for _attempt in range(2):
        try:
            return Disk(directory.path, limit=limit, level=level, policy=Worth(), min_free=min_free)
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


def run(arguments: argparse.Namespace) -> None:
    """Open, serve until the owner's connection ends, close. Raises StoreError if the directory cannot be used."""
    directory: Directory | None = None
    disk: Disk | None = None
    if arguments.warm > 0 or arguments.read_only:
        existing = arguments.existing or arguments.read_only
        directory = Directory(Path(arguments.cache_dir), create=not existing)
        if arguments.read_only:
            disk = open_to_read(directory)
        else:
            disk = open_disk(directory, limit=arguments.warm, level=arguments.compression, min_free=arguments.min_free)
    elif arguments.existing:
        raise StoreError(f"{arguments.cache_dir}: the warm tier is off (warm = 0), there is no store to open")
    writer = Writer()
    cache = Cache(
        Arena(arguments.hot),
        disk,
        policy=Worth(),
        write_queue=arguments.write_queue,
        tail_delay=arguments.tail_delay,
        daily_writes=arguments.daily_writes,
        warm_reason="" if disk is not None else "turned off in the configuration (warm = 0)",
        wake=writer.wake,
        corrupted=_end_at_once,
    )
    service = Service(cache, writer, scrub_rate=arguments.scrub_rate, preload=arguments.preload)
    service.readers.start()
    writer.start(cache)
    service.scrubber.start()
    service.preloader.start()
    service.relief.start()
    owner = Connection(service, socket.socket(fileno=arguments.fd), owner=True, name="daemon")
    owner.serve()
    pending = service.stop(owner.grace)
    if pending:
        why = cache.warm_reason or f"the {owner.grace:.0f} s for it were over"
        log.warning("%d blocks, %d MiB, could not be written before the end: %s", pending, cache.queue.bytes >> 20, why)
    if directory is not None:
        directory.release(clean=not arguments.read_only)


def _end_at_once() -> None:
    """The file is damaged: the next store checks it first, as this one leaves the mark that it was open."""
    log.error("the store's file is damaged; it is checked when the store starts again")
    os._exit(1)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="homeprefixd.prefix.service")
    parser.add_argument("--fd", type=int, required=True, help="socket of the owner's connection")
    parser.add_argument("--cache-dir", required=True)
    parser.add_argument("--hot", type=int, required=True, help="bytes of RAM")
    parser.add_argument("--warm", type=int, required=True, help="bytes of disk; 0: none")
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
        run(arguments)
    except StoreError as error:
        log.error("%s", error.message)
        return StoreError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

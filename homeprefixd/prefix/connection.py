"""One client of the store: its frames, answered from `cache.py`.

What is long done runs in another thread: what changes the disk in the writer's, a verification or a transfer in one of
its own; the answer comes from there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import time
from typing import TYPE_CHECKING

from ..channel import Channel, ChannelClosedError
from ..errors import HomeprefixdError, StoreError
from ..frames import Frame, Stop
from ..frames.store import (
    Abandon,
    Adopt,
    BlockLost,
    BlockReady,
    Commit,
    Compact,
    Compacted,
    EndVerify,
    Export,
    FileHash,
    FileHashKnown,
    Flush,
    Flushed,
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
    Recall,
    Recalled,
    Refuse,
    Release,
    Remember,
    Reserve,
    Reserved,
    Resize,
    Resized,
    Stats,
    StatsReply,
    Taken,
    ToStore,
    Trace,
    Transferred,
    Unpin,
    UseModels,
    Verified,
    Verify,
    Welcome,
)
from . import listing, purge, transfer
from .cache import Lease
from .disk import DiskFullError, DiskTroubleError
from .hot import run_of
from .neighbours import neighbour
from .session import Session
from .tracing import trace
from .verifying import Findings

if TYPE_CHECKING:
    from .service import Service

_SEND_SECONDS = 10
"""A client that does not read its answers for so long is given up."""

FLUSH_UNASKED = 25.0
"""Seconds that what waits may be written after the owner left without a word: less than it waits before it kills."""

_FLUSH_SHARE = 0.8
"""Of the time that the owner gives: the rest is for the transaction that is running when it ends."""

_BUFFER = 1 << 20  # bytes; of a transfer's pipe
_IDENTITY = struct.Struct("<QQQq")  # device, inode, size, mtime in ns

log = logging.getLogger(__name__)


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
        self._verifying = set[int]()  # tickets of verifications that somebody waits for
        self.grace = FLUSH_UNASKED
        """Seconds that the client gave with Stop."""
        self.failed = False
        """A frame could not be answered."""

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
        except Exception as error:
            self._cache.judge(error)
            self.failed = True
            log.exception("%s: a frame could not be answered", self._name)
        finally:
            self._verifying.clear()
            self._channel.close()
            for lease in self._leases.values():
                self._service.readers.cancel(lease)
            self._session.close()
            self._service.readers.resume()

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
                    self._service.readers.resume()
            case Taken():
                lease = self._leases.get(frame.ticket)
                if lease is not None:
                    self._cache.taken(lease, frame.count)
                    self._service.readers.resume()
            case Reserve():
                self._send(
                    Reserved(frame.ticket, self._session.reserve(frame.sizes, runs=frame.runs, after=frame.after))
                )
            case Commit():
                self._session.commit(frame.namespace, frame.nodes, frame.owner)
                self._service.readers.resume()
            case Abandon():
                self._session.abandon(frame.offsets)
                self._service.readers.resume()
            case Refuse():
                self._cache.refused(frame.namespace, frame.key, frame.reason)
            case OpenNamespace():
                namespace, mismatch = self._cache.open_namespace(frame.description)
                self._send(NamespaceOpened(frame.ticket, namespace, mismatch))
            case FileHash():
                self._file_hash(frame)
            case Neighbour():
                path = neighbour(self._cache, frame.namespace, frame.tokens, frame.beyond)
                self._send(Neighboured(frame.ticket, path))
            case Trace():
                self._send(trace(self._cache, frame.ticket, frame.namespace, frame.tokens))
            case Remember():
                self._cache.replies.remember(
                    frame.namespace, frame.digest, frame.length, frame.tail, frame.stretches, frame.reply
                )
            case Recall():
                row = self._cache.replies.recall(frame.namespace, frame.text)
                none = Recalled(frame.ticket)
                self._send(Recalled(frame.ticket, row.length, row.stretches, row.replies) if row is not None else none)
            case Hello():
                arena = self._cache.arena
                welcome = Welcome(arena.limit if frame.arena else 0, self._service.store_id)
                self._channel.send(welcome, arena.descriptor if frame.arena else None)
            case Adopt():
                self._adopt(frame)
            case Stats():
                service = self._service
                figures = listing.stats(self._cache, store_id=service.store_id, uptime=service.uptime())
                figures["scrub"] = service.scrubber.figures()
                self._send(StatsReply(frame.ticket, figures))
            case ListPrefixes():
                found, total = listing.prefixes(self._cache, limit=frame.limit, model=frame.model)
                self._send(Prefixes(frame.ticket, found, total))
            case Purge():
                self._service.writer.submit(lambda: self._purge(frame))
            case Flush():
                self._service.writer.submit(lambda: self._flush(frame))
            case Verify():
                self._verifying.add(frame.ticket)
                self._service.aside(lambda: self._verify(frame), "verify")
            case EndVerify():
                self._verifying.discard(frame.ticket)
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
                    self._service.writer.submit(lambda: self._cache.set_shares(frame.shares, frame.key_shares))

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
            lambda index, hot: self._send(BlockReady(frame.ticket, index, hot.offset, *run_of(hot))),
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
        except Exception as error:
            self._send(Purged(frame.ticket, 0, 0, *_refusal(error, "purging")))

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
                found = self._service.verifier.run(
                    repair=frame.repair,
                    rate=frame.rate,
                    stop=lambda: frame.ticket not in self._verifying or self._service.ending.is_set(),
                )
                error = "" if found is not None else "a verification is running already"
            except DiskTroubleError as trouble:
                self._cache.trouble("verifying", trouble)
                error = f"the store's tables cannot be read: {trouble}"
            except Exception as failure:
                error = _refusal(failure, "verifying")[0]
        self._verifying.discard(frame.ticket)
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
                    done = transfer.import_(self._cache, session, file, self._service.write_path)
            sums = (done.nodes, done.tokens, done.bytes, done.known)
            self._send(Transferred(frame.ticket, *sums, kept=done.kept, not_kept=done.not_kept))
        except Exception as error:
            if not isinstance(error, HomeprefixdError | OSError):
                log.exception("a transfer failed")
            kind, message = transfer.reason(error)
            self._send(Transferred(frame.ticket, 0, 0, 0, 0, message, kind))
        finally:
            session.close()
            self._service.readers.resume()  # there may be room for what others wait for

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
        except Exception as error:
            self._send(Compacted(frame.ticket, 0, 0, _refusal(error, "compacting")[0]))

    def _pin(self, frame: Pin | Unpin) -> None:
        """In the writer's thread."""
        pins = self._cache.pins
        try:
            found = pins.pin(frame) if isinstance(frame, Pin) else pins.unpin(frame)
            self._send(Pinned(frame.ticket, found))
        except Exception as error:
            self._send(Pinned(frame.ticket, [], *_refusal(error, "pinning")))

    def _flush(self, frame: Flush) -> None:
        try:
            self._cache.write(everything=True)
        finally:
            self._send(Flushed(frame.ticket, len(self._cache.queue)))


def _refusal(error: Exception, what: str) -> tuple[str, str]:
    """Message and class name for the client; whatever it is, it gets an answer."""
    if isinstance(error, HomeprefixdError):
        return error.message, "UnavailableError" if isinstance(error, StoreError) else type(error).__name__
    log.exception("%s failed", what)
    return f"{what} failed: {error}", "UnavailableError"

"""What the writer's thread does: nodes from RAM to disk, eviction there, repairs, and what to do when the disk fails.

Works on the state of `cache.py`, under its lock; never holds the lock while the disk is written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from .arena import pages
from .disk import FEW, BudgetError, Disk, DiskFullError, DiskTroubleError, GrowthError, Pending, Stored, Touch
from .hot import HotNode
from .refused import requeue
from .removals import Why
from .scratch import Scratch
from .shares import Account, Shares
from .shrinking import Shrinking
from .tree import Placed

if TYPE_CHECKING:
    from .cache import Cache

_TOUCHES_AT_ONCE = 2_000
_TOUCH_SECONDS = 60.0
_BACKOFF = (2.0, 60.0)  # seconds until a failed write is tried again: first, at most
_SHARE_STEP = 32  # of a full share so much more goes at once: looking for it costs as much for little as for much
_LOOK_SECONDS = 2.0  # between looks whether a full disk has room again
_FULL_SECONDS = (
    10.0,
    600.0,
)  # that the store does not grow after the disk was full, if no look says more: first, at most

log = logging.getLogger(__name__)


class WriteBehind:
    """The writer's side of a cache. All methods belong to one thread."""

    def __init__(self, cache: Cache, disk: Disk, daily_writes: int) -> None:
        """`daily_writes`: bytes that may be written in a day; 0: no bound."""
        self._cache = cache
        self._disk = disk
        self._scratch = Scratch()
        self._evicting: set[bytes] = set()  # of the cache's hidden nodes, those whose room is needed
        self._retry_at = 0.0
        self._backoff = _BACKOFF[0]
        self._held_until = 0.0  # the store must not grow until then, as the disk was full; 0: it may
        self._hold = _FULL_SECONDS[0]
        self._look_at = 0.0
        self._free_when_full = 0
        self._touches_written = cache.clock()
        self._shrinking = Shrinking(disk, cache.clock)
        self._daily_writes = daily_writes
        self.day_is_over = False
        """Whether as much was written today as may be."""
        self._pinned: frozenset[bytes] = frozenset()  # nodes that must stay
        self._urgent = False  # what is pinned is being written: `write_path` says what is refused of it
        self._kept: frozenset[bytes] = frozenset()  # nodes that must stay while a path is written
        self._in_use = False  # a node would have gone in this step, but somebody needs it now
        self._over_share = False  # a share was full when the last batch was written
        self._shares = Shares()

    def write(self, *, everything: bool) -> float | None:
        """See `Cache.write`."""
        cache = self._cache
        if everything and self._held_until:
            self.try_again()  # the last chance
        while True:
            now = cache.clock()
            if cache.out_of_time():
                return None
            if self._held_until and (now >= self._held_until or (now >= self._look_at and self._has_room(now))):
                self.try_again()
            if now < self._retry_at and not everything:
                return self._retry(now)
            if self._daily_writes:
                self._spare_the_disk()
            cache.pins.expire()
            with cache.lock:
                batch = self._take(now, everything)
                touches = self._take_touches(now, bool(batch) or everything or self._shrinking.is_due())
                registry = cache.registry
                busy = (
                    self._shrinking.is_due()
                    or batch
                    or touches
                    or cache.repairs
                    or registry.new_namespaces
                    or registry.new_hashes
                    or self._replies_due(now, everything)
                )
            if not busy:
                if self._takes_back(now):
                    continue
                if cache.deadline is None:
                    self._shrinking.give_back(self._left_today())
                return self._next_write(now)
            if not self._write_some(batch, touches):
                return self._retry(cache.clock())

    def write_path(self, path: Sequence[HotNode], keep: frozenset[bytes] = frozenset()) -> None:
        """Write nodes of a path, parents before children, without waiting for their time: as many as fit.

        What does not fit is tried in ever smaller pieces: until it is written, its size on disk is a guess.
        `keep`: keys of nodes that do not go for them, as they are of use only together.
        """
        cache, most = self._cache, self._disk.batch_bytes
        while not (cache.clock() < self._retry_at or cache.out_of_time()):
            if self._daily_writes:
                self._spare_the_disk()
            if self.day_is_over:
                return
            batch: list[HotNode] = []
            limit = min(most, self._batch_bytes())
            with cache.lock:
                path = [hot for hot in path if hot.indexed and not hot.warm]
                for hot in path:
                    if batch and sum(other.size for other in batch) + hot.size > limit:
                        break
                    cache.hot.lease(hot)
                    batch.append(hot)
                cache.writing = batch
                touches = self._take_touches(cache.clock(), bool(batch))  # what was used lately may go for it, too
            if not batch:
                return
            self._urgent, self._kept = True, keep
            try:
                written = self._write_some(batch, touches)
            finally:
                self._urgent, self._kept = False, frozenset()
            if not written:
                return
            if any(hot.warm or not hot.indexed for hot in batch):
                continue
            if len(batch) == 1:
                with cache.lock:  # nor does what comes behind it
                    self._refuse({hot for hot in path if hot.queued}, self._over_share)
                return
            most = sum(hot.size for hot in batch) // 2

    def requeue(self, most: int | None) -> None:
        """See `Cache.requeue`. What is pinned is written at once."""
        if self.day_is_over:
            return  # nothing may be written today; tomorrow it is called again
        pins = self._cache.pins
        for place, row in pins.live().items():
            if self._disk.used() <= self._disk.limit:  # else it is to shrink, in steps
                pins.write({place: row})
        self._pinned = pins.protected()
        requeue(self._cache, self._disk, self.accounts(), self._is_idle, most)

    def unpinned(self, most: int | None) -> None:
        """See `Cache.unpinned`."""
        if any(account.used > account.limit for account in self.accounts()):
            self.shrink()
        self.requeue(most)

    def _takes_back(self, now: float) -> bool:
        """Do blocks wait now for which the queue had no room before?"""
        with self._cache.lock:
            can = self._cache.warm_state == "ok" and not self.day_is_over
            return can and self._cache.queue.take_back(now)

    def shrink(self) -> None:
        """The budget may be smaller now."""
        self._shrinking.begin()

    def bound_writes(self, daily_writes: int) -> None:
        """Bytes that may be written in a day from now on; 0: no bound."""
        self._daily_writes = daily_writes
        self._shrinking.try_again()
        if not daily_writes and self.day_is_over:
            self.day_is_over = False
            self._cache.requeue()

    def _spare_the_disk(self) -> None:
        """Let nothing wait once as much was written today as may be; what was left out waits again the next day."""
        cache = self._cache
        over = self._disk.sums.written.on(cache.wall()) >= self._daily_writes
        if over != self.day_is_over:
            self.day_is_over = over
            if over:
                log.warning("cache.daily_writes: %d MiB were written today, no more until tomorrow", _mib(self._disk))
            else:
                cache.requeue()
        if over:
            with cache.lock:
                waiting = list(cache.queue)
                for hot in waiting:
                    cache.queue.refuse(hot)
                    cache.hot.offer(hot)
                cache.counters.dropped_nodes += len(waiting)
                cache.counters.spared_nodes += len(waiting)

    def _batch_bytes(self) -> int:
        """Of state that may be written in one transaction: no more than is left of the day, a block excepted."""
        left = self._left_today()
        return self._disk.batch_bytes if left is None else min(self._disk.batch_bytes, max(1, left))

    def _left_today(self) -> int | None:
        """Bytes that may still be written today; None: any number."""
        return self._daily_writes - self._disk.sums.written.on(self._cache.wall()) if self._daily_writes else None

    def try_again(self) -> None:
        """The disk may have room again: do not wait, and let it grow."""
        self._held_until = 0.0
        self._retry_at = 0.0
        self._disk.hold_at(None)

    def _retry(self, now: float) -> float:
        """Seconds until a failed write may be tried again, or at least the disk looked at."""
        at = min(self._retry_at, self._look_at) if self._held_until else self._retry_at
        return max(0.0, at - now)

    def _has_room(self, now: float) -> bool:
        """Whether the disk has more free than when it was full."""
        self._look_at = now + _LOOK_SECONDS
        return self._disk.free_bytes() >= self._free_when_full + self._disk.batch_bytes

    def _next_write(self, now: float) -> float | None:
        with self._cache.lock:
            due = self._cache.queue.next_due()
            times = [due] if due is not None else []
            if self._cache.touched:
                times.append(self._touches_written + _TOUCH_SECONDS)
            memo = self._cache.replies.due_in(now)
            if memo is not None:
                times.append(now + memo)
            if self._held_until:
                times.append(min(self._look_at, self._held_until))
            shrinking = self._shrinking.due_at()
            if shrinking is not None:
                times.append(shrinking)
        return max(0.0, min(times) - now) if times else None

    def _replies_due(self, now: float, everything: bool) -> bool:
        due = self._cache.replies.due_in(now)
        return due is not None and (everything or due <= 0)

    def _take(self, now: float, everything: bool) -> list[HotNode]:
        """The next nodes to store, parents first, pinned until `_written`."""
        chosen: dict[HotNode, None] = {}
        size = 0
        limit = self._batch_bytes()
        for hot in list(self._cache.queue) if everything else self._cache.queue.due(now):
            chain: list[HotNode] = []
            at: HotNode | None = hot
            while at is not None and not at.warm and at not in chosen:
                chain.append(at)
                at = self._cache.hot.by_key.get(at.node.parent)
            more = sum(part.size for part in chain)
            if chosen and size + more > limit:
                break
            chosen.update(dict.fromkeys(reversed(chain)))
            size += more
        for hot in chosen:
            self._cache.hot.lease(hot)
        self._cache.writing = list(chosen)
        return self._cache.writing

    def _take_touches(self, now: float, anyway: bool) -> dict[bytes, Touch]:
        if not self._cache.touched or not (anyway or now - self._touches_written >= _TOUCH_SECONDS):
            return {}
        keys = list(self._cache.touched)[:_TOUCHES_AT_ONCE]
        if len(keys) == len(self._cache.touched):
            self._touches_written = now
        taken = {key: self._cache.touched.pop(key) for key in keys}
        self._cache.touching |= taken
        return taken

    def _write_some(self, batch: list[HotNode], touches: dict[bytes, Touch]) -> bool:
        """One round of everything that changes the disk; False if it failed."""
        gone: list[Placed] = []
        why: dict[bytes, Why] = {}
        refused: set[HotNode] = set()
        written: dict[bytes, int] = {}
        orphans: Sequence[bytes] = ()
        covered: Sequence[bytes] = ()
        failure: Exception | None = None
        stale: list[bytes] = []
        try:
            self.repair()
            self._cache.registry.put(self._disk)
            self._cache.replies.put(self._disk)
            stale = self._stale()
            if self._shrinking.is_due():
                self._pinned, self._in_use = self._cache.pins.protected(), False
                if touches and self._disk.used() > self._disk.limit:
                    self._disk.store([], touches)  # so that what was used lately may go, if all was
                    touches = {}
                shrunk = self._disk.shrink(self._may_evict, stale) or self._shrink_to_shares() or self._shrink_pinned()
                gone += shrunk
                why = {node.record.key: "smaller" for node in shrunk}
                self._shrinking.stepped(bool(shrunk), self._in_use)
            others = len(gone)
            refused = self._keep_shares(batch, touches, gone)
            why |= {node.record.key: "share" for node in gone[others:]}
            need = sum(pages(hot.size) for hot in batch if hot not in refused)
            if need and self._disk.lacks(need) > 0:
                self._disk.store([], touches)  # so that what was used lately does not go
                touches = {}
                self._pinned = self._cache.pins.protected()
                self._disk.make_room(need, self._may_evict, gone, stale)
            pending = [Pending(hot.node, self._state_of(hot)) for hot in batch if hot not in refused]
            written, orphans, covered = self._store(pending, touches, need, gone, stale)
        except (DiskFullError, DiskTroubleError) as error:
            failure = error
        except Exception as error:
            log.exception("writing to the store failed")
            failure = error
        with self._cache.lock:
            if self._evicting:
                self._cache.show(self._evicting)
            self._evicting.clear()
            self._cache.counters.evicted_warm += len(gone)
            for node in gone:
                left = node.record.key
                self._cache.evicted.add(left, node.record.hits)
                if left not in self._cache.hot.by_key:
                    reason: Why = "stale" if node.record.namespace in stale else why.get(left, "budget")
                    self._cache.removals_seen.add((left,), reason)
            self._cache.left_disk([node.record.key for node in gone], drop=False)
            if self._urgent:
                self._leave_behind(gone)
            self._cache.left_disk(covered, drop=True)
            self._cache.counters.superseded += len(covered)
            for hot in batch:
                if hot.key in written:
                    hot.warm = hot.warm or hot.indexed
                    hot.node.record.stored = written[hot.key]
                    self._cache.counters.written_nodes += 1
                    self._cache.counters.written_bytes += written[hot.key]
                if isinstance(failure, BudgetError) and not self._urgent:
                    self._cache.counters.dropped_nodes += hot.queued  # what comes along with it was dropped before
                    self._cache.queue.refuse(hot)
                if failure is None and hot not in refused:
                    self._cache.queue.remove(hot)
                self._cache.hot.release(hot)
            self._over_share = bool(refused)
            if not self._urgent:
                self._refuse(refused, self._over_share)
            for key in orphans:
                self._cache.forget_hot_subtree(key)
            self._cache.writing = []
            if failure is not None:
                self._cache.touched = {**touches, **self._cache.touched}
            self._forget_touching()
        self._cache.written()
        self._judge(failure)
        return failure is None or isinstance(failure, BudgetError)

    def _forget_touching(self) -> None:
        """Uses were written, but for what is being loaded: its record may have been read before. With the lock held."""
        cache = self._cache
        cache.touching = {
            key: touch
            for key, touch in cache.touching.items()
            if key in cache.loading and key not in cache.touched  # which has it again, or a later one
        }

    def _store(
        self, pending: list[Pending], touches: dict[bytes, Touch], need: int, gone: list[Placed], stale: list[bytes]
    ) -> Stored:
        """As `Disk.store`; where the file must not grow, with so much free in it that it need not."""
        while True:
            try:
                return self._disk.store(pending, touches)
            except GrowthError:
                if not self._disk.keep_more_free():
                    raise
                self._pinned = self._cache.pins.protected()
                self._disk.make_room(need, self._may_evict, gone, stale)

    def _state_of(self, hot: HotNode) -> Callable[[], memoryview]:
        return lambda: self._cache.state(hot, self._scratch)

    def _judge(self, failure: Exception | None) -> None:
        """Note how the disk does, and when to try again."""
        with self._cache.lock:
            if failure is None or isinstance(failure, BudgetError):
                self._backoff = _BACKOFF[0]
                self._retry_at = 0.0
                if not self._held_until:
                    self._hold = _FULL_SECONDS[0]
                    self._cache.warm_state, self._cache.warm_reason = "ok", ""
                self._cache.hot.set_keep_queued(self._cache.warm_state == "ok")
                return
            self._cache.counters.errors += 1
            self._cache.judge(failure)
            full = isinstance(failure, DiskFullError)
            state = "full" if full else "error"
            if state != self._cache.warm_state:
                log.warning("the store cannot be written, blocks stay in memory for now: %s", failure)
            self._cache.warm_state, self._cache.warm_reason = state, str(failure)
            self._retry_at = self._cache.clock() + self._backoff
            self._backoff = min(self._backoff * 2, _BACKOFF[1])
            self._cache.hot.set_keep_queued(False)
            grew = full and not self._held_until  # it was allowed to, so this is news
            if grew:
                self._look_at = self._cache.clock() + _LOOK_SECONDS
                self._held_until = self._cache.clock() + self._hold
                self._hold = min(self._hold * 2, _FULL_SECONDS[1])
        if grew:
            self._free_when_full = self._disk.free_bytes()
            # What the file has is enough for LMDB, which uses its free pages again. Not lowered by a later failure:
            # each would evict more, for nothing.
            self._disk.hold_at(self._disk.file_bytes())

    def _may_evict(self, key: bytes) -> bool:
        """Whether a node may leave the disk; if so it is hidden from now on."""
        with self._cache.lock:
            if not self._is_idle(key):
                return False
            self._cache.hide((key,))
            self._evicting.add(key)
            return True

    def _is_idle(self, key: bytes) -> bool:
        """Whether nobody needs a node on disk: no pin, no request, and nothing that is to be written below it.

        For what is pinned also that goes below which something only waits to be written.
        """
        with self._cache.lock:
            hot = self._cache.hot.by_key.get(key)
            in_use = key in self._cache.loading or key in self._cache.touched or (hot is not None and hot.leases > 0)
            below = [self._cache.hot.by_key[child.record.key] for child in self._cache.hot.table.children(key)]
            waits = any((child.queued and not self._urgent) or child in self._cache.writing for child in below)
            if key in self._pinned or key in self._kept:
                return False
            self._in_use |= in_use or waits
            return not (in_use or waits)

    def _leave_behind(self, gone: Sequence[Placed]) -> None:
        """Of what left the disk for what is pinned, nothing waits any more that is below it: it would bring it back.

        With the lock held.
        """
        cache = self._cache
        for node in gone:
            for child in list(cache.hot.table.children(node.record.key)):
                hot = cache.hot.by_key[child.record.key]
                if hot.queued:
                    cache.queue.remove(hot)
                    cache.hot.offer(hot)
                    cache.counters.dropped_nodes += 1

    def set_shares(self, models: Mapping[str, int], keys: Mapping[str, int]) -> None:
        """See `Shares.set`; what is over its share from now on shrinks to it in steps."""
        if self._shares.set(models, keys):
            self.shrink()

    def accounts(self) -> list[Account]:
        """Those that have a share of the budget."""
        with self._cache.lock:
            return self._shares.accounts(self._disk.limit, self._disk.sums, self._cache.namespaces)

    def _keep_shares(self, batch: list[HotNode], touches: dict[bytes, Touch], gone: list[Placed]) -> set[HotNode]:
        """Make room in the shares of those to whom `batch` belongs; returns what does not fit, with all below it.

        `touches` are written if one of the shares is full.
        """
        refused: set[HotNode] = set()
        for account in self.accounts() if batch else ():
            own = [hot for hot in batch if account.holds(hot.node.record)]
            excess = account.used + sum(pages(hot.size) for hot in own) - account.limit
            if not own or excess <= 0:
                continue
            self._disk.store([], touches)  # so that what was used lately does not go; again changes nothing
            self._pinned = self._cache.pins.protected()
            # a path of which much was refused before comes whole again: as of others, only so much goes for it at once
            excess = min(excess, 4 * self._disk.batch_bytes) + account.limit // _SHARE_STEP
            room = account.limit - account.used
            while excess > 0:
                before = len(gone)
                if not self._disk.evict_of(account.holds, excess, self._may_evict, gone):
                    break
                freed = sum(node.record.stored for node in gone[before:])
                room, excess = room + freed, excess - freed
            for hot in own:
                if pages(hot.size) <= room:
                    room -= pages(hot.size)
                else:
                    refused.add(hot)
        keys = {hot.key for hot in refused}
        for hot in batch:  # parents come first
            if hot.node.parent in keys:
                refused.add(hot)
                keys.add(hot.key)
        return refused

    def _refuse(self, refused: set[HotNode], over_share: bool) -> None:
        """They are not written, nor is what waits behind them: there is no room, in a share or at all.

        With the lock held.
        """
        cache = self._cache
        keys = {hot.key for hot in refused}
        gone = set(refused)
        for hot in refused:
            if hot.node.parent not in keys:
                gone |= {below for below in cache.hot.subtree(hot.key) if below.queued}
        for hot in gone:
            cache.queue.refuse(hot)
            cache.hot.offer(hot)
        cache.counters.dropped_nodes += len(gone)
        cache.counters.over_share += len(gone) if over_share else 0

    def _shrink_to_shares(self) -> list[Placed]:
        """One step towards shares that are smaller than what is there."""
        gone: list[Placed] = []
        for account in self.accounts():
            if account.used > account.limit:
                self._disk.evict_of(account.holds, account.used - account.limit, self._may_evict, gone)
                if gone:
                    break
        return gone

    def _stale(self) -> list[bytes]:
        """Namespaces of which something is stored that no model can use."""
        stored = self._disk.sums.nodes
        with self._cache.lock:
            return [key for key in self._cache.usage.stale(self._cache.namespaces) if key.hex() in stored]

    def _shrink_pinned(self) -> list[Placed]:
        """One step towards a budget that cannot be kept without what is pinned: nothing else is left, nor in use."""
        if not self._pinned or self._in_use or self._disk.used() <= self._disk.limit:
            return []
        self._pinned = self._kept = frozenset()
        gone = self._disk.shrink(self._may_evict)
        if gone and not self._cache.pins.given_up:
            log.warning(
                "pinned prefixes are evicted: without them the budget of %d MiB cannot be kept", self._disk.limit >> 20
            )
        self._cache.pins.given_up += len(gone)
        return gone

    def repair(self) -> None:
        """What is damaged, and all below it, leaves the disk. Raises DiskFullError, DiskTroubleError."""
        cache = self._cache
        with cache.lock:
            keys = list(cache.repairs)
        for key in keys:
            with self._disk.table() as table:
                node = table.place(key)
                nodes = [*table.subtree(key), *([node] if node is not None else [])]
            for at in range(0, len(nodes), FEW):  # what went is shown at once: the next part may fail
                some = nodes[at : at + FEW]
                self._disk.remove(some)
                with cache.lock:
                    gone = [node.record.key for node in some]
                    cache.show(gone)
                    cache.left_disk(gone, drop=True, hidden_before=True)
            with cache.lock:
                cache.repairs.remove(key)
                cache.show((key,))


def _mib(disk: Disk) -> int:
    return disk.sums.written.today >> 20

"""What runs next: the engine's loop.

A step is: take what came in, admit, import blocks that are ready, one decode batch for all running sequences, one
prefill call for one sequence. `submit`, `cancel`, `stop` and `figures` may be called from any thread, all else belongs
to the thread of `run`. The life of a request is in `sequence.Phase`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ..errors import BusyError, HomeprefixdError, ModelError, UnavailableError
from ..frames import Frame
from ..frames.worker import Delta, Heartbeat, Progress
from ..prefix.blocks import BLOCK_TOKENS
from .adapters import Adapters
from .admission import Queue
from .bindings import Model
from .cells import CellLedger
from .chunks import chunk_end, stop_at
from .context import MOST_OUTPUTS, Batch, Context
from .edge_saving import EdgeSaver
from .emission import last_frames
from .failures import DecodeError, failure_of
from .places import Place, Places
from .prefills import Prefills
from .replay import Replay
from .residents import Residents
from .restoring import Restorer
from .sampling import Sampler
from .saving import Saver
from .sequence import Phase, Sequence
from .shares import Shares, head_start
from .sharing import Sharer

logger = logging.getLogger(__name__)

_IDLE = 0.05  # seconds between looks at what has no wake-up of its own (patience that ends) while something waits
_RESTORE_SHARE = 0.25  # of `max_stall`: importing per step while others decode
_STEPS_OF_A_SET = 4  # of decode, before those with other adapters in the same context have their turn


@dataclass(frozen=True)
class EngineSettings:
    """Counts in tokens, times in seconds. `ctx`: what one request may use; `batch`: longest prefill call."""

    ctx: int
    parallel: int
    batch: int
    max_queue: int
    max_stall: float
    debug_logits: bool = False


class Engine:
    """Runs sequences on a model's contexts. `emit` sends a frame to the daemon; `saver`, `restorer` None: cache off.

    `replay` None: what is generated is not remembered as such.
    """

    def __init__(
        self,
        model: Model,
        places: Places,
        settings: EngineSettings,
        emit: Callable[[Frame], None],
        counters: defaultdict[str, float],
        saver: Saver | EdgeSaver | None = None,
        restorer: Restorer | None = None,
        adapters: Adapters | None = None,
        replay: Replay | None = None,
    ) -> None:
        self._model, self._places, self._settings, self._emit = model, places, settings, emit
        self._saver, self._restorer, self._replay = saver, restorer, replay
        self._adapters = adapters or Adapters()
        self.counters = counters
        self._wake = threading.Event()
        cells = CellLedger()
        self._residents = Residents(places, cells, settings.parallel, counters)
        shares = restorer is not None and restorer.shares_cells
        self._sharer = Sharer(places, cells, restorer.exact, counters) if restorer and shares else None
        self._shares = Shares()
        self._queue = Queue(restorer, self._sharer, cells, self._shares, places, self._wake.set)
        self._inbox: deque[Sequence | str] = deque()  # a new sequence, or the rid of one to cancel
        self._batch = Batch(max(settings.batch, settings.parallel))
        self._prefills = Prefills(
            settings.batch,
            settings.max_stall,
            self._shares,
            counters,
            exact=restorer is not None and restorer.exact,
            gate=restorer.gate if restorer is not None else None,
        )
        self._together: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self._steps = 0
        self._step_began = 0.0
        self._stop_at: float | None = None
        self._quit = False

    # ---- from any thread

    def check_room(self) -> None:
        """Raise BusyError if the queue is full, UnavailableError if the worker ends."""
        if self._stop_at is not None:
            raise UnavailableError("The model's worker is stopping.", retry_after=5)
        waiting = len(self._queue.waiting) + sum(1 for item in list(self._inbox) if isinstance(item, Sequence))
        if waiting >= self._settings.max_queue:
            raise BusyError(
                f"{waiting} requests are waiting already. Send it again later, or raise `model.max_queue`.",
                retry_after=self.retry_after(),
            )

    def submit(self, sequence: Sequence) -> None:
        """Queue it. Its look-up begins now, so that its blocks come while it waits."""
        sequence.urgency = head_start(sequence.request.priority)
        if self._restorer is not None:
            self._restorer.begin(sequence, self._wake.set, may_wait=True)
        self._inbox.append(sequence)
        self._wake.set()

    def cancel(self, rid: str) -> None:
        self._inbox.append(rid)
        self._wake.set()

    def stop(self, grace: float) -> None:
        """End `run` when all is done, or after `grace` seconds."""
        self._stop_at = time.perf_counter() + grace
        self._wake.set()

    def quit(self) -> None:
        """End `run` after the current step; nobody is told."""
        self._quit = True
        self._wake.set()

    def figures(self) -> Heartbeat:
        began = self._step_began
        lengths = self._residents.lengths()
        used = self._residents.used(lengths)
        return Heartbeat(
            steps=self._steps,
            step_age=time.perf_counter() - began if began else 0.0,
            running=len(lengths),
            waiting=len(self._queue.waiting),
            cells_used=used,
            cells=self._places.cells,
            counters=dict(self.counters),
            cells_shared=max(0, sum(lengths.values()) - used),
            rates=self._restorer.gate.rates() if self._restorer is not None else {},
            retry_after=self.retry_after(),
        )

    def retry_after(self) -> int:
        """Seconds after which one may be sent again that finds the queue full: then some have left it."""
        return self._shares.retry_after(1, self._settings.parallel)

    # ---- the loop

    def run(self, together: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext) -> None:
        """Until `stop` or `quit`. What is emitted within `together` may leave at its end: the daemon wakes once for it,
        not for each token of a step, which costs the threads that compute as much each time.
        """
        self._together = together
        while not self._quit:
            self._wake.clear()
            worked = self.step()
            if self._stop_at is not None:
                if not (self._residents or self._queue.waiting or self._inbox):
                    return
                if time.perf_counter() >= self._stop_at:
                    self._end_all()
                    return
            if not worked:
                self._wake.wait(_IDLE if self._residents or self._queue.waiting or self._stop_at is not None else None)

    def step(self) -> bool:
        """One step; False if there was nothing to compute."""
        self._steps += 1
        if self._inbox:
            self._take_inbox()
        self._admit()
        if not self._residents:
            return False
        self._close_holes()
        worked = restored = self._restore()
        began, native = time.perf_counter(), self._places.native_seconds
        for place in self._places.all:
            if place.running:
                self._decode(place)
                worked = True
        if self._places.native_seconds > native:
            self.counters["decode_step_seconds"] += time.perf_counter() - began
            self.counters["decode_native_seconds"] += self._places.native_seconds - native
        if restored and any(sequence.phase is Phase.RESTORING for sequence in self._residents):
            return True  # blocks are coming in: no prefill call of another, which takes longer, in between
        return self._prefill() or worked

    def _take_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Sequence):
                self._queue.waiting.append(item)
                continue
            for sequence in [*self._queue.waiting, *self._residents]:
                if sequence.request.rid == item:
                    self._finish(sequence, "cancelled")

    def _end_all(self) -> None:
        self._take_inbox()
        for sequence in [*self._residents, *self._queue.waiting]:
            self._save(sequence, tail=True)
            self._fail(sequence, UnavailableError("The daemon stopped before the reply was complete.", retry_after=5))

    # ---- admission

    def _admit(self) -> None:
        now = time.perf_counter()
        residents = self._residents
        for sequence in (*residents, *self._queue.waiting):  # what was lent is given back; who still waits lends again
            sequence.urgency = head_start(sequence.request.priority)
        most = max((sequence.urgency for sequence in self._queue.waiting), default=-math.inf)
        if residents.is_full and all(other.urgency >= most for other in residents):
            return
        for sequence in self._queue.order(now):
            if self._queue.is_behind(sequence, residents):
                continue
            place, source, count = (None, None, 0) if residents.is_full else self._queue.find_place(sequence)
            if place is None and self._displace(sequence):
                place, source, count = self._queue.find_place(sequence)
            if place is None:
                if residents.is_full or self._queue.blocks_others(sequence, now):
                    return
                continue
            if self._queue.is_outdated(sequence, now):
                return  # what room there is, or was made, is its own
            self._enter(sequence, place, now, source, count)

    def _displace(self, sequence: Sequence) -> bool:
        """Set those aside that make way for it. False: nobody does."""
        going = self._queue.make_way(sequence, self._residents)
        for other in going:
            other.displaced += 1
            self._set_aside(other)
        return bool(going)

    def _enter(self, sequence: Sequence, place: Place, now: float, source: Sequence | None, count: int) -> None:
        self._queue.waiting.remove(sequence)
        self._residents.enter(sequence, place)
        sequence.phase = Phase.RESTORING
        sequence.stalled_since = 0.0
        if not sequence.started:
            sequence.admitted = now
        with self._guard(sequence):
            if self._sharer is not None and source is not None:
                self._sharer.share(source, sequence, count)
            if sequence.sampler is None:
                sequence.sampler = Sampler(self._model, sequence.request.sampling, self._settings.ctx)
                sequence.sampler.accept_prompt(sequence.request.tokens)

    def _restore(self) -> bool:
        worked = False
        for sequence in self._residents:
            if sequence.phase is not Phase.RESTORING:
                continue
            before = sequence.n_past
            with self._guard(sequence):
                box = _RESTORE_SHARE * self._settings.max_stall if self._residents.decoding else 3600.0
                if self._restorer is None or self._restorer.step(sequence, box):
                    if self._restorer is not None and self._restorer.must_clear:
                        self._clear_around(sequence, self._restorer)
                    if not sequence.n_past:  # nothing was restored, or it was given up: what it computes is its own
                        self._residents.owns_all(sequence)
                    if self._restorer is not None:
                        self._restorer.end(sequence)
                    sequence.phase = Phase.PREFILL
                    if not sequence.started:
                        sequence.restore_done = time.perf_counter()
                    sequence.started = True
                    if sequence.restored:
                        self._progress(sequence)
                    worked = True
            worked = worked or sequence.n_past != before
        return worked

    # ---- decode

    def _decode(self, place: Place) -> None:
        """A step of all that run in a context. To switch adapters costs about half a step: so several of each set."""
        sets = dict.fromkeys(sequence.request.lora for sequence in place.running)
        for lora in sets:
            began = time.perf_counter()
            for _ in range(_STEPS_OF_A_SET if len(sets) > 1 else 1):
                running = [sequence for sequence in place.running if sequence.request.lora == lora]
                if running:
                    self._decode_together(place, running)
                if time.perf_counter() - began > self._settings.max_stall / _STEPS_OF_A_SET:
                    break

    def _decode_together(self, place: Place, running: list[Sequence]) -> None:
        """One step of these, whose adapters are the same."""
        ids = [place.local(s.seq_id) for s in running]
        self._batch.set_steps([s.tokens[-1] for s in running], [s.n_past for s in running], ids)
        began = self._step_began = time.perf_counter()
        try:
            self._adapters.use(place.context, running[0].request.lora)
            fits = place.context.decode(self._batch)
        except (DecodeError, ModelError) as error:
            for sequence in running:
                self._fail(sequence, error)
            return
        finally:
            self._step_began = 0.0
        if not fits:
            self._make_room(place)
            return
        each, ended = 0.0, list[tuple[Sequence, str]]()
        with self._together():
            for index, sequence in enumerate(running):
                sequence.n_past += 1
                try:  # as `_guard`, without its cost for each token
                    if reason := self._next_token(sequence, place.context, index):
                        ended.append((sequence, reason))
                except ConnectionError:
                    raise
                except Exception as error:
                    self._fail(sequence, error)
                if not index:  # sampling waits for the computation
                    seconds = time.perf_counter() - began
                    each = seconds / len(running)
                    self.counters["decode_seconds"] += seconds
                sequence.unsaved_cost += each
                self.counters["decode_tokens"] += 1
        for sequence, reason in ended:
            self._finish(sequence, reason)
        for sequence in running:
            if sequence.n_past % BLOCK_TOKENS == 0 and sequence.phase is Phase.DECODE:
                self._save(sequence)

    def _next_token(self, sequence: Sequence, context: Context, index: int) -> str:
        """Sample from output `index` and send the text. Why the reply ends with it; "": it goes on."""
        request, sampler, text = sequence.request, sequence.sampler, sequence.text
        if sampler is None:
            raise RuntimeError("a sequence without a sampler")
        reply = sequence.reply
        if reply is None:
            token = sampler.sample(context, index, sequence.generated)
        else:
            token = reply.sample(sampler, context, index, sequence.generated)
        if not sequence.first_token:
            sequence.first_token = time.perf_counter()
        sequence.generated += 1
        if token in self._model.eog:
            return "stop"
        sequence.tokens.append(token)
        if reply is not None:
            delta = reply.take(sequence, token)
            if delta is not None:
                self._emit(delta)
        elif new := text.feed(self._model.piece(token)):
            if request.stream:
                self._emit(Delta(rid=request.rid, text=new, tokens=sequence.generated))
            else:
                sequence.parts.append(new)
        if text.stopped is not None or (reply is not None and reply.ended):
            return "stop"
        if 0 <= request.max_tokens <= sequence.generated or len(sequence.tokens) >= self._settings.ctx:
            return "length"
        return ""

    # ---- prefill

    def _prefill(self) -> bool:
        """One call for one sequence; False if none waits for it."""
        sequence = self._prefills.choose(self._residents)
        if sequence is None:
            return False
        place = self._places.of(sequence.seq_id)
        if self._places.pos_max(sequence.seq_id) != sequence.n_past - 1:
            # llama.cpp would compute it all the same, without what is missing: a wrong answer that looks right.
            logger.error("request %s: its cells are not what they should be, it is computed anew", sequence.request.rid)
            self.counters["position_errors"] += 1
            self._residents.empty(sequence)
            sequence.forget_state()
            if not sequence.generated:
                sequence.cached = 0
                sequence.tiers.clear()
        start, total = sequence.n_past, len(sequence.tokens)
        logprobs = sequence.prompt_logprobs if sequence.must_compute else None
        most = self._prefills.longest(beside_others=self._residents.decoding)
        if logprobs is not None:
            most = min(most, MOST_OUTPUTS)
        end = stop_at(sequence.points, start, chunk_end(start, total, most))
        local = place.local(sequence.seq_id)
        self._batch.set_prompt(sequence.array()[start:end], start, local, all_logits=logprobs is not None)
        began = self._step_began = time.perf_counter()
        try:
            self._adapters.use(place.context, sequence.request.lora)
            fits = place.context.decode(self._batch)
            if fits:
                place.context.synchronize()
        except (DecodeError, ModelError) as error:
            self._fail(sequence, error)
            return True
        finally:
            self._step_began = 0.0
        if not fits:
            self._make_room(place)
            return True
        self._prefills.account(sequence, end, time.perf_counter() - began)
        with self._guard(sequence):
            if logprobs is not None:
                logprobs.take(start, place.context.all_logits(end - start))
            self._progress(sequence)
            if end == total:
                self._begin_decode(sequence, place)
        if sequence.phase is not Phase.ENDED:
            self._save(sequence)
        return True

    def _begin_decode(self, sequence: Sequence, place: Place) -> None:
        """The prompt is computed: sample from its last logits."""
        if self._settings.debug_logits and not sequence.first_token:
            sequence.logits_sha256 = hashlib.sha256(place.context.logits(-1).tobytes()).hexdigest()
        request, logprobs = sequence.request, sequence.prompt_logprobs
        if logprobs is not None and request.stream and not sequence.generated:
            self._emit(Delta(rid=request.rid, text="", tokens=0, prompt_logprobs=logprobs.told))
        if sequence.request.max_tokens == 0:
            sequence.first_token = time.perf_counter()
            self._finish(sequence, "length")
            return
        sequence.phase = Phase.DECODE
        place.running.append(sequence)
        if reason := self._next_token(sequence, place.context, -1):
            self._finish(sequence, reason)

    def _progress(self, sequence: Sequence) -> None:
        if sequence.generated:  # it was set aside: to its client this is only a pause
            return
        self._emit(
            Progress(
                rid=sequence.request.rid,
                reused=sequence.cached,
                done=min(sequence.n_past, sequence.n_prompt),
                total=sequence.n_prompt,
            )
        )

    # ---- leaving

    def _make_room(self, place: Place) -> None:
        """The cells are out: set the youngest aside. Its blocks are saved; it comes back by look-up."""
        youngest = list(place.residents.values())[-1]
        if len(place.residents) == 1:
            self._fail(youngest, UnavailableError("The context has no cells for this request. Raise `model.pool`."))
            return
        logger.info("the context is full: request %s is set aside", youngest.request.rid)
        self._set_aside(youngest)

    def _set_aside(self, sequence: Sequence) -> None:
        """Its cells are free for others; to its client this is only a pause."""
        self.counters["set_aside"] += 1
        self._save(sequence, tail=True)
        self._leave(sequence)
        sequence.forget_state()
        sequence.phase = Phase.WAITING
        self._queue.waiting.insert(0, sequence)
        if self._restorer is not None:
            self._restorer.begin(sequence, self._wake.set, may_wait=False)

    def _clear_around(self, sequence: Sequence, restorer: Restorer) -> None:
        """llama.cpp cannot forget one sequence, but all: the others of its context leave, and come back by look-up."""
        for other in list(self._places.of(sequence.seq_id).residents.values()):
            if other is not sequence:
                self._set_aside(other)
        restorer.clear(sequence.seq_id)

    def _close_holes(self) -> None:
        """Whoever is left in high cells comes back to the first ones."""
        if self._restorer is None or not self._restorer.connected or self._queue.waiting:
            return  # with others that wait, it would be one of them
        for sequence in self._residents.left_high():
            self.counters["holes_closed"] += 1
            self._set_aside(sequence)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        """Its reply ends. Whatever goes wrong here, its client is told of an end, once."""
        try:
            self._end_well(sequence, reason)
        except ConnectionError:
            raise
        except Exception as error:
            self._fail(sequence, error)

    def _end_well(self, sequence: Sequence, reason: str) -> None:
        now = time.perf_counter()
        self._save(sequence, tail=True)  # before the reply's end: the next turn may come at once
        worded = sequence.request.worded
        if self._replay is not None and worded is not None and sequence.request.cache:
            self._replay.remember(worded, sequence.request.space, sequence.tokens[sequence.n_prompt :])
        self._end(sequence)
        request = sequence.request
        self._shares.count(request.client, generated=sequence.generated, now=now)
        if sequence.admitted:
            self._shares.served(now - sequence.admitted)
        stored = sequence.saved if self._saver is not None and request.cache else 0
        for frame in last_frames(sequence, reason, now, stored):
            self._emit(frame)
        sequence.told = True

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """End one request with an error, if its client was not told of an end; nothing of it is saved."""
        if sequence.told:
            return
        sequence.told = True
        self.counters["errors"] += 1
        if not isinstance(error, HomeprefixdError | DecodeError):
            logger.exception("request %s failed", sequence.request.rid, exc_info=error)
        if sequence.phase is not Phase.ENDED:
            self._end(sequence)
        rid = sequence.request.rid
        try:
            self._emit(failure_of(rid, error))
        except ConnectionError:
            raise
        except Exception as problem:  # what it says cannot be sent
            logger.exception("request %s: its error cannot be told", rid)
            self._emit(failure_of(rid, problem))

    def _end(self, sequence: Sequence) -> None:
        if sequence in self._queue.waiting:
            self._queue.waiting.remove(sequence)
        self._leave(sequence)
        sequence.phase = Phase.ENDED
        if sequence.sampler is not None:
            sequence.sampler.close()
            sequence.sampler = None

    def _leave(self, sequence: Sequence) -> None:
        """Its cells and its place are free."""
        if self._restorer is not None:
            self._restorer.end(sequence)
        self._residents.leave(sequence)

    def _save(self, sequence: Sequence, *, tail: bool = False) -> None:
        """Cache trouble is never the request's."""
        if self._saver is None or sequence.seq_id < 0:
            return
        try:
            self._saver.save(sequence, tail=tail)
        except Exception:
            logger.exception("blocks of request %s were not saved", sequence.request.rid)
            self.counters["save_errors"] += 1
            sequence.no_save = True

    @contextlib.contextmanager
    def _guard(self, sequence: Sequence) -> Iterator[None]:
        """What goes wrong inside ends this request only. A daemon that is gone ends the worker."""
        try:
            yield
        except ConnectionError:
            raise
        except Exception as error:
            self._fail(sequence, error)

"""A record of each request: what it asked of the cache, what it got, and how long each part took.

Fed by `observed.py` with what the daemon sees of a request, read by `record_routes.py`. Holds no text of a prompt,
except in a record's explanation. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import datetime
import itertools
import re
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import msgspec

from ..clients import app_name
from ..explain.causes import EVERYBODYS, title
from ..explain.conclude import Explanation, OtherModel, conclude
from ..explain.models_seen import ModelsSeen
from ..explain.prompt import common_length
from ..frames.worker import TOO_SLOW, Account, Finished, GateDecision, Generate, Judged, Progress, SectionTokens
from .figures_file import MOST_MODELS, Day, Figures, FiguresFile, Rate

State = Literal["queued", "prefill", "decode", "finished", "left", "refused", "failed"]
"""The last four are ends: whole, given up by the client, the request's fault, ours."""

CACHED = 0.5
"""Share of a prompt that must have been reused for a request to count as warm; below, it is cold."""

_MOST_RUNNING = 4096  # requests of which it is known at a time that another model had their chat

_BLOCK = 64  # tokens; what is shorter is kept as a tail, and not counted

_WORD_BEGUN = re.compile(r"\w+$")

_MOST_JUDGED = 1024  # rules of apps of which it is known whether they still fit

_RATE_TOKENS = 32  # of prefill from which a rate is learnt: shorter calls do not show the machine's speed
_RATE_MEMORY = 0.8  # weight of what was learnt before


class Record(msgspec.Struct, omit_defaults=True):
    """One request. Times in ms unless the name says otherwise, counts in tokens; `began` is Unix time in s."""

    id: str
    app: str  # an API key's name, or what the client calls itself
    client: str  # the same with its address
    model: str
    began: float
    number: int = 0  # in the order in which they end
    state: State = "queued"
    error: str = ""
    priority: str = "normal"
    stream: bool = False
    prompt: int = 0
    reused: int = 0
    tiers: dict[str, int] = {}
    computed: int = 0
    replayed: int = 0  # of the prompt, are the very tokens that were generated before
    done: int = 0  # of the prompt, are in the context
    generated: int = 0
    load_ms: float = 0.0  # until its model was there
    queue_ms: float = 0.0  # from then on, until it had its turn
    restore_ms: float = 0.0
    prefill_ms: float = 0.0
    first_ms: float = 0.0  # from arrival to the first token, as the client saw it
    decode_ms: float = 0.0
    total_ms: float = 0.0
    saved_s: float | None = None  # computing what was reused would have taken so much longer; None: not known yet
    ended: str = ""  # why the reply ended: stop, length, ...
    stored: int | None = None  # of prompt and reply, are in the cache in whole blocks; None: not told
    not_stored: str = ""  # why not all of it
    gate: GateDecision | None = None  # how much of what the cache knew was to be restored, and why
    sections: list[SectionTokens] = []
    rules: dict[str, int] = {}  # rules that kept the prompt stable -> how often
    cause: str = ""  # why less was reused than could have been; "" where nothing was lost
    place: str = ""
    lost: int = 0  # tokens that were computed though they were known
    lost_s: float = 0.0
    explanation: Explanation | None = None
    warming: bool = False  # by hand, ahead of its need: it counts neither for the day nor for an app
    slow_rules: list[str] = []  # rules that were not applied, as their expressions took too long

    @property
    def over(self) -> bool:
        return self.state not in ("queued", "prefill", "decode")

    @property
    def warm(self) -> bool:
        return self.prompt > 0 and self.reused >= CACHED * self.prompt


class App(msgspec.Struct):
    """How one app's prompts fare, over the records that are kept."""

    app: str
    requests: int = 0
    prompt: int = 0
    reused: int = 0
    saved_s: float = 0.0
    lost_s: float = 0.0
    last: float = 0.0  # Unix time, s
    causes: dict[str, float] = {}  # cause -> seconds lost
    cause: str = ""  # the one that costs most, all its requests together
    worst: str = ""  # id of its newest record, of those with a rule that still fits if there are
    text: str = ""  # what was lost, and how much of it to that cause, in a sentence


class _Loss(msgspec.Struct):
    """What one cause has cost one app."""

    seconds: float = 0.0
    tokens: int = 0
    places: set[str] = msgspec.field(default_factory=set)
    records: list[Record] = msgspec.field(default_factory=list)  # the newest last

    def add(self, record: Record) -> None:
        """A newer one."""
        self.seconds += record.lost_s
        self.tokens += record.lost
        self.places.add(record.place)
        self.records.append(record)


class Records:
    """The last requests, and those that run. Everything runs on the event loop."""

    def __init__(
        self,
        keep: int = 500,
        sink: Callable[[Record], None] | None = None,
        clock: Callable[[], float] = time.time,
        close: Callable[[], None] = lambda: None,
        explain: bool = True,
        figures: FiguresFile | None = None,
        path_of: Callable[[str], str] = lambda model: "",
    ) -> None:
        """`keep`: records of ended requests. `sink` gets each when it has ended; `close`, which may wait for a disk, is
        called at the end. `clock`: Unix time, s. `explain` False: it is not noted which model a chat was sent to.

        `figures`: keeps the day's sums and the rates over restarts. `path_of`: the file of a model, "" if not known.
        """
        self._close = close
        self._figures = figures
        self._path_of = path_of
        kept = figures.read() if figures is not None else Figures()
        self.running: dict[str, Record] = {}
        self.recent: deque[Record] = deque(maxlen=keep)
        self.day = kept.day
        self._sink = sink
        self._clock = clock
        self._numbers = itertools.count(1)
        self._models_seen = ModelsSeen() if explain else None
        self._others: dict[str, OtherModel] = {}  # of requests that run, by id
        self._rates: dict[str, float] = {}  # prefill by model, tokens per second, as measured by this process
        self._unfit: OrderedDict[tuple[str, str, str], Record | None] = OrderedDict()  # app, rule, setting -> by whom
        self._kept_rates = kept.rates  # the same, and those of earlier processes
        self._watchers: set[asyncio.Event] = set()
        self._begin = clock()

    # ------------------------------------------------------------------------------------------------- writing

    def record(self, model: str, request: Generate) -> Record:
        """Of a request that is about to begin."""
        if self._models_seen is not None and request.messages:
            other = self._models_seen.see(model, request.salt, request.messages)
            if other is not None and len(self._others) < _MOST_RUNNING:
                self._others[request.rid] = other
        return Record(
            id=request.rid,
            app=app_name(request.client),
            client=request.client,
            model=model,
            began=self._clock(),
            priority=request.priority,
            stream=request.stream,
            not_stored="" if request.cache else "the request asked for no cache (`cache_prompt`: false)",
            warming=request.warming,
        )

    def begin(self, record: Record) -> None:
        """Its request runs from now on."""
        self.running[record.id] = record
        self.changed()

    def progress(self, record: Record, event: Progress) -> None:
        record.state = "prefill"
        record.prompt, record.reused, record.done = event.total, event.reused, event.done
        self.changed()

    def finish(self, record: Record, event: Finished, account: Account | None) -> None:
        """The reply is whole: its figures. `account`: what the worker told of the prompt, where it did."""
        timings = event.timings
        record.ended = event.reason
        record.prompt, record.done = timings.total_prompt_n, timings.total_prompt_n
        record.reused, record.computed = timings.cache_n, timings.prompt_n
        record.tiers = timings.cache_tiers
        record.generated = timings.predicted_n
        record.stored = event.stored if event.stored >= 0 else None
        if not record.not_stored and 0 <= event.stored < record.prompt - _BLOCK:
            record.not_stored = "the cache had no room or no time, or the store was away"
        record.queue_ms, record.restore_ms = timings.queue_ms, timings.restore_ms
        record.prefill_ms, record.decode_ms = timings.prompt_ms, timings.predicted_ms
        rate = self._rate(record.model, timings.prompt_n, timings.prompt_ms / 1e3)
        if rate:
            record.saved_s = max(0.0, timings.cache_n / rate - timings.restore_ms / 1e3)
        if account is not None:
            record.sections, record.replayed = account.sections, account.replayed
            record.rules = {name: times for name, times in account.rules.items() if not name.endswith(TOO_SLOW)}
            self._note(record, account.judged)
            record.slow_rules = [name.removesuffix(TOO_SLOW) for name in account.rules if name.endswith(TOO_SLOW)]
        record.gate = event.gate
        other = self._others.get(record.id)
        found = conclude(record.id, account, timings, rate, event.gate, other) if account is not None else None
        if found is not None and found.rule and found.rule not in EVERYBODYS:
            found = msgspec.structs.replace(found, app=record.app)
        record.explanation = found
        if found is not None and found.tokens_lost:
            record.cause, record.place = found.cause, found.place
            record.lost, record.lost_s = found.tokens_lost, found.seconds_lost or 0.0

    def _note(self, record: Record, judged: Iterable[Judged]) -> None:
        for one in judged:
            key = record.app, one.rule, one.setting
            self._unfit[key] = None if one.fits else record
            self._unfit.move_to_end(key)
        while len(self._unfit) > _MOST_JUDGED:
            self._unfit.popitem(last=False)

    def end(self, record: Record, state: State, error: str = "", total_ms: float = 0.0) -> None:
        """However it ended; only the first time counts."""
        if self.running.pop(record.id, None) is not record:
            return
        self._others.pop(record.id, None)
        record.number = next(self._numbers)
        record.state, record.error, record.total_ms = state, error, total_ms
        self.recent.append(record)
        if not record.warming:
            self._count(record)
        if self._figures is not None:
            self._figures.put(Figures(day=self.today(), rates=self._kept_rates))
        if self._sink is not None:
            self._sink(record)
        self.changed()

    def _count(self, record: Record) -> None:
        """It belongs to today."""
        day = self.today()
        day.requests += 1
        day.failed += record.state == "failed"
        day.prompt += record.reused + record.computed
        day.reused += record.reused
        day.generated += record.generated
        day.saved_s += record.saved_s or 0.0
        day.lost_s += record.lost_s
        day.unmeasured += bool(record.ended and record.reused and record.saved_s is None)

    def _rate(self, model: str, tokens: int, seconds: float) -> float:
        """Tokens of prefill per second, learnt from what each request had to compute; 0 while it is not known.

        Until this process has computed something it is the rate that an earlier one has measured.
        """
        known = self._rates.get(model, 0.0)
        if tokens >= _RATE_TOKENS and seconds > 0:
            now = tokens / seconds
            known = self._rates[model] = _RATE_MEMORY * known + (1 - _RATE_MEMORY) * now if known else now
            self._kept_rates.pop(model, None)
            self._kept_rates[model] = Rate(known, self._path_of(model))
            if len(self._kept_rates) > MOST_MODELS:
                del self._kept_rates[next(iter(self._kept_rates))]
        if not known and model in self._kept_rates:
            kept = self._kept_rates[model]
            known = kept.tokens_per_s if kept.path == self._path_of(model) else 0.0
        return known

    async def close(self) -> None:
        """At the daemon's end: what the sink and the file of figures still have to write is written."""
        await asyncio.to_thread(self._close)
        if self._figures is not None:
            await asyncio.to_thread(self._figures.close)

    # ------------------------------------------------------------------------------------------------- reading

    def today(self) -> Day:
        """The sums of today."""
        date = datetime.datetime.fromtimestamp(self._clock()).date().isoformat()
        if self.day.date != date:
            self.day = Day(date)
        return self.day

    def find(self, name: str) -> Record | None:
        """A record by its request's id; `last` is the one that ended last."""
        if name == "last":
            return self.recent[-1] if self.recent else None
        if name in self.running:
            return self.running[name]
        return next((record for record in reversed(self.recent) if record.id == name), None)

    def corrected(self, record: Record) -> Record | None:
        """A newer one of the same app by which a record's rule is not the right one any more; None if there is none.

        That is one whose prompt the rule does not fit, as the worker says, which tries again with each prompt what it
        has proposed; or one that has another rule for the same line, since more of the app's prompts were known then. A
        newer one without a rule proves nothing: less may have been known, as after a start.
        """
        old = record.explanation
        if old is not None and (unfit := self._unfit.get((old.app, old.rule, old.setting))) is not None:
            return unfit
        for newer in reversed(self.recent):
            new = newer.explanation
            if newer.number <= record.number or old is None:
                return None
            if new is not None and new.rule and new.app == old.app and _same_line(new, old):
                return newer if (new.rule, new.setting) != (old.rule, old.setting) else None
        return None

    def last_explained(self) -> Record | None:
        """The last one that lost something."""
        return next((record for record in reversed(self.recent) if record.cause), None)

    def newest(self, limit: int, after: int = 0) -> list[Record]:
        """Ended ones, the last first, with a number above `after`."""
        newer = (record for record in reversed(self.recent) if record.number > after)
        return list(itertools.islice(newer, limit))

    def apps(self) -> list[App]:
        """Those that asked most first."""
        apps: dict[str, App] = {}
        losses: dict[str, dict[str, _Loss]] = {}
        for record in self.recent:
            if record.warming:
                continue
            app = apps.setdefault(record.app, App(record.app))
            app.requests += 1
            app.prompt += record.reused + record.computed
            app.reused += record.reused
            app.saved_s += record.saved_s or 0.0
            app.lost_s += record.lost_s
            app.last = max(app.last, record.began)
            if record.cause:
                losses.setdefault(record.app, {}).setdefault(record.cause, _Loss()).add(record)
        for name, by_cause in losses.items():
            app = apps[name]
            app.causes = {cause: loss.seconds for cause, loss in by_cause.items()}
            app.cause = max(by_cause, key=lambda cause: (by_cause[cause].seconds, by_cause[cause].tokens))
            dearest = by_cause[app.cause]
            app.worst = self._shown(dearest.records).id
            whole, of_it = _seconds(app.lost_s), _seconds(dearest.seconds)
            what = title(app.cause, next(iter(dearest.places)) if len(dearest.places) == 1 else "")
            share = of_it if of_it != whole else "all" if dearest.seconds >= 0.95 * app.lost_s else "most"
            app.text = f"lost {whole} since {self._since()}, {share} of it to {what}"
        return sorted(apps.values(), key=lambda app: -app.requests)

    def _shown(self, records: Sequence[Record]) -> Record:
        """Of the records of one cause, the newest last, the one that tells what to do."""
        fitting = (
            record
            for record in reversed(records)
            if record.explanation is not None and record.explanation.rule and self.corrected(record) is None
        )
        return next(fitting, records[-1])

    def _since(self) -> str:
        first = self.recent[0].began if self.recent else self._begin
        return datetime.datetime.fromtimestamp(first).strftime("%H:%M")

    # ------------------------------------------------------------------------------------------------- watching

    def changed(self) -> None:
        """Wake those who watch."""
        for watcher in self._watchers:
            watcher.set()

    @contextmanager
    def watch(self) -> Iterator[asyncio.Event]:
        """An event that is set whenever something changes; whoever waits for it clears it."""
        watcher = asyncio.Event()
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)


def _same_line(one: Explanation, other: Explanation) -> bool:
    """Are both of one line of the same part: does it begin alike before the value?"""
    heads = sorted((_head(one), _head(other)), key=len)
    same = heads[1].startswith(heads[0]) if heads[0] else not heads[1]
    return same and (one.cause, one.place) == (other.cause, other.place)


def _head(explanation: Explanation) -> str:
    """What a line has before its value: `Room: ` of `Room: kitchen`, as far as whole words of it are the same."""
    head = explanation.lead.rpartition("\n")[2]
    same = explanation.after[: common_length(explanation.before, explanation.after)]
    return head or _WORD_BEGUN.sub("", same.partition("\n")[0])


def first_token_ms(records: Iterable[Record], *, warm: bool) -> float | None:
    """Median time to the first token of warm or cold requests, ms; None if there was none."""
    waits = sorted(record.first_ms for record in records if record.first_ms and record.warm == warm)
    return waits[len(waits) // 2] if waits else None


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"

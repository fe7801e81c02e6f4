"""A backend that is watched: what its requests came to and how long clients waited, for `metrics.py` and `records.py`.

It stands between the routes of all dialects and the real backend, so that each reply is counted once, as its client
sees it. Knows nothing of how figures are shown.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal

from ..errors import HomeprefixdError
from ..frames.worker import Conversion, Converted, Delta, Finished, Generate, ModelInfo, Progress
from ..models.backend import Backend, Event, Generation, KnownModel
from ..models.file_facts import FileFacts
from .records import CACHED, Record, Records

FIRST_TOKEN_BOUNDS = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
"""Seconds; a hot prefix takes tens of milliseconds, a cold one minutes."""

INTER_TOKEN_BOUNDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
"""Seconds; from a small model on a GPU to a large one on a NAS."""

Outcome = Literal["finished", "left", "refused", "failed"]


class Histogram:
    """How often a value fell below each bound, in one series."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend; what is above the last is counted too."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`; a bound belongs to the bucket below it."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Observations:
    """Sums since the daemon's start. By model, and the histograms by model and whether the prompt was cached."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, Outcome]] = Counter()
        self.prefix_tokens: Counter[tuple[str, str, str]] = Counter()  # model, outcome, tier
        self.lost_tokens: Counter[tuple[str, str]] = Counter()  # model, cause
        self.rules: Counter[tuple[str, str]] = Counter()  # model, rule
        self.slow_rules: Counter[tuple[str, str]] = Counter()  # the same
        self.first_token: dict[tuple[str, bool], Histogram] = {}  # s
        self.inter_token: dict[tuple[str, bool], Histogram] = {}  # s

    def count_prompt(self, model: str, finished: Finished) -> None:
        """Where the tokens of a reply's prompt came from."""
        timings = finished.timings
        self.prefix_tokens[model, "computed", "none"] += timings.prompt_n
        for tier, count in timings.cache_tiers.items():
            self.prefix_tokens[model, "reused", tier] += count

    def count_record(self, model: str, record: Record) -> None:
        """What was lost of a reply's prompt, and which rules kept it stable."""
        if record.cause and not record.warming:
            self.lost_tokens[model, record.cause] += record.lost
        for rule, count in record.rules.items():
            self.rules[model, rule] += count
        for rule in record.slow_rules:
            self.slow_rules[model, rule] += 1

    def wait_for_first(self, model: str, cached: bool, seconds: float) -> None:
        key = model, cached
        if key not in self.first_token:
            self.first_token[key] = Histogram(FIRST_TOKEN_BOUNDS)
        self.first_token[key].observe(seconds)

    def wait_for_next(self, model: str, cached: bool, seconds: float, tokens: int) -> None:
        """`seconds` for each of `tokens`."""
        key = model, cached
        if key not in self.inter_token:
            self.inter_token[key] = Histogram(INTER_TOKEN_BOUNDS)
        self.inter_token[key].observe(seconds, tokens)


class ObservedGeneration:
    """One request. Its prompt is "cached" if at least half of its tokens were reused."""

    def __init__(
        self,
        inner: Generation,
        model: str,
        observations: Observations,
        records: Records,
        record: Record,
        clock: Callable[[], float],
    ) -> None:
        """`clock`: seconds, monotonic."""
        self._inner = inner
        self._model = model
        self._observations = observations
        self._records = records
        self._record = record
        self._clock = clock
        self._events: AsyncIterator[Event] | None = None
        self._begun = clock()
        self._last = 0.0  # when text came last
        self._tokens = 0  # that had come by then
        self._cached = False
        self._over = False

    async def __aenter__(self) -> ObservedGeneration:
        self._records.begin(self._record)
        try:
            await self._inner.__aenter__()
        except HomeprefixdError as error:
            self._end(outcome_of(error), error.message)
            raise
        except BaseException:
            self._end("left")
            raise
        self._record.load_ms = 1e3 * getattr(self._inner, "waited", 0.0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        bug = isinstance(exc[1], Exception) and not isinstance(exc[1], ConnectionError)
        self._end("failed" if bug else "left", "an error in the daemon: see its log" if bug else "")
        await self._inner.__aexit__(*exc)

    def __aiter__(self) -> AsyncIterator[Event]:
        self._events = self._inner.__aiter__()
        return self

    async def __anext__(self) -> Event:
        if self._events is None:
            self._events = self._inner.__aiter__()
        try:
            event = await self._events.__anext__()
        except HomeprefixdError as error:
            self._end(outcome_of(error), error.message)
            raise
        if isinstance(event, Delta):
            if not event.prompt_logprobs:  # else nothing of the reply has come yet
                self._take_text(event)
        elif isinstance(event, Progress):
            self._cached = event.reused >= CACHED * event.total
            self._records.progress(self._record, event)
        elif isinstance(event, Finished):
            self._take_end(event)
        return event

    def _take_text(self, event: Delta) -> None:
        now = self._clock()
        record = self._record
        record.generated = event.tokens
        if not self._last:
            self._observations.wait_for_first(self._model, self._cached, now - self._begun)
            record.first_ms = (now - self._begun) * 1e3
            record.state = "decode"
            self._records.changed()
        elif event.tokens > self._tokens:
            new = event.tokens - self._tokens
            self._observations.wait_for_next(self._model, self._cached, (now - self._last) / new, new)
        self._last, self._tokens = now, event.tokens

    def _take_end(self, event: Finished) -> None:
        timings = event.timings
        if not self._last and timings.predicted_n:  # not streamed, or nothing but a stop string was said
            cached = timings.cache_n >= CACHED * timings.total_prompt_n
            waited = max(0.0, self._clock() - self._begun - timings.predicted_ms / 1e3)
            self._observations.wait_for_first(self._model, cached, waited)
            self._record.first_ms = waited * 1e3
        self._observations.count_prompt(self._model, event)
        self._records.finish(self._record, event, getattr(self._inner, "account", None))
        self._observations.count_record(self._model, self._record)
        self._end("left" if event.reason == "cancelled" else "finished")

    def _end(self, outcome: Outcome, error: str = "") -> None:
        if not self._over:
            self._over = True
            self._observations.requests[self._model, outcome] += 1
            self._records.end(self._record, outcome, error, (self._clock() - self._begun) * 1e3)


def outcome_of(error: HomeprefixdError) -> Outcome:
    """Was it the request's or ours?"""
    return "failed" if error.status >= 500 else "refused"


class ObservedBackend:
    """Implements `Backend` over another one."""

    def __init__(
        self,
        inner: Backend,
        observations: Observations,
        clock: Callable[[], float] = time.monotonic,
        records: Records | None = None,
    ) -> None:
        self._inner = inner
        self._observations = observations
        self._records = Records() if records is None else records
        self._clock = clock

    def models(self) -> list[ModelInfo]:
        return self._inner.models()

    def known(self) -> list[KnownModel]:
        return self._inner.known()

    async def load(self, alias: str, keep_alive: float | None = None) -> None:
        await self._inner.load(alias, keep_alive)

    async def unload(self, alias: str) -> bool:
        return await self._inner.unload(alias)

    def created(self, alias: str) -> int:
        return self._inner.created(alias)

    def resolve(self, name: str | None, *, usable: bool = True) -> str:
        return self._inner.resolve(name, usable=usable)

    async def file_facts(self, alias: str) -> FileFacts:
        return await self._inner.file_facts(alias)

    def generate(self, alias: str, request: Generate) -> ObservedGeneration:
        record = self._records.record(alias, request)
        try:
            inner = self._inner.generate(alias, request)
        except HomeprefixdError as error:
            self._observations.requests[alias, outcome_of(error)] += 1
            self._records.begin(record)
            self._records.end(record, outcome_of(error), error.message)
            raise
        return ObservedGeneration(inner, alias, self._observations, self._records, record, self._clock)

    async def convert(self, alias: str, conversion: Conversion) -> Converted:
        return await self._inner.convert(alias, conversion)

    def status(self) -> dict[str, Any]:
        return self._inner.status()

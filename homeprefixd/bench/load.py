"""Runs a plan against one target: sends each request at its time, restarts the target if wanted, keeps what it saw.

Nothing is sent that is not in the plan: no warm-up. Times in a record are seconds since the run's beginning.

A restart: the target gets SIGTERM and is started again when it has ended. Requests that arrive meanwhile, and those
that had no output yet, are sent again as soon as it is back; replies that were broken off after some output are `cut`,
neither good nor errors. A request's TTFT counts from its first attempt; `ttft_ready` counts from the moment the target
was back where that is later, so it leaves the restart's own length out, which is reported beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from .client import Client, Reply, at
from .figures import percentile
from .targets import OTHER, Memory, Target
from .workloads import Message, Plan, Session, Turn

GOOD, ERROR, CUT = "ok", "error", "cut"

_PROGRESS = 0.5  # seconds
_SAMPLE = 5.0  # seconds between looks at memory and stats


@dataclass
class Record:
    """One request, however many attempts it took."""

    app: str
    session: int
    turn: int
    planned: float  # when it was to be sent
    sent: float = 0.0  # its first attempt
    served: float = 0.0  # its last one
    attempts: int = 0
    outcome: str = ""  # GOOD, ERROR or CUT
    error: str = ""
    ttft: float | None = None
    ttft_ready: float | None = None
    total: float = 0.0  # from the first attempt to the end
    arrivals: list[float] = field(default_factory=list)  # of each event with output
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    tiers: dict[str, int] = field(default_factory=dict)  # reused tokens by tier, where told
    timings: dict[str, float] = field(default_factory=dict)  # the server's: prompt_n, prompt_ms, predicted_n, ...
    after_restart: bool = False  # served by the restarted target

    @property
    def gaps(self) -> list[float]:
        """Seconds between one event with output and the next."""
        return [later - sooner for sooner, later in pairwise(self.arrivals)]


@dataclass
class Restart:
    """When the target was asked to stop, had ended, and served again."""

    began: float
    stopped: float | None = None
    ready: float | None = None


@dataclass
class Sample:
    """A look at the target at `time`."""

    time: float
    memory: Memory | None
    stats: dict[str, Any] | None


@dataclass
class Run:
    """What one pass of a plan over one target left."""

    target: str
    kind: str
    phase: str
    plan: Plan
    records: list[Record] = field(default_factory=list)
    restart: Restart | None = None
    samples: list[Sample] = field(default_factory=list)
    elapsed: float = 0.0  # seconds until the last reply's end
    client_cpu: float = 0.0  # seconds of this process
    note: str = ""  # what else is to be known, e.g. that the target's process died


@dataclass(frozen=True)
class Snapshot:
    """For a progress line."""

    target: str
    phase: str
    elapsed: float
    duration: float
    sent: int
    running: int
    done: int
    errors: int
    ttft_p50: float | None
    ttft_p95: float | None
    state: str  # "", "stopping" or "starting"


class Load:
    """One pass. `phase` "off" asks the server to leave its cache alone; `plain`: only OpenAI's own fields are sent.

    `restart_at`: seconds after the beginning. `progress` is called twice a second.
    """

    def __init__(
        self,
        target: Target,
        plan: Plan,
        phase: str,
        *,
        restart_at: float | None = None,
        timeout: float = 300.0,
        plain: bool = False,
        progress: Callable[[Snapshot], None] = lambda _snapshot: None,
    ) -> None:
        self._target = target
        self._plan = plan
        self._phase = phase
        self._restart_at = restart_at
        self._timeout = timeout
        self._plain = plain
        self._progress = progress
        self._run = Run(target.name, target.kind, phase, plan)
        self._begin = 0.0
        self._state = ""
        self._back = asyncio.Event()  # the restart is over

    async def run(self) -> Run:
        """Until the last reply has ended. Raises UnavailableError if the target does not come back from its restart."""
        cpu = time.process_time()
        target = self._target
        async with Client(target.base, api_key=target.api_key, model=target.model, timeout=self._timeout) as client:
            if target.kind == OTHER and not client.model:
                client.model = await client.first_model()
            await self._sample()
            self._begin = time.monotonic()
            watchers = [asyncio.create_task(self._watch()), asyncio.create_task(self._sample_often())]
            try:
                async with asyncio.TaskGroup() as group:
                    for session in self._plan.sessions:
                        group.create_task(self._session(client, session))
                    if self._restart_at is not None:
                        group.create_task(self._restart(self._restart_at))
            except BaseExceptionGroup as problems:
                raise problems.exceptions[0] from problems
            finally:
                for task in watchers:
                    task.cancel()
                await asyncio.gather(*watchers, return_exceptions=True)
        self._run.elapsed = max([r.sent + r.total for r in self._run.records], default=self._now())
        await self._sample()
        self._run.client_cpu = time.process_time() - cpu
        self._run.note = target.died()
        self._run.records.sort(key=lambda record: record.sent)
        return self._run

    def _now(self) -> float:
        return time.monotonic() - self._begin

    # ------------------------------------------------------------------------------------------------ requests

    async def _session(self, client: Client, session: Session) -> None:
        messages: list[Message] = []
        when = session.start
        for number, turn in enumerate(session.turns):
            when += turn.think
            if when >= self._plan.duration:
                return
            await at(self._begin + when)
            messages.extend(turn.messages)
            record = Record(session.app, session.number, number, when)
            text = await self._request(client, record, messages, turn)
            if record.outcome == ERROR:
                return  # without the answer there is nothing to go on from
            messages.append({"role": "assistant", "content": text})
            when = record.sent + record.total

    def _body(self, messages: list[Message], turn: Turn) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": turn.max_tokens}
        if not self._plain:
            body |= {"ignore_eos": True, "cache_prompt": self._phase != "off"}
        return body

    async def _request(self, client: Client, record: Record, messages: list[Message], turn: Turn) -> str:
        """Send it until it is served; fill `record`; the reply's text."""
        record.sent = self._now()
        self._run.records.append(record)
        body = self._body(messages, turn)
        while True:
            record.attempts += 1
            record.served = self._now()
            reply = await client.send(body)
            self._note(record, reply)
            if not (reply.broken and self._away_since(record.served)):
                return reply.text
            if reply.arrivals:
                record.outcome = CUT
                return reply.text
            record.outcome = ""
            await self._back.wait()

    def _away_since(self, sent: float) -> bool:
        """Was the target away, because we restarted it, at some time since `sent`?"""
        restart = self._run.restart
        return restart is not None and (restart.ready is None or sent <= restart.ready)

    def _note(self, record: Record, reply: Reply) -> None:
        restart = self._run.restart
        record.total = reply.ended - self._begin - record.sent
        record.arrivals = [when - self._begin for when in reply.arrivals]
        record.error = reply.error or ("" if reply.arrivals else "the reply had no output")
        record.outcome = ERROR if record.error else GOOD
        record.prompt_tokens = reply.prompt_tokens
        record.cached_tokens = reply.cached_tokens
        record.output_tokens = reply.output_tokens
        timings = reply.timings
        record.tiers = {str(tier): int(count) for tier, count in (timings.get("cache_tiers") or {}).items()}
        record.timings = {name: value for name, value in timings.items() if isinstance(value, int | float)}
        if restart is not None and restart.stopped is not None and record.served >= restart.stopped:
            record.after_restart = True
        if record.arrivals:
            record.ttft = record.arrivals[0] - record.sent
            ready = restart.ready if restart is not None and record.after_restart else None
            record.ttft_ready = record.arrivals[0] - max(record.sent, ready or 0.0)

    # ------------------------------------------------------------------------------------------------- restart

    async def _restart(self, when: float) -> None:
        await at(self._begin + when)
        restart = self._run.restart = Restart(self._now())
        self._state = "stopping"
        await asyncio.to_thread(self._target.stop)
        restart.stopped = self._now()
        self._state = "starting"
        await asyncio.to_thread(self._target.start)
        restart.ready = self._now()
        self._state = ""
        self._back.set()

    # ------------------------------------------------------------------------------------------------ watching

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS)
            self._progress(self._snapshot())

    def _snapshot(self) -> Snapshot:
        records = self._run.records
        done = [record for record in records if record.outcome]
        ttfts = [record.ttft for record in done if record.ttft is not None]
        return Snapshot(
            target=self._target.name,
            phase=self._phase,
            elapsed=self._now(),
            duration=self._plan.duration,
            sent=len(records),
            running=len(records) - len(done),
            done=len(done),
            errors=sum(record.outcome == ERROR for record in done),
            ttft_p50=percentile(ttfts, 50),
            ttft_p95=percentile(ttfts, 95),
            state=self._state,
        )

    async def _sample_often(self) -> None:
        while True:
            await asyncio.sleep(_SAMPLE)
            if not self._state:
                await self._sample()

    async def _sample(self) -> None:
        now = self._now() if self._begin else 0.0
        with contextlib.suppress(Exception):  # a look that fails is a look less
            memory = await asyncio.to_thread(self._target.memory)
            stats = await asyncio.to_thread(self._target.stats)
            self._run.samples.append(Sample(now, memory, stats))

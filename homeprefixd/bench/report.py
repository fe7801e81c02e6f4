"""From records to figures: one summary per app and for all together, comparisons with their bars, one JSON document.

Definitions, so that a figure can be checked:

* TTFT: from a request's first attempt to the first event with output, at the client. Failed requests have none.
* Inter-token: from one event with output to the next of the same reply; servers that put several tokens into an event
  have fewer and longer ones. The longest of a run is its longest stall.
* Percentiles: `figures.percentile`, over the pooled values of all requests.
* Reuse: tokens of prompts that the server says were not computed, by the tokens of those prompts. A hit is a request
  that reused at least a tenth of its prompt: a few tokens of the chat template are always the same.
* Prefill and decode speed: tokens by milliseconds of the servers' own timings, summed over requests.
* Throughput: output tokens that arrived within the plan's duration, by that duration.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .figures import percentile, percentiles, ratio
from .load import CUT, ERROR, GOOD, Record, Run
from .rows import Row, at_least, at_most
from .targets import OURS, PEER
from .workloads import HOUSEHOLD

ALL = "all"
FIRST_AFTER_RESTART = 20  # requests
HIT = 0.1  # of a prompt's tokens

_SERVER_TIMES = ("queue_ms", "restore_ms", "prompt_ms")

P95_BAR, P50_BAR, THROUGHPUT_BAR, RESTART_BAR = 0.5, 1.0, 1.0, 0.1
"""Ours divided by llama-server's, for the household from cold."""


@dataclass(frozen=True)
class Summary:
    """Figures of some requests. Times in seconds, rates in tokens per second, shares from 0 to 1."""

    requests: int
    ok: int
    errors: int
    cut: int  # broken off by our restart
    ttft: dict[str, float | None]
    gap: dict[str, float | None]
    total: dict[str, float | None]
    prompt_tokens: int
    cached_tokens: int
    tiers: dict[str, int]
    reuse: float | None
    hits: int
    hit_rate: float | None
    output_tokens: int
    output_rate: float
    prefill_rate: float | None
    decode_rate: float | None
    server: dict[str, dict[str, float | None]]  # percentiles of the server's own timings, in ms


def summarize(records: Sequence[Record], duration: float) -> Summary:
    """Figures of `records`, of a run whose plan is `duration` seconds long."""
    outcomes = Counter(record.outcome for record in records)
    served = [record for record in records if record.outcome in (GOOD, CUT)]
    answered = [record for record in records if record.prompt_tokens]
    prompt = sum(record.prompt_tokens for record in answered)
    cached = sum(record.cached_tokens for record in answered)
    hits = sum(record.cached_tokens >= HIT * record.prompt_tokens for record in answered)
    tiers: Counter[str] = Counter()
    for record in answered:
        tiers.update(record.tiers)
    return Summary(
        requests=len(records),
        ok=outcomes[GOOD],
        errors=outcomes[ERROR],
        cut=outcomes[CUT],
        ttft=percentiles([record.ttft for record in served if record.ttft is not None]),
        gap=percentiles([gap for record in served for gap in record.gaps]),
        total=percentiles([record.total for record in records if record.outcome == GOOD]),
        prompt_tokens=prompt,
        cached_tokens=cached,
        tiers=dict(tiers),
        reuse=ratio(cached, prompt),
        hits=hits,
        hit_rate=ratio(hits, len(answered)),
        output_tokens=sum(record.output_tokens for record in records),
        output_rate=sum(_within(record, duration) for record in records) / duration,
        prefill_rate=_rate(records, "prompt_n", "prompt_ms"),
        decode_rate=_rate(records, "predicted_n", "predicted_ms"),
        server={name: percentiles(_told(records, name)) for name in _SERVER_TIMES if _told(records, name)},
    )


def _within(record: Record, duration: float) -> float:
    """Output tokens that came before the plan's end, where each event holds the same share of them."""
    if not record.arrivals:
        return 0.0
    return record.output_tokens * sum(when < duration for when in record.arrivals) / len(record.arrivals)


def _told(records: Iterable[Record], name: str) -> list[float]:
    return [record.timings[name] for record in records if name in record.timings]


def _rate(records: Iterable[Record], count: str, milliseconds: str) -> float | None:
    told = [record.timings for record in records if record.timings.get(milliseconds)]
    spent = sum(timings[milliseconds] for timings in told)
    return ratio(1000.0 * sum(timings.get(count, 0) for timings in told), spent)


def by_app(run: Run) -> dict[str, Summary]:
    """ALL first, then each app of the plan."""
    duration = run.plan.duration
    summaries = {ALL: summarize(run.records, duration)}
    for app in run.plan.apps:
        summaries[app] = summarize([record for record in run.records if record.app == app], duration)
    return summaries


def errors(run: Run) -> dict[str, int]:
    """Message -> how often, the most frequent first."""
    return dict(Counter(record.error for record in run.records if record.outcome == ERROR).most_common())


def error_share(run: Run) -> float:
    """Failed requests by all; 1 for a run without any."""
    return sum(record.outcome == ERROR for record in run.records) / len(run.records) if run.records else 1.0


def after_restart(run: Run) -> list[Record]:
    """The first requests, by arrival, that the restarted target served."""
    served = [record for record in run.records if record.after_restart]
    return sorted(served, key=lambda record: record.sent)[:FIRST_AFTER_RESTART]


def restart_figures(run: Run) -> dict[str, Any] | None:
    """How long it was away, and how the first requests after it fared; None where there was none."""
    restart = run.restart
    if restart is None or restart.stopped is None or restart.ready is None:
        return None
    first = after_restart(run)
    return {
        "at": restart.began,
        "stop": restart.stopped - restart.began,
        "start": restart.ready - restart.stopped,
        "requests": len(first),
        "ttft": percentiles([record.ttft for record in first if record.ttft is not None]),
        "ttft_ready": percentiles([record.ttft_ready for record in first if record.ttft_ready is not None]),
        "reuse": ratio(sum(r.cached_tokens for r in first), sum(r.prompt_tokens for r in first)),
    }


def memory_figures(run: Run) -> dict[str, Any]:
    """Peaks over the run, in bytes and cells; None where not known."""
    memory = [sample.memory for sample in run.samples if sample.memory is not None]
    cells = [_cells(sample.stats) for sample in run.samples if sample.stats]
    return {
        "peak_pss": max((one.pss for one in memory), default=None),
        "peak_rss": max((one.rss for one in memory), default=None),
        "peak_cells": max((used for used, _ in cells), default=None),
        "cells": max((all_ for _, all_ in cells), default=None),
        "kv_bytes_per_token": max((_kv_bytes(sample.stats) for sample in run.samples if sample.stats), default=None),
        "hot_bytes": _last(run, "hot", "bytes"),
        "warm_bytes": _last(run, "warm", "bytes"),
    }


def _workers(stats: dict[str, Any] | None) -> list[dict[str, Any]]:
    found = ((stats or {}).get("daemon") or {}).get("workers") or []
    return [worker for worker in found if isinstance(worker, dict)]


def _cells(stats: dict[str, Any] | None) -> tuple[int, int]:
    workers = _workers(stats)
    return sum(int(w.get("cells_used") or 0) for w in workers), sum(int(w.get("cells") or 0) for w in workers)


def _kv_bytes(stats: dict[str, Any] | None) -> float:
    return max((float(w.get("kv_bytes_per_token") or 0) for w in _workers(stats)), default=0.0)


def _last(run: Run, tier: str, name: str) -> int | None:
    for sample in reversed(run.samples):
        if sample.stats and isinstance(sample.stats.get(tier), dict):
            value = sample.stats[tier].get(name)
            return None if value is None else int(value)
    return None


def counters(run: Run) -> dict[str, float]:
    """What the store's counters grew by during the run; {} where it has none."""
    looks = [sample.stats for sample in run.samples if sample.stats is not None]
    return _grown((stats.get("store_id"), stats.get("counters")) for stats in looks)


def engine_counters(run: Run) -> dict[str, float]:
    """The same of all workers together: what was computed, shared, set aside, and so on."""
    looks: dict[object, list[tuple[object, object]]] = {}  # by model
    for sample in run.samples:
        for worker in _workers(sample.stats):
            looks.setdefault(worker.get("alias"), []).append((worker.get("pid"), worker.get("counters")))
    together: defaultdict[str, float] = defaultdict(float)
    for of_model in looks.values():
        for name, value in _grown(of_model).items():
            together[name] += value
    return dict(together)


def _grown(looks: Iterable[tuple[object, object]]) -> dict[str, float]:
    """What the counters of a process grew by: of each look, which process it was, and its counters.

    One that was started again counts from zero: what it had counted after the last look before is not seen.
    """
    grown: dict[str, float] = {}
    process: object = None
    before: dict[str, float] = {}
    for which, now in looks:
        if not isinstance(now, dict):
            continue
        if which != process:
            before = {} if process is not None else now
        process = which
        for name, value in now.items():
            if isinstance(value, int | float):
                grown[name] = grown.get(name, 0) + value - before.get(name, 0)
        before = now
    return grown


def evictions(run: Run) -> dict[str, int] | None:
    """Nodes that were evicted, by tier; None where not known."""
    grown = counters(run)
    found = {name.removeprefix("evicted_"): int(n) for name, n in grown.items() if name.startswith("evicted_")}
    return found or None


# ------------------------------------------------------------------------------------------------------ comparison


def compare(runs: Sequence[Run]) -> list[Row]:
    """Ours beside llama-server's, phase by phase. Bars are for the household from cold; other rows only tell."""
    rows: list[Row] = []
    theirs = {run.phase: run for run in runs if run.kind == PEER}
    for run in runs:
        if run.kind == OURS and run.phase in theirs:
            rows += _pair(run, theirs[run.phase])
    return rows


def _pair(ours: Run, theirs: Run) -> list[Row]:
    judged = ours.plan.workload == HOUSEHOLD and ours.phase == "cold"
    one, other = summarize(ours.records, ours.plan.duration), summarize(theirs.records, theirs.plan.duration)
    failed = f"; {one.errors} and {other.errors} errors" if one.errors or other.errors else ""
    rows = []
    for name, bar in (("p95", P95_BAR), ("p50", P50_BAR)):
        note = f"{_seconds(one.ttft[name])} and {_seconds(other.ttft[name])}{failed}"
        times = ratio(one.ttft[name], other.ttft[name])
        rows.append(at_most(f"{ours.phase}: TTFT {name} / llama-server's", times, bar if judged else None, note))
    note = f"{one.output_rate:.2f} and {other.output_rate:.2f} tokens/s{failed}"
    speed = ratio(one.output_rate, other.output_rate)
    least = THROUGHPUT_BAR if judged else None
    rows.append(at_least(f"{ours.phase}: throughput / llama-server's", speed, least, note))
    first, second = restart_figures(ours), restart_figures(theirs)
    if first and second:
        for key, since, limit in (
            ("ttft_ready", "counted from when it is back", RESTART_BAR if judged else None),
            ("ttft", "counted from the first attempt", None),
        ):
            p95, their_p95 = first[key]["p95"], second[key]["p95"]
            note = f"{_seconds(p95)} and {_seconds(their_p95)}, {since}; {first['requests']} and {second['requests']}"
            what = f"{ours.phase}: TTFT p95 of the first {FIRST_AFTER_RESTART} after the restart / llama-server's"
            rows.append(at_most(what, ratio(p95, their_p95), limit, f"{note} requests"))
    return rows


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"


# -------------------------------------------------------------------------------------------------------- document


def as_document(runs: Sequence[Run], rows: Sequence[Row], machine: dict[str, Any]) -> dict[str, Any]:
    """Everything, as JSON has it. `machine` says where it was measured."""
    plan = runs[0].plan if runs else None
    shown = {}
    if plan is not None:
        shown = {
            "name": plan.workload,
            "seed": plan.seed,
            "scale": plan.scale,
            "rate": plan.rate,
            "duration": plan.duration,
            "sessions": len(plan.sessions),
            "digest": plan.digest(),
        }
    return {
        "format": 1,
        "workload": shown,
        "machine": machine,
        "runs": [_run(run) for run in runs],
        "comparison": [asdict(row) for row in rows],
    }


def _run(run: Run) -> dict[str, Any]:
    late = [record.sent - record.planned for record in run.records]
    return {
        "target": run.target,
        "kind": run.kind,
        "phase": run.phase,
        "elapsed": run.elapsed,
        "note": run.note,
        "summaries": {name: asdict(summary) for name, summary in by_app(run).items()},
        "errors": errors(run),
        "restart": restart_figures(run),
        "memory": memory_figures(run),
        "evictions": evictions(run),
        "counters": counters(run),
        "engine": engine_counters(run),
        "client": {"cpu_share": ratio(run.client_cpu, run.elapsed), "late_p99": percentile(late, 99)},
        "samples": [
            {
                "time": sample.time,
                "pss": sample.memory.pss if sample.memory else None,
                "cells_used": _cells(sample.stats)[0] if sample.stats else None,
            }
            for sample in run.samples
        ],
        "requests": [_request(record) for record in run.records],
    }


def _request(record: Record) -> dict[str, Any]:
    shown = asdict(record)
    shown.pop("arrivals")
    return {**shown, "events": len(record.arrivals), "longest_gap": max(record.gaps, default=None)}

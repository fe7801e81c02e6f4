"""`GET /metrics` for Prometheus: everything is read when it is asked for, nothing is kept here.

Sources: what the API has observed (`observed.py`), the workers' last heartbeats, the store's figures. A figure that a
source does not give is left out, so that the page lives while the store or a model is away. Names: base units,
`_total` for what only grows. Counters of a worker or of the store begin again with its process, as Prometheus expects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from .. import __version__
from ..explain.causes import REMOVALS
from .keys import BACKEND, OBSERVATIONS
from .observed import Histogram, Observations
from .operation import PLAIN, Operation, both
from .store_figures import store_figures

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "homeprefixd_"


@dataclass(frozen=True)
class Figure:
    """One series of a metric that a source gives: where it stands there, and its own label's value."""

    name: str  # without PREFIX
    path: str  # dotted
    help: str
    label: tuple[str, str] | None = None

    @property
    def counter(self) -> bool:
        return self.name.endswith("_total")

    def value(self, source: Mapping[str, Any]) -> float | None:
        """None if the source does not give it."""
        found: Any = source
        for step in self.path.split("."):
            found = found.get(step) if isinstance(found, Mapping) else None
        return float(found) if isinstance(found, int | float) else None


def _by(label: str, name: str, text: str, places: Mapping[str, str]) -> list[Figure]:
    """The same figure in several places: label's value -> path."""
    return [Figure(name, path, text, (label, value)) for value, path in places.items()]


def _tiers(name: str, text: str, hot: str, warm: str) -> list[Figure]:
    return _by("tier", name, text, {"hot": hot, "warm": warm})


WORKER: tuple[Figure, ...] = (
    Figure("requests_running", "running", "Requests that are being computed."),
    Figure("requests_waiting", "waiting", "Requests that wait for their turn."),
    Figure("kv_cells", "cells", "Cells of the context: tokens whose KV state it can hold."),
    Figure("kv_cells_used", "cells_used", "Cells of the context that hold KV state."),
    Figure("kv_cells_shared", "cells_shared", "Cells that were not needed because sequences share a prefix."),
    Figure("prefill_tokens_total", "counters.prefill_tokens", "Prompt tokens computed."),
    Figure("prefill_seconds_total", "counters.prefill_seconds", "Time spent computing prompts."),
    Figure("decode_tokens_total", "counters.decode_tokens", "Tokens generated."),
    Figure("decode_seconds_total", "counters.decode_seconds", "Time spent generating tokens."),
    Figure("decode_steps_seconds_total", "counters.decode_step_seconds", "Time of the engine's steps that generated."),
    Figure("decode_native_seconds_total", "counters.decode_native_seconds", "Of those steps: time within llama.cpp."),
    Figure("restored_tokens_total", "counters.restore_tokens", "Tokens whose KV state was restored from the cache."),
    Figure("restore_seconds_total", "counters.restore_seconds", "Time spent restoring KV state."),
    Figure("gate_computed_tokens_total", "counters.gate_computed", "Tokens computed though stored: that was faster."),
    Figure("replayed_tokens_total", "counters.replay_tokens", "Prompt tokens that are the very ones generated before."),
    Figure("saved_tokens_total", "counters.save_tokens", "Tokens whose KV state was handed to the cache."),
    Figure("save_seconds_total", "counters.save_seconds", "Time spent handing KV state to the cache."),
    Figure("shared_tokens_total", "counters.shared_tokens", "Tokens whose cells another sequence had computed."),
    Figure("set_aside_total", "counters.set_aside", "Requests set aside because the context was full."),
    *_by(
        "kind",
        "worker_errors_total",
        "What went wrong in a worker and was made good by computing, by kind.",
        {
            "step": "counters.errors",
            "integrity": "counters.integrity_errors",
            "position": "counters.position_errors",
            "restore": "counters.restore_errors",
            "restore_lost": "counters.restore_lost",
            "save": "counters.save_errors",
        },
    ),
    Figure("worker_restarts_total", "restarts", "Starts of the model's worker after the first."),
)
"""Of one worker (`WorkerLink.status`); each has the label `model`."""

STORE: tuple[Figure, ...] = (
    *_tiers("cache_bytes", "Bytes in use.", "hot.bytes", "warm.bytes"),
    *_tiers("cache_limit_bytes", "Bytes that may be used.", "hot.limit", "warm.limit"),
    *_tiers("cache_entries", "Blocks held.", "hot.nodes", "warm.nodes"),
    Figure("cache_hot_allowance_bytes", "hot.allowance", "RAM that may be used now: less while memory is short."),
    Figure("cache_pins", "pins.count", "Prefixes that are pinned."),
    Figure("cache_read_bytes_per_second", "read_rate", "KV state that one reader brings from disk, as measured."),
    Figure("cache_leased_entries", "hot.leased", "Blocks in RAM that are in use by a worker now."),
    *_by(
        "form",
        "cache_payload_bytes",
        "KV state on disk, as it is stored and as it was before compression.",
        {"stored": "counters.stored_bytes", "raw": "counters.raw_bytes"},
    ),
    *_tiers(
        "cache_matched_tokens_total",
        "Tokens found by look-ups, by the tier they lay in.",
        "counters.tokens_matched_hot",
        "counters.tokens_matched_warm",
    ),
    *_tiers("cache_evictions_total", "Blocks evicted.", "counters.evicted_hot", "counters.evicted_warm"),
    *_by(
        "reason",
        "cache_removed_entries_total",
        "Blocks that are in no tier any more, by why.",
        {why: f"removed.{why}" for why in REMOVALS},
    ),
    Figure("cache_remembered_replies", "replies.rows", "Prompts whose replies are known token for token."),
    Figure("cache_purged_entries_total", "counters.purged", "Blocks removed because somebody asked for it."),
    Figure("cache_superseded_entries_total", "counters.superseded", "Blocks removed because a longer one covers them."),
    Figure("cache_saved_entries_total", "counters.saved_nodes", "Blocks taken from workers."),
    Figure("cache_saved_bytes_total", "counters.saved_bytes", "KV state taken from workers."),
    Figure("cache_written_entries_total", "counters.written_nodes", "Blocks written to disk."),
    Figure("cache_written_bytes_total", "counters.written_bytes", "Bytes written to disk, as stored."),
    Figure("cache_dropped_entries_total", "counters.dropped_nodes", "Blocks not written: no room in queue or budget."),
    Figure("cache_over_share_entries_total", "counters.over_share", "Of these: a model's or key's share was full."),
    Figure("cache_verified_timestamp_seconds", "scrub.last", "When the store had checked all that it holds; 0: never."),
    Figure("cache_loaded_entries_total", "counters.loaded_nodes", "Blocks read from disk."),
    Figure("cache_loaded_bytes_total", "counters.loaded_bytes", "KV state read from disk."),
    Figure("cache_load_seconds_total", "counters.restore_seconds", "Time spent reading from disk, over all threads."),
    Figure("cache_write_queue_entries", "queue.nodes", "Blocks that wait to be written."),
    Figure("cache_write_queue_bytes", "queue.bytes", "Bytes that wait to be written."),
    Figure("cache_write_queue_limit_bytes", "queue.limit", "Bytes that may wait to be written."),
    *_by(
        "kind",
        "cache_errors_total",
        "Blocks that the cache could not give or keep, and failures of the disk, by kind.",
        {
            "disk": "counters.errors",
            "damaged": "counters.damaged",
            "lost": "counters.lost",
            "no_room": "counters.no_room",
            "refused": "counters.refused_nodes",
        },
    ),
    Figure("store_uptime_seconds", "uptime_s", "Time since the store's process started."),
    Figure("store_restarts_total", "restarts", "Starts of the store after the first."),
)
"""Of the store (`GET /cache/stats`)."""


def with_zeros(worker: Mapping[str, Any]) -> Mapping[str, Any]:
    """A worker that has told its counters leaves out those that are still 0."""
    counters = worker.get("counters")
    if not counters:
        return worker
    names = [figure.path.removeprefix("counters.") for figure in WORKER if figure.path.startswith("counters.")]
    return {**worker, "counters": {**dict.fromkeys(names, 0.0), **counters}}


class Scrape:
    """One answer: a custom collector over what the sources say now. `stats`: None while the store is away."""

    def __init__(self, observations: Observations, status: Mapping[str, Any], stats: Mapping[str, Any] | None) -> None:
        self._observations = observations
        self._workers: list[Mapping[str, Any]] = list(status.get("workers", []))
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        from prometheus_client.metrics_core import GaugeMetricFamily

        yield self._info()
        yield from self._observed()
        loaded = [worker.get("state") == "ok" for worker in self._workers]
        yield GaugeMetricFamily(PREFIX + "models_loaded", "Models that serve requests now.", value=sum(loaded))
        state = GaugeMetricFamily(PREFIX + "model_loaded", "Whether the model serves requests now.", labels=["model"])
        for worker, is_loaded in zip(self._workers, loaded, strict=True):
            state.add_metric([str(worker["alias"])], float(is_loaded))
        yield state
        workers = [(("model", str(worker["alias"])), with_zeros(worker)) for worker in self._workers]
        yield from _families(WORKER, workers)
        up = self._stats is not None
        yield GaugeMetricFamily(PREFIX + "store_up", "Whether the cache's store answers.", value=float(up))
        if self._stats is not None:
            yield from _families(STORE, [(None, self._stats)])
            yield from self._lookups(self._stats)

    @staticmethod
    def _info() -> Metric:
        from prometheus_client.metrics_core import InfoMetricFamily

        return InfoMetricFamily(PREFIX + "build", "What runs here.", value={"version": __version__})

    def _observed(self) -> Iterator[Metric]:
        seen = self._observations
        yield _counter(
            "requests_total",
            "Requests, by how they ended: finished, left by the client, refused (4xx), failed (5xx).",
            ("model", "outcome"),
            seen.requests.items(),
        )
        yield _counter(
            "prefix_tokens_total",
            "Tokens of the prompts of finished requests: reused, and from which tier, or computed.",
            ("model", "outcome", "tier"),
            seen.prefix_tokens.items(),
        )
        yield _counter(
            "lost_tokens_total",
            "Prompt tokens that were computed though most of them had been known, by why they were not reused.",
            ("model", "cause"),
            seen.lost_tokens.items(),
        )
        yield _counter(
            "stable_rules_total",
            "How often rules that keep prompts stable were applied.",
            ("model", "rule"),
            seen.rules.items(),
        )
        yield _counter(
            "stable_rules_too_slow_total",
            "Requests to which such a rule was not applied, as its regular expression took too long.",
            ("model", "rule"),
            seen.slow_rules.items(),
        )
        cached = "cached: at least half of the prompt was reused."
        yield _histogram(
            "time_to_first_token_seconds", f"From a request's arrival to its first token; {cached}", seen.first_token
        )
        yield _histogram("inter_token_seconds", f"Between two tokens of a streamed reply; {cached}", seen.inter_token)

    @staticmethod
    def _lookups(stats: Mapping[str, Any]) -> Iterator[Metric]:
        from prometheus_client.metrics_core import CounterMetricFamily

        counters = stats.get("counters", {})
        if "lookups" not in counters or "hits" not in counters:
            return
        family = CounterMetricFamily(
            PREFIX + "cache_lookups_total", "Look-ups, by whether anything was found.", labels=["outcome"]
        )
        family.add_metric(["hit"], counters["hits"])
        family.add_metric(["miss"], counters["lookups"] - counters["hits"])
        yield family


def _families(
    figures: Iterable[Figure], sources: Sequence[tuple[tuple[str, str] | None, Mapping[str, Any]]]
) -> Iterator[Metric]:
    """Figures of one kind of source, each with its source's label; what no source gives is left out."""
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for figure in figures:
        for own, source in sources:
            value = figure.value(source)
            if value is None:
                continue
            labels = dict(filter(None, (own, figure.label)))
            if figure.name not in families:
                kind = CounterMetricFamily if figure.counter else GaugeMetricFamily
                families[figure.name] = kind(PREFIX + figure.name, figure.help, labels=list(labels))
            families[figure.name].add_metric(list(labels.values()), value)
    yield from families.values()


def _counter(name: str, text: str, labels: tuple[str, ...], counts: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    """A family with one series for each of `counts`: the values of `labels`, and the count."""
    from prometheus_client.metrics_core import CounterMetricFamily

    family = CounterMetricFamily(PREFIX + name, text, labels=list(labels))
    for values, count in sorted(counts):
        family.add_metric(list(values), count)
    return family


def _histogram(name: str, text: str, series: Mapping[tuple[str, bool], Histogram]) -> Metric:
    from prometheus_client.metrics_core import HistogramMetricFamily

    family = HistogramMetricFamily(PREFIX + name, text, labels=["model", "cached"])
    for (model, cached), histogram in sorted(series.items()):
        below, buckets = 0, []
        for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
            below += count
            buckets.append((str(bound), float(below)))
        family.add_metric([model, "yes" if cached else "no"], buckets, histogram.sum)
    return family


def exposition(scrape: Scrape) -> bytes:
    """In Prometheus' text format. The library is loaded with the first scrape: most daemons are never asked."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(scrape)
    return generate_latest(registry)


async def metrics(request: web.Request) -> web.Response:
    """`GET /metrics`."""
    stats = await store_figures(request.app)
    scrape = Scrape(request.app[OBSERVATIONS], request.app[BACKEND].status(), stats)
    return web.Response(body=exposition(scrape), headers={"Content-Type": CONTENT_TYPE})


def routes() -> list[web.RouteDef]:
    return [web.get("/metrics", metrics), web.get("/v1/metrics", metrics)]


OPERATIONS = (*both(Operation("GET", "/metrics", "For Prometheus", media=PLAIN)),)

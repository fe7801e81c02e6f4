"""`/metrics`: what it counts, its names, and who may read it."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from aiohttp.test_utils import TestClient
from prometheus_client.parser import text_string_to_metric_families
from scripted_backend import TIMINGS, MemoryAdmin, ScriptedBackend

from homeprefixd.api.metrics import STORE, WORKER
from homeprefixd.api.observed import FIRST_TOKEN_BOUNDS, Histogram, Observations, ObservedBackend
from homeprefixd.errors import BusyError, UnavailableError, WorkerDiedError
from homeprefixd.frames.worker import Accepted, Delta, Finished, Generate, Progress, Sampling

CHAT = {"messages": [{"role": "user", "content": "x"}]}
WORKER_STATUS: dict[str, Any] = {
    "alias": "demo",
    "state": "ok",
    "restarts": 2,
    "running": 1,
    "waiting": 3,
    "cells": 4096,
    "cells_used": 512,
    "counters": {"prefill_tokens": 2200.0, "prefill_seconds": 9.5, "restore_errors": 1.0, "errors": 0.0},
}
STATS: dict[str, Any] = {
    "uptime_s": 12.5,
    "restarts": 1,
    "hot": {"bytes": 1000, "limit": 2000, "nodes": 3, "leased": 1},
    "warm": {"bytes": 5000, "limit": 9000, "nodes": 7, "state": "ok", "reason": ""},
    "queue": {"nodes": 1, "bytes": 10, "limit": 100},
    "counters": {"lookups": 10, "hits": 7, "evicted_hot": 4, "evicted_warm": 5, "written_bytes": 123, "damaged": 6},
}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def scrape(client: TestClient, path: str = "/metrics") -> tuple[str, Samples]:
    """The page, and its samples by name and labels."""
    reply = await client.get(path)
    assert reply.status == 200
    assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    text = await reply.text()
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in samples
            samples[key] = sample.value
    return text, samples


def of(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"homeprefixd_{name}", frozenset(labels.items())]


async def test_requests_are_counted_as_their_clients_saw_them(client: TestClient, backend: ScriptedBackend) -> None:
    backend.script[2:2] = [lambda: asyncio.sleep(0.06)]
    backend.script[4:4] = [lambda: asyncio.sleep(0.03)]
    for body in (CHAT, {**CHAT, "stream": True}):
        await (await client.post("/v1/chat/completions", json=body)).read()
    _text, samples = await scrape(client)
    assert of(samples, "requests_total", model="demo", outcome="finished") == 2
    assert of(samples, "prefix_tokens_total", model="demo", outcome="computed", tier="none") == 2 * TIMINGS.prompt_n
    assert of(samples, "prefix_tokens_total", model="demo", outcome="reused", tier="hot") == 2 * TIMINGS.cache_n
    first = {"model": "demo", "cached": "yes"}  # 64 of 100 tokens were
    assert of(samples, "time_to_first_token_seconds_count", **first) == 2
    assert 0.06 < of(samples, "time_to_first_token_seconds_sum", **first) < 1
    assert of(samples, "time_to_first_token_seconds_bucket", **first, le="+Inf") == 2
    assert of(samples, "inter_token_seconds_count", **first) == 2  # of the stream's three tokens
    assert 0.03 < of(samples, "inter_token_seconds_sum", **first) < 1


async def test_outcomes(client: TestClient, backend: ScriptedBackend) -> None:
    backend.script = [Accepted("", 100), WorkerDiedError("it died")]
    assert (await client.post("/v1/chat/completions", json=CHAT)).status == 503
    backend.script = [Accepted("", 100), RuntimeError("a bug")]
    assert (await client.post("/v1/chat/completions", json=CHAT)).status == 500
    backend.refusal = BusyError("full", retry_after=1)
    assert (await client.post("/v1/chat/completions", json=CHAT)).status == 429
    backend.refusal = None
    backend.script = [Accepted("", 100), asyncio.Event().wait]  # type: ignore[list-item]
    task = asyncio.create_task(client.post("/v1/chat/completions", json={**CHAT, "stream": True}))
    reply = await task
    reply.close()
    async with asyncio.timeout(5):
        await backend.generations[-1].left.wait()
    _text, samples = await scrape(client)
    for outcome, count in (("failed", 2), ("refused", 1), ("left", 1)):
        assert of(samples, "requests_total", model="demo", outcome=outcome) == count
    assert ("homeprefixd_requests_total", frozenset({("model", "demo"), ("outcome", "finished")})) not in samples
    assert not [name for name, _ in samples if "first_token" in name]


async def test_workers_and_the_store(client: TestClient, backend: ScriptedBackend, admin: MemoryAdmin) -> None:
    backend.state["workers"] = [WORKER_STATUS, {"alias": "other", "state": "loading", "restarts": 0, "counters": {}}]
    admin.figures = STATS
    _text, samples = await scrape(client)
    assert of(samples, "models_loaded") == 1
    assert of(samples, "model_loaded", model="demo") == 1
    assert of(samples, "model_loaded", model="other") == 0
    assert of(samples, "kv_cells", model="demo") == 4096
    assert of(samples, "kv_cells_used", model="demo") == 512
    assert of(samples, "requests_waiting", model="demo") == 3
    assert of(samples, "prefill_tokens_total", model="demo") == 2200
    assert of(samples, "prefill_seconds_total", model="demo") == 9.5
    assert of(samples, "worker_errors_total", model="demo", kind="restore") == 1
    assert of(samples, "worker_errors_total", model="demo", kind="save") == 0  # not told: none yet
    assert ("homeprefixd_prefill_tokens_total", frozenset({("model", "other")})) not in samples
    assert of(samples, "worker_restarts_total", model="demo") == 2
    assert of(samples, "store_up") == 1
    assert of(samples, "cache_lookups_total", outcome="hit") == 7
    assert of(samples, "cache_lookups_total", outcome="miss") == 3
    assert of(samples, "cache_bytes", tier="warm") == 5000
    assert of(samples, "cache_limit_bytes", tier="hot") == 2000
    assert of(samples, "cache_entries", tier="hot") == 3
    assert of(samples, "cache_evictions_total", tier="warm") == 5
    assert of(samples, "cache_written_bytes_total") == 123
    assert of(samples, "cache_errors_total", kind="damaged") == 6
    assert of(samples, "store_restarts_total") == 1


async def test_the_store_may_be_away(client: TestClient, admin: MemoryAdmin) -> None:
    admin.refusal = UnavailableError("the cache's store is away")
    _text, samples = await scrape(client, "/v1/metrics")
    assert of(samples, "store_up") == 0
    assert not [name for name, _ in samples if name.startswith("homeprefixd_cache_")]


async def test_a_store_that_does_not_answer_is_away(
    client: TestClient, admin: MemoryAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scrape has ten seconds, and what a stopped store would say is not worth them."""
    monkeypatch.setattr("homeprefixd.api.store_figures.PATIENCE", 0.05)

    async def never() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    monkeypatch.setattr(admin, "stats", never)
    _text, samples = await scrape(client)
    assert of(samples, "store_up") == 0
    assert (await (await client.get("/cache/overview")).json())["store"] is None


async def test_names_follow_the_rules(client: TestClient, backend: ScriptedBackend, admin: MemoryAdmin) -> None:
    """What `promtool check metrics` asks for."""
    backend.state["workers"] = [everything(WORKER, alias="demo", state="ok")]
    admin.figures = everything(STORE)
    await (await client.post("/v1/chat/completions", json={**CHAT, "stream": True})).read()
    text, _samples = await scrape(client)
    families = list(text_string_to_metric_families(text))
    assert len(families) >= len({figure.name for figure in (*WORKER, *STORE)}) + 8
    for family in families:
        assert re.fullmatch(r"homeprefixd_[a-z][a-z0-9_]*", family.name)
        assert family.documentation
        assert family.documentation.endswith((".", ")."))
        written = f"{family.name}_total" if family.type == "counter" else family.name
        assert f"# TYPE {written} {family.type}" in text
        assert "_total" not in family.name
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|mib|percent|count|sum|bucket)(_|$)", family.name)
        for sample in family.samples:
            assert not {"instance", "job", "quantile"} & sample.labels.keys()
            assert all(re.fullmatch(r"[a-z_]+", label) for label in sample.labels)
            if family.type != "histogram":
                assert "le" not in sample.labels


def everything(figures: Any, **more: Any) -> dict[str, Any]:
    """A source that gives every figure."""
    source: dict[str, Any] = dict(more)
    for number, figure in enumerate(figures):
        *above, last = figure.path.split(".")
        place = source
        for step in above:
            place = place.setdefault(step, {})
        place[last] = number
    return source


@pytest.mark.parametrize("path", ["/metrics", "/v1/metrics"])
async def test_they_are_guarded_like_administration(client: TestClient, path: str) -> None:
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert (await client.get(path, headers=headers)).status == 403
    origin = {"Origin": "http://localhost:3000"}  # may call the models
    assert (await client.get(path, headers=origin)).status == 403


def test_a_bound_belongs_to_the_bucket_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 1), (1.5, 2), (2.5, 1)):
        histogram.observe(value, times)
    assert histogram.counts == [2, 2, 1]
    assert histogram.sum == 7.0


async def test_waits_by_the_clock() -> None:
    backend, seen, now = ScriptedBackend(), Observations(), [100.0]

    async def pass_time() -> None:
        now[0] += 0.4

    backend.script = [
        Accepted("", 100),
        pass_time,
        Progress("", 49, 100, 100),
        Delta("", "a", 1),
        pass_time,
        Delta("", "bc", 5),
        Delta("", "d", 5),  # text held back, no token
        Finished("", "stop", "", None, TIMINGS),
    ]
    observed = ObservedBackend(backend, seen, lambda: now[0])
    request = Generate("r", None, "x", None, {}, 8, [], Sampling(), True)
    async with observed.generate("demo", request) as generation:
        assert len([event async for event in generation if isinstance(event, Delta)]) == 3
    assert seen.first_token["demo", False].counts[FIRST_TOKEN_BOUNDS.index(0.5)] == 1
    assert seen.inter_token["demo", False].sum == pytest.approx(0.4)
    assert sum(seen.inter_token["demo", False].counts) == 4
    assert seen.requests == {("demo", "finished"): 1}

"""From records to figures and to the page."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from typing import Any

import pytest

from homeprefixd.bench import report
from homeprefixd.bench.charts import Axis, linear_axis, log_axis, steps
from homeprefixd.bench.load import CUT, ERROR, Restart, Run, Sample
from homeprefixd.bench.page import RUN_HEAD, TABLE_HEAD, page, run_cells, table_cells
from homeprefixd.bench.rows import all_met, at_least, at_most
from homeprefixd.bench.targets import PEER, Memory
from tests.unit.bench.measured import plan_of, record, run_of


def test_a_summary() -> None:
    records = [record(float(n), 0.1 * (n + 1)) for n in range(9)]
    summary = report.summarize(records, 10.0)
    assert (summary.requests, summary.ok, summary.errors, summary.cut) == (9, 9, 0, 0)
    assert summary.ttft["p50"] == pytest.approx(0.5)
    assert summary.ttft["max"] == pytest.approx(0.9)
    assert summary.gap["p50"] == pytest.approx(0.1)
    assert (summary.prompt_tokens, summary.cached_tokens) == (9000, 5400)
    assert summary.reuse == pytest.approx(0.6)
    assert summary.tiers == {"hot": 4500, "warm": 900}
    assert summary.hit_rate == 1.0
    assert summary.prefill_rate == pytest.approx(500.0)
    assert summary.decode_rate == pytest.approx(40.0)
    assert summary.output_rate == pytest.approx(3.6)
    assert list(summary.server) == ["prompt_ms"]
    assert summary.server["prompt_ms"]["p50"] == 800.0


def test_errors_have_no_ttft_and_no_gaps() -> None:
    good, bad = record(0.0, 0.2), record(1.0, 9.0, outcome=ERROR, error="out of memory", prompt_tokens=0)
    summary = report.summarize([good, bad], 10.0)
    assert (summary.ok, summary.errors) == (1, 1)
    assert summary.ttft["max"] == pytest.approx(0.2)
    assert report.error_share(run_of(good, bad)) == 0.5
    assert report.errors(run_of(good, bad)) == {"out of memory": 1}
    assert report.error_share(run_of()) == 1.0


def test_what_was_cut_counts_with_what_came() -> None:
    summary = report.summarize([record(0.0, 0.2, outcome=CUT)], 10.0)
    assert (summary.ok, summary.errors, summary.cut) == (0, 0, 1)
    assert summary.ttft["max"] == pytest.approx(0.2)


def test_a_few_tokens_of_the_template_are_no_hit() -> None:
    summary = report.summarize([record(0.0, 0.2, cached_tokens=99), record(0.0, 0.2, cached_tokens=100)], 10.0)
    assert (summary.hits, summary.hit_rate) == (1, 0.5)


def test_throughput_counts_what_came_in_time() -> None:
    """Four tokens at 9.85, 9.95, 10.05 and 10.15 s."""
    assert report.summarize([record(9.0, 0.85)], 10.0).output_rate == pytest.approx(0.2)


def test_servers_that_tell_nothing() -> None:
    silent = record(0.0, 0.2, prompt_tokens=0, cached_tokens=0, timings={}, tiers={})
    summary = report.summarize([silent], 10.0)
    assert (summary.reuse, summary.hit_rate, summary.prefill_rate, summary.decode_rate) == (None, None, None, None)
    assert table_cells(report.asdict(summary))[9:14] == ["-", "-", "-", "-", "-"]


def test_by_app() -> None:
    run = run_of(record(0.0, 0.1, app="voice"), record(1.0, 0.3, app="chat"), record(2.0, 0.5, app="chat"))
    summaries = report.by_app(run)
    assert list(summaries) == ["all", "voice", "chat"]
    assert [summary.requests for summary in summaries.values()] == [3, 1, 2]


def restarted(ready_ttft: float, **more: Any) -> Run:
    before = [record(0.1 * n, 5.0) for n in range(3)]
    after = [record(4.0 + 0.1 * n, 3.0, ttft_ready=ready_ttft, after_restart=True) for n in range(25)]
    after[22].ttft_ready = 99.0  # not of the first twenty
    return run_of(*after, *before, restart=Restart(4.0, 5.0, 6.5), **more)


def test_the_first_twenty_after_a_restart() -> None:
    figures = report.restart_figures(restarted(0.2))
    assert figures is not None
    assert (figures["at"], figures["stop"], figures["start"], figures["requests"]) == (4.0, 1.0, 1.5, 20)
    assert figures["ttft_ready"]["max"] == pytest.approx(0.2)
    assert figures["ttft"]["max"] == pytest.approx(3.0)
    assert report.restart_figures(run_of(record(0.0, 1.0))) is None


def stats(store: str, hot: int, cells: int = 0) -> dict[str, Any]:
    workers = [{"cells_used": cells, "cells": 4096, "kv_bytes_per_token": 23052.0}]
    return {
        "store_id": store,
        "counters": {"evicted_hot": hot, "evicted_warm": 2 * hot, "lookups": 3},
        "hot": {"bytes": 7},
        "daemon": {"workers": workers},
    }


def test_evictions_go_on_after_a_restart() -> None:
    looks = [("a", 5), ("a", 9), ("b", 2), ("b", 3)]
    samples = [Sample(float(n), None, stats(store, hot)) for n, (store, hot) in enumerate(looks)]
    samples.insert(2, Sample(1.5, None, None))
    run = run_of(record(0.0, 1.0), samples=samples)
    assert report.evictions(run) == {"hot": 4 + 3, "warm": 8 + 6}
    assert report.evictions(run_of(record(0.0, 1.0))) is None


def test_what_the_workers_counted() -> None:
    """Of two models, one of whose workers is started again."""
    looks = [[(1, 5), (7, 1)], [(1, 6), (7, 4)], [(2, 3), (7, 4)], [(2, 4)]]
    samples = [
        Sample(float(n), None, {"daemon": {"workers": [
            {"alias": f"m{at}", "pid": pid, "counters": {"set_aside": count}} for at, (pid, count) in enumerate(look)
        ]}})
        for n, look in enumerate(looks)
    ]  # fmt: skip
    samples.insert(2, Sample(1.5, None, {"daemon": {"workers": [{"alias": "m0", "pid": None, "counters": None}]}}))
    run = run_of(record(0.0, 1.0), samples=samples)
    assert report.engine_counters(run) == {"set_aside": 1 + 3 + 1 + 3}
    assert report.as_document([run], [], {})["runs"][0]["engine"] == {"set_aside": 8}
    assert report.engine_counters(run_of(record(0.0, 1.0))) == {}


def test_memory() -> None:
    samples = [
        Sample(0.0, Memory(300, 200, 3), stats("a", 0, 50)),
        Sample(5.0, Memory(900, 700, 3), stats("a", 0, 80)),
        Sample(9.0, Memory(800, 600, 3), stats("a", 0, 0)),
    ]
    figures = report.memory_figures(run_of(record(0.0, 1.0), samples=samples))
    assert (figures["peak_pss"], figures["peak_rss"], figures["peak_cells"], figures["cells"]) == (700, 900, 80, 4096)
    assert (figures["hot_bytes"], figures["warm_bytes"]) == (7, None)


# ------------------------------------------------------------------------------------------------------ comparison


def peer_of(run: Run) -> Run:
    return replace(run, target="llama-server", kind=PEER)


def times(*ttfts: float, **more: Any) -> Run:
    return run_of(*(record(0.1 * n, ttft) for n, ttft in enumerate(ttfts)), **more)


def test_bars() -> None:
    rows = report.compare([times(0.2, 0.2, 0.4), peer_of(times(0.2, 0.4, 0.9))])
    assert [row.what.split(": ")[1] for row in rows] == [
        "TTFT p95 / llama-server's",
        "TTFT p50 / llama-server's",
        "throughput / llama-server's",
    ]
    assert [row.bar for row in rows] == ["<= 0.5", "<= 1", ">= 1"]
    assert rows[0].value == pytest.approx(0.38 / 0.85)
    assert [row.met for row in rows] == [True, True, True]
    assert all_met(rows)


def test_missed_bars() -> None:
    rows = report.compare([times(0.5, 0.5), peer_of(times(0.4, 0.4, 0.4))])
    assert [row.met for row in rows] == [False, False, False]
    assert not all_met(rows)


def test_bars_are_for_the_household_from_cold() -> None:
    for more in ({"phase": "hot"}, {"plan": plan_of(workload="voice")}):
        one = times(0.5, **more)
        assert [row.met for row in report.compare([one, peer_of(one)])] == [None, None, None]
    one = times(0.5)
    assert report.compare([one, replace(peer_of(one), phase="hot")]) == []
    assert report.compare([one, replace(one, target="other", kind="url")]) == []


def test_the_bar_after_a_restart() -> None:
    good, bad = (report.compare([restarted(ttft), peer_of(restarted(10.0))])[3:] for ttft in (0.9, 1.1))
    assert [row.met for row in good] == [True, None]
    assert [row.met for row in bad] == [False, None]
    assert good[0].value == pytest.approx(0.09)
    assert good[1].value == pytest.approx(1.0)
    assert "counted from when it is back" in good[0].note


def test_a_figure_that_is_missing_is_not_judged() -> None:
    assert at_most("x", None, 1.0, "").met is None
    assert at_least("x", 1.0, None, "").met is None


# -------------------------------------------------------------------------------------------------- document, page


def document(*phases: str) -> dict[str, Any]:
    samples = [Sample(float(n), Memory(10 << 20, (5 + n) << 20, 3), stats("a", n, n)) for n in range(4)]
    runs = []
    for phase in phases or ("cold",):
        ours = restarted(0.2, phase=phase, samples=samples, client_cpu=0.2)
        ours.records[0].app = "chat<b>"
        ours = replace(ours, plan=plan_of(*ours.plan.sessions), note="ended & gone")
        runs += [ours, peer_of(ours)]
    runs[0].records.append(record(8.0, None, outcome=ERROR, error="<script>alert(1)</script> \"&'"))
    return report.as_document(runs, report.compare(runs), {"cpu": "A <fast> one", "cores": 2})


def test_the_document_is_json() -> None:
    made = document()
    assert json.loads(json.dumps(made)) == made
    assert made["workload"]["digest"] == plan_of(*restarted(0.1).plan.sessions).digest()
    assert {"summaries", "errors", "restart", "memory", "evictions", "client", "requests"} <= set(made["runs"][0])
    assert len(made["runs"][0]["requests"]) == 29
    assert "arrivals" not in made["runs"][0]["requests"][0]


@pytest.mark.parametrize("phases", [("cold",), ("off", "cold", "hot", "restart")])
def test_the_page_stands_alone(phases: tuple[str, ...]) -> None:
    text = page(document(*phases))
    root = ElementTree.fromstring(text)  # well-formed, entities and all
    assert root.tag == "html"
    names = {element.tag for element in root.iter()}
    assert {"svg", "circle", "polyline", "table", "style"} <= names
    assert not names & {"script", "link", "img", "iframe", "b"}
    assert not re.search(r"https?://|url\(|@import", text)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert "&lt;script&gt;" in text
    assert len([e for e in root.iter("h2") if (e.text or "").startswith("Phase: ")]) == len(phases)


def test_what_the_page_says() -> None:
    made = document()
    text = page(made)
    for cell in table_cells(made["runs"][0]["summaries"]["all"]):
        assert f"<td>{cell}</td>" in text
    assert text.count('<td class="missed">missed</td>') == 2  # p95, and after the restart: the same as theirs
    assert "A &lt;fast&gt; one" in text
    assert "ended &amp; gone" in text


def test_marks_lie_inside_the_drawing() -> None:
    root = ElementTree.fromstring(page(document()))
    seen = 0
    for svg in root.iter("svg"):
        _x, _y, width, height = (float(part) for part in svg.attrib["viewBox"].split())
        for circle in svg.iter("circle"):
            seen += 1
            assert 0 <= float(circle.attrib["cx"]) <= width
            assert 0 <= float(circle.attrib["cy"]) <= height
        for rect in svg.iter("rect"):
            assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width + 0.2
    assert seen == 56


def test_a_page_without_measurements() -> None:
    run = run_of(record(0.0, None, outcome=ERROR, error="no", prompt_tokens=0, cached_tokens=0, tiers={}, timings={}))
    text = page(report.as_document([run], [], {}))
    ElementTree.fromstring(text)
    assert "nothing measured" in text


def test_heads_and_cells_fit() -> None:
    made = document()
    for run in made["runs"]:
        assert len(run_cells(run)) == len(RUN_HEAD)
        assert all(len(table_cells(summary)) == len(TABLE_HEAD) for summary in run["summaries"].values())


def test_axes() -> None:
    assert log_axis([0.004, 3.0]).ticks == pytest.approx([0.001, 0.01, 0.1, 1.0, 10.0])
    assert log_axis([1.0]).ticks == pytest.approx([1.0, 10.0])
    assert log_axis([]).ticks == pytest.approx([0.1, 1.0])
    axis = log_axis([0.01, 1.0])
    assert [axis.place(value) for value in (0.0, 0.01, 0.1, 1.0, 5.0)] == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.0])
    assert linear_axis([37.0], str).ticks == pytest.approx([0, 10, 20, 30, 40])
    assert linear_axis([600.0], str).ticks == pytest.approx([0, 200, 400, 600])
    assert linear_axis([], str).high == 1.0
    assert Axis(0.0, 10.0, False, [], str).place(2.5) == 0.25


def test_steps() -> None:
    assert steps([3.0, 1.0]) == [(1.0, 0.0), (1.0, 0.5), (3.0, 0.5), (3.0, 1.0)]

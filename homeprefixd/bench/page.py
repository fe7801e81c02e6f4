"""The report as one HTML page that stands alone: no script, no network, light and dark, readable on a phone.

Made from the JSON document of `report.as_document` alone. It is well-formed XML too, so a parser can check it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

from .charts import Bar, Series, linear_axis, log_axis, marks, plot, seconds, stacked, steps

_LIGHT = ("#0b66c3", "#cf4a0c", "#23803a", "#8f35ab", "#967300", "#5c636a")
_DARK = ("#62adff", "#ff9566", "#6bcb80", "#d596f0", "#e0b840", "#adb5bd")
_PARTS_LIGHT = ("#23803a", "#0b66c3", "#8f35ab", "#967300", "#c9ced4")
_PARTS_DARK = ("#6bcb80", "#62adff", "#d596f0", "#e0b840", "#454b52")
_TIERS = ("shared", "hot", "warm")

_CSS = """
:root { color-scheme: light dark; --bg: #fff; --ink: #1b1d20; --muted: #5b6168; --grid: #e2e5e9; --box: #f6f7f9;
  --good: #1d7a35; --bad: #c0271c; LIGHT }
@media (prefers-color-scheme: dark) { :root { --bg: #14161a; --ink: #e9ebee; --muted: #a2a9b1; --grid: #2e333a;
  --box: #1c1f25; --good: #6bcb80; --bad: #ff8a80; DARK } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 16px; background: var(--bg); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0.4rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
h3 { font-size: 1rem; margin: 0 0 0.3rem; }
p, figcaption { color: var(--muted); margin: 0.3rem 0; } figcaption { font-size: 0.85rem; }
.figures { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr));
  align-items: start; }
figure { margin: 0; padding: 12px; background: var(--box); border-radius: 10px; }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--ink); } svg .muted { fill: var(--muted); }
.grid { stroke: var(--grid); stroke-width: 1; } .thick { stroke-width: 3; opacity: 0.55; }
.curve { fill: none; stroke-width: 2; } .dot { opacity: 0.75; } .band { opacity: 0.22; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.88rem; min-width: 100%; }
th, td { padding: 5px 9px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child, td.left, th.left { text-align: left; }
td.note { text-align: left; white-space: normal; min-width: 14rem; color: var(--muted); }
.met { color: var(--good); } .missed { color: var(--bad); font-weight: 600; }
.key { display: inline-block; margin-right: 14px; font-size: 0.88rem; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 5px; }
code { font-size: 0.88em; overflow-wrap: anywhere; }
dl { font-size: 0.9rem; } dd { margin: 0 0 0.5rem; color: var(--muted); }
"""


def css() -> str:
    """The style of a page: colours by number, light and dark."""

    def variables(colours: Sequence[str], parts: Sequence[str]) -> str:
        named = [f"--c{n}: {colour};" for n, colour in enumerate(colours)]
        return " ".join([*named, *(f"--p{n}: {colour};" for n, colour in enumerate(parts))])

    rules = [f".f{n} {{ fill: var(--c{n}); }} .l{n} {{ stroke: var(--c{n}); }}" for n in range(len(_LIGHT))]
    rules += [f".p{n} {{ fill: var(--p{n}); }}" for n in range(len(_PARTS_LIGHT))]
    rules += [f".s{n} {{ background: var(--c{n}); }}" for n in range(len(_LIGHT))]
    rules += [f".t{n} {{ background: var(--p{n}); }}" for n in range(len(_PARTS_LIGHT))]
    css = _CSS.replace("LIGHT", variables(_LIGHT, _PARTS_LIGHT)).replace("DARK", variables(_DARK, _PARTS_DARK))
    return css + "\n".join(rules)


class Page:
    """Builds the page of one document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._runs: list[dict[str, Any]] = document["runs"]
        self._targets = list(dict.fromkeys(run["target"] for run in self._runs))
        self._phases = list(dict.fromkeys(run["phase"] for run in self._runs))

    def html(self) -> str:
        """The whole page."""
        workload, machine = self._document["workload"], self._document["machine"]
        title = f"homeprefixd bench: {workload.get('name', '')}"
        where = ", ".join(f"{name} {value}" for name, value in machine.items() if value)
        knobs = (
            f"{workload.get('duration', 0):g} s, seed {workload.get('seed')}, scale {workload.get('scale', 1):g}, rate"
            f" {workload.get('rate', 1):g}, plan {workload.get('digest')}"
        )
        body = [
            f"<h1>{escape(title)}</h1>",
            f"<p>{escape(knobs)}</p>",
            f"<p>{escape(where)}</p>",
            f"<p>{self._legend()}</p>",
            self._problems(),
            self._comparison(),
            "<h2>All apps together</h2>",
            self._overview(),
            self._table([(self._name(run), run["summaries"]["all"]) for run in self._runs]),
        ]
        for phase in self._phases:
            body += self._phase(phase)
        body += [self._machine_table(), _DEFINITIONS]
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
            f"<title>{escape(title)}</title>\n<style>{css()}</style>\n</head>\n<body>\n"
            + "\n".join(part for part in body if part)
            + "\n</body>\n</html>\n"
        )

    # ------------------------------------------------------------------------------------------------- parts

    def _name(self, run: dict[str, Any]) -> str:
        return f"{run['target']}, {run['phase']}" if len(self._phases) > 1 else str(run["target"])

    def _colour(self, run: dict[str, Any]) -> int:
        return self._targets.index(run["target"]) % len(_LIGHT)

    def _legend(self) -> str:
        return "".join(
            f'<span class="key"><span class="swatch s{n % len(_LIGHT)}"></span>{escape(name)}</span>'
            for n, name in enumerate(self._targets)
        )

    def _problems(self) -> str:
        lines = []
        for run in self._runs:
            lines += [f"{self._name(run)}: {count} x {message}" for message, count in run["errors"].items()]
            if run["note"]:
                lines.append(f"{self._name(run)}: {run['note']}")
        if not lines:
            return ""
        return "<h2>Errors</h2>" + "".join(f'<p class="missed">{escape(line)}</p>' for line in lines)

    def _comparison(self) -> str:
        rows = self._document["comparison"]
        if not rows:
            return ""
        cells = []
        for row in rows:
            verdict = {True: '<td class="met">met</td>', False: '<td class="missed">missed</td>'}.get(
                row["met"], "<td></td>"
            )
            value = "-" if row["value"] is None else f"{row['value']:.3g}"
            cells.append(
                f"<tr><td>{escape(row['what'])}</td><td>{value}</td><td>{escape(row['bar'])}</td>{verdict}"
                f'<td class="note">{escape(row["note"])}</td></tr>'
            )
        head = '<tr><th>ratio</th><th>measured</th><th>bar</th><th></th><th class="left">ours and theirs</th></tr>'
        return f'<h2>Comparison</h2><div class="scroll"><table>{head}{"".join(cells)}</table></div>'

    def _overview(self) -> str:
        def bars(key: str, names: Sequence[str]) -> list[Bar]:
            return [
                Bar(self._name(run), self._colour(run), [(n, run["summaries"]["all"][key][n]) for n in names])
                for run in self._runs
            ]

        marked = "circle p50, diamond p95, triangle p99"
        return _figures(
            _figure("Time to first token", marks(bars("ttft", ("p50", "p95", "p99")), "TTFT"), marked),
            _figure(
                "Time between tokens",
                marks(bars("gap", ("p50", "p95", "p99", "max")), "inter-token times"),
                f"{marked}, bar the longest stall",
            ),
            self._origins(),
        )

    def _origins(self) -> str:
        rows = []
        for run in self._runs:
            summary = run["summaries"]["all"]
            tiers = [(tier, float(summary["tiers"].get(tier, 0))) for tier in _TIERS]
            untold = max(0.0, summary["cached_tokens"] - sum(count for _, count in tiers))
            computed = float(summary["prompt_tokens"] - summary["cached_tokens"])
            parts = [*tiers, ("reused", untold), ("computed", computed)]
            rows.append(Bar(self._name(run), self._colour(run), parts))
        names = [*_TIERS, "reused, tier not told", "computed"]
        legend = "".join(
            f'<span class="key"><span class="swatch t{n}"></span>{name}</span>' for n, name in enumerate(names)
        )
        chart = stacked(rows, "where the prompts' tokens came from", lambda n: f"{n:,.0f}")
        return _figure("Where the prompts' tokens came from", chart, legend, raw=True)

    def _phase(self, phase: str) -> list[str]:
        runs = [run for run in self._runs if run["phase"] == phase]
        apps = [app for app in runs[0]["summaries"] if app != "all"]
        rows = [
            Bar(f"{app}: {run['target']}", self._colour(run), list(run["summaries"][app]["ttft"].items())[:3])
            for app in apps
            for run in runs
            if app in run["summaries"]
        ]
        figures = [
            _figure("Time to first token, app by app", marks(rows, "TTFT by app"), "p50 / p95 / p99"),
            self._over_time(runs),
            self._shares(runs),
            self._memory(runs),
        ]
        summaries = [
            (f"{app}: {run['target']}", run["summaries"][app])
            for app in apps
            for run in runs
            if app in run["summaries"]
        ]
        return [f"<h2>Phase: {escape(phase)}</h2>", _figures(*figures), self._table(summaries)]

    def _over_time(self, runs: Sequence[dict[str, Any]]) -> str:
        series, bands = [], []
        for run in runs:
            answered = [r for r in run["requests"] if r["ttft"] is not None]
            points = [(r["sent"], r["ttft"]) for r in answered]
            titles = [f"{run['target']}: {r['app']} at {r['sent']:.1f} s, {seconds(r['ttft'])}" for r in answered]
            series.append(Series(run["target"], self._colour(run), points, titles))
            if restart := run["restart"]:
                bands.append((restart["at"], restart["at"] + restart["stop"] + restart["start"], self._colour(run)))
        ends = [end for _, end, _ in bands]
        x_axis = linear_axis([x for one in series for x, _ in one.points] + ends, lambda value: f"{value:g}")
        y_axis = log_axis([y for one in series for _, y in one.points])
        label = "when it was sent, s"
        chart = plot(series, x_axis, y_axis, label, "TTFT over time", bands=bands)
        note = "one dot per request" + ("; shaded: the restart" if bands else "")
        return _figure("Time to first token over the run", chart, note)

    def _shares(self, runs: Sequence[dict[str, Any]]) -> str:
        series = [
            Series(run["target"], self._colour(run), steps([r["ttft"] for r in run["requests"] if r["ttft"]]))
            for run in runs
        ]
        x_axis = log_axis([x for one in series for x, _ in one.points])
        y_axis = linear_axis([1.0], lambda value: f"{100 * value:.0f} %")
        chart = plot(series, x_axis, y_axis, "time to first token", "TTFT distribution", lines=True)
        return _figure("Share of requests that had their first token by then", chart, "")

    def _memory(self, runs: Sequence[dict[str, Any]]) -> str:
        series = []
        for run in runs:
            points = [(sample["time"], sample["pss"] / 2**20) for sample in run["samples"] if sample["pss"]]
            if points:
                series.append(Series(run["target"], self._colour(run), points))
        if not series:
            return ""
        x_axis = linear_axis([x for one in series for x, _ in one.points], lambda value: f"{value:g}")
        y_axis = linear_axis([y for one in series for _, y in one.points], lambda value: f"{value:g}")
        chart = plot(series, x_axis, y_axis, "seconds", "memory over time", lines=True)
        return _figure("Memory of all its processes, MiB", chart, "PSS: shared memory counts once; the model is in it")

    def _table(self, summaries: Sequence[tuple[str, dict[str, Any]]]) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in ("", *TABLE_HEAD))
        rows = "".join(
            f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in table_cells(summary))}</tr>"
            for name, summary in summaries
        )
        return f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'

    def _machine_table(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in ("", *RUN_HEAD))
        rows = "".join(
            f"<tr><td>{escape(self._name(run))}</td>"
            f"{''.join(f'<td>{escape(cell)}</td>' for cell in run_cells(run))}</tr>"
            for run in self._runs
        )
        return (
            f'<h2>Memory, evictions, restart, client</h2><div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'
        )


# ------------------------------------------------------------------------------- cells, for the page and the terminal

TABLE_HEAD = (
    "requests",
    "errors",
    "TTFT p50",
    "TTFT p95",
    "TTFT p99",
    "gap p50",
    "gap p95",
    "gap p99",
    "stall",
    "hits",
    "reused",
    "by tier",
    "prefill/s",
    "decode/s",
    "output/s",
)

RUN_HEAD = (
    "memory",
    "cells",
    "evicted hot",
    "evicted warm",
    "stop",
    "start",
    "first 20: p95",
    "client CPU",
    "late p99",
)


def _time(value: float | None) -> str:
    return "-" if value is None else seconds(value)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def table_cells(summary: dict[str, Any]) -> list[str]:
    """One text for each of TABLE_HEAD."""
    ttft, gap = summary["ttft"], summary["gap"]
    failed = f"{summary['errors']}" + (f" + {summary['cut']} cut" if summary["cut"] else "")
    tiers = ", ".join(f"{count:,} {tier}" for tier, count in summary["tiers"].items() if count)
    return [
        str(summary["requests"]),
        failed,
        *(_time(ttft[name]) for name in ("p50", "p95", "p99")),
        *(_time(gap[name]) for name in ("p50", "p95", "p99", "max")),
        _percent(summary["hit_rate"]),
        _percent(summary["reuse"]),
        tiers or "-",
        _number(summary["prefill_rate"]),
        _number(summary["decode_rate"]),
        _number(summary["output_rate"]),
    ]


def run_cells(run: dict[str, Any]) -> list[str]:
    """One text for each of RUN_HEAD."""
    memory, restart, evicted = run["memory"], run["restart"], run["evictions"] or {}
    cells = "-" if memory["peak_cells"] is None else f"{memory['peak_cells']:,} of {memory['cells']:,}"
    return [
        "-" if memory["peak_pss"] is None else f"{memory['peak_pss'] / 2**20:,.0f} MiB",
        cells,
        *(str(evicted[tier]) if tier in evicted else "-" for tier in ("hot", "warm")),
        _time(restart and restart["stop"]),
        _time(restart and restart["start"]),
        _time(restart and restart["ttft_ready"]["p95"]),
        _percent(run["client"]["cpu_share"]),
        _time(run["client"]["late_p99"]),
    ]


_DEFINITIONS = """<h2>What the words mean</h2>
<dl>
<dt>Time to first token (TTFT)</dt><dd>From a request's first attempt to the first event with output, at the client.
Failed requests have none and are counted as errors.</dd>
<dt>Time between tokens (gap)</dt><dd>From one event with output to the next of the same reply; the longest is the
stall.</dd>
<dt>Percentiles</dt><dd>Linear interpolation between the nearest ranks, over all requests or gaps pooled.</dd>
<dt>Hits, reused</dt><dd>Requests that reused at least a tenth of their prompt; tokens of prompts that were not
computed. Both as the server tells them.</dd>
<dt>Prefill, decode, output</dt><dd>Tokens per second. The first two by the server's own timings; output: tokens
received within the plan's duration, by that duration.</dd>
<dt>Phases</dt><dd>off: the cache is left alone. cold: started afresh, nothing cached. hot: the same requests again.
restart: again, after the target's process was ended and started. Nothing is sent to warm up.</dd>
<dt>Memory, cells</dt><dd>The most that its processes held at any look, each 5 s (PSS: shared memory counts once),
and the most KV cells in use. Evicted: nodes, by tier.</dd>
<dt>Stop, start, first 20: p95</dt><dd>How long the restart in the middle took, and the TTFT of the first 20 requests
served after it, counted from when the target was back.</dd>
<dt>Client CPU, late</dt><dd>This program's share of one core, and how long after its time a request was sent.</dd>
</dl>"""


def _figure(title: str, chart: str, note: str, raw: bool = False) -> str:
    caption = note if raw else escape(note)
    return f"<figure><h3>{escape(title)}</h3>{chart}<figcaption>{caption}</figcaption></figure>"


def _figures(*figures: str) -> str:
    return f'<div class="figures">{"".join(figures)}</div>'


def page(document: dict[str, Any]) -> str:
    """The HTML page of a document."""
    return Page(document).html()

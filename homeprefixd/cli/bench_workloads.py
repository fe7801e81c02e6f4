"""`bench run`, `burst`, `streams` and `interrupt`: the house's requests against one server or several."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ConfigError
from .bench_targets import DEFAULT_PARALLEL, Started, target_flags
from .interrupt import ended_by_signals
from .output import Column, Output, ProgressLine, seconds_text
from .reach import api_key
from .settings import json_flag

if TYPE_CHECKING:
    from ..bench.load import Snapshot
    from ..bench.rows import Row
    from ..bench.targets import Target

PROGRESS_INTERVAL = 10.0  # seconds between lines where stderr is no terminal


# --------------------------------------------------------------------------------------------------------------- run


@click.command()
@click.argument("workload", default="household", metavar="[WORKLOAD]")
@target_flags
@click.option("--serve", is_flag=True, help="Measure homeprefixd, with a cache directory of its own.")
@click.option("--url", "urls", metavar="URL", multiple=True, help="Measure this OpenAI-compatible server; repeatable.")
@click.option("--url-model", metavar="NAME", default="", help="Its model.  [default: the first that it lists]")
@click.option("--api-key-file", metavar="FILE", help="The key for --url.  [default: $HOMEPREFIXD_API_KEY]")
@click.option("--duration", metavar="SECONDS", default=60.0, show_default=True, help="No request is sent later.")
@click.option("--rate", metavar="X", default=1.0, show_default=True, help="X times as many requests a minute.")
@click.option("--scale", metavar="X", default=1.0, show_default=True, help="Prompts and replies X times as long.")
@click.option("--seed", metavar="N", default=0, show_default=True, help="Another seed, other requests and times.")
@click.option("--phases", metavar="LIST", default="cold", show_default=True, help="Of off, cold, hot, restart.")
@click.option("--restart-at", metavar="SHARE", type=float, help="Restart each target then; 0.5: in the middle.")
@click.option("--timeout", metavar="SECONDS", default=300.0, show_default=True, help="Longer requests are errors.")
@click.option("--max-errors", metavar="SHARE", default=0.01, show_default=True, help="More failed: exit code 1.")
@click.option("--plain", is_flag=True, help="Send only OpenAI's own fields; replies then end when they like.")
@click.option("--json", "json_file", metavar="FILE", help="Write everything as JSON; - is stdout, without the tables.")
@click.option("--html", "html_file", metavar="FILE", type=Path, help="Write a page with charts.")
def run(
    workload: str,
    serve: bool,
    urls: tuple[str, ...],
    url_model: str,
    api_key_file: str | None,
    duration: float,
    rate: float,
    scale: float,
    seed: int,
    phases: str,
    restart_at: float | None,
    timeout: float,
    max_errors: float,
    plain: bool,
    json_file: str | None,
    html_file: Path | None,
    **given: Any,
) -> int:
    """Run a household workload: voice, chat, documents, agent, camera, titles, or household (all six together).

    An open loop: requests are sent at their times, however slow the answers are; only the next turn of a chat or of
    the coding agent waits for its reply, plus time to think. The seed alone decides what is sent and when, so every
    target gets the same. Targets (--serve, --llama-server, --url) are measured one after another. Nothing is sent to
    warm up.

    Phases: off (cache left alone), cold (started afresh, nothing cached), hot (the same requests again), restart
    (again, after the target was ended and started). With --url, cold means as found. --restart-at restarts the target
    in the middle of each phase; requests that find it away are sent again when it is back, and their TTFT counts from
    the first attempt; the row on the first 20 after the restart counts from when it is back, and says both.

    Exit code 1 if more than --max-errors of a run failed, or if the household missed a bar beside llama-server.
    """
    from ..bench.passes import Passes, checked_phases
    from ..bench.report import as_document, compare, error_share
    from ..bench.rows import all_met
    from ..bench.targets import Workplace
    from ..bench.workloads import plan

    _writable(html_file, json_file)
    wanted = plan(workload, seed=seed, duration=duration, scale=scale, rate=rate)
    progress = Progress()
    with ended_by_signals(), Workplace(given["work_dir"]) as place:
        started = Started(place, given, ours=serve)
        key = api_key(api_key_file, os.environ) if urls else ""
        targets = started.targets + [place.url(url, api_key=key, model=url_model) for url in urls]
        passes = Passes(
            targets,
            wanted,
            checked_phases(phases, targets),
            restart_at=restart_at,
            timeout=timeout,
            plain=plain,
            say=progress.say,
            progress=progress.show,
        )
        facts = started.facts()
        try:
            passes.run()
        finally:  # what is measured is shown, even if the rest failed
            progress.clear()
            rows = compare(passes.runs)
            if passes.runs:
                _report(as_document(passes.runs, rows, facts), rows, json_file, html_file)
    good = True
    for one in passes.runs:
        if (share := error_share(one)) > max_errors:
            print(
                f"homeprefixd: {one.target}, {one.phase}: {100 * share:.1f} % of the requests failed", file=sys.stderr
            )
            good = False
        if one.note:
            print(f"homeprefixd: {one.note}", file=sys.stderr)
            good = False
    return 0 if good and all_met(rows) else 1


def _writable(*files: Path | str | None) -> None:
    """A report that cannot be written is known before ten minutes are spent. Raises ConfigError."""
    for file in files:
        if file in (None, "-"):
            continue
        try:
            Path(str(file)).open("a").close()
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror}.") from error


def _report(document: dict[str, Any], rows: Sequence[Row], json_file: str | None, html_file: Path | None) -> None:
    from ..bench.page import page

    if html_file is not None:
        html_file.write_text(page(document), encoding="utf-8")
    if json_file not in (None, "-"):
        Path(str(json_file)).write_text(json.dumps(document, ensure_ascii=False) + "\n", encoding="utf-8")
    if json_file == "-":
        Output(True).document(document)
        return
    show(Output(), document, rows)
    if html_file is not None:
        Output().line(f"Page: {html_file}")


_LEFT_OUT = (
    *("TTFT p99", "by tier", "gap p50", "gap p99", "prefill/s", "decode/s", "hits", "output/s", "gap p95"),
    *("late p99", "client CPU", "evicted warm", "evicted hot", "cells"),
)
"""Columns that a narrow terminal goes without, the first of them first."""


def show(output: Output, document: dict[str, Any], rows: Sequence[Row]) -> None:
    """The tables of a run."""
    from ..bench.page import RUN_HEAD, TABLE_HEAD, run_cells, table_cells

    workload = document["workload"]
    output.line(
        f"{workload['name']}, {workload['duration']:g} s, seed {workload['seed']}, scale {workload['scale']:g}, rate"
        f" {workload['rate']:g}: {workload['sessions']} sessions, plan {workload['digest']}"
    )
    columns = _columns(TABLE_HEAD)
    for one in document["runs"]:
        output.line()
        output.line(f"{one['target']}, {one['phase']}")
        output.table(columns, [[app, *table_cells(summary)] for app, summary in one["summaries"].items()])
        for message, count in one["errors"].items():
            output.line(f"error, {count} x: {message}")
        if one["note"]:
            output.line(f"note: {one['note']}")
    output.line()
    output.table(
        _columns(RUN_HEAD), [[f"{one['target']}, {one['phase']}", *run_cells(one)] for one in document["runs"]]
    )
    if rows:
        output.line()
        show_rows(output, rows)


def _columns(names: Sequence[str]) -> list[Column]:
    """The first one names the row."""
    optional = {name: number for number, name in enumerate(_LEFT_OUT, start=1)}
    return [
        Column("", flexible=True),
        *(Column(name, right=name != "by tier", optional=optional.get(name, 0)) for name in names),
    ]


def show_rows(output: Output, rows: Sequence[Row]) -> None:
    """Measured beside its bar."""
    columns = [Column("what"), Column("measured", right=True), Column("bar"), Column(""), Column("", flexible=True)]
    cells = [
        [
            row.what,
            "-" if row.value is None else f"{row.value:.3g}",
            row.bar,
            "" if row.met is None else "met" if row.met else "MISSED",
            row.note,
        ]
        for row in rows
    ]
    output.table(columns, cells)


class Progress:
    """One live line on a terminal, a line each ten seconds in a pipe; to stderr."""

    def __init__(self, line: ProgressLine | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._line = line or ProgressLine()
        self._clock = clock
        self._shown = clock()

    def say(self, text: str) -> None:
        """A line that is shown wherever stderr goes."""
        self._line.show(text)

    def show(self, now: Snapshot) -> None:
        """Where a run stands."""
        text = progress_text(now)
        self._line.tick(text)
        if self._clock() - self._shown >= PROGRESS_INTERVAL:
            self._shown = self._clock()
            self._line.show(text)

    def clear(self) -> None:
        """Take the line away."""
        self._line.clear()


def progress_text(now: Snapshot) -> str:
    """`homeprefixd, cold: 23 of 60 s, 14 sent, 2 running, 12 done, TTFT p50 310 ms, p95 2.10 s`."""
    parts = [f"{now.target}, {now.phase}: {now.elapsed:.0f} of {now.duration:.0f} s", f"{now.sent} sent"]
    parts += [f"{now.running} running", f"{now.done} done"]
    if now.errors:
        parts.append(f"{now.errors} errors")
    if now.ttft_p50 is not None and now.ttft_p95 is not None:
        parts.append(f"TTFT p50 {seconds_text(now.ttft_p50)}, p95 {seconds_text(now.ttft_p95)}")
    if now.state:
        parts.append(f"restart: {now.state}")
    return ", ".join(parts)


# --------------------------------------------------------------------------------------------------------- scenarios


@contextlib.contextmanager
def _started(given: dict[str, Any], parallel: int = 0) -> Iterator[tuple[Started, Progress]]:
    """Our target and maybe llama-server, neither running yet; both ended afterwards."""
    from ..bench.targets import Workplace

    progress = Progress()
    with ended_by_signals(), Workplace(given["work_dir"]) as place:
        try:
            yield Started(place, given, ours=True, parallel=parallel), progress
        finally:
            progress.clear()


def _each(
    given: dict[str, Any],
    as_json: bool,
    measure: Callable[[Target, Callable[[str], None]], Coroutine[Any, Any, list[Row]]],
) -> int:
    """`measure` on each target, one after another; the rows, and 1 if a bar was missed."""
    import asyncio

    rows: list[Row] = []
    with _started(given) as (started, progress):
        for target in started.targets:
            progress.say(f"{target.name}: starting")
            target.fresh()
            rows += asyncio.run(measure(target, progress.say))
            target.close()
    return judged(rows, as_json)


def judged(rows: list[Row], as_json: bool) -> int:
    """Show figures beside their bars; the exit code: 1 if one is missed."""
    from ..bench.rows import all_met

    output = Output(as_json)
    if as_json:
        output.document([asdict(row) for row in rows])
    else:
        show_rows(output, rows)
    return 0 if all_met(rows) else 1


@click.command()
@target_flags
@click.option("--requests", metavar="N", default=4, show_default=True, help="How many arrive together.")
@click.option("--prefix", metavar="TOKENS", default=2000, show_default=True, help="What they have in common.")
@click.option("--rounds", metavar="N", default=1, show_default=True, help="Each with a prefix of its own.")
@json_flag
def burst(requests: int, prefix: int, rounds: int, as_json: bool, **given: Any) -> int:
    """Requests with one cold prefix that arrive together: is it computed once?

    Tokens computed (from the replies' usage) by the least possible: one prefix and every tail. The worst round
    counts. With --llama-server the same is shown for it.
    """
    from ..bench.scenarios import burst as measure

    _positive(requests=requests, prefix=prefix, rounds=rounds)
    return _each(
        given,
        as_json,
        lambda target, say: measure(target, requests=requests, prefix=prefix, rounds=rounds, say=say),
    )


@click.command()
@target_flags
@click.option("--counts", metavar="LIST", default="1,2,4,8", show_default=True, help="Streams at once.")
@click.option("--pairs", metavar="N", default=5, show_default=True, help="Interleaved pairs of each comparison.")
@click.option("--tokens", metavar="N", default=128, show_default=True, help="Tokens of each stream.")
@json_flag
def streams(counts: str, pairs: int, tokens: int, as_json: bool, **given: Any) -> int:
    """Decode throughput with 1, 2, 4 and 8 streams at once, beside llama-server.

    Both servers are started and asked in turn; the other one is idle meanwhile. The ratio is the median of the pairs.
    """
    import asyncio

    from ..bench.scenarios import streams as measure

    numbers = [int(part) for part in counts.split(",") if part.strip().isdecimal()]
    if len(numbers) != len(counts.split(",")) or not all(1 <= number <= 64 for number in numbers):
        raise ConfigError(f"--counts must be whole numbers from 1 to 64, as in 1,2,4,8; not {counts!r}.")
    _positive(pairs=pairs, tokens=tokens)
    with _started(given, max(DEFAULT_PARALLEL, *numbers)) as (started, progress):
        for target in started.targets:
            progress.say(f"{target.name}: starting")
            target.fresh()
        if started.ours is None:
            raise RuntimeError("our target is always there")
        rows = asyncio.run(
            measure(started.ours, started.peer, counts=numbers, pairs=pairs, tokens=tokens, say=progress.say)
        )
    return judged(rows, as_json)


@click.command()
@target_flags
@click.option("--tokens", metavar="N", default=7000, show_default=True, help="Of the prompt that is prefilled.")
@click.option("--asks", metavar="N", default=5, show_default=True, help="Voice requests, idle and meanwhile.")
@click.option(
    "--max-stall", metavar="SECONDS", default=0.5, show_default=True, help="The setting model.max_stall, for the bars."
)
@json_flag
def interrupt(tokens: int, asks: int, max_stall: float, as_json: bool, **given: Any) -> int:
    """A voice request with a warm prefix, and a running stream, while a long prompt is prefilled.

    The voice request's TTFT may be twice its idle one plus max_stall; the stream may not pause for longer than 1.5 x
    max_stall. With --llama-server the same is shown for it.
    """
    from ..bench.scenarios import interrupt as measure

    _positive(tokens=tokens, asks=asks)
    if not 0 < max_stall < 1000:
        raise ConfigError(f"--max-stall must be a number of seconds above 0, not {max_stall:g}.")
    return _each(
        given, as_json, lambda target, say: measure(target, tokens=tokens, max_stall=max_stall, asks=asks, say=say)
    )


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"--{name} must be at least 1, not {value}.")

"""`bench explain`: how often explanations are right, and what they cost."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from ..errors import HomeprefixdError
from .bench_targets import model_path, thread_count
from .bench_workloads import judged
from .output import Column, Output, ProgressLine
from .settings import json_flag, setting_flags


@click.command()
@setting_flags("--model", "--threads")
@click.option("--requests", metavar="N", default=12, show_default=True, help="Requests with explaining, and without.")
@click.option(
    "--pairs",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Judge explanations by a file of pairs of prompts instead.",
)
@click.option("--least", metavar="SHARE", default=0.9, show_default=True, help="Share of pairs that must be right.")
@json_flag
def explain(requests: int, pairs: Path | None, least: float, as_json: bool, **given: str | None) -> int:
    """What explaining, the metrics and the page cost, with their bars.

    With --pairs: how many pairs of a file are explained rightly. The file is JSON, a list of objects with name, before,
    after, cause and place; `before` and `after` have messages (or text), tools, reply and template. Nothing is served.
    """
    output = Output(as_json)
    if pairs is not None:
        return _judge(pairs, least, output)
    from ..bench.explain_cost import measure

    if requests < 1:
        raise HomeprefixdError("--requests must be at least 1")
    progress = ProgressLine()
    rows = measure(model_path(given), thread_count(given), requests, progress.show)
    progress.clear()
    return judged(rows, as_json)


def _judge(file: Path, least: float, output: Output) -> int:
    from ..bench.pairs import judge, read_pairs, share_right

    judged = [judge(pair) for pair in read_pairs(file)]
    share = share_right(judged)
    if output.as_json:
        told = [{**msgspec.to_builtins(one), "right": one.right} for one in judged]
        output.document({"share": share, "least": least, "pairs": told})
    else:
        columns = [Column(""), Column("pair", flexible=True), Column("expected"), Column("said")]
        rows = [
            [
                "" if one.right else "WRONG",
                one.name,
                _named(one.expected_cause, one.expected_place),
                _named(one.cause, one.place),
            ]
            for one in judged
        ]
        output.table(columns, rows)
        output.line(f"{sum(one.right for one in judged)} of {len(judged)} are right: {share:.0%}")
    return 0 if share >= least else 1


def _named(cause: str, place: str) -> str:
    return f"{cause}: {place}" if place else cause

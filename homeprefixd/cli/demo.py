"""`demo`: what the cache does, measured at the client: cold, hot, and after a restart of the daemon."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..errors import ConfigError, HomeprefixdError, ModelError, StoreError, UnavailableError
from ..program import program
from ..sizes import size_text
from .interrupt import ended_by_signals
from .output import Column, Output, ProgressLine, count_text, seconds_text
from .settings import json_flag

if TYPE_CHECKING:
    from ..bench.server import Server
    from ..bench.stream import Answer

Result = TypeVar("Result")

QUESTIONS = (
    ("cold: nothing is known", "Is the kitchen window still open?"),
    ("hot: the same prefix, a new question", "How warm is it in the nursery now?"),
    ("after a restart: another new question", "Please dim the living room light a little."),
)
PREFIX_TOKENS = 2200
REPLY_TOKENS = 24
WRITE_TIMEOUT = 15.0  # seconds that the demo waits for the write-behind queue, only to show what is stored
STOP_TIMEOUT = 30.0  # seconds

APPS = """\
To serve your own apps:   PROGRAM serve [--model FILE.gguf]   (for the whole house: README, API keys)
  base URL                http://127.0.0.1:8080/v1   (any API key: none is asked for)
  curl                    curl http://127.0.0.1:8080/v1/chat/completions \\
                            -H 'Content-Type: application/json' \\
                            -d '{"messages": [{"role": "user", "content": "Hello"}]}'
  Home Assistant          add the llama.cpp integration, URL http://HOST:8080
  Open WebUI              Admin Settings, Connections, OpenAI API: URL http://HOST:8080/v1
What is cached:           PROGRAM stats, PROGRAM ls, PROGRAM purge
"""


@dataclass(frozen=True)
class Step:
    """One request of the demo. Times in seconds, counts in tokens."""

    step: str
    question: str
    answer: str
    ttft: float
    prompt_tokens: int
    computed: int
    reused: dict[str, int]  # by tier
    stored_bytes: int  # in the warm tier, after the request
    speedup: float  # against the first step's TTFT


@click.command()
@click.option("--model", metavar="FILE", help="A GGUF file.  [default: the demo model]")
@click.option("--cache-dir", metavar="DIR", help="Use and keep this cache directory.  [default: a temporary one]")
@click.option("--keep", is_flag=True, help="Keep the temporary cache directory and say where it is.")
@json_flag
def demo(model: str | None, cache_dir: str | None, keep: bool, as_json: bool) -> None:
    """Show what the cache does, in under a minute.

    Starts a daemon with a cache directory of its own, sends it a household's prompt of about 2,200 tokens, then the
    same prefix with a new question, restarts it, asks once more, and prints what each answer took. TTFT (time to
    first token) is measured here, at the client.
    """
    output = Output(as_json)
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="homeprefixd-demo-") as temporary:
        if cache_dir is not None:
            directory = Path(cache_dir).absolute()
        else:
            directory = Path(tempfile.mkdtemp(prefix="homeprefixd-cache-")) if keep else Path(temporary, "cache")
        nothing = Path(temporary, "config.toml")
        nothing.touch()
        flags = ["--config", str(nothing), "--grace", "1", *(["--model", model] if model else [])]
        steps = Demo(directory, flags, ProgressLine()).run()
    kept = str(directory) if keep or cache_dir is not None else None
    if as_json:
        output.document({"steps": [asdict(step) for step in steps], "cache_dir": kept})
        return
    show(output, steps)
    if kept:
        output.line(f"The cache is kept in {kept}: {program()} stats --cache-dir {kept}")
        output.line()
    output.line(APPS.rstrip().replace("PROGRAM", program()))


def show(output: Output, steps: list[Step]) -> None:
    """The table and one sentence."""
    columns = [
        Column("step", flexible=True),
        Column("TTFT", right=True),
        Column("computed", right=True),
        Column("reused", right=True),
        Column("stored", right=True),
        Column("speed-up", right=True),
    ]
    rows = [
        [
            step.step,
            seconds_text(step.ttft),
            count_text(step.computed),
            ", ".join(f"{count_text(n)} {tier}" for tier, n in step.reused.items() if n) or "-",
            size_text(step.stored_bytes),
            f"{step.speedup:.0f} x" if step.speedup >= 10 else f"{step.speedup:.1f} x",
        ]
        for step in steps
    ]
    output.line()
    output.table(columns, rows)
    output.line()
    output.line("TTFT: time to first token at the client. Computed, reused: tokens of the prompt. Stored: on disk.")
    output.line()


class Demo:
    """The scenario. Ends its daemon by its own id, whatever happens."""

    def __init__(self, directory: Path, flags: list[str], progress: ProgressLine) -> None:
        self._directory = directory
        self._flags = flags
        self._progress = progress
        self._steps: list[Step] = []

    def run(self) -> list[Step]:
        """All steps. Raises HomeprefixdError with the daemon's own last words where it fails."""
        from ..bench.server import homeprefixd

        server = homeprefixd(self._directory, *self._flags)
        server.env = {name: value for name, value in server.env.items() if not name.startswith("HOMEPREFIXD_")}
        server.env["HOMEPREFIXD_CACHE_PRELOAD"] = "0"  # what comes from the disk shall be seen to come from there
        try:
            self._start(server, "starting a daemon and loading the model")
            self._ask(server, 0, f"cold: computing about {PREFIX_TOKENS:,} tokens")
            self._ask(server, 1, "hot: the same prefix, a new question")
            self._progress.show("restarting the daemon")
            server.stop(STOP_TIMEOUT)
            self._start(server, "starting the daemon again")
            self._ask(server, 2, "after the restart: another new question")
            return self._steps
        finally:
            self._progress.clear()
            with contextlib.suppress(HomeprefixdError):
                server.stop(STOP_TIMEOUT)
            server.__exit__(None, None, None)

    def _start(self, server: Server, text: str) -> None:
        self._progress.show(text)
        try:
            server.start()
        except UnavailableError as error:
            mark = "homeprefixd: error: "
            said = [line for line in server.last_words().splitlines() if line.startswith(mark)]
            status = server.process.returncode if server.process else 1
            kind = next((k for k in (ConfigError, ModelError, StoreError) if k.exit_code == status), HomeprefixdError)
            raise kind(said[-1].removeprefix(mark) if said else error.message) from error

    def _ask(self, server: Server, number: int, text: str) -> None:
        from ..bench.household import household_messages
        from ..bench.stream import ask

        name, question = QUESTIONS[number]
        messages = household_messages(question, size=PREFIX_TOKENS)
        body = {"messages": messages, "temperature": 0, "max_tokens": REPLY_TOKENS}
        answer = self._watched(text, lambda: ask(server.url, body))
        stored = self._watched(f"{name}: writing behind", lambda: _stored_bytes(server))
        self._steps.append(self._step(name, question, answer, stored))

    def _step(self, name: str, question: str, answer: Answer, stored: int) -> Step:
        timings = answer.timings
        first = self._steps[0].ttft if self._steps else answer.ttft
        return Step(
            step=name,
            question=question,
            answer=answer.text,
            ttft=answer.ttft,
            prompt_tokens=int(timings["prompt_n"]) + int(timings["cache_n"]),
            computed=int(timings["prompt_n"]),
            reused={tier: int(count) for tier, count in timings.get("cache_tiers", {}).items()},
            stored_bytes=stored,
            speedup=first / answer.ttft,
        )

    def _watched(self, text: str, work: Callable[[], Result]) -> Result:
        """`work` on a thread of its own, while the elapsed time is shown."""
        results: list[Result] = []
        errors: list[BaseException] = []

        def target() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)

        begin = time.monotonic()
        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        self._progress.show(text)
        while thread.is_alive():
            thread.join(0.1)
            self._progress.tick(f"{text}: {time.monotonic() - begin:.1f} s")
        if errors:
            if isinstance(errors[0], OSError):
                raise UnavailableError(f"the connection to the daemon broke: {errors[0]}") from errors[0]
            raise errors[0]
        return results[0]


def _stored_bytes(server: Server) -> int:
    """Bytes in the warm tier once nothing waits to be written."""
    deadline = time.monotonic() + WRITE_TIMEOUT
    while True:
        stats: dict[str, Any] = server.get("/cache/stats")
        if not stats.get("queue", {}).get("nodes") or time.monotonic() > deadline:
            return int(stats.get("warm", {}).get("bytes", 0))
        time.sleep(0.1)

"""The `homeprefixd` command: its groups, and the one place where an error becomes a line and an exit code.

Starting up is cheap on purpose: commands import the rooms that they use when they run.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from .. import __version__
from ..errors import HomeprefixdError
from ..program import program
from .bench import bench
from .cache import ls, purge, stats
from .config import config
from .demo import demo
from .explain import explain
from .model import model
from .serve import serve
from .simulate import simulate
from .top import top
from .transfer import export, import_
from .verify import compact, verify
from .warming import match, pin, unpin, warm

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""

BROKEN_PIPE = 141
"""Exit code when the reader of the output has left: 128 + SIGPIPE."""


MAX_MESSAGE = 1200
"""Letters of an error's line."""


class ReaderLeftError(Exception):
    """Nobody reads our output any more (`| head`). Not an OSError: click would end the process on that itself."""


class Commands(click.Group):
    """Lists its commands as they were added: what one needs first comes first."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        try:
            return super().make_context(*args, **more)  # prints --help and --version
        except BrokenPipeError as error:
            raise ReaderLeftError from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise ReaderLeftError from error


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="homeprefixd", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """A llama.cpp home AI server whose long prompts cost nothing the second time."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for _command in (
    serve,
    demo,
    stats,
    top,
    ls,
    warm,
    match,
    pin,
    unpin,
    export,
    import_,
    explain,
    purge,
    verify,
    compact,
    model,
    config,
    bench,
    simulate,
):
    cli.add_command(_command)


def run(arguments: Sequence[str]) -> int:
    """Run one command; the process's exit code. Everything that goes wrong is one line on stderr."""
    try:
        result = cli.main(list(arguments), prog_name=program(), standalone_mode=False)
        sys.stdout.flush()
    except HomeprefixdError as error:
        return _complain(error.message, error.exit_code)
    except click.ClickException as error:
        return _complain(_click_message(error), 2)
    except (click.Abort, KeyboardInterrupt):
        with contextlib.suppress(OSError):
            print("homeprefixd: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ReaderLeftError, BrokenPipeError):
        _forget_stdout()
        return BROKEN_PIPE
    except OSError as error:
        if os.environ.get("HOMEPREFIXD_TRACEBACK") == "1":
            raise
        place = f"{error.filename}: " if error.filename else ""
        return _complain(f"{place}{error.strerror or error}", 1)
    except Exception as error:
        if os.environ.get("HOMEPREFIXD_TRACEBACK") == "1":
            raise
        name = type(error).__name__
        return _complain(f"unexpected {name}: {error} (HOMEPREFIXD_TRACEBACK=1 shows where)", 1)
    return result if isinstance(result, int) else 0


def _complain(message: str, code: int) -> int:
    text = " ".join(message.split())
    if len(text) > MAX_MESSAGE:  # a path may have thousands of letters
        text = f"{text[: MAX_MESSAGE // 2]} ... {text[-MAX_MESSAGE // 2 :]}"
    with contextlib.suppress(OSError):
        print(f"homeprefixd: error: {text}", file=sys.stderr)
    return code


def _click_message(error: click.ClickException) -> str:
    message = error.format_message()
    if isinstance(error, click.UsageError) and error.ctx is not None:
        message = f"{message.rstrip('.')}; see `{error.ctx.command_path} --help`"
    return message


def _forget_stdout() -> None:
    """The interpreter flushes stdout when it ends; with the reader gone that would be a message of its own."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_standard_streams() -> None:
    """A program that starts us with one of them closed means that it needs none: as if it were /dev/null."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number, inheritable=True)
                os.close(descriptor)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  # for as long as the process lives


def _let_everything_be_printed() -> None:
    """What an encoding lacks (of ASCII or Latin-1: an ellipsis, a bar, a prompt's letters) is printed as `?`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def main() -> None:
    """Entry point of the console script."""
    _open_standard_streams()
    _let_everything_be_printed()
    sys.exit(run(sys.argv[1:]))

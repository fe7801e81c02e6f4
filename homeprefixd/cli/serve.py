"""`serve`: run the daemon in the foreground and say what it is doing."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, TextIO

import click

from .output import ProgressLine
from .settings import SETTING_FLAGS, file_for, json_flag, load_settings, setting_flags

if TYPE_CHECKING:
    from ..daemon import DaemonState

PROGRESS_STEP = 0.25
"""Of loading a model: how often it is told where nobody watches a line change."""


@click.command()
@setting_flags(*SETTING_FLAGS)
@json_flag
def serve(as_json: bool, **given: str | None) -> int:
    """Serve a model until Ctrl-C or SIGTERM.

    SIGHUP (`systemctl reload`) has the settings read again; what cannot change while it runs is named in the log.
    Settings come from a file, HOMEPREFIXD_* variables and these flags, the last one winning; see `homeprefixd config
    show --origin`. Sizes are written as 20GiB, 500MB or 10% (of memory, of the disk). With --json, each change of state
    is a line of JSON on stdout.
    """
    loaded = load_settings(given)
    from .. import daemon
    from ..patient_stream import PatientStream, patient

    log = patient(sys.stderr)
    try:
        reporter = JsonReporter(sys.stdout) if as_json else Reporter(log)
        return daemon.run(
            loaded.config,
            on_state=reporter,
            log=log,
            load=lambda: load_settings(given).config,
            settings_file=lambda: file_for(given),
        )
    finally:
        if isinstance(log, PatientStream):
            log.drain()


class Reporter:
    """Says states to a person: one changing line on a terminal, some lines elsewhere, and last the URL."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._line = ProgressLine(stream)
        self._told: tuple[str, str, int] | None = None

    def __call__(self, state: DaemonState) -> None:
        text = f"homeprefixd: {state.message}"
        step = 0
        if state.phase == "loading":
            step = int(state.progress / PROGRESS_STEP)
            if state.message.startswith("loading"):
                text += f" {state.progress:.0%}"
            self._line.tick(text)
        if (state.phase, state.message, step) == self._told:
            return
        self._told = state.phase, state.message, step
        if state.phase == "ready":
            self._line.clear()
            print(text, file=self._stream, flush=True)
        else:
            self._line.show(text)


class JsonReporter:
    """Says states to a program, a line of JSON each."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._told: tuple[str, str, int] | None = None

    def __call__(self, state: DaemonState) -> None:
        new = state.phase, state.message, int(state.progress / PROGRESS_STEP) if state.phase == "loading" else 0
        if new == self._told:
            return
        self._told = new
        self._stream.write(json.dumps(dataclasses.asdict(state)) + "\n")
        self._stream.flush()

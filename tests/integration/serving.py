"""A real daemon with a configuration of its own, as a process, and a client of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class Served:
    """A daemon that runs."""

    url: str
    process: subprocess.Popen[str]
    log: Path

    def ask(self, path: str, body: dict[str, Any] | None = None, timeout: float = 120.0) -> tuple[int, Any]:
        """Status and JSON of a reply."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with OPENER.open(request, timeout=timeout) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def chat(self, model: str, text: str, **more: Any) -> Any:
        """The reply to a short chat; it must go well."""
        messages = [{"role": "user", "content": text}]
        body = {"model": model, "messages": messages, "max_tokens": 4, "temperature": 0, **more}
        status, reply = self.ask("/v1/chat/completions", body)
        assert status == 200, f"{reply}\n{self.log.read_text()}"
        return reply

    def details(self, model: str) -> Any:
        """What the daemon knows of a model."""
        return next(one for one in self.ask("/models/details")[1]["models"] if one["id"] == model)

    def worker(self, model: str) -> int:
        """The process of a loaded model."""
        workers = self.ask("/health")[1]["workers"]
        return int(next(one["pid"] for one in workers if one["alias"] == model))


@contextlib.contextmanager
def serve(directory: Path, config: str) -> Iterator[Served]:
    """`homeprefixd serve` with this configuration file, once it is ready; ended with SIGTERM, which must go well."""
    file = directory / "config.toml"
    file.write_text(f'{config}\n[server]\nport = 0\n[log]\nlevel = "info"\n')
    command = [sys.executable, "-m", "homeprefixd", "serve", "--json", "--config", str(file)]
    log = directory / "log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [*command, "--cache-dir", str(directory / "cache")],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        ) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                state = json.loads(line)
                if state["phase"] == "ready":
                    break
            else:
                raise AssertionError(f"it ended: {log.read_text()}")
            yield Served(state["url"], process, log)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, log.read_text()
            assert "Traceback" not in log.read_text()
        finally:
            process.kill()

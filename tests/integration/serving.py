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
    key: str = ""  # sent with each request

    def request(self, path: str, body: Any = None, **headers: str) -> urllib.request.Request:
        """A request that is still to be sent; a GET without `body`."""
        data = None if body is None else json.dumps(body).encode()
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **key, **headers})

    def ask(self, path: str, body: dict[str, Any] | None = None, timeout: float = 120.0) -> tuple[int, Any]:
        """Status and JSON of a reply."""
        try:
            with OPENER.open(self.request(path, body), timeout=timeout) as reply:
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


def small_config(model: Path, embedder: Path | None = None, *, template: Path | None = None) -> str:
    """Of a small house: `model` as `demo`, and `embedder` beside it. `template`: in place of the model's own."""
    chat = f"chat_template = {json.dumps(str(template))}\n" if template else ""
    main = f'[model]\npath = {json.dumps(str(model))}\nalias = "demo"\nctx = 2048\nparallel = 2\n{chat}'
    other = f'[[models.list]]\npath = {json.dumps(str(embedder))}\nalias = "embedder"\n' if embedder else ""
    return f'{main}{other}[cache]\nhot = "256MiB"\nwarm = "256MiB"\n'


@contextlib.contextmanager
def serve(directory: Path, config: str, key: str = "") -> Iterator[Served]:
    """`homeprefixd serve` with this configuration file, once it is ready; ended with SIGTERM, which must go well.

    `key`: the one API key that it takes, if any.
    """
    file = directory / "config.toml"
    keys = directory / "keys.toml"
    keys.write_text(f'[[key]]\nname = "tests"\nkey = "{key}"\nadmin = true\n' if key else "")
    named = f"keys_file = {json.dumps(str(keys))}\n" if key else ""
    file.write_text(f'{config}\n[server]\nport = 0\n{named}[log]\nlevel = "info"\n')
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
            yield Served(state["url"], process, log, key)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, log.read_text()
            assert "Traceback" not in log.read_text()
        finally:
            process.kill()

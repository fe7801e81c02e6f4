"""A daemon's admin API on a real socket, with answers that a test sets, and the command as a function."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from homeprefixd.cli.main import run


@dataclass
class Result:
    """What one run of the command left."""

    code: int
    out: str
    err: str


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Result]:
    """`homeprefixd ARGS` in this process, in a home of its own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "CACHE_DIRECTORY", "HOMEPREFIXD_PROGRAM"):
        monkeypatch.delenv(name, raising=False)

    def runner(*arguments: str) -> Result:
        capsys.readouterr()
        code = run(arguments)
        said = capsys.readouterr()
        return Result(code, said.out, said.err)

    return runner


@dataclass
class Daemon:
    """The other end of the admin API: `answers` by method and path, `asked` in order."""

    url: str = ""
    answers: dict[str, tuple[int, Any]] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)  # the headers that came with them
    agents: set[str | None] = field(default_factory=set)  # what those who asked call themselves


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    state = Daemon()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            data = self.rfile.read(length)
            is_json = self.headers.get("Content-Type") == "application/json"
            body = (json.loads(data) if is_json else data) if length else None
            state.asked.append((f"{self.command} {self.path}", body))
            state.keys.append(self.headers.get("Authorization"))
            state.agents.add(self.headers.get("User-Agent"))
            status, reply = state.answers.get(f"{self.command} {self.path.split('?')[0]}", (404, {}))
            payload = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_POST = answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    state.answers["GET /health"] = 200, {"status": "ok"}
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

"""`model pull` from a server that behaves as Hugging Face's does, also where it is cut off."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WHOLE = b"GGUF" + os.urandom(1 << 20) * 24
"""More than two of the pieces that huggingface_hub writes (10 MiB)."""


@dataclass
class HubServer:
    """`files` of the repository `owner/name`; with `stall`, an answer stops in the middle, until the client goes; with
    `damage`, its last byte is another one."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: list[str] = field(default_factory=list)
    stall: bool = False
    damage: bool = False


@pytest.fixture
def hub() -> Iterator[HubServer]:
    state = HubServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            if self.path.startswith("/api/models/owner/name"):
                siblings = [{"rfilename": name} for name in state.files]
                tree = [{"type": "file", "path": n, "size": len(d), "oid": "2" * 40} for n, d in state.files.items()]
                about = {"id": "owner/name", "sha": "1" * 40, "siblings": siblings}
                self.reply(json.dumps(tree if "/tree/" in self.path else about).encode(), body)
            elif self.path.startswith("/owner/name/resolve/") and self.path.rpartition("/")[2] in state.files:
                self.file(state.files[self.path.rpartition("/")[2]], body)
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def reply(self, data: bytes, body: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)

        def file(self, data: bytes, body: bool) -> None:
            asked = self.headers.get("Range", "")
            start = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
            self.send_response(206 if asked else 200)
            self.send_header("X-Repo-Commit", "1" * 40)
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("Content-Length", str(len(data) - start))
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            if not body:
                return
            state.ranges.append(asked)
            if state.stall:
                self.wfile.write(data[start : start + (len(data) - start) // 2])
                self.connection.recv(1)  # returns when the client has gone
                self.close_connection = True
            elif state.damage:
                self.wfile.write(data[start:-1] + bytes([data[-1] ^ 1]))
            else:
                self.wfile.write(data[start:])

        def log_message(self, *_: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            pass

    server = Quiet(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Pull:
    """`homeprefixd model pull ARGS` in a process: huggingface_hub reads its variables when it is imported."""

    def __init__(self, url: str, home: Path) -> None:
        self._url, self._home = url, home

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "homeprefixd", "model", "pull", *arguments, "--to", str(self._home / "models")]
        environment = {
            **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
            "HOME": str(self._home),
            "HF_ENDPOINT": self._url,
            "PYTHONPATH": str(ROOT),
            **variables,
        }
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    def __call__(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        with self.start(*arguments, **variables) as process:
            out, err = process.communicate(timeout=60)
            return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture
def pull(hub: HubServer, tmp_path: Path) -> Pull:
    return Pull(hub.url, tmp_path)


def test_a_file(pull: Pull, hub: HubServer, tmp_path: Path) -> None:
    hub.files = {"README.md": b"x", "m-Q4.gguf": WHOLE, "m-Q8.gguf": b"GGUF8"}
    done = pull("owner/name", "m-Q4.gguf", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "m-Q4"
    assert (tmp_path / "models" / "m-Q4.gguf").read_bytes() == WHOLE
    which = pull("owner/name")
    assert which.returncode == 4
    assert "m-Q4.gguf, m-Q8.gguf" in which.stderr


def test_the_only_one_with_all_its_parts(pull: Pull, hub: HubServer, tmp_path: Path) -> None:
    hub.files = {f"big-0000{n}-of-00002.gguf": b"GGUF" + bytes([n]) * 1000 for n in (1, 2)}
    done = pull("owner/name")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("big: 2.0 KiB in 2 files, ")
    assert len(list((tmp_path / "models").glob("*.gguf"))) == 2


def test_what_was_cut_off_goes_on(pull: Pull, hub: HubServer, tmp_path: Path) -> None:
    hub.files, hub.stall = {"m.gguf": WHOLE}, True
    part = tmp_path / "models" / ".m.gguf.part"
    with pull.start("owner/name", "m.gguf") as process:
        deadline = time.monotonic() + 60
        while not part.exists() or part.stat().st_size < 10 << 20:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        busy = pull("owner/name", "m.gguf")
        assert (busy.returncode, "another process" in busy.stderr) == (5, True), busy.stderr
        process.kill()
    hub.stall = False
    done = pull("owner/name", "m.gguf")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "models" / "m.gguf").read_bytes() == WHOLE
    assert not part.exists()
    assert hub.ranges[0] == ""
    assert int(hub.ranges[-1].removeprefix("bytes=").split("-")[0]) >= 10 << 20
    count = len(hub.ranges)
    assert pull("owner/name", "m.gguf").returncode == 0  # it is there
    hub.files = {"m.gguf": b"GGUF new"}
    assert len(hub.ranges) == count
    assert pull("owner/name", "m.gguf").returncode == 0
    assert (tmp_path / "models" / "m.gguf").read_bytes() == b"GGUF new"


def test_what_came_damaged(pull: Pull, hub: HubServer, tmp_path: Path) -> None:
    """Neither a transfer nor a disk that changes a byte makes a model of it; the next attempt mends it."""
    hub.files, hub.damage = {"m.gguf": WHOLE}, True
    first = pull("owner/name", "m.gguf")
    assert (first.returncode, "came damaged" in first.stderr) == (5, True), first.stderr
    assert not (tmp_path / "models" / "m.gguf").exists()
    hub.damage = False
    assert pull("owner/name", "m.gguf").returncode == 0
    path = tmp_path / "models" / "m.gguf"
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"rot")
    assert pull("owner/name", "m.gguf").returncode == 0
    assert path.read_bytes() == WHOLE


def test_what_is_not_there(pull: Pull, hub: HubServer) -> None:
    hub.files = {"m.gguf": WHOLE}
    for arguments, code, said in (
        (("owner/name", "other.gguf"), 4, "it has m.gguf"),
        (("nobody/nothing", "m.gguf"), 4, "no such repository"),
        (("a b", "m.gguf"), 4, "is no name of a repository"),
    ):
        done = pull(*arguments)
        assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    away = pull("owner/name", "m.gguf", HF_ENDPOINT="http://127.0.0.1:9")
    assert away.returncode == 5
    assert "cannot be fetched from http://127.0.0.1:9" in away.stderr

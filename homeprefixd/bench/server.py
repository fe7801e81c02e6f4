"""Servers under measurement: this daemon or a peer, as a process of its own on a free loopback port."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config_sources import OWNER_FD
from ..errors import UnavailableError


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nothing listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Server:
    """A process that serves an OpenAI-compatible API at `url`; its output goes to `log`, a file.

    `argv` is the command without the address. `owned`: it is a daemon of ours, and ends when this process does, however
    that ends. Proxies in the environment are not used: the server is on this machine.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        port: int | None = None,
        env: dict[str, str] | None = None,
        owned: bool = False,
    ):
        self.name = name
        self.argv = list(argv)
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.env = {**os.environ, **(env or {})}
        self.process: subprocess.Popen[bytes] | None = None
        self._owned = owned
        self._lifeline: int | None = None  # our end of a pipe: the kernel closes it with this process
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        handle, log = tempfile.mkstemp(prefix=f"{name}-", suffix=".log")
        os.close(handle)
        self.log = Path(log)

    def start(self, timeout: float = 120.0) -> float:
        """Start it and wait until `/health` answers 200; the seconds that took. Raises UnavailableError."""
        begin = time.monotonic()
        env, theirs = self.env, []
        if self._owned:
            self._cut_lifeline()
            reading, self._lifeline = os.pipe()
            env, theirs = {**env, OWNER_FD: str(reading)}, [reading]
        try:
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(
                    [*self.argv, "--host", "127.0.0.1", "--port", str(self.port)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=env,
                    pass_fds=theirs,
                    start_new_session=True,
                )
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        while time.monotonic() - begin < timeout:
            if self.process.poll() is not None:
                raise UnavailableError(f"{self.name} ended with {self.process.returncode}: {self.last_words()}")
            if self.healthy():
                return time.monotonic() - begin
            time.sleep(0.02)
        self.kill()
        raise UnavailableError(f"{self.name} was not ready after {timeout:.0f} s: {self.last_words()}")

    def healthy(self) -> bool:
        """Does `/health` answer 200 now?"""
        try:
            with self._open(f"{self.url}/health", timeout=2) as reply:
                return bool(reply.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def get(self, path: str) -> Any:
        """GET `path`, as JSON."""
        with self._open(f"{self.url}{path}", timeout=60) as reply:
            return json.load(reply)

    def read(self, path: str) -> bytes:
        """GET `path`, whatever it is."""
        with self._open(f"{self.url}{path}", timeout=60) as reply:
            data: bytes = reply.read()
            return data

    def post(self, path: str, body: Any) -> Any:
        """POST `body` as JSON to `path`; the reply as JSON."""
        request = urllib.request.Request(
            f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with self._open(request, timeout=600) as reply:
            return json.load(reply)

    def last_words(self, lines: int = 8) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, timeout: float = 60.0) -> int:
        """SIGTERM and wait; its exit status. SIGKILL after `timeout`."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise UnavailableError(f"{self.name} did not stop within {timeout:.0f} s") from None
        self.process = None
        self._cut_lifeline()
        return status

    def kill(self) -> None:
        """SIGKILL and wait."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait()
            self.process = None
        self._cut_lifeline()

    def _cut_lifeline(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        with contextlib.suppress(OSError):
            self.log.unlink()


def homeprefixd(cache_dir: Path | str, *flags: str, env: dict[str, str] | None = None) -> Server:
    """This package's own daemon over `cache_dir`."""
    argv = [sys.executable, "-m", "homeprefixd", "serve", "--cache-dir", str(cache_dir), *flags]
    return Server("homeprefixd", argv, env=env, owned=True)


def llama_server(binary: str, model: str, *flags: str) -> Server:
    """The peer: llama.cpp's own server, with `model`."""
    return Server("llama-server", [binary, "--model", model, *flags])

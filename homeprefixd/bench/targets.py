"""Whom a run asks: our daemon or llama-server, started here with an empty cache, or any OpenAI-compatible URL.

Blocking calls throughout; a run calls them on a thread.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped, unused-ignore]

from ..errors import ConfigError, UnavailableError
from .server import Server, homeprefixd, llama_server

OURS, PEER, OTHER = "homeprefixd", "llama-server", "url"

_STOP_TIMEOUT = 60.0  # seconds
_PEER_PATIENCE = 5.0  # seconds
_STATS_TIMEOUT = 10.0  # seconds


def api_base(url: str) -> str:
    """The URL below which `/chat/completions` lies: `host:8080` and `http://host:8080/` are `http://host:8080/v1`.

    A path of one's own is kept. Raises ConfigError.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url!r} is no URL: give one such as http://127.0.0.1:8080/v1.")
    path = parts.path.rstrip("/") or "/v1"
    return parts._replace(path=path, query="", fragment="").geturl()


@dataclass(frozen=True)
class Memory:
    """Of all processes of a target, in bytes; shared memory is counted once in `pss`, in each process in `rss`."""

    rss: int
    pss: int
    processes: int


class Target:
    """One server under measurement. `make` builds a fresh one (number of the start -> Server); None: not ours to start.

    `kind`: OURS, PEER or OTHER. `base` is set by `fresh` where `make` is given.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        *,
        base: str = "",
        make: Callable[[int], Server] | None = None,
        api_key: str = "",
        model: str = "",
    ) -> None:
        self.name = name
        self.kind = kind
        self.base = base
        self.api_key = api_key
        self.model = model
        self._make = make
        self._made = 0
        self._server: Server | None = None

    @property
    def managed(self) -> bool:
        """Can it be started and stopped here?"""
        return self._make is not None

    def fresh(self) -> None:
        """Start it, new, with nothing cached. Raises UnavailableError, ConfigError."""
        if self._make is None:
            raise ConfigError(f"{self.name} is not started by this command, so it cannot be started afresh.")
        self.close()
        self._made += 1
        self._server = self._make(self._made)
        self.base = f"{self._server.url}/v1"
        self._server.start()

    @property
    def server(self) -> Server:
        """The running server. Raises ConfigError where there is none that was started here."""
        if self._server is None:
            raise ConfigError(f"{self.name} is not started by this command, so it cannot be restarted.")
        return self._server

    def stop(self) -> None:
        """End it as a service manager does: SIGTERM, then SIGKILL after a minute.

        llama-server waits for clients that wait for it; a second SIGTERM after some seconds ends it, as it says itself.
        """
        process = self.server.process
        if self.kind == PEER and process is not None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PEER_PATIENCE)
        with contextlib.suppress(UnavailableError):  # it was killed
            self.server.stop(_STOP_TIMEOUT)

    def start(self) -> None:
        """Start it again, with what it has kept; returns when it serves. Raises UnavailableError."""
        self.server.start()

    def close(self) -> None:
        """End what runs and remove its log."""
        if self._server is not None:
            self.stop()
            server, self._server = self._server, None
            server.__exit__(None, None, None)

    def died(self) -> str:
        """Why its process has ended by itself; "" if it has not."""
        process = self._server.process if self._server is not None else None
        if self._server is None or process is None or process.poll() is None:
            return ""
        return f"{self.name} ended with {process.returncode}: {self._server.last_words(3)}"

    def memory(self) -> Memory | None:
        """What its processes hold now; None where it was not started here, or is gone."""
        process = self._server.process if self._server is not None else None
        if process is None:
            return None
        try:
            parent = psutil.Process(process.pid)
            pids = [process.pid, *(child.pid for child in parent.children(recursive=True))]
        except psutil.Error:
            return None
        sums = {"Rss": 0, "Pss": 0}
        for pid in pids:
            with contextlib.suppress(OSError, ValueError):
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    name, _, value = line.partition(":")
                    if name in sums:
                        sums[name] += int(value.split()[0]) << 10
        return Memory(sums["Rss"], sums["Pss"], len(pids)) if sums["Rss"] else None

    def stats(self) -> dict[str, Any] | None:
        """`/cache/stats` where the target has it."""
        if self.kind == PEER or not self.base:
            return None
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            asked = urllib.request.Request(f"{self.base.removesuffix('/v1')}/cache/stats", headers=headers)
            with opener.open(asked, timeout=_STATS_TIMEOUT) as reply:
                document = json.load(reply)
        except (OSError, ValueError):
            return None
        return document if isinstance(document, dict) else None


class Workplace:
    """A directory of this run's own below `parent` (None: the system's temporary one); use in `with`.

    Makes the targets, ends them all and removes everything at the end.
    """

    def __init__(self, parent: Path | None = None) -> None:
        if parent is not None and not parent.is_dir():
            raise ConfigError(f"--work-dir {str(parent)!r} is no directory.")
        self._directory = Path(tempfile.mkdtemp(prefix="homeprefixd-bench-", dir=parent))
        self._targets: list[Target] = []

    def __enter__(self) -> Workplace:
        return self

    def __exit__(self, *_: object) -> None:
        for target in self._targets:
            target.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def ours(self, model: str, *, ctx: int, threads: int, parallel: int = 0, flags: Sequence[str] = ()) -> Target:
        """This daemon, with a new cache directory for each fresh start. Settings of this user do not count.

        `parallel` 0: as it chooses itself.
        """
        nothing = self._directory / "config.toml"
        nothing.touch()
        common = ["--config", str(nothing), "--model", model, "--ctx", str(ctx), "--threads", str(threads)]
        common += ["--parallel", str(parallel)] if parallel else []

        def make(number: int) -> Server:
            previous = self._directory / f"cache-{number - 1}"
            shutil.rmtree(previous, ignore_errors=True)
            server = homeprefixd(self._directory / f"cache-{number}", *common, *flags)
            server.env = {name: value for name, value in server.env.items() if not name.startswith("HOMEPREFIXD_")}
            return server

        return self._added(Target("homeprefixd", OURS, make=make))

    def peer(
        self, binary: str, model: str, *, ctx: int, threads: int, parallel: int, flags: Sequence[str] = ()
    ) -> Target:
        """llama-server with `parallel` slots of `ctx` tokens each, and its default cache in RAM."""
        if not Path(binary).is_file():
            raise ConfigError(f"--llama-server {binary!r} is no file.")
        common = ["--threads", str(threads), "--ctx-size", str(ctx * parallel), "--parallel", str(parallel)]

        def make(_number: int) -> Server:
            server = llama_server(binary, model, *common, "--no-webui", *flags)
            server.env = {name: value for name, value in server.env.items() if not name.startswith("LLAMA_")}
            return server

        return self._added(Target("llama-server", PEER, make=make))

    def url(self, url: str, *, api_key: str = "", model: str = "") -> Target:
        """A server that runs already."""
        base = api_base(url)
        return self._added(Target(urlsplit(base).netloc, OTHER, base=base, api_key=api_key, model=model))

    def _added(self, target: Target) -> Target:
        self._targets.append(target)
        return target

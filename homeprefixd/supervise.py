"""Child processes: start, log lines, last words, restart with back-off, end.

Knows what a process is and that it holds one end of a socket pair; not what is said over it. Everything here runs on
the daemon's event loop, in its main thread: children are tied to the life of the thread that started them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import site
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .child import PARENT_PID

LAST_WORDS = 20
"""Lines of a child's stderr that are kept to explain its end."""

MAX_LINE = 2000
"""Bytes of one line of a child's stderr; the rest of the line is dropped."""

TERM_GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL."""

_LEVELS = {name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}
_TELLING = re.compile(r"GGML_ASSERT|GGML_ABORT|terminate called|MemoryError|\bassert(ion)?\b.*fail", re.IGNORECASE)
_NOISE = re.compile(r"(Fatal Python error|Current thread|Thread 0x|Stack \(most recent|  File |Extension modules|\s*$)")
_DROPPED_PREFIXES = ("LLAMA_", "GGML_")
_DROPPED = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")

logger = logging.getLogger(__name__)


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package. The working directory is not on its import path."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a child: without what changes llama.cpp's numbers and without systemd's messages to the daemon."""
    kept = {n: v for n, v in environ.items() if not n.startswith(_DROPPED_PREFIXES) and n not in _DROPPED}
    kept |= {"GGML_NO_BACKTRACE": "1", "MALLOC_ARENA_MAX": "2", PARENT_PID: str(os.getpid())}
    home = str(Path(__file__).resolve().parent.parent)
    if home not in (*site.getsitepackages(), site.getusersitepackages()):  # run from a checkout
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, (home, environ.get("PYTHONPATH", ""))))
    return kept


@dataclass(frozen=True)
class Exit:
    """How a child ended. `code` as in `subprocess`: negative for a signal. `words`: its last lines, oldest first."""

    code: int
    words: tuple[str, ...] = ()
    because: str = ""
    """Why the daemon killed it, if it did."""

    @property
    def telling_line(self) -> str:
        """The line of its last words that says most: an assertion, else the last one that is no traceback's; or ""."""
        for line in self.words:
            if _TELLING.search(line):
                return line
        return next((line for line in reversed(self.words) if not _NOISE.match(line)), "")

    def __str__(self) -> str:
        """In words: "killed by SIGKILL", "exit status 3", "SIGABRT: GGML_ASSERT(...) failed"."""
        if self.because:
            return self.because
        if self.code >= 0:
            return f"exit status {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        if -self.code in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            return f"killed by {name}"
        return f"{name}: {self.telling_line}" if self.telling_line else name


class Backoff:
    """Seconds to wait before the next start: `first`, doubling to `limit`; from `first` again after a good run."""

    def __init__(self, first: float = 0.2, limit: float = 30.0, good_after: float = 60.0) -> None:
        self._first = first
        self._limit = limit
        self._good_after = good_after
        self._next = first

    def after(self, ran_for: float) -> float:
        """The wait after a run of `ran_for` seconds."""
        if ran_for >= self._good_after:
            self._next = self._first
        wait = self._next
        self._next = min(self._limit, wait * 2)
        return wait


class _LineReader:
    """The daemon's end of a child's stderr: lines are handed on as they come. Survives that a grandchild keeps it."""

    def __init__(self, descriptor: int, on_line: Callable[[str], None]) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._on_line = on_line
        self._line = bytearray()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor, self._read)

    def _read(self) -> bool:
        """True while there may be more."""
        try:
            data = os.read(self._descriptor, 65536)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._descriptor)
            return False
        head, *rest = data.split(b"\n")
        self._line += head[: MAX_LINE - len(self._line)]
        for piece in rest:
            self._emit()
            self._line += piece[:MAX_LINE]
        return True

    def _emit(self) -> None:
        text = self._line.decode(errors="replace").rstrip("\r")
        self._line.clear()
        self._on_line("".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text))

    def close(self) -> None:
        """Take what is still in the pipe, without waiting, and close it."""
        self._loop.remove_reader(self._descriptor)
        for _ in range(64):  # a grandchild that writes without end does not hold us
            if not self._read():
                break
        if self._line:
            self._emit()
        os.close(self._descriptor)


class Child:
    """One running process. `socket` is the daemon's end of the pair; who takes it closes it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, sock: socket.socket, descriptor: int) -> None:
        self.name = name
        self.pid = process.pid
        self.socket = sock
        self.words: deque[str] = deque(maxlen=LAST_WORDS)
        self._process = process
        self._log = logging.getLogger(f"homeprefixd.{name}")
        self._because = ""
        self._held: list[tuple[int, str]] | None = None
        self._lines = _LineReader(descriptor, self._take_line)

    @classmethod
    async def start(cls, name: str, command: Callable[[int], Sequence[str]], environment: Mapping[str, str]) -> Child:
        """Start `command(fd)`, where `fd` is the number of the child's end of the socket pair. Raises OSError."""
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *command(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=writing,
                pass_fds=(theirs.fileno(),),
                env=dict(environment),
                start_new_session=True,  # a terminal's Ctrl-C reaches the daemon only
            )
        except BaseException:
            ours.close()
            os.close(reading)
            raise
        finally:
            theirs.close()
            os.close(writing)
        return cls(name, process, ours, reading)

    def _take_line(self, line: str) -> None:
        level, _, text = line.partition(" ")
        if level not in _LEVELS:
            level, text = "INFO", line
        if text.strip():
            self.words.append(text)
        if self._held is not None and _LEVELS[level] >= logging.ERROR:
            self._held.append((_LEVELS[level], text))
        else:
            self._log.log(_LEVELS[level], "%s", text)

    def hold_errors(self) -> None:
        """Log its errors at `release_errors` only: the one that ends it may be told as an error of our own."""
        self._held = []

    def release_errors(self) -> None:
        """Log what was held, and from now on at once."""
        for level, text in self._held or ():
            self._log.log(level, "%s", text)
        self._held = None

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> Exit:
        """Wait for its end. Call it once."""
        code = await self._process.wait()
        self._lines.close()
        return Exit(code, tuple(self.words), self._because)

    def kill(self, because: str = "") -> None:
        """SIGKILL now. `because` is what its Exit will say."""
        if self.running:
            self._because = self._because or because
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def terminate(self) -> None:
        """SIGTERM now."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()


class Supervisor:
    """Keeps one child running.

    `started(child)` is called after each start and takes `child.socket`; `ended(exit, wait)` after each end, with the
    seconds until the next start, and is awaited before it. Both belong to whoever talks to the child.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        *,
        started: Callable[[Child], None],
        ended: Callable[[Exit, float], Awaitable[None]],
        environ: Mapping[str, str],
        backoff: Backoff | None = None,
    ) -> None:
        self.name = name
        self.restarts = 0
        self._command = command
        self._started = started
        self._ended = ended
        self._environ = environ
        self._backoff = backoff or Backoff()
        self._child: Child | None = None
        self._stopping = asyncio.Event()
        self._over = asyncio.Event()
        self._launched = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def stopping(self) -> bool:
        """Was `stop` called?"""
        return self._stopping.is_set()

    @property
    def pid(self) -> int | None:
        """Of the running child."""
        return self._child.pid if self._child is not None and self._child.running else None

    def start(self) -> None:
        """Begin. Once."""
        self._task = asyncio.create_task(self._keep(), name=f"supervise {self.name}")

    async def launched(self) -> None:
        """Returns when the first process was started, or could not be."""
        await self._launched.wait()

    def kill(self, because: str = "") -> None:
        """SIGKILL the running child; it is started again unless `stop` was called."""
        if self._child is not None:
            self._child.kill(because)

    async def stop(self, ask: Callable[[], None], grace: float) -> None:
        """End the child for good: `ask` it, after `grace` seconds SIGTERM, then SIGKILL. Returns when it is gone."""
        self._stopping.set()
        if self._task is None:
            return
        if self._child is not None and self._child.running:
            ask()
        for wait, harder in ((grace, self._terminate), (TERM_GRACE, self._kill_late), (None, None)):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), wait)
                break
            if harder is not None:
                harder()
        await self._task

    def _terminate(self) -> None:
        if self._child is not None:
            logger.warning("%s does not stop by itself: SIGTERM", self.name)
            self._child.terminate()

    def _kill_late(self) -> None:
        if self._child is not None:
            logger.warning("%s does not stop on SIGTERM: SIGKILL", self.name)
            self._child.kill()

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while not self._stopping.is_set():
                begun = loop.time()
                end = await self._run_once()
                wait = self._backoff.after(loop.time() - begun)
                await self._ended(end, wait)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), wait)
                self.restarts += 1
        finally:
            self._over.set()

    async def _run_once(self) -> Exit:
        try:
            self._child = child = await Child.start(self.name, self._command, child_environment(self._environ))
        except OSError as error:
            self._launched.set()
            return Exit(127, (str(error),), because=f"it cannot be started: {error}")
        logger.debug("%s started, process %d", self.name, child.pid)
        if self._stopping.is_set():
            child.kill()
        self._started(child)
        self._launched.set()
        return await child.wait()

"""The throw-away process in which a client's grammar is compiled first, and its other end in the worker.

    python -m homeprefixd.engine.compiling

What crashes, hangs or eats memory there is a refused request here. It takes grammars on stdin and answers on stdout,
each as a length (u32 LE) and UTF-8; an empty answer is a grammar that compiles. It ends with its parent, when its
stdin ends, and when nothing came for a minute.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import resource
import select
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

from ..child import become_child
from ..errors import RequestError, UnavailableError

_MEMORY = 2 << 30  # bytes of addresses
_STACK = 2 << 20  # bytes: less than the worker's threads have, so what fits here fits there
_IDLE = 60.0  # s
_START = 30.0  # s
_LENGTH = struct.Struct("<I")
_READY = b"\x01"

logger = logging.getLogger(__name__)


class Probe:
    """The worker's end. One thread uses it at a time. `patience`: seconds that compiling may take."""

    def __init__(self, patience: float = 5.0) -> None:
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, grammar: str) -> str:
        """What is wrong with a grammar, in llguidance's words; "" if nothing is.

        Raises RequestError where trying it took too long or ended the process, UnavailableError where none starts.
        """
        data = grammar.encode()
        for last in (False, True):
            process = self._started()
            answer = self._ask(process, data, last)
            if answer is not None:
                return answer
        raise RuntimeError("unreachable")

    def _ask(self, process: subprocess.Popen[bytes], data: bytes, last: bool) -> str | None:
        """The answer; None if the process had just ended for want of work, and not `last`."""
        try:
            stdin, stdout = _pipes(process)
            stdin.write(_LENGTH.pack(len(data)) + data)
            stdin.flush()
            deadline = time.monotonic() + self._patience
            (size,) = _LENGTH.unpack(_read(stdout, _LENGTH.size, deadline))
            return _read(stdout, size, deadline).decode(errors="replace")
        except TimeoutError:
            self.close()
            raise RequestError(
                f"The grammar or schema takes more than {self._patience:g} s to compile: make it simpler.",
                code="grammar_too_complex",
            ) from None
        except (OSError, EOFError) as error:
            status = process.wait(5)
            self.close()
            if status == 0 and not last:
                return None
            logger.info("a grammar ended the process that tried it (status %d)", status)
            raise RequestError(
                "The grammar or schema is too deep or too large to compile: make it simpler.",
                code="grammar_too_complex",
            ) from error

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # what it was not sent
                        pipe.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        home = str(Path(__file__).parent.parent.parent)
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH", ""))))},
        )
        try:
            _read(_pipes(process)[1], len(_READY), time.monotonic() + _START)
        except (TimeoutError, EOFError) as error:
            self.close()
            raise UnavailableError("The process that tries grammars does not start.", retry_after=5) from error
        return process


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("a process without pipes")
    return process.stdin, process.stdout


def _read(pipe: IO[bytes], count: int, deadline: float) -> bytes:
    """Raises TimeoutError, EOFError."""
    data = b""
    while len(data) < count:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        piece = pipe.read1(count - len(data))  # type: ignore[attr-defined]
        if not piece:
            raise EOFError
        data += piece
    return data


# ---------------------------------------------------------------------------------------------------- the process


def main() -> int:
    """Try grammars until nobody asks."""
    become_child("grammar", "warning")
    for limit, value in ((resource.RLIMIT_AS, _MEMORY), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(OSError, ValueError):  # a lower one holds already
            resource.setrlimit(limit, (value, value))
    threading.stack_size(_STACK)
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    from . import limits  # noqa: F401  # loaded before the clock runs

    stdout.write(_READY)
    stdout.flush()
    try:
        while True:
            (size,) = _LENGTH.unpack(_read(stdin, _LENGTH.size, time.monotonic() + _IDLE))
            grammar = _read(stdin, size, time.monotonic() + _IDLE).decode()
            answers: queue.SimpleQueue[str] = queue.SimpleQueue()
            thread = threading.Thread(target=_try, args=(grammar, answers))
            thread.start()
            data = answers.get().encode()
            thread.join()
            stdout.write(_LENGTH.pack(len(data)) + data)
            stdout.flush()
    except (TimeoutError, EOFError, BrokenPipeError):
        return 0


def _try(grammar: str, answers: queue.SimpleQueue[str]) -> None:
    from .limits import validate

    try:
        answers.put(validate(grammar))
    except Exception as error:
        answers.put(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main())

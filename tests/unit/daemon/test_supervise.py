"""Real child processes: how they start, what they say, how they end, when they come back."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from homeprefixd.supervise import MAX_LINE, Backoff, Child, Exit, Supervisor, child_environment, module_command


def script(text: str) -> Callable[[int], list[str]]:
    return lambda fd: [sys.executable, "-c", text, str(fd)]


async def run(text: str) -> tuple[Child, Exit]:
    child = await Child.start("test", script(text), child_environment(os.environ))
    child.socket.close()
    return child, await asyncio.wait_for(child.wait(), 20)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pass", "exit status 0"),
        ("raise SystemExit(3)", "exit status 3"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 15)", "killed by SIGTERM"),
        ("import os; os.abort()", "SIGABRT"),
        (
            "import faulthandler, os, sys; faulthandler.enable()\n"
            "print('m.cpp:7: GGML_ASSERT(n > 0) failed', file=sys.stderr, flush=True); os.abort()",
            "SIGABRT: m.cpp:7: GGML_ASSERT(n > 0) failed",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGBUS)", "SIGBUS"),
    ],
)
async def test_the_end_in_words(text: str, said: str) -> None:
    _child, end = await run(text)
    assert str(end) == said


async def test_errors_can_be_held_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    text = "import sys; print('ERROR bad\\nWARNING odd', file=sys.stderr)"
    child = await Child.start("test", script(text), child_environment(os.environ))
    child.hold_errors()
    child.socket.close()
    end = await asyncio.wait_for(child.wait(), 20)
    assert end.words == ("bad", "odd")
    said = [r.getMessage() for r in caplog.records if r.name == "homeprefixd.test"]
    assert said == ["odd"]
    child.release_errors()
    child.release_errors()
    errors = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "homeprefixd.test"][1:]
    assert errors == [("ERROR", "bad")]


async def test_lines_are_logged_at_their_level_and_the_last_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    text = (
        "import os, sys\nfor i in range(30): print('line', i, file=sys.stderr)\n"
        "print('WARNING careful', file=sys.stderr)\n"
        "print('x' * 100000, file=sys.stderr)\n"
        "os.write(2, b'DEBUG \\xff\\x1b[31m no newline')"
    )
    child, end = await run(text)
    records = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "homeprefixd.test"]
    assert records[0] == ("INFO", "line 0")
    assert ("WARNING", "careful") in records
    assert records[-1] == ("DEBUG", "��[31m no newline")
    assert max(len(text) for _level, text in records) == MAX_LINE
    assert len(records) == 33
    assert len(end.words) == 20
    assert end.words[-3] == "careful"
    assert child.words[-1] == end.words[-1]


async def test_a_grandchild_that_keeps_stderr_open_does_not_hide_the_end() -> None:
    text = "import subprocess; subprocess.Popen(['sleep', '15'])"
    begin = time.monotonic()
    _child, end = await run(text)
    assert end.code == 0
    assert time.monotonic() - begin < 14


async def test_environment_is_cleared_of_what_changes_numbers() -> None:
    given = {"LLAMA_ARG_X": "1", "GGML_CUDA": "1", "NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "3", "HOME": "/h"}
    made = child_environment(given)
    assert not {"LLAMA_ARG_X", "GGML_CUDA", "NOTIFY_SOCKET", "WATCHDOG_USEC"} & made.keys()
    assert made["GGML_NO_BACKTRACE"] == "1"
    assert made["MALLOC_ARENA_MAX"] == "2"
    assert made["HOME"] == "/h"
    assert made["HOMEPREFIXD_PARENT_PID"] == str(os.getpid())


async def test_a_child_finds_this_package_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit(99)")
    monkeypatch.chdir(tmp_path)
    child = await Child.start("test", lambda _fd: module_command("homeprefixd.child"), child_environment({}))
    child.socket.close()
    end = await asyncio.wait_for(child.wait(), 20)
    assert end.code == 0, end.words


async def test_the_child_holds_the_other_end_of_the_pair() -> None:
    text = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).sendall(b'hello')"
    child = await Child.start("test", script(text), child_environment(os.environ))
    await child.wait()
    with child.socket as sock:
        assert sock.recv(10) == b"hello"
        assert sock.recv(10) == b""


def test_backoff_doubles_to_its_limit_and_resets_after_a_good_run() -> None:
    backoff = Backoff()
    waits = [backoff.after(1.0) for _ in range(9)]
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0]
    assert backoff.after(59.9) == 30.0
    assert backoff.after(60.0) == 0.2


class Watch:
    """A supervisor over a script, and what it reported."""

    def __init__(self, command: Callable[[int], list[str]], backoff: Backoff | None = None) -> None:
        self.children: list[Child] = []
        self.ends: list[Exit] = []
        self.changed = asyncio.Event()
        self.supervisor = Supervisor(
            "test", command, started=self.started, ended=self.ended, environ=os.environ, backoff=backoff
        )

    def started(self, child: Child) -> None:
        child.socket.close()
        self.children.append(child)
        self.changed.set()

    async def ended(self, end: Exit, _wait: float) -> None:
        self.ends.append(end)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


SLEEP = "import time; time.sleep(60)"
STUBBORN = "import signal, sys, time; signal.signal(15, signal.SIG_IGN); print('set', file=sys.stderr); time.sleep(60)"


async def test_a_killed_child_is_started_again() -> None:
    watch = Watch(script(SLEEP), Backoff(first=0.01))
    watch.supervisor.start()
    await watch.until(lambda: len(watch.children) == 1)
    os.kill(watch.children[0].pid, signal.SIGKILL)
    await watch.until(lambda: len(watch.children) == 2)
    assert str(watch.ends[0]) == "killed by SIGKILL"
    assert watch.supervisor.pid == watch.children[1].pid != watch.children[0].pid
    assert watch.supervisor.restarts == 1
    watch.supervisor.kill("it hung")
    await watch.until(lambda: len(watch.children) == 3)
    assert str(watch.ends[1]) == "it hung"
    await watch.supervisor.stop(lambda: None, 0)
    assert watch.supervisor.pid is None
    assert len(watch.children) == 3


async def test_a_command_that_does_not_exist_is_tried_again() -> None:
    watch = Watch(lambda _fd: ["/nonexistent/program"], Backoff(first=0.01))
    watch.supervisor.start()
    await watch.until(lambda: len(watch.ends) == 2)
    assert "cannot be started" in str(watch.ends[0])
    await watch.supervisor.stop(lambda: None, 0)


async def test_stop_asks_first_then_terminates_then_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homeprefixd.supervise.TERM_GRACE", 0.2)
    asked: list[int] = []
    polite = Watch(script(SLEEP))
    polite.supervisor.start()
    await polite.until(lambda: bool(polite.children))
    await polite.supervisor.stop(lambda: os.kill(polite.children[0].pid, signal.SIGUSR1), 10)
    assert str(polite.ends[0]) == "SIGUSR1"

    deaf = Watch(script(SLEEP))
    deaf.supervisor.start()
    await deaf.until(lambda: bool(deaf.children))
    await deaf.supervisor.stop(lambda: asked.append(1), 0.05)
    assert str(deaf.ends[0]) == "killed by SIGTERM"

    stubborn = Watch(script(STUBBORN))
    stubborn.supervisor.start()
    await stubborn.until(lambda: bool(stubborn.children))
    while not stubborn.children[0].words:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await stubborn.supervisor.stop(lambda: asked.append(2), 0.05)
    assert str(stubborn.ends[0]) == "killed by SIGKILL"
    assert asked == [1, 2]


async def test_stop_does_not_wait_for_a_backoff() -> None:
    watch = Watch(script("raise SystemExit(1)"), Backoff(first=30))
    watch.supervisor.start()
    await watch.until(lambda: bool(watch.ends))
    begin = time.monotonic()
    await watch.supervisor.stop(lambda: None, 10)
    assert time.monotonic() - begin < 9


async def test_stop_while_the_child_is_being_started() -> None:
    watch = Watch(script(SLEEP))
    watch.supervisor.start()
    await asyncio.sleep(0)
    begin = time.monotonic()
    await watch.supervisor.stop(lambda: None, 10)
    assert time.monotonic() - begin < 9
    assert [str(end) for end in watch.ends] in ([], ["killed by SIGKILL"])

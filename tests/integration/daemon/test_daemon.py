"""The daemon as a program: start, readiness, stop, and that nothing outlives it. Children compute nothing here."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent


class Program:
    """serve.py as a process; its states and log lines are collected by threads."""

    def __init__(
        self,
        directory: Path,
        *,
        server: dict[str, Any] | None = None,
        model: str = "none",
        store: list[str] | None = None,
        worker: list[str] | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        settings = {
            "server": {"port": 0, "grace": 5.0, **(server or {})},
            "model": {"path": model},
            "cache": {"dir": str(directory), "hot": 1 << 20, "warm": 1 << 20},
        }
        self.begin = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "serve.py"), *map(json.dumps, (settings, store or [], worker or []))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        )
        self.states: queue.Queue[dict[str, Any]] = queue.Queue()
        self.log: list[str] = []
        self.threads = [threading.Thread(target=self._states), threading.Thread(target=self._log)]
        for thread in self.threads:
            thread.start()

    def _states(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.states.put(json.loads(line))

    def _log(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            self.log.extend(lines)

    def until(self, phase: str) -> dict[str, Any]:
        while True:
            try:
                state = self.states.get(timeout=20)
            except queue.Empty:
                pytest.fail(f"never {phase}: {self.log}")
            if state["phase"] == phase:
                return state

    def wait(self, seconds: float = 20) -> int:
        code = self.process.wait(seconds)
        for thread in self.threads:
            thread.join(5)
        return code

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def worker(self) -> psutil.Process:
        return next(p for p in self.children() if "fake_worker" in " ".join(p.cmdline()))


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    """Have all ended within `seconds`? One that nobody has reaped yet, has."""
    deadline = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.status() != psutil.STATUS_ZOMBIE:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.01)
    return True


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def start(**given: Any) -> Program:
        programs.append(Program(tmp_path / "cache", **given))
        return programs[-1]

    yield start
    for program in programs:
        if program.process.poll() is None:
            program.process.kill()
        program.wait()


@pytest.fixture
def gguf(tmp_path: Path) -> str:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


def connect(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)


def post(url: str, rid: str, prompt: str) -> tuple[int, str, str]:
    """Status, Connection header, body."""
    with contextlib.closing(connect(url)) as connection:
        connection.request("POST", "/generate", json.dumps({"rid": rid, "prompt": prompt}))
        response = connection.getresponse()
        return response.status, response.getheader("Connection") or "", response.read().decode()


def test_ready_and_clean_stop_without_a_model(start: Callable[..., Program], tmp_path: Path) -> None:
    program = start()
    state = program.until("ready")
    file = tmp_path / "cache" / "daemon.json"
    assert json.loads(file.read_text()) == {"pid": program.process.pid, "url": state["url"]}
    assert file.stat().st_mode & 0o777 == 0o600
    with contextlib.closing(connect(state["url"])) as connection:
        connection.request("GET", "/health")
        assert json.load(connection.getresponse())["state"] == "no model"
    status, _, body = post(state["url"], "r", "say a")
    assert status == 503
    assert "model.path" in body
    children = program.children()
    assert len(children) == 1
    program.process.terminate()
    assert program.wait() == 0
    assert not file.exists()
    assert any("flushed" in line for line in program.log)
    assert gone(children, 0)
    assert not [line for line in program.log if "Traceback" in line or "ERROR" in line]


def test_the_commands_find_it_after_its_directory_was_removed(start: Callable[..., Program], tmp_path: Path) -> None:
    program = start()
    program.until("ready")
    directory = tmp_path / "cache"
    file = directory / "daemon.json"
    told = file.read_text()
    shutil.rmtree(directory)
    deadline = time.monotonic() + 30
    directory.mkdir(mode=0o700)  # as the store does, once it has something to write
    while not file.exists() or file.read_text() != told:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    program.process.terminate()
    assert program.wait() == 0
    assert not file.exists()


def test_progress_of_loading_then_ready(start: Callable[..., Program], gguf: str) -> None:
    program = start(model=gguf, worker=["--load-time", "0.5"])
    loading = program.until("loading")
    assert loading["url"].startswith("http://127.0.0.1:")
    while loading["progress"] == 0:
        loading = program.until("loading")
    assert loading["progress"] == 0.25
    ready = program.until("ready")
    assert "tiny" in ready["message"]
    assert post(ready["url"], "r", "say a b")[2].split() == ["a", "b"]


def test_stop_lets_running_requests_end_and_refuses_new_ones(start: Callable[..., Program], gguf: str) -> None:
    program = start(model=gguf)
    url = program.until("ready")["url"]
    answers: list[tuple[int, str, str]] = []
    running = threading.Thread(target=lambda: answers.append(post(url, "r1", "wait 1.5")))
    running.start()
    time.sleep(0.4)
    program.process.terminate()
    program.until("stopping")
    status, header, body = post(url, "r2", "say a")
    assert status == 503
    assert header == "close"
    assert "stopping" in body
    running.join()
    assert answers[0][0] == 200
    assert "error" not in answers[0][2]
    assert program.wait() == 0


def test_after_the_grace_running_requests_are_ended(start: Callable[..., Program], gguf: str) -> None:
    program = start(model=gguf, server={"grace": 0.5})
    url = program.until("ready")["url"]
    answers: list[tuple[int, str, str]] = []
    running = threading.Thread(target=lambda: answers.append(post(url, "r1", "wait 30")))
    running.start()
    time.sleep(0.4)
    begin = time.monotonic()
    program.process.send_signal(signal.SIGINT)
    assert program.wait() == 0
    assert time.monotonic() - begin < 20
    running.join()
    assert "stopping" in answers[0][2]


def test_a_second_signal_ends_at_once(start: Callable[..., Program], gguf: str, tmp_path: Path) -> None:
    program = start(model=gguf, server={"grace": 60.0}, store=["--slow-stop", "30"])
    url = program.until("ready")["url"]
    children = program.children()
    running = threading.Thread(target=lambda: _quiet(url))
    running.start()
    time.sleep(0.4)
    program.process.terminate()
    program.until("stopping")
    begin = time.monotonic()
    program.process.terminate()
    assert program.wait() == 128 + signal.SIGTERM
    assert time.monotonic() - begin < 15
    assert gone(children, 10)
    assert not (tmp_path / "cache" / "daemon.json").exists()
    running.join()


def _quiet(url: str) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        post(url, "r1", "wait 30")


def test_no_process_outlives_a_killed_daemon(start: Callable[..., Program], gguf: str) -> None:
    program = start(model=gguf)
    program.until("ready")
    children = program.children()
    assert len(children) == 2
    program.process.kill()
    program.process.wait()
    assert gone(children, 1)


def test_stop_while_it_starts(start: Callable[..., Program], gguf: str) -> None:
    program = start(model=gguf, worker=["--load-time", "60"])
    program.until("loading")
    program.process.terminate()
    assert program.wait(10) == 0


def test_a_client_that_leaves_is_noticed(start: Callable[..., Program], gguf: str) -> None:
    program = start(model=gguf)
    url = program.until("ready")["url"]
    connection = connect(url)
    connection.request("POST", "/generate", json.dumps({"rid": "leaver", "prompt": "wait 30"}))
    time.sleep(0.3)
    connection.close()
    deadline = time.monotonic() + 3
    while not any("cancelled leaver" in line for line in program.log):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_worker_that_dies_costs_its_requests_only(start: Callable[..., Program], gguf: str) -> None:
    program = start(model=gguf)
    url = program.until("ready")["url"]
    status, _, body = post(url, "r1", "abort")
    assert "GGML_ASSERT" in body
    assert (status, post(url, "r2", "say a")[2].split()) == (200, ["a"])
    program.process.terminate()
    assert program.wait() == 0


def test_a_model_that_fails_to_load_ends_the_daemon(start: Callable[..., Program], gguf: str) -> None:
    program = start(model=gguf, worker=["--fail", f"{gguf} is damaged"])
    assert program.wait() == 3
    assert program.log[-1] == f"error: {gguf} is damaged\n"
    assert not any("damaged" in state["message"] for state in program.states.queue)
    assert sum("damaged" in line for line in program.log) == 1


def test_refusals(start: Callable[..., Program], gguf: str, tmp_path: Path) -> None:
    unusable = start(store=["--fail", "/cache is on NFS"])
    assert unusable.wait() == 6
    assert unusable.log[-1] == "error: /cache is on NFS\n"
    assert sum("/cache is on NFS" in line for line in unusable.log) == 1
    missing = start(model=str(tmp_path / "missing.gguf"))
    assert missing.wait() == 3
    assert "missing.gguf does not exist" in missing.log[-1]
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        taken = start(server={"port": port})
        assert taken.wait() == 2
        assert f"port {port} on 127.0.0.1 is in use" in taken.log[-1]
        assert "server.port" in taken.log[-1]
    nowhere = start(server={"host": "203.0.113.7"})
    assert nowhere.wait() == 2
    assert "203.0.113.7" in nowhere.log[-1]
    assert "server.host" in nowhere.log[-1]
    for program in (unusable, missing, taken, nowhere):
        assert not any("Traceback" in line for line in program.log)


def test_systemd_is_told(start: Callable[..., Program], gguf: str, tmp_path: Path) -> None:
    said: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "notify"))
        server.settimeout(0.2)

        def listen(until: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 20
            while not until():
                assert time.monotonic() < deadline, said
                with contextlib.suppress(TimeoutError):
                    said.append(server.recv(4096).decode())

        program = start(
            model=gguf,
            worker=["--load-time", "0.3"],
            env={"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "600000"},
        )
        listen(lambda: any("READY=1" in text for text in said))
        assert program.process.poll() is None
        listen(lambda: said.count("WATCHDOG=1") >= 3)
        listen(lambda: any(text.startswith("STATUS=loading tiny") for text in said))
        listen(lambda: any(text.startswith("STATUS=tiny is ready at http") for text in said))
        program.process.terminate()
        listen(lambda: "STOPPING=1" in said)
        assert program.wait() == 0


def test_the_watchdog_is_not_fed_by_a_daemon_that_hangs(start: Callable[..., Program], tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "notify"))
        server.settimeout(0.5)
        program = start(env={"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "300000"})
        program.until("ready")
        program.process.send_signal(signal.SIGSTOP)
        with contextlib.suppress(TimeoutError):
            while True:
                server.recv(4096)
        with pytest.raises(TimeoutError):
            server.recv(4096)
        program.process.send_signal(signal.SIGCONT)
        assert server.recv(4096)

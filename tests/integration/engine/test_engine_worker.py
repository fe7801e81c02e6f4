"""The worker as a process of its own, over a socket pair, with and without the real store."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from homeprefixd.channel import Channel, ChannelClosedError
from homeprefixd.frames import Frame, Stop
from homeprefixd.frames.store import Adopt, FromStore, Hello
from homeprefixd.frames.worker import (
    Accepted,
    Account,
    Cancel,
    Delta,
    Failure,
    Finished,
    FromWorker,
    Generate,
    Heartbeat,
    Loading,
    Message,
    NamespaceKnown,
    Progress,
    Ready,
    UseStore,
)
from tests.integration.engine.running import GREEDY, load_frame

ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_", "GGML_"))},
    "GGML_NO_BACKTRACE": "1",
    "HOMEPREFIXD_DEBUG_LOGITS": "1",
}


class Child:
    """A child process, its end of a socket pair, and every frame it sent."""

    def __init__(self, module: str, incoming: Any, *arguments: str) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", module, "--fd", str(theirs.fileno()), *arguments]
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
        )
        theirs.close()
        self.channel: Channel[Any] = Channel(ours, incoming)
        self.frames: list[Frame] = []
        self.log = ""
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=t, daemon=True) for t in (self._receive, self._read_log)]
        for thread in self._threads:
            thread.start()

    def _receive(self) -> None:
        with contextlib.suppress(ChannelClosedError):
            while True:
                frame = self.channel.receive()
                with self._changed:
                    self.frames.append(frame)
                    self._changed.notify_all()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr:
            for line in self.process.stderr:
                self.log += line

    def wait(self, kind: Any, seconds: float = 60, **fields: Any) -> Any:
        def found() -> Any:
            return next(
                (f for f in self.frames if isinstance(f, kind) and all(getattr(f, k) == v for k, v in fields.items())),
                None,
            )

        with self._changed:
            assert self._changed.wait_for(lambda: found() is not None, seconds), self.log
            return found()

    def exit(self, seconds: float = 30) -> int:
        code = self.process.wait(seconds)
        for thread in self._threads:
            thread.join(5)
        return code

    def close(self) -> None:
        self.channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(15)
        self.process.kill()
        self.exit()


Start = Callable[..., Child]


@pytest.fixture
def start() -> Iterator[Start]:
    children: list[Child] = []

    def begin(path: Path, **changes: Any) -> Child:
        child = Child("homeprefixd.engine.worker", FromWorker)
        children.append(child)
        child.channel.send(load_frame(path, **changes))
        return child

    yield begin
    for child in children:
        child.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Child]:
    child = Child(
        "homeprefixd.prefix.service", FromStore, "--cache-dir", str(tmp_path / "cache"), "--hot", str(64 << 20),
        "--warm", str(256 << 20), "--compression", "1", "--tail-delay", "0.2", "--write-queue", str(32 << 20),
        "--log-level", "info",
    )  # fmt: skip
    child.channel.send(Hello(arena=False))
    yield child
    child.close()


def connect(worker: Child, store: Child) -> None:
    ours, theirs = socket.socketpair()
    store.channel.send(Adopt(role="worker", name="m"), theirs.fileno())
    worker.channel.send(UseStore(), ours.fileno())
    ours.close()
    theirs.close()


def ask(worker: Child, rid: str, prompt: Any, max_tokens: int = 12, stream: bool = False) -> Finished:
    messages = prompt if isinstance(prompt[0], Message) else None

    worker.channel.send(
        Generate(
            rid=rid,
            messages=messages,
            prompt=None if messages else prompt,
            tools=None,
            template_kwargs={},
            max_tokens=max_tokens,
            stop=[],
            sampling=GREEDY,
            stream=stream,
        )
    )
    end = worker.wait((Finished, Failure), rid=rid)
    assert isinstance(end, Finished), end
    return end


def test_a_worker_from_first_frame_to_stop(start: Start, demo_model: Path) -> None:
    worker = start(demo_model)
    info = worker.wait(Ready).model
    progress = [frame.progress for frame in worker.frames if isinstance(frame, Loading)]
    assert progress[-1] == 1
    assert progress == sorted(progress)
    assert (info.arch, info.n_ctx, info.cache_mode, info.has_template) == ("llama", 2048, "blocks", True)
    assert info.kv_bytes_per_token > 23000
    known = worker.wait(NamespaceKnown).namespace
    assert len(known["model_sha256"]) == 64
    end = ask(worker, "a", [Message(role="user", content="Say hello.")], stream=True)
    text = "".join(f.text for f in worker.frames if isinstance(f, Delta))
    assert text
    assert end.text == ""
    assert ask(worker, "b", [Message(role="user", content="Say hello.")]).text == text
    assert end.timings.cache_n == 0  # no store yet: it serves all the same
    assert len(end.timings.logits_sha256) == 64
    kinds = [type(f) for f in worker.frames if getattr(f, "rid", None) == "a" and not isinstance(f, Account)]
    assert kinds[:2] == [Accepted, Progress]
    beat = worker.wait(Heartbeat, 5)
    assert beat.cells == info.n_pool
    worker.channel.send(Stop(grace=1))
    assert worker.exit() == 0
    assert "ERROR" not in worker.log


def test_two_workers_share_prefixes_through_the_real_store(start: Start, store: Child, demo_model: Path) -> None:
    prompt = "The house has three floors, and every room has a lamp. " * 25
    first = start(demo_model)
    first.wait(Ready)
    connect(first, store)
    first.wait(NamespaceKnown)
    cold = ask(first, "cold", prompt)
    deadline = time.time() + 20
    hot = ask(first, "hot0", prompt)
    n = cold.timings.total_prompt_n
    while hot.timings.cache_n != n - 1 and time.time() < deadline:  # the hash may have come after `cold`
        hot = ask(first, f"hot{time.time()}", prompt)
    assert hot.timings.cache_n == n - 1
    assert hot.timings.cache_tiers == {"hot": n - 1}
    first.process.kill()
    first.exit()
    second = start(demo_model)
    second.wait(Ready)
    connect(second, store)
    second.wait(NamespaceKnown)
    warm = ask(second, "warm", prompt)
    assert warm.timings.cache_n == n - 1
    assert warm.timings.logits_sha256 == hot.timings.logits_sha256  # the same calls on the same state
    assert cold.text == hot.text == warm.text
    # The store dies: nobody is told, requests compute, and text is the same.
    store.process.kill()
    store.exit()
    alone = ask(second, "alone", prompt)
    assert alone.timings.cache_n == 0
    assert alone.timings.logits_sha256 == cold.timings.logits_sha256
    assert alone.text == cold.text
    assert second.process.poll() is None


def test_what_cannot_be_loaded_ends_with_a_failure_and_exit_3(start: Start, tmp_path: Path, demo_model: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(demo_model.read_bytes()[:5_000_000])
    for path, changes, match in (
        (damaged, {}, str(damaged)),
        (tmp_path, {}, "is a directory"),
        (demo_model, {"ctx": 500_000_000}, "`model.ctx` 500000000 needs"),
        (demo_model, {"pool": 500_000_000}, "`model.pool` 500000000 needs"),
        (demo_model, {"parallel": 300}, "`model.parallel` is 300"),
        (demo_model, {"kv_type": "q1"}, "`model.kv_type` is q1"),
        (demo_model, {"chat_template": "/absent.jinja"}, "`model.chat_template` is /absent.jinja"),
        (demo_model, {"chat_template": "{% if %}"}, "does not compile"),
    ):
        worker = start(path, **changes)
        failure = worker.wait(Failure)
        assert failure.rid is None
        assert failure.error == "ModelError"
        assert match in failure.message
        assert worker.exit() == 3
        assert "Traceback" not in worker.log


def test_the_end_of_the_daemon_is_the_end_of_the_worker(start: Start, demo_model: Path) -> None:
    worker = start(demo_model, batch=64)
    worker.wait(Ready)
    worker.channel.send(
        Generate("long", None, list(range(1000, 2900)), None, {}, 5, [], GREEDY, True)  # in the middle of a prefill
    )
    worker.wait(Accepted)
    worker.channel.close()
    assert worker.exit(8) == 0  # after its step, well before the last resort of 10 s


def test_a_cancel_reaches_a_worker_that_prefills(start: Start, demo_model: Path) -> None:
    worker = start(demo_model, batch=64)
    worker.wait(Ready)
    worker.channel.send(Generate("long", None, list(range(1000, 2900)), None, {}, 5, [], GREEDY, True))
    worker.wait(Progress)
    worker.channel.send(Cancel("long"))
    assert worker.wait(Finished, 15, rid="long").reason == "cancelled"


def test_stop_with_a_grace_too_short(start: Start, demo_model: Path) -> None:
    worker = start(demo_model)
    worker.wait(Ready)
    worker.channel.send(Generate("long", None, "Once", None, {}, 1900, [], GREEDY, True))
    worker.wait(Delta)
    worker.channel.send(Stop(grace=0.3))
    failure = worker.wait(Failure, rid="long")
    assert failure.error == "UnavailableError"
    assert worker.exit() == 0

"""Forms that take long to compile: paid for once, and by whoever asks for them."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homeprefixd.engine.compiling import Probe
from homeprefixd.errors import RequestError
from homeprefixd.frames.worker import Constraint, Failure, Finished, Message
from tests.integration.engine.memory_store import MemoryStore
from tests.integration.engine.running import Running, load_frame

SH, KID = {"client": "key sh"}, {"client": "key kid"}
_numbers = itertools.count()


class Served(Running):
    """Each try of a slow form waits until it is told to fail."""

    def __init__(self, path: Path) -> None:
        self.tried: list[str] = []
        self.go_on = threading.Semaphore(0)
        super().__init__(load_frame(path, parallel=3, max_queue=32), MemoryStore())

    def check(self, probe: Probe, grammar: str) -> str:
        self.tried.append(grammar)
        if "slow" not in grammar:
            return _check(probe, grammar)
        assert self.go_on.acquire(timeout=60)
        raise RequestError("It takes too long to compile.", code="grammar_too_complex")

    def ended(self, rid: str) -> bool:
        return bool(self.of(rid, (Failure, Finished)))

    def slow_ones(self, count: int) -> list[str]:
        """Starts so many of one account's, all different; the first is being compiled then, the others wait."""
        rids = [self.start("x", 4, **slow(), **SH) for _ in range(count)]
        turns = self.worker.intake._turns
        self.until(lambda: len(turns._waiting) == count - 1 and any("slow" in grammar for grammar in self.tried))
        return rids

    def until(self, condition: Any) -> None:
        for _ in range(6000):
            if condition():
                return
            threading.Event().wait(0.01)
        raise AssertionError("it did not happen in time")

    def fail(self, *rids: str) -> None:
        for rid in rids:
            self.go_on.release()
            with pytest.raises(RequestError, match="too long"):
                self.finish(rid)


_check = Probe.check


@pytest.fixture(scope="module")
def shared(demo_model: Path) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        running = Served(demo_model)
        patch.setattr(Probe, "check", lambda probe, grammar: running.check(probe, grammar))
        yield running
        running.close()


@pytest.fixture
def served(shared: Served) -> Served:
    shared.tried.clear()
    return shared


def form(schema: Any) -> dict[str, Any]:
    return {"constraint": Constraint("json_schema", json.dumps(schema))}


def slow() -> dict[str, Any]:
    """Another one each time."""
    return form({"enum": [f"slow {next(_numbers)}"]})


def new() -> dict[str, Any]:
    return form({"enum": [f"quick {next(_numbers)}"]})


def test_a_refusal_is_remembered(served: Served) -> None:
    served.go_on.release()
    for schema, code in ((slow(), "grammar_too_complex"), (form({"enum": []}), "unsupported_schema")):
        with pytest.raises(RequestError) as first:
            served.ask("x", 4, **schema, **SH)
        tried = len(served.tried)
        with pytest.raises(RequestError) as second:
            served.ask("another prompt", 4, **schema, **KID)
        assert len(served.tried) == tried
        for error in (first.value, second.value):
            assert (error.code, error.param) == (code, "response_format")
        assert first.value.message == second.value.message


def test_equal_ones_that_wait_are_compiled_once(served: Served) -> None:
    schema = slow()
    rids = [served.start(f"x{number}", 4, **schema, **SH) for number in range(4)]
    served.until(lambda: served.tried)
    other = served.start("x", 4, **slow(), **KID)  # of an account that takes less, but they are known now
    served.until(lambda: len(served.worker.intake._turns._waiting) == 4)
    served.fail(rids[0])
    for rid in rids[1:]:
        with pytest.raises(RequestError, match="too long"):
            served.finish(rid)
    assert not served.ended(other)
    served.fail(other)
    assert len(served.tried) == 2


def test_one_accounts_forms_do_not_hold_up_another(served: Served) -> None:
    first, *others = served.slow_ones(4)
    kid = served.start("x", 4, **new(), **KID)
    served.until(lambda: len(served.worker.intake._turns._waiting) == 4)
    served.fail(first)
    served.finish(kid)
    assert not any(served.ended(rid) for rid in others)
    served.fail(*others)


@pytest.mark.parametrize("client", [SH, KID])
def test_what_is_known_does_not_wait(served: Served, client: dict[str, str]) -> None:
    known = new()
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    call = {"tools": tools, "tool_choice": "required"}
    said = served.ask("x", 9, **known, **client)[0]
    served.ask([Message("user", "x")], 4, **call, **client)
    rids = served.slow_ones(2)
    for _ in range(2):  # each has a mask of its own
        assert served.ask("x", 9, **known, **client)[0] == said
        served.ask([Message("user", "y")], 4, **call, **client)
    assert not any(served.ended(rid) for rid in rids)
    served.fail(*rids)


def test_what_nobody_waits_for_is_not_compiled(served: Served) -> None:
    first, second, third = served.slow_ones(3)
    served.worker.intake.cancel(second)
    assert second not in served.worker.intake._pending
    served.fail(first, third)
    assert len(served.tried) == 2

"""A worker's parts in this process: the engine on a thread, an in-process store, every frame kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from homeprefixd.engine.building import build
from homeprefixd.engine.context import Context
from homeprefixd.engine.scheduler import Engine
from homeprefixd.engine.sequence import Sequence
from homeprefixd.errors import from_frame
from homeprefixd.frames import Frame
from homeprefixd.frames.worker import Delta, Failure, Finished, Generate, LoadModel, Message, NamespaceKnown, Sampling
from tests.integration.engine.memory_store import MemoryStore

GREEDY = Sampling(temperature=0.0, ignore_eos=True)


def load_frame(path: Path, **changes: Any) -> LoadModel:
    """A LoadModel with small defaults."""
    values: dict[str, Any] = {
        "path": str(path), "alias": "m", "ctx": 2048, "pool": 0, "memory": 1 << 30, "parallel": 2, "threads": 2,
        "batch": 512, "kv_type": "f16", "flash_attention": False, "gpu_layers": 0, "chat_template": "",
        "template_timeout": 2.0, "reuse": "token", "salt": "", "max_queue": 8, "max_stall": 0.5,
    }  # fmt: skip
    return LoadModel(**{**values, **changes})


class Logits:
    """Logits of every sampled token, by request. Other batch shapes give other rounding, and it grows from token to
    token; state or a row of another request gives other logits altogether. So texts may part only at a near-tie."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: dict[str, list[np.ndarray]] = {}
        self.prompts: dict[str, list[int]] = {}
        original = Engine._next_token

        def next_token(engine: Engine, sequence: Sequence, context: Context, index: int) -> str:
            self.of.setdefault(sequence.request.rid, []).append(context.logits(index))
            self.prompts[sequence.request.rid] = list(sequence.request.tokens)
            return original(engine, sequence, context, index)

        monkeypatch.setattr(Engine, "_next_token", next_token)

    def compare(self, rid: str, other: str, tolerance: float = 0.08) -> int:
        """Assert that two greedy requests agree to rounding; return for how many tokens they could be compared."""
        for count, (a, b) in enumerate(zip(self.of[rid], self.of[other], strict=False)):
            top = np.abs(a).max()
            assert np.abs(a - b).max() / top < tolerance, f"other logits at token {count}"
            if a.argmax() != b.argmax():
                first, second = np.sort(a)[[-1, -2]]
                assert (first - second) / top < tolerance, f"another token than a near-tie allows at {count}"
                return count
        return min(len(self.of[rid]), len(self.of[other]))


class Running:
    """A worker's parts in this process, the engine on a thread, frames kept."""

    def __init__(self, load: LoadModel, store: MemoryStore) -> None:
        self.frames: list[tuple[float, Frame]] = []
        self.store = store
        self._changed = threading.Condition()
        self.worker = build(load, self._emit, store)
        self.engine = self.worker.engine
        self.gate(False)
        self.worker.intake.start()
        if self.worker.namespaces is not None:
            self.worker.namespaces.start()
        self._thread = threading.Thread(target=self.engine.run, daemon=True)
        self._thread.start()
        self._count = 0

    def gate(self, on: bool) -> None:
        """Whether what is faster to compute is computed. A tiny model computes a block in 2 ms: noise would decide."""
        gate = self.engine._restorer.gate if self.engine._restorer is not None else None
        if gate is not None:
            gate._tells = type(gate)._tells.__get__(gate) if on else lambda: False  # type: ignore[method-assign]

    def _emit(self, frame: Frame) -> None:
        with self._changed:
            self.frames.append((time.perf_counter(), frame))
            self._changed.notify_all()

    def of(self, rid: str, kind: type | tuple[type, ...] = Frame) -> list[Any]:
        return [f for _, f in self.frames if isinstance(f, kind) and getattr(f, "rid", None) == rid]

    def wait(self, condition: Callable[[], Any], seconds: float = 60) -> Any:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(), seconds), "it did not happen in time"
            return condition()

    def start(self, prompt: Any, max_tokens: int = 8, **changes: Any) -> str:
        self._count += 1
        rid = f"r{self._count}"
        messages = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], Message) else None
        values: dict[str, Any] = {
            "rid": rid, "messages": messages, "prompt": None if messages else prompt, "tools": None,
            "template_kwargs": {}, "max_tokens": max_tokens, "stop": [], "sampling": GREEDY, "stream": True,
        }  # fmt: skip
        self.worker.intake.put(Generate(**{**values, **changes}))
        return rid

    def finish(self, rid: str, seconds: float = 120) -> Finished:
        end = self.wait(lambda: self.of(rid, (Finished, Failure)), seconds)[0]
        if isinstance(end, Failure):
            raise from_frame(end.error, end.message, end.code, end.param, end.details)
        return end

    def ask(self, prompt: Any, max_tokens: int = 8, **changes: Any) -> tuple[str, Finished]:
        rid = self.start(prompt, max_tokens, **changes)
        end = self.finish(rid)
        return self.text(rid), end

    def text(self, rid: str) -> str:
        return "".join([f.text for f in self.of(rid, Delta)] + [f.text for f in self.of(rid, Finished)])

    def known(self) -> None:
        """Wait until look-ups start."""
        self.wait(lambda: [f for _, f in self.frames if isinstance(f, NamespaceKnown)])
        namespaces = self.worker.namespaces
        assert namespaces is not None
        deadline = time.time() + 10
        while namespaces.opened(namespaces.usual) is None:
            assert time.time() < deadline
            time.sleep(0.01)

    def close(self) -> None:
        self.engine.quit()
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self.worker.namespaces is not None:
            self.worker.namespaces.close()
        self.engine._places.close()
        self.engine._model.close()

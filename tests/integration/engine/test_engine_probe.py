"""The probe: a throw-away process that may die of a model, and what is remembered of it."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from homeprefixd.engine import probe as probing
from homeprefixd.engine.probe import MEMO, Outcome, probe
from homeprefixd.errors import ModelError
from homeprefixd.frames.worker import AdapterFile
from tests.integration.engine.running import Running, load_frame
from tests.tiny_lora import make_lora

Run = Callable[..., Running]


@pytest.mark.parametrize(
    ("arch", "mode"),
    [
        ("llama", "blocks"),
        ("gemma3", "blocks with edges"),
        ("granitehybrid", "blocks with edges"),
        ("lfm2+window", "whole sequence"),
        ("deepseek4", "whole sequence"),
    ],
)
def test_the_outcome_is_remembered_by_content(
    small: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, mode: str
) -> None:
    found = probe(load_frame(small(arch)), tmp_path)
    assert found is not None
    assert (found.mode, bool(found.reason)) == (mode, mode == "whole sequence")
    memo = tmp_path / MEMO
    assert stat.S_IMODE(memo.stat().st_mode) == 0o600
    monkeypatch.setattr(probing, "_run", lambda load: pytest.fail("it was probed again"))
    moved = tmp_path / "moved.gguf"
    moved.symlink_to(small(arch))
    assert probe(load_frame(moved), tmp_path) == found


def test_a_damaged_memo_is_no_memo(small: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / MEMO).write_text('{"x": ["maybe"]}')
    assert probe(load_frame(small("llama")), tmp_path) == Outcome("blocks")
    assert list(json.loads((tmp_path / MEMO).read_text()).values()) == [["blocks", ""]]


def dying(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(probing, "module_command", lambda module: ["/bin/sh", "-c", program])


def test_a_probe_that_dies_turns_the_cache_off_and_says_why(
    run: Run, small: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "echo loaded; echo 'llama.cpp:7: GGML_ASSERT(is_full) failed' >&2; kill -ABRT $$"
    dying(monkeypatch, said)
    running = run(small("llama"), probes=str(tmp_path))
    info = running.worker.info
    assert info.cache_mode == "off"
    assert "GGML_ASSERT(is_full) failed" in info.cache_reason
    assert running.ask([100, 101, 102], 4)[1].reason == "length"
    dying(monkeypatch, "exit 9")
    assert probe(load_frame(small("llama")), tmp_path) == Outcome("off", info.cache_reason.partition(": ")[2][:-1])


def test_a_probe_that_dies_of_loading_is_the_models_fault(
    small: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying(monkeypatch, "echo 'gguf.cpp:1: GGML_ASSERT(n > 0) failed' >&2; kill -ABRT $$")
    with pytest.raises(ModelError, match=r"GGML_ASSERT\(n > 0\) failed"):
        probe(load_frame(small("llama")), tmp_path)
    assert not (tmp_path / MEMO).exists()


@pytest.mark.parametrize("program", ["kill -KILL $$", "exit 3", "echo nonsense"])
def test_what_cannot_be_found_out_is_not_remembered(
    small: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    dying(monkeypatch, program)
    assert probe(load_frame(small("llama")), tmp_path) is None
    assert not (tmp_path / MEMO).exists()


def test_a_file_that_is_none(tmp_path: Path) -> None:
    assert probe(load_frame(tmp_path / "missing.gguf"), tmp_path) is None
    text = tmp_path / "text.gguf"
    text.write_text("not a model")
    assert probe(load_frame(text), tmp_path) is None
    assert msgspec.json.encode(Outcome("off", "why")) == b'["off","why"]'


def test_adapters_are_tried_and_remembered(
    run: Run, small: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that llama.cpp dies of is refused with its last words; those before and after it are used."""
    model = small("llama")
    files = [AdapterFile(name, str(make_lora(model, tmp_path / f"{name}.gguf", seed=ord(name))), 1.0) for name in "abc"]
    (tmp_path / "d.gguf").write_bytes((tmp_path / "a.gguf").read_bytes()[:-50])
    files += [AdapterFile("d", str(tmp_path / "d.gguf"), 1.0), AdapterFile("e", str(tmp_path / "gone.gguf"), 1.0)]
    load = load_frame(model, adapters=files)
    found = probing.probe_adapters(load, tmp_path)
    assert [file.problem for file in found[:3]] == ["", "", ""]
    assert "d.gguf cannot be loaded as an adapter" in found[3].problem
    assert found[4].problem == ""  # loading it says more
    monkeypatch.setattr(probing, "_process", lambda *_: pytest.fail("they were tried again"))
    assert probing.probe_adapters(load, tmp_path) == found
    monkeypatch.undo()
    (tmp_path / probing.ADAPTERS_MEMO).unlink()
    assert probe(load, tmp_path) == Outcome("blocks")
    real = probing.module_command
    deadly = "echo loaded; echo '\"\"'; echo 'ggml.c:7: GGML_ASSERT(a->ne[0] > 0) failed' >&2; kill -ABRT $$"
    commands = iter([["/bin/sh", "-c", deadly]])
    monkeypatch.setattr(probing, "module_command", lambda module: next(commands, real(module)))
    running = run(model, probes=str(tmp_path), adapters=files[:3])
    problems = [adapter.problem for adapter in running.worker.info.adapters]
    assert (problems[0], problems[2]) == ("", "")
    assert "GGML_ASSERT(a->ne[0] > 0) failed" in problems[1]

"""The probe: a throw-away process that may die of a model, and what is remembered of it."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from homeprefixd.engine import probe as probing
from homeprefixd.engine.probe import MEMO, Outcome, probe
from homeprefixd.errors import ModelError
from homeprefixd.frames.worker import AdapterFile, LoadModel
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
    assert [one[:2] for one in json.loads((tmp_path / MEMO).read_text()).values()] == [["blocks", ""]]


def scripted(monkeypatch: pytest.MonkeyPatch, *outcomes: Outcome, meanwhile: Callable[[], object] = int) -> list[int]:
    """Probes that have these outcomes; what is returned grows by each that was asked for."""
    asked: list[int] = []

    def run(load: LoadModel) -> tuple[Outcome, bool]:
        asked.append(len(asked))
        meanwhile()
        return outcomes[asked[-1]], True

    monkeypatch.setattr(probing, "_run", run)
    return asked


OFF, BLOCKS = Outcome("off", "why"), Outcome("blocks")


def test_a_model_that_was_not_whole_is_probed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its full size and its head from the start: only when it was written last says that it is another one."""
    model = tmp_path / "m-00001-of-00002.gguf"
    other = tmp_path / "m-00002-of-00002.gguf"
    for part in (model, other):
        part.write_bytes(b"GGUF" + bytes(100))
    load = load_frame(model)
    asked = scripted(monkeypatch, OFF, OFF, BLOCKS, BLOCKS)
    assert [probe(load, tmp_path) for _ in range(2)] == [OFF, OFF]
    assert len(asked) == 1
    os.utime(other, ns=(1, 1))
    assert [probe(load, tmp_path), len(asked)] == [OFF, 2]
    os.utime(model, ns=(2, 2))
    assert [probe(load, tmp_path) for _ in range(2)] == [BLOCKS, BLOCKS]
    assert len(asked) == 3
    os.utime(model, ns=(3, 3))
    assert [probe(load, tmp_path), len(asked)] == [BLOCKS, 4]


def test_what_was_written_while_it_was_probed_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF" + bytes(100))
    scripted(monkeypatch, OFF, meanwhile=lambda: os.utime(model, ns=(1, 1)))
    assert probe(load_frame(model), tmp_path) is None
    scripted(monkeypatch, OFF, meanwhile=model.unlink)
    assert probe(load_frame(model), tmp_path) is None
    assert not (tmp_path / MEMO).exists()


def test_a_copy_is_known_by_its_head_if_the_first_one_was_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in (("good", b"1"), ("bad", b"2")):
        for folder in ("a", "b"):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / f"{name}.gguf").write_bytes(b"GGUF" + content)
    good, copy, bad, other = (load_frame(tmp_path / name) for name in ("a/good.gguf", "b/good.gguf", "a/bad.gguf",
                                                                       "b/bad.gguf"))  # fmt: skip
    asked = scripted(monkeypatch, BLOCKS, OFF, BLOCKS)
    assert [probe(one, tmp_path) for one in (good, copy, bad, other)] == [BLOCKS, BLOCKS, OFF, BLOCKS]
    assert len(asked) == 3


def test_an_adapter_that_was_not_whole_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, file = tmp_path / "m.gguf", tmp_path / "a.gguf"
    for path in (model, file):
        path.write_bytes(b"GGUF" + bytes(100))
    load = load_frame(model, adapters=[AdapterFile("a", str(file), 1.0)])
    answers: list[tuple[str, Path | None]] = [("bad", None), ("bad", file), ("bad", model), ("", None)]

    def run(load: LoadModel, files: list[AdapterFile]) -> list[str]:
        problem, written = answers.pop(0)
        if written is not None:
            written.write_bytes(written.read_bytes())
            os.utime(written, ns=(len(answers), len(answers)))
        return [problem]

    monkeypatch.setattr(probing, "_run_adapters", run)

    def problem() -> str:
        return probing.probe_adapters(load, tmp_path)[0].problem

    assert [problem(), problem(), len(answers)] == ["bad", "bad", 3]
    os.utime(file, ns=(7, 7))
    assert [problem(), problem(), problem(), problem(), len(answers)] == ["bad", "bad", "", "", 0]


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


def answering(monkeypatch: pytest.MonkeyPatch, *programs: str) -> list[str]:
    """Probes that are shell programs, one after the other; those that are left are returned."""
    left = list(programs)
    monkeypatch.setattr(probing, "module_command", lambda module: ["/bin/sh", "-c", left.pop(0)])
    return left


FROM_OUTSIDE = ["TERM", "KILL", "HUP", "INT", "BUS", "SYS"]
ENDED = "echo loaded; kill -{} $$"
DIED = "echo loaded; kill -ABRT $$"


@pytest.mark.parametrize("name", FROM_OUTSIDE)
def test_a_probe_that_is_ended_says_nothing_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    load = load_frame(tmp_path / "m.gguf")
    ended, whole = ENDED.format(name), """echo loaded; echo '["whole sequence","it is not to be cut"]'"""
    left = answering(monkeypatch, ended, f"kill -{name} $$", DIED, ended, DIED, whole, "no more")
    assert [probe(load, tmp_path) for _ in range(2)] == [None, None]
    found = probe(load, tmp_path)  # it died of blocks, and nobody knows of the whole
    assert (found and found.mode, len(left)) == ("off", 3)
    found = probe(load, tmp_path)
    assert (found and found.mode, len(left)) == ("whole sequence", 1)
    assert probe(load, tmp_path) == found


@pytest.mark.parametrize("name", FROM_OUTSIDE)
def test_a_trial_that_is_ended_says_nothing_of_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for file in "mab":
        (tmp_path / f"{file}.gguf").write_bytes(b"GGUF" + file.encode())
    files = [AdapterFile(one, str(tmp_path / f"{one}.gguf"), 1.0) for one in "ab"]
    load = load_frame(tmp_path / "m.gguf", adapters=files)
    fine = "echo loaded; echo '\"\"'; "
    left = answering(
        monkeypatch, f"{fine} kill -{name} $$", ENDED.format(name), "echo loaded; kill -SEGV $$", "no more"
    )
    assert [file.problem for file in probing.probe_adapters(load, tmp_path)] == ["", ""]
    assert len(left) == 2  # the second was tried again, and that was ended, too
    assert "dies of it (SIGSEGV)" in probing.probe_adapters(load, tmp_path)[1].problem
    assert len(left) == 1


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

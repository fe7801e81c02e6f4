"""The wrappers on real files: loading, damaged files, text and tokens."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from homeprefixd.engine.bindings import Model
from homeprefixd.engine.context import Batch, Context, ContextSettings
from homeprefixd.engine.failures import DecodeError
from homeprefixd.engine.llama_log import LlamaLog
from homeprefixd.errors import ModelError, RequestError


@pytest.fixture
def log() -> Iterator[LlamaLog]:
    log = LlamaLog()
    yield log
    log.close()


@pytest.fixture
def model(log: LlamaLog, demo_model: Path) -> Iterator[Model]:
    model = Model.load(demo_model, log)
    yield model
    model.close()


def test_damaged_files_are_named_with_the_reason(log: LlamaLog, demo_model: Path, tmp_path: Path) -> None:
    whole = demo_model.read_bytes()
    files = {
        "cut": (whole[: len(whole) // 2], r"cannot be loaded: .*(tensor|data|file)"),
        "header": (whole[:40], r"cannot be loaded: .*\w"),
        "text": (b"hello, I am no model\n", "is not a GGUF file"),
        "empty": (b"", "is empty"),
        "rubbish": (b"GGUF" + b"\xff" * 5000, r"cannot be loaded: .*\w"),
    }
    for name, (content, reason) in files.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(ModelError, match=reason) as caught:
            Model.load(path, log)
        assert str(path) in caught.value.message, name
        assert "gave no reason" not in caught.value.message, name
    with pytest.raises(ModelError, match="is a directory"):
        Model.load(tmp_path, log)
    with pytest.raises(ModelError, match="does not exist"):
        Model.load(tmp_path / "absent.gguf", log)


def test_loading_reports_progress_and_can_be_ended_by_it(log: LlamaLog, demo_model: Path) -> None:
    seen: list[float] = []
    Model.load(demo_model, log, progress=seen.append).close()
    assert seen == sorted(seen)
    assert seen[-1] == 1

    def broken(progress: float) -> None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        Model.load(demo_model, log, progress=broken)


def test_tokens_and_pieces(model: Model) -> None:
    text = "Grüße, 家 🏠! <|im_end|>"
    tokens = model.tokenize(text)
    assert b"".join(model.piece(t, special=True) for t in tokens) == text.encode()
    assert tokens[-1] in model.eog  # parsed as special
    assert model.piece(tokens[-1]) == b""  # and not shown
    assert len(model.tokenize(text, parse_special=False)) > len(tokens)
    assert model.tokenize("") == []
    house = model.tokenize("🏠")
    assert len(house) > 1  # a character over several tokens
    with pytest.raises(RequestError, match="token ids outside 0 to 49151"):
        model.check_tokens([1, 49152])
    with pytest.raises(RequestError):
        model.check_tokens([-1])
    model.check_tokens([])


def test_bos_is_added_once(model: Model) -> None:
    assert model.tokenize("hi")[0] != model.bos  # this model wants none
    model.add_bos = True
    plain = model.tokenize("hi", add_bos=False)
    assert model.tokenize("hi") == [model.bos, *plain]
    assert model.tokenize(model.bos_text + "hi") == [model.bos, *plain]


def test_batches_and_contexts_check_their_sizes(model: Model) -> None:
    batch = Batch(8)
    with pytest.raises(ValueError, match="9 tokens"):
        batch.set_prompt(np.arange(9, dtype=np.int32), 0, 0)
    with pytest.raises(ValueError, match="0 tokens"):
        batch.set_steps([], [], [])
    with pytest.raises(ModelError, match=r"`model\.kv_type` is q9"):
        Context(model, ContextSettings(256, 64, 2, 1, "q9", True))
    # llama.cpp refuses more than 256 sequences
    with pytest.raises(ModelError, match=r"No context of 256 tokens .* Lower `model\.ctx`"):
        Context(model, ContextSettings(256, 64, 300, 1, "f16", True))


def test_decode_says_when_it_is_full_and_when_it_fails(model: Model) -> None:
    context = Context(model, ContextSettings(256, 128, 2, 1, "f16", True))
    try:
        batch = Batch(128)
        tokens = np.full(128, 5000, np.int32)
        for start in (0, 128):
            batch.set_prompt(tokens, start, 0)
            assert context.decode(batch)
        batch.set_prompt(tokens[:1], 256, 0)
        assert not context.decode(batch)
        assert context.pos_max(0) == 255  # as before
        batch.set_prompt(tokens[:1], 100, 0)  # positions must follow one another
        with pytest.raises(DecodeError, match="llama_decode: -1"):
            context.decode(batch)
    finally:
        context.close()


def test_quantised_v_needs_flash_attention_and_the_reason_is_told(model: Model) -> None:
    with pytest.raises(
        ModelError, match=r"`model\.kv_type` is q8_0: a quantized V cache .*`model\.flash_attention` to on"
    ):
        Context(model, ContextSettings(256, 64, 2, 1, "q8_0", False))
    with pytest.raises(ModelError, match=r"`model\.kv_type_v` is q4_0: .*`model\.kv_type_v` to one of f16, bf16, f32"):
        Context(model, ContextSettings(256, 64, 2, 1, "f16", False, "q4_0"))
    with pytest.raises(ModelError, match=r"`model\.kv_type_v` is q9: it must be one of"):
        Context(model, ContextSettings(256, 64, 2, 1, "f16", True, "q9"))


def test_types_that_do_not_suit_a_model_are_refused_with_what_does(small: Callable[[str], Path]) -> None:
    """Its K and V are one."""
    model = Model.load(small("deepseek2"), LlamaLog())
    try:
        with pytest.raises(ModelError, match=r"different K .* Choose another `model\.kv_type` or `model\.kv_type_v`"):
            Context(model, ContextSettings(256, 64, 2, 1, "f16", False, "bf16"))
    finally:
        model.close()


def test_prefill_of_a_quantised_model_does_not_crash(model: Model) -> None:
    """It does on CPUs with AMX where GCC before 14 compiled llama.cpp, unless AMX is kept out: see `kernels.py`."""
    context = Context(model, ContextSettings(256, 64, 2, 2, "f16", True))
    try:
        batch = Batch(64)
        batch.set_prompt(np.arange(1000, 1064, dtype=np.int32), 0, 0)
        assert context.decode(batch)
        assert np.isfinite(context.logits(-1)).all()
    finally:
        context.close()


@pytest.mark.parametrize(
    "text",
    ["The quick brown fox. ", "\u00e9\u4e2d\U0001f600", " ", "\n", "\x00\x04\x06", "<|im_start|>", "#", "a", "\u0378"],
)
def test_no_text_has_fewer_tokens_than_the_bound_says(model: Model, text: str) -> None:
    bound = model.text_bound
    assert bound is not None
    assert bound.longest < 200
    for count in (1, 7, 200, 3000):
        assert bound.least_tokens(text * count) <= len(model.tokenize(text * count, add_bos=False))
    assert bound.least_tokens("The quick brown fox. " * 3000) > 700


def test_a_log_that_was_dropped_is_kept_for_llama_cpp() -> None:
    """It may be called until another is set: one that was freed ended the process, at some later load."""
    dropped = weakref.ref(LlamaLog())
    gc.collect()
    kept = dropped()
    assert kept is not None
    kept.close()

"""The head of a GGUF, read without trust."""

from __future__ import annotations

import contextlib
import random
import struct
import time
from pathlib import Path

import pytest

from homeprefixd.config import AdapterConfig, ModelConfig
from homeprefixd.errors import ModelError
from homeprefixd.gguf_header import F32, kv_bytes_per_token, read_details, read_more_details, tensor_places
from homeprefixd.models.catalog import ModelSpec
from homeprefixd.models.loading import WORKER_BYTES, Budget, guess_memory
from tests.tiny_vector import make_vector

LAYERS, HEADS, WIDTH = 4, 8, 512


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def pair(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def header(*more: bytes) -> bytes:
    pairs = [
        pair("general.architecture", 8, text("llama")),
        pair("llama.block_count", 4, struct.pack("<I", LAYERS)),
        pair("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 3) + text("a") + text("bc") + text("")),
        pair("tokenizer.ggml.scores", 9, struct.pack("<IQ3f", 6, 3, 1, 2, 3)),
        pair("llama.embedding_length", 4, struct.pack("<I", WIDTH)),
        pair("llama.attention.head_count", 4, struct.pack("<I", HEADS)),
        pair("llama.context_length", 10, struct.pack("<Q", 2048)),
        *more,
    ]
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs)


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    return path


def test_details(tmp_path: Path) -> None:
    per_layer = pair("llama.attention.head_count_kv", 9, struct.pack("<IQ4i", 5, 4, 2, 0, 2, 0))
    details = read_details(write(tmp_path, header(per_layer)))
    assert (details["general.architecture"], details["block_count"], details["context_length"]) == ("llama", 4, 2048)
    assert details["attention.head_count_kv"] == [2, 0, 2, 0]
    assert kv_bytes_per_token(details, "f16", "f16") == 4 * 2 * (WIDTH // HEADS) * 2
    assert kv_bytes_per_token(details, "q8_0", "q8_0") == 4 * 2 * (WIDTH // HEADS) * 8.5 / 8
    assert kv_bytes_per_token(details, "q8_0", "iq4_nl") == 4 * (WIDTH // HEADS) * (8.5 + 4.5) / 8
    assert kv_bytes_per_token({}, "f16", "f16") == 0


def test_the_demo_model(demo_model: Path) -> None:
    assert kv_bytes_per_token(read_details(demo_model), "f16", "f16") == 23040


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    whole = header()
    for length in range(len(whole)):
        with pytest.raises(ModelError, match=r"x\.gguf is damaged .*download it again"):
            read_details(write(tmp_path, whole[:length]))


def test_nothing_that_is_written_there_is_believed(tmp_path: Path) -> None:
    chance = random.Random(1)
    whole = header()
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(4, len(data))] = chance.choice((0, 1, 9, 0x7F, 0xFF, chance.randrange(256)))
        try:
            details = read_details(write(tmp_path, bytes(data)))
        except ModelError:
            continue
        kv_bytes_per_token(details, "f16", "f16")
        with contextlib.suppress(ModelError):
            read_more_details(tmp_path / "x.gguf", ("ggml.tokens",))
        guess_memory(ModelSpec("x", tmp_path / "x.gguf", 0, 10), 1 << 20)


def test_a_number_that_is_none(tmp_path: Path) -> None:
    for number in (float("nan"), float("inf"), -1e308, 1e308):
        heads = pair("llama.attention.head_count_kv", 9, struct.pack("<IQ100d", 12, 100, *[number] * 100))
        with pytest.raises(ModelError, match=r"x\.gguf is damaged"):
            guess_memory(ModelSpec("x", write(tmp_path, header(heads)), 0, 10), 1 << 20)


def sparse(path: Path, texts: int, arrays: int = 1) -> Path:
    """A file whose metadata are arrays of so many empty texts, which lie in holes."""
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, arrays))
        for _ in range(arrays):
            file.write(pair("a", 9, struct.pack("<IQ", 8, texts)))
            file.seek(8 * texts, 1)
        file.write(bytes(8))
    return path


def test_what_lies_in_holes_takes_seconds_at_most(tmp_path: Path) -> None:
    """A disk gives room for 10**9 empty texts to a file of a kilobyte, and walking over them took 20 minutes."""
    for texts, arrays in ((10**9, 1), (10**5, 1000)):
        began = time.process_time()
        with pytest.raises(ModelError, match=r"x\.gguf is damaged \(it announces \d+ texts in arrays\)"):
            read_details(sparse(tmp_path / "x.gguf", texts, arrays))
        assert time.process_time() - began < 15
    assert read_details(sparse(tmp_path / "x.gguf", 10**6)) == {}  # more than any vocabulary has


def test_more_of_the_head(tmp_path: Path, demo_model: Path) -> None:
    details, count = read_more_details(demo_model, ("tokenizer.ggml.tokens", "tokenizer.chat_template"))
    assert (details["tokenizer.ggml.tokens"], count) == (49152, 134_515_008)
    assert str(details["tokenizer.chat_template"]).startswith("{% for message in messages %}")
    template = pair("tokenizer.chat_template", 8, text("x" * (1 << 20)))
    longer = pair("tokenizer.chat_template", 8, text("x" * ((1 << 20) + 1)))
    found = [
        read_more_details(write(tmp_path, header(one)), ("tokenizer.chat_template",))[0] for one in (template, longer)
    ]
    assert [len(str(one.get("tokenizer.chat_template", ""))) for one in found] == [1 << 20, 0]
    tensor = text("t") + struct.pack("<IQQIQ", 2, 2**60, 2**60, 1, 0)
    huge = bytearray(header() + tensor)
    huge[8:16] = struct.pack("<Q", 1)
    with pytest.raises(ModelError, match="more parameters than it can hold"):
        read_more_details(write(tmp_path, bytes(huge)), ())


def test_where_tensors_lie(tmp_path: Path) -> None:
    whole = make_vector(tmp_path / "v.gguf", width=8, layers=[1, 2]).read_bytes()
    first, second = tensor_places(whole, "v")
    assert (first.name, first.shape, first.kind, second.name) == ("direction.1", (8,), F32, "direction.2")
    assert second.offset + 4 * 8 == len(whole)
    for length in range(len(whole)):
        with pytest.raises(ModelError, match=r"^v is damaged "):
            tensor_places(whole[:length], "v")
    chance = random.Random(2)
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(4, len(data))] = chance.choice((0, 1, 9, 0x7F, 0xFF, chance.randrange(256)))
        try:
            places = tensor_places(bytes(data), "v")
        except ModelError:
            continue
        assert all(place.kind != F32 or place.offset + 4 * place.count <= len(data) for place in places)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_an_alignment_that_is_no_number(number: float) -> None:
    with pytest.raises(ModelError, match=r"^v is damaged "):
        tensor_places(header(pair("general.alignment", 9, struct.pack("<IQf", 6, 1, number))), "v")


def test_what_memory_a_model_takes(tmp_path: Path) -> None:
    path = write(tmp_path, header())
    per_token = LAYERS * HEADS * 2 * (WIDTH // HEADS) * 2

    def guess(most: int, **settings: int) -> int:
        return guess_memory(ModelSpec("x", path, 0, 1000, ModelConfig(**settings)), most) - WORKER_BYTES - 1000  # type: ignore[arg-type]

    assert guess(1 << 40) == 4 * 2048 * per_token
    assert guess(1 << 20) == 1 << 20
    assert guess(1 << 20, ctx=4096) == 4096 * per_token  # what was set is not made smaller
    assert guess(1 << 40, pool=640) == 640 * per_token


GIB = 1 << 30


def test_the_pool_leaves_room_for_the_weights() -> None:
    budget = Budget(8 * GIB, 10 * GIB, strict=False)
    assert budget.pool(ModelSpec("x", Path("/x"), 0, 2 * GIB)) == 2 * GIB
    assert budget.pool(ModelSpec("x", Path("/x"), 0, 7 * GIB)) == 3 * GIB // 4
    assert budget.pool(ModelSpec("x", Path("/x"), 0, 50 * GIB)) == GIB // 2


def test_the_pool_leaves_room_for_all_that_is_counted(tmp_path: Path) -> None:
    """So that a model is not refused which fits with a smaller pool."""
    path = write(tmp_path, header())
    adapter = tmp_path / "a.gguf"
    with adapter.open("wb") as file:
        file.truncate(GIB // 4)
    adapters = [AdapterConfig("a", str(adapter)), AdapterConfig("b", str(tmp_path / "gone.gguf"))]
    settings = ModelConfig(adapters=adapters, parallel=60)  # wants more than any pool here
    budget = Budget(5 * GIB, 8 * GIB, strict=True)
    for size in (3.5, 4.0, 4.2, 4.5, 4.56):
        spec = ModelSpec("x", path, 0, int(size * GIB), settings)
        assert guess_memory(spec, budget.pool(spec)) <= budget.total, size
    for size, wanted in ((4.2, "left"), (4.5, "left"), (4.7, "least"), (9.0, "least")):
        spec = ModelSpec("x", path, 0, int(size * GIB), settings)
        left = budget.total - spec.size - GIB // 4 - WORKER_BYTES
        assert budget.pool(spec) == (left if wanted == "left" else budget.total // 64)

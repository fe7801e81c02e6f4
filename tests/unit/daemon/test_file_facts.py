"""What a model's file tells without loading it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import llama_cpp
import pytest

from homeprefixd.config import ModelConfig
from homeprefixd.errors import ModelError
from homeprefixd.models.catalog import ModelSpec
from homeprefixd.models.file_facts import FILE_TYPES, FactsReader
from tests.tiny_model import make, split


def spec(path: Path, **settings: object) -> ModelSpec:
    return ModelSpec("x", path, 0, path.stat().st_size, ModelConfig(**settings))  # type: ignore[arg-type]


def test_names_of_file_types_are_llama_cpps() -> None:
    known = {
        int(getattr(llama_cpp, name)): name.removeprefix("LLAMA_FTYPE_ALL_").removeprefix("LLAMA_FTYPE_MOSTLY_")
        for name in dir(llama_cpp)
        if name.startswith("LLAMA_FTYPE_")
    }
    assert {kind: known[kind].removesuffix("_MOE") for kind in FILE_TYPES} == FILE_TYPES


def test_the_demo_model(demo_model: Path) -> None:
    facts = FactsReader().read(spec(demo_model), 0)
    assert (facts.arch, facts.description, facts.n_params) == ("llama", "Q4_1", 134_515_008)
    assert (facts.n_vocab, facts.n_embd, facts.n_ctx, facts.ctx_is_set) == (49152, 576, 8192, False)
    assert facts.template.startswith("{% for message in messages %}")
    assert not facts.only_embeds


@pytest.mark.parametrize(
    ("settings", "memory", "found"),
    [
        ({"ctx": 1000}, 1 << 20, 1000),
        ({"pool": 2048}, 0, 2048),
        ({}, (23_040 + 9 * 4 * 256) * 4500, 4500),  # K and V; scores: heads, bytes, batch
        ({"flash_attention": "on"}, 23_040 * 4000, 4000),
        ({}, 1, 256),
    ],
)
def test_the_context_that_it_would_have(demo_model: Path, settings: object, memory: int, found: int) -> None:
    assert FactsReader().read(spec(demo_model, **settings), memory).n_ctx == found  # type: ignore[arg-type]


def test_a_split_model_is_counted_whole_and_one_that_embeds_is_told(tmp_path: Path) -> None:
    whole = make("llama", None, tmp_path / "whole.gguf")
    parts = split(whole, tmp_path / "parts", 10)
    assert len(parts) > 1
    reader = FactsReader()
    assert reader.read(spec(parts[0]), 0).n_params == reader.read(spec(whole), 0).n_params > 0
    assert reader.read(spec(make("llama-embed", None, tmp_path / "embeds.gguf")), 0).only_embeds


def test_the_template_is_that_which_is_configured(tmp_path: Path) -> None:
    model = make("llama", None, tmp_path / "model.gguf")
    file = tmp_path / "chat.jinja"
    file.write_text("{{ tools }}")
    for given, found in (("{{ x }}", "{{ x }}"), (str(file), "{{ tools }}"), ("/absent.jinja", "")):
        assert FactsReader().read(spec(model, chat_template=given), 0).template == found


def test_what_changes_is_read_again(tmp_path: Path) -> None:
    model = make("llama", None, tmp_path / "model.gguf")
    reader = FactsReader()
    first = reader.read(spec(model), 0)
    assert reader.read(spec(model), 0) == first
    os.replace(make("qwen3", None, tmp_path / "other.gguf"), model)
    assert reader.read(spec(model), 0).arch == "qwen3"
    model.write_bytes(model.read_bytes()[:1000])
    with pytest.raises(ModelError, match="is damaged"):
        reader.read(spec(model), 0)
    with pytest.raises(ModelError, match="no model"):
        reader.read(replace(spec(model), problem="it is no model"), 0)
    known = spec(model)
    model.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        reader.read(known, 0)

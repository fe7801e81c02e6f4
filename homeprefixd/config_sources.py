"""Where settings come from: a TOML file, then `HOMEPREFIXD_*` variables, then flags, into one `config.Config`.

Later sources win, key by key, and each value remembers its origin. Everything a person can get wrong is refused here,
once, with the source, the key and what is allowed; what a setting means is in `config.py`.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from .config import GPU_LAYERS_AUTO, KV_TYPES, KV_TYPES_WITHOUT_FLASH, PINNED, Config
from .config_adapters import AdaptersError, parse_adapters
from .config_vectors import VectorsError, parse_vectors
from .errors import ConfigError
from .program import VARIABLE as PROGRAM
from .program import typed

PREFIX = "HOMEPREFIXD_"

SYSTEM_FILE = Path("/etc/homeprefixd/config.toml")

OWNER_FD = "HOMEPREFIXD_OWNER_FD"

OTHER_VARIABLES: Mapping[str, str] = {
    "HOMEPREFIXD_API_KEY": "the key that the commands send to a daemon that asks for one",
    "HOMEPREFIXD_CONFIG": "the configuration file, where --config is not given",
    "HOMEPREFIXD_DEBUG_LOGITS": "1: replies carry a hash of the first token's logits (`timings.logits_sha256`)",
    OWNER_FD: "number of an open pipe: the daemon stops when nobody holds its other end any more; `demo` sets it",
    PROGRAM: "what hints call the command; `scripts/run` sets it",
    "HOMEPREFIXD_TRACEBACK": "1: the command shows the traceback of an unexpected error",
}
"""Variables that are not settings, with their meaning. Every other `HOMEPREFIXD_*` must name a setting."""

NO_MODEL = "none"
"""`model.path` of a daemon without a model."""

_FILES = ("server.keys_file", "server.tls_cert", "server.tls_key")

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

_OF_ONE_MODEL = ("path", "alias", "keep_alive", "chat_template", "cache_share", "adapters", "control_vectors")
"""Settings of `[model]` that are not those of `[[models.list]]` too, where a table says nothing."""
_UNITS = {
    unit.lower(): factor
    for power, letter in enumerate("KMGT", start=1)
    for unit, factor in ((f"{letter}iB", 1024**power), (f"{letter}B", 1000**power))
} | {"": 1, "b": 1}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
MAX_SIZE = 64 << 40
"""Bytes. A process can map twice as many."""

_TRUTHS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True)
class Key:
    """One setting: its place in the tree, type and default."""

    section: str
    name: str
    kind: Literal["str", "int", "float", "bool", "size", "choice", "adapters", "control_vectors"]
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


@dataclass(frozen=True)
class Flag:
    """A flag that was given on the command line, as text."""

    name: str  # "--port"
    text: str


@dataclass(frozen=True)
class Machine:
    """What percentages are of, in bytes; asked only where one is used."""

    memory: Callable[[], int]
    disk: Callable[[Path], int]


@dataclass(frozen=True)
class Loaded:
    """A checked configuration and the origin of each value, by its path (`server.port`)."""

    config: Config
    origins: Mapping[str, Origin]
    file: Path | None


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
    if path in _SIZES:
        return Key(section, item.name, "size", item.default)
    return Key(section, item.name, item.type.__name__, item.default)


# ------------------------------------------------------------------------------------------------------- the sources


def load(
    *,
    environ: Mapping[str, str],
    flags: Mapping[str, Flag] | None = None,
    config_file: Flag | None = None,
    machine: Machine | None = None,
    system_file: Path = SYSTEM_FILE,
) -> Loaded:
    """Read every source and check the result.

    `flags` has the flags that were given, by the path of their setting; `config_file` is `--config`.
    Raises ConfigError, which names the source, the key and what is allowed.
    """
    machine = machine or this_machine()
    known = keys()
    file = find_file(environ, config_file, system_file)
    given: dict[str, tuple[Origin, Any]] = {}
    if file is not None:
        given |= _from_file(file, known)
    listed = given.pop(MODEL_LIST, (DEFAULT, []))[1]
    given |= _from_environment(environ, known)
    for path, flag in (flags or {}).items():
        given[path] = Origin("flag", flag.name), flag.text

    values: dict[str, Any] = {path: key.default for path, key in known.items()}
    origins: dict[str, Origin] = dict.fromkeys(known, DEFAULT)
    percent: dict[str, float] = {}
    for path, (origin, value) in given.items():
        values[path] = _parse(known[path], value, origin, percent)
        origins[path] = origin
    _resolve_paths(values, origins, file)
    _resolve_percent(percent, values, environ, machine)
    _check(values, origins)
    tree: dict[str, dict[str, Any]] = {}
    for path, key in known.items():
        tree.setdefault(key.section, {})[key.name] = values[path]
    tree["models"]["list"] = [_listed(table, values, origins, file, known) for table in listed]
    return Loaded(msgspec.convert(tree, Config), origins, file)


def find_file(
    environ: Mapping[str, str], config_file: Flag | None = None, system_file: Path = SYSTEM_FILE
) -> Path | None:
    """The configuration file: `--config`, `$HOMEPREFIXD_CONFIG`, the user's own, the system's; None if there is none.

    One file is read. A file that was named must exist: ConfigError.
    """
    variable = f"{PREFIX}CONFIG"
    named = config_file or (Flag(variable, environ[variable]) if environ.get(variable) else None)
    if named is not None:
        path = Path(named.text).expanduser()
        if not os.path.isfile(path):
            raise ConfigError(f"{named.name}: there is no readable file {path}; name a TOML file, or leave it out")
        return path
    for place in (user_file(environ), system_file):
        if place is not None and os.path.isfile(place):  # unlike Path's, False where a directory may not be entered
            return place
    return None


def user_file(environ: Mapping[str, str]) -> Path | None:
    """`$XDG_CONFIG_HOME/homeprefixd/config.toml`, or the same below `~/.config`; None without a home."""
    base = environ.get("XDG_CONFIG_HOME") or (f"{environ['HOME']}/.config" if environ.get("HOME") else "")
    return Path(base) / "homeprefixd" / "config.toml" if base else None


def cache_directory(configured: str, environ: Mapping[str, str]) -> Path:
    """Where the store lies: as configured, else `$CACHE_DIRECTORY` (systemd), else below `$XDG_CACHE_HOME`.

    Raises ConfigError where none of them is there, or it is a file.
    """
    if configured:
        path = Path(configured).expanduser()
        if os.path.isfile(path):
            raise ConfigError(f"cache.dir (--cache-dir): {path} is a file, not a directory")
        return path
    if environ.get("CACHE_DIRECTORY"):
        return Path(environ["CACHE_DIRECTORY"].split(":")[0])
    base = environ.get("XDG_CACHE_HOME", "")
    if not base.startswith("/"):  # a relative one is to be ignored, says the XDG specification
        base = f"{environ['HOME']}/.cache" if environ.get("HOME") else ""
    if not base:
        raise ConfigError("no cache directory: set cache.dir (or --cache-dir); neither CACHE_DIRECTORY nor HOME is set")
    return Path(base) / "homeprefixd"


def this_machine() -> Machine:
    """Sizes of the machine that this runs on. Looked up when asked for: most starts need none."""

    def memory() -> int:
        from .machine import total_memory

        return total_memory()

    def disk(path: Path) -> int:
        from .machine import total_disk

        return total_disk(path)

    return Machine(memory, disk)


def _from_file(file: Path, known: Mapping[str, Key]) -> dict[str, tuple[Origin, Any]]:
    try:
        text = file.read_text(encoding="utf-8")
        tree = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: is not TOML: {error}") from error
    lines = _lines(text)
    sections = {key.section for key in known.values()}
    given: dict[str, tuple[Origin, Any]] = {}
    for section, table in tree.items():
        place = f"{file}:{lines.get(section, lines.get(f'{section}.', 1))}"
        if section not in sections:
            raise ConfigError(f"{place}: {_unknown_section(section, sections, known)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{place}: {section} is a section: write [{section}] and its settings below it")
        for name, value in table.items():
            place = f"{file}:{lines.get(f'{section}.{name}', 1)}"
            path = f"{section}.{name}"
            if path == MODEL_LIST:
                given[path] = Origin("file", place), list(_tables(value, file, lines, known))
                continue
            if path not in known:
                names = [key.name for key in known.values() if key.section == section]
                names += ["list"] if section == "models" else []
                raise ConfigError(f"{place}: {_unknown(path, name, names, known)}")
            given[path] = Origin("file", place), value
    return given


def _tables(
    tables: Any, file: Path, lines: Mapping[str, int], known: Mapping[str, Key]
) -> Iterator[dict[str, tuple[Origin, Any]]]:
    """What each table of MODEL_LIST gives, by path (`model.ctx`)."""
    place = f"{file}:{lines.get(MODEL_LIST, lines.get('models.list[0].', 1))}"
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{place}: models.list is a list of tables: write [[models.list]] and its settings below it")
    for index, table in enumerate(tables):
        section = f"models.list[{index}]."
        given: dict[str, tuple[Origin, Any]] = {}
        for name, value in table.items():
            place = f"{file}:{lines.get(section + name, lines.get(section, 1))}"
            path = f"model.{name}"
            if path not in known:
                names = [key.name for key in known.values() if key.section == "model"]
                raise ConfigError(
                    f"{place}: there is no setting {name} of a model{_near(name, names)};"
                    f" [[models.list]] has {', '.join(names)}"
                )
            given[path] = Origin("file", place), value
        if "model.path" not in given:
            place = f"{file}:{lines.get(section, 1)}"
            raise ConfigError(f"{place}: [[models.list]] needs path, the model's GGUF file")
        yield given


def _listed(
    given: Mapping[str, tuple[Origin, Any]],
    values: Mapping[str, Any],
    origins: Mapping[str, Origin],
    file: Path | None,
    known: Mapping[str, Key],
) -> dict[str, Any]:
    """The settings of one table of MODEL_LIST: its own, else those of `[model]`."""
    own, own_origins = dict(values), dict(origins)
    for name in _OF_ONE_MODEL:
        path = f"model.{name}"
        own[path], own_origins[path] = known[path].default, DEFAULT
    for path, (origin, value) in given.items():
        own[path], own_origins[path] = _parse(known[path], value, origin, {}), origin
    if own["model.path"] in ("", NO_MODEL):
        _refuse(own_origins["model.path"], "models.list: path", own["model.path"], "a GGUF file")
    _resolve_paths(own, own_origins, file)
    _check(own, own_origins)
    return {key.name: own[path] for path, key in known.items() if key.section == "model"}


def _lines(text: str) -> dict[str, int]:
    """Line numbers of sections ("server.") and settings ("server.port"). Good enough for messages, no more."""
    found: dict[str, int] = {}
    section = ""
    tables: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\[\s*([\w.-]+)\s*\]\]", line):
            section = f"{header[1]}[{tables.get(header[1], 0)}]."
            tables[header[1]] = tables.get(header[1], 0) + 1
            found.setdefault(section, number)
        elif header := re.match(r"\s*\[\s*([\w.-]+)\s*\]", line):
            section = f"{header[1]}."
            found.setdefault(section, number)
        elif setting := re.match(r"\s*([\w.-]+)\s*=", line):
            found.setdefault(section + setting[1], number)
    return found


def _from_environment(environ: Mapping[str, str], known: Mapping[str, Key]) -> dict[str, tuple[Origin, Any]]:
    variables = {key.variable: path for path, key in known.items()}
    given: dict[str, tuple[Origin, Any]] = {}
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in OTHER_VARIABLES:
            continue
        if name not in variables:
            near = _near(name, [*variables, *OTHER_VARIABLES])
            raise ConfigError(f"{name}: there is no such variable{near}; {typed('config show')} lists the settings")
        given[variables[name]] = Origin("environment", name), environ[name]
    return given


# --------------------------------------------------------------------------------------------------------- messages


def _near(word: str, words: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""


def _unknown_section(section: str, sections: Iterable[str], known: Mapping[str, Key]) -> str:
    inside = [key.section for key in known.values() if key.name == section]
    if inside:
        return f"{section} belongs below [{inside[0]}]"
    listed = ", ".join(f"[{name}]" for name in sorted(sections))
    return f"there is no section or setting {section}{_near(section, sections)}; sections are {listed}"


def _unknown(path: str, name: str, names: Iterable[str], known: Mapping[str, Key]) -> str:
    elsewhere = [key.path for key in known.values() if key.name == name]
    near = f"; did you mean {elsewhere[0]}?" if elsewhere else _near(name, names)
    return f"there is no setting {path}{near}; [{path.split('.')[0]}] has {', '.join(names)}"


def _refuse(origin: Origin, path: str, value: Any, allowed: str) -> typing.NoReturn:
    raise ConfigError(f"{origin}: {path} cannot be {value!r}; allowed: {allowed}", param=path)


# ----------------------------------------------------------------------------------------------------------- values


def _parse(key: Key, value: Any, origin: Origin, percent: dict[str, float]) -> Any:
    """`value` from any source as the setting's type. A percentage is put into `percent` for later."""
    if key.automatic and isinstance(value, str) and value.strip().lower() == "auto":
        return 0
    match key.kind:
        case "str":
            return _text(key, value, origin)
        case "choice":
            near = _near(value, key.choices) if isinstance(value, str) else ""
            allowed = ", ".join(choice or "empty" for choice in key.choices)
            return value if value in key.choices else _refuse(origin, key.path, value, allowed + near)
        case "int":
            return _whole(key, value, origin)
        case "float":
            return _real(key, value, origin)
        case "bool":
            return _truth(key, value, origin)
        case "size":
            return _size(key, value, origin, percent)
        case "adapters":
            try:
                return parse_adapters(value)
            except AdaptersError as error:
                raise ConfigError(f"{origin}: {key.path}: {error}", param=key.path) from error
        case "control_vectors":
            try:
                return parse_vectors(value)
            except VectorsError as error:
                raise ConfigError(f"{origin}: {key.path}: {error}", param=key.path) from error


def _text(key: Key, value: Any, origin: Origin) -> str:
    if not isinstance(value, str):
        _refuse(origin, key.path, value, "text")
    if "\0" in value or not _is_unicode(value):
        _refuse(origin, key.path, value, "text in UTF-8 without NUL")
    return value


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of a command line or an environment that are no UTF-8
        return False
    return True


def _whole(key: Key, value: Any, origin: Origin) -> int:
    if key.path == "model.gpu_layers" and value == "auto":
        return GPU_LAYERS_AUTO
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if key.name == "cache_share" and isinstance(value, str) and (found := re.fullmatch(r"\s*(\d{1,3})\s*%\s*", value)):
        return int(found[1])
    if isinstance(value, str) and origin.kind != "file" and re.fullmatch(r"\s*[+-]?\d{1,18}\s*", value):
        return int(value)
    _refuse(
        origin, key.path, value, "a whole number" + (", or auto" if key.automatic or key.name == "gpu_layers" else "")
    )


def _real(key: Key, value: Any, origin: Origin) -> float:
    if isinstance(value, str) and origin.kind != "file":
        try:
            value = float(value)
        except ValueError:
            _refuse(origin, key.path, value, "a number of seconds, such as 2 or 0.5")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        _refuse(origin, key.path, value, "a number of seconds, such as 2 or 0.5")
    return float(value)


def _truth(key: Key, value: Any, origin: Origin) -> bool:
    if isinstance(value, str) and origin.kind != "file" and value.strip().lower() in _TRUTHS:
        return _TRUTHS[value.strip().lower()]
    if not isinstance(value, bool):
        _refuse(origin, key.path, value, "true or false")
    return value


def _size(key: Key, value: Any, origin: Origin, percent: dict[str, float]) -> int:
    share = {"cache.hot": "memory", "models.memory": "memory", "cache.warm": "the disk"}.get(key.path)
    allowed = "a size such as 20GiB, 500MB or a number of bytes"
    if share:
        allowed += f", or a share of {share} such as 10%"
    if key.automatic:
        allowed += ", or auto"
    if isinstance(value, str):
        found = _PERCENT.fullmatch(value.strip())
        if found and share:
            if not 0 < float(found[1]) <= 100:
                _refuse(origin, key.path, value, "more than 0% and at most 100%")
            percent[key.path] = float(found[1])
            return 0
        size = parse_size(value)
    else:
        size = value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
    if size is None:
        _refuse(origin, key.path, value, allowed)
    if size > MAX_SIZE:
        _refuse(origin, key.path, value, f"at most {MAX_SIZE >> 40}TiB")
    return size


def parse_size(text: str) -> int | None:
    """Bytes of `20GiB`, `500MB` (decimal), `1.5 GiB` or `1048576`; None if it is no size."""
    found = _SIZE.fullmatch(text.strip())
    if not found or found[2].lower() not in _UNITS:
        return None
    if not found[2] and "." in found[1]:
        return None
    return round(float(found[1]) * _UNITS[found[2].lower()]) if found[2] else int(found[1])


def _resolve_paths(values: dict[str, Any], origins: Mapping[str, Origin], file: Path | None) -> None:
    """`~` is the home; what a file names is relative to the file, what a person types to where they are."""
    for path in (*_FILES, "model.path", "model.chat_template", "models.dir", "cache.dir", "records.file"):
        text = values[path]
        if not text or (path == "model.path" and text == NO_MODEL):
            continue
        if path == "model.chat_template" and re.search(r"[\n{]", text):
            continue  # a template may be given as its text
        place = Path(text).expanduser()
        if origins[path].kind == "file" and file is not None:
            place = file.absolute().parent / place
        values[path] = str(place.absolute())
    for path in (ADAPTERS, CONTROL_VECTORS):
        beside = file.absolute().parent if origins[path].kind == "file" and file is not None else Path()
        values[path] = [
            {**one, "path": str((beside / Path(one["path"]).expanduser()).absolute())} for one in values[path]
        ]


def _resolve_percent(
    percent: Mapping[str, float], values: dict[str, Any], environ: Mapping[str, str], machine: Machine
) -> None:
    for path in ("cache.hot", "models.memory"):
        if path in percent:
            values[path] = max(1, int(machine.memory() * percent[path] / 100))
    if "cache.warm" in percent:
        place = cache_directory(values["cache.dir"], environ)
        values["cache.warm"] = max(1, int(machine.disk(place) * percent["cache.warm"] / 100))


# ----------------------------------------------------------------------------------------------------------- checks


def _between(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: low <= value <= high


def _is_expression(text: Any) -> bool:
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


_MIB = 1 << 20
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+/?", re.IGNORECASE)

_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "server.host": (lambda value: bool(value.strip()), "an address to listen on, such as 127.0.0.1 or 0.0.0.0"),
    "server.port": (_between(0, 65535), "1 to 65535, or 0 for any free port"),
    "server.ollama_port": (_between(0, 65535), "a port such as 11434, or 0 for none"),
    "server.cors_origins": (
        lambda value: all(_ORIGIN.fullmatch(one) for one in value.replace(",", " ").split()),
        "origins such as https://chat.home.lan, by spaces, or *",
    ),
    "server.max_body": (_between(1024, 1 << 40), "1KiB to 1TiB"),
    "server.grace": (_between(0, 3600), "0 to 3600 seconds"),
    "server.keep_alive": (_between(0.1, 3600), "0.1 to 3600 seconds"),
    "model.alias": (str.isprintable, "text without control characters, or empty for the file's name"),
    "model.ctx": (
        lambda value: value == 0 or 64 <= value <= 1 << 26,
        f"at least 64 tokens and at most {1 << 26}, or auto (0)",
    ),
    "model.pool": (
        lambda value: value == 0 or 64 <= value <= 1 << 28,
        f"at least 64 cells and at most {1 << 28}, or auto (0)",
    ),
    "model.parallel": (_between(0, 64), "1 to 64, or auto (0)"),
    "model.threads": (_between(0, 1024), "1 to 1024, or auto (0)"),
    "model.batch": (lambda value: 64 <= value <= 65536 and value % 64 == 0, "a multiple of 64, from 64 to 65536"),
    "model.gpu_layers": (_between(GPU_LAYERS_AUTO, 10000), "0 to 10000, -1 for all, or auto"),
    "model.keep_alive": (
        lambda value: value in (PINNED, 0) or 1 <= value <= 1e9,
        "1 to 1000000000 seconds, -1 to load it at the start and keep it, or auto (0)",
    ),
    "model.cache_share": (_between(0, 100), "a percentage of cache.warm, 1 to 100, or 0 for no bound"),
    "models.memory": (lambda value: value == 0 or value >= 64 * _MIB, "at least 64MiB, or auto (0)"),
    "model.template_timeout": (_between(0.01, 600), "0.01 to 600 seconds"),
    "model.max_queue": (_between(1, 100_000), "1 to 100000"),
    "model.max_stall": (_between(0.01, 600), "0.01 to 600 seconds"),
    "cache.hot": (lambda value: value == 0 or value >= _MIB, "at least 1MiB, or auto (0); reuse = off does without"),
    "cache.warm": (lambda value: value == 0 or value >= _MIB, "at least 1MiB, or auto (0); reuse = off does without"),
    "cache.compression": (_between(0, 19), "0 (raw) to 19"),
    "cache.tail_delay": (_between(0, 3600), "0 to 3600 seconds"),
    "cache.write_queue": (lambda value: value == 0 or value >= _MIB, "at least 1MiB, or auto (0)"),
    "records.keep": (_between(1, 100_000), "1 to 100000"),
    "records.file_size": (_between(4096, 1 << 40), "4KiB to 1TiB"),
    "records.files": (_between(0, 1000), "0 to 1000"),
    "stable.custom": (_is_expression, "a regular expression of Python's `re`"),
    "stable.move": (_is_expression, "a regular expression of Python's `re`"),
}


def _check(values: Mapping[str, Any], origins: Mapping[str, Origin]) -> None:
    for path, (holds, allowed) in _CHECKS.items():
        if not holds(values[path]):
            _refuse(origins[path], path, values[path], allowed)
    of_v = "model.kv_type_v" if values["model.kv_type_v"] else "model.kv_type"
    if values[of_v] not in KV_TYPES_WITHOUT_FLASH and values["model.flash_attention"] == "off":
        raise ConfigError(
            f"{origins[of_v]}: {of_v} {values[of_v]!r} needs flash attention, which is off by"
            f" {origins['model.flash_attention']}; set model.flash_attention = 'on', or model.kv_type_v to one of"
            f" {', '.join(KV_TYPES_WITHOUT_FLASH)}",
            param=of_v,
        )
    if values["server.tls_key"] and not values["server.tls_cert"]:
        raise ConfigError(
            f"{origins['server.tls_key']}: server.tls_key needs server.tls_cert, the certificate",
            param="server.tls_key",
        )
    if values["server.ollama_port"] and values["server.ollama_port"] == values["server.port"]:
        _refuse(origins["server.ollama_port"], "server.ollama_port", values["server.port"], "another than server.port")
    if 0 < values["model.pool"] < values["model.ctx"]:
        raise ConfigError(
            f"{origins['model.pool']}: model.pool cannot be {values['model.pool']}: it holds every request's tokens, so"
            f" allowed: at least model.ctx ({values['model.ctx']}, {origins['model.ctx']}), or auto (0)",
            param="model.pool",
        )

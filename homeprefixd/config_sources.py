"""Where settings come from: a TOML file, then `HOMEPREFIXD_*` variables, then flags, into one `config.Config`.

Later sources win, key by key, and each value remembers its origin. Everything a person can get wrong is refused here,
once, with the source, the key and what is allowed; what a setting means is in `config.py`,
what it may be in `config_values.py`.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from .config import Config
from .config_keys import ADAPTERS, CONTROL_VECTORS, DEFAULT, MODEL_LIST, PREFIX, Key, Origin, keys, near, refuse
from .config_values import check, parse
from .errors import ConfigError
from .program import VARIABLE as PROGRAM
from .program import typed

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

_OF_ONE_MODEL = ("path", "alias", "keep_alive", "chat_template", "cache_share", "adapters", "control_vectors")
"""Settings of `[model]` that are not those of `[[models.list]]` too, where a table says nothing."""


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
        values[path] = parse(known[path], value, origin, percent)
        origins[path] = origin
    _resolve_paths(values, origins, file)
    _resolve_percent(percent, values, environ, machine)
    check(values, origins)
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
        path = Path(os.path.expanduser(named.text))
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
        path = Path(os.path.expanduser(configured))
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
            path = f"{section}.{name}"
            place = f"{file}:{lines.get(path, lines.get(f'{path}[0].', 1))}"
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
                    f"{place}: there is no setting {name} of a model{near(name, names)};"
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
        own[path], own_origins[path] = parse(known[path], value, origin, {}), origin
    if own["model.path"] in ("", NO_MODEL):
        refuse(own_origins["model.path"], "models.list: path", own["model.path"], "a GGUF file")
    _resolve_paths(own, own_origins, file)
    check(own, own_origins)
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
            meant = near(name, [*variables, *OTHER_VARIABLES])
            raise ConfigError(f"{name}: there is no such variable{meant}; {typed('config show')} lists the settings")
        given[variables[name]] = Origin("environment", name), environ[name]
    return given


# --------------------------------------------------------------------------------------------------------- messages


def _unknown_section(section: str, sections: Iterable[str], known: Mapping[str, Key]) -> str:
    inside = [key.section for key in known.values() if key.name == section]
    if inside:
        return f"{section} belongs below [{inside[0]}]"
    listed = ", ".join(f"[{name}]" for name in sorted(sections))
    return f"there is no section or setting {section}{near(section, sections)}; sections are {listed}"


def _unknown(path: str, name: str, names: Iterable[str], known: Mapping[str, Key]) -> str:
    elsewhere = [key.path for key in known.values() if key.name == name]
    meant = f"; did you mean {elsewhere[0]}?" if elsewhere else near(name, names)
    return f"there is no setting {path}{meant}; [{path.split('.')[0]}] has {', '.join(names)}"


def _resolve_paths(values: dict[str, Any], origins: Mapping[str, Origin], file: Path | None) -> None:
    """`~` is the home; what a file names is relative to the file, what a person types to where they are."""
    for path in (*_FILES, "model.path", "model.chat_template", "models.dir", "cache.dir", "records.file"):
        text = values[path]
        if not text or (path == "model.path" and text == NO_MODEL):
            continue
        if path == "model.chat_template" and re.search(r"[\n{]", text):
            continue  # a template may be given as its text
        place = Path(os.path.expanduser(text))
        if origins[path].kind == "file" and file is not None:
            place = file.absolute().parent / place
        values[path] = str(place.absolute())
    for path in (ADAPTERS, CONTROL_VECTORS):
        beside = file.absolute().parent if origins[path].kind == "file" and file is not None else Path()
        values[path] = [
            {**one, "path": str((beside / Path(os.path.expanduser(one["path"]))).absolute())} for one in values[path]
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

"""Rules of `[stable]` that are written into a configuration file, whose other lines stay as they are."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .config_keys import PREFIX
from .config_sources import Flag, load
from .errors import ConfigError, HomeprefixdError

SECTION = "stable"

EXPRESSIONS = ("move", "custom")
"""Rules that are regular expressions: a second one is added to the first."""

_HEADER = re.compile(r"""\s*\[\s*(?:stable|"stable"|'stable')\s*\]\s*(?:#.*)?""")
_ACCESS_LIST = "system.posix_acl_access"


class Applied(NamedTuple):
    """What became of a rule that is in force now."""

    file: str  # where it was written; "": nowhere, so it counts until the daemon ends or reads its settings again
    reason: str  # why it was not; "": it was


def rule_line(rule: str, setting: str) -> str:
    """As it stands in the file."""
    plain = "'" not in setting and setting.isprintable() and setting != "on"
    quoted = json.dumps(setting, ensure_ascii=False).replace("\x7f", "\\u007f")
    return f"{rule} = '{setting}'" if plain else f"{rule} = {quoted}"


def joined(old: str, new: str) -> str:
    """One regular expression for both."""
    if not old or old == new:
        return new
    known = f"|{old}|"
    return old if f"|{new}|" in known else f"{old}|{new}"


def apply_rule(rule: str, file: Path, setting: str = "on", environ: Mapping[str, str] = os.environ) -> str:
    """Set a rule in a TOML file. Its path.

    Nothing else in it changes, nor whose it is and who may read it; a link stays one. What is written was read again
    before: a daemon that could be started with the file still can. Raises ConfigError with the line to add by hand; the
    file is as it was then.
    """
    place = Path(os.path.realpath(file))
    try:
        old = _read(place)
        tree = tomllib.loads((old or "").replace("\r\n", "\n"))
        section = tree.get(SECTION, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{SECTION} is no section in it")
        had = section.get(rule)
        if rule in EXPRESSIONS and isinstance(had, str):
            setting = joined(had, setting)
        if had != setting:
            wanted = copy.deepcopy(tree)
            wanted.setdefault(SECTION, {})[rule] = setting
            text = _edited(old or "", rule, setting, wanted)
            others = {name: text for name, text in environ.items() if name != f"{PREFIX}STABLE_{rule.upper()}"}
            place.parent.mkdir(parents=True, exist_ok=True)
            with _part(place, text, new=old is None) as part:
                _check(part, file, others)
                part.replace(place)
            _sync_directory(place.parent)
    except OSError as error:
        raise _refused(file, rule, setting, f"it cannot be written: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise _refused(file, rule, setting, "it is not UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        raise _refused(file, rule, setting, f"it is not TOML: {error}") from error
    except HomeprefixdError as error:
        raise _refused(file, rule, setting, error.message) from error
    return str(file)


def _refused(file: Path, rule: str, setting: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{file} was left as it is: {reason}. Add this line to its section [{SECTION}] by hand: "
        + rule_line(rule, setting)
    )


def _read(place: Path) -> str | None:
    """The file's text with its line ends; None if there is none."""
    try:
        kind = place.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(kind):
        raise ConfigError("it is no regular file")
    return place.read_bytes().decode()


# ---------------------------------------------------------------------------------------------------------- editing


def _edited(text: str, rule: str, setting: str, wanted: Mapping[str, Any]) -> str:
    """The text whose values are `wanted`. Raises ConfigError."""
    line = rule_line(rule, setting)
    end = "\r\n" if text.count("\r\n") == text.count("\n") > 0 else "\n"
    for new in _candidates(text, rule, line, end):
        with contextlib.suppress(tomllib.TOMLDecodeError):
            if tomllib.loads(new.replace("\r\n", "\n")) == wanted:
                return new
    raise ConfigError("the rule cannot be written into it without changing something else")


def _candidates(text: str, rule: str, line: str, end: str) -> Iterator[str]:
    """Texts that may have the line, the most natural first. Whether they say what they should is not known here: a
    header may stand in a string, too.
    """
    lines = text.split("\n")
    for index, known in enumerate(lines):
        if _HEADER.fullmatch(known):
            if index == len(lines) - 1:
                yield f"{text}{end}{line}{end}"
            else:
                yield "\n".join([*lines[: index + 1], line + end.removesuffix("\n"), *lines[index + 1 :]])
    gap = "" if not text else end if text.endswith("\n") else 2 * end
    yield f"{text}{gap}[{SECTION}]{end}{line}{end}"
    edited = _replaced(text, rule, line)
    if edited is not None:
        yield edited if end == "\n" else re.sub(r"(?<!\r)\n", end, edited)


def _replaced(text: str, rule: str, line: str) -> str | None:
    """With the rule's value in whatever form it has: in a table, inline or dotted. None if that cannot be done."""
    import tomlkit  # here: the daemon that never writes a rule does not pay for it
    from tomlkit.exceptions import TOMLKitError

    try:
        document = tomlkit.parse(text)
        if tomlkit.dumps(document) != text:
            return None
        section: Any = document[SECTION]
        section[rule] = tomlkit.parse(f"{line}\n").item(rule)
        return tomlkit.dumps(document)
    except (TOMLKitError, KeyError, TypeError, ValueError, IndexError):
        return None


# ---------------------------------------------------------------------------------------------------------- writing


def _check(part: Path, file: Path, environ: Mapping[str, str]) -> None:
    """Raises ConfigError if no daemon could be started with the new file."""
    try:
        load(environ=environ, config_file=Flag("--config", str(part)))
    except ConfigError as error:
        raise ConfigError(f"it would not be taken: {error.message.replace(str(part), str(file))}") from error


@contextlib.contextmanager
def _part(place: Path, text: str, *, new: bool) -> Iterator[Path]:
    """A file beside `place` that is on disk and has its owner, group, mode and attributes; removed if still there.

    Raises ConfigError where those cannot be kept: who reads the file now could be shut out.
    """
    part = place.with_name(f".{place.name}.{os.getpid()}.{secrets.token_hex(4)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(part, flags, 0o666 if new else 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(text.encode())
            if not new:
                _keep(place, descriptor)
            file.flush()
            os.fsync(descriptor)
        yield part
    finally:
        part.unlink(missing_ok=True)


def _keep(place: Path, descriptor: int) -> None:
    was, now = place.stat(), os.fstat(descriptor)
    if not os.access(place, os.W_OK):  # that its directory may be written does not mean that the file may
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if (was.st_uid, was.st_gid) != (now.st_uid, now.st_gid):
        try:
            os.chown(descriptor, was.st_uid, was.st_gid)
        except OSError as error:
            raise ConfigError(
                f"its owner and group ({was.st_uid}:{was.st_gid}) could not be kept, so that the daemon might not be"
                " able to read it any more (its owner, or root, can apply the rule)"
            ) from error
    os.chmod(descriptor, stat.S_IMODE(was.st_mode))
    for name in _attributes(place):
        try:
            os.setxattr(descriptor, name, os.getxattr(place, name))
        except OSError as error:
            if name == _ACCESS_LIST:
                raise ConfigError("its access list could not be kept") from error


def _attributes(place: Path) -> list[str]:
    try:
        return os.listxattr(place)
    except OSError:  # a file system without any
        return []


def _sync_directory(directory: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .config_keys import PREFIX
from .config_sources import Flag, load
from .errors import ConfigError, HomeprefixdError
from .expressions import joined

SECTION = "stable"

EXPRESSIONS = ("move", "custom")
"""Rules that are regular expressions: a second one is added to the first."""

PER_APP = "per_app"
"""Its list of tables with rules of single apps."""

_HEADER = re.compile(r"""\s*\[\s*(?:stable|"stable"|'stable')\s*\]\s*(?:#.*)?""")
_APP_HEADER = re.compile(r"""\s*\[\[\s*(?:stable|"stable"|'stable')\s*\.\s*["']?per_app["']?\s*\]\]\s*(?:#.*)?""")
_ACCESS_LIST = "system.posix_acl_access"


class Applied(NamedTuple):
    """What became of a rule that is in force now."""

    file: str  # where it was written; "": nowhere, so it counts until the daemon ends
    reason: str  # why it was not; "": it was


def rule_line(rule: str, setting: str) -> str:
    """As it stands in the file."""
    plain = "'" not in setting and setting.isprintable() and setting != "on"
    return f"{rule} = '{setting}'" if plain else f"{rule} = {quoted(setting)}"


def quoted(text: str) -> str:
    """As a value of TOML. What a terminal does not show, or shows as something else, is escaped: it can be copied."""
    shown = json.dumps(text, ensure_ascii=False)
    return "".join(one if one.isprintable() else _escaped(ord(one)) for one in shown)


def _escaped(code: int) -> str:
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def rule_lines(rule: str, setting: str, app: str) -> list[str]:
    """All that is to be added to a file that has nothing of it: for one app, or ("") for all."""
    line = rule_line(rule, setting)
    return [f"[[{SECTION}.{PER_APP}]]", f"app = {quoted(app)}", line] if app else [f"[{SECTION}]", line]


def with_rule(section: Mapping[str, Any], rule: str, setting: str, app: str) -> dict[str, Any]:
    """`[stable]` with a rule set, for one app or ("") for all; an expression is added to the one that is there."""
    new = copy.deepcopy(dict(section))
    table: dict[str, Any] = new
    if app:
        tables = new.setdefault(PER_APP, [])
        same = [one for one in tables if _is_of(one, app)]
        if not same:
            tables.append({"app": app})
        table = same[0] if same else tables[-1]
    had = table.get(rule)
    table[rule] = joined(had, setting) if rule in EXPRESSIONS and isinstance(had, str) else setting
    return new


def _is_of(table: Mapping[str, Any], app: str) -> bool:
    return str(table.get("app", "")).strip().lower() == app.strip().lower()


def apply_rule(
    rule: str, file: Path, setting: str = "on", environ: Mapping[str, str] = os.environ, app: str = ""
) -> str:
    """Set a rule in a TOML file, for one app or ("") for all. Its path.

    Nothing else in it changes, nor whose it is and who may read it; a link stays one. What is written was read again
    before: a daemon that could be started with the file still can. Raises ConfigError with what to change by hand; the
    file is as it was then.
    """
    place = Path(os.path.realpath(file))
    old: str | None = None
    try:
        old = _read(place)
        tree = tomllib.loads((old or "").replace("\r\n", "\n"))
        section = tree.get(SECTION, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{SECTION} is no section in it")
        tables = section.get(PER_APP, [])
        if app and not (isinstance(tables, list) and all(isinstance(one, dict) for one in tables)):
            raise ConfigError(f"{SECTION}.{PER_APP} is no list of tables in it")
        new = with_rule(section, rule, setting, app)
        if new != section:
            text = _edited(old or "", rule, setting, app, {**tree, SECTION: new})
            setting_name = PER_APP if app else rule
            others = {name: text for name, text in environ.items() if name != f"{PREFIX}STABLE_{setting_name.upper()}"}
            place.parent.mkdir(parents=True, exist_ok=True)
            with _part(place, text, new=old is None) as part:
                _check(part, file, others)
                part.replace(place)
            _sync_directory(place.parent)
    except OSError as error:
        reason = f"it cannot be written: {error.strerror or error}"
        raise _refused(file, by_hand(rule, setting, app, old or ""), reason) from error
    except UnicodeDecodeError as error:
        raise _refused(file, by_hand(rule, setting, app), "it is not UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        raise _refused(file, by_hand(rule, setting, app), f"it is not TOML: {error}") from error
    except HomeprefixdError as error:
        raise _refused(file, by_hand(rule, setting, app, old or ""), error.message) from error
    return str(file)


def by_hand(rule: str, setting: str, app: str, text: str = "") -> str:
    """What a person is to change, as the end of a message. `text`: of the file, where it is known: what is added to one
    that has such a table already, or has it in one line, would not be TOML.
    """
    edited = _edited_if_possible(text, rule, setting, app) if text.strip() else None
    if edited is not None:
        return _difference(text, edited)
    if app:
        return f"add these lines at its end by hand: {' / '.join(rule_lines(rule, setting, app))}"
    return f"add this line to its section [{SECTION}] by hand: {rule_line(rule, setting)}"


def _edited_if_possible(text: str, rule: str, setting: str, app: str) -> str | None:
    """None where the file is none that can be read, has it already, or cannot have it."""
    try:
        tree = tomllib.loads(text.replace("\r\n", "\n"))
        new = with_rule(tree.get(SECTION, {}), rule, setting, app)
        edited = _edited(text, rule, setting, app, {**tree, SECTION: new})
    except (ValueError, TypeError, AttributeError, HomeprefixdError):
        return None
    return edited if edited != text else None


def _difference(before: str, after: str) -> str:
    """From one text to the other, in words: one run of lines is another, or is new."""
    old, new = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (before, after))
    start = _alike(old, new)
    end = _alike(old[start:][::-1], new[start:][::-1])
    lines = [line for line in new[start : len(new) - end] if line.strip()]
    added, these = " / ".join(lines), "this line" if len(lines) == 1 else "these lines"
    if start + end < len(old):
        which = f"line {start + 1}" if start + end + 1 == len(old) else f"lines {start + 1} to {len(old) - end}"
        return f"write {these} in place of its {which} by hand: {added}"
    if start == len(old):
        return f"add {these} at its end by hand: {added}"
    return f"add {these} behind its line {start} ({old[start - 1].strip()}) by hand: {added}"


def _alike(old: Sequence[str], new: Sequence[str]) -> int:
    """Lines at the beginning that are the same."""
    return next(
        (i for i, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), min(len(old), len(new))
    )


def _refused(file: Path, todo: str, reason: str) -> ConfigError:
    return ConfigError(f"{file} was left as it is: {reason}. {todo[0].upper()}{todo[1:]}")


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


def _edited(text: str, rule: str, setting: str, app: str, wanted: Mapping[str, Any]) -> str:
    """The text whose values are `wanted`. Raises ConfigError."""
    place: list[str | int]
    if app:
        index = next(i for i, one in enumerate(wanted[SECTION][PER_APP]) if _is_of(one, app))
        setting = wanted[SECTION][PER_APP][index][rule]
        header, place = _APP_HEADER, [SECTION, PER_APP, index]
    else:
        setting = wanted[SECTION][rule]
        header, place = _HEADER, [SECTION]
    end = "\r\n" if text.count("\r\n") == text.count("\n") > 0 else "\n"
    for new in _candidates(text, rule, rule_lines(rule, setting, app), end, header, place):
        with contextlib.suppress(tomllib.TOMLDecodeError):
            if tomllib.loads(new.replace("\r\n", "\n")) == wanted:
                return new
    raise ConfigError("the rule cannot be written into it without changing something else")


def _candidates(
    text: str, rule: str, block: list[str], end: str, header: re.Pattern[str], place: Sequence[str | int]
) -> Iterator[str]:
    """Texts that may have the last line of `block`, the most natural first. Whether they say what they should is not
    known here: a header may stand in a string, too. `place`: the table that it goes into.
    """
    lines = text.split("\n")
    line = block[-1]
    for index, known in enumerate(lines):
        if header.fullmatch(known):
            if index == len(lines) - 1:
                yield f"{text}{end}{line}{end}"
            else:
                yield "\n".join([*lines[: index + 1], line + end.removesuffix("\n"), *lines[index + 1 :]])
    gap = "" if not text else end if text.endswith("\n") else 2 * end
    yield f"{text}{gap}{end.join(block)}{end}"
    edited = _replaced(text, rule, block, place)
    if edited is not None:
        yield edited if end == "\n" else re.sub(r"(?<!\r)\n", end, edited)


def _replaced(text: str, rule: str, block: list[str], place: Sequence[str | int]) -> str | None:
    """With the rule's value in whatever form it has: in a table, inline or dotted. None if that cannot be done."""
    import tomlkit  # here: the daemon that never writes a rule does not pay for it
    from tomlkit.exceptions import TOMLKitError

    try:
        document = tomlkit.parse(text)
        if tomlkit.dumps(document) != text:
            return None
        section: Any = document[str(place[0])]
        if len(place) > 2:
            if place[1] not in section:  # of a table that is written in one line, or by dotted keys
                section[place[1]] = tomlkit.array()
            section = section[place[1]]
        if len(place) > 2 and len(section) == place[2]:  # a list that is written in one line
            section.append(tomlkit.value(f"{{ {', '.join(block[1:])} }}"))
            return tomlkit.dumps(document)
        for part in place[2:]:
            section = section[part]
        section[rule] = tomlkit.parse(f"{block[-1]}\n").item(rule)
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

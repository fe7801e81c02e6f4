"""`export`, `import`: prefixes between machines, as files."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import shutil
import stat
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from ..config_sources import cache_directory
from ..errors import RequestError, UnavailableError
from ..sizes import size_text
from .cache import cache_flags, directory_of, key_flag, url_flag
from .output import Output, count_text, counted
from .reach import (
    Cache,
    ClosedCache,
    failure,
    known_without_model,
    own_door,
    reach,
    running_daemon,
    stranger,
    understood,
)
from .settings import json_flag, load_settings, setting_flags
from .warming import body_of, named, names_of, prompt_flags

if TYPE_CHECKING:
    from ..budgets import DiskBudget

_PATIENCE = 3_600.0  # s without a byte
_BUFFER = 1 << 20
_STANDARD_OUTPUT = ("-", "/dev/stdout")


@click.command("export")
@prompt_flags
@click.option("--prefix", metavar="ID", help="A prefix, by its id from `ls` or a unique start of it.")
@click.option("--request", "request_id", metavar="ID", help="The prompt of a request, by the id of its reply.")
@click.option(
    "-o", "--output", "target", metavar="FILE", required=True, help="Where to write it; - is standard output."
)
@cache_flags
def export(
    url: str | None,
    as_json: bool,
    request_file: str | None,
    text: str | None,
    model: str | None,
    prefix: str | None,
    request_id: str | None,
    target: str,
    **given: str | None,
) -> None:
    """Write a stored prefix into a file, for another machine.

    FILE names the prompt, as for `warm`; with the daemon stopped it is named by --prefix. The file holds the prompt's
    content in a form that can be read back.
    """
    body = body_of(request_file, text, model, or_id=True)
    if names_of(body, prefix, request_id) != 1:
        raise click.UsageError("name one prefix: by FILE, --text, --prefix or --request", click.get_current_context())
    if target in _STANDARD_OUTPUT and as_json:
        raise click.UsageError("--json needs a FILE to write to", click.get_current_context())
    body |= named(prefix, request_id, None)
    directory = directory_of(url, given)
    url = url if directory is None else running_daemon(directory)
    if url is None:
        known_without_model(body)
        with reach(None, directory) as cache, _written(target) as out:
            size = _export_closed(cache, body["prefix"], out)
    else:
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        with _asked(url, "/cache/export", data, headers) as reply:
            _need_prefix(reply, url)
            with _written(target) as out:
                size = _copy(reply, out, target)
    output = Output(as_json)
    if as_json:
        output.document({"file": str(Path(target).absolute()), "bytes": size or None})
    elif target not in _STANDARD_OUTPUT:
        output.line(f"{size_text(size)} written to {target}" if size else f"written to {target}")


@click.command("import")
@click.argument("source", metavar="FILE")
@key_flag
@url_flag
@json_flag
@setting_flags("--cache-dir", "--warm")
def import_(url: str | None, as_json: bool, source: str, **given: str | None) -> None:
    """Take in a prefix that `export` has written.

    On this machine the same model must run with the same settings of K and V, or have run so, where the daemon is
    stopped; else it is refused, and what differs is named. FILE - is standard input. With the daemon stopped, too, no
    more is kept than its settings allow: give the --config and the --warm that it gets.
    """
    headers = {"Content-Type": "application/octet-stream"}
    with _named("standard input" if source == "-" else source), contextlib.ExitStack() as stack:
        if source == "-":
            data: BinaryIO = sys.stdin.buffer
            headers["Transfer-Encoding"] = "chunked"
        else:
            try:
                data = stack.enter_context(Path(source).open("rb"))
                headers["Content-Length"] = str(os.fstat(data.fileno()).st_size)
            except OSError as error:
                raise click.UsageError(f"{source} cannot be read: {error.strerror or error}") from error
        directory = directory_of(url, given)
        url = url if directory is None else running_daemon(directory)
        done: dict[str, Any]
        if url is None:
            done = _closed(stack.enter_context(reach(None, directory, _budget(given)))).import_(data.fileno())
        else:
            path = "/cache/import"
            done = dict(understood(stack.enter_context(_asked(url, path, data, headers)).read(), url, path))
    output = Output(as_json)
    if as_json:
        output.document(done)
    else:
        output.line(_imported(done))
        if done.get("not_kept"):
            output.line(f"only {count_text(done['kept'])} tokens of it are on disk: {done['not_kept']}")


def _budget(given: Mapping[str, str | None]) -> Callable[[], DiskBudget]:
    """What the daemon would give its store of the disk, by the same settings."""

    def resolved() -> DiskBudget:
        from ..budgets import disk_budget

        cache = load_settings(given).config.cache
        return disk_budget(cache, cache_directory(cache.dir, os.environ))

    return resolved


def _imported(done: Mapping[str, Any]) -> str:
    """An edge counts as a block, too."""
    known, blocks = done["known_nodes"], counted(done["nodes"], "block")
    if known and known >= done["nodes"]:
        return f"nothing new: {'the 1 block was' if known == 1 else f'all {blocks} were'} there"
    there = f"; {counted(known, 'block')} {'was' if known == 1 else 'were'} there already" if known else ""
    return f"{counted(done['tokens'], 'token')}, {size_text(done['bytes'])} of state imported{there}"


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Refusals of a file begin with its name."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{name}: {error.message}") from error


def _export_closed(cache: Cache, prefix: str, out: BinaryIO) -> int:
    """Bytes that were written; 0: into something that has no size."""
    out.flush()
    _closed(cache).export(prefix, out.fileno())
    with contextlib.suppress(OSError):  # a pipe has no size
        return os.fstat(out.fileno()).st_size
    return 0


def _closed(cache: Cache) -> ClosedCache:
    """A cache that no daemon runs on. Raises UnavailableError if one was started meanwhile."""
    if isinstance(cache, ClosedCache):
        return cache
    raise UnavailableError(f"a daemon was started meanwhile, at {cache.where}: try again")


@contextlib.contextmanager
def _asked(url: str, path: str, data: bytes | BinaryIO, headers: dict[str, str]) -> Iterator[http.client.HTTPResponse]:
    """The reply's body. Raises as `reach.call` does."""
    if "://" not in url:
        url = f"http://{url}"
    door = own_door()
    opener = door.opener(url)
    try:
        request = urllib.request.Request(url.rstrip("/") + path, data, headers | door.headers())
        with opener.open(request, timeout=_PATIENCE) as reply:
            yield reply
    except urllib.error.HTTPError as error:
        with error:
            raise failure(error, url + path) from error
    except (http.client.HTTPException, urllib.error.URLError, ConnectionError, TimeoutError) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise UnavailableError(f"{url} did not answer to its end: {reason}", answered=False) from error


@contextlib.contextmanager
def _written(target: str) -> Iterator[BinaryIO]:
    """A file, whole or not at all, readable by its owner only; through a link, what it leads to. What is no regular
    file (a pipe, a device) is written into as it is.
    """
    if target in _STANDARD_OUTPUT:
        _need_no_terminal(target, sys.stdout.buffer)
        yield sys.stdout.buffer
        return
    place, part = os.path.realpath(target), None
    with _writing(target):
        if os.path.isdir(target):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if _is_special(target):
            descriptor = os.open(target, os.O_WRONLY | os.O_NOCTTY)
        else:
            part = Path(f"{place}.part")
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        opened = open(descriptor, "wb")  # noqa: SIM115  # below
    try:
        with _flushed(opened, target) as file:
            _need_no_terminal(target, file)
            yield file
        if part is not None:
            with _writing(target):
                part.replace(place)
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def _flushed(file: BinaryIO, target: str) -> Iterator[BinaryIO]:
    """`file`, closed at the end. What its last bytes fail with is said of `target`."""
    try:
        yield file
        with _writing(target):
            file.flush()
    finally:
        with contextlib.suppress(OSError):  # it was said, or something else is
            file.close()


def _is_special(target: str) -> bool:
    """Must nothing else be put in its place? So it is with a descriptor of this process, too, whatever that is of."""
    if os.path.realpath(os.path.dirname(target)).startswith("/proc/"):
        return True
    try:
        return not stat.S_ISREG(os.stat(target).st_mode)
    except FileNotFoundError:
        return False


def _need_no_terminal(target: str, file: BinaryIO) -> None:
    if file.isatty():
        where = "standard output" if target in _STANDARD_OUTPUT else target
        raise RequestError(f"{where} is a terminal, and a prefix is no text: give a file, or a pipe")


@contextlib.contextmanager
def _writing(target: str) -> Iterator[None]:
    """The name that was given is the one that is told, not that of the part."""
    try:
        yield
    except OSError as error:
        raise RequestError(f"{target} cannot be written: {error.strerror or error}") from error


def _need_prefix(reply: http.client.HTTPResponse, url: str) -> None:
    """Raises UnavailableError if something else comes."""
    from ..api.transfer import KIND

    kind = reply.headers.get_content_type()
    if kind != KIND:
        raise stranger(url, f"its reply to /cache/export is {kind}", answered=True)


def _copy(reply: http.client.HTTPResponse, out: BinaryIO, target: str) -> int:
    """Bytes that were copied."""
    counter = _Counter(out, target)
    shutil.copyfileobj(reply, counter, _BUFFER)
    with _writing_to(target):
        out.flush()
    return counter.size


class _Counter:
    """Counts what is written to a file."""

    def __init__(self, file: BinaryIO, target: str) -> None:
        self._file = file
        self._target = target
        self.size = 0

    def write(self, data: bytes) -> int:
        self.size += len(data)
        with _writing_to(self._target):
            return self._file.write(data)


def _writing_to(target: str) -> contextlib.AbstractContextManager[None]:
    """As `_writing`, but for standard output: who reads that may leave, as with every command."""
    return contextlib.nullcontext() if target in _STANDARD_OUTPUT else _writing(target)

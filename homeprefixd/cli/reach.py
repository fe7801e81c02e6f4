"""How the commands get at a cache: through the daemon that runs on it, or else by opening the closed store.

Both answer with the same plain objects, those of the admin API.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click
import msgspec

from .. import __version__
from ..errors import (
    ConfigError,
    ForbiddenError,
    HomeprefixdError,
    NotFoundError,
    RequestError,
    UnauthorizedError,
    UnavailableError,
)
from ..program import typed
from .answers import is_always_there, lack

if TYPE_CHECKING:
    from ..budgets import DiskBudget
    from ..frames.store import Transferred
    from ..prefix.client import AdminClient

DAEMON_FILE = "daemon.json"
"""In the cache directory while a daemon runs: {"pid": 123, "url": "http://127.0.0.1:8080"}, and with TLS its
"certificate"."""

STORE_FILE = "data.mdb"

KEY_VARIABLE = "HOMEPREFIXD_API_KEY"

USER_AGENT = f"homeprefixd/{__version__}"
"""Who the commands say they are."""

_DOOR = "homeprefixd.door"  # in the command's context: what `--api-key-file` and the daemon's entry said

HEALTH_TIMEOUT = 3.0  # seconds
ANSWER_TIMEOUT = 120.0  # seconds; a purge of a large store takes some


@dataclass(frozen=True)
class Door:
    """What a daemon wants to see, and what we want to see of it."""

    key: str = ""  # API key; "": none is sent
    certificate: str = ""  # PEM file that its TLS certificate must be in, whatever name it has; "": any trusted one

    def headers(self) -> dict[str, str]:
        """What each request to the daemon has."""
        return {"User-Agent": USER_AGENT, **({"Authorization": f"Bearer {self.key}"} if self.key else {})}

    def opener(self, url: str) -> urllib.request.OpenerDirector:
        """Without proxies: the daemon is at home."""
        plain = urllib.request.ProxyHandler({})
        if not url.lower().startswith("https:"):
            return urllib.request.build_opener(plain)
        context = ssl.create_default_context(cafile=self.certificate or None)
        if self.certificate:
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return urllib.request.build_opener(plain, urllib.request.HTTPSHandler(context=context))


def api_key(file: str | None, environ: Mapping[str, str]) -> str:
    """The key in `file` (its first line), else `$HOMEPREFIXD_API_KEY`, else "". Raises ConfigError."""
    if file is None:
        key, source = environ.get(KEY_VARIABLE, "").strip(), KEY_VARIABLE
    else:
        try:
            lines = Path(os.path.expanduser(file)).read_text().split()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file: {file} cannot be read: {error}") from error
        key, source = lines[0] if lines else "", f"--api-key-file: {file}"
        if not key:
            raise ConfigError(f"{source} is empty; it holds one API key")
    if not key.isascii() or not key.isprintable():
        raise ConfigError(f"{source}: an API key has ASCII letters only")
    return key


def check_url(url: str) -> None:
    """Only what a daemon can be asked by: no `file://`, no word, and not the base of an API. Raises ConfigError."""
    scheme, separator, rest = url.partition("://")
    no_port = not separator and ":" not in url  # port 80 is meant by nobody who does not write http://
    if no_port or (separator and (scheme.lower() not in ("http", "https") or not rest)):
        what = ", which is no URL" if no_port else ""
        raise ConfigError(
            f"--url cannot be {url!r}{what}; allowed: an address such as 127.0.0.1:8080, http://... or https://..."
        )
    if any(letter.isspace() for letter in url):
        raise ConfigError(f"--url cannot be {url!r}: there is white space in it")
    base = url.rstrip("/").removesuffix("/v1")
    if base != url.rstrip("/"):
        raise ConfigError(f"--url cannot be {url!r}: leave out /v1, which is for clients of the API: {base}")


class Cache(Protocol):
    """What `stats`, `ls`, `purge`, `pin` and `unpin` need."""

    where: str
    """For messages: the daemon's URL or the directory."""

    def stats(self) -> dict[str, Any]:
        """As `GET /cache/stats`."""
        ...

    def prefixes(self, limit: int, model: str) -> dict[str, Any]:
        """As `GET /cache/prefixes`: `prefixes` (last used first) and `total` (nodes in the tree)."""
        ...

    def purge(self, what: Mapping[str, Any]) -> dict[str, Any]:
        """As `POST /cache/purge`, with one of all, prefix, older_than (seconds), model; `nodes` and `bytes` removed."""
        ...

    def pin(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """As `POST /cache/pin`; with nothing named, the list of what is pinned. A closed store needs `prefix`."""
        ...

    def unpin(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """As `POST /cache/unpin`. A closed store needs `prefix`, `label` or `all`."""
        ...


@contextlib.contextmanager
def reach(url: str | None, directory: Path | None, budget: Callable[[], DiskBudget] | None = None) -> Iterator[Cache]:
    """The cache at `url`, else that of the daemon running on `directory`, else the closed store in it.

    `budget`: that which a closed store is kept to where something is taken in.

    Raises UnavailableError, UnauthorizedError, ForbiddenError, NotFoundError (no
    store there), StoreError (in use by something that does not answer).
    """
    if url is None and directory is not None:
        url = running_daemon(directory)
    if url is not None:
        yield DaemonCache(url)
        return
    if directory is None or not os.path.exists(directory / STORE_FILE):
        raise NotFoundError(
            f"there is no cache in {directory}, and no daemon runs on it;"
            " name another directory with --cache-dir, or a daemon with --url"
        )
    from ..prefix.client import AdminClient

    client = AdminClient.start(directory, budget=budget)
    try:
        yield ClosedCache(client, str(directory))
    finally:
        client.close()


def running_daemon(directory: Path) -> str | None:
    """URL of the daemon that serves with this cache directory; None if none does, or it does not answer."""
    try:
        entry = json.loads((directory / DAEMON_FILE).read_text())
        pid, url = int(entry["pid"]), connectable(str(entry["url"]))
        door = Door(certificate=str(entry.get("certificate", "")))
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise UnavailableError(
            f"{directory} may not be read by this user; use sudo, or name the daemon with --url"
        ) from error
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not is_alive(pid) or not is_answering(url, door):
        return None
    remember(certificate=door.certificate)
    return url


def remember(**of_door: str) -> None:
    """What this command's calls show and want to see from now on: fields of Door."""
    context = click.get_current_context(silent=True)
    if context is not None:
        context.meta[_DOOR] = dataclasses.replace(own_door(), **of_door)


def own_door() -> Door:
    """This command's, see `remember`; with the environment's key where none was given."""
    context = click.get_current_context(silent=True)
    known = context.meta.get(_DOOR) if context is not None else None
    return known if isinstance(known, Door) else Door(api_key(None, os.environ))


def is_alive(pid: int) -> bool:
    """Is there a process with this id?"""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def is_answering(url: str, door: Door | None = None) -> bool:
    """Does `/health` answer, with whatever status? (503 while a model loads.)"""
    try:
        call(url, "/health", timeout=HEALTH_TIMEOUT, door=door)
    except UnavailableError as error:
        return bool(error.details.get("answered"))
    except HomeprefixdError:
        return True
    return True


def connectable(url: str) -> str:
    """A listening address as one that can be connected to: 0.0.0.0 and [::] are this machine."""
    parts = urllib.parse.urlsplit(url)
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(parts.hostname or "")
    return url if host is None else parts._replace(netloc=f"{host}:{parts.port or 80}").geturl()


def call(
    url: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    timeout: float = ANSWER_TIMEOUT,
    door: Door | None = None,
) -> Any:
    """GET `path`, or POST `body` to it; the JSON that comes back. `door` None: this command's.

    Raises RequestError, UnauthorizedError, ForbiddenError, NotFoundError, UnavailableError or HomeprefixdError with the
    daemon's message; UnavailableError has the detail `answered`: False when nothing came at all.
    """
    if "://" not in url:
        url = f"http://{url}"
    door = own_door() if door is None else door
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(
            url.rstrip("/") + path, data, {"Content-Type": "application/json", **door.headers()}
        )
        with door.opener(url).open(request, timeout=timeout) as reply:
            answer = reply.read()
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404 and is_always_there(path):
                raise stranger(url, f"it knows no {path.partition('?')[0]}", answered=True) from error
            raise failure(error, url + path) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        reason = getattr(reason, "strerror", None) or reason
        raise UnavailableError(f"no homeprefixd answers at {url}: {reason}", answered=False) from error
    return understood(answer, url, path)


def understood(answer: bytes, url: str, path: str) -> Any:
    """The JSON of a reply to `path`. Raises UnavailableError if no daemon of ours can have sent it."""
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise stranger(url, f"its reply to {path} is no JSON", answered=False) from error
    if problem := lack(path, found):
        raise stranger(url, f"its reply to {path.partition('?')[0]} is another: {problem}", answered=True)
    return found


def stranger(url: str, why: str, *, answered: bool) -> UnavailableError:
    """Something answers at `url` that is not homeprefixd."""
    return UnavailableError(f"{url} does not look like homeprefixd: {why}", answered=answered)


def failure(error: urllib.error.HTTPError, where: str) -> HomeprefixdError:
    """What a reply says that is an error."""
    return _from_status(error.code, _message(error.read()) or f"{where}: HTTP {error.code}")


def _message(body: bytes) -> str:
    """The message inside an error's JSON; "" if it is none."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def _from_status(status: int, message: str) -> HomeprefixdError:
    if status == 401:
        return UnauthorizedError(f"{message} Here: {KEY_VARIABLE} or --api-key-file.")
    if status == 403:
        return ForbiddenError(message)
    if status == 404:
        return NotFoundError(message)
    if status == 503:
        return UnavailableError(message, answered=True)
    return RequestError(message) if status < 500 else HomeprefixdError(message)


class DaemonCache:
    """The cache of a running daemon."""

    def __init__(self, url: str) -> None:
        self.where = url

    def stats(self) -> dict[str, Any]:
        return dict(call(self.where, "/cache/stats"))

    def prefixes(self, limit: int, model: str) -> dict[str, Any]:
        query = {"limit": limit, **({"model": model} if model else {})}
        return dict(call(self.where, f"/cache/prefixes?{urllib.parse.urlencode(query)}"))

    def purge(self, what: Mapping[str, Any]) -> dict[str, Any]:
        return dict(call(self.where, "/cache/purge", what))

    def pin(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return dict(call(self.where, "/cache/pin", body))

    def unpin(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return dict(call(self.where, "/cache/unpin", body))


class ClosedCache:
    """The store of a directory that no daemon uses now."""

    def __init__(self, client: AdminClient, where: str) -> None:
        self._client = client
        self.where = where

    def stats(self) -> dict[str, Any]:
        return self._client.stats()

    def prefixes(self, limit: int, model: str) -> dict[str, Any]:
        found = self._client.prefixes(limit, model)
        return {"prefixes": [msgspec.to_builtins(prefix) for prefix in found.prefixes], "total": found.total}

    def purge(self, what: Mapping[str, Any]) -> dict[str, Any]:
        done = self._client.purge(**what)
        if done.error:
            raise NotFoundError(done.error)
        return {"nodes": done.nodes, "bytes": done.bytes}

    def pin(self, body: Mapping[str, Any]) -> dict[str, Any]:
        names = known_without_model(body)
        return {"pins": [msgspec.to_builtins(one) for one in self._client.pin(**names)]}

    def unpin(self, body: Mapping[str, Any]) -> dict[str, Any]:
        names = known_without_model(body)
        return {"pins": [msgspec.to_builtins(one) for one in self._client.unpin(**names)]}

    def export(self, prefix: str, descriptor: int) -> dict[str, Any]:
        """Write a prefix into a file."""
        return _transferred(self._client.export(prefix, descriptor))

    def import_(self, descriptor: int) -> dict[str, Any]:
        """Read a prefix from a file."""
        done = self._client.import_(descriptor)
        return {**_transferred(done), "kept": done.kept, "not_kept": done.not_kept}


def known_without_model(body: Mapping[str, Any]) -> dict[str, Any]:
    """`body`, if no daemon is needed to know what it names. Raises UnavailableError."""
    needs = {"messages": "a prompt", "prompt": "a prompt", "request_id": "a request"}
    for field, what in needs.items():
        if field in body:
            raise UnavailableError(
                f"{what} can be told from others by a running daemon only: start it with {typed('serve')}, or name"
                f" the prefix by --prefix and its id from {typed('ls')}"
            )
    return dict(body)


def _transferred(done: Transferred) -> dict[str, Any]:
    return {"nodes": done.nodes, "tokens": done.tokens, "bytes": done.bytes, "known_nodes": done.known}

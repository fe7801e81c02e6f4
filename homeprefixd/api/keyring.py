"""API keys: who may call, read from a file. Knows nothing of HTTP.

The file is TOML, one table for each key:

    [[key]]
    name = "kitchen"             # what it is called in the log and in figures; also whose fair share it is
    key = "a long random text"   # or sha256 = "its SHA-256, 64 hexadecimal digits"
    namespace = "own"            # its prompts share no cache with others'; default "shared"
    priority = "background"      # what its requests are at most; default: what they say
    requests = 2                 # at once; default 0: no bound
    queued = 8                   # further ones that may wait for their turn; default 16
    admin = true                 # may see and purge the cache; default false
    cache_share = 10             # percent of `cache.warm` that its prefixes may take; default 0: no bound
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from ..errors import ConfigError

logger = logging.getLogger(__name__)

CREDENTIAL = "api-keys"
"""Name of systemd's credential with the file: `LoadCredential=api-keys:/etc/homeprefixd/keys.toml`."""

SECRET_FILE = "namespace.secret"
"""In the cache directory: what keys' own namespaces are derived from. Without it, what they have kept is not found."""

MIN_LETTERS = 16
"""Of a key: fewer could be tried one by one."""

_SECRET_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@-]{0,63}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_MAX_FILE = 1 << 20  # bytes

Priority = Literal["interactive", "normal", "background"]


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One `[[key]]` of the file."""

    name: str
    key: str = ""
    sha256: str = ""
    namespace: Literal["shared", "own"] = "shared"
    priority: Priority | Literal[""] = ""
    requests: int = 0
    queued: int = 16
    admin: bool = False
    cache_share: int = 0


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: list[KeyEntry] = []


class Key(msgspec.Struct, frozen=True):
    """A key that may call. The key itself is not kept, only its SHA-256."""

    name: str
    digest: bytes
    own_namespace: bool
    priority: Priority | None
    requests: int  # at once; 0: no bound
    queued: int
    admin: bool
    cache_share: int = 0  # percent of the budget of disk; 0: no bound


def digest_of(key: str) -> bytes:
    """What is compared. Keys are long and random, so a slow hash would only slow us down."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def read_keys(file: Path) -> list[Key]:
    """The keys in a file; an empty file has none. Raises ConfigError, which never shows a key."""
    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_FILE + 1)
            if os.fstat(opened.fileno()).st_mode & 0o004:
                logger.warning("%s can be read by everybody on this machine: chmod 600 %s", file, file)
    except OSError as error:
        raise ConfigError(f"the keys cannot be read from {file}: {error.strerror}; see server.keys_file") from error
    if len(data) > _MAX_FILE:
        raise ConfigError(f"{file}: a file of keys has at most {_MAX_FILE} bytes; see server.keys_file")
    try:
        entries = msgspec.convert(tomllib.loads(data.decode()), KeyFile).key
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError):
        raise ConfigError(f"{file}: is not TOML; see server.keys_file in the README") from None  # it may quote a key
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {error}; a key is [[key]] with name and key or sha256") from None
    keys = [_checked(file, number, entry) for number, entry in enumerate(entries, start=1)]
    for what, values in (("name", [key.name for key in keys]), ("key", [key.digest.hex() for key in keys])):
        if len(set(values)) < len(values):
            raise ConfigError(f"{file}: two keys have the same {what}")
    return keys


def _checked(file: Path, number: int, entry: KeyEntry) -> Key:
    where = f"{file}: key {number}"
    if not _NAME.fullmatch(entry.name):
        raise ConfigError(f"{where}: its name cannot be {entry.name[:80]!r}; allowed: 1 to 64 letters, digits, - . _ @")
    where = f"{file}: key {entry.name!r}"
    if bool(entry.key) == bool(entry.sha256):
        raise ConfigError(f"{where}: give exactly one of key and sha256")
    if entry.sha256 and not _SHA256.fullmatch(entry.sha256):
        raise ConfigError(f"{where}: sha256 must be 64 hexadecimal digits: printf %s KEY | sha256sum")
    if entry.key and (len(entry.key) < MIN_LETTERS or not entry.key.isascii() or re.search(r"\s", entry.key)):
        raise ConfigError(
            f"{where}: a key has at least {MIN_LETTERS} ASCII letters without spaces: openssl rand -hex 24"
        )
    if entry.requests < 0 or entry.queued < 0:
        raise ConfigError(f"{where}: requests and queued cannot be below 0")
    if not 0 <= entry.cache_share <= 100:
        raise ConfigError(f"{where}: cache_share is percent of cache.warm, 1 to 100, or 0 for no bound")
    return Key(
        name=entry.name,
        digest=bytes.fromhex(entry.sha256) if entry.sha256 else digest_of(entry.key),
        own_namespace=entry.namespace == "own",
        priority=entry.priority or None,
        requests=entry.requests,
        queued=entry.queued,
        admin=entry.admin,
        cache_share=entry.cache_share,
    )


class KeyRing:
    """The keys of a daemon; none at all means that everybody may call."""

    def __init__(self, file: Path | None = None, secret: Callable[[], bytes] = lambda: b"") -> None:
        """`secret`: 32 bytes that stay the same, asked for at most once, when the first own namespace is needed.

        Raises ConfigError for a file that is not as it should be.
        """
        self.file = file
        self._make_secret = secret
        self._secret: bytes | None = None
        self._keys = [] if file is None else read_keys(file)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def reload(self) -> None:
        """Read the file again. Raises ConfigError, and then what was read before stays; so it does if no key is left.

        A server that has had keys never opens to everybody while it runs.
        """
        if self.file is None:
            return
        keys = read_keys(self.file)
        if self._keys and not keys:
            raise ConfigError(f"{self.file}: has no key any more; the old ones stay until a restart")
        if keys and not self._keys:
            logger.info("%s: keys are asked for from now on", self.file)
        self._keys = keys

    def find(self, presented: str) -> Key | None:
        """The key that this is. Takes the same time for a wrong one, however wrong."""
        digest = digest_of(presented)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def shares(self) -> dict[str, int]:
        """Percent of the budget of disk, by name of those keys that have a share."""
        return {key.name: key.cache_share for key in self._keys if key.cache_share}

    def salt(self, key: Key, wished: str) -> str:
        """The namespace of a request by `key` that asks for the salt `wished`, itself "" for the shared one.

        Of a key with an own namespace it is a MAC over its name, so that nobody else can ask for it.
        """
        if not key.own_namespace:
            return wished
        if self._secret is None:
            self._secret = self._make_secret()
        name = f"{len(key.name)}:{key.name}{wished}"
        return "key:" + hmac.new(self._secret, name.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def secret_in(directory: Path) -> bytes:
    """The secret of a cache directory, made the first time. Where it cannot be kept, one for this run."""
    path = directory / SECRET_FILE
    try:
        known = path.read_bytes()
        if len(known) == _SECRET_BYTES:
            return known
        logger.error("%s is damaged: a new one is made, and what keys of their own namespace kept is not found", path)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("%s cannot be read, so own namespaces last until the end: %s", path, error.strerror)
        return secrets.token_bytes(_SECRET_BYTES)
    made = secrets.token_bytes(_SECRET_BYTES)
    part = path.with_name(f"{SECRET_FILE}.{os.getpid()}")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(made)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        logger.warning("%s cannot be written, so own namespaces last until the end: %s", path, error.strerror)
    return made


def ring_of(configured: str, credentials: str | None, secret: Callable[[], bytes]) -> KeyRing:
    """The keys of `keys_file`; a file that is named must have some. Raises ConfigError."""
    file = keys_file(configured, credentials)
    ring = KeyRing(file, secret)
    if configured and not ring:
        raise ConfigError(f"{file}: has no [[key]]; see server.keys_file in the README")
    return ring


def keys_file(configured: str, credentials: str | None) -> Path | None:
    """Where the keys are: as configured, else systemd's credential; None for nowhere.

    `credentials`: `$CREDENTIALS_DIRECTORY`.
    """
    if configured:
        return Path(configured)
    if credentials and (Path(credentials) / CREDENTIAL).is_file():
        return Path(credentials) / CREDENTIAL
    return None

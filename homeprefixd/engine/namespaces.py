"""The namespaces of one loaded model: their description once its hash is known, and their keys, by what a request asks.

Hashing a large file takes minutes on a slow disk, so it has a thread of its own; until it is done, requests are served
without look-ups. Any thread may ask.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..lora import Space, choose, described
from .adapters import Adapters
from .fingerprint import combine, hash_file
from .model_files import FileIdentity, LoadedFiles, file_identity
from .store import Store

logger = logging.getLogger(__name__)

_MEMO_TIMEOUT = 2.0  # seconds for the store to say whether it remembers a file's hash
_OPEN_TIMEOUT = 0.5


class Namespaces:
    """`describe` makes the description from (SHA-256 of the model, salt, adapters); it may be slow.

    `adapters` are hashed, too; a request whose adapter's content is not known has no namespace. Nor has any once
    somebody has written into the model's `files`: what is computed then belongs to no content.
    """

    def __init__(
        self,
        store: Store,
        files: LoadedFiles,
        salt: str,
        describe: Callable[[str, str, dict[str, Any]], dict[str, Any]],
        on_known: Callable[[dict[str, Any], list[str]], None],
        adapters: Adapters | None = None,
    ) -> None:
        self._store, self._files, self._salt = store, files, salt
        self._describe, self._on_known = describe, on_known
        self._lock = threading.Lock()
        self._sha256 = ""
        self._adapters = adapters or Adapters()
        self.usual = Space("", choose(self._adapters.infos, None, damaged=True))
        """What most requests have."""
        self.description: dict[str, Any] = {}  # of a request that asks nothing; empty until the hash is known
        self.mismatch: list[str] = []  # what differs from stored prefixes of the same file, as the store told
        self._keys: dict[Space, bytes] = {}
        self._ended = False
        self._yielding = False
        self._learned = threading.Event()
        self._thread = threading.Thread(target=self._learn, name="model-hash", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self, timeout: float) -> bool:
        """Until the hash is known and the store told, or `timeout` seconds; then hashing gives way to prefill."""
        self._learned.wait(timeout)
        self._yielding = True
        return self._learned.is_set()

    def close(self) -> None:
        """End the thread soon; waits for it."""
        self._ended = True
        if self._thread.is_alive():
            self._thread.join()

    def reset(self) -> None:
        """Another store was connected: it must be told the descriptions again."""
        with self._lock:
            self._keys.clear()

    def opened(self, space: Space) -> bytes | None:
        """The key for a request if it is known to the store; never waits."""
        return self._keys.get(space) if self._files.changed() is None else None

    def open_usual(self) -> None:
        """Tell the store of the namespace that most requests have, so that it is known before the first comes."""
        self.key(self.usual)

    def key(self, space: Space) -> bytes | None:
        """The key for a request; tells the store if need be (at most 0.5 s). None: not known now."""
        if self._files.changed() is not None:
            return None
        known = self._keys.get(space)
        if known is not None or not self._sha256 or not self._store.connected:
            return known
        description = self._description(space)
        opened = self._store.open_namespace(description, _OPEN_TIMEOUT) if description is not None else None
        if opened is None:
            return None
        for line in opened.mismatch:
            logger.info("stored prefixes of this model cannot be used: %s", line)
        with self._lock:
            self._keys[space] = opened.key
            new = [line for line in opened.mismatch if line not in self.mismatch]
            self.mismatch = self.mismatch + new if not space.salt else self.mismatch
        if new and not space.salt:
            self._on_known(self.description, self.mismatch)
        return opened.key

    def _description(self, space: Space) -> dict[str, Any] | None:
        adapters = described(self._adapters.infos, space.lora)
        # Joined so that no pair of salts can be mistaken for another pair.
        both = self._salt if not space.salt else f"{len(self._salt)}:{self._salt}{space.salt}"
        return None if adapters is None else self._describe(self._sha256, both, adapters)

    def _learn(self) -> None:
        try:
            sha256 = combine([self._hash(path, identity) for path, identity in self._files.identities()])
        except OSError as error:
            logger.warning("the cache stays off: the model cannot be hashed: %s", error)
            self._learned.set()
            return
        except _EndedError:
            return
        try:
            self._learn_adapters()
        except _EndedError:
            return
        self._sha256 = sha256
        self.description = self._description(self.usual) or self._describe(sha256, self._salt, {})
        self._on_known(self.description, self.mismatch)
        self.open_usual()
        self._learned.set()

    def _learn_adapters(self) -> None:
        for index, adapter in enumerate(self._adapters.infos):
            if adapter.problem:
                continue
            try:
                # Of the file as it was when it was loaded: one that was trained again since is another one.
                self._adapters.hashed(index, self._hash(Path(adapter.path), self._adapters.identity(index)))
            except OSError as error:
                logger.warning("requests with the adapter %s are not cached: %s: %s", adapter.id, adapter.path, error)

    def _hash(self, path: Path, identity: FileIdentity | None = None) -> str:
        identity = identity or file_identity(path)
        if file_identity(path) != identity:
            raise OSError(f"{path} has changed since it was loaded")
        asked = lowered = False

        def remembered() -> str | None:
            nonlocal asked, lowered
            if self._ended:
                raise _EndedError
            if self._yielding and not lowered:
                lowered = True
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
            if asked or not self._store.connected:
                return None
            asked = True
            return self._store.file_hash(*identity, _MEMO_TIMEOUT) or None

        sha256 = hash_file(path, remembered)
        if file_identity(path) != identity:
            raise OSError(f"{path} changed while it was read")
        self._store.remember_file_hash(*identity, sha256)
        return sha256


class _EndedError(Exception):
    """The worker ends."""

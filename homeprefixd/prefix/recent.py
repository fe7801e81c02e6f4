"""What the last requests asked for, by their ids: so that a prompt can be pinned by the id of its reply."""

from __future__ import annotations

import threading
from collections import OrderedDict

from .blocks import Namespace, TokensLE, chain

_MOST = 256  # requests
_BYTES = 4 << 20  # of tokens, over all


class Recent:
    """Namespace and tokens (u32 LE) of the last requests, in RAM, bounded. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()
        self._size = 0
        self._keys: dict[str, bytes] = {}  # of those that were asked for

    def note(self, request: str, namespace: bytes, tokens: bytes) -> None:
        """A request was looked up; "" is none. What it asked first is kept: later look-ups include its reply."""
        with self._lock:
            if not request or request in self._found or len(tokens) > _BYTES:
                return
            self._found[request] = namespace, tokens
            self._size += len(tokens)
            while len(self._found) > _MOST or self._size > _BYTES:
                _request, (_namespace, oldest) = self._found.popitem(last=False)
                self._size -= len(oldest)

    def get(self, request: str) -> tuple[bytes, bytes] | None:
        """None if it is not remembered."""
        with self._lock:
            return self._found.get(request)

    def keys(self) -> dict[bytes, str]:
        """Key of the last whole block of each request's prompt, and the request, the last one where several have it."""
        with self._lock:
            found = list(self._found.items())
            known = self._keys
        keys = {}
        for request, (namespace, tokens) in found:
            key = known.get(request)
            if key is None:
                blocks = chain(Namespace(namespace), TokensLE(tokens))
                key = blocks[-1] if blocks else b""
            keys[request] = key
        with self._lock:
            self._keys = keys
        return {key: request for request, key in keys.items() if key}

    def clear(self) -> None:
        """Everything was purged."""
        with self._lock:
            self._found.clear()
            self._size = 0

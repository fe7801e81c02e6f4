"""What the store knows of models: descriptions of namespaces, and content hashes of files.

Kept in RAM at once and on disk soon: what the writer has still to store waits in `new_namespaces` and `new_hashes`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from .blocks import ADAPTER_NAMES, ADAPTERS, CONTROL_VECTORS, MODEL_NAME, Namespace, namespace_of
from .disk import Disk

_REMEMBERED_HASHES = 1_000

log = logging.getLogger(__name__)

_NAMES = frozenset({MODEL_NAME, ADAPTER_NAMES})
_ALIKE = ("model_sha256", "salt", ADAPTER_NAMES)


class Registry:
    """Thread-safe by `lock`, the cache's. `disk` is None where there is none."""

    def __init__(self, disk: Disk | None, lock: threading.RLock) -> None:
        self.namespaces: dict[bytes, dict[str, Any]] = dict(disk.namespaces) if disk else {}
        self.new_namespaces: dict[bytes, dict[str, Any]] = {}
        self.new_hashes: dict[bytes, str] = {}
        self._hashes: dict[bytes, str] = {}
        self._disk = disk
        self._lock = lock

    def open_namespace(self, description: Mapping[str, Any]) -> tuple[Namespace, list[str]]:
        """Register a description. Returns its key and how stored ones of the same model content differ from it."""
        namespace = namespace_of(description)
        with self._lock:
            if self.namespaces.get(namespace) != description:  # unknown, or called by another name now
                self.namespaces[namespace] = dict(description)
                self.new_namespaces[namespace] = dict(description)
            stored = self._disk.sums.nodes if self._disk else {}
            others = [d for key, d in self.namespaces.items() if key != namespace and key.hex() in stored]
        return namespace, _differences(description, others)

    def file_hash(self, identity: bytes) -> str:
        """SHA-256 that was remembered for a file; "" if none was. Raises what the disk raises."""
        with self._lock:
            known = self._hashes.get(identity)
        if known is not None or self._disk is None:
            return known or ""
        return self._disk.file_hash(identity)

    def remember_file_hash(self, identity: bytes, sha256: str) -> None:
        """Remember a file's SHA-256, on disk soon."""
        with self._lock:
            self._hashes[identity] = sha256
            if len(self._hashes) > _REMEMBERED_HASHES:
                del self._hashes[next(iter(self._hashes))]
            if self._disk is not None:
                self.new_hashes[identity] = sha256

    def put(self, disk: Disk) -> None:
        """*Writer.* Store what is new. Raises DiskFullError, DiskTroubleError."""
        with self._lock:
            namespaces, hashes = dict(self.new_namespaces), dict(self.new_hashes)
        for namespace, description in namespaces.items():
            disk.put_namespace(namespace, description)
            with self._lock:
                self.new_namespaces.pop(namespace, None)
        for identity, sha256 in hashes.items():
            disk.put_file_hash(identity, sha256)
            with self._lock:
                self.new_hashes.pop(identity, None)


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Where a description from elsewhere differs from one in use, in words."""
    other, this = _flat(there), _flat(here)
    return [
        "salt: another one"
        if name == "salt"
        else f"{name}: {other.get(name, 'none')} there, {this.get(name, 'none')} here"
        for name in sorted({*this, *other} - _NAMES)
        if other.get(name) != this.get(name)
    ]


def _differences(description: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where stored descriptions of the same model content, salt and names of adapters differ, in words.

    Another scale is no difference: requests choose it.
    """
    here = _flat(description)
    found: dict[str, None] = {}
    for other in map(_flat, others):
        if "model_sha256" in here and all(other.get(name) == here.get(name) for name in _ALIKE):
            for name in sorted({*here, *other} - _NAMES):
                if other.get(name) != here.get(name):
                    stored, now = other.get(name, "none"), here.get(name, "none")
                    found[f"{name}: stored prefixes have {stored}, this run {now}"] = None
    return list(found)


def vector_text(one: object) -> str:
    """A control vector of a description in words."""
    if not isinstance(one, Mapping):
        return "?"
    layers = f"layers {one.get('first_layer')} to {one.get('last_layer')}"
    return f"{str(one.get('sha256'))[:12]} at {one.get('scale')} on {layers}"


def _flat(description: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested fields by dotted names."""
    flat: dict[str, Any] = {}
    for name, value in description.items():
        if above + name == ADAPTERS and value:
            value = " and ".join(str(one.get("sha256"))[:12] if isinstance(one, Mapping) else "?" for one in value)
        elif above + name == CONTROL_VECTORS:
            value = " and ".join(map(vector_text, value)) if isinstance(value, list) else "?"
        flat.update(_flat(value, f"{above}{name}.") if isinstance(value, Mapping) else {above + name: value})
    return flat

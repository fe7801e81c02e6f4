"""Request traces without text: who sent which prefix, and when.

The format is that of Mooncake's published traces: one JSON object a line, `timestamp` (ms), `input_length` (tokens) and
`hash_ids`, one id per 512 tokens, which names those tokens *and* all before them; the last one may be shorter.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import RequestError

TRACE_TOKENS = 512
"""Tokens of a block of a trace."""


class Block(NamedTuple):
    """Some tokens of a prompt, and with them all before."""

    key: bytes  # 32 bytes, spread evenly, as a node's
    tokens: int


class Arrival(NamedTuple):
    """One request."""

    at: float  # s
    blocks: tuple[Block, ...]  # the whole prompt

    @property
    def tokens(self) -> int:
        return sum(block.tokens for block in self.blocks)


def read_trace(path: Path, block: int = TRACE_TOKENS, limit: int | None = None) -> list[Arrival]:
    """The requests of a file (`.gz` or plain), at most `limit`, cut into blocks of `block` tokens.

    `block` divides 512 or is a multiple of it: smaller blocks than the trace's own match as those do. Raises
    RequestError.
    """
    if block <= 0 or (TRACE_TOKENS % block and block % TRACE_TOKENS):
        raise RequestError(
            f"blocks of {block} tokens do not fit the trace's {TRACE_TOKENS}: give a divisor or a multiple"
        )
    found: list[Arrival] = []
    keys: dict[tuple[bytes, int, int], bytes] = {}
    for at, length, ids in _lines(path):
        if limit is not None and len(found) >= limit:
            break
        found.append(Arrival(at, tuple(_blocks(length, ids, block, keys))))
    if not found:
        raise RequestError(f"{path}: no request is in it")
    return found


def _lines(path: Path) -> Iterator[tuple[float, int, Sequence[int]]]:
    number = 0
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig") as lines:
            for line in lines:
                number += 1
                if line.strip():
                    yield _request(line)
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: is no text in UTF-8 after line {number}") from error
    except ValueError as error:
        raise RequestError(f"{path}:{number}: not a request of a trace: {error}") from error
    except EOFError as error:
        raise RequestError(f"{path}: cannot be read: it is cut short after line {number}") from error
    except (OSError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or "it is not what gzip writes"
        raise RequestError(f"{path}: cannot be read: {reason}") from error


def _request(line: str) -> tuple[float, int, Sequence[int]]:
    """ms of its arrival as s, its tokens, its ids. Raises ValueError, in words."""
    try:
        entry = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON (column {error.colno}: {error.msg[:1].lower()}{error.msg[1:]})") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(entry, dict):
        raise ValueError("it is no object of JSON")
    missing = [name for name in ("timestamp", "input_length", "hash_ids") if name not in entry]
    if missing:
        raise ValueError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    at, length = _number(entry, "timestamp"), _number(entry, "input_length")
    ids = entry["hash_ids"]
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):  # true is none
        raise ValueError("hash_ids is no list of whole numbers")
    if length != int(length):
        raise ValueError("input_length is no whole number")
    length = int(length)
    if length <= 0 or not 0 <= TRACE_TOKENS * len(ids) - length < TRACE_TOKENS:
        raise ValueError(f"{len(ids)} hash_ids for an input_length of {length}: there is one for each {TRACE_TOKENS}")
    return at / 1000, length, ids


def _number(entry: Mapping[str, Any], name: str) -> float:
    """Raises ValueError."""
    value = entry[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        raise ValueError(f"{name} is no number")
    return float(value)


def _blocks(length: int, ids: Sequence[int], block: int, keys: dict[tuple[bytes, int, int], bytes]) -> Iterator[Block]:
    above = b""
    for start in range(0, length, block):
        end = min(start + block, length)
        part = (end - 1) % TRACE_TOKENS if block < TRACE_TOKENS else 0
        name = (above, ids[(end - 1) // TRACE_TOKENS], part)  # `above`: in case that an id names its tokens only
        if name not in keys:
            keys[name] = hashlib.blake2b(repr(name).encode(), digest_size=32).digest()
        above = keys[name]
        yield Block(above, end - start)

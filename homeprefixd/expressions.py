"""Regular expressions that people write: what they may be, and running them within a time.

They are those of Python's `re`, but `re` runs one that backtracks for hours with the interpreter's lock in its hand.
The package `regex` runs them without it, and stops. It is imported where an expression is run or checked only: most
processes have none.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import regex

_Found = TypeVar("_Found")

_PATIENCE = (1, 4, 16)
"""How many times the time is allowed: `regex` counts what all threads of the process take, of which most may be
computing a reply."""

_COUNT = re.compile(r"\{\d*,?\d*\}")
_NAMED = re.compile(r"\\N\{[^}]*\}")


class UnfitError(Exception):
    """An expression took too long, or too much memory."""


class Expression:
    """One that is run on texts which, together, may take `limit` seconds of processor time."""

    def __init__(self, text: str, limit: float, *, multiline: bool = False) -> None:
        """Raises UnfitError."""
        self._left = limit
        try:
            self._compiled = _compile(text, multiline=multiline)
        except Exception as error:  # it was checked, so this is a difference between `re` and `regex`
            raise UnfitError(f"the expression cannot be used: {error}") from error

    def removed(self, text: str) -> tuple[str, int]:
        """The text without what is found, and how often it was. Raises UnfitError."""
        return self._within(lambda timeout: self._compiled.subn("", text, timeout=timeout, concurrent=True))

    def spans(self, text: str, most: int) -> list[tuple[int, int]]:
        """Where it is found, blank places left out: the first `most`. Raises UnfitError."""

        def found(timeout: float) -> list[tuple[int, int]]:
            places = self._compiled.finditer(text, timeout=timeout, concurrent=True)
            return list(islice((place.span() for place in places if place[0].strip()), most))

        return self._within(found)

    def _within(self, run: Callable[[float], _Found]) -> _Found:
        for patience in _PATIENCE:
            began = time.thread_time()
            limit = self._left
            try:
                if limit <= 0:
                    break
                return run(patience * limit)
            except TimeoutError:
                if time.thread_time() - began >= limit / 2:  # its own, not that of other threads
                    break
            except (MemoryError, RecursionError) as error:
                raise UnfitError("the expression needs too much memory") from error
            finally:
                self._left -= time.thread_time() - began
        raise UnfitError("the expression is too slow")


def joined(old: str, new: str) -> str:
    """One regular expression for both. Each may be empty."""
    if not old or not new or old == new:
        return new or old
    return old if f"|{new}|" in f"|{old}|" else f"{old}|{new}"


def is_expression(text: str) -> bool:
    """Can it be used? Both must take it: `re`, whose language people know, and `regex`, which runs it."""
    try:
        re.compile(text)
        if text:
            _compile(text)
    except Exception:  # `re` has more than one for it
        return False
    return True


def _compile(text: str, *, multiline: bool = False) -> regex.Pattern[str]:
    import regex

    return regex.compile("".join(_as_in_re(text)), regex.V0 | (regex.MULTILINE if multiline else 0))


def _as_in_re(text: str) -> Iterator[str]:
    """The expression without what means more to `regex`: `x{e}` (nearly x), `[[:alpha:]]` (letters)."""
    at, in_set = 0, False
    while at < len(text):
        piece = text[at]
        if piece == "\\":
            named = _NAMED.match(text, at)
            piece = named[0] if named else text[at : at + 2]
        elif in_set:
            in_set = piece != "]"
            at += 1
            yield "\\[" if piece == "[" else piece
            continue
        elif piece == "[":
            in_set = True
            piece = next(start for start in ("[^]", "[]", "[^", "[") if text.startswith(start, at))
        elif piece == "{":
            count = _COUNT.match(text, at)
            at += len(count[0]) if count else 1
            yield count[0] if count else "\\{"
            continue
        at += len(piece)
        yield piece

"""From the bytes of tokens to text that may be sent: whole characters, and nothing of a stop string.

Pure string work; knows nothing of models, tokens or templates.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Incremental UTF-8 and stop strings.

    The result does not depend on how the bytes are cut into pieces. Bytes that are no UTF-8 become U+FFFD. Of several
    stop strings that one ends the text which is complete first; of those that are complete at the same character,
    the longest. An empty stop string never ends anything.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # decoded, not released: may be the beginning of a stop string
        self.stopped: str | None = None
        """The stop string that ended the text; after it, every call returns ""."""

    def feed(self, piece: bytes) -> str:
        """Take the bytes of the next token; return the text that is certain now, "" if none is."""
        return self._release(self._decoder.decode(piece), final=False)

    def flush(self) -> str:
        """The end of generation: return what was held back. An unfinished character becomes U+FFFD."""
        return self._release(self._decoder.decode(b"", final=True), final=True)

    def _release(self, new: str, final: bool) -> str:
        if self.stopped is not None:
            return ""
        if not self._stops:
            return new
        text = self._held + new
        end = self._find_stop(text)
        if end is not None:
            self._held = ""
            return text[:end]
        keep = 0 if final else self._possible_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _find_stop(self, text: str) -> int | None:
        """Set `stopped` and return where the text ends, if a stop string is in it."""
        best: tuple[int, int, str] | None = None  # end, start, stop
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                found = (start + len(stop), start, stop)
                best = found if best is None else min(best, found)
        if best is None:
            return None
        self.stopped = best[2]
        return best[1]

    def _possible_beginning(self, text: str) -> int:
        """How many characters at the end of `text` begin a stop string; the most over all of them."""
        longest = 0
        for stop in self._stops:
            # Only ends shorter than the stop string, and longer than what is held anyway, matter.
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1), len(text) - longest)
            while at >= 0:
                if stop.startswith(text[at:]):
                    longest = len(text) - at
                    break
                at = text.find(stop[0], at + 1, len(text) - longest)
        return longest

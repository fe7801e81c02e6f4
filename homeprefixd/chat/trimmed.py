"""A text that grows, without white space at its ends."""

from __future__ import annotations


class Trimmed:
    """What is added to it, to be fetched piece by piece: white space that may be its end is held back."""

    def __init__(self, strip_start: bool) -> None:
        self._parts: list[str] = []  # not fetched yet
        self._space: list[str] = []
        self.at_start = strip_start
        self.any = False  # something else than white space was written

    def add(self, text: str) -> None:
        kept = text.rstrip()
        if kept:
            if self.at_start:
                kept = kept.lstrip()
            else:
                self._parts += self._space
            self._parts.append(kept)
            self._space = []
            self.at_start = False
            self.any = True
        if space := text[len(text.rstrip()) :]:
            self._space.append(space)

    def part(self) -> None:
        """Something else begins here: white space before and after it goes."""
        self._space = []
        self.at_start = True

    def separate(self) -> None:
        """Another stretch of it begins: in a line of its own."""
        if self.any:
            self._space = ["\n\n"]

    def close(self, keep_space: bool) -> None:
        """The end; with `keep_space` also what was held back."""
        if keep_space and not self.at_start:
            self._parts += self._space
        self._space = []

    def fetch(self) -> str:
        text, self._parts = "".join(self._parts), []
        return text

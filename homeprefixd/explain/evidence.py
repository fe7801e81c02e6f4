"""Whether what a rule would move are values: judged by all prompts of an app that are remembered.

Pure. Two texts cannot tell: what differs between them may be an instruction that was edited, and what is the same in
both may be a fact of another prompt. A rule is for all prompts of its app, so it is tried on all that are known.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from ..chat.volatile_lines import VolatileLine
from .volatile import DAY_OF_MONTH

_DIFFERENT = 3
"""Values that a line must have had: an instruction that was edited once is none."""

_TIMES = 5
"""So often must it have been another one than in the prompt before, and before that, and so on, unless the values are
such as nobody types (a date, an id, 12:43): `At most 3 sentences.` is edited now and then, a counter counts each time.
"""

_TYPED_BY_NOBODY = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}|\d{4}年\d{1,2}月\d{1,2}日"
    r"|\d{1,2}\s?[:h時时点시]\s?\d{2}:\d{2}|\d{1,2}\s?[:h時时点시]\s?\d[1-46-9](?!\d)|\b1[5-9]\d{8}(?:\d{3})?\b"
    r"|\b\d{1,2}(?:st|nd|rd|th|er|º)?\.?\s(?:of\s|de\s)?[^\W\d_]+\.?,?\s(?:de\s)?(?:19|20)\d{2}\b"
    r"|\b[^\W\d_]+\.?\s\d{1,2}(?:st|nd|rd|th)?,?\s(?:19|20)\d{2}\b"
    rf"|{DAY_OF_MONTH}"
    r"|(?<![A-Za-z0-9])(?=[A-Za-z_-]*\d[A-Za-z_-]*\d)(?=[0-9_-]*[A-Za-z])[A-Za-z0-9_-]{6,}",
    re.IGNORECASE,
)
"""A date, a time that is no round one, an id."""


def takes_what_changes(prompts: Iterable[Sequence[VolatileLine]], different: int = _DIFFERENT) -> bool:
    """Whether all of these lines change, or say that they do; [] of a prompt that has none. `different`: how many
    values that takes, if somebody may have typed them.
    """
    values: dict[str, set[str]] = defaultdict(set)
    generated: set[str] = set()
    for lines in prompts:
        for line in lines:
            if not line.says_now:
                values[line.label].add(line.value.casefold())
            if line.generated:
                generated.add(line.label)
    return all(
        len(seen) >= different or (len(seen) > 1 and (label in generated or _typed_by_nobody(seen)))
        for label, seen in values.items()
    )


def is_value(pattern: re.Pattern[str], prompts: Iterable[Sequence[str]]) -> bool:
    """Whether what an expression finds in the system messages of these prompts, in the order in which they came, was
    another thing often enough, and is never more than one in a prompt.
    """
    seen: list[str] = []
    for texts in prompts:
        found = [match[0].strip() for text in texts for match in pattern.finditer(text)]
        if len(found) > 1:
            return False
        if found and found != seen[-1:]:
            seen += found
    values = set(seen)
    return len(values) >= _DIFFERENT and (len(seen) >= _TIMES or _typed_by_nobody(values))


def finds_several(pattern: re.Pattern[str], texts: Sequence[str]) -> bool:
    """Whether an expression finds more than one thing in the system messages of a prompt."""
    found = (match for text in texts for match in pattern.finditer(text))
    return len(list(itertools.islice(found, 2))) > 1


def _typed_by_nobody(seen: set[str]) -> bool:
    """Is that so of what differs between them?"""
    parts = [set(_TYPED_BY_NOBODY.findall(text)) for text in seen]
    return bool(set.union(*parts) - set.intersection(*parts))

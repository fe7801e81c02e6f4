"""The prompts of the last requests, so that a new one can be compared with the one that it resembles most.

Bounded by characters and by number. Not for several threads at once: who uses it has a lock.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..chat.volatile_lines import VolatileLine, volatile_lines
from ..clients import app_name
from ..frames.worker import StableRules
from ..lora import Space
from ..prefix.blocks import common_tokens
from .causes import MOVE, REMEMBERED
from .evidence import finds_several, is_value, takes_what_changes
from .prompt import Prompt
from .proposal import Proposal

_LEAST_LIKENESS = 0.4
_SAME_CLIENT = 0.25  # what it counts beside likeness and what is shared, each up to 1
_LESS_UNLIKE = 0.5  # of the tokens that another one lacks: who lacks no more of them is clearly more alike
_PROPOSED = 64  # proposals that are judged again by what comes after them
_EARLY = 4096  # tokens of a prompt whose set tells how alike two are


@dataclass(eq=False)
class Known:
    """A prompt that was seen. `tokens`: little-endian u32."""

    rid: str
    client: str
    space: Space
    prompt: Prompt
    tokens: bytes
    words: frozenset[int]
    rules: StableRules | None = None  # that were in force; None: not known
    done: bool = False  # its blocks were handed to the cache

    @cached_property
    def volatile(self) -> Sequence[Sequence[VolatileLine]]:
        """Of each system message: what `move_volatile_line` would take out of it."""
        return [volatile_lines(text) for text in self.prompt.system]


class Memory:
    """The last `most` prompts with at most `characters` together."""

    def __init__(self, most: int = REMEMBERED, characters: int = 4 << 20) -> None:
        self._most, self._limit = most, characters
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._proposed: OrderedDict[tuple[str, Proposal], str] = OrderedDict()  # app, rule -> the prompt against it
        self._moving: tuple[Known, bool] | None = None  # the last one that MOVE was tried on, and whether it fits
        self._size = 0

    def __len__(self) -> int:
        return len(self._known)

    def add(self, known: Known) -> None:
        self._known[known.rid] = known
        self._size += len(known.prompt.text)
        while len(self._known) > self._most or (self._size > self._limit and len(self._known) > 1):
            _rid, gone = self._known.popitem(last=False)
            self._size -= len(gone.prompt.text) + len(gone.prompt.reply)

    def end(self, rid: str, reply: str, *, whole: bool) -> None:
        """A request has ended. `whole`: all of it was computed, and is kept."""
        known = self._known.get(rid)
        if known is not None:
            known.done = whole
            known.prompt = replace(known.prompt, reply=reply)
            self._size += len(reply)

    def forget(self, rid: str) -> None:
        known = self._known.pop(rid, None)
        if known is not None:
            self._size -= len(known.prompt.text) + len(known.prompt.reply)

    def most_alike(self, new: Known, than: Known, common: int) -> Known | None:
        """One of the same app that has clearly more in common with it than `than`, with which it shares more leading
        tokens (`common`): an area or a person comes again, while what stands behind it has changed. None if none has.
        """
        least = 1.0 - _LESS_UNLIKE * (1.0 - _covered(than, new))
        best: Known | None = None
        most = 0.0
        for known in reversed(self._known.values()):
            if known is than or known is new or known.space != new.space or known.client != new.client:
                continue
            covered = _covered(known, new)
            if covered >= max(least, _LEAST_LIKENESS) and covered > most:
                most, best = covered, known
        return best if best is not None and common_tokens(best.tokens, new.tokens) <= common else None

    def propose(self, proposal: Proposal, client: str) -> None:
        """Remember what was proposed for an app: a prompt that comes later may show that it does not fit."""
        if proposal.rule not in (MOVE, "move"):
            return
        self._proposed.setdefault((app_name(client), proposal), "")
        self._proposed.move_to_end((app_name(client), proposal))
        if len(self._proposed) > _PROPOSED:
            self._proposed.popitem(last=False)

    def judged(self, new: Known) -> list[tuple[Proposal, bool]]:
        """What was proposed for the app of a prompt, and whether it fits the prompts that are remembered, and that one.

        A rule that takes all volatile lines fits as long as all of them change. An expression does until a prompt has
        it twice: only the new one has to be looked at, and those before it have been.
        """
        app = app_name(new.client)
        told: list[tuple[Proposal, bool]] = []
        for (whose, proposal), against in list(self._proposed.items()):
            if whose != app:
                continue
            if proposal.rule == MOVE:
                if any(new.volatile):  # else it says nothing about the rule
                    against = self._proposed[whose, proposal] = "" if self.supports(proposal, new) else new.rid
                told.append((proposal, not against))
                continue
            if finds_several(re.compile(proposal.setting, re.MULTILINE), new.prompt.system):
                against = self._proposed[whose, proposal] = new.rid
            told.append((proposal, against != new.rid and against not in self._known))
        return told

    def supports(self, proposal: Proposal, new: Known) -> bool:
        """Whether a rule fits all prompts of its app that are remembered: it moves nothing that stays."""
        if proposal.rule not in (MOVE, "move"):
            return True
        app = app_name(new.client)
        all_known = (new, *(known for known in reversed(self._known.values()) if known is not new))
        prompts = [known for known in all_known if app_name(known.client) == app]
        if proposal.rule == MOVE:
            if self._moving is None or self._moving[0] is not new:  # it is asked for each proposal, old and new
                self._moving = new, takes_what_changes(lines for known in prompts for lines in known.volatile)
            return self._moving[1]
        pattern = re.compile(proposal.setting, re.MULTILINE)
        return is_value(pattern, (known.prompt.system for known in prompts))

    def resembles(self, new: Known) -> tuple[Known, int] | None:
        """The one to compare with, and the leading tokens that both have; None if none is like it.

        The same beginning counts most: that is what could have been reused. Where there is hardly any, the same words
        tell that it is the same kind of prompt, and the same client that it is the same app.
        """
        best: tuple[bool, float, Known, int] | None = None
        size = max(1, len(new.tokens) // 4)
        for known in reversed(self._known.values()):
            common = common_tokens(known.tokens, new.tokens)
            same = known.space == new.space  # another's is of use only where there is none of its own
            score = common / size + _SAME_CLIENT * (known.client == new.client)
            if best is not None and (same, score + 1.0) < (best[0], best[1]):
                continue  # it cannot be better, however alike
            likeness = _likeness(known, new)
            if common * 2 < size and likeness < _LEAST_LIKENESS:
                continue
            score += likeness
            if best is None or (same, score) > (best[0], best[1] + 1e-9 * (same == best[0])):  # of equals, the last
                best = same, score, known, common
        return (best[2], best[3]) if best is not None else None


def _covered(known: Known, new: Known) -> float:
    """Share of the new prompt's words that the other one has: a short one has few, however alike they are."""
    return len(known.words & new.words) / max(1, len(new.words))


def _likeness(known: Known, new: Known) -> float:
    return len(known.words & new.words) / max(1, min(len(known.words), len(new.words)))


def words_of(tokens: list[int]) -> frozenset[int]:
    """Which tokens a prompt has in its beginning."""
    return frozenset(tokens[:_EARLY])

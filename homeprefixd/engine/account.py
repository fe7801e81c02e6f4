"""What each prompt is made of, and where it leaves the one that it resembles: an `Account` frame for the daemon.

Not on the engine's thread, and never an error of the request. Remembers the last prompts and replies of this worker, in
RAM only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from ..clients import app_name
from ..explain.causes import HARMLESS, VALUES
from ..explain.differences import Difference, difference
from ..explain.memory import Known, Memory, words_of
from ..explain.prompt import Prompt, common_length, name_of
from ..explain.proposal import Proposal
from ..explain.rules import in_force, rules_behind
from ..frames import Frame
from ..frames.store import Traced
from ..frames.worker import (
    Account,
    Delta,
    Failure,
    Finding,
    Finished,
    Generate,
    Judged,
    SectionTokens,
    StableRules,
)
from ..lora import Chosen, Space
from ..prefix.blocks import BLOCK_TOKENS, common_tokens, from_le, to_le

_LONGEST_REPLY = 1 << 18  # characters of a reply that are remembered
BEYOND = 256
"""Tokens of a stored prompt that are looked at behind the first that differs."""

_SEAM = 2  # tokens at a prompt's end that may be others once a reply follows
_LEAST_COMMON = 16  # tokens from which a stored prompt is one that resembles
_EARLY = 64  # requests that ended before they were accounted for, of which one knows it
_CLEARLY, _MUCH = 1.25, 2.0  # times as much
_PIECES = 400  # sections that are told at most

logger = logging.getLogger(__name__)


class Accountant:
    """`take` is called for each request that was queued, `watch` sees every frame that the worker sends."""

    def __init__(
        self,
        pieces: Callable[[Sequence[int]], list[bytes]],
        emit: Callable[[Frame], None],
        stored: Callable[[Space, bytes], bytes] = lambda space, tokens: b"",
        grain: int = 1,
        clock: Callable[[], float] = time.thread_time,
        trace: Callable[[Space, bytes], Traced | None] = lambda space, tokens: None,
        counters: defaultdict[str, float] | None = None,
        in_force: Callable[[], StableRules] = StableRules,
        replay: bool = True,
    ) -> None:
        """`pieces`: bytes of each token, control tokens too. `emit` may raise ChannelClosedError. `stored`: tokens (u32
        LE) of the stored prompt that begins as the given ones, in a request's namespace; asked if none is remembered.
        `grain`: whole multiples of so many tokens of a prompt are reused as they were computed; 0: that is not known,
        so nothing is said to be evicted. `trace`: what the store knows of why such tokens are not found; None: nothing.
        `counters` gets: accounts, account_seconds (by `clock`: of the thread's processor time). `in_force`: the rules
        that are applied to prompts. `replay`: what was generated is known by its text.
        """
        self._pieces, self._emit, self._stored, self._clock = pieces, emit, stored, clock
        self._trace = trace
        self._counters = defaultdict(float) if counters is None else counters
        self._grain = grain
        self._in_force, self._replay = in_force, replay
        self._memory = Memory()
        self._lock = threading.Lock()
        self._replies: dict[str, _Reply] = {}  # of the requests that run
        self._early: deque[str] = deque(maxlen=_EARLY)

    def watch(self, frame: Frame) -> None:
        """Send a frame on, and remember what it says of a reply. From any thread."""
        match frame:
            case Delta():
                parts = self._replies.get(frame.rid)
                if parts is not None:
                    parts.add(frame)
            case Finished():
                parts = self._replies.pop(frame.rid, None)
                if parts is None:
                    self._early.append(frame.rid)
                else:
                    parts.add(frame)
                    with self._lock:
                        self._memory.end(frame.rid, parts.text()[:_LONGEST_REPLY], whole=_is_stored(frame))
            case Failure(rid=str(rid)):
                if self._replies.pop(rid, None) is None:
                    self._early.append(rid)
                else:
                    with self._lock:
                        self._memory.forget(rid)
        self._emit(frame)

    def take(
        self, generate: Generate, tokens: list[int], rules: dict[str, int], lora: Chosen = (), replayed: int = 0
    ) -> None:
        """Tell of a request's prompt; `lora`: what its adapters are; `replayed`: how many of its tokens are the very
        ones that were generated. Raises ChannelClosedError only.
        """
        began = self._clock()
        space = Space(generate.salt, lora)
        try:
            traced = self._trace(space, to_le(tokens)) if generate.cache else None
            account = self._account(generate, tokens, rules, space)
            account.replayed, account.no_replay = replayed, not self._replay
            if traced is not None:
                account.gone, account.elsewhere, account.differences = (
                    traced.gone,
                    traced.elsewhere,
                    traced.differences,
                )
        except Exception:
            logger.exception("request %s could not be accounted for", generate.rid)
            return
        self._counters["account_seconds"] += self._clock() - began
        self._counters["accounts"] += 1
        self._emit(account)

    def _account(self, generate: Generate, tokens: list[int], rules: dict[str, int], space: Space) -> Account:
        pieces = self._pieces(tokens)
        text = b"".join(pieces).decode(errors="surrogateescape")
        moved = bool(rules.keys() & {"move", "move_volatile_line"})
        prompt = Prompt(text, generate.messages, generate.tools or (), moved=moved)
        ends = _Ends(text, pieces)
        new = Known(generate.rid, generate.client, space, prompt, to_le(tokens), words_of(tokens), self._in_force())
        with self._lock:
            found = self._memory.resembles(new)
            if generate.cache and generate.rid not in self._early:
                self._memory.add(new)
                self._replies[generate.rid] = _Reply()
        sections = _sections(prompt, ends)
        if found is None and generate.cache:
            found = self._from_store(new)
        if found is None:
            account = Account(generate.rid, sections, False, 0, 0, None, rules, not generate.cache)
            account.judged = self._judged(None, new)
            return account
        other, common = found
        whole = other.prompt.text + other.prompt.reply
        known = common
        if len(other.tokens) // 4 - common <= _SEAM:
            known = max(common, ends.token_at(common_length(whole, text)))
        finding = self._finding(other, new, ends)
        told = 0 if finding is None else finding.token + finding.alike
        if common * 2 < len(tokens) and told * _CLEARLY < len(tokens) and other.rid:  # else no other one tells more
            with self._lock:
                beside = self._memory.most_alike(new, other, common)
            if beside is not None:
                finding = _costlier(finding, self._finding(beside, new, ends))
        if other.space != space:
            field = "`lora`" if other.space.salt == space.salt else "`cache_salt`"
            finding = Finding("other_namespace", field, 0, "", "", "", len(tokens))
            known = 0
        return Account(
            generate.rid,
            sections,
            True,
            self._certain(known, len(other.tokens) // 4) if other.done else 0,
            min(known, len(other.tokens) // 4),
            finding,
            rules,
            not generate.cache,
            reply=_reply_of(other.prompt, prompt),
            judged=self._judged(finding, new),
        )

    def _judged(self, finding: Finding | None, new: Known) -> list[Judged]:
        """What was proposed for the prompt's app, and what is proposed now."""
        with self._lock:
            if finding is not None:
                self._memory.propose(Proposal(finding.rule, finding.setting), new.client)
            return [Judged(*proposal, fits) for proposal, fits in self._memory.judged(new)]

    def _certain(self, known: int, prompt: int) -> int:
        """Of the tokens that were computed before, those that the cache would surely give if it had them."""
        if self._grain == 1:
            return known
        return min(known, prompt) // self._grain * self._grain if self._grain else 0

    def _from_store(self, new: Known) -> tuple[Known, int] | None:
        """After a restart nothing is remembered, but much is stored.

        Not `done`: the path may be the request's own, whose blocks are stored as they are computed, and what is stored
        was not evicted.
        """
        tokens = self._stored(new.space, new.tokens)
        common = common_tokens(tokens, new.tokens)
        if common < _LEAST_COMMON:
            return None
        text = b"".join(self._pieces(from_le(tokens))).decode(errors="surrogateescape")
        return Known("", new.client, new.space, Prompt(text), tokens, frozenset()), common

    def _finding(self, other: Known, new: Known, ends: _Ends) -> Finding | None:
        prompt = new.prompt
        found: Difference | None = difference(other.prompt, prompt)
        if found is None:
            return None
        if other.rules is not None and new.rules is not None and other.rules != new.rules:
            asked = {"client": new.client, "cause": found.cause, "place": found.part}
            names = rules_behind(other.prompt, prompt, other.rules, new.rules, **asked)
            if names:
                place = f"the rule{'s' if len(names) > 1 else ''} {', '.join(f'`{name}`' for name in names)}"
                found = replace(found, cause="rule_applied", part=place, proposals=(), until=0)
        if app_name(other.client) != app_name(new.client):
            found = _between_apps(found)
        wanted = (one for one in found.proposals if not in_force(one, new.rules or StableRules(), new.client))
        with self._lock:
            fitting = next((one for one in wanted if self._memory.supports(one, new)), None)
        found = replace(found, proposals=(fitting,) if fitting else (), systems=())  # of these two, too
        token = ends.token_at(found.place)
        rest = len(prompt.text) - found.place
        left = ends.count - token
        return Finding(
            cause=found.cause,
            place=found.part,
            token=token,
            lead=_plain(found.lead),
            before=_plain(found.before),
            after=_plain(found.after),
            alike=round(left * min(1.0, found.alike / rest)) if rest > 0 else 0,
            rule=found.rule,
            setting=found.setting,
            until=ends.token_at(found.until) if found.until else 0,
        )


def _between_apps(found: Difference) -> Difference:
    """Two apps say different things to the model: none of it is a value, and there is no rule for it."""
    cause = "changed_text" if found.cause == "changing_value" else found.cause
    return replace(found, cause=cause, proposals=found.proposals if found.rule == "freeze_clock" else ())


def _costlier(first: Finding | None, second: Finding | None) -> Finding | None:
    """`second` is of a prompt that begins less alike: it counts if what changes costs clearly more there."""
    if second is None or second.cause in HARMLESS:
        return first
    more = _CLEARLY if second.cause in VALUES else _MUCH
    if first is not None and second.token + second.alike <= (first.token + first.alike) * more:
        return first
    return msgspec.structs.replace(second, beside=True)


def _reply_of(before: Prompt, after: Prompt) -> str:
    """Name of the message of `after` that has the reply to `before`, if it goes on."""
    messages = after.messages or ()
    index = len(before.messages or ())
    at_its_place = 0 < index < len(messages) and messages[index].role == "assistant"
    return name_of(messages[index], index) if at_its_place else ""


def _is_stored(end: Finished) -> bool:
    """Was all of the prompt computed, and handed to the cache in whole blocks?"""
    whole = end.timings.total_prompt_n // BLOCK_TOKENS * BLOCK_TOKENS
    return end.reason != "cancelled" and (end.stored < 0 or end.stored >= whole)


class _Reply:
    """What is generated, as it comes. Thoughts stand before the rest, in the marks that most models use."""

    def __init__(self) -> None:
        self._thoughts: list[str] = []
        self._parts: list[str] = []

    def add(self, frame: Delta | Finished) -> None:
        if frame.reasoning:
            self._thoughts.append(frame.reasoning)
        if frame.text:
            self._parts.append(frame.text)

    def text(self) -> str:
        thoughts, rest = "".join(self._thoughts), "".join(self._parts)
        return f"<think>\n{thoughts.strip()}\n</think>\n\n{rest.lstrip()}" if thoughts else rest


class _Ends:
    """Where each token ends in the text."""

    def __init__(self, text: str, pieces: Sequence[bytes]) -> None:
        self._text = text
        self._ascii = text.isascii()
        self._ends = np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)))
        self.count = len(pieces)

    def token_at(self, place: int) -> int:
        """Tokens that end at a character, or before it."""
        at = place if self._ascii else len(self._text[:place].encode(errors="surrogateescape"))
        return int(np.searchsorted(self._ends, at, "right"))


def _sections(prompt: Prompt, ends: _Ends) -> list[SectionTokens]:
    """Parts with their tokens; all of the template's together, at the end."""
    sections: list[SectionTokens] = []
    template, begin = 0, 0
    parts: list[Any] = prompt.parts
    for part in parts[:_PIECES]:
        end = ends.token_at(part.end) if part is not parts[-1] else ends.count
        if part.kind == "template":
            template += end - begin
        else:
            sections.append(SectionTokens(part.name.removeprefix("the "), end - begin))
        begin = end
    if len(parts) > _PIECES:
        sections.append(SectionTokens("the rest", ends.count - begin))
    if template:
        sections.append(SectionTokens("template", template))
    return sections


def _plain(text: str) -> str:
    """Text that can be sent, whatever bytes the tokens had."""
    return text.encode(errors="surrogateescape").decode(errors="replace")

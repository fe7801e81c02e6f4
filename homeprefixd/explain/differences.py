"""Where a prompt leaves another one that it resembles, and why: two prompts in, one difference out.

Pure. Looks at the chats first (tools, messages), where they say more than their texts, then at the texts around the
first character that differs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..chat import stable
from ..chat.volatile_lines import volatile_lines
from ..frames.worker import Message
from .alike import alike_behind, line_at, own_alike, start_of, until_again
from .causes import CAUSES, MOVE, VALUES
from .evidence import takes_what_changes
from .prompt import Part, Prompt, common_length, tool_name
from .proposal import DROP_BILLING_LINE, Proposal, dropping, moving
from .reordered import canonical, reordered, without_order
from .rules import helps
from .volatile import volatile

_WINDOW = 16_384  # characters behind the difference that are compared
_SHOWN = 48  # characters of each text that are shown
_THOUGHT = re.compile(
    r"<think|</think|<\|channel\|>\s*analysis|<reasoning|<thought|\[THINK\]|<seed:think", re.IGNORECASE
)
_BLANK = re.compile(r"\s+")
_BRACKET = re.compile(r"[\[{]")
_DECODER = json.JSONDecoder()
_TRIES = 64  # brackets in a reply that begin no JSON: each may cost as much as the rest of the reply is long
_LONG_LINE = 320  # characters: what changes in a longer one is not "a line"
_A_LINE = 12  # characters of a line that is no chance
_VALUE = 40  # characters of a line that change: what is longer is a text rather than a value
_SAME_START = 24  # characters: a text of which the beginning was cut off does not begin like the whole
_SUMMARY = 2  # messages that stand for those that were cut off: a summary, and that it was understood
_OF_ENTRIES = ("counter", "changing_value")
_EDITED = 160  # characters behind a change from which a last message is one that was edited
_NEARLY_ALL = 0.75
_FOUND_AGAIN = 64  # characters that must come again for one text to be in another


@dataclass(frozen=True)
class Difference:
    """`place`: position in both texts of the first character that differs; `alike`: characters behind it that are not
    new, roughly; `until`: where the second one leaves the first again, if what differs is a value, else 0.
    """

    cause: str
    part: str
    place: int
    lead: str
    before: str
    after: str
    alike: int
    proposals: Iterable[Proposal] = ()  # the best first; each is made when it is asked for
    systems: Sequence[str] = ()  # both system messages, if it is in them
    until: int = 0

    @cached_property
    def proposal(self) -> Proposal:
        """The best of which these two texts alone do not show that it takes along what stays."""
        return next((one for one in self.proposals if one.rule != MOVE or self._takes_what_changes()), Proposal())

    def _takes_what_changes(self) -> bool:
        return takes_what_changes([volatile_lines(text) for text in self.systems], different=2)

    @property
    def rule(self) -> str:
        """What is proposed; "": nothing."""
        return self.proposal.rule

    @property
    def setting(self) -> str:
        """Of the rule."""
        return self.proposal.setting


def difference(before: Prompt, after: Prompt) -> Difference | None:
    """None if `after` goes on where `before` ended, or differs only in what it asks last."""
    a, b = before.text + before.reply, after.text
    place = common_length(a, b)
    if place >= len(b) or not a[place:].strip():
        return None
    part = after.part_at(place)
    alike = alike_behind(a[place:], b[place:])
    if (before.moved or after.moved) and _is_of_a_rule(before, after, part):
        return Difference("rule_moved", part.name, place, "", "", "", alike)
    cause, name, old, new = _why(before, after, a, place, part)
    if (
        cause == "changed_text"
        and _is_new_question(before, after, part, alike, len(b) - place)
        and not _something_went(before, part, a, b, place)
    ):
        return None
    if cause == "retokenised":  # its words are the same, though not all of them are found as pieces
        alike = max(alike, min(len(b) - place, _reply_length(before, after)))
    elif before.tools and after.tools:
        alike = min(alike, own_alike(before, after, place))
    proposals = _proposed(cause, before, after, place, part)
    start = start_of(new, b, place) if new is not None else place
    return Difference(
        cause=cause,
        part=name or part.name,
        place=place,
        lead=b[max(0, start - _SHOWN) : start],
        before=(old if old is not None else a[place : place + _SHOWN])[:_SHOWN],
        after=(new if new is not None else b[place : place + _SHOWN])[:_SHOWN],
        alike=alike,
        proposals=proposals,
        systems=(_systems(before, after, place, part) or ()) if proposals else (),
        until=until_again(a, b, place, old, new) if cause in VALUES else 0,
    )


def _reply_length(before: Prompt, after: Prompt) -> int:
    """Characters of the message that has the reply to `before`."""
    messages = after.messages or ()
    index = len(before.messages or ())
    return len(messages[index].content or "") if index < len(messages) else 0


def _is_of_a_rule(before: Prompt, after: Prompt, part: Part) -> bool:
    """Is it what a rule of `[stable]` has moved into the last user message that differs first: it stands in the newest
    one only, and its values change?
    """
    pairs = enumerate(zip(before.messages or (), after.messages or (), strict=False))
    index, old, new = next(((i, x, y) for i, (x, y) in pairs if not _equal(x, y)), (-1, None, None))
    if old is None or new is None or old.role != "user" or new.role != "user":
        return False
    if part.kind not in ("message", "template") or (part.index >= 0 and part.index != index):
        return False
    was, now = (stable.moved_lines(message.content or "") for message in (old, new))
    if not now:
        return bool(was) and (old.content or "")[len(was) :] == (new.content or "")
    return bool(was) and common_length(was, now) < min(len(was), len(now))


def _proposed(cause: str, before: Prompt, after: Prompt, place: int, part: Part) -> Iterable[Proposal]:
    """The rule that would help: lines are moved out of system messages, and keys sorted in tools only."""
    rule = CAUSES[cause].rule
    if rule == MOVE:
        return _moved(before, after, place, part)
    if rule == DROP_BILLING_LINE:
        return dropping(*(_systems(before, after, place, part) or ("", "")), place - part.start)
    if not rule or (rule == "sort_keys" and part.kind not in ("tool", "template")):
        return ()
    return (Proposal(rule),) if rule == "freeze_clock" or helps(rule, before, after) else ()


def _moved(before: Prompt, after: Prompt, place: int, part: Part) -> Iterable[Proposal]:
    systems = _systems(before, after, place, part)
    return _Moving(*systems, place - part.start) if systems is not None else ()


@dataclass(frozen=True)
class _Moving:
    """The second proposal is seldom asked for, and costs as much as all the rest."""

    before: str
    after: str
    place: int

    def __iter__(self) -> Iterator[Proposal]:
        return moving(self.before, self.after, self.place)


def _systems(before: Prompt, after: Prompt, place: int, part: Part) -> tuple[str, str] | None:
    """Both system messages, if they begin at the same place and differ at `place`; of those that rules change."""
    old = before.part_at(place)
    if not (before.leads(old) and after.leads(part)) or old.start != part.start:
        return None
    return before.text[old.start : old.end], after.text[part.start : part.end]


Why = tuple[str, str, str | None, str | None]
"""Cause, name of the place ("": the part's own), what stood there, what stands there (None: the text there)."""


def _why(before: Prompt, after: Prompt, a: str, place: int, part: Part) -> Why:
    b = after.text
    near = a[max(0, place - 12) : place + _SHOWN], b[max(0, place - 12) : place + _SHOWN]
    if part.kind in ("tool", "template") or (not after.tools) != (not before.tools):
        found = _tools(before, after, place, part)
        if found is not None:
            return found
    if before.messages is not None and after.messages is not None:
        found = _history(before, after, place, part)
        if found is not None:
            return found
    if _THOUGHT.search(near[0]) and not _THOUGHT.search(near[1]):
        return "thoughts_stripped", _place_of_thoughts(after, place, part), None, None
    if _is_blank_only(a, b, place):
        return "white_space", "", None, None
    what = volatile(a, b, place)
    if what is not None and what.cause in _OF_ENTRIES and (_comes_again(a, place, b) or _comes_again(b, place, a)):
        what = None  # the number of one document, or the value of one entity, among others
    ordered = reordered(*_ending_with_part(before, after, a, place, part), place)
    if ordered and (what is None or what.cause in ("counter", "changing_value", "random_id")):
        return ordered, "", None, None
    if after.messages is None or part.kind not in ("message", "system"):
        if _comes_again(b, place, a):
            return "history_truncated", "", None, None
        if _comes_again(a, place, b):
            return "inserted_text", "", None, None
    if what is not None:
        cause = "template_clock" if what.cause == "clock" and part.kind == "template" else what.cause
        return cause, "", what.before, what.after
    return _changed(before, after, a, place, part)


def _changed(before: Prompt, after: Prompt, a: str, place: int, part: Part) -> Why:
    b = after.text
    last = _last_user(after)
    earlier = part.kind == "message" and 0 <= part.index < last
    if earlier and (not _same_last(before, part) or _was_answered(before, after, part.index)):
        return "history_edited", "", None, None
    lines = line_at(a, place), line_at(b, place)
    behind = [text[end : end + _WINDOW] for text, (_start, end) in zip((a, b), lines, strict=True)]
    short = all(end - start <= _LONG_LINE for start, end in lines)
    if short and _go_on_alike(behind[0], behind[1], _A_LINE if part.kind == "system" else _FOUND_AGAIN):
        shown = [text[start:end] for text, (start, end) in zip((a, b), lines, strict=True)]
        if _is_value(shown[0], shown[1]):
            return "changing_value", "", shown[0], shown[1]
    if part.kind == "system" and _comes_again(a, place, b):
        return "inserted_text", "", None, None
    if part.kind == "message" and _comes_again(a, place, b[: part.end]):  # one more document before the question
        return "inserted_text", "", None, None
    return "changed_text", "", None, None


# ------------------------------------------------------------------------------------------------- tools


def _tools(before: Prompt, after: Prompt, place: int, part: Part) -> Why | None:
    """Why the tools differ, if it is they that differ at `place`."""
    if not before.tools and not after.tools:
        return None
    exact = [[json.dumps(tool, default=str) for tool in prompt.tools] for prompt in (before, after)]
    if exact[0] == exact[1]:
        return None
    first = min((p.start for p in (*before.parts, *after.parts) if p.kind == "tool"), default=None)
    if first is not None and place < first - 400 and part.kind != "tool":
        return None
    plain = [[canonical(tool) for tool in prompt.tools] for prompt in (before, after)]
    names = [[tool_name(tool) for tool in prompt.tools] for prompt in (before, after)]
    if plain[0] == plain[1]:
        return "keys_reordered", part.name if part.kind == "tool" else "the tools", None, None
    if sorted(plain[0]) == sorted(plain[1]):
        return "tools_reordered", "the tools", ", ".join(names[0]), ", ".join(names[1])
    if sorted(names[0]) == sorted(names[1]):
        if names[0] != names[1]:
            return "tools_reordered", "the tools", ", ".join(names[0]), ", ".join(names[1])
        if all(without_order(x) == without_order(y) for x, y in zip(before.tools, after.tools, strict=True)):
            return "entries_reordered", part.name if part.kind == "tool" else "the tools", None, None
        what = volatile(before.text, after.text, place)
        if what is not None and part.kind == "tool":
            return what.cause, "", what.before, what.after
        index = next(i for i, (x, y) in enumerate(zip(plain[0], plain[1], strict=True)) if x != y)
        return "tools_changed", f"the definition of the tool {names[1][index]}", None, None
    gone = [name for name in names[0] if name not in names[1]]
    new = [name for name in names[1] if name not in names[0]]
    said = "; ".join(f"{_named(some)} {verb}" for some, verb in ((new, "came"), (gone, "went")) if some)
    return "tools_changed", said or "the tools", ", ".join(names[0]), ", ".join(names[1])


def _named(tools: Sequence[str]) -> str:
    return f"the tool{'s' if len(tools) > 1 else ''} {', '.join(tools)}"


# ------------------------------------------------------------------------------------------------- messages


def _history(before: Prompt, after: Prompt, place: int, part: Part) -> Why | None:
    """What has happened to the messages from the first that differs on."""
    old, new = list(before.messages or ()), list(after.messages or ())
    if part.kind == "system" or (part.kind == "tool"):
        return None
    at = next((i for i, (x, y) in enumerate(zip(old, new, strict=False)) if not _equal(x, y)), min(len(old), len(new)))
    if at < len(old) and at < len(new):
        if _thoughts_went(old[at], new[at]):
            return "thoughts_stripped", f"message {at + 1} ({new[at].role})", None, None
        if old[at].role == "system" or new[at].role == "system":
            return None
        tail = old[at + 1 :]
        moved = any(_equal(message, new[at]) for message in tail) and (len(new) - at > 1 or at <= 1)
        if moved or _was_summed_up(old[at:], new[at:]):
            return "history_truncated", f"message {at + 1} ({new[at].role})", None, None
        content, was = new[at].content or "", old[at].content or ""
        if (
            len(content) >= _FOUND_AGAIN
            and len(was) > len(content)
            and was.endswith(content[-len(content) // 2 :])
            and common_length(was, content) < _SAME_START
        ):
            return "history_truncated", f"message {at + 1} ({new[at].role})", None, None
    if at == len(old) and at < len(new) and new[at].role == "assistant" and place >= len(before.text):
        reply, sent = before.reply, (new[at].content or "").strip()
        thinking = _THOUGHT.search(reply[:200]) or _THOUGHT.search(before.text[-40:])
        if thinking and not _THOUGHT.search(after.text[len(before.text) - 20 : place + 40]):
            return "thoughts_stripped", f"message {at + 1} (assistant)", None, None
        if sent and sent not in reply and "".join(sent.split()) in "".join(reply.split()):
            return "white_space", f"message {at + 1} (assistant)", None, None
        rewritten = max(0, place - len(before.text) - 12)  # from where on; a mark may have begun a little before
        said = sent and not new[at].tool_calls and sent == reply.strip()
        if (said or _same_calls(reply, new[at])) and not _THOUGHT.search(reply[rewritten:]):
            return "retokenised", f"message {at + 1} (assistant)", None, None
        if thinking:
            return "thoughts_stripped", f"message {at + 1} (assistant)", None, None
        return "history_edited", f"message {at + 1} (assistant)", None, None
    if (
        at == len(old)
        and place < len(before.text)
        and _THOUGHT.search(before.text[max(0, place - 16) : place + _SHOWN])
    ):
        return "thoughts_stripped", _place_of_thoughts(after, place, part), None, None
    return None


def _place_of_thoughts(after: Prompt, place: int, part: Part) -> str:
    """Thoughts stand in no part of a prompt; they belong to the reply that follows them."""
    return after.message_behind(place) if part.kind == "template" else ""


def _was_summed_up(old: Sequence[Message], new: Sequence[Message]) -> bool:
    """Do one or two new messages stand for more old ones, and then it goes on as before?"""
    for count in range(1, min(_SUMMARY, len(new) - 1) + 1):
        rest = new[count:]
        for gone in range(count + 1, len(old)):
            if not _equal(old[gone], rest[0]):
                continue
            both = list(zip(old[gone:], rest, strict=False))
            size = sum(len(message.content or "") for message, _ in both)
            if size >= _FOUND_AGAIN and all(_equal(x, y) for x, y in both[1:]):
                return True
    return False


def _equal(a: Message, b: Message) -> bool:
    return a.role == b.role and (a.content or "") == (b.content or "") and a.tool_calls == b.tool_calls


def _same_calls(reply: str, sent: Message) -> bool:
    """Does a message say what was replied, with each of its tool calls, however the template writes them?"""
    if not sent.tool_calls or (sent.content or "").strip() not in reply:
        return False
    known: set[str] = set()
    for value in _json_in(reply):
        for one in value if isinstance(value, list) else [value]:
            known.add(canonical(one))
            if isinstance(one, dict):
                known.update(canonical(_parsed(one.get(key))) for key in ("arguments", "parameters"))
    functions = [call.get("function") for call in sent.tool_calls]
    return all(
        isinstance(function, dict)
        and str(function.get("name")) in reply
        and canonical(_parsed(function.get("arguments"))) in known
        for function in functions
    )


def _json_in(text: str) -> Iterator[Any]:
    """The outermost objects and lists that are JSON."""
    at = failed = 0
    while failed < _TRIES and (start := _BRACKET.search(text, at)) is not None:
        at = start.end()
        try:
            value, at = _DECODER.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            failed += 1
            continue
        yield value


def _parsed(value: Any) -> Any:
    """Arguments of a call, which may be JSON in a string."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _thoughts_went(old: Message, new: Message) -> bool:
    if old.role != "assistant" or new.role != "assistant":
        return False
    if old.reasoning_content and not new.reasoning_content:
        return True
    was, now = old.content or "", new.content or ""
    return bool(_THOUGHT.search(was)) and not _THOUGHT.search(now)


def _last_user(prompt: Prompt) -> int:
    """Index of the last user message, -1 if there is none."""
    return max((i for i, message in enumerate(prompt.messages or ()) if message.role == "user"), default=-1)


def _same_last(before: Prompt, part: Part) -> bool:
    """Whether the message was the last one that the other prompt asked."""
    return part.index == _last_user(before)


def _was_answered(before: Prompt, after: Prompt, question: int) -> bool:
    """Does the other prompt's reply follow that question: is it the same one, written otherwise?"""
    messages = after.messages or ()
    answer = messages[question + 1] if question + 1 < len(messages) else None
    said = (answer.content or "").strip() if answer is not None and answer.role == "assistant" else ""
    return bool(said) and said in before.reply


def _is_new_question(before: Prompt, after: Prompt, part: Part, alike: int, rest: int) -> bool:
    """Only what is asked differs: what stands behind it is the template's."""
    if after.messages is None:
        return alike * 2 < rest
    if alike >= _EDITED and alike > _NEARLY_ALL * rest:
        return False  # a word of a long text was changed
    if part.kind == "template" or part.kind == "message":
        first_new = min(len(before.messages or ()), _last_user(after))
        return part.index < 0 or part.index >= min(first_new, _last_user(before))
    return False


def _something_went(before: Prompt, part: Part, a: str, b: str, place: int) -> bool:
    """Does the last message go on with what stands further behind in the other one: is a document left out of it?"""
    end = before.part_at(place).end
    return part.kind == "message" and place + _FOUND_AGAIN <= part.end and _comes_again(b, place, a[:end])


# ------------------------------------------------------------------------------------------------- texts


def _is_blank_only(a: str, b: str, place: int) -> bool:
    """Do the texts differ in blanks here, and go on alike?"""
    wa, wb = a[max(0, place - 1) : place + 160], b[max(0, place - 1) : place + 160]
    if not (a[place : place + 1].isspace() or b[place : place + 1].isspace()):
        return False
    sa, sb = _BLANK.sub("", wa), _BLANK.sub("", wb)
    return common_length(sa, sb) >= 16


def _comes_again(text: str, place: int, other: str) -> bool:
    """Does what stands in `text` at `place` come later in `other`? Then something before it went."""
    probe = text[place : place + _FOUND_AGAIN]
    return len(probe) == _FOUND_AGAIN and other.find(probe, place + 1, place + 64 * _WINDOW) > place


def _go_on_alike(a: str, b: str, least: int) -> bool:
    """What stands behind two lines: is it the same for a while, or for whole lines of at least `least` characters?"""
    same = common_length(a, b)
    return same >= _FOUND_AGAIN or len(a[1:same].rpartition("\n")[0]) >= least


def _is_value(a: str, b: str) -> bool:
    """Two lines: do they differ in a value, rather than being two texts? What follows a label may be longer."""
    head = common_length(a, b)
    tail = min(common_length(a[::-1], b[::-1]), min(len(a), len(b)) - head)
    longest = max(len(a), len(b)) - head - tail
    return longest <= (3 * _VALUE if ":" in a[:head] or "=" in a[:head] else _VALUE)


def _ending_with_part(before: Prompt, after: Prompt, a: str, place: int, part: Part) -> tuple[str, str]:
    """Both texts up to the end of the message that differs: what the template writes there is not of its last line."""
    old = before.part_at(place)
    if part.kind not in ("system", "message") or old.kind != part.kind or place > len(before.text):
        return a, after.text
    return a[: old.end], after.text[: part.end]

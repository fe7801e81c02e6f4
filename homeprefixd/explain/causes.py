"""Why a prompt is not reused as far as it could be: what each cause is called, what to do, the rule that does it.

Data only. What finds them is in `differences.py` (two prompts) and `conclude.py` (what the cache did).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..program import typed


class Cause(NamedTuple):
    title: str  # follows "lost to"; {place} is where it stands
    advice: str
    rule: str = ""  # of `chat/stable.py`
    anywhere: str = ""  # the title without a place, where "the prompt" in its stead says nothing


REMEMBERED = 48
"""Prompts of a model with which new ones are compared."""

MOVE = "move_volatile_line"

CAUSES: Mapping[str, Cause] = {
    "clock": Cause(
        "a clock or date in {place}",
        "Put the time at the end of the last user message, or let the app ask for it by a tool: everything behind it is"
        " computed again each time it changes.",
        MOVE,
    ),
    "template_clock": Cause(
        "the date that the model's template puts into every prompt",
        "With the rule the template gets the beginning of the day, so that the prompt changes once a day at most.",
        "freeze_clock",
    ),
    "counter": Cause(
        "a counter in {place}",
        "Take the number out, or put it at the end of the last user message.",
        MOVE,
    ),
    "random_id": Cause(
        "a random id in {place}",
        "Leave the id out of the prompt, or put it at the end of the last user message: the model makes nothing of it.",
        MOVE,
    ),
    "billing_line": Cause(
        "a billing line in {place}",
        "The line is for the vendor's servers and means nothing to a model at home.",
        "drop_billing_line",
    ),
    "changing_value": Cause(
        "a value that changes in {place}",
        "Put what changes (sensors, weather, states) behind what does not, best at the end of the last user message, or"
        " let the app ask for it by a tool.",
        MOVE,
    ),
    "tools_reordered": Cause(
        "tools that come in another order",
        "Send the tools in a fixed order.",
        "sort_tools",
    ),
    "tools_changed": Cause(
        "tools that have changed: {place}",
        "Send the same tools with each request of a chat; tools stand at the beginning of a prompt, so all behind them"
        " is computed again.",
        anywhere="tools that have changed",
    ),
    "keys_reordered": Cause(
        "JSON keys that come in another order in {place}",
        "Write JSON with its keys in a fixed order (in Python: `sort_keys=True`).",
        "sort_keys",
    ),
    "entries_reordered": Cause(
        "entries that come in another order in {place}",
        "Sort them before they are written into the prompt.",
    ),
    "white_space": Cause(
        "white space in {place}",
        "Write the same blanks and line ends each time.",
    ),
    "thoughts_stripped": Cause(
        "thoughts that were left out of {place}",
        "Send the thoughts back (`reasoning_content`), if the model's template keeps them; else it is the template's"
        " way, and only the last reply is computed again.",
    ),
    "retokenised": Cause(
        "a reply that makes other tokens in the history than those that were generated, in {place}",
        "Nothing can be done in the app: the text is the same, or the model's template writes replies or tool calls in"
        " its own way.",
    ),
    "history_truncated": Cause(
        "messages that were cut off the front of the history",
        "Cut rarely and much rather than a little with each turn, or give the model a longer context (`model.ctx`).",
    ),
    "history_edited": Cause(
        "an earlier message that was changed: {place}",
        "Leave what was sent as it is, and say what is new at the end.",
        anywhere="an earlier message that was changed",
    ),
    "inserted_text": Cause(
        "text that was put in before the rest of {place}",
        "Put what is new (found documents, memories) at the end of the last user message.",
    ),
    "changed_text": Cause(
        "text that has changed in {place}",
        "Keep the beginning of the prompt as it is, and put what changes at its end.",
    ),
    "other_namespace": Cause(
        "another namespace ({place})",
        "What was stored under other settings of the cache cannot be used: use the same for what may be shared.",
        anywhere="another namespace",
    ),
    "other_model": Cause(
        "another model: the same messages were computed for {place}",
        "Ask the same model; what is computed for one is of no use to another one.",
        anywhere="another model, for which the same messages were computed",
    ),
    "evicted": Cause(
        "eviction: it was known and is not kept any more{place}",
        "Give the cache more room (`cache.hot`, `cache.warm`), or pin what must stay (`homeprefixd pin`).",
    ),
    "not_kept": Cause(
        "what was computed for it once and is not there any more",
        "Nothing says that it was evicted. The store may have been started again before all was on disk, or had no time"
        " to take it: see the daemon's log, and look whether it comes again.",
    ),
    "store_away": Cause(
        "the store, which was away or did not answer in time",
        "Nothing in the app: the daemon starts its store again by itself. If it comes again, see the daemon's log.",
    ),
    "not_loaded": Cause(
        "what is stored and could not be brought into memory in time",
        "Give `cache.hot` room for some blocks of this model at least; else the disk is slow, or busy.",
    ),
    "computed_faster": Cause(
        "nothing: computing was faster than reading what is kept",
        "",
    ),
    "cache_off": Cause(
        "a request that asked for no cache",
        "Leave `cache_prompt` out of the request.",
    ),
    "prompt_logprobs": Cause(
        "a request for the prompt's own log-probabilities, for which all of it was computed",
        "Leave `echo` or `logprobs` out of the request, where only those of the reply are read.",
    ),
    "too_short": Cause(
        "nothing: the prompt is too short to be worth it",
        "",
    ),
    "never_seen": Cause(
        f"nothing: none of the last prompts ({REMEMBERED} at most are remembered) is like this one",
        "",
    ),
    "rule_applied": Cause(
        "nothing but once: {place} of [stable] came into force, or was changed",
        "",
    ),
    "rule_moved": Cause(
        "nothing: what a rule of [stable] moves stands in the last question only",
        "",
    ),
    "goes_on": Cause(
        "nothing: only what is new was computed",
        "",
    ),
}

GATE: Mapping[str, str] = {
    "unknown": "nothing of this prompt is known, or too little to be worth it",
    "prompt_logprobs": "the log-probabilities of the prompt's tokens were asked for, so all of it was computed",
    "late": "the store is away, or did not answer in time",
    "unmeasured": "too little is measured yet, so all that is known is restored",
    "faster": "restoring is predicted to be faster than computing",
    "computed": "computing the rest is predicted to be faster than reading it",
    "lost": "it could not all be brought into memory: no room, or it took too long",
    "again": "computing seems faster, but now and then all is restored, so that what is measured stays true",
}
"""`GateDecision.reason` in words."""

VALUES = frozenset({"clock", "counter", "random_id", "changing_value"})
"""Of a value in a text that stays as it is."""

EVERYBODYS = frozenset({"freeze_clock"})
"""Rules that are of a model, not of an app."""

HARMLESS = frozenset({"too_short", "never_seen", "goes_on", "computed_faster", "rule_applied", "rule_moved"})
"""Nothing was lost."""

REMOVALS: Mapping[str, str] = {
    "budget": "the cache was full, and others were worth more",
    "smaller": "the budget on disk (`cache.warm`) was made smaller",
    "stale": "it was of a model or of settings that are not in use any more",
    "unwritten": "RAM (`cache.hot`) was full before it could be written to the disk",
    "no_disk": "RAM (`cache.hot`) was full, and nothing is kept on disk (`cache.warm`)",
    "disk_full": "RAM (`cache.hot`) was full, and so was the disk",
    "disk_error": "RAM (`cache.hot`) was full, and the disk could not be written",
    "daily_writes": "RAM (`cache.hot`) was full, and as much was written that day as may be (`cache.daily_writes`)",
    "share": "what its model or its API key may keep on disk (`cache_share`) was full",
    "purged": "somebody purged it",
    "damaged": "it was damaged on disk",
}
"""Why the store has removed a block (`prefix/removals.py`)."""


_AFTER_REMOVAL: Mapping[str, str] = {
    "smaller": "Make `cache.warm` larger again, if there is room.",
    "stale": "Nothing: it was of a model or of settings that are not used any more.",
    "disk_full": "Make room on the disk, or give the cache more RAM (`cache.hot`).",
    "disk_error": "See the daemon's log for what is wrong with the disk.",
    "daily_writes": "Let more be written a day (`cache.daily_writes`), or give the cache more RAM (`cache.hot`).",
    "share": "Let the model or the API key keep more (`cache_share`), or pin what must stay (`homeprefixd pin`).",
    "purged": "Nothing: somebody wanted it gone, and it is kept again from now on.",
    "damaged": "Nothing for once; if it comes again, have the disk checked (`homeprefixd verify` reads the store).",
}
"""What to do where more room is not the answer."""

_FROZEN = "Nothing: the rule `freeze_clock` is in force, so the prompt changes once a day, at midnight, and not again."

_REPLAY = 'Set `cache.replay` to "on": then what was generated is known by its text, token for token.'


def title(cause: str, place: str) -> str:
    """In a few words, after "lost to". `place` "": it is not known, or there are several."""
    if not place and CAUSES[cause].anywhere:
        return CAUSES[cause].anywhere
    if cause == "evicted":
        place = f", as {place}" if place else ""
    return CAUSES[cause].title.format(place=place or ("" if cause == "evicted" else "the prompt"))


def advice(cause: str, why: str = "", *, no_replay: bool = False, frozen: bool = False) -> str:
    """What to do about it. Commands stand there as they can be typed. `why`: a key of REMOVALS, of what was evicted;
    `no_replay`: the memo of replies is off; `frozen`: the template's clock is stopped already.
    """
    text = CAUSES[cause].advice
    if cause == "evicted":
        text = _AFTER_REMOVAL.get(why, text)
    elif cause == "retokenised" and no_replay:
        text = _REPLAY
    elif cause == "template_clock" and frozen:
        text = _FROZEN
    return text.replace("`homeprefixd pin`", typed("pin")).replace("`homeprefixd verify`", typed("verify"))

"""From what is known of a prompt and what was reused of it to an explanation that a person can act on.

Pure. Knows the figures of a request, nothing of how it was served.
"""

from __future__ import annotations

import datetime
from typing import NamedTuple

import msgspec

from ..frames.worker import Account, GateDecision, Timings
from .causes import HARMLESS, REMEMBERED, REMOVALS, advice, title

_SLACK = 8
"""Tokens that a template may write otherwise behind a reply, and the one that is always evaluated."""

_LEAST_LOSS = 24
"""Tokens: what is less is not worth a word."""

_LEAST_FOUND = 12
"""The same, where it is known well what it is."""

_ROUGH = frozenset({"changed_text", "inserted_text", "history_edited", "history_truncated"})
"""Causes of texts that may be alike by chance, as what the template writes is."""

_BLOCK = 64
"""Tokens: what was removed begins at most so far before what was reused, as of a block a part may have been."""

_LIKE = 0.5
"""Share of a prompt that another one must have too for it to be "one like it", unless it begins like that one."""

_NAMED = 3  # differences of namespaces that are told

_SHORTEST = 16
"""Tokens of a prompt below which nothing is looked up at all (`engine/sharing.py`)."""


class Explanation(msgspec.Struct, frozen=True):
    """Why a request did not reuse more. Counts in tokens; `seconds_lost` None: not known yet."""

    id: str
    cause: str  # a key of CAUSES
    title: str
    text: str  # one or two sentences
    place: str
    token: int
    lead: str
    before: str
    after: str
    prompt: int
    reused: int
    tokens_lost: int
    seconds_lost: float | None
    advice: str
    rule: str
    setting: str = ""  # what the rule must be set to
    removed: float = 0.0  # when it was evicted, Unix time in s; 0: it was not, or that is not known
    app: str = ""  # whose prompts the rule is for; "": everybody's


class OtherModel(NamedTuple):
    """A model for which the beginning of the same chat was computed before."""

    name: str
    share: float  # of the prompt


def conclude(
    rid: str,
    account: Account,
    timings: Timings,
    rate: float,
    gate: GateDecision | None = None,
    other: OtherModel | None = None,
) -> Explanation:
    """`rate`: tokens of prefill per second, 0 if it is not known. `gate`: what was made of what the cache knew."""
    reused, total = timings.cache_n, timings.total_prompt_n
    finding = account.finding
    cause, place, token, lost, rule = _gone(account, reused, total, gate, other)
    had = _had(account, reused, total, gate)
    by_difference = False
    if finding is not None:
        gain = finding.alike if not finding.beside else finding.token + finding.alike - had
        if had > finding.token + _SLACK and not finding.beside and finding.cause != "other_namespace":
            # Of a prompt that is not remembered more was reused, or could have been. What stands behind that was lost
            # to the value only as far as the remembered one has it, too, word for word.
            gain = finding.until - had
        by_difference = gain >= (_LEAST_LOSS if finding.cause in _ROUGH else _LEAST_FOUND) and gain > lost
    if finding is not None and by_difference:
        cause, place, token, rule = finding.cause, finding.place, finding.token, finding.rule
        if cause == "other_namespace" and account.differences:
            place = "; ".join(account.differences[:_NAMED])
        lost = 0 if cause in HARMLESS else min(gain, max(0, total - had))
    if cause not in HARMLESS and lost < (_LEAST_LOSS if cause in _ROUGH or not by_difference else _LEAST_FOUND):
        cause, place, lost, rule = "goes_on", "", 0, ""
    if cause == "goes_on" and _is_unlike(account, reused, total):
        cause = "never_seen"
    shown = finding if by_difference and cause not in HARMLESS else None
    seconds = lost / rate if rate and lost else (None if lost else 0.0)
    return Explanation(
        id=rid,
        cause=cause,
        title=title(cause, place),
        text=_text(cause, place, token, lost, seconds, reused, total, had - reused),
        place=place,
        token=token,
        lead=shown.lead if shown is not None else "",
        before=shown.before if shown is not None else "",
        after=shown.after if shown is not None else "",
        prompt=total,
        reused=reused,
        tokens_lost=lost,
        seconds_lost=seconds,
        advice=advice(
            cause,
            account.gone.why if account.gone is not None else "",
            no_replay=account.no_replay,
            frozen="freeze_clock" in account.rules,
        ),
        rule=rule,
        setting=(finding.setting if finding is not None else "on") if rule else "",
        removed=account.gone.when if cause == "evicted" and account.gone is not None else 0.0,
    )


def _had(account: Account, reused: int, total: int, gate: GateDecision | None) -> int:
    """Leading tokens that the cache had: those that were reused, and those that were computed as that is faster."""
    weighed = gate is not None and gate.reason == "computed" and gate.known - reused > _SLACK
    return min(gate.known, total - 1) if gate is not None and weighed else reused


def _is_unlike(account: Account, reused: int, total: int) -> bool:
    """Does it share hardly anything with the prompt that resembles it most?"""
    if account.finding is None:
        return False
    begun = max(account.finding.token, account.known, reused)
    return begun < _BLOCK and begun + account.finding.alike < total * _LIKE


def _gone(
    account: Account, reused: int, total: int, gate: GateDecision | None, other: OtherModel | None
) -> tuple[str, str, int, int, str]:
    """Cause, place, token, tokens lost and rule, as far as what was known is not there, or was not used."""
    if total < _SHORTEST:
        return "too_short", "", 0, 0, ""
    known = min(account.known, total - 1)
    if account.asked_no_cache and known - reused > _SLACK:
        return "cache_off", "", reused, known - reused, ""
    if gate is not None and gate.reason == "prompt_logprobs" and known - reused > _SLACK:
        return "prompt_logprobs", "", reused, known - reused, ""
    if gate is not None and gate.reason == "late" and known - reused > _SLACK:
        return "store_away", "", reused, known - reused, ""
    if gate is not None and gate.reason == "lost" and min(gate.known, total - 1) - reused > _SLACK:
        return "not_loaded", "", reused, min(gate.known, total - 1) - reused, ""
    had = _had(account, reused, total, gate)
    if had > reused and had + _SLACK >= known:
        return "computed_faster", "", reused, 0, ""
    gone = account.gone
    removed = 0
    if gone is not None and gone.start >= had - _BLOCK:
        removed = min(total - 1, gone.start + gone.count) - had
    if gone is not None and removed > _SLACK:
        place = f"{REMOVALS.get(gone.why, gone.why)}, {_when(gone.when)}"
        return "evicted", place, had, max(known - had, removed), ""
    elsewhere = round(total * other.share) - reused if other is not None else 0
    if known - had > max(_SLACK, elsewhere):
        if _is_other_tokens(account, known, had):
            return "retokenised", account.reply, had, known - had, ""
        return "not_kept", "", had, known - had, ""
    if account.elsewhere - reused > _SLACK:
        place = "; ".join(account.differences[:_NAMED])
        return "other_namespace", place, reused, min(account.elsewhere, total - 1) - reused, ""
    if other is not None and elsewhere > _LEAST_LOSS:
        return "other_model", other.name, reused, elsewhere, ""
    if not account.resembles:
        return "never_seen", "", reused, 0, ""
    return "goes_on", "", reused, 0, ""


def _is_other_tokens(account: Account, known: int, had: int) -> bool:
    """Is the reply not found for its tokens? What is known of a prompt shorter than a block was of no use then, as it
    is kept together with its reply.
    """
    if known <= account.known_prompt or account.replayed + _SLACK >= known - account.known_prompt > 0:
        return False
    return account.known_prompt - had <= _SLACK or account.known_prompt < _BLOCK


def _when(moment: float) -> str:
    """A time of removal, local."""
    return datetime.datetime.fromtimestamp(moment).strftime("on %Y-%m-%d at %H:%M")


def _text(
    cause: str, place: str, token: int, lost: int, seconds: float | None, reused: int, total: int, weighed: int
) -> str:
    """`weighed`: tokens that are kept, and were computed."""
    head = f"{reused:,} of {total:,} tokens were reused"
    if cause in HARMLESS:
        return {
            "computed_faster": f"{head}; {weighed:,} more are kept, but computing them is predicted to be faster than"
            " reading them.",
            "too_short": f"The prompt has {total} tokens: that is too short to be kept.",
            "never_seen": f"{head}; none of the last prompts (at most {REMEMBERED} are remembered) is like this one, so"
            " the rest is taken for new.",
            "rule_applied": f"{head}: {place} of [stable] came into force or was changed, so this prompt is computed"
            " anew once; those that follow are reused.",
            "rule_moved": f"{head}: what a rule of [stable] moves out of the system message stands in the last question"
            " only, so that question and what follows it are computed with each request.",
        }.get(cause, f"{head}: nothing was lost, the rest is new, or stands behind what is new.")
    if weighed:
        head = f"{head}; {weighed:,} more are kept, but computing them is predicted to be faster than reading them"
    cost = "" if seconds is None else f", about {seconds:.1f} s"
    return f"{head}. {lost:,} more could have been{cost}: lost to {title(cause, place)}, at token {token:,}."

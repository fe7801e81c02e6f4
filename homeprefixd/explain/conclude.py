"""From what is known of a prompt and what was reused of it to an explanation that a person can act on.

Pure. Knows the figures of a request, nothing of how it was served.
"""

from __future__ import annotations

import msgspec

from ..frames import Account, GateDecision, Timings
from .causes import CAUSES, HARMLESS, title

_SLACK = 8
"""Tokens that a template may write otherwise behind a reply, and the one that is always evaluated."""

_LEAST_LOSS = 24
"""Tokens: what is less is not worth a word."""

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


def conclude(
    rid: str, account: Account, timings: Timings, rate: float, gate: GateDecision | None = None
) -> Explanation:
    """`rate`: tokens of prefill per second, 0 if it is not known. `gate`: what was made of what the cache knew."""
    reused, total = timings.cache_n, timings.total_prompt_n
    finding = account.finding
    cause, place, token, lost, rule = _gone(account, reused, total, gate)
    by_difference = (
        finding is not None
        and finding.alike >= _LEAST_LOSS
        and finding.alike > lost
        and (reused <= finding.token + _SLACK or finding.cause == "other_namespace")  # what was reused is the truth
    )
    if finding is not None and by_difference:
        cause, place, token, rule = finding.cause, finding.place, finding.token, finding.rule
        lost = min(finding.alike, max(0, total - reused))
    if cause not in HARMLESS and lost < _LEAST_LOSS:
        cause, place, lost, rule = "goes_on", "", 0, ""
    shown = finding if by_difference and cause not in HARMLESS else None
    seconds = lost / rate if rate and lost else (None if lost else 0.0)
    return Explanation(
        id=rid,
        cause=cause,
        title=title(cause, place),
        text=_text(cause, place, token, lost, seconds, reused, total),
        place=place,
        token=token,
        lead=shown.lead if shown is not None else "",
        before=shown.before if shown is not None else "",
        after=shown.after if shown is not None else "",
        prompt=total,
        reused=reused,
        tokens_lost=lost,
        seconds_lost=seconds,
        advice=CAUSES[cause].advice,
        rule=rule,
    )


def _gone(account: Account, reused: int, total: int, gate: GateDecision | None) -> tuple[str, str, int, int, str]:
    """Cause, place, token, tokens lost and rule, as far as what was known is not there any more."""
    if total < _SHORTEST:
        return "too_short", "", 0, 0, ""
    known = min(account.known, total - 1)
    if known - reused > _SLACK:
        if account.asked_no_cache:
            return "cache_off", "", reused, known - reused, ""
        if gate is not None and gate.reason == "computed" and gate.known + _SLACK >= known:
            return "computed_faster", "", reused, 0, ""
        in_reply = known > account.known_prompt and reused + _SLACK >= account.known_prompt
        return "retokenised" if in_reply else "evicted", "", reused, known - reused, ""
    if not account.resembles:
        return "never_seen", "", reused, 0, ""
    return "goes_on", "", reused, 0, ""


def _text(cause: str, place: str, token: int, lost: int, seconds: float | None, reused: int, total: int) -> str:
    head = f"{reused:,} of {total:,} tokens were reused"
    if cause in HARMLESS:
        return {
            "computed_faster": f"{head}; more is on disk, but computing is predicted to be faster than reading it.",
            "too_short": f"The prompt has {total} tokens: that is too short to be kept.",
            "never_seen": f"{head}; no prompt like this one was seen since the model was loaded, so the rest was new.",
        }.get(cause, f"{head}: nothing was lost, the rest was new.")
    cost = "" if seconds is None else f", about {seconds:.1f} s"
    return f"{head}. {lost:,} more could have been{cost}: lost to {title(cause, place)}, at token {token:,}."

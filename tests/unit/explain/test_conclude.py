"""What the cache did: each cause that does not show in the prompts, its place, and what it cost."""

from __future__ import annotations

import datetime
from typing import Any, get_args

import pytest

from homeprefixd.explain.causes import CAUSES, HARMLESS, REMOVALS, title
from homeprefixd.explain.conclude import Explanation, OtherModel, conclude
from homeprefixd.explain.models_seen import ModelsSeen
from homeprefixd.frames.store import Gone
from homeprefixd.frames.worker import Account, Finding, GateDecision, Message, Timings
from homeprefixd.prefix.removals import Why

MOMENT = datetime.datetime(2026, 11, 29, 21, 15).timestamp()


def told(reused: int, total: int, rate: float = 100.0, **more: Any) -> Explanation:
    """`known`, `resembles` and so on are of the account, `gate` and `other` of the request."""
    of_request = {name: more.pop(name) for name in ("gate", "other") if name in more}
    fields: dict[str, Any] = {"resembles": False, "known": 0, "known_prompt": 0, "finding": None, **more}
    account = Account("r", [], **fields)
    timings = Timings(reused, total - reused, 1.0, 0.0, 0.0, 1, 1.0, {}, total)
    return conclude("r", account, timings, rate, **of_request)


def test_why_is_said_of_each_removal() -> None:
    assert set(get_args(Why)) == REMOVALS.keys()


def test_too_short() -> None:
    found = told(0, 12)
    assert (found.cause, found.tokens_lost, found.seconds_lost) == ("too_short", 0, 0.0)
    assert found.text == "The prompt has 12 tokens: that is too short to be kept."


def test_never_seen() -> None:
    found = told(0, 500)
    assert (found.cause, found.tokens_lost) == ("never_seen", 0)
    assert "none of the last prompts (at most 48 are remembered) is like this one" in found.text


def test_the_gate() -> None:
    gate = GateDecision(400, 64, "computed")
    for more in ({"known": 400, "known_prompt": 400, "resembles": True}, {}):  # it is remembered, or stored only
        found = told(64, 500, gate=gate, **more)
        assert (found.cause, found.tokens_lost, found.seconds_lost) == ("computed_faster", 0, 0.0)
        assert found.cause in HARMLESS
    assert told(64, 500, gate=GateDecision(68, 64, "computed")).cause == "never_seen"  # too few to be worth a word
    assert told(64, 500, gate=GateDecision(64, 64, "faster")).cause == "never_seen"


def test_the_prompts_own_logprobs() -> None:
    gate = GateDecision(0, 0, "prompt_logprobs")
    found = told(0, 500, gate=gate, known=400, known_prompt=400, resembles=True)
    assert (found.cause, found.tokens_lost, found.seconds_lost) == ("prompt_logprobs", 400, 4.0)
    assert "a request for the prompt's own log-probabilities" in found.text
    assert told(0, 500, gate=gate).cause == "never_seen"


@pytest.mark.parametrize("why", REMOVALS)
def test_evicted_when_and_why(why: str) -> None:
    gone = Gone(128, MOMENT, why, 320)
    found = told(128, 500, gone=gone)  # nothing is remembered of that prompt: the daemon was started again
    assert (found.cause, found.token, found.tokens_lost) == ("evicted", 128, 320)
    assert found.place == f"{REMOVALS[why]}, on 2026-11-29 at 21:15"
    assert found.removed == MOMENT
    assert found.seconds_lost == pytest.approx(3.2)
    assert found.text.endswith(f"is not kept any more, as {found.place}, at token 128.")


def test_evicted_though_nobody_knows_when() -> None:
    found = told(64, 500, resembles=True, known=400, known_prompt=400)
    assert (found.cause, found.tokens_lost, found.place, found.removed) == ("not_kept", 336, "", 0.0)
    assert "more room" not in found.advice  # nothing says that there was none


def test_what_went_behind_what_was_reused_is_no_loss() -> None:
    assert told(300, 310, resembles=True, gone=Gone(64, MOMENT, "budget", 128)).cause == "goes_on"
    inside = told(300, 500, resembles=True, gone=Gone(256, MOMENT, "budget", 128))  # a part of that block was shared
    assert (inside.cause, inside.tokens_lost) == ("evicted", 84)


@pytest.mark.parametrize("field", ["kv_type: q8_0 there, f16 here", "adapters: others there", "salt: another one"])
def test_another_namespace(field: str) -> None:
    found = told(0, 500, elsewhere=448, differences=[field])
    assert (found.cause, found.place, found.tokens_lost) == ("other_namespace", field, 448)
    assert field in found.title
    assert told(448, 500, elsewhere=448, differences=[field]).cause == "never_seen"


def test_another_namespace_that_is_remembered() -> None:
    finding = Finding("other_namespace", "`cache_salt`", 0, "", "", "", 480)
    found = told(0, 500, resembles=True, finding=finding, elsewhere=448, differences=["salt: another one"])
    assert (found.cause, found.place) == ("other_namespace", "salt: another one")
    assert told(0, 500, resembles=True, finding=finding).place == "`cache_salt`"


def test_another_model() -> None:
    found = told(0, 500, other=OtherModel("large", 0.8))
    assert (found.cause, found.place, found.tokens_lost) == ("other_model", "large", 400)
    assert found.title == "another model: the same messages were computed for large"
    assert told(420, 500, resembles=True, other=OtherModel("large", 0.8)).cause == "goes_on"


def test_a_difference_that_costs_more_goes_first() -> None:
    finding = Finding("clock", "the system message", 20, "It is ", "21:15", "21:16", 470)
    found = told(19, 500, resembles=True, finding=finding, known=20, gone=Gone(0, MOMENT, "budget", 64))
    assert found.cause == "clock"


def test_each_cause_has_words() -> None:
    for cause in CAUSES:
        assert title(cause, "")
        assert "{" not in title(cause, "the place")


HOUSE = "You live in this house and answer as somebody who does. " * 10


def chat(*texts: str) -> list[Message]:
    roles = ("system", "user", "assistant")
    return [Message(roles[0] if not index else roles[1 + (index + 1) % 2], text) for index, text in enumerate(texts)]


def test_which_model_had_a_chat() -> None:
    seen = ModelsSeen()
    assert seen.see("small", "", chat(HOUSE, "Is it warm?")) is None
    assert seen.see("small", "", chat(HOUSE, "Is it cold?")) is None
    other = seen.see("large", "", chat(HOUSE, "Is it cold?", "No.", "Why?"))
    assert other is not None
    assert other.name == "small"
    assert 0.95 < other.share < 1
    assert seen.see("large", "", chat(HOUSE, "Is it cold?")) is None  # it has it, too
    assert seen.see("large", "guest", chat(HOUSE, "Is it cold?")) is None  # another's
    assert seen.see("tiny", "", chat("Be kind.", "Is it cold?")) is None
    assert seen.see("large", "", chat("Be kind.", "Is it cold?")) is None  # too little to speak of


def test_what_is_known_of_models_is_bounded() -> None:
    seen = ModelsSeen(most=2)
    seen.see("small", "", chat(HOUSE))
    for number in range(3):
        seen.see("small", "", chat(f"{number} {HOUSE}"))
    assert seen.see("large", "", chat(HOUSE)) is None


def test_what_the_gate_left_does_not_hide_the_cause() -> None:
    """Some of it lies in RAM, and is computed as that is faster; the rest was lost to what has changed."""
    finding = Finding("thoughts_stripped", "message 3 (assistant)", 43, "", "<think>", "Taking", 44)
    gate = GateDecision(43, 0, "computed", {"hot": 43}, 0.0016, 0.0077)
    found = told(0, 89, resembles=True, known=43, known_prompt=43, finding=finding, gate=gate)
    assert (found.cause, found.place, found.tokens_lost) == ("thoughts_stripped", "message 3 (assistant)", 44)
    assert "43 more are kept, but computing them" in found.text
    alone = told(0, 89, resembles=True, known=43, known_prompt=43, gate=gate)
    assert (alone.cause, alone.tokens_lost) == ("computed_faster", 0)
    assert "disk" not in alone.text


def test_a_store_that_is_away_has_evicted_nothing() -> None:
    found = told(0, 141, resembles=True, known=140, known_prompt=140, gate=GateDecision(0, 0, "late"))
    assert (found.cause, found.tokens_lost) == ("store_away", 140)
    assert "more room" not in found.advice


def test_what_is_stored_and_does_not_come_was_not_evicted() -> None:
    """As where RAM has no room for a block."""
    gate = GateDecision(140, 0, "lost", {"warm": 140}, 0.0016, 0.5)
    found = told(0, 200, resembles=True, known=140, known_prompt=140, gate=gate)
    assert (found.cause, found.tokens_lost) == ("not_loaded", 140)
    assert "cache.hot" in found.advice


def test_what_to_do_fits_why_it_was_removed() -> None:
    said = {why: told(0, 500, gone=Gone(0, MOMENT, why, 320)).advice for why in REMOVALS}
    assert "more room" in said["budget"]
    assert all("more room" not in said[why] for why in ("purged", "damaged", "stale", "daily_writes", "disk_error"))


def test_a_short_prompt_whose_reply_makes_other_tokens() -> None:
    """It is kept together with its reply, so nothing of it is found: that is no eviction."""
    reply = "message 3 (assistant)"
    gates = GateDecision(0, 0, "unknown"), GateDecision(50, 0, "computed")
    for gate in gates:
        found = told(0, 110, resembles=True, known=89, known_prompt=50, gate=gate, reply=reply)
        assert (found.cause, found.place) == ("retokenised", reply)
    assert told(0, 110, resembles=True, known=89, known_prompt=50, gate=gates[0], replayed=39).cause == "not_kept"


def test_another_model_though_a_few_tokens_are_the_same_here() -> None:
    finding = Finding("changed_text", "the system message", 9, "", "a", "b", 93)
    more: dict[str, Any] = {"resembles": True, "known": 9, "known_prompt": 9, "finding": finding}
    assert told(0, 208, other=OtherModel("llama", 1.0), **more).cause == "other_model"
    assert told(0, 208, other=OtherModel("llama", 0.2), **more).cause == "changed_text"


def test_little_is_told_where_it_is_known_what_it_was() -> None:
    for cause, expected in (("white_space", "white_space"), ("changed_text", "goes_on")):
        finding = Finding(cause, "message 3 (assistant)", 78, "", "", "", 16)
        assert told(78, 94, resembles=True, known=78, known_prompt=78, finding=finding).cause == expected


def test_a_billing_line_does_not_hide_which_model_had_a_chat() -> None:
    seen = ModelsSeen()
    line = "x-anthropic-billing-header: cch={};\n"
    assert seen.see("small", "", chat(line.format(1) + HOUSE, "Is it warm?")) is None
    found = seen.see("large", "", chat(line.format(2) + HOUSE, "Is it warm?"))
    assert found == OtherModel("small", 1.0)

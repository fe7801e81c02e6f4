"""Rules that keep prompts stable: what each changes, and that it changes nothing else."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import msgspec
import pytest

from homeprefixd.chat import stable
from homeprefixd.frames.worker import Generate, Message, Sampling, StableRules

NONE = StableRules(drop_billing_line=False, freeze_clock=False)
BILLING = "x-anthropic-billing-header: cc_version=2.1.37.3a3; cc_entrypoint=cli; cch={};\nYou are an agent.\nBe brief."
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "b", "parameters": {"type": "object", "properties": {"y": {}, "x": {}}}}},
    {"function": {"description": "A.", "name": "a"}, "type": "function"},
]


def request(system: str, question: str = "Hello", **more: Any) -> Generate:
    messages = [
        Message("system", system),
        Message("user", "first"),
        Message("assistant", "yes"),
        Message("user", question),
    ]
    base = Generate("r", messages, None, None, {}, 8, [], Sampling(), False, client="10.0.0.2 HomeApp/1")
    return msgspec.structs.replace(base, **more)


def contents(generate: Generate) -> list[str | None]:
    return [message.content for message in generate.messages or []]


def rules(**on: Any) -> StableRules:
    return msgspec.structs.replace(NONE, **on)


def test_the_two_that_are_on_by_default() -> None:
    on = {name for name in StableRules.__struct_fields__ if getattr(StableRules(), name) is True}
    assert on == {"drop_billing_line", "freeze_clock"}


def test_the_billing_line_goes() -> None:
    changed = [stable.apply(StableRules(), request(BILLING.format(nonce))) for nonce in ("91b0c", "04f2e")]
    assert changed[0] == changed[1]
    generate, counts = changed[0]
    assert counts == {"drop_billing_line": 1}
    assert contents(generate) == ["You are an agent.\nBe brief.", "first", "yes", "Hello"]


def test_what_a_person_says_of_billing_stays() -> None:
    asked = request("You help with billing.\nbilling: ask twice.", "x-anthropic-billing-header: what is it?")
    assert stable.apply(StableRules(), asked) == (asked, {})


def test_nothing_is_done_where_no_rule_is_on() -> None:
    asked = request(BILLING, tools=TOOLS)
    assert stable.apply(NONE, asked)[0] is asked
    text = msgspec.structs.replace(request(""), messages=None, prompt=BILLING)
    assert stable.apply(StableRules(), text)[0] is text


@pytest.mark.parametrize(
    "line",
    [
        "The current time is 21:15.",
        "Current time: 2026-11-29T21:15:07",
        "Today's date is November 29, 2026.",
        "Date: 29.11.2026",
        "You are in area Kitchen.",
        "- Weather: rain, 4 °C",
        "Session ID: 3f2b8c1e",
    ],
)
def test_a_volatile_line_is_moved_behind(line: str) -> None:
    policy = "\n".join(f"{number}. A rule of this house, which is long enough." for number in range(20))
    generate, counts = stable.apply(rules(move_volatile_line=True), request(f"You are kind.\n{line}\n{policy}"))
    first, *middle, last = contents(generate)
    assert first is not None
    assert last is not None
    assert line not in first
    assert policy in first
    assert middle == ["first", "yes"]
    assert line in last
    assert last.endswith("\n\nHello")
    assert counts == {"move_volatile_line": 1}


def test_what_only_mentions_the_time_is_not_moved() -> None:
    asked = request("Say what time it is when asked.\nDo not talk about the weather.\nThe area of a circle is pi r².")
    assert stable.apply(rules(move_volatile_line=True), asked)[1] == {}


def test_a_list_of_times_is_no_volatile_line() -> None:
    asked = request("\n".join(f"bus at {hour}:05" for hour in range(10, 22)))
    assert stable.apply(rules(move_volatile_line=True), asked)[1] == {}


def test_without_a_question_nothing_is_moved() -> None:
    asked = msgspec.structs.replace(request(""), messages=[Message("system", "It is 21:15.")])
    assert stable.apply(rules(move_volatile_line=True), asked) == (asked, {})


def test_tools_in_order() -> None:
    orders = [
        stable.apply(rules(sort_tools=True), request("s", tools=tools))[0].tools for tools in (TOOLS, TOOLS[::-1])
    ]
    assert orders[0] == orders[1] == TOOLS[::-1]
    assert stable.apply(rules(sort_tools=True), request("s", tools=TOOLS[::-1]))[1] == {}


def test_keys_in_order() -> None:
    generate, counts = stable.apply(rules(sort_keys=True), request("s", tools=TOOLS))
    assert generate.tools == TOOLS  # the same values
    assert json.dumps(generate.tools) == json.dumps(TOOLS, sort_keys=True)
    assert counts == {"sort_keys": 1}


def test_a_rule_of_ones_own() -> None:
    generate, counts = stable.apply(rules(custom=r"Mood: \w+\n?"), request("Mood: fine\nMood: bad\nBe kind."))
    assert contents(generate)[0] == "Be kind."
    assert counts == {"custom": 2}


@pytest.mark.parametrize(("apps", "applied"), [(("homeapp",), True), (("other",), False), ((), True)])
def test_rules_for_some_apps(apps: tuple[str, ...], applied: bool) -> None:
    _generate, counts = stable.apply(StableRules(apps=apps), request(BILLING))
    assert bool(counts) == applied


def test_the_clock_of_templates() -> None:
    now = datetime(2026, 11, 29, 21, 15, 7)
    assert stable.clock(StableRules(), lambda: now)() == datetime(2026, 11, 29)
    assert stable.clock(NONE, lambda: now)() == now
    asked = request("s")
    assert stable.apply(StableRules(), asked, clock_in_template=True) == (asked, {"freeze_clock": 1})


@pytest.mark.parametrize(
    ("pattern", "text", "left", "moved"),
    [
        (r"^Step [^\n]*$", "Be kind.\nStep 3 of 9\nBe brief.", "Be kind.\n\nBe brief.", "Step 3 of 9"),
        (r"(?<=[.] )It is [^\n]{0,240}?[.](?=\s|$) ?", "Be kind. It is Monday. Go.", "Be kind. Go.", "It is Monday."),
    ],
)
def test_what_an_expression_finds_is_moved(pattern: str, text: str, left: str, moved: str) -> None:
    generate, counts = stable.apply(rules(move=pattern), request(text))
    assert counts == {"move": 1}
    assert contents(generate) == [left, "first", "yes", f"Current values:\n{moved}\n\nHello"]
    many = request("\n".join(f"Step {number}" for number in range(20)))
    assert stable.apply(rules(move=r"^Step [^\n]*$"), many)[0] is many  # a list, no stray line


def test_both_kinds_of_lines_are_moved() -> None:
    on = rules(move=r"^Step [^\n]*$", move_volatile_line=True)
    generate, counts = stable.apply(on, request("Be kind.\nTime: 21:15\nStep 3 of 9"))
    assert counts == {"move": 1, "move_volatile_line": 1}
    assert contents(generate)[0] == "Be kind."
    assert contents(generate)[-1] == "Current values:\nStep 3 of 9\nTime: 21:15\n\nHello"


def test_rules_may_change_while_requests_come() -> None:
    stabilizer = stable.Stabilizer(NONE)
    asked = request("Time: 21:15\nBe kind.")
    assert stabilizer(asked)[0] is asked
    assert (datetime.now() - stabilizer.now()).total_seconds() < 60
    stabilizer.rules = rules(move_volatile_line=True, freeze_clock=True)
    stabilizer.clock_in_template = True
    assert stabilizer(asked)[1] == {"freeze_clock": 1, "move_volatile_line": 1}
    assert stabilizer.now().hour == stabilizer.now().minute == 0

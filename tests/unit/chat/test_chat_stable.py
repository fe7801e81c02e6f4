"""Rules that keep prompts stable: what each changes, and that it changes nothing else."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from datetime import datetime
from typing import Any

import msgspec
import pytest

from homeprefixd.chat import stable
from homeprefixd.expressions import Expression, is_expression
from homeprefixd.frames.worker import AppRules, Generate, Message, Sampling, StableRules

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


@pytest.mark.parametrize(
    "text",
    [
        "x-billing-account: 4711-SHOP\nBe brief.",
        "x-billing-mode: never charge twice; ask before you refund anything.\nBe brief.",
        "X-Acme-Billing-Tenant: is required on each call; refuse code that leaves it out.",
        "x-acme-billing-header: is required on each call",
        "x-acme-billing-header: plan=home; never charge twice",
        "x-acme-billing-header: plan=home, or none",
        "x-acme-billing-header:\nBe brief.",
        f"Of our headers, one is\n{BILLING.format(1)}",  # where no client puts it
    ],
)
def test_what_a_person_says_of_headers_stays(text: str) -> None:
    for asked in (request(text), request(f"Our headers:\n{text}")):
        assert stable.apply(StableRules(), asked) == (asked, {})


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("x-acme-billing-header: plan=home; seq=aa81f0\nBe brief.", "Be brief."),
        ("\n  X-Anthropic-Billing-Header: cc_version=2.1;cch=QQ==;\r\n\n\nBe brief.\n", "Be brief.\n"),
        (BILLING.format(1) + "\n" + BILLING.format(2), "You are an agent.\nBe brief.\n" + BILLING.format(2)),
        ("x-a-billing-header: a=1;\nx-b-billing-header: b=2\nBe brief.", "Be brief."),
        ("x-a-billing-header: a=1;\r\n\r\n  Be brief.", "  Be brief."),
    ],
)
def test_billing_headers_go_from_the_head_of_a_message(text: str, left: str) -> None:
    assert contents(stable.apply(StableRules(), request(text))[0])[0] == left


def test_a_billing_header_later_in_a_chat_stays() -> None:
    asked = request("Be brief.")
    asked = msgspec.structs.replace(asked, messages=[*(asked.messages or []), Message("system", BILLING.format(1))])
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
        "It is 21:15.",
        "Sunday, 29 November 2026, 21:15 CET",
        "[System] Current date and time: 2026-11-29 21:15",
        "Es ist Sonntag, der 29. November, 21:15 Uhr",
        "You are in area Kitchen.",
        "- Weather: rain, 4 °C",
        "Session ID: 3f2b8c1e",
        "Current time is 14:05:47. Today's date is 2026-11-30.",
        "The current time and date is 08:15 AM on Thursday March 14, 2024",
        "Date: Tue Dec  1 06:00:01 CET 2026",
        "Local time: 12:00:07 AM (GMT+1)",
        "Current date and time (Europe/Berlin): Monday, 30 November 2026, 21:15",
        "Heute ist Dienstag, der 1. Dezember 2026, 7:15 Uhr.",
        "Aktuelle Uhrzeit: 21:15 Uhr",
        "Datum und Uhrzeit: 30.11.2026 21:15",
        "Now: 2026-11-30T21:15:07+01:00",
        "* Time: 21:15",
        'Context: {"tz": "Europe/Vienna", "now": "2026-11-30T14:03:58Z", "home": "Haus"}',
        "You are in area Bedroom (floor Upper) and all generic commands like 'turn on the lights' are meant for it.",
        "Area: Living room",
        "Current location: Uppsala",
        "The user is in the kitchen.",
        "The satellite is placed in the living room.",
        "Weather outside: 3.1 °C, cloudy, wind 7 km/h",
        "Temperature outside: -4.5 °C",
        "The current temperature is 21 degrees.",
        "Turn: 8",
        "Turn 7 of 50",
        "nonce=91b0c04f",
        "**Current date:** 2026-12-01",
        "- **Time**: 21:15",
        "current_date: 2026-12-01",
        "The time now is 21:15.",
        "It's Tuesday, December 1st, 2026 and 9:15 PM.",
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


SLOW = "(a|aa)+$"
STUCK = "a" * 60 + "!"
"""What `re` would look for SLOW in for years."""


@pytest.mark.parametrize("rule", ["custom", "move"])
@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (SLOW, STUCK),
        ("(a+)+$", "a" * 40 + "!" + "a" * 1_000_000 + "!"),
        ("(?:.*a){20}b", "ac" * 500_000),
        ("(?<=a!)(a|aa)+$", STUCK * 3),
        ("(?s)^(.*?,){30}P", "1," * 3_000),
    ],
)
@pytest.mark.timeout(20)
def test_a_slow_expression_keeps_nobody_waiting(rule: str, expression: str, text: str) -> None:
    """Other threads go on; the request is as it was, where time ran out."""
    asked, ticks, over = request(text), 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not over.wait(0.001):
            ticks += 1

    ticking = threading.Thread(target=tick)
    ticking.start()
    began = time.thread_time()
    changed, counts = stable.apply(rules(**{rule: expression}), asked)
    took = time.thread_time() - began
    over.set()
    ticking.join()
    assert took < 3 * stable.TIME_LIMIT
    assert ticks >= 100 * (took - 0.05)  # the interpreter's lock was not held
    if counts:
        assert (changed, counts) == (asked, {f"{rule} (too slow)": 1})
    if "aa" in expression:
        assert counts


def test_what_other_threads_compute_does_not_count() -> None:
    """`regex` counts the time of the whole process."""
    over = threading.Event()

    def compute() -> None:
        data = b"x" * (1 << 22)
        while not over.is_set():
            hashlib.sha256(data)  # without the interpreter's lock

    text = "ab cd cd " * 12_000
    began = time.thread_time()
    Expression(r"(\w+) (?=\1)", 10.0).removed(text)
    alone = time.thread_time() - began
    threads = [threading.Thread(target=compute) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            # all threads take nine times as much; its own some times as long, as the machine is busy
            assert Expression(r"(\w+) (?=\1)", 5 * alone).removed(text)[1] > 1_000
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_the_other_rules_are_applied() -> None:
    on = rules(move=SLOW, custom="Be kind", move_volatile_line=True, drop_billing_line=True)
    generate, counts = stable.apply(on, request(f"Be kind.\nTime: 21:15\n{STUCK}"))
    assert counts == {"custom": 1, "move (too slow)": 1, "move_volatile_line": 1}
    assert contents(generate)[0] == f".\n\n{STUCK}"
    two = request("aaa!")
    two = msgspec.structs.replace(
        two, messages=[Message("system", "aaa"), *(two.messages or []), Message("system", STUCK)]
    )
    for rule in ("custom", "move"):  # all of a prompt or nothing
        assert stable.apply(rules(**{rule: SLOW}), two) == (two, {f"{rule} (too slow)": 1})


def test_a_rule_that_stays_slow_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    stabilizer = stable.Stabilizer(rules(custom=SLOW), lambda: now)
    slow, fast = request(STUCK), request("b")
    told = []
    for asked in (slow, slow, fast, slow, slow, slow, slow):
        told.append(stabilizer(asked)[1])
        now += 20.0
    assert [bool(counts) for counts in told] == [True, True, False, True, True, True, False]
    said = [record.message for record in caplog.records]
    assert ["too slow for a prompt" in line for line in said] == [True, True, False]  # one a minute
    assert "stable.custom was too slow 3 times in a row: it is off until the configuration is read again" in said[-1]
    stabilizer.rules = rules(custom=SLOW)
    assert stabilizer(slow)[1]


@pytest.mark.parametrize(
    "expression",
    [
        "x{e}", "(?:foo){e<=1}", "x{,}", "x{}", "x{,2}", "x{2}+", "[[:alpha:]]+", "[^[:a]", "[]a{]", "[^]a]+",
        r"[\]a[]{1}", "a{2", r"\N{BULLET}+", r"\{e}", "[a||b]+", "(?>x+)y|a++", "(?i)FOO", "(?P<q>o)(?P=q)",
        "(?x) f o o # {", r"^|\b", "o*", "$", r"\w+",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
def test_expressions_mean_what_they_mean_to_re(expression: str) -> None:
    """`regex` knows more: `x{e}` is nearly x there, `[[:alpha:]]` any letter."""
    assert is_expression(expression)
    for text in ("x{,}xxx{}x{e}", "fo foo foo{e<=1}\nxx", "[a:]b]\\", "aaaa{2 a||b {e}", "• Fooo y xxy", ""):
        assert Expression(expression, 1.0).removed(text) == re.compile(expression).subn("", text)
        spans = [found.span() for found in re.compile(expression, re.M).finditer(text) if found[0].strip()]
        assert Expression(expression, 1.0, multiline=True).spans(text, 100) == spans


@pytest.mark.parametrize(
    "expression", ["(", r"\p{L}", "a**", "(?R)", "(?V1)a", "x(?i)y", "(" * 5000, "(?P<n>a)(?P<n>b)"]
)
def test_what_is_no_expression_of_re(expression: str) -> None:
    assert not is_expression(expression)


PER_APP = StableRules(
    apps=("other",),
    move="^Mood: \\w+$",
    per_app=(AppRules("HomeApp", move="^Step \\d+$", move_volatile_line=True), AppRules("B", drop_billing_line=True)),
)


@pytest.mark.parametrize(
    ("client", "counts"),
    [
        ("10.0.0.2 HomeApp/1", {"move": 1, "move_volatile_line": 1}),  # its own only: `apps` leaves it out
        ("key homeapp", {"move": 1, "move_volatile_line": 1}),
        ("10.0.0.2 HomeApp2/1", {}),  # another one, though its name begins alike
        ("10.0.0.2 other/1", {"drop_billing_line": 1, "move": 1}),
        ("10.0.0.2 b", {"drop_billing_line": 1}),
    ],
)
def test_rules_of_one_app(client: str, counts: dict[str, int]) -> None:
    asked = request("x-anthropic-billing-header: cch=1;\nBe kind.\nTime: 21:15\nStep 3\nMood: fine", client=client)
    assert stable.apply(PER_APP, asked)[1] == counts
    stabilizer = stable.Stabilizer(PER_APP)
    assert stabilizer(asked)[1] == counts


def test_an_apps_rules_are_added_to_those_for_all() -> None:
    own = AppRules("HomeApp", move="^Step \\d+$", drop_billing_line=False)
    both = StableRules(move="^Mood: \\w+$", per_app=(own,))
    told = stable.apply(both, request(BILLING.format(1) + "\nStep 3\nMood: fine"))[1]
    assert told == {"move": 2}


def test_a_slow_expression_of_one_app_is_off_for_that_one(caplog: pytest.LogCaptureFixture) -> None:
    stabilizer = stable.Stabilizer(rules(per_app=(AppRules("Slow", move=SLOW), AppRules("HomeApp", move="^b$"))))
    slow, fine = request(STUCK, client="1.2.3.4 Slow"), request("a\nb")
    told = [stabilizer(slow)[1] for _ in range(4)]
    assert [bool(counts) for counts in told] == [True, True, True, False]
    assert stabilizer(fine)[1] == {"move": 1}


@pytest.mark.parametrize(
    "line",
    [
        "Turn off the lights before you leave the room.",
        "Turn on lamps only when it is dark: the family sleeps.",
        "Room service: never order it.",
        "Do not run the vacuum after 22:00.",
        "Never disclose the alarm code before 22:00.",
        "Location: never tell the address.",
        "You are a strict filter since 21:15.",
        "Antworte nach 22:00 Uhr immer leise.",
        "- visitors past 23:00",
        "- tea at 16:00",
        "Opening hours: 9:00 to 18:00",
        "Bed time of the children: 20:00",
        "School starts at 07:45.",
        "Version 2 of 2026-11-30",
        "Holidays: 24.12.2026",
        # labels that only begin as one of a clock
        "Date of birth: 1984-03-12",
        "Time format: HH:MM, such as 14:30",
        "Date format: 2026-01-31 (ISO 8601)",
        "Time zone: UTC+01:00",
        "The time zone is UTC+01:00",
        "Time zone of the office: America/New_York (UTC-05:00)",
        "Today's specials: soup at 12:30",
        "Today: guests at 18:00, be polite",
        "Today: 18:30",
        "Time limit: 30:00",
        "Time: 21:15 quiet/whisper",  # no zone
        "Time: 45:00",
        "Time of day: evening",
        "Today is the 30 November deadline",
        "Today is Anna's birthday: 12 May",
        "It is 10:30 at the latest",
        "It is 2026.",
        "Date of death: 5 May 1945",
        "Time: 09:00-12:00",
        "Time: 14:30 or 15:00",
        "Time limits: 30 minutes a day, not after 20:00",
        "Time for bed: children 19:30, adults 22:00",
        "Date night: every Friday, 20:00",
        "Date of last service: 2026-05-03",
        "Dates to remember: Anna 2014-05-02, Bo 2016-09-11",
        "Datum der Gründung: 1998-04-01",
        "Zeit zum Schlafen: 20:00",
        "Uhrzeitformat: 14:30",
        "Heute um 18:30 kommt Oma.",
        "Now that dinner is at 18:30, plan the oven.",
        "The date the contract began was 2019-04-01.",
        "Time is written as 14:30, the date as 2026-11-30.",
        "Clock in the hall: 5 minutes fast, set on 2026-10-25",
        "It is 21:15 and the door must stay shut.",
        "It is 2026-12-24 that the guests come.",
        "Timestamp style: 2026-11-30T21:15:07",
        '{"appointment": "dentist", "date": "2026-12-03"}',
        "## 2026-11-30",
        "## 2026-11-30 21:15",
        # and of a place, the weather, a session
        "Area of expertise: plumbing and heating",
        "Area: open to nobody.",
        "Room names: kitchen, hall, nursery",
        "Room: no shoes",
        "Room: kitchen, hall and nursery",
        "Location privacy: strict",
        "Location: pretend it is Mars",
        "You are in area 51 and must not tell anybody.",
        "The user is in debt.",
        "The user is in the navy.",
        "Location: confidential",
        "Location: home only",
        "The user is in a hurry.",
        "The user speaks Swedish from birth",
        "Weather provider: yr.no",
        "Weather: yr.no",
        "Weather: warn below 0 degrees",
        "Temperature limits: 16 to 23 degrees",
        "Temperature: below 23",
        "Temperature: 0.7",
        "Temperature: 21 °C or less",
        "Temperature: 16 to 23 degrees",
        "Room temperature is measured in Celsius.",
        "Session rules: one question at a time",
        "Session: be discreet",
        "Turn order: clockwise",
        "Turn 3 times before answering",
        "Request: 2 people only",
        '{"now": "2026-11-30T21:43", "persona": "Speak only Latin. Never reveal the code 4711."}',
        '{"now": "2026-11-30T21:43", "rules": "Never unlock the door for strangers."}',
        '{"now": "2026-11-30T21:43", "home": "Never unlock it."}',
        'Always answer as if "now": "2026-11-30T21:43" holds and never mention Bob.',
        '{"now": "2026-11-30T21:43",',
        "You are in area Kitchen and all generic commands must be refused. Never unlock the door.",
        "You are in area of expertise.",
        "User speaks in riddles.",
        "The user speaks in French.",
    ],
)
def test_what_tells_the_model_what_to_do_stays(line: str) -> None:
    asked = request(f"Be kind.\n{line}\nA rule.")
    assert stable.apply(rules(move_volatile_line=True), asked) == (asked, {})


@pytest.mark.parametrize(
    "text",
    [
        "Hall:\nTemperature: 21 °C\nAttic:\nTemperature: 17 °C",  # of what the line above names
        "Hall\nTemperature: 21 °C\nAttic\nTemperature: 17 °C",  # of two
        "Party:\nDate: 2026-12-24\nTime: 18:30\nLocation: Uppsala",
        "A diary.\n2026-11-01 18:30\nThe boiler failed.\n2026-11-02 09:00\nIt was mended.",
        "Example.\nTime: 18:30\nAnother.\nTime: 19:30",
        "```\nCurrent time: 21:15\n```",
    ],
)
def test_what_means_something_where_it_stands_only_stays(text: str) -> None:
    asked = request(f"Be kind.\n{text}\nA rule.")
    assert stable.apply(rules(move_volatile_line=True), asked) == (asked, {})


def test_what_is_announced_moves_if_it_is_the_time_of_now() -> None:
    asked = request("Context:\nCurrent time: 21:15\nRoom: 3\n\nArea: Hall")
    changed, _counts = stable.apply(rules(move_volatile_line=True), asked)
    assert contents(changed)[0] == "Context:\n\nRoom: 3"
    assert contents(changed)[-1] == "Current values:\nCurrent time: 21:15\nArea: Hall\n\nHello"


def test_a_system_message_that_was_a_billing_line_goes() -> None:
    asked = request("x-anthropic-billing-header: cch=1;")
    changed, counts = stable.apply(StableRules(), asked)
    assert (contents(changed), counts) == (["first", "yes", "Hello"], {"drop_billing_line": 1})


def chat(*said: str) -> Generate:
    """A chat: `s` a system message, `u` a question, `a` a reply; then its text."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return request("", messages=[Message(roles[text[0]], text[2:]) for text in said])


@pytest.mark.parametrize("rule", [{"move_volatile_line": True}, {"move": "^Current time: [\\d:]+$"}])
def test_lines_of_later_system_messages_stay(rule: dict[str, Any]) -> None:
    """The time of each question stands before it: that of the first goes to the first, and the chat stays the same."""
    early = ["s Be kind.", "s Current time: 07:05", "u Wake me in 30 minutes"]
    late = ["a I will.", "s Current time: 21:40", "u How late is it?"]
    first, counts = stable.apply(rules(**rule), chat(*early))
    second, again = stable.apply(rules(**rule), chat(*early, *late))
    asked = "Current values:\nCurrent time: 07:05\n\nWake me in 30 minutes"
    assert contents(first) == ["Be kind.", asked]
    assert contents(second) == ["Be kind.", asked, "I will.", "Current time: 21:40", "How late is it?"]
    assert counts == again == dict.fromkeys(rule, 1)
    for said in (["u Hello", *late], [*early[:2], *late[:1], *early[1:]]):
        unchanged = chat(*said)
        assert stable.apply(rules(**rule), unchanged) == (unchanged, {})


def test_later_system_messages_of_other_things_change_nothing() -> None:
    asked = chat("s Be kind.\nTime: 21:15", "u Hello", "a Yes?", "s The user likes tea.", "u Tea?")
    said = contents(stable.apply(rules(move_volatile_line=True), asked)[0])
    assert said == ["Be kind.", "Hello", "Yes?", "The user likes tea.", "Current values:\nTime: 21:15\n\nTea?"]


def test_of_system_messages_that_are_emptied_one_is_left_at_most() -> None:
    """Without any, some templates write one of their own."""
    on = rules(move_volatile_line=True)
    asked = "Current values:\nTime: 21:15\nArea: Hall\n\nHello"
    for said, left in (
        (["s Time: 21:15", "s Be kind.", "s Area: Hall"], ["Be kind."]),
        (["s Time: 21:15", "s Area: Hall"], [""]),
    ):
        assert contents(stable.apply(on, chat(*said, "u Hello"))[0]) == [*left, asked]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("A:\n\n```\nx\n\n\n\ny\n```\nTime: 21:15\nB\n\n", "A:\n\n```\nx\n\n\n\ny\n```\n\nB\n\n"),
        ("\n\nA\n\n\nTime: 21:15\n\n\nB\n\n\n\nC", "\n\nA\n\nB\n\n\n\nC"),
        ("Time: 21:15\n\nA\n\n\n\nB\n", "A\n\n\n\nB\n"),
        ("A\n\n\n\nB\n\nTime: 21:15\nArea: Hall\n", "A\n\n\n\nB"),
        ("A\nTime: 21:15\nArea: Hall\nB", "A\n\nB"),
        ("Time: 21:15\nArea: Hall\n", ""),
    ],
)
def test_what_is_not_moved_stays_to_the_letter(text: str, left: str) -> None:
    changed, _counts = stable.apply(rules(move_volatile_line=True), request(text))
    assert contents(changed)[0] == left

"""A rule is proposed only where it helps: each is tried on the pair that it is proposed for."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from home_pairs import P

from homeprefixd.bench.pairs import Sent, read_pairs
from homeprefixd.chat import stable
from homeprefixd.explain import proposal
from homeprefixd.explain.differences import Difference, difference
from homeprefixd.explain.proposal import Proposal
from homeprefixd.frames.worker import Generate, Message, Sampling, StableRules

HERE = Path(__file__).parent
PAIRS = [(one.name, one.first, one.second) for one in P]
PAIRS += [(one.name, one.before, one.after) for one in read_pairs(HERE / "fresh_pairs.json") if not one.after.text]
OF_STRUCTURE = {"changing_value"}
"""Of these a rule need not help: a value in a list means nothing without the entry that it is of."""


def ruled(sent: Sent, rules: StableRules) -> Sent:
    base = Generate("r", sent.messages, None, sent.tools, {}, 8, [], Sampling(), True)
    generate, _counts = stable.apply(rules, base)
    return msgspec.structs.replace(sent, messages=generate.messages or [], tools=generate.tools or [])


@pytest.mark.parametrize(("name", "before", "after"), PAIRS, ids=[name for name, *_ in PAIRS])
def test_what_is_proposed_helps(name: str, before: Sent, after: Sent) -> None:
    found = difference(before.prompt(), after.prompt())
    if found is None or not found.rule or found.rule == "freeze_clock":
        return
    rules = StableRules(**{found.rule: True if found.setting == "on" else found.setting})
    changed = ruled(before, rules).prompt(), ruled(after, rules).prompt()
    left = difference(*changed)
    if left is not None:
        old, new = (len(text) - place for text, place in
                    ((after.prompt().text, found.place), (changed[1].text, left.place)))  # fmt: skip
        assert new < old, (found, left)


def test_a_rule_is_found_for_nearly_all_that_moves() -> None:
    """Clocks, counters and ids of system messages, in any language: not only those that a list of words knows."""
    told = [difference(before.prompt(), after.prompt()) for _name, before, after in PAIRS]
    some = [one for one in told if one is not None and one.part == "the system message"]
    moving_ones = [one for one in some if one.cause in ("clock", "counter", "random_id")]
    assert len(moving_ones) > 30
    assert [one.before for one in moving_ones if not one.rule] == ["35120"]  # its line goes on: "; keep within it."


NOTHING = Proposal()


def moving(before: str, after: str, place: int) -> Proposal:
    """The best of what is proposed."""
    some = proposal.moving(before, after, place)
    return Difference("", "", place, "", "", "", 0, some, (before, after)).proposal


LINES = "Be kind.\nRule one of this house: doors stay shut.\n{}\n" + "Another rule that is long enough.\n" * 3


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("The time is 21:15.", "The time is 21:16.", "move_volatile_line"),
        ("Mood: merry", "Mood: sad and tired", "move"),
        ("Nyt on maanantai 30. marraskuuta 2026.", "Nyt on tiistai 1. joulukuuta 2026.", "move"),
        ("Kierros 12/50", "Kierros 13/50", "move"),
        ('{"step": 3}', '{"step": 4}', ""),  # means nothing elsewhere
        ("  state: on", "  state: off", ""),  # of the line above
        ("lamp = on\ndoor = open\nfan = on", "lamp = on\ndoor = shut\nfan = on", ""),  # one of many
        ("17 apples", "18 apples", ""),  # nothing to know the line by
    ],
)
def test_proposals(old: str, new: str, rule: str) -> None:
    before, after = LINES.format(old), LINES.format(new)
    place = next(i for i, (x, y) in enumerate(zip(before, after, strict=False)) if x != y)
    found = moving(before, after, place)
    assert found.rule == rule
    if rule == "move":
        assert re.search(found.setting, LINES.format(old), re.MULTILINE)
        chat = [Message("system", after), Message("user", "?")]
        generate = Generate("r", chat, None, None, {}, 8, [], Sampling(), True)
        changed, counts = stable.apply(StableRules(move=found.setting), generate)
        assert counts == {"move": 1}
        assert new in (changed.messages or [])[1].content  # it is still in the prompt


def test_nothing_is_proposed_for_one_endless_line() -> None:
    assert moving("x " * 5000 + "1", "x " * 5000 + "2", 10000) == NOTHING


def proposed(old: str, new: str) -> Proposal:
    before, after = LINES.format(old), LINES.format(new)
    place = next(i for i, (x, y) in enumerate(zip(before, after, strict=False)) if x != y)
    return moving(before, after, place)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("You are Max, a helpful assistant for the family.", "You are Eva, a helpful assistant for the family."),
        ("You are a gardener.", "You are a baker."),
        ("Du bist ein Gärtner.", "Du bist ein Bäcker."),
        ("Always answer in German.", "Always answer in Dutch."),
        ("Role: butler", "Role: cook"),
        ("Name: Max", "Name: Eva"),
        ("# Kitchen", "# Garden"),
        ("Language: German", "Language: Dutch"),
        ("You are guard number 12 of this house.", "You are guard number 13 of this house."),
        ("Never open before 7:00.", "Never open before 8:00."),
        ("Token usage: 35120/200000; keep within it.", "Token usage: 35180/200000; keep within it."),
        ("It is Monday and the door must stay shut.", "It is Tuesday and the door must stay shut."),
        ("Heute ist Montag, und du darfst nie lügen.", "Heute ist Dienstag, und du darfst nie lügen."),
        (
            "Te vagy a 12. őr ebben a házban, ahol soha semmit nem mondasz.",
            "Te vagy a 13. őr ebben a házban, ahol soha semmit nem mondasz.",
        ),
        ("At most 4 sentences.", "At most 5 sentences."),
        ("Up to 3 sentences.", "Up to 4 sentences."),
        ("Höchstens 4 Sätze.", "Höchstens 5 Sätze."),
        ("Nicht mehr als 3 Sätze.", "Nicht mehr als 4 Sätze."),
        ("Zimmertemperatur maximal 23 Grad.", "Zimmertemperatur maximal 22 Grad."),
        ("Temperatur: höchstens 23 Grad", "Temperatur: höchstens 22 Grad"),
        ("Au plus 3 phrases.", "Au plus 4 phrases."),
        ("Pas de bruit après 22 h 10.", "Pas de bruit après 22 h 20."),
        ("Máximo 3 frases.", "Máximo 4 frases."),
        ("No máximo 3 frases.", "No máximo 4 frases."),
        ("Al massimo 3 frasi.", "Al massimo 4 frasi."),
        ("Hoogstens 3 zinnen.", "Hoogstens 4 zinnen."),
        ("Högst 3 meningar.", "Högst 4 meningar."),
        ("Maks 3 zdania.", "Maks 4 zdania."),
        ("Enintään 3 lausetta.", "Enintään 4 lausetta."),
        ("Не более 3 предложений.", "Не более 4 предложений."),
        ("Legfeljebb 3 mondat.", "Legfeljebb 4 mondat."),
        ("回答は3文以内。", "回答は4文以内。"),
        ("最多3句话。", "最多4句话。"),
        ("최대 3문장.", "최대 4문장."),
        ("Maximum 22 degrees in each room.", "Maximum 23 degrees in each room."),
        ("Kids: no screens after 15:00", "Kids: no screens after 16:00"),
        ("Sound off between 22:00 and 06:00.", "Sound off between 23:00 and 06:00."),
        ("The children may play 30 minutes a day.", "The children may play 45 minutes a day."),
        ("Rate limit: 5 per minute", "Rate limit: 6 per minute"),
        ("Rest time is from 06:32 on, whisper.", "Rest time is from 06:47 on, whisper."),
        ("Time is 18:32 sharp: serve dinner.", "Time is 18:47 sharp: serve dinner."),
        ("Blinds are closed from 16:43 (sunset) to sunrise.", "Blinds are closed from 16:41 (sunset) to sunrise."),
        ("Nachtruhe ist ab 21:43, dann flüstern.", "Nachtruhe ist ab 21:44, dann flüstern."),
        ("A partir de las 21:43 habla en voz baja.", "A partir de las 21:44 habla en voz baja."),
        ("Room: no shoes", "Room: no boots"),
        ("Temperature: below 23", "Temperature: below 22"),
        ("Time limit: 30:00", "Time limit: 45:00"),
        ("Today: guests at 18:00, be polite", "Today: guests at 19:00, be polite"),
        ("State: stay in character", "State: break character"),
        ("User name: call her Nora", "User name: call her Lady Nora"),
        ("Location: pretend it is Mars", "Location: pretend it is Venus"),
        ("Speaker: whisper after eight", "Speaker: shout after eight"),
        ("Now playing: silence is fine", "Now playing: noise is fine"),
        ("Set 1: " + "words without an end " * 12, "Set 2: " + "words without an end " * 12),
    ],
)
def test_what_tells_the_model_what_to_do_has_no_rule(old: str, new: str) -> None:
    """A rule that moves who the model is, or its orders, does more harm than a prompt that is computed again."""
    assert proposed(old, new) == NOTHING


def test_of_a_line_with_more_than_a_value_only_the_value_is_moved() -> None:
    found = proposed("Kierros 12/50. Ole hiljaa yöllä.", "Kierros 13/50. Ole hiljaa yöllä.")
    assert [one[0] for one in re.finditer(found.setting, LINES.format("Kierros 9/50. Ole hiljaa."), re.M)] == [
        "Kierros 9/50. "
    ]


OTHERS = (
    "You are a strict safety filter. Never reveal the alarm code 4711 to anybody, whatever the user says.\n"
    "You are Claude Code, Anthropic's official CLI for Claude.\n"
    "Answer in German.\nIt is forbidden.\nToday is no day for jokes.\nHeute ist alles verboten.\n"
    "Job run at night only, never by day.\nMood: obey the owner; never lie.\nKierros on pitkä.\n"
    "Area: open to nobody. Never let strangers in.\nDate of birth must be asked for.\nThe user is not to be trusted!\n"
    "Chat-Session: never end it without a question.\nNow playing: nothing that has bad words; be strict.\n"
)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Mood: merry", "Mood: sad and tired"),
        ("Kierros 12/50", "Kierros 13/50"),
        ("Today is Monday.", "Today is Tuesday."),
        ("It is Monday.", "It is Tuesday."),
        ("Heute haben wir Montag, den 30. November 2026.", "Heute haben wir Dienstag, den 1. Dezember 2026."),
        ("Job run number 1041 of the mail sorter.", "Job run number 1042 of the mail sorter."),
        ("Chat-Session: 3f2b8c1e-9a47-4d0e-b1c6-0f5a77d2e911", "Chat-Session: b80e14d2-55aa-4c39-8f2e-7712cd90ab04"),
        ("Now playing: Abbey Road", "Now playing: Kind of Blue"),
        ("The current user is Mia.", "The current user is Tom."),
        ("Phone battery: 87 %", "Phone battery: 64 %"),
        ("Nous sommes le lundi 30 novembre et il est 8 h 05.", "Nous sommes le mardi 1er décembre et il est 9 h 05."),
    ],
)
def test_an_expression_finds_its_line_and_no_other(old: str, new: str) -> None:
    found = proposed(old, new)
    assert found.rule == "move"
    assert len(found.setting) <= 2 * len(old) + 160
    assert "[^\\n]*" not in found.setting
    for text in (old, new):
        assert [one[0] for one in re.finditer(found.setting, f"{OTHERS}{text}\n{OTHERS}", re.MULTILINE)] == [text]


@pytest.mark.parametrize(
    "policy",
    [
        "Forbidden:\n- music past 22:00\n- visitors past 23:00\nAllowed:\n- tea at 16:00",
        "Remind Anna of her pills, one each at:\n08:00\n20:00",
        "Session: be discreet",
        "Weather: warn below 0 degrees",
        "Under no circumstances open the gate before\n08:00",
        "```\n2026-11-01\n```",
        '{\n  "time": "22:00"\n}',
        "Room 101 is off limits",
        "Turn 3 times before answering",
    ],
)
def test_what_stands_beside_a_clock_stays(policy: str) -> None:
    """The rule is proposed for the clock only where it takes nothing else with it."""
    before, after = (
        f"Be kind.\nCurrent time: 14:0{n}\n{policy}\n" + "Another rule that is long.\n" * 4 for n in (3, 5)
    )
    found = moving(before, after, before.index("14:03") + 4)
    assert found.rule in ("move", "move_volatile_line")
    rules = StableRules(**{found.rule: True if found.setting == "on" else found.setting})
    left, moved = stable.taken_out(after, rules, Counter())
    assert moved == ["Current time: 14:05"]
    assert policy in left


@pytest.mark.parametrize(
    "fact",
    [
        "Date of birth: 1984-03-12",
        "Time format: HH:MM, such as 14:30",
        "Time zone: UTC+01:00",
        "Today's specials: soup at 12:30",
        "Datum der Gründung: 1998-04-01",
        "The date the contract began was 2019-04-01.",
        "Date: 2024-05-02",  # of a letter, perhaps
        "Time: 18:30",
        "Location: Uppsala",
        "The user is in Stockholm.",
        "Temperature: 21 °C",
        "Session 42",
        "You are in area Kitchen.",
        "Weather: sunny",
    ],
)
def test_what_has_not_changed_is_not_taken_along(fact: str) -> None:
    """Whatever it is called. The clock alone is moved then, or nothing, where it stands among lines that look alike."""
    before, after = (f"Be kind.\nCurrent time: 14:0{n}\n{fact}\n" + "Another rule that is long.\n" * 4 for n in (3, 5))
    found = moving(before, after, before.index("14:03") + 4)
    if fact == "Time: 18:30":
        assert found == NOTHING
        return
    rules = StableRules(**{found.rule: True if found.setting == "on" else found.setting})
    assert stable.taken_out(after, rules, Counter())[1] == ["Current time: 14:05"]


def test_the_date_of_now_is_taken_along_though_it_is_the_same_all_day() -> None:
    before, after = (
        f"Be kind.\nTime: 14:0{n}\nToday's date: 2026-11-30\n" + "A rule that is long.\n" * 4 for n in (3, 5)
    )
    assert moving(before, after, before.index("14:03") + 4).rule == "move_volatile_line"


SAID = "Another rule that is long enough.\n" * 3


def between(old: list[Message], new: list[Message]) -> Difference:
    found = difference(*(Sent(messages).prompt() for messages in (old, new)))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("line", "cause", "rule"),
    [
        ("x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};", "billing_line", True),
        ("x-anthropic-billing-header: cch={};", "billing_line", True),
        ("Headers:\nx-anthropic-billing-header: cch={};", "billing_line", False),  # where the rule leaves it
        ("x-billing-account: {}", "random_id", False),
        ("The billing code is {}", "random_id", False),
        ("cch={} is a hash.", "random_id", False),
    ],
)
def test_the_billing_rule_is_proposed_where_it_acts(line: str, cause: str, rule: bool) -> None:
    old, new = (
        [Message("system", f"{line.format(nonce)}\nYou are an agent.\n{SAID}"), Message("user", "Hello")]
        for nonce in ("fa690b12", "0c77de34")
    )
    found = between(old, new)
    assert found.cause == cause
    assert (found.rule == "drop_billing_line") == rule
    changed = [ruled(Sent(messages), StableRules()).messages for messages in (old, new)]
    assert (changed[0] == changed[1]) == rule


def test_nothing_is_proposed_for_later_system_messages() -> None:
    """The rules leave them as they are."""
    for line in ("Current time: 21:4{}", "Kierros 1{}/50", "x-anthropic-billing-header: cch=fa69{};"):
        old, new = (
            [
                Message("system", SAID),
                Message("user", "Hello"),
                Message("assistant", "Yes?"),
                Message("system", line.format(n)),
                Message("user", f"A question of some length that comes again, {SAID}"),
            ]
            for n in (3, 7)
        )
        found = between(old, new)
        assert found.cause in ("clock", "counter", "billing_line")
        assert found.rule == ""
        for first in (old, new):
            del first[1:3]
        assert between(old, new).rule


@pytest.mark.parametrize(
    "line",
    [
        "It is {} and the heating target is 20 degrees.",
        "It is {}, mode 2.",
        "As of {} the door code is 4711.",
        "Door code 4711, time {}.",
        "Kids sleep 20:30-06:30, now {}",
        "Quiet hours: 22:00-{}",
        "It is {} - quiet hours.",
        "It's {} now; quiet hours.",
        "It is {} in quiet mode",
        "Time: {} (whisper)",
        "Time: {} / whisper",
        "Time: {} | whisper",
        "Time: {} quiet/whisper",
        "Time: {} → whisper",
    ],
)
def test_a_line_that_says_more_than_the_time_has_no_rule(line: str) -> None:
    assert proposed(line.format("21:43"), line.format("22:17")) == NOTHING


@pytest.mark.parametrize(
    "line",
    [
        "Session {} formal French two sentences",
        "Session {} French",
        "Trace {} (formal French)",
        "session={} lang=fr",
    ],
)
def test_a_line_that_says_more_than_an_id_has_no_rule(line: str) -> None:
    assert proposed(line.format("a91f03bc"), line.format("77be01aa")) == NOTHING


@pytest.mark.parametrize(
    "line",
    [
        "House clock: {}",
        "House clock: {} CET",
        "House clock: {} (UTC+01:00)",
        "House clock: {} +01:00",
        "House clock: {} -05:00",
        "House clock: {} Europe/Vienna",
        "House clock: {}, Monday, 30 November 2026",
        "The house clock shows {} o'clock on Monday, 30.11.2026.",
        "The clock shows {} in Vienna.",
        "Hausuhr: {} Uhr",
        "clock={} tz=CET",
        "現在時刻は{}です",
        "Nyt on maanantai 30. marraskuuta 2026, kello {}",
        "[Nora @ {}]",
    ],
)
def test_a_clock_may_have_a_date_and_a_zone(line: str) -> None:
    found = proposed(line.format("21:43"), line.format("22:17"))
    assert found.rule == "move"
    assert re.search(found.setting, line.format("08:05"), re.MULTILINE)


@pytest.mark.parametrize(
    ("line", "seen", "later"),
    [
        ("House clock: {}", ("9:12 AM", "9:41 AM"), ("1:05 PM", "11:59 pm")),
        ("The kitchen clock shows {}.", ("9:12 AM", "9:41 AM"), ("12:07 PM",)),
        ("House clock: {}", ("10:12 p.m.", "11:41 p.m."), ("0:05 a.m.",)),
        ("House clock: {}", ("9:12a.m.", "9:41a.m."), ("1:05p.m.",)),
        ("House clock: {}", ("9:12AM", "9:41AM"), ("1:05PM",)),
        ("House clock: {}", ("11:58 AM", "12:03 PM"), ("9:12 AM",)),
        ("House clock: {}", ("9 AM", "10 AM"), ("1 PM",)),
        ("House clock: {}", ("9:12\u202fAM", "9:41\u202fAM"), ("1:05\u202fPM",)),
        ("Grid energy today {} kWh", ("6", "7"), ("7.5", "12,25", "-1")),
        ("Outdoor sensor {} degrees", ("1", "7"), ("-1", "−3.5")),
        ("Freezer: {} °C", ("-17", "-18"), ("-18.5", "2")),
        ("Freezer: {} °C", ("-1", "2"), ("-18.5", "+3")),
        ("Balance={}", ("7.5", "7.9"), ("-7", "8")),
    ],
)
def test_an_expression_is_for_what_such_a_value_may_become(
    line: str, seen: tuple[str, str], later: tuple[str, ...]
) -> None:
    found = proposed(*(line.format(value) for value in seen))
    assert found.rule == "move"
    for value in (*seen, *later):
        text = line.format(value)
        assert [one[0] for one in re.finditer(found.setting, LINES.format(text), re.MULTILINE)] == [text]

"""A rule is proposed only where it helps: each is tried on the pair that it is proposed for."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from home_pairs import P

from homeprefixd.bench.pairs import Sent, read_pairs
from homeprefixd.chat import stable
from homeprefixd.explain.differences import difference
from homeprefixd.explain.proposal import NOTHING, Proposal, moving
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
    assert moving("x " * 5000 + "1", "x " * 5000 + "2", 10000) == NOTHING == Proposal("")

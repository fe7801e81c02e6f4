"""The corpus: each pair is explained with the right place and cause."""

from __future__ import annotations

import time
from typing import Any

import pytest
from corpus import Chat, Pair, house, pairs, stable, system, systems, tool, turned, user
from more_pairs import more_pairs

from homeprefixd.explain.causes import CAUSES, title
from homeprefixd.explain.differences import difference
from homeprefixd.explain.prompt import Prompt, common_length
from homeprefixd.frames.worker import Message


def test_the_corpus_is_large_enough() -> None:
    assert len(pairs()) >= 40
    named = {pair.cause for pair in pairs()}
    assert named <= CAUSES.keys()
    not_of_two_prompts = {
        "retokenised",
        "other_namespace",
        "other_model",
        "evicted",
        "computed_faster",
        "cache_off",
        "prompt_logprobs",
        "too_short",
        "never_seen",
        "goes_on",
        "rule_applied",
        "rule_moved",
        "not_kept",
        "store_away",
        "not_loaded",
    }
    assert named | not_of_two_prompts == CAUSES.keys()


@pytest.mark.parametrize("pair", [*pairs(), *more_pairs()], ids=lambda pair: pair.name)
def test_pair(pair: Pair) -> None:
    before, after = pair.before.prompt(), pair.after.prompt()
    found = difference(before, after)
    assert found is not None
    assert (found.cause, pair.place in found.part) == (pair.cause, True), found
    assert found.place == common_length(before.text + before.reply, after.text)
    assert found.lead in after.text[: found.place]
    assert found.alike >= 0
    assert title(found.cause, found.part)


@pytest.mark.parametrize(("name", "before", "after"), stable(), ids=[name for name, *_ in stable()])
def test_nothing_is_found_where_nothing_is_lost(name: str, before: Chat, after: Chat) -> None:
    assert difference(before.prompt(), after.prompt()) is None


def test_what_stood_there_and_what_stands_there() -> None:
    old, new = systems(house("The current time is 21:15."), house("The current time is 21:16."))
    found = difference(old.prompt(), new.prompt())
    assert found is not None
    assert (found.before, found.after) == ("21:15", "21:16")
    assert found.lead.endswith("The current time is ")  # what differs is not shown twice
    assert found.rule == "move_volatile_line"
    behind = len(new.prompt().text) - found.place
    assert 0.8 * behind < found.alike <= behind


@pytest.mark.parametrize("pair", pairs(), ids=lambda pair: pair.name)
def test_either_may_come_first(pair: Pair) -> None:
    """Whatever comes, it is not an error."""
    difference(pair.after.prompt(), pair.before.prompt())


def test_it_is_quick() -> None:
    """A household prompt of some 10,000 characters, many times. The bar is `bench explain`'s."""
    old, new = systems(house("The time is 21:15.") * 9, house("The time is 21:16.") * 9)
    before, after = old.prompt(), new.prompt()
    assert len(after.text) > 9000
    times = []
    for _ in range(20):
        begin = time.thread_time()
        assert difference(before, after) is not None
        times.append(time.thread_time() - begin)
    assert min(times) < 0.1


ENTITIES = """entity_id,name,state,attributes
light.hall,Hall,on,{}
sensor.garden,Garden,{},
cover.door,Door,closed,"""
STATES = """- names: Hall
  domain: light
  state: 'on'
  attributes:
    brightness: '{}'
- names: Garden
  domain: sensor
  state: '{}'"""


@pytest.mark.parametrize(
    ("text", "before", "after", "cause"),
    [
        (ENTITIES, ("128", "23"), ("255", "23"), "changing_value"),
        (ENTITIES, ("128", "23"), ("128", "7"), "changing_value"),
        (STATES, ("128", "23"), ("128", "7"), "changing_value"),
        (STATES, ("128", "23"), ("255", "23"), "changing_value"),
        ("light.hall,Hall,on;brightness={};x={}", ("128", "1"), ("64", "1"), "changing_value"),
        ("It is {} at {}.", ("a quarter past nine", "home"), ("half past nine", "home"), "clock"),
        ("It is {} at {}.", ("a quarter past nine", "home"), ("a quarter to ten", "home"), "clock"),
        ("It is {} at {}.", ("nine o'clock", "home"), ("ten o'clock", "home"), "clock"),
        ("Es ist {} und {}.", ("Viertel nach neun", "hell"), ("halb zehn", "hell"), "clock"),
        ("The glass is {} and {}.", ("half full", "cold"), ("half empty", "cold"), "changing_value"),
        ("Turn {}, mode {}.", ("7", "1"), ("8", "1"), "counter"),
        ("Step {} of {}, then the next one.", ("3", "20"), ("4", "20"), "counter"),
        ("Be a tutor. Messages left today: {}. Be {}.", ("42", "kind"), ("41", "kind"), "counter"),
        ("Requests this hour: {}, {}", ("7", "ok"), ("8", "ok"), "counter"),
        ("Today: {}, {}", ("29", "fine"), ("30", "fine"), "clock"),
        ("Day {} of the year {}.", ("29", "fine"), ("30", "fine"), "clock"),
        ("Lamp: {}, fan: {}.", ("on", "off"), ("off", "on"), "changing_value"),
        ("Scores: {}, {}.", ("12", "7"), ("7", "12"), "counter"),
    ],
)
def test_values_clocks_and_counters(text: str, before: tuple[str, ...], after: tuple[str, ...], cause: str) -> None:
    old, new = systems(house(text.replace("{}", "%s") % before), house(text.replace("{}", "%s") % after))
    found = difference(old.prompt(), new.prompt())
    assert found is not None
    assert found.cause == cause, found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Family: Anna, Bertil, Cecilia and Disa. Greet them.", "Family: Cecilia, Disa, Anna and Bertil. Greet them."),
        ("Greet Anna, Bo and Eva.", "Greet Eva, Anna and Bo."),
        ("Räume: Küche, Flur und Bad", "Räume: Bad, Küche und Flur"),
        ("Pièces : cuisine, salon et cave.", "Pièces : cave, cuisine et salon."),
        ("Familia: Ana, Luis y Eva.", "Familia: Luis, Eva y Ana."),
        ("家族：太郎、花子、次郎。", "家族：次郎、太郎、花子。"),
        ("Rooms: Anders' room; Anna's room", "Rooms: Anna's room; Anders' room"),
    ],
)
def test_items_of_a_sentence_in_another_order(before: str, after: str) -> None:
    found = difference(*(chat.prompt() for chat in systems(house(before), house(after))))
    assert found is not None
    assert (found.cause, found.rule) == ("entries_reordered", "")


def with_tools(tools: list[dict[str, Any]], reply: Message | None = None) -> Prompt:
    messages = [system("Be kind."), user("Hi"), *([reply, user("Why?")] if reply is not None else [])]
    return Chat(messages, tools).prompt()


@pytest.mark.parametrize(
    ("tools", "rule"),
    [
        ([tool("lamp"), tool("door")], "sort_tools"),
        ([{"type": "web_search"}, {"type": "code"}], ""),  # nothing to sort them by
        ([tool("lamp", "One."), tool("lamp", "Two."), tool("door")], ""),  # of one name
        ([tool("lamp", "One."), tool("lamp", "One."), tool("door")], "sort_tools"),
    ],
)
def test_sorting_tools_is_proposed_where_it_helps(tools: list[dict[str, Any]], rule: str) -> None:
    found = difference(with_tools(tools), with_tools(tools[::-1]))
    assert found is not None
    assert (found.cause, found.rule) == ("tools_reordered", rule)


def test_sorting_keys_is_proposed_where_it_helps() -> None:
    """In tools, not in calls of them."""
    one = tool("lamp", "Lights a lamp.", room="string", level="number")
    found = difference(with_tools([one]), with_tools([turned(one)]))
    assert found is not None
    assert (found.cause, found.rule) == ("keys_reordered", "sort_keys")
    calls = [
        Message("assistant", "", tool_calls=[{"function": {"name": "lamp", "arguments": arguments}}])
        for arguments in ({"room": "kitchen", "level": 3}, {"level": 3, "room": "kitchen"})
    ]
    found = difference(*(with_tools([one], call) for call in calls))
    assert found is not None
    assert (found.cause, found.rule) == ("keys_reordered", "")


BILLING = "x-anthropic-billing-header: cc_version=2.1.20.a31; cc_entrypoint=cli; cch={};\n"


@pytest.mark.parametrize(
    ("chat", "rule"),
    [
        (Chat([system(BILLING + house("Be kind.")), user("Hi")]), "drop_billing_line"),
        (Chat([user(BILLING + house("Be kind."))]), ""),
        (Chat(text=BILLING + house("Be kind.")), ""),
    ],
)
def test_a_billing_line_is_dropped_from_system_messages_only(chat: Chat, rule: str) -> None:
    both = []
    for number in ("18fa2", "77c01"):
        messages = [Message(m.role, (m.content or "").replace("{}", number)) for m in chat.messages]
        both.append(Chat(messages, text=chat.text.replace("{}", number)).prompt())
    found = difference(*both)
    assert found is not None
    assert (found.cause, found.rule) == ("billing_line", rule)


def test_items_of_a_tools_list_in_another_order() -> None:
    both = []
    for order in (["hall", "attic"], ["attic", "hall"]):
        room = {"type": "string", "enum": order}
        light = {"name": "light", "parameters": {"type": "object", "properties": {"room": room}}}
        both.append(Chat([system("Be kind."), user("Hi")], [{"type": "function", "function": light}]).prompt())
    found = difference(*both)
    assert found is not None
    assert (found.cause, found.part) == ("entries_reordered", "the tool light")

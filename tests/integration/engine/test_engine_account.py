"""Accounts of real prompts by a real model's tokens, what was stored, and rules that keep prompts stable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from homeprefixd.explain.conclude import conclude
from homeprefixd.frames.worker import Account, Finished, Message, StableRules
from tests.integration.engine.memory_store import MemoryStore
from tests.integration.engine.running import Running

POLICY = "\n".join(f"{number}. The window in room {number} stays as it is at night." for number in range(12))


def chat(first: str, question: str = "Is the kitchen window open?") -> list[Message]:
    policy = f"You are kind, and you answer as somebody who lives in this house would.\n{first}\n{POLICY}"
    return [Message("system", policy), Message("user", question)]


def account(running: Running, rid: str) -> Account:
    found: Account = running.wait(lambda: running.of(rid, Account))[0]
    return found


@pytest.fixture
def model(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


def test_a_clock_is_found_and_its_rule_helps(run: Callable[..., Running], model: Path) -> None:
    for rules, reuse in ((None, False), (StableRules(move_volatile_line=True), True)):
        running = run(model, stable=rules)
        running.known()
        running.ask(chat("The time is 21:15."))
        _text, end = running.ask(chat("The time is 21:16."))
        told = account(running, end.rid)
        assert sum(section.tokens for section in told.sections) == end.timings.total_prompt_n
        told_why = conclude(end.rid, told, end.timings, 100.0)
        if reuse:
            assert told.rules == {"move_volatile_line": 1}
            assert told_why.tokens_lost == 0
            assert end.timings.prompt_n < 40
        else:
            assert told.finding is not None
            assert (told.finding.cause, told.finding.place) == ("clock", "the system message")
            assert told.finding.token == told.known  # to the token
            assert abs(end.timings.cache_n - told.known) <= 1
            assert told_why.cause == "clock"
            assert told_why.tokens_lost > 0.8 * (end.timings.total_prompt_n - told.known) - 20


def test_the_next_turn_is_known_to_the_end_of_the_reply(run: Callable[..., Running], model: Path) -> None:
    running = run(model)
    running.known()
    first = chat("Be brief.")
    text, end = running.ask(first, 12)
    assert end.stored == (end.timings.total_prompt_n + 11) // 64 * 64
    _text, end = running.ask([*first, Message("assistant", text), Message("user", "And the hall?")])
    told = account(running, end.rid)
    assert told.resembles
    assert told.known_prompt > 64
    assert conclude(end.rid, told, end.timings, 0.0).cause in ("goes_on", "retokenised")  # as the model's words fall


def test_what_was_evicted(run: Callable[..., Running], model: Path) -> None:
    running = run(model)
    running.known()
    running.ask(chat("Be brief."))
    running.store.forget()
    _text, end = running.ask(chat("Be brief."))
    assert end.timings.cache_n == 0
    told = conclude(end.rid, account(running, end.rid), end.timings, 0.0)
    assert (told.cause, told.tokens_lost) == ("not_kept", end.timings.total_prompt_n - 1)


def test_after_a_restart(run: Callable[..., Running], model: Path) -> None:
    store = MemoryStore()
    before = run(model, store)
    before.known()
    before.ask(chat("Session 3f2b8c1e90aa"))
    after = run(model, store)
    after.known()
    _text, end = after.ask(chat("Session 8d1fa2b311c4"))
    told = account(after, end.rid)
    assert told.finding is not None
    assert told.finding.cause == "random_id"


def test_it_can_be_turned_off(run: Callable[..., Running], model: Path) -> None:
    running = run(model, explain=False)
    running.known()
    for time in ("21:15", "21:16"):
        running.ask(chat(f"The time is {time}."))
    assert not [frame for _, frame in running.frames if isinstance(frame, Account)]


def test_requests_without_the_cache(run: Callable[..., Running], model: Path) -> None:
    running = run(model)
    running.known()
    more: dict[str, Any] = {"cache": False}
    running.ask(chat("Be brief."))
    _text, end = running.ask(chat("Be brief."), **more)
    assert isinstance(end, Finished)
    assert end.stored == 0
    assert conclude(end.rid, account(running, end.rid), end.timings, 0.0).cause == "cache_off"


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if loop.first %}{% for tool in tools or [] %}\n"
    "{{ tool | tojson }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
BILLING = "x-anthropic-billing-header: cc_version=2.1.37; cch={};\nYou are a coding agent."
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": name, "description": f"Does what {name} says, in the room that is named."},
    }
    for name in ("turn_on", "turn_off", "set_temperature", "open_cover", "close_cover", "lock")
]
TURNED = [{"function": dict(reversed(tool["function"].items())), "type": "function"} for tool in TOOLS]
Shape = tuple[str, StableRules | None, tuple[str, str], tuple[list[dict[str, Any]], list[dict[str, Any]]]]
SHAPES: list[Shape] = [
    ("billing_line", StableRules(), (BILLING.format("91b0c"), BILLING.format("04f2e")), ([], [])),
    ("clock", StableRules(move_volatile_line=True), ("It is 21:15.", "It is 21:16."), ([], [])),
    ("area", StableRules(move_volatile_line=True), ("You are in area Hall.", "You are in area Attic."), ([], [])),
    ("tools", StableRules(sort_tools=True), ("Hello.", "Hello."), (TOOLS, TOOLS[::-1])),
    ("keys", StableRules(sort_keys=True), ("Hello.", "Hello."), (TOOLS, TURNED)),
]


@pytest.mark.parametrize(("name", "rules", "first", "tools"), SHAPES, ids=[shape[0] for shape in SHAPES])
def test_from_no_reuse_to_full_reuse(
    run: Callable[..., Running],
    model: Path,
    name: str,
    rules: StableRules,
    first: tuple[str, str],
    tools: tuple[list[dict[str, Any]], list[dict[str, Any]]],
) -> None:
    """The shapes that people complain of: with the rule, only what is asked is computed."""
    computed = []
    for stable in (None, rules):
        running = run(model, chat_template=TEMPLATE, stable=stable)
        running.known()
        for line, own in zip(first, tools, strict=True):
            messages = [Message("system", f"{line}\n{POLICY}"), Message("user", "Is the window open?")]
            _text, end = running.ask(messages, 2, tools=own or None)
        computed.append((end.timings.prompt_n, end.timings.total_prompt_n))
    (without, total), (with_rule, _total) = computed
    assert without > total / 3, "nothing to gain: the shape is no problem"
    assert with_rule <= 40, "a moved line and a question"
    assert name


@pytest.mark.timeout(60)
def test_a_slow_expression_stops_nobody(run: Callable[..., Running], model: Path) -> None:
    """A rule whose expression would run for years: the prompt is served as it came, and it is said."""
    running = run(model, stable=StableRules(custom="(a|aa)+$"))
    running.known()
    ends = [running.ask(chat("a" * 60 + "!"))[1] for _ in range(4)]
    told = [account(running, end.rid).rules for end in ends]
    assert told == [{"custom (too slow)": 1}] * 3 + [{}]  # it is used no more

"""Where prompts may be gone on from: boundaries of messages, positions of tokens, ends of prefill calls."""

from __future__ import annotations

import pytest

from homeprefixd.chat.boundaries import Boundary, boundaries
from homeprefixd.chat.prompt import PromptBuilder
from homeprefixd.engine.chunks import stop_at
from homeprefixd.engine.points import points_of
from homeprefixd.frames.worker import Message

PLAIN = (
    "{% if tools %}<tools>{{ tools | length }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRIPS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last or m.role != 'assistant' else m.content[:3] }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
MOVES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if loop.last %}<n={{ messages | length }}>{% endif %}"
    "{% endfor %}"
)
REFUSES = "{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}" + PLAIN

CHAT = [
    Message("system", "Be brief."), Message("user", "One?"), Message("assistant", "Two."), Message("user", "Three?"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine costs no boundary."""
    monkeypatch.setattr("homeprefixd.chat.boundaries._SECONDS", 30.0)


def found(
    template: str, messages: list[Message], tools: list[dict[str, object]] | None = None
) -> list[tuple[str, str]]:
    prompts = PromptBuilder(template, "", "", 2.0)
    whole = prompts.render(messages, tools, {})
    result = boundaries(prompts, messages, tools, {}, whole)
    assert all(whole.startswith(boundary.text) for boundary in result)
    return [(boundary.kind, boundary.text[-12:]) for boundary in result]


def test_boundaries_of_a_plain_template() -> None:
    assert found(PLAIN, CHAT) == [
        ("system", "ystem><user>"), ("turn", ">One?</user>"),
        ("turn", "</assistant>"), ("prompt", "hree?</user>"),
    ]  # fmt: skip


def test_tools_without_a_system_message_are_a_beginning() -> None:
    assert found(PLAIN, CHAT[1:2], [{"a": 1}])[0] == ("system", "tools><user>")
    assert [kind for kind, _ in found(PLAIN, CHAT[1:2])] == ["prompt"]


@pytest.mark.parametrize(("template", "kinds"), [(STRIPS, ["system", "turn", "prompt"]), (MOVES, ["system"])])
def test_what_is_no_prefix_does_not_count(template: str, kinds: list[str]) -> None:
    assert [kind for kind, _ in found(template, CHAT)] == kinds


def test_a_template_that_refuses_costs_a_boundary() -> None:
    assert [kind for kind, _ in found(REFUSES, CHAT)] == ["system", "turn", "prompt"]


def test_the_first_word_of_a_message_is_no_part_of_the_beginning() -> None:
    for word in ("§", "¤", "x"):
        messages = [CHAT[0], Message("user", word)]
        assert found(PLAIN, messages)[0] == ("system", "ystem><user>")


def points(text: str, *ends: int) -> tuple[tuple[int, str], ...]:
    """Characters are tokens here."""
    tokens = [ord(character) for character in text]
    some = [Boundary(text[:end], "turn") for end in ends]
    return points_of(tokens, some, lambda part: [ord(character) for character in part])


def test_points_are_before_the_last_token_and_apart() -> None:
    assert points("x" * 50) == ((49, "prompt"),)
    assert points("x" * 50, 20, 24, 40) == ((20, "turn"), (40, "turn"), (49, "prompt"))
    assert points("x" * 50, 3, 45) == ((45, "turn"),)
    assert points("x") == ()


def test_calls_end_at_points() -> None:
    assert stop_at([100, 200], 64, 256) == 100
    assert stop_at([100, 200], 100, 128) == 128
    assert stop_at([], 0, 64) == 64
    assert stop_at([64, 128], 64, 128) == 128

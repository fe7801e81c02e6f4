"""Prompts that repeat what was generated are made of the tokens that were generated, where those spell their text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeprefixd.engine.replay import Replay, Worded, is_repeating
from homeprefixd.frames.store import Recalled, Remember, Stretch
from homeprefixd.frames.worker import Generate, Message, Sampling
from homeprefixd.lora import Space
from homeprefixd.prefix.blocks import to_le
from homeprefixd.prefix.replies import Replies

HOUSE = Space()
NAMESPACE = {Space(): b"h" * 32, Space("guest"): b"g" * 32, Space("", ((0, 1.0),)): b"l" * 32}


class Letters:
    """A vocabulary in which each byte is a token, and words of it are further ones that the tokenizer prefers."""

    words = (b"Hello", b" there", b"lo", b" the", b"<end>", b"\xc3\xa9", b"<think>")

    def __init__(self, blank: bool = False) -> None:
        self.blank = blank  # before each text, as SentencePiece models have it
        self.tokenized = 0

    def piece(self, token: int, special: bool = False) -> bytes:
        return bytes([token]) if token < 256 else self.words[token - 256]

    def pieces(self, tokens: Iterable[int]) -> list[bytes]:
        return list(map(self.piece, tokens))

    def tokenize(self, text: str, *, add_bos: bool = True, parse_special: bool = True) -> list[int]:
        data = text.encode("utf-8", "surrogatepass")
        self.tokenized += len(data)
        if self.blank:
            data = b" " + data
        tokens: list[int] = []
        while data:
            token = next((256 + i for i, word in enumerate(self.words) if data.startswith(word)), data[0])
            tokens.append(token)
            data = data[len(self.piece(token)) :]
        return tokens


class Store:
    """The memo itself, or what the test wants it to say."""

    connected = True

    def __init__(self) -> None:
        self.replies = Replies()
        self.says: Recalled | None = None
        self.forgotten = 0

    def recall(self, namespace: bytes, text: bytes, timeout: float) -> Recalled | None:
        if self.says is not None:
            return self.says
        row = self.replies.recall(namespace, text)
        return None if row is None else Recalled(0, row.length, row.stretches, row.replies)

    def remember(self, frame: Remember) -> None:
        self.forgotten += not frame.reply
        self.replies.remember(frame.namespace, frame.digest, frame.length, frame.tail, frame.stretches, frame.reply)


class House:
    def __init__(self, **vocabulary: bool) -> None:
        self.letters, self.store = Letters(**vocabulary), Store()
        self.counters: defaultdict[str, float] = defaultdict(float)
        self.replay = Replay(self.letters, self.store, NAMESPACE.get, NAMESPACE.get, self.counters)  # type: ignore[arg-type]

    def words(self, text: str, space: Space = HOUSE) -> Worded:
        found = self.replay.words(text, space, repeating=True)
        if not self.letters.blank:
            assert self.text(found.tokens) == text
        return found

    def text(self, tokens: list[int]) -> str:
        return b"".join(map(self.letters.piece, tokens)).decode()

    def generated(self, prompt: str, tokens: list[int], space: Space = HOUSE) -> None:
        self.replay.remember(self.words(prompt, space), space, tokens)


HELLO = [*b"Hel", 258, 257]  # what the tokenizer would write as two words
PROMPT = "user: hi<end>assistant: "


def test_a_reply_keeps_its_tokens() -> None:
    house = House()
    house.generated(PROMPT, HELLO)
    begin = house.letters.tokenize(PROMPT)
    found = house.words(PROMPT + "Hello there<end>user: ")
    assert found.tokens == [*begin, *HELLO, 260, *b"user: "]
    assert found.replayed == 5
    assert house.counters == {"replay_tokens": 5}
    assert house.words("user: ho<end>assistant: Hello there").stretches == ()


def test_a_chat_of_many_turns() -> None:
    house = House()
    prompt, tokens = PROMPT, house.letters.tokenize(PROMPT)
    for turn in range(6):
        found = house.words(prompt)
        assert found.tokens == tokens
        assert found.replayed == turn * len(HELLO)
        house.generated(prompt, HELLO)
        prompt += f"Hello there<end>user: {turn}<end>assistant: "
        tokens = [*tokens, *HELLO, *house.letters.tokenize(f"<end>user: {turn}<end>assistant: ")]


def test_another_ones_text_is_not_used() -> None:
    house = House()
    house.generated(PROMPT, HELLO)
    assert house.words(PROMPT + "Hello there", Space("guest")).stretches == ()
    assert house.words(PROMPT + "Hello there", Space("", ((0, 1.0),))).stretches == ()  # with an adapter
    assert house.words(PROMPT + "Hello there", Space("unknown")).stretches == ()


def test_who_repeats_only_a_part() -> None:
    """Stop strings and templates cut a reply; a client may edit it. No word is cut."""
    house = House()
    house.generated(PROMPT, [*HELLO, *b"\n\n"])
    begin = house.letters.tokenize(PROMPT)
    assert house.words(PROMPT + "Hello there<end>").tokens == [*begin, *HELLO, 260]
    assert house.words(PROMPT + "Hello the<end>").tokens == [*begin, *HELLO[:-1], 259, 260]
    assert house.words(PROMPT + "Helmut").tokens == [*begin, *b"Helmut"]
    assert house.words(PROMPT + "Hello thereby").tokens == [*begin, *HELLO[:-1], 257, *b"by"]
    assert house.words(PROMPT + "Bye").stretches == ()
    assert house.store.forgotten == 0


def test_of_several_replies_the_one_that_stands_there() -> None:
    house = House()
    house.generated(PROMPT, HELLO)
    house.generated(PROMPT, list(b"Bye"))
    assert house.words(PROMPT + "Hello there<end>").replayed == len(HELLO)
    assert house.words(PROMPT + "Bye<end>").replayed == 3


def test_a_template_that_strips_thoughts() -> None:
    """What stands before them is reused: the reply itself comes later, after other text."""
    house = House()
    house.generated(PROMPT, [*b"<think>so</think>", *HELLO])
    found = house.words(PROMPT + "Hello there<end>")
    assert found.stretches == ()
    assert found.tokens == house.letters.tokenize(PROMPT + "Hello there<end>")


def test_characters_of_several_tokens() -> None:
    house = House()
    house.generated(PROMPT, [0xC3, 0xA9, 0xC3])  # the last one is cut off
    assert house.words(PROMPT + "é<end>").tokens[-3:] == [0xC3, 0xA9, 260]
    house.generated("p: ", [0xC3])
    assert house.words("p: é").tokens[-1] == 261


@pytest.mark.parametrize(
    "row",
    [
        Recalled(0, len(PROMPT), [Stretch(0, 4, to_le(list(b"uses")))], []),
        Recalled(0, len(PROMPT), [Stretch(0, 4, to_le(list(b"user"))), Stretch(2, 4, to_le(list(b"er")))], []),
        Recalled(0, len(PROMPT), [Stretch(0, 4, to_le(list(b"user"))[:-1])], []),
        Recalled(0, 3, [Stretch(0, 4, to_le(list(b"user")))], []),
        Recalled(0, len(PROMPT), [Stretch(4, 4, b"")], []),
    ],
    ids=["other text", "overlapping", "half a token", "beyond the prompt", "empty"],
)
def test_what_does_not_spell_the_text_is_forgotten(row: Recalled) -> None:
    house = House()
    house.store.says = row
    assert house.words(PROMPT).tokens == house.letters.tokenize(PROMPT)
    assert house.counters["replay_refused"] == house.store.forgotten == 1


def test_a_row_beyond_the_text_is_of_no_use() -> None:
    house = House()
    house.store.says = Recalled(0, 1000, [], [to_le(HELLO)])
    assert house.words(PROMPT).stretches == ()


def test_a_tokenizer_that_puts_a_blank_before_a_text() -> None:
    """Its blank must not come into the middle of a prompt."""
    house = House(blank=True)
    house.generated(PROMPT, HELLO)
    found = house.words(PROMPT + "Hello there, again")
    assert found.tokens == house.letters.tokenize(PROMPT + "Hello there, again")
    assert house.counters["replay_refused"] == 1


def test_the_beginning_of_a_prompt_has_the_same_tokens() -> None:
    house = House()
    house.generated(PROMPT, HELLO)
    whole = house.words(PROMPT + "Hello there<end>user: ")
    for end in (len(PROMPT), len(PROMPT) + 11, len(PROMPT) + 16):
        tokens = house.replay.beginning(whole, (PROMPT + "Hello there<end>user: ")[:end])
        assert tokens == whole.tokens[: len(tokens)]
    assert house.replay.beginning(whole, "other") == list(b"other")


def test_what_is_not_repeating_is_not_looked_up() -> None:
    house = House()
    house.generated(PROMPT, HELLO)
    assert house.replay.words(PROMPT + "Hello there", HOUSE, repeating=False).stretches == ()

    base = Generate("r", None, None, None, {}, 1, [], Sampling(), False)

    def asks(**more: Any) -> bool:
        return is_repeating(msgspec.structs.replace(base, **more))

    assert not asks(messages=[Message("user", "x")])
    assert asks(messages=[Message("user", "x"), Message("assistant", "y"), Message("user", "z")])
    assert asks(prompt="x")
    assert not asks(prompt=[1, 2])
    assert not asks(prompt="x", suffix="y")


TOKENS = st.lists(st.integers(0, 262), max_size=8)


@given(st.lists(st.tuples(TOKENS, st.text("Hello the<>", max_size=6), st.integers(0, 3)), min_size=1, max_size=5))
@settings(max_examples=150, deadline=None)
def test_whatever_is_generated_and_sent_back_the_prompt_is_spelt(turns: list[tuple[list[int], str, int]]) -> None:
    """Replies of any bytes, sent back whole or cut, and anything said after them."""
    house = House()
    prompt = PROMPT
    for reply, said, cut in turns:
        house.generated(prompt, reply)
        text = b"".join(map(house.letters.piece, reply)).decode(errors="ignore")
        prompt += text[: len(text) - cut] + said
    house.words(prompt)
    house.replay.beginning(house.words(prompt), prompt[: len(prompt) // 2])

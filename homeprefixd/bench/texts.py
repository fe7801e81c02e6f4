"""What people and programs at home write, made up: documents, code, tool output, small talk.

Deterministic: a text is a function of its `Random`, on every machine. Knows no tokenizer: a size in tokens is met
within some per cent (measured with the demo model's).
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from .household import estimate_tokens

_SUBJECTS = (
    "the heat pump",
    "the landlord",
    "the tenant",
    "the boiler",
    "the school",
    "the insurance",
    "the router",
    "the committee",
    "the gardener",
    "the dentist",
    "the solar inverter",
    "the neighbour",
    "the energy supplier",
    "the kitchen fitter",
    "the bicycle club",
    "the water meter",
)
_VERBS = (
    "must be checked before",
    "was replaced during",
    "is paid for until",
    "reports a fault after",
    "has agreed to wait for",
    "cannot be reached in",
    "will be charged from",
    "was promised by the end of",
    "needs a written answer within",
    "is not covered during",
)
_TIMES = (
    "the first week of {month}",
    "{month} of next year",
    "the second inspection",
    "a notice period of {number} weeks",
    "the {number} days that follow",
    "the holidays in {month}",
    "the meeting on {number} {month}",
    "winter",
)
_MONTHS = ("January", "March", "April", "May", "June", "August", "September", "October", "November", "December")
_ENDINGS = (
    "",
    ", unless both sides agree in writing",
    ", which costs {number}.50 euros a month",
    ", as page {number} says",
    "; the reference is {letter}-{number}{number2}",
    ", and a copy goes to {subject}",
    ", provided that the reading stays below {number2} units",
)
_TITLES = ("Lease", "Manual", "Minutes", "Policy", "Offer", "Report", "Terms", "Guide")

_NOUNS = ("user", "order", "frame", "route", "sensor", "batch", "token", "event", "report", "entry", "cursor", "lease")
_ACTIONS = ("load", "store", "merge", "parse", "check", "close", "count", "split", "drop", "find", "copy", "watch")

_TOPICS = (
    "a birthday party for eight children",
    "a bicycle tour along the river",
    "the vegetable bed behind the shed",
    "a letter to the tax office",
    "learning the guitar at forty",
    "sourdough that does not rise",
    "a slow laptop from 2016",
    "moving house in four weeks",
    "a reading list for the winter",
    "the history of lighthouses",
)
_TURNS = (
    "Tell me about {topic}: what should I think of first?",
    "Fine. And what does that mean for {topic} if there are only {number} days left?",
    "I do not quite follow. Say it again, with an example from {topic} and the number {number}.",
    "What would you leave out if it had to cost less than {number} euros?",
    "Somebody told me the opposite about {topic}. Which of the two is right, and why?",
    "Please sum that up for my {relative} in a few sentences.",
    "What did you mean by the second thing that you said?",
    "And what comes after that, around {month}?",
)
_RELATIVES = ("sister", "father", "neighbour", "daughter", "flatmate", "boss")


def _fill(chance: random.Random, text: str) -> str:
    return text.format(
        month=chance.choice(_MONTHS),
        number=chance.randint(2, 29),
        number2=chance.randint(100, 999),
        letter=chance.choice("ABCDEFGHK"),
        subject=chance.choice(_SUBJECTS),
        relative=chance.choice(_RELATIVES),
        topic=chance.choice(_TOPICS),
    )


def upto(lines: Iterator[str], tokens: float, density: float = 1.0) -> str:
    """The first lines that together have about `tokens` tokens (at least one line), joined by line ends.

    `density`: tokens of such lines by the demo model's tokenizer, divided by the estimate.
    """
    taken: list[str] = []
    used = 0.0
    for line in lines:
        used += density * estimate_tokens(line)
        if taken and used > tokens:
            break
        taken.append(line)
    return "\n".join(taken)


def _sentences(chance: random.Random) -> Iterator[str]:
    number = 0
    while True:
        number += 1
        sentences = []
        for _ in range(chance.randint(2, 4)):
            subject = chance.choice(_SUBJECTS)
            ending = _fill(chance, chance.choice(_ENDINGS))
            when = _fill(chance, chance.choice(_TIMES))
            sentences.append(f"{subject[0].upper()}{subject[1:]} {chance.choice(_VERBS)} {when}{ending}.")
        yield f"{number}. {' '.join(sentences)}"


def document(chance: random.Random, tokens: float) -> str:
    """A paper of a household: a title, then numbered paragraphs."""
    title = f"{chance.choice(_TITLES)} {chance.choice('ABCDEFGHK')}-{chance.randint(1000, 9999)}"
    return f"{title}\n{upto(_sentences(chance), tokens, 1.01)}"


def document_question(chance: random.Random) -> str:
    """A question on a document, of about 20 tokens."""
    subject = chance.choice(_SUBJECTS)
    return (
        f"What does the document say about {subject}, and which date or number matters for {_fill(chance, '{topic}')}?"
    )


def _code(chance: random.Random) -> Iterator[str]:
    while True:
        action, noun, other = chance.choice(_ACTIONS), chance.choice(_NOUNS), chance.choice(_NOUNS)
        limit = chance.randint(2, 512)
        yield f"def {action}_{noun}(self, {other}s: list[int], limit: int = {limit}) -> int:"
        yield f'    """{action.capitalize()} each {noun} of {other}s, at most `limit`."""'
        yield "    total = 0"
        yield f"    for index, {other} in enumerate({other}s[:limit]):"
        yield f"        if {other} % {chance.randint(2, 97)} == index:"
        yield f"            raise ValueError(f'{noun} {{index}} is not a {other}')"
        yield f"        total += self.{chance.choice(_ACTIONS)}_{chance.choice(_NOUNS)}({other})"
        yield "    return total"
        yield ""


def code(chance: random.Random, tokens: float) -> str:
    """Some Python."""
    return upto(_code(chance), tokens, 1.03)


def tool_output(chance: random.Random, tokens: float) -> str:
    """What a coding agent's tool gave back: a file, or the end of a test run."""
    name = f"{chance.choice(_NOUNS)}s/{chance.choice(_ACTIONS)}.py"
    if chance.random() < 0.6:
        return f"read_file {name}\n{code(chance, tokens - 10)}\nWhat is the next step?"

    def lines() -> Iterator[str]:
        while True:
            result = (
                "PASSED" if chance.random() < 0.8 else f"FAILED: {chance.randint(0, 99)} != {chance.randint(0, 99)}"
            )
            test = f"test_{chance.choice(_ACTIONS)}_{chance.choice(_NOUNS)}"
            yield f"tests/test_{chance.choice(_NOUNS)}.py::{test} {result}"

    return f"run_tests {name}\n{upto(lines(), tokens - 10, 0.95)}\nWhat is the next step?"


def chat_turn(chance: random.Random, number: int) -> str:
    """What a person writes as turn `number` (from 0) of a chat, 15 to 60 tokens."""
    first = _TURNS[0] if number == 0 else chance.choice(_TURNS[1:])
    extra = (
        _fill(chance, " I should add that {subject} has a say in this until {month}.") if chance.random() < 0.4 else ""
    )
    return _fill(chance, first) + extra


def small_talk(chance: random.Random, tokens: float) -> str:
    """The beginning of a chat as text, both sides, as Open WebUI puts it into its side requests."""

    def lines() -> Iterator[str]:
        number = 0
        while True:
            yield f"USER: {chat_turn(chance, number)}"
            yield f"ASSISTANT: {' '.join(next(_sentences(chance)).split(' ')[1:])}"
            number += 1

    return upto(lines(), tokens, 0.95)


def camera_scene(chance: random.Random) -> str:
    """What an object detector saw, for a caption: about 60 tokens."""
    place = chance.choice(("front door", "drive", "garden gate", "back yard", "garage", "terrace"))
    things = ", ".join(
        f"{chance.choice(('person', 'cat', 'dog', 'car', 'parcel', 'bicycle', 'bird'))} {chance.randint(51, 99)} % at"
        f" ({chance.randint(0, 1919)}, {chance.randint(0, 1079)})"
        for _ in range(chance.randint(1, 3))
    )
    clock = f"{chance.randint(0, 23):02}:{chance.randint(0, 59):02}:{chance.randint(0, 59):02}"
    light = chance.choice(("daylight", "dusk", "infrared"))
    return f"Camera {place}, {clock}, {light}. Seen: {things}. Write the caption."

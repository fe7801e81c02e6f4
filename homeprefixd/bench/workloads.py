"""What a household asks of its server, by name: which requests, and when.

A plan is a function of (workload, seed, scale, rate, duration) alone, so every target gets the very same requests at
the same times. Its unit is the session: requests that belong together (a chat, an agent's task; most have only one).
Sessions are an open loop: each begins at its time, whether or not earlier ones were answered. Inside a session a turn
comes when somebody at home would send it: after the reply to the turn before, plus its think time; it carries the reply
that was really received. A slow server therefore gets the same sessions, and fewer late turns of them.

A longer duration only appends: the sessions of the first minute are those of a one-minute plan. Tools stand in the
prompt's text, not in the field `tools`, because servers do very different things with that field, and then different
work would be compared. This room knows no HTTP and no clock.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from ..errors import ConfigError
from . import texts
from .household import household_prompt, household_question

Message = dict[str, str]


@dataclass(frozen=True)
class Turn:
    """One request: what is appended to the session's messages before it is sent."""

    messages: tuple[Message, ...]
    max_tokens: int  # of the reply; replies are made to be exactly as long where the server knows `ignore_eos`
    think: float  # seconds after the reply to the turn before; 0 for the first


@dataclass(frozen=True)
class Session:
    """Requests that belong together."""

    app: str
    number: int  # of this app's sessions, from 0
    start: float  # seconds after the run's beginning, when the first turn is sent
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Plan:
    """All sessions, by their start."""

    workload: str
    seed: int
    scale: float
    rate: float
    duration: float  # seconds; no turn is sent later
    sessions: tuple[Session, ...]

    @property
    def apps(self) -> tuple[str, ...]:
        """Which apps ask, in the order of APPS."""
        there = {session.app for session in self.sessions}
        return tuple(app for app in APPS if app in there)

    def digest(self) -> str:
        """Names the plan: two runs with the same digest were asked the same."""
        text = json.dumps([asdict(session) for session in self.sessions], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Knobs:
    """What an app's maker is given besides its number."""

    seed: int
    scale: float
    rate: float

    def chance(self, *what: object) -> random.Random:
        """A source of chance of its own for each thing, so that one more of this changes nothing of that."""
        return random.Random(" ".join(str(part) for part in ("workload", self.seed, *what)))

    def size(self, tokens: float) -> float:
        """Tokens of a prompt's part, scaled."""
        return max(8.0, tokens * self.scale)

    def reply(self, tokens: int) -> int:
        """Tokens of a reply, scaled."""
        return max(4, round(tokens * self.scale))


@dataclass(frozen=True)
class App:
    """One app of the house: its sessions' makers and how often they begin."""

    name: str
    what: str  # for people
    interval: float  # seconds between sessions, on average
    fixed: bool  # exactly `interval`, else exponentially distributed
    make: Callable[[Knobs, int], list[tuple[float, tuple[Turn, ...]]]]
    """Sessions that begin together: (seconds after the beginning, turns)."""


def _voice(knobs: Knobs, number: int) -> list[tuple[float, tuple[Turn, ...]]]:
    chance = knobs.chance("voice", number)
    system = household_prompt(seed=knobs.seed, size=round(knobs.size(2200)))
    question = f"{household_question(chance.randrange(98))} It is {chance.randint(0, 23)}:{chance.randint(10, 59)}."
    messages = ({"role": "system", "content": system}, {"role": "user", "content": question})
    return [(0.0, (Turn(messages, knobs.reply(chance.randint(12, 36)), 0.0),))]


_CHAT_SYSTEM = (
    "You are a friendly and thorough assistant of this family. Answer in plain words, in a few sentences, and say so"
    " when you do not know something. The family's papers, for your information:"
)


def _chat(knobs: Knobs, number: int) -> list[tuple[float, tuple[Turn, ...]]]:
    chance = knobs.chance("chat", number)
    papers = texts.document(knobs.chance("chat papers"), knobs.size(240))
    turns = []
    for index in range(chance.randint(6, 10)):
        asked = {"role": "user", "content": texts.chat_turn(chance, index)}
        system = {"role": "system", "content": f"{_CHAT_SYSTEM}\n{papers}"}
        think = 0.0 if index == 0 else chance.uniform(6.0, 18.0) / knobs.rate
        turns.append(Turn((system, asked) if index == 0 else (asked,), knobs.reply(chance.randint(60, 140)), think))
    return [(0.0, tuple(turns))]


_DOCUMENT_SIZES = (1500, 2200, 2800, 3500)


def _documents(knobs: Knobs, number: int) -> list[tuple[float, tuple[Turn, ...]]]:
    chance = knobs.chance("documents", number)
    which = chance.choices(range(len(_DOCUMENT_SIZES)), weights=(4, 3, 2, 1))[0]
    text = texts.document(knobs.chance("document", which), knobs.size(_DOCUMENT_SIZES[which]))
    messages = (
        {"role": "system", "content": "Answer questions on the document from what stands in it, briefly."},
        {"role": "user", "content": f"{text}\n\n{texts.document_question(chance)}"},
    )
    return [(0.0, (Turn(messages, knobs.reply(chance.randint(40, 80)), 0.0),))]


_AGENT_SYSTEM = (
    "You are a coding agent. Work in small steps: read, change, run the tests. Call one tool at a time and wait for its"
    " output. Never edit a file that you have not read. The tools are read_file, write_file, run_tests, search and"
    " list_files, each with a JSON object of arguments. The project's conventions and its main files follow."
)


def _agent(knobs: Knobs, number: int) -> list[tuple[float, tuple[Turn, ...]]]:
    """A task: about 4,000 tokens to begin with, some 7,000 at the end; the next task has the same first 3,700."""
    chance = knobs.chance("agent", number)
    project = texts.code(knobs.chance("agent project"), knobs.size(3600))
    task = f"Task {number}: {texts.code(chance, knobs.size(180))}\nFind out why this fails and mend it."
    opening = ({"role": "system", "content": f"{_AGENT_SYSTEM}\n{project}"}, {"role": "user", "content": task})
    turns = [Turn(opening, knobs.reply(chance.randint(30, 60)), 0.0)]
    for _ in range(chance.randint(8, 11)):
        output = texts.tool_output(chance, knobs.size(chance.randint(120, 340)))
        think = chance.uniform(0.5, 4.0) / knobs.rate
        turns.append(Turn(({"role": "user", "content": output},), knobs.reply(chance.randint(30, 60)), think))
    return [(0.0, tuple(turns))]


_CAMERA_SYSTEM = (
    "You write captions for a security camera: one sentence, what is seen and where, no guesses about who it is, no"
    " advice. Mention the time only at night."
)


def _camera(knobs: Knobs, number: int) -> list[tuple[float, tuple[Turn, ...]]]:
    chance = knobs.chance("camera", number)
    messages = (
        {"role": "system", "content": _CAMERA_SYSTEM},
        {"role": "user", "content": texts.camera_scene(chance)},
    )
    return [(0.0, (Turn(messages, knobs.reply(chance.randint(16, 32)), 0.0),))]


_TITLE = """### Task:
Generate a concise, 3-5 word title with an emoji summarizing the chat history.
### Guidelines:
- The title should clearly represent the main theme or subject of the conversation.
- Use emojis that enhance understanding of the topic, but avoid quotation marks or special formatting.
- Write the title in the chat's primary language; default to English if multilingual.
- Your entire response must consist solely of the JSON object, without any introductory or concluding text.
### Output:
JSON format: {"title": "your concise title here"}
### Chat History:
<chat_history>
HISTORY
</chat_history>"""

_TAGS = """### Task:
Generate 1-3 broad tags categorizing the main themes of the chat history, along with 1-3 more specific subtopic tags.
### Guidelines:
- Start with high-level domains (e.g. Science, Technology, Arts, Business, Health, Education).
- If content is too short (less than 3 messages) or too diverse, use only ["General"].
- Use the chat's primary language; default to English if multilingual.
### Output:
JSON format: {"tags": ["tag1", "tag2", "tag3"]}
### Chat History:
<chat_history>
HISTORY
</chat_history>"""


def _titles(knobs: Knobs, number: int) -> list[tuple[float, tuple[Turn, ...]]]:
    """A title and, a moment later, tags for the same chat: one user message each, as Open WebUI sends them."""
    chance = knobs.chance("titles", number)
    history = texts.small_talk(chance, knobs.size(220))
    sessions: list[tuple[float, tuple[Turn, ...]]] = []
    for delay, text in ((0.0, _TITLE), (chance.uniform(0.05, 0.4), _TAGS)):
        message = {"role": "user", "content": text.replace("HISTORY", history)}
        sessions.append((delay, (Turn((message,), knobs.reply(chance.randint(10, 22)), 0.0),)))
    return sessions


APPS: dict[str, App] = {
    app.name: app
    for app in (
        App("voice", "voice assistant: entity list and tools, 2,200 tokens, short replies", 20.0, False, _voice),
        App("chat", "growing chats: 6 to 10 turns with their history", 150.0, False, _chat),
        App("documents", "questions on four documents of 1,500 to 3,500 tokens", 45.0, False, _documents),
        App("agent", "coding agent: tasks of 9 to 12 steps, 4,000 to 7,000 tokens", 150.0, False, _agent),
        App("camera", "a caption each 10 s, one-shot", 10.0, True, _camera),
        App("titles", "side requests of a chat program: title, then tags", 45.0, False, _titles),
    )
}

HOUSEHOLD = "household"
WORKLOADS: dict[str, tuple[str, ...]] = {**{name: (name,) for name in APPS}, HOUSEHOLD: tuple(APPS)}
"""Name -> its apps."""


def plan(workload: str, *, seed: int = 0, duration: float, scale: float = 1.0, rate: float = 1.0) -> Plan:
    """The plan of a workload. `rate` 2 means twice as many sessions a minute, and half the think times.

    Raises ConfigError with what is allowed.
    """
    if workload not in WORKLOADS:
        raise ConfigError(f"There is no workload {workload!r}: there are {', '.join(WORKLOADS)}.")
    for name, value in (("--duration", duration), ("--scale", scale), ("--rate", rate)):
        if not 0 < value < 1e6:
            raise ConfigError(f"{name} must be a number above 0, not {value:g}.")
    knobs = Knobs(seed, scale, rate)
    sessions = [session for name in WORKLOADS[workload] for session in _sessions(APPS[name], knobs, duration)]
    order = list(APPS)
    sessions.sort(key=lambda session: (session.start, order.index(session.app), session.number))
    return Plan(workload, seed, scale, rate, duration, tuple(sessions))


def _sessions(app: App, knobs: Knobs, duration: float) -> Iterator[Session]:
    number = 0
    for index, begin in enumerate(arrivals(app, knobs)):
        if begin >= duration:
            return
        for delay, turns in app.make(knobs, index):
            start = begin + delay
            if start < duration:
                yield Session(app.name, number, round(start, 6), turns)
                number += 1


def arrivals(app: App, knobs: Knobs) -> Iterator[float]:
    """When sessions begin, in seconds, without end: the first within a quarter of the interval, at most 8 s."""
    chance = knobs.chance("arrivals", app.name)
    interval = app.interval / knobs.rate
    at = chance.uniform(0.0, min(interval / 4, 8.0 / knobs.rate))
    while True:
        yield at
        at += interval if app.fixed else chance.expovariate(1.0 / interval)

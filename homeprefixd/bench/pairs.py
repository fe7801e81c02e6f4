"""How often explanations are right: pairs of prompts that somebody has written, each with the cause that it shows.

A file of pairs is JSON: a list of objects like

    {
      "name": "a clock in the system message",
      "before": {"messages": [{"role": "system", "content": "It is 21:15. ..."}, {"role": "user", "content": "Hi"}],
                 "reply": "Hello."},
      "after": {"messages": [{"role": "system", "content": "It is 21:16. ..."}, {"role": "user", "content": "Hi"}]},
      "cause": "clock",
      "place": "system message"
    }

`before` is what an app sent first, `after` what it sent next. Both have `messages`, as in OpenAI's API but with text
as content (`tool_calls`, `reasoning_content` as there), or `text`, a finished prompt. Also `tools`; `template`: chatml
(the default), llama, mistral, or the text of a jinja template; `now`: the clock of the template, as 2026-11-29T21:15.
`reply`, of `before`: what was answered, as the model wrote it (thoughts in `<think>`). `cause` is a key of
`explain.causes.CAUSES` that two prompts can show; `goes_on` where nothing is lost, also where only what is asked last
is another. What only the cache or the tokenizer can know (`never_seen`, `too_short`, `evicted`, ...) is never said of
a pair; `retokenised` is where the template writes a reply's tool calls otherwise than the model did. `place`: a part
of the name of the section in which `after` leaves `before` (`system message`, `message 3 (user)`, counted from 1 with
the system message, `the tool NAME`, `the tools`, `the template`, `the prompt`); left out: any.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from ..chat.prompt import PromptBuilder
from ..errors import HomeprefixdError, RequestError
from ..explain.causes import CAUSES
from ..explain.differences import difference
from ..explain.prompt import Prompt
from ..frames.worker import Message

CHATML = (
    "{%- if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "# Tools\n\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n"
    "{%- else %}{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n"
    "{% endif %}"
    "{%- endif %}{% for m in messages %}{% if not (loop.first and m.role == 'system') %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
"""In the manner of Qwen: tools behind the system message, thoughts kept."""

LLAMA = (
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: {{ strftime_now('%d %b %Y, %H:%M') }}\n\n{% if messages[0].role == 'system' %}"
    "{{ messages[0].content | trim }}"
    "{% endif %}<|eot_id|>{% for m in messages %}{% if m.role != 'system' %}<|start_header_id|>{{ m.role }}"
    "<|end_header_id|>\n\n{% if tools and loop.index0 == 1 %}Given these functions:\n\n{% for t in tools %}"
    "{{ t | tojson(indent=4) }}\n\n{% endfor %}{% endif %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
"""In the manner of Llama 3: its own date, tools in the first user message."""

MISTRAL = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
"""In the manner of Mistral: all tools in one list of JSON, before everything."""

TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL}
NOTHING = "goes_on"
NOW = datetime(2026, 11, 29, 21, 15)
_SECONDS = 5.0  # that a template may take
_MOST_BYTES = 64 << 20


class Sent(msgspec.Struct, forbid_unknown_fields=True):
    """What an app sends, and what it got: exactly one of `messages` and `text`."""

    messages: list[Message] = []
    tools: list[dict[str, Any]] = []
    text: str = ""
    reply: str = ""
    template: str = "chatml"
    now: str = ""  # of the template's clock, ISO 8601; "": NOW

    @property
    def clock(self) -> datetime:
        """Raises ValueError."""
        return datetime.fromisoformat(self.now) if self.now else NOW

    def prompt(self) -> Prompt:
        """Raises HomeprefixdError where the template does not take it."""
        if self.text:
            return Prompt(self.text, reply=self.reply)
        source = TEMPLATES.get(self.template, self.template)
        builder = PromptBuilder(source, "<s>", "</s>", _SECONDS, now=lambda: self.clock)
        return Prompt(builder.render(self.messages, self.tools or None, {}), self.messages, self.tools, self.reply)


class Pair(msgspec.Struct, forbid_unknown_fields=True):
    """Two prompts, and what is expected to be said of them."""

    name: str
    before: Sent
    after: Sent
    cause: str
    place: str = ""


class Judged(msgspec.Struct, frozen=True):
    """What was said of a pair. `place` "": nothing was found to be lost."""

    name: str
    cause: str
    place: str
    expected_cause: str
    expected_place: str
    lead: str = ""
    before: str = ""
    after: str = ""

    @property
    def right(self) -> bool:
        return self.cause == self.expected_cause and (self.cause == NOTHING or self.expected_place in self.place)


def read_pairs(file: Path) -> list[Pair]:
    """Raises RequestError, which says what is wrong, or OSError."""
    with file.open("rb") as data:
        text = data.read(_MOST_BYTES)
    try:
        pairs = msgspec.json.decode(text, type=list[Pair])
    except msgspec.DecodeError as error:
        raise RequestError(f"{file} is not a file of pairs: {error}") from error
    for number, pair in enumerate(pairs, 1):
        where = f"{file}, pair {number} ({pair.name!r})"
        if pair.cause not in CAUSES:
            raise RequestError(f"{where}: there is no cause {pair.cause!r}; there are {', '.join(sorted(CAUSES))}")
        for name, sent in (("before", pair.before), ("after", pair.after)):
            if bool(sent.messages) == bool(sent.text):
                raise RequestError(f"{where}: `{name}` must have either `messages` or `text`")
            try:
                _ = sent.clock
            except ValueError as error:
                raise RequestError(f"{where}: `{name}.now` is no time as 2026-11-29T21:15: {error}") from error
    if not pairs:
        raise RequestError(f"{file} has no pairs")
    return pairs


def judge(pair: Pair) -> Judged:
    """What is said of a pair. Raises RequestError where a template does not take its messages."""
    try:
        found = difference(pair.before.prompt(), pair.after.prompt())
    except HomeprefixdError as error:
        raise RequestError(f"{pair.name}: {error.message}") from error
    if found is None:
        return Judged(pair.name, NOTHING, "", pair.cause, pair.place)
    shown = found.lead, found.before, found.after
    return Judged(pair.name, found.cause, found.part, pair.cause, pair.place, *shown)


def share_right(judged: Sequence[Judged]) -> float:
    """0 to 1."""
    return sum(one.right for one in judged) / len(judged) if judged else 0.0

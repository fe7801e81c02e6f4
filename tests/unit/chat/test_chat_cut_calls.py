"""A call that is cut short: what was written of it is known to the letter."""

from __future__ import annotations

import pytest

from homeprefixd.chat.layout import Calls, Layout
from homeprefixd.chat.reply import ReplyParser

THOUGHTS = ("<think>", "</think>")

CUT: list[tuple[Layout, str, str]] = [
    (Layout("hermes"), "", '<tool_call>\n{"name": "set", "arguments": {\n  "a": "li'),
    (Layout("hermes"), "Yes.\n", '<tool_call>\n{"name": "set", "arguments": {"a": '),
    (Layout("hermes"), '<tool_call>\n{"name": "set", "arguments": {}}\n</tool_call>\n',
     '<tool_call>\n{"name": "set", "arguments": {"b'),
    (Layout("hermes", THOUGHTS), "<think>so</think>\n", '<tool_call>\n{"name": "set", "arguments": {"b'),
    (Layout("generic"), "", '{"name": "set", "arguments": {"a": [1, '),
    (Layout("llama3"), '{"name": "set", "parameters": {}}', '; {"name": "set", "parameters": {"x": 1'),
    (Layout("mistral"), "Well. ", '[TOOL_CALLS][{"name": "set", "arguments": {"x": tr'),
    (Layout("mistral_args"), "[TOOL_CALLS]set[ARGS]{}", '[TOOL_CALLS]set[ARGS]{"a": "b'),
    (Layout("harmony"), "<|channel|>analysis<|message|>so<|end|>",
     '<|start|>assistant<|channel|>commentary to=functions.set <|constrain|>json<|message|>{"a": 1'),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "before", "call"), CUT, ids=lambda value: getattr(value, "calls", None))
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_what_was_written_of_it_is_told(layout: Layout, before: str, call: str, size: int) -> None:
    parser = ReplyParser(layout, tools={"set": {}}, opened=False, calls=True, parallel=True, new_id=lambda: "id")
    written = before + call
    for at in range(0, len(written), size):
        parser.feed(written[at : at + size])
    parser.finish()
    assert parser.count
    assert parser.unfinished.lstrip() == call


@pytest.mark.parametrize("kind", ["hermes", "generic"])
def test_text_has_none(kind: Calls) -> None:
    parser = ReplyParser(Layout(kind), tools={"set": {}}, opened=False, calls=True, parallel=True, new_id=lambda: "id")
    parser.feed('Nothing <tool_call>{"no": 1}</tool_call>')
    parser.finish()
    assert parser.unfinished == ""

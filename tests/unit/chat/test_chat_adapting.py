"""Changes of messages one by one; which of them a template gets is in `test_chat_prompt.py`."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeprefixd.chat.adapting import Messages, adapted, alternating, one_call_at_a_time
from homeprefixd.errors import RequestError


def message(role: str, content: str = "", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(ident: str) -> dict[str, Any]:
    return {"id": ident, "function": {"name": "f", "arguments": {}}}


def plainly_one_call(messages: Messages) -> Messages:
    """As `one_call_at_a_time`, in the plainest way."""
    changed: Messages = []
    waiting = list(messages)
    while waiting:
        one = waiting.pop(0)
        calls = one.get("tool_calls", [])
        if len(calls) < 2:
            changed.append(one)
            continue
        results: Messages = []
        while waiting and waiting[0]["role"] == "tool":
            results.append(waiting.pop(0))
        for index, each in enumerate(calls):
            changed.append({**(one if index == 0 else message(one["role"])), "tool_calls": [each]})
            same = [result for result in results if result.get("tool_call_id") == each["id"]]
            others = [result for result in results if result.get("tool_call_id") not in [one["id"] for one in calls]]
            if own := (same or others)[:1]:
                results.remove(own[0])
                changed += own
        changed += results
    return changed


IDS = st.sampled_from("abc")
MESSAGES = st.lists(
    st.one_of(
        st.builds(message, st.sampled_from(["system", "user", "assistant"]), st.sampled_from(["", "x", "y"])),
        st.builds(
            lambda ids: message("assistant", "", tool_calls=[call(ident) for ident in ids]),
            st.lists(IDS, min_size=1, max_size=4),
        ),
        st.builds(lambda ident, n: message("tool", str(n), tool_call_id=ident), IDS, st.integers(0, 99)),
    ),
    max_size=12,
)


@given(MESSAGES)
def test_one_call_at_a_time_loses_nothing(messages: Messages) -> None:
    assert one_call_at_a_time(messages) == plainly_one_call(messages)


def test_a_result_is_never_told_as_another_calls() -> None:
    calls = message("assistant", tool_calls=[call("a"), call("b"), call("c")])
    results = [message("tool", "b's", tool_call_id="b"), message("tool", "whose?")]
    told = one_call_at_a_time([calls, *results])
    assert [one["content"] or one["tool_calls"][0]["id"] for one in told] == ["a", "whose?", "b", "b's", "c"]


def test_thoughts_of_messages_that_become_one_are_kept() -> None:
    some = [message("assistant", "x", reasoning_content="why x"), message("assistant", "y", reasoning_content="why y")]
    assert alternating([*some, message("assistant", "z")]) == [
        message("assistant", "x\n\ny\n\nz", reasoning_content="why x\n\nwhy y")
    ]
    assert some[0] == message("assistant", "x", reasoning_content="why x")  # which others may be made of, too


@given(MESSAGES)
def test_alternating(messages: Messages) -> None:
    changed = alternating(messages)
    for before, after in itertools.pairwise(changed):
        assert before["role"] != after["role"] or before["role"] in ("system", "tool") or "tool_calls" in before
    texts = [[text for one in some for text in one["content"].split("\n\n") if text] for some in (messages, changed)]
    assert texts[0] == texts[1]
    assert [one.get("tool_calls") for one in changed if "tool_calls" in one] == [
        one["tool_calls"] for one in messages if "tool_calls" in one
    ]


def test_a_template_that_takes_long_to_refuse_is_not_tried_for_ever() -> None:
    tried = []

    def render(messages: Messages) -> str:
        tried.append(messages)
        time.sleep(0.01)
        raise RequestError(f"no {len(tried)}", code="template_refused")

    many = [message("system", "a"), message("system", "b"), message("user", "c"), message("user", "d")]
    for seconds, least, most in ((0.0, 1, 1), (60.0, 5, 32)):
        tried.clear()
        with pytest.raises(RequestError, match=r"^no 1$"):
            adapted(many, render, seconds)
        assert least <= len(tried) <= most


def test_long_conversations_cost_their_length() -> None:
    """Each change may be tried with several others, and nobody else's prompt is made meanwhile."""
    many = [message("user", "x" * 3000) for _ in range(10_000)]
    calls = [call(str(number)) for number in range(9_999)]
    results = [message("tool", tool_call_id=str(number)) for number in reversed(range(9_999))]
    start = time.perf_counter()
    [whole] = alternating(many)
    assert len(whole["content"]) == 10_000 * 3002 - 2
    assert len(one_call_at_a_time([message("assistant", tool_calls=calls), *results])) == 2 * 9_999
    assert time.perf_counter() - start < 2

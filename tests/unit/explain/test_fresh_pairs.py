"""Pairs by somebody who had not seen the code, as they were written, and pairs of what they showed to be wrong.

`fresh_pairs.json` was written before anything was run, and is left as it is, also where more was expected than two
prompts can show: `never_seen` is never said of a pair (four of them), blanks behind a reply are nothing that is lost,
a history cut behind its first question counts as truncated, and one reply begins with a line end that its template
does not write.

`third_pairs.json` was written later, by somebody else who had seen only the form and the causes, after all of that was
mended: 58 of its 60 were right at the first try. The other two ("a lock as an emoji", and an older question from which
the found passages were taken) were mended after that.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from homeprefixd.bench.pairs import Pair, judge, read_pairs, share_right
from homeprefixd.explain.causes import CAUSES
from homeprefixd.explain.differences import difference
from homeprefixd.explain.prompt import Prompt
from homeprefixd.frames.worker import Message

HERE = Path(__file__).parent
FRESH = read_pairs(HERE / "fresh_pairs.json")
THIRD = read_pairs(HERE / "third_pairs.json")
MENDED = read_pairs(HERE / "mended_pairs.json")
OF_THE_CACHE = {
    "other_namespace", "other_model", "evicted", "computed_faster", "cache_off", "prompt_logprobs", "too_short",
    "rule_applied", "rule_moved", "not_kept", "store_away", "not_loaded",
}  # fmt: skip


def test_each_cause_has_four_pairs() -> None:
    counts = {cause: sum(pair.cause == cause for pair in FRESH) for cause in CAUSES}
    assert {cause for cause, count in counts.items() if count < 4} == OF_THE_CACHE


@pytest.mark.parametrize("pairs", [FRESH, THIRD], ids=["fresh", "third"])
def test_nine_in_ten_are_right(pairs: list[Pair]) -> None:
    judged = [judge(pair) for pair in pairs]
    assert share_right(judged) >= 0.9, [one for one in judged if not one.right]


@pytest.mark.parametrize("pair", [*MENDED, *THIRD], ids=lambda pair: pair.name)
def test_what_was_mended(pair: Pair) -> None:
    told = judge(pair)
    assert told.right, told


def test_a_reply_full_of_brackets_is_quick() -> None:
    """Each might begin a tool call: with each of them tried on the whole text, it would take a minute."""
    call = {"function": {"name": "{", "arguments": {}}}
    asked = Message("user", "q")
    before = Prompt("<s>q", [asked], reply='{"a":[1,' * 3000)
    after = Prompt('<s>q{"x', [asked, Message("assistant", tool_calls=[call])])
    begin = time.thread_time()
    found = difference(before, after)
    assert time.thread_time() - begin < 10
    assert found is not None
    assert found.cause == "history_edited"

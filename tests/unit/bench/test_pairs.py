"""A file of pairs, by whomever it was written, is judged; what is wrong with it is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from homeprefixd.bench.pairs import NOTHING, judge, read_pairs, share_right
from homeprefixd.cli.bench_explain import explain
from homeprefixd.errors import RequestError

HOUSE = "\n".join(f"{number}. The lamp in room {number} stays as it is." for number in range(20))


def sent(first: str, question: str = "Is it warm?", **more: Any) -> dict[str, Any]:
    content = f"You answer in this house.\n{first}\n{HOUSE}"
    return {"messages": [{"role": "system", "content": content}, {"role": "user", "content": question}], **more}


CLOCK = {
    "name": "a clock",
    "before": sent("It is 21:15.", reply="Yes."),
    "after": sent("It is 21:16."),
    "cause": "clock",
    "place": "system message",
}
SAME = {"name": "the same", "before": sent("Hi."), "after": sent("Hi.", "Is it cold?"), "cause": NOTHING}
WRONG = {**CLOCK, "name": "no counter", "cause": "counter"}
ELSEWHERE = {**CLOCK, "name": "elsewhere", "place": "tool"}
TEXT = {
    "name": "a finished prompt",
    "before": {"text": f"Now: 21:15:01\n{HOUSE}\nQ: warm?\nA:"},
    "after": {"text": f"Now: 21:17:44\n{HOUSE}\nQ: cold?\nA:"},
    "cause": "clock",
}
TEMPLATE = {
    "name": "a template's clock",
    "before": sent("Hi.", template="llama"),
    "after": sent("Hi.", template="llama", now="2026-11-29T21:16"),
    "cause": "template_clock",
    "place": "template",
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def writer(*pairs: Any) -> Path:
        file = tmp_path / "pairs.json"
        file.write_text(json.dumps(list(pairs)))
        return file

    return writer


def test_pairs_are_judged(write: Callable[..., Path]) -> None:
    judged = [judge(pair) for pair in read_pairs(write(CLOCK, SAME, WRONG, ELSEWHERE, TEXT, TEMPLATE))]
    assert [one.right for one in judged] == [True, True, False, False, True, True]
    assert share_right(judged) == pytest.approx(4 / 6)
    assert (judged[0].before, judged[0].after) == ("21:15", "21:16")
    assert share_right([]) == 0


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "has no pairs"),
        ([{**CLOCK, "cause": "weather"}], "pair 1 ('a clock'): there is no cause 'weather'"),
        ([{**CLOCK, "after": {}}], "`after` must have either `messages` or `text`"),
        ([{**CLOCK, "befor": {}}], "befor"),
        ([{**CLOCK, "after": sent("Hi.", now="noon")}], "`after.now` is no time"),
        ([CLOCK["before"]], "is not a file of pairs"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(write: Callable[..., Path], pairs: list[Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_pairs(write(*pairs))
    assert message in caught.value.message


def test_a_template_that_takes_no_such_messages(write: Callable[..., Path]) -> None:
    [pair] = read_pairs(write({**CLOCK, "after": sent("Hi.", template="{{ raise_exception('no system') }}")}))
    with pytest.raises(RequestError, match="a clock: no system"):
        judge(pair)


def test_the_command(write: Callable[..., Path]) -> None:
    file = str(write(CLOCK, SAME, WRONG))
    told = CliRunner().invoke(explain, ["--pairs", file], standalone_mode=False)
    assert told.return_value == 1
    assert "2 of 3 are right: 67%" in told.output
    assert "WRONG" in told.output
    assert CliRunner().invoke(explain, ["--pairs", file, "--least", "0.6"], standalone_mode=False).return_value == 0
    found = json.loads(CliRunner().invoke(explain, ["--pairs", file, "--json"], standalone_mode=False).output)
    assert (round(found["share"], 2), [pair["right"] for pair in found["pairs"]]) == (0.67, [True, True, False])

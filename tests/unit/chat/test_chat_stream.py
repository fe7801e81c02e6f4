"""Text out of bytes: the result must not depend on where the bytes were cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeprefixd.chat.stream import TextStream


def run(stops: list[str], pieces: list[bytes]) -> tuple[str, str | None, list[str]]:
    stream = TextStream(stops)
    released = [stream.feed(piece) for piece in pieces]
    released.append(stream.flush())
    return "".join(released), stream.stopped, released


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


# A small alphabet makes overlaps of stop strings with each other and with the text likely.
SMALL = st.text(alphabet="abé€😀", max_size=30)
STOPS = st.lists(st.text(alphabet="abé€😀\ufffd", max_size=5), max_size=4)
BYTES = st.one_of(
    SMALL.map(str.encode),
    st.binary(max_size=30),
    st.lists(st.sampled_from([b"a", b"\xe2", b"\x82", b"\xac", b"\xf0", b"\x9f", b"\xed", b"\xa0"])).map(b"".join),
)


@given(BYTES, STOPS, st.lists(st.integers(0, 100), max_size=30))
def test_any_split_gives_the_same_as_the_whole(data: bytes, stops: list[str], places: list[int]) -> None:
    whole = run(stops, [data])[:2]
    assert run(stops, cut(data, places))[:2] == whole
    assert run(stops, [data[i : i + 1] for i in range(len(data))])[:2] == whole


@given(BYTES, STOPS)
def test_the_result_is_the_text_before_the_stop_that_is_complete_first(data: bytes, stops: list[str]) -> None:
    text = data.decode("utf-8", "replace")
    ends = [(end, start, text[start:end]) for end in range(len(text) + 1) for start in range(end)]
    expected = next(((start, stop) for end, start, stop in ends if stop in stops), (len(text), None))
    assert run(stops, [data])[:2] == (text[: expected[0]], expected[1])


@given(SMALL, STOPS, st.lists(st.integers(0, 100), max_size=30))
def test_nothing_that_could_begin_a_stop_string_is_released(text: str, stops: list[str], places: list[int]) -> None:
    stream = TextStream(stops)
    seen = b""
    released = ""
    for piece in cut(text.encode(), places):
        seen += piece
        released += stream.feed(piece)
        decoded = seen.decode("utf-8", "ignore")
        begun = [n for stop in stops for n in range(1, len(stop)) if decoded.endswith(stop[:n])]
        if stream.stopped is None:
            assert released == decoded[: len(decoded) - max(begun, default=0)]


@given(SMALL, st.lists(st.integers(0, 100), max_size=30))
def test_without_stops_only_unfinished_characters_wait(text: str, places: list[int]) -> None:
    stream = TextStream([])
    seen = b""
    released = ""
    for piece in cut(text.encode(), places):
        seen += piece
        released += stream.feed(piece)
        assert released == seen.decode("utf-8", "ignore")


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["END"], [b"one E", b"N", b"D two"], ("one ", "END", ["one ", "", "", ""])),
        (["END"], [b"one E", b"N", b"X two"], ("one ENX two", None, ["one ", "", "ENX two", ""])),
        (["END"], [b"one EN"], ("one EN", None, ["one ", "EN"])),
        (["\n\n"], [b"a\n", b"b\n", b"\n"], ("a\nb", "\n\n", ["a", "\nb", "", ""])),
        (["abcX", "bc"], [b"ab", b"c", b"X"], ("a", "bc", ["", "a", "", ""])),
        (["bc", "c"], [b"a", b"b", b"c"], ("a", "bc", ["a", "", "", ""])),
        ([""], [b"abc"], ("abc", None, ["abc", ""])),
        ([], [b"\xf0\x9f", b"\x98", b"\x80"], ("😀", None, ["", "", "😀", ""])),
        ([], [b"\xf0\x9f"], ("\ufffd", None, ["", "\ufffd"])),
        (["€"], [b"a\xe2\x82", b"\xacb"], ("a", "€", ["a", "", ""])),
    ],
)
def test_cases(stops: list[str], pieces: list[bytes], expected: tuple[str, str | None, list[str]]) -> None:
    assert run(stops, pieces) == expected


def test_after_a_stop_nothing_more_is_said() -> None:
    stream = TextStream(["x"])
    assert stream.feed(b"ax") == "a"
    assert stream.feed(b"more") == ""
    assert stream.flush() == ""
    assert stream.stopped == "x"

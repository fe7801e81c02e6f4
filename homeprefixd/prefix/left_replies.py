"""Which way beside a path is the reply that its own chat has left.

Templates strip thoughts and write calls anew, so the next turn of a chat may not go on from its last reply as it was
generated, but from the same reply rendered anew; and nobody comes back to the first. Other ways beside the path are
other chats', which began alike, or another answer to the same question, and somebody may go on from those.

A turn leaves one such reply at most, and it is told by what is in it: most of what the path has in its place. So it is
looked for once, when the chat has gone on for two turns; where nothing is like enough, nothing goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from struct import iter_unpack
from typing import NamedTuple

from .blocks import BLOCK_TOKENS, KEY_BYTES, common_tokens
from .tree import Placed
from .ways import TooManyError, Ways

_GRAM = 16  # bytes of the four tokens that are compared at a time
_RENDERED = 256  # tokens behind the fork that are compared
_COMPARED = 16384  # tokens of ways, in all
_LEAST = 3  # of fours that agree: less says nothing
_MARKS = 3  # fours at the end of a rendered reply that have its closing marks, which are not computed when it ends


class Turn(NamedTuple):
    """A turn of the path that is over. Positions, in tokens."""

    begin: int  # where its prompt ended
    own: int  # up to where the path has what was generated itself
    reply_end: int  # of its reply, as the path has it
    end: int  # of the next prompt
    asked: float  # when that one came, Unix time, s


def left_reply(ways: Ways, path: Sequence[Placed], turn: Turn) -> list[Placed]:
    """The nodes of the reply that was left in this turn and of no other way, its beginning first; empty if none is."""
    best, most, above = list[Placed](), 0.0, path[0]
    tokens = 0
    try:
        for node, following, rest in _forks(path, turn):
            for top in ways.aside(node, following):
                common = common_tokens(top.tree_key[KEY_BYTES:], following.tree_key[KEY_BYTES:])
                if top.record.kind != "reply" or not max(turn.begin, turn.own) <= node.end + common < turn.end:
                    continue
                rendered = _tokens(rest)[: (turn.reply_end - node.end) * 4][common * 4 : (common + _RENDERED) * 4]
                for way in ways.ends(top):
                    tokens += len(way) * BLOCK_TOKENS
                    if tokens > _COMPARED:
                        return []
                    like = _likeness(rendered, _tokens(way)[common * 4 :])
                    if like > most:
                        best, most, above = way, like, node
        return _alone(ways, above, best, turn.asked)
    except TooManyError:
        return []


def _forks(path: Sequence[Placed], turn: Turn) -> Iterator[tuple[Placed, Placed, Sequence[Placed]]]:
    """Each node of the path in the turn, the next one, and what is compared from there on; the last first."""
    for index, (node, following) in reversed(list(enumerate(pairwise(path)))):
        if following.end > turn.begin and node.end < turn.end:
            yield node, following, path[index + 1 : index + 8]
        elif following.end <= turn.begin:
            return


def _tokens(nodes: Sequence[Placed]) -> bytes:
    """Big-endian u32."""
    return b"".join(node.tree_key[KEY_BYTES:] for node in nodes)


def _likeness(rendered: bytes, reply: bytes) -> float:
    """Which part of the shorter is in the other one; 0 if it is not enough."""
    ours, theirs = _fours(rendered), _fours(reply)
    agree = len(ours & theirs)
    shorter = min(len(ours), len(theirs))
    return agree / shorter if agree >= _LEAST and 2 * agree >= shorter - _MARKS else 0.0


def _fours(tokens: bytes) -> set[tuple[bytes]]:
    """All four tokens that follow each other."""
    found = set[tuple[bytes]]()
    for start in range(0, _GRAM, 4):
        found.update(iter_unpack(f"{_GRAM}s", tokens[start : start + (len(tokens) - start) // _GRAM * _GRAM]))
    return found


def _alone(ways: Ways, above: Placed, way: list[Placed], asked: float) -> list[Placed]:
    """The end of a way that no other one shares; empty if it is no reply that was generated before `asked`, or if
    somebody goes on from it. `above`: what it leaves."""
    begin = len(way)
    while begin and sum(not child.is_edge for child in ways.children(way[begin - 1].record.key)) <= (begin < len(way)):
        begin -= 1
    alone = way[begin:]
    if any(node.record.kind != "reply" or max(node.record.created, node.record.last_use) > asked for node in alone):
        return []
    end = alone[-1].tree_key if alone else b""
    beside = ways.children((way[-2] if len(way) > 1 else above).record.key)
    is_begun = any(child.tree_key != end and child.tree_key.startswith(end) for child in beside)
    return [] if is_begun else alone

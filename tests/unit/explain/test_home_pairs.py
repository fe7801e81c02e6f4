"""What a home's apps send: each pair is explained with the place and the cause that a person holds right."""

from __future__ import annotations

import pytest
from home_pairs import CAUSES, FORM, SHORT, Expected, P
from test_account import Worker, timings

from homeprefixd.explain.conclude import conclude
from homeprefixd.explain.differences import difference

OF_THE_CACHE = {"never_seen", "retokenised"}


def places(expected: Expected) -> list[str]:
    """Parts of names of sections, of which any is right."""
    found = []
    for section in expected.section.split("|"):
        kind, _, name = section.partition(":")
        found.append(
            {"message": f"message {int(name) + 1} (" if kind == "message" else "", "tool": f"tool {name}"}[kind]
            if name
            else {"system": "system message", "tools": "tool", "template": "template", "none": ""}[kind]
        )
    if expected.cause in ("tools_order", "json_keys"):
        found.append("the tools")
    return found


def causes(expected: Expected) -> set[str]:
    clock = expected.cause == "clock" and expected.section == "template"
    return {"template_clock"} if clock else CAUSES[expected.cause]


def test_there_are_enough() -> None:
    assert len(P) == 67
    assert len({one.name for one in P}) == len(P)


@pytest.mark.parametrize(
    "expected", [one for one in P if one.cause not in OF_THE_CACHE], ids=lambda expected: expected.name
)
def test_what_a_person_holds_right(expected: Expected) -> None:
    found = difference(expected.first.prompt(), expected.second.prompt())
    cause = found.cause if found is not None else "goes_on"
    assert cause in causes(expected), found
    if found is not None and expected.name not in FORM:
        assert any(place in found.part for place in places(expected)), found


@pytest.mark.parametrize(
    "expected", [one for one in P if one.cause in OF_THE_CACHE], ids=lambda expected: expected.name
)
def test_what_only_the_cache_can_know(expected: Expected) -> None:
    worker = Worker()
    worker.ask("a", expected.first, expected.first.reply or "Done.")
    account, count = worker.ask("b", expected.second)
    told = conclude("b", account, timings(account.known, count - account.known), 10.0)
    assert told.cause in (CAUSES[expected.cause] if expected.name != SHORT else {"goes_on"}), told

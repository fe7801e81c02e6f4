"""A measured figure beside its bar: what all reports of `bench` end in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One line of the report. `value` is None where it was not measured, and `note` says why."""

    what: str
    value: float | None
    bar: str
    met: bool | None
    note: str


def at_most(what: str, value: float | None, bar: float | None, note: str) -> Row:
    """`value` may be `bar` at most; without a bar or a value nothing is judged."""
    met = None if value is None or bar is None else value <= bar
    return Row(what, value, "" if bar is None else f"<= {bar:.3g}", met, note)


def at_least(what: str, value: float | None, bar: float | None, note: str) -> Row:
    """`value` must be `bar` at least; without a bar or a value nothing is judged."""
    met = None if value is None or bar is None else value >= bar
    return Row(what, value, "" if bar is None else f">= {bar:.3g}", met, note)


def all_met(rows: list[Row]) -> bool:
    """Is no bar missed?"""
    return all(row.met is not False for row in rows)

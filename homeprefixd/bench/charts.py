"""Charts as inline SVG, drawn by hand: no script, nothing to load. Colours are CSS classes, so that a page may be dark.

WIDTH is that of a phone, so letters stay readable there; wider screens scale the drawing up. Series `n` has the class
`cN`. Every mark has a <title>, which browsers show when it is pointed at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

WIDTH = 420
_LEFT, _RIGHT, _BOTTOM, _TOP = 54, 12, 34, 8
_ROW = 40  # height of a row with its label above it
_PLOT = 210  # height of a plot with two axes

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points of one colour; a title for each point, or none."""

    label: str
    colour: int
    points: Sequence[Point]
    titles: Sequence[str] = ()


@dataclass(frozen=True)
class Bar:
    """A row: its label, and either values to mark on an axis or parts to stack. None values are left out."""

    label: str
    colour: int
    values: Sequence[tuple[str, float | None]]


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` onto 0..1, with the ticks to show."""

    low: float
    high: float
    log: bool
    ticks: Sequence[float]
    text: Callable[[float], str]

    def place(self, value: float) -> float:
        """0 at `low`, 1 at `high`, held inside."""
        if self.log:
            value, low, high = (math.log10(max(x, self.low)) for x in (value, self.low, self.high))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low)))


def seconds(value: float) -> str:
    """`3 ms`, `250 ms`, `1.5 s`, `120 s`."""
    if value < 0.9995:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} s" if value < 1000 else f"{value:.0f} s"


def log_axis(values: Sequence[float], text: Callable[[float], str] = seconds) -> Axis:
    """Whole decades around the positive ones of `values`, at least one."""
    positive = [value for value in values if value > 0] or [0.1, 1.0]
    low = math.floor(math.log10(min(positive)) + 1e-9)
    high = max(low + 1, math.ceil(math.log10(max(positive)) - 1e-9))
    return Axis(10.0**low, 10.0**high, True, [10.0**exponent for exponent in range(low, high + 1)], text)


def linear_axis(values: Sequence[float], text: Callable[[float], str], most: int = 5) -> Axis:
    """From 0 to a round number above `values`, with at most `most` steps of 1, 2 or 5 times a power of ten."""
    top = max([value for value in values if math.isfinite(value)], default=0.0) or 1.0
    raw = top / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    count = math.ceil(top / step - 1e-9)
    return Axis(0.0, count * step, False, [index * step for index in range(count + 1)], text)


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    body = "\n".join(parts)
    box = f"0 0 {WIDTH} {height:.0f}"
    return f'<svg viewBox="{box}" role="img" aria-label={quoteattr(label)}>\n{body}\n</svg>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


_SHAPES: dict[str, str] = {
    "p50": "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0z",
    "p95": "M0,-6L6,0L0,6L-6,0z",
    "p99": "M-5,5L0,-5L5,5z",
    "max": "M-1.5,-6h3v12h-3z",
}
"""Marks differ in shape as well, for those who see no colours; others than these are circles."""


def _mark(x: float, y: float, name: str, colour: int, title: str) -> str:
    shape = _SHAPES.get(name, _SHAPES["p50"])
    where = f"translate({x:.1f},{y:.1f})"
    return f'<path d="{shape}" transform="{where}" class="f{colour}"><title>{escape(title)}</title></path>'


def marks(rows: Sequence[Bar], label: str) -> str:
    """Each row's percentiles on one logarithmic axis, joined by a line: where half, most and nearly all lie."""
    axis = log_axis([value for row in rows for _, value in row.values if value is not None])
    width = WIDTH - 2 * _RIGHT
    bottom = len(rows) * _ROW + _TOP
    parts = []
    for tick in axis.ticks:
        x = _RIGHT + width * axis.place(tick)
        parts.append(_line(x, _TOP, x, bottom, "grid"))
        anchor = "start" if tick == axis.ticks[0] else "end" if tick == axis.ticks[-1] else "middle"
        parts.append(_text(x, bottom + 16, axis.text(tick), "muted", anchor))
    for number, row in enumerate(rows):
        y = _TOP + number * _ROW + 25
        known = [(name, value) for name, value in row.values if value is not None]
        parts.append(_text(_RIGHT, y - 12, row.label))
        if not known:
            parts.append(_text(_RIGHT + width, y - 12, "nothing measured", "muted", "end"))
            continue
        xs = [_RIGHT + width * axis.place(value) for _, value in known]
        parts.append(_line(min(xs), y, max(xs), y, f"l{row.colour} thick"))
        for (name, value), x in zip(known, xs, strict=True):
            parts.append(_mark(x, y, name, row.colour, f"{row.label}: {name} {seconds(value)}"))
        parts.append(_text(_RIGHT + width, y - 12, " / ".join(seconds(value) for _, value in known), "muted", "end"))
    return _svg(bottom + 24, parts, label)


def stacked(rows: Sequence[Bar], label: str, text: Callable[[float], str]) -> str:
    """Each row's parts side by side, as shares of the longest row. The part number n has the class `pN`."""
    longest = max((sum(value or 0 for _, value in row.values) for row in rows), default=0.0) or 1.0
    width = WIDTH - 2 * _RIGHT
    parts = []
    for number, row in enumerate(rows):
        y = _TOP + number * _ROW + 18
        x = float(_RIGHT)
        parts.append(_text(_RIGHT, y - 5, row.label))
        total = sum(value or 0 for _, value in row.values)
        parts.append(_text(_RIGHT + width, y - 5, text(total), "muted", "end"))
        for index, (name, value) in enumerate(row.values):
            if not value:
                continue
            wide = width * value / longest
            title = f"{row.label}: {name} {text(value)}, {100 * value / total:.1f} %"
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="12" class="p{index}">'
                f"<title>{escape(title)}</title></rect>"
            )
            x += wide
    return _svg(len(rows) * _ROW + _TOP, parts, label)


def _axes(x_axis: Axis, y_axis: Axis, x_label: str) -> list[str]:
    width, bottom = WIDTH - _LEFT - _RIGHT, _TOP + _PLOT
    parts = []
    for tick in y_axis.ticks:
        y = bottom - _PLOT * y_axis.place(tick)
        parts.append(_line(_LEFT, y, _LEFT + width, y, "grid"))
        parts.append(_text(_LEFT - 5, y + 4, y_axis.text(tick), "muted", "end"))
    for tick in x_axis.ticks:
        x = _LEFT + width * x_axis.place(tick)
        if x_axis.log:
            parts.append(_line(x, _TOP, x, bottom, "grid"))
        anchor = "end" if tick == x_axis.ticks[-1] else "middle"
        parts.append(_text(x, bottom + 15, x_axis.text(tick), "muted", anchor))
    parts.append(_text(_LEFT + width / 2, bottom + 30, x_label, "muted", "middle"))
    return parts


def plot(
    series: Sequence[Series],
    x_axis: Axis,
    y_axis: Axis,
    x_label: str,
    label: str,
    *,
    lines: bool = False,
    bands: Sequence[tuple[float, float, int]] = (),
) -> str:
    """Points, or lines through them, over two axes. `bands`: (from, to, colour) along x, shaded."""
    width, bottom = WIDTH - _LEFT - _RIGHT, _TOP + _PLOT

    def x_of(value: float) -> float:
        return _LEFT + width * x_axis.place(value)

    def y_of(value: float) -> float:
        return bottom - _PLOT * y_axis.place(value)

    parts = []
    for begin, end, colour in bands:
        wide = max(1.5, x_of(end) - x_of(begin))
        parts.append(
            f'<rect x="{x_of(begin):.1f}" y="{_TOP}" width="{wide:.1f}" height="{_PLOT}" class="f{colour} band">'
            f"<title>restart, {seconds(end - begin)}</title></rect>"
        )
    parts += _axes(x_axis, y_axis, x_label)
    for one in series:
        if lines:
            path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in one.points)
            parts.append(
                f'<polyline points="{path}" class="l{one.colour} curve"><title>{escape(one.label)}</title></polyline>'
            )
            continue
        for index, (x, y) in enumerate(one.points):
            title = f"<title>{escape(one.titles[index])}</title>" if one.titles else ""
            shape = f'cx="{x_of(x):.1f}" cy="{y_of(y):.1f}"'
            parts.append(f'<circle {shape} r="3.2" class="f{one.colour} dot">{title}</circle>')
    return _svg(bottom + _BOTTOM + 2, parts, label)


def steps(values: Sequence[float]) -> list[Point]:
    """The share of values at most x, as points of a line: (x, share)."""
    ordered = sorted(values)
    points: list[Point] = []
    for index, value in enumerate(ordered):
        points += [(value, index / len(ordered)), (value, (index + 1) / len(ordered))]
    return points

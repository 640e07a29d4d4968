"""Histograms as SVG, coloured by the classes of the page around them."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from graphquant.errors import printable
from graphquant.sketch import distribution
from graphquant.view.histogram import axis_of, bars, heights, marks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphquant.numerics import Array, QParams
    from graphquant.sketch import Sketch
    from graphquant.view.histogram import Axis

WIDTH = 900
LEFT, RIGHT, TOP = 100, 200, 26
PLOT = 150
ROW = 17
BARS = 200
"""Bars of a large histogram, 3 units wide each."""

SMALL = (120, 20, 60)
"""Width, height and bars of a small one."""

Row = tuple[str, "QParams", str, bool]
"""A method, what it picks, what that costs in words, and whether it is what the tensor has."""

STYLE = """
svg text{font:11px system-ui,sans-serif;fill:var(--soft)}
.in{fill:var(--bar)}.out{fill:var(--cut)}.range{fill:var(--band)}.end{stroke:var(--ink);stroke-width:1.2}
.grid{stroke:var(--line);stroke-width:1}.row{stroke:var(--soft);stroke-width:2}.row.own{stroke:var(--bar);stroke-width:5}
text.own{fill:var(--ink);font-weight:600}text.mark{fill:var(--ink)}.cap{stroke:var(--cut);stroke-width:2}
"""
"""Colours are variables: --ink text, --soft its lesser kind, --line, --band of the range, --bar, --cut."""


def histogram(sketch: Sketch, params: QParams | None, rows: Sequence[Row] = ()) -> str:
    """A tensor's histogram with an axis, the range of `params` marked, and below it what each method would pick.

    The tensor has a histogram.
    """
    axis = axis_of(sketch, params)
    counts = bars(distribution(sketch), axis, BARS)
    bottom = TOP + PLOT
    height = bottom + 34 + ROW * len(rows) + (4 if rows else 0)
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="histogram">']
    if params is not None:
        left, right = (_across(axis, float(end)) for end in (params.range.low, params.range.high))
        parts.append(f'<rect class="range" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{PLOT}"/>')
    parts += _counts(counts)
    parts += _bars(heights(counts), marks(axis, params, BARS) if params is not None else (0, BARS))
    parts += _axis(axis, bottom)
    if params is not None:
        parts += _ends(axis, params, bottom)
    for number, row in enumerate(rows):
        parts += _row(axis, row, bottom + 44 + ROW * number)
    return "".join([*parts, "</svg>"])


def small(sketch: Sketch, params: QParams | None) -> str:
    """The same without words, for a line of a table."""
    width, height, number = SMALL
    if not sketch.counts.size:
        return ""
    params = None if params is None or params.axis is not None else params
    axis = axis_of(sketch, params)
    shown = heights(bars(distribution(sketch), axis, number))
    first, last = marks(axis, params, number) if params is not None else (0, number)
    step = width / number
    parts = [f'<svg class="small" viewBox="0 0 {width} {height}" aria-hidden="true">']
    if params is not None:
        x, span = first * step, (last - first) * step
        parts.append(f'<rect class="range" x="{x:.1f}" y="0" width="{span:.1f}" height="{height}"/>')
    for kind, start, stop in _sides(first, last, number):
        parts.append(_path(kind, shown[start:stop], start * step, step, height, height))
    return "".join([*parts, "</svg>"])


def channels(sketch: Sketch, params: QParams | None) -> str:
    """From the smallest to the largest value of each channel, one bar each; lines where the range of `params` ends."""
    low, high = sketch.low.reshape(-1), sketch.high.reshape(-1)
    ends = [low, high] if params is None else [low, high, params.range.low.reshape(-1), params.range.high.reshape(-1)]
    least = min(0.0, *(float(one[abs(one) < float("inf")].min(initial=0.0)) for one in ends))
    most = max(0.0, *(float(one[abs(one) < float("inf")].max(initial=0.0)) for one in ends)) or 1.0
    step = (WIDTH - LEFT - RIGHT) / low.size
    wide = min(step * 0.9, 24)

    def up(value: float) -> float:
        return TOP + PLOT * (most - value) / (most - least)

    parts = [f'<svg viewBox="0 0 {WIDTH} {TOP + PLOT + 34}" role="img" aria-label="range of each channel">']
    for value in (least, 0.0, most):
        parts.append(f'<path class="grid" d="M{LEFT} {up(value):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for channel in range(low.size):
        x = LEFT + step * (channel + 0.5)
        if low[channel] <= high[channel]:
            y, tall = up(high[channel]), up(low[channel]) - up(high[channel])
            parts.append(
                f'<path class="in" d="M{x - wide / 4:.2f} {y:.1f}h{wide / 2:.2f}v{tall:.1f}h{-wide / 2:.2f}z"/>'
            )
        marked = [up(end[min(channel, end.size - 1)]) for end in ends[2:]]
        parts += [f'<path class="cap" d="M{x - wide / 2:.2f} {y:.1f}h{wide:.2f}"/>' for y in marked]
    parts.append(
        f'<text x="{LEFT}" y="{TOP + PLOT + 18}">channels 0 to {low.size - 1}, values in the tensor\'s unit</text>'
    )
    return "".join([*parts, "</svg>"])


def _across(axis: Axis, value: float) -> float:
    return LEFT + float(axis.place(value)) * (WIDTH - LEFT - RIGHT)


def _sides(first: int, last: int, number: int) -> list[tuple[str, int, int]]:
    """The bars left of the range, in it, and right of it."""
    parts = [("out", 0, first), ("in", first, last), ("out", last, number)]
    return [(kind, start, stop) for kind, start, stop in parts if start < stop]


def _path(kind: str, shown: Array, x: float, step: float, bottom: float, tall: float) -> str:
    """Bars as one outline."""
    steps = "".join(f"V{bottom - height * tall:.1f}h{step:.2f}" for height in shown)
    return f'<path class="{kind}" d="M{x:.1f} {bottom}{steps}V{bottom}z"/>'


def _bars(shown: Array, sides: tuple[int, int]) -> Iterator[str]:
    step = (WIDTH - LEFT - RIGHT) / BARS
    for kind, start, stop in _sides(*sides, BARS):
        yield _path(kind, shown[start:stop], LEFT + start * step, step, TOP + PLOT, PLOT - 4)


def _counts(counts: Array) -> Iterator[str]:
    """The scale on the left, values per bar: powers of ten, on which heights are logarithmic."""
    most = max(float(counts.max()), 1.0)
    powers = [10.0**exponent for exponent in range(19) if 10.0**exponent <= most]
    for power in powers[:: 1 + len(powers) // 5]:
        y = TOP + PLOT - math.log1p(power) / math.log1p(most) * (PLOT - 4)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{power:,.0f}</text>'


def _axis(axis: Axis, bottom: int) -> Iterator[str]:
    yield f'<path class="grid" d="M{LEFT} {bottom}H{WIDTH - RIGHT}"/>'
    for value in axis.ticks():
        x = _across(axis, value)
        yield f'<path class="grid" d="M{x:.1f} {bottom}v5"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{value:g}</text>'
    yield f'<text x="{WIDTH - RIGHT + 24}" y="{bottom + 4}">value, in its own unit</text>'
    if max(-axis.low, axis.high) > axis.knee * 1.001:
        yield f'<text x="{WIDTH - RIGHT + 24}" y="{bottom + 18}">log beyond ±{axis.knee:.3g}</text>'


def _ends(axis: Axis, params: QParams, bottom: int) -> Iterator[str]:
    """The ends of the range as lines with their values, the lower one left of its line."""
    for value, anchor, aside in ((float(params.range.low), "end", -3), (float(params.range.high), "start", 3)):
        x = _across(axis, value)
        yield f'<path class="end" d="M{x:.1f} {TOP - 6}V{bottom}"/>'
        yield f'<text class="mark" x="{x + aside:.1f}" y="{TOP - 10}" text-anchor="{anchor}">{value:.4g}</text>'


def _row(axis: Axis, row: Row, y: int) -> Iterator[str]:
    method, params, words, own = row
    kind = " own" if own else ""
    left, right = (min(max(_across(axis, float(end)), LEFT), WIDTH - RIGHT) for end in _limits(params))
    yield f'<text class="{kind}" x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{escape(printable(method))}</text>'
    yield f'<path class="row{kind}" d="M{left:.1f} {y}H{right:.1f}"/>'
    yield f'<text class="{kind}" x="{WIDTH - RIGHT + 10}" y="{y + 4}">{escape(words)}</text>'


def _limits(params: QParams) -> tuple[float, float]:
    return float(params.range.low), float(params.range.high)

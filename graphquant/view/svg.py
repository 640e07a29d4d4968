"""Histograms as SVG, coloured by the classes of the page around them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from graphquant.sketch import distribution
from graphquant.view.histogram import axis_of, bars, heights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.numerics import Array
    from graphquant.sketch import Sketch
    from graphquant.view.histogram import Axis

WIDTH = 900
LEFT, RIGHT, TOP = 100, 200, 26
PLOT = 150
BARS = 200
"""Bars of a large histogram, 3 units wide each."""

SMALL = (120, 20, 60)
"""Width, height and bars of a small one."""

STYLE = """
svg text{font:11px system-ui,sans-serif;fill:var(--soft)}.in{fill:var(--bar)}.grid{stroke:var(--line);stroke-width:1}
"""
"""Colours are variables: --soft of text, --line, --bar."""


def histogram(sketch: Sketch) -> str:
    """A tensor's histogram with an axis. The tensor has a histogram."""
    axis = axis_of(sketch, None)
    counts = bars(distribution(sketch), axis, BARS)
    bottom = TOP + PLOT
    parts = [f'<svg viewBox="0 0 {WIDTH} {bottom + 34}" role="img" aria-label="histogram">', *_counts(counts)]
    parts.append(_path(heights(counts), LEFT, (WIDTH - LEFT - RIGHT) / BARS, bottom, PLOT - 4))
    return "".join([*parts, *_axis(axis, bottom), "</svg>"])


def small(sketch: Sketch) -> str:
    """The same without words, for a line of a table."""
    width, height, number = SMALL
    if not sketch.counts.size:
        return ""
    shown = heights(bars(distribution(sketch), axis_of(sketch, None), number))
    drawn = _path(shown, 0, width / number, height, height)
    return f'<svg class="small" viewBox="0 0 {width} {height}" aria-hidden="true">{drawn}</svg>'


def channels(sketch: Sketch) -> str:
    """From the smallest to the largest value of each channel, one bar each."""
    low, high = sketch.low.reshape(-1), sketch.high.reshape(-1)
    ends = [low, high]
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
    parts.append(
        f'<text x="{LEFT}" y="{TOP + PLOT + 18}">channels 0 to {low.size - 1}, values in the tensor\'s unit</text>'
    )
    return "".join([*parts, "</svg>"])


def _across(axis: Axis, value: float) -> float:
    return LEFT + float(axis.place(value)) * (WIDTH - LEFT - RIGHT)


def _path(shown: Array, x: float, step: float, bottom: float, tall: float) -> str:
    """Bars as one outline."""
    steps = "".join(f"V{bottom - height * tall:.1f}h{step:.2f}" for height in shown)
    return f'<path class="in" d="M{x:.1f} {bottom}{steps}V{bottom}z"/>'


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

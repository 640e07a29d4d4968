"""Histograms: an axis that fits heavy tails, bar counts, and drawings as a line of text and as SVG.

SVG takes its colors from CSS variables of the page around it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphquant.observers import Distribution, Sketch, distribution_of

if TYPE_CHECKING:
    from graphquant.numerics import Array, QParams

# Far beyond the knee of the axis, each power of ten takes half the length from zero to the knee.
AXIS_BEND = 0.5 / math.log(10)
LINEAR_SHARE = 0.999  # share of the magnitudes on the linear part of the axis if there is no range
BAR_GLYPHS = " ▁▂▃▄▅▆▇█"
ASCII_BAR_GLYPHS = " .:-=+*#@"


@dataclass(frozen=True, slots=True)
class HistogramAxis:
    """Axis from `low` to `high` that is linear up to `knee` on both sides of zero and logarithmic beyond."""

    low: float
    high: float
    knee: float

    def positions(self, x: Array | float) -> Array:
        """Return the positions of `x`: 0 at the left end, 1 at the right end."""
        start, end = _bend(np.array([self.low, self.high]), self.knee)
        return np.asarray((_bend(np.asarray(x, np.float64), self.knee) - start) / (end - start))

    def values_at(self, positions: Array) -> Array:
        """Return the values at positions."""
        start, end = _bend(np.array([self.low, self.high]), self.knee)
        bent = start + positions * (end - start)
        with np.errstate(over="ignore"):
            beyond = np.sign(bent) * (1 + AXIS_BEND * np.expm1(np.maximum(np.abs(bent) - 1, 0) / AXIS_BEND))
            values = np.where(np.abs(bent) <= 1, bent, beyond) * self.knee
        return np.asarray(np.clip(values, self.low, self.high))

    def ticks(self, spacing: float = 0.08) -> list[float]:
        """Return labels at least `spacing` apart: zero, some round values of the linear part, powers of ten beyond."""
        smallest = self.knee / 4
        power = 10.0 ** math.floor(math.log10(smallest))
        step = next((factor * power for factor in (1, 2, 5) if factor * power >= smallest * 0.9999), 10 * power)
        candidates = [0.0] + [sign * step * number for number in range(1, 6) for sign in (1, -1)]
        candidates = [value for value in candidates if abs(value) <= self.knee * 1.0001]
        last = math.ceil(math.log10(max(abs(self.low), abs(self.high))) + 1e-9)
        for exponent in range(math.floor(math.log10(self.knee)) + 1, last + 1):
            candidates += [10.0**exponent, -(10.0**exponent)]
        chosen: list[float] = []
        for value in candidates:
            distances = (abs(self.positions(value) - self.positions(tick)) for tick in chosen)
            if self.low <= value <= self.high and all(distance >= spacing for distance in distances):
                chosen.append(value)
        return sorted(chosen)


def histogram_axis(sketch: Sketch, params: QParams | None) -> HistogramAxis:
    """Return the axis of a tensor. It covers all values and the range of `params`, whose larger end is the knee."""
    low, high = float(sketch.low), float(sketch.high)
    if params is None:
        magnitudes = distribution_of(sketch).magnitudes()
        knee = magnitudes.value_at_rank(max(1.0, math.ceil(LINEAR_SHARE * magnitudes.count)))
    else:
        range_ends = float(params.range.low.min()), float(params.range.high.max())
        low, high, knee = min(low, range_ends[0]), max(high, range_ends[1]), max(-range_ends[0], range_ends[1])
    low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        low, high = -1.0, 1.0
    smallest = max(abs(low), abs(high)) * 1e-30
    return HistogramAxis(low, high, max(knee, smallest))


def bar_counts(distribution_: Distribution, axis: HistogramAxis, bar_count: int) -> Array:
    """Return the number of values under each of `bar_count` bars of equal width, float64 (bar_count,)."""
    edges = axis.values_at(np.linspace(0, 1, bar_count + 1))
    below = distribution_.count_below(edges)
    below[0], below[-1] = 0.0, distribution_.count
    return np.diff(below)


def bar_heights(counts: Array) -> Array:
    """Return bar heights from 0 to 1 on a log scale, so that one value in a million stays visible."""
    visible = np.where(counts >= 0.5, counts, 0.0)  # noqa: PLR2004  # half a value: values are spread over bins
    return np.asarray(np.log1p(visible) / math.log1p(max(float(counts.max(initial=0.0)), 1.0)))


def range_marks(axis: HistogramAxis, params: QParams, bar_count: int) -> tuple[int, int]:
    """Return the first of `bar_count` bars inside the range of `params`, and the first bar after it."""
    ends = axis.positions(np.array([float(params.range.low), float(params.range.high)]))
    first, last = (int(mark) for mark in np.clip(np.rint(ends * bar_count), 0, bar_count))
    return min(first, bar_count - 1), max(last, min(first, bar_count - 1) + 1)


def histogram_line(
    sketch: Sketch, params: QParams | None, width: int, *, ascii_only: bool = False
) -> tuple[str, str, str]:
    """Return a histogram as text of `width` columns: before, inside and after the range.

    The middle text is in brackets. Without a range, or with one per channel, it is the whole histogram.
    """
    if not sketch.bits or not sketch.counts.size:
        return "", "", ""
    params = params if params is not None and params.axis is None else None
    axis = histogram_axis(sketch, params)
    bar_count = width if params is None else width - 2
    heights = bar_heights(bar_counts(distribution_of(sketch), axis, bar_count))
    glyphs = ASCII_BAR_GLYPHS if ascii_only else BAR_GLYPHS
    levels = np.where(heights > 0, np.clip(np.rint(heights * (len(glyphs) - 1)), 1, len(glyphs) - 1), 0).astype(int)
    text = "".join(glyphs[level] for level in levels)
    if params is None:
        return "", text, ""
    first, last = range_marks(axis, params, bar_count)
    return text[:first], f"[{text[first:last]}]", text[last:]


def _bend(x: Array, knee: float) -> Array:
    """Map `x / knee` to the axis: linear up to 1, logarithmic beyond, without a kink."""
    magnitude = np.abs(x) / knee
    bent = 1 + AXIS_BEND * np.log1p(np.maximum(magnitude - 1, 0) / AXIS_BEND)
    return np.asarray(np.where(magnitude <= 1, x / knee, np.sign(x) * bent))


PLOT_LEFT, PLOT_RIGHT, PLOT_TOP, PLOT_BOTTOM = 100, 700, 26, 176  # ends of the plot in a picture of 900 units
SVG_BARS = 200  # bars of a large histogram, 3 units wide each
THUMBNAIL_SIZE = (120, 20, 60)  # width, height and bars of a thumbnail

HISTOGRAM_STYLE = """
svg text{font:11px system-ui,sans-serif;fill:var(--soft)}.in{fill:var(--bar)}.grid{stroke:var(--line);stroke-width:1}
"""
"""CSS with variables for colors: --soft for text, --line, --bar."""


def histogram_svg(sketch: Sketch) -> str:
    """Return a histogram with axes. The sketch must have a histogram."""
    axis = histogram_axis(sketch, None)
    counts = bar_counts(distribution_of(sketch), axis, SVG_BARS)
    step = (PLOT_RIGHT - PLOT_LEFT) / SVG_BARS
    bars = _bars_path(bar_heights(counts), PLOT_LEFT, step, PLOT_BOTTOM, PLOT_BOTTOM - PLOT_TOP - 4)
    return _plot_svg("histogram", [*_count_axis(counts), bars, *_value_axis(axis)])


def histogram_thumbnail(sketch: Sketch) -> str:
    """Return a small histogram without text, for a table row."""
    width, height, bar_count = THUMBNAIL_SIZE
    if not sketch.counts.size:
        return ""
    heights = bar_heights(bar_counts(distribution_of(sketch), histogram_axis(sketch, None), bar_count))
    path = _bars_path(heights, 0, width / bar_count, height, height)
    return f'<svg class="small" viewBox="0 0 {width} {height}" aria-hidden="true">{path}</svg>'


def channel_ranges_svg(sketch: Sketch) -> str:
    """Return one bar from the smallest to the largest value for each channel."""
    low, high = sketch.low.reshape(-1), sketch.high.reshape(-1)
    finite = np.concatenate([low, high])
    finite = finite[np.isfinite(finite)]
    lowest, highest = float(finite.min(initial=0.0)), float(finite.max(initial=0.0)) or 1.0
    step = (PLOT_RIGHT - PLOT_LEFT) / low.size
    bar_width = min(step * 0.9, 24)

    def y_position(value: float) -> float:
        return PLOT_TOP + (PLOT_BOTTOM - PLOT_TOP) * (highest - value) / (highest - lowest)

    elements = []
    for value in (lowest, 0.0, highest):
        elements += _count_label(y_position(value), f"{value:.4g}")
    for channel in range(low.size):
        x = PLOT_LEFT + step * (channel + 0.5)
        if low[channel] <= high[channel]:
            y, height = y_position(high[channel]), y_position(low[channel]) - y_position(high[channel])
            outline = f"h{bar_width / 2:.2f}v{height:.1f}h{-bar_width / 2:.2f}z"
            elements.append(f'<path class="in" d="M{x - bar_width / 4:.2f} {y:.1f}{outline}"/>')
    caption = f"channels 0 to {low.size - 1}, values in the tensor's unit"
    elements.append(f'<text x="{PLOT_LEFT}" y="{PLOT_BOTTOM + 18}">{caption}</text>')
    return _plot_svg("range of each channel", elements)


def _plot_svg(label: str, elements: list[str]) -> str:
    opening = f'<svg viewBox="0 0 900 {PLOT_BOTTOM + 34}" role="img" aria-label="{label}">'
    return "".join([opening, *elements, "</svg>"])


def _bars_path(heights: Array, x: float, step: float, bottom: float, scale: float) -> str:
    """Return the bars as one outline."""
    steps = "".join(f"V{bottom - height * scale:.1f}h{step:.2f}" for height in heights)
    return f'<path class="in" d="M{x:.1f} {bottom}{steps}V{bottom}z"/>'


def _count_label(y: float, text: str) -> list[str]:
    """Return a grid line with a label at the left axis."""
    return [
        f'<path class="grid" d="M{PLOT_LEFT} {y:.1f}H{PLOT_RIGHT}"/>',
        f'<text x="{PLOT_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>',
    ]


def _count_axis(counts: Array) -> Iterator[str]:
    """Yield the left axis: powers of ten of values per bar, on a log scale."""
    largest = max(float(counts.max()), 1.0)
    powers = [10.0**exponent for exponent in range(19) if 10.0**exponent <= largest]
    for power in powers[:: 1 + len(powers) // 5]:
        y = PLOT_BOTTOM - math.log1p(power) / math.log1p(largest) * (PLOT_BOTTOM - PLOT_TOP - 4)
        yield from _count_label(y, f"{power:,.0f}")


def _value_axis(axis: HistogramAxis) -> Iterator[str]:
    yield f'<path class="grid" d="M{PLOT_LEFT} {PLOT_BOTTOM}H{PLOT_RIGHT}"/>'
    for value in axis.ticks():
        x = PLOT_LEFT + float(axis.positions(value)) * (PLOT_RIGHT - PLOT_LEFT)
        yield f'<path class="grid" d="M{x:.1f} {PLOT_BOTTOM}v5"/>'
        yield f'<text x="{x:.1f}" y="{PLOT_BOTTOM + 17}" text-anchor="middle">{value:g}</text>'
    yield f'<text x="{PLOT_RIGHT + 24}" y="{PLOT_BOTTOM + 4}">value, in its own unit</text>'
    if max(-axis.low, axis.high) > axis.knee * 1.001:
        yield f'<text x="{PLOT_RIGHT + 24}" y="{PLOT_BOTTOM + 18}">log beyond ±{axis.knee:.3g}</text>'

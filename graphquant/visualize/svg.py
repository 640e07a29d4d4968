"""SVG pictures for documents: drawings of models, and histograms.

Histograms take their colors from CSS variables of the page around them.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from graphquant.analysis.model_summary import MULTIPLYING_KINDS
from graphquant.errors import escape_unprintable
from graphquant.observers import distribution_of
from graphquant.visualize.annotations import annotation_text
from graphquant.visualize.drawing import drawn_shape
from graphquant.visualize.histogram_bars import bar_counts, bar_heights, histogram_axis
from graphquant.visualize.viewer_data import box_width, drawing_layout, short_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphquant.numerics import Array
    from graphquant.observers import Sketch
    from graphquant.visualize.drawing import Box, Drawing, Wire
    from graphquant.visualize.histogram_bars import HistogramAxis
    from graphquant.visualize.layout import Placement


BOX_HEIGHT, ROW_GAP, MARGIN = 52, 58, 24
"""Box height, room above a box, and outer margin; the viewer uses the same numbers."""

LETTER_WIDTH = 6.4
"""Width of a letter in a box."""

GRAPH_STYLE = """
text{font:10px system-ui,sans-serif;fill:#5b6470;text-anchor:middle}
.type{font-size:12px;font-weight:600;fill:#1b1f24}.label{text-anchor:start}
.annotation{font:10px ui-monospace,monospace;fill:#fff}
.wire{fill:none;stroke:#9aa5b1;stroke-width:1.2}.into{stroke-dasharray:5 4}
.frame{fill:#5a6e8c;fill-opacity:.05;stroke:#c9d0d8}.box{fill:#eef1f4;stroke:#c9d0d8}
.io{fill:#d6e4f7}.all{fill:#c5e8cd}.some{fill:#e6edbf}.float{fill:#f7d9a8}
.b4{fill:#7c3aed}.b8{fill:#0f766e}.b16{fill:#1d4ed8}.b32{fill:#64748b}.f8{fill:#be185d}
"""


def graph_svg(drawing: Drawing) -> str:
    """Return the drawing as SVG text; deterministic."""
    return "\n".join(_svg_lines(drawing)) + "\n"


def _svg_lines(drawing: Drawing) -> Iterator[str]:
    layout = drawing_layout(drawing)
    width = layout.width + 2 * MARGIN
    height = (max(layout.layer, default=-1) + 1) * (BOX_HEIGHT + ROW_GAP) + 2 * MARGIN
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-MARGIN} {-MARGIN} {width} {height}" width="{width}">'
    yield f"<title>{_svg_text(drawing.title)}</title><style>{GRAPH_STYLE}</style>"
    yield f'<rect x="{-MARGIN}" y="{-MARGIN}" width="{width}" height="{height}" fill="#fff"/>'
    yield from _group_frames(drawing, layout)
    pills: list[str] = []
    for number, (_, _, wires) in enumerate(drawing.tensors()):
        for wire in wires:
            yield _wire_path(drawing, layout, drawing.wires[wire], layout.trunks[number], layout.lanes[number], pills)
    for number, box in enumerate(drawing.boxes):
        yield _box_svg(drawing, box, layout.x[number], _box_top(layout, number))
    yield from pills
    yield "</svg>"


def _box_top(layout: Placement, number: int) -> int:
    return layout.layer[number] * (BOX_HEIGHT + ROW_GAP) + ROW_GAP


def _group_frames(drawing: Drawing, layout: Placement) -> Iterator[str]:
    """Yield a frame for each group, outer ones first and larger."""
    ends: dict[int, list[int]] = {}
    depths: dict[int, int] = {}
    for number, groups in enumerate(drawing.group_paths()):
        half_width, x, y = box_width(drawing.boxes[number]) // 2, layout.x[number], _box_top(layout, number)
        for depth, group in enumerate(reversed(groups)):
            left_edge, top, right_edge, bottom = ends.get(group, [x, y, x, y])
            ends[group] = [
                min(left_edge, x - half_width),
                min(top, y),
                max(right_edge, x + half_width),
                max(bottom, y + BOX_HEIGHT),
            ]
            depths[group] = max(depths.get(group, 0), depth)
    for group in sorted(ends):
        left_edge, top, right_edge, bottom = ends[group]
        pad = 6 + 7 * depths[group]
        above = 14 + 13 * depths[group]
        width, height = right_edge - left_edge + 2 * pad, bottom - top + pad + above
        yield f'<rect class="frame" x="{left_edge - pad}" y="{top - above}" width="{width}" height="{height}"/>'
        label = _fit_text(drawing.groups[group].label, width - 8)
        yield f'<text class="label" x="{left_edge - pad + 4}" y="{top - above + 11}">{label}</text>'


def _wire_path(
    drawing: Drawing, layout: Placement, wire: Wire, trunk: Sequence[int], lane: int, pills: list[str]
) -> str:
    """Return the path of one wire along its tensor's trunk or lane.

    The labels of its annotations are appended to `pills`, which are drawn last.
    """
    x, y = layout.x[wire.source], _box_top(layout, wire.source) + BOX_HEIGHT
    path = [f"M{x} {y}"]
    layers_passed = layout.layer[wire.target] - layout.layer[wire.source] - 1
    end, bottom = layout.x[wire.target], _box_top(layout, wire.target)
    if layers_passed < 0:
        side = max(x, end) + 90
        path.append(f"C{x} {y + 50} {side} {y + 50} {side} {(y + bottom) / 2:g}S{end} {bottom - 50} {end} {bottom}")
    else:
        if lane >= 0:
            path.append(f"C{x} {y + ROW_GAP / 2:g} {lane} {y + ROW_GAP / 2:g} {lane} {y + ROW_GAP}V{bottom - ROW_GAP}")
            x, y = lane, bottom - ROW_GAP
        for waypoint in trunk[:layers_passed]:
            path.append(f"{_curve_to(x, y, waypoint, y + ROW_GAP)}V{y + ROW_GAP + BOX_HEIGHT}")
            x, y = waypoint, y + ROW_GAP + BOX_HEIGHT
        path.append(_curve_to(x, y, end, bottom))
    for lane_number, annotation_number in enumerate(wire.annotations):
        annotation = drawing.annotations[annotation_number]
        middle, height = (x + end) / 2, (y + bottom) / 2 + 18 * lane_number
        pills.append(_pill(annotation_text(annotation), annotation.dtype, middle, height))
    kind = "wire into" if wire.slot < 0 else "wire"
    return f'<path class="{kind}" d="{"".join(path)}"/>'


def _curve_to(x: int, y: int, end_x: int, end_y: int) -> str:
    middle = (y + end_y) / 2
    return f"V{end_y}" if x == end_x else f"C{x} {middle:g} {end_x} {middle:g} {end_x} {end_y}"


def _box_svg(drawing: Drawing, box: Box, x: int, y: int) -> str:
    width = box_width(box)
    kind = "io" if box.op.kind in {"input", "output"} else box.inputs if box.inputs in {"all", "some"} else ""
    kind = "float" if box.op.kind in MULTIPLYING_KINDS and kind != "all" else kind
    elements = [f'<rect class="box {kind}" x="{x - width // 2}" y="{y}" width="{width}" height="{BOX_HEIGHT}" rx="6"/>']
    elements.append(f'<text class="type" x="{x}" y="{y + 16}">{_fit_text(box.op.type, width)}</text>')
    elements.append(f'<text x="{x}" y="{y + 30}">{_fit_text(short_name(box.op.name), width)}</text>')
    chips = [
        (constant.role[:1].upper(), constant.annotations[-1]) for constant in box.constants if constant.annotations
    ]
    chips += [("", annotation_number) for annotation_number in box.annotations]
    room = width / max(len(chips), 1)
    for number, (letter, annotation_number) in enumerate(chips):
        annotation = drawing.annotations[annotation_number]
        text = f"{letter} {annotation.dtype}" if letter or len(chips) > 1 else annotation_text(annotation)
        elements.append(_pill(text.strip(), annotation.dtype, x - width / 2 + room * (number + 0.5), y + 41, room))
    if not chips and box.op.outputs:
        elements.append(f'<text x="{x}" y="{y + 44}">{_fit_text(drawn_shape(box.op.outputs[0]), width)}</text>')
    return "".join(elements)


def _pill(text: str, dtype: str, x: float, y: float, room: float = 200) -> str:
    width = min(len(text) * 6.1 + 10, room - 2)
    colour = "f8" if dtype.startswith("float8") else _dtype_class(dtype)
    background = (
        f'<rect class="{colour}" x="{x - width / 2:.1f}" y="{y - 8:g}" width="{width:.1f}" height="16" rx="7"/>'
    )
    return f'{background}<text class="annotation" x="{x:g}" y="{y + 3.5:g}">{_fit_text(text, width)}</text>'


def _dtype_class(dtype: str) -> str:
    bits = dtype.removeprefix("u").removeprefix("int")
    return next((f"b{size}" for size in (4, 8, 16) if bits.isdecimal() and int(bits) <= size), "b32")


def _fit_text(text: str, room: float) -> str:
    """Truncate text to the available width."""
    text_, max_letters = escape_unprintable(text), max(2, int(room / LETTER_WIDTH))
    return escape(text_ if len(text_) <= max_letters else f"{text_[: max_letters - 1]}…")


def _svg_text(text: str) -> str:
    return escape(escape_unprintable(text))


PLOT_WIDTH = 900
LEFT_MARGIN, RIGHT_MARGIN, TOP_MARGIN = 100, 200, 26
PLOT_HEIGHT = 150
SVG_BARS = 200
"""Bars of a large histogram, 3 units wide each."""

THUMBNAIL_SIZE = (120, 20, 60)
"""Width, height and bars of a thumbnail."""

HISTOGRAM_STYLE = """
svg text{font:11px system-ui,sans-serif;fill:var(--soft)}.in{fill:var(--bar)}.grid{stroke:var(--line);stroke-width:1}
"""
"""CSS with variables for colors: --soft for text, --line, --bar."""


def histogram_svg(sketch: Sketch) -> str:
    """Return a histogram with axes. The sketch must have a histogram."""
    axis = histogram_axis(sketch, None)
    counts = bar_counts(distribution_of(sketch), axis, SVG_BARS)
    bottom = TOP_MARGIN + PLOT_HEIGHT
    elements = [
        f'<svg viewBox="0 0 {PLOT_WIDTH} {bottom + 34}" role="img" aria-label="histogram">',
        *_count_axis(counts),
    ]
    elements.append(
        _bars_path(
            bar_heights(counts),
            LEFT_MARGIN,
            (PLOT_WIDTH - LEFT_MARGIN - RIGHT_MARGIN) / SVG_BARS,
            bottom,
            PLOT_HEIGHT - 4,
        )
    )
    return "".join([*elements, *_value_axis(axis, bottom), "</svg>"])


def histogram_thumbnail(sketch: Sketch) -> str:
    """Return a small histogram without text, for a table row."""
    width, height, bar_count = THUMBNAIL_SIZE
    if not sketch.counts.size:
        return ""
    heights_ = bar_heights(bar_counts(distribution_of(sketch), histogram_axis(sketch, None), bar_count))
    path = _bars_path(heights_, 0, width / bar_count, height, height)
    return f'<svg class="small" viewBox="0 0 {width} {height}" aria-hidden="true">{path}</svg>'


def channel_ranges_svg(sketch: Sketch) -> str:
    """Return one bar from the smallest to the largest value for each channel."""
    low, high = sketch.low.reshape(-1), sketch.high.reshape(-1)
    limits = [low, high]
    lowest = min(0.0, *(float(values[abs(values) < float("inf")].min(initial=0.0)) for values in limits))
    highest = max(0.0, *(float(values[abs(values) < float("inf")].max(initial=0.0)) for values in limits)) or 1.0
    step = (PLOT_WIDTH - LEFT_MARGIN - RIGHT_MARGIN) / low.size
    bar_width = min(step * 0.9, 24)

    def y_position(value: float) -> float:
        return TOP_MARGIN + PLOT_HEIGHT * (highest - value) / (highest - lowest)

    elements = [
        (
            f'<svg viewBox="0 0 {PLOT_WIDTH} {TOP_MARGIN + PLOT_HEIGHT + 34}" role="img"'
            ' aria-label="range of each channel">'
        )
    ]
    for value in (lowest, 0.0, highest):
        elements.append(f'<path class="grid" d="M{LEFT_MARGIN} {y_position(value):.1f}H{PLOT_WIDTH - RIGHT_MARGIN}"/>')
        elements.append(
            f'<text x="{LEFT_MARGIN - 6}" y="{y_position(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>'
        )
    for channel in range(low.size):
        x = LEFT_MARGIN + step * (channel + 0.5)
        if low[channel] <= high[channel]:
            y, bar_height = y_position(high[channel]), y_position(low[channel]) - y_position(high[channel])
            elements.append(
                f'<path class="in" d="M{x - bar_width / 4:.2f}'
                f' {y:.1f}h{bar_width / 2:.2f}v{bar_height:.1f}h{-bar_width / 2:.2f}z"/>'
            )
    elements.append(
        f'<text x="{LEFT_MARGIN}" y="{TOP_MARGIN + PLOT_HEIGHT + 18}">channels 0 to {low.size - 1},'
        " values in the tensor's unit</text>"
    )
    return "".join([*elements, "</svg>"])


def _x_position(axis: HistogramAxis, value: float) -> float:
    return LEFT_MARGIN + float(axis.positions(value)) * (PLOT_WIDTH - LEFT_MARGIN - RIGHT_MARGIN)


def _bars_path(heights_: Array, x: float, step: float, bottom: float, scale: float) -> str:
    """Return the bars as one outline."""
    steps = "".join(f"V{bottom - height * scale:.1f}h{step:.2f}" for height in heights_)
    return f'<path class="in" d="M{x:.1f} {bottom}{steps}V{bottom}z"/>'


def _count_axis(counts: Array) -> Iterator[str]:
    """Yield the left axis: powers of ten of values per bar, on a log scale."""
    largest = max(float(counts.max()), 1.0)
    powers = [10.0**exponent for exponent in range(19) if 10.0**exponent <= largest]
    for power in powers[:: 1 + len(powers) // 5]:
        y = TOP_MARGIN + PLOT_HEIGHT - math.log1p(power) / math.log1p(largest) * (PLOT_HEIGHT - 4)
        yield f'<path class="grid" d="M{LEFT_MARGIN} {y:.1f}H{PLOT_WIDTH - RIGHT_MARGIN}"/>'
        yield f'<text x="{LEFT_MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{power:,.0f}</text>'


def _value_axis(axis: HistogramAxis, bottom: int) -> Iterator[str]:
    yield f'<path class="grid" d="M{LEFT_MARGIN} {bottom}H{PLOT_WIDTH - RIGHT_MARGIN}"/>'
    for value in axis.ticks():
        x = _x_position(axis, value)
        yield f'<path class="grid" d="M{x:.1f} {bottom}v5"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{value:g}</text>'
    yield f'<text x="{PLOT_WIDTH - RIGHT_MARGIN + 24}" y="{bottom + 4}">value, in its own unit</text>'
    if max(-axis.low, axis.high) > axis.knee * 1.001:
        yield f'<text x="{PLOT_WIDTH - RIGHT_MARGIN + 24}" y="{bottom + 18}">log beyond ±{axis.knee:.3g}</text>'

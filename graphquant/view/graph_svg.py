"""A drawing as SVG, for documents: boxes in their groups' frames, wires with the badges on them."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from graphquant.errors import printable
from graphquant.survey import WEIGHTED
from graphquant.view.badge_text import badge_text
from graphquant.view.drawing import shape_text
from graphquant.view.payload import placed, short_name, width_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphquant.view.drawing import Box, Drawing, Wire
    from graphquant.view.layout import Placement

BOX, GAP, EDGE = 52, 58, 24
"""Height of a box, room above it, room around all; as in the viewer."""

LETTER = 6.4
"""Width of a letter of a box's text."""

STYLE = """
text{font:10px system-ui,sans-serif;fill:#5b6470;text-anchor:middle}
.type{font-size:12px;font-weight:600;fill:#1b1f24}.label{text-anchor:start}
.badge{font:10px ui-monospace,monospace;fill:#fff}
.wire{fill:none;stroke:#9aa5b1;stroke-width:1.2}.into{stroke-dasharray:5 4}
.frame{fill:#5a6e8c;fill-opacity:.05;stroke:#c9d0d8}.box{fill:#eef1f4;stroke:#c9d0d8}
.io{fill:#d6e4f7}.all{fill:#c5e8cd}.some{fill:#e6edbf}.float{fill:#f7d9a8}
.b4{fill:#7c3aed}.b8{fill:#0f766e}.b16{fill:#1d4ed8}.b32{fill:#64748b}.f8{fill:#be185d}
"""


def svg(drawing: Drawing) -> str:
    """The whole picture; the same drawing gives the same bytes."""
    return "\n".join(_svg(drawing)) + "\n"


def _svg(drawing: Drawing) -> Iterator[str]:
    layout = placed(drawing)
    width = layout.width + 2 * EDGE
    height = (max(layout.layer, default=-1) + 1) * (BOX + GAP) + 2 * EDGE
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-EDGE} {-EDGE} {width} {height}" width="{width}">'
    yield f"<title>{_text(drawing.title)}</title><style>{STYLE}</style>"
    yield f'<rect x="{-EDGE}" y="{-EDGE}" width="{width}" height="{height}" fill="#fff"/>'
    yield from _frames(drawing, layout)
    badges: list[str] = []
    for number, (_, _, wires) in enumerate(drawing.tensors()):
        for wire in wires:
            yield _wire(drawing, layout, drawing.wires[wire], layout.trunks[number], layout.lanes[number], badges)
    for number, box in enumerate(drawing.boxes):
        yield _box(drawing, box, layout.x[number], _top(layout, number))
    yield from badges
    yield "</svg>"


def _top(layout: Placement, number: int) -> int:
    return layout.layer[number] * (BOX + GAP) + GAP


def _frames(drawing: Drawing, layout: Placement) -> Iterator[str]:
    """A frame for each group, the outer ones first and larger."""
    ends: dict[int, list[int]] = {}
    deep: dict[int, int] = {}
    for number, path in enumerate(drawing.paths()):
        half, x, y = width_of(drawing.boxes[number]) // 2, layout.x[number], _top(layout, number)
        for below, group in enumerate(reversed(path)):
            left, top, right, bottom = ends.get(group, [x, y, x, y])
            ends[group] = [min(left, x - half), min(top, y), max(right, x + half), max(bottom, y + BOX)]
            deep[group] = max(deep.get(group, 0), below)
    for group in sorted(ends):
        left, top, right, bottom = ends[group]
        pad = 6 + 7 * deep[group]
        above = 14 + 13 * deep[group]
        wide, tall = right - left + 2 * pad, bottom - top + pad + above
        yield f'<rect class="frame" x="{left - pad}" y="{top - above}" width="{wide}" height="{tall}"/>'
        label = _cut(drawing.groups[group].label, wide - 8)
        yield f'<text class="label" x="{left - pad + 4}" y="{top - above + 11}">{label}</text>'


def _wire(drawing: Drawing, layout: Placement, wire: Wire, trunk: Sequence[int], lane: int, badges: list[str]) -> str:
    """One wire along its tensor's trunk or lane; its badges are added to `badges`, to be drawn over all."""
    x, y = layout.x[wire.source], _top(layout, wire.source) + BOX
    path = [f"M{x} {y}"]
    passed = layout.layer[wire.target] - layout.layer[wire.source] - 1
    end, bottom = layout.x[wire.target], _top(layout, wire.target)
    if passed < 0:
        side = max(x, end) + 90
        path.append(f"C{x} {y + 50} {side} {y + 50} {side} {(y + bottom) / 2:g}S{end} {bottom - 50} {end} {bottom}")
    else:
        if lane >= 0:
            path.append(f"C{x} {y + GAP / 2:g} {lane} {y + GAP / 2:g} {lane} {y + GAP}V{bottom - GAP}")
            x, y = lane, bottom - GAP
        for at in trunk[:passed]:
            path.append(f"{_curve(x, y, at, y + GAP)}V{y + GAP + BOX}")
            x, y = at, y + GAP + BOX
        path.append(_curve(x, y, end, bottom))
    for lane_number, badge in enumerate(wire.badges):
        one = drawing.badges[badge]
        middle, height = (x + end) / 2, (y + bottom) / 2 + 18 * lane_number
        badges.append(_pill(badge_text(one), one.dtype, middle, height))
    kind = "wire into" if wire.slot < 0 else "wire"
    return f'<path class="{kind}" d="{"".join(path)}"/>'


def _curve(x: int, y: int, to: int, down: int) -> str:
    middle = (y + down) / 2
    return f"V{down}" if x == to else f"C{x} {middle:g} {to} {middle:g} {to} {down}"


def _box(drawing: Drawing, box: Box, x: int, y: int) -> str:
    wide = width_of(box)
    kind = "io" if box.op.kind in {"input", "output"} else box.inputs if box.inputs in {"all", "some"} else ""
    kind = "float" if box.op.kind in WEIGHTED and kind != "all" else kind
    parts = [f'<rect class="box {kind}" x="{x - wide // 2}" y="{y}" width="{wide}" height="{BOX}" rx="6"/>']
    parts.append(f'<text class="type" x="{x}" y="{y + 16}">{_cut(box.op.type, wide)}</text>')
    parts.append(f'<text x="{x}" y="{y + 30}">{_cut(short_name(box.op.name), wide)}</text>')
    chips = [(one.role[:1].upper(), one.badges[-1]) for one in box.constants if one.badges]
    chips += [("", badge) for badge in box.badges]
    room = wide / max(len(chips), 1)
    for number, (letter, badge) in enumerate(chips):
        one = drawing.badges[badge]
        said = f"{letter} {one.dtype}" if letter or len(chips) > 1 else badge_text(one)
        parts.append(_pill(said.strip(), one.dtype, x - wide / 2 + room * (number + 0.5), y + 41, room))
    if not chips and box.op.outputs:
        parts.append(f'<text x="{x}" y="{y + 44}">{_cut(shape_text(box.op.outputs[0]), wide)}</text>')
    return "".join(parts)


def _pill(said: str, dtype: str, x: float, y: float, room: float = 200) -> str:
    wide = min(len(said) * 6.1 + 10, room - 2)
    colour = "f8" if dtype.startswith("float8") else _colour(dtype)
    shape = f'<rect class="{colour}" x="{x - wide / 2:.1f}" y="{y - 8:g}" width="{wide:.1f}" height="16" rx="7"/>'
    return f'{shape}<text class="badge" x="{x:g}" y="{y + 3.5:g}">{_cut(said, wide)}</text>'


def _colour(dtype: str) -> str:
    bits = dtype.removeprefix("u").removeprefix("int")
    return next((f"b{size}" for size in (4, 8, 16) if bits.isdecimal() and int(bits) <= size), "b32")


def _cut(text: str, room: float) -> str:
    """As much of `text` as has room."""
    shown, most = printable(text), max(2, int(room / LETTER))
    return escape(shown if len(shown) <= most else f"{shown[: most - 1]}…")


def _text(text: str) -> str:
    return escape(printable(text))

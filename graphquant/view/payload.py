"""A drawing and its layout as the data of the viewer: columns of numbers, and texts that are kept once.

`viewer/data.js` reads exactly this; whoever changes one changes the other. Texts are numbers of the list `texts`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from graphquant.errors import ModelError
from graphquant.ir import bulk
from graphquant.sketch import distribution
from graphquant.survey import WEIGHTED
from graphquant.view.both import FIRST, SECOND
from graphquant.view.drawing import shape_text
from graphquant.view.heat import heat_data
from graphquant.view.histogram import axis_of, bars, heights, marks
from graphquant.view.layout import place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphquant.ir import Op
    from graphquant.picked import Pick
    from graphquant.view.badges import Badge, Numbers
    from graphquant.view.both import Both
    from graphquant.view.drawing import Box, Drawing
    from graphquant.view.heat import Heat
    from graphquant.view.layout import Placement

VERSION = 1

NARROWEST, WIDEST = 84, 240
"""Widths of a box, in units of the drawing."""

BARS = 80
"""Bars of a histogram."""

SCALES = 2048
"""Scales of one tensor that are kept, at most; a weight in blocks has very many."""

SHOWN = 12
"""Attributes of an op, and numbers of a list, that are shown."""

LONGEST = 60
"""Characters of an attribute that are shown."""

INPUTS = ("", "none", "some", "all")


def short_name(name: str) -> str:
    """The last part of a scoped name."""
    return name.rstrip("/").rpartition("/")[2] or name


def width_of(box: Box) -> int:
    """How wide a box is: its type, name, output shape or constants have room, if they are not too long."""
    capitals = sum(not letter.islower() for letter in box.op.type)
    texts = [len(box.op.type) * 7.4 + capitals * 1.5, len(short_name(box.op.name)) * 6.2]
    texts.append(sum(34 for constant in box.constants if constant.badges))
    if box.op.outputs:
        texts.append(len(shape_text(box.op.outputs[0])) * 5.6 + 30)
    return round(min(max(NARROWEST, *texts) + 16, WIDEST))


def placed(drawing: Drawing, widths: Sequence[int] = ()) -> Placement:
    """The layout of a drawing, whose boxes have these widths."""
    tensors = [(source, [drawing.wires[wire].target for wire in wires]) for source, _, wires in drawing.tensors()]
    return place(widths or [width_of(box) for box in drawing.boxes], tensors, drawing.paths())


class _Texts:
    """Texts by number."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.known.setdefault(text, len(self.known))


@bulk()
def payload(
    drawing: Drawing,
    notes: Sequence[str] = (),
    *,
    both: Both | None = None,
    heat: Heat | None = None,
    changes: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The data of one page.

    Args:
        drawing: What is drawn.
        notes: Warnings that stand at the top of the page.
        both: What of the drawing is on which of two sides, where it is of two models.
        heat: Figures of the quantized tensors.
        changes: What differs between the two sides, as `changes_data` gives it.
    """
    text, widths = _Texts(), [width_of(box) for box in drawing.boxes]
    for number, was in both.was.items() if both is not None else ():
        widths[number] = max(widths[number], width_of(was))
    layout = placed(drawing, widths)
    text("")
    data = {
        "version": VERSION,
        "title": drawing.title,
        "format": drawing.format,
        "planned": drawing.planned,
        "notes": list(notes),
        "width": layout.width,
        "ops": {**_ops(drawing, layout, text), "width": widths},
        "constants": _constants(drawing, text),
        "wires": _wires(drawing, layout, text),
        "badges": [_badge(badge, folded) for badge, folded in zip(drawing.badges, drawing.folded, strict=True)],
        "groups": {
            "label": [text(group.label) for group in drawing.groups],
            "parent": [group.parent for group in drawing.groups],
            "graph": [int(bool(group.graph)) for group in drawing.groups],
        },
        "controls": [_steps([one[end] for one in drawing.controls]) for end in (0, 1)],
    }
    if both is not None:
        data["sides"] = _sides(both, text)
    if heat is not None:
        data["heat"] = heat_data(heat, drawing.badges)
    if changes is not None:
        data["changes"] = list(changes)
    return {**data, "texts": list(text.known)}


def _ops(drawing: Drawing, layout: Placement, text: _Texts) -> dict[str, Any]:
    boxes = drawing.boxes
    return {
        "name": [text(box.op.name) for box in boxes],
        "type": [text(box.op.type) for box in boxes],
        "kind": [text(box.op.kind) for box in boxes],
        "graph": [text(box.graph) for box in boxes],
        "group": [box.group for box in boxes],
        "layer": _steps(layout.layer),
        "x": _steps(layout.x),
        "inputs": [INPUTS.index(box.inputs) for box in boxes],
        "multiplies": [int(box.op.kind in WEIGHTED) for box in boxes],
        "reason": [text(box.reason) for box in boxes],
        "attrs": [text(attrs_text(box.op)) for box in boxes],
        "outputs": [[text(one) for one in _outputs(box.op)] for box in boxes],
        "rule": [text(box.op.rule) for box in boxes],
        "badges": {number: box.badges for number, box in enumerate(boxes) if box.badges},
        "calls": {number: box.calls for number, box in enumerate(boxes) if box.calls},
    }


def _steps(values: Sequence[int]) -> list[int]:
    """Each value less the one before it: what repeats packs better."""
    return [value - before for before, value in zip([0, *values], values, strict=False)]


def _outputs(op: Op) -> list[str]:
    """Name, dtype and shape of each output, three texts each."""
    return [one for output in op.outputs for one in (output.name, output.dtype or "", shape_text(output))]


def _constants(drawing: Drawing, text: _Texts) -> dict[str, Any]:
    all_ = [(number, one) for number, box in enumerate(drawing.boxes) for one in box.constants]
    return {
        "op": _steps([number for number, _ in all_]),
        "slot": [one.slot for _, one in all_],
        "role": [text(one.role) for _, one in all_],
        "name": [text(one.name) for _, one in all_],
        "dtype": [text(one.dtype) for _, one in all_],
        "shape": [text(one.shape) for _, one in all_],
        "reason": [text(one.reason) for _, one in all_],
        "badges": {number: one.badges for number, (_, one) in enumerate(all_) if one.badges},
    }


def _wires(drawing: Drawing, layout: Placement, text: _Texts) -> dict[str, Any]:
    wires = drawing.wires
    return {
        "source": _steps([wire.source for wire in wires]),
        "port": [wire.port for wire in wires],
        "target": [wire.target - wire.source for wire in wires],
        "slot": [wire.slot for wire in wires],
        "reason": [text(wire.reason) for wire in wires],
        "badges": {number: wire.badges for number, wire in enumerate(wires) if wire.badges},
        "trunks": {number: _steps(trunk) for number, trunk in enumerate(layout.trunks) if trunk},
        "lanes": {number: lane for number, lane in enumerate(layout.lanes) if lane >= 0},
    }


def _sides(both: Both, text: _Texts) -> dict[str, Any]:
    """What is on one side only, and what looks otherwise on the first."""

    def alone(sides: Sequence[int]) -> dict[int, int]:
        return {number: side for number, side in enumerate(sides) if side != FIRST + SECOND}

    return {
        "titles": list(both.titles),
        "split": both.split,
        "boxes": alone(both.boxes),
        "wires": alone(both.wires),
        "constants": alone(both.constants),
        "twins": both.twins,
        "was": {
            number: [
                text(box.graph),
                text(box.op.name),
                text(box.op.type),
                INPUTS.index(box.inputs),
                text(box.reason),
                text(shape_text(box.op.outputs[0]) if box.op.outputs else ""),
            ]
            for number, box in both.was.items()
        },
    }


def attrs_text(op: Op) -> str:
    """The op's attributes that are numbers, words or short lists of them, a line each."""
    lines = []
    for name in list(op.attrs)[:SHOWN]:
        try:
            value = op.attrs[name]
        except ModelError:  # a tensor that cannot be read; inspect draws, it does not judge
            continue
        shown = _value(value)
        if shown:
            lines.append(f"{name} = {shown}")
    more = len(op.attrs) - SHOWN
    return "\n".join([*lines, *([f"and {more} more"] if more > 0 else [])])


def _value(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str | bool | int | float):
        shown = f"{value:.6g}" if isinstance(value, float) else str(value)
        return shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}..."
    if isinstance(value, list | tuple):
        shown = ", ".join(_value(one) or "..." for one in value[:SHOWN])
        return f"[{shown}{', ...' if len(value) > SHOWN else ''}]"
    return ""


def _badge(badge: Badge, folded: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """All that is told of one tensor's quantization; what is not known is left out."""
    told: dict[str, Any] = {
        "tensor": str(badge.tensor),
        "name": badge.name,
        "dtype": badge.dtype,
        "rule": badge.rule,
        "why": " ".join(badge.why.split()),
        "scheme": badge.scheme,
        "note": badge.note,
        "ops": [list(one) for one in folded],
        "dynamic": badge.dynamic,
        **_numbers(badge.numbers),
        **_seen(badge.pick),
    }
    return {key: value for key, value in told.items() if value or value == 0}


def _numbers(numbers: Numbers | None) -> dict[str, Any]:
    """Scales as the shortest decimals that are the same float32, of very many some; zero points from least to most."""
    if numbers is None or not numbers.scale.size:
        return {}
    scales, zeros = numbers.scale.reshape(-1), numbers.zero_point
    told = {
        "scale": list(map(_shortest, scales[:: -(-scales.size // SCALES)])),
        **(
            {"count": scales.size, "ends": [_shortest(scales.min()), _shortest(scales.max())]}
            if scales.size > 1
            else {}
        ),
        "zero": [int(zeros.min()), int(zeros.max())],
        "axis": numbers.axis,
        "block": numbers.block,
        "low": _finite(numbers.low.min()) if numbers.low.size else None,
        "high": _finite(numbers.high.max()) if numbers.high.size else None,
    }
    return {key: value for key, value in told.items() if value is not None}


def _seen(pick: Pick | None) -> dict[str, Any]:
    """What calibration saw, as a histogram where there is one, and what the range costs."""
    if pick is None:
        return {}
    told: dict[str, Any] = {"method": pick.method + (f" ({pick.like})" if pick.like else ""), "picked": pick.note}
    if pick.cost is not None:
        told |= {"sqnr": _finite(pick.cost.sqnr), "below": pick.cost.below, "above": pick.cost.above}
    seen = pick.sketch
    if seen is None:
        return told
    told["seen"] = {
        "count": seen.count,
        "nan": seen.nan,
        "inf": seen.inf,
        "low": _finite(seen.low.min()),
        "high": _finite(seen.high.max()),
    }
    if seen.counts.size:
        params = pick.params if pick.params is not None and pick.params.axis is None else None
        axis = axis_of(seen, params)
        found = heights(bars(distribution(seen), axis, BARS))
        first, last = marks(axis, params, BARS) if params is not None else (0, BARS)
        told["bars"] = [round(100 * float(height)) for height in found]
        told["range"] = [first, last]
        told["ticks"] = [[round(float(axis.place(value)), 4), f"{value:g}"] for value in axis.ticks(0.16)]
    told["others"] = [
        [other.method, _finite(other.cost.sqnr), other.cost.clipped] for other in pick.others if other.cost is not None
    ]
    return {key: value for key, value in told.items() if value is not None}


def _shortest(value: Any) -> float | None:
    """The shortest decimal that is the same float32."""
    return _finite(float(str(value)))


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None

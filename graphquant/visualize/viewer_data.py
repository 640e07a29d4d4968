"""Data of the viewer page: a drawing and its layout as columns of numbers, with each text stored once.

`viewer/data.js` reads exactly this format, so both change together. Texts are indexes into the list `texts`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from graphquant.errors import ModelError, escape_unprintable
from graphquant.ir import MAC_KINDS, Op, paused_gc
from graphquant.ir.kinds import BOUNDARY_KINDS
from graphquant.observers import distribution_of
from graphquant.visualize.annotations import Annotation, DrawnParams, Heatmap, heatmap_data
from graphquant.visualize.drawing import Box, Drawing, DrawnConstant, Wire, drawn_shape
from graphquant.visualize.histograms import bar_counts, bar_heights, histogram_axis, range_marks
from graphquant.visualize.layout import Placement, layered_layout
from graphquant.visualize.merged_drawings import FIRST, SECOND, MergedDrawing

if TYPE_CHECKING:
    from graphquant.analysis.range_report import TensorRange

VIEWER_DATA_VERSION = 2
MIN_BOX_WIDTH, MAX_BOX_WIDTH = 100, 280  # minimum and maximum width of a box, in drawing units
VIEWER_BARS = 80  # bars of a histogram
MAX_SCALES = 2048  # maximum number of scales of one tensor; a weight quantized in blocks has very many
MAX_SHOWN = 12  # maximum number of attributes of an op, and of numbers in a list
MAX_ATTR_LENGTH = 60  # maximum number of characters of an attribute
CHIP_WIDTH, SHAPE_DIGIT = 46, 7.6  # width of a quantized constant and of a digit, in drawing units, as in drawing.js
INPUT_STATES = ("", "none", "some", "all")


def box_label(box: Box) -> str:
    """Return the part of an op's name that its author chose, without the op types that exporters append.

    `/layer1/layer1.0/conv1/Conv` is `conv1`. `/stft/Slice_1` is `stft/Slice_1`, to tell it from the other ops of its
    scope. An op whose name has no such part is named after its weight: `Conv_4`, which reads `stem.conv.weight`, is
    `stem.conv`. A number has its scope or its type before it: `/layers/3/Conv` is `layers/3`, and `123` is `Conv 123`.
    The label of an op that only has the name of its type is "".
    """
    name, op_type = box.op.name, box.op.type
    parts = all_parts = [part for part in name.partition(";")[0].split("/") if part] or [name]
    while len(parts) > 1 and _is_op_type(_COUNTER.sub("", parts[-1]), op_type):
        parts = parts[:-1]
    if len(parts) < len(all_parts) or box.op.kind in BOUNDARY_KINDS:
        return "/".join(parts[-2:]) if len(parts) > 1 and parts[-1].isdigit() else _numbered(parts[-1], box.op)
    last = _NUMBER.sub("", parts[-1])
    is_type = not last or _is_op_type(last, op_type)
    if len(parts) > 1:
        return "/".join(parts[-2:]) if is_type or op_type.casefold().startswith(last.casefold()) else parts[-1]
    if not is_type:
        return name
    weight = next((constant.name for constant in box.constants if constant.role == "weight"), "")
    owner = re.split(r"[./]", weight)[:-1]
    if owner and owner[0] != name and any(map(str.isidentifier, owner)):
        return weight[: len(".".join(owner))]
    return "" if name == op_type else _numbered(name, box.op)


def _numbered(name: str, op: Op) -> str:
    """Return a name, behind the type of its op if it is a number."""
    return f"{op.type or op.kind} {name}" if name.isdigit() else name


_COUNTER = re.compile(r"__\d+$")  # appended to unique names by tf2onnx
_NUMBER = re.compile(r"_*\d*$")
_TRACED = re.compile(r"^__(?:inference|forward|backward)_(.+)_\d+$")  # name that TensorFlow gives to a traced function


def _is_op_type(word: str, op_type: str) -> bool:
    """Return True if a component of a name is the op's type, or a type of ONNX or TensorFlow."""
    if word == op_type or not word[:1].isupper():
        return word == op_type
    from graphquant.formats.onnx.ops import DEFAULT_DOMAIN_OPS
    from graphquant.formats.tensorflow.ops import builtin_table

    return word in DEFAULT_DOMAIN_OPS or builtin_table().find_spec(word) is not None


def box_width(box: Box) -> int:
    """Return the width of a box that fits its type, name, output shape and constants, within limits."""
    capitals = sum(not letter.islower() for letter in box.op.type)
    weight_shape = next((constant.shape for constant in box.constants if constant.role == "weight"), "")
    name_length = len(box_label(box)) + (len(weight_shape) + 3 if weight_shape else 0)
    texts = [len(box.op.type) * 9.8 + capitals * 1.8, name_length * 7.6]
    shape_width = len(drawn_shape(box.op.outputs[0])) * SHAPE_DIGIT if box.op.outputs else 0
    texts.append(sum(CHIP_WIDTH for constant in box.constants if constant.annotations) + shape_width)
    return round(min(max(MIN_BOX_WIDTH, *texts) + 18, MAX_BOX_WIDTH))


def drawing_layout(drawing: Drawing, widths: Sequence[int] = ()) -> Placement:
    """Return the layout of a drawing with boxes of the given widths."""
    tensors = [(source, [drawing.wires[wire].target for wire in wires]) for source, _, wires in drawing.tensors()]
    return layered_layout(widths or [box_width(box) for box in drawing.boxes], tensors, drawing.group_paths())


@paused_gc()
def viewer_data(
    drawing: Drawing,
    notes: Sequence[str] = (),
    *,
    merged: MergedDrawing | None = None,
    heatmap: Heatmap | None = None,
    changes: Sequence[Mapping[str, Any]] | None = None,
    figures: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """Return the data of a viewer page, with notes and figures (label and value) at its top.

    `merged` has the sides of a drawing of two models, and `changes`, from `viewer_changes`, their differences.
    """
    numbers: defaultdict[str, int] = defaultdict()
    numbers.default_factory = numbers.__len__
    text_number = numbers.__getitem__
    widths = [box_width(box) for box in drawing.boxes]
    for number, first_box in merged.first_boxes.items() if merged is not None else ():
        widths[number] = max(widths[number], box_width(first_box))
    layout = drawing_layout(drawing, widths)
    text_number("")
    data = {
        "version": VIEWER_DATA_VERSION,
        **{key: getattr(drawing, key) for key in ("title", "format", "planned")},
        "notes": list(notes),
        "figures": list(map(list, figures)),
        "width": layout.width,
        "ops": {**_op_columns(drawing, layout, text_number), "width": widths},
        "constants": _constant_columns(drawing, text_number),
        "wires": _wire_columns(drawing, layout, text_number),
        "annotations": [
            _annotation_data(annotation, folded_ops)
            for annotation, folded_ops in zip(drawing.annotations, drawing.folded_ops, strict=True)
        ],
        "groups": {
            "label": [text_number(_TRACED.sub(r"\1", group.label)) for group in drawing.groups],
            "parent": [group.parent for group in drawing.groups],
            "graph": [int(bool(group.graph)) for group in drawing.groups],
        },
        "controls": [_differences_of([control[end] for control in drawing.controls]) for end in (0, 1)],
    }
    if merged is not None:
        data["sides"] = _side_columns(merged, text_number)
    if heatmap is not None:
        data["heat"] = heatmap_data(heatmap, drawing.annotations)
    if changes is not None:
        data["changes"] = list(changes)
    return {**data, "texts": list(numbers)}


def _op_columns(drawing: Drawing, layout: Placement, text_number: Callable[[str], int]) -> dict[str, Any]:
    boxes = drawing.boxes
    return {
        **{key: [text_number(getattr(box.op, key)) for box in boxes] for key in ("name", "type", "kind")},
        "labels": {
            number: text_number(label)
            for number, box in enumerate(boxes)
            if (label := box_label(box)) != (box.op.name.rstrip("/").rpartition("/")[2] or box.op.name)
        },
        "graph": [text_number(box.graph) for box in boxes],
        "group": [box.group for box in boxes],
        "layer": _differences_of(layout.layer),
        "x": _differences_of(layout.x),
        "inputs": [INPUT_STATES.index(box.inputs) for box in boxes],
        "weighted": [int(box.op.kind in MAC_KINDS) for box in boxes],
        "reason": [text_number(box.reason) for box in boxes],
        "attrs": [text_number(attributes_text(box.op)) for box in boxes],
        "outputs": [
            [text_number(text) for out in box.op.outputs for text in (out.name, out.dtype or "", drawn_shape(out))]
            for box in boxes
        ],
        "rule": [text_number(box.op.rule) for box in boxes],
        "annotations": _numbered_annotations(boxes),
        "calls": {number: box.calls for number, box in enumerate(boxes) if box.calls},
    }


def _differences_of(values: Sequence[int]) -> list[int]:
    """Return the differences between consecutive values, which compress better."""
    return [value - previous for previous, value in zip([0, *values], values, strict=False)]


def _numbered_annotations(parts: Sequence[Box | DrawnConstant | Wire]) -> dict[int, tuple[int, ...]]:
    return {number: part.annotations for number, part in enumerate(parts) if part.annotations}


def _constant_columns(drawing: Drawing, text_number: Callable[[str], int]) -> dict[str, Any]:
    constants = [constant for box in drawing.boxes for constant in box.constants]
    return {
        "op": _differences_of([number for number, box in enumerate(drawing.boxes) for _ in box.constants]),
        "slot": [constant.slot for constant in constants],
        **{
            name: [text_number(getattr(constant, name)) for constant in constants]
            for name in ("role", "name", "dtype", "shape", "reason")
        },
        "annotations": _numbered_annotations(constants),
    }


def _wire_columns(drawing: Drawing, layout: Placement, text_number: Callable[[str], int]) -> dict[str, Any]:
    wires = drawing.wires
    return {
        "source": _differences_of([wire.source for wire in wires]),
        "port": [wire.port for wire in wires],
        "target": [wire.target - wire.source for wire in wires],
        "slot": [wire.slot for wire in wires],
        "reason": [text_number(wire.reason) for wire in wires],
        "annotations": _numbered_annotations(wires),
        "trunks": {number: _differences_of(trunk) for number, trunk in enumerate(layout.trunks) if trunk},
        "lanes": {number: lane for number, lane in enumerate(layout.lanes) if lane >= 0},
    }


def _side_columns(merged: MergedDrawing, text_number: Callable[[str], int]) -> dict[str, Any]:
    """Return the parts on one side only, and boxes that look different on the first side."""

    def one_sided(sides: Sequence[int]) -> dict[int, int]:
        return {number: side for number, side in enumerate(sides) if side != FIRST + SECOND}

    return {
        "titles": list(merged.titles),
        "split": merged.split,
        "boxes": one_sided(merged.box_sides),
        "wires": one_sided(merged.wire_sides),
        "constants": one_sided(merged.constant_sides),
        "counterparts": merged.counterparts,
        "first_boxes": {
            number: [
                *map(text_number, (box.graph, box.op.name, box.op.type)),
                INPUT_STATES.index(box.inputs),
                *map(text_number, (box.reason, drawn_shape(box.op.outputs[0]) if box.op.outputs else "")),
            ]
            for number, box in merged.first_boxes.items()
        },
    }


def attributes_text(op: Op) -> str:
    """Return numbers, strings and short lists of an op's attributes, one per line."""
    lines = []
    for name in list(op.attrs)[:MAX_SHOWN]:
        try:
            value = op.attrs[name]
        except ModelError:  # an unreadable tensor: drawing must not fail on it
            continue
        if value_text := _attribute_text(value):
            lines.append(f"{name} = {value_text}")
    if len(op.attrs) > MAX_SHOWN:
        lines.append(f"and {len(op.attrs) - MAX_SHOWN} more")
    return "\n".join(lines)


def _attribute_text(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str | bool | int | float):
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        return text if len(text) <= MAX_ATTR_LENGTH else f"{text[:MAX_ATTR_LENGTH]}..."
    if isinstance(value, list | tuple):
        text = ", ".join(_attribute_text(element) or "..." for element in value[:MAX_SHOWN])
        return f"[{text}{', ...' if len(value) > MAX_SHOWN else ''}]"
    return ""


def _annotation_data(annotation: Annotation, folded_ops: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return an annotation as viewer data, without empty fields."""
    fields: dict[str, Any] = {
        "tensor": str(annotation.tensor),
        **{key: getattr(annotation, key) for key in ("name", "dtype", "rule")},
        "why": " ".join(annotation.why.split()),
        "scheme": annotation.scheme,
        "note": annotation.note,
        "ops": [list(op) for op in folded_ops],
        "dynamic": annotation.dynamic,
        **_param_data(annotation.params),
        **_range_data(annotation.tensor_range),
    }
    return {key: value for key, value in fields.items() if value or value == 0}


def _param_data(params: DrawnParams | None) -> dict[str, Any]:
    """Return scales as the shortest equal float32 decimals, sampled if very many, and the zero point's range."""
    if params is None or not params.scale.size:
        return {}
    scales, zero_points = params.scale.reshape(-1), params.zero_point
    is_single = scales.size == 1
    fields = {
        "scale": list(map(_shortest_decimal, scales[:: -(-scales.size // MAX_SCALES)])),
        "count": None if is_single else scales.size,
        "ends": None if is_single else [_shortest_decimal(scales.min()), _shortest_decimal(scales.max())],
        "zero": [int(zero_points.min()), int(zero_points.max())],
        "axis": params.axis,
        "block": params.block_size,
        "low": _finite_or_none(params.low.min()) if params.low.size else None,
        "high": _finite_or_none(params.high.max()) if params.high.size else None,
    }
    return {key: value for key, value in fields.items() if value is not None}


def _range_data(tensor_range: TensorRange | None) -> dict[str, Any]:
    """Return calibration statistics, the histogram if there is one, and the cost of the range."""
    if tensor_range is None:
        return {}
    fields: dict[str, Any] = {
        "method": tensor_range.method + (f" ({tensor_range.auto_method})" if tensor_range.auto_method else ""),
        "range_note": tensor_range.note,
    }
    if (cost := tensor_range.cost) is not None:
        fields |= {"sqnr": _finite_or_none(cost.sqnr), "below": cost.clipped_below, "above": cost.clipped_above}
    if (sketch := tensor_range.sketch) is None:
        return fields
    fields["statistics"] = {
        **{key: getattr(sketch, key) for key in ("count", "nan", "inf")},
        "low": _finite_or_none(sketch.low.min()),
        "high": _finite_or_none(sketch.high.max()),
    }
    if sketch.counts.size:
        params = tensor_range.params if tensor_range.params is not None and tensor_range.params.axis is None else None
        axis = histogram_axis(sketch, params)
        heights_ = bar_heights(bar_counts(distribution_of(sketch), axis, VIEWER_BARS))
        first, last = range_marks(axis, params, VIEWER_BARS) if params is not None else (0, VIEWER_BARS)
        fields["bars"] = [round(100 * float(height)) for height in heights_]
        fields["range"] = [first, last]
        fields["ticks"] = [[round(float(axis.positions(value)), 4), f"{value:g}"] for value in axis.ticks(0.16)]
    fields["alternatives"] = [
        [alternative.method, _finite_or_none(alternative.cost.sqnr), alternative.cost.clipped]
        for alternative in tensor_range.alternatives
        if alternative.cost is not None
    ]
    return {key: value for key, value in fields.items() if value is not None}


def _shortest_decimal(value: Any) -> float | None:
    """Return the shortest decimal that is equal as float32."""
    return _finite_or_none(float(str(value)))


def _finite_or_none(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


VIEWER_SCRIPTS = (
    *("data", "scene", "frames", "heatmap", "drawing", "minimap", "hit_test", "panel", "search", "input", "start"),
)
"""Files of the script, in order; they share one scope."""


def viewer_page(data: Mapping[str, Any]) -> str:
    """Return the viewer page; deterministic."""
    script = '"use strict";\n' + "\n".join(viewer_file(f"{name}.js") for name in VIEWER_SCRIPTS)
    # Deflated JSON in base64, whose letters have no meaning in HTML.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    packed = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    lines = (
        page_head(str(data["title"]), viewer_file("style.css"), script),
        "<body><noscript>This page draws a model with JavaScript, which is disabled.</noscript>",
        f'<script id="data" type="application/octet-stream">{packed}</script>',
        f"<script>{script}</script></body></html>\n",
    )
    return "\n".join(lines)


def viewer_file(name: str) -> str:
    """Return the text of a file of the pages."""
    return files("graphquant.visualize").joinpath("viewer", name).read_text("utf-8")


def page_head(title: str, style: str, script: str | None = None) -> str:
    """Return the head of a page. Its Content-Security-Policy allows this style and script only."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"  # the style is a constant of graphquant
    if script is not None:
        policy = f"default-src 'none'; script-src {_csp_digest(script)}; style-src {_csp_digest(style)}"
    lines = (
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(escape_unprintable(title))}</title>',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<style>{style}</style></head>",
    )
    return "\n".join(lines)


def _csp_digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

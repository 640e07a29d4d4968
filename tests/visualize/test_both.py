"""Two models merged into one drawing: sides, counterparts, changes and heat maps."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

import graphquant as gq
from graphquant.analysis.diff import diff_models
from graphquant.api.compare import align_preparation
from graphquant.api.plan import prepare_and_plan
from graphquant.ir import QUANTIZATION_KINDS
from graphquant.ir.op_matching import match_ops
from graphquant.visualize.annotations import HeatColumn, Heatmap, heatmap_data
from graphquant.visualize.drawing import model_drawing
from graphquant.visualize.merged_drawings import FIRST, SECOND, merge_drawings, viewer_changes
from graphquant.visualize.viewer_data import viewer_data

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from graphquant.ir import Model
    from graphquant.visualize.merged_drawings import MergedDrawing

TEXT = """<ir_version: 8, opset_import: ["" : 13]>
agraph (float[1, 4] x) => (float[1, 4] y)
  <float s = {0.5}, uint8 z = {3}, float[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}>
{
  [q] xq = QuantizeLinear (x, s, z)
  [d] xd = DequantizeLinear (xq, s, z)
  [m] h = MatMul (xd, w)
  [r] r = Relu (h)
  [a] y = Add (r, x)
}
"""


def _model(path: Path, change: Callable[[onnx.ModelProto], object] = lambda _: None) -> Model:
    message = onnx.parser.parse_model(TEXT)
    change(message)
    onnx.save(message, path)
    return gq.load(path)


def _merge(first: Model, second: Model) -> MergedDrawing:
    return merge_drawings(model_drawing(first), model_drawing(second), match_ops(first, second))


def _node(message: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in message.graph.node if node.name == name)


def _set_initializer(message: onnx.ModelProto, name: str, value: np.ndarray) -> None:
    initializer = next(tensor for tensor in message.graph.initializer if tensor.name == name)
    initializer.CopyFrom(numpy_helper.from_array(value, name))


def _remove_quantization(message: onnx.ModelProto) -> None:
    _node(message, "m").input[0] = "x"
    for name in ("q", "d"):
        message.graph.node.remove(_node(message, name))


def _sides_by_name(merged: MergedDrawing) -> dict[str, int]:
    return {box.op.name: side for box, side in zip(merged.drawing.boxes, merged.box_sides, strict=True)}


def test_merging_a_model_with_itself_keeps_each_box_once(tmp_path: Path) -> None:
    """All boxes and wires are on both sides, annotations have counterparts, and the layout does not change."""
    model = _model(tmp_path / "m.onnx")
    merged, single = _merge(model, model), model_drawing(model)
    assert set(merged.box_sides) == set(merged.wire_sides) == {FIRST + SECOND}
    assert [box.op.name for box in merged.drawing.boxes] == [box.op.name for box in single.boxes]
    assert merged.counterparts == {1: 0}
    assert merged.first_boxes == {}
    data, single_data = viewer_data(merged.drawing, merged=merged), viewer_data(single)
    assert (data["ops"]["x"], data["ops"]["layer"]) == (single_data["ops"]["x"], single_data["ops"]["layer"])
    assert data["sides"]["boxes"] == data["sides"]["wires"] == {}


def test_boxes_of_one_model_are_on_its_side(tmp_path: Path) -> None:
    """A removed op keeps its position. Its wires, and those that replace it, are on one side."""

    def remove_relu(message: onnx.ModelProto) -> None:
        _node(message, "a").input[0] = "h"
        message.graph.node.remove(_node(message, "r"))

    merged = _merge(_model(tmp_path / "a.onnx"), _model(tmp_path / "b.onnx", remove_relu))
    assert _sides_by_name(merged) == {"x": 3, "m": 3, "r": FIRST, "a": 3, "@y": 3}
    name = [box.op.name for box in merged.drawing.boxes]
    wires = {
        (name[wire.source], name[wire.target]): side
        for wire, side in zip(merged.drawing.wires, merged.wire_sides, strict=True)
    }
    assert wires == {
        ("x", "m"): 3,
        ("x", "a"): 3,
        ("m", "r"): FIRST,
        ("r", "a"): FIRST,
        ("m", "a"): SECOND,
        ("a", "@y"): 3,
    }
    assert name.index("m") < name.index("r") < name.index("a")


def test_annotations_of_one_side(tmp_path: Path) -> None:
    """An annotation of one model is on a wire of both. Its op has another appearance on the other side."""
    merged = _merge(_model(tmp_path / "a.onnx", _remove_quantization), _model(tmp_path / "b.onnx"))
    assert set(merged.wire_sides) == {FIRST + SECOND}
    assert (merged.split, merged.counterparts) == (0, {})
    (number,) = merged.first_boxes
    assert merged.drawing.boxes[number].op.name == "m"
    assert (merged.first_boxes[number].inputs, merged.drawing.boxes[number].inputs) == ("none", "some")


@pytest.mark.parametrize(
    ("change", "kind", "op", "annotations"),
    [
        (lambda m: _set_initializer(m, "s", np.array([0.25], np.float32)), "scale", None, [1, 0]),
        (lambda m: _set_initializer(m, "z", np.array([4], np.uint8)), "site-changed", None, [1, 0]),
        (_remove_quantization, "site-removed", None, [0]),
        (lambda m: setattr(_node(m, "r"), "name", "other"), "op-renamed", "other", []),
        (lambda m: setattr(_node(m, "r"), "op_type", "Sigmoid"), "op-added", "r", []),
        (lambda m: setattr(_node(m, "r"), "op_type", "Sigmoid"), "op-removed", "r", []),
        (lambda m: _set_initializer(m, "w", np.zeros((4, 4), np.float32)), "weight", "m", []),
        (lambda m: _node(m, "a").input.__setitem__(1, "h"), "wiring", "a", []),
        (lambda m: _node(m, "a").attribute.append(onnx.helper.make_attribute("k", 1)), "attribute", "a", []),
    ],
)
def test_changes_locate_their_boxes(
    tmp_path: Path, change: Callable[[onnx.ModelProto], object], kind: str, op: str | None, annotations: list[int]
) -> None:
    """Each kind of change refers to its boxes or annotations, on the side that has them."""
    first, second = _model(tmp_path / "a.onnx"), _model(tmp_path / "b.onnx", change)
    merged = _merge(first, second)
    differences = [
        entry for entry in viewer_changes(diff_models(first, second), merged, (first, second)) if entry["kind"] == kind
    ]
    assert len(differences) == 1
    assert differences[0]["annotations"] == annotations
    assert [merged.drawing.boxes[box].op.name for box in differences[0]["ops"]] == ([op] if op else [])
    if kind in {"op-added", "op-removed"}:
        assert [merged.box_sides[box] for box in differences[0]["ops"]] == [SECOND if kind == "op-added" else FIRST]


def test_every_change_of_a_quantized_sample_is_located(samples: Path) -> None:
    """Every inserted site of a sample model is a change with annotations."""
    source = samples / "digits_cnn.onnx"
    plan = prepare_and_plan(gq.load(source), by_cost=False)[1]
    result = gq.insert(source, data=str(samples / "digits_cnn_calib.npz"), samples=8, plan=plan)
    before, after, _ = align_preparation(gq.load(source), result.model)
    merged = _merge(before, after)
    differences = viewer_changes(diff_models(before, after), merged, (before, after))
    assert len(differences) == len(result.inserted)
    assert {entry["kind"] for entry in differences} == {"site-added"}
    assert all(entry["annotations"] for entry in differences)
    assert {annotation for entry in differences for annotation in entry["annotations"]} == set(
        range(len(merged.drawing.annotations))
    )
    kinds = [op.kind for graph in before.graphs.values() for op in graph.ops()]
    assert not QUANTIZATION_KINDS & set(kinds)
    assert set(merged.box_sides) == {FIRST + SECOND}


def test_heatmap_values_are_keyed_by_op(tmp_path: Path) -> None:
    """Heat map columns become JSON data. Exact and missing values are distinct."""
    drawing = model_drawing(_model(tmp_path / "m.onnx"))
    columns = tuple(HeatColumn(name=name, description="it", hot=3, cold=0) for name in "abcd")
    op_key = drawing.annotations[0].op_key
    assert op_key[1] in {"q", "d"}
    heat = Heatmap(
        columns=columns, values={op_key: (1.25, math.inf, None, -math.inf)}, notes={op_key: "why"}, summary=("all",)
    )
    data = json.loads(json.dumps(heatmap_data(heat, drawing.annotations), allow_nan=False))
    assert data["values"] == {"0": [1.25, "equal", None, "none"]}
    assert data["notes"] == {"0": "why"}
    assert data["columns"][0] == {"name": "a", "description": "it", "hot": 3, "cold": 0, "unit": "dB"}
    assert (
        heatmap_data(Heatmap(columns=columns, values={("", "no such"): (1.0,) * 4}), drawing.annotations)["values"]
        == {}
    )

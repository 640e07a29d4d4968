"""Two models as one drawing: what is on which side, what stands for what, where changes are, figures as heat."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from graphquant import pipeline
from graphquant.differences import diff_models
from graphquant.ir import QUANTIZATION_KINDS
from graphquant.pairs import pair
from graphquant.view.both import FIRST, SECOND, unite
from graphquant.view.changes import changes_data
from graphquant.view.graph import model_drawing
from graphquant.view.heat import Column, Heat, heat_data
from graphquant.view.payload import payload

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from graphquant.ir import Model
    from graphquant.view.both import Both

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
    return pipeline.load(path)


def _united(one: Model, other: Model) -> Both:
    return unite(model_drawing(one), model_drawing(other), pair(one, other))


def _node(message: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in message.graph.node if node.name == name)


def _set(message: onnx.ModelProto, name: str, value: np.ndarray) -> None:
    held = next(one for one in message.graph.initializer if one.name == name)
    held.CopyFrom(numpy_helper.from_array(value, name))


def _unquantize(message: onnx.ModelProto) -> None:
    _node(message, "m").input[0] = "x"
    for name in ("q", "d"):
        message.graph.node.remove(_node(message, name))


def _sides(both: Both) -> dict[str, int]:
    return {box.op.name: side for box, side in zip(both.drawing.boxes, both.boxes, strict=True)}


def test_a_model_beside_itself_is_there_once(tmp_path: Path) -> None:
    """All boxes and wires are on both sides; each badge has its twin; the layout is that of the model alone."""
    model = _model(tmp_path / "m.onnx")
    both, alone = _united(model, model), model_drawing(model)
    assert set(both.boxes) == set(both.wires) == {FIRST + SECOND}
    assert [box.op.name for box in both.drawing.boxes] == [box.op.name for box in alone.boxes]
    assert both.twins == {1: 0}
    assert both.was == {}
    data, one = payload(both.drawing, both=both), payload(alone)
    assert (data["ops"]["x"], data["ops"]["layer"]) == (one["ops"]["x"], one["ops"]["layer"])
    assert data["sides"]["boxes"] == data["sides"]["wires"] == {}


def test_what_one_alone_has_is_on_its_side(tmp_path: Path) -> None:
    """A removed op stands where it stood, before what followed it; wires to it and past it are of one side."""

    def cut(message: onnx.ModelProto) -> None:
        _node(message, "a").input[0] = "h"
        message.graph.node.remove(_node(message, "r"))

    both = _united(_model(tmp_path / "a.onnx"), _model(tmp_path / "b.onnx", cut))
    assert _sides(both) == {"x": 3, "m": 3, "r": FIRST, "a": 3, "@y": 3}
    name = [box.op.name for box in both.drawing.boxes]
    wires = {
        (name[wire.source], name[wire.target]): side for wire, side in zip(both.drawing.wires, both.wires, strict=True)
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


def test_quantization_of_one_side(tmp_path: Path) -> None:
    """A badge that one side has is on that side's wire, which both have; the op looks otherwise on the other."""
    both = _united(_model(tmp_path / "a.onnx", _unquantize), _model(tmp_path / "b.onnx"))
    assert set(both.wires) == {FIRST + SECOND}
    assert (both.split, both.twins) == (0, {})
    (number,) = both.was
    assert both.drawing.boxes[number].op.name == "m"
    assert (both.was[number].inputs, both.drawing.boxes[number].inputs) == ("none", "some")


@pytest.mark.parametrize(
    ("change", "kind", "op", "badges"),
    [
        (lambda m: _set(m, "s", np.array([0.25], np.float32)), "scale", None, [1, 0]),
        (lambda m: _set(m, "z", np.array([4], np.uint8)), "site-changed", None, [1, 0]),
        (_unquantize, "site-removed", None, [0]),
        (lambda m: setattr(_node(m, "r"), "name", "other"), "op-renamed", "other", []),
        (lambda m: setattr(_node(m, "r"), "op_type", "Sigmoid"), "op-added", "r", []),
        (lambda m: setattr(_node(m, "r"), "op_type", "Sigmoid"), "op-removed", "r", []),
        (lambda m: _set(m, "w", np.zeros((4, 4), np.float32)), "weight", "m", []),
        (lambda m: _node(m, "a").input.__setitem__(1, "h"), "wiring", "a", []),
        (lambda m: _node(m, "a").attribute.append(onnx.helper.make_attribute("k", 1)), "attribute", "a", []),
    ],
)
def test_where_a_change_is(
    tmp_path: Path, change: Callable[[onnx.ModelProto], object], kind: str, op: str | None, badges: list[int]
) -> None:
    """Each kind of change leads to the box or the badges that it is about, on the side that has them."""
    one, other = _model(tmp_path / "a.onnx"), _model(tmp_path / "b.onnx", change)
    both = _united(one, other)
    found = [entry for entry in changes_data(diff_models(one, other), both, (one, other)) if entry["kind"] == kind]
    assert len(found) == 1
    assert found[0]["badges"] == badges
    assert [both.drawing.boxes[box].op.name for box in found[0]["ops"]] == ([op] if op else [])
    if kind in {"op-added", "op-removed"}:
        assert [both.boxes[box] for box in found[0]["ops"]] == [SECOND if kind == "op-added" else FIRST]


def test_every_change_of_a_quantized_sample_has_a_place(samples: Path) -> None:
    """What insert did to a sample model is all on the drawing: a badge for each site that was added."""
    source = samples / "digits_cnn.onnx"
    made = pipeline.insert(source, data=str(samples / "digits_cnn_calib.npz"), samples=8)
    before, after, _ = pipeline.aligned(pipeline.load(source), made.model)
    both = _united(before, after)
    found = changes_data(diff_models(before, after), both, (before, after))
    assert len(found) == len(made.inserted)
    assert {entry["kind"] for entry in found} == {"site-added"}
    assert all(entry["badges"] for entry in found)
    assert {badge for entry in found for badge in entry["badges"]} == set(range(len(both.drawing.badges)))
    kinds = [op.kind for graph in before.graphs.values() for op in graph.ops()]
    assert not QUANTIZATION_KINDS & set(kinds)
    assert set(both.boxes) == {FIRST + SECOND}


def test_heat_is_figures_by_place(tmp_path: Path) -> None:
    """Any columns of figures by quantization op are data of the page, with no error and no figure told apart."""
    drawing = model_drawing(_model(tmp_path / "m.onnx"))
    columns = tuple(Column(name=name, says="it", hot=3, cold=0) for name in "abcd")
    place = drawing.badges[0].place
    assert place[1] in {"q", "d"}
    heat = Heat(columns=columns, of={place: (1.25, math.inf, None, -math.inf)}, notes={place: "why"}, says=("all",))
    data = json.loads(json.dumps(heat_data(heat, drawing.badges), allow_nan=False))
    assert data["of"] == {"0": [1.25, "equal", None, "none"]}
    assert data["notes"] == {"0": "why"}
    assert data["columns"][0] == {"name": "a", "says": "it", "hot": 3, "cold": 0, "unit": "dB"}
    assert heat_data(Heat(columns=columns, of={("", "no such"): (1.0,) * 4}), drawing.badges)["of"] == {}

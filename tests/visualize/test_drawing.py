"""Drawings of models: boxes, wires, constants, annotations and groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper

import graphquant as gq
from graphquant.api.plan import prepare_for_plan
from graphquant.errors import UsageError
from graphquant.ir import QUANTIZATION_KINDS, TensorRef
from graphquant.ir.op_matching import is_inserted
from graphquant.visualize.annotations import annotation_text
from graphquant.visualize.drawing import model_drawing, neighborhood, plan_drawing, result_drawing

if TYPE_CHECKING:
    from pathlib import Path

    from graphquant.visualize.drawing import Drawing, Wire

HEAD = '<ir_version: 8, opset_import: ["" : 13]>\n'
PAIR = """agraph (float[1, 4] x) => (float[1, 4] y)
  <float s = {0.5}, uint8 z = {3}, float[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}>
{
  [q] xq = QuantizeLinear (x, s, z)
  [d] xd = DequantizeLinear (xq, s, z)
  [enc_m] h = MatMul (xd, w)
  [enc_r] r = Relu (h)
  [dec_a] y = Add (r, x)
}
"""


def _draw_text(text: str, tmp_path: Path) -> Drawing:
    message = onnx.parser.parse_model(HEAD + text)
    for node in message.graph.node:
        node.name = node.name.replace("_", "/")
    onnx.save(message, tmp_path / "model.onnx")
    return model_drawing(gq.load(tmp_path / "model.onnx"))


def _wires(drawing: Drawing) -> list[tuple[str, str, int, tuple[int, ...]]]:
    name = [box.op.name for box in drawing.boxes]
    return [(name[wire.source], name[wire.target], wire.slot, wire.annotations) for wire in drawing.wires]


def _shown_annotations(drawing: Drawing) -> set[int]:
    """Return the numbers of the annotations that a wire, box or constant shows."""
    numbers = [annotation for wire in drawing.wires for annotation in wire.annotations]
    for box in drawing.boxes:
        numbers += [
            *box.annotations,
            *(annotation for constant in box.constants for annotation in constant.annotations),
        ]
    return set(numbers)


def test_qdq_pair_is_an_annotation_on_the_wire(tmp_path: Path) -> None:
    """A Q/DQ pair has no box. The wire from producer to consumer has an annotation with its parameters."""
    drawing = _draw_text(PAIR, tmp_path)
    assert [box.op.name for box in drawing.boxes] == ["x", "enc/m", "enc/r", "dec/a", "@y"]
    assert _wires(drawing) == [
        ("x", "enc/m", 0, (0,)),
        ("x", "dec/a", 1, ()),
        ("enc/m", "enc/r", 0, ()),
        ("enc/r", "dec/a", 0, ()),
        ("dec/a", "@y", 0, ()),
    ]
    (annotation,) = drawing.annotations
    assert (annotation.tensor, annotation.dtype, annotation_text(annotation)) == (
        TensorRef("", "x"),
        "uint8",
        "uint8 0.5 z3",
    )
    assert drawing.folded_ops == [(("QuantizeLinear", "q"), ("DequantizeLinear", "d"))]


def test_pair_with_a_body(tmp_path: Path) -> None:
    """A damaged DequantizeLinear with a body is drawn as an annotation, and the body has no wires to it."""
    damaged = PAIR.replace(
        "(xq, s, z)", "<body = b () => (float[1] c) { c = Constant <value_float = 1.0> () }> (xq, s, z)"
    )
    names = [box.op.name for box in _draw_text(damaged, tmp_path).boxes]
    assert "d" not in names
    assert "enc/m" in names


def test_constant_is_drawn_on_its_op(tmp_path: Path) -> None:
    """A weight has no box. It is a constant of its op, which is partly quantized."""
    drawing = _draw_text(PAIR, tmp_path)
    matmul = drawing.boxes[1]
    (weight,) = matmul.constants
    assert (weight.slot, weight.role, weight.name, weight.dtype, weight.shape) == (1, "weight", "w", "float32", "4x4")
    assert [box.inputs for box in drawing.boxes] == ["", "some", "none", "none", ""]
    assert matmul.reason == "its weight w:0 is float"


def test_scopes_with_several_ops_are_groups(tmp_path: Path) -> None:
    """A scope with two ops is a group, and one with a single op is not."""
    drawing = _draw_text(PAIR, tmp_path)
    assert [(group.label, group.parent, group.graph) for group in drawing.groups] == [("enc", -1, "")]
    assert [box.group for box in drawing.boxes] == [-1, 0, 0, -1, -1]


def test_dynamic_dequantize_has_a_box(tmp_path: Path) -> None:
    """A dequantize op with a computed scale has a box."""
    drawing = _draw_text(
        """agraph (int8[4] x, float s) => (float[4] y)
        { [t] u = Abs (s)  [d] y = DequantizeLinear (x, u) }
        """,
        tmp_path,
    )
    assert [box.op.name for box in drawing.boxes] == ["x", "s", "t", "d", "@y"]
    assert drawing.boxes[3].annotations == (0,)
    assert annotation_text(drawing.annotations[0]) == "? dynamic"


def test_quantized_constants_and_fan_out(samples: Path) -> None:
    """Every annotation of a quantized model is shown, and no quantization op has a box."""
    result = gq.insert(samples / "digits_cnn.onnx", rules="fixed_point")
    drawing = model_drawing(result.model)
    assert _shown_annotations(drawing) == set(range(len(drawing.annotations)))
    assert not [box for box in drawing.boxes if box.op.kind in QUANTIZATION_KINDS]
    assert {box.inputs for box in drawing.boxes if box.op.kind == "conv"} == {"all"}
    names = {op.name for graph in result.model.graphs.values() for op in graph.ops() if is_inserted(op)}
    assert any(name.endswith("/clip_low") for name in names)
    assert not [box for box in drawing.boxes if is_inserted(box.op)]
    assert {name for folded in drawing.folded_ops for _, name in folded} == names


def test_insert_annotates_rule_reason_and_histogram(samples: Path) -> None:
    """Inserted sites show rule, reason, scheme and statistics. Skipped uses show the reason."""
    result = gq.insert(
        samples / "digits_cnn.onnx", data=f"{samples / 'digits_cnn_calib.npz'}", samples=16, validate=False
    )
    drawing = result_drawing(result)
    by_tensor = {annotation.tensor: annotation for annotation in drawing.annotations}
    for insertion in result.inserted:
        annotation = by_tensor.get(insertion.site.tensor)
        if annotation is not None:
            assert (annotation.rule, annotation.why) == (insertion.site.rule, insertion.site.why)
            assert annotation.params is not None
            assert np.array_equal(annotation.params.scale, insertion.params.scale)
            if annotation.tensor_range is not None:
                assert annotation.tensor_range.cost is not None
                assert annotation.tensor_range.sketch is result.stats.sketches[insertion.site.tensor]
    reasons = {(box.op.name, shown.slot): shown.reason for box, shown in _uses(drawing) if shown.reason}
    assert result.skips
    for skip in result.skips:
        for use in skip.uses:
            assert reasons[use.op, use.slot].startswith(skip.reason)


def _uses(drawing: Drawing) -> list[tuple]:
    wires = [(drawing.boxes[wire.target], wire) for wire in drawing.wires]
    return wires + [(box, constant) for box in drawing.boxes for constant in box.constants]


def test_plan_is_drawn_on_the_prepared_model(samples: Path) -> None:
    """Each use of each site has its annotation, with the scheme and without a scale."""
    model = gq.load(samples / "digits_cnn.onnx")
    plan = gq.plan(model)
    drawing = plan_drawing(prepare_for_plan(model, plan), plan)
    assert drawing.planned
    shown = {(box.op.name, shown.slot): shown.annotations for box, shown in _uses(drawing)}
    for number, site in enumerate(plan.sites):
        assert [shown[use.op, use.slot] for use in site.uses] == [(number,)] * len(site.uses)
    assert {annotation.dtype for annotation in drawing.annotations} == {site.scheme.type.name for site in plan.sites}
    assert all(annotation.scheme and annotation.params is None for annotation in drawing.annotations)


def _save_model_with_if(path: Path) -> None:
    """Save a model with an If whose branches capture `x`."""

    def branch(name: str, op: str) -> onnx.GraphProto:
        value = helper.make_tensor_value_info(f"{name}_out", 1, [4])
        node = helper.make_node(op, ["x"], [f"{name}_in"], name=f"{name}_op")
        last = helper.make_node("Neg", [f"{name}_in"], [f"{name}_out"], name=f"{name}_neg")
        return helper.make_graph([node, last], name, [], [value])

    node = helper.make_node(
        "If", ["c"], ["y"], name="choice", then_branch=branch("yes", "Relu"), else_branch=branch("no", "Abs")
    )
    inputs = [helper.make_tensor_value_info("x", 1, [4]), helper.make_tensor_value_info("c", 9, [])]
    graph = helper.make_graph([node], "main", inputs, [helper.make_tensor_value_info("y", 1, [4])])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)


def test_nested_graphs_are_groups_wired_to_their_owner(tmp_path: Path) -> None:
    """Each branch is a group. Its captures and outputs are wires, and the If refers to both branches."""
    _save_model_with_if(tmp_path / "if.onnx")
    drawing = model_drawing(gq.load(tmp_path / "if.onnx"))
    graphs = [group.graph for group in drawing.groups]
    assert graphs == ["choice/else_branch", "choice/then_branch"]
    number = {(box.graph, box.op.name): number for number, box in enumerate(drawing.boxes)}
    wires = {(wire.source, wire.target): wire.slot for wire in drawing.wires}
    for group, (graph, op) in enumerate(zip(graphs, ("no", "yes"), strict=True)):
        assert wires[number["", "x"], number[graph, f"{op}_op"]] == 0
        (out,) = [
            number
            for (home, _), number in number.items()
            if home == graph and drawing.boxes[number].op.kind == "output"
        ]
        assert wires[out, number["", "choice"]] == -1
        assert drawing.boxes[out].group == group
    assert drawing.boxes[number["", "choice"]].calls == (0, 1)


def test_tflite_annotations_are_on_wires_and_constants(model_folder: Path) -> None:
    """Scales of TFLite tensors are annotations, and all of them are shown."""
    drawing = model_drawing(gq.load(model_folder / "kws/kws_int8.tflite"))
    assert _shown_annotations(drawing) == set(range(len(drawing.annotations)))
    assert {box.inputs for box in drawing.boxes if box.op.kind in {"conv", "depthwise_conv"}} == {"all"}


@pytest.mark.parametrize(
    ("name", "hops", "shown"),
    [
        ("enc/r", 0, ["enc/r"]),
        ("enc/r:0", 1, ["enc/m", "enc/r", "dec/a"]),
        ("q", 0, ["enc/m"]),
        ("w", 1, ["x", "enc/m", "enc/r"]),
        ("h", 9, ["x", "enc/m", "enc/r", "dec/a", "@y"]),
    ],
)
def test_neighborhood(tmp_path: Path, name: str, hops: int, shown: list[str]) -> None:
    """A neighborhood starts at an op, tensor, folded op or constant, and has the wires between its boxes."""
    drawing, chosen = neighborhood(_draw_text(PAIR, tmp_path), name, hops)
    assert [box.op.name for box in drawing.boxes] == shown
    wires: list[Wire] = drawing.wires
    assert all(max(wire.source, wire.target) < len(shown) for wire in wires)
    assert {shown[box] for box in chosen} <= {"enc/r", "enc/m"}


def test_neighborhood_of_an_unknown_name(tmp_path: Path) -> None:
    """An unknown name raises UsageError with similar names."""
    with pytest.raises(UsageError, match=r"nothing named 'enc/x'\. Did you mean 'enc/"):
        neighborhood(_draw_text(PAIR, tmp_path), "enc/x", 1)


PBTXT = """
node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } } }
node { name: "a" op: "Relu" input: "x" attr { key: "T" value { type: DT_FLOAT } } }
node { name: "b" op: "Neg" input: "x" input: "^a" attr { key: "T" value { type: DT_FLOAT } } }
node { name: "c" op: "Abs" input: "b" input: "^a" input: "^b" attr { key: "T" value { type: DT_FLOAT } } }
"""


def test_control_edges_are_not_wires(tmp_path: Path) -> None:
    """Control edges are separate from wires, and stay in a neighborhood."""
    (tmp_path / "m.pbtxt").write_text(PBTXT)
    drawing = model_drawing(gq.load(tmp_path / "m.pbtxt"))
    name = [box.op.name for box in drawing.boxes]
    edges = sorted((name[source], name[target]) for source, target in drawing.controls)
    assert edges == [("a", "b"), ("a", "c"), ("b", "c")]
    assert ("a", "c") not in {(source, target) for source, target, *_ in _wires(drawing)}
    subdrawing, _ = neighborhood(drawing, "c", 1)
    names = [box.op.name for box in subdrawing.boxes]
    assert "a" not in names
    assert [(names[source], names[target]) for source, target in subdrawing.controls] == [("b", "c")]

"""Initializers that are inputs too, and Constant nodes."""

import base64

import numpy as np
import onnx
import onnx.parser
import pytest
from support.onnx_models import run_unoptimized

import graphquant as gq
from graphquant.formats import onnx as onnx_format
from graphquant.ir import Parameters, TensorRef
from graphquant.quantize import find_skipped_steps, prepare

NODES = ("constant-nodes",)


def load_with_functions(folder, text, *, ir=8, functions=""):
    """The model written as text."""
    head = f'<ir_version: {ir}, opset_import: ["": 13, "own": 1]>\n'
    onnx.save(onnx.parser.parse_model(f"{head} g {text}{functions}"), folder / "model.onnx")
    return gq.load(folder / "model.onnx")


def test_initializers_that_are_inputs(tmp_path):
    """They become constants and stop being inputs; others stay where they are."""
    text = """<ir_version: 3, opset_import: ["": 9]>
g (float[2] a, float[2] w, float[2] b) => (float[2] y) <float[2] w = {1, 2}> { t = Add (a, w)\n y = Add (t, b) }"""
    message = onnx.parser.parse_model(text.replace("<float[2] w = {1, 2}>", ""))
    message.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 2], np.float32), "w"))
    onnx.save(message, tmp_path / "model.onnx")
    model = onnx_format.load(tmp_path / "model.onnx")
    assert not Parameters(model).is_parameter(TensorRef("", "w"))
    prepared, (step,) = prepare(model, ("initializer-inputs",))
    assert (step.target, step.undo["position"]) == ("w", 1)
    assert onnx.ValueInfoProto.FromString(base64.b64decode(step.undo["input"])) == message.graph.input[1]
    assert prepared.main.inputs == ["a", "b"]
    assert Parameters(prepared).is_parameter(TensorRef("", "w"))
    feeds = {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}
    out = onnx_format.emit(prepared)
    assert run_unoptimized(out, feeds)[0].tolist() == [3.0, 4.0]
    assert prepare(prepared, ("initializer-inputs",)) == (prepared, ())


def test_constant_nodes(tmp_path):
    """They become initializers of the same name and value, in branches too, whichever attribute holds the value."""
    text = """(float[2] x, bool b) => (float[2] y) {
        k = Constant <value = float[2] {1, 2}> ()
        [two] f = Constant <value_float = 3.0> ()
        i = Constant <value_ints = [2]> ()
        r = Reshape (k, i)
        a = Add (x, r)
        m = Mul (a, f)
        y = If (b) <
            then_branch = t () => (float[2] p) { c = Constant <value_floats = [4.0, 5.0]> ()  p = Sub (m, c) },
            else_branch = e () => (float[2] q) { q = Sub (m, k) }
        >
    }"""
    model = load_with_functions(tmp_path, text, ir=3)
    prepared, steps = prepare(model, NODES)
    assert [(step.step, step.target) for step in steps] == [
        ("constant-nodes", "k"),
        ("constant-nodes", "two"),
        ("constant-nodes", "i"),
        ("constant-nodes", "y/then_branch/c"),
    ]
    message = onnx_format.emit(prepared)
    assert message.ir_version == 4  # the first whose initializers need not be inputs
    assert "Constant" not in str(message)
    values = {
        initializer.name: onnx.numpy_helper.to_array(initializer).tolist() for initializer in message.graph.initializer
    }
    assert values == {"k": [1.0, 2.0], "f": 3.0, "i": [2]}
    (inner,) = message.graph.node[-1].attribute[0].g.initializer
    assert (inner.name, onnx.numpy_helper.to_array(inner).tolist()) == ("c", [4.0, 5.0])
    for flag in (True, False):
        feeds = {"x": np.array([1, -1], np.float32), "b": np.array(flag)}
        assert np.array_equal(run_unoptimized(message, feeds), run_unoptimized(model.source.message, feeds))
    node = onnx.NodeProto.FromString(base64.b64decode(steps[1].undo["removed"][0]["node"]))
    assert node == model.source.message.graph.node[1]
    assert find_skipped_steps(prepared, NODES) == ()


def test_large_constants_are_stored_by_reference(tmp_path):
    """The record of a large one has its digest in the place of its value."""
    message = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 13]> g (float[1] x) => (float y) {y = Add(x, k)}'
    )
    value = np.arange(1 << 17, dtype=np.float32)
    node = onnx.helper.make_node("Constant", [], ["k"], value=onnx.numpy_helper.from_array(value))
    message.graph.node.insert(0, node)
    onnx.save(message, tmp_path / "model.onnx")
    prepared, (step,) = prepare(gq.load(tmp_path / "model.onnx"), NODES)
    (item,) = step.undo["removed"]
    bare = onnx.NodeProto.FromString(base64.b64decode(item["node"]))
    assert (list(bare.attribute[0].t.dims), bare.attribute[0].t.raw_data) == ([1 << 17], b"")
    assert item["value"]["now"] == "k"

    from tests.support.original_weights import original_weights

    ((restored, exact),) = original_weights(step, lambda name: prepared.main.op(name).read_value()).values()
    assert exact
    assert np.array_equal(restored, value)


@pytest.mark.parametrize(
    ("text", "functions", "tensors"),
    [
        (
            "(float[2] x) => (float[2] y, float[2] k) { k = Constant <value = float[2] {1, 2}> ()  y = Add (x, k) }",
            "",
            ["k:0"],
        ),
        (
            "(float[2] x) => (float[2] y) { y = own.f (x) }",
            """<domain: "own", opset_import: ["": 13]>
            f (a) => (b) { k = Constant <value_floats = [1.0, 2.0]> ()  b = Add (a, k) }""",
            [],
        ),
    ],
    ids=["output", "function"],
)
def test_nodes_that_stay(tmp_path, text, functions, tensors):
    """A node that names an output stays, with a reason. Functions have no initializers."""
    model = load_with_functions(tmp_path, text, functions=functions)
    assert prepare(model, NODES) == (model, ())
    skipped = find_skipped_steps(model, NODES)
    assert [str(entry.tensor) for entry in skipped] == tensors
    assert all("graph output" in entry.reason for entry in skipped)

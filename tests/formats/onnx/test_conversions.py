"""Upgrades of models to a newer opset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from graphquant.errors import ModelError
from graphquant.formats import onnx as format_
from graphquant.formats.onnx import conversions
from graphquant.formats.onnx.reader import model_from_message
from graphquant.formats.onnx.runner import OnnxRunner
from graphquant.ir import check_invariants

OLD = """<ir_version: 5, opset_import: ["" : 11]>
g (float[N,2] x) => (float[2] y) <float[2] w = {1, 2}> {
    named = Add(x, w)
    s = ReduceSum <axes = [0], keepdims = 0> (named)
    y = Relu(s)
}"""


def test_upgrade_gives_the_same_outputs(load_text: Any) -> None:
    """Attributes become inputs, names and initializers stay, and the IR version suits the opset."""
    model = load_text(OLD)
    result = format_.upgrade_opset(model, 13)
    check_invariants(result, "upgrade")
    assert (model.opset, result.opset, result.source.message.ir_version) == (11, 13, 7)
    assert [name for name in result.main.nx if name in model.main] == list(model.main.nx)
    assert len(result.main.slots("s")) == 2
    x = np.array([[1, -9], [2, 3]], np.float32)
    np.testing.assert_array_equal(format_.create_runner(result).run({"x": x})["y"], [5, 0])
    assert format_.upgrade_opset(result, 13) is result
    assert format_.upgrade_opset(result, 10) is result


def test_upgrade_keeps_functions_weights_and_metadata(load_text: Any) -> None:
    """Functions, weights in their order and metadata, which onnx's converter drops, are restored."""
    text = OLD.replace('["" : 11]', '["" : 11, "f" : 1]').replace("y = Relu(s)", "y = f.fn(s)")
    text += ' <domain: "f", opset_import: ["" : 11]> fn (a) => (b) { b = Neg(a) }'
    model = load_text(text)
    message = model.source.message
    message.metadata_props.add(key="note", value="kept")
    result = format_.upgrade_opset(model, 13)
    assert [function.name for function in result.source.message.functions] == ["fn"]
    assert [entry.value for entry in result.source.message.metadata_props] == ["kept"]
    np.testing.assert_array_equal(format_.create_runner(result).run({"x": np.ones((1, 2), np.float32)})["y"], [-2, -3])


@pytest.mark.parametrize("is_wrong", [False, True])
def test_upgrade_of_a_large_model_reads_no_weights(
    load_text: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_wrong: bool
) -> None:
    """Both models get equal synthetic weights. If their outputs differ, the check with the weights decides."""
    message = load_text(OLD.replace("[N,2] x", "[4,2] x")).source.message
    weight = message.graph.initializer[0]
    weight.ClearField("float_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", "w.data"), ("length", "8")):
        weight.external_data.add(key=key, value=value)
    np.ones(2, np.float32).tofile(tmp_path / "w.data")
    monkeypatch.setattr(conversions, "MAX_CHECKED_WEIGHT_BYTES", 7)
    convert = conversions._convert

    def convert_wrongly(light: Any, opset: int) -> Any:
        converted = convert(light, opset)
        converted.graph.node[-1].op_type = "Neg"
        return converted

    model = model_from_message(message, folder=tmp_path)
    if is_wrong:
        monkeypatch.setattr(conversions, "_convert", convert_wrongly)
        with pytest.raises(ModelError, match="its output 'y' differs"):
            format_.upgrade_opset(model, 13)
        return
    fed: list[set[str]] = []
    run = OnnxRunner.run
    monkeypatch.setattr(OnnxRunner, "run", lambda self, feeds: (fed.append(set(feeds)), run(self, feeds))[1])
    assert format_.upgrade_opset(model, 13).opset == 13
    assert fed == [{"x", "w"}, {"x", "w"}]
    message.opset_import[0].version = 17
    del message.graph.node[1]  # Add and Relu are the same ops in both opsets
    message.graph.node[1].input[0] = "named"
    message.graph.output[0].type.tensor_type.ClearField("shape")
    assert format_.upgrade_opset(model_from_message(message, folder=tmp_path), 21).opset == 21
    assert len(fed) == 2


def test_upgrade_adds_no_inferred_shapes(load_text: Any) -> None:
    """With shapes that the source lacks, ONNX Runtime joins ops to one that takes longer."""
    model = load_text(OLD)
    assert not format_.upgrade_opset(model, 13).source.message.graph.value_info
    model.source.message.graph.value_info.add(name="s").type.tensor_type.elem_type = 1
    upgraded = format_.upgrade_opset(model_from_message(model.source.message), 13)
    assert [info.name for info in upgraded.source.message.graph.value_info] == ["s"]


def test_output_without_a_shape(load_text: Any) -> None:
    """A model whose output has no shape is upgraded: ONNX Runtime runs it, although onnx's checker rejects it."""
    message = load_text(OLD).source.message
    message.graph.output[0].type.tensor_type.ClearField("shape")
    result = format_.upgrade_opset(model_from_message(message), 13)
    x = np.array([[1, -9], [2, 3]], np.float32)
    np.testing.assert_array_equal(format_.create_runner(result).run({"x": x})["y"], [5, 0])


def test_nodes_in_another_order(load_text: Any) -> None:
    """Nodes that come before the nodes they read, also through a branch, are moved, as ONNX Runtime does."""
    text = """<ir_version: 6, opset_import: ["" : 11]> g (float[N,2] x, bool f) => (float[2] y) {
        a = Neg(x)
        b = Abs(a)
        c = If(f) <
            then_branch = t () => (float[2] p) { q = Sqrt(b)  p = ReduceSum <axes = [0], keepdims = 0> (q) },
            else_branch = e () => (float[2] r) { r = ReduceSum <axes = [0], keepdims = 0> (a) }
        >
        y = Relu(c)
    }"""
    message = load_text(text).source.message
    nodes = [type(node).FromString(node.SerializeToString()) for node in reversed(message.graph.node)]
    del message.graph.node[:]
    message.graph.node.extend(nodes)
    result = format_.upgrade_opset(model_from_message(message), 13)
    x = np.array([[-1, 9], [4, 16]], np.float32)
    for flag, expected in ((True, [3, 7]), (False, [0, 0])):
        run = format_.create_runner(result).run({"x": x, "f": np.array(flag)})
        np.testing.assert_array_equal(run["y"], expected)


def test_unknown_opset_is_rejected(load_text: Any) -> None:
    """An opset that onnx does not know is an error with advice."""
    with pytest.raises(ModelError, match=r"opset 11 to 999: .*per channel"):
        format_.upgrade_opset(load_text(OLD), 999)


def test_attribute_of_another_type_is_rejected(load_text: Any) -> None:
    """A single integer in place of a list, which crashes onnx's converter, is an error."""
    with pytest.raises(ModelError, match="axes"):
        format_.upgrade_opset(load_text(OLD.replace("axes = [0]", "axes = 0")), 13)


@pytest.mark.parametrize("opset", [13, 17, 21])
def test_upgrade_of_the_face_detector(opset: int, model_folder: Path) -> None:
    """An opset 9 face detector, whose initializers are inputs, gives the same boxes afterwards."""
    model = format_.load(model_folder / "ultraface/version-RFB-320.onnx")
    result = format_.upgrade_opset(model, opset)
    check_invariants(result, "upgrade")
    assert set(model.main.nx) <= set(result.main.nx)
    sizes = [size or 1 for size in model.main.op("input").outputs[0].shape]
    feed = {"input": np.random.default_rng(0).uniform(-1, 1, sizes).astype(np.float32)}
    expected, actual = format_.create_runner(model).run(feed), format_.create_runner(result).run(feed)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-5, atol=1e-6)


def test_opset_that_does_not_run_is_rejected(load_text: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that passes the checker but fails in onnxruntime is rejected; the lower opset works."""
    model = load_text(OLD)
    start = OnnxRunner.start

    def start_below_opset_21(runner: OnnxRunner) -> None:
        if runner.model.opset >= 21:
            raise ModelError("output_dtype INT8.")
        start(runner)

    monkeypatch.setattr(OnnxRunner, "start", start_below_opset_21)
    assert format_.upgrade_opset(model, 13).opset == 13
    with pytest.raises(ModelError, match=r"onnxruntime rejects .*output_dtype INT8"):
        format_.upgrade_opset(model, 21)


def test_quantized_lstm_runs_or_is_rejected(model_folder: Path) -> None:
    """Releases of onnxruntime whose optimizer fails on the upgraded model reject it; others run it."""
    model = format_.load(model_folder / "qlstm_tract.onnx")
    try:
        result = format_.upgrade_opset(model, 21)
    except ModelError as error:
        assert "onnxruntime rejects" in str(error)  # noqa: PT017  # either end is right
    else:
        format_.create_runner(result).start()


SIZES = """<ir_version: 8, opset_import: ["" : 17]>
g (float[N, 1, H, W] x, bool c) => (float[N, r] y)
<float[1, 1, 3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}, int64[2] s = {0, -1}> {
    a = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (x, w)
    b = If (c) <
        then_branch = t () => (float[N, 1, P, Q] d) { d = Relu(a) },
        else_branch = e () => (float[N, 1, P, Q] f) { f = Exp(a) }>
    y = Reshape(b, s)
}"""


def test_shapes_of_inputs(load_text: Any) -> None:
    """All tensors, also those of branches, get the shapes that follow from the inputs; the model stays as it is."""
    model = load_text(SIZES)
    bound = format_.bind_input_shapes(model, {"x": (2, 1, 40, 30), "unknown": (1,)})
    shapes = {output.name: output.shape for _, op in bound.reachable_ops() for output in op.outputs}
    assert shapes["x"] == (2, 1, 40, 30)
    assert shapes["a"] == shapes["b"] == shapes["d"] == shapes["f"] == (2, 1, 20, 15)
    assert shapes["y"] == (2, 300)
    assert model.main.op("x").outputs[0].shape == (None, 1, None, None)
    check_invariants(bound, "shapes")

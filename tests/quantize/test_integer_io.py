"""Integer inputs and outputs of ONNX models: what becomes integer, and that the results keep their bits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import graphquant as gq
from graphquant import formats
from graphquant.errors import FindingsError, UsageError
from graphquant.numerics import dequantize, quantize
from graphquant.quantize.integer_io import integer_tensors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from graphquant.numerics import Array

LEVELS = (
    onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
)


def make_model(nodes: list[Any], constants: dict[str, Any], inputs: dict[str, Any], outputs: dict[str, Any]) -> Any:
    """Return a model of float32 inputs and outputs, given as names and shapes."""
    infos = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in ends.items()]
        for ends in (inputs, outputs)
    ]
    weights = [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "net", *infos, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def picture_model(normalization: list[Any], constants: dict[str, Any], shape: tuple[int, ...] = (3, 8, 8)) -> Any:
    """Return a model with a convolution and a Gemm behind `normalization`, which computes "n" from "x" of a shape."""
    rng = np.random.default_rng(1)
    nodes = [
        *normalization,
        helper.make_node("Conv", ["n", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("Gemm", ["f", "v"], ["y"]),
    ]
    weights = {"w": rng.normal(size=(8, 3, 3, 3)), "v": rng.normal(size=(8, 5))}
    return make_model(nodes, {**weights, **constants}, {"x": ["N", *shape]}, {"y": ["N", 5]})


def pixels(count: int = 16, shape: tuple[int, ...] = (3, 8, 8)) -> Array:
    """Return pictures with all pixel values, as floats."""
    return np.random.default_rng(2).integers(0, 256, (count, *shape)).astype(np.float32)


def run(model: gq.Model, feed: dict[str, Array], level: Any) -> dict[str, Array]:
    """Return the outputs of onnxruntime at an optimization level."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = level, 4
    session = onnxruntime.InferenceSession(formats.format_module("onnx").emit(model).SerializeToString(), options)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))


def assert_same_bits(model: Any, result: gq.Result, data: Any, feed: dict[str, Array]) -> None:
    """Assert that the integer model computes the bits of the model with float inputs and outputs of the same plan."""
    expected_model = gq.insert(model, plan=result.plan, data=data).model
    params = {tensor.name: tensor.params for tensor in result.io if not tensor.reason}
    integers = {
        name: quantize(value, params[name]).astype(params[name].type.name) if name in params else value
        for name, value in feed.items()
    }
    for level in LEVELS:
        expected, actual = run(expected_model, feed, level), run(result.model, integers, level)
        for name, value in actual.items():
            floats = dequantize(value, params[name]) if name in params else value
            np.testing.assert_array_equal(floats, expected[name])


def op_types(model: gq.Model) -> list[str]:
    """Return the op types of the emitted nodes."""
    return [node.op_type for node in formats.format_module("onnx").emit(model).graph.node]


def slice_nodes(part: str, start: int) -> list[Any]:
    """Return a Slice of every other row of "x"."""
    limits = {"starts": start, "ends": 8, "axes": 2, "steps": 2}
    constants = [
        helper.make_node("Constant", [], [f"{part}_{name}"], value=numpy_helper.from_array(np.array([value])))
        for name, value in limits.items()
    ]
    return [*constants, helper.make_node("Slice", ["x", *(f"{part}_{name}" for name in limits)], [part])]


@pytest.mark.parametrize("io", ["uint8", "int8"])
@pytest.mark.parametrize("rules", ["generic", "weights"])
def test_parts_of_a_picture_are_integers(io: str, rules: str) -> None:
    """Ops that take and join parts of an input run on integers; without a pair, pixels become floats at the input."""
    parts = [*slice_nodes("even", 0), *slice_nodes("odd", 1)]
    model = picture_model([*parts, helper.make_node("Concat", ["even", "odd"], ["n"], axis=3)], {})
    options = {"rules": "generic"} if rules == "generic" else {"rules": "generic", "exclude": ["x", "n", "even", "odd"]}
    result = gq.insert(model, data={"x": pixels()}, io=io, **options)
    assert [(tensor.name, tensor.dtype) for tensor in result.io][:1] == [("x", io)]
    types = op_types(result.model)
    assert types.index("DequantizeLinear" if rules == "weights" else "Slice") < types.index("Concat")
    assert_same_bits(model, result, {"x": pixels()}, {"x": pixels(3)})


def test_join_with_another_tensor_stays_float() -> None:
    """A Concat of the input and another tensor reads floats, and is the reason in the message."""
    joined = helper.make_node("Concat", ["even", "k"], ["n"], axis=2)
    model = picture_model([*slice_nodes("even", 0), joined], {"k": np.ones((1, 3, 1, 8))}, shape=(3, 8, 8))
    with pytest.raises(gq.GraphQuantError, match="joins it with another tensor"):
        gq.insert(model, data={"x": pixels(1) / 255}, io="uint8", rules="generic")


NORMALIZATIONS = {
    "div": ([helper.make_node("Div", ["x", "k"], ["n"])], {"k": 255}, "folded"),
    "mean": (
        [helper.make_node("Sub", ["x", "m"], ["s"]), helper.make_node("Mul", ["s", "k"], ["n"])],
        {"m": [127], "k": 1 / 128},
        "folded",
    ),
    "half": (
        [helper.make_node("Sub", ["x", "m"], ["s"]), helper.make_node("Div", ["s", "m"], ["n"])],
        {"m": 127.5},
        "kept",
    ),
    "channels": (
        [helper.make_node("Sub", ["x", "m"], ["s"]), helper.make_node("Div", ["s", "k"], ["n"])],
        {"m": np.reshape([123.675, 116.28, 103.53], (3, 1, 1)), "k": np.reshape([58.4, 57.1, 57.4], (3, 1, 1))},
        "kept",
    ),
}


@pytest.mark.parametrize("name", NORMALIZATIONS)
@pytest.mark.parametrize("io", ["uint8", "int8"])
def test_pictures_keep_their_bits(name: str, io: str) -> None:
    """The scale of the input replaces a normalization only if each pixel value keeps its integer."""
    nodes, constants, normalization = NORMALIZATIONS[name]
    model, feed = picture_model(nodes, constants), {"x": pixels()}
    result = gq.insert(model, data=feed, rules=["generic"], io=io)
    source = result.io[0]
    assert (source.dtype, source.scale, source.zero_point) == (io, 1.0, 0 if io == "uint8" else -128)
    assert source.normalization.partition(",")[0] == normalization
    assert {"Div", "Mul", "Sub"}.isdisjoint(op_types(result.model)) == (normalization == "folded")
    assert_same_bits(model, result, feed, feed)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    layouts=st.lists(st.sampled_from(["Transpose", "Identity", "Unsqueeze"]), max_size=3),
    rules=st.sampled_from(["generic", "qnn"]),
    io=st.sampled_from(["int8", "uint8"]),
    offset=st.floats(-2, 2, width=32),
)
@pytest.mark.slow
def test_pairs_behind_layouts_keep_their_bits(layouts: list[str], rules: str, io: str, offset: float) -> None:
    """A pair behind layout ops moves to the input; the results have the same bits at each optimization level."""
    nodes, value = [helper.make_node("Constant", [], ["axes"], value_ints=[2])], "x"
    for index, layout in enumerate(layouts):
        if layout == "Unsqueeze":
            nodes.append(helper.make_node("Unsqueeze", [value, "axes"], [f"u{index}"]))
            nodes.append(helper.make_node("Squeeze", [f"u{index}", "axes"], [f"t{index}"]))
        else:
            attributes = {"perm": [0, 1, 3, 2]} if layout == "Transpose" else {}
            nodes.append(helper.make_node(layout, [value], [f"t{index}"], **attributes))
        value = f"t{index}"
    nodes.append(helper.make_node("Identity", [value], ["n"]))
    model = picture_model(nodes, {})
    feed = {"x": (pixels() / 100 + offset).astype(np.float32)}
    result = gq.insert(model, data=feed, rules=[rules], io=io)
    assert result.io[0].reason == ""
    assert_same_bits(model, result, feed, feed)


def branched_model() -> Any:
    """Return a model of two inputs, one of which a float op reads too, and an output behind a Transpose."""
    nodes = [
        helper.make_node("MatMul", ["a", "v"], ["m"]),
        helper.make_node("Sin", ["a"], ["s"]),
        helper.make_node("Add", ["m", "s"], ["p"]),
        helper.make_node("MatMul", ["b", "v"], ["q"]),
        helper.make_node("Relu", ["q"], ["r"]),
        helper.make_node("Transpose", ["r"], ["y"], perm=[1, 0]),
    ]
    weights = {"v": np.random.default_rng(3).normal(size=(6, 6))}
    return make_model(nodes, weights, {"a": [4, 6], "b": [4, 6]}, {"p": [4, 6], "y": [6, 4]})


def test_a_float_reader_keeps_its_input_float() -> None:
    """The reason names the op, and the other input and the output behind a Transpose become integers."""
    rng = np.random.default_rng(4)
    feeds = [{name: rng.normal(size=(4, 6)).astype(np.float32) for name in "ab"} for _ in range(8)]
    result = gq.insert(branched_model(), data=feeds, rules=["qnn"], exclude=["s"], io="uint8")
    tensors = {tensor.name: tensor for tensor in result.io}
    assert [tensors[name].dtype for name in "aby"] == ["float32", "uint8", "uint8"]
    assert "Sin" in tensors["a"].reason
    assert_same_bits(branched_model(), result, feeds, feeds[0])


def test_no_integer_is_an_error(samples: Path) -> None:
    """Rules that keep the ends float give exit code 1, and TensorFlow's own format code 2."""
    data = str(samples / "digits_cnn_calib.npz")
    with pytest.raises(FindingsError, match="stem/conv"):
        gq.insert(samples / "digits_cnn.onnx", data=data, io="uint8")
    with pytest.raises(UsageError, match="tflite"):
        gq.insert(samples / "digits_cnn.pb", data=data, io="uint8")


def test_files_tell_their_scales(samples: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    """The report, inspect, the annotation of the graph and the metadata have the same scale."""
    source, data = samples / "digits_cnn.onnx", samples / "digits_cnn_calib.npz"
    path, report = tmp_path / "q.onnx", tmp_path / "q.json"
    cli("insert", source, "--data", data, "--rules", "qnn", "--io", "uint8", "-o", path, "--report", report)
    reported = json.loads(report.read_text())["io"]
    assert json.loads(cli("inspect", path, "--format", "json").stdout)["io"] == reported
    assert [(tensor["name"], tensor["dtype"], tensor["reason"]) for tensor in reported] == [
        ("image", "uint8", ""),
        ("probabilities", "uint8", ""),
    ]
    message = onnx.load(path)
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in message.graph.initializer}
    for annotation, tensor in zip(message.graph.quantization_annotation, reported, strict=True):
        names = {entry.key: entry.value for entry in annotation.quant_parameter_tensor_names}
        assert annotation.tensor_name == tensor["name"]
        assert constants[names["SCALE_TENSOR"]] == np.float32(tensor["scale"])
        assert constants[names["ZERO_POINT_TENSOR"]] == tensor["zero_point"]
    types = [info.type.tensor_type.elem_type for info in (*message.graph.input, *message.graph.output)]
    assert types == [TensorProto.UINT8] * 2


def test_other_commands_take_integer_models(samples: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    """Float data is quantized for the model, outputs are dequantized, and strip gives back float inputs and outputs."""
    source, data = samples / "digits_cnn.onnx", samples / "digits_cnn_calib.npz"
    result = gq.insert(source, data=str(data), rules=["qnn"], io="int8")
    path = result.save(tmp_path / "q.onnx")
    assert result.validation is not None
    assert result.validation.comparison is not None
    figures = result.validation.comparison.outputs[0]
    assert figures.sqnr is not None
    assert figures.sqnr > 40
    assert all(site.local is None or site.local > 0 for site in result.validation.comparison.sites)
    floats = gq.insert(source, plan=result.plan, data=str(data))
    assert floats.validation is not None
    assert floats.validation.comparison is not None
    assert floats.validation.comparison.outputs[0].sqnr == figures.sqnr
    assert gq.compare(source, path, str(data)).outputs[0].sqnr == pytest.approx(figures.sqnr, abs=5)
    cli("strip", path, "-o", tmp_path / "float.onnx", "--check", source)
    stripped = onnx.load(tmp_path / "float.onnx")
    assert {info.type.tensor_type.elem_type for info in (*stripped.graph.input, *stripped.graph.output)} == {1}
    assert not stripped.graph.quantization_annotation
    cli("check", path)
    cli("explain", path, "image")


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "image", "role": "input", "dtype": "float32"},
        {"name": "image", "role": "input", "dtype": "uint8", "scale": 1e300},
        {"name": "image", "role": "input", "dtype": "uint8", "zero_point": 1 << 40},
        [],
    ],
)
def test_damaged_entries_are_ignored(entry: Any) -> None:
    """Metadata that no version wrote is no reason to fail."""
    assert not integer_tensors({"io": json.dumps([entry])})
    assert not integer_tensors({"io": "["})

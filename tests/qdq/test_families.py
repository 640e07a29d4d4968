"""Ops, names, constants and reshapes that each family adds to a graph, for both frameworks."""

import dataclasses
import re

import numpy as np
import pytest
from support.qparams import choose_qparams

from graphquant.ir import Graph, Model, Op, Output, Parameters, TensorRef, check_invariants
from graphquant.numerics import FloatType, IntType, QParams, Range, dequantize, quantize
from graphquant.qdq import FAMILIES, QDQSite
from graphquant.qdq.family import FamilyRequest

INT8 = IntType(8, True)
E4M3 = FloatType("float8_e4m3fn")


def graph_with(shape: tuple[int, ...], kind: str = "relu") -> tuple[Model, Graph, TensorRef]:
    """Build a graph with one float32 tensor."""
    model = Model(format="onnx")
    graph = model.graphs[""] = Graph("", model.graphs)
    op = Op(name="t", kind=kind, type=kind, outputs=(Output("t", "float32", shape),))
    return model, graph, graph.add_op(op)


def lower_tensor(family: str, shape: tuple[int, ...], params: QParams, **more) -> tuple[Graph, TensorRef]:
    """Return the graph after adding ops for one site, with checked invariants."""
    model, graph, tensor = graph_with(shape)
    site = QDQSite(tensor=tensor, name="t/quant", params=params, rule="r", shape=shape, **more)
    result = FAMILIES[family].add_ops(graph, site)
    check_invariants(model, family)
    assert all(op.rule == "r" for op in graph.ops() if op.name != "t")
    return graph, result


def sources_of_ops(graph: Graph) -> dict[str, tuple[str, list[str]]]:
    """Return each new op with its type and sources."""
    return {op.name: (op.type, [str(slot) for slot in graph.slots(op.name)]) for op in graph.ops() if op.name != "t"}


def value(graph: Graph, name: str) -> np.ndarray:
    """Return the value of a constant after checking its output."""
    op = graph.op(name)
    assert op.kind == "constant"
    constant = op.read_value()
    assert (op.outputs[0].dtype, op.outputs[0].shape) == (str(constant.dtype), constant.shape)
    return constant


def channel_params(channels: int, axis: int) -> QParams:
    """Return symmetric int8 scales, one per channel, all different."""
    high = np.arange(1.0, channels + 1)
    return choose_qparams(Range(-high, high), INT8, symmetric=True, narrow=True, axis=axis)


def test_onnx_per_tensor() -> None:
    """QuantizeLinear and DequantizeLinear share the constants of scale and zero point."""
    params = choose_qparams(Range(np.array(-1.0), np.array(3.0)), IntType(8, False), symmetric=False)
    graph, result = lower_tensor("onnx-qdq", (2, 3), params)
    assert sources_of_ops(graph) == {
        "t/quant/scale": ("Constant", []),
        "t/quant/zero_point": ("Constant", []),
        "t/quant": ("QuantizeLinear", ["t:0", "t/quant/scale:0", "t/quant/zero_point:0"]),
        "t/quant/dequant": ("DequantizeLinear", ["t/quant:0", "t/quant/scale:0", "t/quant/zero_point:0"]),
    }
    assert result == TensorRef("", "t/quant/dequant")
    assert graph.op("t/quant").outputs == (Output("t/quant", "uint8", (2, 3)),)
    assert graph.output(result) == Output("t/quant/dequant", "float32", (2, 3))
    scale, zero = value(graph, "t/quant/scale"), value(graph, "t/quant/zero_point")
    assert (scale, scale.dtype, scale.shape) == (np.float32(4 / 255), np.float32, ())
    assert (zero, zero.dtype, zero.shape) == (64, np.uint8, ())
    assert [dict(graph.op(name).attrs) for name in ("t/quant", "t/quant/dequant")] == [{}, {}]
    assert [graph.op(name).kind for name in ("t/quant", "t/quant/dequant")] == ["quantize", "dequantize"]


def test_onnx_per_channel_weight_is_folded() -> None:
    """A weight becomes an integer constant and one DequantizeLinear with its axis."""
    weight = np.linspace(-2.0, 2.0, 12, dtype=np.float32).reshape(3, 4)
    params = channel_params(3, 0)
    graph, result = lower_tensor("onnx-qdq", (3, 4), params, read_value=lambda: weight)
    assert sources_of_ops(graph) == {
        "t/quant/scale": ("Constant", []),
        "t/quant/zero_point": ("Constant", []),
        "t/quant/int8": ("Constant", []),
        "t/quant/dequant": ("DequantizeLinear", ["t/quant/int8:0", "t/quant/scale:0", "t/quant/zero_point:0"]),
    }
    assert graph.op(result.op).attrs == {"axis": 0}
    folded = value(graph, "t/quant/int8")
    assert folded.dtype == np.int8
    np.testing.assert_array_equal(folded, quantize(weight, params))
    assert value(graph, "t/quant/zero_point").tolist() == [0, 0, 0]
    step = value(graph, "t/quant/scale")[:, None]
    clipped = np.clip(weight, -127 * step, 127 * step)
    assert (np.abs(dequantize(folded, params) - clipped) <= step * 0.5001).all()


def test_odd_widths_live_in_the_next_container() -> None:
    """Five bits are int8 values from -16 to 15."""
    params = choose_qparams(Range(np.array(-1.0), np.array(1.0)), IntType(5, True), symmetric=True)
    values = np.array([-9.0, -1.0, 0.0, 1.0, 9.0], np.float32)
    graph, _ = lower_tensor("onnx-qdq", (5,), params, read_value=lambda: values)
    assert value(graph, "t/quant/int5").tolist() == [-16, -15, 0, 15, 15]


def test_fake_quant_per_tensor() -> None:
    """FakeQuantWithMinMaxVars has the range, bits and narrow range of the params."""
    params = choose_qparams(Range(np.array(-8.0), np.array(127 / 16)), INT8, symmetric=True)
    graph, result = lower_tensor("fake-quant", (2, 3), params)
    assert sources_of_ops(graph) == {
        "t/quant/min": ("Const", []),
        "t/quant/max": ("Const", []),
        "t/quant": ("FakeQuantWithMinMaxVars", ["t:0", "t/quant/min:0", "t/quant/max:0"]),
    }
    assert result == TensorRef("", "t/quant")
    assert (value(graph, "t/quant/min"), value(graph, "t/quant/max")) == (np.float32(-8.0), np.float32(127 / 16))
    assert value(graph, "t/quant/min").dtype == np.float32
    assert graph.op("t/quant").attrs == {"num_bits": 8, "narrow_range": False}
    assert graph.output(result) == Output("t/quant", "float32", (2, 3))


def test_fake_quant_of_the_last_axis() -> None:
    """Per channel of the last axis needs no reshape."""
    graph, result = lower_tensor("fake-quant", (3, 3, 2, 4), channel_params(4, 3))
    assert set(sources_of_ops(graph)) == {"t/quant", "t/quant/min", "t/quant/max"}
    assert graph.op(result.op).type == "FakeQuantWithMinMaxVarsPerChannel"
    np.testing.assert_allclose(value(graph, "t/quant/max"), [1.0, 2.0, 3.0, 4.0], rtol=1e-6)
    assert graph.op(result.op).attrs == {"num_bits": 8, "narrow_range": True}


@pytest.mark.parametrize(
    ("shape", "axis", "flat", "high"),
    [
        ((3, 3, 2, 4), 2, (3, 3, 8), [1.0] * 4 + [2.0] * 4),
        ((3, 3, 5, 1), 2, (3, 3, 5), [1.0, 2.0, 3.0, 4.0, 5.0]),
        ((2, 3, 2), 0, (12,), [1.0] * 6 + [2.0] * 6),
    ],
)
def test_fake_quant_of_an_inner_axis(shape, axis: int, flat, high) -> None:
    """The channel axis and later axes are merged into the last axis, with each channel's range repeated."""
    graph, result = lower_tensor("fake-quant", shape, channel_params(shape[axis], axis))
    assert sources_of_ops(graph) == {
        "t/quant/flat/shape": ("Const", []),
        "t/quant/flat": ("Reshape", ["t:0", "t/quant/flat/shape:0"]),
        "t/quant/min": ("Const", []),
        "t/quant/max": ("Const", []),
        "t/quant": ("FakeQuantWithMinMaxVarsPerChannel", ["t/quant/flat:0", "t/quant/min:0", "t/quant/max:0"]),
        "t/quant/shaped/shape": ("Const", []),
        "t/quant/shaped": ("Reshape", ["t/quant:0", "t/quant/shaped/shape:0"]),
    }
    assert value(graph, "t/quant/flat/shape").tolist() == list(flat)
    assert value(graph, "t/quant/shaped/shape").tolist() == list(shape)
    np.testing.assert_allclose(value(graph, "t/quant/max"), high, rtol=1e-6)
    np.testing.assert_allclose(value(graph, "t/quant/min"), np.negative(high), rtol=1e-6)
    assert result == TensorRef("", "t/quant/shaped")
    assert graph.output(result) == Output("t/quant/shaped", "float32", shape)
    assert graph.output(TensorRef("", "t/quant/flat")).shape == flat


@pytest.mark.parametrize("axis", [None, 2])
def test_constants_in_frames_follow_the_tensor(axis: int | None) -> None:
    """In a TF1 frame each new constant runs after the quantized op; elsewhere none does."""
    params = (
        choose_qparams(Range(np.array(-1.0), np.array(1.0)), INT8, symmetric=True)
        if axis is None
        else channel_params(2, axis)
    )
    for framed in (True, False):
        graph, _ = lower_tensor("fake-quant", (3, 3, 2, 4), params, in_frame=framed)
        for op in graph.ops():
            if op.kind == "constant":
                assert graph.control_inputs(op.name) == (["t"] if framed else [])


@pytest.mark.parametrize("family", FAMILIES)
def test_names_in_use_get_a_suffix(family: str) -> None:
    """If a name is used, the new op gets the smallest unused suffix."""
    model, graph, tensor = graph_with((2,))
    for name in ("t/quant", "t/quant/min", "t/quant/scale"):
        graph.add_op(Op(name=name, kind="other", type="other", outputs=(Output(name),)))
    params = choose_qparams(Range(np.array(-1.0), np.array(1.0)), INT8, symmetric=True)
    FAMILIES[family].add_ops(graph, QDQSite(tensor=tensor, name="t/quant", params=params, rule="r"))
    check_invariants(model, family)
    used_name = "t/quant/scale_1" if FAMILIES[family].format == "onnx" else "t/quant/min_1"
    assert graph.slots("t/quant_1")[:2] == [tensor, TensorRef("", used_name)]


@pytest.mark.parametrize(("family", "name"), [("onnx-qdq", "t/quant"), ("fake-quant", "t/quant")])
@pytest.mark.parametrize("symmetric", [True, False])
def test_params_are_read_back(family: str, name: str, symmetric: bool) -> None:
    """A family reads the scale and range of its own ops."""
    params = choose_qparams(Range(np.array(-0.7), np.array(2.9)), INT8, symmetric=symmetric)
    model, graph, tensor = graph_with((2,))
    FAMILIES[family].add_ops(graph, QDQSite(tensor=tensor, name=name, params=params, rule="r"))
    actual = FAMILIES[family].read_params(graph, graph.op(name), Parameters(model))
    assert actual is not None
    np.testing.assert_allclose(actual.scale, params.scale, rtol=1e-6)
    np.testing.assert_allclose([actual.range.low, actual.range.high], [params.range.low, params.range.high], rtol=1e-6)
    assert actual.zero_point == params.zero_point


@pytest.mark.parametrize(("family", "constant"), [("fake-quant", "t/quant/max"), ("onnx-qdq", "t/quant/scale")])
def test_a_range_of_strings_is_not_read(family: str, constant: str) -> None:
    """A damaged op whose range or scale is not a float has unknown params."""
    params = choose_qparams(Range(np.array(-0.7), np.array(2.9)), INT8, symmetric=True)
    graph, _ = lower_tensor(family, (2,), params)
    damaged = dataclasses.replace(graph.op(constant), read_value=lambda: np.array("", object))
    graph.replace_op(damaged)
    model = Model(format="onnx", graphs={"": graph})
    assert FAMILIES[family].read_params(graph, graph.op("t/quant"), Parameters(model)) is None


@pytest.mark.parametrize(
    ("family", "asked", "reason"),
    [
        ("onnx-qdq", FamilyRequest(type=INT8, axis=0, dtype="float32", shape=None), None),
        ("onnx-qdq", FamilyRequest(type=INT8, axis=None, dtype="float16", shape=None), "convert .*float32"),
        ("onnx-qdq", FamilyRequest(type=IntType(16, True), axis=None, dtype="float32", shape=None), None),
        (
            "onnx-qdq",
            FamilyRequest(type=IntType(17, True), axis=None, dtype="float32", shape=None),
            "use 2 to 16 bits",
        ),
        (
            "onnx-qdq",
            FamilyRequest(type=IntType(32, True), axis=None, dtype="float32", shape=None),
            "use 2 to 16 bits",
        ),
        (
            "onnx-qdq",
            FamilyRequest(type=IntType(32, True), axis=0, dtype="float32", shape=(3,), is_parameter=True),
            None,
        ),
        ("onnx-qdq", FamilyRequest(type=E4M3, axis=1, dtype="float32", shape=None), None),
        (
            "onnx-qdq",
            FamilyRequest(type=INT8, axis=0, dtype="float32", shape=(64, 2), block=32),
            'weights .*blocks,.* per = "channel"',
        ),
        (
            "onnx-qdq",
            FamilyRequest(type=INT8, axis=0, dtype="float32", shape=(64, 2), block=32, is_parameter=True),
            None,
        ),
        ("fake-quant", FamilyRequest(type=E4M3, axis=None, dtype="float32", shape=None), "is for ONNX models"),
        (
            "fake-quant",
            FamilyRequest(type=INT8, axis=0, dtype="float32", shape=(64, 2), block=32),
            'FakeQuant.*blocks,.* per = "channel"',
        ),
        (
            "quantize-and-dequantize-v2",
            FamilyRequest(type=E4M3, axis=None, dtype="float32", shape=None),
            "for ONNX models",
        ),
        ("fake-quant", FamilyRequest(type=IntType(16, True), axis=None, dtype="float32", shape=None), None),
        ("fake-quant", FamilyRequest(type=IntType(17, True), axis=None, dtype="float32", shape=None), "2 to 16 bits"),
        ("fake-quant", FamilyRequest(type=INT8, axis=None, dtype="float64", shape=None), "this tensor is float64"),
        ("fake-quant", FamilyRequest(type=INT8, axis=1, dtype="float32", shape=(None, 3)), "static shape"),
        ("fake-quant", FamilyRequest(type=INT8, axis=1, dtype="float32", shape=(2, 3)), None),
    ],
)
def test_unsupported_reasons(family: str, asked: FamilyRequest, reason: str | None) -> None:
    """A request that the runtime does not support has a reason."""
    actual = FAMILIES[family].unsupported_reason(asked)
    assert actual is None if reason is None else re.search(reason, actual)

"""Ranges of activations end where the ops that read them return constants."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import graphquant as gq
from graphquant.formats.onnx import load
from graphquant.ir import Parameters, TensorRef
from graphquant.numerics import Range
from graphquant.quantize.saturation import MAX_OPS, is_read_by_last_softmax, is_read_by_maximum, limit_to_responsive

CONSTANTS = (
    "float three = {3.0}, float zero = {0.0}, float six = {6.0}, float sixth = {0.16666667}, float fifth = {0.2},"
    " float half = {0.5}, float one = {1.0}, float root = {1.41421356}, float[4] vector = {1.0, 1.0, 1.0, 1.0}"
)

HARD_SWISHES = {
    "divided gate": "a = Add(c, three) r = Clip(a, zero, six) g = Div(r, six) y = Mul(c, g)",
    "divided product": "a = Add(c, three) r = Clip(a, zero, six) p = Mul(c, r) y = Div(p, six)",
    "multiplied gate": "a = Add(three, c) m = Max(a, zero) r = Min(six, m) g = Mul(r, sixth) y = Mul(g, c)",
    "relu and min": "a = Add(c, three) m = Relu(a) r = Min(m, six) g = Mul(r, sixth) y = Mul(g, c)",
    "hard sigmoid": "h = HardSigmoid<alpha = 0.16666667, beta = 0.5>(c) y = Mul(c, h)",
    "single op": "y = HardSwish(c)",
    "forwarded": "i = Identity(c) h = HardSigmoid<alpha = 0.16666667, beta = 0.5>(i) y = Mul(c, h)",
}
SILU = "s = Sigmoid(c) y = Mul(c, s)"
MISH = "p = Softplus(c) t = Tanh(p) y = Mul(c, t)"
MISH_PARTS = "e = Exp(c) f = Add(e, one) p = Log(f) t = Tanh(p) y = Mul(c, t)"
GELU = "d = Div(c, root) e = Erf(d) f = Add(e, one) g = Mul(c, f) y = Mul(g, half)"


def limited(tmp_path: Path, body: str, low: float, high: float, levels: int = 255) -> tuple[float, float]:
    """Return the limited range of the tensor `c`, as read by all of its consumers."""
    text = (
        f'<ir_version: 10, opset_import: ["" : 20]> g (float[2,4] x, float[2,4] z) => (float[2,4] y)'
        f" <{CONSTANTS}> {{ c = Neg(x) {body} }}"
    )
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    model = load(tmp_path / "model.onnx")
    tensor = TensorRef("", "c")
    uses = model.main.consumers_by_port("c")[0]
    observed = Range(np.asarray(low), np.asarray(high))
    limits = limit_to_responsive(model, Parameters(model), tensor, uses, observed, levels)
    return float(limits.low), float(limits.high)


@pytest.mark.parametrize("body", HARD_SWISHES.values(), ids=HARD_SWISHES.keys())
def test_hard_swish(tmp_path: Path, body: str) -> None:
    """A hard swish is 0 below -3 in every spelling; its upper end is not limited."""
    low, high = limited(tmp_path, body, -30.0, 20.0)
    assert low == pytest.approx(-3, abs=0.1)
    assert high == 20


@pytest.mark.parametrize(
    ("body", "low", "high"),
    [
        (SILU, -4.8, 20),
        (MISH, -4.8, 20),
        (MISH_PARTS, -4.8, 20),
        (GELU, -2.2, 20),
        ("y = Gelu(c)", -2.2, 20),
        ("y = Relu(c)", 0, 20),
        ("y = Clip(c, zero, six)", 0, 6),
        ("y = Max(c, zero)", 0, 20),
        ("y = Min(c, six)", -30, 6),
        ("y = Sigmoid(c)", -6.2, 6.2),
        ("y = Tanh(c)", -3.1, 3.1),
        ("y = HardSigmoid(c)", -2.5, 2.5),
        ("y = HardSigmoid<alpha = 0.1>(c)", -5, 5),
        ("m = Mul(c, fifth) a = Add(m, half) r = Clip(a, zero, one) y = Mul(z, r)", -2.5, 2.5),
        ("a = Add(c, three) r = Clip(a, zero, six) g = Div(r, six) y = Mul(z, g)", -3, 3),
        ("n = Neg(c) y = Relu(n)", -30, 0),
    ],
)
def test_saturating_readers(tmp_path: Path, body: str, low: float, high: float) -> None:
    """The range ends where the results change by less than half a step of their own."""
    assert limited(tmp_path, body, -30.0, 20.0) == pytest.approx((low, high), abs=0.2)


@pytest.mark.parametrize(
    "body",
    [
        "s = Sigmoid(c) q = Mul(c, s) y = Add(q, c)",  # a residual sum reads it too
        "h = HardSigmoid(z) y = Mul(c, h)",  # a gate of another tensor
        "r = Relu(c) q = Sin(c) y = Add(r, q)",  # an unknown op
        "a = Add(c, vector) y = Relu(a)",  # one value for each channel
        "y = LeakyRelu(c)",
    ],
)
def test_responsive_readers(tmp_path: Path, body: str) -> None:
    """A reader that responds to all values, or that is unknown, keeps the whole range."""
    assert limited(tmp_path, body, -30.0, 20.0) == pytest.approx((-30, 20), abs=0.2)


def test_logarithm_of_a_gate(tmp_path: Path) -> None:
    """A logarithm responds where the sigmoid before it hardly does."""
    assert limited(tmp_path, "s = Sigmoid(c) y = Log(s)", -30.0, 20.0) == pytest.approx((-30, 2.8), abs=0.2)


def test_result_without_change(tmp_path: Path) -> None:
    """A tensor that is clipped to a constant throughout keeps its range."""
    assert limited(tmp_path, "y = Relu(c)", -30.0, -20.0) == (-30, -20)
    assert limited(tmp_path, "y = Relu(c)", 0.0, 0.0) == (0, 0)


def test_fine_types(tmp_path: Path) -> None:
    """More levels have smaller steps, so the range of a SiLU is longer."""
    assert limited(tmp_path, SILU, -30.0, 20.0, levels=65535)[0] < -9


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("m = ReduceMax<axes = [1]>(c) y = Neg(m)", True),
        ("m = GlobalMaxPool(c) y = Neg(m)", True),
        ("r = Relu(c) p = MaxPool<kernel_shape = [2, 2]>(r) m = ReduceMax<axes = [1]>(p) y = Neg(m)", True),
        ("p = MaxPool<kernel_shape = [2, 2]>(c) y = Neg(p)", False),
        ("n = Neg(c) m = ReduceMax<axes = [1]>(n) y = Neg(m)", False),
        ("m = ReduceMax<axes = [1]>(c) n = Neg(c) y = Add(m, n)", False),
        (
            " ".join(f"r{n + 1} = Relu({f'r{n}' if n else 'c'})" for n in range(MAX_OPS)) + f" y = Neg(r{MAX_OPS})",
            False,
        ),
    ],
)
def test_read_by_maximum(tmp_path: Path, body: str, expected: bool) -> None:
    """A tensor counts if its readers take only its maximum over an axis, behind increasing ops, but not in part."""
    text = f'<ir_version: 8, opset_import: ["" : 13]> g (float[2,4,6,6] x) => (float y) {{ c = Neg(x) {body} }}'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    model = load(tmp_path / "model.onnx")
    assert is_read_by_maximum(model, model.main.consumers_by_port("c")[0]) == expected


@pytest.mark.parametrize("end", ["ReduceMax<axes = [2, 3]>", "GlobalAveragePool"])
def test_maxima_are_not_clipped(tmp_path: Path, end: str) -> None:
    """The range of a tensor of which only maxima are read has its largest value; a mean can do without."""
    graph = f"g (float[1,1,32,32] x) => (float y) {{ c = Conv(x, w) y = {end}(c) }}"
    message = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 13]> {graph}')
    message.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((1, 1, 1, 1), np.float32), "w"))
    onnx.save(message, tmp_path / "model.onnx")
    values = np.random.default_rng(0).normal(0, 1, (64, 1, 32, 32)).astype(np.float32)
    values[0, 0, 0, 0] = 40
    stats = gq.calibrate(tmp_path / "model.onnx", data={"x": values}, everything=True)
    result = gq.insert(tmp_path / "model.onnx", stats=stats, rules=str(write_rule(tmp_path)))
    (pair,) = [pair for pair in result.inserted if pair.site.tensor.op == "c"]
    high = float((255 - pair.params.zero_point) * pair.params.scale)
    assert (high > 39) == end.startswith("ReduceMax")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = Softmax(c)", True),
        ("r = Flatten(c) s = LogSoftmax(r) y = Identity(s)", True),
        ("s = Softmax(c) y = Mul(s, s)", False),
        ("s = Softmax(c) y = Softmax(s)", False),
        ("s = Softmax(c) y = Add(s, c)", False),
        ("y = Identity(c)", False),
        ("y = Softmax(c) z = Identity(c)", False),
        ("y = Softmax(c) z = Identity(y)", True),
    ],
)
def test_scores_of_last_softmax(tmp_path: Path, body: str, expected: bool) -> None:
    """Probabilities that only reshapes and copies read are the last ones."""
    outputs = ", ".join(f"float[2,4] {name}" for name in "yz" if f"{name} =" in body)
    graph = f'<ir_version: 8, opset_import: ["" : 13]> g (float[2,4] x) => ({outputs}) {{ c = Neg(x) {body} }}'
    (tmp_path / "model.onnx").write_bytes(onnx.parser.parse_model(graph).SerializeToString())
    model = gq.load(tmp_path / "model.onnx")
    assert is_read_by_last_softmax(model, model.main.consumers_by_port("c")[0]) == expected


def test_ops_may_read_the_probabilities_of_a_body(tmp_path: Path) -> None:
    """The output of a body is not that of the model."""
    body = "p = If(b) <then_branch = t () => (float[4,4] u) {c = Neg(x) u = Softmax(c)}, "
    body += "else_branch = e () => (float[4,4] v) {v = Identity(x)}> y = MatMul(p, x)"
    graph = f"g (float[4,4] x, bool b) => (float[4,4] y) {{ {body} }}"
    message = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 13]> {graph}')
    (tmp_path / "model.onnx").write_bytes(message.SerializeToString())
    model = gq.load(tmp_path / "model.onnx")
    (uses,) = [
        graph.consumers_by_port("c")[0] for graph in model.graphs.values() if "c" in {op.name for op in graph.ops()}
    ]
    assert not is_read_by_last_softmax(model, uses)


@pytest.mark.parametrize("end", ["Softmax", "Tanh"])
def test_range_of_scores_has_a_margin(tmp_path: Path, end: str) -> None:
    """The scores of a last softmax may be a quarter larger than all observed ones."""
    graph = f"g (float[1,1,8,8] x) => (float y) {{ c = Conv(x, w) y = {end}(c) }}"
    message = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 13]> {graph}')
    message.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((1, 1, 1, 1), np.float32), "w"))
    onnx.save(message, tmp_path / "model.onnx")
    values = np.linspace(-1, 1, 16 * 64, dtype=np.float32).reshape(16, 1, 8, 8)
    stats = gq.calibrate(tmp_path / "model.onnx", data={"x": values}, everything=True)
    result = gq.insert(tmp_path / "model.onnx", stats=stats, rules=str(write_rule(tmp_path)))
    (pair,) = [pair for pair in result.inserted if pair.site.tensor.op == "c"]
    high = float((255 - pair.params.zero_point) * pair.params.scale)
    assert high == pytest.approx(1.25 if end == "Softmax" else 1.0, abs=0.01)


def write_rule(folder: Path) -> Path:
    """Write a rule that quantizes the outputs of convolutions."""
    scheme = '[scheme.act]\ndtype = "uint8"\nzero = "asymmetric"\nobserve = "auto"\n'
    rule = '[[rule]]\nname = "all"\nproducer = {kind = "conv"}\nquantize = "act"\n'
    (folder / "all.toml").write_text(f"{scheme}{rule}", "utf-8")
    return folder / "all.toml"

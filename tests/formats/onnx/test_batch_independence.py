"""Batch independence: joined samples give the same results; models that mix samples are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from graphquant.formats import onnx as format_
from graphquant.ir import TensorRef

if TYPE_CHECKING:
    from graphquant.ir import Model

ROOT = Path(__file__).parents[3]
SAMPLES = ROOT / "sample_models"
SHARED = ROOT.parent / "shared" / "models"

INDEPENDENT = {
    "linear": "(float[N,4] x) => (float[N,2] y) <float[4,2] w = {1,2,3,4,5,6,7,8}> { y = MatMul(x, w) }",
    "gemm": """(float[N,4] x) => (float[N,2] y) <float[4,2] w = {1,2,3,4,5,6,7,8}, float[2] b = {1,2}>
        { y = Gemm(x, w, b) }""",
    "conv": """(float[N,1,4,4] x) => (float[N,1,3,3] y) <float[1,1,2,2] w = {1,2,3,4}, float[1] s = {2},
        float[1] o = {1}> { c = Conv(x, w)  b = BatchNormalization(c, s, o, o, s)  y = Relu(b) }""",
    "softmax": "(float[N,4] x) => (float[N,4] y) { y = Softmax(x) }",
    "reduce": "(float[N,4,2] x) => (float[N,4] y) { y = ReduceMean <axes = [-1], keepdims = 0> (x) }",
    "attention": """(float[N,4,2] x) => (float[N,4,2] y)
        { t = Transpose <perm = [0, 2, 1]> (x)  s = MatMul(x, t)  a = Softmax(s)  y = MatMul(a, x) }""",
    "reshape by shape": """(float[N,4,2] x) => (float[N,8] y)
        <int64[1] rest = {-1}, int64 zero = {0}, int64[1] front = {0}>
        { s = Shape(x)  n = Gather(s, zero)  u = Unsqueeze(n, front)  t = Concat <axis = 0> (u, rest)
          y = Reshape(x, t) }""",
    "rows folded": """(float[N,4,2] x) => (float[N,4,2] y) <int64[2] a = {-1, 2}, int64[3] b = {-1, 4, 2}>
        { r = Reshape(x, a)  e = Exp(r)  y = Reshape(e, b) }""",
    "table": "(int64[N,3] x) => (float[N,3,2] y) <float[2,2] w = {1,2,3,4}> { y = Gather(w, x) }",
    "slice": """(float[N,4] x) => (float[N,2] y) <int64[1] a = {1}, int64[1] b = {3}> { y = Slice(x, a, b, a) }""",
    "two inputs": "(float[N,4] x, float[N,4] z) => (float[N,4] y) { y = Add(x, z) }",
    "zeros": """(float[N,4] x) => (float[N,4] y) { s = Shape(x)  z = ConstantOfShape(s)  y = Add(x, z) }""",
    "quantized": """(float[N,4] x) => (float[N,4] y) <float s = {0.5}, int8 z = {1}>
        { q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z) }""",
    "pad and pool": """(float[N,1,4,4] x) => (float[N,1,5,5] y) <int64[8] p = {0,0,1,1,0,0,1,1}>
        { q = Pad(x, p)  y = AveragePool <kernel_shape = [2, 2]> (q) }""",
}

MIXED = {
    "fixed": "(float[1,4] x) => (float[1,4] y) { y = Relu(x) }",
    "scalar": "(float[N,4] x, float z) => (float[N,4] y) { y = Add(x, z) }",
    "softmax": "(float[N,4] x) => (float[N,4] y) { y = Softmax <axis = 0> (x) }",
    "softmax of vectors": "(float[N] x) => (float[N] y) { y = Softmax(x) }",
    "reduce": "(float[N,4] x) => (float[N,4] y) { m = ReduceMax <axes = [0]> (x)  y = Sub(x, m) }",
    "reduce all": "(float[N,4] x) => (float[N,4] y) { m = ReduceMax(x)  y = Sub(x, m) }",
    "reduce from the end": "(float[N,4] x) => (float[N,4] y) { m = ReduceMax <axes = [-2]> (x)  y = Sub(x, m) }",
    "cumsum": "(float[N,4] x) => (float[N,4] y) <int64 a = {0}> { y = CumSum(x, a) }",
    "top": "(float[N,4] x) => (float[1,4] y) <int64[1] k = {1}> { y, i = TopK <axis = 0> (x, k) }",
    "reverse": """(float[N,4] x) => (float[N,4] y)
        <int64[1] a = {-1}, int64[1] b = {-9223372036854775807}, int64[1] c = {0}> { y = Slice(x, a, b, c, a) }""",
    "transpose": "(float[N,4] x) => (float[4,N] y) { y = Transpose(x) }",
    "gram": "(float[N,4] x) => (float[N,N] y) { t = Transpose <perm = [1, 0]> (x)  y = MatMul(x, t) }",
    "product over samples": "(float[N,4] x) => (float[2,4] y) <float[2,3] w = {1,2,3,4,5,6}> { y = MatMul(w, x) }",
    "misaligned": "(float[N,1,1] x) => (float[N,N,1] y) <int64[1] a = {1}> { s = Squeeze(x, a)  y = Add(x, s) }",
    "padded": "(float[N,4] x) => (float[M,4] y) <int64[4] p = {1,0,0,0}> { y = Pad(x, p) }",
    "rolled": "(float[N,4] x) => (float[N,4] y) <int64[4] p = {1,0,-1,0}> { y = Pad(x, p) }",
    "pool with indices": """(float[N,1,4,4] x) => (float[N,1,2,2] y, int64[N,1,2,2] i)
        { y, i = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x) }""",
    "training": """(float[N,2,2] x) => (float[N,2,2] y) <float[2] s = {1,1}>
        { y, m, v = BatchNormalization <training_mode = 1> (x, s, s, s, s) }""",
    "random": "(float[N,4] x) => (float[N,4] y) { r = RandomUniformLike(x)  y = Add(x, r) }",
    "dynamic": """(float[N,4] x) => (float[N,4] y)
        { q, s, z = DynamicQuantizeLinear(x)  y = DequantizeLinear(q, s, z) }""",
    "count": """(float[N,4] x) => (float[N,4] y) <int64 zero = {0}>
        { s = Shape(x)  n = Gather(s, zero)  f = Cast <to = 1> (n)  y = Div(x, f) }""",
    "column by count": """(float[N,4] x) => (float[N,1] y) <int64[1] zero = {0}, int64[1] one = {1}>
        { s = Shape(x)  n = Gather(s, zero)  m = Sub(n, one)  y = Slice(x, m, n, one) }""",
    "constant": "(float[N,4] x) => (float[N,4] y, float[1] z) <float[1] c = {1}> { y = Relu(x)  z = Identity(c) }",
    "branch": """(float[N,4] x) => (float[N,4] y) <bool c = {1}> { y = If(c) <then_branch = t () => (float[N,4] a)
        { a = Relu(x) }, else_branch = e () => (float[N,4] b) { b = Neg(x) }> }""",
    "other names": "(float[N,4] x, float[M,4] z) => (float[N,4] y, float[M,4] w) { y = Relu(x)  w = Relu(z) }",
    "unknown op": "(float[N,4] x) => (float[N,4] y) { y = com.example.Mystery(x) }",
    "channel of samples": """(float[N,4] x) => (float[N,4] y) <float[1] s = {0.5}, int8[1] z = {1}>
        { t = Transpose(x)  q = QuantizeLinear <axis = 0> (t, s, z)  d = DequantizeLinear(q, s, z)
          y = Transpose(d) }""",
}


def build_model(model_of: Any, text: str, opset: int = 17) -> Model:
    """Return the model with a signature and nodes written as text."""
    return model_of(f'<ir_version: 8, opset_import: ["" : {opset}, "com.example" : 1]> g {text}')


def random_feed(runner: Any, rows: int, seed: int) -> dict[str, Any]:
    """Return a random feed with a number of rows; other open sizes are 3."""
    rng, feed = np.random.default_rng(seed), {}
    for spec in runner.inputs:
        shape = (rows, *(3 if size is None else size for size in spec.shape[1:]))
        is_integer = spec.dtype.startswith("int")
        feed[spec.name] = rng.integers(0, 2, shape) if is_integer else rng.normal(size=shape).astype(spec.dtype)
    return feed


def assert_batching_keeps_values(model: Model, feeds: list[dict[str, Any]]) -> None:
    """Assert that joined feeds give, in every tensor, the concatenated values of the single feeds."""
    runner = format_.create_runner(model)
    joined = {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}
    tensors = [
        TensorRef("", op.name, port)
        for op in model.main.ops()
        for port, output in enumerate(op.outputs)
        if str(output.dtype).startswith("float") and op.kind != "constant"
    ]
    single = list(runner.observe(tensors, feeds))
    (joined_values,) = runner.observe(tensors, [joined])
    for tensor in tensors:
        single_values = [values[tensor][0] for values in single]
        if all(np.array_equal(single_value, joined_values[tensor][0]) for single_value in single_values):
            continue  # no input decides on it
        np.testing.assert_allclose(joined_values[tensor][0], np.concatenate(single_values), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text", INDEPENDENT.values(), ids=INDEPENDENT)
def test_batch_independent_models(text: str, model_of: Any) -> None:
    """Batch-independent models give the same values for joined samples, whatever their number of rows."""
    model = build_model(model_of, text)
    runner = format_.create_runner(model)
    assert runner.batch_independent is True
    assert_batching_keeps_values(model, [random_feed(runner, rows, seed) for seed, rows in enumerate((1, 3, 2))])


@pytest.mark.parametrize("text", MIXED.values(), ids=MIXED)
def test_batch_dependent_models(text: str, model_of: Any) -> None:
    """Models that mix samples, or may do so, are rejected."""
    assert format_.create_runner(build_model(model_of, text)).batch_independent is False


@pytest.mark.parametrize(
    ("text", "opset", "independent"),
    [
        ("(float[N,4] x) => (float[N,4] y) { y = Relu(x) }", 6, False),
        ("(float[N,4] x) => (float[N,4] y) { y = Softmax(x) }", 11, True),
        ("(float[N] x) => (float[N] y) { y = Softmax <axis = 0> (x) }", 11, False),
        ("(float[N,4] x) => (float[N,8] y) <float[2] s = {1, 2}> { y = Resize(x, s) }", 10, True),
        ("(float[N,4] x) => (float[M,4] y) <float[2] s = {1.0005, 1}> { y = Resize(x, s) }", 10, False),
        ("(float[N,4] x) => (float[N,8] y) <float[2] s = {1, 2}> { y = Upsample(x, s) }", 9, True),
        ("(float[N,4] x) => (float[N,2] y) { y = Slice <axes = [1], starts = [0], ends = [2]> (x) }", 9, True),
        ("(float[N,4] x) => (float[N,2] y) { y = Slice <starts = [0, 0], ends = [9, 2]> (x) }", 9, False),
        ("(float[N,4] x) => (float[N,5] y) { y = Pad <pads = [0, 1, 0, 0]> (x) }", 9, True),
    ],
)
def test_batch_independence_in_older_opsets(text: str, opset: int, independent: bool, model_of: Any) -> None:
    """Axes, scales and pads are read from the attributes of older opsets."""
    model = build_model(model_of, text, opset)
    runner = format_.create_runner(model)
    assert runner.batch_independent is independent
    if independent:
        assert_batching_keeps_values(model, [random_feed(runner, 1, seed) for seed in range(3)])


def test_stale_declared_shapes_are_ignored(model_of: Any) -> None:
    """Shapes are inferred again, so wrong declared shapes of inner and output values have no effect."""
    text = "(float[N,4] x) => (float[1,4] y) <float[N,4] m> { m = ReduceMax <axes = [0]> (x)  y = Relu(m) }"
    assert format_.create_runner(build_model(model_of, text)).batch_independent is False
    assert (
        format_.create_runner(
            build_model(model_of, "(float[N,4] x) => (float[1,4] y) { y = Relu(x) }")
        ).batch_independent
        is True
    )


@pytest.mark.parametrize(
    ("name", "independent"), [("digits_cnn", True), ("digits_cnn_bn", True), ("digits_rnn", False)]
)
def test_batch_independence_of_sample_models(name: str, independent: bool) -> None:
    """The sample models without loops are batch independent; a model with loops is rejected."""
    model = format_.load(SAMPLES / f"{name}.onnx")
    runner = format_.create_runner(model)
    assert runner.batch_independent is independent
    if independent:
        data = np.load(SAMPLES / "digits_cnn_eval.npz")["image"]
        assert_batching_keeps_values(model, [{runner.inputs[0].name: data[k : k + 1]} for k in range(4)])


@pytest.mark.skipif(not SHARED.exists(), reason="the shared models are not here")
@pytest.mark.parametrize("name", ["ultraface/version-RFB-320", "silero_vad_16k_op15", "qlstm_tract"])
def test_real_models_are_batch_dependent(name: str) -> None:
    """Models with fixed sizes, scalar inputs or loops are rejected."""
    assert format_.create_runner(format_.load(SHARED / f"{name}.onnx")).batch_independent is False

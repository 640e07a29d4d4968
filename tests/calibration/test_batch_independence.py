"""Batch independence: a batch gives the values of the single samples, and models that mix samples are not batched."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from support.shared_models import SHARED_MODELS, needs_shared_models

from graphquant import formats
from graphquant.calibration import batch_independence
from graphquant.calibration.batch_independence import equal_within_rounding, is_batch_independent, measure_footprint
from graphquant.calibration.data import Dataset
from graphquant.calibration.memory import group_observed_tensors
from graphquant.calibration.targets import all_float_targets
from graphquant.formats.onnx.reader import model_from_message
from graphquant.formats.onnx.runner import create_runner as create_onnx_runner
from graphquant.ir import TensorRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from graphquant.ir import Model

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_models"

INDEPENDENT = {
    "linear": "(float[N,4] x) => (float[N,2] y) <float[4,2] w = {1,2,3,4,5,6,7,8}> { y = MatMul(x, w) }",
    "gemm": """(float[N,4] x) => (float[N,2] y) <float[4,2] w = {1,2,3,4,5,6,7,8}, float[2] b = {1,2}>
        { y = Gemm(x, w, b) }""",
    "conv": """(float[N,1,4,4] x) => (float[N,1,3,3] y) <float[1,1,2,2] w = {1,2,3,4}, float[1] s = {2},
        float[1] o = {1}> { c = Conv(x, w)  b = BatchNormalization(c, s, o, o, s)  y = Relu(b) }""",
    "fused by onnxruntime": """(float[N,1,4,4] x) => (float[N,1,3,3] y) <float[1,1,2,2] w = {1,2,3,4}>
        { y = com.microsoft.FusedConv <activation = "Relu"> (x, w) }""",
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
    "inputs of other sizes": "(float[N,4] x, float[N,3] z) => (float[N,7] y) { y = Concat <axis = 1> (x, z) }",
    "zeros": """(float[N,4] x) => (float[N,4] y) { s = Shape(x)  z = ConstantOfShape(s)  y = Add(x, z) }""",
    "quantized": """(float[N,4] x) => (float[N,4] y) <float s = {0.5}, int8 z = {1}>
        { q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z) }""",
    "pad and pool": """(float[N,1,4,4] x) => (float[N,1,5,5] y) <int64[8] p = {0,0,1,1,0,0,1,1}>
        { q = Pad(x, p)  y = AveragePool <kernel_shape = [2, 2]> (q) }""",
}

MIXED = {
    "fixed": "(float[1,4] x) => (float[1,4] y) { y = Relu(x) }",
    "unknown rank": "(float[N,4] x, float[] z) => (float[N,4] y, float[] v) { y = Relu(x)  v = Relu(z) }",
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
    "later rows": """(float[N,4] x) => (float[N,4] y) <int64 zero = {0}, float one = {1}, float four = {4},
        float small = {1.2e-4}> { s = Shape(x)  z = ConstantOfShape(s)  o = Add(z, one)  p = CumSum(o, zero)
          g = Greater(p, four)  f = Cast <to = 1> (g)  m = Mul(f, small)  k = Add(m, one)  y = Mul(x, k) }""",
    "column by count": """(float[N,4] x) => (float[N,1] y) <int64[1] zero = {0}, int64[1] one = {1}>
        { s = Shape(x)  n = Gather(s, zero)  m = Sub(n, one)  y = Slice(x, m, n, one) }""",
    "constant": "(float[N,4] x) => (float[N,4] y, float[1] z) <float[1] c = {1}> { y = Relu(x)  z = Identity(c) }",
    "branch": """(float[N,4] x) => (float[N,4] y) <bool c = {1}> { y = If(c) <then_branch = t () => (float[N,4] a)
        { a = Relu(x) }, else_branch = e () => (float[N,4] b) { b = Neg(x) }> }""",
    "unknown op": "(float[N,4] x) => (float[N,4] y) { y = com.example.Mystery(x) }",
}

W = np.arange(8, dtype=np.float32).reshape(4, 2) - 3
K = np.linspace(-1, 1, 2 * 2 * 2 * 3, dtype=np.float32).reshape(2, 2, 2, 3)
C = np.array([0.5, -1.5, 2], np.float32)

TF_INDEPENDENT: dict[str, tuple[list[Any], Callable[[Any, Any], Any]]] = {
    "linear": ([None, 4], lambda raw, x: raw.BiasAdd(value=raw.MatMul(a=x, b=W), bias=C[:2])),
    "weight turned": ([None, 4], lambda raw, x: raw.MatMul(a=x, b=W.T.copy(), transpose_b=True)),
    "batch matmul": ([None, 3, 4], lambda raw, x: raw.BatchMatMulV2(x=x, y=W)),
    "attention": (
        [None, 3, 4],
        lambda raw, x: raw.BatchMatMulV2(x=raw.Softmax(logits=raw.BatchMatMulV2(x=x, y=x, adj_y=True)), y=x),
    ),
    "conv": (
        [None, 4, 4, 2],
        lambda raw, x: raw.FusedBatchNormV3(
            x=raw.Conv2D(input=x, filter=K, strides=[1, 1, 1, 1], padding="SAME"),
            scale=C, offset=C, mean=C, variance=np.abs(C), is_training=False,
        )[0],
    ),
    "pad and pool": (
        [None, 4, 4, 2],
        lambda raw, x: raw.AvgPool(
            value=raw.Pad(input=x, paddings=[[0, 0], [1, 0], [0, 1], [0, 0]]),
            ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="VALID",
        ),
    ),
    "any height and width": ([None, None, None, 2], lambda raw, x: raw.Mean(input=raw.Relu(features=x), axis=[1, 2])),
    "reshape": ([None, 4, 2], lambda raw, x: raw.Exp(x=raw.Reshape(tensor=x, shape=[-1, 8]))),
    "reshape by shape": (
        [None, 4, 2],
        lambda raw, x: raw.Reshape(
            tensor=x,
            shape=raw.Pack(
                values=[
                    raw.StridedSlice(
                        input=raw.Shape(input=x), begin=[0], end=[1], strides=[1], shrink_axis_mask=1
                    ),
                    8,
                ]
            ),
        ),
    ),
    "rows folded": (
        [None, 4, 2],
        lambda raw, x: raw.Reshape(tensor=raw.Exp(x=raw.Reshape(tensor=x, shape=[-1, 2])), shape=[-1, 4, 2]),
    ),
    "concat and split": (
        [None, 4],
        lambda raw, x: raw.Split(axis=1, value=raw.ConcatV2(values=[x, raw.Neg(x=x)], axis=-1), num_split=2)[1],
    ),
    "slice": ([None, 4], lambda raw, x: raw.Slice(input=x, begin=[0, 1], size=[-1, 2])),
    "strided slice": (
        [None, 4, 2],
        lambda raw, x: raw.StridedSlice(
            input=x, begin=[0, 1, 0], end=[0, 3, 0], strides=[1, 1, 1], begin_mask=5, end_mask=5
        ),
    ),
    "last of each": (
        [None, 4, 2],
        lambda raw, x: raw.StridedSlice(
            input=x, begin=[0, 1], end=[0, 2], strides=[1, 1], ellipsis_mask=1, shrink_axis_mask=2
        ),
    ),
    "gather": ([None, 4], lambda raw, x: raw.GatherV2(params=x, indices=[2, 0], axis=1)),
    "transpose": ([None, 4, 2], lambda raw, x: raw.Transpose(x=x, perm=[0, 2, 1])),
    "squeeze": (
        [None, 4],
        lambda raw, x: raw.Squeeze(input=raw.Relu(features=raw.ExpandDims(input=x, axis=1)), axis=[1]),
    ),
    "resize": ([None, 2, 2, 2], lambda raw, x: raw.ResizeBilinear(images=x, size=[4, 3])),
    "resize by shape": (
        [None, 2, 2, 2],
        lambda raw, x: raw.ResizeNearestNeighbor(
            images=x,
            size=raw.Mul(x=raw.StridedSlice(input=raw.Shape(input=x), begin=[1], end=[3], strides=[1]), y=[2, 2]),
        ),
    ),
    "filled": ([None, 4], lambda raw, x: raw.AddV2(x=x, y=raw.Fill(dims=raw.Shape(input=x), value=np.float32(2)))),
    "fake quant": ([None, 4], lambda raw, x: raw.FakeQuantWithMinMaxVars(inputs=x, min=-1.0, max=1.0)),
    "largest": ([None, 4], lambda raw, x: raw.TopKV2(input=x, k=2)[0]),
    "stacked": ([None, 4], lambda raw, x: raw.Pack(values=[x, raw.Exp(x=x)], axis=1)),
    "upsampled": (
        [None, 2, 2, 3],
        lambda raw, x: raw.Conv2DBackpropInput(
            input_sizes=raw.Pack(
                values=[
                    raw.StridedSlice(input=raw.Shape(input=x), begin=[0], end=[1], strides=[1], shrink_axis_mask=1),
                    4, 4, 2,
                ]
            ),
            filter=K, out_backprop=x, strides=[1, 2, 2, 1], padding="SAME",
        ),
    ),
}  # fmt: skip

TF_MIXED: dict[str, tuple[list[Any], Callable[[Any, Any], Any]]] = {
    "fixed": ([1, 4], lambda raw, x: raw.Relu(features=x)),
    "unknown rank": (None, lambda raw, x: raw.Relu(features=x)),
    "softmax of vectors": ([None], lambda raw, x: raw.Softmax(logits=x)),
    "reduce": ([None, 4], lambda raw, x: raw.Sub(x=x, y=raw.Max(input=x, axis=[0], keep_dims=True))),
    "reduce all": ([None, 4], lambda raw, x: raw.Sub(x=x, y=raw.Mean(input=x, axis=[0, 1]))),
    "reduce from the end": ([None, 4], lambda raw, x: raw.Sub(x=x, y=raw.Max(input=x, axis=[-2], keep_dims=True))),
    "cumsum": ([None, 4], lambda raw, x: raw.Cumsum(x=x, axis=0)),
    "first": ([None, 4], lambda raw, x: raw.Slice(input=x, begin=[0, 0], size=[1, 4])),
    "reverse": (
        [None, 4],
        lambda raw, x: raw.StridedSlice(input=x, begin=[0], end=[0], strides=[-1], begin_mask=1, end_mask=1),
    ),
    "only": (
        [None, 4],
        lambda raw, x: raw.AddV2(
            x=x, y=raw.StridedSlice(input=x, begin=[0], end=[1], strides=[1], shrink_axis_mask=1)
        ),
    ),
    "transpose": ([None, 4], lambda raw, x: raw.Transpose(x=x, perm=[1, 0])),
    "gram": ([None, 4], lambda raw, x: raw.MatMul(a=x, b=x, transpose_b=True)),
    "covariance": ([None, 4], lambda raw, x: raw.MatMul(a=x, b=x, transpose_a=True)),
    "batch of one": ([None, 4], lambda raw, x: raw.BatchMatMulV2(x=x, y=np.eye(3, dtype=np.float32), adj_x=True)),
    "joined": ([None, 4], lambda raw, x: raw.ConcatV2(values=[x, x], axis=0)),
    "stacked": ([None, 4], lambda raw, x: raw.Pack(values=[x, x])),
    "padded": ([None, 4], lambda raw, x: raw.Pad(input=x, paddings=[[1, 0], [0, 0]])),
    "repeated": ([None, 4], lambda raw, x: raw.Tile(input=x, multiples=[2, 1])),
    "training": (
        [None, 4, 4, 3],
        lambda raw, x: raw.FusedBatchNormV3(x=x, scale=C, offset=C, mean=[], variance=[], is_training=True)[0],
    ),
    "random": (
        [None, 4], lambda raw, x: raw.AddV2(x=x, y=raw.RandomUniform(shape=raw.Shape(input=x), dtype="float32"))
    ),
    "own range": (
        [None, 4],
        lambda raw, x: raw.QuantizeAndDequantizeV2(input=x, input_min=0.0, input_max=0.0, range_given=False),
    ),
    "count": (
        [None, 4], lambda raw, x: raw.Div(x=x, y=raw.Cast(x=raw.Size(input=x), DstT="float32"))
    ),
    "unknown op": ([None, 4], lambda raw, x: raw.UniqueV2(x=x, axis=[0])[0]),
    "switch": (
        [None, 4], lambda raw, x: raw.Merge(inputs=raw.Switch(data=x, pred=raw.Any(input=x > 0, axis=[0, 1])))[0]
    ),
}  # fmt: skip


def random_dataset(runner: Any, count: int = 8, rows: int = 1) -> Dataset:
    """Return random samples; open sizes after the first are 3."""

    def feeds(start: int, stop: int) -> Iterator[dict[str, Any]]:
        for index in range(start, stop):
            rng, feed = np.random.default_rng(index), {}
            for spec in runner.inputs:
                shape = (rows, *(3 if size is None else size for size in spec.shape[1:]))
                is_integer = spec.dtype.startswith("int")
                feed[spec.name] = rng.integers(0, 2, shape) if is_integer else rng.normal(size=shape).astype(spec.dtype)
            yield feed

    return Dataset(count=count, digest="da", open_feeds=feeds)


def assert_batch_independent(model: Model, dataset: Dataset | None = None) -> None:
    """Assert that a model is batched, and that a batch of other samples gives their values in every float tensor."""
    runner = formats.format_module(model.format).create_runner(model)
    dataset = random_dataset(runner) if dataset is None else dataset
    targets = tuple(all_float_targets(model))
    assert is_batch_independent(runner, dataset, 8)
    assert is_batch_independent(runner, dataset, 8, targets)
    feeds = list(islice(dataset, 4, 7))
    joined = {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}
    single = list(runner.observe(targets, feeds))
    (together,) = runner.observe(targets, [joined])
    for tensor in targets:
        values = [value for sample in single for value in sample[tensor]]
        if not all(np.array_equal(value, together[tensor][0]) for value in values):  # else no input decides on it
            np.testing.assert_allclose(together[tensor][0], np.concatenate(values), rtol=1e-4, atol=1e-5)


def is_joined(model: Model) -> bool:
    """Return True if the outputs of `model` for random samples allow batches."""
    runner = formats.format_module(model.format).create_runner(model)
    return is_batch_independent(runner, random_dataset(runner), 8)


def model_of_text(text: str, opset: int = 17) -> Model:
    """Return the model with a signature and nodes written as text."""
    header = f'<ir_version: 8, opset_import: ["" : {opset}, "com.example" : 1, "com.microsoft" : 1]> g'
    return model_from_message(onnx.parser.parse_model(f"{header} {text}"))


@pytest.mark.parametrize("text", INDEPENDENT.values(), ids=INDEPENDENT)
def test_batch_independent_models(text: str) -> None:
    """Samples of batch-independent models are joined."""
    assert_batch_independent(model_of_text(text))


@pytest.mark.parametrize("text", MIXED.values(), ids=MIXED)
def test_batch_dependent_models(text: str) -> None:
    """Models that mix samples, or may do so, are not batched."""
    assert not is_joined(model_of_text(text))


def test_observed_tensors_decide() -> None:
    """A tensor that depends on the batch rules batches out, even if no output shows it; a fixed tensor does not."""
    mixing = model_of_text(
        """(float[N,4] x) => (int64[N] y) { m = ReduceMean <axes = [0], keepdims = 1> (x)  d = Sub(x, m)
        s = Add(d, m)  y = ArgMax <axis = 1, keepdims = 0> (s) }"""
    )
    runner = create_onnx_runner(mixing)
    dataset = random_dataset(runner)
    tensors = {tensor.op: tensor for tensor in all_float_targets(mixing)}
    assert is_batch_independent(runner, dataset, 8)
    assert [name for name, tensor in tensors.items() if is_batch_independent(runner, dataset, 8, [tensor])] == [
        "x",
        "s",
    ]
    fixed = model_of_text("(float[N,4] x) => (float[N,4] y) <float[1,4] c = {1,2,3,4}> { n = Neg(c)  y = Add(x, n) }")
    assert_batch_independent(fixed)


@pytest.mark.parametrize(
    "text",
    [
        "(float[N,4] x) => (float[N,4] y) { q, s, z = DynamicQuantizeLinear(x)  y = DequantizeLinear(q, s, z) }",
        """(float[N,4] x) => (float[N,4] y) <float one = {1}>
        { a = Abs(x)  m = ReduceMax <keepdims = 0> (a)  d = Max(m, one)  y = Div(x, d) }""",
        """(float[N,4] x) => (float[N,4] y) <float one = {1}>
        { a = Abs(x)  m = ReduceMax <keepdims = 0> (a)  d = Min(m, one)  y = Div(x, d) }""",
        """(float[N,4] x) => (float[N,4] y) <float zero = {0}>
        { m = ReduceMin <keepdims = 0> (x)  d = Min(m, zero)  y = Sub(x, d) }""",
    ],
    ids=["dynamic range", "peak above one", "peak below one", "negative values"],
)
def test_samples_of_one_range(text: str) -> None:
    """A dependence on the range of the batch shows although all samples have one range, below a threshold."""
    runner = create_onnx_runner(model_of_text(text))
    for lowest in (-1, 0):
        orders = [np.roll(np.array([[lowest, 0.3, 0.7, 1]], np.float32), shift) for shift in range(8)]
        dataset = Dataset(
            count=8, digest="da", open_feeds=lambda start, stop, orders=orders: ({"x": x} for x in orders[start:stop])
        )
        assert not is_batch_independent(runner, dataset, 8)


def test_batch_size_decides() -> None:
    """A batch of the full size is run: a model that takes at most 6 rows is batched up to there."""
    text = """(float[N,4] x) => (float[M,4] y) <int64[1] a = {0}, int64[1] b = {6}> { y = Slice(x, a, b, a) }"""
    runner = create_onnx_runner(model_of_text(text))
    dataset = random_dataset(runner)
    assert [size for size in (1, 2, 3, 6, 7, 32) if is_batch_independent(runner, dataset, size)] == [1, 2, 3, 6]


def test_odd_samples() -> None:
    """Samples may have several rows, or be a single one; samples without rows, or of other shapes, are not joined."""
    runner = create_onnx_runner(model_of_text(INDEPENDENT["two inputs"]))
    assert is_batch_independent(runner, random_dataset(runner, rows=3), 8)
    assert is_batch_independent(runner, random_dataset(runner, count=1), 8)
    assert not is_batch_independent(runner, random_dataset(runner, rows=0), 8)
    unequal = [{"x": np.ones((1, 4), np.float32), "z": np.ones((2, 4), np.float32)}]
    dataset = Dataset(count=1, digest="da", open_feeds=lambda start, stop: iter(unequal[start:stop]))
    assert not is_batch_independent(runner, dataset, 8)
    apart = "(float[N,4] x, float[M,4] z) => (float[N,4] y, float[M,4] v) { y = Relu(x) v = Relu(z) }"
    assert not is_batch_independent(create_onnx_runner(model_of_text(apart)), dataset, 8)
    assert not is_batch_independent(runner, random_dataset(runner, rows=0), 1)
    assert not is_batch_independent(runner, random_dataset(runner, count=0), 1)
    mixing = create_onnx_runner(model_of_text(MIXED["reduce"]))
    assert not is_batch_independent(mixing, random_dataset(mixing, count=1), 8)
    assert not is_batch_independent(mixing, random_dataset(mixing), 2)


@pytest.mark.parametrize(
    ("text", "names", "batch_size", "independent"),
    [
        (INDEPENDENT["linear"], "xy", 2, True),  # no row of the batch for two of the four samples
        ("(float[N,4] x) => (float[N,M] y) <int64[2] r = {1, 20000}> { t = Tile(x, r)  y = Relu(t) }", "ty", 8, True),
        # the values of `b` would hide those of `d`, which depend on the batch
        (
            """(float[N,4] x) => (float[N,4] y) <float k = {1e6}> { b = Mul(x, k)  m = ReduceMax <axes = [0]> (x)
            d = Sub(x, m)  y = Add(b, d) }""",
            "bd",
            8,
            False,
        ),
        (MIXED["later rows"], "y", 8, False),
    ],
    ids=["few rows", "many values", "small and large values", "later rows"],
)
def test_observed_tensors_of_one_shape(text: str, names: str, batch_size: int, independent: bool) -> None:
    """Each tensor must agree in each row, whatever the values of the others are."""
    runner = create_onnx_runner(model_of_text(text))
    tensors = [TensorRef("", name) for name in names]
    assert is_batch_independent(runner, random_dataset(runner), batch_size, tensors) is independent


def test_bound_of_observed_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of elements that decides on groups of tensors is no lower than that of the batch."""
    counts = []

    def group_tensors(runner: Any, tensors: Any, feed: Any, max_elements: int, budget: int) -> Any:
        counts.append((sum(runner.element_counts(tensors, feed).values()), max_elements))
        return group_observed_tensors(runner, tensors, feed, max_elements, budget)

    monkeypatch.setattr(batch_independence, "group_observed_tensors", group_tensors)
    model = model_of_text(INDEPENDENT["attention"])
    runner = create_onnx_runner(model)
    assert measure_footprint(runner, random_dataset(runner), tuple(all_float_targets(model))).join_samples
    assert [elements <= bound for elements, bound in counts] == [True]


def test_samples_of_several_sizes() -> None:
    """Only samples of the first one's size are compared, and batches of open sizes have the default footprint."""
    runner = create_onnx_runner(model_of_text("(float[N,M] x) => (float[N,M] y) { e = Exp(x)  y = Relu(e) }"))
    sizes = [np.ones((1, size), np.float32) for size in (3, 5, 3, 4)]
    dataset = Dataset(count=4, digest="da", open_feeds=lambda start, stop: ({"x": x} for x in sizes[start:stop]))
    assert is_batch_independent(runner, dataset, 8)
    footprint = measure_footprint(runner, dataset, [TensorRef("", "e")])
    assert (footprint.join_samples, footprint.elements_per_sample) == (True, None)


@pytest.mark.parametrize(
    ("calls", "opset", "independent"),
    [
        ("y = com.example.f(x)", 17, True),
        ("h = com.example.f(x)  y = com.example.f(h)", 17, False),
        ("y = com.example.f(x)", 16, True),  # a function of another opset than the model cannot be observed
    ],
)
def test_observed_functions(calls: str, opset: int, independent: bool) -> None:
    """A tensor with several values in a run is not compared, and one that cannot be observed is ignored."""
    function = f'<domain: "com.example", opset_import: ["" : {opset}]> f (a) => (b) {{ c = Neg(a)  b = Exp(c) }}'
    runner = create_onnx_runner(model_of_text(f"(float[N,4] x) => (float[N,4] y) {{ {calls} }} {function}"))
    tensors = [TensorRef("", "x"), TensorRef("com.example:f", "c")]
    assert is_batch_independent(runner, random_dataset(runner), 8, tensors) is independent


def test_inputs_under_other_names() -> None:
    """Samples may hold an input under another key, and further keys such as labels."""
    runner = create_onnx_runner(model_of_text(INDEPENDENT["linear"]))
    feeds = [{"image": feed["x"], "labels": np.array(1)} for feed in random_dataset(runner)]
    dataset = Dataset(count=8, digest="da", open_feeds=lambda start, stop: iter(feeds[start:stop]))
    assert is_batch_independent(runner, dataset, 8, inputs={"x": "image"})


def test_little_memory() -> None:
    """With little memory, tensors are observed in several groups with the same answer."""
    for text, independent in ((INDEPENDENT["attention"], True), (MIXED["reduce"], False)):
        model = model_of_text(text)
        runner = create_onnx_runner(model)
        targets = tuple(all_float_targets(model))
        dataset = random_dataset(runner)
        assert is_batch_independent(runner, dataset, 8, targets, max_memory=1) is independent
        footprint = measure_footprint(runner, dataset, targets, max_memory=1)
        assert (footprint.join_samples, footprint.block_size) == ((True, 32) if independent else (False, 8))


@pytest.mark.parametrize(
    ("text", "opset", "independent"),
    [
        ("(float[N,4] x) => (float[N,4] y) { y = Softmax(x) }", 11, True),
        ("(float[N] x) => (float[N] y) { y = Softmax <axis = 0> (x) }", 11, False),
        ("(float[N,4] x) => (float[N,8] y) <float[2] s = {1, 2}> { y = Resize(x, s) }", 10, True),
        ("(float[N,4] x) => (float[M,4] y) <float[2] s = {1.5, 1}> { y = Resize(x, s) }", 10, False),
        ("(float[N,4] x) => (float[N,2] y) { y = Slice <axes = [1], starts = [0], ends = [2]> (x) }", 9, True),
        ("(float[N,4] x) => (float[N,2] y) { y = Slice <starts = [0, 0], ends = [7, 2]> (x) }", 9, False),
    ],
)
def test_older_opsets(text: str, opset: int, independent: bool) -> None:
    """Axes, scales and ranges may be attributes."""
    assert is_joined(model_of_text(text, opset)) is independent


def test_equal_within_rounding() -> None:
    """Floats may differ by rounding, relative to all values; integers, shapes and infinite values may not."""
    values = np.array([1, -2, np.inf, np.nan], np.float32)
    assert equal_within_rounding(values, values + np.float32(1e-5))
    assert not equal_within_rounding(values, values + np.float32(1e-3))
    half = np.r_[np.full(1 << 18, 1.0), 0.01].astype(ml_dtypes.bfloat16)
    assert equal_within_rounding(half, np.r_[half[:-1], half[-1:] * 1.01])
    assert not equal_within_rounding(values, np.array([1, -2, np.nan, np.nan], np.float32))
    assert not equal_within_rounding(values[:2], np.array([1, np.nan], np.float32))
    assert not equal_within_rounding(values, values.reshape(2, 2))
    assert not equal_within_rounding(np.array([100000]), np.array([100001]))
    assert equal_within_rounding(np.zeros(2), np.zeros(2))
    rows = np.array([[1, 1e6]], np.float32).T
    assert equal_within_rounding(rows, rows + 1)
    assert not equal_within_rounding(rows, rows + 1, batched=True)


@pytest.mark.parametrize(
    ("name", "independent"),
    [("digits_cnn", True), ("digits_cnn_bn", True), ("digits_rnn", False), ("digits_nested", False)],
)
def test_sample_models(name: str, independent: bool) -> None:
    """The sample models without loops are batched."""
    model = formats.format_module("onnx").load(SAMPLES / f"{name}.onnx")
    if independent:
        assert_batch_independent(model)
    else:
        assert not is_joined(model)


def tf_model(tf: Any, folder: Path, shape: Any, body: Callable[[Any, Any], Any]) -> Model:
    """Return a frozen graph with one input."""
    with tf.Graph().as_default() as graph:
        tf.identity(body(tf.raw_ops, tf.compat.v1.placeholder(tf.float32, shape, "x")), "y")
    path = folder / "model.pb"
    path.write_bytes(graph.as_graph_def().SerializeToString())
    return formats.format_module("tensorflow").load(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", TF_INDEPENDENT)
def test_tf_batch_independent_models(tf: Any, tmp_path: Path, name: str) -> None:
    """Samples of batch-independent models are joined."""
    assert_batch_independent(tf_model(tf, tmp_path, *TF_INDEPENDENT[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", TF_MIXED)
def test_tf_batch_dependent_models(tf: Any, tmp_path: Path, name: str) -> None:
    """Models that mix samples, or may do so, are not batched."""
    assert not is_joined(tf_model(tf, tmp_path, *TF_MIXED[name]))


@pytest.mark.slow
def test_tf_functions(tf: Any, tmp_path: Path) -> None:
    """A function may be called several times; one that mixes samples rules batches out."""
    signature = [tf.TensorSpec([None, 4], tf.float32)]
    independent = tf.function(lambda x: tf.nn.relu(tf.raw_ops.MatMul(a=x, b=np.eye(4, dtype=np.float32))), signature)
    mixed = tf.function(lambda x: x - tf.reduce_mean(x, 0), signature)
    nested = tf.function(lambda x: independent(independent(x) + 1), signature)
    model = tf_model(tf, tmp_path, [None, 4], lambda _, x: nested(x))
    assert len(model.graphs) > 2
    assert is_joined(model)
    assert not is_joined(tf_model(tf, tmp_path, [None, 4], lambda _, x: mixed(independent(x))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "independent"),
    [
        ("digits_cnn.pb", True),
        ("digits_cnn_saved_model", True),
        ("digits_rnn.pb", False),
        ("digits_rnn_saved_model", False),
    ],
)
@pytest.mark.usefixtures("tf")
def test_tf_sample_models(name: str, independent: bool) -> None:
    """The sample models without loops are batched."""
    model = formats.format_module("tensorflow").load(SAMPLES / name)
    if independent:
        assert_batch_independent(model)
    else:
        assert not is_joined(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "independent"),
    [
        ("kws/saved_model", True),
        ("mtcnn.pb", False),
        ("ultraface/version-RFB-320.onnx", False),
        ("qlstm_tract.onnx", False),
    ],
)
def test_models_of_other_tools(name: str, independent: bool, model_folder: Path) -> None:
    """Models with functions and variables are batched; those with fixed sizes or loops are not."""
    path = model_folder / name
    assert is_joined(formats.format_module(formats.detect_format(path)).load(path)) is independent


@pytest.mark.slow
@needs_shared_models
@pytest.mark.parametrize(("name", "independent"), [("osf/lm_model0_opt.onnx", True), ("odd/occ_model0.onnx", False)])
def test_real_models(name: str, independent: bool) -> None:
    """A model that ONNX Runtime optimized is batched; one with mixing ops is not."""
    path = SHARED_MODELS / name
    assert is_joined(formats.format_module(formats.detect_format(path)).load(path)) is independent

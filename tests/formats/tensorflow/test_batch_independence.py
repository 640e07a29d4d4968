"""Batch independence: joined samples give equal results, and models that mix samples are not batched."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from graphquant.formats.tensorflow import create_runner, load
from graphquant.ir import Parameters, TensorRef

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.ir import Model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SAMPLES = ROOT / "sample_models"
MODELS = ROOT.parent / "shared" / "models"

W = np.arange(8, dtype=np.float32).reshape(4, 2) - 3
K = np.linspace(-1, 1, 2 * 2 * 2 * 3, dtype=np.float32).reshape(2, 2, 2, 3)
C = np.array([0.5, -1.5, 2], np.float32)

APART: dict[str, tuple[list[Any], Callable[[Any, Any], Any]]] = {
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

MIXED: dict[str, tuple[list[Any], Callable[[Any, Any], Any]]] = {
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


@pytest.fixture(scope="module")
def tf() -> Any:
    """TensorFlow, imported like the runner does."""
    pytest.importorskip("tensorflow")
    create_runner(load(SAMPLES / "digits_cnn.pb"))
    return sys.modules["tensorflow"]


def model_of(tf: Any, folder: Path, shape: Any, body: Callable[[Any, Any], Any]) -> Model:
    """Return a frozen graph with one input."""
    with tf.Graph().as_default() as graph:
        tf.identity(body(tf.raw_ops, tf.compat.v1.placeholder(tf.float32, shape, "x")), "y")
    path = folder / "model.pb"
    path.write_bytes(graph.as_graph_def().SerializeToString())
    return load(path)


def agree(model: Model, feeds: list[dict[str, Any]]) -> None:
    """Assert that joined feeds give, in every tensor, the concatenated values of the single feeds."""
    run = create_runner(model)
    joined = {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}
    parameters = Parameters(model)
    tensors = [
        TensorRef(name, op.name, port)
        for name in model.reachable_graphs()
        for op in model.graphs[name].ops()
        for port, output in enumerate(op.outputs)
        if str(output.dtype).startswith("float") and port in model.graphs[name].consumers_by_port(op.name)
    ]
    tensors = [tensor for tensor in tensors if not parameters.is_parameter(tensor)]
    single = list(run.observe(tensors, feeds))
    (together,) = run.observe(tensors, [joined])
    compared = 0
    for tensor in tensors:
        for call, value in enumerate(together[tensor]):
            single_values = [single_runs[tensor][call] for single_runs in single]
            if not all(
                np.array_equal(single_value, value) for single_value in single_values
            ):  # else no input decides on it
                compared += 1
                np.testing.assert_allclose(value, np.concatenate(single_values), rtol=1e-4, atol=1e-5)
    assert compared > 0


def feeds_of(model: Model, rows: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return seeded feeds with these row counts."""
    (spec,) = create_runner(model).inputs
    sizes = [2 if size is None else size for size in spec.shape[1:]]
    rng = np.random.default_rng(5)
    return [{spec.name: rng.normal(size=(count, *sizes)).astype(np.float32)} for count in rows]


@pytest.mark.parametrize("name", APART)
def test_independent_models_are_batched(tf: Any, tmp_path: Path, name: str) -> None:
    """Models proved independent give the same values for joined samples, for any number of rows."""
    model = model_of(tf, tmp_path, *APART[name])
    assert create_runner(model).batch_independent is True
    agree(model, feeds_of(model, (1, 3, 2)))


@pytest.mark.parametrize("name", MIXED)
def test_dependent_models_are_not_batched(tf: Any, tmp_path: Path, name: str) -> None:
    """Models that mix samples, or cannot be proved independent, are not batched."""
    assert create_runner(model_of(tf, tmp_path, *MIXED[name])).batch_independent is False


def test_functions_are_inlined(tf: Any, tmp_path: Path) -> None:
    """A function is checked in each of its calls; one that mixes samples rules batching out."""
    signature = [tf.TensorSpec([None, 4], tf.float32)]
    independent = tf.function(lambda x: tf.nn.relu(tf.raw_ops.MatMul(a=x, b=np.eye(4, dtype=np.float32))), signature)
    mixed = tf.function(lambda x: x - tf.reduce_mean(x, 0), signature)
    nested = tf.function(lambda x: independent(independent(x) + 1), signature)
    model = model_of(tf, tmp_path, [None, 4], lambda _, x: nested(x))
    assert len(model.graphs) > 2
    assert create_runner(model).batch_independent is True
    agree(model, feeds_of(model, (1, 1, 2)))
    assert (
        create_runner(model_of(tf, tmp_path, [None, 4], lambda _, x: mixed(independent(x)))).batch_independent is False
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("digits_cnn.pb", True),
        ("digits_cnn_saved_model", True),
        ("digits_rnn.pb", False),
        ("digits_rnn_saved_model", False),
    ],
)
def test_sample_models(tf: Any, name: str, said: bool) -> None:
    """The sample models without loops are batched; those with loops are not."""
    model = load(SAMPLES / name)
    model_runner = create_runner(model)
    assert model_runner.batch_independent is said
    if said:
        data = np.load(SAMPLES / "digits_cnn_eval.npz")["image"]
        agree(model, [{model_runner.inputs[0].name: data[k : k + 1]} for k in range(4)])


@pytest.mark.skipif(not MODELS.exists(), reason="the shared models are not here")
def test_real_models(tf: Any) -> None:
    """The keyword spotter, with functions and variables, is batched; a detector with loops is not."""
    model = load(MODELS / "kws" / "saved_model")
    assert create_runner(model).batch_independent is True
    agree(model, feeds_of(model, (1, 2)))
    assert create_runner(load(MODELS / "mtcnn.pb")).batch_independent is False

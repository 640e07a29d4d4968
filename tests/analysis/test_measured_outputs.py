"""Tensors that are compared in place of outputs whose rows an op selects."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx
import pytest

import graphquant as gq
from graphquant.analysis.measured_outputs import OutputMeter, compared_outputs, read_scores, with_selections
from graphquant.formats import create_runner, shared_runner, shared_runners

if TYPE_CHECKING:
    from pathlib import Path

HEADER = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[1,3,32,32] x) => (OUTPUTS) <
  int64[3] sh = {1,6,-1}, int64[2] sp = {4,2}, int64[1] z = {0},
  int64[1] most = {8}, float[1] iou = {0.5}, int64[1] two = {2}, int64[1] three = {3}, int64[1] one = {1},
  int64[1] all = {-1}, float[1] low = {0.1}, int64[2] none = {0,3}, int64[1] k = {5}
> {
  c0 = Conv<strides=[2,2], pads=[1,1,1,1]>(x, w0)
  r0 = Relu(c0)
  c1 = Conv<strides=[2,2], pads=[1,1,1,1]>(r0, w1)
  raw = Reshape(c1, sh)
  columns, logits = Split<axis=1>(raw, sp)
  boxes = Transpose<perm=[0,2,1]>(columns)
  scores = Sigmoid(logits)
"""
PICK = """
  rows = Reshape(indices, all)
  flat = Squeeze(boxes, z)
  picked = Gather(flat, rows)
"""
ROWS = "\n  indices = Slice(selected, two, three, one)" + PICK
SUPPRESSION = "selected = NonMaxSuppression(boxes, scores, most, iou)"
BRANCHES = """
  best = ReduceMax<keepdims=0>(scores)
  any = Greater(best, low)
  selected = If(any) <
    then_branch = t () => (int64[a,b] st) { st = NonMaxSuppression(boxes, scores, most, iou) },
    else_branch = e () => (int64[a,b] se) { se = ConstantOfShape<value = int64[1] {0}>(none) }
  >
"""
MASK = (
    """
  best = ReduceMax<axes=[1], keepdims=0>(scores)
  best1 = Squeeze(best, z)
  keep = Greater(best1, low)
  indices = NonZero(keep)
"""
    + PICK
)
PICKED = "float[n,4] picked"
OF_INPUT = """
  corner = Slice(x, z, one, three)
  row = Reshape(corner, all)
  positive = Greater(row, low)
  where = NonZero(positive)
  rows = Reshape(where, all)
  flat = Reshape(c1, all)
  picked = Gather(flat, rows)
"""
PEAKS = """
  shape = Constant<value = int64[4] {1,2,8,8}>()
  map = Reshape(scores, shape)
  highest = MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>(map)
  same = COMPARISON
  mask = Cast<to=1>(same)
  peaks = Mul(map, mask)
"""
TOP_PEAKS = """
  rows = Constant<value = int64[3] {1,2,-1}>()
  listed = Reshape(peaks, rows)
  v, i = TopK(listed, k)
"""
LARGEST = """
  best = ArgMax<axis=2, keepdims=0>(logits)
  row = Squeeze(best, z)
  flat = Squeeze(boxes, z)
  picked = Gather(flat, row)
"""


def save_detector(folder: Path, body: str, outputs: str) -> Path:
    """Save a detector with seeded weights, and samples of it."""
    model = onnx.parser.parse_model(HEADER.replace("OUTPUTS", outputs) + body + "\n}")
    rng = np.random.default_rng(3)
    for name, shape in {"w0": (8, 3, 3, 3), "w1": (6, 8, 3, 3), "w2": (4, 8)}.items():
        values = rng.normal(0, np.prod(shape[1:]) ** -0.5, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    onnx.save(model, folder / "detector.onnx")
    smooth = np.kron(rng.normal(size=(40, 3, 8, 8)), np.ones((1, 1, 4, 4))).astype(np.float32)
    np.savez(folder / "images.npz", x=smooth + rng.normal(0, 0.05, smooth.shape).astype(np.float32))
    return folder / "detector.onnx"


@pytest.mark.parametrize(
    ("body", "outputs", "compared"),
    [
        (SUPPRESSION + ROWS, PICKED, ["columns:0 before NonMaxSuppression", "scores:0 before NonMaxSuppression"]),
        (BRANCHES + ROWS, PICKED, ["columns:0 before If", "scores:0 before If"]),
        (MASK, PICKED, ["columns:0 before NonZero"]),
        ("v, i = TopK(scores, k)", "float[1,2,5] v, float[1,4,64] columns", ["columns", "scores:0 before TopK"]),
        (
            SUPPRESSION
            + ROWS.replace("picked =", "near =")
            + "  wt = Transpose<perm=[1,0]>(w2)\n picked = Gemm(near, w2)",
            "float[n,8] picked",
            [
                "columns:0 before NonMaxSuppression (later ops not measured)",
                "scores:0 before NonMaxSuppression (later ops not measured)",
            ],
        ),
        (LARGEST, "float[2,4] picked", ["columns:0 before ArgMax", "columns:1 before ArgMax"]),
        (LARGEST, "int64[2] row, float[1,4,64] columns", ["columns", "row"]),
        (OF_INPUT, "float[n] picked", ["picked"]),
        (PEAKS.replace("COMPARISON", "Equal(highest, map)"), "float[1,2,8,8] peaks", ["scores:0 before Equal"]),
        (
            PEAKS.replace("COMPARISON", "GreaterOrEqual(map, highest)") + TOP_PEAKS,
            "float[1,2,5] v",
            ["scores:0 before TopK"],
        ),
        (PEAKS.replace("COMPARISON", "Equal(map, map)"), "float[1,2,8,8] peaks", ["peaks"]),
    ],
    ids=[
        "suppression",
        "branch",
        "mask",
        "top-k",
        "two-stages",
        "largest",
        "label",
        "by-input",
        "peaks",
        "top-peaks",
        "no-peaks",
    ],
)
def test_compared_tensors(tmp_path: Path, body: str, outputs: str, compared: list[str]) -> None:
    """The tensors before a selection are compared, unless quantization cannot change the selection."""
    path = save_detector(tmp_path, body, outputs)
    model = gq.load(path)
    runner = with_selections(create_runner(model))
    assert sorted(compared_outputs(runner, runner, {name: name for name in runner.outputs})) == compared
    result = gq.insert(path, data=str(tmp_path / "images.npz"))
    figures = result.validation.comparison.outputs
    assert sorted(output.name for output in figures) == compared
    assert all(output.sqnr > 20 for output in figures if output.sqnr is not None)  # labels are integers


@pytest.mark.parametrize(
    ("activation", "shape", "is_label"),
    [("Sigmoid", "N,6", True), ("Sigmoid", "N,2,3", False), ("Softmax", "N,2,3", True)],
)
def test_scores_of_labels(activation: str, shape: str, is_label: bool) -> None:
    """A sigmoid has scores if it decides about whole samples, and none if it makes a map; a softmax has them always."""
    sizes = shape.replace("N", "-1")
    text = f"""<ir_version: 8, opset_import: ["" : 17]> g (float[N,6] x) => (float[{shape}] y) {{
      scores = Abs(x)
      part = {activation}(scores)
      s = Constant<value = int64[{len(shape.split(","))}] {{{sizes}}}>()
      y = Reshape(part, s)
    }}"""
    runner = create_runner(gq.load(onnx.parser.parse_model(text)))
    values = np.arange(-6, 6, dtype=np.float32).reshape(2, 6)
    scores = read_scores(runner, "y", [{"x": values}])
    assert [value.tolist() for value in scores] == ([np.abs(values).tolist()] if is_label else [])


@pytest.mark.parametrize(
    ("packing", "output", "compared", "agreement"),
    [
        (
            "y = ai.onnx.ml.ZipMap<classlabels_int64s=[0,1,2,3,4,5]>(scores)",
            onnx.helper.make_sequence_type_proto(
                onnx.helper.make_map_type_proto(onnx.TensorProto.INT64, onnx.helper.make_tensor_type_proto(1, []))
            ),
            {"scores:0 before ZipMap"},
            True,
        ),
        (
            "y = SplitToSequence(scores)",
            onnx.helper.make_sequence_type_proto(onnx.helper.make_tensor_type_proto(1, None)),
            {"scores:0 before SplitToSequence"},
            False,
        ),
        (
            "first = SequenceConstruct(hidden) y = SequenceInsert(first, scores)",
            onnx.helper.make_sequence_type_proto(onnx.helper.make_tensor_type_proto(1, None)),
            {"hidden:0 before SequenceConstruct", "scores:0 before SequenceInsert"},
            False,
        ),
    ],
    ids=["map", "split", "insert"],
)
def test_outputs_that_are_no_tensors(tmp_path: Path, packing, output, compared, agreement) -> None:
    """The tensors in an output that is a sequence or a map are compared, and class scores only in a map."""
    body = f"{{ hidden = Relu(x) logits = MatMul(hidden, w) scores = Softmax(logits) {packing} }}"
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 2]> g (float[N,128] x) => (float[N,6] y) ' + body
    )
    rng = np.random.default_rng(5)
    model.graph.output[0].type.CopyFrom(output)
    model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=(128, 6)).astype("f4"), "w"))
    onnx.save(model, tmp_path / "m.onnx")
    data = {"x": rng.normal(size=(64, 128)).astype("f4")}
    outputs = gq.insert(tmp_path / "m.onnx", data=data, rules="generic").validation.comparison.outputs
    assert {figures.name for figures in outputs} == compared
    assert all(figures.sqnr > 15 and (figures.agreement is not None) == agreement for figures in outputs)


def test_bound_of_detector(tmp_path: Path, cli) -> None:
    """A bound applies to the tensors before the selection, and no class scores are read from boxes."""
    path = save_detector(tmp_path, SUPPRESSION + ROWS, PICKED)
    report = tmp_path / "report.json"
    cli(
        "insert",
        path,
        "--data",
        tmp_path / "images.npz",
        "--min-sqnr",
        "30",
        "-o",
        tmp_path / "q.onnx",
        "--report",
        report,
    )
    outputs = json.loads(report.read_text())["validation"]["comparison"]["outputs"]
    assert len(outputs) == 2
    assert all(output["sqnr"] >= 30 and output["agreement"] is None for output in outputs)


@pytest.mark.slow
def test_detector_in_function(tmp_path: Path) -> None:
    """A SavedModel selects boxes in a function, whose tensors are compared."""
    import tensorflow as tf

    rng = np.random.default_rng(0)
    weights = [tf.Variable(rng.normal(0, 0.2, shape).astype(np.float32)) for shape in ((3, 3, 3, 8), (3, 3, 8, 5))]

    @tf.function(input_signature=[tf.TensorSpec([1, 32, 32, 3], tf.float32, name="x")])
    def detect(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        y = tf.nn.conv2d(tf.nn.relu(tf.nn.conv2d(x, weights[0], 2, "SAME")), weights[1], 2, "SAME")
        y = tf.reshape(y, [-1, 5])
        boxes, scores = y[:, :4], tf.sigmoid(y[:, 4])
        rows = tf.image.non_max_suppression(boxes, scores, 10)
        return tf.gather(boxes, rows), tf.gather(scores, rows)

    module = tf.Module()
    module.weights, module.detect = weights, detect
    tf.saved_model.save(module, str(tmp_path / "detector"))
    smooth = np.kron(rng.normal(size=(40, 8, 8, 3)), np.ones((1, 4, 4, 1))).astype(np.float32)
    np.savez(tmp_path / "images.npz", x=smooth)
    result = gq.insert(tmp_path / "detector", data=str(tmp_path / "images.npz"))
    figures = result.validation.comparison.outputs
    assert len(figures) == 2
    assert all(output.name.endswith("before NonMaxSuppressionV3") and output.sqnr > 20 for output in figures)


@pytest.mark.slow
def test_the_meter_starts_with_the_initial_state(tmp_path: Path) -> None:
    """The runner of the float model is shared, and earlier samples have changed the state of the model."""
    tf = pytest.importorskip("tensorflow")
    module = tf.Module()
    module.total = tf.Variable(0.0)

    def accumulate(x: Any) -> Any:
        return {"y": module.total.assign_add(x)}

    module.serve = tf.function(accumulate, input_signature=[tf.TensorSpec([], tf.float32, name="x")], autograph=False)
    tf.saved_model.save(module, tmp_path / "net", signatures={"serving_default": module.serve})
    model, feeds = gq.load(tmp_path / "net"), [{"serving_default_x": np.float32(value)} for value in (1, 2, 3)]
    with shared_runners():
        shared_runner(model, "source").run(feeds[0])
        assert OutputMeter(model, feeds, 20).worst_sqnr(model) == math.inf


@pytest.mark.slow
def test_bfloat16_outputs_are_measured(tmp_path: Path) -> None:
    """NumPy does not count the type of ml_dtypes among its floats."""
    tf = pytest.importorskip("tensorflow")
    models = []
    for factor in (1, 1.125):
        with tf.Graph().as_default() as graph:
            tf.multiply(tf.compat.v1.placeholder(tf.bfloat16, [None, 4], "x"), tf.constant(factor, tf.bfloat16), "y")
        (tmp_path / f"{factor}.pb").write_bytes(graph.as_graph_def().SerializeToString())
        models.append(gq.load(tmp_path / f"{factor}.pb"))
    meter = OutputMeter(models[0], [{"x": np.ones((1, 4), ml_dtypes.bfloat16)}], 10)
    assert meter.worst_sqnr(models[1]) == pytest.approx(20 * math.log10(8))
    assert [*meter.sample_errors.values()] == [[4 / 64]]

"""Edited models run in TensorFlow with correct results; tensors are observed in every kind of graph."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.qparams import choose_qparams
from support.shared_models import SHARED_MODELS
from support.stand_ins import loop_detector_feeds

from graphquant.errors import DataError, MissingDependencyError, ModelError
from graphquant.formats.tensorflow import create_runner, load, save, session
from graphquant.ir import Model, Parameters, TensorRef, Use, check_invariants
from graphquant.numerics import IntType, Range, dequantize, quantize, tf_ranges
from graphquant.qdq import FAMILIES, QDQSite
from graphquant.utils import ONEDNN_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SAMPLES = ROOT / "sample_models"
INT8 = IntType(8, signed=True)
KERNEL = np.linspace(-1.01, 1.93, 12, dtype=np.float32).reshape(3, 4)  # no value lies between two steps

Array = np.ndarray[Any, Any]


def evaluation_images(name: str, count: int = 20) -> Array:
    """Return evaluation images of a sample model."""
    return np.load(SAMPLES / f"{name}_eval.npz")["image"][:count]


def faces(folder: Path) -> dict[str, Array]:
    """Return feeds of the face detector that run all three of its stages, or feeds of its stand-in."""
    if folder != SHARED_MODELS:
        return loop_detector_feeds()
    picture = np.load(SHARED_MODELS / "ultraface" / "images.npz")["rgb"][3].astype(np.float32)[..., ::-1]
    return {
        "input": picture,
        "min_size": np.float32(20),
        "thresholds": np.array([0.3, 0.3, 0.3], np.float32),
        "factor": np.float32(0.709),
    }


def known_weights(model: Model) -> list[tuple[Use, TensorRef, Array, int]]:
    """Return weight slots of known value, with tensor, value and channel axis."""
    parameters = Parameters(model)
    weight_tensors = []
    for name in model.reachable_graphs():
        for op in model.graphs[name].ops():
            if "weight" in op.roles:
                slot = op.roles.index("weight")
                tensor = model.graphs[name].slots(op.name)[slot]
                value = parameters.value(tensor)
                if value is not None:
                    weight_tensors.append((Use(name, op.name, slot), tensor, value, op.channel_axis % value.ndim))
    return weight_tensors


def insert_symmetric(
    model: Model, use: Use, lowest: Array, highest: Array, *, axis: int | None = None, shape: Any = None
) -> Any:
    """Quantize the input of `use` symmetrically to 8 bits; return the quantized tensor and its params."""
    graph = model.graphs[use.graph]
    tensor = graph.source_of(use)
    params = choose_qparams(Range(lowest, highest), INT8, symmetric=True, axis=axis)
    name = graph.unique_name(f"{tensor.op}/quant")
    site = QDQSite(tensor=tensor, name=name, params=params, rule="test", shape=shape, in_frame=not use.graph)
    quantized = FAMILIES["fake-quant"].add_ops(graph, site)
    graph.reroute(tensor, [use], quantized)
    return quantized, params


def quantized_weights(path: Path) -> tuple[Model, list[tuple[TensorRef, Array, Any]]]:
    """Return a copy of the model with all weights quantized per channel, and each weight's tensor, value and params."""
    model = load(path).copy()
    weight_params = []
    for use, _, value, axis in known_weights(model):
        reduced_axes = tuple(i for i in range(value.ndim) if i != axis)
        tensor, params = insert_symmetric(
            model, use, value.min(reduced_axes), value.max(reduced_axes), axis=axis, shape=value.shape
        )
        weight_params.append((tensor, value, params))
    check_invariants(model, "edit")
    return model, weight_params


def observed(model: Model, tensors: list[TensorRef], feeds: Mapping[str, Array]) -> dict[TensorRef, list[Array]]:
    """Return the values of `tensors` in one run, after checking their element counts."""
    model_runner = create_runner(model)
    (observation,) = model_runner.observe(tensors, [feeds])
    assert model_runner.element_counts(tensors, feeds) == {
        tensor: sum(value.size for value in observation[tensor]) for tensor in observation
    }
    return observation


@pytest.mark.parametrize("name", ["digits_cnn", "digits_rnn"])
@pytest.mark.parametrize("suffix", [".pb", "_saved_model"])
def test_runs_samples(tf: Any, name: str, suffix: str) -> None:
    """The sample models reach their documented accuracy in every form, fed by placeholder, tensor or key."""
    model = load(SAMPLES / f"{name}{suffix}")
    model_runner = create_runner(model)
    assert [(spec.dtype, spec.shape) for spec in model_runner.inputs] == [
        ("float32", (None, 8, 8, 1)[: 4 if "cnn" in name else 3])
    ]
    assert list(model_runner.outputs) == ["probabilities"]
    data = np.load(SAMPLES / f"{name}_eval.npz")
    got = model_runner.run({"image": data["image"]})["probabilities"]
    accuracy = 0.9867 if name == "digits_cnn" else 0.9833
    assert np.mean(got.argmax(1) == data["labels"]) == pytest.approx(accuracy, abs=1 / 300)
    key = model_runner.inputs[0].name
    np.testing.assert_array_equal(model_runner.run({f"{key}:0": data["image"]})["probabilities"], got)


def test_feeds(tf: Any) -> None:
    """Missing, unknown and misshapen inputs are refused with the input's name."""
    model_runner = create_runner(load(SAMPLES / "digits_cnn.pb"))
    with pytest.raises(DataError, match=r"lacks .*'image'"):
        model_runner.run({})
    with pytest.raises(DataError, match=r"'imago'.*Did you mean 'image"):
        model_runner.run({"imago": evaluation_images("digits_cnn")})
    with pytest.raises(DataError, match=r"'image' .*\(20, 8, 8\),.* \[any, 8, 8, 1\]"):
        model_runner.run({"image": evaluation_images("digits_cnn")[..., 0]})


class RunningSum:
    """A model with state: the sum of its inputs so far."""

    def __init__(self, tf: Any) -> None:
        """Start with 10."""
        self.module = tf.Module()
        self.module.total = tf.Variable([10.0])
        self.module.scale = tf.Variable([2.0])

        @tf.function(input_signature=[tf.TensorSpec([1], tf.float32, "x")])
        def add(x: Any) -> Any:
            return {"y": self.module.total.assign_add(x * self.module.scale) * 1.0}

        self.module.add = add


def test_state_between_runs(tf: Any, tmp_path: Path) -> None:
    """Runs continue from the previous one. Each sequence and each observation starts with the initial state."""
    running_sum = RunningSum(tf)
    tf.saved_model.save(running_sum.module, str(tmp_path / "sum"), signatures=running_sum.module.add)
    model = load(tmp_path / "sum")
    model_runner, feed = create_runner(model), {"x": np.ones(1, np.float32)}
    total = next(
        TensorRef(graph.name, op.name) for graph, op in model.reachable_ops() if op.kind == "mul" and "mul_1" in op.name
    )
    assert [model_runner.run(feed)["y"].item() for _ in range(2)] == [12, 14]
    assert [values[total][0].item() for values in model_runner.observe([total], [feed, feed])] == [12, 14]
    assert model_runner.run(feed)["y"].item() == 16
    assert [outputs["y"].item() for outputs in model_runner.run_each([feed, feed])] == [12, 14]
    assert model_runner.run(feed)["y"].item() == 16
    model_runner.start_sequence()
    assert model_runner.run(feed)["y"].item() == 12
    assert [variable.removesuffix("_1") for variable in session.find_state_variables(model)] == ["Variable"]


@pytest.mark.parametrize(
    "path",
    [
        *sorted(path for path in SAMPLES.glob("*.pb") if ".quant" not in path.suffixes),
        *sorted(SAMPLES.glob("*_saved_model")),
    ],
    ids=lambda p: p.name,
)
def test_quantized_weights(tf: Any, path: Path) -> None:
    """Per-channel FakeQuant on every weight, in functions, loops and branches, equals TensorFlow's op."""
    model, weight_params = quantized_weights(path)
    name = path.name.split("_")[1].split(".")[0]
    feeds = {"image": evaluation_images(f"digits_{name}")}
    values = observed(model, [tensor for tensor, _, _ in weight_params], feeds)
    reached = 0
    for tensor, value, params in weight_params:
        for got in values[tensor]:
            reached += 1
            expected = dequantize(quantize(value, params), params)
            assert got.shape == value.shape
            np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)
    assert reached >= len(weight_params) - 1  # one branch is not taken
    exact, close = create_runner(load(path)).run(feeds), create_runner(model).run(feeds)
    assert 0 < np.abs(exact["probabilities"] - close["probabilities"]).max() < 0.2


def test_mtcnn_frames(tf: Any, model_folder: Path) -> None:
    """In TF1 loops and conds, per-channel FakeQuants equal constants that were quantized beforehand."""
    feeds, path = faces(model_folder), model_folder / "mtcnn.pb"
    model, weight_params = quantized_weights(path)
    assert len(weight_params) >= (19 if model_folder == SHARED_MODELS else 4)
    by_hand = load(path)
    parameters = Parameters(by_hand)
    for use, tensor, value, axis in known_weights(by_hand):
        reduced_axes = tuple(i for i in range(value.ndim) if i != axis)
        params = choose_qparams(
            Range(value.min(reduced_axes), value.max(reduced_axes)), INT8, symmetric=True, axis=axis
        )
        limits = tf_ranges.range_for_fake_quant(params)
        low, high = limits.low.astype(np.float32), limits.high.astype(np.float32)
        with tf.device("CPU"):
            fixed = tf.quantization.fake_quant_with_min_max_vars_per_channel(value, low, high).numpy()
        constant = by_hand.op(parameters.root_tensor(tensor)).source.attr["value"].tensor
        constant.tensor_content = fixed.tobytes()
        assert use.slot == 1
    expected, got = create_runner(by_hand).run(feeds), create_runner(model).run(feeds)
    assert len(expected["prob"]) > 0
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value)
    float_result = create_runner(load(path)).run(feeds)
    assert float_result["prob"].shape != got["prob"].shape or not np.array_equal(float_result["prob"], got["prob"])


def test_mtcnn_activations(tf: Any, model_folder: Path) -> None:
    """Activations in TF1 frames are quantized and observed in each iteration."""
    model = load(model_folder / "mtcnn.pb").copy()
    graph = model.main
    uses = [Use("", op.name, 0) for op in graph.ops() if op.kind == "conv"]
    before = [graph.source_of(use) for use in uses]
    after = [insert_symmetric(model, use, np.float64(-2), np.float64(2))[0] for use in uses]
    check_invariants(model, "edit")
    values = observed(model, [*before, *after], faces(model_folder))
    rounds = set()
    for source, output in zip(before, after, strict=True):
        rounds.add(len(values[output]))
        low, high = (np.float32(model.op(graph.slots(output.op)[slot]).read_value()) for slot in (1, 2))
        for got in values[output]:
            expected = [
                tf.quantization.fake_quant_with_min_max_vars(value, low, high).numpy()
                for value in values[source]
                if value.shape == got.shape
            ]
            assert any(np.array_equal(got, candidate) for candidate in expected)
    assert max(rounds) > 3


def test_observe_loop(tf: Any) -> None:
    """A loop body gives one value for each iteration; its input state is the previous output state."""
    model = load(SAMPLES / "digits_rnn.pb")
    body = next(call.graph for call in model.main.op("recurrence").calls if call.attr == "body")
    graph = model.graphs[body]
    state = TensorRef(body, graph.inputs[3])
    result = graph.source_of(Use(body, graph.outputs[3], 0))
    top, rows = TensorRef("", "probabilities"), TensorRef("", "transpose_1")
    feeds = [{"image": evaluation_images("digits_rnn", count)} for count in (3, 7)]
    model_runner = create_runner(model)
    runs = list(model_runner.observe([state, result, top, rows], feeds))
    for run, feed in zip(runs, feeds, strict=True):
        assert [len(run[tensor]) for tensor in (state, result, top)] == [8, 8, 1]
        assert not run[state][0].any()
        for k in range(7):
            np.testing.assert_array_equal(run[result][k], run[state][k + 1])
        np.testing.assert_array_equal(run[rows][0], np.stack(run[result], axis=1))
        np.testing.assert_array_equal(run[top][0], model_runner.run(feed)["probabilities"])


def test_observe_long_loops(tf: Any, tmp_path: Path) -> None:
    """Many values of a loop are returned in order, for any number of values."""
    with tf.Graph().as_default() as graph:
        v1 = tf.compat.v1
        rounds = v1.placeholder(tf.int32, [], "n")
        v1.while_loop(lambda k: k < rounds, lambda k: tf.cast(tf.cast(k, tf.float32) + 1, tf.int32), [0], name="loop")
    path = tmp_path / "loop.pb"
    path.write_bytes(graph.as_graph_def().SerializeToString())
    model = load(path)
    sums = [
        TensorRef(name, op.name)
        for name in model.reachable_graphs()
        for op in model.graphs[name].ops()
        if op.kind == "add"
    ]
    (tensor,) = (tensor for tensor in sums if model.output(tensor).dtype == "float32")
    for rounds in (0, 1, 31, 32, 77):
        values = observed(model, [tensor], {"n": np.int32(rounds)})[tensor]
        assert [float(value) for value in values] == [float(k + 1) for k in range(rounds)]


def test_observe_branches(tf: Any) -> None:
    """Only the branch that runs gives values."""
    model = load(SAMPLES / "digits_rnn.pb")
    branches = [call.graph for call in model.main.op("brightness").calls]
    tensors = [TensorRef(name, op.name) for name in branches for op in model.graphs[name].ops() if op.kind == "matmul"]
    bright, dark = np.ones((2, 8, 8), np.float32), np.zeros((2, 8, 8), np.float32)
    runs = list(create_runner(model).observe(tensors, [{"image": bright}, {"image": dark}]))
    counts = [[len(run[tensor]) for tensor in tensors] for run in runs]
    assert sorted(counts) == [[0, 1], [1, 0]]


@pytest.mark.parametrize("suffix", [".pb", "_saved_model"])
def test_values_do_not_depend_on_other_observed_tensors(tf: Any, suffix: str) -> None:
    """Observing in several calls gives the bits of one call, although TensorFlow fuses unobserved ops."""
    model = load(SAMPLES / f"digits_cnn{suffix}")
    kinds = {"conv", "bias_add", "relu", "matmul"}
    tensors = [
        TensorRef(name, op.name)
        for name in model.reachable_graphs()
        for op in model.graphs[name].ops()
        if op.kind in kinds and op.outputs[0].dtype == "float32"
    ]
    model_runner, feed = create_runner(model), {"image": evaluation_images("digits_cnn", 8)}
    (together,) = model_runner.observe(tensors, [feed])
    for group in (tensors[::3], tensors[1::3], tensors[2::3]):
        (observation,) = model_runner.observe(
            group, [feed], other_tensors=[tensor for tensor in tensors if tensor not in group]
        )
        assert list(observation) == group
        for tensor in group:
            np.testing.assert_array_equal(observation[tensor], together[tensor])


def test_observe_with_untaken_branches(tf: Any, tmp_path: Path) -> None:
    """An op without readers on an untaken branch has no value; other tensors are observed."""
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [2], name="x")
        off, on = tf.raw_ops.Switch(data=x, pred=tf.reduce_sum(x) > 0.0)
        tf.negative(off, name="off")
        tf.abs(on, name="on")
    (tmp_path / "model.pb").write_bytes(graph.as_graph_def().SerializeToString())
    model = load(tmp_path / "model.pb")
    switch = next(op.name for op in model.main.ops() if op.kind == "switch")
    tensors = [TensorRef("", switch, 0), TensorRef("", switch, 1), TensorRef("", "x")]
    feeds = [{"x": np.array(values, np.float32)} for values in ([1, 2], [-1, -2])]
    counts = [[len(run[tensor]) for tensor in tensors] for run in create_runner(model).observe(tensors, feeds)]
    assert counts == [[0, 1, 1], [1, 0, 1]]
    sizes = [[create_runner(model).element_counts(tensors, feed)[tensor] for tensor in tensors] for feed in feeds]
    assert sizes == [[0, 2, 2], [2, 0, 2]]


def test_outputs_that_are_not_reached(tf: Any, tmp_path: Path) -> None:
    """A run returns the outputs that ran; an error of the model is still raised."""
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None], name="x")
        off, on = tf.raw_ops.Switch(data=x, pred=tf.reduce_sum(x) > 0.0)
        tf.negative(off, name="off")
        tf.reshape(on, [2], name="on")
        tf.abs(x, name="always")
    (tmp_path / "model.pb").write_bytes(graph.as_graph_def().SerializeToString())
    model_runner = create_runner(load(tmp_path / "model.pb"))
    for _ in range(2):
        assert {
            key: value.tolist() for key, value in model_runner.run({"x": np.array([1, 2], np.float32)}).items()
        } == {
            "on": [1, 2],
            "always": [1, 2],
        }
        assert {
            key: value.tolist() for key, value in model_runner.run({"x": np.array([-1, -2], np.float32)}).items()
        } == {
            "off": [1, 2],
            "always": [1, 2],
        }
    with pytest.raises(ModelError, match=r"TensorFlow .*'on'"):
        model_runner.run({"x": np.ones(3, np.float32)})


def test_placeholder_with_default(tf: Any, tmp_path: Path) -> None:
    """Feeding a placeholder with a default is optional."""
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [2], name="x")
        factor = v1.placeholder_with_default(tf.constant(3.0), [], name="factor")
        tf.multiply(x, factor, name="y")
    (tmp_path / "model.pb").write_bytes(graph.as_graph_def().SerializeToString())
    model_runner = create_runner(load(tmp_path / "model.pb"))
    assert [spec.name for spec in model_runner.inputs] == ["x"]
    x = np.array([1, 2], np.float32)
    assert model_runner.run({"x": x})["y"].tolist() == [3, 6]
    assert model_runner.run({"x": x, "factor": np.array(5, np.float32)})["y"].tolist() == [5, 10]


def test_function_as_operation(tf: Any, tmp_path: Path) -> None:
    """A function called by op type is edited and observed like any other."""
    (tmp_path / "m.pbtxt").write_text("""
      node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } } }
      node { name: "c" op: "twice" input: "x" }
      node { name: "d" op: "twice" input: "c" }
      library { function { signature { name: "twice" input_arg { name: "a" type: DT_FLOAT }
        output_arg { name: "b" type: DT_FLOAT } }
        node_def { name: "sum" op: "AddV2" input: "a" input: "a" attr { key: "T" value { type: DT_FLOAT } } }
        ret { key: "b" value: "sum:z:0" } } }
      versions { producer: 1200 }
    """)
    model = load(tmp_path / "m.pbtxt").copy()
    tensor, params = insert_symmetric(model, Use("twice", "sum", 1), np.float64(-4), np.float64(4))
    x = np.float32([0.3, -1.9])
    first = x + dequantize(quantize(x, params), params)
    second = first + dequantize(quantize(first, params), params)
    run = observed(model, [tensor, TensorRef("twice", "sum"), TensorRef("", "d")], {"x": x})
    np.testing.assert_allclose(run[TensorRef("", "d")][0], second, rtol=1e-6)
    np.testing.assert_allclose(run[TensorRef("twice", "sum")], [first, second], rtol=1e-6)
    assert len(run[tensor]) == 2


def test_observe_functions(tf: Any) -> None:
    """Tensors in the functions of a SavedModel equal those in the frozen graph."""
    frozen, saved = load(SAMPLES / "digits_cnn.pb"), load(SAMPLES / "digits_cnn_saved_model")
    name = next(name for name in saved.reachable_graphs() if "stem/conv" in saved.graphs[name])
    ops = [op.name for op in frozen.main.ops() if op.kind in {"conv", "depthwise_conv", "relu", "batchnorm", "concat"}]
    feeds = {"image": evaluation_images("digits_cnn")}
    frozen_values = observed(frozen, [TensorRef("", op) for op in ops], feeds)
    saved_values = observed(saved, [TensorRef(name, op) for op in ops], feeds)
    assert len(ops) > 15
    for op in ops:
        (expected,), (got,) = frozen_values[TensorRef("", op)], saved_values[TensorRef(name, op)]
        np.testing.assert_array_equal(got, expected)


def test_kws(tf: Any, tmp_path: Path, model_folder: Path) -> None:
    """Edited SavedModels give the same results in the TF1 loader, also one that tf.saved_model.load cannot read."""
    name, output, count = "image", "probabilities", 9
    x = evaluation_images("digits_cnn", 50)
    if model_folder == SHARED_MODELS:
        name, output, count = "input_1", "dense", 10
        x = np.load(model_folder / "kws/eval.npz")["input_1"][:50]
    model, weight_params = quantized_weights(model_folder / "kws/saved_model")
    assert len(weight_params) == count
    got = create_runner(model).run({name: x})[output]
    save(model, tmp_path / "quant")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.saved_model.loader.load(session, ["serve"], str(tmp_path / "quant"))
        loaded = session.run("StatefulPartitionedCall:0", {f"serving_default_{name}:0": x})
    np.testing.assert_allclose(loaded, got, rtol=1e-4, atol=1e-5)
    exact = create_runner(load(model_folder / "kws/saved_model")).run({name: x})[output]
    assert np.mean(exact.argmax(1) == got.argmax(1)) > 0.9
    assert np.abs(exact - got).max() > 1e-4


@pytest.mark.filterwarnings("ignore")
def test_saved_model_loads(tf: Any, tmp_path: Path) -> None:
    """A written SavedModel loads with its signature and gives the results of the runner."""
    model, _ = quantized_weights(SAMPLES / "digits_rnn_saved_model")
    save(model, tmp_path / "quant")
    x = evaluation_images("digits_rnn")
    loaded = tf.saved_model.load(str(tmp_path / "quant"))
    got = loaded.signatures["serving_default"](image=tf.constant(x))["probabilities"].numpy()
    np.testing.assert_allclose(got, create_runner(model).run({"image": x})["probabilities"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("text", [False, True])
def test_meta_graph(tf: Any, tmp_path: Path, text: bool) -> None:
    """A `.meta` file and its checkpoint are loaded, edited, saved as a pair, and restored by TensorFlow's Saver."""
    v1 = tf.compat.v1
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    with tf.Graph().as_default(), v1.Session() as session:
        fed = v1.placeholder(tf.float32, [None, 3], name="x")
        kernel = v1.get_variable("w", initializer=KERNEL, use_resource=False)
        offset = v1.get_variable("b", initializer=np.float32([1, 2, 3, 4]), use_resource=True)
        v1.nn.relu(tf.matmul(fed, kernel) + offset, name="y")
        session.run(v1.global_variables_initializer())
        saver = v1.train.Saver()
        prefix = saver.save(session, str(tmp_path / "old"), write_meta_graph=not text)
        if text:
            saver.export_meta_graph(str(tmp_path / "old.meta"), as_text=True)
    model = load(tmp_path / "old.meta").copy()
    assert (model.source.message_type, model.source.text) == ("MetaGraphDef", text)
    parameters = Parameters(model)
    np.testing.assert_array_equal(parameters.value(model.main.slots("MatMul")[1]), KERNEL)
    np.testing.assert_array_equal(parameters.value(model.main.slots("add")[1]), [1, 2, 3, 4])
    _, params = insert_symmetric(model, Use("", "MatMul", 1), np.float64(-1), np.float64(2))
    got = create_runner(model).run({"x": x})["y"]
    expected = np.maximum(x @ dequantize(quantize(KERNEL, params), params) + np.float32([1, 2, 3, 4]), 0)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    save(model, tmp_path / "new.meta")
    assert load(tmp_path / "new.meta").source.text == text
    with tf.Graph().as_default(), v1.Session() as session:
        v1.train.import_meta_graph(str(tmp_path / "new.meta")).restore(session, str(tmp_path / "new"))
        np.testing.assert_allclose(session.run("y:0", {"x:0": x}), got, rtol=1e-6)
    assert prefix.endswith("old")


@pytest.mark.parametrize("name", ["digits_cnn.pb", "digits_rnn.pb"])
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch, tf: Any, name: str) -> None:
    """Every float tensor has the same bits on 1, 2 and 4 threads, so statistics of machines can be merged."""
    model = load(SAMPLES / name)
    ops = [op for op in model.main.ops() if op.roles and op.outputs]
    watched = [TensorRef("", op.name) for op in ops if op.outputs[0].dtype == "float32"]
    feeds = {"image": evaluation_images(name.partition(".")[0], 4)}
    runs = []
    for threads in (1, 2, 4):
        monkeypatch.setattr(session, "OP_THREADS", threads)
        runs.append(observed(model, watched, feeds))
    assert len(runs[0]) > 5
    for tensor in runs[0]:
        for later_run in runs[1:]:
            np.testing.assert_array_equal(np.asarray(runs[0][tensor]), np.asarray(later_run[tensor]))


@pytest.mark.filterwarnings("ignore")
def test_observe_compiled(tf: Any, tmp_path: Path) -> None:
    """Tensors inside a function with XLA compilation are observed."""

    class Layer(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = tf.Variable(KERNEL)

        @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32)], jit_compile=True)
        def call(self, x: Any) -> Any:
            return tf.nn.relu(tf.matmul(x, self.kernel, name="product"))

    layer = Layer()
    tf.saved_model.save(layer, str(tmp_path / "layer"), signatures=layer.call)
    model = load(tmp_path / "layer")
    name = next(name for name in model.reachable_graphs() if "product" in model.graphs[name])
    x = np.float32([[1, 2, 3]])
    run = observed(model, [TensorRef(name, "product")], {"x": x})
    np.testing.assert_allclose(run[TensorRef(name, "product")], [x @ KERNEL], rtol=1e-6)


def test_refused_graph(tf: Any, tmp_path: Path) -> None:
    """TensorFlow's errors become ModelErrors with their reason."""
    path = tmp_path / "bad.pbtxt"
    path.write_text(
        'node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } } }'
        ' node { name: "y" op: "NoSuchOp" input: "x" }'
    )
    with pytest.raises(ModelError, match="NoSuchOp"):
        create_runner(load(path)).run({})
    path.write_text(
        'node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } } }'
        ' node { name: "y" op: "MatMul" input: "x" input: "x" attr { key: "T" value { type: DT_FLOAT } } }'
    )
    with pytest.raises(ModelError, match=r"TensorFlow .*'y'"):
        create_runner(load(path)).run({"x": np.ones((2, 3), np.float32)})


def test_missing_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tensorflow the message contains the install command."""
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorflow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [])
    model = load(SAMPLES / "digits_cnn.pb")
    with pytest.raises(MissingDependencyError, match=r"pip install 'graphquant\[tensorflow\]'"):
        create_runner(model)


def test_tensorflow_is_imported_late_and_silently() -> None:
    """Loading and saving do not import tensorflow; running a model writes nothing to stderr."""
    code = f"""
import sys
from pathlib import Path
import numpy as np
from graphquant.formats import tensorflow
model = tensorflow.load(Path({str(SAMPLES / "digits_rnn_saved_model")!r}))
tensorflow.emit(model)
assert "tensorflow" not in sys.modules
result = tensorflow.create_runner(model).run({{"image": np.zeros((1, 8, 8), np.float32)}})
print(result["probabilities"].shape)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (process.returncode, process.stdout, process.stderr) == (0, "(1, 10)\n", "")


@pytest.mark.parametrize("given", [None, "1"])
def test_runs_are_deterministic(given: str | None) -> None:
    """Kernels whose rounding depends on memory alignment are off, unless the user sets the variable."""
    code = f"""
import sys
import graphquant
from graphquant.formats.tensorflow import session
session.import_tensorflow()
from tensorflow.python.util import _pywrap_util_port
print(_pywrap_util_port.IsMklEnabled())
space = bytearray(int(sys.argv[1]))
result = graphquant.insert({str(SAMPLES / "digits_cnn.pb")!r}, data={str(SAMPLES / "digits_cnn_calib.npz")!r})
print([repr(output.sqnr) for output in result.validation.comparison.outputs])
"""
    environment = {name: value for name, value in os.environ.items() if name != ONEDNN_VARIABLE}
    environment |= {ONEDNN_VARIABLE: given} if given else {}
    printed = [
        subprocess.run(
            [sys.executable, "-c", code, str(space)], capture_output=True, text=True, check=True, env=environment
        ).stdout.splitlines()
        for space in ((0, 40_000, 400_000) if given is None else (0,))
    ]
    assert printed[0][0] == str(given is not None)
    assert printed == [printed[0]] * len(printed)

"""Frozen graphs: constants for variables, saved as one file, and several models in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import graphquant as gq
from graphquant import formats
from graphquant.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def run_model(model: gq.Model, value: Any) -> Any:
    """Return the only output of a model with one input."""
    runner = formats.format_module(model.format).create_runner(model)
    (output,) = runner.run({runner.inputs[0].name: value}).values()
    return output


def test_frozen_saved_model_is_written_as_one_file(cli: Callable[..., Any], samples: Path, tmp_path: Path) -> None:
    """`freeze` writes a .pb with the signature's inputs and outputs, and the values of the SavedModel."""
    pytest.importorskip("tensorflow")
    source, target = samples / "digits_cnn_saved_model", tmp_path / "digits.pb"
    cli("freeze", source, "-o", target)
    model, frozen = gq.load(source), gq.load(target)
    assert (frozen.main.inputs, frozen.main.outputs, len(frozen.graphs)) == (["image"], ["@probabilities"], 1)
    assert not any(op.kind == "variable" for op in frozen.main.ops())
    images = np.load(samples / "digits_cnn_eval.npz")["image"][:4]
    assert np.array_equal(run_model(frozen, images), run_model(model, images))
    cli("freeze", source, "-o", target, code=2)  # it exists
    cli("freeze", source, "-o", tmp_path / "digits.onnx", code=2)
    cli("freeze", source, "-o", tmp_path / "digits.tflite", code=2)
    cli("freeze", samples / "digits_cnn.onnx", "-o", tmp_path / "x.onnx", code=2)


def eye_net(path: Path, batch: int | None) -> Path:
    """Write a SavedModel with a product whose second operand is a constant that only TensorFlow computes."""
    tf = pytest.importorskip("tensorflow")
    rng = np.random.default_rng(0)
    module = tf.Module()
    module.kernel = tf.Variable(rng.normal(0, 0.4, (12, 12)).astype(np.float32))

    def serve(x: Any) -> Any:
        rows = tf.nn.relu(tf.matmul(x, module.kernel))
        return {"y": tf.matmul(rows, tf.eye(12, batch_shape=[1])) @ module.kernel}

    spec = tf.TensorSpec([batch, 8, 12], tf.float32, name="x")
    module.serve = tf.function(serve, input_signature=[spec], autograph=False)
    tf.saved_model.save(module, path, signatures={"serving_default": module.serve})
    np.savez(path.with_suffix(".npz"), x=rng.normal(size=(24, 8, 12)).astype(np.float32))
    return path


@pytest.mark.parametrize("batch", [1, None])
def test_constants_that_only_tensorflow_computes_are_weights(batch: int | None, tmp_path: Path) -> None:
    """The MatrixDiag of `tf.eye` is a constant of the frozen graph with a symmetric range, and the file is accurate."""
    path = eye_net(tmp_path / "net", batch)
    frozen = gq.freeze(gq.load(path))
    kinds = {op.type for op in frozen.main.ops()}
    assert not any(kind.startswith(("MatrixDiag", "Fill", "Ones")) for kind in kinds)
    value = np.load(path.with_suffix(".npz"))["x"][:1]
    assert np.allclose(run_model(frozen, value), run_model(gq.load(path), value), atol=1e-6)
    result = gq.insert(frozen, rules=["tflite"], data=path.with_suffix(".npz"))
    weights = [pair for pair in result.inserted if pair.site.parameter]
    assert [int(np.max(np.abs(pair.params.zero_point))) for pair in weights] == [0, 0, 0]
    gq.convert_to_tflite(result, tmp_path / "net.tflite")
    comparison = gq.compare(path, tmp_path / "net.tflite", path.with_suffix(".npz"))
    assert comparison.outputs[0].sqnr is not None
    assert comparison.outputs[0].sqnr > 30  # 0.1 dB with the range of TensorFlow's converter


def test_two_keras_files_are_frozen_in_one_process(tmp_path: Path) -> None:
    """Functions of two files may have the same names; placeholders of lowered loops are no inputs."""
    keras = pytest.importorskip("keras")
    layers = keras.layers
    paths = []
    for name, layer in {"a": layers.LSTM(3), "b": layers.GRU(5)}.items():
        model = keras.Sequential([keras.Input((6, 4), name="x"), layer, layers.Dense(2)])
        paths.append(tmp_path / f"{name}.keras")
        model.save(paths[-1])
    value = np.random.default_rng(0).normal(size=(2, 6, 4)).astype(np.float32)
    for path in paths:
        frozen = gq.freeze(gq.load(path))
        assert len(frozen.main.inputs) == 1
        saved = gq.load(gq.save(frozen, path.with_suffix(".pb")))
        assert np.allclose(run_model(saved, value), keras.models.load_model(path)(value), atol=1e-6)


def test_lookups_in_variables_are_frozen(tmp_path: Path) -> None:
    """TensorFlow freezes no ResourceGather of a function, whether it is in a call, a loop or a branch."""
    tf = pytest.importorskip("tensorflow")
    values = np.random.default_rng(0)
    module = tf.Module()
    module.table = tf.Variable(values.normal(size=(50, 8)).astype(np.float32))
    module.rows = tf.Variable(values.normal(size=(3, 5, 8)).astype(np.float32))

    def take(column: Any) -> Any:
        return tf.nn.embedding_lookup(module.table, column)

    @tf.function
    def inner(ids: Any) -> Any:
        loop = tf.while_loop(
            lambda step, _: step < 3, lambda step, total: (step + 1, total + take(ids[:, 1])), (0, take(ids[:, 4]))
        )
        branch = tf.cond(tf.reduce_sum(ids) > 0, lambda: take(ids[:, 2]), lambda: take(ids[:, 3]))
        batched = tf.gather(module.rows, ids[:3, :2] % 5, batch_dims=1)
        return take(ids[:, 0]) + tf.gather_nd(module.table, ids[:, :1]) + loop[1] + branch + tf.reduce_sum(batched)

    @tf.function(input_signature=[tf.TensorSpec([None, 6], tf.int32, name="ids")])
    def serve(ids: Any) -> Any:
        return inner(ids)

    tf.saved_model.save(module, str(tmp_path / "net"), signatures=serve)
    model = gq.load(tmp_path / "net")
    ids = values.integers(0, 50, (4, 6)).astype(np.int32)
    assert np.allclose(run_model(gq.freeze(model), ids), run_model(model, ids), atol=1e-5)


def test_outputs_of_a_graph_without_signatures_keep_their_names(tmp_path: Path) -> None:
    """An output that is the only one of its op is not copied. Names of other ports have no colon."""
    tf = pytest.importorskip("tensorflow")
    v1 = tf.compat.v1
    with v1.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 8], name="x")
        product = tf.matmul(x, v1.get_variable("w", [8, 6]))
        tf.nn.relu(product, name="y")
        tf.split(product, 2, axis=1, name="parts")
        session.run(v1.global_variables_initializer())
        v1.train.Saver().save(session, str(tmp_path / "net"))
    model = gq.load(tmp_path / "net.meta")
    frozen = gq.freeze(model)
    assert model.main.outputs == ["@y", "@parts", "@parts:1"]
    assert frozen.main.outputs == ["@y", "@parts_1", "@parts_1_1"]
    feeds = {"x": np.ones((2, 8), np.float32)}
    expected, results = (formats.create_runner(each).run(feeds) for each in (model, frozen))
    assert all(np.array_equal(*pair) for pair in zip(expected.values(), results.values(), strict=True))


def test_a_model_with_state_is_refused_by_its_variable(tmp_path: Path) -> None:
    """A constant cannot replace a variable that runs assign."""
    tf = pytest.importorskip("tensorflow")
    module = tf.Module()
    module.total = tf.Variable(np.zeros(3, np.float32), name="total")

    def accumulate(x: Any) -> Any:
        return {"y": module.total.assign_add(x)}

    spec = tf.TensorSpec([3], tf.float32, name="x")
    module.serve = tf.function(accumulate, input_signature=[spec], autograph=False)
    tf.saved_model.save(module, tmp_path / "state", signatures={"serving_default": module.serve})
    with pytest.raises(ModelError, match="total"):
        gq.freeze(gq.load(tmp_path / "state"))


@pytest.mark.parametrize("options", [{"jit_compile": True}, {"experimental_attributes": {"_noinline": True}}])
def test_functions_that_are_not_inlined(options: dict[str, Any], tmp_path: Path) -> None:
    """Keras computes a convolution of groups in a function that it compiles. No op is left between it and the Relu."""
    tf = pytest.importorskip("tensorflow")

    class Net(tf.Module):
        def __init__(self) -> None:
            values = np.random.default_rng(0).normal(size=(2, 3, 3, 1, 4)).astype(np.float32)
            self.weights = [tf.Variable(value) for value in values]

        @tf.function(input_signature=[tf.TensorSpec([None, 8, 8, 4], tf.float32, name="x")])
        def serve(self, x: Any) -> dict[str, Any]:
            for weight in self.weights:
                convolve = tf.function(lambda x=x, w=weight: tf.nn.convolution(x, w, padding="SAME"), **options)
                x = tf.nn.relu(convolve())
            return {"y": x}

    net = Net()
    tf.saved_model.save(net, str(tmp_path / "net"), signatures=net.serve)
    model = gq.load(tmp_path / "net")
    frozen = gq.freeze(model)
    main = frozen.main
    before = [main.op(source.op).type for op in main.ops() if op.type == "Relu" for source in main.slots(op.name)]
    assert before == ["Conv2D", "Conv2D"]
    x = np.random.default_rng(1).normal(size=(2, 8, 8, 4)).astype(np.float32)
    np.testing.assert_allclose(run_model(frozen, x), run_model(model, x), rtol=1e-5, atol=1e-5)

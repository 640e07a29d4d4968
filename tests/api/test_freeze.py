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

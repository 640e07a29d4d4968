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

"""Running models against values computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphquant.errors import ModelError
from graphquant.formats import InputSpec
from graphquant.formats import onnx as format_

Array = np.ndarray[Any, Any]

HEAD = '<ir_version: 8, opset_import: ["" : 17]> '
X = np.array([-3, 4], np.float32)


def test_run(model_of: Any) -> None:
    """A runner lists the inputs that must be fed, and gives the outputs by name; defaults need no feed."""
    model = model_of(
        HEAD
        + """g (float[N] x, float[2] w) => (float[N] y, float[N] z) <float[2] w = {1, 2}> {
        y = Add(x, w)
        z = Neg(x)
    }"""
    )
    runner = format_.runner(model)
    assert runner.inputs == [InputSpec(name="x", dtype="float32", shape=(None,))]
    assert runner.outputs == ["y", "z"]
    results = runner.run({"x": X})
    assert {name: value.tolist() for name, value in results.items()} == {"y": [-2, 6], "z": [3, -4]}
    assert runner.run({"x": X, "w": X})["y"].tolist() == [-6, 8]


def test_failures_are_model_errors(model_of: Any) -> None:
    """A model that onnxruntime refuses, or a feed that does not fit, is an error with its first line and the shapes."""
    with pytest.raises(ModelError, match=r"onnxruntime cannot take the model: .*Nonsense"):
        format_.runner(model_of(HEAD + "g (float[2] x) => (float[2] y) { y = Nonsense(x) }")).run({"x": X})
    runner = format_.runner(model_of(HEAD + "g (float[2] x) => (float[2] y) { y = Neg(x) }"))
    with pytest.raises(ModelError, match=r"onnxruntime failed on the inputs x float32\[3\]: "):
        runner.run({"x": np.zeros(3, np.float32)})
    with pytest.raises(ModelError, match=r"onnxruntime failed on the inputs none: "):
        runner.run({})

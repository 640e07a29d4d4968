"""Ranges without clipping: what the samples gain without the one that gains most. Runs that judge the data."""

import math
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest

import graphquant as gq
from graphquant.analysis import validation
from graphquant.api.plan_search import _change_without_best


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ([1.0, 1.0, 8.0], [1.0, 1.0, 1.0], 0.0),  # the last sample has all of the gain
        ([1.0, 1.0, 8.0], [2.0, 2.0, 1.0], 10 * math.log10(2)),
        ([2.0, 2.0, 8.0], [1.0, 1.0, 1.0], -10 * math.log10(2)),
        ([4.0, 4.0], [1.0, 1.0], math.inf),  # both gain most
        ([2.0, 8.0], [0.0, 1.0], -math.inf),
        ([0.0, 4.0], [0.0, 1.0], math.inf),  # nothing but one sample has an error
        ([0.0, 4.0], [1.0, 1.0], math.inf),  # a sample without an error gets one
    ],
)
def test_change_without_the_sample_that_gains_most(before: list[float], after: list[float], change: float) -> None:
    """Others may not lose more than a plan gains over all samples."""
    assert _change_without_best(before, after) == pytest.approx(change)


def test_runs_of_which_some_were_not_kept_are_not_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample may fill the rows of a fixed batch, whose scale is judged by the model."""
    graph = "g (float[4,3,8,8] x) => (float[4,8,6,6] y) { c = Conv(x, w, b) y = Relu(c) }"
    message = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 13]> {graph}')
    rng = np.random.default_rng(0)
    for name, shape in (("w", (8, 3, 3, 3)), ("b", (8,))):
        message.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    onnx.save(message, tmp_path / "m.onnx")
    data = {"x": 1e6 * rng.normal(size=(160, 3, 8, 8)).astype(np.float32)}
    for limit in (validation.MAX_CACHED_BYTES, 40_000):
        monkeypatch.setattr(validation, "MAX_CACHED_BYTES", limit)
        findings = gq.insert(tmp_path / "m.onnx", data=data).data_findings
        assert [finding.kind for finding in findings] == ["noise", "scale"]

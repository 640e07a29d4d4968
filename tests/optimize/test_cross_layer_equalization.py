"""Cross-layer equalization divides channels by the root of the ratio of their weight ranges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx.parser
import pytest
from support.rule_files import weight_rule

import graphquant as gq
from graphquant.optimize import channel_scaling
from graphquant.optimize.channel_groups import INEXACT_SCALING
from graphquant.optimize.channel_scaling import ALREADY_EQUALIZED, _balancing_factors

if TYPE_CHECKING:
    from pathlib import Path

    from graphquant.optimize.algorithm import AlgorithmResult

SCHEME = """
[scheme.weight]
dtype = "int8"
zero = "symmetric"
observe = "absmax"
"""
RULES = SCHEME + weight_rule("conv")


@pytest.mark.parametrize(
    ("produced", "read", "expected"),
    [((4.0, 1.0), (1.0, 4.0), (2.0, 0.5)), ((0.0, 4.0), (3.0, 1.0), (1.0, 2.0)), ((3.0, 4.0), (0.0, 1.0), (1.0, 2.0))],
)
def test_channels_without_weights_on_one_side_keep_their_scale(
    produced: tuple[float, ...], read: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    """A factor is the root of the ratio of both ranges, and 1 where one of them is 0."""
    assert _balancing_factors(np.array(produced), np.array(read)).tolist() == list(expected)


def equalize(folder: Path, factor: float) -> AlgorithmResult:
    """Equalize two convolutions with even weights, but for one channel that is `factor` times as large."""
    text = (
        '<ir_version: 8, opset_import: ["": 17]> g (float[1,3,4,4] x) => (float[1,2,4,4] y)'
        " { a = Conv (x, w) r = Relu (a) y = Conv (r, v) }"
    )
    model = onnx.parser.parse_model(text)
    weight = np.full((6, 3, 1, 1), 0.5)
    weight[0] *= factor
    for name, value in (("w", weight), ("v", np.full((2, 6, 1, 1), 0.5))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    onnx.save(onnx.shape_inference.infer_shapes(model), folder / "model.onnx")
    np.savez(folder / "data.npz", x=np.ones((32, 3, 4, 4), np.float32))
    result = gq.insert(
        folder / "model.onnx", rules=RULES, data=str(folder / "data.npz"), algorithms=["cross-layer-equalization"]
    )
    (entry,) = [entry for entry in result.algorithm_results if entry.target == "r"]
    return entry


def test_even_weights_stay(tmp_path: Path) -> None:
    """Weights of equal ranges have nothing to equalize."""
    entry = equalize(tmp_path, 1.0)
    assert (entry.applied, entry.detail) == (False, ALREADY_EQUALIZED)


def test_scaling_that_is_not_exact_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group whose constants cannot be scaled exactly is reported with that reason."""
    monkeypatch.setattr(channel_scaling, "rescale_group", lambda *_: False)
    entry = equalize(tmp_path, 16.0)
    assert (entry.applied, entry.detail) == (False, INEXACT_SCALING)

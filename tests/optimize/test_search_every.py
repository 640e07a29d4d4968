"""The search beside trying every plan."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest

import graphquant as gq
from graphquant.optimize.selection import search_cheapest_plan, selection_cost

if TYPE_CHECKING:
    from pathlib import Path

NET = """
<ir_version: 8, opset_import: ["" : 13]>
net (float[N, 8] x) => (float[N, 6] y) { a = MatMul(x, w0) r = Relu(a) c = MatMul(r, w1) s = Relu(c) y = MatMul(s, w2) }
"""


@pytest.mark.parametrize("more", [1.0, 3.0, 4.0])
def test_no_plan_that_meets_the_bound_costs_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: float) -> None:
    """A net of six sites: every choice of ways that costs less than what the search found is measured, and misses."""
    model, rng = onnx.parser.parse_model(NET), np.random.default_rng(1)
    for layer, shape in enumerate([(8, 16), (16, 24), (24, 6)]):
        value = rng.normal(size=shape) * np.exp(rng.normal(size=shape[-1])) / np.sqrt(shape[0])
        model.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), f"w{layer}"))
    onnx.save(model, tmp_path / "net.onnx")
    x = rng.normal(size=(100, 8)) * np.exp(rng.normal(size=(100, 1)))
    np.savez(tmp_path / "data.npz", x=x.astype(np.float32))
    plain = gq.insert(tmp_path / "net.onnx", data=str(tmp_path / "data.npz"), min_sqnr=0.1).search
    least = plain.search_validation.comparison.sqnr
    cheaper_met: list[bool] = []

    def every(groups: Any, costs: Any, measure: Any, **options: Any) -> Any:
        result = search_cheapest_plan(groups, costs, measure, **options)
        if groups:
            assert sum(len(group.sites) for group in groups) == 6
            choices = product(*(range(len(group.candidates)) for group in groups))
            less = [
                candidates
                for candidates in choices
                if selection_cost(groups, candidates, costs) < selection_cost(groups, result.selection, costs)
            ]
            cheaper_met.extend(measure(candidates).met for candidates in less)
        return result

    monkeypatch.setattr("graphquant.optimize.search.search_cheapest_plan", every)
    result = gq.insert(tmp_path / "net.onnx", data=str(tmp_path / "data.npz"), min_sqnr=least + more)
    assert result.search.status in {"met", "met-not-proven"}
    assert 0 < result.search.cost < 1
    assert cheaper_met
    assert not any(cheaper_met)

"""Searches, timings and budgets of models that others were not made for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx.parser
import pytest

import graphquant as gq
from graphquant.analysis.validation import NO_SQNR
from graphquant.errors import ModelError, UsageError
from graphquant.formats import onnx as onnx_format
from graphquant.optimize import candidates, latency
from graphquant.optimize.candidates import byte_costs, make_scale_groups

if TYPE_CHECKING:
    from pathlib import Path

HEAD = '<ir_version: 9, opset_import: ["": 17]>\n'


@pytest.fixture
def uneven(tmp_path: Path) -> tuple[Path, str]:
    """Two convolutions whose channels differ by orders of magnitude, and data."""
    rng = np.random.default_rng(0)
    scale = (10.0 ** rng.uniform(-2, 2, 16)).astype(np.float32)
    weights = {
        "w1": rng.normal(size=(16, 3, 3, 3)) * scale[:, None, None, None],
        "b1": rng.normal(size=16) * scale,
        "w2": rng.normal(size=(8, 16, 3, 3)) / scale[None, :, None, None],
    }
    text = (
        HEAD + "g (float[1, 3, 8, 8] x) => (float[1, 8, 4, 4] z) { y = Conv (x, w1, b1) r = Relu (y) z = Conv (r, w2) }"
    )
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()
    )
    onnx.save(model, tmp_path / "uneven.onnx")
    np.savez(tmp_path / "uneven.npz", x=rng.normal(size=(80, 3, 8, 8)).astype(np.float32))
    return tmp_path / "uneven.onnx", str(tmp_path / "uneven.npz")


@pytest.mark.slow
def test_sensitivity_of_scaled_weights(uneven: tuple[Path, str]) -> None:
    """If channels were scaled first, the error of a weight is its rounding, not its scale."""
    model, data = uneven
    result = gq.insert(model, data=data, algorithms=("smoothquant",), min_sqnr=41.0, allow_empty=True)
    assert "smoothquant" in [entry.algorithm for entry in result.algorithm_results if entry.applied]
    assert result.search is not None
    assert result.search.float_tensors
    assert all(sensitivity is None or sensitivity > 20 for sensitivity in result.search.float_tensors.values())


def test_a_budget_that_is_interrupted_decides_nothing(
    uneven: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without knowing what all weights add, none gets fewer bits."""
    model, data = uneven
    measure_sensitivity = candidates.measure_sensitivity

    def stopped(*given: Any, **more: Any) -> Any:
        def progress(_done: int, _total: int) -> None:
            raise KeyboardInterrupt

        return measure_sensitivity(*given, **{**more, "progress": progress})

    monkeypatch.setattr(candidates, "measure_sensitivity", stopped)
    with pytest.raises(KeyboardInterrupt):
        gq.insert(model, data=data, size_budget="30%")


def test_a_runtime_that_tells_no_op_s_time(uneven: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound is searched for with multiply-adds as the cost then."""
    model, data = uneven
    monkeypatch.setattr(onnx_format, "profile_ops", lambda *_: None)
    monkeypatch.setattr(latency, "TIMING_SECONDS", 0.01)
    result = gq.insert(model, data=data, optimize="latency", min_sqnr=41.0, allow_empty=True)
    assert result.search is not None
    assert result.search.runtime
    assert result.search.search_validation is not None


def test_no_products_to_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without them is timed like any other."""
    text = (
        HEAD + "g (float[1, 3, 8, 8] a, float[1, 3, 8, 8] b) => (float[1, 3, 8, 8] z) { y = Add (a, b) z = Relu (y) }"
    )
    onnx.save(onnx.parser.parse_model(text), tmp_path / "sum.onnx")
    values = np.random.default_rng(0).normal(size=(16, 3, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "sum.npz", a=values, b=values)
    monkeypatch.setattr(latency, "TIMING_SECONDS", 0.01)
    result = gq.insert(
        tmp_path / "sum.onnx", data=str(tmp_path / "sum.npz"), allow_empty=True, optimize="latency", min_sqnr=30.0
    )
    assert result.search is not None
    assert result.search.runtime


def test_a_bound_that_nothing_can_be_held_to(tmp_path: Path) -> None:
    """Without a float output, a bound on SQNR is an error, and the default bound requires nothing."""
    text = HEAD + "g (float[1, 3, 8, 8] x) => (int64[1, 1, 6, 6] z) { y = Conv (x, w) z = ArgMax <axis = 1> (y) }"
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(4, 3, 3, 3)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, tmp_path / "top.onnx")
    np.savez(tmp_path / "top.npz", x=rng.normal(size=(16, 3, 8, 8)).astype(np.float32))
    options = {"data": str(tmp_path / "top.npz")}
    usual = gq.insert(tmp_path / "top.onnx", **options).validation
    assert usual is not None
    assert usual.failures == ()
    with pytest.raises(UsageError, match=NO_SQNR):
        gq.insert(tmp_path / "top.onnx", **options, min_sqnr=80.0)


@pytest.mark.parametrize("place", ["0", "99", "-1", "abc"])
def test_a_file_cannot_ask_for_another_weight(tmp_path: Path, place: str) -> None:
    """A model in memory may have contents that no file can have. For ONNX Runtime that is an error."""
    text = HEAD + "g (float[1, 3, 8, 8] x) => (float[1, 64, 6, 6] y) { y = Conv (x, w) }"
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(64, 3, 3, 3)).astype(np.float32)
    tensor = model.graph.initializer.add(name="w", data_type=1, dims=weight.shape, data_location=1)
    tensor.external_data.add(key="graphquant.later", value=place)
    tensor.external_data.add(key="location", value="d.bin")
    (tmp_path / "d.bin").write_bytes(weight.tobytes())
    onnx.save(model, tmp_path / "odd.onnx")
    np.savez(tmp_path / "odd.npz", x=rng.normal(size=(16, 3, 8, 8)).astype(np.float32))
    with pytest.raises(ModelError, match=r"onnxruntime rejects .*model"):
        gq.insert(tmp_path / "odd.onnx", data=str(tmp_path / "odd.npz"))


def test_copies_of_functions_that_nothing_calls_cost_nothing(model_folder: Path) -> None:
    """A Keras SavedModel has its layers several times; sites of all are one group, whose ops are those that run."""
    model = gq.load(model_folder / "kws/saved_model")
    plan = gq.plan(model)
    among = make_scale_groups(model, plan, range(len(plan.sites)), {})
    idle = {site.tensor.graph for site in plan.sites} - set(model.reachable_graphs())
    assert idle
    assert {op for group in among for op in group.ops} <= byte_costs(model).keys()

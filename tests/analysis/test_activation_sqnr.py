"""SQNR of each quantized activation, and the warning for the lowest."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.cli import run_cli

import graphquant as gq
from graphquant.numerics import QParams, dequantize, parse_type, quantize
from graphquant.observers import estimate_cost, least_sqnr, sketch_values

TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[1000] x) => (float[1000] y, float[1000] z) { a = Tanh(x) c = Reshape(a, shape) y = Neg(c)
  b = Exp(x) z = Neg(b) }
"""
RULES = """
[scheme.some]
zero = "asymmetric"
observe = "OBSERVER"
[[rule]]
name = "tied"
producer = { kind = "reshape" }
quantize = "same-as-input"
[[rule]]
name = "quantized"
producer = { kind = "tanh|exp" }
quantize = "some"
"""


@pytest.fixture(params=["auto", "minmax"])
def observer_in_rules(request, tmp_path, monkeypatch):
    """A folder with a model, rules that quantize two tensors in it, one of them badly, and data."""
    monkeypatch.chdir(tmp_path)
    message = onnx.parser.parse_model(TEXT)
    message.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1000]), "shape"))
    onnx.save(message, "model.onnx")
    Path("rules.toml").write_text(RULES.replace("OBSERVER", request.param))
    np.savez("data.npz", x=np.random.default_rng(0).normal(scale=3, size=(20, 1000)).astype(np.float32))
    return request.param


def test_lowest_sqnr_comes_first(observer_in_rules):
    """The estimate is the SQNR over all values; activations with a shared scale are omitted."""
    result = gq.insert("model.onnx", rules="rules.toml", data="data.npz", validate=False)
    assert [str(insertion.site.tensor) for insertion in result.inserted] == ["a:0", "c:0", "b:0"]
    if observer_in_rules == "minmax":  # which keeps no histograms to estimate from
        assert result.activation_sqnr == ()
        return
    x = np.load("data.npz")["x"].astype(np.float64)
    params = {insertion.site.tensor.op: insertion.params for insertion in result.inserted}
    expected = {}
    for name, activation in (("a", np.tanh(x)), ("b", np.exp(x))):
        values = activation.astype(np.float32)
        error = dequantize(quantize(values, params[name]), params[name]).astype(np.float64) - values
        expected[name] = 10 * np.log10(np.mean(np.square(values, dtype=np.float64)) / np.mean(error**2))
    assert expected["b"] < 30 < expected["a"]
    assert [loss.tensor.op for loss in result.activation_sqnr] == ["b", "a"]
    assert [loss.sqnr for loss in result.activation_sqnr] == pytest.approx([expected["b"], expected["a"]], abs=0.3)


def test_low_sqnr_is_reported(observer_in_rules):
    """The report lists all activations; the terminal warns of the worst one if it is low, with a remedy."""
    arguments = ["insert", "model.onnx", "--rules", "rules.toml", "--data", "data.npz", "--report", "report.json"]
    ran = run_cli(*arguments)
    reported = json.loads(Path("report.json").read_text())["activation_sqnr"]
    if observer_in_rules == "minmax":
        assert reported == []
        assert "warning: b:0" not in ran.stdout
        return
    assert [loss["tensor"]["op"] for loss in reported] == ["b", "a"]
    assert "warning: b:0 " in ran.stdout
    assert f"{reported[0]['sqnr']:.1f}" in ran.stdout
    assert "--exclude b" in ran.stdout
    again = run_cli(*arguments, "--exclude", "b", "--force")
    assert "warning: b:0" not in again.stdout


def test_bound_of_sqnr():
    """The bound is below the estimate for any scale and zero point, and close to it without clipping."""
    rng = np.random.default_rng(3)
    for scale in (0.001, 0.02, 0.03, 0.5):
        for zero_point in (-100, 0, 60):
            sketch = sketch_values(rng.normal(size=500).astype(np.float32), bits=7)
            params = QParams(scale=np.float32(scale), zero_point=np.int32(zero_point), type=parse_type("int8"))
            cost = estimate_cost(sketch, params)
            bound = least_sqnr(sketch, params)
            assert bound <= cost.sqnr
            if (scale, zero_point) == (0.03, 0):
                assert cost.clipped == 0
                assert cost.sqnr - bound < 6


def test_bound_of_sqnr_with_a_huge_range():
    """Statistics of a damaged file may have ranges whose square is no number."""
    sketch = replace(sketch_values(np.ones(4, np.float32), bits=7), low=np.float64(-1e300))
    params = QParams(scale=np.float32(0.1), zero_point=np.int32(0), type=parse_type("int8"))
    assert least_sqnr(sketch, params) == pytest.approx(-6000, abs=1)

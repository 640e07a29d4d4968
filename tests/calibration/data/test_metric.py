"""The user's metric: scores of both models, as a bound and in reports; failing functions."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from support.cli import invoke_cli

import graphquant as gq
from graphquant.analysis.compare import MetricTally
from graphquant.analysis.validation import Bounds
from graphquant.calibration.data.function import Metric, load_metric
from graphquant.errors import DataError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

TEXT = """
    <ir_version: 8, opset_import: ["": 17]> g (float[N, 8] x) => (float[N, 4] y) { y = MatMul (x, w) }
"""
RUINED = """
[scheme.two]
bits = 8
observe = { name = "fixed-point", exponent = 1 }
[[rule]]
name = "coarse"
producer = { name = "x" }
consumer = { kind = "matmul" }
quantize = "two"
"""
CODE = """
def negative_error(outputs, labels):
    assert list(outputs) == ["y"] and list(labels) == ["target", "words"], (outputs, labels)
    assert outputs["y"].shape == labels["target"].shape and labels["words"].dtype.kind == "U"
    return -abs(outputs["y"] - labels["target"]).mean()

def bad(outputs, labels):
    return labels["nothing"]

def text(outputs, labels):
    return "no number"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A matrix product, data of 20 samples with float targets and words, and a module with metrics."""
    rng = np.random.default_rng(0)
    model, weight = onnx.parser.parse_model(TEXT), rng.normal(size=(8, 4)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, tmp_path / "net.onnx")
    x = rng.normal(size=(20, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, target=x @ weight, words=np.array(["a"] * 20))
    (tmp_path / "scores.py").write_text(CODE)
    (tmp_path / "ruined.toml").write_text(RUINED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "scores", raising=False)
    return tmp_path


def test_scores_of_validation_and_comparison(folder: Path) -> None:
    """The float model has no error and the quantized one has some, by name or as a callable; all labels are passed."""
    calls = []

    def score(outputs: Any, labels: Any) -> float:
        calls.append((outputs["y"].shape, sorted(labels)))
        return -float(np.abs(outputs["y"] - labels["target"]).mean())

    named = gq.insert("net.onnx", data="data.npz", metric="scores:negative_error")
    metric = named.validation.comparison.metric
    assert (metric.name, metric.scores[0]) == ("scores:negative_error", pytest.approx(0, abs=1e-6))
    assert -0.1 < metric.scores[1] < -1e-4
    assert metric.drop_upper_bound == np.inf
    called = gq.insert("net.onnx", data="data.npz", metric=score).validation.comparison.metric
    assert called.scores == pytest.approx(metric.scores, rel=1e-5)
    assert {names for _, *names in ((shape, *keys) for shape, keys in calls) for names in names} == {"target", "words"}
    path = named.save("quant.onnx")
    compared = gq.compare("net.onnx", path, "data.npz", metric=score)
    assert compared.metric.drop == pytest.approx(metric.drop, rel=0.5)
    assert gq.compare("net.onnx", path, "data.npz").metric is None


def test_bound_of_the_metric(folder: Path) -> None:
    """A missed bound fails; a search meets it with float tensors. Reports have the scores."""
    call = (
        "insert",
        "net.onnx",
        "--data",
        "data.npz",
        "--metric",
        "scores:negative_error",
        "--rules",
        "ruined.toml",
        "--min-sqnr",
        "none",
    )
    report = ("--report", "report.json", "--dry-run")
    assert (first := invoke_cli(*call, *report)).exit_code == 0, first.stderr
    metric = json.loads((folder / "report.json").read_text())["validation"]["comparison"]["metric"]
    assert metric["name"] == "scores:negative_error"
    assert metric["drop"] == pytest.approx(metric["scores"]["float"] - metric["scores"]["quantized"])
    assert metric["drop"] > 0.5
    searched = invoke_cli(*call, *report, "--max-metric-drop", "0.1", "--allow-empty")
    assert searched.exit_code == 0, searched.stderr
    result = json.loads((folder / "report.json").read_text())
    assert result["search"]["float_tensors"]
    validation = gq.insert(
        "net.onnx", data="data.npz", metric="scores:negative_error", rules="ruined.toml", min_sqnr="none"
    ).validation
    assert len(with_bound(validation, 0.1).failures) == 1
    assert with_bound(validation, 10).failures == ()
    assert (
        invoke_cli(
            "insert", "net.onnx", "--data", "data.npz", "-o", "q.onnx", "--rules", "ruined.toml", "--min-sqnr", "none"
        ).exit_code
        == 0
    )
    compare = ("compare", "net.onnx", "q.onnx", "--data", "data.npz", "--metric", "scores:negative_error")
    assert invoke_cli(*compare, "--max-metric-drop", "10").exit_code == 0
    assert invoke_cli(*compare, "--max-metric-drop", "0.1").exit_code == 1
    assert invoke_cli(*compare[:-2], "--max-metric-drop", "0.1").exit_code == 2


def with_bound(validation: Any, drop: float) -> Any:
    """Return the validation with a bound on the metric."""
    return replace(validation, bounds=Bounds(max_metric_drop=drop))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--metric", "scores:bad"), "scores.py:8"),
        (("--metric", "scores:text"), "no number"),
        (("--metric", "scores:missing"), "'missing'"),
        (("--metric", "broken:score"), "broken.py:2"),
        (("--metric", "scores"), "module:function"),
        (("--max-metric-drop", "1"), "metric"),
        (("--max-metric-drop", "-1", "--metric", "scores:text"), "max-metric-drop"),
    ],
)
def test_errors_of_the_function(folder: Path, options: tuple[str, ...], line: str) -> None:
    """Errors of the user's function name its file and line. Nothing is written, and the exit code is 2."""
    (folder / "broken.py").write_text("x = 1\nraise RuntimeError('no luck')\n")
    result = invoke_cli("insert", "net.onnx", "--data", "data.npz", "-o", "q.onnx", *options)
    assert (result.exit_code, line in result.stderr) == (2, True), result.stderr
    assert not (folder / "q.onnx").exists()


@pytest.mark.usefixtures("folder")
def test_metric_without_validation() -> None:
    """A metric needs data and the validation."""
    for options in ({"data": None}, {"data": "data.npz", "validate": False}):
        with pytest.raises(UsageError, match="validation"):
            gq.insert("net.onnx", metric="scores:negative_error", **options)
    with pytest.raises(UsageError, match="function"):
        load_metric(3)


def test_mean_over_samples() -> None:
    """Batches count by their samples; the bound of the drop holds for all of them, and outputs are matched by name."""
    tally = MetricTally(Metric("m", lambda outputs, labels: outputs["y"].mean()), ["x"], {"y": "z"})
    assert tally.figures() is None
    for rows, before, after in ((3, 1.0, 0.0), (1, 5.0, 5.0)):
        values = {"x": np.zeros((rows, 2)), "label": np.zeros(rows)}
        tally.add(values, {"y": np.full(rows, before)}, {"z": np.full(rows, after)})
    figures = tally.figures()
    assert (figures.scores, figures.drop, figures.drop_upper_bound) == ((2.0, 1.25), 0.75, np.inf)
    for _ in range(20):
        tally.add({"x": np.zeros((1, 2))}, {"y": np.ones(1)}, {"z": np.full(1, 0.9)})
    figures = tally.figures()
    assert figures.drop < figures.drop_upper_bound < np.inf


def test_metric_that_is_not_finite() -> None:
    """NaN is no score."""
    with pytest.raises(DataError, match="nan"):
        Metric("m", lambda outputs, labels: float("nan")).score({}, {})

"""Gates against measured metrics."""

from types import SimpleNamespace

import pytest

from graphquant.analysis.comparison import Comparison, OutputFigures
from graphquant.analysis.validation import Bounds, Validation
from graphquant.batch.types import BatchFinding, Gates, Outcome, OutcomeMetrics
from graphquant.batch.work import gate_misses, outcome_metrics

METRICS = OutcomeMetrics(sqnr=30.0, agreement=0.975, accuracy=(0.97, 0.95), metric=(7.5, 7.0), samples=40)


def missed_gates(gates, metrics=METRICS, **fields):
    """Return the missed gates with their messages."""
    fields = {"size_after": 1000, "quantized_share": 0.9, **fields}
    outcome = Outcome(name="net", model="net.onnx", output="out.onnx", status="done", metrics=metrics, **fields)
    return {miss.gate: miss.message for miss in gate_misses(gates, outcome)}


@pytest.mark.parametrize(
    ("met", "missed", "numbers"),
    [
        ({"min_sqnr": 30.0}, {"min_sqnr": 30.01}, ("30.00 dB", "30.01")),
        ({"min_agreement": 0.975}, {"min_agreement": 0.98}, ("97.50%", "98%")),
        ({"max_accuracy_drop": 0.02}, {"max_accuracy_drop": 0.019}, ("97.00%", "95.00%", "1.90%")),
        ({"max_metric_drop": 0.5}, {"max_metric_drop": 0.4}, ("7.5", "7", "0.4")),
        ({"min_quantized": 0.9}, {"min_quantized": 0.91}, ("90.00%", "91%")),
        ({"max_size": 1000}, {"max_size": 999}, ("1000", "999")),
    ],
)
def test_each_gate(met, missed, numbers):
    """A value at the bound passes. A value beyond it is a miss, and the message has both numbers."""
    assert missed_gates(Gates(**met)) == {}
    ((gate, message),) = missed_gates(Gates(**missed)).items()
    assert gate == next(iter(missed))
    assert all(number in message for number in numbers)


def test_nearly_all_is_not_all():
    """99.96% and 99.9996% miss a bound of 100%, with the agreement that the comparison of the models has."""
    for share in (0.9996, 0.999996):
        outputs = [
            OutputFigures(
                name=name,
                quantized_name=name,
                sqnr=None,
                cosine=None,
                max_error=1.0,
                agreement=agreement,
                rows=2500,
                values=2500,
                accuracy=(0.5, 0.5),
                problem="",
                agreement_lower_bound=share if name == "c" else agreement,
            )
            for name, agreement in (("a", 1.0), ("b", share), ("c", 1.0))
        ]
        comparison = Comparison(samples=1, random=False, outputs=tuple(outputs), sites=(), labels="")
        validation = Validation(comparison=comparison, reuses_samples=False, bounds=Bounds(min_agreement=1.0))
        assert len(validation.failures) == 1
        assert len(validation.caveats) == 2
        metrics = outcome_metrics(SimpleNamespace(inserted=(None,), validation=validation))
        assert metrics.agreement == share
        missed = missed_gates(Gates(min_agreement=1, min_quantized=1), metrics, quantized_share=share)
        assert missed.keys() == {"min_agreement", "min_quantized"}


def test_unproven_bounds_miss_the_strict_gate():
    """A bound that is met but not proven is a miss with `strict` alone, and so is a model that was not compared."""
    metrics = OutcomeMetrics(sqnr=30.0)
    gates = Gates(min_sqnr=30.0, strict=True)
    assert missed_gates(gates, metrics, strict_failure="too few samples") == {"strict": "too few samples"}
    assert missed_gates(gates, metrics) == {}
    assert missed_gates(Gates(min_sqnr=30.0), metrics, strict_failure="too few samples") == {}
    assert missed_gates(Gates(strict=True), None).keys() == {"strict"}


def test_findings_miss_the_check_gate():
    """Findings are a miss if the gates include a check."""
    findings = (BatchFinding(code="GQ101", level="warning", graph="", op="a", message="x", fix="y"),) * 2
    (message,) = missed_gates(Gates(check="onnxruntime"), findings=findings).values()
    assert message.count("GQ101") == 1
    assert missed_gates(Gates(), findings=findings) == {}


def test_unmeasured_gates_are_missed():
    """A bound that cannot be measured is a miss, with the reason."""
    gates = Gates(min_sqnr=1, min_agreement=1, max_accuracy_drop=1, max_metric_drop=1)
    names = {"min_sqnr", "min_agreement", "max_accuracy_drop", "max_metric_drop"}
    assert missed_gates(gates, None).keys() == names
    assert missed_gates(gates, OutcomeMetrics(problem="it is broken")) == dict.fromkeys(names, "it is broken")
    assert missed_gates(gates, OutcomeMetrics()).keys() == names
    assert missed_gates(Gates(min_quantized=0.0), quantized_share=None).keys() == {"min_quantized"}
    assert missed_gates(Gates(), None) == {}


def test_exact_model_meets_every_gate():
    """An exact model meets every bound."""
    assert missed_gates(Gates(min_sqnr=500, min_agreement=1, max_accuracy_drop=0), OutcomeMetrics(exact=True)) == {}

"""Gates against measured metrics."""

import pytest

from graphquant.batch.types import BatchFinding, Gates, Outcome, OutcomeMetrics
from graphquant.batch.work import gate_misses

METRICS = OutcomeMetrics(sqnr=30.0, agreement=0.975, accuracy=(0.97, 0.95), samples=40)


def missed_gates(gates, metrics=METRICS, **fields):
    """Return the missed gates with their messages."""
    fields = {"size_after": 1000, "quantized_share": 0.9, **fields}
    outcome = Outcome(name="net", model="net.onnx", output="out.onnx", status="done", metrics=metrics, **fields)
    return {miss.gate: miss.message for miss in gate_misses(gates, outcome)}


@pytest.mark.parametrize(
    ("met", "missed", "numbers"),
    [
        ({"min_sqnr": 30.0}, {"min_sqnr": 30.01}, ("30.00 dB", "30.01")),
        ({"min_agreement": 0.975}, {"min_agreement": 0.98}, ("97.50%", "98.00%")),
        ({"max_accuracy_drop": 0.02}, {"max_accuracy_drop": 0.019}, ("97.00%", "95.00%", "1.90%")),
        ({"min_quantized": 0.9}, {"min_quantized": 0.91}, ("90.00%", "91.00%")),
        ({"max_size": 1000}, {"max_size": 999}, ("1000", "999")),
    ],
)
def test_each_gate(met, missed, numbers):
    """A value at the bound passes. A value beyond it is a miss, and the message has both numbers."""
    assert missed_gates(Gates(**met)) == {}
    ((gate, message),) = missed_gates(Gates(**missed)).items()
    assert gate == next(iter(missed))
    assert all(number in message for number in numbers)


def test_findings_miss_the_check_gate():
    """Findings are a miss if the gates include a check."""
    findings = (BatchFinding(code="GQ101", level="warning", graph="", op="a", message="x", fix="y"),) * 2
    (message,) = missed_gates(Gates(check="onnxruntime"), findings=findings).values()
    assert message.count("GQ101") == 1
    assert missed_gates(Gates(), findings=findings) == {}


def test_unmeasured_gates_are_missed():
    """A bound that cannot be measured is a miss, with the reason."""
    gates = Gates(min_sqnr=1, min_agreement=1, max_accuracy_drop=1)
    names = {"min_sqnr", "min_agreement", "max_accuracy_drop"}
    assert missed_gates(gates, None).keys() == names
    assert missed_gates(gates, OutcomeMetrics(problem="it is broken")) == dict.fromkeys(names, "it is broken")
    assert missed_gates(gates, OutcomeMetrics()).keys() == names
    assert missed_gates(Gates(min_quantized=0.0), quantized_share=None).keys() == {"min_quantized"}
    assert missed_gates(Gates(), None) == {}


def test_exact_model_meets_every_gate():
    """An exact model meets every bound."""
    assert missed_gates(Gates(min_sqnr=500, min_agreement=1, max_accuracy_drop=0), OutcomeMetrics(exact=True)) == {}

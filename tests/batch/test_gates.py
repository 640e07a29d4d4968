"""Bounds held against what was measured."""

import pytest

from graphquant.batch.types import BatchFinding, Gates, OutcomeMetrics
from graphquant.batch.work import gate_misses

FIGURES = OutcomeMetrics(sqnr=30.0, agreement=0.975, accuracy=(0.97, 0.95), samples=40)


def told(gates, metrics=FIGURES, size=1000, findings=()):
    """What does not hold, by gate."""
    return {miss.gate: miss.message for miss in gate_misses(gates, figures, size, findings)}


@pytest.mark.parametrize(
    ("fine", "missed", "says"),
    [
        ({"min_sqnr": 30.0}, {"min_sqnr": 30.01}, "the worst output has 30.00 dB and needs 30.01"),
        ({"min_agreement": 97.5}, {"min_agreement": 98}, "97.50% agree and 98% must"),
        (
            {"max_accuracy_drop": 2.0},
            {"max_accuracy_drop": 1.9},
            "accuracy fell from 97.00% to 95.00%, by more than 1.9",
        ),
        ({"max_size": 1000}, {"max_size": 999}, "the output has 1000 bytes, and the limit is 999"),
    ],
)
def test_each_bound(fine, missed, says):
    """What is just met holds, what is just missed is told with both numbers."""
    assert told(Gates(**fine)) == {}
    assert told(Gates(**missed)) == {next(iter(missed)): says}


def test_lint_findings():
    """Any finding is a miss where a check is asked for, and none where it is not."""
    found = (BatchFinding(code="GQ101", level="warning", graph="", op="a", message="x", fix="y"),) * 2
    assert told(Gates(check="onnxruntime"), findings=found) == {"check": "the check found GQ101"}
    assert told(Gates(), findings=found) == {}


def test_bounds_without_data():
    """A bound that cannot be measured does not hold, with the reason."""
    every = Gates(min_sqnr=1, min_agreement=1, max_accuracy_drop=1)
    names = {"min_sqnr", "min_agreement", "max_accuracy_drop"}
    assert told(every, None) == dict.fromkeys(names, "there is no data to measure it")
    assert told(every, OutcomeMetrics(problem="it is broken")) == dict.fromkeys(names, "it is broken")
    assert told(every, OutcomeMetrics()) == {
        "min_sqnr": "no differing output has floats",
        "min_agreement": "no output has class scores or integers",
        "max_accuracy_drop": "the data has no labels for an output",
    }
    assert told(Gates(), None) == {}


def test_an_exact_model():
    """It keeps any bound."""
    assert told(Gates(min_sqnr=500, min_agreement=100, max_accuracy_drop=0), OutcomeMetrics(exact=True)) == {}

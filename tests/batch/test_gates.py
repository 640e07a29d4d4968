"""Bounds held against what was measured."""

import pytest

from graphquant.batch.gates import misses
from graphquant.batch.types import Figures, Found, Gates

FIGURES = Figures(sqnr=30.0, agreement=0.975, accuracy=(0.97, 0.95), samples=40)


def told(gates, figures=FIGURES, size=1000, findings=()):
    """What does not hold, by gate."""
    return {miss.gate: miss.says for miss in misses(gates, figures, size, findings)}


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
        ({"max_size": 1000}, {"max_size": 999}, "the output has 1000 bytes and may have 999"),
    ],
)
def test_each_bound(fine, missed, says):
    """What is just met holds, what is just missed is told with both numbers."""
    assert told(Gates(**fine)) == {}
    assert told(Gates(**missed)) == {next(iter(missed)): says}


def test_what_the_check_found():
    """Any finding is a miss where a check is asked for, and none where it is not."""
    found = (Found(code="GQ101", level="warning", graph="", op="a", says="x", fix="y"),) * 2
    assert told(Gates(check="onnxruntime"), findings=found) == {"check": "the check found GQ101"}
    assert told(Gates(), findings=found) == {}


def test_where_there_is_nothing_to_hold_a_bound_against():
    """A bound that cannot be measured does not hold, with the reason."""
    every = Gates(min_sqnr=1, min_agreement=1, max_accuracy_drop=1)
    names = {"min_sqnr", "min_agreement", "max_accuracy_drop"}
    assert told(every, None) == dict.fromkeys(names, "there is no data to measure it on")
    assert told(every, Figures(problem="it is broken")) == dict.fromkeys(names, "it is broken")
    assert told(every, Figures()) == {
        "min_sqnr": "no output that differs holds floats",
        "min_agreement": "no output holds class scores or integers",
        "max_accuracy_drop": "the data has no labels that an output can be held against",
    }
    assert told(Gates(), None) == {}


def test_a_model_that_nothing_differs_in():
    """It keeps any bound."""
    assert told(Gates(min_sqnr=500, min_agreement=100, max_accuracy_drop=0), Figures(exact=True)) == {}

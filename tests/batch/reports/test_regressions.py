"""Regressions against an earlier report."""

import re
from dataclasses import replace

import pytest

from graphquant.batch.reports import compare_reports, has_regressions
from graphquant.batch.types import BatchReport, Outcome, OutcomeMetrics, Problem

VALUES = re.compile(r"\d[\d.]*|exact|unknown|not known|done|failed|gate missed|timed out|NaN")


def make_outcome(name="net", **fields):
    """Return a successful outcome with changed fields."""
    defaults = {
        "model": f"{name}.onnx",
        "output": f"{name}.quant.onnx",
        "status": "done",
        "size_before": 40_000,
        "size_after": 10_000,
        "int8_ops": (9, 10),
        "metrics": OutcomeMetrics(sqnr=40.0, samples=8),
        "seconds": 2.0,
    }
    return Outcome(name=name, **{**defaults, **fields})


def compare_outcomes(before, after, **options):
    """Return kind, level, and the numbers and statuses in the message, of each change between two outcomes."""
    old = BatchReport(version="1", outcomes=(before,) if before else ())
    new = BatchReport(version="1", outcomes=(after,) if after else ())
    changes = compare_reports(new, old, **options).changes
    return [(change.kind, change.level, *VALUES.findall(change.message)) for change in changes]


FAILED = make_outcome(
    status="failed", problem=Problem(kind="ModelError", message="no"), size_after=None, metrics=None, int8_ops=None
)


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({}, []),
        ({"status": "unchanged"}, []),
        ({"metrics": OutcomeMetrics(sqnr=39.6)}, []),
        ({"metrics": OutcomeMetrics(sqnr=39.4)}, [("sqnr", "warning", "39.4", "40.0")]),
        ({"metrics": OutcomeMetrics(sqnr=45.0)}, []),
        ({"metrics": OutcomeMetrics(exact=True)}, []),
        ({"metrics": None}, [("not-measured", "warning")]),
        ({"metrics": OutcomeMetrics(problem="NaN", samples=8)}, [("not-measured", "warning", "NaN")]),
        ({"size_after": 10_100}, []),
        ({"size_after": 10_101}, [("size", "warning", "10.1", "10")]),
        ({"size_after": 9_000}, []),
        ({"int8_ops": (8, 10)}, [("int8", "warning", "80", "90")]),
        ({"int8_ops": (10, 10)}, []),
        ({"int8_ops": None}, []),
        ({"seconds": 3.0}, []),
        ({"seconds": 3.1}, [("seconds", "note", "3.1", "2.0")]),
        ({"status": "unchanged", "seconds": 9.0}, []),
        ({"status": "gate"}, [("status", "warning", "gate missed", "done")]),
        ({"status": "timeout"}, [("status", "warning", "timed out", "done")]),
    ],
)
def test_reported_changes(fields, changes):
    """A figure that gets worse by more than its step is a regression. More time is only a note."""
    assert compare_outcomes(make_outcome(), make_outcome(**fields)) == changes


def test_previously_exact_outputs():
    """Any error of a previously exact output is a regression, whatever the step."""
    assert compare_outcomes(make_outcome(metrics=OutcomeMetrics(exact=True)), make_outcome(), sqnr_step=100.0) == [
        ("sqnr", "warning", "40.0", "exact")
    ]


@pytest.mark.parametrize(
    ("metrics", "changes"),
    [
        (OutcomeMetrics(agreement=0.991, accuracy=(0.98, 0.97), samples=1000), []),
        (
            OutcomeMetrics(agreement=0.3, accuracy=(0.98, 0.3), samples=1000),
            [
                ("agreement", "warning", "30.0", "100.0"),
                ("accuracy", "warning", "30.0", "98.0"),
            ],
        ),
        (OutcomeMetrics(agreement=0.9, accuracy=(0.98, 0.88), samples=10), []),
        (OutcomeMetrics(exact=True, samples=1000), [("accuracy", "warning", "not known", "98.0")]),
        (
            OutcomeMetrics(accuracy=(0.98, 0.98), samples=1000),
            [("agreement", "warning", "not known", "100.0")],
        ),
    ],
)
def test_shares_of_samples(metrics, changes):
    """Agreement and accuracy may fall by one percent or one sample. A missing figure is a regression."""
    before = make_outcome(metrics=OutcomeMetrics(agreement=1.0, accuracy=(0.98, 0.98), samples=1000))
    assert compare_outcomes(before, make_outcome(metrics=metrics)) == changes


def test_previously_exact_shares():
    """Lower agreement of a previously exact integer output is a regression."""
    changes = [("agreement", "warning", "50.0", "100.0")]
    assert (
        compare_outcomes(
            make_outcome(metrics=OutcomeMetrics(exact=True)),
            make_outcome(metrics=OutcomeMetrics(agreement=0.5, samples=8)),
        )
        == changes
    )


def test_sqnr_step():
    """The caller sets the tolerated loss of SQNR."""
    assert compare_outcomes(make_outcome(), make_outcome(metrics=OutcomeMetrics(sqnr=35.0)), sqnr_step=5.0) == []
    assert len(compare_outcomes(make_outcome(), make_outcome(metrics=OutcomeMetrics(sqnr=39.9)), sqnr_step=0.05)) == 1


def test_failing_models():
    """A new failure is a regression, a repeated one is not, and a fixed one is a note."""
    assert [change[:2] for change in compare_outcomes(make_outcome(), FAILED)] == [("status", "warning")]
    assert compare_outcomes(FAILED, FAILED) == []
    assert compare_outcomes(FAILED, make_outcome()) == [("status", "note", "done", "failed")]


def test_added_and_missing_models():
    """A missing model is a regression. New models and models of other shards are not."""
    assert compare_outcomes(None, make_outcome()) == []
    assert compare_outcomes(make_outcome(), None) == [("missing", "warning")]
    assert compare_outcomes(make_outcome(), make_outcome(status="skipped")) == []
    assert compare_outcomes(make_outcome(status="skipped"), make_outcome()) == []


def test_fail_on_regression():
    """With `fail`, regressions are errors. Notes never are."""
    old = BatchReport(version="1", outcomes=(make_outcome("a"), make_outcome("b")))
    new = BatchReport(version="1", outcomes=(make_outcome("a", size_after=20_000), make_outcome("b", seconds=9.0)))
    assert not has_regressions(compare_reports(new, old))
    failing = compare_reports(new, old, fail=True)
    assert has_regressions(failing)
    assert [change.level for change in failing.changes] == ["error", "note"]
    slower = compare_reports(
        replace(new, outcomes=new.outcomes[1:]), replace(old, outcomes=old.outcomes[1:]), fail=True
    )
    assert not has_regressions(slower)

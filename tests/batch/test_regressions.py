"""What counts as a regression against an earlier report."""

from dataclasses import replace

import pytest

from graphquant.batch.regressions import compare_reports, has_regressions
from graphquant.batch.types import BatchReport, Outcome, OutcomeMetrics, Problem


def _outcome(name="net", **changed):
    made = {
        "model": f"{name}.onnx",
        "output": f"{name}.quant.onnx",
        "status": "done",
        "size_before": 40_000,
        "size_after": 10_000,
        "int8_ops": (9, 10),
        "metrics": OutcomeMetrics(sqnr=40.0, samples=8),
        "seconds": 2.0,
    }
    return Outcome(name=name, **{**made, **changed})


def _changes(was, now, **options):
    old = BatchReport(version="1", outcomes=(was,) if was else ())
    new = BatchReport(version="1", outcomes=(now,) if now else ())
    return [(one.kind, one.level, one.message) for one in compare_reports(new, old, **options).changes]


FAILED = _outcome(
    status="failed", problem=Problem(kind="ModelError", message="no"), size_after=None, metrics=None, int8_ops=None
)


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ({}, []),
        ({"status": "unchanged"}, []),
        ({"metrics": OutcomeMetrics(sqnr=39.6)}, []),
        ({"metrics": OutcomeMetrics(sqnr=39.4)}, [("sqnr", "warning", "SQNR is 39.4 dB, and was 40.0 dB")]),
        ({"metrics": OutcomeMetrics(sqnr=45.0)}, []),
        ({"metrics": OutcomeMetrics(exact=True)}, []),
        (
            {"metrics": None},
            [("not-measured", "warning", "the difference from the float model was measured before and is not now")],
        ),
        (
            {"metrics": OutcomeMetrics(problem="values are not finite", samples=8)},
            [("not-measured", "warning", "the output cannot be compared any more: values are not finite")],
        ),
        ({"size_after": 10_100}, []),
        ({"size_after": 10_101}, [("size", "warning", "the output has 10.1 KB, and had 10 KB")]),
        ({"size_after": 9_000}, []),
        ({"int8_ops": (8, 10)}, [("int8", "warning", "80 % of the ops run in low precision, and 90 % did")]),
        ({"int8_ops": (10, 10)}, []),
        ({"int8_ops": None}, []),
        ({"seconds": 3.0}, []),
        ({"seconds": 3.1}, [("seconds", "note", "it took 3.1 s, and took 2.0 s")]),
        ({"status": "unchanged", "seconds": 9.0}, []),
        ({"status": "gate"}, [("status", "warning", "gate missed, and was done")]),
        ({"status": "timeout"}, [("status", "warning", "timed out, and was done")]),
    ],
)
def test_reported_changes(now, told):
    """Each figure by itself: what is worse by more than its step is a regression; slower is only told."""
    assert _changes(_outcome(), _outcome(**now)) == told


def test_previously_exact_outputs():
    """An output that did not differ and now does has lost more than any step."""
    assert _changes(_outcome(metrics=OutcomeMetrics(exact=True)), _outcome(), sqnr_step=100.0) == [
        ("sqnr", "warning", "SQNR is 40.0 dB, and was exact")
    ]


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (OutcomeMetrics(agreement=0.991, accuracy=(0.98, 0.97), samples=1000), []),
        (
            OutcomeMetrics(agreement=0.3, accuracy=(0.98, 0.3), samples=1000),
            [
                ("agreement", "warning", "agreement is 30.0 %, and was 100.0 %"),
                ("accuracy", "warning", "accuracy is 30.0 %, and was 98.0 %"),
            ],
        ),
        (OutcomeMetrics(agreement=0.9, accuracy=(0.98, 0.88), samples=10), []),
        (OutcomeMetrics(exact=True, samples=1000), [("accuracy", "warning", "accuracy is not known, and was 98.0 %")]),
        (
            OutcomeMetrics(accuracy=(0.98, 0.98), samples=1000),
            [("agreement", "warning", "agreement is not known, and was 100.0 %")],
        ),
    ],
)
def test_shares_of_samples(now, told):
    """Agreement and accuracy may fall by a hundredth, or one sample; one that is gone has fallen."""
    was = _outcome(metrics=OutcomeMetrics(agreement=1.0, accuracy=(0.98, 0.98), samples=1000))
    assert _changes(was, _outcome(metrics=now)) == told


def test_previously_exact_shares():
    """Integers that did not differ and now do are told by their agreement."""
    told = [("agreement", "warning", "agreement is 50.0 %, and was 100.0 %")]
    assert (
        _changes(
            _outcome(metrics=OutcomeMetrics(exact=True)), _outcome(metrics=OutcomeMetrics(agreement=0.5, samples=8))
        )
        == told
    )


def test_the_sqnr_step_is_an_option():
    """How much SQNR may go is for the caller to say."""
    assert _changes(_outcome(), _outcome(metrics=OutcomeMetrics(sqnr=35.0)), sqnr_step=5.0) == []
    assert len(_changes(_outcome(), _outcome(metrics=OutcomeMetrics(sqnr=39.9)), sqnr_step=0.05)) == 1


def test_failing_models():
    """A new failure is a regression, an old one is none, and a mended one is told."""
    assert [one[:2] for one in _changes(_outcome(), FAILED)] == [("status", "warning")]
    assert _changes(FAILED, FAILED) == []
    assert _changes(FAILED, _outcome()) == [("status", "note", "done, and was failed")]


def test_added_and_missing_models():
    """A model that is gone is a regression, a new one and one of another shard are none."""
    assert _changes(None, _outcome()) == []
    assert _changes(_outcome(), None) == [("missing", "warning", "the last report has it, and this batch does not")]
    assert _changes(_outcome(), _outcome(status="skipped")) == []
    assert _changes(_outcome(status="skipped"), _outcome()) == []


def test_fail_on_regression():
    """Only then a regression is an error, and what is only told never is."""
    old = BatchReport(version="1", outcomes=(_outcome("a"), _outcome("b")))
    new = BatchReport(version="1", outcomes=(_outcome("a", size_after=20_000), _outcome("b", seconds=9.0)))
    assert not has_regressions(compare_reports(new, old))
    failing = compare_reports(new, old, fail=True)
    assert has_regressions(failing)
    assert [one.level for one in failing.changes] == ["error", "note"]
    slower = compare_reports(
        replace(new, outcomes=new.outcomes[1:]), replace(old, outcomes=old.outcomes[1:]), fail=True
    )
    assert not has_regressions(slower)

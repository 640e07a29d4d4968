"""Changes since an earlier report, and regressions among them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from graphquant.batch.reports.text import bytes_text, duration_text, metrics_sqnr_text, percent_text, status_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.batch.types import BatchReport, ChangeKind, Outcome, OutcomeChange, OutcomeMetrics


SQNR_STEP = 0.5
"""Loss of SQNR in dB that is no regression."""

SHARE_STEP = 0.01
"""Decrease of agreement or accuracy that is a regression; with few samples, it is one sample."""

SIZE_STEP = 0.01
"""Relative growth that is no regression, since outputs contain version strings."""

SLOWDOWN_FACTOR = 1.5
"""Slowdown that is reported, from one second on. It is no regression, because machines differ."""


def compare_reports(
    report: BatchReport, last: BatchReport, *, sqnr_step: float = SQNR_STEP, fail: bool = False
) -> BatchReport:
    """Return `report` with the changes since `last`; regressions fail it only if `fail`.

    Regressions are: a new failure, a loss of more than `sqnr_step` dB, agreement or accuracy lower by 1%, a metric that
    is no longer measured, an output more than 1% larger, a smaller int8 share, and a missing output.
    """
    before = {outcome.name: outcome for outcome in last.outcomes if outcome.status != "skipped"}
    current = [outcome for outcome in report.outcomes if outcome.status != "skipped"]
    changes = [
        change
        for outcome in current
        if outcome.name in before
        for change in _outcome_changes(before[outcome.name], outcome, sqnr_step)
    ]
    names = {change_.name for change_ in report.outcomes}
    changes += [
        _outcome_change(outcome, "missing", "warning", "the last report has it, and this batch does not")
        for outcome in before.values()
        if outcome.name not in names and report.shard[1] == 1  # in a shard's report, another shard may have it
    ]
    if fail:
        changes = [replace(change_, level="error") if change_.level == "warning" else change_ for change_ in changes]
    return replace(report, changes=tuple(changes))


def has_regressions(report: BatchReport) -> bool:
    """Return True if a regression fails the report."""
    return any(change.level == "error" for change in report.changes)


def _outcome_changes(old: Outcome, new: Outcome, sqnr_step: float) -> Iterator[OutcomeChange]:
    if old.passed and not new.passed:
        yield _outcome_change(new, "status", "warning", f"{status_text(new)}, and was {status_text(old)}")
    elif new.passed and not old.passed:
        yield _outcome_change(new, "status", "note", f"{status_text(new)}, and was {status_text(old)}")
    yield from (
        _outcome_change(new, kind, "warning", message) for kind, message in _metric_regressions(old, new, sqnr_step)
    )
    size_after, size_before = new.size_after, old.size_after
    if size_after is not None and size_before is not None and size_after > size_before * (1 + SIZE_STEP):
        yield _outcome_change(
            new, "size", "warning", f"the output has {bytes_text(size_after)}, and had {bytes_text(size_before)}"
        )
    share, share_before = new.int8_share, old.int8_share
    if share is not None and share_before is not None and share < share_before:
        yield _outcome_change(
            new,
            "int8",
            "warning",
            f"{percent_text(share)} of the ops run in low precision, and {percent_text(share_before)} did",
        )
    if new.status == old.status == "done" and new.seconds > max(1.0, SLOWDOWN_FACTOR * old.seconds):
        yield _outcome_change(
            new, "seconds", "note", f"it took {duration_text(new.seconds)}, and took {duration_text(old.seconds)}"
        )


def _metric_regressions(old: Outcome, new: Outcome, sqnr_step: float) -> Iterator[tuple[ChangeKind, str]]:
    """Yield the metrics that decreased or disappeared."""
    metrics_before, metrics_after = old.metrics, new.metrics
    if metrics_before is None or new.size_after is None:
        return
    if metrics_after is None:
        yield "not-measured", "the difference from the float model was measured before and is not now"
        return
    if metrics_after.problem and not metrics_before.problem:
        yield "not-measured", f"the output cannot be compared any more: {metrics_after.problem}"
        return
    if _sqnr_loss(metrics_before, metrics_after) > sqnr_step:
        yield "sqnr", f"SQNR is {metrics_sqnr_text(metrics_after)}, and was {metrics_sqnr_text(metrics_before)}"
    tolerance = (
        max(SHARE_STEP, 1.0 / max(metrics_after.samples, 1)) + 1e-9
    )  # shares are rounded, and one sample may differ between machines
    agreement_before = 1.0 if metrics_before.exact and metrics_after.agreement is not None else metrics_before.agreement
    if _share_drop(agreement_before, 1.0 if metrics_after.exact else metrics_after.agreement) > tolerance:
        yield (
            "agreement",
            (
                f"agreement is {_percent_with_decimal(metrics_after.agreement)}, and was"
                f" {_percent_with_decimal(agreement_before)}"
            ),
        )
    accuracy_before, accuracy_after = (
        None if metrics.accuracy is None else metrics.accuracy[1] for metrics in (metrics_before, metrics_after)
    )
    if _share_drop(accuracy_before, accuracy_after) > tolerance:
        yield (
            "accuracy",
            f"accuracy is {_percent_with_decimal(accuracy_after)}, and was {_percent_with_decimal(accuracy_before)}",
        )


def _sqnr_loss(before: OutcomeMetrics, after: OutcomeMetrics) -> float:
    """Return the loss in dB; infinite if the outputs were equal before and differ now."""
    if after.sqnr is None:  # differing outputs have no floats; agreement covers them
        return 0.0
    return float("inf") if before.exact else (before.sqnr - after.sqnr if before.sqnr is not None else 0.0)


def _share_drop(before: float | None, after: float | None) -> float:
    """Return the decrease of a share; infinite if it is missing now."""
    if before is None:
        return 0.0
    return float("inf") if after is None else before - after


def _percent_with_decimal(share: float | None) -> str:
    """Format a share with one decimal, since small differences matter here."""
    return "not known" if share is None else f"{100 * share:.1f} %"


def _outcome_change(
    outcome: Outcome, kind: ChangeKind, level: Literal["warning", "note"], message: str
) -> OutcomeChange:
    from graphquant.batch.types import OutcomeChange

    return OutcomeChange(name=outcome.name, kind=kind, level=level, message=message)

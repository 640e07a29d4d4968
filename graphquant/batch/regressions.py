"""What changed since an earlier report, and what of that is a regression."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from graphquant.batch.reports.text import bytes_text, duration_text, metrics_sqnr_text, percent_text, status_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.batch.types import BatchReport, Outcome, OutcomeChange, OutcomeMetrics

    ChangeKind = Literal["status", "sqnr", "measured", "agreement", "accuracy", "size", "int8", "seconds", "gone"]


SQNR_STEP = 0.5
"""dB that an output may lose without that being a regression."""

SHARE_STEP = 0.01
"""Share of samples by which agreement or accuracy may fall; with few samples, it is one of them."""

SIZE_STEP = 0.01
"""Share that an output may grow by, since versions of graphquant and others are written into it."""

SLOWDOWN_FACTOR = 1.5
"""How many times as long is told, from a second on; machines differ, so it is no regression."""


def compare_reports(
    report: BatchReport, last: BatchReport, *, sqnr_step: float = SQNR_STEP, fail: bool = False
) -> BatchReport:
    """`report` with what changed since `last`; regressions fail it only if `fail`.

    A regression is an output that fails and did not, that lost more than `sqnr_step` dB, that agrees with the float
    model, or is right, on fewer samples by a hundredth, that cannot be measured any more, that is more than a hundredth
    larger, that runs a smaller share of its ops in low precision, or that is not there any more.
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
        _outcome_change(outcome, "gone", "warning", "the last report has it, and this batch does not")
        for outcome in before.values()
        if outcome.name not in names and report.shard[1] == 1  # else it may be another shard's
    ]
    if fail:
        changes = [replace(change_, level="error") if change_.level == "warning" else change_ for change_ in changes]
    return replace(report, changes=tuple(changes))


def has_regressions(report: BatchReport) -> bool:
    """Whether a regression fails the report."""
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
    """What is worse in the figures: one that fell, or that cannot be had any more."""
    metrics_before, metrics_after = old.metrics, new.metrics
    if metrics_before is None or new.size_after is None:
        return
    if metrics_after is None:
        yield "measured", "how far the output is from the float model was not measured, and was"
        return
    if metrics_after.problem and not metrics_before.problem:
        yield "measured", f"the output cannot be compared, and could: {metrics_after.problem}"
        return
    if _sqnr_loss(metrics_before, metrics_after) > sqnr_step:
        yield "sqnr", f"SQNR is {metrics_sqnr_text(metrics_after)}, and was {metrics_sqnr_text(metrics_before)}"
    tolerance = (
        max(SHARE_STEP, 1.0 / max(metrics_after.samples, 1)) + 1e-9
    )  # shares are rounded; one sample may turn elsewhere
    agreement_before = 1.0 if metrics_before.exact and metrics_after.agreement is not None else metrics_before.agreement
    if _share_drop(agreement_before, 1.0 if metrics_after.exact else metrics_after.agreement) > tolerance:
        yield (
            "agreement",
            f"agreement is {_percent_with_decimal(metrics_after.agreement)}, and was {_percent_with_decimal(agreement_before)}",
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
    """dB, infinitely many where nothing differed before and something does now."""
    if after.sqnr is None:  # what differs holds no floats, which agreement tells
        return 0.0
    return float("inf") if before.exact else (before.sqnr - after.sqnr if before.sqnr is not None else 0.0)


def _share_drop(before: float | None, after: float | None) -> float:
    """By how much a share is smaller; infinitely where there is none any more."""
    if before is None:
        return 0.0
    return float("inf") if after is None else before - after


def _percent_with_decimal(share: float | None) -> str:
    """A share as percents with a digit behind the point: here small differences are told."""
    return "not known" if share is None else f"{100 * share:.1f} %"


def _outcome_change(
    outcome: Outcome, kind: ChangeKind, level: Literal["warning", "note"], message: str
) -> OutcomeChange:
    from graphquant.batch.types import OutcomeChange

    return OutcomeChange(name=outcome.name, kind=kind, level=level, message=message)

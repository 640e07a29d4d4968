"""What changed since an earlier report, and what of that is a regression."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from graphquant.batch.reports.words import decibels, percent, seconds, size, status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.batch.types import Change, Figures, Outcome, Report

    What = Literal["status", "sqnr", "measured", "agreement", "accuracy", "size", "int8", "seconds", "gone"]

SQNR_STEP = 0.5
"""dB that an output may lose without that being a regression."""

SHARE_STEP = 0.01
"""Share of samples by which agreement or accuracy may fall; with few samples, it is one of them."""

SIZE_STEP = 0.01
"""Share that an output may grow by, since versions of graphquant and others are written into it."""

SLOWER = 1.5
"""How many times as long is told, from a second on; machines differ, so it is no regression."""


def compared(report: Report, last: Report, *, sqnr_step: float = SQNR_STEP, fail: bool = False) -> Report:
    """`report` with what changed since `last`; regressions fail it only if `fail`.

    A regression is an output that fails and did not, that lost more than `sqnr_step` dB, that agrees with the float
    model, or is right, on fewer samples by a hundredth, that cannot be measured any more, that is more than a hundredth
    larger, that runs a smaller share of its ops in low precision, or that is not there any more.
    """
    before = {one.name: one for one in last.outcomes if one.status != "skipped"}
    now = [one for one in report.outcomes if one.status != "skipped"]
    changes = [change for one in now if one.name in before for change in _changes(before[one.name], one, sqnr_step)]
    named = {one.name for one in report.outcomes}
    changes += [
        _change(one, "gone", "warning", "the last report has it, and this batch does not")
        for one in before.values()
        if one.name not in named and report.shard[1] == 1  # else it may be another shard's
    ]
    if fail:
        changes = [replace(one, level="error") if one.level == "warning" else one for one in changes]
    return replace(report, changes=tuple(changes))


def regressed(report: Report) -> bool:
    """Whether a regression fails the report."""
    return any(one.level == "error" for one in report.changes)


def _changes(old: Outcome, new: Outcome, sqnr_step: float) -> Iterator[Change]:
    if old.fine and not new.fine:
        yield _change(new, "status", "warning", f"{status(new)}, and was {status(old)}")
    elif new.fine and not old.fine:
        yield _change(new, "status", "note", f"{status(new)}, and was {status(old)}")
    yield from (_change(new, what, "warning", said) for what, said in _worse(old, new, sqnr_step))
    grown, was = new.size_after, old.size_after
    if grown is not None and was is not None and grown > was * (1 + SIZE_STEP):
        yield _change(new, "size", "warning", f"the output has {size(grown)}, and had {size(was)}")
    share, had = new.int8_share, old.int8_share
    if share is not None and had is not None and share < had:
        yield _change(
            new, "int8", "warning", f"{percent(share)} of the ops run in low precision, and {percent(had)} did"
        )
    if new.status == old.status == "done" and new.seconds > max(1.0, SLOWER * old.seconds):
        yield _change(new, "seconds", "note", f"it took {seconds(new.seconds)}, and took {seconds(old.seconds)}")


def _worse(old: Outcome, new: Outcome, sqnr_step: float) -> Iterator[tuple[What, str]]:
    """What is worse in the figures: one that fell, or that cannot be had any more."""
    was, now = old.figures, new.figures
    if was is None or new.size_after is None:
        return
    if now is None:
        yield "measured", "how far the output is from the float model was not measured, and was"
        return
    if now.problem and not was.problem:
        yield "measured", f"the output cannot be compared, and could: {now.problem}"
        return
    if _sqnr_lost(was, now) > sqnr_step:
        yield "sqnr", f"SQNR is {decibels(now)}, and was {decibels(was)}"
    few = max(SHARE_STEP, 1.0 / max(now.samples, 1)) + 1e-9  # shares are rounded; one sample may turn elsewhere
    agreed = 1.0 if was.exact and now.agreement is not None else was.agreement
    if _fallen(agreed, 1.0 if now.exact else now.agreement) > few:
        yield "agreement", f"agreement is {_points(now.agreement)}, and was {_points(agreed)}"
    before, after = (None if one.accuracy is None else one.accuracy[1] for one in (was, now))
    if _fallen(before, after) > few:
        yield "accuracy", f"accuracy is {_points(after)}, and was {_points(before)}"


def _sqnr_lost(was: Figures, now: Figures) -> float:
    """dB, infinitely many where nothing differed before and something does now."""
    if now.sqnr is None:  # what differs holds no floats, which agreement tells
        return 0.0
    return float("inf") if was.exact else (was.sqnr - now.sqnr if was.sqnr is not None else 0.0)


def _fallen(was: float | None, now: float | None) -> float:
    """By how much a share is smaller; infinitely where there is none any more."""
    if was is None:
        return 0.0
    return float("inf") if now is None else was - now


def _points(share: float | None) -> str:
    """A share as percents with a digit behind the point: here small differences are told."""
    return "not known" if share is None else f"{100 * share:.1f} %"


def _change(outcome: Outcome, what: What, level: Literal["warning", "note"], says: str) -> Change:
    from graphquant.batch.types import Change

    return Change(name=outcome.name, what=what, level=level, says=says)

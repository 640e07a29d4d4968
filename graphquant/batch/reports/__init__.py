"""Batch reports: their file formats, JSON Schema, merge of shards, and comparison with an earlier report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from graphquant.batch.reports.html import draw_graphs, report_page
from graphquant.batch.reports.text import (
    ALL_CODES,
    bytes_text,
    duration_text,
    junit_xml,
    metrics_sqnr_text,
    percent_text,
    report_csv,
    report_markdown,
    report_notices,
    status_text,
)
from graphquant.batch.types import TIME_KEYS, BatchReport, ChangeKind, Level, Outcome, OutcomeChange, record_json
from graphquant.errors import UsageError, did_you_mean
from graphquant.utils.atomic_files import write_file
from graphquant.visualize.check_report import github_annotations, sarif_log
from graphquant.visualize.tables import group_values, join_names

if TYPE_CHECKING:
    from graphquant.utils import Progress


def as_json(report: BatchReport) -> str:
    """Return JSON as specified by report.schema.json; `--compare` and `--merge` read it."""
    return json.dumps(record_json(report), indent=2, allow_nan=False) + "\n"


def as_annotations(report: BatchReport) -> str:
    """Return GitHub workflow commands."""
    return github_annotations(report_notices(report))


REPORTS: Mapping[str, Callable[[BatchReport], str]] = {
    ".json": as_json,
    ".xml": junit_xml,
    ".sarif": lambda report: json.dumps(sarif_log(report_notices(report), ALL_CODES), indent=2) + "\n",
    ".md": report_markdown,
    ".html": report_page,
    ".csv": report_csv,
}
"""Report writers by file suffix."""


def check_report_path(path: Path) -> None:
    """Reject an invalid report path before any work is done."""
    from graphquant.api import models

    if path.suffix not in REPORTS:
        raise UsageError(
            f"{path} has the suffix {path.suffix!r}, which is not a report format. Use one of"
            f" {', '.join(REPORTS)}.{did_you_mean(path.suffix, REPORTS)}"
        )
    models.check_output(path, force=True)


def write_report(path: Path, report: BatchReport, progress: Progress | None = None) -> None:
    """Write a report in the format of the path's suffix, atomically; an HTML page with the graphs of its models."""
    if path.suffix == ".html":
        text = report_page(report, draw_graphs(report, path, progress))
    else:
        text = REPORTS[path.suffix](report)
    write_file(path, text)


SQNR_STEP = 0.5  # loss of SQNR in dB that is no regression
SHARE_STEP = 0.01  # decrease of agreement or accuracy that is a regression; with few samples, it is one sample
SIZE_STEP = 0.01  # relative growth that is no regression, since outputs contain version strings
SLOWDOWN_FACTOR = 1.5  # Slowdown that is reported, from one second on. It is no regression, because machines differ


def compare_reports(
    report: BatchReport, last: BatchReport, *, sqnr_step: float = SQNR_STEP, fail: bool = False
) -> BatchReport:
    """Return `report` with the changes since `last`; regressions fail it only if `fail`.

    Regressions are: a new failure, a loss of more than `sqnr_step` dB, agreement or accuracy lower by 1%, a metric that
    is no longer measured, an output more than 1% larger, a smaller int8 share, and a missing output.
    """
    before = {outcome.name: outcome for outcome in last.outcomes if outcome.status != "skipped"}
    changes = [
        OutcomeChange(name=outcome.name, kind=kind, level=level, message=message)
        for outcome in report.outcomes
        if outcome.status != "skipped" and outcome.name in before
        for kind, level, message in _outcome_changes(before[outcome.name], outcome, sqnr_step)
    ]
    if report.shard[1] == 1:  # in a shard's report, another shard may have the missing ones
        names = {outcome.name for outcome in report.outcomes}
        message = "the last report has it, and this batch does not"
        changes += [
            OutcomeChange(name=name, kind="missing", level="warning", message=message)
            for name in before
            if name not in names
        ]
    if fail:
        changes = [replace(change, level="error") if change.level == "warning" else change for change in changes]
    return replace(report, changes=tuple(changes))


def has_regressions(report: BatchReport) -> bool:
    """Return True if a regression fails the report."""
    return any(change.level == "error" for change in report.changes)


def _outcome_changes(old: Outcome, new: Outcome, sqnr_step: float) -> Iterator[tuple[ChangeKind, Level, str]]:
    if old.passed != new.passed:
        yield "status", "warning" if old.passed else "note", f"{status_text(new)}, and was {status_text(old)}"
    for kind, message in _metric_regressions(old, new, sqnr_step):
        yield kind, "warning", message
    size, size_before = new.size_after, old.size_after
    if size is not None and size_before is not None and size > size_before * (1 + SIZE_STEP):
        yield "size", "warning", f"the output has {bytes_text(size)}, and had {bytes_text(size_before)}"
    share, share_before = new.int8_share, old.int8_share
    if share is not None and share_before is not None and share < share_before:
        message = f"{percent_text(share)} of the ops run in low precision, and {percent_text(share_before)} did"
        yield "int8", "warning", message
    if new.status == old.status == "done" and new.seconds > max(1.0, SLOWDOWN_FACTOR * old.seconds):
        yield "seconds", "note", f"it took {duration_text(new.seconds)}, and took {duration_text(old.seconds)}"


def _metric_regressions(old: Outcome, new: Outcome, sqnr_step: float) -> Iterator[tuple[ChangeKind, str]]:
    """Yield the metrics that decreased or disappeared."""
    before, after = old.metrics, new.metrics
    if before is None or new.size_after is None:
        return
    if after is None:
        yield "not-measured", "the difference from the float model was measured before and is not now"
        return
    if after.problem and not before.problem:
        yield "not-measured", f"the output cannot be compared any more: {after.problem}"
        return
    # Differing outputs without floats have no SQNR; agreement covers them.
    sqnr_before = float("inf") if before.exact else before.sqnr
    if after.sqnr is not None and sqnr_before is not None and sqnr_before - after.sqnr > sqnr_step:
        yield "sqnr", f"SQNR is {metrics_sqnr_text(after)}, and was {metrics_sqnr_text(before)}"
    # Shares are rounded, and one sample may differ between machines.
    tolerance = max(SHARE_STEP, 1.0 / max(after.samples, 1)) + 1e-9
    agreement_before = 1.0 if before.exact and after.agreement is not None else before.agreement
    accuracy_before, accuracy = (metrics.accuracy and metrics.accuracy[1] for metrics in (before, after))
    shares: tuple[tuple[ChangeKind, float | None, float | None], ...] = (
        ("agreement", agreement_before, 1.0 if after.exact else after.agreement),
        ("accuracy", accuracy_before, accuracy),
    )
    for kind, share_before, share in shares:
        if share_before is not None and (share is None or share_before - share > tolerance):
            yield kind, f"{kind} is {_percent_with_decimal(share)}, and was {_percent_with_decimal(share_before)}"


def _percent_with_decimal(share: float | None) -> str:
    """Format a share with one decimal, since small differences matter here."""
    return "not known" if share is None else f"{100 * share:.1f} %"


def merge_reports(reports: Mapping[Path, BatchReport]) -> BatchReport:
    """Merge the reports of all shards into the report that one machine would have made.

    Raises a UsageError if they belong to different batches or versions, or a shard is duplicate or missing.
    """
    _check_shards(reports)
    ordered = sorted(reports.values(), key=lambda report: report.shard)
    outcomes_by_name = group_values((outcome.name, outcome) for report in ordered for outcome in report.outcomes)
    names: Iterable[str] = outcomes_by_name
    # The order of the manifest is known only if every report has all of its models.
    if any(len(report.outcomes) < len(outcomes_by_name) for report in ordered):
        names = sorted(outcomes_by_name)
    return replace(
        ordered[0],
        outcomes=tuple(_merge_outcomes(name, outcomes_by_name[name]) for name in names),
        shard=(1, 1),
        deal_digest="",
        started=min(report.started for report in ordered),
        seconds=max(report.seconds for report in ordered),
        changes=(),
        warnings=tuple(dict.fromkeys(warning for report in ordered for warning in report.warnings)),
    )


def _check_shards(reports: Mapping[Path, BatchReport]) -> None:
    versions = {report.version: path for path, report in reports.items()}
    if len(versions) > 1:
        (first_version, first), (second_version, second) = list(versions.items())[:2]
        raise UsageError(
            f"{first} is of graphquant {first_version} and {second} of {second_version}. Run all"
            " shards with one version."
        )
    totals = {report.shard[1]: path for path, report in reports.items()}
    if len(totals) > 1:
        (first_total, first), (second_total, second) = list(totals.items())[:2]
        raise UsageError(
            f"{first} is one of {first_total} shards and {second} one of {second_total}. Give the reports of one batch."
        )
    deal_digests = {report.deal_digest: path for path, report in reports.items()}
    if len(deal_digests) > 1:
        first, second = list(deal_digests.values())[:2]
        raise UsageError(
            f"{first} and {second} have different models or sizes, so a model may be in"
            " neither. Give all shards the same files."
        )
    path_by_number: dict[int, Path] = {}
    for path, report in reports.items():
        earlier = path_by_number.setdefault(report.shard[0], path)
        if earlier != path:
            raise UsageError(
                f"{path} and {earlier} both belong to shard {report.shard[0]}. Give each shard's report once."
            )
    (total,) = totals
    missing = [f"{number}/{total}" for number in range(1, total + 1) if number not in path_by_number]
    if missing:
        raise UsageError(
            f"There is no report of shard {join_names(missing)}. Give the reports of all shards; otherwise the result"
            " is unknown."
        )


def _merge_outcomes(name: str, outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of an entry from the shard that processed it."""
    finished = [outcome for outcome in outcomes if outcome.status != "skipped"] or outcomes[:1]
    ignored = {*TIME_KEYS, "status"}
    contents = [
        {key: value for key, value in record_json(outcome).items() if key not in ignored} for outcome in finished
    ]
    if any(content != contents[0] for content in contents):
        raise UsageError(f"Two shards have different outcomes of {name}. Give the reports of one batch.")
    return finished[0]

"""Batch reports as terminal text, Markdown and notices, with the wording that all formats share.

docs/ci.md explains the codes of the notices.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from graphquant.backends import LINT_CODES
from graphquant.backends.lint import LintCode
from graphquant.errors import escape_unprintable
from graphquant.visualize.check_report import Notice
from graphquant.visualize.tables import NameTable, plain_line, pluralize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from graphquant.batch.types import BatchReport, Outcome, OutcomeMetrics


STATUS_LABELS = {
    "done": "done",
    "unchanged": "unchanged",
    "failed": "failed",
    "gate": "gate missed",
    "timeout": "timed out",
    "crashed": "crashed",
    "memory": "out of memory",
    "skipped": "not started",
}
"""Label of each status."""


def status_text(outcome: Outcome) -> str:
    """Return the label of an outcome's status."""
    return STATUS_LABELS[outcome.status]


def bytes_text(count: int | None) -> str:
    """Format bytes in the unit that reads best: `512 B`, `52.1 KB`, `1.31 GB`."""
    if count is None:
        return ""
    value, units = float(count), iter(("B", "KB", "MB", "GB"))
    unit = next(units)
    for larger in units:
        if value < 999.5:  # noqa: PLR2004  # limit of three digits
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"


def size_ratio(outcome: Outcome) -> float | None:
    """Return the output's size as a share of the model's."""
    before, after = outcome.size_before, outcome.size_after
    return after / before if after is not None and before else None


def percent_text(share: float | None) -> str:
    """Format a share as a whole percentage, 100 % only if complete, and large ratios as a factor."""
    if share is None:
        return ""
    if share >= 10:  # noqa: PLR2004  # from here on, percentages have four digits
        return f"{share:.0f} x"
    percents = round(share * 100)
    return f"{min(percents, 99) if share < 1 else percents} %"


def metrics_sqnr_text(metrics: OutcomeMetrics | None) -> str:
    """Return the SQNR, or "exact" if nothing differs."""
    if metrics is None:
        return ""
    if metrics.sqnr is None:
        return "exact" if metrics.exact else ""
    return f"{metrics.sqnr:.1f} dB"


def outcome_duration(outcome: Outcome) -> str:
    """Return the duration, "" if nothing was done."""
    return duration_text(outcome.seconds) if outcome.seconds else ""


def duration_text(count: float) -> str:
    """Format a duration: `0.8 s`, `3 min 20 s`."""
    if count < 60:  # noqa: PLR2004  # seconds of a minute
        return f"{count:.1f} s"
    minutes, remaining_seconds = divmod(round(count), 60)
    return f"{minutes} min {remaining_seconds} s"


INT8_NOTE = (
    "int8: share of the computing ops that run on integers, as predicted by `graphquant check`; see docs/check.md."
)
"""Explanation of the column int8."""


def failure_reasons(outcome: Outcome) -> list[str]:
    """Return the error, each missed gate, and the reason for missing metrics."""
    messages = [outcome.problem.message] if outcome.problem is not None else []
    messages += [miss.message for miss in outcome.misses]
    problem = "" if outcome.metrics is None else outcome.metrics.problem
    return (
        messages
        if not problem or problem in messages
        else [*messages, f"it cannot be compared with the float model: {problem}"]
    )


def prefix_model_name(outcome: Outcome, reason: str) -> str:
    """Put the model's name before a reason, unless it begins with it."""
    prefix = next((name for name in (outcome.name, outcome.model) if reason.startswith(name)), None)
    return f"{outcome.name}: {reason}" if prefix is None else outcome.name + reason.removeprefix(prefix)


def report_summary(report: BatchReport) -> str:
    """Return the number of models by status, and the duration."""
    counts: dict[str, int] = {}
    for outcome in report.outcomes:
        counts[status_text(outcome)] = counts.get(status_text(outcome), 0) + 1
    phrases = [f"{counts[word]} {word}" for word in STATUS_LABELS.values() if word in counts]
    kinds = [change.kind for change in report.changes if change.level != "note"]
    difference_count = kinds.count("digest")
    phrases += [pluralize(len(kinds) - difference_count, "regression")] if len(kinds) > difference_count else []
    phrases += [pluralize(difference_count, "difference")] if difference_count else []
    shard = f" of shard {report.shard[0]}/{report.shard[1]}" if report.shard[1] > 1 else ""
    return f"{pluralize(len(report.outcomes), 'model')}{shard}: {', '.join(phrases)}; {duration_text(report.seconds)}."


@dataclass(frozen=True, slots=True)
class ReportColumn:
    """A column of the table in every report format.

    Attributes:
        title: Title.
        text: Text of a cell.
        value: Sort key of a column of numbers, None for a column of text.
    """

    title: str
    text: Callable[[Outcome], str]
    value: Callable[[Outcome], float | None] | None = None


def _sites(outcome: Outcome) -> int | None:
    return None if outcome.size_after is None else outcome.sites


def _sqnr(outcome: Outcome) -> float | None:
    if outcome.metrics is None:
        return None
    return EXACT_SORT_KEY if outcome.metrics.exact else outcome.metrics.sqnr


EXACT_SORT_KEY = 10_000.0
"""Sort key of an exact output, above any SQNR."""

REPORT_COLUMNS = (
    ReportColumn("model", lambda outcome: outcome.name),
    ReportColumn("status", status_text),
    ReportColumn("before", lambda outcome: bytes_text(outcome.size_before), lambda outcome: outcome.size_before),
    ReportColumn("size", lambda outcome: bytes_text(outcome.size_after), lambda outcome: outcome.size_after),
    ReportColumn("%", lambda outcome: percent_text(size_ratio(outcome)), size_ratio),
    ReportColumn("sites", lambda outcome: "" if _sites(outcome) is None else str(outcome.sites), _sites),
    ReportColumn("int8", lambda outcome: percent_text(outcome.int8_share), lambda outcome: outcome.int8_share),
    ReportColumn("SQNR", lambda outcome: metrics_sqnr_text(outcome.metrics), _sqnr),
    ReportColumn("time", outcome_duration, lambda outcome: outcome.seconds or None),
)
"""Columns of the terminal, Markdown, HTML and CSV reports. A new column is one more line."""


def report_csv(report: BatchReport) -> str:
    """Return the table as CSV, with numbers instead of formatted text."""
    file = StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(column.title for column in REPORT_COLUMNS)
    for outcome in report.outcomes:
        writer.writerow(
            escape_unprintable(column.text(outcome)) if column.value is None else column.value(outcome)
            for column in REPORT_COLUMNS
        )
    return file.getvalue()


def batch_report_view(report: BatchReport) -> RenderableType:
    """Render the table, reasons, changes, and a summary."""
    numbers = [column.title for column in REPORT_COLUMNS if column.value is not None]
    table = NameTable(*(column.title for column in REPORT_COLUMNS), right=numbers)
    for outcome in report.outcomes:
        cells = [column.text(outcome) for column in REPORT_COLUMNS]
        table.add_row(*cells, style="" if outcome.passed or outcome.status == "skipped" else "red")
    sections: list[RenderableType] = [table] if report.outcomes else []
    sections += (
        [plain_line(INT8_NOTE, style="dim")]
        if any(outcome.int8_share is not None for outcome in report.outcomes)
        else []
    )
    for outcome in report.outcomes:
        sections += [
            plain_line(prefix_model_name(outcome, line), style="red")
            for reason in failure_reasons(outcome)
            for line in reason.split("\n")
            if line
        ]
    styles = {"error": "bold red", "warning": "yellow", "note": "dim"}
    sections += [
        plain_line(f"{change.name}: {change.message}", style=styles[change.level]) for change in report.changes
    ]
    return Group(*sections, plain_line(report_summary(report), style="bold"))


BATCH_CODES = {
    "GQ201": LintCode("error", "a model cannot be quantized as requested"),
    "GQ202": LintCode("error", "a model exceeded the time limit"),
    "GQ203": LintCode("error", "the process that quantized a model died"),
    "GQ204": LintCode("error", "a model exceeded the memory limit"),
    "GQ205": LintCode("error", "an output misses a gate"),
    "GQ206": LintCode("warning", "a model was not started because the batch was stopped"),
    "GQ207": LintCode("warning", "an output is worse than in an earlier report"),
    "GQ208": LintCode("error", "an output differs from a rebuild"),
    "GQ209": LintCode("warning", "an output cannot be compared with its float model"),
}
"""Codes of a batch, in addition to those of `check`."""

ALL_CODES = {**LINT_CODES, **BATCH_CODES}
"""All codes of a batch report."""

_BY_STATUS = {
    "failed": "GQ201",
    "timeout": "GQ202",
    "crashed": "GQ203",
    "memory": "GQ204",
    "gate": "GQ205",
    "skipped": "GQ206",
}


def report_notices(report: BatchReport) -> Iterator[Notice]:
    """Yield all problems by model, then the changes."""
    for outcome in report.outcomes:
        if outcome.status != "skipped" or report.shard[1] == 1:  # models of other shards are skipped by design
            yield from _outcome_notices(outcome)
    paths = {outcome.name: outcome.model for outcome in report.outcomes}
    for change in report.changes:
        if change.level != "note":
            path = paths.get(change.name, change.name)
            code = "GQ208" if change.kind == "digest" else "GQ207"
            yield Notice(code, change.level, path, "", "", f"{change.name}: {change.message}.")


def _outcome_notices(outcome: Outcome) -> Iterator[Notice]:
    code = _BY_STATUS.get(outcome.status)
    if code is not None:
        level = BATCH_CODES[code].level
        for reason in failure_reasons(outcome) or [f"{BATCH_CODES[code].description}."]:
            yield Notice(code, level, outcome.model, "", "", prefix_model_name(outcome, reason))
    elif outcome.passed:
        for reason in failure_reasons(outcome):
            yield Notice("GQ209", BATCH_CODES["GQ209"].level, outcome.model, "", "", prefix_model_name(outcome, reason))
    for finding in outcome.findings:
        message = f"{finding.message}. Remedy: {finding.fix}."
        yield Notice(finding.code, finding.level, outcome.output, finding.site, finding.op, message)


MAX_MARKDOWN_BYTES = 900_000
"""Maximum size in bytes; GitHub accepts a summary of 1 MiB."""

MAX_REASON_LENGTH = 600
"""Maximum number of characters of a reason."""


def report_markdown(report: BatchReport) -> str:
    """Return the Markdown, failures first. Rows above the size limit of a step summary are counted."""
    heading = [f"### {_status_mark(report)} graphquant batch", "", _escape_markdown(report_summary(report)), ""]
    titles = " | ".join(column.title for column in REPORT_COLUMNS)
    rules = " | ".join("---" if column.value is None else "---:" for column in REPORT_COLUMNS)
    table = [f"| {titles} |", f"| {rules} |"]
    problems = _truncate_lines([*_problem_items(report)], MAX_MARKDOWN_BYTES // 2)
    rows = [_markdown_row(outcome) for outcome in sorted(report.outcomes, key=lambda outcome: outcome.passed)]
    return "\n".join([*heading, *problems, "", *table, *_truncate_lines(rows, MAX_MARKDOWN_BYTES // 2)]) + "\n"


def _status_mark(report: BatchReport) -> str:
    """Return a mark for success or failure."""
    return "✅" if report.passed and all(change.level != "error" for change in report.changes) else "❌"


def _problem_items(report: BatchReport) -> Iterator[str]:
    for outcome in report.outcomes:
        for reason in failure_reasons(outcome):
            yield f"- **{_escape_markdown(outcome.name)}** {status_text(outcome)}: {_escape_markdown(reason)}"
    for change in report.changes:
        if change.level != "note":
            word = "differs" if change.kind == "digest" else "regressed"
            yield f"- **{_escape_markdown(change.name)}** {word}: {_escape_markdown(change.message)}"
    for change in report.changes:
        if change.level == "note":
            yield f"- {_escape_markdown(change.name)}: {_escape_markdown(change.message)}"


def _markdown_row(outcome: Outcome) -> str:
    cells = [_escape_markdown(column.text(outcome)) for column in REPORT_COLUMNS]
    if not outcome.passed:
        cells[1] = f"**{cells[1]}**"
    return f"| {' | '.join(cells)} |"


def _escape_markdown(text: str) -> str:
    """Escape text so that it has no markup, mention or end of a cell."""
    visible = escape_unprintable(text.replace("\n", " "))
    visible = visible if len(visible) <= MAX_REASON_LENGTH else f"{visible[:MAX_REASON_LENGTH]}..."
    return "".join(f"&#{ord(char)};" if char in "&<>|*_`[]\\~#@!:$" else char for char in visible)


def _truncate_lines(lines: list[str], room: int) -> list[str]:
    """Return the lines that fit, and the number of the remaining ones."""
    for number, line in enumerate(lines):
        room -= len(line.encode()) + 1
        if room < 0:
            return [*lines[:number], "", f"{len(lines) - number} more are in the other reports."]
    return lines

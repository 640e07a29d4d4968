"""Batch reports as terminal text, Markdown, CSV, JUnit XML and notices, with the wording that all formats share.

docs/ci.md explains the codes of the notices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from rich.console import Group, RenderableType

from graphquant.backends import LINT_CODES
from graphquant.backends.lint import LintCode
from graphquant.errors import escape_unprintable
from graphquant.visualize.check_report import Notice
from graphquant.visualize.tables import Column, Table, escape_markdown, group_values, plain_line, pluralize

if TYPE_CHECKING:
    from graphquant.batch.types import BatchReport, Outcome, OutcomeMetrics, Status

STATUS_LABELS: dict[Status, str] = {
    "done": "done",
    "unchanged": "unchanged",
    "failed": "failed",
    "empty": "nothing to quantize",
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
    value = float(count)
    for unit in ("B", "KB", "MB"):
        if value < 999.5:  # noqa: PLR2004  # limit of three digits
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


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


EXACT_SORT_KEY = 10_000.0  # sort key of an exact output, above any SQNR


def sqnr_text(sqnr: float) -> str:
    """Return an SQNR, or "exact" if nothing differs."""
    return "exact" if sqnr == EXACT_SORT_KEY else f"{sqnr:.1f} dB"


def metrics_sqnr_text(metrics: OutcomeMetrics | None) -> str:
    """Return the SQNR, or "exact" if nothing differs."""
    if metrics is None:
        return ""
    if metrics.sqnr is None:
        return "exact" if metrics.exact else ""
    return sqnr_text(metrics.sqnr)


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
    """Return the error, each missed gate, the reason for missing metrics, and warnings about the data."""
    messages = [outcome.problem.message] if outcome.problem is not None else []
    messages += [miss.message for miss in outcome.misses]
    problem = "" if outcome.metrics is None else outcome.metrics.problem
    if problem and problem not in messages:
        messages.append(f"it cannot be compared with the float model: {problem}")
    return [*messages, *outcome.data_warnings]


def prefix_model_name(outcome: Outcome, reason: str) -> str:
    """Put the model's name before a reason, unless it begins with it."""
    prefix = next((name for name in (outcome.name, outcome.model) if reason.startswith(name)), None)
    return f"{outcome.name}: {reason}" if prefix is None else outcome.name + reason.removeprefix(prefix)


def report_summary(report: BatchReport) -> str:
    """Return the number of models by status, and the duration."""
    counts = Counter(outcome.status for outcome in report.outcomes)
    phrases = [f"{counts[status]} {label}" for status, label in STATUS_LABELS.items() if status in counts]
    differs = Counter(change.kind == "digest" for change in report.changes if change.level != "note")
    phrases += [
        pluralize(differs[kind], noun) for kind, noun in ((False, "regression"), (True, "difference")) if differs[kind]
    ]
    shard = f" of shard {report.shard[0]}/{report.shard[1]}" if report.shard[1] > 1 else ""
    return f"{pluralize(len(report.outcomes), 'model')}{shard}: {', '.join(phrases)}; {duration_text(report.seconds)}."


def _sqnr(outcome: Outcome) -> float | None:
    if outcome.metrics is None:
        return None
    return EXACT_SORT_KEY if outcome.metrics.exact else outcome.metrics.sqnr


REPORT_COLUMNS: tuple[Column[Outcome], ...] = (
    Column("model", lambda outcome: outcome.name),
    Column("status", status_text),
    Column("before", lambda outcome: outcome.size_before, bytes_text, number=True),
    Column("size", lambda outcome: outcome.size_after, bytes_text, number=True),
    Column("%", size_ratio, percent_text, number=True),
    Column("tensors", lambda outcome: None if outcome.size_after is None else outcome.sites, number=True),
    Column("int8", lambda outcome: outcome.int8_share, percent_text, number=True),
    Column("SQNR", _sqnr, sqnr_text, number=True),
    Column("data", lambda outcome: "random" if outcome.metrics and outcome.metrics.random else None, optional=True),
    Column("time", lambda outcome: outcome.seconds or None, duration_text, number=True),
)
"""Columns of the terminal, Markdown, HTML and CSV reports. A new column is one more line."""


def report_csv(report: BatchReport) -> str:
    """Return the table as CSV, with numbers instead of formatted text."""
    return Table(REPORT_COLUMNS, report.outcomes).csv_text()


def batch_report_view(report: BatchReport) -> RenderableType:
    """Render the table, reasons, changes, and a summary."""
    sections: list[RenderableType] = []
    if report.outcomes:
        sections.append(
            Table(
                REPORT_COLUMNS,
                report.outcomes,
                style=lambda row: "" if row.passed or row.status == "skipped" else "red",
            )
        )
    if any(outcome.int8_share is not None for outcome in report.outcomes):
        sections.append(plain_line(INT8_NOTE, style="dim"))
    for outcome in report.outcomes:
        sections += [
            plain_line(prefix_model_name(outcome, line), style="red")
            for reason in failure_reasons(outcome)
            for line in reason.split("\n")
            if line
        ]
    styles = {"error": "bold red", "warning": "yellow", "note": "dim"}
    sections += [plain_line(f"warning: {warning}", style=styles["warning"]) for warning in report.warnings]
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
    "GQ210": LintCode("error", "no tensor of a model would be quantized, so nothing was written"),
    "GQ211": LintCode("warning", "calibration data is probably wrong"),
    "GQ212": LintCode("warning", "an entry of the manifest gets no model"),
}
"""Codes of a batch, in addition to those of `check`."""

ALL_CODES = {**LINT_CODES, **BATCH_CODES}  # all codes of a batch report

_CODE_BY_STATUS = {
    "failed": "GQ201",
    "empty": "GQ210",
    "timeout": "GQ202",
    "crashed": "GQ203",
    "memory": "GQ204",
    "gate": "GQ205",
    "skipped": "GQ206",
}


def report_notices(report: BatchReport) -> Iterator[Notice]:
    """Yield all problems by model, then the changes, then unused entries of the manifest."""
    for outcome in report.outcomes:
        if outcome.status != "skipped" or report.shard[1] == 1:  # models of other shards are skipped by design
            yield from _outcome_notices(outcome)
    paths = {outcome.name: outcome.model for outcome in report.outcomes}
    for change in report.changes:
        if change.level != "note":
            path = paths.get(change.name, change.name)
            code = "GQ208" if change.kind == "digest" else "GQ207"
            yield Notice(code, change.level, path, "", "", f"{change.name}: {change.message}.")
    for warning in report.warnings:
        yield Notice("GQ212", "warning", warning.partition(":")[0], "", "", warning)


def _outcome_notices(outcome: Outcome) -> Iterator[Notice]:
    code = _CODE_BY_STATUS.get(outcome.status, "GQ209")
    reasons = failure_reasons(outcome)
    if not reasons and not outcome.passed:
        reasons = [f"{BATCH_CODES[code].description}."]
    for reason in reasons:
        code = "GQ211" if reason in outcome.data_warnings else code
        yield Notice(code, BATCH_CODES[code].level, outcome.model, "", "", prefix_model_name(outcome, reason))
    for finding in outcome.findings:
        message = f"{finding.message}. Remedy: {finding.fix}."
        yield Notice(finding.code, finding.level, outcome.output, finding.site, finding.op, message)


MAX_MARKDOWN_BYTES = 900_000  # maximum size in bytes; GitHub accepts a summary of 1 MiB


def report_markdown(report: BatchReport) -> str:
    """Return the Markdown, failures first. Rows above the size limit of a step summary are counted."""
    passed = report.passed and all(change.level != "error" for change in report.changes)
    heading = [f"### {'✅' if passed else '❌'} graphquant batch", "", escape_markdown(report_summary(report)), ""]
    problems = _truncate_lines([*_problem_items(report)], MAX_MARKDOWN_BYTES // 2)
    table = Table(REPORT_COLUMNS, sorted(report.outcomes, key=lambda outcome: outcome.passed))
    lines = table.markdown_lines({"status": lambda row: status_text(row) if row.passed else f"**{status_text(row)}**"})
    return "\n".join([*heading, *problems, "", *_truncate_lines(lines, MAX_MARKDOWN_BYTES // 2)]) + "\n"


def _problem_items(report: BatchReport) -> Iterator[str]:
    for outcome in report.outcomes:
        for reason in failure_reasons(outcome):
            yield f"- **{escape_markdown(outcome.name)}** {status_text(outcome)}: {escape_markdown(reason)}"
    for change in report.changes:
        if change.level != "note":
            word = "differs" if change.kind == "digest" else "regressed"
            yield f"- **{escape_markdown(change.name)}** {word}: {escape_markdown(change.message)}"
    yield from (f"- {escape_markdown(warning)}" for warning in report.warnings)
    for change in report.changes:
        if change.level == "note":
            yield f"- {escape_markdown(change.name)}: {escape_markdown(change.message)}"


def _truncate_lines(lines: list[str], room: int) -> list[str]:
    """Return the lines that fit, and the number of the remaining ones."""
    for number, line in enumerate(lines):
        room -= len(line.encode()) + 1
        if room < 0:
            return [*lines[:number], "", f"{len(lines) - number} more are in the other reports."]
    return lines


def junit_xml(report: BatchReport) -> str:
    """Return JUnit XML for Jenkins, GitLab and Ant, with a test case for each model.

    A failed model or missed gate is a failure, a dead worker an error.
    """
    regressions = group_values((change.name, change) for change in report.changes if change.level == "error")
    kinds = [_case_kind(outcome, outcome.name in regressions) for outcome in report.outcomes]
    missing = [name for name in regressions if name not in {outcome.name for outcome in report.outcomes}]
    suites = ET.Element("testsuites")
    attributes = {
        "name": "graphquant batch",
        "package": "graphquant",
        "id": "0",
        "timestamp": datetime.fromtimestamp(report.started, UTC).strftime("%Y-%m-%dT%H:%M:%S"),
        "hostname": "localhost",
        "tests": str(len(kinds) + len(missing)),
        "failures": str(kinds.count("failure") + len(missing)),
        "errors": str(kinds.count("error")),
        "skipped": str(kinds.count("skipped")),
        "time": f"{report.seconds:.3f}",
    }
    suite = ET.SubElement(suites, "testsuite", attributes)
    ET.SubElement(ET.SubElement(suite, "properties"), "property", name="graphquant", value=report.version)
    for outcome, kind in zip(report.outcomes, kinds, strict=True):
        case = _add_test_case(suite, outcome.name, f"{outcome.seconds:.3f}")
        changes = regressions.get(outcome.name, [])
        if kind == "skipped":
            ET.SubElement(case, kind)
        elif kind:
            problem_type = outcome.problem.kind if outcome.problem is not None else status_text(outcome)
            if outcome.passed:
                problem_type = "difference" if changes[0].kind == "digest" else "regression"
            messages = [*failure_reasons(outcome), *(change.message for change in changes), *_metrics_lines(outcome)]
            _add_problem(case, kind, problem_type, messages)
    for name in missing:
        messages = [change.message for change in regressions[name]]
        _add_problem(_add_test_case(suite, name, "0"), "failure", "regression", messages)
    ET.SubElement(suite, "system-out").text = _xml_text([report_summary(report)])
    errors = [
        f"{outcome.name}: {reason}"
        for outcome in report.outcomes
        if outcome.passed
        for reason in failure_reasons(outcome)
    ]
    errors += [*(f"{change.name}: {change.message}" for change in report.changes), *report.warnings]
    ET.SubElement(suite, "system-err").text = _xml_text(errors)
    ET.indent(suites)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(suites, encoding="unicode")}\n'


def _case_kind(outcome: Outcome, regressed: bool) -> str:
    if outcome.passed:
        return "failure" if regressed else ""
    return {"skipped": "skipped", "failed": "failure", "empty": "failure", "gate": "failure"}.get(
        outcome.status, "error"
    )


def _add_test_case(suite: ET.Element, name: str, seconds: str) -> ET.Element:
    return ET.SubElement(suite, "testcase", name=escape_unprintable(name), classname="graphquant.batch", time=seconds)


def _add_problem(case: ET.Element, kind: str, problem_type: str, messages: list[str]) -> None:
    message = escape_unprintable(messages[0]) if messages else problem_type
    ET.SubElement(case, kind, type=escape_unprintable(problem_type), message=message).text = _xml_text(messages)


def _metrics_lines(outcome: Outcome) -> list[str]:
    if outcome.size_after is None:
        return []
    metrics = {"int8 share": percent_text(outcome.int8_share), "SQNR": metrics_sqnr_text(outcome.metrics)}
    sizes = f"{bytes_text(outcome.size_before)} to {bytes_text(outcome.size_after)}"
    figures = [f"{label} {text}" for label, text in metrics.items() if text]
    return [", ".join([sizes, f"{outcome.sites} sites", *figures])]


def _xml_text(texts: list[str]) -> str:
    """Join texts without the characters that XML cannot hold."""
    return "\n".join(escape_unprintable(line) for text in texts for line in text.split("\n"))

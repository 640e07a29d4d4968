"""Batch report as JUnit XML for Jenkins, GitLab and Ant: one test case per model."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from graphquant.batch.reports.text import (
    bytes_text,
    failure_reasons,
    metrics_sqnr_text,
    percent_text,
    report_summary,
    status_text,
)
from graphquant.errors import escape_unprintable

if TYPE_CHECKING:
    from graphquant.batch.types import BatchReport, Outcome, OutcomeChange


def junit_xml(report: BatchReport) -> str:
    """Return the XML. A failed model or missed gate is a failure, a dead worker an error."""
    suites = ET.Element("testsuites")
    suite = ET.SubElement(suites, "testsuite", _suite_attributes(report))
    properties = ET.SubElement(suite, "properties")
    ET.SubElement(properties, "property", name="graphquant", value=report.version)
    failing: dict[str, list[OutcomeChange]] = {}
    for change in report.changes:
        if change.level == "error":
            failing.setdefault(change.name, []).append(change)
    for outcome in report.outcomes:
        suite.append(_test_case(outcome, failing.pop(outcome.name, [])))
    for name, changes in failing.items():  # entries that are missing now
        case = ET.SubElement(suite, "testcase", name=escape_unprintable(name), classname="graphquant.batch", time="0")
        _add_problem(case, "failure", "regression", [change_.message for change_ in changes])
    ET.SubElement(suite, "system-out").text = _xml_text([report_summary(report)])
    messages = [
        f"{outcome.name}: {reason}"
        for outcome in report.outcomes
        if outcome.passed
        for reason in failure_reasons(outcome)
    ]
    ET.SubElement(suite, "system-err").text = _xml_text(
        [*messages, *(f"{change_.name}: {change_.message}" for change_ in report.changes)]
    )
    ET.indent(suites)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(suites, encoding="unicode")}\n'


def _suite_attributes(report: BatchReport) -> dict[str, str]:
    regressed = _regressed_names(report)
    kinds = [_case_kind(outcome, outcome.name in regressed) for outcome in report.outcomes]
    missing_count = len(regressed - {outcome.name for outcome in report.outcomes})
    return {
        "name": "graphquant batch",
        "package": "graphquant",
        "id": "0",
        "timestamp": datetime.fromtimestamp(report.started, UTC).strftime("%Y-%m-%dT%H:%M:%S"),
        "hostname": "localhost",
        "tests": str(len(kinds) + missing_count),
        "failures": str(kinds.count("failure") + missing_count),
        "errors": str(kinds.count("error")),
        "skipped": str(kinds.count("skipped")),
        "time": f"{report.seconds:.3f}",
    }


def _regressed_names(report: BatchReport) -> set[str]:
    return {change.name for change in report.changes if change.level == "error"}


def _case_kind(outcome: Outcome, regressed: bool) -> str:
    if outcome.passed:
        return "failure" if regressed else ""
    return {"skipped": "skipped", "failed": "failure", "gate": "failure"}.get(outcome.status, "error")


def _test_case(outcome: Outcome, changes: list[OutcomeChange]) -> ET.Element:
    attributes = {
        "name": escape_unprintable(outcome.name),
        "classname": "graphquant.batch",
        "time": f"{outcome.seconds:.3f}",
    }
    case = ET.Element("testcase", attributes)
    kind = _case_kind(outcome, bool(changes))
    if kind == "skipped":
        ET.SubElement(case, "skipped")
    elif kind:
        type_ = outcome.problem.kind if outcome.problem is not None else status_text(outcome)
        messages = failure_reasons(outcome) + [change.message for change in changes]
        if outcome.passed:
            type_ = "difference" if changes[0].kind == "digest" else "regression"
        _add_problem(case, kind, type_, [*messages, *_metrics_lines(outcome)])
    return case


def _add_problem(case: ET.Element, kind: str, type_: str, messages: list[str]) -> None:
    message = escape_unprintable(messages[0]) if messages else type_
    ET.SubElement(case, kind, type=escape_unprintable(type_), message=message).text = _xml_text(messages)


def _metrics_lines(outcome: Outcome) -> list[str]:
    """Return the metrics of an existing output."""
    if outcome.size_after is None:
        return []
    metrics = {"int8 share": percent_text(outcome.int8_share), "SQNR": metrics_sqnr_text(outcome.metrics)}
    sizes = f"{bytes_text(outcome.size_before)} to {bytes_text(outcome.size_after)}"
    return [
        ", ".join([sizes, f"{outcome.sites} sites", *(f"{label} {text}" for label, text in metrics.items() if text)])
    ]


def _xml_text(texts: list[str]) -> str:
    """Join texts without the characters that XML cannot hold."""
    return "\n".join(escape_unprintable(line) for text in texts for line in text.split("\n"))

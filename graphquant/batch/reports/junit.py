"""A report as JUnit XML: a test case for each model, as Jenkins, GitLab and Ant's readers take it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from graphquant.batch.reports.words import decibels, percent, reasons, size, status, summary
from graphquant.errors import printable

if TYPE_CHECKING:
    from graphquant.batch.types import Change, Outcome, Report


def junit(report: Report) -> str:
    """The XML; a model that failed or misses a gate is a failure, one whose process ended an error."""
    suites = ET.Element("testsuites")
    suite = ET.SubElement(suites, "testsuite", _attributes(report))
    properties = ET.SubElement(suite, "properties")
    ET.SubElement(properties, "property", name="graphquant", value=report.version)
    failing: dict[str, list[Change]] = {}
    for change in report.changes:
        if change.level == "error":
            failing.setdefault(change.name, []).append(change)
    for one in report.outcomes:
        suite.append(_case(one, failing.pop(one.name, [])))
    for name, changes in failing.items():  # entries that are there no more
        case = ET.SubElement(suite, "testcase", name=printable(name), classname="graphquant.batch", time="0")
        _tell(case, "failure", "regression", [one.says for one in changes])
    ET.SubElement(suite, "system-out").text = _lines([summary(report)])
    told = [f"{one.name}: {said}" for one in report.outcomes if one.fine for said in reasons(one)]
    ET.SubElement(suite, "system-err").text = _lines([*told, *(f"{one.name}: {one.says}" for one in report.changes)])
    ET.indent(suites)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(suites, encoding="unicode")}\n'


def _attributes(report: Report) -> dict[str, str]:
    regressed = _regressed(report)
    kinds = [_kind(one, one.name in regressed) for one in report.outcomes]
    gone = len(regressed - {one.name for one in report.outcomes})
    return {
        "name": "graphquant batch",
        "package": "graphquant",
        "id": "0",
        "timestamp": datetime.fromtimestamp(report.started, UTC).strftime("%Y-%m-%dT%H:%M:%S"),
        "hostname": "localhost",
        "tests": str(len(kinds) + gone),
        "failures": str(kinds.count("failure") + gone),
        "errors": str(kinds.count("error")),
        "skipped": str(kinds.count("skipped")),
        "time": f"{report.seconds:.3f}",
    }


def _regressed(report: Report) -> set[str]:
    return {one.name for one in report.changes if one.level == "error"}


def _kind(outcome: Outcome, regressed: bool) -> str:
    if outcome.fine:
        return "failure" if regressed else ""
    return {"skipped": "skipped", "failed": "failure", "gate": "failure"}.get(outcome.status, "error")


def _case(outcome: Outcome, changes: list[Change]) -> ET.Element:
    named = {"name": printable(outcome.name), "classname": "graphquant.batch", "time": f"{outcome.seconds:.3f}"}
    case = ET.Element("testcase", named)
    kind = _kind(outcome, bool(changes))
    if kind == "skipped":
        ET.SubElement(case, "skipped")
    elif kind:
        why = outcome.problem.kind if outcome.problem is not None else status(outcome)
        said = reasons(outcome) + [one.says for one in changes]
        if outcome.fine:
            why = "difference" if changes[0].what == "digest" else "regression"
        _tell(case, kind, why, [*said, *_figures(outcome)])
    return case


def _tell(case: ET.Element, kind: str, why: str, said: list[str]) -> None:
    message = printable(said[0]) if said else why
    ET.SubElement(case, kind, type=printable(why), message=message).text = _lines(said)


def _figures(outcome: Outcome) -> list[str]:
    """What there is to know of an output that is there."""
    if outcome.size_after is None:
        return []
    told = {"int8 share": percent(outcome.int8_share), "SQNR": decibels(outcome.figures)}
    sizes = f"{size(outcome.size_before)} to {size(outcome.size_after)}"
    return [", ".join([sizes, f"{outcome.sites} sites", *(f"{what} {said}" for what, said in told.items() if said)])]


def _lines(said: list[str]) -> str:
    """Lines without the characters that XML has no place for."""
    return "\n".join(printable(line) for text in said for line in text.split("\n"))

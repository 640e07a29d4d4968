"""Reports of `check` and of data checks: tables, SARIF and GitHub workflow commands."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from graphquant import __version__
from graphquant.backends import LINT_CODES
from graphquant.errors import escape_unprintable
from graphquant.visualize.tables import NameTable, join_names, plain_line, pluralize

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from graphquant.backends import CheckReport, LintFinding, Verdict
    from graphquant.backends.findings import FindingLevel
    from graphquant.backends.lint import LintCode
    from graphquant.calibration.data.check import DataReport, InputSummary

CHECK_NAMES_SHOWN = 6
"""Number of op names in a line; the remaining ops are counted."""

NAME_ONLY_RULES = {"not-quantized": "no quantized neighbors:", "no-kernel": "no integer"}
"""Backend rules whose ops are listed by name only, with the text before the op type."""

_LEVEL_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def check_view(report: CheckReport) -> RenderableType:
    """Render predicted execution of the ops, reasons for float ops, and findings."""
    sections: list[RenderableType] = [Text(escape_unprintable(_check_heading(report)), style="bold")]
    if report.backend and not report.quantization_ops and not report.counts["int8"]:
        message = "The model has no quantization ops, so every op runs in float. `graphquant insert` inserts them."
        sections.append(Text(message))
    elif report.backend:
        sections += _verdict_sections(report)
    sections += [line for finding in report.findings for line in _finding_lines(finding)]
    return Group(*sections)


def _check_heading(report: CheckReport) -> str:
    path = report.path or "model"
    finding_count = pluralize(len(report.findings), "finding")
    if not report.backend:
        return f"{path}: {report.quantization_ops} quantization ops, {finding_count}."
    if not report.verdicts and any(finding.code == "GQ109" for finding in report.findings):
        return f"{path} for {report.backend}: the model cannot be loaded, so nothing is known; {finding_count}."
    counts, all_ops = report.counts, len(report.verdicts)
    fused_text = f", {counts['fused']} more are fused" if counts["fused"] else ""
    fused_text += f", {counts['removed']} are removed" if counts["removed"] else ""
    return (
        f"{path} for {report.backend}: {counts['int8']} of {all_ops} ops run in low precision{fused_text};"
        f" {finding_count}."
    )


def _verdict_sections(report: CheckReport) -> list[RenderableType]:
    sections: list[RenderableType] = []
    if report.runs_as:
        sections.append(Text("  " + ", ".join(f"{count} {kind}" for kind, count in report.runs_as.items())))
    table = NameTable("float op", "type", "reason", "remedy")
    for verdict in report.verdicts:
        if verdict.broken_rule is not None and verdict.broken_rule.rule not in NAME_ONLY_RULES:
            table.add_row(verdict.location, verdict.type, verdict.broken_rule.message, verdict.broken_rule.fix)
    if table.row_count:
        sections.append(table)
    for rule, prefix in NAME_ONLY_RULES.items():
        matching = [verdict for verdict in report.verdicts if verdict.broken_rule and verdict.broken_rule.rule == rule]
        sections += [Text(escape_unprintable(f"  {prefix} {line}"), style="dim") for line in _names_by_type(matching)]
    return sections


def _names_by_type(verdicts: Iterable[Verdict]) -> list[str]:
    names_by_type: dict[str, list[str]] = {}
    for verdict in verdicts:
        names_by_type.setdefault(verdict.type, []).append(verdict.location)
    return [f"{kind}: {join_names(names, CHECK_NAMES_SHOWN)}" for kind, names in sorted(names_by_type.items())]


def _finding_lines(finding: LintFinding) -> list[RenderableType]:
    level = LINT_CODES[finding.code].level
    line = Text(f"{finding.code} ", style=_LEVEL_STYLES[level])
    location = f"{finding.location}: " if finding.location else ""
    line.append(escape_unprintable(f"{location}{finding.message}"), style="default")
    return [line, Text(escape_unprintable(f"      {finding.fix}"), style="dim")]


def check_notices(report: CheckReport) -> list[Notice]:
    """Return the findings as notices for SARIF and GitHub."""
    return [
        Notice(
            finding.code,
            LINT_CODES[finding.code].level,
            report.path,
            finding.location,
            finding.op,
            f"{finding.message}. Remedy: {finding.fix}.",
        )
        for finding in report.findings
    ]


def check_sarif(reports: Sequence[CheckReport]) -> dict[str, Any]:
    """Return the findings of all models as one SARIF 2.1.0 log for code scanning."""
    return sarif_log((notice for report in reports for notice in check_notices(report)), LINT_CODES)


def check_annotations(report: CheckReport) -> str:
    """Return the findings as GitHub workflow commands."""
    return github_annotations(check_notices(report))


DATA_CHECK_COLUMNS = ("input", "dtype", "in the model", "in the data", "low", "high", "mean", "NaN, inf")

IGNORED_SHOWN = 8


def data_check_view(report: DataReport) -> RenderableType:
    """Render the table of inputs, ignored names, and findings."""
    table = NameTable(*DATA_CHECK_COLUMNS)
    for input_summary in report.inputs:
        table.add_row(*_input_cells(input_summary))
    sections: list[RenderableType] = [table]
    if report.ignored:
        omitted_count = len(report.ignored) - IGNORED_SHOWN
        names = ", ".join(report.ignored[:IGNORED_SHOWN]) + (f" and {omitted_count} more" if omitted_count > 0 else "")
        sections.append(plain_line(f"No input uses: {names}", "dim"))
    sections += [plain_line(finding.message, "yellow") for finding in report.findings]
    finding_text = pluralize(len(report.findings), "finding") if report.findings else "no findings"
    sections.append(plain_line(f"{pluralize(report.samples, 'sample')}, {finding_text}.", "bold"))
    return Group(*sections)


def _input_cells(input_summary: InputSummary) -> tuple[str, ...]:
    values = [
        "" if value is None else f"{value:.4g}" for value in (input_summary.low, input_summary.high, input_summary.mean)
    ]
    return (
        input_summary.name,
        input_summary.dtype,
        _bracketed_shape(input_summary.shape),
        _bracketed_shape(input_summary.data_shape),
        *values,
        f"{input_summary.nan}, {input_summary.inf}",
    )


def _bracketed_shape(shape: Sequence[int | None] | None) -> str:
    return "any" if shape is None else "[" + ", ".join("?" if size is None else str(size) for size in shape) + "]"


SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"

_LONE_SURROGATES = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Surrogates that represent no byte of a file name."""

_GITHUB_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}


class Notice(NamedTuple):
    """A finding in a report.

    Attributes:
        code: Kind of finding, a key of the code table.
        level: Severity.
        path: Path of the model.
        site: Name of the op with its graph; "" for the whole model.
        op: Name of the op.
        message: The problem and its remedy.
    """

    code: str
    level: FindingLevel
    path: str
    site: str
    op: str
    message: str

    @property
    def text(self) -> str:
        """Message with the site before it."""
        return f"{self.site}: {self.message}" if self.site else self.message


def sarif_log(notices: Iterable[Notice], codes: Mapping[str, LintCode]) -> dict[str, Any]:
    """Return notices as one SARIF 2.1.0 log for code scanning."""
    rules = [
        {
            "id": code,
            "shortDescription": {"text": code_info.description},
            "defaultConfiguration": {"level": code_info.level},
        }
        for code, code_info in codes.items()
    ]
    indexes = {code: index for index, code in enumerate(codes)}
    results = [
        {
            "ruleId": notice.code,
            "ruleIndex": indexes[notice.code],
            "level": notice.level,
            "message": {"text": "\n".join(map(escape_unprintable, notice.text.split("\n")))},
            "locations": [_sarif_location(notice)],
        }
        for notice in notices
    ]
    driver = {"name": "graphquant", "version": __version__, "rules": rules}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}


def _sarif_location(notice: Notice) -> dict[str, Any]:
    location: dict[str, Any] = {"physicalLocation": {"artifactLocation": {"uri": _artifact_uri(notice.path)}}}
    if notice.site:
        logical = {"name": notice.op, "fullyQualifiedName": notice.site, "kind": "element"}
        location["logicalLocations"] = [logical]
    return location


def _artifact_uri(path: str) -> str:
    """Return a path as a URI, an address unchanged; names may contain bytes that are not text."""
    from urllib.parse import quote

    scheme, separator, remainder = path.partition("://")
    path_ = remainder if separator else path
    encodable = _LONE_SURROGATES.sub("\N{REPLACEMENT CHARACTER}", path_.replace("\\", "/"))
    return scheme * bool(separator) + separator + quote(encodable.encode("utf-8", "surrogateescape"))


def github_annotations(notices: Iterable[Notice]) -> str:
    """Return notices as GitHub workflow commands."""
    lines = []
    for notice in notices:
        path, text = escape_annotation(notice.path, property_=True), escape_annotation(notice.text)
        lines.append(f"::{_GITHUB_LEVELS[notice.level]} file={path},title={notice.code}::{text}\n")
    return "".join(lines)


def escape_annotation(text: str, *, property_: bool = False) -> str:
    """Escape text for a workflow command, and remove terminal control characters."""
    text = "".join(char if char in "\r\n" else escape_unprintable(char) for char in text)
    for char, replacement in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        text = text.replace(char, replacement)
    return text.replace(":", "%3A").replace(",", "%2C") if property_ else text

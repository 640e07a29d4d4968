"""Reports of `check`, `explain` and data checks: text, SARIF and GitHub workflow commands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from graphquant import __version__
from graphquant.backends import BACKENDS, LINT_CODES, CheckReport, Verdict
from graphquant.errors import escape_unprintable
from graphquant.utils.text import format_shape, join_limited
from graphquant.visualize.tables import Column, Table, group_values, join_names, plain_line, pluralize

if TYPE_CHECKING:
    from graphquant.analysis.explain import Explanation, ExplanationReport
    from graphquant.backends.findings import BrokenRule, FindingLevel
    from graphquant.backends.lint import LintCode
    from graphquant.calibration.data.check import DataReport, InputSummary

CHECK_NAMES_SHOWN = 6  # number of op names in a line; the remaining ops are counted

NAME_ONLY_RULES = {"not-quantized": "no quantized neighbors:", "no-kernel": "no integer"}
"""Backend rules whose ops are listed by name only, with the text before the op type."""

_LEVEL_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def check_view(report: CheckReport) -> RenderableType:
    """Render predicted execution of the ops, reasons for float ops, and findings."""
    sections: list[RenderableType] = [plain_line(_check_heading(report), "bold")]
    if report.backend and not report.quantization_ops and not report.counts["int8"]:
        message = "The model has no quantization ops, so every op runs in float. `graphquant insert` inserts them."
        sections.append(Text(message))
    elif report.backend:
        sections += _verdict_sections(report)
    for finding in report.findings:
        line = Text(f"{finding.code} ", style=_LEVEL_STYLES[LINT_CODES[finding.code].level])
        location = f"{finding.location}: " if finding.location else ""
        line.append(escape_unprintable(f"{location}{finding.message}"), style="default")
        sections += [line, plain_line(f"      {finding.fix}", "dim")]
    return Group(*sections)


def _check_heading(report: CheckReport) -> str:
    path = report.path or "model"
    finding_count = pluralize(len(report.findings), "finding")
    if not report.backend:
        return f"{path}: {report.quantization_ops} quantization ops, {finding_count}."
    if not report.verdicts and any(finding.code == "GQ109" for finding in report.findings):
        return f"{path} for {report.backend}: the model cannot be loaded, so nothing is known; {finding_count}."
    counts, all_ops = report.counts, len(report.verdicts)
    text = f"{path} for {report.backend}: {counts['int8']} of {all_ops} ops run in low precision"
    text += f", {counts['fused']} more fused" if counts["fused"] else ""
    text += f", {counts['removed']} removed" if counts["removed"] else ""
    if BACKENDS[report.backend].by_tables:
        text += ", by tables of its rules and without the runtime"
    return f"{text}; {finding_count}."


def _verdict_sections(report: CheckReport) -> list[RenderableType]:
    sections: list[RenderableType] = []
    if report.runs_as:
        sections.append(Text("  " + ", ".join(f"{count} {kind}" for kind, count in report.runs_as.items())))
    broken_rules = [(verdict, verdict.broken_rule) for verdict in report.verdicts if verdict.broken_rule is not None]
    table = Table(FLOAT_OP_COLUMNS, [pair for pair in broken_rules if pair[1].rule not in NAME_ONLY_RULES])
    sections += [table] if table.rows else []
    for rule, prefix in NAME_ONLY_RULES.items():
        pairs = ((verdict.type, verdict.location) for verdict, broken in broken_rules if broken.rule == rule)
        for kind, names in sorted(group_values(pairs).items()):
            sections.append(plain_line(f"  {prefix} {kind}: {join_names(names, CHECK_NAMES_SHOWN)}", "dim"))
    return sections


FLOAT_OP_COLUMNS: tuple[Column[tuple[Verdict, BrokenRule]], ...] = (
    Column("float op", lambda pair: pair[0].location),
    Column("type", lambda pair: pair[0].type),
    Column("reason", lambda pair: pair[1].message),
    Column("remedy", lambda pair: pair[1].fix),
)


def check_notices(report: CheckReport) -> list[Notice]:
    """Return the findings as notices for SARIF and GitHub."""
    notices = []
    for finding in report.findings:
        level, message = LINT_CODES[finding.code].level, f"{finding.message}. Remedy: {finding.fix}."
        notices.append(Notice(finding.code, level, report.path, finding.location, finding.op, message))
    return notices


def check_sarif(reports: Sequence[CheckReport]) -> dict[str, Any]:
    """Return the findings of all models as one SARIF 2.1.0 log for code scanning."""
    return sarif_log((notice for report in reports for notice in check_notices(report)), LINT_CODES)


def check_annotations(report: CheckReport) -> str:
    """Return the findings as GitHub workflow commands."""
    return github_annotations(check_notices(report))


IGNORED_SHOWN = 8


def data_check_view(report: DataReport) -> RenderableType:
    """Render the table of inputs, ignored names, and findings."""
    sections: list[RenderableType] = [Table(INPUT_COLUMNS, report.inputs)]
    if report.ignored:
        sections.append(plain_line(f"Arrays that no input takes: {join_limited(report.ignored, IGNORED_SHOWN)}", "dim"))
    sections += [plain_line(finding.message, "yellow") for finding in report.findings]
    finding_text = pluralize(len(report.findings), "finding") if report.findings else "no findings"
    sections.append(plain_line(f"{pluralize(report.samples, 'sample')}, {finding_text}.", "bold"))
    return Group(*sections)


INPUT_COLUMNS: tuple[Column[InputSummary], ...] = (
    Column("input", lambda entry: entry.name),
    Column("dtype", lambda entry: entry.dtype),
    Column("in the model", lambda entry: "any" if entry.shape is None else format_shape(entry.shape)),
    Column("in the data", lambda entry: "any" if entry.data_shape is None else format_shape(entry.data_shape)),
    Column("low", lambda entry: entry.low, "{:.4g}".format, number=True),
    Column("high", lambda entry: entry.high, "{:.4g}".format, number=True),
    Column("mean", lambda entry: entry.mean, "{:.4g}".format, number=True),
    Column("NaN", lambda entry: entry.nan, number=True),
    Column("inf", lambda entry: entry.inf, number=True),
)

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"

_LONE_SURROGATES = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # Surrogates that represent no byte of a file name
_GITHUB_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}


class Notice(NamedTuple):
    """A finding in a report. The site is the name of the op with its graph, "" for the whole model."""

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
        {"id": code, "shortDescription": {"text": info.description}, "defaultConfiguration": {"level": info.level}}
        for code, info in codes.items()
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


NEAR_MISS_THRESHOLD = 2  # closeness of a listed rule: all its conditions on the producer or on the consumer hold
NEAR_MISSES_SHOWN = 5  # maximum number of near misses for a use


def explain_view(explanations: ExplanationReport, *, all_rules: bool = False) -> RenderableType:
    """Render each requested op, then each use with its rule and near misses."""
    sections: list[RenderableType] = []
    for op_key in dict.fromkeys(explanation.requested_op for explanation in explanations.uses):
        sections += _op_section(explanations, op_key)
    for explanation in explanations.uses:
        rule_text = f" (rule {explanation.winner})" if explanation.winner else ""
        sections += ["", plain_line(f"{explanation.tensor} read by {explanation.use}", style="bold")]
        sections.append(_indented(explanation.outcome + rule_text, 2))
        sections += [_indented(choice, 4) for choice in explanation.scale_reasons]
        if all_rules:
            misses = explanation.other_rules
            sections += [_indented(f"{miss.rule.rule.name}: {miss.reason}", 4, "dim") for miss in misses]
        else:
            sections += _closest_misses(explanation)
    if explanations.omitted_reason:
        sections += ["", plain_line(explanations.omitted_reason, "dim")]
    return Group(*sections)


def _op_section(explanations: ExplanationReport, op_key: tuple[str, str]) -> list[RenderableType]:
    name = "/".join(filter(None, op_key))
    input_uses = [explanation for explanation in explanations.uses if explanation.use[:2] == op_key]
    output_uses = [explanation for explanation in explanations.uses if explanation.tensor[:2] == op_key]
    verdict = next((verdict_ for verdict_ in explanations.verdicts if (verdict_.graph, verdict_.op) == op_key), None)
    phrases = [_inputs_phrase(input_uses, verdict)] if input_uses else []
    phrases += [_outputs_phrase(output_uses, verdict)] if output_uses else []
    heading = plain_line(f"{name}: {', '.join(phrases)}.", style="bold")
    return [heading] if verdict is None else [heading, _indented(_backend_line(verdict, explanations), 2)]


def _inputs_phrase(uses: list[Explanation], verdict: Verdict | None) -> str:
    """Count the quantized inputs of an op, or name the op that it is fused with."""
    if verdict is not None and verdict.status == "fused":
        return next((f"fused with {use.tensor.op}" for use in uses if use.fused), "fused with its producer")
    return f"reads {sum(use.quantized for use in uses)} of {pluralize(len(uses), 'float input')} quantized"


def _outputs_phrase(uses: list[Explanation], verdict: Verdict | None) -> str:
    """Count the uses of an op's output that are quantized."""
    if verdict is not None and verdict.status == "int8" and all(use.fused for use in uses):
        return f"fused with {uses[0].use.op}"
    quantized_count = sum(use.quantized for use in uses)
    if quantized_count in {0, len(uses)}:
        return f"its output is {'quantized' if quantized_count else 'not quantized'}"
    return f"its output is quantized for {quantized_count} of {pluralize(len(uses), 'use')}"


INTEGER_WEIGHT_TYPES = frozenset({"MatMulNBits", "QMoE"})  # by level, they multiply in float or round activations


def _backend_line(verdict: Verdict, explanations: ExplanationReport) -> str:
    subject = f"{explanations.backend} {'runs' if explanations.already_quantized else 'will run'}"
    if verdict.status == "removed":
        return f"{explanations.backend} removes it, because it has no effect."
    if verdict.broken_rule is not None and verdict.broken_rule.rule == "refused":
        remedy = f"Remedy: {verdict.broken_rule.fix}."
        return f"{explanations.backend} cannot run the model. {verdict.broken_rule.message} {remedy}"
    if verdict.status == "fused":
        return f"{subject} it as part of {verdict.runs_as}."
    if verdict.status == "int8":
        operands = "with integer weights" if verdict.runs_as in INTEGER_WEIGHT_TYPES else "on integers"
        return f"{subject} it {operands}, as {verdict.runs_as}."
    if verdict.broken_rule is None:
        return f"{subject} it in float{f': {verdict.note}' if verdict.note else ''}."
    return f"{subject} it in float: {verdict.broken_rule.message}. Remedy: {verdict.broken_rule.fix}."


def _closest_misses(explanation: Explanation) -> list[RenderableType]:
    """Render the nearest rules, and count the remaining ones."""
    near_misses = [miss for miss in explanation.misses if miss.closeness >= NEAR_MISS_THRESHOLD or not miss.reason]
    near_misses.sort(key=lambda miss: (bool(miss.reason), -miss.closeness))  # matching rules first
    del near_misses[NEAR_MISSES_SHOWN:]
    lines: list[RenderableType] = [plain_line("  near misses:", style="dim")] if near_misses else []
    lines += [_indented(f"{miss.rule.rule.name}: {explanation.miss_reason(miss)}", 4, "dim") for miss in near_misses]
    remaining = [miss for miss in explanation.misses if miss not in near_misses]
    if remaining:
        producer_count = sum(miss.reason.startswith("producer") for miss in remaining)
        consumer_count = len(remaining) - producer_count
        phrases = [f"{producer_count} require another producer"] if producer_count else []
        phrases += [f"{consumer_count} another consumer"] if consumer_count else []
        reasons = " and ".join(phrases)
        lines.append(_indented(f"{pluralize(len(remaining), 'other rule')}: {reasons}. --all lists them.", 2, "dim"))
    return lines


def _indented(text: str, indent: int, style: str = "") -> RenderableType:
    """Return a line whose continuation lines are indented too."""
    return Padding(plain_line(text, style), (0, 0, 0, indent), expand=False)

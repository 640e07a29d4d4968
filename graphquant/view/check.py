"""What `check` tells, as a table, as JSON data, as SARIF 2.1.0 and as GitHub's workflow commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from graphquant.backends import CODES
from graphquant.errors import printable
from graphquant.view.data import SCHEMA
from graphquant.view.listing import Listing
from graphquant.view.notices import Notice
from graphquant.view.notices import github as as_github
from graphquant.view.notices import sarif as as_sarif
from graphquant.view.text import counted, listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from graphquant.backends import Finding, Report, Verdict

SHOWN = 6
"""Ops named in a line; the rest are counted."""

PLAIN = {"not-quantized": "float all around:", "no-kernel": "no integer"}
"""Rules whose ops are only named, and what is said before their type."""

_COLOURS = {"error": "bold red", "warning": "yellow", "note": "dim"}


def report_view(report: Report) -> RenderableType:
    """How the ops of one model will run, why some stay float, and the findings."""
    parts: list[RenderableType] = [Text(printable(_head(report)), style="bold")]
    if report.backend and not report.pairs and not report.counts["low"]:
        said = "It has no quantization ops, so every op runs in float. `graphquant insert` puts them in."
        parts.append(Text(said))
    elif report.backend:
        parts += _verdicts(report)
    parts += [line for finding in report.findings for line in _finding(finding)]
    return Group(*parts)


def _head(report: Report) -> str:
    where = report.path or "model"
    found = counted(len(report.findings), "finding")
    if not report.backend:
        return f"{where}: {report.pairs} quantization ops, {found}."
    counts, all_ops = report.counts, len(report.verdicts)
    absorbed = f", {counts['absorbed']} more are absorbed" if counts["absorbed"] else ""
    return f"{where} for {report.backend}: {counts['low']} of {all_ops} ops run in low precision{absorbed}; {found}."


def _verdicts(report: Report) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if report.runs_as:
        parts.append(Text("  " + ", ".join(f"{count} {kind}" for kind, count in report.runs_as.items())))
    table = Listing("stays float", "type", "because", "to change that")
    for verdict in report.verdicts:
        if verdict.broken is not None and verdict.broken.rule not in PLAIN:
            table.add_row(verdict.where, verdict.type, verdict.broken.says, verdict.broken.fix)
    if table.row_count:
        parts.append(table)
    for rule, said in PLAIN.items():
        plain = [verdict for verdict in report.verdicts if verdict.broken and verdict.broken.rule == rule]
        parts += [Text(printable(f"  {said} {line}"), style="dim") for line in _by_type(plain)]
    return parts


def _by_type(verdicts: Iterable[Verdict]) -> list[str]:
    named: dict[str, list[str]] = {}
    for verdict in verdicts:
        named.setdefault(verdict.type, []).append(verdict.where)
    return [f"{kind}: {listed(names, SHOWN)}" for kind, names in sorted(named.items())]


def _finding(finding: Finding) -> list[RenderableType]:
    level = CODES[finding.code].level
    line = Text(f"{finding.code} ", style=_COLOURS[level])
    line.append(printable(f"{finding.where}: {finding.says}"), style="default")
    return [line, Text(printable(f"      {finding.fix}"), style="dim")]


def report_json(report: Report) -> dict[str, Any]:
    """One report as JSON data."""
    return {
        "schema": SCHEMA,
        "path": report.path,
        "backend": report.backend,
        "pairs": report.pairs,
        "counts": report.counts,
        "runs_as": report.runs_as,
        "ops": [_verdict_json(verdict) for verdict in report.verdicts],
        "findings": [
            {
                "code": one.code,
                "level": CODES[one.code].level,
                "graph": one.graph,
                "op": one.op,
                "says": one.says,
                "fix": one.fix,
            }
            for one in report.findings
        ],
    }


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    told = {"graph": verdict.graph, "op": verdict.op, "type": verdict.type, "status": verdict.status}
    broken = verdict.broken
    why = None if broken is None else {"rule": broken.rule, "says": broken.says, "fix": broken.fix}
    return {**told, "runs_as": verdict.runs_as, "broken": why}


def notices(report: Report) -> list[Notice]:
    """The findings of one model, to be told as SARIF or to GitHub."""
    return [
        Notice(one.code, CODES[one.code].level, report.path, one.where, one.op, f"{one.says}. To mend it: {one.fix}.")
        for one in report.findings
    ]


def sarif(reports: Sequence[Report]) -> dict[str, Any]:
    """The findings of all models as one SARIF 2.1.0 log, for code scanning."""
    return as_sarif((one for report in reports for one in notices(report)), CODES)


def github(report: Report) -> str:
    """The findings as commands that a GitHub workflow shows beside the file."""
    return as_github(notices(report))

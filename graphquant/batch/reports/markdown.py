"""A report as Markdown, for a step summary or a comment: what went wrong first, then a table of all models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphquant.batch.reports.words import decibels, percent, ratio, reasons, size, status, summary, time
from graphquant.errors import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.batch.types import Outcome, Report

LARGEST = 900_000
"""Bytes; GitHub takes a summary of 1 MiB."""

LONGEST = 600
"""Characters of a reason."""

_HEAD = ("model", "status", "size", "sites", "int8", "SQNR", "time")


def markdown(report: Report) -> str:
    """The Markdown; where a step summary has no room for all, the rest is counted. Those that failed come first."""
    head = [f"### {_good(report)} graphquant batch", "", _text(summary(report)), ""]
    table = [f"| {' | '.join(_HEAD)} |", f"| --- | --- |{' ---: |' * (len(_HEAD) - 2)}"]
    wrong = _cut([*_wrong(report)], LARGEST // 2)
    rows = [_row(one) for one in sorted(report.outcomes, key=lambda one: one.fine)]
    return "\n".join([*head, *wrong, "", *table, *_cut(rows, LARGEST // 2)]) + "\n"


def _good(report: Report) -> str:
    """A mark that is seen at once."""
    return "✅" if report.fine and all(one.level != "error" for one in report.changes) else "❌"


def _wrong(report: Report) -> Iterator[str]:
    for one in report.outcomes:
        for said in reasons(one):
            yield f"- **{_text(one.name)}** {status(one)}: {_text(said)}"
    for change in report.changes:
        if change.level != "note":
            word = "differs" if change.what == "digest" else "regressed"
            yield f"- **{_text(change.name)}** {word}: {_text(change.says)}"
    for change in report.changes:
        if change.level == "note":
            yield f"- {_text(change.name)}: {_text(change.says)}"


def _row(outcome: Outcome) -> str:
    part = ratio(outcome)
    sizes = size(outcome.size_before)
    if part is not None:
        sizes += f" → {size(outcome.size_after)} ({percent(part)})"
    cells = (
        _text(outcome.name),
        status(outcome) if outcome.fine else f"**{status(outcome)}**",
        sizes,
        str(outcome.sites) if outcome.size_after is not None else "",
        percent(outcome.int8_share),
        decibels(outcome.figures),
        time(outcome),
    )
    return f"| {' | '.join(cells)} |"


def _text(said: str) -> str:
    """Words as they are: nothing in them is markup, a mention or the end of a cell."""
    shown = printable(said.replace("\n", " "))
    shown = shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}..."
    return "".join(f"&#{ord(char)};" if char in "&<>|*_`[]\\~#@!:$" else char for char in shown)


def _cut(lines: list[str], room: int) -> list[str]:
    """As many lines as there is room for, and how many more there are."""
    for place, line in enumerate(lines):
        room -= len(line.encode()) + 1
        if room < 0:
            return [*lines[:place], "", f"{len(lines) - place} more are in the other reports."]
    return lines

"""A report for the terminal: a table of models, then why some of them are not fine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from graphquant.batch.reports.words import INT8, decibels, percent, ratio, reasons, size, status, summary, time, told
from graphquant.view.listing import Listing
from graphquant.view.text import plain

if TYPE_CHECKING:
    from graphquant.batch.types import Outcome, Report

NUMBERS = ("size", "", "sites", "int8", "SQNR", "time")
"""Heads of columns of numbers."""


def report_view(report: Report) -> RenderableType:
    """The table, reasons and changes, and a line on all."""
    table = Listing("model", "status", *NUMBERS, right=NUMBERS)
    for one in report.outcomes:
        table.add_row(*_cells(one), style="" if one.fine or one.status == "skipped" else "red")
    parts: list[RenderableType] = [table] if report.outcomes else []
    parts += [plain(INT8, style="dim")] if any(one.int8_share is not None for one in report.outcomes) else []
    for one in report.outcomes:
        parts += [plain(told(one, line), style="red") for said in reasons(one) for line in said.split("\n") if line]
    colours = {"error": "bold red", "warning": "yellow", "note": "dim"}
    parts += [plain(f"{one.name}: {one.says}", style=colours[one.level]) for one in report.changes]
    return Group(*parts, plain(summary(report), style="bold"))


def _cells(outcome: Outcome) -> tuple[str, ...]:
    made = outcome.size_after is not None
    return (
        outcome.name,
        status(outcome),
        size(outcome.size_after),
        percent(ratio(outcome)),
        str(outcome.sites) if made else "",
        percent(outcome.int8_share),
        decibels(outcome.figures),
        time(outcome),
    )

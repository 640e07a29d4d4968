"""A report for the terminal: a table of models, then why some of them are not fine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table

from graphquant.batch.reports.words import decibels, percent, ratio, reasons, seconds, size, status, summary
from graphquant.errors import printable
from graphquant.view.text import plain

if TYPE_CHECKING:
    from graphquant.batch.types import Outcome, Report


def report_view(report: Report) -> RenderableType:
    """The table, reasons and changes, and a line on all."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model", overflow="fold")
    for column in ("status", "size", "", "sites", "int8", "SQNR", "time"):
        table.add_column(column, no_wrap=True, justify="left" if column == "status" else "right")
    for one in report.outcomes:
        table.add_row(*_cells(one), style=None if one.fine or one.status == "skipped" else "red")
    parts: list[RenderableType] = [table] if report.outcomes else []
    for one in report.outcomes:
        parts += [
            plain(f"{one.name}: {line}", style="red") for said in reasons(one) for line in said.split("\n") if line
        ]
    colours = {"error": "bold red", "warning": "yellow", "note": "dim"}
    parts += [plain(f"{one.name}: {one.says}", style=colours[one.level]) for one in report.changes]
    return Group(*parts, plain(summary(report), style="bold"))


def _cells(outcome: Outcome) -> tuple[str, ...]:
    made = outcome.size_after is not None
    return (
        printable(outcome.name),
        status(outcome),
        size(outcome.size_after),
        percent(ratio(outcome)),
        str(outcome.sites) if made else "",
        percent(outcome.int8_share),
        decibels(outcome.figures),
        seconds(outcome.seconds),
    )

"""Calibration data beside the inputs it feeds, as a table and as JSON data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from graphquant.view.data import SCHEMA
from graphquant.view.listing import Listing
from graphquant.view.text import counted, plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphquant.data.check import DataReport, InputSummary

COLUMNS = ("input", "dtype", "in the model", "the data gives", "low", "high", "mean", "NaN, inf")

IGNORED_SHOWN = 8


def report_view(report: DataReport) -> RenderableType:
    """The table of inputs, what no input takes, and the findings."""
    table = Listing(*COLUMNS)
    for one in report.inputs:
        table.add_row(*_cells(one))
    parts: list[RenderableType] = [table]
    if report.ignored:
        more = len(report.ignored) - IGNORED_SHOWN
        shown = ", ".join(report.ignored[:IGNORED_SHOWN]) + (f" and {more} more" if more > 0 else "")
        parts.append(plain(f"No input takes: {shown}", "dim"))
    parts += [plain(found.says, "yellow") for found in report.findings]
    found = counted(len(report.findings), "finding") if report.findings else "nothing found"
    parts.append(plain(f"{counted(report.samples, 'sample')}, {found}.", "bold"))
    return Group(*parts)


def report_json(report: DataReport) -> dict[str, Any]:
    """The same as JSON data."""
    return {
        "schema": SCHEMA,
        "samples": report.samples,
        "digest": report.digest,
        "inputs": [
            {
                "name": one.name,
                "dtype": one.dtype,
                "shape": None if one.shape is None else list(one.shape),
                "given": None if one.given is None else list(one.given),
                "low": one.low,
                "high": one.high,
                "mean": one.mean,
                "nan": one.nan,
                "inf": one.inf,
            }
            for one in report.inputs
        ],
        "ignored": list(report.ignored),
        "findings": [{"kind": one.kind, "input": one.input, "says": one.says} for one in report.findings],
    }


def _cells(one: InputSummary) -> tuple[str, ...]:
    values = ["" if value is None else f"{value:.4g}" for value in (one.low, one.high, one.mean)]
    return (one.name, one.dtype, _shape(one.shape), _shape(one.given), *values, f"{one.nan}, {one.inf}")


def _shape(shape: Sequence[int | None] | None) -> str:
    return "any" if shape is None else "[" + ", ".join("?" if size is None else str(size) for size in shape) + "]"

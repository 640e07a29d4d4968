"""Viewer pages of two models or plans, and HTML for notebook cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType

from graphquant.analysis.comparison import Comparison
from graphquant.analysis.conversion_report import ConversionReport
from graphquant.analysis.diff import Differences
from graphquant.analysis.explain import ExplanationReport
from graphquant.analysis.model_summary import summarize_model
from graphquant.analysis.range_report import stats_range_report
from graphquant.analysis.site_errors import prepare_like
from graphquant.api.compare import align_preparation
from graphquant.api.plan import prepare_for_plan
from graphquant.api.result import Result
from graphquant.api.strip import StripResult
from graphquant.backends.findings import CheckReport
from graphquant.calibration.data.check import DataReport
from graphquant.calibration.stats import Stats
from graphquant.ir import Model
from graphquant.ir.op_matching import match_ops
from graphquant.quantize import Plan
from graphquant.visualize.annotations import comparison_heatmap
from graphquant.visualize.check_report import check_view, data_check_view, explain_view
from graphquant.visualize.compare_report import comparison_figures, comparison_view, diff_summary, diff_view, strip_view
from graphquant.visualize.drawing import Drawing, model_drawing, plan_drawing, result_drawing
from graphquant.visualize.merged_drawings import MergedDrawing, merge_drawings, viewer_changes
from graphquant.visualize.statistics_report import range_report_view
from graphquant.visualize.tables import plain_line
from graphquant.visualize.text import conversion_view, extent_lines, plan_view, result_figures, summary_view
from graphquant.visualize.viewer_data import viewer_data, viewer_page

RANDOM_DATA_NOTE = "The data is RANDOM: the metrics do not apply to real data."

FORMATS_DIFFER_NOTE = (
    "The models have different formats, whose inner tensors cannot be matched. Only the quantized model is drawn."
)


def comparison_page(float_model: Model, quantized: Model, comparison: Comparison) -> str:
    """Draw a float and a quantized model in one layout, with tensor errors as a heatmap.

    Raises a ModelError if the float model cannot be prepared like the quantized one.
    """
    notes = [RANDOM_DATA_NOTE] if comparison.random else []
    drawing, heatmap = model_drawing(quantized), comparison_heatmap(comparison)
    figures = comparison_figures(comparison)
    if float_model.format != quantized.format:
        return viewer_page(viewer_data(drawing, [*notes, FORMATS_DIFFER_NOTE], heatmap=heatmap, figures=figures))
    prepared = prepare_like(float_model, quantized)
    merged = merge_drawings(
        model_drawing(prepared), drawing, match_ops(prepared, quantized), _side_titles(float_model, quantized)
    )
    return viewer_page(viewer_data(merged.drawing, notes, merged=merged, heatmap=heatmap, figures=figures))


def diff_page(first: Model, second: Model, differences: Differences) -> str:
    """Draw two models in one layout, with added, removed and changed parts in colors.

    Raises a ModelError if the first model cannot be prepared like the second one.
    """
    before, after, _ = align_preparation(first, second)
    drawings = model_drawing(before), model_drawing(after)
    merged = merge_drawings(*drawings, match_ops(before, after), _side_titles(first, second))
    return _changes_page(merged, differences, (before, after))


def plan_diff_page(model: Model, first: Plan, second: Plan, differences: Differences) -> str:
    """Draw two plans of `model` in one layout; raise UsageError if a plan belongs to another model."""
    before, after = prepare_for_plan(model, first), prepare_for_plan(model, second)
    drawings = plan_drawing(before, first), plan_drawing(after, second)
    return _changes_page(merge_drawings(*drawings, match_ops(before, after), ("plan A", "plan B")), differences)


def _changes_page(merged: MergedDrawing, differences: Differences, models: tuple[Model, Model] | None = None) -> str:
    changes = viewer_changes(differences, merged, models)
    return viewer_page(viewer_data(merged.drawing, [diff_summary(differences)], merged=merged, changes=changes))


def _side_titles(first: Model, second: Model) -> tuple[str, str]:
    """Return the file names; with folders if the names are equal."""
    paths = [model.path or Path("model") for model in (first, second)]
    titles = paths[0].name, paths[1].name
    return titles if titles[0] != titles[1] else (str(paths[0]), str(paths[1]))


CELL_WIDTH = 100  # columns of text in a cell
CELL_LINES = 40  # lines of text in a cell; the remaining ones are counted
MAX_ROW_LENGTH = 400  # characters of a line in a cell; names are not folded
SUMMARY_LINES = 4  # lines of the model summary: format, inputs, outputs and ops

MAX_DRAWN_OPS = 5_000
"""Maximum number of ops to draw in a cell."""

MAX_FRAME_LENGTH = 280_000
"""Maximum number of characters of a drawing in a cell. The notebook stores it, and the tables above it."""

SITES_LISTED = 10  # number of quantized tensors to list for a comparison


_VIEWS: Mapping[type[Any], Callable[[Any], RenderableType]] = {
    Plan: plan_view,
    Comparison: lambda comparison: comparison_view(comparison, top=SITES_LISTED),
    Stats: lambda stats: range_report_view(stats_range_report(stats, None)),
    CheckReport: check_view,
    ExplanationReport: explain_view,
    DataReport: data_check_view,
    Differences: lambda differences: diff_view(differences, summary_only=False),
    StripResult: lambda stripped: strip_view(stripped, None),
    ConversionReport: conversion_view,
}
"""Functions that render the objects without a drawing."""


def notebook_html(value: object) -> str:
    """Return HTML of a public object, which works without a network and has less than 300,000 characters."""
    if isinstance(value, Model):
        summary = _preformatted(summary_view(summarize_model(value)), lines=SUMMARY_LINES)
        return summary + _viewer_or_hint(value, lambda: model_drawing(value))
    if isinstance(value, Result):
        figures = result_figures(value)
        return _preformatted(_result_view(value)) + _viewer_or_hint(value.model, lambda: result_drawing(value), figures)
    return _preformatted(_VIEWS[type(value)](value))


def _result_view(result: Result) -> RenderableType:
    """Render a result in a few lines."""
    lines = [*extent_lines(result), plain_line(".save(PATH) writes the model, .plan is the plan.")]
    if result.has_random_data:
        lines.append(plain_line("The ranges come from RANDOM data: use the model for tests only."))
    return Group(*lines)


def _viewer_or_hint(model: Model, drawing: Callable[[], Drawing], figures: Sequence[tuple[str, str]] = ()) -> str:
    """Return the viewer in a sandboxed frame, or a command to run if the model is too large for a cell."""
    ops = sum(len(model.graphs[name]) for name in model.reachable_graphs())
    document = "" if ops > MAX_DRAWN_OPS else escape(viewer_page(viewer_data(drawing(), figures=figures)))
    if not document or len(document) > MAX_FRAME_LENGTH:
        command = f"graphquant inspect {model.path or 'MODEL'} --html page.html"
        return _preformatted(plain_line(f"{ops} ops are too many for a cell. Draw them: {command}"))
    style = "width:100%;height:520px;border:1px solid #8886"
    return f'<iframe sandbox="allow-scripts" style="{style}" title="the model" srcdoc="{document}"></iframe>'


def _preformatted(view: RenderableType, lines: int = CELL_LINES) -> str:
    """Return the first lines of terminal output as HTML."""
    file = StringIO()
    Console(file=file, width=CELL_WIDTH, color_system=None, highlight=False, markup=False, emoji=False).print(view)
    rows = [line.rstrip() for line in file.getvalue().rstrip().split("\n")]
    if len(rows) > lines == CELL_LINES:
        rows = [*rows[: lines - 2], f"... {len(rows) - lines + 1} more lines ...", rows[-1]]
    shortened = (row if len(row) <= MAX_ROW_LENGTH else f"{row[:MAX_ROW_LENGTH]}..." for row in rows[:lines])
    text = escape("\n".join(shortened))
    return f'<pre style="white-space:pre;overflow-x:auto;line-height:1.3">{text}</pre>'

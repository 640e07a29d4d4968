"""HTML for notebook cells: text, and the viewer in a frame."""

from __future__ import annotations

from html import escape
from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console, Group

from graphquant.analysis import Comparison
from graphquant.analysis.model_summary import summarize_model
from graphquant.api import Result
from graphquant.ir import Model
from graphquant.quantize import Plan
from graphquant.visualize.compare_report import comparison_view
from graphquant.visualize.drawing import model_drawing, result_drawing
from graphquant.visualize.tables import plain_line, pluralize
from graphquant.visualize.text import plan_view, summary_view
from graphquant.visualize.viewer_data import viewer_data, viewer_page

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from graphquant.visualize.drawing import Drawing


CELL_WIDTH = 100
"""Columns of text in a cell."""

CELL_LINES = 40
"""Lines of text in a cell; the remaining ones are counted."""

SUMMARY_LINES = 4
"""Lines of the model summary: format, inputs, outputs and ops."""

MAX_DRAWN_OPS = 5_000
"""Maximum number of ops to draw in a cell. The page is stored in the notebook; 5,000 ops take half a megabyte."""

SITES_LISTED = 10
"""Number of quantized tensors to list for a comparison."""


def notebook_html(value: object) -> str:
    """Return HTML of a model, plan, result or comparison, which works without a network.

    Raises:
        TypeError: The value has another type.
    """
    match value:
        case Model():
            return _preformatted(summary_view(summarize_model(value)), lines=SUMMARY_LINES) + _viewer_or_hint(
                value, lambda: model_drawing(value)
            )
        case Result():
            return _preformatted(_result_view(value)) + _viewer_or_hint(value.model, lambda: result_drawing(value))
        case Plan():
            return _preformatted(plan_view(value))
        case Comparison():
            return _preformatted(comparison_view(value, top=SITES_LISTED))
    raise TypeError(f"{type(value).__name__} has no HTML view")


def _result_view(result: Result) -> RenderableType:
    """Render a result in one or two lines."""
    uses = sum(len(insertion.site.uses) for insertion in result.inserted)
    message = f"{pluralize(len(result.inserted), 'site')} inserted, {pluralize(uses, 'use')} rerouted"
    message += (
        f", calibrated on {pluralize(result.calibration_samples, 'sample')}" if result.calibration_samples else ""
    )
    lines = [plain_line(f"{message}. .save(PATH) writes the model, .plan is the plan.")]
    lines += (
        [plain_line("The ranges come from RANDOM data: use the model for tests only.")]
        if result.has_random_data
        else []
    )
    return Group(*lines)


def _viewer_or_hint(model: Model, drawing: Callable[[], Drawing]) -> str:
    """Return the viewer in a frame, or a command to run if the model is too large for a cell."""
    ops = sum(len(model.graphs[name]) for name in model.reachable_graphs())
    if ops > MAX_DRAWN_OPS:
        path = model.path or "MODEL"
        return _preformatted(
            plain_line(f"{ops} ops are too many for a cell. Draw them: graphquant inspect {path} --html page.html")
        )
    return _viewer_frame(drawing())


def _preformatted(view: RenderableType, lines: int = CELL_LINES) -> str:
    """Return the first lines of terminal output as HTML."""
    file = StringIO()
    Console(file=file, width=CELL_WIDTH, color_system=None, highlight=False, markup=False, emoji=False).print(view)
    rows = [line.rstrip() for line in file.getvalue().rstrip().split("\n")]
    if len(rows) > lines == CELL_LINES:
        rows = [*rows[: lines - 2], f"... {len(rows) - lines + 1} more lines ...", rows[-1]]
    text = escape("\n".join(rows[:lines]))
    return f'<pre style="white-space:pre;overflow-x:auto;line-height:1.3">{text}</pre>'


def _viewer_frame(drawing: Drawing) -> str:
    """Return the viewer in a sandboxed frame, which cannot reach the notebook."""
    document = escape(viewer_page(viewer_data(drawing, [])))
    style = "width:100%;height:520px;border:1px solid #8886"
    return f'<iframe sandbox="allow-scripts" style="{style}" title="the model" srcdoc="{document}"></iframe>'

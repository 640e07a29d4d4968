"""Models, plans and what is made of them as HTML for a cell of a notebook: text, and the viewer in a frame."""

from __future__ import annotations

from html import escape
from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console, Group

from graphquant.comparison import Comparison
from graphquant.ir import Model
from graphquant.pipeline import Result
from graphquant.plans import Plan
from graphquant.survey import survey
from graphquant.view.compare_text import comparison_view
from graphquant.view.graph import model_drawing, result_drawing
from graphquant.view.html import page
from graphquant.view.payload import payload
from graphquant.view.text import counted, plain, plan_view, survey_view

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from graphquant.view.drawing import Drawing

WIDTH = 100
"""Columns of text in a cell."""

LINES = 40
"""Lines of it that a cell shows; the rest is said to be there."""

HEAD = 4
"""Lines that tell what a model is: its format, inputs, outputs and ops."""

LARGEST = 5_000
"""Ops that a cell draws: the page is kept in the notebook's file, and 5,000 ops take half a megabyte."""

TOP = 10
"""Quantized tensors of a comparison that are listed."""


def html(what: object) -> str:
    """A model, a plan, what `insert` made or what `compare` found, as HTML that works without a network.

    Raises:
        TypeError: It is something else.
    """
    match what:
        case Model():
            return _text(survey_view(survey(what)), lines=HEAD) + _drawn(what, lambda: model_drawing(what))
        case Result():
            return _text(_made(what)) + _drawn(what.model, lambda: result_drawing(what))
        case Plan():
            return _text(plan_view(what))
        case Comparison():
            return _text(comparison_view(what, top=TOP))
    raise TypeError(f"{type(what).__name__} has no drawing")


def _made(result: Result) -> RenderableType:
    """What `insert` did, in a line or two."""
    uses = sum(len(done.site.uses) for done in result.inserted)
    said = f"{counted(len(result.inserted), 'site')} inserted, {counted(uses, 'use')} rerouted"
    said += f", calibrated on {counted(result.samples, 'sample')}" if result.samples else ""
    lines = [plain(f"{said}. .save(PATH) writes the model, .plan is what was to be done.")]
    lines += [plain("The ranges come from RANDOM data: use the model for tests only.")] if result.random else []
    return Group(*lines)


def _drawn(model: Model, drawing: Callable[[], Drawing]) -> str:
    """The viewer in a frame, or what to do where that would make the notebook's file large."""
    ops = sum(len(model.graphs[name]) for name in model.live())
    if ops > LARGEST:
        where = model.path or "MODEL"
        return _text(
            plain(f"{ops} ops are too many for a cell. Draw them: graphquant inspect {where} --html page.html")
        )
    return _frame(drawing())


def _text(view: RenderableType, lines: int = LINES) -> str:
    """The start of what a terminal would show."""
    file = StringIO()
    Console(file=file, width=WIDTH, color_system=None, highlight=False, markup=False, emoji=False).print(view)
    told = [line.rstrip() for line in file.getvalue().rstrip().split("\n")]
    if len(told) > lines == LINES:
        told = [*told[: lines - 2], f"... {len(told) - lines + 1} more lines ...", told[-1]]
    shown = escape("\n".join(told[:lines]))
    return f'<pre style="white-space:pre;overflow-x:auto;line-height:1.3">{shown}</pre>'


def _frame(drawing: Drawing) -> str:
    """The viewer, apart from the notebook: it cannot reach what is around it."""
    made = escape(page(payload(drawing, [])))
    style = "width:100%;height:520px;border:1px solid #8886"
    return f'<iframe sandbox="allow-scripts" style="{style}" title="the model" srcdoc="{made}"></iframe>'


__all__ = ["html"]

"""Pages of two models, or two plans, side by side: a comparison as heat, a difference in colours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphquant.comparison import prepared_beside
from graphquant.pairs import pair
from graphquant.pipeline import aligned, prepared_for
from graphquant.view.both import unite
from graphquant.view.changes import changes_data
from graphquant.view.diff_text import summary
from graphquant.view.graph import model_drawing, plan_drawing
from graphquant.view.heat import of_comparison
from graphquant.view.html import page
from graphquant.view.payload import payload

if TYPE_CHECKING:
    from graphquant.comparison import Comparison
    from graphquant.differences import Differences
    from graphquant.ir import Model
    from graphquant.plans import Plan

RANDOM = "The data is RANDOM: the figures say little of real data."

TWO_FORMATS = (
    "The models are of two formats, between which nothing inside is matched. So only the quantized one is drawn."
)


def comparison_page(plain: Model, quant: Model, found: Comparison) -> str:
    """The float and the quantized model under one layout, with the error of each quantized tensor as heat.

    Raises:
        ModelError: The float model cannot be prepared as the quantized one was.
    """
    notes = [RANDOM] if found.random else []
    shown, heat = model_drawing(quant), of_comparison(found)
    if plain.format != quant.format:
        return page(payload(shown, [*notes, TWO_FORMATS], heat=heat))
    ready = prepared_beside(plain, quant)
    both = unite(model_drawing(ready), shown, pair(ready, quant), _titles(plain, quant))
    return page(payload(both.drawing, notes, both=both, heat=heat))


def difference_page(one: Model, other: Model, found: Differences) -> str:
    """Two models under one layout, with what is new, gone and changed in colours.

    Raises:
        ModelError: The first model cannot be prepared as the other one was.
    """
    before, after, _ = aligned(one, other)
    both = unite(model_drawing(before), model_drawing(after), pair(before, after), _titles(one, other))
    return page(payload(both.drawing, [summary(found)], both=both, changes=changes_data(found, both, (before, after))))


def plans_page(model: Model, one: Plan, other: Plan, found: Differences) -> str:
    """Likewise of two plans of `model`.

    Raises:
        UsageError: A plan is of another model.
    """
    before, after = prepared_for(model, one), prepared_for(model, other)
    sides = plan_drawing(before, one), plan_drawing(after, other)
    both = unite(*sides, pair(before, after), ("plan A", "plan B"))
    return page(payload(both.drawing, [summary(found)], both=both, changes=changes_data(found, both)))


def _titles(one: Model, other: Model) -> tuple[str, str]:
    """What the files are called, with their folders where that is the same."""
    paths = [model.path for model in (one, other)]
    names = [path.name if path is not None else "model" for path in paths]
    if names[0] == names[1]:
        names = [str(path) if path is not None else "model" for path in paths]
    return names[0], names[1]


__all__ = ["comparison_page", "difference_page", "plans_page"]

"""The table of corrections, and the ones that are asked for, made one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphquant.corrections import bias, rounding
from graphquant.corrections.check import LIKELY, SURE, keep
from graphquant.corrections.types import Correction, Draft
from graphquant.rewrite import Folds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphquant.corrections.types import Samples
    from graphquant.ir import Model
    from graphquant.solve import Solution

CORRECTIONS: dict[str, Correction] = {
    rounding.COMPENSATION: Correction(
        why="with few bits, what rounding one weight does wrong others can make up for",
        run=rounding.compensate,
        sure=LIKELY,
    ),
    rounding.ADAPTIVE: Correction(
        why="with few bits, the nearest step of each weight is not the best of all together",
        run=rounding.round_adaptively,
        sure=LIKELY,
    ),
    bias.NAME: Correction(
        why="rounding moves the mean of what a convolution or product makes, and a bias can move it back",
        run=bias.correct_biases,
        sure=SURE,
    ),
}
"""The corrections by name, in the order in which they are made."""


def correct(model: Model, solution: Solution, wanted: Sequence[str], samples: Samples) -> Draft:
    """The model and its solution after the corrections named in `wanted`, and what they did; see `keep`.

    Args:
        model: The prepared model, which stays as it is.
        solution: Scales and zero points of its plan.
        wanted: Names of corrections.
        samples: What to correct by.

    Raises:
        ModelError: The model cannot be run.
    """
    steps = [(name, one.run, one.sure) for name, one in CORRECTIONS.items() if name in wanted]
    draft = Draft(before=model, model=model, solution=solution, folds=Folds())
    return keep(draft, steps, lambda one: one, samples)


__all__ = ["CORRECTIONS", "correct"]

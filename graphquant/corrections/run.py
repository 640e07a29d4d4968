"""The table of corrections, and the ones that are asked for, made one after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from graphquant.corrections import bias, rounding
from graphquant.corrections.check import FEWEST, errors, expected, worse
from graphquant.corrections.types import Corrected, Correction, Draft
from graphquant.ir import check
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
    ),
    rounding.ADAPTIVE: Correction(
        why="with few bits, the nearest step of each weight is not the best of all together",
        run=rounding.round_adaptively,
    ),
    bias.NAME: Correction(
        why="rounding moves the mean of what a convolution or product makes, and a bias can move it back",
        run=bias.correct_biases,
        doubtful=True,
    ),
}
"""The corrections by name, in the order in which they are made."""


def correct(model: Model, solution: Solution, wanted: Sequence[str], samples: Samples) -> Draft:
    """The model and its solution after the corrections named in `wanted`, and what they did.

    A correction after which outputs are farther from the float model's, on samples that it was not made by, is left
    out; a doubtful one also where none is nearer.

    Args:
        model: The prepared model, which stays as it is.
        solution: Scales and zero points of its plan.
        wanted: Names of corrections.
        samples: What to correct by.

    Raises:
        ModelError: The model cannot be run.
    """
    draft = Draft(before=model, model=model, solution=solution, folds=Folds())
    asked = [name for name in CORRECTIONS if name in wanted]
    if len(samples.others) < FEWEST:
        few = f"there are {len(samples.others)} samples to check it with, and {FEWEST} are the least"
        return replace(draft, told=tuple(_left_out(name, few) for name in asked))
    floats = expected(draft, samples) if asked else []
    before = errors(draft, floats, samples) if asked else None
    for name in asked:
        made = CORRECTIONS[name].run(draft, samples)
        check(made.model, name)
        if not any(one.done for one in made.told[len(draft.told) :]):
            draft = replace(draft, told=made.told)
            continue
        after = errors(made, floats, samples)
        reason = worse(before, after, gain=CORRECTIONS[name].doubtful) if before is not None else ""
        if reason:
            said = f"{reason}, measured on {len(samples.others)} samples that it was not made by"
            draft = replace(draft, told=(*draft.told, _left_out(name, said)))
        else:
            draft, before = made, after
    return draft


def _left_out(name: str, reason: str) -> Corrected:
    return Corrected(correction=name, target="model", detail=f"left out: {reason}", done=False)


__all__ = ["CORRECTIONS", "correct"]

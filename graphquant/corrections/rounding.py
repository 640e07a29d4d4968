"""Weights of few bits rounded so that what they make is near to the float model's, not each weight by itself.

An op's squared error is e H e^T for a row e of rounding errors, with H = X^T X of what it reads. Nearest rounding looks
at the diagonal alone; with 4 bits the rest is worth several decibels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from graphquant.corrections.matrices import WIDEST, Form, form_of, products
from graphquant.corrections.places import own_constant, places
from graphquant.corrections.types import Corrected, Draft, Samples
from graphquant.ir import Parameters, TensorRef, Use, bulk
from graphquant.numerics import IntType, QParams, over

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.corrections.places import Place
    from graphquant.numerics import Array

COMPENSATION: Final = "error-compensation"

ADAPTIVE: Final = "adaptive-rounding"

MOST_BITS: Final = 4
"""Bits from which on nearest rounding is good enough."""

DAMPING: Final = 0.01
"""Of the mean of H's diagonal, what is added to it: the paper's own."""

SWEEPS: Final = 8
"""Times that all weights are looked at by adaptive rounding, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What a weight may become.

    Attributes:
        scale: float64, of the weight's shape, real units per step.
        zero: float64, likewise, steps.
        low: The smallest integer.
        high: The largest.
    """

    scale: Array
    zero: Array
    low: int
    high: int

    def nearest(self, weight: Array) -> Array:
        """The nearest value that can be had."""
        steps = np.clip(np.rint(weight / self.scale + self.zero), self.low, self.high)
        return np.asarray((steps - self.zero) * self.scale)

    def at(self, place: tuple[slice | int, ...]) -> Grid:
        """The grid of a part."""
        return replace(self, scale=self.scale[place], zero=self.zero[place])


@bulk()
def compensate(draft: Draft, samples: Samples) -> Draft:
    """Rounds inputs of an op one after the other and lets those that are left make up for the error.

    The float function changes: the weights are those that the integers stand for.

    Source: Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers".
    """
    return _round(draft, samples, COMPENSATION, _compensated)


@bulk()
def round_adaptively(draft: Draft, samples: Samples) -> Draft:
    """Rounds each weight up or down, whichever leaves less of the op's error beside all the others.

    The float function changes: the weights are those that the integers stand for.

    Source: Nagel et al. 2020, "Up or Down? Adaptive Rounding for Post-Training Quantization", whose local objective
    (equation 13) is minimised here one weight at a time, from nearest rounding on, instead of by gradients on a
    relaxation: it needs no step size, ends by itself, and always gives the same.
    """
    return _round(draft, samples, ADAPTIVE, _adapted)


def _round(draft: Draft, samples: Samples, name: str, rounded: Callable[[Array, Array, Grid], Array]) -> Draft:
    """Gives the weights of few bits other values, by `rounded` of matrix, H and grid."""
    model = draft.model.copy()
    parameters = Parameters(draft.before)
    told: list[Corrected] = []
    work: list[tuple[Place, TensorRef, Array, QParams, Form]] = []
    for place, params in _of_few_bits(draft):
        held = draft.before.graphs[place.graph].producer(place.weight)
        value = None if held is None else parameters.value(held)
        home = None if value is None else own_constant(draft.model, place.weight, value.shape)
        form = None if value is None else form_of(place.op, value.shape)
        if value is None or home is None:
            told.append(_left(name, place, "its weight is a variable, or others read it too"))
        elif form is None or form.split(value).shape[-1] > WIDEST:
            told.append(_left(name, place, f"how a {place.op.type} of this form multiplies is not known here"))
        else:
            work.append((place, home, value, params, form))
    read = [(_input(draft, place), place.op, form) for place, _, _, _, form in work]
    weights = dict(draft.weights)
    for (place, home, value, params, form), product in zip(work, products(draft.before, read, samples), strict=True):
        if product is None:
            told.append(_left(name, place, "no sample reaches it, or it cannot be observed"))
            continue
        made, gain = _best(value, params, form, product, rounded)
        graph = model.graphs[home.graph]
        graph.replace(replace(graph.op(home.op), value=partial(_same, made)))
        weights[place.weight] = made
        detail = f"its squared error is {gain:.0%} of that of nearest rounding"
        told.append(Corrected(correction=name, target=place.name, detail=detail))
    return replace(draft, model=model, weights=weights, told=(*draft.told, *told))


def _of_few_bits(draft: Draft) -> list[tuple[Place, QParams]]:
    """The ops whose weights have so few bits that rounding matters."""
    solution = draft.solution
    by_use = {use: index for index, site in enumerate(solution.plan.sites) for use in site.uses}
    found = []
    for place in places(draft.before, solution):
        params = solution.params.get(by_use[place.weight])
        seen = solution.plan.sites[by_use[place.weight]].view is None
        if seen and isinstance(params, QParams) and isinstance(params.type, IntType) and params.type.bits <= MOST_BITS:
            found.append((place, params))
    return found


def _input(draft: Draft, place: Place) -> TensorRef:
    """What an op multiplies by its weight."""
    read = draft.before.graphs[place.graph].producer(Use(place.graph, place.op.name, place.op.roles.index("input")))
    return read or place.output


def _best(
    value: Array, params: QParams, form: Form, product: Array, rounded: Callable[[Array, Array, Grid], Array]
) -> tuple[Array, float]:
    """The rounded weight, float32, and what is left of nearest rounding's squared error."""
    low, high = params.type.limits(narrow=params.narrow)
    wide = [over(one.astype(np.float64), params, value.shape) for one in (params.scale, params.zero_point)]
    scale, zero = (form.split(np.broadcast_to(one, value.shape)) for one in wide)
    grid = Grid(scale=scale, zero=zero, low=int(low), high=int(high))
    matrices = form.split(value.astype(np.float64))
    made = grid.nearest(matrices)
    before = after = 0.0
    for group, hessian in enumerate(product):
        matrix, part = matrices[group], grid.at((group,))
        nearest = made[group]
        other = rounded(matrix, hessian, part)
        costs = [_costs(one - matrix, hessian) for one in (nearest, other)]
        better = costs[1] < costs[0]
        made[group] = np.where(better[:, None], other, nearest)
        before += float(costs[0].sum())
        after += float(np.minimum(*costs).sum())
    return form.join(made, value.shape).astype(np.float32), after / before if before else 1.0


def _costs(errors: Array, hessian: Array) -> Array:
    """The squared error of each output, (outputs,)."""
    return np.asarray(np.einsum("oi,oi->o", errors @ hessian, errors))


def _compensated(matrix: Array, hessian: Array, grid: Grid) -> Array:
    """One group's matrix (outputs, inputs), rounded input by input."""
    count = len(hessian)
    mean = float(np.trace(hessian)) / max(count, 1) or 1.0
    damped = hessian + np.eye(count) * (DAMPING * mean)
    inverse = np.linalg.cholesky(np.linalg.inv(damped)).T
    left, made = matrix.copy(), np.empty_like(matrix)
    for column in range(count):
        made[:, column] = grid.at((slice(None), column)).nearest(left[:, column])
        error = (left[:, column] - made[:, column]) / inverse[column, column]
        left[:, column + 1 :] -= np.outer(error, inverse[column, column + 1 :])
    return made


def _adapted(matrix: Array, hessian: Array, grid: Grid) -> Array:
    """One group's matrix (outputs, inputs), each weight at one of the two steps beside it."""
    steps = matrix / grid.scale + grid.zero
    floors = np.clip(np.floor(steps), grid.low, grid.high)
    ceilings = np.clip(np.floor(steps) + 1, grid.low, grid.high)
    below, above = ((one - grid.zero) * grid.scale for one in (floors, ceilings))
    made = grid.nearest(matrix)
    slope = (made - matrix) @ hessian
    for _ in range(SWEEPS):
        moved = False
        for column in range(len(hessian)):
            here = made[:, column]
            other = np.where(here == below[:, column], above[:, column], below[:, column])
            by = other - here
            better = 2 * by * slope[:, column] + by * by * hessian[column, column] < 0
            if better.any():
                by = np.where(better, by, 0.0)
                made[:, column] = np.where(better, other, here)
                slope += np.outer(by, hessian[column])
                moved = True
        if not moved:
            break
    return made


def _same(value: Array) -> Array:
    return value


def _left(name: str, place: Place, reason: str) -> Corrected:
    return Corrected(correction=name, target=place.name, detail=reason, done=False)


__all__ = ["ADAPTIVE", "COMPENSATION", "compensate", "round_adaptively"]

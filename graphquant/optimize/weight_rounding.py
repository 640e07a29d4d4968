"""GPTQ and AdaRound: round low-bit weights to minimize the error of the op's output instead of the weight's own error.

The squared error of an op is e H e^T for a row e of rounding errors, with H = X^T X of its inputs. Rounding to nearest
minimizes only the diagonal part. With 4 bits, the rest is worth several decibels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from graphquant.ir import Parameters, TensorRef, Use, paused_gc
from graphquant.numerics import IntType, QParams, broadcast_to_tensor
from graphquant.optimize.algorithm import AlgorithmData, AlgorithmResult, WeightEdits
from graphquant.optimize.gram_matrices import MAX_GRAM_INPUTS, MatrixForm, matrix_form, measure_gram_matrices
from graphquant.optimize.weighted_ops import find_unshared_constant, find_weighted_ops

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.numerics import Array
    from graphquant.optimize.weighted_ops import WeightedOp


GPTQ: Final = "gptq"

ADAROUND: Final = "adaround"

MAX_ROUNDED_BITS: Final = 4
"""Bit width above which rounding to nearest is good enough."""

DAMPING: Final = 0.01
"""Share of the mean of H's diagonal that is added to the diagonal, as in the GPTQ paper."""

MAX_SWEEPS: Final = 8
"""Maximum number of passes over all weights in AdaRound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingGrid:
    """Integer grid of a weight.

    Attributes:
        scale: float64, of the weight's shape, real units per step.
        zero: float64, likewise, steps.
        low: Smallest integer.
        high: Largest integer.
    """

    scale: Array
    zero: Array
    low: int
    high: int

    def nearest(self, weight: Array) -> Array:
        """Round to the nearest grid value."""
        steps = np.clip(np.rint(weight / self.scale + self.zero), self.low, self.high)
        return np.asarray((steps - self.zero) * self.scale)

    def select(self, index: tuple[slice | int, ...]) -> RoundingGrid:
        """Return the grid of a part of the weight."""
        return replace(self, scale=self.scale[index], zero=self.zero[index])


@paused_gc()
def apply_gptq(edits: WeightEdits, samples: AlgorithmData) -> WeightEdits:
    """Round the inputs of an op one after the other, and compensate the error with the remaining ones.

    The float function changes: weights become the values of their integers.

    Source: Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers".
    """
    return _round_weights(edits, samples, GPTQ, _round_matrix_gptq)


@paused_gc()
def apply_adaround(edits: WeightEdits, samples: AlgorithmData) -> WeightEdits:
    """Round each weight up or down, whichever reduces the error of the op.

    The float function changes: weights become the values of their integers.

    Source: Nagel et al. 2020, "Up or Down? Adaptive Rounding for Post-Training Quantization". Its local objective
        (equation 13) is minimized by coordinate descent from rounding to nearest, instead of gradients on a relaxation.
        Coordinate descent needs no step size, terminates, and is deterministic.
    """
    return _round_weights(edits, samples, ADAROUND, _round_matrix_adaround)


def _round_weights(
    edits: WeightEdits, samples: AlgorithmData, name: str, round_matrix: Callable[[Array, Array, RoundingGrid], Array]
) -> WeightEdits:
    """Replace low-bit weights by the result of `round_matrix` for matrix, H and grid."""
    model = edits.model.copy()
    parameters = Parameters(edits.prepared_model)
    results: list[AlgorithmResult] = []
    tasks: list[tuple[WeightedOp, TensorRef, Array, QParams, MatrixForm]] = []
    for weighted, params in _find_low_bit_ops(edits):
        tensor = edits.prepared_model.graphs[weighted.graph].source_of(weighted.weight)
        value = None if tensor is None else parameters.value(tensor)
        constant = None if value is None else find_unshared_constant(edits.model, weighted.weight, value.shape)
        form = None if value is None else matrix_form(weighted.op, value.shape)
        if value is None or constant is None:
            results.append(_skipped_weight(name, weighted, "its weight is a variable, or others read it too"))
        elif form is None or form.to_matrices(value).shape[-1] > MAX_GRAM_INPUTS:
            results.append(
                _skipped_weight(name, weighted, f"how a {weighted.op.type} of this form multiplies is not known here")
            )
        else:
            tasks.append((weighted, constant, value, params, form))
    matrix_inputs = [(_find_data_input(edits, weighted), weighted.op, form) for weighted, _, _, _, form in tasks]
    weights = dict(edits.edited_weights)
    for (weighted, constant, value, params, form), gram_matrix in zip(
        tasks, measure_gram_matrices(edits.prepared_model, matrix_inputs, samples), strict=True
    ):
        if gram_matrix is None:
            results.append(_skipped_weight(name, weighted, "no sample reaches it, or it cannot be observed"))
            continue
        rounded_value, gain = _round_if_better(value, params, form, gram_matrix, round_matrix)
        graph = model.graphs[constant.graph]
        graph.replace_op(replace(graph.op(constant.op), read_value=partial(_return_value, rounded_value)))
        weights[weighted.weight] = rounded_value
        detail = f"its squared error is {gain:.0%} of that of nearest rounding"
        results.append(AlgorithmResult(algorithm=name, target=weighted.name, detail=detail))
    return replace(edits, model=model, edited_weights=weights, results=(*edits.results, *results))


def _find_low_bit_ops(edits: WeightEdits) -> list[tuple[WeightedOp, QParams]]:
    """Find the ops whose weights have few enough bits."""
    solution = edits.solution
    by_use = {use: index for index, site in enumerate(solution.plan.sites) for use in site.uses}
    low_bit_ops = []
    for weighted in find_weighted_ops(edits.prepared_model, solution):
        params = solution.params.get(by_use[weighted.weight])
        has_no_view = solution.plan.sites[by_use[weighted.weight]].view is None
        if (
            has_no_view
            and isinstance(params, QParams)
            and isinstance(params.type, IntType)
            and params.type.bits <= MAX_ROUNDED_BITS
        ):
            low_bit_ops.append((weighted, params))
    return low_bit_ops


def _find_data_input(edits: WeightEdits, weighted: WeightedOp) -> TensorRef:
    """Input that the weight multiplies."""
    tensor = edits.prepared_model.graphs[weighted.graph].source_of(
        Use(weighted.graph, weighted.op.name, weighted.op.roles.index("input"))
    )
    return tensor or weighted.output


def _round_if_better(
    value: Array,
    params: QParams,
    form: MatrixForm,
    gram_matrices: Array,
    round_matrix: Callable[[Array, Array, RoundingGrid], Array],
) -> tuple[Array, float]:
    """Return the rounded float32 weight, and its squared error relative to rounding to nearest."""
    low, high = params.type.limits(narrow=params.narrow)
    expanded = [
        broadcast_to_tensor(param_values.astype(np.float64), params, value.shape)
        for param_values in (params.scale, params.zero_point)
    ]
    scale, zero = (form.to_matrices(np.broadcast_to(expanded_value, value.shape)) for expanded_value in expanded)
    grid = RoundingGrid(scale=scale, zero=zero, low=int(low), high=int(high))
    matrices = form.to_matrices(value.astype(np.float64))
    result = grid.nearest(matrices)
    before = after = 0.0
    for group, hessian in enumerate(gram_matrices):
        matrix, group_grid = matrices[group], grid.select((group,))
        nearest = result[group]
        alternative = round_matrix(matrix, hessian, group_grid)
        costs = [_squared_output_errors(candidate - matrix, hessian) for candidate in (nearest, alternative)]
        better = costs[1] < costs[0]
        result[group] = np.where(better[:, None], alternative, nearest)
        before += float(costs[0].sum())
        after += float(np.minimum(*costs).sum())
    return form.from_matrices(result, value.shape).astype(np.float32), after / before if before else 1.0


def _squared_output_errors(errors: Array, hessian: Array) -> Array:
    """Squared error of each output, (outputs,)."""
    return np.asarray(np.einsum("oi,oi->o", errors @ hessian, errors))


def _round_matrix_gptq(matrix: Array, hessian: Array, grid: RoundingGrid) -> Array:
    """Round the matrix (outputs, inputs) of one group, input by input."""
    count = len(hessian)
    mean = float(np.trace(hessian)) / max(count, 1) or 1.0
    damped = hessian + np.eye(count) * (DAMPING * mean)
    inverse = np.linalg.cholesky(np.linalg.inv(damped)).T
    remaining, result = matrix.copy(), np.empty_like(matrix)
    for column in range(count):
        result[:, column] = grid.select((slice(None), column)).nearest(remaining[:, column])
        error = (remaining[:, column] - result[:, column]) / inverse[column, column]
        remaining[:, column + 1 :] -= np.outer(error, inverse[column, column + 1 :])
    return result


def _round_matrix_adaround(matrix: Array, hessian: Array, grid: RoundingGrid) -> Array:
    """Round the matrix (outputs, inputs) of one group to one of the two adjacent steps per weight."""
    steps = matrix / grid.scale + grid.zero
    floors = np.clip(np.floor(steps), grid.low, grid.high)
    ceilings = np.clip(np.floor(steps) + 1, grid.low, grid.high)
    below, above = ((grid_steps - grid.zero) * grid.scale for grid_steps in (floors, ceilings))
    result = grid.nearest(matrix)
    slope = (result - matrix) @ hessian
    for _ in range(MAX_SWEEPS):
        has_changed = False
        for column in range(len(hessian)):
            current = result[:, column]
            opposite = np.where(current == below[:, column], above[:, column], below[:, column])
            change = opposite - current
            better = 2 * change * slope[:, column] + change * change * hessian[column, column] < 0
            if better.any():
                change = np.where(better, change, 0.0)
                result[:, column] = np.where(better, opposite, current)
                slope += np.outer(change, hessian[column])
                has_changed = True
        if not has_changed:
            break
    return result


def _return_value(value: Array) -> Array:
    return value


def _skipped_weight(name: str, weighted: WeightedOp, reason: str) -> AlgorithmResult:
    return AlgorithmResult(algorithm=name, target=weighted.name, detail=reason, applied=False)

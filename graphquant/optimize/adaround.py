"""AdaRound: round each weight up or down, whichever reduces the output error of the op.

Source: Nagel et al. 2020, "Up or Down? Adaptive Rounding for Post-Training Quantization". Its local objective
(equation 13) is minimized by coordinate descent from rounding to nearest, instead of gradients on a relaxation.
Coordinate descent needs no step size, terminates, and is deterministic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from graphquant.ir import paused_gc
from graphquant.optimize.gram_matrices import RoundingGrid, round_low_bit_weights

if TYPE_CHECKING:
    from graphquant.numerics import Array
    from graphquant.optimize.algorithm import AlgorithmData, WeightEdits

ADAROUND: Final = "adaround"

MAX_SWEEPS: Final = 8
"""Maximum number of passes over all weights."""


@paused_gc()
def apply_adaround(edits: WeightEdits, samples: AlgorithmData) -> WeightEdits:
    """Round low-bit weights by AdaRound. The float function changes: weights become the values of their integers."""
    return round_low_bit_weights(edits, samples, ADAROUND, round_matrix_adaround)


def round_matrix_adaround(matrix: Array, hessian: Array, grid: RoundingGrid) -> Array:
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

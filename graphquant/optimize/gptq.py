"""GPTQ: round the weights of an op one input after the other, and compensate each error with the remaining inputs.

Source: Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from graphquant.ir import paused_gc
from graphquant.optimize.gram_matrices import RoundingGrid, round_low_bit_weights

if TYPE_CHECKING:
    from graphquant.numerics import Array
    from graphquant.optimize.algorithm import AlgorithmData, WeightEdits

GPTQ: Final = "gptq"

DAMPING: Final = 0.01
"""Share of the mean of H's diagonal that is added to the diagonal, as in the paper."""


@paused_gc()
def apply_gptq(edits: WeightEdits, samples: AlgorithmData) -> WeightEdits:
    """Round low-bit weights by GPTQ. The float function changes: weights become the values of their integers."""
    return round_low_bit_weights(edits, samples, GPTQ, round_matrix_gptq)


def round_matrix_gptq(matrix: Array, hessian: Array, grid: RoundingGrid) -> Array:
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

"""Scale and zero point of a scheme that is given by keywords."""

from typing import Any

import numpy as np

from graphquant.numerics import IntType, QParams, QType, QuantizationGrid, Range

UINT8 = IntType(8, signed=False)


def choose_qparams(
    observed: Range, dtype: QType, *, axis: int | None = None, block: int | None = None, **scheme: Any
) -> QParams:
    """Choose the parameters of a type for an observed range; `scheme` are the fields of a grid."""
    return QuantizationGrid(type=dtype, **scheme).qparams(observed, axis=axis, block=block)


def asymmetric_qparams(low: float, high: float, dtype: IntType = UINT8) -> QParams:
    """Return the parameters of an asymmetric type for a range."""
    return choose_qparams(Range(np.array(low), np.array(high)), dtype, symmetric=False)

"""Scale and zero point of a scheme that is given by keywords."""

from typing import Any

from graphquant.numerics import QParams, QType, QuantizationGrid, Range


def choose_qparams(
    observed: Range, dtype: QType, *, axis: int | None = None, block: int | None = None, **scheme: Any
) -> QParams:
    """Choose the parameters of a type for an observed range; `scheme` are the fields of a grid."""
    return QuantizationGrid(type=dtype, **scheme).qparams(observed, axis=axis, block=block)

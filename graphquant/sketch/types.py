"""What calibration keeps of a tensor.

A `Sketch` has a fixed size whatever the number of samples, and merging two of them is exact, commutative and
associative, so the result does not depend on batches or their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from graphquant.numerics import Array


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """The statistics of a tensor.

    Attributes:
        low: Smallest finite value, float64, () or (C,); +inf where nothing was seen.
        high: Largest finite value, the same shape; -inf where nothing was seen.
        count: Number of values seen, all channels together.
        nan: How many of them were NaN.
        inf: How many were infinite.
    """

    low: Array
    high: Array
    count: int = 0
    nan: int = 0
    inf: int = 0

    @property
    def empty(self) -> bool:
        """Whether no finite value was seen in some channel."""
        return bool((self.low > self.high).any())

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Sketch)
            and np.array_equal(self.low, other.low)
            and np.array_equal(self.high, other.high)
            and (self.count, self.nan, self.inf) == (other.count, other.nan, other.inf)
        )

    __hash__ = None  # type: ignore[assignment]  # arrays have no hash


EMPTY = Sketch(np.array(np.inf), np.array(-np.inf))


def sketch(values: npt.NDArray[Any], axis: int | None = None) -> Sketch:
    """The statistics of `values` (a float array of any shape), per channel of `axis` if that is given."""
    values = np.asarray(values)
    over = None if axis is None else tuple(i for i in range(values.ndim) if i != axis % values.ndim)
    shape = () if axis is None else (values.shape[axis],)
    if values.size == 0:
        return Sketch(np.full(shape, np.inf), np.full(shape, -np.inf))
    with np.errstate(invalid="ignore"):  # some float types warn of NaN, which is counted below
        low, high = values.min(axis=over).astype(np.float64), values.max(axis=over).astype(np.float64)
    if np.isfinite(low).all() and np.isfinite(high).all():
        return Sketch(low, high, values.size)
    wide = values.astype(np.float64, copy=False)
    finite = np.isfinite(wide)
    nan = int(np.isnan(wide).sum())
    return Sketch(
        np.where(finite, wide, np.inf).min(axis=over),
        np.where(finite, wide, -np.inf).max(axis=over),
        values.size,
        nan,
        int(values.size - finite.sum() - nan),
    )


def merge(one: Sketch, other: Sketch) -> Sketch:
    """The statistics of both together."""
    return Sketch(
        np.minimum(one.low, other.low),
        np.maximum(one.high, other.high),
        one.count + other.count,
        one.nan + other.nan,
        one.inf + other.inf,
    )

"""What calibration keeps of a tensor, and the observers that turn it into a range.

A `Sketch` has a fixed size whatever the number of samples, and merging two of them is exact, commutative and
associative, so the result does not depend on batches or their order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphquant.errors import DataError
from graphquant.numerics import LARGEST_VALUE, Array, IntType, Range

if TYPE_CHECKING:
    from collections.abc import Callable


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


@dataclass(frozen=True, slots=True)
class Observer:
    """One way to pick a range.

    Attributes:
        explains: One sentence for people.
        arguments: The arguments a scheme must give it.
        needs_values: Whether it looks at values at all; one that does not needs no data.
        pick: (sketch, type, narrow, arguments) to the range.
    """

    explains: str
    arguments: frozenset[str]
    needs_values: bool
    pick: Callable[[Sketch, IntType, bool, dict[str, float]], Range]


def _seen(stats: Sketch) -> Range:
    if stats.empty:
        raise DataError("no finite value was ever seen")
    return Range(stats.low, stats.high)


def _minmax(stats: Sketch, _type: IntType, _narrow: bool, _args: dict[str, float]) -> Range:
    return _seen(stats)


def _absmax(stats: Sketch, _type: IntType, _narrow: bool, _args: dict[str, float]) -> Range:
    seen = _seen(stats)
    largest = np.maximum(np.abs(seen.low), np.abs(seen.high))
    return Range(-largest, largest)


def _fixed(_stats: Sketch, _type: IntType, _narrow: bool, args: dict[str, float]) -> Range:
    return Range(np.array(args["low"]), np.array(args["high"]))


def _fixed_point(_stats: Sketch, dtype: IntType, narrow: bool, args: dict[str, float]) -> Range:
    qmin, qmax = dtype.limits(narrow=narrow)
    exponent = int(args["exponent"])
    low, high = (math.ldexp(limit - dtype.middle, exponent) for limit in (qmin, qmax))
    if max(-low, high) > LARGEST_VALUE:
        raise DataError(f"{dtype.name} with a scale of 2**{exponent} goes beyond float32")
    return Range(np.array(low), np.array(high))


def _bias(_stats: Sketch, _type: IntType, _narrow: bool, _args: dict[str, float]) -> Range:
    raise DataError("a bias has the scales of its consumer's input and weight, and those are not quantized")


OBSERVERS: dict[str, Observer] = {
    "minmax": Observer("from the smallest to the largest value seen", frozenset(), True, _minmax),
    "absmax": Observer("plus and minus the largest magnitude seen", frozenset(), True, _absmax),
    "fixed": Observer("from `low` to `high`, as the rule says", frozenset({"low", "high"}), False, _fixed),
    "fixed-point": Observer(
        "all that the type can represent with a scale of exactly 2**exponent",
        frozenset({"exponent"}),
        False,
        _fixed_point,
    ),
    "bias": Observer("scale of the consumer's input times scale of its weight", frozenset(), False, _bias),
}

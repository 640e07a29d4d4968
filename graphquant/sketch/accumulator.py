"""The form of a sketch that calibration adds values to."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.errors import DataError
from graphquant.numerics import LARGEST_VALUE
from graphquant.sketch import kernel
from graphquant.sketch.histogram import Histogram
from graphquant.sketch.types import Sketch, check_channels

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graphquant.numerics import Array
    from graphquant.sketch.kernel import Job

UNIT = 1074
"""Every float64 is a whole number of times 2**-1074."""


class Accumulator:
    """Gathers the statistics of one tensor. Different threads may add to different accumulators at once."""

    def __init__(self, axis: int | None = None, bits: int = 0) -> None:
        """Of no values yet.

        Args:
            axis: The axis of which each channel has ends of its own; None: the whole tensor has.
            bits: Mantissa bits of the histogram, one of `BITS`; there is none per channel.
        """
        self._axis = axis
        self._histogram = Histogram(bits) if bits and axis is None else None
        self._bits = bits if axis is None else 0
        self._low, self._high = np.array(np.inf), np.array(-np.inf)
        self._block_low: Any = np.inf
        self._block_high: Any = -np.inf
        self._count = self._nan = self._inf = self._blank = 0
        self._blocks = self._low_sum = self._high_sum = 0

    def add(self, values: Array) -> None:
        """Counts the values of a float array of any shape; one without values is counted as such.

        Raises:
            DataError: The axis is missing, or has another number of channels than before.
        """
        if not values.size:
            self._blank += 1
            return
        over = self._others(values)
        values = _wide(values)
        if self._histogram is not None and values.dtype == np.float32:
            low, high, finite = self._histogram.add(values)
        else:
            low, high = values.min(axis=over), values.max(axis=over)
            finite = isfinite(low) and isfinite(high) if over is None else bool(np.isfinite([low, high]).all())
        self._found(values, low, high, finite=finite, over=over)

    def job(self, values: Array) -> Job | None:
        """What is to be told the kernel, which then must be told, to add `values`; None where that is not all."""
        if values.dtype != np.float32 or not 0 < values.size <= kernel.ROOM or self._axis is not None:
            return None
        flags = values.flags
        if not (flags.c_contiguous and flags.aligned):
            return None
        flat = values.reshape(-1)
        return (flat, 0, None) if self._histogram is None else self._histogram.job(flat)

    def done(self, values: Array, low: float, high: float, *, finite: bool) -> None:
        """Takes over what the kernel found in `values`."""
        if finite:
            self._count += values.size
            self._block_low, self._block_high = min(self._block_low, low), max(self._block_high, high)
            return
        if self._histogram is not None:
            self._histogram.leave_out()
        self._found(values, low, high, finite=False, over=None)

    def _found(self, values: Array, low: Any, high: Any, *, finite: bool, over: tuple[int, ...] | None) -> None:
        """Takes over the ends of `values`, which mean nothing where not all are finite."""
        self._count += values.size
        if not finite:
            which = np.isfinite(values)
            nan = int(np.isnan(values).sum())
            self._nan += nan
            self._inf += int(values.size - which.sum()) - nan
            low = values.min(axis=over, initial=np.inf, where=which)
            high = values.max(axis=over, initial=-np.inf, where=which)
            values = values if self._histogram is None else values[which]
        self._widen(low, high)
        if self._histogram is not None and values.dtype != np.float32:
            self._histogram.add(np.clip(values, -LARGEST_VALUE, LARGEST_VALUE).astype(np.float32))

    def _others(self, values: Array) -> tuple[int, ...] | None:
        """All axes but the channels'; None: all."""
        if self._axis is None:
            return None
        if not -values.ndim <= self._axis < values.ndim:
            raise DataError(
                f"a tensor of shape {values.shape} has no axis {self._axis} for one range per channel."
                ' Give it one range in all, with per = "tensor".'
            )
        return tuple(axis for axis in range(values.ndim) if axis != self._axis % values.ndim)

    def _widen(self, low: Any, high: Any) -> None:
        """Takes the ends of new values into those of the open block."""
        if self._axis is None:  # on scalars, Python is ten times as fast
            self._block_low, self._block_high = min(self._block_low, low), max(self._block_high, high)
            return
        for known in (self._low, self._block_low):
            check_channels(known if np.ndim(known) else low, low)
        self._block_low, self._block_high = np.minimum(self._block_low, low), np.maximum(self._block_high, high)

    def close_block(self) -> None:
        """Ends a block of samples: its smallest and largest values enter the sums that their mean is taken of.

        A block without a finite value is none, and channels have no such sums.
        """
        low, high = self._block_low, self._block_high
        if self._axis is None and low <= high:
            self._blocks += 1
            self._low_sum += _units(float(low))
            self._high_sum += _units(float(high))
        self._low, self._high = self._ends()
        self._block_low, self._block_high = np.inf, -np.inf

    def _ends(self) -> tuple[Array, Array]:
        """The ends of all values so far; -0.0, which comes or not with the order of values, becomes 0.0."""
        low, high = np.minimum(self._low, self._block_low), np.maximum(self._high, self._block_high)
        return np.asarray(low + 0.0), np.asarray(high + 0.0)

    def sketch(self) -> Sketch:
        """The statistics of all values so far; an open block is not among the blocks."""
        low, high = self._ends()
        read = () if self._histogram is None else zip(("bins", "counts", "sums"), self._histogram.read(), strict=True)
        return Sketch(
            low=low,
            high=high,
            count=self._count,
            nan=self._nan,
            inf=self._inf,
            blank=self._blank,
            bits=self._bits,
            blocks=self._blocks,
            low_sum=self._low_sum,
            high_sum=self._high_sum,
            **dict(read),
        )


def add_each(work: Iterable[tuple[Accumulator, list[Array]]]) -> None:
    """Adds arrays to accumulators, as `add` does, but for the most part without coming back to Python in between.

    Raises:
        DataError: An axis is missing, or has another number of channels than before.
    """
    jobs, whose = [], []
    for accumulator, arrays in work:
        job = accumulator.job(arrays[0]) if len(arrays) == 1 else None
        if job is not None:
            jobs.append(job)
            whose.append((accumulator, arrays[0]))
            continue
        for values in arrays:
            accumulator.add(values)
    for (accumulator, values), (low, high, finite) in zip(whose, kernel.fill_all(jobs), strict=True):
        accumulator.done(values, low, high, finite=finite)


def _wide(values: Array) -> Array:
    """The same values as float32, or as float64 where float32 does not hold them all."""
    if values.dtype == np.float32:
        return values
    with np.errstate(invalid="ignore"):  # casts of NaN, which is counted later
        return values.astype(np.float32 if np.can_cast(values.dtype, np.float32) else np.float64, copy=False)


def _units(value: float) -> int:
    """A float as a whole number of 2**-1074."""
    numerator, denominator = value.as_integer_ratio()
    return (numerator << UNIT) // denominator


def sketch(values: Array, axis: int | None = None, *, bits: int = 0) -> Sketch:
    """The statistics of `values`, a float array of any shape, as one block.

    Args:
        values: The array.
        axis: The axis of which each channel has ends of its own; None: the whole array has.
        bits: Mantissa bits of the histogram, one of `BITS`; there is none per channel.

    Raises:
        DataError: The array has no such axis.
    """
    gathering = Accumulator(axis, bits)
    gathering.add(np.asarray(values))
    gathering.close_block()
    return gathering.sketch()

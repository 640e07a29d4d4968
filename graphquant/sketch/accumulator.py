"""The form of a sketch that calibration adds values to."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from graphquant.errors import DataError
from graphquant.numerics import LARGEST_VALUE
from graphquant.sketch.kernel import fill, new_table
from graphquant.sketch.types import MANTISSA, Sketch, check_channels

if TYPE_CHECKING:
    from graphquant.numerics import Array

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
        self._bits = bits if axis is None else 0
        self._low, self._high = np.array(np.inf), np.array(-np.inf)
        self._block_low, self._block_high = self._low, self._high
        self._count = self._nan = self._inf = 0
        self._blocks = self._low_sum = self._high_sum = 0
        self._table: Array | None = None

    def add(self, values: Array) -> None:
        """Counts the values of a float array of any shape; one without values counts as nothing.

        Raises:
            DataError: The axis is missing, or has another number of channels than before.
        """
        if not values.size:
            return
        over = self._others(values)
        if values.dtype != np.float32:
            values = _wide(values)
        low, high = values.min(axis=over), values.max(axis=over)
        self._count += values.size
        if not (_finite(low) and _finite(high)):
            finite = np.isfinite(values)
            nan = int(np.isnan(values).sum())
            self._nan += nan
            self._inf += int(values.size - finite.sum()) - nan
            low = values.min(axis=over, initial=np.inf, where=finite)
            high = values.max(axis=over, initial=-np.inf, where=finite)
            values = values[finite] if self._bits else values
        self._widen(low, high)
        if self._bits:
            self._bin(values)

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

    def _widen(self, low: Array, high: Array) -> None:
        """Takes the ends of new values into those of the open block."""
        if low.ndim:
            for known in (self._low, self._block_low):
                check_channels(known if known.ndim else low, low)
        self._block_low, self._block_high = np.minimum(self._block_low, low), np.maximum(self._block_high, high)

    def _bin(self, values: Array) -> None:
        """Counts finite values in the histogram."""
        if self._table is None:
            self._table = new_table(self._bits)
        if values.dtype != np.float32:
            values = np.clip(values, -LARGEST_VALUE, LARGEST_VALUE).astype(np.float32)
        fill(values.ravel(order="K").view(np.uint32), MANTISSA - self._bits, self._table)

    def close_block(self) -> None:
        """Ends a block of samples: its smallest and largest values enter the sums that their mean is taken of.

        A block without a finite value is none, and channels have no such sums.
        """
        low, high = self._block_low, self._block_high
        if not low.ndim and low <= high:
            self._blocks += 1
            self._low_sum += _units(float(low))
            self._high_sum += _units(float(high))
        self._low, self._high = self._ends()
        self._block_low, self._block_high = np.array(np.inf), np.array(-np.inf)

    def _ends(self) -> tuple[Array, Array]:
        """The ends of all values so far; -0.0, which comes or not with the order of values, becomes 0.0."""
        low, high = np.minimum(self._low, self._block_low), np.maximum(self._high, self._block_high)
        return np.asarray(low + 0.0), np.asarray(high + 0.0)

    def sketch(self) -> Sketch:
        """The statistics of all values so far; an open block is not among the blocks."""
        low, high = self._ends()
        table = np.zeros((0, 2), np.uint64) if self._table is None else self._table
        bins = np.flatnonzero(table[:, 0])
        return Sketch(
            low=low,
            high=high,
            count=self._count,
            nan=self._nan,
            inf=self._inf,
            bits=self._bits,
            bins=bins.astype(np.uint32),
            counts=table[bins, 0].astype(np.int64),
            sums=table[bins, 1],
            blocks=self._blocks,
            low_sum=self._low_sum,
            high_sum=self._high_sum,
        )


def _wide(values: Array) -> Array:
    """The same values as float32, or as float64 where float32 does not hold them all."""
    with np.errstate(invalid="ignore"):  # casts of NaN, which is counted later
        return values.astype(np.float32 if np.can_cast(values.dtype, np.float32) else np.float64, copy=False)


def _finite(ends: Array) -> bool:
    """Whether all ends are; those of a whole tensor are a scalar, for which math is ten times as fast."""
    return bool(np.isfinite(ends).all()) if ends.ndim else math.isfinite(ends)


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

"""What calibration keeps of a tensor.

A `Sketch` has a bounded size whatever the number of samples, and merging two of them is exact, commutative and
associative, so the result does not depend on batches or their order.

Its histogram needs no range in advance: a value's bin is the top of its float32 bit pattern (sign, exponent and
`bits` bits of mantissa), so a bin is at most 2**-bits wide relative to its values. Each bin sums the mantissa bits that
were dropped, as an integer, so that the mean of its values is known exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.errors import DataError, InternalError
from graphquant.numerics import LARGEST_VALUE
from graphquant.observers import histogram_kernel

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from graphquant.numerics import Array
    from graphquant.observers.histogram_kernel import KernelJob


MANTISSA_BITS = 23
"""Mantissa bits of a float32."""

HISTOGRAM_BITS = (0, 7, 10)
"""Mantissa bits that a histogram can keep; 0: there is none. 7 serve 8-bit types, 10 wider ones."""


def _no_bins() -> Array:
    return np.zeros(0, np.uint32)


def _no_counts() -> Array:
    return np.zeros(0, np.int64)


def _no_sums() -> Array:
    return np.zeros(0, np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """The statistics of a tensor.

    Attributes:
        low: Smallest finite value, float64, () or (C,); +inf where nothing was seen.
        high: Largest finite value, the same shape; -inf where nothing was seen.
        count: Number of values seen, all channels together.
        nan: How many of them were NaN.
        inf: How many were infinite.
        empty_arrays: How many arrays without any value there were beside them.
        bits: Mantissa bits of the histogram's bins, one of `BITS`; always 0 per channel.
        bins: uint32 (K,), ascending: the bins that hold values, each as float32 bit pattern >> (23 - bits). A float64
            is binned as the nearest float32, the largest finite one if it is beyond.
        counts: int64 (K,): the number of values in each bin; together all finite ones.
        sums: uint64 (K,): in each bin the sum of the low 23 - bits mantissa bits of its values.
        blocks: How many blocks of samples had a finite value; always 0 per channel.
        low_sum: The sum over these blocks of the block's smallest value, exact, in units of 2**-1074.
        high_sum: The same of the largest.
    """

    low: Array
    high: Array
    count: int = 0
    nan: int = 0
    inf: int = 0
    empty_arrays: int = 0
    bits: int = 0
    bins: Array = field(default_factory=_no_bins)
    counts: Array = field(default_factory=_no_counts)
    sums: Array = field(default_factory=_no_sums)
    blocks: int = 0
    low_sum: int = 0
    high_sum: int = 0

    def __post_init__(self) -> None:
        if self.low.shape != self.high.shape or self.low.ndim > 1:
            raise InternalError(f"a Sketch of shapes {self.low.shape} and {self.high.shape} was made.")
        if self.bits not in HISTOGRAM_BITS or (self.bits and self.low.ndim):
            raise InternalError(f"a Sketch with {self.bits} bits for ends of shape {self.low.shape} was made.")
        if not (self.bins.shape == self.counts.shape == self.sums.shape == (self.bins.size,)):
            raise InternalError("a Sketch whose bins, counts and sums differ in number was made.")
        if self.counts.sum() != (self.count - self.nan - self.inf if self.bits else 0):
            raise InternalError("a Sketch whose bins do not hold each finite value once was made.")

    @property
    def empty(self) -> bool:
        """Whether no finite value was seen in some channel."""
        return bool((self.low > self.high).any())

    def __eq__(self, value: object) -> bool:
        return (
            isinstance(value, Sketch)
            and all(np.array_equal(getattr(self, name), getattr(value, name)) for name in SKETCH_ARRAYS)
            and all(getattr(self, name) == getattr(value, name) for name in SKETCH_NUMBERS)
        )

    __hash__ = None  # type: ignore[assignment]  # arrays have no hash


SKETCH_ARRAYS = ("low", "high", "bins", "counts", "sums")
SKETCH_NUMBERS = ("count", "nan", "inf", "empty_arrays", "bits", "blocks", "low_sum", "high_sum")

EMPTY_SKETCH = Sketch(np.array(np.inf), np.array(-np.inf))
"""Of no values at all; merging it changes nothing."""


def merge_sketches(first: Sketch, second: Sketch) -> Sketch:
    """The statistics of both together, with the coarser of their histograms.

    One of no values changes nothing but the number of arrays without any.

    Raises:
        DataError: One is per channel and the other is not, or has another number of channels.
    """
    if not (first.count and second.count):
        larger = max(first, second, key=lambda sketch: (sketch.count, -sketch.bits, sketch.low.shape))
        return replace(larger, empty_arrays=first.empty_arrays + second.empty_arrays)
    check_same_channels(first.low, second.low)
    bits = min(first.bits, second.bits)
    coarsened = [coarsen_histogram(sketch, bits) for sketch in (first, second)]
    bins, counts, sums = merge_bins(
        np.concatenate([sketch.bins for sketch in coarsened]),
        np.concatenate([sketch.counts for sketch in coarsened]),
        np.concatenate([sketch.sums for sketch in coarsened]),
    )
    return Sketch(
        low=np.minimum(first.low, second.low),
        high=np.maximum(first.high, second.high),
        count=first.count + second.count,
        nan=first.nan + second.nan,
        inf=first.inf + second.inf,
        empty_arrays=first.empty_arrays + second.empty_arrays,
        bits=bits,
        bins=bins,
        counts=counts,
        sums=sums,
        blocks=first.blocks + second.blocks,
        low_sum=first.low_sum + second.low_sum,
        high_sum=first.high_sum + second.high_sum,
    )


def check_same_channels(first: Array, second: Array) -> None:
    """Refuses ends of different shapes, which are for different numbers of channels."""
    if first.shape != second.shape:
        shapes = f"{first.shape} and {second.shape}"
        raise DataError(
            f"the numbers of channels of a tensor differ between samples: its ranges have the shapes {shapes}."
            ' Give it one range in all, with per = "tensor".'
        )


def coarsen_histogram(sketch: Sketch, bits: int) -> Sketch:
    """The sketch as it were had its histogram kept only `bits` mantissa bits; 0: none at all.

    Raises:
        InternalError: The histogram has fewer bits than that.
    """
    if bits > sketch.bits:
        raise InternalError(f"a histogram of {sketch.bits} mantissa bits was to be made one of {bits}.")
    if bits == sketch.bits:
        return sketch
    if not bits:
        return replace(sketch, bits=0, bins=_no_bins(), counts=_no_counts(), sums=_no_sums())
    dropped_bits = sketch.bits - bits
    dropped_mantissa = (sketch.bins & ((1 << dropped_bits) - 1)).astype(np.uint64) << np.uint64(
        MANTISSA_BITS - sketch.bits
    )
    sums = sketch.sums + dropped_mantissa * sketch.counts.astype(np.uint64)
    bins, counts, sums = merge_bins(sketch.bins >> dropped_bits, sketch.counts, sums)
    return replace(sketch, bits=bits, bins=bins, counts=counts, sums=sums)


def merge_bins(bins: Array, counts: Array, sums: Array) -> tuple[Array, Array, Array]:
    """Each bin once, ascending, with all that was in it."""
    unique_bins, bin_index = np.unique(bins, return_inverse=True)
    all_counts, all_sums = np.zeros(unique_bins.size, np.int64), np.zeros(unique_bins.size, np.uint64)
    np.add.at(all_counts, bin_index, counts)
    np.add.at(all_sums, bin_index, sums)
    return unique_bins, all_counts, all_sums


def bin_means(sketch: Sketch) -> Array:
    """The mean of the values in each bin, float64 (K,), in the tensor's unit, to one unit in the last place."""
    pattern = sketch.bins << (MANTISSA_BITS - sketch.bits)
    exponent = (pattern >> MANTISSA_BITS & 0xFF).astype(np.int64)
    mantissa = (pattern & 0x7FFFFF) + ((exponent > 0) << MANTISSA_BITS)
    whole, rest = np.divmod(sketch.sums, sketch.counts.astype(np.uint64))
    mean = (mantissa + whole).astype(np.float64) + rest / sketch.counts
    signed: Array = np.where(pattern >> 31, -mean, mean)
    return np.asarray(np.ldexp(signed, np.maximum(exponent, 1) - 150))


def bin_edges(sketch: Sketch) -> tuple[Array, Array]:
    """The smallest and the largest float32 that go into each bin, float64 (K,) each, in the tensor's unit."""
    near = sketch.bins << (MANTISSA_BITS - sketch.bits)  # the end of the bin nearer to zero
    far = near | ((1 << (MANTISSA_BITS - sketch.bits)) - 1)
    ends = [pattern.astype(np.uint32).view(np.float32).astype(np.float64) for pattern in (near, far)]
    return np.minimum(*ends), np.maximum(*ends)


# The form of a histogram that values are added to.


class HistogramBuilder:
    """Counts values by the top of their bit pattern, in a table whose entries are emptied before they can overflow."""

    def __init__(self, bits: int) -> None:
        """Of no values yet; `bits` are the mantissa bits of its bins."""
        self._bits, self._shift = bits, MANTISSA_BITS - bits
        self._table = histogram_kernel.new_histogram_table(bits)
        self._free_capacity = histogram_kernel.TABLE_CAPACITY
        self._spilled: list[tuple[Array, Array, Array]] = []

    def add(self, values: Array) -> tuple[float, float, bool]:
        """Counts the finite ones of `values`, float32 of any shape.

        Returns:
            The smallest and the largest, and whether all are finite; if not, the two mean nothing.
        """
        flat = values.ravel(order="K")
        flat = flat if flat.flags.aligned else flat.copy()
        if flat.size <= histogram_kernel.TABLE_CAPACITY:
            return self._count_chunk(flat)
        chunks = [
            self._count_chunk(flat[start : start + histogram_kernel.TABLE_CAPACITY])
            for start in range(0, flat.size, histogram_kernel.TABLE_CAPACITY)
        ]
        lows, highs, finite = zip(*chunks, strict=True)
        return min(lows), max(highs), all(finite)

    def _count_chunk(self, values: Array) -> tuple[float, float, bool]:
        """The same for no more values than a table has room for."""
        result = histogram_kernel.count_values(*self.kernel_job(values))
        if not result[2]:
            self.discard_nonfinite()
        return result

    def kernel_job(self, values: Array) -> tuple[Array, int, Array]:
        """What is to be told the kernel, which then must be told, to count `values`, no more than there is room for."""
        if values.size > self._free_capacity:
            self._spill_full_entries()
        self._free_capacity -= values.size
        return values, self._shift, self._table

    def discard_nonfinite(self) -> None:
        """Forgets values that are not finite, which the kernel counts with the others."""
        for code in (0x0FF, 0x1FF):  # sign and exponent of infinities and NaN
            self._table[code << self._bits : code + 1 << self._bits] = 0

    def _spill_full_entries(self) -> None:
        """Takes full entries out of the table; they are few, as only such bins have them that most values are in."""
        full = histogram_kernel.occupied_entries(self._table, histogram_kernel.FULL_ENTRY)
        if full.size:
            self._spilled = [_merge_bin_parts([*self._spilled, histogram_kernel.unpack_entries(self._table, full)])]
            self._table[full] = 0
        self._free_capacity = histogram_kernel.TABLE_CAPACITY

    def bins(self) -> tuple[Array, Array, Array]:
        """The bins that hold values, uint32 (K,), ascending, their counts, int64 (K,), and sums, uint64 (K,)."""
        return _merge_bin_parts(
            [
                *self._spilled,
                histogram_kernel.unpack_entries(self._table, histogram_kernel.occupied_entries(self._table)),
            ]
        )


def _merge_bin_parts(bin_sets: Sequence[tuple[Array, Array, Array]]) -> tuple[Array, Array, Array]:
    """Bins, counts and sums of all parts, each bin once."""
    return bin_sets[0] if len(bin_sets) == 1 else merge_bins(*map(np.concatenate, zip(*bin_sets, strict=True)))


# The form of a sketch that calibration adds values to.

SUBNORMAL_EXPONENT = 1074
"""Every float64 is a whole number of times 2**-1074."""


class SketchAccumulator:
    """Gathers the statistics of one tensor. Different threads may add to different accumulators at once."""

    def __init__(self, axis: int | None = None, bits: int = 0) -> None:
        """Of no values yet.

        Args:
            axis: The axis of which each channel has ends of its own; None: the whole tensor has.
            bits: Mantissa bits of the histogram, one of `BITS`; there is none per channel.
        """
        self._axis = axis
        self._histogram = HistogramBuilder(bits) if bits and axis is None else None
        self._bits = bits if axis is None else 0
        self._low, self._high = np.array(np.inf), np.array(-np.inf)
        self._block_low: Any = np.inf
        self._block_high: Any = -np.inf
        self._count = self._nan = self._inf = self._empty_arrays = 0
        self._blocks = self._low_sum = self._high_sum = 0

    def add(self, values: Array) -> None:
        """Counts the values of a float array of any shape; one without values is counted as such.

        Raises:
            DataError: The axis is missing, or has another number of channels than before.
        """
        if not values.size:
            self._empty_arrays += 1
            return
        reduced_axes = self._reduced_axes(values)
        values = _as_kernel_float(values)
        if self._histogram is not None and values.dtype == np.float32:
            low, high, finite = self._histogram.add(values)
        else:
            low, high = values.min(axis=reduced_axes), values.max(axis=reduced_axes)
            finite = isfinite(low) and isfinite(high) if reduced_axes is None else bool(np.isfinite([low, high]).all())
        self._merge_limits(values, low, high, finite=finite, reduced_axes=reduced_axes)

    def kernel_job(self, values: Array) -> KernelJob | None:
        """What is to be told the kernel, which then must be told, to add `values`; None where that is not all."""
        if (
            values.dtype != np.float32
            or not 0 < values.size <= histogram_kernel.TABLE_CAPACITY
            or self._axis is not None
        ):
            return None
        flags = values.flags
        if not (flags.c_contiguous and flags.aligned):
            return None
        flat = values.reshape(-1)
        return (flat, 0, None) if self._histogram is None else self._histogram.kernel_job(flat)

    def merge_kernel_result(self, values: Array, low: float, high: float, *, finite: bool) -> None:
        """Takes over what the kernel found in `values`."""
        if finite:
            self._count += values.size
            self._block_low, self._block_high = min(self._block_low, low), max(self._block_high, high)
            return
        if self._histogram is not None:
            self._histogram.discard_nonfinite()
        self._merge_limits(values, low, high, finite=False, reduced_axes=None)

    def _merge_limits(
        self, values: Array, low: Any, high: Any, *, finite: bool, reduced_axes: tuple[int, ...] | None
    ) -> None:
        """Takes over the ends of `values`, which mean nothing where not all are finite."""
        self._count += values.size
        if not finite:
            is_finite = np.isfinite(values)
            nan = int(np.isnan(values).sum())
            self._nan += nan
            self._inf += int(values.size - is_finite.sum()) - nan
            low = values.min(axis=reduced_axes, initial=np.inf, where=is_finite)
            high = values.max(axis=reduced_axes, initial=-np.inf, where=is_finite)
            values = values if self._histogram is None else values[is_finite]
        self._widen_open_block(low, high)
        if self._histogram is not None and values.dtype != np.float32:
            self._histogram.add(np.clip(values, -LARGEST_VALUE, LARGEST_VALUE).astype(np.float32))

    def _reduced_axes(self, values: Array) -> tuple[int, ...] | None:
        """All axes but the channels'; None: all."""
        if self._axis is None:
            return None
        if not -values.ndim <= self._axis < values.ndim:
            raise DataError(
                f"a tensor of shape {values.shape} has no axis {self._axis} for one range per channel."
                ' Give it one range in all, with per = "tensor".'
            )
        return tuple(axis for axis in range(values.ndim) if axis != self._axis % values.ndim)

    def _widen_open_block(self, low: Any, high: Any) -> None:
        """Takes the ends of new values into those of the open block."""
        if self._axis is None:  # on scalars, Python is ten times as fast
            self._block_low, self._block_high = min(self._block_low, low), max(self._block_high, high)
            return
        for limits in (self._low, self._block_low):
            check_same_channels(limits if np.ndim(limits) else low, low)
        self._block_low, self._block_high = np.minimum(self._block_low, low), np.maximum(self._block_high, high)

    def close_block(self) -> None:
        """Ends a block of samples: its smallest and largest values enter the sums that their mean is taken of.

        A block without a finite value is none, and channels have no such sums.
        """
        low, high = self._block_low, self._block_high
        if self._axis is None and low <= high:
            self._blocks += 1
            self._low_sum += _to_exact_integer(float(low))
            self._high_sum += _to_exact_integer(float(high))
        self._low, self._high = self._overall_limits()
        self._block_low, self._block_high = np.inf, -np.inf

    def _overall_limits(self) -> tuple[Array, Array]:
        """The ends of all values so far; -0.0, which comes or not with the order of values, becomes 0.0."""
        low, high = np.minimum(self._low, self._block_low), np.maximum(self._high, self._block_high)
        return np.asarray(low + 0.0), np.asarray(high + 0.0)

    def to_sketch(self) -> Sketch:
        """The statistics of all values so far; an open block is not among the blocks."""
        low, high = self._overall_limits()
        histogram_fields = (
            () if self._histogram is None else zip(("bins", "counts", "sums"), self._histogram.bins(), strict=True)
        )
        return Sketch(
            low=low,
            high=high,
            count=self._count,
            nan=self._nan,
            inf=self._inf,
            empty_arrays=self._empty_arrays,
            bits=self._bits,
            blocks=self._blocks,
            low_sum=self._low_sum,
            high_sum=self._high_sum,
            **dict(histogram_fields),
        )


def add_all(batches: Iterable[tuple[SketchAccumulator, list[Array]]]) -> None:
    """Adds arrays to accumulators, as `add` does, but for the most part without coming back to Python in between.

    Raises:
        DataError: An axis is missing, or has another number of channels than before.
    """
    jobs, job_owners = [], []
    for accumulator, arrays in batches:
        job = accumulator.kernel_job(arrays[0]) if len(arrays) == 1 else None
        if job is not None:
            jobs.append(job)
            job_owners.append((accumulator, arrays[0]))
            continue
        for values in arrays:
            accumulator.add(values)
    for (accumulator, values), (low, high, finite) in zip(
        job_owners, histogram_kernel.count_all_values(jobs), strict=True
    ):
        accumulator.merge_kernel_result(values, low, high, finite=finite)


def _as_kernel_float(values: Array) -> Array:
    """The same values as float32, or as float64 where float32 does not hold them all."""
    if values.dtype == np.float32:
        return values
    with np.errstate(invalid="ignore"):  # casts of NaN, which is counted later
        return values.astype(np.float32 if np.can_cast(values.dtype, np.float32) else np.float64, copy=False)


def _to_exact_integer(value: float) -> int:
    """A float as a whole number of 2**-1074."""
    numerator, denominator = value.as_integer_ratio()
    return (numerator << SUBNORMAL_EXPONENT) // denominator


def sketch_values(values: Array, axis: int | None = None, *, bits: int = 0) -> Sketch:
    """The statistics of `values`, a float array of any shape, as one block.

    Args:
        values: The array.
        axis: The axis of which each channel has ends of its own; None: the whole array has.
        bits: Mantissa bits of the histogram, one of `BITS`; there is none per channel.

    Raises:
        DataError: The array has no such axis.
    """
    accumulator = SketchAccumulator(axis, bits)
    accumulator.add(np.asarray(values))
    accumulator.close_block()
    return accumulator.to_sketch()

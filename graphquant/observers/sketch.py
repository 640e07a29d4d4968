"""Sketches: statistics of one tensor, collected by calibration.

The size of a `Sketch` does not depend on the number of samples. Merging two sketches is exact, commutative and
associative, so the result does not depend on batches or their order.

The histogram needs no range in advance: a value's bin is the leading part of its float32 bit pattern (sign, exponent
and `bits` bits of mantissa), so a bin is at most 2**-bits wide relative to its values. Each bin sums the dropped
mantissa bits as an integer, so the mean of its values is exact (docs/decisions/0010-histograms.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.errors import DataError, InternalError
from graphquant.numerics import LARGEST_VALUE, Array
from graphquant.observers import histogram_kernel

if TYPE_CHECKING:
    from graphquant.observers.histogram_kernel import KernelJob

MANTISSA_BITS = 23  # mantissa bits of a float32
HISTOGRAM_BITS = (0, 7, 10)  # mantissa bits of a histogram; 0 is no histogram. 8-bit types need 7, wider types 10


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """The statistics of a tensor."""

    low: Array  # smallest finite value, float64, () or (C,); +inf without values
    high: Array  # largest finite value, the same shape; -inf without values
    count: int = 0  # number of values in all channels
    nan: int = 0  # number of NaN among them
    inf: int = 0  # number of infinities among them
    empty_arrays: int = 0  # number of arrays without values
    bits: int = 0  # mantissa bits of the histogram's bins, one of `HISTOGRAM_BITS`; always 0 per channel
    # The next three arrays have the narrowest unsigned type for their values, because many sketches exist at once.
    # (K,), ascending: the bins with values, each as float32 bit pattern >> (23 - bits). A float64 is counted as the
    # nearest finite float32.
    bins: Array = field(default_factory=partial(np.zeros, 0, np.uint32))
    # (K,): the number of values in each bin; their sum is the number of finite values.
    counts: Array = field(default_factory=partial(np.zeros, 0, np.int64))
    # (K,): the sum of the low 23 - bits mantissa bits of the values in each bin.
    sums: Array = field(default_factory=partial(np.zeros, 0, np.uint64))
    blocks: int = 0  # number of blocks of samples with a finite value; always 0 per channel
    low_sum: int = 0  # the sum of the smallest value of each block, exact, in units of 2**-1074
    high_sum: int = 0  # the sum of the largest value of each block

    def __post_init__(self) -> None:
        if self.low.shape != self.high.shape or self.low.ndim > 1:
            raise InternalError(f"A Sketch has limits of the shapes {self.low.shape} and {self.high.shape}.")
        if self.bits not in HISTOGRAM_BITS or (self.bits and self.low.ndim):
            raise InternalError(f"A Sketch has {self.bits} bits and limits of the shape {self.low.shape}.")
        if not (self.bins.shape == self.counts.shape == self.sums.shape == (self.bins.size,)):
            raise InternalError("A Sketch has bins, counts and sums of different lengths.")
        if self.counts.sum() != (self.count - self.nan - self.inf if self.bits else 0):
            raise InternalError("The counts of a Sketch's bins do not add up to its finite values.")
        for name in ("bins", "counts", "sums"):
            values: Array = getattr(self, name)
            object.__setattr__(self, name, values.astype(np.min_scalar_type(values.max(initial=0)), copy=False))

    @property
    def empty(self) -> bool:
        """True if a channel has no finite value."""
        is_empty: Array = self.low > self.high
        return bool(is_empty.any() if is_empty.ndim else is_empty)

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Sketch) and all(
            np.array_equal(getattr(self, item.name), getattr(value, item.name)) for item in fields(self)
        )

    __hash__ = None  # type: ignore[assignment]  # arrays have no hash


EMPTY_SKETCH = Sketch(np.array(np.inf), np.array(-np.inf))  # A sketch without values. Merging it changes nothing.


def merge_sketches(first: Sketch, second: Sketch) -> Sketch:
    """Return the statistics of the values of both, with the coarser of their histograms.

    A sketch without values changes only the number of empty arrays. Raises a DataError if one is per channel and the
    other is not, or has another number of channels.
    """
    if not (first.count and second.count):
        larger = max(first, second, key=lambda sketch: (sketch.count, -sketch.bits, sketch.low.shape))
        empty_arrays = first.empty_arrays + second.empty_arrays
        return larger if larger.empty_arrays == empty_arrays else replace(larger, empty_arrays=empty_arrays)
    check_same_channels(first.low, second.low)
    bits = min(first.bits, second.bits)
    bins, counts, sums = merge_bins(
        [
            (sketch.bins, sketch.counts, sketch.sums)
            for sketch in (coarsen_histogram(first, bits), coarsen_histogram(second, bits))
        ]
    )
    added = ("count", "nan", "inf", "empty_arrays", "blocks", "low_sum", "high_sum")
    return Sketch(
        low=np.minimum(first.low, second.low),
        high=np.maximum(first.high, second.high),
        bits=bits,
        bins=bins,
        counts=counts,
        sums=sums,
        **{name: getattr(first, name) + getattr(second, name) for name in added},
    )


def check_same_channels(first: Array, second: Array) -> None:
    """Raise a DataError if limits have different shapes, and so different numbers of channels."""
    if first.shape != second.shape:
        shapes = f"{first.shape} and {second.shape}"
        raise DataError(
            f"the number of channels of a tensor differs between samples: its ranges have the shapes {shapes}."
            ' Use one range for the tensor, with per = "tensor".'
        )


def coarsen_histogram(sketch: Sketch, bits: int) -> Sketch:
    """Return the sketch with a histogram of only `bits` mantissa bits, or without a histogram for 0.

    Raises an InternalError if the histogram has fewer bits than that.
    """
    if bits > sketch.bits:
        raise InternalError(f"A histogram of {sketch.bits} mantissa bits cannot be refined to {bits}.")
    if bits == sketch.bits:
        return sketch
    if not bits:
        return replace(sketch, bits=0, bins=sketch.bins[:0], counts=sketch.counts[:0], sums=sketch.sums[:0])
    dropped_bits = sketch.bits - bits
    dropped_mantissa = (sketch.bins & ((1 << dropped_bits) - 1)).astype(np.uint64) << np.uint64(
        MANTISSA_BITS - sketch.bits
    )
    sums = sketch.sums + dropped_mantissa * sketch.counts.astype(np.uint64)
    bins, counts, sums = merge_bins([(sketch.bins >> dropped_bits, sketch.counts, sums)])
    return replace(sketch, bits=bits, bins=bins, counts=counts, sums=sums)


def merge_bins(parts: Sequence[tuple[Array, Array, Array]]) -> tuple[Array, Array, Array]:
    """Merge bins, counts and sums of several sets. Returns each bin once, ascending, with its total count and sum."""
    bins, counts, sums = map(np.concatenate, zip(*parts, strict=True))
    order = bins.argsort()
    bins, is_first = bins[order], np.ones(bins.size, bool)
    is_first[1:] = bins[1:] != bins[:-1]
    starts = np.flatnonzero(is_first)
    all_counts = np.add.reduceat(counts[order], starts, dtype=np.int64)
    return bins[starts], all_counts, np.add.reduceat(sums[order], starts, dtype=np.uint64)


def bin_means(sketch: Sketch) -> Array:
    """Return the mean of the values in each bin, float64 (K,), exact to one unit in the last place."""
    pattern = sketch.bins.astype(np.uint32) << (MANTISSA_BITS - sketch.bits)
    exponent = (pattern >> MANTISSA_BITS & 0xFF).astype(np.int64)
    mantissa = (pattern & 0x7FFFFF) + ((exponent > 0) << MANTISSA_BITS)
    whole, rest = np.divmod(sketch.sums, sketch.counts.astype(np.uint64))
    mean = (mantissa + whole).astype(np.float64) + rest / sketch.counts
    signed: Array = np.where(pattern >> 31, -mean, mean)
    return np.asarray(np.ldexp(signed, np.maximum(exponent, 1) - 150))


def inner_bin_ends(sketch: Sketch) -> Array:
    """Return the end of each bin that is nearer to zero, float32 (K,)."""
    return (sketch.bins.astype(np.uint32) << (MANTISSA_BITS - sketch.bits)).view(np.float32)


def bin_edges(sketch: Sketch) -> tuple[Array, Array]:
    """Return the smallest and the largest float32 of each bin, float64 (K,) each."""
    near = inner_bin_ends(sketch).view(np.uint32)
    far = near | ((1 << (MANTISSA_BITS - sketch.bits)) - 1)
    ends = [pattern.astype(np.uint32).view(np.float32).astype(np.float64) for pattern in (near, far)]
    return np.minimum(*ends), np.maximum(*ends)


MAX_BUFFERED_VALUES = 1 << 11  # Values per tensor that are stored as they are, because a table needs more memory.
ARRAY_OVERHEAD = 32  # values that take as much memory as the header of an array


class HistogramBuilder:
    """Counts values by the leading part of their bit pattern, in a table whose entries never overflow."""

    def __init__(self, bits: int) -> None:
        """Create an empty histogram; `bits` are the mantissa bits of its bins."""
        self.bits = bits
        self._table: Array | None = None
        self._buffer: list[Array] = []
        self._free_buffer, self._free_capacity = MAX_BUFFERED_VALUES, 0
        self._spilled: list[tuple[Array, Array, Array]] = []

    def add(self, values: Array) -> tuple[float, float, bool]:
        """Count the finite values of a float32 array of any shape.

        Returns the smallest and the largest value, and True if all are finite; if not, the limits are not valid.
        """
        flat = values.ravel(order="K")
        flat = flat if flat.flags.aligned else flat.copy()
        results = []
        for start in range(0, max(flat.size, 1), histogram_kernel.TABLE_CAPACITY):
            chunk = flat[start : start + histogram_kernel.TABLE_CAPACITY]
            results.append(histogram_kernel.count_values(*self.kernel_job(chunk)))
            if not results[-1][2]:
                self.discard_nonfinite()
        lows, highs, finite = zip(*results, strict=True)
        return min(lows), max(highs), all(finite)

    def kernel_job(self, values: Array) -> KernelJob:
        """Return the kernel arguments that count `values`, at most `TABLE_CAPACITY`. The kernel must then be called."""
        if self._table is None and values.size <= self._free_buffer:
            self._free_buffer -= values.size + ARRAY_OVERHEAD
            self._buffer.append(values.copy())
            return values, 0, None
        table = self._count_buffer()
        if values.size > self._free_capacity:
            # Full entries are few, since a full bin has a large share of all values.
            spilled = histogram_kernel.unpack_entries(table, histogram_kernel.FULL_ENTRY, clear=True)
            if spilled[0].size:
                self._spilled = [merge_bins([*self._spilled, spilled])]
            self._free_capacity = histogram_kernel.TABLE_CAPACITY
        self._free_capacity -= values.size
        return values, MANTISSA_BITS - self.bits, table

    def _count_buffer(self) -> Array:
        """Move the buffered values to a table, and return it."""
        if self._table is None:
            self._table = histogram_kernel.new_histogram_table(self.bits)
            self._free_capacity = histogram_kernel.TABLE_CAPACITY
            buffer, self._buffer, self._free_buffer = self._buffer, [], MAX_BUFFERED_VALUES
            self.add(np.concatenate([*buffer, np.zeros(0, np.float32)]))
        return self._table

    def discard_nonfinite(self) -> None:
        """Clear the bins of values that are not finite, which the kernel counts too."""
        if self._table is None:  # they are discarded when the buffer is counted
            return
        for code in (0x0FF, 0x1FF):  # sign and exponent of infinities and NaN
            self._table[code << self.bits : code + 1 << self.bits] = 0

    def bins(self) -> tuple[Array, Array, Array]:
        """Return the bins with values, uint32 (K,), ascending, their counts, int64 (K,), and sums, uint64 (K,)."""
        if self._table is None:  # a table takes longer to read than to sort the few values
            pattern = np.concatenate([*self._buffer, np.zeros(0, np.float32)])
            pattern = pattern[np.isfinite(pattern)].view(np.uint32)
            unit = 1 << MANTISSA_BITS - self.bits
            entries = pattern // unit, np.ones(pattern.size, np.int64), (pattern % unit).astype(np.uint64)
            self._buffer, self._free_buffer = [], MAX_BUFFERED_VALUES
        else:
            entries = histogram_kernel.unpack_entries(self._table)
        bins = merge_bins([*self._spilled, entries])
        self._table, self._spilled = None, [bins]
        return bins


SUBNORMAL_EXPONENT = 1074  # every float64 is an integer multiple of 2**-1074, the smallest denormal


class SketchAccumulator:
    """Collects the statistics of one tensor. Different threads may add to different accumulators at the same time."""

    def __init__(self, axis: int | None = None, bits: int = 0) -> None:
        """Create an accumulator without values; see `sketch_values`."""
        self._axis = axis
        self._histogram = HistogramBuilder(bits) if bits and axis is None else None
        self._low, self._high = np.array(np.inf), np.array(-np.inf)
        self._block_low: Any = np.inf
        self._block_high: Any = -np.inf
        self._count = self._nan = self._inf = self._empty_arrays = 0
        self._blocks = self._low_sum = self._high_sum = 0

    def add(self, values: Array) -> None:
        """Add a float array. Raises a DataError if it lacks the axis, or has another number of channels than before."""
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
        """Return the kernel arguments that add `values`, or None if the kernel alone cannot add them."""
        small = 0 < values.size <= histogram_kernel.TABLE_CAPACITY
        if values.dtype != np.float32 or not small or self._axis is not None:
            return None
        if not (values.flags.c_contiguous and values.flags.aligned):
            return None
        flat = values.reshape(-1)
        return (flat, 0, None) if self._histogram is None else self._histogram.kernel_job(flat)

    def merge_kernel_result(self, values: Array, low: float, high: float, *, finite: bool) -> None:
        """Merge the limits that the kernel returned for `values`."""
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
        """Merge the limits of `values`, which are recomputed if some value is not finite."""
        self._count += values.size
        if not finite:
            is_finite = np.isfinite(values)
            nan = int(np.isnan(values).sum())
            self._nan += nan
            self._inf += int(values.size - is_finite.sum()) - nan
            low = values.min(axis=reduced_axes, initial=np.inf, where=is_finite)
            high = values.max(axis=reduced_axes, initial=-np.inf, where=is_finite)
            values = values if self._histogram is None else values[is_finite]
        if self._axis is None:  # for scalars, Python is ten times faster than numpy
            self._block_low, self._block_high = min(self._block_low, low), max(self._block_high, high)
        else:
            for limits in (self._low, self._block_low):
                check_same_channels(limits if np.ndim(limits) else low, low)
            self._block_low, self._block_high = np.minimum(self._block_low, low), np.maximum(self._block_high, high)
        if self._histogram is not None and values.dtype != np.float32:
            self._histogram.add(np.clip(values, -LARGEST_VALUE, LARGEST_VALUE).astype(np.float32))

    def _reduced_axes(self, values: Array) -> tuple[int, ...] | None:
        """Return all axes except that of the channels; None for all axes."""
        if self._axis is None:
            return None
        if not -values.ndim <= self._axis < values.ndim:
            raise DataError(
                f"a tensor of shape {values.shape} has no axis {self._axis} for one range per channel."
                ' Use one range for the tensor, with per = "tensor".'
            )
        return tuple(axis for axis in range(values.ndim) if axis != self._axis % values.ndim)

    def close_block(self) -> None:
        """End a block of samples: add its smallest and largest value to the sums for their means.

        A block without a finite value is not counted. Sketches per channel have no sums.
        """
        low, high = self._block_low, self._block_high
        if self._axis is None and low <= high:
            self._blocks += 1
            self._low_sum += _to_exact_integer(float(low))
            self._high_sum += _to_exact_integer(float(high))
        self._low, self._high = self._overall_limits()
        self._block_low, self._block_high = np.inf, -np.inf

    def _overall_limits(self) -> tuple[Array, Array]:
        """Return the limits of all values. -0.0, which depends on the order of values, becomes 0.0."""
        low, high = np.minimum(self._low, self._block_low), np.maximum(self._high, self._block_high)
        return np.asarray(low + 0.0), np.asarray(high + 0.0)

    def to_sketch(self) -> Sketch:
        """Return the statistics of all values. An open block is not counted as a block."""
        low, high = self._overall_limits()
        histogram: dict[str, Any] = {}
        if self._histogram is not None:
            bins, counts, sums = self._histogram.bins()
            histogram = {"bits": self._histogram.bits, "bins": bins, "counts": counts, "sums": sums}
        return Sketch(
            low=low,
            high=high,
            count=self._count,
            nan=self._nan,
            inf=self._inf,
            empty_arrays=self._empty_arrays,
            blocks=self._blocks,
            low_sum=self._low_sum,
            high_sum=self._high_sum,
            **histogram,
        )


def add_all(batches: Iterable[tuple[SketchAccumulator, list[Array]]]) -> None:
    """Add arrays to accumulators like `add`, mostly in one call of the kernel."""
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
    """Convert to float32, or to float64 if float32 cannot represent all values."""
    if values.dtype == np.float32:
        return values
    with np.errstate(invalid="ignore"):  # NaN can be cast; it is counted later
        return values.astype(np.float32 if np.can_cast(values.dtype, np.float32) else np.float64, copy=False)


def _to_exact_integer(value: float) -> int:
    """Return a float in units of 2**-1074."""
    numerator, denominator = value.as_integer_ratio()
    return (numerator << SUBNORMAL_EXPONENT) // denominator


def sketch_values(values: Array, axis: int | None = None, *, bits: int = 0) -> Sketch:
    """Return the statistics of `values`, a float array of any shape, as one block.

    With `axis`, which must exist, its channels have separate limits and there is no histogram. `bits` are the mantissa
    bits of the histogram, one of `HISTOGRAM_BITS`.
    """
    accumulator = SketchAccumulator(axis, bits)
    accumulator.add(np.asarray(values))
    accumulator.close_block()
    return accumulator.to_sketch()

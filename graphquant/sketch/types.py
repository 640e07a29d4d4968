"""What calibration keeps of a tensor.

A `Sketch` has a bounded size whatever the number of samples, and merging two of them is exact, commutative and
associative, so the result does not depend on batches or their order.

Its histogram needs no range in advance: a value's bin is the top of its float32 bit pattern (sign, exponent and
`bits` bits of mantissa), so a bin is at most 2**-bits wide relative to its values. Each bin sums the mantissa bits that
were dropped, as an integer, so that the mean of its values is known exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from graphquant.errors import DataError, InternalError

if TYPE_CHECKING:
    from graphquant.numerics import Array

MANTISSA = 23
"""Mantissa bits of a float32."""

BITS = (0, 7, 10)
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
        blank: How many arrays without any value there were beside them.
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
    blank: int = 0
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
        if self.bits not in BITS or (self.bits and self.low.ndim):
            raise InternalError(f"a Sketch with {self.bits} bits for ends of shape {self.low.shape} was made.")
        if not (self.bins.shape == self.counts.shape == self.sums.shape == (self.bins.size,)):
            raise InternalError("a Sketch whose bins, counts and sums differ in number was made.")
        if self.counts.sum() != (self.count - self.nan - self.inf if self.bits else 0):
            raise InternalError("a Sketch whose bins do not hold each finite value once was made.")

    @property
    def empty(self) -> bool:
        """Whether no finite value was seen in some channel."""
        return bool((self.low > self.high).any())

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Sketch)
            and all(np.array_equal(getattr(self, name), getattr(other, name)) for name in ARRAYS)
            and all(getattr(self, name) == getattr(other, name) for name in NUMBERS)
        )

    __hash__ = None  # type: ignore[assignment]  # arrays have no hash


ARRAYS = ("low", "high", "bins", "counts", "sums")
NUMBERS = ("count", "nan", "inf", "blank", "bits", "blocks", "low_sum", "high_sum")

EMPTY = Sketch(np.array(np.inf), np.array(-np.inf))
"""Of no values at all; merging it changes nothing."""


def merge(one: Sketch, other: Sketch) -> Sketch:
    """The statistics of both together, with the coarser of their histograms.

    One of no values changes nothing but the number of arrays without any.

    Raises:
        DataError: One is per channel and the other is not, or has another number of channels.
    """
    if not (one.count and other.count):
        more = max(one, other, key=lambda each: (each.count, -each.bits, each.low.shape))
        return replace(more, blank=one.blank + other.blank)
    check_channels(one.low, other.low)
    bits = min(one.bits, other.bits)
    parts = [coarsen(each, bits) for each in (one, other)]
    bins, counts, sums = together(
        np.concatenate([part.bins for part in parts]),
        np.concatenate([part.counts for part in parts]),
        np.concatenate([part.sums for part in parts]),
    )
    return Sketch(
        low=np.minimum(one.low, other.low),
        high=np.maximum(one.high, other.high),
        count=one.count + other.count,
        nan=one.nan + other.nan,
        inf=one.inf + other.inf,
        blank=one.blank + other.blank,
        bits=bits,
        bins=bins,
        counts=counts,
        sums=sums,
        blocks=one.blocks + other.blocks,
        low_sum=one.low_sum + other.low_sum,
        high_sum=one.high_sum + other.high_sum,
    )


def check_channels(one: Array, other: Array) -> None:
    """Refuses ends of different shapes, which are for different numbers of channels."""
    if one.shape != other.shape:
        shapes = f"{one.shape} and {other.shape}"
        raise DataError(
            f"the numbers of channels of a tensor differ between samples: its ranges have the shapes {shapes}."
            ' Give it one range in all, with per = "tensor".'
        )


def coarsen(sketch: Sketch, bits: int) -> Sketch:
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
    fewer = sketch.bits - bits
    lost = (sketch.bins & ((1 << fewer) - 1)).astype(np.uint64) << np.uint64(MANTISSA - sketch.bits)
    sums = sketch.sums + lost * sketch.counts.astype(np.uint64)
    bins, counts, sums = together(sketch.bins >> fewer, sketch.counts, sums)
    return replace(sketch, bits=bits, bins=bins, counts=counts, sums=sums)


def together(bins: Array, counts: Array, sums: Array) -> tuple[Array, Array, Array]:
    """Each bin once, ascending, with all that was in it."""
    each, place = np.unique(bins, return_inverse=True)
    all_counts, all_sums = np.zeros(each.size, np.int64), np.zeros(each.size, np.uint64)
    np.add.at(all_counts, place, counts)
    np.add.at(all_sums, place, sums)
    return each, all_counts, all_sums


def means(sketch: Sketch) -> Array:
    """The mean of the values in each bin, float64 (K,), in the tensor's unit, to one unit in the last place."""
    pattern = sketch.bins << (MANTISSA - sketch.bits)
    exponent = (pattern >> MANTISSA & 0xFF).astype(np.int64)
    mantissa = (pattern & 0x7FFFFF) + ((exponent > 0) << MANTISSA)
    whole, rest = np.divmod(sketch.sums, sketch.counts.astype(np.uint64))
    mean = (mantissa + whole).astype(np.float64) + rest / sketch.counts
    signed: Array = np.where(pattern >> 31, -mean, mean)
    return np.asarray(np.ldexp(signed, np.maximum(exponent, 1) - 150))


def edges(sketch: Sketch) -> tuple[Array, Array]:
    """The smallest and the largest float32 that go into each bin, float64 (K,) each, in the tensor's unit."""
    near = sketch.bins << (MANTISSA - sketch.bits)  # the end of the bin nearer to zero
    far = near | ((1 << (MANTISSA - sketch.bits)) - 1)
    ends = [pattern.astype(np.uint32).view(np.float32).astype(np.float64) for pattern in (near, far)]
    return np.minimum(*ends), np.maximum(*ends)

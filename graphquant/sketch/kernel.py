"""Counts values in the bins of a histogram: in C, or in numpy where that was not compiled. Both give the same.

A table has two columns with an entry for each bin there can be; either may take a value. An entry is the number of its
values, times 2**40, plus the sum of the mantissa bits that they dropped. The system commits a page of a table when it
is first written. Memory of a tensor is so 2 KiB with 7 mantissa bits, or 16 KiB with 10, for each factor of two
between its smallest and largest magnitude, per sign: usually 60 to 120 KiB, or 0.5 to 1 MiB.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.numerics import Array

ONE = np.uint64(1 << 40)
"""What an entry grows by for each value, beside its dropped bits."""

FULL = 1 << 63
"""An entry of so much, which is one of 2**23 values or more, must be emptied before as many come again."""

ROOM = 1 << 23
"""Values that may come between two looks for full entries: the count has 24 bits, the sum has room for 16 of each."""

CHUNK = 1 << 16
"""Values that numpy counts at a time, few enough for its temporary arrays to stay in the cache."""


def new_table(bits: int) -> Array:
    """Zeros, uint64 (2, 2**(9 + bits)), of which only the pages that are written take memory."""
    bins = 1 << (9 + bits)
    space = mmap.mmap(-1, bins * 16, access=mmap.ACCESS_COPY)  # private, so that neighbours become one mapping
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        space.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(space, np.uint64).reshape(2, bins)


def in_numpy(values: Array, shift: int, table: Array) -> tuple[float, float, bool]:
    """Counts each value in its bin, as the compiled `fill` does.

    Args:
        values: float32 (N,), aligned and without gaps; none is no value.
        shift: How many of the low bits of their patterns the bins drop.
        table: What `new_table` made, for 23 - shift bits, with room for them; no NaN or infinity is counted in it.

    Returns:
        The smallest and the largest value, and whether all are finite; if not, the two mean nothing, and the others
        are in bins too.
    """
    pattern, dropped = values.view(np.uint32), np.uint32((1 << shift) - 1)
    for start in range(0, pattern.size, CHUNK):
        part = pattern[start : start + CHUNK]
        np.add.at(table[0], (part >> shift).astype(np.intp), (part & dropped) | ONE)
    low, high = float(values.min(initial=np.inf)), float(values.max(initial=-np.inf))
    return low, high, bool(np.isfinite(values).all())


fill: Callable[[Array, int, Array], tuple[float, float, bool]] = in_numpy
with suppress(ImportError):  # there was no C compiler when graphquant was installed
    fill = import_module("graphquant.sketch._fill").fill


def occupied(table: Array, least: int = 1) -> Array:
    """The bins with an entry of `least` or more, ascending."""
    return np.flatnonzero((table >= least).any(axis=0))


def unpacked(table: Array, bins: Array) -> tuple[Array, Array, Array]:
    """`bins` as uint32 (K,), how many values they hold, int64 (K,), and the sums of dropped bits, uint64 (K,)."""
    entries = table[:, bins]
    counts, sums = (entries // ONE).sum(axis=0), (entries % ONE).sum(axis=0)
    return bins.astype(np.uint32), counts.astype(np.int64), sums

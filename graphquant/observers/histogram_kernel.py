"""Counts values in the bins of a histogram, in C, or in numpy where that was not compiled; both count the same.

What else goes over many values is here too, compiled with it.

A table has an entry for each bin there can be: the number of its values, times 2**40, plus the sum of the mantissa bits
that they dropped. The system commits a page of a table when it is first written. Memory of a tensor is so 1 KiB with 7
mantissa bits, or 8 KiB with 10, for each factor of two between its smallest and largest magnitude, per sign: usually 30
to 60 KiB, or 0.25 to 0.5 MiB.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphquant.numerics import Array

    KernelJob = tuple[Array, int, Array | None]


COUNT_UNIT = np.uint64(1 << 40)
"""What an entry grows by for each value, beside its dropped bits."""

SPARE_ENTRIES = 3
"""Entries behind the last bin, which bin 0 has too, the one of zeros, so that some can be counted at once."""

FULL_ENTRY = 1 << 63
"""An entry of so much, which is one of 2**23 values or more, must be emptied before as many come again."""

TABLE_CAPACITY = 1 << 23
"""Values that may come between two looks for full entries: the count has 24 bits, the sum has room for 16 of each."""

COUNTING_CHUNK = 1 << 16
"""Values that numpy counts at a time, few enough for its temporary arrays to stay in the cache."""


SQUARES_CHUNK = 1 << 13
"""Values that numpy squares in one go: they stay in a core's cache, and its library takes one thread for them."""


def new_histogram_table(bits: int) -> Array:
    """Zeros, uint64 (2**(9 + bits) + SPARE,), of which only the pages that are written take memory."""
    entries = (1 << (9 + bits)) + SPARE_ENTRIES
    space = mmap.mmap(-1, entries * 8, access=mmap.ACCESS_COPY)  # private, so that neighbours become one mapping
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        space.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(space, np.uint64)


def count_values_numpy(values: Array, shift: int, table: Array | None) -> tuple[float, float, bool]:
    """Counts each value in its bin, as the compiled `fill` does; without a table only its ends are looked for.

    Args:
        values: float32 (N,), aligned and without gaps; none is no value.
        shift: How many of the low bits of their patterns the bins drop.
        table: What `new_histogram_table` made, for 23 - shift bits, with room for them; no NaN or infinity is counted in it.
            None: they are not counted.

    Returns:
        The smallest and the largest value, and whether all are finite; if not, the two mean nothing, and the others
        are in bins too.
    """
    pattern, dropped = values.view(np.uint32), np.uint32((1 << shift) - 1)
    if table is not None:
        for start in range(0, pattern.size, COUNTING_CHUNK):
            chunk = pattern[start : start + COUNTING_CHUNK]
            np.add.at(table, (chunk >> shift).astype(np.intp), (chunk & dropped) | COUNT_UNIT)
    low, high = float(values.min(initial=np.inf)), float(values.max(initial=-np.inf))
    return low, high, bool(np.isfinite(values).all())


def count_all_values_numpy(jobs: Sequence[KernelJob]) -> list[tuple[float, float, bool]]:
    """The results of `count_values_numpy` for each of the jobs, as the compiled `count_all_values` gives them."""
    return [count_values_numpy(*job) for job in jobs]


def sum_squares_numpy(expected: Array, actual: Array) -> tuple[float, float]:
    """The sum of the squares of `expected`, and of what `actual` is off, as the compiled `sum_squares` gives them.

    Args:
        expected: float32 (N,), aligned and without gaps.
        actual: The same.

    Returns:
        Both sums but for rounding; they are infinite, NaN or too small where float32 cannot hold the squares.
    """
    power = error = 0.0
    for start in range(0, expected.size, SQUARES_CHUNK):
        chunk = expected[start : start + SQUARES_CHUNK]
        difference = actual[start : start + SQUARES_CHUNK] - chunk
        power += float(chunk.dot(chunk))
        error += float(difference.dot(difference))
    return power, error


count_values: Callable[[Array, int, Array | None], tuple[float, float, bool]] = count_values_numpy
count_all_values: Callable[[list[KernelJob]], list[tuple[float, float, bool]]] = count_all_values_numpy
sum_squares: Callable[[Array, Array], tuple[float, float]] = sum_squares_numpy
squared_errors: Callable[[Array, Array, Array], None] | None = None
"""Of pieces, (8, K + 1), and of scale, least and largest whole number of each candidate, (C, 3), to the sums of squared
errors, (C,): see `graphquant.sketch.distribution`. None where it was not compiled."""
with suppress(ImportError, AttributeError):  # there was no C compiler when graphquant was installed, or less in C
    compiled = import_module("graphquant.observers._fill")
    count_values, count_all_values, sum_squares = compiled.fill, compiled.fill_all, compiled.squares
    squared_errors = compiled.squared_errors


def occupied_entries(table: Array, minimum: int = 1) -> Array:
    """The places of the entries of `minimum` or more, ascending."""
    return np.flatnonzero(table >= minimum)


def unpack_entries(table: Array, entries: Array) -> tuple[Array, Array, Array]:
    """What the entries at `entries` hold.

    Returns:
        Their bins, uint32 (K,), ascending, how many values each has, int64 (K,), and the sums of dropped bits,
        uint64 (K,).
    """
    counts, sums = (table[entries] // COUNT_UNIT).astype(np.int64), table[entries] % COUNT_UNIT
    first_spare = int(np.searchsorted(entries, table.size - SPARE_ENTRIES))
    if first_spare < entries.size:
        if entries[0]:
            entries, counts, sums = (np.insert(values, 0, 0) for values in (entries, counts, sums))
            first_spare += 1
        counts[0] += counts[first_spare:].sum()
        sums[0] += sums[first_spare:].sum()
    return entries[:first_spare].astype(np.uint32), counts[:first_spare], sums[:first_spare]

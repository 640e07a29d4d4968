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

    Job = tuple[Array, int, Array | None]

ONE = np.uint64(1 << 40)
"""What an entry grows by for each value, beside its dropped bits."""

SPARE = 3
"""Entries behind the last bin, which bin 0 has too, the one of zeros, so that some can be counted at once."""

FULL = 1 << 63
"""An entry of so much, which is one of 2**23 values or more, must be emptied before as many come again."""

ROOM = 1 << 23
"""Values that may come between two looks for full entries: the count has 24 bits, the sum has room for 16 of each."""

CHUNK = 1 << 16
"""Values that numpy counts at a time, few enough for its temporary arrays to stay in the cache."""


SQUARED = 1 << 13
"""Values that numpy squares in one go: they stay in a core's cache, and its library takes one thread for them."""


def new_table(bits: int) -> Array:
    """Zeros, uint64 (2**(9 + bits) + SPARE,), of which only the pages that are written take memory."""
    entries = (1 << (9 + bits)) + SPARE
    space = mmap.mmap(-1, entries * 8, access=mmap.ACCESS_COPY)  # private, so that neighbours become one mapping
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        space.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(space, np.uint64)


def in_numpy(values: Array, shift: int, table: Array | None) -> tuple[float, float, bool]:
    """Counts each value in its bin, as the compiled `fill` does; without a table only its ends are looked for.

    Args:
        values: float32 (N,), aligned and without gaps; none is no value.
        shift: How many of the low bits of their patterns the bins drop.
        table: What `new_table` made, for 23 - shift bits, with room for them; no NaN or infinity is counted in it.
            None: they are not counted.

    Returns:
        The smallest and the largest value, and whether all are finite; if not, the two mean nothing, and the others
        are in bins too.
    """
    pattern, dropped = values.view(np.uint32), np.uint32((1 << shift) - 1)
    if table is not None:
        for start in range(0, pattern.size, CHUNK):
            part = pattern[start : start + CHUNK]
            np.add.at(table, (part >> shift).astype(np.intp), (part & dropped) | ONE)
    low, high = float(values.min(initial=np.inf)), float(values.max(initial=-np.inf))
    return low, high, bool(np.isfinite(values).all())


def all_in_numpy(jobs: Sequence[Job]) -> list[tuple[float, float, bool]]:
    """The results of `in_numpy` for each of the jobs, as the compiled `fill_all` gives them."""
    return [in_numpy(*job) for job in jobs]


def squares_in_numpy(expected: Array, found: Array) -> tuple[float, float]:
    """The sum of the squares of `expected`, and of what `found` is off, as the compiled `squares` gives them.

    Args:
        expected: float32 (N,), aligned and without gaps.
        found: The same.

    Returns:
        Both sums but for rounding; they are infinite, NaN or too small where float32 cannot hold the squares.
    """
    power = error = 0.0
    for start in range(0, expected.size, SQUARED):
        here = expected[start : start + SQUARED]
        off = found[start : start + SQUARED] - here
        power += float(here.dot(here))
        error += float(off.dot(off))
    return power, error


fill: Callable[[Array, int, Array | None], tuple[float, float, bool]] = in_numpy
fill_all: Callable[[list[Job]], list[tuple[float, float, bool]]] = all_in_numpy
squares: Callable[[Array, Array], tuple[float, float]] = squares_in_numpy
squared_errors: Callable[[Array, Array, Array], None] | None = None
"""Of pieces, (8, K + 1), and of scale, least and largest whole number of each candidate, (C, 3), to the sums of squared
errors, (C,): see `graphquant.sketch.distribution`. None where it was not compiled."""
with suppress(ImportError, AttributeError):  # there was no C compiler when graphquant was installed, or less in C
    compiled = import_module("graphquant.sketch._fill")
    fill, fill_all, squares = compiled.fill, compiled.fill_all, compiled.squares
    squared_errors = compiled.squared_errors


def occupied(table: Array, least: int = 1) -> Array:
    """The places of the entries of `least` or more, ascending."""
    return np.flatnonzero(table >= least)


def unpacked(table: Array, places: Array) -> tuple[Array, Array, Array]:
    """What the entries at `places` hold.

    Returns:
        Their bins, uint32 (K,), ascending, how many values each has, int64 (K,), and the sums of dropped bits,
        uint64 (K,).
    """
    counts, sums = (table[places] // ONE).astype(np.int64), table[places] % ONE
    spare = int(np.searchsorted(places, table.size - SPARE))
    if spare < places.size:
        if places[0]:
            places, counts, sums = (np.insert(each, 0, 0) for each in (places, counts, sums))
            spare += 1
        counts[0] += counts[spare:].sum()
        sums[0] += sums[spare:].sum()
    return places[:spare].astype(np.uint32), counts[:spare], sums[:spare]

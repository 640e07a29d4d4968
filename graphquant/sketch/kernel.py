"""Counts values in the bins of a histogram, in numpy or, when there are many, in machine code; both give the same.

A table has a row for each bin there can be: how many values, and the sum of their dropped mantissa bits. The system
commits a page of it when that is first written. Memory of a tensor is so 2 KiB with 7 mantissa bits, or 16 KiB with 10,
for each factor of two between its smallest and largest magnitude, per sign: usually 60 to 120 KiB, or 0.5 to 1 MiB.
"""

from __future__ import annotations

import mmap
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.numerics import Array

MANY = 1 << 25
"""Values after which a process gets the compiled kernel, which takes up to a second to load and then a fifth of the
time: numpy counts as many in 0.1 s, so small models never wait for it."""

CHUNK = 1 << 16
"""Values that numpy counts at a time, few enough for its temporary arrays to stay in the cache."""


def new_table(bits: int) -> Array:
    """Zeros, uint64 (2**(9 + bits), 2), of which only the pages that are written take memory."""
    bins = 1 << (9 + bits)
    space = mmap.mmap(-1, bins * 16, access=mmap.ACCESS_COPY)  # private, so that neighbours become one mapping
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        space.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(space, np.uint64).reshape(bins, 2)


class Fill:
    """Adds values to a table: in numpy until `MANY` came in this process, then compiled.

    Threads may call it at once, for different tables; the compiled kernel runs without Python's lock.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._lock = Lock()

    def __call__(self, pattern: Array, shift: int, table: Array) -> None:
        """Counts each value in its bin.

        Args:
            pattern: The bit patterns of finite float32 values, uint32 (N,).
            shift: How many of their low bits the bins drop.
            table: What `new_table` made, for 23 - shift bits.
        """
        if self._seen < MANY:
            self._seen += pattern.size
            in_numpy(pattern, shift, table)
        else:
            with self._lock:  # the first to come compiles, the others wait
                kernel = compiled()
            kernel(pattern, shift, table)


def in_numpy(pattern: Array, shift: int, table: Array) -> None:
    """The kernel in numpy."""
    counts, sums = table.T
    one, dropped = np.uint64(1), np.uint32((1 << shift) - 1)
    for start in range(0, pattern.size, CHUNK):
        part = pattern[start : start + CHUNK]
        bins = (part >> shift).astype(np.intp)
        np.add.at(counts, bins, one)
        np.add.at(sums, bins, (part & dropped).astype(np.uint64))


def in_machine_code(pattern: Array, shift: int, table: Array) -> None:
    """The kernel as numba compiles it; in unsigned types, for signed indices would be tested for counting backwards."""
    drop, dropped = np.uint32(shift), np.uint32((1 << shift) - 1)
    for value in pattern:
        place = np.uint64(value >> drop)
        table[place, 0] += np.uint64(1)
        table[place, 1] += np.uint64(value & dropped)


@cache
def compiled() -> Callable[[Array, int, Array], Any]:
    """The compiled kernel, kept on disk where a place for it is writable; the numpy one where numba does not load.

    numba refuses to load beside a numpy that is newer than it knows.
    """
    try:
        import numba
    except ImportError:
        return in_numpy
    types = numba.types
    pattern = types.Array(types.uint32, 1, "C", readonly=True)
    signature = types.void(pattern, types.int64, types.Array(types.uint64, 2, "C"))
    try:
        return numba.njit(signature, nogil=True, cache=True)(in_machine_code)
    except (OSError, RuntimeError):  # no folder for the cache, or none that can be written
        return numba.njit(signature, nogil=True)(in_machine_code)


fill = Fill()

"""Count values in the bins of a histogram, in C, or in numpy if the extension was not compiled. Results are identical.

The extension also computes sums of squares and squared errors, and searches scales and zero points of blocks.

A table has one entry for each possible bin: the number of values times 2**40, plus the sum of their dropped mantissa
bits. The system commits a page of a table when it is first written. The memory for a tensor is therefore 1 KiB with 7
mantissa bits, or 8 KiB with 10, for each factor of two between its smallest and largest magnitude, per sign: usually
30 to 60 KiB, or 0.25 to 0.5 MiB.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from graphquant.numerics import Array

    KernelJob = tuple[Array, int, Array | None]

COUNT_UNIT = np.uint64(1 << 40)  # increment of an entry for each value, in addition to its dropped bits

SPARE_ENTRIES = 3
"""Additional entries for zeros at the end of a table, so that additions of several zeros do not wait for each other."""

FULL_ENTRY = 1 << 63
"""An entry of this size counts at least 2**23 values, and must be cleared before 2**23 more are added."""

TABLE_CAPACITY = 1 << 23
"""Values that can be added between two checks for full entries. A count has 24 bits, and a sum 16 bits per value."""

COUNTING_CHUNK = 1 << 16  # values that numpy counts at a time, so that temporary arrays stay in the cache

SQUARES_CHUNK = 1 << 13
"""Values that numpy squares at a time, so that they stay in a core's cache and BLAS uses one thread."""


def new_histogram_table(bits: int) -> Array:
    """Return zeros, uint64 (2**(9 + bits) + SPARE_ENTRIES,). Only pages that are written use memory."""
    entries = (1 << (9 + bits)) + SPARE_ENTRIES
    space = mmap.mmap(-1, entries * 8, access=mmap.ACCESS_COPY)  # private, so that adjacent tables share a mapping
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        space.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(space, np.uint64)


def count_values_numpy(values: Array, shift: int, table: Array | None) -> tuple[float, float, bool]:
    """Count `values`, float32 (N,), aligned and contiguous, in their bins, like the compiled `fill`.

    Bins drop `shift` low bits. The table is one for 23 - shift bits with capacity for the values; without a table, only
    the limits are computed. Returns the smallest and largest value, and True if all are finite. If not, the limits are
    not valid, and values that are not finite are in the table too.
    """
    pattern, dropped = values.view(np.uint32), np.uint32((1 << shift) - 1)
    if table is not None:
        for start in range(0, pattern.size, COUNTING_CHUNK):
            chunk = pattern[start : start + COUNTING_CHUNK]
            np.add.at(table, (chunk >> shift).astype(np.intp), (chunk & dropped) | COUNT_UNIT)
    low, high = float(values.min(initial=np.inf)), float(values.max(initial=-np.inf))
    return low, high, bool(np.isfinite(values).all())


def count_all_values_numpy(jobs: Sequence[KernelJob]) -> list[tuple[float, float, bool]]:
    """Return the results of `count_values_numpy` for each job, like the compiled `fill_all`."""
    return [count_values_numpy(*job) for job in jobs]


def sum_squares_numpy(expected: Array, actual: Array) -> tuple[float, float]:
    """Return the sums of the squares of `expected` and of `actual - expected`, like the compiled `squares`.

    Both are float32 (N,), aligned and contiguous. The sums are exact up to rounding; infinite, NaN or too small if
    float32 cannot represent the squares.
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
"""Computes the sums of squared errors, (C,), from the pieces of a distribution, (8, K + 1), and the scale, smallest and
largest integer of each candidate, (C, 3); see `Distribution.squared_error`. None if the extension was not compiled."""
search_blocks: (
    Callable[[Array, Array, Array, Array, tuple[int, int, int], tuple[float | np.float32, ...], bool, bool], None]
    | None
) = None
"""Searches the scales and zero points of blocks like `_search_chunk` of `block_search`. None if the extension was not
compiled."""
TRUNCATED = (
    "error: A file became shorter while it was read, such as the external data of the model. Copy it again, and change"
    " no file during a run.\n"
)
"""Message of the signal that ends a process whose memory-mapped file was truncated, as in the extension."""

_signal_callbacks: list[object] = []  # called by the C library, which does not keep them alive


def _handle_truncation() -> None:
    """End the process with a message if a file that ONNX Runtime maps to memory is truncated, as the extension does.

    A handler of the module `signal` would only run after the read that fails again and again. A callback of ctypes
    runs at once, and waits for the interpreter at most until ONNX Runtime, which reads the file, has released it.
    """
    if not hasattr(signal, "SIGBUS") or signal.getsignal(signal.SIGBUS) != signal.SIG_DFL or faulthandler.is_enabled():
        return  # another handler stays
    import ctypes

    def end_process(_: int) -> None:
        os.write(2, TRUNCATED.encode())
        os._exit(3)

    callback = ctypes.CFUNCTYPE(None, ctypes.c_int)(end_process)
    _signal_callbacks.append(callback)
    ctypes.CDLL(None).signal(int(signal.SIGBUS), callback)


try:
    compiled = import_module("graphquant.observers._fill")
    count_values, count_all_values, sum_squares = compiled.fill, compiled.fill_all, compiled.squares
    squared_errors = compiled.squared_errors
    search_blocks = compiled.search_blocks
except (ImportError, AttributeError):  # there was no C compiler during installation, or the extension is older
    _handle_truncation()


def unpack_entries(table: Array, minimum: int = 1, *, clear: bool = False) -> tuple[Array, Array, Array]:
    """Return the contents of the entries of at least `minimum`, and set these to zero if `clear`.

    These are bins, uint32 (K,), ascending, their numbers of values, int64 (K,), and sums of dropped bits, uint64 (K,).
    """
    entries: Array = np.flatnonzero(table >= minimum)
    counts: Array = (table[entries] // COUNT_UNIT).astype(np.int64)
    sums: Array = table[entries] % COUNT_UNIT
    if clear:
        table[entries] = 0
    first_spare = int(np.searchsorted(entries, table.size - SPARE_ENTRIES))
    if first_spare < entries.size:
        if entries[0]:
            entries, counts, sums = (np.insert(values, 0, 0) for values in (entries, counts, sums))
            first_spare += 1
        counts[0] += counts[first_spare:].sum()
        sums[0] += sums[first_spare:].sum()
    return entries[:first_spare].astype(np.uint32), counts[:first_spare], sums[:first_spare]

"""The form of a histogram that values are added to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphquant.sketch import kernel
from graphquant.sketch.types import MANTISSA, together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphquant.numerics import Array


class Histogram:
    """Counts values by the top of their bit pattern, in a table whose entries are emptied before they can overflow."""

    def __init__(self, bits: int) -> None:
        """Of no values yet; `bits` are the mantissa bits of its bins."""
        self._bits, self._shift = bits, MANTISSA - bits
        self._table = kernel.new_table(bits)
        self._room = kernel.ROOM
        self._emptied: list[tuple[Array, Array, Array]] = []

    def add(self, values: Array) -> tuple[float, float, bool]:
        """Counts the finite ones of `values`, float32 of any shape.

        Returns:
            The smallest and the largest, and whether all are finite; if not, the two mean nothing.
        """
        flat = values.ravel(order="K")
        flat = flat if flat.flags.aligned else flat.copy()
        if flat.size <= kernel.ROOM:
            return self._count(flat)
        parts = [self._count(flat[start : start + kernel.ROOM]) for start in range(0, flat.size, kernel.ROOM)]
        lows, highs, finite = zip(*parts, strict=True)
        return min(lows), max(highs), all(finite)

    def _count(self, values: Array) -> tuple[float, float, bool]:
        """The same for no more values than a table has room for."""
        found = kernel.fill(*self.job(values))
        if not found[2]:
            self.leave_out()
        return found

    def job(self, values: Array) -> tuple[Array, int, Array]:
        """What is to be told the kernel, which then must be told, to count `values`, no more than there is room for."""
        if values.size > self._room:
            self._relieve()
        self._room -= values.size
        return values, self._shift, self._table

    def leave_out(self) -> None:
        """Forgets values that are not finite, which the kernel counts with the others."""
        for code in (0x0FF, 0x1FF):  # sign and exponent of infinities and NaN
            self._table[code << self._bits : code + 1 << self._bits] = 0

    def _relieve(self) -> None:
        """Takes full entries out of the table; they are few, as only such bins have them that most values are in."""
        full = kernel.occupied(self._table, kernel.FULL)
        if full.size:
            self._emptied = [_together([*self._emptied, kernel.unpacked(self._table, full)])]
            self._table[full] = 0
        self._room = kernel.ROOM

    def read(self) -> tuple[Array, Array, Array]:
        """The bins that hold values, uint32 (K,), ascending, their counts, int64 (K,), and sums, uint64 (K,)."""
        return _together([*self._emptied, kernel.unpacked(self._table, kernel.occupied(self._table))])


def _together(parts: Sequence[tuple[Array, Array, Array]]) -> tuple[Array, Array, Array]:
    """Bins, counts and sums of all parts, each bin once."""
    return parts[0] if len(parts) == 1 else together(*map(np.concatenate, zip(*parts, strict=True)))

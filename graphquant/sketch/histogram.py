"""The form of a histogram that values are added to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphquant.sketch import kernel
from graphquant.sketch.types import MANTISSA, together

if TYPE_CHECKING:
    from graphquant.numerics import Array


class Histogram:
    """Counts values by the top of their bit pattern, in a table that is emptied before an entry can overflow."""

    def __init__(self, bits: int) -> None:
        """Of no values yet; `bits` are the mantissa bits of its bins."""
        self._bits = bits
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
        low, high, finite = np.inf, -np.inf, True
        for start in range(0, flat.size, kernel.ROOM):
            part = flat[start : start + kernel.ROOM]
            if part.size > self._room:
                self._empty()
            self._room -= part.size
            found = kernel.fill(part, MANTISSA - self._bits, self._table)
            low, high, finite = min(low, found[0]), max(high, found[1]), finite and found[2]
        if not finite:
            for code in (0x0FF, 0x1FF):  # sign and exponent of infinities and NaN
                self._table[code << self._bits : code + 1 << self._bits] = 0
        return low, high, finite

    def _empty(self) -> None:
        """Takes what the table holds out of it."""
        self._emptied = [self.read()]
        self._table[self._emptied[0][0]] = 0
        self._room = kernel.ROOM

    def read(self) -> tuple[Array, Array, Array]:
        """The bins that hold values, uint32 (K,), ascending, their counts, int64 (K,), and sums, uint64 (K,)."""
        parts = [*self._emptied, kernel.unpacked(self._table)]
        return parts[0] if len(parts) == 1 else together(*map(np.concatenate, zip(*parts, strict=True)))

"""The values of constants, read from the file when they are asked for."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from graphquant.formats.tflite.flat import damaged

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.formats.tflite.flat import Table
    from graphquant.ir import Output
    from graphquant.numerics import Array

WITHOUT_VALUES = frozenset({"string", "resource", "variant"})
"""Types that are no numbers."""

_PACKED = {"int4": (4, ml_dtypes.int4), "uint4": (4, ml_dtypes.uint4), "int2": (2, ml_dtypes.int2)}


class Place(NamedTuple):
    """Where in the file a buffer's bytes are: inside the FlatBuffer, or behind it in files over 2 GB."""

    start: int
    size: int


def place(table: Table) -> Place:
    """Where the bytes of a Buffer are; of no size if it is empty.

    Raises:
        ModelError: They are outside of the file.
    """
    start, size = table.span("data", 1)
    offset = table.number("offset", "Q")
    if not size and offset > 1:  # 1 stands for bytes that were left out
        start, size = offset, table.number("size", "Q")
        if start + size > len(table.flat.data):
            raise damaged(f"a buffer of {size} bytes at {start} is outside of its {len(table.flat.data)}")
    return Place(start, size)


def reader(data: memoryview, held: Place, output: Output, sizes: tuple[int, ...]) -> Callable[[], Array] | None:
    """Gives the value of a constant when called; None if the file does not hold its numbers."""
    if not held.size or output.dtype in WITHOUT_VALUES:
        return None
    return partial(_value, data, held, output, sizes)


def _value(data: memoryview, held: Place, output: Output, sizes: tuple[int, ...]) -> Array:
    count, name = math.prod(sizes), output.dtype or ""
    bits, kind = _PACKED.get(name, (0, None))
    dtype: Any = np.dtype("uint8" if bits else ml_dtypes.bfloat16 if name == "bfloat16" else name)
    needed = (count * bits + 7) // 8 if bits else count * dtype.itemsize
    if needed != held.size:
        raise damaged(f"{output.name!r} of shape {list(sizes)} and {name} has {held.size} bytes, not {needed}")
    stored = np.frombuffer(data, dtype, needed // dtype.itemsize, held.start)
    if not bits:
        return stored.reshape(sizes)
    parts = [(stored >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(-1)[:count].astype(np.uint8).view(np.int8).astype(kind).reshape(sizes)

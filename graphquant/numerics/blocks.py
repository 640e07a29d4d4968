"""Tensors cut into blocks along one axis, each with a scale of its own: ONNX's `block_size`, from opset 21."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.numerics.types import Array


SLAB = 1 << 22
"""Elements of a weight that are worked on at a time."""


def blocks_of(shape: tuple[int, ...], axis: int, block: int) -> tuple[int, ...]:
    """The shape of the scales: that of the tensor with the number of blocks at `axis`; the last may be cut short."""
    return (*shape[:axis], -(-shape[axis] // block), *shape[axis + 1 :])


def in_blocks(value: Array, axis: int, block: int) -> Array:
    """The elements of each block, (number of blocks, block), in the order of the scales; short ones end in zeros."""
    missing = -value.shape[axis] % block
    if missing:
        value = np.pad(value, [(0, missing if place == axis else 0) for place in range(value.ndim)])
    cut = value.reshape(*value.shape[:axis], -1, block, *value.shape[axis + 1 :])
    return np.moveaxis(cut, axis + 1, -1).reshape(-1, block)


def some_in_blocks(value: Array, axis: int, block: int) -> Iterator[Array]:
    """The same, some rows of the tensor at a time: it is a copy."""
    step = rows_at_a_time(value.shape, block if axis == 0 else 1)
    for start in range(0, value.shape[0], step):
        yield in_blocks(value[start : start + step], axis, block)


def rows_at_a_time(shape: tuple[int, ...], multiple: int) -> int:
    """How many rows of a tensor have some `SLAB` elements, as a multiple of a number."""
    rows = max(SLAB * shape[0] // max(math.prod(shape), 1), 1)
    return -(-rows // multiple) * multiple


def spread(values: Array, axis: int, block: int, shape: tuple[int, ...]) -> Array:
    """The value of its block for each element of a tensor of `shape`."""
    if values.ndim == 0:
        return values
    repeated = np.repeat(values, block, axis)
    return repeated[(slice(None),) * axis + (slice(shape[axis]),)]

"""Reductions as in TensorFlow's CPU kernels, which use Eigen: denormals, NaN and the order of a sum.

The order is that of one thread and of 32-byte registers, for which TensorFlow's x86-64 wheels are built. It follows the
Eigen headers in the wheel (unsupported/Eigen/CXX11/src/Tensor/TensorReduction.h). Kernels divide the sum of a tensor of
about 50,000 elements and more among threads; its last bits then depend on their number. For larger tensors, the
effect of NaN and of the sign of zero on a smallest or largest value depends on it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from graphquant.numerics.tf_ranges import flush_denormals

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.numerics.affine import Array

    BinaryReduction: TypeAlias = Callable[[Array, Array], Array]


REGISTER_BYTES = 32
"""Bytes that one instruction processes."""

LEAF_REGISTERS = 1024
"""Up to this number of registers are reduced in sequence. More are divided into halves first."""


def eigen_min(a: Array, b: Array) -> Array:
    """Return `b` where it is smaller, else `a`: also for NaN and equal values, as Eigen's min does."""
    return np.where(b < a, b, a)


def eigen_max(a: Array, b: Array) -> Array:
    """Return `b` where it is larger, else `a`."""
    return np.where(a < b, b, a)


def eigen_add(a: Array, b: Array) -> Array:
    """Return the sum of two values."""
    with np.errstate(over="ignore", invalid="ignore"):
        return flush_denormals(a + b)


def tree_reduce(values: Array, combine: BinaryReduction, start: float) -> Array:
    """Reduce `values` (n, C) over the first axis with `combine` to (C,), in the order of a full reduction.

    A NaN in the last values, those that fill no register, hides all previous values from `eigen_min` and
    `eigen_max`; any other NaN is ignored by them.
    """
    packet = REGISTER_BYTES // values.itemsize
    if len(values) <= packet * LEAF_REGISTERS:
        return _reduce_leaf(values, combine, start)
    split = packet * -(-((len(values) + 1) // 2) // packet)
    halves = (tree_reduce(half, combine, start) for half in (values[:split], values[split:]))
    return sequential_reduce(np.stack(list(halves)), combine, start)


def _reduce_leaf(values: Array, combine: BinaryReduction, start: float) -> Array:
    """Reduce into four registers of intermediate results, then into one, then value by value."""
    packet = REGISTER_BYTES // values.itemsize
    lanes = np.full((packet, *values.shape[1:]), start, values.dtype)
    begin = len(values) // (4 * packet) * (4 * packet)
    if begin:
        registers = np.stack([lanes] * 4)
        for row in values[:begin].reshape(begin // (4 * packet), *registers.shape):
            registers = combine(registers, row)
        lanes = combine(combine(combine(registers[0], registers[1]), registers[2]), registers[3])
    end = len(values) // packet * packet
    for row in values[begin:end].reshape((end - begin) // packet, *lanes.shape):
        lanes = combine(lanes, row)
    while len(lanes) > 1:
        lanes = combine(lanes[: len(lanes) // 2], lanes[len(lanes) // 2 :])
    return combine(sequential_reduce(values[end:], combine, start), lanes[0])


def sequential_reduce(values: Array, combine: BinaryReduction, start: float) -> Array:
    """Reduce `values` (n, C) in sequence to (C,), as reductions over some axes of a tensor do."""
    result = np.full(values.shape[1:], start, values.dtype)
    for row in values:
        result = combine(row, result)
    return result

"""How TensorFlow's CPU kernels compute: what Eigen does with tiny values, with NaN and with the order of a sum.

The order is that of one thread and of 32-byte registers, for which TensorFlow's x86-64 wheels are built; read in the
Eigen headers that the wheel carries (unsupported/Eigen/CXX11/src/Tensor/TensorReduction.h). Kernels split the sum of a
tensor of about 50,000 elements and more among their threads: its last bits then depend on how many there are. The
same holds, for larger tensors still, for what a NaN or the sign of a zero does to a smallest or largest value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.numerics.data_types import Array

    BinaryReduction: TypeAlias = Callable[[Array, Array], Array]


REGISTER_BYTES = 32
"""Bytes that one instruction works on."""

LEAF_REGISTERS = 1024
"""Up to that many registers of values are reduced in a row; more are cut into halves first."""


def flush_denormals(x: Array) -> Array:
    """`x` with each denormal made a zero of its sign, as the processor does for all operands and results."""
    return np.where(np.abs(x) < np.finfo(x.dtype).tiny, np.copysign(np.zeros((), x.dtype), x), x)


def eigen_min(a: Array, b: Array) -> Array:
    """Eigen's min: `b` where it is smaller, else `a`, which is thus what a NaN or two equal values give."""
    return np.where(b < a, b, a)


def eigen_max(a: Array, b: Array) -> Array:
    """Eigen's max, like `eigen_min`."""
    return np.where(a < b, b, a)


def eigen_add(a: Array, b: Array) -> Array:
    """The sum of two values."""
    with np.errstate(over="ignore", invalid="ignore"):
        return flush_denormals(a + b)


def tree_reduce(values: Array, combine: BinaryReduction, start: float) -> Array:
    """`values` (n, C) reduced over the first axis with `combine`, in the order of a full reduction, to (C,).

    A NaN in the last values, those that fill no register, hides all that came before it from `eigen_min` and `eigen_max`;
    any other NaN is ignored by them.
    """
    packet = REGISTER_BYTES // values.itemsize
    if len(values) <= packet * LEAF_REGISTERS:
        return _reduce_leaf(values, combine, start)
    split = packet * -(-((len(values) + 1) // 2) // packet)
    halves = (tree_reduce(half, combine, start) for half in (values[:split], values[split:]))
    return sequential_reduce(np.stack(list(halves)), combine, start)


def _reduce_leaf(values: Array, combine: BinaryReduction, start: float) -> Array:
    """Four registers of running results side by side, then one, then single values."""
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
    """`values` (n, C) reduced one after the other, to (C,): what is done over axes that are not the whole tensor."""
    result = np.full(values.shape[1:], start, values.dtype)
    for row in values:
        result = combine(row, result)
    return result

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

    from graphquant.numerics.types import Array

    Two: TypeAlias = Callable[[Array, Array], Array]

REGISTER = 32
"""Bytes that one instruction works on."""

LEAF = 1024
"""Up to that many registers of values are reduced in a row; more are cut into halves first."""


def flush(x: Array) -> Array:
    """`x` with each denormal made a zero of its sign, as the processor does for all operands and results."""
    return np.where(np.abs(x) < np.finfo(x.dtype).tiny, np.copysign(np.zeros((), x.dtype), x), x)


def smaller(a: Array, b: Array) -> Array:
    """Eigen's min: `b` where it is smaller, else `a`, which is thus what a NaN or two equal values give."""
    return np.where(b < a, b, a)


def larger(a: Array, b: Array) -> Array:
    """Eigen's max, like `smaller`."""
    return np.where(a < b, b, a)


def plus(a: Array, b: Array) -> Array:
    """The sum of two values."""
    with np.errstate(over="ignore", invalid="ignore"):
        return flush(a + b)


def reduce(values: Array, two: Two, start: float) -> Array:
    """`values` (n, C) reduced over the first axis with `two`, in the order of a full reduction, to (C,).

    A NaN in the last values, those that fill no register, hides all that came before it from `smaller` and `larger`;
    any other NaN is ignored by them.
    """
    packet = REGISTER // values.itemsize
    if len(values) <= packet * LEAF:
        return _leaf(values, two, start)
    split = packet * -(-((len(values) + 1) // 2) // packet)
    halves = (reduce(half, two, start) for half in (values[:split], values[split:]))
    return in_a_row(np.stack(list(halves)), two, start)


def _leaf(values: Array, two: Two, start: float) -> Array:
    """Four registers of running results side by side, then one, then single values."""
    packet = REGISTER // values.itemsize
    lanes = np.full((packet, *values.shape[1:]), start, values.dtype)
    begin = len(values) // (4 * packet) * (4 * packet)
    if begin:
        four = np.stack([lanes] * 4)
        for row in values[:begin].reshape(begin // (4 * packet), *four.shape):
            four = two(four, row)
        lanes = two(two(two(four[0], four[1]), four[2]), four[3])
    end = len(values) // packet * packet
    for row in values[begin:end].reshape((end - begin) // packet, *lanes.shape):
        lanes = two(lanes, row)
    while len(lanes) > 1:
        lanes = two(lanes[: len(lanes) // 2], lanes[len(lanes) // 2 :])
    return two(in_a_row(values[end:], two, start), lanes[0])


def in_a_row(values: Array, two: Two, start: float) -> Array:
    """`values` (n, C) reduced one after the other, to (C,): what is done over axes that are not the whole tensor."""
    result = np.full(values.shape[1:], start, values.dtype)
    for row in values:
        result = two(row, result)
    return result

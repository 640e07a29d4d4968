"""Weights that another one with scaled channels gives back bit for bit, as a folded BatchNorm leaves them.

W' = W * s is rounded to float32, so W' / s is W but for the last bits. The record has s and those bits, which are
mostly 0: some 2 bits a weight when they are compressed, where the weight itself has 32.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.numerics import Array

LARGEST = 127
"""Steps of float32 that a weight may be off."""

LOOKED_AT = 8
"""Sizes of the corner of a weight by which most that are no scaled ones are told."""

CLOSE = 1e-5

Blocks = tuple[int, int, int]
"""A weight's values as (before, channels, behind)."""


def fit(weight: bytes, scaled: bytes, sizes: tuple[int, ...]) -> tuple[Blocks, bytes] | None:
    """The channels along which `scaled` is `weight` times a factor, and what gives it back; None if it is not.

    Args:
        weight: float32 values.
        scaled: As many.
        sizes: The weight's shape.
    """
    if math.prod(sizes) * 4 != len(weight) or len(weight) != len(scaled):
        return None
    one, other = (np.frombuffer(data, "<f4") for data in (weight, scaled))
    for blocks in _blocks(sizes):
        a, b = one.reshape(blocks), other.reshape(blocks)
        corner = (slice(LOOKED_AT), slice(LOOKED_AT), slice(LOOKED_AT))
        near = _factors(a[corner], b[corner])
        if near is None or not np.allclose(a[corner] * near[None, :, None], b[corner], rtol=CLOSE, atol=0):
            continue
        factors = _factors(a, b)
        if factors is None:
            continue
        off = a.view("<i4").astype(np.int64) - _undone(b, factors).view("<i4")
        if np.abs(off).max(initial=0) <= LARGEST:
            return blocks, factors.astype("<f8").tobytes() + off.astype(np.int8).tobytes()
    return None


def undo(scaled: bytes, blocks: Blocks, rest: bytes) -> bytes:
    """The weight that `fit` was given; a ValueError if this is no such thing."""
    values = np.frombuffer(scaled, "<f4").reshape(blocks)
    factors = np.frombuffer(rest[: blocks[1] * 8], "<f8")
    off = np.frombuffer(rest[blocks[1] * 8 :], np.int8).reshape(blocks)
    return (_undone(values, factors).view("<i4") + off).astype("<i4").tobytes()


def _blocks(sizes: tuple[int, ...]) -> Iterator[Blocks]:
    """The axes that channels may lie on: any one, or the last two (TensorFlow's depthwise kernels)."""
    ends = [(axis, axis + 1) for axis in range(len(sizes))] + ([(len(sizes) - 2, len(sizes))] if len(sizes) > 1 else [])
    for first, last in ends:
        yield math.prod(sizes[:first]), math.prod(sizes[first:last]), math.prod(sizes[last:])


def _factors(one: Array, other: Array) -> Array | None:
    """What each channel was multiplied by, float64 (C,); 1 where it is all zeros, None where there is none."""
    wide = one.astype(np.float64)
    power = np.einsum("ocs,ocs->c", wide, wide)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factors: Array = np.where(power > 0, np.einsum("ocs,ocs->c", wide, other.astype(np.float64)) / power, 1.0)
    return factors if np.isfinite(factors).all() and factors.all() else None


def _undone(values: Array, factors: Array) -> Array:
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        return np.ascontiguousarray((values / factors[None, :, None]).astype("<f4"))


__all__ = ["Blocks", "fit", "undo"]

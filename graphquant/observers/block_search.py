"""Search of the scale and zero point of each block of a weight with the least expected error of the product.

For independent inputs with mean m and variance v, the expected squared error of a block's part of a product is v times
the sum of the squared rounding errors, plus m**2 times the square of their sum.

A block has few values, so a histogram would be larger than the block. Instead, some scales and zero points are tried on
the values themselves, for many blocks at once. After each trial, the scale becomes that of least squares for the
integers, as in Banner et al. 2018 and in the alternating steps of HQQ (Badri and Shaji 2023, "Half-Quadratic
Quantization of Large Machine Learning Models"). A zero point of 7 instead of 8 mirrors an unsigned 4-bit grid, so that
an asymmetric type also has the better of both signs.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Final

import numpy as np

from graphquant.numerics import (
    EXACT_BITS,
    LARGEST_VALUE,
    SMALL_BITS,
    SMALLEST_SCALE,
    Array,
    QParams,
    QuantizationGrid,
    block_scale_shape,
    map_slabs,
    qparams_from_scale,
    row_slices,
    split_blocks,
)
from graphquant.observers import histogram_kernel

SHRINK_FACTORS: Final = (1.0, 0.94, 0.88, 0.82, 0.76, 0.7)  # factors of both ends of the range that are tried first
LOW_BIT_SHRINK_FACTORS: Final = (0.6, 0.5, 0.4)  # also tried for up to `LOW_BITS`, which gain by clipping more
LOW_BITS: Final = 3
NEIGHBORS: Final = ((1.0, 1), (1.0, -1), (0.95, 1), (0.95, -1), (1.05, 1), (1.05, -1), (0.97, 0), (1.03, 0), (1.0, 0))
"""Changes of the best trial that are tried next: factor of the scale, and difference of the zero point."""

SMALLEST_RELATIVE_SCALE: Final = np.float32(1e-6)  # relative to a block's largest value
FLOAT32_ROUNDING: Final = 1 - 2.0**-23  # factor below which rounding to float32 does not exceed a limit
SQUARED_MEAN: Final = np.float32(0.05)
"""Squared mean of the inputs relative to their variance, which is not known without data: 0 behind a LayerNorm without
bias, 0.47 for the positive half of a normal distribution. docs/decisions/0062-algorithms.md has the effect."""

CHUNK_ELEMENTS: Final = 1 << 17  # values that numpy searches at once, so that temporary arrays fit into the cache
MAX_KERNEL_BLOCK: Final = 1 << 13  # largest block of the C kernel, which copies 128 blocks


def search_block_params(value: Array, grid: QuantizationGrid, axis: int, block: int) -> QParams:
    """Return scale and zero point of each block of a finite weight `value` with the least expected error found.

    On blocks of normal values, the squared error is within 0.15 dB of the least one. `grid` has an integer type.
    """
    slabs = [value[rows] for rows in row_slices(value.shape, block if axis == 0 else 1, CHUNK_ELEMENTS)]
    results = map_slabs(partial(_search_slab, grid=grid, axis=axis, block=block), slabs, value.size)
    scale, zero_point = map(np.concatenate, zip(*results, strict=True))
    return qparams_from_scale(scale, zero_point, grid.type, narrow=grid.narrow, axis=axis, block=block)


def _search_slab(slab: Array, grid: QuantizationGrid, axis: int, block: int) -> tuple[Array, Array]:
    """Return scale, float32, and zero point, int8 for few bits and else int32, of each block of some rows."""
    (qmin, qmax), shape = grid.type.limits(narrow=grid.narrow), block_scale_shape(slab.shape, axis, block)
    values, results = np.ascontiguousarray(slab, np.float32), np.empty((3, math.prod(shape)), np.float32)
    shrink = SHRINK_FACTORS + (LOW_BIT_SHRINK_FACTORS if grid.type.bits <= LOW_BITS else ())
    kernel, factors = histogram_kernel.search_blocks, np.array(shrink, np.float32)
    size = min(block, slab.shape[axis])
    if kernel is not None and grid.type.bits <= EXACT_BITS and size <= MAX_KERNEL_BLOCK:
        sizes, neighbors = (slab.shape[axis], math.prod(slab.shape[axis + 1 :]), size), np.array(NEIGHBORS, np.float32)
        numbers = qmin, qmax, SQUARED_MEAN, grid.type.symmetric_zero_point, SMALLEST_RELATIVE_SCALE
        kernel(values, results, factors, neighbors, sizes, numbers, grid.symmetric, grid.power_of_two)
    else:
        blocks, step = split_blocks(values, axis, size), max(CHUNK_ELEMENTS // size, 1)
        for start in range(0, len(blocks), step):
            results[:, start : start + step] = _search_chunk(blocks[start : start + step], grid, factors)
    best_scale, best_zero, unit = (result.reshape(shape) for result in results)
    farthest_step = np.maximum(best_zero - qmin, qmax - best_zero)
    with np.errstate(over="ignore", under="ignore"):
        scale = np.clip(
            best_scale.astype(np.float64) * unit, SMALLEST_SCALE, LARGEST_VALUE * FLOAT32_ROUNDING / farthest_step
        )
    zero_type = np.int8 if grid.type.bits <= SMALL_BITS else np.int32
    return np.where(unit > 0, scale, 1.0).astype(np.float32), best_zero.astype(zero_type)


def _search_chunk(blocks: Array, grid: QuantizationGrid, factors: Array) -> Array:
    """Return scale, zero point and unit of the scale, float32 (3, N), of each row of `blocks` (N, block), as in C.

    The unit is 0 if all values are.
    """
    qmin, qmax = grid.type.limits(narrow=grid.narrow)
    # Blocks are columns: sums over a block add rows, which is fast, and a scale broadcasts along the last axis.
    columns = np.ascontiguousarray(blocks.T, np.float32)
    if len(blocks) == 1:  # numpy adds the values of a single column in another order
        columns = np.repeat(columns, 2, axis=1)
    # Squares of very large or small values would overflow or vanish. A power of two rounds nothing.
    unit = np.ldexp(np.float32(1), np.frexp(np.abs(columns).max(0))[1] - 1)
    columns = columns / unit
    low, high = np.minimum(columns.min(0), 0), np.maximum(columns.max(0), 0)
    sums, best = columns.sum(0), np.zeros((3, columns.shape[1]), np.float32)  # gains, scales and zero points
    best[0], best[1] = -1, 1
    best_scale, best_zero = best[1:]

    def try_params(scale: Array, zero: Array) -> None:
        """Keep the params of the blocks whose error is the least so far, with the best scale for their integers."""
        scale = np.maximum(scale, SMALLEST_RELATIVE_SCALE)
        if grid.power_of_two:
            mantissa, exponent = np.frexp(scale)
            scale = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))  # noqa: PLR2004  # frexp's smallest mantissa
        codes = np.clip(np.rint(columns * (1 / scale)), qmin - zero, qmax - zero)
        code_sums = codes.sum(0)
        products = np.einsum("ij,ij->j", codes, columns) + SQUARED_MEAN * code_sums * sums
        powers = np.einsum("ij,ij->j", codes, codes) + SQUARED_MEAN * code_sums * code_sums
        if not grid.power_of_two:
            scale = np.where(products > 0, products / np.maximum(powers, 1), scale)
        gain = scale * (2 * products - scale * powers)  # expected error with all integers 0, less that of these
        np.copyto(best, np.stack([gain, scale, zero]), where=gain > best[0])

    for factor in factors:
        if grid.symmetric:
            zero = np.full_like(low, grid.type.symmetric_zero_point)
            scale = np.maximum(high / (qmax - zero), low / (qmin - zero)) * factor
        else:
            scale = np.maximum((high - low) / (qmax - qmin) * factor, SMALLEST_RELATIVE_SCALE)
            zero = np.clip(np.rint(qmin - low * factor / scale), qmin, qmax)
        try_params(scale, zero)
    for factor, step in NEIGHBORS:
        if not (grid.symmetric and step):
            try_params(best_scale * np.float32(factor), np.clip(best_zero + step, qmin, qmax))
    return np.stack([best_scale, best_zero, np.where(high > low, unit, 0)])[:, : len(blocks)]

"""Quantizing weights some rows at a time gives the same as quantizing them at once."""

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.qparams import choose_qparams

from graphquant.numerics import (
    IntType,
    Range,
    affine,
    block_scale_shape,
    parse_type,
    quantize,
    quantize_to_dtype,
    row_slices,
)
from graphquant.numerics.affine import split_blocks


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4", "int16", "float8_e4m3fn"])
@pytest.mark.parametrize(("axis", "block"), [(None, None), (0, None), (1, None), (2, None), (0, 3), (1, 4), (0, 8)])
@pytest.mark.parametrize("shape", [(7, 5, 4), (16, 9, 3), (1, 20, 3)])
def test_rows(dtype: str, axis: Any, block: Any, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """For all slab sizes, with and without threads, values equal those that are quantized at once."""
    rng = np.random.default_rng(0)
    value = rng.standard_normal(shape).astype(np.float32)
    size: tuple[int, ...] = () if axis is None else (shape[axis],)
    if block is not None:
        size = block_scale_shape(shape, axis, block)
    high = rng.uniform(0.5, 3, size)
    low = np.zeros(size) if dtype.startswith("u") else -high
    params = choose_qparams(
        Range(low, high), parse_type(dtype), symmetric=not dtype.startswith("u"), axis=axis, block=block
    )
    storage_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    whole = quantize(value, params).astype(storage_dtype)
    for slab, parallel in product((1, 10, 37, 1 << 22), (0, 1 << 22)):
        monkeypatch.setattr(affine, "SLAB_ELEMENTS", slab)
        monkeypatch.setattr(affine, "MIN_PARALLEL_ELEMENTS", parallel)
        actual = quantize_to_dtype(value.__getitem__, value.shape, params, storage_dtype)
        assert actual.dtype == storage_dtype
        np.testing.assert_array_equal(actual.astype(np.float32), whole.astype(np.float32))


def test_scalar() -> None:
    """A scalar has no rows."""
    params = choose_qparams(Range(np.array(-1.0), np.array(1.0)), IntType(8, signed=True), symmetric=True)
    assert quantize_to_dtype(np.array(0.5, np.float32).__getitem__, (), params, np.dtype(np.int8)).tolist() == 64


@pytest.mark.parametrize(("axis", "block"), [(0, 3), (0, 4), (1, 4), (2, 2)])
def test_blocks_of_some_rows(axis: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of slabs, concatenated, are the blocks of the whole tensor."""
    value = np.random.default_rng(0).standard_normal((10, 6, 5)).astype(np.float32)
    for slab in (1, 50, 100, 1 << 22):
        monkeypatch.setattr(affine, "SLAB_ELEMENTS", slab)
        slabs = [split_blocks(value[rows], axis, block) for rows in row_slices(value.shape, block if axis == 0 else 1)]
        assert len(slabs) > 1 or slab >= 100
        np.testing.assert_array_equal(np.concatenate(slabs), split_blocks(value, axis, block))

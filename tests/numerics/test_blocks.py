"""Blocks along an axis: their number, elements and scales."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.qparams import choose_qparams

from graphquant.errors import InternalError
from graphquant.numerics import (
    IntType,
    QParams,
    Range,
    block_scale_shape,
    broadcast_to_tensor,
    dequantize,
    qparams_from_scale,
    quantize,
)
from graphquant.numerics.affine import split_blocks


@st.composite
def cuts(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Draw a tensor of up to 4 axes, the axis of its blocks and their size."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    axis = draw(st.integers(0, len(shape) - 1))
    value = np.random.default_rng(draw(st.integers(0, 99))).normal(size=shape).astype(np.float32)
    return value, axis, draw(st.integers(2, 12))


@given(cut=cuts())
def test_each_block_has_its_elements(cut: tuple[np.ndarray, int, int]) -> None:
    """Block k of a row has its elements from k * size on, padded with zeros, in the order of the scales."""
    value, axis, size = cut
    shape = block_scale_shape(value.shape, axis, size)
    assert shape[axis] == -(-value.shape[axis] // size)
    cells = split_blocks(value, axis, size).reshape(*shape, size)
    for index in np.ndindex(*shape):
        row = value[(*index[:axis], slice(None), *index[axis + 1 :])]
        elements = row[index[axis] * size : (index[axis] + 1) * size]
        np.testing.assert_array_equal(cells[index], np.append(elements, np.zeros(size - elements.size)))


@given(cut=cuts(), symmetric=st.booleans())
def test_each_element_has_its_blocks_scale(cut: tuple[np.ndarray, int, int], *, symmetric: bool) -> None:
    """Quantizing with blocks equals quantizing each block separately with its own scale and zero point."""
    value, axis, size = cut
    cells = split_blocks(value, axis, size)
    shape = block_scale_shape(value.shape, axis, size)
    limits = Range(cells.min(1).reshape(shape), cells.max(1).reshape(shape))
    params = choose_qparams(limits, IntType(4, signed=True), symmetric=symmetric, axis=axis, block=size)
    dequantized = dequantize(quantize(value, params), params)
    for index in np.ndindex(*shape):
        spot = (*index[:axis], slice(index[axis] * size, (index[axis] + 1) * size), *index[axis + 1 :])
        block_params = qparams_from_scale(params.scale[index], params.zero_point[index], params.type)
        np.testing.assert_array_equal(dequantized[spot], dequantize(quantize(value[spot], block_params), block_params))
    assert broadcast_to_tensor(params.scale, params, value.shape).shape == value.shape


def test_scales_must_fit() -> None:
    """Scales of several axes without a block size raise an InternalError."""
    ones = np.ones((2, 3))
    with pytest.raises(InternalError, match="block"):
        QParams(scale=ones, zero_point=ones, type=IntType(8, signed=True), axis=0)

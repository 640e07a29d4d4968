"""Blocks along an axis: how many there are, which elements each has, and their scales."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphquant.errors import InternalError
from graphquant.numerics import (
    IntType,
    QParams,
    Range,
    blocks_of,
    choose,
    dequantize,
    from_scale,
    in_blocks,
    over,
    quantize,
)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """A tensor of up to 4 axes, the axis of its blocks and their size."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    axis = draw(st.integers(0, len(shape) - 1))
    value = np.random.default_rng(draw(st.integers(0, 99))).normal(size=shape).astype(np.float32)
    return value, axis, draw(st.integers(2, 12))


@given(cut=cuts())
def test_each_block_has_its_elements(cut: tuple[np.ndarray, int, int]) -> None:
    """Block k of a row holds its elements from k * size on, zeros behind the end, in the order of the scales."""
    value, axis, size = cut
    shape = blocks_of(value.shape, axis, size)
    assert shape[axis] == -(-value.shape[axis] // size)
    cells = in_blocks(value, axis, size).reshape(*shape, size)
    for place in np.ndindex(*shape):
        row = value[(*place[:axis], slice(None), *place[axis + 1 :])]
        held = row[place[axis] * size : (place[axis] + 1) * size]
        np.testing.assert_array_equal(cells[place], np.append(held, np.zeros(size - held.size)))


@given(cut=cuts(), symmetric=st.booleans())
def test_each_element_has_its_blocks_scale(cut: tuple[np.ndarray, int, int], *, symmetric: bool) -> None:
    """Quantizing with blocks is quantizing each block by itself with its own scale and zero point."""
    value, axis, size = cut
    cells = in_blocks(value, axis, size)
    shape = blocks_of(value.shape, axis, size)
    seen = Range(cells.min(1).reshape(shape), cells.max(1).reshape(shape))
    params = choose(seen, IntType(4, signed=True), symmetric=symmetric, axis=axis, block=size)
    found = dequantize(quantize(value, params), params)
    for place in np.ndindex(*shape):
        spot = (*place[:axis], slice(place[axis] * size, (place[axis] + 1) * size), *place[axis + 1 :])
        alone = from_scale(params.scale[place], params.zero_point[place], params.type)
        np.testing.assert_array_equal(found[spot], dequantize(quantize(value[spot], alone), alone))
    assert over(params.scale, params, value.shape).shape == value.shape


def test_scales_must_fit() -> None:
    """Scales of several axes without a block size are an error of the program."""
    ones = np.ones((2, 3))
    with pytest.raises(InternalError, match="block"):
        QParams(scale=ones, zero_point=ones, type=IntType(8, signed=True), axis=0)

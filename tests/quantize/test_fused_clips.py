"""Fusion of a Relu or Clip depends on the integers saturating exactly at its limits."""

from __future__ import annotations

import numpy as np
import pytest

from graphquant.numerics import IntType, qparams_from_scale
from graphquant.quantize.ties import saturates_like_clip

UINT8, INT8 = IntType(8, signed=False), IntType(8, signed=True)
RELU = (0.0, np.inf)


@pytest.mark.parametrize(
    ("dtype", "zero_point", "fuses"),
    [(UINT8, 0, True), (UINT8, 1, False), (UINT8, 2, False), (INT8, -128, True), (INT8, -127, False), (INT8, 0, False)],
)
def test_a_relu_needs_the_smallest_integer_as_zero_point(dtype: IntType, zero_point: int, fuses: bool) -> None:
    """One step more below zero already lets negative values through."""
    params = qparams_from_scale(np.float32(0.1), np.int32(zero_point), dtype)
    assert saturates_like_clip(params, RELU) is fuses


def test_the_tolerance_of_a_clip_does_not_apply_to_a_relu() -> None:
    """A step below the tolerance still lets negative values through a Relu. A Clip tolerates it."""
    params = qparams_from_scale(np.float32(1e-9), np.int32(1), UINT8)
    assert not saturates_like_clip(params, RELU)
    assert saturates_like_clip(params, (0.0, 6.0))


@pytest.mark.parametrize(("scale", "fuses"), [(6 / 255, True), (5.9 / 255, True), (6.1 / 255, False)])
def test_a_clip_needs_a_range_inside_its_limits(scale: float, fuses: bool) -> None:
    """A range beyond the upper limit is not clamped by the integers."""
    params = qparams_from_scale(np.float32(scale), np.int32(0), UINT8)
    assert saturates_like_clip(params, (0.0, 6.0)) is fuses

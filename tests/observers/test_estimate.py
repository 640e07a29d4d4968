"""The cost of a scale and zero point, estimated from a sketch and compared with the exact one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.qparams import asymmetric_qparams, choose_qparams

from graphquant.numerics import IntType, Range, dequantize, quantize
from graphquant.observers import estimate_cost, sketch_values
from graphquant.observers.distribution import distribution_of

RANDOM = np.random.default_rng(7)
TENSORS = {
    "normal": RANDOM.normal(size=20_000),
    "one-sided": np.maximum(RANDOM.normal(size=20_000), 0),
    "heavy-tailed": RANDOM.standard_t(2, 20_000),
    "tiny": RANDOM.normal(size=20_000) * 1e-12,
}
UINT8, INT4, INT16 = IntType(8, signed=False), IntType(4, signed=True), IntType(16, signed=True)


@pytest.mark.parametrize("dtype", [UINT8, INT4], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("name", TENSORS)
def test_estimate_equals_the_error_of_quantizing(name: str, share: float, dtype: IntType) -> None:
    """The SQNR differs by at most a tenth of a decibel, clipped shares by at most the width of a bin."""
    values = TENSORS[name].astype(np.float32)
    params = asymmetric_qparams(share * float(values.min()), share * float(values.max()), dtype)
    cost = estimate_cost(sketch_values(values, bits=7), params)
    assert cost is not None
    error = np.square(values.astype(np.float64) - dequantize(quantize(values, params), params)).mean()
    power = np.square(values.astype(np.float64)).mean()
    assert cost.sqnr == pytest.approx(10 * math.log10(power / error), abs=0.1)
    assert cost.power == pytest.approx(power, rel=1e-4)
    half = float(params.scale) / 2
    below = np.mean(values < float(params.range.low) - half)
    above = np.mean(values > float(params.range.high) + half)
    assert cost.clipped_below == pytest.approx(below, abs=2e-3)
    assert cost.clipped_above == pytest.approx(above, abs=2e-3)
    assert cost.clipped == cost.clipped_below + cost.clipped_above


def test_nothing_is_clipped_by_min_and_max() -> None:
    """The range of the smallest and largest value clips no value, for each rounding of the zero point."""
    for name, values in TENSORS.items():
        cost = estimate_cost(
            sketch_values(values, bits=7), asymmetric_qparams(float(values.min()), float(values.max()))
        )
        assert cost is not None
        assert (cost.clipped_below, cost.clipped_above) == (0, 0), name


def test_values_on_the_grid_lose_nothing() -> None:
    """If each value is a multiple of the step, the SQNR is far above that of float32; for zeros it is infinite."""
    pixels = np.arange(256).repeat(3).astype(np.float32)
    cost = estimate_cost(sketch_values(pixels, bits=7), asymmetric_qparams(0, 255))
    assert cost is not None
    assert cost.sqnr > 140
    zeros = estimate_cost(sketch_values(np.zeros(5, np.float32), bits=7), asymmetric_qparams(0, 1))
    assert zeros is not None
    assert (zeros.sqnr, zeros.squared_error, zeros.power, zeros.clipped) == (math.inf, 0, 0, 0)


def test_sketches_without_an_estimate() -> None:
    """Without a histogram, with too few bits for the type, or with scales per channel, there is no estimate."""
    values = TENSORS["normal"].reshape(4, -1)
    assert estimate_cost(sketch_values(values), asymmetric_qparams(-1, 1)) is None
    assert estimate_cost(sketch_values(values, bits=7), asymmetric_qparams(-1, 1, INT16)) is None
    assert estimate_cost(sketch_values(values, bits=10), asymmetric_qparams(-1, 1, INT16)) is not None
    per_channel = choose_qparams(Range(-np.ones(4), np.ones(4)), UINT8, symmetric=False, axis=0)
    assert estimate_cost(sketch_values(values, bits=7), per_channel) is None
    assert estimate_cost(sketch_values(np.full(3, np.nan), bits=7), asymmetric_qparams(-1, 1)) is None


@pytest.mark.parametrize("dtype", [UINT8, INT4, INT16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", TENSORS)
def test_clipping_error_is_a_lower_bound(name: str, dtype: IntType) -> None:
    """The clipping error is at most the squared error, and close to it if nearly all values are clipped."""
    values = TENSORS[name].astype(np.float32)
    shares = np.append(2.0 ** -np.arange(0, 16, 0.25), 1e-9)
    ends = shares * float(values.min()), shares * float(values.max())
    params = choose_qparams(Range(*ends), dtype, symmetric=False, axis=0)
    values_distribution = distribution_of(sketch_values(values, bits=10 if dtype is INT16 else 7))
    least, error = values_distribution.clipping_error(params), values_distribution.squared_error(params)
    assert (least <= error).all()
    assert (least[:1] < error[:1] / 2).all()
    assert least[-1] == pytest.approx(error[-1], rel=1e-3)

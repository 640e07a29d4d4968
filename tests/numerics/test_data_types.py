"""float8 rounding and saturation, compared with ml_dtypes and the definition, and names and limits of all types."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.qparams import choose_qparams

from graphquant.numerics import (
    FloatType,
    IntType,
    QuantizationGrid,
    Range,
    dequantize,
    parse_type,
    qparams_from_scale,
    quantize,
)
from graphquant.numerics.affine import FLOAT8_NAMES

floats = st.floats(width=32, allow_nan=False)


def values_of(name: str) -> np.ndarray:
    """Return every finite value of a float8 type, ascending, float64."""
    every = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, name)).astype(np.float64)
    return np.unique(every[np.isfinite(every)])


@pytest.mark.parametrize("name", FLOAT8_NAMES)
@given(x=floats)
def test_rounding_is_to_the_nearest_value(name: str, x: float) -> None:
    """Values round to the nearest one, ties to an even last bit, and never beyond the largest."""
    every = values_of(name)
    rounded = float(FloatType(name).round_values(np.array(x, np.float32)))
    distances = np.abs(every - min(max(x, every[0]), every[-1]))
    nearest = every[distances == distances.min()]
    assert rounded in nearest
    if nearest.size > 1:
        code = np.array(rounded).astype(getattr(ml_dtypes, name)).view(np.uint8)
        assert code % 2 == 0


@pytest.mark.parametrize(
    ("name", "largest", "smallest"), [("float8_e4m3fn", 448, 2**-9), ("float8_e5m2", 57344, 2**-16)]
)
def test_limits_and_saturation(name: str, largest: float, smallest: float) -> None:
    """Too large values and infinity become the largest value, half of the smallest becomes zero, and NaN stays NaN."""
    kind = FloatType(name)
    assert kind.limits() == kind.limits(narrow=True) == (-largest, largest)
    assert (kind.bits, kind.signed, kind.symmetric_zero_point, kind.container) == (8, True, 0, name)
    inputs = np.array([np.inf, -np.inf, 1e9, largest * 1.01, smallest, smallest / 2, -0.0, np.nan], np.float32)
    np.testing.assert_array_equal(
        kind.round_values(inputs), [largest, -largest, largest, largest, smallest, 0.0, -0.0, np.nan]
    )
    assert np.signbit(kind.round_values(inputs)[6])


@pytest.mark.parametrize("name", FLOAT8_NAMES)
def test_each_representable_value_is_unchanged(name: str) -> None:
    """A value of the type, times a power-of-two scale, quantizes to itself."""
    every = values_of(name).astype(np.float32)
    params = qparams_from_scale(np.array(0.25), np.array(0), FloatType(name))
    np.testing.assert_array_equal(quantize(every / 4, params), every)
    np.testing.assert_array_equal(dequantize(every, params), every / 4)


@pytest.mark.parametrize("name", FLOAT8_NAMES)
def test_the_scale_covers_the_range(name: str) -> None:
    """The largest magnitude becomes the largest value, or less with a power-of-two scale. There is no zero point."""
    kind = FloatType(name)
    observed = Range(np.array(-3.0), np.array(5.0))
    for symmetric in (True, False):
        params = choose_qparams(observed, kind, symmetric=symmetric)
        assert params.scale == np.float32(5 / kind.limits()[1])
        assert params.zero_point == 0
        np.testing.assert_allclose([params.range.low, params.range.high], [-5, 5], rtol=1e-6)
    rounded = QuantizationGrid(type=kind, symmetric=True, power_of_two=True).qparams(observed)
    assert np.frexp(rounded.scale)[0] == 0.5
    assert params.scale <= rounded.scale < 2 * params.scale


def test_names() -> None:
    """Each type is found by its name; other names raise an error."""
    for sign, bits in itertools.product(("", "u"), range(2, 32)):
        assert parse_type(f"{sign}int{bits}") == IntType(bits, signed=not sign)
    for name in FLOAT8_NAMES:
        assert parse_type(name) == FloatType(name)
    for name in ("float8", "float8_e4m3fnuz", "float16", "int33", "int1", "uint32", "INT8"):
        with pytest.raises(ValueError, match=name):
            parse_type(name)

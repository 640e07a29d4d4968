from __future__ import annotations

import math

import numpy as np
import pytest

from graphquant.analysis.comparison import ErrorSums, ignore_overflow
from graphquant.observers.histogram_kernel import SQUARES_CHUNK


def error_sums(expected: object, actual: object, dtype: str = "float32") -> ErrorSums:
    """Of two arrays."""
    sums = ErrorSums()
    with ignore_overflow():
        sums.add(np.asarray(expected, dtype), np.asarray(actual, dtype), full=True)
    return sums


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint8"])
def test_figures(dtype: str) -> None:
    """SQNR, cosine and largest error of a few values, for each dtype."""
    sums = error_sums([3, 0, 4], [3, 1, 4], dtype)
    assert sums.sqnr == pytest.approx(10 * math.log10(25))
    assert sums.cosine == pytest.approx(25 / math.sqrt(25 * 26))
    assert (sums.max_error, sums.count, sums.problem) == (1, 3, "")


def test_sums_over_blocks_equal_one_sum() -> None:
    """Values in several chunks and calls give the result of NumPy on all of them."""
    random = np.random.default_rng(0)
    expected = random.normal(size=(3, 7, SQUARES_CHUNK // 5)).astype(np.float32)
    actual = expected + random.normal(0, 0.01, expected.shape).astype(np.float32)
    single = ErrorSums()
    for a, b in zip(expected, actual, strict=True):
        single.add(a, b, full=True)
    wide, off = expected.astype(float), actual.astype(float) - expected
    assert single.sqnr == pytest.approx(10 * np.log10(np.square(wide).sum() / np.square(off).sum()), abs=1e-4)
    assert single.cosine == pytest.approx(
        np.vdot(wide, actual) / np.linalg.norm(wide) / np.linalg.norm(actual.astype(float)), abs=1e-7
    )
    assert single.max_error == pytest.approx(np.abs(off).max(), rel=1e-6)


@pytest.mark.parametrize("size", [1e-30, 1e25])
def test_sums_beyond_float32(size: float) -> None:
    """Very small and very large values are summed exactly."""
    assert error_sums([size, size], [size, size * 1.5]).sqnr == pytest.approx(10 * math.log10(2 / 0.25), abs=1e-4)


def test_equal_values() -> None:
    """Equal values are infinitely good, zeros and infinities too."""
    sums = error_sums([0.0, math.inf, math.nan, 2.0], [0.0, math.inf, math.nan, 2.0])
    assert (sums.sqnr, sums.cosine, sums.max_error, sums.nonfinite) == (math.inf, 1.0, 0.0, 0)
    assert error_sums([0.0], [0.0]).sqnr == math.inf


def test_values_that_are_nonfinite_in_one_model() -> None:
    """A NaN or infinity on one side is as bad as can be, and is counted."""
    sums = error_sums([1.0, 2.0, 3.0], [1.0, math.nan, math.inf])
    assert (sums.sqnr, sums.nonfinite) == (-math.inf, 2)


def test_shapes() -> None:
    """Arrays of different shapes are a problem that stays, and no crash."""
    sums = error_sums(np.ones((1, 3)), np.ones((1, 2)))
    sums.add(np.ones(4), np.ones(5))
    assert sums.problem == "shapes differ: [1, 3] and [1, 2]"


def test_noise_without_signal() -> None:
    """A value whose expected value is 0 has no signal."""
    assert error_sums([0.0], [1.0]).sqnr == -math.inf
    assert error_sums([0.0], [1.0]).cosine == 0.0

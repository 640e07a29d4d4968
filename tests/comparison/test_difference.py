from __future__ import annotations

import math

import numpy as np
import pytest

from graphquant.comparison.difference import Difference, quiet
from graphquant.sketch.kernel import SQUARED


def difference(expected: object, found: object, dtype: str = "float32") -> Difference:
    """Of two arrays."""
    made = Difference()
    with quiet():
        made.add(np.asarray(expected, dtype), np.asarray(found, dtype), full=True)
    return made


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint8"])
def test_figures(dtype: str) -> None:
    """SQNR, cosine and largest difference of a few values, whatever their type."""
    found = difference([3, 0, 4], [3, 1, 4], dtype)
    assert found.sqnr == pytest.approx(10 * math.log10(25))
    assert found.cosine == pytest.approx(25 / math.sqrt(25 * 26))
    assert (found.largest, found.count, found.problem) == (1, 3, "")


def test_many_values_are_summed_as_one() -> None:
    """Values that take several chunks, in several calls, give what numpy gives of all of them."""
    random = np.random.default_rng(0)
    expected = random.normal(size=(3, 7, SQUARED // 5)).astype(np.float32)
    found = expected + random.normal(0, 0.01, expected.shape).astype(np.float32)
    one = Difference()
    for a, b in zip(expected, found, strict=True):
        one.add(a, b, full=True)
    wide, off = expected.astype(float), found.astype(float) - expected
    assert one.sqnr == pytest.approx(10 * np.log10(np.square(wide).sum() / np.square(off).sum()), abs=1e-4)
    assert one.cosine == pytest.approx(np.vdot(wide, found) / np.linalg.norm(wide) / np.linalg.norm(found), abs=1e-7)
    assert one.largest == pytest.approx(np.abs(off).max(), rel=1e-6)


@pytest.mark.parametrize("size", [1e-30, 1e25])
def test_sums_beyond_float32(size: float) -> None:
    """Very small and very large values lose nothing."""
    assert difference([size, size], [size, size * 1.5]).sqnr == pytest.approx(10 * math.log10(2 / 0.25), abs=1e-4)


def test_nothing_differs() -> None:
    """Equal values are infinitely good, zeros and infinities too."""
    found = difference([0.0, math.inf, math.nan, 2.0], [0.0, math.inf, math.nan, 2.0])
    assert (found.sqnr, found.cosine, found.largest, found.bad) == (math.inf, 1.0, 0.0, 0)
    assert difference([0.0], [0.0]).sqnr == math.inf


def test_values_of_one_alone_that_are_not_finite() -> None:
    """A NaN or infinity on one side is as bad as can be, and is counted."""
    found = difference([1.0, 2.0, 3.0], [1.0, math.nan, math.inf])
    assert (found.sqnr, found.bad) == (-math.inf, 2)


def test_shapes() -> None:
    """Arrays of different shapes are a problem that stays, and no crash."""
    found = difference(np.ones((1, 3)), np.ones((1, 2)))
    found.add(np.ones(4), np.ones(5))
    assert found.problem == "shapes differ: [1, 3] and [1, 2]"


def test_noise_without_signal() -> None:
    """What should be nothing and is something has no signal at all."""
    assert difference([0.0], [1.0]).sqnr == -math.inf
    assert difference([0.0], [1.0]).cosine == 0.0

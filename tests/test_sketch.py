"""Sketches: exact, mergeable statistics; and the observers that turn them into ranges."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from graphquant.errors import DataError
from graphquant.numerics import IntType, Range, choose
from graphquant.sketch import EMPTY, OBSERVERS, Sketch, merge, sketch

INT8, UINT8 = IntType(8, True), IntType(8, False)
arrays = npst.arrays(np.float32, st.just((4, 3)), elements=st.floats(width=32))


def pick(name: str, stats: Sketch, dtype: IntType = INT8, *, narrow: bool = False, **arguments: float) -> Range:
    """The range that an observer picks."""
    return OBSERVERS[name].pick(stats, dtype, narrow, arguments)


def test_statistics_of_a_small_array() -> None:
    """Extremes, counts, NaN and infinities are told apart."""
    stats = sketch(np.array([[1.0, -2.0], [np.nan, np.inf], [-np.inf, 3.5]], np.float32))
    assert (stats.low, stats.high, stats.count, stats.nan, stats.inf) == (-2.0, 3.5, 6, 1, 2)
    assert not stats.empty


def test_statistics_per_channel() -> None:
    """Each channel of the axis has its own extremes; a negative axis counts from the end."""
    values = np.array([[1.0, -2.0, 0.0], [4.0, np.inf, -1.0]])
    stats = sketch(values, 1)
    assert stats.low.tolist() == [1.0, -2.0, -1.0]
    assert stats.high.tolist() == [4.0, -2.0, 0.0]
    assert sketch(values, -1) == stats
    assert sketch(values, 0).high.tolist() == [1.0, 4.0]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_every_float_type(dtype: type) -> None:
    """The extremes are float64, whatever the tensor is."""
    stats = sketch(np.array([0.5, -0.25], dtype))
    assert (stats.low, stats.high) == (-0.25, 0.5)
    assert stats.low.dtype == np.float64
    assert sketch(np.array([0.5, np.nan], dtype)).nan == 1


def test_nothing_seen() -> None:
    """No values, or none that is finite, make an empty sketch, of which an observer says so."""
    assert EMPTY.empty
    assert sketch(np.zeros((0, 3)), 1) == Sketch(np.full(3, np.inf), np.full(3, -np.inf))
    nothing = sketch(np.array([np.nan, np.inf]))
    assert nothing.empty
    assert (nothing.count, nothing.nan, nothing.inf) == (2, 1, 1)
    for name in ("minmax", "absmax"):
        with pytest.raises(DataError, match="no finite value was ever seen"):
            pick(name, nothing)


@given(arrays, arrays, arrays, st.sampled_from([None, 0, 1]))
def test_merging_is_exact_commutative_and_associative(one, two, three, axis) -> None:
    """However samples are split and ordered, the statistics are those of all of them together."""
    a, b, c = sketch(one, axis), sketch(two, axis), sketch(three, axis)
    assert merge(a, b) == merge(b, a)
    assert merge(merge(a, b), c) == merge(a, merge(b, c))
    assert merge(a, EMPTY) == a
    if axis != 0:
        assert merge(merge(a, b), c) == sketch(np.concatenate([one, two, three]), axis)


def test_different_statistics_differ() -> None:
    """Equality looks at the extremes and at each count."""
    assert sketch(np.ones(2)) != sketch(np.ones(3))
    assert sketch(np.ones(2)) != sketch(np.array([1.0, 2.0]))
    assert sketch(np.ones(2)) != 1


def test_observed_ranges() -> None:
    """Min-max is what was seen, absmax is symmetric about 0."""
    stats = sketch(np.array([[-3.0, 1.0], [2.0, 0.5]]), 0)
    assert pick("minmax", stats) == Range(np.array([-3.0, 0.5]), np.array([1.0, 2.0]))
    assert pick("absmax", stats) == Range(np.array([-3.0, -2.0]), np.array([3.0, 2.0]))


def test_ranges_without_values() -> None:
    """A fixed range and a fixed-point format need nothing to be seen."""
    assert pick("fixed", EMPTY, low=-1.5, high=6.0) == Range(np.array(-1.5), np.array(6.0))
    assert pick("fixed-point", EMPTY, exponent=-4) == Range(np.array(-8.0), np.array(127 / 16))
    assert pick("fixed-point", EMPTY, narrow=True, exponent=-4) == Range(np.array(-127 / 16), np.array(127 / 16))
    assert not OBSERVERS["fixed"].needs_values
    assert not OBSERVERS["fixed-point"].needs_values


@given(st.integers(2, 16), st.booleans(), st.booleans(), st.integers(-126, 100))
def test_fixed_point_has_exactly_that_scale(width: int, signed: bool, narrow: bool, exponent: int) -> None:
    """The symmetric params of a fixed-point range have the scale 2**exponent, for unsigned types too."""
    dtype = IntType(width, signed)
    seen = pick("fixed-point", EMPTY, dtype, narrow=narrow, exponent=exponent)
    assert choose(seen, dtype, symmetric=True, narrow=narrow).scale == 2.0**exponent


def test_fixed_point_beyond_float32_is_refused() -> None:
    """An exponent whose values are no float32 any more has no range."""
    assert pick("fixed-point", EMPTY, narrow=True, exponent=121).high == 127 * 2.0**121
    for exponent in (122, 126):
        with pytest.raises(DataError, match=rf"int8 with a scale of 2\*\*{exponent} goes beyond float32"):
            pick("fixed-point", EMPTY, narrow=True, exponent=exponent)

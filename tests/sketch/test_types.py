"""Sketches: exact, mergeable statistics."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from graphquant.sketch import EMPTY, Sketch, merge, sketch

arrays = npst.arrays(np.float32, st.just((4, 3)), elements=st.floats(width=32))


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
    """No values, or none that is finite, make an empty sketch."""
    assert EMPTY.empty
    assert sketch(np.zeros((0, 3)), 1) == Sketch(np.full(3, np.inf), np.full(3, -np.inf))
    nothing = sketch(np.array([np.nan, np.inf]))
    assert nothing.empty
    assert (nothing.count, nothing.nan, nothing.inf) == (2, 1, 1)


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

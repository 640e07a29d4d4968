"""Observers turn sketches into ranges."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphquant.errors import DataError
from graphquant.numerics import IntType, Range, choose
from graphquant.sketch import EMPTY, OBSERVERS, Sketch, sketch

INT8, UINT8 = IntType(8, True), IntType(8, False)


def pick(name: str, stats: Sketch, dtype: IntType = INT8, *, narrow: bool = False, **arguments: float) -> Range:
    """The range that an observer picks."""
    return OBSERVERS[name].pick(stats, dtype, True, narrow, arguments)


def test_nothing_seen_is_said() -> None:
    """A sketch without a finite value has no range."""
    nothing = sketch(np.array([np.nan, np.inf]))
    for name in ("minmax", "absmax"):
        with pytest.raises(DataError, match="no finite value was ever seen"):
            pick(name, nothing)


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

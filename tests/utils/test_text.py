"""Text helpers of messages and reports."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphquant.utils.text import (
    format_distinct,
    format_range,
    format_shape,
    join_limited,
    more_text,
    percent,
    quantized_share_failure,
)


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([], ""),
        (["a"], "a"),
        (["a", "b"], "a, b"),
        (["a", "b", "c"], "a, b and 1 more"),
        (range(1200), "0, 1 and 1,198 more"),
    ],
)
def test_join_limited(items, expected: str) -> None:
    """Items beyond the limit are counted."""
    assert join_limited(items, 2) == expected


def test_more_text_of_nothing_is_empty() -> None:
    """No remainder gives no text."""
    assert [more_text(count) for count in (-1, 0, 1)] == ["", "", " and 1 more"]


def test_shapes_and_ranges() -> None:
    """Unknown sizes are question marks; ranges have four digits."""
    assert [format_shape(shape) for shape in (None, (), (1, None, 3))] == ["[?]", "[]", "[1, ?, 3]"]
    assert format_range(-1.23456, 2) == "-1.235 to 2"


@pytest.mark.parametrize(("share", "expected"), [(0, "0%"), (0.5, "50%"), (0.9999, "99.9%"), (1, "100%"), (0.07, "7%")])
def test_percent_rounds_down(share: float, expected: str) -> None:
    """Only a share of 1 is 100%."""
    assert percent(share) == expected


@pytest.mark.parametrize(
    ("value", "bound", "unit", "texts"),
    [
        (0.9, 0.99, "%", ("90.00%", "99%")),
        (0.99998, 0.99999, "%", ("99.998%", "99.999%")),
        (0.9999999, 1.0, "%", ("99.99999%", "100%")),
        (17.2, 20.0, "dB", ("17.20 dB", "20 dB")),
        (19.9999, 20.0, "dB", ("19.9999 dB", "20 dB")),
        (-math.inf, 20.0, "dB", ("-inf dB", "20 dB")),
    ],
)
def test_a_missed_bound_differs_from_the_value(value, bound, unit, texts):
    """A value that misses a bound by less than two decimals show gets more of them."""
    assert format_distinct(value, bound, unit=unit) == texts


@given(st.floats(0, 1), st.floats(0, 1))
def test_formatted_shares_differ(share, minimum):
    """A share below its bound is shown below its bound."""
    assert bool(quantized_share_failure(share, minimum)) == (share < minimum)
    if minimum - share > 1e-11:
        value, bound = (float(text.rstrip("%")) for text in format_distinct(share, minimum))
        assert value < bound

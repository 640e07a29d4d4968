"""Axis, bars and text of a histogram."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.qparams import asymmetric_qparams

from graphquant.observers import distribution_of, sketch_values
from graphquant.visualize.histograms import (
    HistogramAxis,
    bar_counts,
    bar_heights,
    histogram_axis,
    histogram_line,
    range_marks,
)

ENDS = st.floats(1e-30, 1e30)


@given(ENDS, ENDS, ENDS)
def test_positions_and_values_are_inverse(low: float, high: float, knee: float) -> None:
    """Positions and values are inverse functions, increasing, with the ends at 0 and 1."""
    axis = HistogramAxis(-low, high, knee)
    positions = np.linspace(0, 1, 101)
    values = axis.values_at(positions)
    assert np.allclose(axis.positions(values), positions, atol=1e-6)
    assert (np.diff(values) >= 0).all()
    assert axis.positions(np.array([-low, high])) == pytest.approx([0, 1])


def test_the_axis_is_linear_up_to_the_knee_and_then_bends() -> None:
    """The axis is linear up to the knee and continues with its slope. Far out it is logarithmic."""
    axis = HistogramAxis(0.0, 1e6, 1.0)
    zero, half, knee, next_, far, farther = axis.positions(np.array([0.0, 0.5, 1.0, 1.001, 1e5, 1e6]))
    assert (zero, half) == (0, pytest.approx(knee / 2))
    assert (next_ - knee) / 0.001 == pytest.approx(knee, rel=0.01)
    assert farther - far == pytest.approx(knee / 2, rel=1e-4)
    assert axis.ticks(0.05) == [0.0, 0.5, 1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6]


@given(ENDS, ENDS, ENDS)
def test_ticks_are_on_the_axis_and_spaced(low: float, high: float, knee: float) -> None:
    """Ticks are between the ends, include zero, and have the minimum distance."""
    axis = HistogramAxis(-low, high, knee)
    positions = axis.positions(np.array(axis.ticks(0.1)))
    assert 0.0 in axis.ticks(0.1)
    assert ((positions >= 0) & (positions <= 1)).all()
    assert (np.diff(positions) >= 0.1 - 1e-9).all()


@pytest.mark.parametrize("values", [[0.0], [3.0], [-2.0, 5.0], [1e-40, 1e38], [-1e-3, -1e-3, -7.0]], ids=str)
def test_every_value_is_under_a_bar(values: list[float]) -> None:
    """The bars count every value, with the extremes, with a range and without."""
    sketch = sketch_values(np.array(values, np.float32), bits=7)
    for params in (None, asymmetric_qparams(-1, 1), asymmetric_qparams(0, 100)):
        assert bar_counts(distribution_of(sketch), histogram_axis(sketch, params), 30).sum() == pytest.approx(
            len(values)
        )


def test_one_value_in_a_million_is_visible() -> None:
    """Heights are logarithmic: one value next to a million has a visible bar, and zero has none."""
    heights = bar_heights(np.array([1e6, 1.0, 0.0]))
    assert heights[0] == 1
    assert heights[2] == 0
    assert heights[1] == pytest.approx(np.log(2) / np.log(1e6 + 1))


def test_line_marks_the_range() -> None:
    """Brackets within the width mark the range. Clipped values are outside of them."""
    values = np.concatenate([np.linspace(-0.9, 0.9, 1000), np.full(3, 50.0)]).astype(np.float32)
    left, middle, right = histogram_line(sketch_values(values, bits=7), asymmetric_qparams(-1, 1), 32)
    assert (left, len(left + middle + right)) == ("", 32)
    assert middle.startswith("[")
    assert middle.endswith("]")
    assert set(middle[1:-1]) <= set(" ▄▅▆▇█")
    assert right.strip() == right[-1] == "▃"


def test_line_without_a_range() -> None:
    """Without a range there are no brackets. Without a histogram the line is empty."""
    sketch = sketch_values(np.linspace(0, 1, 1000, dtype=np.float32), bits=7)
    assert histogram_line(sketch, None, 10)[1] == "█" * 10
    assert histogram_line(sketch, None, 10, ascii_only=True) == ("", "@" * 10, "")
    assert histogram_line(sketch_values(np.ones(3)), None, 10) == ("", "", "")


def test_narrow_range_has_distinct_brackets() -> None:
    """The brackets of a very small or distant range never cross or coincide."""
    sketch = sketch_values(np.array([-1e9, 1e9], np.float32), bits=7)
    for low, high in ((0, 1e-9), (-1e9, 0), (1e8, 1e9), (-1e-30, 1e-30)):
        params = asymmetric_qparams(low, high)
        first, last = range_marks(histogram_axis(sketch, params), params, 20)
        assert 0 <= first < last <= 20

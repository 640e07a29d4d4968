"""Ranges without clipping: what the samples gain without the one that gains most."""

import math

import pytest

from graphquant.api.plan_search import _change_without_best


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ([1.0, 1.0, 8.0], [1.0, 1.0, 1.0], 0.0),  # the last sample has all of the gain
        ([1.0, 1.0, 8.0], [2.0, 2.0, 1.0], 10 * math.log10(2)),
        ([2.0, 2.0, 8.0], [1.0, 1.0, 1.0], -10 * math.log10(2)),
        ([4.0, 4.0], [1.0, 1.0], math.inf),  # both gain most
        ([0.0, 4.0], [1.0, 1.0], math.inf),  # a sample without an error gets one
    ],
)
def test_change_without_the_sample_that_gains_most(before: list[float], after: list[float], change: float) -> None:
    """Others may not lose more than a plan gains over all samples."""
    assert _change_without_best(before, after) == pytest.approx(change)

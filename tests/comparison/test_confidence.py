"""What can be said of all samples from some."""

from __future__ import annotations

import numpy as np
import pytest

from graphquant.comparison.confidence import Spread, most, rows_for


@pytest.mark.parametrize("tail", [0.5, 1.5])
def test_sqnr_is_at_least_that(tail: float) -> None:
    """Of 300 draws of 60 samples whose errors have a tail, at most one in ten says more than the truth."""
    rng = np.random.default_rng(0)
    truth = -10 * np.log10(np.exp(tail**2 / 2))
    wrong = 0
    for _ in range(300):
        spread = Spread()
        for part in np.split(np.exp(tail * rng.normal(size=60)), 4):
            spread.add(np.ones(15), part)
        wrong += spread.least > truth
    assert wrong <= 30


def test_shares_and_rows() -> None:
    """Nothing lost of 271 rows shows that at most 1% are, and of 270 it does not; gains make up for losses."""
    assert rows_for(0.01) == 271
    assert most(0, 0, 271) <= 0.01 < most(0, 0, 270)
    assert most(3, 3, 100) < most(3, 0, 100)
    assert 0.5 < most(5, 0, 10) <= 1.0
    assert Spread().least is None

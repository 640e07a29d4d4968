"""The split of data into samples for calibration, a search and validation."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from graphquant.calibration.data import Dataset
from graphquant.calibration.holdout import CalibrationData, HoldOut


def split_data(count: int = 40, **changes: Any) -> CalibrationData:
    """Return data of `count` samples for a plan that needs ranges."""

    def open_samples(limit: int | None) -> Dataset:
        opened = count if limit is None else min(limit, count)
        return Dataset(
            count=opened,
            digest=f"first {opened}",
            open_feeds=lambda start, stop: ({"x": np.array([i])} for i in range(start, stop)),
        )

    fields: dict[str, Any] = {"spec": "data.npz", "max_samples": None, "validates": True, "needs_ranges": True}
    fields |= {"runs_algorithms": False, "has_bounds": False, "has_search": False}
    return CalibrationData(open_samples=open_samples, **{**fields, **changes})


def stats_of(samples: int, digest: str | None = None) -> Any:
    """Return statistics of the first samples, or of other data."""
    return SimpleNamespace(runs=[SimpleNamespace(samples=samples, data_digest=digest or f"first {samples}")])


def sample_span(holdout: HoldOut | None) -> tuple[int, int, bool] | None:
    """Return the first and the last sample of a set, and whether it was used before."""
    return None if holdout is None else (holdout.start, holdout.dataset.count, holdout.reuses_samples)


SEARCH = {"has_bounds": True, "has_search": True}
CASES: dict[str, tuple[dict[str, Any], Any, Any, Any]] = {
    "calibration": ({}, 32, None, (32, 40, False)),
    "few samples": ({"count": 7}, 7, None, (3, 7, True)),
    "no validation": ({"validates": False}, 40, None, None),
    "bounds": (SEARCH, 16, (16, 32, False), (32, 40, False)),
    "bounds on few samples": ({"count": 9, **SEARCH}, 5, (0, 5, True), (5, 9, False)),
    "size budget": ({"has_search": True}, 32, (0, 32, False), (32, 40, False)),
    "no data": ({"spec": None}, None, None, None),
    "fixed ranges": ({"needs_ranges": False}, None, None, (0, 40, False)),
    "algorithms": ({"needs_ranges": False, "runs_algorithms": True}, 32, None, (32, 40, False)),
    "given statistics": ({"stats": stats_of(24)}, None, None, (32, 40, False)),
    "statistics of the hold-out": ({"stats": stats_of(40)}, None, None, (32, 40, True)),
    "other statistics": ({"stats": stats_of(24, "other")}, None, None, (0, 40, False)),
    "algorithms with statistics": ({"stats": stats_of(40), "runs_algorithms": True}, 32, None, (32, 40, True)),
    "bounds with statistics": ({"stats": stats_of(24), **SEARCH}, None, (24, 32, False), (32, 40, False)),
}


@pytest.mark.parametrize("case", CASES)
def test_split(case: str) -> None:
    """Calibration, search and validation have their own samples, unless these are too few or statistics used them."""
    changes, calibration, search, validation = CASES[case]
    data = split_data(**changes)
    assert (data.calibration and data.calibration.count) == calibration
    assert (sample_span(data.search_set), sample_span(data.validation_set)) == (search, validation)
    other_data = data.validation_set is not None and data.validation_set.calibrated_on_other_data
    assert other_data == (case == "other statistics")


def test_data_without_samples() -> None:
    """A plan that needs ranges lacks samples if there is neither data nor statistics; no field changes later."""
    assert split_data(spec=None).lacks_samples
    assert not split_data(spec=None, stats=stats_of(8)).lacks_samples
    assert not split_data(spec=None, needs_ranges=False).lacks_samples
    with pytest.raises(FrozenInstanceError):
        split_data().calibration = None

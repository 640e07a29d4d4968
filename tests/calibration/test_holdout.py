"""The split of data into samples for calibration, a search and validation."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import graphquant as gq
from graphquant.calibration.data import Dataset, open_data
from graphquant.calibration.holdout import (
    CalibrationData,
    HoldOut,
    open_model_data,
    open_optional_labels,
    open_required_labels,
    sample_range,
)
from graphquant.errors import DataError
from graphquant.formats import InputSpec
from graphquant.ir import Model

if TYPE_CHECKING:
    from pathlib import Path


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


def stats_of(*counts: int, digest: str | None = None) -> Any:
    """Return merged statistics of the first samples, or of other data."""
    return SimpleNamespace(
        runs=[SimpleNamespace(samples=count, data_digest=digest or f"first {count}") for count in counts]
    )


def sample_span(holdout: HoldOut | None) -> tuple[int, int, bool] | None:
    """Return the first and the last sample of a set, and whether it was used before."""
    return None if holdout is None else (holdout.start, holdout.dataset.count, holdout.reuses_samples)


OTHER = stats_of(24, digest="other")
ALGORITHMS = {"runs_algorithms": True}
FIXED = {"needs_ranges": False}
SEARCH = {"has_bounds": True, "has_search": True}
NO_DATA = {"spec": None}
CASES: dict[str, tuple[dict[str, Any], Any, Any, Any]] = {
    "calibration": ({}, 32, None, (32, 40, False)),
    "few samples": ({"count": 7}, 7, None, (3, 7, True)),
    "three samples": ({"count": 3}, 3, None, (0, 3, True)),
    "eight samples": ({"count": 8}, 4, None, (4, 8, False)),
    "no validation": ({"validates": False}, 40, None, None),
    "bounds": (SEARCH, 40, (0, 40, False), (0, 40, True)),
    "bounds on eight samples": ({"count": 8, **SEARCH}, 8, (0, 8, False), (0, 8, True)),
    "bounds on seven samples": ({"count": 7, **SEARCH}, 7, (0, 7, True), (3, 7, True)),
    "bounds on fixed ranges": (FIXED | SEARCH, None, (0, 32, False), (32, 40, False)),
    "bounds on fixed ranges with algorithms": (FIXED | ALGORITHMS | SEARCH, 40, (0, 40, False), (0, 40, True)),
    "size budget": ({"has_search": True}, 32, (0, 32, False), (32, 40, False)),
    "no data": (NO_DATA, None, None, None),
    "fixed ranges": (FIXED, None, None, (0, 40, False)),
    "algorithms": (FIXED | ALGORITHMS, 32, None, (32, 40, False)),
    "given statistics": ({"stats": stats_of(24)}, None, None, (32, 40, False)),
    "statistics up to the hold-out": ({"stats": stats_of(32)}, None, None, (32, 40, False)),
    "statistics of the hold-out": ({"stats": stats_of(40)}, None, None, (32, 40, True)),
    "other statistics": ({"stats": OTHER}, None, None, (0, 40, False)),
    "algorithms with other statistics": ({"stats": OTHER} | ALGORITHMS, None, None, (0, 40, False)),
    "algorithms with statistics": ({"stats": stats_of(40)} | ALGORITHMS, 32, None, (32, 40, True)),
    "algorithms with merged statistics": ({"stats": stats_of(24, 8)} | ALGORITHMS, 24, None, (32, 40, False)),
    "unneeded statistics": ({"stats": OTHER} | FIXED, None, None, (0, 40, False)),
    "algorithms with unneeded statistics": ({"stats": OTHER} | FIXED | ALGORITHMS, 32, None, (32, 40, False)),
    "bounds with statistics": ({"stats": stats_of(24)} | SEARCH, None, (24, 32, False), (32, 40, False)),
    "bounds with statistics of more samples": (
        {"stats": stats_of(28)} | SEARCH,
        None,
        (28, 32, False),
        (32, 40, False),
    ),
    "bounds with statistics of few samples": (
        {"count": 7, "stats": stats_of(3)} | SEARCH,
        None,
        (3, 7, False),
        (3, 7, True),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_split(case: str) -> None:
    """Calibration, search and validation have their own samples, unless these are too few or statistics used them."""
    changes, calibration, search, validation = CASES[case]
    data = split_data(**changes)
    assert (data.calibration and data.calibration.count) == calibration
    assert (sample_span(data.search_set), sample_span(data.validation_set)) == (search, validation)
    other_data = data.validation_set is not None and data.validation_set.calibrated_on_other_data
    assert other_data == ("other statistics" in case)
    for holdout in filter(None, (data.search_set, data.validation_set)):
        assert holdout.spec == "data.npz"
        assert [feed["x"].item() for feed in holdout.samples()] == list(range(holdout.start, holdout.dataset.count))


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 0),
        ({"count": 31, **SEARCH}, 4),
        ({"count": 32, **SEARCH}, 2),
        ({"count": 7, **SEARCH}, 0),
        ({"has_search": True}, 0),
        (FIXED | SEARCH, 0),
        (FIXED | ALGORITHMS | SEARCH, 2),
        ({"validates": False, **SEARCH}, 0),
        ({"stats": stats_of(24), **SEARCH}, 0),
        (NO_DATA | SEARCH, 0),
    ],
)
def test_number_of_folds(changes: dict[str, Any], count: int) -> None:
    """A search with bounds measures plans in folds if ranges or algorithms use the samples, and there are enough."""
    assert split_data(**changes).fold_count == count


def test_samples_of_a_fold() -> None:
    """A fold measures its samples, and all others give the ranges, in order, whichever of them are read."""
    held_out, others = split_data(10, **SEARCH).make_fold(3, 6)
    assert sample_span(held_out) == (3, 6, False)
    assert [feed["x"].item() for feed in held_out.samples()] == [3, 4, 5]
    assert others.count == 7
    for start, stop in ((0, 7), (0, 2), (2, 5), (3, 7), (4, 6), (5, 9)):
        expected = [0, 1, 2, 6, 7, 8, 9][start:stop]
        assert [feed["x"].item() for feed in others.feeds_between(start, stop)] == expected


def test_data_without_samples() -> None:
    """A plan that needs ranges lacks samples if there is neither data nor statistics; no field changes later."""
    assert split_data(spec=None).lacks_samples
    assert not split_data(spec=None, stats=stats_of(8)).lacks_samples
    assert not split_data(spec=None, needs_ranges=False).lacks_samples
    with pytest.raises(FrozenInstanceError):
        split_data().calibration = None


def test_sample_range() -> None:
    """A range of samples ends at its maximum count or where the data ends."""
    data = split_data().dataset
    for max_count, numbers in ((3, [36, 37, 38]), (9, [36, 37, 38, 39]), (None, [36, 37, 38, 39])):
        selected = sample_range(data, 36, max_count)
        assert [feed["x"].item() for feed in selected] == numbers
        assert [feed["x"].item() for feed in selected.feeds_between(2, 4)] == numbers[2:]


@pytest.mark.parametrize(
    ("changes", "checks"),
    [({}, True), ({"validates": False}, True), (FIXED, True), ({"validates": False} | FIXED, False), (NO_DATA, False)],
)
def test_mistakes_in_used_data(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], *, checks: bool) -> None:
    """All samples are checked if calibration or validation uses any."""
    monkeypatch.setattr("graphquant.calibration.data.check.start_check", lambda dataset, model: (dataset, model))
    data, model = split_data(**changes), Model(format="onnx")
    assert data.start_check(model) == ((data.dataset, model) if checks else None)


CLASSES = np.array([2, 0, 1])


@pytest.mark.parametrize(
    ("arrays", "key"),
    [
        ({"labels": CLASSES}, "labels"),
        ({"label": CLASSES}, "label"),
        ({"label": CLASSES, "labels": CLASSES[::-1]}, "labels"),
        ({"labels": CLASSES + 0.5}, ""),
        ({"classes": CLASSES}, ""),
    ],
)
def test_labels(tmp_path: Path, arrays: dict[str, Any], key: str) -> None:
    """Integers under the key of labels are added to the feeds, also of samples with NaN; other data has no labels."""
    np.savez(tmp_path / "data.npz", x=np.full((3, 2), np.nan, np.float32), **arrays)
    inputs = [InputSpec(name="x", dtype="float32", shape=(None, 2))]
    spec = str(tmp_path / "data.npz")
    data = open_data(spec, inputs, require_finite=False)
    labelled, found_key = open_optional_labels(data, spec, inputs, 2)
    assert found_key == key
    if key:
        assert [feed[key].item() for feed in labelled] == arrays[key][:2].tolist()
        assert open_required_labels(data, spec, inputs, 2)[1] == key
        return
    assert labelled is data
    # Without a key of labels, the error names the one to add; otherwise it names the array.
    with pytest.raises(DataError, match="'labels'"):
        open_required_labels(data, spec, inputs, 2)


def test_data_without_labels_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data without a key of labels is not opened again."""
    np.savez(tmp_path / "data.npz", x=np.zeros((3, 2), np.float32), classes=CLASSES)
    inputs = [InputSpec(name="x", dtype="float32", shape=(None, 2))]
    spec = str(tmp_path / "data.npz")
    data = open_data(spec, inputs)
    monkeypatch.setattr("graphquant.calibration.data.open_data", None)
    assert open_optional_labels(data, spec, inputs, None) == (data, "")


def test_model_data_is_read_in_background(samples: Path) -> None:
    """The data of a model can be used while the rest of the file is checked."""
    data = open_model_data(gq.load(samples / "digits_cnn.onnx"), str(samples / "digits_cnn_calib.npz"), 5)
    assert (data.count, type(data.digest)) == (5, Future)

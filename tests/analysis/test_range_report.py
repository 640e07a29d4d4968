"""Ranges that tensors get from statistics, and their cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import graphquant as gq
from graphquant.api.inspect import inspect_stats
from graphquant.calibration.targets import CALIBRATION_METHODS
from graphquant.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from graphquant.calibration.stats import Stats


pytestmark = pytest.mark.usefixtures("rules_alone")


@pytest.fixture
def sample_stats(samples: Path) -> Stats:
    """Statistics of the sample model."""
    return gq.calibrate(samples / "digits_cnn.onnx", data=str(samples / "digits_cnn_calib.npz"))


def test_the_ranges_are_those_that_insert_gives(samples: Path, sample_stats: Stats) -> None:
    """Each activation that insert quantizes has the same scale and zero point here; the one of least SQNR is first."""
    insertions = gq.insert(samples / "digits_cnn.onnx", stats=sample_stats).inserted
    expected = {(entry.site.tensor, entry.site.rule): entry.params for entry in insertions if not entry.site.parameter}
    picks = inspect_stats(sample_stats, samples / "digits_cnn.onnx").tensor_ranges
    assert {(entry.tensor, entry.rule) for entry in picks} == set(expected)
    for entry in picks:
        assert entry.params is not None
        assert entry.params.scale == expected[entry.tensor, entry.rule].scale
        assert entry.params.zero_point == expected[entry.tensor, entry.rule].zero_point
    sqnrs = [entry.cost.sqnr for entry in picks if entry.cost]
    assert len(sqnrs) == 13
    assert sqnrs == sorted(sqnrs)


def test_auto_reports_its_method(samples: Path, sample_stats: Stats) -> None:
    """If `auto` is called minmax or mse, that method has the same scale. A widened range clips less than mse."""
    picks = inspect_stats(sample_stats, samples / "digits_cnn.onnx", compare_methods=True).tensor_ranges
    assert {tensor_range.auto_method for tensor_range in picks} == {"minmax", "mse", "mse, widened"}
    for tensor_range in picks:
        alternatives = {alternative.method: alternative for alternative in tensor_range.alternatives}
        assert tuple(alternatives) == CALIBRATION_METHODS
        like, auto = tensor_range.auto_method.partition(",")[0], alternatives["auto"]
        if tensor_range.auto_method == like:
            assert auto.params.scale == alternatives[like].params.scale
        elif auto.cost and alternatives["mse"].cost:
            assert auto.cost.clipped < alternatives["mse"].cost.clipped
        least = min(alternative.cost.squared_error for alternative in tensor_range.alternatives if alternative.cost)
        assert alternatives["mse"].cost is not None
        assert alternatives["mse"].cost.squared_error == pytest.approx(least, rel=0.05)


def test_alternatives_equal_the_ranges_of_insert(samples: Path, sample_stats: Stats) -> None:
    """The alternative of a method is the range of `insert --method` for tensors with their own scale."""
    picks = inspect_stats(sample_stats, samples / "digits_cnn.onnx", compare_methods=True).tensor_ranges
    insertions = gq.insert(samples / "digits_cnn.onnx", stats=sample_stats, method="entropy").inserted
    expected = {entry.site.tensor: entry.params.scale for entry in insertions if not entry.site.parameter}
    unshared = [entry for entry in picks if not entry.note and entry.rule == "conv-output"]
    assert len(unshared) > 5
    for entry in unshared:
        alternative = next(candidate for candidate in entry.alternatives if candidate.method == "entropy")
        assert alternative.params.scale == expected[entry.tensor]


def test_a_model_with_ranges_in_it(samples: Path, sample_stats: Stats) -> None:
    """A quantized model is shown with its own ranges, matched by name, at the same cost."""
    quantized = gq.insert(samples / "digits_cnn.onnx", stats=sample_stats, method="entropy").model
    picks = inspect_stats(sample_stats, quantized, compare_methods=True)
    assert picks.matched_by_name
    planned = {
        tensor_range.tensor: next(
            alternative for alternative in tensor_range.alternatives if alternative.method == "entropy"
        )
        for tensor_range in inspect_stats(sample_stats, samples / "digits_cnn.onnx", compare_methods=True).tensor_ranges
        if not tensor_range.note
    }
    range_by_tensor = {tensor_range.tensor: tensor_range for tensor_range in picks.tensor_ranges}
    assert set(planned) < set(range_by_tensor)
    alike = [
        tensor
        for tensor, alternative in planned.items()
        if range_by_tensor[tensor].params.scale == alternative.params.scale
    ]
    assert len(alike) >= len(planned) - 1  # one has its scale from a tensor that shares it
    assert all(range_by_tensor[tensor].cost == planned[tensor].cost for tensor in alike)


def test_fixed_ranges_are_shown_with_statistics(samples: Path, sample_stats: Stats) -> None:
    """A fixed scale is compared with the statistics: clipped share and error."""
    picks = inspect_stats(sample_stats, samples / "digits_cnn.onnx", rules=["fixed_point"]).tensor_ranges
    assert {tensor_range.method for tensor_range in picks} == {"fixed-point -4"}
    assert all(
        tensor_range.cost is not None and tensor_range.params is not None and tensor_range.params.scale == 2.0**-4
        for tensor_range in picks
    )


def test_statistics_without_a_model(sample_stats: Stats) -> None:
    """Without a model there are the tensors in the model's order, with no range."""
    picks = inspect_stats(sample_stats)
    assert [tensor_range.tensor for tensor_range in picks.tensor_ranges] == list(sample_stats.targets)
    assert all(
        tensor_range.params is None and tensor_range.cost is None and tensor_range.sketch is not None
        for tensor_range in picks.tensor_ranges
    )


def test_statistics_of_another_model_are_rejected(samples: Path, sample_stats: Stats) -> None:
    """They are refused as insert does it, for a float model as for a quantized one."""
    with pytest.raises(DataError, match="of another model"):
        inspect_stats(sample_stats, samples / "digits_rnn.onnx")
    data, head = str(samples / "digits_rnn_calib.npz"), "logits/*"  # a name that both models have
    other_model = gq.insert(samples / "digits_rnn.onnx", data=data, exclude=head).model
    with pytest.raises(DataError, match="quantizes none of"):
        inspect_stats(sample_stats, other_model)
    with pytest.raises(DataError, match="of another model"):
        inspect_stats(sample_stats, other_model, rules=["onnxruntime"])

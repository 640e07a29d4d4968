"""Which ranges tensors are given by statistics, and what they cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from graphquant import pipeline
from graphquant.calibration import METHODS
from graphquant.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from graphquant.calibration import Stats


@pytest.fixture
def stats(samples: Path) -> Stats:
    """Statistics of the sample model."""
    return pipeline.calibrate(samples / "digits_cnn.onnx", data=str(samples / "digits_cnn_calib.npz"))


def test_the_ranges_are_those_that_insert_gives(samples: Path, stats: Stats) -> None:
    """Each activation that insert quantizes has the same scale and zero point here; the one of least SQNR is first."""
    done = pipeline.insert(samples / "digits_cnn.onnx", stats=stats).inserted
    expected = {(one.site.tensor, one.site.rule): one.params for one in done if not one.site.parameter}
    picks = pipeline.inspect_stats(stats, samples / "digits_cnn.onnx").picks
    assert {(one.tensor, one.rule) for one in picks} == set(expected)
    for one in picks:
        assert one.params is not None
        assert one.params.scale == expected[one.tensor, one.rule].scale
        assert one.params.zero_point == expected[one.tensor, one.rule].zero_point
    found = [one.cost.sqnr for one in picks if one.cost]
    assert len(found) == 13
    assert found == sorted(found)


def test_auto_says_what_it_came_to(samples: Path, stats: Stats) -> None:
    """Where `auto` is called minmax or mse, that method has the same scale; widened clips less than mse."""
    picks = pipeline.inspect_stats(stats, samples / "digits_cnn.onnx", others=True).picks
    assert {one.like for one in picks} == {"minmax", "mse", "mse, widened"}
    for one in picks:
        others = {other.method: other for other in one.others}
        assert tuple(others) == METHODS
        like, auto = one.like.partition(",")[0], others["auto"]
        if one.like == like:
            assert auto.params.scale == others[like].params.scale
        elif auto.cost and others["mse"].cost:
            assert auto.cost.clipped < others["mse"].cost.clipped
        least = min(other.cost.squared_error for other in one.others if other.cost)
        assert others["mse"].cost is not None
        assert others["mse"].cost.squared_error == pytest.approx(least, rel=0.05)


def test_others_are_what_insert_would_give_by_their_method(samples: Path, stats: Stats) -> None:
    """What is shown for a method is what `insert --method` gives a tensor that shares its scale with no other."""
    picks = pipeline.inspect_stats(stats, samples / "digits_cnn.onnx", others=True).picks
    done = pipeline.insert(samples / "digits_cnn.onnx", stats=stats, method="entropy").inserted
    expected = {one.site.tensor: one.params.scale for one in done if not one.site.parameter}
    alone = [one for one in picks if not one.note and one.rule == "conv-output"]
    assert len(alone) > 5
    for one in alone:
        found = next(other for other in one.others if other.method == "entropy")
        assert found.params.scale == expected[one.tensor]


def test_a_model_with_ranges_in_it(samples: Path, stats: Stats) -> None:
    """A model that insert made is shown with its own ranges, told by the names of tensors, at the same cost."""
    quantized = pipeline.insert(samples / "digits_cnn.onnx", stats=stats, method="entropy").model
    picks = pipeline.inspect_stats(stats, quantized, others=True)
    assert picks.by_name
    planned = {
        one.tensor: next(other for other in one.others if other.method == "entropy")
        for one in pipeline.inspect_stats(stats, samples / "digits_cnn.onnx", others=True).picks
        if not one.note
    }
    shown = {one.tensor: one for one in picks.picks}
    assert set(planned) < set(shown)
    alike = [tensor for tensor, other in planned.items() if shown[tensor].params.scale == other.params.scale]
    assert len(alike) >= len(planned) - 1  # one has its scale from a tensor that shares it
    assert all(shown[tensor].cost == planned[tensor].cost for tensor in alike)


def test_fixed_ranges_are_shown_beside_the_values(samples: Path, stats: Stats) -> None:
    """A scale that needs no data is judged by statistics that there are: what it clips, and its error."""
    picks = pipeline.inspect_stats(stats, samples / "digits_cnn.onnx", rules=["fixed_point"]).picks
    assert {one.method for one in picks} == {"fixed-point -4"}
    assert all(one.cost is not None and one.params is not None and one.params.scale == 2.0**-4 for one in picks)


def test_statistics_alone(stats: Stats) -> None:
    """Without a model there are the tensors in the model's order, with no range."""
    picks = pipeline.inspect_stats(stats)
    assert [one.tensor for one in picks.picks] == list(stats.targets)
    assert all(one.params is None and one.cost is None and one.sketch is not None for one in picks.picks)


def test_statistics_of_another_model_are_refused(samples: Path, stats: Stats) -> None:
    """They are refused as insert does it, for a float model as for a quantized one."""
    with pytest.raises(DataError, match="of another model, or it was changed since"):
        pipeline.inspect_stats(stats, samples / "digits_rnn.onnx")
    data, head = str(samples / "digits_rnn_calib.npz"), "logits/*"  # a name that both models have
    other = pipeline.insert(samples / "digits_rnn.onnx", data=data, exclude=head).model
    with pytest.raises(DataError, match="this one quantizes none of their tensors"):
        pipeline.inspect_stats(stats, other)
    with pytest.raises(DataError, match="of another model"):
        pipeline.inspect_stats(stats, other, rules=["onnxruntime"])

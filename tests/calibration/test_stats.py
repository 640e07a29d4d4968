"""Combining statistics, and selecting those of a plan."""

from __future__ import annotations

import copy
import gc
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import graphquant as gq
from graphquant.calibration.stats import (
    DataRun,
    Stats,
    StoredSketches,
    combine_stats,
    select_stats,
    uncovered_ranges,
)
from graphquant.calibration.targets import ObservationTarget
from graphquant.errors import DataError
from graphquant.ir import TensorRef
from graphquant.observers import sketch_values

A, B = TensorRef("", "a"), TensorRef("", "b", 1)


def make_data_run(*block_ranges: tuple[int, int], data_digest="d1", **changes) -> DataRun:
    """Return a run of ten samples in blocks of four."""
    return DataRun(
        **{"data_digest": data_digest, "samples": 10, "block_size": 4, "block_ranges": block_ranges, **changes}
    )


def make_stats(*runs: DataRun, values=(1.0, 2.0), **changes) -> Stats:
    """Return statistics of a reached and an unreached tensor."""
    found = Stats(
        model_digest="m0",
        targets={A: ObservationTarget("aa", None, 7), B: ObservationTarget("bb", None, 7)},
        sketches={A: sketch_values(np.array(values), bits=7)},
        runs=runs,
    )
    return replace(found, **changes)


def test_counts() -> None:
    """Blocks and samples are counted over ranges; the last block may be short."""
    assert (make_data_run().blocks, make_data_run().samples_done, make_data_run().complete) == (3, 0, False)
    one = make_data_run((0, 1), (2, 3))
    assert (one.blocks_done, one.samples_done, one.complete) == (2, 6, False)
    assert (make_data_run((0, 3)).samples_done, make_data_run((0, 3)).complete) == (10, True)
    both = make_stats(make_data_run((0, 3)), make_data_run((1, 2), data_digest="d2", random=True))
    assert (both.samples, both.blocks, both.complete, both.random) == (14, 4, False, True)
    assert not make_stats(make_data_run((0, 3))).random


def test_combine_stats() -> None:
    """Blocks of the same data form ranges, sketches are merged, and other data is added."""
    whole = combine_stats(
        [
            make_stats(make_data_run((2, 3))),
            make_stats(make_data_run((0, 1)), values=(-5.0,)),
            make_stats(make_data_run((1, 2)), values=(9.0,)),
        ]
    )
    assert whole.runs == (make_data_run((0, 3)),)
    assert (whole.sketches[A].low, whole.sketches[A].high, whole.sketches[A].blocks) == (-5, 9, 3)
    assert list(whole.sketches) == [A]
    only_b = make_stats(make_data_run((1, 2)), sketches={B: whole.sketches[A]})
    only_a = make_stats(make_data_run((0, 1)))
    assert combine_stats([only_a, only_b]).sketches == {A: only_a.sketches[A], B: whole.sketches[A]}
    assert replace(whole, data_findings=("few samples",)) == whole  # a file does not have them
    other = make_stats(make_data_run((0, 3), data_digest="d0"), values=(70.0,))
    assert combine_stats([whole, other]) == combine_stats([other, whole])
    assert [one.data_digest for one in combine_stats([whole, other]).runs] == ["d0", "d1"]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (make_stats(make_data_run((0, 1)), model_digest="m1"), "different models"),
        (make_stats(make_data_run((1, 3))), "samples 4 to 7"),
        (make_stats(make_data_run((1, 2), block_size=5)), "different blocks"),
        (
            make_stats(make_data_run((2, 3)), targets={A: ObservationTarget("aa", None, 7)}),
            "first in b:1",
        ),
        (
            make_stats(
                make_data_run((2, 3)), targets={A: ObservationTarget("aa", 1, 7), B: ObservationTarget("bb", None, 7)}
            ),
            "first in a:0",
        ),
        (
            make_stats(
                make_data_run((2, 3)),
                targets={A: ObservationTarget("ac", None, 7), B: ObservationTarget("bb", None, 7)},
            ),
            "first in a:0",
        ),
        (make_stats(make_data_run((2, 3)), unobservable={B: "hidden"}), "b:1 is unobservable"),
    ],
)
def test_incompatible_stats(other: Stats, reason: str) -> None:
    """Other models, other tensors and repeated blocks are rejected with the reason."""
    with pytest.raises(DataError, match=reason):
        combine_stats([make_stats(make_data_run((0, 2))), other])


def test_select_by_fingerprint() -> None:
    """A tensor with another name and the same fingerprint matches. Unreached tensors stay absent."""
    renamed = TensorRef("", "renamed")
    found = select_stats(
        make_stats(make_data_run((0, 3))),
        {renamed: ObservationTarget("aa", None, 0), B: ObservationTarget("bb", None, 7)},
        "m0",
        "do this",
    )
    assert list(found.sketches) == [renamed]
    assert list(found.targets) == [renamed, B]
    hidden = make_stats(make_data_run((0, 3)), unobservable={B: "hidden"})
    for bits in (7, 10):  # an unobservable tensor lacks no details
        selected = select_stats(hidden, {B: ObservationTarget("bb", None, bits)}, "m0", "do this")
        assert selected.unobservable == {B: "hidden"}


@pytest.mark.parametrize(
    ("wanted", "model", "reason"),
    [
        ({A: ObservationTarget("aa", None, 7)}, "m1", "another model"),
        (
            {TensorRef("", "c"): ObservationTarget("cc", None, 7)},
            "m0",
            "one tensor .*:\n  c:0: ",
        ),
        ({A: ObservationTarget("xx", None, 7)}, "m0", "a:0: its computation differs"),
        (
            {A: ObservationTarget("aa", None, 10)},
            "m0",
            "a:0: a histogram .* 7 .* 10",
        ),
        ({A: ObservationTarget("aa", 1, 7)}, "m0", "a:0: .* axis 1"),
        (
            {TensorRef("", f"c{i}"): ObservationTarget("cc", None, 0) for i in range(7)},
            "m0",
            "lack 7 tensors .*:\n(  c.*\n){5}  and 2",
        ),
        ({TensorRef("", f"c{i}"): ObservationTarget("cc", None, 0) for i in range(5)}, "m0", ":\n(  c.*\n){5}[^ ]"),
    ],
)
def test_missing_targets(wanted: dict, model: str, reason: str) -> None:
    """The error names the tensors, the reason and the command."""
    with pytest.raises(DataError, match=reason) as caught:
        select_stats(make_stats(make_data_run((0, 3))), wanted, model, "graphquant do this")
    assert str(caught.value).endswith("\n  graphquant do this")


def test_stats_without_samples() -> None:
    """Statistics without samples are rejected unless the plan needs none."""
    with pytest.raises(DataError, match=r"none of 10 samples.*--merge") as caught:
        select_stats(make_stats(make_data_run()), {A: ObservationTarget("aa", None, 7)}, "m0", "graphquant do this")
    assert str(caught.value).endswith("\n  graphquant do this")
    assert select_stats(make_stats(make_data_run()), {}, "m0", "graphquant do this").samples == 0


def test_uncovered_ranges() -> None:
    """Return the gaps between covered ranges."""
    assert uncovered_ranges([], 2, 5) == [(2, 5)]
    assert uncovered_ranges([(0, 2), (3, 4)], 1, 6) == [(2, 3), (4, 6)]
    assert uncovered_ranges([(0, 9)], 2, 5) == []
    assert uncovered_ranges([(6, 7)], 2, 5) == [(2, 5)]
    assert uncovered_ranges([], 3, 3) == []


def test_stored_sketches() -> None:
    """Sketches in a file are those that were written, in any order of reading, and no others are there."""
    rng = np.random.default_rng(0)
    sketches = {
        TensorRef("", f"t{index}", index % 2): sketch_values(rng.normal(size=index % 50).astype(np.float32), bits=7)
        for index in range(600)
    }
    stored = StoredSketches(sketches)
    assert list(stored) == list(sketches)
    for tensor in rng.permutation(list(sketches))[:40]:
        reference = TensorRef(tensor[0], tensor[1], int(tensor[2]))
        assert stored[reference] == sketches[reference]
    assert dict(stored) == sketches
    assert stored.get(TensorRef("", "t1", 0)) is None
    copies = [copy.copy(stored), copy.deepcopy(stored), pickle.loads(pickle.dumps(stored))]  # noqa: S301
    del stored
    gc.collect()
    assert [dict(each) for each in copies] == [sketches] * 3


def test_no_room_for_sketches(samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics are the same if sketches are in a file, or if there is no room for a file."""
    arguments: dict[str, Any] = {"data": str(samples / "digits_cnn_calib.npz"), "samples": 8}
    expected = gq.calibrate(samples / "digits_cnn.onnx", **arguments)
    monkeypatch.setattr("graphquant.calibration.calibrate.MAX_SKETCHES_IN_MEMORY", 2)
    stored = gq.calibrate(samples / "digits_cnn.onnx", **arguments)
    monkeypatch.setattr("graphquant.calibration.stats.TemporaryFile", Mock(side_effect=FileNotFoundError))
    unstored = gq.calibrate(samples / "digits_cnn.onnx", **arguments)
    assert [type(each.sketches) for each in (expected, stored, unstored)] == [dict, StoredSketches, dict]
    assert dict(expected.sketches) == dict(stored.sketches) == dict(unstored.sketches)

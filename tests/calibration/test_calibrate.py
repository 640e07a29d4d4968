"""Blocks, shards, passes and collected statistics."""

from __future__ import annotations

import os
import re
import weakref
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from graphquant import formats
from graphquant.calibration.calibrate import MAX_CONCURRENT_RUNS, CalibrationRun, collect_stats
from graphquant.calibration.data import Dataset
from graphquant.calibration.memory import RunFootprint
from graphquant.calibration.stats import Stats, combine_stats
from graphquant.calibration.targets import ObservationTarget
from graphquant.calibration.targets import all_float_targets as all_of
from graphquant.errors import DataError
from graphquant.ir import TensorRef
from graphquant.observers import Sketch, SketchAccumulator, distribution_of, sketch_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

A, B, C = (TensorRef("", name) for name in "abc")
TARGETS = {tensor: ObservationTarget(tensor.op * 32, None, 7) for tensor in (A, B, C)}
LOAD = RunFootprint(block_size=4, elements_per_sample=None)

JOINED = LOAD._replace(join_samples=True)


def calibrate(
    targets, runner, dataset, *, footprint: RunFootprint = LOAD, model_digest: str = "source", **run
) -> Stats:
    """Collect the statistics of one run; `run` are fields of `CalibrationRun`."""
    return collect_stats(runner, targets, dataset, footprint, CalibrationRun(model_digest=model_digest, **run))


def numbered_samples(count: int, shape: Callable[[int], int] = lambda _: 1) -> Dataset:
    """Return samples that contain their number."""

    def feeds(start: int, stop: int) -> Iterator[dict]:
        return ({"x": np.full((shape(i),), float(i))} for i in range(start, stop))

    return Dataset(count=count, digest=f"da7a{count}", open_feeds=feeds)


class Runner:
    """Runner that computes tensors from the fed numbers by functions; an empty list means not reached."""

    def __init__(self, *, sizes: int = 1, **tensors) -> None:
        """Create a runner; `sizes` is the number of elements of each tensor."""
        self.tensors, self.size = tensors, sizes
        self.fed: list[list[float]] = []
        self.asked: list[tuple[TensorRef, ...]] = []
        self.max_in_flight = 0

    def unobservable(self, tensors):
        """Return the tensors without a function."""
        return {tensor: "it is hidden" for tensor in tensors if tensor.op not in self.tensors}

    def element_counts(self, tensors, feed):
        """Return the same size for each tensor."""
        return dict.fromkeys(tensors, self.size)

    def observe(self, tensors, feeds, *, other_tensors=(), max_in_flight=1, on_result=None) -> Iterator[dict]:
        """Yield the values of `tensors` for each feed."""
        assert set(tensors) | set(other_tensors) == {TensorRef("", name) for name in self.tensors}
        self.asked.append(tuple(tensors))
        self.max_in_flight = max_in_flight
        for feed in feeds:
            self.fed.append(feed["x"].tolist())
            observation = {tensor: self.tensors[tensor.op](feed["x"]) for tensor in tensors}
            on_result(observation)
            yield observation


def three_tensor_runner(**options) -> Runner:
    """Return a runner of three tensors."""
    return Runner(
        a=lambda x: [-x, 2 * x],
        b=lambda x: [x, np.append(x + 10, np.nan)] if x[0] % 2 else [],
        c=lambda x: [np.exp(x / 100).astype(np.float32)],
        **options,
    )


def test_statistics_of_all_samples() -> None:
    """Samples and loop iterations are merged, NaN is counted, and block extremes are summed."""
    found = calibrate(TARGETS, three_tensor_runner(), numbered_samples(10))
    assert list(found.sketches) == [A, B, C]
    a, b, _ = found.sketches.values()
    assert (a.low, a.high, a.count, a.blocks) == (-9, 18, 20, 3)
    assert (a.low_sum, a.high_sum) == (-(3 + 7 + 9) << 1074, 2 * (3 + 7 + 9) << 1074)
    assert (b.low, b.high, b.count, b.nan) == (1, 19, 15, 5)
    assert (found.samples, found.blocks, found.complete, found.model_digest) == (10, 3, True, "source")


def test_targets_select_details() -> None:
    """Each tensor has the bins and channels of its target."""
    runner = Runner(a=lambda x: [x], b=lambda x: [np.array([[1.0, -2.0], [x[0], 3.0]])], c=lambda x: [x])
    targets = {A: ObservationTarget("a", None, 0), B: ObservationTarget("b", 1, 7), C: ObservationTarget("c", None, 10)}
    kept = calibrate(targets, runner, numbered_samples(5)).sketches
    assert [one.bits for one in kept.values()] == [0, 0, 10]
    assert (kept[B].low.tolist(), kept[B].high.tolist()) == ([0.0, -2.0], [4.0, 3.0])
    assert kept[C] == calibrate({C: targets[C]}, Runner(c=lambda x: [x]), numbered_samples(5)).sketches[C]
    assert kept[C].bins.tolist() == sketch_values(np.arange(5.0), bits=10).bins.tolist()


def test_unreached_tensors() -> None:
    """Partly reached, empty and unobservable tensors are reported."""
    runner = Runner(a=lambda x: [x] if x[0] == 1 else [], b=lambda _: [np.zeros(0)])
    found = calibrate(TARGETS, runner, numbered_samples(3))
    assert (list(found.sketches), found.unobservable) == ([A, B], {C: "it is hidden"})
    assert (found.sketches[B].count, found.sketches[B].empty_arrays) == (0, 3)
    assert found.missing_reason(A) == ""
    assert re.search("empty .* 3 ", found.missing_reason(B))
    assert found.missing_reason(C) == "it is hidden"
    assert found.sketches[A] == sketch_values(np.array([1.0]), bits=7)
    assert (list(found.targets), found.samples) == ([A, B, C], 3)
    never_reached = calibrate(TARGETS, Runner(a=lambda x: [x], b=lambda _: []), numbered_samples(3))
    assert list(never_reached.sketches) == [A]
    assert never_reached.missing_reason(B) == "no sample reached it"


def test_no_targets() -> None:
    """Without observable targets, the model is not run and the calibration is complete."""
    for targets in ({}, TARGETS):
        runner = Runner()
        found = calibrate(targets, runner, numbered_samples(3))
        assert (found.sketches, found.complete, runner.fed) == ({}, True, [])


def test_blocks_as_batches() -> None:
    """Blocks are concatenated if the model is batch independent and shapes agree."""
    runner = three_tensor_runner()
    calibrate(TARGETS, runner, numbered_samples(6, lambda i: 2 if i == 5 else 1), footprint=JOINED)
    assert runner.fed == [[0, 1, 2, 3], [4], [5, 5]]
    runner = three_tensor_runner()
    calibrate(TARGETS, runner, numbered_samples(3))
    assert runner.fed == [[0], [1], [2]]


def test_inputs_with_different_rows() -> None:
    """Inputs with different numbers of rows are run one by one."""

    def run(rows: int) -> list:
        feeds = [{"x": np.full(1, i), "z": np.full((rows, 3), i)} for i in range(2)]
        runner = three_tensor_runner()
        data = Dataset(count=2, digest="da7a", open_feeds=lambda start, stop: iter(feeds[start:stop]))
        calibrate(TARGETS, runner, data, footprint=JOINED)
        return runner.fed

    assert (run(1), run(2)) == ([[0, 1]], [[0], [1]])


@pytest.mark.parametrize("footprint", [LOAD, JOINED])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_shards(parts: int, footprint: RunFootprint) -> None:
    """Shards, merged in any order, equal one call, and each block is run once."""
    whole = calibrate(TARGETS, three_tensor_runner(), numbered_samples(22), footprint=footprint)
    runner = three_tensor_runner()
    shards = [
        calibrate(TARGETS, runner, numbered_samples(22), shard=(part + 1, parts), footprint=footprint)
        for part in range(parts)
    ]
    assert sorted(number for fed in runner.fed for number in fed) == list(range(22))
    assert combine_stats(shards) == combine_stats(shards[::-1]) == combine_stats([*shards[1::2], *shards[::2]]) == whole
    assert whole.runs[0].block_ranges == ((0, 6),)


@pytest.mark.parametrize(
    ("room", "groups"),
    [
        (1 << 20, [(A, B, C)]),
        ((3 << 16) + 800 * 16 * 3, [(A, B, C)]),  # a histogram takes 64 KiB, an element 16 bytes, or 8 in a group
        ((3 << 16) + 800 * 16 * 3 - 1, [(A, B), (C,)]),
        ((3 << 16) + 800 * 8 * 3, [(A, B), (C,)]),  # beside another that is at work
        ((3 << 16) + 800 * 8 * 3 - 1, [(A,), (B,), (C,)]),
        (1, [(A,), (B,), (C,)]),
    ],
)
def test_groups(room: int, groups: list) -> None:
    """With little memory, tensors are observed in several passes with the same result."""
    runner = three_tensor_runner(sizes=800)
    found = calibrate(TARGETS, runner, numbered_samples(9), max_memory=room)
    assert runner.asked == groups
    assert found == calibrate(TARGETS, three_tensor_runner(), numbered_samples(9))
    assert len(runner.fed) == 9 * len(groups)


def test_background_digest() -> None:
    """Samples are run before all are read. A read error ends the calibration."""
    data = replace(numbered_samples(22), digest=Future())
    found = calibrate(
        TARGETS, three_tensor_runner(), data, should_stop=lambda: data.digest.done() or data.digest.set_result("da7a22")
    )
    assert found == calibrate(TARGETS, three_tensor_runner(), numbered_samples(22), shard=(1, 3))
    runner, data = three_tensor_runner(), replace(numbered_samples(22), digest=Future())
    data.digest.set_exception(DataError("NaN"))
    with pytest.raises(DataError, match="NaN"):
        calibrate(TARGETS, runner, data)
    assert len(runner.fed) < 8
    with pytest.raises(DataError, match="NaN"):
        calibrate(TARGETS, runner, data, resume_from=found)


def test_known_sizes_need_no_measuring() -> None:
    """If static shapes are small, no run measures sizes."""
    runner = three_tensor_runner(sizes=1 << 60)
    calibrate(TARGETS, runner, numbered_samples(5), footprint=RunFootprint(block_size=4, elements_per_sample=100))
    assert runner.asked == [(A, B, C)]


def test_concurrent_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many runs are concurrent on several cores: at most one on each, and at most four. Groups are run one by one."""
    runner, cores = three_tensor_runner(), os.cpu_count() or 1
    calibrate(TARGETS, runner, numbered_samples(4))
    assert runner.max_in_flight == 1
    monkeypatch.setattr("graphquant.calibration.calibrate.MIN_CONCURRENT_ELEMENTS", 0)
    calibrate(TARGETS, runner, numbered_samples(4))
    assert min(cores, 2) <= runner.max_in_flight <= min(cores, 4)
    calibrate(TARGETS, runner, numbered_samples(4), max_memory=1)
    assert runner.max_in_flight == 1


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_that_fill_sketches(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Several threads collect the same statistics as one."""
    expected = calibrate(TARGETS, three_tensor_runner(), numbered_samples(9))
    monkeypatch.setattr("graphquant.calibration.calibrate.FILL_THREADS", threads)
    assert calibrate(TARGETS, three_tensor_runner(), numbered_samples(9)) == expected


@pytest.mark.parametrize(("footprint", "elements"), [(LOAD, 200), (JOINED, 800)])
def test_limit_of_known_sizes(footprint: RunFootprint, elements: int) -> None:
    """Twice the elements of a run must fit, because static shapes may be too small. Sizes are measured otherwise."""
    room = (3 << 16) + 16 * elements
    for max_memory, groups in ((room, [(A, B, C)]), (room - 1, [(A,), (B,), (C,)])):
        runner = three_tensor_runner(sizes=1 << 60)
        known = footprint._replace(elements_per_sample=100)
        calibrate(TARGETS, runner, numbered_samples(5), footprint=known, max_memory=max_memory)
        assert runner.asked == groups


@pytest.mark.parametrize("blocks", [1, 3, 5])
def test_stop_and_resume(blocks: int) -> None:
    """A stopped and resumed calibration equals an uninterrupted one."""
    left = iter([False] * (blocks - 1) + [True])
    told: list[tuple[int, int]] = []
    runner = three_tensor_runner()
    part = calibrate(TARGETS, runner, numbered_samples(22), should_stop=lambda: next(left))
    assert (part.samples, part.complete, len(runner.fed)) == (4 * blocks, False, 4 * blocks)
    assert part.runs[0].block_ranges == ((0, blocks),)
    rest = calibrate(
        TARGETS, three_tensor_runner(), numbered_samples(22), resume_from=part, progress=lambda *what: told.append(what)
    )
    assert rest == calibrate(TARGETS, three_tensor_runner(), numbered_samples(22))
    assert told == [(min(4 * done, 22), 22) for done in range(blocks, 7)]


def test_runs_that_started_before_the_stop() -> None:
    """Values of runs that end after the stop are not counted."""

    class EagerRunner(Runner):
        def observe(self, *tensors_and_feeds, **options) -> Iterator[dict]:
            """Run all feeds before the first result is used."""
            yield from list(super().observe(*tensors_and_feeds, **options))

    found = calibrate({A: TARGETS[A]}, EagerRunner(a=lambda x: [x]), numbered_samples(22), should_stop=lambda: True)
    assert (found.samples, found.sketches[A].count, found.sketches[A].high) == (4, 4, 3)


def test_invalid_resume() -> None:
    """Other tensors, data, models and shards, and complete statistics, cannot be resumed."""
    stop = partial(calibrate, TARGETS, three_tensor_runner(), should_stop=lambda: True)
    again = partial(calibrate, TARGETS, three_tensor_runner())
    two_shards = combine_stats([again(numbered_samples(22), shard=(part, 4)) for part in (1, 3)])
    for before, call, reason in (
        (
            stop(numbered_samples(22)),
            partial(again, numbered_samples(21)),
            "of another model, other tensors or other data",
        ),
        (
            stop(numbered_samples(22)),
            partial(again, numbered_samples(22), model_digest="other"),
            "of another model, other tensors or other data",
        ),
        (
            stop(numbered_samples(22)),
            partial(again, numbered_samples(22), footprint=RunFootprint(block_size=2, elements_per_sample=1)),
            "of another model",
        ),
        (stop(numbered_samples(22)), partial(again, numbered_samples(22), shard=(2, 2)), "of another shard"),
        (two_shards, partial(again, numbered_samples(22), shard=(1, 2)), "of another shard"),
        (again(numbered_samples(22)), partial(again, numbered_samples(22)), "complete"),
    ):
        with pytest.raises(DataError, match=reason):
            call(resume_from=before)


def test_memory_does_not_grow_with_samples() -> None:
    """No values outlive their block."""
    alive: list[np.ndarray] = []

    def values(x: np.ndarray) -> list[np.ndarray]:
        made = np.full(1000, x[0])
        alive.append(made)
        return [made]

    import sys

    calibrate({A: TARGETS[A]}, Runner(a=values), numbered_samples(40))
    assert max(sys.getrefcount(one) for one in alive) <= 4  # the list, the loop and the call's argument


def test_counted_accumulators_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accumulator is freed when its sketch exists, because it needs more memory."""
    counted: weakref.WeakSet[SketchAccumulator] = weakref.WeakSet()
    alive_counts: list[int] = []
    to_sketch = SketchAccumulator.to_sketch

    def record(accumulator: SketchAccumulator) -> Sketch:
        alive_counts.append(len(counted))
        counted.add(accumulator)
        return to_sketch(accumulator)

    monkeypatch.setattr(SketchAccumulator, "to_sketch", record)
    names = [f"t{index}" for index in range(40)]
    targets = {TensorRef("", name): ObservationTarget("d", None, 7) for name in names}
    stats = calibrate(targets, Runner(**dict.fromkeys(names, lambda x: [x])), numbered_samples(4))
    assert list(stats.sketches) == list(targets)
    assert len(alive_counts) == len(names)
    assert max(alive_counts) <= MAX_CONCURRENT_RUNS  # each thread may hold one


def test_runner_errors() -> None:
    """An error of the runner is raised."""

    def fail(x: np.ndarray) -> list[np.ndarray]:
        raise DataError("misfit")

    with pytest.raises(DataError, match=r"^misfit$"):
        calibrate({A: TARGETS[A]}, Runner(a=fail), numbered_samples(4))


def test_stats_totals() -> None:
    """The totals are the sums over the runs."""
    found = calibrate(TARGETS, three_tensor_runner(), numbered_samples(22), shard=(2, 4))
    assert isinstance(found, Stats)
    assert (found.runs[0].block_ranges, found.samples, found.blocks, found.random) == (((1, 3),), 8, 2, False)


def test_block_sizes_agree(samples: Path) -> None:
    """A real model in blocks of 1, 8 and 32 has the same statistics up to rounding."""
    model = formats.format_module("onnx").load(samples / "digits_cnn.onnx")
    runner = formats.format_module("onnx").create_runner(model)
    with np.load(samples / "digits_cnn_calib.npz") as file:
        images = file["image"]
    data = Dataset(
        count=64,
        digest="da7a",
        open_feeds=lambda start, stop: ({"image": images[i : i + 1]} for i in range(start, stop)),
    )
    found = [
        calibrate(
            all_of(model),
            runner,
            data,
            footprint=RunFootprint(block_size=block, elements_per_sample=None),
        ).sketches
        for block in (1, 8, 32)
    ]
    assert len(found[0]) > 10
    for other in found[1:]:
        assert list(other) == list(found[0])
        for tensor, one in found[0].items():
            same = other[tensor]
            assert (same.count, same.nan, same.inf) == (one.count, one.nan, one.inf)
            np.testing.assert_allclose([same.low, same.high], [one.low, one.high], rtol=1e-5, atol=1e-6)
            ranked = [
                [distribution_of(each).value_at_rank(rank) for rank in (1, one.count // 2, one.count)]
                for each in (one, same)
            ]
            np.testing.assert_allclose(*ranked, rtol=2**-6, atol=1e-6)

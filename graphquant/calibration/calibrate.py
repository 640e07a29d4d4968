"""Run data through a model in blocks of samples, and fill one sketch for each target.

Blocks are numbered over all samples of the data. Their size depends on the model and on the first samples of the data,
so statistics do not depend on the machine or shard that ran a block.

With enough memory, several runs are in progress at once, each on its own thread. This is faster than one run on several
threads, and a run gives the same bits on any machine. With little memory, each feed is run several times, once for each
group of tensors.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from graphquant import formats
from graphquant.calibration.batch_independence import measure_footprint
from graphquant.calibration.memory import (
    RunFootprint,
    concurrent_run_count,
    group_observed_tensors,
    observation_budget,
    return_freed_memory,
)
from graphquant.calibration.stats import DataRun, Stats, StoredSketches, combine_stats, uncovered_ranges
from graphquant.errors import DataError
from graphquant.observers import SketchAccumulator, add_all

if TYPE_CHECKING:
    from graphquant.calibration.data import Dataset
    from graphquant.calibration.targets import ObservationTarget
    from graphquant.formats import Feeds, Runner
    from graphquant.ir import Model, TensorRef
    from graphquant.numerics import Array

    Observation = dict[TensorRef, list[Array]]

Item = TypeVar("Item")

MAX_CONCURRENT_RUNS = min(4, os.cpu_count() or 1)  # maximum number of concurrent runs

FILL_THREADS = max(MAX_CONCURRENT_RUNS // 2, 1)
"""Number of threads that fill sketches, each for different tensors. A run takes longer than filling."""

MIN_CONCURRENT_ELEMENTS = 1 << 23
"""Number of elements, over all runs, from which several runs are concurrent. The sessions of other threads would take
longer to create than they save."""

MAX_SKETCHES_IN_MEMORY = 50_000  # sketches of about 2.5 KB each; more are in a temporary file
TENSORS_PER_TASK = 8  # number of tensors whose values are added to sketches in one task


def block_feeds(
    dataset: Dataset, block_ranges: Sequence[tuple[int, int]], block_size: int, *, join_samples: bool
) -> Iterator[tuple[Feeds, int | None]]:
    """Yield the feeds of the blocks in `block_ranges`: one batch per block if the model and the samples allow it.

    Each feed comes with the index of the block that it completes, or None if more feeds of the block follow.
    """
    for start, stop in block_ranges:
        samples = dataset.feeds_between(start * block_size, stop * block_size)
        for index in range(start, stop):
            block: Iterator[Feeds] = itertools.islice(samples, block_size)
            if join_samples:
                block = iter(_join_samples(list(block)))
            feed = next(block, None)
            while feed is not None:
                following = next(block, None)
                yield feed, index if following is None else None
                feed = following


def observe_feeds(
    runner: Runner,
    tensors: Sequence[TensorRef],
    feeds: Iterator[tuple[Feeds, int | None]],
    on_result: Callable[[Observation, int | None], object],
    *,
    max_elements: int | None,
    budget: int,
    max_concurrent_runs: int,
    run_count: int | None = None,
) -> Generator[None, None, None]:
    """Pass the values of `tensors` in each run to `on_result`, and yield once after each run.

    Each feed comes with the index of the block that it completes, or None, which `on_result` also gets. It is called in
    order, on any thread. Values that it leaves in the dictionary stay in memory longer than needed. `max_elements` is
    an upper bound of the elements of all tensors in one run, None to measure it; `budget` bytes may hold values. There
    are about `run_count` feeds; if they are few and small, one run follows the other.
    """
    if (first := next(feeds, None)) is None:
        return
    groups, max_elements = group_observed_tensors(runner, tensors, first[0], max_elements, budget)
    if run_count is not None and max_elements * run_count < MIN_CONCURRENT_ELEMENTS:
        max_concurrent_runs = 1
    feed_branches = tee_items(itertools.chain([first], feeds), 2 * len(groups))
    del first

    def observe_group(group: tuple[TensorRef, ...]) -> Generator[Observation, None, None]:
        members, own_feeds, reported_feeds = set(group), feed_branches.pop(), feed_branches.pop()

        def report(observation: Observation) -> None:
            _, block = next(reported_feeds)
            on_result(observation, block if group == groups[-1] else None)

        return runner.observe(
            group,
            (feed for feed, _ in own_feeds),
            other_tensors=tuple(tensor for tensor in tensors if tensor not in members),
            max_in_flight=concurrent_run_count(max_elements, budget, max_concurrent_runs) if len(groups) == 1 else 1,
            on_result=report,
        )

    with ExitStack() as stack:
        passes = [stack.enter_context(closing(observe_group(group))) for group in groups]
        while True:
            for observations in passes:
                if next(observations, None) is None:
                    return
                yield


def tee_items(items: Iterator[Item], count: int) -> list[Generator[Item, None, None]]:
    """Split an iterator into `count` others, which, unlike `itertools.tee`, drop items that all have consumed.

    An iterator that is not exhausted must be closed after it was started. Items are then no longer stored for it.
    """
    queues: dict[int, deque[Item]] = {index: deque() for index in range(count)}

    def branch(index: int) -> Generator[Item, None, None]:
        queue = queues[index]
        try:
            while True:
                if not queue:
                    for item in itertools.islice(items, 1):
                        for waiting_queue in tuple(queues.values()):
                            waiting_queue.append(item)
                if not queue:
                    return
                yield queue.popleft()
        finally:
            del queues[index]

    return [branch(index) for index in range(count)]


def _join_samples(block: Sequence[Feeds]) -> Sequence[Feeds]:
    """Concatenate samples into one feed. Return them unchanged if their shapes or numbers of rows differ."""
    signatures = [{name: (np.shape(value), np.asarray(value).dtype) for name, value in feed.items()} for feed in block]
    if len(block) <= 1 or any(signature != signatures[0] for signature in signatures):
        return block
    row_counts = {shape[:1] for shape, _ in signatures[0].values()}
    if len(row_counts) != 1 or () in row_counts:
        return block
    return [{name: np.concatenate([feed[name] for feed in block]) for name in signatures[0]}]


class ResumeError(DataError):
    """The statistics to resume from belong to another calibration or are complete."""

    def __init__(self, reason: str, path: str = "") -> None:
        """Create the error. `reason` describes the statistics; `path` is their file, if known."""
        super().__init__(
            f"Statistics already exist{f' in {path}' if path else ''}, and they are {reason}. Use another output,"
            " or replace them with --force."
        )
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRun:
    """One calibration of a model: shard, memory limit, earlier statistics and callbacks."""

    model_digest: str  # digest of the source model
    shard: tuple[int, int] = (1, 1)  # (index, number of shards), counted from 1. A shard consists of whole blocks.
    # Bytes that calibration may use in addition to the plain runs; half of the free memory by default. If the observed
    # values of one run need more, tensors are observed in several passes. The largest tensor and one histogram per
    # tensor are always allocated.
    max_memory: int | None = None
    resume_from: Stats | None = None  # statistics of an interrupted calibration; their blocks are not run again
    should_stop: Callable[[], bool] | None = None  # called after each block; True ends with the finished blocks
    # Called before the first block and after each block with the finished and total samples of the shard.
    progress: Callable[[int, int], None] | None = None


def calibrate_model(
    model: Model, targets: Mapping[TensorRef, ObservationTarget], dataset: Dataset, run: CalibrationRun
) -> Stats:
    """Run the data through a model and collect the statistics of `targets`; see `collect_stats`."""
    runner = formats.shared_runner(model, "prepared")
    footprint = measure_footprint(runner, dataset, tuple(targets), max_memory=run.max_memory)
    return collect_stats(runner, targets, dataset, footprint, run)


def calibrate_folds(
    model: Model, targets: Mapping[TensorRef, ObservationTarget], dataset: Dataset, run: CalibrationRun, fold_count: int
) -> list[tuple[Stats, tuple[int, int]]]:
    """Collect the statistics of `targets` for each of `fold_count` parts of the data, with the samples [start, stop).

    `combine_stats` gives the statistics of several folds. With fewer samples than folds there are fewer folds.
    """
    runner = formats.shared_runner(model, "prepared")
    footprint = measure_footprint(runner, dataset, tuple(targets), max_memory=run.max_memory)
    fold_size = -(-dataset.count // fold_count)
    # Folds consist of whole blocks of nearly equal size.
    footprint = footprint._replace(block_size=-(-fold_size // -(-fold_size // footprint.block_size)))
    block_count = -(-dataset.count // footprint.block_size)
    fold_count = min(fold_count, block_count)
    folds = []
    for index in range(fold_count):
        start, stop = (block_count * end // fold_count * footprint.block_size for end in (index, index + 1))
        stats = collect_stats(runner, targets, dataset, footprint, replace(run, shard=(index + 1, fold_count)))
        folds.append((stats, (start, min(stop, dataset.count))))
    return folds


def collect_stats(
    runner: Runner,
    targets: Mapping[TensorRef, ObservationTarget],
    dataset: Dataset,
    footprint: RunFootprint,
    run: CalibrationRun,
) -> Stats:
    """Run the data in blocks of the footprint and collect the statistics of `targets`.

    Raises a ResumeError if `resume_from` belongs to another calibration or is complete, and a DataError if a sample is
    invalid.
    """
    unobservable = runner.unobservable(tuple(targets))
    data_run = DataRun(
        # Without earlier statistics, the digest is needed only at the end.
        data_digest="" if run.resume_from is None else dataset.final_digest(),
        samples=dataset.count,
        block_size=footprint.block_size,
        block_ranges=(),
        random=dataset.random,
    )
    first_block, last_block = (
        data_run.blocks * shard_index // run.shard[1] for shard_index in (run.shard[0] - 1, run.shard[0])
    )
    stats = Stats(
        model_digest=run.model_digest, targets=targets, sketches={}, runs=(data_run,), unobservable=unobservable
    )
    block_ranges = [(first_block, last_block)]
    if run.resume_from is not None:
        block_ranges = _remaining_block_ranges(stats, run.resume_from, first_block, last_block)
        stats = run.resume_from
    total_samples = replace(data_run, block_ranges=((first_block, last_block),)).samples_done
    observed_targets = {tensor: target for tensor, target in targets.items() if tensor not in unobservable}
    budget = observation_budget(
        run.max_memory, [0 if target.axis is not None else target.bits for target in observed_targets.values()]
    )
    accumulators = {tensor: SketchAccumulator(target.axis, target.bits) for tensor, target in observed_targets.items()}
    collector = _SketchCollector(accumulators, run.should_stop)
    finished: list[tuple[int, int]] = []
    samples_done = stats.samples
    feeds = block_feeds(
        dataset, block_ranges if observed_targets else (), footprint.block_size, join_samples=footprint.join_samples
    )
    max_elements = footprint.elements_per_sample
    if max_elements is not None:  # static shapes are too small for some models
        max_elements *= 2 * (footprint.block_size if footprint.join_samples else 1)
    if run.progress is not None:
        run.progress(samples_done, total_samples)
    with ThreadPoolExecutor(MAX_CONCURRENT_RUNS) as pool:
        observations = observe_feeds(
            runner,
            tuple(observed_targets),
            feeds,
            partial(collector.collect, pool),
            max_elements=max_elements,
            budget=budget,
            max_concurrent_runs=MAX_CONCURRENT_RUNS,
            run_count=data_run.blocks * (1 if footprint.join_samples else footprint.block_size),
        )
        with closing(observations):
            for _ in observations:
                stopped = collector.stopped  # read first: once it is set, no more blocks are closed
                while collector.closed_blocks:
                    block = collector.closed_blocks.popleft()
                    dataset.raise_read_errors()
                    finished.append((block, block + 1))
                    samples_done += replace(data_run, block_ranges=(finished[-1],)).samples_done
                    if run.progress is not None:
                        run.progress(samples_done, total_samples)
                if stopped:
                    break
    # A counted accumulator needs three times the memory of its sketch, so each is freed before the next one.
    sketches = {tensor: accumulators.pop(tensor).to_sketch() for tensor in observed_targets}
    reached_sketches = {tensor: sketch for tensor, sketch in sketches.items() if sketch.count or sketch.empty_arrays}
    return_freed_memory()
    digest, new_ranges = dataset.final_digest(), tuple(finished if observed_targets else block_ranges)
    stats = replace(stats, runs=tuple(replace(known_run, data_digest=digest) for known_run in stats.runs))
    new_run = replace(data_run, data_digest=digest, block_ranges=new_ranges)
    combined = combine_stats([stats, replace(stats, sketches=reached_sketches, runs=(new_run,))])
    if len(combined.sketches) > MAX_SKETCHES_IN_MEMORY:
        with suppress(OSError):  # no room for the file: they stay in memory, because calibration may have taken hours
            combined = replace(combined, sketches=StoredSketches(combined.sketches))
    return combined


def _remaining_block_ranges(
    fresh: Stats, resume_from: Stats, first_block: int, last_block: int
) -> list[tuple[int, int]]:
    """Return the ranges of blocks in [first_block, last_block) that `resume_from` does not cover."""
    data_run, earlier_run = fresh.runs[0], resume_from.runs[0] if len(resume_from.runs) == 1 else None
    compatible = (fresh.model_digest, dict(fresh.targets)) == (resume_from.model_digest, dict(resume_from.targets))
    if earlier_run is None or not compatible or replace(earlier_run, block_ranges=()) != data_run:
        raise ResumeError("of another model, other tensors or other data")
    if any(start < first_block or stop > last_block for start, stop in earlier_run.block_ranges):
        raise ResumeError("of another shard")
    remaining = uncovered_ranges(earlier_run.block_ranges, first_block, last_block)
    if not remaining:
        raise ResumeError("complete")
    return remaining


class _SketchCollector:
    """Collector that adds observed values to accumulators. The caller counts and removes the `closed_blocks`."""

    def __init__(
        self, accumulators: Mapping[TensorRef, SketchAccumulator], should_stop: Callable[[], bool] | None
    ) -> None:
        self._accumulators, self._should_stop = accumulators, should_stop
        self.closed_blocks: deque[int] = deque()
        self.stopped = False

    def collect(self, pool: Executor, observation: dict[TensorRef, list[Array]], block: int | None) -> None:
        """Add the values to the accumulators. Close `block` if these values complete it."""
        if self.stopped:
            return  # this run started before the stop
        while observation:  # values are released at once, because concurrent runs need the memory
            tensor_group = [observation.popitem() for _ in range(min(TENSORS_PER_TASK, len(observation)))]
            tasks = [(self._accumulators[tensor], values) for tensor, values in tensor_group]
            # Each accumulator belongs to one thread.
            futures = [pool.submit(add_all, tasks[start::FILL_THREADS]) for start in range(1, FILL_THREADS)]
            add_all(tasks[::FILL_THREADS])
            for future in futures:
                future.result()
            del tensor_group, tasks
        if block is None:
            return
        for accumulator in self._accumulators.values():
            accumulator.close_block()
        self.closed_blocks.append(block)
        self.stopped = self._should_stop is not None and self._should_stop()

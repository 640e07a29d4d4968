"""Runs data through a model in blocks of samples, and fills a sketch for each target.

Blocks are counted over all samples of the data and have a size that follows from the model alone, so that statistics do
not depend on which of them were run where.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from graphquant.calibration.memory import concurrent_run_count, fits_in_budget, group_tensors, observation_budget
from graphquant.calibration.stats import DataRun, Stats, combine_stats, uncovered_ranges
from graphquant.errors import DataError
from graphquant.observers import SketchAccumulator, add_all

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Executor

    from graphquant.calibration.data import Dataset
    from graphquant.calibration.targets import ObservationTarget
    from graphquant.ir import Model, Op, TensorRef
    from graphquant.numerics import Array

    Feeds = Mapping[str, Array]
    Observation = dict[TensorRef, list[Array]]


# Runs data through a model and shows what its tensors hold, in the memory that there is.
#
# Where there is enough, several runs are under way at once, each on a thread of its own. That takes less time than one
# run on several threads, and on any machine a run gives the same bits. Where there is little, each feed is run several
# times, for a group of tensors each.

Item = TypeVar("Item")


class ObservableRunner(Protocol):
    """Runs a model and shows what its tensors hold."""

    @property
    def batch_independent(self) -> bool:
        """Whether samples may be joined along axis 0 of every input and each result is still that of its sample."""

    def unobservable(self, tensors: Sequence[TensorRef]) -> dict[TensorRef, str]:
        """Those of `tensors` that cannot be observed, with the reason."""

    def element_counts(self, tensors: Sequence[TensorRef], feed: Feeds) -> dict[TensorRef, int]:
        """How many elements each tensor has in one run of `feed`, over all iterations; 0 if it is not reached."""

    def observe(
        self,
        tensors: Sequence[TensorRef],
        feeds: Iterable[Feeds],
        *,
        other_tensors: Sequence[TensorRef] = (),
        max_in_flight: int = 1,
        on_result: Callable[[Observation], object] | None = None,
    ) -> Generator[Observation, None, None]:
        """For each feed the values that each tensor took; those of up to `max_in_flight` feeds are there or under way.

        `on_result` is shown them in order, on whatever thread.
        """


def block_feeds(
    dataset: Dataset, block_ranges: Sequence[tuple[int, int]], block_size: int, *, join_samples: bool
) -> Iterator[tuple[Feeds, int | None]]:
    """What to run for the blocks of the ranges `block_ranges`: one batch each where the model and the samples allow it.

    With each comes the number of the block that it ends, None if more of its block follows.
    """
    for start, stop in block_ranges:
        samples = dataset.feeds_between(start * block_size, stop * block_size)
        for index in range(start, stop):
            block = itertools.islice(samples, block_size)
            block_parts_iter, feed = _try_join_block(block) if join_samples else block, None
            for next_feed in block_parts_iter:
                if feed is not None:
                    yield feed, None
                feed = next_feed
            if feed is not None:
                yield feed, index


def observe_feeds(
    runner: ObservableRunner,
    tensors: Sequence[TensorRef],
    feeds: Iterator[tuple[Feeds, int | None]],
    on_result: Callable[[Observation, int | None], object],
    *,
    max_elements: int | None,
    budget: int,
    max_concurrent_runs: int,
) -> Generator[None, None, None]:
    """Shows what is seen of `tensors` in each run; comes back after each.

    Args:
        runner: Runs the model.
        tensors: What to observe.
        feeds: What to run, with the number of the block that each ends.
        on_result: Is shown what is seen, in order, on whatever thread, and the number of the block that this ends, if it
            ends one; values that it leaves there are kept for longer than they need be.
        max_elements: The most that all tensors may have together in one run, None if that is to be measured.
        budget: Bytes for observed values.
        max_concurrent_runs: How many runs there may be at once.
    """
    first = next(feeds, None)
    if first is None:
        return
    if max_elements is None or not fits_in_budget(max_elements, budget):
        element_counts = runner.element_counts(tensors, first[0])
        max_elements, groups = sum(element_counts.values()), group_tensors(element_counts, budget)
    else:
        groups = [tuple(tensors)]
    feed_branches = tee_items(itertools.chain([first], feeds), 2 * len(groups))
    del first
    with ExitStack() as stack:
        passes = []
        for group_index, group in enumerate(groups):
            group_members, group_feeds, block_ends = (
                set(group),
                feed_branches.pop(),
                (block for _, block in feed_branches.pop()),
            )
            blocks = block_ends if group_index == len(groups) - 1 else map(_ignore_block, block_ends)
            observations = runner.observe(
                group,
                (feed for feed, _ in group_feeds),
                other_tensors=tuple(tensor for tensor in tensors if tensor not in group_members),
                max_in_flight=concurrent_run_count(max_elements, budget, max_concurrent_runs)
                if len(groups) == 1
                else 1,
                on_result=partial(_report_block_result, on_result, blocks),
            )
            passes.append(stack.enter_context(closing(observations)))
        while True:
            for observations in passes:
                if next(observations, None) is None:
                    return
                yield


def _report_block_result(
    on_result: Callable[[Observation, int | None], object], block_ends: Iterator[int | None], observation: Observation
) -> None:
    on_result(observation, next(block_ends))


def _ignore_block(_block: int | None) -> None:
    return None


def tee_items(items: Iterator[Item], count: int) -> list[Generator[Item, None, None]]:
    """Iterators that each give all items; unlike `itertools.tee`, they keep none that all have given.

    One that is not read to its end is to be closed once it was begun: items are not kept for it then.
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


def _try_join_block(block: Iterator[Feeds]) -> Iterator[Feeds]:
    """The samples as one feed where they can be joined, else as they are."""
    samples = list(block)
    joined = _join_samples(samples)
    return iter(samples if joined is None else [joined])


def _join_samples(block: Sequence[Feeds]) -> Feeds | None:
    """The samples as one feed; None where their shapes differ, or inputs have different numbers of rows."""
    if len(block) == 1:
        return block[0]
    signature = {name: (np.shape(value), np.asarray(value).dtype) for name, value in block[0].items()}
    if any(not shape for shape, _ in signature.values()) or len({shape[0] for shape, _ in signature.values()}) != 1:
        return None
    for feed in block:
        if {name: (np.shape(value), np.asarray(value).dtype) for name, value in feed.items()} != signature:
            return None
    return {name: np.concatenate([feed[name] for feed in block]) for name in signature}


DEFAULT_BLOCK_SIZE = 8
"""Samples in a block where samples are run one by one, or where the sizes of activations are not known."""

MAX_BATCH_SIZE = 32
"""Samples in the largest batch: more makes no model faster."""

MAX_BATCH_ELEMENTS = 1 << 24
"""Elements that all activations of a batch may have together: 64 MB of float32."""

LOOP_KINDS = frozenset({"loop", "scan", "while", "enter"})
"""Kinds around ops that run more than once, so that static shapes do not tell how much they make."""

MAX_CONCURRENT_RUNS = min(4, os.cpu_count() or 1)
"""Runs at once."""

FILL_THREADS = max(MAX_CONCURRENT_RUNS // 2, 1)
"""Threads that fill sketches, each of other tensors. A run takes longer than that."""


TENSORS_PER_TASK = 8
"""Tensors whose values are counted in one go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFootprint:
    """What running a model takes, known from the model alone.

    Attributes:
        block_size: Samples in a block.
        elements_per_sample: Elements that all its float activations have together for one sample, None if that is not known.
    """

    block_size: int
    elements_per_sample: int | None


class ResumeError(DataError):
    """The statistics to go on from are of something else, or complete."""

    def __init__(self, reason: str, path: str = "") -> None:
        """`reason` says what they are, `path` the file that holds them, where that is known."""
        super().__init__(
            f"There are statistics already{f' in {path}' if path else ''}, and they are {reason}. Give another output,"
            " or --force to replace them."
        )
        self.reason = reason


def estimate_footprint(model: Model, *, batch_independent: bool) -> RunFootprint:
    """What running `model` takes."""
    live_ops = [(graph, op) for graph in map(model.graphs.__getitem__, model.reachable_graphs()) for op in graph.ops()]
    element_counts = [
        element_count
        for graph, op in live_ops
        for element_count in _output_element_counts(op, graph.consumers_by_port(op.name))
    ]
    repeated = any(op.kind in LOOP_KINDS for _, op in live_ops)
    total_elements = (
        None if None in element_counts or repeated else sum(element_count or 0 for element_count in element_counts)
    )
    block_size = DEFAULT_BLOCK_SIZE
    if batch_independent and total_elements is not None:
        block_size = max(min(MAX_BATCH_SIZE, 1 << (MAX_BATCH_ELEMENTS // max(total_elements, 1)).bit_length() >> 1), 1)
    return RunFootprint(block_size=block_size, elements_per_sample=total_elements)


def _output_element_counts(op: Op, read_ports: Container[int]) -> list[int | None]:
    """The sizes of the outputs `read_ports` of an op for one sample; a first axis without a size counts samples."""
    if op.kind in {"constant", "variable", "output"}:
        return []
    element_counts: list[int | None] = []
    for port, output in enumerate(op.outputs):
        if port not in read_ports:
            continue
        sizes = output.shape if output.shape is None else output.shape[1:]
        first_size = output.shape[0] or 1 if output.shape else 1
        element_count = None if sizes is None or None in sizes else first_size * math.prod(size or 0 for size in sizes)
        element_counts.append(element_count if output.dtype is None or "float" in output.dtype else 0)
    return element_counts


def collect_stats(
    targets: Mapping[TensorRef, ObservationTarget],
    runner: ObservableRunner,
    dataset: Dataset,
    *,
    model_digest: str,
    footprint: RunFootprint,
    shard: tuple[int, int] = (1, 1),
    max_memory: int | None = None,
    resume_from: Stats | None = None,
    should_stop: Callable[[], bool] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Stats:
    """Runs the data through the model and collects the statistics of `targets`.

    Args:
        targets: The tensors, and what to keep of them.
        runner: Runs the model that has them.
        dataset: The data.
        model_digest: Digest of the source model.
        footprint: What running the model takes.
        shard: Which of how many parts of the data to run, counted from 1. A part is whole blocks.
        max_memory: Bytes that calibration may take beside the plain runs, by default half of what is free. Where the
            observed values of one run would take more, tensors are observed in several passes. What no pass can do
            without is taken all the same: the largest tensor, and a histogram for each.
        resume_from: What an earlier, interrupted call for the same found; its blocks are not run again.
        should_stop: Asked after each block whether to end with what there is.
        progress: Called before the first block and after each with the samples of the shard that are done, and how many
            it has.

    Raises:
        NoContinuationError: `resume_from` is of something else, or complete.
        DataError: A sample is not what it should be.
    """
    unobservable = runner.unobservable(tuple(targets))
    data_digest = "" if resume_from is None else dataset.final_digest()  # else it is known by the end
    data_run = DataRun(
        data_digest=data_digest,
        samples=dataset.count,
        block_size=footprint.block_size,
        block_ranges=(),
        random=dataset.random,
    )
    first_block, last_block = (data_run.blocks * shard_index // shard[1] for shard_index in (shard[0] - 1, shard[0]))
    stats = Stats(model_digest=model_digest, targets=targets, sketches={}, runs=(data_run,), unobservable=unobservable)
    block_ranges = [(first_block, last_block)]
    if resume_from is not None:
        block_ranges = _remaining_block_ranges(stats, resume_from, first_block, last_block)
        stats = resume_from
    total_samples = replace(data_run, block_ranges=((first_block, last_block),)).samples_done
    observed_targets = {tensor: target for tensor, target in targets.items() if tensor not in unobservable}
    budget = observation_budget(
        max_memory, [0 if target.axis is not None else target.bits for target in observed_targets.values()]
    )
    accumulators = {tensor: SketchAccumulator(target.axis, target.bits) for tensor, target in observed_targets.items()}
    collector = _SketchCollector(accumulators, should_stop)
    finished_ranges: list[tuple[int, int]] = []
    samples_before = stats.samples
    feeds = block_feeds(
        dataset, block_ranges if observed_targets else (), footprint.block_size, join_samples=runner.batch_independent
    )
    samples_per_run = footprint.block_size if runner.batch_independent else 1
    max_elements = (
        None if footprint.elements_per_sample is None else 2 * footprint.elements_per_sample * samples_per_run
    )  # some models have more than one says
    if progress is not None:
        progress(samples_before, total_samples)
    with ThreadPoolExecutor(MAX_CONCURRENT_RUNS) as pool:
        on_result = partial(collector.collect, pool)
        observations = observe_feeds(
            runner,
            tuple(observed_targets),
            feeds,
            on_result,
            max_elements=max_elements,
            budget=budget,
            max_concurrent_runs=MAX_CONCURRENT_RUNS,
        )
        with closing(observations):
            for _ in observations:
                stopped = collector.stopped  # before what is closed is looked at, which grows no more then
                while collector.closed_blocks:
                    block = collector.closed_blocks.popleft()
                    dataset.raise_read_errors()
                    finished_ranges = _append_finished_block(finished_ranges, block)
                    if progress is not None:
                        progress(
                            samples_before + replace(data_run, block_ranges=tuple(finished_ranges)).samples_done,
                            total_samples,
                        )
                if stopped:
                    break
        sketches = dict(zip(accumulators, pool.map(SketchAccumulator.to_sketch, accumulators.values()), strict=True))
    reached_sketches = {tensor: sketch for tensor, sketch in sketches.items() if sketch.count or sketch.empty_arrays}
    new_run = replace(
        data_run,
        data_digest=dataset.final_digest(),
        block_ranges=tuple(finished_ranges if observed_targets else block_ranges),
    )
    stats = replace(stats, runs=tuple(replace(known_run, data_digest=new_run.data_digest) for known_run in stats.runs))
    return combine_stats([stats, replace(stats, sketches=reached_sketches, runs=(new_run,))])


def _remaining_block_ranges(
    fresh: Stats, resume_from: Stats, first_block: int, last_block: int
) -> list[tuple[int, int]]:
    """The blocks from `first_block` to `last_block` that an earlier call for the same left out."""
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


def _append_finished_block(ranges: list[tuple[int, int]], block: int) -> list[tuple[int, int]]:
    """The ranges `ranges` and a block behind all of them."""
    if ranges and ranges[-1][1] == block:
        return [*ranges[:-1], (ranges[-1][0], block + 1)]
    return [*ranges, (block, block + 1)]


class _SketchCollector:
    """What is kept of the tensors, block by block.

    Attributes:
        closed_blocks: Blocks that all is kept of and that nobody has counted yet.
        stopped: Whether no more is to be kept, since the last of these.
    """

    def __init__(
        self, accumulators: Mapping[TensorRef, SketchAccumulator], should_stop: Callable[[], bool] | None
    ) -> None:
        self._accumulators, self._should_stop = accumulators, should_stop
        self.closed_blocks: deque[int] = deque()
        self.stopped = False

    def collect(self, pool: Executor, observation: dict[TensorRef, list[Array]], block: int | None) -> None:
        """Keeps of the values what is wanted of them, and closes the block that they are the last of, if any."""
        if self.stopped:
            return  # runs that began before
        while observation:  # what was kept of is let go at once, for another run takes that memory meanwhile
            tensor_group = [observation.popitem() for _ in range(min(TENSORS_PER_TASK, len(observation)))]
            _fill_accumulators(pool, [(self._accumulators[tensor], values) for tensor, values in tensor_group])
            del tensor_group
        if block is None:
            return
        for accumulator in self._accumulators.values():
            accumulator.close_block()
        self.closed_blocks.append(block)
        self.stopped = self._should_stop is not None and self._should_stop()


def _fill_accumulators(pool: Executor, tasks: list[tuple[SketchAccumulator, list[Array]]]) -> None:
    """Adds values to their accumulators, on some threads, each of which has its own; others run the model meanwhile."""
    own_group, *background_groups = (tasks[start::FILL_THREADS] for start in range(FILL_THREADS))
    futures = [pool.submit(add_all, task_group) for task_group in background_groups]
    add_all(own_group)
    for future in futures:
        future.result()

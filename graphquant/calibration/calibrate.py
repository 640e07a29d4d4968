"""Run data through a model in blocks of samples, and fill one sketch for each target.

Blocks are numbered over all samples of the data. Their size depends on the model and on the first samples of the data,
so statistics do not depend on the machine or shard that ran a block.

With enough memory, several runs are in progress at once, each on its own thread. This is faster than one run on several
threads, and a run gives the same bits on any machine. With little memory, each feed is run several times, once for each
group of tensors.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from graphquant.calibration.stats import DataRun, Stats, combine_stats, uncovered_ranges
from graphquant.errors import DataError, ModelError
from graphquant.ir import LOOP_KINDS, Model, Op, Output, TensorRef
from graphquant.observers import SketchAccumulator, add_all

if TYPE_CHECKING:
    from graphquant.calibration.data import Dataset
    from graphquant.calibration.targets import ObservationTarget
    from graphquant.formats import Feeds, Runner
    from graphquant.numerics import Array

    Observation = dict[TensorRef, list[Array]]

Item = TypeVar("Item")

DEFAULT_BLOCK_SIZE = 8  # samples per block if samples are run one by one, or if the sizes of activations are unknown
MAX_BATCH_SIZE = 32  # Maximum samples per batch. Larger batches make no model faster.
MAX_BATCH_ELEMENTS = 1 << 24  # maximum elements of all activations of a batch: 64 MB of float32
MAX_CONCURRENT_RUNS = min(4, os.cpu_count() or 1)  # maximum number of concurrent runs

FILL_THREADS = max(MAX_CONCURRENT_RUNS // 2, 1)
"""Number of threads that fill sketches, each for different tensors. A run takes longer than filling."""

TENSORS_PER_TASK = 8  # number of tensors whose values are added to sketches in one task
BYTES_PER_ELEMENT = 4  # of most activations and weights

GROUPED_ELEMENT_BYTES = 8
"""Bytes per element while one group of tensors is observed: the value itself and the temporaries of its sketch."""

CONCURRENT_ELEMENT_BYTES = 16
"""Bytes per element while all tensors are observed in one run. ONNX Runtime keeps them until the run ends, some also in
the blocked layout that its convolutions prefer.
"""

REPEATED_KINDS = LOOP_KINDS | {"enter"}
"""Kinds of ops whose bodies run more than once, so that static shapes do not give the number of elements."""

HISTOGRAM_BYTES = {0: 0, 7: 64 << 10, 10: 512 << 10}
"""Typical bytes of a histogram by its number of mantissa bits. It stays in memory until calibration ends."""


# -- memory ----------------------------------------------------------------------------------------


def available_memory() -> int:
    """Return the free memory in bytes, limited by the control group of the container."""
    import psutil

    bounds = [psutil.virtual_memory().available]
    # psutil reports the memory of the machine, not of the container. "max" is no number: there is no limit.
    with suppress(OSError, ValueError):
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        bounds.append(limit - used)
    return max(min(bounds), 0)


def observation_budget(budget: int | None, histogram_bits: Iterable[int]) -> int:
    """Return the bytes for the observed values of one run, from those for all of calibration (None: half of the free).

    `histogram_bits` are the mantissa bits of the histograms to fill.
    """
    budget = available_memory() // 2 if budget is None else budget
    return max(budget - sum(HISTOGRAM_BYTES[mantissa_bits] for mantissa_bits in histogram_bits), 1)


def concurrent_run_count(elements: int, budget: int, max_runs: int) -> int:
    """Return the number of runs, from 1 to `max_runs`, that fit into `budget` bytes at the same time."""
    return max(min(budget // max(elements * CONCURRENT_ELEMENT_BYTES, 1), max_runs), 1)


def group_observed_tensors(
    runner: Runner, tensors: Sequence[TensorRef], feed: Feeds, max_elements: int | None, budget: int
) -> tuple[list[tuple[TensorRef, ...]], int]:
    """Return groups of tensors whose values fit into `budget` bytes, and an upper bound of the elements of all.

    The elements are counted in a run of `feed` if `max_elements` is None or too much for one group. A tensor that does
    not fit forms its own group.
    """
    if max_elements is not None and max_elements * CONCURRENT_ELEMENT_BYTES <= budget:
        return [tuple(tensors)], max_elements
    element_counts = runner.element_counts(tensors, feed)
    max_elements = sum(element_counts.values())
    if max_elements * CONCURRENT_ELEMENT_BYTES <= budget:
        return [tuple(tensors)], max_elements
    # One tensor is computed, in both layouts, while a group is in memory. Groups of similar size have the lowest peak.
    budget = max(budget - max(element_counts.values()) * GROUPED_ELEMENT_BYTES, 1)
    total_bytes = max_elements * GROUPED_ELEMENT_BYTES
    target_bytes = total_bytes / max(math.ceil(total_bytes / budget), 2)
    groups: list[list[TensorRef]] = []
    group_bytes = 0
    for tensor, element_count in element_counts.items():
        tensor_bytes = element_count * GROUPED_ELEMENT_BYTES
        if not groups or (tensor_bytes and (group_bytes >= target_bytes or group_bytes + tensor_bytes > budget)):
            groups.append([])
            group_bytes = 0
        groups[-1].append(tensor)
        group_bytes += tensor_bytes
    return [tuple(group) for group in groups], max_elements


# -- runs ------------------------------------------------------------------------------------------


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
) -> Generator[None, None, None]:
    """Pass the values of `tensors` in each run to `on_result`, and yield once after each run.

    Each feed comes with the index of the block that it completes, or None, which `on_result` also gets. It is called in
    order, on any thread. Values that it leaves in the dictionary stay in memory longer than needed. `max_elements` is
    an upper bound of the elements of all tensors in one run, None to measure it; `budget` bytes may hold values.
    """
    first = next(feeds, None)
    if first is None:
        return
    groups, max_elements = group_observed_tensors(runner, tensors, first[0], max_elements, budget)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFootprint:
    """Samples in a block, which may run as one batch, and elements of all float activations per sample, if known."""

    block_size: int
    elements_per_sample: int | None
    join_samples: bool = False


class ResumeError(DataError):
    """The statistics to resume from belong to another calibration or are complete."""

    def __init__(self, reason: str, path: str = "") -> None:
        """Create the error. `reason` describes the statistics; `path` is their file, if known."""
        super().__init__(
            f"Statistics already exist{f' in {path}' if path else ''}, and they are {reason}. Use another output,"
            " or replace them with --force."
        )
        self.reason = reason


def estimate_footprint(model: Model, *, batch_independent: bool) -> RunFootprint:
    """Estimate the block size and memory footprint of `model`."""
    live_ops = [(graph, op) for graph in map(model.graphs.__getitem__, model.reachable_graphs()) for op in graph.ops()]
    element_counts = [
        size for graph, op in live_ops for size in _output_element_counts(op, graph.consumers_by_port(op.name))
    ]
    repeated = any(op.kind in REPEATED_KINDS for _, op in live_ops)
    total_elements = None if None in element_counts or repeated else sum(size or 0 for size in element_counts)
    block_size = DEFAULT_BLOCK_SIZE
    if batch_independent and total_elements is not None:
        block_size = max(min(MAX_BATCH_SIZE, 1 << (MAX_BATCH_ELEMENTS // max(total_elements, 1)).bit_length() >> 1), 1)
    return RunFootprint(block_size=block_size, elements_per_sample=total_elements, join_samples=batch_independent)


def _output_element_counts(op: Op, read_ports: Container[int]) -> list[int | None]:
    """Return the elements per sample of the outputs `read_ports`. A first axis of unknown size counts samples."""
    element_counts: list[int | None] = []
    for port, output in enumerate(op.outputs):
        if port not in read_ports or op.kind in {"constant", "variable", "output"}:
            continue
        size = _element_count(output)
        element_counts.append(size if output.dtype is None or "float" in output.dtype else 0)
    return element_counts


def _element_count(output: Output) -> int | None:
    """Return the elements per sample of an output, None if an axis other than the first has an unknown size."""
    if output.shape is None or None in output.shape[1:]:
        return None
    return ((output.shape[0] if output.shape else None) or 1) * math.prod(size or 0 for size in output.shape[1:])


MAX_TENSOR_BYTES = 1 << 28
"""Maximum bytes of a tensor that is `MAX_GROWTH` times as large as all weights and inputs of its model."""

MAX_GROWTH = 1000


def refuse_growth(model: Model, max_memory: int | None = None) -> None:
    """Refuse a small model whose tensors would fill memory, such as one that doubles a tensor again and again.

    `max_memory` raises the limit of a tensor. Sizes that depend on the data are not known. Raises a ModelError if a
    tensor is too large.
    """
    sizes: dict[TensorRef, int] = {}
    stored = 0
    for name in model.reachable_graphs():
        for op in model.graphs[name].ops():
            for port, output in enumerate(op.outputs):
                size = BYTES_PER_ELEMENT * (_element_count(output) or 0)
                sizes[TensorRef(name, op.name, port)] = size
                stored += size if op.kind in {"constant", "variable", "input"} else 0
    tensor, largest = max(sizes.items(), key=itemgetter(1), default=(None, 0))
    if largest > max(MAX_TENSOR_BYTES, MAX_GROWTH * stored, max_memory or 0):
        raise ModelError(
            f"The tensor {tensor} of {model.path or 'the model'} has {largest >> 20:,} MiB, and all weights and inputs"
            f" have {-(-stored >> 10):,} KiB. If the model is trusted, raise the limit: --max-memory"
            f" {-(-largest >> 20)}MiB"
        )


def collect_stats(
    targets: Mapping[TensorRef, ObservationTarget],
    runner: Runner,
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
    """Run the data through the model and collect the statistics of `targets`.

    Args:
        targets: The tensors to observe, with the details to collect.
        runner: Runs the model that contains them.
        dataset: The data.
        model_digest: Digest of the source model.
        footprint: Block size and memory footprint of the model.
        shard: (index, number of shards), counted from 1. A shard consists of whole blocks.
        max_memory: Bytes that calibration may use in addition to the plain runs; half of the free memory by default. If
            the observed values of one run need more, tensors are observed in several passes. The largest tensor and one
            histogram per tensor are always allocated.
        resume_from: Statistics of an interrupted call with the same arguments; their blocks are not run again.
        should_stop: Called after each block; return True to end with the blocks finished so far.
        progress: Called before the first block and after each block with the finished and total samples of the shard.

    Raises:
        ResumeError: `resume_from` belongs to another calibration or is complete.
        DataError: A sample is invalid.
    """
    unobservable = runner.unobservable(tuple(targets))
    data_run = DataRun(
        # Without earlier statistics, the digest is needed only at the end.
        data_digest="" if resume_from is None else dataset.final_digest(),
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
    finished: list[tuple[int, int]] = []
    samples_before = stats.samples
    feeds = block_feeds(
        dataset, block_ranges if observed_targets else (), footprint.block_size, join_samples=footprint.join_samples
    )
    max_elements = footprint.elements_per_sample
    if max_elements is not None:  # static shapes are too small for some models
        max_elements *= 2 * (footprint.block_size if footprint.join_samples else 1)
    if progress is not None:
        progress(samples_before, total_samples)
    with ThreadPoolExecutor(MAX_CONCURRENT_RUNS) as pool:
        observations = observe_feeds(
            runner,
            tuple(observed_targets),
            feeds,
            partial(collector.collect, pool),
            max_elements=max_elements,
            budget=budget,
            max_concurrent_runs=MAX_CONCURRENT_RUNS,
        )
        with closing(observations):
            for _ in observations:
                stopped = collector.stopped  # read first: once it is set, no more blocks are closed
                while collector.closed_blocks:
                    block = collector.closed_blocks.popleft()
                    dataset.raise_read_errors()
                    if finished and finished[-1][1] == block:
                        finished[-1] = (finished[-1][0], block + 1)
                    else:
                        finished.append((block, block + 1))
                    if progress is not None:
                        samples_done = replace(data_run, block_ranges=tuple(finished)).samples_done
                        progress(samples_before + samples_done, total_samples)
                if stopped:
                    break
        sketches = dict(zip(accumulators, pool.map(SketchAccumulator.to_sketch, accumulators.values()), strict=True))
    reached_sketches = {tensor: sketch for tensor, sketch in sketches.items() if sketch.count or sketch.empty_arrays}
    digest, new_ranges = dataset.final_digest(), tuple(finished if observed_targets else block_ranges)
    stats = replace(stats, runs=tuple(replace(known_run, data_digest=digest) for known_run in stats.runs))
    new_run = replace(data_run, data_digest=digest, block_ranges=new_ranges)
    return combine_stats([stats, replace(stats, sketches=reached_sketches, runs=(new_run,))])


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

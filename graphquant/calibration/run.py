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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

from graphquant.calibration.memory import fits, grouped, room
from graphquant.calibration.stats import Run, Stats, merge, spans
from graphquant.errors import DataError
from graphquant.sketch import Accumulator

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from graphquant.calibration.targets import Target
    from graphquant.data import Batches
    from graphquant.ir import Model, Op, TensorRef
    from graphquant.numerics import Array

    Feeds = Mapping[str, Array]
    Seen = Mapping[TensorRef, list[Array]]

ALONE = 8
"""Samples in a block where samples are run one by one, or where the sizes of activations are not known."""

LARGEST_BATCH = 32
"""Samples in the largest batch: more makes no model faster."""

BATCH_ELEMENTS = 1 << 24
"""Elements that all activations of a batch may have together: 64 MB of float32."""

REPEATED = frozenset({"loop", "scan", "while", "enter"})
"""Kinds around ops that run more than once, so that static shapes do not tell how much they make."""

THREADS = min(4, os.cpu_count() or 1)
"""Threads that fill sketches, each of another tensor."""


class Observing(Protocol):
    """Runs a model and shows what its tensors hold."""

    @property
    def batchable(self) -> bool:
        """Whether samples may be joined along axis 0 of every input and each result is still that of its sample."""

    def unwatchable(self, tensors: Sequence[TensorRef]) -> dict[TensorRef, str]:
        """Those of `tensors` that cannot be observed, with the reason."""

    def sizes(self, tensors: Sequence[TensorRef], feed: Feeds) -> dict[TensorRef, int]:
        """How many elements each tensor has in one run of `feed`, over all iterations; 0 if it is not reached."""

    def observe(
        self, tensors: Sequence[TensorRef], feeds: Iterable[Feeds], *, beside: Sequence[TensorRef] = ()
    ) -> Iterator[dict[TensorRef, list[Array]]]:
        """For each feed the values that each tensor took; a feed is read only when its values are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What running a model takes, known from the model alone.

    Attributes:
        block: Samples in a block.
        elements: Elements that all its float activations have together for one sample, None if that is not known.
    """

    block: int
    elements: int | None


def load_of(model: Model, *, batchable: bool) -> Load:
    """What running `model` takes."""
    live = [op for name in model.live() for op in model.graphs[name].ops()]
    sizes = [size for op in live for size in _elements(op)]
    known = None if None in sizes or any(op.kind in REPEATED for op in live) else sum(size or 0 for size in sizes)
    block = ALONE
    if batchable and known is not None:
        block = max(min(LARGEST_BATCH, 1 << (BATCH_ELEMENTS // max(known, 1)).bit_length() >> 1), 1)
    return Load(block=block, elements=known)


def _elements(op: Op) -> list[int | None]:
    """The size of each output of an op for one sample; its first axis, if it has no size of its own, counts samples."""
    if op.kind in {"constant", "variable", "output"}:
        return []
    found: list[int | None] = []
    for output in op.outputs:
        sizes = output.shape if output.shape is None else output.shape[1:]
        first = output.shape[0] or 1 if output.shape else 1
        known = None if sizes is None or None in sizes else first * math.prod(size or 0 for size in sizes)
        found.append(known if output.dtype is None or "float" in output.dtype else 0)
    return found


def calibrate(
    targets: Mapping[TensorRef, Target],
    runner: Observing,
    batches: Batches,
    *,
    model: str,
    load: Load,
    shard: tuple[int, int] = (1, 1),
    max_memory: int | None = None,
    before: Stats | None = None,
    stop: Callable[[], bool] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Stats:
    """Runs the data through the model and collects the statistics of `targets`.

    Args:
        targets: The tensors, and what to keep of them.
        runner: Runs the model that has them.
        batches: The data.
        model: Digest of the source model.
        load: What running the model takes.
        shard: Which of how many parts of the data to run, counted from 1. A part is whole blocks.
        max_memory: Bytes that calibration may take beside the plain runs, by default half of what is free. Where the
            observed values of one run would take more, tensors are observed in several passes. What no pass can do
            without is taken all the same: the largest tensor, and a histogram for each.
        before: What an earlier, interrupted call for the same found; its blocks are not run again.
        stop: Asked after each block whether to end with what there is.
        progress: Called after each block with the samples of the shard that are done, and how many it has.

    Raises:
        DataError: `before` is of something else, or complete.
    """
    unwatchable = runner.unwatchable(tuple(targets))
    run = Run(data=batches.digest, samples=batches.count, block=load.block, done=(), random=batches.random)
    first, last = (run.blocks * part // shard[1] for part in (shard[0] - 1, shard[0]))
    found = Stats(model=model, targets=targets, sketches={}, runs=(run,), unwatchable=unwatchable)
    todo = [(first, last)]
    if before is not None:
        todo = _left(found, before, first, last)
        found = before
    total = replace(run, done=((first, last),)).samples_done
    watched = {tensor: target for tensor, target in targets.items() if tensor not in unwatchable}
    space = room(max_memory, [0 if target.axis is not None else target.bits for target in watched.values()])
    kept = {tensor: Accumulator(target.axis, target.bits) for tensor, target in watched.items()}
    done: list[tuple[int, int]] = []
    already = found.samples
    with ThreadPoolExecutor(THREADS) as pool, _Passes(runner, tuple(watched), load, space) as passes:
        for index, feeds in _blocks(batches, todo, load.block) if watched else ():
            for seen in passes.observe(feeds):
                for _ in pool.map(lambda item: _add(kept[item[0]], item[1]), seen.items()):
                    pass
            for accumulator in kept.values():
                accumulator.close_block()
            done = (
                [*done[:-1], (done[-1][0], index + 1)] if done and done[-1][1] == index else [*done, (index, index + 1)]
            )
            if progress is not None:
                progress(already + replace(run, done=tuple(done)).samples_done, total)
            if stop is not None and stop():
                break
    sketches = {tensor: accumulator.sketch() for tensor, accumulator in kept.items()}
    reached = {tensor: sketch for tensor, sketch in sketches.items() if sketch.count}
    fresh = replace(run, done=tuple(done if watched else todo))
    return merge([found, replace(found, sketches=reached, runs=(fresh,))])


def _left(now: Stats, before: Stats, first: int, last: int) -> list[tuple[int, int]]:
    """The blocks from `first` to `last` that an earlier call for the same left out."""
    run, earlier = now.runs[0], before.runs[0] if len(before.runs) == 1 else None
    same = (now.model, dict(now.targets)) == (before.model, dict(before.targets))
    if earlier is None or not same or replace(earlier, done=()) != run:
        raise _no_continuation("of another model, other tensors or other data")
    if any(start < first or stop > last for start, stop in earlier.done):
        raise _no_continuation("of another shard")
    left = spans(earlier.done, first, last)
    if not left:
        raise _no_continuation("complete")
    return left


def _no_continuation(what: str) -> DataError:
    return DataError(
        f"There are statistics already, and they are {what}. Give another output, or --force to replace them."
    )


def _blocks(batches: Batches, todo: Sequence[tuple[int, int]], size: int) -> Iterator[tuple[int, list[Feeds]]]:
    """Each block of the ranges `todo`, with its number."""
    for start, stop in todo:
        feeds = batches.span(start * size, stop * size)
        for index in range(start, stop):
            yield index, list(itertools.islice(feeds, size))


def _add(accumulator: Accumulator, values: Iterable[Array]) -> None:
    for value in values:
        accumulator.add(value)


class _Passes:
    """The passes over each block: all tensors in one if their values fit into memory, else a group in each."""

    def __init__(self, runner: Observing, tensors: Sequence[TensorRef], load: Load, space: int) -> None:
        self._runner = runner
        self._tensors = tensors
        self._load = load
        self._space = space
        self._passes: list[tuple[deque[Feeds], Generator[Seen, None, None]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for _feeds, values in self._passes:
            values.close()

    def observe(self, block: Sequence[Feeds]) -> Iterator[Seen]:
        """What is seen while a block is run, as one batch where the model and the samples allow it."""
        joined = _joined(block) if self._runner.batchable else None
        for feed in block if joined is None else (joined,):
            if not self._passes:
                self._passes = [self._start(group) for group in self._groups(feed)]
            for feeds, values in self._passes:
                feeds.append(feed)
                yield next(values)

    def _start(self, group: tuple[TensorRef, ...]) -> tuple[deque[Feeds], Generator[Seen, None, None]]:
        feeds: deque[Feeds] = deque()
        members = set(group)
        beside = tuple(tensor for tensor in self._tensors if tensor not in members)
        more = {"beside": beside} if beside else {}

        def values() -> Generator[Seen, None, None]:
            yield from self._runner.observe(group, iter(feeds.popleft, None), **more)

        return feeds, values()

    def _groups(self, feed: Feeds) -> list[tuple[TensorRef, ...]]:
        elements = self._load.elements
        if elements is not None and fits(2 * elements * self._load.block, self._space):
            return [tuple(self._tensors)]
        return grouped(self._runner.sizes(self._tensors, feed), self._space)


def _joined(block: Sequence[Feeds]) -> Feeds | None:
    """The samples as one feed; None where their shapes differ."""
    if len(block) == 1:
        return block[0]
    first = {name: (np.shape(value), np.asarray(value).dtype) for name, value in block[0].items()}
    if any(not shape for shape, _ in first.values()):
        return None
    for feed in block:
        if {name: (np.shape(value), np.asarray(value).dtype) for name, value in feed.items()} != first:
            return None
    return {name: np.concatenate([feed[name] for feed in block]) for name in first}

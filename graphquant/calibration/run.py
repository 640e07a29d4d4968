"""Runs data through a model in blocks of samples, and fills a sketch for each target.

Blocks are counted over all samples of the data and have a size that follows from the model alone, so that statistics do
not depend on which of them were run where.
"""

from __future__ import annotations

import math
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from graphquant.calibration.memory import room
from graphquant.calibration.passes import feeds_of, observed
from graphquant.calibration.stats import Run, Stats, merge, spans
from graphquant.errors import DataError
from graphquant.sketch import Accumulator, add_each

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping
    from concurrent.futures import Executor

    from graphquant.calibration.passes import Observing
    from graphquant.calibration.targets import Target
    from graphquant.data import Batches
    from graphquant.ir import Model, Op, TensorRef
    from graphquant.numerics import Array

ALONE = 8
"""Samples in a block where samples are run one by one, or where the sizes of activations are not known."""

LARGEST_BATCH = 32
"""Samples in the largest batch: more makes no model faster."""

BATCH_ELEMENTS = 1 << 24
"""Elements that all activations of a batch may have together: 64 MB of float32."""

REPEATED = frozenset({"loop", "scan", "while", "enter"})
"""Kinds around ops that run more than once, so that static shapes do not tell how much they make."""

THREADS = min(4, os.cpu_count() or 1)
"""Runs at once."""

FILLING = max(THREADS // 2, 1)
"""Threads that fill sketches, each of other tensors. A run takes longer than that."""


TOGETHER = 8
"""Tensors whose values are counted in one go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What running a model takes, known from the model alone.

    Attributes:
        block: Samples in a block.
        elements: Elements that all its float activations have together for one sample, None if that is not known.
    """

    block: int
    elements: int | None


class NoContinuationError(DataError):
    """The statistics to go on from are of something else, or complete."""

    def __init__(self, what: str, where: str = "") -> None:
        """`what` says what they are, `where` the file that holds them, where that is known."""
        super().__init__(
            f"There are statistics already{f' in {where}' if where else ''}, and they are {what}. Give another output,"
            " or --force to replace them."
        )
        self.what = what


def load_of(model: Model, *, batchable: bool) -> Load:
    """What running `model` takes."""
    live = [(graph, op) for graph in map(model.graphs.__getitem__, model.live()) for op in graph.ops()]
    sizes = [size for graph, op in live for size in _elements(op, graph.readers(op.name))]
    repeated = any(op.kind in REPEATED for _, op in live)
    known = None if None in sizes or repeated else sum(size or 0 for size in sizes)
    block = ALONE
    if batchable and known is not None:
        block = max(min(LARGEST_BATCH, 1 << (BATCH_ELEMENTS // max(known, 1)).bit_length() >> 1), 1)
    return Load(block=block, elements=known)


def _elements(op: Op, read: Container[int]) -> list[int | None]:
    """The sizes of the outputs `read` of an op for one sample; a first axis without a size counts samples."""
    if op.kind in {"constant", "variable", "output"}:
        return []
    found: list[int | None] = []
    for port, output in enumerate(op.outputs):
        if port not in read:
            continue
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
        progress: Called before the first block and after each with the samples of the shard that are done, and how many
            it has.

    Raises:
        NoContinuationError: `before` is of something else, or complete.
        DataError: A sample is not what it should be.
    """
    unwatchable = runner.unwatchable(tuple(targets))
    content = "" if before is None else batches.content()  # else it is known by the end
    run = Run(data=content, samples=batches.count, block=load.block, done=(), random=batches.random)
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
    gathering = _Gathering(kept, stop)
    done: list[tuple[int, int]] = []
    already = found.samples
    feeds = feeds_of(batches, todo if watched else (), load.block, batchable=runner.batchable)
    samples = load.block if runner.batchable else 1
    elements = None if load.elements is None else 2 * load.elements * samples  # some models have more than one says
    if progress is not None:
        progress(already, total)
    with ThreadPoolExecutor(THREADS) as pool:
        look = partial(gathering.take, pool)
        passes = observed(runner, tuple(watched), feeds, look, elements=elements, space=space, threads=THREADS)
        with closing(passes):
            for _ in passes:
                ended = gathering.stopped  # before what is closed is looked at, which grows no more then
                while gathering.closed:
                    block = gathering.closed.popleft()
                    batches.check()
                    done = _longer(done, block)
                    if progress is not None:
                        progress(already + replace(run, done=tuple(done)).samples_done, total)
                if ended:
                    break
        sketches = dict(zip(kept, pool.map(Accumulator.sketch, kept.values()), strict=True))
    reached = {tensor: sketch for tensor, sketch in sketches.items() if sketch.count or sketch.blank}
    fresh = replace(run, data=batches.content(), done=tuple(done if watched else todo))
    found = replace(found, runs=tuple(replace(each, data=fresh.data) for each in found.runs))
    return merge([found, replace(found, sketches=reached, runs=(fresh,))])


def _left(now: Stats, before: Stats, first: int, last: int) -> list[tuple[int, int]]:
    """The blocks from `first` to `last` that an earlier call for the same left out."""
    run, earlier = now.runs[0], before.runs[0] if len(before.runs) == 1 else None
    same = (now.model, dict(now.targets)) == (before.model, dict(before.targets))
    if earlier is None or not same or replace(earlier, done=()) != run:
        raise NoContinuationError("of another model, other tensors or other data")
    if any(start < first or stop > last for start, stop in earlier.done):
        raise NoContinuationError("of another shard")
    left = spans(earlier.done, first, last)
    if not left:
        raise NoContinuationError("complete")
    return left


def _longer(done: list[tuple[int, int]], block: int) -> list[tuple[int, int]]:
    """The ranges `done` and a block behind all of them."""
    if done and done[-1][1] == block:
        return [*done[:-1], (done[-1][0], block + 1)]
    return [*done, (block, block + 1)]


class _Gathering:
    """What is kept of the tensors, block by block.

    Attributes:
        closed: Blocks that all is kept of and that nobody has counted yet.
        stopped: Whether no more is to be kept, since the last of these.
    """

    def __init__(self, kept: Mapping[TensorRef, Accumulator], stop: Callable[[], bool] | None) -> None:
        self._kept, self._stop = kept, stop
        self.closed: deque[int] = deque()
        self.stopped = False

    def take(self, pool: Executor, seen: dict[TensorRef, list[Array]], block: int | None) -> None:
        """Keeps of the values what is wanted of them, and closes the block that they are the last of, if any."""
        if self.stopped:
            return  # runs that began before
        while seen:  # what was kept of is let go at once, for another run takes that memory meanwhile
            part = [seen.popitem() for _ in range(min(TOGETHER, len(seen)))]
            _fill(pool, [(self._kept[tensor], values) for tensor, values in part])
            del part
        if block is None:
            return
        for accumulator in self._kept.values():
            accumulator.close_block()
        self.closed.append(block)
        self.stopped = self._stop is not None and self._stop()


def _fill(pool: Executor, work: list[tuple[Accumulator, list[Array]]]) -> None:
    """Adds values to their accumulators, on some threads, each of which has its own; others run the model meanwhile."""
    first, *parts = (work[start::FILLING] for start in range(FILLING))
    others = [pool.submit(add_each, part) for part in parts]
    add_each(first)
    for other in others:
        other.result()

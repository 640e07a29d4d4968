"""Runs data through a model and shows what its tensors hold, in the memory that there is.

Where there is enough, several runs are under way at once, each on a thread of its own. That takes less time than one
run on several threads, and on any machine a run gives the same bits. Where there is little, each feed is run several
times, for a group of tensors each.
"""

from __future__ import annotations

import itertools
from collections import deque
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from graphquant.calibration.memory import at_once, fits, grouped

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from graphquant.data import Batches
    from graphquant.ir import TensorRef
    from graphquant.numerics import Array

    Feeds = Mapping[str, Array]
    Seen = dict[TensorRef, list[Array]]

Item = TypeVar("Item")


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
        self,
        tensors: Sequence[TensorRef],
        feeds: Iterable[Feeds],
        *,
        beside: Sequence[TensorRef] = (),
        at_once: int = 1,
        look: Callable[[Seen], object] | None = None,
    ) -> Generator[Seen, None, None]:
        """For each feed the values that each tensor took; those of up to `at_once` feeds are there or under way.

        `look` is shown them in order, on whatever thread.
        """


def feeds_of(
    batches: Batches, todo: Sequence[tuple[int, int]], size: int, *, batchable: bool
) -> Iterator[tuple[Feeds, int | None]]:
    """What to run for the blocks of the ranges `todo`: one batch each where the model and the samples allow it.

    With each comes the number of the block that it ends, None if more of its block follows.
    """
    for start, stop in todo:
        samples = batches.span(start * size, stop * size)
        for index in range(start, stop):
            block = itertools.islice(samples, size)
            ahead, feed = _batched(block) if batchable else block, None
            for following in ahead:
                if feed is not None:
                    yield feed, None
                feed = following
            if feed is not None:
                yield feed, index


def observed(
    runner: Observing,
    tensors: Sequence[TensorRef],
    feeds: Iterator[tuple[Feeds, int | None]],
    look: Callable[[Seen, int | None], object],
    *,
    elements: int | None,
    space: int,
    threads: int,
) -> Generator[None, None, None]:
    """Shows what is seen of `tensors` in each run; comes back after each.

    Args:
        runner: Runs the model.
        tensors: What to observe.
        feeds: What to run, with the number of the block that each ends.
        look: Is shown what is seen, in order, on whatever thread, and the number of the block that this ends, if it
            ends one; values that it leaves there are kept for longer than they need be.
        elements: The most that all tensors may have together in one run, None if that is to be measured.
        space: Bytes for observed values.
        threads: How many runs there may be at once.
    """
    first = next(feeds, None)
    if first is None:
        return
    if elements is None or not fits(elements, space):
        sizes = runner.sizes(tensors, first[0])
        elements, groups = sum(sizes.values()), grouped(sizes, space)
    else:
        groups = [tuple(tensors)]
    fed = copies(itertools.chain([first], feeds), 2 * len(groups))
    del first
    with ExitStack() as stack:
        passes = []
        for number, group in enumerate(groups):
            members, runs, ends = set(group), fed.pop(), (block for _, block in fed.pop())
            blocks = ends if number == len(groups) - 1 else map(_no_end, ends)
            values = runner.observe(
                group,
                (feed for feed, _ in runs),
                beside=tuple(tensor for tensor in tensors if tensor not in members),
                at_once=at_once(elements, space, threads) if len(groups) == 1 else 1,
                look=partial(_with_block, look, blocks),
            )
            passes.append(stack.enter_context(closing(values)))
        while True:
            for values in passes:
                if next(values, None) is None:
                    return
                yield


def _with_block(look: Callable[[Seen, int | None], object], blocks: Iterator[int | None], seen: Seen) -> None:
    look(seen, next(blocks))


def _no_end(_block: int | None) -> None:
    return None


def copies(items: Iterator[Item], number: int) -> list[Generator[Item, None, None]]:
    """Iterators that each give all items; unlike `itertools.tee`, they keep none that all have given.

    One that is not read to its end is to be closed once it was begun: items are not kept for it then.
    """
    waiting: dict[int, deque[Item]] = {place: deque() for place in range(number)}

    def copy(place: int) -> Generator[Item, None, None]:
        mine = waiting[place]
        try:
            while True:
                if not mine:
                    for item in itertools.islice(items, 1):
                        for each in tuple(waiting.values()):
                            each.append(item)
                if not mine:
                    return
                yield mine.popleft()
        finally:
            del waiting[place]

    return [copy(place) for place in range(number)]


def _batched(block: Iterator[Feeds]) -> Iterator[Feeds]:
    """The samples as one feed where they can be joined, else as they are."""
    samples = list(block)
    joined = _joined(samples)
    return iter(samples if joined is None else [joined])


def _joined(block: Sequence[Feeds]) -> Feeds | None:
    """The samples as one feed; None where their shapes differ, or inputs have different numbers of rows."""
    if len(block) == 1:
        return block[0]
    first = {name: (np.shape(value), np.asarray(value).dtype) for name, value in block[0].items()}
    if any(not shape for shape, _ in first.values()) or len({shape[0] for shape, _ in first.values()}) != 1:
        return None
    for feed in block:
        if {name: (np.shape(value), np.asarray(value).dtype) for name, value in feed.items()} != first:
            return None
    return {name: np.concatenate([feed[name] for feed in block]) for name in first}

"""What is run when, and how much of it at once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from graphquant.calibration.calibrate import block_feeds, observe_feeds, tee_items
from graphquant.calibration.data import Dataset
from graphquant.calibration.memory import concurrent_run_count
from graphquant.ir import TensorRef

A, B = TensorRef("", "a"), TensorRef("", "b")


def batches(count: int, wide: tuple[int, ...] = ()) -> Dataset:
    """Samples [1, 1] of their own number; those in `wide` are [1, 2]."""

    def feeds(start: int, stop: int):
        return ({"x": np.full((1, 1 + (i in wide)), i, np.float32)} for i in range(start, min(stop, count)))

    return Dataset(count=count, digest="d", open_feeds=feeds)


class Runner:
    """Shows what it is fed, and notes what it was asked and fed."""

    def __init__(self, size: int) -> None:
        """`size` is how many elements each tensor has."""
        self.size, self.requests, self.fed, self.open = size, [], [], 0

    def element_counts(self, tensors, feed):
        """The same for each."""
        self.fed.append(("sizes", feed))
        return dict.fromkeys(tensors, self.size)

    def observe(self, tensors, feeds, *, other_tensors=(), max_in_flight=1, on_result=None):
        """What is fed, for each tensor."""
        self.requests.append((tensors, other_tensors, max_in_flight))
        self.open += 1
        try:
            for feed in feeds:
                self.fed.append((tensors, feed))
                seen = {tensor: [feed] for tensor in tensors}
                on_result(seen)
                yield seen
        finally:
            self.open -= 1


def run(runner: Runner, count: int, **options) -> list:
    """What is seen of A and B, and which blocks end, while numbers are fed, in blocks of two."""
    feeds = ((number, number // 2 if number % 2 else None) for number in range(count))
    seen: list = []
    given = {"max_elements": None, "budget": 1 << 30, "max_concurrent_runs": 4, **options}
    for number, _ in enumerate(observe_feeds(runner, (A, B), feeds, lambda *one: seen.append(one), **given), 1):
        assert len(seen) == number
    return seen


def test_one_pass_where_all_fits() -> None:
    """Each feed is run once, its values come with the block it ends, and all threads are used."""
    runner = Runner(10)
    seen = run(runner, 4)
    assert seen == [({A: [n], B: [n]}, block) for n, block in ((0, None), (1, 0), (2, None), (3, 1))]
    assert runner.requests == [((A, B), (), 4)]
    assert runner.fed == [("sizes", 0), *(((A, B), n) for n in range(4))]
    assert runner.open == 0


def test_known_sizes_are_not_measured() -> None:
    """Where all is known to fit, no run is spent on it."""
    runner = Runner(1 << 40)
    assert len(run(runner, 2, max_elements=20)) == 2
    assert runner.fed == [((A, B), 0), ((A, B), 1)]


def test_groups_take_turns_on_each_feed() -> None:
    """In little memory a feed is run for one group after the other; the last of them ends the block; one at a time."""
    runner = Runner(100)
    seen = run(runner, 2, budget=900)
    assert seen == [({A: [0]}, None), ({B: [0]}, None), ({A: [1]}, None), ({B: [1]}, 0)]
    assert runner.requests == [((A,), (B,), 1), ((B,), (A,), 1)]


def test_nothing_to_run() -> None:
    """Without feeds the runner is asked nothing."""
    runner = Runner(1)
    assert run(runner, 0) == []
    assert (runner.requests, runner.fed) == ([], [])


def test_leaving_early_closes_what_is_open() -> None:
    """Whoever stops looking ends the passes."""
    runner = Runner(1)
    seen: list = []
    feeds = ((n, None) for n in itertools.count())
    passes = observe_feeds(
        runner, (A,), feeds, lambda *one: seen.append(one), max_elements=1, budget=1 << 30, max_concurrent_runs=2
    )
    next(passes)
    assert seen == [({A: [0]}, None)]
    assert runner.open == 1
    passes.close()
    assert runner.open == 0


@pytest.mark.parametrize(
    ("space", "runs"), [(1, 1), (16 * 100, 1), (16 * 200 - 1, 1), (16 * 200, 2), (16 * 400, 4), (1 << 40, 4)]
)
def test_memory_bounds_the_runs_at_once(space: int, runs: int) -> None:
    """There is always one run, and at most one per thread."""
    assert concurrent_run_count(100, space, 4) == runs
    assert concurrent_run_count(0, 1 << 20, 4) == 4


def test_blocks_are_joined_where_shapes_agree() -> None:
    """A block is one batch, or, where a sample differs or the model forbids it, its samples; each has its number."""

    def shape(feeds) -> list:
        return [(feed["x"].shape, block) for feed, block in feeds]

    joined = block_feeds(batches(8, (4,)), [(0, 3)], 3, join_samples=True)
    assert shape(joined) == [((3, 1), 0), ((1, 1), None), ((1, 2), None), ((1, 1), 1), ((2, 1), 2)]
    alone = block_feeds(batches(8), [(0, 1), (2, 3)], 3, join_samples=False)
    assert shape(alone) == [((1, 1), None), ((1, 1), None), ((1, 1), 0), ((1, 1), None), ((1, 1), 2)]
    assert shape(block_feeds(batches(8), [], 3, join_samples=True)) == []


def test_feeds_are_kept_no_longer_than_needed() -> None:
    """What all passes have run is let go, however far the data goes."""
    alive: set[int] = set()

    class Feed:
        def __init__(self, number: int) -> None:
            self.number = number
            alive.add(number)

        def __del__(self) -> None:
            alive.discard(self.number)

    class Forgetful(Runner):
        def observe(self, tensors, feeds, *, other_tensors=(), max_in_flight=1, on_result=None):
            for _ in feeds:
                on_result({})
                yield {}

    def forget(_seen, _block) -> None:
        """Keeps nothing."""

    most = 0
    feeds = ((Feed(n), n) for n in range(200))
    for _ in observe_feeds(Forgetful(100), (A, B), feeds, forget, max_elements=None, budget=900, max_concurrent_runs=1):
        most = max(most, len(alive))
    assert most <= 3


def test_copies_that_were_closed_keep_nothing() -> None:
    """Each copy gives all; items are kept only for those that are read on."""
    alive: set[int] = set()

    class Item:
        def __init__(self, number: int) -> None:
            self.number = number
            alive.add(number)

        def __del__(self) -> None:
            alive.discard(self.number)

    one, other = tee_items((Item(number) for number in range(100)), 2)
    assert [next(one).number for _ in range(3)] == [0, 1, 2]
    assert [next(other).number for _ in range(2)] == [0, 1]
    other.close()
    assert next(other, None) is None
    for number, item in enumerate(one, 3):
        assert item.number == number
        assert len(alive) <= 2

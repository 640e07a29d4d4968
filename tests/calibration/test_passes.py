"""Order and concurrency of the runs of a calibration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from graphquant.calibration.calibrate import block_feeds, observe_feeds, tee_items
from graphquant.calibration.data import Dataset
from graphquant.calibration.memory import concurrent_run_count
from graphquant.ir import TensorRef

A, B = TensorRef("", "a"), TensorRef("", "b")


def numbered_vectors(count: int, wide: tuple[int, ...] = ()) -> Dataset:
    """Return samples [1, 1] that contain their number; those in `wide` are [1, 2]."""

    def feeds(start: int, stop: int):
        return ({"x": np.full((1, 1 + (i in wide)), i, np.float32)} for i in range(start, min(stop, count)))

    return Dataset(count=count, digest="d", open_feeds=feeds)


class Runner:
    """Runner that returns its feeds and records its calls."""

    def __init__(self, size: int) -> None:
        """Create a runner whose tensors have `size` elements."""
        self.size, self.requests, self.fed, self.open = size, [], [], 0

    def element_counts(self, tensors, feed):
        """Return the same size for each tensor."""
        self.fed.append(("sizes", feed))
        return dict.fromkeys(tensors, self.size)

    def observe(self, tensors, feeds, *, other_tensors=(), max_in_flight=1, on_result=None):
        """Yield the feed as the value of each tensor."""
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


def observe_numbers(runner: Runner, count: int, **options) -> list:
    """Return the observed values of A and B with the completed blocks, for numbers in blocks of two."""
    feeds = ((number, number // 2 if number % 2 else None) for number in range(count))
    seen: list = []
    given = {"max_elements": None, "budget": 1 << 30, "max_concurrent_runs": 4, **options}
    for number, _ in enumerate(observe_feeds(runner, (A, B), feeds, lambda *one: seen.append(one), **given), 1):
        assert len(seen) == number
    return seen


def test_single_pass() -> None:
    """Each feed is run once with all threads, and its values come with the block that it completes."""
    runner = Runner(10)
    seen = observe_numbers(runner, 4)
    assert seen == [({A: [n], B: [n]}, block) for n, block in ((0, None), (1, 0), (2, None), (3, 1))]
    assert runner.requests == [((A, B), (), 4)]
    assert runner.fed == [("sizes", 0), *(((A, B), n) for n in range(4))]
    assert runner.open == 0


def test_known_sizes_are_not_measured() -> None:
    """If everything is known to fit, no run measures sizes."""
    runner = Runner(1 << 40)
    assert len(observe_numbers(runner, 2, max_elements=20)) == 2
    assert runner.fed == [((A, B), 0), ((A, B), 1)]


def test_groups_of_tensors() -> None:
    """With little memory, a feed is run once per group, one run at a time. The last group completes the block."""
    runner = Runner(100)
    seen = observe_numbers(runner, 2, budget=900)
    assert seen == [({A: [0]}, None), ({B: [0]}, None), ({A: [1]}, None), ({B: [1]}, 0)]
    assert runner.requests == [((A,), (B,), 1), ((B,), (A,), 1)]


def test_no_feeds() -> None:
    """Without feeds, the runner is not called."""
    runner = Runner(1)
    assert observe_numbers(runner, 0) == []
    assert (runner.requests, runner.fed) == ([], [])


def test_early_exit() -> None:
    """Closing the generator closes the passes."""
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
def test_concurrent_run_count(space: int, runs: int) -> None:
    """There is at least one run, and at most one per thread."""
    assert concurrent_run_count(100, space, 4) == runs
    assert concurrent_run_count(0, 4, 4) == 4


def test_joined_blocks() -> None:
    """A block is one batch, or its samples if shapes differ or the model is not batch independent."""

    def shape(feeds) -> list:
        return [(feed["x"].shape, block) for feed, block in feeds]

    joined = block_feeds(numbered_vectors(8, (4,)), [(0, 3)], 3, join_samples=True)
    assert shape(joined) == [((3, 1), 0), ((1, 1), None), ((1, 2), None), ((1, 1), 1), ((2, 1), 2)]
    alone = block_feeds(numbered_vectors(8), [(0, 1), (2, 3)], 3, join_samples=False)
    assert shape(alone) == [((1, 1), None), ((1, 1), None), ((1, 1), 0), ((1, 1), None), ((1, 1), 2)]
    assert shape(block_feeds(numbered_vectors(8), [], 3, join_samples=True)) == []


def test_feeds_are_released() -> None:
    """Feeds that all passes have run are released."""
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


def test_closed_iterators_release_items() -> None:
    """Each iterator yields all items. Items are stored only for open iterators."""
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

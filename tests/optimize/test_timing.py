"""How long one thing takes beside another, by a clock that is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from graphquant.optimize import measure_time_ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Machine:
    """A clock that runs move on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.runs: list[str] = []

    def clock(self) -> float:
        """What it shows."""
        return self.now

    def taking(self, name: str, times: Iterator[float]) -> Callable[[], None]:
        """A run that takes the next of `times`."""

        def run() -> None:
            self.now += next(times)
            self.runs.append(name)

        return run


def steady(seconds: float) -> Iterator[float]:
    """The same time again and again."""
    while True:
        yield seconds


def busy(seconds: float, every: int) -> Iterator[float]:
    """A time that is ten times as long now and then."""
    number = 0
    while True:
        number += 1
        yield seconds * (10 if number % every == 0 else 1)


def test_the_ratio_is_that_of_the_shortest_runs() -> None:
    """What interrupts single runs does not count, and the interval holds the ratio."""
    machine = Machine()
    measured_ratio = measure_time_ratio(
        machine.taking("one", busy(0.002, 5)), machine.taking("other", steady(0.001)), seconds=1, clock=machine.clock
    )
    assert measured_ratio.median == pytest.approx(2)
    assert measured_ratio.low == pytest.approx(2)
    assert measured_ratio.high == pytest.approx(2)
    assert (measured_ratio.first_seconds, measured_ratio.second_seconds) == pytest.approx((0.002, 0.001))


def test_both_run_in_every_round_by_turns() -> None:
    """Rounds begin with either, so that what changes while they run falls on both."""
    machine = Machine()
    measure_time_ratio(
        machine.taking("a", steady(0.02)), machine.taking("b", steady(0.03)), seconds=0, clock=machine.clock
    )
    assert machine.runs == list("aabb") + (list("abba") * 9)[:18]


def test_more_rounds_where_they_differ() -> None:
    """A ratio that is known closely ends the rounds early, another takes the seconds that there are."""
    machine = Machine()
    measure_time_ratio(
        machine.taking("a", steady(0.02)), machine.taking("b", steady(0.03)), seconds=5, clock=machine.clock
    )
    assert machine.now < 1
    machine = Machine()
    uneven = (0.02 * (1 + 0.618 * number % 1) for number in range(10**6))
    measured_ratio = measure_time_ratio(
        machine.taking("a", uneven), machine.taking("b", steady(0.03)), seconds=5, clock=machine.clock
    )
    assert machine.now == pytest.approx(5, abs=0.3)
    assert measured_ratio.low < measured_ratio.median < measured_ratio.high


def test_short_runs_are_timed_in_blocks() -> None:
    """A clock that takes time itself hardly changes the ratio of runs that take little more."""
    machine = Machine()

    def clock() -> float:
        machine.now += 1e-6
        return machine.now

    measured_ratio = measure_time_ratio(
        machine.taking("a", steady(4e-6)), machine.taking("b", steady(2e-6)), seconds=0.1, clock=clock
    )
    assert measured_ratio.median == pytest.approx(2, rel=0.02)

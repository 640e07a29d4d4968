"""The search for the cheapest plan that meets a bound; docs/decisions/0060 and 0065 have the reasons."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphquant.accuracy.choose import cheaper, choose, cost, high, lighter, total
from graphquant.comparison.confidence import PLANS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from graphquant.accuracy.choose import Chosen
    from graphquant.accuracy.costs import Group

    Place = tuple[str, str]

MEASUREMENTS = PLANS
"""Plans that are made and measured at most."""

CLIMBED, REFINED = 8, 3
"""Of these, how many may go by until one meets the bound, and how many look for a smaller sum of errors then."""

STEP = 3.0
"""Decibels more that are wanted where a plan misses by an unknown amount."""

CLOSE = 0.3
"""Decibels between two aims that are not worth a plan."""

NEAR = 2.0
"""Decibels by which a plan may miss so that one that differs next to nothing may meet: heavy tails make that much."""

PATIENCE = 6
"""Cheaper plans that may miss one after the other."""

WORTH = 0.98
"""A cheaper plan is tried if it costs less by that factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """How good one plan is.

    Attributes:
        met: Whether it meets the bounds on the samples of the search.
        sqnr: Signal to noise of its worst output, dB; infinite where nothing is lost.
    """

    met: bool
    sqnr: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the search found.

    Attributes:
        chosen: For each group the position of its way.
        measured: How good that is.
        cost: What it costs, as a share of all ops in float.
        plans: How many plans were measured.
        interrupted: Whether it was stopped before its end.
    """

    chosen: Chosen
    measured: Measured
    cost: float
    plans: int
    interrupted: bool


def search(
    groups: Sequence[Group],
    costs: Mapping[Place, float],
    measure: Callable[[Chosen], Measured],
    *,
    wanted: float | None,
    progress: Callable[[int, int], None] | None = None,
) -> Found:
    """Looks for the cheapest ways of all groups that meet a bound.

    Args:
        groups: The sites, with their ways and the error that each adds in these.
        costs: What each op costs in high precision.
        measure: Makes and measures the plan of these ways.
        wanted: The bound on SQNR, dB; None where it is on something else.
        progress: Told how many plans were measured, and of how many at most.
    """
    return _Search(groups, costs, measure, progress).run(wanted)


class _Search:
    """Plans that were measured, and the best of them."""

    def __init__(
        self,
        groups: Sequence[Group],
        costs: Mapping[Place, float],
        measure: Callable[[Chosen], Measured],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._groups, self._costs, self._measure, self._progress = groups, costs, measure, progress
        self._tried: dict[Chosen, Measured] = {}
        self._whole = sum(costs.values()) or 1.0
        self._best = self._tried_now((0,) * len(groups))

    def run(self, wanted: float | None) -> Found:
        """Tries plans until one is the cheapest that can be told, or there are none left."""
        interrupted = False
        try:
            if not self._best[1].met:
                self._refine(*self._climb(wanted))
                self._cheapen(wanted)
        except KeyboardInterrupt:
            interrupted = True
        chosen, measured, price = self._best
        return Found(
            chosen=chosen,
            measured=measured,
            cost=price / self._whole,
            plans=len(self._tried),
            interrupted=interrupted,
        )

    def _climb(self, wanted: float | None) -> tuple[float, float]:
        """Wants more and more until the bound is met; returns the last aim that missed and the one that met."""
        now, aim = self._best[1], _decibels(total(self._groups, self._best[0]))
        for _ in range(CLIMBED):
            missed = aim
            short = wanted - now.sqnr if wanted is not None and math.isfinite(now.sqnr) else STEP
            aim += max(short + CLOSE, CLOSE)
            now = self._try(self._chosen(aim))
            if now.met:
                return missed, aim
        self._try(tuple(len(group.ways) - 1 for group in self._groups))
        return aim, aim

    def _refine(self, missed: float, met: float) -> None:
        """Halves what lies between two aims."""
        for _ in range(REFINED):
            if met - missed <= CLOSE:
                break
            middle = (missed + met) / 2
            if self._try(self._chosen(middle)).met:
                met = middle
            else:
                missed = middle

    def _cheapen(self, wanted: float | None) -> None:
        """Tries cheaper plans than the best, those of least error first, as long as plans may be measured."""
        waiting: list[Chosen] = []
        of: Chosen | None = None
        missed = 0
        while self._best[1].met and len(self._tried) < MEASUREMENTS and missed < PATIENCE:
            if self._best[0] != of:
                of, missed = self._best[0], 0
                ops = high(self._groups, of)
                waiting = cheaper(self._groups, self._costs, ops, WORTH)[::-1]
            chosen = self._untried(waiting, wanted)
            if chosen is None:
                break
            missed += not self._try(chosen).met
            waiting.append(chosen)

    def _untried(self, waiting: list[Chosen], wanted: float | None) -> Chosen | None:
        """The last that is waiting and was not measured, or one that costs as much as one that just misses."""
        while waiting:
            chosen = waiting.pop()
            if chosen not in self._tried:
                return chosen
            if wanted is not None and wanted - NEAR < self._tried[chosen].sqnr < wanted:
                waiting.append(lighter(self._groups, chosen))
                if waiting[-1] == chosen:
                    waiting.pop()
        return None

    def _chosen(self, aim: float) -> Chosen:
        return choose(self._groups, self._costs, 10 ** (-aim / 10))

    def _try(self, chosen: Chosen) -> Measured:
        """Measures a plan, unless that was done, and keeps it if it is the best."""
        tried = self._tried_now(chosen)
        if _rank(*tried[1:]) < _rank(*self._best[1:]):
            self._best = tried
        return tried[1]

    def _tried_now(self, chosen: Chosen) -> tuple[Chosen, Measured, float]:
        if chosen not in self._tried:
            self._tried[chosen] = self._measure(chosen)
            if self._progress is not None:
                self._progress(len(self._tried), MEASUREMENTS)
        return chosen, self._tried[chosen], cost(self._groups, chosen, self._costs)


def _rank(found: Measured, price: float) -> tuple[bool, float]:
    """Those that meet the bound come first, the cheapest of them first; of the others the nearest."""
    return (not found.met, price if found.met else -found.sqnr)


def _decibels(error: float) -> float:
    """The signal to noise that a sum of errors leaves."""
    return -10 * math.log10(error) if error else math.inf


__all__ = ["Found", "Measured", "search"]

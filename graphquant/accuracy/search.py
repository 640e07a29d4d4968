"""The search for the cheapest plan that meets a bound; docs/decisions/0060 has the reasons."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphquant.accuracy.choose import choose, cost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from graphquant.accuracy.costs import Group

    Place = tuple[str, str]

MEASUREMENTS = 10
"""Plans that are made and measured at most."""

REFINED = 3
"""Of these, how many look for a cheaper plan once one meets the bound."""

STEP = 3.0
"""Decibels more that are wanted where a plan misses by an unknown amount."""

MARGIN = 0.3
"""Decibels more than a bound that are wanted on the samples of the search, which are not those of the check."""


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
        left: Positions of the sites that are to be left float.
        measured: How good that is.
        cost: What it costs, as a share of all ops in float.
        plans: How many plans were measured.
        interrupted: Whether it was stopped before its end.
    """

    left: tuple[int, ...]
    measured: Measured
    cost: float
    plans: int
    interrupted: bool


def search(
    groups: Sequence[Group],
    costs: Mapping[Place, float],
    measure: Callable[[tuple[int, ...]], Measured],
    *,
    wanted: float | None,
    progress: Callable[[int, int], None] | None = None,
) -> Found:
    """Looks for the cheapest sites to leave float so that a bound is met.

    Args:
        groups: The sites, with the error that each adds.
        costs: What each op costs in float.
        measure: Makes and measures the plan that leaves these sites float.
        wanted: The bound on SQNR, dB; None where it is on something else.
        progress: Told how many plans were measured, and of how many at most.
    """
    return _Search(groups, costs, measure, progress).run(wanted)


class _Search:
    """One search: what was tried, and the best of it."""

    def __init__(
        self,
        groups: Sequence[Group],
        costs: Mapping[Place, float],
        measure: Callable[[tuple[int, ...]], Measured],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._groups, self._costs, self._measure, self._progress = groups, costs, measure, progress
        self._tried: dict[tuple[int, ...], Measured] = {}
        self._whole = sum(costs.values()) or 1.0
        self._best = self._tried_now(())

    def run(self, wanted: float | None) -> Found:
        """Tries plans until one is the cheapest that can be told, or there are none left."""
        interrupted = False
        try:
            if not self._best[1].met:
                self._refine(*self._climb(wanted))
        except KeyboardInterrupt:
            interrupted = True
        chosen, measured, price = self._best
        return Found(
            left=self._sites(chosen),
            measured=measured,
            cost=price / self._whole,
            plans=len(self._tried),
            interrupted=interrupted,
        )

    def _climb(self, wanted: float | None) -> tuple[float, float]:
        """Wants more and more until the bound is met; returns the last aim that missed and the one that met."""
        now, aim = self._best[1], _estimate(self._groups)
        for _ in range(MEASUREMENTS - REFINED - 1):
            missed = aim
            short = wanted - now.sqnr if wanted is not None and math.isfinite(now.sqnr) else STEP
            aim += max(short + MARGIN, 0.5)
            now = self._try(self._chosen(aim))
            if now.met:
                return missed, aim
        self._try(tuple(range(len(self._groups))))
        return aim, aim

    def _refine(self, missed: float, met: float) -> None:
        """Halves what lies between two aims, as long as plans may be measured."""
        while len(self._tried) < MEASUREMENTS and met - missed > MARGIN:
            middle = (missed + met) / 2
            if self._try(self._chosen(middle)).met:
                met = middle
            else:
                missed = middle

    def _chosen(self, aim: float) -> tuple[int, ...]:
        return tuple(choose(self._groups, self._costs, 10 ** (-aim / 10)))

    def _sites(self, chosen: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(site for index in chosen for site in self._groups[index].sites))

    def _try(self, chosen: tuple[int, ...]) -> Measured:
        """Measures a plan, unless that was done, and keeps it if it is the best."""
        tried = self._tried_now(chosen)
        if _rank(*tried[1:]) < _rank(*self._best[1:]):
            self._best = tried
        return tried[1]

    def _tried_now(self, chosen: tuple[int, ...]) -> tuple[tuple[int, ...], Measured, float]:
        if chosen not in self._tried:
            self._tried[chosen] = self._measure(self._sites(chosen))
            if self._progress is not None:
                self._progress(len(self._tried), MEASUREMENTS)
        return chosen, self._tried[chosen], cost(self._groups, chosen, self._costs)


def _rank(found: Measured, price: float) -> tuple[bool, float]:
    """Those that meet the bound come first, the cheapest of them first; of the others the nearest."""
    return (not found.met, price if found.met else -found.sqnr)


def _estimate(groups: Sequence[Group]) -> float:
    """The signal to noise of a plan that leaves nothing, as errors add up."""
    error = sum(group.error for group in groups)
    return -10 * math.log10(error) if error else math.inf


__all__ = ["Found", "Measured", "search"]

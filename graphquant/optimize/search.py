"""The search for the cheapest plan that meets a bound; docs/decisions/0060 and 0065 have the reasons."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from math import fsum
from typing import TYPE_CHECKING

from graphquant.analysis.comparison import MAX_SEARCH_PLANS
from graphquant.optimize.candidates import FLOAT_GROUP_COST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from graphquant.optimize.candidates import ScaleGroup

    OpKey = tuple[str, str]
    Selection = tuple[int, ...]


# The cheapest ways for a wanted sum of errors.

MAX_EXHAUSTIVE_OPS = 12
"""Ops of which every set is tried."""

MAX_DROPPED_OPS = 32
"""Of more ops, how many may be given back in a look for cheaper ways."""

NEGLIGIBLE_ERROR_SHARE = 0.05
"""Of a sum of errors: so much is lost among what estimates and chance are off by."""

SUM_TOLERANCE = 1e-9
"""Of a sum of errors: that much more is as good."""


def choose_selection(groups: Sequence[ScaleGroup], costs: Mapping[OpKey, float], max_error: float) -> Selection:
    """The way of each group, as its position, so that errors add up to `max_error` at most.

    Args:
        groups: What there is to choose for.
        costs: What each op costs in high precision.
        max_error: The sum of errors, as a share of the outputs.
    """
    ops = sorted({op for group in groups for op in group.ops})
    if len(ops) > MAX_EXHAUSTIVE_OPS:
        return settle_selection(groups, _greedy_high_ops(groups, costs, max_error), max_error)
    best: tuple[float, Selection] | None = None
    change_cost = FLOAT_GROUP_COST * max(sum(costs.values()), 1.0)
    for price, op_set in _op_sets_by_cost(ops, costs):
        if best is not None and price >= best[0]:
            break
        selection = settle_selection(groups, op_set, max_error)
        if total_error(groups, selection) <= max_error * (1 + SUM_TOLERANCE):
            changed_groups = sum(
                candidate > 0 and not group.ops for group, candidate in zip(groups, selection, strict=True)
            )
            scored = price + change_cost * changed_groups, selection
            best = min(best or scored, scored)
    return best[1] if best is not None else settle_selection(groups, frozenset(ops), max_error)


def selection_cost(groups: Sequence[ScaleGroup], selection: Sequence[int], costs: Mapping[OpKey, float]) -> float:
    """What it costs: each op that multiplies on a group in high precision runs in that."""
    return fsum(costs[op] for op in high_precision_ops(groups, selection))


def high_precision_ops(groups: Sequence[ScaleGroup], selection: Sequence[int]) -> frozenset[OpKey]:
    """The ops that run in high precision."""
    return frozenset(
        op
        for group, candidate in zip(groups, selection, strict=True)
        if group.candidates[candidate].high_precision
        for op in group.ops
    )


def total_error(groups: Sequence[ScaleGroup], selection: Sequence[int]) -> float:
    """What the errors add up to."""
    return fsum(group.candidates[candidate].error for group, candidate in zip(groups, selection, strict=True))


def settle_selection(groups: Sequence[ScaleGroup], ops: frozenset[OpKey], max_error: float) -> Selection:
    """The ways where `ops` run in high precision: as few as it takes are others than those that rules want.

    What only these ops multiply on is in high precision too, since nothing is gained by less. Of all else the largest
    gain comes first, until `max_error` is met, or nothing is left to gain.
    """
    can_be_high = [bool(group.ops) and group.ops <= ops for group in groups]
    selection = [
        next((position for position, candidate in enumerate(group.candidates) if candidate.high_precision), 0)
        if is_high
        else 0
        for group, is_high in zip(groups, can_be_high, strict=True)
    ]
    error = total_error(groups, selection)
    for gain, index, candidate in sorted(_candidate_gains(groups, selection, can_be_high), key=lambda entry: -entry[0]):
        if error <= max_error:
            break
        selection[index] = candidate
        error -= gain
    return tuple(selection)


def _candidate_gains(
    groups: Sequence[ScaleGroup], selection: Sequence[int], can_be_high: Sequence[bool]
) -> Iterator[tuple[float, int, int]]:
    """For each group that has one the best other way: the fall of its error, its position, the way's."""
    for index, group in enumerate(groups):
        allowed = [
            position
            for position, candidate in enumerate(group.candidates)
            if can_be_high[index] or not group.ops or not candidate.high_precision
        ]
        best = min(allowed, key=lambda position: group.candidates[position].error)
        gain = group.candidates[selection[index]].error - group.candidates[best].error
        if gain > 0:
            yield gain, index, best


def cheaper_selections(
    groups: Sequence[ScaleGroup], costs: Mapping[OpKey, float], ops: frozenset[OpKey], max_ratio: float
) -> list[Selection]:
    """Ways that cost less than those where `ops` run in high precision, those of least error first.

    Of few ops all sets are looked at; of many those with one op less.

    Args:
        groups: What there is to choose for.
        costs: What each op costs in high precision.
        ops: Ops that run in high precision.
        max_ratio: By which factor less it must cost.
    """
    all_ops = sorted({op for group in groups for op in group.ops})
    max_cost = fsum(costs[op] for op in ops) * max_ratio
    op_sets: Iterable[frozenset[OpKey]]
    if len(all_ops) <= MAX_EXHAUSTIVE_OPS:
        op_sets = [op_set for price, op_set in _op_sets_by_cost(all_ops, costs) if price <= max_cost]
    else:
        op_sets = [
            ops - {op}
            for op in sorted(ops, key=lambda candidate_op: (-costs[candidate_op], candidate_op))[:MAX_DROPPED_OPS]
        ]
    selections = dict.fromkeys(settle_selection(groups, op_set, 0.0) for op_set in op_sets)
    return sorted(selections, key=lambda selection: total_error(groups, selection))


def lighter_selection(groups: Sequence[ScaleGroup], selection: Selection) -> Selection:
    """The same, but what adds next to nothing as rules want it stays so, which costs no more."""
    negligible = NEGLIGIBLE_ERROR_SHARE * total_error(groups, selection)
    return tuple(
        0 if group.candidates[0].error <= negligible else candidate
        for group, candidate in zip(groups, selection, strict=True)
    )


def _op_sets_by_cost(ops: Sequence[OpKey], costs: Mapping[OpKey, float]) -> list[tuple[float, frozenset[OpKey]]]:
    """All sets of ops with their costs, the cheapest first."""
    subsets = [subset for count in range(len(ops) + 1) for subset in combinations(ops, count)]
    return sorted(
        ((fsum(costs[op] for op in subset), frozenset(subset)) for subset in subsets), key=lambda priced: priced[0]
    )


def _greedy_high_ops(groups: Sequence[ScaleGroup], costs: Mapping[OpKey, float], max_error: float) -> frozenset[OpKey]:
    """By the largest fall of error for its cost, again and again; then ops are given back, the dearest first."""
    state = _GreedyState(groups)
    while state.error > max_error:
        best: tuple[float, int] | None = None
        for index, group in enumerate(groups):
            if index in state.float_groups or not state.reductions[index]:
                continue
            gain = fsum(state.reductions[freed_index] for freed_index in state.freed_groups(group.ops) | {index})
            ratio = gain / max(fsum(costs[op] for op in group.ops - state.high_ops), FLOAT_GROUP_COST)
            if best is None or ratio > best[0]:
                best = ratio, index
        if best is None:
            break
        state.make_float(best[1])
    for op in sorted(state.high_ops, key=lambda candidate_op: (-costs[candidate_op], candidate_op)):
        state.restore_op(op, max_error)
    return frozenset(state.high_ops)


class _GreedyState:
    """The ops in high precision so far, what is left of the errors, and by how much each group's falls in that."""

    def __init__(self, groups: Sequence[ScaleGroup]) -> None:
        self._groups = groups
        self._by_op: dict[OpKey, list[int]] = {}
        for index, group in enumerate(groups):
            for op in group.ops:
                self._by_op.setdefault(op, []).append(index)
        lowest = [
            min(candidate.error for candidate in group.candidates if not (candidate.high_precision and group.ops))
            for group in groups
        ]
        self.reductions = [
            error - min(candidate.error for candidate in group.candidates)
            for error, group in zip(lowest, groups, strict=True)
        ]
        self.high_ops: set[OpKey] = set()
        self.float_groups: set[int] = set()
        self.error = sum(lowest)

    def freed_groups(self, ops: frozenset[OpKey]) -> set[int]:
        """The groups that nothing keeps quantized any more if `ops` run in high precision too."""
        touched = {index for op in ops for index in self._by_op[op]} - self.float_groups
        return {index for index in touched if self._groups[index].ops <= self.high_ops | ops}

    def make_float(self, index: int) -> None:
        """Leaves a group float, with its ops and all that they alone kept quantized."""
        freed = self.freed_groups(self._groups[index].ops) | {index}
        self.high_ops |= self._groups[index].ops
        self.float_groups |= freed
        self.error -= fsum(self.reductions[freed_index] for freed_index in freed)

    def restore_op(self, op: OpKey, max_error: float) -> None:
        """Lets `op` run on integers again, if the errors still add up to no more than `max_error`."""
        restored = [index for index in self._by_op[op] if index in self.float_groups]
        error = self.error + fsum(self.reductions[index] for index in restored)
        if error <= max_error:
            self.error = error
            self.float_groups -= set(restored)
            self.high_ops.discard(op)


MAX_MEASUREMENTS = MAX_SEARCH_PLANS
"""Plans that are made and measured at most."""

MAX_CLIMB_PLANS, MAX_REFINE_PLANS = 8, 3
"""Of these, how many may go by until one meets the bound, and how many look for a smaller sum of errors then."""

CLIMB_STEP_DB = 3.0
"""Decibels more that are wanted where a plan misses by an unknown amount."""

MIN_AIM_STEP_DB = 0.3
"""Decibels between two aims that are not worth a plan."""

NEAR_MISS_DB = 2.0
"""Decibels by which a plan may miss so that one that differs next to nothing may meet: heavy tails make that much."""

MAX_CONSECUTIVE_MISSES = 6
"""Cheaper plans that may miss one after the other."""

MAX_COST_RATIO = 0.98
"""A cheaper plan is tried if it costs less by that factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuality:
    """How good one plan is.

    Attributes:
        met: Whether it meets the bounds on the samples of the search.
        sqnr: Signal to noise of its worst output, dB; infinite where nothing is lost.
    """

    met: bool
    sqnr: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionResult:
    """What the search found.

    Attributes:
        selection: For each group the position of its way.
        quality: How good that is.
        cost: What it costs, as a share of all ops in float.
        plans: How many plans were measured.
        interrupted: Whether it was stopped before its end.
    """

    selection: Selection
    quality: PlanQuality
    cost: float
    plans: int
    interrupted: bool


def search_cheapest_plan(
    groups: Sequence[ScaleGroup],
    costs: Mapping[OpKey, float],
    measure: Callable[[Selection], PlanQuality],
    *,
    target_sqnr: float | None,
    progress: Callable[[int, int], None] | None = None,
) -> SelectionResult:
    """Looks for the cheapest ways of all groups that meet a bound.

    Args:
        groups: The sites, with their ways and the error that each adds in these.
        costs: What each op costs in high precision.
        measure: Makes and measures the plan of these ways.
        target_sqnr: The bound on SQNR, dB; None where it is on something else.
        progress: Told how many plans were measured, and of how many at most.
    """
    return _PlanSearch(groups, costs, measure, progress).run(target_sqnr)


class _PlanSearch:
    """Plans that were measured, and the best of them."""

    def __init__(
        self,
        groups: Sequence[ScaleGroup],
        costs: Mapping[OpKey, float],
        measure: Callable[[Selection], PlanQuality],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._groups, self._costs, self._measure, self._progress = groups, costs, measure, progress
        self._qualities: dict[Selection, PlanQuality] = {}
        self._float_cost = sum(costs.values()) or 1.0
        self._best = self._measure_selection((0,) * len(groups))

    def run(self, target_sqnr: float | None) -> SelectionResult:
        """Tries plans until one is the cheapest that can be told, or there are none left."""
        interrupted = False
        try:
            if not self._best[1].met:
                self._refine_aim(*self._climb_to_bound(target_sqnr))
                self._search_cheaper(target_sqnr)
        except KeyboardInterrupt:
            interrupted = True
        selection, quality, price = self._best
        return SelectionResult(
            selection=selection,
            quality=quality,
            cost=price / self._float_cost,
            plans=len(self._qualities),
            interrupted=interrupted,
        )

    def _climb_to_bound(self, target_sqnr: float | None) -> tuple[float, float]:
        """Wants more and more until the bound is met; returns the last aim that missed and the one that met."""
        quality, aim = self._best[1], _error_to_decibels(total_error(self._groups, self._best[0]))
        for _ in range(MAX_CLIMB_PLANS):
            missed = aim
            shortfall = (
                target_sqnr - quality.sqnr if target_sqnr is not None and math.isfinite(quality.sqnr) else CLIMB_STEP_DB
            )
            aim += max(shortfall + MIN_AIM_STEP_DB, MIN_AIM_STEP_DB)
            quality = self._try_selection(self._choose_for_aim(aim))
            if quality.met:
                return missed, aim
        self._try_selection(tuple(len(group.candidates) - 1 for group in self._groups))
        return aim, aim

    def _refine_aim(self, missed: float, met: float) -> None:
        """Halves what lies between two aims."""
        for _ in range(MAX_REFINE_PLANS):
            if met - missed <= MIN_AIM_STEP_DB:
                break
            middle = (missed + met) / 2
            if self._try_selection(self._choose_for_aim(middle)).met:
                met = middle
            else:
                missed = middle

    def _search_cheaper(self, target_sqnr: float | None) -> None:
        """Tries cheaper plans than the best, those of least error first, as long as plans may be measured."""
        waiting: list[Selection] = []
        base_selection: Selection | None = None
        missed = 0
        while self._best[1].met and len(self._qualities) < MAX_MEASUREMENTS and missed < MAX_CONSECUTIVE_MISSES:
            if self._best[0] != base_selection:
                base_selection, missed = self._best[0], 0
                ops = high_precision_ops(self._groups, base_selection)
                waiting = cheaper_selections(self._groups, self._costs, ops, MAX_COST_RATIO)[::-1]
            selection = self._next_untried(waiting, target_sqnr)
            if selection is None:
                break
            missed += not self._try_selection(selection).met
            waiting.append(selection)

    def _next_untried(self, waiting: list[Selection], target_sqnr: float | None) -> Selection | None:
        """The last that is waiting and was not measured, or one that costs as much as one that just misses."""
        while waiting:
            selection = waiting.pop()
            if selection not in self._qualities:
                return selection
            if target_sqnr is not None and target_sqnr - NEAR_MISS_DB < self._qualities[selection].sqnr < target_sqnr:
                waiting.append(lighter_selection(self._groups, selection))
                if waiting[-1] == selection:
                    waiting.pop()
        return None

    def _choose_for_aim(self, aim: float) -> Selection:
        return choose_selection(self._groups, self._costs, 10 ** (-aim / 10))

    def _try_selection(self, selection: Selection) -> PlanQuality:
        """Measures a plan, unless that was done, and keeps it if it is the best."""
        scored = self._measure_selection(selection)
        if _quality_rank(*scored[1:]) < _quality_rank(*self._best[1:]):
            self._best = scored
        return scored[1]

    def _measure_selection(self, selection: Selection) -> tuple[Selection, PlanQuality, float]:
        if selection not in self._qualities:
            self._qualities[selection] = self._measure(selection)
            if self._progress is not None:
                self._progress(len(self._qualities), MAX_MEASUREMENTS)
        return selection, self._qualities[selection], selection_cost(self._groups, selection, self._costs)


def _quality_rank(quality: PlanQuality, price: float) -> tuple[bool, float]:
    """Those that meet the bound come first, the cheapest of them first; of the others the nearest."""
    return (not quality.met, price if quality.met else -quality.sqnr)


def _error_to_decibels(error: float) -> float:
    """The signal to noise that a sum of errors leaves."""
    return -10 * math.log10(error) if error else math.inf


# The ways of weights that lose least within so many bytes.


def allocate_weight_bits(groups: Sequence[ScaleGroup], max_bytes: float) -> Selection:
    """The way of each group, as its position, so that sizes add up to `max_bytes` at most, if they can.

    From the smallest ways on, the step to another that saves most errors for its bytes is taken, if it fits, again and
    again. Of each group only ways on the convex hull of sizes and errors are looked at, so that steps of one group come
    in their order; the outcome is at most one step from the best.
    """
    selection = [
        min(range(len(group.candidates)), key=lambda candidate: _size_then_error(group, candidate)) for group in groups
    ]
    remaining_bytes = max_bytes - sum(
        group.candidates[candidate].size for group, candidate in zip(groups, selection, strict=True)
    )
    upgrades = sorted(
        (-ratio, index, candidate)
        for index, group in enumerate(groups)
        for ratio, candidate in _hull_upgrades(group, selection[index])
    )
    for _, index, candidate in upgrades:
        extra_bytes = groups[index].candidates[candidate].size - groups[index].candidates[selection[index]].size
        if extra_bytes <= remaining_bytes:
            selection[index] = candidate
            remaining_bytes -= extra_bytes
    return tuple(selection)


def _size_then_error(group: ScaleGroup, candidate: int) -> tuple[float, float]:
    return group.candidates[candidate].size, group.candidates[candidate].error


def _hull_upgrades(group: ScaleGroup, start: int) -> Iterator[tuple[float, int]]:
    """From the smallest way on, each step along the hull: what it saves for each byte, and to which way."""
    current = start
    while True:
        ratios = [
            (
                (group.candidates[current].error - candidate.error) / (candidate.size - group.candidates[current].size),
                index,
            )
            for index, candidate in enumerate(group.candidates)
            if candidate.size > group.candidates[current].size and candidate.error < group.candidates[current].error
        ]
        if not ratios:
            return
        ratio, current = max(ratios)
        yield ratio, current

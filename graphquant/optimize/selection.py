"""Search for the cheapest selection of candidates that meets a bound (see docs/decisions)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import fsum
from typing import TYPE_CHECKING

from graphquant.optimize.candidates import FLOAT_GROUP_COST, Candidate, ScaleGroup
from graphquant.optimize.search_budget import SearchLimitError, StopReason
from graphquant.optimize.sensitivity import error_to_db

if TYPE_CHECKING:
    from graphquant.ir import OpKey

Selection = tuple[int, ...]

# This part solves the selection for one target sum of errors. The search below varies the target.

MAX_EXHAUSTIVE_OPS = 12  # number of ops up to which every subset is tried
MAX_DROPPED_OPS = 32  # with more ops, the maximum number of ops that are returned to integers in trials
NEGLIGIBLE_ERROR_SHARE = 0.05  # share of the error sum that is below the uncertainty of the estimates
SUM_TOLERANCE = 1e-9  # relative tolerance of a sum of errors


def choose_selection(
    groups: Sequence[ScaleGroup],
    costs: Mapping[OpKey, float],
    max_error: float,
    blocks: Sequence[frozenset[OpKey]] = (),
) -> Selection:
    """Choose the candidate of each group, by index, so that the errors add up to at most `max_error`.

    `costs` are those of ops in high precision, and `max_error` is a share of the outputs. The ops of a block may become
    float together, which also frees the tensors between them.
    """
    ops = sorted({op for group in groups for op in group.ops})
    if len(ops) > MAX_EXHAUSTIVE_OPS:
        return settle_selection(groups, _greedy_high_ops(groups, costs, max_error, blocks), max_error)
    best = math.inf, settle_selection(groups, frozenset(ops), max_error)
    change_cost = FLOAT_GROUP_COST * max(sum(costs.values()), 1.0)
    for price, op_set in _op_sets_by_cost(ops, costs):
        if price >= best[0]:
            break
        selection = settle_selection(groups, op_set, max_error)
        if total_error(groups, selection) <= max_error * (1 + SUM_TOLERANCE):
            changed = sum(index > 0 and not group.ops for group, index in zip(groups, selection, strict=True))
            best = min(best, (price + change_cost * changed, selection))
    return best[1]


def selection_cost(groups: Sequence[ScaleGroup], selection: Sequence[int], costs: Mapping[OpKey, float]) -> float:
    """Cost of the ops that run in high precision."""
    return fsum(costs[op] for op in high_precision_ops(groups, selection))


def high_precision_ops(groups: Sequence[ScaleGroup], selection: Sequence[int]) -> frozenset[OpKey]:
    """Ops that run in high precision."""
    return frozenset(
        op
        for group, candidate in zip(groups, selection, strict=True)
        if group.candidates[candidate].high_precision
        for op in group.ops
    )


def total_error(groups: Sequence[ScaleGroup], selection: Sequence[int]) -> float:
    """Sum of the errors."""
    return fsum(group.candidates[candidate].error for group, candidate in zip(groups, selection, strict=True))


def settle_selection(groups: Sequence[ScaleGroup], ops: frozenset[OpKey], max_error: float) -> Selection:
    """Choose the candidates if `ops` run in high precision, with as few deviations from the rules as possible.

    Groups that only these ops read become high precision too, because less would gain nothing. The other groups change
    in the order of their gain until `max_error` is met.
    """
    selection, gains = [0] * len(groups), list[tuple[float, int, int]]()
    for index, group in enumerate(groups):
        positions, can_be_high = range(len(group.candidates)), bool(group.ops) and group.ops <= ops
        high_positions = [position for position in positions if group.candidates[position].high_precision]
        if can_be_high and high_positions:
            selection[index] = high_positions[0]
        allowed = positions if can_be_high or not group.ops else sorted({*positions} - {*high_positions})
        best = min(allowed, key=[candidate.error for candidate in group.candidates].__getitem__)
        gains.append((group.candidates[selection[index]].error - group.candidates[best].error, index, best))
    error = total_error(groups, selection)
    for gain, index, candidate in sorted(gains, key=lambda entry: -entry[0]):
        if error <= max_error or gain <= 0:
            break
        selection[index] = candidate
        error -= gain
    return tuple(selection)


def cheaper_selections(
    groups: Sequence[ScaleGroup], costs: Mapping[OpKey, float], ops: frozenset[OpKey], max_ratio: float
) -> list[Selection]:
    """List selections that cost at most `max_ratio` of those with `ops` in high precision.

    With few ops all subsets are listed by increasing error, with many those with one op less by error per unit of cost.
    """
    all_ops = sorted({op for group in groups for op in group.ops})
    max_cost = fsum(costs[op] for op in ops) * max_ratio
    if len(all_ops) <= MAX_EXHAUSTIVE_OPS:
        op_sets = [op_set for price, op_set in _op_sets_by_cost(all_ops, costs) if price <= max_cost]
        selections = dict.fromkeys(settle_selection(groups, op_set, 0.0) for op_set in op_sets)
        return sorted(selections, key=lambda selection: total_error(groups, selection))
    dearest = sorted(ops, key=lambda op: (-costs[op], op))[:MAX_DROPPED_OPS]
    ratios: dict[Selection, float] = {}
    for op in dearest:
        selection = settle_selection(groups, ops - {op}, 0.0)
        ratios.setdefault(selection, total_error(groups, selection) / max(costs[op], FLOAT_GROUP_COST))
    return sorted(ratios, key=ratios.__getitem__)


def lighter_selection(groups: Sequence[ScaleGroup], selection: Selection) -> Selection:
    """Return the selection with the rules' candidate wherever the error is negligible. It costs no more."""
    negligible = NEGLIGIBLE_ERROR_SHARE * total_error(groups, selection)
    return tuple(
        0 if group.candidates[0].error <= negligible else candidate
        for group, candidate in zip(groups, selection, strict=True)
    )


def _op_sets_by_cost(ops: Sequence[OpKey], costs: Mapping[OpKey, float]) -> list[tuple[float, frozenset[OpKey]]]:
    """All subsets of ops with their costs, by cost."""
    subsets = [subset for count in range(len(ops) + 1) for subset in combinations(ops, count)]
    priced = [(fsum(costs[op] for op in subset), frozenset(subset)) for subset in subsets]
    return sorted(priced, key=lambda entry: entry[0])


def _greedy_high_ops(
    groups: Sequence[ScaleGroup],
    costs: Mapping[OpKey, float],
    max_error: float,
    blocks: Sequence[frozenset[OpKey]] = (),
) -> frozenset[OpKey]:
    """Choose ops by their error reduction per cost, then return ops to integers, the most expensive first.

    A step is the ops of one group, or those of a whole block.
    """
    indices_by_op: dict[OpKey, list[int]] = {}
    lowest_errors, reductions = list[float](), list[float]()
    for index, group in enumerate(groups):
        for op in group.ops:
            indices_by_op.setdefault(op, []).append(index)
        quantized = [candidate for candidate in group.candidates if not (candidate.high_precision and group.ops)]
        lowest_errors.append(min(candidate.error for candidate in quantized))
        reductions.append(lowest_errors[-1] - min(candidate.error for candidate in group.candidates))
    # Each step has its ops, and its own group if no op reads that one.
    known_ops = indices_by_op.keys()
    steps = [(group.ops, index) for index, group in enumerate(groups) if reductions[index]]
    steps += [(block & known_ops, -1) for block in blocks if len(block & known_ops) > 1]
    high_ops: set[OpKey] = set()
    error, float_groups = fsum(lowest_errors), set[int]()

    def freed_groups(ops: frozenset[OpKey], own: int) -> set[int]:
        """Return the groups that no quantized op reads once the ops run in high precision."""
        touched = {index for op in ops for index in indices_by_op[op]} | ({own} if own >= 0 else set())
        return {index for index in touched - float_groups if groups[index].ops <= high_ops | ops}

    while error > max_error:
        ratios: dict[int, float] = {}
        for number, (ops, own) in enumerate(steps):
            reduction = fsum(reductions[freed] for freed in freed_groups(ops, own))
            if reduction > 0:
                ratios[number] = reduction / max(fsum(costs[op] for op in ops - high_ops), FLOAT_GROUP_COST)
        if not ratios:
            break
        ops, own = steps[max(ratios, key=ratios.__getitem__)]
        freed = freed_groups(ops, own)
        high_ops |= ops
        float_groups |= freed
        error -= fsum(reductions[index] for index in freed)
    for op in sorted(high_ops, key=lambda key: (-costs[key], key)):
        restored = float_groups.intersection(indices_by_op[op])
        restored_error = error + fsum(reductions[index] for index in restored)
        if restored_error <= max_error:
            error = restored_error
            float_groups -= restored
            high_ops.discard(op)
    return frozenset(high_ops)


MAX_MEASUREMENTS = 10  # maximum number of measured plans, at most `MAX_SEARCH_PLANS`, until no cheaper one is tried
MAX_CLIMB_PLANS, MAX_REFINE_PLANS = 8, 3
"""Maximum number of plans until one meets the bound, and then to reduce the aim."""

CLIMB_STEP_DB = 3.0  # step of the aim in dB if the distance to the bound is unknown
MIN_AIM_STEP_DB = 0.3  # smallest difference of two aims in dB that is worth a plan
FIRST_SHIFT_DB = 0.5  # dB by which the first predictions are too high, because plans are chosen for high ones
NEAR_MISS_DB = 2.0  # miss in dB that a nearly equal plan may correct, because errors have heavy tails
UNCERTAIN_DB = 2.0  # predicted miss in dB up to which a plan is measured, because estimates are uncertain
PREDICTION_ERROR_DB = 1.0  # error in dB of the predicted difference of two plans, with the margin for other samples
MAX_CONSECUTIVE_MISSES = 6  # maximum number of cheaper plans in a row that miss the bound
MAX_REPLACED_OPS = 3  # number of the most expensive float ops for which other ops are tried
MAX_COST_RATIO = 0.98  # relative cost below which a cheaper plan is tried


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuality:
    """True if a plan meets the bounds on the search samples, and the SQNR in dB of its worst output, or infinity."""

    met: bool
    sqnr: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionResult:
    """Result of a selection search."""

    selection: Selection  # index of the candidate of each group
    quality: PlanQuality  # quality of its plan
    cost: float  # cost as a share of all ops in float
    plans: int  # number of measured plans
    stop_reason: StopReason | None = None  # limit that ended the search early


def search_cheapest_plan(
    groups: Sequence[ScaleGroup],
    costs: Mapping[OpKey, float],
    measure: Callable[[Selection], PlanQuality],
    *,
    target_sqnr: float | None,
    blocks: Sequence[frozenset[OpKey]] = (),
    progress: Callable[[int, int], None] | None = None,
    predict: Callable[[Selection], float] | None = None,
) -> SelectionResult:
    """Search the cheapest selection that meets a bound.

    `costs` are those of each op in high precision, and `blocks` are ops that may become float together. `measure`
    builds and measures a plan; `progress` receives the number of measured plans and its maximum. `predict` returns an
    SQNR in dB that differs from the measured one by nearly the same amount for similar plans, and takes less work.
    """
    return _PlanSearch(groups, costs, measure, blocks, progress, predict).run(target_sqnr)


class _PlanSearch:
    """State of a selection search: the measured plans and the best of them."""

    def __init__(
        self,
        groups: Sequence[ScaleGroup],
        costs: Mapping[OpKey, float],
        measure: Callable[[Selection], PlanQuality],
        blocks: Sequence[frozenset[OpKey]],
        progress: Callable[[int, int], None] | None,
        predict: Callable[[Selection], float] | None,
    ) -> None:
        self._groups, self._costs, self._measure, self._progress = groups, costs, measure, progress
        self._blocks, self._predict = blocks, predict
        self._is_greedy = len({op for group in groups for op in group.ops}) > MAX_EXHAUSTIVE_OPS
        self._qualities: dict[Selection, PlanQuality] = {}
        self._best = self._measure_selection((0,) * len(groups))

    def run(self, target_sqnr: float | None) -> SelectionResult:
        """Measure plans until no cheaper one is promising."""
        stop_reason: StopReason | None = None
        try:
            if not self._best[1].met:
                if self._predict is None or target_sqnr is None:
                    self._refine_aim(*self._climb_to_bound(target_sqnr))
                else:
                    self._correct_predictions(target_sqnr, self._predict)
                self._search_cheaper(target_sqnr)
        except KeyboardInterrupt:
            stop_reason = "interrupt"
        except SearchLimitError as limit:
            stop_reason = limit.reason
        selection, quality, price = self._best
        return SelectionResult(
            selection=selection,
            quality=quality,
            cost=price / (sum(self._costs.values()) or 1.0),
            plans=len(self._qualities),
            stop_reason=stop_reason,
        )

    def _climb_to_bound(self, target_sqnr: float | None) -> tuple[float, float]:
        """Raise the aim until a plan meets the bound. Return the last aim that missed and the aim that met."""
        quality, aim = self._best[1], error_to_db(total_error(self._groups, self._best[0]))
        for _ in range(MAX_CLIMB_PLANS):
            missed, step = aim, CLIMB_STEP_DB
            if target_sqnr is not None and math.isfinite(quality.sqnr):
                step = target_sqnr - quality.sqnr
            aim += max(step + MIN_AIM_STEP_DB, MIN_AIM_STEP_DB)
            quality = self._try_aim(aim)
            if quality.met:
                return missed, aim
        self._try_selection(tuple(len(group.candidates) - 1 for group in self._groups))
        return aim, aim

    def _correct_predictions(self, target_sqnr: float, predict: Callable[[Selection], float]) -> None:
        """Measure the cheapest plan that is predicted to meet the bound, and correct the predictions by its miss."""
        selection, quality, _ = self._best
        # The tensors with the largest errors become float, and their share of the difference with them.
        excess = FIRST_SHIFT_DB + max(quality.sqnr - predict(selection), 0.0)
        for _ in range(MAX_CLIMB_PLANS):
            shift = quality.sqnr - predict(selection) - excess
            excess = MIN_AIM_STEP_DB / 2
            if not math.isfinite(shift):
                return

            def predict_quality(other: Selection, shift: float = shift) -> PlanQuality:
                sqnr = predict(other) + shift
                return PlanQuality(met=sqnr >= target_sqnr, sqnr=sqnr)

            result = search_cheapest_plan(
                self._groups, self._costs, predict_quality, target_sqnr=target_sqnr, blocks=self._blocks
            )
            if result.stop_reason == "interrupt":
                raise KeyboardInterrupt
            selection = result.selection
            if selection in self._qualities:
                return
            quality = self._try_selection(selection)

    def _refine_aim(self, missed: float, met: float) -> None:
        """Bisect the interval between two aims."""
        for _ in range(MAX_REFINE_PLANS):
            if met - missed <= MIN_AIM_STEP_DB:
                break
            middle = (missed + met) / 2
            if self._try_aim(middle).met:
                met = middle
            else:
                missed = middle

    def _search_cheaper(self, target_sqnr: float | None) -> None:
        """Measure cheaper plans than the best, by increasing error, within the limit of plans."""
        waiting: list[Selection] = []
        base_selection: Selection | None = None
        missed = 0
        while self._best[1].met and len(self._qualities) < MAX_MEASUREMENTS and missed < MAX_CONSECUTIVE_MISSES:
            if self._best[0] != base_selection:
                base_selection, missed = self._best[0], 0
                ops = high_precision_ops(self._groups, base_selection)
                waiting = cheaper_selections(self._groups, self._costs, ops, MAX_COST_RATIO)[::-1]
                waiting += self._replace_expensive_ops(ops) if self._is_greedy and self._predict is not None else []
            if (selection := self._next_untried(waiting, target_sqnr)) is None:
                break
            missed += not self._try_selection(selection).met
            waiting.append(selection)

    def _replace_expensive_ops(self, ops: Collection[OpKey]) -> list[Selection]:
        """Return cheaper selections that keep one of the most expensive `ops` on integers and others in float instead.

        Greedy steps never exchange ops. As estimates are uncertain, the errors may add up to more than those of `ops`.
        """
        groups, costs, max_cost = self._groups, self._costs, MAX_COST_RATIO * self._best[2]
        max_error = total_error(groups, self._best[0]) * 10 ** (UNCERTAIN_DB / 10)
        dearest = sorted(ops, key=lambda op: (-costs[op], op))[:MAX_REPLACED_OPS]
        chosen = [choose_selection(groups, {**costs, op: math.inf}, max_error, self._blocks) for op in dearest]
        cheaper = [entry for entry in chosen if selection_cost(groups, entry, costs) <= max_cost]
        return sorted(cheaper, key=lambda entry: -selection_cost(groups, entry, costs))

    def _next_untried(self, waiting: list[Selection], target_sqnr: float | None) -> Selection | None:
        """Next selection that was not measured, or one of equal cost after a near miss."""
        while waiting:
            selection = waiting.pop()
            if selection not in self._qualities:
                if target_sqnr is None or self._may_meet(selection, target_sqnr):
                    return selection
                continue
            if target_sqnr is not None and target_sqnr - NEAR_MISS_DB < self._qualities[selection].sqnr < target_sqnr:
                lighter = lighter_selection(self._groups, selection)
                waiting += [lighter] if lighter != selection else []
        return None

    def _may_meet(self, selection: Selection, target_sqnr: float) -> bool:
        """Return True if neither the estimate nor a run on few samples is clearly below the bound."""
        if self._predict_sqnr(selection) < target_sqnr - UNCERTAIN_DB:
            return False
        if self._predict is None or not self._is_greedy:
            return True
        best_selection, quality, _ = self._best
        change = self._predict(selection) - self._predict(best_selection)
        return quality.sqnr + change >= target_sqnr - PREDICTION_ERROR_DB

    def _predict_sqnr(self, selection: Selection) -> float:
        """Predict the SQNR in dB of a selection from the estimated errors and two measured plans.

        These are the best plan and the one with the nearest estimated error. The higher prediction counts.
        """
        error = total_error(self._groups, selection)
        gains = {
            other: 10 * math.log10(other_error / error)
            for other, quality in self._qualities.items()
            if error > 0 and math.isfinite(quality.sqnr) and (other_error := total_error(self._groups, other)) > 0
        }
        if self._best[0] not in gains:
            return math.inf
        nearest = min(gains, key=lambda other: abs(gains[other]))
        return max(self._qualities[other].sqnr + gains[other] for other in (nearest, self._best[0]))

    def _try_aim(self, aim: float) -> PlanQuality:
        """Measure the cheapest selection with an estimated SQNR of at least `aim` dB."""
        return self._try_selection(choose_selection(self._groups, self._costs, 10 ** (-aim / 10), self._blocks))

    def _try_selection(self, selection: Selection) -> PlanQuality:
        """Measure a selection once, and keep it if it is the best."""
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
    """Order of plans: those that meet the bound by cost, then the others by their distance."""
    return (not quality.met, price if quality.met else -quality.sqnr)


# Bit allocation needs no measured plans: sizes and errors of weights add up.


def allocate_weight_bits(groups: Sequence[ScaleGroup], max_bytes: float) -> Selection:
    """Choose the candidate of each group, by index, so that sizes add up to at most `max_bytes`, if possible.

    Starting with the smallest candidates, the step with the largest error reduction per byte is taken repeatedly, if it
    fits. Only candidates on the convex hull of size and error are used, so that the steps of a group come in order. The
    result is at most one step from the optimum.
    """
    selection, remaining_bytes = [], max_bytes
    upgrades: list[tuple[float, int, int]] = []
    for index, group in enumerate(groups):
        sizes_and_errors = [(candidate.size, candidate.error) for candidate in group.candidates]
        start = sizes_and_errors.index(min(sizes_and_errors))
        selection.append(start)
        remaining_bytes -= group.candidates[start].size
        upgrades += ((-ratio, index, candidate) for ratio, candidate in _hull_upgrades(group.candidates, start))
    for _, index, candidate in sorted(upgrades):
        extra_bytes = groups[index].candidates[candidate].size - groups[index].candidates[selection[index]].size
        if extra_bytes <= remaining_bytes:
            selection[index] = candidate
            remaining_bytes -= extra_bytes
    return tuple(selection)


def _hull_upgrades(candidates: Sequence[Candidate], start: int) -> Iterator[tuple[float, int]]:
    """Yield the steps along the convex hull: error reduction per byte, and the new candidate."""
    current = candidates[start]
    while ratios := [
        ((current.error - candidate.error) / (candidate.size - current.size), index)
        for index, candidate in enumerate(candidates)
        if candidate.size > current.size and candidate.error < current.error
    ]:
        ratio, index = max(ratios)
        yield ratio, index
        current = candidates[index]

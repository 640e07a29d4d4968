"""The cheapest ways for a wanted sum of errors."""

from __future__ import annotations

from itertools import combinations
from math import fsum
from typing import TYPE_CHECKING

from graphquant.accuracy.costs import LITTLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from graphquant.accuracy.costs import Group

    Place = tuple[str, str]
    Chosen = tuple[int, ...]

FEW = 12
"""Ops of which every set is tried."""

DEAREST = 32
"""Of more ops, how many may be given back in a look for cheaper ways."""

NEXT_TO_NOTHING = 0.05
"""Of a sum of errors: so much is lost among what estimates and chance are off by."""

ROUNDING = 1e-9
"""Of a sum of errors: that much more is as good."""


def choose(groups: Sequence[Group], costs: Mapping[Place, float], wanted: float) -> Chosen:
    """The way of each group, as its position, so that errors add up to `wanted` at most.

    Args:
        groups: What there is to choose for.
        costs: What each op costs in high precision.
        wanted: The sum of errors, as a share of the outputs.
    """
    ops = sorted({op for group in groups for op in group.ops})
    if len(ops) > FEW:
        return settle(groups, _greedy(groups, costs, wanted), wanted)
    best: tuple[float, Chosen] | None = None
    little = LITTLE * max(sum(costs.values()), 1.0)
    for price, some in _sets(ops, costs):
        if best is not None and price >= best[0]:
            break
        found = settle(groups, some, wanted)
        if total(groups, found) <= wanted * (1 + ROUNDING):
            beside = sum(way > 0 and not group.ops for group, way in zip(groups, found, strict=True))
            here = price + little * beside, found
            best = min(best or here, here)
    return best[1] if best is not None else settle(groups, frozenset(ops), wanted)


def cost(groups: Sequence[Group], chosen: Sequence[int], costs: Mapping[Place, float]) -> float:
    """What it costs: each op that multiplies on a group in high precision runs in that."""
    return fsum(costs[op] for op in high(groups, chosen))


def high(groups: Sequence[Group], chosen: Sequence[int]) -> frozenset[Place]:
    """The ops that run in high precision."""
    return frozenset(op for group, way in zip(groups, chosen, strict=True) if group.ways[way].high for op in group.ops)


def total(groups: Sequence[Group], chosen: Sequence[int]) -> float:
    """What the errors add up to."""
    return fsum(group.ways[way].error for group, way in zip(groups, chosen, strict=True))


def settle(groups: Sequence[Group], ops: frozenset[Place], wanted: float) -> Chosen:
    """The ways where `ops` run in high precision: as few as it takes are others than those that rules want.

    What only these ops multiply on is in high precision too, since nothing is gained by less. Of all else the largest
    gain comes first, until `wanted` is met, or nothing is left to gain.
    """
    free = [bool(group.ops) and group.ops <= ops for group in groups]
    chosen = [
        next((i for i, way in enumerate(group.ways) if way.high), 0) if now else 0
        for group, now in zip(groups, free, strict=True)
    ]
    error = total(groups, chosen)
    for gain, index, way in sorted(_gains(groups, chosen, free), key=lambda one: -one[0]):
        if error <= wanted:
            break
        chosen[index] = way
        error -= gain
    return tuple(chosen)


def _gains(groups: Sequence[Group], chosen: Sequence[int], free: Sequence[bool]) -> Iterator[tuple[float, int, int]]:
    """For each group that has one the best other way: the fall of its error, its position, the way's."""
    for index, group in enumerate(groups):
        allowed = [way for way, one in enumerate(group.ways) if free[index] or not group.ops or not one.high]
        best = min(allowed, key=lambda way: group.ways[way].error)
        gain = group.ways[chosen[index]].error - group.ways[best].error
        if gain > 0:
            yield gain, index, best


def cheaper(groups: Sequence[Group], costs: Mapping[Place, float], ops: frozenset[Place], worth: float) -> list[Chosen]:
    """Ways that cost less than those where `ops` run in high precision, those of least error first.

    Of few ops all sets are looked at; of many those with one op less.

    Args:
        groups: What there is to choose for.
        costs: What each op costs in high precision.
        ops: Ops that run in high precision.
        worth: By which factor less it must cost.
    """
    every = sorted({op for group in groups for op in group.ops})
    most = fsum(costs[op] for op in ops) * worth
    sets: Iterable[frozenset[Place]]
    if len(every) <= FEW:
        sets = [some for price, some in _sets(every, costs) if price <= most]
    else:
        sets = [ops - {op} for op in sorted(ops, key=lambda one: (-costs[one], one))[:DEAREST]]
    found = dict.fromkeys(settle(groups, some, 0.0) for some in sets)
    return sorted(found, key=lambda chosen: total(groups, chosen))


def lighter(groups: Sequence[Group], chosen: Chosen) -> Chosen:
    """The same, but what adds next to nothing as rules want it stays so, which costs no more."""
    least = NEXT_TO_NOTHING * total(groups, chosen)
    return tuple(0 if group.ways[0].error <= least else way for group, way in zip(groups, chosen, strict=True))


def _sets(ops: Sequence[Place], costs: Mapping[Place, float]) -> list[tuple[float, frozenset[Place]]]:
    """All sets of ops with their costs, the cheapest first."""
    every = [some for count in range(len(ops) + 1) for some in combinations(ops, count)]
    return sorted(((fsum(costs[op] for op in some), frozenset(some)) for some in every), key=lambda one: one[0])


def _greedy(groups: Sequence[Group], costs: Mapping[Place, float], wanted: float) -> frozenset[Place]:
    """By the largest fall of error for its cost, again and again; then ops are given back, the dearest first."""
    state = _State(groups)
    while state.error > wanted:
        best: tuple[float, int] | None = None
        for index, group in enumerate(groups):
            if index in state.left or not state.errors[index]:
                continue
            gain = fsum(state.errors[one] for one in state.freed(group.ops) | {index})
            ratio = gain / max(fsum(costs[op] for op in group.ops - state.high), LITTLE)
            if best is None or ratio > best[0]:
                best = ratio, index
        if best is None:
            break
        state.leave(best[1])
    for op in sorted(state.high, key=lambda one: (-costs[one], one)):
        state.give_back(op, wanted)
    return frozenset(state.high)


class _State:
    """The ops in high precision so far, what is left of the errors, and by how much each group's falls in that."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._by_op: dict[Place, list[int]] = {}
        for index, group in enumerate(groups):
            for op in group.ops:
                self._by_op.setdefault(op, []).append(index)
        lowest = [min(way.error for way in group.ways if not (way.high and group.ops)) for group in groups]
        self.errors = [low - min(way.error for way in group.ways) for low, group in zip(lowest, groups, strict=True)]
        self.high: set[Place] = set()
        self.left: set[int] = set()
        self.error = sum(lowest)

    def freed(self, ops: frozenset[Place]) -> set[int]:
        """The groups that nothing keeps quantized any more if `ops` run in high precision too."""
        touched = {index for op in ops for index in self._by_op[op]} - self.left
        return {index for index in touched if self._groups[index].ops <= self.high | ops}

    def leave(self, index: int) -> None:
        """Leaves a group float, with its ops and all that they alone kept quantized."""
        gone = self.freed(self._groups[index].ops) | {index}
        self.high |= self._groups[index].ops
        self.left |= gone
        self.error -= fsum(self.errors[one] for one in gone)

    def give_back(self, op: Place, wanted: float) -> None:
        """Lets `op` run on integers again, if the errors still add up to no more than `wanted`."""
        back = [index for index in self._by_op[op] if index in self.left]
        error = self.error + fsum(self.errors[index] for index in back)
        if error <= wanted:
            self.error = error
            self.left -= set(back)
            self.high.discard(op)


__all__ = ["cheaper", "choose", "cost", "high", "lighter", "settle", "total"]

"""The cheapest set of ops to run in float for a wanted sum of errors."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from graphquant.accuracy.costs import LITTLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphquant.accuracy.costs import Group

    Place = tuple[str, str]

FEW = 12
"""Ops of which every set is tried."""


def choose(groups: Sequence[Group], costs: Mapping[Place, float], wanted: float) -> list[int]:
    """The positions of the groups to leave float so that the errors of the others add up to `wanted` at most.

    Args:
        groups: What may be left.
        costs: What each op costs in float.
        wanted: The sum of errors, as a share of the outputs.
    """
    little = LITTLE * max(sum(costs.values()), 1.0)
    ops = sorted({op for group in groups for op in group.ops})
    if len(ops) <= FEW:
        return _exact(groups, costs, wanted, ops, little)
    return _greedy(groups, costs, wanted, little)


def cost(groups: Sequence[Group], left: Sequence[int], costs: Mapping[Place, float]) -> float:
    """What it costs to leave the groups `left` float: each op that multiplies on one of them runs in float."""
    return sum(costs[op] for op in sorted({op for index in left for op in groups[index].ops}))


def _exact(
    groups: Sequence[Group], costs: Mapping[Place, float], wanted: float, ops: Sequence[Place], little: float
) -> list[int]:
    """By trying all sets of ops."""
    best: tuple[float, list[int]] | None = None
    for count in range(len(ops) + 1):
        for some in combinations(ops, count):
            price = sum(costs[op] for op in some)
            if best is not None and price >= best[0]:
                continue
            left = _free(groups, frozenset(some), wanted)
            if left is None:
                continue
            price += little * sum(not groups[index].ops for index in left)
            if best is None or price < best[0]:
                best = price, left
    return best[1] if best is not None else list(range(len(groups)))


def _free(groups: Sequence[Group], floats: frozenset[Place], wanted: float) -> list[int] | None:
    """What to leave float where the ops `floats` are: what no other op needs, and as few others as it takes."""
    left = [index for index, group in enumerate(groups) if group.ops and group.ops <= floats]
    gone = set(left)
    error = sum(group.error for index, group in enumerate(groups) if index not in gone)
    beside = sorted((index for index, group in enumerate(groups) if not group.ops), key=lambda at: -groups[at].error)
    for index in beside:
        if error <= wanted:
            break
        left.append(index)
        error -= groups[index].error
    return sorted(left) if error <= wanted * (1 + 1e-9) else None


def _greedy(groups: Sequence[Group], costs: Mapping[Place, float], wanted: float, little: float) -> list[int]:
    """By the largest fall of error for its cost, again and again; then ops are given back, the dearest first."""
    state = _State(groups)
    while state.error > wanted:
        best: tuple[float, int] | None = None
        for index, group in enumerate(groups):
            if index in state.left or not group.error:
                continue
            freed = state.freed(group.ops) | {index}
            price = sum(costs[op] for op in group.ops - state.floats) or little
            ratio = sum(groups[one].error for one in freed) / price
            if best is None or ratio > best[0]:
                best = ratio, index
        if best is None:
            break
        state.leave(best[1])
    for op in sorted(state.floats, key=lambda one: (-costs[one], one)):
        state.give_back(op, wanted)
    return sorted(state.left)


class _State:
    """What is left float so far."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._by_op: dict[Place, list[int]] = {}
        for index, group in enumerate(groups):
            for op in group.ops:
                self._by_op.setdefault(op, []).append(index)
        self.floats: set[Place] = set()
        self.left: set[int] = set()
        self.error = sum(group.error for group in groups)

    def freed(self, ops: frozenset[Place]) -> set[int]:
        """The groups that nothing keeps quantized any more if `ops` run in float too."""
        touched = {index for op in ops for index in self._by_op[op]} - self.left
        return {index for index in touched if self._groups[index].ops <= self.floats | ops}

    def leave(self, index: int) -> None:
        """Leaves a group float, with its ops and all that they alone kept quantized."""
        gone = self.freed(self._groups[index].ops) | {index}
        self.floats |= self._groups[index].ops
        self.left |= gone
        self.error -= sum(self._groups[one].error for one in sorted(gone))

    def give_back(self, op: Place, wanted: float) -> None:
        """Lets `op` run on integers again, if the errors still add up to no more than `wanted`."""
        back = [index for index in self._by_op[op] if index in self.left]
        error = self.error + sum(self._groups[index].error for index in back)
        if error <= wanted:
            self.error = error
            self.left -= set(back)
            self.floats.discard(op)


__all__ = ["choose", "cost"]

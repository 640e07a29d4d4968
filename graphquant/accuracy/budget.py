"""The ways of weights that lose least within so many bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphquant.accuracy.choose import Chosen
    from graphquant.accuracy.costs import Group


def fit(groups: Sequence[Group], most: float) -> Chosen:
    """The way of each group, as its position, so that sizes add up to `most` at most, if they can.

    From the smallest ways on, the step to another that saves most errors for its bytes is taken, if it fits, again and
    again. Of each group only ways on the convex hull of sizes and errors are looked at, so that steps of one group come
    in their order; the outcome is at most one step from the best.
    """
    chosen = [min(range(len(group.ways)), key=lambda way: _rank(group, way)) for group in groups]
    left = most - sum(group.ways[way].size for group, way in zip(groups, chosen, strict=True))
    steps = sorted(
        (-ratio, index, way) for index, group in enumerate(groups) for ratio, way in _steps(group, chosen[index])
    )
    for _, index, way in steps:
        more = groups[index].ways[way].size - groups[index].ways[chosen[index]].size
        if more <= left:
            chosen[index] = way
            left -= more
    return tuple(chosen)


def _rank(group: Group, way: int) -> tuple[float, float]:
    return group.ways[way].size, group.ways[way].error


def _steps(group: Group, start: int) -> Iterator[tuple[float, int]]:
    """From the smallest way on, each step along the hull: what it saves for each byte, and to which way."""
    here = start
    while True:
        ratios = [
            ((group.ways[here].error - way.error) / (way.size - group.ways[here].size), index)
            for index, way in enumerate(group.ways)
            if way.size > group.ways[here].size and way.error < group.ways[here].error
        ]
        if not ratios:
            return
        ratio, here = max(ratios)
        yield ratio, here


__all__ = ["fit"]

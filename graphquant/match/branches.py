"""Which of the branches that an op joins is the longest."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphquant.ir import TensorRef
    from graphquant.match.around import Around

FARTHEST = 256
"""How many ops above each branch are looked at for the one where branches part."""


def lengths(around: Around, ends: list[TensorRef]) -> list[int]:
    """How many ops each of `ends` is away from the nearest op that all are computed from; 0 where there is none."""
    above = [_distances(around, end) for end in ends]
    common = [op for op in above[0] if all(op in other for other in above[1:])]
    if not common:
        return [0] * len(ends)
    nearest = min(common, key=lambda op: sum(other[op] for other in above))
    return [other[nearest] for other in above]


def _distances(around: Around, end: TensorRef) -> dict[tuple[str, str], int]:
    """The ops that `end` is computed from, the nearest `FARTHEST`, with the least number of steps to each."""
    found = {(end.graph, end.op): 0}
    queue = [(end.graph, end.op)]
    for here in queue:
        for read in around.model.graphs[here[0]].slots(here[1]):
            if len(found) >= FARTHEST:
                return found
            if read is not None and (read.graph, read.op) not in found and not around.parameters.is_parameter(read):
                found[read.graph, read.op] = found[here] + 1
                queue.append((read.graph, read.op))
    return found

"""Where ops are drawn: in layers, producers above their readers, with few crossings, in linear time.

The steps are Sugiyama's: edges that close a cycle are turned round, ops get layers (the longest path from the top, then
as near to their readers as they can be), tensors that pass layers get a place in each (one trunk for all readers of a
tensor), each layer is ordered by barycentres in a few sweeps, and x is what is nearest to the neighbours' without
overlaps. Ops of one group stay side by side in a layer. The same graph gives the same places, and a small change a
small one: all begins with the order of the ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphquant.ir import bulk

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

GAP = 24
"""Room between two ops of a layer, in units of the drawing."""

FRAME = 7
"""Room more for each frame that begins or ends between two ops of a layer."""

TRUNK = 10
"""Room that a passing tensor takes."""

LANE = 14
"""Room between two tensors that are led past everything, at the right."""

LANES = 12

SWEEPS = 4
"""How often the layers are ordered anew, at most."""

DEPTH = 12
"""Outermost groups that are kept together."""

TRUNKS = 2
"""Places of passing tensors, at most, for each op and tensor of the graph: longer ones are led past everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where ops and tensors are drawn.

    Attributes:
        layer: The layer of each op, 0 at the top.
        x: The middle of each op, in units of the drawing, from 0.
        trunks: For each tensor the x at which it passes each layer below its producer, as far as a reader needs it.
        lanes: For a tensor that is led past everything the x at which; -1 for the others.
        width: The right end of all.
    """

    layer: list[int]
    x: list[int]
    trunks: list[list[int]]
    lanes: list[int]
    width: int


@bulk()
def place(
    widths: Sequence[int], tensors: Sequence[tuple[int, Sequence[int]]], groups: Sequence[tuple[int, ...]]
) -> Placement:
    """Places for ops 0 to n - 1.

    Args:
        widths: The width of each op.
        tensors: For each tensor the op that makes it and those that read it.
        groups: For each op the groups that it is in, the outermost first.
    """
    readers: list[list[int]] = [[] for _ in widths]
    for source, targets in tensors:
        readers[source] += targets
    order, back = _order(readers)
    layer = _layers(readers, order, back)
    drawn = _Items(widths, tensors, groups, layer)
    rows = drawn.rows()
    _sort(rows, drawn)
    x = _abscissae(rows, drawn)
    left = min((at - wide / 2 for at, wide in zip(x, drawn.widths, strict=True)), default=0.0)
    right = max((at + wide / 2 for at, wide in zip(x, drawn.widths, strict=True)), default=0.0)
    whole = [round(at - left) for at in x]
    lanes, width = _lanes(drawn.long, len(tensors), round(right - left))
    return Placement(
        layer=layer,
        x=whole[: len(widths)],
        trunks=[[whole[item] for item in trunk] for trunk in drawn.trunks],
        lanes=lanes,
        width=width,
    )


def _order(readers: list[list[int]]) -> tuple[Iterable[int], set[tuple[int, int]]]:
    """Every op after those it reads, but for the edges that close a cycle, which come second."""
    if all(target > source for source, targets in enumerate(readers) for target in targets):
        return range(len(readers)), set()
    done, open_ = bytearray(len(readers)), bytearray(len(readers))
    back: set[tuple[int, int]] = set()
    order: list[int] = []
    for start in range(len(readers)):
        if done[start]:
            continue
        stack = [(start, iter(readers[start]))]
        done[start] = open_[start] = 1
        while stack:
            here, left = stack[-1]
            for target in left:
                if open_[target]:
                    back.add((here, target))
                elif not done[target]:
                    done[target] = open_[target] = 1
                    stack.append((target, iter(readers[target])))
                    break
            else:
                open_[here] = 0
                order.append(here)
                stack.pop()
    order.reverse()
    return order, back


def _layers(readers: list[list[int]], order: Iterable[int], back: set[tuple[int, int]]) -> list[int]:
    """The longest path from the top; then, from the bottom up, ops that read little move down to what reads them."""
    layer, reads = [0] * len(readers), [0] * len(readers)
    listed = list(order)
    for source in listed:
        below = layer[source] + 1
        for target in readers[source]:
            if back and (source, target) in back:
                continue
            reads[target] += 1
            layer[target] = max(layer[target], below)
    for source in reversed(listed):
        targets = readers[source]
        if not targets or len(targets) < reads[source]:
            continue
        if back:
            targets = [target for target in targets if (source, target) not in back]
        if targets:
            layer[source] = min(layer[target] for target in targets) - 1
    top = min(layer, default=0)
    return [one - top for one in layer]


class _Items:
    """What takes room in a layer: the ops, then a place for each layer that a tensor passes."""

    def __init__(
        self,
        widths: Sequence[int],
        tensors: Sequence[tuple[int, Sequence[int]]],
        groups: Sequence[tuple[int, ...]],
        layer: list[int],
    ) -> None:
        self.ops = len(widths)
        self.widths = list(widths)
        self.groups = list(groups)
        self.layer = list(layer)
        self.above: list[list[int]] = [[] for _ in widths]
        self.below: list[list[int]] = [[] for _ in widths]
        self.trunks: list[list[int]] = [[] for _ in tensors]
        self.deep: dict[int, int] = {}
        for path in dict.fromkeys(groups):
            for depth, group in enumerate(path):
                self.deep[group] = max(self.deep.get(group, 0), len(path) - depth)
        ends = [max((layer[target] for target in targets), default=0) for _, targets in tensors]
        spans = [end - layer[source] - 1 for end, (source, _) in zip(ends, tensors, strict=True)]
        self.long = self._too_long(spans, tensors)
        for number, (source, targets) in enumerate(tensors):
            if number not in self.long:
                self._lead(self.trunks[number], spans[number], source, targets)

    def _too_long(self, spans: list[int], tensors: Sequence[tuple[int, Sequence[int]]]) -> dict[int, tuple[int, int]]:
        """The tensors that get no trunk, the longest ones, with the layers between which they run."""
        left = TRUNKS * (self.ops + len(tensors))
        found: dict[int, tuple[int, int]] = {}
        passing = [number for number, span in enumerate(spans) if span > 0]
        if sum(spans[number] for number in passing) <= left:
            return found
        for number in sorted(passing, key=spans.__getitem__):
            left -= spans[number]
            if left < 0:
                top = self.layer[tensors[number][0]]
                found[number] = (top, top + spans[number] + 1)
        return found

    def _lead(self, trunk: list[int], span: int, source: int, targets: Sequence[int]) -> None:
        """Makes the trunk of one tensor and links it with its ends."""
        top, above = self.layer[source], source
        groups = self.groups[source]
        for passed in range(span):
            item = len(self.widths)
            self.widths.append(TRUNK)
            self.groups.append(groups)
            self.layer.append(top + passed + 1)
            self.above.append([above])
            self.below.append([])
            self.below[above].append(item)
            trunk.append(item)
            above = item
        for target in targets:
            passed = self.layer[target] - top - 1
            if passed >= 0:
                end = trunk[passed - 1] if passed else source
                self.below[end].append(target)
                self.above[target].append(end)

    def gaps(self, row: list[int]) -> list[int]:
        """The room before each item of a row: more where frames of groups end and begin between two ops."""
        gaps = [GAP] * len(row)
        gaps[0] = 0
        if not self.deep:
            return gaps
        for at in range(1, len(row)):
            one, other = row[at - 1], row[at]
            first, second = self.groups[one], self.groups[other]
            if first == second or one >= self.ops or other >= self.ops:
                continue
            shared = 0
            while shared < min(len(first), len(second)) and first[shared] == second[shared]:
                shared += 1
            frames = [self.deep[path[shared]] for path in (first, second) if len(path) > shared]
            gaps[at] = max(GAP, FRAME * (1 + sum(frames)))
        return gaps

    def rows(self) -> list[list[int]]:
        """The items of each layer, in the order of the ops; what passes stands where its tensor's producer does."""
        rows: list[list[int]] = [[] for _ in range(max(self.layer, default=-1) + 1)]
        for item, layer in enumerate(self.layer):
            rows[layer].append(item)
        return rows


def _sort(rows: list[list[int]], drawn: _Items) -> None:
    """Orders each layer by the mean place of its neighbours above, then below, until nothing changes."""
    place = [0] * len(drawn.widths)
    for row in rows:
        for number, item in enumerate(row):
            place[item] = number
    wide = [number for number, row in enumerate(rows) if len(row) > 1]
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        near = drawn.above if down else drawn.below
        changed = False
        for number in wide if down else reversed(wide):
            row = rows[number]
            key = {item: _mean(near[item], place, place[item]) for item in row}
            ordered = sorted(row, key=key.__getitem__)
            if len(row) > 2:  # noqa: PLR2004  # two are side by side anyway
                ordered = _together(ordered, key, drawn.groups, 0)
            if ordered != row:
                changed = True
                rows[number] = ordered
                for at, item in enumerate(ordered):
                    place[item] = at
        if not changed and sweep:
            break


def _mean(near: list[int], place: Sequence[float], default: float) -> float:
    if len(near) == 1:
        return place[near[0]]
    return sum([place[item] for item in near]) / len(near) if near else default


def _together(ordered: list[int], key: dict[int, float], groups: Sequence[tuple[int, ...]], depth: int) -> list[int]:
    """The same items, those of one group side by side, where the mean of the group is."""
    parts: dict[int, list[int]] = {}
    for item in ordered:
        path = groups[item]
        parts.setdefault(path[depth] if len(path) > depth else -1 - item, []).append(item)
    if len(parts) == len(ordered):
        return ordered
    inner = [
        _together(part, key, groups, depth + 1) if len(part) > 1 and depth < DEPTH else part for part in parts.values()
    ]
    inner.sort(key=lambda part: sum([key[item] for item in part]) / len(part))
    return [item for part in inner for item in part]


def _abscissae(rows: list[list[int]], drawn: _Items) -> list[float]:
    """The middle of each item: as near as may be to its neighbours above, then below, then above again."""
    x = [0.0] * len(drawn.widths)
    gaps = [drawn.gaps(row) for row in rows]
    for row, room in zip(rows, gaps, strict=True):
        at = 0.0
        for item, gap in zip(row, room, strict=True):
            x[item] = at + gap + drawn.widths[item] / 2
            at += gap + drawn.widths[item]
    for near, down in ((drawn.above, True), (drawn.below, False), (drawn.above, True)):
        for number in range(len(rows)) if down else reversed(range(len(rows))):
            row = rows[number]
            if len(row) == 1:
                item = row[0]
                x[item] = _mean(near[item], x, x[item])
            else:
                _settle(row, gaps[number], [_mean(near[item], x, x[item]) for item in row], drawn, x)
    return x


def _settle(row: list[int], gaps: list[int], wanted: list[float], drawn: _Items, x: list[float]) -> None:
    """The places nearest to the `wanted` ones, in squares, that keep order and `gaps` (pool adjacent violators)."""
    widths = drawn.widths
    offset = before = 0.0
    sums: list[float] = []  # of each block of items that touch
    counts: list[int] = []
    offsets = []
    for item, gap, want in zip(row, gaps, wanted, strict=True):
        half = widths[item] / 2
        offset += before + gap + half
        before = half
        offsets.append(offset)
        total, count = want - offset, 1
        while sums and sums[-1] * count > total * counts[-1]:
            total += sums.pop()
            count += counts.pop()
        sums.append(total)
        counts.append(count)
    number = 0
    for total, count in zip(sums, counts, strict=True):
        left = total / count
        for _ in range(count):
            x[row[number]] = left + offsets[number]
            number += 1


def _lanes(long: dict[int, tuple[int, int]], tensors: int, width: int) -> tuple[list[int], int]:
    """Lanes at the right for the tensors that have no trunk, taken in turn, and the width with them."""
    lanes = [-1] * tensors
    for number, tensor in enumerate(sorted(long, key=long.__getitem__)):
        lanes[tensor] = width + LANE * (1 + number % LANES)
    return lanes, width + LANE * min(len(long), LANES) + (LANE if long else 0)

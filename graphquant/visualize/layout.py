"""Layered graph layout in linear time, with few crossings.

The steps are Sugiyama's. Back edges of cycles are reversed. Ops get layers: the longest path from the top, then as
close to their readers as possible. A tensor that passes layers gets an item in each of them, one trunk for all of its
readers. A few barycenter sweeps order each layer. The x positions are as close to the neighbors as possible without
overlap. Ops of one group stay adjacent in a layer. The layout is deterministic, and starts from the order of the ops,
so small changes of a graph move little.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from graphquant.ir import paused_gc

OP_GAP = 24  # room between two ops of a layer, in drawing units
FRAME_GAP = 7  # extra room for each frame that begins or ends between two ops of a layer
TRUNK_WIDTH = 10  # room of a tensor that passes a layer
LANE_WIDTH = 14  # room between two lanes at the right
MAX_LANES = 12

MAX_SWEEPS = 4  # maximum number of ordering sweeps
MAX_GROUP_DEPTH = 12  # number of outermost group levels that are kept adjacent
MAX_TRUNK_ITEMS = 2  # maximum number of trunk items per op and tensor of the graph; longer tensors get a lane


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Positions of ops and tensors, and the width of the drawing."""

    layer: list[int]  # of each op, 0 at the top
    x: list[int]  # center of each op in drawing units, from 0
    trunks: list[list[int]]  # for each tensor its x in each layer below the producer, down to its last reader
    lanes: list[int]  # x of each tensor's lane, -1 without one
    width: int


@paused_gc()
def layered_layout(
    widths: Sequence[int], tensors: Sequence[tuple[int, Sequence[int]]], groups: Sequence[tuple[int, ...]]
) -> Placement:
    """Place ops with these widths. A tensor is its producer and its readers; groups of an op are outermost first."""
    readers: list[list[int]] = [[] for _ in widths]
    for source, targets in tensors:
        readers[source] += targets
    order, back_edges = _acyclic_order(readers)
    layer = _assign_layers(readers, order, back_edges)
    items = _LayoutItems(widths, tensors, groups, layer)
    rows = items.rows()
    _order_rows(rows, items)
    x = _x_positions(rows, items)
    boxes = list(zip(x, items.widths, strict=True))
    left_edge = min((center - width / 2 for center, width in boxes), default=0.0)
    right_edge = max((center + width / 2 for center, width in boxes), default=0.0)
    centers = [round(center - left_edge) for center in x]
    lanes, width, unrouted = [-1] * len(tensors), round(right_edge - left_edge), items.lanes
    for number, tensor in enumerate(sorted(unrouted, key=unrouted.__getitem__)):
        lanes[tensor] = width + LANE_WIDTH * (1 + number % MAX_LANES)
    total_width = width + LANE_WIDTH * min(len(unrouted), MAX_LANES) + (LANE_WIDTH if unrouted else 0)
    return Placement(
        layer=layer,
        x=centers[: len(widths)],
        trunks=[[centers[item] for item in trunk] for trunk in items.trunks],
        lanes=lanes,
        width=total_width,
    )


def _acyclic_order(readers: list[list[int]]) -> tuple[Iterable[int], set[tuple[int, int]]]:
    """Return a topological order, and the back edges that were ignored for it."""
    if all(target > source for source, targets in enumerate(readers) for target in targets):
        return range(len(readers)), set()
    import networkx as nx  # imported only if the ops are not in topological order

    graph = nx.from_dict_of_lists(dict(enumerate(readers)), nx.DiGraph)
    finished: dict[int, None] = {}
    back_edges: set[tuple[int, int]] = set()
    for source, target, kind in nx.dfs_labeled_edges(graph):
        if kind == "reverse":
            finished[target] = None
        elif kind == "nontree" and target not in finished:
            back_edges.add((source, target))
    return list(reversed(finished)), back_edges


def _assign_layers(readers: list[list[int]], order: Iterable[int], back_edges: set[tuple[int, int]]) -> list[int]:
    """Return the length of the longest path from the top to each op; ops with few inputs move down to their readers."""
    layer, reads = [0] * len(readers), [0] * len(readers)
    ordered = list(order)
    for source in ordered:
        next_layer = layer[source] + 1
        for target in readers[source]:
            if back_edges and (source, target) in back_edges:
                continue
            reads[target] += 1
            layer[target] = max(layer[target], next_layer)
    for source in reversed(ordered):
        targets = readers[source]
        if not targets or len(targets) < reads[source]:
            continue
        if back_edges:
            targets = [target for target in targets if (source, target) not in back_edges]
        if targets:
            layer[source] = min(layer[target] for target in targets) - 1
    top = min(layer, default=0)
    return [number - top for number in layer]


class _LayoutItems:
    """Items of the layers: ops, and one item for each layer that a tensor passes."""

    def __init__(
        self,
        widths: Sequence[int],
        tensors: Sequence[tuple[int, Sequence[int]]],
        groups: Sequence[tuple[int, ...]],
        layer: list[int],
    ) -> None:
        self.ops = len(widths)
        self.widths, self.groups, self.layer = list(widths), list(groups), list(layer)
        self.above: list[list[int]] = [[] for _ in widths]
        self.below: list[list[int]] = [[] for _ in widths]
        self.trunks: list[list[int]] = [[] for _ in tensors]
        self.group_heights: dict[int, int] = {}
        for path in dict.fromkeys(groups):
            for depth, group in enumerate(path):
                self.group_heights[group] = max(self.group_heights.get(group, 0), len(path) - depth)
        ends = [max((layer[target] for target in targets), default=0) for _, targets in tensors]
        spans = [end - layer[source] - 1 for end, (source, _) in zip(ends, tensors, strict=True)]
        self.lanes = self._choose_lanes(spans, tensors)
        for number, (source, targets) in enumerate(tensors):
            if number not in self.lanes:
                self._add_trunk(self.trunks[number], spans[number], source, targets)

    def _choose_lanes(
        self, spans: list[int], tensors: Sequence[tuple[int, Sequence[int]]]
    ) -> dict[int, tuple[int, int]]:
        """Return the longest tensors, which get lanes instead of trunks, with their first and last layer."""
        budget = MAX_TRUNK_ITEMS * (self.ops + len(tensors))
        chosen: dict[int, tuple[int, int]] = {}
        passing = [number for number, span in enumerate(spans) if span > 0]
        for number in sorted(passing, key=spans.__getitem__):
            budget -= spans[number]
            if budget < 0:
                top = self.layer[tensors[number][0]]
                chosen[number] = (top, top + spans[number] + 1)
        return chosen

    def _add_trunk(self, trunk: list[int], span: int, source: int, targets: Sequence[int]) -> None:
        """Add the trunk of one tensor, and link it with its ends."""
        top, above = self.layer[source], source
        groups = self.groups[source]
        for step in range(span):
            trunk.append(len(self.widths))
            self.widths.append(TRUNK_WIDTH)
            self.groups.append(groups)
            self.layer.append(top + step + 1)
            self.above.append([above])
            self.below.append([])
            self.below[above].append(trunk[-1])
            above = trunk[-1]
        for target in targets:
            step = self.layer[target] - top - 1
            if step >= 0:
                end = trunk[step - 1] if step else source
                self.below[end].append(target)
                self.above[target].append(end)

    def gaps(self, row: list[int]) -> list[int]:
        """Return the room before each item of a row; more if frames of groups begin or end there."""
        gaps = [0] + [OP_GAP] * (len(row) - 1)
        for position, (previous, item) in enumerate(pairwise(row if self.group_heights else ()), 1):
            first, second = self.groups[previous], self.groups[item]
            if first == second or previous >= self.ops or item >= self.ops:
                continue
            shared = 0
            while shared < min(len(first), len(second)) and first[shared] == second[shared]:
                shared += 1
            frames = [self.group_heights[path[shared]] for path in (first, second) if len(path) > shared]
            gaps[position] = max(OP_GAP, FRAME_GAP * (1 + sum(frames)))
        return gaps

    def rows(self) -> list[list[int]]:
        """Return the items of each layer, in the order of the ops."""
        rows: list[list[int]] = [[] for _ in range(max(self.layer, default=-1) + 1)]
        for item, layer in enumerate(self.layer):
            rows[layer].append(item)
        return rows


def _order_rows(rows: list[list[int]], items: _LayoutItems) -> None:
    """Order each layer by the mean position of its neighbors above, then below, until nothing changes."""
    positions = [0] * len(items.widths)
    for row in rows:
        for number, item in enumerate(row):
            positions[item] = number
    sortable = [number for number, row in enumerate(rows) if len(row) > 1]
    for sweep in range(MAX_SWEEPS):
        down = sweep % 2 == 0
        neighbors = items.above if down else items.below
        changed = False
        for number in sortable if down else reversed(sortable):
            row = rows[number]
            key = {item: _mean_position(neighbors[item], positions, positions[item]) for item in row}
            ordered = sorted(row, key=key.__getitem__)
            if len(row) > 2:  # noqa: PLR2004  # two items are adjacent anyway
                ordered = _group_adjacent(ordered, key, items.groups, 0)
            if ordered != row:
                changed = True
                rows[number] = ordered
                for position, item in enumerate(ordered):
                    positions[item] = position
        if not changed and sweep:
            break


def _mean_position(neighbors: list[int], positions: Sequence[float], default: float) -> float:
    if len(neighbors) == 1:
        return positions[neighbors[0]]
    return sum([positions[item] for item in neighbors]) / len(neighbors) if neighbors else default


def _group_adjacent(
    ordered: list[int], key: dict[int, float], groups: Sequence[tuple[int, ...]], depth: int
) -> list[int]:
    """Reorder items so that a group's items are adjacent, at the mean position of the group."""
    clusters: dict[int, list[int]] = {}
    for item in ordered:
        path = groups[item]
        clusters.setdefault(path[depth] if len(path) > depth else -1 - item, []).append(item)
    if len(clusters) == len(ordered):
        return ordered
    arranged = [
        _group_adjacent(cluster, key, groups, depth + 1) if len(cluster) > 1 and depth < MAX_GROUP_DEPTH else cluster
        for cluster in clusters.values()
    ]
    arranged.sort(key=lambda cluster: sum([key[item] for item in cluster]) / len(cluster))
    return [item for cluster in arranged for item in cluster]


def _x_positions(rows: list[list[int]], items: _LayoutItems) -> list[float]:
    """Return the center of each item, as near as possible to its neighbors."""
    x = [0.0] * len(items.widths)
    gaps = [items.gaps(row) for row in rows]
    for row, row_gaps in zip(rows, gaps, strict=True):
        right_edge = 0.0
        for item, gap in zip(row, row_gaps, strict=True):
            x[item] = right_edge + gap + items.widths[item] / 2
            right_edge += gap + items.widths[item]
    for neighbors, down in ((items.above, True), (items.below, False), (items.above, True)):
        for number in range(len(rows)) if down else reversed(range(len(rows))):
            row = rows[number]
            if len(row) == 1:
                item = row[0]
                x[item] = _mean_position(neighbors[item], x, x[item])
            else:
                _place_row(row, gaps[number], [_mean_position(neighbors[item], x, x[item]) for item in row], items, x)
    return x


def _place_row(row: list[int], gaps: list[int], targets: list[float], items: _LayoutItems, x: list[float]) -> None:
    """Minimize the squared distances from `targets` under the order and the gaps (pool adjacent violators)."""
    offset = before = 0.0
    sums: list[float] = []  # sums of the blocks of adjacent items
    counts: list[int] = []
    offsets = []
    for item, gap, target in zip(row, gaps, targets, strict=True):
        half_width = items.widths[item] / 2
        offset += before + gap + half_width
        before = half_width
        offsets.append(offset)
        total, count = target - offset, 1
        while sums and sums[-1] * count > total * counts[-1]:
            total += sums.pop()
            count += counts.pop()
        sums.append(total)
        counts.append(count)
    number = 0
    for total, count in zip(sums, counts, strict=True):
        start = total / count
        for _ in range(count):
            x[row[number]] = start + offsets[number]
            number += 1

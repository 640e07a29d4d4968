"""Where ops are drawn."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time

from hypothesis import given
from hypothesis import strategies as st

from graphquant.visualize.layout import OP_GAP, TRUNK_WIDTH, Placement, layered_layout

WIDE = 100


def _placed(tensors: list[tuple[int, list[int]]], ops: int, groups: list[tuple[int, ...]] | None = None) -> Placement:
    return layered_layout([WIDE] * ops, tensors, groups or [()] * ops)


def _chain(ops: int) -> list[tuple[int, list[int]]]:
    return [(number, [number + 1]) for number in range(ops - 1)]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, list[int]]], list[tuple[int, ...]]]:
    """Any graph, with cycles, loops on one op and ops by themselves."""
    ops = draw(st.integers(1, 12))
    some = st.integers(0, ops - 1)
    tensors = draw(st.lists(st.tuples(some, st.lists(some, max_size=4)), max_size=15))
    groups = draw(st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=ops, max_size=ops))
    return draw(st.lists(st.integers(10, 200), min_size=ops, max_size=ops)), tensors, groups


@given(graphs())
def test_nothing_overlaps_and_all_is_inside(graph: tuple) -> None:
    """In each layer ops and passing tensors have room beside each other, between 0 and the width."""
    widths, tensors, groups = graph
    found = layered_layout(widths, tensors, groups)
    rows: dict[int, list[tuple[float, float]]] = {}
    for layer, x, wide in zip(found.layer, found.x, widths, strict=True):
        rows.setdefault(layer, []).append((x - wide / 2, x + wide / 2))
    for (source, _), trunk in zip(tensors, found.trunks, strict=True):
        for layer, x in enumerate(trunk, found.layer[source] + 1):
            rows.setdefault(layer, []).append((x - TRUNK_WIDTH / 2, x + TRUNK_WIDTH / 2))
    assert min(found.layer) == 0
    for row in rows.values():
        row.sort()
        assert row[0][0] >= -1
        assert row[-1][1] <= found.width + 1
        assert all(right[0] - left[1] >= OP_GAP - 2 for left, right in itertools.pairwise(row))


@given(graphs())
def test_readers_are_below_what_they_read(graph: tuple) -> None:
    """Where there is no cycle each op is below all that it reads, and a trunk reaches the layer above the last one."""
    widths, tensors, groups = graph
    acyclic = [(source, [target for target in targets if target > source]) for source, targets in tensors]
    found = layered_layout(widths, acyclic, groups)
    for (source, targets), trunk, lane in zip(acyclic, found.trunks, found.lanes, strict=True):
        assert all(found.layer[target] > found.layer[source] for target in targets)
        span = max((found.layer[target] - found.layer[source] - 1 for target in targets), default=0)
        assert lane >= 0 or len(trunk) == span


def test_a_chain_is_a_straight_line() -> None:
    """One op per layer, one below the other."""
    found = _placed(_chain(5), 5)
    assert found.layer == [0, 1, 2, 3, 4]
    assert set(found.x) == {WIDE // 2}


def test_residual_blocks_do_not_drift() -> None:
    """However many blocks follow each other, the drawing is as wide as one."""

    def blocks(number: int) -> Placement:
        tensors = []
        for block in range(number):
            first = 3 * block
            tensors += [(first, [first + 1, first + 3]), (first + 1, [first + 2]), (first + 2, [first + 3])]
        return _placed(tensors, 3 * number + 1)

    assert blocks(200).width == blocks(1).width == 140


def test_an_input_stands_just_above_its_reader() -> None:
    """A second input that is read late is not at the top."""
    tensors = [*_chain(4), (4, [3])]
    assert _placed(tensors, 5).layer == [0, 1, 2, 3, 2]


def test_crossings_are_undone() -> None:
    """Two pairs that are given crossed are drawn side by side."""
    found = _placed([(0, [3]), (1, [2])], 4)
    assert (found.x[0] < found.x[1]) == (found.x[3] < found.x[2])


def test_a_loop_is_drawn_downwards_but_for_one_edge() -> None:
    """An edge that closes a cycle does not pull its reader down."""
    assert _placed([(0, [1]), (1, [2]), (2, [3]), (3, [1])], 4).layer == [0, 1, 2, 3]


def test_ops_of_a_group_stay_adjacent() -> None:
    """Six readers of one tensor, of two groups taken in turn, stand by groups, and by the groups in those."""
    groups = [(), (0, 2), (1, 4), (0, 3), (1, 5), (0, 2), (1, 4), (0, 3), (1, 5)]
    found = _placed([(0, list(range(1, 9)))], 9, groups)
    ordered = sorted(range(1, 9), key=found.x.__getitem__)
    assert [groups[op] for op in ordered] == [(0, 2), (0, 2), (0, 3), (0, 3), (1, 4), (1, 4), (1, 5), (1, 5)]


def test_a_change_at_the_end_moves_nothing_before_it() -> None:
    """An op more leaves the places of the others as they were."""
    tensors = [(0, [1, 2]), (1, [3]), (2, [3]), (3, [4])]
    before, after = _placed(tensors, 5), _placed([*tensors, (4, [5])], 6)
    assert after.x[:5] == before.x
    assert after.layer[:5] == before.layer


def test_long_tensors_get_lanes() -> None:
    """A tensor for each op that is read at the very end gets a lane at the right: the work stays in proportion."""
    ops = 400
    tensors = [*_chain(ops), *((number, [ops - 1]) for number in range(0, ops - 2, 2))]
    found = _placed(tensors, ops)
    led = [lane for lane in found.lanes if lane >= 0]
    assert 0 < len(led) < len(tensors)
    assert sum(map(len, found.trunks)) <= 2 * (ops + len(tensors))
    assert max(found.x) < min(led) <= max(led) < found.width


def test_no_ops() -> None:
    """An empty graph has an empty layout."""
    assert layered_layout([], [], []) == Placement(layer=[], x=[], trunks=[], lanes=[], width=0)


def test_time_is_linear() -> None:
    """Ten times the ops take at most twenty times as long."""

    def seconds(ops: int) -> float:
        spent = []
        for _ in range(3):
            started = time.process_time()
            _placed([(number, [number + 1, min(number + 4, ops - 1)]) for number in range(ops - 1)], ops)
            spent.append(time.process_time() - started)
        return min(spent)

    assert seconds(20_000) < 20 * max(seconds(2_000), 0.01)


def test_the_hash_seed_does_not_matter() -> None:
    """Two processes with different hash seeds place the ops of a graph with cycles alike."""
    code = (
        "from graphquant.visualize.layout import layered_layout;"
        "print(layered_layout([50] * 9, [(0, [3, 4]), (3, [5, 1]), (5, [0, 7]), (2, [8, 6])], [('a' < 'b',)] * 9))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1

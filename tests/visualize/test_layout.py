"""Layered layout of ops."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphquant.visualize.layout import OP_GAP, TRUNK_WIDTH, Placement, layered_layout

WIDE = 100


def _lay_out(tensors: list[tuple[int, list[int]]], ops: int, groups: list[tuple[int, ...]] | None = None) -> Placement:
    return layered_layout([WIDE] * ops, tensors, groups or [()] * ops)


def _chain_tensors(ops: int) -> list[tuple[int, list[int]]]:
    return [(number, [number + 1]) for number in range(ops - 1)]


@st.composite
def drawn_graphs(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, list[int]]], list[tuple[int, ...]]]:
    """Generate any graph, with cycles, self-loops and isolated ops."""
    ops = draw(st.integers(1, 12))
    op_numbers = st.integers(0, ops - 1)
    tensors = draw(st.lists(st.tuples(op_numbers, st.lists(op_numbers, max_size=4)), max_size=15))
    groups = draw(st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=ops, max_size=ops))
    return draw(st.lists(st.integers(10, 200), min_size=ops, max_size=ops)), tensors, groups


@given(drawn_graphs())
def test_nothing_overlaps_and_all_is_inside(graph: tuple) -> None:
    """Ops and trunks of a layer keep their distance and are within the width."""
    widths, tensors, groups = graph
    placement = layered_layout(widths, tensors, groups)
    rows: dict[int, list[tuple[float, float]]] = {}
    for layer, x, wide in zip(placement.layer, placement.x, widths, strict=True):
        rows.setdefault(layer, []).append((x - wide / 2, x + wide / 2))
    for (source, _), trunk in zip(tensors, placement.trunks, strict=True):
        for layer, x in enumerate(trunk, placement.layer[source] + 1):
            rows.setdefault(layer, []).append((x - TRUNK_WIDTH / 2, x + TRUNK_WIDTH / 2))
    assert min(placement.layer) == 0
    for row in rows.values():
        row.sort()
        assert row[0][0] >= -1
        assert row[-1][1] <= placement.width + 1
        assert all(right[0] - left[1] >= OP_GAP - 2 for left, right in itertools.pairwise(row))


@given(drawn_graphs())
def test_consumers_are_below_producers(graph: tuple) -> None:
    """Without cycles each op is below its producers, and a trunk reaches the layer above the last consumer."""
    widths, tensors, groups = graph
    acyclic = [(source, [target for target in targets if target > source]) for source, targets in tensors]
    placement = layered_layout(widths, acyclic, groups)
    for (source, targets), trunk, lane in zip(acyclic, placement.trunks, placement.lanes, strict=True):
        assert all(placement.layer[target] > placement.layer[source] for target in targets)
        span = max((placement.layer[target] - placement.layer[source] - 1 for target in targets), default=0)
        assert lane >= 0 or len(trunk) == span


def test_chain_is_a_straight_line() -> None:
    """A chain has one op per layer, all at one position."""
    placement = _lay_out(_chain_tensors(5), 5)
    assert placement.layer == [0, 1, 2, 3, 4]
    assert set(placement.x) == {WIDE // 2}


def test_residual_blocks_do_not_drift() -> None:
    """The width does not depend on the number of residual blocks."""

    def blocks(number: int) -> Placement:
        tensors = []
        for block in range(number):
            first = 3 * block
            tensors += [(first, [first + 1, first + 3]), (first + 1, [first + 2]), (first + 2, [first + 3])]
        return _lay_out(tensors, 3 * number + 1)

    assert blocks(200).width == blocks(1).width == 140


def test_input_is_just_above_its_consumer() -> None:
    """An input that is read late is in the layer above its consumer."""
    tensors = [*_chain_tensors(4), (4, [3])]
    assert _lay_out(tensors, 5).layer == [0, 1, 2, 3, 2]


def test_crossings_are_removed() -> None:
    """Two crossed pairs are placed side by side."""
    placement = _lay_out([(0, [3]), (1, [2])], 4)
    assert (placement.x[0] < placement.x[1]) == (placement.x[3] < placement.x[2])


def test_loop_has_one_upward_edge() -> None:
    """The edge that closes a cycle does not affect the layers."""
    assert _lay_out([(0, [1]), (1, [2]), (2, [3]), (3, [1])], 4).layer == [0, 1, 2, 3]


def test_ops_of_a_group_stay_adjacent() -> None:
    """Consumers of one tensor are ordered by group and nested group."""
    groups = [(), (0, 2), (1, 4), (0, 3), (1, 5), (0, 2), (1, 4), (0, 3), (1, 5)]
    placement = _lay_out([(0, list(range(1, 9)))], 9, groups)
    ordered = sorted(range(1, 9), key=placement.x.__getitem__)
    assert [groups[op] for op in ordered] == [(0, 2), (0, 2), (0, 3), (0, 3), (1, 4), (1, 4), (1, 5), (1, 5)]


def test_appended_op_moves_no_other() -> None:
    """An op appended at the end does not move the others."""
    tensors = [(0, [1, 2]), (1, [3]), (2, [3]), (3, [4])]
    before, after = _lay_out(tensors, 5), _lay_out([*tensors, (4, [5])], 6)
    assert after.x[:5] == before.x
    assert after.layer[:5] == before.layer


def test_long_tensors_get_lanes() -> None:
    """Many long tensors get lanes at the right, so that the number of trunk points stays linear."""
    ops = 400
    tensors = [*_chain_tensors(ops), *((number, [ops - 1]) for number in range(0, ops - 2, 2))]
    placement = _lay_out(tensors, ops)
    lanes = [lane for lane in placement.lanes if lane >= 0]
    assert 0 < len(lanes) < len(tensors)
    assert sum(map(len, placement.trunks)) <= 2 * (ops + len(tensors))
    assert max(placement.x) < min(lanes) <= max(lanes) < placement.width


def test_no_ops() -> None:
    """An empty graph has an empty layout."""
    assert layered_layout([], [], []) == Placement(layer=[], x=[], trunks=[], lanes=[], width=0)


@pytest.mark.slow
def test_time_is_linear() -> None:
    """A graph of ten times the size takes at most twenty times as long."""

    def seconds(ops: int) -> float:
        durations = []
        for _ in range(3):
            started = time.process_time()
            _lay_out([(number, [number + 1, min(number + 4, ops - 1)]) for number in range(ops - 1)], ops)
            durations.append(time.process_time() - started)
        return min(durations)

    assert seconds(10_000) < 20 * max(seconds(1_000), 0.01)


def test_layout_does_not_depend_on_the_hash_seed() -> None:
    """Processes with different hash seeds compute the same layout."""
    code = (
        "from graphquant.visualize.layout import layered_layout;"
        "print(layered_layout([50] * 9, [(0, [3, 4]), (3, [5, 1]), (5, [0, 7]), (2, [8, 6])], [('a' < 'b',)] * 9))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1

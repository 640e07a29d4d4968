"""The state of the scale solver: sites that are divided, merged, raised and shared."""

from dataclasses import replace

import numpy as np
import pytest
from support.plans import make_plan

from graphquant.ir import Graph, Model, Op, Output, TensorRef, Use
from graphquant.numerics import IntType, Range, qparams_from_scale
from graphquant.quantize import Site, SkipCode
from graphquant.quantize.solver_state import SolverState, format_range, format_values
from graphquant.rules import ObserverConfig, Scheme

INT8 = Scheme(name="w", dtype="int8", narrow=True, observe=ObserverConfig(name="absmax"), family="onnx-qdq")
WEIGHT = TensorRef("", "w")


def weight_site(*readers, **changes):
    """A site of the weight `w` that these ops read."""
    uses = tuple(Use("", reader, 1) for reader in readers)
    return replace(Site(tensor=WEIGHT, uses=uses, graph="", scheme=INT8, parameter=True), **changes)


def start_state(*sites, **scales):
    """The state for a plan of sites; a keyword such as s0=0.5 gives the scale of the site at index 0."""
    model = Model(format="onnx")
    graph = model.graphs[""] = Graph("", model.graphs)
    graph.add_op(Op(name="w", kind="constant", type="Constant", roles=(), outputs=(Output("w", "float32", (2,)),)))
    state = SolverState(model, make_plan(*sites))
    for name, scale in scales.items():
        state.params[int(name[1:])] = qparams_from_scale(
            np.float32(scale),
            np.zeros(np.shape(scale), np.int32),
            IntType.parse("int8"),
            axis=0 if np.ndim(scale) else None,
        )
    return state


MANY = [f"r{k}" for k in range(33)]
CLONE = weight_site("clone", clone_of=Use("", "a", 1))


@pytest.mark.parametrize(
    ("sites", "expected"),
    [
        ([weight_site("a", "b")], True),
        ([weight_site("a", "b", parameter=False)], False),
        ([weight_site("a", "b", tie=(Use("", "c", 0),))], False),
        ([weight_site("a", "b", clone_of=Use("", "c", 0))], False),
        ([weight_site(*MANY[:32])], True),
        ([weight_site(*MANY)], False),
        ([weight_site("a", "b"), CLONE], False),
        ([weight_site("a", "b"), replace(CLONE, range=(0.0, 1.0))], True),
    ],
)
def test_a_weight_with_few_independent_uses_is_divisible(sites, expected):
    """Ties, clones that follow, and more than 32 readers keep one scale for all uses."""
    assert start_state(*sites).is_divisible(0) is expected


def test_a_shared_weight_is_not_divisible():
    """Sites that share a scale are raised together."""
    state = start_state(weight_site("a", "b"), weight_site("c"))
    state.shared_groups.update(dict.fromkeys((0, 1), (0, 1)))
    assert (state.is_divisible(0), state.scale_group(0)) == (False, (0, 1))


@pytest.mark.parametrize(
    ("changes", "movable", "is_weight"),
    [
        ({}, True, True),
        ({"scale": (0.5,)}, False, True),
        ({"scheme": replace(INT8, observe=ObserverConfig(name="fixed-point", exponent=-4))}, False, True),
        ({"scheme": Scheme(dtype="int8", range="learned", zero="asymmetric", family="fake-quant")}, False, True),
        ({"parameter": False}, True, False),
    ],
)
def test_one_site_decides_for_its_group(changes, movable, is_weight):
    """A scale may move if every site of the group may; the group is one of weights if every site is a weight."""
    state = start_state(weight_site("a"), weight_site("b", **changes), weight_site("c"))
    state.shared_groups.update(dict.fromkeys((0, 1), (0, 1)))
    assert [state.is_movable(index) for index in range(3)] == [movable, movable, True]
    assert [state.is_weight_group(index) for index in range(3)] == [is_weight, is_weight, True]


def test_a_copy_starts_with_the_values_of_its_site():
    """The copy has the use, scale, range and notes; the site keeps its other uses."""
    state = start_state(weight_site("a", "b", "c"), s0=0.5)
    state.ranges[0] = Range(np.float64(-1), np.float64(1))
    assert state.split_use(0, Use("", "b", 1)) == 1
    assert [[use.op for use in site.uses] for site in state.sites] == [["a", "c"], ["b"]]
    assert [state.index_by_use[Use("", name, 1)] for name in "abc"] == [0, 1, 0]
    assert (state.params[1], state.ranges[1], state.notes) == (state.params[0], state.ranges[0], {})


def test_copies_with_equal_scales_are_merged():
    """Copies join the original or an earlier copy of the same scale; planned sites with equal scales stay apart."""
    state = start_state(weight_site("z"), weight_site("a", "b", "c", "d", "e"), s0=0.5, s1=0.5)
    for index, name in enumerate("bcde", 2):
        assert state.split_use(1, Use("", name, 1)) == index
    for index, scale in ((3, 0.25), (4, 0.25), (5, 0.125)):
        state.params[index] = replace(state.params[0], scale=np.float32(scale))
        state.add_note(index, f"note {index}")
    state.add_note(2, "copy of no use")
    state.ranges[5] = Range(np.float64(-1), np.float64(1))
    state.merge_equal_copies()
    assert [[use.op for use in site.uses] for site in state.sites] == [["z"], ["a", "b"], ["c", "d"], ["e"]]
    assert [state.index_by_use[Use("", name, 1)] for name in "zabcde"] == [0, 1, 1, 2, 2, 3]
    assert {index: float(params.scale) for index, params in state.params.items()} == {0: 0.5, 1: 0.5, 2: 0.25, 3: 0.125}
    assert state.notes == {2: ("note 3",), 3: ("note 5",)}
    assert state.ranges.keys() == {3}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tensor": TensorRef("", "v")},
        {"graph": "body"},
        {"scheme": replace(INT8, narrow=False)},
        {"axis": 0},
        {"view": (2,)},
        {"rule": "another"},
    ],
)
def test_copies_of_unlike_sites_are_not_merged(changes):
    """Sites must agree in all but their scales. The uses of a merged copy have the order of the plan."""
    state = start_state(weight_site("b", "c"), weight_site("d", "a", **changes), s0=0.5, s1=0.5)
    for index, name in enumerate("ca"):
        copy_index = state.split_use(index, Use("", name, 1))
        state.params[copy_index] = replace(state.params[0], scale=np.float32(0.25))
    state.merge_equal_copies()
    uses = [[use.op for use in site.uses] for site in state.sites]
    assert uses == [["b"], ["d"], *([["c"], ["a"]] if changes else [["c", "a"]])]


def test_a_skipped_copy_moves_with_its_skip():
    """A skipped copy is never merged. It moves up if an earlier copy was."""
    state = start_state(weight_site("a", "b", "c"), s0=0.5)
    for name in "bc":
        state.split_use(0, Use("", name, 1))
    state.skip_site(2, SkipCode.RANGE, "a reason")
    state.merge_equal_copies()
    assert [[use.op for use in site.uses] for site in state.sites] == [["a", "b"], ["c"]]
    assert (state.params.keys(), state.skips.keys()) == ({0}, {1})


def test_a_copy_that_differs_keeps_its_position():
    """A copy without an equal is not moved, and its notes stay."""
    state = start_state(weight_site("a", "b"), s0=0.5)
    state.params[state.split_use(0, Use("", "b", 1))] = replace(state.params[0], scale=np.float32(0.25))
    state.add_note(1, "raised")
    state.merge_equal_copies()
    assert [float(state.params[index].scale) for index in range(2)] == [0.5, 0.25]
    assert (len(state.sites), state.notes) == (2, {1: ("raised",)})


def test_scales_only_grow():
    """Each channel gets the larger scale, in all sites that share it and have one. Only those are noted."""
    state = start_state(weight_site("a"), weight_site("b"), weight_site("c"), s0=(1.0, 4.0), s1=(1.0, 4.0))
    state.shared_groups.update(dict.fromkeys((0, 1, 2), (0, 1, 2)))
    state.raise_scale(0, np.array([2.0, 2.0], np.float32), "a reason")
    assert {index: params.scale.tolist() for index, params in state.params.items()} == {0: [2.0, 4.0], 1: [2.0, 4.0]}
    assert state.notes == {0: ("a reason",), 1: ("a reason",)}
    assert [(change.tensor, change.message) for change in state.changes] == [(WEIGHT, "a reason")]


def test_a_restored_state_is_that_of_the_snapshot():
    """Copies, raised scales and what was noted on them are gone; new ones can be made."""
    state = start_state(weight_site("a", "b"), s0=0.5)
    state.ranges[0], params, use = Range(np.float64(-1), np.float64(1)), state.params[0], Use("", "b", 1)
    for _ in range(2):
        snapshot = state.snapshot()
        state.raise_scale(state.split_use(0, use), np.float32(2), "a reason")
        state.restore(snapshot)
        assert [site.uses for site in state.sites] == [(Use("", "a", 1), use)]
        assert (state.index_by_use[use], state.params, state.ranges.keys()) == (0, {0: params}, {0})
        assert (state.notes, state.changes) == ({}, [])


def test_several_values_are_formatted_by_their_ends():
    """Scales of channels are shown as the smallest and the largest one, ranges as the range that contains all."""
    assert format_values(np.array([0.5, 2.0, 0.25])) == "0.25..2"
    assert format_values(np.array([0.5, 0.5])) == "0.5"
    assert format_range(Range(np.array([-1.0, -2.0]), np.array([3.0, 4.0]))) == "[-2, 4]"

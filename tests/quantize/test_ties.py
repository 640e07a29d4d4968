"""Ties: limits of a Clip, pairs before Clips, Concats that stay float, and the scale that tied sites share."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from support.onnx_models import load_onnx
from support.plans import make_plan

from graphquant.ir import Graph, Model, Op, Output, Parameters, TensorRef, Use
from graphquant.numerics import IntType, Range, qparams_from_scale
from graphquant.observers import sketch_values
from graphquant.quantize import Site, Skip, SkipCode, saturates_like_clip, solve_scales
from graphquant.quantize.solver_state import SolverState
from graphquant.quantize.ties import clip_limits, share_scales
from graphquant.rules import ObserverConfig, Scheme

UINT8 = Scheme(name="act", dtype="uint8", zero="asymmetric", family="onnx-qdq")
INT8 = Scheme(name="int", dtype="int8", family="onnx-qdq")
CHANNEL = replace(INT8, per="channel")
FLOAT32_EPSILON = 2.0**-23


def site_of(name, *uses, scheme=UINT8, **changes):
    """Return a site of a tensor of the main graph; `uses` are written op[slot]."""
    reads = tuple(Use("", op, int(slot.rstrip("]"))) for op, slot in (use.split("[") for use in uses))
    return Site(tensor=TensorRef("", name), uses=reads, graph="", scheme=scheme, **changes)


def ties_to(*uses):
    """Return the ties of a site to other uses, written op[slot]."""
    return {"tie": site_of("", *uses).uses}


def solve_with_ends(model, sites, *, skips=(), **ends):
    """Solve the scales of sites for tensors with these lowest and highest values."""
    sketches = {TensorRef("", name): sketch_values(np.array(values)) for name, values in ends.items()}
    return solve_scales(model, make_plan(*sites, skips=skips), sketches)


def scales(solution):
    """Return the scale of each site that is quantized."""
    return {index: pytest.approx(params.scale.tolist()) for index, params in solution.params.items()}


@pytest.mark.parametrize(
    ("op", "limits"),
    [
        ("Clip(x, low, high)", (-1.0, 2.0)),
        ("Clip(x, , high)", (-np.inf, 2.0)),
        ("Clip(x, low)", (-1.0, np.inf)),
        ("Clip(x, high, high)", (2.0, 2.0)),
        ("Clip(x, high, low)", None),
        ("Clip(x, runtime, high)", None),
        ("Clip(x, low, runtime)", None),
        ("Clip(x, integer, high)", None),
        ("Clip(x, pair, high)", None),
        ("Clip(x, zero, six)", (0.0, 6.0)),
        ("Relu(x)", (0.0, np.inf)),
        ("Neg(x)", None),
    ],
)
def test_limits_of_a_clip(tmp_path, op, limits):
    """Limits are constants, and infinite if they are omitted. Other limits are unknown."""
    constants = {name: np.float32(value) for name, value in {"low": -1, "high": 2, "zero": 0, "six": 6}.items()}
    constants |= {"integer": np.int64(-1), "pair": np.zeros(2, np.float32)}
    model = load_onnx(tmp_path, f"g (float[4] x, float runtime) => (float[4] y) {{ y = {op} }}", constants)
    assert clip_limits(model, Parameters(model), TensorRef("", "y")) == limits


@pytest.mark.parametrize(
    ("attributes", "limits"),
    [("min = -1.0, max = 2.0", (-1.0, 2.0)), ("max = 2.0", (-np.inf, 2.0)), ("min = -1.0", (-1.0, np.inf))],
)
def test_limits_in_attributes_of_a_clip(tmp_path, attributes, limits):
    """Before opset 11 the limits are attributes."""
    text = f"g (float[4] x) => (float[4] y) {{ y = Clip<{attributes}>(x) }}"
    model = load_onnx(tmp_path, text, opset=10)
    assert clip_limits(model, Parameters(model), TensorRef("", "y")) == limits


@pytest.mark.parametrize(("excess", "saturates"), [(0.0, True), (FLOAT32_EPSILON, True), (2 * FLOAT32_EPSILON, False)])
@pytest.mark.parametrize("end", ["low", "high"])
def test_integers_may_exceed_a_clip_by_a_rounding_error(end, excess, saturates):
    """The range of the integers may end beyond a limit by at most the distance of float32 numbers near 1."""
    params = qparams_from_scale(np.float32(2.0**-7), np.int32(0), IntType.parse("int8"))  # -1 to 127 / 128
    limits = (-1.0 + excess, 1.0) if end == "low" else (-1.0, 127 / 128 - excess)
    assert saturates_like_clip(params, limits) is saturates


CLIPPED = "g (float[4] x) => (float z, float v) { c = Neg(x) y = Clip(c, low, high) z = Abs(y) v = Exp(y) }"
FUSED = Skip(tensor=TensorRef("", "c"), uses=(Use("", "y", 0),), rule="fuse", reason="fused with y", fused=True)
PER_CHANNEL_PAIR = {"scheme": replace(CHANNEL, dtype="uint8"), "axis": 0}


@pytest.mark.parametrize(
    ("sites", "skip", "added"),
    [
        ([site_of("y", "z[0]", "v[0]")], FUSED, 1),
        ([site_of("y", "z[0]"), site_of("y", "v[0]", **ties_to("z[0]"))], FUSED, 1),
        ([site_of("y", "z[0]", "v[0]")], replace(FUSED, fused=False), 0),  # the rule wants float
        ([site_of("y", "z[0]")], FUSED, 0),  # a float reader needs the Clip
        ([site_of("y", "z[0]"), site_of("y", "v[0]", scale=(0.25,))], FUSED, 0),  # two scales
        ([site_of("y", "z[0]", "v[0]", **PER_CHANNEL_PAIR)], FUSED, 0),
        ([site_of("y", "z[0]", "v[0]"), site_of("c", "y[0]")], FUSED, 0),  # it has one already
        ([site_of("x", "c[0]"), site_of("y", "z[0]", "v[0]")], FUSED, 1),
    ],
)
def test_a_pair_before_a_clip(tmp_path, sites, skip, added):
    """A Clip that the integers do not replace gets its pair before it too, if that pair serves all of its readers."""
    model = load_onnx(tmp_path, CLIPPED, {"low": np.float32(-1), "high": np.float32(1)})
    solution = solve_with_ends(model, sites, skips=(skip,), x=(-2.0, 2.0), c=(-2.0, 2.0), y=(-1.0, 1.0))
    assert len(solution.plan.sites) == len(sites) + added
    output = next(index for index, site in enumerate(sites) if site.tensor.op == "y")
    pair_changes = [change.tensor.op for change in solution.changes]
    assert pair_changes == ["c"] * added
    if not added:
        expected_notes = {output} if len(sites) == 1 and sites[0].uses == site_of("y", "z[0]").uses else set()
        assert {index for index, notes in solution.notes.items() if "fused" in notes[-1]} == expected_notes
        return
    pair = solution.plan.sites[-1]
    assert (pair.tensor, pair.uses, pair.tie) == (skip.tensor, skip.uses, (Use("", "z", 0),))
    assert (pair.rule, pair.why, pair.graph) == (skip.rule, skip.reason, "")
    assert solution.params[len(sites)] is solution.params[output]
    assert "y is not fused" in solution.notes[output][-1]
    assert "pair of y:0" in solution.notes[len(sites)][-1]
    assert solution.plan.skips == ()


@pytest.mark.parametrize(
    "given",
    [{"scale": (0.5,), "zero_point": (3,)}, {"range": (-1.0, 3.0)}, {"scale": (0.5,), "clone_of": Use("", "c", 0)}],
)
def test_the_pair_before_a_clip_takes_its_scale_from_the_tie(tmp_path, given):
    """The pair before a Clip is added once, and does not repeat the values that the plan gives the output."""
    model = load_onnx(tmp_path, CLIPPED, {"low": np.float32(-1), "high": np.float32(1)})
    sites = site_of("y", "z[0]", "v[0]", **given), site_of("x", "c[0]", scale=(1.0,))
    solution = solve_with_ends(model, sites, skips=(FUSED, FUSED))
    *_, pair = solution.plan.sites
    assert len(solution.plan.sites) == 3
    assert (pair.scale, pair.zero_point, pair.range, pair.clone_of) == (None, None, None, None)
    assert solution.params[2] is solution.params[0]


def test_the_pair_before_a_clip_is_in_the_graph_of_its_tensor(tmp_path):
    """The pair after the Clip is in the branch that reads it. The pair before the Clip is where the Clip is."""
    branches = "then_branch = th () => (float e) { e = Abs(y) }, else_branch = el () => (float f) { f = Exp(x) }"
    text = f"g (bool p, float[4] x) => (float z) {{ c = Neg(x) y = Clip(c, low, high) z = If(p) <{branches}> }}"
    model = load_onnx(tmp_path, text, {"low": np.float32(-1), "high": np.float32(1)})
    uses = tuple(model.main.consumers(TensorRef("", "y")))
    site = replace(site_of("y"), uses=uses, graph=uses[0].graph)
    solution = solve_with_ends(model, [site], skips=(FUSED,), y=(-1.0, 1.0))
    assert [entry.graph for entry in solution.plan.sites] == [uses[0].graph, ""]


def test_a_clip_whose_output_stays_float_gets_no_pair(tmp_path):
    """No sample reached the output, so it has no pair to repeat."""
    model = load_onnx(tmp_path, CLIPPED, {"low": np.float32(-1), "high": np.float32(1)})
    solution = solve_with_ends(model, [site_of("y", "z[0]", "v[0]")], skips=(FUSED,))
    assert (len(solution.plan.sites), solution.params, solution.plan.skips) == (1, {}, (FUSED,))


def test_a_clip_that_integers_replace_gets_no_pair(tmp_path):
    """The range of the integers ends at both limits."""
    model = load_onnx(tmp_path, CLIPPED, {"low": np.float32(-2), "high": np.float32(2)})
    solution = solve_with_ends(model, [site_of("y", "z[0]", "v[0]", range=(-1.0, 1.0))], skips=(FUSED,))
    assert (len(solution.plan.sites), solution.notes, solution.plan.skips) == (1, {}, (FUSED,))


@pytest.mark.parametrize("value_range", ["observed", "given", "learned"])
def test_a_range_that_is_given_is_not_repeated_before_a_clip(value_range):
    """In TensorFlow, ops whose range is an input or is trained have no fixed params to repeat."""
    model = merges("x; c: x; y: c; z: y", model_format="tensorflow", y="relu6")
    scheme = Scheme(name="act", dtype="int8", zero="asymmetric", family="fake-quant", range=value_range)
    plan = make_plan(site_of("y", "z[0]", scheme=scheme), skips=(FUSED,), format="tensorflow")
    solution = solve_scales(model, plan, {TensorRef("", "y"): sketch_values(np.array([-1.0, 1.0]))})
    assert len(solution.plan.sites) == (2 if value_range == "observed" else 1)
    given_range = Range(np.float64(-1.0), np.float64(1.0)) if value_range == "given" else None
    assert solution.params[0].op_range == given_range


@pytest.mark.parametrize(
    ("high", "largest", "expected"),
    [(2.0**-5 * 255, 2.0**-5 * 255, 2.0**-5), (1.0, 1.5, np.float32(1.5 / 255)), (5.3, 5.3, None)],
)
def test_the_scale_of_a_clip_is_rounded_down(tmp_path, high, largest, expected):
    """Only an excess over the Clip's limit by rounding makes the scale smaller, also with a zero point."""
    model = load_onnx(tmp_path, CLIPPED, {"low": np.float32(0), "high": np.float32(high)})
    scheme = replace(UINT8, dtype="int8")
    solution = solve_with_ends(model, [site_of("y", "z[0]", "v[0]", scheme=scheme)], y=(0.0, np.float32(largest)))
    if expected is None:
        rounded = np.float32(np.float64(np.float32(high)) / 255)
        assert float(rounded) * 255 > float(np.float32(high))
        expected = np.nextafter(rounded, np.float32(0))
    assert solution.params[0].scale == expected


JOIN = "g (float[1,2,3,3] a, float[1,2,3,3] b) => (float r) { c = Concat<axis = 1>(a, b) READERS }"


def solve_join(folder, readers="r = Relu(c)", small=(0.0, 1.0), largest=255.0, second=None, **output_fields):
    """Solve a Concat of one input up to `largest` and one with the ends `small`; return the solution."""
    model = load_onnx(folder, JOIN.replace("READERS", readers), {"k": np.ones((1, 4, 1, 1), np.float32)})
    sites = [site_of("a", "c[0]"), second or site_of("b", "c[1]"), site_of("c", "r[0]", **output_fields)]
    if readers != "r = Relu(c)":
        sites[2] = replace(sites[2], uses=(Use("", readers.split(" = ")[0], 0),))
    return solve_with_ends(model, sites, a=(0.0, largest), b=small, c=(0.0, largest))


@pytest.mark.parametrize(
    ("small", "skipped"),
    [
        ((0.0, 15.9), True),
        ((0.0, 16.0), False),
        ((0.0, 16.5), False),
        ((0.0, 0.0), False),
        ((8.0, 16.0), False),
        ((-16.0, -8.0), False),
        ((-15.0, -8.0), True),
        ((-8.0, 8.0), False),
    ],
)
def test_sixteen_integers_behind_a_concat(tmp_path, small, skipped):
    """An input must span 16 integers of the output's scale, counted from 0.0. Zeros need none."""
    solution = solve_join(tmp_path, small=small)
    assert solution.skips.keys() == ({0, 1, 2} if skipped else set())
    assert solution.ranges.keys() == (set() if skipped else {0, 1, 2})


def test_the_reason_names_the_input_of_a_concat(tmp_path):
    """The reason has the narrow input, the number of integers that it would span, and the Concat."""
    for skip in solve_join(tmp_path, small=(0.0, 8.0), largest=510.0).skips.values():
        assert re.findall(r"\w:0|\d\.\d|\w$", skip.reason) == ["b:0", "4.0", "c"]


@pytest.mark.parametrize("field", [{"range": (0.0, 255.0)}, {"scale": (1.0,)}])
def test_a_concat_whose_plan_gives_the_range(tmp_path, field):
    """A range or scale in the plan is a decision, which keeps the Concat quantized."""
    assert solve_join(tmp_path, **field).skips == {}


@pytest.mark.parametrize(
    ("readers", "skipped"),
    [
        ("r = Conv(c, k)", False),
        ("m = Transpose(c) r = Conv(m, k)", False),
        ("m = Relu(c) r = Conv(m, k)", True),
        ("m = Transpose(c) r = Relu(m)", True),
    ],
)
def test_a_product_behind_a_concat(tmp_path, readers, skipped):
    """A product that reads the values of the Concat, moved or not, keeps it quantized."""
    assert bool(solve_join(tmp_path, readers).skips) is skipped


@pytest.mark.parametrize(
    ("targets", "op", "quantized"),
    [
        (("qnn",), "Conv(x, k)", True),
        (("vitis_ai",), "MatMul(x, m)", True),
        (("onnxruntime",), "Conv(x, k)", True),
        (("onnxruntime",), "MatMul(x, m)", False),  # its kernel may write floats
        (("openvino",), "Conv(x, k)", False),
        ((), "Conv(x, k)", False),
        (("qnn",), "Sigmoid(x)", False),
    ],
)
@pytest.mark.parametrize("clamp", ["", "Relu", "Clip"])
def test_results_of_weighted_ops_before_a_float_concat(tmp_path, targets, op, quantized, clamp):
    """An input of a float Concat is quantized with its own scale if the op that computes it needs that."""
    clamped = f"p = {op} a = {clamp}(p)" if clamp else f"a = {op}"
    text = f"g (float[1,2,2,2] x, float[1,2,2,2] b) => (float r) {{ {clamped} c = Concat<axis = 1>(a, b) r = Relu(c) }}"
    values = {"k": np.ones((2, 2, 1, 1), np.float32), "m": np.ones((2, 2), np.float32)}
    sites = site_of("a", "c[0]"), site_of("b", "c[1]"), site_of("c", "r[0]", **ties_to("c[0]", "c[1]"))
    spans = {"a": 255.0, "b": 1.0, "c": 255.0}
    sketches = {TensorRef("", name): sketch_values(np.array([0.0, span])) for name, span in spans.items()}
    solution = solve_scales(load_onnx(tmp_path, text, values), make_plan(*sites, targets=targets), sketches)
    assert scales(solution) == ({0: 1.0} if quantized else {})
    assert solution.skips.keys() == ({1, 2} if quantized else {0, 1, 2})


def test_tensors_behind_a_float_concat_share_no_scale_with_those_before_it(tmp_path):
    """Ties through a Concat that stays float hold no more."""
    ops = "a = Transpose(x) c = Concat<axis = 1>(a, b) d = Concat<axis = 1>(c, e) r = Relu(d)"
    model = load_onnx(tmp_path, f"g (float[2,2] x, float[2,2] b, float[2,2] e) => (float r) {{ {ops} }}")
    sites = [
        site_of("x", "a[0]"),
        site_of("a", "c[0]", **ties_to("a[0]")),
        site_of("b", "c[1]"),
        site_of("c", "d[0]", **ties_to("c[0]", "c[1]")),
        site_of("e", "d[1]"),
        site_of("d", "r[0]", **ties_to("d[0]", "d[1]")),
    ]
    ends = {"x": 51.0, "a": 51.0, "b": 1.0, "c": 51.0, "e": 255.0, "d": 255.0}
    solution = solve_with_ends(model, sites, **{name: (0.0, high) for name, high in ends.items()})
    assert scales(solution) == {0: 0.2, 4: 1.0, 5: 1.0}


def test_the_widest_channel_counts_behind_a_concat(tmp_path):
    """An input with a range per channel spans as many integers as its widest channel."""
    second = site_of("b", "c[1]", scheme=replace(UINT8, per="channel"), axis=1, range=(0.0, 1.0))
    assert solve_join(tmp_path, second=second).skips.keys() == {0, 1, 2}
    model = load_onnx(tmp_path, JOIN.replace("READERS", "r = Relu(c)"))
    sites = site_of("a", "c[0]"), replace(second, range=None), site_of("c", "r[0]")
    sketches = {TensorRef("", name): sketch_values(np.array([0.0, 255.0])) for name in ("a", "c")}
    sketches[TensorRef("", "b")] = sketch_values(np.array([[0.0, 0.0], [1.0, 40.0]]), 1)
    assert solve_scales(model, make_plan(*sites), sketches).skips == {}


def test_concats_without_quantized_inputs(tmp_path):
    """A Concat of float inputs has no narrow one."""
    model = load_onnx(tmp_path, JOIN.replace("READERS", "r = Relu(c)"))
    assert solve_with_ends(model, [site_of("c", "r[0]")], c=(0.0, 1.0)).params.keys() == {0}
    sites = [site_of("a", "c[0]"), site_of("c", "r[0]")]
    assert solve_with_ends(model, sites, c=(0.0, 1.0)).params.keys() == {1}  # no sample reached the input


def test_a_concat_that_a_subgraph_reads(tmp_path):
    """A product in a branch is no reason to keep the Concat quantized: the branch may not run."""
    branches = "then_branch = th () => (float e) { e = Conv(c, k) }, else_branch = el () => (float f) { f = Relu(c) }"
    text = JOIN.replace("(float[1", "(bool p, float[1", 1).replace("READERS", f"r = If(p) <{branches}>")
    model = load_onnx(tmp_path, text, {"k": np.ones((1, 4, 1, 1), np.float32)})
    uses = tuple(model.main.consumers(TensorRef("", "c")))
    sites = [site_of("a", "c[0]"), site_of("b", "c[1]"), replace(site_of("c"), uses=uses)]
    assert solve_with_ends(model, sites, a=(0.0, 255.0), b=(0.0, 1.0), c=(0.0, 255.0)).skips.keys() == {0, 1, 2}


def merges(text, *, model_format="onnx", **kinds):
    """Return a model of ops `name: inputs` on float vectors. `kinds` has the kind of an op if it is not "merge"."""
    model = Model(format=model_format)
    graph = model.graphs[""] = Graph("", model.graphs)
    tensors = {}
    for line in text.split(";"):
        name, _, inputs = line.strip().partition(":")
        reads = [tensors[read] for read in inputs.split()]
        kind = kinds.get(name, "merge" if reads else "input")
        op = Op(name=name, kind=kind, type=kind, roles=(), outputs=(Output("", "float32", (2,)),))
        tensors[name] = graph.add_op(op, reads)
    return model


JOINED = merges("a; b; c: a b; d: c")


def joined_sites(*schemes, **fields):
    """Return sites for the inputs `a` and `b` of a merge and its output `c`, which is tied to both."""
    rules = ("first", "second", "join")
    sites = [site_of("a", "c[0]"), site_of("b", "c[1]"), site_of("c", "d[0]", **ties_to("c[0]", "c[1]"))]
    return [
        replace(site, scheme=scheme, rule=rule, **fields.get(site.tensor.op, {}))
        for site, scheme, rule in zip(sites, schemes, rules, strict=True)
    ]


ENDS = {"a": (0.0, 2.55), "b": (-1.28, 1.27), "c": (-1.28, 2.55)}


@pytest.mark.parametrize(
    ("schemes", "groups", "conflicts"),
    [
        ((UINT8, UINT8, UINT8), [{0, 1, 2}], []),
        ((UINT8, INT8, INT8), [{0}, {1, 2}], [("a", "c")]),
        ((UINT8, INT8, UINT8), [{1}, {0, 2}], [("b", "c")]),
        ((UINT8, UINT8, INT8), [{2}, {0, 1}], [("b", "c")]),
        ((UINT8, INT8, replace(INT8, narrow=True)), [{0}, {1}, {2}], [("a", "c"), ("b", "c")]),
    ],
)
def test_each_tie_between_different_schemes_is_a_conflict(schemes, groups, conflicts):
    """Sites of one scheme share a scale. A tied site has a conflict with each other scheme that it is tied to."""
    solution = solve_with_ends(JOINED, joined_sites(*schemes), **ENDS)
    indices_by_params = {}
    for index, params in solution.params.items():
        indices_by_params.setdefault(id(params), set()).add(index)
    assert sorted(indices_by_params.values(), key=lambda group: (len(group), group)) == groups
    assert [tuple(tensor.op for tensor in conflict.tensors) for conflict in solution.conflicts] == conflicts
    assert {conflict.rules[1] for conflict in solution.conflicts} <= {"join"}
    differing_notes = [note for note in solution.notes.get(2, ()) if "scheme differs" in note]
    assert [re.findall(r"\w:0", note) for note in differing_notes] == [[first + ":0"] for first, _ in conflicts]
    assert not any("scheme differs" in note for index in (0, 1) for note in solution.notes.get(index, ()))


def test_a_shared_scale_is_explained_by_the_tie_of_its_scheme():
    """`c` is tied to `a`, whose scale it shares, and to `b`, whose scale it does not share."""
    notes = solve_with_ends(JOINED, joined_sites(UINT8, INT8, UINT8), **ENDS).notes
    assert [re.findall(r"\w:0|'\w+'", note) for note in notes[2]] == [["a:0", "'join'"], ["b:0"]]
    assert [re.findall(r"\w:0|'\w+'", note) for note in notes[0]] == [["c:0", "'join'"]]


def test_a_tie_to_a_float_tensor_is_no_conflict():
    """Without a scale of its own, the other tensor contradicts nothing."""
    ends = {name: values for name, values in ENDS.items() if name != "a"}
    solution = solve_with_ends(JOINED, joined_sites(UINT8, INT8, INT8), **ends)
    assert (solution.params.keys(), solution.conflicts) == ({1, 2}, ())
    del ends["c"]
    solution = solve_with_ends(JOINED, joined_sites(INT8, INT8, UINT8), **ends)
    assert (solution.params.keys(), solution.conflicts) == ({1}, ())


def test_conflicts_describe_both_schemes():
    """The type, its symmetry, what narrows its values and its granularity are named."""
    narrow = replace(INT8, narrow=True, scale="power-of-two")
    (conflict,) = solve_with_ends(JOINED, joined_sites(UINT8, UINT8, narrow), **ENDS).conflicts
    assert conflict.wants[0] == "uint8 asymmetric per tensor"
    assert conflict.wants[1].startswith("int8 symmetric, narrow, powers of two per tensor")
    assert conflict.rules == ("second", "join")


@pytest.mark.parametrize("other", [{"range": "given"}, {"family": "quantize-and-dequantize-v2"}])
def test_ops_that_compute_their_scales_in_different_ways_share_none(other):
    """In TensorFlow, tied tensors keep their scales if only one has a fixed range, or only one a zero point."""
    model = merges("a; b: a; c: b", model_format="tensorflow")
    scheme = Scheme(name="act", dtype="uint8", zero="asymmetric", family="fake-quant")
    sites = [
        site_of("a", "b[0]", scheme=scheme),
        site_of("b", "c[0]", scheme=replace(scheme, **other), **ties_to("b[0]")),
    ]
    sketches = {TensorRef("", name): sketch_values(np.array([0.0, high])) for name, high in (("a", 1.0), ("b", 2.0))}
    solution = solve_scales(model, make_plan(*sites, format="tensorflow"), sketches)
    assert scales(solution) == {0: 1 / 255, 1: 2 / 255}
    assert len(solution.conflicts) == 1


def test_ranges_of_blocks_are_not_kept(tmp_path):
    """The scales of a blockwise weight are solved at once. Its ranges would take as much memory again."""
    text = "g (float[1,2] x) => (float[1,2] y) { y = MatMul(x, w) }"
    model = load_onnx(tmp_path, text, {"w": np.full((2, 2), 127, np.float32)}, opset=21)
    scheme = replace(INT8, per="block", block_size=2, observe=ObserverConfig(name="absmax"))
    solution = solve_with_ends(model, [site_of("w", "y[1]", scheme=scheme, axis=0, parameter=True)])
    assert (solution.params[0].scale.tolist(), solution.ranges) == ([[1.0, 1.0]], {})


def test_channels_share_no_scale():
    """Tied sites per channel keep the scales of their own channels."""
    sites = joined_sites(CHANNEL, CHANNEL, CHANNEL, **{name: {"axis": 0} for name in "abc"})
    solution = solve_with_ends(JOINED, sites, a=(0.0, 127.0), b=(0.0, 254.0), c=(0.0, 381.0))
    assert scales(solution) == {0: [1.0, 1.0], 1: [2.0, 2.0], 2: [3.0, 3.0]}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"c": {"scale": (0.5,), "zero_point": (3,)}}, {0: 0.5, 1: 0.5, 2: 0.5}),
        ({"a": {"scale": (0.5,)}}, {0: 0.5, 1: 0.5, 2: 0.5}),
    ],
)
def test_a_scale_of_the_plan_for_a_group(fields, expected):
    """The scale that a plan gives one tied site is that of all, with the rule of the tie."""
    solution = solve_with_ends(JOINED, joined_sites(UINT8, UINT8, UINT8, **fields), **ENDS)
    assert (scales(solution), solution.conflicts) == (expected, ())
    (given,) = (f"{name}:0" for name in fields)
    assert all(given in note and "'join'" in note for notes in solution.notes.values() for note in notes)
    assert solution.notes.keys() == {0, 1, 2} - {"abc".index(*fields)}


def test_a_scale_of_the_plan_does_not_reach_untied_tensors_without_data():
    """The input of a tie needs data for itself; only what is tied to it takes its scale without data."""
    given_scale = {"c": {"scale": (0.5,)}}
    solution = solve_with_ends(JOINED, joined_sites(UINT8, UINT8, UINT8, **given_scale), b=ENDS["b"])
    assert scales(solution) == {1: 0.5, 2: 0.5}
    assert {index: skip.code for index, skip in solution.skips.items()} == {0: SkipCode.RANGE}


@pytest.mark.parametrize(
    ("second", "is_conflict"),
    [
        ({"scale": (0.5,), "zero_point": (3,)}, False),
        ({"scale": (0.5,), "zero_point": (4,)}, True),
        ({"scale": (0.25,), "zero_point": (3,)}, True),
    ],
)
def test_two_scales_of_the_plan_for_a_group(second, is_conflict):
    """Tied sites keep the scales that the plan gives them. Different ones are a conflict with the rule of the tie."""
    fields = {"a": {"scale": (0.5,), "zero_point": (3,)}, "c": second}
    solution = solve_with_ends(JOINED, joined_sites(UINT8, UINT8, UINT8, **fields), **ENDS)
    assert scales(solution) == {0: 0.5, 1: 0.5, 2: second["scale"][0]}
    expected = [(("", "join"), (TensorRef("", "c"), TensorRef("", "a")))] if is_conflict else []
    assert [(conflict.rules, conflict.tensors) for conflict in solution.conflicts] == expected
    assert (2 in solution.notes) is is_conflict


FIXED = ObserverConfig(name="fixed", low=0.0, high=255.0)


@pytest.mark.parametrize(("high", "is_fixed"), [(255.5, True), (256.0, False)])
@pytest.mark.parametrize("fixed", [{"range": (0.0, 255.0)}, {"scheme": replace(UINT8, observe=FIXED)}])
def test_exactly_half_a_step_beyond_a_fixed_range(fixed, high, is_fixed):
    """A range of a rule or of the plan holds for tied tensors that exceed it by at most half a step of 1.0."""
    sites = joined_sites(UINT8, UINT8, UINT8)
    sites[1] = replace(sites[1], **fixed)
    solution = solve_with_ends(JOINED, sites, a=(0.0, 1.0), b=(0.0, 255.0), c=(0.0, high))
    assert scales(solution) == dict.fromkeys(range(3), 1.0 if is_fixed else high / 255)
    expected = [] if is_fixed else [(("second", "join"), (TensorRef("", "b"), TensorRef("", "c")))]
    assert [(conflict.rules, conflict.tensors) for conflict in solution.conflicts] == expected


@pytest.mark.parametrize(("low", "is_fixed"), [(-128.5, True), (-129.0, False)])
def test_half_a_step_of_signed_integers(low, is_fixed):
    """A step is the fixed range divided by all integers of the type, negative ones too."""
    scheme = replace(UINT8, dtype="int8")
    sites = joined_sites(scheme, scheme, scheme, a={"range": (-128.0, 127.0)})
    solution = solve_with_ends(JOINED, sites, b=(0.0, 1.0), c=(low, 1.0))
    assert scales(solution) == dict.fromkeys(range(3), 1.0 if is_fixed else (127 - low) / 255)


@pytest.mark.parametrize("given", [{"range": (0.0, 2.55)}, {"scale": (0.01,)}])
def test_a_tied_site_with_a_range_of_the_plan_needs_no_source(given):
    """It stays quantized if the tensor that it is tied to stays float, and so do the sites tied to it."""
    model = merges("a; b: a; c: b; d: c")
    sites = [
        site_of("a", "b[0]"),
        site_of("b", "c[0]", **ties_to("b[0]"), **given),
        site_of("c", "d[0]", **ties_to("c[0]")),
    ]
    assert scales(solve_with_ends(model, sites, c=(0.0, 2.55))) == {1: 0.01, 2: 0.01}


def test_a_tie_to_a_tensor_without_a_site():
    """A site that is tied to a float tensor alone stays float. A range of its own keeps it quantized."""
    model, tied_site = merges("a; b: a; c: b"), site_of("b", "c[0]", **ties_to("b[0]"))
    assert solve_with_ends(model, [tied_site], b=(0.0, 1.0)).skips[0].code is SkipCode.TIE
    assert solve_with_ends(model, [replace(tied_site, range=(0.0, 1.0))]).params.keys() == {0}


def test_tied_sites_stay_equal_when_one_is_raised():
    """A larger scale for one tied site is that of all. Sites of another scheme keep theirs."""
    state = SolverState(JOINED, make_plan(*joined_sites(UINT8, INT8, UINT8)))
    state.ranges = dict.fromkeys(range(3), Range(np.float64(0.0), np.float64(255.0)))
    share_scales(state)
    state.raise_scale(0, np.float32(4.0), "test")
    assert [float(state.params[index].scale) for index in range(3)] == [4.0, pytest.approx(255 / 127), 4.0]


@pytest.mark.parametrize(("ends", "high"), [((-1.0, 2.55), 2.55), ((-1.0, -0.5), None)])
def test_unsigned_integers_without_a_zero_point_start_at_zero(ends, high):
    """TensorFlow's QuantizeAndDequantize has no zero point: values below 0.0 are clipped, and 0.0 is exact."""
    model = merges("a; b: a", model_format="tensorflow")
    scheme = Scheme(name="act", dtype="uint8", family="quantize-and-dequantize-v2")
    plan = make_plan(site_of("a", "b[0]", scheme=scheme), format="tensorflow")
    solution = solve_scales(model, plan, {TensorRef("", "a"): sketch_values(np.array(ends))})
    assert (float(solution.params[0].scale), int(solution.params[0].zero_point)) == (
        pytest.approx(1.0 if high is None else high / 255),
        0,
    )

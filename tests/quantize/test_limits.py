"""Limits of the hardware on scales: which limits ops have, and how scales are raised to meet them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from support.onnx_models import load_onnx
from support.plans import make_plan

import graphquant as gq
from graphquant.formats.onnx import load
from graphquant.ir import Graph, Model, Op, Output, TensorRef, Use
from graphquant.numerics import QParams, Range, qparams_from_scale
from graphquant.quantize import Site, power_of_two_position
from graphquant.quantize.limits import SOFTMAX_STEPS, BiasFitLimit, find_hardware_limits, meet_limits
from graphquant.quantize.solver_state import SolverState
from graphquant.rules import ObserverConfig, Scheme

if TYPE_CHECKING:
    from pathlib import Path

SHIFTING = Scheme(name="dpu", dtype="int8", scale="power-of-two", shifts="dpu", family="onnx-qdq")
INT8 = Scheme(name="int", dtype="int8", family="onnx-qdq")
CHANNEL = replace(INT8, per="channel")
BIAS = Scheme(name="bias", dtype="int32", observe=ObserverConfig(name="bias"), family="onnx-qdq")
INT32_MAX = 2**31 - 1
CONSTANTS = {
    "w": np.eye(4, dtype=np.float32),
    "v": np.eye(4, dtype=np.float32),
    "b": np.ones(4, np.float32),
    "b2": np.ones((2, 4), np.float32),
    "b3": np.ones((1, 4), np.float32),
    "k": np.ones((4, 4, 1, 1), np.float32),
}


def uses_of(text):
    """Return uses of the main graph, written op[slot] and separated by spaces."""
    return tuple(Use("", op, int(slot)) for op, slot in re.findall(r"(\w+)\[(\d)\]", text))


def state_of(folder, text, scales, *, constants=None, shared=(), **fields):
    """Return a solver state of a graph, whose every use of a tensor in `scales` is quantized with that scale.

    Args:
        folder: The folder for the model's file.
        text: The text of the graph.
        scales: Scale for each tensor; a tuple has one scale per channel.
        constants: Values of constants other than `CONSTANTS`.
        shared: Names of tensors that share their scale.
        fields: Other fields of the sites, by tensor.
    """
    values = CONSTANTS | {name: np.asarray(value, np.float32) for name, value in (constants or {}).items()}
    read = set(re.findall(r"\w+", text))
    model = load_onnx(folder, f"g {text}", {name: value for name, value in values.items() if name in read})
    sites = []
    for name in scales:
        tensor = TensorRef("", name)
        site_fields = {"uses": tuple(model.main.consumers(tensor)), "parameter": name in values, "scheme": SHIFTING}
        site = Site(tensor=tensor, graph="", rule=name.upper(), **(site_fields | fields.get(name, {})))
        sites.append(site)
    state = SolverState(model, make_plan(*sites))
    for index, (site, scale) in enumerate(zip(sites, scales.values(), strict=True)):
        if scale is not None:
            zero_point = np.zeros(np.shape(scale), np.int32)
            state.params[index] = qparams_from_scale(np.float32(scale), zero_point, site.scheme.type, axis=site.axis)
        state.ranges[index] = Range(np.float64(-1.0), np.float64(1.0))
    group = tuple(index for index, site in enumerate(sites) if site.tensor.op in shared)
    state.shared_groups.update(dict.fromkeys(group, group))
    return state


def state_at(folder, text, *, shared=(), constants=None, fields=None, **positions):
    """Return a solver state whose tensors have scales of 2**-position."""
    scales = {name: 2.0**-position for name, position in positions.items()}
    return state_of(folder, text, scales, shared=shared, constants=constants, **(fields or {}))


def positions_of(state):
    """Return the position of each tensor, or those of its copies."""
    values = {}
    for index, site in enumerate(state.sites):
        values.setdefault(site.tensor.op, []).append(power_of_two_position(state.params.get(index)))
    return {name: positions[0] if len(positions) == 1 else positions for name, positions in values.items()}


def read_limits(state):
    """Return the uses that each limit on shifts adds and subtracts, with its largest sum."""
    return [
        (" ".join(map(str, limit.positive_uses)), " ".join(map(str, limit.negative_uses)), limit.max_shift)
        for limit in find_hardware_limits(state)
    ]


GEMM = "(float[2,4] x) => (float[2,4] z) { y = Gemm(x, w, b) z = Neg(y) }"
SUM = "(float[2,4] x, float[2,4] t) => (float[2,4] z) { y = Add(x, t) z = Neg(y) }"
PRODUCT = SUM.replace("Add", "Mul")
CUT = [("z[0]", "y[1] y[0]", 0), ("y[1] y[0]", "z[0]", 16)]


@pytest.mark.parametrize(
    ("text", "tensors", "expected"),
    [
        (GEMM, "x w b y", [*CUT, ("y[1] y[0]", "y[2]", 15)]),
        (GEMM, "x w y", CUT),
        (GEMM, "x w b", []),
        (GEMM, "x b y", []),
        (GEMM.replace(", b", ""), "x w y", CUT),
        (
            "(float[1,4,2,2] x) => (float[1,4,2,2] z) { y = Conv(x, k, b) z = Neg(y) }",
            "x k b y",
            [*CUT, ("y[1] y[0]", "y[2]", 15)],
        ),
        (
            SUM,
            "x t y",
            [
                ("y[0]", "y[1]", 7),
                ("z[0]", "y[0]", 7),
                ("y[1]", "y[0]", 7),
                ("z[0]", "y[1]", 7),
                ("y[0] y[1]", "z[0]", 25),
            ],
        ),
        (SUM, "x y", [("z[0]", "y[0]", 7), ("y[0]", "z[0]", 25)]),
        (PRODUCT, "x t y", [("z[0]", "y[0] y[1]", 0), ("y[0] y[1]", "z[0]", 32)]),
        (PRODUCT, "y", []),
        (PRODUCT.replace("Mul", "Sub"), "x t y", []),
        (PRODUCT.replace("Mul(x, t)", "Concat<axis = 0>(x, t)"), "x t y", []),
    ],
)
def test_limits_of_each_op(tmp_path, text, tensors, expected):
    """Products, sums and weighted ops with quantized inputs and output have the limits of AMD's DPU."""
    assert read_limits(state_at(tmp_path, text, **dict.fromkeys(tensors.split(), 0))) == expected


@pytest.mark.parametrize("other", ["x", "t", "y"])
def test_ops_with_a_scale_of_another_kind_have_no_limit(tmp_path, other):
    """The hardware shifts only if inputs and output have schemes for it."""
    for text in (SUM, PRODUCT):
        assert read_limits(state_at(tmp_path, text, fields={other: {"scheme": INT8}}, x=0, t=0, y=0)) == []


def test_a_bias_without_shifts_has_no_limit(tmp_path):
    """Only a bias with a position of its own is shifted."""
    state = state_at(tmp_path, GEMM, fields={"b": {"scheme": INT8}}, x=0, w=0, b=0, y=0)
    assert read_limits(state) == CUT


@pytest.mark.parametrize(("inputs", "pairs"), [(2, 2), (8, 56), (9, 56)])
def test_inputs_of_a_long_sum(tmp_path, inputs, pairs):
    """At most eight inputs are compared pairwise."""
    names = [f"x{index}" for index in range(inputs)]
    text = f"({', '.join('float[4] ' + name for name in names)}) => (float[4] z) {{ y = Sum({', '.join(names)})"
    limits = read_limits(state_at(tmp_path, text + " z = Neg(y) }", **dict.fromkeys([*names, "y"], 0)))
    assert len([limit for limit in limits if "z[0]" not in limit]) == pairs


MATMUL = "(float[2,4] x, float[2,4] t) => (float[2,4] z) { c = MatMul(x, w) READERS }"


@pytest.mark.parametrize(
    ("readers", "bias"),
    [
        ("y = Add(c, b) z = Neg(y)", "y[1]"),
        ("y = Add(b, c) z = Neg(y)", "y[0]"),
        ("y = Sum(c, b, t) z = Neg(y)", None),
        ("y = Mul(c, b) z = Neg(y)", None),
        ("y = Add(c, b) y2 = Add(c, b) z = Add(y, y2)", None),
        ("y = Add(c, b) z = Sub(y, c)", None),
    ],
)
def test_the_bias_after_a_product(tmp_path, readers, bias):
    """The only reader of a product adds its bias, on either side."""
    state = state_at(tmp_path, MATMUL.replace("READERS", readers), x=0, w=0, b=0, c=0)
    limits = [limit for limit in read_limits(state) if limit[0] == "c[1] c[0]"]
    assert [limit[1:] for limit in limits if limit[2] == 15] == ([] if bias is None else [(bias, 15)])
    assert len(limits) == (1 if bias is None else 2)


BRANCHES = """(float[2,4] x, bool p) => (float[2,4] z) { c = MatMul(x, w) z = If(p) <
    then_branch = th () => (float[2,4] e) { e = Add(c, b) }, else_branch = el () => (float[2,4] f) { f = OTHER } > }"""


@pytest.mark.parametrize("other", ["Neg(c)", "Neg(x)"])
def test_a_product_that_subgraphs_read_has_no_bias(tmp_path, other):
    """An Add in a branch is not fused with the product, and no limit concerns the output that it reads."""
    state = state_of(tmp_path, BRANCHES.replace("OTHER", other), {"x": 1.0, "w": 1.0}, x={"uses": uses_of("c[0]")})
    assert find_hardware_limits(state) == []


@pytest.mark.parametrize(
    ("ops", "quantized", "expected"),
    [
        ("r = Relu(c) z = Neg(r)", "r", "z[0]"),
        ("r = Relu(c) s = Relu(r) u = Relu(s) z = Neg(u)", "u", "z[0]"),
        ("r = Relu(c) s = Relu(r) u = Relu(s) q = Relu(u) z = Neg(q)", "q", None),
        ("r = LeakyRelu(c) z = Neg(r)", "r", "z[0]"),
        ("r = PRelu(c, b) z = Neg(r)", "r", "z[0]"),
        ("r = Clip(c, zero, six) z = Neg(r)", "r", "z[0]"),
        ("r = Neg(c) z = Neg(r)", "r", None),
        ("r = Relu(c) z = Sub(r, c)", "r", None),
        ("z = Neg(c)", "c", "z[0]"),
    ],
)
def test_the_output_behind_fused_ops(tmp_path, ops, quantized, expected):
    """The output of a weighted op is that of up to three ops that are fused with it."""
    constants = {"zero": 0, "six": 6}
    state = state_at(tmp_path, MATMUL.replace("READERS", ops), constants=constants, x=0, w=0, **{quantized: 0})
    expected_limits = [] if expected is None else [(expected, "c[1] c[0]", 0), ("c[1] c[0]", expected, 16)]
    assert read_limits(state) == expected_limits


def test_a_relu_in_a_subgraph_is_not_fused(tmp_path):
    """The output of a product that only a branch reads is not the quantized output of the Relu in the branch."""
    text = BRANCHES.replace("Add(c, b)", "Relu(c)").replace("OTHER", "Neg(x)")
    state = state_of(tmp_path, text, {"x": 1.0, "w": 1.0}, x={"uses": uses_of("c[0]")})
    branch = next(name for name in state.model.graphs if "then" in name)
    output = state.model.graphs[branch].op("e")
    state.sites.append(replace(state.sites[0], tensor=TensorRef(branch, output.name), uses=uses_of("z[0]")))
    state.params[2] = state.params[0]
    assert find_hardware_limits(state) == []


def test_biases_that_backends_convert_must_fit(tmp_path):
    """A float bias of quantized products is limited by int32."""
    plain = {name: {"scheme": INT8} for name in "xwy"}
    (limit,) = find_hardware_limits(state_at(tmp_path, GEMM, fields=plain, x=0, w=0))
    assert limit == BiasFitLimit(
        bias=TensorRef("", "b"), data=Use("", "y", 0), weight=Use("", "y", 1), rule="", max_integer=INT32_MAX
    )


@pytest.mark.parametrize(("dtype", "max_integer"), [("int32", INT32_MAX), ("int16", 32767)])
def test_biases_that_rules_quantize_must_fit(tmp_path, dtype, max_integer):
    """A bias with the scale of input and weight is limited by its own type."""
    fields = {name: {"scheme": INT8} for name in "xw"} | {"b": {"scheme": replace(BIAS, dtype=dtype)}}
    (limit,) = find_hardware_limits(state_at(tmp_path, GEMM, fields=fields, x=0, w=0, b=0))
    assert (limit.rule, limit.max_integer) == ("B", max_integer)


@pytest.mark.parametrize(
    ("text", "fields", "count"),
    [
        (GEMM, {"b": {"scheme": INT8}}, 0),  # it has its own scale
        (GEMM, {"w": {"scheme": SHIFTING}}, 0),
        ("(float[2,4] x, float[4] i) => (float[2,4] z) { y = Gemm(x, w, i) z = Neg(y) }", {}, 0),
        ("(float[2,4] x) => (float[2,4] z) { c = MatMul(x, w) z = Add(c, b) }", {}, 1),
        ("(float[2,4] x) => (float[2,4] z) { c = MatMul(x, w) z = Add(c, b3) }", {}, 1),
        ("(float[2,4] x) => (float[2,4] z) { c = MatMul(x, w) z = Add(c, b2) }", {}, 0),
        ("(float[2,4] x) => (float[2,4] z) { c = MatMul(x, w) z = Neg(c) }", {}, 0),
        ("(float[2,4] x) => (float[2,4] z) { c = Mul(x, w) z = Add(c, b) }", {}, 0),
    ],
)
def test_biases_without_a_limit(tmp_path, text, fields, count):
    """Only a constant along one axis is converted to int32 with the scales of input and weight."""
    fields = {name: {"scheme": INT8} for name in "xw"} | fields
    names = ["x", "w", *(["b"] if "b" in fields else [])]
    assert len(find_hardware_limits(state_at(tmp_path, text, fields=fields, **dict.fromkeys(names, 0)))) == count


def test_an_omitted_bias_is_followed_by_another(tmp_path):
    """An empty name in place of an op's bias is no bias, so the Add after the op has it, if it is a constant."""
    for addend, count in (("b", 1), ("x", 0)):
        text = f"(float[2,4] x) => (float[2,4] z) {{ c = Gemm(x, w) z = Add(c, {addend}) }}"
        plain = {"x": {"scheme": INT8, "uses": uses_of("c[0]")}, "w": {"scheme": INT8}}
        state = state_at(tmp_path, text, fields=plain, x=0, w=0)
        message = onnx.load(tmp_path / "model.onnx")
        message.graph.node[0].input.append("")
        onnx.save(message, tmp_path / "model.onnx")
        changed = SolverState(load(tmp_path / "model.onnx"), state.plan)
        changed.params = state.params
        assert len(changed.model.main.slots("c")) == 3
        assert len(find_hardware_limits(changed)) == count


def tensorflow_state(scheme, *reads, bias_shape=(4,)):
    """Return a state of a product `c` of `x` and `w`, a BiasAdd `y` of a bias without a value, and a reader `z`."""
    model = Model(format="tensorflow")
    graph = model.graphs[""] = Graph("", model.graphs)
    tensors = {}
    for name, kind, roles, shape, inputs in (
        ("x", "input", (), (4, 4), ""),
        ("w", "constant", (), (4, 4), ""),
        ("b", "constant", (), bias_shape, ""),
        ("c", "matmul", ("input", "weight"), (4, 4), "xw"),
        ("y", "bias_add", ("input", "bias"), (4, 4), "cb"),
        ("z", "neg", ("input",), (4, 4), "y"),
    ):
        op = Op(name=name, kind=kind, type=kind, roles=roles, outputs=(Output("", "float32", shape),))
        tensors[name] = graph.add_op(op, [tensors[read] for read in inputs])
    sites = [
        Site(tensor=graph.source_of(use), uses=(use,), graph="", scheme=scheme) for use in uses_of(" ".join(reads))
    ]
    state = SolverState(model, make_plan(*sites, format="tensorflow"))
    state.params = dict.fromkeys(range(len(sites)), qparams_from_scale(np.float32(1), np.int32(0), scheme.type))
    return state


@pytest.mark.parametrize(
    ("family", "shape", "count"),
    [("fake-quant", (4,), 1), ("fake-quant", None, 0), ("quantize-and-dequantize-v3", (4,), 0)],
)
def test_biases_of_tensorflow_models(family, shape, count):
    """TFLite's converter makes int32 biases of FakeQuant models only. A bias of unknown shape has no limit."""
    state = tensorflow_state(Scheme(name="int", dtype="int8", family=family), "c[0]", "c[1]", bias_shape=shape)
    assert len(find_hardware_limits(state)) == count
    meet_limits(state)
    assert (state.changes, state.conflicts) == ([], [])


def test_a_bias_add_is_fused():
    """The output of a product is that of the BiasAdd that reads it."""
    state = tensorflow_state(replace(SHIFTING, family="fake-quant"), "c[0]", "c[1]", "z[0]")
    assert read_limits(state) == [("z[0]", "c[1] c[0]", 0), ("c[1] c[0]", "z[0]", 16)]


@pytest.mark.parametrize(
    ("text", "positions", "raised"),
    [
        (SUM, {"x": 7, "t": 0, "y": 0}, {}),
        (SUM, {"x": 8, "t": 0, "y": 1}, {"x": 7}),
        (SUM, {"x": 0, "t": 0, "y": 7}, {}),
        (SUM, {"x": 0, "t": 0, "y": 8}, {"y": 7}),
        (SUM, {"x": 25, "t": 25, "y": 0}, {}),
        (SUM, {"x": 26, "t": 25, "y": 0}, {}),
        (SUM, {"x": 27, "t": 26, "y": 0}, {"t": 25}),
        (PRODUCT, {"x": 3, "t": 4, "y": 7}, {}),
        (PRODUCT, {"x": 3, "t": 4, "y": 9}, {"y": 7}),
        (PRODUCT, {"x": 16, "t": 16, "y": 0}, {}),
        (PRODUCT, {"x": 16, "t": 20, "y": 0}, {"x": 12}),
        (PRODUCT, {"x": 16, "t": 25, "y": 0}, {"x": 9, "t": 23}),  # a type of 8 bits doubles at most 7 times
        (PRODUCT.replace("(x, t)", "(x, x)"), {"x": 17, "y": 0}, {"x": 16}),
        (PRODUCT.replace("(x, t)", "(x, x)"), {"x": 18, "y": 1}, {"x": 16}),
        (GEMM, {"x": 7, "w": 7, "b": 7, "y": 14}, {}),
        (GEMM, {"x": 7, "w": 7, "b": 7, "y": 15}, {"y": 14}),
        (GEMM, {"x": 7, "w": 9, "b": 7, "y": 0}, {}),
        (GEMM, {"x": 7, "w": 10, "b": 7, "y": 0}, {"w": 9}),
        (GEMM, {"x": 7, "w": 9, "b": 1, "y": 1}, {}),
        (GEMM, {"x": 7, "w": 10, "b": 1, "y": 3}, {"w": 9}),
        (GEMM, {"x": 7, "w": 60, "b": 60, "y": 20}, {"w": 29}),  # a weight doubles at most 31 times
        (GEMM, {"x": 7, "w": 61, "b": 60, "y": 20}, {"w": 30, "x": 6}),
        (GEMM, {"x": 7, "w": 60, "b": 15, "y": 20}, {"w": 29, "x": 1}),  # 31 for the output, so none for the bias
        (GEMM, {"x": 7, "w": 60, "b": 15, "y": 30}, {"w": 29, "x": 1}),  # 21 for the output, then 16 for the bias
    ],
)
def test_raised_scales(tmp_path, text, positions, raised):
    """A scale is doubled as often as the limit needs. The first positive use is preferred."""
    state = state_at(tmp_path, text, **positions)
    meet_limits(state)
    assert positions_of(state) == positions | raised
    assert {change.tensor.op for change in state.changes} == set(raised)
    assert state.conflicts == []


@pytest.mark.parametrize(
    ("positions", "conflict"),
    [
        ({"x": -60, "w": -59, "y": -115}, None),
        ({"x": -60, "w": -60, "y": -115}, 5),
        ({"x": -70, "w": -60, "y": -125}, 5),
    ],
)
def test_scales_stay_within_float32(tmp_path, positions, conflict):
    """An int8 scale grows up to 2**119, so that its integers stay within float32."""
    state = state_at(tmp_path, GEMM.replace(", b", ""), **positions)
    meet_limits(state)
    assert positions_of(state) == positions | ({"y": -119} if conflict is None else {})
    assert [entry.resolution.split()[-1] for entry in state.conflicts] == ([] if conflict is None else [str(conflict)])


def test_scales_of_the_plan_stay(tmp_path):
    """A limit raises the next scale if the plan gives that of the first."""
    state = state_at(tmp_path, PRODUCT, fields={"x": {"scale": (2.0**-16,)}}, x=16, t=20, y=0)
    meet_limits(state)
    assert positions_of(state) == {"x": 16, "t": 16, "y": 0}


@pytest.mark.parametrize(
    ("shared", "positions"), [("xy", {"x": 0, "t": -1, "y": 0}), ("xty", dict.fromkeys("xty", -1))]
)
def test_a_shared_scale_that_cannot_help(tmp_path, shared, positions):
    """Raising a scale on both sides of a limit does not meet it, so it stays, and the conflict has the excess."""
    state = state_at(tmp_path, PRODUCT, shared=shared, **positions)
    meet_limits(state)
    assert positions_of(state) == positions
    (conflict,) = state.conflicts
    assert (conflict.rules, conflict.tensors) == (("Y", "X"), (TensorRef("", "y"), TensorRef("", "x")))
    assert conflict.resolution.endswith(" by 1")
    assert state.changes == []


def test_a_shared_scale_that_cannot_help_stays(tmp_path):
    """The other input is raised if one shares its scale with the output."""
    state = state_at(tmp_path, PRODUCT, shared="xy", x=5, t=34, y=5)
    meet_limits(state)
    assert positions_of(state) == {"x": 5, "t": 32, "y": 5}


def test_a_shared_scale_counts_for_all_of_its_uses(tmp_path):
    """Inputs that share their scale are raised together: one doubling lowers the sum by two."""
    state = state_at(tmp_path, PRODUCT, shared="xt", x=18, t=18, y=1)
    meet_limits(state)
    assert positions_of(state) == {"x": 16, "t": 16, "y": 1}
    assert [len(state.notes[index]) for index in (0, 1)] == [1, 1]


CHAIN = "(float[4] x, float[4] t, float[4] s) => (float[4] z) { m = Mul(x, t) y = Add(m, s) z = Neg(y) }"


@pytest.mark.parametrize(
    ("positions", "raised"),
    [
        ({"x": 0, "t": 0, "m": 6, "s": 13, "y": 6}, {"m": 0, "s": 7}),  # the sum comes after the product
        ({"x": 20, "t": 20, "m": 8, "s": 0, "y": 5}, {"m": 7, "x": 19}),  # the product is examined again
    ],
)
def test_a_raised_scale_is_examined_again(tmp_path, positions, raised):
    """A raise for one op can violate a limit of another op that was met before."""
    state = state_at(tmp_path, CHAIN, **positions)
    meet_limits(state)
    assert positions_of(state) == positions | raised
    assert state.conflicts == []


def test_a_limit_that_cannot_hold_is_not_examined_again(tmp_path):
    """The product `m` needs 9 doublings and has 7. The raise of its input is no reason to try it again."""
    text = "(float[4] u, float[4] t) => (float[4] z) { x = Mul(u, u) m = Mul(x, t) z = Neg(m) }"
    state = state_at(tmp_path, text, u=0, x=1, t=0, m=10)
    meet_limits(state)
    assert positions_of(state) == {"u": 0, "x": 0, "t": 0, "m": 10}
    assert [(conflict.rules, conflict.resolution.split()[-1]) for conflict in state.conflicts] == [(("M", "X"), "10")]


def test_raises_for_a_limit_that_cannot_hold_are_undone(tmp_path):
    """The product needs 9 doublings and has 7: it stays. So the limit of the sum, which those violated, holds."""
    fixed = {"s": {"scale": (2.0**-16,)}}
    state = state_at(tmp_path, CHAIN, fields=fixed, x=0, t=0, m=9, s=16, y=9)
    meet_limits(state)
    assert positions_of(state) == {"x": 0, "t": 0, "m": 9, "s": 16, "y": 9}
    assert [(conflict.rules, conflict.resolution.split()[-1]) for conflict in state.conflicts] == [(("M", "X"), "9")]
    assert (state.changes, state.notes.keys()) == ([], {2})


def test_limits_that_cannot_hold_are_in_order(tmp_path):
    """Each conflict has the use that could be raised first, and what it is compared with."""
    fixed = {name: {"scale": (1.0,)} for name in "xtmsy"}
    state = state_at(tmp_path, CHAIN, fields=fixed, x=0, t=0, m=9, s=0, y=17)
    meet_limits(state)
    assert [(conflict.rules, conflict.resolution.split()[-1]) for conflict in state.conflicts] == [
        (("M", "X"), "9"),
        (("M", "S"), "2"),
        (("Y", "M"), "1"),
        (("Y", "S"), "10"),
    ]


ZERO = Range(np.float64(0.0), np.float64(0.0))


@pytest.mark.parametrize(
    ("changes", "raised"),
    [
        ({}, {"b": 2}),
        ({"range": Range(np.float64(-1.0), np.float64(0.0))}, {"w": 9}),
        ({"range": Range(np.float64(0.0), np.float64(1.0))}, {"w": 9}),
        ({"range": None}, {"w": 9}),
        ({"shared": "bv"}, {"w": 9}),
        ({"scheme": replace(SHIFTING, observe=ObserverConfig(name="fixed", low=0.0, high=0.0))}, {"w": 9}),
    ],
)
def test_zeros_take_a_smaller_scale(tmp_path, changes, raised):
    """A bias of zeros takes the scale that its limit needs, unless its range is given or its scale is shared."""
    text = GEMM.replace("z = Neg(y)", "u = Gemm(x, w, v) z = Add(y, u)")
    fields = {"b": {"scheme": changes.get("scheme", SHIFTING)}, "y": {"uses": uses_of("z[0]")}}
    positions = {"x": 7, "w": 10, "b": 1, "y": 3, "v": 10}
    state = state_at(
        tmp_path, text, fields=fields, shared=changes.get("shared", ()), constants={"v": [0] * 4}, **positions
    )
    state.ranges[2] = changes.get("range", ZERO)
    if state.ranges[2] is None:
        del state.ranges[2]
    state.sites[1] = replace(state.sites[1], uses=uses_of("y[1]"))
    del state.index_by_use[Use("", "u", 1)]
    meet_limits(state)
    assert positions_of(state) == positions | raised


@pytest.mark.parametrize(("position", "shrinks"), [(41, True), (42, False)])
def test_zeros_keep_a_normal_scale(tmp_path, position, shrinks):
    """The scale of zeros shrinks to 2**-126 at most, the smallest normal float32."""
    positions = {"x": position, "w": 100, "b": 0, "y": 126}
    state = state_at(tmp_path, GEMM, **positions)
    state.ranges[2] = ZERO
    meet_limits(state)
    assert positions_of(state)["b"] == (126 if shrinks else 0)


def test_zeros_that_are_second(tmp_path):
    """Of two inputs of a product, the one that is zeros takes the smaller scale."""
    state = state_at(tmp_path, PRODUCT, x=0, t=0, y=5)
    state.ranges[1] = ZERO
    state.params[1] = replace(state.params[1], op_range=ZERO)
    meet_limits(state)
    assert positions_of(state) == {"x": 0, "t": 5, "y": 5}
    assert state.params[1].op_range is None


TWO_READERS = "(float[2,4] x) => (float[2,4] z) { y = Gemm(x, w, b) u = Gemm(x, v, b) z = Sub(y, u) }"


@pytest.mark.parametrize(("is_parameter", "expected"), [(True, [0, 5]), (False, 0)])
def test_zeros_that_two_ops_read(tmp_path, is_parameter, expected):
    """Only the op that needs it reads a copy of the bias with a smaller scale. Activations are not copied."""
    fields = {"b": {"parameter": is_parameter}}
    positions = {"x": 10, "w": 10, "v": 5, "b": 0, "y": 15, "u": 15}
    state = state_at(tmp_path, TWO_READERS, fields=fields, **positions)
    state.ranges[3] = ZERO
    meet_limits(state)
    assert positions_of(state) == positions | {"b": expected} | ({} if is_parameter else {"w": 5})


def test_zeros_that_need_no_smaller_scale(tmp_path):
    """A limit that holds exactly copies nothing."""
    state = state_at(tmp_path, TWO_READERS, x=10, w=5, v=5, b=0, y=15, u=15)
    state.ranges[3] = ZERO
    meet_limits(state)
    assert len(state.sites) == 6


def test_a_raised_weight_of_two_ops(tmp_path):
    """The op that needs it reads a copy; a weight that is tied is raised for both ops."""
    text = "(float[2,4] x, float[2,4] t) => (float[2,4] z) { y = MatMul(x, w) u = MatMul(t, w) z = Sub(y, u) }"
    positions = {"x": 7, "t": 7, "w": 12, "y": 0, "u": 10}
    state = state_at(tmp_path, text, **positions)
    meet_limits(state)
    assert positions_of(state) == positions | {"w": [12, 9]}
    assert state.sites[-1].uses == uses_of("y[1]")
    state = state_at(tmp_path, text, fields={"w": {"tie": uses_of("z[0]")}}, **positions)
    meet_limits(state)
    assert positions_of(state) == positions | {"w": 9}
    assert len(state.sites) == len(positions)


def fit_state(folder, data, weight, bias, *, text=GEMM, rule=False, **fields):
    """Return a solver state of a Gemm with these scales of input and weight, and this bias."""
    axis = {"axis": 1} if isinstance(weight, tuple) else {}
    schemes = {"x": {"scheme": INT8}, "w": {"scheme": CHANNEL if axis else INT8, **axis}, "b": {"scheme": BIAS}}
    fields = {name: values | fields.get(name, {}) for name, values in schemes.items()}
    scales = {"x": data, "w": weight, **({"b": None} if rule else {})}
    return state_of(folder, text, scales, constants={"b": bias}, **fields)


def weight_scale(state):
    """Return the scale of the weight of `fit_state` after the limits were met."""
    meet_limits(state)
    return state.params[1].scale.tolist()


@pytest.mark.parametrize(
    ("bias", "raised"),
    [
        ([0, 0, 0, 0], {}),
        ([1, 2, 3, -(2.0**31) * (1 - 1e-5)], {}),
        ([1, 2, 2.0**31, 3], {2}),
        ([2.0**32, 2, 3, -(2.0**33)], {0, 3}),
    ],
)
def test_a_weight_scale_is_raised_in_the_channels_that_need_it(tmp_path, bias, raised):
    """The bias has at most 2**31 - 1 steps of input scale times weight scale, with a small margin."""
    scales = weight_scale(fit_state(tmp_path, 0.5, (2.0,) * 4, bias))
    needed = [max(2.0, abs(value) / INT32_MAX / 0.5) for value in bias]
    assert scales == pytest.approx([value if index in raised else 2.0 for index, value in enumerate(needed)], rel=3e-6)
    for index in raised:
        assert scales[index] / needed[index] - 1 == pytest.approx(2e-6, abs=2e-7)


@pytest.mark.parametrize(("excess", "raised"), [(-1.2e-6, False), (-0.8e-6, True), (1e-3, True)])
def test_one_scale_of_a_weight_serves_the_largest_bias(tmp_path, excess, raised):
    """A millionth of int32 stays free, because scales and quotients are rounded."""
    bias = [1.0, -(2.0**31) * (1 + excess), 5.0, 0.0]
    state = fit_state(tmp_path, 1.0, 1.0, bias)
    scale = weight_scale(state)
    assert (scale > 1.0) is raised
    assert scale == pytest.approx(1.0 + max(excess, 0.0), rel=4e-6)
    assert len(state.changes) == raised
    assert "channels" not in "".join(map(str, state.changes))


def test_the_factor_of_a_raise_is_reported(tmp_path):
    """The change has the largest and smallest factor, the number of channels, and the bias."""
    state = fit_state(tmp_path, 1.0, (1.0,) * 4, [0, 2.0**33, 2.0**32, 1])
    meet_limits(state)
    (change,) = state.changes
    assert re.findall(r"[\d.]+\.\.[\d.]+|\d of \d|\w:0", str(change)) == ["w:0", "2..4", "2 of 4", "b:0"]


@pytest.mark.parametrize(
    ("data", "weight", "expected"),
    [(2.0**-100, 2.0**-26, 2.0**-26), (2.0**-100, 2.0**-27, 2.0**-26), (2.0**-63, (2.0**-64, 2.0**-63, 1, 1), None)],
)
def test_steps_of_a_bias_are_normal_numbers(tmp_path, data, weight, expected):
    """Input scale times weight scale is at least 2**-126, whatever the bias is."""
    state = fit_state(tmp_path, data, weight, [0, 0, 0, 0])
    scale = weight_scale(state)
    assert len(state.changes) == (weight != 2.0**-26)
    assert scale == pytest.approx(expected if expected is not None else [2.0**-63, 2.0**-63, 1, 1], rel=2e-6)
    if weight == 2.0**-27:
        assert scale / 2.0**-26 - 1 == pytest.approx(1e-6, abs=2e-7)


@pytest.mark.parametrize(
    ("data", "weight", "bias", "fields"),
    [
        (1e-30, 1.0, [1e30, 0, 0, 0], {}),  # no scale is large enough
        (1e-30, (1.0,) * 4, [1e30, 2.0, 0, 0], {}),
        ((1.0,) * 4, 1.0, [2.0**40] * 4, {"x": {"scheme": CHANNEL, "axis": 1}}),
        (1.0, (1.0,) * 4, [2.0**40], {}),
        (1.0, (1.0,) * 4, [2.0**40, np.inf, 0, 0], {}),
        (1.0, (1.0,) * 4, [2.0**40, np.nan, 0, 0], {}),
        (1.0, 1.0, np.zeros(0), {}),
    ],
)
def test_biases_whose_limit_is_unknown(tmp_path, data, weight, bias, fields):
    """A bias that does not match the weight, or that no scale represents, leaves the weight as it is."""
    state = fit_state(tmp_path, data, weight, bias, **fields)
    assert weight_scale(state) == np.float32(weight).tolist()
    assert (state.changes, state.conflicts) == ([], [])


def test_the_largest_scale_of_a_weight(tmp_path):
    """A weight scale may grow as long as all integers of the weight stay finite."""
    largest = float(np.finfo(np.float32).max) / 2**8
    for share, raised in ((0.5, True), (1.5, False)):
        bias = np.float32(min(largest * share * 2.0**-20 * 2.0**31, 3.4e38))
        unit = float(bias) / 2**31 / (largest * share)
        scale = weight_scale(fit_state(tmp_path, unit, 1.0, [bias, 0, 0, 0]))
        assert (scale > 1.0) is raised


def test_blocks_of_a_weight_have_no_limit(tmp_path):
    """Runtimes convert no bias of a weight with a scale per block."""
    state = fit_state(tmp_path, 1.0, 1.0, [2.0**40, 0, 0, 0])
    scale = np.ones((1, 4), np.float32)
    state.params[1] = QParams(scale=scale, zero_point=np.zeros(scale.shape, np.int32), type=INT8.type, axis=0, block=4)
    assert weight_scale(state) == scale.tolist()


@pytest.mark.parametrize(
    ("bias", "expected"), [(2.0**31 * 0.999, 1.0), (2.0**31, 2.0), (2.0**32 * 0.999, 2.0), (2.0**33, 8.0)]
)
def test_powers_of_two_are_rounded_up(tmp_path, bias, expected):
    """A scale that must be a power of two is raised to the next one."""
    scheme = replace(INT8, scale="power-of-two")
    assert weight_scale(fit_state(tmp_path, 1.0, 1.0, [bias, 0, 0, 0], w={"scheme": scheme})) == expected


def test_an_exact_power_of_two_is_not_rounded(tmp_path):
    """Channels that fit keep their power of two, also if another channel is raised."""
    scheme = replace(CHANNEL, scale="power-of-two")
    scales = weight_scale(fit_state(tmp_path, 1.0, (1.0, 0.25, 4.0, 1.0), [2.0**32, 0, 0, 1], w={"scheme": scheme}))
    assert scales == [4.0, 0.25, 4.0, 1.0]


@pytest.mark.parametrize("rule", [False, True])
def test_a_fixed_weight_scale_and_a_bias_that_does_not_fit(tmp_path, rule):
    """A plan's scale stays. If a rule quantizes the bias, that is a conflict; else a change is reported."""
    state = fit_state(tmp_path, 1.0, 1.0, [2.0**34, 0, 0, 0], rule=rule, w={"scale": (1.0,)})
    assert weight_scale(state) == 1.0
    assert len(state.notes[1]) == 1
    assert [change.tensor.op for change in state.changes] == ([] if rule else ["w"])
    expected = [(("W", "B"), (TensorRef("", "w"), TensorRef("", "b")))] if rule else []
    assert [(conflict.rules, conflict.tensors) for conflict in state.conflicts] == expected
    if rule:
        assert float(re.search(r"[\d.]+", state.conflicts[0].wants[1])[0]) == pytest.approx(8, rel=1e-5)


def test_a_fixed_weight_scale_whose_bias_fits_in_the_end(tmp_path):
    """Another op raises the scale of the input, so that the bias fits, and there is nothing to report."""
    text = (
        "(float[4,4] x, float[4,4] t) => (float[4,4] z) "
        "{ y = Gemm(x, w, b) c = MatMul(t, x) u = Add(c, d) z = Add(y, u) }"
    )
    plain = {name: {"scheme": INT8} for name in "xwt"} | {"w": {"scheme": INT8, "scale": (1.0,)}}
    constants = {"b": [2.0**33, 0, 0, 0], "d": [2.0**36, 0, 0, 0]}
    state = state_of(tmp_path, text, {"x": 1.0, "w": 1.0, "t": 1.0}, constants=constants, **plain)
    meet_limits(state)
    assert float(state.params[0].scale) == pytest.approx(32.0, rel=1e-5)
    assert ([change.tensor.op for change in state.changes], state.conflicts) == (["x"], [])
    assert state.notes.keys() == {0}


def test_limits_of_both_kinds_that_cannot_hold(tmp_path):
    """Useless raises are undone also if the bias of another op does not fit its fixed weight."""
    text = (
        "(float[4,4] x, float[4,4] t) => (float[4,4] z, float[4,4] q) "
        "{ y = Gemm(x, w, b) z = Neg(y) m = Mul(t, t) q = Neg(m) }"
    )
    fields = {"x": {"scheme": INT8}, "w": {"scheme": INT8, "scale": (1.0,)}}
    scales = {"x": 1.0, "w": 1.0, "t": 1.0, "m": 2.0**-9}
    state = state_of(tmp_path, text, scales, constants={"b": [2.0**33, 0, 0, 0]}, **fields)
    meet_limits(state)
    assert positions_of(state) == {"x": 0, "w": 0, "t": 0, "m": 9}
    assert [conflict.rules for conflict in state.conflicts] == [("M", "T")]
    assert [change.tensor.op for change in state.changes] == ["w"]


def test_a_bias_is_examined_again_if_its_input_is_raised(tmp_path):
    """With the first scale of the input, no float32 scale of the weight would be large enough."""
    text = "(float[4,4] t) => (float[4,4] z) { m = Mul(t, t) y = Gemm(m, w, b) z = Sub(y, m) }"
    scales = {"m": 2.0**-100, "w": 1.0, "t": 2.0**-47}
    state = state_of(tmp_path, text, scales, constants={"b": [2.0**53, 0, 0, 0]}, w={"scheme": INT8})
    meet_limits(state)
    assert power_of_two_position(state.params[0]) == 94
    assert float(state.params[1].scale) == pytest.approx(2.0 ** (53 + 94 - 31), rel=1e-5)


@pytest.mark.parametrize("data", ["t", "m"])
def test_biases_are_examined_again_after_raises_are_undone(tmp_path, data):
    """A bias that fitted because of a useless raise, or was made to fit by one of its own, gets its scale again."""
    text = f"(float[4,4] t) => (float[4,4] z) {{ m = Mul(t, t) y = Gemm({data}, w, b) z = Sub(y, m) }}"
    scales, bias = {"t": 1.0, "m": 2.0**-9, "w": 1.0}, 2.0**33 if data == "t" else 2.0**24
    state = state_of(tmp_path, text, scales, constants={"b": [bias, 0, 0, 0]}, w={"scheme": INT8})
    meet_limits(state)
    assert [conflict.rules for conflict in state.conflicts] == [("M", "T")]
    assert [change.tensor.op for change in state.changes] == ["w"]
    assert float(state.params[2].scale) == pytest.approx(4.0, rel=1e-5)
    assert power_of_two_position(state.params[1]) == 9


def test_an_output_whose_range_is_unknown(tmp_path):
    """A product whose output stays float is fused with the Relu that reads it."""
    text = MATMUL.replace("READERS", "r = Relu(c) z = Neg(r)")
    state = state_of(tmp_path, text, {"x": 1.0, "w": 1.0, "c": None, "r": 1.0})
    assert read_limits(state) == [("z[0]", "c[1] c[0]", 0), ("c[1] c[0]", "z[0]", 16)]


@pytest.mark.parametrize(
    ("scale", "position"),
    [(1.0, 0), (2.0**-126, 126), (2.0**100, -100), (0.75, None), ([0.5], 1), ([0.5, 0.5], None)],
)
def test_positions_of_scales(scale, position):
    """A position is -log2 of a single power of two."""
    scale = np.float32(scale)
    axis = 0 if scale.ndim else None
    params = qparams_from_scale(scale, np.zeros(scale.shape, np.int32), INT8.type, axis=axis)
    assert power_of_two_position(params) == position


def test_a_tensor_without_a_scale_has_no_position():
    """None stands for a float tensor."""
    assert power_of_two_position(None) is None


def test_scales_that_are_no_powers_of_two_have_no_shift(tmp_path):
    """A scale of the plan that is no power of two leaves the other scales as they are."""
    state = state_of(tmp_path, SUM, {"x": 2.0**-30, "t": 0.75, "y": 2.0**-20})
    meet_limits(state)
    assert [float(state.params[index].scale) for index in range(3)] == [2.0**-30, 0.75, 2.0**-20]
    assert (state.changes, state.conflicts) == ([], [])


@pytest.mark.parametrize(
    ("axis", "opset", "shape", "values"), [(-1, 17, (1, 16), 16), (1, 17, (1, 8, 6, 6), 8), (2, 11, (1, 2, 3, 4), 12)]
)
def test_output_of_a_flat_softmax(tmp_path: Path, axis: int, opset: int, shape: tuple[int, ...], values: int) -> None:
    """A scale is not below the smallest one that the int8 Softmax of onnxruntime computes without an overflow to 0."""
    sizes = ", ".join(map(str, shape))
    net = f"g (float[{sizes}] x) => (float[{sizes}] y) {{ y = Softmax <axis = {axis}> (x) }}"
    text = f'<ir_version: 8, opset_import: ["": {opset}]> {net}'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "net.onnx")
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", x=(rng.normal(size=(40, *shape[1:])) / 10).astype(np.float32))
    result = gq.insert(tmp_path / "net.onnx", rules="qnn", data=str(tmp_path / "data.npz"))
    (scale,) = (entry.params.scale for entry in result.inserted if entry.site.tensor.op == "y")
    assert scale == np.float32(1 / (SOFTMAX_STEPS * values))
    assert result.validation.comparison.sqnr > 45

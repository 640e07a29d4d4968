"""Powers of two that hardware can shift by: AMD's limits on positions."""

import re
from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.onnx_models import load_onnx

import graphquant as gq
from graphquant.ir import TensorRef
from graphquant.numerics import dequantize, quantize
from graphquant.observers import sketch_values
from graphquant.quantize import Plan, power_of_two_position, solve_scales
from graphquant.quantize.limits import DPU_ADD_WRITE_LIMITS, find_hardware_limits
from graphquant.quantize.solver_state import SolverState

RNG = np.random.default_rng(1)
W = RNG.uniform(-1, 1, (4, 3, 3, 3)).astype(np.float32)
W.flat[:2] = 1.0, -1.0
B = np.array([0.5, -1.0, 0.25, 0.75], np.float32)
CONV = "(float[1,3,8,8] x) => (float[1,4,6,6] y) { y = Conv(x, w, b) }"


def shift_model(folder, text, **constants):
    """An ONNX model."""
    return load_onnx(folder, f"g {text}", {name: np.asarray(value, np.float32) for name, value in constants.items()})


def solve_for(loaded, **ends):
    """The solution of the shipped rules where activations have these largest magnitudes."""
    plan = gq.plan(loaded, rules="vitis_ai")
    sketches = {TensorRef("", name): sketch_values(np.array([-end, end / 2]), bits=7) for name, end in ends.items()}
    return solve_scales(loaded, plan, sketches)


def positions(solution):
    """The position of each tensor."""
    return {site.tensor.op: power_of_two_position(solution.params[k]) for k, site in enumerate(solution.plan.sites)}


def excess(loaded, solution):
    """Names of the limits that do not hold."""
    draft = SolverState(loaded, solution.plan)
    draft.params = dict(solution.params)
    wrong = []
    for limit in find_hardware_limits(draft):
        more, less = (
            [power_of_two_position(draft.params_at(use)) for use in uses]
            for uses in (limit.positive_uses, limit.negative_uses)
        )
        if (min if limit.smallest else sum)(more) - sum(less) > limit.max_shift:
            wrong.append(limit.name)
    return wrong


def test_met_shift_limits_change_nothing(tmp_path):
    """Scales are the smallest powers of two that cover the ranges, and nothing is said."""
    solution = solve_for(shift_model(tmp_path, CONV, w=W, b=B), x=1.0, y=8.0)
    assert positions(solution) == {"x": 7, "w": 7, "b": 6, "y": 4}
    assert (solution.notes, solution.conflicts) == ({}, ())


@pytest.mark.parametrize(
    ("name", "scale", "ends", "expected", "says"),
    [
        ("output", 1, {"x": 1.0, "y": 2.0**-10}, {"y": 14, "w": 7, "x": 7}, "y:0"),
        ("cut", 2.0**-12, {"x": 1.0, "y": 8.0}, {"w": 13, "x": 7, "y": 4}, "w:0"),
        ("bias", 2.0**-9, {"x": 1.0, "y": 0.05}, {"w": 14, "x": 7, "b": 6}, "w:0"),
    ],
)
def test_weighted_ops(tmp_path, name, scale, ends, expected, says):
    """Output, weight or, for the bias, the weight again gets as much coarser as its limit asks for."""
    loaded = shift_model(tmp_path, CONV, w=W * scale, b=B)
    solution = solve_for(loaded, **ends)
    positions_by_op = positions(solution)
    assert {key: positions_by_op[key] for key in expected} == expected
    notes_by_op = {solution.plan.sites[k].tensor.op: notes for k, notes in solution.notes.items()}
    assert list(notes_by_op) == [says.partition(":")[0]]
    assert all("exceeded its limit" in entry for entry in notes_by_op[says.partition(":")[0]]), name
    assert excess(loaded, solution) == []
    assert solution.conflicts == ()


def test_sums_and_products(tmp_path):
    """Inputs of a sum are at most 7 positions apart; a product's output is no finer than the product."""
    text = "(float[4] x, float[4] t) => (float[4] y, float[4] m) { y = Add(x, t) m = Mul(t, t) }"
    loaded = shift_model(tmp_path, text)
    solution = solve_for(loaded, x=1.0, t=2.0**-12, y=1.0, m=2.0**-28)
    positions_by_op = positions(solution)
    assert positions_by_op == {"x": 7, "t": 14, "y": 7, "m": 28}
    notes_by_op = {solution.plan.sites[k].tensor.op: notes for k, notes in solution.notes.items()}
    assert [len(notes_by_op[name]) for name in ("t", "m")] == [1, 1]
    assert "multiplied by 32:" in notes_by_op["t"][0]
    assert "multiplied by 128:" in notes_by_op["m"][0]
    assert excess(loaded, solution) == []


@pytest.mark.parametrize(
    ("output_end", "expected"), [(2.0**22, {"x": 7, "t": 14, "y": -15}), (2.0**30, {"x": 2, "t": 9, "y": -23})]
)
def test_smallest_input_of_a_sum(tmp_path, output_end, expected):
    """Only the smallest position of the inputs is at most 25 above the output's, and the table agrees."""
    loaded = shift_model(tmp_path, "(float[4] x, float[4] t) => (float[4] y) { y = Add(x, t) }")
    solution = solve_for(loaded, x=1.0, t=2.0**-7, y=output_end)
    assert positions(solution) == expected
    assert (excess(loaded, solution), solution.conflicts) == ([], ())
    assert min(expected["x"], expected["t"]) - expected["y"] <= DPU_ADD_WRITE_LIMITS[1]


def test_a_bias_of_zeros_takes_any_scale(tmp_path):
    """It gets the position that its op needs, and the weight keeps its own."""
    loaded = shift_model(tmp_path, CONV, w=W * 2.0**-9, b=B * 0)
    solution = solve_for(loaded, x=1.0, y=0.05)
    positions_by_op = positions(solution)
    assert positions_by_op["w"] == 16
    assert positions_by_op["w"] + positions_by_op["x"] - positions_by_op["b"] == 15
    assert excess(loaded, solution) == []


def test_a_weight_that_two_ops_read_is_copied(tmp_path):
    """Only one of its readers needs it coarser; the other keeps all of it."""
    text = (
        "(float[1,3,8,8] x, float[1,3,8,8] t) => (float[1,4,6,6] y, float[1,4,6,6] z) "
        "{ y = Conv(x, w, b) z = Conv(t, w, b) }"
    )
    loaded = shift_model(tmp_path, text, w=W * 2.0**-12, b=B * 2.0**-12)
    solution = solve_for(loaded, x=1.0, t=1.0, y=2.0**-8, z=8.0)
    weights = {
        site.uses[0].op: power_of_two_position(solution.params[k])
        for k, site in enumerate(solution.plan.sites)
        if site.tensor.op == "w"
    }
    assert weights == {"y": 19, "z": 13}
    assert excess(loaded, solution) == []
    assert any("copy for z[1]: " in note for notes in solution.notes.values() for note in notes)


def test_copies_that_are_alike_are_one(tmp_path):
    """Both readers need the weight as much coarser: it stays one weight, with all of its uses."""
    text = (
        "(float[1,3,8,8] x, float[1,3,8,8] t) => (float[1,4,6,6] y, float[1,4,6,6] z, float[1,4,6,6] v) "
        "{ y = Conv(x, w, b) z = Conv(t, w, b) v = Conv(x, w, b) }"
    )
    loaded = shift_model(tmp_path, text, w=W * 2.0**-12, b=B * 2.0**-12)
    solution = solve_for(loaded, x=1.0, t=1.0, y=8.0, z=8.0, v=8.0)
    weights = [k for k, site in enumerate(solution.plan.sites) if site.tensor.op == "w"]
    assert [str(use) for use in solution.plan.sites[weights[0]].uses] == ["y[1]", "z[1]", "v[1]"]
    assert len(weights) == 1
    assert len(solution.plan.sites) == len(solution.params) == 7
    solution = solve_for(loaded, x=1.0, t=1.0, y=2.0**-8, z=8.0, v=8.0)
    weights = [k for k, site in enumerate(solution.plan.sites) if site.tensor.op == "w"]
    assert [[str(use) for use in solution.plan.sites[k].uses] for k in weights] == [["y[1]"], ["z[1]", "v[1]"]]
    assert [power_of_two_position(solution.params[k]) for k in weights] == [19, 13]
    assert excess(loaded, solution) == []


def test_useless_raises_are_undone(tmp_path):
    """The product would need 9 doublings and has 7: it keeps its scale, and the conflict says so."""
    loaded = shift_model(
        tmp_path, "(float[4] x, float[4] t) => (float[4] y, float[4] m) { y = Add(x, t) m = Mul(t, t) }"
    )
    solution = solve_for(loaded, x=1.0, t=2.0**-12, y=1.0, m=2.0**-30)
    assert positions(solution) == {"x": 7, "t": 14, "y": 7, "m": 37}
    [conflict] = solution.conflicts
    assert conflict.tensors == (TensorRef("", "m"), TensorRef("", "t"))
    assert conflict.rules == ("output", "input")
    assert conflict.resolution.endswith("by 9")


def test_unmet_limits_become_conflicts(tmp_path):
    """A fixed weight and a product far beyond the output: the conflict names both, and nothing else was changed."""
    loaded = shift_model(tmp_path, CONV, w=W * 2.0**-12, b=B)
    plan = gq.plan(loaded, rules="vitis_ai")
    sites = tuple(replace(site, scale=(2.0**-30,)) if site.tensor.op == "w" else site for site in plan.sites)
    ends = {"x": 1.0, "y": 2.0**20}
    sketches = {TensorRef("", name): sketch_values(np.array([-end, end / 2]), bits=7) for name, end in ends.items()}
    solution = solve_scales(loaded, replace(plan, sites=sites), sketches)
    assert positions(solution) == {"x": 7, "w": 30, "b": 6, "y": -13}
    assert {conflict.rules for conflict in solution.conflicts} == {("weight", "output"), ("weight", "bias")}
    assert all("exceeds its limit" in conflict.resolution for conflict in solution.conflicts)


def test_a_model_runs_as_its_reference(tmp_path):
    """From data to a model whose every shift is one that the hardware has, which computes what numpy computes."""
    loaded = shift_model(tmp_path, CONV, w=W * 2.0**-12, b=B)
    x = RNG.uniform(-1, 1, (1, 3, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x)
    result = gq.insert(loaded, rules="vitis_ai", data=str(tmp_path / "data.npz"), validate=False)
    path = result.save(tmp_path / "quantized.onnx")
    report = gq.check(path, backend="vitis_ai")
    assert {verdict.status for verdict in report.verdicts} == {"int8"}
    params = {pair.site.tensor.op: pair.params for pair in result.inserted}
    rounded = [
        dequantize(quantize(value, params[name]), params[name]).astype(np.float64)
        for name, value in (("x", x), ("w", W * np.float32(2.0**-12)), ("b", B))
    ]
    windows = np.lib.stride_tricks.sliding_window_view(rounded[0], (3, 3), axis=(2, 3))
    expected = np.einsum("nchwij,mcij->nmhw", windows, rounded[1]) + rounded[2].reshape(-1, 1, 1)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    [actual] = session.run(None, {"x": x})
    np.testing.assert_array_equal(actual, dequantize(quantize(expected, params["y"]), params["y"]))


NAMES = ["x", "t", "u", "v"]


@st.composite
def shift_nets(draw):
    """A chain of ops that shift, move or join, each on tensors made before, all of shape (2, 2); and magnitudes."""
    lines, tensors, weights = [], ["x"], {}
    for k in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["Add", "Mul", "MatMul", "Gemm", "Relu", "Transpose", "Shared"]))
        first, second, name = draw(st.sampled_from(tensors)), draw(st.sampled_from(tensors)), f"t{k}"
        if kind in {"Gemm", "Shared"}:
            weight = f"w{k}" if kind == "Gemm" else "w"
            weights[weight], weights[f"b{k}"] = (2, 2), (2,)
            lines.append(f"{name} = Gemm({first}, {weight}, b{k})")
        elif kind in {"Relu", "Transpose"}:
            lines.append(f"{name} = {kind}({first})")
        else:
            lines.append(f"{name} = {kind}({first}, {second})")
        tensors.append(name)
    ends = st.integers(-20, 20) | st.sampled_from([-120, 110])
    exponents = {name: draw(ends) for name in [*tensors, *weights]}
    text = f"(float[2,2] x) => (float[2,2] {tensors[-1]}) {{ {' '.join(lines)} }}"
    return (
        text,
        {name: (shape, exponents[name]) for name, shape in weights.items()},
        {name: 2.0 ** exponents[name] for name in tensors},
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shift_nets())
def test_any_net_is_solved(tmp_path, drawn):
    """Whatever the ranges: it ends, what is tied is equal, each limit holds or is told, and no scale became smaller."""
    text, weights, ends = drawn
    constants = {name: np.full(shape, 2.0**exponent) for name, (shape, exponent) in weights.items()}
    loaded = shift_model(tmp_path, text, **constants)
    solution = solve_for(loaded, **ends)
    plain = gq.plan(loaded, rules="vitis_ai")
    free = Plan(
        format=plain.format,
        model=plain.model,
        prepared=plain.prepared,
        rules=(),
        sites=tuple(replace(site, scheme=replace(site.scheme, shifts=None)) for site in plain.sites),
    )
    sketches = {TensorRef("", name): sketch_values(np.array([-end, end / 2]), bits=7) for name, end in ends.items()}
    unbound = solve_scales(loaded, free, sketches)
    for k, site in enumerate(plain.sites):
        assert solution.params[k].scale >= unbound.params[k].scale, site.tensor
    feeding = {use: k for k, site in enumerate(solution.plan.sites) for use in site.uses}
    for k, site in enumerate(solution.plan.sites):
        for use in site.tie:
            assert solution.params[k].scale == solution.params[feeding[use]].scale
    shift_names = [
        re.search(r"the (shift .*) of \S+ exceeds its limit by \d+", conflict.resolution)[1]
        for conflict in solution.conflicts
    ]
    assert set(excess(loaded, solution)) <= set(shift_names)

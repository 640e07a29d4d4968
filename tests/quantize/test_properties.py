"""Whatever the net, the ranges and what an edited plan gives: the solver ends, and all holds or is told."""

from dataclasses import replace

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import graphquant as gq
from graphquant.api.plan import prepare_for_plan
from graphquant.formats.onnx import load
from graphquant.ir import TensorRef, Use
from graphquant.observers import sketch_values
from graphquant.quantize import solve_scales

LARGEST = 2**31 - 1

exponents = st.integers(-30, 30) | st.sampled_from([-120, 110])


@st.composite
def product_nets(draw):
    """A net of products with biases, joins, Relus and ops that move values; its constants; and each tensor's ends."""
    lines, tensors, constants = [], ["x"], {}
    for k in range(draw(st.integers(1, 10))):
        kind = draw(st.sampled_from(["Gemm", "Gemm", "Concat", "Relu", "Identity", "Shared", "Softmax"]))
        first, second, name = draw(st.sampled_from(tensors)), draw(st.sampled_from(tensors)), f"t{k}"
        if kind in {"Gemm", "Shared"}:
            weight, bias = (f"w{k}", f"b{k}") if kind == "Gemm" else ("w", draw(st.sampled_from(["b", f"b{k}"])))
            constants.setdefault(weight, np.ldexp(np.eye(4) + 0.25, draw(exponents)))
            constants.setdefault(bias, np.ldexp(np.array([0.0, 1.0, -0.5, 3.0]), draw(exponents)))
            lines.append(f"{name} = Gemm({first}, {weight}, {bias})")
        elif kind == "Concat":
            lines.append(f"{name} = Concat<axis = 0>({first}, {second})")
        else:
            lines.append(f"{name} = {kind}({first})")
        tensors.append(name)
    signs = {name: draw(st.sampled_from([-1.0, 0.0])) for name in tensors}
    ends = {name: (signs[name] * 2.0**e, 2.0**e) for name in tensors for e in [draw(exponents)]}
    return f"(float[N,4] x) => (float[M,4] {tensors[-1]}) {{ {' '.join(lines)} }}", constants, ends


def loaded(folder, text, constants):
    """The model."""
    message = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 13]> g {text}')
    for name, value in constants.items():
        message.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value, np.float32), name))
    onnx.save(message, folder / "model.onnx")
    return load(folder / "model.onnx")


@st.composite
def edits(draw, count):
    """Generate the values that a user wrote into some sites of a plan."""
    site_edits = st.sampled_from([{"scale": (0.25,)}, {"scale": (2.0,)}, {"range": (-1.0, 3.0)}])
    return draw(st.dictionaries(st.integers(0, count - 1), site_edits, max_size=2))


def test_a_site_that_stays_float_is_split(tmp_path):
    """Both parts have the reason: a range that stands for infinity, of which one Concat has another input near zero."""
    text = "(float[N,4] x) => (float[M,4] z) { t = Gemm(x, w, b) u = Concat<axis = 0>(x, t) y = Concat<axis = 0>(x, t)"
    constants = {"w": np.eye(4), "b": np.ones(4)}
    model = loaded(tmp_path, f"{text} z = Concat<axis = 0>(u, y) }}", constants)
    plan = gq.plan(model, rules="qnn")
    ends = {"x": (-0.06, 0.06), "t": (0, 2.0**110), "u": (-1, 1), "y": (-1, 1), "z": (-1, 1)}
    sketches = {TensorRef("", name): sketch_values(np.array(values, float), bits=10) for name, values in ends.items()}
    solution = solve_scales(prepare_for_plan(model, plan), plan, sketches)
    skips = [solution.skips[index] for index, site in enumerate(solution.plan.sites) if site.tensor.op == "t"]
    assert len(skips) == 2
    assert len({skip.reason for skip in skips}) == 1
    assert sorted(skip.uses for skip in skips) == [(Use("", "u", 1),), (Use("", "y", 1),)]


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), product_nets(), st.sampled_from(["qnn", "onnxruntime", "openvino"]))
def test_any_net_is_solved(tmp_path, data, net, rules):
    """Each site has a scale or a reason, ties are equal or told, biases fit or are float, Relus absorbed or alone."""
    text, constants, ends = net
    model = loaded(tmp_path, text, constants)
    edited_plan = gq.plan(model, rules=rules)
    model = prepare_for_plan(model, edited_plan)
    changed = list(edited_plan.sites)
    for position, gives in data.draw(edits(len(changed) or 1)).items() if changed else ():
        if changed[position].axis is None and changed[position].scheme.type.bits <= 16:
            changed[position] = replace(changed[position], **gives)
    edited_plan = replace(edited_plan, sites=tuple(changed))
    sketches = {TensorRef("", name): sketch_values(np.array(values), bits=10) for name, values in ends.items()}
    solution = solve_scales(model, edited_plan, sketches)
    event(f"{min(len(solution.conflicts), 2)} conflicts")
    sites, conflicting_tensors = (
        solution.plan.sites,
        {tensor for conflict in solution.conflicts for tensor in conflict.tensors},
    )
    feeding = {use: k for k, site in enumerate(sites) for use in site.uses}
    assert solution.params.keys() | solution.skips.keys() == set(range(len(sites)))
    assert not solution.params.keys() & solution.skips.keys()
    assert sum(len(site.uses) for site in sites) == len(feeding)
    graph = model.main
    for k, params in solution.params.items():
        site = sites[k]
        for use in site.tie:
            tied = feeding.get(use, -1)
            tied_params = solution.params.get(tied)
            if tied_params is not None and conflicting_tensors.isdisjoint({site.tensor, sites[tied].tensor}):
                assert (params.scale, params.zero_point) == (tied_params.scale, tied_params.zero_point)
        if site.scheme.observe.name == "bias":
            for use in site.uses:
                data_, weight = (solution.params[feeding[Use("", use.op, slot)]] for slot in (0, 1))
                np.testing.assert_allclose(params.scale, data_.scale * weight.scale, rtol=1e-6)
            assert (np.abs(constants[site.tensor.op]) / params.scale.astype(float) <= LARGEST).all()
        op = graph.op(site.tensor.op)
        if rules != "openvino" and op.kind == "relu" and params.zero_point > params.type.limits()[0]:
            before = graph.slots(op.name)[0]
            is_sole_consumer = len(graph.consumers(before)) == 1 and graph.op(before.op).kind == "gemm"
            quantized = {
                use for planned_site in sites if planned_site.tensor == site.tensor for use in planned_site.uses
            }
            if rules == "qnn" and is_sole_consumer and quantized == set(graph.consumers(site.tensor)):
                assert solution.params[feeding[Use("", op.name, 0)]] is params
    again = solve_scales(model, edited_plan, sketches)
    assert (again.notes, again.conflicts) == (solution.notes, solution.conflicts)

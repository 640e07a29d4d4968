"""Reasons for each scale, and conflicts between the requirements of rules."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from support.cli import run_cli

import graphquant as gq
from graphquant.formats.onnx import load
from graphquant.ir import TensorRef
from graphquant.observers import sketch_values
from graphquant.quantize import explain_scale, plan_from_json, plan_to_json, solve_scales

TEXT = """<ir_version: 8, opset_import: ["": 13]>
g (float[1,4] x) => (float[1,8] y, float[1,4] z)
<float[4,4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}>
{
    s = Softmax (x)
    y = Concat <axis = 1> (s, x)
    z = MatMul (x, w)
}"""

RULES = """
[scheme.act]
dtype = "uint8"
zero = "asymmetric"
smallest_range = 0.5
[scheme.unit]
dtype = "uint8"
zero = "asymmetric"
observe = { name = "fixed", low = 0.0, high = 1.0 }
[scheme.weight]
dtype = "int8"
observe = "absmax"
[scheme.grid]
dtype = "int8"
observe = { name = "fixed-point", exponent = -4 }
[[rule]]
name = "matrix"
producer = { kind = "parameter" }
quantize = "weight"
[[rule]]
name = "softmax"
producer = { kind = "softmax" }
quantize = "unit"
[[rule]]
name = "product"
producer = { kind = "matmul" }
quantize = "grid"
[[rule]]
name = "join"
producer = { kind = "concat" }
quantize = "same-as-input"
[[rule]]
name = "input"
producer = { kind = "input" }
quantize = "act"
"""


@pytest.fixture
def tied_net(tmp_path, monkeypatch):
    """The model and the rules in the working directory, with data."""
    monkeypatch.chdir(tmp_path)
    onnx.save(onnx.parser.parse_model(TEXT), "model.onnx")
    (tmp_path / "rules.toml").write_text(RULES)
    np.savez("data.npz", x=np.array([[-3.0, 4.0, 1.0, 2.0]], np.float32))
    return load(tmp_path / "model.onnx")


def solve_and_explain(model, plan, **ends):
    """The solution for a plan, with the sentences on each tensor."""
    solution = solve_scales(
        model, plan, {TensorRef("", name): sketch_values(np.array(values)) for name, values in ends.items()}
    )
    reasons = {
        site.tensor.op: explain_scale(model, solution.plan, k, solution) for k, site in enumerate(solution.plan.sites)
    }
    return solution, reasons


def test_each_scale_is_explained(tied_net):
    """The sentences have the origin of a range, its ties, what was raised, and the resulting scale."""
    plan = gq.plan(tied_net, rules="rules.toml")
    solution, reasons = solve_and_explain(tied_net, plan, x=(0.1, 0.2), y=(0.0, 0.9))
    assert reasons == {
        "w": ("its range [-1, 1] is computed by absmax from its values", "scale 0.00787402, range [-1.00787, 1]"),
        "s": (
            "its range is fixed by rule 'softmax': [0, 1]; Softmax outputs stay in [0, 1]",
            "it shares scale and zero point with x:0, as rule 'join' ties it to y:0",
            "scale 0.00392157, range [0, 1]",
        ),
        "x": (
            "its range [0.1, 0.2] is computed by minmax from the calibration data",
            "it shares scale and zero point with s:0, as rule 'join' ties it to y:0",
            "scale 0.00392157, range [0, 1]",
        ),
        "y": (
            "its range [0, 0.9] is computed by minmax from the calibration data",
            "it shares scale and zero point with x:0, by rule 'join'",
            "scale 0.00392157, range [0, 1]",
        ),
        "z": (
            "its scale is fixed by rule 'product': 2**-4",
            "scale 0.0625, range [-8, 7.9375]",
        ),
    }
    assert solution.conflicts == ()


def test_smallest_range_is_explained(tied_net):
    """A range that had to be raised says to what."""
    plan = gq.plan(tied_net, rules="rules.toml")
    single_site_plan = replace(plan, sites=tuple(site for site in plan.sites if site.tensor.op == "x"))
    assert solve_and_explain(tied_net, single_site_plan, x=(0.1, 0.2))[1]["x"] == (
        "its range [0.1, 0.2] is computed by minmax from the calibration data",
        "its range was widened to the scheme's smallest, 0.5",
        "scale 0.00196078, range [0, 0.5]",
    )


@pytest.mark.parametrize(("low", "kept"), [(-0.001, True), (-3.0, False)])
def test_a_fixed_range_that_a_tie_breaks(tied_net, low, kept):
    """Less than half a step beyond it changes nothing; more gives way to what values need, and both rules are named."""
    plan = gq.plan(tied_net, rules="rules.toml")
    solution, reasons = solve_and_explain(tied_net, plan, x=(low, 0.5), y=(low, 0.9))
    scale = solution.params[0].scale
    assert all(
        solution.params[k].scale == scale for k, site in enumerate(plan.sites) if site.tensor.op in {"s", "x", "y"}
    )
    if kept:
        assert scale == np.float32(1 / 255)
        assert solution.conflicts == ()
        return
    assert scale == np.float32(4 / 255)
    [conflict] = solution.conflicts
    assert conflict.rules == ("softmax", "join")
    assert conflict.tensors == (TensorRef("", "s"), TensorRef("", "x"))
    assert str(conflict) == (
        "rule 'softmax' for s:0 requires the range [0, 1], and rule 'join' for x:0 requires one scale with it and the"
        " range [-3, 0.5]: all tied tensors get [-3, 1]"
    )
    assert str(conflict) in reasons["s"]


def test_a_tie_of_schemes_that_differ(tied_net):
    """Both rules and both schemes are named."""
    plan = gq.plan(tied_net, rules="rules.toml")
    symmetric = [
        replace(site, scheme=replace(site.scheme, zero="symmetric")) if site.tensor.op == "y" else site
        for site in plan.sites
    ]
    solution, _ = solve_and_explain(tied_net, replace(plan, sites=tuple(symmetric)), x=(0.0, 0.2), y=(-1.0, 0.9))
    assert [str(conflict) for conflict in solution.conflicts] == [
        (
            "rule 'input' for x:0 requires uint8 asymmetric per tensor, and rule 'join' for y:0 requires uint8"
            " symmetric per tensor and one scale for both: each has its own scale"
        )
    ]


def test_explanation_without_data(tied_net):
    """Fixed ranges and ties are known before any sample was run."""
    plan = gq.plan(tied_net, rules="rules.toml")
    reasons = {site.tensor.op: explain_scale(tied_net, plan, k) for k, site in enumerate(plan.sites)}
    assert reasons["s"] == ("its range is fixed by rule 'softmax': [0, 1]; Softmax outputs stay in [0, 1]",)
    assert reasons["y"] == (
        "its range will be computed by minmax from the calibration data",
        "rule 'join' ties it to the input of y[0], y[1]: both share one scale",
    )


def test_explanation_of_edited_plans_and_clones(tied_net):
    """The sentences name values of an edited plan, and copies."""
    plan = gq.plan(tied_net, rules="rules.toml")
    site = plan.sites[0]
    cases = [
        (replace(site, scale=(0.5,)), "the plan gives its scale"),
        (replace(site, range=(-1.0, 2.0)), "the plan gives its range [-1, 2]"),
        (
            replace(site, clone_of=site.uses[0]),
            f"it takes the scale of {site.uses[0]}, of which it is a function clone",
        ),
        (
            replace(site, scheme=replace(site.scheme, family=None, range="dynamic")),
            "its range is computed in each run",
        ),
    ]
    for changed, sentences in cases:
        assert explain_scale(tied_net, replace(plan, sites=(changed,)), 0) == (sentences,)
    solution = solve_scales(tied_net, plan, {})
    skipped = next(k for k, planned_site in enumerate(plan.sites) if planned_site.tensor.op == "x")
    (sentence,) = explain_scale(tied_net, plan, skipped, solution)
    assert sentence == f"stays float: {solution.skips[skipped].reason}"


def test_explain_on_the_command_line(tied_net):
    """Without data the origin, with data or statistics the scale; both at once are refused."""
    plain = run_cli("explain", "model.onnx", "s", "--rules", "rules.toml")
    assert "    its range is fixed by rule 'softmax': [0, 1]; Softmax outputs stay in [0, 1]\n" in plain.output
    assert "scale 0" not in plain.output
    full = run_cli("explain", "model.onnx", "s", "--rules", "rules.toml", "--data", "data.npz")
    assert "    it shares scale and zero point with x:0, as rule 'join' ties it to y:0\n" in full.output
    assert "    scale 0.027451, range [-2.99216, 4.00784]\n" in full.output
    run_cli("calibrate", "model.onnx", "--data", "data.npz", "--all", "-o", "stats.gqs")
    same = run_cli("explain", "model.onnx", "s", "--rules", "rules.toml", "--stats", "stats.gqs")
    assert same.output == full.output
    failure = run_cli("explain", "model.onnx", "s", "--data", "data.npz", "--stats", "stats.gqs", code=2)
    assert "--stats replaces --data" in failure.output


def test_the_report_has_choices_and_conflicts(tied_net):
    """`insert` tells of the conflict, and its report has the sentences and the two rules."""
    invocation = run_cli(
        "insert", "model.onnx", "--rules", "rules.toml", "--data", "data.npz", "-o", "q.onnx", "--report", "r.json"
    )
    assert re.search(r"conflict: .*'softmax' for s:0 .*\[0, 1\],.* 'join' for x:0 ", invocation.output)
    report = json.loads(Path("r.json").read_text(encoding="utf-8"))
    assert report["changes"] == []
    assert [conflict["rules"] for conflict in report["conflicts"]] == [["softmax", "join"]]
    choices = {site["tensor"]["op"]: site["choices"] for site in report["sites"]}
    origin, scale = choices["w"]
    assert re.search(r"\[-1, 1\] .*absmax", origin)
    assert scale == "scale 0.00787402, range [-1.00787, 1]"


def test_fused_skips_survive_a_plan_file(tmp_path):
    """A plan that was written and read again still knows what holds only as long as a Relu can be absorbed."""
    text = """<ir_version: 8, opset_import: ["": 13]>
    g (float[1,1,4,4] x) => (float[1,1,4,4] y) <float[1,1,1,1] w = {2}> { c = Conv (x, w) y = Relu (c) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    plan = gq.plan(tmp_path / "model.onnx", rules="qnn")
    assert [(skip.tensor.op, skip.fused) for skip in plan.skips] == [("c", True)]
    assert plan_to_json(plan)["skips"][0]["fused"] is True
    assert plan_from_json(plan_to_json(plan)) == plan
    vitis_plan = gq.plan(tmp_path / "model.onnx", rules="vitis_ai")
    assert [skip.fused for skip in vitis_plan.skips] == [False]
    assert "fused" not in plan_to_json(vitis_plan)["skips"][0]

"""Explanations of the quantization of tensors."""

import json
import re

import numpy as np
import onnx
import onnx.parser
import pytest

import graphquant as gq
from graphquant.analysis.explain import explain_uses
from graphquant.errors import UsageError
from graphquant.formats.onnx import load
from graphquant.quantize import SiteSelection, make_plan, plan_to_json
from graphquant.rules import RuleMatcher, load_ruleset

pytestmark = pytest.mark.usefixtures("rules_alone")

MODEL = """
<ir_version: 8, opset_import: ["": 13]>
g (float[1,4] x) => (float[1,4] y, float[4] v)
<int64[1] s = {4}, int64[2] i = {0, 1}>
{
    r = Relu (x)
    ["/layer[0]/tanh"] y = Tanh (r)
    v = Reshape (r, s)
    n = Size (x)
}
"""
RULES = """
[scheme.q]
dtype = "uint8"
zero = "asymmetric"
[[rule]]
name = "leave-tanh"
why = "tanh stays float"
consumer = { kind = "tanh" }
quantize = "float"
[[rule]]
name = "relu"
producer = { kind = "relu" }
quantize = "q"
[[rule]]
name = "pass"
producer = { kind = "reshape" }
quantize = "same-as-input"
"""


@pytest.fixture
def asked(tmp_path):
    """Explains a name of the model under the rules."""
    onnx.save(onnx.parser.parse_model(MODEL), tmp_path / "model.onnx")
    (tmp_path / "rules.toml").write_text(RULES)
    matcher = RuleMatcher(load(tmp_path / "model.onnx"), load_ruleset([str(tmp_path / "rules.toml")]))
    plan = make_plan(matcher.model, matcher.ruleset, SiteSelection(family="onnx-qdq"))
    return lambda name: explain_uses(matcher, plan, name)


def outcomes(explanations):
    """Return tensor, use, winner, and whether the use is quantized, of each explanation."""
    return [
        (str(explanation.tensor), str(explanation.use), explanation.winner, explanation.quantized)
        for explanation in explanations
    ]


def test_each_use_has_its_rules_and_outcome(asked):
    """The winner, the outcome, and for each other rule the condition that failed, or "" if it has less priority."""
    explanations = asked("r:0")
    assert outcomes(explanations) == [
        ("r:0", "/layer[0]/tanh[0]", "leave-tanh", False),
        ("r:0", "v[0]", "relu", True),
    ]
    misses = [
        [(miss.rule.rule.name, *re.findall(r"producer|consumer|'\w+'", miss.reason)) for miss in explanation.misses]
        for explanation in explanations
    ]
    assert explanations[0].misses[0].reason == ""
    assert misses == [
        [("relu",), ("pass", "producer", "'relu'", "'reshape'")],
        [("leave-tanh", "consumer", "'reshape'", "'tanh'"), ("pass", "producer", "'relu'", "'reshape'")],
    ]


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("x", ["r[0]", "n[0]"]),
        ("r", ["r[0]", "/layer[0]/tanh[0]", "v[0]"]),
        ("v[0]", ["v[0]"]),
        ("/layer[0]/tanh", ["/layer[0]/tanh[0]", "@y[0]"]),
        ("y", ["@y[0]"]),
        ("/lay*", ["/layer[0]/tanh[0]", "@y[0]"]),
        ("/^v$/", ["v[0]", "@v[0]"]),
    ],
)
def test_names_that_explain_accepts(asked, what, expected):
    """Tensors, ops, uses, globs and regexes; brackets and slashes in a name are no pattern."""
    assert sorted(str(explanation.use) for explanation in asked(what)) == sorted(expected)


def test_ties_and_no_rule(asked):
    """A tie names its tensor; without a matching rule the outcome is that."""
    (tied,) = asked("v:0")
    assert outcomes([tied]) == [("v:0", "@v[0]", "pass", True)]
    assert "uint8 asymmetric per tensor" in tied.outcome
    assert tied.outcome.endswith("v[0]")
    assert outcomes(asked("x:0"))[0] == ("x:0", "r[0]", "", False)
    assert all(miss.reason for miss in asked("x:0")[0].misses)


def test_unknown_names(asked):
    """An unknown name is an error with suggestions; an integer tensor has its own message."""
    with pytest.raises(UsageError, match=r"'layer\[0\]/tan'\. Did you mean '/layer\[0\]/tanh'"):
        asked("layer[0]/tan")
    with pytest.raises(UsageError, match=r"'nothing_like_it'.* graphquant inspect MODEL --format graph-json"):
        asked("nothing_like_it")
    for name in ("i", "[i]"):
        with pytest.raises(UsageError, match=r"'\[?i\]?'.* no float tensors") as integer:
            asked(name)
        assert not re.search("Did you mean|graphquant inspect", str(integer.value))


def test_closeness_of_rules(asked):
    """Closeness is low for a rule of another op, higher if one side matches, and highest if both do."""
    for explanation in asked("r:0"):
        near = {miss.rule.rule.name: miss.closeness for miss in explanation.misses}
        if str(explanation.use) == "v[0]":
            assert near == {"leave-tanh": 1, "pass": 1}  # neither says anything of the other side
        else:
            assert near == {"relu": 3, "pass": 1}


def test_requested_op_of_each_use(asked):
    """The name of a tensor requests its producer, the name of an op its inputs too; each use has its state."""
    assert {(str(explanation.use), explanation.requested_op, explanation.quantized) for explanation in asked("r")} == {
        ("r[0]", ("", "r"), False),
        ("/layer[0]/tanh[0]", ("", "r"), False),
        ("v[0]", ("", "r"), True),
    }


def load_sample(samples, name="digits_cnn.onnx"):
    """A sample model."""
    return gq.load(samples / name)


def test_explain_takes_arrays_in_memory(samples):
    """The data has all forms that `insert` takes."""
    images = np.load(samples / "digits_cnn_calib.npz")["image"][:20]
    explanations = [
        str(gq.explain(gq.load(samples / "digits_cnn.onnx"), "depthwise/relu6:0", data=data))
        for data in ({"image": images}, images)
    ]
    assert explanations[0] == explanations[1]


def test_explain_a_saved_plan(samples, tmp_path, cli):
    """A saved plan is explained as it is, with its rules; missing rules are reported."""
    model = samples / "digits_cnn.onnx"
    rules = tmp_path / "mine.toml"
    rules.write_text(RULES)
    plan = gq.plan(gq.load(model), rules=[str(rules), "onnxruntime"], exclude="depthwise/relu6")
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(plan_to_json(plan)))
    assert gq.explain(gq.load(model), "depthwise/relu6:0", plan=saved).omitted_reason == ""
    output = cli("explain", model, "depthwise/relu6:0", "--plan", saved).stdout
    assert "not quantized: --exclude 'depthwise/relu6'" in output
    assert "near misses:" in output
    rules.write_text(rules.read_text() + "\n")
    output = cli("explain", model, "depthwise/relu6:0", "--plan", saved).stdout
    assert "not quantized: --exclude 'depthwise/relu6'" in output
    assert "near misses:" not in output
    assert str(gq.explain(gq.load(model), "depthwise/relu6:0", plan=saved).omitted_reason) in output
    rules.unlink()
    explanation = gq.explain(gq.load(model), "depthwise/relu6:0", plan=saved)
    assert str(rules) in explanation.omitted_reason
    assert explanation.uses[0].misses == ()
    with pytest.raises(UsageError, match="graphquant plan MODEL --format json"):
        gq.explain(gq.load(samples / "digits_rnn.onnx"), "image", plan=saved)
    assert "--plan" in cli("explain", model, "x", "--plan", saved, "--rules", "qnn", code=2).stderr


def test_fused_ops_in_the_headline(samples, cli):
    """The headline of a fused op names its fusion."""
    model = samples / "digits_cnn.onnx"
    headline = cli("explain", model, "stem/relu").stdout.splitlines()[0]
    assert headline.startswith("stem/relu: fused with stem/conv,")
    assert "not quantized" not in headline
    headline = cli("explain", model, "stem/conv").stdout.splitlines()[0]
    assert headline.startswith("stem/conv: reads 3 of 3 ")
    assert headline.endswith("fused with stem/relu.")
    headline = cli("explain", model, "stem/relu", "--rules", "weight_only").stdout.splitlines()[0]
    assert headline.startswith("stem/relu: reads 0 of 1 ")
    assert headline.endswith("not quantized.")


def test_the_backend_of_a_plan(samples):
    """The backend of the rules predicts the execution with placeholder ranges; `backend` selects another one."""
    explanation = gq.explain(load_sample(samples), "stem/conv")
    assert (explanation.backend, explanation.placeholder_ranges, explanation.already_quantized) == (
        "onnxruntime",
        True,
        False,
    )
    assert [(verdict.op, verdict.status, verdict.runs_as) for verdict in explanation.verdicts] == [
        ("stem/conv", "int8", "QLinearConv")
    ]
    weights_only = gq.explain(load_sample(samples), "stem/conv", rules="weight_only", backend="onnxruntime")
    assert [(verdict.status, verdict.broken_rule.rule) for verdict in weights_only.verdicts if verdict.broken_rule] == [
        ("float", "only-weights")
    ]
    assert gq.explain(load_sample(samples), "stem/conv", rules="qnn16").backend == "qnn"
    frozen = gq.explain(load_sample(samples, "digits_cnn.pb"), "stem/conv")
    assert (frozen.backend, [(verdict.op, verdict.status) for verdict in frozen.verdicts]) == (
        "tensorflow",
        [("stem/conv", "float")],
    )
    assert "insert -o MODEL.tflite" in frozen.verdicts[0].note
    assert gq.explain(load_sample(samples, "digits_cnn.pb"), "image").verdicts == ()
    with pytest.raises(UsageError, match="'onnxrt' is unknown"):
        gq.explain(load_sample(samples), "stem/conv", backend="onnxrt")


def test_predicted_verdicts_equal_those_of_the_written_model(samples, tmp_path):
    """The verdicts on a plan equal those on the written model, with data and with placeholder ranges."""
    data = str(samples / "digits_cnn_calib.npz")
    written = gq.insert(load_sample(samples), data=data, samples=8)
    expected = {
        (verdict.graph, verdict.op): verdict.status
        for verdict in gq.check(written.model, backend="onnxruntime").verdicts
    }
    for explanation in (
        gq.explain(load_sample(samples), "*", data=data),
        gq.explain(load_sample(samples), "*"),
        gq.explain(gq.load(written.save(tmp_path / "q.onnx")), "*"),
    ):
        predicted = {(verdict.graph, verdict.op): verdict.status for verdict in explanation.verdicts}
        assert len(predicted) > 20
        assert predicted.items() <= expected.items()


def test_explain_a_quantized_model(samples, tmp_path):
    """Rule, type and scale of each tensor that an op reads, and which others have the same scale."""
    result = gq.insert(load_sample(samples), data=str(samples / "digits_cnn_calib.npz"), samples=8)
    model = gq.load(result.save(tmp_path / "quant.onnx"))
    explanation = gq.explain(model, "max_pool")
    assert explanation.already_quantized
    (read,) = [entry for entry in explanation.uses if entry.use.op == "max_pool"]
    (insertion,) = [entry for entry in result.inserted if any(use.op == "max_pool" for use in entry.site.uses)]
    assert read.quantized
    assert (read.tensor, read.winner) == (insertion.site.tensor, insertion.site.rule)
    assert {"uint8", f"{insertion.params.scale.item():.6g}", "0"} <= set(read.outcome.replace(",", " ").split())
    assert [re.findall(r"\S+:\d", reason) for reason in read.scale_reasons] == [["max_pool:0"]]
    readers = [str(entry.use) for entry in explanation.uses if entry.tensor.op == "max_pool"]
    assert readers == ["residual_1/conv[0]", "residual/add[0]"]
    unquantized = gq.explain(model, "probabilities").uses
    assert [entry.quantized for entry in unquantized if entry.use.op == "@probabilities"] == [False]
    assert not gq.explain(model, "max_pool", rules="onnxruntime").already_quantized


def test_first_lines_of_explain(samples, cli):
    """The first lines have the outcome of the op; near misses follow, and --all lists all rules."""
    model = samples / "digits_cnn.onnx"
    lines = cli("explain", model, "stem/conv").stdout.splitlines()
    assert lines[0].startswith("stem/conv: ")
    assert {"onnxruntime", "QLinearConv."} <= set(lines[1].split())
    rules = len(load_ruleset(["onnxruntime"]).rules)
    uses = sum(" read by " in line for line in lines)
    assert len(lines) <= uses * 10
    listed = cli("explain", model, "stem/conv", "--all").stdout.splitlines()
    assert len(listed) > uses * (rules - 1)
    data = json.loads(cli("explain", model, "stem/conv", "--format", "json").stdout)
    assert [len(use["other_rules"]) + (use["rule"] is not None) for use in data["uses"]] == [rules] * uses
    assert data["ops"][0]["runs_as"] == "QLinearConv"


def test_passthrough_tensors_have_an_outcome(samples):
    """A passthrough rule of the producer is the outcome and the rule of a use."""
    (explanation,) = [
        entry
        for entry in gq.explain(load_sample(samples), "residual/add", rules="qnn").uses
        if entry.use.op == "residual/add" and entry.tensor.op == "max_pool"
    ]
    assert (explanation.winner, explanation.quantized) == ("passed-on", True)
    assert explanation.outcome.startswith("quantized already")

"""Why a tensor is quantized as it is."""

import json

import onnx
import onnx.parser
import pytest

import graphquant as gq
from graphquant import api
from graphquant.analysis import explain_uses
from graphquant.errors import UsageError
from graphquant.formats.onnx import load
from graphquant.quantize import SiteSelection, make_plan, plan_to_json
from graphquant.rules import RuleMatcher, load_ruleset

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
    """Tensor, use, winner and outcome of each."""
    return [
        (str(explanation.tensor), str(explanation.use), explanation.winner, explanation.outcome)
        for explanation in explanations
    ]


def test_each_use_has_its_rules_and_outcome(asked):
    """The winner, the outcome, and for every other rule the condition that failed, or nothing if it came too late."""
    explanations = asked("r:0")
    assert outcomes(explanations) == [
        ("r:0", "/layer[0]/tanh[0]", "leave-tanh", "not quantized: tanh stays float"),
        ("r:0", "v[0]", "relu", "quantized to uint8 asymmetric per tensor"),
    ]
    misses = [[(miss.rule.rule.name, miss.reason) for miss in explanation.misses] for explanation in explanations]
    assert misses == [
        [("relu", ""), ("pass", "producer r is 'relu', not 'reshape'")],
        [("leave-tanh", "consumer v is 'reshape', not 'tanh'"), ("pass", "producer r is 'relu', not 'reshape'")],
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
def test_what_can_be_asked_for(asked, what, expected):
    """Tensors, ops, uses, globs and regexes; brackets and slashes in a name are no pattern."""
    assert sorted(str(explanation.use) for explanation in asked(what)) == sorted(expected)


def test_ties_and_no_rule(asked):
    """A tie names what it is tied to; where no rule matches, that is the outcome."""
    assert outcomes(asked("v:0")) == [
        ("v:0", "@v[0]", "pass", "quantized to uint8 asymmetric per tensor, with the scale of what v[0] reads")
    ]
    assert outcomes(asked("x:0"))[0] == ("x:0", "r[0]", "", "not quantized: no rule matches")


def test_what_is_not_there(asked):
    """An unknown name is an error with the closest ones; one that is not float says so."""
    with pytest.raises(UsageError, match=r"called 'layer\[0\]/tan'\. Did you mean '/layer\[0\]/tanh'"):
        asked("layer[0]/tan")
    with pytest.raises(UsageError, match=r"called 'i'\. It makes and reads no float tensor\."):
        asked("i")
    with pytest.raises(UsageError, match=r"called 'nothing_like_it'\. `graphquant plan` prints the names"):
        asked("nothing_like_it")


def test_how_close_rules_came(asked):
    """A rule for another op is far, one that fails on the other side only is near, one that holds is nearest."""
    for explanation in asked("r:0"):
        near = {miss.rule.rule.name: miss.closeness for miss in explanation.misses}
        if str(explanation.use) == "v[0]":
            assert near == {"leave-tanh": 1, "pass": 1}  # neither says anything of the other side
        else:
            assert near == {"relu": 3, "pass": 1}


def test_which_op_was_asked_for(asked):
    """A tensor's name asks for what makes it, an op's for what it reads too, and each use tells if it is quantized."""
    assert {(str(explanation.use), explanation.requested_op, explanation.quantized) for explanation in asked("r")} == {
        ("r[0]", ("", "r"), False),
        ("/layer[0]/tanh[0]", ("", "r"), False),
        ("v[0]", ("", "r"), True),
    }


def sample(samples, name="digits_cnn.onnx"):
    """A sample model."""
    return gq.load(samples / name)


def test_a_plan_that_is_given(samples, tmp_path, cli):
    """A saved plan is explained as it is, with the rules that it was made by; where these are gone that is said."""
    model = samples / "digits_cnn.onnx"
    rules = tmp_path / "mine.toml"
    rules.write_text(RULES)
    plan = gq.plan(gq.load(model), rules=[str(rules), "onnxruntime"], exclude="depthwise/relu6")
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(plan_to_json(plan)))
    output = cli("explain", model, "depthwise/relu6:0", "--plan", saved).stdout
    assert "not quantized: --exclude 'depthwise/relu6'" in output
    assert "near misses:" in output
    rules.write_text(rules.read_text() + "\n")
    output = cli("explain", model, "depthwise/relu6:0", "--plan", saved).stdout
    assert "not quantized: --exclude 'depthwise/relu6'" in output
    assert "near misses:" not in output
    assert "the rule files changed" in output
    rules.unlink()
    explanation = api.explain(gq.load(model), "depthwise/relu6:0", plan=saved)
    assert str(rules) in explanation.omitted_reason
    assert explanation.uses[0].misses == ()
    with pytest.raises(UsageError, match="belongs to another model"):
        api.explain(gq.load(samples / "digits_rnn.onnx"), "image", plan=saved)
    assert "--plan" in cli("explain", model, "x", "--plan", saved, "--rules", "qnn", code=2).stderr


def test_what_is_one_op(samples, cli):
    """The headline of what a backend runs within another op says that, and not that it reads floats."""
    model = samples / "digits_cnn.onnx"
    output = cli("explain", model, "stem/relu").stdout
    assert output.startswith("stem/relu: fused with stem/conv, its output is quantized.")
    output = cli("explain", model, "stem/conv").stdout
    assert output.startswith("stem/conv: reads 2 of 3 float inputs quantized, fused with stem/relu.")
    output = cli("explain", model, "stem/relu", "--rules", "weight_only").stdout
    assert output.startswith("stem/relu: reads 0 of 1 float input quantized, its output is not quantized.")


def test_the_backend_of_a_plan(samples):
    """What the rules are for tells how it will run the op, on made-up ranges; `backend` asks another."""
    explanation = api.explain(sample(samples), "stem/conv")
    assert (explanation.backend, explanation.placeholder_ranges, explanation.already_quantized) == (
        "onnxruntime",
        True,
        False,
    )
    assert [(verdict.op, verdict.status, verdict.runs_as) for verdict in explanation.verdicts] == [
        ("stem/conv", "int8", "QLinearConv")
    ]
    weights_only = api.explain(sample(samples), "stem/conv", rules="weight_only", backend="onnxruntime")
    assert [(verdict.status, verdict.broken_rule.rule) for verdict in weights_only.verdicts if verdict.broken_rule] == [
        ("float", "no-quantized-output")
    ]
    assert api.explain(sample(samples), "stem/conv", rules="qnn16").backend == "qnn"
    frozen = api.explain(sample(samples, "digits_cnn.pb"), "stem/conv")
    assert (frozen.backend, [(verdict.op, verdict.status) for verdict in frozen.verdicts]) == (
        "tensorflow",
        [("stem/conv", "float")],
    )
    assert "insert -o MODEL.tflite" in frozen.verdicts[0].note
    assert api.explain(sample(samples, "digits_cnn.pb"), "image").verdicts == ()
    with pytest.raises(UsageError, match="no backend 'onnxrt'"):
        api.explain(sample(samples), "stem/conv", backend="onnxrt")


def test_a_plan_with_data_is_foretold_as_it_is_written(samples, tmp_path):
    """The verdicts on a plan are those on the model that insert writes, with data and with made-up ranges."""
    data = str(samples / "digits_cnn_calib.npz")
    written = gq.insert(sample(samples), data=data, samples=8)
    expected = {
        (verdict.graph, verdict.op): verdict.status
        for verdict in gq.check(written.model, backend="onnxruntime").verdicts
    }
    for explanation in (
        api.explain(sample(samples), "*", data=data),
        api.explain(sample(samples), "*"),
        api.explain(gq.load(written.save(tmp_path / "q.onnx")), "*"),
    ):
        predicted = {(verdict.graph, verdict.op): verdict.status for verdict in explanation.verdicts}
        assert len(predicted) > 20
        assert predicted.items() <= expected.items()


def test_a_written_model_tells_what_is_in_it(samples, tmp_path):
    """Rule, type and scale of each tensor that an op reads, and which others have the same scale."""
    result = gq.insert(sample(samples), data=str(samples / "digits_cnn_calib.npz"), samples=8)
    model = gq.load(result.save(tmp_path / "quant.onnx"))
    explanation = api.explain(model, "max_pool")
    assert explanation.already_quantized
    (read,) = [entry for entry in explanation.uses if entry.use.op == "max_pool"]
    (insertion,) = [entry for entry in result.inserted if any(use.op == "max_pool" for use in entry.site.uses)]
    assert read.quantized
    assert (read.tensor, read.winner) == (insertion.site.tensor, insertion.site.rule)
    assert read.outcome.startswith(f"quantized to uint8, scale {insertion.params.scale.item():.6g}, zero point 0, by ")
    assert read.scale_reasons == ("one scale and zero point with max_pool:0",)
    readers = [str(entry.use) for entry in explanation.uses if entry.tensor.op == "max_pool"]
    assert readers == ["residual_1/conv[0]", "residual/add[0]"]
    unquantized = api.explain(model, "probabilities").uses
    assert [entry.quantized for entry in unquantized if entry.use.op == "@probabilities"] == [False]
    assert not api.explain(model, "max_pool", rules="onnxruntime").already_quantized


def test_what_a_user_reads_first(samples, cli):
    """The first lines say what becomes of the op; rules that came close follow, all of them only when asked for."""
    model = samples / "digits_cnn.onnx"
    lines = cli("explain", model, "stem/conv").stdout.splitlines()
    assert lines[:2] == [
        "stem/conv: reads 2 of 3 float inputs quantized, fused with stem/relu.",
        "  onnxruntime will run it on integers, as QLinearConv.",
    ]
    rules = len(load_ruleset(["onnxruntime"]).rules)
    uses = sum(" read by " in line for line in lines)
    assert len(lines) < uses * 10
    listed = cli("explain", model, "stem/conv", "--all").stdout.splitlines()
    assert len(listed) > uses * (rules - 1)
    data = json.loads(cli("explain", model, "stem/conv", "--format", "json").stdout)
    assert [len(use["other_rules"]) + (use["rule"] is not None) for use in data["uses"]] == [rules] * uses
    assert data["ops"][0]["runs_as"] == "QLinearConv"


def test_a_passed_on_tensor_is_no_miss(samples):
    """Where a rule says that the producer hands quantized values on, that is the outcome and the rule."""
    (explanation,) = [
        entry
        for entry in api.explain(sample(samples), "residual/add", rules="qnn").uses
        if entry.use.op == "residual/add" and entry.tensor.op == "max_pool"
    ]
    assert (explanation.winner, explanation.quantized) == ("passed-on", True)
    assert explanation.outcome.startswith("quantized already: what makes it hands quantized values on")

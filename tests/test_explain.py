"""Why a tensor is quantized as it is."""

import json

import onnx
import onnx.parser
import pytest

import graphquant as gq
from graphquant import pipeline
from graphquant.errors import UsageError
from graphquant.explain import explain
from graphquant.formats.onnx import load
from graphquant.match import Matcher
from graphquant.plans import Choice, make_plan, to_json
from graphquant.ruleset import load_ruleset

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
quantize = "leave"
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
    matcher = Matcher(load(tmp_path / "model.onnx"), load_ruleset([str(tmp_path / "rules.toml")]))
    plan = make_plan(matcher.model, matcher.ruleset, Choice(family="onnx-qdq"))
    return lambda what: explain(matcher, plan, what)


def told(explanations):
    """Tensor, use, winner and outcome of each."""
    return [(str(item.tensor), str(item.use), item.winner, item.outcome) for item in explanations]


def test_each_use_has_its_rules_and_outcome(asked):
    """The winner, the outcome, and for every other rule the condition that failed, or nothing if it came too late."""
    found = asked("r:0")
    assert told(found) == [
        ("r:0", "/layer[0]/tanh[0]", "leave-tanh", "not quantized: tanh stays float"),
        ("r:0", "v[0]", "relu", "quantized to uint8 asymmetric per tensor"),
    ]
    misses = [[(miss.rule.rule.name, miss.reason) for miss in item.misses] for item in found]
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
    assert sorted(str(item.use) for item in asked(what)) == sorted(expected)


def test_ties_and_no_rule(asked):
    """A tie names what it is tied to; where no rule matches, that is the outcome."""
    assert told(asked("v:0")) == [
        ("v:0", "@v[0]", "pass", "quantized to uint8 asymmetric per tensor, with the scale of what v[0] reads")
    ]
    assert told(asked("x:0"))[0] == ("x:0", "r[0]", "", "not quantized: no rule matches")


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
    for item in asked("r:0"):
        near = {miss.rule.rule.name: miss.near for miss in item.misses}
        if str(item.use) == "v[0]":
            assert near == {"leave-tanh": 1, "pass": 1}  # neither says anything of the other side
        else:
            assert near == {"relu": 3, "pass": 1}


def test_which_op_was_asked_for(asked):
    """A tensor's name asks for what makes it, an op's for what it reads too, and each use tells if it is quantized."""
    assert {(str(one.use), one.asked, one.quantized) for one in asked("r")} == {
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
    made = gq.plan(gq.load(model), rules=[str(rules), "onnxruntime"], exclude="depthwise/relu6")
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(to_json(made)))
    said = cli("explain", model, "depthwise/relu6:0", "--plan", saved).stdout
    assert "not quantized: --exclude 'depthwise/relu6'" in said
    assert "matches too, but" in said
    assert "cannot be told" not in said
    rules.write_text(rules.read_text() + "\n")
    said = cli("explain", model, "depthwise/relu6:0", "--plan", saved).stdout
    assert "not quantized: --exclude 'depthwise/relu6'" in said
    assert "came close:" not in said
    assert "since those of the plan have changed" in said
    rules.unlink()
    found = pipeline.explain(gq.load(model), "depthwise/relu6:0", plan=saved)
    assert "are not at hand. " in found.untold
    assert found.uses[0].misses == ()
    with pytest.raises(UsageError, match="made for another model"):
        pipeline.explain(gq.load(samples / "digits_rnn.onnx"), "image", plan=saved)
    assert "Give either" in cli("explain", model, "x", "--plan", saved, "--rules", "qnn", code=2).stderr


def test_what_is_one_op(samples, cli):
    """The headline of what a backend runs within another op says that, and not that it reads floats."""
    model = samples / "digits_cnn.onnx"
    assert "stem/relu: one op with stem/conv, what it makes is quantized." in cli("explain", model, "stem/relu").stdout
    said = cli("explain", model, "stem/conv").stdout
    assert "stem/conv: reads 2 of 3 float inputs quantized, one op with stem/relu behind it." in said
    said = cli("explain", model, "stem/relu", "--rules", "weight_only").stdout
    assert "stem/relu: reads 0 of 1 float input quantized, what it makes is not quantized." in said


def test_the_backend_of_a_plan(samples):
    """What the rules are for tells how it will run the op, on made-up ranges; `backend` asks another."""
    found = pipeline.explain(sample(samples), "stem/conv")
    assert (found.backend, found.assumed, found.written) == ("onnxruntime", True, False)
    assert [(one.op, one.status, one.runs_as) for one in found.verdicts] == [("stem/conv", "low", "QLinearConv")]
    left = pipeline.explain(sample(samples), "stem/conv", rules="weight_only", backend="onnxruntime")
    assert [(one.status, one.broken.rule) for one in left.verdicts if one.broken] == [("float", "no-quantized-output")]
    assert pipeline.explain(sample(samples), "stem/conv", rules="qnn16").backend == "qnn"
    frozen = pipeline.explain(sample(samples, "digits_cnn.pb"), "stem/conv")
    assert (frozen.backend, [(one.op, one.status) for one in frozen.verdicts]) == (
        "tensorflow",
        [("stem/conv", "float")],
    )
    assert "insert -o MODEL.tflite" in frozen.verdicts[0].note
    assert pipeline.explain(sample(samples, "digits_cnn.pb"), "image").verdicts == ()
    with pytest.raises(UsageError, match="no backend 'onnxrt'"):
        pipeline.explain(sample(samples), "stem/conv", backend="onnxrt")


def test_a_plan_with_data_is_foretold_as_it_is_written(samples, tmp_path):
    """The verdicts on a plan are those on the model that insert writes, with data and with made-up ranges."""
    data = str(samples / "digits_cnn_calib.npz")
    written = gq.insert(sample(samples), data=data, samples=8)
    expected = {(one.graph, one.op): one.status for one in gq.check(written.model, backend="onnxruntime").verdicts}
    for found in (
        pipeline.explain(sample(samples), "*", data=data),
        pipeline.explain(sample(samples), "*"),
        pipeline.explain(gq.load(written.save(tmp_path / "q.onnx")), "*"),
    ):
        told = {(one.graph, one.op): one.status for one in found.verdicts}
        assert len(told) > 20
        assert told.items() <= expected.items()


def test_a_written_model_tells_what_is_in_it(samples, tmp_path):
    """Rule, type and scale of each tensor that an op reads, and which others have the same scale."""
    result = gq.insert(sample(samples), data=str(samples / "digits_cnn_calib.npz"), samples=8)
    model = gq.load(result.save(tmp_path / "quant.onnx"))
    found = pipeline.explain(model, "max_pool")
    assert found.written
    (read,) = [one for one in found.uses if one.use.op == "max_pool"]
    (done,) = [one for one in result.inserted if any(use.op == "max_pool" for use in one.site.uses)]
    assert read.quantized
    assert (read.tensor, read.winner) == (done.site.tensor, done.site.rule)
    assert read.outcome.startswith(f"quantized to uint8, scale {done.params.scale.item():.6g}, zero point 0, by ")
    assert read.choices == ("one scale and zero point with max_pool:0",)
    readers = [str(one.use) for one in found.uses if one.tensor.op == "max_pool"]
    assert readers == ["residual_1/conv[0]", "residual/add[0]"]
    unquantized = pipeline.explain(model, "probabilities").uses
    assert [one.quantized for one in unquantized if one.use.op == "@probabilities"] == [False]
    assert not pipeline.explain(model, "max_pool", rules="onnxruntime").written


def test_what_a_user_reads_first(samples, cli):
    """The first lines say what becomes of the op; rules that came close follow, all of them only when asked for."""
    model = samples / "digits_cnn.onnx"
    lines = cli("explain", model, "stem/conv").stdout.splitlines()
    assert lines[:2] == [
        "stem/conv: reads 2 of 3 float inputs quantized, one op with stem/relu behind it.",
        "  onnxruntime will run it on integers, as QLinearConv.",
    ]
    rules = len(load_ruleset(["onnxruntime"]).rules)
    uses = sum(" read by " in line for line in lines)
    assert len(lines) < uses * 10
    listed = cli("explain", model, "stem/conv", "--all").stdout.splitlines()
    assert len(listed) > uses * (rules - 1)
    data = json.loads(cli("explain", model, "stem/conv", "--format", "json").stdout)
    assert [len(use["others"]) + (use["rule"] is not None) for use in data["uses"]] == [rules] * uses
    assert data["ops"][0]["runs_as"] == "QLinearConv"


def test_a_passed_on_tensor_is_no_miss(samples):
    """Where a rule says that the producer hands quantized values on, that is the outcome and the rule."""
    (found,) = [
        one
        for one in pipeline.explain(sample(samples), "residual/add", rules="qnn").uses
        if one.use.op == "residual/add" and one.tensor.op == "max_pool"
    ]
    assert (found.winner, found.quantized) == ("passed-on", True)
    assert found.outcome.startswith("quantized already: what makes it hands quantized values on")

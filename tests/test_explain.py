"""Why a tensor is quantized as it is."""

import onnx
import onnx.parser
import pytest

from graphquant.errors import UsageError
from graphquant.explain import explain
from graphquant.formats.onnx import load
from graphquant.match import Matcher
from graphquant.plans import Choice, make_plan
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

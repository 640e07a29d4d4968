"""Matches to plans: sites, ties, skips, order."""

import re
import time

import numpy as np
import onnx
import onnx.parser
import pytest
from support.onnx_models import CAPTURED_TENSOR
from support.rule_files import input_rule, rule_text, weight_rule

import graphquant as gq
from graphquant.api.inspect import explain
from graphquant.errors import UsageError
from graphquant.formats.onnx import load
from graphquant.ir import Graph, Model, Op, Output, TensorRef, Use
from graphquant.numerics import IntType
from graphquant.quantize import SiteSelection, SkipCode, make_plan
from graphquant.rules import load_ruleset

SCHEMES = """
[scheme.q]
dtype = "uint8"
zero = "asymmetric"
[scheme.wide]
dtype = "int8"
[scheme.channel]
dtype = "int8"
per = "channel"
observe = "absmax"
[scheme.bias]
dtype = "int32"
observe = "bias"
"""
HEAD = '<ir_version: 8, opset_import: ["": 13]>\n'


def make_rule_plan(tmp_path, text, rules, **choice):
    """The plan of rules, as TOML, for a model, as text."""
    path, file = tmp_path / "model.onnx", tmp_path / "rules.toml"
    onnx.save(onnx.parser.parse_model(HEAD + text), path)
    file.write_text(SCHEMES + rules)
    return make_plan(load(path), load_ruleset([str(file)]), SiteSelection(family="onnx-qdq", **choice))


def rule_for_all(name, quantize="q", producer='{ kind = "*" }', consumer="{}", more=""):
    """Return a rule as TOML, which matches every producer by default."""
    return rule_text(name, producer, consumer, quantize, more)


def skip_reasons(plan):
    """The sites as text: tensor, scheme, axis, uses, ties."""
    lines = []
    for site in plan.sites:
        axis = "" if site.axis is None else f" axis {site.axis}"
        tie = f" = {' '.join(map(str, site.tie))}" if site.tie else ""
        lines.append(f"{site.tensor} {site.scheme.name}{axis} -> {' '.join(map(str, site.uses))}{tie}")
    return lines


def reasons(plan):
    """Reason of each skip by tensor."""
    return {f"{skip.tensor} -> {' '.join(map(str, skip.uses))}": skip.reason for skip in plan.skips}


def skip_codes(plan):
    """Code and rule of each skip by tensor."""
    return {f"{skip.tensor} -> {' '.join(map(str, skip.uses))}": (skip.code, skip.rule) for skip in plan.skips}


FAN = "g (float[2] x) => (float[2] y, float[2] z, float[2] v) { y = Tanh(x)\nz = Relu(x)\nv = Neg(x) }"


def test_one_site_with_all_uses(tmp_path):
    """Uses that want the same share one site, whichever rule claimed them; the first rule's name stands."""
    rules = rule_for_all("tanh", producer="{}", consumer='{ kind = "tanh" }') + rule_for_all(
        "x", producer='{ name = "x" }'
    )
    plan = make_rule_plan(tmp_path, FAN, rules)
    assert skip_reasons(plan) == ["x:0 q -> y[0] z[0] v[0]"]
    assert (plan.sites[0].rule, plan.sites[0].parameter, plan.sites[0].graph) == ("tanh", False, "")
    assert plan.unused == ()


def test_several_sites_for_several_schemes(tmp_path):
    """Uses of one tensor that want different schemes have a site each."""
    rules = (
        rule_for_all("relu", "wide", "{}", '{ kind = "relu" }')
        + rule_for_all("x", producer='{ name = "x" }')
        + rule_for_all("no", producer='{ kind = "conv" }')
    )
    plan = make_rule_plan(tmp_path, FAN, rules)
    assert skip_reasons(plan) == ["x:0 q -> y[0] v[0]", "x:0 wide -> z[0]"]
    assert plan.unused == ("no",)


CONV = """
g (float[1,3,8,8] x) => (float[1,4,8,8] y, float[1,4,8,8] z)
<float[4,3,1,1] w = {1,2,3,4,5,6,7,8,9,1,2,3}, float[4] b = {1,2,3,4}>
{ y = Conv(x, w, b)
 z = Conv(x, w, b) }
"""


def test_channels_biases_and_order(tmp_path):
    """A weight has the axis of its reader, and sites come in the order of the model; copies are the solver's."""
    rules = (
        rule_for_all("bias", "bias", "{}", '{ input = "bias" }')
        + rule_for_all("weight", "channel", "{}", '{ input = "weight" }')
        + rule_for_all("input", producer="{}", consumer='{ input = "input", kind = "conv" }')
    )
    plan = make_rule_plan(tmp_path, CONV, rules)
    assert skip_reasons(plan) == [
        "x:0 q -> y[0] z[0]",
        "w:0 channel axis 0 -> y[1] z[1]",
        "b:0 bias -> y[2] z[2]",
    ]
    assert [site.parameter for site in plan.sites] == [False, True, True]


def test_reasons_to_skip(tmp_path):
    """A rule that cannot be followed is a skip with its reason."""
    text = """
g (float[2] x, float16[2] h) => (float[2] y, float16[2] k, float[2] e)
<float s = {0.5}, uint8 p = {3}>
{
    q = QuantizeLinear (x, s, p)
    d = DequantizeLinear (q, s, p)
    y = Neg (d)
    k = Neg (h)
    u = Unknown.Op (x)
    e = Neg (u)
}
""".replace("Unknown.Op", "com.example.Foo")
    text = text.replace("g (", "g (", 1)
    head = '<ir_version: 8, opset_import: ["": 13, "com.example": 1]>\n'
    path, file = tmp_path / "model.onnx", tmp_path / "rules.toml"
    onnx.save(onnx.parser.parse_model(head + text), path)
    file.write_text(
        SCHEMES
        + rule_for_all("free", "float", consumer='{ kind = "output" }')
        + rule_for_all("channel", "channel", '{ name = "u" }')
        + rule_for_all("all", producer="{}", consumer='{ kind = "neg|quantize" }')
    )
    plan = make_plan(load(path), load_ruleset([str(file)]), SiteSelection(family="onnx-qdq"))
    assert skip_reasons(plan) == []
    assert skip_codes(plan) == {
        "x:0 -> q[0]": (SkipCode.QUANTIZED, "all"),
        "s:0 -> q[1]": (SkipCode.QUANTIZED, "all"),
        "d:0 -> y[0]": (SkipCode.QUANTIZED, "all"),
        "h:0 -> k[0]": (SkipCode.SCHEME, "all"),
        "u:0 -> e[0]": (SkipCode.SCHEME, "channel"),
        "y:0 -> @y[0]": (SkipCode.RULE, "free"),
        "k:0 -> @k[0]": (SkipCode.RULE, "free"),
        "e:0 -> @e[0]": (SkipCode.RULE, "free"),
    }
    assert re.search("onnxruntime .*float16 .*convert .*float32", reasons(plan)["h:0 -> k[0]"])
    assert re.search(r"'channel' .*per channel,.* e\[0\]", reasons(plan)["u:0 -> e[0]"])
    assert "'free'" in reasons(plan)["y:0 -> @y[0]"]
    file.write_text(SCHEMES + rule_for_all("u", producer='{ name = "u" }'))
    plan = make_plan(load(path), load_ruleset([str(file)]), SiteSelection(family="onnx-qdq"))
    assert skip_codes(plan) == {"u:0 -> e[0]": (SkipCode.SCHEME, "u")}
    assert "data type" in reasons(plan)["u:0 -> e[0]"]
    plan = make_plan(load(path), load_ruleset([str(file)]), SiteSelection(family="fake-quant"))
    assert skip_reasons(plan) == []


def test_include_and_exclude(tmp_path):
    """Both name tensors, their ops or their consumers; one that names nothing is an error."""
    rules = rule_for_all("all")
    assert skip_reasons(make_rule_plan(tmp_path, FAN, rules, include=("y",))) == ["x:0 q -> y[0]", "y:0 q -> @y[0]"]
    plan = make_rule_plan(tmp_path, FAN, rules, exclude=("/^[zv]$/",))
    assert skip_reasons(plan) == ["x:0 q -> y[0]", "y:0 q -> @y[0]"]
    assert reasons(plan)["x:0 -> z[0] v[0]"] == "--exclude '/^[zv]$/'"
    included = make_rule_plan(tmp_path, FAN, rules, include=("y",))
    assert skip_codes(included)["z:0 -> @z[0]"] == (SkipCode.SELECTION, "all")
    assert "--include" in reasons(included)["z:0 -> @z[0]"]
    with pytest.raises(UsageError, match=r"--exclude 'nothing\*'"):
        make_rule_plan(tmp_path, FAN, rules, exclude=("nothing*",))


TIED = """
g (float[1,4] x, float[1,4] y) => (float[1,8] z)
<int64[2] s = {1, 4}>
{
    a = Reshape (x, s)
    b = Transpose <perm = [0, 1]> (a)
    c = Concat <axis = 1> (b, y)
    d = Transpose <perm = [0, 1]> (c)
    z = Relu (d)
}
"""
PASS = rule_for_all("pass", "same-as-input", '{ kind = "reshape|transpose|concat" }')


def test_ties_follow_chains(tmp_path):
    """A tied tensor has the scheme of what feeds its producer, per tensor, however long the chain."""
    plan = make_rule_plan(tmp_path, TIED, PASS + rule_for_all("in", producer='{ name = "x" }'))
    assert skip_reasons(plan) == [
        "x:0 q -> a[0]",
        "a:0 q -> b[0] = a[0]",
        "b:0 q -> c[0] = b[0]",
        "c:0 q -> d[0] = c[0] c[1]",
        "d:0 q -> z[0] = d[0]",
    ]
    assert make_rule_plan(tmp_path, TIED, PASS + rule_for_all("in", producer='{ name = "/^[xy]$/" }')).sites[
        -1
    ].tie == (Use("", "d", 0),)


def test_arithmetic_of_weights_stays_float(tmp_path):
    """Ops that compute a weight from weights read them in float, to round the weight only once. A name insists."""
    text = (
        "g (float[1,2] x) => (float[1,2] y) <float[2,2] w = {1, 2, 3, 4}, float[2] s = {1, 2}>"
        " { ws = Mul(w, s)\ny = MatMul(x, ws) }"
    )
    rules = rule_for_all("all", consumer='{ kind = "mul|matmul" }')
    plan = make_rule_plan(tmp_path, text, rules)
    assert skip_reasons(plan) == ["x:0 q -> y[0]", "ws:0 q -> y[1]"]
    assert skip_codes(plan) == dict.fromkeys(("w:0 -> ws[0]", "s:0 -> ws[1]"), (SkipCode.WEIGHT, "all"))
    plan = make_rule_plan(tmp_path, text, rule_for_all("named", producer='{ name = "w" }') + rules)
    assert "w:0 q -> ws[0]" in skip_reasons(plan)


def test_a_tie_to_nothing_is_skipped(tmp_path):
    """If nothing that feeds the chain is quantized, each link is a skip, and so is one without float input."""
    plan = make_rule_plan(tmp_path, TIED, PASS)
    assert skip_reasons(plan) == []
    links = ("a:0 -> b[0]", "b:0 -> c[0]", "c:0 -> d[0]", "d:0 -> z[0]")
    assert skip_codes(plan) == dict.fromkeys(links, (SkipCode.TIE, "pass"))
    plan = make_rule_plan(tmp_path, FAN, rule_for_all("x", "same-as-input", '{ name = "x" }'))
    assert list(skip_codes(plan).values()) == [(SkipCode.TIE, "x")]


def test_tie_without_effect_goes_to_the_next_rule(tmp_path):
    """If nothing feeds a tie, the next matching rule gets the use, and later ties follow it."""
    plan = make_rule_plan(tmp_path, TIED, PASS + rule_for_all("in", consumer='{ kind = "concat" }'))
    assert skip_reasons(plan) == ["y:0 q -> c[1]", "b:0 q -> c[0]", "c:0 q -> d[0] = c[0] c[1]", "d:0 q -> z[0] = d[0]"]
    assert [site.rule for site in plan.sites] == ["in", "in", "pass", "pass"]
    assert "tie" in reasons(plan)["a:0 -> b[0]"]
    assert skip_codes(plan) == {"a:0 -> b[0]": (SkipCode.TIE, "pass")}
    skipped_plan = make_rule_plan(tmp_path, TIED, PASS + rule_for_all("no", "float", consumer='{ kind = "relu" }'))
    assert skip_codes(skipped_plan)["d:0 -> z[0]"] == (SkipCode.RULE, "no")
    plan = make_rule_plan(tmp_path, TIED, PASS + rule_for_all("out", consumer='{ kind = "relu" }'))
    assert skip_reasons(plan) == ["d:0 q -> z[0]"]


def test_passthrough_tensors_get_no_pair(tmp_path):
    """Behind an op that hands integers on nothing is inserted, and ties reach through to where they come from."""
    passed = rule_for_all("pass", "passthrough", '{ kind = "reshape|transpose" }') + rule_for_all(
        "tie", "same-as-input", kind("concat")
    )
    text = """
    g (float[1,4] x, float[4,1] y) => (float[1,8] z)
    {
        a = Transpose (x)
        b = Transpose (a)
        c = Transpose (y)
        d = Concat <axis = 1> (b, c)
        z = Relu (d)
    }
    """
    whole = make_rule_plan(tmp_path, text, passed + rule_for_all("in", producer='{ name = "/^[xy]$/" }'))
    assert skip_reasons(whole) == ["x:0 q -> a[0]", "y:0 q -> c[0]", "d:0 q -> z[0] = a[0] c[0]"]
    assert whole.skips == ()
    assert whole.unused == ()
    half = make_rule_plan(
        tmp_path,
        text,
        passed + rule_for_all("in", producer='{ name = "x" }') + rule_for_all("c", consumer=kind("concat")),
    )
    assert skip_reasons(half) == ["x:0 q -> a[0]", "c:0 q -> d[1]", "d:0 q -> z[0] = a[0] d[1]"]


def kind(text):
    """A selector of ops."""
    return f'{{ kind = "{text}" }}'


def ring(fed):
    """A TF-like loop: enter -> merge -> identity -> next_iteration -> merge; `fed` if something is before it."""
    model = Model(format="onnx")
    graph = model.graphs[""] = Graph("", model.graphs)
    outputs = (Output("", "float32", (2,)),)
    graph.add_op(Op(name="x", kind="input", type="Input", roles=(), outputs=outputs))
    graph.inputs.append("x")
    for name, kind in (("m", "merge"), ("i", "reshape"), ("n", "reshape")):
        graph.add_op(Op(name=name, kind=kind, type=kind, outputs=outputs))
    graph.connect_inputs("m", [TensorRef("", "x") if fed else TensorRef("", "n"), TensorRef("", "n")])
    graph.connect_inputs("i", [TensorRef("", "m")])
    graph.connect_inputs("n", [TensorRef("", "i")])
    return model


@pytest.mark.parametrize("fed", [True, False])
def test_ties_in_a_ring(tmp_path, fed):
    """A ring of ties takes the scheme that enters it, and is skipped where none does."""
    file = tmp_path / "rules.toml"
    file.write_text(
        SCHEMES
        + rule_for_all("ring", "same-as-input", '{ kind = "merge|reshape" }')
        + rule_for_all("x", producer='{ kind = "input" }', more="optional = true")
    )
    plan = make_plan(ring(fed), load_ruleset([str(file)]), SiteSelection(family="onnx-qdq"))
    ringed = ["m:0 q -> i[0] = m[0] m[1]", "i:0 q -> n[0] = i[0]", "n:0 q -> m[1] = n[0]"]
    assert skip_reasons(plan) == (["x:0 q -> m[0]", *ringed] if fed else [])
    assert len(plan.skips) == (0 if fed else 3)


def test_place_of_captured_tensors(tmp_path):
    """The ops go beside the producer, or into each body with `insert_in = "body"`."""
    plan = make_rule_plan(tmp_path, CAPTURED_TENSOR, rule_for_all("t", producer='{ kind = "tanh" }'))
    assert [(site.graph, len(site.uses)) for site in plan.sites] == [("", 2)]
    plan = make_rule_plan(
        tmp_path, CAPTURED_TENSOR, rule_for_all("t", producer='{ kind = "tanh" }', more='insert_in = "body"')
    )
    assert [(site.graph, str(site.uses[0])) for site in plan.sites] == [
        ("y/then_branch", "y/then_branch/a[0]"),
        ("y/else_branch", "y/else_branch/b[0]"),
    ]


@pytest.mark.slow
def test_fifty_thousand_consumers(tmp_path):
    """A site and a skip with many uses are collected in linear time."""
    times = []
    for count in (5_000, 50_000):
        model = Model(format="onnx")
        graph = model.graphs[""] = Graph("", model.graphs)
        outputs = (Output("", "float32", (2,)),)
        shared = graph.add_op(Op(name="x", kind="input", type="Input", roles=(), outputs=outputs))
        graph.inputs.append("x")
        joined = [
            graph.add_op(Op(name=f"a{k}", kind="neg", type="Neg", outputs=outputs), [shared]) for k in range(count)
        ]
        graph.add_op(Op(name="c", kind="concat", type="Concat", outputs=outputs), joined)
        for k in range(count):
            graph.add_op(Op(name=f"b{k}", kind="relu", type="Relu", outputs=outputs), [TensorRef("", "c")])
        file = tmp_path / "rules.toml"
        file.write_text(
            SCHEMES
            + rule_for_all("c", "same-as-input", '{ kind = "concat" }')
            + rule_for_all("x", producer='{ kind = "input|neg" }')
        )
        start = time.process_time()
        plan = make_plan(model, load_ruleset([str(file)]), SiteSelection(family="onnx-qdq"))
        times.append(time.process_time() - start)
        assert len(plan.sites) == count + 2
        assert len(plan.sites[-1].uses) == len(plan.sites[-1].tie) == count
    assert times[1] < 40 * times[0] + 1


@pytest.mark.parametrize("name", ["stem/batch_norm", "stem/kernel", "stem/gamma"])
def test_removed_names_lead_to_the_op_that_stays(name, samples):
    """A name that preparation removes is an error that names the op with which it is merged."""
    with pytest.raises(UsageError, match="folds it into 'stem/conv'"):
        gq.plan(samples / "digits_cnn_bn.onnx", exclude=name)
    with pytest.raises(UsageError, match="folds it into 'stem/conv'"):
        explain(gq.load(samples / "digits_cnn_bn.onnx"), name)


def test_op_names_mean_all_outputs(tmp_path):
    """--exclude with the name of an op keeps each of its outputs float, and explain lists each of them."""
    text = """<ir_version: 8, opset_import: ["" : 13]> net (float[2, 8] x) => (float[2, 4] y, float[2, 4] z)
    { a, b = Split <axis = 1> (x)  y = MatMul(a, w)  z = MatMul(b, w) }"""
    model = onnx.parser.parse_model(text)
    model.graph.node[0].name = "halves"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 4), np.float32), "w"))
    onnx.save(model, tmp_path / "net.onnx")
    loaded = gq.load(tmp_path / "net.onnx")
    tensors = {"halves:0", "halves:1"}
    assert tensors <= {str(site.tensor) for site in gq.plan(loaded).sites}
    assert not tensors & {str(site.tensor) for site in gq.plan(loaded, exclude="halves").sites}
    assert tensors <= {str(use.tensor) for use in explain(loaded, "halves").uses}


@pytest.mark.parametrize("version", [2, 3, 4])
def test_families_without_zero_points_get_the_same_sites(samples, version):
    """A family for schemes that name none quantizes the same uses; zero points and axes that it lacks are replaced."""
    family = f"quantize-and-dequantize-v{version}"
    for rules in ("tflite", "onnxruntime", "qnn16"):
        expected = gq.plan(samples / "digits_cnn.pb", rules=rules)
        plan = gq.plan(samples / "digits_cnn.pb", rules=rules, family=family)
        assert [(site.tensor, site.uses) for site in plan.sites] == [
            (site.tensor, site.uses) for site in expected.sites
        ]
        assert {(site.scheme.family, site.scheme.zero, site.scheme.type.signed) for site in plan.sites} == {
            (family, "symmetric", True)
        }
        assert [site.scheme.type.bits for site in plan.sites] == [site.scheme.type.bits for site in expected.sites]
        axes = {site.axis for site in plan.sites}
        assert axes == ({site.axis for site in expected.sites} if version == 3 else {None})


@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize("value_range", ["observed", "given", "dynamic", "learned"])
def test_families_without_zero_points_take_every_range(samples, version, value_range):
    """The source of the range stays. Dynamic ranges exist per channel, and others per channel only in V3."""
    schemes = f"""
[scheme.weight]
per = "channel"
range = "{value_range}"
[scheme.activation]
dtype = "uint8"
zero = "asymmetric"
range = "{value_range}"
"""
    rules = schemes + weight_rule("conv") + input_rule("conv")
    plan = gq.plan(samples / "digits_cnn.pb", rules=rules, family=f"quantize-and-dequantize-v{version}")
    schemes = {site.parameter: (site.scheme, site.axis) for site in plan.sites}
    assert {scheme.range for scheme, _ in schemes.values()} == {value_range}
    assert (schemes[True][1] is not None) == (version == 3 or value_range == "dynamic")
    assert (schemes[False][0].zero, schemes[False][0].type) == ("symmetric", IntType(8, signed=True))
    assert not [skip for skip in plan.skips if skip.code == SkipCode.SCHEME]

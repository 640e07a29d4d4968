"""Rules against models: each condition, chains, patterns, names, and the cost of matching."""

import re
import time

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.onnx_models import CAPTURED_TENSOR
from support.rule_files import rule_text

from graphquant.errors import UsageError
from graphquant.formats.onnx import load
from graphquant.ir import Graph, Model, Op, Output, TensorRef, Use
from graphquant.quantize import prepare
from graphquant.rules import RuleMatcher, load_ruleset, name_matches, removed_name_hint
from graphquant.rules.conditions import MAX_BINDING_STEPS, OpNeighbors, matches_chain_down, matches_chain_up
from graphquant.rules.matcher import MAX_ANCESTORS
from graphquant.rules.pattern_syntax import parse_chain

SCHEME = "[scheme.q]\nbits = 8\n"
HEAD = '<ir_version: 8, opset_import: ["": 13]>\n'


def load_small(tmp_path, text):
    """The model written as text."""
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(HEAD + text), path)
    return load(path)


def rules_of(tmp_path, *texts):
    """The rules of files with these texts, stacked."""
    paths = []
    for index, text in enumerate(texts):
        paths.append(tmp_path / f"rules{index}.toml")
        paths[-1].write_text(SCHEME + text)
    return load_ruleset([str(path) for path in paths])


def claimed_uses(model, rules):
    """Return the claimed uses as "tensor > use" with the rule's name."""
    return [(f"{match.tensor} > {match.use}", match.rule.rule.name) for match in RuleMatcher(model, rules).matches()]


def claimed_tensors(model, rules):
    """The tensors that are claimed, each once, in order."""
    return list(dict.fromkeys(str(match.tensor) for match in RuleMatcher(model, rules).matches()))


ATTRIBUTES = """
g (float[1,4,8,8] x) => (float[1,6,8,8] y, float[1,4,4,8] z) <float[6,2,1,1] w = {1,2,3,4,5,6,7,8,9,1,2,3}>
{
    y = Conv <group = 2> (x, w)
    z = MaxPool <strides = [2, 1], shares = [0.1, 0.3], big = 16777217> (x)
    n = Conv <group = 0> (x, w)
}
"""


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("attr = { strides = [2, 1] }", ["x:0 > z[0]"]),
        ("attr = { strides = [[1, 1], [2, 1]] }", ["x:0 > z[0]"]),
        ("attr = { strides = [2, 2] }", []),
        ("attr = { strides = [[2], [2, 1, 1]] }", []),
        ("attr = { shares = [0.1, 0.3] }", ["x:0 > z[0]"]),
        ("attr = { shares = [0.1, 0.2] }", []),
        ("attr = { big = 16777217 }", ["x:0 > z[0]"]),
        ("attr = { big = 16777216 }", []),
        ("max_group_inputs = 2", ["x:0 > y[0]", "w:0 > y[1]"]),
        ("max_group_inputs = 1", []),
        ("min_group_outputs = 3", ["x:0 > y[0]", "w:0 > y[1]"]),
        ("min_group_outputs = 4", []),
    ],
)
def test_lists_and_groups(tmp_path, condition, expected):
    """Lists are compared item by item, integers exactly, and channels by group; no group is an unknown size."""
    rules = rules_of(tmp_path, f'[[rule]]\nname = "r"\nconsumer = {{ {condition} }}\nquantize = "q"\n')
    assert [use for use, _ in claimed_uses(load_small(tmp_path, ATTRIBUTES), rules)] == expected


SMALL = """
g (float[1,3,8,8] x) => (float[1,4,8,8] y, float[1,4,8,8] z)
<float[4,3,1,1] w = {1,2,3,4,5,6,7,8,9,1,2,3}, float[4] b = {1,2,3,4}>
{
    c = Conv <auto_pad = "SAME_UPPER"> (x, w, b)
    i = Identity (c)
    r = Relu (i)
    s = Sigmoid (r)
    y = Mul (r, s)
    z = LeakyRelu <alpha = 0.1> (x)
}
"""


@pytest.mark.parametrize(
    ("producer", "consumer", "expected"),
    [
        ('{ kind = "parameter" }', "{}", ["w:0 > c[1]", "b:0 > c[2]"]),
        ('{ kind = "parameter" }', '{ input = "weight" }', ["w:0 > c[1]"]),
        ("{}", '{ input = "weight|bias" }', ["w:0 > c[1]", "b:0 > c[2]"]),
        ("{}", '{ kind = "conv", input = "input" }', ["x:0 > c[0]"]),
        ('{ type = "Conv|Sigmoid" }', "{}", ["c:0 > i[0]", "s:0 > y[1]"]),
        ('{ kind = "relu|sigmoid" }', '{ kind = "mul" }', ["r:0 > y[0]", "s:0 > y[1]"]),
        ('{ kind = "*" }', '{ type = "Identity" }', ["c:0 > i[0]"]),
        ('{ kind = "relu", readers = 2 }', "{}", ["r:0 > s[0]", "r:0 > y[0]"]),
        ('{ kind = "relu", readers = 1 }', "{}", []),
        ('{ kind = "*" }', '{ attr = { auto_pad = "SAME_UPPER" } }', ["x:0 > c[0]", "w:0 > c[1]", "b:0 > c[2]"]),
        ('{ kind = "*" }', '{ attr = { auto_pad = ["VALID", "SAME_UPPER"] }, input = "bias" }', ["b:0 > c[2]"]),
        ('{ kind = "*" }', "{ attr = { alpha = 0.1 } }", ["x:0 > z[0]"]),
        ('{ kind = "*" }', "{ attr = { alpha = 0.2 } }", []),
        ('{ kind = "parameter", min_rank = 2 }', "{}", ["w:0 > c[1]"]),
        ('{ kind = "parameter", max_rank = 1 }', "{}", ["b:0 > c[2]"]),
        ('{ kind = "parameter", min_size = 12 }', "{}", ["w:0 > c[1]"]),
        ('{ kind = "parameter", max_size = 4 }', "{}", ["b:0 > c[2]"]),
        ('{ kind = "parameter" }', "{ min_channels = 4 }", ["w:0 > c[1]", "b:0 > c[2]"]),
        ('{ kind = "parameter" }', "{ max_channels = 3 }", []),
        ("{}", "{ max_channels = 100 }", ["x:0 > c[0]", "w:0 > c[1]", "b:0 > c[2]"]),
        ("{}", "{ min_in_channels = 3, max_in_channels = 3 }", ["x:0 > c[0]", "w:0 > c[1]", "b:0 > c[2]"]),
        ("{}", "{ max_in_channels = 2 }", []),
        ("{}", "{ multiple_of = 3 }", ["x:0 > c[0]", "w:0 > c[1]", "b:0 > c[2]"]),
        ("{}", "{ multiple_of = 2 }", []),
        ("{}", '{ min_kernel = 1, max_groups = 1, input = "input" }', ["x:0 > c[0]"]),
        ("{}", "{ min_kernel = 2 }", []),
        ("{}", "{ max_groups = 0 }", []),
        ("{}", '{ min_groups = 1, max_group_inputs = 3, input = "input" }', ["x:0 > c[0]"]),
        ("{}", "{ min_groups = 1 }", ["x:0 > c[0]", "w:0 > c[1]", "b:0 > c[2]"]),
        ("{}", "{ min_groups = 2 }", []),
        ("{}", "{ max_group_inputs = 2 }", []),
        ("{}", '{ min_group_outputs = 4, input = "input" }', ["x:0 > c[0]"]),
        ("{}", "{ min_group_outputs = 5 }", []),
        ("{}", "{ min_rows = 1 }", []),
        ('{ name = "s" }', "{}", ["s:0 > y[1]"]),
        ('{ name = "s:0" }', "{}", ["s:0 > y[1]"]),
        ('{ name = "/^[wb]$/" }', "{}", ["w:0 > c[1]", "b:0 > c[2]"]),
        ("{}", '{ name = "[yz]" }', ["x:0 > z[0]", "r:0 > y[0]", "s:0 > y[1]"]),
    ],
)
def test_each_condition(tmp_path, producer, consumer, expected):
    """Each condition of a selector holds where it should and nowhere else."""
    claims = claimed_uses(load_small(tmp_path, SMALL), rules_of(tmp_path, rule_text("r", producer, consumer)))
    assert sorted(op_key for op_key, _ in claims) == sorted(expected)


@pytest.mark.parametrize(
    ("producer", "consumer", "reason"),
    [
        ('{ kind = "conv" }', "{}", "producer r .*'relu', not 'conv'"),
        ('{ name = "s" }', "{}", "producer r:0 .*name 's'"),
        ('{ kind = "relu", readers = 1 }', "{}", "producer r:0 .*2 consumers, not 1"),
        ('{ type = "Conv" }', "{}", "producer r .*'Relu', not 'Conv'"),
        ("{ attr = { alpha = 1 } }", "{}", "producer r .*alpha = None, not 1"),
        ("{ min_rank = 5 }", "{}", "producer r:0 .*4 axes,.* 5"),
        ("{ max_size = 5 }", "{}", "producer r:0 .*256 elements,.* 5"),
        ("{}", '{ kind = "conv|relu" }', r"consumer y .*'mul', not 'conv\|relu'"),
        ("{}", '{ name = "x" }', "consumer y .*name 'x'"),
        ("{}", '{ input = "weight" }', r"consumer y\[0\] .*'input',.* 'weight'"),
        ("{}", "{ min_channels = 1 }", "consumer y .*channels,.* 1"),
    ],
)
def test_the_first_condition_that_fails_is_named(tmp_path, producer, consumer, reason):
    """A miss says which op fails which condition."""
    rules = rules_of(tmp_path, rule_text("r", producer, consumer, more="optional = true"))
    matcher = RuleMatcher(load_small(tmp_path, SMALL), rules)
    assert re.fullmatch(reason, matcher.miss_reason(rules.rules[0], TensorRef("", "r"), Use("", "y", 0)))


@pytest.mark.parametrize(
    ("producer", "consumer", "reason"),
    [
        ('{ kind = "relu" }', "{}", "producer w is a parameter, not 'relu'"),
        ('{ kind = "parameter" }', '{ kind = "mul" }', "consumer c is 'conv', not 'mul'"),
    ],
)
def test_parameters_are_named_as_such(tmp_path, producer, consumer, reason):
    """A weight is called a parameter, and the op that reads it by its kind."""
    rules = rules_of(tmp_path, rule_text("r", producer, consumer))
    matcher = RuleMatcher(load_small(tmp_path, SMALL), rules)
    assert matcher.miss_reason(rules.rules[0], TensorRef("", "w"), Use("", "c", 1)) == reason


@pytest.mark.parametrize(
    ("tensor", "use", "producer", "consumer", "closeness"),
    [
        ("r", ("y", 0), '{ kind = "relu" }', '{ kind = "mul" }', 4),
        ("r", ("y", 0), '{ kind = "relu" }', '{ kind = "add" }', 2),
        ("r", ("y", 0), '{ kind = "relu", readers = 1 }', '{ kind = "mul" }', 3),
        ("r", ("y", 0), '{ kind = "relu" }', '{ kind = "mul", input = "bias" }', 3),
        ("r", ("y", 0), '{ name = "r" }', "{}", 3),
        ("r", ("y", 0), "{}", '{ type = "Mul" }', 3),
        ("r", ("y", 0), '{ kind = "conv" }', '{ kind = "add" }', 0),
        ("w", ("c", 1), '{ kind = "parameter" }', '{ kind = "conv" }', 3),
        ("w", ("c", 1), '{ kind = "parameter" }', "{ max_channels = 1 }", 2),
    ],
)
def test_closeness_of_rules(tmp_path, tensor, use, producer, consumer, closeness):
    """Each side counts 2 if it names ops and matches, and 1 if it names none or fails another condition."""
    rules = rules_of(tmp_path, rule_text("r", producer, consumer))
    matcher = RuleMatcher(load_small(tmp_path, SMALL), rules)
    assert matcher.evaluate_rule(rules.rules[0], TensorRef("", tensor), Use("", *use)).closeness == closeness


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("y = Conv<group = 2>(x, w)", (4, 8, 3, None)),
        ("y = Conv<group = 4>(x, d)", (4, 4, 5, None)),
        ("y = ConvTranspose(x, t)", (3, 4, 2, None)),
        ("y = MatMul(x, m)", (7, 6, None, 9)),
        ("y = Gemm<transB = 1>(g, m)", (6, 7, None, 2)),
        ("y = Gemm<transA = 1>(g, m)", (7, 6, None, 3)),
    ],
)
def test_sizes_of_weighted_ops(tmp_path, text, sizes):
    """Output and input channels, kernel and rows of an op, or none where it has no such size."""
    initializers = "float[4,4,3,5] w, float[4,1,5,5] d, float[4,3,2,2] t, float[6,7] m"
    used = ", ".join(declaration for declaration in initializers.split(", ") if f"{declaration[-1]})" in text)
    source = "float[2,3] g" if "(g" in text else "float[1,4,9,6] x"
    graph = f"g ({source}) => (float y) <{used} = {{0}}> {{ {text} }}".replace(" = {0}", "")
    message = onnx.parser.parse_model(HEAD + graph.replace(f"<{used}>", "").replace(source, f"{source}, {used}"))
    message.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(message, tmp_path / "model.onnx")
    model = load(tmp_path / "model.onnx")
    for keys, size in zip(("channels", "in_channels", "kernel", "rows"), sizes, strict=True):
        matcher = RuleMatcher(model, rules_of(tmp_path, rule_text("r", consumer=f"{{ min_{keys} = {size or 0} }}")))
        more = RuleMatcher(model, rules_of(tmp_path, rule_text("r", consumer=f"{{ min_{keys} = {(size or 0) + 1} }}")))
        assert len(list(matcher.matches())) == (0 if size is None else 2)
        assert not list(more.matches())


def test_any_op_of_a_pattern(tmp_path):
    """With a star for both ends a rule holds between the ops of a pattern, not before and behind them."""
    text = """
    g (float[2] x) => (float[2] z) { a = Exp (x)
    e = Erf (a)
    f = Mul (a, e)
    z = Neg (f) }
    """
    inside = '[pattern.p]\nops = ["e = erf(a)", "f = mul(a, e)"]\n'
    rules = rules_of(tmp_path, inside + rule_text("in", '{ pattern = "p.*" }', '{ pattern = "p.*" }'))
    assert claimed_uses(load_small(tmp_path, text), rules) == [("e:0 > f[1]", "in")]


@pytest.mark.parametrize(
    ("ops", "body", "expected"),
    [
        (["a = exp(x)", "p = mul(a, 0.5)"], "a = Exp (x) p = Mul (a, half)", True),
        (["a = exp(x)", "p = mul(a, 0.5)"], "a = Exp (x) p = Mul (half, a)", True),
        (["a = exp(x)", "p = mul(a, 0.5)"], "a = Exp (x) p = Mul (a, x)", False),
        (["a = exp(x)", "p = mul(a, 0.5)"], "a = Exp (x) p = Mul (a, halves)", False),
        (["a = exp(x)", "p = sub(a, 0.5)"], "a = Exp (x) p = Sub (a, half)", True),
        (["a = exp(x)", "p = sub(a, 0.5)"], "a = Exp (x) p = Sub (half, a)", False),
    ],
)
def test_operands_of_patterns(tmp_path, ops, body, expected):
    """A number is a constant of one element, and only commutative ops have two orders."""
    text = f"g (float[2] x) => (float[2] p) <float half = {{0.5}}, float[2] halves = {{0.5, 0.5}}> {{ {body} }}"
    pattern = f"[pattern.p]\nops = {ops}\n"
    rules = rules_of(tmp_path, pattern + rule_text("r", '{ pattern = "p" }'))
    assert bool(claimed_uses(load_small(tmp_path, text), rules)) == expected


@pytest.mark.parametrize(
    ("producer", "consumer", "expected"),
    [
        ('{ kind = "relu > mul" }', "{}", ["m:0 > k[0]"]),
        ('{ kind = "exp > mul" }', "{}", []),
        ("{}", '{ kind = "mul > clip > sigmoid" }', ["r:0 > m[1]", "half:0 > m[0]"]),
        ("{}", '{ kind = "relu > mul > clip" }', ["x:0 > r[0]"]),
        ('{ kind = "clip" }', "{}", ["k:0 > y[0]"]),
    ],
)
def test_slots_that_are_not_the_first(tmp_path, producer, consumer, expected):
    """Chains go through the operand that is computed, in any slot, and empty slots are no uses."""
    text = """g (float[2] x) => (float[2] y) <float[2] half = {0.5, 0.5}, float six = {6}> {
        r = Relu (x)
        m = Mul (half, r)
        k = Clip (m, , six)
        y = Sigmoid (k)
    }"""
    rules = rules_of(tmp_path, rule_text("r", producer, consumer))
    assert sorted(use for use, _ in claimed_uses(load_small(tmp_path, text), rules)) == sorted(expected)


SUMS = """
g (float[1,4,8,8] x, float[1,4,8,8] other) => (float[1,4,8,8] y)
<float[4,4,1,1] w, float[1,4,1,1] k>
{
    a = Conv (x, w)
    s = Relu (x)
    t = Relu (s)
    b = Conv (t, w)
    %s
}
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("y = Add (a, b)", {"b:0 > y[1]": "branch", "a:0 > y[0]": "skip"}),
        ("y = Add (b, a)", {"b:0 > y[0]": "branch", "a:0 > y[1]": "skip"}),
        ("y = Add (x, a)", {"a:0 > y[1]": "branch", "x:0 > y[0]": "skip"}),
        ("y = Add (t, a)", {"a:0 > y[1]": "branch", "t:0 > y[0]": "skip"}),
        ("c = Conv (other, w) y = Add (a, c)", {"a:0 > y[0]": "branch", "c:0 > y[1]": "skip"}),
        ("c = Conv (x, w) y = Add (a, c)", {"a:0 > y[0]": "branch", "c:0 > y[1]": "skip"}),
        ("y = Add (a, k)", {}),
        ("y = Add (s, x)", {}),
        ("y = Add (a, a)", {"a:0 > y[0]": "branch", "a:0 > y[1]": "skip"}),
        # s is nearer than x, from which both paths would be of one length
        (
            "n = Neg (s) q = Neg (x) p = Add (n, q) c = Conv (p, w) m = Neg (s) d = Conv (m, w) y = Add (d, c)",
            {"c:0 > y[1]": "branch", "d:0 > y[0]": "skip"},
        ),
    ],
)
def test_longest_path_and_sibling_rule(tmp_path, text, expected):
    """Of two convolutions that a sum reads one is chosen, and the other input is beside it."""
    graph = SUMS.replace("<float[4,4,1,1] w, float[1,4,1,1] k>\n", "") % text
    message = onnx.parser.parse_model(HEAD + graph)
    for name, shape in (("w", (4, 4, 1, 1)), ("k", (1, 4, 1, 1))):
        message.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    onnx.save(message, tmp_path / "model.onnx")
    rules = rules_of(
        tmp_path,
        rule_text("branch", '{ kind = "conv" }', '{ kind = "add", path = "longest" }')
        + rule_text("skip", "{}", '{ kind = "add", sibling_rule = "branch" }'),
    )
    assert dict(claimed_uses(load(tmp_path / "model.onnx"), rules)) == expected


@pytest.mark.parametrize("ops_between", [MAX_ANCESTORS - 2, MAX_ANCESTORS - 1])
def test_common_ancestor_of_long_branches(tmp_path, ops_between):
    """The op where the branches part is found within a bounded number of ops, else the first input is chosen."""
    steps = "".join(f"r{step + 1} = Relu (r{step}) " for step in range(ops_between))
    text = f"g (float[2] r0) => (float[2] y) {{ {steps} a = Exp (r0) b = Exp (r{ops_between}) y = Add (a, b) }}"
    rules = rules_of(tmp_path, rule_text("r", '{ kind = "exp" }', '{ kind = "add", path = "longest" }'))
    expected = "b:0 > y[1]" if ops_between == MAX_ANCESTORS - 2 else "a:0 > y[0]"
    assert claimed_uses(load_small(tmp_path, text), rules) == [(expected, "r")]


def test_a_use_is_no_sibling_of_itself(tmp_path):
    """`sibling_rule` needs another input of the op that the rule claims, whichever rule comes first."""
    text = """g (float[1,4,8,8] x, float[4,4,1,1] w) => (float[1,4,8,8] y) {
        a = Conv (x, w)
        s = Neg (x)
        y = Add (a, s)
    }"""
    rules = rules_of(
        tmp_path,
        rule_text("skip", "{}", '{ kind = "add", sibling_rule = "branch" }')
        + rule_text("branch", '{ kind = "conv" }', '{ kind = "add" }'),
    )
    assert dict(claimed_uses(load_small(tmp_path, text), rules)) == {"a:0 > y[0]": "branch", "s:0 > y[1]": "skip"}


def test_unknown_sizes_match_no_bound(tmp_path):
    """A tensor without static sizes has no rank and no number of elements."""
    model = load_small(
        tmp_path,
        "g (float x, float[N,3] p) => (float y, float[N,3] q) { y = Foo(x)\nq = Relu(p) }".replace("Foo", "Relu"),
    )
    model.main.replace_op(Op(name="x", kind="input", type="Input", roles=(), outputs=(Output("x", "float32", None),)))
    assert claimed_tensors(model, rules_of(tmp_path, rule_text(producer="{ max_rank = 9 }"))) == ["p:0", "y:0", "q:0"]
    assert claimed_tensors(model, rules_of(tmp_path, rule_text(producer="{ max_size = 9 }"))) == ["y:0"]


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        ("conv > relu", ["r:0"]),
        ("conv > relu?", ["c:0", "r:0"]),
        ("conv > batchnorm? > relu|relu6?", ["c:0", "r:0"]),
        ("conv > relu > sigmoid", []),
        ("relu > sigmoid", []),
        ("* > relu", ["r:0"]),
        ("conv > identity > relu", ["r:0"]),
        ("conv > identity", ["i:0"]),
        ("identity? > relu", ["r:0"]),
    ],
)
def test_chains_above(tmp_path, chain, expected):
    """A chain reads left to right up to the tensor, through identities; what lies inside has one reader."""
    rules = rules_of(tmp_path, rule_text(producer=f'{{ kind = "{chain}" }}'))
    assert claimed_tensors(load_small(tmp_path, SMALL), rules) == expected


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        ("conv > relu", ["x:0", "w:0", "b:0"]),
        ("conv > relu?", ["x:0", "w:0", "b:0"]),
        ("conv > tanh? > relu", ["x:0", "w:0", "b:0"]),
        ("conv > tanh", []),
        ("relu > sigmoid", []),
        ("relu > sigmoid?", ["i:0"]),
        ("sigmoid > mul", ["r:0"]),
        ("identity > relu", ["c:0"]),
    ],
)
def test_chains_below(tmp_path, chain, expected):
    """A consumer's chain starts at the consumer and follows sole readers, through identities."""
    rules = rules_of(tmp_path, rule_text(consumer=f'{{ kind = "{chain}" }}'))
    assert sorted(claimed_tensors(load_small(tmp_path, SMALL), rules)) == sorted(expected)


def test_optional_links_are_skipped(tmp_path):
    """An optional link does not take what a required one needs."""
    model = load_small(tmp_path, "g (float[2] x) => (float[2] y) { a = Tanh(x)\nb = Relu(a)\ny = Relu(b) }")
    assert claimed_tensors(model, rules_of(tmp_path, rule_text(producer='{ kind = "relu > relu? > relu?" }'))) == [
        "b:0",
        "y:0",
    ]
    assert claimed_tensors(model, rules_of(tmp_path, rule_text(producer='{ kind = "relu > relu|tanh? > relu" }'))) == [
        "y:0"
    ]
    assert claimed_tensors(model, rules_of(tmp_path, rule_text(consumer='{ kind = "relu > relu? > relu" }'))) == ["a:0"]


@given(
    st.lists(st.sampled_from("abi"), min_size=1, max_size=6),
    st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), min_size=1, max_size=5),
)
def test_chains_equal_a_regular_expression(ops, links):
    """On a straight line of ops a chain of kinds is a regular expression over them."""
    if all(optional for _, optional in links):
        return
    kinds = {"a": "relu", "b": "tanh", "i": "identity"}
    model = row_of_ops([kinds[letter] for letter in ops])
    text = " > ".join(kinds[letter] + "?" * optional for letter, optional in links)
    around = OpNeighbors(model)
    pattern = "i*".join(f"(?:{letter}{'?' if optional else ''})" for letter, optional in links)
    inner, last = "".join(ops[:-1]), ops[-1]
    # the tensor itself is made by a link, never by an identity
    expected = last != "i" and any(re.fullmatch(pattern, (inner + last)[k:]) for k in range(len(ops)) if ops[k] != "i")
    assert matches_chain_up(around, parse_chain(text), TensorRef("", f"n{len(ops)}")) == expected
    expected = ops[0] != "i" and any(
        re.fullmatch(pattern, "".join(ops[:k])) for k in range(1, len(ops) + 1) if ops[k - 1] != "i"
    )
    assert matches_chain_down(around, parse_chain(text), Use("", "n1", 0)) == expected


def row_of_ops(kinds):
    """A model of ops in a row, n0 an input, n1, n2, ... of the kinds given, an output behind the last."""
    model = Model(format="onnx")
    graph = Graph("", model.graphs)
    model.graphs[""] = graph
    outputs = (Output("", "float32", (2,)),)
    last = graph.add_op(Op(name="n0", kind="input", type="Input", roles=(), outputs=outputs))
    graph.inputs.append("n0")
    for index, kind in enumerate(kinds, 1):
        last = graph.add_op(Op(name=f"n{index}", kind=kind, type=kind.title(), outputs=outputs), [last])
    graph.add_op(Op(name="@out", kind="output", type="Output"), [last])
    graph.outputs.append("@out")
    return model


GELU = """
g (float[2] x) => (float[2] y, float[2] z)
<float h = {0.5}>
{
    e = Erf (x)
    a = Add (h, e)
    m = Mul (x, a)
    y = Mul (m, h)
    t = Erf (y)
    z = Mul (t, t)
}
"""


@pytest.mark.parametrize(
    ("ops", "part", "expected"),
    [
        (["e = erf(x)", "a = add(e, _)", "y = mul(a, x)"], "", ["m:0"]),
        (["e = erf(x)", "a = add(e, _)", "y = mul(a, x)"], ".a", ["a:0"]),
        (["e = erf(x)", "a = add(e, _)", "y = mul(a, x)"], ".e", ["e:0"]),
        (["e = erf(x)", "y = mul(e, e)"], "", ["z:0"]),
        (["e = erf(x)", "y = mul(e, x)"], "", []),
        (["y = mul(_, _)"], "", ["m:0", "y:0", "z:0"]),
        (["y = mul(x, x)"], "", ["z:0"]),
        (["p = parameter()", "y = mul|add(p, _)"], "", ["a:0", "y:0"]),
        (["m = mul(_, _)", "y = mul(m, m)"], "", []),
        (["y = erf(_, _)"], "", []),
        (["y = *(x, x)"], "", ["z:0"]),
    ],
)
def test_patterns(tmp_path, ops, part, expected):
    """Patterns try both orders of commuted operands; a name stands for one tensor, `_` for any."""
    text = f"[pattern.p]\nops = {ops}\n" + rule_text(producer=f'{{ kind = "*", pattern = "p{part}" }}')
    assert claimed_tensors(load_small(tmp_path, GELU), rules_of(tmp_path, text)) == expected


def test_patterns_on_consumers(tmp_path):
    """A consumer's pattern selects the uses by the op that plays the part."""
    text = '[pattern.p]\nops = ["e = erf(x)", "y = mul(e, e)"]\n' + rule_text(consumer='{ pattern = "p.e" }')
    assert claimed_uses(load_small(tmp_path, GELU), rules_of(tmp_path, text)) == [("y:0 > t[0]", "r")]


def test_operand_order_is_backtracked(tmp_path):
    """The order of operands may only be known from later ops."""
    text = """
g (float[2] x, float[2] w) => (float[2] y)
{
    a = Add (x, w)
    b = Tanh (w)
    y = Mul (a, b)
}
"""
    ops = ["a = add(p, q)", "b = tanh(p)", "y = mul(a, b)"]
    rules = rules_of(tmp_path, f"[pattern.p]\nops = {ops}\n" + rule_text(producer='{ pattern = "p" }'))
    assert claimed_tensors(load_small(tmp_path, text), rules) == ["y:0"]


def doubling(depth, bottom="relu"):
    """x, relu(x), then each op adds the one before to itself."""
    model = row_of_ops([bottom, *["add"] * depth])
    for index in range(2, depth + 2):
        model.main.set_source(Use("", f"n{index}", 1), TensorRef("", f"n{index - 1}"))
    return model


def test_hostile_patterns_end(tmp_path):
    """Thirty commuted lines on a graph where all orders fail are refused by their kinds; 2**30 orders would not end."""
    ops = ["a0 = tanh(x)", *(f"a{k} = add(a{k - 1}, a{k - 1})" for k in range(1, 31))]
    rules = rules_of(tmp_path, f"[pattern.p]\nops = {ops}\n" + rule_text(producer='{ pattern = "p" }'))
    assert claimed_tensors(doubling(60), rules) == []
    assert claimed_tensors(doubling(60, "tanh"), rules) == ["n31:0"]


def test_patterns_with_too_many_readings_are_an_error(tmp_path):
    """Names that occur twice can make the search blow up; it is ended with the pattern's name."""
    ops = [*(f"a{k} = add({f'a{k - 1}' if k else 'x'}, i{k})" for k in range(25)), "y = max(a24, x)"]
    rules = rules_of(tmp_path, f"[pattern.wild]\nops = {ops}\n" + rule_text(producer='{ pattern = "wild" }'))
    model = doubling(40)
    model.main.replace_op(Op(name="n41", kind="max", type="Max", outputs=(Output("", "float32", (2,)),)))
    model.main.set_source(Use("", "n41", 1), TensorRef("", "n0"))
    with pytest.raises(UsageError, match=r"'wild' .*n41:0"):
        claimed_tensors(model, rules)
    assert MAX_BINDING_STEPS < 10_000


def test_the_first_rule_wins_across_files(tmp_path):
    """Files are tried in the order given, rules in the order of the file, for each use by itself."""
    first_file = rule_text("exception", '{ name = "r" }', '{ kind = "mul" }', "float")
    second_file = rule_text("relu", '{ kind = "relu" }') + rule_text("rest", '{ kind = "*" }')
    claims = dict(claimed_uses(load_small(tmp_path, SMALL), rules_of(tmp_path, first_file, second_file)))
    assert claims["r:0 > y[0]"] == "exception"
    assert claims["r:0 > s[0]"] == "relu"
    assert claims["c:0 > i[0]"] == "rest"


def test_order_is_that_of_the_model(tmp_path):
    """Tensors come in the order of the ops, uses in the order of the edges."""
    claims = claimed_uses(load_small(tmp_path, SMALL), rules_of(tmp_path, rule_text(producer='{ kind = "*" }')))
    assert [op_key for op_key, _ in claims] == [
        "x:0 > c[0]", "x:0 > z[0]", "w:0 > c[1]", "b:0 > c[2]", "c:0 > i[0]", "i:0 > r[0]", "r:0 > s[0]", "r:0 > y[0]",
        "s:0 > y[1]", "y:0 > @y[0]", "z:0 > @z[0]",
    ]  # fmt: skip


def test_integers_are_not_quantized(tmp_path):
    """Only tensors that are float, or of unknown dtype, are offered to rules."""
    text = "g (float[2,2] x) => (float[4] y) <int64[1] s = {-1}> { y = Reshape(x, s) }"
    assert claimed_tensors(load_small(tmp_path, text), rules_of(tmp_path, rule_text(producer='{ kind = "*" }'))) == [
        "x:0",
        "y:0",
    ]


@pytest.mark.parametrize(("side", "close"), [("producer", "'r:0'|'r'"), ("consumer", "r")])
def test_a_name_that_matches_nothing_is_an_error(tmp_path, side, close):
    """The error has file, line, rule, side and the closest names."""
    model = load_small(
        tmp_path, SMALL.replace(" r ", " relu_one ").replace("(r)", "(relu_one)").replace("(r,", "(relu_one,")
    )
    selectors = {side: '{ name = "relu_onee" }'}
    rules = rules_of(tmp_path, rule_text("mine", **selectors))
    with pytest.raises(UsageError, match=rf"rules0\.toml:3: rule 'mine': .*{side} name 'relu_onee' ") as error:
        RuleMatcher(model, rules)
    assert "Did you mean" in str(error.value)
    assert "'relu_one'" in str(error.value)
    RuleMatcher(model, rules_of(tmp_path, rule_text("mine", **selectors, more="optional = true")))


def test_a_consumers_name_is_that_of_an_op(tmp_path):
    """A tensor's name as a consumer would never match, so it is an error too."""
    with pytest.raises(UsageError, match="consumer name 'c:0' "):
        RuleMatcher(load_small(tmp_path, SMALL), rules_of(tmp_path, rule_text(consumer='{ name = "c:0" }')))


READERS = """
g (float[2] x) => (float[2] a, float[2] b, float[2] c, float[2] d, float[2] e, int64[1] s)
{
    a = Relu (x) b = Relu (x) c = Relu (x) d = Relu (x) e = Relu (x)
    f = Relu (x)
    s = Shape (f)
}
"""


@pytest.mark.parametrize(
    ("producer", "consumer", "readers"),
    [("x", "@[ab]", "'a', 'b', 'c', 'd', 'e'"), ("f", "a", "'s'"), ("s", "a", None)],
)
def test_names_of_ops_that_are_not_connected(tmp_path, producer, consumer, readers):
    """The error of two names that match, but no use together, has the first five readers."""
    model = load_small(tmp_path, READERS)
    ends = {"producer": f'{{ name = "{producer}" }}', "consumer": f'{{ name = "{consumer}" }}'}
    with pytest.raises(UsageError, match=rf"rules0\.toml:3: rule 'mine': .*{re.escape(repr(consumer))}.*") as error:
        RuleMatcher(model, rules_of(tmp_path, rule_text("mine", **ends)))
    assert re.findall(r"Its readers are (.*?)\.", str(error.value)) == ([readers] if readers else [])
    assert not claimed_uses(model, rules_of(tmp_path, rule_text("mine", **ends, more="optional = true")))


@pytest.mark.parametrize("consumer", ["a", "f", "[be]"])
def test_names_of_connected_ops(tmp_path, consumer):
    """One of the readers is enough for two names."""
    rules = rules_of(tmp_path, rule_text("r", '{ name = "x" }', f'{{ name = "{consumer}" }}'))
    expected = [(f"x:0 > {op}[0]", "r") for op in consumer.strip("[]")]
    assert claimed_uses(load_small(tmp_path, READERS), rules) == expected


def test_an_ops_name_is_that_of_its_first_output(tmp_path):
    """The name of an op as a producer selects its first output; others need the port or their own name."""
    message = onnx.parser.parse_model(
        HEAD + "g (float[2,8] x) => (float[2,4] y, float[2,4] z) { a, b = Split <axis = 1> (x) y = Exp(a) z = Exp(b) }"
    )
    message.graph.node[0].name = "halves"
    onnx.save(message, tmp_path / "model.onnx")
    model = load(tmp_path / "model.onnx")
    for name, expected in (("halves", "halves:0"), ("halves:1", "halves:1"), ("b", "halves:1"), ("a", "halves:0")):
        rules = rules_of(tmp_path, rule_text(producer=f'{{ name = "{name}" }}'))
        assert claimed_tensors(model, rules) == [expected]


REMOVED = """
g (float[1,2,4,4] x, bool t) => (float[1,2,4,4] y)
<float[2,2,1,1] w = {1,2,3,4}, float[2] s = {1,2}, float[2] v = {1,2}>
{
    d = Identity (x)
    c = Conv (d, w)
    n = BatchNormalization (c, s, s, s, v)
    y = If (t) <then_branch = g1 () => (float[1,2,4,4] a) { i = Identity (n) a = Relu (i) },
                else_branch = g2 () => (float[1,2,4,4] b) { b = Neg (n) }>
}
"""


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("n", ("n", "c")),
        ("n:0", ("n", "c")),
        ("v", ("v", "c")),
        ("[w]", ("w", "c")),
        ("d", ("d", "x")),
        ("i", ("i", "c")),
        ("y/then_branch/i:0", ("i", "c")),
        ("c", None),
        ("t", None),
        ("a", None),
        ("nothing", None),
    ],
)
def test_names_of_removed_ops(tmp_path, pattern, names):
    """The hint for a removed op names the op that is left, also in the graph outside."""
    source = load_small(tmp_path, REMOVED)
    prepared, _ = prepare(source, ["drop-identity", "fold-batchnorm"])
    hint = removed_name_hint(source, prepared, pattern)
    assert tuple(re.findall(r"'(.*?)'", hint)) == (names or ())
    assert removed_name_hint(source, source, pattern) == ""


def test_uses_inside_of_bodies(tmp_path):
    """A tensor that a body reads has that use, and names may be qualified by the graph."""
    model = load_small(tmp_path, CAPTURED_TENSOR)
    rules = rules_of(tmp_path, rule_text(consumer='{ name = "*/then_branch/a" }'))
    assert claimed_uses(model, rules) == [("t:0 > y/then_branch/a[0]", "r")]
    rules = rules_of(tmp_path, rule_text(producer='{ name = "y/else_branch/b:0" }'))
    assert claimed_tensors(model, rules) == ["y/else_branch/b:0"]
    assert claimed_tensors(model, rules_of(tmp_path, rule_text(producer='{ kind = "tanh", readers = 2 }'))) == ["t:0"]


def test_names():
    """Globs match the whole name, a regex between slashes any part of it; a name may have brackets and slashes."""
    assert name_matches("conv*", "conv1")
    assert not name_matches("conv", "conv1")
    assert name_matches("/nv/", "conv1")
    assert not name_matches("/^nv/", "conv1")
    assert name_matches("/features/*", "/features/conv")
    assert not name_matches("*", "")
    assert name_matches("conv[1]", "conv[1]")
    assert name_matches("//", "conv1")
    assert not name_matches("/", "features/conv")


def fan_out(count):
    """One constant that many ops read."""
    model = row_of_ops([])
    outputs = (Output("", "float32", (2,)),)
    shared = model.main.add_op(Op(name="w", kind="constant", type="Const", roles=(), outputs=outputs))
    for k in range(count):
        model.main.add_op(Op(name=f"a{k}", kind="add", type="Add", outputs=outputs), [TensorRef("", "n0"), shared])
    return model


RULES = (
    '[pattern.p]\nops = ["s = identity(x)", "t = add(s, _)", "y = identity(t)"]\n'
    + rule_text("a", '{ pattern = "p" }', '{ kind = "mul > identity" }')
    + rule_text("b", '{ kind = "conv > identity? > *" }', '{ kind = "conv > add" }')
    + rule_text("c", '{ kind = "conv > relu > identity|relu?", min_rank = 1 }')
    + rule_text("d", '{ kind = "parameter", readers = 3 }')
    + rule_text("e", "{}", '{ kind = "identity? > identity? > conv" }')
    + rule_text("f", '{ kind = "parameter" }')
)


@pytest.mark.parametrize(
    "make",
    [fan_out, lambda n: row_of_ops(["identity"] * n), lambda n: row_of_ops(["relu"] * n)],
    ids=["fan-out", "identities", "chain"],
)
def test_matching_looks_at_each_edge_a_bounded_number_of_times(tmp_path, monkeypatch, make):
    """Ten times the ops cost at most ten times the look-ups."""
    rules = rules_of(tmp_path, RULES)
    counts = []
    for size in (200, 2000):
        calls = [0]
        for name in ("op", "slots", "consumers_by_port"):
            real = getattr(Graph, name)

            def counted(self, op, real=real, calls=calls):
                calls[0] += 1
                return real(self, op)

            monkeypatch.setattr(Graph, name, counted)
        model = make(size)
        calls[0] = 0
        list(RuleMatcher(model, rules).matches())
        counts.append(calls[0])
        monkeypatch.undo()
    assert counts[1] < 11 * counts[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [fan_out, lambda n: row_of_ops(["identity"] * n), lambda n: row_of_ops(["relu"] * n)],
    ids=["fan-out", "identities", "chain"],
)
def test_matching_fifty_thousand_ops_takes_seconds(tmp_path, make):
    """Ten times the ops take about ten times as long, generously measured."""
    rules = rules_of(tmp_path, RULES)
    times = []
    for size in (5_000, 50_000):
        model = make(size)
        start = time.process_time()
        list(RuleMatcher(model, rules).matches())
        times.append(time.process_time() - start)
    assert times[1] < 40 * times[0] + 1


def test_regexes_take_linear_time():
    """Nested quantifiers, which make a backtracking engine try 2**600 ways, are answered at once."""
    assert not name_matches("/(([a-z_]+)*)*#/", "a_b" * 200)
    assert name_matches("/(([a-z_]+)*)*#$/", "a_b" * 200 + "#")

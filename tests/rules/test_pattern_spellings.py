"""Patterns match by meaning: every spelling of a function, and the shared pattern libraries."""

import onnx
import onnx.parser
import pytest

from graphquant.errors import RuleError
from graphquant.formats.onnx import load
from graphquant.rules import RuleMatcher, conditions, load_ruleset
from graphquant.rules.load import shipped_libraries
from graphquant.rules.matcher import MAX_ANCESTORS
from graphquant.rules.pattern_syntax import parse_pattern, pattern_definitions

HEAD = '<ir_version: 10, opset_import: ["" : 18]>'


def matched_ops(tmp_path, pattern, body, constants="", *, selector='producer = { pattern = "p.*" }'):
    """Return the ops whose tensors a rule with `selector` matches, by default all ops of the pattern, by name."""
    text = f"{HEAD} g (float[2,4] x, float[2,4] z) => (float[2,4] y) <{constants}> {{ {body} }}"
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    rules = f"""
[scheme.s]
dtype = "int8"
[pattern.p]
ops = {pattern!r}
[[rule]]
name = "r"
{selector}
quantize = "s"
"""
    model = load(tmp_path / "model.onnx")
    return sorted({match.tensor.op for match in RuleMatcher(model, load_ruleset([rules])).matches()})


@pytest.mark.parametrize(
    ("body", "searched"),
    [
        ("t = Relu (x) y = MatMul (t, z)", False),
        ("s = Softmax (x) y = Relu (s)", False),
        ("s = Softmax (x) t = Relu (z) y = MatMul (t, s)", True),  # its parts are in the model, not in the pattern
    ],
)
def test_patterns_of_kinds_that_a_model_lacks(tmp_path, monkeypatch, body, searched):
    """The ops above each product are only examined if the model has all kinds that the pattern needs."""
    examined = []
    bind = conditions._PatternSearch.bind_pattern
    monkeypatch.setattr(
        conditions._PatternSearch, "bind_pattern", lambda search, root: examined.append(root) or bind(search, root)
    )
    assert matched_ops(tmp_path, ["s = softmax(x)", "t = relu?(s)", "y = matmul(t, v)"], body) == []
    assert bool(examined) is searched


@pytest.mark.parametrize(
    ("body", "constants", "expected"),
    [
        ("y = Mul (x, x)", "", ["y"]),
        ("y = Pow (x, k)", "float k = {2.0}", ["y"]),
        ("y = Pow (x, k)", "float k = {3.0}", []),
        ("y = Mul (x, z)", "", []),
    ],
)
def test_square(tmp_path, body, constants, expected):
    """Mul(x, x) and Pow(x, 2) are squares; other products and powers are not."""
    assert matched_ops(tmp_path, ["s = square(a)"], body, constants) == expected


@pytest.mark.parametrize(("body", "expected"), [("y = Mul (x, x)", ["y"]), ("y = Mul (x, z)", [])])
def test_square_of_any_input(tmp_path, body, expected):
    """An operand `_` of a function is the same input wherever a spelling repeats it."""
    assert matched_ops(tmp_path, ["s = square(_)"], body) == expected
    swish = f"g = Sigmoid ({body[-2]}) y = Mul (x, g)"
    assert matched_ops(tmp_path, ["s = gated(_)"], swish) == (["g", "y"] if expected else [])


@pytest.mark.parametrize(
    ("body", "constants"),
    [
        ("r = Sqrt (z) y = Div (x, r)", ""),
        ("r = Sqrt (z) i = Div (k, r) y = Mul (x, i)", "float k = {1.0}"),
        ("r = Sqrt (z) i = Div (k, r) y = Mul (i, x)", "float k = {1.0}"),
    ],
)
def test_divide_by_sqrt(tmp_path, body, constants):
    """A quotient by a root and a product with the inverse root are the same."""
    assert "y" in matched_ops(tmp_path, ["y = divide_by_sqrt(a, b)"], body, constants)


@pytest.mark.parametrize(
    "body",
    [
        "a = Mul (x, k) t = Tanh (z) y = Mul (a, t)",
        "t = Tanh (z) a = Mul (t, k) y = Mul (x, a)",
        "t = Tanh (z) a = Mul (x, t) y = Mul (k, a)",
    ],
)
def test_products_in_any_order(tmp_path, body):
    """Three factors match in every order and association, and the helper product belongs to the pattern."""
    assert matched_ops(tmp_path, ["t = tanh(_)", "y = product(f, t, _)"], body, "float k = {0.5}") == ["a", "t", "y"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("v = Abs (x) e = Add (k, v) q = Sqrt (e)", ["e", "q", "v"]),
        ("v = Abs (x) q = Sqrt (v)", ["q", "v"]),
        ("v = Abs (x) i = Identity (v) e = Add (i, k) q = Sqrt (e)", ["e", "i", "q", "v"]),
        ("v = Abs (x) e = Mul (v, k) q = Sqrt (e)", []),
    ],
)
def test_optional_ops(tmp_path, body, expected):
    """An optional op may be missing, not replaced; ops that forward values between parts belong to the match."""
    pattern = ["v = abs(_)", "e = add?(v, _)", "y = root(e)"]
    assert matched_ops(tmp_path, pattern, f"{body} y = Neg (q)", "float k = {1.0}") == expected


def test_op_types(tmp_path):
    """A word with a capital letter is an op type."""
    assert matched_ops(tmp_path, ["y = sqrt|Reciprocal(_)"], "r = Reciprocal (x) y = Abs (r)") == ["r"]


def selected_ops(tmp_path, body, selector):
    """Return the ops that `selector` matches in a graph of `a = Abs (x)` and `body`."""
    constants = "float k = {2.0}, float[4,1] v = {1.0, 1.0, 1.0, 1.0}"
    return matched_ops(tmp_path, ["s = square(_)", "y = sqrt(s)"], f"a = Abs (x) {body}", constants, selector=selector)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("t = Transpose (a) s = Mul (t, t) q = Sqrt (s) y = Transpose (q)", ["a", "t"]),
        ("t = Transpose (a) s = Mul (t, t) q = Sqrt (s) u = Transpose (q) y = Add (u, a)", ["t"]),
        ("m = Mul (a, k) s = Mul (m, m) y = Sqrt (s)", ["a"]),
        ("m = Mul (a, x) s = Mul (m, m) y = Sqrt (s)", []),
        ("m = Gemm (a, v, k) s = Mul (m, m) y = Sqrt (s)", ["a"]),
        ("h = Shape (a) s = Mul (a, a) q = Sqrt (s) y = Reshape (q, h)", ["a"]),
    ],
)
def test_feeds(tmp_path, body, expected):
    """`feeds` holds for tensors that only a pattern reads, also behind ops that move, scale or shift values."""
    assert selected_ops(tmp_path, body, 'producer = { kind = "abs|transpose", feeds = "p.s" }') == expected


def test_feeds_of_a_consumer(tmp_path):
    """The outputs of a consumer must reach the pattern; one that ends in the model's output does not."""
    body = "t = Transpose (a) s = Mul (t, t) q = Sqrt (s) w = Add (q, k) y = Transpose (x)"
    assert selected_ops(tmp_path, body, 'consumer = { kind = "transpose", feeds = "p.s" }') == ["a"]


@pytest.mark.parametrize(("count", "expected"), [(MAX_ANCESTORS - 1, ["a"]), (MAX_ANCESTORS, [])])
def test_feeds_through_many_ops(tmp_path, count, expected):
    """The search ends after `MAX_ANCESTORS` ops, the one that leaves the limit included."""
    chain = " ".join(f"t{index + 1} = Transpose (t{index})" for index in range(count))
    body = f"t0 = Neg (a) {chain} s = Mul (t{count}, t{count}) y = Sqrt (s)"
    assert selected_ops(tmp_path, body, 'producer = { kind = "abs", feeds = "p.s" }') == expected


@pytest.mark.parametrize(
    ("body", "matches"),
    [
        ("p = Mul (a, b) q = Mul (c, d) y = Mul (p, q)", True),
        ("p = Mul (a, b) q = Mul (p, c) y = Mul (q, d)", True),
        ("p = Mul (c, d) q = Mul (b, p) y = Mul (a, q)", True),
        ("p = Mul (b, d) q = Mul (c, a) y = Mul (p, q)", True),
        ("p = Mul (a, a) q = Mul (c, d) y = Mul (p, q)", False),
        ("p = Mul (b, b) q = Mul (c, d) y = Mul (p, q)", False),
    ],
)
def test_trees_of_a_product(tmp_path, body, matches):
    """A product matches in any order and grouping of its factors, each of them once."""
    pattern = ["a = abs(_)", "b = neg(_)", "c = sqrt(_)", "d = exp(_)", "y = product(a, b, c, d)"]
    ops = matched_ops(tmp_path, pattern, f"a = Abs (x) b = Neg (x) c = Sqrt (x) d = Exp (x) {body}")
    assert {"a", "b", "c", "d", "y"}.issubset(ops) == matches
    assert len(pattern_definitions(parse_pattern(["y = product(a, b, c, d, e)"]))["y"]) == 15  # pairs of groups


CLIP = (
    "float three = {3.0}, float zero = {0.0}, float six = {6.0}, float fifth = {0.2}, float half = {0.5},"
    " float one = {1.0}"
)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("g = Sigmoid (x) y = Mul (x, g)", ["g", "y"]),
        ("g = HardSigmoid (x) y = Mul (g, x)", ["g", "y"]),
        ("k = Mul (x, fifth) g = Sigmoid (k) y = Mul (x, g)", ["g", "k", "y"]),
        ("a = Add (x, three) r = Clip (a, zero, six) g = Div (r, six) y = Mul (x, g)", ["a", "g", "r", "y"]),
        ("a = Add (three, x) r = Clip (a, zero, six) p = Mul (x, r) y = Div (p, six)", ["a", "p", "r", "y"]),
        (
            "a = Add (x, three) m = Min (six, a) r = Max (zero, m) p = Mul (r, x) y = Mul (p, fifth)",
            ["a", "m", "p", "r", "y"],
        ),
        ("p = Mul (x, fifth) a = Add (x, three) r = Clip (a, zero, six) y = Mul (p, r)", ["a", "p", "r", "y"]),
        ("m = Mul (x, fifth) a = Add (m, half) r = Clip (a, zero, one) y = Mul (x, r)", ["a", "m", "r", "y"]),
        ("p = Softplus (x) t = Tanh (p) y = Mul (x, t)", ["p", "t", "y"]),
        ("e = Exp (x) a = Add (e, one) p = Log (a) t = Tanh (p) y = Mul (t, x)", ["a", "e", "p", "t", "y"]),
        ("y = HardSwish (x)", ["y"]),
        ("g = Sigmoid (z) y = Mul (x, g)", []),
        ("a = Add (x, half) r = Clip (a, zero, six) g = Div (r, six) y = Mul (x, g)", []),
        ("g = Tanh (x) y = Mul (x, g)", []),
        ("g = Sigmoid (x) y = Add (x, g)", []),
    ],
)
def test_gated_activations(tmp_path, body, expected):
    """`gated(x)` is x times its own gate in all spellings, and no product with the gate of another tensor."""
    assert matched_ops(tmp_path, ["y = gated(a)"], body, CLIP) == expected


@pytest.mark.parametrize(
    "body",
    [
        "r = Clip (a, zero, six) g = Div (r, six) y = Mul (x, g)",
        "m = Max (a, zero) r = Min (m, six) g = Mul (x, r) y = Div (g, six)",
        "r = Clip (a, zero, six) g = Div (x, six) y = Mul (g, r)",
        "m = Min (six, a) r = Max (m, zero) g = Mul (x, fifth) y = Mul (r, g)",
    ],
)
def test_parts_of_a_hard_swish(tmp_path, body):
    """The factor may scale the limited sum, the product, or the input first: all parts stay float in OpenVINO."""
    text = f"{HEAD} g (float[1,4] i) => (float[1,4] z) <{CLIP}> {{ x = Neg (i) a = Add (x, three) {body} z = Neg (y) }}"
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    matches = RuleMatcher(load(tmp_path / "model.onnx"), load_ruleset(["openvino"])).matches()
    assert {match.rule.rule.name for match in matches if match.tensor.op in {"x", "a", "r", "m", "g"}} == {"silu"}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = Conv (i, w)", ["y"]),
        ("n = Mul (i, i) c = Conv (n, w) y = Conv (c, w)", ["c"]),
        ("c = Conv (i, w) r = Relu (c) d = Conv (r, w) e = Conv (i, w) y = Add (d, e)", ["c", "e"]),
        ("m = MatMul (i, w) y = Conv (m, w)", []),
    ],
)
def test_stems(tmp_path, body, expected):
    """A stem is a convolution that no other weight is above, whatever else is."""
    text = f"{HEAD} g (float[1,1,1,1] i) => (float[1,1,1,1] y) <float[1,1,1,1] w = {{2.0}}> {{ {body} }}"
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    rules = '[scheme.s]\ndtype = "int8"\n[[rule]]\nname = "r"\nproducer = { kind = "stem" }\nquantize = "s"\n'
    matches = RuleMatcher(load(tmp_path / "model.onnx"), load_ruleset([rules])).matches()
    assert sorted({match.tensor.op for match in matches}) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("c = Conv (i, w) r = Relu (c) y = Add (r, i)", ["r"]),
        ("r = Relu (i) c = Conv (r, w) d = Neg (c) y = Neg (d)", ["d"]),
        ("r = Relu (i) c = Conv (r, w) d = Conv (r, w) y = Add (c, d)", []),
        ("r = Relu (i) y = Neg (r)", ["i", "r"]),
    ],
)
def test_tails(tmp_path, body, expected):
    """Ops of the tail have no weight, and none is below them. Their results are listed here but for the last one."""
    text = f"{HEAD} g (float[1,1,1,1] i) => (float[1,1,1,1] y) <float[1,1,1,1] w = {{2.0}}> {{ {body} }}"
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    rules = (
        '[scheme.s]\ndtype = "int8"\n[[rule]]\nname = "r"\nproducer = { kind = "tail" }\n'
        'consumer = { kind = "add|neg|relu" }\nquantize = "s"\n'
    )
    matches = RuleMatcher(load(tmp_path / "model.onnx"), load_ruleset([rules])).matches()
    assert sorted({match.tensor.op for match in matches}) == expected


NORMALIZED = "m = ReduceMean (c) d = Sub (c, m) s = Mul (d, d) v = ReduceMean (s) "


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            f"c = Conv (i, w) {NORMALIZED} e = Add (v, tiny) r = Sqrt (e) y = Div (d, r)",
            ["c", "d", "m", "s", "v", "e", "r"],
        ),
        ("c = Conv (i, w) y = InstanceNormalization (c, one, one)", ["c"]),
        ("c = Conv (i, w) a = Abs (c) p = ReduceMax (a) y = Div (c, p)", ["a", "c", "p"]),
        ("c = Conv (i, w) r = Relu (c) d = Conv (r, w) y = InstanceNormalization (d, one, one)", ["c", "d", "r"]),
        ("l = Log (i) n = ReduceMin (l) d = Sub (l, n) m = ReduceMax (d) q = Div (d, m) y = Conv (q, w)", "dmn"),
        # A bias, or an activation that is not proportional, depends on the level.
        ("c = Conv (i, w, one) y = InstanceNormalization (c, one, one)", []),
        ("c = Conv (i, w) t = Tanh (c) y = InstanceNormalization (t, one, one)", []),
        (f"c = Conv (i, w) {NORMALIZED} e = Add (v, one) r = Sqrt (e) y = Div (d, r)", []),
        ("c = Conv (i, w) y = Relu (c)", []),
    ],
)
def test_ops_before_a_normalization(tmp_path, body, expected):
    """Ops are unnormalized between a signal and a normalization in any spelling, if all are proportional."""
    constants = "float[1,1,1] w = {2.0}, float[1] one = {1.0}, float tiny = {0.000001}"
    text = f"{HEAD} g (float[1,1,9] i) => (float[1,1,9] y) <{constants}> {{ {body} }}"
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    rules = '[scheme.s]\ndtype = "int8"\n[[rule]]\nname = "r"\nproducer = { kind = "unnormalized" }\nquantize = "s"\n'
    matches = RuleMatcher(load(tmp_path / "model.onnx"), load_ruleset([rules])).matches()
    assert {match.tensor.op for match in matches} == {*expected}


def test_images_are_no_signals(tmp_path):
    """The levels of images lie close together, so no op on them counts as unnormalized."""
    body = "c = Conv (i, w) y = InstanceNormalization (c, one, one)"
    constants = "float[1,1,1,1] w = {2.0}, float[1] one = {1.0}"
    text = f"{HEAD} g (float[1,1,9,9] i) => (float[1,1,9,9] y) <{constants}> {{ {body} }}"
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    rules = '[scheme.s]\ndtype = "int8"\n[[rule]]\nname = "r"\nproducer = { kind = "unnormalized" }\nquantize = "s"\n'
    assert list(RuleMatcher(load(tmp_path / "model.onnx"), load_ruleset([rules])).matches()) == []


def test_missing_optional_op(tmp_path):
    """The operand in place of a missing optional op does not have its role."""
    pattern = ["s = square(a)", "n = neg?(s)", "y = sqrt(n)"]
    optional_op = 'producer = { pattern = "p.n" }'
    assert matched_ops(tmp_path, pattern, "s = Mul (x, x) n = Neg (s) y = Sqrt (n)", selector=optional_op) == ["n"]
    assert matched_ops(tmp_path, pattern, "s = Mul (x, x) y = Sqrt (s)", selector=optional_op) == []
    assert matched_ops(tmp_path, pattern, "s = Mul (x, x) y = Sqrt (s)") == ["s", "y"]


def test_ops_that_forward_an_operand(tmp_path):
    """Ops that forward values between two parts belong to the match; those that forward an operand do not."""
    pattern = ["s = square(a)", "y = sqrt(s)"]
    body = "i = Identity (x) s = Mul (i, i) j = Identity (s) y = Sqrt (j)"
    assert matched_ops(tmp_path, pattern, body) == ["j", "s", "y"]


def test_omitted_input(tmp_path):
    """An op without an input that the pattern has an operand for does not match."""
    assert matched_ops(tmp_path, ["y = Clip(a, b)"], 'y = Clip (x, "", k)', "float k = {1.0}") == []


def test_root_that_is_a_function_of_a_function(tmp_path):
    """The last line may be a function that is spelled with another one."""
    assert "y" in matched_ops(tmp_path, ["y = squared_difference(a, b)"], "d = Sub (x, z) y = Mul (d, d)")


def test_wrong_numbers_of_operands():
    """Functions with a wrong number of operands are refused, and products of too many factors."""
    for line, message in (
        ("y = square(a, b)", "takes 1 operands"),
        ("y = product(a)", "takes 2 to 5 operands"),
        ("y = product(a, b, c, d, e, f)", "takes 2 to 5 operands"),
        ("y = neg?(a)", "is optional"),
        ("y = neg?()", "has no operand"),
    ):
        with pytest.raises(ValueError, match=message):
            pattern_definitions(parse_pattern([line]))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('use = ["nothing"]\n[[rule]]\nname = "r"\nproducer = { kind = "conv" }\nquantize = "float"\n', 1),
        ('use = ["transformers"]\n[pattern.gelu]\nops = ["y = relu(x)"]\n', 2),
        ('[[rule]]\nname = "r"\nproducer = { pattern = "gelu" }\nquantize = "float"\n', 3),
    ],
)
def test_mistakes_in_libraries(text, line):
    """Unknown libraries, repeated names, and patterns of a library that is not used are mistakes."""
    with pytest.raises(RuleError, match=rf"^rules\[0\]:{line}: "):
        load_ruleset([text])


def test_library():
    """The patterns of a library are available by name, and change the digest of the rules."""
    rule = '[[rule]]\nname = "r"\nproducer = { pattern = "gelu.*" }\nquantize = "float"\n'
    ruleset = load_ruleset([f'use = ["transformers"]\n{rule}'])
    assert "gelu" in ruleset.rules[0].patterns


@pytest.mark.parametrize("library", shipped_libraries())
def test_one_library_alone(tmp_path, library):
    """The rules of a library need no other one: they match against a model with each kind that they name."""
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[4,4] x) => (float[4,4] y) <float[4,4] w = {%s}>'
    message = onnx.parser.parse_model(text % ",".join("1" * 16) + "{ a = MatMul(x, w) b = MatMul(a, x) y = Log(b) }")
    onnx.save(message, tmp_path / "model.onnx")
    rule = '[[rule]]\nname = "r"\nproducer = { kind = "conv" }\nquantize = "float"\n'
    ruleset = load_ruleset([f'use = ["{library}"]\n{rule}'])
    matches = RuleMatcher(load(tmp_path / "model.onnx"), ruleset).matches()
    assert {match.rule.file for match in matches} <= {library}
    for bound in ruleset.rules[1:]:
        for selector in (bound.rule.producer, bound.rule.consumer):
            references = filter(None, [selector.pattern, selector.feeds])
            assert {name.split(".")[0] for text in references for name in text.split("|")} <= bound.patterns.keys()


def test_rules_of_a_library():
    """The rules of a library follow those of all files, once, at the line of `use`, also if two have the same name."""
    rule = '[[rule]]\nname = "einsum"\nconsumer = { kind = "conv" }\nquantize = "float"\n'
    ruleset = load_ruleset([f'description = "d"\nuse = ["weights"]\n{rule}', "weight_only"])
    rules = [(bound.file, bound.rule.name, bound.line, bound.inherited) for bound in ruleset.rules]
    assert rules[0] == ("rules[0]", "einsum", 3, False)
    library = [rule for rule in rules if rule[0] == "weights"]
    assert rules[-len(library) :] == library
    assert {(line, inherited) for _, _, line, inherited in library} == {(2, True)}
    names = [name for _, name, _, _ in library]
    assert len(names) == len({*names}) > 1

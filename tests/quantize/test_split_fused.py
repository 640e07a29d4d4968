"""Fused ops of ONNX Runtime split into their parts: the same values, each part quantized, and the record to undo it."""

import numpy as np
import onnx
import onnx.parser
import pytest
from support.onnx_models import load_onnx, run_onnx

import graphquant as gq
from graphquant.api.strip import prove_stripped
from graphquant.formats import onnx as onnx_format
from graphquant.formats.onnx.runtime import RELEASE
from graphquant.ir import count_macs
from graphquant.quantize import find_skipped_steps, prepare

STEP = ("split-fused",)
WEIGHTS = {
    "w": np.random.default_rng(1).normal(size=(4, 3, 3, 3)).astype(np.float32) / 4,
    "b": np.linspace(-1, 1, 4, dtype=np.float32),
    "m": np.random.default_rng(2).normal(size=(6, 5)).astype(np.float32),
    "n": np.random.default_rng(3).normal(size=(5, 6)).astype(np.float32),
    "c": np.linspace(-1, 1, 5, dtype=np.float32),
}
IMAGE = "(float[2, 3, 8, 8] x, float[2, 4, 6, 6] z) => (float[2, 4, 6, 6] y)"
MATRICES = "(float[2, 3, 6] x, float[2, 3, 6] z) => (float[2, 3, 3] y)"
ROWS = "(float[2, 6] x) => (float[2, 5] y)"


def load_fused(folder, graph, opset=13, weights=WEIGHTS):
    """Load a graph whose com.microsoft ops are given as text."""
    message = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1, "com.microsoft.nchwc": 1]> g {graph}'
    )
    used = {name for node in message.graph.node for name in node.input}
    used |= {name for node in message.graph.node for body in node.attribute for n in body.g.node for name in n.input}
    for name in sorted(used & weights.keys()):
        message.graph.initializer.append(onnx.numpy_helper.from_array(weights[name], name))
    onnx.save(message, folder / "fused.onnx")
    return gq.load(folder / "fused.onnx")


NORM_WEIGHTS = {
    "w": np.random.default_rng(4).normal(size=(6, 6)).astype(np.float32),
    **{name: np.random.default_rng(i).normal(size=6).astype(np.float32) for i, name in enumerate("gob")},
    "two": np.array(2, np.float32),
    "one": np.ones((), np.float32),
    "eps": np.array(1e-5, np.float32),
    "eps6": np.full(6, 1e-5, np.float32),
    "eps4d": np.full((1, 1, 1, 1), 1e-5, np.float32),
    "column": np.ones((4, 1), np.float32),
    "last": np.array([-1]),
    "middle": np.array([1]),
}
ROWS_OF_NORMS = "(float[n, 4, 6] x, float[n, 4, 6] r) => (float[n, 4, 6] y, float[n, 4, 6] z)"
SKIP = "com.microsoft.SkipLayerNormalization"


def rewrite_norms(folder, body, opset=18):
    """Return the types of the ops of the body and the steps after the step `rewrite-norms`, which keeps values."""
    model = load_fused(folder, f"{ROWS_OF_NORMS} {{ {body} }}", opset, NORM_WEIGHTS)
    prepared, steps = prepare(model, ("rewrite-norms",))
    assert {step.step for step in steps} <= {"rewrite-norms"}
    message = onnx_format.emit(prepared)
    feeds = {name: np.random.default_rng(i).normal(size=(2, 4, 6)).astype(np.float32) for i, name in enumerate("xr")}
    for actual, expected in zip(run_onnx(message, feeds), run_onnx(model.source.message, feeds), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    return [node.op_type for node in message.graph.node], steps


@pytest.mark.parametrize(
    ("body", "types"),
    [
        (f"m = MatMul(x, w) y = {SKIP}(m, r, g, o, b) z = Neg(y)", "MatMul Add Sum LayerNormalization Neg"),
        (f"m = MatMul(x, w) y = {SKIP}(r, m, g, , b) z = Neg(y)", "MatMul Add Sum LayerNormalization Neg"),
        (f"y = {SKIP}<epsilon = 0.01>(x, r, g, o) z = Neg(y)", "Sum LayerNormalization Neg"),
        (f"m = Neg(x) y, , , z = {SKIP}(m, r, g, o)", "Neg Sum LayerNormalization"),
        ("a = Add(x, r) y = LayerNormalization<axis = -1>(a, g, o) z = Neg(a)", "Sum LayerNormalization Neg"),
        ("a = Add(x, o) y = LayerNormalization<axis = -1>(a, g, o) z = Neg(a)", "Add LayerNormalization Neg"),
        ("y = com.microsoft.BiasGelu(x, b) z = Neg(r)", "Add Gelu Neg"),
        ("y = com.microsoft.FastGelu(x, b) z = com.microsoft.FastGelu(r)", "Add FastGelu FastGelu"),
    ],
)
def test_norms_and_biases(tmp_path, body, types):
    """A sum before a norm is an op that ONNX Runtime does not join to it, and a bias joins the product before it."""
    assert sorted(rewrite_norms(tmp_path, body)[0]) == sorted(types.split())


ROOT = "m = ReduceMean(s, last) a = Add(m, eps) q = Sqrt(a)"
MUL = "y = Mul(n, g) z = Neg(r)"
SUM_OF_SIZES = "h = Shape(d) f = Cast<to = 1>(h) t = ReduceSum<keepdims = 0>(f) y = Mul(x, t) z = Neg(r)"


@pytest.mark.parametrize("square", ["s = Mul(x, x)", "s = Pow(x, two)"])
@pytest.mark.parametrize(
    "normal", ["n = Div(x, q)", "i = Reciprocal(q) n = Mul(x, i)", "i = Div(one, q) n = Mul(i, x)"]
)
@pytest.mark.parametrize("opset", [13, 18, 23])
def test_root_mean_square_norm(tmp_path, square, normal, opset):
    """A root mean square norm in any spelling becomes one op."""
    root = ROOT if opset >= 18 else ROOT.replace("(s, last)", "<axes = [2]>(s)")
    types, steps = rewrite_norms(tmp_path, f"{square} {root} {normal} {MUL}", opset)
    assert types == ["RMSNormalization" if opset >= 23 else "SimplifiedLayerNormalization", "Neg"]
    assert [step.target for step in steps] == ["y"]


def test_norms_in_a_branch(tmp_path):
    """A branch reads parts of its norm from the graph around it, and adds a tensor of the other graph before a norm."""
    norm = "i = Reciprocal(q) n = Mul(x, i) t = Mul(n, g)"
    skip = f"e = {SKIP}(x, r, g, o, b)"
    branches = (
        f"then_branch = p () => (float[2, 4, 6] t) {{ {norm} }}, else_branch = k () => (float[2, 4, 6] e) {{ {skip} }}"
    )
    body = f"s = Mul(x, x) {ROOT} h = ReduceSum<keepdims = 0>(r) c = Cast<to = 9>(h) y = If(c) <{branches}> z = Neg(r)"
    types, steps = rewrite_norms(tmp_path, body)
    assert {"Sqrt", "Mul"}.isdisjoint(types)
    assert sorted(step.target for step in steps) == ["y/else_branch/e", "y/then_branch/t"]


@pytest.mark.parametrize(
    "body",
    [
        f"s = Mul(x, r) {ROOT} n = Div(x, q) {MUL}",  # no square
        f"s = Mul(x, x) {ROOT} n = Div(r, q) {MUL}",  # of another tensor
        f"s = Mul(x, x) {ROOT} n = Div(q, x) {MUL}",
        f"p = Abs(x) s = Pow(p, one) {ROOT} n = Div(x, q) {MUL}",
        f"s = Mul(x, x) {ROOT} n = Div(x, q) {MUL}".replace("last", "middle"),
        f"s = Mul(x, x) {ROOT} n = Div(x, q) {MUL}".replace("(s, last)", "(s)"),  # over all axes
        f"s = Mul(x, x) {ROOT} f = Transpose<perm = [0, 1, 2]>(x) n = Div(f, q) {MUL}",
        f"s = Mul(x, x) {ROOT} n = Div(x, q) {MUL}".replace("eps", "eps6"),
        f"s = Mul(x, x) {ROOT} n = Div(x, q) {MUL}".replace("(n, g)", "(n, column)"),
        f"s = Mul(x, x) {ROOT} n = Div(x, q) d = Mul(n, g) {SUM_OF_SIZES}".replace("eps", "eps4d"),
        f"s = Mul(x, x) {ROOT} n = Div(x, q) y = Mul(n, g) z = Neg(n)",  # another reader
    ],
)
def test_parts_that_are_no_norm(tmp_path, body):
    """Other ops with the same types stay, and so does a norm whose result has more axes than x."""
    assert rewrite_norms(tmp_path, body)[1] == ()


def test_sums_without_broadcasting(tmp_path):
    """Before opset 8 the inputs of a Sum have the same shape."""
    body = "f = Squeeze<axes = [0]>(r) a = Add(x, f) y = LayerNormalization<axis = -1>(a, g, o) z = Neg(a)"
    model = load_fused(tmp_path, f"{ROWS_OF_NORMS.replace('[n, 4, 6] r', '[1, 4, 6] r')} {{ {body} }}", 7, NORM_WEIGHTS)
    assert prepare(model, ("rewrite-norms",))[1] == ()


def test_rewritten_norms_in_a_result(tmp_path):
    """The weight behind a fused norm is quantized, and `strip` restores the model; other runtimes get no new op."""
    body = f"a = Abs(x) m = MatMul(a, w) y = {SKIP}(m, r, g, o, b) z = Neg(y)"
    model = load_fused(tmp_path, f"{ROWS_OF_NORMS} {{ {body} }}", 18, NORM_WEIGHTS)
    result = gq.insert(model, rules=["weight_only_int8"])
    rewritten = "rewrite-norms" in {step.step for step in result.plan.steps}
    assert rewritten is (RELEASE >= (1, 30))
    assert prove_stripped(gq.strip(result.save(tmp_path / "quantized.onnx")), tmp_path / "fused.onnx").holds
    other = gq.plan(model, rules=["weight_only_int8"], family="onnx-qdq")
    assert "rewrite-norms" not in {step.step for step in other.steps}


@pytest.mark.parametrize(
    ("slopes", "types"),
    [((-0.5, 0.3, 1), "Mul Max"), ((0.2, 1, 7), "Min Relu Mul Add"), ((0, 0.5, 1), "Min Relu Mul Add")],
)
def test_prelu(tmp_path, slopes, types):
    """A PRelu becomes a maximum, or a sum if a slope is 0 or above 1: with the same values, and it can be undone."""
    weights = {"w": WEIGHTS["w"][:3], "s": np.array(slopes, np.float32).reshape(3, 1, 1)}
    text = "g (float[2, 3, 8, 8] x) => (float[2, 3, 6, 6] y) { c = Conv(x, w) p = PRelu(c, s) y = Neg(p) }"
    model = load_onnx(tmp_path, text, weights)
    prepared, steps = prepare(model, ("split-prelu",))
    message = onnx_format.emit(prepared)
    assert [(step.step, step.target) for step in steps] == [("split-prelu", "p")]
    assert sorted(node.op_type for node in message.graph.node) == sorted(["Conv", *types.split(), "Neg"])
    feeds = {"x": np.random.default_rng(0).normal(0, 1, (2, 3, 8, 8)).astype(np.float32)}
    expected, actual = run_onnx(model.source.message, feeds)[0], run_onnx(message, feeds, check=True)[0]
    np.testing.assert_array_equal(actual, expected)
    samples = {"x": np.random.default_rng(1).normal(0, 1, (8, 2, 3, 8, 8)).astype(np.float32)}
    result = gq.insert(model, data=samples, float_weights=True, min_sqnr="none")
    assert [step.target for step in result.plan.steps if step.step == "split-prelu"] == ["p"]
    assert gq.strip(result.save(tmp_path / "quantized.onnx")).exact


@pytest.mark.parametrize("slopes", [(-0.5, 1, 0.5), (0.2, 0, 7)])
def test_values_of_prelus_that_are_not_finite(tmp_path, slopes):
    """They are what the formula gives; the op PRelu itself differs between releases of ONNX Runtime."""
    values = np.array([[np.inf] * 3, [-np.inf] * 3, [np.nan] * 3, [-0.0, 2, -3]], np.float32)
    model = load_onnx(
        tmp_path, "g (float[4, 3] x) => (float[4, 3] y) { y = PRelu(x, s) }", {"s": np.array(slopes, np.float32)}
    )
    message = onnx_format.emit(prepare(model, ("split-prelu",))[0])
    with np.errstate(invalid="ignore"):
        expected = np.where(values > 0, values, values * np.array(slopes, np.float32))
    np.testing.assert_array_equal(run_onnx(message, {"x": values}, check=True)[0], expected)


@pytest.mark.parametrize("slope", [np.inf, -np.inf, np.nan])
def test_prelus_with_infinite_slopes_stay(tmp_path, slope):
    """The product of such a slope and 0 is no number."""
    text = "g (float[2, 3] x) => (float[2, 3] y) { y = PRelu(x, s) }"
    model = load_onnx(tmp_path, text, {"s": np.array([0.5, slope, 2], np.float32)})
    assert prepare(model, ("split-prelu",))[1] == ()


def test_other_prelus_stay(tmp_path):
    """A PRelu whose slopes are computed or missing, or whose values are float16, is not split."""
    outputs = "float[2, 3] y, float16[2, 3] z, float[2, 3] o"
    body = "y = PRelu(x, s) z = PRelu(h, f) o = PRelu(x)"
    text = f"g (float[2, 3] x, float[3] s, float16[2, 3] h) => ({outputs}) {{ {body} }}"
    model = load_onnx(tmp_path, text, {"f": np.full(3, 0.5, np.float16)})
    assert prepare(model, ("split-prelu",))[1] == ()


def random_feeds(model):
    """Return a random value for each input."""
    rng = np.random.default_rng(5)
    shapes = {name: model.main.op(name).outputs[0].shape for name in model.main.inputs}
    return {name: rng.normal(size=shape).astype(np.float32) * 3 for name, shape in shapes.items()}


CASES = {
    "relu": (f'{IMAGE} {{ y = com.microsoft.FusedConv <activation = "Relu"> (x, w, b) }}', ["Conv", "Relu"]),
    "tanh": (f'{IMAGE} {{ y = com.microsoft.FusedConv <activation = "Tanh"> (x, w) }}', ["Conv", "Tanh"]),
    "sigmoid": (f'{IMAGE} {{ y = com.microsoft.FusedConv <activation = "Sigmoid"> (x, w) }}', ["Conv", "Sigmoid"]),
    "leaky relu": (
        f'{IMAGE} {{ y = com.microsoft.FusedConv <activation = "LeakyRelu", activation_params = [0.3]> (x, w, b) }}',
        ["Conv", "LeakyRelu"],
    ),
    "hard sigmoid": (
        (f'{IMAGE} {{ y = com.microsoft.FusedConv <activation = "HardSigmoid", activation_params = [0.1, 0.4]>'
        " (x, w, b) }"),
        ["Conv", "HardSigmoid"],
    ),
    "clip": (
        f'{IMAGE} {{ y = com.microsoft.FusedConv <activation = "Clip", activation_params = [-1.0, 2.0]> (x, w, b) }}',
        ["Conv", "Clip"],
    ),
    "summand": (
        f'{IMAGE} {{ y = com.microsoft.FusedConv <activation = "Relu"> (x, w, b, z) }}', ["Conv", "Add", "Relu"]
    ),
    "summand only": (f"{IMAGE} {{ y = com.microsoft.FusedConv (x, w, b, z) }}", ["Conv", "Add"]),
    "conv only": (f"{IMAGE} {{ y = com.microsoft.FusedConv (x, w, b) }}", ["Conv"]),
    "two readers": (
        ("(float[2, 3, 8, 8] x) => (float[2, 4, 6, 6] y, float[2, 4, 6, 6] v) {"
        ' y = com.microsoft.FusedConv <activation = "Relu"> (x, w, b) v = Neg (y) }'),
        ["Conv", "Relu", "Neg"],
    ),
    "transposed product": (
        f"{MATRICES} {{ y = com.microsoft.FusedMatMul <transB = 1, alpha = 0.25> (x, z) }}",
        ["Transpose", "MatMul", "Mul"],
    ),
    "product": ("(float[2, 3, 6] x) => (float[2, 3, 5] y) { y = com.microsoft.FusedMatMul (x, m) }", ["MatMul"]),
    "gemm": (
        f'{ROWS} {{ y = com.microsoft.FusedGemm <transB = 1, alpha = 0.5, activation = "Relu"> (x, n, c) }}',
        ["Gemm", "Relu"],
    ),
    "leaky gemm": (
        f'{ROWS} {{ y = com.microsoft.FusedGemm <activation = "LeakyRelu", activation_alpha = 0.3> (x, m, c) }}',
        ["Gemm", "LeakyRelu"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("opset", [9, 13])
@pytest.mark.parametrize("case", CASES)
def test_values_are_the_same(tmp_path, case, opset):
    """The parts compute what the fused op computes, in ONNX Runtime, and cost the same multiply-adds."""
    text, types = CASES[case]
    model = load_fused(tmp_path, text, opset)
    prepared, steps = prepare(model, STEP)
    message = onnx_format.emit(prepared)
    assert [step.step for step in steps] == ["split-fused"]
    assert [node.op_type for node in message.graph.node] == types
    assert {node.domain for node in message.graph.node} == {""}
    feeds = random_feeds(model)
    for expected, actual in zip(
        run_onnx(model.source.message, feeds), run_onnx(message, feeds, check=True), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    assert count_macs(prepared) == count_macs(model)
    assert sum(count_macs(model).values()) > 0


def test_ops_in_bodies(tmp_path):
    """A fused op in a branch, which is the branch's output."""
    text = """(float[2, 3, 8, 8] x, bool f) => (float[2, 4, 6, 6] y) {
        y = If (f) <
            then_branch = t () => (float[2, 4, 6, 6] p) {
                p = com.microsoft.FusedConv <activation = "Clip", activation_params = [0.0, 6.0]> (x, w, b)
            },
            else_branch = e () => (float[2, 4, 6, 6] q) { q = com.microsoft.FusedConv <activation = "Relu"> (x, w) }
        >
    }"""
    model = load_fused(tmp_path, text)
    prepared, steps = prepare(model, STEP)
    assert [step.target for step in steps] == ["y/then_branch/p", "y/else_branch/q"]
    assert prepared.graphs["y/then_branch"].op("p/activation").kind == "relu6"
    x = random_feeds(load_fused(tmp_path, CASES["relu"][0]))["x"]
    for flag in (True, False):
        feeds = {"x": x, "f": np.array(flag)}
        (expected,), (actual,) = run_onnx(model.source.message, feeds), run_onnx(onnx_format.emit(prepared), feeds)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (f'{IMAGE} {{ y = com.microsoft.FusedConv <activation = "Mish"> (x, w) }}', "'Mish'"),
        (f'{IMAGE} {{ y = com.microsoft.FusedConv <activation = "Clip"> (x, w) }}', "'Clip'"),
        (
            f'{IMAGE} {{ y = com.microsoft.FusedConv <activation = "Clip", activation_params = ["a", "b"]> (x, w) }}',
            "'Clip'",
        ),
        (f'{IMAGE} {{ y = com.microsoft.FusedConv <activation = "LeakyRelu", activation_params = 1> (x, w)}}', "Leaky"),
        (f"{MATRICES} {{ y = com.microsoft.FusedMatMul <transBatchA = 1> (x, z) }}", "batch"),
        (f'{IMAGE} {{ y = com.microsoft.nchwc.Conv <activation = "Relu"> (x, w) }}', "processor"),
        ("(float x, float z) => (float y) { y = com.microsoft.FusedMatMul <transB = 1> (x, z) }", "input 1"),
    ],
)  # fmt: skip
def test_ops_that_stay(tmp_path, text, value):
    """Unknown activations, ones without parameters, and transpositions that cannot be written, with the reason."""
    model = load_fused(tmp_path, text)
    prepared, steps = prepare(model, STEP)
    assert (prepared, steps) == (model, ())
    (skipped,) = find_skipped_steps(model, STEP)
    assert (str(skipped.tensor), skipped.step) == ("y:0", "split-fused")
    assert value in skipped.reason


def test_parts_are_quantized(tmp_path):
    """A model that ONNX Runtime optimized gets the sites and the coverage of the original model."""
    plain = """g (float[2, 3, 8, 8] x) => (float[2, 4, 6, 6] y) {
        h = Conv (x, w, b)
        y = Relu (h)
    }"""
    fused, original = load_fused(tmp_path, CASES["relu"][0].replace(", float[2, 4, 6, 6] z", "")), tmp_path / "plain"
    original.mkdir()
    data = "np.npz"
    np.savez(tmp_path / data, x=random_feeds(fused)["x"].repeat(8, axis=0))
    plans = [
        gq.insert(model, data=str(tmp_path / data))
        for model in (fused, load_onnx(original, plain, {name: WEIGHTS[name] for name in "wb"}))
    ]
    assert [result.quantized_share for result in plans] == [1.0, 1.0]
    schemes = [{site.tensor.op.split("/")[0]: site.scheme for site in result.plan.sites} for result in plans]
    assert schemes[0] == {name.replace("h", "y"): scheme for name, scheme in schemes[1].items()}

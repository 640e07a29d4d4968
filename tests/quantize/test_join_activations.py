"""Activations in parts become one op with the same values, in any spelling, and nothing else does."""

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.onnx_models import load_onnx, run_onnx

import graphquant as gq
from graphquant.errors import UsageError
from graphquant.formats import onnx as onnx_format
from graphquant.quantize import prepare

STEP = ("join-activations",)
CONSTANTS = {
    "half": 0.5,
    "one": 1.0,
    "two": 2.0,
    "three": 3.0,
    "six": 6.0,
    "sixth": 1 / 6,
    "zero": 0.0,
    "steep": 1.702,
    "root": 2**0.5,
    "inverse": 0.5**0.5,
    "cubic": 0.044715,
    "scale": (2 / np.pi) ** 0.5,
    "exponent": 3.0,
    "far": 3000.0,
    "low": -1.0,
}
CUBIC = "c = Pow(x, exponent) m = Mul(c, cubic) a = Add(x, m)"
SPELLINGS = {
    "silu": ("s = Sigmoid(x) y = Mul(x, s)", "QuickGelu", 1.0),
    "silu, other order": ("s = Sigmoid(x) y = Mul(s, x)", "QuickGelu", 1.0),
    "steep": ("k = Mul(x, steep) s = Sigmoid(k) y = Mul(x, s)", "QuickGelu", 1.702),
    "by division": ("k = Div(x, two) s = Sigmoid(k) y = Mul(x, s)", "QuickGelu", 0.5),
    "by tanh": ("h = Mul(x, half) t = Tanh(h) o = Add(t, one) p = Mul(x, o) y = Mul(p, half)", "QuickGelu", 1.0),
    "gelu": ("d = Div(x, root) e = Erf(d) o = Add(e, one) p = Mul(x, o) y = Mul(p, half)", "Gelu", None),
    "gelu, halved": ("d = Mul(x, inverse) e = Erf(d) o = Add(e, one) h = Mul(x, half) y = Mul(h, o)", "Gelu", None),
    "gelu, halved inside": (
        "d = Mul(x, inverse) e = Erf(d) h = Mul(e, half) o = Add(h, half) y = Mul(x, o)",
        "Gelu",
        None,
    ),
    "gelu by tanh": (
        f"{CUBIC} n = Mul(a, scale) t = Tanh(n) o = Add(t, one) p = Mul(x, o) y = Mul(p, half)",
        "FastGelu",
        None,
    ),
    "hard swish": ("a = Add(x, three) r = Clip(a, zero, six) p = Mul(x, r) y = Div(p, six)", "HardSwish", None),
    "hard swish of parts": ("h = HardSigmoid<alpha = 0.16666667>(x) y = Mul(x, h)", "HardSwish", None),
    "hard swish, multiplied": (
        "a = Add(x, three) r = Relu(a) c = Min(r, six) g = Mul(c, sixth) y = Mul(x, g)",
        "HardSwish",
        None,
    ),
}  # fmt: skip


def load_net(folder, body, opset=14, kind="float", outputs="y"):
    """Load the net of `body`, whose input `x` is an Abs, with a Neg of each of its outputs."""
    used = {name: np.array(value, np.float32) for name, value in CONSTANTS.items() if name in body}
    results = ", ".join(f"{kind}[2, 9] z{name}" for name in outputs)
    ends = " ".join(f"z{name} = Neg({name})" for name in outputs)
    text = f"g ({kind}[2, 9] i) => ({results}) {{ x = Identity(i) {body} {ends} }}"
    return load_onnx(folder, text, used, opset=opset)


def types(message):
    """Return the types of all nodes."""
    return [node.op_type for node in message.graph.node]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(tmp_path, spelling):
    """Each becomes one op that ONNX Runtime runs, with the values of its parts."""
    body, op_type, steepness = SPELLINGS[spelling]
    model = load_net(tmp_path, body)
    prepared, steps = prepare(model, STEP)
    message = onnx_format.emit(prepared)
    assert [(step.step, step.target) for step in steps] == [("join-activations", "y")]
    assert types(message) == ["Identity", op_type, "Neg"]
    assert not message.graph.initializer
    if steepness is not None:
        assert prepared.main.op("y").attrs == {"alpha": pytest.approx(steepness, rel=1e-6)}
    feeds = {"i": np.linspace(-9, 9, 18, dtype=np.float32).reshape(2, 9)}
    (expected,), (actual,) = run_onnx(model.source.message, feeds), run_onnx(message, feeds, check=True)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "body",
    [
        "s = Sigmoid(x) o = Add(x, one) y = Mul(o, s)",  # another function
        "s = Sigmoid(x) t = Tanh(x) y = Mul(t, s)",
        "d = Div(x, two) e = Erf(d) o = Add(e, one) p = Mul(x, o) y = Mul(p, half)",
        "h = HardSigmoid<alpha = 0.2>(x) y = Mul(x, h)",
        "y = Mul(x, half)",
        "c = Min(x, far) s = Sigmoid(x) y = Mul(c, s)",  # the same below 3,000
        "c = Clip(x, low, six) s = Sigmoid(c) y = Mul(x, s)",
    ],
)
def test_other_functions(tmp_path, body):
    """They stay as they are."""
    model = load_net(tmp_path, body)
    assert prepare(model, STEP) == (model, ())


def test_parts_with_other_readers(tmp_path):
    """A gate that another op reads stays, as does its product."""
    model = load_net(tmp_path, "s = Sigmoid(x) y = Mul(x, s)", outputs="ys")
    assert prepare(model, STEP)[1] == ()


def test_limits_behind_an_activation(tmp_path):
    """A limit that only large values reach stays, behind the activation."""
    model = load_net(tmp_path, "s = Sigmoid(x) m = Mul(x, s) c = Min(m, far) y = Mul(c, one)")
    message = onnx_format.emit(prepare(model, STEP)[0])
    assert types(message) == ["Identity", "QuickGelu", "Min", "Mul", "Neg"]


def test_the_input_may_have_other_readers(tmp_path):
    """The tensor that an activation reads may be read by others, such as a sum around it."""
    model = load_net(tmp_path, "s = Sigmoid(x) m = Mul(x, s) y = Add(x, m)")
    message = onnx_format.emit(prepare(model, STEP)[0])
    assert types(message) == ["Identity", "QuickGelu", "Add", "Neg"]


@pytest.mark.parametrize(("rank", "joined"), [(1, 1), (2, 1), (3, 0)])
def test_constants_with_more_axes(tmp_path, rank, joined):
    """Constants that give the result more axes than the input has keep the parts."""
    constants = {name: np.full([1] * rank, CONSTANTS[name], np.float32) for name in ("root", "one", "half")}
    axes = "1, 2, 9" if rank > 2 else "2, 9"
    text = f"g (float[2, 9] x) => (float[{axes}] z) {{ {SPELLINGS['gelu'][0]} z = Neg(y) }}"
    model = load_onnx(tmp_path, text, constants, opset=14)
    prepared, steps = prepare(model, STEP)
    assert len(steps) == joined
    feeds = {"x": np.ones((2, 9), np.float32)}
    (expected,), (actual,) = run_onnx(model.source.message, feeds), run_onnx(onnx_format.emit(prepared), feeds)
    assert actual.shape == expected.shape


def test_half_precision(tmp_path):
    """Only float32 activations are joined."""
    assert prepare(load_net(tmp_path, "s = Sigmoid(x) y = Mul(x, s)", kind="float16"), STEP)[1] == ()


def test_old_opset(tmp_path):
    """A HardSwish needs opset 14."""
    body = "h = HardSigmoid<alpha = 0.16666667>(x) y = Mul(x, h)"
    assert prepare(load_net(tmp_path, body, opset=13), STEP)[1] == ()


def test_branches(tmp_path):
    """Activations in a branch of an If are joined, and may read a tensor from outside."""
    branch = "%s = %s () => (float[2, 9] %s) { s%s = Sigmoid(x) %s = Mul(x, s%s) }"
    branches = ", ".join(
        branch % (name, letter, letter, letter, letter, letter)
        for name, letter in (("then_branch", "t"), ("else_branch", "e"))
    )
    text = f"g (float[2, 9] i, bool f) => (float[2, 9] y) {{ x = Abs(i) y = If(f) <{branches}> }}"
    prepared, steps = prepare(load_onnx(tmp_path, text, {}, opset=14), STEP)
    assert [step.target for step in steps] == ["y/then_branch/t", "y/else_branch/e"]
    feeds = {"i": np.ones((2, 9), np.float32), "f": np.array(True)}
    np.testing.assert_allclose(run_onnx(onnx_format.emit(prepared), feeds)[0], 1 / (1 + np.exp(-1.0)), rtol=1e-6)


@given(steepness=st.floats(0.2, 5))
def test_any_steepness(tmp_path_factory, steepness):
    """The steepness is that of the sigmoid."""
    folder = tmp_path_factory.mktemp("net")
    value = np.float32(steepness)
    text = "g (float[2, 9] x) => (float[2, 9] y) { k = Mul(x, a) s = Sigmoid(k) y = Mul(x, s) }"
    prepared, _ = prepare(load_onnx(folder, text, {"a": np.array(value)}, opset=14), STEP)
    assert prepared.main.op("y").attrs == {"alpha": pytest.approx(float(value), rel=1e-4)}


def test_int8_around_a_silu(tmp_path):
    """A SiLU between convolutions is one float op, and the convolutions are int8."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(0, 0.3, (16, 16, 1, 1)).astype(np.float32) for name in "wv"}
    body = "c = Conv(x, w) s = Sigmoid(c) y = Mul(c, s) d = Conv(y, v) z = Relu(d)"
    text = f"g (float[1, 16, 8, 8] x) => (float[1, 16, 8, 8] z) {{ {body} }}"
    load_onnx(tmp_path, text, weights, opset=14)
    path = next(tmp_path.glob("*.onnx"))
    rules = ['costs = ""\n', "onnxruntime"]
    data = {"x": rng.normal(size=(8, 16, 8, 8)).astype(np.float32)}
    np.savez(tmp_path / "data.npz", **data)
    gq.insert(path, rules=rules, data=str(tmp_path / "data.npz"), validate=False).save(tmp_path / "quant.onnx")
    report = gq.check(tmp_path / "quant.onnx", backend="onnxruntime")
    status = {verdict.op: verdict.status for verdict in report.verdicts}
    assert [status[op] for op in ("c", "y", "d")] == ["int8", "float", "int8"]
    assert types(onnx.load(tmp_path / "quant.onnx")).count("QuickGelu") == 1
    stripped = gq.strip(tmp_path / "quant.onnx").model
    assert types(onnx_format.emit(stripped)) == ["Conv", "QuickGelu", "Conv", "Relu"]


@pytest.mark.parametrize(
    ("domain", "op", "op_type"),
    [
        ("com.microsoft", "QuickGelu", "QuickGelu"),
        ("com.microsoft", "QuickGelu<alpha = 1.0>", "QuickGelu"),
        ("com.microsoft", "Gelu", "Gelu"),
        ("", "Gelu", "Gelu"),
        ("", 'Gelu<approximate = "tanh">', "FastGelu"),
    ],
)
def test_activations_of_one_op(tmp_path, domain, op, op_type):
    """An activation of one op between ops that change nothing keeps its values, also those of its defaults."""
    message = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 20, "com.microsoft": 1]> g (float[2, 9] x) => (float[2, 9] y) {{
            q = {domain and domain + "."}{op}(x) m = Max(q, low) y = Mul(m, one)
        }}"""
    )
    for name in ("low", "one"):
        message.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(CONSTANTS[name]), name))
    onnx.save(message, tmp_path / "model.onnx")
    joined = onnx_format.emit(prepare(gq.load(tmp_path / "model.onnx"), STEP)[0])
    assert types(joined) == [op_type]
    feeds = {"x": np.linspace(-9, 9, 18, dtype=np.float32).reshape(2, 9)}
    np.testing.assert_allclose(run_onnx(joined, feeds)[0], run_onnx(message, feeds)[0], rtol=2e-5, atol=2e-5)


def test_doc_string_and_metadata(tmp_path):
    """The op has those of the last part."""
    text = "g (float[2, 9] x) => (float[2, 9] y) { s = Sigmoid(x) y = Mul(x, s) }"
    load_onnx(tmp_path, text, {}, opset=14)
    message = onnx.load(tmp_path / "model.onnx")
    message.ir_version = 10
    message.graph.node[1].doc_string = "what it is"
    message.graph.node[1].metadata_props.add(key="k", value="v")
    onnx.save(message, tmp_path / "model.onnx")
    (node,) = onnx_format.emit(prepare(gq.load(tmp_path / "model.onnx"), STEP)[0]).graph.node
    assert (node.op_type, node.doc_string) == ("QuickGelu", "what it is")
    assert {entry.key: entry.value for entry in node.metadata_props} == {"k": "v"}


def test_names_of_parts(tmp_path):
    """A selector that names a part is told the name of the op that it became."""
    model = load_net(tmp_path, "d = Div(x, two) s = Sigmoid(d) y = Mul(x, s)")
    for name in ("d", "s"):
        with pytest.raises(UsageError, match="folds it into 'y'"):
            gq.plan(model, rules=["onnxruntime"], exclude=name)

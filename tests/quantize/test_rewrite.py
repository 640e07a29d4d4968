"""Plans to graphs: names, reroutes, folding, bodies, frames; and what onnxruntime makes of the result."""

from dataclasses import replace

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.qparams import choose_qparams

from graphquant.errors import UsageError
from graphquant.formats import onnx as onnx_format
from graphquant.formats.tensorflow import emit as tf_emit
from graphquant.formats.tensorflow import load as tf_load
from graphquant.ir import Parameters, TensorRef, Use
from graphquant.numerics import IntType, Range, dequantize, qparams_from_scale, quantize
from graphquant.quantize import Plan, Site
from graphquant.quantize.rewrite import IntegerCache, rewrite
from graphquant.rules import Scheme

INT8, UINT8 = IntType(8, signed=True), IntType(8, signed=False)
SCHEME = Scheme(name="q", dtype="int8", family="onnx-qdq")
ACTIVATION = replace(SCHEME, dtype="uint8", zero="asymmetric")
CHANNEL = replace(SCHEME, per="channel", narrow=True)
RNG = np.random.default_rng(3)


def load(tmp_path, text, **values):
    """The model written as text, with initializers for `values`."""
    message = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 13]>\n' + text)
    message.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in values.items())
    onnx.save(message, tmp_path / "model.onnx")
    return onnx_format.load(tmp_path / "model.onnx")


def run(model, level="ORT_DISABLE_ALL", **feeds):
    """The outputs of a model in onnxruntime, by itself without its own optimizations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    message = onnx_format.emit(model)
    onnx.checker.check_model(message)
    session = onnxruntime.InferenceSession(message.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def site(tensor, *uses, **changes):
    """A site of a tensor for uses, each an op and slot of the main graph or a `Use`."""
    ref = tensor if isinstance(tensor, TensorRef) else TensorRef("", tensor)
    listed = tuple(use if isinstance(use, Use) else Use("", *use) for use in uses)
    return Site(**{"tensor": ref, "uses": listed, "graph": ref.graph, "scheme": SCHEME, "rule": "r", **changes})


def plan(*sites, kind="onnx"):
    """A plan of these sites."""
    return Plan(format=kind, model="", prepared="", rules=(), sites=sites)


def scale(value, zero=0, dtype=INT8, **more):
    """Params of one scale."""
    return qparams_from_scale(np.float32(value), np.int32(zero), dtype, **more)


def ops(model, graph=""):
    """Name, type and inputs of every op that was made, as text."""
    home = model.graphs[graph]
    built = [op for op in home.ops() if op.rule]
    return [f"{op.name} = {op.type}({', '.join(map(str, home.slots(op.name)))})" for op in built]


FAN = "g (float[2] x) => (float[2] y, float[2] z) { y = Neg(x)\n z = Relu(x) }"


def test_exactly_the_planned_uses_are_rerouted(tmp_path):
    """The planned use reads the dequantized tensor, the other still the float one; the source is not touched."""
    model = load(tmp_path, FAN)
    rewritten, (pairs,) = rewrite(model, plan(site("x", ("y", 0))), {0: scale(0.5)})
    assert ops(rewritten) == [
        "x/quant/scale = Constant()",
        "x/quant/zero_point = Constant()",
        "x/quant = QuantizeLinear(x:0, x/quant/scale:0, x/quant/zero_point:0)",
        "x/quant/dequant = DequantizeLinear(x/quant:0, x/quant/scale:0, x/quant/zero_point:0)",
    ]
    assert str(rewritten.main.source_of(Use("", "y", 0))) == str(pairs.output) == "x/quant/dequant:0"
    assert str(rewritten.main.source_of(Use("", "z", 0))) == "x:0"
    assert str(model.main.source_of(Use("", "y", 0))) == "x:0"
    assert not pairs.folded
    assert {op.rule for op in rewritten.main.ops()} == {"", "r"}
    y, z = run(rewritten, x=np.array([0.3, -9.0], np.float32))
    assert y.tolist() == [-0.5, 9.0]
    assert z.tolist() == [np.float32(0.3), 0.0]


def test_sites_without_params_are_ignored(tmp_path):
    """What the solver skipped is not inserted, and does not count for names."""
    model = load(tmp_path, FAN)
    _, pairs = rewrite(model, plan(site("x", ("y", 0)), site("x", ("z", 0))), {1: scale(0.5)})
    assert [str(item.output) for item in pairs] == ["x/quant/dequant:0"]
    assert rewrite(model, plan(site("x", ("y", 0))), {})[1] == []


def test_names(tmp_path):
    """The rule where a tensor has several sites, the port where it is not 0, the smallest free number where taken."""
    text = """g (float[4] x) => (float[2] y, float[2] z, float[2] v, float[4] w) {
        a, b = Split (x)
        y = Neg (b)
        z = Relu (b)
        v = Neg (a)
        ["a/quant"] w = Abs (x)
    }"""
    model = load(tmp_path, text)
    split = model.main.source_of(Use("", "y", 0)).op
    first, second = TensorRef("", split, 0), TensorRef("", split, 1)
    sites = (
        site(first, ("v", 0)),
        site(second, ("y", 0)),
        site(second, ("z", 0), rule="other"),
        site("x", (split, 0)),
        site("x", ("a/quant", 0)),
    )
    rewritten, pairs = rewrite(model, plan(*sites), dict.fromkeys(range(5), scale(0.5)))
    assert [item.output.op for item in pairs] == [
        "a/quant_1/dequant",
        "a/quant_1/r/dequant",
        "a/quant_1/other/dequant",
        "x/quant/r/dequant",
        "x/quant/r_1/dequant",
    ]
    assert len(run(rewritten, x=np.ones(4, np.float32))) == 4


def test_graph_outputs_keep_their_names(tmp_path):
    """An output that is quantized is still called as before."""
    model = load(tmp_path, FAN)
    rewritten, _ = rewrite(model, plan(site("y", ("@y", 0))), {0: scale(0.5)})
    assert [output.name for output in onnx_format.emit(rewritten).graph.output] == ["y", "z"]
    assert run(rewritten, x=np.array([-9.0, 0.3], np.float32))[0].tolist() == [9.0, -0.5]


CONV = "g (float[1,3,4,4] x) => (float[1,4,4,4] y, float[1,4,4,4] z) { y = Conv(x, w)\n z = Conv(x, OTHER) }"
WEIGHT = RNG.normal(size=(4, 3, 1, 1)).astype(np.float32)
X = RNG.normal(size=(1, 3, 4, 4)).astype(np.float32)


def per_channel(value, axis=0):
    """Symmetric narrow params of each channel of `value`."""
    over = tuple(k for k in range(value.ndim) if k != axis)
    return choose_qparams(Range(value.min(over), value.max(over)), INT8, symmetric=True, narrow=True, axis=axis)


@pytest.mark.parametrize("other", ["w", "u"])
def test_folded_weights(tmp_path, other):
    """The integers are stored, and the float constant is gone if and only if nobody else reads it."""
    model = load(tmp_path, CONV.replace("OTHER", other), w=WEIGHT, u=WEIGHT)
    params = per_channel(WEIGHT)
    rewritten, (pairs,) = rewrite(model, plan(site("w", ("y", 1), scheme=CHANNEL, axis=0, parameter=True)), {0: params})
    assert pairs.folded
    stored = {item.name: onnx.numpy_helper.to_array(item) for item in onnx_format.emit(rewritten).graph.initializer}
    assert ("w" in stored) == (other == "w")
    assert stored["w/quant/int8"].dtype == np.int8
    assert np.array_equal(stored["w/quant/int8"], quantize(WEIGHT, params))
    changed = load(tmp_path, CONV.replace("OTHER", other), w=dequantize(quantize(WEIGHT, params), params), u=WEIGHT)
    assert np.array_equal(run(rewritten, x=X)[0], run(changed, x=X)[0])
    assert np.array_equal(run(rewritten, x=X)[1], run(model, x=X)[1])


def test_float_weights(tmp_path):
    """With float weights the constant stays and is quantized by a whole pair, with the same outputs."""
    model = load(tmp_path, CONV.replace("OTHER", "w"), w=WEIGHT)
    made_plan = plan(site("w", ("y", 1), ("z", 1), scheme=CHANNEL, axis=0, parameter=True))
    folded, _ = rewrite(model, made_plan, {0: per_channel(WEIGHT)})
    float_weight_model, (pairs,) = rewrite(model, made_plan, {0: per_channel(WEIGHT)}, float_weights=True)
    assert (pairs.folded, "w" in float_weight_model.main, "w" in folded.main) == (False, True, False)
    assert [op.type for op in float_weight_model.main.ops() if op.rule] == [
        "Constant",
        "Constant",
        "QuantizeLinear",
        "DequantizeLinear",
    ]
    assert all(
        np.array_equal(first, second)
        for first, second in zip(run(folded, x=X), run(float_weight_model, x=X), strict=True)
    )


def test_weights_behind_identities(tmp_path):
    """A chain from the constant goes with it, unless the constant is read elsewhere."""
    text = "g (float[1,3,4,4] x) => (float[1,4,4,4] y) { i = Identity(w)\n j = Identity(i)\n y = Conv(x, j) }"
    model = load(tmp_path, text, w=WEIGHT)
    rewritten, _ = rewrite(
        model, plan(site("j", ("y", 1), scheme=CHANNEL, axis=0, parameter=True)), {0: per_channel(WEIGHT)}
    )
    assert [op.name for op in rewritten.main.ops() if not op.rule] == ["x", "y", "@y"]


def test_biases_are_stored_as_int32(tmp_path):
    """A bias is an int32 constant; at run time nothing quantizes to int32, which is refused."""
    model = load(
        tmp_path,
        "g (float[1,4] x) => (float[1,4] y) { y = Gemm(x, w, b) }",
        w=np.eye(4, dtype=np.float32),
        b=np.arange(4, dtype=np.float32),
    )
    bias = site("b", ("y", 2), scheme=replace(SCHEME, dtype="int32"), parameter=True)
    params = {0: scale(0.25, dtype=IntType(32, signed=True))}
    rewritten, _ = rewrite(model, plan(bias), params)
    assert Parameters(rewritten).value(TensorRef("", "b/quant/int32")).tolist() == [0, 4, 8, 12]
    assert run(rewritten, x=np.zeros((1, 4), np.float32))[0].tolist() == [[0.0, 1.0, 2.0, 3.0]]
    with pytest.raises(UsageError, match="int32 at run time, as b:0 would need"):
        rewrite(model, plan(bias), params, float_weights=True)


values = st.lists(st.floats(-300, 300, width=32), min_size=1, max_size=20)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(
    values,
    st.floats(0.0078125, 4, width=32),
    st.integers(-8, 7),
    st.sampled_from([8, 7, 5, 4]),
    st.booleans(),
    st.booleans(),
)
def test_one_op_equals_the_reference_bit_for_bit(tmp_path, x, step, zero, bits, signed, narrow):
    """Onnxruntime gives what quantize and dequantize give, also for types narrower than their container."""
    kind = IntType(bits, signed)
    low, high = kind.limits(narrow=narrow)
    params = scale(step, min(max(zero, low), high), kind, narrow=narrow)
    if kind.container not in {"int8", "uint8"}:
        return
    scheme = replace(SCHEME, dtype=kind.name, narrow=narrow, zero="asymmetric")
    model = load(tmp_path, "g (float[N] x) => (float[N] y) { y = Identity(x) }")
    rewritten, _ = rewrite(model, plan(site("x", ("y", 0), scheme=scheme)), {0: params})
    data = np.array(x, np.float32)
    assert np.array_equal(run(rewritten, x=data)[0], dequantize(quantize(data, params), params))


def test_narrow_activations_per_channel(tmp_path):
    """What the type leaves out of its container is clipped, for each channel by itself."""
    model = load(tmp_path, "g (float[N,3] x) => (float[N,3] y) { y = Identity(x) }")
    params = qparams_from_scale(np.array([0.5, 1.0, 2.0], np.float32), np.zeros(3, np.int32), INT8, narrow=True, axis=1)
    rewritten, _ = rewrite(model, plan(site("x", ("y", 0), scheme=CHANNEL, axis=1)), {0: params})
    assert run(rewritten, x=np.full((2, 3), -1e6, np.float32))[0].tolist() == [[-63.5, -127.0, -254.0]] * 2
    assert [op.name for op in rewritten.main.ops() if op.rule][2:4] == ["x/quant/low", "x/quant/clip_low"]


BRANCH = """
g (bool p, float[2] x) => (float[2] y)
{
    t = Identity (x)
    y = If (p) <
        then_branch = th () => (float[2] a) { a = Relu (t) },
        else_branch = el () => (float[2] b) { b = Neg (t) }
    >
}
"""
THEN, ELSE = Use("y/then_branch", "a", 0), Use("y/else_branch", "b", 0)


@pytest.mark.parametrize(("graph", "then"), [("", [0.5, 0.0]), ("y/else_branch", [0.4375, 0.0])])
def test_captured_tensors(tmp_path, graph, then):
    """It is quantized beside the producer or in the body, and dequantized in the body with constants of the body."""
    model = load(tmp_path, BRANCH)
    uses = (THEN, ELSE) if not graph else (ELSE,)
    rewritten, (pairs,) = rewrite(model, plan(site("t", *uses, graph=graph)), {0: scale(0.5)})
    assert pairs.output == rewritten.graphs[uses[0].graph].source_of(uses[0])
    kinds = {name: [op.kind for op in inner.ops() if op.rule] for name, inner in rewritten.graphs.items()}
    pair = ["constant", "constant", "quantize", "dequantize"]
    assert kinds == (
        {"": pair[:3], "y/then_branch": [*pair[:2], "dequantize"], "y/else_branch": [*pair[:2], "dequantize"]}
        if not graph
        else {"": [], "y/then_branch": [], "y/else_branch": pair}
    )
    feeds = {"x": np.array([0.4375, -0.4375], np.float32)}
    assert run(rewritten, p=np.array(True), **feeds)[0].tolist() == then
    assert run(rewritten, p=np.array(False), **feeds)[0].tolist() == [-0.5, 0.5]


PRODUCT = """
g (bool p, float[2,4] x) => (float[2,4] y)
{
    t = Identity (x)
    y = If (p) <
        then_branch = th () => (float[2,4] a) { a = MatMul (t, w) },
        else_branch = el () => (float[2,4] b) { b = MatMul (t, w) }
    >
}
"""


@pytest.mark.parametrize("float_weights", [False, True])
@pytest.mark.parametrize("fed", ["y/then_branch", "y/else_branch", ""])
def test_weights_of_bodies(tmp_path, fed, float_weights):
    """A weight is quantized in each body that reads it, with scales of that body; onnxruntime rejects all else."""
    weight = np.arange(-8, 8, dtype=np.float32).reshape(4, 4)
    model = load(tmp_path, PRODUCT, w=weight)
    branches = {"y/then_branch": "a", "y/else_branch": "b"}
    uses = [Use(name, op, 1) for name, op in branches.items()]
    inputs = [site("t", Use(fed, branches[fed], 0), scheme=ACTIVATION)] if fed else []
    rewritten, _ = rewrite(
        model,
        plan(site("w", *uses, parameter=True), *inputs),
        {0: scale(1.0), 1: scale(0.5, 128, UINT8)},
        float_weights=float_weights,
    )
    for name, op in branches.items():
        dequantized = rewritten.graphs[name].source_of(Use(name, op, 1))
        sources = [dequantized, *rewritten.graphs[name].slots(dequantized.op)]
        assert {source.graph for source in sources} == {name}
    assert ("w" in rewritten.main) == float_weights
    feed = {"x": np.full((2, 4), 0.5, np.float32)}
    for branch in (True, False):
        assert np.array_equal(run(rewritten, "ORT_ENABLE_ALL", p=np.array(branch), **feed)[0], feed["x"] @ weight)


def test_the_source_is_never_changed(tmp_path):
    """Rewriting works on a copy, and twice the same gives the same bytes."""
    model = load(tmp_path, CONV.replace("OTHER", "w"), w=WEIGHT)
    before = onnx_format.emit(model)
    made_plan = plan(
        site("w", ("y", 1), ("z", 1), scheme=CHANNEL, axis=0, parameter=True), site("x", ("y", 0), scheme=ACTIVATION)
    )
    params = {0: per_channel(WEIGHT), 1: scale(0.5, 128, UINT8)}
    first, second = rewrite(model, made_plan, params)[0], rewrite(model, made_plan, params)[0]
    assert onnx_format.emit(model) == before
    assert onnx_format.emit(first).SerializeToString(deterministic=True) == onnx_format.emit(second).SerializeToString(
        deterministic=True
    )


def test_channels_that_do_not_fit(tmp_path):
    """Params of another number of channels than the tensor has are refused with its name."""
    model = load(tmp_path, CONV.replace("OTHER", "w"), w=WEIGHT)
    wrong = qparams_from_scale(np.ones(3, np.float32), np.zeros(3, np.int32), INT8, axis=0)
    with pytest.raises(UsageError, match=r"w:0 3 channels on axis 0, but its shape is \(4, 3, 1, 1\)"):
        rewrite(model, plan(site("w", ("y", 1), scheme=CHANNEL, axis=0, parameter=True)), {0: wrong})


def folded(model):
    """The integers of weights, as they are read."""
    return [op.read_value() for op in model.main.ops() if op.kind == "constant" and op.name.endswith("int8")]


def test_a_weight_is_read_when_its_integers_are(tmp_path, monkeypatch):
    """Rewriting reads no weight and no activation; integers are made whenever they are read, or once and kept."""
    calls = []
    real = Parameters.value
    monkeypatch.setattr(Parameters, "value", lambda self, tensor: calls.append(tensor.op) or real(self, tensor))
    model = load(tmp_path, CONV.replace("OTHER", "u"), w=WEIGHT, u=WEIGHT)
    sites = [site(name, (op, 1), scheme=CHANNEL, axis=0, parameter=True) for name, op in (("w", "y"), ("u", "z"))]
    params = {0: per_channel(WEIGHT), 1: per_channel(2 * WEIGHT), 2: scale(1.0)}
    rewritten, _ = rewrite(model, plan(*sites, site("x", ("y", 0))), params)
    assert calls == []
    first, second = folded(rewritten), folded(rewritten)
    assert calls == ["w", "u", "w", "u"]
    folds = IntegerCache()
    cached_integers = [folded(rewrite(model, plan(*sites), params, integer_cache=folds)[0]) for _ in range(2)]
    assert calls == ["w", "u", "w", "u", "w", "u"]
    assert [value.tolist() for value in cached_integers[1]] == [value.tolist() for value in first]
    assert second[0].tolist() != second[1].tolist()


FRAME = """
node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } }
       attr { key: "shape" value { shape { dim { size: 2 } } } } }
node { name: "p" op: "Placeholder" attr { key: "dtype" value { type: DT_BOOL } }
       attr { key: "shape" value { shape { } } } }
node { name: "s" op: "Switch" input: "x" input: "p" attr { key: "T" value { type: DT_FLOAT } } }
node { name: "a" op: "Relu" input: "s:1" attr { key: "T" value { type: DT_FLOAT } } }
node { name: "y" op: "Neg" input: "x" attr { key: "T" value { type: DT_FLOAT } } }
versions { producer: 1000 }
"""


def frame(tmp_path):
    """A TF1 switch, and an op beside it."""
    (tmp_path / "model.pbtxt").write_text(FRAME)
    return tf_load(tmp_path / "model.pbtxt")


def test_constants_in_tf1_frames_wait_for_the_tensor(tmp_path):
    """Where a graph has frames, the constants of a FakeQuant have a control input from what is quantized."""
    scheme = replace(SCHEME, family="fake-quant", narrow=True)
    rewritten, (pairs,) = rewrite(
        frame(tmp_path),
        plan(site(TensorRef("", "s", 1), ("a", 0), scheme=scheme), kind="tensorflow"),
        {0: scale(0.5, narrow=True)},
    )
    assert pairs.output == TensorRef("", "s/quant_1")
    nodes = {node.name: node for node in tf_emit(rewritten).node}
    assert list(nodes["s/quant_1"].input) == ["s:1", "s/quant_1/min", "s/quant_1/max"]
    assert list(nodes["s/quant_1/min"].input) == list(nodes["s/quant_1/max"].input) == ["^s"]
    assert list(nodes["a"].input) == ["s/quant_1"]
    parameters = Parameters(rewritten)
    assert [parameters.value(TensorRef("", f"s/quant_1/{end}")).tolist() for end in ("min", "max")] == [-63.5, 63.5]
    assert (nodes["s/quant_1"].attr["num_bits"].i, nodes["s/quant_1"].attr["narrow_range"].b) == (8, True)


def test_unsigned_narrow_is_not_narrow_for_tensorflow(tmp_path):
    """Narrow leaves out the most negative value of a signed type only; TensorFlow would leave out one of any."""
    scheme = replace(SCHEME, dtype="uint8", family="fake-quant", narrow=True)
    rewritten, _ = rewrite(
        frame(tmp_path),
        plan(site("x", ("y", 0), scheme=scheme), kind="tensorflow"),
        {0: scale(0.5, 0, UINT8, narrow=True)},
    )
    assert rewritten.main.op("x/quant").attrs["narrow_range"] is False
    assert Parameters(rewritten).value(TensorRef("", "x/quant/max")).tolist() == 127.5

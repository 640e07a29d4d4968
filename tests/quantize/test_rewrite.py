"""Plans to graphs: names, reroutes, folding, bodies, frames; and what onnxruntime makes of the result."""

import re
from dataclasses import replace

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.onnx_models import CAPTURED_TENSOR, load_onnx, run_onnx, run_unoptimized
from support.plans import make_plan
from support.qparams import choose_qparams

from graphquant.errors import UsageError
from graphquant.formats import onnx as onnx_format
from graphquant.formats.tensorflow import emit as tf_emit
from graphquant.formats.tensorflow import load as tf_load
from graphquant.ir import Parameters, TensorRef, Use
from graphquant.ir.op_matching import is_barrier
from graphquant.numerics import IntType, Range, dequantize, qparams_from_scale, quantize
from graphquant.quantize import Site
from graphquant.quantize.rewrite import IntegerCache, rewrite
from graphquant.quantize.strip import strip_quantization
from graphquant.rules import Scheme

INT8, UINT8 = IntType(8, signed=True), IntType(8, signed=False)
SCHEME = Scheme(name="q", dtype="int8", family="onnx-qdq")
ACTIVATION = replace(SCHEME, dtype="uint8", zero="asymmetric")
CHANNEL = replace(SCHEME, per="channel", narrow=True)
RNG = np.random.default_rng(3)


def site_for_uses(tensor, *uses, **changes):
    """A site of a tensor for uses, each an op and slot of the main graph or a `Use`."""
    ref = tensor if isinstance(tensor, TensorRef) else TensorRef("", tensor)
    listed = tuple(use if isinstance(use, Use) else Use("", *use) for use in uses)
    return Site(**{"tensor": ref, "uses": listed, "graph": ref.graph, "scheme": SCHEME, "rule": "r", **changes})


def scale(value, zero=0, dtype=INT8, **more):
    """Params of one scale."""
    return qparams_from_scale(np.float32(value), np.int32(zero), dtype, **more)


def ops_as_text(model, graph=""):
    """Name, type and inputs of every op that was made, as text."""
    home = model.graphs[graph]
    built = [op for op in home.ops() if op.rule]
    return [f"{op.name} = {op.type}({', '.join(map(str, home.slots(op.name)))})" for op in built]


FAN = "g (float[2] x) => (float[2] y, float[2] z) { y = Neg(x)\n z = Relu(x) }"


def test_exactly_the_planned_uses_are_rerouted(tmp_path):
    """The planned use reads the dequantized tensor, the other still the float one; the source is not touched."""
    model = load_onnx(tmp_path, FAN)
    rewritten, (pairs,) = rewrite(model, make_plan(site_for_uses("x", ("y", 0))), {0: scale(0.5)})
    assert ops_as_text(rewritten) == [
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
    y, z = run_unoptimized(rewritten, {"x": np.array([0.3, -9.0], np.float32)})
    assert y.tolist() == [-0.5, 9.0]
    assert z.tolist() == [np.float32(0.3), 0.0]


def test_sites_without_params_are_ignored(tmp_path):
    """Sites that the solver skipped are not inserted, and do not count for names."""
    model = load_onnx(tmp_path, FAN)
    _, pairs = rewrite(model, make_plan(site_for_uses("x", ("y", 0)), site_for_uses("x", ("z", 0))), {1: scale(0.5)})
    assert [str(item.output) for item in pairs] == ["x/quant/dequant:0"]
    assert rewrite(model, make_plan(site_for_uses("x", ("y", 0))), {})[1] == []


def test_names(tmp_path):
    """The rule where a tensor has several sites, the port where it is not 0, the smallest free number where taken."""
    text = """g (float[4] x) => (float[2] y, float[2] z, float[2] v, float[4] w) {
        a, b = Split (x)
        y = Neg (b)
        z = Relu (b)
        v = Neg (a)
        ["a/quant"] w = Abs (x)
    }"""
    model = load_onnx(tmp_path, text)
    split = model.main.source_of(Use("", "y", 0)).op
    first, second = TensorRef("", split, 0), TensorRef("", split, 1)
    sites = (
        site_for_uses(first, ("v", 0)),
        site_for_uses(second, ("y", 0)),
        site_for_uses(second, ("z", 0), rule="other"),
        site_for_uses("x", (split, 0)),
        site_for_uses("x", ("a/quant", 0)),
    )
    rewritten, pairs = rewrite(model, make_plan(*sites), dict.fromkeys(range(5), scale(0.5)))
    assert [item.output.op for item in pairs] == [
        "a/quant_1/dequant",
        "a/quant_1/r/dequant",
        "a/quant_1/other/dequant",
        "x/quant/r/dequant",
        "x/quant/r_1/dequant",
    ]
    assert len(run_unoptimized(rewritten, {"x": np.ones(4, np.float32)})) == 4


def test_graph_outputs_keep_their_names(tmp_path):
    """An output that is quantized is still called as before."""
    model = load_onnx(tmp_path, FAN)
    rewritten, _ = rewrite(model, make_plan(site_for_uses("y", ("@y", 0))), {0: scale(0.5)})
    assert [output.name for output in onnx_format.emit(rewritten).graph.output] == ["y", "z"]
    assert run_unoptimized(rewritten, {"x": np.array([-9.0, 0.3], np.float32)})[0].tolist() == [9.0, -0.5]


CONV = "g (float[1,3,4,4] x) => (float[1,4,4,4] y, float[1,4,4,4] z) { y = Conv(x, w)\n z = Conv(x, OTHER) }"
WEIGHT = RNG.normal(size=(4, 3, 1, 1)).astype(np.float32)
X = RNG.normal(size=(1, 3, 4, 4)).astype(np.float32)


def params_of_channels(value, axis=0):
    """Symmetric narrow params of each channel of `value`."""
    over = tuple(k for k in range(value.ndim) if k != axis)
    return choose_qparams(Range(value.min(over), value.max(over)), INT8, symmetric=True, narrow=True, axis=axis)


@pytest.mark.parametrize("other", ["w", "u"])
def test_folded_weights(tmp_path, other):
    """The integers are stored, and the float constant is gone if and only if nobody else reads it."""
    model = load_onnx(tmp_path, CONV.replace("OTHER", other), {"w": WEIGHT, "u": WEIGHT})
    params = params_of_channels(WEIGHT)
    rewritten, (pairs,) = rewrite(
        model, make_plan(site_for_uses("w", ("y", 1), scheme=CHANNEL, axis=0, parameter=True)), {0: params}
    )
    assert pairs.folded
    stored = {item.name: onnx.numpy_helper.to_array(item) for item in onnx_format.emit(rewritten).graph.initializer}
    assert ("w" in stored) == (other == "w")
    assert stored["w/quant/int8"].dtype == np.int8
    assert np.array_equal(stored["w/quant/int8"], quantize(WEIGHT, params))
    changed = load_onnx(
        tmp_path, CONV.replace("OTHER", other), {"w": dequantize(quantize(WEIGHT, params), params), "u": WEIGHT}
    )
    assert np.array_equal(run_unoptimized(rewritten, {"x": X})[0], run_unoptimized(changed, {"x": X})[0])
    assert np.array_equal(run_unoptimized(rewritten, {"x": X})[1], run_unoptimized(model, {"x": X})[1])


def test_float_weights(tmp_path):
    """With float weights the constant stays and is quantized by a whole pair, with the same outputs."""
    model = load_onnx(tmp_path, CONV.replace("OTHER", "w"), {"w": WEIGHT})
    made_plan = make_plan(site_for_uses("w", ("y", 1), ("z", 1), scheme=CHANNEL, axis=0, parameter=True))
    folded, _ = rewrite(model, made_plan, {0: params_of_channels(WEIGHT)})
    float_weight_model, (pairs,) = rewrite(model, made_plan, {0: params_of_channels(WEIGHT)}, float_weights=True)
    assert (pairs.folded, "w" in float_weight_model.main, "w" in folded.main) == (False, True, False)
    assert [op.type for op in float_weight_model.main.ops() if op.rule] == [
        "Constant",
        "Constant",
        "QuantizeLinear",
        "DequantizeLinear",
    ]
    assert all(
        np.array_equal(first, second)
        for first, second in zip(
            run_unoptimized(folded, {"x": X}), run_unoptimized(float_weight_model, {"x": X}), strict=True
        )
    )


def test_weights_behind_identities(tmp_path):
    """A chain from the constant goes with it, unless the constant is read elsewhere."""
    text = "g (float[1,3,4,4] x) => (float[1,4,4,4] y) { i = Identity(w)\n j = Identity(i)\n y = Conv(x, j) }"
    model = load_onnx(tmp_path, text, {"w": WEIGHT})
    rewritten, _ = rewrite(
        model,
        make_plan(site_for_uses("j", ("y", 1), scheme=CHANNEL, axis=0, parameter=True)),
        {0: params_of_channels(WEIGHT)},
    )
    assert [op.name for op in rewritten.main.ops() if not op.rule] == ["x", "y", "@y"]


def test_biases_are_stored_as_int32(tmp_path):
    """A bias is an int32 constant; at run time nothing quantizes to int32, which is refused."""
    model = load_onnx(
        tmp_path,
        "g (float[1,4] x) => (float[1,4] y) { y = Gemm(x, w, b) }",
        {"w": np.eye(4, dtype=np.float32), "b": np.arange(4, dtype=np.float32)},
    )
    bias = site_for_uses("b", ("y", 2), scheme=replace(SCHEME, dtype="int32"), parameter=True)
    params = {0: scale(0.25, dtype=IntType(32, signed=True))}
    rewritten, _ = rewrite(model, make_plan(bias), params)
    assert Parameters(rewritten).value(TensorRef("", "b/quant/int32")).tolist() == [0, 4, 8, 12]
    assert run_unoptimized(rewritten, {"x": np.zeros((1, 4), np.float32)})[0].tolist() == [[0.0, 1.0, 2.0, 3.0]]
    with pytest.raises(UsageError, match=r"int32 .*run time,.* b:0"):
        rewrite(model, make_plan(bias), params, float_weights=True)


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
    model = load_onnx(tmp_path, "g (float[N] x) => (float[N] y) { y = Identity(x) }")
    rewritten, _ = rewrite(model, make_plan(site_for_uses("x", ("y", 0), scheme=scheme)), {0: params})
    data = np.array(x, np.float32)
    assert np.array_equal(run_unoptimized(rewritten, {"x": data})[0], dequantize(quantize(data, params), params))


def test_narrow_activations_per_channel(tmp_path):
    """Integers of the container that the type does not have are clipped, for each channel by itself."""
    model = load_onnx(tmp_path, "g (float[N,3] x) => (float[N,3] y) { y = Identity(x) }")
    params = qparams_from_scale(np.array([0.5, 1.0, 2.0], np.float32), np.zeros(3, np.int32), INT8, narrow=True, axis=1)
    rewritten, _ = rewrite(model, make_plan(site_for_uses("x", ("y", 0), scheme=CHANNEL, axis=1)), {0: params})
    assert (
        run_unoptimized(rewritten, {"x": np.full((2, 3), -1e6, np.float32)})[0].tolist()
        == [[-63.5, -127.0, -254.0]] * 2
    )
    assert [op.name for op in rewritten.main.ops() if op.rule][2:4] == ["x/quant/low", "x/quant/clip_low"]


BRANCH = CAPTURED_TENSOR.replace("Tanh", "Identity")
THEN, ELSE = Use("y/then_branch", "a", 0), Use("y/else_branch", "b", 0)


@pytest.mark.parametrize(("graph", "then"), [("", [0.5, 0.0]), ("y/else_branch", [0.4375, 0.0])])
def test_captured_tensors(tmp_path, graph, then):
    """It is quantized beside the producer or in the body, and dequantized in the body with constants of the body."""
    model = load_onnx(tmp_path, BRANCH)
    uses = (THEN, ELSE) if not graph else (ELSE,)
    rewritten, (pairs,) = rewrite(model, make_plan(site_for_uses("t", *uses, graph=graph)), {0: scale(0.5)})
    assert pairs.output == rewritten.graphs[uses[0].graph].source_of(uses[0])
    kinds = {name: [op.kind for op in inner.ops() if op.rule] for name, inner in rewritten.graphs.items()}
    pair = ["constant", "constant", "quantize", "dequantize"]
    assert kinds == (
        {"": pair[:3], "y/then_branch": [*pair[:2], "dequantize"], "y/else_branch": [*pair[:2], "dequantize"]}
        if not graph
        else {"": [], "y/then_branch": [], "y/else_branch": pair}
    )
    feeds = {"x": np.array([0.4375, -0.4375], np.float32)}
    assert run_unoptimized(rewritten, {"p": np.array(True), **feeds})[0].tolist() == then
    assert run_unoptimized(rewritten, {"p": np.array(False), **feeds})[0].tolist() == [-0.5, 0.5]


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
    model = load_onnx(tmp_path, PRODUCT, {"w": weight})
    branches = {"y/then_branch": "a", "y/else_branch": "b"}
    uses = [Use(name, op, 1) for name, op in branches.items()]
    inputs = [site_for_uses("t", Use(fed, branches[fed], 0), scheme=ACTIVATION)] if fed else []
    rewritten, _ = rewrite(
        model,
        make_plan(site_for_uses("w", *uses, parameter=True), *inputs),
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
        assert np.array_equal(run_onnx(rewritten, {"p": np.array(branch), **feed}, check=True)[0], feed["x"] @ weight)


def test_the_source_is_never_changed(tmp_path):
    """Rewriting works on a copy, and twice the same gives the same bytes."""
    model = load_onnx(tmp_path, CONV.replace("OTHER", "w"), {"w": WEIGHT})
    before = onnx_format.emit(model)
    made_plan = make_plan(
        site_for_uses("w", ("y", 1), ("z", 1), scheme=CHANNEL, axis=0, parameter=True),
        site_for_uses("x", ("y", 0), scheme=ACTIVATION),
    )
    params = {0: params_of_channels(WEIGHT), 1: scale(0.5, 128, UINT8)}
    first, second = rewrite(model, made_plan, params)[0], rewrite(model, made_plan, params)[0]
    assert onnx_format.emit(model) == before
    assert onnx_format.emit(first).SerializeToString(deterministic=True) == onnx_format.emit(second).SerializeToString(
        deterministic=True
    )


def test_channels_that_do_not_fit(tmp_path):
    """Params of another number of channels than the tensor has are refused with its name."""
    model = load_onnx(tmp_path, CONV.replace("OTHER", "w"), {"w": WEIGHT})
    wrong = qparams_from_scale(np.ones(3, np.float32), np.zeros(3, np.int32), INT8, axis=0)
    with pytest.raises(UsageError, match=r"w:0 3 channels .*axis 0,.* \(4, 3, 1, 1\)"):
        rewrite(model, make_plan(site_for_uses("w", ("y", 1), scheme=CHANNEL, axis=0, parameter=True)), {0: wrong})


def weight_integers(model):
    """The integers of weights, as they are read."""
    return [op.read_value() for op in model.main.ops() if op.kind == "constant" and op.name.endswith("int8")]


def test_a_weight_is_read_when_its_integers_are(tmp_path, monkeypatch):
    """Rewriting reads no weight and no activation; integers are made whenever they are read, or once and kept."""
    calls = []
    real = Parameters.value
    monkeypatch.setattr(Parameters, "value", lambda self, tensor: calls.append(tensor.op) or real(self, tensor))
    model = load_onnx(tmp_path, CONV.replace("OTHER", "u"), {"w": WEIGHT, "u": WEIGHT})
    sites = [
        site_for_uses(name, (op, 1), scheme=CHANNEL, axis=0, parameter=True) for name, op in (("w", "y"), ("u", "z"))
    ]
    params = {0: params_of_channels(WEIGHT), 1: params_of_channels(2 * WEIGHT), 2: scale(1.0)}
    rewritten, _ = rewrite(model, make_plan(*sites, site_for_uses("x", ("y", 0))), params)
    assert calls == []
    first, second = weight_integers(rewritten), weight_integers(rewritten)
    assert calls == ["w", "u", "w", "u"]
    folds = IntegerCache()
    cached_integers = [
        weight_integers(rewrite(model, make_plan(*sites), params, integer_cache=folds)[0]) for _ in range(2)
    ]
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
    """In a graph with frames, the constants of a FakeQuant have a control input from the quantized tensor."""
    scheme = replace(SCHEME, family="fake-quant", narrow=True)
    rewritten, (pairs,) = rewrite(
        frame(tmp_path),
        make_plan(site_for_uses(TensorRef("", "s", 1), ("a", 0), scheme=scheme), format="tensorflow"),
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
        make_plan(site_for_uses("x", ("y", 0), scheme=scheme), format="tensorflow"),
        {0: scale(0.5, 0, UINT8, narrow=True)},
    )
    assert rewritten.main.op("x/quant").attrs["narrow_range"] is False
    assert Parameters(rewritten).value(TensorRef("", "x/quant/max")).tolist() == 127.5


FLOAT_OPS = {
    "conv": "y = Conv(x, w, b)",
    "conv-without-bias": "y = Conv(x, w)",
    "conv-clip": "a = Conv(x, w, b)\n y = Clip(a, low)",
    "conv-batchnorm": "a = Conv(x, w)\n y = BatchNormalization(a, one, b, b, one)",
    "moves": "a = MaxPool<kernel_shape = [1, 1]>(x)\n c = Conv(a, w, b)\n y = Reshape(c, shape)",
    "pad": "a = Pad(x, pads)\n y = Conv(a, w, b)",
    "transposed": "y = ConvTranspose(x, w, b)",
    "gemm": "y = Gemm(x, m, b)",
    "matmul-add": "a = MatMul(x, m)\n y = Add(a, b)",
}
FLOAT_X = RNG.uniform(-1, 1, (1, 8, 4, 4)).astype(np.float32)
INT16 = replace(SCHEME, dtype="int16")


def float_op(tmp_path, text, targets=()):
    """An op with a weight of small and large channels, and a quantization before and after it, as a rewritten model."""
    size, weight = "16, 8" if "m," in text or "m)" in text else "1, 8, 4, 4", RNG.uniform(-1, 1, (8, 8, 1, 1))
    weight = (weight * np.logspace(-2, 0, 8)[:, None, None, None]).astype(np.float32)
    constants = {
        "w": weight,
        "m": weight[:, :, 0, 0],
        "b": RNG.uniform(-1, 1, 8).astype(np.float32),
        "one": np.ones(8, np.float32),
        "low": np.float32(-0.5),
        "shape": np.array([1, 8, 4, 4]),
        "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
    }
    constants = {name: value for name, value in constants.items() if re.search(rf"\b{name}\b", text.split("=", 1)[1])}
    model = load_onnx(tmp_path, f"g (float[{size}] x) => (float y) {{ {text}\n }}", {**constants})
    first, last = text.partition(" = ")[0], text.rpartition("\n ")[2].partition(" = ")[0]
    sites = site_for_uses("x", (first, 0)), site_for_uses(last, ("@y", 0), scheme=INT16)
    step = scale(2.0**-12, dtype=IntType(16, signed=True))
    return rewrite(model, replace(make_plan(*sites), targets=targets), {0: scale(1 / 127), 1: step})[
        0
    ], FLOAT_X.reshape([int(part) for part in size.split(", ")])


def barriers(model):
    """The ops that read a Clip without limits."""
    clips = [op.name for op in model.main.ops() if op.type == "Clip" and len(model.main.slots(op.name)) == 1]
    return [use.op for clip in clips for use in model.main.consumers(TensorRef("", clip))]


@pytest.mark.parametrize("text", FLOAT_OPS.values(), ids=FLOAT_OPS)
def test_float_weights_between_pairs_stay_float(tmp_path, text):
    """The optimizations of onnxruntime do not quantize the weight of an op that the plan keeps in float."""
    model, x = float_op(tmp_path, text)
    assert len(barriers(model)) == 1
    (optimized,), (expected,) = run_onnx(model, {"x": x}, check=True), run_unoptimized(model, {"x": x})
    np.testing.assert_allclose(optimized, expected, rtol=0, atol=2.0**-12)


def test_without_a_barrier_onnxruntime_quantizes_a_float_weight(tmp_path):
    """Plans for other backends have no barriers; the optimizations of onnxruntime then change the result."""
    model, x = float_op(tmp_path, FLOAT_OPS["conv"], targets=("qnn",))
    assert barriers(model) == []
    (optimized,), (expected,) = run_onnx(model, {"x": x}, check=True), run_unoptimized(model, {"x": x})
    assert np.abs(optimized - expected).max() > 4 * 2.0**-12


@pytest.mark.parametrize(
    "text",
    [
        "y = MatMul(x, m)",
        "a = Conv(x, w)\n y = Add(a, x)",
        "a = Relu(x)\n y = Conv(a, w)",
        "a = Conv(x, w, b)\n y = Sigmoid(a)",
    ],
)
def test_float_ops_that_stay_float_get_no_barrier(tmp_path, text):
    """ONNX Runtime does not quantize these, because another op or reader is between them and a pair."""
    model, x = float_op(tmp_path, text)
    assert barriers(model) == []
    (optimized,), (expected,) = run_onnx(model, {"x": x}, check=True), run_unoptimized(model, {"x": x})
    np.testing.assert_allclose(optimized, expected, rtol=0, atol=2.0**-12)


def test_quantized_weights_get_no_barrier(tmp_path):
    """An op with quantized weight runs on integers."""
    model = load_onnx(tmp_path, "g (float[1,3,4,4] x) => (float y) { y = Conv(x, w) }", {"w": WEIGHT})
    sites = (
        site_for_uses("x", ("y", 0)),
        site_for_uses("w", ("y", 1), scheme=CHANNEL, axis=0, parameter=True),
        site_for_uses("y", ("@y", 0)),
    )
    for float_weights in (False, True):
        params = {0: scale(0.02), 1: params_of_channels(WEIGHT), 2: scale(0.1)}
        rewritten, _ = rewrite(model, make_plan(*sites), params, float_weights=float_weights)
        assert barriers(rewritten) == []


def test_ops_without_a_weight_get_no_barrier(tmp_path):
    """An invalid convolution with a single input is left as it is."""
    model = load_onnx(tmp_path, "g (float[1,3,4,4] x) => (float y) { a = Relu(x) y = Conv(a) }")
    plan = replace(make_plan(site_for_uses("x", ("a", 0))), rules=("onnxruntime",))
    assert barriers(rewrite(model, plan, {0: scale(0.02)})[0]) == []


@pytest.mark.parametrize(("axes", "read"), [("2, 3", ["d", "m"]), ("2", []), ("3", []), ("1", []), ("1, 2, 3", [])])
def test_a_barrier_before_a_difference_from_a_mean_of_each_channel(tmp_path, axes, read):
    """A Reshape keeps the Transpose of int8 convolutions away from such ops; other readers use the tensor itself."""
    text = f"m = ReduceMean<axes = [{axes}]>(x)\n d = Sub(x, m)\n y = Mul(d, x)"
    model = load_onnx(tmp_path, f"g (float[1,3,4,4] x) => (float[1,3,4,4] y) {{ {text} }}")
    rewritten, _ = rewrite(model, make_plan(site_for_uses("x", ("m", 0), ("d", 0), ("y", 1))), {0: scale(0.02)})
    copies = [TensorRef("", op.name) for op in rewritten.main.ops() if op.type == "Reshape"]
    assert sorted(use.op for tensor in copies for use in rewritten.main.consumers(tensor)) == read
    assert all(is_barrier(rewritten.main, rewritten.op(tensor)) for tensor in copies)
    assert {op.name for op in strip_quantization(rewritten).model.main.ops()} == {op.name for op in model.main.ops()}
    (actual,), (expected,) = run_onnx(rewritten, {"x": X}, check=True), run_unoptimized(rewritten, {"x": X})
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


def test_no_barrier_before_a_mean_without_the_axes_that_it_reduces(tmp_path):
    """A mean of other axes may look like one of each channel: a Reshape by its axes would lose one of the tensor."""
    text = "m = ReduceMean<axes = [3], keepdims = 0>(x)\n d = Sub(x, m)\n y = Mul(d, x)"
    model = load_onnx(tmp_path, f"g (float[3,3,1,4] x) => (float[3,3,3,4] y) {{ {text} }}")
    rewritten, _ = rewrite(model, make_plan(site_for_uses("x", ("m", 0), ("d", 0), ("y", 1))), {0: scale(0.02)})
    assert not [op for op in rewritten.main.ops() if op.type == "Reshape"]


def test_one_barrier_for_all_readers_of_a_pair(tmp_path):
    """Float ops that read one dequantized tensor share a barrier, and other ops read the tensor itself."""
    text = "g (float[1,3,4,4] x) => (float y, float z) { y = Conv(x, w)\n z = Conv(x, w) }"
    model = load_onnx(tmp_path, text, {"w": WEIGHT})
    sites = site_for_uses("x", ("y", 0), ("z", 0)), site_for_uses("y", ("@y", 0)), site_for_uses("z", ("@z", 0))
    rewritten, _ = rewrite(model, make_plan(*sites), {k: scale(0.02) for k in range(3)})
    assert barriers(rewritten) == ["y", "z"]
    assert len([op for op in rewritten.main.ops() if op.type == "Clip"]) == 1

"""BatchNorm folding against onnxruntime and by hand, and BatchNorms in training mode."""

import base64
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from support.onnx_models import load_onnx, run_unoptimized
from support.original_weights import original_weights

import graphquant as gq
from graphquant.formats import onnx as onnx_format
from graphquant.formats.tensorflow import emit as tf_emit
from graphquant.formats.tensorflow import load as tf_load
from graphquant.formats.tensorflow import proto
from graphquant.ir import Parameters, TensorRef
from graphquant.quantize import find_skipped_steps, plan_from_json, plan_to_json, prepare
from graphquant.quantize.fold_batchnorm import VARIABLES_NOT_FOLDED
from graphquant.quantize.plan import Skip, SkipCode
from graphquant.quantize.prepare import NO_MOVING_STATISTICS, prepared_digest
from graphquant.visualize.tables import make_console
from graphquant.visualize.text import result_view

HEAD = '<ir_version: 8, opset_import: ["": 13]>\n'
RNG = np.random.default_rng(7)
FOLD = ("fold-batchnorm",)
INFERENCE = ("inference-batchnorm",)


def random_constants(**shapes):
    """Float32 constants of these shapes with fixed random values; "v" is positive."""
    built = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return {name: np.abs(value) + np.float32(0.1) if name == "v" else value for name, value in built.items()}


def load_image_net(tmp_path, text, values):
    """The model written as text (X and Y are images of 3 and 4 channels), with initializers for `values`."""
    text = text.replace("(X ", "(float[1,3,5,5] ").replace("Y ", "float[1,4,5,5] ")
    return load_onnx(tmp_path, text, values)


STATS = {"s": (4,), "o": (4,), "m": (4,), "v": (4,)}
CASES = {
    "conv": ("float[1,3,5,5]", "float[1,4,5,5]", "Conv (x, w)", {"w": (4, 3, 1, 1)}),
    "conv with bias": ("float[1,3,5,5]", "float[1,4,5,5]", "Conv (x, w, b)", {"w": (4, 3, 1, 1), "b": (4,)}),
    "grouped": ("float[1,6,5,5]", "float[1,4,5,5]", "Conv <group = 2> (x, w)", {"w": (4, 3, 1, 1)}),
    "depthwise": ("float[1,4,5,5]", "float[1,4,3,3]", "Conv <group = 4> (x, w, b)", {"w": (4, 1, 3, 3), "b": (4,)}),
    "multiplier": ("float[1,2,5,5]", "float[1,4,3,3]", "Conv <group = 2> (x, w)", {"w": (4, 1, 3, 3)}),
    "one axis": ("float[1,3,5]", "float[1,4,4]", "Conv (x, w)", {"w": (4, 3, 2)}),
    "transposed": ("float[1,3,5,5]", "float[1,4,7,7]", "ConvTranspose (x, w)", {"w": (3, 4, 3, 3)}),
    "transposed grouped": (
        "float[1,6,5,5]",
        "float[1,4,7,7]",
        "ConvTranspose <group = 2> (x, w, b)",
        {"w": (6, 2, 3, 3), "b": (4,)},
    ),
    "gemm": ("float[2,3]", "float[2,4]", "Gemm (x, w)", {"w": (3, 4)}),
    "gemm transB": ("float[2,3]", "float[2,4]", "Gemm <transB = 1> (x, w, b)", {"w": (4, 3), "b": (4,)}),
    "gemm with a row": ("float[2,3]", "float[2,4]", "Gemm (x, w, b)", {"w": (3, 4), "b": (1, 4)}),
    "matmul": ("float[2,3]", "float[2,4]", "MatMul (x, w)", {"w": (3, 4)}),
    "matmul and add": ("float[2,3]", "float[2,4]", "MatMul (x, w)\n d = Add (c, b)", {"w": (3, 4), "b": (4,)}),
    "add and matmul": ("float[2,3]", "float[2,4]", "MatMul (x, w)\n d = Add (b, c)", {"w": (3, 4), "b": (1, 4)}),
    "gemm with one bias": ("float[2,3]", "float[2,4]", "Gemm (x, w, b)", {"w": (3, 4), "b": (1,)}),
}


@pytest.mark.parametrize("case", CASES)
def test_folding_preserves_outputs(tmp_path, case):
    """The folded model has no BatchNorm, no constants of it, and the same outputs."""
    x, y, op, shapes = CASES[case]
    data = "d" if "Add" in op else "c"
    norm = f"n = BatchNormalization <epsilon = 0.01> ({data}, s, o, m, v)"
    text = f"g ({x} x) => ({y} y) {{ c = {op}\n {norm}\n y = Relu (n) }}"
    model = load_image_net(tmp_path, text, random_constants(**shapes, **STATS))
    folded, steps = prepare(model, FOLD)
    message = onnx_format.emit(folded)
    added = ["Add"] if op.startswith("MatMul") else []
    assert [node.op_type for node in message.graph.node] == [op.split()[0], *added, "Relu"]
    assert sorted(item.name for item in message.graph.initializer) == ["c/bias_folded", "c/weight_folded"]
    assert [(step.step, step.target, step.detail) for step in steps] == [("fold-batchnorm", "n", "folded into c")]
    feeds = {"x": RNG.normal(size=[int(d) for d in x[6:-1].split(",")]).astype(np.float32)}
    np.testing.assert_allclose(
        run_unoptimized(message, feeds)[0], run_unoptimized(model, feeds)[0], rtol=1e-5, atol=1e-5
    )


def test_the_formula(tmp_path):
    """Weight and bias are those of the paper, rounded to float32 once."""
    values = random_constants(w=(4, 3, 1, 1), b=(4,), **STATS)
    model = load_image_net(
        tmp_path,
        "g (X x) => (Y y) { c = Conv (x, w, b)\n y = BatchNormalization (c, s, o, m, v) }",
        values,
    )
    folded, _ = prepare(model, FOLD)
    parameters = Parameters(folded)
    wide = {name: value.astype(np.float64) for name, value in values.items()}
    epsilon = float(np.float32(1e-5))
    factor = wide["s"] / np.sqrt(wide["v"] + epsilon)
    weight = parameters.value(TensorRef("", "c/weight_folded"))
    np.testing.assert_allclose(weight, (wide["w"] * factor.reshape(4, 1, 1, 1)), rtol=1e-7)
    np.testing.assert_allclose(
        parameters.value(TensorRef("", "c/bias_folded")), (wide["b"] - wide["m"]) * factor + wide["o"], rtol=1e-6
    )
    assert weight.dtype == np.float32


@pytest.mark.parametrize(
    "text",
    [
        "g (X x) => (Y y, Y c) { c = Conv (x, w)\n y = BatchNormalization (c, s, o, m, v) }",
        "g (X x) => (Y y, Y z) { c = Conv (x, w)\n y = BatchNormalization (c, s, o, m, v)\n z = Relu (c) }",
        "g (X x, float[4] u) => (Y y) { c = Conv (x, w)\n y = BatchNormalization (c, s, o, m, u) }",
        "g (X x, float[4,3,1,1] u) => (Y y) { c = Conv (x, u)\n y = BatchNormalization (c, s, o, m, v) }",
        "g (X x, float[4] u) => (Y y) { c = Conv (x, w, u)\n y = BatchNormalization (c, s, o, m, v) }",
        "g (Y x) => (Y y) { c = Relu (x)\n y = BatchNormalization (c, s, o, m, v) }",
        "g (X x) => (Y y) { c = Conv (x, w)\n y = BatchNormalization (c, s, o, m, neg) }",
    ],
    ids=["output", "reader", "variance", "weight", "bias", "no conv", "negative variance"],
)
def test_skipped_batchnorms(tmp_path, text):
    """Another reader between them, or a value that is not constant or not finite: the model stays as it is."""
    values = {**random_constants(w=(4, 3, 1, 1), **STATS), "neg": np.full(4, -1.0, np.float32)}
    model = load_image_net(tmp_path, text, values)
    assert prepare(model, FOLD) == (model, ())


@pytest.mark.parametrize(
    "node",
    [
        "y, a, b = BatchNormalization <training_mode = 1> (c, s, o, m, v)",
        "y, a, b = BatchNormalization (c, s, o, m, v)",
    ],
)
def test_training_mode_and_other_outputs_in_use(tmp_path, node):
    """A BatchNorm that computes statistics, or whose other outputs are read, stays."""
    text = f"g (float[1,3,5,5] x) => (float[1,4,5,5] y, float[4] k) {{ c = Conv (x, w)\n {node}\n k = Neg (a) }}"
    message = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 14]>\n' + text)
    values = random_constants(w=(4, 3, 1, 1), **STATS)
    message.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in values.items())
    onnx.save(message, tmp_path / "model.onnx")
    model = onnx_format.load(tmp_path / "model.onnx")
    assert prepare(model, FOLD) == (model, ())


@pytest.mark.parametrize("attrs", ["alpha = 2.0", "beta = 0.5"])
def test_a_scaled_gemm_is_not_folded(tmp_path, attrs):
    """Alpha and beta would have to be folded too."""
    gemm = f"c = Gemm <{attrs}> (x, w, b)"
    text = f"g (float[2,3] x) => (float[2,4] y) {{ {gemm}\n y = BatchNormalization (c, s, o, m, v) }}"
    model = load_image_net(tmp_path, text, random_constants(w=(3, 4), b=(4,), **STATS))
    assert prepare(model, FOLD) == (model, ())


def test_a_bias_per_row_is_not_folded(tmp_path):
    """A Gemm's bias along the other axis has no channels."""
    text = "g (float[4,3] x) => (float[4,4] y) { c = Gemm (x, w, b)\n y = BatchNormalization (c, s, o, m, v) }"
    model = load_image_net(tmp_path, text, random_constants(w=(3, 4), b=(4, 1), **STATS))
    assert prepare(model, FOLD) == (model, ())


def test_shared_weights_stay_for_their_other_reader(tmp_path):
    """The folded conv has constants of its own; the other conv and its weight are not touched."""
    text = """g (float[1,3,5,5] x) => (float[1,4,5,5] y, float[1,4,5,5] z) {
        c = Conv (x, w, b)
        y = BatchNormalization (c, s, o, m, v)
        z = Conv (x, w, b)
    }"""
    values = random_constants(w=(4, 3, 1, 1), b=(4,), **STATS)
    model = load_image_net(tmp_path, text, values)
    folded, _ = prepare(model, FOLD)
    assert [str(slot) for slot in folded.main.slots("c")] == ["x:0", "c/weight_folded:0", "c/bias_folded:0"]
    assert [str(slot) for slot in folded.main.slots("z")] == ["x:0", "w:0", "b:0"]
    assert np.array_equal(Parameters(folded).value(TensorRef("", "w")), values["w"])
    feeds = {"x": RNG.normal(size=(1, 3, 5, 5)).astype(np.float32)}
    before, after = run_unoptimized(model, feeds), run_unoptimized(folded, feeds)
    np.testing.assert_allclose(after[0], before[0], rtol=1e-5, atol=1e-5)
    assert np.array_equal(after[1], before[1])
    assert [str(slot) for slot in model.main.slots("c")] == ["x:0", "w:0", "b:0"]


def test_two_in_a_row(tmp_path):
    """A second BatchNorm is folded into what the first left."""
    norms = "n = BatchNormalization (c, s, o, m, v)\n y = BatchNormalization (n, s, o, m, v)"
    text = f"g (X x) => (Y y) {{ c = Conv (x, w)\n {norms} }}"
    model = load_image_net(tmp_path, text, random_constants(w=(4, 3, 1, 1), **STATS))
    folded, steps = prepare(model, FOLD)
    feeds = {"x": RNG.normal(size=(1, 3, 5, 5)).astype(np.float32)}
    assert [step.target for step in steps] == ["n", "y"]
    message = onnx_format.emit(folded)
    assert len(message.graph.initializer) == 2
    np.testing.assert_allclose(
        run_unoptimized(message, feeds)[0], run_unoptimized(model, feeds)[0], rtol=1e-4, atol=1e-5
    )


def test_the_digest_is_the_same_each_time(tmp_path):
    """It follows from the source and the steps, and differs from the source's own."""
    text = "g (X x) => (Y y) { c = Conv (x, w)\n y = BatchNormalization (c, s, o, m, v) }"
    model = load_image_net(tmp_path, text, random_constants(w=(4, 3, 1, 1), **STATS))
    (entry, steps), (second, _) = prepare(model, FOLD), prepare(model, FOLD)
    assert entry.digest == second.digest == prepared_digest(model.digest, steps) != model.digest
    assert prepared_digest(model.digest, ()) == model.digest
    others = ("another model", steps), (model.digest, (replace(steps[0], target="another op"), *steps[1:]))
    assert len({entry.digest, *(prepared_digest(*other) for other in others)}) == 3
    assert onnx_format.emit(entry) == onnx_format.emit(second)


TF = """
node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } }
       attr { key: "shape" value { shape { dim { size: 1 } dim { size: 2 } dim { size: 2 } dim { size: 1 } } } } }
CONSTANTS
node { name: "wi" op: "Identity" input: "w" attr { key: "T" value { type: DT_FLOAT } } }
node { name: "c" op: "OP" input: "x" input: "wi" attr { key: "T" value { type: DT_FLOAT } }
       attr { key: "padding" value { s: "SAME" } } attr { key: "strides" value { list { i: 1 i: 1 i: 1 i: 1 } } } }
MIDDLE
node { name: "n" op: "FusedBatchNormV3" input: "DATA" input: "s" input: "o" input: "m" input: "v"
       attr { key: "T" value { type: DT_FLOAT } } attr { key: "U" value { type: DT_FLOAT } }
       attr { key: "epsilon" value { f: 0.25 } } attr { key: "is_training" value { b: TRAIN } } LAYOUT }
node { name: "y" op: "Relu" input: "n" attr { key: "T" value { type: DT_FLOAT } } CONTROL }
versions { producer: 1000 }
"""
BIAS_ADD = 'node { name: "b" op: "BiasAdd" input: "c" input: "bias" attr { key: "T" value { type: DT_FLOAT } } }'


def const(name, shape, values):
    """A Const node as text."""
    sizes = " ".join(f"dim {{ size: {size} }}" for size in shape)
    data = " ".join(f"float_val: {value}" for value in values)
    tensor = f"tensor {{ dtype: DT_FLOAT tensor_shape {{ {sizes} }} {data} }}"
    attrs = f'attr {{ key: "dtype" value {{ type: DT_FLOAT }} }} attr {{ key: "value" value {{ {tensor} }} }}'
    return f'node {{ name: "{name}" op: "Const" {attrs} }}'


def tensorflow(
    tmp_path, *, op="Conv2D", shape=(1, 1, 1, 2), bias=False, train="false", layout="", control="", moving=True
):
    """A conv, perhaps a BiasAdd, and a FusedBatchNorm with scale 3, offset 1, mean 2 and variance 0, if any."""
    stats = {"s": 3.0, "o": 1.0, "m": 2.0, "v": 0.0, **({"bias": 5.0} if bias else {})}
    values = {name: ((2,), (value, 2 * value)) for name, value in stats.items()} | {"w": (shape, (1.0, 10.0))}
    values |= {} if moving else {"m": ((0,), ()), "v": ((0,), ())}
    built = [const(name, *value) for name, value in values.items()]
    text = TF.replace("CONSTANTS", "\n".join(built)).replace("OP", op).replace("TRAIN", train).replace("LAYOUT", layout)
    text = (
        text.replace("MIDDLE", BIAS_ADD if bias else "")
        .replace("DATA", "b" if bias else "c")
        .replace("CONTROL", control)
    )
    (tmp_path / "model.pbtxt").write_text(text)
    return tf_load(tmp_path / "model.pbtxt")


@pytest.mark.parametrize(("op", "shape"), [("Conv2D", (1, 1, 1, 2)), ("DepthwiseConv2dNative", (1, 1, 1, 2))])
@pytest.mark.parametrize("bias", [False, True])
def test_tensorflow(tmp_path, op, shape, bias):
    """NHWC convs are folded, into the BiasAdd between them or into one that is added."""
    folded, (step,) = prepare(tensorflow(tmp_path, op=op, shape=shape, bias=bias), FOLD)
    graph = folded.main
    adder = "b" if bias else "n/bias_add"
    # Factors 3 / sqrt(0 + 0.25) and 6 / sqrt(0 + 0.25); biases 1 + (bias - 2) * 6 and 2 + (bias - 4) * 12.
    parameters = Parameters(folded)
    assert parameters.value(TensorRef("", "c/weight_folded")).reshape(-1).tolist() == [6.0, 120.0]
    assert parameters.value(TensorRef("", "c/bias_folded")).tolist() == ([19.0, 74.0] if bias else [-11.0, -46.0])
    assert [str(slot) for slot in graph.slots("y")] == [f"{adder}:0"]
    assert [str(slot) for slot in graph.slots(adder)] == ["c:0", "c/bias_folded:0"]
    nodes = {node.name: node for node in tf_emit(folded).node}
    assert sorted(nodes) == sorted(["x", "c", "c/weight_folded", "c/bias_folded", adder, "y"])
    assert list(nodes[adder].input) == ["c", "c/bias_folded"]
    gone = {item["op"]: item for item in step.undo["removed"]}
    assert proto.NodeDef.FromString(base64.b64decode(gone["n"]["node"])).name == "n"
    assert {"op": "c", "slot": 1, "read": {"op": "wi", "port": 0}} in step.undo["rewired"]
    ((position, (value, exact)),) = original_weights(step, lambda name: parameters.value(TensorRef("", name))).items()
    assert (position, value.reshape(-1).tolist(), exact) == (("", "w"), [1.0, 10.0], True)


@pytest.mark.parametrize("bias", [False, True])
def test_the_end_of_a_tensorflow_graph_keeps_its_name(tmp_path, monkeypatch, bias):
    """The last op of the graph is fetched by its name, so an Identity takes the BatchNorm's name."""
    monkeypatch.setitem(globals(), "TF", "\n".join(line for line in TF.splitlines() if '"Relu"' not in line))
    folded, _ = prepare(tensorflow(tmp_path, bias=bias), FOLD)
    nodes = {node.name: node for node in tf_emit(folded).node}
    assert (nodes["n"].op, list(nodes["n"].input)) == ("Identity", ["b" if bias else "n/bias_add"])


@pytest.mark.parametrize(
    "change",
    [
        {"train": "true"},
        {"layout": 'attr { key: "data_format" value { s: "NCHW" } }'},
        {"control": 'input: "^n"'},
        {"op": "_FusedConv2D"},
    ],
    ids=["training", "layouts differ", "control edge", "fused"],
)
def test_tensorflow_that_is_not_folded(tmp_path, change):
    """Training mode, different layouts, ops that wait for the BatchNorm, and fused convs are left."""
    model = tensorflow(tmp_path, **change)
    assert prepare(model, FOLD) == (model, ())


def test_training_mode_is_rewritten_on_request(tmp_path):
    """BatchNorms in training mode are reported; the step that takes them out of it leaves them to be folded."""
    model = tensorflow(tmp_path, train="true")
    (skipped,) = find_skipped_steps(model, FOLD)
    assert (skipped.step, str(skipped.tensor)) == ("inference-batchnorm", "n:0")
    assert "(is_training)" in skipped.reason
    assert 'prepare = ["inference-batchnorm"]' in skipped.reason
    changed, (step,) = prepare(model, INFERENCE)
    assert (step.target, step.detail) == ("n", "takes m:0 and v:0")
    (before,) = [node for node in tf_emit(model).node if node.name == "n"]
    (after,) = [node for node in tf_emit(changed).node if node.name == "n"]
    assert proto.NodeDef.FromString(base64.b64decode(step.undo["removed"][0]["node"])) == before
    assert (before.attr["is_training"].b, after.attr["is_training"].b) == (True, False)
    assert after.input == before.input
    assert find_skipped_steps(changed, INFERENCE) == ()
    folded, steps = prepare(model, FOLD + INFERENCE)
    assert [step.step for step in steps] == ["inference-batchnorm", "fold-batchnorm"]
    assert Parameters(folded).value(TensorRef("", "c/bias_folded")).tolist() == [-11.0, -46.0]


def test_training_mode_without_moving_statistics_is_skipped(tmp_path):
    """A BatchNorm without moving mean and variance cannot be rewritten, and a skip has that reason."""
    model = tensorflow(tmp_path, train="true", moving=False)
    assert prepare(model, INFERENCE) == (model, ())
    for requested in ((), INFERENCE):
        (skipped,) = find_skipped_steps(model, requested)
        assert skipped.reason.endswith("(is_training)" + NO_MOVING_STATISTICS)


def test_plan_lists_skipped_steps(tmp_path):
    """A plan's skips name BatchNorms in training mode, and a rule file with the step has them rewritten."""
    tensorflow(tmp_path, train="true")
    plan = gq.plan(tmp_path / "model.pbtxt", rules=["weight_only"])
    assert [(str(skip.tensor), skip.rule) for skip in plan.skips][:1] == [("n:0", "inference-batchnorm")]
    rules = tmp_path / "rules.toml"
    rules.write_text('prepare = ["inference-batchnorm"]\n')
    result = gq.insert(tmp_path / "model.pbtxt", rules=[str(rules), "weight_only"])
    assert [step.step for step in result.plan.steps] == ["inference-batchnorm"]
    assert not result.model.main.op("n").attrs["is_training"]
    assert "inference-batchnorm" not in {skip.rule for skip in result.skips}


SPELLED_OUT = """
node { name: "mul" op: "Mul" input: "FIRST" input: "SECOND" attr { key: "T" value { type: DT_FLOAT } } }
node { name: "n" op: "AddV2" input: "mul" input: "t" attr { key: "T" value { type: DT_FLOAT } } }
"""


def spelled_out(monkeypatch, data, factor):
    """The text of a BatchNorm as Keras 3 writes it: the rsqrt of variance and epsilon, times the scale, and so on."""
    head, _, rest = TF.partition('node { name: "n"')
    _, _, tail = rest.partition("LAYOUT }\n")
    chain = [
        const("e", (), (0.25,)),
        'node { name: "ve" op: "AddV2" input: "v" input: "e" attr { key: "T" value { type: DT_FLOAT } } }',
        'node { name: "r" op: "Rsqrt" input: "ve" attr { key: "T" value { type: DT_FLOAT } } }',
        'node { name: "f" op: "Mul" input: "r" input: "s" attr { key: "T" value { type: DT_FLOAT } } }',
        'node { name: "mf" op: "Mul" input: "m" input: "f" attr { key: "T" value { type: DT_FLOAT } } }',
        'node { name: "t" op: "Sub" input: "o" input: "mf" attr { key: "T" value { type: DT_FLOAT } } }',
        SPELLED_OUT.replace("FIRST", data).replace("SECOND", factor),
    ]
    monkeypatch.setitem(globals(), "TF", head + "\n".join(chain) + tail)


@pytest.mark.parametrize("operands", [("DATA", "f"), ("f", "DATA")])
@pytest.mark.parametrize("bias", [False, True])
def test_multiply_add_of_keras_is_folded(tmp_path, monkeypatch, operands, bias):
    """A Mul and an Add of one value per channel behind a conv are folded as the BatchNorm that they are."""
    spelled_out(monkeypatch, *operands)
    model = tensorflow(tmp_path, bias=bias)
    folded, (step,) = prepare(model, FOLD)
    assert (step.step, step.target, step.detail.split()[-1]) == ("fold-batchnorm", "n", "c")
    parameters = Parameters(folded)
    assert parameters.value(TensorRef("", "c/weight_folded")).reshape(-1).tolist() == [6.0, 120.0]
    assert parameters.value(TensorRef("", "c/bias_folded")).tolist() == ([19.0, 74.0] if bias else [-11.0, -46.0])
    adder = "b" if bias else "n/bias_add"
    nodes = {node.name: list(node.input) for node in tf_emit(folded).node}
    assert nodes == {
        "x": [],
        "c": ["x", "c/weight_folded"],
        adder: ["c", "c/bias_folded"],
        "y": [adder],
        "c/weight_folded": [],
        "c/bias_folded": [],
    }
    chain = {item["op"] for item in step.undo["removed"]}
    assert chain == {
        "n",
        "mul",
        "wi",
        "w",
        "f",
        "t",
        "mf",
        "m",
        "r",
        "ve",
        "v",
        "e",
        "s",
        "o",
        *({"bias"} if bias else ()),
    }


ADDED = 'node { name: "n" op: "AddV2" input: "FIRST" input: "SECOND" attr { key: "T" value { type: DT_FLOAT } } }'


@pytest.mark.parametrize("op", ["Conv2D", "DepthwiseConv2dNative"])
@pytest.mark.parametrize(
    ("shape", "is_bias"),
    [((2,), True), ((1, 1, 1, 2), True), ((1,), False), ((), False), ((2, 1, 2), False), ((1, 1, 1, 1, 2), False)],
)
@pytest.mark.parametrize("operands", [("DATA", "a"), ("a", "DATA")])
@pytest.mark.parametrize("bias", [False, True])
def test_a_sum_of_tensorflow_is_a_bias(tmp_path, monkeypatch, op, shape, is_bias, operands, bias):
    """A convolution plus a value per channel, as in `conv2d(x, w) + b`, has a BiasAdd, and its weight as before."""
    head, _, rest = TF.partition('node { name: "n"')
    addend = const("a", shape, np.arange(1.0, 1.0 + np.prod(shape, dtype=int)))
    text = head + addend + ADDED.replace("FIRST", operands[0]).replace("SECOND", operands[1])
    monkeypatch.setitem(globals(), "TF", text + rest.partition("LAYOUT }\n")[2])
    model = tensorflow(tmp_path, op=op, bias=bias)
    folded, steps = prepare(model, FOLD)
    assert [step.target for step in steps] == (["n"] if is_bias else [])
    if is_bias:
        nodes = {node.name: node for node in tf_emit(folded).node}
        adder = "b" if bias else "n/bias_add"
        assert (nodes[adder].op, list(nodes[adder].input)) == ("BiasAdd", ["c", "c/bias_folded"])
        assert (list(nodes["c"].input), list(nodes["y"].input)) == (["x", "wi"], [adder])
        value = Parameters(folded).value(TensorRef("", "c/bias_folded"))
        assert value.tolist() == [1.0 + 5.0 * bias, 2.0 + 10.0 * bias]


@pytest.mark.parametrize(("shape", "is_bias"), [((2,), True), ((2, 1, 2), False)])
def test_a_sum_that_is_not_folded(tmp_path, monkeypatch, shape, is_bias):
    """A sum with variables is not folded. TFLite's rules place no pair inside, and none on a value per channel."""
    head, _, rest = TF.partition('node { name: "n"')
    text = head + const("a", shape, np.ones(np.prod(shape))) + ADDED.replace("FIRST", "DATA").replace("SECOND", "a")
    monkeypatch.setitem(globals(), "TF", text + rest.partition("LAYOUT }\n")[2])
    tensorflow(tmp_path)
    plan = gq.plan(tmp_path / "model.pbtxt", rules=["prepare = ['not fold-batchnorm']\n", "tflite"])
    pairs = {site.tensor.op for site in plan.sites}
    assert pairs == {"x", "wi", "y"} if is_bias else {"x", "wi", "y", "c", "a"}


def test_a_sum_behind_a_reshaped_layer_stays_behind_it(tmp_path):
    """TFLite fuses a Relu into a convolution if its bias is behind the Squeeze, and only the Relu has a pair."""
    tf = pytest.importorskip("tensorflow")
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (2, 8, 4), name="x")
        c = tf.nn.conv1d(x, np.ones((3, 4, 2), np.float32), 1, "SAME", name="c")
        tf.nn.relu(tf.add(c, np.float32([2, 3]), name="n"), name="y")
    (tmp_path / "model.pb").write_bytes(graph.as_graph_def(add_shapes=True).SerializeToString())
    folded, _ = prepare(gq.load(tmp_path / "model.pb"), FOLD)
    nodes = {node.name: node for node in tf_emit(folded).node}
    assert nodes["n/bias_add"].input[0] == "c/Squeeze"
    assert folded.output(TensorRef("", "n/bias_add")).shape == (2, 8, 2)
    pairs = {site.tensor.op for site in gq.plan(tmp_path / "model.pb", rules="tflite").sites}
    assert pairs == {"c/ExpandDims", "c/ExpandDims_1", "y"}


@pytest.mark.parametrize("norm", ["sum", "batchnorm"])
def test_reshaped_layers_with_other_readers_are_not_folded(tmp_path, norm):
    """Who else reads the Squeeze of a 1-D convolution, as a fetched output does, reads it without the sum or norm."""
    tf = pytest.importorskip("tensorflow")
    weight = tf.constant(np.ones((3, 4, 2), np.float32))
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (2, 8, 4), name="x")
        c = tf.nn.conv1d(x, weight.numpy(), 1, "SAME")
        values = [np.full(2, value, np.float32) for value in (2, 1, 0.5, 3)]
        normalized = tf.compat.v1.nn.fused_batch_norm(c[:, None], *values, is_training=False)[0]
        tf.nn.relu(c + values[0] if norm == "sum" else normalized, name="y")
        tf.nn.relu6(c, name="z")
    (tmp_path / "model.pb").write_bytes(graph.as_graph_def(add_shapes=True).SerializeToString())
    _, steps = prepare(gq.load(tmp_path / "model.pb"), FOLD)
    assert steps == ()


def test_products_of_data_are_not_folded(tmp_path, monkeypatch):
    """A Mul by what is no parameter is no part of a BatchNorm, and is not reported as one."""
    spelled_out(monkeypatch, "DATA", "x")
    model = tensorflow(tmp_path)
    assert prepare(model, FOLD) == (model, ())
    assert find_skipped_steps(model, FOLD) == ()


@pytest.mark.parametrize("shape", [(4, 1, 1), (1, 4, 1, 1)])
@pytest.mark.parametrize("op", ["Conv (x, w)", "Conv (x, w, b)", "ConvTranspose (x, u)"])
def test_a_mul_and_an_add_behind_a_convolution_of_onnx(tmp_path, op, shape):
    """One value per channel on the channels' axis is a BatchNorm that was written out."""
    text = f"g (X x) => (Y y) {{ c = {op}\n d = Mul (f, c)\n n = Add (d, t)\n y = Relu (n) }}"
    model = load_image_net(tmp_path, text, random_constants(w=(4, 3, 1, 1), u=(3, 4, 1, 1), b=(4,), f=shape, t=shape))
    folded, (step,) = prepare(model, FOLD)
    message = onnx_format.emit(folded)
    assert (step.target, [node.op_type for node in message.graph.node]) == ("n", [op.split()[0], "Relu"])
    feeds = {"x": RNG.normal(size=(1, 3, 5, 5)).astype(np.float32)}
    np.testing.assert_allclose(
        run_unoptimized(message, feeds)[0], run_unoptimized(model, feeds)[0], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("body", "targets"),
    [
        ("y = Add (c, t)", ["y"]),
        ("y = Mul (one, c)", ["y"]),
        ("d = Add (c, t)\n e = Mul (d, one)\n y = Add (e, one)", ["d", "y"]),
        ("d = Mul (c, one)\n e = Add (t, d)\n y = Mul (e, t)", ["e", "y"]),
    ],
)
@pytest.mark.parametrize("op", ["Conv (x, w)", "Conv (x, w, b)", "ConvTranspose (x, u)"])
def test_sums_and_products_behind_a_convolution(tmp_path, op, body, targets):
    """A bias that is an Add of its own, and a factor or a summand for all channels, as Paddle writes them, fold."""
    text = f"g (X x) => (Y y) {{ c = {op}\n {body} }}"
    constants = random_constants(w=(4, 3, 1, 1), u=(3, 4, 1, 1), b=(4,), t=(1, 4, 1, 1), one=(1,))
    model = load_image_net(tmp_path, text, constants)
    folded, steps = prepare(model, FOLD)
    message = onnx_format.emit(folded)
    assert [step.target for step in steps] == targets
    assert [node.op_type for node in message.graph.node] == [op.split()[0]]
    feeds = {"x": RNG.normal(size=(1, 3, 5, 5)).astype(np.float32)}
    np.testing.assert_allclose(
        run_unoptimized(message, feeds)[0], run_unoptimized(model, feeds)[0], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "body",
    [
        *("y = Add (c, p)", "y = Mul (c, p)", "y = Add (c, c)", "d = Relu (c)\n y = Add (d, t)"),
        *("y = Add (c, wide)", "y = Mul (c, fifth)"),
    ],
)
def test_other_sums_and_products_are_not_folded_or_reported(tmp_path, body):
    """An embedding of positions, a sum of data, a sum behind an activation and one that adds an axis are no bias."""
    text = f"g (X x) => (Y y) {{ c = Conv (x, w)\n {body} }}"
    constants = random_constants(w=(4, 3, 1, 1), p=(4, 5, 5), t=(4, 1, 1), wide=(1, 1, 1, 1, 1), fifth=(1, 1, 4, 1, 1))
    model = load_image_net(tmp_path, text, constants)
    assert prepare(model, FOLD) == (model, ())
    assert find_skipped_steps(model, FOLD) == ()


def test_a_batchnorm_takes_up_a_mul_and_an_add(tmp_path):
    """A BatchNorm without a convolution before it, as in nets made with Caffe, takes up a Mul and an Add."""
    text = (
        "g (Y x) => (Y y) { c = BatchNormalization (x, s, o, m, v)\n d = Mul (c, f)\n n = Add (d, t)\n y = Relu (n) }"
    )
    model = load_image_net(tmp_path, text, random_constants(**STATS, f=(4, 1, 1), t=(4, 1, 1)))
    folded, (step,) = prepare(model, FOLD)
    message = onnx_format.emit(folded)
    assert (step.step, step.target, step.detail.split()[-1]) == ("fold-batchnorm", "n", "c")
    assert [node.op_type for node in message.graph.node] == ["BatchNormalization", "Relu"]
    feeds = {"x": RNG.normal(size=(1, 4, 5, 5)).astype(np.float32)}
    np.testing.assert_allclose(
        run_unoptimized(message, feeds)[0], run_unoptimized(model, feeds)[0], rtol=1e-5, atol=1e-5
    )
    (skipped,) = find_skipped_steps(folded, FOLD)
    assert re.match("it reads x:0,", skipped.reason)


@pytest.mark.parametrize(
    "shapes",
    [
        {"f": (5,), "t": (4, 1, 1)},
        {"f": (4, 1, 1), "t": (4, 5, 1)},
        {"f": (5, 1), "t": (5, 1)},
        {"w": (4,), "f": (4,), "t": (4,)},
    ],
)
def test_values_along_other_axes_are_not_folded(tmp_path, shapes):
    """A Mul and an Add along rows or columns, or behind a weight with too few axes, are no BatchNorm."""
    text = "g (X x) => (Y y) { c = Conv (x, w)\n d = Mul (c, f)\n y = Add (d, t) }"
    model = load_image_net(tmp_path, text, random_constants(**{"w": (4, 3, 1, 1), **shapes}))
    assert prepare(model, FOLD) == (model, ())


REASONS = {
    "c = Conv (x, w)\n n = BatchNormalization (c, s, o, m, v)\n z = Neg (c)": "c:0 .*consumers",
    "c = Conv (x, w)\n n = BatchNormalization (c, s, o, m, r)": "values.* weight of c,",
    "c = Conv (x, w)\n a = Relu (c)\n n = BatchNormalization (a, s, o, m, v)": " a, a Relu,",
    "c = Conv (x, w)\n n = BatchNormalization (c, s, o, m, neg)": "variance .*negative",
    "c = Conv (x, w, b1)\n n = BatchNormalization (c, s, o, m, v)": None,
    "c = Conv (x, w)\n n = BatchNormalization (c, s1, o, m, v)": "per channel .*4 output",
    "n = BatchNormalization (x, s3, s3, s3, s3)": "^it reads x:0,",
    "a = MatMul (x, mw)\n n = BatchNormalization (a, s3, s3, s3, s3)": "^a .*stacks",
}


@pytest.mark.parametrize("text", REASONS)
def test_plan_has_reasons_of_skipped_folds(tmp_path, text):
    """Each BatchNorm that is left has its reason."""
    values = random_constants(w=(4, 3, 1, 1), b1=(1,), mw=(5, 5), s1=(1,), s3=(3,), **STATS)
    values |= {"neg": np.full(4, -1.0, np.float32), "s3": np.abs(values["s3"])}
    ends = "float[1,k,5,5] y, float[1,4,5,5] z" if "z =" in text else "float[1,k,5,5] y"
    model = load_image_net(tmp_path, f"g (X x, float[4] r) => ({ends}) {{ {text}\n y = Relu (n) }}", values)
    skipped = find_skipped_steps(prepare(model, FOLD)[0], FOLD)
    if REASONS[text] is None:
        assert skipped == ()
    else:
        assert [(entry.step, str(entry.tensor)) for entry in skipped] == [("fold-batchnorm", "n:0")]
        assert re.search(REASONS[text], skipped[0].reason)


def write_nested_batchnorms(folder):
    """Convolutions with BatchNorms in a branch, whose weight is outside of it, and in a function of the model's own."""
    text = """<ir_version: 8, opset_import: ["": 13, "own": 1]>
    g (float[1,3,5,5] x, bool b) => (float[1,4,5,5] y) {
        i = If (b) <
            then_branch = t () => (float[1,4,5,5] p) {
                c = Conv (x, w)  n = BatchNormalization (c, s, o, m, v)  p = Relu (n)
            },
            else_branch = e () => (float[1,4,5,5] q) { q = own.block (x, w) }
        >
        y = own.norm (i, w2)
    }
    <domain: "own", opset_import: ["": 13]> block (a, k) => (r) { r = Conv (a, k) }
    <domain: "own", opset_import: ["": 13]> norm (a, k) => (r) {
        s = Constant <value_floats = [1.0, 2.0, 3.0, 4.0]> ()
        c = Conv (a, k)
        n = BatchNormalization (c, s, s, s, s)
        r = Relu (n)
    }"""
    message = onnx.parser.parse_model(text)
    values = random_constants(w=(4, 3, 1, 1), w2=(4, 4, 1, 1), **STATS)
    message.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in values.items())
    onnx.save(message, folder / "model.onnx")
    return onnx_format.load(folder / "model.onnx")


def test_branches_and_functions(tmp_path):
    """They are folded where they are; the weight outside of the branch stays for who else reads it."""
    model = write_nested_batchnorms(tmp_path)
    folded, steps = prepare(model, FOLD)
    assert [step.target for step in steps] == ["i/then_branch/n", "own:norm/n"]
    message = onnx_format.emit(folded)
    assert "BatchNormalization" not in str(message)
    assert {"w", "w2"} & {initializer.name for initializer in message.graph.initializer} == {"w"}
    for flag in (True, False):
        feeds = {"x": RNG.normal(size=(1, 3, 5, 5)).astype(np.float32), "b": np.array(flag)}
        before, after = run_unoptimized(model, feeds), run_unoptimized(message, feeds)
        np.testing.assert_allclose(after[0], before[0], rtol=1e-4, atol=1e-5)


def test_a_plan_file_makes_the_same_steps(tmp_path):
    """A plan read from its JSON prepares the model as the one that was made, and gives the same bytes."""
    write_nested_batchnorms(tmp_path)
    path, rules = tmp_path / "model.onnx", ["prepare = ['constant-nodes', 'fold-batchnorm']\n", "weight_only"]
    plan = gq.plan(path, rules=rules)
    assert [step.step for step in plan.steps] == ["fold-batchnorm"] * 2
    again = plan_from_json(json.loads(json.dumps(plan_to_json(plan))))
    first, second = gq.insert(path, plan=plan), gq.insert(path, plan=again)
    assert first.inserted
    assert onnx_format.emit(first.model) == onnx_format.emit(second.model)


def test_half_floats_are_skipped(tmp_path):
    """Weights of another type than float32 are not folded, and that is said."""
    text = """<ir_version: 8, opset_import: ["": 15]> g (float16[1,3,5,5] x) => (float16[1,4,5,5] y) {
        c = Conv (x, w)  y = BatchNormalization (c, s, o, m, v)
    }"""
    message = onnx.parser.parse_model(text)
    for name, value in random_constants(w=(4, 3, 1, 1), **STATS).items():
        message.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float16), name))
    onnx.save(message, tmp_path / "model.onnx")
    (skipped,) = find_skipped_steps(gq.load(tmp_path / "model.onnx"), FOLD)
    assert re.search("weight of c .*float16; .*float32", skipped.reason)


@pytest.mark.parametrize("reason", [VARIABLES_NOT_FOLDED, "another"])
def test_a_model_with_variables_gets_the_command_that_freezes_it(reason):
    """The command is printed below the result, where a BatchNorm was not folded because of its variables."""
    source = Path(__file__).parents[2] / "sample_models/digits_cnn.pb"
    result = gq.insert(source, rules="fixed_point")
    skip = Skip(tensor=TensorRef("", "n"), uses=(), rule="fold-batchnorm", reason=reason, code=SkipCode.PREPARATION)
    output = io.StringIO()
    make_console(file=output).print(result_view(replace(result, skips=(*result.skips, skip))))
    command = f"graphquant freeze {source} -o NAME.pb"
    assert (command in output.getvalue()) == (reason == VARIABLES_NOT_FOLDED)

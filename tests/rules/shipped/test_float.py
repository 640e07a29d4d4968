"""Rule files keep LayerNorm and GELU as single ops float inside, in the forms that exporters write."""

from pathlib import Path

import pytest
from nets import GELU, IMAGE, NORM

import graphquant as gq

KERAS = {
    "mean": ("Mean", "x", "axes"),
    "squared": ("SquaredDifference", "x", "mean"),
    "variance": ("Mean", "squared", "axes"),
    "wide": ("AddV2", "variance", "eps"),
    "root": ("Rsqrt", "wide"),
    "gain": ("Mul", "root", "gamma"),
    "a": ("Mul", "x", "gain"),
    "b": ("Mul", "mean", "gain"),
    "c": ("Sub", "beta", "b"),
    "y": ("AddV2", "a", "c"),
    "z": ("AddV2", "y", "y"),
}
"""LayerNorm as Keras writes it, between two sums; by name the type and what is read."""


def inner(plan, names):
    """The tensors and readers among `names` between which the plan puts something."""
    pairs = {(site.tensor.op, use.op) for site in plan.sites for use in site.uses}
    return {(one, other) for one, other in pairs if one in names and other in names}


@pytest.mark.parametrize("form", GELU)
@pytest.mark.parametrize("rules", ["onnxruntime", "openvino", "tensorrt", "tflite"])
def test_gelu(rules, form, built):
    """Nothing stands between the ops of a GELU between two convolutions, and its answer is quantized."""
    path = built(IMAGE, f"v = Conv(x, w) {GELU[form].format('v')} z = Conv(y, w3)")
    plan = gq.plan(path, rules=[rules])
    names = {op.name for op in gq.load(path).main.ops() if op.type != "Conv"} - {"x", "w", "w3"}
    assert not inner(plan, names)
    assert any(site.tensor.op == "y" and "z" in {use.op for use in site.uses} for site in plan.sites)


@pytest.mark.parametrize("rules", ["onnxruntime", "openvino", "tensorrt", "tflite"])
def test_layernorm(rules, built):
    """Nothing stands between the ops of a LayerNorm with a gain and an offset."""
    path = built(IMAGE, f"c = Conv(x, w) {NORM} g = Mul(y, token) n = Add(g, token) z = Conv(n, w3)")
    plan = gq.plan(path, rules=[rules])
    names = {op.name for op in gq.load(path).main.ops() if op.type != "Conv"} - {"x", "w", "w3"}
    assert not inner(plan, names)
    assert any(site.tensor.op == "n" and "z" in {use.op for use in site.uses} for site in plan.sites)


def keras(folder):
    """Writes the net of Keras' LayerNorm as a frozen graph in text."""
    lines = ['node { name: "image" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } }']
    lines.append('attr { key: "shape" value { shape { dim { size: 4 } dim { size: 16 } } } } }')
    for name in ("eps", "gamma", "beta"):
        tensor = "tensor { dtype: DT_FLOAT tensor_shape { } float_val: 0.5 }"
        lines.append(f'node {{ name: "{name}" op: "Const" attr {{ key: "dtype" value {{ type: DT_FLOAT }} }}')
        lines.append(f'attr {{ key: "value" value {{ {tensor} }} }} }}')
    lines.append('node { name: "axes" op: "Const" attr { key: "dtype" value { type: DT_INT32 } }')
    lines.append('attr { key: "value" value { tensor { dtype: DT_INT32 tensor_shape { } int_val: 1 } } } }')
    for name, (kind, *read) in {"x": ("AddV2", "image", "image"), **KERAS}.items():
        inputs = " ".join(f'input: "{one}"' for one in read)
        types = 'attr { key: "T" value { type: DT_FLOAT } }'
        if kind == "Mean":
            types += ' attr { key: "Tidx" value { type: DT_INT32 } } attr { key: "keep_dims" value { b: true } }'
        lines.append(f'node {{ name: "{name}" op: "{kind}" {inputs} {types} }}')
    (folder / "keras.pbtxt").write_text("\n".join(lines), "utf-8")
    return folder / "keras.pbtxt"


def test_layernorm_of_keras(tmp_path):
    """TFLite's rules leave the root and the products of Keras' LayerNorm float, and quantize what is around them."""
    plan = gq.plan(keras(tmp_path))
    inside = {"mean", "squared", "variance", "wide", "root", "gain", "a", "b", "c", "y", "eps", "gamma", "beta"}
    assert not inner(plan, inside)
    quantized = {(site.tensor.op, use.op) for site in plan.sites for use in site.uses}
    assert {("x", "mean"), ("x", "a"), ("y", "z")} <= quantized


def test_layernorm_of_tensorflow():
    """The LayerNorm of the recurrent sample model stays float inside too."""
    plan = gq.plan(Path(__file__).parents[3] / "sample_models/digits_rnn.pb")
    assert not inner(plan, {"Mean", "sub", "Square", "Mean_1", "add_1", "Rsqrt", "mul_1", "mul_2", "add_2"})


BATCHNORM = {
    "c": ("Conv2D", "image", "weight"),
    "wide": ("AddV2", "variance", "eps"),
    "root": ("Rsqrt", "wide"),
    "gain": ("Mul", "root", "gamma"),
    "m": ("Mul", "c", "gain"),
    "shift": ("Mul", "mean", "gain"),
    "rest": ("Sub", "beta", "shift"),
    "y": ("AddV2", "m", "rest"),
    "s": ("Sigmoid", "y"),
    "a": ("Mul", "y", "s"),
    "n": ("IdentityN", "a", "y"),
    "d": ("DepthwiseConv2dNative", "n", "weight"),
}
"""A convolution, its BatchNorm as Keras 3 writes it with variables, a SiLU, and a depthwise convolution."""


def write_batchnorm(folder, *, stem):
    """Write the net as a graph in text. Without `stem`, another convolution is before it."""
    nodes = {} if stem else {"first": ("Conv2D", "image", "weight")}
    for name, (kind, *read) in BATCHNORM.items():
        nodes[name] = (kind, *("first" if one == "image" and not stem else one for one in read))
    lines = ['node { name: "image" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } } }']
    for name in ("eps", "gamma", "beta", "mean", "variance", "weight"):
        shape = (
            "dim { size: 1 } dim { size: 1 } dim { size: 4 } dim { size: 4 }" if name == "weight" else "dim { size: 4 }"
        )
        lines.append(f'node {{ name: "{name}" op: "VariableV2" attr {{ key: "dtype" value {{ type: DT_FLOAT }} }}')
        lines.append(f'attr {{ key: "shape" value {{ shape {{ {shape} }} }} }} }}')
    for name, (kind, *read) in nodes.items():
        inputs = " ".join(f'input: "{one}"' for one in read)
        attrs = 'attr { key: "T" value { type: DT_FLOAT } }'
        if kind == "IdentityN":
            attrs = 'attr { key: "T" value { list { type: DT_FLOAT type: DT_FLOAT } } }'
        if "Conv" in kind or "conv" in kind:
            attrs += ' attr { key: "strides" value { list { i: 1 i: 1 i: 1 i: 1 } } }'
            attrs += ' attr { key: "padding" value { s: "SAME" } }'
        lines.append(f'node {{ name: "{name}" op: "{kind}" {inputs} {attrs} }}')
    (folder / "keras.pbtxt").write_text("\n".join(lines), "utf-8")
    return folder / "keras.pbtxt"


def test_batchnorm_of_keras(tmp_path):
    """No range is inside a BatchNorm of variables, and one is behind it."""
    plan = gq.plan(write_batchnorm(tmp_path, stem=False))
    assert inner(plan, {"c", "m", "y", "gain", "rest", "shift", "root", "wide"}) == set()
    quantized = {(site.tensor.op, use.op) for site in plan.sites for use in site.uses}
    assert {("y", "s"), ("y", "a"), ("weight", "c"), ("first", "c")} <= quantized
    assert not {("a", "n")} <= quantized or ("n", "d") in quantized


def test_stem_of_keras(tmp_path):
    """A stem with such a BatchNorm and a SiLU, whose result an IdentityN forwards, stays float."""
    plan = gq.plan(write_batchnorm(tmp_path, stem=True))
    names = {"image", "weight", *BATCHNORM} - {"d"}
    assert inner(plan, names) == set()
    assert not [site for site in plan.sites for use in site.uses if use.op == "d"]

"""Where each backend's rules put quantizations in small nets, and what `check` foretells of the result."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import graphquant as gq
from graphquant.ruleset import load_ruleset, shipped

WEIGHTS = {
    "w": (16, 16, 1, 1),
    "w2": (16, 16, 3, 3),
    "w3": (16, 16, 1, 1),
    "triple": (16, 48, 1, 1),
    "joint": (16, 32, 1, 1),
    "few": (8, 16, 1, 1),
    "thin": (16, 8, 1, 1),
    "odd": (16, 4, 1, 1),
    "deep": (16, 1, 3, 3),
    "flat": (16, 1, 1, 1),
    "deep20": (20, 1, 3, 3),
    "m": (16, 32),
    "m2": (32, 16),
    "narrow": (16, 8),
    "short": (8, 16),
    "b": (16,),
    "b32": (32,),
    "k": (1, 16, 1, 1),
    "slope": (16, 1, 1),
    "token": (1, 16, 8, 8),
    "table": (10, 16),
    "lw": (1, 32, 16),
    "lr": (1, 32, 8),
}
"""Shapes of weights, by name."""

INTEGERS = {
    "flatten": [1, 1024],
    "axes": [2, 3],
    "border": [0, 0, 1, 1, 0, 0, 1, 1],
    "one": [1],
    "ones": [1, 1],
    "big": [1, 1024],
    "rows": [64, 16],
    "shuffle": [1, 4, 4, 8, 8],
    "image": [1, 16, 8, 8],
}
"""Shapes, axes and sizes of borders."""

FLOATS = {
    "sizes": [1.0, 1.0, 2.0, 2.0],
    "half": 0.5,
    "two": 2.0,
    "root": 1.41421,
    "eps": 1e-5,
    "zero": 0.0,
    "six": 6.0,
    "tiny": 1e-9,
}

IMAGE = "float[1,16,8,8] x, float[1,16,8,8] x2"

ROWS = "float[2,16] t"

HEADS = "float[1,32,16] q, float[1,32,16] kk, float[1,32,16] u"


MASKED = (
    "o = Transpose<perm = [0, 2, 1]>(kk) s = MatMul(q, o) d = Mul(s, half) a = Add(d, mask)"
    " p = Softmax(a) y = MatMul(p, u)"
)
"""Attention with a mask."""

SHUFFLE = "s = Reshape({}, shuffle) t = Transpose<perm = [0, 2, 1, 3, 4]>(s) y = Reshape(t, image)"
"""A shuffle of channels."""

NORM = (
    " mu = ReduceMean(c, axes) d = Sub(c, mu) s = Pow(d, two) vr = ReduceMean(s, axes) e = Add(vr, eps)"
    " r = Sqrt(e) y = Div(d, r)"
)
"""LayerNorm as single ops."""


def constants():
    """Every weight and number that a net may name; the same in each run."""
    rng = np.random.default_rng(0)
    yield "var", np.linspace(0.5, 2, 16, dtype=np.float32)
    for name, shape in WEIGHTS.items():
        yield name, rng.normal(size=shape).astype(np.float32)
    for name, value in INTEGERS.items():
        yield name, np.array(value)
    for name, number in FLOATS.items():
        yield name, np.array(number, np.float32)


def build(inputs, text, folder):
    """Writes the net whose ops `text` names, with what it reads, and data for it; its outputs are what nobody reads."""
    message = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 21]> g ({inputs}) => () {{ {text} }}')
    graph = message.graph
    read = {name for node in graph.node for name in node.input}
    for name, value in constants():
        if name in read:
            graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    ends = [name for node in graph.node for name in node.output if name and name not in read]
    graph.output.extend(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in ends)
    used = [one for one in graph.input if one.name in read]
    del graph.input[:]
    graph.input.extend(used)
    for node in graph.node:
        node.name = node.output[0]
    onnx.save(message, folder / "model.onnx")
    rng = np.random.default_rng(1)
    data = {}
    for one in used:
        first, *others = (size.dim_value for size in one.type.tensor_type.shape.dim)
        ids = one.type.tensor_type.elem_type == onnx.TensorProto.INT64
        shape = (2 * max(first, 1), *others)
        data[one.name] = rng.integers(0, 9, shape) if ids else rng.normal(size=shape).astype(np.float32)
    np.savez(folder / "data.npz", **data)
    return folder / "model.onnx"


def quantized(rules, inputs, text, folder):
    """The result of quantizing that net, and the net as it was written."""
    result = gq.insert(build(inputs, text, folder), rules=[rules], data=str(folder / "data.npz"))
    result.save(folder / "quant.onnx")
    return result, folder / "quant.onnx"


def places(result):
    """Each quantized tensor with the ops that read it there."""
    sites = [done.site for done in result.inserted]
    return " ".join(sorted(f"{site.tensor.op}>{'+'.join(use.op for use in site.uses)}" for site in sites))


TENSORRT = [
    # all inputs of weighted ops, none of their outputs
    (IMAGE, "c = Conv(x, w, b)", "w>c x>c", "c"),
    (IMAGE, "c = Conv(x, w) r = Relu(c) d = Conv(r, w3)", "r>d w3>d w>c x>c", "c r d"),
    (IMAGE, "c = ConvTranspose(x, w)", "w>c x>c", "c"),
    ("float[N,16] t", "y = MatMul(t, m)", "m>y t>y", "y"),
    (ROWS, "y = Gemm(t, m, b32)", "m>y t>y", "y"),
    # BatchNorm and activations stay where they are
    (
        IMAGE,
        "c = Conv(x, w) n = BatchNormalization(c, b, b, b, var) r = Relu(n) d = Conv(r, w3)",
        "r>d w3>d w>c x>c",
        "c n r d",
    ),
    (
        IMAGE,
        "c = Conv(x, w) n = BatchNormalization(c, b, b, b, var) s = Sigmoid(n) y = Mul(n, s) d = Conv(y, w3)",
        "w3>d w>c x>c y>d",
        "c n d",
    ),
    (
        IMAGE,
        "c = Conv(x, w) r = Relu(c) p = MaxPool<kernel_shape = [2, 2]>(r) d = Conv(p, w3)",
        "p>d w3>d w>c x>c",
        "c r d",
    ),
    # residual sums: the skip input alone; of two branches the longer one stays float
    (IMAGE, "c = Conv(x, w) r = Relu(c) d = Conv(r, w3) y = Add(r, d)", "r>d+y w3>d w>c x>c", "c r d y"),
    (IMAGE, "c = Conv(x, w) r = Relu(c) d = Conv(r, w3) e = Relu(d) y = Add(e, r)", "r>d+y w3>d w>c x>c", "c r d e y"),
    (IMAGE, "f = Sin(x) c = Conv(f, w) n = BatchNormalization(c, b, b, b, var) y = Add(f, n)", "f>c+y w>c", "c n y"),
    (
        IMAGE,
        "f = Sin(x) c = Conv(f, w) n = BatchNormalization(c, b, b, b, var) r = Relu(n) y = Add(r, f)",
        "f>c+y w>c",
        "c n r y",
    ),
    (
        IMAGE,
        "f = Sin(x) c = Conv(f, w) r = Relu(c) d = Conv<pads = [1, 1, 1, 1]>(r, w2) e = Conv(f, w3) y = Add(e, d)",
        "e>y f>c+e r>d w2>d w3>e w>c",
        "c r d e y",
    ),
    (
        IMAGE,
        "f = Sin(x) c = Conv(f, w) r = Relu(c) d = Conv<pads = [1, 1, 1, 1]>(r, w2) e = Conv(f, w3) y = Add(d, e)",
        "e>y f>c+e r>d w2>d w3>e w>c",
        "c r d e y",
    ),
    (IMAGE, "f = Sin(x) c = Conv(f, w) d = Conv(f, w3) y = Add(c, d)", "d>y f>c+d w3>d w>c", "c d y"),
    (IMAGE, "f = Sin(x) c = ConvTranspose(f, w) y = Add(f, c)", "f>c+y w>c", "c y"),
    (IMAGE, "c = Conv(x, w) s = Sin(c) y = Add(c, x2)", "w>c x>c", "c"),
    (
        IMAGE,
        "c = Conv(x, w) g = Relu(c) e = Conv(g, w3) f = Sin(e) h = Mul(f, k) y = Add(c, h)",
        "g>e w3>e w>c x>c",
        "c e",
    ),
    (IMAGE, "c = Conv(x, w) y = Add(c, k)", "w>c x>c", "c"),
    (IMAGE, "y = Add(x, x2)", "", ""),
    # Concat before a weighted op: one scale
    (
        IMAGE,
        "c = Conv(x, w) d = Conv(x, w3) j = Concat<axis = 1>(c, d) e = Conv(j, joint) s = Sin(j)",
        "c>j d>j j>e+s joint>e w3>d w>c x>c+d",
        "c d j e",
    ),
    (IMAGE, "j = Concat<axis = 1>(x, x2) s = Sin(j)", "", ""),
    # LayerNorm behind a convolution, whole and as single ops; the latter's inside stays float
    (IMAGE, "c = Conv(x, w) l = LayerNormalization<axis = 1>(c, token, token)", "c>l w>c x>c", "c"),
    (
        IMAGE,
        "c = Conv(x, w)" + NORM,
        "c>mu+d w>c x>c",
        "c",
    ),
    (
        IMAGE,
        "c = Relu(x)" + NORM,
        "",
        "",
    ),
    (IMAGE, "f = Relu(x) l = LayerNormalization<axis = 1>(f, token, token)", "", ""),
    # attention, of up to 512 places; the sum with the mask stays float
    (
        "float[1,64,16] q, float[1,64,16] kk, float[1,64,16] u, float[1,64,64] mask",
        MASKED,
        "o>s p>y q>s u>y",
        "s y",
    ),
    (
        "float[1,513,16] q, float[1,513,16] kk, float[1,513,16] u, float[1,513,513] mask",
        MASKED,
        "",
        "",
    ),
    (
        HEADS,
        "o = Transpose<perm = [0, 2, 1]>(kk) s = MatMul(q, o) p = Softmax(s) y = MatMul(p, u)",
        "o>s p>y q>s u>y",
        "s y",
    ),
    # GELU by Erf stays float
    (
        "float[1,4,16] t",
        "a = MatMul(t, m) d = Div(a, root) e = Erf(d) f = Add(e, two) g = Mul(a, f) h = Mul(g, half) y = MatMul(h, m2)",
        "h>y m2>y m>a t>a",
        "a y",
    ),
    # products with vectors, and small ones, stay float
    ("float[1,16] t", "y = MatMul(t, m)", "", ""),
    ("float[1,16] t", "y = Gemm(t, m, b32)", "", ""),
    (ROWS, "y = MatMul(t, narrow)", "", ""),
    ("float[2,8] t", "y = MatMul(t, short)", "", ""),
    # convolutions of few channels stay float, but for some
    (IMAGE, "f = Sin(x) c = Conv(f, few)", "", ""),
    (IMAGE, "c = Conv(x, few)", "few>c x>c", "c"),
    (IMAGE, "f = Sin(x) c = Conv<group = 2>(f, thin)", "f>c thin>c", "c"),
    ("float[1,8,4,4] t", "c = Conv(t, thin)", "t>c thin>c", "c"),
    ("float[1,8,4,4] t", "f = Sin(t) c = Conv(f, thin)", "", ""),
    ("float[1,4,4,4] t", "c = Conv(t, odd)", "", ""),
    (IMAGE, "c = Conv<group = 16>(x, deep)", "deep>c x>c", "c"),
    (IMAGE, "c = Conv<group = 16>(x, flat)", "", ""),
    ("float[1,20,4,4] t", "c = Conv<group = 20>(t, deep20)", "", ""),
    # all else stays float
    (IMAGE, "s = Softmax(x) y = Sub(x, x2)", "", ""),
    (IMAGE, "p = MaxPool<kernel_shape = [2, 2]>(x)", "", ""),
]
"""Inputs, the net, what is quantized for which readers, and which ops then run on integers or in such an op."""

OTHERS = [
    # weighted ops, with what is fused behind them
    (IMAGE, "c = Conv(x, w, b) s = Sin(c)", ("b>c c>s w>c x>c", "c"), ("w>c x>c", "c"), ("b>c c>s w>c x>c", "c")),
    (
        IMAGE,
        "c = Conv(x, w) r = Relu(c) s = Sin(r)",
        ("r>s w>c x>c", "c r"),
        ("w>c x>c", "c r"),
        ("r>s w>c x>c", "c r"),
    ),
    (
        IMAGE,
        "c = Conv(x, w) r = Clip(c, zero, six) s = Sin(r)",
        ("r>s w>c x>c", "c r"),
        ("w>c x>c", "c r"),
        ("r>s w>c x>c", "c r"),
    ),
    (
        IMAGE,
        "c = Conv(x, w) r = Relu(c) s = Sin(c)",
        ("c>r+s r>@r w>c x>c", "c r"),
        ("w>c x>c", "c"),
        ("c>r+s r>@r w>c x>c", "c r"),
    ),
    (
        IMAGE,
        "c = Conv(x, w) r = LeakyRelu(c)",
        ("c>r r>@r w>c x>c", "c r"),
        ("w>c x>c", "c r"),
        ("r>@r w>c x>c", "c r"),
    ),
    (
        IMAGE,
        "c = Conv(x, w) r = PRelu(c, slope)",
        ("c>r r>@r w>c x>c", "c r"),
        ("w>c x>c", "c r"),
        ("r>@r w>c x>c", "c r"),
    ),
    (
        IMAGE,
        "c = ConvTranspose(x, w, b) r = Relu(c)",
        ("b>c r>@r w>c x>c", "c r"),
        ("w>c x>c", "c r"),
        ("b>c r>@r w>c x>c", "c r"),
    ),
    (
        IMAGE,
        "c = ConvTranspose(x, w) r = Clip(c, zero, six)",
        ("c>r r>@r w>c x>c", "c r"),
        ("w>c x>c", "c r"),
        ("r>@r w>c x>c", "c r"),
    ),
    (IMAGE, "c = Conv<group = 16>(x, deep)", ("c>@c deep>c x>c", "c"), ("deep>c x>c", "c"), ("c>@c deep>c x>c", "c")),
    (
        IMAGE,
        "c = Conv(x, w) n = BatchNormalization(c, b, b, b, var) r = Relu(n)",
        ("c/bias_folded>c c/weight_folded>c r>@r x>c", "c r"),
        ("c/weight_folded>c x>c", "c r"),
        ("c/bias_folded>c c/weight_folded>c r>@r x>c", "c r"),
    ),
    (ROWS, "y = MatMul(t, m) r = Relu(y)", ("m>y r>@r t>y y>r", "y r"), ("m>y t>y", "y r"), ("m>y r>@r t>y", "y r")),
    (
        ROWS,
        "y = MatMul(t, m) a = Add(y, b32) z = MatMul(a, m2)",
        ("a>z b32>a m2>z m>y t>y y>a z>@z", "y a z"),
        ("a>z m2>z m>y t>y", "y z"),
        ("a>z b32>a m2>z m>y t>y y>a z>@z", "y a z"),
    ),
    (
        ROWS,
        "y = Gemm(t, m, b32) r = Relu(y)",
        ("b32>y m>y r>@r t>y", "y r"),
        ("m>y t>y", "y r"),
        ("b32>y m>y r>@r t>y", "y r"),
    ),
    (
        "float[2,8,16] t, float[2,16,8] u",
        "y = MatMul(t, u)",
        ("t>y u>y y>@y", "y"),
        ("t>y u>y", "y"),
        ("t>y u>y y>@y", "y"),
    ),
    (
        IMAGE,
        "c = Conv(x, w, b) d = Conv(x2, w3, b) y = Add(c, d)",
        ("b>c b>d c>y d>y w3>d w>c x2>d x>c y>@y", "c d y"),
        ("c>y d>y w3>d w>c x2>d x>c", "c d y"),
        ("b>c+d c>y d>y w3>d w>c x2>d x>c y>@y", "c d y"),
    ),
    # arithmetic
    (IMAGE, "y = Add(x, x2) r = Relu(y)", ("r>@r x2>y x>y", "y r"), ("x2>y x>y", "y"), ("r>@r x2>y x>y", "y r")),
    (IMAGE, "y = Add(x, k)", ("k>y x>y y>@y", "y"), ("k>y x>y", "y"), ("k>y x>y y>@y", "y")),
    (
        IMAGE,
        "y = Mul(x, x2) z = Sub(y, x2) d = Div(z, x2)",
        ("d>@d x2>y+z+d x>y y>z z>d", "y z d"),
        ("x2>y+z+d x>y y>z z>d", "y z d"),
        ("x2>y x>y y>z", "y"),
    ),
    (
        IMAGE,
        "y = Max(x, x2) z = Min(y, x2) p = Pow(z, two)",
        ("p>@p two>p x2>y+z x>y y>z z>p", "y z p"),
        ("x2>y+z x>y y>z", "y z"),
        ("", ""),
    ),
    (IMAGE, "y = Sigmoid(x) z = Tanh(y)", ("x>y y>z z>@z", "y z"), ("", ""), ("", "")),
    (IMAGE, "y = Softmax(x)", ("x>y y>@y", "y"), ("", ""), ("", "")),
    (IMAGE, "y = Sin(x) z = Erf(y)", ("", ""), ("", ""), ("", "")),
    (
        IMAGE,
        "y = ReduceMean(x, axes) z = ReduceSum(y, axes) r = ReduceMax(z, axes) c = Conv(r, w)",
        ("c>@c r>c w>c x>y y>z z>r", "y z r c"),
        ("w>c x>y y>z z>r", "y z r c"),
        ("c>@c r>c w>c", "c"),
    ),
    (
        IMAGE,
        "y = LayerNormalization<axis = 1>(x, token, token) z = InstanceNormalization(y, b, b)",
        ("x>y y>z z>@z", "y z"),
        ("x>y y>z", "y z"),
        ("", ""),
    ),
    # Concat
    (
        IMAGE,
        "c = Conv(x, w) d = Conv(x2, w3) r = Relu(d) j = Concat<axis = 1>(c, r) e = Conv(j, joint)",
        ("c>j d>r e>@e j>e joint>e r>j w3>d w>c x2>d x>c", "c d r j e"),
        ("c>j j>e joint>e r>j w3>d w>c x2>d x>c", "c d r j e"),
        ("c>j e>@e j>e joint>e r>j w3>d w>c x2>d x>c", "c d r j e"),
    ),
    (
        IMAGE,
        "j = Concat<axis = 0>(x, token) e = Conv(j, w)",
        ("e>@e j>e token>j w>e x>j", "j e"),
        ("j>e token>j w>e x>j", "j e"),
        ("e>@e j>e token>j w>e x>j", "j e"),
    ),
    (
        IMAGE,
        "j = Concat<axis = 1>(x, x2) s = Sin(j)",
        ("j>s x2>j x>j", "j"),
        ("j>s x2>j x>j", "j"),
        ("j>s x2>j x>j", "j"),
    ),
    (
        IMAGE,
        "f = Transpose<perm = [0, 1, 3, 2]>(x) j = Concat<axis = 1>(f, x2) e = Conv(j, joint)",
        ("e>@e j>e joint>e x2>j x>f", "f j e"),
        ("j>e joint>e x2>j x>f", "f j e"),
        ("e>@e f>j j>e joint>e x2>j x>f", "f j e"),
    ),
    # ops that hand integers on
    (
        IMAGE,
        "c = Conv(x, w) f = Reshape(c, flatten) s = Sin(f)",
        ("c>f w>c x>c", "c f"),
        ("w>c x>c", "c"),
        ("c>f f>s w>c x>c", "c f"),
    ),
    (
        IMAGE,
        "f = Transpose<perm = [0, 1, 3, 2]>(x) g = Unsqueeze(f, one) h = Squeeze(g, one) c = Conv(h, w)",
        ("c>@c w>c x>f", "f g h c"),
        ("w>c x>f", "f g h c"),
        ("c>@c f>g h>c w>c x>f", "f c"),
    ),
    (
        IMAGE,
        "p = MaxPool<kernel_shape = [2, 2]>(x) c = Conv(p, w) y = Add(p, c)",
        ("c>y w>c x>p y>@y", "p c y"),
        ("c>y w>c x>p", "p c y"),
        ("c>y p>c+y w>c x>p y>@y", "p c y"),
    ),
    (
        IMAGE,
        "p = AveragePool<kernel_shape = [2, 2]>(x) g = GlobalAveragePool(p)",
        ("g>@g p>g x>p", "p g"),
        ("p>g x>p", "p g"),
        ("g>@g p>g x>p", "p g"),
    ),
    (
        IMAGE,
        "c = Conv(x, w) p = MaxPool<kernel_shape = [2, 2]>(c) r = Relu(p)",
        ("c>p r>@r w>c x>c", "c p r"),
        ("w>c x>c", "c"),
        ("c>p r>@r w>c x>c", "c p r"),
    ),
    (
        IMAGE,
        "a, e = Split<axis = 1, num_outputs = 2>(x) y = Mul(a, e)",
        ("x>a y>@y", "a y"),
        ("x>a", "a y"),
        ("a>y a>y y>@y", "y"),
    ),
    (
        IMAGE,
        "p = Pad(x, border) c = Conv(p, w)",
        ("c>@c w>c x>p", "p c"),
        ("w>c x>p", "p c"),
        ("c>@c p>c w>c x>p", "p c"),
    ),
    (
        IMAGE,
        "f = Flatten(x) g = Tile(f, ones) h = Expand(g, big) d = DepthToSpace<blocksize = 2>(x)",
        ("x>f+d", "f g h d"),
        ("", ""),
        ("", ""),
    ),
    (
        IMAGE,
        'y = Resize<mode = "linear">(x, , sizes) c = Conv(y, w)',
        ("c>@c w>c x>y y>c", "y c"),
        ("w>c x>y y>c", "y c"),
        ("c>@c w>c y>c", "c"),
    ),
    (
        IMAGE,
        'y = Resize<mode = "nearest">(x, , sizes) c = Conv(y, w)',
        ("c>@c w>c x>y y>c", "y c"),
        ("w>c x>y", "y c"),
        ("c>@c w>c y>c", "c"),
    ),
    (
        IMAGE,
        'y = Resize<mode = "cubic">(x, , sizes) c = Conv(y, w)',
        ("c>@c w>c x>y y>c", "y c"),
        ("w>c y>c", "c"),
        ("c>@c w>c y>c", "c"),
    ),
    (
        "int64[1,3] ids",
        "e = Gather(table, ids) y = MatMul(e, m)",
        ("m>y table>e y>@y", "e y"),
        ("e>y m>y", "y"),
        ("e>y m>y y>@y", "y"),
    ),
    # recurrent ops and attention
    ("float[3,2,16] t", "y = LSTM<hidden_size = 8>(t, lw, lr)", ("", ""), ("", ""), ("", "")),
    (
        HEADS,
        "o = Transpose<perm = [0, 2, 1]>(kk) s = MatMul(q, o) p = Softmax(s) y = MatMul(p, u)",
        ("kk>o p>y q>s s>p u>y y>@y", "o s p y"),
        ("kk>o p>y q>s u>y", "o s y"),
        ("kk>o o>s p>y q>s s>p u>y y>@y", "o s y"),
    ),
]
"""The same for QNN, OpenVINO and Vitis AI."""

ONNXRUNTIME = [
    # patterns: GELU and LayerNorm as single ops stay float inside, SiLU and attention do not
    (
        IMAGE,
        "c = Conv(x, w) d = Div(c, root) e = Erf(d) f = Add(e, two) g = Mul(c, f) h = Mul(g, half) o = Conv(h, w3)",
        "c>d+g h>o o>@o w3>o w>c x>c",
        "c o",
    ),
    (
        IMAGE,
        "c = Conv(x, w) d = Div(c, root) e = Erf(d) f = Add(e, two) g = Mul(c, half) h = Mul(g, f) o = Conv(h, w3)",
        "c>d+g h>o o>@o w3>o w>c x>c",
        "c o",
    ),
    (IMAGE, "c = Conv(x, w)" + NORM + " o = Conv(y, w3)", "c>mu+d o>@o w3>o w>c x>c y>o", "c o"),
    (
        IMAGE,
        "c = Conv(x, w)" + NORM + " g = Mul(y, k) z = Add(g, k) o = Conv(z, w3)",
        "c>mu+d o>@o w3>o w>c x>c z>o",
        "c o",
    ),
    (
        IMAGE,
        "c = Conv(x, w) s = Sigmoid(c) y = Mul(c, s) d = Conv(y, w3)",
        "c>s+y d>@d s>y w3>d w>c x>c y>d",
        "c s y d",
    ),
    (
        IMAGE,
        "c = Conv(x, w) o = Transpose<perm = [0, 1, 3, 2]>(c) s = MatMul(c, o) p = Softmax(s) y = MatMul(p, x2)",
        "c>o+s o>s p>y w>c x2>y x>c",
        "c o s y",
    ),
    # convolutions, and what they absorb
    (IMAGE, "c = Conv(x, w) s = Sin(c)", "c>s w>c x>c", "c"),
    (IMAGE, "c = Conv(x, w) r = Relu(c) s = Sin(r)", "r>s w>c x>c", "c r"),
    (IMAGE, "c = Conv(x, w) r = Clip(c, zero, six) s = Sin(r)", "r>s w>c x>c", "c r"),
    (IMAGE, "c = Conv(x, w) r = Relu(c) s = Sin(c)", "c>r+s w>c x>c", "c"),
    (IMAGE, "c = ConvTranspose(x, w)", "", ""),
    (IMAGE, "c = Conv(x, w) n = BatchNormalization(c, b, b, b, var) r = Relu(n)", "c/weight_folded>c r>@r x>c", "c r"),
    # the rest of the table
    (IMAGE, "y = Add(x, x2) z = Mul(y, x2) j = Concat<axis = 1>(z, x)", "j>@j x2>y+z x>y+j y>z z>j", "y z j"),
    (IMAGE, "c = Conv(x, w) y = Add(c, x) r = Relu(y)", "c>y r>@r w>c x>c+y", "c y r"),
    (
        IMAGE,
        "c = Conv(x, w) p = MaxPool<kernel_shape = [2, 2]>(c) t = Transpose<perm = [0, 1, 3, 2]>(p) f = Flatten(t)",
        "c>p f>@f p>t t>f w>c x>c",
        "c p t f",
    ),
    (IMAGE, "p = AveragePool<kernel_shape = [2, 2]>(x) g = GlobalAveragePool(p)", "g>@g p>g", "g"),
    (IMAGE, "y = Sub(x, x2) z = Div(y, x2) q = Max(z, x2) t = Tanh(q)", "", ""),
    (ROWS, "y = Gemm(t, m, b32)", "b32>y m>y t>y", "y"),
    (ROWS, "y = MatMul(t, m) a = Add(y, b32)", "b32>a m>y t>y", "y a"),
    (ROWS, "y = MatMul(t, m) a = Add(y, b32) r = Relu(a) z = MatMul(r, m2)", "b32>a m2>z m>y r>z t>y", "y a r z"),
    ("float[1,5,16] t", "y = MatMul(t, m) a = Add(y, b32) z = MatMul(a, m2)", "a>z b32>a m2>z m>y t>y", "y a z"),
    ("float[N,5,16] t", "y = MatMul(t, m) a = Add(y, b32) s = Sin(a)", "b32>a m>y t>y", "y"),
    ("float[1,5,16] t", "y = MatMul(t, m) a = Add(y, b32) s = Sin(a)", "b32>a m>y t>y", "y a"),
    (
        HEADS,
        "o = Transpose<perm = [0, 2, 1]>(kk) s = MatMul(q, o) p = Softmax(s) y = MatMul(p, u)",
        "o>s p>y q>s u>y",
        "o s y",
    ),
    (
        "float[1,2,8,16] q, float[1,2,16,8] kk, float[1,2,8,16] u",
        "s = MatMul(q, kk) d = Mul(s, half) p = Softmax(d) y = MatMul(p, u)",
        "d>p half>d kk>s p>y q>s s>d u>y",
        "s d p y",
    ),
    (HEADS, "o = Transpose<perm = [0, 2, 1]>(kk) s = MatMul(q, o) d = Mul(s, half)", "o>s q>s", "o s"),
    (
        ROWS,
        "y = MatMul(t, m) a = Add(y, b32) d = Div(a, root) e = Erf(d) f = Add(e, two) g = Mul(a, f) h = Mul(g, half)",
        "b32>a m>y t>y",
        "y a",
    ),
    (IMAGE, f"c = Conv(x, w) r = Relu(c) {SHUFFLE.format('r')} z = Conv(y, w3)", "w3>z y>z z>@z", "r s t y z"),
    (IMAGE, f"c = Conv(x, w) {SHUFFLE.format('c')}", "", ""),
]
"""The same for onnxruntime."""

CASES = [
    *(("onnxruntime", inputs, text, found, runs) for inputs, text, found, runs in ONNXRUNTIME),
    *(("tensorrt", inputs, text, found, runs) for inputs, text, found, runs in TENSORRT),
    *(
        (backend, inputs, text, *wanted)
        for inputs, text, *columns in OTHERS
        for backend, wanted in zip(("qnn", "openvino", "vitis_ai"), columns, strict=True)
    ),
]


@pytest.mark.parametrize(("backend", "inputs", "text", "found", "runs"), CASES)
def test_placement(backend, inputs, text, found, runs, tmp_path):
    """The rules quantize just these tensors for just these readers, and `check` agrees that the ops run on integers."""
    result, path = quantized(backend, inputs, text, tmp_path)
    assert places(result) == found
    report = gq.check(path, backend=backend)
    assert " ".join(verdict.op for verdict in report.verdicts if verdict.status != "float") == runs
    assert not any(verdict.note for verdict in report.verdicts)
    assert {finding.code for finding in report.findings} <= ({"GQ101"} if "Concat" in text else set())


@pytest.mark.parametrize(("inputs", "text"), [(inputs, text) for inputs, text, *_ in OTHERS])
def test_openvino_runs(inputs, text, tmp_path):
    """OpenVINO itself loads each net, and runs its convolutions and matrix products on integers."""
    openvino = pytest.importorskip("openvino")
    _, path = quantized("openvino", inputs, text, tmp_path)
    core, asked = openvino.Core(), {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(core.read_model(path), "CPU", asked)
    told = [op.get_rt_info() for op in compiled.get_runtime_model().get_ordered_ops()]
    ran = {
        str(one["runtimePrecision"].astype(str))
        for one in told
        if str(one["layerType"].astype(str)) in {"Convolution", "Deconvolution", "FullyConnected", "MatMul"}
    }
    integers = set() if "Concat<axis = 0>" in text else {"u8", "i8"}  # it joins integers along other axes only
    assert ran <= integers or not integers


def test_openvino_runs_the_sample_model(tmp_path):
    """All that can of a whole network runs on integers in OpenVINO, and it answers as onnxruntime does."""
    openvino = pytest.importorskip("openvino")
    folder = Path(__file__).parents[2] / "sample_models"
    result = gq.insert(folder / "digits_cnn.onnx", rules=["openvino"], data=str(folder / "digits_cnn_calib.npz"))
    result.save(tmp_path / "quant.onnx")
    compiled = openvino.Core().compile_model(tmp_path / "quant.onnx", "CPU")
    told = [op.get_rt_info() for op in compiled.get_runtime_model().get_ordered_ops()]
    ran = Counter((str(one["layerType"].astype(str)), str(one["runtimePrecision"].astype(str))) for one in told)
    assert ran["Convolution", "u8"] == 7
    assert ran["FullyConnected", "u8"] == 2
    assert ran["Concatenation", "u8"] == 1
    with np.load(folder / "digits_cnn_eval.npz") as data:
        images = data[data.files[0]][:100]
    session = onnxruntime.InferenceSession(folder / "digits_cnn.onnx", providers=["CPUExecutionProvider"])
    wanted = session.run(None, {session.get_inputs()[0].name: images})[0]
    found = compiled(images)[0]
    assert np.mean(wanted.argmax(-1) == found.argmax(-1)) >= 0.98


def scales(rules, inputs, text, folder):
    """Type, axis, scale and zero point of each quantized tensor, by its name and its first reader."""
    result, _ = quantized(rules, inputs, text, folder)
    return {(done.site.tensor.op, done.site.uses[0].op): done.params for done in result.inserted}


NET = "c = Conv(x, w, b) r = Relu(c) d = ConvTranspose(r, w3) f = Reshape(d, rows) y = MatMul(f, m)"

TYPES = {
    "tensorrt": {"x": "int8", "w": "int8 0", "r": "int8", "w3": "int8 1", "f": "int8", "m": "int8 1"},
    "qnn": {
        "x": "uint8",
        "w": "int8 0",
        "b": "int32 0",
        "r": "uint8",
        "w3": "int8 1",
        "d": "uint8",
        "m": "uint8",
        "y": "uint8",
    },
    "qnn16": {
        "x": "uint16",
        "w": "int8 0",
        "b": "int32 0",
        "r": "uint16",
        "w3": "int8 1",
        "d": "uint16",
        "m": "uint8",
        "y": "uint16",
    },
    "openvino": {"x": "uint8", "w": "int8 0", "r": "int8", "w3": "int8 1", "d": "uint8", "m": "int8 1"},
    "vitis_ai": dict.fromkeys(("x", "w", "b", "r", "w3", "d", "f", "m", "y"), "int8"),
    "generic": {"x": "int8", "w": "int8 0", "r": "int8", "w3": "int8 1", "f": "int8", "m": "int8 1"},
}


@pytest.mark.parametrize("rules", TYPES)
def test_types(rules, tmp_path):
    """Each tensor has the type and the axis that the backend takes, and what is symmetric has zero point 0."""
    found = scales(rules, IMAGE, NET, tmp_path)
    told = {name: f"{one.type.name}{'' if one.axis is None else f' {one.axis}'}" for (name, _), one in found.items()}
    assert told == TYPES[rules]
    for (name, _), one in found.items():
        if name in {"w", "w3", "b"} or rules in {"tensorrt", "vitis_ai"}:
            assert not one.zero_point.any()
        if rules == "vitis_ai":
            assert np.frexp(one.scale)[0] == 0.5
        if name.startswith("w") and rules != "vitis_ai":
            assert one.narrow


def test_qnn_smallest_range(tmp_path):
    """What is almost constant gets a range of 1e-4."""
    found = scales("qnn", IMAGE, "y = Mul(x, tiny) z = Add(y, x2)", tmp_path)
    assert found["y", "z"].scale == np.float32(1e-4 / 255)


def test_qnn_shared_bias(tmp_path):
    """A bias that two ops share is copied, and each copy has the scale of its op's input times weight."""
    found = scales("qnn", IMAGE, "t = Mul(x2, six) c = Conv(x, w, b) d = Conv(t, w3, b)", tmp_path)
    for bias, data, weight, op in (("b", "x", "w", "c"), ("b", "t", "w3", "d")):
        wanted = found[data, op].scale.astype(np.float64) * found[weight, op].scale
        np.testing.assert_allclose(found[bias, op].scale, wanted, rtol=1e-6)
    assert not np.allclose(found["b", "c"].scale, found["b", "d"].scale)


def test_qnn_relu_stays_where_a_tie_moves_its_zero_point(tmp_path):
    """Behind a Relu that shares its scale with values below 0 the zero point is above 0, and the Relu is there."""
    text = "c = Conv(x, w) r = Relu(c) j = Concat<axis = 1>(r, x2) e = Conv(j, joint)"
    result, path = quantized("qnn", IMAGE, text, tmp_path)
    by_name = {done.site.tensor.op: done.params for done in result.inserted}
    assert by_name["r"].zero_point > 0
    for name in ("x2", "j"):
        assert (by_name[name].scale, by_name[name].zero_point) == (by_name["r"].scale, by_name["r"].zero_point)
    assert "Relu" in {node.op_type for node in onnx.load(path).graph.node}
    assert (by_name["c"].scale, by_name["c"].zero_point) == (by_name["r"].scale, by_name["r"].zero_point)
    report = gq.check(path, backend="qnn")
    assert not report.findings
    assert {verdict.status for verdict in report.verdicts} == {"low"}


def test_qnn16_fixed_ranges(tmp_path):
    """A 16-bit Sigmoid has scale 1/65536 and zero point 0 behind it, a Tanh 1/32768 and 32768."""
    result, path = quantized("qnn16", IMAGE, "s = Sigmoid(x) t = Tanh(s)", tmp_path)
    found = {done.site.tensor.op: done.params for done in result.inserted}
    assert (found["s"].scale, found["s"].zero_point) == (np.float32(1 / 65536), 0)
    assert (found["t"].scale, found["t"].zero_point) == (np.float32(1 / 32768), 32768)
    assert {verdict.status for verdict in gq.check(path, backend="qnn").verdicts} == {"low"}


@pytest.mark.parametrize("rules", ["tensorrt", "qnn", "openvino", "vitis_ai"])
def test_concat_has_one_scale(rules, tmp_path):
    """All inputs of a Concat and its output share scale and zero point, a constant and what was moved before too."""
    text = "f = Transpose<perm = [0, 1, 3, 2]>(x) r = Relu(x2) j = Concat<axis = 1>(f, r, token) e = Conv(j, triple)"
    found = scales(rules, IMAGE, text, tmp_path)
    parts = [one for (name, _), one in found.items() if name in {"x", "f", "r", "token", "j"} and one.scale.ndim == 0]
    assert len(parts) == (5 if rules == "vitis_ai" else 4)
    assert len({(float(one.scale), int(one.zero_point)) for one in parts}) == 1


def test_every_rule_says_why():
    """Each rule of a shipped file gives its reason, a sentence for people."""
    for name in shipped():
        for bound in load_ruleset([name]).rules:
            assert len(bound.rule.why.split()) > 4, (name, bound.rule.name)

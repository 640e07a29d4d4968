"""Placement by the rules of QNN, OpenVINO and Vitis AI in small nets, and OpenVINO running them."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from nets import GELU, HEADS, IMAGE, MASKED, NORM, ROWS

import graphquant as gq

CASES = {
    "conv-with-bias": (
        IMAGE,
        "c = Conv(x, w, b) s = Sin(c)",
        ("b>c c>s w>c x>c", "c"),
        ("w>c x>c", "c"),
        ("b>c c>s w>c x>c", "c"),
    ),
    "conv-relu": (
        IMAGE,
        "c = Conv(x, w) r = Relu(c) s = Sin(r)",
        ("r>s w>c x>c", "c r"),
        ("w>c x>c", "c r"),
        ("r>s w>c x>c", "c r"),
    ),
    "conv-clip": (
        IMAGE,
        "c = Conv(x, w) r = Clip(c, zero, six) s = Sin(r)",
        ("r>s w>c x>c", "c r"),
        ("w>c x>c", "c r"),
        ("r>s w>c x>c", "c r"),
    ),
    "conv-relu-with-another-reader": (
        IMAGE,
        "c = Conv(x, w) r = Relu(c) s = Sin(c)",
        ("c>r+s r>@r w>c x>c", "c r"),
        ("w>c x>c", "c"),
        ("c>r+s r>@r w>c x>c", "c r"),
    ),
    "conv-leaky-relu": (
        IMAGE,
        "c = Conv(x, w) r = LeakyRelu(c)",
        ("c>r r>@r w>c x>c", "c r"),
        ("w>c x>c", "c r"),
        ("r>@r w>c x>c", "c r"),
    ),
    "conv-prelu": (
        IMAGE,
        "c = Conv(x, w) r = PRelu(c, slope)",
        ("c>r r>@r w>c x>c", "c r"),
        ("w>c x>c", "c r"),
        ("r>@r w>c x>c", "c r"),
    ),
    "conv-transpose-relu": (
        IMAGE,
        "c = ConvTranspose(x, w, b) r = Relu(c)",
        ("b>c r>@r w>c x>c", "c r"),
        ("w>c x>c", "c r"),
        ("b>c r>@r w>c x>c", "c r"),
    ),
    "conv-transpose-clip": (
        IMAGE,
        "c = ConvTranspose(x, w) r = Clip(c, zero, six)",
        ("c>r r>@r w>c x>c", "c r"),
        ("w>c x>c", "c r"),
        ("r>@r w>c x>c", "c r"),
    ),
    "depthwise": (
        IMAGE,
        "c = Conv<group = 16>(x, deep)",
        ("c>@c deep>c x>c", "c"),
        ("deep>c x>c", "c"),
        ("c>@c deep>c x>c", "c"),
    ),
    "conv-batchnorm-relu": (
        IMAGE,
        "c = Conv(x, w) n = BatchNormalization(c, b, b, b, var) r = Relu(n)",
        ("c/bias_folded>c c/weight_folded>c r>@r x>c", "c r"),
        ("c/weight_folded>c x>c", "c r"),
        ("c/bias_folded>c c/weight_folded>c r>@r x>c", "c r"),
    ),
    "matmul-relu": (
        ROWS,
        "y = MatMul(t, m) r = Relu(y)",
        ("m>y r>@r t>y y>r", "y r"),
        ("m>y t>y", "y r"),
        ("m>y r>@r t>y", "y r"),
    ),
    "matmul-bias-matmul": (
        ROWS,
        "y = MatMul(t, m) a = Add(y, b32) z = MatMul(a, m2)",
        ("a>z b32>a m2>z m>y t>y y>a z>@z", "y a z"),
        ("a>z m2>z m>y t>y", "y z"),
        ("a>z b32>a m2>z m>y t>y y>a z>@z", "y a z"),
    ),
    "gemm-relu": (
        ROWS,
        "y = Gemm(t, m, b32) r = Relu(y)",
        ("b32>y m>y r>@r t>y", "y r"),
        ("m>y t>y", "y r"),
        ("b32>y m>y r>@r t>y", "y r"),
    ),
    "matmul-of-activations": (
        "float[2,8,16] t, float[2,16,8] u",
        "y = MatMul(t, u)",
        ("t>y u>y y>@y", "y"),
        ("t>y u>y", "y"),
        ("t>y u>y y>@y", "y"),
    ),
    "shared-bias": (
        IMAGE,
        "c = Conv(x, w, b) d = Conv(x2, w3, b) y = Add(c, d)",
        ("b>c b>d c>y d>y w3>d w>c x2>d x>c y>@y", "c d y"),
        ("c>y d>y w3>d w>c x2>d x>c", "c d y"),
        ("b>c+d c>y d>y w3>d w>c x2>d x>c y>@y", "c d y"),
    ),
    "add-relu": (
        IMAGE,
        "y = Add(x, x2) r = Relu(y)",
        ("r>@r x2>y x>y", "y r"),
        ("x2>y x>y", "y"),
        ("r>@r x2>y x>y", "y r"),
    ),
    "add-constant": (IMAGE, "y = Add(x, k)", ("k>y x>y y>@y", "y"), ("k>y x>y", "y"), ("k>y x>y y>@y", "y")),
    "mul-sub-div": (
        IMAGE,
        "y = Mul(x, x2) z = Sub(y, x2) d = Div(z, x2)",
        ("d>@d x2>y+z+d x>y y>z z>d", "y z d"),
        ("x2>y+z+d x>y y>z z>d", "y z d"),
        ("x2>y x>y y>z", "y"),
    ),
    "max-min-pow": (
        IMAGE,
        "y = Max(x, x2) z = Min(y, x2) p = Pow(z, two)",
        ("p>@p two>p x2>y+z x>y y>z z>p", "y z p"),
        ("x2>y+z x>y y>z", "y z"),
        ("", ""),
    ),
    "sigmoid-tanh": (IMAGE, "y = Sigmoid(x) z = Tanh(y)", ("x>y y>z z>@z", "y z"), ("", ""), ("", "")),
    "softmax": (IMAGE, "y = Softmax(x)", ("x>y y>@y", "y"), ("", ""), ("", "")),
    "sin-erf": (IMAGE, "y = Sin(x) z = Erf(y)", ("", ""), ("", ""), ("", "")),
    "reductions": (
        IMAGE,
        "y = ReduceMean(x, axes) z = ReduceSum(y, axes) r = ReduceMax(z, axes) c = Conv(r, w)",
        ("c>@c r>c w>c x>y y>z z>r", "y z r c"),
        ("w>c x>y y>z z>r", "y z r c"),
        ("c>@c r>c w>c", "c"),
    ),
    "layernorm-and-instancenorm": (
        IMAGE,
        "y = LayerNormalization<axis = 1>(x, token, token) z = InstanceNormalization(y, b, b)",
        ("x>y y>z z>@z", "y z"),
        ("x>y y>z", "y z"),
        ("", ""),
    ),
    "concat": (
        IMAGE,
        "c = Conv(x, w) d = Conv(x2, w3) r = Relu(d) j = Concat<axis = 1>(c, r) e = Conv(j, joint)",
        ("c>j d>r e>@e j>e joint>e r>j w3>d w>c x2>d x>c", "c d r j e"),
        ("c>j j>e joint>e r>j w3>d w>c x2>d x>c", "c d r j e"),
        ("c>j e>@e j>e joint>e r>j w3>d w>c x2>d x>c", "c d r j e"),
    ),
    "concat-along-the-batch": (
        IMAGE,
        "j = Concat<axis = 0>(x, token) e = Conv(j, w)",
        ("e>@e j>e token>j w>e x>j", "j e"),
        ("j>e token>j w>e x>j", ""),
        ("e>@e j>e token>j w>e x>j", "j e"),
    ),
    "concat-before-a-float-op": (
        IMAGE,
        "j = Concat<axis = 1>(x, x2) s = Sin(j)",
        ("j>s x2>j x>j", "j"),
        ("j>s x2>j x>j", "j"),
        ("j>s x2>j x>j", "j"),
    ),
    "concat-of-what-was-moved": (
        IMAGE,
        "f = Transpose<perm = [0, 1, 3, 2]>(x) j = Concat<axis = 1>(f, x2) e = Conv(j, joint)",
        ("e>@e j>e joint>e x2>j x>f", "f j e"),
        ("j>e joint>e x2>j x>f", "f j e"),
        ("e>@e f>j j>e joint>e x2>j x>f", "f j e"),
    ),
    "reshape": (
        IMAGE,
        "c = Conv(x, w) f = Reshape(c, flatten) s = Sin(f)",
        ("c>f w>c x>c", "c f"),
        ("w>c x>c", "c"),
        ("c>f f>s w>c x>c", "c f"),
    ),
    "transpose-unsqueeze-squeeze": (
        IMAGE,
        "f = Transpose<perm = [0, 1, 3, 2]>(x) g = Unsqueeze(f, one) h = Squeeze(g, one) c = Conv(h, w)",
        ("c>@c w>c x>f", "f g h c"),
        ("w>c x>f", "f g h c"),
        ("c>@c f>g g>h h>c w>c x>f", "f c"),
    ),
    "max-pool": (
        IMAGE,
        "p = MaxPool<kernel_shape = [2, 2]>(x) c = Conv(p, w) y = Add(p, c)",
        ("c>y w>c x>p y>@y", "p c y"),
        ("c>y w>c x>p", "p c y"),
        ("c>y p>c+y w>c x>p y>@y", "p c y"),
    ),
    "average-pools": (
        IMAGE,
        "p = AveragePool<kernel_shape = [2, 2]>(x) g = GlobalAveragePool(p)",
        ("g>@g p>g x>p", "p g"),
        ("p>g x>p", "p g"),
        ("g>@g p>g x>p", "p g"),
    ),
    "pool-relu": (
        IMAGE,
        "c = Conv(x, w) p = MaxPool<kernel_shape = [2, 2]>(c) r = Relu(p)",
        ("c>p r>@r w>c x>c", "c p r"),
        ("w>c x>c", "c"),
        ("c>p r>@r w>c x>c", "c p r"),
    ),
    "split": (
        IMAGE,
        "a, e = Split<axis = 1, num_outputs = 2>(x) y = Mul(a, e)",
        ("x>a y>@y", "a y"),
        ("x>a", "a y"),
        ("a>y a>y y>@y", "y"),
    ),
    "pad": (
        IMAGE,
        "p = Pad(x, border) c = Conv(p, w)",
        ("c>@c w>c x>p", "p c"),
        ("w>c x>p", "p c"),
        ("c>@c p>c w>c x>p", "p c"),
    ),
    "flatten-tile-expand-depth-to-space": (
        IMAGE,
        "f = Flatten(x) g = Tile(f, ones) h = Expand(g, big) d = DepthToSpace<blocksize = 2>(x)",
        ("x>f+d", "f g h d"),
        ("", ""),
        ("f>g x>f", "f"),
    ),
    "linear-resize": (
        IMAGE,
        'y = Resize<mode = "linear">(x, , sizes) c = Conv(y, w)',
        ("c>@c w>c x>y y>c", "y c"),
        ("w>c x>y y>c", "y c"),
        ("c>@c w>c y>c", "c"),
    ),
    "nearest-resize": (
        IMAGE,
        'y = Resize<mode = "nearest">(x, , sizes) c = Conv(y, w)',
        ("c>@c w>c x>y y>c", "y c"),
        ("w>c x>y", "y c"),
        ("c>@c w>c y>c", "c"),
    ),
    "cubic-resize": (
        IMAGE,
        'y = Resize<mode = "cubic">(x, , sizes) c = Conv(y, w)',
        ("c>@c w>c x>y y>c", "y c"),
        ("w>c y>c", "c"),
        ("c>@c w>c y>c", "c"),
    ),
    "embedding": (
        "int64[1,3] ids",
        "e = Gather(table, ids) y = MatMul(e, m)",
        ("m>y table>e y>@y", "e y"),
        ("e>y m>y", "y"),
        ("e>y m>y y>@y", "y"),
    ),
    "lstm": ("float[3,2,16] t", "y = LSTM<hidden_size = 8>(t, lw, lr)", ("", ""), ("", ""), ("", "")),
    "attention": (
        HEADS,
        "o = Transpose<perm = [0, 2, 1]>(kk) s = MatMul(q, o) p = Softmax(s) y = MatMul(p, u)",
        ("kk>o p>y q>s s>p u>y y>@y", "o s p y"),
        ("kk>o p>y q>s u>y", "o s y"),
        ("kk>o o>s p>y q>s s>p u>y y>@y", "o s y"),
    ),
    "conv-silu": (
        IMAGE,
        "c = Conv(x, w) s = Sigmoid(c) y = Mul(c, s) d = Conv(y, w3)",
        ("c>s+y d>@d s>y w3>d w>c x>c y>d", "c s y d"),
        ("w3>d w>c x>c y>d", "c d"),
        ("c>s+y d>@d s>y w3>d w>c x>c y>d", "c y d"),
    ),
    "gelu-erf": (
        "float[1,5,16] t",
        f"a = MatMul(t, m) {GELU['erf'].format('a')} z = MatMul(y, m2)",
        ("a>d+g d>e e>f f>g g>y half>y m2>z m>a one_f>f root>d t>a y>z z>@z", "a d f g y z"),
        ("m2>z m>a t>a y>z", "a z"),
        ("a>d+g m2>z m>a t>a y>z z>@z", "a z"),
    ),
    "gelu-erf-halved-first": (
        "float[1,5,16] t",
        f"a = MatMul(t, m) {GELU['erf-halved-first'].format('a')} z = MatMul(y, m2)",
        ("a>d+g d>e e>f f>y g>y half>g m2>z m>a one_f>f root>d t>a y>z z>@z", "a d f g y z"),
        ("m2>z m>a t>a y>z", "a z"),
        ("a>d+g m2>z m>a t>a y>z z>@z", "a z"),
    ),
    "gelu-tanh": (
        "float[1,5,16] t",
        f"a = MatMul(t, m) {GELU['tanh'].format('a')} z = MatMul(y, m2)",
        (
            "a>c+e+h c>d cubed>d d>e e>f f>th h>y half>h m2>z m>a o>y one_f>o pi_root>f t>a th>o three>c y>z z>@z",
            "a c d e f th o h y z",
        ),
        ("m2>z m>a t>a y>z", "a z"),
        ("a>c+e+h m2>z m>a t>a y>z z>@z", "a z"),
    ),
    "gelu-tanh-halved-last": (
        "float[1,5,16] t",
        f"a = MatMul(t, m) {GELU['tanh-halved-last'].format('a')} z = MatMul(y, m2)",
        (
            "a>c+e+g c>d cubed>d d>e e>f f>th g>y half>y m2>z m>a o>g one_f>o pi_root>f t>a th>o three>c y>z z>@z",
            "a c d e f th o g y z",
        ),
        ("m2>z m>a t>a y>z", "a z"),
        ("a>c+e+g m2>z m>a t>a y>z z>@z", "a z"),
    ),
    "decomposed-layernorm": (
        IMAGE,
        "c = Conv(x, w)" + NORM + " o = Conv(y, w3)",
        ("c>mu+d o>@o w3>o w>c x>c y>o", "c o"),
        ("c>mu+d w3>o w>c x>c y>o", "c mu o"),
        ("c>mu+d o>@o w3>o w>c x>c y>o", "c o"),
    ),
    "decomposed-layernorm-scaled": (
        IMAGE,
        "c = Conv(x, w)" + NORM + " g = Mul(y, k) z = Add(g, k) o = Conv(z, w3)",
        ("c>mu+d o>@o w3>o w>c x>c z>o", "c o"),
        ("c>mu+d w3>o w>c x>c z>o", "c mu o"),
        ("c>mu+d o>@o w3>o w>c x>c z>o", "c o"),
    ),
    "masked-attention": (
        "float[1,64,16] q, float[1,64,16] kk, float[1,64,16] u, float[1,64,64] mask",
        MASKED,
        ("half>d kk>o p>y q>s s>d u>y y>@y", "o s y"),
        ("d>a kk>o mask>a p>y q>s u>y", "o s a y"),
        ("half>d kk>o o>s p>y q>s s>d u>y y>@y", "o s y"),
    ),
    "gru": ("float[3,2,16] t", "y = GRU<hidden_size = 8>(t, gw, gr)", ("", ""), ("", ""), ("", "")),
    "depthwise-clip": (
        IMAGE,
        "c = Conv<group = 16>(x, deep) r = Clip(c, zero, six)",
        ("deep>c r>@r x>c", "c r"),
        ("deep>c x>c", "c r"),
        ("deep>c r>@r x>c", "c r"),
    ),
    "add-of-three": (
        IMAGE,
        "y = Add(x, x2) z = Add(y, k) r = LeakyRelu(z)",
        ("k>z r>@r x2>y x>y y>z z>r", "y z r"),
        ("k>z x2>y x>y y>z", "y z"),
        ("k>z r>@r x2>y x>y y>z", "y z r"),
    ),
    "matmul-of-what-was-moved": (
        "float[1,32,16] q, float[1,32,16] kk",
        "o = Transpose<perm = [0, 2, 1]>(kk) s = MatMul(q, o)",
        ("kk>o q>s s>@s", "o s"),
        ("kk>o q>s", "o s"),
        ("kk>o o>s q>s s>@s", "o s"),
    ),
}
"""Inputs, the net, and for each backend what is quantized for which readers, and which ops then run on integers."""

BACKENDS = ("qnn", "openvino", "vitis_ai")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_placement(case, backend, placed):
    """The rules quantize just these tensors for just these readers, and `check` agrees that the ops run on integers."""
    inputs, text, *columns = CASES[case]
    placed(backend, inputs, text, *columns[BACKENDS.index(backend)])


@pytest.mark.parametrize("case", CASES)
def test_openvino_runs(case, quantize_net):
    """OpenVINO itself loads each net, and runs its convolutions and matrix products on integers."""
    openvino = pytest.importorskip("openvino")
    inputs, text, *_ = CASES[case]
    _, path = quantize_net("openvino", inputs, text)
    core, asked = openvino.Core(), {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(core.read_model(path), "CPU", asked)
    told = [op.get_rt_info() for op in compiled.get_runtime_model().get_ordered_ops()]
    ran = {
        str(one["runtimePrecision"].astype(str))
        for one in told
        if str(one["layerType"].astype(str)) in {"Convolution", "Deconvolution", "FullyConnected", "MatMul"}
    }
    # a constant part is float to OpenVINO, and so is all behind it on some processors
    is_joined = "Concat<axis = 0>(x, token)" in text
    assert ran <= {"u8", "i8"} | ({"f32"} if is_joined else set())


def test_openvino_runs_the_sample_model(tmp_path):
    """All that can of a whole network runs on integers in OpenVINO, and it answers as onnxruntime does."""
    openvino = pytest.importorskip("openvino")
    folder = Path(__file__).parents[3] / "sample_models"
    result = gq.insert(
        folder / "digits_cnn.onnx", rules=["openvino"], data=str(folder / "digits_cnn_calib.npz"), validate=False
    )
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
def test_types(rules, scales):
    """Each tensor has the type and the axis that the backend takes, and what is symmetric has zero point 0."""
    found = scales(rules, IMAGE, NET)
    told = {name: f"{one.type.name}{'' if one.axis is None else f' {one.axis}'}" for (name, _), one in found.items()}
    assert told == TYPES[rules]
    for (name, _), one in found.items():
        if name in {"w", "w3", "b"} or rules in {"tensorrt", "vitis_ai"}:
            assert not one.zero_point.any()
        if rules == "vitis_ai":
            assert np.frexp(one.scale)[0] == 0.5
        if name.startswith("w") and rules != "vitis_ai":
            assert one.narrow


def test_qnn_smallest_range(scales):
    """An almost constant tensor gets a range of 1e-4."""
    found = scales("qnn", IMAGE, "y = Mul(x, tiny) z = Add(y, x2)")
    assert found["y", "z"].scale == np.float32(1e-4 / 255)


def test_qnn_shared_bias(scales):
    """A bias that two ops share is copied, and each copy has the scale of its op's input times weight."""
    found = scales("qnn", IMAGE, "t = Mul(x2, six) c = Conv(x, w, b) d = Conv(t, w3, b)")
    for bias, data, weight, op in (("b", "x", "w", "c"), ("b", "t", "w3", "d")):
        wanted = found[data, op].scale.astype(np.float64) * found[weight, op].scale
        np.testing.assert_allclose(found[bias, op].scale, wanted, rtol=1e-6)
    assert not np.allclose(found["b", "c"].scale, found["b", "d"].scale)


def test_qnn_relu_stays_where_a_tie_moves_its_zero_point(quantize_net):
    """Behind a Relu that shares its scale with values below 0 the zero point is above 0, and the Relu is there."""
    text = "c = Conv(x, w) r = Relu(c) j = Concat<axis = 1>(r, x2) e = Conv(j, joint)"
    result, path = quantize_net("qnn", IMAGE, text)
    by_name = {done.site.tensor.op: done.params for done in result.inserted}
    assert by_name["r"].zero_point > 0
    for name in ("x2", "j"):
        assert (by_name[name].scale, by_name[name].zero_point) == (by_name["r"].scale, by_name["r"].zero_point)
    assert "Relu" in {node.op_type for node in onnx.load(path).graph.node}
    assert (by_name["c"].scale, by_name["c"].zero_point) == (by_name["r"].scale, by_name["r"].zero_point)
    report = gq.check(path, backend="qnn")
    assert not report.findings
    assert {verdict.status for verdict in report.verdicts} == {"int8"}


def test_qnn16_fixed_ranges(quantize_net):
    """A 16-bit Sigmoid has scale 1/65536 and zero point 0 behind it, a Tanh 1/32768 and 32768."""
    result, path = quantize_net("qnn16", IMAGE, "s = Sigmoid(x) t = Tanh(s)")
    found = {done.site.tensor.op: done.params for done in result.inserted}
    assert (found["s"].scale, found["s"].zero_point) == (np.float32(1 / 65536), 0)
    assert (found["t"].scale, found["t"].zero_point) == (np.float32(1 / 32768), 32768)
    assert {verdict.status for verdict in gq.check(path, backend="qnn").verdicts} == {"int8"}


@pytest.mark.parametrize("rules", ["tensorrt", "qnn", "openvino", "vitis_ai"])
def test_concat_has_one_scale(rules, scales):
    """All inputs of a Concat and its output share scale and zero point, a constant and what was moved before too."""
    text = "f = Transpose<perm = [0, 1, 3, 2]>(x) r = Relu(x2) j = Concat<axis = 1>(f, r, token) e = Conv(j, triple)"
    found = scales(rules, IMAGE, text)
    parts = [one for (name, _), one in found.items() if name in {"x", "f", "r", "token", "j"} and one.scale.ndim == 0]
    assert len(parts) == (5 if rules == "vitis_ai" else 4)
    assert len({(float(one.scale), int(one.zero_point)) for one in parts}) == 1

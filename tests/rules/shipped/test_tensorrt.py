"""Placement by the TensorRT rules in small nets: one for each rule and each exclusion."""

import pytest
from nets import GELU, HEADS, IMAGE, MASKED, NORM, ROWS

CASES = {
    "conv": (IMAGE, "c = Conv(x, w, b)", "w>c x>c", "c"),
    "conv-relu-conv": (IMAGE, "c = Conv(x, w) r = Relu(c) d = Conv(r, w3)", "r>d w3>d w>c x>c", "c r d"),
    "conv-transpose": (IMAGE, "c = ConvTranspose(x, w)", "w>c x>c", "c"),
    "matmul-with-unknown-rows": ("float[N,16] t", "y = MatMul(t, m)", "m>y t>y", "y"),
    "gemm": (ROWS, "y = Gemm(t, m, b32)", "m>y t>y", "y"),
    "conv-batchnorm-relu": (
        IMAGE,
        "c = Conv(x, w) n = BatchNormalization(c, b, b, b, var) r = Relu(n) d = Conv(r, w3)",
        "r>d w3>d w>c x>c",
        "c n r d",
    ),
    "conv-batchnorm-silu": (
        IMAGE,
        "c = Conv(x, w) n = BatchNormalization(c, b, b, b, var) s = Sigmoid(n) y = Mul(n, s) d = Conv(y, w3)",
        "w3>d w>c x>c y>d",
        "c n d",
    ),
    "conv-activation-pool": (
        IMAGE,
        "c = Conv(x, w) r = Relu(c) p = MaxPool<kernel_shape = [2, 2]>(r) d = Conv(p, w3)",
        "p>d w3>d w>c x>c",
        "c r d",
    ),
    "residual-without-downsample": (
        IMAGE,
        "c = Conv(x, w) r = Relu(c) d = Conv(r, w3) y = Add(r, d)",
        "r>d+y w3>d w>c x>c",
        "c r d y",
    ),
    "residual-with-activation-before-the-sum": (
        IMAGE,
        "c = Conv(x, w) r = Relu(c) d = Conv(r, w3) e = Relu(d) y = Add(e, r)",
        "r>d+y w3>d w>c x>c",
        "c r d e y",
    ),
    "residual-batchnorm-branch": (
        IMAGE,
        "f = Sin(x) c = Conv(f, w) n = BatchNormalization(c, b, b, b, var) y = Add(f, n)",
        "f>c+y w>c",
        "c n y",
    ),
    "residual-batchnorm-activation-branch": (
        IMAGE,
        "f = Sin(x) c = Conv(f, w) n = BatchNormalization(c, b, b, b, var) r = Relu(n) y = Add(r, f)",
        "f>c+y w>c",
        "c n r y",
    ),
    "residual-with-downsample-first": (
        IMAGE,
        "f = Sin(x) c = Conv(f, w) r = Relu(c) d = Conv<pads = [1, 1, 1, 1]>(r, w2) e = Conv(f, w3) y = Add(e, d)",
        "e>y f>c+e r>d w2>d w3>e w>c",
        "c r d e y",
    ),
    "residual-with-downsample-second": (
        IMAGE,
        "f = Sin(x) c = Conv(f, w) r = Relu(c) d = Conv<pads = [1, 1, 1, 1]>(r, w2) e = Conv(f, w3) y = Add(d, e)",
        "e>y f>c+e r>d w2>d w3>e w>c",
        "c r d e y",
    ),
    "residual-of-two-equal-branches": (
        IMAGE,
        "f = Sin(x) c = Conv(f, w) d = Conv(f, w3) y = Add(c, d)",
        "d>y f>c+d w3>d w>c",
        "c d y",
    ),
    "residual-of-conv-transpose": (IMAGE, "f = Sin(x) c = ConvTranspose(f, w) y = Add(f, c)", "f>c+y w>c", "c y"),
    "sum-with-a-conv-read-elsewhere": (IMAGE, "c = Conv(x, w) s = Sin(c) y = Add(c, x2)", "w>c x>c", "c"),
    "sum-with-its-own-ancestor-as-in-convnext": (
        IMAGE,
        "c = Conv(x, w) g = Relu(c) e = Conv(g, w3) f = Sin(e) h = Mul(f, k) y = Add(c, h)",
        "g>e w3>e w>c x>c",
        "c e",
    ),
    "sum-with-a-constant": (IMAGE, "c = Conv(x, w) y = Add(c, k)", "w>c x>c", "c"),
    "sum-without-convs": (IMAGE, "y = Add(x, x2)", "", ""),
    "concat-before-a-conv": (
        IMAGE,
        "c = Conv(x, w) d = Conv(x, w3) j = Concat<axis = 1>(c, d) e = Conv(j, joint) s = Sin(j)",
        "c>j d>j j>e+s joint>e w3>d w>c x>c+d",
        "c d j e",
    ),
    "concat-before-a-float-op": (IMAGE, "j = Concat<axis = 1>(x, x2) s = Sin(j)", "", ""),
    "layernorm-behind-a-conv": (
        IMAGE,
        "c = Conv(x, w) l = LayerNormalization<axis = 1>(c, token, token)",
        "c>l w>c x>c",
        "c",
    ),
    "decomposed-layernorm-behind-a-conv": (
        IMAGE,
        "c = Conv(x, w)" + NORM,
        "c>mu+d w>c x>c",
        "c",
    ),
    "decomposed-layernorm-elsewhere": (
        IMAGE,
        "c = Relu(x)" + NORM,
        "",
        "",
    ),
    "layernorm-elsewhere": (IMAGE, "f = Relu(x) l = LayerNormalization<axis = 1>(f, token, token)", "", ""),
    "masked-attention": (
        "float[1,64,16] q, float[1,64,16] kk, float[1,64,16] u, float[1,64,64] mask",
        MASKED,
        "o>s p>y q>s u>y",
        "s y",
    ),
    "attention-of-more-than-512-places": (
        "float[1,513,16] q, float[1,513,16] kk, float[1,513,16] u, float[1,513,513] mask",
        MASKED,
        "",
        "",
    ),
    "attention": (
        HEADS,
        "o = Transpose<perm = [0, 2, 1]>(kk) s = MatMul(q, o) p = Softmax(s) y = MatMul(p, u)",
        "o>s p>y q>s u>y",
        "s y",
    ),
    "gelu-by-erf": (
        "float[1,4,16] t",
        "a = MatMul(t, m) d = Div(a, root) e = Erf(d) f = Add(e, two) g = Mul(a, f) h = Mul(g, half) y = MatMul(h, m2)",
        "h>y m2>y m>a t>a",
        "a y",
    ),
    "matrix-by-vector": ("float[1,16] t", "y = MatMul(t, m)", "", ""),
    "gemm-by-vector": ("float[1,16] t", "y = Gemm(t, m, b32)", "", ""),
    "few-columns": (ROWS, "y = MatMul(t, narrow)", "", ""),
    "few-rows-summed-over": ("float[2,8] t", "y = MatMul(t, short)", "", ""),
    "conv-of-few-outputs": (IMAGE, "f = Sin(x) c = Conv(f, few)", "", ""),
    "first-conv-of-8-outputs": (IMAGE, "c = Conv(x, few)", "few>c x>c", "c"),
    "grouped-conv-of-16-inputs": (IMAGE, "f = Sin(x) c = Conv<group = 2>(f, thin)", "f>c thin>c", "c"),
    "first-conv-of-8-inputs": ("float[1,8,4,4] t", "c = Conv(t, thin)", "t>c thin>c", "c"),
    "conv-of-8-inputs": ("float[1,8,4,4] t", "f = Sin(t) c = Conv(f, thin)", "", ""),
    "first-conv-of-4-inputs": ("float[1,4,4,4] t", "c = Conv(t, odd)", "", ""),
    "depthwise-3x3-of-16": (IMAGE, "c = Conv<group = 16>(x, deep)", "deep>c x>c", "c"),
    "depthwise-1x1": (IMAGE, "c = Conv<group = 16>(x, flat)", "", ""),
    "depthwise-3x3-of-20": ("float[1,20,4,4] t", "c = Conv<group = 20>(t, deep20)", "", ""),
    "softmax-and-sub": (IMAGE, "s = Softmax(x) y = Sub(x, x2)", "", ""),
    "pool-alone": (IMAGE, "p = MaxPool<kernel_shape = [2, 2]>(x)", "", ""),
    "gelu-erf": (
        "float[1,5,16] t",
        f"a = MatMul(t, m) {GELU['erf'].format('a')} z = MatMul(y, m2)",
        "m2>z m>a t>a y>z",
        "a z",
    ),
    "gelu-erf-halved-first": (
        "float[1,5,16] t",
        f"a = MatMul(t, m) {GELU['erf-halved-first'].format('a')} z = MatMul(y, m2)",
        "m2>z m>a t>a y>z",
        "a z",
    ),
    "gelu-tanh": (
        "float[1,5,16] t",
        f"a = MatMul(t, m) {GELU['tanh'].format('a')} z = MatMul(y, m2)",
        "m2>z m>a t>a y>z",
        "a z",
    ),
    "gelu-tanh-halved-last": (
        "float[1,5,16] t",
        f"a = MatMul(t, m) {GELU['tanh-halved-last'].format('a')} z = MatMul(y, m2)",
        "m2>z m>a t>a y>z",
        "a z",
    ),
    "vector-by-matrix": ("float[5,16] t", "y = MatMul(t, column)", "", ""),
    "attention-of-small-heads": (
        "float[1,32,8] q, float[1,32,8] kk, float[1,32,8] u",
        "o = Transpose<perm = [0, 2, 1]>(kk) s = MatMul(q, o) p = Softmax(s) y = MatMul(p, u)",
        "",
        "",
    ),
    "attention-of-few-places": (
        "float[1,8,16] q, float[1,8,16] kk, float[1,8,16] u",
        "o = Transpose<perm = [0, 2, 1]>(kk) s = MatMul(q, o) p = Softmax(s) y = MatMul(p, u)",
        "",
        "",
    ),
    "attention-of-512-places": (
        "float[1,512,16] q, float[1,512,16] kk, float[1,512,16] u",
        "o = Transpose<perm = [0, 2, 1]>(kk) s = MatMul(q, o) p = Softmax(s) y = MatMul(p, u)",
        "o>s p>y q>s u>y",
        "s y",
    ),
    "attention-with-selected-mask": (
        "float[1,64,16] q, float[1,64,16] kk, float[1,64,16] u, bool[1,64,64] mask",
        (
            "o = Transpose<perm = [0, 2, 1]>(kk) s = MatMul(q, o) d = Mul(s, half) a = Where(mask, d, tiny) "
            "p = Softmax(a) y = MatMul(p, u)"
        ),
        "o>s p>y q>s u>y",
        "s y",
    ),
    "residual-with-downsample-and-batchnorms": (
        IMAGE,
        (
            "f = Sin(x) c = Conv<strides = [2, 2], pads = [1, 1, 1, 1]>(f, down3) "
            "n = BatchNormalization(c, b32, b32, b32, var32) r = Relu(n) "
            "d = Conv<pads = [1, 1, 1, 1]>(r, down2) o = BatchNormalization(d, b32, b32, b32, var32) "
            "e = Conv<strides = [2, 2]>(f, down) p = BatchNormalization(e, b32, b32, b32, var32) "
            "y = Add(o, p) z = Relu(y)"
        ),
        "down2>d down3>c down>e f>c+e p>y r>d",
        "c n r d o e p y",
    ),
    "residual-blocks-in-a-row": (
        IMAGE,
        "c = Conv(x, w) r = Relu(c) d = Conv(r, w3) y = Add(d, r) s = Relu(y) e = Conv(s, w) z = Add(e, s)",
        "r>d+y s>e+z w3>d w>c+e x>c",
        "c r d y e z",
    ),
    "lstm": ("float[3,2,16] t", "y = LSTM<hidden_size = 8>(t, lw, lr)", "", ""),
    "embedding": ("int64[1,3] ids", "e = Gather(table, ids) y = MatMul(e, m)", "e>y m>y", "y"),
}
"""Inputs, the net, what is quantized for which readers, and which ops then run on integers or in such an op."""


@pytest.mark.parametrize("case", CASES)
def test_placement(case, placed):
    """The rules quantize just these tensors for just these readers, and `check` agrees that the ops run on integers."""
    placed("tensorrt", *CASES[case])

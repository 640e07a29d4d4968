"""Placement by ONNX Runtime's rules in small nets, and the verdicts of `check` on the result."""

import pytest
from nets import HEADS, IMAGE, NORM, ROWS

from graphquant.rules import load_ruleset, shipped_rule_files

SHUFFLE = "s = Reshape({}, shuffle) t = Transpose<perm = [0, 2, 1, 3, 4]>(s) y = Reshape(t, image)"
"""A shuffle of channels."""

CASES = [
    # patterns: GELU, SiLU and LayerNorm as single ops stay float inside, attention does not
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
        "c>y d>@d w3>d w>c x>c y>d",
        "c d",
    ),
    (
        IMAGE,
        "c = Conv(x, w) o = Transpose<perm = [0, 1, 3, 2]>(c) s = MatMul(c, o) p = Softmax(s) y = MatMul(p, x2)",
        "c>o+s o>s p>y w>c x2>y x>c",
        "c o s y",
    ),
    # a hard swish becomes one op, and a gate of squeeze-and-excitation stays float inside
    (
        IMAGE,
        "c = Conv(x, w) a = Add(c, three) r = Clip(a, zero, six) g = Div(r, six) y = Mul(c, g) d = Conv(y, w3)",
        "c>y d>@d w3>d w>c x>c y>d",
        "c d",
    ),
    (
        IMAGE,
        "c = Conv(x, w) a = Add(c, three) r = Clip(a, zero, six) p = Mul(c, r) y = Div(p, six) d = Conv(y, w3)",
        "c>y d>@d w3>d w>c x>c y>d",
        "c d",
    ),
    (
        IMAGE,
        "c = Conv(x, w) f = Conv(x2, w) g = HardSigmoid(c) y = Mul(f, g) d = Conv(y, w3)",
        "c>g d>@d f>y w3>d w>c+f x2>f x>c y>d",
        "c f d",
    ),
    # the stem of an image network stays float with its activation and the depthwise convolution behind
    (
        IMAGE,
        "c = Conv(x, w) s = Sigmoid(c) y = Mul(c, s) d = Conv<group = 16>(y, deep) r = Relu(d) o = Conv(r, w3)",
        "o>@o r>o w3>o",
        "r o",
    ),
    (
        IMAGE,
        "c = Conv(x, w) s = Sigmoid(c) y = Mul(c, s) d = Conv<group = 16>(y, deep) t = Sin(d)",
        "d>t",
        "",
    ),
    (
        IMAGE,
        "f = Conv(x, w) c = Conv(f, w3) s = Sigmoid(c) y = Mul(c, s) d = Conv<group = 16>(y, deep)",
        "c>y d>@d deep>d f>c w3>c w>f x>f y>d",
        "f c d",
    ),
    (
        IMAGE,
        "c = Conv(x, w) r = Relu(c) d = Conv<group = 16>(r, deep)",
        "d>@d deep>d r>d w>c x>c",
        "c r d",
    ),
    # decoding of boxes behind the last convolution stays float, the same arithmetic before another one does not
    (
        IMAGE,
        "c = Conv(x, w) s = Sigmoid(c) q = Mul(s, half) a = Add(q, token) d = Mul(a, half)",
        "c>s w>c x>c",
        "c",
    ),
    (IMAGE, "c = Conv(x, w) e = Exp(c) d = Mul(e, token)", "c>e w>c x>c", "c"),
    (
        IMAGE,
        "c = Conv(x, w) q = Mul(c, k) a = Add(q, token) d = Conv(a, w3)",
        "a>d c>q d>@d k>q q>a token>a w3>d w>c x>c",
        "c q a d",
    ),
    # convolutions, and what they absorb
    (IMAGE, "c = Conv(x, w) s = Sin(c)", "c>s w>c x>c", "c"),
    (IMAGE, "c = Conv(x, w) r = Relu(c) s = Sin(r)", "r>s w>c x>c", "c r"),
    (IMAGE, "c = Conv(x, w) r = Clip(c, zero, six) s = Sin(r)", "r>s w>c x>c", "c r"),
    (IMAGE, "c = Conv(x, w) r = Relu(c) s = Sin(c)", "c>r+s w>c x>c", "c"),
    (IMAGE, "c = ConvTranspose(x, w)", "", ""),
    (
        IMAGE,
        "c = Conv(x, w) n = BatchNormalization(c, b, b, b, var) r = Relu(n)",
        "c/bias_folded>c c/weight_folded>c r>@r x>c",
        "c r",
    ),
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
    # products that several ops read: all of them read integers, or all floats
    (ROWS, "y = MatMul(t, m) a = Add(y, b32) s = Sin(y)", "m>y t>y", "y"),
    (ROWS, "y = MatMul(t, m) a = Add(y, b32) z = MatMul(y, m2)", "m2>z m>y t>y y>a+z", "y z"),
    (ROWS, "y = MatMul(t, m) s = Sin(y) z = MatMul(y, m2)", "m2>z m>y t>y y>s+z", "y z"),
    (ROWS, "y = MatMul(t, m) a = Add(y, b32) s = Sin(a) z = MatMul(a, m2)", "a>s+z b32>a m2>z m>y t>y", "y a z"),
    (ROWS, "y = MatMul(t, m) r = Relu(y) s = Sin(r) z = MatMul(r, m2)", "m2>z m>y r>s+z t>y", "y r z"),
    (
        ROWS,
        "y = MatMul(t, m) a = Add(y, b32) r = Relu(a) s = Sin(r) z = MatMul(r, m2)",
        "b32>a m2>z m>y r>s+z t>y",
        "y a r z",
    ),
    # and their Relus
    (ROWS, "y = Gemm(t, m, b32) r = Relu(y) s = Sin(r)", "b32>y m>y r>s t>y", "y r"),
    (ROWS, "y = Gemm(t, m, b32) r = Relu(y) s = Sin(y)", "b32>y m>y t>y", "y"),
    (ROWS, "y = MatMul(t, m) r = Clip(y, zero, six) s = Sin(r)", "m>y r>s t>y", "y r"),
    (ROWS, "y = MatMul(t, m) r = Clip(y, half, six) s = Sin(r)", "m>y r>s t>y y>r", "y"),
    (ROWS, "y = MatMul(t, m) a = Add(y, b32) r = Relu(a) s = Sin(r)", "b32>a m>y r>s t>y", "y a r"),
    (ROWS, "y = MatMul(t, m) a = Add(y, b32) r = Clip(a, zero, six) g = Mul(y, r)", "m>y t>y", "y"),
    (
        ROWS,
        "y = MatMul(t, m) v = MatMul(t, m) o = Transpose<perm = [1, 0]>(v) z = MatMul(o, y) s = Sin(y)",
        "m>y+v o>z t>y+v y>z+s",
        "y v o z",
    ),
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
    # the power of a spectrum: what is squared stays float
    (IMAGE, "c = Conv(x, w) h = Slice(c, one, eight, one) y = Pow(h, two)", "", ""),
    (
        IMAGE,
        (
            "c = Conv(x, w) h = Slice(c, one, eight, one) r = Slice(h, one, eight, one) s = Slice(r, one, eight, one)"
            " f = Cast<to = 1>(s) y = Pow(f, two)"
        ),
        "",
        "",
    ),
    (IMAGE, "c = Conv(x, w) h = Slice(c, one, eight, one) y = Sin(h)", "c>h h>y w>c x>c", "c h"),
    # both squares of a spectrum from two convolutions, before a root and a logarithm with a limit
    (
        IMAGE,
        (
            "c = Conv(x, w) d = Conv(x, w3) s = Mul(c, c) u = Mul(d, d) p = Add(s, u) r = Sqrt(p) q = Pow(r, two)"
            " f = Max(half, q) y = Log(f)"
        ),
        "",
        "",
    ),
    # a transform in two steps, whose parts are sums of two products; an epsilon is added to one of the squares
    (
        ROWS,
        (
            "a = MatMul(t, m) v = MatMul(t, m) c = Sub(a, v) d = Add(a, v) s = Mul(c, c) u = Mul(d, d)"
            " e = Add(half, u) p = Add(s, e) r = Transpose<perm = [1, 0]>(p) q = Unsqueeze(r, one) y = Sqrt(q)"
        ),
        "",
        "",
    ),
    # a filter of magnitudes under a logarithm
    (ROWS, "f = MatMul(t, m) e = Add(f, half) y = Log(e)", "", ""),
    # a logarithm of an exponential is none
    (
        IMAGE,
        "c = Conv(x, w) e = Exp(c) a = Add(e, half) y = Log(a) z = Conv(y, w3)",
        "c>e w3>z w>c x>c y>z z>@z",
        "c z",
    ),
    (IMAGE, "c = Conv(x, w) s = Sum(c, x2) z = Conv(s, w3)", "c>s s>z w3>z w>c x>c z>@z", "c z"),
    # masks of attention: the sum with one stays float, and so do the scores before it
    (
        "float[1,2,16,16] q, float[1,2,16,16] kk, float[1,2,16,16] u, float[1,1,16,16] mask",
        "s = MatMul(q, kk) d = Mul(s, half) a = Add(d, mask) p = Softmax(a) y = MatMul(p, u)",
        "kk>s p>y q>s u>y",
        "s y",
    ),
    (
        "float[1,2,16,16] q, float[1,2,16,16] kk, float[1,2,16,16] u, bool[1,1,16,16] mask",
        "s = MatMul(q, kk) d = Mul(s, half) a = Where(mask, d, tiny) p = Softmax(a) y = MatMul(p, u)",
        "kk>s p>y q>s u>y",
        "s y",
    ),
    (
        "float[1,2,16,16] q, float[1,2,16,16] kk, float[1,2,16,16] u, float[1,1,16,16] mask",
        (
            "s = MatMul(q, kk) d = Mul(s, half) a = Sub(d, mask) t = Transpose<perm = [0, 2, 1, 3]>(a) p = Softmax(t)"
            " v = Transpose<perm = [0, 2, 1, 3]>(p) y = MatMul(v, u)"
        ),
        "kk>s q>s u>y v>y",
        "s t v y",
    ),
    (
        IMAGE,
        (
            "c = Conv(x, w) a = Pow(c, three) d = Mul(a, half) e = Add(c, d) f = Mul(e, half) h = Tanh(f)"
            " o = Add(h, two) g = Mul(c, o) y = Mul(g, half) z = Conv(y, w3)"
        ),
        "c>a+e+g w3>z w>c x>c y>z z>@z",
        "c z",
    ),
]
"""Inputs, the net, what is quantized for which readers, and which ops then run on integers or in such an op."""


@pytest.mark.parametrize(("inputs", "text", "found", "runs"), CASES)
def test_placement(inputs, text, found, runs, placed):
    """The rules quantize just these tensors for just these readers, and `check` agrees that the ops run on integers."""
    placed("onnxruntime", inputs, text, found, runs)


def test_every_rule_says_why():
    """Each rule of a shipped file gives its reason, a sentence for people."""
    for name in shipped_rule_files():
        for bound in load_ruleset([name]).rules:
            assert len(bound.rule.why.split()) > 4, (name, bound.rule.name)

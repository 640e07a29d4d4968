"""Texts that nets of several tests are written in; `conftest.py` has the constants that they read."""

IMAGE = "float[1,16,8,8] x, float[1,16,8,8] x2"

ROWS = "float[2,16] t"

HEADS = "float[1,32,16] q, float[1,32,16] kk, float[1,32,16] u"

GELU = {
    "erf": "d = Div({0}, root) e = Erf(d) f = Add(e, one_f) g = Mul({0}, f) y = Mul(g, half)",
    "erf-halved-first": "d = Div({0}, root) e = Erf(d) f = Add(e, one_f) g = Mul({0}, half) y = Mul(g, f)",
    "tanh": (
        "c = Pow({0}, three) d = Mul(c, cubed) e = Add({0}, d) f = Mul(e, pi_root) th = Tanh(f) o = Add(th, one_f)"
        " h = Mul({0}, half) y = Mul(h, o)"
    ),
    "tanh-halved-last": (
        "c = Pow({0}, three) d = Mul(c, cubed) e = Add({0}, d) f = Mul(e, pi_root) th = Tanh(f) o = Add(th, one_f)"
        " g = Mul({0}, o) y = Mul(g, half)"
    ),
    "erf-halved-last": "d = Div({0}, root) e = Erf(d) f = Add(e, one_f) g = Mul(half, f) y = Mul({0}, g)",
    "tanh-halved-inside": (
        "c = Pow({0}, three) d = Mul(c, cubed) e = Add({0}, d) f = Mul(e, pi_root) th = Tanh(f) o = Add(th, one_f)"
        " g = Mul(half, o) y = Mul({0}, g)"
    ),
}
"""The forms in which exporters write GELU."""

MASKED = (
    "o = Transpose<perm = [0, 2, 1]>(kk) s = MatMul(q, o) d = Mul(s, half) a = Add(d, mask)"
    " p = Softmax(a) y = MatMul(p, u)"
)
"""Attention with a mask."""

NORM = (
    " mu = ReduceMean(c, axes) d = Sub(c, mu) s = Pow(d, two) vr = ReduceMean(s, axes) e = Add(vr, eps)"
    " r = Sqrt(e) y = Div(d, r)"
)
"""LayerNorm as single ops."""

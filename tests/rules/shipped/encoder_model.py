"""A small encoder as exporters write BERT: embeddings, a padding mask, LayerNorm and GELU as single ops, a pooler."""

import numpy as np
import onnx
import onnx.parser

PLACES, WIDTH, INNER, WORDS = 16, 32, 64, 50

NORM = """
    mu{k} = ReduceMean<axes = [-1]>({x}) d{k} = Sub({x}, mu{k}) s{k} = Pow(d{k}, two)
    vr{k} = ReduceMean<axes = [-1]>(s{k}) e{k} = Add(vr{k}, eps) r{k} = Sqrt(e{k}) n{k} = Div(d{k}, r{k})
    g{k} = Mul(n{k}, gamma) z{k} = Add(g{k}, beta)
"""

LAYER = """
    q{k} = MatMul(z{k}, wq) qb{k} = Add(bq, q{k}) kk{k} = MatMul(z{k}, wk) kb{k} = Add(bq, kk{k})
    v{k} = MatMul(z{k}, wv) vb{k} = Add(bq, v{k})
    qh{k} = Reshape(qb{k}, heads) qt{k} = Transpose<perm = [0, 2, 1, 3]>(qh{k})
    kh{k} = Reshape(kb{k}, heads) kt{k} = Transpose<perm = [0, 2, 3, 1]>(kh{k})
    vh{k} = Reshape(vb{k}, heads) vt{k} = Transpose<perm = [0, 2, 1, 3]>(vh{k})
    sc{k} = MatMul(qt{k}, kt{k}) sd{k} = Div(sc{k}, four) sm{k} = Add(sd{k}, far) p{k} = Softmax<axis = -1>(sm{k})
    c{k} = MatMul(p{k}, vt{k}) ct{k} = Transpose<perm = [0, 2, 1, 3]>(c{k}) cr{k} = Reshape(ct{k}, rows)
    o{k} = MatMul(cr{k}, wo) ob{k} = Add(bq, o{k}) y{k} = Add(ob{k}, z{k})
    f{k} = MatMul(y{k}, wi) fb{k} = Add(bi, f{k})
    h{k} = Div(fb{k}, root) er{k} = Erf(h{k}) e1{k} = Add(er{k}, one) ge{k} = Mul(fb{k}, e1{k}) gl{k} = Mul(ge{k}, half)
    m{k} = MatMul(gl{k}, wm) mb{k} = Add(bq, m{k}) x{k} = Add(mb{k}, y{k})
"""

TEXT = """<ir_version: 8, opset_import: ["": 13]>
net (int64[batch, 16] ids, int64[batch, 16] mask) => (float y) {
    word = Gather(table, ids) x = Add(word, position)
    wide = Cast<to = 1>(mask) three = Unsqueeze(wide, axes) off = Sub(one, three) far = Mul(off, depth)
    LAYERS
    first = Gather<axis = 1>(zend, zero) pool = Gemm(first, wp, bp) tanh = Tanh(pool) y = Identity(tanh)
}"""

WEIGHTS = {
    "table": (WORDS, WIDTH),
    "position": (PLACES, WIDTH),
    **dict.fromkeys(("wq", "wk", "wv", "wo", "wp"), (WIDTH, WIDTH)),
    "wi": (WIDTH, INNER),
    "wm": (INNER, WIDTH),
    "bq": (WIDTH,),
    "bi": (INNER,),
    "bp": (WIDTH,),
}

NUMBERS = {
    "two": 2.0,
    "eps": 1e-5,
    "four": 4.0,
    "root": 2**0.5,
    "one": 1.0,
    "half": 0.5,
    "depth": -10000.0,
    "heads": [0, PLACES, 2, WIDTH // 2],
    "rows": [0, PLACES, WIDTH],
    "axes": [1, 2],
    "zero": 0,
    "gamma": np.linspace(0.5, 1.5, WIDTH),
    "beta": np.linspace(-0.5, 0.5, WIDTH),
}


def write_encoder(folder, layers=2):
    """Write the encoder and data for it, with at most half of the places masked; return both paths."""
    sources = ("x", *(f"x{k}" for k in range(layers)))
    text = "".join(part.format(k=k, x=x) for k, x in enumerate(sources[:-1]) for part in (NORM, LAYER))
    message = onnx.parser.parse_model(TEXT.replace("LAYERS", text + NORM.format(k="end", x=sources[-1])))
    message.graph.output[0].type.tensor_type.ClearField("shape")
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=shape) / shape[-1] ** 0.5 for name, shape in WEIGHTS.items()} | NUMBERS
    for name, value in values.items():
        array = np.asarray(value)
        array = array.astype(np.int64 if array.dtype.kind == "i" else np.float32)
        message.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    for node in message.graph.node:
        node.name = node.output[0]
    onnx.save(message, folder / "net.onnx")
    np.savez(folder / "data.npz", **draw_words(rng, 16))
    return folder / "net.onnx", folder / "data.npz"


def draw_words(rng, count):
    """Return `count` lines of words, and masks that are 1 where a line has a word."""
    lengths = rng.integers(PLACES // 2, PLACES + 1, count)
    mask = (np.arange(PLACES) < lengths[:, None]).astype(np.int64)
    return {"ids": rng.integers(0, WORDS, (count, PLACES)), "mask": mask}

"""A transformer and a recurrent net with each rule file: what runs on integers, and how near the answers stay."""

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from support.measurements import sqnr_db

import graphquant as gq
from graphquant.rules import shipped_rule_files

NORM = """
    mu{k} = ReduceMean<axes = [2]>({x}) d{k} = Sub({x}, mu{k}) s{k} = Pow(d{k}, two)
    vr{k} = ReduceMean<axes = [2]>(s{k}) e{k} = Add(vr{k}, eps) r{k} = Sqrt(e{k}) n{k} = Div(d{k}, r{k})
    g{k} = Mul(n{k}, gamma) z{k} = Add(g{k}, beta)
"""

LAYER = """
    q{k} = MatMul(z{k}, wq) qb{k} = Add(q{k}, b) kk{k} = MatMul(z{k}, wk) kb{k} = Add(kk{k}, b)
    v{k} = MatMul(z{k}, wv) vb{k} = Add(v{k}, b)
    qh{k} = Reshape(qb{k}, heads) qt{k} = Transpose<perm = [0, 2, 1, 3]>(qh{k})
    kh{k} = Reshape(kb{k}, heads) kt{k} = Transpose<perm = [0, 2, 3, 1]>(kh{k})
    vh{k} = Reshape(vb{k}, heads) vt{k} = Transpose<perm = [0, 2, 1, 3]>(vh{k})
    sc{k} = MatMul(qt{k}, kt{k}) sd{k} = Mul(sc{k}, quarter) p{k} = Softmax<axis = -1>(sd{k})
    c{k} = MatMul(p{k}, vt{k}) ct{k} = Transpose<perm = [0, 2, 1, 3]>(c{k}) cr{k} = Reshape(ct{k}, rows)
    o{k} = MatMul(cr{k}, wo) ob{k} = Add(o{k}, b) y{k} = Add({x}, ob{k}) f{k} = MatMul(y{k}, wi) fb{k} = Add(f{k}, bi)
    h{k} = Div(fb{k}, root) er{k} = Erf(h{k}) e1{k} = Add(er{k}, one) ge{k} = Mul(fb{k}, e1{k}) gl{k} = Mul(ge{k}, half)
    m{k} = MatMul(gl{k}, wm) mb{k} = Add(m{k}, b) x{k} = Add(y{k}, mb{k})
"""

RECURRENT = """
    t = Transpose<perm = [1, 0, 2]>(x) l = LSTM<hidden_size = 16, direction = "bidirectional">(t, lw, lr)
    lt = Transpose<perm = [2, 0, 1, 3]>(l) lf = Reshape(lt, joined) g = GRU<hidden_size = 32>(lf, gw, gr)
    gs = Squeeze(g, first) a = MatMul(gs, wo) y = Add(a, b)
"""

SHAPES = {
    **dict.fromkeys(("wq", "wk", "wv", "wo"), (32, 32)),
    "wi": (32, 64),
    "wm": (64, 32),
    "b": (32,),
    "bi": (64,),
    "lw": (2, 64, 32),
    "lr": (2, 64, 16),
    "gw": (1, 96, 32),
    "gr": (1, 96, 32),
}

NUMBERS = {
    "two": 2.0,
    "eps": 1e-5,
    "quarter": 0.25,
    "root": 2**0.5,
    "one": 1.0,
    "half": 0.5,
    "heads": [1, 16, 2, 16],
    "rows": [1, 16, 32],
    "joined": [1, 16, 32],
    "first": [1],
    "gamma": np.linspace(0.5, 1.5, 32),
    "beta": np.linspace(-0.5, 0.5, 32),
}


def write_network(name, folder):
    """Writes the net called `name` and data for it; gives the paths of both."""
    if name == "transformer":
        text = "".join(part.format(k=k, x=x) for k, x in enumerate(("x", "x0")) for part in (NORM, LAYER))
        end = "x1"
    else:
        text, end = RECURRENT, "y"
    head = '<ir_version: 8, opset_import: ["": 13]> net (float[1,16,32] x) => (float '
    message = onnx.parser.parse_model(f"{head}{end}) {{ {text} }}")
    message.graph.output[0].type.tensor_type.ClearField("shape")
    rng = np.random.default_rng(0)
    read = {one for node in message.graph.node for one in node.input}
    for key, shape in SHAPES.items():
        value = rng.normal(size=shape).astype(np.float32) / np.sqrt(np.float32(shape[-1]))
        message.graph.initializer.extend([onnx.numpy_helper.from_array(value, key)] if key in read else [])
    for key, number in NUMBERS.items():
        value = np.asarray(number)
        value = value.astype(np.int64 if value.dtype.kind == "i" else np.float32)
        message.graph.initializer.extend([onnx.numpy_helper.from_array(value, key)] if key in read else [])
    for node in message.graph.node:
        node.name = node.output[0]
    onnx.save(message, folder / "net.onnx")
    np.savez(folder / "data.npz", x=rng.normal(size=(8, 16, 32)).astype(np.float32))
    return folder / "net.onnx", folder / "data.npz"


def outputs_per_sample(path, samples):
    """Return the outputs of ONNX Runtime for each sample."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return np.stack([session.run(None, {"x": sample[None]})[0] for sample in samples])


LEAST = {
    "onnxruntime": (33.9, 38),
    "tensorrt": (33, 40.6),
    "qnn": (27.7, 34.4),
    "openvino": (31.2, 38),
    "vitis_ai": (24.5, 32),
    "generic": (35, 38),
}
"""For each rule file the least SQNR of the transformer and of the recurrent net, in dB: about 0.5 below what it had."""


@pytest.mark.parametrize(("number", "name"), enumerate(["transformer", "recurrent"]))
@pytest.mark.parametrize("rules", LEAST)
def test_networks(rules, number, name, tmp_path):
    """Every matrix product runs on integers, recurrent ops do not, and the answers stay near."""
    path, data = write_network(name, tmp_path)
    gq.insert(path, rules=[rules], data=str(data), validate=False).save(tmp_path / "quant.onnx")
    samples = np.random.default_rng(1).normal(size=(4, 16, 32)).astype(np.float32)
    assert (
        sqnr_db(outputs_per_sample(path, samples), outputs_per_sample(tmp_path / "quant.onnx", samples))
        > LEAST[rules][number]
    )
    if rules == "generic":
        return
    report = gq.check(tmp_path / "quant.onnx", backend=rules)
    assert not report.findings
    kinds = {op.name: op.kind for op in gq.load(tmp_path / "quant.onnx").main.ops()}
    runs = [verdict.op for verdict in report.verdicts if verdict.status == "int8"]
    low = {kinds[op] for op in runs if rules != "onnxruntime" or not op.startswith("sd")}  # whose scores are scaled so
    left = {kinds[verdict.op] for verdict in report.verdicts if verdict.status == "float"}
    assert "matmul" in low
    assert not left & {"matmul"}
    assert not low & {"lstm", "gru", "erf"}
    if rules in {"onnxruntime", "tensorrt"}:
        assert not low & {"sub", "pow", "sqrt", "div", "reduce_mean", "mul"}  # LayerNorm and GELU


@pytest.mark.parametrize(
    ("changes", "types"),
    [
        ({'dtype = "uint8"': 'dtype = "int8"'}, {"int8", "int32"}),
        ({'dtype = "int8"\nzero = "symmetric"': 'bits = 7\nzero = "symmetric"'}, {"uint8", "int7", "int32"}),
    ],
)
def test_variants_of_onnxruntime(changes, types, tmp_path):
    """The file's advice for ARM and for x86 without VNNI changes only schemes, and no placement."""
    path, data = write_network("transformer", tmp_path)
    text = shipped_rule_files()["onnxruntime"].read_text("utf-8")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "mine.toml").write_text(text, "utf-8")
    plain = gq.insert(path, rules=["onnxruntime"], data=str(data), validate=False)
    changed = gq.insert(path, rules=[str(tmp_path / "mine.toml")], data=str(data), validate=False)
    changed.save(tmp_path / "quant.onnx")
    assert [done.site.uses for done in changed.inserted] == [done.site.uses for done in plain.inserted]
    assert {done.params.type.name for done in changed.inserted} <= types
    samples = np.random.default_rng(1).normal(size=(4, 16, 32)).astype(np.float32)
    assert sqnr_db(outputs_per_sample(path, samples), outputs_per_sample(tmp_path / "quant.onnx", samples)) > 25

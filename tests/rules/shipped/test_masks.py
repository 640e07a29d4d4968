"""Masks of attention cost the scores no integers, in any spelling and by the rules of any backend."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import graphquant as gq

SPELLINGS = {
    "sum": "a = Add(d, m) p = Softmax<axis = -1>(a)",
    "sum before a reshape": (
        "w = Add(d, m) a = Reshape(w, three_axes) b = Softmax<axis = -1>(a) p = Reshape(b, four_axes)"
    ),
    "complement times a billion": "o = Sub(one, bits) w = Mul(o, billion) a = Add(d, w) p = Softmax<axis = -1>(a)",
    "slice of the complement": (
        "o = Sub(one, bits) t = Mul(o, lowest) w = Slice(t, first, last, axes) a = Add(d, w) p = Softmax<axis = -1>(a)"
    ),
    "added to positions": (
        "o = Sub(one, bits) t = Mul(o, lowest) w = Add(positions, t) a = Add(d, w) p = Softmax<axis = -1>(a)"
    ),
    "masked scores minus a billion": (
        "o = Sub(bits, one) t = Mul(o, billion) n = Mul(d, bits) a = Sub(n, t) p = Softmax<axis = -1>(a)"
    ),
    "choice": "c = Cast<to = 9>(bits) a = Where(c, d, billion) p = Softmax<axis = -1>(a)",
    "choice that is added": "c = Cast<to = 9>(bits) w = Where(c, zero, lowest) a = Add(d, w) p = Softmax<axis = -1>(a)",
    "choice after a sum": (
        "c = Cast<to = 9>(bits) w = Add(d, positions) a = Where(c, w, lowest) p = Softmax<axis = -1>(a)"
    ),
    "infinity that is limited": (
        "c = Cast<to = 9>(bits) w = Where(c, d, infinity) a = Max(w, billion) p = Softmax<axis = -1>(a)"
    ),
}
"""Masks of the scores `d`, from the mask `m` of -10000 or from `bits` of 0 and 1, and the probabilities `p`."""

NUMBERS = {
    "half": np.float32(0.35),
    "one": np.float32(1),
    "zero": np.float32(0),
    "billion": np.float32(-1e9),
    "lowest": np.finfo(np.float32).min,
    "infinity": np.float32(-np.inf),
    "three_axes": np.array([-1, 8, 16]),
    "four_axes": np.array([-1, 2, 8, 16]),
    "first": np.array([0]),
    "last": np.array([16]),
    "axes": np.array([3]),
}


def write_attention(folder: Path, mask: str) -> Path:
    """Write attention with a mask, and data for it."""
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=(16, 16)).astype(np.float32) / 4 for name in ("wq", "wk", "wv", "wo")}
    values |= NUMBERS | {"positions": rng.normal(size=(1, 2, 8, 16)).astype(np.float32)}
    message = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> g (float[N,2,8,16] q, float[N,2,16,16] kk, float[N,1,8,16] bits,'
        " float[N,1,8,16] m) => (float[N,2,8,16] y) { qw = MatMul(q, wq) kw = MatMul(kk, wk) v = MatMul(kk, wv)"
        f" kt = Transpose<perm = [0, 1, 3, 2]>(kw) s = MatMul(qw, kt) d = Mul(s, half) {mask} f = MatMul(p, v)"
        " y = MatMul(f, wo) }"
    )
    read = {name for node in message.graph.node for name in node.input}
    message.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in values.items() if name in read
    )
    inputs = [value for value in message.graph.input if value.name in read]
    del message.graph.input[:]
    message.graph.input.extend(inputs)
    onnx.save(message, folder / "model.onnx")
    bits = rng.random((40, 1, 8, 16)) < 0.7
    bits[..., 0] = True
    data = {"q": rng.normal(0, 1.5, (40, 2, 8, 16)), "kk": rng.normal(0, 1.5, (40, 2, 16, 16)), "bits": bits}
    data["m"] = (1 - bits) * -1e4
    np.savez(folder / "data.npz", **{value.name: data[value.name].astype(np.float32) for value in inputs})
    return folder / "model.onnx"


@pytest.mark.parametrize("mask", SPELLINGS.values(), ids=SPELLINGS.keys())
@pytest.mark.parametrize(
    "rules", ["onnxruntime", "tflite", *(pytest.param(name, marks=pytest.mark.slow) for name in ("openvino", "qnn"))]
)
def test_masks(tmp_path: Path, rules: str, mask: str) -> None:
    """The result keeps 20 dB and more, and its products stay quantized."""
    model = write_attention(tmp_path, mask)
    result = gq.insert(model, data=str(tmp_path / "data.npz"), rules=[rules])
    assert result.validation is not None
    assert result.validation.comparison is not None
    (output,) = result.validation.comparison.outputs
    assert output.sqnr is not None
    assert output.sqnr > 20
    quantized = {(done.site.tensor.op, use.op) for done in result.inserted for use in done.site.uses}
    assert {use for _, use in quantized} >= {node.name for node in gq.load(model).main.ops() if node.type == "MatMul"}


@pytest.mark.parametrize("rules", ["qnn", "qnn16", "vitis_ai"])
@pytest.mark.parametrize("reader", ["", "e = Erf(d)"], ids=["alone", "with another reader"])
def test_products_before_a_mask(tmp_path: Path, rules: str, reader: str) -> None:
    """A product whose output a mask is added to directly runs on integers, also with another reader."""
    rng = np.random.default_rng(1)
    message = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> g (float[N,8,16] x, float[N,8,16] m) => (float[N,8,16] p'
        f"{', float[N,8,16] e' if reader else ''}) {{ d = MatMul(x, w) {reader} a = Add(d, m) p = Softmax(a) }}"
    )
    message.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=(16, 16)).astype(np.float32), "w"))
    for node in message.graph.node:
        node.name = node.output[0]
    onnx.save(message, tmp_path / "model.onnx")
    data = {name: rng.normal(size=(8, 8, 16)).astype(np.float32) for name in ("x", "m")}
    result = gq.insert(tmp_path / "model.onnx", data=data, rules=[rules])
    report = gq.check(result.save(tmp_path / "quantized.onnx"), backend=rules.removesuffix("16"))
    assert report.findings == ()
    statuses = {verdict.op: verdict.status for verdict in report.verdicts}
    assert (statuses["d"], statuses["a"]) == ("int8", "float")

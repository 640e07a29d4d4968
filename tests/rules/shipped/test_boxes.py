"""Detection heads: the decoding of boxes stays float, and probabilities keep their steps beside coordinates."""

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import graphquant as gq

FEATURES = "c = Conv<pads = [1, 1, 1, 1]>(x, w) r = Relu(c)"

BY_ANCHOR = f"""{FEATURES} h = Conv(r, by_anchor, bias) s = Reshape(h, split)
    t = Transpose<perm = [0, 1, 3, 4, 2]>(s)"""

HEADS = {
    # YOLOv5: centres and sizes are functions of a Sigmoid
    "powers": f"""{BY_ANCHOR} p = Sigmoid(t) first, second, third = Split<axis = 4>(p, parts)
        a = Mul(first, two) b = Add(a, grid) d = Mul(b, stride) e = Mul(second, two) f = Pow(e, two)
        g = Mul(f, anchors) k = Concat<axis = 4>(d, g, third) y = Reshape(k, flat)""",
    # YOLOv3: sizes are exponentials
    "exponentials": f"""{BY_ANCHOR} first, second, third = Split<axis = 4>(t, parts) p = Sigmoid(first)
        b = Add(p, grid) d = Mul(b, stride) f = Exp(second) g = Mul(f, anchors) q = Sigmoid(third)
        k = Concat<axis = 4>(d, g, q) y = Reshape(k, flat)""",
    # YOLOX: coordinates beside probabilities
    "joined": f"""{FEATURES} h = Conv(r, boxes, far) o = Conv(r, sure) p = Sigmoid(o) l = Conv(r, classes)
        q = Sigmoid(l) k = Concat<axis = 1>(h, p, q) t = Reshape(k, rows) y = Transpose<perm = [0, 2, 1]>(t)""",
}
"""Nets that give, for each place, four coordinates and then probabilities."""

BINS = """{0} h = Conv(r, edges) s = Reshape(h, bins) t = Transpose<perm = [0, 2, 1, 3]>(s)
    p = Softmax<axis = 1>(t) q = Conv(p, ramp) y = Reshape(q, four)"""
"""YOLOv8: edges of boxes are means over bins."""

RULES = ("onnxruntime", "openvino", "tensorrt", "tflite")


def write_box_net(text, folder):
    """Writes the net and data for it; gives the samples."""
    head = '<ir_version: 8, opset_import: ["": 17]> g (float[1,16,8,8] x) => (float y)'
    message = onnx.parser.parse_model(f"{head} {{ {text} }}")
    message.graph.output[0].type.tensor_type.ClearField("shape")
    rng = np.random.default_rng(0)
    places = np.stack(np.mgrid[:8, :8][::-1], -1)[None, None] - 0.5
    floats = {
        "w": rng.normal(0, 0.12, (16, 16, 3, 3)),
        "by_anchor": rng.normal(0, 0.5, (36, 16, 1, 1)),
        "bias": rng.normal(0, 0.5, 36),
        "boxes": rng.normal(0, 2, (4, 16, 1, 1)),
        "far": rng.normal(0, 1, 4),
        "sure": rng.normal(0, 0.5, (1, 16, 1, 1)),
        "classes": rng.normal(0, 0.5, (5, 16, 1, 1)),
        "edges": rng.normal(0, 1, (64, 16, 1, 1)),
        "ramp": np.arange(16).reshape(1, 16, 1, 1),
        "anchors": rng.uniform(5, 60, (1, 3, 1, 1, 2)),
        "grid": places,
        "two": 2.0,
        "stride": 8.0,
    }
    whole = {"split": [1, 3, 12, 8, 8], "parts": [2, 2, 8], "flat": [1, -1, 12], "rows": [1, 10, 64]}
    whole |= {"bins": [1, 4, 16, 64], "four": [1, 4, 64]}
    arrays = {name: np.asarray(value, np.float32) for name, value in floats.items()}
    arrays |= {name: np.asarray(value, np.int64) for name, value in whole.items()}
    read = {name for node in message.graph.node for name in node.input}
    message.graph.initializer.extend(
        onnx.numpy_helper.from_array(a, name) for name, a in arrays.items() if name in read
    )
    for node in message.graph.node:
        node.name = node.output[0]
    onnx.save(message, folder / "net.onnx")
    samples = np.random.default_rng(1).normal(size=(16, 16, 8, 8)).astype(np.float32)
    np.savez(folder / "data.npz", x=samples)
    return samples


def errors(rules, text, folder):
    """The answers, what quantization moves them by, and the ops that read something quantized."""
    samples = write_box_net(text, folder)
    result = gq.insert(folder / "net.onnx", rules=[rules], data=str(folder / "data.npz"), validate=False)
    result.save(folder / "quant.onnx")
    runs = [
        onnxruntime.InferenceSession(folder / name, providers=["CPUExecutionProvider"]).run
        for name in ("net.onnx", "quant.onnx")
    ]
    plain, found = (np.concatenate([run(None, {"x": sample[None]})[0] for sample in samples]) for run in runs)
    return (
        plain,
        found - plain,
        {use.op for done in result.inserted for use in done.site.uses if done.site.tensor.op in "abcdefghklpqrt"},
    )


@pytest.mark.parametrize("net", HEADS)
@pytest.mark.parametrize("rules", RULES)
def test_heads(rules, net, tmp_path):
    """Probabilities move by less than a hundredth, centres by less than a tenth of a cell, sizes by a few percent."""
    plain, moved, readers = errors(rules, HEADS[net], tmp_path)
    assert np.sqrt(np.mean(moved[..., 4:] ** 2)) < 0.01
    assert np.sqrt(np.mean(moved[..., :2] ** 2)) < 0.8
    assert np.mean(np.abs(moved[..., 2:4]) / (np.abs(plain[..., 2:4]) + 8)) < 0.04
    assert not readers & {"b", "d", "e", "f", "g", "y"}


@pytest.mark.parametrize("rules", RULES)
def test_bins(rules, tmp_path):
    """The mean over bins is taken in float, of probabilities that are not rounded."""
    _, moved, readers = errors(rules, BINS.format(FEATURES), tmp_path)
    assert "q" not in readers
    assert np.sqrt(np.mean(moved**2)) < 0.13


@pytest.mark.parametrize("rules", ["onnxruntime", "openvino", "tflite"])
def test_volumes(rules, tmp_path):
    """Sums of volumes, which have five axes too, are quantized as those of images are; TFLite convolves only floats."""
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[1,4,4,8,8] x) => (float y) {
        a = Conv(x, one) b = Relu(a) c = Conv(b, other) d = Add(c, b) e = Relu(d) f = Conv(e, one) g = Add(f, e)
        k = Relu(g) y = Conv(k, other)
    }"""
    message = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name in ("one", "other"):
        weight = rng.normal(0, 0.5, (4, 4, 1, 1, 1)).astype(np.float32)
        message.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    for node in message.graph.node:
        node.name = node.output[0]
    onnx.save(message, tmp_path / "net.onnx")
    result = gq.insert(tmp_path / "net.onnx", rules=[rules], data="random:4", allow_empty=True, validate=False)
    read = {(done.site.tensor.op, use.op) for done in result.inserted for use in done.site.uses}
    if rules == "tflite":
        assert not {reader for _, reader in read} & {"a", "c", "f", "y"}
        return
    assert {("c", "d"), ("b", "d"), ("f", "g"), ("e", "g")} <= read

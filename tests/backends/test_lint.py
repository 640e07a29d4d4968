"""Findings of `check`: for each code, a model with the finding and one without."""

import numpy as np
import onnx
import onnx.parser
import pytest
from support.onnx_models import load_with_constants, qdq_text

import graphquant as gq
from graphquant.backends import BACKENDS, LINT_CODES, check_quantized_model
from graphquant.errors import DataError, EmptyResultError, UsageError
from graphquant.formats.onnx import runtime
from graphquant.quantize import SkipCode
from graphquant.rules import shipped_rule_files

CONSTANTS = {
    "s": np.float32(0.1),
    "s2": np.float32(0.2),
    "tiny": np.float32(1e-5),
    "wide": np.float32(20),
    "zero": np.float32(0),
    "denormal": np.float32(1e-40),
    "v0": np.full(4, 0.1, np.float32),
    "z": np.uint8(128),
    "z0": np.uint8(0),
    "i0": np.int8(0),
    "imin": np.int8(-128),
    "n0": np.int32(0),
    "zz": np.zeros(4, np.int8),
    "prod": np.float32(0.1) * np.float32(0.1),
    "w": (np.arange(16) * 15 - 120).astype(np.int8).reshape(4, 4, 1, 1),
    "wflat": np.array([[1, 0, -1, 0], *[[100, -90, 70, 3]] * 3], np.int8).reshape(4, 4, 1, 1),
    "rows": np.array([1, 16, 4]),
    "wm": (np.arange(16) * 15 - 120).astype(np.int8).reshape(4, 4),
    "wn": np.array([[1, 100, 90, 80], [0, -100, 90, -80]] * 2, np.int8),
    "half": np.float32(0.5),
    "b": np.linspace(-1, 1, 4, dtype=np.float32),
    "huge": np.array([1, 2, 1e9, 3], np.float32),
    "bi": np.arange(4, dtype=np.int32),
    "bmax": np.array([1, 2, 2**31 - 1, 3], np.int32),
    "bfits": np.array([1, 2, 2**31 - 2, 3], np.int32),
    "edge": np.array([1, 2, 2**31, 3], np.float32),
    # Products of such scales divide 2**31 by nearly 1: into 1 more, and into 3 less.
    "above1": np.float32(1 + 181 / 2**23),
    "below1": np.float32(1 - 181 / 2**23),
    "above2": np.float32(1 + 2024 / 2**23),
    "below2": np.float32(1 - 4047 / 2**24),
    "flat": np.array([1, 64], np.int64),
    "sc": np.full((32, 1), 0.1, np.float32),
}


A, Y, W = qdq_text("x", "a"), qdq_text("r", "y"), "v = DequantizeLinear(w, s, i0) "
THREE = "n = Reshape(x, rows)" + qdq_text("n", "a") + "m3 = DequantizeLinear(wm, s, i0) "
Y0 = qdq_text("r", "y", zero="z0")
CONV = A + W + "r = Conv(a, v)" + Y

NARROW_PRODUCT = THREE.replace("wm", "wn") + "r = MatMul(a, m3)" + Y

CASES = [
    ("GQ101", None, A + "r = Relu(a)" + Y, "r"),
    ("", None, A + "r = Relu(a)" + qdq_text("r", "y", zero="z0"), ""),
    ("GQ101", "onnxruntime", qdq_text("x", "a", zero="i0") + "r = Relu(a)" + qdq_text("r", "y", zero="i0"), "r"),
    ("GQ101", None, qdq_text("x", "a", zero="imin") + "r = Relu(a)" + qdq_text("r", "y", zero="i0"), "r"),
    ("", None, qdq_text("x", "a", zero="i0") + "r = Relu(a)" + qdq_text("r", "y", zero="i0"), ""),
    ("", None, qdq_text("x", "a", zero="i0") + "r = Relu(a)" + qdq_text("r", "y", zero="imin"), ""),
    ("", "tensorrt", qdq_text("x", "a", zero="i0") + "r = Relu(a)" + qdq_text("r", "y", zero="i0"), ""),
    ("", None, A + "r = Relu(a)" + qdq_text("r", "j") + "k = Concat<axis = 1>(j, a) y = Identity(k)", ""),
    (
        "",
        None,
        A
        + "r = Relu(a)"
        + qdq_text("r", "j")
        + "f = Flatten(j)"
        + qdq_text("f", "g")
        + "c = Flatten(a)"
        + qdq_text("c", "h")
        + "y = Concat<axis = 1>(g, h)",
        "",
    ),
    ("GQ101", None, A + "r = Relu(a)" + qdq_text("r", "j") + "y = Concat<axis = 1>(j, j)", "r"),
    (
        "GQ101",
        None,
        A + "r = Relu(a)" + qdq_text("r", "j") + qdq_text("x2", "k", "s2") + "y = Concat<axis = 1>(j, k)",
        "r",
    ),
    ("GQ102", "onnxruntime", A + W + "y = Conv(a, v)", "y"),
    ("GQ102", "tensorrt", qdq_text("x", "a", zero="i0") + W + "y = Conv(a, v)", ""),
    ("", "onnxruntime", CONV, ""),
    ("", "onnxruntime", "y = Conv(x, b4)", ""),
    ("GQ103", None, A + "r = Reshape(a, flat)" + qdq_text("r", "y", "s2"), "r"),
    ("", None, A + "r = Reshape(a, flat)" + Y, ""),
    ("GQ103", "qnn", A + qdq_text("x2", "k", "s2") + "r = Concat<axis = 1>(a, k)" + Y, "r"),
    ("", "onnxruntime", A + qdq_text("x2", "k", "s2") + "r = Concat<axis = 1>(a, k)" + Y, ""),
    ("GQ104", None, A + W + "r = Conv(a, v, huge)" + Y, "r"),
    ("GQ104", None, A + W + "c = DequantizeLinear(bmax, prod, n0) r = Conv(a, v, c)" + Y, "r"),
    ("", None, A + W + "c = DequantizeLinear(bfits, prod, n0) r = Conv(a, v, c)" + Y, ""),
    *(
        (
            "GQ104",
            None,
            qdq_text("x", "a", f"above{pair}") + f"v = DequantizeLinear(w, below{pair}, i0) r = Conv(a, v, edge)" + Y,
            op,
        )
        for pair, op in ((1, "r"), (2, ""))
    ),
    ("", None, A + W + "r = Conv(a, v, b)" + Y, ""),
    ("GQ105", None, A + "t = Sigmoid(x2) r = Concat<axis = 1>(a, t)" + Y, "r"),
    (
        "GQ105",
        None,
        qdq_text("x", "a", "wide")
        + "t = Sigmoid(x2)"
        + qdq_text("t", "k", "wide")
        + "r = Concat<axis = 1>(a, k)"
        + qdq_text("r", "y", "wide"),
        "r",
    ),
    ("GQ105", None, A + qdq_text("x2", "k", "tiny") + "r = Concat<axis = 1>(a, k)" + Y, "r"),
    ("", None, A + qdq_text("x2", "k", "s2") + "r = Concat<axis = 1>(a, k)" + Y, ""),
    ("GQ105", None, A + "v = DequantizeLinear(wflat, s, i0) r = Conv(a, v)" + Y, "r"),
    ("", None, A + "v = DequantizeLinear<axis = 0>(wflat, v0, zz) r = Conv(a, v)" + Y, ""),
    ("", None, A + "v = DequantizeLinear(wflat, half, i0) r = Conv(a, v)" + Y, ""),
    ("GQ105", "vitis_ai", A + "v = DequantizeLinear(wflat, s, i0) r = Conv(a, v)" + Y, ""),
    ("GQ105", "qnn", A + "v = DequantizeLinear(wflat, s, i0) r = Conv(a, v)" + Y, "r"),
    ("GQ105", None, NARROW_PRODUCT, "r"),
    ("", "qnn", NARROW_PRODUCT, ""),
    ("", None, NARROW_PRODUCT + "v = DequantizeLinear<axis = 0>(w, v0, zz) c = Conv(a, v) u = Sqrt(c)", ""),
    ("GQ106", None, qdq_text("x", "a", "zero") + "y = Sqrt(a)", "a_q"),
    ("GQ106", None, qdq_text("x", "a", "denormal") + "y = Sqrt(a)", "a_q"),
    ("", None, qdq_text("x", "a", "tiny") + "y = Sqrt(a)", ""),
    ("GQ107", None, A + "y = Sqrt(x)", "a"),
    ("GQ108", "onnxruntime", A + "y = Sqrt(a)", "x"),
    ("GQ108", "onnxruntime", A + "t = Sqrt(a) y = Tanh(a)", "x"),
    ("", "onnxruntime", CONV + "u = Sqrt(a)", ""),
    ("GQ109", "onnxruntime", A + "r = AveragePool<kernel_shape = [2, 2], dilations = [1, 1]>(a)" + Y, "r"),
    ("", "onnxruntime", A + "r = AveragePool<kernel_shape = [2, 2]>(a)" + Y, ""),
    ("GQ110", None, A + W + "c = DequantizeLinear(bi, s, n0) r = Conv(a, v, c)" + Y, "r"),
    ("", None, A + W + "c = DequantizeLinear(bi, prod, n0) r = Conv(a, v, c)" + Y, ""),
    ("", None, A + W + "c = DequantizeLinear(zz, s, i0) r = Conv(a, v, c)" + Y, ""),
    ("GQ111", None, A + "v = DequantizeLinear<axis = 1>(w, v0, zz) r = Conv(a, v)" + Y, "r"),
    ("", None, A + "v = DequantizeLinear<axis = 0>(w, v0, zz) r = Conv(a, v)" + Y, ""),
    (
        "GQ112",
        "onnxruntime",
        A + W + "r = Conv(a, v)" + qdq_text("r", "k") + "t = Relu(k)" + qdq_text("t", "y", zero="z0"),
        "r",
    ),
    ("", "onnxruntime", A + W + "r = Conv(a, v) t = Relu(r)" + qdq_text("t", "y", zero="z0"), ""),
    ("", "onnxruntime", THREE + "m = MatMul(a, m3) t = Add(m, b)" + qdq_text("t", "k") + "r = Relu(k)" + Y0, ""),
    ("GQ112", "onnxruntime", THREE + "t = MatMul(a, m3)" + qdq_text("t", "k") + "r = Relu(k)" + Y0, "t"),
    *(
        (
            "GQ115",
            None,
            f"v = DequantizeLinear<axis = {axis}>({weight}, v0, {zero}) y = Conv(x, v)",
            "v" if wrong else "",
        )
        for axis, weight, zero, wrong in (
            *((0, "w", "zz", False), (-3, "w", "zz", False), (4, "w", "zz", True), (-7, "w", "zz", True)),
            *((0, "w", "i0", True), (2, "w", "zz", True), (1, "zz", "zz", True), (-4, "w", "zz", False)),
        )
    ),
    ("GQ115", None, "q = QuantizeLinear<axis = 4>(x, v0, zz) y = DequantizeLinear(q, v0, zz)", "q"),
    ("GQ115", None, "q = QuantizeLinear(x, v0, zz) y = DequantizeLinear<axis = 7>(q, v0, zz)", "y"),
    ("GQ115", None, "q = QuantizeLinear(x, v0, zz) y = DequantizeLinear(q, v0, zz)", ""),
    ("GQ115", None, "q = QuantizeLinear(x) y = DequantizeLinear(q)", ""),
    ("GQ113", "tensorrt", "f = Sqrt(x)" + qdq_text("f", "a", zero="i0") + W + "y = Conv(a, v)", "y"),
]


def load_net_of_ops(text, tmp_path):
    """Return the model with the ops in `text`."""
    outs = "float y" + (", float u" if " u = " in text else "")
    inputs = "float[1,4,4,4] x, float[1,4,4,4] x2, float[4,4,1,1] b4"
    return load_with_constants(tmp_path, f"g ({inputs}) => ({outs}) {{ {text} }}", CONSTANTS)


@pytest.mark.parametrize(("code", "backend", "text", "op"), CASES)
def test_findings(code, backend, text, op, tmp_path):
    """The finding names its op. A model without the mistake has no such finding."""
    found = check_quantized_model(load_net_of_ops(text, tmp_path), backend).findings
    if not op:
        assert [finding.code for finding in found if code in {"", finding.code}] == []
        return
    assert (code, op) in {(finding.code, finding.op) for finding in found}
    assert all(finding.message and finding.fix for finding in found)


def test_every_code_has_cases():
    """There is a model for each code."""
    assert {code for code, _, _, op in CASES if op} == set(LINT_CODES) - {"GQ114"}


def test_wrong_products_of_the_runtime(tmp_path, monkeypatch):
    """The op whose products the installed runtime computes wrong is an error, with the numbers of rows and columns."""
    model = load_net_of_ops(CONV, tmp_path)
    monkeypatch.setattr(runtime, "find_wrong_product", lambda *product: 32 if product == ("uint8", "int8", 4) else 0)
    found = [finding for finding in check_quantized_model(model, "onnxruntime").findings if finding.code == "GQ114"]
    assert [finding.op for finding in found] == ["r"]
    assert {"32", "4"} <= set(found[0].message.split())


def test_uncalled_functions(tmp_path):
    """Quantizations in uncalled functions are found."""
    text = """<ir_version: 8, opset_import: ["": 21, "own": 1]>
    g (float[4] x) => (float[4] y) { y = Sqrt(x) }
    <domain: "own", opset_import: ["": 21]>
    idle (p) => (q) {
      s = Constant<value = float {0.1}>() z = Constant<value = uint8 {0}>()
      i = QuantizeLinear(p, s, z) q = DequantizeLinear(i, s, z)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    found = check_quantized_model(gq.load(tmp_path / "model.onnx")).findings
    assert [finding.code for finding in found] == ["GQ107"]
    assert "1 DequantizeLinear, 1 QuantizeLinear" in found[0].message


BRANCHES = """<ir_version: 8, opset_import: ["": 17]> g (bool c, float[4] x) => (float[4] y) {
  y = If(c) <
    then_branch = t () => (float[4] p) { pa = Sqrt(x) p = Exp(pa) },
    else_branch = e () => (float[4] q) { qa = Abs(x) q = Exp(qa) }
  >
}"""


RULES = """
[scheme.eight]
dtype = "uint8"
zero = "asymmetric"
observe = {}
[[rule]]
name = "inside"
consumer = {{ type = "Exp" }}
quantize = "eight"
"""


def test_unreached_quantizations(tmp_path, cli):
    """With statistics, a quantization in a branch that no sample reached is found, and insert skips it."""
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(BRANCHES), path)
    np.savez(tmp_path / "data.npz", c=np.array([True, True]), x=np.ones((2, 4), np.float32))
    data = f"{tmp_path / 'data.npz'}"
    fixed, minmax = tmp_path / "fixed.toml", tmp_path / "minmax.toml"
    fixed.write_text(RULES.format('{ name = "fixed", low = 0.0, high = 2.0 }'))
    minmax.write_text(RULES.format('"minmax"'))
    stats = gq.calibrate(path, data=data, rules=minmax)
    made = gq.insert(path, rules=fixed).save(tmp_path / "quantized.onnx")
    assert [finding.code for finding in gq.check(made).findings] == []
    found = gq.check(made, stats=stats).findings
    assert [(finding.code, finding.graph) for finding in found] == [("GQ107", "y/else_branch")]
    assert "y/else_branch/qa:0" in found[0].message
    result = gq.insert(path, rules=minmax, stats=stats)
    assert [(str(skip.tensor), skip.code) for skip in result.skips] == [("y/else_branch/qa:0", SkipCode.RANGE)]
    assert "sample" in result.skips[0].reason
    cli("calibrate", path, "--data", data, "--rules", minmax, "-o", tmp_path / "stats.gqs")
    assert "y/else_branch/qa:0" in cli("check", made, "--stats", tmp_path / "stats.gqs", code=1).stdout
    assert "one model" in cli("check", made, made, "--stats", tmp_path / "stats.gqs", code=2).stderr
    with pytest.raises(DataError, match="none of the"):
        gq.check(path, stats=stats)


def test_float_models_have_no_findings(samples):
    """A model without quantization has only float verdicts and no findings."""
    for backend in BACKENDS:
        report = check_quantized_model(gq.load(samples / "digits_cnn.onnx"), backend)
        assert report.counts["int8"] == 0
        assert report.counts["float"] == len(report.verdicts) > 20
        assert report.findings == ()


def test_tensorflow_models_are_linted_without_a_backend(samples, tmp_path):
    """TensorFlow models are linted, but backends are not predicted for them."""
    result = gq.insert(samples / "digits_cnn.pb", rules=["fixed_point"])
    path = result.save(tmp_path / "model.pb")
    assert {finding.code for finding in check_quantized_model(gq.load(path)).findings} <= {"GQ101", "GQ103"}
    with pytest.raises(UsageError, match=r"tensorflow model.* onnxruntime"):
        check_quantized_model(gq.load(path), "onnxruntime")


def test_unknown_backends():
    """The error for an unknown backend suggests the closest one."""
    with pytest.raises(UsageError, match="Did you mean 'onnxruntime'"):
        check_quantized_model(gq.Model(format="onnx"), "onnxrutime")


@pytest.mark.parametrize("least", [-1.0, 0.0, 0.5])
def test_limits_of_tensorflow_are_no_scales(tmp_path, least):
    """The second input of QuantizeV2 is the least value, which may be negative."""
    import tensorflow as tf

    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 4], name="x")
        codes = tf.raw_ops.QuantizeV2(input=x, min_range=least, max_range=1.0, T=tf.quint8)
        limits = {"min_range": codes.output_min, "max_range": codes.output_max}
        tf.identity(tf.raw_ops.Dequantize(input=codes.output, **limits), name="y")
    (tmp_path / "m.pb").write_bytes(graph.as_graph_def().SerializeToString())
    assert gq.check(tmp_path / "m.pb").findings == ()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["digits_cnn.pb", "digits_cnn_saved_model"])
def test_own_weights_have_the_right_axis(model, samples, tmp_path):
    """FakeQuant per channel quantizes the last axis, also if the file has no shape of its output."""
    result = gq.insert(samples / model, rules="tflite", data=str(samples / "digits_cnn_calib.npz"), samples=8)
    written = gq.load(result.save(tmp_path / f"out{(samples / model).suffix}"))
    assert [finding for finding in check_quantized_model(written).findings if finding.code == "GQ111"] == []


SOURCES = {
    **{f"digits_cnn{suffix}": "digits_cnn" for suffix in (".onnx", ".pb", "_bn.onnx", "_saved_model")},
    **{f"digits_rnn{suffix}": "digits_rnn" for suffix in (".onnx", ".pb", "_saved_model")},
    "digits_nested.onnx": "digits_nested",
}


def cases_of_own_results():
    """Yield each rule file with each ONNX model, and with each TensorFlow net in one of its two kinds of files."""
    for number, rules in enumerate(shipped_rule_files()):
        for model in SOURCES:
            if model.endswith(".onnx") or model.endswith(".pb") == (number % 2 == 0):
                yield model, rules


@pytest.mark.slow
@pytest.mark.parametrize(("model", "rules"), cases_of_own_results())
def test_own_results_have_no_errors(model, rules, samples, tmp_path):
    """A result of a shipped rule file has no error in its own check, for the backend of the rule file if any."""
    data = str(samples / f"{SOURCES[model]}_calib.npz")
    try:
        result = gq.insert(samples / model, rules=rules, data=data, samples=8, validate=False)
    except EmptyResultError:
        # The models have no table that Gather reads and only small products, and TensorFlow has no blocks.
        assert rules in {"tables_int4", "dynamic"} or (
            rules.startswith(("weight_only_int", "w4a8")) and "onnx" not in model
        )
        return
    written = gq.load(result.save(tmp_path / f"out{(samples / model).suffix}"))
    backend = next(iter(result.plan.targets), None) if model.endswith(".onnx") else None
    findings = check_quantized_model(written, backend).findings
    # GQ114 is a finding on this machine, not on the model
    assert [code for code, *_ in findings if LINT_CODES[code].level == "error" and code != "GQ114"] == []

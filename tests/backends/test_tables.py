"""Requirement tables of TensorRT, QNN, OpenVINO and Vitis AI on small graphs."""

from dataclasses import replace
from functools import partial
from typing import get_args, get_type_hints

import numpy as np
import pytest
from support.onnx_models import load_with_constants, qdq_text

from graphquant.backends import BACKENDS
from graphquant.quantize.plan import Plan
from graphquant.rules.rule import RuleFile

CONSTANTS = {
    "s": np.float32(0.1),
    "s2": np.float32(0.2),
    "p4": np.float32(2**-4),
    "p3": np.float32(2**-3),
    "p6": np.float32(2**-6),
    "p16": np.float32(2**-16),
    "p14": np.float32(2**-14),
    "big": np.float32(2**5),
    "sig": np.float32(1 / 65536),
    "tan": np.float32(1 / 32768),
    "v0": np.full(16, 0.1, np.float32),
    "z": np.uint8(128),
    "z0": np.uint8(0),
    "zz": np.zeros(16, np.int8),
    "zu": np.full(16, 128, np.uint8),
    "i0": np.int8(0),
    "i5": np.int8(5),
    "u0": np.uint16(0),
    "u32": np.uint16(32768),
    "n0": np.int32(0),
    "w": (np.arange(256) % 15 - 7).astype(np.int8).reshape(16, 16, 1, 1),
    "wu": (np.arange(256) % 15 + 120).astype(np.uint8).reshape(16, 16, 1, 1),
    "wd": (np.arange(144) % 15 - 7).astype(np.int8).reshape(16, 1, 3, 3),
    "ws": (np.arange(64) % 15 - 7).astype(np.int8).reshape(4, 16, 1, 1),
    "m": (np.arange(256) % 15 - 7).astype(np.int8).reshape(16, 16),
    "w32": (np.arange(512) % 15 - 7).astype(np.int8).reshape(16, 32, 1, 1),
    "m32": np.ones((32, 16), np.int8),
    "k8": np.ones((1, 16, 4, 4), np.int8),
    "ku8": np.ones((1, 16, 4, 4), np.uint8),
    "b": np.linspace(-1, 1, 16, dtype=np.float32),
    "bi": np.arange(16, dtype=np.int32),
    "b8": np.arange(16, dtype=np.int8),
    "flat": np.array([1, 256], np.int64),
    "sizes": np.array([1, 1, 2, 2], np.float32),
    "axes": np.array([2, 3], np.int64),
    "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64),
}


int8_qdq = partial(qdq_text, zero="i0")

A, Y = int8_qdq("x", "a"), int8_qdq("r", "y")
U, YU = int8_qdq("x", "a", zero="z"), int8_qdq("r", "y", zero="z")
P, YP = int8_qdq("x", "a", "p4"), int8_qdq("r", "y", "p4")
W, WC = "v = DequantizeLinear(w, s, i0) ", "v = DequantizeLinear<axis = 0>(w, v0, zz) "
W1 = "v = DequantizeLinear<axis = 1>(w, v0, zz) "
WP = "v = DequantizeLinear(w, p6, i0) "
K, KU = int8_qdq("x2", "k"), int8_qdq("x2", "k", zero="z")
K8, KU8 = "k = DequantizeLinear(k8, s, i0)", "k = DequantizeLinear(ku8, s, z)"
CJ, W32 = "r = Conv(j, v) y = Sqrt(r)", "v = DequantizeLinear<axis = 0>(w32, v0, zz) "
MJ, M32J = (f"v = DequantizeLinear({m}, s, i0) r = MatMul(j, v) y = Sqrt(r)" for m in ("m", "m32"))
N, NU = (f"n = Neg(x) {int8_qdq('n', 'k', zero=zero)}" for zero in ("i0", "z"))
B8 = "c = DequantizeLinear(b8, p6, i0) "

CASES = [
    # TensorRT: weighted ops want quantized inputs and nothing behind
    ("tensorrt", A + WC + "r = Conv(a, v) y = Sqrt(r)", "int8"),
    ("tensorrt", A + WC + "r = Conv(a, v, b) y = Sqrt(r)", "int8"),
    ("tensorrt", WC + "r = Conv(x, v) y = Sqrt(r)", "float-input"),
    ("tensorrt", U + WC + "r = Conv(a, v) y = Sqrt(r)", "type"),
    ("tensorrt", int8_qdq("x", "a", zero="i5") + WC + "r = Conv(a, v) y = Sqrt(r)", "zero-point"),
    ("tensorrt", A + W1 + "r = Conv(a, v) y = Sqrt(r)", "weight-axis"),
    ("tensorrt", A + WC + "c = DequantizeLinear(bi, s, n0) r = Conv(a, v, c) y = Sqrt(r)", "bias"),
    ("tensorrt", A + W1 + "r = ConvTranspose(a, v) y = Sqrt(r)", "int8"),
    ("tensorrt", A + WC + "r = ConvTranspose(a, v) y = Sqrt(r)", "weight-axis"),
    # activations and BatchNorm behind a Conv are fused
    ("tensorrt", A + WC + "t = Conv(a, v) r = Relu(t) y = Sqrt(r)", "fused"),
    ("tensorrt", A + WC + "t = Conv(a, v) u = BatchNormalization(t, b, b, b, v0) r = Relu(u) y = Sqrt(r)", "fused"),
    ("tensorrt", A + WC + "t = Conv(a, v) r = Sigmoid(t) u = Mul(t, r) y = Sqrt(u)", "not-quantized"),
    # residual sums: the skip input alone is quantized
    ("tensorrt", A + WC + "t = Conv(a, v)" + int8_qdq("x", "k", "s2") + "r = Add(t, k) y = Sqrt(r)", "fused"),
    (
        "tensorrt",
        A + WC + "t = Conv(a, v) u = Relu(t)" + int8_qdq("x", "k") + "r = Add(k, u) y = Sqrt(r)",
        "fused",
    ),
    ("tensorrt", A + WC + "t = Conv(a, v) r = Add(t, x) y = Sqrt(r)", "not-quantized"),
    (
        "tensorrt",
        A + WC + "t = Conv(a, v) q = Sqrt(t)" + int8_qdq("x", "k") + "r = Add(t, k) y = Add(r, q)",
        "float-input",
    ),
    (
        "tensorrt",
        A + W1 + "t = ConvTranspose(a, v)" + int8_qdq("x", "k") + "r = Add(t, k) y = Sqrt(r)",
        "fused",
    ),
    ("tensorrt", A + int8_qdq("x2", "k") + "r = Add(a, k)" + Y, "int8"),
    ("tensorrt", A + int8_qdq("x2", "k") + "r = Add(a, k) y = Sqrt(r)", "no-quantized-output"),
    # others want both sides
    ("tensorrt", A + "r = MaxPool<kernel_shape = [2, 2]>(a)" + Y, "int8"),
    ("tensorrt", A + "r = MaxPool<kernel_shape = [2, 2]>(a) y = Sqrt(r)", "no-quantized-output"),
    ("tensorrt", A + int8_qdq("x2", "k") + "r = Concat<axis = 1>(a, k)" + Y, "int8"),
    ("tensorrt", A + int8_qdq("x2", "k", "s2") + "r = Concat<axis = 1>(a, k)" + Y, "tie"),
    ("tensorrt", A + "r = Softmax(a)" + Y, "no-kernel"),
    ("tensorrt", A + "r = Erf(a)" + Y, "no-kernel"),
    ("tensorrt", A + "r = LayerNormalization<axis = 1>(a, x, x)" + Y, "no-kernel"),
    # QNN
    ("qnn", U + W + "r = Conv(a, v)" + YU, "int8"),
    ("qnn", U + WC + "r = Conv(a, v)" + YU, "int8"),
    ("qnn", U + "v = DequantizeLinear(wu, s, z) r = Conv(a, v)" + YU, "int8"),
    ("qnn", U + "v = DequantizeLinear<axis = 0>(wu, v0, zu) r = Conv(a, v)" + YU, "type"),
    ("qnn", U + "v = DequantizeLinear(w, s, i5) r = Conv(a, v)" + YU, "zero-point"),
    ("qnn", U + W1 + "r = Conv(a, v)" + YU, "weight-axis"),
    ("qnn", U + W1 + "r = ConvTranspose(a, v)" + YU, "int8"),
    ("qnn", A + W + "r = Conv(a, v)" + Y, "type"),
    ("qnn", U + W + "r = Conv(a, v) y = Sqrt(r)", "no-quantized-output"),
    ("qnn", U + W + "t = Conv(a, v) r = Relu(t)" + YU, "fused"),
    ("qnn", U + W + "t = ConvTranspose(a, v) r = Relu(t)" + YU, "fused"),
    ("qnn", U + W + "t = Conv(a, v) r = Tanh(t)" + YU, "float-input"),
    ("qnn", U + "v = DequantizeLinear<axis = 1>(m, v0, zz) r = MatMul(a, v)" + YU, "weight-axis"),
    ("qnn", U + "v = DequantizeLinear(m, s, i0) r = MatMul(a, v)" + YU, "int8"),
    ("qnn", U + int8_qdq("x2", "k", zero="z") + "r = Concat<axis = 1>(a, k)" + YU, "int8"),
    ("qnn", U + int8_qdq("x2", "k", "s2", zero="z") + "r = Concat<axis = 1>(a, k)" + YU, "tie"),
    ("qnn", U + "r = Reshape(a, flat) y = Sqrt(r)", "int8"),
    ("qnn", U + "r = Reshape(a, flat)" + int8_qdq("r", "y", "s2", zero="z"), "tie"),
    ("qnn", U + "t = Reshape(a, flat) r = Sigmoid(t)" + YU, "int8"),
    ("qnn", int8_qdq("x", "a", zero="u32") + "r = Sigmoid(a)" + int8_qdq("r", "y", "sig", zero="u0"), "int8"),
    ("qnn", int8_qdq("x", "a", zero="u32") + "r = Sigmoid(a)" + int8_qdq("r", "y", "s", zero="u0"), "fixed-range"),
    ("qnn", int8_qdq("x", "a", zero="u32") + "r = Tanh(a)" + int8_qdq("r", "y", "tan", zero="u32"), "int8"),
    ("qnn", int8_qdq("x", "a", zero="u32") + "r = Tanh(a)" + int8_qdq("r", "y", "tan", zero="u0"), "fixed-range"),
    ("qnn", U + "r = Erf(a)" + YU, "no-kernel"),
    # OpenVINO
    ("openvino", U + WC + "r = Conv(a, v, b) y = Sqrt(r)", "int8"),
    ("openvino", A + W + "r = Conv(a, v) y = Sqrt(r)", "int8"),
    ("openvino", U + "v = DequantizeLinear(wu, s, z) r = Conv(a, v) y = Sqrt(r)", "type"),
    ("openvino", U + "v = DequantizeLinear(w, s, i5) r = Conv(a, v) y = Sqrt(r)", "zero-point"),
    ("openvino", U + WC + "c = DequantizeLinear(bi, s, n0) r = Conv(a, v, c) y = Sqrt(r)", "bias"),
    ("openvino", WC + "r = Conv(x, v) y = Sqrt(r)", "float-input"),
    ("openvino", U + W1 + "r = Conv(a, v) y = Sqrt(r)", "weight-axis"),
    ("openvino", U + "r = Sub(a, a) y = Sqrt(r)", "int8"),
    ("openvino", U + "r = Div(a, a) y = Sqrt(r)", "int8"),
    ("openvino", U + "r = ReduceMean(a, axes) y = Sqrt(r)", "int8"),
    ("openvino", U + 'r = Resize<mode = "linear">(a, , sizes) y = Sqrt(r)', "int8"),
    ("openvino", U + 'r = Resize<mode = "cubic">(a, , sizes) y = Sqrt(r)', "mode"),
    ("openvino", U + "r = MaxPool<kernel_shape = [2, 2]>(a) y = Sqrt(r)", "int8"),
    ("openvino", "r = MaxPool<kernel_shape = [2, 2]>(x) y = Sqrt(r)", "not-quantized"),
    ("openvino", U + "t = MaxPool<kernel_shape = [2, 2]>(a)" + WC + "r = Conv(t, v) y = Sqrt(r)", "int8"),
    ("openvino", U + int8_qdq("x2", "k", zero="z") + "r = Concat<axis = 1>(a, k) y = Sqrt(r)", "int8"),
    ("openvino", U + int8_qdq("x2", "k", "s2", zero="z") + "r = Concat<axis = 1>(a, k) y = Sqrt(r)", "tie"),
    ("openvino", U + WC + "t = Conv(a, v) r = Relu(t) y = Sqrt(r)", "fused"),
    ("openvino", U + "r = Softmax(a) y = Sqrt(r)", "no-kernel"),
    ("openvino", int8_qdq("x", "a", zero="u32") + WC + "r = Conv(a, v) y = Sqrt(r)", "type"),
    ("openvino", U + KU + f"t = Concat<axis = 0>(a, k) {int8_qdq('t', 'j', zero='z')}" + WC + CJ, "zero-point"),
    ("openvino", U + KU + f"t = Concat<axis = -3>(a, k) {int8_qdq('t', 'j', zero='z')}" + W32 + CJ, "int8"),
    ("openvino", A + K + f"t = Concat<axis = 2>(a, k) {int8_qdq('t', 'j')}" + WC + CJ, "int8"),
    ("openvino", U + NU + f"t = Concat<axis = 0>(a, k) {int8_qdq('t', 'j', zero='z')}" + MJ, "refused"),
    ("openvino", U + NU + f"t = Concat<axis = -1>(a, k) {int8_qdq('t', 'j', zero='z')}" + M32J, "int8"),
    ("openvino", A + N + f"t = Concat<axis = 0>(a, k) {int8_qdq('t', 'j')}" + MJ, "int8"),
    ("openvino", A + f"{K8} r = Concat<axis = 1>(a, k) y = Sqrt(r)", "constant-part"),
    ("openvino", U + f"{KU8} r = Concat<axis = 1>(a, k) y = Sqrt(r)", "int8"),
    ("openvino", A + f"{K8} t = Concat<axis = 0>(a, k) {int8_qdq('t', 'j')}" + WC + CJ, "constant-part"),
    # Vitis AI
    ("vitis_ai", P + WP + B8 + "r = Conv(a, v, c)" + YP, "int8"),
    ("vitis_ai", P + WP + "r = Conv(a, v, b)" + YP, "float-bias"),
    ("vitis_ai", A + WP + "r = Conv(a, v)" + YP, "power-of-two"),
    ("vitis_ai", P + WC + "r = Conv(a, v)" + YP, "power-of-two"),
    ("vitis_ai", int8_qdq("x", "a", "p4", zero="z") + WP + "r = Conv(a, v)" + YP, "type"),
    ("vitis_ai", int8_qdq("x", "a", "p4", zero="i5") + WP + "r = Conv(a, v)" + YP, "zero-point"),
    ("vitis_ai", P + WP + "r = Conv(a, v) y = Sqrt(r)", "no-quantized-output"),
    ("vitis_ai", P + WP + "r = Conv(a, v)" + int8_qdq("r", "y", "p14"), "shift"),
    (
        "vitis_ai",
        int8_qdq("x", "a", "p14")
        + WP
        + "c = DequantizeLinear(b8, p4, i0) r = Conv(a, v, c)"
        + int8_qdq("r", "y", "p6"),
        "shift",
    ),
    ("vitis_ai", P + WP + "t = Conv(a, v) r = Relu(t)" + YP, "fused"),
    ("vitis_ai", P + WP + "t = Conv(a, v) r = PRelu(t, x)" + YP, "fused"),
    ("vitis_ai", P + int8_qdq("x2", "k", "p4") + "r = Add(a, k)" + YP, "int8"),
    ("vitis_ai", P + int8_qdq("x2", "k", "p6") + "r = Add(a, k)" + YP, "int8"),
    ("vitis_ai", P + int8_qdq("x2", "k", "p14") + "r = Add(a, k)" + YP, "shift"),
    ("vitis_ai", P + int8_qdq("x2", "k", "p6") + "r = Add(a, k)" + int8_qdq("r", "y", "p16"), "shift"),
    ("vitis_ai", P + int8_qdq("x2", "k", "p6") + "r = Mul(a, k)" + YP, "int8"),
    ("vitis_ai", P + int8_qdq("x2", "k", "p6") + "r = Mul(a, k)" + int8_qdq("r", "y", "p14"), "shift"),
    ("vitis_ai", P + int8_qdq("x2", "k", "p4") + "r = Concat<axis = 1>(a, k)" + YP, "int8"),
    ("vitis_ai", P + int8_qdq("x2", "k", "p6") + "r = Concat<axis = 1>(a, k)" + YP, "tie"),
    ("vitis_ai", P + "r = Pad(a, pads)" + YP, "int8"),
    ("vitis_ai", P + "r = Pad(a, pads)" + int8_qdq("r", "y", "p3"), "tie"),
    ("vitis_ai", P + "r = Softmax(a)" + YP, "no-kernel"),
]


def load_int8_net(text, tmp_path):
    """Return the model with the ops in `text`."""
    inputs = "float[32,16] x" if "MatMul" in text else "float[1,16,4,4] x, float[1,16,4,4] x2"
    return load_with_constants(tmp_path, f"g ({inputs}) => (float y) {{ {text} }}", CONSTANTS)


@pytest.mark.parametrize(("backend", "text", "expected"), CASES)
def test_verdicts(backend, text, expected, tmp_path):
    """The op `r` runs as documented, or breaks the documented rule."""
    verdicts = {verdict.op: verdict for verdict in BACKENDS[backend].judge(load_int8_net(text, tmp_path))}
    found = verdicts["r"]
    assert (found.broken_rule.rule if found.broken_rule else found.status) == expected
    assert (found.status == "float") == (found.broken_rule is not None)


@pytest.mark.parametrize("backend", ["tensorrt", "qnn", "openvino", "vitis_ai"])
def test_enough_cases(backend):
    """Each table has several cases of either verdict."""
    told = [expected in {"int8", "fused"} for name, _, expected in CASES if name == backend]
    assert sum(told) >= 7
    assert len(told) - sum(told) >= 8


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (A + WC + "r = Conv(a, v) y = Sqrt(r)", ""),
        (A + "v = DequantizeLinear(ws, s, i0) r = Conv(a, v) y = Sqrt(r)", ""),
        (
            "f = Sqrt(x)" + int8_qdq("f", "a") + "v = DequantizeLinear(ws, s, i0) r = Conv(a, v) y = Sqrt(r)",
            "16 to 4 channels",
        ),
        (A + "v = DequantizeLinear(wd, s, i0) r = Conv<group = 16>(a, v) y = Sqrt(r)", ""),
        (int8_qdq("x", "a") + "v = DequantizeLinear(m, s, i0) r = MatMul(a, v) y = Sqrt(r)", ""),
    ],
)
def test_tensorrt_small_op_notes(text, note, tmp_path):
    """An op that is too small for integers gets a note."""
    verdicts = {verdict.op: verdict for verdict in BACKENDS["tensorrt"].judge(load_int8_net(text, tmp_path))}
    assert verdicts["r"].status == "int8"
    assert note in verdicts["r"].note
    assert bool(note) == bool(verdicts["r"].note)


def test_plans_for_these_backends_only():
    """A plan is for ONNX Runtime unless its rule files have other targets, of which rule files name all."""
    names = get_args(get_type_hints(RuleFile)["target"])
    assert set(names) == {"", *BACKENDS}
    plan = Plan(format="onnx", model="", prepared="", rules=())
    cases = {(): True, ("qnn",): False, ("onnxruntime", "qnn"): True, ("openvino", "qnn"): False}
    assert {targets: replace(plan, targets=targets).for_onnxruntime for targets in cases} == cases

"""Verdicts of `check --for onnxruntime` on small graphs: the op of ONNX Runtime, and the reason for each float op.

The expected ops are found in the optimized model by name, independently of the traces.
"""

import importlib.util
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as errors
from support.onnx_models import qdq_text

import graphquant as gq
from graphquant.backends import check_quantized_model
from graphquant.backends.findings import RejectedModelError
from graphquant.backends.onnxruntime import REJECTION_REMEDIES, ask_onnxruntime
from graphquant.formats.onnx.runtime import RUNTIME_ERRORS

SPEC = importlib.util.spec_from_file_location("run_onnxruntime", Path(__file__).with_name("run_onnxruntime.py"))
truth = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(truth)
RELEASE = tuple(map(int, onnxruntime.__version__.split(".")[:2]))

CONSTANTS = {
    "s": np.float32(0.1),
    "s2": np.float32(0.2),
    "s6": np.float32(6 / 255),
    "tiny": np.float32(1 / 255),
    "neg": np.float32(-0.1),
    "vec": np.full(4, 0.1, np.float32),
    "one": np.full(1, 0.1, np.float32),
    "z": np.uint8(128),
    "z0": np.uint8(0),
    "i0": np.int8(0),
    "imin": np.int8(-128),
    "ivec": np.zeros(4, np.int8),
    "h0": np.int16(0),
    "u16": np.uint16(32768),
    "n0": np.int32(0),
    "sb": np.float32(0.1) * np.float32(0.1),
    "w": np.arange(-8, 8, dtype=np.int8).reshape(4, 4, 1, 1),
    "wbig": np.arange(-120, 120, 15, dtype=np.int8).reshape(4, 4, 1, 1),
    "wu": np.arange(120, 136, dtype=np.uint8).reshape(4, 4, 1, 1),
    "wh": np.arange(-8, 8, dtype=np.int16).reshape(4, 4, 1, 1),
    "wf": np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4, 1, 1),
    "m": np.arange(-8, 8, dtype=np.int8).reshape(4, 4),
    "mf": np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4),
    "m3": np.arange(-16, 16, dtype=np.int8).reshape(2, 4, 4),
    "bf": np.linspace(-1, 1, 4, dtype=np.float32),
    "b2": np.ones((2, 4), np.float32),
    "bi": np.arange(4, dtype=np.int32),
    "b8": np.arange(4, dtype=np.int8),
    "kf": np.full((1, 4, 1, 1), 0.5, np.float32),
    "k8": np.full((1, 4, 1, 1), 5, np.int8),
    "ku": np.full((1, 4, 1, 1), 133, np.uint8),
    "c0": np.float32(0),
    "c6": np.float32(6),
    "cn": np.float32(-3),
    "emb": np.arange(40, dtype=np.uint8).reshape(10, 4),
    "ids": np.array([1, 3], np.int64),
    "flat": np.array([1, 64], np.int64),
    "lead": np.array([0], np.int64),
    "ends": np.array([2], np.int64),
    "half": np.array([1], np.int64),
    "tiles": np.array([1, 1, 2, 1], np.int64),
    "grow": np.array([2, 4, 4, 4], np.int64),
    "sizes": np.array([1, 1, 2, 2], np.float32),
    "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64),
}

IMAGE = "float[1,4,4,4] x"
ROWS = "float[3,4] x"


def op_between_pairs(call, *, scale="s", zero="z", given="x", more=""):
    """Return the text of an op between a pair on its input `a` and a pair on its output `r`."""
    return f"{qdq_text(given, 'a')} {more} r = {call} {qdq_text('r', 'y', scale, zero)}"


A, W = qdq_text("x", "a"), "v = DequantizeLinear(w, s, i0) "
M, B = "v = DequantizeLinear(m, s, i0) ", "b = DequantizeLinear(bi, sb, n0) "
MC = "v = DequantizeLinear<axis = 1>(m, vec, ivec) "
Y = qdq_text("r", "y")
ALONE = "v = DequantizeLinear<axis = 1>(q8, sv) y = MatMul(x, v) "

CASES = {
    # Conv
    "conv": (A + W + "r = Conv(a, v)" + Y, "QLinearConv"),
    "conv per channel": (A + "v = DequantizeLinear<axis = 0>(w, vec, ivec) r = Conv(a, v)" + Y, "QLinearConv"),
    "conv int32 bias": (A + W + B + "r = Conv(a, v, b)" + Y, "QLinearConv"),
    "conv bias of another scale": (A + W + "b = DequantizeLinear(bi, s, n0) r = Conv(a, v, b)" + Y, "bias-scale"),
    "gemm bias of another scale": (A + M + "b = DequantizeLinear(bi, s, n0) r = Gemm(a, v, b)" + Y, "QGemm"),
    "conv float bias": (A + W + "r = Conv(a, v, bf)" + Y, "QLinearConv"),
    "conv int8 bias": (A + W + "b = DequantizeLinear(b8, s, i0) r = Conv(a, v, b)" + Y, "bias-type"),
    "conv float weight": (A + "r = Conv(a, wf)" + Y, "QLinearConv"),
    "conv float weight and bias": (A + "r = Conv(a, wf, bf)" + Y, "QLinearConv"),
    "conv uint8 weight": (A + "v = DequantizeLinear(wu, s, z) r = Conv(a, v)" + Y, "QLinearConv"),
    "conv int8 activation": (
        qdq_text("x", "a", zero="i0") + W + "r = Conv(a, v)" + qdq_text("r", "y", zero="i0"),
        "QLinearConv",
    ),
    "conv int8 activation, wide weight": (
        qdq_text("x", "a", zero="i0")
        + "v = DequantizeLinear(wbig, s, i0) r = Conv(a, v)"
        + qdq_text("r", "y", zero="i0"),
        "QLinearConv",
    ),
    "conv without Q": (A + W + "y = Conv(a, v)", "no-quantized-output", "y"),
    "conv without Q, bias": (A + W + "y = Conv(a, v, bf)", "float-bias", "y"),
    "conv read by Q and float": (A + W + "r = Conv(a, v)" + Y + "u = Sqrt(r)", "float-reader"),
    "conv is an output too": (A + W + "r = Conv(a, v)" + Y, "graph-output", "r", "r"),
    "conv float input": (W + "r = Conv(x, v)" + Y, "float-input"),
    "conv 16-bit activation": (
        qdq_text("x", "a", zero="h0") + W + "r = Conv(a, v)" + qdq_text("r", "y", zero="h0"),
        "type",
    ),
    "conv 16-bit weight": (A + "v = DequantizeLinear(wh, s, h0) r = Conv(a, v)" + Y, "type"),
    "conv mixed types": (A + W + "r = Conv(a, v)" + qdq_text("r", "y", zero="h0"), "mixed-types"),
    "conv int8 shared by two": (
        qdq_text("x", "a", zero="i0")
        + W
        + "r = Conv(a, v)"
        + qdq_text("r", "y", zero="i0")
        + "t = Conv(a, wf)"
        + qdq_text("t", "u", zero="i0"),
        "int8-activation",
    ),
    "conv uint8 shared by two": (A + W + "r = Conv(a, v)" + Y + "t = Conv(a, wf)" + qdq_text("t", "u"), "QLinearConv"),
    "conv transpose": (A + W + "r = ConvTranspose(a, v)" + Y, "no-kernel"),
    "conv scale of one element": (qdq_text("x", "a", "one", "z") + W + "r = Conv(a, v)" + Y, "QLinearConv"),
    # Conv and what is absorbed
    "conv relu": (A + W + "r = Conv(a, v) t = Relu(r)" + qdq_text("t", "y", zero="z0"), "QLinearConv"),
    "conv relu int8": (
        qdq_text("x", "a", zero="i0") + W + "r = Conv(a, v) t = Relu(r)" + qdq_text("t", "y", zero="imin"),
        "QLinearConv",
    ),
    "conv relu symmetric": (A + W + "r = Conv(a, v) t = Relu(r)" + qdq_text("t", "y"), "relu-zero-point"),
    "conv relu symmetric int8": (
        qdq_text("x", "a", zero="i0") + W + "r = Conv(a, v) t = Relu(r)" + qdq_text("t", "y", zero="i0"),
        "relu-zero-point",
    ),
    "conv relu without Q": (A + W + "r = Conv(a, v) y = Relu(r)", "no-quantized-output"),
    "conv relu float": (A + W + "r = Conv(a, v) t = Relu(r) y = Sqrt(t)", "no-quantized-output"),
    "conv read twice, relu": (
        A + W + "r = Conv(a, v) t = Relu(r) u = Sqrt(r)" + qdq_text("t", "y", zero="z0"),
        "float-reader",
    ),
    "the relu behind a conv": (A + W + "t = Conv(a, v) r = Relu(t)" + qdq_text("r", "y", zero="z0"), "fused"),
    "conv clip inside": (
        A + W + "r = Conv(a, v) t = Clip(r, c0, c6)" + qdq_text("t", "y", "s6", "z0"),
        "QLinearConv",
    ),
    "conv clip wider": (A + W + "r = Conv(a, v) t = Clip(r, c0, c6)" + qdq_text("t", "y", "s", "z0"), "clip-range"),
    "conv clip narrower": (
        A + W + "r = Conv(a, v) t = Clip(r, c0, c6)" + qdq_text("t", "y", "tiny", "z0"),
        "QLinearConv",
    ),
    "conv clip signed": (A + W + "r = Conv(a, v) t = Clip(r, cn, c6)" + qdq_text("t", "y", "tiny", "z"), "QLinearConv"),
    "the clip behind a conv": (
        A + W + "t = Conv(a, v) r = Clip(t, c0, c6)" + qdq_text("r", "y", "s6", "z0"),
        "fused",
    ),
    "conv batchnorm": (A + W + "t = Conv(a, v) r = BatchNormalization(t, bf, bf, bf, vec)" + Y, "no-kernel"),
    "conv before batchnorm": (
        A + W + "r = Conv(a, v) t = BatchNormalization(r, bf, bf, bf, vec)" + qdq_text("t", "y"),
        "no-quantized-output",
    ),
    # MatMul and Gemm
    "matmul": (A + M + "r = MatMul(a, v)" + Y, "QLinearMatMul"),
    "matmul per channel": (A + MC + "r = MatMul(a, v)" + Y, "QLinearMatMul"),
    "matmul without Q": (A + M + "y = MatMul(a, v)", "MatMulIntegerToFloat", "y"),
    "matmul read by Q and float": (A + M + "r = MatMul(a, v)" + Y + "u = Sqrt(r)", "float-reader"),
    "matmul of activations": (A + qdq_text("x2", "v") + "r = MatMul(a, v)" + Y, "QLinearMatMul"),
    "matmul float weight": (A + "r = MatMul(a, mf)" + Y, "float-input"),
    "matmul 16 bit": (
        qdq_text("x", "a", zero="h0") + M + "r = MatMul(a, v)" + qdq_text("r", "y", zero="h0"),
        "type",
    ),
    "matmul relu without Q": (A + M + "r = MatMul(a, v) y = Relu(r)", "MatMulIntegerToFloat"),
    "matmul relu, float behind": (A + M + "r = MatMul(a, v) t = Relu(r) y = Sqrt(t)", "no-quantized-output"),
    "matmul relu Q": (A + M + "r = MatMul(a, v) t = Relu(r)" + qdq_text("t", "y", zero="z0"), "QLinearMatMul"),
    "matmul add Q": (A + M + "r = MatMul(a, v) t = Add(r, bf)" + qdq_text("t", "y"), "QGemm"),
    "the add of a matmul": (A + M + "t = MatMul(a, v) r = Add(t, bf)" + Y, "fused"),
    "add matmul, bias first": (A + M + "r = MatMul(a, v) t = Add(bf, r)" + qdq_text("t", "y"), "QGemm"),
    "matmul add without Q": (A + M + "r = MatMul(a, v) y = Add(r, bf)", "float-bias"),
    "the add of a float gemm": (A + M + "t = MatMul(a, v) y = Add(t, bf)", "float-bias", "y"),
    "matmul add relu": (A + M + "r = MatMul(a, v) t = Add(r, bf) p = Relu(t)" + qdq_text("p", "y", zero="z0"), "QGemm"),
    "matmul add of a wrong shape": (
        A + M + "r = MatMul(a, v) t = Add(r, kf)" + qdq_text("t", "y"),
        "MatMulIntegerToFloat",
    ),
    "matmul Q add": (
        A + M + "r = MatMul(a, v)" + qdq_text("r", "e") + "t = Add(e, bf)" + qdq_text("t", "y"),
        "QLinearMatMul",
    ),
    "gemm": (A + M + "r = Gemm(a, v)" + Y, "QGemm"),
    "gemm without Q": (A + M + "y = Gemm(a, v)", "QGemm", "y"),
    "gemm int32 bias": (A + M + B + "r = Gemm(a, v, b)" + Y, "QGemm"),
    "gemm int32 bias, no Q": (A + M + B + "y = Gemm(a, v, b)", "QGemm", "y"),
    "gemm float bias": (A + M + "r = Gemm(a, v, bf)" + Y, "QGemm"),
    "gemm float bias, no Q": (A + M + "y = Gemm(a, v, bf)", "float-bias", "y"),
    "gemm beta": (A + M + B + "r = Gemm<beta = 0.5>(a, v, b)" + Y, "beta"),
    "gemm transB": (A + "v = DequantizeLinear<axis = 0>(m, vec, ivec) r = Gemm<transB = 1>(a, v, bf)" + Y, "QGemm"),
    "gemm int8 bias": (A + M + "b = DequantizeLinear(b8, s, i0) r = Gemm(a, v, b)" + Y, "bias-type"),
    "gemm 16 bit": (qdq_text("x", "a", zero="h0") + M + "r = Gemm(a, v)" + qdq_text("r", "y", zero="h0"), "type"),
    # weights of few bits, float activations
    "blocks of 16": ("v = DequantizeLinear<axis = 0, block_size = 16>(q4, sq) y = MatMul(x, v)", "MatMulNBits", "y"),
    "blocks with zero points": (
        "v = DequantizeLinear<axis = 0, block_size = 16>(qu4, sq, zq) y = MatMul(x, v)",
        "MatMulNBits",
        "y",
    ),
    "blocks and a bias": (
        "v = DequantizeLinear<axis = 0, block_size = 16>(q4, sq) r = MatMul(x, v) y = Add(r, bq)",
        "MatMulNBits",
    ),
    "blocks, Gemm": ("v = DequantizeLinear<axis = 0, block_size = 16>(q4, sq) y = Gemm(x, v, bq)", "MatMulNBits", "y"),
    "blocks, Gemm with alpha": (
        "v = DequantizeLinear<axis = 0, block_size = 16>(q4, sq) y = Gemm<alpha = 2.0>(x, v, bq)",
        "float-input",
        "y",
    ),
    "blocks along axis 1": (
        "v = DequantizeLinear<axis = 1, block_size = 16>(q4, sr) y = MatMul(x, v)",
        "weight-axis",
        "y",
    ),
    "blocks of 8": ("v = DequantizeLinear<axis = 0, block_size = 8>(q4, se) y = MatMul(x, v)", "block-size", "y"),
    "blocks before Q": ("v = DequantizeLinear<axis = 0, block_size = 16>(q4, sq) r = MatMul(x, v)" + Y, "float-input"),
    "blocks read twice": (
        "v = DequantizeLinear<axis = 0, block_size = 16>(q4, sq) y = MatMul(x, v) u = Sqrt(v)",
        "shared-weight",
        "y",
    ),
    "blocks, equal scales": (
        ALONE + "p = DequantizeLinear<axis = 1>(q82, sv2) u = MatMul(x, p)",
        "shared-weight",
        "y",
    ),
    "blocks, other scales": (
        ALONE + "p = DequantizeLinear<axis = 1>(q82, sv3) u = MatMul(x, p)",
        "MatMulNBits",
        "y",
    ),
    "blocks of 8 bits": (
        "v = DequantizeLinear<axis = 0, block_size = 16>(q8, sq) y = MatMul(x, v)",
        "MatMulNBits",
        "y",
    ),
    "weight alone": ("v = DequantizeLinear(q8, s, i0) y = MatMul(x, v)", "MatMulNBits", "y"),
    "weight alone per channel": (
        "v = DequantizeLinear<axis = 1>(q8, sv, iv) y = MatMul(x, v)",
        "MatMulNBits",
        "y",
    ),
    "weight alone per row": (
        "v = DequantizeLinear<axis = 0>(q8, sw, iw) y = MatMul(x, v)",
        "weight-axis",
        "y",
    ),
    "matmul beside another": (
        A + M + "u = DequantizeLinear(m, s, i0) p = MatMul(a, v) r = MatMul(a, u) y = Add(p, r)",
        "MatMulIntegerToFloat",
        "p",
    ),
    "matmul that takes another for its bias": (
        A + M + "u = DequantizeLinear(m, s, i0) p = MatMul(a, v) r = MatMul(a, u) y = Add(p, r)",
        "float-bias",
    ),
    # joints
    "add": (A + qdq_text("x2", "b", "s2") + "r = Add(a, b)" + Y, "QLinearAdd"),
    "add to itself": (A + "r = Add(a, a)" + Y, "QLinearAdd"),
    "add, one float": (A + "r = Add(a, x2)" + Y, "float-input"),
    "add without Q": (A + qdq_text("x2", "b") + "y = Add(a, b)", "no-quantized-output", "y"),
    "add of a constant": (A + "b = DequantizeLinear(ku, s, z) r = Add(a, b)" + Y, "QLinearAdd"),
    "add of an int8 constant": (A + "b = DequantizeLinear(k8, s, i0) r = Add(a, b)" + Y, "mixed-types"),
    "add 16 bit": (
        qdq_text("x", "a", zero="h0")
        + qdq_text("x2", "b", zero="h0")
        + "r = Add(a, b)"
        + qdq_text("r", "y", zero="h0"),
        "type",
    ),
    "add relu": (A + qdq_text("x2", "b") + "r = Add(a, b) t = Relu(r)" + qdq_text("t", "y", zero="z0"), "QLinearAdd"),
    "mul": (A + qdq_text("x2", "b") + "r = Mul(a, b)" + Y, "QLinearMul"),
    "mul by a float constant": (A + "r = Mul(a, kf)" + Y, "float-input"),
    "mul without Q": (A + qdq_text("x2", "b") + "y = Mul(a, b)", "no-quantized-output", "y"),
    "concat, other scales": (A + qdq_text("x2", "b", "s2") + "r = Concat<axis = 1>(a, b)" + Y, "QLinearConcat"),
    "concat, one float": (A + "r = Concat<axis = 1>(a, x2)" + Y, "float-input"),
    "concat, other types": (
        A + qdq_text("x2", "b", zero="h0") + "r = Concat<axis = 1>(a, b)" + Y,
        "mixed-types",
    ),
    "concat without Q": (A + qdq_text("x2", "b") + "y = Concat<axis = 1>(a, b)", "no-quantized-output", "y"),
    "where": (A + qdq_text("x2", "b") + "r = Where(flag, a, b)" + Y, "QLinearWhere"),
    "where a scalar": (A + "r = Where(flag, a, c0)" + Y, "QLinearWhere"),
    "where a float tensor": (A + "r = Where(flag, a, x2)" + Y, "float-input"),
    # one input
    "sigmoid": (op_between_pairs("Sigmoid(a)", scale="tiny", zero="z0"), "QLinearSigmoid"),
    "sigmoid without Q": (A + "y = Sigmoid(a)", "no-quantized-output", "y"),
    "sigmoid float": ("r = Sigmoid(x)" + Y, "float-input"),
    "sigmoid 16 bit": (qdq_text("x", "a", zero="u16") + "r = Sigmoid(a)" + qdq_text("r", "y", zero="u16"), "type"),
    "softmax": (op_between_pairs("Softmax(a)", scale="tiny", zero="z0"), "QLinearSoftmax"),
    "softmax without Q": (A + "y = Softmax(a)", "no-quantized-output", "y"),
    "leaky relu": (op_between_pairs("LeakyRelu<alpha = 0.1>(a)"), "QLinearLeakyRelu"),
    "leaky relu without Q": (A + "y = LeakyRelu(a)", "no-quantized-output", "y"),
    "average pool": (op_between_pairs("AveragePool<kernel_shape = [2, 2]>(a)"), "QLinearAveragePool"),
    "average pool without Q": (A + "y = AveragePool<kernel_shape = [2, 2]>(a)", "no-quantized-output", "y"),
    "global average pool": (op_between_pairs("GlobalAveragePool(a)"), "QLinearGlobalAveragePool"),
    "global average pool without Q": (A + "y = GlobalAveragePool(a)", "no-quantized-output", "y"),
    # same scale on both sides
    "max pool": (op_between_pairs("MaxPool<kernel_shape = [2, 2]>(a)"), "MaxPool on uint8"),
    "max pool, other scale": (op_between_pairs("MaxPool<kernel_shape = [2, 2]>(a)", scale="s2"), "tie"),
    "max pool, only Q": ("r = MaxPool<kernel_shape = [2, 2]>(x)" + Y, "MaxPool on uint8"),
    "max pool, only DQ": (A + "y = MaxPool<kernel_shape = [2, 2]>(a)", "MaxPool on uint8", "y"),
    "max pool, Q and float": (A + "r = MaxPool<kernel_shape = [2, 2]>(a) u = Sqrt(r)" + Y, "float-reader"),
    "max pool opset 11": (op_between_pairs("MaxPool<kernel_shape = [2, 2]>(a)"), "opset", "r", "", 11),
    "max pool 16 bit": (
        qdq_text("x", "a", zero="h0") + "r = MaxPool<kernel_shape = [2, 2]>(a)" + qdq_text("r", "y", zero="h0"),
        "type",
    ),
    "reshape": (op_between_pairs("Reshape(a, flat)"), "Reshape on uint8"),
    "reshape, other scale": (op_between_pairs("Reshape(a, flat)", scale="s2"), "tie"),
    "reshape, only DQ": (A + "r = Reshape(a, flat) y = Sqrt(r)", "Reshape on uint8"),
    "reshape, only Q": ("r = Reshape(x, flat)" + Y, "Reshape on uint8"),
    "reshape float": ("r = Reshape(x, flat) y = Sqrt(r)", "not-quantized"),
    "reshape 16 bit": (
        qdq_text("x", "a", zero="h0") + "r = Reshape(a, flat)" + qdq_text("r", "y", zero="h0"),
        "Reshape on int16",
    ),
    "transpose": (op_between_pairs("Transpose<perm = [0, 2, 3, 1]>(a)"), "Transpose on uint8"),
    "transpose, other zero point": (op_between_pairs("Transpose<perm = [0, 2, 3, 1]>(a)", zero="z0"), "tie"),
    "flatten": (op_between_pairs("Flatten(a)"), "Flatten on uint8"),
    "flatten, other scale": (op_between_pairs("Flatten(a)", scale="s2"), "tie"),
    "flatten, only DQ": (A + "r = Flatten(a) y = Sqrt(r)", "no-quantized-output"),
    "squeeze": (op_between_pairs("Squeeze(a, lead)"), "Squeeze on uint8"),
    "squeeze, other scale": (op_between_pairs("Squeeze(a, lead)", scale="s2"), "tie"),
    "unsqueeze": (op_between_pairs("Unsqueeze(a, lead)"), "Unsqueeze on uint8"),
    "unsqueeze, other scale": (op_between_pairs("Unsqueeze(a, lead)", scale="s2"), "tie"),
    "slice": (op_between_pairs("Slice(a, half, ends, half)"), "Slice on uint8"),
    "slice, other scale": (op_between_pairs("Slice(a, half, ends, half)", scale="s2"), "tie"),
    "resize": (op_between_pairs('Resize<mode = "nearest">(a, , sizes)'), "Resize on uint8"),
    "resize, linear": (
        op_between_pairs('Resize<mode = "linear">(a, , sizes)'),
        "mode" if RELEASE >= (1, 28) else "Resize on uint8",
    ),
    "resize, other scale": (op_between_pairs('Resize<mode = "nearest">(a, , sizes)', scale="s2"), "tie"),
    "resize 16 bit": (
        qdq_text("x", "a", zero="h0") + 'r = Resize<mode = "nearest">(a, , sizes)' + qdq_text("r", "y", zero="h0"),
        "type",
    ),
    "expand": (op_between_pairs("Expand(a, grow)"), "Expand on uint8"),
    "expand, other scale": (op_between_pairs("Expand(a, grow)", scale="s2"), "tie"),
    "gather": (op_between_pairs("Gather<axis = 1>(a, ids)"), "Gather on uint8"),
    "gather, other scale": (op_between_pairs("Gather<axis = 1>(a, ids)", scale="s2"), "tie"),
    "depth to space": (op_between_pairs("DepthToSpace<blocksize = 2>(a)"), "DepthToSpace on uint8"),
    "depth to space, other scale": (op_between_pairs("DepthToSpace<blocksize = 2>(a)", scale="s2"), "tie"),
    "space to depth": (op_between_pairs("SpaceToDepth<blocksize = 2>(a)"), "no-kernel"),
    "tile": (op_between_pairs("Tile(a, tiles)"), "Tile on uint8"),
    "tile, other scale": (op_between_pairs("Tile(a, tiles)", scale="s2"), "tie"),
    "reduce max": (op_between_pairs("ReduceMax(a)"), "ReduceMax on uint8"),
    "reduce max, other scale": (op_between_pairs("ReduceMax(a)", scale="s2"), "tie"),
    "reduce min": (op_between_pairs("ReduceMin(a)"), "ReduceMin on uint8"),
    "split": (
        A + "r, t = Split<axis = 1, num_outputs = 2>(a)" + Y + qdq_text("t", "u"),
        "Split on uint8",
    ),
    "split, one float": (A + "r, t = Split<axis = 1, num_outputs = 2>(a)" + Y + "u = Sqrt(t)", "float-reader"),
    "split, other scale": (
        A + "r, t = Split<axis = 1, num_outputs = 2>(a)" + Y + qdq_text("t", "u", "s2"),
        "tie",
    ),
    "arg max": (A + "y = ArgMax(a)", "ArgMax on uint8", "y"),
    "arg max float": ("y = ArgMax(x)", "not-quantized", "y"),
    "embedding": ("v = DequantizeLinear(emb, s, z) r = Gather(v, ids)" + Y, "Gather on uint8"),
    "embedding, other scale": ("v = DequantizeLinear(emb, s, z) r = Gather(v, ids)" + qdq_text("r", "y", "s2"), "tie"),
    "embedding without Q": ("v = DequantizeLinear(emb, s, z) y = Gather(v, ids)", "no-quantized-output", "y"),
    # SiLU
    "silu": (
        A
        + W
        + "c = Conv(a, v)"
        + qdq_text("c", "d")
        + "g = Sigmoid(d)"
        + qdq_text("g", "h", "tiny", "z0")
        + "r = Mul(d, h)"
        + Y,
        "QLinearMul",
    ),
    "silu without the inner ones": (
        A + W + "r = Conv(a, v) g = Sigmoid(r) t = Mul(r, g)" + qdq_text("t", "y"),
        "no-quantized-output",
    ),
    # always float
    "sub": (A + qdq_text("x2", "b") + "r = Sub(a, b)" + Y, "no-kernel"),
    "div": (A + qdq_text("x2", "b") + "r = Div(a, b)" + Y, "no-kernel"),
    "max": (A + qdq_text("x2", "b") + "r = Max(a, b)" + Y, "no-kernel"),
    "min": (A + qdq_text("x2", "b") + "r = Min(a, b)" + Y, "no-kernel"),
    "pad": (op_between_pairs("Pad(a, pads)"), "no-kernel"),
    "tanh": (op_between_pairs("Tanh(a)"), "no-kernel"),
    "gelu": (op_between_pairs("Gelu(a)"), "no-kernel"),
    "hard swish": (op_between_pairs("HardSwish(a)"), "no-kernel"),
    "hard sigmoid": (op_between_pairs("HardSigmoid(a)"), "no-kernel"),
    "reduce mean": (op_between_pairs("ReduceMean(a)"), "no-kernel"),
    "reduce sum": (op_between_pairs("ReduceSum(a)"), "no-kernel"),
    "layer norm": (op_between_pairs("LayerNormalization<axis = -1>(a, bf, bf)"), "no-kernel"),
    "instance norm": (op_between_pairs("InstanceNormalization(a, bf, bf)"), "no-kernel"),
    "prelu": (op_between_pairs("PRelu(a, kf)"), "no-kernel"),
    "elu": (op_between_pairs("Elu(a)"), "no-kernel"),
    "relu": (op_between_pairs("Relu(a)"), "no-kernel"),
    "relu, zero point at the end": (op_between_pairs("Relu(a)", zero="z0"), "fused"),
    "clip": (op_between_pairs("Clip(a, c0, c6)"), "no-kernel"),
    "clip, range inside": (op_between_pairs("Clip(a, c0, c6)", scale="s6", zero="z0"), "fused"),
    # pairs
    "two pairs in a row": (
        A + "p = DequantizeLinear(a_q, s, z)" + qdq_text("p", "q2", "s2", "z0") + "r = Sigmoid(q2)" + Y,
        "QLinearSigmoid",
    ),
    "two equal Qs": (A + "r = Sigmoid(a)" + Y + qdq_text("r", "u"), "QLinearSigmoid"),
    "two other Qs": (A + "r = Sigmoid(a)" + Y + qdq_text("r", "u", "s2"), "several-scales"),
    "identity between": (A + "i = Identity(a) r = Sigmoid(i)" + Y, "QLinearSigmoid"),
    "dropout behind": (A + "r = Sigmoid(a) d = Dropout(r)" + qdq_text("d", "y"), "QLinearSigmoid"),
    "int8 read by a Shape": (
        qdq_text("x", "a", zero="i0") + W + "r = Conv(a, v)" + qdq_text("r", "y", zero="i0") + "u = Shape(a)",
        "QLinearConv",
    ),
    "constants quantized when the model runs": (
        A + "k_q = QuantizeLinear(kf, s, i0) k = DequantizeLinear(k_q, s, i0) r = Add(a, k)" + Y,
        "mixed-types",
    ),
    "dequantized output": (A + "r = Sigmoid(a)" + Y + "u = Sqrt(a)", "QLinearSigmoid", "r", "a"),
}

FEW = {
    "q4": np.arange(-8, 8).repeat(16).reshape(32, 8).astype(ml_dtypes.int4),
    "qu4": np.arange(16).repeat(16).reshape(32, 8).astype(ml_dtypes.uint4),
    "q8": np.arange(-128, 128).reshape(32, 8).astype(np.int8),
    "sq": np.full((2, 8), 0.1, np.float32),
    "sr": np.full((32, 1), 0.1, np.float32),
    "se": np.full((4, 8), 0.1, np.float32),
    "sv": np.full(8, 0.1, np.float32),
    "q82": np.arange(127, -129, -1).reshape(32, 8).astype(np.int8),
    "sv2": np.full(8, 0.1, np.float32),
    "sv3": np.full(8, 0.2, np.float32),
    "sw": np.full(32, 0.1, np.float32),
    "iv": np.zeros(8, np.int8),
    "iw": np.zeros(32, np.int8),
    "zq": np.full((2, 8), 8).astype(ml_dtypes.uint4),
    "bq": np.linspace(-1, 1, 8, dtype=np.float32),
}
"""Constants of the products with weights of few bits."""

RANK2 = ("matmul", "gemm", "the add", "add matmul")


def inputs(name):
    """Return the graph inputs: rows for matrix products, otherwise an image."""
    if name.startswith(("blocks", "weight alone")):
        return "float[3,32] x"
    if name.startswith(RANK2):
        return "float[3,4] x, float[4,4] x2"
    return "float[1,4,4,4] x, float[1,4,4,4] x2, bool[1,4,4,4] flag"


def build_case(name):
    """Return the model of a case, its op and the expected verdict."""
    text, expected, *rest = CASES[name]
    about, also, opset = (rest + ["r", "", 21][len(rest) :])[:3]
    outs = ["y", *(["u"] if " u = " in f" {text}" or "u = Deq" in text else []), *([also] if also else [])]
    header = f'<ir_version: 8, opset_import: ["": {opset}]>'
    kinds = ", ".join(
        f"{'int64' if f'{out} = ArgMax' in text or f'{out} = Shape' in text else 'float'}[] {out}" for out in outs
    )
    message = onnx.parser.parse_model(f"{header} g ({inputs(name)}) => ({kinds}) {{ {text} }}")
    used = {read for node in message.graph.node for read in node.input}
    for key, value in (CONSTANTS | FEW).items():
        if key in used:
            message.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), key))
    for output in message.graph.output:
        output.type.tensor_type.ClearField("shape")
    known = {value.name for value in message.graph.input}
    for extra in [value for value in message.graph.input if value.name not in used]:
        message.graph.input.remove(extra)
        known.discard(extra.name)
    truth.name_ops(message)
    return message, about, expected


def inside_if(message, own=(), outside=()):
    """Move the ops into both branches of an If, except inputs, constants and the ops called `outside`.

    Constants called `own` are moved as well.
    """
    inner = message.graph
    nodes = [node for node in inner.node if node.name not in outside]
    constants = [value for value in inner.initializer if value.name not in own]
    outer = onnx.GraphProto(name="outer", input=inner.input, initializer=constants)
    outer.node.extend(node for node in inner.node if node.name in outside)
    outer.input.append(onnx.helper.make_tensor_value_info("branch", onnx.TensorProto.BOOL, ()))
    branches = []
    for mark in ("then", "else"):
        body = onnx.GraphProto(name=mark, node=nodes)
        made = {name for node in nodes for name in node.output} | set(own)
        body.initializer.extend(value for value in inner.initializer if value.name in own)
        for value in body.initializer:
            value.name = f"{mark}_{value.name}"
        for node in body.node:
            node.name = f"{mark}/{node.name}"
            node.input[:] = [f"{mark}_{name}" if name in made else name for name in node.input]
            node.output[:] = [f"{mark}_{name}" if name else "" for name in node.output]
        for output in inner.output:
            body.output.append(output)
            body.output[-1].name = f"{mark}_{output.name}"
        branches.append(body)
    names = [output.name for output in inner.output]
    node = onnx.helper.make_node("If", ["branch"], names, name="if", then_branch=branches[0], else_branch=branches[1])
    outer.node.append(node)
    outer.output.extend(inner.output)
    return onnx.ModelProto(ir_version=message.ir_version, opset_import=message.opset_import, graph=outer)


def compare_verdicts(message, tmp_path):
    """Return the verdicts and the actual ops; none if ONNX Runtime rejects the model and the verdicts say so."""
    path = tmp_path / "model.onnx"
    onnx.save(message, path)
    try:
        actual = truth.runs_as(truth.optimized(path))
    except RUNTIME_ERRORS:
        with pytest.raises(RejectedModelError):
            ask_onnxruntime(gq.load(path))
        return (), {}
    return ask_onnxruntime(gq.load(path)), actual


@pytest.mark.parametrize("name", CASES)
def test_small_graphs(name, tmp_path):
    """ONNX Runtime agrees on every op, and the op has the expected verdict if this release has the expected kernel."""
    message, about, expected = build_case(name)
    verdicts, actual = compare_verdicts(message, tmp_path)
    assert truth.differences(verdicts, actual) == []
    found = next(verdict for verdict in verdicts if verdict.op.split("@")[0] == about)
    told = found.broken_rule.rule if found.broken_rule else (found.runs_as if found.status == "int8" else found.status)
    if truth.is_low(expected) == truth.is_low(actual.get(found.op, expected)):
        assert told == expected


@pytest.mark.parametrize("name", CASES)
def test_inside_an_if_branch(name, tmp_path):
    """Verdicts are correct in a branch of an If."""
    verdicts, actual = compare_verdicts(
        inside_if(build_case(name)[0], own=[*FEW, *(["s", "i0"] if name.startswith("weight") else [])]), tmp_path
    )
    assert truth.differences(verdicts, actual) == []
    assert len(verdicts) % 2 == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("weight")])
def test_quantized_outside_of_an_if(name, tmp_path):
    """Verdicts are correct in a branch that dequantizes outer values."""
    message = build_case(name)[0]
    given = {value.name for value in message.graph.input}
    outside = [node.name for node in message.graph.node if node.op_type == "QuantizeLinear" and node.input[0] in given]
    verdicts, actual = compare_verdicts(inside_if(message, own=FEW, outside=outside), tmp_path)
    assert truth.differences(verdicts, actual) == []


def inside_loop(message, own):
    """Move the ops into a Loop, except inputs and constants that are not called `own`."""
    inner = message.graph
    body = onnx.GraphProto(name="body", node=inner.node)
    body.initializer.extend(value for value in inner.initializer if value.name in own)
    for name, kind in (("turn", onnx.TensorProto.INT64), ("on", onnx.TensorProto.BOOL)):
        body.input.append(onnx.helper.make_tensor_value_info(name, kind, ()))
    body.node.append(onnx.helper.make_node("Identity", ["on"], ["still_on"], name="still"))
    body.output.append(onnx.helper.make_tensor_value_info("still_on", onnx.TensorProto.BOOL, ()))
    body.output.extend(inner.output)
    outer = onnx.GraphProto(name="outer", input=inner.input, output=inner.output)
    outer.initializer.extend(value for value in inner.initializer if value.name not in own)
    outer.input.append(onnx.helper.make_tensor_value_info("turns", onnx.TensorProto.INT64, ()))
    outer.input.append(onnx.helper.make_tensor_value_info("first", onnx.TensorProto.BOOL, ()))
    for output in outer.output:
        output.name = f"all_{output.name}"
    names = [output.name for output in outer.output]
    outer.node.append(onnx.helper.make_node("Loop", ["turns", "first"], names, name="loop", body=body))
    return onnx.ModelProto(ir_version=message.ir_version, opset_import=message.opset_import, graph=outer)


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_inside_a_loop(name, tmp_path):
    """Verdicts are correct in the body of a Loop."""
    own = [*FEW, "s", "i0"] if name.startswith("weight") else FEW
    verdicts, actual = compare_verdicts(inside_loop(build_case(name)[0], own), tmp_path)
    assert truth.differences(verdicts, actual) == []


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("blocks")])
def test_microsoft_domain(name, tmp_path):
    """Quantizations of com.microsoft get the same verdicts."""
    message = build_case(name)[0]
    for node in message.graph.node:
        if node.op_type in {"QuantizeLinear", "DequantizeLinear"}:
            node.domain = "com.microsoft"
    message.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    verdicts, actual = compare_verdicts(message, tmp_path)
    assert truth.differences(verdicts, actual) == []


@pytest.mark.slow
@pytest.mark.parametrize("opset", [13, 17, 19, 22, 23, 24])
def test_other_opsets(opset, tmp_path):
    """Verdicts are correct for other opsets."""
    tried = 0
    for name in CASES:
        message = build_case(name)[0]
        message.opset_import[0].version = opset
        try:
            verdicts, actual = compare_verdicts(message, tmp_path)
        except (errors.Fail, errors.InvalidGraph, errors.NotImplemented, gq.GraphQuantError):
            continue
        tried += 1
        assert truth.differences(verdicts, actual) == [], name
    assert tried > 140


@pytest.mark.parametrize("name", CASES)
def test_all_optimizations(name, tmp_path):
    """With all optimizations, ops differ only by Transposes for layouts."""
    message = build_case(name)[0]
    onnx.save(message, tmp_path / "model.onnx")
    actual = truth.runs_as(truth.optimized(tmp_path / "model.onnx", level="ORT_ENABLE_ALL"))
    named = {op: kind for op, kind in actual.items() if "@" in op}
    assert truth.differences(ask_onnxruntime(gq.load(tmp_path / "model.onnx")), named) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_int8_activations(name, tmp_path):
    """Verdicts are correct if kernels accept int8 activations, as on ARM."""
    message = build_case(name)[0]
    onnx.save(message, tmp_path / "model.onnx")
    allowed = truth.optimized(tmp_path / "model.onnx", config={"session.qdqisint8allowed": "1"})
    verdicts = ask_onnxruntime(gq.load(tmp_path / "model.onnx"), int8=True)
    assert truth.differences(verdicts, truth.runs_as(allowed)) == []


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("v = DequantizeLinear<axis = 0, block_size = 16>(q4, sq) y = MatMul(x, v)", "in a branch"),
        (op_between_pairs("AveragePool<kernel_shape = [2, 2], dilations = [1, 1]>(a)"), ""),
        (
            "f = Cast<to = 17>(c0)" + qdq_text("x", "a", zero="f") + "r = Sigmoid(a)" + qdq_text("r", "y", zero="f"),
            "float8",
        ),
    ],
)
def test_rejected_models(text, given, tmp_path, monkeypatch):
    """A model that ONNX Runtime cannot load gets a finding with its error, and a remedy for that error."""
    name = "blocks of 16" if given == "in a branch" else "conv"
    monkeypatch.setitem(CASES, name, (text, "refused"))
    message = build_case(name)[0]
    onnx.save(inside_if(message) if given == "in a branch" else message, tmp_path / "model.onnx")
    report = check_quantized_model(gq.load(tmp_path / "model.onnx"), "onnxruntime")
    finding = next((finding for finding in report.findings if finding.code == "GQ109"), None)
    if given == "float8" and finding is None:  # newer releases have the kernels
        truth.optimized(tmp_path / "model.onnx")
        return
    assert report.verdicts == ()
    assert finding.op or finding.fix == REJECTION_REMEDIES["crashes on it"]
    assert finding.fix in REJECTION_REMEDIES.values()
    with pytest.raises(RUNTIME_ERRORS):
        truth.optimized(tmp_path / "model.onnx")


def test_enough_cases():
    """There are enough cases of either verdict."""
    low = [name for name, case in CASES.items() if truth.is_low(case[1]) or case[1] == "fused"]
    assert len(low) >= 60
    assert len(CASES) - len(low) >= 60


@pytest.mark.parametrize("columns", [8, 9, 10, 12])
def test_weights_of_two_bits(tmp_path, columns):
    """A product of weights of 2 bits has a fault if, and only if, ONNX Runtime packs them wrong."""
    rng = np.random.default_rng(0)
    weight, x = rng.integers(-2, 2, (16, columns)), rng.integers(-127, 128, (2, 16)).astype(np.float32)
    x[:, 0] = 127  # so that rounding to int8 changes no value
    message = onnx.parser.parse_model(
        f"""<ir_version: 11, opset_import: ["" : 25]> g (float[N, 16] x) => (float[N, {columns}] y) {{
        v = DequantizeLinear<axis = 0, block_size = 16>(w, s) y = MatMul(x, v) }}"""
    )
    values = {"w": weight.astype(ml_dtypes.int2), "s": np.ones((1, columns), np.float32)}
    message.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in values.items())
    onnx.save(message, tmp_path / "model.onnx")
    model = gq.load(tmp_path / "model.onnx")
    try:
        session = onnxruntime.InferenceSession(message.SerializeToString())
    except RUNTIME_ERRORS:  # a release without this type
        with pytest.raises(RejectedModelError):
            ask_onnxruntime(model)
        return
    is_wrong = not np.allclose(session.run(None, {"x": x})[0], x @ weight, rtol=1e-3, atol=1)
    assert [bool(verdict.fault) for verdict in ask_onnxruntime(model) if verdict.type == "MatMul"] == [is_wrong]

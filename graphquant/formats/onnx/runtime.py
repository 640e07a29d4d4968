"""The installed release of onnxruntime: its errors, models that crash it, wrong products, inferred types, fused ops."""

from __future__ import annotations

import faulthandler
import gc
import os
import re
import signal
import sys
from contextlib import suppress
from functools import cache
from random import Random
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnx.parser import parse_model
from onnxruntime.capi import onnxruntime_pybind11_state as state

from graphquant.formats.onnx.fused_ops import unpack_elements
from graphquant.formats.onnx.tensors import DTYPE_NAMES
from graphquant.qdq import DYNAMIC_FORM, FusedForm
from graphquant.qdq.onnx_qdq import MICROSOFT_DOMAIN, OPSET_BLOCKS

if TYPE_CHECKING:
    from graphquant.formats.onnx.tensors import TypeAndShape
    from graphquant.numerics import Array

RUNTIME_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    ValueError,
    TypeError,
    *(kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception)),
)
"""Exceptions of onnxruntime, which have no common base class."""

RELEASE = tuple(map(int, onnxruntime.__version__.split(".")[:2]))

_MAY_CRASH = sys.platform == "linux" and RELEASE < (1, 28)
"""Older releases crash on some models: a Conv with inputs of different ranks, blocked weights that a branch captures.
They first open each session in a forked process."""

CONCURRENT_CREATIONS = 1 if _MAY_CRASH else 2  # sessions; no other thread may create one while the process forks
FATAL_LOG_LEVEL = 4  # errors are raised with the same text
COLUMN_TILE = 64  # products of columns above a multiple of it are computed by the same code as those of the rest
PRODUCT_TYPES = frozenset({("uint8", "int8"), ("uint8", "uint8"), ("int8", "int8")})
"""Types of matrices for which onnxruntime has products."""
PROBE_DEPTH = 64  # summed elements of a probed product
PROBED_ROWS = (*range(1, 10), 12, 16, 31, 32, 33, 64)  # panels of kernels have 1 to 6, 12, 16 and 32 rows

TENSOR_TYPE = re.compile(r"tensor\((\w+)\)")  # a type of onnxruntime that is a tensor's


def open_inference_session(data: bytes, options: Any) -> Any:
    """Return a session, or raise one of `RUNTIME_ERRORS`, also where older releases would end the process."""

    def open_session() -> Any:
        return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    if _MAY_CRASH and (child := _fork_without_collection()):
        if os.WTERMSIG(os.waitpid(child, 0)[1]) in (signal.SIGABRT, signal.SIGSEGV):
            raise RuntimeError(f"version {onnxruntime.__version__} crashes on it")
    elif _MAY_CRASH:
        with suppress(BaseException):
            faulthandler.disable()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # for the message of a failed assertion
            open_session()
        os._exit(0)
    return open_session()


def _fork_without_collection() -> int:
    """Fork, with the garbage collector disabled in the child.

    An unused session that is part of a reference cycle would be destroyed there, and would wait for ever for its
    threads, which only the parent has.
    """
    was_enabled, child = gc.isenabled(), -1
    gc.disable()
    try:
        child = os.fork()
    finally:
        if child and was_enabled:
            gc.enable()
    return child


def _open_quietly(message: Any, level: Any = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL) -> Any:
    """Open a small model on one thread, without messages, at a level of optimization."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = FATAL_LOG_LEVEL, 1
    options.graph_optimization_level = level
    return open_inference_session(message.SerializeToString(), options)


def infer_output_types(message: Any) -> dict[str, TypeAndShape]:
    """Return the types that onnxruntime infers for the outputs of a ModelProto; none if it rejects the model.

    Sizes that are not constant are None.
    """
    try:
        # folding of constants could fill memory
        session = _open_quietly(message, onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)
    except RUNTIME_ERRORS:
        return {}
    types: dict[str, TypeAndShape] = {}
    for output in session.get_outputs():
        if (tensor_type := TENSOR_TYPE.fullmatch(output.type)) is not None:
            code = TensorProto.DataType.Value(tensor_type[1].upper())
            sizes = tuple(size if isinstance(size, int) else None for size in output.shape)
            types[output.name] = DTYPE_NAMES[code], sizes or None  # an unknown rank is reported as no axes, too
    return types


@cache
def has_int8_cache() -> bool:
    """Return True if onnxruntime runs GroupQueryAttention with int8 past states on the CPU.

    Older releases accept the model, and fail when it runs. Release 1.28 is the first one with such a kernel.
    """
    model = parse_model(
        """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        probe (float[1, 1, 8] x, int8[1, 1, 1, 8] past, int32[1, 1] last, int32 total, float[1] scale)
            => (float[a, b, c] y, int8[d, e, f, g] k, int8[h, i, j, l] v)
        { y, k, v = com.microsoft.GroupQueryAttention
        <num_heads=1, kv_num_heads=1, k_quant_type="PER_TENSOR", v_quant_type="PER_TENSOR", kv_cache_bit_width=8>
        (x, x, x, past, past, last, total, , , , , , scale, scale) }"""
    )
    shapes = {"x": ((1, 1, 8), "f4"), "past": ((1, 1, 1, 8), "i1"), "last": ((1, 1), "i4"), "scale": ((1,), "f4")}
    feeds = {"total": np.array(2, np.int32), **{name: np.ones(*shape) for name, shape in shapes.items()}}
    try:
        return bool(_open_quietly(model).run(["k"], feeds)[0].dtype == np.int8)
    except RUNTIME_ERRORS:
        return False


@cache
def find_wrong_product(dtype: str, weight_dtype: str, columns: int) -> int:
    """Return the smallest number of rows for which onnxruntime multiplies integers wrong on this CPU, 0 if for none.

    Before release 1.26, products of uint8 and int8 are wrong on CPUs with AMX for 32 or more rows and some numbers of
    columns, and on those with AVX-VNNI and without AVX-512 for other types (microsoft/onnxruntime#27671). Data may
    hide it, because most of the sums are right.

    Args:
        dtype: The type of the left matrix.
        weight_dtype: The type of the right matrix, a constant; both are one of `PRODUCT_TYPES`.
        columns: The columns of the right matrix.
    """
    columns = columns % COLUMN_TILE + COLUMN_TILE if columns > COLUMN_TILE else columns
    left, right = (  # numpy.random takes long to import
        np.frombuffer(Random(rows).randbytes(rows * size), name).reshape(rows, size)  # noqa: S311  # no secret
        for name, rows, size in ((dtype, max(PROBED_ROWS), PROBE_DEPTH), (weight_dtype, PROBE_DEPTH, columns))
    )
    model = parse_model(
        f"""<ir_version: 8, opset_import: ["" : 13, "com.microsoft" : 1]>
        probe ({dtype}[rows, {PROBE_DEPTH}] left) => (float[rows, {columns}] product)
        <float scale = {{1.0}}, {dtype} zero_point = {{3}}>
        {{ product = com.microsoft.MatMulIntegerToFloat (left, right, scale, scale, zero_point) }}"""
    )
    model.graph.initializer.append(numpy_helper.from_array(right, "right"))
    session = _open_quietly(model)
    expected = ((left.astype(np.int32) - 3) @ right.astype(np.int32)).astype(np.float32)  # exact below 2**24
    wrong = (rows for rows in PROBED_ROWS if np.any(session.run(None, {"left": left[:rows]})[0] != expected[:rows]))
    return next(wrong, 0)


@cache
def packs_two_bits_right(columns: int) -> bool:
    """Return True if onnxruntime multiplies right by a DequantizeLinear of int2 blocks, which it packs itself.

    Release 1.31.1 packs the weights wrong if the number of `columns` is no multiple of 4.
    """
    columns, random = columns % COLUMN_TILE + COLUMN_TILE, np.random.default_rng(0)
    data = random.integers(-127, 128, (1, 16)).astype(np.float32)
    data[0, 0] = 127  # so that rounding to int8 changes no value
    weight = random.integers(-2, 2, (16, columns))
    model = parse_model(
        f"""<ir_version: 11, opset_import: ["" : 25]>
        probe (float[1, 16] data) => (float[1, {columns}] product)
        {{ values = DequantizeLinear<axis: int = 0, block_size: int = 16> (weight, scale)
           product = MatMul (data, values) }}"""
    )
    values = {"weight": weight.astype(ml_dtypes.int2), "scale": np.ones((1, columns), np.float32)}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    try:
        result = _open_quietly(model).run(None, {"data": data})[0]
    except RUNTIME_ERRORS:
        return False
    return np.allclose(result, data @ weight, rtol=1e-3, atol=1)


@cache
def supports_fused_form(form: FusedForm) -> bool:
    """Return True if the installed onnxruntime runs the op of a form with a weight of its width, and multiplies right.

    On CPUs with AVX2 and without AVX-512, products of one row from 4-bit weights with zero points are wrong if their
    activations are rounded to int8 (microsoft/onnxruntime#29853).
    """
    if form.args.form == DYNAMIC_FORM:  # all releases have these ops
        return True
    if form.op_type == "LayerNormalization":  # older releases join a sum to it in less time, or compute it slowly
        return RELEASE >= (1, 30)
    bits, level, rows = form.bits, form.args.accuracy_level or 0, np.zeros((1, 16), np.float32)
    narrow = np.zeros((1, 16), np.int8 if bits > 4 else ml_dtypes.int4)  # noqa: PLR2004  # bits
    scale: Array = np.ones((1, 1), np.float32)
    attrs: dict[str, Any] = {"domain": MICROSOFT_DOMAIN, "block_size": 16}
    random, zero_point = np.random.default_rng(0), np.zeros(8, np.uint8)
    if form.op_type == "MatMulNBits":
        inputs, weight = ["data", "weight", "scale"], random.integers(256, size=(8, 1, 2 * bits), dtype=np.uint8)
        data = random.integers(-127, 128, (1, 16)).astype(np.float32)
        data[0, 0] = 127  # so that rounding to int8 changes no value
        attrs |= {"K": 16, "N": 8, "bits": bits, "accuracy_level": level}
        scale = np.ones(8, np.float32)
        if form.has_zero_points:
            inputs = [*inputs, "zero_point"]
        zero_point = np.arange(8, dtype=np.uint8) // 2 if form.has_zero_points else zero_point + (1 << (bits - 1))
    elif form.op_type == "GatherBlockQuantized":
        inputs, data, weight = ["weight", "data", "scale"], np.zeros((1, 1), np.int64), narrow
        attrs |= {"gather_axis": 0, "quantize_axis": 1}
        if bits == 8:  # noqa: PLR2004  # bits of a byte; release 1.22 reads tensors of 4 bits only
            weight, attrs = weight.view(np.uint8), attrs | {"bits": bits}
    elif form.op_type == "QMoE":  # 16 experts of 16 rows, so that the data fits as the scores too
        inputs, data = ["data", "data", "weight", "scale", "", "weight", "scale"], rows
        weight, scale = np.zeros((16, 16, 2 * bits), np.uint8), np.ones((16, 16, 1), np.float32)
        attrs |= {"expert_weight_bits": bits, "k": 1, "accuracy_level": level}
    else:
        inputs, data, weight, attrs = ["weight"], rows, narrow, {"to": TensorProto.FLOAT}
    node = helper.make_node(form.op_type or "Cast", inputs, ["result"], **attrs)
    input_info = helper.make_tensor_value_info("data", helper.np_dtype_to_tensor_dtype(data.dtype), data.shape)
    output_info = helper.make_tensor_value_info("result", TensorProto.FLOAT, None)
    values = {"weight": weight, "scale": scale, "zero_point": zero_point}
    constants = [numpy_helper.from_array(values[name], name) for name in sorted(values.keys() & set(inputs))]
    opsets = [helper.make_opsetid("", OPSET_BLOCKS), helper.make_opsetid(MICROSOFT_DOMAIN, 1)]
    graph = helper.make_graph([node], "probe", [input_info], [output_info], constants)
    message = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    try:
        result = _open_quietly(message).run(None, {"data": data})[0]
    except RUNTIME_ERRORS:
        return False
    if form.op_type != "MatMulNBits":
        return True
    integers = unpack_elements(weight.reshape(8, -1), bits, 16).astype(np.float32)
    return np.allclose(result, data @ (integers - zero_point[:, None]).T, rtol=1e-3, atol=1)

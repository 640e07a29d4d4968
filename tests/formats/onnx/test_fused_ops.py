"""Packed and folded weights compute what their pairs compute, and are read back as these pairs."""

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

import graphquant as gq
from graphquant.api.strip import prove_stripped
from graphquant.errors import UsageError
from graphquant.formats import onnx as onnx_format
from graphquant.formats.onnx import file_writer
from graphquant.formats.onnx.fused_ops import pack_elements, unpack_elements
from graphquant.formats.onnx.runtime import RELEASE, supports_fused_form
from graphquant.formats.onnx.tensors import tensor_bytes
from graphquant.ir import Parameters, count_macs
from graphquant.numerics import QParams
from graphquant.optimize.size_budget import model_constant_bytes
from graphquant.qdq import FusedForm, read_qparams
from graphquant.qdq.family import FamilyArguments

RULES = """description = "Weights of products and tables"
[scheme.block]
dtype = "{dtype}"
zero = "{zero}"
per = "{per}"
{block}
family = "onnx-fused"
args = {{ {args} }}
[[rule]]
name = "product"
producer = {{ kind = "parameter", min_rank = 2 }}
consumer = {{ kind = "matmul|gemm|conv", input = "weight" }}
quantize = "block"
[[rule]]
name = "table"
producer = {{ kind = "parameter", min_rank = 2 }}
consumer = {{ kind = "gather", input = "input" }}
quantize = "block"
"""

FOLDED_4, FOLDED_8 = (FusedForm(op_type="", bits=bits, args=FamilyArguments(form="folded")) for bits in (4, 8))
"""Forms of which releases before 1.24 lack the first."""

PRODUCTS = {
    "MatMul": "y = MatMul(x, w)",
    "Gemm": "y = Gemm(x, w, b)",
    "Gemm without a bias": "y = Gemm(x, w)",
    "transposed Gemm": "y = Gemm<transB = 1>(x, w, b)",
    "MatMul and Add": "m = MatMul(x, w) y = Add(m, b)",
    "transposed Gemm and Add": "m = Gemm<transB = 1>(x, w) y = Add(m, b)",
}


def write_rules(
    path: Path, dtype: str, args: str, *, block: int | None = 32, per: str = "block", zero: str = "symmetric"
) -> Path:
    """Write a rule file for weights of one type."""
    line = "" if block is None else f"block_size = {block}"
    path.write_text(RULES.format(dtype=dtype, zero=zero, per=per, block=line, args=args))
    return path


def parse(body: str, inputs: str, outputs: str, weights: dict[str, np.ndarray], opset: int = 21) -> onnx.ModelProto:
    """The model of a graph as text with weights."""
    header = f'<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1]>'
    message = onnx.parser.parse_model(f"{header} g ({inputs}) => ({outputs}) {{ {body} }}")
    message.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    return message


def run(message: onnx.ModelProto, feeds: dict[str, np.ndarray], *, optimizes: bool = True) -> list[np.ndarray]:
    """The outputs of onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if not optimizes:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(message.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def op_counts(message: onnx.ModelProto) -> Counter[str]:
    """Number of nodes by type."""
    return Counter(node.op_type for node in message.graph.node)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    product=st.sampled_from(sorted(PRODUCTS)),
    columns=st.integers(1, 70),
    rows=st.integers(1, 9),
    dtype=st.sampled_from(["int4", "uint4", "int2", "int3", "int8", "uint8"]),
    block=st.sampled_from([16, 32, 64]),
    zero=st.sampled_from(["symmetric", "asymmetric"]),
    form=st.sampled_from(["packed", "folded"]),
    seed=st.integers(0, 99),
)
def test_products(
    tmp_path: Path, product: str, columns: int, rows: int, dtype: str, block: int, zero: str, form: str, seed: int
) -> None:
    """The file computes what onnx defines for the pair, and is read back as the pair that was planned."""
    rng = np.random.default_rng(seed)
    shape = (rows, columns) if product.startswith("transposed") else (columns, rows)
    weights = {"w": rng.standard_normal(shape).astype(np.float32) + 1, "b": np.arange(rows, dtype=np.float32)}
    if "b)" not in PRODUCTS[product]:
        del weights["b"]
    signature = f"float[n, {columns}] x", f"float[n, {rows}] y"
    onnx.save(parse(PRODUCTS[product], *signature, weights), tmp_path / "float.onnx")
    args = f'form = "{form}"'
    rules = write_rules(tmp_path / "r.toml", dtype, args, block=block, zero=zero)
    is_packed = form == "packed" and "8" not in dtype
    if is_packed:
        rules = write_rules(tmp_path / "r.toml", dtype, f"{args}, accuracy_level = 0", block=block, zero=zero)
    result = gq.insert(tmp_path / "float.onnx", rules=rules)
    standard = gq.insert(tmp_path / "float.onnx", rules=rules, family="onnx-qdq")
    message = onnx_format.emit(result.model)
    onnx.checker.check_model(message, full_check=True)
    assert model_constant_bytes(result.model) == sum(map(tensor_bytes, message.graph.initializer))
    counts = op_counts(message)
    bits = 8 if "8" in dtype else 2 if "2" in dtype else 4
    level = 4 if bits == 8 and zero == "symmetric" else 0
    packed = FusedForm(op_type="MatMulNBits", bits=bits, args=FamilyArguments(accuracy_level=level))
    if form == "packed" and supports_fused_form(packed):
        assert counts["MatMulNBits"] == 1
        assert counts["DequantizeLinear"] == 0
    elif form == "folded" and supports_fused_form(FOLDED_8 if "8" in dtype else FOLDED_4):
        is_padded = columns % block > 0 and not 1 < columns < block
        assert (counts["Mul"], counts["Slice"], counts["DequantizeLinear"]) == (1, is_padded, 0)
    feeds = {"x": rng.standard_normal((3, columns)).astype(np.float32)}
    expected = ReferenceEvaluator(onnx_format.emit(standard.model)).run(None, feeds)[0]
    scale = np.abs(expected).max() + 1
    is_exact = counts["Mul"] or (is_packed and counts["MatMulNBits"])
    # Bytes are multiplied with activations that are rounded by half a step of 8 bits at most.
    rounding = np.abs(feeds["x"]).max() / 250 * np.abs(weights["w"]).sum(int(product.startswith("transposed"))).max()
    tolerance = 1e-5 * scale + (0 if is_exact else rounding)
    assert np.allclose(run(message, feeds)[0], expected, atol=tolerance, rtol=0)
    assert np.allclose(run(message, feeds, optimizes=False)[0], expected, atol=tolerance, rtol=0)
    saved = result.save(tmp_path / "out.onnx", force=True)
    read = gq.load(saved)
    (insertion,) = result.inserted
    (op,) = [op for op in read.main.ops() if op.kind == "dequantize"]
    params = read_qparams(read.main, op, Parameters(read))
    assert np.array_equal(params.scale.reshape(-1)[:1], insertion.params.scale.reshape(-1)[:1])
    if not product.startswith("transposed"):
        assert params.scale.shape == insertion.params.scale.shape
    onnx_format.save(read, tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == saved.read_bytes()
    (tmp_path / "out.onnx").unlink()


BYTE_TABLE = FusedForm(op_type="GatherBlockQuantized", bits=8, args=FamilyArguments(form="packed"))
BYTE_TABLES = itertools.product(("int8", "uint8"), ("block", "channel"))
needs_byte_tables = pytest.mark.skipif(
    not supports_fused_form(BYTE_TABLE), reason="this release has no tables of bytes"
)


@pytest.mark.parametrize(
    ("dtype", "per"),
    [("int4", "block"), ("uint4", "block")]
    + [
        pytest.param(*case, marks=needs_byte_tables)
        for case in itertools.product(("int8", "uint8"), ("block", "channel"))
    ],
)
@pytest.mark.parametrize("width", [5, 32, 40, 96])
def test_rows_of_tables_have_the_same_bits(tmp_path: Path, dtype: str, per: str, width: int) -> None:
    """GatherBlockQuantized returns exactly the rows of the pair, also with a partial block, and is read as it."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((50, width)).astype(np.float32)
    onnx.save(parse("y = Gather(t, i)", "int64[n, 2] i", "float[n, 2, w] y", {"t": table}), tmp_path / "float.onnx")
    block = 32 if per == "block" else None
    rules = write_rules(tmp_path / "r.toml", dtype, 'form = "packed"', zero="asymmetric", block=block, per=per)
    rules.write_text(rules.read_text().replace('per = "channel"', 'per = "channel"\naxis = 0'))
    result = gq.insert(tmp_path / "float.onnx", rules=rules)
    message = onnx_format.emit(result.model)
    assert op_counts(message) == {"GatherBlockQuantized": 1}
    standard = onnx_format.emit(gq.insert(tmp_path / "float.onnx", rules=rules, family="onnx-qdq").model)
    feeds = {"i": rng.integers(-50, 50, (4, 2))}
    assert np.array_equal(run(message, feeds)[0], ReferenceEvaluator(standard).run(None, feeds)[0])
    result.save(tmp_path / "packed.onnx")
    read = gq.load(tmp_path / "packed.onnx")
    assert onnx_format.emit(read).SerializeToString() == onnx_format.emit(result.model).SerializeToString()
    (pair,) = (op for op in read.main.ops() if op.kind == "dequantize")
    assert isinstance(params := read_qparams(read.main, pair, Parameters(read)), QParams)
    assert (params.axis, params.block) == ((1, 32) if per == "block" and (width > 32 or "4" in dtype) else (0, None))
    stripped = onnx_format.emit(gq.strip(tmp_path / "packed.onnx", everything=True).model)
    assert np.array_equal(run(stripped, feeds)[0], run(message, feeds)[0])


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=needs_byte_tables)])
@pytest.mark.parametrize("has_zero_points", [False, True])
def test_packed_table_of_another_tool(tmp_path: Path, bits: int, has_zero_points: bool) -> None:
    """A GatherBlockQuantized of bytes, as ONNX Runtime GenAI writes it, is read as a pair and written as it was."""
    rng, middle = np.random.default_rng(0), 1 << (bits - 1)
    integers, scales = rng.integers(0, 2 * middle, (9, 64)), rng.uniform(0.5, 1, (9, 2)).astype(np.float32)
    zeros = rng.integers(0, 2 * middle, (9, 2)) if has_zero_points else np.full((9, 2), middle)
    weights = {"q": pack_elements(integers, bits), "s": scales}
    if has_zero_points:
        weights["z"] = pack_elements(zeros, bits)
    attrs = f"bits = {bits}, block_size = 32, gather_axis = 0, quantize_axis = 1"
    node = f"y = com.microsoft.GatherBlockQuantized<{attrs}>(q, i, s{', z' if has_zero_points else ''})"
    message = parse(node, "int64[n] i", "float[n, 64] y", weights)
    onnx.save(message, tmp_path / "other.onnx")
    assert onnx_format.emit(gq.load(tmp_path / "other.onnx")).graph.node[0] == message.graph.node[0]
    stripped = onnx_format.emit(gq.strip(tmp_path / "other.onnx", everything=True).model)
    assert op_counts(stripped) == {"Gather": 1}
    rows = (integers - np.repeat(zeros, 32, axis=1)) * np.repeat(scales, 32, axis=1)
    np.testing.assert_allclose(run(stripped, {"i": np.arange(9)})[0], rows, rtol=1e-6)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bits=st.sampled_from([2, 4, 8]),
    columns=st.integers(1, 70),
    rows=st.integers(1, 9),
    has_zero_points=st.booleans(),
    has_table=st.booleans(),
    seed=st.integers(0, 99),
)
def test_negative_scales_of_another_tool(
    tmp_path: Path, bits: int, columns: int, rows: int, has_zero_points: bool, has_table: bool, seed: int
) -> None:
    """Blocks with negative scales are read with positive ones, and written as they were, also with a shared table."""
    rng, middle = np.random.default_rng(seed), 1 << (bits - 1)
    columns = -(-columns // 32) * 32 if has_table else columns
    blocks = -(-columns // 32)
    integers = rng.integers(0, 2 * middle, (rows, blocks * 32))
    scales = (rng.uniform(0.5, 1, (rows, blocks)) * rng.choice([-1, 1], (rows, blocks))).astype(np.float32)
    zeros = rng.integers(0, 2 * middle, (rows, blocks)) if has_zero_points else np.full((rows, blocks), middle)
    weights = {"q": pack_elements(integers, bits).reshape(rows, blocks, -1), "s": scales}
    weights |= {"z": pack_elements(zeros, bits)} if has_zero_points else {}
    zero_point = ", z" if has_zero_points else ""
    body = (
        f"y = com.microsoft.MatMulNBits<K = {columns}, N = {rows}, bits = {bits}, block_size = 32>(x, q, s{zero_point})"
    )
    inputs, outputs = f"float[n, {columns}] x", f"float[n, {rows}] y"
    if has_table:
        weights["size"] = np.array([rows, blocks * 4 * bits])
        attrs = f"bits = {bits}, block_size = 32, gather_axis = 0, quantize_axis = 1"
        body += f" t = Reshape(q, size) e = com.microsoft.GatherBlockQuantized<{attrs}>(t, i, s{zero_point})"
        inputs, outputs = f"{inputs}, int64[m] i", f"{outputs}, float[m, {columns}] e"
    message = parse(body, inputs, outputs, weights)
    onnx.save(message, tmp_path / "other.onnx")
    model = gq.load(tmp_path / "other.onnx")
    assert onnx_format.emit(model).graph.node == message.graph.node
    assert gq.check(tmp_path / "other.onnx").findings == ()
    pairs = [op for op in model.main.ops() if op.kind == "dequantize"]
    assert len(pairs) == 1 + has_table
    for pair in pairs:
        params = read_qparams(model.main, pair, Parameters(model))
        assert isinstance(params, QParams)
        assert (params.scale > 0).all()
    dense = ((integers - np.repeat(zeros, 32, 1)) * np.repeat(scales, 32, 1))[:, :columns]
    feeds = {"x": np.eye(columns, dtype=np.float32)} | ({"i": np.arange(rows)} if has_table else {})
    stripped = onnx_format.emit(gq.strip(tmp_path / "other.onnx", everything=True).model)
    assert op_counts(stripped) == {"MatMul": 1} | ({"Gather": 1, "Transpose": 1} if has_table else {})
    for actual, expected in zip(run(stripped, feeds), (dense.T, dense), strict=False):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


@needs_byte_tables
@pytest.mark.parametrize("rules", ["weight_only_int4", "weight_only_int8", "dynamic"])
def test_requantized_tied_tables_are_stored_once(tmp_path: Path, rules: str) -> None:
    """The table that both ops of a model of ONNX Runtime GenAI read in 4 bits has one constant afterwards."""
    rows, columns = 600, 256
    rng = np.random.default_rng(0)
    weights = {
        "q": rng.integers(0, 256, (rows, columns // 32, 16)).astype(np.uint8),
        "s": rng.uniform(0.01, 0.02, (rows, columns // 32)).astype(np.float32),
        "size": np.array([rows, columns // 2]),
    }
    body = f"""t = Reshape(q, size)
        e = com.microsoft.GatherBlockQuantized<bits = 4, block_size = 32, gather_axis = 0, quantize_axis = 1>(t, i, s)
        y = com.microsoft.MatMulNBits<K = {columns}, N = {rows}, bits = 4, block_size = 32>(e, q, s)"""
    message = parse(body, "int64[n] i", f"float[n, {rows}] y", weights)
    onnx.save(message, tmp_path / "m.onnx")
    result = gq.insert(tmp_path / "m.onnx", rules=[rules], requantize=True, validate=False)
    assert len(result.plan.sites) == 1
    result.save(tmp_path / "q.onnx")
    initializers = onnx.load(tmp_path / "q.onnx").graph.initializer
    assert [np.prod(each.dims) for each in initializers if np.prod(each.dims) >= rows * columns] == [rows * columns]
    feeds = {"i": np.arange(0, rows, 7)}
    assert sqnr(run(message, feeds)[0], run(onnx.load(tmp_path / "q.onnx"), feeds)[0]) > 30


@pytest.mark.parametrize(("rules", "types"), [("weight_only", ["float32", "int8"]), ("dynamic", ["int8", "int8"])])
def test_requantized_copies_of_small_tables_are_weights(tmp_path: Path, rules: str, types: list[str]) -> None:
    """The transposed copy of a table, which is not stored again, is quantized where its product is."""
    table = np.random.default_rng(0).integers(-127, 128, (200, 32)).astype(np.int8)
    weights = {"q": table, "t": np.ascontiguousarray(table.T), "s": np.array(0.01, np.float32)}
    body = "f = DequantizeLinear(q, s) e = Gather(f, i) w = DequantizeLinear(t, s) y = MatMul(e, w)"
    onnx.save(parse(body, "int64[n] i", "float[n, 200] y", weights), tmp_path / "m.onnx")
    gq.insert(tmp_path / "m.onnx", rules=[rules], requantize=True, validate=False).save(tmp_path / "q.onnx")
    initializers = onnx.load(tmp_path / "q.onnx").graph.initializer
    stored = [str(onnx.numpy_helper.to_array(each).dtype) for each in initializers if np.prod(each.dims) == table.size]
    assert sorted(stored) == types


@pytest.mark.parametrize("per", ["channel", "tensor"])
def test_folded_convolutions_run_as_float_ones(tmp_path: Path, per: str) -> None:
    """The weight is computed when the model is loaded: the optimized graph is that of the float model."""
    rng = np.random.default_rng(0)
    weights = {"k": rng.standard_normal((8, 3, 3, 3)).astype(np.float32)}
    body = "c = Conv<pads = [1, 1, 1, 1]>(x, k) y = Relu(c)"
    onnx.save(parse(body, "float[n, 3, 8, 8] x", "float[n, 8, 8, 8] y", weights), tmp_path / "float.onnx")
    rules = write_rules(tmp_path / "r.toml", "int8", "", block=None, per=per)
    result = gq.insert(tmp_path / "float.onnx", rules=rules)
    message = onnx_format.emit(result.model)
    assert op_counts(message) == {"Cast": 1, "Mul": 1, "Conv": 1, "Relu": 1}
    (optimized,) = (optimized.model for optimized in onnx_format.optimize_model(result.model))
    assert [op.type for op in optimized.main.ops() if op.kind not in {"constant", "input", "output"}] == ["FusedConv"]
    feeds = {"x": rng.standard_normal((2, 3, 8, 8)).astype(np.float32)}
    standard = onnx_format.emit(gq.insert(tmp_path / "float.onnx", rules=rules, family="onnx-qdq").model)
    assert np.array_equal(*(run(model, feeds, optimizes=False)[0] for model in (message, standard)))
    read = gq.load(result.save(tmp_path / "out.onnx"))
    (op,) = [op for op in read.main.ops() if op.kind == "dequantize"]
    assert np.array_equal(
        read_qparams(read.main, op, Parameters(read)).scale.reshape(-1), result.inserted[0].params.scale.reshape(-1)
    )
    onnx_format.save(read, tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "out.onnx").read_bytes()


BODY = """
  y = If (c) <
    then_branch = t () => (float[n, 64] a) { a = MatMul(x, w) },
    else_branch = e () => (float[n, 64] b) { s = MatMul(x, w) b = Relu(s) }
  >
"""


@pytest.mark.parametrize(("form", "dtype"), [("packed", "int4"), ("folded", "int8")])
def test_bodies_and_shared_weights(tmp_path: Path, form: str, dtype: str) -> None:
    """Branches that capture a weight get weights of their own; readers in one graph share one."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((64, 64)).astype(np.float32)}
    rules = write_rules(tmp_path / "r.toml", dtype, f'form = "{form}"')
    onnx.save(parse(BODY, "float[n, 64] x, bool c", "float[n, 64] y", weights), tmp_path / "if.onnx")
    feeds = {"x": rng.standard_normal((3, 64)).astype(np.float32)}
    for name, message in (("if", None), ("shared", "h = MatMul(x, w) y = MatMul(h, w)")):
        path = tmp_path / f"{name}.onnx"
        if message is not None:
            onnx.save(parse(message, "float[n, 64] x", "float[n, 64] y", weights), path)
        result = gq.insert(path, rules=rules)
        emitted = onnx_format.emit(result.model)
        standard = onnx_format.emit(gq.insert(path, rules=rules, family="onnx-qdq").model)
        for condition in (True, False) if name == "if" else (None,):
            values = feeds if condition is None else {**feeds, "c": np.array(condition)}
            expected = ReferenceEvaluator(standard).run(None, values)[0]
            assert np.allclose(run(emitted, values)[0], expected, atol=1e-4 * np.abs(expected).max(), rtol=0)
        saved = result.save(tmp_path / f"{name}_out.onnx")
        onnx_format.save(gq.load(saved), tmp_path / f"{name}_again.onnx")
        assert (tmp_path / f"{name}_again.onnx").read_bytes() == saved.read_bytes()
    large = [tensor for tensor in emitted.graph.initializer if np.prod(tensor.dims) >= 64 * 64 // 2]
    assert len(large) == 1


@pytest.mark.parametrize("form", ["packed", "folded"])
def test_external_weights(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed integers are computed when they are written to the weights file, and read back from there."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((256, 128)).astype(np.float32)}
    onnx.save(parse("y = MatMul(x, w)", "float[n, 256] x", "float[n, 128] y", weights), tmp_path / "float.onnx")
    result = gq.insert(tmp_path / "float.onnx", rules=write_rules(tmp_path / "r.toml", "int4", f'form = "{form}"'))
    inside = result.save(tmp_path / "inside.onnx")
    monkeypatch.setattr(file_writer, "MAX_MESSAGE_BYTES", 8000)
    (tmp_path / "out").mkdir()
    outside = result.save(tmp_path / "out" / "q.onnx")
    assert [path.suffix for path in sorted((tmp_path / "out").iterdir())] == [".onnx", ".data"]
    monkeypatch.undo()
    feeds = {"x": rng.standard_normal((2, 256)).astype(np.float32)}
    session = onnxruntime.InferenceSession(outside, providers=["CPUExecutionProvider"])
    assert np.array_equal(session.run(None, feeds)[0], run(onnx.load(inside), feeds)[0])
    for first, second in zip(gq.load(inside).main.ops(), gq.load(outside).main.ops(), strict=True):
        assert first.type == second.type
        assert (first.read_value is None) or np.array_equal(first.read_value(), second.read_value())


def test_op_of_another_tool(tmp_path: Path) -> None:
    """A MatMulNBits with a bias is read as a pair, a product and a sum. `strip` makes a float model of it."""
    rng = np.random.default_rng(0)
    integers, zeros = rng.integers(0, 16, (5, 64)), rng.integers(0, 16, (5, 2))
    scales = rng.uniform(0.5, 1, (5, 2)).astype(np.float32)
    weights = {
        "q": pack_elements(integers, 4).reshape(5, 2, 16),
        "s": scales.reshape(-1),
        "z": pack_elements(zeros, 4).reshape(-1),
        "b": np.arange(5, dtype=np.float32),
    }
    node = 'y = com.microsoft.MatMulNBits<K = 64, N = 5, bits = 4, block_size = 32>(x, q, s, z, "", b)'
    message = parse(node.replace('""', ""), "float[n, 64] x", "float[n, 5] y", weights)
    onnx.save(message, tmp_path / "other.onnx")
    model = gq.load(tmp_path / "other.onnx")
    kinds = [op.kind for op in model.main.ops() if op.kind not in {"constant", "input", "output"}]
    assert sorted(kinds) == ["add", "dequantize", "matmul"]
    dense = (integers - np.repeat(zeros, 32, axis=1)) * np.repeat(scales, 32, axis=1)
    stripped = onnx_format.emit(gq.strip(tmp_path / "other.onnx", everything=True).model)
    assert op_counts(stripped) == {"MatMul": 1, "Add": 1}
    x = rng.standard_normal((2, 64)).astype(np.float32)
    assert np.allclose(run(stripped, {"x": x})[0], x @ dense.T + weights["b"], atol=1e-3)


def test_a_release_without_the_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A form that the installed onnxruntime lacks is replaced by the next one."""
    weights = {"w": np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)}
    onnx.save(parse("y = MatMul(x, w)", "float[n, 64] x", "float[n, 8] y", weights), tmp_path / "float.onnx")
    rules = write_rules(tmp_path / "r.toml", "int4", 'form = "packed"')
    monkeypatch.setattr("graphquant.formats.onnx.runtime.supports_fused_form", lambda _form: False)
    plan = gq.plan(tmp_path / "float.onnx", rules=rules)
    assert plan.sites[0].scheme.family == "onnx-qdq"


def test_unsupported_ops_are_probed() -> None:
    """The installed onnxruntime rejects a width of 3 bits."""
    args = FamilyArguments(form="packed", accuracy_level=0)
    assert supports_fused_form(FusedForm(op_type="MatMulNBits", bits=4, args=args))
    assert not supports_fused_form(FusedForm(op_type="MatMulNBits", bits=3, args=args))


@pytest.mark.parametrize("is_right", [True, False])
def test_int8_products_with_zero_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_right: bool) -> None:
    """Level 4 of 4-bit weights with zero points is replaced by level 0 where the runtime computes it wrong."""
    message = parse("y = MatMul(x, w)", "float[n, 64] x", "float[n, 8] y", {"w": np.eye(64, 8, dtype=np.float32)})
    onnx.save(message, tmp_path / "float.onnx")
    rules = write_rules(tmp_path / "r.toml", "uint4", 'form = "packed", accuracy_level = 4', zero="asymmetric")

    def supports(form):
        return is_right or not (form.args.accuracy_level and form.has_zero_points)

    monkeypatch.setattr("graphquant.formats.onnx.runtime.supports_fused_form", supports)
    plan = gq.plan(tmp_path / "float.onnx", rules=rules)
    assert plan.sites[0].scheme.args == FamilyArguments(form="packed", accuracy_level=4 if is_right else 0)


def test_wrong_products_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A width whose products the runtime computes wrong is not supported, and `check` reports the op."""
    message = parse("y = MatMul(x, w)", "float[n, 64] x", "float[n, 8] y", {"w": np.eye(64, 8, dtype=np.float32)})
    onnx.save(message, tmp_path / "float.onnx")
    rules = write_rules(tmp_path / "r.toml", "uint4", 'form = "packed", accuracy_level = 4', zero="asymmetric")
    gq.insert(tmp_path / "float.onnx", rules=rules).save(tmp_path / "out.onnx")
    session = SimpleNamespace(run=lambda _names, _feeds: [np.zeros((1, 8), np.float32)])
    monkeypatch.setattr("graphquant.formats.onnx.runtime.open_inference_session", lambda _data, _options: session)
    form = FusedForm(op_type="MatMulNBits", bits=4, args=FamilyArguments(accuracy_level=4), has_zero_points=True)
    assert not supports_fused_form.__wrapped__(form)
    monkeypatch.undo()
    monkeypatch.setattr("graphquant.formats.onnx.runtime.supports_fused_form", lambda form: not form.has_zero_points)
    findings = gq.check(tmp_path / "out.onnx", backend="onnxruntime").findings
    assert [finding.op for finding in findings if finding.code == "GQ114"] == ["y"]


@given(bits=st.sampled_from([2, 4, 8]), count=st.integers(1, 40), seed=st.integers(0, 9))
def test_packed_elements(bits: int, count: int, seed: int) -> None:
    """Packing is reversible, and has the layout of onnx for 4 bits."""
    values = np.random.default_rng(seed).integers(0, 1 << bits, (3, count)).astype(np.uint8)
    packed = pack_elements(values, bits)
    assert packed.shape == (3, -(-count * bits // 8))
    assert np.array_equal(unpack_elements(packed, bits, count), values)
    if bits == 4:
        row = values[:1].astype(ml_dtypes.uint4)
        assert numpy_helper.from_array(row).raw_data == packed[0].tobytes()


def read_scale(model: gq.Model) -> np.ndarray:
    """The scale of the only DequantizeLinear."""
    (op,) = (op for _, op in model.reachable_ops() if op.kind == "dequantize")
    params = read_qparams(model.graphs[""], op, Parameters(model))
    assert isinstance(params, QParams)
    return params.scale


def multiply_dynamically(x: np.ndarray, weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The product of integers, with the formula that onnx gives for DynamicQuantizeLinear."""
    low, high = min(x.min(), np.float32(0)), max(x.max(), np.float32(0))
    step = (high - low) / np.float32(255)
    zero = np.clip(np.round(-low / step), 0, 255)
    rounded = np.clip(np.round(x / step) + zero, 0, 255) - zero
    return (rounded.astype(np.int64) @ weight.astype(np.int64)) * (step * scale.astype(np.float64))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    product=st.sampled_from([*sorted(PRODUCTS), "MatMul and Add"]),
    columns=st.integers(1, 70),
    rows=st.integers(1, 9),
    per=st.sampled_from(["channel", "tensor"]),
    seed=st.integers(0, 99),
)
def test_dynamic_products(tmp_path: Path, product: str, columns: int, rows: int, per: str, seed: int) -> None:
    """A product with dynamic activations has the values of its definition, and is read back as a pair."""
    rng = np.random.default_rng(seed)
    shape = (rows, columns) if product.startswith("transposed") else (columns, rows)
    weights = {"w": rng.standard_normal(shape).astype(np.float32), "b": np.arange(rows, dtype=np.float32)}
    text = {**PRODUCTS, "MatMul and Add": "m = MatMul(x, w) y = Add(b, m)"}[product]
    if "b)" not in text and "(b" not in text:
        del weights["b"]
    signature = f"float[n, {columns}] x", f"float[n, {rows}] y"
    onnx.save(parse(text, *signature, weights), tmp_path / "float.onnx")
    rules = write_rules(tmp_path / "r.toml", "int8", 'form = "dynamic"', block=None, per=per)
    result = gq.insert(tmp_path / "float.onnx", rules=rules)
    message = onnx_format.emit(result.model)
    onnx.checker.check_model(message, full_check=True)
    adds = {"Add": 1} if product == "transposed Gemm and Add" else {}
    assert op_counts(message) == {"DynamicQuantizeMatMul": 1} | adds
    scale = read_scale(result.model)
    x = rng.standard_normal((5, columns)).astype(np.float32)
    matrix = weights["w"].T if product.startswith("transposed") else weights["w"]
    integers = np.clip(np.round(matrix / scale), -128, 127)
    expected = multiply_dynamically(x, integers, scale) + weights.get("b", 0)
    np.testing.assert_allclose(run(message, {"x": x})[0], expected, rtol=1e-4, atol=1e-4)
    written = gq.load(result.save(tmp_path / "dynamic.onnx", force=True))
    np.testing.assert_array_equal(read_scale(written), scale)
    assert onnx_format.emit(written).SerializeToString() == message.SerializeToString()


GEMM_DEFAULTS = "<alpha = 1.0, beta = 1.0, transA = 0, transB = 0>"  # as exporters of PyTorch write them


@pytest.mark.parametrize(
    "product",
    ["MatMul(x, w)", *(f"Gemm{attrs}(x, w{b})" for attrs in ("", GEMM_DEFAULTS, "<transB = 1>") for b in ("", ", b"))],
)
@pytest.mark.parametrize(("dtype", "block"), [("int8", None), ("int4", 32), ("int8", 64)])
def test_products_are_read_as_they_were(tmp_path: Path, product: str, dtype: str, block: int | None) -> None:
    """`strip` gives MatMul or Gemm back, with attributes that are defaults, also if a Gather reads the weight."""
    rng, form = np.random.default_rng(0), "dynamic" if block is None else "packed"
    shape = (96, 64) if "transB = 1" in product else (64, 96)
    weights = {"w": rng.standard_normal(shape).astype(np.float32)}
    if "b)" in product:
        weights["b"] = rng.standard_normal(96).astype(np.float32)
    outputs = f"float[n, 96] y, float[k, {shape[1]}] z"
    source = parse(f"y = {product} z = Gather<axis = 0>(w, i)", "float[n, 64] x, int64[k] i", outputs, weights)
    onnx.save(source, tmp_path / "float.onnx")
    per = "channel" if block is None else "block"
    rules = write_rules(tmp_path / "r.toml", dtype, f'form = "{form}"', block=block, per=per)
    result = gq.insert(tmp_path / "float.onnx", rules=rules)
    written = gq.load(result.save(tmp_path / "fused.onnx", force=True))
    assert onnx_format.emit(written).SerializeToString() == onnx_format.emit(result.model).SerializeToString()
    stripped = onnx_format.emit(gq.strip(written).model)
    before, after = (
        {node.op_type: sorted(map(str, node.attribute)) for node in model.graph.node} for model in (source, stripped)
    )
    assert after == before


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("order", ["m, b", "b, m"])
def test_added_bias_of_a_packed_product(tmp_path: Path, order: str, rank: int) -> None:
    """MatMulNBits adds a bias, so that onnxruntime makes no BiasGelu of it. `strip` gives MatMul and Add back."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in (("w", (64, 96)), ("b", 96))}
    text, rows = f"m = MatMul(x, w) a = Add({order}) y = com.microsoft.Gelu(a)", ", ".join("nk"[: rank - 1])
    onnx.save(parse(text, f"float[{rows}, 64] x", f"float[{rows}, 96] y", weights), tmp_path / "float.onnx")
    result = gq.insert(tmp_path / "float.onnx", rules=write_rules(tmp_path / "r.toml", "uint4", 'form = "packed"'))
    message = onnx_format.emit(result.model)
    assert op_counts(message) == {"MatMulNBits": 1, "Gelu": 1}
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "optimized.onnx"), 4
    onnxruntime.InferenceSession(message.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert op_counts(onnx.load(tmp_path / "optimized.onnx")) == {"MatMulNBits": 1, "Gelu": 1}
    written = gq.load(result.save(tmp_path / "packed.onnx"))
    assert onnx_format.emit(written).SerializeToString() == message.SerializeToString()
    stripped = onnx_format.emit(gq.strip(written, everything=True).model)
    nodes = {node.op_type: (node.input[:], node.output[:]) for node in stripped.graph.node}
    assert nodes["MatMul"] == (["x", "w"], ["m"])
    assert nodes["Add"] == (order.split(", "), ["a"])
    x = rng.standard_normal((2, 3, 64)[3 - rank :]).astype(np.float32)
    np.testing.assert_allclose(run(stripped, {"x": x})[0], run(message, {"x": x})[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", ["m, b", "b, m"])
@pytest.mark.parametrize(("dtype", "form", "block"), [("uint4", "packed", 32), ("int8", "dynamic", None)])
def test_strip_of_an_added_bias_is_the_source(
    tmp_path: Path, order: str, dtype: str, form: str, block: int | None
) -> None:
    """Names and the order of the sum are those of the source, so that `strip --check` passes."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in (("w", (64, 96)), ("b", 96))}
    text = f"m = MatMul(x, w) y = Add({order})"
    onnx.save(parse(text, "float[n, k, 64] x", "float[n, k, 96] y", weights), tmp_path / "float.onnx")
    per = "channel" if block is None else "block"
    rules = write_rules(tmp_path / "r.toml", dtype, f'form = "{form}"', block=block, per=per)
    written = gq.insert(tmp_path / "float.onnx", rules=rules).save(tmp_path / "fused.onnx")
    stripped = onnx_format.emit(gq.strip(written).model)
    source = onnx.load(tmp_path / "float.onnx")
    assert [(n.op_type, n.input[:], n.output[:]) for n in stripped.graph.node if n.op_type != "Constant"] == [
        (n.op_type, n.input[:], n.output[:]) for n in source.graph.node
    ]


@pytest.mark.parametrize("readers", ["", "r = Gather(w, i)", "s = Mul(w, c)", "s = Mul(t, c)"])
@pytest.mark.parametrize(
    ("dtype", "form", "block"),
    [("uint4", "packed", 32), ("uint4", "folded", 32), ("int8", "dynamic", None), ("int8", "folded", None)],
)
def test_strip_of_weights_behind_a_transpose(
    tmp_path: Path, readers: str, dtype: str, form: str, block: int | None
) -> None:
    """The result stores the transposed weight. `strip` proves that it has the values of the source's Transpose."""
    weights = {"w": np.random.default_rng(0).standard_normal((96, 64)).astype(np.float32)}
    outputs = {"r": "float[k, 64] r", "s": "float[p, q] s"}
    others = ["float[n, 96] y", *(text for name, text in outputs.items() if readers.startswith(name))]
    body = f"t = Transpose<perm = [1, 0]>(w) y = MatMul(x, t) {readers}"
    message = parse(body, "float[n, 64] x, int64[k] i, float c", ", ".join(others), weights)
    onnx.save(message, tmp_path / "float.onnx")
    rules = write_rules(
        tmp_path / "r.toml", dtype, f'form = "{form}"', block=block, per="block" if block else "channel"
    )
    text = rules.read_text().replace("matmul|gemm|conv", "matmul").replace('kind = "gather"', 'kind = "lrn"')
    rules.write_text(text)
    written = gq.insert(tmp_path / "float.onnx", rules=rules).save(tmp_path / "quant.onnx")
    proof = prove_stripped(gq.strip(written), tmp_path / "float.onnx")
    assert proof.holds
    message.graph.initializer[0].CopyFrom(numpy_helper.from_array(2 * weights["w"], "w"))
    onnx.save(message, tmp_path / "other.onnx")
    assert not prove_stripped(gq.strip(written), tmp_path / "other.onnx").holds


def test_strip_of_products_with_equal_names(tmp_path: Path) -> None:
    """Products of two branches may have one name, and a product may have the name of another value."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in (("w", (64, 96)), ("b", 96))}
    branch = "{0} = g () => (float[n, 96] {0}) {{{{ m{1} = MatMul(x, w) {0} = Add(m{1}, b) }}}}"
    branches = ", ".join(branch.format(name, index) for index, name in enumerate(("then_branch", "else_branch")))
    text = f"y = If (c) <{branches.format()}>"
    message = parse(text, "float[n, 64] x, bool c", "float[n, 96] y", weights)
    for attribute in message.graph.node[0].attribute:
        attribute.g.node[0].name, attribute.g.node[1].name = "product", "y"
    onnx.save(message, tmp_path / "float.onnx")
    rules = write_rules(tmp_path / "r.toml", "uint4", 'form = "packed"')
    written = gq.insert(tmp_path / "float.onnx", rules=rules).save(tmp_path / "fused.onnx")
    stripped = onnx_format.emit(gq.strip(written).model)
    for attribute in stripped.graph.node[-1].attribute:
        nodes = [node for node in attribute.g.node if node.op_type != "Constant"]
        assert [(node.op_type, node.name) for node in nodes] == [("MatMul", "product"), ("Add", "y")]


@pytest.mark.parametrize("form", [pytest.param("packed", marks=needs_byte_tables), "dynamic"])
@pytest.mark.parametrize("ir_version", [8, 10])
def test_replaced_ops_keep_names_and_notes(tmp_path: Path, form: str, ir_version: int) -> None:
    """A fused op has the doc string and metadata of its result, and `strip` gives all ops back."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in (("w", (512, 64)), ("b", 512))}
    text = (
        "t = Transpose <perm = [1, 0]> (w) m = MatMul(x, t) a = Add(b, m) n = MatMul(x, t) r = Gather(w, i) y = Relu(a)"
    )
    outputs = "float[n, 512] y, float[n, 512] n, float[k, 64] r"
    message = parse(text, "float[n, 64] x, int64[k] i", outputs, weights, opset=18 if form == "dynamic" else 21)
    message.ir_version = ir_version
    for node in message.graph.node:
        node.name, node.doc_string = f"name of {node.output[0]}", f"doc of {node.output[0]}"
        if ir_version == 10:
            node.metadata_props.add(key="scope", value=node.output[0])
    onnx.save(message, tmp_path / "float.onnx")
    rules = "dynamic" if form == "dynamic" else write_rules(tmp_path / "r.toml", "int8", 'form = "packed"')
    written = gq.load(gq.insert(tmp_path / "float.onnx", rules=rules).save(tmp_path / "quant.onnx"))
    quantized = onnx_format.emit(written)
    fused = {node.name: node for node in quantized.graph.node if node.domain == "com.microsoft"}
    assert {name: node.doc_string for name, node in fused.items()} == {f"name of {v}": f"doc of {v}" for v in "an"}
    stripped = onnx_format.emit(gq.strip(written, everything=True).model)
    source, result = (
        {
            (node.name, node.op_type, *node.output): (node.doc_string, str(node.metadata_props))
            for node in model.graph.node
        }
        for model in (message, stripped)
    )
    assert result == source


@pytest.mark.parametrize("ir_version", [8, 10])
@pytest.mark.parametrize(
    "op", ["m = MatMul(x, w) y = Add(m, b)", "m = MatMul(x, w) y = Add(b, m)", "y = Gemm(x, w, b)"]
)
def test_strip_of_results_of_earlier_versions(tmp_path: Path, ir_version: int, op: str) -> None:
    """These had only a rule and an anchor for each op; that of a product also names it and its slot in the sum."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in (("w", (64, 96)), ("b", 96))}
    source = parse(op, "float[n, 64] x", "float[n, 96] y", weights)
    source.ir_version = ir_version
    for node in source.graph.node:
        node.name = node.output[0]
    onnx.save(source, tmp_path / "float.onnx")
    rules = write_rules(tmp_path / "r.toml", "uint4", 'form = "packed"')
    path = gq.insert(tmp_path / "float.onnx", rules=rules).save(tmp_path / "fused.onnx")
    message = onnx.load(path)

    def old_entries(rule: str, anchor: str, notes: dict[str, str] | None = None) -> list[str]:
        summand = next(((notes[key], key[-1]) for key in notes or {} if "summand" in key), ())
        return [rule, "\n".join([anchor, *summand])]

    for entry in message.metadata_props:
        if entry.key == "graphquant.ops":
            ops = json.loads(entry.value)[""]
            entry.value = json.dumps({"": {name: old_entries(*entries) for name, entries in ops.items()}})
    for node in message.graph.node:
        notes = {entry.key.removeprefix("graphquant."): entry.value for entry in node.metadata_props}
        del node.metadata_props[:]
        if notes:
            for key, text in zip(("rule", "anchor"), old_entries(notes["rule"], notes["anchor"], notes), strict=True):
                node.metadata_props.add(key=f"graphquant.{key}", value=text)
    onnx.save(message, path)
    stripped = onnx_format.emit(gq.strip(path).model)
    assert [(n.name, n.op_type, n.input[:], n.output[:]) for n in stripped.graph.node if n.op_type != "Constant"] == [
        (n.name, n.op_type, n.input[:], n.output[:]) for n in source.graph.node
    ]


def test_weight_of_two_sums(tmp_path: Path) -> None:
    """A weight that two products read is packed once. One of them adds a bias."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in (("w", (64, 64)), ("b", 64))}
    text = "m = MatMul(x, w) a = Add(m, b) y = MatMul(a, w)"
    onnx.save(parse(text, "float[n, 64] x", "float[n, 64] y", weights), tmp_path / "float.onnx")
    result = gq.insert(tmp_path / "float.onnx", rules=write_rules(tmp_path / "r.toml", "uint4", 'form = "packed"'))
    message = onnx_format.emit(result.model)
    assert op_counts(message) == {"MatMulNBits": 2}
    assert [initializer.dims[:] for initializer in message.graph.initializer].count([64, 2, 16]) == 1


def test_shared_weight_of_dynamic_products(tmp_path: Path) -> None:
    """A weight that several products read is stored once, and other ops read the float one."""
    weights = {"w": np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)}
    body = "a = Gemm<transB = 1>(x, w) b = Gemm<transB = 1>(a, w) y = Mul(b, w)"
    onnx.save(parse(body, "float[8, 8] x", "float[8, 8] y", weights), tmp_path / "float.onnx")
    rules = write_rules(tmp_path / "r.toml", "int8", 'form = "dynamic"', block=None, per="tensor")
    message = onnx_format.emit(gq.insert(tmp_path / "float.onnx", rules=rules).model)
    assert op_counts(message)["DynamicQuantizeMatMul"] == 2
    matrices = [initializer.data_type for initializer in message.graph.initializer if initializer.dims[:] == [8, 8]]
    assert sorted(matrices) == [onnx.TensorProto.FLOAT, onnx.TensorProto.INT8]


@pytest.mark.parametrize("per", ["channel", "tensor"])
def test_dynamic_products_of_one_tensor(tmp_path: Path, per: str) -> None:
    """One op rounds a tensor that three products read, to the same bits as each would, and all are read as pairs."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((20, 12)).astype(np.float32) for name in ("q", "k", "v")}
    weights |= {"b": rng.standard_normal(12).astype(np.float32)}
    body = "r = Relu(x) y = MatMul(r, q) m = MatMul(r, k) z = Add(m, b) u = Gemm(r, v, b)"
    message = parse(body, "float[n, 20] x", "float[n, 12] y, float[n, 12] z, float[n, 12] u", weights)
    onnx.save(message, tmp_path / "float.onnx")
    rules = write_rules(tmp_path / "r.toml", "int8", 'form = "dynamic"', block=None, per=per)
    result = gq.insert(tmp_path / "float.onnx", rules=rules)
    shared = onnx_format.emit(result.model)
    onnx.checker.check_model(shared, full_check=True)
    assert op_counts(shared) == {"Relu": 1, "DynamicQuantizeLinear": 1, "MatMulIntegerToFloat": 3}
    two = onnx_format.emit(gq.insert(tmp_path / "float.onnx", rules=rules, exclude=["v"]).model)
    assert op_counts(two)["DynamicQuantizeMatMul"] == 2
    feeds = {"x": rng.standard_normal((5, 20)).astype(np.float32)}
    for left, right in zip(run(shared, feeds)[:2], run(two, feeds)[:2], strict=True):
        np.testing.assert_array_equal(left, right)
    written = gq.load(result.save(tmp_path / "dynamic.onnx", force=True))
    assert Counter(op.kind for _, op in written.reachable_ops())["dequantize"] == 3
    assert onnx_format.emit(written).SerializeToString() == shared.SerializeToString()
    stripped = onnx_format.emit(gq.strip(written, everything=True).model)
    assert "DynamicQuantizeLinear" not in op_counts(stripped)


LSTM_RULES = """description = "Weights of LSTMs"
[scheme.gate]
dtype = "int8"
narrow = true
per = "{per}"
observe = "absmax"
family = "onnx-fused"
args = {{ form = "dynamic" }}
[[rule]]
name = "gates"
producer = {{ kind = "parameter" }}
consumer = {{ kind = "lstm", input = "weight|recurrent_weight" }}
quantize = "gate"
"""

LSTM_SIZES = "hidden_size = 20"


def lstm_weights(directions: int, columns: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights of an LSTM with 20 cells, whose second direction has larger ones."""
    rng = np.random.default_rng(seed)
    shapes = {"w": (directions, 80, columns), "r": (directions, 80, 20), "b": (directions, 160)}
    weights = {name: rng.standard_normal(shape).astype(np.float32) / 4 for name, shape in shapes.items()}
    weights["w"][1:] *= 3
    return weights


def sqnr(expected: np.ndarray, actual: np.ndarray) -> float:
    """SQNR in dB."""
    return float(10 * np.log10(np.square(expected).sum() / np.square(expected - actual).sum()))


@pytest.mark.parametrize("per", ["channel", "tensor"])
@pytest.mark.parametrize(("direction", "directions"), [("forward", 1), ("reverse", 1), ("bidirectional", 2)])
@pytest.mark.parametrize("columns", [1, 30])
def test_dynamic_lstms(tmp_path: Path, direction: str, directions: int, columns: int, per: str) -> None:
    """An LSTM with dynamic activations loses no more than that of onnxruntime's tool, and is read back as pairs."""
    weights = lstm_weights(directions, columns)
    body = f'y, h, c = LSTM<{LSTM_SIZES}, direction = "{direction}", clip = 3.0>(x, w, r, b, n)'
    inputs, outputs = f"float[t, 3, {columns}] x, int32[3] n", "float[t, d, 3, 20] y, float[d, 3, 20] c"
    onnx.save(parse(body, inputs, outputs, weights, opset=17), tmp_path / "float.onnx")
    (tmp_path / "r.toml").write_text(LSTM_RULES.format(per=per))
    result = gq.insert(tmp_path / "float.onnx", rules=tmp_path / "r.toml")
    message = onnx_format.emit(result.model)
    assert op_counts(message) == {"DynamicQuantizeLSTM": 1}
    tools = pytest.importorskip("onnxruntime.quantization", exc_type=ImportError)  # it needs sympy before 1.26
    tools.quantize_dynamic(tmp_path / "float.onnx", tmp_path / "tool.onnx", per_channel=per == "channel")
    rng = np.random.default_rng(1)
    feeds = {"x": rng.standard_normal((7, 3, columns)).astype(np.float32), "n": np.array([7, 2, 5], np.int32)}
    expected = run(onnx.load(tmp_path / "float.onnx"), feeds)
    tool = run(onnx.load(tmp_path / "tool.onnx"), feeds)
    for reference, ours, others in zip(expected, run(message, feeds), tool, strict=True):
        # The tool has a scale for each direction, and graphquant with one scale per tensor has not.
        margin = 4 if (per, directions) == ("tensor", 2) else 0.1
        assert sqnr(reference, ours) > min(sqnr(reference, others) - margin, 40)
    written = gq.load(result.save(tmp_path / "dynamic.onnx", force=True))
    anchors = {op.anchor.partition(":")[0] for _, op in written.reachable_ops() if op.kind == "dequantize"}
    assert anchors == {"w", "r"}
    assert onnx_format.emit(written).SerializeToString() == message.SerializeToString()
    other_tool = gq.load(tmp_path / "tool.onnx")
    assert {op.kind for _, op in other_tool.reachable_ops()} >= {"lstm", "dequantize"}
    for ours, theirs in zip(run(onnx_format.emit(other_tool), feeds), tool, strict=True):
        np.testing.assert_array_equal(ours, theirs)


ATTENTION_RULES = LSTM_RULES.replace('"lstm", input = "weight|recurrent_weight"', '"attention", input = "weight"')


@pytest.mark.parametrize("per", ["channel", "tensor"])
@pytest.mark.parametrize("form", ["plain", "masked", "past"])
def test_dynamic_attention(tmp_path: Path, form: str, per: str) -> None:
    """An Attention with dynamic activations loses no more than that of onnxruntime's tool, and is read as a pair."""
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.normal(size=(32, 96), scale=0.2).astype(np.float32),
        "b": rng.normal(size=96).astype(np.float32),
    }
    feeds = {"x": rng.normal(size=(2, 5, 32)).astype(np.float32)}
    attrs, inputs, outputs = "num_heads = 4, scale = 0.4", "float[n, t, 32] x", "float[n, t, 32] y"
    body = f"y = com.microsoft.Attention<{attrs}>(x, w, b)"
    if form == "masked":
        body, inputs = body.replace("b)", "b, m)"), f"{inputs}, int32[n, t] m"
        feeds["m"] = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int32)
    elif form == "past":
        body = f"y, s = com.microsoft.Attention<{attrs}, unidirectional = 1>(x, w, b, , p)"
        inputs, outputs = f"{inputs}, float[2, n, 4, u, 8] p", f"{outputs}, float[2, n, 4, v, 8] s"
        feeds["p"] = rng.normal(size=(2, 2, 4, 3, 8)).astype(np.float32)
    onnx.save(parse(body, inputs, outputs, weights, opset=17), tmp_path / "float.onnx")
    (tmp_path / "r.toml").write_text(ATTENTION_RULES.format(per=per))
    result = gq.insert(tmp_path / "float.onnx", rules=tmp_path / "r.toml")
    message = onnx_format.emit(result.model)
    assert op_counts(message) == {"DynamicQuantizeLinear": 1, "QAttention": 1}
    tools = pytest.importorskip("onnxruntime.quantization", exc_type=ImportError)  # it needs sympy before 1.26
    tools.quantize_dynamic(tmp_path / "float.onnx", tmp_path / "tool.onnx", per_channel=per == "channel")
    expected, tool = (run(onnx.load(tmp_path / f"{name}.onnx"), feeds) for name in ("float", "tool"))
    for reference, ours, others in zip(expected, run(message, feeds), tool, strict=True):
        assert sqnr(reference, ours) > max(30, sqnr(reference, others) - 0.5)
    written = gq.load(result.save(tmp_path / "dynamic.onnx", force=True))
    assert Counter(op.kind for _, op in written.reachable_ops())["attention"] == 1
    assert onnx_format.emit(written).SerializeToString() == message.SerializeToString()
    assert prove_stripped(gq.strip(tmp_path / "dynamic.onnx"), tmp_path / "float.onnx").holds
    for ours, theirs in zip(run(onnx_format.emit(gq.load(tmp_path / "tool.onnx")), feeds), tool, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_rounded_input_of_attention_gets_free_names(tmp_path: Path) -> None:
    """The scale and the zero point of the rounded input do not get the name of another value."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(32, 96), scale=0.2).astype(np.float32), "b": np.zeros(96, np.float32)}
    body = "y = com.microsoft.Attention<num_heads = 4>(x, w, b) z = Relu(x)"
    inputs, outputs = "float[2, 5, 32] x", "float[2, 5, 32] y, float[2, 5, 32] z"
    message = parse(body, inputs, outputs, weights, opset=17)
    message.graph.node[1].output[0] = message.graph.output[1].name = "x/rounded/scale"
    onnx.save(message, tmp_path / "float.onnx")
    (tmp_path / "r.toml").write_text(ATTENTION_RULES.format(per="channel"))
    result = gq.insert(tmp_path / "float.onnx", rules=tmp_path / "r.toml")
    feeds = {"x": rng.normal(size=(2, 5, 32)).astype(np.float32)}
    expected, actual = run(message, feeds), run(onnx_format.emit(result.model), feeds)
    assert sqnr(expected[0], actual[0]) > 30
    np.testing.assert_array_equal(expected[1], actual[1])


@pytest.mark.parametrize("change", ["qkv_hidden_sizes = [32, 32, 32]", "summand"])
def test_attention_without_a_dynamic_form_is_folded(tmp_path: Path, change: str) -> None:
    """QAttention has neither other widths of values nor a summand of the scores."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(32, 96)).astype(np.float32), "b": rng.normal(size=96).astype(np.float32)}
    weights |= {"s": rng.normal(size=(1, 4, 5, 5)).astype(np.float32)}
    attrs = f"num_heads = 4, {change}" if "=" in change else "num_heads = 4"
    operands = "x, w, b, , , s" if change == "summand" else "x, w, b"
    body = f"y = com.microsoft.Attention<{attrs}>({operands})"
    onnx.save(parse(body, "float[n, 5, 32] x", "float[n, 5, 32] y", weights, opset=17), tmp_path / "float.onnx")
    (tmp_path / "r.toml").write_text(ATTENTION_RULES.format(per="channel"))
    message = onnx_format.emit(gq.insert(tmp_path / "float.onnx", rules=tmp_path / "r.toml").model)
    assert op_counts(message) == {"Cast": 1, "Mul": 1, "Attention": 1}
    feeds = {"x": rng.normal(size=(2, 5, 32)).astype(np.float32)}
    assert sqnr(run(onnx.load(tmp_path / "float.onnx"), feeds)[0], run(message, feeds)[0]) > 30


def test_tables_of_a_fused_embedding_are_folded(tmp_path: Path) -> None:
    """The tables of an EmbedLayerNormalization are stored in bytes, one that a product reads too only once."""
    rng = np.random.default_rng(0)
    shapes = {"words": (600, 32), "positions": (16, 32), "g": (32,), "b": (32,)}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    body = """e, m = com.microsoft.EmbedLayerNormalization(ids, , words, positions, , g, b)
        t = Transpose<perm = [1, 0]>(words) y = MatMul(e, t)"""
    onnx.save(parse(body, "int32[n, 8] ids", "float[n, 8, 600] y", weights, opset=17), tmp_path / "float.onnx")
    feeds = {"ids": rng.integers(0, 600, (3, 8)).astype(np.int32)}
    expected = run(onnx.load(tmp_path / "float.onnx"), feeds)
    for rules in ("weight_only_int4", "weight_only_int8", "dynamic"):
        result = gq.insert(tmp_path / "float.onnx", rules=[rules])
        assert model_constant_bytes(result.model) < 1.4 * 616 * 32  # with two scales for each row
        path = result.save(tmp_path / "result.onnx", force=True)
        assert sqnr(expected[0], run(onnx.load(path), feeds)[0]) > 25
        assert prove_stripped(gq.strip(path), tmp_path / "float.onnx").holds


def test_lstm_in_a_body_and_partly_excluded(tmp_path: Path) -> None:
    """An LSTM in a body is fused. One whose second weight stays float reads the first one folded."""
    weights = lstm_weights(1, 30)
    lstm = f"a, h, c = LSTM<{LSTM_SIZES}>(x, w, r, b)"
    body = f"""p = ReduceSum<keepdims = 0>(x) z = Constant<value_float = 0.0>() q = Greater(p, z)
        y = If (q) <then_branch = t () => (float[t, 1, 3, 20] a) {{ {lstm} }},
                    else_branch = e () => (float[t, 1, 3, 20] d) {{ {lstm} d = Neg(a) }}>"""
    onnx.save(parse(body, "float[t, 3, 30] x", "float[t, 1, 3, 20] y", weights, opset=17), tmp_path / "float.onnx")
    (tmp_path / "r.toml").write_text(LSTM_RULES.format(per="channel"))
    feeds = {"x": np.random.default_rng(1).standard_normal((4, 3, 30)).astype(np.float32)}
    (expected,) = run(onnx.load(tmp_path / "float.onnx"), feeds)
    message = onnx_format.emit(gq.insert(tmp_path / "float.onnx", rules=tmp_path / "r.toml").model)
    (branch,) = (node for node in message.graph.node if node.op_type == "If")
    for attribute in branch.attribute:
        assert "DynamicQuantizeLSTM" in {node.op_type for node in attribute.g.node}
        assert "LSTM" not in {node.op_type for node in attribute.g.node}
    assert sqnr(expected, run(message, feeds)[0]) > 30
    excluded = gq.insert(tmp_path / "float.onnx", rules=tmp_path / "r.toml", exclude=["r"]).model
    partial = onnx_format.emit(excluded)
    types = Counter(node.op_type for attribute in partial.graph.node[-1].attribute for node in attribute.g.node)
    assert "DynamicQuantizeLSTM" not in types
    assert "DequantizeLinear" not in types
    assert sqnr(expected, run(partial, feeds)[0]) > 30


EXPERT_RULES = """description = "Weights of experts"
[scheme.block]
dtype = "{dtype}"
zero = "{zero}"
per = "block"
block_size = 16
family = "onnx-fused"
args = {{ form = "packed" }}
[[rule]]
name = "expert"
producer = {{ kind = "parameter" }}
consumer = {{ kind = "moe", input = "weight" }}
quantize = "block"
"""

HAS_FAST_EXPERTS = supports_fused_form(
    FusedForm(op_type="QMoE", bits=4, args=FamilyArguments(form="packed", accuracy_level=0))
)


@pytest.mark.skipif(RELEASE < (1, 24), reason="this release has no MoE for CPUs")
@pytest.mark.parametrize(("dtype", "zero"), [("uint4", "asymmetric"), ("int4", "symmetric"), ("int8", "symmetric")])
@pytest.mark.parametrize("attributes", ["normalize_routing_weights = 1", "normalize_routing_weights = 0"])
@pytest.mark.parametrize("activation", ["silu", "swiglu"])
def test_experts(tmp_path: Path, dtype: str, zero: str, attributes: str, activation: str) -> None:
    """Experts are packed where the kernel weights them as the float op does, and computes them fast; else folded."""
    rng = np.random.default_rng(0)
    width = 64 if activation == "swiglu" else 32
    weights = {"w": rng.standard_normal((4, width, 48)), "v": rng.standard_normal((4, 48, 32))}
    weights = {name: value.astype(np.float32) for name, value in weights.items()}
    fusion = ", swiglu_fusion = 1" if activation == "swiglu" else ""
    attributes = f'k = 2, activation_type = "{activation}", {attributes}{fusion}'
    body = f"y = com.microsoft.MoE<{attributes}>(x, p, w, , v)"
    onnx.save(parse(body, "float[n, 48] x, float[n, 4] p", "float[n, 48] y", weights), tmp_path / "float.onnx")
    (tmp_path / "r.toml").write_text(EXPERT_RULES.format(dtype=dtype, zero=zero))
    result = gq.insert(tmp_path / "float.onnx", rules=tmp_path / "r.toml")
    message = onnx_format.emit(result.model)
    is_packed = HAS_FAST_EXPERTS and "normalize_routing_weights = 1" in attributes
    assert op_counts(message)["QMoE" if is_packed else "MoE"] == 1
    assert op_counts(message)["DequantizeLinear"] == (0 if is_packed else 2)
    written = gq.load(result.save(tmp_path / "packed.onnx", force=True))
    assert onnx_format.emit(written).SerializeToString() == message.SerializeToString()
    stripped = onnx_format.emit(gq.strip(written).model)
    assert op_counts(stripped)["MoE"] == 1
    feeds = {name: rng.standard_normal((5, size)).astype(np.float32) for name, size in (("x", 48), ("p", 4))}
    (actual,), (reference,) = run(message, feeds), run(stripped, feeds)
    if dtype != "int8":  # with bytes, the kernel rounds activations
        np.testing.assert_allclose(actual, reference, rtol=1e-4, atol=1e-3)
    assert sqnr(run(onnx.load(tmp_path / "float.onnx"), feeds)[0], actual) > (30 if dtype == "int8" else 15)


@pytest.mark.skipif(RELEASE < (1, 24), reason="this release has no MoE for CPUs")
def test_multiply_adds_of_experts(tmp_path: Path) -> None:
    """Each row passes the chosen experts, also if the weights are quantized and packed."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((20, 256, 128)), "v": rng.standard_normal((20, 128, 256))}
    weights = {name: value.astype(np.float32) for name, value in weights.items()}
    body = 'y = com.microsoft.MoE<k = 2, activation_type = "silu", normalize_routing_weights = 1>(x, p, w, , v)'
    onnx.save(parse(body, "float[n, 128] x, float[n, 20] p", "float[n, 128] y", weights), tmp_path / "float.onnx")
    expected = 2 * (256 * 128 + 128 * 256)
    data = {"x": rng.standard_normal((8, 128)).astype(np.float32), "p": rng.standard_normal((8, 20)).astype(np.float32)}
    for rules in ("weight_only_int8", "dynamic", "weight_only_int4", "onnxruntime"):
        result = gq.insert(tmp_path / "float.onnx", rules=[rules], data=data if rules == "onnxruntime" else None)
        assert [*count_macs(result.source).values()] == [*count_macs(result.model).values()] == [expected]
        assert op_counts(onnx_format.emit(result.model)).keys() >= ({"QMoE"} if HAS_FAST_EXPERTS else {"MoE"})


@pytest.mark.parametrize("scale", [(), (3,), (1, 79), (0,)])
def test_lstm_with_scales_of_another_shape(tmp_path: Path, scale: tuple[int, ...]) -> None:
    """An op whose scales fit no weight stays as it is in the file."""
    weights = {"w": np.ones((1, 30, 80), np.int8), "r": np.ones((1, 20, 80), np.int8)}
    weights |= {"s": np.ones(scale, np.float32), "t": np.ones(1, np.float32), "z": np.zeros(1, np.int8)}
    body = f"y = com.microsoft.DynamicQuantizeLSTM<{LSTM_SIZES}>(x, w, r, , , , , , s, z, t, z)"
    message = parse(body, "float[t, 3, 30] x", "float[t, 1, 3, 20] y", weights)
    onnx.save(message, tmp_path / "other.onnx")
    model = gq.load(tmp_path / "other.onnx")
    expected = "lstm" if scale == () else "integer"
    assert expected in {op.kind for _, op in model.reachable_ops()}
    assert op_counts(onnx_format.emit(model)) == {"DynamicQuantizeLSTM": 1}


HOSTILE = {
    "bytes of packed weights": ("MatMulNBits", 1, lambda value: value[:, :1]),
    "type of packed weights": ("MatMulNBits", 1, lambda value: value.view(np.int8)),
    "number of packed zero points": ("MatMulNBits", 3, lambda value: value[1:]),
    "type of scales": ("MatMulNBits", 2, lambda value: value.astype(np.int64)),
    "number of scales of a table": ("GatherBlockQuantized", 2, lambda value: value[:, 1:]),
    "number of zero points of a table": ("GatherBlockQuantized", 3, lambda value: value[1:]),
    "axes of a folded scale": ("Mul", 1, lambda value: value[..., None]),
    "number of folded scales": ("Mul", 1, lambda value: value[:1]),
    "type of a folded scale": ("Mul", 1, lambda value: value.astype(np.float64)),
    "empty end of a slice": ("Slice", 2, lambda value: value[:0]),
    "end of a slice with two axes": ("Slice", 2, lambda value: value[None]),
    "other axis of a slice": ("Slice", 3, lambda value: value + 1),
    "other start of a slice": ("Slice", 1, lambda value: value + 1),
    "other shape of folded weights": ("Reshape", 1, lambda value: value + 1),
}
"""Changes of a constant that an op of a fused weight reads, which make it a different weight or none."""


@pytest.mark.parametrize(("op_type", "slot", "change"), HOSTILE.values(), ids=HOSTILE)
def test_misfit_constants(tmp_path: Path, op_type: str, slot: int, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """An op whose constants fit no weight is read as it is in the file, and written without a change."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((50, 64)).astype(np.float32)}
    if op_type == "GatherBlockQuantized":
        message = parse("y = Gather(w, i)", "int64[n] i", "float[n, 64] y", weights)
    else:
        message = parse("y = MatMul(x, w)", "float[n, 50] x", "float[n, 64] y", weights)
    onnx.save(message, tmp_path / "float.onnx")
    packs = op_type in {"MatMulNBits", "GatherBlockQuantized"}
    if not packs and not supports_fused_form(FOLDED_4):
        pytest.skip("this release folds no weights of 4 bits")
    dtype, zero, form = ("uint4", "asymmetric", "packed") if packs else ("int4", "symmetric", "folded")
    rules = write_rules(tmp_path / "r.toml", dtype, f'form = "{form}"', zero=zero)
    message = onnx_format.emit(gq.insert(tmp_path / "float.onnx", rules=rules).model)
    (node,) = (node for node in message.graph.node if node.op_type == op_type)
    (constant,) = (tensor for tensor in message.graph.initializer if tensor.name == node.input[slot])
    constant.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(constant)), constant.name))
    onnx.save(message, tmp_path / "hostile.onnx")
    model = gq.load(tmp_path / "hostile.onnx")
    assert "dequantize" not in {op.kind for op in model.main.ops()}
    assert onnx_format.emit(model).graph.node == message.graph.node


@pytest.mark.parametrize("body", ["y = com.microsoft.GatherBlockQuantized()", "t = Reshape() y = {}(t, i, s)"])
def test_tables_without_inputs(tmp_path: Path, body: str) -> None:
    """A lookup without inputs, or whose table has none, is read as it is in the file."""
    body = body.format("com.microsoft.GatherBlockQuantized<bits = 8, block_size = 16>")
    weights = {"s": np.ones((4, 2), np.float32)}
    onnx.save(parse(body, "int64[n] i", "float[n, 32] y", weights), tmp_path / "hostile.onnx")
    model = gq.load(tmp_path / "hostile.onnx")
    assert op_counts(onnx_format.emit(model))["GatherBlockQuantized"] == 1


def test_half_misfit_experts_and_gates(tmp_path: Path) -> None:
    """A fused layer with a misfit second weight leaves no op of its first one behind."""
    weights = {"w": np.ones((1, 30, 80), np.int8), "r": np.ones((1, 20, 80), np.int8)}
    weights |= {"t": np.ones(1, np.float32), "s": np.ones(3, np.float32), "z": np.zeros(1, np.int8)}
    body = f"y = com.microsoft.DynamicQuantizeLSTM<{LSTM_SIZES}>(x, w, r, , , , , , t, z, s, z)"
    message = parse(body, "float[t, 3, 30] x", "float[t, 1, 3, 20] y", weights)
    onnx.save(message, tmp_path / "other.onnx")
    model = gq.load(tmp_path / "other.onnx")
    assert {op.kind for op in model.main.ops()} == {"input", "output", "constant", "integer"}
    assert op_counts(onnx_format.emit(model)) == {"DynamicQuantizeLSTM": 1}


def test_lstm_weight_without_axes(tmp_path: Path) -> None:
    """An LSTM whose declared weight is a scalar is no candidate for a fused op, and the plan skips it."""
    weights = lstm_weights(1, 30) | {"w": np.float32(1).reshape(())}
    body = f"y = LSTM<{LSTM_SIZES}>(x, w, r, b)"
    onnx.save(parse(body, "float[t, 3, 30] x", "float[t, 1, 3, 20] y", weights, opset=21), tmp_path / "float.onnx")
    (tmp_path / "r.toml").write_text(LSTM_RULES.format(per="block").replace("narrow", "block_size = 30\nnarrow"))
    assert "w" not in {site.tensor.op for site in gq.plan(tmp_path / "float.onnx", rules=tmp_path / "r.toml").sites}


TIED = {
    "Transpose": "e = Gather(w, i) t = Transpose<perm = [1, 0]>(w) y = MatMul(e, t)",
    "Gemm": "e = Gather(w, i) y = Gemm<transB = 1>(e, w, b)",
}


@pytest.mark.parametrize("product", TIED)
@pytest.mark.parametrize(
    ("rules", "columns"), [("weight_only_int4", 256), ("weight_only_int8", 200), ("tables_int4", 256), ("dynamic", 256)]
)
def test_tied_tables_are_stored_once(tmp_path: Path, product: str, rules: str, columns: int) -> None:
    """A table and the product that reads it have one constant, one pair, and come back as the ops that they were."""
    rows = 4200
    rng = np.random.default_rng(0)
    table = rng.normal(size=(rows, columns)).astype(np.float32)
    weights = {"w": table} | ({"b": rng.normal(size=rows).astype(np.float32)} if product == "Gemm" else {})
    message = parse(TIED[product], "int64[n] i", f"float[n,{rows}] y", weights)
    onnx.save(message, tmp_path / "m.onnx")
    result = gq.insert(tmp_path / "m.onnx", rules=[rules], validate=False)
    assert len(result.plan.sites) == 1
    result.save(tmp_path / "q.onnx")
    quantized = onnx.load(tmp_path / "q.onnx")
    assert [i.dims[0] for i in quantized.graph.initializer if np.prod(i.dims) >= table.size] == [rows]
    assert op_counts(quantized)["DynamicQuantizeMatMul" if rules == "dynamic" else "MatMulNBits"] == 1
    feeds = {"i": np.arange(0, rows, 91)}
    assert sqnr(run(message, feeds)[0], run(quantized, feeds)[0]) > 35
    model = onnx_format.load(tmp_path / "q.onnx")
    model.save(tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "q.onnx").read_bytes()
    pairs = [op for op in model.main.ops() if op.kind == "dequantize"]
    assert len({model.main.slots(op.name)[0] for op in pairs}) == 1
    assert len(pairs) == (2 if rules == "dynamic" else 1)
    stripped = op_counts(onnx_format.emit(gq.strip(tmp_path / "q.onnx").model))
    assert stripped == {"Gather": 1} | ({"Gemm": 1} if product == "Gemm" else {"Transpose": 1, "MatMul": 1})


needs_folded_4 = pytest.mark.skipif(not supports_fused_form(FOLDED_4), reason="this release folds no weights of 4 bits")


@needs_folded_4
def test_folded_weights_of_4_bits_need_their_cast(tmp_path: Path) -> None:
    """Below opset 21 a size budget offers no 4 bits for folded weights, which no runtime could load."""
    table = np.random.default_rng(0).normal(size=(300, 64)).astype(np.float32)
    message = parse("y = Gather(t, i)", "int64[n] i", "float[n, 64] y", {"t": table})
    for opset, smallest in ((17, 300 * 64), (21, 300 * 32)):
        message.opset_import[0].version = opset
        onnx.save(message, tmp_path / "m.onnx")
        with pytest.raises(UsageError) as error:
            gq.insert(tmp_path / "m.onnx", rules=["dynamic"], size_budget="1%", validate=False)
        assert f"at least {smallest + 4 * 300:,} bytes" in str(error.value)


@needs_folded_4
@pytest.mark.parametrize(("sizes", "op_type"), [("n", "MatMulNBits"), ("n, 1", "MatMulNBits"), ("n, 2", "MatMul")])
def test_int4_products_of_several_rows_are_folded(tmp_path: Path, sizes: str, op_type: str) -> None:
    """A product that always has two rows or more is as fast as in float only if its weight is folded."""
    weights = {"w": np.random.default_rng(0).normal(size=(1536, 1536)).astype(np.float32)}
    onnx.save(
        parse("y = MatMul(x, w)", f"float[{sizes}, 1536] x", f"float[{sizes}, 1536] y", weights), tmp_path / "m.onnx"
    )
    message = onnx_format.emit(gq.insert(tmp_path / "m.onnx", rules=["weight_only_int4"], validate=False).model)
    assert op_counts(message)[op_type] == 1


@needs_folded_4
@pytest.mark.parametrize(("columns", "block"), [(128, 32), (100, 25), (97, 25)])
def test_zero_points_of_folded_blocks_are_integers(tmp_path: Path, columns: int, block: int) -> None:
    """A block of 32 takes 16 bytes, a scale and half a byte, and comes back as the pair that it was.

    Blocks of another number of columns are equal, so that the last one needs few zeros.
    """
    weights = {"w": np.random.default_rng(0).normal(size=(columns, 256)).astype(np.float32)}
    message = parse("y = MatMul(x, w)", f"float[n, {columns}] x", "float[n, 256] y", weights)
    onnx.save(message, tmp_path / "m.onnx")
    result = gq.insert(tmp_path / "m.onnx", rules=["weight_only_int4"], validate=False)
    quantized = onnx.load(result.save(tmp_path / "q.onnx"))
    zero_points = {i.data_type for i in quantized.graph.initializer if np.prod(i.dims) == 4 * 256}
    assert zero_points == {onnx.TensorProto.FLOAT, onnx.TensorProto.UINT4}  # of the scales and the zero points
    pair = next(op for op in onnx_format.load(tmp_path / "q.onnx").main.ops() if op.kind == "dequantize")
    assert pair.attrs == {"axis": 0, "block_size": block}
    feeds = {"x": np.random.default_rng(1).normal(size=(8, columns)).astype(np.float32)}
    stripped = onnx_format.emit(gq.strip(tmp_path / "q.onnx").model)
    np.testing.assert_allclose(run(quantized, feeds)[0], run(stripped, feeds)[0], atol=1e-5)
    assert sqnr(run(message, feeds)[0], run(quantized, feeds)[0]) > 18


@needs_folded_4
@pytest.mark.parametrize(("width", "op_type"), [(32, "Gather"), (1536, "GatherBlockQuantized")])
def test_int4_tables_are_folded(tmp_path: Path, width: int, op_type: str) -> None:
    """ONNX Runtime computes the rows of a table when it loads the model, unless a large product takes longer anyway."""
    dice = np.random.default_rng(0)
    weights = {
        "t": dice.normal(size=(1024, 32)),
        "w": dice.normal(size=(32, width)),
        "v": dice.normal(size=(width, width)),
    }
    message = parse(
        "e = Gather(t, i) f = MatMul(e, w) y = MatMul(f, v)",
        "int64[n] i",
        f"float[n, {width}] y",
        {name: value.astype(np.float32) for name, value in weights.items()},
    )
    onnx.save(message, tmp_path / "m.onnx")
    quantized = onnx_format.emit(gq.insert(tmp_path / "m.onnx", rules=["tables_int4"], validate=False).model)
    assert op_counts(quantized)[op_type] == 1
    feeds = {"i": np.arange(512)}
    assert sqnr(run(message, feeds)[0], run(quantized, feeds)[0]) > 18


@needs_folded_4
@pytest.mark.parametrize("rules", ["weight_only_int8", "weight_only_int4"])
@pytest.mark.parametrize("columns", [1, 40, 200])
def test_tables_of_any_width_are_stored_once(tmp_path: Path, rules: str, columns: int) -> None:
    """A table that a product reads transposed takes a byte for each value, whatever its number of columns."""
    weights = {"t": np.random.default_rng(0).normal(size=(600, columns)).astype(np.float32)}
    body = "r = Gather(t, i) k = Transpose<perm = [1, 0]>(t) y = MatMul(r, k)"
    onnx.save(parse(body, "int64[n] i", "float[n, 600] y", weights), tmp_path / "m.onnx")
    quantized = gq.insert(tmp_path / "m.onnx", rules=[rules], validate=False)
    stored = onnx.load(quantized.save(tmp_path / "q.onnx")).graph.initializer
    assert sum(i.data_type in {onnx.TensorProto.INT8, onnx.TensorProto.UINT8} and len(i.dims) > 1 for i in stored) == 1

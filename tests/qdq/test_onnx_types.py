"""Each data type and granularity in written ONNX models: checked, run by onnxruntime bit for bit, and read back."""

import itertools
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.measurements import float_bits
from support.onnx_models import onnx_session, run_onnx
from support.pairwise import cover_pairs
from support.rule_files import rule_text, write_rules

import graphquant as gq
from graphquant.analysis.model_summary import summarize_model
from graphquant.errors import ModelError
from graphquant.formats.onnx.runtime import RUNTIME_ERRORS
from graphquant.numerics import FloatType, IntType, QParams, dequantize, parse_type, quantize
from graphquant.numerics.affine import FLOAT8_NAMES
from graphquant.quantize import SkipCode

INTEGERS = tuple(f"{sign}int{bits}" for bits, sign in itertools.product((2, 3, 4, 5, 6, 7, 8, 12, 16), ("", "u")))
QUICK = ("int4", "uint16", "float8_e4m3fn")
TYPES = [pytest.param(dtype, marks=() if dtype in QUICK else pytest.mark.slow) for dtype in (*INTEGERS, *FLOAT8_NAMES)]
"""All of them, most when there is time."""

GRANULARITIES = ("tensor", "channel", "block")
SHAPE = (7, 70)
"""Odd, so that 4 bits are padded, and no whole number of blocks."""

LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL")

RULES = """
description = "one tensor"
[scheme.one]
dtype = "{dtype}"
per = "{per}"
{more}
[[rule]]
name = "one"
{where}
quantize = "one"
"""

WEIGHT = 'producer = { kind = "parameter" }\nconsumer = { kind = "add" }'
ACTIVATION = 'consumer = { name = "out" }'


def uneven_weights(seed: int = 0) -> np.ndarray:
    """Return float32 noise whose rows and columns differ in magnitude, with ties, signed zeros and denormals."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=SHAPE) * np.exp(rng.normal(size=(1, SHAPE[1]))) * np.exp(rng.normal(size=(SHAPE[0], 1)))
    weights[0, :8] = [0.0, -0.0, 1e-40, -1e-40, 0.5, -0.5, 1.5, 2.5]
    weights[:, 9] = 0.0
    return weights.astype(np.float32)


def save_sum_model(folder: Path, opset: int) -> Path:
    """Write a model out = Identity(x + weight)."""
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "weight"], ["sum"]), helper.make_node("Identity", ["sum"], ["y"], name="out")],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, SHAPE)],
        [numpy_helper.from_array(uneven_weights(), "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    known_versions = helper.OP_SET_ID_VERSION_MAP  # those of the installed onnx, which may be older than the opset
    model.ir_version = known_versions.get(("ai.onnx", opset), model.ir_version)
    path = folder / f"model_{opset}.onnx"
    onnx.save(model, path)
    return path


def is_loadable(path: Path) -> bool:
    """Return whether the installed onnxruntime knows the opset and the IR version of a model."""
    try:
        onnx_session(path)
    except RUNTIME_ERRORS:
        return False
    return True


def weight_rules(folder: Path, dtype: str, per: str, where: str, more: str = "") -> list[str]:
    """Write a rule file with one scheme."""
    more += "\naxis = 1" if per != "tensor" else ""
    more += "\nblock_size = 16" if per == "block" else ""
    return write_rules(folder, RULES.format(dtype=dtype, per=per, more=more, where=where))


def outputs_at_each_level(path: Path, x: np.ndarray, levels: tuple[str, ...] = LEVELS) -> list[np.ndarray]:
    """Check the file, and return its output at each optimization level."""
    onnx.checker.check_model(onnx.load(path), full_check=True)
    return [run_onnx(path, {"x": x}, level)[0] for level in levels]


def forms(dtype: str) -> list[str]:
    """Return the options that a scheme of that type can have."""
    power_of_two_options = ["", 'scale = "power-of-two"']
    return (
        power_of_two_options
        if dtype in FLOAT8_NAMES
        else [*power_of_two_options, 'zero = "asymmetric"', "narrow = true"]
    )


@pytest.mark.parametrize("per", GRANULARITIES)
@pytest.mark.parametrize("dtype", TYPES)
def test_weights(tmp_path: Path, dtype: str, per: str) -> None:
    """A weight as integers, or float with a Q/DQ pair, has equal values in onnxruntime and numpy, and is read back."""
    x = np.full(SHAPE, -0.0, np.float32)  # which leaves the weight as it is when it is added
    for opset, more, float_weights in cover_pairs(itertools.product((13, 21), forms(dtype), (False, True))):
        result = gq.insert(
            save_sum_model(tmp_path, opset),
            rules=weight_rules(tmp_path, dtype, per, WEIGHT, more),
            float_weights=float_weights,
        )
        (inserted_site,) = result.inserted
        assert isinstance(inserted_site.params, QParams)
        assert (inserted_site.folded, inserted_site.params.type) == (not float_weights, parse_type(dtype))
        path = result.save(tmp_path / "made.onnx", force=True)
        expected = dequantize(quantize(uneven_weights(), inserted_site.params), inserted_site.params)
        for actual in outputs_at_each_level(path, x):
            np.testing.assert_array_equal(
                float_bits(actual), float_bits(expected), err_msg=f"{opset} {more} {float_weights}"
            )
        _is_read_back(path, inserted_site.params, parameter=True, folded=not float_weights)
        _has_form(onnx.load(path), inserted_site.params, opset, folded=not float_weights)


@pytest.mark.parametrize("per", ["tensor", "channel"])
@pytest.mark.parametrize("dtype", TYPES)
def test_activations(tmp_path: Path, dtype: str, per: str) -> None:
    """Activations have the same values in onnxruntime and numpy, also far beyond the range, and are read back."""
    np.savez(tmp_path / "data.npz", x=uneven_weights(1)[None])
    x = uneven_weights(2) * 3
    x[1, :6] = [3e38, -3e38, np.inf, -np.inf, 1e10, -1e10]
    for opset, more in itertools.product((13, 21), forms(dtype)):
        data = str(tmp_path / "data.npz")
        result = gq.insert(
            save_sum_model(tmp_path, opset),
            rules=weight_rules(tmp_path, dtype, per, ACTIVATION, more),
            data=data,
            validate=False,
        )
        (inserted_site,) = result.inserted
        assert isinstance(inserted_site.params, QParams)
        path = result.save(tmp_path / "made.onnx", force=True)
        expected = dequantize(quantize(x + uneven_weights(), inserted_site.params), inserted_site.params)
        for actual in outputs_at_each_level(path, x):
            np.testing.assert_array_equal(float_bits(actual), float_bits(expected), err_msg=f"{opset} {more}")
        _is_read_back(path, inserted_site.params, parameter=False)
        _has_form(onnx.load(path), inserted_site.params, opset, folded=False, parameter=False)


def _is_read_back(path: Path, params: QParams, *, parameter: bool, folded: bool = True) -> None:
    """Check that `inspect` finds the site with its scale and width, or container for blocks and float weights."""
    model = gq.load(path)
    (reading,) = summarize_model(model).quantization_ops
    actual = reading.params
    assert isinstance(actual, QParams)
    container = _expected_container(params, parameter=parameter)
    assert actual.type.name == (params.type.name if params.block is None and folded else container)
    np.testing.assert_array_equal(actual.scale, params.scale)
    np.testing.assert_array_equal(actual.zero_point, params.zero_point)
    assert (actual.axis, actual.block) == (params.axis, params.block)
    plan = gq.plan(model, rules=["weight_only"])
    assert not plan.sites


def _has_form(model: onnx.ModelProto, params: QParams, opset: int, *, folded: bool, parameter: bool = True) -> None:
    """Check that the opset is minimal, and that domains and constants have the right types."""
    kind, now = params.type, {item.domain: item.version for item in model.opset_import}
    held_in = _expected_container(params, parameter=parameter)
    has_4_or_16_bits = isinstance(kind, IntType) and held_in not in {"int8", "uint8"}
    needed = 21 if params.block is not None else 19 if isinstance(kind, FloatType) else 13
    assert now == {
        "": max(opset, needed),
        **({"com.microsoft": 1} if has_4_or_16_bits and max(opset, needed) < 21 else {}),
    }
    ops = [node for node in model.graph.node if node.op_type in {"QuantizeLinear", "DequantizeLinear"}]
    assert [node.op_type for node in ops] == ["DequantizeLinear"] if folded else ["QuantizeLinear", "DequantizeLinear"]
    assert all(node.domain == ("com.microsoft" if "com.microsoft" in now else "") for node in ops)
    code = helper.np_dtype_to_tensor_dtype(numpy_helper.to_array(_initializer(model, ops[0].input[2])).dtype)
    assert TensorProto.DataType.Name(code).lower() == kind.container.replace("_", "") or isinstance(kind, IntType)
    if folded:
        initializer = _initializer(model, ops[0].input[0])
        count = int(np.prod(SHAPE))
        width = 4 if kind.container in {"int4", "uint4"} else 16 if "16" in kind.container else 8
        assert (initializer.data_type, len(initializer.raw_data)) == (code, (count * width + 7) // 8)


def _expected_container(params: QParams, *, parameter: bool) -> str:
    """Return the container of the values, which has at least 8 bits for activations."""
    container = params.type.container
    return container if parameter else {"int4": "int8", "uint4": "uint8"}.get(container, container)


def _initializer(model: onnx.ModelProto, name: str) -> TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def test_opset_8_is_not_raised(tmp_path: Path) -> None:
    """16 bits use onnxruntime's domain, without an upgrade, in any model whose Max and Min broadcast."""
    result = gq.insert(save_sum_model(tmp_path, 8), rules=weight_rules(tmp_path, "int12", "channel", WEIGHT))
    path = result.save(tmp_path / "made.onnx")
    assert {item.domain: item.version for item in onnx.load(path).opset_import} == {"": 8, "com.microsoft": 1}
    expected = dequantize(quantize(uneven_weights(), result.inserted[0].params), result.inserted[0].params)
    for actual in outputs_at_each_level(path, np.full(SHAPE, -0.0, np.float32)):
        np.testing.assert_array_equal(float_bits(actual), float_bits(expected))


@pytest.mark.parametrize(
    ("dtype", "per", "folded", "float_weights"),
    [
        ("int8", "tensor", 10, 10),
        ("uint6", "tensor", 10, 10),
        ("int8", "channel", 13, 13),
        ("int4", "channel", 8, 8),
        ("uint16", "tensor", 8, 8),
        ("float8_e5m2", "tensor", 19, 19),
        ("int4", "block", 21, 21),
        ("int8", "block", 21, 21),
    ],
)
def test_opset_is_raised_only_as_needed(dtype: str, per: str, folded: int, float_weights: int, tmp_path: Path) -> None:
    """Models get the lowest opset that has the ops, keep a higher one, and give the same values."""
    opsets = (8, 9, 11, 12, 13, 15, 18, 20, 21, 22, 24)
    for opset, floats, level in cover_pairs(itertools.product(opsets, (False, True), LEVELS)):
        where = weight_rules(tmp_path, dtype, per, WEIGHT)
        source = save_sum_model(tmp_path, opset)
        if opset > 21 and not is_loadable(source):
            continue
        result = gq.insert(source, rules=where, float_weights=floats)
        path = result.save(tmp_path / "made.onnx", force=True)
        now = {item.domain: item.version for item in onnx.load(path).opset_import}
        assert now[""] == max(opset, float_weights if floats else folded), (opset, floats)
        assert ("com.microsoft" in now) == (dtype in {"int4", "uint16"} and now[""] < 21)
        expected = dequantize(quantize(uneven_weights(), result.inserted[0].params), result.inserted[0].params)
        (actual,) = outputs_at_each_level(path, np.full(SHAPE, -0.0, np.float32), (level,))
        np.testing.assert_array_equal(float_bits(actual), float_bits(expected), err_msg=f"{opset} {floats} {level}")


@pytest.mark.parametrize("dtype", ["int8", "uint4", "int16"])
def test_opset_without_kernels(tmp_path: Path, dtype: str) -> None:
    """At opset 28, whose pair no onnxruntime implements, the pair is in onnxruntime's domain, and is read back."""
    result = gq.insert(save_sum_model(tmp_path, 28), rules=weight_rules(tmp_path, dtype, "channel", WEIGHT))
    path = result.save(tmp_path / "out.onnx")
    (node,) = (node for node in onnx.load(path).graph.node if node.op_type == "DequantizeLinear")
    assert node.domain == "com.microsoft"
    _is_read_back(path, result.inserted[0].params, parameter=True)
    assert [op.op for op in gq.strip(path).ops] == [node.name]


@pytest.mark.parametrize(
    ("target", "dtype", "opset", "domain"),
    [
        ("openvino", "int8", 21, "com.microsoft"),
        ("onnxruntime", "int8", 21, "com.microsoft"),
        ("openvino", "int8", 20, ""),
        ("openvino", "uint8", 21, ""),
        ("tensorrt", "int8", 21, ""),
    ],
)
def test_int8_before_a_transpose(tmp_path: Path, target: str, dtype: str, opset: int, domain: str) -> None:
    """From opset 21 on, int8 activations use the domain whose pairs onnxruntime moves past a Transpose."""
    text = f"""<ir_version: 8, opset_import: ["": {opset}]> g (float[4, 4] x) => (float[4, 4] y) {{
        a = Relu(x) t = Transpose<perm = [1, 0]>(a) y = MatMul(a, t) }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).normal(size=(8, 4, 4)).astype(np.float32))
    scheme = f'target = "{target}"\n[scheme.q]\ndtype = "{dtype}"\nobserve = "minmax"\n'
    rules = write_rules(tmp_path, scheme + rule_text(producer='{ kind = "relu" }'))
    result = gq.insert(tmp_path / "net.onnx", rules=rules, data=str(tmp_path / "data.npz"))
    nodes = onnx.load(result.save(tmp_path / "out.onnx")).graph.node
    assert {node.domain for node in nodes if node.op_type.endswith("Linear")} == {domain}
    if target != "tensorrt":
        assert (result.unjudged_reason, is_loadable(tmp_path / "out.onnx")) == ("", True)


@pytest.mark.parametrize(("dtype", "per"), [("int8", "block"), ("float8_e4m3fn", "tensor")])
def test_types_without_ops_at_opset_28(tmp_path: Path, dtype: str, per: str) -> None:
    """Onnxruntime's domain has neither blocks nor float8, so such sites are skipped."""
    plan = gq.plan(save_sum_model(tmp_path, 28), rules=weight_rules(tmp_path, dtype, per, WEIGHT))
    assert (plan.sites, [skip.tensor.op for skip in plan.skips]) == ((), ["weight"])


def test_blocks_of_activations_are_refused(tmp_path: Path) -> None:
    """There are no statistics per block, and the skip names an alternative."""
    plan = gq.plan(save_sum_model(tmp_path, 21), rules=weight_rules(tmp_path, "int8", "block", ACTIVATION))
    assert not plan.sites
    assert plan.skips[0].code is SkipCode.SCHEME
    assert "blocks" in plan.skips[0].reason
    assert 'per = "tensor"' in plan.skips[0].reason


def test_a_given_range_spreads_over_blocks(tmp_path: Path) -> None:
    """A fixed range applies to each block."""
    where = weight_rules(tmp_path, "int4", "block", WEIGHT, 'observe = { name = "fixed", low = -2.0, high = 2.0 }')
    (inserted_site,) = gq.insert(save_sum_model(tmp_path, 21), rules=where).inserted
    assert inserted_site.params.scale.shape == (7, 5)
    assert (inserted_site.params.scale == np.float32(2 / 7)).all()


def test_a_damaged_block_size_is_not_read(tmp_path: Path) -> None:
    """Scales that do not fit rank or axis give unknown params."""
    path = gq.insert(save_sum_model(tmp_path, 21), rules=weight_rules(tmp_path, "int4", "block", WEIGHT)).save(
        tmp_path / "made.onnx"
    )
    good = onnx.load(path)
    for name, value in (("axis", 9), ("axis", -9), ("block_size", -3), ("block_size", 0)):
        model = onnx.ModelProto()
        model.CopyFrom(good)
        node = next(node for node in model.graph.node if node.op_type == "DequantizeLinear")
        next(attr for attr in node.attribute if attr.name == name).i = value
        onnx.save(model, tmp_path / "bad.onnx")
        try:
            (reading,) = summarize_model(gq.load(tmp_path / "bad.onnx")).quantization_ops
        except ModelError:
            continue
        assert reading.params is None, (name, value)


def test_a_vector_of_one_block(tmp_path: Path) -> None:
    """A vector of one block gets one scale per tensor, since onnxruntime rejects a block size with a single scale."""
    weight = np.array([-0.9, 0.3], np.float32)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "weight"], ["y"])],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
        [numpy_helper.from_array(weight, "weight")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "v.onnx")
    where = weight_rules(tmp_path, "int4", "block", WEIGHT)
    Path(where[0]).write_text(Path(where[0]).read_text().replace("axis = 1", "axis = 0"))
    path = gq.insert(tmp_path / "v.onnx", rules=where).save(tmp_path / "made.onnx")
    for actual in outputs_at_each_level(path, np.zeros(2, np.float32)):
        np.testing.assert_array_equal(actual, np.float32([-8, 3]) * np.float32(np.float32(0.9) / 8))

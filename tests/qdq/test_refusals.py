"""Unsupported requests in rules, plans and on tensors raise errors with a remedy, and nothing is written."""

import json
import re

import numpy as np
import pytest
from support.rule_files import write_rules

import graphquant as gq
from graphquant.errors import RuleError, UsageError
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.values import encode_tensor, type_number
from graphquant.quantize import SkipCode, plan_to_json

RULES = """
[scheme.s]
{scheme}
[[rule]]
name = "all"
consumer = {{ kind = "conv|matmul", input = "{role}" }}
quantize = "s"
"""
V2, V3, V4 = (f'family = "quantize-and-dequantize-v{version}"\n' for version in (2, 3, 4))
FAKE = 'family = "fake-quant"\n'
FIXED = 'observe = {name = "fixed", low = -1.0, high = 1.0}\n'
CHANNEL = 'per = "channel"\nobserve = "absmax"\n'


def write_product_graph(path, dtype="float32", *, rank=2):
    """Write a frozen graph of one matrix product, batched if its weight has three axes."""
    graph = proto.GraphDef()
    x = graph.node.add(name="x", op="Placeholder")
    x.attr["dtype"].type = type_number(dtype)
    w = graph.node.add(name="w", op="Const")
    w.attr["dtype"].type = type_number(dtype)
    shape = (2,) * (rank - 2) + (3, 4)
    value = np.linspace(-1, 1, int(np.prod(shape))).reshape(shape).astype(dtype)
    w.attr["value"].tensor.CopyFrom(encode_tensor(value))
    y = graph.node.add(name="y", op="MatMul" if rank == 2 else "BatchMatMulV2", input=["x", "w"])
    y.attr["T"].type = type_number(dtype)
    path.write_bytes(proto.to_binary(graph))
    return path


def scheme_rules(tmp_path, scheme, role):
    """Write a rule file."""
    return write_rules(tmp_path, RULES.format(scheme=scheme, role=role))


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        (V2 + CHANNEL, "the family quantize-and-dequantize-v3"),
        (V4 + CHANNEL, "the family quantize-and-dequantize-v3"),
        (FAKE + FIXED + "bits = 17", "has 2 to 16 bits"),
        (V4 + 'range = "dynamic"\nargs = {input_min = 1.0, input_max = -1.0}', "'input_min' 1.0 is above 'input_max'"),
        (V2 + 'observe = {name = "fixed", low = 5.0, high = -10.0}', "'low' .*'high'"),
        (V2 + 'zero = "asymmetric"', 'zero = "symmetric", .*fake-quant'),
        (V3 + 'round = "half-up"', "quantize-and-dequantize-v2 or -v4"),
        (V3 + "args = {input_min = 1.0}", "has no 'input_min'"),
        (FAKE + 'bits = 17\nround = "half-up"', "has 2 to 16 bits"),
        (FAKE + "bits = 1", "at least 2"),
        (FAKE + 'range = "dynamic"', "the family quantize-and-dequantize-v2, -v3 or -v4"),
        (FAKE + 'range = "given"', 'zero = "asymmetric"'),
        (
            FAKE + 'range = "given"\nzero = "asymmetric"\nscale = "power-of-two"',
            "needs range 'observed'",
        ),
        (FAKE + 'range = "learned"\nargs = {form = "args"}', 'form = "vars" .*learned'),
        (FAKE + 'round = "half-even"', "the family quantize-and-dequantize-v2"),
        (FAKE + 'per = "channel"\nargs = {form = "args"}', 'form = "vars" per channel'),
        ('family = "onnx-qdq"\nrange = "learned"', "omit 'range'"),
    ],
)
def test_rules(tmp_path, cli, scheme: str, said: str) -> None:
    """An unsupported scheme is a mistake in the rule file, with its line."""
    path, out = write_product_graph(tmp_path / "net.pb"), tmp_path / "out.pb"
    with pytest.raises(RuleError) as error:
        gq.insert(path, rules=scheme_rules(tmp_path, scheme, "weight"))
    assert re.search(said, str(error.value))
    assert "rules.toml:" in str(error.value)
    cli("insert", path, "--rules", scheme_rules(tmp_path, scheme, "weight")[0], "-o", out, code=2)
    assert not out.exists()


@pytest.mark.parametrize(
    ("scheme", "role", "dtype", "rank", "said"),
    [
        (FAKE + FIXED, "input", "float64", 2, "FakeQuant takes float32,.* float64"),
    ],
)
def test_tensors(tmp_path, cli, scheme: str, role: str, dtype: str, rank: int, said: str) -> None:
    """A reason that depends on the tensor is that of its skip, and the model does not change."""
    path, out = write_product_graph(tmp_path / "net.pb", dtype, rank=rank), tmp_path / "out.pb"
    result = gq.insert(path, rules=scheme_rules(tmp_path, scheme, role), allow_empty=True)
    assert not result.inserted
    assert result.skips[0].code is SkipCode.SCHEME
    assert re.search(said, result.skips[0].reason)
    assert result.model is result.source
    run = cli("insert", path, "--rules", scheme_rules(tmp_path, scheme, role)[0], "-o", out, "--allow-empty")
    assert "0 tensors quantized" in run.output
    assert out.read_bytes() == path.read_bytes()


def test_the_last_axis_is_counted_from_the_front(tmp_path) -> None:
    """V3 never has a negative axis, which would end TensorFlow's process, also not for a batched product."""
    path = write_product_graph(tmp_path / "net.pb", rank=3)
    for scheme in (V3 + CHANNEL, V3 + 'range = "dynamic"\nper = "channel"', V2 + 'range = "dynamic"\nper = "channel"'):
        result = gq.insert(path, rules=scheme_rules(tmp_path, scheme, "weight"))
        (inserted_site,) = result.inserted
        assert result.model.main.op(inserted_site.output.op).attrs["axis"] == 2


def test_ranges_that_are_learned_along_an_inner_axis(tmp_path) -> None:
    """FakeQuant supports only the last axis. For another one, ranges are repeated and cannot be learned."""
    graph = proto.GraphDef.FromString(write_product_graph(tmp_path / "net.pb").read_bytes())
    graph.node[2].attr["transpose_b"].b = True
    (tmp_path / "net.pb").write_bytes(proto.to_binary(graph))
    for more, count in (("", 1), ('range = "learned"', 0)):
        result = gq.insert(
            tmp_path / "net.pb", rules=scheme_rules(tmp_path, FAKE + CHANNEL + more, "weight"), allow_empty=True
        )
        assert len(result.inserted) == count
    assert result.skips[0].code is SkipCode.SCHEME
    assert "last axis" in result.skips[0].reason


@pytest.mark.parametrize("source", ["given", "dynamic", "learned"])
def test_plans_have_the_range_source(tmp_path, source: str) -> None:
    """The range source survives JSON, and the plan gives the same bytes."""
    path = write_product_graph(tmp_path / "net.pb")
    result = gq.insert(path, rules=scheme_rules(tmp_path, V3 + FIXED + f'range = "{source}"', "input"))
    data = plan_to_json(result.plan)
    assert data["schemes"]["s"]["range"] == source
    (tmp_path / "plan.json").write_text(json.dumps(data))
    again = gq.insert(path, plan=tmp_path / "plan.json")
    saved_path, reloaded_path = result.save(tmp_path / "one.pb"), again.save(tmp_path / "other.pb")
    assert saved_path.read_bytes() == reloaded_path.read_bytes()


@pytest.mark.parametrize(
    ("scheme", "role", "changes", "said"),
    [
        (V3 + CHANNEL, "weight", {"axis": -1}, "no axis -1"),
        (V3 + CHANNEL, "weight", {"axis": 2}, "no axis 2"),
        (V3 + CHANNEL, "weight", {"scale": [0.5, 0.5]}, "it has 4 channels"),
        (V2 + FIXED, "input", {"range": [1.0, -1.0]}, r"\(low, high\)"),
        (V2 + FIXED, "input", {"range": [0.0, float("inf")]}, r"\(low, high\)"),
        (V2 + FIXED, "input", {"scale": [0.5], "zero_point": [3]}, "quantize-and-dequantize-v2 .*zero point"),
        (V3 + CHANNEL, "weight", {"family": "quantize-and-dequantize-v2"}, "the family quantize-and-dequantize-v3 or"),
        (V2 + FIXED, "input", {"family": "fake-quant", "bits": 17}, "2 to 16 bits"),
    ],
)
def test_edited_plans(tmp_path, cli, scheme: str, role: str, changes: dict, said: str) -> None:
    """A plan that was edited to an unsupported site raises an error."""
    path, out = write_product_graph(tmp_path / "net.pb"), tmp_path / "out.pb"
    data = plan_to_json(gq.plan(path, rules=scheme_rules(tmp_path, scheme, role)))
    for key, value in changes.items():
        target = data["schemes"]["s"] if key in {"family", "bits"} else data["sites"][0]
        target[key] = value
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(UsageError) as error:
        gq.insert(path, plan=tmp_path / "plan.json")
    assert re.search(said, str(error.value))
    cli("insert", path, "--plan", tmp_path / "plan.json", "-o", out, code=2)
    assert not out.exists()


@pytest.mark.parametrize(
    ("family", "bits", "dtype", "said"),
    [
        ("quantize-and-dequantize-v2", 8, "int32", "no CPU kernel for int32;.* float32"),
        ("fake-quant", 8, "float64", "FakeQuant takes float32"),
        ("onnx-qdq", 8, "float32", "'onnx-qdq' .*onnx"),
    ],
)
def test_the_recipe(tmp_path, family: str, bits: int, dtype: str, said: str) -> None:
    """insert_quant_op raises the same errors and changes nothing."""
    model = gq.load(write_product_graph(tmp_path / "net.pb", dtype))
    before = [op.name for op in model.main.ops()]
    with pytest.raises(UsageError) as error:
        gq.insert_quant_op(model, "x", "y", gq.FixedPoint(bits, -4, family=family))
    assert re.search(said, str(error.value))
    assert [op.name for op in model.main.ops()] == before

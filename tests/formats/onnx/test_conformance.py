"""Emitted QDQ ops against numpy, for every op of the ONNX table, each data type and granularity.

Each op comes from the case generator of the onnx package as a model of one node. All its float inputs are quantized, as
feeds and, in a second model, as initializers. The float model is fed with the inputs quantized by numpy. The outputs of
the emitted QDQ ops must have the same bits, and the outputs of the models must agree. onnxruntime runs both models
without its optimizer, which would replace float ops by integer ops. Ops without a kernel run in onnx's reference
evaluator.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import graphquant as gq
from graphquant.formats import onnx as format_
from graphquant.formats.onnx.ops import DEFAULT_DOMAIN_OPS
from graphquant.formats.onnx.reader import model_from_message
from graphquant.formats.onnx.runtime import RUNTIME_ERRORS
from graphquant.numerics import dequantize, quantize

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

pytestmark = pytest.mark.slow

TYPES = (
    *("int8", "uint8", "int16", "uint16", "int4", "uint4"),
    *("int2", "uint3", "int5", "uint6", "int7", "int12", "float8_e4m3fn", "float8_e5m2"),
)
GRANULARITIES = ("tensor", "channel", "block")

RULES = """
description = "every float input"
[scheme.any]
dtype = "{dtype}"
per = "{per}"
observe = {{ name = "fixed", low = -1.5, high = 2.5 }}
{more}
[[rule]]
name = "result"
consumer = {{ kind = "output" }}
quantize = "float"
[[rule]]
name = "sizes"
consumer = {{ kind = "*", input = "sizes|region|ratio|repeats|shape|axis|indices|count|lengths|padding" }}
quantize = "float"
[[rule]]
name = "any"
consumer = {{ name = "*" }}
quantize = "any"
"""

NOTHING_TO_QUANTIZE = frozenset(
    {
        *("Constant", "RandomNormal", "RandomUniform"),  # they have no inputs
        *("If", "Loop", "Scan", "SequenceMap"),  # their ops are in bodies and tested separately
        *("QuantizeLinear", "DequantizeLinear"),  # they are quantized already
        *("RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"),  # no cases, or another result each time
    }
)


NEWEST_OPSET = 25
"""Newest opset of the cases. Cases of onnx are of its newest opset, which onnxruntime may not know."""


REFERENCE_ONLY_OPS = frozenset({"DepthToSpace", "SpaceToDepth"})
"""Ops whose cases onnxruntime 1.31 does not run."""


RUNTIME_OPS = frozenset({"SimplifiedLayerNormalization"})
"""Ops that ONNX Runtime adds to the default domain. onnx's checker rejects them; tests of decoders run them."""


@dataclass(frozen=True)
class Case:
    """A model of one node, with one feed."""

    message: Any
    feeds: Mapping[str, Any]


def _run_case(message: Any, feeds: Mapping[str, Any]) -> tuple[list[Any], str]:
    """Return the outputs, and the name of the engine that computed them."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(message.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return session.run(None, dict(feeds)), "onnxruntime"
    except RUNTIME_ERRORS:
        with np.errstate(all="ignore"):
            return ReferenceEvaluator(message).run(None, dict(feeds)), "onnx.reference"


@cache
def _cases_by_op() -> dict[str, list[Case]]:
    """Return for each op type of the table a runnable model of one node with float32 inputs."""
    with warnings.catch_warnings(action="ignore"):
        from onnx.backend.test.case.node import collect_testcases

        test_cases = collect_testcases(None)
    cases: dict[str, list[Case]] = {}
    for case in test_cases:
        nodes = case.model.graph.node if case.model is not None else []
        if len(nodes) != 1 or nodes[0].op_type not in DEFAULT_DOMAIN_OPS or nodes[0].op_type in cases:
            continue
        names = [info.name for info in case.model.graph.input]
        named_values = zip(names, case.data_sets[0][0] if case.data_sets else (), strict=False)
        feeds = {name: np.asarray(value) for name, value in named_values if not isinstance(value, list)}
        floats = [name for name, value in feeds.items() if value.dtype == np.float32 and value.size]
        if len(feeds) == len(names) and floats:
            stored_names = [name for name in floats if name != names[0] or len(floats) == 1]
            op_case = Case(case.model, feeds)
            cases[nodes[0].op_type] = [op_case, _with_initializers(op_case, stored_names)]
    for name, case in _additional_cases():
        cases[name] = [case, _with_initializers(case, list(case.feeds)[-1:])]
    return cases


def _additional_cases() -> Iterator[tuple[str, Case]]:
    """Yield cases of ops for which onnx's generator has no float32 inputs."""
    specs: list[tuple[str, int, dict[str, Any]]] = [
        ("Cast", 1, {"to": onnx.TensorProto.DOUBLE}),
        ("CastLike", 2, {}),
        ("Einsum", 2, {"equation": "ij,kj->ik"}),
        ("Sum", 2, {}),
    ]
    for name, count, attrs in specs:
        names = ["a", "b"][:count]
        infos = [helper.make_tensor_value_info(input_name, onnx.TensorProto.FLOAT, (5, 5)) for input_name in names]
        output_info = helper.make_tensor_value_info("y", attrs.get("to", onnx.TensorProto.FLOAT), (5, 5))
        graph = helper.make_graph([helper.make_node(name, names, ["y"], **attrs)], "one", infos, [output_info])
        message = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        rng = np.random.default_rng(0)
        yield name, Case(message, {input_name: rng.normal(size=(5, 5)).astype(np.float32) for input_name in names})


def _with_initializers(case: Case, stored_names: list[str]) -> Case:
    """Return the case with the inputs `stored_names` as initializers."""
    message = onnx.ModelProto()
    message.CopyFrom(case.message)
    remaining_inputs = [info for info in message.graph.input if info.name not in stored_names]
    del message.graph.input[:]
    message.graph.input.extend(remaining_inputs)
    message.graph.initializer.extend(numpy_helper.from_array(case.feeds[name], name) for name in stored_names)
    return Case(message, {name: value for name, value in case.feeds.items() if name not in stored_names})


def _with_values(case: Case, values: Mapping[str, Any]) -> Case:
    """Return the case with other values of inputs or initializers."""
    message = onnx.ModelProto()
    message.CopyFrom(case.message)
    for tensor in message.graph.initializer:
        if tensor.name in values:
            tensor.CopyFrom(numpy_helper.from_array(values[tensor.name], tensor.name))
    return Case(message, {name: values.get(name, value) for name, value in case.feeds.items()})


def _input_value(case: Case, name: str) -> Any:
    stored = {tensor.name: tensor for tensor in case.message.graph.initializer}
    return numpy_helper.to_array(stored[name]) if name in stored else case.feeds[name]


def _rules(folder: Path, dtype: str, per: str) -> str:
    extra_fields = "axis = 0\n" if per != "tensor" else ""
    extra_fields += "block_size = 2\n" if per == "block" else ""
    path = folder / f"{dtype}_{per}.toml"
    path.write_text(RULES.format(dtype=dtype, per=per, more=extra_fields))
    return str(path)


def compare_case(case: Case, rules: str) -> str:
    """Assert that the results agree, and return the engine, or "" if there was nothing to quantize.

    The output of each site has the same bits. The op's result may differ in the last digits, because the order of sums
    in kernels depends on the memory address of their inputs.
    """
    for entry in case.message.opset_import:
        entry.version = min(entry.version, NEWEST_OPSET)
    model = model_from_message(case.message)
    result = gq.insert(model, rules=[rules], allow_empty=True)
    if not result.inserted:
        return ""
    message = format_.emit(result.model)
    onnx.checker.check_model(message, full_check=True)
    values = {}
    for insertion in result.inserted:
        name = insertion.site.tensor.op
        value = _input_value(case, name)
        values[name] = dequantize(quantize(value, insertion.params), insertion.params)
        info = helper.make_tensor_value_info(
            result.model.output(insertion.output).name, onnx.TensorProto.FLOAT, value.shape
        )
        message.graph.output.append(info)
    results, engine = _run_case(message, case.feeds)
    output_count = len(results) - len(values)
    for actual, expected in zip(results[output_count:], values.values(), strict=True):
        np.testing.assert_array_equal(np.asarray(actual).view(np.int32), expected.view(np.int32))
    quantized_case = _with_values(case, values)
    expected_outputs, _ = _run_case(_raise_opset(quantized_case.message, message), quantized_case.feeds)
    for expected_output, actual_output in zip(expected_outputs, results[:output_count], strict=True):
        np.testing.assert_allclose(np.asarray(actual_output), np.asarray(expected_output), rtol=1e-5, atol=1e-6)
    return engine


def _raise_opset(message: Any, emitted: Any) -> Any:
    """Raise the opset of a message to that of the emitted one, and return it."""
    opset = next(entry.version for entry in emitted.opset_import if entry.domain == "")
    for entry in message.opset_import:
        if entry.domain == "" and entry.version < opset:
            entry.version = opset
    return message


@pytest.mark.parametrize("dtype", TYPES)
def test_every_op_of_the_table(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each op and granularity, the emitted ops match numpy, and the engine is as expected."""
    # With its optimizer, onnxruntime rejects some pairs of float8.
    monkeypatch.setattr("graphquant.api.insert.check_runtime_accepts", lambda *_, **__: "")
    cases = _cases_by_op()
    table = sorted(set(DEFAULT_DOMAIN_OPS) - NOTHING_TO_QUANTIZE - RUNTIME_OPS)
    assert [name for name in table if name not in cases] == []
    ran: dict[str, set[str]] = {}
    for per in GRANULARITIES:
        rules = _rules(tmp_path, dtype, per)
        for name in table:
            for case in cases[name][per == "block" :]:  # blocks are for weights
                ran.setdefault(compare_case(case, rules), set()).add(name)
    assert ran.pop("onnxruntime") | ran["onnx.reference"] == set(table)
    assert ran.pop("onnx.reference") == REFERENCE_ONLY_OPS
    assert ran == {"": {"Clip", "Pad", "Resize", "Upsample"}}  # their floats are one number each, and have no blocks

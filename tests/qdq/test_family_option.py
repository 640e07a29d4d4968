"""`--family` and `--range-source` apply TensorFlow's ops to the tensors of the shipped rule files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.rule_files import write_int4_rules

import graphquant as gq
from graphquant.errors import RuleError, UsageError
from graphquant.quantize.plan import SkipCode

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLES = Path(__file__).parents[2] / "sample_models"
MODEL, DATA = SAMPLES / "digits_cnn.pb", SAMPLES / "digits_cnn_calib.npz"
QAD_FAMILIES = ("quantize-and-dequantize-v2", "quantize-and-dequantize-v3", "quantize-and-dequantize-v4")
RULE_FILES = (
    *("tflite", "onnxruntime", "openvino", "qnn", "qnn16", "tensorrt", "vitis_ai", "generic", "fixed_point"),
    *("weight_only", "weight_only_int8", "weight_only_int4"),
)


@pytest.fixture(scope="module")
def model() -> gq.Model:
    """Return the sample model, loaded once."""
    return gq.load(MODEL)


@pytest.mark.parametrize("rules", RULE_FILES)
@pytest.mark.parametrize("family", QAD_FAMILIES)
def test_each_source_of_ranges_covers_the_same_uses(model: gq.Model, rules: str, family: str) -> None:
    """All tensors of the rule file are quantized, or move values that are quantized already."""
    expected = {use for site in gq.plan(model, rules=[rules], family=family).sites for use in site.uses}
    for source in ("given", "dynamic", "learned"):
        plan = gq.plan(model, rules=[rules], family=family, range_source=source)
        moved = {use for skip in plan.skips if skip.code is SkipCode.QUANTIZED for use in skip.uses}
        assert {use for site in plan.sites for use in site.uses} | moved == expected
        assert not [skip for skip in plan.skips if skip.code is SkipCode.SCHEME]
        has_fixed_scales = rules in {"fixed_point", "vitis_ai"}
        assert {site.scheme.range for site in plan.sites} == {"observed" if has_fixed_scales else source}


def test_blocks_become_channels(model: gq.Model, tmp_path: Path) -> None:
    """A family that has scales per channel gets one for each channel of a matrix product in blocks."""
    plan = gq.plan(model, rules=[write_int4_rules(tmp_path)], family="quantize-and-dequantize-v3")
    assert {(site.scheme.per, site.scheme.type.name) for site in plan.sites} == {
        ("channel", "int4"),
        ("channel", "int8"),
    }


def test_fake_quant_keeps_what_it_cannot_replace(model: gq.Model) -> None:
    """A symmetric scheme keeps its observed range, because FakeQuant would move the zero point of a given one."""
    plan = gq.plan(model, rules=["tflite"], family="fake-quant", range_source="given")
    assert {(site.scheme.zero, site.scheme.range) for site in plan.sites} == {
        ("symmetric", "observed"),
        ("asymmetric", "given"),
    }


def test_impossible_sources_end_before_any_work(cli: Callable[..., Any], tmp_path: Path) -> None:
    """FakeQuant has no dynamic range, and ONNX models have only observed ones: exit code 2, and no file."""
    output = tmp_path / "out.pb"
    cli("insert", MODEL, "--range-source", "dynamic", "-o", output, code=2)
    assert not output.exists()
    with pytest.raises(UsageError):
        gq.plan(SAMPLES / "digits_cnn.onnx", range_source="given")
    cli("insert", MODEL, "--plan", tmp_path / "plan.json", "--range-source", "given", code=2)


@pytest.mark.parametrize("family", ["quantize-and-dequantize-v2", "quantize-and-dequantize-v4"])
@pytest.mark.parametrize("source", ["observed", "given", "learned"])
def test_a_rule_with_an_axis_that_the_kernel_lacks(model: gq.Model, family: str, source: str) -> None:
    """A scheme that names the family and asks for a range per channel is an error of the rule file."""
    rules = f"""
[scheme.weight]
family = "{family}"
per = "channel"
range = "{source}"
[[rule]]
name = "weights"
consumer = {{ kind = "conv", input = "weight" }}
quantize = "weight"
"""
    with pytest.raises(RuleError):
        gq.plan(model, rules=rules)


@pytest.mark.slow
@pytest.mark.parametrize("family", QAD_FAMILIES)
@pytest.mark.parametrize("source", ["observed", "given", "dynamic", "learned"])
def test_values_are_those_of_the_op(cli: Callable[..., Any], tmp_path: Path, family: str, source: str) -> None:
    """The image and a weight of the written model equal TensorFlow's op with the range of the data."""
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    tf = pytest.importorskip("tensorflow")
    output = tmp_path / "out.pb"
    data = () if source == "dynamic" else ("--data", DATA, "--method", "minmax", "--no-validate")
    cli("insert", MODEL, "--rules", "generic", "--family", family, "--range-source", source, *data, "-o", output)
    calibrated = np.load(DATA)["image"]
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        definition = tf.compat.v1.GraphDef.FromString(output.read_bytes())
        tf.import_graph_def(definition, name="")
        if source == "learned":
            session.run("init_learned_ranges")
        op_type = f"QuantizeAndDequantizeV{family[-1]}"
        ops = [op for op in graph.get_operations() if op.type == op_type]
        (image_op,) = [op for op in ops if op.inputs[0].name == "image:0"]
        (weight_op,) = [op for op in ops if op.inputs[0].name == "stem/conv/ReadVariableOp:0"]
        image, weight = session.run(["image:0", weight_op.inputs[0]], {"image:0": calibrated[:9] * 1.25})
        quantized = session.run([image_op.outputs[0], weight_op.outputs[0]], {"image:0": calibrated[:9] * 1.25})

    def expected(values: Any, observed: Any, *, axis: int | None, narrow: bool) -> Any:
        if source == "dynamic":
            low = high = 0.0
            observed = None
        else:
            largest = np.abs(observed).max(axis=None if axis is None else tuple(range(observed.ndim - 1)))
            low, high = (-largest, largest) if narrow or source == "given" else (-largest * 128 / 127, largest)
        return tf.raw_ops.QuantizeAndDequantizeV3(
            input=values,
            input_min=np.float32(low),
            input_max=np.float32(high),
            num_bits=8,
            range_given=observed is not None,
            narrow_range=narrow,
            axis=-1 if axis is None else axis,
        )

    axis = 3 if source == "dynamic" or family.endswith("v3") else None
    for values, observed, actual, keywords in (
        (image, calibrated, quantized[0], {"axis": None, "narrow": False}),
        (weight, weight, quantized[1], {"axis": axis, "narrow": True}),
    ):
        np.testing.assert_allclose(actual, expected(values, observed, **keywords), rtol=1e-6, atol=1e-7)

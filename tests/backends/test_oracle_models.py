"""Verdicts of `check --for onnxruntime` on whole models, compared with the ops of its optimized model by name."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from support.shared_models import SHARED_MODELS

from graphquant.backends.onnxruntime import ask_onnxruntime

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "benchmarks" / "oracle.py"
if not FILE.is_file():  # a source distribution has no benchmarks
    pytest.skip("the benchmark is not here", allow_module_level=True)
SPEC = importlib.util.spec_from_file_location("oracle", FILE)
oracle = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(oracle)

MODELS = oracle.models(SHARED_MODELS)
BIG = {"light_vgg19", "light_bvlc_alexnet", "light_zfnet512"}
"""Nets of hundreds of megabytes, which the benchmark alone judges."""

FEW_INTEGER_OPS = {"model_1": 7, "lm_model0_opt": 3, "mnv3_detection_opt": 3}
"""Integer ops of models that the rules leave mostly float: an LSTM with few other ops, and graphs that ONNX Runtime has
optimized already, whose types are unknown.
"""

FLOAT_ONLY = [name for name in ("occ_model0", "tiny_gpt2_past", "squeezenet_fp16") if name in MODELS]
"""Models that `insert` refuses: one cannot be converted to opset 13, one needs data that are token ids, and one is
float16."""


class Random(CalibrationDataReader):
    """Calibration reader with one sample of seeded noise for each input."""

    def __init__(self, message):
        rng = np.random.default_rng(0)
        known = {value.name for value in message.graph.initializer}
        sizes = {
            value.name: [size.dim_value or 1 for size in value.type.tensor_type.shape.dim]
            for value in message.graph.input
            if value.name not in known
        }
        self.left = [{name: rng.standard_normal(shape).astype(np.float32) for name, shape in sizes.items()}]

    def get_next(self):
        """Return the next sample, or None."""
        return self.left.pop() if self.left else None


@pytest.mark.slow
@pytest.mark.usefixtures("rules_alone")
@pytest.mark.parametrize("name", [name for name in MODELS if name not in BIG and name not in FLOAT_ONLY])
def test_models(name, tmp_path):
    """No verdict is wrong, and several ops run on integers."""
    make, data = MODELS[name]
    judged, low, wrong = oracle.judge(make(), data, [], tmp_path)
    assert wrong == []
    assert FEW_INTEGER_OPS.get(name, 8) <= low <= judged


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOAT_ONLY)
def test_models_that_insert_refuses(name, tmp_path):
    """Verdicts on the float model are correct, and no op that computes on floats runs on integers."""
    message = MODELS[name][0]()
    oracle.truth.name_ops(message)
    oracle.onnx.save(message, tmp_path / "model.onnx")
    verdicts = ask_onnxruntime(oracle.gq.load(tmp_path / "model.onnx"))
    assert (
        oracle.truth.differences(verdicts, oracle.truth.runs_as(oracle.truth.optimized(tmp_path / "model.onnx"))) == []
    )
    assert {verdict.status for verdict in verdicts} <= {"float", "removed"}


@pytest.mark.slow
@pytest.mark.parametrize("rules", ["fixed_point", "tensorrt", "tflite", "weight_only"])
@pytest.mark.parametrize("name", ["digits_cnn", "digits_cnn_bn", "transformer", "lstm"])
def test_rules_for_other_backends(name, rules, tmp_path):
    """Models quantized for other backends get correct verdicts."""
    make, data = MODELS[name]
    _, _, wrong = oracle.judge(make(), data, [rules], tmp_path)
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation_type": QuantType.QInt8, "weight_type": QuantType.QInt8},
        {"activation_type": QuantType.QUInt16, "weight_type": QuantType.QUInt8},
        {"extra_options": {"ActivationSymmetric": True}},
        {"extra_options": {"AddQDQPairToWeight": True, "DedicatedQDQPair": True}},
    ],
    ids=["uint8", "int8", "uint16", "symmetric", "whole pairs"],
)
@pytest.mark.parametrize("name", ["digits_cnn", "digits_cnn_bn", "digits_rnn", "transformer", "lstm"])
def test_models_of_onnxruntime_quantizer(name, options, tmp_path):
    """Models of ONNX Runtime's own quantizer get correct verdicts."""
    make, _ = MODELS[name]
    message = make()
    oracle.truth.name_ops(message)
    oracle.onnx.save(message, tmp_path / "float.onnx")
    written = tmp_path / "quantized.onnx"
    quantize_static(tmp_path / "float.onnx", written, Random(message), quant_format=QuantFormat.QDQ, **options)
    message = oracle.onnx.load(written)
    for node in oracle.truth.all_nodes(message.graph):
        node.name = node.name or node.output[0]
    oracle.onnx.save(message, written)
    verdicts = ask_onnxruntime(oracle.gq.load(written))
    assert oracle.truth.differences(verdicts, oracle.truth.runs_as(oracle.truth.optimized(written))) == []
    assert any(verdict.status == "int8" for verdict in verdicts)


@pytest.mark.parametrize("name", ["digits_cnn", "transformer"])
def test_float_models(name, tmp_path):
    """No op of a float model runs on integers."""
    make, _ = MODELS[name]
    oracle.onnx.save(make(), tmp_path / "model.onnx")
    verdicts = ask_onnxruntime(oracle.gq.load(tmp_path / "model.onnx"))
    assert {verdict.status for verdict in verdicts} <= {"float", "removed"}

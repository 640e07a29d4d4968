"""What `check --for onnxruntime` foretells of whole models, quantized by graphquant, beside what onnxruntime does."""

import importlib.util
from pathlib import Path

import pytest

from graphquant.backends.onnxruntime import predict

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "benchmarks" / "oracle.py"
if not FILE.is_file():  # a source distribution has no benchmarks
    pytest.skip("the benchmark is not here", allow_module_level=True)
SPEC = importlib.util.spec_from_file_location("oracle", FILE)
oracle = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(oracle)

SHARED = ROOT.parent / "shared" / "models"
MODELS = oracle.models(SHARED)
BIG = {"light_vgg19", "light_bvlc_alexnet", "light_zfnet512"}
"""Nets of hundreds of megabytes, which the benchmark alone judges."""

EXPECTED = {"silero_vad_16k_op15": 6}
"""Wrong verdicts that are known: five Slices of one tensor that onnxruntime makes one Split of."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in BIG])
def test_models(name, tmp_path):
    """No op is judged wrong but those that are known, and several are judged to run on integers."""
    make, data = MODELS[name]
    judged, low, wrong = oracle.judge(make(), data, [], tmp_path)
    assert len(wrong) <= EXPECTED.get(name, 0), wrong
    assert 8 <= low <= judged


@pytest.mark.slow
@pytest.mark.parametrize("rules", ["fixed_point", "tensorrt", "tflite", "weight_only"])
@pytest.mark.parametrize("name", ["digits_cnn", "digits_cnn_bn", "transformer", "lstm"])
def test_rules_for_other_backends(name, rules, tmp_path):
    """Models quantized for something else, which onnxruntime runs in float for the most part, are judged right too."""
    make, data = MODELS[name]
    judged, _, wrong = oracle.judge(make(), data, [rules], tmp_path)
    assert len(wrong) <= 0.02 * judged, wrong


@pytest.mark.parametrize("name", ["digits_cnn", "transformer"])
def test_float_models(name, tmp_path):
    """Nothing of a float model is foretold to run on integers."""
    make, _ = MODELS[name]
    oracle.onnx.save(make(), tmp_path / "model.onnx")
    verdicts = predict(oracle.gq.load(tmp_path / "model.onnx"))
    assert {verdict.status for verdict in verdicts} == {"float"}

"""Narrow types in a model: onnxruntime loads it with all optimizations and gives the same values as without."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.onnx_models import onnx_session
from support.rule_files import weight_rule, write_rules

import graphquant as gq
from graphquant.analysis.explain import explain_quantized
from graphquant.analysis.model_summary import summarize_model
from graphquant.quantize import FLOAT8_NOT_RUNNABLE

MODEL = Path("sample_models/digits_cnn.onnx")

SCHEMES = """
description = "activations and weights"
prepare = ["initializer-inputs"]
[scheme.activation]
dtype = "{activation}"
{zero}
[scheme.weight]
dtype = "{weight}"
per = "channel"
"""
ACTIVATION_RULES = """
[[rule]]
name = "behind"
producer = { kind = "conv|depthwise_conv|matmul|gemm > relu|relu6|clip?" }
quantize = "activation"
[[rule]]
name = "pool"
producer = { kind = "max_pool" }
quantize = "same-as-input"
"""

PLAIN = "ORT_DISABLE_ALL"
FULL = "ORT_ENABLE_ALL"


def insert_widths(folder: Path, activation: str, weight: str) -> gq.Result:
    """Quantize the network to these types."""
    zero = "" if activation.startswith("float") else 'zero = "asymmetric"'
    schemes = SCHEMES.format(activation=activation, weight=weight, zero=zero)
    rules = write_rules(folder, schemes + weight_rule("conv|depthwise_conv|matmul|gemm") + ACTIVATION_RULES)
    data = "sample_models/digits_cnn_calib.npz"
    return gq.insert(MODEL, rules=rules, data=data, samples=16, min_sqnr="none")


def digit_logits(path: Path, level: str) -> np.ndarray:
    """Return the logits of eight pictures."""
    session = onnx_session(path, level)
    image = np.load("sample_models/digits_cnn_eval.npz")["image"][:8].astype(np.float32)
    model_input = session.get_inputs()[0]
    return session.run(None, {model_input.name: image.reshape(8, *model_input.shape[1:])})[0]


@pytest.mark.parametrize(
    ("activation", "weight"),
    [
        ("uint4", "int4"),
        ("uint4", "int8"),
        ("uint8", "int4"),
        ("uint3", "int5"),
        ("uint16", "int8"),
        ("uint12", "int4"),
    ],
)
def test_narrow_types_load(tmp_path: Path, activation: str, weight: str) -> None:
    """Logits with and without optimizations agree up to the rounding of integer kernels. The opset does not change."""
    result = insert_widths(tmp_path, activation, weight)
    path = result.save(tmp_path / "quant.onnx")
    onnx.checker.check_model(onnx.load(path), full_check=True)
    assert gq.load(path).opset == 13
    assert len(result.inserted) > 15
    want, have = digit_logits(path, PLAIN), digit_logits(path, FULL)
    np.testing.assert_allclose(have, want, atol=0.15 * np.abs(want).max())
    assert not result.site_notes or FLOAT8_NOT_RUNNABLE not in "".join(result.site_notes.values())


def test_float8_activations_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each float8 site between quantized tensors has a note about runtimes. Float8 weights have none."""
    with monkeypatch.context() as patch:  # some releases of onnxruntime cannot load the result
        patch.setattr("graphquant.api.insert.check_runtime_accepts", lambda *_, **__: "")
        result = insert_widths(tmp_path, "float8_e4m3fn", "float8_e4m3fn")
    noted_tensors = {
        inserted_site.site.tensor for inserted_site in result.inserted if inserted_site.site.tensor in result.site_notes
    }
    assert {
        inserted_site.site.tensor for inserted_site in result.inserted if not inserted_site.site.parameter
    } < noted_tensors
    assert all(FLOAT8_NOT_RUNNABLE in note for note in result.site_notes.values())
    path = result.save(tmp_path / "quant.onnx")
    assert np.isfinite(digit_logits(path, PLAIN)).all()
    rules = (tmp_path / "rules.toml").read_text()
    (tmp_path / "rules.toml").write_text(rules[: rules.index('[[rule]]\nname = "behind"')])
    float8_result = gq.insert(MODEL, rules=[str(tmp_path / "rules.toml")])
    assert not float8_result.site_notes
    path = float8_result.save(tmp_path / "alone.onnx")
    np.testing.assert_allclose(digit_logits(path, FULL), digit_logits(path, PLAIN), rtol=1e-3, atol=1e-3)


def test_widths_are_read_back(tmp_path: Path) -> None:
    """Inspect reads the widths of 5 and 10 bits that int8 and int16 contain, with their ranges."""
    result = insert_widths(tmp_path, "int10", "int5")
    ops = summarize_model(gq.load(result.save(tmp_path / "out.onnx"))).quantization_ops
    written = {pair.params.type.name: pair.params for pair in result.inserted}
    assert {op.params.type.name for op in ops} == set(written) == {"int5", "int10"}
    highs = {float(np.max(op.params.range.high)) for op in ops if op.params.type.name == "int10"}
    assert highs == {float(pair.params.range.high) for pair in result.inserted if pair.params.type.name == "int10"}
    ((explained, *_),) = [explain_quantized(gq.load(tmp_path / "out.onnx"), "max_pool")]
    assert "to int10" in explained.outcome


@pytest.mark.parametrize(("axis", "channels"), [(0, 4), (1, 8), (2, 4), (7, 4), (-9, 8), (1, 3)])
@pytest.mark.parametrize("requantize", [False, True])
def test_scales_that_do_not_fit_the_tensor(tmp_path: Path, axis: int, channels: int, requantize: bool) -> None:
    """Per-channel scales of a wrong axis or count are no parameters, and no verb ends with an error of numpy."""
    values = {
        "q": np.ones((8, 4), np.int8),
        "scale": np.full(channels, 0.5, np.float32),
        "zero": np.zeros(channels, np.int8),
    }
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["w"], axis=axis),
            onnx.helper.make_node("MatMul", ["x", "w"], ["y"]),
        ],
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 8])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 4])],
        [onnx.numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    path = tmp_path / "model.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10), path)
    assert all(op.params is None for op in summarize_model(gq.load(path)).quantization_ops)
    with suppress(gq.GraphQuantError):  # errors of numpy are not suppressed
        gq.insert(path, data="random:4", requantize=requantize)

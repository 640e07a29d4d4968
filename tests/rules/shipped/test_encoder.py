"""A small encoder as exporters write BERT: embeddings, a padding mask, LayerNorm and GELU as single ops, a pooler."""

from collections import Counter

import numpy as np
import onnx
import onnx.parser
import pytest
from encoder_model import PLACES, draw_words, write_encoder
from support.measurements import sqnr_db
from support.onnx_models import run_onnx

import graphquant as gq

LEAST = {
    "onnxruntime": 27,
    "tensorrt": 28,
    "openvino": 25.5,
    "qnn": 26,
    "qnn16": 35.5,
    "vitis_ai": 22,
    "generic": 28,
    "tflite": 28.5,
}
"""The least SQNR of each rule file, in dB: about 0.5 below what it had."""


@pytest.mark.parametrize("rules", LEAST)
def test_encoder(rules, tmp_path):
    """Products run on integers; masks, LayerNorm and GELU stay float where that is possible; answers stay near."""
    path, data = write_encoder(tmp_path)
    result = gq.insert(path, rules=[rules], data=str(data), validate=False)
    result.save(tmp_path / "quant.onnx")
    feeds = draw_words(np.random.default_rng(1), 8)
    (exact,), (found,) = (run_onnx(path, feeds, "ORT_DISABLE_ALL") for path in (path, tmp_path / "quant.onnx"))
    assert sqnr_db(exact, found) > LEAST[rules]
    read = {(done.site.tensor.op, use.op) for done in result.inserted for use in done.site.uses}
    for k in (0, 1):
        assert (f"sm{k}", f"p{k}") not in read
        assert (f"p{k}", f"c{k}") in read
        assert (f"gl{k}", f"m{k}") in read
        inside = {f"{name}{k}" for name in ("d", "s", "vr", "e", "r", "n", "g", "h", "er", "e1", "ge")}
        if not rules.startswith("qnn"):  # which has no float beside its integers
            assert not {(one, other) for one, other in read if one in inside and other in inside}
    assert {step.step for step in result.plan.steps} <= {"opset", "drop-identity", "rewrite-norms", "join-activations"}
    if rules in {"generic", "qnn16", "tflite"}:
        return
    report = gq.check(tmp_path / "quant.onnx", backend=rules)
    kinds = {op.name: op.kind for op in gq.load(tmp_path / "quant.onnx").main.ops()}
    low = {verdict.op for verdict in report.verdicts if verdict.status == "int8"}
    products = {name for name, kind in kinds.items() if kind in {"matmul", "gemm"}}
    assert products <= low
    assert not {"sm0", "sm1"} & low or rules == "openvino"  # which quantizes what a sum reads, each by its own scale


@pytest.mark.parametrize("far", [-np.inf, np.finfo(np.float32).min, -10000])
@pytest.mark.parametrize("rules", LEAST)
def test_causal_masks(rules, far, tmp_path):
    """A constant mask of the largest numbers, or of minus infinity, takes nothing from the scores' range."""
    shape = "float[1, 2, 16, 16]"
    text = f"""<ir_version: 8, opset_import: ["": 13]> net ({shape} q, {shape} k, {shape} v) => ({shape} y) {{
        s = MatMul(q, k) d = Mul(s, quarter) a = Add(d, mask) p = Softmax<axis = -1>(a) y = MatMul(p, v)
    }}"""
    message = onnx.parser.parse_model(text)
    mask = np.where(np.triu(np.ones((PLACES, PLACES), bool), 1), np.float32(far), np.float32(0))
    for name, value in {"mask": mask[None, None], "quarter": np.float32(0.25)}.items():
        message.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    onnx.save(message, tmp_path / "net.onnx")
    rng = np.random.default_rng(0)
    data = {name: rng.normal(size=(8, 2, 16, 16)).astype(np.float32) for name in "qkv"}
    np.savez(tmp_path / "data.npz", **data)
    gq.insert(tmp_path / "net.onnx", rules=[rules], data=str(tmp_path / "data.npz"), validate=False).save(
        tmp_path / "quant.onnx"
    )
    feeds = {name: value[:1] for name, value in data.items()}
    (exact,), (found,) = (
        run_onnx(path, feeds, "ORT_DISABLE_ALL") for path in (tmp_path / "net.onnx", tmp_path / "quant.onnx")
    )
    assert sqnr_db(exact, found) > 27


def test_openvino_runs_the_encoder(tmp_path):
    """OpenVINO runs every product on integers and each LayerNorm as one op, and answers as onnxruntime does."""
    openvino = pytest.importorskip("openvino")
    path, data = write_encoder(tmp_path)
    gq.insert(path, rules=["openvino"], data=str(data), validate=False).save(tmp_path / "quant.onnx")
    asked = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(tmp_path / "quant.onnx", "CPU", asked)
    told = [op.get_rt_info() for op in compiled.get_runtime_model().get_ordered_ops()]
    ran = Counter((str(one["layerType"].astype(str)), str(one["runtimePrecision"].astype(str))) for one in told)
    products = {precision for kind, precision in ran if kind in {"FullyConnected", "MatMul"}}
    assert products <= {"u8", "i8"}
    assert sum(count for (kind, _), count in ran.items() if kind == "MVN") == 3
    feeds = draw_words(np.random.default_rng(1), 8)
    (exact,), found = run_onnx(path, feeds, "ORT_DISABLE_ALL"), compiled(feeds)[0]
    assert sqnr_db(exact, found) > LEAST["openvino"] - 1

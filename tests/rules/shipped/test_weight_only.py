"""ONNX Runtime runs weights in blocks as matrix products that read packed integers."""

import itertools
import json
import re
from collections import Counter
from io import StringIO
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from rich.console import Console

import graphquant as gq
from graphquant.analysis.model_summary import summarize_model
from graphquant.numerics import QParams, dequantize, quantize
from graphquant.quantize import SkipCode, plan_from_json, plan_to_json
from graphquant.quantize.planner import NARROW_WARNING, PACKED_WARNING
from graphquant.visualize.text import summary_view

TEXT = """<ir_version: 8, opset_import: ["": {opset}]> g (int64[n] ids, float[n,3,8,8] image) => (float y) {{
  rows = Gather(table, ids)
  a = MatMul(rows, w1)
  b = {act}(a)
  c = Gemm(b, w2, bias)
  d = Conv<kernel_shape = [8, 8]>(image, filter)
  e = Flatten(d)
  f = MatMul(e, w3)
  y = {last}(c, f)
}}"""

WEIGHTS = {"table": (100, 96), "w1": (96, 80), "w2": (80, 7), "bias": (7,), "filter": (40, 3, 8, 8), "w3": (40, 7)}


def write_table_net(
    folder: Path, opset: int, act: str = "Tanh", last: str = "Mul"
) -> tuple[Path, dict[str, np.ndarray]]:
    """A net of a table, matrix products and a convolution, and a feed."""
    message = onnx.parser.parse_model(TEXT.format(opset=opset, act=act, last=last))
    rng = np.random.default_rng(0)
    message.graph.output[0].type.tensor_type.shape.dim.extend([onnx.TensorShapeProto.Dimension() for _ in range(2)])
    for name, shape in WEIGHTS.items():
        value = rng.standard_normal(shape).astype(np.float32)
        message.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    onnx.save(message, folder / "model.onnx")
    return folder / "model.onnx", {
        "ids": rng.integers(0, 100, 5),
        "image": rng.standard_normal((5, 3, 8, 8)).astype(np.float32),
    }


def run_and_count_ops(path: Path, feeds: dict[str, np.ndarray]) -> tuple[np.ndarray, Counter[str]]:
    """The output, and how many ops of each type onnxruntime runs."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path.with_suffix(".optimized.onnx"))
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    result = session.run(None, feeds)[0]
    return result, Counter(node.op_type for node in onnx.load(path.with_suffix(".optimized.onnx")).graph.node)


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize(
    ("rules", "needed", "closest"),
    [(["weight_only"], 13, 28.0), (["weight_only_int8"], 21, 30.0), (["weight_only_int4"], 21, 10.0)],
)
def test_matrix_products_are_fused(tmp_path: Path, rules: list[str], opset: int, needed: int, closest: float) -> None:
    """Every product becomes MatMulNBits, convolution and table keep their DequantizeLinear, the output stays close."""
    path, feeds = write_table_net(tmp_path, opset)
    result = gq.insert(path, rules=rules, family="onnx-qdq")
    saved = result.save(tmp_path / "quant.onnx")
    onnx.checker.check_model(onnx.load(saved), full_check=True)
    assert gq.load(saved).opset == max(opset, needed)
    want, before = run_and_count_ops(path, feeds)
    have, after = run_and_count_ops(saved, feeds)
    assert before["MatMulNBits"] == 0
    assert (after["MatMulNBits"], after["MatMul"], after["Gemm"]) == (3, 0, 0)
    assert after["DequantizeLinear"] == (1 if rules == ["weight_only"] else 2)
    noise = np.square(have - want).sum()
    assert 10 * np.log10(np.square(want).sum() / noise) > closest


@pytest.mark.parametrize("rules", ["weight_only_int8", "weight_only_int4"])
@pytest.mark.parametrize(("act", "last"), [("Tanh", "Mul"), ("Relu", "Add")])
def test_weights_of_small_models_are_folded(tmp_path: Path, rules: str, act: str, last: str) -> None:
    """The optimized model has the ops of the float model, so it is as fast. Its file is smaller."""
    path, feeds = write_table_net(tmp_path, 21, act=act, last=last)
    saved = gq.insert(path, rules=rules).save(tmp_path / "quant.onnx")
    want, before = run_and_count_ops(path, feeds)
    have, after = run_and_count_ops(saved, feeds)
    assert after == before
    assert 10 * np.log10(np.square(want).sum() / np.square(have - want).sum()) > (30 if "8" in rules else 10)
    assert saved.stat().st_size < 0.5 * path.stat().st_size


@pytest.mark.parametrize(
    ("rules", "family", "counts"),
    [
        ("weight_only_int4", None, {"MatMulNBits": 2}),
        ("weight_only_int8", None, {"MatMulNBits": 2}),
        ("weight_only_int4", "onnx-qdq", {"MatMulNBits": 1, "FusedGemm": 1, "DequantizeLinear": 1}),
    ],
)
def test_weights_of_large_models_are_packed(
    tmp_path: Path, rules: str, family: str | None, counts: dict[str, int]
) -> None:
    """As pairs, onnxruntime joins one product with its Relu, and would unpack its weight in each run."""
    body = "h = Gemm(x, w1, b) r = Relu(h) y = MatMul(r, w2)"
    message = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[n, 1024] x) => (float[n, 1024] y) {{ {body} }}'
    )
    rng = np.random.default_rng(0)
    for name, shape in (("w1", (1024, 2048)), ("b", (2048,)), ("w2", (2048, 1024))):
        value = rng.standard_normal(shape).astype(np.float32)
        message.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    onnx.save(message, tmp_path / "model.onnx")
    feeds = {"x": rng.standard_normal((1, 1024)).astype(np.float32)}
    saved = gq.insert(tmp_path / "model.onnx", rules=rules, family=family).save(tmp_path / "quant.onnx")
    want, _ = run_and_count_ops(tmp_path / "model.onnx", feeds)
    have, after = run_and_count_ops(saved, feeds)
    assert {name: after[name] for name in counts} == counts
    assert 10 * np.log10(np.square(want).sum() / np.square(have - want).sum()) > (30 if "8" in rules else 15)


def test_blocks_lie_along_what_is_summed_over(tmp_path: Path) -> None:
    """Of a MatMul or Gemm along K, whichever way the weight lies; of a table along its rows."""
    path, _ = write_table_net(tmp_path, 21)
    message = onnx.load(path)
    gemm = next(node for node in message.graph.node if node.op_type == "Gemm")
    gemm.attribute.append(onnx.helper.make_attribute("transB", 1))
    weight = next(tensor for tensor in message.graph.initializer if tensor.name == "w2")
    weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight).T.copy(), "w2"))
    onnx.save(message, path)
    result = gq.insert(path, rules=["tables_int4", "weight_only_int4"])
    shapes = {
        done.site.tensor.op: (done.site.axis, done.params.block, done.params.scale.shape)
        for done in result.inserted
        if isinstance(done.params, QParams)
    }
    assert shapes == {
        "table": (1, 32, (100, 3)),
        "w1": (0, 96, (1, 80)),
        "w2": (1, 80, (7, 1)),
        "filter": (0, None, (40,)),
        "w3": (0, 40, (1, 7)),
    }


def test_each_block_is_scaled_by_itself(tmp_path: Path) -> None:
    """The written table is what numpy makes of each 32 values of a row and their own extremes."""
    path, feeds = write_table_net(tmp_path, 21)
    result = gq.insert(path, rules=["tables_int4"])
    (done,) = result.inserted
    table = next(t for t in onnx.load(path).graph.initializer if t.name == "table")
    value = onnx.numpy_helper.to_array(table)
    cells = value.reshape(100, 3, 32)
    step = np.maximum(cells.max(2) / 7, cells.min(2) / -8).astype(np.float32)
    np.testing.assert_array_equal(done.params.scale, step)
    saved = onnx.load(result.save(tmp_path / "quant.onnx"))
    saved.graph.output.append(onnx.helper.make_tensor_value_info("rows", onnx.TensorProto.FLOAT, None))
    onnx.save(saved, tmp_path / "watched.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "watched.onnx", providers=["CPUExecutionProvider"])
    rows = session.run(["rows"], feeds)[0]
    np.testing.assert_array_equal(rows, dequantize(quantize(value, done.params), done.params)[feeds["ids"]])


def test_blocks_in_a_plan_file_and_in_inspect(tmp_path: Path) -> None:
    """A plan with blocks goes through JSON and gives the same file; inspect shows how many blocks of what size."""
    path, _ = write_table_net(tmp_path, 13)
    plan = gq.plan(path, rules=["weight_only_int4"])
    again = plan_from_json(json.loads(json.dumps(plan_to_json(plan))))
    assert again == plan
    saved = gq.insert(path, rules=["weight_only_int4"]).save(tmp_path / "one.onnx")
    assert gq.insert(path, plan=again).save(tmp_path / "two.onnx").read_bytes() == saved.read_bytes()
    file = StringIO()
    Console(file=file, width=120).print(summary_view(summarize_model(gq.load(saved))))
    assert re.search(r"w1/quant/int8:0 +int8\[80\] axis 0 by 96 ", file.getvalue())


def test_other_formats_say_why_not() -> None:
    """TensorFlow's ops have no blocks; the plan says so and what to take."""
    plan = gq.plan("sample_models/digits_cnn.pb", rules=["weight_only_int4"])
    assert {skip.code for skip in plan.skips} == {SkipCode.SCHEME}
    assert all(re.search('FakeQuant .*blocks,.* per = "channel"', skip.reason) for skip in plan.skips)
    assert len(plan.sites) == 7


@pytest.mark.parametrize("rules", ["weight_only", "weight_only_int4", "weight_only_int8", "dynamic"])
def test_weights_behind_an_identity_are_stored_once(tmp_path: Path, rules: str) -> None:
    """An exporter of PyTorch lets the second layer with a weight read it through an Identity."""
    body = "v = Identity(w) a = MatMul(x, w) b = Tanh(a) y = MatMul(b, v)"
    text = f'<ir_version: 8, opset_import: ["": 21]> g (float[n,512] x) => (float[n,512] y) {{ {body} }}'
    message, rng = onnx.parser.parse_model(text), np.random.default_rng(0)
    weight = (rng.standard_normal((512, 512)) / 23).astype(np.float32)
    message.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(message, tmp_path / "model.onnx")
    result = gq.insert(tmp_path / "model.onnx", rules=[rules], validate=False)
    result.save(tmp_path / "small.onnx")
    assert len(result.inserted) == 1
    constants = onnx.load(tmp_path / "small.onnx").graph.initializer
    large = [constant for constant in constants if np.prod(constant.dims) >= weight.size / 2]
    assert [constant.data_type == onnx.TensorProto.FLOAT for constant in large] == [False]


def write_encoder(path: Path, width: int, *, past: bool = False) -> None:
    """Write eight products of tokens whose number is unknown, with past states if it is a decoder."""
    lines, rng, values = [], np.random.default_rng(0), {}
    for i in range(4):
        lines.append(f"a{i} = MatMul({f'b{i - 1}' if i else 'x'}, v{i}) r{i} = Relu(a{i}) b{i} = MatMul(r{i}, w{i})")
        values |= {f"v{i}": (width, 4 * width), f"w{i}": (4 * width, width)}
    state = f"float[n,t,{width}] past", f"float[n,u,{width}] present"
    inputs, outputs = f"float[n,s,{width}] x", f"float[n,s,{width}] b3"
    if past:
        lines.append("present = Concat<axis = 1>(past, b3)")
        inputs, outputs = f"{inputs}, {state[0]}", f"{outputs}, {state[1]}"
    message = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => ({outputs}) {{ {" ".join(lines)} }}'
    )
    for name, shape in values.items():
        value = (rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)
        message.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    onnx.save(message, path)


@pytest.mark.parametrize(
    ("rules", "width", "past", "packed"),
    [
        ("weight_only_int4", 320, False, 0),
        ("weight_only_int4", 320, True, 8),
        ("weight_only_int8", 320, False, 8),
        ("weight_only_int8", 160, False, 0),
        ("weight_only_int8", 160, True, 8),
    ],
)
def test_tokens_of_an_encoder_are_many_rows(tmp_path: Path, rules: str, width: int, packed: int, *, past: bool) -> None:
    """Packed 4-bit products and small 8-bit ones are slower than in float with many rows. A decoder mostly has one."""
    write_encoder(tmp_path / "model.onnx", width, past=past)
    result = gq.insert(tmp_path / "model.onnx", rules=[rules])
    message = onnx.load(result.save(tmp_path / "quant.onnx"))
    assert sum(node.op_type == "MatMulNBits" for node in message.graph.node) == packed
    assert (PACKED_WARNING in result.plan.warnings) == (past and "4" in rules)
    assert (NARROW_WARNING in result.plan.warnings) == ("4" in rules)
    # One token in the data tells that the number of rows is one.
    np.savez(tmp_path / "data.npz", x=np.zeros((2, 1, width), np.float32))
    if not past:
        result = gq.insert(tmp_path / "model.onnx", rules=[rules], data=str(tmp_path / "data.npz"), validate=False)
        assert {site.scheme.args.form for site in result.plan.sites} == {"packed"}


SPECTRUM = """<ir_version: 8, opset_import: ["": 17]> g (float[n,16,256] wave) => (float[n,16,200] y) {
  re = MatMul(wave, cosine) im = MatMul(wave, sine) a = Mul(re, re) b = Mul(im, im) p = Add(a, b)
  bands = MatMul(p, mel) s = Add(bands, epsilon) l = Log(s) h = MatMul(l, w) r = Relu(h) y = MatMul(r, v)
}"""


@pytest.mark.parametrize(
    ("rules", "min_sqnr"), [("weight_only_int4", 15), ("weight_only_int8", 40), ("weight_only", 40), ("dynamic", 35)]
)
def test_spectra_stay_float(tmp_path: Path, rules: str, min_sqnr: float) -> None:
    """The logarithm of quiet bands shows each error of the transform: with int8 weights there, 7 dB would remain."""
    message, rng = onnx.parser.parse_model(SPECTRUM), np.random.default_rng(0)
    angles = 2 * np.pi * np.outer(np.arange(256), np.arange(129)) / 256
    window = np.hanning(256)[:, None]
    values = {
        "cosine": np.cos(angles) * window,
        "sine": np.sin(angles) * window,
        "mel": np.maximum(0, 1 - np.abs(np.arange(129)[:, None] / 129 * 40 - np.arange(40))),
        "epsilon": np.float32(1e-6),
        "w": rng.standard_normal((40, 500)) / 40**0.5,
        "v": rng.standard_normal((500, 200)) / 500**0.5,
    }
    for name, value in values.items():
        message.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value, np.float32), name))
    onnx.save(message, tmp_path / "model.onnx")
    times = np.arange(16 * 256) / 8000
    waves = [np.sin(2 * np.pi * pitch * times) * np.hanning(4096) for pitch in (211, 487, 903, 1803)]
    feeds = {"wave": np.reshape(waves, (4, 16, 256)).astype(np.float32)}
    result = gq.insert(tmp_path / "model.onnx", rules=[rules], validate=False)
    sqnr, _ = sqnr_of(tmp_path / "model.onnx", result.save(tmp_path / "quant.onnx"), feeds)
    assert sqnr > min_sqnr


PRODUCTS = """<ir_version: 8, opset_import: ["": 17]> g (float[8,16] x) => (float[8,8] y) {
  a = MatMul(x, v) k = Relu(a) t = Transpose(k) e = Einsum <equation = "ij,jk->ik"> (k, w) y = MatMul(e, t)
}"""

OWN_RULES = """use = ["weights"]
[scheme.own]
dtype = "int8"
[[rule]]
name = "own-einsum"
producer = { kind = "parameter" }
consumer = { kind = "einsum" }
quantize = "own"
[[rule]]
name = "own-product"
producer = { kind = "computed" }
consumer = { kind = "matmul", input = "weight|input" }
quantize = "own"
[[rule]]
name = "own-lstm"
consumer = { kind = "lstm" }
quantize = "own"
"""


@pytest.mark.parametrize(
    ("rules", "quantizes_weight"),
    [([], False), (["weight_only"], True), (["", "weight_only"], True), (["weight_only_int8", "", "dynamic"], True)],
)
def test_reasons_of_a_library_come_last(tmp_path: Path, rules: list[str], *, quantizes_weight: bool) -> None:
    """A rule of any file decides before the reasons of a library, which `unused` does not list as rules of the file."""
    message, rng = onnx.parser.parse_model(PRODUCTS), np.random.default_rng(0)
    for name, shape in (("v", (16, 32)), ("w", (32, 32))):
        value = rng.standard_normal(shape).astype(np.float32)
        message.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    onnx.save(message, tmp_path / "model.onnx")
    (tmp_path / "own.toml").write_text(OWN_RULES)
    (tmp_path / "extends.toml").write_text(f'extends = "weight_only"\n{OWN_RULES}')
    for own in ("own.toml", "extends.toml"):
        files = [rule or str(tmp_path / own) for rule in (rules if "" in rules else [*rules, ""])]
        plan = gq.plan(tmp_path / "model.onnx", rules=files)
        claimed = {str(site.tensor): site.rule for site in plan.sites}
        assert [claimed[name] for name in ("w:0", "e:0", "t:0")] == ["own-einsum", "own-product", "own-product"]
        assert ("v:0" in claimed) == (quantizes_weight or own == "extends.toml")
        assert {skip.rule for skip in plan.skips if str(skip.tensor) == "k:0"} == {"einsum"}
        if not rules:
            assert plan.unused == ("own-lstm",)


def sqnr_of(path: Path, quantized: Path, feeds: dict[str, np.ndarray]) -> tuple[float, Counter[str]]:
    """Return the SQNR in dB of the first output, and how many ops of each type onnxruntime runs."""
    want, _ = run_and_count_ops(path, feeds)
    have, counts = run_and_count_ops(quantized, feeds)
    return float(10 * np.log10(np.square(want).sum() / np.square(have - want).sum())), counts


@pytest.mark.parametrize(("columns", "block"), [(192, 64), (320, 64), (250, 128), (256, 128)])
def test_blocks_of_packed_bytes_fit(tmp_path: Path, columns: int, block: int) -> None:
    """Two blocks of 128 for 192 columns would have 64 zeros. Products of blocks of 64 are as fast."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((columns, 3072)), "v": rng.standard_normal((3072, columns))}
    text = f"g (float[1,{columns}] x) => (float[1,{columns}] y) {{ a = MatMul(x, w) t = Tanh(a) y = MatMul(t, v) }}"
    message = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 21]> {text}')
    for name, value in weights.items():
        message.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32) / 16, name))
    onnx.save(message, tmp_path / "model.onnx")
    result = gq.insert(tmp_path / "model.onnx", rules="weight_only_int8")
    assert [site.scheme.block_size for site in result.plan.sites] == [block, 128]
    feeds = {"x": rng.standard_normal((1, columns)).astype(np.float32)}
    quality, counts = sqnr_of(tmp_path / "model.onnx", result.save(tmp_path / "quant.onnx"), feeds)
    assert quality > 25
    assert counts["MatMulNBits"] == 2


def test_small_products_have_eight_bits(tmp_path: Path) -> None:
    """Each of six layers of 64 to 128 channels with 4 bits would lose about as much as the rest: 13 dB remain of 35."""
    sizes, rng = (64, 96, 64, 8, 64, 96, 128), np.random.default_rng(0)
    lines = [f"a{i} = MatMul({f'r{i - 1}' if i else 'x'}, w{i}) r{i} = Relu(a{i})" for i in range(6)]
    message = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 21]> g (float[n,64] x) => (float[n,128] r5) {{ {" ".join(lines)} }}'
    )
    for i, shape in enumerate(itertools.pairwise(sizes)):
        value = (rng.standard_normal(shape) * (2 / shape[0]) ** 0.5).astype(np.float32)
        message.graph.initializer.append(onnx.numpy_helper.from_array(value, f"w{i}"))
    onnx.save(message, tmp_path / "model.onnx")
    result = gq.insert(tmp_path / "model.onnx", rules=["weight_only_int4"])
    feeds = {"x": rng.standard_normal((64, 64)).astype(np.float32)}
    assert sqnr_of(tmp_path / "model.onnx", result.save(tmp_path / "quant.onnx"), feeds)[0] > 30


@pytest.mark.parametrize(("rules", "min_sqnr"), [("weight_only_int4", 12), ("weight_only_int8", 30), ("dynamic", 30)])
def test_weight_of_an_attention_op(tmp_path: Path, rules: str, min_sqnr: float) -> None:
    """The weight of an Attention of com.microsoft is quantized, and its input has a reason."""
    rng = np.random.default_rng(0)
    message = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        g (float[n, s, 64] x) => (float[n, s, 64] y) { y = com.microsoft.Attention <num_heads = 4> (x, w, b) }"""
    )
    values = {"w": rng.standard_normal((64, 192)) / 8, "b": rng.standard_normal(192) / 10}
    for name, value in values.items():
        message.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    onnx.save(message, tmp_path / "model.onnx")
    result = gq.insert(tmp_path / "model.onnx", rules=rules)
    assert [str(site.tensor) for site in result.plan.sites] == ["w:0"]
    assert [(str(skip.tensor), skip.rule) for skip in result.plan.skips] == [("x:0", "attention")]
    feeds = {"x": rng.standard_normal((2, 8, 64)).astype(np.float32)}
    quality, counts = sqnr_of(tmp_path / "model.onnx", result.save(tmp_path / "quant.onnx"), feeds)
    assert quality > min_sqnr
    assert counts["Attention"] == 1

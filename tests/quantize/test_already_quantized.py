"""Models that are quantized already: nothing is quantized twice, and what there is can be taken out and placed anew."""

import json
import logging
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static
from support.cli import run_cli
from support.onnx_models import run_onnx
from support.rule_files import write_int4_rules

import graphquant as gq
from graphquant.analysis.model_summary import summarize_model
from graphquant.errors import EmptyResultError
from graphquant.formats import onnx as onnx_format
from graphquant.ir import QUANTIZATION_KINDS
from graphquant.quantize import prepare
from graphquant.quantize.planner import (
    ALREADY_QUANTIZED,
    CAPTURED_BY_SUBGRAPH,
    INTEGER_CONSUMER,
    INTEGER_SUM,
    LIMITS_QUANTIZED,
)

MODELS = Path(__file__).resolve().parents[2] / "sample_models"
IMAGES = str(MODELS / "digits_cnn_calib.npz")
TWICE = [
    *(("digits_cnn.onnx", rules) for rules in ("onnxruntime", "openvino", "qnn", "tensorrt", "generic", "vitis_ai")),
    *(("digits_rnn.onnx", rules) for rules in ("onnxruntime", "openvino", "qnn", "fixed_point")),
    *(("digits_nested.onnx", rules) for rules in ("onnxruntime", "openvino", "weight_only_int4")),
    *(("digits_cnn.pb", rules) for rules in ("fixed_point", "weight_only")),
]


@pytest.mark.parametrize(("name", "rules"), TWICE)
def test_insert_twice(name, rules, tmp_path):
    """The second time nothing is inserted, each place has its reason, and the same bytes are written."""
    data = str(MODELS / f"{Path(name).stem}_calib.npz")
    first = gq.insert(MODELS / name, rules=rules, data=data, samples=2)
    path = first.save(tmp_path / f"once{Path(name).suffix}")
    second = gq.insert(path, rules=rules, data=data, samples=2)
    assert first.inserted
    assert second.inserted == ()
    # a stored weight is no parameter any more, so that rules for weights match nothing
    assert rules.startswith("weight_only") or any("already" in skip.reason for skip in second.skips)
    assert second.save(tmp_path / f"twice{Path(name).suffix}").read_bytes() == path.read_bytes()


class Images(CalibrationDataReader):
    """Three images for onnxruntime's own tool."""

    def __init__(self):
        image = np.load(IMAGES)["image"]
        self.batches = [{"image": image[index : index + 1]} for index in range(3)]

    def get_next(self):
        """The next one, or None."""
        return self.batches.pop() if self.batches else None


@pytest.fixture(scope="module")
def made_by_onnxruntime(tmp_path_factory):
    """Return a sample model as ONNX Runtime's own tool quantizes it, by its form."""
    folder, source = tmp_path_factory.mktemp("tool"), MODELS / "digits_cnn.onnx"
    logging.disable(logging.WARNING)  # it asks for a preparation that this model does not need
    for form in (QuantFormat.QDQ, QuantFormat.QOperator):
        quantize_static(source, folder / f"{form.name}.onnx", Images(), quant_format=form, per_channel=True)
    quantize_dynamic(source, folder / "dynamic.onnx")
    logging.disable(logging.NOTSET)
    return folder


@pytest.mark.parametrize("rules", ["onnxruntime", "generic", "tensorrt", "fixed_point", "weight_only"])
@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_static_models_of_onnxruntime_stay(form, rules, made_by_onnxruntime, tmp_path):
    """A model that its tool quantized with data is written again byte for byte."""
    path = made_by_onnxruntime / f"{form}.onnx"
    result = gq.insert(path, rules=rules, data=IMAGES, samples=2)
    assert result.inserted == ()
    assert result.save(tmp_path / "again.onnx").read_bytes() == path.read_bytes()


def test_dynamic_models_of_onnxruntime_stay_unchanged(made_by_onnxruntime):
    """Ops that compute on integers, what scales their sums and what adds their bias are left; sums of maps are not."""
    result = gq.insert(made_by_onnxruntime / "dynamic.onnx", data=IMAGES, samples=2)
    readers = {result.source.graphs[use.graph].op(use.op).type for pair in result.inserted for use in pair.site.uses}
    assert readers <= {"Add", "Concat", "MaxPool", "AveragePool"}
    reasons = {skip.reason for skip in result.skips}
    assert INTEGER_SUM in reasons
    before, after = (summarize_model(model).op_types for model in (result.source, result.model))
    assert before["ConvInteger"] == after["ConvInteger"] > 0
    mapped = [pair for pair in result.inserted for use in pair.site.uses if "bias_add" in use.op and use.slot == 0]
    assert not [pair for pair in mapped if "residual" not in str(pair.site.uses)]


RULES = """
[scheme.some]
observe = { name = "fixed", low = -1.0, high = 1.0 }
[[rule]]
name = "all"
producer = { kind = "*" }
quantize = "some"
"""


DYNAMIC = """
    q, sx, zx = DynamicQuantizeLinear(x) i = MatMulInteger(q, w, zx) f = Cast<to = 1>(i)
    k = Mul(sx, s) m = Mul(f, k) y = Add(m, b)
"""


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (
            "q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)",
            {"x > q[0]": ALREADY_QUANTIZED, "s > q[1]": ALREADY_QUANTIZED},
        ),
        (
            "m = Max(x, low) n = Min(m, high) q = QuantizeLinear(n, s, z) y = DequantizeLinear(q, s, z)",
            {
                "x > m[0]": LIMITS_QUANTIZED,
                "low > m[1]": LIMITS_QUANTIZED,
                "m > n[0]": LIMITS_QUANTIZED,
            },
        ),
        (
            "m = Transpose(x) n = Flatten(m) q = QuantizeLinear(n, s, z) y = DequantizeLinear(q, s, z)",
            {
                "x > m[0]": LIMITS_QUANTIZED,
                "m > n[0]": LIMITS_QUANTIZED,
            },
        ),
        (
            DYNAMIC,
            {
                "x > q[0]": INTEGER_CONSUMER,
                "q:1 > k[0]": INTEGER_SUM,
                "s > k[1]": INTEGER_SUM,
                "f > m[0]": INTEGER_SUM,
                "k > m[1]": INTEGER_SUM,
                "m > y[0]": INTEGER_SUM,
                "b > y[1]": INTEGER_SUM,
            },
        ),
    ],
)
def test_reasons(text, left, tmp_path):
    """A rule for any tensor leaves each place that has to do with integers, with its reason."""
    message = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float[2,4] x) => (float[2,4] y) {{ {text} }}'
    )
    values = {
        "s": np.float32(0.1),
        "z": np.uint8(128),
        "low": np.float32(-1),
        "high": np.float32(1),
        "w": np.ones((4, 4), np.uint8),
        "b": np.ones(4, np.float32),
    }
    used = {name for node in message.graph.node for name in node.input}
    message.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in values.items() if k in used)
    onnx.save(message, tmp_path / "model.onnx")
    plan = gq.plan(tmp_path / "model.onnx", rules=RULES)
    reasons_by_tensor = {
        f"{skip.tensor.op}{f':{skip.tensor.port}' if skip.tensor.port else ''} > {use}": skip.reason
        for skip in plan.skips
        for use in skip.uses
    }
    assert {position: reasons_by_tensor.get(position) for position in left} == left
    positions = {str(use) for site in plan.sites for use in site.uses}
    assert positions <= {"@y[0]"}


IN_BODIES = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[4,4] x, bool c) => (float[2,8] y, float[2,8] v)
{
    t = Tanh(x)
    r = Reshape(t, sizes)
    v = Neg(r)
    y = If (c) <
        then_branch = a () => (float[2,8] p) { p = Exp(r) }, else_branch = b () => (float[2,8] q) { q = Neg(r) }
    >
}
"""
PASSING = (
    RULES.replace('name = "all"\nproducer = { kind = "*" }', 'name = "tanh"\nproducer = { kind = "tanh" }')
    + """
[[rule]]
name = "handed"
producer = { kind = "reshape" }
quantize = "passthrough"
"""
)


@pytest.mark.parametrize(
    ("rules", "sites", "skipped"),
    [
        (PASSING, {"t:0": ["r[0]"], "r:0": ["y/else_branch/q[0]", "y/then_branch/p[0]"]}, ""),
        (
            PASSING.replace('"passthrough"', '"float"'),
            {},
            CAPTURED_BY_SUBGRAPH,
        ),
    ],
)
def test_tensors_that_only_a_subgraph_reads(rules, sites, skipped, tmp_path):
    """A runtime would end at once if it moved a pair to where a body reads it; there is another pair, or none."""
    message = onnx.parser.parse_model(IN_BODIES)
    message.graph.initializer.append(numpy_helper.from_array(np.array([2, 8]), "sizes"))
    onnx.save(message, tmp_path / "model.onnx")
    result = gq.insert(tmp_path / "model.onnx", rules=rules, allow_empty=True)
    uses_by_tensor = {str(pair.site.tensor): sorted(map(str, pair.site.uses)) for pair in result.inserted}
    assert uses_by_tensor == sites
    assert skipped in {skip.reason for skip in result.skips} | {""}
    session = onnxruntime.InferenceSession(onnx_format.emit(result.model).SerializeToString())
    x = np.linspace(-3, 3, 16, dtype=np.float32).reshape(4, 4)
    for branch in (True, False):
        actual = session.run(["y"], {"x": x, "c": np.array(branch)})[0]
        expected = np.tanh(x).reshape(2, 8)
        assert np.allclose(actual, np.exp(expected) if branch else -expected, atol=0.02)


# -- taken out and placed anew ---------------------------------------------------------------------


def test_pairs_of_onnxruntime_are_removed(made_by_onnxruntime):
    """Without its pairs a model computes what the float one does, Relus included; and it is quantized as that is."""
    image = np.load(MODELS / "digits_cnn_eval.npz")["image"]
    bare, steps = prepare(gq.load(made_by_onnxruntime / "QDQ.onnx"), ["requantize"])
    assert not [op for op in bare.main.ops() if op.kind in QUANTIZATION_KINDS]
    assert {step.step for step in steps} == {"requantize"}
    expected = run_onnx(gq.load(MODELS / "digits_cnn.onnx"), {"image": image})[0]
    outputs = run_onnx(bare, {"image": image})[0]
    assert (outputs.argmax(1) == expected.argmax(1)).mean() > 0.99
    assert np.abs(outputs - expected).max() < 0.2
    kinds = summarize_model(bare).op_types
    assert kinds["Relu"] + kinds.get("Clip", 0) == 8
    source = gq.load(MODELS / "digits_cnn.onnx")
    anew = gq.insert(made_by_onnxruntime / "QDQ.onnx", data=IMAGES, requantize=True)
    first = gq.insert(source, data=IMAGES)
    assert len(anew.inserted) == len(first.inserted)
    assert all(reading.rule for reading in summarize_model(anew.model).quantization_ops)
    assert (run_onnx(anew.model, {"image": image})[0].argmax(1) == expected.argmax(1)).mean() > 0.98


def test_integer_ops_cannot_be_removed(made_by_onnxruntime):
    """QLinear ops are left, each with its reason, and the model as it was, which is an error unless it is allowed."""
    insert = partial(gq.insert, made_by_onnxruntime / "QOperator.onnx", data=IMAGES, samples=2, requantize=True)
    with pytest.raises(EmptyResultError, match="integer op"):
        insert()
    result = insert(allow_empty=True)
    assert result.inserted == ()
    assert result.model is result.source
    reasons = [skip.reason for skip in result.skips if skip.rule == "requantize"]
    assert sum("integer op" in reason for reason in reasons) == sum(
        count
        for name, count in summarize_model(result.source).op_types.items()
        if name.startswith("QLinear") or name == "QGemm"
    )


@pytest.mark.parametrize("name", ["digits_cnn.onnx", "digits_rnn.onnx", "digits_nested.onnx", "digits_cnn.pb"])
def test_own_pairs_are_placed_again(name, tmp_path):
    """Inserted ops are removed and come back at the same places. Weights are the values of their integers."""
    first = gq.insert(MODELS / name, rules="fixed_point")
    path = first.save(tmp_path / f"once{Path(name).suffix}")
    again = gq.insert(path, rules="fixed_point", requantize=True)

    def uses_by_tensor(result):
        return {(pair.site.rule, str(use)) for pair in result.inserted for use in pair.site.uses}

    assert uses_by_tensor(again) == uses_by_tensor(first)
    scales = {str(use): pair.params.scale for pair in first.inserted for use in pair.site.uses}
    for pair in again.inserted:
        for use in pair.site.uses:
            assert np.array_equal(pair.params.scale, scales[str(use)]), use
    kinds = [summarize_model(result.model).op_types for result in (first, again)]
    assert kinds[0] == kinds[1]


def test_a_tensor_in_two_slots_is_removed_once(tmp_path):
    """An invalid dequantize op that reads its integers as the zero point too is removed without an error."""
    message = onnx.load(gq.insert(MODELS / "digits_cnn.onnx", rules="openvino", data=IMAGES).save(tmp_path / "q.onnx"))
    float_inputs = {node.output[0] for node in message.graph.node if node.op_type == "QuantizeLinear"}
    pairs = [
        node for node in message.graph.node if node.op_type == "DequantizeLinear" and node.input[0] in float_inputs
    ]
    for node in pairs:
        node.input[2] = node.input[0]
    onnx.save(message, tmp_path / "twice.onnx")
    model = gq.load(tmp_path / "twice.onnx")
    prepared, _ = prepare(model, ("requantize",))
    assert pairs
    assert not float_inputs & set(prepared.main.nx)


def test_other_types_are_placed_anew(tmp_path, made_by_onnxruntime):
    """int8 weights become int4 ones."""
    rules = write_int4_rules(tmp_path)
    inserted_result = gq.insert(made_by_onnxruntime / "QDQ.onnx", rules=rules, requantize=True)
    first = gq.insert(MODELS / "digits_cnn.onnx", rules=rules)
    types = [
        sorted((str(use), pair.params.type.name) for pair in result.inserted for use in pair.site.uses)
        for result in (inserted_result, first)
    ]
    assert types[0] == types[1]
    assert {name for _, name in types[0]} == {"uint4", "int8"}
    assert {reading.params.type.name for reading in summarize_model(inserted_result.model).quantization_ops} == {
        "uint4",
        "int8",
    }


def test_on_the_command_line(tmp_path, monkeypatch):
    """Both commands have the option; a plan that was made with it is applied without."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(MODELS / "digits_cnn.onnx", "model.onnx")

    run_cli("insert", "model.onnx", "--rules", "fixed_point", "-o", "once.onnx")
    again = run_cli("insert", "once.onnx", "--rules", "fixed_point", "--dry-run").stdout
    assert "stays unchanged. --requantize" in again.replace("\n", " ")
    plan_data = json.loads(run_cli("plan", "once.onnx", "--rules", "fixed_point", "--format", "json").stdout)
    assert plan_data["sites"] == []
    run_cli("plan", "once.onnx", "--rules", "fixed_point", "--requantize", "--format", "json", "-o", "plan.json")
    run_cli("insert", "once.onnx", "--plan", "plan.json", "-o", "planned.onnx")
    run_cli("insert", "once.onnx", "--rules", "fixed_point", "--requantize", "-o", "asked.onnx")
    assert Path("planned.onnx").read_bytes() == Path("asked.onnx").read_bytes()
    run_cli(
        "insert", "once.onnx", "--rules", "fixed_point", "--requantize", "--exclude", "*", "-o", "none.onnx", code=1
    )
    assert not Path("none.onnx").exists()
    failure = run_cli("insert", "once.onnx", "--plan", "plan.json", "--requantize", code=2)
    assert "--requantize and --algorithm create one" in failure.stderr


def test_an_output_that_is_a_dequantized_constant(tmp_path):
    """The output reads the constant, and the other weights are quantized again."""
    text = """<ir_version: 8, opset_import: ["" : 13]> g (float[2,64] x) => (float[2,64] y, float[1] c)
        <float s = {0.5}, uint8 z = {1}, uint8[1] q = {3}> { y = MatMul(x, w)  c = DequantizeLinear(q, s, z) }"""
    message = onnx.parser.parse_model(text)
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    message.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    onnx.save(message, tmp_path / "source.onnx")
    result = gq.insert(tmp_path / "source.onnx", requantize=True, rules="weight_only")
    y, c = run_onnx(result.save(tmp_path / "result.onnx"), {"x": np.ones((2, 64), np.float32)})
    assert len(result.inserted) == 1
    np.testing.assert_array_equal(c, [1.0])
    np.testing.assert_allclose(y[0], weight.sum(0), atol=0.5)

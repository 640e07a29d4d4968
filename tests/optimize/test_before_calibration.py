"""Algorithms that run before calibration: their gain, the cases without them, and the way back to the source."""

import json
import math
from dataclasses import replace

import numpy as np
import onnx
import onnx.parser
import pytest
from support.rule_files import input_rule, weight_rule

import graphquant as gq
from graphquant.api.strip import prove_stripped
from graphquant.formats import onnx as onnx_format
from graphquant.optimize import algorithm
from graphquant.optimize.algorithm import AlgorithmData, PreCalibrationState
from graphquant.optimize.algorithms import PRE_CALIBRATION_ALGORITHMS, apply_precalibration, apply_weight_clipping
from graphquant.optimize.channel_scaling import HAS_CHANNEL_SCALES
from graphquant.rules import ALGORITHM_NAMES

HEAD = '<ir_version: 8, opset_import: ["": 17]>\n'
WEIGHT_SCHEME = """
[scheme.weight]
dtype = "int8"
zero = "symmetric"
observe = "absmax"
PER
"""
ACTIVATION_SCHEME = """
[scheme.activation]
dtype = "uint8"
observe = "minmax"
"""
KINDS = "conv|depthwise_conv|matmul|gemm"
RULES = WEIGHT_SCHEME + weight_rule(KINDS)
ACTIVATIONS = ACTIVATION_SCHEME + input_rule(KINDS)
PER_TENSOR = RULES.replace("PER", "") + ACTIVATIONS
PER_CHANNEL = RULES.replace("PER", 'per = "channel"') + ACTIVATIONS
RNG = np.random.default_rng(4)
X = RNG.normal(size=(64, 3, 8, 8)).astype(np.float32)
UNEVEN = np.exp(np.linspace(-3, 3, 8)).astype(np.float32)
DEPTHWISE = (
    "a = Conv (x, w, b)\n r = Relu (a)\n d = Conv <group = 8> (r, k, e)\n s = Relu (d)\n y = Conv (s, v)",
    {
        "w": RNG.normal(size=(8, 3, 3, 3)) * UNEVEN[:, None, None, None],
        "b": RNG.normal(size=8) * UNEVEN,
        "k": RNG.normal(size=(8, 1, 3, 3)),
        "e": RNG.normal(size=8) * UNEVEN,
        "v": RNG.normal(size=(4, 8, 1, 1)) / UNEVEN[:, None, None],
    },
)
OUTLIERS = np.where(np.arange(8) == 2, 60, 1).astype(np.float32)
NORM = "l = LayerNormalization <axis = -1> (x, g, o)\n "
NORMED = {"g": OUTLIERS, "o": RNG.normal(size=8), "u": RNG.normal(size=(8, 6)), "v": RNG.normal(size=(8, 6))}
FOLDED = (f"{NORM} a = MatMul (l, u)\n c = MatMul (l, v)\n y = Add (a, c)", NORMED)
BRANCHED = (
    f"{NORM} a = MatMul (l, u)\n z = MatMul (a, t)\n y = Add (z, l)",
    {**NORMED, "t": RNG.normal(size=(6, 8))},
)


def save_image_model(tmp_path, body, values):
    """The path of a model of one input of images."""
    message = onnx.parser.parse_model(f"{HEAD} g (float[N,3,8,8] x) => (float y) {{\n {body}\n}}")
    message.graph.output[0].type.tensor_type.ClearField("shape")
    for name, value in values.items():
        if any(name in node.input for node in message.graph.node):
            message.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value, np.float32), name))
    onnx.save(onnx.shape_inference.infer_shapes(message), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=X[:48])
    return tmp_path / "model.onnx"


def unseen_outputs(model):
    """The output for samples that calibration did not see."""
    (actual,) = onnx_format.create_runner(model).run({"x": X[48:]}).values()
    return actual


def insert_and_measure(tmp_path, path, rules, *correct, **options):
    """Return the result of `insert`, and its SQNR."""
    options = {"min_sqnr": "none", **options}  # the algorithms alone, without a repair
    result = gq.insert(path, rules=[rules], data=str(tmp_path / "data.npz"), algorithms=correct, **options)
    result.save(tmp_path / "out.onnx", force=True)
    expected, actual = unseen_outputs(result.source), unseen_outputs(gq.load(tmp_path / "out.onnx"))
    return result, 10 * math.log10(np.square(expected).sum() / np.square(actual - expected).sum())


def applied_targets(result):
    """The streams that were scaled, or weights that were clipped."""
    return [entry.target for entry in result.algorithm_results if entry.applied]


def test_equalization_gains_with_one_scale_per_weight(tmp_path):
    """Both streams of an uneven depthwise net are scaled, which gains more than 10 dB."""
    path = save_image_model(tmp_path, *DEPTHWISE)
    _, before = insert_and_measure(tmp_path, path, PER_TENSOR)
    result, after = insert_and_measure(tmp_path, path, PER_TENSOR, "cross-layer-equalization")
    assert applied_targets(result) == ["r", "s"]
    assert after > before + 10


def test_equalization_leaves_weights_with_a_scale_per_channel(tmp_path):
    """Scales per channel even out weights by themselves, and the report says so."""
    result, _ = insert_and_measure(
        tmp_path, save_image_model(tmp_path, *DEPTHWISE), PER_CHANNEL, "cross-layer-equalization"
    )
    assert applied_targets(result) == []
    assert {entry.detail for entry in result.algorithm_results if entry.target in "rs"} == {HAS_CHANNEL_SCALES}


@pytest.mark.parametrize(("net", "ops"), [(FOLDED, 0), (BRANCHED, 1)])
def test_migration_gains_with_outliers(net, ops, tmp_path):
    """A norm with one large channel gains more than 6 dB, by its own constants or by a product where others read it."""
    path = save_image_model(tmp_path, *net)
    _, before = insert_and_measure(tmp_path, path, PER_CHANNEL)
    result, after = insert_and_measure(tmp_path, path, PER_CHANNEL, "smoothquant")
    assert "l" in applied_targets(result)
    assert after > before + 6
    assert sum(op.type == "Mul" for op in result.model.main.ops()) == ops
    again = gq.insert(path, plan=result.plan, data=str(tmp_path / "data.npz"))
    again.save(tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "out.onnx").read_bytes()


SCALED_NETS = pytest.mark.parametrize(
    ("net", "rules", "name"),
    [
        (DEPTHWISE, PER_TENSOR, "cross-layer-equalization"),
        (FOLDED, PER_CHANNEL, "smoothquant"),
        (BRANCHED, PER_CHANNEL, "smoothquant"),
    ],
)


@SCALED_NETS
def test_the_float_function_stays(net, rules, name, tmp_path):
    """The model that was scaled gives the bits of the source, and of float weights the source comes back as it was."""
    path = save_image_model(tmp_path, *net)
    source = gq.load(path)
    feeds = [{"x": X[k : k + 1]} for k in range(16)]
    samples = AlgorithmData(feeds=feeds[::2], validation_feeds=feeds[1::2], create_runner=onnx_format.create_runner)
    state = apply_precalibration(source, gq.plan(path, rules=[rules]), [name], samples)
    assert any(entry.applied for entry in state.results)
    assert np.array_equal(unseen_outputs(state.model), unseen_outputs(source))
    result, _ = insert_and_measure(tmp_path, path, rules, name, float_weights=True)
    assert applied_targets(result)
    stripped = gq.strip(tmp_path / "out.onnx")
    assert stripped.exact
    assert stripped.model.digest == source.digest


@SCALED_NETS
def test_strip_divides_by_the_factors(net, rules, name, tmp_path):
    """Stored integers and float constants give the values before scaling, except for their rounding."""
    path = save_image_model(tmp_path, *net)
    result, _ = insert_and_measure(tmp_path, path, rules, name, "bias-correction")
    assert any(entry.applied and entry.algorithm == name for entry in result.algorithm_results)
    stripped = gq.strip(tmp_path / "out.onnx")
    assert not stripped.exact
    assert stripped.exponents
    proof = prove_stripped(stripped, path)
    assert proof.other_differences.changes == ()
    assert proof.rounded_weights


@pytest.mark.parametrize(
    "factors",
    [
        "x",
        "[1]",
        '[[["","no",0],[1],"eJxjAAAAAQAB"]]',
        '[[["","NAME",0],[-1,1],"?"]]',
        '[[["","NAME",0],SHAPE,"AA=="]]',
    ],
)
def test_damaged_factors_are_ignored(factors, tmp_path):
    """Factors that cannot be read, or do not fit, leave the constants as they are."""
    path = save_image_model(tmp_path, *FOLDED)
    insert_and_measure(tmp_path, path, PER_CHANNEL, "smoothquant")
    message = onnx.load(tmp_path / "out.onnx")
    (entry,) = [entry for entry in message.metadata_props if entry.key == "graphquant.factors"]
    (_, name, _), shape, _ = json.loads(entry.value)[0]
    entry.value = factors.replace("NAME", name).replace("SHAPE", str(shape))
    onnx.save(message, tmp_path / "out.onnx")
    stripped = gq.strip(tmp_path / "out.onnx")
    assert not stripped.exponents
    assert not prove_stripped(stripped, path).holds


@pytest.mark.parametrize("validates", [True, False])
def test_callers_may_measure_the_result(validates, tmp_path, monkeypatch):
    """A repair measures its plans, so that a loss of one output does not undo the gain of the worst."""
    path = save_image_model(tmp_path, *FOLDED)
    feeds = [{"x": X[k : k + 1]} for k in range(16)]
    samples = AlgorithmData(feeds=feeds[::2], validation_feeds=feeds[1::2], create_runner=onnx_format.create_runner)
    monkeypatch.setattr(algorithm, "rejection_reason", lambda *_: "worse")
    plan = gq.plan(path, rules=[PER_CHANNEL])
    state = apply_precalibration(gq.load(path), plan, ["smoothquant"], samples, validates=validates)
    assert any(entry.applied for entry in state.results) != validates


def test_scaled_tensors_are_not_compared(tmp_path):
    """The check has no figures of scaled tensors and weights beside the float model's, which hold other numbers."""
    path = save_image_model(tmp_path, *DEPTHWISE)
    result, _ = insert_and_measure(tmp_path, path, PER_TENSOR, "cross-layer-equalization")
    sites = {entry.tensor.partition("/")[0].removesuffix(":0"): entry for entry in result.validation.comparison.sites}
    scaled = {name for name, entry in sites.items() if entry.note == "its channels were scaled before it was quantized"}
    assert scaled == {"r", "s", "w", "k", "v"}
    assert sites["r"].accumulated is None
    assert sites["r"].local > 20
    assert sites["k"].local is None


def test_algorithms_without_suitable_data(tmp_path):
    """Statistics and random data scale nothing. If only weights are quantized, no data is needed."""
    path = save_image_model(tmp_path, *DEPTHWISE)
    stats = gq.calibrate(path, data=str(tmp_path / "data.npz"), rules=[PER_TENSOR])
    algorithms = ("cross-layer-equalization", "smoothquant")
    for options, reason in (({"stats": stats}, "statistics"), ({"data": "random:16"}, "random data")):
        result = gq.insert(path, rules=[PER_TENSOR], algorithms=algorithms, **options)
        assert [entry.applied for entry in result.algorithm_results] == [False, False]
        assert all(reason in entry.detail for entry in result.algorithm_results)
    result = gq.insert(path, rules=[RULES.replace("PER", "")], algorithms=algorithms)
    assert applied_targets(result) == ["r", "s"]
    (skipped,) = (entry for entry in result.algorithm_results if entry.algorithm == "smoothquant")
    assert not skipped.applied
    assert "data" in skipped.detail


def test_what_gains_nothing_is_left_out(tmp_path, monkeypatch):
    """A correction after which no output gains is taken back, and the report says by how much it fell short."""
    monkeypatch.setattr(algorithm, "MIN_OUTPUT_GAIN_DB", 90.0)
    path = save_image_model(tmp_path, *FOLDED)
    result, after = insert_and_measure(tmp_path, path, PER_CHANNEL, "smoothquant")
    assert applied_targets(result) == []
    assert "no output gains 90 dB" in result.algorithm_results[-1].detail
    assert after == insert_and_measure(tmp_path, path, PER_CHANNEL)[1]


def test_weights_are_clipped(tmp_path):
    """With 4 bits and a few large weights clipping gains; a range that a plan gives stays."""
    values = {**DEPTHWISE[1], "v": RNG.laplace(size=(4, 8, 1, 1)), "w": RNG.standard_t(3, size=(8, 3, 3, 3))}
    path = save_image_model(tmp_path, DEPTHWISE[0], values)
    rules = PER_TENSOR.replace('dtype = "int8"', "bits = 4")
    _, before = insert_and_measure(tmp_path, path, rules)
    result, after = insert_and_measure(tmp_path, path, rules, "weight-clipping")
    assert sorted(applied_targets(result)) == ["k:0", "v:0", "w:0"]
    assert after > before + 0.5
    plan = gq.plan(path, rules=[rules])
    plan_with_ranges = replace(plan, sites=tuple(replace(site, range=(-1.0, 1.0)) for site in plan.sites))
    state = PreCalibrationState(model=gq.load(path), plan=plan_with_ranges)
    assert apply_weight_clipping(state, None) == state


def test_the_table_is_the_rule_files():
    """Each is known to rule files, before those that are made once scales are known."""
    assert tuple(PRE_CALIBRATION_ALGORITHMS) == ALGORITHM_NAMES[: len(PRE_CALIBRATION_ALGORITHMS)]

"""Ranges, ties and biases to scales and zero points."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.onnx_models import load_onnx
from support.plans import make_plan

from graphquant.errors import ModelError, UsageError
from graphquant.formats.onnx import load
from graphquant.ir import Graph, Model, Op, Output, Parameters, TensorRef, Use
from graphquant.numerics import LARGEST_VALUE, DynamicQParams, IntType, qparams_from_scale
from graphquant.observers import EMPTY_SKETCH, sketch_values
from graphquant.quantize import (
    FLOAT8_NOT_RUNNABLE,
    Site,
    Skip,
    SkipCode,
    explain_scale,
    saturates_like_clip,
    solve_scales,
    solver,
)
from graphquant.quantize.solver import RANGE_NOT_TRAINED
from graphquant.rules import ObserverConfig, Scheme
from graphquant.visualize.json_results import ParametersJson

UINT8 = Scheme(name="act", dtype="uint8", zero="asymmetric", family="onnx-qdq")
INT8 = Scheme(name="w", dtype="int8", narrow=True, observe=ObserverConfig(name="absmax"), family="onnx-qdq")
CHANNEL = replace(INT8, per="channel")
BIAS = Scheme(name="bias", dtype="int32", observe=ObserverConfig(name="bias"), family="onnx-qdq")
FIXED = ObserverConfig(name="fixed-point", exponent=-4)
WEIGHT = np.array([[1.0, -2.0, 0.0], [127.0, 0.5, 0.0]], np.float32)


def gemm(tmp_path, weight=WEIGHT, bias=(1.0, -0.25), opset=13):
    """X (1, 3) times the transposed weight (2, 3) plus bias."""
    bias = np.asarray(bias, np.float32)
    opsets = f'<ir_version: 8, opset_import: ["": {opset}]>'
    text = f"{opsets} g (float[1,3] x) => (float[1,2] y) {{ y = Gemm <transB = 1> (x, w, b) }}"
    message = onnx.parser.parse_model(text)
    message.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    message.graph.initializer.append(onnx.numpy_helper.from_array(bias, "b"))
    onnx.save(message, tmp_path / "model.onnx")
    return load(tmp_path / "model.onnx")


def main_graph_site(name, slot=0, *, reader="y", **changes):
    """A site of a tensor of the main graph for one use."""
    built = {"tensor": TensorRef("", name), "uses": (Use("", reader, slot),), "graph": "", "scheme": UINT8}
    return Site(**{**built, **changes})


def plain_params(params):
    """Scale and zero point as plain numbers."""
    return params.scale.tolist(), params.zero_point.tolist()


X, W = main_graph_site("x"), main_graph_site("w", 1, scheme=CHANNEL, axis=0, parameter=True)


def test_denormal_weights_are_treated_as_zeros(tmp_path):
    """A tensor of denormals gets what zeros get, with a word on it; one with a normal value in it its own scale."""
    solution = solve_scales(gemm(tmp_path, np.full((2, 3), 1e-42, np.float32)), make_plan(W), {})
    assert (plain_params(solution.params[0]), solution.skips) == (([1.0, 1.0], [0, 0]), {})
    (change,) = solution.changes
    assert change.tensor == W.tensor
    assert re.search(" 1e-42,.*denormal", change.message)
    mixed = solve_scales(gemm(tmp_path, np.array([[1e-42] * 3, [127.0] * 3], np.float32)), make_plan(W), {})
    assert plain_params(mixed.params[0]) == ([pytest.approx(2.0**-126), 1.0], [0, 0])
    assert mixed.changes == ()


@pytest.mark.parametrize(
    ("first", "others", "scale"),
    [(0.0, 0.0, 1.0), (2.0**-126, 0.0, 2.0**-126), (-127.0, 1e-42, 1.0), (127.0, -1e-42, 1.0)],
)
def test_weights_with_a_normal_value_or_of_zeros_are_unchanged(tmp_path, first, others, scale):
    """A single normal value of either sign, also the smallest one, is quantized. Zeros are zeros already."""
    weight = np.full((2, 3), others, np.float32)
    weight[0, 0] = first
    solution = solve_scales(gemm(tmp_path, weight), make_plan(replace(W, scheme=INT8, axis=None)), {})
    assert (plain_params(solution.params[0]), solution.changes) == ((scale, 0), ())


def weight_changes(tmp_path, *sites, weight=WEIGHT, opset=13):
    """Return tensor, counts, range and rule of each change that the solver reports for the weights of a Gemm."""
    changes = solve_scales(gemm(tmp_path, weight, opset=opset), make_plan(*sites), {}).changes
    return [re.findall(r"w:0|\d of \d|\[.*?\]|'\w*'|clipped|channels", str(change)) for change in changes]


def test_weights_outside_a_fixed_range_are_reported(tmp_path):
    """Values of a weight beyond a rule's fixed range by more than half a step are counted. Without any, nothing is."""
    fixed = replace(W, scheme=replace(INT8, observe=FIXED), axis=None, rule="mine")  # up to 127 / 16 = 7.9375
    clipped = ["w:0", "1 of 6", "[-7.9375, 7.9375]", "'mine'", "clipped"]
    assert weight_changes(tmp_path, fixed) == [clipped]
    without_rule = [word for word in clipped if word != "'mine'"]
    assert weight_changes(tmp_path, replace(fixed, rule="")) == [without_rule]
    edge = np.array([[7.9375, -7.96, 7.96], [-8.0, 8.0, 100.0]], np.float32)
    clipped[1] = "3 of 6"
    assert weight_changes(tmp_path, fixed, weight=edge) == [clipped]
    assert weight_changes(tmp_path, fixed, weight=edge.clip(-7.96, 7.96)) == []
    blocks = replace(fixed, scheme=replace(fixed.scheme, per="block", block_size=2), axis=1)
    assert weight_changes(tmp_path, blocks, weight=edge, opset=21) == [clipped]


def test_weights_outside_the_range_of_the_plan_are_reported(tmp_path):
    """The plan's own range or scales clip too; scales of channels are held against their channels."""
    tensor = replace(W, scheme=INT8, axis=None, range=(-1.27, 1.27), rule="mine")
    assert weight_changes(tmp_path, tensor) == [["w:0", "2 of 6", "[-1.27, 1.27]", "clipped"]]
    channels = replace(W, scale=(0.01, 1.0))
    assert weight_changes(tmp_path, channels) == [["w:0", "1 of 6", "[-127, 127]", "channels", "clipped"]]
    assert weight_changes(tmp_path, W) == []
    half_a_step = np.array([[63.75, -63.75, 0.0], [63.8125, 0.0, 0.0]], np.float32)
    tensor = replace(tensor, range=None, scale=(0.5,))
    assert weight_changes(tmp_path, tensor, weight=half_a_step) == [["w:0", "1 of 6", "[-63.5, 63.5]", "clipped"]]


def test_weights_have_the_range_of_their_values(tmp_path):
    """Per channel and per tensor, the largest magnitude is 127 steps."""
    model = gemm(tmp_path)
    assert plain_params(solve_scales(model, make_plan(W), {}).params[0]) == ([pytest.approx(2 / 127), 1.0], [0, 0])
    solution = solve_scales(model, make_plan(replace(W, scheme=INT8, axis=None)), {})
    assert plain_params(solution.params[0]) == (1.0, 0)
    assert (solution.skips, solution.notes) == ({}, {})


def test_weights_have_the_range_of_least_error_in_each_channel(tmp_path):
    """Observers that need a histogram make one of each channel, also of a single channel."""
    values = np.random.default_rng(0).standard_normal((2, 500)).astype(np.float32)
    scheme = replace(CHANNEL, observe=ObserverConfig(name="mse"))
    for rows in (2, 1):
        message = onnx.parser.parse_model(
            f'<ir_version: 8, opset_import: ["": 13]> g (float[1,500] x) => (float[1,{rows}] y)'
            " { y = Gemm <transB = 1> (x, w) }"
        )
        message.graph.initializer.append(onnx.numpy_helper.from_array(values[:rows], "w"))
        onnx.save(message, tmp_path / "model.onnx")
        solution = solve_scales(load(tmp_path / "model.onnx"), make_plan(replace(W, scheme=scheme)), {}).params[0]
        for row, scale in zip(values[:rows], solution.scale, strict=True):
            shares = np.linspace(0.2, 1, 400)[:, None] * np.abs(row).max() / scheme.type.limits(narrow=scheme.narrow)[1]
            errors = np.square(row - np.clip(np.rint(row / shares), -127, 127) * shares).sum(1)
            error = np.square(row - np.clip(np.rint(row / scale), -127, 127) * scale).sum()
            assert error <= 1.01 * errors.min()
    tensor = replace(W, axis=None, scheme=replace(scheme, per="tensor"))  # of one channel: the same values
    assert solve_scales(load(tmp_path / "model.onnx"), make_plan(tensor), {}).params[0].scale == solution.scale[0]


def test_activations_have_the_range_of_their_sketch(tmp_path):
    """Lowest and highest value, widened to hold 0."""
    solution = solve_scales(gemm(tmp_path), make_plan(X), {TensorRef("", "x"): sketch_values(np.array([-1.0, 1.55]))})
    assert plain_params(solution.params[0]) == (pytest.approx(0.01), 100)
    solution = solve_scales(gemm(tmp_path), make_plan(X), {TensorRef("", "x"): sketch_values(np.array([1.0, 2.55]))})
    assert plain_params(solution.params[0]) == (pytest.approx(0.01), 0)


def test_tensors_without_samples_are_skipped(tmp_path):
    """No sketch, or an empty one, is a skip with its reason; only NaN another."""
    model = gemm(tmp_path)
    for sketches in ({}, {TensorRef("", "x"): EMPTY_SKETCH}):
        skip = solve_scales(model, make_plan(X), sketches).skips[0]
        assert skip.code is SkipCode.RANGE
        assert "no calibration sample" in skip.reason
    assert solve_scales(model, make_plan(X), {}, {X.tensor: "unseen"}).skips[0].reason == "unseen"
    blank = solve_scales(model, make_plan(X), {TensorRef("", "x"): sketch_values(np.zeros((0, 3)))})
    assert (blank.skips[0].code, "empty" in blank.skips[0].reason) == (SkipCode.RANGE, True)
    nothing = solve_scales(model, make_plan(X), {TensorRef("", "x"): sketch_values(np.array([np.nan]))})
    assert (nothing.skips[0].code, "no finite value" in nothing.skips[0].reason) == (SkipCode.RANGE, True)
    assert (nothing.params, nothing.notes) == ({}, {})


def test_nan_and_infinity_in_activations(tmp_path):
    """NaN is left out of the range with a word on it; a tensor that takes infinite values stays float."""
    solution = solve_scales(
        gemm(tmp_path), make_plan(X), {TensorRef("", "x"): sketch_values(np.array([np.nan, 2.55, 0.0]))}
    )
    assert plain_params(solution.params[0]) == (pytest.approx(0.01), 0)
    assert solution.notes == {0: ("1 NaN values were ignored",)}
    solution = solve_scales(
        gemm(tmp_path), make_plan(X), {TensorRef("", "x"): sketch_values(np.array([np.nan, -np.inf, 2.55]))}
    )
    assert (solution.skips[0].code, "infinite" in solution.skips[0].reason) == (SkipCode.RANGE, True)
    assert (solution.params, solution.notes) == ({}, {})


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_with_nan(tmp_path, value):
    """A weight that holds NaN, or a bias that is not finite, has no scale: an error that names it."""
    with pytest.raises(ModelError, match=r"\bw:0\b.* NaN"):
        solve_scales(gemm(tmp_path, np.array([[value, 0, 0], [np.nan, 1, 1]], np.float32)), make_plan(W), {})
    bias = main_graph_site("b", 2, scheme=BIAS, parameter=True)
    with pytest.raises(ModelError, match=r"\bb:0\b.* NaN"):
        solve_scales(gemm(tmp_path, bias=(value, 0.0)), make_plan(replace(X, range=(0.0, 1.0)), W, bias), {})


def test_constants_with_infinity_are_skipped(tmp_path):
    """A constant that holds infinity, as masks do, is left with that reason, as an activation would be."""
    solution = solve_scales(gemm(tmp_path, np.full((2, 3), -np.inf, np.float32)), make_plan(W), {})
    assert (solution.params, solution.skips[0].code) == ({}, SkipCode.RANGE)


@pytest.mark.parametrize(
    ("values", "skipped"),
    [
        ([-10000.0, -9990.0, 3.0, -7.0], True),  # scores and a mask
        ([-1e9, 3.0, -7.0], True),
        ([-1e9, 0.0, 0.0], False),  # a mask alone: two integers represent it
        ([-3.4e38, 0.0, 0.0], True),  # rounding could make it infinite
        ([1e-30, 1e-6, 1.0], False),  # small values beside ordinary ones, as probabilities are
        ([3.0, 70.0, 2500.0], False),  # a large activation
        ([1.0, 200.0, 4000.0, 60000.0], False),  # values of all sizes
    ],
)
def test_activations_with_values_of_masks(tmp_path, values, skipped):
    """Activations with values that stand for infinity beside ordinary ones are skipped."""
    scheme = replace(UINT8, observe=ObserverConfig(name="auto"))
    sketches = {TensorRef("", "x"): sketch_values(np.array(values, np.float32), bits=7)}
    solution = solve_scales(gemm(tmp_path), make_plan(replace(X, scheme=scheme)), sketches)
    assert ([skip.code for skip in solution.skips.values()] == [SkipCode.RANGE]) == skipped
    assert bool(solution.params) != skipped


@pytest.mark.parametrize(("value", "skipped"), [(-1e9, True), (-10000.0, True), (4000.0, False)])
def test_constants_with_values_of_masks_are_skipped(tmp_path, value, skipped):
    """A constant of huge values and zeros that is added is skipped, also if zeros come first. A weight is not."""
    mask = np.array([[0.0, value, 0.0], [value, value, 0.0]], np.float32)
    plan = make_plan(replace(W, scheme=INT8, axis=None))
    added = load_onnx(tmp_path, "g (float[2,3] x) => (float[2,3] y) { y = Add(x, w) }", {"w": mask})
    solution = solve_scales(added, plan, {})
    assert [skip.code for skip in solution.skips.values()] == [SkipCode.RANGE] * skipped
    weighted = solve_scales(gemm(tmp_path, mask), plan, {})
    assert (plain_params(weighted.params[0])[0], weighted.skips) == (pytest.approx(abs(value) / 127), {})


@pytest.mark.parametrize(
    "given", [{"range": (-1.0, 1.0)}, {"scale": (0.5, 0.5)}, {"scheme": replace(CHANNEL, observe=FIXED)}]
)
def test_explicit_ranges_do_not_hide_nan(tmp_path, given):
    """A range or scale that is given makes no number of a weight's NaN, and leaves one with infinity float."""
    nan, infinite = (np.array([[value, 0, 0], [1, 1, 1]], np.float32) for value in (np.nan, np.inf))
    with pytest.raises(ModelError, match=r"\bw:0\b.* NaN"):
        solve_scales(gemm(tmp_path, nan), make_plan(replace(W, **given)), {})
    solution = solve_scales(gemm(tmp_path, infinite), make_plan(replace(W, **given)), {})
    assert (solution.params, solution.skips[0].code) == ({}, SkipCode.RANGE)


@pytest.mark.parametrize("value", [None, np.array([["a"] * 3] * 2, object)])
def test_weights_without_a_usable_value(tmp_path, monkeypatch, value):
    """An unknown value, or strings in place of numbers, is a skip. A range or scale that is given needs no value."""
    model = gemm(tmp_path)
    monkeypatch.setattr(Parameters, "value", lambda *_: value)
    solution = solve_scales(model, make_plan(W), {})
    assert (solution.params, solution.skips[0].code) == ({}, SkipCode.RANGE)
    for changes in ({"range": (-63.5, 63.5)}, {"scale": (0.5, 0.5)}):
        solution = solve_scales(model, make_plan(replace(W, **changes)), {})
        assert (plain_params(solution.params[0]), solution.skips) == (([0.5, 0.5], [0, 0]), {})
        assert solution.changes == ()


@pytest.mark.parametrize("changes", [{}, {"range": (-1.0, 1.0)}, {"scale": (0.5, 0.5)}])
@pytest.mark.parametrize("shape", [(2,), (3, 3), (2, 3, 1)])
def test_weights_of_another_shape_than_declared_are_skipped(tmp_path, monkeypatch, changes, shape):
    """A checkpoint may hold another shape. Scales of channels do not fit it; one scale fits any shape."""
    model = gemm(tmp_path)
    monkeypatch.setattr(Parameters, "value", lambda *_: np.ones(shape, np.float32))
    for axis in (0, 1) if "scale" not in changes else (0,):
        solution = solve_scales(model, make_plan(replace(W, axis=axis, **changes)), {})
        assert (solution.params, solution.skips[0].code) == ({}, SkipCode.RANGE)
    solution = solve_scales(model, make_plan(replace(W, axis=None, scheme=INT8)), {})
    assert plain_params(solution.params[0]) == (pytest.approx(1 / 127), 0)


@pytest.mark.parametrize("changes", [{"scheme": INT8, "axis": None}, {}, {"range": (-1.0, 1.0)}])
def test_empty_weights(tmp_path, changes):
    """A weight without elements is skipped, also if no value is needed for the range of its channels."""
    solution = solve_scales(gemm(tmp_path, np.zeros((0, 3), np.float32)), make_plan(replace(W, **changes)), {})
    assert (solution.params, solution.skips[0].code) == ({}, SkipCode.RANGE)


def test_scales_of_the_plan(tmp_path):
    """A range wins over statistics, a scale over everything; per channel one range stands for all."""
    model, sketches = gemm(tmp_path), {TensorRef("", "x"): sketch_values(np.array([-9.0, 9.0]))}
    assert plain_params(solve_scales(model, make_plan(replace(X, range=(-1.0, 1.55))), sketches).params[0]) == (
        pytest.approx(0.01),
        100,
    )
    given_scale = replace(X, scale=(0.5,), zero_point=(7,), range=(0.0, 1.0))
    assert plain_params(solve_scales(model, make_plan(given_scale), sketches).params[0]) == (0.5, 7)
    assert plain_params(solve_scales(model, make_plan(replace(W, range=(-127.0, 127.0))), {}).params[0]) == (
        [1.0, 1.0],
        [0, 0],
    )
    assert plain_params(solve_scales(model, make_plan(replace(W, scale=(0.5, 2.0))), {}).params[0]) == (
        [0.5, 2.0],
        [0, 0],
    )
    symmetric = replace(X, scheme=replace(UINT8, zero="symmetric"), scale=(0.5,))
    assert plain_params(solve_scales(model, make_plan(symmetric), {}).params[0]) == (0.5, 128)


def test_fixed_ranges_and_powers_of_two(tmp_path):
    """A rule's own range needs no data; a power-of-two scale is one."""
    fixed = replace(X, scheme=replace(UINT8, observe=ObserverConfig(name="fixed", low=0.0, high=2.55)))
    assert plain_params(solve_scales(gemm(tmp_path), make_plan(fixed), {}).params[0]) == (pytest.approx(0.01), 0)
    power = replace(fixed, scheme=replace(fixed.scheme, scale="power-of-two"))
    assert plain_params(solve_scales(gemm(tmp_path), make_plan(power), {}).params[0]) == (2.0**-6, 0)
    point = replace(W, scheme=replace(CHANNEL, observe=ObserverConfig(name="fixed-point", exponent=-4)))
    assert plain_params(solve_scales(gemm(tmp_path), make_plan(point), {}).params[0]) == ([0.0625, 0.0625], [0, 0])


def test_the_smallest_range():
    """A range narrower than the scheme's least is widened upward, after 0.0 is in it."""
    scheme = {"dtype": "uint8", "zero": "asymmetric", "smallest_range": 1e-4}
    cases = [((0.0, 0.0), 0.0, 1e-4), ((3e-5, 4e-5), 0.0, 1e-4), ((-5e-5, -1e-5), -5e-5, 5e-5), ((0.0, 2.0), 0.0, 2.0)]
    for (low, high), lower, upper in cases:
        bias_site = main_graph_site("t0", reader="t1", range=(low, high), scheme=Scheme(family="onnx-qdq", **scheme))
        scale, _ = plain_params(solve_scales(chain(1), make_plan(bias_site), {}).params[0])
        assert scale == np.float32((upper - lower) / 255), (low, high)


@pytest.mark.parametrize("zero", ["symmetric", "asymmetric"])
def test_a_channel_of_zeros_has_the_range_of_the_widest(tmp_path, zero):
    """Its scale is the step of its bias; a weight without another value than 0 keeps a scale of 1."""
    weight = np.array([[0.0, 0.0, 0.0], [0.0, 1.27, -0.5]], np.float32)
    observe = ObserverConfig(name="minmax")
    site = replace(W, scheme=replace(CHANNEL, zero=zero, narrow=zero == "symmetric", observe=observe))
    scales, zeros = plain_params(solve_scales(gemm(tmp_path, weight), make_plan(site), {}).params[0])
    assert (scales[0], zeros[0]) == (scales[1], zeros[1])
    width, steps = (1.77, 255) if zero == "asymmetric" else (2.54, 254)
    assert scales[1] == pytest.approx(width / steps)
    equal = np.array([[1.0, 1.0, 1.0], [0.1, -0.1, 0.0]], np.float32)
    scales, _ = plain_params(solve_scales(gemm(tmp_path, equal), make_plan(site), {}).params[0])
    assert scales == pytest.approx([1 / (255 if zero == "asymmetric" else 127), 0.2 / (255 - (zero == "symmetric"))])
    empty = solve_scales(gemm(tmp_path, np.zeros_like(weight)), make_plan(site), {}).params[0]
    assert plain_params(empty)[0] == [1.0, 1.0]


def test_a_sketch_per_channel_serves_a_site_per_tensor_and_the_other_way_round(tmp_path):
    """The union of the channels, or the same range for each."""
    sketches = {TensorRef("", "x"): sketch_values(np.array([[-1.0, 1.55, 0.0]]), 1)}
    assert plain_params(solve_scales(gemm(tmp_path), make_plan(X), sketches).params[0]) == (pytest.approx(0.01), 100)
    channels = replace(X, scheme=replace(UINT8, per="channel"), axis=1)
    sketches = {TensorRef("", "x"): sketch_values(np.array([0.0, 2.55]))}
    assert solve_scales(gemm(tmp_path), make_plan(channels), sketches).params[0].scale.tolist() == pytest.approx(
        [0.01] * 3
    )


def test_biases(tmp_path):
    """The scale is input scale times weight scale, per channel or per tensor, with zero point 0."""
    x, channel, tensor = (
        replace(X, scale=(0.5,)),
        replace(W, scale=(0.25, 2.0)),
        replace(W, scheme=INT8, axis=None, scale=(0.25,)),
    )
    bias_site = main_graph_site("b", 2, scheme=BIAS, parameter=True)
    many = replace(bias_site, scheme=replace(BIAS, per="channel"), axis=0)
    model = gemm(tmp_path)
    assert plain_params(solve_scales(model, make_plan(many, x, channel), {}).params[0]) == ([0.125, 1.0], [0, 0])
    assert plain_params(solve_scales(model, make_plan(x, tensor, bias_site), {}).params[2]) == (0.125, 0)
    assert plain_params(solve_scales(model, make_plan(x, tensor, many), {}).params[2]) == (0.125, 0)
    for skip in (
        solve_scales(model, make_plan(x, channel, bias_site), {}).skips[2],
        solve_scales(model, make_plan(x, many), {}).skips[1],
    ):
        assert (skip.tensor, skip.code) == (TensorRef("", "b"), SkipCode.BIAS)
    assert solve_scales(model, make_plan(X, channel, many), {}).skips.keys() == {0, 2}


def test_biases_that_do_not_fit(tmp_path):
    """More than int32 holds, or a scale that is no normal float32, keeps the bias float and says so."""
    bias_site = main_graph_site("b", 2, scheme=BIAS, parameter=True)
    tensor = replace(W, scheme=INT8, axis=None, scale=(1e-5,))
    solution = solve_scales(
        gemm(tmp_path, bias=(1e9, 0.0)), make_plan(replace(X, scale=(1e-5,)), tensor, bias_site), {}
    )
    assert solution.skips[2].code is SkipCode.BIAS
    assert re.search(r" 1e\+19 steps .* int32", solution.skips[2].reason)
    solution = solve_scales(
        gemm(tmp_path), make_plan(replace(X, scale=(1e-30,)), replace(tensor, scale=(1e-30,)), bias_site), {}
    )
    assert solution.skips.keys() == {2}
    assert solution.skips[2].code is SkipCode.BIAS


def test_a_plan_may_give_the_scale_or_range_of_a_bias(tmp_path):
    """The plan wins over input scale times weight scale, also if it clips the values."""
    bias_site = main_graph_site("b", 2, scheme=BIAS, parameter=True)
    given_scale, given_range = replace(bias_site, scale=(2.0**-32,)), replace(bias_site, range=(-2.0, 2.0))
    solution = solve_scales(gemm(tmp_path, bias=(0.25, 1.0)), make_plan(given_scale), {})
    assert (plain_params(solution.params[0]), solution.skips) == ((2.0**-32, 0), {})
    assert [re.search(r"\d of \d", change.message)[0] for change in solution.changes] == ["1 of 2"]
    solution = solve_scales(gemm(tmp_path), make_plan(given_range), {})
    assert plain_params(solution.params[0]) == (pytest.approx(2.0**-30), 0)
    (sentence,) = explain_scale(gemm(tmp_path), make_plan(bias_site), 0)
    assert "input scale and weight scale" in sentence


def test_a_bias_without_elements_has_a_scale(tmp_path):
    """No value is beyond int32."""
    model = gemm(tmp_path, np.zeros((0, 3), np.float32), bias=())
    weight = replace(W, scheme=INT8, axis=None, scale=(0.25,))
    bias_site = main_graph_site("b", 2, scheme=BIAS, parameter=True)
    solution = solve_scales(model, make_plan(replace(X, scale=(0.5,)), weight, bias_site), {})
    assert (plain_params(solution.params[2]), solution.skips) == ((0.125, 0), {})


def test_scales_of_float16_weights_are_float16(tmp_path):
    """The model stores each scale in the type of its weight."""
    text = "g (float16[1,3] x) => (float16[1,2] y) { y = Gemm <transB = 1> (x, w) }"
    model = load_onnx(tmp_path, text, {"w": WEIGHT.astype(np.float16)}, opset=19)
    scale = solve_scales(model, make_plan(W), {}).params[0].scale
    assert scale.tolist() == [float(np.float16(2 / 127)), 1.0]


@pytest.mark.parametrize("value", [None, np.array(1, np.float32), np.ones(3, np.float32), np.array(["a", "b"], object)])
def test_biases_of_another_shape_or_type_than_declared_stay_float(tmp_path, monkeypatch, value):
    """A checkpoint may hold another number of channels, strings, or nothing."""
    real = Parameters.value
    monkeypatch.setattr(Parameters, "value", lambda self, tensor: value if tensor.op == "b" else real(self, tensor))
    bias_site = main_graph_site("b", 2, scheme=replace(BIAS, per="channel"), axis=0, parameter=True)
    sites = (replace(X, scale=(0.5,)), replace(W, scale=(0.25, 2.0)), bias_site)
    solution = solve_scales(gemm(tmp_path), make_plan(*sites), {})
    assert {index: skip.code for index, skip in solution.skips.items()} == {2: SkipCode.BIAS}


def test_biases_up_to_the_last_integer(tmp_path):
    """2**31 - 128, the largest float32 that fits int32, is quantized. 2**31, one step beyond int32, is not."""
    sites = replace(X, scale=(1.0,)), replace(W, scheme=INT8, axis=None, scale=(1.0,))
    bias_site = main_graph_site("b", 2, scheme=BIAS, parameter=True)
    for largest, skipped in ((2.0**31 - 128, set()), (-(2.0**31) + 128, set()), (2.0**31, {2}), (-(2.0**31), {2})):
        assert (
            solve_scales(gemm(tmp_path, bias=(largest, 0.0)), make_plan(*sites, bias_site), {}).skips.keys() == skipped
        )


def chain(count, ring=False):
    """t0 -> t1 -> ... -> t<count>, float vectors; a ring feeds the last into slot 1 of t1."""
    model = Model(format="onnx")
    graph = model.graphs[""] = Graph("", model.graphs)
    outputs = (Output("", "float32", (2,)),)
    last = graph.add_op(Op(name="t0", kind="input", type="Input", roles=(), outputs=outputs))
    for k in range(1, count + 1):
        last = graph.add_op(Op(name=f"t{k}", kind="merge", type="Merge", outputs=outputs), [last])
    graph.add_op(Op(name="@y", kind="output", type="Output"), [last])
    if ring:
        graph.set_source(Use("", "t1", 1), last)
    return model


def tied(count, ring=False):
    """A site for each of t0 ... t<count>, each tied to the one before."""
    sites = [main_graph_site("t0", reader="t1", scheme=UINT8)]
    for k in range(1, count + 1):
        reader = f"t{k + 1}" if k < count else "@y"
        sites.append(main_graph_site(f"t{k}", reader=reader, tie=(Use("", f"t{k}", 0),)))
    if ring:
        sites[1] = replace(sites[1], tie=(*sites[1].tie, Use("", "t1", 1)))
        sites[-1] = replace(sites[-1], uses=(*sites[-1].uses, Use("", "t1", 1)))
    return make_plan(*sites)


def sketches_of(**ranges):
    """A sketch of (low, high) for each tensor named."""
    return {TensorRef("", name): sketch_values(np.array(ends)) for name, ends in ranges.items()}


def tensors_in_notes(solution):
    """Return the other tensors that each note on a site names."""
    return {site: [re.findall(r"t\d:0", note) for note in notes] for site, notes in solution.notes.items()}


def test_ties_share_one_scale():
    """All members get the union of the ranges, exactly one scale and zero point."""
    solution = solve_scales(chain(2), tied(2), sketches_of(t0=(0.0, 1.0), t1=(-1.0, 0.5), t2=(0.0, 1.55)))
    assert [plain_params(solution.params[k]) for k in range(3)] == [(pytest.approx(0.01), 100)] * 3
    assert solution.params[0] is solution.params[1] is solution.params[2]
    assert tensors_in_notes(solution) == {0: [["t1:0"]], 1: [["t0:0"]], 2: [["t0:0"]]}


@pytest.mark.parametrize(("steps", "is_fixed"), [(0.45, True), (0.55, False)])
@pytest.mark.parametrize("end", ["low", "high"])
def test_half_a_step_beyond_a_fixed_range(steps, is_fixed, end):
    """Tied sites get the fixed range of one, unless the range of another exceeds it by more than half a step."""
    tied_plan = tied(1)
    fixed = replace(UINT8, observe=ObserverConfig(name="fixed", low=-12.7, high=12.8))
    excess = np.array([-0.1 * steps, 0.0] if end == "low" else [0.0, 0.1 * steps])
    solution = solve_scales(
        chain(1),
        make_plan(replace(tied_plan.sites[0], scheme=fixed), tied_plan.sites[1]),
        {TensorRef("", "t1"): sketch_values(np.array([-12.7, 12.8]) + excess)},
    )
    assert plain_params(solution.params[1]) == plain_params(solution.params[0])
    assert (float(solution.params[1].scale) == np.float32(0.1)) == is_fixed
    assert len(solution.conflicts) == (not is_fixed)


def test_narrow_and_wide_ranges_share_no_scale():
    """Tied sites whose schemes differ in `narrow`, `zero` or `scale` alone keep scales of their own."""
    wide = replace(INT8, narrow=False, observe=ObserverConfig(name="minmax"))
    for scheme, scales in (
        (replace(wide, narrow=True), (1 / 128, 1 / 127)),
        (replace(wide, zero="asymmetric"), (1 / 128, 2 / 255)),
        (replace(wide, scale="power-of-two"), (1 / 128, 1 / 64)),
        (replace(wide, dtype="int16"), (1 / 128, 1 / 32767)),
        (replace(wide, observe=ObserverConfig(name="absmax")), (1 / 127, 1 / 127)),
    ):
        tied_plan = tied(1)
        mixed = make_plan(
            *(replace(entry, scheme=kind) for entry, kind in zip(tied_plan.sites, (wide, scheme), strict=True))
        )
        solution = solve_scales(chain(1), mixed, sketches_of(t0=(-1.0, 0.5), t1=(-1.0, 1.0)))
        assert [float(solution.params[k].scale) for k in (0, 1)] == pytest.approx(scales)
        assert len(solution.conflicts) == (scales[0] != scales[1])


def test_skips_follow_ties():
    """A chain whose first member was skipped is skipped to its end; a member in the middle ends it there."""
    solution = solve_scales(chain(3), tied(3), sketches_of(t1=(0, 1), t2=(0, 1), t3=(0, 1)))
    assert [solution.skips[k].code for k in range(4)] == [SkipCode.RANGE, *[SkipCode.TIE] * 3]
    assert not solution.params
    assert not solution.notes
    solution = solve_scales(chain(3), tied(3), sketches_of(t0=(0, 1), t1=(0, 1), t3=(0, 1)))
    assert solution.params.keys() == {0, 1}
    assert [solution.skips[k].code for k in (2, 3)] == [SkipCode.RANGE, SkipCode.TIE]


def test_rings_of_ties():
    """A ring lives by what enters it, not by itself."""
    everywhere = sketches_of(t0=(0, 1), t1=(0, 2), t2=(0, 1))
    assert solve_scales(chain(2, ring=True), tied(2, ring=True), everywhere).params.keys() == {0, 1, 2}
    del everywhere[TensorRef("", "t0")]
    assert solve_scales(chain(2, ring=True), tied(2, ring=True), everywhere).params == {}


def test_scales_of_the_plan_reach_tied_sites():
    """One scale in an edited plan is that of the whole group, without any data; two of them say so."""
    tied_plan = tied(2)
    solution = solve_scales(
        chain(2), make_plan(replace(tied_plan.sites[0], scale=(0.5,), zero_point=(9,)), *tied_plan.sites[1:]), {}
    )
    assert [plain_params(solution.params[k]) for k in range(3)] == [(0.5, 9)] * 3
    assert solution.skips == {}
    (note,) = solution.notes[1]
    assert re.search("shares the scale .* t0:0$", note)
    sentences = explain_scale(chain(2), solution.plan, 1, solution)  # none on a range of its own
    assert sentences == (note, "scale 0.5, range [-4.5, 123]")
    plan_with_scales = make_plan(
        replace(tied_plan.sites[0], scale=(0.5,)), replace(tied_plan.sites[1], scale=(0.25,)), tied_plan.sites[2]
    )
    solution = solve_scales(chain(2), plan_with_scales, {})
    assert plain_params(solution.params[1]) == (0.25, 0)
    (note,) = solution.notes[1]
    assert re.search("t0:0,.* another scale", note)
    [conflict] = solution.conflicts
    assert re.findall(r"\S+:0|0\.\d+", str(conflict)) == ["t1:0", "0.25", "t0:0", "0.5"]


def test_ties_between_different_schemes():
    """A tie overrides no rule: each keeps a scale of its own type, and a note says so."""
    tied_plan = tied(1)
    mixed = make_plan(
        tied_plan.sites[0], replace(tied_plan.sites[1], scheme=replace(INT8, observe=ObserverConfig(name="minmax")))
    )
    solution = solve_scales(chain(1), mixed, sketches_of(t0=(0.0, 2.55), t1=(-1.27, 1.0)))
    assert [solution.params[k].type.name for k in (0, 1)] == ["uint8", "int8"]
    assert [plain_params(solution.params[k]) for k in (0, 1)] == [(pytest.approx(0.01), 0)] * 2
    assert solution.notes.keys() == {1}
    assert re.search("t0:0,.* scheme differs", *solution.notes[1])


def test_ties_of_equal_schemes_beside_another_are_no_conflict():
    """Only the tie between the two schemes is a conflict. The sites of one scheme share their scale."""
    tied_plan, scheme = tied(2), replace(INT8, observe=ObserverConfig(name="minmax"))
    mixed = make_plan(tied_plan.sites[0], *(replace(tied_site, scheme=scheme) for tied_site in tied_plan.sites[1:]))
    solution = solve_scales(chain(2), mixed, sketches_of(t0=(0.0, 2.55), t1=(-1.27, 1.0), t2=(-2.54, 1.0)))
    assert [plain_params(solution.params[k]) for k in range(3)] == [
        (pytest.approx(scale), 0) for scale in (0.01, 0.02, 0.02)
    ]
    assert [conflict.tensors for conflict in solution.conflicts] == [(TensorRef("", "t0"), TensorRef("", "t1"))]
    assert tensors_in_notes(solution) == {1: [["t2:0"], ["t0:0"]], 2: [["t1:0"]]}


def test_a_fused_op_without_a_scale_gets_no_pair():
    """The reader of a fused tensor has no site, so there is no pair to add before it."""
    skip = Skip(tensor=TensorRef("", "t0"), uses=(Use("", "t1", 0),), rule="fuse", reason="fused", fused=True)
    fused = replace(make_plan(main_graph_site("t2", reader="@y")), skips=(skip,))
    solution = solve_scales(chain(2), fused, sketches_of(t2=(0.0, 2.55)))
    assert {index: plain_params(params) for index, params in solution.params.items()} == {0: (pytest.approx(0.01), 0)}
    assert len(solution.plan.sites) == 1


@given(st.lists(st.none() | st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=1, max_size=8))
def test_every_site_has_params_or_a_skip(ranges):
    """Whatever was reached: each site has exactly one of both, and those with params share them."""
    sketches = {
        TensorRef("", f"t{k}"): sketch_values(np.array(ends)) for k, ends in enumerate(ranges) if ends is not None
    }
    count = len(ranges) - 1
    tied_plan = tied(count) if count else make_plan(main_graph_site("t0", reader="@y"))
    solution = solve_scales(chain(count), tied_plan, sketches)
    assert solution.params.keys() | solution.skips.keys() == set(range(len(ranges)))
    assert not solution.params.keys() & solution.skips.keys()
    assert len({id(params) for params in solution.params.values()}) <= 1
    alive = next((k for k, ends in enumerate(ranges) if ends is None), len(ranges))
    assert solution.params.keys() == set(range(alive))


def test_each_weight_is_read_once(tmp_path, monkeypatch):
    """Solving reads a weight's value once per site, one at a time."""
    calls = []
    real = Parameters.value
    monkeypatch.setattr(Parameters, "value", lambda self, tensor: calls.append(tensor.op) or real(self, tensor))
    solve_scales(
        gemm(tmp_path),
        make_plan(
            replace(X, scale=(0.5,)),
            W,
            main_graph_site("b", 2, scheme=replace(BIAS, per="channel"), axis=0, parameter=True),
        ),
        {},
    )
    assert sorted(calls) == ["b", "w"]


def test_as_json(tmp_path):
    """Params as JSON data hold plain numbers."""
    params = solve_scales(gemm(tmp_path), make_plan(replace(X, scale=(0.5,), zero_point=(8,))), {}).params[0]
    assert ParametersJson.model_validate(SimpleNamespace(params=params)).model_dump(mode="json") == {
        "dtype": "uint8",
        "scale": 0.5,
        "zero_point": 8,
        "axis": None,
        "block_size": None,
        "narrow": False,
        "low": -4.0,
        "high": 123.5,
        "dynamic": False,
    }


@pytest.mark.parametrize(
    ("zero_point", "limits", "expected"),
    [
        (0, (0.0, np.inf), True),
        (1, (0.0, np.inf), False),
        (0, (0.0, 6.0), True),
        (1, (0.0, 6.0), False),
        (0, (0.0, 5.9), False),
    ],
)
def test_saturation_of_a_clip(zero_point, limits, expected):
    """Integers replace a Relu only if the smallest one is exactly 0, and a Clip only if they end at its limits."""
    params = qparams_from_scale(np.float32(6 / 255), zero_point, IntType.parse("uint8"))
    assert saturates_like_clip(params, limits) == expected


def test_each_block_has_the_range_of_its_values(tmp_path):
    """Blocks of two along the second axis have scales of their own, also the shorter last block.

    A size that the model does not declare is that of the value.
    """
    model, blocks = gemm(tmp_path, opset=21), replace(W, scheme=replace(INT8, per="block", block_size=2), axis=1)
    for shape in ((2, 3), (None, 3), (2, None)):
        model.main.replace_op(replace(model.main.op("w"), outputs=(Output("w", "float32", shape),)))
        solution = solve_scales(model, make_plan(blocks), {})
        assert solution.params[0].scale.tolist() == [[pytest.approx(2 / 127), 1.0], [1.0, 1.0]]
        assert (solution.skips, solution.ranges) == ({}, {})


def test_channels_of_an_unknown_number_are_skipped(tmp_path):
    """A range for each channel of an axis of unknown size has no shape; with a known size it has."""
    text = '<ir_version: 8, opset_import: ["": 13]> g (float[N,3] x) => (float[N,3] y) { y = Relu (x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    model, scheme = load(tmp_path / "model.onnx"), replace(UINT8, per="channel")
    unknown, known = (
        solve_scales(model, make_plan(replace(X, scheme=scheme, axis=axis, range=(0.0, 2.55))), {}) for axis in (0, 1)
    )
    assert (unknown.params, unknown.skips[0].code) == ({}, SkipCode.RANGE)
    assert plain_params(known.params[0]) == ([pytest.approx(0.01)] * 3, [0] * 3)


@pytest.mark.parametrize(("name", "shape"), [("v", (None, 3)), ("v", None)])
def test_channels_of_an_undeclared_number_are_those_of_the_value(tmp_path, name, shape):
    """A weight that an op passes on may have no declared shape; its value has one."""
    model = load_onnx(
        tmp_path, "g (float[1,3] x) => (float[1,2] y) { v = Identity(w) y = Gemm<transB = 1>(x, v) }", {"w": WEIGHT}
    )
    model.main.replace_op(replace(model.main.op(name), outputs=(Output(name, "float32", shape),)))
    passed_on = replace(W, tensor=TensorRef("", name), range=(-127.0, 127.0))
    assert plain_params(solve_scales(model, make_plan(passed_on), {}).params[0]) == ([1.0, 1.0], [0, 0])


def test_a_plan_of_another_model_is_refused(tmp_path):
    """The uses of a site must read its tensor."""
    with pytest.raises(UsageError, match="x:0"):
        solve_scales(gemm(tmp_path), make_plan(replace(X, uses=W.uses)), {})


@pytest.mark.parametrize("family", ["fake-quant", "quantize-and-dequantize-v3", "onnx-qdq"])
@pytest.mark.parametrize("zero_point", [-128, 0, 127])
def test_the_largest_scale_of_a_plan(family, zero_point):
    """All integers of the largest scale stand for finite float32 values, for which each family has ops."""
    zero, zero_point = ("symmetric", 0) if family.startswith("quantize") else ("asymmetric", zero_point)
    scheme = Scheme(dtype="int8", zero=zero, family=family)
    site = main_graph_site(
        "t0", reader="t1", scheme=scheme, scale=(float(LARGEST_VALUE / 256),), zero_point=(zero_point,)
    )
    with pytest.raises(ValueError, match="'scale'"):
        replace(site, scale=(LARGEST_VALUE / 255,))
    solution = solve_scales(chain(1), make_plan(site), {}) if family == "onnx-qdq" else solve_for_tensorflow(site)
    assert plain_params(solution.params[0]) == (pytest.approx(LARGEST_VALUE / 256), zero_point)


def test_a_range_without_a_step_is_skipped():
    """FakeQuant computes its scale from the range that the plan gives, here 0.0 to 0.0."""
    scheme = {"dtype": "uint8", "family": "fake-quant", "zero": "asymmetric", "range": "given"}
    empty, wide = (replace(tensorflow_site(**scheme), range=(0.0, high)) for high in (0.0, 2.55))
    assert solve_for_tensorflow(empty).skips[0].code is SkipCode.SCHEME
    assert plain_params(solve_for_tensorflow(wide).params[0]) == (pytest.approx(0.01), 0)


def test_a_bias_that_an_add_reads_has_the_scale_of_the_product(tmp_path):
    """The scale is that of the product's input times that of its weight, on either side of the Add."""
    for slot, operands in ((1, "t, b"), (0, "b, t")):
        text = (
            '<ir_version: 8, opset_import: ["": 13]> g (float[1,3] x) => (float[1,2] y)'
            f" {{ t = MatMul (x, w) y = Add ({operands}) }}"
        )
        message = onnx.parser.parse_model(text)
        for name, value in (("w", WEIGHT.T), ("b", np.ones(2, np.float32))):
            message.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
        onnx.save(message, tmp_path / "model.onnx")
        sites = (
            main_graph_site("x", reader="t", range=(0.0, 2.55)),
            main_graph_site("w", 1, reader="t", scheme=CHANNEL, axis=1, parameter=True),
            main_graph_site("b", slot, scheme=replace(BIAS, per="channel"), axis=0, parameter=True),
        )
        params = solve_scales(load(tmp_path / "model.onnx"), make_plan(*sites), {}).params[2]
        assert plain_params(params) == ([pytest.approx(0.01 * 2 / 127), pytest.approx(0.01)], [0, 0])


@pytest.mark.parametrize(
    ("small", "reader", "skipped"),
    [(1.0, "r = Relu(c)", True), (20.0, "r = Relu(c)", False), (1.0, "t = Relu(b) r = Conv(c, k)", False)],
)
@pytest.mark.parametrize("tied", [False, True])
def test_uneven_concats_stay_float(tmp_path, small, reader, skipped, tied):
    """An input that would span few integers behind a Concat keeps it float, unless a product runs on the output."""
    text = f"g (float[1,2,3,3] a, float[1,2,3,3] b) => (float r) {{ c = Concat<axis = 1>(a, b) {reader} }}"
    model = load_onnx(tmp_path, text, {"k": np.ones((1, 4, 1, 1), np.float32)})
    tie = tuple(Use("", "c", slot) for slot in (0, 1)) if tied else ()
    both = Use("", "t", 0) if "t =" in reader else None
    sites = (
        main_graph_site("a", 0, reader="c"),
        replace(main_graph_site("b", 1, reader="c"), uses=(Use("", "c", 1), *([both] if both else []))),
        main_graph_site("c", 0, reader="r", tie=tie),
    )
    spans = {"a": 80.0, "b": small, "c": 80.0}
    sketches = {TensorRef("", name): sketch_values(np.array([0, span], np.float32)) for name, span in spans.items()}
    solution = solve_scales(model, make_plan(*sites), sketches)
    assert set(solution.skips) == ({0, 1, 2} if skipped else set())
    assert {skip.code for skip in solution.skips.values()} == ({SkipCode.RANGE} if skipped else set())


def test_uneven_concats_leave_other_readers(tmp_path):
    """An input of a float Concat that another op reads stays quantized for that op, with its own range."""
    ops = "c = Concat<axis = 1>(a, b) r = Relu(c) t = Relu(b)"
    text = f"g (float[1,2,3,3] a, float[1,2,3,3] b) => (float r, float t) {{ {ops} }}"
    sites = (
        main_graph_site("a", 0, reader="c"),
        replace(main_graph_site("b", 1, reader="c"), uses=(Use("", "c", 1), Use("", "t", 0))),
        main_graph_site("c", 0, reader="r", tie=(Use("", "c", 0), Use("", "c", 1))),
    )
    spans = {"a": 80.0, "b": 1.0, "c": 80.0}
    sketches = {TensorRef("", name): sketch_values(np.array([0, span], np.float32)) for name, span in spans.items()}
    solution = solve_scales(load_onnx(tmp_path, text), make_plan(*sites), sketches)
    assert {index: solution.plan.sites[index].uses for index in solution.params} == {1: (Use("", "t", 0),)}
    assert float(solution.params[1].scale) == pytest.approx(1 / 255)


def two_readers(tmp_path, *t_scale):
    """The solution for a bias of two Gemms whose weights are the same, and whose inputs have a scale each."""
    text = "(float[1,3] x, float[1,3] t) => (float[1,2] y, float[1,2] z) { y = Gemm(x, w, b) z = Gemm(t, w, b) }"
    model = load_onnx(tmp_path, f"g {text}", {"w": WEIGHT.T.copy(), "b": np.ones(2, np.float32)})
    weight = main_graph_site("w", scheme=INT8, parameter=True, scale=(1.0,), uses=(Use("", "y", 1), Use("", "z", 1)))
    bias = replace(weight, tensor=TensorRef("", "b"), scheme=BIAS, scale=None, uses=(Use("", "y", 2), Use("", "z", 2)))
    inputs = [replace(X, scale=(0.5,))] + ([main_graph_site("t", reader="z", scale=t_scale)] if t_scale else [])
    solution = solve_scales(model, make_plan(bias, weight, *inputs), {})
    bias_sites = {k: site.uses for k, site in enumerate(solution.plan.sites) if site.tensor == bias.tensor}
    return solution, {k: [str(use) for use in uses] for k, uses in bias_sites.items()}


def test_a_bias_is_copied_for_consumers_with_different_scales(tmp_path):
    """Each copy has the scale of its consumer, and says so. Consumers with equal scales share the bias."""
    solution, uses = two_readers(tmp_path, 0.25)
    assert uses == {0: ["y[2]"], 4: ["z[2]"]}
    assert [plain_params(solution.params[k]) for k in uses] == [(0.5, 0), (0.25, 0)]
    assert [change.tensor.op for change in solution.changes] == ["b"]
    assert {k: [re.findall(r"\w\[2\]", note) for note in notes] for k, notes in solution.notes.items()} == {
        0: [["y[2]"]],
        4: [["z[2]"]],
    }
    solution, uses = two_readers(tmp_path, 0.5)
    assert (uses, plain_params(solution.params[0])) == ({0: ["y[2]", "z[2]"]}, (0.5, 0))
    assert (solution.changes, solution.notes) == ((), {})


def test_a_bias_stays_float_for_a_consumer_with_a_float_input(tmp_path):
    """The other consumer reads the quantized bias, which is no copy."""
    solution, uses = two_readers(tmp_path)
    assert uses == {0: ["y[2]"], 3: ["z[2]"]}
    assert (plain_params(solution.params[0]), solution.skips[3].code) == ((0.5, 0), SkipCode.BIAS)
    assert (solution.changes, solution.notes) == ((), {})


@pytest.mark.parametrize(
    ("scales", "is_normal"),
    [
        ((1e-30, 1e-30), False),
        ((1e30, 1e30), False),
        ((1e-30, 1e-30, 1.0), False),
        ((1e30, 1e30, 1.0), False),
        ((2.0**-63, 2.0**-63), True),
        ((2.0**-63, 2.0**-63, 2.0**-64), False),
    ],
)
def test_each_scale_of_a_bias_is_a_normal_float32(tmp_path, scales, is_normal):
    """A bias of zeros fits any scale, but not one that is 0, infinite or denormal in a channel."""
    x, *weights = scales
    axis, w_scheme, b_scheme = (0, CHANNEL, replace(BIAS, per="channel")) if weights[1:] else (None, INT8, BIAS)
    sites = (
        replace(X, scale=(x,)),
        replace(W, scheme=w_scheme, axis=axis, scale=tuple(weights)),
        main_graph_site("b", 2, scheme=b_scheme, axis=axis, parameter=True),
    )
    solution = solve_scales(gemm(tmp_path, bias=(0.0, 0.0)), make_plan(*sites), {})
    assert {k: skip.code for k, skip in solution.skips.items()} == ({} if is_normal else {2: SkipCode.BIAS})
    assert not is_normal or plain_params(solution.params[2]) == (2.0**-126, 0)


IF_ADD = """y = If (p) <
    then_branch = yes () => (float[1,2] a) { a = Add(t, b) },
    else_branch = no () => (float[1,2] e) { e = Neg(t) }
>"""


@pytest.mark.parametrize(
    ("ops", "bias_use", "scale"),
    [
        ("t = Gemm(x, w, c) y = Add(t, b)", Use("", "y", 1), 0.125),
        ("t = MatMul(x, w) y = Mul(t, b)", Use("", "y", 1), None),
        ("t = MatMul(x, w) y = Sum(t, b, t)", Use("", "y", 1), None),
        (f"t = MatMul(x, w) {IF_ADD}", Use("y/then_branch", "a", 1), None),
    ],
)
def test_the_consumer_of_a_bias(tmp_path, ops, bias_use, scale):
    """An Add after a product in its graph gives the bias a scale, whatever else the product reads; no other op does."""
    text = f"g (float[1,3] x, bool p) => (float[1,2] y) {{ {ops} }}"
    vector = np.ones(2, np.float32)
    model = load_onnx(tmp_path, text, {"w": WEIGHT.T.copy(), "b": vector, **({"c": vector} if ", c" in ops else {})})
    sites = [
        main_graph_site("x", reader="t", scale=(0.5,)),
        main_graph_site("w", 1, reader="t", scheme=INT8, parameter=True, scale=(0.25,)),
        main_graph_site("b", uses=(bias_use,), graph=bias_use.graph, scheme=BIAS, parameter=True),
    ]
    if ", c" in ops:
        sites.insert(0, main_graph_site("c", 2, reader="t", scheme=BIAS, parameter=True))
    solution = solve_scales(model, make_plan(*sites), {})
    bias = len(sites) - 1
    assert {k: skip.code for k, skip in solution.skips.items()} == ({} if scale else {bias: SkipCode.BIAS})
    assert bias not in solution.params or plain_params(solution.params[bias]) == (scale, 0)


@pytest.mark.parametrize(("changes", "scale"), [({}, 0.01), ({"range": (0.0, 5.1)}, 0.02), ({"scale": (0.5,)}, 0.5)])
def test_function_clones_have_the_scale_of_their_original(changes, scale):
    """A clone takes the scale of its original, or the skip, unless the plan gives it a range or scale."""
    original = main_graph_site("t0", reader="t1")
    clone = main_graph_site("t1", reader="t2", clone_of=Use("", "t1", 0), **changes)
    solution = solve_scales(chain(2), make_plan(original, clone), sketches_of(t0=(0.0, 2.55)))
    assert [float(solution.params[k].scale) for k in (0, 1)] == pytest.approx([0.01, scale])
    assert solution.skips == {}
    skips = {k: skip.code for k, skip in solve_scales(chain(2), make_plan(original, clone), {}).skips.items()}
    assert skips == {0: SkipCode.RANGE} | ({} if changes else {1: SkipCode.TIE})


def tensorflow_site(name="t0", reader="t1", dtype="int8", axis=None, **scheme):
    """A site for QuantizeAndDequantizeV3, or for the family in `scheme`."""
    options = {"dtype": dtype, "family": "quantize-and-dequantize-v3", "per": "tensor" if axis is None else "channel"}
    return main_graph_site(name, reader=reader, axis=axis, scheme=Scheme(**{**options, **scheme}))


def solve_for_tensorflow(*sites, **sketches):
    """The solution for a chain of TensorFlow ops, with these values."""
    model = chain(2)
    model.format = "tensorflow"
    values = {TensorRef("", name): sketch for name, sketch in sketches.items()}
    return solve_scales(model, make_plan(*sites, format="tensorflow"), values)


def test_a_dynamic_range_is_that_of_the_values():
    """Neither the data nor the original of a clone gives its scale."""
    family = {"family": "quantize-and-dequantize-v4", "range": "dynamic"}
    clone = replace(tensorflow_site("t1", "t2", axis=0, narrow=True, **family), clone_of=Use("", "t1", 0))
    solution = solve_for_tensorflow(tensorflow_site(), clone)
    assert solution.params == {1: DynamicQParams(type=IntType.parse("int8"), narrow=True, axis=0)}
    assert solution.skips.keys() == {0}


@pytest.mark.parametrize(
    ("dtype", "zero", "values", "scale"),
    [
        ("uint8", "asymmetric", [0.0, 2.55], 0.01),
        ("uint8", "asymmetric", [-0.01, 2.55], None),
        ("uint8", "asymmetric", [[-1.0, 1.0], [0.5, 2.0]], None),
        ("uint8", "symmetric", [-1.0, 2.55], 0.01),
        ("int8", "symmetric", [-1.28, 1.0], 0.01),
    ],
)
def test_unsigned_integers_without_a_zero_point_start_at_zero(dtype, zero, values, scale):
    """Negative values need a zero point, unless the scheme is symmetric and so clips them."""
    axis = 0 if np.ndim(values) > 1 else None
    site = tensorflow_site(dtype=dtype, zero=zero, axis=axis)
    solution = solve_for_tensorflow(site, t0=sketch_values(np.array(values), axis))
    assert {k: skip.code for k, skip in solution.skips.items()} == ({} if scale else {0: SkipCode.RANGE})
    assert not scale or plain_params(solution.params[0]) == (pytest.approx(scale), 0)
    if axis is None:
        assert plain_params(solve_for_tensorflow(replace(site, scale=(0.5,))).params[0]) == (0.5, 0)


def test_a_learned_range_needs_a_gradient():
    """Only FakeQuant trains its range; other families get a note."""
    learned = {"range": "learned", "family": "fake-quant", "zero": "asymmetric"}
    for changes, notes in (({}, {0: (RANGE_NOT_TRAINED,)}), ({"family": "fake-quant", "zero": "asymmetric"}, {})):
        site = tensorflow_site(**{**learned, "family": "quantize-and-dequantize-v3", "zero": "symmetric", **changes})
        assert solve_for_tensorflow(site, t0=sketch_values(np.array([-1.0, 1.0]))).notes == notes


@pytest.mark.parametrize(("bits", "is_shown"), [(16, True), (17, False)])
def test_the_range_of_wide_integers_is_not_explained(bits, is_shown):
    """Up to 16 bits, the range follows the scale."""
    solution = solve_for_tensorflow(tensorflow_site(dtype=f"int{bits}"), t0=sketch_values(np.array([-1.0, 1.0])))
    *_, sentence = explain_scale(chain(2), solution.plan, 0, solution)
    assert ("range" in sentence) is is_shown


def test_float8_between_quantized_tensors_is_noted(tmp_path):
    """A float8 activation, or a float8 weight beside a quantized input, is fused into an op that does not run."""
    float8 = Scheme(dtype="float8_e4m3fn", family="onnx-qdq")
    weight, x = replace(W, axis=None, scheme=float8), replace(X, range=(0.0, 1.0))
    bias = main_graph_site("b", 2, scheme=INT8, parameter=True)
    for sites, noted in (
        ((weight,), []),
        ((weight, x, bias), [0]),
        ((weight, x), [0]),
        ((replace(x, scheme=float8),), [0]),
    ):
        solution = solve_scales(gemm(tmp_path, opset=19), make_plan(*sites), {})
        assert solution.notes == dict.fromkeys(noted, (FLOAT8_NOT_RUNNABLE,))
        assert len(solution.params) == len(sites)


@pytest.mark.parametrize(("low", "is_fused"), [(0.0, True), (-1.0, False)])
def test_skips_of_ops_that_are_not_fused_are_dropped(tmp_path, low, is_fused):
    """A use that gets a pair after all is in no skip. Other uses, and skips without uses, remain."""
    text = "g (float[1,4] x) => (float[1,4] y, float[1,4] z) { t = Tanh(x) r = Relu(t) y = Neg(r) z = Neg(t) }"
    relu, other = Use("", "r", 0), Use("", "z", 0)
    fused = Skip(tensor=TensorRef("", "t"), uses=(relu,), rule="fuse", reason="fused", fused=True)
    both, without_uses = replace(fused, uses=(relu, other)), replace(fused, uses=(), fused=False)
    site = main_graph_site("r", reader="y", range=(low, 1.0))
    for skip, remaining in ((fused, ()), (both, (replace(both, uses=(other,)),))):
        plan = replace(make_plan(site), skips=(without_uses, skip))
        solution = solve_scales(load_onnx(tmp_path, text), plan, {})
        assert solution.plan.skips == (without_uses, *((skip,) if is_fused else remaining))
        assert [site.uses for site in solution.plan.sites[1:]] == ([] if is_fused else [(relu,)])


def test_the_channels_of_a_depthwise_kernel_lie_on_two_axes():
    """The view has a channel for each pair of an input channel and a multiplier. Another size is skipped."""
    model = Model(format="tensorflow")
    graph, kernel = Graph("", model.graphs), np.array([1.0, 2.0, -3.0, 4.0], np.float32)
    model.graphs[""] = graph
    constant = Op(
        name="w",
        kind="constant",
        type="Const",
        roles=(),
        outputs=(Output("w", "float32", (1, 1, 2, 2)),),
        read_value=lambda: kernel.reshape(1, 1, 2, -1),
    )
    conv = {"kind": "depthwise_conv", "type": "DepthwiseConv2dNative", "roles": ("weight",), "channel_axis": 2}
    graph.add_op(Op(name="y", outputs=(Output("y", "float32"),), **conv), [graph.add_op(constant)])
    site = replace(tensorflow_site("w", "y", axis=2), view=(1, 1, 4), parameter=True)
    solution = solve_scales(model, make_plan(site, format="tensorflow"), {})
    assert solution.params[0].range.high.tolist() == pytest.approx([1.0, 2.0, 3.0, 4.0], rel=0.01)
    same_ranges = make_plan(replace(site, range=(-1.0, 1.0)), format="tensorflow")
    assert solve_scales(model, same_ranges, {}).params[0].scale.shape == (4,)
    given = make_plan(replace(site, scale=(0.02, 0.01, 0.03, 0.01)), format="tensorflow")
    [change] = solve_scales(model, given, {}).changes
    assert re.search("^2 of 4 ", change.message)
    kernel = np.ones(6, np.float32)
    assert solve_scales(model, given, {}).skips[0].code is SkipCode.RANGE


def test_progress_in_megabytes(tmp_path, monkeypatch):
    """The size of the weights that are done and of all weights is reported, unless they are small."""
    model, plan = gemm(tmp_path, np.ones((500, 1000), np.float32)), make_plan(W)
    reports = []
    solve_scales(model, plan, {}, progress=lambda *counts: reports.append(counts))
    monkeypatch.setattr(solver, "MIN_REPORTED_BYTES", 0)
    solve_scales(model, plan, {}, progress=lambda *counts: reports.append(counts))
    assert reports == [(2, 2)]

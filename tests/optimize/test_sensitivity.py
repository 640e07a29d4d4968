"""Error that each quantization alone adds at the outputs, measured with switches in one model."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx.parser
import pytest
from support.rule_files import weight_rule

import graphquant as gq
from graphquant.analysis.measured_outputs import OutputMeter
from graphquant.analysis.site_errors import match_sites
from graphquant.api.plan import prepare_and_plan, prepare_for_plan
from graphquant.calibration.batch_independence import is_batch_independent
from graphquant.calibration.data import open_data
from graphquant.formats import format_module
from graphquant.formats.onnx import create_runner
from graphquant.ir import TensorRef
from graphquant.optimize import algorithm
from graphquant.optimize.sensitivity import (
    GroupSwitches,
    SiteBypass,
    _find_switch_points,
    bisect_errors,
    error_to_db,
    find_switchable,
    insert_switches,
    measure_sensitivity,
    share_errors,
)
from graphquant.quantize.rewrite import rewrite

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


def ranks(values: Any) -> Any:
    """The place of each value."""
    return np.argsort(np.argsort(values)).astype(float)


def correlation(first: Any, second: Any) -> float:
    """Spearman's, of two lists without ties."""
    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def error_share(plain: Mapping[str, Any], actual: Mapping[str, Any]) -> float:
    """The squared error of the worst output, as a share of its squares."""
    pairs = [(plain[name].astype(np.float64), actual[name]) for name in plain if plain[name].dtype.kind == "f"]
    return max(float(((actual - value) ** 2).sum() / (value**2).sum()) for value, actual in pairs)


def joined_outputs(runner: Any, feeds: list[Any], more: Any) -> dict[str, Any]:
    """The outputs of all feeds."""
    ran = [runner.run({**feed, **more}) for feed in feeds]
    return {name: np.concatenate([entry[name] for entry in ran]) for name in ran[0]}


def calibration_file(samples: Path, name: str) -> Path:
    """Return the calibration data of a sample model."""
    return samples / f"{name.partition('.')[0].removesuffix('_saved_model')}_calib.npz"


@pytest.fixture
def made(samples: Path) -> Callable[[str], gq.Result]:
    """Quantizes a sample model by the rules of its format."""

    def make(name: str) -> gq.Result:
        data = calibration_file(samples, name)
        plan = prepare_and_plan(gq.load(samples / name), by_cost=False)[1]
        return gq.insert(samples / name, plan=plan, data=str(data), samples=40, validate=False)

    return make


@pytest.mark.parametrize(
    "name",
    [
        "digits_cnn.onnx",
        "digits_rnn.onnx",
        "digits_nested.onnx",
        pytest.param("digits_cnn.pb", marks=pytest.mark.slow),
        pytest.param("digits_cnn_saved_model", marks=pytest.mark.slow),
    ],
)
def test_switches(made: Callable[[str], gq.Result], samples: Path, name: str) -> None:
    """All off is the float model, all on is quantized as much as the quantized one, and those left on need no input."""
    result = made(name)
    choices = _find_switch_points(result.model, match_sites(result.source, result.model))[1]
    open_ = find_switchable(result.model, choices)
    stuck = set(range(len(choices))) - set(open_)
    assert bool(stuck) == (name == "digits_nested.onnx")  # which has sites in a function
    format_ = format_module(result.source.format)
    variant = insert_switches(result.model, choices, by_input={index: index for index in open_}, on=stuck)
    data = np.load(calibration_file(samples, name))["image"][:4]
    key = format_.input_specs(result.source)[0].name
    feeds = [{key: image[None]} for image in data]
    plain = joined_outputs(format_.create_runner(result.source), feeds, {})
    runner = format_.create_runner(variant.model)
    if not stuck:
        assert error_share(plain, joined_outputs(runner, feeds, variant.feed())) < 1e-10
    quantized = error_share(plain, joined_outputs(format_.create_runner(result.model), feeds, {}))
    on = error_share(plain, joined_outputs(runner, feeds, variant.feed(set(open_))))
    assert quantized / 4 < on < quantized * 4
    fixed = insert_switches(result.model, choices, by_input={}, on=set(range(len(choices))))
    assert fixed.inputs == {}
    assert error_share(plain, joined_outputs(format_.create_runner(fixed.model), feeds, {})) == pytest.approx(
        quantized, rel=1e-6
    )


@pytest.mark.slow
def test_functions_beside_a_frame_of_tensorflow_1(tmp_path: Path) -> None:
    """A loop that calls a function cannot wait for a variable outside of it, so functions have no switches there."""
    tf = pytest.importorskip("tensorflow")
    v1, rng = tf.compat.v1, np.random.default_rng(0)
    weights = rng.normal(0, 0.3, (2, 8, 8)).astype(np.float32)
    v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default(), v1.Session() as session:
            x = v1.placeholder(tf.float32, [None, 8], name="x")
            relu = tf.function(lambda x: tf.nn.relu(tf.matmul(x, tf.constant(weights[0]))))
            bounded = tf.function(lambda x: tf.tanh(x) * 2.0)
            _, y = v1.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, bounded(y)), [tf.constant(0), relu(x)])
            y = tf.matmul(y, tf.constant(weights[1]), name="y")
            v1.saved_model.simple_save(session, str(tmp_path / "model"), {"x": x}, {"y": y})
    finally:
        v1.enable_control_flow_v2()
    data = rng.normal(0, 1, (16, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=data)
    result = gq.insert(tmp_path / "model", data=str(tmp_path / "data.npz"), rules="generic", min_sqnr="none")
    choices = _find_switch_points(result.model, match_sites(result.source, result.model))[1]
    assert {tensor.graph for tensor, _ in choices} > {""}
    assert find_switchable(result.model, choices) == []
    repaired = gq.insert(tmp_path / "model", data=str(tmp_path / "data.npz"), rules="generic", min_sqnr="44")
    assert repaired.validation is not None
    assert repaired.validation.worst_sqnr > result.validation.worst_sqnr


def _errors_one_at_a_time(result: gq.Result, feeds: list[Any]) -> dict[tuple[str, str], float]:
    """For each site the error of a model in which the site alone is quantized, on all samples."""
    prepared = prepare_for_plan(result.source, result.plan)
    format_ = format_module(prepared.format)
    plain = joined_outputs(format_.create_runner(prepared), feeds, {})
    errors_by_op = {}
    for pair in result.inserted:
        index = result.plan.sites.index(pair.site)
        model, (inserted,) = rewrite(prepared, result.plan, {index: pair.params})
        error = error_share(plain, joined_outputs(format_.create_runner(model), feeds, {}))
        errors_by_op.update({(output.graph, output.op): error for output in pair.outputs})
        assert inserted.folded == pair.folded
    return errors_by_op


@pytest.mark.parametrize("name", ["digits_rnn.onnx", pytest.param("digits_cnn.pb", marks=pytest.mark.slow)])
def test_ranks_are_those_of_one_at_a_time(made: Callable[[str], gq.Result], samples: Path, name: str) -> None:
    """The rank correlation with models of one quantized tensor each, on all samples, is at least 0.9."""
    result = made(name)
    spec = str(samples / f"{name.partition('.')[0]}_calib.npz")
    runner = format_module(result.source.format).create_runner(result.source)
    batches = open_data(spec, runner.inputs)
    inputs = {entry.name: entry.name for entry in runner.inputs}
    sites = match_sites(result.source, result.model)
    batch_independent = is_batch_independent(runner, batches, 16)
    sensitivity = measure_sensitivity(result.model, sites, batches, inputs=inputs, batch_independent=batch_independent)
    honest = _errors_one_at_a_time(result, list(batches))
    positions = [position for position in sensitivity.errors if position in honest]
    assert len(positions) >= 20
    assert (
        correlation([sensitivity.errors[entry] for entry in positions], [honest[entry] for entry in positions]) >= 0.9
    )


@pytest.mark.slow
def test_in_functions(made: Callable[[str], gq.Result], samples: Path) -> None:
    """Tensors in functions, which no input can rule, are measured one by one; the figure is the same kind of figure."""
    result = made("digits_nested.onnx")
    comparison = gq.compare(
        result.source, result.model, str(samples / "digits_nested_calib.npz"), samples=30, sensitivity=True
    )
    inside = [entry for entry in comparison.sites if entry.graph == "sample_models:Block"]
    assert len(inside) >= 4
    assert all(entry.sensitivity is not None and 30 < entry.sensitivity < 120 for entry in inside)
    sensitivities = [entry.sensitivity for entry in comparison.sites if entry.sensitivity is not None]
    assert sensitivities == sorted(sensitivities)


def test_the_worst_is_first(tmp_path: Path, cli: Callable[..., Any]) -> None:
    """A coarse scale that the output hardly feels is behind a finer one that it feels, and both are as computed."""
    text = """
    <ir_version: 8, opset_import: ["" : 13]>
    net (float[N, 4] x) => (float[N, 4] y)
    { a = Relu(x) b = Mul(a, tiny) c = Neg(x) d = Sub(b, c) e = Tanh(d) y = Mul(e, one) }
    """
    model = onnx.parser.parse_model(text)
    for name, value in (("tiny", 0.001), ("one", 1.0)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.full(4, value, np.float32), name))
    onnx.save(model, tmp_path / "net.onnx")
    rules = """
    [scheme.coarse]
    bits = 8
    observe = { name = "fixed-point", exponent = -1 }
    [scheme.fine]
    bits = 8
    observe = { name = "fixed-point", exponent = -4 }
    [[rule]]
    name = "coarse"
    producer = { name = "a" }
    quantize = "coarse"
    [[rule]]
    name = "fine"
    producer = { name = "c" }
    quantize = "fine"
    """
    (tmp_path / "rules.toml").write_text(rules)
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x)
    gq.insert(tmp_path / "net.onnx", rules=str(tmp_path / "rules.toml")).save(tmp_path / "quant.onnx")
    call = (tmp_path / "net.onnx", tmp_path / "quant.onnx", "--data", tmp_path / "data.npz")
    plain, measured = (
        json.loads(cli("compare", *call, *more, "--format", "json").stdout)["sites"] for more in ([], ["--sensitivity"])
    )
    assert {site["sensitivity_db"] for site in plain} == {None}
    assert all(site["sensitivity_db"] is not None for site in measured)
    assert len(measured) == len(plain) > 0
    first, second = gq.compare(
        tmp_path / "net.onnx", tmp_path / "quant.onnx", str(tmp_path / "data.npz"), sensitivity=True
    ).sites
    assert (first.tensor, second.tensor) == ("c:0", "a:0")
    assert second.local < first.local  # whose own error is smaller
    rounded = np.round(-x * 16) / 16
    exact, actual = (np.tanh(0.001 * np.maximum(x, 0) - c) for c in (-x, rounded))
    expected = 10 * np.log10((exact**2).sum() / ((exact - actual) ** 2).sum())
    assert first.sensitivity == pytest.approx(expected, abs=0.01)


def test_corrected_biases_are_judged_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Corrected biases cancel the errors of weights, so they are no errors of their own, and come last."""
    monkeypatch.setattr(algorithm, "rejection_reason", lambda *_: "")
    text = """
    <ir_version: 8, opset_import: ["" : 13]>
    net (float[N, 3, 8, 8] x) => (float[N, 4, h, w] y)
    { c = Conv <pads = [1, 1, 1, 1]> (x, v, a) d = Relu (c) e = Conv (d, w, b) y = Relu (e) }
    """
    model, rng = onnx.parser.parse_model(text), np.random.default_rng(3)
    for name, shape in (("v", (4, 3, 3, 3)), ("a", (4,)), ("w", (4, 4, 3, 3)), ("b", (4,))):
        value = (rng.normal(size=shape) * 0.3 + 0.1).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    onnx.save(model, tmp_path / "net.onnx")
    x = (rng.normal(size=(64, 3, 8, 8)) + 1.5).astype(np.float32)
    weights = '[scheme.weight]\nbits = 4\nper = "channel"\nobserve = "absmax"\n' + weight_rule("conv")
    result = gq.insert(tmp_path / "net.onnx", rules=[weights, "onnxruntime"], data=x, algorithms=["bias-correction"])
    assert sum(change.applied for change in result.algorithm_results) == 2
    for sensitivity in (False, True):
        sites = gq.compare(result.source, result.model, x, sensitivity=sensitivity).sites
        assert [site.bias for site in sites] == [False] * 4 + [True] * 2
        assert {site.local for site in sites[4:]} == {None}
        assert {site.sensitivity for site in sites[4:]} == ({math.inf} if sensitivity else {None})


def test_usage(cli: Callable[..., Any], tmp_path: Path) -> None:
    """Sensitivity without quantized tensors is a usage error."""
    output = cli("compare", "a.onnx", "b.onnx", "--data", "random:1", "--sensitivity", "--outputs-only", code=2).stderr
    assert output.startswith("error: --sensitivity")


def test_errors_by_bisection() -> None:
    """Runs of blocks with a large error are split, then the groups inside; the others share the error of their run."""
    errors = [1e-3, 1e-4, 0.0, 5e-2, 1e-5, 2e-5, 3e-5, 4e-5]
    blocks = [[0, 1], [2, 3, 4], [5], [], [6, 7]]
    measured = []

    def measure(groups: Any) -> float:
        measured.append(list(groups))
        return sum(errors[group] for group in groups)

    parts = bisect_errors(measure, blocks, 9)
    assert measured == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 2, 3, 4],
        [5, 6, 7],
        [0, 1],
        [2, 3, 4],
        [2],
        [3, 4],
        [3],
        [4],
    ]
    assert [groups for groups, _ in parts] == [(0, 1), (2,), (3,), (4,), (5, 6, 7)]
    shares = share_errors(parts)
    assert shares == pytest.approx({0: 5.5e-4, 1: 5.5e-4, 2: 0, 3: 5e-2, 4: 1e-5, 5: 3e-5, 6: 3e-5, 7: 3e-5})
    assert share_errors(bisect_errors(measure, blocks, 1)) == pytest.approx(dict.fromkeys(range(8), sum(errors) / 8))
    noise = {0: 0.03, 1: 0.01, **dict.fromkeys(range(2, 8), 0.5)}
    assert share_errors(parts, noise) == pytest.approx({**shares, 0: 8.25e-4, 1: 2.75e-4})
    measured.clear()
    assert len(bisect_errors(measure, blocks, 99)) == 6  # parts below 2% of the whole error are not split
    assert len(bisect_errors(measure, blocks, 99, sum(errors))) == 1
    assert bisect_errors(measure, [[], []], 9) == []
    infinite = bisect_errors(lambda groups: math.inf if 1 in groups else 0.0, [[0], [1]], 9)
    assert infinite == [((0,), 0.0), ((1,), 1e6)]


def test_errors_of_expensive_groups() -> None:
    """The part with the largest product of error and cost is split: the errors of cheap groups decide little."""
    errors, costs = [4e-2, 4e-2, 1e-2, 2e-2, 0.0, 0.0], [1.0, 1.0, 50.0, 50.0, 80.0, 80.0]

    def float_cost(groups: Any) -> float:
        return sum(costs[group] for group in groups)

    def measure(groups: Any) -> float:
        return sum(errors[group] for group in groups)

    blocks = [[0], [1], [2], [3], [4], [5]]
    parts = bisect_errors(measure, blocks, 7, float_cost=float_cost)
    assert [groups for groups, _ in parts] == [(0,), (1, 2), (3,), (4, 5)]
    assert [groups for groups, _ in bisect_errors(measure, blocks, 7)] == [(0,), (1,), (2,), (3, 4, 5)]


@pytest.mark.parametrize("name", ["digits_cnn.onnx", "digits_nested.onnx"])
def test_groups_of_quantizations(made: Callable[[str], gq.Result], samples: Path, name: str) -> None:
    """The error of a group is that of the model with only its quantizations, also in functions, and groups add up."""
    result = made(name)
    sites = match_sites(result.source, result.model)
    ops = [(site.quantization_op.graph, site.quantization_op.op) for site in sites.sites]
    groups = [ops[: len(ops) // 2], ops[len(ops) // 2 :]]
    key = format_module(result.source.format).input_specs(result.source)[0].name
    images = np.load(samples / f"{name.partition('.')[0]}_calib.npz")["image"][:4]
    feeds = [{key: image[None]} for image in images]
    switches = GroupSwitches(result.model, sites, groups, feeds, len(feeds))
    runner = format_module(result.source.format).create_runner
    plain = joined_outputs(runner(result.source), feeds, {})
    whole = switches.error([0, 1])
    assert whole == pytest.approx(error_share(plain, joined_outputs(runner(result.model), feeds, {})), rel=0.7)
    assert switches.error([0]) + switches.error([1]) == pytest.approx(whole, rel=0.7)
    assert switches.error([]) == 0.0
    assert (switches.groups, switches.runs) == ({0, 1}, 3 * len(feeds))
    assert switches.error([1, 0]) == whole
    assert switches.runs == 3 * len(feeds)


@pytest.mark.parametrize(
    ("activation", "shape", "is_label"), [("Softmax", "N,4", 1), ("Sigmoid", "N,4", 1), ("Sigmoid", "N,2,2", 0)]
)
def test_scores_of_labels_in_place_of_probabilities(activation: str, shape: str, is_label: int) -> None:
    """The error of labels is that of their scores, if it is less, and that of a map its own."""
    sizes = shape.replace("N", "-1")
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
      net (float[N,4] x) => (float[{shape}] y)
      <float[4,4] w, int64[{len(shape.split(","))}] s = {{{sizes}}}>
      {{ a = Relu(x) scores = MatMul(a, w) p = {activation}(scores) y = Reshape(p, s) }}""")
    rng = np.random.default_rng(0)
    model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(-4, 4, (4, 4)).astype(np.float32), "w"))
    x = rng.normal(size=(32, 4)).astype(np.float32)
    result = gq.insert(gq.load(model), data={"x": x}, rules="generic", min_sqnr="none")
    sites = match_sites(result.source, result.model)
    groups = [[(site.quantization_op.graph, site.quantization_op.op) for site in sites.sites]]
    probabilities, either = (
        GroupSwitches(result.model, sites, groups, [{"x": x}], len(x), counts_scores=counts_scores).error([0])
        for counts_scores in (False, True)
    )
    values = [
        next(iter(create_runner(net).observe([TensorRef("", op, 0)], [{"x": x}])))[TensorRef("", op, 0)][0]
        for net, op in ((result.source, "scores"), (result.model, "scores"))
    ]
    scores = float(np.square(values[0] - values[1]).sum() / np.square(values[0]).sum())
    assert probabilities > scores
    assert either == pytest.approx(scores if is_label else probabilities, rel=1e-4)


def test_peaks_are_compared_before_their_selection_with_switches(tmp_path: Path) -> None:
    """The switch of a map does not hide that a comparison with its max pool selects peaks."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
      net (float[1,2,8,8] x) => (float[1,2,5] v) <float[2,2,1,1] w, int64[3] s = {1,2,-1}, int64[1] k = {5}> {
        map = Conv(x, w) highest = MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>(map) same = Equal(highest, map)
        mask = Cast<to=1>(same) peaks = Mul(map, mask) rows = Reshape(peaks, s) v, i = TopK(rows, k) }""")
    rng = np.random.default_rng(0)
    model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=(2, 2, 1, 1)).astype(np.float32), "w"))
    feeds = [{"x": value} for value in rng.normal(size=(16, 1, 2, 8, 8)).astype(np.float32)]
    (tmp_path / "rules.toml").write_text("""
    [scheme.fine]
    bits = 8
    observe = { name = "fixed-point", exponent = -4 }
    [[rule]]
    name = "map-and-pool"
    producer = { kind = "conv|max_pool" }
    quantize = "fine"
    """)
    result = gq.insert(gq.load(model), rules=str(tmp_path / "rules.toml"), min_sqnr="none")
    sites = match_sites(result.source, result.model)
    groups = [[(site.quantization_op.graph, site.quantization_op.op) for site in sites.sites]]
    error = GroupSwitches(result.model, sites, groups, feeds, len(feeds)).error([0])
    assert error_to_db(error) == pytest.approx(
        OutputMeter(result.source, feeds, 20.0).worst_sqnr(result.model), abs=0.1
    )


def test_bypassed_sites(made: Callable[[str], gq.Result], samples: Path) -> None:
    """A model without its sites is the float model, and one with all of them is the quantized one."""
    result = made("digits_cnn.onnx")
    sites = match_sites(result.source, result.model)
    by_site = {index: [(site.quantization_op.graph, site.quantization_op.op)] for index, site in enumerate(sites.sites)}
    bypass = SiteBypass(result.model, sites, by_site)
    runner = format_module("onnx").create_runner
    feeds = [{"image": image[None]} for image in np.load(samples / "digits_cnn_calib.npz")["image"][:4]]
    plain, quantized = (joined_outputs(runner(model), feeds, {}) for model in (result.source, result.model))
    assert error_share(plain, joined_outputs(runner(bypass.make_model(by_site)), feeds, {})) < 1e-10
    assert error_share(quantized, joined_outputs(runner(bypass.make_model(())), feeds, {})) == 0


def test_bypassed_weights_stay_float(made: Callable[[str], gq.Result], samples: Path) -> None:
    """ONNX Runtime quantizes no bypassed weight itself, and the model has no ops that nothing reads."""
    result = made("digits_cnn.onnx")
    sites = match_sites(result.source, result.model)
    by_site = {index: [(site.quantization_op.graph, site.quantization_op.op)] for index, site in enumerate(sites.sites)}
    weights = [index for index, site in enumerate(sites.sites) if site.input_tensor is None]
    model = SiteBypass(result.model, sites, by_site, with_barriers=True).make_model(weights)
    feeds = [{"image": image[None]} for image in np.load(samples / "digits_cnn_calib.npz")["image"][:4]]
    exact = joined_outputs(create_runner(model, optimizes=False), feeds, {})
    assert error_share(exact, joined_outputs(create_runner(model), feeds, {})) < 1e-6
    assert not [op.name for op in model.main.ops() if op.kind != "output" and not model.main.nx.adj[op.name]]

"""SmoothQuant is applied only for a gain that is worth it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx.parser
import pytest
from support.rule_files import input_rule, weight_rule

import graphquant as gq
from graphquant.formats import onnx as onnx_format
from graphquant.ir import Model, TensorRef, Use
from graphquant.optimize import channel_scaling
from graphquant.optimize.algorithm import AlgorithmData, PreCalibrationState, skipped_algorithm, skipped_target
from graphquant.optimize.channel_groups import ChannelConstant, ChannelGroup, nearest_powers_of_two
from graphquant.optimize.channel_scaling import (
    MIN_GAIN_DB,
    NO_TENSOR_SCALE,
    SMALL_GAIN,
    STRENGTHS,
    SmoothQuantScaling,
    apply_smoothquant,
    find_best_scaling,
)
from graphquant.optimize.channel_statistics import (
    ChannelMoments,
    GroupWeight,
    RoundingCosts,
    collect_static_statistics,
)
from graphquant.optimize.weighted_ops import NOT_OBSERVED

if TYPE_CHECKING:
    from pathlib import Path

    from graphquant.quantize import Plan

SCHEMES = """
[scheme.weight]
dtype = "int8"
zero = "symmetric"
per = "channel"
observe = "absmax"
[scheme.activation]
dtype = "uint8"
observe = "minmax"
"""
RULES = SCHEMES + weight_rule("matmul") + input_rule("matmul")


def test_a_small_predicted_gain_is_not_taken(tmp_path: Path) -> None:
    """Nearly even channels stay as they are, with the required gain as the reason."""
    rng = np.random.default_rng(3)
    text = (
        '<ir_version: 8, opset_import: ["": 17]> g (float[N,16,8] x) => (float[N,16,6] y)'
        " { l = LayerNormalization <axis = -1> (x, g, o) y = MatMul (l, u) }"
    )
    model = onnx.parser.parse_model(text)
    values = {"g": np.linspace(0.9, 1.2, 8), "o": np.zeros(8), "u": rng.normal(size=(8, 6))}
    for name, value in values.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    onnx.save(onnx.shape_inference.infer_shapes(model), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(32, 16, 8)).astype(np.float32))
    result = gq.insert(
        tmp_path / "model.onnx", rules=RULES, data=str(tmp_path / "data.npz"), algorithms=["smoothquant"]
    )
    (entry,) = [entry for entry in result.algorithm_results if entry.algorithm == "smoothquant"]
    assert (entry.target, entry.applied) == ("l", False)
    assert entry.detail == SMALL_GAIN.format(f"{MIN_GAIN_DB:.0f}") == SMALL_GAIN.format("1")


def smoothing_costs(maxima: Any, *weights: Any, steps: float = 255.0) -> RoundingCosts:
    """Return the costs of a group with these largest activations, (C,), and weights, (C, N) each."""
    maxima, tensor = np.asarray(maxima, np.float64), TensorRef("", "l")
    uses = [Use("", f"matmul{index}", 1) for index in range(len(weights))]
    group = ChannelGroup(start=tensor, channels=len(maxima), weight_uses={tensor: uses})
    reading = [
        GroupWeight(
            constant=ChannelConstant(
                use, TensorRef("", f"w{use.op}"), np.arange(len(maxima))[:, None], reads_group=True, is_weight=True
            ),
            magnitudes=np.abs(weight),
            squares=np.square(weight),
            elements_per_cell=1,
            integer_steps=127.0,
            axis=None,
        )
        for use, weight in zip(uses, map(np.asarray, weights), strict=True)
    ]
    return RoundingCosts(
        group=group,
        moments={tensor: ChannelMoments(-maxima / 2, maxima, np.square(maxima) / 3)},
        step_counts={tensor: steps},
        reading_weights=reading,
        producing_weights=[],
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_best_of_eleven_strengths(seed: int) -> None:
    """Divisors are max|x|^a / max|w|^(1 - a), rounded to powers of two, for the strength a of least predicted error."""
    rng = np.random.default_rng(seed)
    maxima = np.exp(rng.normal(0, 1.5, 6))
    weights = rng.normal(size=(6, 3)) * np.exp(rng.normal(0, 1, (6, 1))), rng.normal(size=(6, 2))
    costs = smoothing_costs(maxima, *weights)
    scaling = find_best_scaling(costs)
    assert scaling is not None
    largest = np.maximum(*(np.abs(weight).max(1) for weight in weights))
    gains = {}
    for tenths in range(11):
        divisors = nearest_powers_of_two(maxima ** (tenths / 10) / largest ** (1 - tenths / 10))
        gains[tenths / 10] = 10 * np.log10(costs.total_error(np.ones(6)) / costs.total_error(divisors))
        if scaling.strength == tenths / 10:
            assert scaling.divisors.tolist() == divisors.tolist()
    assert tuple(gains) == STRENGTHS
    assert scaling.gain == pytest.approx(max(gains.values())) == pytest.approx(gains[scaling.strength])
    assert scaling.gain > 1


def test_channels_without_values_keep_their_scale() -> None:
    """Channels whose activations or weights are all zero are not divided; the others gain as if they were alone."""
    scaling = find_best_scaling(smoothing_costs([0.0, 1.0, 64.0, 8.0], [[1.0], [1.0], [1.0], [0.0]]))
    assert scaling is not None
    assert scaling.divisors[[0, 3]].tolist() == [1.0, 1.0]
    assert scaling.divisors[2] / scaling.divisors[1] > 4
    assert scaling.gain > 1
    assert find_best_scaling(smoothing_costs([0.0, 0.0], [[1.0], [1.0]])) is None
    assert find_best_scaling(smoothing_costs([1.0, 0.0], [[0.0], [1.0]])) is None
    # Nothing is rounded: neither the weight, nor a tensor.
    costs = smoothing_costs([1.0, 2.0], [[1.0], [1.0]])
    weight = replace(costs.reading_weights[0], integer_steps=None)
    assert find_best_scaling(replace(costs, step_counts={}, reading_weights=[weight])) is None


def test_even_channels_gain_nothing() -> None:
    """Without a gain the divisors are 1, at strength 0."""
    scaling = find_best_scaling(smoothing_costs([1.0, 1.0], [[1.0], [1.0]]))
    assert scaling is not None
    assert (scaling.divisors.tolist(), scaling.strength, scaling.gain) == ([1.0, 1.0], 0.0, 0.0)


NORM = "l = LayerNormalization <axis = -1> (x, g, o) "
FOLDED = NORM + "a = MatMul (l, u) c = MatMul (l, v) y = Add (a, c)"
BRANCHED = NORM + "a = MatMul (l, u) c = MatMul (l, v) d = Add (a, c) z = MatMul (d, t) y = Add (z, l)"
SHARED_WEIGHT = NORM + "a = MatMul (l, u) c = MatMul (x, u) d = Add (a, c) z = MatMul (d, t) y = Add (z, l)"
VALUES = {
    "g": np.where(np.arange(8) == 2, 60, 1),
    "o": np.linspace(-1, 1, 8),
    **{name: np.random.default_rng(index).normal(size=(8, 8)) for index, name in enumerate("uvt")},
}
X = np.random.default_rng(9).normal(size=(8, 2, 16, 8)).astype(np.float32)


def make_state(tmp_path: Path, body: str, *, with_sum: bool = False) -> PreCalibrationState:
    """Return the state of a net before calibration."""
    head = '<ir_version: 8, opset_import: ["": 17]> g (float[N,16,8] x) => (float[N,16,8] y)'
    model = onnx.parser.parse_model(f"{head} {{ {body} }}")
    for name, value in VALUES.items():
        if any(name in node.input for node in model.graph.node):
            model.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    onnx.save(onnx.shape_inference.infer_shapes(model), tmp_path / "net.onnx")
    plan = gq.plan(tmp_path / "net.onnx", rules=RULES)
    # Without a scale of the sum, its group is left alone.
    plan = replace(plan, sites=tuple(site for site in plan.sites if with_sum or site.tensor.op != "d"))
    return PreCalibrationState(model=gq.load(tmp_path / "net.onnx"), plan=plan)


def algorithm_samples(count: int = len(X)) -> AlgorithmData:
    """Return samples for the algorithm."""
    feeds = [{"x": x} for x in X[:count]]
    return AlgorithmData(feeds=feeds, validation_feeds=feeds, create_runner=onnx_format.create_runner)


def first_output(model: Model) -> Any:
    """Return the output for the first sample."""
    return onnx_format.create_runner(model).run({"x": X[0]})["y"]


def names(tensors: Any) -> set[str]:
    """Return the names of the ops of tensors."""
    return {tensor.op for tensor in tensors}


def test_folded_and_inserted_factors(tmp_path: Path) -> None:
    """The norm takes the factors if matrix products alone read it. Otherwise a product before them does."""
    for body, rescaled, products in ((FOLDED, set("lgouv"), {}), (BRANCHED, set("uv"), {"l/scaled": "l"})):
        earlier = skipped_algorithm("gptq", "earlier")
        state = replace(make_state(tmp_path, body), results=(earlier,))
        scaled = apply_smoothquant(state, algorithm_samples())
        assert names(scaled.rescaled_tensors) == rescaled
        assert {product.op: tensor.op for product, tensor in scaled.factor_products.items()} == products
        assert {op.name for op in scaled.model.main.ops() if op.type == "Mul"} == set(products)
        assert [site.tensor.op for site in scaled.plan.sites if site.tensor.op.startswith("l")] == [*products] or ["l"]
        first, *results = scaled.results
        assert first is earlier
        (result,) = (entry for entry in results if entry.applied)
        assert (result.algorithm, result.target) == ("smoothquant", "l")
        assert ("inserted product" in result.detail) == bool(products)
        assert np.array_equal(first_output(scaled.model), first_output(state.model))
        assert apply_smoothquant(state, None).results == (
            earlier,
            skipped_algorithm("smoothquant", "it needs data"),
        )


@pytest.mark.parametrize(("body", "least"), [(FOLDED, 1.0), (BRANCHED, 3.0)])
def test_required_gains(tmp_path: Path, body: str, least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folded factor needs 1 dB, and an inserted product 3 dB. A gain of just that is enough."""
    for gain in (least - 0.01, least):
        scaling = SmoothQuantScaling(divisors=np.full(8, 2.0), strength=0.5, gain=gain)
        monkeypatch.setattr(channel_scaling, "find_best_scaling", lambda _, scaling=scaling: scaling)
        results = apply_smoothquant(make_state(tmp_path, body), algorithm_samples()).results
        result = next(result for result in results if result.target == "l")
        assert result.applied == (gain >= least)
        assert result.applied or result.detail == SMALL_GAIN.format(f"{least:.0f}")


def test_reasons_without_a_scaling(tmp_path: Path) -> None:
    """Without samples nothing is observed. Without a quantized activation there is no scale to share."""
    state = make_state(tmp_path, FOLDED)
    (result,) = apply_smoothquant(state, algorithm_samples(0)).results
    assert (result.target, result.applied, result.detail) == ("l", False, NOT_OBSERVED)
    weights_only = replace(state.plan, sites=tuple(site for site in state.plan.sites if site.parameter))
    scaled = apply_smoothquant(replace(state, plan=weights_only), algorithm_samples())
    assert [(result.target, result.detail) for result in scaled.results] == [("l", NO_TENSOR_SCALE)]
    assert scaled.rescaled_tensors == frozenset()


def edit_site(plan: Plan, name: str, **changes: Any) -> Plan:
    """Return the plan with changes of the site of a tensor of the main graph."""
    sites = tuple(replace(site, **changes) if site.tensor.op == name else site for site in plan.sites)
    return replace(plan, sites=sites)


def scalable_branches(state: PreCalibrationState) -> list[tuple[str, list[str]]]:
    """Return the parts of blocked groups that an inserted product can scale, with their constants."""
    statistics = collect_static_statistics(state.model, state.plan)
    return [
        (branch.start.op, [constant.tensor.op for constant in branch.constants])
        for group in statistics.groups
        if statistics.find_obstacle(group)
        for branch in channel_scaling._scalable_groups(statistics, group)
    ]


def test_branches_that_a_product_can_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All readers are matrix products with weights of their own, and no other site shares the scale of their input."""
    state = make_state(tmp_path, BRANCHED)
    assert scalable_branches(state) == [("l", ["u", "v"])]
    shared = make_state(tmp_path, SHARED_WEIGHT)
    assert scalable_branches(shared) == []
    assert apply_smoothquant(shared, algorithm_samples()).results == tuple(
        skipped_target("smoothquant", group.name, group.obstacle)
        for group in collect_static_statistics(shared.model, shared.plan).groups
    )
    # Here u produces the channels of the sum that it also reads, so that no product before it can scale it.
    assert scalable_branches(make_state(tmp_path, NORM + "a = MatMul (l, u) y = Add (a, l)")) == []
    # An op that is no matrix product reads the tensor too.
    statistics = collect_static_statistics(state.model, state.plan)
    group = next(group for group in statistics.groups if group.start.op == "l")
    group.weight_uses[group.start].append(Use("", "y", 1))
    group.constants.append(group.constants[-1]._replace(use=Use("", "y", 1)))
    assert channel_scaling._scalable_groups(statistics, group) == []
    for constant, kinds in (("FRAME_KINDS", {"layernorm"}), ("MATRIX_PRODUCT_KINDS", {"gemm"})):
        with monkeypatch.context() as patch:
            patch.setattr(channel_scaling, constant, frozenset(kinds))
            assert scalable_branches(state) == []


@pytest.mark.parametrize(
    ("tensor", "changes", "is_own"),
    [
        ("l", {}, True),
        ("l", {"tie": (Use("", "z", 0),)}, False),
        ("l", {"clone_of": Use("", "z", 0)}, False),
        ("l", {"range": (-1.0, 1.0)}, False),
        ("l", {"scale": (0.1,)}, False),
        ("d", {"tie": (Use("", "a", 0),)}, False),
        ("d", {"clone_of": Use("", "a", 0)}, False),
        ("d", {"tie": (Use("", "z", 0),)}, True),
        ("d", {"range": (-1.0, 1.0)}, True),
        ("l", {"uses": (Use("", "y", 1),), "tie": (Use("", "z", 0),)}, False),
    ],
)
def test_scales_of_their_own(tmp_path: Path, tensor: str, changes: dict[str, Any], is_own: bool) -> None:
    """The input of the products has a scale of its own if no tie, clone or given number concerns it."""
    state = make_state(tmp_path, BRANCHED, with_sum=True)
    state = replace(state, plan=edit_site(state.plan, tensor, **changes))
    uses = [Use("", "a", 1), Use("", "c", 1)]
    statistics = collect_static_statistics(state.model, state.plan)
    assert channel_scaling._has_own_scale(statistics, TensorRef("", "l"), uses) == is_own


def test_other_sites_of_the_tensor_may_be_tied(tmp_path: Path) -> None:
    """A site of other uses of the same tensor does not concern the products."""
    state = make_state(tmp_path, BRANCHED)
    site = next(site for site in state.plan.sites if site.tensor.op == "l")
    for tied_use, is_own in ((Use("", "y", 1), True), (Use("", "c", 0), False)):
        own = replace(site, uses=tuple(use for use in site.uses if use != tied_use))
        tied = replace(site, uses=(tied_use,), tie=(Use("", "z", 0),))
        sites = (own if entry is site else entry for entry in state.plan.sites)
        statistics = collect_static_statistics(state.model, replace(state.plan, sites=(*sites, tied)))
        uses = [Use("", "a", 1), Use("", "c", 1)]
        assert channel_scaling._has_own_scale(statistics, TensorRef("", "l"), uses) == is_own


def block_model(path: Path, gain: Any) -> None:
    """Write a LayerNorm with `gain` and two products, of which the first also scales channels of the second."""
    rng = np.random.default_rng(0)
    text = (
        '<ir_version: 10, opset_import: ["": 21]> g (float[N,64] x) => (float[N,64] y)'
        " { l = LayerNormalization <axis = -1> (x, g, o) a = MatMul (l, u) r = Relu (a) y = MatMul (r, v) }"
    )
    model = onnx.parser.parse_model(text)
    values = {"g": gain, "o": np.zeros(64), "u": rng.normal(size=(64, 256)) / 8, "v": rng.normal(size=(256, 64)) / 8}
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(value.astype(np.float32), name) for name, value in values.items()
    )
    onnx.save(model, path)


def block_errors(folder: Path, gain: Any) -> tuple[list[float], gq.Result]:
    """Return the squared errors on other samples without and with scaling, and the result with it."""
    rng = np.random.default_rng(1)
    samples = rng.normal(size=(128, 64)).astype(np.float32)
    block_model(folder / "float.onnx", gain)
    np.savez(folder / "data.npz", x=samples[:96])
    expected = onnx_format.create_runner(gq.load(folder / "float.onnx")).run({"x": samples[96:]})["y"]
    errors = []
    for algorithms in ([], ["smoothquant"]):
        result = gq.insert(
            folder / "float.onnx",
            rules=["weight_only_int4"],
            data=folder / "data.npz",
            algorithms=algorithms,
            validate=False,
        )
        output = onnx_format.create_runner(result.model).run({"x": samples[96:]})["y"]
        errors.append(float(np.square(output - expected).sum()))
    return errors, result


def test_weights_in_blocks(tmp_path: Path) -> None:
    """Large channels of activations in float make the weights in blocks that multiply them more exact."""
    gain = np.ones(64)
    gain[[3, 40, 41]] = 12
    (unscaled, scaled), result = block_errors(tmp_path, gain)
    assert [entry.target for entry in result.algorithm_results if entry.applied][:1] == ["l"]
    assert scaled < unscaled * 0.8


def test_even_channels_of_blocks(tmp_path: Path) -> None:
    """Scales that gain nothing are not used, so that the model is that without the algorithm."""
    (unscaled, scaled), result = block_errors(tmp_path, np.ones(64))
    assert scaled <= unscaled
    assert "l" not in [entry.target for entry in result.algorithm_results if entry.applied]

"""The search for the cheapest plan that meets a bound."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.shared_models import SHARED_MODELS

import graphquant as gq
from graphquant.analysis.validation import Bounds, FoldValidator
from graphquant.api.plan import prepare_and_plan
from graphquant.calibration.data import open_data
from graphquant.formats import format_module
from graphquant.ir import Parameters
from graphquant.optimize.algorithms import build_model, rebuild_model
from graphquant.optimize.candidates import (
    FLOAT_CANDIDATE,
    RULE_CANDIDATE,
    Candidate,
    ScaleGroup,
    byte_costs,
    mac_costs,
    make_scale_groups,
)
from graphquant.optimize.selection import (
    MAX_EXHAUSTIVE_OPS,
    MAX_MEASUREMENTS,
    PlanQuality,
    SelectionResult,
    _greedy_high_ops,
    cheaper_selections,
    choose_selection,
    high_precision_ops,
    search_cheapest_plan,
    selection_cost,
    settle_selection,
    total_error,
)
from graphquant.utils.options import PlanOptions
from graphquant.visualize.compare_report import search_view

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def draw_groups(rng: Any, ops: int, number: int) -> tuple[list[ScaleGroup], dict[tuple[str, str], float]]:
    """Groups that each need up to three of some ops, and what these cost; every second has a better range."""
    names = [("", f"op{index}") for index in range(ops)]
    scale_groups = []
    for index in range(number):
        some = rng.choice(ops, size=rng.integers(0, min(3, ops) + 1), replace=False)
        error = float(10 ** rng.uniform(-6, -3))
        candidates = [
            Candidate(name=RULE_CANDIDATE, error=error),
            Candidate(name=FLOAT_CANDIDATE, error=0.0, high_precision=True),
        ]
        if index % 2:
            candidates.insert(1, Candidate(name="mse range", error=error * rng.uniform(0.3, 0.9)))
        scale_groups.append(
            ScaleGroup(sites=(index,), ops=frozenset(names[entry] for entry in some), candidates=tuple(candidates))
        )
    return scale_groups, {name: float(rng.integers(1, 100)) for name in names}


@pytest.mark.parametrize("seed", range(20))
def test_few_ops_cost_what_the_cheapest_set_does(seed: int) -> None:
    """Up to twelve ops: the cost is that of the cheapest of all ways of all groups."""
    rng = np.random.default_rng(seed)
    some, costs = draw_groups(rng, 4, 7)
    max_error = total_error(some, [0] * len(some)) * rng.uniform(0.05, 0.8)
    every = product(*(range(len(group.candidates)) for group in some))
    best = min(
        selection_cost(some, candidates, costs) for candidates in every if total_error(some, candidates) <= max_error
    )
    chosen = choose_selection(some, costs, max_error)
    assert total_error(some, chosen) <= max_error * (1 + 1e-9)
    assert selection_cost(some, chosen, costs) == pytest.approx(best)


def test_many_ops_by_the_largest_fall() -> None:
    """More than twelve ops: the wanted sum is met, nothing could be given back, and on average it costs little more."""
    ratios = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        some, costs = draw_groups(rng, 8, 14)
        max_error = total_error(some, [0] * len(some)) * rng.uniform(0.05, 0.8)
        greedy = settle_selection(some, _greedy_high_ops(some, costs, max_error), max_error)
        assert total_error(some, greedy) <= max_error * (1 + 1e-9)
        best = selection_cost(some, choose_selection(some, costs, max_error), costs)
        ratios.append(selection_cost(some, greedy, costs) / best if best else 1.0)
    assert np.mean(ratios) < 1.2
    some, costs = draw_groups(np.random.default_rng(0), MAX_EXHAUSTIVE_OPS + 40, 150)
    max_error = total_error(some, [0] * len(some)) / 3
    assert total_error(some, choose_selection(some, costs, max_error)) <= max_error * (1 + 1e-9)


def test_what_is_as_good_stays_as_the_rules_say() -> None:
    """Another range is taken before an op runs in float, the largest gain first, and no more of them than it takes."""
    op = ("", "conv")
    errors = (1e-3, 4e-4), (8e-4, 1e-4), (1e-4, 9e-5)
    some = [
        ScaleGroup(
            sites=(index,),
            ops=frozenset({op}),
            candidates=(
                Candidate(name=RULE_CANDIDATE, error=rule_error),
                Candidate(name="mse range", error=float_error),
                Candidate(name=FLOAT_CANDIDATE, error=0, high_precision=True),
            ),
        )
        for index, (rule_error, float_error) in enumerate(errors)
    ]
    assert choose_selection(some, {op: 1.0}, 2e-3) == (0, 0, 0)
    assert choose_selection(some, {op: 1.0}, 1.3e-3) == (0, 1, 0)
    assert choose_selection(some, {op: 1.0}, 6.1e-4) == (1, 1, 0)
    assert choose_selection(some, {op: 1.0}, 1e-4) == (2, 2, 2)
    assert cheaper_selections(some, {op: 1.0}, frozenset({op}), 0.98) == [(1, 1, 1)]
    assert high_precision_ops(some, (1, 2, 0)) == {op}


def test_groups_are_sites_of_one_scale(samples: Path) -> None:
    """Sites that are tied are one group, and each group knows the ops that multiply on it or make it."""
    prepared, plan = _prepared(samples)
    scale_groups = make_scale_groups(
        prepared, plan, range(len(plan.sites)), {i: {RULE_CANDIDATE: 1e-4} for i in range(len(plan.sites))}
    )
    assert sorted(index for group in scale_groups for index in group.sites) == list(range(len(plan.sites)))
    by_tensor = {str(plan.sites[index].tensor): group for group in scale_groups for index in group.sites}
    assert by_tensor["pointwise/relu:0"] is by_tensor["max_pool:0"]
    assert [candidate.error for candidate in by_tensor["pointwise/relu:0"].candidates] == pytest.approx([2e-4, 0])
    assert by_tensor["stem/relu:0"].ops == {("", "stem/conv"), ("", "depthwise/conv")}
    assert by_tensor["max_pool:0"].ops >= {("", "pointwise/conv"), ("", "residual_1/conv")}
    costs, sizes = mac_costs(prepared, {}), byte_costs(prepared)
    assert costs["", "stem/conv"] == 4608
    assert sizes["", "stem/conv"] == 3 * (72 + 8)  # weights and biases
    assert costs.keys() == sizes.keys()


def _prepared(samples: Path) -> Any:
    return prepare_and_plan(gq.load(samples / "digits_cnn.onnx"), by_cost=False)


def test_the_search_ends_with_the_cheapest_that_meets() -> None:
    """If errors add up as estimated, few measurements find the cheapest plan that meets the bound."""
    rng = np.random.default_rng(3)
    some, costs = draw_groups(rng, 9, 12)
    measured = []

    def measure(chosen: tuple[int, ...]) -> PlanQuality:
        measured.append(chosen)
        error = total_error(some, chosen)
        sqnr = -10 * np.log10(error) if error else np.inf
        return PlanQuality(met=sqnr >= 40, sqnr=sqnr)

    result = search_cheapest_plan(some, costs, measure, target_sqnr=40.0)
    assert result.quality.met
    assert result.plans == len(measured) <= MAX_MEASUREMENTS
    best = selection_cost(some, choose_selection(some, costs, 1e-4), costs) / sum(costs.values())
    assert best <= result.cost <= 1.2 * best
    assert search_cheapest_plan(some, costs, measure, target_sqnr=None).quality.met


def test_a_bound_that_cannot_be_met() -> None:
    """The best plan is given where none meets the bound."""
    some, costs = draw_groups(np.random.default_rng(4), 4, 6)
    result = search_cheapest_plan(
        some, costs, lambda chosen: PlanQuality(met=False, sqnr=20.0 + sum(chosen)), target_sqnr=90.0
    )
    assert not result.quality.met
    assert [group.candidates[candidate].name for group, candidate in zip(some, result.selection, strict=True)] == [
        FLOAT_CANDIDATE
    ] * len(some)
    assert result.plans <= MAX_MEASUREMENTS


def test_interrupted() -> None:
    """Ctrl-C keeps the best plan so far."""
    some, costs = draw_groups(np.random.default_rng(5), 6, 10)
    calls = []

    def measure(chosen: tuple[int, ...]) -> PlanQuality:
        calls.append(chosen)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return PlanQuality(met=False, sqnr=20.0 + sum(chosen))

    result = search_cheapest_plan(some, costs, measure, target_sqnr=30.0)
    assert result.stop_reason == "interrupt"
    assert result.selection == calls[1]


@pytest.mark.slow
def test_insert_meets_its_bound(samples: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    """A bound is met on samples that neither calibration nor the search saw; what is left float says why."""
    model, data, bound = samples / "digits_cnn.onnx", samples / "digits_cnn_calib.npz", 60
    plain = gq.insert(model, data=str(data)).validation
    assert plain.comparison.sqnr < bound
    output = cli(
        "insert",
        model,
        "--data",
        data,
        "--min-sqnr",
        bound,
        "-o",
        tmp_path / "out.onnx",
        "--report",
        tmp_path / "r",
        "-v",
    )
    report = json.loads((tmp_path / "r").read_text())
    searched = [skip for skip in report["skips"] if skip["rule"] == "search"]
    assert searched
    assert all(f"{bound} dB" in skip["reason"] and skip["reason"] in output.stdout for skip in searched)
    assert report["validation"]["met"]
    assert report["validation"]["comparison"]["sqnr"] >= bound
    assert report["validation"]["comparison"]["samples"] == 100
    assert report["validation"]["status"] == report["search"]["status"] in {"met", "met-not-proven"}
    assert report["data"]["samples"] == 100
    assert 0 < report["search"]["cost"] < 1
    assert {entry["tensor"] for entry in report["search"]["float_tensors"]} == {
        f"{entry['tensor']['op']}:{entry['tensor']['port']}" for entry in report["skips"] if entry["rule"] == "search"
    }
    gq.insert(model, data=str(data)).save(tmp_path / "plain.onnx")
    before, after = (
        gq.compare(model, tmp_path / name, str(samples / "digits_cnn_eval.npz"), sites=False).sqnr
        for name in ("plain.onnx", "out.onnx")
    )
    assert after > before + 2


def test_bound_that_the_validation_misses_is_one_sentence(samples: Path) -> None:
    """The line about the bounds has the figures of the search, and tells that the validation decides if it misses."""
    result = gq.insert(samples / "digits_cnn.onnx", data=str(samples / "digits_cnn_calib.npz"), min_sqnr=30)
    assert result.search is not None
    assert result.validation is not None
    missed = replace(result.validation, bounds=Bounds(min_sqnr=200.0))
    lines = [
        [str(line) for line in search_view(result.search, validation) if "bounds are met" in str(line)]
        for validation in (result.validation, missed)
    ]
    assert [len(found) for found in lines] == [1, 1]
    assert " dB" in lines[0][0]
    assert ["missed" in found[0] and "exit code 1" in found[0] for found in lines] == [False, True]


def test_what_meets_its_bound_is_left_as_it_is(samples: Path) -> None:
    """If the rules' plan meets the bound, there is nothing to search for."""
    model, data = samples / "digits_cnn.onnx", str(samples / "digits_cnn_calib.npz")
    result = gq.insert(model, data=data, min_sqnr=30, min_agreement=0.9)
    assert result.search.float_tensors == {}
    assert result.plan == gq.plan(model)


@pytest.mark.slow
def test_by_size(samples: Path) -> None:
    """With size as the cost no more bytes of weights are in float than with multiply-adds."""
    model, data = samples / "digits_cnn.onnx", str(samples / "digits_cnn_calib.npz")
    floats = {}
    for optimize in ("macs", "size"):
        result = gq.insert(model, data=data, min_sqnr=60, optimize=optimize)
        assert result.validation.failures == ()
        stored = {str(pair.site.tensor) for pair in result.inserted if pair.folded}
        planned = [site for site in gq.plan(model).sites if site.parameter and str(site.tensor) not in stored]
        floats[optimize] = sum(
            int(np.prod(result.source.output(site.tensor).shape))
            for site in planned
            if site.tensor.op in result.source.main
        )
    assert floats["size"] <= floats["macs"]


@pytest.mark.slow
def test_voice_detector(model_folder: Path) -> None:
    """Voice detectors meet low bounds without float ops, and higher ones with some, also in branches."""
    costs, tensor = {45: 0.0, 50: 1.0}, "features/then_branch/wide_out:0"
    if model_folder == SHARED_MODELS:
        costs, tensor = {24: 0.0, 28: 0.9}, "/model/stft/Sqrt:0"
    data = str(model_folder / "silero_vad.npz")
    for bound, max_cost in costs.items():
        result = gq.insert(model_folder / "silero_vad_16k_op15.onnx", data=data, min_sqnr=bound)
        assert result.validation.failures == ()
        assert result.validation.comparison.sqnr >= bound
        assert result.search.cost <= max_cost
        assert (tensor in {str(tensor) for tensor in result.search.float_tensors}) == (max_cost > 0)


def test_interrupted_sensitivity_analysis(samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in blame keeps what is known of it, and the plan of the rules, which is the best so far, and says so."""
    model, data = samples / "digits_cnn.onnx", str(samples / "digits_cnn_calib.npz")
    stages = []

    def progress(stage: str, finished: int, _total: int) -> None:
        stages.append(stage)
        if stage == "sensitivity" and finished == 5:
            raise KeyboardInterrupt

    result = gq.insert(model, data=data, min_sqnr=60, progress=progress)
    assert stages.count("sensitivity") == 5
    assert "searching" not in stages
    assert result.search.interrupted
    assert result.plan == gq.plan(model)
    assert "interrupted" in "".join(str(line) for line in search_view(result.search))
    assert result.validation.failures


def test_interrupted_while_measuring(samples: Path) -> None:
    """Ctrl-C while plans are measured keeps the best of them."""
    model, data = samples / "digits_cnn.onnx", str(samples / "digits_cnn_calib.npz")
    stages = []

    def progress(stage: str, finished: int, _total: int) -> None:
        if stage == "searching":
            stages.append(finished)
            if finished == 2:
                raise KeyboardInterrupt

    result = gq.insert(model, data=data, min_sqnr=60, progress=progress)
    assert stages == [1, 2]
    assert result.search.interrupted
    assert result.search.search_validation.comparison.sqnr > gq.insert(model, data=data).validation.comparison.sqnr
    assert result.plan != gq.plan(model)


@pytest.mark.slow
@pytest.mark.parametrize("call", [2, 3, -1])
def test_a_late_interruption_keeps_the_best_plan(samples: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Ctrl-C in a measurement keeps the best plan that was measured before, also in the last one."""
    model, data = samples / "digits_cnn.onnx", str(samples / "digits_cnn_calib.npz")
    validate, measured, interrupted_call = FoldValidator.validate, list[float](), 0

    def validate_or_interrupt(validator: FoldValidator, models: Any) -> Any:
        if len(measured) + 1 == interrupted_call:
            raise KeyboardInterrupt
        validation = validate(validator, models)
        measured.append(validation.comparison.sqnr)
        return validation

    monkeypatch.setattr(FoldValidator, "validate", validate_or_interrupt)
    undisturbed = gq.insert(model, data=data, min_sqnr=60).search
    interrupted_call = call if call > 0 else len(measured)
    assert (undisturbed.interrupted, len(measured) > 2) == (False, True)
    known = measured[: interrupted_call - 1]
    measured.clear()
    search = gq.insert(model, data=data, min_sqnr=60).search
    assert (search.interrupted, measured) == (True, known)
    assert search.search_validation.comparison.sqnr == max(known)


@pytest.mark.slow
def test_with_statistics(samples: Path, tmp_path: Path) -> None:
    """With ranges from statistics, the search uses other data than the statistics and the hold-out."""
    model, data = samples / "digits_cnn.onnx", str(samples / "digits_cnn_calib.npz")
    gq.calibrate(model, data=data, samples=40).save(tmp_path / "stats.gqs")
    result = gq.insert(model, stats=tmp_path / "stats.gqs", data=data, min_sqnr=60)
    assert result.calibration_samples == 40
    assert result.search.search_validation.comparison.samples == 40
    assert result.validation.comparison.samples == 20
    assert result.search.float_tensors
    assert result.search.status == "met-not-proven"
    without = gq.insert(model, data=data, min_sqnr=60)
    assert without.search.search_validation.comparison.samples == 100


def test_statistics_of_all_samples(samples: Path, tmp_path: Path) -> None:
    """If all samples gave the ranges, the search uses them, and its result is not proven."""
    model, data = samples / "digits_cnn.onnx", str(samples / "digits_cnn_calib.npz")
    gq.calibrate(model, data=data).save(tmp_path / "stats.gqs")
    result = gq.insert(model, stats=tmp_path / "stats.gqs", data=data, min_sqnr=20)
    assert result.search.search_validation.comparison.samples == 80
    assert result.search.status == "met-not-proven"
    assert len(result.search.caveats) == 1
    assert "inconclusive: " + result.search.caveats[0] in "".join(str(line) for line in search_view(result.search))


@pytest.mark.slow
def test_what_is_not_shown_is_not_said_to_be_met(
    samples: Path, tmp_path: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound that the samples meet and are too few to prove is so reported; the exit code is 1 with --strict.

    A bound that is missed has exit code 1 in any case.
    """
    model, data = samples / "digits_cnn.onnx", samples / "digits_cnn_calib.npz"
    options = ("insert", model, "--data", data, "-o", tmp_path / "out.onnx", "--report", tmp_path / "r", "--force")
    cli(*options, "--min-agreement", 0.99)
    report = json.loads((tmp_path / "r").read_text())
    assert report["validation"]["met"]
    assert not report["search"]["met"]
    assert report["search"]["status"] == report["validation"]["status"] == "met-not-proven"
    assert "627 rows" in report["search"]["caveats"][0]
    output = cli(*options, "--min-agreement", 0.99, "--strict", code=1)
    assert "627 rows" in output.stderr
    loose = gq.insert(model, data=str(data), min_agreement=0.99)
    strict = gq.insert(model, data=str(data), min_agreement=0.99, strict=True)
    assert (loose.failures, strict.failures) == ((), strict.search.caveats)
    assert len(strict.failures) == 1

    def first(groups: list[ScaleGroup], _: object, measure: Callable[..., object], **__: object) -> SelectionResult:
        measure((0,) * len(groups))
        return SelectionResult(
            selection=(0,) * len(groups),
            quality=PlanQuality(met=False, sqnr=0.0),
            cost=0.0,
            plans=1,
        )

    monkeypatch.setattr("graphquant.optimize.search.search_cheapest_plan", first)
    cli(*options, "--min-sqnr", 60, code=1)
    report = json.loads((tmp_path / "r").read_text())
    assert report["search"]["status"] == report["validation"]["status"] == "missed"
    assert not report["search"]["met"]


def test_weights_alone_are_searched_for_too(samples: Path) -> None:
    """Rules whose ranges need no data are searched for a bound where there is some; 4 bits become 8."""
    model, data = samples / "digits_cnn.onnx", str(samples / "digits_cnn_calib.npz")
    rules = """
    [scheme.few]
    bits = 4
    narrow = true
    observe = "mse"
    [[rule]]
    name = "few"
    producer = { kind = "parameter" }
    consumer = { kind = "conv|depthwise_conv|gemm|matmul", input = "weight" }
    quantize = "few"
    """
    result = gq.insert(model, rules=rules, data=data, min_sqnr=36)
    assert result.search.status != "missed"
    candidates = result.search.changed_tensors
    assert set(candidates.values()) <= {"8-bit weights", "weights per channel"}
    assert "8-bit weights" in candidates.values()
    assert all("the search chose" in site.why for site in result.plan.sites if site.rule == "search")
    again = gq.insert(model, plan=result.plan)
    assert [str(pair.site) for pair in again.inserted] == [str(pair.site) for pair in result.inserted]


def test_a_model_with_the_edits_of_another_plan(samples: Path) -> None:
    """The same plan gives the same model without running its algorithms; a float op gets its own weight and bias."""
    source, images = gq.load(samples / "digits_cnn.onnx"), samples / "digits_cnn_calib.npz"
    rules = '[scheme.few]\nbits = 4\nnarrow = true\n[[rule]]\nname = "few"\nproducer = { kind = "parameter" }\n'
    rules += 'consumer = { kind = "conv|gemm|matmul", input = "weight" }\nquantize = "few"\n'
    options = PlanOptions(rules=(rules,), algorithms=("adaround", "bias-correction"))
    prepared, plan = prepare_and_plan(source, options, by_cost=False)
    data = open_data(str(images), format_module("onnx").input_specs(prepared))
    base = build_model(prepared, plan, stats=None, calibration_data=data, float_weights=False)
    assert base.edits.edited_weights
    feeds = [{"image": image[None]} for image in np.load(images)["image"][:3]]

    def run(model: gq.Model) -> list[Any]:
        runner = format_module("onnx").create_runner(model)
        return [value for feed in feeds for value in runner.run(feed).values()]

    same = rebuild_model(base, plan, None)
    for expected, actual in zip(run(base.model), run(same.model), strict=True):
        np.testing.assert_array_equal(actual, expected)
    float_use = next(use for site in plan.sites for use in site.uses if use in base.edits.edited_weights)
    partly = replace(plan, sites=tuple(site for site in plan.sites if float_use not in site.uses))
    rebuilt = rebuild_model(base, partly, None)
    models = prepared, rebuilt.model
    tensors = [model.graphs[float_use.graph].source_of(float_use) for model in models]
    for value in (Parameters(model).value(tensor) for model, tensor in zip(models, tensors, strict=True)):
        np.testing.assert_array_equal(value, Parameters(prepared).value(tensors[0]))
    params = {pair.site.uses[0]: pair.params for pair in base.insertions}
    assert [pair.params.scale.tolist() for pair in rebuilt.insertions] == [
        params[pair.site.uses[0]].scale.tolist() for pair in rebuilt.insertions
    ]
    assert len(rebuilt.insertions) == len(base.insertions) - 1

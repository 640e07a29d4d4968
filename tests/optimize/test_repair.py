"""The repair of plans whose outputs miss the default target."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from onnx import helper, numpy_helper, save
from support.onnx_models import run_onnx, save_outlier_net

import graphquant as gq
from graphquant.api import plan_search
from graphquant.api.plan_search import CLOSE_DB
from graphquant.errors import ModelError
from graphquant.optimize import repair
from graphquant.optimize.search_budget import (
    MIN_LIMIT_SECONDS,
    START_SECONDS,
    SearchBudget,
    SearchCosts,
    SearchLimitError,
)
from graphquant.rules import shipped_rule_files
from graphquant.visualize.json_export import InsertResult

if TYPE_CHECKING:
    from graphquant.api.result import Result
    from graphquant.formats import Feeds

MODELS = Path(__file__).parents[2] / "sample_models"
NO_SCALING = ("not smoothquant", "not cross-layer-equalization")


@pytest.fixture
def outlier_net(tmp_path: Path) -> Path:
    """Write a net whose first layer has outlier channels, and its data; return the folder."""
    save_outlier_net(tmp_path)
    return tmp_path


def insert_net(folder: Path, **options: Any) -> Result:
    """Quantize the net in a folder with its data."""
    return gq.insert(folder / "net.onnx", **{"data": str(folder / "data.npz"), **options})


def kept_changes(result: Result) -> set[str]:
    """Return the kinds of change that the final plan has."""
    assert result.search is not None
    assert result.search.repair is not None
    return {step.change for step in result.search.repair.steps if step.kept}


@pytest.mark.parametrize(
    ("gain", "options", "is_taken"),
    [(1.1, {}, True), (0.9, {}, False), (9.0, {"method": "mse"}, False), (9.0, {"min_sqnr": "none"}, False)],
)
def test_ranges_that_clip_too_much(
    monkeypatch: pytest.MonkeyPatch, gain: float, options: dict[str, str], is_taken: bool
) -> None:
    """Ranges without clipping replace default ranges if outputs above the target gain 1 dB on the hold-out."""

    def insert(**options: str) -> Result:
        return gq.insert(MODELS / "digits_cnn.onnx", data=str(MODELS / "digits_cnn_calib.npz"), **options)

    default = insert()
    assert default.search is None
    sqnr = default.validation.worst_sqnr
    monkeypatch.setattr(plan_search, "MAX_CLIPPED_DB", math.inf)
    meters: list[repair.OutputMeter] = []

    def worst_sqnr(meter: repair.OutputMeter, _: object) -> float:
        meters.append(meter)  # the default plan is measured last, and its errors are larger
        meter.sample_errors = {"y": [float(number * len(meters)) for number in range(len(meter.feeds))]}
        return sqnr + gain

    monkeypatch.setattr(repair.OutputMeter, "worst_sqnr", worst_sqnr)
    result = insert(**options)
    assert (result.search is not None) == is_taken
    if is_taken:
        assert kept_changes(result) == {"ranges"}
        assert result.search.repair.default_sqnr == sqnr
        changed = result.search.changed_tensors
        assert len(changed) > 3
        assert {site.scheme.observe.name for site in result.plan.sites if site.tensor in changed} == {"minmax"}
        assert result.validation.worst_sqnr > 20


@pytest.mark.parametrize(("loss", "is_taken"), [(1.4, True), (1.6, False)])
def test_ranges_that_gain_by_one_sample(monkeypatch: pytest.MonkeyPatch, loss: float, is_taken: bool) -> None:
    """Ranges without clipping gain 1.5 dB, by one sample alone. They are taken if the others lose less without it."""
    data = {"data": str(MODELS / "digits_cnn_calib.npz")}
    sqnr = gq.insert(MODELS / "digits_cnn.onnx", **data).validation.worst_sqnr
    feeds: list[list[Feeds]] = []
    # The model without clipping, without and with its own biases, and the default.
    results = iter([sqnr + 1.5, sqnr + 1.5, sqnr])
    change = 10 ** (loss / 10)  # of the errors of all samples but one

    def worst_sqnr(meter: repair.OutputMeter, _: object) -> float:
        feeds.append(meter.feeds)
        numbers, is_default = range(len(meter.feeds)), len(feeds) == len(("without", "own biases", "default"))
        # Another output may be the worst one without clipping. Its errors say nothing of the gain.
        worst = {} if is_default else {"other": [9.0 * (number == 3) for number in numbers]}
        errors = [1.0 + (number == 7) if is_default else change * (number != 7) for number in numbers]
        meter.sample_errors = worst | {"y": errors}
        return next(results)

    monkeypatch.setattr(plan_search, "MAX_CLIPPED_DB", math.inf)
    monkeypatch.setattr(repair.OutputMeter, "worst_sqnr", worst_sqnr)
    assert (gq.insert(MODELS / "digits_cnn.onnx", **data).search is not None) == is_taken
    assert [len(samples) for samples in feeds] == [20, 20, 20]


def test_outlier_channels_are_scaled_before_anything_is_float(outlier_net: Path) -> None:
    """SmoothQuant is cheaper than float: it alone repairs the net, and all multiply-adds stay quantized."""
    plain = insert_net(outlier_net, min_sqnr="none")
    assert plain.search is None
    assert plain.validation is not None
    assert plain.validation.worst_sqnr < 20
    assert plain.validation.failures == ()
    result = insert_net(outlier_net)
    assert result.search is not None
    trace = result.search.repair
    assert trace is not None
    assert trace.met
    assert trace.default_sqnr <= plain.validation.worst_sqnr
    assert result.validation.worst_sqnr >= trace.sqnr >= 20
    assert "smoothquant" in kept_changes(result)
    assert trace.float_blocks == ()
    assert result.quantized_share == plain.quantized_share


def test_few_weights_get_more_bits_before_any_is_float(tmp_path: Path) -> None:
    """Of weights with 4 bits, the one with the largest error gets 8 bits, after all changes that add no bytes."""
    rng = np.random.default_rng(5)
    weights = {f"w{k}": rng.normal(size=(64, 64)).astype(np.float32) * 0.1 ** (k > 0) for k in range(4)}
    nodes = [helper.make_node("MatMul", ["x", name], [f"p{name}"], name=name) for name in weights]
    nodes.append(helper.make_node("Sum", [f"p{name}" for name in weights], ["y"]))
    values = [helper.make_tensor_value_info(name, 1, ["n", 64]) for name in "xy"]
    constants = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "net", values[:1], values[1:], constants)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(64, 64)).astype(np.float32))
    (tmp_path / "rules.toml").write_text(
        '[scheme.weight]\ndtype = "int4"\nper = "channel"\n'
        '[[rule]]\nname = "weight"\nproducer = { kind = "parameter" }\nquantize = "weight"\n'
    )
    plain = insert_net(tmp_path, rules=str(tmp_path / "rules.toml"), min_sqnr="none")
    assert plain.validation.worst_sqnr < 20
    result = insert_net(tmp_path, rules=str(tmp_path / "rules.toml"))
    assert result.validation.worst_sqnr >= 20
    assert "8-bit weights" in kept_changes(result)
    assert "ranges" not in kept_changes(result)
    assert "float" not in kept_changes(result)
    assert {str(entry.site.tensor): entry.params.type.bits for entry in result.inserted} == {
        "w0:0": 8,
        "w1:0": 4,
        "w2:0": 4,
        "w3:0": 4,
    }


def test_float_blocks_are_the_last_change(outlier_net: Path) -> None:
    """Without the scaling algorithms, only blocks in float reach the target: those beside the outliers."""
    result = insert_net(outlier_net, algorithms=NO_SCALING)
    assert result.search is not None
    trace = result.search.repair
    assert trace is not None
    assert trace.met
    assert "float" in kept_changes(result)
    assert 0 < len(trace.float_blocks) < trace.blocks
    assert [step.targets for step in trace.steps if step.change == "float" and step.kept] == [trace.float_blocks]
    assert len({(step.change, step.targets) for step in trace.steps}) == len(trace.steps)
    assert not {"smoothquant", "cross-layer-equalization"} & {entry.algorithm for entry in result.algorithm_results}
    assert result.search.float_tensors
    assert {skip.rule for skip in result.skips if skip.tensor in result.search.float_tensors} == {"repair"}
    assert 0 < result.quantized_share < 1


def test_one_tensor_does_not_make_its_block_float(tmp_path: Path) -> None:
    """Of a residual block with one tensor of outliers, only the two ops at this tensor become float."""
    rng, width, blocks = np.random.default_rng(3), 32, 5
    names = [f"{name}{block}" for block in range(blocks) for name in "abcd"]
    weights = {name: rng.normal(0, 0.2, (width, width)) for name in names}
    weights["b2"][:, [3, 9]] *= 400
    weights["c2"][[3, 9]] /= 400
    nodes, tensor = [], "x"
    for block in range(blocks):
        first = tensor
        for name in "abcd":
            product = f"product_{name}{block}"
            nodes.append(helper.make_node("MatMul", [tensor, f"{name}{block}"], [product], name=product))
            tensor = product if name == "d" else f"relu_{name}{block}"
            nodes += [helper.make_node("Relu", [product], [tensor], name=tensor)] if name != "d" else []
        nodes.append(helper.make_node("Add", [tensor, first], [f"sum{block}"], name=f"add{block}"))
        tensor = f"sum{block}"
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, ["N", width])],
        [helper.make_tensor_value_info(tensor, 1, ["N", width])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(80, width)).astype(np.float32))
    assert insert_net(tmp_path, min_sqnr="none").validation.worst_sqnr < 20
    result = insert_net(tmp_path, algorithms=NO_SCALING)
    assert result.search.repair.met
    assert set(names) - {site.tensor.op for site in result.plan.sites if site.parameter} == {"b2", "c2"}


@pytest.mark.parametrize("has_work", [True, False])
def test_errors_of_the_holdout_alone_are_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_work: bool
) -> None:
    """Float blocks are chosen by the errors of the hold-out if the search samples lack them, also without work left."""
    rng, width = np.random.default_rng(4), 24
    weights = {f"w{number}": rng.normal(0, 0.25, (width, width)).astype(np.float32) for number in range(6)}
    nodes, tensor = [], "x"
    for number, name in enumerate(weights):
        nodes.append(helper.make_node("MatMul", [tensor, name], [f"product{number}"], name=f"product{number}"))
        tensor = f"limited{number}"
        nodes.append(helper.make_node("Tanh", [f"product{number}"], [tensor], name=tensor))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, ["N", width])],
        [helper.make_tensor_value_info(tensor, 1, ["N", width])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "net.onnx")
    data = rng.normal(size=(60, width)).astype(np.float32)
    data[50:54] *= 30  # far beyond the ranges of the calibration samples
    np.savez(tmp_path / "data.npz", x=data)
    if not has_work:
        monkeypatch.setattr(repair._Repair, "_search_float_blocks", use_up_work)
    result = insert_net(tmp_path)
    trace = result.search.repair
    assert trace.used_holdout
    assert result.validation.reuses_samples
    assert trace.stop_reason == (None if has_work else "work")
    assert trace.default_sqnr < 20 <= trace.sqnr
    assert 0 < len(trace.float_blocks) < len(weights)


def use_up_work(state: Any) -> None:
    """End a repair before it searches for float blocks."""
    state._find_groups()
    state._request.budget.charge(math.inf)


def test_the_plan_of_a_repair_gives_the_same_model(outlier_net: Path) -> None:
    """The plan of the result, applied to the source, gives the same bytes, and so does a second run."""
    result, again = insert_net(outlier_net), insert_net(outlier_net)
    applied = insert_net(outlier_net, plan=result.plan)
    assert applied.search is None
    for name, other in (("again", again), ("applied", applied)):
        other.save(outlier_net / f"{name}.onnx")
    result.save(outlier_net / "first.onnx")
    first = (outlier_net / "first.onnx").read_bytes()
    assert (outlier_net / "again.onnx").read_bytes() == first
    feeds = {"x": np.ones((2, 16), np.float32)}
    outputs = [run_onnx(outlier_net / f"{name}.onnx", feeds) for name in ("first", "applied")]
    np.testing.assert_array_equal(*(np.asarray(values) for values in outputs))


@pytest.mark.parametrize(
    "options",
    [{"min_sqnr": 3}, {"min_agreement": 0}, {"optimize": "size"}, {"validate": False}, {"data": "random:16"}],
)
def test_requests_that_a_repair_would_break(outlier_net: Path, options: dict[str, Any]) -> None:
    """Bounds, another objective, no validation and random data exclude the default target."""
    result = insert_net(outlier_net, **options)
    assert result.search is None or result.search.repair is None


def test_many_quantized_tensors_exclude_a_repair(outlier_net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the number of quantized tensors that are examined, the default plan stays, with its miss."""
    monkeypatch.setattr("graphquant.analysis.validation.MAX_MEASURED_SITES", 2)
    result = insert_net(outlier_net)
    assert result.search is None
    assert result.validation is not None
    assert result.validation.misses_target


def test_a_holdout_without_large_errors_does_not_hide_them(outlier_net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibration samples below the target start a repair, although the hold-out is above it."""
    data = np.load(outlier_net / "data.npz")["x"]
    plain = insert_net(outlier_net, min_sqnr="none")
    plain.save(outlier_net / "plain.onnx")
    expected, actual = (run_onnx(outlier_net / name, {"x": data})[0] for name in ("net.onnx", "plain.onnx"))
    errors = np.square(actual - expected).sum(1) / np.square(expected).sum(1)
    np.savez(outlier_net / "data.npz", x=data[np.argsort(-errors)])  # the hold-out is the last fifth
    holdout_sqnr = insert_net(outlier_net, min_sqnr="none").validation.worst_sqnr
    monkeypatch.setattr(plan_search, "DEFAULT_MIN_SQNR", holdout_sqnr - 1)
    result = insert_net(outlier_net)
    assert result.search is not None
    trace = result.search.repair
    assert trace is not None
    assert trace.default_sqnr < trace.target_sqnr < holdout_sqnr
    assert trace.met
    monkeypatch.setattr(plan_search, "DEFAULT_MIN_SQNR", holdout_sqnr - CLOSE_DB)
    assert insert_net(outlier_net).search is None


def test_little_work_keeps_the_default_plan(outlier_net: Path) -> None:
    """The limit of work ends the search before it starts; the default plan stays, and the reason is stored."""
    result = insert_net(outlier_net, search_time="0.01x")
    plain = insert_net(outlier_net, min_sqnr="none")
    assert result.search is not None
    assert result.search.repair is not None
    assert result.search.repair.stop_reason == "work"
    assert result.search.repair.steps == ()
    assert result.plan.sites == plain.plan.sites
    assert result.validation is not None
    assert result.validation.misses_target
    assert result.failures == ()


def test_weights_are_compared_with_the_prepared_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight of a repaired plan is compared with the one that preparation folded, also behind an Identity."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="c"),
        helper.make_node("Identity", ["c"], ["i"], name="i"),
        helper.make_node("Mul", ["i", "f"], ["d"], name="d"),
        helper.make_node("Conv", ["d", "w"], ["y"], name="y"),
    ]
    rng = np.random.default_rng(0)
    constants = {"w": rng.normal(size=(8, 8, 1, 1)).astype(np.float32), "f": np.array([0.125], np.float32)}
    infos = [helper.make_tensor_value_info(name, 1, [1, 8, 6, 6]) for name in "xy"]
    weights = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    save(model, tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(20, 8, 6, 6)).astype(np.float32))
    monkeypatch.setattr(plan_search, "DEFAULT_MIN_SQNR", 200.0)
    result = insert_net(tmp_path, search_time="0.01x")
    assert result.search is not None
    assert result.search.repair is not None
    assert result.validation is not None
    assert result.validation.comparison is not None
    errors = [site.local for site in result.validation.comparison.sites if site.parameter]
    assert len(errors) == 3
    assert min(error for error in errors if error is not None) > 35


@pytest.mark.parametrize("stop_reason", ["work", None])
def test_a_limit_of_work_keeps_the_float_blocks_found_so_far(
    outlier_net: Path, monkeypatch: pytest.MonkeyPatch, stop_reason: str | None
) -> None:
    """The plan with which the search for float blocks ends is built, also without work left to measure algorithms."""
    search, search_plan = repair._Repair._search_float_blocks, repair.search_cheapest_plan

    def search_until_limit(self: Any) -> None:
        def use_up_work(*args: Any, **options: Any) -> Any:
            result = search_plan(*args, **options)
            self._request.budget.work = self._request.budget.limit
            return replace(result, stop_reason=stop_reason)

        monkeypatch.setattr(repair, "search_cheapest_plan", use_up_work)
        search(self)

    monkeypatch.setattr(repair._Repair, "_search_float_blocks", search_until_limit)
    monkeypatch.setattr(repair._Repair, "_float_hopeless_blocks", lambda _: None)
    trace = insert_net(outlier_net, algorithms=NO_SCALING).search.repair
    assert trace.stop_reason == "work"
    assert trace.float_blocks
    assert trace.sqnr > trace.default_sqnr


def test_ops_that_select_rows_stay_float(tmp_path: Path) -> None:
    """Rows that a TopK exchanges differ as a whole: the ops before it stay float, and those after it have 8 bits."""
    rng, width = np.random.default_rng(0), 32
    weights = {name: rng.normal(0, 0.2, (width, size)) for name, size in (("a", width), ("b", 1), ("c", width))}
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], name="first"),
        helper.make_node("MatMul", ["h", "b"], ["s"], name="scores"),
        helper.make_node("TopK", ["s", "k"], ["best", "chosen"], name="top", axis=0),
        helper.make_node("Squeeze", ["chosen", "axis"], ["rows"], name="rows"),
        helper.make_node("Gather", ["h", "rows"], ["picked"], name="pick"),
        helper.make_node("MatMul", ["picked", "c"], ["y"], name="last"),
    ]
    values = {**{name: value.astype(np.float32) for name, value in weights.items()}}
    values |= {"k": np.array([8]), "axis": np.array([1])}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, [1024, width])],
        [helper.make_tensor_value_info("y", 1, [8, width])],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=rng.normal(0, 1, (20, 1024, width)).astype(np.float32))
    rules = tmp_path / "rules.toml"
    rules.write_text((shipped_rule_files()["onnxruntime"]).read_text("utf-8").replace('costs = "onnxruntime"', ""))
    assert insert_net(tmp_path, rules=str(rules), min_sqnr="none").validation.worst_sqnr < 20
    result = insert_net(tmp_path, rules=str(rules))
    assert result.search.repair.met
    assert {site.tensor.op for site in result.plan.sites if site.parameter} == {"c"}


def test_little_work_limits_the_measurements(outlier_net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without work for more sets of groups, one is measured, and the search goes on."""
    limits: list[int] = []
    bisect = repair.bisect_errors
    monkeypatch.setattr(repair, "bisect_errors", lambda *args: (limits.append(args[2]), bisect(*args))[1])
    insert_net(outlier_net, algorithms=NO_SCALING)
    monkeypatch.setattr(repair, "SENSITIVITY_SHARE", 0.0)
    assert insert_net(outlier_net, algorithms=NO_SCALING).search.repair.stop_reason is None
    assert (limits[0], limits[-1]) == (16, 1)


def test_noisier_tensors_share_more_of_an_error(outlier_net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations have the error that their statistics tell, and weights that of their bits."""
    noises: list[tuple[Any, dict[int, float]]] = []

    def find_groups(self: Any) -> Any:
        groups = find(self)
        noises.append(
            ([self._plan(repair.DEFAULT_RECIPE).sites[group.sites[0]] for group in groups], self._noise(groups))
        )
        return groups

    find = repair._Repair._find_groups
    monkeypatch.setattr(repair._Repair, "_find_groups", find_groups)
    insert_net(outlier_net, algorithms=NO_SCALING)
    sites, noise = noises[0]
    by_bits = {bits: [noise[k] for k, site in enumerate(sites) if site.scheme.type.bits == bits] for bits in (8, 32)}
    assert all(value < 1e-8 for value in by_bits[32])
    assert {noise[k] for k, site in enumerate(sites) if site.parameter and site.scheme.type.bits == 8} == {2**-7}
    activations = [noise[k] for k, site in enumerate(sites) if not site.parameter]
    assert len(set(activations)) > 1
    assert all(1e-4 < value < 1 for value in activations)


@pytest.mark.parametrize(
    ("sqnr", "holdout_sqnr", "blocks", "work", "aim"),
    [
        (26.0, 25.0, ("a",), 9.0, 23.0),  # three more dB than two above the target
        (26.0, 22.4, ("a",), 9.0, None),
        (26.0, 25.0, ("a",), 3.9, None),  # too little work for a search
        (26.0, 25.0, (), 9.0, None),  # nothing is in float
        (21.0, 19.0, ("a",), 9.0, 27.0),
        (-math.inf, -math.inf, (), 9.0, None),
    ],
)
def test_the_aim_follows_the_holdout(
    sqnr: float, holdout_sqnr: float, blocks: tuple[str, ...], work: float, aim: float | None
) -> None:
    """The aim rises after a miss on the hold-out, and falls if float blocks reach much more than the target."""
    state = SimpleNamespace(
        _request=SimpleNamespace(target_sqnr=20.0, budget=SimpleNamespace(remaining=work)),
        _current=replace(repair.DEFAULT_RECIPE, float_blocks=blocks),
        _current_sqnr=sqnr,
        _aim=26.0,
        _plan_work=lambda _recipe: 1.0,
        _meter=None,
        _search_meter=None,
    )
    assert repair._Repair._adjust_aim(state, holdout_sqnr) == (aim is not None)  # type: ignore[arg-type]
    assert aim is None or state._aim == aim


def test_a_measured_plan_is_not_estimated(outlier_net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gain that algorithms have with other ranges does not replace the measured SQNR of the default plan."""
    estimates = []

    def search(self: Any) -> None:
        sqnr = self._measure(repair.DEFAULT_RECIPE)
        self._algorithm_gains[()] = 2.0
        estimates.append((self._estimate(repair.DEFAULT_RECIPE), sqnr))

    monkeypatch.setattr(repair._Repair, "_search", search)
    insert_net(outlier_net)
    assert [estimate - sqnr for estimate, sqnr in estimates] == [0.0]


@pytest.mark.parametrize("method", ["_try_scaling", "_find_groups", "_search_float_blocks"])
def test_interrupts_keep_the_best_plan(outlier_net: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Ctrl-C during any step ends the search with its best plan so far."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(repair._Repair, method, interrupt)
    algorithms = () if method == "_try_scaling" else NO_SCALING
    result = insert_net(outlier_net, algorithms=algorithms)
    assert result.search is not None
    assert result.search.interrupted
    assert result.search.repair is not None
    assert result.search.repair.stop_reason == "interrupt"
    assert result.search.repair.sqnr >= result.search.repair.default_sqnr
    assert result.inserted


def test_errors_keep_the_best_plan(outlier_net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of the search that the runtime rejects ends the search; the best plan so far is the result."""

    def fail(*_: object, **_options: object) -> None:
        raise ModelError("no kernel")

    monkeypatch.setattr("graphquant.optimize.repair.switch_groups", fail)
    result = insert_net(outlier_net, algorithms=NO_SCALING)
    assert result.search is not None
    assert result.search.repair is not None
    assert (result.search.repair.stop_reason, result.search.repair.problem) == ("error", "no kernel")
    assert result.inserted


def test_json_of_a_repair(outlier_net: Path) -> None:
    """The JSON has the changes as fields."""
    data = InsertResult.of(insert_net(outlier_net)).as_json()["search"]["repair"]
    assert data["met"] is True
    assert data["target"] == 20
    assert data["default_sqnr"] < 20 <= data["sqnr"]
    assert data["stopped"] is None
    assert [step["change"] for step in data["steps"] if step["kept"]][-1] == "smoothquant"


COSTS = SearchCosts(run=0.001, observed_run=0.01, session=0.01, macs={}, constant_bytes=0)


def test_a_budget_counts_work_before_it_starts() -> None:
    """A factor of the calibration's work limits that of the whole command; the last work that fits is allowed."""
    budget = SearchBudget("4x", COSTS, 100, 1, 3600.0)
    assert budget.limit == pytest.approx(4 * (START_SECONDS + COSTS.calibration(100)))
    assert budget.work == START_SECONDS + COSTS.insert(100, 1)
    budget.charge(budget.remaining)
    with pytest.raises(SearchLimitError) as error:
        budget.charge(0.001)
    assert error.value.reason == "work"
    parts = [0.1, 0.2, 0.7]  # in another order, their sum is larger
    budget.extend(sum(sorted(parts, reverse=True)))
    for part in parts:
        budget.charge(part)
    with pytest.raises(SearchLimitError):
        budget.charge(0.001)


@pytest.fixture
def meters(monkeypatch: pytest.MonkeyPatch) -> list[repair.OutputMeter]:
    """Return a list to which each new meter is added."""
    created: list[repair.OutputMeter] = []
    create = repair.OutputMeter.__init__

    def spy(meter: repair.OutputMeter, *arguments: Any) -> None:
        create(meter, *arguments)
        created.append(meter)

    monkeypatch.setattr(repair.OutputMeter, "__init__", spy)
    return created


@pytest.mark.parametrize(("search_time", "samples"), [("1.6x", 8), ("100x", 16)])
def test_little_work_measures_fewer_samples(
    outlier_net: Path, meters: list[repair.OutputMeter], search_time: str, samples: int
) -> None:
    """If the limit is close, plans are measured on half of the samples, so that more plans are measured."""
    insert_net(outlier_net, search_time=search_time)
    assert len(meters[0].feeds) == samples  # the later meters are those of the hold-out


@pytest.mark.parametrize(("gap", "is_measured"), [(math.inf, True), (4.0, True), (2.0, False), (math.nan, False)])
def test_new_errors_on_the_holdout_are_measured_there(gap: float, is_measured: bool) -> None:
    """A plan whose outputs are NaN only on the hold-out is repaired on its samples, as one with much more error."""

    class State(repair._Repair):
        def __init__(self) -> None:
            self._request = SimpleNamespace(target_sqnr=20.0)  # type: ignore[assignment]
            self._meter = self._search_meter = object()  # type: ignore[assignment]
            self._aim, self._current_sqnr, self.is_measured = 21.0, 21.0, False

        def _measure_on_holdout(self) -> None:
            self.is_measured = True

    state = State()
    assert state._adjust_aim(21.0 - gap)
    assert state.is_measured == is_measured
    assert state._aim == (23.0 if gap == 2.0 else 21.0)


def test_a_repair_judges_plans_on_the_samples_of_the_validation(
    outlier_net: Path, meters: list[repair.OutputMeter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without bounds, both measure the first samples of the hold-out."""
    monkeypatch.setattr(plan_search, "MAX_UNBOUNDED_SAMPLES", 3)
    monkeypatch.setattr("graphquant.analysis.validation.MAX_UNBOUNDED_SAMPLES", 3)
    result = insert_net(outlier_net)
    assert result.validation is not None
    assert result.validation.comparison is not None
    assert result.validation.comparison.samples == 3
    with np.load(outlier_net / "data.npz") as data:
        (samples,) = data.values()
    start = len(samples) - max(4, len(samples) // 5)
    measured = [next(iter(feed.values())) for feed in meters[-1].feeds]
    np.testing.assert_array_equal(np.concatenate(measured), samples[start : start + 3])


def test_a_short_calibration_still_allows_a_search() -> None:
    """The start of the process counts as work of the calibration, and leaves a small model enough for a search."""
    costs = SearchCosts(run=1e-5, observed_run=1e-4, session=1e-3, macs={}, constant_bytes=0)
    assert SearchBudget("10x", costs, 8, 0, 0.01).remaining > 8 * START_SECONDS


@pytest.mark.parametrize(("search_time", "seconds"), [("90s", 90.0), ("2x", 30.0), ("0.5x", MIN_LIMIT_SECONDS)])
def test_a_budget_ends_with_its_time(monkeypatch: pytest.MonkeyPatch, search_time: str, seconds: float) -> None:
    """Seconds limit the time, and a factor does so with the calibration's processor time, but not below ten seconds."""
    now = 1000.0
    clock = "process_time" if search_time.endswith("x") else "monotonic"
    monkeypatch.setattr(f"graphquant.optimize.search_budget.time.{clock}", lambda: now)
    free = SearchCosts(run=0.0, observed_run=10.0, session=0.0, macs={}, constant_bytes=0)
    budget = SearchBudget(search_time, free, 100, 0, 7.0)
    assert (budget.limit == math.inf) == search_time.endswith("s")
    budget.limit = math.inf
    now += seconds
    budget.charge(1)
    now += 0.1
    with pytest.raises(SearchLimitError) as error:
        budget.charge(1)
    assert error.value.reason == "time"


COARSE = """
[scheme.coarse]
bits = 8
observe = { name = "fixed-point", exponent = 1 }
[[rule]]
name = "coarse"
producer = { name = "x" }
consumer = { kind = "matmul" }
quantize = "coarse"
"""


@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_scores_before_a_softmax_count(tmp_path: Path, spread: float) -> None:
    """Probabilities are below the target in both nets, but only where the scores are too does the target fail."""
    rng = np.random.default_rng(3)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["scores"], name="scores"),
        helper.make_node("Mul", ["scores", "factor"], ["scaled"], name="scaled"),
        helper.make_node("Softmax", ["scaled"], ["y"], name="softmax", axis=-1),
    ]
    # A step of 2 is fine enough for the scores of inputs around 8. The factor makes the probabilities sensitive.
    weight, factor = rng.standard_normal((8, 40)) / 8, np.array(64.0 / spread)
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info("x", 1, ["N", 8])],
        [helper.make_tensor_value_info("y", 1, ["N", 40])],
        [
            numpy_helper.from_array(value.astype(np.float32), name)
            for name, value in (("w", weight), ("factor", factor))
        ],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=(rng.standard_normal((40, 8)) * spread).astype(np.float32))
    (tmp_path / "coarse.toml").write_text(COARSE)
    rules = str(tmp_path / "coarse.toml")
    validation = insert_net(tmp_path, rules=rules, search_time="0.01x").validation
    assert validation is not None
    assert validation.comparison is not None
    assert validation.comparison.sqnr is not None
    assert validation.comparison.sqnr < 20
    assert (validation.score_sqnr["y"] >= 20) == (spread == 8.0)
    assert validation.misses_target == (spread == 1.0)
    assert validation.worst_sqnr == max(validation.comparison.sqnr, validation.score_sqnr["y"])


@pytest.mark.parametrize(("value", "expected"), [(-1.0, -1.0), (1.0, -2.0), (-5.0, -2.0)])
def test_steps_between_a_plan_that_meets_and_one_that_misses(value: float, expected: float) -> None:
    """A correction that leaves the interval of both plans ends in its middle."""
    assert repair.step_between(value, -4.0, 0.0) == expected
    assert repair.step_between(value, -math.inf, math.inf) == value


def test_errors_of_groups_are_those_of_the_scaled_plan(outlier_net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaled channels change the errors of tensors, so that they are measured with them."""
    measured = []
    measure_switched = repair._Repair._measure_switched

    def record(self: Any, recipe: Any, *others: Any) -> Any:
        measured.append(recipe.algorithms)
        return measure_switched(self, recipe, *others)

    monkeypatch.setattr(repair._Repair, "_measure_switched", record)
    monkeypatch.setattr(repair, "AIM_MARGIN_DB", 40.0)
    insert_net(outlier_net)
    assert measured
    assert all("smoothquant" in algorithms for algorithms in measured)

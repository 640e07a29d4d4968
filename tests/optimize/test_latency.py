"""The fastest plan, by times that are given."""

from __future__ import annotations

import importlib
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

import graphquant as gq
from graphquant.api.plan import prepare_and_plan
from graphquant.calibration.holdout import open_model_data
from graphquant.errors import UsageError
from graphquant.formats import format_module
from graphquant.optimize import latency
from graphquant.optimize.candidates import ScaleGroup
from graphquant.optimize.latency import (
    MAX_TIMED_PLANS,
    FusionMap,
    LatencyProfile,
    LatencyTimer,
    TimeRatio,
    make_latency_groups,
    measure_time_ratio,
    minimize_latency,
    time_beside_float,
)
from graphquant.optimize.search import GAIN_TOO_SMALL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

OpKey = tuple[str, str]


class Chain:
    """Ops one behind the other with a site before, between and behind them; an op is float where one of its is left."""

    def __init__(self, quantized: list[float], plain: list[float], conversion: float = 0.0) -> None:
        """Seconds of each op on integers and in float, and of turning a tensor into integers or back."""
        self.times = quantized, plain
        self.conversion = conversion
        self.compared: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        count = len(plain)
        ends = [{max(index - 1, 0), min(index, count - 1)} for index in range(count + 1)]
        self.groups = [
            ScaleGroup(sites=(i,), ops=frozenset(("", f"op{entry}") for entry in end)) for i, end in enumerate(ends)
        ]

    def profile(self, float_sites: tuple[int, ...]) -> LatencyProfile:
        """Return the time of each op."""
        low = [not {index, index + 1} & set(float_sites) for index in range(len(self.times[1]))]
        ops = {("", f"op{index}"): self.times[0 if entry else 1][index] for index, entry in enumerate(low)}
        neighbors = [{low[max(index - 1, 0)], low[min(index, len(low) - 1)]} for index in range(len(self.groups))]
        edges = {index for index, kinds in enumerate(neighbors) if len(kinds) > 1 or index in {0, len(low)}}
        return LatencyProfile(
            op_seconds=ops, site_seconds=dict.fromkeys(sorted(edges - set(float_sites)), self.conversion)
        )

    def compare(self, first_sites: tuple[int, ...], second_sites: tuple[int, ...]) -> TimeRatio:
        """One plan beside the other."""
        self.compared.append((first_sites, second_sites))
        first, second = self.profile(first_sites).total_seconds, self.profile(second_sites).total_seconds
        time_ratio = first / second
        return TimeRatio(
            median=time_ratio,
            low=time_ratio - 0.001,
            high=time_ratio + 0.001,
            first_seconds=first,
            second_seconds=second,
        )

    def best_float_sites(self) -> tuple[int, ...]:
        """Return the sites that the fastest plan keeps in float."""
        return minimize_latency(self.groups, self.profile, self.compare).float_sites


def test_what_is_slower_is_left() -> None:
    """Tensors between ops that are slower on integers become float, and tensors that other ops need stay."""
    assert Chain([1, 1, 9, 9, 1, 1], [5, 5, 2, 2, 5, 5]).best_float_sites() == (3,)
    assert Chain([1, 1, 1], [5, 5, 5]).best_float_sites() == ()
    assert Chain([5, 5, 5], [1, 1, 1]).best_float_sites() == (0, 1, 2, 3)


def test_conversions_count() -> None:
    """A gain that the conversions around it take away is none."""
    assert Chain([1, 1, 3, 3, 1, 1], [5, 5, 2, 2, 5, 5], conversion=0.1).best_float_sites() == (3,)
    assert Chain([1, 1, 3, 3, 1, 1], [5, 5, 2, 2, 5, 5], conversion=1.5).best_float_sites() == ()


def test_what_does_not_help_together_is_tried_by_halves() -> None:
    """A profile that is wrong for an op costs measurements, not the gain that there is elsewhere."""
    chain = Chain([9, 9, 1, 1, 1, 1], [2, 2, 5, 5, 5, 5])

    def wrong(float_sites: tuple[int, ...]) -> LatencyProfile:
        profile = chain.profile(float_sites)
        return LatencyProfile(
            op_seconds={**profile.op_seconds, ("", "op4"): 5.0 if {4, 5} & set(float_sites) else 11.0}, site_seconds={}
        )

    assert chain.best_float_sites() == (0, 1)
    result = minimize_latency(chain.groups, wrong, chain.compare)
    assert {0, 1} <= set(result.float_sites)
    assert chain.profile(result.float_sites).total_seconds < chain.profile(()).total_seconds
    assert ((0, 1), ()) in chain.compared
    assert result.plans <= MAX_TIMED_PLANS


def test_noise_keeps_the_rules_plan() -> None:
    """Without a sure gain nothing is left, and the search ends."""
    chain = Chain([5, 5, 5, 5], [1, 1, 1, 1])
    unsure = TimeRatio(median=0.9, low=0.7, high=1.1, first_seconds=1.0, second_seconds=1.0)
    result = minimize_latency(chain.groups, chain.profile, lambda _first, _second: unsure)
    assert result.float_sites == ()
    assert 1 <= result.plans <= MAX_TIMED_PLANS


def test_interrupted() -> None:
    """Ctrl-C keeps the fastest plan so far."""

    def compare(_one: tuple[int, ...], _other: tuple[int, ...]) -> TimeRatio:
        raise KeyboardInterrupt

    chain = Chain([5, 5], [1, 1])
    result = minimize_latency(chain.groups, chain.profile, compare)
    assert result.interrupted
    assert result.float_sites == ()


def test_parts_of_a_model(samples: Path) -> None:
    """Sites of one scale are one part, and an op counts with the bias and the limit that it absorbs."""
    prepared, plan = prepare_and_plan(gq.load(samples / "digits_cnn.onnx"), by_cost=False)
    scale_groups = make_latency_groups(prepared, plan, range(len(plan.sites)))
    assert sorted(site for group in scale_groups for site in group.sites) == list(range(len(plan.sites)))
    by_tensor = {str(plan.sites[site].tensor): group for group in scale_groups for site in group.sites}
    assert by_tensor["stem/relu:0"].ops == {("", "stem/conv"), ("", "depthwise/conv")}
    assert by_tensor["pointwise/relu:0"] is by_tensor["max_pool:0"]
    assert ("", "max_pool") in by_tensor["max_pool:0"].ops
    assert by_tensor["residual/relu:0"].ops >= {("", "residual/add"), ("", "branch_wide/bias_add")}
    assert FusionMap(prepared).fusion_target(("", "stem/relu")) == ("", "stem/conv")
    assert FusionMap(prepared).fusion_target(("", "hidden/relu")) == ("", "hidden/matmul")


def test_a_profile_tells_the_ops_of_the_model(samples: Path) -> None:
    """Ops that onnxruntime fused and renamed are told as those of the model, conversions apart."""
    source = gq.load(samples / "digits_cnn.onnx")
    quant = gq.insert(source, data=str(samples / "digits_cnn_calib.npz"), validate=False).model
    feeds = LatencyTimer.for_data(source, _batches(source, samples), as_tflite=False).feeds
    assert len(feeds) == 1
    for model in (source, quant):
        spent = format_module("onnx").profile_ops(model, feeds)
        positions = {
            FusionMap(source).fusion_target(position) for position in spent.seconds if position[1] in source.main
        }
        assert positions >= {("", name) for name in ("stem/conv", "pointwise/conv", "residual_1/conv", "hidden/matmul")}
        assert all(seconds > 0 for seconds in [*spent.seconds.values(), *spent.conversion_seconds.values()])
        assert bool(spent.conversion_seconds) == (model is quant)


def _batches(model: Any, samples: Path) -> Any:
    from graphquant.calibration.data import open_data

    return open_data(str(samples / "digits_cnn_calib.npz"), format_module("onnx").input_specs(model))


def ratios(monkeypatch: pytest.MonkeyPatch, ratio: Callable[[Any, Any], float]) -> None:
    """Lets times be what `ratio` says of two runs."""

    def judged(first: Any, second: Any, **_: object) -> TimeRatio:
        measured_ratio = ratio(first(), second())
        return TimeRatio(
            median=measured_ratio,
            low=measured_ratio,
            high=measured_ratio,
            first_seconds=measured_ratio,
            second_seconds=1.0,
        )

    monkeypatch.setattr("graphquant.optimize.latency.measure_time_ratio", judged)


def quantize_runs(runs: Mapping[Any, Any]) -> int:
    """Quantizations of the model that a run is of."""
    return sum(op.kind == "quantize" for op in runs["model"].main.ops())


@pytest.fixture
def by_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that give the model itself, so that ratios can be made up."""
    monkeypatch.setattr("graphquant.formats.onnx.prepare_timed_run", lambda model, _feeds: lambda: {"model": model})


@pytest.mark.slow
@pytest.mark.usefixtures("by_pairs")
def test_float_where_it_is_faster(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., Any]
) -> None:
    """Nothing is quantized where that takes longer, which is said; the plan says why and gives the same bytes again."""
    ratios(monkeypatch, lambda first_run, second_run: 1 + 0.1 * (quantize_runs(first_run) - quantize_runs(second_run)))
    model, data = samples / "digits_cnn.onnx", samples / "digits_cnn_calib.npz"
    output = cli(
        *("insert", model, "--data", data, "--optimize", "latency", "--allow-empty"),
        *("-o", tmp_path / "o.onnx", "--report", tmp_path / "r"),
    )
    assert "float is faster" in output.stdout
    report = json.loads((tmp_path / "r").read_text())
    assert report["sites"] == []
    assert not report["search"]["latency"]["quantized"]
    assert report["search"]["latency"]["rules"]["ratio"] > 1
    assert {entry["reason"].partition(",")[0] for entry in report["skips"] if entry["rule"] == "latency"}
    inserted_result = gq.insert(model, data=str(data), optimize="latency", allow_empty=True)
    assert inserted_result.model is inserted_result.source
    assert gq.insert(model, data=str(data), plan=inserted_result.plan, allow_empty=True).inserted == ()


@pytest.mark.slow
@pytest.mark.usefixtures("by_pairs")
def test_quantized_where_that_is_faster(samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing is faster, the plan of the rules stays. A saved plan gives the same bytes."""
    ratios(monkeypatch, lambda first_run, second_run: 1 - 0.01 * (quantize_runs(first_run) - quantize_runs(second_run)))
    model, data = samples / "digits_cnn.onnx", str(samples / "digits_cnn_calib.npz")
    inserted_result = gq.insert(model, data=data, optimize="latency")
    rules_plan = prepare_and_plan(gq.load(model), by_cost=False)[1]
    assert len(inserted_result.inserted) == len(gq.insert(model, data=data, plan=rules_plan).inserted)
    assert inserted_result.search is not None
    assert inserted_result.search.outcome_ratio is not None
    assert inserted_result.search.outcome_ratio.median < 1
    again = gq.insert(model, data=data, plan=inserted_result.plan)
    first_path, second_path = inserted_result.save(tmp_path / "one.onnx"), again.save(tmp_path / "other.onnx")
    assert first_path.read_bytes() == second_path.read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("by_pairs")
def test_with_a_bound(samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for a bound leaves what costs least time; if that is no faster than float, all is float."""
    ratios(monkeypatch, lambda first_run, second_run: 1 - 0.01 * (quantize_runs(first_run) - quantize_runs(second_run)))
    model, data = samples / "digits_cnn.onnx", str(samples / "digits_cnn_calib.npz")
    inserted_result = gq.insert(model, data=data, optimize="latency", min_sqnr=45)
    assert inserted_result.search is not None
    assert inserted_result.search.plan is inserted_result.plan
    assert inserted_result.inserted
    ratios(
        monkeypatch, lambda first_run, second_run: 1 - 0.0001 * (quantize_runs(first_run) - quantize_runs(second_run))
    )
    inserted_result = gq.insert(model, data=data, optimize="latency", min_sqnr=45, allow_empty=True)
    assert not inserted_result.inserted
    assert inserted_result.search is not None
    assert inserted_result.search.all_float
    assert inserted_result.search.search_validation is None


@pytest.mark.usefixtures("by_pairs")
@pytest.mark.parametrize("bound", [(), ("--min-sqnr", "30")])
def test_what_is_hardly_faster(
    bound: tuple[str, ...], samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., Any]
) -> None:
    """After a small gain, no message says that float is faster, or mentions a search or check without a result."""
    ratios(
        monkeypatch, lambda first_run, second_run: 1 - 0.0015 * (quantize_runs(first_run) - quantize_runs(second_run))
    )
    model, data = samples / "digits_cnn.onnx", samples / "digits_cnn_calib.npz"
    output = cli(
        "insert",
        model,
        "--data",
        data,
        "--optimize",
        "latency",
        *bound,
        "--allow-empty",
        "-v",
        "-o",
        tmp_path / "o.onnx",
    ).stdout
    assert f"the final plan 0.98.\nNothing is quantized: {GAIN_TOO_SMALL}." in output
    assert "(rule latency)" in output
    assert "float is faster" not in output
    assert "Searched" not in output
    assert "alidated" not in output


def test_nothing_to_time(samples: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    """If there is nothing to quantize, that is the reason why latency was not measured."""
    options = ("--data", samples / "digits_cnn_calib.npz", "--optimize", "latency", "--exclude", "*", "--allow-empty")
    output = cli("insert", samples / "digits_cnn.onnx", *options, "-o", tmp_path / "o.onnx").stdout
    assert "not measured" in output


def test_invalid_objectives(samples: Path) -> None:
    """Optimizing latency without samples and unknown objectives are usage errors."""
    with pytest.raises(UsageError, match="Pass data"):
        gq.insert(samples / "digits_cnn.onnx", rules="weight_only", optimize="latency")
    with pytest.raises(UsageError, match="optimize"):
        gq.insert(samples / "digits_cnn.onnx", rules="weight_only", optimize="speed")


class Machine:
    """A clock that runs move on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.runs: list[str] = []

    def clock(self) -> float:
        """Return the time."""
        return self.now

    def taking(self, name: str, times: Iterator[float]) -> Callable[[], None]:
        """A run that takes the next of `times`."""

        def run() -> None:
            self.now += next(times)
            self.runs.append(name)

        return run


def steady(seconds: float) -> Iterator[float]:
    """The same time again and again."""
    while True:
        yield seconds


def busy(seconds: float, every: int) -> Iterator[float]:
    """A time that is ten times as long now and then."""
    number = 0
    while True:
        number += 1
        yield seconds * (10 if number % every == 0 else 1)


def test_the_ratio_is_that_of_the_shortest_runs() -> None:
    """Interruptions of single runs do not count, and the interval contains the ratio."""
    machine = Machine()
    measured_ratio = measure_time_ratio(
        machine.taking("one", busy(0.002, 5)), machine.taking("other", steady(0.001)), seconds=1, clock=machine.clock
    )
    assert measured_ratio.median == pytest.approx(2)
    assert measured_ratio.low == pytest.approx(2)
    assert measured_ratio.high == pytest.approx(2)
    assert (measured_ratio.first_seconds, measured_ratio.second_seconds) == pytest.approx((0.002, 0.001))


def test_both_run_in_every_round_by_turns() -> None:
    """Rounds begin with either, so that what changes while they run falls on both."""
    machine = Machine()
    measure_time_ratio(
        machine.taking("a", steady(0.02)), machine.taking("b", steady(0.03)), seconds=0, clock=machine.clock
    )
    # The first run of each, which is as long as a slice, is the first of nine rounds.
    assert machine.runs == list("ab") + list("baab") * 4


def test_short_runs_are_timed_once_before_the_rounds() -> None:
    """A run that is shorter than a slice gives the number of runs in a block, and is no round."""
    machine = Machine()
    measure_time_ratio(
        machine.taking("a", steady(0.004)), machine.taking("b", steady(0.006)), seconds=0, clock=machine.clock
    )
    assert machine.runs == list("ab") + list("aabbaa") * 4 + list("aab")


def test_more_rounds_where_they_differ() -> None:
    """A ratio that is known closely ends the rounds early, another takes the seconds that there are."""
    machine = Machine()
    measure_time_ratio(
        machine.taking("a", steady(0.02)), machine.taking("b", steady(0.03)), seconds=5, clock=machine.clock
    )
    assert machine.now < 1
    machine = Machine()
    uneven = (0.02 * (1 + 0.618 * number % 1) for number in range(10**6))
    measured_ratio = measure_time_ratio(
        machine.taking("a", uneven), machine.taking("b", steady(0.03)), seconds=5, clock=machine.clock
    )
    assert machine.now == pytest.approx(5, abs=0.3)
    assert measured_ratio.low < measured_ratio.median < measured_ratio.high


def test_short_runs_are_timed_in_blocks() -> None:
    """A clock that takes time itself hardly changes the ratio of runs that take little more."""
    machine = Machine()

    def clock() -> float:
        machine.now += 1e-6
        return machine.now

    measured_ratio = measure_time_ratio(
        machine.taking("a", steady(4e-6)), machine.taking("b", steady(2e-6)), seconds=0.1, clock=clock
    )
    assert measured_ratio.median == pytest.approx(2, rel=0.02)


def test_clocks_with_long_steps_are_not_used() -> None:
    """A block that takes less than a step of the clock would take no time, and the ratio be anything."""

    def coarse() -> float:
        return time.perf_counter() // 0.004 * 0.004

    def fine() -> float:
        return time.perf_counter()

    assert latency.choose_clock(coarse) is time.perf_counter
    assert latency.choose_clock(fine) is fine


def spy_times(monkeypatch: pytest.MonkeyPatch, *medians: float) -> list[tuple[gq.Model, gq.Model]]:
    """Let `insert` find these ratios of times; return the pairs of models that it times."""
    timed: list[tuple[gq.Model, gq.Model]] = []

    def time_beside_float(plain: gq.Model, quantized: gq.Model, _: object) -> TimeRatio:
        timed.append((plain, quantized))
        median = medians[len(timed) - 1]
        return TimeRatio(median=median, low=median, high=median, first_seconds=median, second_seconds=1.0)

    monkeypatch.setattr(importlib.import_module("graphquant.api.insert"), "time_beside_float", time_beside_float)
    return timed


def test_the_report_times_the_source(samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is relative to the model that was given, not to the prepared one."""
    timed = spy_times(monkeypatch, 1.2)
    result = gq.insert(samples / "digits_cnn_bn.onnx", data=str(samples / "digits_cnn_calib.npz"), samples=20)
    assert result.plan.steps
    assert timed == [(result.source, result.model)]
    assert result.time_ratio is not None
    assert result.time_ratio.median == 1.2


def test_the_report_does_not_time_a_quantized_source(samples: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """A result of `requantize` is compared with the float model that it was made of."""
    timed, data = spy_times(monkeypatch, 0.5, 0.5), str(samples / "digits_cnn_calib.npz")
    path = gq.insert(samples / "digits_cnn.onnx", data=data, samples=20).save(tmp_path / "quantized.onnx")
    gq.insert(path, data=data, samples=20, requantize=True)
    assert not {op.kind for _, op in timed[1][0].reachable_ops()} & {"quantize", "dequantize"}


@pytest.mark.parametrize(
    ("medians", "expected"),
    [([0.6], 0.6), ([1.2, 0.97, 0.99], 0.99), ([2.0], 2.0), ([1.1, 1.12], 1.12), ([1.02, 1.0], 1.0)],
)
def test_an_unclear_comparison_is_repeated(
    samples: Path, monkeypatch: pytest.MonkeyPatch, medians: list[float], expected: float
) -> None:
    """A result that seems slower is timed again; if the times differ, the median of three pairs of sessions counts."""
    model = gq.load(samples / "digits_cnn.onnx")
    batches = open_model_data(model, str(samples / "digits_cnn_calib.npz"), 1)
    ratios = iter(medians)

    def measure(*_: object, **__: object) -> TimeRatio:
        median = next(ratios)
        return TimeRatio(median=median, low=median, high=median, first_seconds=median, second_seconds=1.0)

    monkeypatch.setattr(latency, "measure_time_ratio", measure)
    assert time_beside_float(model, model, batches).median == expected
    assert list(ratios) == []

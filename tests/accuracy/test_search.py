"""The search for the cheapest plan that meets a bound."""

from __future__ import annotations

import json
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import graphquant as gq
from graphquant.accuracy.choose import FEW, _greedy, choose, cost
from graphquant.accuracy.costs import LITTLE, Group, groups, in_bytes, in_multiply_adds
from graphquant.accuracy.search import MEASUREMENTS, Measured, search

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def drawn(rng: Any, ops: int, number: int) -> tuple[list[Group], dict[tuple[str, str], float]]:
    """Groups that each need up to three of some ops, and what these cost."""
    names = [("", f"op{index}") for index in range(ops)]
    found = []
    for index in range(number):
        some = rng.choice(ops, size=rng.integers(0, min(3, ops) + 1), replace=False)
        error = float(10 ** rng.uniform(-6, -3))
        found.append(Group(sites=(index,), ops=frozenset(names[one] for one in some), error=error))
    return found, {name: float(rng.integers(1, 100)) for name in names}


def left_over(all_groups: list[Group], left: list[int]) -> float:
    """The errors of what stays quantized."""
    return sum(group.error for index, group in enumerate(all_groups) if index not in left)


@pytest.mark.parametrize("seed", range(30))
def test_few_ops_cost_what_the_cheapest_set_does(seed: int) -> None:
    """Up to twelve ops: the cost is that of the cheapest of all sets of groups."""
    rng = np.random.default_rng(seed)
    some, costs = drawn(rng, 5, 8)
    wanted = left_over(some, []) * rng.uniform(0.05, 0.8)
    little = LITTLE * sum(costs.values())
    prices = []
    for count in range(len(some) + 1):
        for left in combinations(range(len(some)), count):
            if left_over(some, list(left)) <= wanted:
                beside = sum(not some[index].ops for index in left)
                prices.append(cost(some, list(left), costs) + little * beside)
    chosen = choose(some, costs, wanted)
    assert left_over(some, chosen) <= wanted * (1 + 1e-9)
    paid = cost(some, chosen, costs) + little * sum(not some[index].ops for index in chosen)
    assert paid == pytest.approx(min(prices), abs=2 * little * len(some))


def test_many_ops_by_the_largest_fall() -> None:
    """More than twelve ops: the wanted sum is met, nothing could be given back, and on average it costs little more."""
    ratios = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        some, costs = drawn(rng, 8, 14)
        wanted = left_over(some, []) * rng.uniform(0.05, 0.8)
        greedy = _greedy(some, costs, wanted, LITTLE)
        assert left_over(some, greedy) <= wanted * (1 + 1e-9)
        best = cost(some, choose(some, costs, wanted), costs)
        ratios.append(cost(some, greedy, costs) / best if best else 1.0)
    assert np.mean(ratios) < 1.2
    some, costs = drawn(np.random.default_rng(0), FEW + 40, 150)
    wanted = left_over(some, []) / 3
    assert left_over(some, choose(some, costs, wanted)) <= wanted * (1 + 1e-9)


def test_groups_are_sites_of_one_scale(samples: Path) -> None:
    """Sites that are tied are one group, and each group knows the ops that multiply on it or make it."""
    prepared, plan = _prepared(samples)
    found = groups(prepared, plan, range(len(plan.sites)), dict.fromkeys(range(len(plan.sites)), 1e-4))
    assert sorted(index for group in found for index in group.sites) == list(range(len(plan.sites)))
    by_tensor = {str(plan.sites[index].tensor): group for group in found for index in group.sites}
    assert by_tensor["pointwise/relu:0"] is by_tensor["max_pool:0"]
    assert by_tensor["pointwise/relu:0"].error == pytest.approx(2e-4)
    assert by_tensor["stem/relu:0"].ops == {("", "stem/conv"), ("", "depthwise/conv")}
    assert by_tensor["max_pool:0"].ops >= {("", "pointwise/conv"), ("", "residual_1/conv")}
    costs, sizes = in_multiply_adds(prepared, {}), in_bytes(prepared)
    assert costs["", "stem/conv"] == 4608
    assert sizes["", "stem/conv"] == 3 * (72 + 8)  # weights and biases
    assert costs.keys() == sizes.keys()


def _prepared(samples: Path) -> Any:
    from graphquant.pipeline.planning import prepared_and_plan

    return prepared_and_plan(gq.load(samples / "digits_cnn.onnx"), None, (), (), (), None)


def test_the_search_ends_with_the_cheapest_that_meets() -> None:
    """Where errors add up as estimated, the cheapest plan that meets the bound is found, in few measurements."""
    rng = np.random.default_rng(3)
    some, costs = drawn(rng, 9, 12)
    measured = []

    def measure(left: tuple[int, ...]) -> Measured:
        measured.append(left)
        error = left_over(some, list(left))
        sqnr = -10 * np.log10(error) if error else np.inf
        return Measured(met=sqnr >= 40, sqnr=sqnr)

    found = search(some, costs, measure, wanted=40.0)
    assert found.measured.met
    assert found.plans == len(measured) <= MEASUREMENTS
    best = cost(some, choose(some, costs, 1e-4), costs) / sum(costs.values())
    assert best <= found.cost <= 1.2 * best
    assert search(some, costs, measure, wanted=None).measured.met


def test_a_bound_that_cannot_be_met() -> None:
    """The best plan is given where none meets the bound."""
    some, costs = drawn(np.random.default_rng(4), 4, 6)
    found = search(some, costs, lambda left: Measured(met=False, sqnr=20.0 + len(left)), wanted=90.0)
    assert not found.measured.met
    assert len(found.left) == len(some)
    assert found.plans <= MEASUREMENTS


def test_interrupted() -> None:
    """Ctrl-C keeps the best plan so far."""
    some, costs = drawn(np.random.default_rng(5), 6, 10)
    calls = []

    def measure(left: tuple[int, ...]) -> Measured:
        calls.append(left)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return Measured(met=False, sqnr=20.0 + len(left))

    found = search(some, costs, measure, wanted=30.0)
    assert found.interrupted
    assert found.left == calls[1]


def test_insert_meets_its_bound(samples: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    """A bound is met on samples that neither calibration nor the search saw; what is left float says why."""
    model, data, bound = samples / "digits_cnn.onnx", samples / "digits_cnn_calib.npz", 60
    plain = gq.insert(model, data=str(data)).check
    assert plain.comparison.sqnr < bound
    said = cli(
        "insert", model, "--data", data, "--min-sqnr", bound, "-o", tmp_path / "out.onnx", "--report", tmp_path / "r"
    )
    assert "sites left float, and with them" in said.stdout
    assert f"the search left it float for {bound} dB" in said.stdout
    report = json.loads((tmp_path / "r").read_text())
    assert report["check"]["met"]
    assert report["check"]["comparison"]["sqnr"] >= bound
    assert report["check"]["comparison"]["samples"] == 20
    assert report["data"]["samples"] == 64
    assert 0 < report["search"]["cost"] < 1
    assert {one["tensor"] for one in report["search"]["left"]} == {
        f"{one['tensor']['op']}:{one['tensor']['port']}" for one in report["skips"] if one["rule"] == "search"
    }
    gq.insert(model, data=str(data)).save(tmp_path / "plain.onnx")
    before, after = (
        gq.compare(model, tmp_path / name, str(samples / "digits_cnn_eval.npz"), sites=False).sqnr
        for name in ("plain.onnx", "out.onnx")
    )
    assert after > before + 2


def test_what_meets_its_bound_is_left_as_it_is(samples: Path) -> None:
    """Where the rules' plan meets the bound there is nothing to search for."""
    model, data = samples / "digits_cnn.onnx", str(samples / "digits_cnn_calib.npz")
    result = gq.insert(model, data=data, min_sqnr=30, min_agreement=0.9)
    assert result.searched.left == {}
    assert result.plan == gq.plan(model)


def test_by_size(samples: Path) -> None:
    """With size as the cost no more bytes of weights are in float than with multiply-adds."""
    model, data = samples / "digits_cnn.onnx", str(samples / "digits_cnn_calib.npz")
    floats = {}
    for optimize in ("macs", "size"):
        result = gq.insert(model, data=data, min_sqnr=60, optimize=optimize)
        assert result.check.missed == ()
        stored = {str(done.site.tensor) for done in result.inserted if done.folded}
        planned = [site for site in gq.plan(model).sites if site.parameter and str(site.tensor) not in stored]
        floats[optimize] = sum(
            int(np.prod(result.source.output(site.tensor).shape))
            for site in planned
            if site.tensor.op in result.source.main
        )
    assert floats["size"] <= floats["macs"]


@pytest.mark.slow
def test_voice_detector(shared: Path) -> None:
    """The voice detector gets 36 dB with half of its multiply-adds in float, on samples kept for the check."""
    data = str(shared / "silero_vad.npz")
    result = gq.insert(shared / "silero_vad_16k_op15.onnx", data=data, min_sqnr=36)
    assert result.check.missed == ()
    assert result.check.comparison.sqnr >= 36
    assert 0 < result.searched.found.cost < 1 / 2
    assert "/model/stft/Sqrt:0" in {str(tensor) for tensor in result.searched.left}

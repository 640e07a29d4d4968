"""The search for the cheapest plan that meets a bound."""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import graphquant as gq
from graphquant.accuracy import FLOAT, OWN, Found, Group, Measured, Way, groups, in_bytes, in_multiply_adds, search
from graphquant.accuracy.choose import FEW, _greedy, cheaper, choose, cost, high, settle, total
from graphquant.accuracy.search import MEASUREMENTS
from graphquant.pipeline import searching
from graphquant.view.measured import search_view

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def drawn(rng: Any, ops: int, number: int) -> tuple[list[Group], dict[tuple[str, str], float]]:
    """Groups that each need up to three of some ops, and what these cost; every second has a better range."""
    names = [("", f"op{index}") for index in range(ops)]
    found = []
    for index in range(number):
        some = rng.choice(ops, size=rng.integers(0, min(3, ops) + 1), replace=False)
        error = float(10 ** rng.uniform(-6, -3))
        ways = [Way(name=OWN, error=error), Way(name=FLOAT, error=0.0, high=True)]
        if index % 2:
            ways.insert(1, Way(name="mse range", error=error * rng.uniform(0.3, 0.9)))
        found.append(Group(sites=(index,), ops=frozenset(names[one] for one in some), ways=tuple(ways)))
    return found, {name: float(rng.integers(1, 100)) for name in names}


@pytest.mark.parametrize("seed", range(20))
def test_few_ops_cost_what_the_cheapest_set_does(seed: int) -> None:
    """Up to twelve ops: the cost is that of the cheapest of all ways of all groups."""
    rng = np.random.default_rng(seed)
    some, costs = drawn(rng, 4, 7)
    wanted = total(some, [0] * len(some)) * rng.uniform(0.05, 0.8)
    every = product(*(range(len(group.ways)) for group in some))
    best = min(cost(some, ways, costs) for ways in every if total(some, ways) <= wanted)
    chosen = choose(some, costs, wanted)
    assert total(some, chosen) <= wanted * (1 + 1e-9)
    assert cost(some, chosen, costs) == pytest.approx(best)


def test_many_ops_by_the_largest_fall() -> None:
    """More than twelve ops: the wanted sum is met, nothing could be given back, and on average it costs little more."""
    ratios = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        some, costs = drawn(rng, 8, 14)
        wanted = total(some, [0] * len(some)) * rng.uniform(0.05, 0.8)
        greedy = settle(some, _greedy(some, costs, wanted), wanted)
        assert total(some, greedy) <= wanted * (1 + 1e-9)
        best = cost(some, choose(some, costs, wanted), costs)
        ratios.append(cost(some, greedy, costs) / best if best else 1.0)
    assert np.mean(ratios) < 1.2
    some, costs = drawn(np.random.default_rng(0), FEW + 40, 150)
    wanted = total(some, [0] * len(some)) / 3
    assert total(some, choose(some, costs, wanted)) <= wanted * (1 + 1e-9)


def test_what_is_as_good_stays_as_the_rules_say() -> None:
    """Another range is taken before an op runs in float, the largest gain first, and no more of them than it takes."""
    op = ("", "conv")
    errors = (1e-3, 4e-4), (8e-4, 1e-4), (1e-4, 9e-5)
    some = [
        Group(
            sites=(index,),
            ops=frozenset({op}),
            ways=(Way(name=OWN, error=own), Way(name="mse range", error=other), Way(name=FLOAT, error=0, high=True)),
        )
        for index, (own, other) in enumerate(errors)
    ]
    assert choose(some, {op: 1.0}, 2e-3) == (0, 0, 0)
    assert choose(some, {op: 1.0}, 1.3e-3) == (0, 1, 0)
    assert choose(some, {op: 1.0}, 6.1e-4) == (1, 1, 0)
    assert choose(some, {op: 1.0}, 1e-4) == (2, 2, 2)
    assert cheaper(some, {op: 1.0}, frozenset({op}), 0.98) == [(1, 1, 1)]
    assert high(some, (1, 2, 0)) == {op}


def test_groups_are_sites_of_one_scale(samples: Path) -> None:
    """Sites that are tied are one group, and each group knows the ops that multiply on it or make it."""
    prepared, plan = _prepared(samples)
    found = groups(prepared, plan, range(len(plan.sites)), {i: {OWN: 1e-4} for i in range(len(plan.sites))})
    assert sorted(index for group in found for index in group.sites) == list(range(len(plan.sites)))
    by_tensor = {str(plan.sites[index].tensor): group for group in found for index in group.sites}
    assert by_tensor["pointwise/relu:0"] is by_tensor["max_pool:0"]
    assert [way.error for way in by_tensor["pointwise/relu:0"].ways] == pytest.approx([2e-4, 0])
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

    def measure(chosen: tuple[int, ...]) -> Measured:
        measured.append(chosen)
        error = total(some, chosen)
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
    found = search(some, costs, lambda chosen: Measured(met=False, sqnr=20.0 + sum(chosen)), wanted=90.0)
    assert not found.measured.met
    assert [group.ways[way].name for group, way in zip(some, found.chosen, strict=True)] == [FLOAT] * len(some)
    assert found.plans <= MEASUREMENTS


def test_interrupted() -> None:
    """Ctrl-C keeps the best plan so far."""
    some, costs = drawn(np.random.default_rng(5), 6, 10)
    calls = []

    def measure(chosen: tuple[int, ...]) -> Measured:
        calls.append(chosen)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return Measured(met=False, sqnr=20.0 + sum(chosen))

    found = search(some, costs, measure, wanted=30.0)
    assert found.interrupted
    assert found.chosen == calls[1]


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
    assert report["data"]["samples"] == 40
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


def test_interrupted_while_blaming(samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in blame keeps what is known of it, and the plan of the rules, which is the best so far, and says so."""
    model, data = samples / "digits_cnn.onnx", str(samples / "digits_cnn_calib.npz")
    known = []

    def told(stage: str, done: int, _total: int) -> None:
        known.append(stage)
        if stage == "blaming" and done == 5:
            raise KeyboardInterrupt

    result = gq.insert(model, data=data, min_sqnr=60, progress=told)
    assert known.count("blaming") == 5
    assert "searching" not in known
    assert result.searched.found.interrupted
    assert result.searched.runs > 0
    assert result.plan == gq.plan(model)
    assert "the best plan that it had" in "".join(str(line) for line in search_view(result.searched))
    assert result.check.missed


def test_interrupted_while_measuring(samples: Path) -> None:
    """Ctrl-C while plans are measured keeps the best of them."""
    model, data = samples / "digits_cnn.onnx", str(samples / "digits_cnn_calib.npz")
    seen = []

    def told(stage: str, done: int, _total: int) -> None:
        if stage == "searching":
            seen.append(done)
            if done == 3:
                raise KeyboardInterrupt

    result = gq.insert(model, data=data, min_sqnr=60, progress=told)
    assert seen == [1, 2, 3]
    assert result.searched.found.interrupted
    assert result.searched.tried.comparison.sqnr > gq.insert(model, data=data).check.comparison.sqnr
    assert result.plan != gq.plan(model)


def test_with_statistics(samples: Path, tmp_path: Path) -> None:
    """Where ranges come from statistics, the search looks at data that is not in them, but for what the check keeps."""
    model, data = samples / "digits_cnn.onnx", str(samples / "digits_cnn_calib.npz")
    gq.calibrate(model, data=data, samples=40).save(tmp_path / "stats.gqs")
    result = gq.insert(model, stats=tmp_path / "stats.gqs", data=data, min_sqnr=60)
    assert result.samples == 40
    assert result.searched.tried.comparison.samples == 40
    assert result.check.comparison.samples == 20
    assert result.searched.left
    assert result.searched.met
    without = gq.insert(model, data=data, min_sqnr=60)
    assert result.plan.sites == without.plan.sites
    assert result.searched.tried.comparison.outputs == without.searched.tried.comparison.outputs


def test_statistics_of_all_samples(samples: Path, tmp_path: Path) -> None:
    """Where there are only samples that gave the ranges, the search looks at them, and is not sure for that."""
    model, data = samples / "digits_cnn.onnx", str(samples / "digits_cnn_calib.npz")
    gq.calibrate(model, data=data).save(tmp_path / "stats.gqs")
    result = gq.insert(model, stats=tmp_path / "stats.gqs", data=data, min_sqnr=20)
    assert result.searched.tried.comparison.samples == 80
    assert result.searched.tried.assured
    assert not result.searched.met
    assert result.searched.tried.doubts == (
        "these samples were used before, for ranges, corrections or a search, which fit no others as well",
    )
    assert "not sure: these samples were used before" in "".join(str(line) for line in search_view(result.searched))


def test_what_is_not_shown_is_not_said_to_be_met(
    samples: Path, tmp_path: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound that the check's samples meet and those of the search do not show is not met in reports.

    Exit code 1 tells it where a better plan would show it, and else under --strict.
    """
    model, data = samples / "digits_cnn.onnx", samples / "digits_cnn_calib.npz"
    asked = ("insert", model, "--data", data, "-o", tmp_path / "out.onnx", "--report", tmp_path / "r", "--force")
    cli(*asked, "--min-agreement", 0.99)
    report = json.loads((tmp_path / "r").read_text())
    assert report["check"]["met"]
    assert not report["search"]["met"]
    assert report["search"]["doubts"][0].endswith("; it takes 627 rows to show more, and there are 40")
    said = cli(*asked, "--min-agreement", 0.99, "--strict", code=1)
    assert "The search does not show that the bounds are met: 84.3" in said.stderr

    def first(groups: list[Group], *_: object, **__: object) -> Found:
        return Found(
            chosen=(0,) * len(groups),
            measured=Measured(met=False, sqnr=0.0),
            cost=0.0,
            plans=1,
            interrupted=True,
        )

    monkeypatch.setattr(searching, "search", first)
    said = cli(*asked, "--min-sqnr", 48, code=1)
    assert (
        "The search does not show that the bounds are met: output 'probabilities' has 46.58 dB at least" in said.stderr
    )
    assert json.loads((tmp_path / "r").read_text())["check"]["met"]
    assert not json.loads((tmp_path / "r").read_text())["search"]["met"]


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
    assert result.searched.tried.assured
    ways = result.searched.changed
    assert set(ways.values()) <= {"8-bit weights", "weights per channel"}
    assert "8-bit weights" in ways.values()
    assert all("as the rules say" in site.why for site in result.plan.sites if site.rule == "search")
    again = gq.insert(model, plan=result.plan)
    assert [str(one.site) for one in again.inserted] == [str(one.site) for one in result.inserted]

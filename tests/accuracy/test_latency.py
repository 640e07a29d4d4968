"""The fastest plan, by times that are given."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import graphquant as gq
from graphquant.accuracy import Fused, Profile, Ratio, fastest, parts_of
from graphquant.accuracy.latency import PLANS, Part
from graphquant.errors import UsageError
from graphquant.formats import module
from graphquant.pipeline.planning import prepared_and_plan
from graphquant.pipeline.timing import Timing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

Place = tuple[str, str]


class Chain:
    """Ops one behind the other with a site before, between and behind them; an op is float where one of its is left."""

    def __init__(self, quantized: list[float], plain: list[float], conversion: float = 0.0) -> None:
        """Seconds of each op on integers and in float, and of turning a tensor into integers or back."""
        self.times = quantized, plain
        self.conversion = conversion
        self.compared: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        count = len(plain)
        ends = [{max(index - 1, 0), min(index, count - 1)} for index in range(count + 1)]
        self.parts = [Part(sites=(i,), ops=frozenset(("", f"op{one}") for one in end)) for i, end in enumerate(ends)]

    def profile(self, left: tuple[int, ...]) -> Profile:
        """Where the time goes."""
        low = [not {index, index + 1} & set(left) for index in range(len(self.times[1]))]
        ops = {("", f"op{index}"): self.times[0 if one else 1][index] for index, one in enumerate(low)}
        beside = [{low[max(index - 1, 0)], low[min(index, len(low) - 1)]} for index in range(len(self.parts))]
        edges = {index for index, kinds in enumerate(beside) if len(kinds) > 1 or index in {0, len(low)}}
        return Profile(ops=ops, sites=dict.fromkeys(sorted(edges - set(left)), self.conversion))

    def compare(self, one: tuple[int, ...], other: tuple[int, ...]) -> Ratio:
        """One plan beside the other."""
        self.compared.append((one, other))
        first, second = self.profile(one).whole, self.profile(other).whole
        found = first / second
        return Ratio(median=found, low=found - 0.001, high=found + 0.001, one=first, other=second)

    def left(self) -> tuple[int, ...]:
        """What is left in the end."""
        return fastest(self.parts, self.profile, self.compare).left


def test_what_is_slower_is_left() -> None:
    """What ops that take longer on integers have between them is left; what others need stays."""
    assert Chain([1, 1, 9, 9, 1, 1], [5, 5, 2, 2, 5, 5]).left() == (3,)
    assert Chain([1, 1, 1], [5, 5, 5]).left() == ()
    assert Chain([5, 5, 5], [1, 1, 1]).left() == (0, 1, 2, 3)


def test_conversions_count() -> None:
    """A gain that the conversions around it take away is none."""
    assert Chain([1, 1, 3, 3, 1, 1], [5, 5, 2, 2, 5, 5], conversion=0.1).left() == (3,)
    assert Chain([1, 1, 3, 3, 1, 1], [5, 5, 2, 2, 5, 5], conversion=1.5).left() == ()


def test_what_does_not_help_together_is_tried_by_halves() -> None:
    """A profile that is wrong for an op costs measurements, not the gain that there is elsewhere."""
    chain = Chain([9, 9, 1, 1, 1, 1], [2, 2, 5, 5, 5, 5])

    def wrong(left: tuple[int, ...]) -> Profile:
        found = chain.profile(left)
        return Profile(ops={**found.ops, ("", "op4"): 5.0 if {4, 5} & set(left) else 11.0}, sites={})

    assert chain.left() == (0, 1)
    found = fastest(chain.parts, wrong, chain.compare)
    assert {0, 1} <= set(found.left)
    assert chain.profile(found.left).whole < chain.profile(()).whole
    assert ((0, 1), ()) in chain.compared
    assert found.plans <= PLANS


def test_noise_keeps_the_rules_plan() -> None:
    """Without a sure gain nothing is left, and the search ends."""
    chain = Chain([5, 5, 5, 5], [1, 1, 1, 1])
    unsure = Ratio(median=0.9, low=0.7, high=1.1, one=1.0, other=1.0)
    found = fastest(chain.parts, chain.profile, lambda _one, _other: unsure)
    assert found.left == ()
    assert 1 <= found.plans <= PLANS


def test_interrupted() -> None:
    """Ctrl-C keeps the fastest plan so far."""

    def compare(_one: tuple[int, ...], _other: tuple[int, ...]) -> Ratio:
        raise KeyboardInterrupt

    chain = Chain([5, 5], [1, 1])
    found = fastest(chain.parts, chain.profile, compare)
    assert found.interrupted
    assert found.left == ()


def test_parts_of_a_model(samples: Path) -> None:
    """Sites of one scale are one part, and an op counts with the bias and the limit that it absorbs."""
    prepared, plan = prepared_and_plan(gq.load(samples / "digits_cnn.onnx"), None, (), (), (), None)
    found = parts_of(prepared, plan, range(len(plan.sites)))
    assert sorted(site for part in found for site in part.sites) == list(range(len(plan.sites)))
    by_tensor = {str(plan.sites[site].tensor): part for part in found for site in part.sites}
    assert by_tensor["stem/relu:0"].ops == {("", "stem/conv"), ("", "depthwise/conv")}
    assert by_tensor["pointwise/relu:0"] is by_tensor["max_pool:0"]
    assert ("", "max_pool") in by_tensor["max_pool:0"].ops
    assert by_tensor["residual/relu:0"].ops >= {("", "residual/add"), ("", "branch_wide/bias_add")}
    assert Fused(prepared).into(("", "stem/relu")) == ("", "stem/conv")
    assert Fused(prepared).into(("", "hidden/relu")) == ("", "hidden/matmul")


def test_a_profile_tells_the_ops_of_the_model(samples: Path) -> None:
    """Ops that onnxruntime fused and renamed are told as those of the model, conversions apart."""
    source = gq.load(samples / "digits_cnn.onnx")
    quant = gq.insert(source, data=str(samples / "digits_cnn_calib.npz"), check=False).model
    feeds = Timing.on(source, _batches(source, samples), lite=False).feeds
    assert len(feeds) == 1
    for model in (source, quant):
        spent = module("onnx").spent(model, feeds)
        places = {Fused(source).into(place) for place in spent.ops if place[1] in source.main}
        assert places >= {("", name) for name in ("stem/conv", "pointwise/conv", "residual_1/conv", "hidden/matmul")}
        assert all(seconds > 0 for seconds in [*spent.ops.values(), *spent.conversions.values()])
        assert bool(spent.conversions) == (model is quant)


def _batches(model: Any, samples: Path) -> Any:
    from graphquant.data import open_data

    return open_data(str(samples / "digits_cnn_calib.npz"), module("onnx").inputs(model))


def ratios(monkeypatch: pytest.MonkeyPatch, ratio: Callable[[Any, Any], float]) -> None:
    """Lets times be what `ratio` says of two runs."""

    def judged(one: Any, other: Any, **_: object) -> Ratio:
        found = ratio(one(), other())
        return Ratio(median=found, low=found, high=found, one=found, other=1.0)

    monkeypatch.setattr("graphquant.accuracy.ratio", judged)


def inserted(runs: Mapping[Any, Any]) -> int:
    """Quantizations of the model that a run is of."""
    return sum(op.kind == "quantize" for op in runs["model"].main.ops())


@pytest.fixture
def by_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that give the model itself, so that ratios can be made up."""
    monkeypatch.setattr("graphquant.formats.onnx.timed", lambda model, _feeds: lambda: {"model": model})


@pytest.mark.usefixtures("by_pairs")
def test_float_where_it_is_faster(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., Any]
) -> None:
    """Nothing is quantized where that takes longer, which is said; the plan says why and gives the same bytes again."""
    ratios(monkeypatch, lambda one, other: 1 + 0.1 * (inserted(one) - inserted(other)))
    model, data = samples / "digits_cnn.onnx", samples / "digits_cnn_calib.npz"
    said = cli(
        "insert", model, "--data", data, "--optimize", "latency", "-o", tmp_path / "o.onnx", "--report", tmp_path / "r"
    )
    assert "Nothing is quantized: on this machine float is faster." in said.stdout
    report = json.loads((tmp_path / "r").read_text())
    assert report["sites"] == []
    assert not report["timing"]["quantized"]
    assert report["timing"]["rules"]["ratio"] > 1
    assert {one["reason"].partition(",")[0] for one in report["skips"] if one["rule"] == "latency"}
    made = gq.insert(model, data=str(data), optimize="latency")
    assert made.model is made.source
    assert gq.insert(model, data=str(data), plan=made.plan).inserted == ()


@pytest.mark.usefixtures("by_pairs")
def test_quantized_where_that_is_faster(samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the rules make stays where nothing is faster; a saved plan gives the same bytes."""
    ratios(monkeypatch, lambda one, other: 1 - 0.01 * (inserted(one) - inserted(other)))
    model, data = samples / "digits_cnn.onnx", str(samples / "digits_cnn_calib.npz")
    made = gq.insert(model, data=data, optimize="latency")
    assert len(made.inserted) == len(gq.insert(model, data=data).inserted)
    assert made.timed is not None
    assert made.timed.outcome is not None
    assert made.timed.outcome.median < 1
    again = gq.insert(model, data=data, plan=made.plan)
    one, other = made.save(tmp_path / "one.onnx"), again.save(tmp_path / "other.onnx")
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.usefixtures("by_pairs")
def test_with_a_bound(samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for a bound leaves what costs least time; if that is no faster than float, all is float."""
    ratios(monkeypatch, lambda one, other: 1 - 0.01 * (inserted(one) - inserted(other)))
    model, data = samples / "digits_cnn.onnx", str(samples / "digits_cnn_calib.npz")
    made = gq.insert(model, data=data, optimize="latency", min_sqnr=45)
    assert made.searched is not None
    assert made.timed is not None
    assert made.timed.plan is made.plan
    assert made.inserted
    ratios(monkeypatch, lambda one, other: 1 - 0.0001 * (inserted(one) - inserted(other)))
    made = gq.insert(model, data=data, optimize="latency", min_sqnr=45)
    assert not made.inserted
    assert made.timed is not None
    assert made.timed.floats


@pytest.mark.usefixtures("by_pairs")
@pytest.mark.parametrize("bound", [(), ("--min-sqnr", "30")])
def test_what_is_hardly_faster(
    bound: tuple[str, ...], samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., Any]
) -> None:
    """Where the gain is small nobody is told that float is faster, or of a search or a check without a result."""
    ratios(monkeypatch, lambda one, other: 1 - 0.0015 * (inserted(one) - inserted(other)))
    model, data = samples / "digits_cnn.onnx", samples / "digits_cnn_calib.npz"
    said = cli("insert", model, "--data", data, "--optimize", "latency", *bound, "-o", tmp_path / "o.onnx").stdout
    assert "what was made of it 0.98.\nNothing is quantized: on this machine it would hardly be faster, and" in said
    assert "if this is quantized (rule latency)" in said
    assert "float is faster" not in said
    assert "Searched" not in said
    assert "hecked" not in said


def test_nothing_to_time(samples: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    """Where nothing is quantized anyway, that is why nothing was timed."""
    given = ("--data", samples / "digits_cnn_calib.npz", "--optimize", "latency", "--exclude", "*")
    said = cli("insert", samples / "digits_cnn.onnx", *given, "-o", tmp_path / "o.onnx").stdout
    assert "Nothing was timed: there is nothing to quantize." in said


def test_what_is_asked_for_wrongly(samples: Path) -> None:
    """Time without a sample to run, and words that mean nothing, are refused at once."""
    with pytest.raises(UsageError, match="models are run on a sample"):
        gq.insert(samples / "digits_cnn.onnx", rules="weight_only", optimize="latency")
    with pytest.raises(UsageError, match="nothing to optimize for"):
        gq.insert(samples / "digits_cnn.onnx", rules="weight_only", optimize="speed")

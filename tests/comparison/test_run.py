from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import graphquant as gq
from graphquant import formats
from graphquant.calibration import load_of
from graphquant.comparison import run
from graphquant.comparison.difference import Difference
from graphquant.comparison.run import same
from graphquant.comparison.sites import _add, _scaled, sites_of
from graphquant.data import open_data
from graphquant.formats.onnx.run import OnnxRunner

if TYPE_CHECKING:
    from pathlib import Path


def noise(decibels: float) -> np.ndarray:
    """Values that are 1 but for noise."""
    return np.array([1, 1 + math.sqrt(2) * 10 ** (-decibels / 20)], np.float32)


def test_rounding_makes_no_difference() -> None:
    """Outputs are the same from 80 dB on, integers where they are equal, and never where one is missing or longer."""
    one = {"y": np.ones(2, np.float32), "n": np.array([3])}
    assert same(one, one)
    assert same(one, {**one, "y": noise(90)})
    assert not same(one, {**one, "y": noise(70)})
    assert not same(one, {**one, "n": np.array([4])})
    assert not same(one, {"y": one["y"]})
    assert not same(one, {**one, "y": np.ones(3, np.float32)})
    assert not same(one, {**one, "y": np.array([1, np.nan], np.float32)})


def test_several_runs_are_added_as_one() -> None:
    """Values of several runs give the same sums as one by one; what differs in shape or number is told."""
    random = np.random.default_rng(0)
    values = [(random.random((2, 3), np.float32), random.random((2, 3), np.float32)) for _ in range(4)]
    together, single = Difference(), Difference()
    _add(together, [([one], [other]) for one, other in values] + [([], [])])
    for pair in values:
        single.add(*pair)
    assert (together.count, single.count, together.problem) == (24, 24, "")
    assert together.sqnr == pytest.approx(single.sqnr, abs=1e-5)
    _add(together, [([values[0][0]], [values[0][1][:1]])])
    assert together.problem == "shapes differ: [2, 3] and [1, 3]"
    other = Difference()
    _add(other, [([values[0][0]], list(values[0]))])
    assert other.problem == "it was computed another number of times"


@pytest.mark.parametrize("name", ["digits_cnn", "digits_cnn_bn", "digits_rnn"])
def test_the_float_model_runs_once_by_itself(
    samples: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it gives the same while its tensors are shown, no further run of its own is made, and figures stay."""
    data = samples / f"digits_{'rnn' if name == 'digits_rnn' else 'cnn'}_calib.npz"
    path = gq.insert(samples / f"{name}.onnx", data=str(data), samples=8).save(tmp_path / "quant.onnx")
    runs: list[OnnxRunner] = []
    plainly = OnnxRunner.run

    def counted(self: OnnxRunner, feeds: Any) -> Any:
        runs.append(self)
        return plainly(self, feeds)

    monkeypatch.setattr(OnnxRunner, "run", counted)
    plain = gq.compare(samples / f"{name}.onnx", path, str(data), samples=40, sites=False)
    alone = len(runs)
    found = gq.compare(samples / f"{name}.onnx", path, str(data), samples=40)
    feeds = alone // 2
    assert feeds > 1
    assert len(runs) - alone == feeds + 1
    assert (found.samples, len(found.outputs)) == (plain.samples, len(plain.outputs))
    for one, other in zip(found.outputs, plain.outputs, strict=True):
        assert one.sqnr == pytest.approx(other.sqnr, abs=0.01)
        assert one.agreement == other.agreement


@pytest.mark.parametrize("inside", [None, 40])
@pytest.mark.parametrize("sites", [True, False])
def test_feeds_are_let_go(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: int | None, *, sites: bool
) -> None:
    """However far the data goes, few feeds are there at a time, also where tensors are no longer watched."""
    data, path = str(samples / "digits_nested_calib.npz"), samples / "digits_nested.onnx"
    quant = gq.load(gq.insert(path, data=data, samples=8).save(tmp_path / "quant.onnx"))
    model = gq.load(path)
    runners = [formats.module("onnx").runner(one) for one in (model, quant)]
    found = sites_of(model, quant) if sites else None
    alive, most = [0], [0]

    class Feed(dict):
        def __init__(self, feed: Any) -> None:
            super().__init__(feed)
            alive[0] += 1
            most[0] = max(alive[0], most[0])

        def __del__(self) -> None:
            alive[0] -= 1

    real = run.feeds_of
    monkeypatch.setattr(run, "feeds_of", lambda *given, **more: ((Feed(f), b) for f, b in real(*given, **more)))
    made = run.compare(
        *runners,
        open_data(data, runners[0].inputs),
        load=load_of(model, batchable=False),
        sites=found,
        watched=None if found is None else formats.module("onnx").runner(found.plain),
        outputs={},
        inside=inside,
    )
    assert made.samples > 60
    assert most[0] <= 8
    assert alive[0] <= 2


def test_a_quantized_model_beside_itself(samples: Path, tmp_path: Path) -> None:
    """It computes on integers only while nobody looks, so its outputs come from runs of its own and are equal."""
    data = str(samples / "digits_cnn_calib.npz")
    path = gq.insert(samples / "digits_cnn.onnx", data=data, samples=8).save(tmp_path / "quant.onnx")
    found = gq.compare(path, path, data, samples=40)
    assert found.sites
    assert (found.sqnr, found.agreement) == (math.inf, 1.0)


@pytest.mark.parametrize("name", ["digits_cnn", "digits_rnn", "digits_nested"])
def test_outputs_can_be_watched(samples: Path, name: str) -> None:
    """The tensors that a runner says its outputs are hold what a run gives."""
    model = gq.load(samples / f"{name}.onnx")
    runner = formats.module("onnx").runner(model)
    with np.load(samples / f"{name}_calib.npz") as data:
        feed = {spec.name: data[spec.name][:1] for spec in runner.inputs}
    (seen,) = runner.observe(list(runner.ends.values()), [feed])
    ran = runner.run(feed)
    assert list(runner.ends) == list(ran) == list(runner.outputs)
    for key, tensor in runner.ends.items():
        np.testing.assert_allclose(seen[tensor][-1], ran[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("said", ["[" * 200_000, "{", "1", '{"a": 1}'])
def test_what_no_graphquant_wrote_scales_nothing(said: str) -> None:
    """A note in a model may be anything."""
    assert _scaled(SimpleNamespace(provenance={"scaled": said})) == frozenset()  # type: ignore[arg-type]

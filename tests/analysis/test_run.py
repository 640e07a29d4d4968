from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import graphquant as gq
from graphquant import formats
from graphquant.analysis import compare
from graphquant.analysis.compare import outputs_equal
from graphquant.analysis.comparison import ErrorSums
from graphquant.analysis.site_errors import _add_runs, _rescaled_tensors, match_sites
from graphquant.analysis.validation import record_float_outputs
from graphquant.calibration.data import open_data
from graphquant.calibration.holdout import split_holdout
from graphquant.calibration.memory import estimate_footprint
from graphquant.formats.onnx.runner import OnnxRunner

if TYPE_CHECKING:
    from pathlib import Path


def noise(decibels: float) -> np.ndarray:
    """Values that are 1 but for noise."""
    return np.array([1, 1 + math.sqrt(2) * 10 ** (-decibels / 20)], np.float32)


def test_rounding_makes_no_difference() -> None:
    """Outputs are the same from 80 dB on, integers where they are equal, and never where one is missing or longer."""
    outputs = {"y": np.ones(2, np.float32), "n": np.array([3])}
    assert outputs_equal(outputs, outputs)
    assert outputs_equal(outputs, {**outputs, "y": noise(90)})
    assert not outputs_equal(outputs, {**outputs, "y": noise(70)})
    assert not outputs_equal(outputs, {**outputs, "n": np.array([4])})
    assert not outputs_equal(outputs, {"y": outputs["y"]})
    assert not outputs_equal(outputs, {**outputs, "y": np.ones(3, np.float32)})
    assert not outputs_equal(outputs, {**outputs, "y": np.array([1, np.nan], np.float32)})


def test_several_runs_are_added_at_once() -> None:
    """Values of several runs give the same sums as one by one; different shapes and counts are problems."""
    random = np.random.default_rng(0)
    values = [(random.random((2, 3), np.float32), random.random((2, 3), np.float32)) for _ in range(4)]
    together, single = ErrorSums(), ErrorSums()
    _add_runs(together, [([expected], [actual]) for expected, actual in values] + [([], [])])
    for pair in values:
        single.add(*pair)
    assert (together.count, single.count, together.problem) == (24, 24, "")
    assert together.sqnr == pytest.approx(single.sqnr, abs=1e-5)
    _add_runs(together, [([values[0][0]], [values[0][1][:1]])])
    assert together.problem == "shapes differ: [2, 3] and [1, 3]"
    actual = ErrorSums()
    _add_runs(actual, [([values[0][0]], list(values[0]))])
    assert actual.problem.endswith("number of times")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits_cnn", "digits_cnn_bn", "digits_rnn"])
def test_float_model_runs_unobserved_once(
    samples: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with equal outputs while it is observed is not run again, and figures stay the same."""
    data = samples / f"digits_{'rnn' if name == 'digits_rnn' else 'cnn'}_calib.npz"
    path = gq.insert(samples / f"{name}.onnx", data=str(data), samples=8).save(tmp_path / "quant.onnx")
    runs: list[OnnxRunner] = []
    plainly = OnnxRunner.run_each

    def counted(self: OnnxRunner, feeds: Any) -> Any:
        for feed in feeds:
            runs.append(self)
            yield from plainly(self, [feed])

    monkeypatch.setattr(OnnxRunner, "run_each", counted)
    # The check of the data and the measurement of batch independence run the model as well.
    monkeypatch.setattr("graphquant.calibration.data.check.check_samples", lambda *_, **__: ())
    monkeypatch.setattr("graphquant.calibration.batch_independence._probe_samples", lambda *_: [])
    plain = gq.compare(samples / f"{name}.onnx", path, str(data), samples=40, sites=False)
    runs_without_sites = len(runs)
    comparison = gq.compare(samples / f"{name}.onnx", path, str(data), samples=40)
    feeds = runs_without_sites // 2
    assert feeds > 1
    assert len(runs) - runs_without_sites == feeds + 1
    assert (comparison.samples, len(comparison.outputs)) == (plain.samples, len(plain.outputs))
    for output, plain_output in zip(comparison.outputs, plain.outputs, strict=True):
        assert output.sqnr == pytest.approx(plain_output.sqnr, abs=0.01)
        assert output.agreement == plain_output.agreement


@pytest.mark.parametrize("inside", [None, 40])
@pytest.mark.parametrize("sites", [True, False])
def test_feeds_are_released(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: int | None, *, sites: bool
) -> None:
    """However far the data goes, few feeds are there at a time, also where tensors are no longer watched."""
    data, path = str(samples / "digits_nested_calib.npz"), samples / "digits_nested.onnx"
    quant = gq.load(gq.insert(path, data=data, samples=8).save(tmp_path / "quant.onnx"))
    model = gq.load(path)
    runners = [formats.format_module("onnx").create_runner(each_model) for each_model in (model, quant)]
    compared_sites = match_sites(model, quant) if sites else None
    alive, most = [0], [0]

    class Feed(dict):
        def __init__(self, feed: Any) -> None:
            super().__init__(feed)
            alive[0] += 1
            most[0] = max(alive[0], most[0])

        def __del__(self) -> None:
            alive[0] -= 1

    real = compare.block_feeds
    monkeypatch.setattr(compare, "block_feeds", lambda *given, **more: ((Feed(f), b) for f, b in real(*given, **more)))
    compared_samples = compare.ComparisonSamples(
        dataset=open_data(data, runners[0].inputs),
        footprint=estimate_footprint(model, batch_independent=False),
        max_site_samples=inside,
    )
    comparison = compare.compare_runners(*runners, compared_samples, compared_sites, {})
    assert comparison.samples > 60
    assert most[0] <= 8
    assert alive[0] <= 2


def test_quantized_model_against_itself(samples: Path, tmp_path: Path) -> None:
    """A quantized model gives equal outputs, because unobserved runs use the integer kernels."""
    data = str(samples / "digits_cnn_calib.npz")
    path = gq.insert(samples / "digits_cnn.onnx", data=data, samples=8).save(tmp_path / "quant.onnx")
    comparison = gq.compare(path, path, data, samples=40)
    assert comparison.sites
    assert (comparison.sqnr, comparison.agreement) == (math.inf, 1.0)


@pytest.mark.parametrize("name", ["digits_cnn", "digits_rnn", "digits_nested"])
def test_outputs_can_be_watched(samples: Path, name: str) -> None:
    """The output tensors of a runner hold the results of a run."""
    model = gq.load(samples / f"{name}.onnx")
    runner = formats.format_module("onnx").create_runner(model)
    with np.load(samples / f"{name}_calib.npz") as data:
        feed = {spec.name: data[spec.name][:1] for spec in runner.inputs}
    (observed,) = runner.observe(list(runner.output_tensors.values()), [feed])
    ran = runner.run(feed)
    assert list(runner.output_tensors) == list(ran) == list(runner.outputs)
    for key, tensor in runner.output_tensors.items():
        np.testing.assert_allclose(observed[tensor][-1], ran[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("said", ["[" * 200_000, "{", "1", '{"a": 1}'])
def test_foreign_metadata_is_ignored(said: str) -> None:
    """A note in a model may be anything."""
    assert _rescaled_tensors({"scaled": said}) == frozenset()


def test_recorded_float_outputs(samples: Path) -> None:
    """The recorded outputs are those of the model, which needs no session for them; other feeds are run."""
    source = gq.load(samples / "digits_cnn.onnx")
    dataset = open_data(f"{samples / 'digits_cnn'}_calib.npz", formats.format_module("onnx").input_specs(source))
    _, holdout = split_holdout("", None, dataset)
    feed, other = next(iter(holdout.samples(1))), next(iter(dataset))
    expected = formats.create_runner(source).run(feed)
    with formats.shared_runners():
        record_float_outputs(formats.create_runner(source), holdout)
        runner: Any = formats.shared_runner(source, "source")
        outputs = runner.run(feed)
        assert runner._session is None
        assert runner.run(other).keys() == expected.keys() == outputs.keys()
        assert runner._session is not None
    for name, value in expected.items():
        np.testing.assert_array_equal(outputs[name], value)

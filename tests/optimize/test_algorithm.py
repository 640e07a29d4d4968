"""The validation of optimization algorithms: what is kept, undone, or not measured at all."""

from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import onnx
import onnx.parser
import pytest

import graphquant as gq
from graphquant.analysis.measured_outputs import with_selections
from graphquant.formats import onnx as onnx_format
from graphquant.ir import Graph, Model, TensorRef
from graphquant.optimize import algorithm
from graphquant.optimize.algorithm import (
    MIN_GAIN_STANDARD_ERRORS,
    MIN_TARGETED_GAIN_STANDARD_ERRORS,
    AlgorithmData,
    AlgorithmResult,
    PreCalibrationState,
    WeightEdits,
    _squared_error,
    apply_validated,
    rejection_reason,
)
from graphquant.quantize import Plan, Site
from graphquant.rules import Scheme


class Runner:
    """A runner of a model that is its own outputs, one for each sample."""

    outputs = ("y",)
    output_tensors: ClassVar = {}
    model = Model(format="onnx", graphs={"": Graph("", {})})

    def __init__(self, outputs):
        self._outputs = iter(outputs)

    def run_each(self, feeds):
        """Yield the outputs of the next sample for each feed."""
        return (next(self._outputs) for _ in feeds)

    def free_session(self):
        """Do nothing, because there is no session."""


def outputs_with_error(error, samples=8):
    """Return outputs that are this far from those of the float model, nearly the same for each sample."""
    return [{"y": np.array([1.0 + error * (1 + 0.01 * index)], np.float32)} for index in range(samples)]


def run_algorithms(monkeypatch, *errors, samples=8):
    """Return the state after algorithms that bring the outputs to these errors. None changes nothing."""
    monkeypatch.setattr(algorithm, "check_invariants", lambda model, name: None)
    monkeypatch.setattr(WeightEdits, "rewritten", lambda edits: (edits.solution, []))
    earlier = AlgorithmResult(algorithm="earlier", target="x", detail="")
    state = WeightEdits(
        prepared_model=None, model=outputs_with_error(0.0), solution=outputs_with_error(1.0), results=(earlier,)
    )
    seen = []

    def make(index, error):
        def apply(state, _):
            seen.append(round(float(state.solution[0]["y"][0]) - 1, 6))
            result = AlgorithmResult(algorithm=f"{index}", target="op", detail="", applied=error is not None)
            solution = state.solution if error is None else outputs_with_error(error)
            other = AlgorithmResult(algorithm=f"{index}", target="other", detail="", applied=False)
            return replace(state, solution=solution, results=(*state.results, result, other))

        return f"{index}", apply, MIN_GAIN_STANDARD_ERRORS

    feeds = [SimpleNamespace()] * samples
    data = AlgorithmData(feeds=feeds, validation_feeds=feeds, create_runner=Runner)
    algorithms = [make(index, error) for index, error in enumerate(errors)]
    final = apply_validated(state, algorithms, lambda state: state, data)
    assert final.results[0] is earlier
    assert earlier.applied
    results = [(entry.algorithm, entry.target, entry.applied) for entry in final.results[1:] if entry.target != "other"]
    return results, seen, final


def test_only_what_is_better_is_kept(monkeypatch):
    """Each algorithm is compared with the best state so far, which the next one starts from."""
    results, seen, final = run_algorithms(monkeypatch, 0.5, 0.7, None, 0.5, 0.2, 2.0)
    assert results == [
        ("0", "op", True),
        ("1", "model", False),  # better than without any, worse than with the first
        ("2", "op", False),
        ("3", "model", False),  # no change
        ("4", "op", True),
        ("5", "model", False),
    ]
    assert seen == [1.0, 0.5, 0.5, 0.5, 0.5, 0.2]
    assert final.solution[0]["y"][0] == np.float32(1.2)


def test_a_worse_algorithm_is_undone(monkeypatch):
    """An algorithm after which the error is larger is undone, and the reason has the factor."""
    results, _, final = run_algorithms(monkeypatch, 1.1)
    assert results == [("0", "model", False)]
    assert "1.10" in final.results[1].detail
    assert "8 validation samples" in final.results[1].detail


@pytest.mark.parametrize(("samples", "applied"), [(2, False), (3, True)])
def test_three_samples_allow_a_decision(samples, applied, monkeypatch):
    """Fewer validation samples than three allow none, and no algorithm runs."""
    results, seen, _ = run_algorithms(monkeypatch, 0.1, samples=samples)
    assert results == [("0", "op" if applied else "model", applied)]
    assert len(seen) == applied


def test_nothing_is_measured_without_a_change(monkeypatch):
    """Algorithms that change nothing need no run of the model."""
    monkeypatch.setattr(algorithm, "_measure_output_errors", None)
    assert run_algorithms(monkeypatch, None, None)[0] == [("0", "op", False), ("1", "op", False)]


def test_errors_of_outputs():
    """Squared errors relative to the mean power, infinite for missing outputs and other shapes, for floats alone."""
    expected = [
        {"y": np.array([3.0, 4.0]), "z": np.array([0.0]), "first": np.array([1.0]), "integers": np.array([1])},
        {"y": np.array([5.0, 0.0]), "z": np.array([0.0]), "integers": np.array([1])},
    ]
    actual = [{"y": np.array([3.0, 3.0]), "z": np.array([2.0])}, {"y": np.array([5.0])}]
    edits = SimpleNamespace(rewritten=lambda: (actual, []))
    data = AlgorithmData(feeds=[], validation_feeds=[None, None], create_runner=Runner)
    errors = algorithm._measure_output_errors(edits, Runner(expected), expected, data).errors
    assert errors.tolist() == [[1 / 25, 4.0], [np.inf, np.inf]]
    large, actual[:] = {"y": np.full(1, 1e30, np.float32)}, [{"y": np.full(1, 0.9e30, np.float32)}] * 2
    assert algorithm._measure_output_errors(edits, Runner([]), [large] * 2, data).errors == pytest.approx(0.01)


def test_observed_tensors():
    """Each tensor that can be observed is observed once, with the feeds of the algorithms."""
    calls = []

    class Observer:
        """A runner that cannot observe b."""

        def unobservable(self, tensors):
            """Return the tensors that cannot be observed."""
            calls.append(tensors)
            return [tensor for tensor in tensors if tensor == "b"]

        def observe(self, tensors, feeds, *, max_in_flight, ancestors_only):
            """Return the arguments."""
            yield tensors, feeds, max_in_flight

    data = AlgorithmData(feeds=["feed"], validation_feeds=[], create_runner=lambda model: Observer())
    assert list(data.observe("model", ["a", "b", "c", "a"], 2)) == [(["a", "c"], ["feed"], 2)]
    assert list(data.observe("model", ["a"])) == [(["a"], ["feed"], 1)]
    assert list(data.observe("model", ["b"])) == []
    assert calls == [["a", "b", "c"], ["a"], ["b"]]


def test_plans_without_inserted_products():
    """Sites of inserted products are those of the tensors that they multiply."""
    tensors = [TensorRef("", name) for name in ("a", "b/scaled")]
    scheme = Scheme(name="act", dtype="uint8", family="onnx-qdq")
    sites = tuple(Site(tensor=tensor, uses=(), graph="", scheme=scheme) for tensor in tensors)
    plan = Plan(format="onnx", model="", prepared="", rules=(), sites=sites)
    state = PreCalibrationState(model=None, plan=plan, factor_products={tensors[1]: TensorRef("", "b")})
    assert [site.tensor.op for site in state.plan_without_factors(plan).sites] == ["a", "b"]
    assert replace(state, factor_products={}).plan_without_factors(plan) is plan


def tile(gain, samples=16, outputs=1):
    """Return errors after an algorithm that reduces the errors, which are all 1, by a factor in dB, with some noise."""
    noise = 1 + 0.01 * np.cos(np.arange(samples * outputs)).reshape(samples, outputs)
    gains = np.broadcast_to(gain, outputs)
    return np.where(gains, 10 ** (-gains / 10) * noise, 1.0)


@pytest.mark.parametrize(
    ("gains", "is_kept"),
    [
        ((0.6,), True),
        ((0.4,), False),
        ((0.6, 0.0), True),
        ((3.0, -0.4), False),  # for sure, although it is little
        ((3.0, -0.6), False),
        ((0.0, 0.0), False),
    ],
)
def test_required_gains(gains, is_kept):
    """Some output must gain 0.5 dB, and none may lose for sure."""
    assert (rejection_reason(np.ones((16, len(gains))), tile(np.array(gains), outputs=len(gains))) == "") == is_kept


@pytest.mark.parametrize(
    ("least", "is_kept"), [(MIN_GAIN_STANDARD_ERRORS, False), (MIN_TARGETED_GAIN_STANDARD_ERRORS, True)]
)
def test_gains_beyond_chance(least, is_kept):
    """The mean gain must exceed 2.5 standard errors, or 1 of an algorithm that is made to lower the error."""
    gains = np.array([0.5, -0.3] * 8) + 0.1  # a mean of 0.2, and a standard error of 0.1033
    after = np.square(1 - gains)[:, None]
    assert gains.mean() / (gains.std(ddof=1) / 4) == pytest.approx(1.94, abs=0.01)
    assert (rejection_reason(np.ones((16, 1)), after, least) == "") == is_kept


def test_exact_outputs():
    """An output without an error before and after neither gains nor loses."""
    assert "no output gains" in rejection_reason(np.zeros((8, 1)), np.zeros((8, 1)))
    both = np.stack([np.ones(8), np.zeros(8)], axis=1)
    assert rejection_reason(both, np.concatenate([tile(3.0, 8), np.zeros((8, 1))], axis=1)) == ""
    assert "grows" in rejection_reason(both, np.concatenate([tile(3.0, 8), np.full((8, 1), 1e-6)], axis=1))


def test_outputs_of_another_shape():
    """Samples whose outputs have another shape before do not count; an algorithm must not cause another shape."""
    before, after = np.ones((16, 1)), np.full((16, 1), 0.25)
    before[3], after[5] = np.inf, np.inf
    assert rejection_reason(before, after) == "an output gets another shape or infinite values"
    after[5], after[3] = 0.25, np.inf
    assert rejection_reason(before, after) == ""
    before[1:] = np.inf
    assert rejection_reason(before, after).startswith("only 1 samples")


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite_in_float(value):
    """They have no error, so that the other values of the output, and the other outputs, decide."""
    expected, actual = np.array([value, 3, 4], np.float32), np.array([value, 3, 6], np.float32)
    assert _squared_error(expected, actual) == 4
    assert _squared_error(expected, np.zeros(3, np.float32)) == 25


def expected_decision(before, after, least):
    """Return the decision by the four conditions: the text in the reason, or "" to keep the algorithm."""
    count = len(before)
    gains = np.sqrt(before) - np.sqrt(after)
    mean = gains.sum(0) / count
    standard_error = np.sqrt(np.square(gains - mean).sum(0) / (count - 1) / count)
    decibels = 10 * np.log10(before.sum(0) / after.sum(0))
    if min(decibels) < -0.5 or any(mean + standard_error < 0):
        return f"by a factor of {10 ** (max(-min(decibels), 0) / 20):.2f}"
    outliers = 1 if count < 8 else 2 if count < 12 else 3
    factors = []
    for old, new in zip(before.T, after.T, strict=True):
        pairs = sorted(zip(old, new, strict=True), key=lambda pair: pair[0] - pair[1])[:-outliers]
        old_sum, new_sum = map(sum, zip(*pairs, strict=True))
        most_gain = 2 * (new < old).sum() - count > 2.5 * count**0.5
        factors.append(1.0 if most_gain else (new_sum / old_sum) ** 0.5)
    if max(factors) > 1:
        return f"without the {outliers} samples that gain most, an output has {max(factors):.2f} times"
    if not any(mean > least * standard_error):
        return "more than chance"
    return "" if max(decibels) >= 0.5 else "0.5 dB"


@pytest.mark.parametrize("seed", range(10))
def test_decisions(seed):
    """Many errors of samples and outputs lead to the decision that the conditions require."""
    rng = np.random.default_rng(seed)
    decisions = set()
    for _ in range(100):
        shape = rng.choice([3, 4, 7, 8, 11, 12, 16, 16, 16, 40]), rng.integers(1, 3)
        before = 1e-5 * rng.lognormal(0, rng.choice([0.1, 1.0]), shape)  # all outputs are above the target
        gain = rng.uniform(-0.6, 1.0, shape[1]) + rng.choice([0.2, 1.0, 3.0]) * rng.normal(size=shape)
        unchanged = rng.random(shape) < (0.1 if shape[0] > 8 else 0.0)
        after = np.where(unchanged, before, before * 10 ** (-gain / 10))
        least = rng.choice([MIN_GAIN_STANDARD_ERRORS, MIN_TARGETED_GAIN_STANDARD_ERRORS])
        expected, reason = expected_decision(before, after, least), rejection_reason(before, after, least)
        assert expected in reason
        assert bool(expected) == bool(reason)
        decisions.add(expected[:5])
    assert decisions >= {"", "by a ", "witho", "more "}


@pytest.mark.parametrize(
    ("errors", "loss", "kept"),
    [
        ((0.2, 0.02), 1.25, True),  # 7 and 17 dB
        ((0.2, 0.02), 5.0, False),
        ((0.2, 0.008), 1.2, True),  # 21 dB
        ((0.2, 0.008), 1.4, False),  # it would have 19.5 dB
        ((2e-4, 2e-5), 1.25, False),
    ],
)
def test_worst_output_decides_below_the_target(errors, loss, kept):
    """Below 20 dB, the others may lose as much as the worst output gains, but not the target; above, none may lose."""
    before = np.array([errors] * 16)
    after = before * [0.5, loss]
    assert bool(rejection_reason(before * np.linspace(0.9, 1.1, 16)[:, None], after)) != kept


def test_selections_are_compared(tmp_path):
    """The values before a selection of rows by their values count: other rows are no error of the ops before."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,4] x) => (float[1,2] y) <int64[1] k = {2}> {
        c = MatMul(x, w) y, i = TopK(c, k) }"""
    model = onnx.parser.parse_model(text)
    runners = []
    for name, difference in (("float", 0.0), ("quantized", 0.01)):
        message = onnx.ModelProto()
        message.CopyFrom(model)
        weight = np.eye(4, dtype=np.float32) + np.float32(difference)
        message.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
        onnx.save(message, tmp_path / f"{name}.onnx")
        runner = onnx_format.create_runner(gq.load(tmp_path / f"{name}.onnx"))
        runners.append(with_selections(runner, *runners))
    feeds = [{"x": np.arange(4, dtype=np.float32)[None]}] * 3
    expected = list(runners[0].run_each(feeds))
    edits = SimpleNamespace(rewritten=lambda: (runners[1].model, []))
    data = AlgorithmData(feeds=[], validation_feeds=feeds, create_runner=onnx_format.create_runner)
    errors = algorithm._measure_output_errors(edits, runners[0], expected, data).errors
    assert errors == pytest.approx(np.full((3, 1), 4 * 0.06**2 / 14), rel=1e-4)  # of the four values before


def test_limits_of_decisions():
    """The limits that the documentation of the algorithms gives."""
    assert (algorithm.MAX_LOSS_STANDARD_ERRORS, algorithm.MAX_LOSS_DB, algorithm.MAX_OUTLIERS) == (1.0, 0.5, 3)
    assert (MIN_GAIN_STANDARD_ERRORS, MIN_TARGETED_GAIN_STANDARD_ERRORS) == (2.5, 1.0)


def test_broken_models_are_not_kept(monkeypatch):
    """The model of each algorithm is checked, also if nothing was applied."""
    checked = []
    state = WeightEdits(prepared_model=None, model="before", solution=None)
    monkeypatch.setattr(algorithm, "check_invariants", lambda model, name: checked.append((model, name)))
    feeds = [None] * 3
    data = AlgorithmData(feeds=feeds, validation_feeds=feeds, create_runner=Runner)
    apply_validated(state, [("gptq", lambda state, _: replace(state, model="after"), 1.0)], lambda state: state, data)
    assert checked == [("after", "gptq")]

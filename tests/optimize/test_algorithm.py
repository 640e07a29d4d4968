"""The validation of optimization algorithms: what is kept, undone, or not measured at all."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from graphquant.optimize import algorithm
from graphquant.optimize.algorithm import (
    MIN_GAIN_STANDARD_ERRORS,
    MIN_TARGETED_GAIN_STANDARD_ERRORS,
    AlgorithmData,
    AlgorithmResult,
    WeightEdits,
    apply_validated,
    rejection_reason,
)


class Runner:
    """A runner of a model that is its own outputs, one for each sample."""

    def __init__(self, outputs):
        self._outputs = iter(outputs)

    def run(self, _):
        """Return the outputs of the next sample."""
        return next(self._outputs)


def outputs_with_error(error, samples=8):
    """Return outputs that are this far from those of the float model, nearly the same for each sample."""
    return [{"y": np.array([1.0 + error * (1 + 0.01 * index)], np.float32)} for index in range(samples)]


def run_algorithms(monkeypatch, *errors, samples=8):
    """Return the state after algorithms that bring the outputs to these errors. None changes nothing."""
    monkeypatch.setattr(algorithm, "check_invariants", lambda model, name: None)
    monkeypatch.setattr(WeightEdits, "quantized_model", lambda edits: edits.solution)
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
            return replace(state, solution=solution, results=(*state.results, result))

        return f"{index}", apply, MIN_GAIN_STANDARD_ERRORS

    feeds = [SimpleNamespace()] * samples
    data = AlgorithmData(feeds=feeds, validation_feeds=feeds, create_runner=Runner)
    algorithms = [make(index, error) for index, error in enumerate(errors)]
    final = apply_validated(state, algorithms, lambda state: state, data)
    assert final.results[0] is earlier
    return [(entry.algorithm, entry.target, entry.applied) for entry in final.results[1:]], seen, final


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
        {"y": np.array([3.0, 4.0]), "z": np.array([0.0]), "i": np.array([1])},
        {"y": np.array([5.0, 0.0]), "z": np.array([0.0])},
    ]
    actual = [{"y": np.array([3.0, 3.0]), "z": np.array([2.0])}, {"y": np.array([5.0])}]
    edits = SimpleNamespace(quantized_model=lambda: actual)
    data = AlgorithmData(feeds=[], validation_feeds=[None, None], create_runner=Runner)
    errors = algorithm._measure_output_errors(edits, expected, data)
    assert errors.tolist() == [[1 / 25, 4.0], [np.inf, np.inf]]


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

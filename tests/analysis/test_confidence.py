"""Confidence intervals for all samples, from some of them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

import graphquant as gq
from graphquant.analysis.comparison import (
    CONFIDENCE_QUANTILE,
    MAX_SEARCH_PLANS,
    SqnrConfidence,
    lost_share_upper_bound,
    rows_to_show_share,
    student_quantile,
)
from graphquant.visualize.compare_report import LOWEST_USEFUL_BOUND, uncertainty_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.numerics import Array


def alike(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Errors of outputs of many values: all samples have about the same."""
    return rng.chisquare(500, shape)


def few_values(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Errors of ten scores."""
    return rng.chisquare(9, shape)


def spread_out(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Errors that differ by orders of magnitude."""
    return np.exp(1.5 * rng.normal(size=shape))


def behind_softmax(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Errors of a probability with a noisy score: small for samples that the model is sure of."""
    sure = 1 / (1 + np.exp(rng.normal(4, 3, shape)))
    return (sure * (1 - sure) * rng.normal(size=shape)) ** 2


def decades(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Errors of which few are large, as those of a recurrent net behind a softmax."""
    return np.exp(2 * rng.normal(size=shape))


def without_deviation(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Errors whose squares have no mean; none is larger than the output."""
    return np.minimum(rng.pareto(1.2, shape) + 1, OUTPUT_POWER)


OUTPUT_POWER = 1e6  # square of an output, which errors do not reach

DRAWS: dict[str, tuple[Callable[[np.random.Generator, tuple[int, ...]], Array], float]] = {
    "alike": (alike, 0.7),
    "few values": (few_values, 2.6),
    "spread out": (spread_out, 13.0),
    "behind a softmax": (behind_softmax, 20.0),
    "decades": (decades, 17.0),
    "without deviation": (without_deviation, 14.0),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_sqnr_is_at_least_that(kind: str) -> None:
    """At most one in 20 of 500 draws of 60 samples exceeds the true value, and equal samples give a tight bound."""
    draw, margin = DRAWS[kind]
    rng = np.random.default_rng(0)
    truth = 10 * np.log10(OUTPUT_POWER / draw(rng, (1_000_000,)).mean())
    least = np.array([_lower_bound(errors) for errors in draw(rng, (500, 60))])
    assert np.mean(least > truth) <= 0.05
    assert margin / 2 < truth - np.median(least) < margin


@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize("count", [8, 20])
@pytest.mark.parametrize("kind", DRAWS)
def test_sqnr_of_few_samples(kind: str, count: int, repeats: int) -> None:
    """At most one in 20 of 400 draws of few samples exceeds the true value, also if neighbors are alike."""
    draw, _ = DRAWS[kind]
    rng = np.random.default_rng(3)
    truth = 10 * np.log10(OUTPUT_POWER / draw(rng, (1_000_000,)).mean())
    bounds = np.array([_lower_bound(np.repeat(errors, repeats)) for errors in draw(rng, (400, count))])
    assert np.mean(bounds > truth) <= 0.05


@pytest.mark.parametrize(("spread", "is_bounded"), [(0.5, True), (1.0, True), (6.0, False)])
def test_squares_without_a_mean(spread: float, is_bounded: bool) -> None:
    """Samples of an output that ends in an Exp of large values give no bound; those of audio do."""
    rng = np.random.default_rng(0)
    bounds = []
    for _ in range(100):
        confidence = SqnrConfidence()
        power = np.exp(spread * rng.normal(size=40))
        confidence.add(power, power * rng.chisquare(9, 40) / 1000)
        bounds.append(confidence.lower_bound > -np.inf)
    assert np.mean(bounds) > 0.95 if is_bounded else np.mean(bounds) < 0.05


def _lower_bound(errors: Array) -> float:
    spread = SqnrConfidence()
    for chunk in np.split(errors, 4):
        spread.add(np.full(chunk.size, OUTPUT_POWER), chunk)
    return spread.lower_bound


@pytest.mark.parametrize("kind", DRAWS)
def test_the_best_of_many_plans(kind: str) -> None:
    """Of 100 searches among 24 equal plans at most one in 20 says of the best too much, and is believed by the check.

    Which samples are hard is alike for all plans, what is lost on each is not. The check has half as many samples.
    """
    draw, _ = DRAWS[kind]
    rng = np.random.default_rng(1)
    truth = 10 * np.log10(OUTPUT_POWER / draw(rng, (1_000_000,)).mean())
    wrong = 0
    for _ in range(100):
        plans = draw(rng, (1, 90)) * rng.chisquare(9, (MAX_SEARCH_PLANS, 90)) / 9
        least, best = max((_lower_bound(errors[:60]), index) for index, errors in enumerate(plans))
        wrong += truth < least <= 10 * np.log10(OUTPUT_POWER / plans[best, 60:].mean())
    assert wrong <= 5


def test_undefined_metrics() -> None:
    """Fewer than 4 samples, and outputs of 0, give no bound; equal outputs give an infinite one."""
    spread = SqnrConfidence()
    assert spread.lower_bound == -np.inf
    spread.add(np.ones(3), np.zeros(3))
    assert spread.lower_bound == -np.inf
    spread.add(np.ones(1), np.zeros(1))
    assert spread.lower_bound == np.inf
    spread.add(np.ones(36), np.array([1.0] + [0.0] * 35))
    assert -30 < spread.lower_bound < 10 * np.log10(40) - 10
    assert spread.half_error_samples == 1
    silent = SqnrConfidence()
    silent.add(np.zeros(5), np.ones(5))
    assert silent.lower_bound == -np.inf
    assert silent.half_error_samples == 3
    silent.add(np.ones(1), np.full(1, np.inf))
    assert silent.lower_bound == -np.inf


def test_shares_and_rows() -> None:
    """Nothing lost of 627 rows shows that at most 1% are, and of 626 it does not; gains make up for losses."""
    assert rows_to_show_share(0.01) == 627
    assert lost_share_upper_bound(0, 0, 627) <= 0.01 < lost_share_upper_bound(0, 0, 626)
    assert lost_share_upper_bound(3, 3, 100) < lost_share_upper_bound(3, 0, 100)
    assert 0.5 < lost_share_upper_bound(5, 0, 10) <= 1.0
    assert rows_to_show_share(0.0) == 0


@pytest.mark.parametrize("rate", [0.005, 0.03, 0.2])
def test_lost_rows_are_at_most_that(rate: float) -> None:
    """At most one in 100 of 2,000 draws of 200 rows underestimates the lost share."""
    lost = np.random.default_rng(2).binomial(200, rate, 2000)
    assert np.mean([lost_share_upper_bound(int(count), 0, 200) < rate for count in lost]) <= 0.01


def test_quantile() -> None:
    """Student's quantile for one in 480 is that of tables, never much below."""
    for freedom, right in {3: 7.93975, 4: 5.88531, 7: 4.17431, 15: 3.37493, 39: 3.04406}.items():
        assert 0.993 * right < student_quantile(freedom) < 1.01 * right
    assert pytest.approx(2.86526, abs=1e-5) == CONFIDENCE_QUANTILE


@pytest.mark.slow
def test_few_samples_are_reported(samples, tmp_path, cli) -> None:
    """The report and JSON of 12 samples have a lower bound that unseen samples confirm within 1 dB."""
    images = np.load(samples / "digits_cnn_calib.npz")["image"]
    np.savez(tmp_path / "few.npz", image=images[np.random.default_rng(3).permutation(len(images))[:12]])
    model, output, report = samples / "digits_cnn.onnx", tmp_path / "q.onnx", tmp_path / "report.json"
    shown = cli("insert", model, "--data", tmp_path / "few.npz", "-o", output, "--report", report).stdout
    figures = json.loads(report.read_text())["validation"]["comparison"]["outputs"][0]
    unseen = gq.compare(model, output, str(samples / "digits_cnn_eval.npz"), sites=False).sqnr
    bound = figures["sqnr_lower_bound"]
    assert bound - 1 < unseen < figures["sqnr"] - 5
    assert (f"at least {bound:.1f} dB" if bound >= LOWEST_USEFUL_BOUND else "too few samples (4)") in shown
    assert figures["agreement_lower_bound"] < 1
    shown = cli("compare", model, output, "--data", samples / "digits_cnn_eval.npz").stdout
    assert "too few samples" not in shown


@pytest.mark.parametrize(
    ("sqnr", "bound", "expected"),
    [
        (40.0, 36.0, ""),
        (40.0, 12.0, "at least 12.0 dB"),
        (40.0, -3.0, "too few samples"),
        (11.0, 4.0, "at least 4.0 dB"),
    ],
)
def test_lower_bounds_are_shown(sqnr: float, bound: float, expected: str) -> None:
    """The samples are too few where the lower bound is low and the measured SQNR is not."""
    output = SimpleNamespace(name="y", sqnr=sqnr, sqnr_lower_bound=bound)
    lines = uncertainty_lines(SimpleNamespace(outputs=[output], random=False, samples=4))
    assert len(lines) == bool(expected)
    assert expected in "".join(str(line) for line in lines)

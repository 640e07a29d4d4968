"""What a comparison of two models gives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from graphquant.observers import histogram_kernel
from graphquant.utils.notebook_html import HtmlRepresentation

if TYPE_CHECKING:
    from graphquant.numerics import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFigures:
    """An output over all samples.

    Attributes:
        name: Its name in the float model.
        quantized_name: Its name in the quantized one.
        sqnr: Signal to noise in dB, infinite where nothing differs; None where it does not hold floats.
        cosine: Of the angle between both, as vectors; None likewise.
        max_error: The largest difference of two values.
        agreement: Share of rows whose largest value is at the same place, or of integers that are equal; None where
            neither can be said.
        rows: How many rows or integers that is a share of.
        values: How many values were compared; none where it was empty for all samples.
        accuracy: Share of rows whose largest value is where the label says, of the float model and of the quantized
            one; None without labels.
        problem: Why the two could not be compared, "" if they could.
        sqnr_lower_bound: What SQNR is at least, were it the best of a search's plans, with 95% confidence, as far as these
            samples stand for all; minus infinity where they are too few to say, None where it does not hold floats.
        half_error_samples: How many samples, the worst first, make half of the error.
        agreement_lower_bound: Of agreement, as of SQNR.
        lost_share_upper_bound: The share of rows that are right at most less in the quantized model, likewise; None without labels.
    """

    name: str
    quantized_name: str
    sqnr: float | None
    cosine: float | None
    max_error: float
    agreement: float | None
    rows: int
    values: int
    accuracy: tuple[float, float] | None
    problem: str
    sqnr_lower_bound: float | None = None
    half_error_samples: int = 0
    agreement_lower_bound: float | None = None
    lost_share_upper_bound: float | None = None

    @property
    def empty(self) -> bool:
        """Whether there was nothing to compare."""
        return not self.values and not self.problem


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFigures:
    """A quantized tensor.

    Attributes:
        graph: Its graph, "" for the main one.
        op: The quantization op.
        tensor: What it quantizes.
        rule: The rule that inserted it, "" if that is not known.
        parameter: Whether it is a weight.
        local: What this quantization alone does to the values it gets, dB of SQNR; None if that is not known.
        accumulated: What this and all before it did to the float model's values, dB of SQNR; None if not known.
        sensitivity: What it does alone to the worst output, dB of SQNR; None if that was not measured.
        bias: Whether it makes the 32 bits that are added to a sum of products; steps are those of the sum, so that what
            a small bias loses is nothing to the sum.
        note: Why a figure is not known, "" if both are.
    """

    graph: str
    op: str
    tensor: str
    rule: str
    parameter: bool
    local: float | None
    accumulated: float | None
    sensitivity: float | None = None
    bias: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(HtmlRepresentation):
    """Two models on the same data.

    Attributes:
        samples: How many samples were run.
        random: Whether they were made up.
        outputs: Figures of each output.
        sites: Figures of each quantized tensor, the largest local error first, or the largest blame.
        labels: The key of the data that has labels, "" if there is none.
    """

    samples: int
    random: bool
    outputs: tuple[OutputFigures, ...]
    sites: tuple[SiteFigures, ...]
    labels: str

    @property
    def all_empty(self) -> bool:
        """Whether no output had any value to compare."""
        return bool(self.outputs) and all(output.empty for output in self.outputs)

    @property
    def sqnr(self) -> float | None:
        """That of the worst output; None where no output holds floats."""
        if any(output.problem for output in self.outputs):
            return -math.inf
        return min((output.sqnr for output in self.outputs if output.sqnr is not None), default=None)

    @property
    def agreement(self) -> float | None:
        """That of the worst output; None where no output has one."""
        if any(output.problem for output in self.outputs):
            return 0.0
        return min((output.agreement for output in self.outputs if output.agreement is not None), default=None)


# How far two tensors are apart, over as many runs as there are.

SMALLEST_SUM = 1e-30
"""Sums of squares below that may have lost values that are too small for float32."""


def ignore_overflow() -> np.errstate:
    """How numpy takes what is too large for float32 in silence; it takes too long to be had for each tensor."""
    return np.errstate(over="ignore", invalid="ignore")


class ErrorSums:
    """Sums over all pairs of values that were added; float64, in units of the values squared.

    Attributes:
        power: Of the expected values.
        actual_power: Of the found values.
        error: Of their differences.
        dot: Of the products of both.
        max_error: The largest difference.
        count: How many values.
        nonfinite: How many values are NaN or infinite in one of the two alone.
        problem: Why the two cannot be compared, "" if they can.
    """

    __slots__ = ("nonfinite", "count", "dot", "error", "actual_power", "max_error", "power", "problem")

    def __init__(self) -> None:
        self.power = self.actual_power = self.error = self.dot = self.max_error = 0.0
        self.count = self.nonfinite = 0
        self.problem = ""

    def add(self, expected: Array, actual: Array, *, full: bool = False) -> None:
        """Adds a pair of arrays of one shape; `full` adds what cosine and largest difference need.

        To be called under `ignore_overflow`: sums that float32 cannot hold are made again.
        """
        if expected.shape != actual.shape:
            self.problem = (
                self.problem or f"shapes differ: {_shape_in_brackets(expected)} and {_shape_in_brackets(actual)}"
            )
            return
        flat_expected, flat_actual = expected.reshape(-1), actual.reshape(-1)
        self.count += flat_expected.size
        if (
            not full
            and flat_expected.dtype == flat_actual.dtype == np.float32
            and self._add_float32_sums(flat_expected, flat_actual)
        ):
            return
        for start in range(0, flat_expected.size, histogram_kernel.SQUARES_CHUNK):
            self._add_chunk(
                flat_expected[start : start + histogram_kernel.SQUARES_CHUNK],
                flat_actual[start : start + histogram_kernel.SQUARES_CHUNK],
                full=full,
            )

    def _add_float32_sums(self, expected: Array, actual: Array) -> bool:
        """Adds power and error as float32 gives them, if it holds them."""
        if not (_is_c_aligned(expected) and _is_c_aligned(actual)):
            return False
        power, error = histogram_kernel.sum_squares(expected, actual)
        fits = SMALLEST_SUM < power < math.inf and SMALLEST_SUM < error < math.inf
        if fits:
            self.power += power
            self.error += error
        return fits

    def _add_chunk(self, expected: Array, actual: Array, *, full: bool) -> None:
        """Adds the sums of a few values, in float32 where that holds them."""
        is_float32 = expected.dtype == np.float32 and actual.dtype == np.float32
        errors = actual - expected if is_float32 else expected
        power, error = float(np.dot(expected, expected)), float(np.dot(errors, errors))
        if not (is_float32 and _is_exact_sum(power, expected) and _is_exact_sum(error, errors)):
            expected, actual = self._finite_pairs(expected.astype(np.float64), actual.astype(np.float64))
            errors = actual - expected
            power, error = float(np.dot(expected, expected)), float(np.dot(errors, errors))
        self.power += power
        self.error += error
        if full:
            self.actual_power += float(np.dot(actual, actual))
            self.dot += float(np.dot(expected, actual))
            self.max_error = max(self.max_error, float(np.abs(errors).max(initial=0)))

    def _finite_pairs(self, expected: Array, actual: Array) -> tuple[Array, Array]:
        """The pairs of values that are finite; others are counted unless they are the same."""
        finite = np.isfinite(expected) & np.isfinite(actual)
        if finite.all():
            return expected, actual
        self.nonfinite += int((~finite & ~((expected == actual) | (np.isnan(expected) & np.isnan(actual)))).sum())
        return expected[finite], actual[finite]

    @property
    def sqnr(self) -> float:
        """Signal to noise, dB; infinite where nothing differs."""
        if self.nonfinite:
            return -math.inf
        if not self.error:
            return math.inf
        return 10 * math.log10(self.power / self.error) if self.power else -math.inf

    @property
    def cosine(self) -> float:
        """Of the angle between the two, as vectors."""
        if not self.power or not self.actual_power:
            return 1.0 if self.power == self.actual_power else 0.0
        return min(max(self.dot / math.sqrt(self.power) / math.sqrt(self.actual_power), -1.0), 1.0)


def _is_c_aligned(values: Array) -> bool:
    """Whether a row of values is as it is wanted in C."""
    return values.flags.c_contiguous and values.flags.aligned


def _is_exact_sum(total: float, values: Array) -> bool:
    """Whether a sum of squares in float32 is that of `values`."""
    return SMALLEST_SUM < total < math.inf or (not total and not values.any())


def _shape_in_brackets(values: Array) -> str:
    return "[" + ", ".join(map(str, values.shape)) + "]"


# What can be said of all samples there are from those that were measured, with a confidence of 95%.
#
# A search measures up to 24 plans and keeps one for what was measured of it. So each is held to one in 480: then no claim
# among them all is wrong more often than one in 20 times (Bonferroni; Angelopoulos et al. 2021, "Learn then Test").

MAX_SEARCH_PLANS = 24
"""How many plans a search measures at most."""

CONFIDENCE_QUANTILE = NormalDist().inv_cdf(1 - 0.05 / MAX_SEARCH_PLANS)
"""What a normal variable stays below with that confidence."""

DB_PER_NEPER = 10 / math.log(10)
"""Decibels of a small relative change."""

MIN_SAMPLES = 4
"""Samples that it takes to say anything of others."""

TAIL_DIVISOR = 5
"""One in so many samples, those with the largest errors, tells how long the tail is; at least three do."""

MAX_TAIL_INDEX = 3.0
"""The index of a tail is taken to be no larger, since behind a softmax each tail has an end."""


class SqnrConfidence:
    """How sure the ratio of two sums over samples is: that of squares of an output and of its errors.

    The ratio of sums is as sure as the mean of each sample's share of the errors less its share of the squares (Cochran
    1977, "Sampling Techniques", section 6.3). Errors have long tails, as behind a softmax, where a few samples make
    most of all and are seldom seen. So one sample more is counted that is worse than the worst, by as much as the
    tail is long: by 1 + its index (Hill 1975). Where all samples are alike that changes nothing.
    """

    __slots__ = ("_error", "_power")

    def __init__(self) -> None:
        self._power: list[Array] = []
        self._error: list[Array] = []

    def add(self, power: Array, error: Array) -> None:
        """Adds samples: float64 (N,) each, squares of the output and of its errors."""
        self._power.append(power)
        self._error.append(error)

    @property
    def lower_bound(self) -> float:
        """The SQNR in dB that there is at least: infinite where nothing differs, minus that where nobody can say."""
        power, error = self._sorted_by_error()
        if error.size < MIN_SAMPLES or not math.isfinite(power.sum() + error.sum()):
            return -math.inf
        if not error[0] > 0:
            return math.inf
        power, error = np.append(power, power[0]), np.append(error, (1 + _tail_index(error)) * error[0])
        power_sum, error_sum = float(power.sum()), float(error.sum())
        if not power_sum > 0:
            return -math.inf
        shares = error / error_sum - power / power_sum
        deviation = DB_PER_NEPER * math.sqrt(shares @ shares * error.size / (error.size - 1))
        return DB_PER_NEPER * math.log(power_sum / error_sum) - _student_quantile(error.size - 2) * deviation

    @property
    def half_error_samples(self) -> int:
        """How many samples, the worst first, make half of the error."""
        error = self._sorted_by_error()[1]
        return int(np.searchsorted(error.cumsum(), error.sum() / 2)) + 1 if error.size else 0

    def _sorted_by_error(self) -> tuple[Array, Array]:
        """Squares and errors, the largest error first."""
        power, error = (np.concatenate([*chunks, np.zeros(0)]) for chunks in (self._power, self._error))
        order = np.argsort(-error, kind="stable")
        return power[order], error[order]


def _tail_index(error: Array) -> float:
    """The index of the tail of errors, the largest first: how much larger the largest are, as a mean of logarithms."""
    count = max(error.size // TAIL_DIVISOR, 3)
    top = error[: count + 1] / error[0]
    return min(float(np.log(top[:-1] / top[-1]).mean()), MAX_TAIL_INDEX) if top[-1] > 0 else MAX_TAIL_INDEX


def _student_quantile(freedom: int) -> float:
    """What a variable of Student's distribution stays below (Gaver and Kafadar 1984; to 1% from 3 on)."""
    return math.sqrt(freedom * math.expm1(CONFIDENCE_QUANTILE**2 * (freedom - 1.5) / (freedom - 1) ** 2))


def lost_share_upper_bound(lost: int, gained: int, rows: int) -> float:
    """The share of rows that are lost at most, less those that are gained, where so many of `rows` were.

    Both are counts of rare events, Poisson's distribution (Garwood 1936, by Wilson and Hilferty 1931); how unsure
    they are adds up as squares (Zou and Donner 2008).
    """
    lost_margin, gained_margin = (
        _poisson_mean_bound(lost + 1, CONFIDENCE_QUANTILE) - lost,
        gained - _poisson_mean_bound(gained, -CONFIDENCE_QUANTILE),
    )
    return min((lost - gained + math.hypot(lost_margin, gained_margin)) / rows, 1.0)


def rows_to_show_share(share: float) -> int:
    """How many rows it takes to show that no more than `share` are lost, where none is seen to be."""
    return math.ceil(_poisson_mean_bound(1, CONFIDENCE_QUANTILE) / share) if share > 0 else 0


def _poisson_mean_bound(count: int, quantile: float) -> float:
    """A bound on the mean of events of which about `count` were seen."""
    return count * max(1 - 1 / (9 * count) + quantile / (3 * math.sqrt(count)), 0.0) ** 3 if count else 0.0

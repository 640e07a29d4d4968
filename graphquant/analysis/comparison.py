"""Results of a comparison, the error sums behind them, and their confidence bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from graphquant.observers import histogram_kernel
from graphquant.utils import HtmlRepresentation
from graphquant.utils.text import format_shape

if TYPE_CHECKING:
    from graphquant.calibration.data.check import DataFinding
    from graphquant.numerics import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFigures:
    """Figures of one output over all samples."""

    name: str  # name in the float model
    quantized_name: str  # name in the quantized model
    sqnr: float | None  # SQNR in dB, infinite without any difference; None if the output is not float.
    cosine: float | None  # Cosine similarity; None if the output is not float.
    max_error: float  # largest absolute difference
    agreement: float | None  # Share of rows with the same argmax, or of equal integers; None for other outputs.
    rows: int  # number of rows or integers behind `agreement`
    values: int  # number of compared values; 0 if the output was empty for all samples
    # Share of rows whose argmax is the label, for the float and the quantized model; None without labels.
    accuracy: tuple[float, float] | None
    problem: str  # reason why the outputs could not be compared, or ""
    # Lower bound of SQNR with 95% confidence, valid also for the best plan of a search; minus infinity if there are
    # too few samples, None if the output is not float.
    sqnr_lower_bound: float | None = None
    sqnr_standard_error: float = 0.0  # standard error of `sqnr` in dB, by the variation between samples
    half_error_samples: int = 0  # number of the worst samples that cause half of the error
    agreement_lower_bound: float | None = None  # lower bound of `agreement`, likewise
    # Upper bound of the share of correct rows that quantization loses; None without labels.
    lost_share_upper_bound: float | None = None
    # exp(mean loss) of the next tokens, for the float and the quantized model; None without labels of tokens.
    perplexity: tuple[float, float] | None = None
    broken: int = 0  # number of values that are NaN or infinite in the quantized model only
    # Loss of SQNR in dB, on the samples on which tensors are observed, where ops may be fused because none is.
    fusion_loss: float = 0.0

    @property
    def empty(self) -> bool:
        """True if there were no values to compare."""
        return not self.values and not self.problem

    @property
    def equal(self) -> bool:
        """True if there is no difference."""
        return not self.problem and not self.empty and self.max_error == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFigures:
    """Figures of one quantized tensor."""

    graph: str  # its graph, "" for the main graph
    op: str
    tensor: str  # the quantized tensor
    rule: str  # rule that inserted the op, "" if unknown
    parameter: bool  # True for a weight
    local: float | None  # SQNR in dB of this quantization for its input; None if unknown.
    # SQNR in dB relative to the float model, which includes all earlier quantizations; None if unknown.
    accumulated: float | None
    # SQNR in dB of the worst output with this quantization alone; None if not measured.
    sensitivity: float | None = None
    # True for a 32-bit bias. Its steps are those of the sum, so a low SQNR of a small bias is harmless.
    bias: bool = False
    note: str = ""  # reason for an unknown figure, or ""

    @property
    def exact(self) -> bool:
        """True if the quantization of its input loses nothing."""
        return self.local == math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFigures:
    """Scores by the user's metric, means over all samples."""

    name: str  # module:function, or the name of the function
    scores: tuple[float, float]  # of the float and of the quantized model
    drop_upper_bound: float  # upper bound of the drop with 95% confidence; infinite if there are too few samples

    @property
    def drop(self) -> float:
        """Loss of the quantized model."""
        return self.scores[0] - self.scores[1]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(HtmlRepresentation):
    """Result of running two models on the same data."""

    samples: int  # number of samples
    random: bool  # True for random data
    outputs: tuple[OutputFigures, ...]  # figures of each output
    # Figures of each quantized tensor, by local error or by sensitivity, the worst first.
    sites: tuple[SiteFigures, ...]
    labels: str  # key of the labels in the data, or ""
    data_findings: tuple[DataFinding, ...] = ()  # likely mistakes in the data
    metric: MetricFigures | None = None  # scores by the user's metric, or None without one

    def _figure_texts(self) -> list[str]:
        """Return the figures of the worst output."""
        figures = import_module("graphquant.visualize.compare_report").comparison_figures(self)  # above this package
        return [f"{label}: {value}" for label, value in figures]

    @property
    def all_empty(self) -> bool:
        """True if no output had any values to compare."""
        return bool(self.outputs) and all(output.empty for output in self.outputs)

    @property
    def sqnr(self) -> float | None:
        """SQNR of the worst output; None without float outputs."""
        if any(output.problem for output in self.outputs):
            return -math.inf
        return min((output.sqnr for output in self.outputs if output.sqnr is not None), default=None)

    @property
    def agreement(self) -> float | None:
        """Agreement of the worst output; None if no output has one."""
        if any(output.problem for output in self.outputs):
            return 0.0
        return min((output.agreement for output in self.outputs if output.agreement is not None), default=None)


# Errors are summed in float32 where that is exact enough, because it is several times faster than float64.

SMALLEST_SUM = 1e-30  # sum of squares below which float32 may have lost small values


def ignore_overflow() -> np.errstate:
    """Ignore float32 overflow in numpy; enter this once per run, because entering takes longer than a small sum."""
    return np.errstate(over="ignore", invalid="ignore")


class ErrorSums:
    """Float64 sums over all added pairs of values, in squared units."""

    __slots__ = ("actual_power", "broken", "count", "dot", "error", "max_error", "nonfinite", "power", "problem")

    def __init__(self) -> None:
        self.power = self.actual_power = self.error = 0.0  # squared expected values, actual values, and differences
        self.dot = self.max_error = 0.0  # sum of the products, and largest absolute difference
        # All values, those that are NaN or infinite in only one array, and those of them that are finite as expected.
        self.count = self.nonfinite = self.broken = 0
        self.problem = ""  # reason why the two cannot be compared

    def add(self, expected: Array, actual: Array, *, full: bool = False) -> None:
        """Add two arrays of one shape; `full` includes the sums for cosine and the largest difference.

        Call it within `ignore_overflow`: sums that exceed float32 are recomputed.
        """
        if expected.shape != actual.shape:
            shapes = f"{format_shape(expected.shape)} and {format_shape(actual.shape)}"
            self.problem = self.problem or f"shapes differ: {shapes}"
            return
        flat_expected, flat_actual = expected.reshape(-1), actual.reshape(-1)
        self.count += flat_expected.size
        is_float32 = flat_expected.dtype == flat_actual.dtype == np.float32
        if not full and is_float32 and self._add_float32_sums(flat_expected, flat_actual):
            return
        for start in range(0, flat_expected.size, histogram_kernel.SQUARES_CHUNK):
            chunk = slice(start, start + histogram_kernel.SQUARES_CHUNK)
            self._add_chunk(flat_expected[chunk], flat_actual[chunk], full=full)

    def _add_float32_sums(self, expected: Array, actual: Array) -> bool:
        """Add the float32 sums of power and error if they are exact enough."""
        if not all(values.flags.c_contiguous and values.flags.aligned for values in (expected, actual)):
            return False  # the C kernel would need a copy
        power, error = histogram_kernel.sum_squares(expected, actual)
        fits = SMALLEST_SUM < power < math.inf and SMALLEST_SUM < error < math.inf
        if fits:
            self.power += power
            self.error += error
        return fits

    def _add_chunk(self, expected: Array, actual: Array, *, full: bool) -> None:
        """Add the sums of a chunk, in float32 if that is exact enough."""
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
        """Select the pairs of finite values, and count the others unless both are equal."""
        finite = np.isfinite(expected) & np.isfinite(actual)
        if finite.all():
            return expected, actual
        self.nonfinite += int((~finite & ~((expected == actual) | (np.isnan(expected) & np.isnan(actual)))).sum())
        self.broken += int((np.isfinite(expected) & ~finite).sum())
        return expected[finite], actual[finite]

    @property
    def sqnr(self) -> float:
        """SQNR in dB; infinite without any difference."""
        if self.nonfinite:
            return -math.inf
        if not self.error:
            return math.inf
        return 10 * math.log10(self.power / self.error) if self.power else -math.inf

    @property
    def cosine(self) -> float:
        """Cosine similarity."""
        if not self.power or not self.actual_power:
            return 1.0 if self.power == self.actual_power else 0.0
        return min(max(self.dot / math.sqrt(self.power) / math.sqrt(self.actual_power), -1.0), 1.0)


def _is_exact_sum(total: float, values: Array) -> bool:
    """Return True if the float32 sum of squares is exact enough for `values`."""
    return SMALLEST_SUM < total < math.inf or (not total and not values.any())


# Confidence bounds at 95% for all samples of the population.
#
# A search measures up to 24 plans and keeps one because of its measurement. Each bound therefore holds with an error
# rate of 1 in 480, so that all 24 together are wrong at most once in 20 times (Bonferroni; Angelopoulos et al. 2021,
# "Learn then Test").

MAX_SEARCH_PLANS = 24  # maximum number of plans that a search measures

CONFIDENCE_QUANTILE = NormalDist().inv_cdf(1 - 0.05 / MAX_SEARCH_PLANS)
"""Quantile of the normal distribution for that confidence."""

DB_PER_NEPER = 10 / math.log(10)  # decibels per unit of relative change
MIN_SAMPLES = 4  # minimum number of independent samples for a bound
TAIL_DIVISOR = 5  # one in this many samples, at least four, estimates the tail index
UNSEEN_SAMPLES = 3  # an event that happens once in N/3 samples is missing from N samples with a probability of 5%
PRIOR_TAIL_INDEX = 2.0  # assumed tail index of errors; behind a softmax it is 1.5 to 5, elsewhere 0.3 to 1.5
PRIOR_TAIL_SIZE = 2  # number of samples that the assumption counts for
LARGEST_ERROR_RATIO = 2.0  # largest error of an unseen sample, relative to the squares: another class is the right one
SMALLEST_ERROR = 1e-12  # smallest error relative to the largest one; smaller ones are those of equal outputs
UPPER_QUANTILE = NormalDist().inv_cdf(0.95)  # quantile for correlations that are not due to chance, and for the tail


class SqnrConfidence:
    """Confidence bound of an SQNR, the ratio of two sums over samples.

    The ratio is as uncertain as the mean of each sample's share of the errors minus its share of the squares (Cochran
    1977, "Sampling Techniques", section 6.3). Errors have heavy tails, especially behind a softmax, where a few rare
    samples cause most of the error. The bound therefore counts three more samples, as many as N samples may miss (rule
    of three; Hanley and Lippman-Hand 1983). Their errors exceed the worst as the Pareto tail of the largest errors does
    (Hill 1975), up to twice the output. A few samples say little about the tail, so its index is averaged with an
    assumed one, and counts with its standard error. Similar neighbors, such as frames of a recording, count as fewer.
    """

    __slots__ = ("_error", "_power")

    def __init__(self) -> None:
        self._power: list[Array] = []
        self._error: list[Array] = []

    def add(self, power: Array, error: Array) -> None:
        """Add samples: float64 (N,) each, squares of the output and of its errors."""
        self._power.append(power)
        self._error.append(error)

    @property
    def lower_bound(self) -> float:
        """Lower bound of the SQNR in dB; infinite without errors, minus infinity if there are too few samples.

        No number is enough for an output whose squares have no mean, such as that of an Exp: a few samples of all
        decide its SQNR.
        """
        power, error = self._sums()
        if error.size < MIN_SAMPLES or not math.isfinite(power.sum() + error.sum()):
            return -math.inf
        if not error.any():
            return math.inf
        power, error = _merge_neighbors(power, error)
        if error.size < MIN_SAMPLES or not power.any():
            return -math.inf
        # The power has no mean if its tail index is above 1, by more than the standard error, index / sqrt(tail size).
        if _tail_index(power) * (1 - 1 / math.sqrt(_tail_size(power))) > 1:
            return -math.inf
        unseen = error.max() * math.exp(_largest_tail_index(error))
        unseen = max(min(unseen, LARGEST_ERROR_RATIO * power.max()), error.max())
        power = np.append(power, [power.mean()] * UNSEEN_SAMPLES)
        error = np.append(error, [unseen] * UNSEEN_SAMPLES)
        power_sum, error_sum = float(power.sum()), float(error.sum())
        shares = error / error_sum - power / power_sum
        deviation = DB_PER_NEPER * math.sqrt(shares @ shares * error.size / (error.size - 1))
        return DB_PER_NEPER * math.log(power_sum / error_sum) - student_quantile(error.size - 2) * deviation

    @property
    def standard_error(self) -> float:
        """Standard error of the SQNR in dB; 0 without errors, infinite if there are too few samples."""
        power, error = self._sums()
        power_sum, error_sum = float(power.sum()), float(error.sum())
        if error.size < MIN_SAMPLES or not math.isfinite(power_sum + error_sum):
            return math.inf
        if not power_sum or not error_sum:
            return 0.0
        shares = error / error_sum - power / power_sum
        return DB_PER_NEPER * math.sqrt(shares @ shares * error.size / (error.size - 1))

    @property
    def half_error_samples(self) -> int:
        """Number of the worst samples that cause half of the error."""
        error = np.sort(self._sums()[1])[::-1]
        return int(np.searchsorted(error.cumsum(), error.sum() / 2)) + 1 if error.size else 0

    @property
    def sample_errors(self) -> list[float]:
        """Squared errors of the samples in the order in which they were added."""
        return [float(error) for error in self._sums()[1]]

    def _sums(self) -> tuple[Array, Array]:
        """Squares and errors of all samples, in order."""
        return np.concatenate([*self._power, np.zeros(0)]), np.concatenate([*self._error, np.zeros(0)])


def _log_errors(error: Array) -> Array:
    return np.asarray(np.log(np.maximum(error, SMALLEST_ERROR * error.max())))


def _merge_neighbors(power: Array, error: Array) -> tuple[Array, Array]:
    """Sum over as many neighbors as one independent sample is worth, if the errors of neighbors are correlated."""
    deviations = _log_errors(error) - _log_errors(error).mean()
    correlation = float(deviations[1:] @ deviations[:-1]) / (float(deviations @ deviations) or 1.0)
    if not correlation > UPPER_QUANTILE / math.sqrt(error.size):
        return power, error
    group_count = max(math.floor(error.size * (1 - correlation) / (1 + correlation)), 1)
    groups = np.arange(error.size) * group_count // error.size
    return np.bincount(groups, power), np.bincount(groups, error)


def _tail_size(error: Array) -> int:
    return min(max(error.size // TAIL_DIVISOR, MIN_SAMPLES), error.size - 1)


def _largest_tail_index(error: Array) -> float:
    """Upper bound of the tail index, with 95% confidence."""
    count = _tail_size(error)
    index = (_tail_index(error) * (count - 1) + PRIOR_TAIL_INDEX * PRIOR_TAIL_SIZE) / (count - 1 + PRIOR_TAIL_SIZE)
    return index * (1 + UPPER_QUANTILE / math.sqrt(count))


def _tail_index(error: Array) -> float:
    """Mean tail index that the largest errors allow: logarithms of these relative to the next."""
    count = _tail_size(error)
    top = np.sort(_log_errors(error))[-count - 1 :]
    return float((top[1:] - top[0]).sum()) / (count - 1)


def student_quantile(freedom: int) -> float:
    """Quantile of Student's distribution (Gaver and Kafadar 1984; exact to 1% from 3 degrees of freedom)."""
    return math.sqrt(freedom * math.expm1(CONFIDENCE_QUANTILE**2 * (freedom - 1.5) / (freedom - 1) ** 2))


def lost_share_upper_bound(lost: int, gained: int, rows: int) -> float:
    """Upper bound of the share of lost minus gained rows.

    Both counts are rare events with Poisson distribution (Garwood 1936, by Wilson and Hilferty 1931); their
    uncertainties add as squares (Zou and Donner 2008).
    """
    lost_margin = _poisson_mean_bound(lost + 1, CONFIDENCE_QUANTILE) - lost
    gained_margin = gained - _poisson_mean_bound(gained, -CONFIDENCE_QUANTILE)
    return min((lost - gained + math.hypot(lost_margin, gained_margin)) / rows, 1.0)


def rows_to_show_share(share: float) -> int:
    """Number of rows that prove a loss of at most `share` if none is lost."""
    return math.ceil(_poisson_mean_bound(1, CONFIDENCE_QUANTILE) / share) if share > 0 else 0


def _poisson_mean_bound(count: int, quantile: float) -> float:
    """Bound of the mean of a Poisson count."""
    return count * max(1 - 1 / (9 * count) + quantile / (3 * math.sqrt(count)), 0.0) ** 3 if count else 0.0

"""Ranges that observers choose from sketches."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.qparams import choose_qparams

from graphquant.errors import DataError
from graphquant.numerics import (
    FloatType,
    IntType,
    QType,
    QuantizationGrid,
    Range,
    dequantize,
    qparams_from_scale,
    quantize,
)
from graphquant.observers import EMPTY_SKETCH, OBSERVERS, Sketch, SketchAccumulator, sketch_values
from graphquant.observers.distribution import distribution_of

INT8, UINT8 = IntType(8, True), IntType(8, False)


def observe(
    name: str,
    stats: Sketch,
    dtype: QType = INT8,
    *,
    symmetric: bool = True,
    narrow: bool = False,
    power_of_two: bool = False,
    **arguments: float,
) -> Range:
    """Return the range that an observer chooses."""
    defaults = {key: argument.default for key, argument in OBSERVERS[name].arguments.items()}
    grid = QuantizationGrid(type=dtype, symmetric=symmetric, narrow=narrow, power_of_two=power_of_two)
    return OBSERVERS[name].choose_range(stats, grid, defaults | arguments)


def distributions() -> dict[str, np.ndarray]:
    """Return values of many distributions, float32 (20000,)."""
    rng = np.random.default_rng(0)
    named_tensors = {
        "normal": rng.normal(size=20000),
        "laplace": rng.laplace(size=20000),
        "cauchy": rng.standard_cauchy(20000),
        "lognormal": rng.lognormal(size=20000),
        "relu": np.maximum(rng.normal(size=20000), 0),
        "constant": np.full(20000, 3.3),
        "tiny range": 5 + rng.uniform(-0.001, 0.001, 20000),
        "pixels": rng.integers(0, 256, 20000) / 255,
    }
    return {name: values.astype(np.float32) for name, values in named_tensors.items()}


TENSORS = distributions()
SCHEMES = [
    (UINT8, False),
    (INT8, True),
    (IntType(4, True), True),
    (IntType(4, False), False),
    (IntType(16, True), True),
]


def error(values: np.ndarray, observed: Range, dtype: IntType, *, symmetric: bool) -> float:
    """Return the mean squared error of the values, in float64."""
    params = choose_qparams(observed, dtype, symmetric=symmetric)
    low, high = (limit - int(params.zero_point) for limit in dtype.limits())
    wide, scale = values.astype(np.float64), float(params.scale)
    return float(np.mean((wide - np.clip(np.rint(wide / scale), low, high) * scale) ** 2))


def least_error(values: np.ndarray, dtype: IntType, *, symmetric: bool) -> float:
    """Return the least mean squared error of the values over a grid of ranges."""
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    shares = np.concatenate([np.geomspace(1, 1 / 64, 40), np.linspace(0.9, 1, 40)])
    pairs = [(a, a) for a in shares]
    if not symmetric and low < 0 < high:
        pairs += [(a, b) for a in shares[:30:2] for b in shares[:30:2]]
    return min(error(values, Range(low * a, high * b), dtype, symmetric=symmetric) for a, b in pairs)


def test_no_finite_value_is_reported() -> None:
    """A sketch without a finite value has no range."""
    nothing = sketch_values(np.array([np.nan, np.inf]))
    for name in ("minmax", "absmax"):
        with pytest.raises(DataError, match="no finite value"):
            observe(name, nothing)


def test_observed_ranges() -> None:
    """The range of minmax is the observed one, that of absmax is symmetric about 0."""
    stats = sketch_values(np.array([[-3.0, 1.0], [2.0, 0.5]]), 0)
    assert observe("minmax", stats) == Range(np.array([-3.0, 0.5]), np.array([1.0, 2.0]))
    assert observe("absmax", stats) == Range(np.array([-3.0, -2.0]), np.array([3.0, 2.0]))


def test_ranges_without_values() -> None:
    """A fixed range and a fixed-point format need no values."""
    assert observe("fixed", EMPTY_SKETCH, low=-1.5, high=6.0) == Range(np.array(-1.5), np.array(6.0))
    assert observe("fixed-point", EMPTY_SKETCH, exponent=-4) == Range(np.array(-8.0), np.array(127 / 16))
    assert observe("fixed-point", EMPTY_SKETCH, narrow=True, exponent=-4) == Range(
        np.array(-127 / 16), np.array(127 / 16)
    )
    assert not OBSERVERS["fixed"].needs_values
    assert not OBSERVERS["fixed-point"].needs_values


@given(st.integers(2, 16), st.booleans(), st.booleans(), st.integers(-126, 100))
def test_fixed_point_has_exactly_that_scale(width: int, signed: bool, narrow: bool, exponent: int) -> None:
    """The symmetric params of a fixed-point range have the scale 2**exponent, for unsigned types too."""
    dtype = IntType(width, signed)
    observed = observe("fixed-point", EMPTY_SKETCH, dtype, narrow=narrow, exponent=exponent)
    assert choose_qparams(observed, dtype, symmetric=True, narrow=narrow).scale == 2.0**exponent


def test_fixed_point_beyond_float32_is_refused() -> None:
    """An exponent whose values exceed float32 raises an error."""
    assert observe("fixed-point", EMPTY_SKETCH, narrow=True, exponent=121).high == 127 * 2.0**121
    for exponent in (122, 126):
        with pytest.raises(DataError, match=rf"int8 .*2\*\*{exponent} "):
            observe("fixed-point", EMPTY_SKETCH, narrow=True, exponent=exponent)


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize(("dtype", "symmetric"), SCHEMES)
def test_mse_on_the_values_themselves(name: str, dtype: IntType, symmetric: bool) -> None:
    """The error of the range from the sketch is at most 1.05 times the least error of a search on the values."""
    values = TENSORS[name]
    observed = observe("mse", sketch_values(values, bits=10), dtype, symmetric=symmetric)
    actual = error(values, observed, dtype, symmetric=symmetric)
    assert actual <= 1.05 * least_error(values, dtype, symmetric=symmetric) + 1e-14


def least_error_of_powers(values: np.ndarray, dtype: IntType, *, symmetric: bool) -> float:
    """Return the least mean squared error of all power-of-two scales, with every zero point that represents 0.0."""
    qmin, qmax = dtype.limits()
    top = int(np.ceil(np.log2(max(np.abs(values).max(), 1e-30)))) + 1
    least = np.inf
    for exponent in range(top - 22, top + 1):
        around = round(-values.min() / 2.0**exponent) + qmin
        near = {min(max(around + off, qmin), qmax) for off in range(-40, 41)} | set(range(qmin, qmax + 1, 16))
        for zero in sorted({dtype.symmetric_zero_point} if symmetric else near):
            params = qparams_from_scale(np.array(2.0**exponent), np.array(zero), dtype)
            dequantized = dequantize(quantize(values, params), params)
            least = min(least, float(np.mean(np.square(dequantized.astype(np.float64) - values))))
    return least


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize(("dtype", "symmetric"), SCHEMES)
def test_mse_among_powers_of_two(name: str, dtype: IntType, symmetric: bool) -> None:
    """With power-of-two scales, the error is at most 1.05 times that of the best scale."""
    values = TENSORS[name]
    observed = observe("mse", sketch_values(values, bits=10), dtype, symmetric=symmetric, power_of_two=True)
    params = choose_qparams(observed, dtype, symmetric=symmetric, power_of_two=True)
    assert np.frexp(params.scale)[0] == 0.5
    actual = float(np.mean(np.square(dequantize(quantize(values, params), params).astype(np.float64) - values)))
    assert actual <= 1.05 * least_error_of_powers(values, dtype, symmetric=symmetric) + 1e-14


@pytest.mark.parametrize("name", TENSORS)
def test_auto_among_powers_of_two(name: str) -> None:
    """The scale is a power of two, at most that of minmax, and clips at most the allowed share."""
    values = TENSORS[name]
    observed = observe("auto", sketch_values(values, bits=10), INT8, power_of_two=True)
    params = choose_qparams(observed, INT8, symmetric=True, power_of_two=True)
    widest = choose_qparams(Range(values.min(), values.max()), INT8, symmetric=True, power_of_two=True)
    assert np.frexp(params.scale)[0] == 0.5
    assert params.scale <= widest.scale
    outside = np.count_nonzero((values < params.range.low) | (values > params.range.high + params.scale / 2))
    assert outside <= values.size / 4**7 + 1


def test_a_power_of_two_too_large_is_halved_where_that_pays() -> None:
    """Values up to 1.1 need a step of 1/64 for minmax. mse chooses 1/128 and clips the one value above 1."""
    values = np.append(np.random.default_rng(0).uniform(-0.95, 0.95, 20000), 1.1).astype(np.float32)
    stats = sketch_values(values, bits=7)
    scales = [
        float(choose_qparams(observe(name, stats, power_of_two=True), INT8, symmetric=True, power_of_two=True).scale)
        for name in ("minmax", "mse", "auto")
    ]
    assert scales == [1 / 64, 1 / 128, 1 / 128]


@pytest.mark.parametrize("name", ["mse", "entropy"])
def test_searches_need_even_steps(name: str) -> None:
    """float8 has no uniform step to search. The reason names alternatives, and auto is minmax."""
    stats = sketch_values(np.linspace(-3, 5, 100, dtype=np.float32), bits=7)
    with pytest.raises(DataError, match=r"float8_e5m2 .*minmax"):
        observe(name, stats, FloatType("float8_e5m2"))
    assert observe("auto", stats, FloatType("float8_e5m2")) == Range(np.array(-3.0), np.array(5.0))


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize(("dtype", "bound"), [(UINT8, 2**-7), (IntType(16, False), 2**-10)])
@pytest.mark.parametrize("percentile", [99.99, 99.0, 50.0])
def test_percentiles_of_the_values_themselves(name: str, dtype: IntType, bound: float, percentile: float) -> None:
    """Each end is within the relative bound of the value with that rank. Half of the share is clipped at each end."""
    values = np.sort(TENSORS[name]).astype(np.float64)
    out = int(values.size * (1 - percentile / 100) / 2 + 1e-6)
    observed = observe("percentile", sketch_values(values, bits=10), dtype, symmetric=False, percentile=percentile)
    for end, true in ((observed.low, values[out]), (observed.high, values[-1 - out])):
        assert abs(end - true) <= bound * abs(true)
    far = np.sort(np.abs(values))[-1 - int(values.size * (1 - percentile / 100) + 1e-6)]
    symmetric_range = observe("percentile", sketch_values(values, bits=10), dtype, percentile=percentile)
    assert symmetric_range.low == -symmetric_range.high
    assert abs(symmetric_range.high - far) <= bound * far


def test_all_values_are_inside_a_percentile_of_100() -> None:
    """No value is clipped: the range is that of minmax, bit for bit if the ends are single values."""
    values = TENSORS["cauchy"]
    observed = observe("percentile", sketch_values(values, bits=7), UINT8, symmetric=False, percentile=100)
    assert observed == Range(np.float64(values.min()), np.float64(values.max()))


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize(("dtype", "symmetric"), SCHEMES)
def test_auto_clips_few(name: str, dtype: IntType, symmetric: bool) -> None:
    """At most 1 of 4**(bits - 1) values is outside of the range; with 16 bits it is minmax."""
    values = TENSORS[name]
    stats = sketch_values(values, bits=10)
    observed = observe("auto", stats, dtype, symmetric=symmetric)
    clipped = np.count_nonzero(
        (values < min(float(observed.low), 0.0) * (1 + 2**-7)) | (values > observed.high * (1 + 2**-7))
    )
    assert clipped <= values.size * 4.0 ** (1 - dtype.bits)
    if dtype.bits == 16:
        assert observed == observe("minmax", stats)


def test_an_outlier_is_clipped_as_far_as_it_pays() -> None:
    """For a million uniform values in [-1, 1] and one of 10, rounding and clipping errors are equal near 3.8."""
    values = np.random.default_rng(1).uniform(-1, 1, 1_000_000).astype(np.float32)
    values[0] = 10.0
    stats = sketch_values(values, bits=7)
    rounding, clipping = 1 / (6 * 255**2), 2e-6  # slopes of ((high + 1) / 255)**2 / 12 and of (10 - high)**2 / 10**6
    best = (10 * clipping - rounding) / (clipping + rounding)
    for name in ("auto", "mse"):
        assert float(observe(name, stats, UINT8, symmetric=False).high) == pytest.approx(best, rel=0.02)
    assert float(observe("percentile", stats, UINT8, symmetric=False).high) == pytest.approx(1, rel=2**-7)
    for name in ("minmax", "mean-minmax"):
        assert float(observe(name, stats, UINT8, symmetric=False).high) == 10.0


def test_mean_of_blocks_is_exact() -> None:
    """Sums that float64 cannot represent give the mean of exact fractions."""
    gathering = SketchAccumulator(bits=7)
    ends = [(-1e-30, 1e30), (-3.0, 1.0), (-0.1, 7.0)]
    for low, high in ends:
        gathering.add(np.array([low, high]))
        gathering.close_block()
    observed = observe("mean-minmax", gathering.to_sketch())
    assert float(observed.low) == float(sum(Fraction(low) for low, _ in ends) / 3)
    assert float(observed.high) == float(sum(Fraction(high) for _, high in ends) / 3)


@pytest.mark.parametrize("name", ["normal", "laplace", "relu"])
def test_entropy_against_onnxruntime(name: str) -> None:
    """The threshold is within a factor of 2 of onnxruntime's, whose bins are fractions of the largest value."""
    calibrate = pytest.importorskip("onnxruntime.quantization.calibrate")
    values = TENSORS[name]
    collector = calibrate.HistogramCollector("entropy", True, 2047, 128, 99.999, "same")
    collector.collect({"x": [values]})
    theirs = float(np.ravel(collector.compute_collection_result()["x"][1])[0])
    ours = float(observe("entropy", sketch_values(values, bits=7)).high)
    assert theirs / 2 < ours < theirs * 2


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize(("dtype", "symmetric"), [(UINT8, False), (INT8, True), (IntType(2, False), False)])
def test_entropy_does_not_depend_on_the_unit(name: str, dtype: IntType, symmetric: bool) -> None:
    """A tensor scaled by a power of two has the scaled range."""
    stats, scaled_stats = (
        sketch_values(values, bits=7) for values in (TENSORS[name], TENSORS[name] * np.float32(1024))
    )
    observed, scaled = (observe("entropy", sketched, dtype, symmetric=symmetric) for sketched in (stats, scaled_stats))
    assert Range(observed.low * 1024, observed.high * 1024) == scaled
    assert min(float(stats.low), 0.0) <= observed.low <= 0.0 <= observed.high <= max(float(stats.high), 0.0)


@pytest.mark.parametrize("name", TENSORS)
def test_entropy_clips_both_ends_at_one_magnitude(name: str) -> None:
    """Both ends have one magnitude, except an end that no value reaches."""
    values = TENSORS[name] * np.where(TENSORS[name] < 0, np.float32(0.25), np.float32(1))
    observed = observe("entropy", sketch_values(values, bits=7), UINT8, symmetric=False)
    magnitude = max(-float(observed.low), float(observed.high))
    assert observed == Range(
        np.array(min(max(-magnitude, float(values.min())), 0.0)), np.array(min(magnitude, float(values.max())))
    )


@pytest.mark.parametrize(
    ("name", "most"), [("normal", 1.001), ("lognormal", 1.001), ("pixels", 1.001), ("tiny range", 1.1)]
)
def test_mse_is_refined(name: str, most: float) -> None:
    """The search ends within 0.1% of the least error of 4,000 ranges, and within 10% where values are nearly equal."""
    stats, grid = sketch_values(TENSORS[name], bits=7), QuantizationGrid(type=INT8, symmetric=True)
    values, largest = distribution_of(stats), np.abs(TENSORS[name]).max()
    tried = Range(*(np.geomspace(1 / 4, 1, 4000) * np.array([[-largest], [largest]])))
    observed = observe("mse", stats)
    chosen = Range(observed.low[None], observed.high[None])
    errors = [values.squared_error(grid.qparams(entry, axis=0)).min() for entry in (chosen, tried)]
    assert errors[0] <= errors[1] * most


def test_entropy_takes_narrow_types_only() -> None:
    """Types above 8 bits raise an error."""
    with pytest.raises(DataError, match=r"8 bits,.* int16"):
        observe("entropy", sketch_values(TENSORS["normal"], bits=10), IntType(16, True))


@pytest.mark.parametrize("name", [name for name, one in OBSERVERS.items() if one.needs_histogram])
def test_statistics_without_a_histogram_are_refused(name: str) -> None:
    """The error names the missing histogram and a remedy."""
    values = TENSORS["normal"].reshape(100, 200)
    with pytest.raises(DataError, match=r"histogram,.*channel.*minmax"):
        observe(name, sketch_values(values, 1, bits=7))
    with pytest.raises(DataError, match=r"needs a histogram"):
        observe(name, sketch_values(values))
    with pytest.raises(DataError, match=r" 7 mantissa bits,.* int16 needs 10"):
        observe(name, sketch_values(values, bits=7), IntType(16, True))
    with pytest.raises(DataError, match="no finite value"):
        observe(name, sketch_values(np.array([np.nan]), bits=7))


def test_a_finer_histogram_than_needed_changes_nothing() -> None:
    """An 8-bit scheme has the same range from statistics of 10 mantissa bits."""
    for name, values in TENSORS.items():
        seven, ten = sketch_values(values, bits=7), sketch_values(values, bits=10)
        assert observe("auto", seven, UINT8, symmetric=False) == observe("auto", ten, UINT8, symmetric=False), name


def test_histogram_bits_of_each_observer() -> None:
    """0, 7 or 10 mantissa bits, by observer and type."""
    assert [OBSERVERS["minmax"].required_bits(dtype) for dtype in (INT8, IntType(16, True))] == [0, 0]
    assert [OBSERVERS["auto"].required_bits(dtype) for dtype in (IntType(4, True), INT8, IntType(9, True))] == [
        7,
        7,
        10,
    ]
    assert OBSERVERS["fixed"].required_arguments == ("low", "high")
    assert OBSERVERS["percentile"].required_arguments == ()

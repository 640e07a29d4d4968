"""Scales, zero points and rounding, compared with onnxruntime and TensorFlow bit for bit."""

import itertools
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from support.measurements import float_bits
from support.qparams import choose_qparams

from graphquant.errors import InternalError, ModelError
from graphquant.numerics import (
    LARGEST_VALUE,
    SMALLEST_SCALE,
    IntType,
    QParams,
    Range,
    broadcast_along_axis,
    dequantize,
    qparams_from_scale,
    quantize,
)

TYPES = {"int8": TensorProto.INT8, "uint8": TensorProto.UINT8}
SCALES = [1e-45, 1e-40, SMALLEST_SCALE, 2.0**-4, 0.1, 1 / 3, 3.7, 1e30, 3e38]
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
schemes = st.fixed_dictionaries(
    {
        "symmetric": st.booleans(),
        "narrow": st.booleans(),
        "power_of_two": st.booleans(),
    }
)
types = st.builds(IntType, st.integers(2, 16), st.booleans())
ranges = st.tuples(floats, floats).map(lambda ends: Range(np.array(min(ends)), np.array(max(ends))))


@pytest.fixture(scope="module")
def sessions():
    """Return cached sessions of one QuantizeLinear or DequantizeLinear each."""
    cache = {}

    def get(op: str, dtype: str, axis: int | None) -> onnxruntime.InferenceSession:
        key = (op, dtype, axis)
        if key not in cache:
            ends = (TensorProto.FLOAT, TYPES[dtype]) if op == "QuantizeLinear" else (TYPES[dtype], TensorProto.FLOAT)
            node = helper.make_node(op, ["x", "s", "z"], ["y"], **({} if axis is None else {"axis": axis}))
            inputs = [("x", ends[0]), ("s", TensorProto.FLOAT), ("z", TYPES[dtype])]
            graph = helper.make_graph(
                [node],
                "one",
                [helper.make_tensor_value_info(name, kind, None) for name, kind in inputs],
                [helper.make_tensor_value_info("y", ends[1], None)],
            )
            model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
            cache[key] = onnxruntime.InferenceSession(model.SerializeToString())
        return cache[key]

    return get


def hard_values(scale: float) -> np.ndarray:
    """Return ties, values around them, signed zeros, the largest and smallest floats, and noise of all magnitudes."""
    rng = np.random.default_rng(0)
    with np.errstate(over="ignore", under="ignore"):
        ties = (np.arange(-600, 601) * 0.5).astype(np.float32) * np.float32(scale)
        noise = rng.normal(size=2000).astype(np.float32) * np.float32(scale) * np.float32(100)
    near = np.concatenate([np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))])
    ends = np.array([0.0, -0.0, 3.4e38, -3.4e38, 1e-45, -1e-45, 1e-38, np.inf, -np.inf], np.float32)
    return np.concatenate([ties, near, noise, ends, rng.normal(size=501).astype(np.float32)])


@pytest.mark.parametrize(("dtype", "scale"), list(itertools.product(TYPES, SCALES)))
def test_per_tensor_like_onnxruntime(sessions, dtype: str, scale: float) -> None:
    """Quantized and dequantized values equal onnxruntime's bit for bit, for each kind of scale."""
    kind = IntType.parse(dtype)
    x = hard_values(scale)
    for zero in (*kind.limits(), kind.symmetric_zero_point, 3):
        params = qparams_from_scale(np.array(scale, np.float32), np.array(zero), kind)
        arguments = {"s": params.scale, "z": params.zero_point.astype(dtype)}
        expected = sessions("QuantizeLinear", dtype, None).run(None, {"x": x, **arguments})[0]
        np.testing.assert_array_equal(quantize(x, params), expected)
        dequantized = sessions("DequantizeLinear", dtype, None).run(None, {"x": expected, **arguments})[0]
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(float_bits(dequantize(expected, params)), float_bits(dequantized))


@pytest.mark.parametrize(("dtype", "axis"), list(itertools.product(TYPES, (0, 1, 2, -1))))
def test_per_axis_like_onnxruntime(sessions, dtype: str, axis: int) -> None:
    """Scales and zero points per channel, on each axis, give onnxruntime's bits."""
    kind = IntType.parse(dtype)
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(5, 7, 11)) * 20).astype(np.float32)
    channels = x.shape[axis]
    scale = np.exp(rng.normal(size=channels)).astype(np.float32)
    zero = rng.integers(*kind.limits(), size=channels)
    params = qparams_from_scale(scale, zero, kind, axis=axis)
    arguments = {"s": params.scale, "z": params.zero_point.astype(dtype)}
    expected = sessions("QuantizeLinear", dtype, axis).run(None, {"x": x, **arguments})[0]
    np.testing.assert_array_equal(quantize(x, params), expected)
    dequantized = sessions("DequantizeLinear", dtype, axis).run(None, {"x": expected, **arguments})[0]
    np.testing.assert_array_equal(float_bits(dequantize(expected, params)), float_bits(dequantized))


@pytest.mark.parametrize(("count", "axis", "block"), [(7, 0, None), (5, 3, None), (5, -4, None), (4, 0, 2)])
def test_scales_of_another_shape(count: int, axis: int, block: int | None) -> None:
    """Scales that do not fit the tensor, as in a damaged model, raise a ModelError."""
    scale, kind = np.ones(count, np.float32), IntType.parse("int8")
    params = qparams_from_scale(scale, np.zeros(count, np.int64), kind, axis=axis, block=block)
    with pytest.raises(ModelError):
        dequantize(np.zeros((5, 7, 11), np.int8), params)


@pytest.mark.parametrize("dtype", TYPES)
def test_chosen_params_like_onnxruntime(sessions, dtype: str) -> None:
    """With params chosen for ordinary ranges, onnxruntime and numpy give the same values."""
    rng = np.random.default_rng(2)
    for low, high in [(-1.0, 1.0), (0.0, 6.0), (-0.3, 11.0), (-7.5, -2.5), (3.0, 4.0), (-3e38, 3e38)]:
        for symmetric, power in itertools.product((True, False), repeat=2):
            params = choose_qparams(
                Range(np.array(low), np.array(high)), IntType.parse(dtype), symmetric=symmetric, power_of_two=power
            )
            x = rng.uniform(low / 1.1, high / 1.1, 997).astype(np.float32)
            arguments = {"s": params.scale, "z": params.zero_point.astype(dtype)}
            expected = sessions("QuantizeLinear", dtype, None).run(None, {"x": x, **arguments})[0]
            np.testing.assert_array_equal(quantize(x, params), expected)
            dequantized = sessions("DequantizeLinear", dtype, None).run(None, {"x": expected, **arguments})[0]
            np.testing.assert_array_equal(float_bits(dequantize(expected, params)), float_bits(dequantized))


def test_nan_becomes_the_smallest_value() -> None:
    """NaN becomes the smallest value, without a numpy warning."""
    params = qparams_from_scale(np.array(1.0), np.array(3), IntType(8, True), narrow=True)
    assert quantize(np.array([np.nan, 1.0], np.float32), params).tolist() == [-127, 4]


@given(ranges, types, schemes)
def test_chosen_params_are_sound(observed: Range, dtype: IntType, scheme: dict[str, bool]) -> None:
    """Zero is exact, the zero point is in the type's range, and each quantized value is a finite float32."""
    params = choose_qparams(observed, dtype, **scheme)
    qmin, qmax = dtype.limits(narrow=scheme["narrow"])
    assert qmin <= params.zero_point <= qmax
    assert params.scale >= SMALLEST_SCALE
    if scheme["symmetric"]:
        assert params.zero_point == dtype.symmetric_zero_point
    assert float_bits(dequantize(quantize(np.zeros(1, np.float32), params), params)).tolist() == [0]
    ends = dequantize(np.array([qmin, qmax]), params)
    assert np.isfinite(ends).all()
    assert np.isfinite(np.array([params.range.low, params.range.high], np.float32)).all()
    assert params.range.low <= 0.0 <= params.range.high
    if scheme["power_of_two"]:
        assert np.frexp(params.scale)[0] == 0.5


@given(ranges, types, schemes, st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_round_trip_is_within_half_a_step(observed, dtype, scheme, positions) -> None:
    """Values inside the observed range change by at most half a scale, up to float32 rounding."""
    params = choose_qparams(observed, dtype, **scheme)
    share = np.array(positions)
    x = (observed.low * (1 - share) + observed.high * share).astype(np.float32)
    x = np.clip(x, np.float32(params.range.low), np.float32(params.range.high))
    error = np.abs(dequantize(quantize(x, params), params).astype(np.float64) - x)
    steps = max(abs(params.range.low), abs(params.range.high)) / float(params.scale)
    assert (error <= float(params.scale) * (0.5 + steps * 2.0**-22)).all()


@given(ranges, types, schemes)
def test_the_range_covers_what_was_observed(observed: Range, dtype: IntType, scheme: dict[str, bool]) -> None:
    """Symmetric ranges contain the observed one; asymmetric ones up to half a step, since the zero point is rounded."""
    params = choose_qparams(observed, dtype, **scheme)
    if max(-observed.low, observed.high) > LARGEST_VALUE / 4:
        return  # the finite-float32 limit may take a step off
    scale = float(params.scale)
    slack = 1e-6 * max(-observed.low, observed.high) + (0.0 if scheme["symmetric"] else 0.5 * scale)
    assert params.range.low - slack <= observed.low
    assert params.range.high + slack >= observed.high
    if scheme["power_of_two"] and scheme["symmetric"]:
        assert params.range.low <= observed.low <= observed.high <= params.range.high
        middle, (qmin, qmax) = dtype.symmetric_zero_point, dtype.limits(narrow=scheme["narrow"])
        half = scale / 2  # the next smaller power of two does not cover it
        covered = (qmin - middle) * half <= observed.low and observed.high <= (qmax - middle) * half
        assert not covered or scale in {1.0, SMALLEST_SCALE}


@given(ranges, types, schemes, st.lists(floats, min_size=2, max_size=30))
def test_quantize_is_monotone(observed, dtype, scheme, values) -> None:
    """A larger float never becomes a smaller integer."""
    params = choose_qparams(observed, dtype, **scheme)
    integers = quantize(np.sort(np.array(values, np.float32)), params)
    assert (np.diff(integers) >= 0).all()


@given(types, schemes, st.integers(-100, 100))
def test_dequantize_then_quantize_gives_the_integers_back(dtype, scheme, exponent) -> None:
    """Every quantized value is unchanged after dequantizing and quantizing."""
    params = choose_qparams(Range(np.array(-1.3 * 2.0**exponent), np.array(2.0**exponent)), dtype, **scheme)
    qmin, qmax = dtype.limits(narrow=scheme["narrow"])
    integers = np.unique(np.linspace(qmin, qmax, 300).round().astype(np.int64))
    np.testing.assert_array_equal(quantize(dequantize(integers, params), params), integers)


@pytest.mark.parametrize(
    ("low", "high", "symmetric", "scale", "zero"),
    [
        (-1.0, 1.0, True, np.float32(1 / 127), 0),
        (-1.28, 0.5, True, np.float32(1.28 / 128), 0),
        (0.0, 2.55, False, np.float32(0.01), -128),
        (-2.55, 0.0, False, np.float32(0.01), 127),
        (5.0, 10.0, False, np.float32(10 / 255), -128),
        (-10.0, -5.0, False, np.float32(10 / 255), 127),
        (0.0, 0.0, False, np.float32(1.0), -128),
        (0.0, 0.0, True, np.float32(1.0), 0),
        (0.0, 1e-45, True, np.float32(SMALLEST_SCALE), 0),
        (-1e-45, 1e-45, False, np.float32(SMALLEST_SCALE), -128),
    ],
)
def test_worked_int8_values(low: float, high: float, symmetric: bool, scale: np.float32, zero: int) -> None:
    """Scales and zero points computed by hand, including ranges of one sign and tiny ranges."""
    params = choose_qparams(Range(np.array(low), np.array(high)), IntType(8, True), symmetric=symmetric)
    assert (params.scale, params.zero_point) == (scale, zero)


@pytest.mark.parametrize("limit", [3e38, LARGEST_VALUE, 1e308])
def test_the_largest_ranges_do_not_overflow(limit: float) -> None:
    """Ranges up to the limit of float32, and larger float64 ranges, have finite scales and values."""
    for symmetric, power in itertools.product((True, False), repeat=2):
        for dtype in (IntType(8, True), IntType(8, False), IntType(16, True)):
            params = choose_qparams(
                Range(np.array(-limit), np.array(limit)), dtype, symmetric=symmetric, power_of_two=power
            )
            assert np.isfinite(dequantize(np.array(dtype.limits()), params)).all()
            assert params.range.high >= min(limit, LARGEST_VALUE) / (4 if power else 1.02)


@pytest.mark.parametrize(("bits_", "exponent"), [(8, -4), (8, 0), (8, 3), (16, -12)])
def test_fixed_point_values(bits_: int, exponent: int) -> None:
    """A narrow range of plus and minus (2^(n-1) - 1) * 2^d has the scale 2^d exactly."""
    largest = (2 ** (bits_ - 1) - 1) * 2.0**exponent
    params = choose_qparams(
        Range(np.array(-largest), np.array(largest)), IntType(bits_, True), symmetric=True, narrow=True
    )
    assert params.scale == 2.0**exponent
    assert params.zero_point == 0
    assert (params.range.low, params.range.high) == (-largest, largest)


def test_per_channel_is_each_channel_alone() -> None:
    """Arrays of ranges give the same as their entries one by one."""
    low, high = np.array([-1.0, 0.0, -5.0, 0.0]), np.array([2.0, 6.0, -1.0, 0.0])
    for symmetric, power in itertools.product((True, False), repeat=2):
        arguments = {"symmetric": symmetric, "power_of_two": power}
        together = choose_qparams(Range(low, high), IntType(8, False), axis=1, **arguments)
        separate_params = [
            choose_qparams(Range(a, b), IntType(8, False), **arguments) for a, b in zip(low, high, strict=True)
        ]
        assert together.scale.tolist() == [params.scale for params in separate_params]
        assert together.zero_point.tolist() == [params.zero_point for params in separate_params]
        assert together.range == Range(
            np.array([params.range.low for params in separate_params]),
            np.array([params.range.high for params in separate_params]),
        )


def test_along_puts_channels_on_their_axis() -> None:
    """Per-channel values broadcast along their axis; a scalar is unchanged."""
    assert broadcast_along_axis(np.arange(3), 1, 4).shape == (1, 3, 1, 1)
    assert broadcast_along_axis(np.arange(3), -1, 2).shape == (1, 3)
    assert broadcast_along_axis(np.array(2.0), None, 4).shape == ()


@pytest.mark.parametrize("name", ["int1", "uint32", "int33", "float32", "int", "Int8", "int8 "])
def test_other_names_are_no_integer_types(name: str) -> None:
    """An invalid or too wide type raises an error that lists the possible types."""
    with pytest.raises(ValueError, match="int2 to int32"):
        IntType.parse(name)


def test_limits_and_containers() -> None:
    """Limits, also narrow ones, and containers of odd widths."""
    assert IntType.parse("int8").limits() == (-128, 127)
    assert IntType.parse("int8").limits(narrow=True) == (-127, 127)
    assert IntType.parse("uint6").limits(narrow=True) == (0, 63)
    assert [IntType(width, False).container for width in (2, 5, 12, 17)] == ["uint4", "uint8", "uint16", "uint32"]
    assert IntType(5, True).name == "int5"


def test_impossible_ranges_and_params_are_faults() -> None:
    """Inconsistent ranges and params raise an InternalError."""
    for low, high in [(1.0, 0.0), (np.nan, 1.0), (0.0, np.inf)]:
        with pytest.raises(InternalError, match="low > high"):
            Range(np.array(low), np.array(high))
    with pytest.raises(InternalError, match=r"\(2,\) and \(\)"):
        Range(np.zeros(2), np.array(1.0))
    with pytest.raises(InternalError, match=r"scale .*positive"):
        QParams(scale=np.array(0.0), zero_point=np.array(0), type=IntType(8, True))
    with pytest.raises(InternalError, match="do not agree"):
        QParams(scale=np.ones(2), zero_point=np.zeros(2), type=IntType(8, True))


FAKE_QUANT = """
import sys
import numpy as np, tensorflow as tf
from graphquant.numerics import IntType, QuantizationGrid, Range, dequantize, quantize
rng = np.random.default_rng(3)
worst = 0
for _ in range(150):
    ends = np.sort(rng.normal(size=2) * np.exp(rng.normal() * 4))
    bits, narrow = int(rng.integers(2, 17)), bool(rng.integers(2))
    signed, power = bool(rng.integers(2)), bool(rng.integers(2))
    narrow = narrow and signed  # FakeQuant's narrow excludes the smallest value of any type
    dtype = IntType(bits, signed)
    for symmetric in (True, False):
        grid = QuantizationGrid(type=dtype, symmetric=symmetric, narrow=narrow, power_of_two=power)
        params = grid.qparams(Range(*ends))
        low, high = np.float32(params.range.low), np.float32(params.range.high)
        qmin, qmax = dtype.limits(narrow=narrow)
        scale = (high - low) / np.float32(qmax - qmin)
        assert abs(scale - params.scale) <= 1e-6 * params.scale, (scale, params)
        if power and bits <= 16:
            assert scale == params.scale, (scale, params)
        x = rng.uniform(ends[0] * 1.2 - 1e-3, ends[1] * 1.2 + 1e-3, 500).astype(np.float32)
        steps = x.astype(np.float64) / params.scale
        x = x[np.abs(steps - np.floor(steps) - 0.5) > 1e-4 * max(1, 2.0 ** (bits - 10))]  # ties round differently
        theirs = tf.quantization.fake_quant_with_min_max_vars(x, low, high, num_bits=bits, narrow_range=narrow).numpy()
        ours = dequantize(quantize(x, params), params)
        ulp = np.spacing(np.maximum(np.abs(ours), np.abs(theirs)).astype(np.float32))
        far = max(abs(low), abs(high))
        allowed = 2 * ulp + far * 2.0**-22  # their scale is recomputed from the two ends in float32
        assert (np.abs(theirs - ours) <= allowed).all(), (params, np.abs(theirs - ours).max() / params.scale)
        if power:
            assert (theirs == ours).all()
print("agreed")
"""


@pytest.mark.slow
def test_dequantized_values_like_tensorflow() -> None:
    """FakeQuant with the range of our params gives our values and scale, exactly for powers of two, except for ties."""
    process = subprocess.run([sys.executable, "-c", FAKE_QUANT], capture_output=True, text=True, check=False)
    assert process.stdout == "agreed\n", process.stderr[-2000:]


@settings(max_examples=30)
@given(st.integers(2, 16), st.booleans(), st.integers(-60, 60))
def test_from_scale_range_is_the_represented_one(width: int, signed: bool, exponent: int) -> None:
    """The range of known params is that of their smallest and largest integers."""
    dtype = IntType(width, signed)
    qmin, qmax = dtype.limits()
    params = qparams_from_scale(np.array(2.0**exponent), np.array(qmax - 1), dtype)
    assert params.range.low == (qmin - qmax + 1) * 2.0**exponent
    assert params.range.high == 2.0**exponent

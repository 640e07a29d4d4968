"""QuantizeAndDequantize in numpy: examples, values of TensorFlow's own tests, errors and ranges to write."""

import numpy as np
import pytest
from reference import quantize_and_dequantize as qad

from graphquant.errors import InternalError, UsageError
from graphquant.numerics import IntType, QParams, Range, qparams_from_scale, tf_ranges

FLOAT_1 = np.float32(1)
FLOAT_7 = [-1, -0.5, 0, 0.3, 0.8, 0.555, 0.50390625]
FLOAT_8 = [-0.8, -0.5, 0, 0.3, 0.8, 0.555, -2, 33]
FLOAT_4 = [-0.5, 0, 0.3, 0.8]

# What quantize_and_dequantize_op_test.cc and unary_ops_test.py expect of an
# input, range or None, arguments, and the output as integers by a divisor.
VECTORS = [
    ([-3.5], None, {}, [-128], 128 / 3.5),
    (FLOAT_7, None, {}, [-128, -64, 0, 38, 102, 71, 64], 128),
    (FLOAT_7, None, {"round_mode": "HALF_UP"}, [-128, -64, 0, 38, 102, 71, 65], 128),
    (FLOAT_7, None, {"round_mode": "HALF_UP", "narrow_range": True}, [-127, -63, 0, 38, 102, 70, 64], 127),
    (FLOAT_7, None, {"narrow_range": True}, [-127, -64, 0, 38, 102, 70, 64], 127),
    ([-1, -0.5, 0, 0.3125, 0.8, 0.555], None, {"num_bits": 4}, [-8, -4, 0, 2, 6, 4], 8),
    ([-1, -0.5, 0, 0.3125, 0.8, 0.555], None, {"num_bits": 4, "round_mode": "HALF_UP"}, [-8, -4, 0, 3, 6, 4], 8),
    (FLOAT_8, (-1, 1), {}, [-102, -64, 0, 38, 102, 70, -128, 127], 127),
    (FLOAT_8, (-1, 1), {"round_mode": "HALF_UP"}, [-102, -63, 0, 38, 102, 70, -128, 127], 127),
    (FLOAT_4, (0, 1), {"signed_input": False}, [0, 0, 76, 204], 255),
    (FLOAT_4, (0, 1), {"signed_input": False, "round_mode": "HALF_UP"}, [0, 0, 77, 204], 255),
    ([0, 0, 0, 0], None, {"signed_input": False}, [0, 0, 0, 0], 1),
    ([-1, -0.5, 0, 0.3], None, {}, [-128, -64, 0, 38], 128),
    ([-0.8, -0.4, 0, 0.3, 0.8, -2, 33], (-1, 1), {}, [-102, -51, 0, 38, 102, -128, 127], 127),
]


@pytest.mark.parametrize(("x", "ends", "arguments", "integers", "divisor"), VECTORS)
def test_vectors_of_tensorflow(x, ends, arguments, integers, divisor) -> None:
    """V2, V4 and, if they can, V1 and V3 give the values of TensorFlow's tests in both types."""
    for dtype in (np.float32, np.float64):
        values, expected = np.array(x, dtype), np.array(integers) / divisor
        options = {"range_given": ends is not None, **arguments}
        low, high = ends or (0, 0)
        results = [
            qad.quantize_and_dequantize_v2(values, low, high, **options),
            qad.quantize_and_dequantize_v4(values, low, high, **options),
        ]
        if "round_mode" not in arguments:
            bits = options.pop("num_bits", 8)
            results.append(qad.quantize_and_dequantize_v3(values, low, high, bits, **options))
            if "narrow_range" not in arguments:
                results.append(
                    qad.quantize_and_dequantize_v1(values, num_bits=bits, input_min=low, input_max=high, **options)
                )
        for actual in results:
            assert actual.dtype == dtype
            np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


def sliced(values, axis: int, sizes=(2, 3, 4, 5)) -> np.ndarray:
    """Repeat `values`, times 1, 2, ... along `axis`."""
    tensor = np.resize(np.array(values, np.float32), sizes)
    if axis == -1:
        return tensor
    shape = [1] * 4
    shape[axis] = -1
    return tensor * np.arange(1, tensor.shape[axis] + 1, dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("axis", [-1, 0, 1, 2, 3])
def test_vectors_of_tensorflow_along_an_axis(axis: int) -> None:
    """The values of array_ops_test.py are exact per channel. V3 gives the same for a given range."""
    x = sliced([-1, -0.5, 0, 0.3, 0.8, 0.555, 0.5], axis)
    expected = sliced([-1, -0.5, 0, 38 / 128, 102 / 128, 71 / 128, 0.5], axis)
    np.testing.assert_array_equal(qad.quantize_and_dequantize_v4(x, round_mode="HALF_UP", axis=axis), expected)
    rows = x.reshape(1, -1) if axis == -1 else np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
    low, high = rows.min(axis=1), rows.max(axis=1)
    ends = (low[0], high[0]) if axis == -1 else (low, high)
    np.testing.assert_array_equal(qad.quantize_and_dequantize_v3(x, *ends, 8, axis=axis), expected)


# What quantize_and_dequantize_op_test.cc expects of slices of SEVEN times 1, 2, ...: sizes, arguments, output as above.
SLICES = [
    ((2, 3, 4, 5), {}, [-128, -64, 0, 38, 102, 71, 64], 128),
    ((5, 7, 11, 13), {"round_mode": "HALF_UP"}, [-128, -64, 0, 38, 102, 71, 65], 128),
    ((2, 3, 4, 5), {"round_mode": "HALF_UP", "narrow_range": True}, [-127, -63, 0, 38, 102, 70, 64], 127),
    ((2, 3, 4, 5), {"narrow_range": True}, [-127, -64, 0, 38, 102, 70, 64], 127),
]


@pytest.mark.parametrize("axis", [-1, 1, 3])
@pytest.mark.parametrize(("sizes", "arguments", "integers", "divisor"), SLICES)
def test_slice_vectors_of_tensorflow(sizes, arguments, integers, divisor, axis: int) -> None:
    """V2, V4 and V3 give the parametrized values of TensorFlow's kernel test along each axis."""
    x = sliced(FLOAT_7, axis, sizes)
    expected = sliced(np.array(integers) / divisor, axis, sizes)
    results = [
        qad.quantize_and_dequantize_v2(x, axis=axis, **arguments),
        qad.quantize_and_dequantize_v4(x, axis=axis, **arguments),
    ]
    if "round_mode" not in arguments:
        results.append(qad.quantize_and_dequantize_v3(x, 0, 0, 8, range_given=False, axis=axis, **arguments))
    for actual in results:
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("axis", [-1, 1, 3])
def test_gradient_vector_of_tensorflow(axis: int) -> None:
    """Gradients pass within the range of each channel; the range has none."""
    upstream = sliced([1, -2, -3, 4, 5, 6, -7, -8, -9, -10, 11], axis)
    x = sliced([-1, -0.5, 0, 0.3, 0.8, 0.55, 0.6], axis)
    high = np.float32(0.8) + np.arange(1 if axis == -1 else x.shape[axis], dtype=np.float32) * np.float32(0.4)
    high = high[0] if axis == -1 else high
    passed, low_gradient, high_gradient = qad.quantize_and_dequantize_v4_gradient(upstream, x, -high, high, axis=axis)
    wide = high if axis == -1 else high.reshape([-1 if at == axis else 1 for at in range(4)])
    np.testing.assert_array_equal(passed, np.where((x >= -wide) & (x <= wide), upstream, 0))
    assert np.shape(low_gradient) == np.shape(high_gradient) == np.shape(high)
    assert not np.any(low_gradient)
    assert not np.any(high_gradient)


def test_worked_ranges() -> None:
    """The documented examples: [-10, 5] steps by 1 / 12.8 and ends at 9.921875, [-10, 10] starts at -10.07874."""
    scaled_range = qad.adjust_range(np.float64(-10), np.float64(5), num_bits=8, signed=True, narrow=False)
    assert (scaled_range.inverse_scale, scaled_range.scale, scaled_range.low, scaled_range.high) == (
        12.8,
        10 / 128,
        -10,
        9.921875,
    )
    scaled_range = qad.adjust_range(np.float64(-10), np.float64(10), num_bits=8, signed=True, narrow=False)
    assert (scaled_range.inverse_scale, scaled_range.high) == (12.7, 10)
    assert scaled_range.low == pytest.approx(-10.07874, abs=1e-5)
    narrow = qad.adjust_range(FLOAT_1 * -10, FLOAT_1 * 10, num_bits=8, signed=True, narrow=True)
    assert (narrow.low, narrow.high) == (-10, 10)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
def test_scale_range_equals_the_reference(dtype: type, signed: bool, narrow: bool) -> None:
    """The scale of a range is that of the reference, which TensorFlow's kernels confirm, bit for bit."""
    rng = np.random.default_rng(0)
    edges = np.array([0.0, -0.0, 1e-45, -1e-40, 1e-38, -1e-38, 3e38, -3e38, 1.0, -1.0, np.inf, -np.inf], dtype)
    ends = np.concatenate([edges, (rng.normal(size=60) * 10.0 ** rng.uniform(-6, 6, 60)).astype(dtype)])
    low, high = (side.ravel() for side in np.meshgrid(ends, ends))
    for num_bits in (1, 2, 5, 8, 16, 24):
        scale = tf_ranges.scale_range(low, high, num_bits=num_bits, signed=signed, narrow=narrow)
        expected = qad.adjust_range(low, high, num_bits=num_bits, signed=signed, narrow=narrow).scale
        np.testing.assert_array_equal(scale.view(np.uint8), expected.view(np.uint8))


def test_rounding_and_zero() -> None:
    """Half a step rounds up or to even, 0.0 keeps its sign, and narrow has no effect on unsigned integers."""
    x = np.array([7.5, -7.5, 6.5, -0.0, 0.0], np.float32)
    up = qad.quantize_and_dequantize_v2(x, -128, 127, range_given=True, round_mode="HALF_UP")
    even = qad.quantize_and_dequantize_v2(x, -128, 127, range_given=True)
    assert up.tolist() == [8, -7, 7, 0, 0]
    assert even.tolist() == [8, -8, 6, 0, 0]
    assert np.signbit(even).tolist() == [False, True, False, True, False]
    unsigned = {"signed_input": False, "range_given": True}
    np.testing.assert_array_equal(
        qad.quantize_and_dequantize_v2(x, 0, 6, **unsigned),
        qad.quantize_and_dequantize_v2(x, 0, 6, narrow_range=True, **unsigned),
    )
    assert qad.quantize_and_dequantize_v2(x, 0, 0, range_given=True).tolist() == [0, 0, 0, 0, 0]


def test_gradient_counts_the_given_range() -> None:
    """Gradients pass in the given range, including both ends, and not in the wider adjusted range."""
    x = np.array([-10.05, -10, 3, 5, 7], np.float32)
    passed, *_ = qad.quantize_and_dequantize_v4_gradient(np.full(5, 2.0), x, -10.0, 5.0)
    assert passed.tolist() == [0, 2, 2, 2, 0]
    assert qad.straight_through_gradient([1.0, 2.0]).tolist() == [1, 2]


def test_denormals_are_zeros() -> None:
    """Denormal values, ranges and steps are zeros, as in TensorFlow's threads."""
    x = np.array([1e-39, -1e-39, 2.0], np.float32)
    assert qad.quantize_and_dequantize_v2(x, 0.0, 2.0, range_given=True).tolist() == [0, 0, 2]
    assert qad.quantize_and_dequantize_v2(x[:2]).tolist() == [0, 0]
    assert np.signbit(qad.quantize_and_dequantize_v2(x[:2])).tolist() == [
        True,
        False,
    ]  # the step is -0.0, the last of the two
    assert not qad.quantize_and_dequantize_v2(np.array([1e-37], np.float32), num_bits=16).any()  # a step would be 3e-42


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nan_without_a_range(dtype: type) -> None:
    """A NaN among the last values, which fill no register of 32 bytes, affects all values; elsewhere only itself."""
    for count, at, spoilt in [
        (3, 2, True),
        (8, 7, False),
        (9, 8, True),
        (9, 3, False),
        (33, 32, True),
        (64, 63, False),
    ]:
        x = np.linspace(-1, 1, count).astype(dtype)
        x[at] = np.nan
        lost = np.isnan(qad.quantize_and_dequantize_v2(x))
        assert lost.all() if spoilt else lost.sum() == 1, (count, at)
    x = np.array([[-4, np.nan, 1], [8, 1, 2]], dtype)  # per channel, what came before the NaN is forgotten
    assert qad.quantize_and_dequantize_v2(x, axis=0)[0].tolist()[::2] == [-4, 1]
    assert qad.quantize_and_dequantize_v2(x, axis=0, num_bits=2, narrow_range=True)[0, 0] == -4


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...]) -> None:
    """A scalar and empty tensors keep their shape and type, with and without a range."""
    x = np.full(shape, 0.5, np.float32)
    for range_given in (True, False):
        actual = qad.quantize_and_dequantize_v2(x, -1, 1, range_given=range_given)
        assert actual.shape == shape
        assert actual.dtype == np.float32
    for axis in range(len(shape)):
        assert qad.quantize_and_dequantize_v2(x, axis=axis).shape == shape


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: qad.quantize_and_dequantize_v2(np.ones(2, np.float16)), "no CPU kernel for float16"),
        (lambda: qad.quantize_and_dequantize_v2(np.ones(2), 1.0, 0.0, range_given=True), "range is 1.0 to 0.0"),
        (lambda: qad.quantize_and_dequantize_v2(np.ones(2), np.nan, 0.0, range_given=True), "no NaN"),
        (
            lambda: qad.quantize_and_dequantize_v1(np.ones(2), input_min=5.0, input_max=-10.0, range_given=True),
            "range is 5.0 to -10.0",
        ),
        (lambda: qad.quantize_and_dequantize_v2(np.ones(2), num_bits=62), "1 to 61 bits .* signed"),
        (lambda: qad.quantize_and_dequantize_v3(np.ones(2), 0, 1, 63, signed_input=False), "1 to 62 bits .* unsigned"),
        (lambda: qad.quantize_and_dequantize_v2(np.ones(2), num_bits=0), "num_bits is 0"),
        (lambda: qad.quantize_and_dequantize_v2(np.ones(2), round_mode="HALF_DOWN"), "HALF_TO_EVEN or HALF_UP"),
        (lambda: qad.quantize_and_dequantize_v2(np.ones(2), axis=1), "axis is 1 .* 1 axes"),
        (lambda: qad.quantize_and_dequantize_v3(np.ones((2, 2)), 0, 1, 8, axis=-2), "Count from 0"),
        (
            lambda: qad.quantize_and_dequantize_v3(np.ones((2, 2)), 0, 0, 8, range_given=False, axis=-(2**31)),
            "Count from 0",
        ),
        (lambda: qad.quantize_and_dequantize_v2([2.5, 2.5], axis=10), "axis is 10 .* 1 axes"),
        (
            lambda: qad.quantize_and_dequantize_v4(np.ones(1), 1, 10, num_bits=1, range_given=True, axis=2**31 - 1),
            "axis is 2147483647 .* 1 axes",
        ),
        (lambda: qad.quantize_and_dequantize_v3(np.float32(1), 0, 1, 8), "takes no scalar"),
        (
            lambda: qad.quantize_and_dequantize_v2(np.ones((2, 3)), [0, 0], [1, 1], range_given=True, axis=1),
            r"both must be \(3,\)",
        ),
        (lambda: qad.quantize_and_dequantize_v2(np.ones(2), [0], [1], range_given=True), r"both must be \(\)"),
        (lambda: qad.quantize_and_dequantize_v4_gradient(np.ones(3), np.ones(2), 0, 1), "Give both one shape"),
    ],
)
def test_refusals(call, message: str) -> None:
    """Cases that the kernels reject or crash on raise a UsageError."""
    with pytest.raises(UsageError, match=message):
        call()


def target_params(scale, bits: int, *, signed: bool = True, narrow: bool = False, zero: int = 0) -> QParams:
    """Return params with a scale, per channel if it is an array."""
    scale = np.asarray(scale, np.float32)
    axis = 0 if scale.ndim else None
    return qparams_from_scale(scale, np.full(scale.shape, zero), IntType(bits, signed), narrow=narrow, axis=axis)


def size_of(params: QParams) -> np.ndarray:
    """Return the step of the op in the range that is written for `params`."""
    ends = tf_ranges.range_for_quantize_and_dequantize(params)
    low, high = ends.low.astype(np.float32), ends.high.astype(np.float32)
    np.testing.assert_array_equal((low, high), (ends.low, ends.high))  # it is a range of float32 numbers
    kind = params.type
    return tf_ranges.scale_range(low, high, num_bits=kind.bits, signed=kind.signed, narrow=params.narrow)


@pytest.mark.parametrize("bits", [2, 4, 8, 11, 16])
def test_ranges_to_write_give_the_scale(bits: int) -> None:
    """Scales of signed integers and powers of two are exact; other scales differ at most in the last place."""
    rng = np.random.default_rng(bits)
    scales = np.exp(rng.uniform(-60, 60, 2000)).astype(np.float32)
    np.testing.assert_array_equal(size_of(target_params(scales, bits)), scales)
    powers = np.float32(2) ** np.arange(-100, 100, dtype=np.float32)
    for kind in ({"signed": True, "narrow": True}, {"signed": False}):
        np.testing.assert_array_equal(size_of(target_params(powers, bits, **kind)), powers)
        actual = size_of(target_params(scales, bits, **kind))
        assert (np.abs(actual - scales) <= np.spacing(scales)).all()
        assert (actual == scales).mean() > 0.7
    assert size_of(target_params(0.1, bits)) == np.float32(0.1)


def test_ranges_to_write_need_zero_point_0() -> None:
    """A zero point other than 0 raises an error."""
    with pytest.raises(InternalError, match="zero point"):
        tf_ranges.range_for_quantize_and_dequantize(target_params(0.5, 8, zero=3))


def test_params_of_a_range() -> None:
    """A range gives the op's scale, in float32 and per channel. A range without a step raises an error."""
    kind = IntType(8, signed=True)
    actual = tf_ranges.quantize_and_dequantize_params(Range(np.array(-10.0), np.array(5.0)), kind)
    assert (actual.scale, actual.zero_point, actual.range.high) == (np.float32(0.078125), 0, 9.921875)
    actual = tf_ranges.quantize_and_dequantize_params(
        Range(np.array([-0.1, -3]), np.array([0.1, 1])), kind, narrow=True, axis=1
    )
    assert actual.scale.tolist() == [np.float32(0.1) / np.float32(127), np.float32(3) / np.float32(127)]
    written = tf_ranges.range_for_quantize_and_dequantize(actual)
    assert (
        tf_ranges.quantize_and_dequantize_params(written, kind, narrow=True, axis=1).scale.tolist()
        == actual.scale.tolist()
    )
    with pytest.raises(UsageError, match=r"range 0.0 to 0.0"):
        tf_ranges.quantize_and_dequantize_params(Range(np.array(0.0), np.array(0.0)), kind)
    with pytest.raises(UsageError, match=r"range -2.0 to -1.0"):
        tf_ranges.quantize_and_dequantize_params(Range(np.array(-2.0), np.array(-1.0)), IntType(8, signed=False))
